"""Going back to the newest intact checkpoint: what a resume does before anything runs, real or simulated.

Guarantees: what was trained after the checkpoint is journalled as rolled back and leaves the store; what the checkpoint's
buffer holds is back in it; everything else that was in flight ends as failed, with a cause; later checkpoints are gone. A
run that was killed before its first checkpoint begins anew in the same journal.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from orchestrator.checkpoint import Checkpoints, RunState
from orchestrator.ledger import Ledger
from orchestrator.parts import Position


class Rewindable(Protocol):
    """A trajectory store that can forget."""

    def discard_after(self, steps_done: int, /) -> object: ...


@dataclass(frozen=True)
class Resumed:
    """Where the run goes on. ``checkpoint`` is None when there was none; ``damaged`` says what was skipped and why."""

    checkpoint: Path | None
    position: Position
    damaged: tuple[str, ...]

    @property
    def step(self) -> int:
        """Training steps done."""
        return self.position.step


def rewind(checkpoints: Checkpoints, ledger: Ledger, journal: Iterable[str], store: Rewindable) -> Resumed:
    """Go back. Raises RunError when there are checkpoints but none is intact."""
    found = checkpoints.newest()
    folder, state, damaged = found if found is not None else (None, RunState(0, 0, 0, 0.0, ()), [])
    checkpoints.drop_after(state.step)
    returned = set(ledger.restore(journal, state.step, {trajectory.id for trajectory in state.buffer}))
    store.discard_after(state.step)
    position = Position(
        state.step,
        state.version,
        ledger.groups_started,
        ledger.counts.started,
        tuple(trajectory for trajectory in state.buffer if trajectory.id in returned),
        list(state.success_history),
        state.rounds,
    )
    return Resumed(folder, position, tuple(damaged))
