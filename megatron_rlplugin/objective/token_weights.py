"""Which policy tokens count, how much each weighs, and what they add to the loss's divisor.

This module owns the denominators. Guarantees: a token that does not count has no weight and is in no denominator; weights
and denominator of a trajectory depend on nothing but itself, so a micro-batch concatenates weights and adds denominators,
and any split of a batch over micro-batches and replicas gives the same sum over the same divisor.

``_T``: the policy tokens of one trajectory, in order.
"""

from __future__ import annotations

from typing import get_args

import numpy as np
from numpy.typing import NDArray

from orchestrator.api import VersionSpans
from orchestrator.policies.training.objective_table import LossMean


def kept_tokens(spans: VersionSpans, version: int, max_token_lag: int | None) -> NDArray[np.bool_]:
    """bool[T]: made by weights at most ``max_token_lag`` versions older than ``version`` (None: all are kept)."""
    kept = [max_token_lag is None or version - made <= max_token_lag for made, _ in spans]
    return np.repeat(np.asarray(kept, dtype=np.bool_), [count for _, count in spans])


def token_weights(kept: int, loss: str) -> tuple[NDArray[np.float32], int]:
    """(weights[kept], denominator) of a trajectory with ``kept`` tokens that count.

    "token-mean": weight 1, one a token. "sequence-mean": weight 1 / kept, one a trajectory. "sequence-sum": weight 1, one
    a trajectory. A trajectory without a counted token adds nothing to either.
    """
    if loss not in get_args(LossMean):
        raise ValueError(f"unknown loss mean {loss!r}")
    weight = 1.0 / max(kept, 1) if loss == "sequence-mean" else 1.0
    return np.full(kept, weight, dtype=np.float32), kept if loss == "token-mean" else min(kept, 1)
