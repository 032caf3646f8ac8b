"""A cost model fitted to measured engine steps, and what it predicts: how far the simulator can be believed.

The form is the simulator's own: a step costs so much, each sequence and each token in the contexts so much more; a step that
prefills so much on top (other kernels, other shapes of batch), each prefilled token, and each pair of query and key that it
attends to, which is what grows with the square of a prompt. A step prefills ``CHUNK_TOKENS`` at most, more take more steps; and
of those in one step, the ones whose activations a processor's caches do not hold pay for the way to memory (``spill``).
Fitted by least squares of the relative errors, for each number of tokens that caches may hold (``CACHED``), of which the best is
kept; a cost that comes out negative is taken out, and the others are fitted again. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from orchestrator.api import ConfigError, GenerationRequest, Sampling
from orchestrator.sim.cost_model import CHUNK_TOKENS, EngineCosts, WeightSeconds, seconds_of
from orchestrator.sim.engine_batch import EngineBatch
from orchestrator.sim.engine_batch import EngineSequence as Running

COSTS = ("step", "sequence", "context", "token", "pair", "chunk", "spill")
CACHED = (1024, 1536, 2048, 3072, 4096, 5120, 6144)


@dataclass(frozen=True, slots=True)
class Step:
    """A measured step: ``sequences`` of ``context`` tokens each (before it), of which it prefilled ``prefill`` tokens each."""

    sequences: int
    context: float
    prefill: int
    seconds: float

    def features(self, cached: int) -> tuple[float, ...]:
        """What ``COSTS`` are multiplied with, where caches hold so many tokens."""
        count, new = self.sequences, self.prefill
        chunks = math.ceil(count * new / CHUNK_TOKENS)
        pairs = count * new * (self.context - new / 2)
        beyond = beyond_cache(count * new, cached)
        return max(1.0, chunks), count, count * self.context, count * new, pairs, chunks, beyond


_NO_WEIGHTS = WeightSeconds(0.0, 0.0, 0.0)  # none are on their way


@dataclass(frozen=True, slots=True)
class FittedCosts:
    """``COSTS`` in seconds. Weights are not its subject: they cost nothing."""

    step: float
    sequence: float
    context: float
    token: float
    pair: float
    chunk: float = 0.0
    spill: float = 0.0
    cached: int = CACHED[0]
    kv_tokens: int | None = None
    weights: WeightSeconds = _NO_WEIGHTS

    def prefill(self, tokens: int, pairs: float, running: int) -> float:
        """See :class:`~orchestrator.sim.cost_model.EngineCosts`."""
        chunks = math.ceil(tokens / CHUNK_TOKENS)
        further = max(0, chunks - 1) * self.step  # the last one is in the step that also decodes
        spilt = self.spill * beyond_cache(tokens, self.cached)
        return chunks * self.chunk + further + tokens * self.token + pairs * self.pair + spilt

    def kv_move(self, tokens: int) -> float:
        """See the protocol. Not its subject either."""
        return 0.0

    def decode(self, running: int) -> tuple[float, float]:
        """See the protocol."""
        return self.step + self.sequence * running, self.context

    def seconds(self, step: Step) -> float:
        """What it predicts for a step."""
        return sum(cost * feature for cost, feature in zip(self.costs, step.features(self.cached), strict=True))

    @property
    def costs(self) -> tuple[float, ...]:
        """In the order of ``COSTS``."""
        return self.step, self.sequence, self.context, self.token, self.pair, self.chunk, self.spill


def beyond_cache(tokens: int, cached: int) -> int:
    """Of so many prefilled tokens those beyond the first ``cached`` of their step."""
    full, rest = divmod(tokens, CHUNK_TOKENS)
    return full * max(0, CHUNK_TOKENS - cached) + max(0, rest - cached)


def fit(steps: Sequence[Step]) -> FittedCosts:
    """The costs that fit best. Raises ConfigError with fewer steps than costs."""
    if len(steps) < len(COSTS):
        raise ConfigError("steps", len(steps), f"{len(COSTS)} costs need at least as many measured steps")
    fitted = [_fit(steps, cached) for cached in CACHED]
    return min(fitted, key=lambda costs: sum(error * error for error in errors(costs, steps)))


def _fit(steps: Sequence[Step], cached: int) -> FittedCosts:
    matrix = np.array([step.features(cached) for step in steps])
    measured = np.array([step.seconds for step in steps])
    kept = [place for place in range(len(COSTS)) if matrix[:, place].any()]
    while True:
        found, *_ = np.linalg.lstsq(matrix[:, kept] / measured[:, None], np.ones(len(steps)), rcond=None)
        if (found >= 0).all():
            break
        kept.remove(kept[int(np.argmin(found * matrix[:, kept].max(axis=0)))])
    costs = [0.0] * len(COSTS)
    for place, cost in zip(kept, found, strict=True):
        costs[place] = float(cost)
    step, sequence, context, token, pair, chunk, spill = costs
    return FittedCosts(step, sequence, context, token, pair, chunk, spill, cached)


def nonnegative_factors(terms: np.ndarray) -> list[float]:
    """By least squares of one as the wanted value in each row, with no factor below 0: the best of those where some are 0."""
    best, least = [0.0] * terms.shape[1], math.inf
    for kept in range(1, 2 ** terms.shape[1]):
        columns = [column for column in range(terms.shape[1]) if kept >> column & 1]
        factors = np.linalg.lstsq(terms[:, columns], np.ones(len(terms)), rcond=None)[0]
        error = float(((terms[:, columns] @ factors - 1) ** 2).sum())
        if (factors >= 0).all() and error < least:
            best, least = [0.0] * terms.shape[1], error
            for column, factor in zip(columns, factors, strict=True):
                best[column] = float(factor)
    return best


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
    batch = EngineBatch(slots, costs.kv_tokens)
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
