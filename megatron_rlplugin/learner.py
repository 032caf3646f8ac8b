"""The Megatron machinery of one rank: model in Megatron's DDP, Adam with fp32 gradients, learning-rate schedule.

Guarantees: an optimizer step is taken from gradients of exactly the micro-batches given, divided once by the sum of their
denominators; an update whose gradient norm is not finite is not taken and leaves weights and optimizer as they were.
Everything is stock Megatron-Core; gradients are summed in fp32 whatever the dtype of the weights.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_rlplugin import bridge
from megatron_rlplugin.batching import MicroBatch
from megatron_rlplugin.model import DTYPES, build_model, causal_mask, read_shape
from megatron_rlplugin.objective import logprobs_and_entropy
from megatron_rlplugin.parallel import initialize_parallel
from megatron_rlplugin.settings import TrainerSettings

# A loss: logits of the policy's tokens -> (SUM, what is reported of it). Its divisor is the micro-batch's denominator.
LossFunction = Callable[[Tensor, MicroBatch], tuple[Tensor, Any]]


@dataclass(frozen=True, slots=True)
class Update:
    """What one optimizer step did. ``taken`` is False when the gradient norm was not finite."""

    taken: bool
    grad_norm: float
    reports: tuple[Any, ...]  # one a micro-batch


class Learner:
    """Model, optimizer and schedule of one Hugging Face folder."""

    def __init__(self, folder: str, settings: TrainerSettings, total_steps: int, dtype: str) -> None:
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
            finalize_model_grads,
        )

        settings.check_schedule(total_steps)
        self.settings = settings
        self.total_steps = total_steps
        self.dtype = dtype
        self.folder = folder
        self.shape = read_shape(folder)
        initialize_parallel()
        (module,) = build_model(self.shape, dtype)
        bridge.load_hf(module, folder)
        module.train()
        self.config = module.config
        self.model = DistributedDataParallel(
            self.config,
            # Gradients in bf16 would depend on the order of the micro-batches in the second digit.
            DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=False),
            module,
        )
        self.config.finalize_model_grads_func = finalize_model_grads
        self.config.no_sync_func = self.model.no_sync
        self.reset_optimizer()

    def reset_optimizer(self) -> None:
        """Fresh optimizer state and a schedule at its start, over the present weights."""
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

        settings = self.settings
        final = settings.learning_rate if settings.final_learning_rate is None else settings.final_learning_rate
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=settings.learning_rate,
                min_lr=final,
                weight_decay=settings.weight_decay,
                adam_beta1=settings.adam_beta1,
                adam_beta2=settings.adam_beta2,
                clip_grad=settings.clip_grad,
                bf16=self.config.bf16,
                params_dtype=DTYPES[self.dtype],
            ),
            [self.model],
            use_gloo_process_groups=False,
        )
        self.scheduler = OptimizerParamScheduler(
            self.optimizer,
            init_lr=0.0,
            max_lr=settings.learning_rate,
            min_lr=final,
            lr_warmup_steps=settings.lr_warmup_steps,
            lr_decay_steps=self.total_steps,
            lr_decay_style="constant" if settings.final_learning_rate is None else "linear",
            start_wd=settings.weight_decay,
            end_wd=settings.weight_decay,
            wd_incr_steps=0,
            wd_incr_style="constant",
        )

    def advance_schedule(self) -> float:
        """Enter the next training step; returns its learning rate. Called before the step: Megatron's step 0 has 0."""
        self.scheduler.step(1)
        return float(self.optimizer.param_groups[0]["lr"])

    def update(self, batches: Sequence[MicroBatch], loss: LossFunction) -> Update:
        """One optimizer step on these micro-batches."""
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        reports = self._run(batches, loss, forward_only=False)
        self.optimizer.prepare_grads()
        grad_norm = float(self.optimizer.get_grad_norm())
        if not math.isfinite(grad_norm):
            return Update(False, grad_norm, reports)
        taken, _, _ = self.optimizer.step()
        return Update(bool(taken), grad_norm, reports)

    def supervised_update(self, batches: Sequence[MicroBatch], loss: LossFunction, learning_rate: float) -> Update:
        """An update at a learning rate of its own, outside the schedule."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        return self.update(batches, loss)

    def logprobs(self, batches: Sequence[MicroBatch], temperature: float) -> list[Tensor]:
        """Log-probs of the policy's tokens under the present weights, one tensor a micro-batch."""

        def report(logits_TV: Tensor, batch: MicroBatch) -> tuple[Tensor, Tensor]:
            logp_T, _ = logprobs_and_entropy(logits_TV, batch.tokens.targets_T, temperature, entropy_gradient=False)
            return logits_TV.new_zeros(()), logp_T

        with torch.no_grad():
            return list(self._run(batches, report, forward_only=True))

    def snapshot(self) -> list[Tensor]:
        """A copy of the present weights."""
        return [parameter.detach().clone() for parameter in self.model.parameters()]

    @contextlib.contextmanager
    def holding(self, weights: Sequence[Tensor]) -> Iterator[None]:
        """The model with other weights (a snapshot's) for a while; the present ones come back bit for bit."""
        present = self.snapshot()
        self._set_weights(weights)
        try:
            yield
        finally:
            self._set_weights(present)

    def _set_weights(self, weights: Sequence[Tensor]) -> None:
        with torch.no_grad():
            for parameter, value in zip(self.model.parameters(), weights, strict=True):
                parameter.copy_(value)

    def _run(self, batches: Sequence[MicroBatch], loss: LossFunction, *, forward_only: bool) -> tuple[Any, ...]:
        from megatron.core.pipeline_parallel import get_forward_backward_func

        if not batches:
            return ()
        return tuple(
            get_forward_backward_func()(
                forward_step_func=_forward_step(loss),
                data_iterator=iter(batches),
                model=[self.model],
                num_microbatches=len(batches),
                seq_length=max(batch.inputs_BS.shape[1] for batch in batches),
                micro_batch_size=max(batch.inputs_BS.shape[0] for batch in batches),
                forward_only=forward_only,
            )
        )


def _forward_step(loss: LossFunction) -> Callable[[Iterator[MicroBatch], Any], tuple[Tensor, Callable[..., Any]]]:
    """Megatron's forward-step function: model output, and the function that turns it into (SUM, divisor, report)."""

    def forward_step(batches: Iterator[MicroBatch], model: Any) -> tuple[Tensor, Callable[..., Any]]:
        batch = next(batches)
        logits_BSV = model(batch.inputs_BS, batch.positions_BS, causal_mask(batch.inputs_BS.shape[1]))

        def loss_function(output_BSV: Tensor) -> tuple[Tensor, Tensor, Any]:
            total, report = loss(batch.select(output_BSV), batch)
            return total, torch.tensor(batch.tokens.denominator, dtype=torch.int, device=total.device), report

        return logits_BSV, loss_function

    return forward_step
