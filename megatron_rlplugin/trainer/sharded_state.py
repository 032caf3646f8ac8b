"""What of a learner is in a checkpoint, as sharded tensors of Megatron-Core's distributed checkpointing.

Guarantees: keys, shapes and coordinates are Megatron-LM's own (those of its ``fully_reshardable`` optimizer state), so a
checkpoint does not depend on the layout that wrote it; each rank names what it holds and no more: nothing is gathered, and a
distributed optimizer's flat shard of a parameter is cut into boxes of that parameter. The tensors are the live ones: what is
loaded into them is restored, bit for bit.
"""

from __future__ import annotations

import copy
import math
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_rlplugin.model import unwrap
from megatron_rlplugin.trainer.learner import Learner

# How Megatron-LM is to read it: it asks a checkpoint, not its own flags.
CONTENT = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "distrib_optim_fully_reshardable_mem_efficient": False,
    "singleton_local_shards": False,
    "chained_optim_avoid_prefix": True,
}
_MASTERS = ("param", "fp32_param")  # of the distributed optimizer, and of the other one


@dataclass(frozen=True, slots=True)
class _Kept:
    """What an optimizer keeps of elements ``start:stop`` of a parameter, by Megatron's names. ``own``: no other
    data-parallel rank has it."""

    optimizer: Any
    parameter: Tensor
    start: int
    stop: int
    tensors: dict[str, Tensor]
    own: bool


