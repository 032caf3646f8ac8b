"""How many GPUs each rollout worker gets, so that the long trajectories run fast and the short ones together (Heddle 6).

A worker of model-parallel degree 8 makes a token sooner than one of degree 1, eight of degree 1 make more tokens in all. Given
the predicted lengths and what each degree does (:class:`orchestrator.policies.placement.Speed`), :func:`allocate` splits a GPU
budget into workers and says what makespan the best placement on them has. Guarantees:

* The degrees sum to the budget and come in descending order, the order in which the placement takes the longest first.
* While the budget has at most ``exact_limit`` allocations, the answer is the best of all of them: 969 for 64 GPUs of degrees 1,
  2, 4 and 8, of which most are dismissed by one question (:func:`orchestrator.policies.placement.cut` with ``below``), so that
  no annealing is needed there.
* Beyond it, Heddle's Algorithm 2: simulated annealing from a random sorted start, with its three moves. Same random source,
  same answer; never worse than the best allocation of equal degrees.

A worker never spans servers: a degree above ``per_server`` is not used, and the budget must be whole servers or less than one.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from orchestrator.policies.placement import Speed, cut


@dataclass(frozen=True)
class Allocation:
    """``degrees`` of the workers, descending; ``makespan``: seconds of the best placement; ``exact``: nothing is better;
    ``tried``: allocations that were looked at."""

    degrees: tuple[int, ...]
    makespan: float
    exact: bool
    tried: int


@dataclass(frozen=True, slots=True)
class Annealing:
    """Constants of Algorithm 2. ``cooling`` a step; it ends when the temperature is ``final`` of the first makespan."""

    cooling: float = 0.98
    final: float = 1e-3

    def __post_init__(self) -> None:
        if not (0 < self.cooling < 1 and 0 < self.final < 1):
            raise ValueError(f"{self}: both between 0 and 1")


def allocate(
    lengths: Sequence[float],
    budget: int,
    speeds: Mapping[int, Speed],
    rng: random.Random,
    *,
    per_server: int = 8,
    exact_limit: int = 20_000,
    annealing: Annealing | None = None,
) -> Allocation:
    """Split ``budget`` GPUs. ``lengths``: predicted tokens, any order. ``speeds``: by degree, in GPUs.

    Raises ValueError when no allocation uses the budget up, or none holds all trajectories.
    """
    usable = sorted((degree for degree in speeds if 0 < degree <= per_server), reverse=True)
    if budget < 1 or (budget > per_server and budget % per_server):
        raise ValueError(f"budget = {budget}: whole servers of {per_server} GPUs, or less than one")
    if not count_allocations(budget, usable):
        raise ValueError(f"budget = {budget}: no sum of the degrees {usable} on offer")
    longest_first = sorted(lengths, reverse=True)
    if longest_first and not (longest_first[-1] >= 0 and math.isfinite(sum(longest_first))):
        raise ValueError("lengths: finite numbers of tokens, 0 or more")
    search = _Search(longest_first, speeds)
    if count_allocations(budget, usable) <= exact_limit:
        # Equal degrees first: a good allocation dismisses many others at once.
        for degrees in (*_uniform(budget, usable), *_all(budget, usable)):
            search.better(degrees)
        exact = True
    else:
        for degrees in _uniform(budget, usable):
            search.better(degrees)
        _anneal(search, budget, usable, rng, annealing or Annealing())
        exact = False
    if not search.best:
        raise ValueError(f"no allocation of {budget} GPUs holds {len(longest_first)} trajectories")
    return Allocation(search.best, search.makespan, exact, search.tried)


def count_allocations(budget: int, degrees: Sequence[int]) -> int:
    """How many multisets of ``degrees`` sum to ``budget``."""
    ways = [1] + [0] * budget
    for degree in degrees:
        for total in range(degree, budget + 1):
            ways[total] += ways[total - degree]
    return ways[budget]


class _Search:
    """The best allocation seen so far."""

    def __init__(self, lengths: Sequence[float], speeds: Mapping[int, Speed]) -> None:
        self._lengths = lengths
        self._speeds = speeds
        self.best: tuple[int, ...] = ()
        self.makespan = math.inf
        self.tried = 0

    def better(self, degrees: tuple[int, ...]) -> bool:
        """Take it if it beats the best: one question when it does not."""
        if self.makespan == math.inf:  # nothing to be better than
            return self.cost(degrees) < math.inf
        self.tried += 1
        starts, makespan = cut(self._lengths, self._workers(degrees), self.makespan)
        if starts:
            self.best, self.makespan = degrees, makespan
        return bool(starts)

    def cost(self, degrees: tuple[int, ...]) -> float:
        """Its makespan, infinite when it does not hold all trajectories; the best is remembered."""
        self.tried += 1
        if sum(self._speeds[degree].capacity for degree in degrees) < len(self._lengths):
            return math.inf
        makespan = cut(self._lengths, self._workers(degrees))[1]
        if makespan < self.makespan:
            self.best, self.makespan = degrees, makespan
        return makespan

    def _workers(self, degrees: tuple[int, ...]) -> list[Speed]:
        return [self._speeds[degree] for degree in degrees]


def _uniform(budget: int, degrees: Sequence[int]) -> Iterator[tuple[int, ...]]:
    for degree in degrees:
        if budget % degree == 0:
            yield (degree,) * (budget // degree)


def _all(budget: int, degrees: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Each multiset once, its degrees descending."""
    first, rest = degrees[0], degrees[1:]
    for number in range(budget // first, -1, -1):
        left = budget - number * first
        if not left:
            yield (first,) * number
        elif rest:
            for tail in _all(left, rest):
                yield (first,) * number + tail


def _anneal(search: _Search, budget: int, degrees: Sequence[int], rng: random.Random, constants: Annealing) -> None:
    """Algorithm 2. Worse allocations are accepted with the chance exp(-(cost - current) / temperature)."""
    current = _random(budget, degrees, rng)
    cost = search.cost(current)
    # An allocation that does not hold all trajectories has no cost to start from: the best equal one stands in.
    temperature = first = cost if math.isfinite(cost) else max(search.makespan, 1e-9)
    if not math.isfinite(first):
        temperature = first = 1.0
    while temperature > constants.final * first:
        candidate = _neighbour(current, degrees, rng)
        proposed = search.cost(candidate)
        if proposed <= cost or rng.random() < math.exp(-(proposed - cost) / temperature):
            current, cost = candidate, proposed
        temperature *= constants.cooling


def _random(budget: int, degrees: Sequence[int], rng: random.Random) -> tuple[int, ...]:
    """Degrees drawn one by one while what is left can still be used up."""
    drawn: list[int] = []
    left = budget
    while left:
        fitting = [degree for degree in degrees if degree <= left and count_allocations(left - degree, degrees)]
        drawn.append(rng.choice(fitting))
        left -= drawn[-1]
    return tuple(sorted(drawn, reverse=True))


def _neighbour(current: tuple[int, ...], degrees: Sequence[int], rng: random.Random) -> tuple[int, ...]:
    """One random move: split a worker, merge two alike, or redistribute, which is one of each: what a worker gives up makes
    another one larger. The same allocation when the move that was drawn does not exist."""
    workers = Counter(current)
    halves = {degree: degree // 2 for degree in degrees if degree % 2 == 0 and degree // 2 in degrees}
    move = rng.choice(("redistribute", "split", "merge"))
    split = 0
    if move != "merge":
        split = _one_of([degree for degree in halves if workers[degree]], rng)
        if split:
            workers[split] -= 1
            workers[halves[split]] += 2
    if move != "split":
        merged = _one_of([degree for degree, half in halves.items() if degree != split and workers[half] >= 2], rng)
        if merged:
            workers[halves[merged]] -= 2
            workers[merged] += 1
    return tuple(sorted(workers.elements(), reverse=True))


def _one_of(degrees: list[int], rng: random.Random) -> int:
    return rng.choice(degrees) if degrees else 0
