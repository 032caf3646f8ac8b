"""One optimizer step of the policy, and of PPO's critic with it, over the micro-batches of all replicas.

Guarantees: the step is taken over exactly the rows fed since ``begin``; the denominators of what was fed, counted once more
here, must agree with what the replicas counted, else nothing changes. A step that is not taken because a gradient is not
finite names the trajectories whose own gradient is not: they are looked for only then, one micro-batch at a time, and no
gradient of the search stays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from megatron_rlplugin.objective.critic import ValueTokens, ValueTotals, value_loss
from megatron_rlplugin.objective.policy_loss import Coefficients, TokenLossFunction, Totals, policy_loss, token_weights
from megatron_rlplugin.objective.vocab_logprobs import OutputRows
from megatron_rlplugin.trainer.experience import Experience
from megatron_rlplugin.trainer.learner import Learner, LearnerUpdate, LossFunction
from megatron_rlplugin.trainer.micro_batches import MicroBatch, MicroBatchLimits, TrainRow, micro_batch
from megatron_rlplugin.trainer.replicas import Dealer, Replicas
from orchestrator.settings.trainer_settings import TrainerSettings


@dataclass(frozen=True, slots=True)
class StepReport:
    """What one optimizer step did, summed over replicas. ``faulty``: the trajectories that kept it from being taken."""

    update: LearnerUpdate
    totals: Totals
    value_update: LearnerUpdate | None = None
    values: ValueTotals = field(default_factory=ValueTotals)
    faulty: tuple[str, ...] = ()


class Stepper:
    """Opens, feeds and finishes optimizer steps, one at a time."""

    def __init__(
        self,
        settings: TrainerSettings,
        limits: MicroBatchLimits,
        policy: Learner,
        critic: Learner | None,
        replicas: Replicas,
        experience: Experience,
        temperature: float,
        token_loss: TokenLossFunction,
    ) -> None:
        self._settings = settings
        self._limits = limits
        self._policy = policy
        self._critic = critic
        self._replicas = replicas
        self._experience = experience
        self._temperature = temperature
        self._token_loss = token_loss
        self._coefficients = Coefficients.from_settings(settings)
        self._dealer: Dealer = replicas.dealer()
        self._open = False  # a learner holds gradients; of a replica that does not compute yet there are none
        self._expected = 0
        self._plans: list[list[int]] = []

    def begin_step(self) -> None:
        """Open a step."""
        self._dealer = self._replicas.dealer()
        self._expected, self._plans, self._open = 0, [], False
        self._open_gradients()

    def feed(
        self, rows: list[TrainRow], plans: Sequence[list[int]], *, last: bool = False, complete: bool = True
    ) -> None:
        """Add the gradients of these micro-batches. ``last``: no more will come. ``complete``: what needs forward passes
        is filled into ``rows`` first."""
        self._open_gradients()
        work = self._experience.work(rows, plans)
        now, own = self._dealer.deal_micro_batches(plans, work, last=last, among=self._replicas.present)
        if complete:
            self._experience.complete_rows(rows, now, own)
        loss = self._settings.loss_mean
        self._plans += now
        self._expected += sum(token_weights(int(rows[i].kept.sum()), loss)[1] for members in now for i in members)
        batches = [micro_batch(rows, share.members, self._limits, loss, idle=share.idle) for share in own]
        self._policy.feed(batches, self._policy_loss)
        if self._critic is not None:
            self._critic.feed(batches, self._value_loss)

    def offload(self) -> None:
        """Gradients to host memory until more is fed or the step is finished."""
        for learner in self._learners():
            learner.offload()

    def finish_step(self, rows: list[TrainRow]) -> StepReport:
        """Take the step. A policy that does not step keeps its critic from stepping."""
        update = self._policy.finish_step(self._expected)
        names = getattr(self._token_loss, "metrics", ())
        own = (0.0,) * len(
            [name for name in names if name not in ("clipped", "tis")]
        )  # also of a replica that got nothing
        totals, values = Totals(own=own), ValueTotals()
        for report in update.reports:
            totals.add(report)
        totals = self._replicas.sum_report(totals)
        if not update.taken:
            if self._critic is not None:
                self._critic.abandon_step()
            return StepReport(update, totals, faulty=self._blame(rows, self._policy, self._policy_loss))
        if self._critic is None:
            return StepReport(update, totals)
        value_update = self._critic.finish_step(self._expected)
        for report in value_update.reports:
            values.add(report)
        values = self._replicas.sum_report(values)
        faulty = () if value_update.taken else self._blame(rows, self._critic, self._value_loss)
        return StepReport(update, totals, value_update, values, faulty)

    def abandon_step(self) -> None:
        """Drop the open step, if there is one."""
        self._open = False
        for learner in self._learners():
            learner.abandon_step()

    def _open_gradients(self) -> None:
        """When this replica computes for the first time in a step."""
        if self._replicas.here and not self._open:
            for learner in self._learners():
                learner.begin_step()
            self._open = True

    def _learners(self) -> list[Learner]:
        return [self._policy] if self._critic is None else [self._policy, self._critic]

    def _blame(self, rows: list[TrainRow], learner: Learner, loss: LossFunction) -> tuple[str, ...]:
        """The trajectories whose gradient is not finite, when they are computed alone. Replicas share the search, so that it
        takes as long as a step; those that share experts cannot, and compute everything together."""
        if self._replicas.world > 1:
            work = self._experience.work(rows, self._plans)
            now, own = self._replicas.dealer().deal_micro_batches(self._plans, work, last=True)
            self._experience.complete_rows(rows, now, own, everywhere=True)
        found = self._not_finite(rows, self._plans, learner, loss)
        whole = [self._plans[place] for place in found]
        alone = [[index] for members in whole if len(members) > 1 for index in members]
        rest = {alone[place][0] for place in self._not_finite(rows, alone, learner, loss)}
        faulty: list[int] = []
        for members in whole:
            faulty += [index for index in members if index in rest] or members
        return tuple(rows[index].name for index in sorted(faulty))

    def _not_finite(
        self, rows: list[TrainRow], plans: list[list[int]], learner: Learner, loss: LossFunction
    ) -> list[int]:
        """Which of these micro-batches have no finite gradient; the same on every rank."""
        together = self._replicas.in_step
        mine = [k for k in range(len(plans)) if together or k % self._replicas.count == self._replicas.index]
        wrong = {}
        for place in mine:
            batch = micro_batch(rows, plans[place], self._limits, self._settings.loss_mean)
            if not learner.gradient_is_finite(batch, loss, together=together):
                wrong[place] = np.ones(1, dtype=np.float32)
        if not together:
            told = self._replicas.exchange(wrong, dict.fromkeys(range(len(plans)), 1))
            return [place for place, flag in told.items() if flag.any()]
        return list(wrong)

    def _policy_loss(self, logits_TV: OutputRows, batch: MicroBatch) -> tuple[Tensor, Totals]:
        group = self._policy.tensor_group
        loss, totals = policy_loss(
            logits_TV, batch.tokens, self._coefficients, self._temperature, group, self._token_loss
        )
        if logits_TV.ahead:
            more, said = self._policy.heads_loss(logits_TV, batch)
            loss = loss + more
            totals.add(said)
        if self._policy.replays:
            totals.inputs, totals.replayed = float(sum(batch.lengths)), float(batch.replayed)
        return loss, totals

    def _value_loss(self, values_T1: Tensor, batch: MicroBatch) -> tuple[Tensor, ValueTotals]:
        tokens = batch.tokens
        assert batch.returns_T is not None
        assert batch.values_T is not None
        known = ValueTokens(batch.returns_T, batch.values_T, tokens.weights_T, tokens.denominator)
        return value_loss(values_T1, known, self._settings.value_clip)
