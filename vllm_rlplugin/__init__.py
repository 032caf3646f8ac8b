"""Everything of rl-coserve that runs inside a vLLM process. Imports neither vLLM nor torch by itself.

Guarantees of the plugin that vLLM loads (entry point ``rl-coserve`` of ``vllm.general_plugins``):

* Idle, it changes nothing: :func:`register` adds one name to the registry of weight-transfer backends, which vLLM looks
  at only when a user selects that backend. No patch is applied, no class replaced, no option changed.
* On a vLLM that was not tested it warns and stays inert; who then asks for it (``EngineWorker``) gets a ConfigError that
  names the tested range. :func:`register` raises nothing, because vLLM would let that break every ``vllm`` command.
"""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass
from typing import Any

from orchestrator.api import ConfigError
from orchestrator.hooks import VLLM, check, find, signature_mismatches

PLUGIN = "rl-coserve"  # the entry point's name, as in VLLM_PLUGINS
BACKEND = "rl_coserve"  # the weight-transfer backend's name, as in --weight-transfer-config
_FACTORY = "vllm.distributed.weight_transfer.factory"

# What we call or extend in vLLM; parameters as in 0.32.0 and 0.33.0.
HOOKS: dict[str, tuple[str, ...]] = {
    "vllm.v1.engine.llm_engine:LLMEngine.from_vllm_config": ("vllm_config", "disable_log_stats"),
    "vllm.v1.engine.llm_engine:LLMEngine.add_request": (
        "self",
        "request_id",
        "prompt",
        "params",
        "arrival_time",
        "priority",
    ),
    "vllm.v1.engine.llm_engine:LLMEngine.abort_request": ("self", "request_ids", "internal"),
    "vllm.v1.engine.llm_engine:LLMEngine.step": ("self",),
    "vllm.v1.engine.llm_engine:LLMEngine.collective_rpc": ("self", "method", "timeout", "args", "kwargs"),
    "vllm.v1.engine.llm_engine:LLMEngine.reset_prefix_cache": ("self", "reset_running_requests", "reset_connector"),
    "vllm.v1.engine.llm_engine:LLMEngine.set_weight_version": ("self", "weight_version"),
    "vllm.v1.engine.core:EngineCore.pause_scheduler": ("self", "mode", "clear_cache"),
    "vllm.v1.engine.core:EngineCore.resume_scheduler": ("self",),
    "vllm.v1.engine.output_processor:RequestState.make_request_output": (
        "self",
        "new_token_ids",
        "pooling_output",
        "finish_reason",
        "stop_reason",
        "kv_transfer_params",
        "ec_transfer_params",
    ),
    "vllm.v1.core.block_pool:BlockPool.get_num_free_blocks": ("self",),
    "vllm.v1.worker.gpu_worker:Worker.init_weight_transfer_engine": ("self", "init_info"),
    "vllm.v1.worker.gpu_worker:Worker.start_weight_update": ("self",),
    "vllm.v1.worker.gpu_worker:Worker.update_weights": ("self", "update_info"),
    "vllm.v1.worker.gpu_worker:Worker.finish_weight_update": ("self",),
    f"{_FACTORY}:WeightTransferEngineFactory.register_engine": ("name", "module_path_or_cls", "class_name"),
    "vllm.distributed.weight_transfer.base:WeightTransferEngine.__init__": (
        "self",
        "config",
        "vllm_config",
        "device",
        "model",
    ),
    "vllm.model_executor.model_loader.reload:initialize_layerwise_reload": ("model",),
    "vllm.model_executor.model_loader.reload:finalize_layerwise_reload": ("args", "kwargs"),
    "vllm.inputs:tokens_input": ("prompt_token_ids",),
}

_logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Process:
    """What happened in this process."""

    entry_point: bool = False  # register() was called, which only vLLM's plugin loader does
    inert: str = ""  # why the plugin stays inert


_process = _Process()


def register() -> None:
    """The entry point. Light, idempotent, never raises on an unknown vLLM."""
    _process.entry_point = True
    try:
        register_backend()
    except ConfigError as error:
        if not _process.inert:
            _logger.warning("rl-coserve stays inert: %s", error)
        _process.inert = str(error)


def register_backend() -> None:
    """Make the backend name known to vLLM. Idempotent. Raises ConfigError on an untested vLLM."""
    check(VLLM)
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, "vllm_rlplugin.weights", "RelayWeightTransferEngine")


def status() -> dict[str, Any]:
    """Which hooks are live in this process, for `rl-coserve doctor`. Plain data, JSON-safe.

    Checks vLLM's signatures only where vLLM is already imported (it takes seconds to import).
    """
    from vllm_rlplugin.patches import REGISTER

    found = find(VLLM)
    imported = _FACTORY in sys.modules
    registered = imported and BACKEND in sys.modules[_FACTORY].WeightTransferEngineFactory._registry
    return {
        "vllm": None if found is None else {"distribution": found[0], "version": found[1]},
        "tested": str(VLLM.tested),
        "inert": _process.inert,
        "entry_point": _process.entry_point,
        "backend_registered": registered,
        "patches": REGISTER.status(),
        "signatures_checked": imported,
        "signature_mismatches": [str(mismatch) for mismatch in signature_mismatches(HOOKS)] if imported else [],
    }
