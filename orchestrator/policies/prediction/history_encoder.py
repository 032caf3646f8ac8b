"""A small network over a trajectory's tokens and numbers, trained online (Heddle 4.1, scaled down to a CPU's spare time).

Guarantees: the same rows in the same order from the same seed give the same network; its outputs are bounded (``tanh`` before
the last layer, inputs and targets clipped at some standard deviations); learning or asking costs a fixed time per row;
restored from its arrays it continues as it was. Structure: counts of hashed one- and two-token pieces of the prompt and of the
end of the context are projected to ``RANK`` numbers each by a learned projection, and go through one hidden layer together
with the numbers of :mod:`orchestrator.policies.prediction.length_features`. Trained by Adam on mini-batches of the last
``kept`` rows.

:class:`Encoder` is the interface, which a fine-tuned language model implements too (:mod:`orchestrator.placement.length_lm`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from orchestrator.policies.prediction.length_features import DENSE, PIECES, TrajectoryProgress, pieces

Array = NDArray[np.float64]
OUTPUTS = 2  # logarithms of remaining tokens and turns, less those of the history
RANK = 12  # of the projection of each kind of pieces
HIDDEN = 32
BATCH = 32
CLIP = 4.0  # standard deviations of a number, of a target
_RATE, _BETAS, _DECAY = 5e-3, (0.9, 0.98), 3e-4
_LAYERS = ("prompt", "tail", "hidden", "bias", "out", "level")


class Encoder(Protocol):
    """Learns how a trajectory differs from its history. Rows are turn boundaries; ``numbers``: their dense features, shape [n,
    DENSE]; ``targets``: shape [n, OUTPUTS]."""

    kind: str  # what it is: a saved one of another kind is not loaded

    def predict(self, rows: Sequence[TrajectoryProgress], numbers: Array) -> Array:
        """Shape [n, OUTPUTS], finite."""
        ...

    def learn(self, rows: Sequence[TrajectoryProgress], numbers: Array, targets: Array, weight: float) -> None:
        """Rows of one trajectory, each with weight ``weight``."""
        ...

    def arrays(self) -> dict[str, NDArray[np.generic]]:
        """Its whole state, by name."""
        ...

    def restore(self, arrays: Mapping[str, NDArray[np.generic]]) -> None:
        """Continue from the result of :meth:`arrays`. Raises ValueError for anything else, with nothing changed."""
        ...


class Scaling:
    """Running mean and spread of columns. ``arrays``: shape [2, columns] and the number of rows."""

    def __init__(self, columns: int) -> None:
        self.sums: Array = np.zeros((2, columns))
        self.rows = 0

    def add(self, values: Array) -> None:
        """Rows, shape [n, columns]."""
        self.sums += [values.sum(0), (values * values).sum(0)]
        self.rows += len(values)

    @property
    def mean(self) -> Array:
        """Of each column."""
        return np.asarray(self.sums[0] / max(1, self.rows))

    @property
    def spread(self) -> Array:
        """Standard deviation of each column, at least a hundredth."""
        mean = self.mean
        return np.asarray(np.sqrt(np.maximum(self.sums[1] / max(1, self.rows) - mean * mean, 1e-4)))

    def normal(self, values: Array) -> Array:
        """In standard deviations from the mean, clipped."""
        return np.asarray(np.clip((values - self.mean) / self.spread, -CLIP, CLIP))


def check_arrays(
    known: Mapping[str, NDArray[np.generic]], given: Mapping[str, NDArray[np.generic]], growing: Sequence[str]
) -> None:
    """Raises ValueError if ``given`` lacks one of an encoder's arrays, or has it with another shape (the first axis of
    ``growing`` ones may differ) or with non-finite values."""
    wrong = [
        name
        for name, value in known.items()
        if name not in given
        or given[name].shape[1:] != value.shape[1:]
        or (name not in growing and given[name].shape != value.shape)
        or not np.isfinite(np.asarray(given[name], dtype=np.float64)).all()
    ]
    if wrong:
        raise ValueError(f"of another kind: {', '.join(wrong[:4])} of the encoder")


class HashedEncoder:
    """See the module. ``steps``: mini-batches per learned trajectory."""

    kind = "hashed 1"

    def __init__(self, *, seed: int, kept: int = 4096, steps: int = 4) -> None:
        self._seed, self._steps = seed, steps
        start = np.random.default_rng([seed, 8])
        shown = DENSE + 2 * RANK
        self.weights: dict[str, Array] = {
            "prompt": start.standard_normal((PIECES, RANK)) * 0.1,
            "tail": start.standard_normal((PIECES, RANK)) * 0.1,
            "hidden": start.standard_normal((shown, HIDDEN)) / np.sqrt(shown),
            "bias": np.zeros(HIDDEN),
            "out": np.zeros((HIDDEN, OUTPUTS)),
            "level": np.zeros(OUTPUTS),
        }
        self._moments = {name: np.zeros((2, *value.shape)) for name, value in self.weights.items()}
        self.steps = 0  # that were made
        self._numbers, self._targets = Scaling(DENSE), Scaling(OUTPUTS)
        width = 2 * PIECES + DENSE + OUTPUTS + 1  # pieces, numbers, targets, weight
        self._rows: NDArray[np.float32] = np.zeros((kept, width), np.float32)

    def predict(self, rows: Sequence[TrajectoryProgress], numbers: Array) -> Array:
        bags = np.stack([_bags(row) for row in rows])
        made = self._forward(bags, self._numbers.normal(numbers))[-1]
        return np.asarray(np.clip(made, -CLIP, CLIP) * self._targets.spread + self._targets.mean)

    def learn(self, rows: Sequence[TrajectoryProgress], numbers: Array, targets: Array, weight: float) -> None:
        for row, shown, wanted in zip(rows, numbers, targets, strict=True):
            place = self._numbers.rows % len(self._rows)
            self._rows[place] = np.concatenate([_bags(row), shown, wanted, [weight]])
            self._numbers.add(shown[None, :])
            self._targets.add(wanted[None, :])
        held = min(self._numbers.rows, len(self._rows))
        if held >= BATCH:
            for _ in range(self._steps):
                self._step(np.random.default_rng([self._seed, 7, self.steps]).integers(0, held, BATCH))

    def arrays(self) -> dict[str, NDArray[np.generic]]:
        found: dict[str, NDArray[np.generic]] = {**self.weights}
        for name, moments in self._moments.items():
            found[f"{name}_moments"] = moments
        found["rows"] = self._rows[: min(self._numbers.rows, len(self._rows))]
        found["numbers"], found["targets"] = self._numbers.sums, self._targets.sums
        found["counts"] = np.array([self.steps, self._numbers.rows], dtype=np.int64)
        return found

    def restore(self, arrays: Mapping[str, NDArray[np.generic]]) -> None:
        check_arrays(self.arrays(), arrays, growing=("rows",))
        steps, rows = (int(value) for value in arrays["counts"].tolist())
        if len(arrays["rows"]) != min(rows, len(self._rows)) or steps < 0:
            raise ValueError("of another kind: rows of the encoder")
        for name in _LAYERS:
            self.weights[name] = np.array(arrays[name], dtype=np.float64)
            self._moments[name] = np.array(arrays[f"{name}_moments"], dtype=np.float64)
        self._rows[: len(arrays["rows"])] = arrays["rows"]
        self._numbers.sums = np.array(arrays["numbers"], dtype=np.float64)
        self._targets.sums = np.array(arrays["targets"], dtype=np.float64)
        self.steps, self._numbers.rows, self._targets.rows = steps, rows, rows

    def _forward(self, bags: Array, numbers: Array) -> tuple[Array, Array, Array]:
        weights = self.weights
        shown = np.concatenate(
            [bags[:, :PIECES] @ weights["prompt"], bags[:, PIECES:] @ weights["tail"], numbers], axis=1
        )
        hidden = np.tanh(shown @ weights["hidden"] + weights["bias"])
        return shown, hidden, hidden @ weights["out"] + weights["level"]

    def _step(self, chosen: NDArray[np.int64]) -> None:
        rows = self._rows[chosen].astype(np.float64)
        bags, numbers, targets, counts = np.split(rows, np.cumsum([2 * PIECES, DENSE, OUTPUTS]), axis=1)
        wanted = self._targets.normal(targets)
        shown, hidden, made = self._forward(bags, self._numbers.normal(numbers))
        error = (made - wanted) * counts / counts.sum()
        back = (error @ self.weights["out"].T) * (1.0 - hidden * hidden)
        inner = back @ self.weights["hidden"].T
        gradients = {
            "prompt": bags[:, :PIECES].T @ inner[:, :RANK],
            "tail": bags[:, PIECES:].T @ inner[:, RANK : 2 * RANK],
            "hidden": shown.T @ back,
            "bias": back.sum(0),
            "out": hidden.T @ error,
            "level": error.sum(0),
        }
        self.steps += 1
        for name in _LAYERS:
            first, second = self._moments[name]
            first += (1.0 - _BETAS[0]) * (gradients[name] - first)
            second += (1.0 - _BETAS[1]) * (gradients[name] ** 2 - second)
            slope = first / (1.0 - _BETAS[0] ** self.steps)
            step = slope / (np.sqrt(second / (1.0 - _BETAS[1] ** self.steps)) + 1e-8)
            self.weights[name] -= _RATE * step + (0.0 if name == "level" else _DECAY * self.weights[name])


def _bags(row: TrajectoryProgress) -> Array:
    return np.concatenate([pieces(row.prompt_ids, 1), pieces(row.tail_ids, 2)])
