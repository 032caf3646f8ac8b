"""Own busy time of an asyncio loop between two of its turns, and what it waited for a processor beside it; on Linux.

A turn begins when the selector returns, and ends when the loop asks it again: what lies in between is work of the loop's own
callbacks, a lock, a disk, or waiting for a processor that somebody else has. The last is told apart by the kernel's count for the
thread (``schedstat``). Counts go into bins of 2 %: the measurement does not grow with time.
"""

from __future__ import annotations

import math
import os
import selectors
import time
from typing import Any

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


class BusySelector(selectors.DefaultSelector):
    """Measures from :meth:`begin` on."""

    def __init__(self) -> None:
        super().__init__()
        self._file = os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)
        self._woke: tuple[float, float] | None = None
        self.own, self.waited = Durations(), Durations()

    def begin(self) -> None:
        """Forget what was until now."""
        self.own, self.waited = Durations(), Durations()

    def select(self, timeout: float | None = None) -> Any:
        """See selectors."""
        if self._woke is not None:
            at, waited = self._now()
            beside = min(waited - self._woke[1], at - self._woke[0])
            self.own.add(at - self._woke[0] - beside)
            self.waited.add(beside)
        found = super().select(timeout)
        self._woke = self._now()
        return found

    def as_dict(self) -> dict[str, Any]:
        """Both, in milliseconds."""
        return {"own_ms": self.own.as_dict(), "waited_ms": self.waited.as_dict()}

    def close(self) -> None:
        """See selectors."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
        super().close()

    def _now(self) -> tuple[float, float]:
        return time.monotonic(), int(os.pread(self._file, 96, 0).split()[1]) / 1e9
