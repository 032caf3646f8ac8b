"""The servers that a simulated run may borrow, exchanged while it goes on by the production's own
:class:`~orchestrator.borrowing.server_exchange.Exchange`, with its
:class:`~orchestrator.policies.serving.server_borrowing.ServerBroker` and
:class:`~orchestrator.policies.serving.server_borrowing.BorrowDemand` (ROSE 4, 4.3).

One rollout engine beside each serving engine; the run begins with ``sim.borrowed.workers`` of them, and has so many at most.
Serving engines may end: unforeseen (``sim.borrowed.outage_seconds``), or because their load is low (``scaled``). What ends takes
its rollout engine with it, and both are there again ``reload_seconds`` later, or when load rises.

Guarantees: what a server says of itself is what its engine holds and lends now; a rollout engine that nobody borrows holds no
pages, has nothing to compute, and has no weights until it is taken. Nothing is drawn but outages, from the run's seed.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Collection, Sequence
from random import Random
from typing import TYPE_CHECKING

from orchestrator.api import BorrowedWorker, ManagedWorker
from orchestrator.borrowing.server_exchange import Offer
from orchestrator.sim.coserving.serving_engine import Role, ServingEngine, UserRequest
from orchestrator.sim.coserving.shared_worker import BorrowedSimWorker

if TYPE_CHECKING:
    from orchestrator.sim.coserving.serving_cluster import ServingCluster

LOOK = 1.0  # seconds between two looks
WINDOW = 10  # looks that count
UP, DOWN = 0.6, 0.3  # share of the time that engines of a role compute
CALM = 30.0  # seconds since the last change of a role, before an engine of it stops
Mean = Callable[[str], tuple[float, float]]  # of an engine's use, and over how many seconds


class SimMarket:
    """A :class:`~orchestrator.borrowing.server_exchange.Market`. ``pairs``: each rollout worker with the serving engine
    that it is beside; ``most``: that the run may have; ``mean``: see :data:`Mean`. :meth:`open` before the run begins,
    :meth:`close` at its end."""

    job = "run"

    def __init__(
        self, pairs: Sequence[tuple[BorrowedSimWorker, ServingEngine]], most: int, mean: Mean, reload: float
    ) -> None:
        self._pairs = {worker.name: (worker, engine) for worker, engine in pairs}
        self._mean, self._reload, self._most = mean, reload, most
        self._had: set[str] = set()
        self._workers: dict[str, ManagedWorker] = {}
        self.first: Sequence[Offer] = ()
        self._timers: list[asyncio.TimerHandle] = []
        self.returned = 0
        self.outages = 0

    def open(self, workers: Sequence[ManagedWorker]) -> list[ManagedWorker]:
        """``workers``: all of the run, borrowed ones as the run is to see them. Those that it begins with."""
        borrowed = [worker for worker in workers if worker.name in self._pairs]
        self._workers = {worker.name: worker for worker in borrowed}
        self._had = {worker.name for worker in borrowed[: self._most]}
        self.first = [self._offer(name) for name in self._pairs]
        for name, (worker, engine) in self._pairs.items():
            worker.lasts = True
            worker.moved = _always(engine)
            if name not in self._had:
                worker.release()
        return [worker for worker in workers if worker.name in self._had or worker.name not in self._pairs]

    def close(self) -> None:
        """The life ends."""
        for timer in self._timers:
            timer.cancel()

    # -- what the exchange asks ----------------------------------------------------------------------------------------

    async def list_offers(self) -> Sequence[Offer]:
        return [self._offer(name) for name in self._pairs]

    def _offer(self, name: str) -> Offer:
        engine = self._pairs[name][1]
        if not engine.up:
            return Offer(name, "its serving engine has ended")
        return Offer(name, share=engine.pages / engine.rules.pages, before=self._mean(engine.name))

    async def claim(self, offers: Sequence[Offer], wanted: int, seconds: float) -> None:
        """No other job is simulated."""

    def worker(self, url: str) -> BorrowedWorker:
        worker, engine = self._pairs[url]
        self._had.add(url)
        if engine.up:
            worker.gain_device()
        found = self._workers[url]
        assert isinstance(found, BorrowedWorker)
        return found

    def note_taken(self, worker: BorrowedWorker) -> None:
        """See the protocol: the worker itself counts the seconds of its activation."""

    async def leave(self, worker: BorrowedWorker) -> None:
        self._had.discard(worker.name)
        self._pairs[worker.name][0].release()
        self.returned += 1

    # -- serving engines that end --------------------------------------------------------------------------------------

    def engine_ended(self, engine: ServingEngine, *, warned: bool) -> None:
        """It serves no more, and is gone. ``warned``: its rollout engine had the time to hand back what it had."""
        for name, (worker, beside) in self._pairs.items():
            if beside is not engine or name not in self._had or not worker.present:
                continue
            if warned:
                worker.lose_device()
            else:
                worker.present = False
                worker.die()

    def engine_began(self, engine: ServingEngine) -> None:
        """It serves again, and so may its rollout engine."""
        for name, (worker, beside) in self._pairs.items():
            if beside is engine and name in self._had:
                worker.gain_device()

    def outage(self, rng: Random, again: Callable[[ServingEngine, Sequence[UserRequest]], None]) -> None:
        """One of the engines ends, of those that leave another of their role; ``again``: takes what it had not done."""
        up = [engine for _, engine in self._pairs.values() if engine.up]
        several = [one for one in up if sum(other.role == one.role for other in up) > 1]
        if not several:
            return
        engine = rng.choice(several)
        self.outages += 1
        again(engine, engine.stop())
        self.engine_ended(engine, warned=rng.random() < 0.5)
        self._timers.append(asyncio.get_running_loop().call_later(self._reload, self._back, engine))

    def _back(self, engine: ServingEngine) -> None:
        engine.start()
        self.engine_began(engine)


class Autoscaler:
    """Bidirectional autoscaling of a serving cluster: what ROSE 6.1 compares with, in ServerlessLLM's place. While serving's load
    is low, engines stop and their devices are rollouts' alone; when it rises, rollouts are evicted and the model is loaded
    again, which takes ``reload`` seconds. Reactive, as such autoscalers are: by how busy the engines of a role were in the last
    ten seconds. ASSUMED, since none of it is printed: the thresholds above.

    Of one cluster; one engine of each role always serves. ``lendable``: names of the engines that may stop. ``stopped``: an
    engine serves no more; ``wanted``: it is about to load its model; ``serves``: it has."""

    def __init__(
        self,
        cluster: ServingCluster,
        lendable: Collection[str],
        reload: float,
        stopped: Callable[[ServingEngine], None],
        *,
        wanted: Callable[[ServingEngine], None] = lambda engine: None,
        serves: Callable[[ServingEngine], None] = lambda engine: None,
    ) -> None:
        self._cluster, self._lendable, self._reload = cluster, lendable, reload
        self._stopped, self._wanted, self._serves = stopped, wanted, serves
        self._busy: dict[Role, deque[float]] = {
            "prefill": deque(maxlen=WINDOW + 1),
            "decode": deque(maxlen=WINDOW + 1),
        }
        self._changed: dict[Role, float] = {"prefill": 0.0, "decode": 0.0}
        self._loading: dict[str, asyncio.TimerHandle] = {}
        self._timer: asyncio.TimerHandle | None = None
        self.changes = 0

    def start(self) -> None:
        """All engines serve."""
        self._review_load()

    def close(self) -> None:
        """The simulation ends."""
        for timer in [self._timer, *self._loading.values()]:
            if timer is not None:
                timer.cancel()

    def _review_load(self) -> None:
        for role in ("prefill", "decode"):
            self._scale(role)
        self._timer = asyncio.get_running_loop().call_later(LOOK, self._review_load)

    def _scale(self, role: Role) -> None:
        now = asyncio.get_running_loop().time()
        mine = [engine for engine in self._cluster.engines if engine.role == role]
        up = [engine for engine in mine if engine.up]
        seen = self._busy[role]
        seen.append(sum(engine.busy_seconds for engine in mine))
        busy = (seen[-1] - seen[0]) / (max(1, len(seen) - 1) * LOOK * len(up))
        down = [engine for engine in mine if not engine.up and engine.name not in self._loading]
        if busy > UP and down:
            self._reclaim_device(down[0])
            self._changed[role] = now
        elif busy < DOWN and len(up) > 1 and now - self._changed[role] >= CALM and not self._loading:
            self._lend_device(min(up, key=lambda engine: engine.load))
            self._changed[role] = now

    def _lend_device(self, engine: ServingEngine) -> None:
        if engine.name not in self._lendable:
            return
        self.changes += 1
        self._cluster.requeue_requests(engine, engine.stop())
        self._stopped(engine)

    def _reclaim_device(self, engine: ServingEngine) -> None:
        self.changes += 1
        self._wanted(engine)

        def ready() -> None:
            del self._loading[engine.name]
            engine.start()
            self._serves(engine)

        self._loading[engine.name] = asyncio.get_running_loop().call_later(self._reload, ready)


def _always(engine: ServingEngine) -> Callable[[int], ServingEngine | None]:
    return lambda version: engine
