"""The points of stock Megatron-Core that this plugin uses, and whether they look as they did when they were tested.

Guarantees: :func:`require_megatron` refuses a Megatron-Core that was not tested, and one whose interfaces moved, with a
ConfigError that names the tested range; nothing is changed in the engine. One table holds for all tested versions:
parameters that a version added have a default, attributes have the same names.
"""

from __future__ import annotations

import importlib.util
import warnings
from pathlib import Path
from typing import Any

from megatron_rlplugin import cpu
from orchestrator.api import ConfigError
from orchestrator.hooks.signatures import SourceTree, missing_names, signature_mismatches
from orchestrator.hooks.tested_versions import MEGATRON_CORE, check_version, find_version

_CORE = "megatron.core."
_SCHEDULE = (
    "forward_step_func",
    "data_iterator",
    "model",
    "num_microbatches",
    "seq_length",
    "micro_batch_size",
    "forward_only",
    "collect_non_loss_data",
)
_DDP = f"{_CORE}distributed.distributed_data_parallel:DistributedDataParallel."
_OPTIMIZER = f"{_CORE}optimizer.optimizer:ChainedOptimizer."
_TORCH_DIST = f"{_CORE}dist_checkpointing.strategies."
_ROUTER = f"{_CORE}transformer.moe.router:TopKRouter."
_DISTRIBUTED_OPTIMIZER = f"{_CORE}optimizer.distrib_optimizer:DistributedOptimizer."

# "module:qualname" -> the parameters that we pass (or rely on by position).
HOOK_POINTS: dict[str, tuple[str, ...]] = {
    f"{_CORE}parallel_state:initialize_model_parallel": (
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
        "virtual_pipeline_model_parallel_size",
        "context_parallel_size",
        "expert_model_parallel_size",
        "create_gloo_process_groups",
    ),
    f"{_CORE}parallel_state:is_pipeline_first_stage": ("ignore_virtual", "vp_stage"),
    f"{_CORE}parallel_state:is_pipeline_last_stage": ("ignore_virtual", "vp_stage"),
    f"{_CORE}models.gpt.gpt_layer_specs:get_gpt_layer_local_spec": (
        "num_experts",
        "moe_grouped_gemm",
        "qk_layernorm",
        "normalization",
    ),
    f"{_CORE}transformer.transformer_block:get_num_layers_to_build": ("config", "vp_stage"),
    f"{_CORE}models.gpt:GPTModel": (
        "config",
        "transformer_layer_spec",
        "vocab_size",
        "max_sequence_length",
        "pre_process",
        "post_process",
        "parallel_output",
        "share_embeddings_and_output_weights",
        "position_embedding_type",
        "rotary_base",
        "vp_stage",
    ),
    f"{_CORE}models.gpt:GPTModel.forward": ("self", "input_ids", "position_ids", "attention_mask", "labels"),
    # Replaced on objects: under another name it would be stock's that runs.
    f"{_CORE}models.gpt:GPTModel._postprocess": (
        "self",
        "hidden_states",
        "input_ids",
        "position_ids",
        "labels",
        "rotary_pos_emb",
        "rotary_pos_cos",
        "rotary_pos_sin",
        "attention_mask",
        "packed_seq_params",
        "sequence_len_offset",
        "extra_block_kwargs",
    ),
    f"{_ROUTER}_apply_expert_bias": ("self", "routing_map", "padding_mask"),
    f"{_ROUTER}apply_z_loss": ("self", "logits", "padding_mask"),
    f"{_ROUTER}attach_and_log_load_balancing_loss": (
        "self",
        "activation",
        "aux_loss_coeff",
        "aux_loss",
        "aux_loss_name",
        "reduce_group",
    ),
    f"{_CORE}transformer.moe.router_replay:RouterReplay.get_replay_topk": (
        "self",
        "scores",
        "topk",
        "num_groups",
        "group_topk",
        "default_compute_topk",
    ),
    f"{_DDP}zero_grad_buffer": ("self",),
    f"{_DDP}no_sync": ("self",),
    f"{_DDP}start_grad_sync": ("self",),
    f"{_DDP}scale_gradients": ("self", "scaling_factor"),
    f"{_DDP}start_param_sync": ("self", "force_sync"),
    f"{_DDP}disable_forward_pre_hook": ("self", "param_sync"),
    f"{_CORE}distributed:finalize_model_grads": ("model", "num_tokens"),
    f"{_CORE}distributed.finalize_model_grads:reset_model_temporary_tensors": ("config", "model"),
    f"{_CORE}pipeline_parallel:get_forward_backward_func": (),
    f"{_CORE}pipeline_parallel.schedules:forward_backward_no_pipelining": _SCHEDULE,
    f"{_CORE}pipeline_parallel.schedules:forward_backward_pipelining_with_interleaving": _SCHEDULE,
    f"{_CORE}pipeline_parallel.schedules:forward_backward_pipelining_without_interleaving": _SCHEDULE,
    f"{_CORE}optimizer:get_megatron_optimizer": ("config", "model_chunks", "use_gloo_process_groups"),
    f"{_OPTIMIZER}prepare_grads": ("self",),
    f"{_OPTIMIZER}get_grad_norm": ("self",),
    f"{_OPTIMIZER}step": ("self",),
    f"{_OPTIMIZER}zero_grad": ("self",),
    f"{_DISTRIBUTED_OPTIMIZER}_get_model_param_range_map": ("self", "param"),
    f"{_DISTRIBUTED_OPTIMIZER}_copy_main_params_to_model_params": ("self",),
    f"{_DISTRIBUTED_OPTIMIZER}_get_main_param_and_optimizer_states": ("self", "model_param"),
    f"{_DISTRIBUTED_OPTIMIZER}_set_main_param_and_optimizer_states": ("self", "model_param", "tensors"),
    f"{_CORE}dist_checkpointing:save": (
        "sharded_state_dict",
        "checkpoint_dir",
        "sharded_strategy",
        "async_sharded_save",
        "content_metadata",
    ),
    f"{_CORE}dist_checkpointing:load": ("sharded_state_dict", "checkpoint_dir", "validate_access_integrity"),
    f"{_TORCH_DIST}filesystem_async:FileSystemWriterAsync.write_preloaded_data": (
        "transform_list",
        "local_proc_idx",
        "write_bucket",
        "results_queue",
        "count_queue",
        "use_fsync",
    ),
    f"{_CORE}optimizer_param_scheduler:OptimizerParamScheduler.step": ("self", "increment"),
}
# Attributes that we read or set, looked up in the sources: nothing has to be built.
ATTRIBUTES: tuple[str, ...] = (
    *(
        f"{_DDP}{name}"
        for name in ("buffers", "expert_parallel_buffers", "bucket_groups", "expert_parallel_bucket_groups")
    ),
    f"{_DDP}use_forward_hook",
    f"{_DDP}remove_forward_pre_hook_handles",
    f"{_CORE}distributed.param_and_grad_buffer:_ParamAndGradBuffer.grad_data",
    f"{_CORE}distributed.param_and_grad_buffer:_ParamAndGradBucketGroup.buckets",
    f"{_CORE}distributed.param_and_grad_buffer:_ParamAndGradBucketGroup.grad_reduce_handle",
    f"{_CORE}distributed.param_and_grad_buffer:_ParamAndGradBucket.gradient_scaling_factor",
    *(
        f"{_CORE}model_parallel_config:ModelParallelConfig.{name}_func"
        for name in ("finalize_model_grads", "no_sync", "grad_sync", "param_sync")
    ),
    f"{_CORE}transformer.transformer_config:TransformerConfig.calculate_per_token_loss",
    *(
        f"{_CORE}distributed.distributed_data_parallel_config:DistributedDataParallelConfig.{name}"
        for name in ("grad_reduce_in_fp32", "overlap_grad_reduce", "average_in_collective", "use_distributed_optimizer")
    ),
    *(
        f"{_DISTRIBUTED_OPTIMIZER}{name}"
        for name in ("shard_fp32_from_float16_groups", "model_float16_groups", "model_fp32_groups", "gbuf_ranges")
    ),
    f"{_TORCH_DIST}torch:TorchDistSaveShardedStrategy._get_save_and_finalize_callbacks",  # 0.19.2: one argument more
    f"{_CORE}transformer.transformer_layer:TransformerLayer.layer_number",
    *(
        f"{_CORE}models.gpt.gpt_model:GPTModel.{name}"
        for name in ("share_embeddings_and_output_weights", "output_layer", "mtp_process")
    ),
    *(
        f"{_ROUTER}{name}"
        for name in ("router_replay", "calculate_per_token_loss", "expert_bias", "local_tokens_per_expert")
    ),
    f"{_CORE}process_groups_config:ProcessGroupCollection.tp_ep_pp",
)