def model_state(chunks: Sequence[Any]) -> dict[str, Any]:
    """Megatron-LM's entries for these model chunks."""
    from megatron.core import parallel_state

    metadata = {**CONTENT, "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    names = ["model"] if len(chunks) == 1 else [f"model{place}" for place in range(len(chunks))]
    return {
        name: unwrap(chunk).sharded_state_dict(metadata=metadata) for name, chunk in zip(names, chunks, strict=True)
    }


def optimizer_common(optimizer: Any) -> dict[Any, Any]:
    """Megatron-LM's entry for the optimizer, without its tensors: options and steps."""
    parts = chain(optimizer)
    found = {place: _common_of(part) for place, part in enumerate(parts)}
    return found if len(parts) > 1 else found[0]


def optimizer_shards(learner: Learner, model: Mapping[str, Any], master: str | None = None) -> dict[str, Any]:
    """The optimizer's tensors of this rank. ``master``: the name that the masters have in the checkpoint that is loaded, ""
    where the weights are the only ones; None: their own name."""
    shards: list[Any] = []
    places = _places(model)
    for kept in kept_state(learner.optimizer):
        for name, tensor in kept.tensors.items():
            said = master if master is not None and name in _MASTERS else name
            prefix = f"optimizer.state.{said}." if said else ""
            shards += _cut(places[id(kept.parameter)], prefix, tensor, kept.start, kept.stop, own=kept.own)
    return {str(place): shard for place, shard in enumerate(shards)}


def weight_shards(learner: Learner, model: Mapping[str, Any], weights: Sequence[Tensor], prefix: str) -> dict[str, Any]:
    """Other weights of the same model, in the order of ``Learner.weights``."""
    places = _places(model)
    shards = [
        shard
        for parameter, value in zip(learner.weights(), weights, strict=True)
        for shard in _cut(places[id(parameter)], prefix, value, 0, value.numel(), own=False)
    ]
    return {str(place): shard for place, shard in enumerate(shards)}


def prepare_state(optimizer: Any) -> None:
    """Moments of 0 where no step was taken yet: what the first step would begin with."""
    for part in chain(optimizer):
        if part.init_state_fn is not None:
            part.init_state_fn(part.optimizer, part.config)
        for inner in _inner(part):
            if isinstance(inner, torch.optim.Adam):  # AdamW is one, too
                for state in inner.state.values():
                    state.setdefault("step", torch.tensor(0.0))


def put_back(optimizer: Any) -> None:
    """Where an optimizer gave copies of what it keeps, it takes them back as they were loaded."""
    for kept in kept_state(optimizer):
        if kept.own and kept.optimizer.config.use_precision_aware_optimizer:
            kept.optimizer._set_main_param_and_optimizer_states(kept.parameter, kept.tensors)
    for part in chain(optimizer):
        if hasattr(part.optimizer, "_sync_hdo_state_to_sub_optimizers"):
            part.optimizer._sync_hdo_state_to_sub_optimizers()


def kept_state(optimizer: Any) -> Iterator[_Kept]:
    """All that the optimizer of this rank keeps, in its order."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    for part in chain(optimizer):
        if isinstance(part, DistributedOptimizer):
            yield from _distributed_state(part)
            continue
        state = part.optimizer.state
        masters = {
            id(main): parameter
            for group, mains in zip(
                getattr(part, "float16_groups", ()), getattr(part, "fp32_from_float16_groups", ()), strict=True
            )
            for parameter, main in zip(group, mains, strict=True)
        }
        for main in (value for group in part.optimizer.param_groups for value in group["params"]):
            parameter = masters.get(id(main), main)
            own = {"fp32_param": main} if parameter is not main else {}
            yield _Kept(part, parameter, 0, parameter.numel(), {**own, **_moments(state[main])}, own=False)


def _distributed_state(part: Any) -> Iterator[_Kept]:
    for ranges in part.gbuf_ranges:
        for buckets in ranges.values():
            for bucket in buckets:
                for parameter, where in bucket["param_map"].items():
                    tensors = _moments(part._get_main_param_and_optimizer_states(parameter))
                    yield _Kept(part, parameter, where["param"].start, where["param"].end, tensors, own=True)


def master_name(optimizer: Any) -> str:
    """Under which name the masters are saved; "": the weights are the masters."""
    names = {name for kept in kept_state(optimizer) for name in kept.tensors}
    return next((name for name in _MASTERS if name in names), "")


def steps_of(optimizer: Any) -> int:
    """Steps that the optimizer took; all parameters take all."""
    found = [0.0]
    for inner in (inner for part in chain(optimizer) for inner in _inner(part)):
        found += [float(group["step"]) for group in inner.param_groups if "step" in group]
        found += [float(state["step"]) for state in inner.state.values() if "step" in state]
    return int(max(found))


def set_steps(optimizer: Any, steps: int) -> None:
    """See :func:`steps_of`."""
    for inner in (inner for part in chain(optimizer) for inner in _inner(part)):
        if isinstance(inner, torch.optim.Adam):
            for state in inner.state.values():
                state["step"] = torch.tensor(float(steps))
        else:  # fused ones count by group
            for group in inner.param_groups:
                group["step"] = steps


def megatron_arguments(learner: Learner, world: int) -> Namespace:
    """What Megatron-LM compares with its own arguments before it reads a checkpoint."""
    config, layout = learner.config, learner.layout
    return Namespace(
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        ffn_hidden_size=config.ffn_hidden_size,
        num_attention_heads=config.num_attention_heads,
        num_query_groups=config.num_query_groups,
        kv_channels=config.kv_channels,
        num_experts=config.num_moe_experts,
        max_position_embeddings=learner.shape.max_position_embeddings,
        padded_vocab_size=learner.shape.vocab_size,
        add_position_embedding=True,  # Megatron-LM's default; it does not say which
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        expert_model_parallel_size=layout.expert,
        world_size=world,
        data_parallel_size=layout.data_parallel_size(world),
        use_distributed_optimizer=layout.distributed_optimizer,
        ckpt_format="torch_dist",
        no_save_optim=False,
        no_save_rng=True,  # without dropout nothing is drawn from Megatron's generators
        async_save=False,
        consumed_train_samples=0,
        consumed_valid_samples=0,
        skipped_train_samples=0,
    )


def chain(optimizer: Any) -> list[Any]:
    """The optimizers of one chain; those of ranks without a trainable parameter are empty, and left out."""
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    return [part for part in parts if part.optimizer is not None]


def boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Elements ``start:stop`` of a row-major tensor as (offset, extent) of boxes, in order."""
    if start >= stop:
        return
    if len(shape) <= 1:
        yield (start,), (stop - start,)
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row  # whole rows
    if first > last:  # within one row
        first = last = last + 1
    for offset, extent in boxes(shape[1:], start - (first - 1) * row, min(stop - (first - 1) * row, row)):
        yield (first - 1, *offset), (1, *extent)
    if first < last:
        yield (first, *[0] * (len(shape) - 1)), (last - first, *shape[1:])
    for offset, extent in boxes(shape[1:], 0, stop - last * row):
        yield (last, *offset), (1, *extent)


def _cut(
    places: Sequence[tuple[int, Any]], prefix: str, tensor: Tensor, start: int, stop: int, *, own: bool
) -> Iterator[Any]:
    """``tensor`` (elements ``start:stop`` of a parameter) as shards of what the parameter is a shard of."""
    from megatron.core.dist_checkpointing import ShardedTensor

    flat = tensor.detach().view(-1)
    for at, part in places:
        begin = max(start, at)
        lead = part.prepend_axis_num
        for offset, extent in boxes(part.local_shape, begin - at, min(stop, at + math.prod(part.local_shape)) - at):
            count = math.prod(extent)
            data = flat[begin - start : begin - start + count].view((1,) * lead + extent)
            begin += count
            yield ShardedTensor(
                key=prefix + part.key,
                data=data,
                dtype=data.dtype,
                local_shape=tuple(data.shape),
                global_shape=part.global_shape,
                global_offset=tuple(
                    whole + inner for whole, inner in zip(part.global_offset, (*[0] * lead, *offset), strict=True)
                ),
                axis_fragmentations=None,  # no regular grid
                replica_id=(*part.replica_id[:2], 0) if own else part.replica_id,
            )


def _places(model: Mapping[str, Any]) -> dict[int, list[tuple[int, Any]]]:
    """By parameter: its first element, and the sharded tensor that begins there. Gate and up are two of one parameter."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

    found: dict[int, list[tuple[int, Any]]] = {}
    for whole in nested_values(model):
        if not isinstance(whole, ShardedTensor | ShardedTensorFactory):
            continue  # an object of Transformer Engine
        built = nested_values(whole.build()) if isinstance(whole, ShardedTensorFactory) else [whole]
        first = whole.data.data_ptr()
        found[id(whole.data)] = [((part.data.data_ptr() - first) // part.data.element_size(), part) for part in built]
    return found


def _common_of(part: Any) -> dict[str, Any]:
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    state = part.state_dict()
    inner = state.get("optimizer", state)
    groups = copy.deepcopy(
        [{name: value for name, value in group.items() if name != "params"} for group in inner["param_groups"]]
    )
    scaler = {"grad_scaler": state["grad_scaler"]} if "grad_scaler" in state else {}
    if isinstance(part, DistributedOptimizer):
        kind = CONTENT["distrib_optim_sharding_type"]
        return {"optimizer": {"param_groups": groups}, "param_state_sharding_type": kind, **scaler}
    found = {"state": {"common_step": torch.tensor(float(steps_of(part)))}, "param_groups": groups}
    return found if inner is state else {"optimizer": found, **scaler}


def _moments(state: Mapping[str, Any]) -> dict[str, Tensor]:
    return {name: value for name, value in state.items() if name != "step" and isinstance(value, Tensor)}


def _inner(part: Any) -> list[Any]:
    return list(getattr(part.optimizer, "sub_optimizers", [part.optimizer]))
