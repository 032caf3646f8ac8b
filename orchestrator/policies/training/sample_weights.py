"""Adjustments to a trajectory's weight and reward in training: less weight for lag, a penalty for overlong answers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LagWeight:
    """The weight of a trajectory with lag (notes on agentic-RL infrastructure, 7). The staleness bound drops larger lags
    (:mod:`orchestrator.policies.batching.staleness`); within it, a weight trades throughput against off-policy noise. The
    weight multiplies a trajectory's terms in the loss and enters no denominator: a lower weight for one does not raise the
    others'.

    ``exp(-decay * lag)``, lag in weight versions when ``get_batch`` takes the trajectory. ``decay`` 0 turns it off: exactly 1.
    """

    decay: float = 0.0

    def weight_for(self, lag: int) -> float:
        """The weight, in (0, 1]."""
        return math.exp(-self.decay * max(0, lag))


def effective_share(weights: Sequence[float]) -> float:
    """Effective sample size over the number of samples, (sum w)^2 / (n sum w^2): 1 when all weigh the same, 1/n when one
    has all the weight. Of none, and of weights that are all 0: 0."""
    squares = math.fsum(weight * weight for weight in weights)
    return math.fsum(weights) ** 2 / (len(weights) * squares) if squares else 0.0


@dataclass(frozen=True, slots=True)
class OverlongPenalty:
    """A soft penalty before the length limit: a long answer is better than a wrong one, but not free.

    Guarantees: pure; 0 up to ``limit - buffer`` generated tokens, from there linearly down to ``-penalty`` at ``limit`` and
    beyond. Source: DAPO (2025), 3.4, eq. 13, there with a penalty of 1. It is only for the trainer: what is reported as
    reward, compared by filters and dynamic sampling, and stored, is the reward function's value.

    ``limit`` and ``buffer`` in generated tokens of a whole episode; ``limit`` 0: no penalty.
    """

    limit: int = 0
    buffer: int = 0
    penalty: float = 1.0

    def penalty_for(self, tokens: int) -> float:
        """What is added to the reward of an answer with so many tokens: 0 or less."""
        over = tokens - (self.limit - self.buffer)
        if not self.limit or over <= 0:
            return 0.0
        return -self.penalty * min(1.0, over / self.buffer) if self.buffer else -self.penalty
