"""Which requests of a rollout engine beside serving make no progress, and are to go on elsewhere (ROSE 4.1).

Guarantees: a request is named when nothing of it, prefill or decoding, was computed for ``STALL_SECONDS``, whether it runs or
waits for room; once, until it is seen anew. The same object watches in an engine and in the simulator: what counts as progress is
a number of whoever asks. Pure: seconds of any monotonic clock in, names out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

STALL_SECONDS = 2.0  # without progress (ROSE 4.1)
_SLACK = 1e-9  # seconds: of a timer that was set for the very moment


class ProgressWatch:
    """Of one engine."""

    def __init__(self, seconds: float = STALL_SECONDS) -> None:
        self._seconds = seconds
        self._seen: dict[str, tuple[float, float]] = {}  # request -> its progress, and since when that is so

    def note(self, now: float, progress: Mapping[str, float]) -> None:
        """``progress``: of each request that may stall, a number that changes when anything of it is computed; who is not named
        is forgotten."""
        seen = self._seen
        self._seen = {
            name: seen[name] if name in seen and seen[name][0] == made else (made, now)
            for name, made in progress.items()
        }

    def stalled(self, now: float, progress: Mapping[str, float]) -> list[str]:
        """The same; returns those whose number stood still for so long, and forgets them."""
        self.note(now, progress)
        names = [name for name, (_, since) in self._seen.items() if now - since >= self._seconds - _SLACK]
        for name in names:
            del self._seen[name]
        return names

    def clear(self) -> None:
        """The engine was paused, or idle: nothing stood still in that time."""
        self._seen.clear()

    @property
    def due(self) -> float:
        """When the next one will have stalled, if nothing is computed of it; infinite: nobody is watched."""
        return min((since for _, since in self._seen.values()), default=math.inf) + self._seconds
