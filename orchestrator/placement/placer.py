"""Where the trajectories of a run are, by their forecasts: placement inside each class of hardware, and moves in gaps (Heddle 5).

Guarantees: a trajectory's first turn goes to the worker of its rank, when the KV of all that are there has room to the end
with it (:func:`~orchestrator.policies.placement.worker_load.projected_peak`; the longest first; a worker that has nobody
never lets one wait); later ones stay there until a forecast, made while its environment works, puts it elsewhere and the
move pays; then its next turn goes there, and never one that is under way. The exact placement
(:mod:`orchestrator.policies.placement.worker_load`) is solved again when enough has changed; between, ranks are scaled
(:mod:`orchestrator.policies.placement.migration`). Among workers that are alike a cut by length must pay: where the
forecasts are so unsure that even shares end as soon, trajectories are spread evenly. Whatever was planned, a worker that
will be done much sooner than another relieves it of what is in a gap there (:class:`Relief`). Where KV can be sent it is, in
the order of the transmission scheduler; what could not be is computed anew; a move that did not begin before the next turn
is ready is given up. Workers that close take no part: the router's own rule serves what was placed on them, until it is in a
gap.

Where workers come and leave while a run goes on (:class:`orchestrator.proxy.membership.Membership` says so), all is
placed anew over those that are there. What a worker that left had goes by its new rank, at once: to no worker that
left, and no KV is sent from or to one. What waits for room takes that of a worker that came; the rest is looked at in
its gap, or at its next turn at the latest, and moves where that pays.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from heapq import heappop, heappush

import numpy as np
from numpy.typing import NDArray

from orchestrator.api import ConfigError, RetryableError
from orchestrator.config.prediction_keys import PlacementSection
from orchestrator.events import EventLog
from orchestrator.policies.parallelism.engine_profile import EngineLayout, EngineProfile
from orchestrator.policies.placement.migration import (
    TrajectoryMove,
    TransmissionScheduler,
    WorkerPartition,
    choose_transfer,
)
from orchestrator.policies.placement.worker_load import (
    SCORE,
    TrajectoryLoads,
    TurnStatistics,
    WorkerRates,
    place_loads,
    projected_peak,
    rates_of,
    sorted_loads,
)
from orchestrator.policies.prediction.length_predictor import LengthForecast
from orchestrator.policies.routing.turn_routing import TurnRouter
from orchestrator.proxy.kv_moves import GapMover
from orchestrator.proxy.worker_state import WorkerState

_LOOK_AGAIN = 30.0  # seconds after which a trajectory that waits for room looks whether its worker is still there
_PAYS = 0.95  # a cut by length among workers that are alike must end by so much sooner than shares that are alike
RELIEF = 0.8  # of the time that a worker still takes: one that takes less relieves it
_FRESH = 1.0  # seconds for which a worker's time to be done is good, where no move changed it
_CHANGED = 1.25  # a forecast by this factor is a change


RatesOf = Callable[[int], WorkerRates]  # of a worker, by its place in the fleet: those that came later have one too


def line_rates(settings: PlacementSection, speed: float, slots: int) -> WorkerRates:
    """Of the run's settings, where there is no profile: a line in the number of sequences beside each other."""
    alone = settings.token_seconds / speed
    steps = (alone, alone * (1.0 + settings.interference))
    return WorkerRates(steps, prefill=settings.prefill_seconds, slots=slots)


def rates_by_name(settings: PlacementSection, states: Sequence[WorkerState], slots: Callable[[str], int]) -> RatesOf:
    """By ``speeds``, where there is no profile. ``slots``: requests that the worker of this name computes at once."""

    @cache
    def rates(name: str) -> WorkerRates:
        return line_rates(settings, settings.speeds.get(name, 1.0), slots(name))

    return lambda worker: rates(states[worker].worker.name)


def profiled_rates(profile: EngineProfile, slots: int, degree: int) -> WorkerRates:
    """Of an engine of so many devices. Raises ConfigError for one that was not profiled."""
    try:
        return rates_of(profile, EngineLayout(degree), slots)
    except KeyError as error:
        known = ", ".join(f"TP {layout.tp}" for layout in profile.layouts) or "none"
        fix = f"this run's engines use it, but the profile has only {known}: measure it with `rl-coserve profile`"
        raise ConfigError("rollout.placement.profile", f"TP {degree}", fix) from error