_in_source: dict[str, bool] = {}  # attributes that were looked for in the sources; of this process


def hook_mismatches() -> tuple[str, ...]:
    """Every hook point that differs from what was tested, in words; empty when all is well. Sources are read once a process."""
    if new := [target for target in ATTRIBUTES if target not in _in_source]:
        spec = importlib.util.find_spec("megatron.core")
        assert spec is not None, "callers look for Megatron-Core first"
        assert spec.origin is not None, "it is a package with an __init__.py"
        gone = missing_names(new, SourceTree.installed(Path(spec.origin).parents[2]))
        _in_source.update((target, target not in gone) for target in new)
    moved = (f"{target}: nothing there" for target in ATTRIBUTES if not _in_source[target])
    return (*(str(mismatch) for mismatch in signature_mismatches(HOOK_POINTS)), *moved)


def require_megatron() -> str:
    """The installed Megatron-Core version. Raises ConfigError when it is not a tested one, or its interfaces moved."""
    version = check_version(MEGATRON_CORE).version
    with warnings.catch_warnings():
        if cpu.needed():  # a dozen times that the GPU kernels of Apex and Transformer Engine are not there
            warnings.filterwarnings("ignore", message=".*Apex (is|are) not installed")
        mismatches = hook_mismatches()
    if mismatches:
        fix = f"its interfaces are not those of {MEGATRON_CORE.tested}: {'; '.join(mismatches)}"
        raise ConfigError(MEGATRON_CORE.name, version, fix)
    return version


def engine_status() -> dict[str, Any]:
    """For ``rl-coserve doctor``: version, tested range, hook points."""
    found = find_version(MEGATRON_CORE)
    return {
        "megatron_core": found[1] if found else "not installed",
        "tested": str(MEGATRON_CORE.tested),
        "tested_how": MEGATRON_CORE.how,
        "hook_points": len(HOOK_POINTS) + len(ATTRIBUTES),
        "hook_mismatches": list(hook_mismatches()) if found else ["Megatron-Core is not installed"],
    }
