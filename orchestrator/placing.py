"""Where the trajectories of a run are, by their forecasts: placement inside each class of hardware, and moves in gaps (Heddle 5).

Guarantees: a trajectory's first turn goes to the worker of its rank; later ones stay there until a forecast, made while its
environment works, puts it elsewhere and the move pays; then its next turn goes there, and never one that is under way. The exact
placement (:mod:`orchestrator.policies.placement`) is solved again when enough has changed; between, ranks are scaled
(:mod:`orchestrator.policies.migration`). Where KV can be sent it is, in the order of the transmission scheduler; what could not
be is computed anew; a move that did not begin before the next turn is ready is given up. Workers that close take no part: the
router's own rule serves what was placed on them.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from orchestrator.api import RetryableError
from orchestrator.events import EventLog
from orchestrator.policies.migration import Move, Partition, Transmissions, decide
from orchestrator.policies.placement import Speed, place
from orchestrator.policies.prediction import Forecast
from orchestrator.policies.routing import TurnRouter
from orchestrator.sections import PlacementSection

_ROUNDS = 3  # of placing, each with the interference of the groups of the one before
_CHANGED = 1.25  # a forecast by this factor is a change


SpeedOf = Callable[[int, int, float], Speed]


class Mover(Protocol):
    """Who sends the KV of a trajectory's prefix from worker to worker."""

    def seconds(self, source: int, target: int, tokens: int) -> float | None:
        """What it expects; None: it cannot."""
        ...

    async def send(self, trajectory: str, source: int, target: int, tokens: int) -> bool:
        """Whether the target has it now. Raises RetryableError."""
        ...


@dataclass(slots=True)
class _Placed:
    tokens: float
    task: str
    worker: int = -1
    context: int = 0
    sending: asyncio.Task[None] | None = None


@dataclass(slots=True)
class _Group:
    """The trajectories of the tasks that share workers, longest first."""

    ranks: list[tuple[float, str]] = field(default_factory=list)  # (-tokens, trajectory)
    partition: Partition | None = None
    speeds: dict[int, Speed] = field(default_factory=dict)  # of its workers, with the groups that it made
    changed: int = 0  # since it was solved
    solved: float = 0.0


