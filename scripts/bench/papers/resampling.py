"""How sure a difference between two predictors is that were judged on the same trajectories: a paired bootstrap over prompts.

Guarantees: a resample draws prompts, not trajectories, as many as there are and with replacement, and all trajectories of a
prompt with it (they are alike: counted one by one the interval would be too narrow); both predictors are judged on the same
resample; the same rows and the same seed give the same interval. What is varied is the trajectories that are judged: the
predictors stay what they were trained to be (Efron and Tibshirani 1993, sections 8 and 13.3).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Measure = Callable[[Array, Array], float]  # of predicted and true lengths

RESAMPLES = 1000
LEVEL = 0.95


def paired(
    ours: Array, theirs: Array, true: Array, groups: Sequence[str], measure: Measure, seed: int
) -> dict[str, float]:
    """``measure`` of ours less that of theirs, with an interval of :data:`LEVEL`. Arrays are of the same rows, shape [n];
    ``groups`` says whose row each is. Raises ValueError for none, and for rows that do not belong together."""
    if not len(ours) == len(theirs) == len(true) == len(groups) > 0:
        raise ValueError(
            f"rows of {len(ours)}, {len(theirs)}, {len(true)} and {len(groups)}: as many of each, one at least"
        )
    names = {name: number for number, name in enumerate(dict.fromkeys(groups))}
    whose = np.array([names[name] for name in groups])
    order = np.argsort(whose, kind="stable")
    starts = np.searchsorted(whose[order], np.arange(len(names) + 1))
    members = [order[start:end] for start, end in pairwise(starts.tolist())]
    draw, found = np.random.default_rng([seed, len(true)]), []
    for _ in range(RESAMPLES):
        rows = np.concatenate([members[one] for one in draw.integers(0, len(members), len(members))])
        found.append(measure(ours[rows], true[rows]) - measure(theirs[rows], true[rows]))
    low, high = np.quantile(found, [(1.0 - LEVEL) / 2.0, (1.0 + LEVEL) / 2.0])
    gain = measure(ours, true) - measure(theirs, true)
    return {"gain": round(gain, 4), "low": round(float(low), 4), "high": round(float(high), 4)}


def words(row: dict[str, Any]) -> str:
    """``better``, ``worse``, or ``tie`` where the interval has 0 in it."""
    return "better" if row["low"] > 0 else "worse" if row["high"] < 0 else "tie"
