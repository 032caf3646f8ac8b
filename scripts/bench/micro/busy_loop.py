"""Own busy time of an asyncio loop between two of its turns, and what it waited for a processor beside it; on Linux.

A turn begins when the selector returns, and ends when the loop asks it again: what lies in between is work of the loop's own
callbacks, a lock, a disk, or waiting for a processor that somebody else has. The last is told apart by the kernel's count for the
thread (``schedstat``). Counts go into bins of 2 %: the measurement does not grow with time. Of the longest turns it is told what
they consisted of; what is neither computed nor waited for a processor is a lock (the interpreter's, or one of the kernel) or a
disk, and counts as the loop's own.
"""

from __future__ import annotations

import gc
import heapq
import math
import os
import resource
import selectors
import threading
import time
from typing import Any, NamedTuple

from scripts.bench.micro.hold_watch import Beat

KEPT = 5  # turns that are told, the longest
_LEAST = 1e-6  # seconds, the first bin
_WIDTH = math.log(1.02)


class Durations:
    """Counted in bins; the largest and the sum are exact."""

    def __init__(self) -> None:
        self.counts: dict[int, int] = {}
        self.most = self.total = 0.0

    def add(self, seconds: float) -> None:
        """One more."""
        self.most = max(self.most, seconds)
        self.total += seconds
        place = 0 if seconds <= _LEAST else 1 + int(math.log(seconds / _LEAST) / _WIDTH)
        self.counts[place] = self.counts.get(place, 0) + 1

    def as_dict(self) -> dict[str, Any]:
        """Upper ends of bins, in milliseconds."""
        number = sum(self.counts.values())
        found: dict[str, Any] = {"turns": number, "seconds": round(self.total, 3), "max": round(1e3 * self.most, 3)}
        for name, share in (("p50", 0.5), ("p99", 0.99), ("p999", 0.999)):
            seen = 0
            for place in sorted(self.counts):
                seen += self.counts[place]
                if seen >= share * number:
                    found[name] = round(1e3 * min(self.most, _LEAST * math.exp(place * _WIDTH)), 3)
                    break
        return found


class _Spent(NamedTuple):
    """By the loop's thread, until a moment: seconds, and numbers."""

    at: float
    computed: float
    waited: float
    collected: float
    usage: resource.struct_rusage


class BusySelector(selectors.DefaultSelector):
    """Measures from :meth:`begin` on. ``beat``: says when it is at work, None: to nobody."""

    def __init__(self, beat: Beat | None = None) -> None:
        super().__init__()
        self._file = os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)
        self._thread = threading.get_ident()
        self.beat = beat
        self._woke: _Spent | None = None
        self._collected = self._collecting = 0.0
        self._number = 0
        self.longest: list[tuple[float, int, dict[str, Any]]] = []
        self.own, self.waited = Durations(), Durations()
        gc.callbacks.append(self._gc)

    def begin(self) -> None:
        """Forget what was until now."""
        self.own, self.waited, self.longest = Durations(), Durations(), []

    def select(self, timeout: float | None = None) -> Any:
        """See selectors."""
        if self._woke is not None:
            woke, now = self._woke, self._now()
            beside = min(now.waited - woke.waited, now.at - woke.at)
            own = now.at - woke.at - beside
            self.own.add(own)
            self.waited.add(beside)
            if len(self.longest) < KEPT or own > self.longest[0][0]:
                self._keep(own, beside, woke, now)
        if self.beat is not None:
            self.beat.at_work(0.0)
        found = super().select(timeout)
        self._woke = self._now()
        if self.beat is not None:
            self.beat.at_work(self._woke.at)
        return found

    def as_dict(self) -> dict[str, Any]:
        """All, in milliseconds; the longest turns in seconds."""
        longest = [found for _, _, found in sorted(self.longest, reverse=True)]
        return {"own_ms": self.own.as_dict(), "waited_ms": self.waited.as_dict(), "longest": longest}

    def close(self) -> None:
        """See selectors."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
            gc.callbacks.remove(self._gc)
        super().close()

    def _keep(self, own: float, waited: float, woke: _Spent, now: _Spent) -> None:
        """Where the loop's thread was for so long; ``computed`` has what it collected in it."""
        computed = min(now.computed - woke.computed, own)
        parts = {
            "seconds": now.at - woke.at,
            "own": own,
            "waited": waited,
            "computed": computed,
            "collected": now.collected - woke.collected,
            "neither": own - computed,
        }
        counts = {
            name: getattr(now.usage, f"ru_{name}") - getattr(woke.usage, f"ru_{name}")
            for name in ("minflt", "majflt", "inblock", "oublock", "nvcsw", "nivcsw")
        }
        found = {"began": woke.at, **{name: round(value, 6) for name, value in parts.items()}, **counts}
        self._number += 1
        heapq.heappush(self.longest, (own, self._number, found))
        if len(self.longest) > KEPT:
            heapq.heappop(self.longest)

    def _gc(self, phase: str, _: dict[str, int]) -> None:
        if threading.get_ident() == self._thread:
            if phase == "start":
                self._collecting = time.monotonic()
            else:
                self._collected += time.monotonic() - self._collecting

    def _now(self) -> _Spent:
        waited = os.pread(self._file, 96, 0).split()[1]
        usage = resource.getrusage(resource.RUSAGE_THREAD)
        return _Spent(time.monotonic(), time.thread_time(), int(waited) / 1e9, self._collected, usage)
