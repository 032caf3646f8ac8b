"""The most KV that trajectories which run beside each other will hold, by their forecasts: who may begin without a thrash.

An engine whose KV is full drops the prefix of every trajectory that waits for its environment, and computes it anew a turn
later: with all of a batch begun at once that was a quarter of a simulated worker's time. So a trajectory begins where the
projected peak of those that are there and itself fits (beyond Heddle, which has no admission; RollPacker 4.4 projects a peak to
know how many GPUs may go over to training).

All go on at one pace, a token at a time. After ``t`` more tokens those that are still there hold ``context + grows x t`` each;
how many they are is a sum of probabilities: what a trajectory still says is log-normal around its forecast, which is its mean.
The normal distribution is approximated by the logistic one (largest error 0.01); for a few sure forecasts the sum is some ten
percent low. Pure; costs some ten microseconds and 0.3 for each trajectory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

_TIMES = 16  # at which KV is looked at, of each of two kinds: evenly in the logarithm, and before forecasts end
_SHORT_OF = 0.9  # of its length: there a trajectory is still there, if its forecast is sure
_LOGISTIC = 1.702  # what makes the logistic function the normal one's likeness
_LEAST_SPREAD = 0.05  # a forecast that is sure has steps, which would fall between two times


def projected_peak(
    contexts: Sequence[float],
    tokens: Sequence[float],
    spreads: Sequence[float],
    grows: float = 1.0,
    longest: float = math.inf,
) -> float:
    """Tokens of KV at the fullest moment. ``contexts``: that each has; ``tokens``: mean of what each will still say;
    ``spreads``: standard deviation of its logarithm; ``grows``: context for a token said; ``longest``: context at which a
    trajectory ends. All of one length; 0 without any."""
    if not len(contexts):
        return 0.0
    held = np.asarray(contexts, dtype=np.float64)
    means = np.maximum(np.asarray(tokens, dtype=np.float64), 1.0)
    off = np.maximum(np.asarray(spreads, dtype=np.float64), _LEAST_SPREAD)
    middle = np.log(means) - off * off / 2.0
    last = float(np.exp(np.max(middle + 2.0 * off)))
    ends = np.exp(middle)
    if math.isfinite(longest):
        most = np.maximum(longest - held, 0.0) / grows
        last, ends = min(last, max(1.0, float(np.max(most)))), np.maximum(np.minimum(ends, most), 1.0)
    ends = np.quantile(ends, np.linspace(0.0, 1.0, _TIMES))
    times = np.concatenate((np.geomspace(1.0, max(last, 2.0), _TIMES), _SHORT_OF * ends))
    # of shape [times, trajectories]; beyond +-30 a probability is 0 or 1 anyway
    scores = np.clip(_LOGISTIC * (np.log(times)[:, None] - middle) / off, -30.0, 30.0)
    there = 1.0 / (1.0 + np.exp(scores))
    grown = held + grows * times[:, None]
    if math.isfinite(longest):
        there = np.where(grown <= longest, there, 0.0)
    return float(max(held.sum(), (there * grown).sum(axis=1).max()))
