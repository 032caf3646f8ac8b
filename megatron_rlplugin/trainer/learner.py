"""The Megatron machinery of one rank: model chunks in Megatron's DDP, Adam with fp32 gradients, learning-rate schedule.

Guarantees: an optimizer step is taken from gradients of exactly the micro-batches fed since ``begin``, on any replica,
divided once by the sum of their denominators; an update whose gradient is not finite is not taken and leaves weights and
optimizer as they were. Everything is stock Megatron-Core; gradients are summed in fp32 whatever the dtype of the weights,
and nothing is communicated between replicas before ``finish`` (:mod:`megatron_rlplugin.stream.gradient_stream`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rlplugin.context_parallel import RowPart
from megatron_rlplugin.expert_routing import RecordedRouting, check_router_options, follows_load
from megatron_rlplugin.megatron_options import (
    MegatronOptions,
    check_agreed,
    check_optimizer,
    check_scaling,
    make_config,
    refusals,
    sort_options,
)
from megatron_rlplugin.model import (
    DTYPES,
    ModelShape,
    build_model,
    causal_mask,
    check_layout,
    read_shape,
    transformer_config,
    uses_transformer_engine,
)
from megatron_rlplugin.objective.deferred_output import defer_output_layer, keeps_dtype, output_rows
from megatron_rlplugin.objective.multi_token import (
    check_multi_token,
    keep_heads_apart,
    multi_token_loss,
    rows_with_heads,
)
from megatron_rlplugin.objective.policy_loss import Totals
from megatron_rlplugin.objective.user_advantage import check_advantage
from megatron_rlplugin.objective.user_loss import token_loss_of
from megatron_rlplugin.objective.vocab_logprobs import OutputRows, logprobs
from megatron_rlplugin.parallel_layout import ParallelLayout, device, initialize_parallel
from megatron_rlplugin.stream.gradient_stream import GradientStream
from megatron_rlplugin.stream.stream_conditions import check_movable
from megatron_rlplugin.trainer.micro_batches import MicroBatch
from megatron_rlplugin.trainer.row_packing import block_causal_mask, packed_seq_params, takes_boundaries
from megatron_rlplugin.weights import hf_bridge
from orchestrator.api import ConfigError
from orchestrator.settings.trainer_settings import TrainerSection, TrainerSettings

# A loss: output at the policy's tokens (OutputRows; a critic's are values) -> (SUM, what is reported of it). Its divisor is
# the micro-batch's denominator.
LossFunction = Callable[[Any, MicroBatch], tuple[Tensor, Any]]
ForwardStep = Callable[[Iterator[MicroBatch], Any], tuple[Tensor, Callable[..., Any]]]


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Which of how many ranks this process is; ``init_method`` is where they meet (not needed by a single one)."""

    rank: int = 0
    world_size: int = 1
    init_method: str = ""
    timeout: float = 7200.0  # seconds that a rank waits in one collective before it gives up
    interface: str = ""  # of the network, see initialize_parallel


@dataclass(frozen=True, slots=True)
class LearnerUpdate:
    """What one optimizer step did. ``taken`` is False, with a ``reason``, when the gradient was not finite."""

    taken: bool
    grad_norm: float
    reports: tuple[Any, ...]  # one a micro-batch of this replica, on its last pipeline stage
    denominator: float
    reason: str = ""