class Placing:
    """One run's. ``speed_of(worker, most, tokens)``: what a worker does with up to ``most`` trajectories at once, with so many
    tokens before each of them in the mean."""

    def __init__(
        self,
        settings: PlacementSection,
        router: TurnRouter,
        events: EventLog,
        speed_of: SpeedOf,
        mover: Mover | None = None,
    ) -> None:
        self._settings = settings
        self._router = router
        self._events = events
        self._speed_of = speed_of
        self._mover = mover
        self._placed: dict[str, _Placed] = {}
        self._groups: dict[tuple[int, ...], _Group] = {}
        self._group_of: dict[str, _Group] = {}  # by task
        self._transmissions = Transmissions()
        self._moves: dict[str, Move] = {}
        self.moved = 0
        self.sent = 0  # of them with their KV
        self.solved = 0

    # -- what it is told ---------------------------------------------------------------------------------------------

    def begin(self, trajectory: str, task: str, tokens: float) -> None:
        """It starts."""
        self._placed[trajectory] = _Placed(tokens, task)
        group = self._group(task)
        insort(group.ranks, (-tokens, trajectory))
        group.changed += 1

    def update(self, trajectory: str, forecast: Forecast, context: int) -> None:
        """A new forecast; where it is in a gap, it may be moved."""
        placed = self._placed.get(trajectory)
        if placed is None:
            return
        group = self._group(placed.task)
        was = placed.tokens
        if max(was, forecast.tokens) > _CHANGED * max(1.0, min(was, forecast.tokens)):
            group.changed += 1
        del group.ranks[bisect_left(group.ranks, (-was, trajectory))]
        placed.tokens, placed.context = forecast.tokens, context
        insort(group.ranks, (-forecast.tokens, trajectory))
        if placed.worker >= 0 and self._settings.migrate and context:
            self._reconsider(trajectory, placed, group, forecast)

    async def before(self, trajectory: str) -> None:
        """Its next turn is ready: it has a worker when this returns."""
        placed = self._placed.get(trajectory)
        if placed is None:
            return
        if placed.worker < 0:
            group = self._group(placed.task)
            self._solve(group, placed.task)
            if group.partition is not None:
                rank = bisect_left(group.ranks, (-placed.tokens, trajectory))
                self._put(trajectory, placed, group.partition.worker_of(rank, len(group.ranks)))
        elif self._transmissions.running(trajectory) and placed.sending is not None:
            await asyncio.wait([placed.sending])
        else:
            self._drop(trajectory)  # it did not begin in time

    def end(self, trajectory: str) -> None:
        """It is over."""
        placed = self._placed.pop(trajectory, None)
        if placed is None:
            return
        group = self._group(placed.task)
        del group.ranks[bisect_left(group.ranks, (-placed.tokens, trajectory))]
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

    # -- where -------------------------------------------------------------------------------------------------------

    def _group(self, task: str) -> _Group:
        group = self._group_of.get(task)
        if group is None:
            workers = tuple(self._router.eligible(task))
            group = self._group_of[task] = self._groups.setdefault(workers, _Group())
        return group

    def _solve(self, group: _Group, task: str) -> None:
        """Place anew, where enough has changed since the last time."""
        now = asyncio.get_running_loop().time()
        active = len(group.ranks)
        workers = self._router.eligible(task)
        same = group.partition is not None and set(workers) == set(group.partition.workers)
        if same and (
            group.changed < self._settings.renew_share * active or now - group.solved < self._settings.renew_seconds
        ):
            return
        if not workers:
            group.partition = None
            return
        lengths = [-length for length, _ in group.ranks]
        means = dict.fromkeys(workers, sum(lengths) / max(1, active))
        alone = {worker: self._speed_of(worker, 1, means[worker]).token_seconds for worker in workers}
        workers.sort(key=lambda worker: (alone[worker], worker))
        for _ in range(_ROUNDS):  # how many fit together depends on how long they are, which depends on how many fit
            speeds = [self._speed_of(worker, active, means[worker]) for worker in workers]
            found = place(lengths, speeds)
            for worker, start, end in zip(workers, found.starts, found.starts[1:], strict=False):
                if end > start:
                    means[worker] = sum(lengths[start:end]) / (end - start)
        group.speeds = dict(zip(workers, speeds, strict=True))
        group.partition, group.changed, group.solved = Partition(tuple(workers), tuple(found.sizes())), 0, now
        self.solved += 1

    def _reconsider(self, trajectory: str, placed: _Placed, group: _Group, forecast: Forecast) -> None:
        self._solve(group, placed.task)
        if group.partition is None or self._transmissions.running(trajectory):
            return
        certainty, active = self._settings.certainty, len(group.ranks)
        ranks = [
            bisect_left(group.ranks, (-tokens, trajectory))
            for tokens in (
                forecast.tokens,
                _between(forecast.tokens, forecast.high, certainty),
                _between(forecast.tokens, forecast.low, certainty),
            )
        ]
        target = group.partition.target(placed.worker, ranks[0], ranks[1], ranks[2], active)
        if target == placed.worker:
            self._drop(trajectory)
            return
        here, there = (self._beside(group, worker, active) for worker in (placed.worker, target))
        gain = forecast.tokens * (here - there)
        if placed.worker not in group.partition.workers:
            gain = float("inf")  # its worker is gone
        transfer = self._mover.seconds(placed.worker, target, placed.context) if self._mover is not None else None
        how = decide(gain, transfer, placed.context * self._settings.prefill_seconds)
        if how == "stay":
            self._drop(trajectory)
        elif how == "recompute":
            self._put(trajectory, placed, target)
            self.moved += 1
        else:
            self._moves[trajectory] = move = Move(trajectory, placed.worker, target, forecast.tokens)
            self._transmissions.ask(move)
            self._begin_sending()

    def _beside(self, group: _Group, worker: int, active: int) -> float:
        """Seconds a token on a worker with its share of the active ones."""
        assert group.partition is not None
        if worker not in group.partition.workers:
            return 0.0
        total = max(1, sum(group.partition.sizes))
        share = group.partition.sizes[group.partition.workers.index(worker)] * active / total
        speed = group.speeds[worker]
        return speed.costs[min(max(1, round(share)), speed.capacity) - 1]

    def _put(self, trajectory: str, placed: _Placed, worker: int) -> None:
        placed.worker = worker
        self._router.place(trajectory, worker)

    # -- KV on its way -----------------------------------------------------------------------------------------------

    def _begin_sending(self) -> None:
        for move in self._transmissions.start():
            placed = self._placed[move.trajectory]
            placed.sending = asyncio.create_task(self._send(move, placed), name=f"send KV of {move.trajectory}")

    async def _send(self, move: Move, placed: _Placed) -> None:
        assert self._mover is not None
        try:
            arrived = await self._mover.send(move.trajectory, move.source, move.target, placed.context)
        except RetryableError as error:
            arrived = False
            self._events.emit("fault", what="kv transfer", cause="kv transfer", detail=str(error)[:300])
        finally:
            self._transmissions.end(move.trajectory)
            self._moves.pop(move.trajectory, None)
        self.moved += 1
        self.sent += arrived
        self._put(move.trajectory, placed, move.target)  # without its KV it is computed anew there
        self._begin_sending()

    def _drop(self, trajectory: str) -> None:
        """It is not to be moved any more."""
        if self._moves.pop(trajectory, None) is not None:
            self._transmissions.end(trajectory)
            self._begin_sending()


def _between(value: float, bound: float, share: float) -> float:
    """So far on the way from a value to a bound, in logarithms."""
    value, bound = max(value, 1.0), max(bound, 1.0)
    return float(value * (bound / value) ** share)


def speed_of(settings: PlacementSection, names: Sequence[str], slots: int) -> SpeedOf:
    """Of the run's settings: a line in the number beside each other, as far as there are slots; beyond, whole rounds of them."""
    made: dict[tuple[int, int], Speed] = {}

    def speed(worker: int, most: int, tokens: float) -> Speed:
        size = 1 << max(0, most - 1).bit_length()  # few tables
        found = made.get((worker, size))
        if found is None:
            table = tuple(
                (1.0 + settings.interference * (min(number, slots) - 1)) * max(1.0, number / slots)
                for number in range(1, size + 1)
            )
            alone = settings.token_seconds / settings.speeds.get(names[worker], 1.0)
            found = made[worker, size] = Speed(alone, table)
        return found

    return speed
