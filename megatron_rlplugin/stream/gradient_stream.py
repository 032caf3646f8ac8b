"""Gradients of a training step taken from its trajectories as they finish; one merge and one optimizer step at the end.

Guarantees (RollPacker, section 4.4): the step is that of one batch with all that was fed. Each replica i contributes the
SUM of its losses' gradients, and the sum over replicas is divided once by N, the sum of all denominators n_i: that is the
mean of each replica weighted by n_i / N, for uneven n_i and for n_i = 0. Nothing is synchronised and no optimizer state is
read or written before :meth:`GradientStream.finish_step`. An interrupted stream cannot be finished. A step is taken by all
ranks or by none: not with a gradient that is not finite, not after an interruption, not with another N than expected;
weights and optimizer state are then as before, bit for bit. Megatron's config is patched only inside a call.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_rlplugin.parallel_layout import device
from megatron_rlplugin.stream.rank_agreement import TOLERANCE, agree_on_step, any_rank
from megatron_rlplugin.stream.stream_conditions import check_streamable, stream_units
from megatron_rlplugin.trainer.gradient_buffers import GradientBuffers, bucket_groups
from orchestrator.api import ConfigError, RunError

__all__ = ["GradientStream", "OptimizerStepResult", "stream_units"]

IDLE, OPEN, OFFLOADED = "idle", "open", "offloaded"


@dataclass(frozen=True, slots=True)
class OptimizerStepResult:
    """What one step did. Not ``taken``: ``reason`` says why, weights and optimizer state are as before."""

    taken: bool
    grad_norm: float  # before clipping; NaN where the step ended before there was one
    denominator: float  # N: the sum over all replicas
    reason: str = ""


class GradientStream:
    """The gradients of one step at a time, over this rank's Megatron DDP chunks. All ranks construct it together.

    From then on only the stream steps the optimizer: with ``overlap_param_gather`` it takes Megatron's hooks out of the
    forward (they would wait for replicas that are not training) and gathers the weights at the end of the step instead.
    ``optimizer`` may be None for a caller that uses :meth:`merge_gradients` and steps it himself.
    ``elastic``: replicas may feed at different times and different amounts. The amounts may differ without it, too.
    """

    def __init__(self, model: Sequence[Any], optimizer: Any, *, elastic: bool = False) -> None:
        check_streamable(model, optimizer, elastic=elastic)
        self.model = list(model)
        self.optimizer = optimizer
        self.gradients = GradientBuffers(self.model)
        self.state = IDLE
        self._interrupted = ""  # why the open step cannot be finished
        self._denominator = 0.0
        self._gathers = [c for c in self.model if getattr(c, "use_forward_hook", False)]
        for chunk in self._gathers:
            if chunk.remove_forward_pre_hook_handles:
                chunk.disable_forward_pre_hook(param_sync=True)  # weights of a step before may not have been gathered

    @property
    def denominator(self) -> float:
        """The sum of what this rank's losses returned as denominators; 0 but on the last pipeline stage."""
        return self._denominator

    @property
    def interrupted(self) -> str:
        """Why the open step cannot be finished; empty: it can."""
        return self._interrupted

    def begin_step(self) -> None:
        """Open a step: gradients are zero. Touches no optimizer state and talks to no other rank."""
        self._require(IDLE, "begin a step")
        self.gradients.allocate()
        self._zero_optimizer()
        self._forget_routing()
        for chunk in self.model:
            chunk.zero_grad_buffer()
        self._denominator, self._interrupted = 0.0, ""
        self.state = OPEN

    def feed(
        self,
        forward_step_func: Callable[..., Any],
        data_iterator: Any,
        *,
        num_microbatches: int,
        samples: float | Sequence[float] | None = None,
        **schedule: Any,
    ) -> list[Any]:
        """Forward and backward of these micro-batches by Megatron's own schedule, their gradients added to the step's.

        ``forward_step_func`` is Megatron's; its loss function returns ``(SUM, denominator, report)``, the denominator an
        int, a float or a tensor of one element: samples, tokens or any weight >= 0. ``(mean, report)`` is accepted with
        ``samples``, the weight of each micro-batch (one number for all, or one each). ``schedule``: ``seq_length``,
        ``micro_batch_size`` and whatever else the schedule takes. Returns the reports (last pipeline stage; else []).

        Raises ConfigError for input that cannot be fed; what the schedule raises passes through. If either happens after
        the first micro-batch was taken, the step is interrupted: :meth:`abandon_step` it.
        """
        self._require(OPEN, "feed it")
        if self._interrupted:
            raise RunError(f"the step was interrupted ({self._interrupted}); abandon it and begin again")
        self._check_feed(num_microbatches, samples, schedule)
        from megatron.core.pipeline_parallel import get_forward_backward_func

        counted: list[Any] = []
        step = _counting(forward_step_func, counted, samples)
        try:
            with self._unsynchronised():
                reports = get_forward_backward_func()(
                    forward_step_func=step,
                    data_iterator=data_iterator,
                    model=self.model if len(self.model) > 1 else self.model[0],
                    num_microbatches=num_microbatches,
                    forward_only=False,
                    **schedule,
                )
            self._denominator += _total(counted)
        except BaseException as error:
            self._interrupted = f"{type(error).__name__}: {error}"
            raise
        return list(reports)

    def offload(self) -> None:
        """Gradients to host memory; their device memory is free until :meth:`reload`."""
        self._require(OPEN, "offload its gradients")
        self.gradients.offload()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # to the driver: who needs the memory meanwhile may be another process
        self.state = OFFLOADED

    def reload(self) -> None:
        """Gradients back on the device, bit for bit."""
        self._require(OFFLOADED, "reload its gradients")
        self.gradients.reload()
        self.state = OPEN

    def abandon_step(self) -> None:
        """Drop the gradients of the open step, if there is one. The next :meth:`begin_step` starts anew. Local to this rank.

        A replica whose stream was interrupted may abandon, begin and feed again while the others keep what they fed.
        """
        for group in bucket_groups(self.model):
            group.grad_reduce_handle = None  # of a merge that failed
        self._zero_optimizer()
        self._denominator, self._interrupted = 0.0, ""
        self.state = IDLE

    def finish_step(self, expected: float | None = None) -> OptimizerStepResult:
        """Merge the gradients of all replicas and take the optimizer step. A collective: every rank calls it.

        ``expected``: the N that the caller counted; ranks may leave it out. ConfigError (on every rank, before any
        gradient was sent, the step still open) when it is not the sum of what was fed. RunError when a rank's stream was
        interrupted (the others' steps stay open, so that it may begin again) or when a rank cannot be reached: with
        weights and optimizer state as before, unless the message says otherwise.
        """
        if self.optimizer is None:
            raise ConfigError(
                "optimizer", None, "must be given to finish a step; merge_gradients() leaves the step to the caller"
            )
        biases = [(bias, bias.clone()) for bias in self._routing_biases()]
        taken = False
        try:
            result = self._take(expected)
            taken = result.taken
        finally:
            if not taken:  # Megatron moves them by the step's load before anyone knows whether the step counts
                for bias, before in biases:
                    bias.copy_(before)
        return result

    def merge_gradients(self, expected: float | None = None) -> float:
        """The first half of :meth:`finish_step`, for a caller that steps the optimizer itself: the merged gradients stand in
        Megatron's buffers, not clipped, the stream is idle. Returns N. Raises as :meth:`finish_step` does, and RunError where
        that would not take the step. With ``overlap_param_gather`` the caller must gather the weights after its step.
        """
        total, reason = self._merge(expected)
        self._end(OptimizerStepResult(False, math.nan, total, reason))
        if reason:
            raise RunError(f"the gradients of this step cannot be used: {reason}")
        return total

    # --- inside a step

    def _take(self, expected: float | None) -> OptimizerStepResult:
        total, reason = self._merge(expected)
        if reason:
            return self._end(OptimizerStepResult(False, math.nan, total, reason))
        with self._surviving("weights and optimizer state are as before"):
            self.optimizer.prepare_grads()
            norm = float(self.optimizer.get_grad_norm())
            refused = any_rank(not math.isfinite(norm))
        if refused:
            return self._end(
                OptimizerStepResult(False, norm, total, f"the norm of the merged gradients is not finite ({norm})")
            )
        with self._surviving("it had begun: weights and optimizer state are not usable"):
            taken, _, _ = self.optimizer.step()
            for chunk in self._gathers:
                chunk.start_param_sync(force_sync=True)
        return self._end(OptimizerStepResult(bool(taken), norm, total, "" if taken else "the optimizer refused it"))

    def _routing_biases(self) -> list[Tensor]:
        """Of the routers of this rank that choose experts by score and bias."""
        if not getattr(self.model[0].config, "moe_router_enable_expert_bias", False):
            return []
        buffers = [buffer for chunk in self.model for buffer in chunk.named_buffers()]
        return [value for name, value in buffers if name.endswith("router.expert_bias")]

    def _end(self, result: OptimizerStepResult) -> OptimizerStepResult:
        self._denominator = 0.0
        self.state = IDLE
        return result

    def _zero_optimizer(self) -> None:
        if self.optimizer is not None:  # its gradients may be views of the buffers
            self.optimizer.zero_grad()

    def _require(self, state: str, what: str) -> None:
        if self.state != state:
            raise RunError(f"cannot {what}: the stream is {self.state}, not {state}")

    @contextlib.contextmanager
    def _surviving(self, consequence: str) -> Iterator[None]:
        """A failure in here interrupts the step, as a RunError that says what state the weights are in."""
        try:
            yield
        except RuntimeError as error:  # torch.distributed's errors are RuntimeErrors
            self._interrupted = f"the step failed: {error}"
            raise RunError(f"the step failed ({consequence}): {error}") from error

    @contextlib.contextmanager
    def _unsynchronised(self) -> Iterator[None]:
        """Megatron's schedules without any collective over replicas, and without a division of the losses."""
        patch = {
            "finalize_model_grads_func": None,  # no collective of gradients, no division by tokens
            "no_sync_func": contextlib.nullcontext,  # the schedule's own no_sync would end ours at its last micro-batch
            "grad_sync_func": None,
            "param_sync_func": None,
            "calculate_per_token_loss": True,  # the SUM goes into backward as it is
            "barrier_with_L1_time": False,  # of Megatron's timers, over all replicas
        }
        configs = list({id(chunk.config): chunk.config for chunk in self.model}.values())
        saved = [(config, {name: getattr(config, name) for name in patch}) for config in configs]
        with contextlib.ExitStack() as stack:
            for chunk in self.model:
                stack.enter_context(chunk.no_sync())
            try:
                for config in configs:
                    for name, value in patch.items():
                        setattr(config, name, value)
                yield
            finally:
                for config, values in saved:
                    for name, value in values.items():
                        setattr(config, name, value)

    def _check_feed(self, num_microbatches: int, samples: Any, schedule: dict[str, Any]) -> None:
        from megatron.core import parallel_state

        for name in ("forward_only", "collect_non_loss_data"):
            if schedule.pop(name, False):
                raise ConfigError(name, True, "must be off: a stream takes gradients")
        if "model" in schedule:
            raise ConfigError("model", type(schedule["model"]).__name__, "is set by the stream; leave it out")
        stages = parallel_state.get_pipeline_model_parallel_world_size()
        least = stages if len(self.model) > 1 else 1  # the interleaved schedule fills the pipeline with each call
        if num_microbatches < least:
            raise ConfigError("num_microbatches", num_microbatches, f"must be at least {least}")
        if samples is not None and not isinstance(samples, (int, float)) and len(samples) != num_microbatches:
            raise ConfigError("samples", len(samples), f"must be one for each of {num_microbatches} micro-batches")
        if samples is not None and parallel_state.get_context_parallel_world_size() > 1:
            fix = "needs a loss function that returns (SUM, denominator, report): a mean over parts has no weight"
            raise ConfigError("context_parallel", parallel_state.get_context_parallel_world_size(), fix)

    def _forget_routing(self) -> None:
        """Routers count their tokens for balancing; the counts of an abandoned step must not stay."""
        from megatron.core.distributed.finalize_model_grads import reset_model_temporary_tensors

        if getattr(self.model[0].config, "num_moe_experts", None) is not None:
            reset_model_temporary_tensors(self.model[0].config, self.model)

    def _merge(self, expected: float | None) -> tuple[float, str]:
        """(N, why there are no gradients to use; empty: they are merged)."""
        self._require(OPEN, "finish it")
        with self._surviving("no gradient was sent"):
            agreed = agree_on_step(
                self._denominator,
                expected,
                interrupted=bool(self._interrupted),
                finite=bool(self._interrupted) or self.gradients.finite(),
            )
        if agreed.interrupted:
            own = f" (this one: {self._interrupted})" if self._interrupted else ""
            raise RunError(
                f"the streams of {agreed.interrupted} ranks were interrupted{own}; they must abandon and begin again"
            )
        total = agreed.denominator
        if agreed.uneven:
            raise ConfigError("denominator", self._denominator, "differs between ranks that hold parts of one replica")
        if agreed.expected and not all(math.isclose(total, e, rel_tol=TOLERANCE) for e in agreed.expected):
            fix = f"is the sum over all replicas, but {agreed.expected[0]:g} to {agreed.expected[1]:g} was expected"
            raise ConfigError("denominator", total, fix)
        if total <= 0:
            return total, "nothing was fed"
        if agreed.not_finite:
            return total, f"gradients are not finite on {agreed.not_finite} ranks"
        with self._surviving("weights and optimizer state are as before"):
            self._reduce(total)
        return total, ""

    def _reduce(self, total: float) -> None:
        """SUM over replicas, the TP and PP parts that Megatron's finalizer adds, then one division by N."""
        from megatron.core.distributed import finalize_model_grads

        finalize = self.model[0].config.finalize_model_grads_func or finalize_model_grads
        buckets = [bucket for group in bucket_groups(self.model) for bucket in group.buckets]
        # 1 / replicas where DDP was built without per-token losses: a mean over replicas, which is not what we want.
        factors = [bucket.gradient_scaling_factor for bucket in buckets]
        try:
            for bucket in buckets:
                bucket.gradient_scaling_factor = 1.0
            if self.model[0].ddp_config.overlap_grad_reduce:
                for chunk in self.model:  # no backward was the last one, so none has started it
                    chunk.start_grad_sync()
            with without_nan_check(self.model):
                finalize(self.model, None)
        finally:
            for bucket, factor in zip(buckets, factors, strict=True):
                bucket.gradient_scaling_factor = factor
        # As Megatron's finalizer computes it, so that the result is the same to the last bit.
        scaling = 1.0 / torch.tensor(total, dtype=torch.float32, device=device())
        for chunk in self.model:
            chunk.scale_gradients(scaling)


