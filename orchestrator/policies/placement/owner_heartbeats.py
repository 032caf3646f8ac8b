"""Which jobs that have devices gave no sign of life for too long.

Guarantees: a job is silent when its count stood still for ``patience`` seconds of the watcher's own clock (clocks of two machines
are never compared); one that never counted is nobody's to judge, and is never silent. Pure: seconds of one monotonic clock.
"""

from __future__ import annotations

from collections.abc import Mapping


class OwnerHeartbeats:
    """What one watcher has seen."""

    def __init__(self, patience: float) -> None:
        self._patience = patience
        self._seen: dict[str, tuple[int, float]] = {}  # owner -> its count, and since when

    def silent_owners(self, counts: Mapping[str, int], now: float) -> tuple[str, ...]:
        """Of these owners, with what they counted by now; of those that are not among them nothing is remembered."""
        self._seen = {
            owner: before if (before := self._seen.get(owner)) is not None and before[0] == count else (count, now)
            for owner, count in counts.items()
        }
        return tuple(owner for owner, (_, since) in self._seen.items() if now - since >= self._patience)
