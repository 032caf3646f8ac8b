"""The plugin in a training script of your own: :func:`wrap` beside a loop, :func:`install` before a stock ``pretrain()``.

Guarantees: model and optimizer stay the objects that they are, nothing is replaced in them. Without
``--rl-stream-training`` a step is Megatron's own (one call of its schedule, which synchronises, then the optimizer); with
it, the same step is taken by a :class:`~megatron_rlplugin.stream.gradient_stream.GradientStream`. :func:`install`
changes nothing without the flag, and is refused where the flag would be ignored, be wrong, or was never tested.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

import torch

from megatron_rlplugin.flags import STREAM, STREAM_NEEDS, relay_from, settings_from, vocabulary_from
from megatron_rlplugin.hookpoints import require_megatron
from megatron_rlplugin.stream.gradient_stream import GradientStream, OptimizerStepResult, without_nan_check
from megatron_rlplugin.stream.rank_agreement import agree_on_step, counts_in_step
from megatron_rlplugin.stream.stock_schedule import feed_size, part_size
from megatron_rlplugin.stream.stream_conditions import check_movable
from megatron_rlplugin.weights.rank_publisher import WeightPublisher
from megatron_rlplugin.weights.tensor_places import UNPADDED, chunks_of, tensor_pieces
from orchestrator.api import ConfigError, PublishResult

ForwardStep = Callable[..., Any]  # Megatron's: (data iterator, model chunk) -> (output, loss function)


class RLTraining:
    """What :func:`wrap` gives: ``model``, ``optimizer`` and ``settings`` as they are, the ``stream``, :meth:`publish`."""

    def __init__(self, model: Sequence[Any], optimizer: Any, args: argparse.Namespace, converter: Any | None) -> None:
        if converter is not None and not callable(getattr(converter, "export_hf_weights", None)):
            fix = "must have export_hf_weights(model, cpu=, show_progress=), as Megatron-Bridge's AutoBridge has"
            raise ConfigError("converter", type(converter).__name__, fix)
        self._converter = converter
        self.model = list(model)
        self.optimizer = optimizer
        self.settings = settings_from(args)
        _check_auxiliary(self.model, self.settings.loss_mean)
        if self.settings.grad_offload:
            check_movable(self.model)
        self.stream: GradientStream | None = None  # None without --rl-stream-training
        if self.settings.stream:
            self.stream = GradientStream(self.model, optimizer, elastic=True)
        for core in chunks_of(self.model):
            setattr(core, UNPADDED, vocabulary_from(args, core.vocab_size))
        self._relay = relay_from(args)
        if self._relay is not None and converter is None:
            for piece in tensor_pieces(self.model):  # what cannot be published is told here, not by the first publish
                piece.check()
        self._publisher: WeightPublisher | None = None
        self._moving = 0.0  # seconds that gradients last took to the host and back
        self._waited = 0.0  # seconds that the source last let us wait

    def step(
        self, forward_step_func: ForwardStep, micro_batches: Iterable[Any], *, seq_length: int, micro_batch_size: int
    ) -> tuple[OptimizerStepResult, list[Any]]:
        """One optimizer step on these micro-batches, streamed or in one call, and the loss functions' reports.

        ``forward_step_func`` returns losses as (SUM, denominator, report). A step whose gradient norm is not finite is
        not taken. Every rank calls it; a replica may have fewer micro-batches than another with streaming only, and not than one
        with which it shares experts. With virtual pipeline stages each replica has a multiple of the stages; a pipeline
        wants micro-batches of one shape, unless its config has ``variable_seq_lengths``. What the source or the forward step
        raises drops the gradients of this rank's step and passes through.
        """
        sizes = {"seq_length": seq_length, "micro_batch_size": micro_batch_size}
        if self.stream is None:
            return self._stock_step(forward_step_func, list(micro_batches), sizes)
        reports: list[Any] = []
        self.stream.begin_step()
        try:
            source = iter(micro_batches)  # may block: gradients of what has arrived are taken meanwhile
            while part := self._next_part(source):
                self._reload()
                reports += self.stream.feed(forward_step_func, self._data(part), num_microbatches=len(part), **sizes)
                if self.settings.grad_offload and self._waited >= self._moving:  # else the move is the longer pause
                    self._timed(self.stream.offload, begins=True)
            self._reload()
        except BaseException:
            self.stream.abandon_step()  # the next step begins anew
            raise
        return self.stream.finish_step(), reports

    def _next_part(self, source: Iterator[Any]) -> list[Any]:
        began = time.perf_counter()
        part = list(islice(source, feed_size(self.model)))
        self._waited = time.perf_counter() - began
        _check_in_step(len(part))
        return part

    def _reload(self) -> None:
        if self.stream is not None and self.stream.state == "offloaded":
            self._timed(self.stream.reload)

    def _timed(self, move: Callable[[], None], *, begins: bool = False) -> None:
        began = time.perf_counter()
        move()
        self._moving = (0.0 if begins else self._moving) + time.perf_counter() - began

    def publish(self, version: int) -> PublishResult:
        """Put the present weights on the relay of ``--rl-weight-relay`` as this version. Every rank calls it, each
        publishes its own shards, all get the result. The first call opens a new epoch.

        Raises ConfigError without a relay; whatever the relay raises, on any rank, means that nothing was published.
        """
        if self._relay is None:
            raise ConfigError("--rl-weight-relay", None, "is needed to publish weights")
        if self._publisher is None:
            self._publisher = WeightPublisher(self._relay, self.model, version, self._converter, timeout=None)
        with torch.no_grad():
            # With overlap_param_gather Megatron gathers the weights of a step in the forward pass of the next.
            for chunk in self.model:
                if getattr(chunk, "use_forward_hook", False) and chunk.remove_forward_pre_hook_handles:
                    chunk.start_param_sync(force_sync=True)
        return self._publisher.publish(version)

    def close(self) -> None:
        """Let go of the relay. Idempotent."""
        if self._publisher is not None:
            self._publisher.close()
            self._publisher = None

    def _data(self, micro_batches: list[Any]) -> Any:
        """As Megatron's schedules want it: an iterator, or one per virtual stage."""
        if len(self.model) == 1:
            return iter(micro_batches)
        if len(micro_batches) % part_size(self.model):
            fix = f"must be a multiple of the {part_size(self.model)} pipeline stages, which are interleaved"
            raise ConfigError("micro_batches", len(micro_batches), fix)
        return [iter(micro_batches) for _ in self.model]

    def _stock_step(
        self, forward_step_func: ForwardStep, micro_batches: list[Any], sizes: dict[str, int]
    ) -> tuple[OptimizerStepResult, list[Any]]:
        from megatron.core.distributed import finalize_model_grads
        from megatron.core.pipeline_parallel import get_forward_backward_func

        if not micro_batches:
            fix = f"give every replica at least one, or use {STREAM}: then a replica may have none"
            raise ConfigError("micro_batches", 0, fix)
        config = self.model[0].config
        if not config.calculate_per_token_loss:
            fix = f"must be true when the model is built, or use {STREAM}: else the mean is of micro-batches, whatever is in them"
            raise ConfigError("model.calculate_per_token_loss", False, fix)
        _check_in_step(len(micro_batches))
        counted: list[float] = []
        for chunk in self.model:
            chunk.zero_grad_buffer()
            if chunk.config.finalize_model_grads_func is None:  # Megatron-LM sets it where its own train() begins
                chunk.config.finalize_model_grads_func = finalize_model_grads
        # Likewise: else each backward pass would count as the last one, which reduces.
        if config.no_sync_func is None and self.model[0].ddp_config.overlap_grad_reduce:
            waiting = [chunk.no_sync for chunk in self.model]
            config.no_sync_func = waiting if len(waiting) > 1 else waiting[0]
        self.optimizer.zero_grad()
        with without_nan_check(self.model):
            reports = get_forward_backward_func()(
                forward_step_func=_counting(forward_step_func, counted),
                data_iterator=self._data(micro_batches),
                model=self.model if len(self.model) > 1 else self.model[0],
                num_microbatches=len(micro_batches),
                forward_only=False,
                **sizes,
            )
        total = agree_on_step(math.fsum(counted), None, interrupted=False, finite=True).denominator
        self.optimizer.prepare_grads()
        norm = float(self.optimizer.get_grad_norm())
        if not math.isfinite(norm):
            reason = f"the norm of the gradients is not finite ({norm})"
            return OptimizerStepResult(False, norm, total, reason), list(reports)
        taken, _, _ = self.optimizer.step()
        return OptimizerStepResult(bool(taken), norm, total, "" if taken else "the optimizer refused it"), list(reports)


