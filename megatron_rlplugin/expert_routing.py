"""What the routers of a mixture of experts are told of each micro-batch: which experts the rollout chose, what its auxiliary
losses weigh.

Guarantees

* Routing replay ("R3", Stabilizing MoE Reinforcement Learning by Aligning Training and Inference Routers, arXiv 2510.11370): a
  token whose experts the rollout said is computed by these, weighed by the present router's own scores of them, so that the
  router learns on; any other token is routed as without. The seam is Megatron-Core's ``moe_enable_routing_replay``: its
  ``TopKRouter`` asks an object for the choice, and the object is :class:`RouterReplay` below, since Megatron-Core's own can
  neither leave a token to the router nor tell a layer that is computed again from the next micro-batch's.
* Auxiliary and z losses of a micro-batch are Megatron-Core's own, over its tokens without padding, and count in the step as the
  micro-batch does: times its denominator, over the sum of all denominators, whatever an objective divides by. With sequence
  parallelism a z loss is the mean of the ranks' means, as Megatron-Core computes it.
* Both hold for layers that are recomputed, for pipeline, sequence and context parallelism: each layer has its own tokens' part.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_rlplugin.context_parallel import RowPart
from orchestrator.api import ConfigError, RunError

BALANCING = ("aux_loss", "seq_aux_loss")
_LOSSES = ("moe_router_load_balancing_type", "moe_aux_loss_coeff", "moe_z_loss_coeff")


def check_router_options(options: Mapping[str, Any], experts: int, *, replay: bool = False) -> None:
    """Refuse what would do nothing, or something else than is meant. Raises ConfigError."""
    kind, weight = options.get(_LOSSES[0], "none"), options.get(_LOSSES[1], 0.0)
    for name in (name for name in _LOSSES if name in options and not experts):
        raise ConfigError(f"trainer.megatron.{name}", options[name], "the model has no experts: leave it out")
    if replay and not experts:
        raise ConfigError("trainer.routing_replay", True, "the model has no experts: leave it out")
    kinds, weights = (value if isinstance(value, list) else [value] for value in (kind, weight))
    if any(one not in (*BALANCING, "none") for one in kinds):
        fix = f"must be one of {', '.join(BALANCING)}, none: others wait for all replicas, or route differently from the engine"
        raise ConfigError(f"trainer.megatron.{_LOSSES[0]}", kind, fix)
    if any(weights) != any(one in BALANCING for one in kinds) or (kinds != ["none"] and len(kinds) != len(weights)):
        fix = f"goes with {_LOSSES[1]} (a loss has a kind and a weight above 0): set both, or neither"
        raise ConfigError(f"trainer.megatron.{_LOSSES[0]}", kind, fix)
    if replay:
        for name in ("moe_router_fusion", "enable_cuda_graph", "external_cuda_graph"):
            if options.get(name):
                fix = "must be off with trainer.routing_replay: the kernel chooses experts itself"
                raise ConfigError(f"trainer.megatron.{name}", options[name], fix)


def has_auxiliary_loss(config: Any) -> bool:
    """Whether the routers of this ``TransformerConfig`` add losses of their own."""
    weight = config.moe_aux_loss_coeff
    return bool(config.moe_z_loss_coeff) or any(weight if isinstance(weight, list) else [weight])


def follows_load(config: Any) -> bool:
    """Whether anything of the routers depends on which tokens are there, so that padding must not count."""
    bias = config.moe_router_enable_expert_bias and config.moe_router_bias_update_rate
    return bool(bias) or has_auxiliary_loss(config)


@dataclass(frozen=True, slots=True)
class Told:
    """``chosen_TK``: experts of a layer's tokens, below 0 where nobody said; ``weight``: of its auxiliary losses."""

    chosen_TK: Tensor | None
    weight: float


_NOTHING = Told(None, 0.0)


class MicroBatchOf:
    """Which micro-batch a router is computing. A layer whose activations are recomputed forgets its first pass, which has no
    gradient, and is computed again in the backward pass, in the same order of micro-batches."""

    def __init__(self) -> None:
        self._now, self._train = _NOTHING, False
        self._again: deque[Told] = deque()
        self._computed = _NOTHING  # what the present call of the router goes by

    def expect(self, told: Told, *, train: bool) -> None:
        """The next forward pass is of this micro-batch; ``train``: a backward pass follows."""
        self._now, self._train = told, train

    def forget(self) -> None:
        """Whatever is not over."""
        self._now = self._computed = _NOTHING
        self._again.clear()

    def enter(self) -> None:
        """The router is called."""
        if torch._C._current_graph_task_id() != -1:  # within a backward pass
            self._computed = self._again.popleft()
            return
        self._computed = self._now
        if self._train and not torch.is_grad_enabled():
            self._again.append(self._now)

    @property
    def told(self) -> Told:
        """Of the micro-batch that is being computed."""
        return self._computed


class RouterReplay:
    """In the place of Megatron-Core's object of this name: asked by ``TopKRouter`` for the choice of experts."""

    def __init__(self, layer: int | None, micro_batch: MicroBatchOf) -> None:
        self.layer_number = layer
        self._micro_batch = micro_batch

    def get_replay_topk(
        self,
        scores_TE: Tensor,
        topk: int,
        num_groups: Any = None,
        group_topk: Any = None,
        default_compute_topk: Any = None,
    ) -> tuple[Tensor, Tensor]:
        """(scores of the chosen experts, the experts), ``[tokens, topk]`` each."""
        scores_TK, own_TK = default_compute_topk(scores_TE, topk, num_groups=num_groups, group_topk=group_topk)
        chosen_TK = self._micro_batch.told.chosen_TK
        if chosen_TK is None:
            return scores_TK, own_TK
        if chosen_TK.shape != own_TK.shape:
            raise RunError(f"routed experts of {list(chosen_TK.shape)} for tokens and choices of {list(own_TK.shape)}")
        experts_TK = torch.where(chosen_TK >= 0, chosen_TK, own_TK)
        return scores_TE.gather(1, experts_TK), experts_TK


