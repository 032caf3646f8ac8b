"""The borrowed workers of a simulated run: on the devices of a serving cluster, or on devices that come and go (ROSE 4 and 6).

Guarantees: which serving devices the run has is said by
:class:`orchestrator.policies.serving.server_borrowing.ServerBroker`, fed once a second; nothing here is drawn but when
spot devices come and go, from the run's seed.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any

from orchestrator.api import ConfigError
from orchestrator.config import Config
from orchestrator.policies.serving.admission import Admission
from orchestrator.policies.serving.server_borrowing import BorrowRules, ServerBroker
from orchestrator.sim import hardware
from orchestrator.sim.coserving.serving_cluster import ServingCluster, tail_latency
from orchestrator.sim.coserving.serving_engine import ServingEngine
from orchestrator.sim.coserving.shared_worker import BorrowedSimWorker
from orchestrator.sim.coserving.simulated_market import Autoscaler, SimMarket
from orchestrator.sim.cost_model import EngineCosts
from orchestrator.sim.seeded_draws import random_stream
from orchestrator.sim.simulated_cluster import borrowed_class, engine_costs
from orchestrator.sim.simulated_worker import SimWeights, SimWorker, TurnMoves

_JOB = "run"
_SAMPLE = 1.0  # seconds between two looks at serving's KV use


class BorrowedFleet:
    """The borrowed workers of one life. Make them by :meth:`workers`, then :meth:`start`; :meth:`close` at the end."""

    def __init__(self, config: Config) -> None:
        self._config, self.settings = config, config.sim.borrowed
        named = self.settings.device
        self._device = hardware.device(named or config.sim.device, "sim.borrowed.device" if named else "sim.device")
        self.made: list[BorrowedSimWorker] = []
        self.cluster = self._serving()
        rules = config.rollout.borrowed
        self._borrowing = ServerBroker(
            BorrowRules(self.settings.window, margin=rules.margin, crowded=rules.crowded, rest=rules.rest)
        )
        self._version = -1
        self._timers: list[asyncio.TimerHandle] = []
        self._scaler: Autoscaler | None = None
        self.market: SimMarket | None = None
        self.exchanges = 0

    def _serving(self) -> ServingCluster | None:
        """What the devices serve; None: nothing. Raises ConfigError."""
        sim, settings = self._config.sim, self.settings
        if settings.how in ("spot", "serverless"):
            return None
        engines = settings.serving or settings.workers
        if settings.how == "autoscale" and settings.phases == "collocated":
            fix = "autoscaling is simulated with separate prefill and decode engines: set it to 'disaggregated'"
            raise ConfigError("sim.borrowed.phases", settings.phases, fix)
        if engines < settings.workers:
            fix = f"must be at least sim.borrowed.workers = {settings.workers}, which run on them"
            raise ConfigError("sim.borrowed.serving", engines, fix)
        tenant = 0 if settings.how == "autoscale" else hardware.model(sim.model).weight_bytes
        return ServingCluster(settings, engines, self._device, sim.tensor_parallel, tenant)

    def workers(
        self, first: int, weights: SimWeights, said: Any, traces: Any, speech: Any, moves: TurnMoves
    ) -> list[SimWorker]:
        """The borrowed ones, numbered from ``first``, of the class of their devices. Arguments as those of
        :class:`~orchestrator.sim.simulated_worker.SimWorker`."""
        config, settings = self._config, self.settings
        sim, count = config.sim, settings.workers
        if settings.exchanged and self.cluster is not None:  # a rollout engine beside each, of which the run has some
            count = len(self.cluster.engines)
        model = hardware.model(sim.model)
        kv_bytes = model.kv_bytes * max(1.0, sim.tensor_parallel / model.kv_heads) * sim.grain
        name = borrowed_class(config)
        costs = engine_costs(config, name)
        shared = settings.how in ("coserve", "multiplex")
        for number in range(first, first + count):
            worker = BorrowedSimWorker(
                f"sim-{number}",
                config,
                weights,
                said,
                traces,
                name,
                speech,
                moves,
                lease=0.0 if settings.how == "multiplex" else settings.lease_seconds if shared else math.inf,
                activation=settings.activation_seconds if shared else 0.0,
                start=settings.start_seconds,
                kv_bytes=kv_bytes,
                grain=sim.grain,
            )
            worker.moved = partial(self._engine_of, worker) if shared else worker.moved
            self.made.append(worker)
        if self.cluster is not None and shared:
            for engine in self.cluster.engines:
                engine.admission = self._admission(costs, sim.grain)
            if settings.exchanged:
                pairs = list(zip(self.made, self.cluster.engines, strict=True))
                self.market = SimMarket(pairs, settings.workers, self._mean, settings.reload_seconds)
        return list(self.made)

    def _mean(self, engine: str) -> tuple[float, float]:
        """Use of a device so far, and for how long it has been watched."""
        now = asyncio.get_running_loop().time()
        return self._borrowing.recent_use(engine, now), min(now, self.settings.window)

    def _admission(self, costs: EngineCosts, grain: int) -> Admission:
        """What rollouts on a device are admitted by: the engine's own costs, as a profile without error would have them."""
        fixed: dict[int, tuple[float, float]] = {}

        def prefill(tokens: int) -> float:
            return costs.prefill(max(1, tokens // grain), 0.0, 1) if tokens else 0.0

        def decode(batch: int) -> float:
            if batch not in fixed:
                fixed[batch] = costs.decode(batch)
            step, growing = fixed[batch]
            return (step + growing * batch * self._config.rollout.engine.max_model_len / 2) / grain if batch else 0.0

        return Admission(prefill, decode, mode="none" if self.settings.how == "multiplex" else self.settings.admission)

    def start(self) -> None:
        """Users, spot markets and function clocks begin."""
        settings = self.settings
        if self.cluster is not None:
            self.cluster.start()
        if settings.how in ("coserve", "multiplex"):
            self._sample()
            self._endings()
        elif settings.how == "autoscale":
            assert self.cluster is not None
            beside = {engine.name: one for engine, one in zip(self.cluster.engines, self.made, strict=False)}
            for worker in self.made:  # no device is rollouts' yet
                worker.lose_device()
            self._scaler = Autoscaler(
                self.cluster,
                beside,
                settings.reload_seconds,
                lambda engine: beside[engine.name].gain_device(),
                wanted=lambda engine: beside[engine.name].lose_device(),
            )
            self._scaler.start()
        elif settings.how == "spot":
            self._market(random_stream(self._config.run.seed, "spot"), settings.workers)
        else:
            for worker in self.made:
                self._later(settings.function_seconds, self._lease_over, worker)

    def _endings(self) -> None:
        """Serving engines that end, where servers are exchanged."""
        if (market := self.market) is None or self.cluster is None:
            return
        settings = self.settings
        if settings.scaled:
            self._scaler = Autoscaler(  # no device is anybody's alone
                self.cluster,
                [engine.name for engine in self.cluster.engines[: len(self.made)]],
                settings.reload_seconds,
                partial(market.engine_ended, warned=True),
                serves=market.engine_began,
            )
            self._scaler.start()
        if settings.outage_seconds:
            rng = random_stream(self._config.run.seed, "outages")
            self._later(rng.expovariate(1.0 / settings.outage_seconds), self._outage, rng)

    def _outage(self, rng: Random) -> None:
        assert self.market is not None
        assert self.cluster is not None
        self.market.outage(rng, self.cluster.requeue_requests)
        self._later(rng.expovariate(1.0 / self.settings.outage_seconds), self._outage, rng)

    def close(self) -> None:
        """The life ends."""
        for timer in self._timers:
            timer.cancel()
        if self._scaler is not None:
            self._scaler.close()
        if self.market is not None:
            self.market.close()
        if self.cluster is not None:
            self.cluster.close()

    def _later(self, seconds: float, call: Callable[..., None], *arguments: Any) -> None:
        now = asyncio.get_running_loop().time()
        self._timers = [timer for timer in self._timers if not timer.cancelled() and timer.when() > now]
        self._timers.append(asyncio.get_running_loop().call_later(seconds, call, *arguments))

    # -- serving devices ---------------------------------------------------------------------------------------------

    def _sample(self) -> None:
        assert self.cluster is not None
        now = asyncio.get_running_loop().time()
        for engine in self.cluster.engines:
            self._borrowing.observe_gpu(engine.name, now, engine.pages / engine.rules.pages)
        self._later(_SAMPLE, self._sample)

    def _engine_of(self, worker: BorrowedSimWorker, version: int) -> ServingEngine | None:
        """Where a worker is from this version on."""
        assert self.cluster is not None
        if version != self._version:
            self._version = version
            change = self._borrowing.choose_gpus(_JOB, len(self.made), asyncio.get_running_loop().time())
            back, free = set(change.given_back), [one for one in self.cluster.engines if one.name in change.taken]
            self.exchanges += len(back)
            for one in self.made:
                if one.engine is not None and one.engine.name not in back:
                    continue
                if free:
                    one.move_to_engine(free.pop(0))
                    one.gain_device()
                else:  # nobody has one for it
                    one.move_to_engine(None)
                    if one.present:
                        one.lose_device()
        return worker.engine

    # -- devices that come and go ------------------------------------------------------------------------------------

    def _market(self, rng: Any, there: int) -> None:
        """Spot devices: as many as the market leaves, at random between the least and all."""
        for number, worker in enumerate(self.made):
            if worker.present and number >= there:
                worker.lose_device()
            elif not worker.present and number < there:
                worker.gain_device()
        least = math.ceil(self.settings.spot_low * len(self.made))
        self._later(
            rng.expovariate(1.0 / self.settings.spot_seconds), self._market, rng, rng.randint(least, len(self.made))
        )

    def _lease_over(self, worker: BorrowedSimWorker) -> None:
        """A function's time is up; the next one is asked for at once."""
        worker.lose_device()
        self._later(0.0, worker.gain_device)
        self._later(self.settings.function_seconds + self.settings.start_seconds, self._lease_over, worker)

    # -- accounts ----------------------------------------------------------------------------------------------------

    def report(self, seconds: float) -> dict[str, Any]:
        """What users saw, and what borrowing cost: shares of the device time of all borrowed workers."""
        whole = max(1e-9, seconds * self.settings.workers)
        found: dict[str, Any] = {
            "how": self.settings.how,
            "workers": self.settings.workers,
            "generated": sum(worker.generated for worker in self.made),
            "handed_back": sum(worker.handed_back for worker in self.made),
            "starting_share": round(sum(worker.recovering_seconds for worker in self.made) / whole, 6),
            "exchanges": self.exchanges if self.market is None else self.market.returned,
        }
        if self.cluster is not None:
            served, engines = self.cluster.served, self.cluster.engines
            found["requests"] = self.cluster.requests
            found["ttft_p99"], found["ttft_late"] = tail_latency(served.ttft, self.settings.ttft)
            found["tpot_p99"], found["tpot_late"] = tail_latency(served.tpot, self.settings.tpot)
            for role in dict.fromkeys(engine.role for engine in engines):
                busy = [engine.busy_seconds for engine in engines if engine.role == role]
                found[f"{role}_busy"] = round(sum(busy) / max(1e-9, seconds * len(busy)), 4)
        if self.market is not None:
            found["outages"] = self.market.outages
        if self._scaler is not None:
            found["scalings"] = self._scaler.changes
        return found


def borrowed_of(config: Config) -> BorrowedFleet | None:
    """What a simulated run borrows; None: nothing. Raises ConfigError for what cannot be played with it."""
    sim, rollout = config.sim, config.rollout
    if not sim.borrowed.workers:
        return None
    if sim.costs != "roofline":
        raise ConfigError("sim.costs", sim.costs, "borrowed devices are given by their hardware: set it to 'roofline'")
    if rollout.disaggregation.enabled:
        raise ConfigError(
            "rollout.disaggregation.enabled",
            True,
            "the simulator does not support it with borrowed workers: set it to false",
        )
    _exchanged(config)
    return BorrowedFleet(config)


def bounded(config: Config) -> Config:
    """The same, where servers are exchanged with the most that the run may have as the exchange reads it."""
    if not config.sim.borrowed.exchanged:
        return config
    borrowed = config.rollout.borrowed.model_copy(update={"most": config.sim.borrowed.workers})
    return config.model_copy(update={"rollout": config.rollout.model_copy(update={"borrowed": borrowed})})


def _exchanged(config: Config) -> None:
    """Raises ConfigError for what servers that change are not played with."""
    settings, asked = config.sim.borrowed, "sim.borrowed"
    if not settings.exchanged:
        for name in ("scaled", "outage_seconds"):
            if value := getattr(settings, name):
                fix = "lost servers are replaced by others: set sim.borrowed.exchanged to true too, or leave it out"
                raise ConfigError(f"{asked}.{name}", value, fix)
        return
    if settings.how != "coserve":
        fix = f"servers beside which others serve are exchanged, and sim.borrowed.how is '{settings.how}': set it to false"
        raise ConfigError(f"{asked}.exchanged", True, fix)
    if settings.phases == "collocated" and (settings.scaled or settings.outage_seconds):
        name = "scaled" if settings.scaled else "outage_seconds"
        fix = "is simulated with separate prefill and decode engines: leave it out, or set phases = 'disaggregated'"
        raise ConfigError(f"{asked}.{name}", getattr(settings, name), fix)
