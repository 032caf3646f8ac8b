"""How many devices each rollout engine has in the next step: the resource manager between steps (Heddle 6.2).

A worker with model-parallel degree 8 generates a token sooner than one with degree 1; eight with degree 1 generate more in
total. The result of :func:`allocate_loads` for the expected load is compared with the engines' current degrees. Guarantees:

* A change has a cost: it is made only if the seconds per step that it is expected to gain, over ``horizon`` steps or the
  remaining ones, exceed the measured cost of changes (before the first one ``start_seconds``).
* The gain is the model's relative gain times the measured seconds of a step: the model need not know the machine's speed, only
  how the degrees compare.
* Degrees with which the engines did not start are not tried again. The degrees always use all devices, in descending order.
* The allocation is optimal for any budget: within a given makespan, the furthest point in longest-first order that so many
  GPUs can serve, with a last worker of this degree, follows from the furthest with fewer, as a worker that begins further on
  also ends further on. If it reaches the end, the makespan can be met, and the placement's search finds the smallest such
  makespan. A worker never spans servers: a degree above ``per_server`` is not used, and the budget must be whole servers or
  less than one.

Pure: seconds come in as numbers. The same object serves a run and the simulator.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import NormalDist
from typing import Any

from orchestrator.policies.placement.worker_load import (
    Fill,
    TrajectoryLoads,
    WorkerRates,
    expected_makespan,
    place_loads,
    search_makespan,
    sorted_loads,
)

# From this trajectory on, within so many seconds, likely number: how many a worker takes, their seconds, those of one more.
Take = Callable[[int, float, int], tuple[int, float, float]]
RatesOfDegree = Callable[[int], WorkerRates]  # devices -> what an engine does
MARGIN = 0.05  # by which degrees that differ must be better than equal ones
_MEMORY = 0.5  # weight of the newest of several measurements of a change


@dataclass(frozen=True, slots=True)
class DegreePlan:
    """For the next step. ``gain``: expected seconds per step gained with ``degrees``; ``cost``: seconds charged. ``makespan``,
    ``present``: the model's, with the best and the current degrees. ``reason``: why it changes, or why not although others are
    better."""

    degrees: tuple[int, ...]
    changes: bool = False
    reason: str = ""
    gain: float = 0.0
    cost: float = 0.0
    makespan: float = 0.0
    present: float = 0.0


class DegreeReallocator:
    """One per run. ``options``: possible degrees; ``degrees``: the initial ones, over all ``devices``. Raises ValueError."""

    def __init__(
        self,
        devices: int,
        options: Sequence[int],
        rates_of: RatesOfDegree,
        *,
        degrees: Sequence[int] = (),
        horizon: int = 4,
        start_seconds: float = 0.0,
        per_server: int = 8,
    ) -> None:
        self.devices, self.options = devices, tuple(sorted(set(options), reverse=True))
        self.degrees = tuple(sorted(degrees, reverse=True)) or (1,) * devices
        if sum(self.degrees) != devices or not set(self.degrees) <= set(self.options):
            raise ValueError(f"{self.degrees}: of the degrees {self.options}, {devices} devices in all")
        if horizon < 1 or start_seconds < 0:
            raise ValueError("horizon >= 1, start_seconds >= 0")
        self._rates_of = rates_of
        self._horizon, self._per_server = horizon, per_server
        self.cost = start_seconds  # that a change is charged with
        self._measured = False
        self._failed: dict[tuple[int, ...], str] = {}

    def choose_first(self, loads: TrajectoryLoads) -> None:
        """Before anything starts: the best degrees for these loads."""
        if loads.count:
            rates = {degree: self._rates_of(degree) for degree in self.options}
            found = allocate_loads(loads, self.devices, rates, per_server=self._per_server, margin=MARGIN)
            self.degrees = found.degrees

    def state(self) -> dict[str, Any]:
        """What a resumed run continues with, for JSON."""
        return {"degrees": list(self.degrees), "cost": self.cost, "measured": self._measured}

    def restore(self, state: Mapping[str, Any]) -> bool:
        """Before anything starts: continue with the result of :meth:`state`. False: these degrees are no longer possible, and
        nothing was changed."""
        degrees = tuple(sorted(map(int, state["degrees"]), reverse=True))
        if sum(degrees) != self.devices or not set(degrees) <= set(self.options):
            return False
        self.degrees, self.cost, self._measured = degrees, float(state["cost"]), bool(state["measured"])
        return True

    def plan_next_step(self, loads: TrajectoryLoads, seconds: float, steps_left: int) -> DegreePlan:
        """A step has ended. ``loads``: expected in the next one; ``seconds``: this step's rollout time. The caller carries the
        plan out and calls :meth:`confirm_change` or :meth:`reject_change`."""
        if not loads.count:
            return DegreePlan(self.degrees, reason="nothing is known of the next step's lengths")
        rates = {degree: self._rates_of(degree) for degree in self.options}
        found = allocate_loads(loads, self.devices, rates, per_server=self._per_server, margin=MARGIN)
        present = _placed(loads, [rates[degree] for degree in self.degrees])
        share = 1.0 - found.makespan / present if present > 0 else 0.0
        gain, horizon = share * max(0.0, seconds), min(self._horizon, steps_left)
        answer = DegreePlan(self.degrees, False, "", gain, self.cost, found.makespan, present)
        if found.degrees == self.degrees or share <= 0:
            return answer
        named = format_degrees(found.degrees)
        if why := self._failed.get(found.degrees):
            return replace(answer, reason=f"{named} did not come up: {why}")
        if gain * horizon <= self.cost:
            text = f"{named} would gain {gain:.3g} s a step over {horizon} steps, and costs {self.cost:.3g} s"
            return replace(answer, reason=text)
        text = f"{named} gains {share:.0%} of a step"
        return DegreePlan(found.degrees, True, text, gain, self.cost, found.makespan, present)

    def confirm_change(self, degrees: Sequence[int], seconds: float) -> None:
        """The change was made; ``seconds``: how long the engines stood still."""
        self.degrees = tuple(sorted(degrees, reverse=True))
        self._charge(seconds)

    def reject_change(self, degrees: Sequence[int], seconds: float, why: str) -> None:
        """The engines did not start with it, and have the old degrees again."""
        self._failed[tuple(sorted(degrees, reverse=True))] = why
        self._charge(seconds)

    def _charge(self, seconds: float) -> None:
        self.cost = (1 - _MEMORY) * self.cost + _MEMORY * seconds if self._measured else seconds
        self._measured = True


@dataclass(frozen=True, slots=True)
class EndedTrajectory:
    """A trajectory that has ended. Tokens: ``said`` by the policy, its ``prompt``, later observations ``heard``; ``gap``:
    seconds of its environment."""

    said: int
    prompt: int = 0
    heard: int = 0
    gap: float = 0.0


def expected_loads(
    ended: Sequence[EndedTrajectory], in_flight: Sequence[float], count: int, longest: float = math.inf
) -> TrajectoryLoads:
    """The ``count`` trajectories of the next step: those in flight by their forecasts (tokens to come), the others like those
    that ended, spread evenly over their lengths. ``longest``: context length at which a trajectory ends.

    What ended is taken with its tail: nobody knows which of the next ones will be long, but the step waits for it on whatever
    worker it is, and the largest of several engines' longest is the longest of all.
    """
    order = sorted((one for one in ended if one.said > 0), key=lambda one: one.said)
    known = [*in_flight][:count]
    fresh = count - len(known) if order else 0
    drawn = [order[(2 * number + 1) * len(order) // (2 * fresh)] for number in range(fresh)]
    prompt, gap = _mean([one.prompt for one in order]), _mean([one.gap for one in order])
    said, heard = sum(one.said for one in order), sum(one.heard for one in order)
    contexts = [*[prompt] * len(known), *(float(one.prompt) for one in drawn)]
    return sorted_loads(
        [*known, *(float(one.said) for one in drawn)],
        contexts,
        contexts,
        [*[gap / 2] * len(known), *(one.gap for one in drawn)],
        [0.0] * len(contexts),
        1.0 + heard / said if said else 1.0,
        longest,
    )[0]


def prior_loads(tokens: float, sigma: float, count: int, longest: float = math.inf) -> TrajectoryLoads:
    """The ``count`` trajectories of the first step, of which only the mean of their ``tokens`` and ``sigma``, the deviation of
    its logarithm, are known: evenly over the quantiles of the log-normal distribution."""
    middle, spread = math.log(tokens) - sigma * sigma / 2, NormalDist()
    scores = [spread.inv_cdf((number + 0.5) / count) for number in range(count)]
    ended = [EndedTrajectory(max(1, round(math.exp(middle + sigma * score)))) for score in scores]
    return expected_loads(ended, [], count, longest)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def format_degrees(degrees: Sequence[int]) -> str:
    """For people: 4+2+1+1."""
    return "+".join(map(str, degrees))


@dataclass(frozen=True)
class DegreeAllocation:
    """``degrees`` of the workers, descending; ``makespan``: seconds of the best placement; ``exact``: it is optimal."""

    degrees: tuple[int, ...]
    makespan: float
    exact: bool


def allocate_loads(
    loads: TrajectoryLoads, budget: int, rates: Mapping[int, WorkerRates], *, per_server: int = 8, margin: float = 0.0
) -> DegreeAllocation:
    """Divide ``budget`` GPUs. ``rates``: by degree, in GPUs. Unequal degrees pay while forecasts hold, and cost when they do
    not: equal ones are kept unless others promise a makespan lower by ``margin`` (a share). Raises ValueError if no allocation
    uses up the budget."""
    usable = usable_degrees(budget, rates, per_server)
    takes: dict[int, Take] = {degree: partial(loads.most_within, rates[degree]) for degree in usable}
    least = min(loads.group_seconds(rates[degree], 0, min(1, loads.count)) for degree in usable)
    most_of_all = max(loads.group_seconds(rates[degree], 0, loads.count) for degree in usable)
    found = best_allocation(takes, budget, loads.count, least, most_of_all)
    found = replace(found, makespan=_placed(loads, [rates[degree] for degree in found.degrees]))
    equal = [(_placed(loads, [rates[d[0]]] * len(d)), d) for d in equal_degrees(budget, usable)]
    makespan, degrees = min(equal, default=(math.inf, ()))
    if makespan * (1.0 - margin) > found.makespan:
        return found
    return DegreeAllocation(degrees, makespan, makespan <= found.makespan)


def _placed(loads: TrajectoryLoads, workers: Sequence[WorkerRates]) -> float:
    """The makespan that is to be expected of the best placement."""
    return expected_makespan(loads, place_loads(loads, workers)[0], workers)


def best_allocation(takes: Mapping[int, Take], budget: int, count: int, least: float, first: float) -> DegreeAllocation:
    """The allocation with the smallest makespan. ``least``: no makespan is below it; ``first``: any allocation that holds all
    has one within it. Raises ValueError if there is none."""
    if not count:
        return DegreeAllocation(next(equal_degrees(budget, list(takes))), 0.0, True)
    found = search_makespan(partial(_reach, takes, budget, count), least, first, count)
    if found is None:
        raise ValueError(f"no allocation of {budget} GPUs holds {count} trajectories")
    return DegreeAllocation(found[0], found[1], True)


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


def usable_degrees(budget: int, kinds: Mapping[int, object], per_server: int) -> list[int]:
    """Degrees that fit into a server, descending. Raises ValueError if no sum of them is the budget."""
    usable = sorted((degree for degree in kinds if 0 < degree <= per_server), reverse=True)
    if budget < 1 or (budget > per_server and budget % per_server):
        raise ValueError(f"budget = {budget}: whole servers of {per_server} GPUs, or less than one")
    if not count_allocations(budget, usable):
        raise ValueError(f"budget = {budget}: no sum of the degrees {usable} on offer")
    return usable


def count_allocations(budget: int, degrees: Sequence[int]) -> int:
    """How many multisets of ``degrees`` sum to ``budget``."""
    ways = [1] + [0] * budget
    for degree in degrees:
        for total in range(degree, budget + 1):
            ways[total] += ways[total - degree]
    return ways[budget]


def equal_degrees(budget: int, degrees: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """The allocations with equal workers."""
    for degree in degrees:
        if budget % degree == 0:
            yield (degree,) * (budget // degree)
