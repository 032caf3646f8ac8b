"""Says who held the event loop up, in every run: an ``alarm`` event, ``event_loop``, with the lines that were at work.

While the loop stands still, no trajectory goes on and nobody is answered. A timer falls due all the while; a thread beside the
loop notices when it is overdue and looks where the loop's thread is, until the timer runs. Guarantees: a stall of ``seconds`` is
told once it is over, at most one event in :data:`PAUSE` (how many there were in between is in the next one); time that the kernel
let the thread wait for a processor, which somebody else had, does not count; the thread ends with :meth:`LoopWatch.stop`. A call
that keeps the interpreter's lock cannot be looked at while it lasts: then it is the moment after, in its caller.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from types import FrameType

SECONDS = 0.5  # that nobody may have the loop for himself
PAUSE = 10.0  # seconds between two events
_FRAMES = 4  # of a stack, the innermost


class LoopWatch:
    """Watches the loop that it is started on. ``tell`` is given words, on the loop."""

    def __init__(self, tell: Callable[[str], None], seconds: float = SECONDS) -> None:
        self._tell, self._seconds = tell, seconds
        self._interval = seconds / 5
        self._due = 0.0
        self._thread = 0
        self._schedstat = -1
        self._waited = 0.0
        self._seen: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._told, self._untold = -PAUSE, 0
        self._looker = threading.Thread(target=self._look, name="loop-watch", daemon=True)

    def start(self) -> LoopWatch:
        """Begin, on the running loop."""
        self._thread = threading.get_ident()
        try:
            self._schedstat = os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self._schedstat = -1  # then nothing is told apart
        self._waited = self._waits()
        self._arm()
        self._looker.start()
        return self

    def stop(self) -> None:
        """On the same loop. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._ended.set()
        self._looker.join()
        if self._schedstat >= 0:
            os.close(self._schedstat)
            self._schedstat = -1

    def _arm(self) -> None:
        self._due = time.monotonic() + self._interval
        self._timer = asyncio.get_running_loop().call_later(self._interval, self._tick)

    def _tick(self) -> None:
        late, waited = time.monotonic() - self._due, self._waits()
        own = late - min(late, waited - self._waited)
        self._waited = waited
        with self._lock:
            seen, self._seen = self._seen, Counter()
        if own >= self._seconds:
            holder = seen.most_common(1)[0][0] if seen else "code that kept the interpreter's lock"
            now = time.monotonic()
            if now - self._told >= PAUSE:
                more = f"; {self._untold} others since the last one told" if self._untold else ""
                self._told, self._untold = now, 0
                self._tell(f"held up for {own:.2f} s by {holder}{more}")
            else:
                self._untold += 1
        self._arm()

    def _waits(self) -> float:
        """Seconds that this thread has ever waited for a processor."""
        return int(os.pread(self._schedstat, 96, 0).split()[1]) / 1e9 if self._schedstat >= 0 else 0.0

    def _look(self) -> None:
        while not self._ended.wait(self._interval):
            if time.monotonic() - self._due < self._seconds / 2:
                continue
            frame = sys._current_frames().get(self._thread)
            if frame is not None:
                with self._lock:
                    self._seen[_holder(frame)] += 1


def _holder(frame: FrameType) -> str:
    """The functions at work, the innermost first."""
    rows = traceback.extract_stack(frame)[: -_FRAMES - 1 : -1]
    return " < ".join(f"{row.name} ({os.sep.join(row.filename.split(os.sep)[-2:])}:{row.lineno})" for row in rows)