def wrap(model: Sequence[Any], optimizer: Any, args: argparse.Namespace, converter: Any | None = None) -> RLTraining:
    """The one call that a training loop of your own needs, after Megatron built model and optimizer.

    ``model``: this rank's DDP chunks, as a list. ``args``: of a parser that went through ``add_rl_args``. All ranks call
    it. ``converter``: who names the weights that are published, for a family that we do not know: an ``AutoBridge`` of
    Megatron-Bridge, or what has its ``export_hf_weights``. Raises ConfigError for a Megatron-Core that was not tested, for
    wrong flags, and for a model or optimizer that cannot be streamed.
    """
    require_megatron()
    return RLTraining(model, optimizer, args, converter)


def install(args: argparse.Namespace) -> bool:
    """For a script that calls ``megatron.training.pretrain()``: call it between parsing and ``pretrain``.

    Returns whether steps are streamed: only with ``--rl-stream-training``. The loss stays that of your forward step,
    which must return (SUM, tokens, report) as Megatron's own does. Raises ConfigError for a combination that cannot be
    streamed, a Megatron that was not tested, and one without ``megatron.training``.
    """
    if not settings_from(args).stream:
        return False
    for name in STREAM_NEEDS:
        if not getattr(args, name, False):
            raise ConfigError(_flag(name), False, f"is needed with {STREAM}, which sets it on the command line")
    for name, why in {
        "rl_grad_offload": "is for pauses between the parts of a step, and a step of pretrain() has none; leave it out",
        "overlap_param_gather": "must be off: pretrain() gathers weights in the forward pass of its next step",
        "use_megatron_fsdp": "must be off: FSDP reduces gradients in every backward pass",
        "use_torch_fsdp2": "must be off: FSDP reduces gradients in every backward pass",
    }.items():
        if getattr(args, name, False):
            raise ConfigError(_flag(name), True, f"{why} (with {STREAM})")
    if str(getattr(args, "cuda_graph_impl", "none")) == "full_iteration":
        raise ConfigError("--cuda-graph-impl", args.cuda_graph_impl, f"must be another one with {STREAM}")
    try:
        import megatron.training.training  # noqa: F401
    except ImportError as error:
        fix = f"is not in this Megatron-Core; use wrap() in your own loop, or a wheel that has it ({error})"
        raise ConfigError("megatron.training", "not installed", fix) from error
    from megatron_rlplugin.patches import REGISTER

    REGISTER.apply("stream_training")
    return True


