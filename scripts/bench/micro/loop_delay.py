"""How late the event loop is, and whose fault that is: a probe for an ordinary asyncio loop on Linux.

A timer falls due every 10 ms; its delay is the time until it runs. On a shared machine part of that is waiting for a
processor that somebody else has: the kernel counts it for each thread (``schedstat``), and it is told apart, so that
``own`` is what the loop's own callbacks, a lock or a disk took. Where a delay began in the middle of an iteration of the loop,
the waiting of that iteration is shared out evenly over it. Without ``schedstat`` nothing is told apart.
"""

from __future__ import annotations

import asyncio
import os
import selectors
import time
from array import array
from typing import Any

INTERVAL = 0.01  # seconds


class WatchedSelector(selectors.DefaultSelector):
    """Knows when the loop last began to wait for events, and when it last began to work on them."""

    def __init__(self) -> None:
        super().__init__()
        try:
            self._file = os.open("/proc/thread-self/schedstat", os.O_RDONLY)
        except OSError:
            self._file = -1
        self.worked = self.work = self.waited = (time.monotonic(), 0.0)  # (time, waiting for a processor until then)

    def now(self) -> tuple[float, float]:
        """Time, and seconds that this thread has ever waited for a processor."""
        waited = int(os.pread(self._file, 96, 0).split()[1]) / 1e9 if self._file >= 0 else 0.0
        return time.monotonic(), waited

    def select(self, timeout: float | None = None) -> Any:
        """See selectors."""
        self.waited = self.now()
        self.worked = self.work  # the iteration that ends here began then
        found = super().select(timeout)
        self.work = self.now()
        return found

    def close(self) -> None:
        """See selectors."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
        super().close()

    def others(self, due: float) -> tuple[float, float]:
        """(now, seconds waited for a processor since ``due``)."""
        now, waited = self.now()
        since = max(0.0, waited - self.waited[1])
        begun, ended = self.worked[0], self.waited[0]
        if due < ended and ended > begun:
            share = min(1.0, (ended - due) / (ended - begun))
            since += share * (self.waited[1] - self.worked[1])
        return now, min(since, max(0.0, now - due))


class LoopDelay:
    """Runs from :meth:`start` until :meth:`stop`. Delays are seconds."""

    def __init__(self, selector: WatchedSelector) -> None:
        self._selector = selector
        self._timer: asyncio.TimerHandle | None = None
        self._due = 0.0
        self.all, self.own = array("d"), array("d")

    def start(self) -> None:
        """Begin, on the running loop, which has the selector."""
        self._arm()

    def stop(self) -> None:
        """Nothing is measured any more."""
        if self._timer is not None:
            self._timer.cancel()

    def _arm(self) -> None:
        loop = asyncio.get_running_loop()
        self._due = loop.time() + INTERVAL
        self._timer = loop.call_at(self._due, self._tick)

    def _tick(self) -> None:
        now, others = self._selector.others(self._due)
        late = max(0.0, now - self._due)
        self.all.append(late)
        self.own.append(late - others)
        self._arm()

    def as_dict(self) -> dict[str, Any]:
        """Percentiles in milliseconds, of the delay and of its own part."""
        return {"samples": len(self.all), "delay_ms": percentiles(self.all), "own_ms": percentiles(self.own)}


def percentiles(values: array[float]) -> dict[str, float]:
    """In milliseconds. Raises ValueError for no values."""
    if not values:
        raise ValueError("nothing was measured")
    ordered = sorted(values)
    places = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p999": 0.999, "max": 1.0}
    return {
        name: round(1000 * ordered[min(len(ordered) - 1, int(at * len(ordered)))], 3) for name, at in places.items()
    }
