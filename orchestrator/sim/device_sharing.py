"""Twins that share devices: workers that lend theirs within a step, a trainer that trains on what it was lent (RollPacker 4.4).

One worker stands for one device, as in :mod:`orchestrator.colocation.stream_training`: with tensor parallelism for the
group of them. Guarantees: a request that goes on elsewhere says what it would have said where it began, and the audit
hears of the whole turn; the trainer computes as fast as its share of the replicas is large, but for what no replica
shortens. Released weights come back, and the trainer's state comes and goes, in the time that a worker loads its
weights in: ASSUMED (they cross the same PCIe; RollPacker 6.6 says below 3 s a migration).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from orchestrator.api import (
    CommandError,
    ReleaseResult,
    ResidencyResult,
    RetryableError,
    TrainSample,
)
from orchestrator.config import Config
from orchestrator.sim.resizable_worker import ResizableSimWorker
from orchestrator.sim.run_audit import RunAudit
from orchestrator.sim.simulated_cluster import engine_costs
from orchestrator.sim.simulated_worker import MODEL_BYTES, SimWeights, SimWorker
from orchestrator.sim.twins import SimTrainer


class LendingSimWorker(SimWorker):
    """A :class:`~orchestrator.api.ReleasingWorker`."""

    released = ""  # the level

    async def release(self, level: str) -> ReleaseResult:
        self._check()
        incarnation = self.incarnation
        if not self._suspended or self._leap is not None:
            raise CommandError("not_suspended", f"{self.name}: release without suspend")
        seconds = 0.0
        if not self.released:
            self.released, seconds = level, self._costs.weights.load if level == "weights" else 0.0
            self._batch.change_weights(self._batch.version)  # the KV is gone
            await asyncio.sleep(seconds)
            self._check(incarnation)
        return ReleaseResult(level, MODEL_BYTES, len(self._batch.running), seconds, "simulated")

    async def reclaim(self) -> None:
        self._check()
        incarnation = self.incarnation
        if self.released:
            if self.released == "weights":
                await asyncio.sleep(self._costs.weights.load)
                self._check(incarnation)
            else:
                self._unusable = "its weights were dropped"
            self.released = ""

    async def resume(self) -> None:
        if self.released:
            raise CommandError("released", f"{self.name}: its device is lent")
        await super().resume()

    def die(self) -> None:
        """See there. A new process holds its device again."""
        super().die()
        self.released = ""


class LendingResizableSimWorker(LendingSimWorker, ResizableSimWorker):
    """Its engine is cut anew between steps, too."""


class ResidentSimTrainer(SimTrainer):
    """A :class:`~orchestrator.api.ResidentTrainer`. It begins with its devices empty."""

    def __init__(self, config: Config, weights: SimWeights, audit: RunAudit) -> None:
        super().__init__(config, weights, audit)
        self._replicas = config.trainer.data_parallel
        self._seconds = engine_costs(config).weights.load
        self.level = "step"

    async def residency(self, level: str, replicas: Sequence[int] | None = None) -> ResidencyResult:
        self._check()
        await asyncio.sleep(self._seconds)
        self._check()
        self.level = level
        self._share = 1.0 if level != "stream" or replicas is None else len(replicas) / self._replicas
        return ResidencyResult(level, 0, MODEL_BYTES, MODEL_BYTES, MODEL_BYTES, self._seconds, "simulated")

    async def _compute(self, samples: Sequence[TrainSample]) -> None:
        """Forward and backward, on the replicas that are there."""
        if self.level == "away" or not self._share:
            raise RetryableError("the trainer has no device")
        await super()._compute(samples)
