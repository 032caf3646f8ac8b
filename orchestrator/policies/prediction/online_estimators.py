"""The building blocks of the length predictor, each learned row by row: ridge regression, stacking of experts, conformal
intervals."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
_FACTORS = (1.0, 10.0, 100.0, 1e4)
_ERRORS = 10.0  # errors are forgotten so much sooner than rows
STACK_ARRAYS = ("products", "crosses", "sums", "counts", "weights", "scales")  # what is to be kept of one
_BORROWED = (64.0, 32.0)  # rows of the wider class, of all, that count in each class at most
_PULL = 16.0  # rows' worth of error that the pull towards equal weights is
_SURE = 16.0  # rows that say "as it is" about a scale
_FACTOR = 4.0  # scales stay within this, either way
_STEPS = 400
RATE = 0.01
_WIDEST = 0.5  # level of a tail: beyond the median it would be no tail


class RidgeRegression:
    """Online ridge regression. Guarantees: its weights are those of weighted least squares over all rows so far, an old row
    counting ``exp(-age / memory)`` with its age in rows, each weight penalised in units of its feature's own variance (so that
    scaling a feature changes nothing); memory and time per row do not grow.

    ``penalties``: one per feature, in rows; feature 0 is constant 1. ``outputs``: how many values are predicted. ``classes``
    of rows. For each class there are weights from all rows and from its own rows, with each of four factors of the penalties;
    those whose predictions were best so far are used, each prediction made before its row was learned. So little data carries
    little weight, and nothing is tuned to a data set.
    """

    def __init__(self, penalties: Array, outputs: int, classes: int, memory: float) -> None:
        self._penalties = penalties
        self._memory = memory
        size = len(penalties)
        self.products: Array = np.zeros((classes + 1, size, size))  # of all rows, then of each class
        self.targets: Array = np.zeros((classes + 1, size, outputs))
        self.weights: Array = np.zeros((classes + 1, len(_FACTORS), size, outputs))
        self.errors: Array = np.zeros((classes, 2 * len(_FACTORS)))  # squared, of the first output
        self.counts: Array = np.zeros(classes + 1)  # rows that count

    def best(self, kind: int) -> tuple[int, int]:
        """Which weights and which factor; the largest factor over all rows while there is nothing to choose by."""
        errors, half = self.errors[kind], len(_FACTORS)
        order = (*range(half - 1, -1, -1), *range(2 * half - 1, half - 1, -1))
        own, factor = divmod(min(order, key=lambda one: errors[one]), half)
        return own * (kind + 1), factor

    def judge(self, vectors: Array, values: Array, kinds: Sequence[int], weight: float) -> None:
        """Rows that are learned next, and their classes: how well each weights predict them."""
        self.errors *= math.exp(-len(vectors) * _ERRORS / self._memory)
        for vector, value, kind in zip(vectors, values, kinds, strict=True):
            predicted = self.weights[(0, kind + 1), :, :, 0].reshape(-1, len(vector)) @ vector
            self.errors[kind] += weight * (predicted - value[0]) ** 2

    def add(self, vectors: Array, values: Array, kinds: Sequence[int], weight: float = 1.0) -> None:
        """Rows, shape [n, features] and [n, outputs], each with weight ``weight``. The weights change with :meth:`solve`."""
        classes = np.asarray(kinds) + 1
        for group in (0, *dict.fromkeys(classes.tolist())):
            meant = slice(None) if group == 0 else classes == group
            rows, wanted = vectors[meant], values[meant]
            kept = math.exp(-len(rows) / self._memory)
            self.products[group] = self.products[group] * kept + weight * (rows.T @ rows)
            self.targets[group] = self.targets[group] * kept + weight * (rows.T @ wanted)
            self.counts[group] = self.counts[group] * kept + weight * len(rows)

    def solve(self) -> None:
        """New weights from all rows."""
        for group in np.flatnonzero(self.counts).tolist():
            products, diagonal = self.products[group], np.diag(self.products[group])
            means = products[0] / self.counts[group]
            spread = np.maximum(diagonal / self.counts[group] - means * means, 0.0)
            for index, factor in enumerate(_FACTORS):
                penalty = factor * self._penalties * spread + 1e-6 * (1.0 + diagonal)
                penalty[0] = 1e-9
                self.weights[group, index] = np.linalg.solve(products + np.diag(penalty), self.targets[group])

    def predict(self, vectors: Array, kinds: Sequence[int]) -> Array:
        """Rows and their classes: shape [n, outputs]."""
        best = np.stack([self.weights[self.best(kind)] for kind in kinds])
        found: Array = np.einsum("ij,ijk->ik", vectors, best)
        return found


class ForecastStack:
    """One forecast from several: the convex combination that would have been best so far (stacked regression, Breiman 1996).

    Guarantees: weights are not negative and sum to 1; they minimise the squared error of the combination over the rows so far
    (a row counts ``exp(-age / memory)``), plus a pull towards equal weights that fades as rows come. Each row was predicted
    before it was learned, so an expert that only memorises gets no weight. The best convex combination is at least as good as
    the best single expert on those rows: it loses only through small samples and through change. Time and memory per row do
    not grow.

    Rows belong to a class within a wider class: with few rows of its own, a class borrows from the wider one, and that from
    all. Experts that are wrong by a constant factor are scaled first (Duan's smearing): the exponential of a mean logarithm is
    below the mean.

    ``experts`` per row; ``wider``: the wider class of each class; ``memory`` in rows. Values are not negative, in any unit.
    """

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
        """Rows of the experts' predictions (shape [n, experts]) and of what came, each with weight ``weight``."""
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
        """One row, shape [experts]."""
        return float(said @ (self.scales[kind] * self.weights[kind]))


def best_of_simplex(products: Array, crosses: Array) -> Array:
    """Minimises ``w P w - 2 c w`` over ``w >= 0, sum(w) = 1``, ``P`` positive definite: weight is moved, exactly as far as it
    helps, from the expert with the largest gradient to the one with the smallest, until nothing is gained."""
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


class ConformalIntervals:
    """Intervals around a prediction, calibrated on what came after, by class, and recalibrated as rows come.

    Split conformal intervals take quantiles of past residuals: their coverage holds as long as the data does not change (Vovk,
    Gammerman and Shafer 2005). In a run it does: the policy learns, so the newest residuals differ from those of the window.
    So the level of each tail follows its misses (adaptive conformal inference, Gibbs and Candes 2021): after each residual it
    moves by ``rate`` times the wanted minus the observed miss.

    Guarantees: over ``n`` residuals of a class, whatever they are, the share below the given lower bound exceeds the wanted
    one by at most ``(1 + rate) / (rate n)``, and the same above (proposition 4.1 there; a level that has reached 0 has an
    infinite bound, which nothing misses). That few lie outside is not guaranteed: an interval always contains its prediction.
    Every residual is of a prediction made before it was learned. A class without residuals of its own has the bounds of the
    nearest one that has enough.

    Residuals by class (such as turns), the last ``window`` of each; ``coverage`` of the intervals, with half of the misses on
    either side. ``rate`` 0: not adaptive.
    """

    def __init__(self, classes: int, window: int, coverage: float, rate: float = RATE) -> None:
        self._tail, self._rate = (1.0 - coverage) / 2.0, rate
        self.residuals: list[deque[float]] = [deque(maxlen=window) for _ in range(classes)]
        self.sorted: list[Array] = [np.zeros(0) for _ in range(classes)]  # that bounds are of
        self.tails: Array = np.full((classes, 2), self._tail)  # levels: below the lower bound, above the upper one

    def add(self, kind: int, residual: float, given: tuple[float, float]) -> None:
        """What came, minus what was predicted, and the bounds that were given for it."""
        self.residuals[kind].append(residual)
        missed = np.array([residual < given[0], residual > given[1]], dtype=np.float64)
        self.tails[kind] = np.clip(self.tails[kind] + self._rate * (self._tail - missed), 0.0, _WIDEST)

    def refresh(self) -> None:
        """From now on bounds are quantiles of all residuals so far, until this is called again."""
        self.sorted = [np.sort(np.array(values)) for values in self.residuals]

    def bounds(self, kind: int) -> tuple[float, float]:
        """What to add to a prediction for an interval: lower bound never above 0, upper never below, so a prediction is within
        its own interval. Infinite if a level is 0, and while no class has enough residuals for the coverage."""
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
