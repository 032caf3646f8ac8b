"""``MegatronTrainer``: the ``Trainer`` port on stock Megatron-Core, one rank, in a process of its own.

Guarantees
* ``version`` grows by one with every ``train_step``, whatever was skipped in it; ``publish`` sends the present weights
  under the present version. A batch for another version is refused.
* A trajectory with a reward or rollout log-prob that is not finite is left out and counted; an update whose gradient
  norm is not finite is not taken and counted. Reported values are always finite: one that is not is left out.
* pi_old is recomputed with the weights that the step begins with. With one mini-batch it is the current policy itself,
  so the ratio is exactly 1 and no second forward pass is made.
* The log-prob gap compares trainer and rollout on tokens that the SAME version made: all those of the present version,
  and, since an asynchronous batch has few of them, those of the previous one in ``logprob_gap_samples`` trajectories
  (which costs a copy of the weights; 0 switches it off).
* ``load`` after ``save`` continues bit-identically. RL begins with fresh optimizer state and schedule after a warm-up.

Methods are coroutines because the port's are (the trainer lives in a Ray actor); they compute without yielding.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_rlplugin import bridge, checkpoint, cpu
from megatron_rlplugin.batching import (
    SKIP_CAUSES,
    MicroBatch,
    Row,
    check_tokens,
    micro_batches,
    rows_of,
    split_rows,
    supervised_row,
    usable,
    with_old,
)
from megatron_rlplugin.hookpoints import engine_status, require_megatron
from megatron_rlplugin.learner import Learner, Update
from megatron_rlplugin.objective import Coefficients, Totals, cross_entropy, policy_loss
from megatron_rlplugin.parallel import device
from megatron_rlplugin.settings import TrainerSettings
from orchestrator.api import ConfigError, PublishResult, RunError, TrainBatch, TrainMetrics, TrainSample
from orchestrator.transfer import Publisher, RelayEndpoint


class MegatronTrainer:
    """See the module. ``temperature`` is the rollout's: log-probs are those of the sampling distribution."""

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
    ) -> None:
        require_megatron()
        self._settings = TrainerSettings.from_dict(settings or {})
        if not temperature > 0:
            raise ConfigError("rollout.temperature", temperature, "must be above 0")
        self._temperature = temperature
        self._endpoint = RelayEndpoint.from_dict(relay) if relay is not None else None
        self._publisher: Publisher | None = None
        torch.set_num_threads(self._settings.threads)
        torch.manual_seed(seed)
        self._generator = torch.Generator().manual_seed(seed)  # deals trajectories to mini-batches
        self._learner = Learner(model, self._settings, total_steps, dtype)
        self._coefficients = Coefficients(
            *self._settings.clip_range,
            self._settings.tis_cap,
            self._settings.entropy_coefficient,
        )
        self._sequence_mean = self._settings.loss == "sequence-mean"
        self._version = weight_version
        self._step = 0
        self._warming_up = False
        self._previous: tuple[int, list[Tensor]] | None = None  # the version before this one, and its weights

    # -- the port ----------------------------------------------------------------------------------------------------

    async def train_step(self, batch: TrainBatch) -> TrainMetrics:
        """See the protocol."""
        started = time.perf_counter()
        self._require_rl("train_step")
        if batch.version != self._version:
            raise RunError(f"a batch for version {batch.version}, but the trainer is at version {self._version}")
        shape = self._learner.shape
        samples, skipped = usable(batch.samples, shape.vocab_size, shape.max_position_embeddings)
        rows = rows_of(samples, batch.version, normalize=self._settings.normalize_advantage)
        values: dict[str, float] = {"learning_rate": self._learner.advance_schedule()}
        previous_gap = self._previous_gap(samples)
        if self._settings.logprob_gap_samples:
            self._previous = self._version, self._learner.snapshot()
        totals, updates = self._optimize(rows) if rows else (Totals(), [])
        totals.add(previous_gap)
        self._step += 1
        self._version += 1
        taken = [update for update in updates if update.taken]
        values |= totals.metrics()
        values |= {
            "reward_mean": math.fsum(s.reward for s in samples) / len(samples) if samples else math.nan,
            "grad_norm": math.fsum(u.grad_norm for u in taken) / len(taken) if taken else math.nan,
            "trajectories": float(len(samples)),
            "advantage_nonzero": sum(row.advantage != 0 for row in rows) / max(len(rows), 1),
            "skipped": float(sum(skipped.values())),
            "updates": float(len(taken)),
            "skipped_updates": float(len(updates) - len(taken)),
            "seconds": time.perf_counter() - started,
        }
        values |= {f"skipped_{cause}": float(skipped[cause]) for cause in SKIP_CAUSES}
        finite = {name: value for name, value in values.items() if math.isfinite(value)}
        return TrainMetrics(step=batch.step, version=self._version, values=finite)

    async def publish(self) -> PublishResult:
        """See the protocol. The first publication of this process opens a new epoch at the present version."""
        self._require_rl("publish")
        if self._endpoint is None:
            raise ConfigError("relay", None, "this trainer has no relay to publish to; give it an endpoint")
        if self._publisher is None:
            publisher = Publisher(self._endpoint)
            publisher.rollback(self._version)
            self._publisher = publisher
        tensors = ((name, *_as_bytes(tensor)) for name, tensor in bridge.export_hf(self._learner.model))
        return self._publisher.publish(self._version, tensors)

    async def save(self, folder: str) -> None:
        """See the protocol."""
        self._require_rl("save")
        position = checkpoint.Position(step=self._step, version=self._version)
        checkpoint.save(self._learner, position, self._generator, folder)

    async def load(self, folder: str) -> int:
        """See the protocol. What this process published before belongs to the abandoned history."""
        position = checkpoint.load(self._learner, self._generator, folder)
        self._step, self._version, self._warming_up = position.step, position.version, False
        self._previous = None
        await self.close()
        return self._version

    async def close(self) -> None:
        """See the protocol."""
        if self._publisher is not None:
            self._publisher.close()
            self._publisher = None

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
        batches = list(micro_batches(rows, range(len(rows)), self._settings.micro_batch_size, sequence_mean=False))
        update = self._learner.supervised_update(batches, _supervised_loss, learning_rate)
        tokens = sum(batch.tokens.denominator for batch in batches)
        return {
            "loss": math.fsum(update.reports) / tokens,
            "grad_norm": update.grad_norm,
            "tokens": float(tokens),
            "taken": float(update.taken),
            "seconds": time.perf_counter() - started,
        }

    async def finish_warmup(self) -> None:
        """RL starts from the warmed-up weights with fresh optimizer state and schedule."""
        self._learner.reset_optimizer()
        self._warming_up = False

    async def logprob_gap(self, samples: Sequence[TrainSample]) -> dict[str, float]:
        """|log pi_trainer - log pi_rollout| over the tokens that the present version made: mean, max, tokens.

        The one check that engine and trainer compute the same policy. In an asynchronous run a batch holds few or no
        such tokens by the time it is trained on, so this can be asked as soon as a trajectory is finished.
        """
        shape = self._learner.shape
        kept, _ = usable(samples, shape.vocab_size, shape.max_position_embeddings)
        metrics = self._gap(kept, self._version).metrics()
        names = {"mean": "logprob_gap_mean", "max": "logprob_gap_max", "tokens": "logprob_gap_tokens"}
        return {name: metrics[key] for name, key in names.items()}

    async def export(self, folder: str) -> None:
        """Write a Hugging Face folder with the present weights."""
        checkpoint.export(self._learner, folder)

    async def status(self) -> dict[str, Any]:
        """For ``rl-coserve doctor``: what is installed, which shims and hooks are live, where the trainer is."""
        return engine_status() | {
            "torch": torch.__version__,
            "device": str(device()),
            "dtype": self._learner.dtype,
            "threads": torch.get_num_threads(),
            "cpu_shims_active": cpu.is_active(),
            "parameters": sum(parameter.numel() for parameter in self._learner.model.parameters()),
            "step": self._step,
            "version": self._version,
        }

    # -- inside ------------------------------------------------------------------------------------------------------

    def _optimize(self, rows: list[Row]) -> tuple[Totals, list[Update]]:
        """The optimizer steps of one training step."""
        if self._settings.minibatches > 1:
            batches = self._micro_batches(rows, range(len(rows)))
            rows = with_old(rows, list(zip(batches, self._learner.logprobs(batches, self._temperature), strict=True)))
        totals, updates = Totals(), []
        for part in split_rows(len(rows), self._settings.minibatches, self._generator):
            update = self._learner.update(self._micro_batches(rows, part), self._policy_loss)
            updates.append(update)
            for report in update.reports:
                totals.add(report)
        return totals, updates

    def _gap(self, samples: Sequence[TrainSample], version: int) -> Totals:
        """|log pi_trainer - log pi_rollout| of the tokens that ``version`` made; the model holds its weights."""
        rows = rows_of(samples, version, normalize=False)
        batches = self._micro_batches(rows, range(len(rows)))
        totals = Totals()
        for batch, logp_T in zip(batches, self._learner.logprobs(batches, self._temperature), strict=True):
            gap_T = ((logp_T - batch.tokens.rollout_T) * batch.tokens.fresh_T).abs()
            fresh = float(batch.tokens.fresh_T.sum())
            totals.add(Totals(gap=float(gap_T.sum()), gap_max=float(gap_T.max()), fresh_tokens=fresh))
        return totals

    def _previous_gap(self, samples: Sequence[TrainSample]) -> Totals:
        """The gap of some tokens that the previous version made, measured with its weights."""
        if self._previous is None:
            return Totals()
        version, weights = self._previous
        made = [sample for sample in samples if any(span[0] == version for span in sample.versions)]
        with self._learner.holding(weights):
            return self._gap(made[: self._settings.logprob_gap_samples], version)

    def _micro_batches(self, rows: Sequence[Row], indices: Sequence[int]) -> list[MicroBatch]:
        size = self._settings.micro_batch_size
        return list(micro_batches(rows, indices, size, sequence_mean=self._sequence_mean))

    def _policy_loss(self, logits_TV: Tensor, batch: MicroBatch) -> tuple[Tensor, Totals]:
        return policy_loss(logits_TV, batch.tokens, self._coefficients, self._temperature)

    def _require_rl(self, what: str) -> None:
        if self._warming_up:
            raise RunError(f"{what}: the warm-up was not finished (call finish_warmup)")


def _supervised_loss(logits_TV: Tensor, batch: MicroBatch) -> tuple[Tensor, float]:
    loss = cross_entropy(logits_TV, batch.tokens.targets_T)
    return loss, float(loss.detach())


def _as_bytes(tensor: Tensor) -> tuple[tuple[int, ...], str, Any]:
    """(shape, dtype, its bytes as a contiguous uint8 array)."""
    data = tensor.detach().cpu().contiguous()
    raw = data.reshape(-1).view(torch.uint8).numpy()
    return tuple(data.shape), str(data.dtype).removeprefix("torch."), raw
