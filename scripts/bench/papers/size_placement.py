"""Heddle's placement and degrees by the size of groups alone (5.2, 6.1, 6.2), and its annealing: what runs do not use.

Runs know KV, contexts and tool calls of a group too (:mod:`orchestrator.policies.placement.worker_load`,
:mod:`orchestrator.policies.parallelism.degree_reallocation`), with the same search. Here a worker that holds ``k``
trajectories, the longest of ``L`` tokens, needs ``L x T x F(k)`` seconds: ``T`` is its time per token alone, ``F`` the
interference of ``k`` that run together, any nondecreasing table. Guarantees:

* :func:`place_groups` cuts the trajectories, in descending order of their predicted lengths, into contiguous groups, one a
  worker, in the workers' order, with the smallest makespan of all such cuts: the optimum of the paper's dynamic program, to
  the last bit. For workers that are alike no partition at all is faster (Heddle, lemma 5.1); workers that differ are ordered
  fastest first, the mapping of Heddle 6.2.
* :func:`allocate` finds the best of all allocations of degrees.
* :func:`anneal` is Heddle's Algorithm 2: simulated annealing from a random sorted start, with its three moves. Same random
  source, same answer; never worse than the best allocation of equal degrees.
"""

from __future__ import annotations

import itertools
import math
import random
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from orchestrator.policies.parallelism.degree_reallocation import (
    DegreeAllocation,
    Take,
    best_allocation,
    count_allocations,
    equal_degrees,
    usable_degrees,
)
from orchestrator.policies.placement.worker_load import (
    Fill,
    TrajectoryLoads,
    WorkerRates,
    place_loads,
    search_makespan,
)


@dataclass(frozen=True)
class WorkerSpeed:
    """What one kind of worker does with a number of trajectories at once.

    ``token_seconds``: per token with one trajectory. ``interference``: entry ``k - 1`` is F(k), dimensionless, nondecreasing,
    at least one entry; what is beyond the table does not fit on the worker.
    """

    token_seconds: float
    interference: tuple[float, ...]
    costs: list[float] = field(init=False, repr=False, compare=False)  # T x F(k), seconds per token of the longest

    def __post_init__(self) -> None:
        if not (math.isfinite(self.token_seconds) and self.token_seconds > 0):
            raise ValueError(f"token_seconds = {self.token_seconds}: a positive number of seconds")
        table = self.interference
        if not table or not all(math.isfinite(value) and value > 0 for value in table):
            raise ValueError("interference: at least one entry, all of them positive and finite")
        if any(later < earlier for earlier, later in itertools.pairwise(table)):
            raise ValueError("interference: must not fall as the group grows")
        object.__setattr__(self, "costs", [self.token_seconds * value for value in table])

    @property
    def capacity(self) -> int:
        """The most trajectories at once."""
        return len(self.interference)


@dataclass(frozen=True, eq=False)
class GroupPlacement:
    """``order``: indices of the trajectories, longest first, equals in their own order; shape [n], int64. Worker ``i`` holds
    ``order[starts[i]:starts[i + 1]]``. ``makespan`` in seconds."""

    order: NDArray[np.int64]
    starts: tuple[int, ...]
    makespan: float

    def groups(self) -> list[tuple[int, ...]]:
        """The trajectories of each worker, in the workers' order."""
        order = self.order.tolist()
        return [tuple(order[start:end]) for start, end in itertools.pairwise(self.starts)]

    def sizes(self) -> list[int]:
        """How many each worker holds."""
        return [end - start for start, end in itertools.pairwise(self.starts)]


def place_groups(lengths: Sequence[float] | NDArray[np.float64], workers: Sequence[WorkerSpeed]) -> GroupPlacement:
    """The cut with the smallest makespan.

    ``lengths``: predicted tokens, one entry a trajectory, in any order. ``workers``: in the order in which they take the
    groups, fastest first. Raises ValueError for a length that is negative or no number, without workers, or when they are
    too small for all trajectories.
    """
    values = np.asarray(lengths, dtype=np.float64)
    if values.size and not (values.min() >= 0 and values.max() < math.inf):  # false for NaN too
        raise ValueError("lengths: finite numbers of tokens, 0 or more")
    if not workers:
        raise ValueError("workers: at least one")
    order = np.argsort(-values, kind="stable")
    ordered: Any = values[order]
    starts, makespan = cut_groups(memoryview(ordered), workers)  # few of them are looked at: no list of all
    return GroupPlacement(order, tuple(starts), makespan)


def cut_groups(
    longest_first: Sequence[float], workers: Sequence[WorkerSpeed], below: float = math.inf
) -> tuple[list[int], float]:
    """As :func:`place_groups`, of lengths in descending order: where each group starts (one more entry than workers), makespan.

    Nothing below ``below`` exists: ``([], inf)``, after one question. Searches over many sets of workers pass their best.
    """
    count = len(longest_first)
    if not count:
        return [0] * (len(workers) + 1), 0.0
    costs = [worker.costs for worker in workers]
    if below < math.inf:
        first = math.nextafter(below, 0)
    elif sum(worker.capacity for worker in workers) < count:
        raise ValueError(f"{count} trajectories do not fit on {len(workers)} workers")
    else:
        first = _enough(longest_first, workers)
    least = longest_first[0] * min(table[0] for table in costs)
    return search_makespan(lambda limit: _fill(longest_first, costs, limit), least, first, count) or ([], math.inf)


