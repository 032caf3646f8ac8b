"""Twins that share devices: workers that lend theirs within a step, a trainer that trains on what it was lent (RollPacker 4.4).

One worker stands for one device, as in :mod:`orchestrator.streaming`: with tensor parallelism for the group of them. Guarantees:
a request that goes on elsewhere says what it would have said where it began, and the audit hears of the whole turn; the trainer
computes as fast as its share of the replicas is large. Released weights come back, and the trainer's state comes and goes, in
the time that a worker loads its weights in: ASSUMED (they cross the same PCIe; RollPacker 6.6 says below 3 s a migration).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from orchestrator.api import (
    CommandError,
    ReleaseResult,
    ResidencyResult,
    RetryableError,
    TrainSample,
    VersionSpans,
    merge_spans,
)
from orchestrator.config import Config
from orchestrator.sim import batch
from orchestrator.sim.audit import Audit
from orchestrator.sim.cluster import engine_costs
from orchestrator.sim.speech import Speech
from orchestrator.sim.traces import Traces
from orchestrator.sim.twins import SimTrainer
from orchestrator.sim.worker import MODEL_BYTES, SimWeights, SimWorker

Said = Callable[[str, int, VersionSpans], None]


class Moves:
    """What all workers of a life know of the turns that moved between them: where each began, and who has said what of it."""

    def __init__(self) -> None:
        self.opened: dict[tuple[str, int], int] = {}  # (trajectory, turn) -> length of the context before the response
        self.parts: dict[tuple[str, int], list[tuple[int, int]]] = {}  # version spans of what was said elsewhere


class Continuing(Speech):
    """What the policy says in a turn, also where another worker has said a part of it."""

    def __init__(self, whole: Speech, moves: Moves) -> None:
        self._whole = whole
        self._moves = moves
        self.most = whole.most

    def response(self, context: Sequence[int], trajectory_id: str, turn: int, limit: int) -> tuple[int, ...]:
        """What is left to say after ``context``."""
        said = len(context) - self._moves.opened.setdefault((trajectory_id, turn), len(context))
        return self._whole.response(context, trajectory_id, turn, limit + said)[said:]


class LendingWorker(SimWorker):
    """A :class:`~orchestrator.api.ReleasingWorker`."""

    def __init__(
        self,
        name: str,
        config: Config,
        weights: SimWeights,
        said: Said | None = None,
        traces: Traces | None = None,
        hardware: str = "",
        speech: Speech | None = None,
        moves: Moves | None = None,
    ) -> None:
        self._moves = moves or Moves()
        tell = said

        def whole(trajectory_id: str, turn: int, versions: VersionSpans) -> None:
            if tell is not None:
                before = self._moves.parts.pop((trajectory_id, turn), [])
                tell(trajectory_id, turn, merge_spans([*before, *versions]))

        speech = Continuing(speech or Speech(config, traces), self._moves)
        self.released = ""  # the level
        super().__init__(name, config, weights, whole, traces, hardware, speech)

    async def release(self, level: str) -> ReleaseResult:
        """See the protocol."""
        self._check()
        incarnation = self.incarnation
        if not self._suspended or self._leap is not None:
            raise CommandError("not_suspended", f"{self.name}: release without suspend")
        seconds = 0.0
        if not self.released:
            self.released, seconds = level, self._costs.load_seconds if level == "weights" else 0.0
            self._batch.change(self._batch.version)  # the KV is gone
            await asyncio.sleep(seconds)
            self._check(incarnation)
        return ReleaseResult(level, MODEL_BYTES, len(self._batch.running), seconds, "simulated")

    async def reclaim(self) -> None:
        """See the protocol."""
        self._check()
        incarnation = self.incarnation
        if self.released:
            if self.released == "weights":
                await asyncio.sleep(self._costs.load_seconds)
                self._check(incarnation)
            else:
                self._unusable = "its weights were dropped"
            self.released = ""

    async def resume(self) -> None:
        """See the protocol."""
        if self.released:
            raise CommandError("released", f"{self.name}: its device is lent")
        await super().resume()

    def die(self) -> None:
        """See there. A new process holds its device again."""
        super().die()
        self.released = ""

    def _finish(self, sequence: batch.Sequence, reason: str, error: str = "") -> None:
        super()._finish(sequence, reason, error)
        if reason == "abort":
            request = sequence.request
            parts = self._moves.parts.setdefault((request.trajectory_id, request.turn), [])
            parts.extend(self._finished[-1].versions)


class ResidentSimTrainer(SimTrainer):
    """A :class:`~orchestrator.api.ResidentTrainer`. It begins with its devices empty."""

    def __init__(self, config: Config, weights: SimWeights, audit: Audit) -> None:
        super().__init__(config, weights, audit)
        self._replicas = config.trainer.data_parallel
        self._seconds = engine_costs(config).load_seconds
        self.level = "step"
        self._share = 1.0

    async def residency(self, level: str, replicas: Sequence[int] | None = None) -> ResidencyResult:
        """See the protocol."""
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
        seconds = self._costs.train(len(sample.token_ids) for sample in samples) / self._share
        await asyncio.sleep(seconds)
        self._check()
        self.busy_seconds += seconds
