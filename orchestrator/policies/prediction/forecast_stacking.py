"""One forecast from several: the convex combination that would have been best so far (stacked regression, Breiman 1996).

Guarantees: weights are not negative and add up to 1; they minimise the squared error of the combination over the rows so far
(a row counts ``exp(-age / memory)``), plus a pull towards equal weights that fades as rows come. Each row was predicted before
it was learned, so what only remembers is not believed. The best convex combination is at least as good as the best single
expert on those rows: what is combined loses to it only by what so few rows mislead, and by what changes. Time and memory for
a row do not grow.

Rows are of a class inside a wider class: what a class has few rows of it borrows from the wider one, and that from all. Experts
that are wrong by a constant factor are scaled first (Duan's smearing): the exponential of a mean logarithm lies below the mean.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
ARRAYS = ("products", "crosses", "sums", "counts", "weights", "scales")  # what is to be kept of one
_BORROWED = (64.0, 32.0)  # rows of the wider class, of all, that count in each class at most
_PULL = 16.0  # rows' worth of error that the pull towards equal weights is
_SURE = 16.0  # rows that say "as it is" about a scale
_FACTOR = 4.0  # scales stay within this, either way
_STEPS = 400


class ForecastStack:
    """``experts`` a row; ``wider``: the wider class of each class; ``memory`` in rows. Values are not negative, of any unit."""

    def __init__(self, experts: int, wider: Sequence[int], memory: float) -> None:
        self._memory = memory
        self._experts = experts
        self._groups = [(1 + kind, 1 + len(wider) + above, 0) for kind, above in enumerate(wider)]
        groups = 1 + len(wider) + 1 + max(wider)  # all rows, each class, each wider class
        self.products: Array = np.zeros((groups, experts, experts))  # of the experts' values
        self.crosses: Array = np.zeros((groups, experts))  # of those with what came
        self.sums: Array = np.zeros((groups, experts + 2))  # of the experts' values, of what came, of its square
        self.counts: Array = np.zeros(groups)
        self.weights: Array = np.full((len(wider), experts), 1.0 / experts)
        self.scales: Array = np.ones((len(wider), experts))

    def add(self, said: Array, came: Sequence[float], kinds: Sequence[int], weight: float) -> None:
        """Rows of what the experts said (shape [n, experts]) and of what came, each counting ``weight``."""
        kept = math.exp(-len(came) / self._memory)
        for array in (self.products, self.crosses, self.sums, self.counts):
            array *= kept
        for row, value, kind in zip(said, came, kinds, strict=True):
            groups = list(self._groups[kind])
            self.products[groups] += weight * np.outer(row, row)
            self.crosses[groups] += weight * value * row
            self.sums[groups] += weight * np.concatenate([row, [value, value * value]])
            self.counts[groups] += weight

    def solve(self) -> None:
        """New scales and weights from all rows."""
        if self.counts[0] <= 0:
            return
        equal = 1.0 / self._experts
        for kind, (own, above, every) in enumerate(self._groups):
            products, crosses, sums, rows = (
                array[own].copy() for array in (self.products, self.crosses, self.sums, self.counts)
            )
            for group, most in zip((above, every), _BORROWED, strict=True):
                share = most / (most + self.counts[group])
                products += share * self.products[group]
                crosses += share * self.crosses[group]
                sums += share * self.sums[group]
                rows += share * self.counts[group]
            sure = _SURE * sums[-2] / rows
            scales = np.clip((sums[-2] + sure) / (sums[:-2] + sure + 1e-9), 1.0 / _FACTOR, _FACTOR)
            products *= np.outer(scales, scales)
            crosses *= scales
            error = sums[-1] - 2.0 * equal * crosses.sum() + equal * equal * products.sum()
            pull = _PULL * max(error, 0.0) / rows + 1e-9 * float(np.trace(products))
            products += pull * np.eye(self._experts)
            self.scales[kind], self.weights[kind] = scales, best_of_simplex(products, crosses + pull * equal)

    def combine(self, said: Array, kind: int) -> float:
        """Of one row, shape [experts]."""
        return float(said @ (self.scales[kind] * self.weights[kind]))


def best_of_simplex(products: Array, crosses: Array) -> Array:
    """Minimises ``w P w - 2 c w`` over ``w >= 0, sum(w) = 1``, ``P`` positive definite: weight is moved, exactly as far as it
    helps, from the expert that it serves worst to the one that it would serve best, until nothing is gained."""
    weights = np.full(len(crosses), 1.0 / len(crosses))
    gradient = products @ weights - crosses
    least = 1e-10 * float(np.abs(products).max())
    for _ in range(_STEPS):
        to = int(np.argmin(gradient))
        there = np.flatnonzero(weights > 0.0)
        source = int(there[np.argmax(gradient[there])])
        gain = gradient[source] - gradient[to]
        if gain <= least:
            break
        bend = products[to, to] + products[source, source] - 2.0 * products[to, source]
        moved = min(weights[source], gain / max(bend, 1e-300))
        weights[to] += moved
        weights[source] = max(0.0, weights[source] - moved)
        gradient += moved * (products[:, to] - products[:, source])
    return np.asarray(weights / weights.sum())
