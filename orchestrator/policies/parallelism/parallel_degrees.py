"""How many GPUs each rollout worker gets, so that the long trajectories run fast and the short ones together (Heddle 6).

A worker of model-parallel degree 8 makes a token sooner than one of degree 1, eight of degree 1 make more tokens in all. Given
the predicted lengths and what each degree does, :func:`allocate` splits a GPU budget into workers and says what makespan the best
placement on them has. What a degree does is either the paper's interference by group size
(:class:`orchestrator.policies.placement.group_placement.WorkerSpeed`), or what a profile says of whole groups, KV and tool
calls included (:class:`orchestrator.policies.placement.worker_load.WorkerRates`, :func:`allocate_loads`). Guarantees:

* The degrees sum to the budget and come in descending order, the order in which the placement takes the longest first.
* The answer is the best of all allocations, for any budget: within a given makespan, the furthest that the longest-first order
  can be served with so many GPUs, the last worker of this degree, follows from the furthest with fewer, as a worker that begins
  further on also ends further on. Where that reaches the end the makespan can be met, and the placement's own search finds the
  smallest one that can.
* :func:`anneal` is Heddle's Algorithm 2 for comparison: simulated annealing from a random sorted start, with its three moves.
  Same random source, same answer; never worse than the best allocation of equal degrees.

A worker never spans servers: a degree above ``per_server`` is not used, and the budget must be whole servers or less than one.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from orchestrator.policies.placement.group_placement import Fill, WorkerSpeed, cut_groups, most_within, search_makespan
from orchestrator.policies.placement.worker_load import TrajectoryLoads, WorkerRates, place_loads

# From this trajectory on, within so many seconds, likely number: how many a worker takes, their seconds, those of one more.
Take = Callable[[int, float, int], tuple[int, float, float]]


@dataclass(frozen=True)
class DegreeAllocation:
    """``degrees`` of the workers, descending; ``makespan``: seconds of the best placement; ``exact``: nothing is better;
    ``tried``: questions that were asked, or allocations that were looked at."""

    degrees: tuple[int, ...]
    makespan: float
    exact: bool
    tried: int


@dataclass(frozen=True, slots=True)
class AnnealingSchedule:
    """Constants of Algorithm 2. ``cooling`` a step; it ends when the temperature is ``final`` of the first makespan."""

    cooling: float = 0.98
    final: float = 1e-3

    def __post_init__(self) -> None:
        if not (0 < self.cooling < 1 and 0 < self.final < 1):
            raise ValueError(f"{self}: both between 0 and 1")


def allocate(
    lengths: Sequence[float], budget: int, speeds: Mapping[int, WorkerSpeed], *, per_server: int = 8
) -> DegreeAllocation:
    """Split ``budget`` GPUs. ``lengths``: predicted tokens, any order. ``speeds``: by degree, in GPUs.

    Raises ValueError when no allocation uses the budget up, or none holds all trajectories.
    """
    usable = _usable(budget, speeds, per_server)
    longest_first = _longest_first(lengths)
    takes = {degree: _taking(speeds[degree].costs, longest_first) for degree in usable}
    largest = max((speeds[degree].costs[-1] for degree in usable), default=0.0)
    smallest = min(speeds[degree].costs[0] for degree in usable)
    longest = longest_first[0] if longest_first else 0.0
    return _best(takes, budget, len(longest_first), longest * smallest, longest * largest)


def allocate_loads(
    loads: TrajectoryLoads, budget: int, rates: Mapping[int, WorkerRates], *, per_server: int = 8, margin: float = 0.0
) -> DegreeAllocation:
    """As :func:`allocate`, of what a profile says of groups: ``rates`` by degree, in GPUs. Degrees that differ pay while
    forecasts hold, and cost when they do not: equal ones are kept unless others promise ``margin`` (a share) less."""
    usable = _usable(budget, rates, per_server)
    takes: dict[int, Take] = {degree: _loading(loads, rates[degree]) for degree in usable}
    least = min(loads.group_seconds(rates[degree], 0, min(1, loads.count)) for degree in usable)
    most_of_all = max(loads.group_seconds(rates[degree], 0, loads.count) for degree in usable)
    found = _best(takes, budget, loads.count, least, most_of_all)
    equal = [(place_loads(loads, [rates[d[0]]] * len(d))[1], d) for d in _uniform(budget, usable)]
    makespan, degrees = min(equal, default=(math.inf, ()))
    if makespan * (1.0 - margin) > found.makespan:
        return found
    return DegreeAllocation(degrees, makespan, makespan <= found.makespan, found.tried + len(equal))


def _taking(costs: list[float], lengths: Sequence[float]) -> Take:
    def take(start: int, limit: float, _: int) -> tuple[int, float, float]:
        taken, beyond = most_within(costs, lengths[start], limit)
        taken = min(taken, len(lengths) - start)
        return taken, costs[taken - 1] * lengths[start] if taken else 0.0, beyond

    return take


def _loading(loads: TrajectoryLoads, rates: WorkerRates) -> Take:
    return lambda start, limit, hint: loads.most_within(rates, start, limit, hint)


def _best(takes: Mapping[int, Take], budget: int, count: int, least: float, first: float) -> DegreeAllocation:
    """The allocation with the smallest makespan. ``least``: no makespan is below it; ``first``: any allocation that holds all
    has one within it. Raises ValueError when none does."""
    if not count:
        return DegreeAllocation(next(_uniform(budget, list(takes))), 0.0, True, 0)
    asked = 0

    def ask(limit: float) -> Fill[tuple[int, ...]]:
        nonlocal asked
        asked += 1
        return _reach(takes, budget, count, limit)

    found = search_makespan(ask, least, first, count)
    if found is None:
        raise ValueError(f"no allocation of {budget} GPUs holds {count} trajectories")
    return DegreeAllocation(found[0], found[1], True, asked)


def _reach(takes: Mapping[int, Take], budget: int, count: int, limit: float) -> Fill[tuple[int, ...]]:
    """Whether all trajectories end within ``limit``: degrees, their makespan, the next limit to ask for, how many end."""
    furthest: list[tuple[int, float, tuple[int, ...]] | None] = [(0, 0.0, ()), *[None] * budget]  # by GPUs used
    following = math.inf
    for degree, take in takes.items():  # descending
        hint, known = 0, dict[int, tuple[int, float, float]]()  # by where it begins
        for used in range(degree, budget + 1):
            before = furthest[used - degree]
            if before is None:
                continue
            start, seconds, degrees = before
            taken, own, beyond = 0, 0.0, math.inf
            if start < count:
                if start not in known:
                    known[start] = take(start, limit, hint)
                taken, own, beyond = known[start]
                hint, following = taken, min(following, beyond)
            now = furthest[used]
            if now is None or start + taken > now[0]:
                furthest[used] = (start + taken, max(seconds, own), (*degrees, degree))
    end = furthest[budget]
    assert end is not None  # the budget is a sum of the degrees
    return (end[2] if end[0] >= count else ()), end[1], following, end[0]


def anneal(
    lengths: Sequence[float] | TrajectoryLoads,
    budget: int,
    kinds: Mapping[int, WorkerSpeed] | Mapping[int, WorkerRates],
    rng: random.Random,
    *,
    per_server: int = 8,
    annealing: AnnealingSchedule | None = None,
) -> DegreeAllocation:
    """As :func:`allocate`, or with :class:`TrajectoryLoads` as :func:`allocate_loads`, by Algorithm 2."""
    usable = _usable(budget, kinds, per_server)
    search_ = _Search(lengths if isinstance(lengths, TrajectoryLoads) else _longest_first(lengths), kinds)
    for degrees in _uniform(budget, usable):
        search_.cost(degrees)
    _anneal(search_, budget, usable, rng, annealing or AnnealingSchedule())
    if not search_.best:
        raise ValueError(f"no allocation of {budget} GPUs holds all trajectories")
    return DegreeAllocation(search_.best, search_.makespan, False, search_.tried)


def _usable(budget: int, kinds: Mapping[int, object], per_server: int) -> list[int]:
    usable = sorted((degree for degree in kinds if 0 < degree <= per_server), reverse=True)
    if budget < 1 or (budget > per_server and budget % per_server):
        raise ValueError(f"budget = {budget}: whole servers of {per_server} GPUs, or less than one")
    if not count_allocations(budget, usable):
        raise ValueError(f"budget = {budget}: no sum of the degrees {usable} on offer")
    return usable


def _longest_first(lengths: Sequence[float]) -> list[float]:
    longest_first = sorted(lengths, reverse=True)
    if longest_first and not (longest_first[-1] >= 0 and math.isfinite(sum(longest_first))):
        raise ValueError("lengths: finite numbers of tokens, 0 or more")
    return longest_first


def count_allocations(budget: int, degrees: Sequence[int]) -> int:
    """How many multisets of ``degrees`` sum to ``budget``."""
    ways = [1] + [0] * budget
    for degree in degrees:
        for total in range(degree, budget + 1):
            ways[total] += ways[total - degree]
    return ways[budget]


class _Search:
    """The best allocation seen so far."""

    def __init__(
        self, lengths: Sequence[float] | TrajectoryLoads, kinds: Mapping[int, WorkerSpeed] | Mapping[int, WorkerRates]
    ) -> None:
        self._lengths = lengths
        self._kinds = kinds
        self.best: tuple[int, ...] = ()
        self.makespan = math.inf
        self.tried = 0

    def cost(self, degrees: tuple[int, ...]) -> float:
        """Its makespan, infinite when it does not hold all trajectories; the best is remembered."""
        self.tried += 1
        makespan = self._makespan([self._kinds[degree] for degree in degrees])
        if makespan < self.makespan:
            self.best, self.makespan = degrees, makespan
        return makespan

    def _makespan(self, workers: Sequence[WorkerSpeed | WorkerRates]) -> float:
        if isinstance(self._lengths, TrajectoryLoads):
            return place_loads(self._lengths, [worker for worker in workers if isinstance(worker, WorkerRates)])[1]
        speeds = [worker for worker in workers if isinstance(worker, WorkerSpeed)]
        if sum(speed.capacity for speed in speeds) < len(self._lengths):
            return math.inf
        return cut_groups(self._lengths, speeds)[1]


def _uniform(budget: int, degrees: Sequence[int]) -> Iterator[tuple[int, ...]]:
    for degree in degrees:
        if budget % degree == 0:
            yield (degree,) * (budget // degree)


def _anneal(
    search: _Search, budget: int, degrees: Sequence[int], rng: random.Random, constants: AnnealingSchedule
) -> None:
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
