"""Ridge regression that is trained row by row.

Guarantees of :class:`RidgeRegression`: its weights are those of the weighted least squares over all rows so far, an old
row counting ``exp(-age / memory)`` with its age in rows, each weight penalised in units of its feature's own variance
(so that scaling a feature changes nothing); memory and time for a row do not grow.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
_FACTORS = (1.0, 10.0, 100.0, 1e4)
_ERRORS = 10.0  # errors are forgotten so much sooner than rows


class RidgeRegression:
    """``penalties``: one a feature, in rows; feature 0 is constant 1. ``outputs``: how many values are predicted. ``classes`` of
    rows; ``factors`` of the penalties. For a class there are the weights of all rows and those of its own rows, with each
    factor; those are used whose predictions were best so far, each made before its row was learned. So what little data says
    is believed little, and nothing is tuned to a data set."""

    def __init__(
        self, penalties: Array, outputs: int, classes: int, memory: float, factors: Sequence[float] = _FACTORS
    ) -> None:
        self._penalties = penalties
        self._memory = memory
        self._factors = factors
        size = len(penalties)
        self.products: Array = np.zeros((classes + 1, size, size))  # of all rows, then of each class
        self.targets: Array = np.zeros((classes + 1, size, outputs))
        self.weights: Array = np.zeros((classes + 1, len(factors), size, outputs))
        self.errors: Array = np.zeros((classes, 2 * len(factors)))  # squared, of the first output
        self.counts: Array = np.zeros(classes + 1)  # rows that count

    def best(self, kind: int) -> tuple[int, int]:
        """Whose weights, and which factor; the largest of all rows while there is nothing to choose by."""
        errors, half = self.errors[kind], len(self._factors)
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
        """Rows, shape [n, features] and [n, outputs], each counting ``weight``. The weights change with :meth:`solve`."""
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
            for index, factor in enumerate(self._factors):
                penalty = factor * self._penalties * spread + 1e-6 * (1.0 + diagonal)
                penalty[0] = 1e-9
                self.weights[group, index] = np.linalg.solve(products + np.diag(penalty), self.targets[group])

    def predict(self, vectors: Array, kinds: Sequence[int]) -> Array:
        """Rows and their classes: shape [n, outputs]."""
        best = np.stack([self.weights[self.best(kind)] for kind in kinds])
        found: Array = np.einsum("ij,ijk->ik", vectors, best)
        return found
