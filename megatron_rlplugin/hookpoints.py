"""The points of stock Megatron-Core that this plugin calls, and whether they look as they did when they were tested.

Guarantees: :func:`require_megatron` refuses a Megatron-Core that was not tested, and one whose interfaces moved, with a
ConfigError that names the tested range; nothing is changed in the engine.
"""

from __future__ import annotations

import warnings
from typing import Any

from megatron_rlplugin import cpu
from orchestrator.api import ConfigError
from orchestrator.hooks import MEGATRON_CORE, check, find, signature_mismatches

# "module:qualname" -> the parameters that we pass (or rely on by position).
HOOK_POINTS: dict[str, tuple[str, ...]] = {
    "megatron.core.parallel_state:initialize_model_parallel": ("tensor_model_parallel_size",),
    "megatron.core.models.gpt.gpt_layer_specs:get_gpt_layer_local_spec": ("qk_layernorm", "normalization"),
    "megatron.core.models.gpt:GPTModel.forward": ("self", "input_ids", "position_ids", "attention_mask"),
    "megatron.core.distributed:DistributedDataParallel.zero_grad_buffer": ("self",),
    "megatron.core.distributed:DistributedDataParallel.no_sync": ("self",),
    "megatron.core.distributed:finalize_model_grads": ("model", "num_tokens"),
    "megatron.core.pipeline_parallel.schedules:forward_backward_no_pipelining": (
        "forward_step_func",
        "data_iterator",
        "model",
        "num_microbatches",
        "seq_length",
        "micro_batch_size",
        "forward_only",
        "collect_non_loss_data",
    ),
    "megatron.core.optimizer:get_megatron_optimizer": ("config", "model_chunks"),
    "megatron.core.optimizer.optimizer:ChainedOptimizer.prepare_grads": ("self",),
    "megatron.core.optimizer.optimizer:ChainedOptimizer.get_grad_norm": ("self",),
    "megatron.core.optimizer.optimizer:ChainedOptimizer.step": ("self",),
    "megatron.core.optimizer_param_scheduler:OptimizerParamScheduler.step": ("self", "increment"),
}


def hook_mismatches() -> tuple[str, ...]:
    """Every hook point that differs from what was tested, in words; empty when all is well."""
    return tuple(str(mismatch) for mismatch in signature_mismatches(HOOK_POINTS))


def require_megatron() -> str:
    """The installed Megatron-Core version. Raises ConfigError when it is not a tested one, or its interfaces moved."""
    version = check(MEGATRON_CORE).version
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
    found = find(MEGATRON_CORE)
    return {
        "megatron_core": found[1] if found else "not installed",
        "tested": str(MEGATRON_CORE.tested),
        "tested_how": MEGATRON_CORE.how,
        "hook_points": len(HOOK_POINTS),
        "hook_mismatches": list(hook_mismatches()) if found else ["Megatron-Core is not installed"],
    }
