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
        self._seen: Mapping[str, float] = {}  # request -> its progress at the latest look
        self._at = 0.0  # when that was
        self._still: dict[str, float] = {}  # those that stood still then -> since when

    def note(self, now: float, progress: Mapping[str, float]) -> None:
        """``progress``: of each request that may stall, a number that changes when anything of it is computed; who is not named
        is forgotten."""
        seen, still = self._seen, self._still
        same = [name for name, made in progress.items() if seen.get(name) == made]
        self._still = {name: still.get(name, self._at) for name in same}
        self._seen, self._at = progress, now

    def stalled(self, now: float, progress: Mapping[str, float]) -> list[str]:
        """The same; returns those whose number stood still for so long, and forgets them."""
        self.note(now, progress)
        names = [name for name, since in self._still.items() if now - since >= self._seconds - _SLACK]
        if names:
            self._seen = {name: made for name, made in progress.items() if name not in names}
            for name in names:
                del self._still[name]
        return names

    def clear(self) -> None:
        """The engine was paused, or idle: nothing stood still in that time."""
        self._seen, self._still = {}, {}

    @property
    def due(self) -> float:
        """When the next one will have stalled, if nothing is computed of it; infinite: nobody is watched."""
        moved = self._at if len(self._seen) > len(self._still) else math.inf
        return min(self._still.values(), default=moved) + self._seconds
