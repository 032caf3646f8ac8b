"""Watches the child processes of a run: brings back those that hold nothing, and says when one is gone that does.

Guarantees: a death is noticed at once, and is a ``fault`` in the event log; a child that can be restarted is, after pauses that
grow, at its old address, so that calls which were under way reach it when they are tried again; while it is away that is what
the run waits for, by name. After ``limit`` restarts in a row the run ends with the child's name; one that lived for
``STEADY_SECONDS`` starts counting anew. The death of one that holds state is a :class:`PartLost`.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Protocol, runtime_checkable

from orchestrator.api import ConfigError, PartLost, RunError
from orchestrator.durable_files import replace_text
from orchestrator.events import EventLog

STEADY_SECONDS = 300.0
PAUSE_FIRST, PAUSE_LIMIT = 1.0, 30.0  # seconds before the second restart in a row; doubles; the first one is at once
_logger = logging.getLogger("rl-coserve")


class Child(Protocol):
    """See :class:`orchestrator.child_process.ChildProcess`."""

    @property
    def pid(self) -> int | None: ...

    async def ended(self) -> None: ...


@runtime_checkable
class Restartable(Child, Protocol):
    """See :class:`orchestrator.rewards.host_launch.FunctionHost`."""

    async def restart(self) -> None: ...


class Keeper:
    """The children of one run. ``fail(error)`` ends it."""

    def __init__(self, events: EventLog) -> None:
        self._events = events
        self._children: list[tuple[str, Child, int]] = []
        self._away: dict[str, str] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._file: Path | None = None
        self._others: Callable[[], dict[str, int]] = dict

    def keep(self, name: str, child: Child, limit: int = 0) -> None:
        """Watch a child that is up. ``limit``: restarts in a row, where it can be restarted. Before :meth:`start`."""
        self._children.append((name, child, limit))

    def record(self, file: Path, others: Callable[[], dict[str, int]]) -> None:
        """Keep a file with all process ids, for people and for fault tests; ``others`` are not children of ours."""
        self._file, self._others = file, others
        self._write(self.pids())

    def start(self, fail: Callable[[BaseException], None]) -> None:
        """Begin to watch."""

        def done(task: asyncio.Task[None]) -> None:
            """A watcher that is broken would let the run wait for ever."""
            if not task.cancelled() and (error := task.exception()) is not None:
                fail(error)

        self._tasks.append(asyncio.create_task(self._keep_file(), name="keep the file of processes"))
        for name, child, limit in self._children:
            self._tasks.append(asyncio.create_task(self._watch(name, child, limit, fail), name=f"keep {name}"))
        for task in self._tasks:
            task.add_done_callback(done)

    async def close(self) -> None:
        """Stop watching. Idempotent."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def waiting_for(self) -> str:
        """What is away, in words; "" when all are there."""
        return "; ".join(self._away.values())

    def pids(self) -> dict[str, int]:
        """Of all that are there."""
        children = {name.replace(" ", "-"): child.pid for name, child, _ in self._children if child.pid is not None}
        return {**self._others(), **children, "orchestrator": os.getpid()}

    async def _keep_file(self) -> None:
        written = self.pids()
        while True:
            await asyncio.sleep(1.0)
            if (found := self.pids()) != written:
                self._write(found)
                written = found

    def _write(self, pids: dict[str, int]) -> None:
        if self._file is None:
            return
        try:
            replace_text(self._file, "".join(f"{name} {pid}\n" for name, pid in pids.items()))
        except OSError as error:  # people read it: a full disk ends the run where something is kept
            _logger.warning("%s is not as it should be: %s", self._file, error)

    async def _watch(self, name: str, child: Child, limit: int, fail: Callable[[BaseException], None]) -> None:
        loop, restarts = asyncio.get_running_loop(), 0
        while True:
            since = loop.time()
            await child.ended()
            gone = loop.time()
            if gone - since > STEADY_SECONDS:
                restarts = 0
            self._events.emit("fault", what=name, cause=name, detail=f"it died, after {restarts} restarts in a row")
            if not isinstance(child, Restartable):
                fail(PartLost(f"the {name} died; its log is in the run folder's logs"))
                return
            self._away[name] = f"the {name} to come back"
            while restarts < limit:
                await asyncio.sleep(min(PAUSE_FIRST * 2 ** (restarts - 1), PAUSE_LIMIT) if restarts else 0.0)
                restarts += 1
                try:
                    await child.restart()
                except (ConfigError, RunError, OSError) as error:
                    self._events.emit(
                        "fault", what=name, cause=name, detail=f"restart {restarts} failed: {error}"[:300]
                    )
                    continue
                break
            else:
                times = f"{restarts} times" if restarts else "and may not be restarted"
                fail(RunError(f"the {name} died {times}; its log is in the run folder's logs"))
                return
            del self._away[name]
            seconds = loop.time() - gone
            self._events.emit("recovered", what=name, detail=f"restart {restarts}, {seconds:.1f} s")
