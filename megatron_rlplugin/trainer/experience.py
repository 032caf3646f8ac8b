"""From the trajectories of a batch to rows with all that the objective needs: advantages, pi_old, reference, values.

Guarantees: what is computed for a trajectory depends on its group and on the micro-batch it is in, so it is the same
whether groups come one by one or all at once (REINFORCE++ and PPO's whitening excepted: they need the batch, and are not
streamed). Reference log-probs come from the same model with the reference's weights swapped in for the pass (RollPacker,
4.4); the present weights come back bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from torch import Tensor

from megatron_rlplugin.objective.advantages import TrajectoryOutcome, advantages_of, says_nothing
from megatron_rlplugin.trainer.learner import Learner
from megatron_rlplugin.trainer.micro_batches import (
    SILENT,
    TOO_OLD,
    Floats,
    MicroBatch,
    MicroBatchLimits,
    TrainRow,
    micro_batch,
    row_of,
    usable_samples,
)
from megatron_rlplugin.trainer.replicas import MicroBatchShare, Replicas
from megatron_rlplugin.trainer.training_work import TrainingWork
from orchestrator.api import TrainSample
from orchestrator.settings.trainer_settings import TrainerSection

BY_TOKEN = ("ppo", "reinforce++")  # objectives whose advantages need passes of the models, or the whole batch


class Experience:
    """See the module. ``reference`` are the weights that RL began with, on the host, when the objective needs them."""

    def __init__(
        self,
        settings: TrainerSection,
        limits: MicroBatchLimits,
        policy: Learner,
        critic: Learner | None,
        replicas: Replicas,
        temperature: float,
    ) -> None:
        self.reference: list[Tensor] | None = None
        self._settings = settings
        self._limits = limits
        self._work = TrainingWork.of_model(policy.shape)
        self._policy = policy
        self._critic = critic
        self._replicas = replicas
        self._temperature = temperature
        self._by_token = settings.objective in BY_TOKEN
        # Every replica must know what the others computed where rows are dealt again, or advantages span the batch.
        self._exchanged = settings.minibatches > 1 or self._by_token

    def keep_reference(self) -> None:
        """The present weights are the reference from here on, or those of ``reference_path``, if one is asked for."""
        if not self._settings.keeps_reference:
            return
        if not self._settings.reference_path:
            self.reference = self._policy.snapshot(self.reference)
        elif self.reference is None:
            self.reference = self._policy.snapshot_of(self._settings.reference_path)

    def work(self, rows: Sequence[TrainRow], plans: Sequence[Sequence[int]]) -> list[float]:
        """Operations of each of these micro-batches."""
        return [self._work.of_plan(rows, members, self._limits) for members in plans]

    def rows(
        self, samples: Sequence[TrainSample], version: int
    ) -> tuple[list[TrainRow], list[TrainSample], dict[str, int]]:
        """(the rows to train on, the usable samples, how many were left out by cause). Groups must be complete."""
        shape, settings = self._policy.shape, self._settings
        pack = self._limits.pack_tokens
        kept, skipped = usable_samples(samples, shape.vocab_size, shape.max_position_embeddings, pack)
        rewards: dict[str, list[float]] = {}
        for sample in kept:
            rewards.setdefault(sample.group_id, []).append(sample.reward)
        rows = [row_of(sample, version, settings.max_token_lag, replay=settings.routing_replay) for sample in kept]
        if settings.objective == "dapo":
            rows = [row for row in rows if not says_nothing(rewards[row.group])]
        skipped[SILENT] = len(kept) - len(rows)
        if not self._by_token:
            found = advantages_of([_outcome(row) for row in rows], settings).advantages
            rows = [replace(row, advantages=value) for row, value in zip(rows, found, strict=True)]
        trained = [row for row in rows if row.kept.any()]
        skipped[TOO_OLD] = len(rows) - len(trained)
        return trained, kept, skipped

    def complete_rows(
        self,
        rows: list[TrainRow],
        plans: Sequence[Sequence[int]],
        own: Sequence[MicroBatchShare],
        *,
        everywhere: bool = False,
    ) -> None:
        """Fill in what needs forward passes, for the rows of these micro-batches, of which this replica computes its
        ``own``. ``everywhere``: also the rows of other replicas."""
        settings = self._settings
        asked = [settings.minibatches > 1 or settings.kl_in_reward, settings.needs_reference, settings.needs_critic]
        exchange = everywhere or self._exchanged
        if any(asked):
            batches = [self._whole(rows, share.members) for share in own]
            lengths = {index: len(rows[index].positions) for members in plans for index in members}
            found: dict[str, dict[int, Floats]] = {}
            if asked[0]:
                found["old"] = self._by_row(self._policy.logprobs(batches, self._temperature), batches)
            if asked[1]:
                assert self.reference is not None, "the reference is kept when RL begins"
                found["reference"] = {}
                if batches:  # the weights are not moved for nothing
                    with self._policy.swapped_weights(self.reference):
                        found["reference"] = self._by_row(
                            self._policy.logprobs(batches, self._temperature, replay=False), batches
                        )
            if asked[2]:
                assert self._critic is not None
                found["values"] = self._by_row(self._critic.forward_only(batches, _values), batches)
            answered = {index for share in own if not share.idle for index in share.members}
            for name, arrays in found.items():
                known = arrays
                if exchange:  # what an idle share found is another replica's answer, and answers are added up
                    mine = {index: array for index, array in arrays.items() if index in answered}
                    known = self._replicas.exchange(mine, lengths)
                for index, array in known.items():
                    rows[index] = rows[index].with_array(name, array)
        if self._by_token:
            self._estimate(rows, [index for members in plans for index in members])

    def _estimate(self, rows: list[TrainRow], indices: Sequence[int]) -> None:
        """Advantages by token, and the critic's targets."""
        ordered = sorted(indices)
        estimate = advantages_of([_outcome(rows[index]) for index in ordered], self._settings)
        for place, index in enumerate(ordered):
            returns = estimate.returns[place] if estimate.returns is not None else None
            # With one mini-batch pi_old is the current policy itself: the ratio is exactly 1.
            old = rows[index].old if self._settings.minibatches > 1 else None
            rows[index] = replace(rows[index], advantages=estimate.advantages[place], returns=returns, old=old)

    def _whole(self, rows: Sequence[TrainRow], members: Sequence[int]) -> MicroBatch:
        return micro_batch(rows, members, self._limits, self._settings.loss_mean, whole=True)

    def _by_row(self, outputs: Sequence[Tensor], batches: Sequence[MicroBatch]) -> dict[int, Floats]:
        """What a pass said of each row; nothing but on the last pipeline stage."""
        answer: dict[int, Floats] = {}
        for output_T, batch in zip(outputs, batches if outputs else (), strict=True):
            parts = output_T.float().cpu().split(list(batch.counts))
            answer.update({index: part.numpy() for index, part in zip(batch.indices, parts, strict=True)})
        return answer


def _values(values_T1: Tensor, batch: MicroBatch) -> tuple[Tensor, Tensor]:
    return values_T1.new_zeros(()), values_T1.squeeze(-1).float()


def _outcome(row: TrainRow) -> TrajectoryOutcome:
    kl_T = None
    if row.old is not None and row.reference is not None:
        kl_T = row.old.astype(np.float64) - row.reference.astype(np.float64)
    return TrajectoryOutcome(row.group, row.reward, row.kept, kl_T=kl_T, values_T=row.values, member=row.name)