def _enough(lengths: Sequence[float], workers: Sequence[WorkerSpeed]) -> float:
    """A makespan that surely fits: that of shares alike, or of full workers where shares alike are too many for one."""
    share = -(-len(lengths) // len(workers))
    if share <= min(worker.capacity for worker in workers):
        busy = range(-(-len(lengths) // share))
        return max(lengths[number * share] * workers[number].costs[share - 1] for number in busy)
    return max(lengths[0] * worker.costs[-1] for worker in workers)


def _fill(lengths: Sequence[float], costs: Sequence[list[float]], limit: float) -> Fill[list[int]]:
    """Each worker takes as many as it can within ``limit`` seconds: where the groups start, their makespan, the next limit at
    which one of them could take more, and how many have a place. No starts: not all fit."""
    starts, position, count = [0], 0, len(lengths)
    makespan, following = 0.0, math.inf
    for table in costs:
        length, taken = lengths[position], len(table)
        if table[-1] * length > limit:
            # The quotient finds the number, the product decides: quotients are rounded.
            taken = min(bisect_right(table, limit / length), taken - 1)
            while (beyond := table[taken] * length) <= limit:
                taken += 1
            while taken and table[taken - 1] * length > limit:
                taken -= 1
                beyond = table[taken] * length
            if beyond < following:
                following = beyond
        last = position
        position += taken
        if position >= count:
            seconds = table[count - last - 1] * length
            starts.extend([count] * (len(costs) + 1 - len(starts)))
            return starts, max(makespan, seconds), following, count
        if taken and (seconds := table[taken - 1] * length) > makespan:
            makespan = seconds
        starts.append(position)
    return [], makespan, following, position


def most_within(table: list[float], length: float, limit: float) -> tuple[int, float]:
    """How many trajectories, the longest of ``length``, a worker of these costs ends within ``limit``, and what one more takes.
    The same as in the loop above, which is its inlined form for speed."""
    if table[-1] * length <= limit:
        return len(table), math.inf
    taken = min(bisect_right(table, limit / length), len(table) - 1)
    while table[taken] * length <= limit:
        taken += 1
    while taken and table[taken - 1] * length > limit:
        taken -= 1
    return taken, table[taken] * length


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
    usable = usable_degrees(budget, speeds, per_server)
    longest_first = _longest_first(lengths)
    takes = {degree: _taking(speeds[degree].costs, longest_first) for degree in usable}
    largest = max((speeds[degree].costs[-1] for degree in usable), default=0.0)
    smallest = min(speeds[degree].costs[0] for degree in usable)
    longest = longest_first[0] if longest_first else 0.0
    return best_allocation(takes, budget, len(longest_first), longest * smallest, longest * largest)


def _taking(costs: list[float], lengths: Sequence[float]) -> Take:
    def take(start: int, limit: float, _: int) -> tuple[int, float, float]:
        taken, beyond = most_within(costs, lengths[start], limit)
        taken = min(taken, len(lengths) - start)
        return taken, costs[taken - 1] * lengths[start] if taken else 0.0, beyond

    return take


def anneal(
    lengths: Sequence[float] | TrajectoryLoads,
    budget: int,
    kinds: Mapping[int, WorkerSpeed] | Mapping[int, WorkerRates],
    rng: random.Random,
    *,
    per_server: int = 8,
    annealing: AnnealingSchedule | None = None,
) -> DegreeAllocation:
    """As :func:`allocate`, or with :class:`TrajectoryLoads` of what a profile says of groups, by Algorithm 2."""
    usable = usable_degrees(budget, kinds, per_server)
    search_ = _Search(lengths if isinstance(lengths, TrajectoryLoads) else _longest_first(lengths), kinds)
    for degrees in equal_degrees(budget, usable):
        search_.cost(degrees)
    _anneal(search_, budget, usable, rng, annealing or AnnealingSchedule())
    if not search_.best:
        raise ValueError(f"no allocation of {budget} GPUs holds all trajectories")
    return DegreeAllocation(search_.best, search_.makespan, False)


def _longest_first(lengths: Sequence[float]) -> list[float]:
    longest_first = sorted(lengths, reverse=True)
    if longest_first and not (longest_first[-1] >= 0 and math.isfinite(sum(longest_first))):
        raise ValueError("lengths: finite numbers of tokens, 0 or more")
    return longest_first


class _Search:
    """The best allocation seen so far."""

    def __init__(
        self, lengths: Sequence[float] | TrajectoryLoads, kinds: Mapping[int, WorkerSpeed] | Mapping[int, WorkerRates]
    ) -> None:
        self._lengths = lengths
        self._kinds = kinds
        self.best: tuple[int, ...] = ()
        self.makespan = math.inf

    def cost(self, degrees: tuple[int, ...]) -> float:
        """Its makespan, infinite when it does not hold all trajectories; the best is remembered."""
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
