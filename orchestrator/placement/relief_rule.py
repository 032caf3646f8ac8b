"""Which worker relieves another one of a trajectory that is in a gap there: one that will be done much sooner.

Guarantee: a move counts from the moment it is decided, at both ends: what is on its way to a worker (or waits to be sent there)
is taken as being there, and what leaves one as gone, until it has arrived or was given up. So any number of gaps in the same
second relieves a worker of no more than it is slower by. What else changes is looked at once a second at most.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Generic, TypeVar

RELIEF = 0.8  # of the time that a worker still takes: one that takes less relieves it
_FRESH = 1.0  # seconds for which a worker's time to be done is good, where no move changed it

Item = TypeVar("Item")  # what is known of a trajectory


class Relief(Generic[Item]):
    """One run's. ``there``: worker -> the trajectories that began there, kept by the caller; ``seconds``: what a worker takes to
    end such ones."""

    def __init__(
        self, there: Mapping[int, Mapping[str, Item]], seconds: Callable[[int, Sequence[Item]], float]
    ) -> None:
        self._there, self._seconds = there, seconds
        self._ways: dict[str, tuple[int, int]] = {}  # trajectory -> from where to where it is on its way
        self._coming: dict[int, dict[str, Item]] = {}
        self._known: dict[int, tuple[float, float]] = {}  # worker -> when it was looked at, seconds

    def goes(self, trajectory: str, item: Item, source: int, target: int) -> None:
        """It was decided to move it, in place of any move that was decided before."""
        self.settled(trajectory)
        self._ways[trajectory] = source, target
        self._coming.setdefault(target, {})[trajectory] = item
        self.changed(source, target)

    def settled(self, trajectory: str) -> None:
        """It has arrived, or was given up, or ended. Unknown ones are ignored."""
        way = self._ways.pop(trajectory, None)
        if way is not None:
            del self._coming[way[1]][trajectory]
            self.changed(*way)

    def changed(self, *workers: int) -> None:
        """A trajectory was moved from or to these."""
        for worker in workers:
            self._known.pop(worker, None)

    def find(self, trajectory: str, item: Item, worker: int, others: Iterable[int]) -> tuple[int, float] | None:
        """The one of the others that will be done first, where that is much sooner than here even with this trajectory: and by
        how many seconds."""
        self.settled(trajectory)  # it is decided anew
        workers = [other for other in others if other != worker]
        if not workers:
            return None
        here = self.done_in(worker)
        target = min(workers, key=lambda other: (self.done_in(other), other))
        if self.done_in(target) > RELIEF * here:
            return None
        with_it = self._seconds(target, [*self._held(target), item])
        return (target, here - with_it) if with_it <= RELIEF * here else None

    def done_in(self, worker: int) -> float:
        """Seconds until a worker has ended all that is there or on its way there."""
        now = asyncio.get_running_loop().time()
        known = self._known.get(worker)
        if known is None or now - known[0] >= _FRESH:
            held = self._held(worker)
            known = self._known[worker] = (now, self._seconds(worker, held) if held else 0.0)
        return known[1]

    def _held(self, worker: int) -> list[Item]:
        there, coming = self._there.get(worker, {}), self._coming.get(worker, {})
        ways = self._ways
        held = [item for name, item in there.items() if name not in ways or ways[name][0] != worker]
        return [*held, *(item for name, item in coming.items() if name not in there)]
