"""What of a simulated run survives a ``kill -9``: logs, checkpoints and the store's flushed rows, cut at one moment.

Guarantee: once :meth:`Remains.kill` was called, nothing that the dead process still does reaches them, until the next life
begins. A kill is armed by a count of durable operations (a journal line, a flush, either side of a checkpoint's commit),
so that every point at which a state is half recorded is hit by some seed; the journal line it strikes may be cut in half.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

from orchestrator.api import Trajectory
from orchestrator.checkpoint import Checkpoints, CheckpointState
from orchestrator.sim.run_audit import RunAudit


class CrashRemains:
    """The run folder, in memory, except for checkpoints: those are real files. It is the sink of the journal itself."""

    def __init__(self, audit: RunAudit) -> None:
        self.events: list[str] = []
        self.journal: list[str] = []
        self.rows: list[tuple[str, int, str]] = []  # id, step, outcome: flushed
        self.dead = False
        self.operations = 0
        self._audit = audit
        self._kill_at = -1
        self._rng = random.Random(0)
        self._on_kill: Callable[[], object] | None = None

    def begin_life(self, kill_after: int, rng: random.Random, on_kill: Callable[[], object]) -> None:
        """A process begins; it will be killed at its ``kill_after``-th durable operation (-1: never)."""
        self.dead = False
        self._kill_at = self.operations + kill_after if kill_after >= 0 else -1
        self._rng = rng
        self._on_kill = on_kill
        for log in (self.events, self.journal):
            if log and not log[-1].endswith("\n"):
                log.append("\n")  # as JournalFile does, or cut at the resume

    def kill(self) -> None:
        """The process is gone."""
        if not self.dead:
            self.dead = True
            self._audit.kill()
            if self._on_kill is not None:
                self._on_kill()

    def kill_strikes(self) -> bool:
        """Count one durable operation; whether the kill strikes at it."""
        self.operations += 1
        return self.operations - 1 == self._kill_at

    def lines(self) -> list[str]:
        """The journal as a new process reads it."""
        return "".join(self.journal).splitlines()

    def keep(self, lines: int, /) -> None:
        """See :class:`orchestrator.runtime.resume.Journal`."""
        self.journal = [f"{line}\n" for line in self.lines()[:lines]]

    def write(self, line: str, /) -> None:
        """The ledger's sink: append a line to the journal, unless the process is dead; or half of it, when it dies of it."""
        if self.dead:
            return
        if self.kill_strikes():
            line = line[: self._rng.randint(0, len(line))]
        if line.endswith(("}", "\n")):
            self._audit.check_journal_line(line)
        if line:
            self.journal.append(line)
        if self.operations - 1 == self._kill_at:
            self.kill()


class EventSink:
    """The event log's sink. ``also`` sees every line that survives."""

    def __init__(self, remains: CrashRemains, also: Callable[[str], object] | None) -> None:
        self._remains = remains
        self._also = also

    def write(self, line: str, /) -> None:
        """See LineSink."""
        if not self._remains.dead:
            self._remains.events.append(line)
            if self._also is not None:
                self._also(line)


class SimStore:
    """The trajectory store's twin: rows are durable after ``flush``."""

    def __init__(self, remains: CrashRemains) -> None:
        self._remains = remains
        self._pending: list[tuple[str, int, str]] = []

    def append(
        self, trajectory: Trajectory, step: int, outcome: str, *, position: int | None = None, weight: float = 1.0
    ) -> None:
        """See the pipeline's Store."""
        self._pending.append((trajectory.id, step, outcome))

    def behind(self) -> str:
        """See the pipeline's Store: never."""
        return ""

    def flush(self) -> None:
        """See the pipeline's Store."""
        if self._remains.dead:
            return
        if self._remains.kill_strikes():
            self._remains.kill()
            return
        self._remains.rows += self._pending
        self._pending = []

    async def flushed(self) -> None:
        """See the pipeline's Store."""
        self.flush()

    def discard_after(self, steps_done: int) -> None:
        """A resume went back: forget what was trained in step ``steps_done`` and later. What ended otherwise has ended."""
        self._remains.rows = [row for row in self._remains.rows if row[2] != "trained" or row[1] < steps_done]


class SimCheckpoints(Checkpoints):
    """The real checkpoints, which a kill can strike before or after their commit."""

    def __init__(self, folder: Path, keep: int, remains: CrashRemains) -> None:
        super().__init__(folder, keep)
        self._remains = remains

    def commit(self, partial: Path, state: CheckpointState) -> Path:
        """See Checkpoints."""
        if self._remains.dead:
            return partial
        if self._remains.kill_strikes():
            self._remains.kill()
            return partial
        final = super().commit(partial, state)
        if self._remains.kill_strikes():
            self._remains.kill()
        return final
