"""A cost model fitted to measured engine steps, and what it predicts: how far the simulator can be believed.

The form is the simulator's own: a step costs so much, each sequence, each token in the contexts, each prefilled token and each
pair of query and key that a prefill attends to so much more. Fitted by least squares of the relative errors; a cost that
comes out negative is taken out, and the others are fitted again. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from orchestrator.api import ConfigError, GenerationRequest, Sampling
from orchestrator.sim.batch import Batch
from orchestrator.sim.batch import Sequence as Running
from orchestrator.sim.costs import EngineCosts, seconds_of


@dataclass(frozen=True, slots=True)
class Step:
    """A measured step: ``sequences`` of ``context`` tokens each (before it), of which it prefilled ``prefill`` tokens each."""

    sequences: int
    context: float
    prefill: int
    seconds: float

    @property
    def features(self) -> tuple[float, float, float, float, float]:
        """What the five costs are multiplied with."""
        count, new = self.sequences, self.prefill
        return 1.0, count, count * self.context, count * new, count * new * (self.context - new / 2)


@dataclass(frozen=True, slots=True)
class FittedCosts:
    """Five figures in seconds. Weights are not its subject: they cost nothing."""

    step: float
    sequence: float
    context: float
    token: float
    pair: float
    kv_tokens: int | None = None
    fetch_seconds: float = 0.0
    load_seconds: float = 0.0
    receive_seconds: float = 0.0

    def prefill(self, tokens: int, pairs: float, running: int) -> float:
        """See :class:`~orchestrator.sim.costs.EngineCosts`."""
        return tokens * self.token + pairs * self.pair

    def kv_move(self, tokens: int) -> float:
        """See the protocol. Not its subject either."""
        return 0.0

    def decode(self, running: int) -> tuple[float, float]:
        """See the protocol."""
        return self.step + self.sequence * running, self.context

    def seconds(self, step: Step) -> float:
        """What it predicts for a step."""
        costs = (self.step, self.sequence, self.context, self.token, self.pair)
        return sum(cost * feature for cost, feature in zip(costs, step.features, strict=True))


def fit(steps: Sequence[Step]) -> FittedCosts:
    """The costs that fit best. Raises ConfigError with fewer steps than costs."""
    if len(steps) < 5:
        raise ConfigError("steps", len(steps), "five costs need at least five measured steps")
    matrix = np.array([step.features for step in steps])
    measured = np.array([step.seconds for step in steps])
    kept = [0, 1, 2, 3, 4]
    while True:
        found, *_ = np.linalg.lstsq(matrix[:, kept] / measured[:, None], np.ones(len(steps)), rcond=None)
        if (found >= 0).all():
            break
        kept.remove(kept[int(np.argmin(found * matrix[:, kept].max(axis=0)))])
    costs = [0.0] * 5
    for place, cost in zip(kept, found, strict=True):
        costs[place] = float(cost)
    step, sequence, context, token, pair = costs
    return FittedCosts(step, sequence, context, token, pair)


def errors(costs: FittedCosts, steps: Sequence[Step]) -> list[float]:
    """Predicted over measured, minus 1, of each."""
    return [costs.seconds(step) / step.seconds - 1.0 for step in steps]


def left_out(sizes: Sequence[Sequence[Step]]) -> list[float]:
    """Errors on the steps of each size with the costs that fit all others: what the form of the model is worth without touching
    what was held back. Raises ConfigError as :func:`fit`."""
    found: list[float] = []
    for place, steps in enumerate(sizes):
        others = [step for other, size in enumerate(sizes) if other != place for step in size]
        found += errors(fit(others), steps)
    return found


def rollout_seconds(costs: EngineCosts, requests: Sequence[tuple[int, int]], slots: int) -> float:
    """What the simulator's engine takes for requests of (prompt, response) tokens that are all there at the start."""
    batch = Batch(slots, costs.kv_tokens)
    for number, (prompt, tokens) in enumerate(requests):
        request = GenerationRequest(str(number), str(number), 0, (0,) * prompt, Sampling(tokens), "")
        batch.add(Running(request, (0,) * tokens, 0.0, number))
    total = 0.0
    while True:
        owed, pairs = batch.fill(total)
        running = len(batch.running)
        if not running:
            return total
        fixed, growing = costs.decode(running)
        steps = batch.horizon()
        total += costs.prefill(owed, pairs, running)
        total += seconds_of(steps, fixed + growing * batch.context, growing * running)
        batch.advance(steps)
        for done in batch.complete():
            batch.remove(done)
