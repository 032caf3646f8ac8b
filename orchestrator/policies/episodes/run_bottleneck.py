"""What a run is limited by, and how many environments would keep its engines busy (study notes 4.3 and Q9). Pure.

Notes, Q9: busy / (busy + waiting for environments) below 50 %: the environments are the bottleneck, and faster GPUs do not
help; above 80 %: the GPUs are. Notes, 4.3: with g seconds of generation and e seconds of environment per turn, one environment
keeps an engine busy for g / (g + e) of the time, so (g + e) / g of them keep it busy.
"""

from __future__ import annotations

import math

ENVIRONMENT_BOUND = 0.5
GPU_BOUND = 0.8


def bottleneck_of(busy: float) -> str:
    """From the share of the time in which the GPUs are busy while trajectories are in flight."""
    if busy < ENVIRONMENT_BOUND:
        return "environment-bound"
    return "engine-bound" if busy > GPU_BOUND else "balanced"


def environments_wanted(generate: float, environment: float, workers: int, concurrent: float = 1.0) -> int | None:
    """Environments that keep ``concurrent`` requests in each engine on average; None if nothing was generated. A lower bound,
    as generation itself may then take longer. Seconds over all turns: ``generate``: including waiting in an engine's queue;
    ``environment``: everything else, including the environment's start."""
    if generate <= 0 or workers <= 0:
        return None
    return math.ceil(round(workers * concurrent * (generate + environment) / generate, 9))


def environments_to_try(busy: float, environments: int, wanted: int | None, filling: int | None) -> int:
    """How many environments to try next: enough to keep the engines busy if they are not, more by the missing share if that is
    not enough, never more than fill them; if the GPUs are the bottleneck, no more than now."""
    if busy >= ENVIRONMENT_BOUND or wanted is None:
        return environments
    more = max(wanted, math.ceil(environments * GPU_BOUND / max(busy, 0.01)))
    return max(environments, min(more, filling) if filling is not None else more)


def generation_ratio(train: float, generation: float) -> float | None:
    """GPU-seconds of generation per GPU-second of training; None if nothing was trained."""
    return generation / train if train > 0 else None
