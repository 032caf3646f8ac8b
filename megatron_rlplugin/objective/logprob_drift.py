"""How far trainer and rollout differ, token by token, as counts that add up: percentiles of pi_old / pi_rollout of a whole step.

Guarantees: counts of any split into micro-batches and replicas add up to those of the whole; a percentile is that of the
definition (the smallest value that at least so many of a hundred do not exceed), to within the bin: a log-ratio d is known to
0.0005 near 0 and to a twentieth of itself far from it. Drifts beyond 20 are in the outermost bins.

``_T``: the counted tokens of a micro-batch, ``d = log pi_old - log pi_rollout``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

Counts = tuple[float, ...]

_SCALE = 0.01  # a bin is 0.1 wide in asinh(d / this): linear below it, logarithmic above
_WIDTH = 0.1
_HALF = math.ceil(math.asinh(20.0 / _SCALE) / _WIDTH)  # bins on each side of the one around 0
BINS = 2 * _HALF + 1
PERCENTILES = {"p01": 0.01, "p50": 0.5, "p99": 0.99}


def empty() -> Counts:
    """Of no token."""
    return (0.0,) * BINS


def counts(drift_T: Tensor) -> Tensor:
    """float64[BINS] on the device of ``drift_T``."""
    place_T = torch.asinh(drift_T.double() / _SCALE).div_(_WIDTH).round_().clamp_(-_HALF, _HALF)
    return torch.bincount(place_T.long() + _HALF, minlength=BINS).double()


def ratios(counted: Sequence[float]) -> dict[str, float]:
    """The percentiles of pi_old / pi_rollout, before any cap; none of no token."""
    total = math.fsum(counted)
    found: dict[str, float] = {}
    for name, share in PERCENTILES.items() if total else ():
        place = next(
            (index for index, seen in enumerate(accumulate(counted)) if seen >= share * total), len(counted) - 1
        )
        found[name] = math.exp(_SCALE * math.sinh((place - _HALF) * _WIDTH))
    return found
