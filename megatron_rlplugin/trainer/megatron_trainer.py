"""``MegatronTrainer``: the ``Trainer`` port on stock Megatron-Core, one rank of it, in a process of its own.

Guarantees
* ``version`` grows by one with every ``train_step``, whatever was skipped in it; ``publish`` sends the present weights
  under the present version. A batch for another version is refused.
* A trajectory with a reward or rollout log-prob that is not finite is left out and counted; an update whose gradient
  is not finite is not taken, counted, and the trajectories at fault are named in ``status``. Reported values are always
  finite: one that is not is left out.
* With ``stream``, ``feed`` takes gradients at once, and ``train_step`` ends with the same bits as without (module
  :mod:`megatron_rlplugin.stream.batch_feeder`); a batch that does not begin with what was fed is trained from its start, counted.
* pi_old is recomputed with the weights that the step begins with. With one mini-batch it is the current policy itself,
  so the ratio is exactly 1 and no second forward pass is made.
* The log-prob gap compares trainer and rollout on tokens that the SAME version made: all those of the present version,
  and, since an asynchronous batch has few of them, those of the previous one in ``logprob_gap_samples`` trajectories
  (which costs a copy of the weights in host memory; 0 switches it off).
* ``load`` after ``save`` continues bit-identically. RL begins with fresh optimizer state and schedule after a warm-up; the
  weights it begins with are the reference of the KL, and stay so over checkpoints, unless ``reference_path`` says others or
  ``reference_update_every`` renews them.

Several ranks (tensor * pipeline * data parallel) are one trainer: every rank gets the same calls with the same arguments,
computes its share, and answers with the same metrics. Each publishes its own shards of the weights, all as one version
(:mod:`megatron_rlplugin.weights.rank_publisher`), and may send them to workers meanwhile
(:mod:`megatron_rlplugin.weights.collective_sender`). Each writes its shards of a checkpoint, beside what comes next
(:mod:`megatron_rlplugin.trainer.sharded_writer`).

Methods are coroutines because the port's are (the trainer lives in a Ray actor); they compute without yielding.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_rlplugin import cpu
from megatron_rlplugin.hookpoints import engine_status, require_megatron
from megatron_rlplugin.megatron_options import sort_options
from megatron_rlplugin.objective.advantages import group_counts
from megatron_rlplugin.objective.critic import install_value_head
from megatron_rlplugin.objective.policy_loss import Totals, kl_estimate
from megatron_rlplugin.objective.user_advantage import check_advantage
from megatron_rlplugin.objective.user_loss import UserLoss, token_loss_of
from megatron_rlplugin.objective.vocab_logprobs import OutputRows, logprobs
from megatron_rlplugin.parallel_layout import device, order_kernels
from megatron_rlplugin.stream.batch_feeder import BatchFeeder
from megatron_rlplugin.trainer import trainer_checkpoint
from megatron_rlplugin.trainer.experience import Experience
from megatron_rlplugin.trainer.learner import Learner, Rendezvous
from megatron_rlplugin.trainer.micro_batches import (
    SKIP_CAUSES,
    MicroBatch,
    MicroBatchLimits,
    TrainRow,
    check_tokens,
    micro_batch,
    plan_micro_batches,
    row_of,
    split_rows,
    supervised_row,
    usable_samples,
)
from megatron_rlplugin.trainer.optimizer_step import Stepper, StepReport
from megatron_rlplugin.trainer.replicas import MicroBatchShare, Replicas
from megatron_rlplugin.trainer.sharded_writer import ShardedWriter
from megatron_rlplugin.weights.collective_sender import CollectiveSender, sender_of
from megatron_rlplugin.weights.rank_publisher import WeightPublisher, step_changes_of
from megatron_rlplugin.weights.stock_sender import StockSender
from orchestrator.api import ConfigError, Meeting, PublishResult, RunError, TrainBatch, TrainMetrics, TrainSample
from orchestrator.policies.training.objective_table import OBJECTIVES
from orchestrator.settings.trainer_settings import TrainerSection
from orchestrator.transfer import RelayEndpoint

_log = logging.getLogger(__name__)
_NAMED = 8  # trajectories at fault that are named; a whole batch may be


@dataclass(slots=True)
class _Trained:
    """What the optimizer steps of one training step were given and did."""

    samples: list[TrainSample]
    rows: list[TrainRow]
    skipped: Mapping[str, int]
    reports: list[StepReport] = field(default_factory=list)


class MegatronTrainer:
    """See the module. ``temperature`` is the rollout's: log-probs are those of the sampling distribution. ``batch_size``:
    trajectories of a batch, of which a tenth may wait for others of their length; 0: not known, none waits.

    ``init_method`` (``tcp://host:port``) is where the ranks meet; a single rank needs none. ``vllm_nccl``: ``send`` is vLLM's.
    """

    def __init__(
        self,
        *,
        model: str,
        settings: Mapping[str, Any] | None = None,
        total_steps: int = 1,
        seed: int = 0,
        dtype: str = "float32",
        relay: Mapping[str, Any] | None = None,
        weight_version: int = 0,
        temperature: float = 1.0,
        batch_size: int = 0,
        vllm_nccl: bool = False,
        rank: int = 0,
        world_size: int = 1,
        init_method: str = "",
    ) -> None:
        self._settings = settings_ = TrainerSection.from_dict(settings or {})
        order_kernels(settings_.tensor_parallel, settings_.context_parallel)  # before anything asks CUDA
        require_megatron()
        if not temperature > 0:
            raise ConfigError("rollout.temperature", temperature, "must be above 0")
        self._temperature = temperature
        self._endpoint = RelayEndpoint.from_dict(relay) if relay is not None else None
        self._publisher: WeightPublisher | None = None
        self._sender: CollectiveSender | StockSender | None = None
        self._vllm_nccl, self._rank = vllm_nccl, rank
        if vllm_nccl:
            settings_.check_whole()
        self._finds_changes = (
            device().type == "cuda"
        )  # on a host nothing is far: there they are found when they are published
        torch.set_num_threads(settings_.threads)
        torch.manual_seed(seed)
        self._generator = torch.Generator().manual_seed(seed)  # deals trajectories to mini-batches
        ranks = Rendezvous(rank, world_size, init_method, settings_.collective_timeout, settings_.interface)
        options = sort_options(settings_.megatron, settings_.megatron_arguments)
        replay = settings_.routing_replay
        self._learner = Learner(model, settings_, total_steps, dtype, ranks, options=options, replay=replay)
        self._critic: Learner | None = None
        if settings_.needs_critic:
            self._critic = Learner(
                model,
                settings_,
                total_steps,
                dtype,
                ranks,
                options=options,
                prepare=install_value_head,
                learning_rate=settings_.value_rate,
            )
        self._replicas = Replicas()
        multiple = self._learner.row_multiple
        self._limits = limits = MicroBatchLimits(
            settings_.micro_batch_size,
            settings_.order,
            settings_.pack_tokens,
            multiple,
            settings_.micro_batch_tokens,
            held=batch_size // 10,
        )
        parts = self._learner, self._critic, self._replicas
        self._experience = Experience(settings_, limits, *parts, temperature)
        self._experience.keep_reference()
        self._token_loss = token_loss_of(settings_)
        check_advantage(settings_)
        self._stepper = Stepper(settings_, limits, *parts, self._experience, temperature, self._token_loss)
        self._feeder = BatchFeeder(self._stepper, self._experience, limits, offload=settings_.grad_offload)
        self._writer = ShardedWriter(settings_.collective_timeout)
        self._version = weight_version
        self._step = 0
        self._warming_up = False
        self._previous: tuple[int, list[Tensor]] | None = None  # the version before this one, and its weights
        self._faulty: tuple[str, ...] = ()  # trajectories that kept the last skipped update from being taken

    # -- the port ----------------------------------------------------------------------------------------------------

    async def train_step(self, batch: TrainBatch) -> TrainMetrics:
        """See the protocol."""
        started = time.perf_counter()
        self._require_rl("train_step")
        self._finish_sending()
        if batch.version != self._version:
            raise RunError(f"a batch for version {batch.version}, but the trainer is at version {self._version}")
        kept = self._usable(batch.samples)  # malformed ones stop the run before anything changed
        fed, rest = self._fed_before(batch)
        rate = self._learner.advance_schedule()
        if self._critic is not None:
            self._critic.advance_schedule()
        previous_gap, own_experts = self._previous_gap(kept)
        reference_kl = self._reference_kl(kept)
        if self._settings.logprob_gap_samples:
            self._previous = self._version, self._learner.snapshot(self._previous[1] if self._previous else None)
        trained = self._streamed(rest) if self._settings.stream else self._monolithic(batch.samples)
        self._step += 1
        self._version += 1
        every = self._settings.reference_update_every
        if every and not self._step % every:
            self._experience.keep_reference()
        values = {"learning_rate": rate, **self._metrics(trained, previous_gap), **own_experts, **reference_kl}
        if self._settings.routing_replay and not values.get("routing_replayed", 1.0):
            _log.warning(
                "step %d: no engine said which experts it chose: enable_return_routed_experts is its option", batch.step
            )
        if self._settings.stream:
            values["stream_fed"] = fed / max(len(trained.rows), 1)
            values["stream_restarts"] = float(self._feeder.restarts)
            values["stream_seconds"] = self._feeder.seconds
            self._feeder.restarts, self._feeder.seconds = 0, 0.0
        values["seconds"] = time.perf_counter() - started
        finite = {name: value for name, value in values.items() if math.isfinite(value)}
        return TrainMetrics(step=batch.step, version=self._version, values=finite)

    async def feed(self, samples: Sequence[TrainSample], version: int) -> None:
        """See the protocol. Without ``stream``, and for a version that is not the present one, it is ignored."""
        self._require_rl("feed")
        if self._settings.stream and version == self._version and samples:
            self._finish_sending()  # what is fed may be compared with the reference, which then stands in for the weights
            self._feeder.feed(samples, version)

    async def publish(self) -> PublishResult:
        """See the protocol. The first publication of this process opens a new epoch at the present version."""
        self._require_rl("publish")
        if self._endpoint is None:
            raise ConfigError("relay", None, "this trainer has no relay to publish to; give it an endpoint")
        return self._opened(self._endpoint).publish(self._version)

    async def hold(self) -> None:
        """See :class:`orchestrator.api.HoldingTrainer`."""
        self._require_rl("hold")
        if self._endpoint is None:
            raise ConfigError("relay", None, "this trainer has no relay to publish to; give it an endpoint")
        self._opened(self._endpoint).hold(self._version)

    async def publish_held(self) -> PublishResult:
        """See :class:`orchestrator.api.HoldingTrainer`. In a thread: whoever calls it computes meanwhile."""
        if self._publisher is None:
            raise RunError("publish_held: nothing is held")
        return await asyncio.to_thread(self._publisher.publish_held)

    def _opened(self, endpoint: RelayEndpoint) -> WeightPublisher:
        if self._publisher is None:
            steps = step_changes_of(self._learner.chunks) if self._finds_changes and endpoint.snapshot_every else None
            self._publisher = WeightPublisher(
                endpoint, self._learner.chunks, self._version, steps=steps, timeout=self._settings.collective_timeout
            )
            if steps is not None:
                self._learner.around_step = steps.watch_step
        return self._publisher

    async def send(self, receivers: int, limit: float, anew: bool, host: str = "127.0.0.1") -> tuple[Meeting, ...]:
        """See :class:`orchestrator.api.CollectiveTrainer`; the meeting of this rank alone, whose address is ``host``."""
        self._require_rl("send")
        if self._vllm_nccl and self._rank:
            return ()  # all ranks hold the same
        if self._sender is None:
            chunks = self._learner.chunks
            self._sender = StockSender(chunks, device()) if self._vllm_nccl else sender_of(chunks, device())
        return (self._sender.begin_send(self._version, receivers, limit, anew, host),)

    async def save(self, folder: str) -> None:
        """See the protocol. Every rank writes its shards, and all see the same folder."""
        self._require_rl("save")
        self._writer.wait()
        position = trainer_checkpoint.TrainerPosition(step=self._step, version=self._version)
        trainer_checkpoint.begin_save(self._parts(), position, folder, self._writer)

    async def saved(self) -> None:
        """See the protocol."""
        await asyncio.to_thread(self._writer.wait)

    async def load(self, folder: str) -> int:
        """See the protocol. What this process published before belongs to the abandoned history."""
        self._feeder.drop_fed()
        self._finish_sending()
        self._writer.wait()
        parts = self._parts()
        position = trainer_checkpoint.load(parts, folder)
        self._experience.reference = parts.reference
        self._step, self._version, self._warming_up = position.step, position.version, False
        self._previous, self._faulty = None, ()
        self._feeder.restarts = 0
        self._end_publishing()
        return self._version

    async def close(self) -> None:
        """See the protocol. What is being written of a checkpoint is written."""
        self._end_publishing()
        await self.saved()

    def _end_publishing(self) -> None:
        if self._sender is not None:
            self._sender.close()
            self._sender = None
        if self._publisher is not None:
            self._publisher.close()
            self._publisher = None
            self._learner.around_step = nullcontext

    # -- beyond the port ---------------------------------------------------------------------------------------------

    async def supervised_step(
        self, samples: Sequence[tuple[Sequence[int], Sequence[int]]], learning_rate: float
    ) -> dict[str, float]:
        """One warm-up step on (token ids, loss mask) pairs: mean negative log-likelihood of the masked tokens."""
        started = time.perf_counter()
        if self._step:
            raise RunError("supervised_step: RL has begun, and a warm-up may not follow it")
        self._warming_up = True
        shape = self._learner.shape
        for index, (token_ids, loss_mask) in enumerate(samples):
            check_tokens(f"warm-up {index}", token_ids, loss_mask, shape.vocab_size, shape.max_position_embeddings)
        rows = [supervised_row(token_ids, loss_mask) for token_ids, loss_mask in samples if any(loss_mask)]
        if not rows:
            raise RunError("supervised_step: no sample has a token to learn")
        own = self._shares_of(rows)
        batches = [micro_batch(rows, share.members, self._limits, "token-mean", idle=share.idle) for share in own]
        update = self._learner.supervised_update(batches, self._supervised_loss, learning_rate)
        loss = self._replicas.sum_report(Totals(loss=math.fsum(update.reports))).loss
        return {
            "loss": loss / update.denominator,
            "grad_norm": update.grad_norm,
            "tokens": update.denominator,
            "taken": float(update.taken),
            "seconds": time.perf_counter() - started,
        }

    async def finish_warmup(self) -> None:
        """RL starts from the warmed-up weights with fresh optimizer state and schedule."""
        self._learner.reset_optimizer()
        self._experience.keep_reference()
        self._warming_up = False

    async def logprob_gap(self, samples: Sequence[TrainSample]) -> dict[str, float]:
        """|log pi_trainer - log pi_rollout| over the tokens that the present version made: mean, max, tokens.

        The one check that engine and trainer compute the same policy. In an asynchronous run a batch holds few or no
        such tokens by the time it is trained on, so this can be asked as soon as a trajectory is finished. With routing replay
        also the mean that there would be by the experts that the trainer's routers choose.
        """
        usable = self._usable(samples)
        metrics = self._gap(usable, self._version).metrics()
        names = {"mean": "logprob_gap_mean", "max": "logprob_gap_max", "tokens": "logprob_gap_tokens"}
        found = {name: metrics[key] for name, key in names.items()}
        if self._settings.routing_replay:
            found["own_experts"] = self._gap(usable, self._version, replay=False).metrics()["logprob_gap_mean"]
        return found

    async def export(self, folder: str) -> None:
        """Write a Hugging Face folder with the present weights."""
        trainer_checkpoint.export(self._learner, self._replicas, folder)

    async def status(self) -> dict[str, Any]:
        """For ``rl-coserve doctor``: what is installed, which shims and hooks are live, where the trainer is."""
        return engine_status() | {
            "torch": torch.__version__,
            "device": str(device()),
            "dtype": self._learner.dtype,
            "threads": torch.get_num_threads(),
            "cpu_shims_active": cpu.is_active(),
            "parameters": sum(parameter.numel() for parameter in self._learner.parameters()),
            "rank": self._replicas.rank,
            "world_size": self._replicas.world,
            "fed": self._feeder.fed,
            "faulty": list(self._faulty[:_NAMED]),
            "step": self._step,
            "version": self._version,
            "sending_failed": "" if self._sender is None else self._sender.error,
        }

    # -- inside ------------------------------------------------------------------------------------------------------

    def _fed_before(self, batch: TrainBatch) -> tuple[int, Sequence[TrainSample]]:
        """(trajectories whose gradient is taken, what of the batch is not fed yet). The same on every rank."""
        rest = self._feeder.rest_of(batch)  # decided on equal arguments, but a rank may have lost its stream
        if rest is None or not self._replicas.ranks_agree(len(rest)):
            self._feeder.drop_fed()
            return 0, batch.samples
        return self._feeder.fed, rest

    def _streamed(self, rest: Sequence[TrainSample]) -> _Trained:
        """The optimizer step over what was fed and the rest."""
        fed = self._feeder.feed(rest, self._version, last=True)
        report = self._feeder.finish_batch(fed)
        return _Trained(fed.kept, fed.rows, fed.skipped, [] if report is None else [report])

    def _monolithic(self, samples: Sequence[TrainSample]) -> _Trained:
        """The optimizer steps over a whole batch."""
        rows, kept, skipped = self._experience.rows(samples, self._version)
        trained = _Trained(kept, rows, skipped)
        if not rows:
            return trained
        several = self._settings.minibatches > 1
        try:
            if several:
                planned = plan_micro_batches(rows, range(len(rows)), self._limits)
                work = self._experience.work(rows, planned)
                plans, own = self._replicas.dealer().deal_micro_batches(planned, work, last=True)
                self._experience.complete_rows(rows, plans, own)
            for part in split_rows(len(rows), self._settings.minibatches, self._generator):
                self._stepper.begin_step()
                self._stepper.feed(rows, plan_micro_batches(rows, part, self._limits), last=True, complete=not several)
                trained.reports.append(self._stepper.finish_step(rows))
        except BaseException:
            self._stepper.abandon_step()
            raise
        return trained

    def _metrics(self, trained: _Trained, previous_gap: Totals) -> dict[str, float]:
        totals, faults = Totals(), Counter[str]()
        reports, samples, rows = trained.reports, trained.samples, trained.rows
        for report in reports:
            totals.add(report.totals)
            faults.update(report.faulty)
        totals.add(previous_gap)
        taken = [report.update for report in reports if report.update.taken]
        names = [sample.trajectory_id for sample in samples]
        groups = group_counts([s.reward for s in samples], [s.group_id for s in samples], names)
        skipped = {cause: trained.skipped[cause] for cause in SKIP_CAUSES}
        values = totals.metrics() | {
            "trained_reward_mean": math.fsum(s.reward for s in samples) / len(samples) if samples else math.nan,
            "grad_norm": math.fsum(update.grad_norm for update in taken) / len(taken) if taken else math.nan,
            "trajectories": float(len(rows)),
            "groups": float(groups.groups),
            "groups_of_one": float(groups.lone),
            "groups_silent": float(groups.silent),
            "groups_silent_share": groups.silent / max(groups.groups, 1),
            "skipped": float(sum(skipped.values())),
            "updates": float(len(taken)),
            "skipped_updates": float(len(reports) - len(taken)),
            "gradient_not_finite": float(len(faults)),
        }
        values |= {f"skipped_{cause}": float(count) for cause, count in skipped.items()}
        if OBJECTIVES[self._settings.objective].advantage != "reference":  # those are made in the loss
            values["advantage_std"] = _spread(rows)
            values["advantage_nonzero"] = sum(bool(row.advantages.any()) for row in rows) / max(len(rows), 1)
        if isinstance(self._token_loss, UserLoss):
            values |= self._token_loss.reported(totals)
        if self._critic is not None:
            values |= _critic_metrics(reports)
        if len(taken) < len(reports) or faults:
            self._faulty = tuple(faults)
            reasons = "; ".join(report.update.reason for report in reports if report.update.reason)
            named = ", ".join(self._faulty[:_NAMED]) or "none whose own gradient is not finite"
            _log.warning("step %d: an update was not taken (%s); trajectories at fault: %s", self._step, reasons, named)
        return values

    def _shares_of(self, rows: Sequence[TrainRow]) -> list[MicroBatchShare]:
        """What this replica computes of all these rows."""
        plans = plan_micro_batches(rows, range(len(rows)), self._limits)
        _, own = self._replicas.dealer().deal_micro_batches(plans, self._experience.work(rows, plans), last=True)
        return own

    def _usable(self, samples: Sequence[TrainSample]) -> list[TrainSample]:
        shape = self._learner.shape
        kept, _ = usable_samples(samples, shape.vocab_size, shape.max_position_embeddings, self._limits.pack_tokens)
        return kept

    def _gap(self, samples: Sequence[TrainSample], version: int, *, replay: bool = True) -> Totals:
        """|log pi_trainer - log pi_rollout| of the tokens that ``version`` made; the model holds its weights."""
        rows = [row_of(sample, version, replay=replay and self._settings.routing_replay) for sample in samples]
        own = self._shares_of(rows)
        batches = [micro_batch(rows, share.members, self._limits, "token-mean", idle=share.idle) for share in own]
        outputs = self._learner.logprobs(batches, self._temperature)
        totals = Totals()
        for share, batch, logp_T in zip(own, batches, outputs, strict=True) if outputs else ():
            if not share.idle:
                gap_T = ((logp_T - batch.tokens.rollout_T) * batch.tokens.fresh_T).abs()
                fresh = float(batch.tokens.fresh_T.sum())
                totals.add(Totals(gap=float(gap_T.sum()), gap_max=float(gap_T.max()), fresh_tokens=fresh))
        return self._replicas.sum_report(totals)

    def _previous_gap(self, samples: Sequence[TrainSample]) -> tuple[Totals, dict[str, float]]:
        """The gap of some tokens that the previous version made, measured with its weights; with routing replay also what it
        would be by the experts that the trainer's routers choose."""
        if self._previous is None:
            return Totals(), {}
        version, weights = self._previous
        made = [sample for sample in samples if any(span[0] == version for span in sample.versions)]
        some, own = made[: self._settings.logprob_gap_samples], {}
        with self._learner.swapped_weights(weights):
            found = self._gap(some, version)
            if self._settings.routing_replay and found.fresh_tokens:
                own["logprob_gap_own_experts"] = self._gap(some, version, replay=False).metrics()["logprob_gap_mean"]
        return found, own

    def _reference_kl(self, samples: Sequence[TrainSample]) -> dict[str, float]:
        """The KL (k3) of the weights that this step begins with to the reference, over the policy's tokens of some of its
        trajectories, spread over its groups; nothing where the objective measures it on all of them, or nobody asks."""
        most, reference = self._settings.reference_samples, self._experience.reference
        if self._settings.needs_reference or not most or reference is None or not samples:
            return {}
        rows = [row_of(sample, self._version) for sample in samples[:: max(1, len(samples) // most)][:most]]
        own = self._shares_of(rows)
        batches = [micro_batch(rows, share.members, self._limits, "token-mean", idle=share.idle) for share in own]
        now = self._learner.logprobs(batches, self._temperature)
        with self._learner.swapped_weights(reference):
            then = self._learner.logprobs(batches, self._temperature)
        totals = Totals()
        for share, logp_T, reference_T in zip(own, now, then, strict=True) if now else ():
            if not share.idle:
                kl = float(kl_estimate("k3", logp_T, reference_T).sum())
                totals.add(Totals(reference_kl=kl, reference_tokens=float(len(logp_T))))
        totals = self._replicas.sum_report(totals)
        return {"reference_kl": totals.reference_kl / max(totals.reference_tokens, 1.0)}

    def _supervised_loss(self, logits_TV: OutputRows, batch: MicroBatch) -> tuple[Tensor, float]:
        group = self._learner.tensor_group
        logp_T = logprobs(logits_TV, batch.tokens.targets_T, group=group)
        loss = -(logp_T * batch.tokens.weights_T).sum()
        return loss, float(loss.detach())

    def _parts(self) -> trainer_checkpoint.TrainerParts:
        return trainer_checkpoint.TrainerParts(
            self._learner,
            self._critic,
            self._experience.reference,
            self._generator,
            self._replicas,
            self._settings.keeps_reference,
        )

    def _finish_sending(self) -> None:
        """Before the weights change, or others take their place for a while."""
        if self._sender is not None:
            self._sender.finish_send()

    def _require_rl(self, what: str) -> None:
        if self._warming_up:
            raise RunError(f"{what}: the warm-up was not finished (call finish_warmup)")


def _spread(rows: Sequence[TrainRow]) -> float:
    """Standard deviation of the advantages over the tokens that are trained on; with 0 there is nothing to learn from."""
    counted = [row.advantages[row.kept] for row in rows]
    return float(np.concatenate(counted).astype(np.float64).std()) if counted else 0.0


def _critic_metrics(reports: Sequence[StepReport]) -> dict[str, float]:
    """The critic's scalars, over the mini-batches of the step."""
    steps = [report for report in reports if report.value_update is not None]
    if not steps:
        return {}
    totals = steps[0].values
    for report in steps[1:]:
        totals.add(report.values)
    taken = [report.value_update for report in steps if report.value_update is not None and report.value_update.taken]
    norm = math.fsum(update.grad_norm for update in taken) / len(taken) if taken else math.nan
    return totals.metrics() | {"value_grad_norm": norm, "value_skipped_updates": float(len(steps) - len(taken))}
