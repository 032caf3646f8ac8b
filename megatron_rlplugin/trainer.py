"""The training side of a run: GRPO on a stock Megatron-Core model, one rank; publishes what it trains.

Guarantees: a step's gradient does not depend on how its trajectories are cut into micro-batches; a trajectory with a reward
or log-prob that is no finite number is left out and counted; a step whose gradient norm is not finite changes no weight;
``load`` after ``save`` goes on bit for bit. Versions count published updates: ``train_step`` makes the next one.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from megatron_rlplugin import bridge, cpu
from megatron_rlplugin.model import build, join_alone, read_config
from megatron_rlplugin.objective import LossParts, Objective, group_advantages, policy_loss, token_logprobs
from orchestrator.api import ConfigError, PublishResult, RetryableError, TrainBatch, TrainMetrics, TrainSample
from orchestrator.hooks import versions
from orchestrator.transfer import Publisher, RelayEndpoint

_WEIGHTS, _STATE = "model.safetensors", "trainer.pt"


@dataclass(slots=True)
class MicroBatch:
    """Padded trajectories; position t predicts token t + 1. Suffixes as in :mod:`megatron_rlplugin.objective`."""

    tokens_BT: torch.Tensor
    labels_BT: torch.Tensor
    mask_BT: torch.Tensor
    rollout_BT: torch.Tensor
    advantage_B: torch.Tensor
    fresh_BT: torch.Tensor  # 1 where the rollout's version is the trained one: the log-prob gap is measured there
    old_BT: torch.Tensor | None = None


class MegatronTrainer:
    """Implements :class:`orchestrator.api.Trainer`. ``settings`` are the fields of the config's trainer section."""

    def __init__(
        self,
        *,
        model: str,
        settings: Mapping[str, Any],
        total_steps: int,
        seed: int = 0,
        dtype: str = "float32",
        relay: Mapping[str, Any] | None = None,
        weight_version: int = 0,
    ) -> None:
        versions.check(versions.MEGATRON_CORE)
        torch.set_num_threads(int(settings["threads"]))
        torch.manual_seed(seed)
        self._settings = settings
        self._total_steps = total_steps
        self._hf_config = read_config(model)
        self._source = Path(model)
        join_alone()
        self.module, self._config = build(self._hf_config, dtype)
        bridge.load_hf(self.module, self._config, model)
        self._objective = Objective(
            settings["clip_low"],
            settings["clip_high"],
            settings["tis_cap"],
            settings["entropy_coefficient"],
            settings["loss"],
        )
        self._wrap(dtype)
        self._publisher = Publisher(RelayEndpoint.from_dict(relay)) if relay is not None else None
        self._warmup: torch.optim.Adam | None = None
        self._generator = torch.Generator().manual_seed(seed)
        self.version = weight_version
        self._resumed = True  # the first publication of a process opens a new epoch
        self._masks: dict[int, torch.Tensor] = {}

    def _wrap(self, dtype: str) -> None:
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
        from megatron.core.transformer.module import Float16Module

        settings, bf16 = self._settings, dtype == "bfloat16"
        module = Float16Module(self._config, self.module) if bf16 else self.module
        with cpu.cuda_literals():
            self._model = DistributedDataParallel(
                self._config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), module
            )
            self._optimizer = get_megatron_optimizer(
                OptimizerConfig(
                    optimizer="adam",
                    lr=settings["learning_rate"],
                    min_lr=settings["final_learning_rate"] or settings["learning_rate"],
                    weight_decay=settings["weight_decay"],
                    adam_beta1=settings["adam_beta1"],
                    adam_beta2=settings["adam_beta2"],
                    clip_grad=settings["clip_grad"],
                    bf16=bf16,
                    params_dtype=self._config.params_dtype,
                ),
                [self._model],
            )
        self._scheduler = OptimizerParamScheduler(
            self._optimizer,
            init_lr=0.0,
            max_lr=settings["learning_rate"],
            min_lr=settings["final_learning_rate"] or settings["learning_rate"],
            lr_warmup_steps=settings["lr_warmup_steps"],
            lr_decay_steps=max(self._total_steps, settings["lr_warmup_steps"] + 1),
            lr_decay_style="linear" if settings["final_learning_rate"] else "constant",
            start_wd=settings["weight_decay"],
            end_wd=settings["weight_decay"],
            wd_incr_steps=self._total_steps,
            wd_incr_style="constant",
        )
        self._config.finalize_model_grads_func = finalize_model_grads

    # -- the step ----------------------------------------------------------------------------------------------------

    async def train_step(self, batch: TrainBatch) -> TrainMetrics:
        """See the protocol. ``batch.version`` must be the present version."""
        if batch.version != self.version:
            raise RetryableError(f"batch for version {batch.version}, but the trainer is at {self.version}")
        started = time.perf_counter()
        samples = [sample for sample in batch.samples if _finite(sample)]
        values: dict[str, float] = {"excluded": float(len(batch.samples) - len(samples)), "skipped": 0.0}
        rewards = [sample.reward for sample in samples]
        advantages = group_advantages(rewards, [s.group_id for s in samples], self._settings["normalize_advantage"])
        micro_batches = self._cut(samples, advantages, batch.version)
        minibatches = self._minibatches(micro_batches)
        sums = _Sums()
        if len(minibatches) > 1:
            with torch.no_grad():
                for micro in micro_batches:
                    micro.old_BT = self._logprobs(micro)[0]
        for minibatch in minibatches:
            self._accumulate(minibatch, sums)
            with cpu.cuda_literals():
                grad_norm = self._grad_norm()
                if math.isfinite(grad_norm):
                    self._optimizer.step()
                else:
                    values["skipped"] += 1
            sums.grad_norms.append(grad_norm)
        values["learning_rate"] = float(self._optimizer.param_groups[0]["lr"])
        self._scheduler.step(increment=1)
        self.version += 1
        values |= sums.values()
        values["reward_mean"] = sum(rewards) / max(1, len(rewards))
        values["trajectories"] = float(len(samples))
        values["seconds"] = time.perf_counter() - started
        return TrainMetrics(batch.step, self.version, {name: float(value) for name, value in values.items()})

    def _grad_norm(self) -> float:
        total = sum(float(parameter.main_grad.float().square().sum()) for parameter in self.module.parameters())
        return math.sqrt(total)

    def _accumulate(self, micro_batches: Sequence[MicroBatch], sums: _Sums) -> None:
        """Gradient of one optimizer step: sums over micro-batches, divided once by the whole denominator."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        self._model.zero_grad_buffer()
        self._optimizer.zero_grad()

        def forward(iterator: Any, model: Any) -> tuple[torch.Tensor, Any]:
            micro: MicroBatch = next(iterator)
            logits_BTV = model(micro.tokens_BT, _positions(micro.tokens_BT), self._mask(micro.tokens_BT.shape[1]))

            def loss(output_BTV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
                logprobs_BT, entropy_BT = token_logprobs(output_BTV, micro.labels_BT)
                old_BT = logprobs_BT.detach() if micro.old_BT is None else micro.old_BT
                parts = policy_loss(
                    self._objective, logprobs_BT, entropy_BT, old_BT, micro.rollout_BT, micro.advantage_B, micro.mask_BT
                )
                sums.add(parts, micro, old_BT)
                tokens = self._objective.reduction == "token-mean"
                count = int(micro.mask_BT.sum()) if tokens else len(micro.advantage_B)
                return parts.loss_sum, torch.tensor(count, dtype=torch.int), {}

            return logits_BTV, loss

        with cpu.cuda_literals():
            get_forward_backward_func()(
                forward_step_func=forward,
                data_iterator=iter(micro_batches),
                model=[self._model],
                num_microbatches=len(micro_batches),
                seq_length=max(micro.tokens_BT.shape[1] for micro in micro_batches),
                micro_batch_size=len(micro_batches[0].advantage_B),
                forward_only=False,
            )

    def _logprobs(self, micro: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
        logits_BTV = self.module(micro.tokens_BT, _positions(micro.tokens_BT), self._mask(micro.tokens_BT.shape[1]))
        return token_logprobs(logits_BTV, micro.labels_BT)

    def _cut(self, samples: Sequence[TrainSample], advantages: Sequence[float], version: int) -> list[MicroBatch]:
        """Micro-batches of similar length, in an order drawn from the trainer's own generator."""
        size = self._settings["micro_batch_size"]
        order = sorted(range(len(samples)), key=lambda index: (len(samples[index].token_ids), index))
        cuts = [order[start : start + size] for start in range(0, len(order), size)]
        shuffled = torch.randperm(len(cuts), generator=self._generator).tolist()
        return [_pad([samples[i] for i in cuts[cut]], [advantages[i] for i in cuts[cut]], version) for cut in shuffled]

    def _minibatches(self, micro_batches: list[MicroBatch]) -> list[list[MicroBatch]]:
        count = min(self._settings["minibatches"], len(micro_batches))
        return [micro_batches[index::count] for index in range(count)] if micro_batches else []

    def _mask(self, length: int) -> torch.Tensor:
        """The causal mask [1, 1, T, T], true where attention is forbidden."""
        if length not in self._masks:
            self._masks[length] = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)
        return self._masks[length]

    # -- warm-up -----------------------------------------------------------------------------------------------------

    async def supervised_step(self, samples: Sequence[tuple[Sequence[int], Sequence[int]]], learning_rate: float) -> dict[str, float]:
        """One step of plain next-token training on (token_ids, loss_mask); with an optimizer of its own."""
        if self._warmup is None:
            self._warmup = torch.optim.Adam(self.module.parameters(), lr=learning_rate, betas=(0.9, 0.95))
        rows = [
            TrainSample(str(index), "", tuple(tokens), tuple(mask), (0.0,) * len(tokens), (), 0.0)
            for index, (tokens, mask) in enumerate(samples)
        ]
        micro = _pad(rows, [0.0] * len(rows), 0)
        self._model.zero_grad_buffer()
        logprobs_BT, _ = self._logprobs(micro)
        loss = -(logprobs_BT * micro.mask_BT).sum() / micro.mask_BT.sum()
        with self._model.no_sync():
            loss.backward()  # type: ignore[no-untyped-call]
        for parameter in self.module.parameters():
            parameter.grad = parameter.main_grad.to(parameter.dtype)
        torch.nn.utils.clip_grad_norm_(self.module.parameters(), 1.0)
        self._warmup.step()
        for parameter in self.module.parameters():
            parameter.grad = None
        return {"loss": float(loss.detach())}

    async def finish_warmup(self) -> None:
        """RL starts with a fresh optimizer, whose master weights are those of the warmed-up model."""
        self._warmup = None
        self._model.zero_grad_buffer()
        self._optimizer.reload_model_params()

    # -- weights and state -------------------------------------------------------------------------------------------

    async def publish(self) -> PublishResult:
        """See the protocol."""
        if self._publisher is None:
            raise RetryableError("this trainer has no relay to publish to")
        if self._resumed:
            self._publisher.rollback(self.version)
            self._resumed = False
        return self._publisher.publish(self.version, _wire(bridge.export_hf(self.module, self._config)))

    async def save(self, folder: str) -> None:
        """See the protocol."""
        save_file(dict(bridge.export_hf(self.module, self._config)), str(Path(folder) / _WEIGHTS))
        torch.save(
            {
                "version": self.version,
                "optimizer": self._optimizer.state_dict(),
                "scheduler": self._scheduler.state_dict(),
                "generator": self._generator.get_state(),
                "rng": torch.get_rng_state(),
            },
            Path(folder) / _STATE,
        )

    async def load(self, folder: str) -> int:
        """See the protocol. Raises ConfigError for a checkpoint of another architecture."""
        bridge.load_tensors(self.module, self._config, load_file(str(Path(folder) / _WEIGHTS)), folder)
        state = torch.load(Path(folder) / _STATE, weights_only=True)
        try:
            with cpu.cuda_literals():
                self._optimizer.load_state_dict(state["optimizer"])
        except (KeyError, ValueError, RuntimeError) as error:
            raise ConfigError("checkpoint", folder, f"its optimizer state does not fit this model: {error}") from error
        self._scheduler.load_state_dict(state["scheduler"])
        self._generator.set_state(state["generator"])
        torch.set_rng_state(state["rng"])
        self.version = int(state["version"])
        self._resumed = True
        return self.version

    async def export(self, folder: str) -> None:
        """Write the present weights as a Hugging Face folder."""
        place = Path(folder)
        place.mkdir(parents=True, exist_ok=True)
        for file in self._source.iterdir():
            if file.is_file() and file.suffix != ".safetensors":
                (place / file.name).write_bytes(file.read_bytes())
        weights = dict(bridge.export_hf(self.module, self._config))
        save_file(weights, str(place / _WEIGHTS), metadata={"format": "pt"})

    async def close(self) -> None:
        """See the protocol."""
        if self._publisher is not None:
            self._publisher.close()
            self._publisher = None


