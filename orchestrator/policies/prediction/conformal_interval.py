"""Intervals around a prediction that are calibrated on what came after, class by class, and go on calibrating themselves.

Split conformal intervals take the quantiles of past residuals: they cover what they say as long as what comes is of the same
kind as what was (Vovk, Gammerman and Shafer 2005). A run is not: its policy learns, so the newest residuals differ from those
of the window. So the level of each tail follows what it misses (adaptive conformal inference, Gibbs and Candes 2021): after each
residual it moves by ``rate`` times what it should miss less what it missed.

Guarantees: over ``n`` residuals of a class, whatever they are, the share that lay below the lower bound it was given exceeds
the wanted one by at most ``(1 + rate) / (rate n)``, and so above (proposition 4.1 there; a level that has reached 0 has an
infinite bound, which nothing misses). That few lie outside is not guaranteed: an interval always has its prediction. Every
residual is of a prediction that was made before it was learned. Without residuals of its own a class has the bounds of the
nearest one that has enough.
"""

from __future__ import annotations

import math
from collections import deque

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
RATE = 0.01
_WIDEST = 0.5  # level of a tail: beyond the median it would be no tail


class ConformalIntervals:
    """Residuals by class (of turns, say), the last ``window`` of each; ``coverage`` of the intervals, half of what is missed on
    either side. ``rate`` 0: not adaptive."""

    def __init__(self, classes: int, window: int, coverage: float, rate: float = RATE) -> None:
        self._tail, self._rate = (1.0 - coverage) / 2.0, rate
        self.residuals: list[deque[float]] = [deque(maxlen=window) for _ in range(classes)]
        self.sorted: list[Array] = [np.zeros(0) for _ in range(classes)]  # that bounds are of
        self.tails: Array = np.full((classes, 2), self._tail)  # levels: below the lower bound, above the upper one

    def add(self, kind: int, residual: float, given: tuple[float, float]) -> None:
        """What came, less what was predicted, and the bounds that were given for it."""
        self.residuals[kind].append(residual)
        missed = np.array([residual < given[0], residual > given[1]], dtype=np.float64)
        self.tails[kind] = np.clip(self.tails[kind] + self._rate * (self._tail - missed), 0.0, _WIDEST)

    def has_room(self, kind: int, most: int) -> bool:
        """Whether a class has fewer residuals than ``most``."""
        return len(self.residuals[kind]) < most

    def refresh(self) -> None:
        """Bounds are quantiles of all residuals so far from now on, and of these until this is called again."""
        self.sorted = [np.sort(np.array(values)) for values in self.residuals]

    def bounds(self, kind: int) -> tuple[float, float]:
        """What is to be added to a prediction for an interval, never above 0 and never below: a prediction lies in its own.
        Infinite where a level is 0, and while no class has residuals enough for the coverage."""
        below, above = self.tails[kind].tolist()
        for other in sorted(range(len(self.sorted)), key=lambda one: abs(one - kind)):
            values = self.sorted[other]
            if self._tail * (len(values) + 1) >= 1.0 - 1e-9:
                low, high = _place(below, len(values)), _place(above, len(values))
                return (
                    min(0.0, float(values[low - 1])) if low else -math.inf,
                    max(0.0, float(values[len(values) - high])) if high else math.inf,
                )
        return -math.inf, math.inf


def _place(level: float, number: int) -> int:
    """The order statistic that this share lies beyond, with the finite sample's correction; 0: none is far enough."""
    return math.floor(level * (number + 1) + 1e-9)
