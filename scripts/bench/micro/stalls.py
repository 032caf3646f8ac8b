"""What holds an event loop up, with the stack that did it: a probe for any asyncio loop on Linux, vLLM's uvloop included.

A timer falls due every few milliseconds. A thread beside the loop notices when one is overdue by ``limit`` and looks where the
loop's thread is, until the timer runs. Time that the kernel let that thread wait for a processor which somebody else had is told
apart (``schedstat``; where a stall begins, up to one interval of the timer too much is taken for that). A call that keeps the
interpreter's lock cannot be looked at while it lasts: the stack is then that of the moment after, in its caller or near it.
"""

from __future__ import annotations

import asyncio
import gc
import os
import sys
import threading
import time
import traceback
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

LIMIT = 0.02  # seconds
KEPT = 256  # stalls; of more, the longest
_FRAMES = 14  # of a stack, the innermost
_SHOWN = 2  # stacks of one stall


@dataclass(frozen=True, slots=True)
class Stall:
    """``seconds`` that the loop did nothing else, of which it ``waited`` for a processor, computed for ``processor`` seconds, and
    collected garbage for ``collected``. ``stacks``: where it was seen, most often first."""

    seconds: float
    waited: float
    processor: float
    collected: float
    stacks: tuple[str, ...]

    @property
    def own(self) -> float:
        """Seconds that are not somebody else's."""
        return self.seconds - self.waited

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {name: getattr(self, name) for name in ("seconds", "waited", "processor", "collected", "own", "stacks")}

    def __str__(self) -> str:
        parts = f"waited {self.waited:.3f}, computed {self.processor:.3f}, collected {self.collected:.3f}"
        return f"{1000 * self.own:.0f} ms ({parts} s)\n" + "\n".join(f"--\n{stack}" for stack in self.stacks)


class StallWatch:
    """Runs from :meth:`start` until :meth:`stop`, both inside the loop that is watched. ``limit``: seconds of a stall's
    :attr:`Stall.own` from which it is kept."""

    def __init__(self, limit: float = LIMIT) -> None:
        self.limit = limit
        self.stalls: list[Stall] = []
        self._interval = limit / 4
        self._due = 0.0
        self._seen: Counter[str] = Counter()  # stacks, since the timer was due
        self._timer: asyncio.TimerHandle | None = None
        self._collected = self._collecting = 0.0
        self._last = (0.0, 0.0, 0.0)  # (waited, processor, collected) when the timer ran last
        self._thread = 0
        self._ended = threading.Event()
        self._schedstat = -1
        self._lock = threading.Lock()

    def start(self) -> StallWatch:
        """Begin, on the running loop."""
        self._thread = threading.get_ident()
        try:
            self._schedstat = os.open("/proc/thread-self/schedstat", os.O_RDONLY)
        except OSError:
            self._schedstat = -1
        gc.callbacks.append(self._gc)
        self._last = self._spent()
        self._arm()
        threading.Thread(target=self._look, name="stall-watch", daemon=True).start()
        return self

    def stop(self) -> list[Stall]:
        """Nothing is watched any more; what was found, the longest first."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._ended.set()
        if self._gc in gc.callbacks:
            gc.callbacks.remove(self._gc)
        if self._schedstat >= 0:
            os.close(self._schedstat)
            self._schedstat = -1
        return self.found()

    def found(self) -> list[Stall]:
        """Until now, the longest first."""
        return sorted(self.stalls, key=lambda stall: -stall.own)

    # -- in the loop -------------------------------------------------------------------------------------------------

    def _arm(self) -> None:
        self._due = time.monotonic() + self._interval
        self._timer = asyncio.get_running_loop().call_later(self._interval, self._tick)

    def _tick(self) -> None:
        late, spent = time.monotonic() - self._due, self._spent()
        waited, processor, collected = (now - before for now, before in zip(spent, self._last, strict=True))
        self._last = spent
        with self._lock:
            seen, self._seen = self._seen, Counter()
        if late - min(waited, late) >= self.limit:
            stacks = tuple(f"{count} x\n{stack}" for stack, count in seen.most_common(_SHOWN))
            self.stalls.append(Stall(late, min(waited, late), processor, collected, stacks))
            if len(self.stalls) > 2 * KEPT:
                self.stalls = self.found()[:KEPT]
        self._arm()

    def _spent(self) -> tuple[float, float, float]:
        waited = int(os.pread(self._schedstat, 96, 0).split()[1]) / 1e9 if self._schedstat >= 0 else 0.0
        return waited, time.thread_time(), self._collected

    def _gc(self, phase: str, _: dict[str, int]) -> None:
        if threading.get_ident() == self._thread:
            if phase == "start":
                self._collecting = time.perf_counter()
            else:
                self._collected += time.perf_counter() - self._collecting

    # -- beside it ---------------------------------------------------------------------------------------------------

    def _look(self) -> None:
        while not self._ended.wait(self._interval):
            if time.monotonic() - self._due < self.limit / 2:
                continue
            frame = sys._current_frames().get(self._thread)
            if frame is not None:
                with self._lock:
                    self._seen[_stack(frame)] += 1


def _stack(frame: FrameType) -> str:
    rows = traceback.extract_stack(frame)[-_FRAMES:]
    return "\n".join(f"  {_place(row.filename)}:{row.lineno} {row.name}: {(row.line or '')[:90]}" for row in rows)


def _place(file: str) -> str:
    """Without the machine's folders."""
    return "/".join(Path(file).parts[-3:])