@dataclass
class _Sums:
    """Diagnostics, summed over micro-batches."""

    loss: float = 0.0
    denominator: float = 0.0
    tokens: float = 0.0
    entropy: float = 0.0
    clipped: float = 0.0
    kl: float = 0.0
    tis: float = 0.0
    tis_square: float = 0.0
    tis_max: float = 0.0
    gap: float = 0.0
    gap_tokens: float = 0.0
    gap_max: float = 0.0
    gap_all: float = 0.0

    def __post_init__(self) -> None:
        self.grad_norms: list[float] = []

    def add(self, parts: LossParts, micro: MicroBatch, old_BT: torch.Tensor) -> None:
        """Take in one micro-batch."""
        self.loss += float(parts.loss_sum.detach())
        self.tokens += float(micro.mask_BT.sum())
        self.entropy += parts.entropy_sum
        self.clipped += parts.clipped
        self.kl += parts.kl_sum
        self.tis += parts.tis_sum
        self.tis_square += parts.tis_square_sum
        self.tis_max = max(self.tis_max, parts.tis_max)
        gap_BT = (old_BT - micro.rollout_BT).abs() * micro.mask_BT
        self.gap_all += float(gap_BT.sum())
        self.gap += float((gap_BT * micro.fresh_BT).sum())
        self.gap_tokens += float((micro.mask_BT * micro.fresh_BT).sum())
        self.gap_max = max(self.gap_max, float((gap_BT * micro.fresh_BT).max()))

    def values(self) -> dict[str, float]:
        """The metrics by name."""
        tokens = max(1.0, self.tokens)
        return {
            "loss": self.loss / tokens,
            "entropy": self.entropy / tokens,
            "clip_fraction": self.clipped / tokens,
            "approx_kl": self.kl / tokens,
            "tis_mean": self.tis / tokens,
            "tis_max": self.tis_max,
            "ess": self.tis**2 / (tokens * self.tis_square) if self.tis_square else 0.0,
            "logprob_gap_mean": self.gap / max(1.0, self.gap_tokens),
            "logprob_gap_max": self.gap_max,
            "logprob_gap_tokens": self.gap_tokens,
            "logprob_gap_all": self.gap_all / tokens,
            "grad_norm": sum(self.grad_norms) / max(1, len(self.grad_norms)),
            "tokens": self.tokens,
        }