@dataclass(slots=True)
class PlacedTrajectory:
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
    forecast: LengthForecast | None = None  # the last one


@dataclass(slots=True)
class WorkerGroup:
    """The trajectories of the tasks that share workers, longest first. ``task``: one of them."""

    task: str
    ranks: list[tuple[float, str]] = field(default_factory=list)  # (-tokens, trajectory)
    partition: WorkerPartition | None = None
    members: frozenset[int] = frozenset()  # workers of the last placement
    changed: int = 0  # since it was solved
    solved: float = 0.0


def between(value: float, bound: float, share: float) -> float:
    """So far on the way from a value to a bound, in logarithms."""
    value, bound = max(value, 1.0), max(bound, 1.0)
    return float(value * (bound / value) ** share)


def spread_of(forecast: LengthForecast) -> float:
    """Standard deviation of the logarithm, so that one in ten is above ``high`` and the mean is as forecast; 1.28 at most, as no
    log-normal distribution has more above its mean."""
    above = max(0.0, math.log((1.0 + forecast.high) / (1.0 + forecast.tokens)))
    return SCORE - math.sqrt(max(0.0, SCORE * SCORE - 2.0 * above))


class Relief:
    """Which worker relieves another one of a trajectory that is in a gap there: one that will be done much sooner.

    Guarantee: a move counts from the moment it is decided, at both ends: what is on its way to a worker (or waits to be sent
    there) is taken as being there, and what leaves one as gone, until it has arrived or was given up. So any number of gaps in
    the same second relieves a worker of no more than it is slower by. What else changes is looked at once a second at most.

    ``there``: worker -> the trajectories that began there, kept by the caller; ``seconds``: what a worker takes to
    end such ones."""

    def __init__(
        self,
        there: Mapping[int, Mapping[str, PlacedTrajectory]],
        seconds: Callable[[int, Sequence[PlacedTrajectory]], float],
    ) -> None:
        self._there, self._seconds = there, seconds
        self._ways: dict[str, tuple[int, int]] = {}  # trajectory -> from where to where it is on its way
        self._coming: dict[int, dict[str, PlacedTrajectory]] = {}
        self._known: dict[int, tuple[float, float]] = {}  # worker -> when it was looked at, seconds

    def goes(self, trajectory: str, item: PlacedTrajectory, source: int, target: int) -> None:
        """It was decided to move it, in place of any move that was decided before."""
        self.settled(trajectory)
        self._ways[trajectory] = source, target
        self._coming.setdefault(target, {})[trajectory] = item
        self.changed(source, target)

    def settled(self, trajectory: str) -> None:
        """It has arrived, or was given up, or ended. Unknown ones are ignored."""
        way = self._ways.pop(trajectory, None)
        if way is not None:
            del self._coming[way[1]][trajectory]
            self.changed(*way)

    def changed(self, *workers: int) -> None:
        """A trajectory was moved from or to these."""
        for worker in workers:
            self._known.pop(worker, None)

    def find(
        self, trajectory: str, item: PlacedTrajectory, worker: int, others: Iterable[int]
    ) -> tuple[int, float] | None:
        """The one of the others that will be done first, where that is much sooner than here even with this trajectory: and by
        how many seconds."""
        self.settled(trajectory)  # it is decided anew
        workers = [other for other in others if other != worker]
        if not workers:
            return None
        here = self.done_in(worker)
        target = min(workers, key=lambda other: (self.done_in(other), other))
        if self.done_in(target) > RELIEF * here:
            return None
        with_it = self._seconds(target, [*self._held(target), item])
        return (target, here - with_it) if with_it <= RELIEF * here else None

    def done_in(self, worker: int) -> float:
        """Seconds until a worker has ended all that is there or on its way there."""
        now = asyncio.get_running_loop().time()
        known = self._known.get(worker)
        if known is None or now - known[0] >= _FRESH:
            held = self._held(worker)
            known = self._known[worker] = (now, self._seconds(worker, held) if held else 0.0)
        return known[1]

    def _held(self, worker: int) -> list[PlacedTrajectory]:
        there, coming = self._there.get(worker, {}), self._coming.get(worker, {})
        ways = self._ways
        held = [item for name, item in there.items() if name not in ways or ways[name][0] != worker]
        return [*held, *(item for name, item in coming.items() if name not in there)]


