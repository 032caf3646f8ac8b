"""Going back to the newest intact checkpoint: what a resume does before anything runs, real or simulated.

Guarantees: what was trained after the checkpoint is journalled as rolled back and leaves the store; what the checkpoint's
buffer holds is back in it; everything else that was in flight ends as failed, with a cause; later checkpoints are gone. A
run that was killed before its first checkpoint begins anew in the same journal. A journal with less than the checkpoint claims
is refused before anything is changed; one that a power cut tore after that is cut there, and said so.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Protocol

from orchestrator.api import Trajectory
from orchestrator.checkpoint import Checkpoints, CheckpointState
from orchestrator.components import Position
from orchestrator.ledger import Ledger, intact_lines


class Journal(Protocol):
    """The lines of a ledger, as they are."""

    def lines(self) -> Iterable[str]: ...

    def keep(self, lines: int, /) -> None:
        """Cut off what comes after so many."""


@dataclass(frozen=True)
class _Lines:
    """The first ``count`` lines of a journal; they can be read again."""

    journal: Journal
    count: int

    def __iter__(self) -> Iterator[str]:
        return islice(self.journal.lines(), self.count)


class Rewindable(Protocol):
    """A trajectory store that can forget."""

    def discard_after(self, steps_done: int, /) -> object: ...


@dataclass(frozen=True)
class Resumed:
    """Where the run goes on. ``checkpoint`` is None when there was none; ``damaged`` says which were skipped and why, ``cut``
    what was cut off the journal."""

    checkpoint: Path | None
    position: Position
    damaged: tuple[str, ...]
    elapsed: float = 0.0  # seconds of the run at the checkpoint
    cut: str = ""
    rolled_back: int = 0  # steps after it that were trained, and are trained again
    dropped: int = 0  # trajectories that were trained in them

    @property
    def step(self) -> int:
        """Training steps done."""
        return self.position.step

    def words(self, steps: int) -> str:
        """Where the run, of so many steps, continues; for people."""
        begun = (
            f"from its checkpoint after step {self.step:,}"
            if self.checkpoint is not None
            else "from the start: there is no checkpoint"
        )
        lost = f"; {self.rolled_back:,} later steps ({self.dropped:,} trajectories) are rolled back and trained again"
        return f"continuing {begun}, of {steps:,} steps{lost if self.rolled_back else ''}"


def remember(resumed: Resumed, stored: Iterable[Trajectory], last: int) -> None:
    """What filters had kept when the checkpoint was written, ``last`` of each task: ``stored`` (scored by then) and what waited
    in the buffer."""
    known = {trajectory.id: trajectory for trajectory in (*stored, *resumed.position.buffered)}
    by_task: dict[str, list[Trajectory]] = {}
    for trajectory in sorted(known.values(), key=lambda one: (one.scored_at, one.id)):
        by_task.setdefault(trajectory.task, []).append(trajectory)
    resumed.position.kept = tuple(one for of_task in by_task.values() for one in of_task[-last:])


def rewind(checkpoints: Checkpoints, ledger: Ledger, journal: Journal, store: Rewindable, life: int) -> Resumed:
    """Go back; ``life``: the number of the life that begins. Raises RunError when there are checkpoints but none is intact, and
    when the journal does not hold what the checkpoint claims."""
    found = checkpoints.newest()
    folder, state, damaged = found if found is not None else (None, CheckpointState(0, 0, 0, 0.0, ()), [])
    kept, problem = intact_lines(journal.lines(), state.journal_sequence)
    cut = ""
    if problem:
        cut = f"{sum(1 for _ in journal.lines()) - kept} lines of the journal were cut off: {problem}"
        journal.keep(kept)
    checkpoints.drop_after(state.step)
    returned = set(ledger.restore(_Lines(journal, kept), state.step, {trajectory.id for trajectory in state.buffer}))
    store.discard_after(state.step)
    position = Position(
        state.step,
        state.version,
        life,
        ledger.groups_started,
        ledger.counts.started,
        buffered=tuple(trajectory for trajectory in state.buffer if trajectory.id in returned),
        success_history=list(state.success_history),
        lost=ledger.groups_lost,
        run_times=state.run_times,
        rounds=state.rounds,
        degrees=state.degrees,
        entropies=state.entropies,
        redundancy=state.redundancy,
    )
    lost = ledger.rolled_back
    return Resumed(folder, position, tuple(damaged), state.elapsed, cut, len(lost), lost.total())