class Learner:
    """Model, optimizer and schedule of one Hugging Face folder.

    ``options``: what the user set of Megatron's own. ``prepare`` is called with the loaded model chunks, before Megatron's
    DDP takes their parameters; ``learning_rate`` replaces the settings' (their final one in proportion). Both are for a
    critic; without ``prepare`` losses get :class:`OutputRows` instead of logits. ``replay``: by the experts that micro-batches
    bring (:mod:`megatron_rlplugin.expert_routing`).
    """

    def __init__(
        self,
        folder: str,
        settings: TrainerSettings,
        total_steps: int,
        dtype: str,
        ranks: Rendezvous | None = None,
        *,
        options: MegatronOptions | None = None,
        prepare: Callable[[list[Any]], None] | None = None,
        learning_rate: float | None = None,
        replay: bool = False,
    ) -> None:
        settings.check_schedule(total_steps)
        self.settings = settings
        self.total_steps = total_steps
        self.dtype = dtype
        self.folder = folder
        self.shape = read_shape(folder)
        self.options = options or MegatronOptions()
        ranks = ranks or Rendezvous()
        self.layout = layout_of(settings, self.shape, self.options)
        if self.layout.data_parallel_size(ranks.world_size) != settings.data_parallel:
            fix = f"must be tensor * pipeline * context * data parallel = {settings.ranks}"
            raise ConfigError("world_size", ranks.world_size, fix)
        _check_packing(settings, self.layout)
        initialize_parallel(
            self.layout, ranks.rank, ranks.world_size, ranks.init_method, ranks.timeout, ranks.interface
        )
        self._deferred = prepare is None
        self.replays = replay
        check_optimizer(self.options, distributed=settings.distributed_optimizer)
        check_scaling(self.options, settings.data_parallel)
        check_router_options(self.options.transformer, self.shape.num_experts, replay=replay)
        check_multi_token(self.options.transformer, self.shape, self.layout)
        built = {**self.options.transformer, **({"moe_enable_routing_replay": True} if replay else {})}
        if prepare is not None:  # a critic predicts no token
            built = {name: value for name, value in built.items() if not name.startswith("mtp_")}
        with refusals(self.options.transformer):
            modules = build_model(self.shape, dtype, self.layout, options=built)
        hf_bridge.load_hf(modules, folder)
        (prepare or defer_output_layer)(modules)
        self.config = modules[0].config
        if self.config.mtp_num_layers:
            keep_heads_apart(modules)
        self.chunks = [self._wrapped(module) for module in modules]
        self._routing = RecordedRouting(self.chunks, self.shape)
        if settings.grad_offload:
            check_movable(self.chunks)
        self._thd = takes_boundaries(modules[0])
        self._rate = settings.learning_rate if learning_rate is None else learning_rate
        # Around what changes the weights; who publishes them may want to know what did.
        self.around_step: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
        self.reset_optimizer()
        check_agreed(self.options.agreed, self.config, self.chunks[0].ddp_config, self.optimizer.config)

    @property
    def model(self) -> Any:
        """The model, when it is in one piece on this rank."""
        (model,) = self.chunks
        return model

    @property
    def tensor_group(self) -> Any:
        """The group over which the vocabulary is split; None when this rank sees all of it."""
        from megatron.core import parallel_state

        return parallel_state.get_tensor_model_parallel_group() if self.layout.tensor > 1 else None

    @property
    def row_multiple(self) -> int:
        """Rows have a multiple of so many tokens: ranks divide them evenly, and each part is one that kernels of FP8 take."""
        from megatron.core.transformer.moe.moe_utils import get_align_size_for_quantization

        low = self.config.fp8 or self.config.fp4
        return self.layout.row_multiple * (int(get_align_size_for_quantization(self.config)) if low else 1)

    def parameters(self) -> Iterator[Tensor]:
        """The parameters of this rank."""
        for chunk in self.chunks:
            yield from chunk.parameters()

    def weights(self) -> Iterator[Tensor]:
        """What decides this rank's part of the policy: its parameters, and biases of routers that no gradient moves."""
        yield from self.parameters()
        for chunk in self.chunks:
            yield from (value for name, value in chunk.named_buffers() if name.endswith("router.expert_bias"))

    def _wrapped(self, module: Any) -> Any:
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
            finalize_model_grads,
        )

        module.train()
        config = module.config
        ours = {
            "grad_reduce_in_fp32": True,  # sums in bf16 would depend on the order of the micro-batches in the second digit
            "overlap_grad_reduce": False,
            "use_distributed_optimizer": self.layout.distributed_optimizer,
        }
        ddp_config = make_config(DistributedDataParallelConfig, ours, self.options.ddp)
        config.finalize_model_grads_func = finalize_model_grads
        return DistributedDataParallel(config, ddp_config, module)

    def reset_optimizer(self) -> None:
        """Fresh optimizer state and a schedule at its start, over the present weights."""
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

        settings, rate = self.settings, self._rate
        final = rate
        if settings.final_learning_rate is not None:
            final = settings.final_learning_rate * (rate / settings.learning_rate)
        ours = {
            "optimizer": "adam",
            "lr": rate,
            "min_lr": final,
            "weight_decay": settings.weight_decay,
            "adam_beta1": settings.adam_beta1,
            "adam_beta2": settings.adam_beta2,
            "clip_grad": settings.clip_grad,
            "bf16": self.config.bf16,
            "params_dtype": DTYPES[self.dtype],
            "use_distributed_optimizer": self.layout.distributed_optimizer,
        }
        config = make_config(OptimizerConfig, ours, self.options.optimizer)
        with refusals(self.options.optimizer):
            self.optimizer = get_megatron_optimizer(config, self.chunks, use_gloo_process_groups=False)
        self.scheduler = OptimizerParamScheduler(
            self.optimizer,
            init_lr=0.0,
            max_lr=rate,
            min_lr=final,
            lr_warmup_steps=settings.lr_warmup_steps,
            lr_decay_steps=self.total_steps,
            lr_decay_style="constant" if settings.final_learning_rate is None else settings.lr_decay,
            start_wd=settings.weight_decay,
            end_wd=settings.weight_decay,
            wd_incr_steps=0,
            wd_incr_style="constant",
        )
        self.stream = GradientStream(self.chunks, self.optimizer)
        self._reports: list[Any] = []

    def advance_schedule(self) -> float:
        """Enter the next training step; returns its learning rate. Called before the step: Megatron's step 0 has 0."""
        self.scheduler.step(1)
        return float(self.optimizer.param_groups[0]["lr"])

    # -- one optimizer step ------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Open a step: no gradient yet."""
        self._reports = []
        self.stream.begin_step()

    def feed(self, batches: Sequence[MicroBatch], loss: LossFunction) -> None:
        """Add the gradients of these micro-batches of this replica. Brings offloaded gradients back."""
        if not batches:
            return
        if self.stream.state == "offloaded":
            self.stream.reload()
        filled = self._filled(batches)
        self._routing.forget()
        self._reports += self.stream.feed(self._forward_step(loss), **self._schedule(filled))[: len(batches)]

    def offload(self) -> None:
        """Gradients to host memory until the next feed or the end of the step."""
        if self.stream.state == "open":
            self.stream.offload()

    def finish_step(self, expected: float | None = None) -> LearnerUpdate:
        """Take the step. ``expected``: the denominator of all replicas; another is a ConfigError, and nothing changed."""
        if self.stream.state == "offloaded":
            self.stream.reload()
        with self.around_step():
            result = self.stream.finish_step(expected)
        reports, self._reports = tuple(self._reports), []
        return LearnerUpdate(result.taken, result.grad_norm, reports, result.denominator, result.reason)

    def abandon_step(self) -> None:
        """Drop the gradients of a step that will not be finished. Idempotent."""
        self._reports = []
        if self.stream.state != "idle":
            self.stream.abandon_step()

    def update_weights(self, batches: Sequence[MicroBatch], loss: LossFunction) -> LearnerUpdate:
        """One optimizer step on these micro-batches."""
        self.begin_step()
        self.feed(batches, loss)
        return self.finish_step()

    def supervised_update(
        self, batches: Sequence[MicroBatch], loss: LossFunction, learning_rate: float
    ) -> LearnerUpdate:
        """An update at a learning rate of its own, outside the schedule."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        return self.update_weights(batches, loss)

    def gradient_is_finite(self, batch: MicroBatch, loss: LossFunction, *, together: bool) -> bool:
        """Whether this micro-batch alone has a finite gradient on every rank of this replica, or (``together``) of all: then
        all ranks call it with the same one. Outside of a step; no gradient stays."""
        from megatron.core import parallel_state

        self.begin_step()
        self.feed([batch], loss)
        finite = torch.tensor(float(self.stream.gradients.finite()), device=device())
        group = None if together else parallel_state.get_model_parallel_group()
        dist.all_reduce(finite, op=dist.ReduceOp.MIN, group=group)
        self.abandon_step()
        return bool(finite > 0)

    def heads_loss(self, rows: OutputRows, batch: MicroBatch) -> tuple[Tensor, Totals]:
        """What heads that predict several tokens add to the loss of a micro-batch, and what is reported of it."""
        factor = self.config.mtp_loss_scaling_factor
        return multi_token_loss(rows, batch.tokens, self.settings.loss_mean, factor, self.tensor_group)

    # -- without a gradient ------------------------------------------------------------------------------------------

    def logprobs(self, batches: Sequence[MicroBatch], temperature: float, *, replay: bool = True) -> list[Tensor]:
        """Log-probs of the policy's tokens under the present weights, one tensor a micro-batch; [] but on the last stage.
        ``replay``: by the experts that the rollout chose, where these are replayed at all."""

        def report(logits_TV: Tensor | OutputRows, batch: MicroBatch) -> tuple[Tensor, Tensor]:
            logp_T = logprobs(logits_TV, batch.tokens.targets_T, temperature, group=self.tensor_group)
            return logp_T.new_zeros(()), logp_T

        return self.forward_only(batches, report, replay=replay)

    def forward_only(self, batches: Sequence[MicroBatch], report: LossFunction, *, replay: bool = True) -> list[Any]:
        """Forward passes only: what ``report`` says of each micro-batch. ``replay``: see :meth:`logprobs`."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        if not batches:
            return []
        with torch.no_grad():
            run = get_forward_backward_func()
            step, filled = self._forward_step(report, replay=replay), self._filled(batches)
            answers = run(forward_step_func=step, model=self.chunks, forward_only=True, **self._schedule(filled))
            return list(answers)[: len(batches)]

    def snapshot(self, into: list[Tensor] | None = None) -> list[Tensor]:
        """A copy of the present weights in host memory (pinned where there is CUDA): none of it on the device.

        ``into``: an earlier snapshot whose memory is used again, since pinning memory takes longer than a copy.
        """
        pinned = torch.cuda.is_available()
        if into is None:
            into = [torch.empty_like(weight, device="cpu", pin_memory=pinned) for weight in self.weights()]
        with torch.no_grad():
            for copy, weight in zip(into, self.weights(), strict=True):
                copy.copy_(weight)
        return into

    def snapshot_of(self, folder: str) -> list[Tensor]:
        """A snapshot of the weights of another folder, of the same shape. Raises ConfigError."""
        check_same_shape("trainer.reference_path", folder, self.shape)
        present = self.snapshot()
        hf_bridge.load_hf([chunk.module for chunk in self.chunks], folder)
        self._exchange_weights(present)
        return present

    def pinned(self, weights: Sequence[Tensor]) -> list[Tensor]:
        """A snapshot that was read from a file, where copies to the device are fast."""
        return [weight.pin_memory() for weight in weights] if torch.cuda.is_available() else list(weights)

    @contextlib.contextmanager
    def swapped_weights(self, weights: Sequence[Tensor]) -> Iterator[None]:
        """The model with other weights (a snapshot's) for a while; the present ones come back bit for bit. Meanwhile
        ``weights`` holds the present ones: on the device there is one tensor more than without."""
        self._exchange_weights(weights)
        try:
            yield
        finally:
            self._exchange_weights(weights)

    def _exchange_weights(self, weights: Sequence[Tensor]) -> None:
        with torch.no_grad():
            for parameter, value in zip(self.weights(), weights, strict=True):
                present = parameter.detach().clone()
                parameter.copy_(value)
                value.copy_(present)

    def _forward_step(self, loss: LossFunction, *, replay: bool = True) -> ForwardStep:
        return _forward_step(loss, self._thd, self._deferred, self._routing, replay)

    def _filled(self, batches: Sequence[MicroBatch]) -> list[MicroBatch]:
        """With copies that weigh nothing, as many as Megatron's interleaved schedule wants: a multiple of the stages."""
        missing = -len(batches) % self.layout.pipeline if self.layout.virtual else 0
        return [*batches, *[batches[-1].idle_copy()] * missing]

    def _schedule(self, batches: Sequence[MicroBatch]) -> dict[str, Any]:
        iterators = [iter(batches) for _ in self.chunks]
        if self.layout.pipeline > 1:  # ranks tell each other every shape, with a wait each, only where they differ
            uneven = len({batch.inputs_BS.shape for batch in batches}) > 1
            for chunk in self.chunks:
                chunk.config.variable_seq_lengths = uneven
        return {
            "data_iterator": iterators if len(iterators) > 1 else iterators[0],
            "num_microbatches": len(batches),
            "seq_length": max(batch.inputs_BS.shape[1] for batch in batches),
            "micro_batch_size": max(batch.inputs_BS.shape[0] for batch in batches),
        }


