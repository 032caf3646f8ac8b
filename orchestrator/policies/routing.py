"""Turn routing: cache-affine first, then least loaded (ROSE 4.3, without the serving pool yet).

A later turn of a trajectory goes to the worker that holds its prefix, as long as that worker is alive and not more
than ``imbalance`` requests above the least loaded one. Ties are broken by the worker's position, so that runs repeat.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """What the router knows of a worker."""

    alive: bool
    in_flight: int


@dataclass(frozen=True, slots=True)
class CacheAffineRouting:
    """``imbalance``: requests that prefix affinity may cost before load wins."""

    imbalance: int = 16

    def choose(self, loads: Sequence[WorkerLoad], holder: int | None) -> int | None:
        """Index of the worker for a turn, or None when no worker is alive."""
        best: int | None = None
        for index, load in enumerate(loads):
            if load.alive and (best is None or load.in_flight < loads[best].in_flight):
                best = index
        if best is None:
            return None
        if holder is None or not loads[holder].alive:
            return best
        return holder if loads[holder].in_flight <= loads[best].in_flight + self.imbalance else best
