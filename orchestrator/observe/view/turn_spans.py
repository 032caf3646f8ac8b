"""When each turn ran and on which worker, for traces: the file ``turns.jsonl`` of a run.

Guarantees: one short line a turn and nothing else, at most ``most`` bytes in all, then no more; written in large pieces, so
that a turn costs the event loop some microseconds, and a kill loses the newest ones. A disk that cannot take it ends the file,
not the run. A line is ``[trajectory, turn, worker, asked, answered, step began, step ended]`` in seconds since the run's start;
evaluations are in it, too.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.events import EventLog
from orchestrator.run_folder import TURNS_FILE

if TYPE_CHECKING:  # who only reads the file needs no rollout
    from orchestrator.envs import Episode
    from orchestrator.proxy.gateway import LLMProxy

_BUFFER = 1 << 16  # bytes


class Spans:
    """The writer; one a life of a run. Give :meth:`turn` to :class:`orchestrator.envs.EnvManager`."""

    def __init__(self, folder: Path, events: EventLog, proxy: LLMProxy, most: int) -> None:
        file = folder / TURNS_FILE
        before = file.read_bytes() if file.exists() else b""
        self._stream = file.open("a", encoding="utf-8", buffering=_BUFFER)
        if before and not before.endswith(b"\n"):
            self._stream.write("\n")  # a kill cut the last line
        self._left = most - len(before)
        self._proxy = proxy
        self._offset = events.time() - asyncio.get_running_loop().time()

    def turn(self, episode: Episode, asked: float, answered: float, begun: float, ended: float) -> None:
        """A turn is over; times are the loop's."""
        if self._left <= 0:
            return
        worker = self._proxy.router.prefix_holder(episode.id, episode.prompt.task)
        name = self._proxy.states[worker].worker.name if worker >= 0 else ""
        times = [round(at + self._offset, 6) for at in (asked, answered, begun, ended)]
        line = json.dumps([episode.id, len(episode.turns) - 1, name, *times], separators=(",", ":")) + "\n"
        self._left -= len(line)
        try:
            self._stream.write(line)
        except OSError:
            self._left = 0

    def close(self) -> None:
        """Idempotent."""
        self._left = 0
        try:
            self._stream.close()
        except OSError:  # what was not written is lost to traces only
            return
