"""Who waits for a server that another job has: its holder reads it, and gives the server up where it has more than its share.

Guarantees: one claim per job, the last that it said; a claim ends by itself when it is not said again within its seconds, so that
a job which died claims nothing; at most :data:`MOST`, those that end first make room. Expiry is by the monotonic clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

MOST = 64


@dataclass(frozen=True, slots=True)
class ServerClaim:
    """A job wants so many servers in all, with this weight (:mod:`orchestrator.policies.serving.fair_shares`)."""

    wanted: int
    weight: float
    until: float


class ClaimBook:
    """The claims that were said at one server."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._claims: dict[tuple[str, str], ServerClaim] = {}

    def record_claim(self, job: str, place: str, wanted: int, weight: float, seconds: float) -> None:
        """For so many seconds from now."""
        now = self._clock()
        self._claims = {key: claim for key, claim in self._claims.items() if claim.until > now and key != (job, place)}
        if len(self._claims) >= MOST:
            del self._claims[min(self._claims, key=lambda key: self._claims[key].until)]
        self._claims[job, place] = ServerClaim(wanted, weight, now + seconds)

    def status(self) -> list[dict[str, Any]]:
        """Those that hold, for the status."""
        now = self._clock()
        return [
            {"job": job, "place": place, "wanted": claim.wanted, "weight": claim.weight}
            for (job, place), claim in self._claims.items()
            if claim.until > now
        ]