def check_trainer(folder: str, settings: TrainerSection, dtype: str) -> None:
    """Refuse what cannot be built, before a rank is started: options, layout, and how both fit the model of ``folder``
    ("": a model that the run makes, of which only the options are checked). Raises ConfigError."""
    options = sort_options(settings.megatron, settings.megatron_arguments)
    token_loss_of(settings)
    check_advantage(settings)
    check_optimizer(options, distributed=settings.distributed_optimizer)
    check_scaling(options, settings.data_parallel)
    if not folder:
        return
    shape = read_shape(folder)
    check_router_options(options.transformer, shape.num_experts, replay=settings.routing_replay)
    layout = layout_of(settings, shape, options)
    check_layout(shape, layout, options.transformer)
    check_multi_token(options.transformer, shape, layout)
    _check_packing(settings, layout)
    if settings.reference_path:
        check_same_shape("trainer.reference_path", settings.reference_path, shape)
    check_agreed(options.agreed, transformer_config(shape, DTYPES[dtype], layout, options.transformer))


def _check_packing(settings: TrainerSettings, layout: ParallelLayout) -> None:
    """Raises ConfigError."""
    if settings.pack_tokens and layout.context > 1 and uses_transformer_engine():
        fix = (
            "must be unset with trainer.context_parallel: Transformer Engine splits each packed trajectory, not the row"
        )
        raise ConfigError("trainer.pack_tokens", settings.pack_tokens, fix)