@contextlib.contextmanager
def without_nan_check(chunks: Sequence[Any]) -> Iterator[None]:
    """Megatron's check raises on the rank that has the NaN while the others wait for it, and knows its own schedule only (with
    megatron.training); the norm is checked on all."""
    configs = [chunk.ddp_config for chunk in chunks if hasattr(chunk, "ddp_config")]
    before = [config.check_for_nan_in_grad for config in configs]
    try:
        for config in configs:
            config.check_for_nan_in_grad = False
        yield
    finally:
        for config, value in zip(configs, before, strict=True):
            config.check_for_nan_in_grad = value


def _counting(
    forward_step_func: Callable[..., Any], counted: list[Any], samples: float | Sequence[float] | None
) -> Callable[..., Any]:
    """The same forward-step function; what its losses return as denominators goes into ``counted``, not to Megatron.

    Megatron adds them up as int32, which a float or a large sum does not survive.
    """
    nothing = torch.zeros((), dtype=torch.int)

    def step(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        output, loss_function = forward_step_func(*args, **kwargs)

        def loss(output_tensor: Any, *rest: Any, **keywords: Any) -> tuple[Any, Any, Any]:
            result = loss_function(output_tensor, *rest, **keywords)
            if len(result) == 3:
                total, denominator, report = result
            elif samples is None:
                fix = "must be (SUM, denominator, report); a (mean, report) needs samples=, its weight"
                raise ConfigError("loss_function", f"a tuple of {len(result)}", fix)
            else:
                mean, report = result
                denominator = samples if isinstance(samples, (int, float)) else samples[len(counted)]
                total = mean * denominator
            counted.append(denominator.detach().clone() if isinstance(denominator, Tensor) else denominator)
            return total, nothing, report

        return output, loss

    return step


def _total(counted: Sequence[Any]) -> float:
    """Their sum, exact; one wait for the device however many there are. ConfigError for one that no mean can have."""
    tensors = [value for value in counted if isinstance(value, Tensor)]
    numbers = [float(value) for value in counted if not isinstance(value, Tensor)]
    if tensors:
        numbers += torch.stack([tensor.reshape(()).double() for tensor in tensors]).tolist()
    for number in numbers:
        if not (math.isfinite(number) and number >= 0):
            raise ConfigError("denominator", number, "must be a finite number of at least 0")
    return math.fsum(numbers)
