"""How much a trajectory that lags counts (notes on agentic-RL infrastructure, 7), and how many samples that leaves.

The staleness bound drops what lags too far (:mod:`orchestrator.policies.batching.staleness`); within it a weight can trade
throughput against off-policy noise. A weight multiplies a trajectory's terms in the loss and is in no denominator: what is
down-weighted counts less, and nothing else counts more for it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LagWeight:
    """``exp(-decay * lag)``, lag in weight versions at the moment ``get_batch`` takes the trajectory. 0 is off: exactly 1."""

    decay: float = 0.0

    def weight_for(self, lag: int) -> float:
        """The weight, in (0, 1]."""
        return math.exp(-self.decay * max(0, lag))


def effective_share(weights: Sequence[float]) -> float:
    """Effective sample size over the number of samples, (sum w)^2 / (n sum w^2): 1 when all weigh the same, 1/n when one
    has all the weight. Of none, and of weights that are all 0: 0."""
    squares = math.fsum(weight * weight for weight in weights)
    return math.fsum(weights) ** 2 / (len(weights) * squares) if squares else 0.0
