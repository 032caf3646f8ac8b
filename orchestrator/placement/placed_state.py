"""What :mod:`orchestrator.placement.placer` keeps of each trajectory, and of the tasks that share workers."""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass, field

from orchestrator.policies.placement.migration import Partition
from orchestrator.policies.placement.worker_load import SCORE
from orchestrator.policies.prediction.length_predictor import Forecast


@dataclass(slots=True)
class Placed:
    """A trajectory."""

    tokens: float
    task: str
    turns: float = 1.0
    spread: float = 0.0  # of the logarithm of the tokens
    worker: int = -1
    context: int = 0
    since: float = -1.0  # its environment works; -1: it does not
    counted: int = -1  # worker in whose account it is
    waits: asyncio.Future[None] | None = None  # until its worker has room for it
    sending: asyncio.Task[None] | None = None
    fleet: int = 0  # how often workers had come or left when it was decided where it is
    forecast: Forecast | None = None  # the last one


@dataclass(slots=True)
class Group:
    """The trajectories of the tasks that share workers, longest first. ``task``: one of them."""

    task: str
    ranks: list[tuple[float, str]] = field(default_factory=list)  # (-tokens, trajectory)
    partition: Partition | None = None
    members: frozenset[int] = frozenset()  # workers of the last placement
    changed: int = 0  # since it was solved
    solved: float = 0.0


def between(value: float, bound: float, share: float) -> float:
    """So far on the way from a value to a bound, in logarithms."""
    value, bound = max(value, 1.0), max(bound, 1.0)
    return float(value * (bound / value) ** share)


def spread_of(forecast: Forecast) -> float:
    """Standard deviation of the logarithm, so that one in ten is above ``high`` and the mean is as forecast; 1.28 at most, as no
    log-normal distribution has more above its mean."""
    above = max(0.0, math.log((1.0 + forecast.high) / (1.0 + forecast.tokens)))
    return SCORE - math.sqrt(max(0.0, SCORE * SCORE - 2.0 * above))