@dataclass(eq=False)
class TrajectoryPlacer:
    """One run's. ``rates_of``: what each worker does; ``longest``: tokens of context at which a trajectory ends."""

    settings: PlacementSection
    router: TurnRouter
    events: EventLog
    rates_of: RatesOf
    mover: GapMover | None = None
    longest: float = math.inf

    def __post_init__(self) -> None:
        self._pace = TurnStatistics()
        self._placed: dict[str, PlacedTrajectory] = {}
        self._groups: dict[frozenset[str], WorkerGroup] = {}  # by the classes of their workers
        self._group_of: dict[str, WorkerGroup] = {}  # by task
        self._classes = self.router.fleet  # what the groups were made by
        self._fleet = 0  # how often workers came or left
        self._accounts: dict[int, dict[str, PlacedTrajectory]] = {}  # worker -> trajectories that began there
        # worker -> heap of those that have not begun, longest first
        self._waiting: dict[int, list[tuple[float, str]]] = {}
        self._transmissions = TransmissionScheduler()
        self._moves: dict[str, TrajectoryMove] = {}
        self._relief = Relief(self._accounts, self._drain)
        self.moved = 0
        self.sent = 0  # of them with their KV
        self.solved = 0

    # -- what it is told ---------------------------------------------------------------------------------------------

    def begin(self, trajectory: str, task: str, tokens: float) -> None:
        """It starts."""
        group = self._group(task)  # first: groups may be made anew, of what is known
        self._placed[trajectory] = PlacedTrajectory(tokens, task)
        insort(group.ranks, (-tokens, trajectory))
        group.changed += 1

    def turn_over(self, trajectory: str, said: int, heard: int) -> None:
        """The policy has said so many tokens after so many new ones; its environment works."""
        placed = self._placed.get(trajectory)
        if placed is not None:
            self._pace.record_turn(placed.task, said, heard, not placed.context)
            placed.context += said + heard
            placed.since = asyncio.get_running_loop().time()

    def update(self, trajectory: str, forecast: LengthForecast) -> None:
        """A new forecast; where it is in a gap, it may be moved."""
        placed = self._placed.get(trajectory)
        if placed is None:
            return
        group = self._group(placed.task)
        was, placed.forecast = placed.tokens, forecast
        if max(was, forecast.tokens) > _CHANGED * max(1.0, min(was, forecast.tokens)):
            group.changed += 1
        del group.ranks[bisect_left(group.ranks, (-was, trajectory))]
        placed.tokens, placed.turns, placed.spread = forecast.tokens, forecast.turns, spread_of(forecast)
        insort(group.ranks, (-forecast.tokens, trajectory))
        if placed.worker >= 0 and self.settings.migrate and placed.context:
            self._reconsider(trajectory, placed, group, forecast)

    async def before(self, trajectory: str) -> None:
        """Its next turn is ready: it has a worker when this returns."""
        placed = self._placed.get(trajectory)
        if placed is None:
            return
        if placed.since >= 0:
            self._pace.record_gap(placed.task, asyncio.get_running_loop().time() - placed.since)
            placed.since = -1.0
        if placed.worker >= 0 and placed.fleet != self._fleet and placed.forecast is not None:
            placed.fleet = self._fleet  # since then no forecast has come
            if self.settings.migrate and placed.context:
                self._reconsider(trajectory, placed, self._group(placed.task), placed.forecast)
        if placed.worker < 0:
            group = self._group(placed.task)
            self._solve(group, placed.task)
            if (worker := self._worker_of(trajectory, placed, group)) >= 0:
                self._put(trajectory, placed, worker)
                await self._room(trajectory, placed)
        elif self._transmissions.is_moving(trajectory) and placed.sending is not None:
            await asyncio.wait([placed.sending])
        else:
            self._drop(trajectory)  # it did not begin in time

    def end(self, trajectory: str) -> None:
        """It is over."""
        placed = self._placed.get(trajectory)
        if placed is None:
            return
        group = self._group(placed.task)
        del self._placed[trajectory]
        del group.ranks[bisect_left(group.ranks, (-placed.tokens, trajectory))]
        group.changed += 1
        if placed.waits is not None:
            placed.waits.cancel()
            placed.waits = None
        freed, placed.worker = placed.worker, -1
        self._account(trajectory, placed)
        self._admit(freed)
        if placed.sending is not None:
            placed.sending.cancel()
        self._drop(trajectory)

    async def close(self) -> None:
        """Nothing is sent any more."""
        tasks = [placed.sending for placed in self._placed.values() if placed.sending is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def stats(self) -> dict[str, int]:
        """Counters since the start."""
        return {"moved": self.moved, "sent": self.sent, "solved": self.solved}

    # -- workers that come and leave ---------------------------------------------------------------------------------

    def worker_came(self, worker: int) -> None:
        """It takes turns from now on."""
        self._place_anew()
        self._admit(worker)

    def worker_left(self, worker: int) -> None:
        """It takes none any more, and what it has goes on elsewhere. Said before anything of it is sent again."""
        self._place_anew()
        for trajectory, move in list(self._moves.items()):
            if worker in (move.source, move.target):
                placed = self._placed[trajectory]
                if placed.sending is not None:
                    placed.sending.cancel()
                self._drop(trajectory)
        self._waiting.pop(worker, None)
        had = sorted((-one.tokens, name) for name, one in self._placed.items() if one.worker == worker)
        for _, trajectory in had:
            placed = self._placed[trajectory]
            target = self._worker_of(trajectory, placed, self._group(placed.task))
            self._put(trajectory, placed, target)
            self._relief.changed(target)
            if placed.waits is not None and target >= 0:
                heappush(self._waiting.setdefault(target, []), (-placed.tokens, trajectory))
                self._admit(target)
            elif placed.waits is not None:  # for nobody: the router's own rule has it wait
                waits, placed.waits = placed.waits, None
                waits.set_result(None)
            elif placed.context:
                self.moved += 1

    def _place_anew(self) -> None:
        self._fleet += 1
        self._relief.changed(*self._accounts)
        for task in [group.task for group in self._groups.values()]:
            self._solve(self._group(task), task)

    # -- where -------------------------------------------------------------------------------------------------------

    def _group(self, task: str) -> WorkerGroup:
        if self._classes != self.router.fleet:
            self._classes = self.router.fleet
            if any(
                self._groups.get(self.router.worker_classes(name)) is not one for name, one in self._group_of.items()
            ):
                self._regroup()
        group = self._group_of.get(task)
        if group is None:
            group = self._group_of[task] = self._groups.setdefault(self.router.worker_classes(task), WorkerGroup(task))
        return group

    def _regroup(self) -> None:
        """Tasks share other workers than before: the last one of a class has left, or the first one came."""
        self._groups, self._group_of = {}, {}
        for trajectory, placed in self._placed.items():
            group = self._group(placed.task)
            insort(group.ranks, (-placed.tokens, trajectory))
            group.changed += 1

    def _solve(self, group: WorkerGroup, task: str) -> None:
        """Place anew, where enough has changed since the last time."""
        now = asyncio.get_running_loop().time()
        active = len(group.ranks)
        workers = self.router.eligible_workers(task)
        same = set(workers) == group.members
        if same and (
            group.changed < self.settings.renew_share * active or now - group.solved < self.settings.renew_seconds
        ):
            return
        if not workers or not active:  # nothing to share out; the first that begins is not placed by that
            group.partition, group.members = None, frozenset()
            return
        rates = {worker: self.rates_of(worker) for worker in workers}
        workers.sort(key=lambda worker: (rates[worker].steps[0], worker))
        placed = [self._placed[name] for _, name in group.ranks]
        loads, order = self._loads(placed)
        starts, makespan = place_loads(loads, [rates[worker] for worker in workers])
        sizes = tuple(end - start for start, end in itertools.pairwise(starts))
        group.partition, group.changed, group.solved = WorkerPartition(tuple(workers), sizes), 0, now
        if len(workers) > 1 and len({one.key for one in rates.values()}) == 1:
            share = self._loads([placed[number] for number in order[:: len(workers)]])[0]
            if makespan > _PAYS * share.group_seconds(rates[workers[0]], 0, share.count):
                group.partition = None  # they tell too little apart
        group.members = frozenset(workers)
        self.solved += 1

    def _worker_of(self, trajectory: str, placed: PlacedTrajectory, group: WorkerGroup) -> int:
        """By the last placement; -1: there is no worker."""
        if group.partition is None:
            return min(group.members, key=self._number, default=-1)
        rank = bisect_left(group.ranks, (-placed.tokens, trajectory))
        return group.partition.worker_of(rank, len(group.ranks))

    def _loads(self, placed: Sequence[PlacedTrajectory]) -> tuple[TrajectoryLoads, NDArray[np.int64]]:
        contexts = [self._known(one) for one in placed]
        return sorted_loads(
            [one.tokens for one in placed],
            contexts,
            [0.0 if one.worker >= 0 else context for one, context in zip(placed, contexts, strict=True)],
            [one.turns * self._pace.gap_seconds(one.task) for one in placed],
            [one.spread for one in placed],
            self._pace.context_growth({one.task for one in placed}),
            self.longest,
        )

    def _number(self, worker: int) -> tuple[int, int]:
        """How many are there or wait for room, for an order of workers."""
        return len(self._accounts.get(worker, ())) + len(self._waiting.get(worker, ())), worker

    def _reconsider(
        self, trajectory: str, placed: PlacedTrajectory, group: WorkerGroup, forecast: LengthForecast
    ) -> None:
        self._solve(group, placed.task)
        if not group.members or self._transmissions.is_moving(trajectory):
            return
        certainty, active = self.settings.certainty, len(group.ranks)
        ranks = [
            bisect_left(group.ranks, (-tokens, trajectory))
            for tokens in (
                forecast.tokens,
                between(forecast.tokens, forecast.high, certainty),
                between(forecast.tokens, forecast.low, certainty),
            )
        ]
        target = placed.worker if placed.worker in group.members else min(group.members, key=self._number)
        if group.partition is not None:
            target = group.partition.target_worker(placed.worker, ranks[0], ranks[1], ranks[2], active)
        relief = math.inf
        if target == placed.worker:
            found = self._relief.find(trajectory, placed, placed.worker, group.members)
            target, relief = found or (target, relief)
        if target == placed.worker:
            self._drop(trajectory)
            return
        gain = relief
        if relief == math.inf:
            gain = forecast.tokens * (self._step(placed.worker) - self._step(target, placed))
        if placed.worker not in group.members:
            gain = float("inf")  # its worker is gone
        transfer = self.mover.seconds(placed.worker, target, placed.context) if self.mover is not None else None
        each = self.rates_of(target).prefill if self.settings.profile else self.settings.prefill_seconds
        how = choose_transfer(gain, transfer, placed.context * each)
        if how == "stay":
            self._drop(trajectory)
        elif how == "recompute":
            source = placed.worker
            self._drop(trajectory)  # of a transfer that it still waits for
            self._put(trajectory, placed, target)
            self._relief.changed(source, target)
            self._admit(source)
            self.moved += 1
        else:
            self._moves[trajectory] = move = TrajectoryMove(trajectory, placed.worker, target, forecast.tokens)
            self._transmissions.request_move(move)
            self._relief.goes(trajectory, placed, move.source, target)
            self._begin_sending()

    def _drain(self, worker: int, there: Sequence[PlacedTrajectory]) -> float:
        """Seconds until a worker has ended these."""
        loads, _ = self._loads(there)
        return loads.group_seconds(self.rates_of(worker), 0, len(there))

    def _step(self, worker: int, more: PlacedTrajectory | None = None) -> float:
        """Seconds a token there with the trajectories that began there, and one more; infinite where its KV does not fit."""
        rates, began = self.rates_of(worker), self._accounts.get(worker, {})
        number, context = len(began), sum(self._known(one) for one in began.values())
        if more is not None:
            number, context = number + 1, context + more.context
            if context > rates.room:
                return math.inf
        return rates.step_seconds(number) + rates.context * context

    def _put(self, trajectory: str, placed: PlacedTrajectory, worker: int) -> None:
        placed.worker, placed.fleet = worker, self._fleet
        self._account(trajectory, placed)
        self.router.pin_trajectory(trajectory, worker)

    # -- room for KV -------------------------------------------------------------------------------------------------

    def _account(self, trajectory: str, placed: PlacedTrajectory) -> None:
        """Bring the workers' accounts up to date: it is in that of the worker where it began."""
        began = placed.worker if placed.waits is None else -1
        if began != placed.counted:
            if placed.counted >= 0:
                del self._accounts[placed.counted][trajectory]
            if began >= 0:
                self._accounts.setdefault(began, {})[trajectory] = placed
            placed.counted = began

    def _known(self, placed: PlacedTrajectory) -> float:
        return placed.context or self._pace.prompt_tokens(placed.task)

    def _fits(self, worker: int, placed: PlacedTrajectory) -> bool:
        """Whether the KV of all that are there has room to the end with one more."""
        began = self._accounts.get(worker)
        room = self.rates_of(worker).room
        if not began or math.isinf(room):
            return True
        all_of = [*began.values(), placed]
        peak = projected_peak(
            [self._known(one) for one in all_of],
            [one.tokens for one in all_of],
            [one.spread for one in all_of],
            self._pace.context_growth({one.task for one in all_of}),
            self.longest,
        )
        return peak <= room

    async def _room(self, trajectory: str, placed: PlacedTrajectory) -> None:
        """Wait until the worker has room for its KV: trajectories that begin without it take turns in computing their prefixes
        anew. The longest goes first; a worker that has nobody never lets one wait."""
        placed.waits = asyncio.get_running_loop().create_future()
        self._account(trajectory, placed)
        heappush(self._waiting.setdefault(placed.worker, []), (-placed.tokens, trajectory))
        self._admit(placed.worker)
        while placed.waits is not None:
            await asyncio.wait([placed.waits], timeout=_LOOK_AGAIN)
            if placed.waits is not None and placed.worker not in self.router.eligible_workers(placed.task):
                placed.waits = None  # its worker is gone: the router's own rule serves it
        self._account(trajectory, placed)

    def _admit(self, worker: int) -> None:
        """Those that fit begin; a worker for which nobody waits takes from the one for which most do."""
        while worker >= 0 and (candidate := self._next(worker)) is not None:
            trajectory, placed = candidate
            if not self._fits(worker, placed):
                return
            heappop(self._waiting[placed.worker])
            waits, placed.waits = placed.waits, None
            self._put(trajectory, placed, worker)
            if waits is not None and not waits.done():
                waits.set_result(None)

    def _next(self, worker: int) -> tuple[str, PlacedTrajectory] | None:
        """Who begins next on a worker: still waiting, and served there."""
        own = self._waiting.get(worker, [])
        others = sorted((heap for key, heap in self._waiting.items() if key != worker), key=len, reverse=True)
        for heap in (own, *others[:1]):
            while heap:
                placed = self._placed.get(heap[0][1])
                if placed is not None and placed.waits is not None:
                    if heap is own or worker in self._group(placed.task).members:
                        return heap[0][1], placed
                    break
                heappop(heap)
        return None

    # -- KV on its way -----------------------------------------------------------------------------------------------

    def _begin_sending(self) -> None:
        for move in self._transmissions.start_moves():
            placed = self._placed[move.trajectory]
            placed.sending = asyncio.create_task(self._send(move, placed), name=f"send KV of {move.trajectory}")

    async def _send(self, move: TrajectoryMove, placed: PlacedTrajectory) -> None:
        assert self.mover is not None
        try:
            arrived = await self.mover.send(move.trajectory, move.source, move.target, placed.context)
        except RetryableError as error:
            arrived = False
            self.events.emit("fault", what="kv transfer", cause="kv transfer", detail=str(error)[:300])
        finally:
            if self._moves.get(move.trajectory) is move:  # else it was given up, and perhaps another one began
                self._transmissions.end_move(move.trajectory)
                del self._moves[move.trajectory]
        self.moved += 1
        self.sent += arrived
        self._put(move.trajectory, placed, move.target)  # without its KV it is computed anew there
        self._relief.settled(move.trajectory)
        self._admit(move.source)
        self._begin_sending()

    def _drop(self, trajectory: str) -> None:
        """It is not to be moved any more."""
        self._relief.settled(trajectory)
        if self._moves.pop(trajectory, None) is not None:
            self._transmissions.end_move(trajectory)
            self._begin_sending()