def _counting(forward_step_func: ForwardStep, counted: list[float]) -> ForwardStep:
    """The same forward step; denominators are noted on their way to Megatron."""

    def forward_step(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        output, loss_function = forward_step_func(*args, **kwargs)

        def noting(*loss_args: Any, **loss_kwargs: Any) -> Any:
            total, denominator, report = loss_function(*loss_args, **loss_kwargs)
            counted.append(float(denominator))
            return total, denominator, report

        return output, noting

    return forward_step


def _check_in_step(count: int) -> None:
    """Raises ConfigError on all ranks that share experts, where they have different numbers of micro-batches and would hang."""
    least, most = counts_in_step(count)
    if least != most:
        fix = f"must be equal on all replicas that share experts, but {least} to {most} were given: fill up with ones of weight 0"
        raise ConfigError("micro_batches", count, fix)


def _check_auxiliary(chunks: Sequence[Any], mean: str) -> None:
    """Megatron adds auxiliary losses up by tokens and divides them with the rest: by trajectories that is far too little.
    Raises ConfigError."""
    for chunk in chunks:
        for name in ("moe_aux_loss_coeff", "moe_z_loss_coeff", "mtp_num_layers"):
            value = getattr(chunk.config, name, None)
            if (any(value) if isinstance(value, list | tuple) else value) and mean != "token-mean":
                fix = (
                    f"must be 0 with {mean}, which averages over trajectories, not tokens; or set --rl-loss token-mean"
                )
                raise ConfigError(f"model.{name}", value, fix)


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