def check_same_shape(field: str, folder: str, shape: ModelShape) -> None:
    """Refuse a folder whose weights do not fit a model of this shape. Raises ConfigError."""
    other = read_shape(folder)
    for item in fields(shape):
        mine, theirs = getattr(shape, item.name), getattr(other, item.name)
        if mine != theirs:
            fix = f"has {item.name} = {theirs!r}, the model {mine!r}: the reference replaces the model, so shapes must agree"
            raise ConfigError(field, folder, fix)


def layout_of(settings: TrainerSettings, shape: Any, options: MegatronOptions | None = None) -> ParallelLayout:
    """The layout that the settings ask for. Megatron wants sequence parallelism for experts under tensor parallelism."""
    options = options or MegatronOptions()
    sequence = options.sequence_parallel
    if sequence is None:
        sequence = settings.tensor_parallel > 1 and bool(getattr(shape, "num_experts", None))
    return ParallelLayout(
        tensor=settings.tensor_parallel,
        pipeline=settings.pipeline_parallel,
        context=settings.context_parallel,
        expert=settings.expert_parallel,
        virtual=options.virtual_pipeline,
        sequence=sequence,
        distributed_optimizer=settings.distributed_optimizer,
    )


def _forward_step(loss: LossFunction, thd: bool, deferred: bool, routing: RecordedRouting, replay: bool) -> ForwardStep:
    """Megatron's forward-step function: model output, and the function that turns it into (SUM, divisor, report)."""
    from megatron.core import parallel_state

    def forward_step(batches: Iterator[MicroBatch], model: Any) -> tuple[Tensor, Callable[..., Any]]:
        batch = next(batches)
        width = batch.inputs_BS.shape[1]
        more: dict[str, Any] = keeps_dtype(model) if deferred else {}
        if not batch.packed:
            mask = causal_mask(width)
        elif thd:
            mask = None
            more["packed_seq_params"] = packed_seq_params(batch.packed, width)
        else:
            mask = block_causal_mask(batch.packed, width)
        if follows_load(model.config):
            more["padding_mask"] = batch.padding_BS()  # else it would count in the experts' load
        inputs_BS, positions_BS, part = batch.inputs_BS, batch.positions_BS, None
        if model.config.context_parallel_size > 1:
            part = RowPart(width, parallel_state.get_context_parallel_group(), inputs_BS.device)
            inputs_BS, positions_BS = part.cut(inputs_BS), part.cut(positions_BS)
            more |= {name: part.cut(value) for name, value in more.items() if name == "padding_mask"}
        routing.expect(model, batch.experts_BSLK if replay else None, float(batch.tokens.denominator), part)
        output_BSX = model(inputs_BS, positions_BS, mask, **more)

        def loss_function(output_BSX: Tensor) -> tuple[Tensor, Tensor, Any]:
            if output_BSX.shape[1] > width:
                output: Any = rows_with_heads(model, output_BSX, batch.at_T, batch.positions_BS)
            elif part is None:
                output = batch.select(output_BSX)
                output = output_rows(model, output) if deferred else output
            else:
                rows_PX, own = part.select(output_BSX, batch.at_T)
                output = output_rows(model, rows_PX, own) if deferred else own.whole(rows_PX[:, 0])
            total, report = loss(output, batch)
            # Every rank of the context knows the whole loss; its gradient is of its own tokens, and one of them counts it.
            counted = batch.tokens.denominator if part is None or part.first else 0
            return total, torch.tensor(counted, dtype=torch.int, device=total.device), report

        return output_BSX, loss_function

    return forward_step