class RecordedRouting:
    """Of the routers of a rank's model chunks. ``shape``: has ``num_hidden_layers``, ``num_experts``, ``num_experts_per_tok``."""

    def __init__(self, chunks: Sequence[Any], shape: Any) -> None:
        self._routers: dict[
            int, list[tuple[Any, MicroBatchOf, bool]]
        ] = {}  # True: of a head that predicts several tokens
        self._shape = shape
        for chunk in chunks:
            found = self._routers[id(chunk)] = []
            for name, router in _routers(chunk):
                micro_batch = MicroBatchOf()
                found.append((router, micro_batch, ".mtp." in f".{name}"))
                router.register_forward_pre_hook(partial(_enter, micro_batch))
                if router.config.moe_enable_routing_replay:
                    router.router_replay = RouterReplay(router.layer_number, micro_batch)
                if has_auxiliary_loss(router.config):
                    router.calculate_per_token_loss = (
                        False  # else they are multiplied by tokens, not by the denominator
                    )
                    router.attach_and_log_load_balancing_loss = partial(_attach_balance, micro_batch)
                    router.apply_z_loss = partial(_attach_z_loss, router, micro_batch)

    def forget(self) -> None:
        """Before a schedule begins: what an earlier one left when it failed."""
        for routers in self._routers.values():
            for _, micro_batch, _ in routers:
                micro_batch.forget()

    def expect(self, chunk: Any, chosen_BSLK: Tensor | None, weight: float, part: RowPart | None = None) -> None:
        """The chunk's next forward pass is of a micro-batch with these experts (on the CPU; of all layers of the model, each
        ``choices`` numbers, below 0 where nobody said), whose auxiliary losses weigh so much. Raises RunError for experts of
        another model."""
        routers = self._routers[id(chunk)]
        train = torch.is_grad_enabled()
        replay = routers and routers[0][0].config.moe_enable_routing_replay
        if chosen_BSLK is None or not replay:
            for _, micro_batch, _ in routers:
                micro_batch.expect(Told(None, weight), train=train)
            return
        self._check(chosen_BSLK)
        chosen_SBLK = _own_part(chosen_BSLK, routers[0][0].config, part)
        for router, micro_batch, head in routers:
            if head:  # an engine says nothing of these
                micro_batch.expect(Told(None, weight), train=train)
                continue
            layer_TK = chosen_SBLK[:, :, router.layer_number - 1].flatten(0, 1)
            told = layer_TK.to(device=router.weight.device, dtype=torch.int64, non_blocking=True)
            micro_batch.expect(Told(told, weight), train=train)

    def _check(self, chosen_BSLK: Tensor) -> None:
        shape = self._shape
        layers, choices = chosen_BSLK.shape[2:]
        if (layers, choices) != (shape.num_hidden_layers, shape.num_experts_per_tok):
            mine = f"{shape.num_hidden_layers} layers with {shape.num_experts_per_tok} experts a token"
            raise RunError(
                f"the rollout's experts cover {layers} layers with {choices} experts per token, the model has {mine}"
            )
        if (most := int(chosen_BSLK.max())) >= shape.num_experts:
            raise RunError(f"the rollout chose expert {most}, the model has {shape.num_experts}")


def _routers(chunk: Any) -> Iterator[tuple[str, Any]]:
    from megatron.core.transformer.moe.router import TopKRouter

    yield from ((name, module) for name, module in chunk.named_modules() if isinstance(module, TopKRouter))


def _own_part(rows_BSLK: Tensor, config: Any, part: RowPart | None) -> Tensor:
    """Of a micro-batch's rows what this rank's layers compute, ``[S, B, L, K]``: Megatron's layers have the sequence first."""
    if part is not None:
        rows_BSLK = part.cut(rows_BSLK)
    rows_SBLK = rows_BSLK.transpose(0, 1)
    if config.sequence_parallel:
        from megatron.core import parallel_state

        size, rank = config.tensor_model_parallel_size, parallel_state.get_tensor_model_parallel_rank()
        rows_SBLK = rows_SBLK.chunk(size)[rank]
    return rows_SBLK


def _enter(micro_batch: MicroBatchOf, module: Any, inputs: Any) -> None:
    micro_batch.enter()


def _attach_balance(
    micro_batch: MicroBatchOf, activation: Tensor, aux_loss_coeff: float, aux_loss: Tensor, *args: Any, **kwargs: Any
) -> Tensor:
    """Instead of ``TopKRouter.attach_and_log_load_balancing_loss``: ``aux_loss`` has its coefficient already."""
    return _attach(activation, aux_loss, micro_batch)


def _attach_z_loss(
    router: Any, micro_batch: MicroBatchOf, logits: Tensor, padding_mask: Tensor | None = None
) -> Tensor:
    """Instead of ``TopKRouter.apply_z_loss``."""
    from megatron.core.transformer.moe.moe_utils import z_loss_func

    weight = router.config.moe_z_loss_coeff
    if not weight or not router.training or not torch.is_grad_enabled():
        return logits
    loss = z_loss_func(logits, weight / router.tp_cp_group.size(), padding_mask=padding_mask)
    return _attach(logits, loss, micro_batch)


def _attach(output: Tensor, loss: Tensor, micro_batch: MicroBatchOf) -> Tensor:
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

    attached: Tensor = MoEAuxLossAutoScaler.apply(output, loss * micro_batch.told.weight)
    return attached
