"""``ColocatedTrainer``: the trainer that leaves its devices to rollout workers and comes back (RollPacker 4.4 and 5).

Guarantees: a step is what :class:`~megatron_rlplugin.trainer.megatron_trainer.MegatronTrainer` makes of it, bit for
bit, wherever weights, gradients and optimizer state were meanwhile; a call that needs what is away is refused
(RunError) and changes nothing, but for ``feed``, which is a hint: away, it is ignored.

A part of it may stream: where ``residency("stream", replicas)`` names some of the units of
:func:`~megatron_rlplugin.stream.stream_conditions.stream_units`, only these load, and what is fed is dealt among them. The others
hold nothing of it on their devices; they hear of it, since every rank must know what was fed, and take their share of the rest
when they are at ``step``. The merge weighs each replica by what it was fed (RollPacker 4.4, n_i / N), so the step has the bits of
a trainer that is whole on its devices and computes the same micro-batches on the same replicas.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from megatron_rlplugin.stream.stream_conditions import check_streamable
from megatron_rlplugin.trainer.megatron_trainer import MegatronTrainer
from megatron_rlplugin.trainer.memory_residency import TrainerResidency
from orchestrator.api import Meeting, PublishResult, ResidencyResult, RunError, TrainBatch, TrainMetrics, TrainSample


class ColocatedTrainer(MegatronTrainer):
    """Implements :class:`orchestrator.api.ResidentTrainer`. It begins on its devices (level ``step``)."""

    def __init__(self, **keywords: Any) -> None:
        super().__init__(**keywords)
        if self._replicas.units > 1:
            for learner in filter(None, (self._learner, self._critic)):
                check_streamable(learner.chunks, learner.optimizer, elastic=True)
        self._residencies: list[
            tuple[Any, TrainerResidency]
        ] = []  # of policy and critic, with the optimizer each was made for

    async def residency(self, level: str, replicas: Sequence[int] | None = None) -> ResidencyResult:
        """See the protocol. The figures are this rank's; policy and critic move one after the other, the peak is the larger."""
        self._finish_sending()
        concerned = self._replicas.is_of(replicas)
        results = [part.move_to(level) for part in self._parts_here()] if concerned else []
        self._replicas.compute_on({"stream": replicas, "step": None}.get(level, ()))
        return ResidencyResult(
            level,
            sum(result.to_host for result in results),
            sum(result.to_device for result in results),
            sum(on_device for part in self._parts_here() for on_device, _ in part.where().values()),
            max((result.peak_bytes for result in results), default=0),
            sum(result.seconds for result in results),
            results[0].how if results else "this rank is of no replica that was named",
        )

    async def train_step(self, batch: TrainBatch) -> TrainMetrics:
        """See the protocol."""
        self._require_level("step")
        return await super().train_step(batch)

    async def feed(self, samples: Sequence[TrainSample], version: int) -> None:
        """See the protocol."""
        if self._replicas.present:
            await super().feed(samples, version)

    async def publish(self) -> PublishResult:
        """See the protocol."""
        self._require_level("stream")
        return await super().publish()

    async def hold(self) -> None:
        """See the base class."""
        self._require_level("stream")
        await super().hold()

    async def send(self, receivers: int, limit: float, anew: bool, host: str = "127.0.0.1") -> tuple[Meeting, ...]:
        """See the base class."""
        self._require_level("stream")
        return await super().send(receivers, limit, anew, host)

    async def save(self, folder: str) -> None:
        """See the protocol."""
        self._require_level("step")
        await super().save(folder)

    async def load(self, folder: str) -> int:
        """See the protocol."""
        self._require_level("step")
        return await super().load(folder)

    async def supervised_step(
        self, samples: Sequence[tuple[Sequence[int], Sequence[int]]], learning_rate: float
    ) -> dict[str, float]:
        """See the base class."""
        self._require_level("step")
        return await super().supervised_step(samples, learning_rate)

    async def finish_warmup(self) -> None:
        """See the base class."""
        self._require_level("step")
        await super().finish_warmup()

    async def logprob_gap(self, samples: Sequence[TrainSample]) -> dict[str, float]:
        """See the base class."""
        self._require_level("stream")
        return await super().logprob_gap(samples)

    async def export(self, folder: str) -> None:
        """See the base class."""
        self._require_level("stream")
        await super().export(folder)

    def _require_level(self, level: str) -> None:
        for part in self._parts_here():
            part.require_level(level)

    def _parts_here(self) -> list[TrainerResidency]:
        """One for the policy, one for the critic; made anew after their optimizers were."""
        learners = [learner for learner in (self._learner, self._critic) if learner is not None]
        made_for = [optimizer for optimizer, _ in self._residencies]
        if len(made_for) != len(learners) or any(
            learner.optimizer is not optimizer for learner, optimizer in zip(learners, made_for, strict=True)
        ):
            for _, old in self._residencies:
                if old.level != "step":
                    raise RunError("an optimizer was replaced while its state was away")
                old.close()
            self._residencies = [
                (
                    learner.optimizer,
                    TrainerResidency(
                        learner.chunks, learner.optimizer, learner.stream, self._others if not index else tuple
                    ),
                )
                for index, learner in enumerate(learners)
            ]
        return [residency for _, residency in self._residencies]

    def _others(self) -> Sequence[Tensor]:
        """The previous version's weights; the reference's are on the host anyway."""
        return self._previous[1] if self._previous is not None else ()
