"""Which Megatron configurations may be streamed, and which ranks must stream together.

Guarantees: a configuration in which gradients that are summed over several calls would not be those of one call is refused
with a ConfigError that names the setting, before anything is changed. Each refusal says what would go wrong.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from megatron_rlplugin.parallel_layout import ParallelLayout
from megatron_rlplugin.trainer.gradient_buffers import grad_buffers
from orchestrator.api import ConfigError


def stream_units(layout: ParallelLayout, world_size: int) -> list[tuple[int, ...]]:
    """The ranks that must train at the same time, unit by unit: those that share a TP, PP, CP or EP group.

    A unit may train while others still roll out; its groups communicate in forward and backward, so none may be missing.
    With experts a unit is one expert-data-parallel replica, which spans several dense replicas. Ranks are Megatron's
    default order (tp-cp-ep-dp-pp, ``parallel_state.RankGenerator``). Raises ConfigError when the layout does not fit.
    """
    layout.data_parallel_size(world_size)
    stage = world_size // layout.pipeline  # ranks of one pipeline stage; the same place in each stage is one pipeline
    block = math.lcm(layout.tensor * layout.context, layout.tensor * layout.expert)
    return [
        tuple(first + rank + number * stage for number in range(layout.pipeline) for rank in range(block))
        for first in range(0, stage, block)
    ]


def check_streamable(chunks: Sequence[Any], optimizer: Any, *, elastic: bool) -> None:
    """Raises ConfigError for a configuration in which streaming would be wrong, or was never shown to be right."""
    from megatron.core.distributed import DistributedDataParallel

    if not chunks:
        raise ConfigError("model", [], "must hold this rank's model chunks")
    for chunk in chunks:
        if getattr(getattr(chunk, "ddp_config", None), "use_megatron_fsdp", False):
            raise ConfigError("ddp.use_megatron_fsdp", True, "must be off: FSDP reduces gradients in every backward")
        if not isinstance(chunk, DistributedDataParallel):
            fix = "must be chunks of Megatron-Core's DistributedDataParallel"
            raise ConfigError("model", type(chunk).__name__, fix)
        _check_ddp(chunk.ddp_config)
        _check_config(chunk.config, elastic)
    for buffer in grad_buffers(chunks):
        if buffer.grad_data.dtype is not torch.float32:
            # Sums in bf16 depend on the order of the micro-batches in the second digit (2e-2 of the weights, measured).
            raise ConfigError("ddp.grad_reduce_in_fp32", False, "must be true: gradients must be summed in fp32")
        if getattr(buffer, "shared_buffer", None) is not None:
            raise ConfigError(
                "ddp.fp8_param_gather", True, "must be off with MXFP8: gradients share memory with weights"
            )
    if optimizer is not None:
        _check_optimizer(optimizer.config)


def check_movable(chunks: Sequence[Any]) -> None:
    """Raises ConfigError where gradients may not leave the device between the parts of a step."""
    for chunk in chunks:
        graphs = getattr(chunk.config, "cuda_graph_impl", "none")
        if str(graphs) != "none" or getattr(chunk.config, "enable_cuda_graph", False):
            fix = "must be none if gradients are offloaded: a captured graph writes them to their old address"
            raise ConfigError("model.cuda_graph_impl", graphs, fix)


def _check_ddp(ddp: Any) -> None:
    for name, why in {
        "average_in_collective": "the replicas' shares differ, so their mean is not the batch's",
        "reuse_grad_buf_for_mxfp8_param_ag": "gradients would share memory with gathered weights",
    }.items():
        if getattr(ddp, name, False):
            raise ConfigError(f"ddp.{name}", True, f"must be off: {why}")
    instances = getattr(ddp, "num_distributed_optimizer_instances", 1)
    if instances > 1 and ddp.overlap_grad_reduce:
        fix = "must be 1 with overlap_grad_reduce: the end of the step would reduce twice between instances"
        raise ConfigError("ddp.num_distributed_optimizer_instances", instances, fix)


def _check_config(config: Any, elastic: bool) -> None:
    for name, why in {
        "defer_embedding_wgrad_compute": "the embedding's gradient is computed only where a call synchronises",
        "hybrid_context_parallel": "its schedule waits for all data-parallel replicas in every call",
        "fp16": "its loss scale may change during a step; use bf16",
    }.items():
        if getattr(config, name, False):
            raise ConfigError(f"model.{name}", True, f"must be off: {why}")
    scopes = getattr(config, "cuda_graph_scope", None) or []
    graphs = [getattr(config, "cuda_graph_impl", "none"), *(scopes if isinstance(scopes, list) else [scopes])]
    if any("full_iteration" in str(getattr(scope, "name", scope)) for scope in graphs):
        raise ConfigError(
            "model.cuda_graph_scope", "full_iteration", "must be off: the graph holds the synchronisation"
        )
    balancing = getattr(config, "moe_router_load_balancing_type", "none")
    kinds = balancing if isinstance(balancing, list) else [balancing]
    experts = getattr(config, "num_moe_experts", None) is not None
    if elastic and experts and "global_aux_loss" in kinds:
        fix = "must be a different one: it reduces over all replicas in every forward, so none can train alone"
        raise ConfigError("model.moe_router_load_balancing_type", balancing, fix)
    recipe = getattr(config, "fp8_recipe", None)
    if elastic and getattr(config, "fp8", None) and str(recipe).endswith("delayed"):
        fix = "must be a different one: its scales are reduced over all replicas in every forward, so none can train alone"
        raise ConfigError("model.fp8_recipe", recipe, fix)
    if not config.calculate_per_token_loss:
        coefficient = getattr(config, "moe_aux_loss_coeff", 0.0) or 0.0
        used = any(coefficient) if isinstance(coefficient, list) else bool(coefficient)
        auxiliary = experts and ((used and kinds != ["none"]) or bool(getattr(config, "moe_z_loss_coeff", None)))
        if auxiliary or getattr(config, "mtp_num_layers", None):
            fix = "must be true when the model is built: its auxiliary losses are divided by micro-batches otherwise"
            raise ConfigError("model.calculate_per_token_loss", False, fix)


def _check_optimizer(config: Any) -> None:
    for name, why in {
        "fp16": "its loss scale may change during a step; use bf16",
        "overlap_param_gather_with_optimizer_step": "a step that is not taken would have sent weights already",
    }.items():
        if getattr(config, name, False):
            raise ConfigError(f"optimizer.{name}", True, f"must be off: {why}")