def _finite(sample: TrainSample) -> bool:
    return math.isfinite(sample.reward) and all(map(math.isfinite, sample.logprobs))


def _pad(samples: Sequence[TrainSample], advantages: Sequence[float], version: int) -> MicroBatch:
    length = max(len(sample.token_ids) for sample in samples) - 1
    shape = (len(samples), length)
    tokens, labels = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    mask, rollout, fresh = (np.zeros(shape, np.float32) for _ in range(3))
    for row, sample in enumerate(samples):
        size = len(sample.token_ids) - 1
        tokens[row, :size] = sample.token_ids[:-1]
        labels[row, :size] = sample.token_ids[1:]
        mask[row, :size] = sample.loss_mask[1:]
        rollout[row, :size] = sample.logprobs[1:]
        made_by = [made for made, count in sample.versions for _ in range(count)]
        written = np.flatnonzero(np.asarray(sample.loss_mask)) - 1
        fresh[row, written[: len(made_by)]] = np.asarray(made_by) == version
    return MicroBatch(
        torch.from_numpy(tokens),
        torch.from_numpy(labels),
        torch.from_numpy(mask),
        torch.from_numpy(rollout),
        torch.tensor(advantages, dtype=torch.float32),
        torch.from_numpy(fresh),
    )


def _positions(tokens_BT: torch.Tensor) -> torch.Tensor:
    return torch.arange(tokens_BT.shape[1]).unsqueeze(0).expand_as(tokens_BT)


def _wire(tensors: Any) -> Any:
    for name, tensor in tensors:
        yield name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), tensor.view(-1).view(torch.uint8).numpy()
