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
from collections.abc import Callable, Sequence
from random import Random
from typing import TYPE_CHECKING

from orchestrator.api import BorrowedWorker, ManagedWorker
from orchestrator.borrowing.server_exchange import Offer
from orchestrator.sim.coserving.autoscaler import Autoscaler
from orchestrator.sim.coserving.serving_engine import ServingEngine, UserRequest
from orchestrator.sim.coserving.shared_worker import BorrowedSimWorker

if TYPE_CHECKING:
    from orchestrator.sim.coserving.serving_cluster import ServingCluster

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
        """See the protocol."""
        return [self._offer(name) for name in self._pairs]

    def _offer(self, name: str) -> Offer:
        engine = self._pairs[name][1]
        if not engine.up:
            return Offer(name, "its serving engine has ended")
        return Offer(name, share=engine.pages / engine.rules.pages, before=self._mean(engine.name))

    def worker(self, url: str) -> BorrowedWorker:
        """See the protocol."""
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
        """See the protocol."""
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


class ScaledServing(Autoscaler):
    """Serving engines that end while their load is low, and come back when it rises: no device is anybody's alone."""

    def __init__(
        self, market: SimMarket, cluster: ServingCluster, workers: Sequence[BorrowedSimWorker], reload: float
    ) -> None:
        super().__init__(cluster, workers, reload)
        self._market = market

    def start(self) -> None:
        """All engines serve."""
        self._review_load()

    def _stopped(self, engine: ServingEngine) -> None:
        self._market.engine_ended(engine, warned=True)

    def _wanted(self, engine: ServingEngine) -> None:
        """It is nobody's meanwhile."""

    def _serves(self, engine: ServingEngine) -> None:
        self._market.engine_began(engine)


def _always(engine: ServingEngine) -> Callable[[int], ServingEngine | None]:
    return lambda version: engine
