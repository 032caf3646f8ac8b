"""Everything of vLLM that we call, extend, read or set: one list, checked on every supported version.

Guarantees: an upgrade that renames, moves or changes one of these fails in the tests (``tests/vllm/test_versions.py``,
for the installed vLLM and for the sources of the other supported one) and in ``rl-coserve doctor``, which name it.

A target is ``"module:qualname"``. Parameters are those that we rely on, in their order; vLLM may add others that have a
default. Attributes are variables of a module, of a class or of its instances.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from orchestrator.api import ConfigError
from orchestrator.hooks.signatures import SourceTree, missing_names, signature_mismatches
from orchestrator.hooks.tested_versions import VLLM, find_version

_ARGS = "vllm.engine.arg_utils"
_CORE = "vllm.v1.engine.core:EngineCore"
_LLM = "vllm.v1.engine.llm_engine:LLMEngine"
_ASYNC = "vllm.v1.engine.async_llm:AsyncLLM"
_OUTPUT = "vllm.v1.engine.output_processor"
_SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"
_QUEUE = "vllm.v1.core.sched.request_queue:PriorityRequestQueue"
_KV = "vllm.v1.core.kv_cache_manager:KVCacheManager"
_POOL = "vllm.v1.core.block_pool:BlockPool"
_WORKER = "vllm.v1.worker.gpu_worker:Worker"
_RANKS = "vllm.v1.executor.multiproc_executor:MultiprocExecutor"
_FACTORY = "vllm.distributed.weight_transfer.factory"
_TRANSFER = "vllm.distributed.weight_transfer.base"
_NCCL = "vllm.distributed.weight_transfer.nccl"
_PACKED = "vllm.distributed.weight_transfer.packed_tensor:packed_nccl_broadcast"
_PYNCCL = "vllm.distributed.device_communicators.pynccl"
_EMBEDDING = "vllm.model_executor.layers.vocab_parallel_embedding"
_ENDPOINTS = "vllm.plugins.endpoint_plugins.interface"
_SLEEP = "vllm.device_allocator"
_CONNECTOR = "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1"

HOOKS: dict[str, tuple[str, ...]] = {
    # The command line and the plugin loader.
    f"{_ARGS}:EngineArgs.add_cli_args": ("parser",),
    f"{_ARGS}:EngineArgs.from_cli_args": ("args",),
    f"{_ARGS}:AsyncEngineArgs.add_cli_args": ("parser", "async_args_only"),
    f"{_ARGS}:EngineArgs.create_engine_config": ("self", "usage_context", "headless"),
    "vllm.plugins:load_general_plugins": (),
    "vllm.plugins:load_endpoint_plugins": ("supported_tasks",),
    "vllm.plugins:load_plugins_by_group": ("group",),
    f"{_ENDPOINTS}:EndpointPlugin.attach_router": ("self", "app"),
    f"{_ENDPOINTS}:EndpointPlugin.init_state": ("self", "engine_client", "state", "args"),
    "vllm.entrypoints.launchers.launcher:setup_server": ("args", "reuse_port"),  # reads args.host and args.uds
    "vllm.utils.argparse_utils:FlexibleArgumentParser.parse_known_args": ("self", "args", "namespace"),
    "vllm.config.scheduler:SchedulerConfig.get_scheduler_cls": ("self",),
    # The engine in this process.
    f"{_LLM}.from_vllm_config": ("vllm_config", "disable_log_stats"),
    f"{_LLM}.add_request": ("self", "request_id", "prompt", "params", "arrival_time", "priority", "session_id"),
    f"{_LLM}.abort_request": ("self", "request_ids", "internal"),
    f"{_LLM}.step": ("self",),
    f"{_LLM}.collective_rpc": ("self", "method", "timeout", "args", "kwargs"),
    f"{_LLM}.reset_prefix_cache": ("self", "reset_running_requests", "reset_connector"),
    f"{_LLM}.set_weight_version": ("self", "weight_version"),
    f"{_CORE}.pause_scheduler": ("self", "mode", "clear_cache"),
    f"{_CORE}.resume_scheduler": ("self",),
    f"{_CORE}.sleep": ("self", "level", "mode"),
    f"{_CORE}.wake_up": ("self", "tags"),
    f"{_CORE}._reset_caches": ("self", "reset_running_requests", "reset_connector"),
    f"{_CORE}Proc._handle_client_request": ("self", "request_type", "request"),
    f"{_CORE}Proc._process_input_queue": ("self",),
    f"{_OUTPUT}:RequestState.make_request_output": (
        "self",
        "new_token_ids",
        "pooling_output",
        "finish_reason",
        "stop_reason",
        "kv_transfer_params",
        "ec_transfer_params",
    ),
    # The engine behind vLLM's HTTP front end.
    f"{_ASYNC}.generate": ("self", "prompt", "sampling_params", "request_id", "priority", "session_id"),
    f"{_ASYNC}.abort": ("self", "request_id", "internal"),
    f"{_ASYNC}.pause_generation": ("self", "mode", "clear_cache"),
    f"{_ASYNC}.resume_generation": ("self",),
    f"{_ASYNC}.is_paused": ("self",),
    f"{_ASYNC}.reset_prefix_cache": ("self", "reset_running_requests", "reset_connector"),
    f"{_ASYNC}.collective_rpc": ("self", "method", "timeout", "args", "kwargs"),
    f"{_ASYNC}.update_weight_version": ("self", "new_version"),
    f"{_ASYNC}.get_weight_version": ("self",),
    f"{_ASYNC}.get_supported_tasks": ("self",),
    f"{_ASYNC}.get_num_unfinished_requests": ("self",),
    "vllm.v1.engine.core_client:AsyncMPClient.call_utility_async": ("self", "method", "args"),
    "vllm.v1.engine.core_client:DPLBAsyncMPClient.call_utility_async": ("self", "method", "args"),
    # The scheduler that ours extends.
    f"{_SCHEDULER}.__init__": (
        "self",
        "vllm_config",
        "kv_cache_config",
        "structured_output_manager",
        "block_size",
        "hash_block_size",
        "mm_registry",
        "include_finished_set",
        "log_stats",
    ),
    f"{_SCHEDULER}.schedule": ("self", "throttle_prefills"),
    f"{_SCHEDULER}.add_request": ("self", "request"),
    f"{_SCHEDULER}.get_grammar_bitmask": ("self", "scheduler_output"),
    f"{_SCHEDULER}.finish_requests": ("self", "request_ids", "finished_status"),
    f"{_SCHEDULER}.update_from_output": ("self", "scheduler_output", "model_runner_output"),
    f"{_SCHEDULER}.shutdown": ("self",),
    f"{_SCHEDULER}._preempt_request": ("self", "request", "timestamp", "drop_stale_output"),
    f"{_SCHEDULER}._free_request": ("self", "request", "delay_free_blocks"),
    f"{_SCHEDULER}.reset_prefix_cache": ("self", "reset_running_requests", "reset_connector"),
    f"{_SCHEDULER}.set_pause_state": ("self", "pause_state"),
    f"{_SCHEDULER}.make_stats": ("self", "spec_decoding_stats", "kv_connector_stats", "cudagraph_stats", "perf_stats"),
    f"{_SCHEDULER}.get_request_counts": ("self",),
    f"{_SCHEDULER}._request_remaining_blocks": ("self", "request"),
    f"{_SCHEDULER}._enqueue_waiting_request": ("self", "request"),
    f"{_SCHEDULER}.reset_connector_cache": ("self",),
    f"{_SCHEDULER}.reset_encoder_cache": ("self",),
    "vllm.v1.core.sched.async_scheduler:AsyncScheduler._update_after_schedule": ("self", "scheduler_output"),
    f"{_QUEUE}.add_request": ("self", "request"),
    f"{_QUEUE}.remove_request": ("self", "request"),
    f"{_QUEUE}.remove_requests": ("self", "requests"),
    f"{_QUEUE}.peek_request": ("self",),
    f"{_QUEUE}.prepend_request": ("self", "request"),
    f"{_QUEUE}.__iter__": ("self",),
    f"{_QUEUE}.__len__": ("self",),
    f"{_QUEUE}.__bool__": ("self",),
    "vllm.v1.request:Request.__lt__": ("self", "other"),
    "vllm.v1.request:Request.is_finished": ("self",),
    "vllm.v1.request:Request.update_block_hashes": ("self",),
    f"{_KV}.prefix_cache_lookup_enabled": ("self", "request"),
    f"{_KV}.get_computed_blocks": ("self", "request"),
    f"{_KV}.get_blocks": ("self", "request_id"),
    f"{_POOL}.get_num_free_blocks": ("self",),
    f"{_POOL}._maybe_evict_cached_block": ("self", "block"),
    "vllm.v1.core.kv_cache_utils:FreeKVCacheBlockQueue.remove": ("self", "block"),
    "vllm.v1.core.kv_cache_utils:FreeKVCacheBlockQueue.append_n": ("self", "blocks"),
    # The KV cache of an engine in a pool.
    "vllm.v1.worker.utils:allocate_kv_cache": ("kv_cache_config", "device", "layout", "kernel_block_sizes"),
    "vllm.config:get_current_vllm_config": (),
    f"{_RANKS}.initialize_from_config": ("self", "kv_cache_configs"),
    f"{_RANKS}.collective_rpc": ("self", "method", "timeout", "args", "kwargs"),
    # KV that comes from other engines.
    f"{_CONNECTOR}.__init__": ("self", "vllm_config", "role", "kv_cache_config"),
    f"{_CONNECTOR}.get_num_new_matched_tokens": ("self", "request", "num_computed_tokens"),
    f"{_CONNECTOR}.update_state_after_alloc": ("self", "request", "blocks", "num_external_tokens"),
    f"{_CONNECTOR}.build_connector_meta": ("self", "scheduler_output"),
    f"{_CONNECTOR}.update_connector_output": ("self", "connector_output"),
    f"{_CONNECTOR}.reset_cache": ("self",),
    f"{_CONNECTOR}.register_kv_caches": ("self", "kv_caches"),
    f"{_CONNECTOR}.start_load_kv": ("self", "forward_context"),
    f"{_CONNECTOR}.get_block_ids_with_load_errors": ("self",),
    f"{_CONNECTOR}.wait_for_layer_load": ("self", "layer_name"),
    f"{_CONNECTOR}.save_kv_layer": ("self", "layer_name", "kv_layer", "attn_metadata"),
    f"{_CONNECTOR}.wait_for_save": ("self",),
    "vllm.distributed.kv_transfer.kv_transfer_state:get_kv_transfer_group": (),
    "vllm.v1.core.kv_cache_utils:get_request_block_hasher": ("hash_block_size", "caching_hash_fn"),
    "vllm.utils.hashing:get_hash_fn_by_name": ("hash_fn_name",),
    f"{_POOL}.get_cached_block": ("self", "block_hash", "kv_cache_group_ids"),
    "vllm.v1.request:Request.__init__": (
        "self",
        "request_id",
        "prompt_token_ids",
        "sampling_params",
        "pooling_params",
        "cache_salt",
        "block_hasher",
    ),
    "vllm.v1.core.kv_cache_manager:KVCacheBlocks.get_block_ids": ("self",),
    "vllm.config.model:ModelConfig.get_total_num_kv_heads": ("self",),
    # Weights that leave a CUDA device.
    f"{_WORKER}.sleep": ("self", "level"),
    f"{_WORKER}.wake_up": ("self", "tags"),
    f"{_WORKER}.get_draft_model": ("self",),
    f"{_SLEEP}.sleep_mode_backend:CuMemBackend.suspend": ("self", "level"),
    f"{_SLEEP}.sleep_mode_backend:CuMemBackend.resume": ("self", "tags"),
    f"{_SLEEP}.cumem:CuMemAllocator.sleep": ("self", "offload_tags"),
    f"{_SLEEP}.cumem:CuMemAllocator.wake_up": ("self", "tags"),
    f"{_SLEEP}.cumem:unmap_and_release": ("allocation_handle",),
    f"{_SLEEP}.cumem:create_and_map": ("allocation_handle",),
    f"{_SLEEP}.alloc_conf:expandable_segments_enabled_from_env": ("environ",),
    # Weights.
    f"{_WORKER}.init_weight_transfer_engine": ("self", "init_info"),
    f"{_WORKER}.shutdown_weight_transfer_engine": ("self",),
    f"{_WORKER}.compute_weight_checksums": ("self",),
    f"{_WORKER}.start_weight_update": ("self",),
    f"{_WORKER}.update_weights": ("self", "update_info"),
    f"{_WORKER}.finish_weight_update": ("self",),
    f"{_FACTORY}:WeightTransferEngineFactory.register_engine": ("name", "module_path_or_cls", "class_name"),
    f"{_TRANSFER}:WeightTransferEngine.__init__": ("self", "config", "vllm_config", "device", "model"),
    "vllm.v1.worker.worker_base:get_supported_kv_cache_layouts": ("backends",),
    "vllm.model_executor.model_loader.reload:initialize_layerwise_reload": ("model",),
    "vllm.model_executor.model_loader.reload:finalize_layerwise_reload": ("args", "kwargs"),
    "vllm.model_executor.model_loader.reload.layerwise:get_layerwise_info": ("layer",),
    "vllm.model_executor.layers.utils:dispatch_cpu_unquantized_gemm": ("layer", "remove_weight"),
    "vllm.model_executor.layers.linear:UnquantizedLinearMethod.process_weights_after_loading": ("self", "layer"),
    f"{_EMBEDDING}:UnquantizedEmbeddingMethod.process_weights_after_loading": ("self", "layer"),
    "vllm.inputs:tokens_input": ("prompt_token_ids",),
    # Weights by NCCL, on CUDA only; the first and the second also in the trainer's process.
    f"{_NCCL}_common:uid_init_process_group": ("nccl_unique_id_bytes", "rank", "world_size", "device"),
    f"{_PACKED}_producer": ("iterator", "group", "src", "post_iter_func", "buffer_size_bytes", "num_buffers"),
    f"{_PACKED}_consumer": (
        "iterator",
        "group",
        "src",
        "post_unpack_func",
        "buffer_size_bytes",
        "num_buffers",
        "device",
    ),
    # The same by vLLM's own engines; the first three in the trainer's process.
    f"{_NCCL}_engine:NCCLTrainerWeightTransferEngine.__init__": (
        "self",
        "client",
        "source",
        "is_sender",
        "packed",
        "packed_buffer_size_bytes",
        "packed_num_buffers",
    ),
    f"{_NCCL}_engine:NCCLTrainerWeightTransferEngine.send_weights": ("self",),
    f"{_NCCL}_engine:NCCLTrainerWeightTransferEngine.shutdown": ("self",),
    f"{_FACTORY}:WeightTransferEngineFactory.create_engine": ("config", "vllm_config", "device", "model"),
    f"{_TRANSFER}:WeightTransferEngine.parse_init_info": ("self", "init_dict"),
    f"{_TRANSFER}:WeightTransferEngine.update_weights": ("self", "update_info"),
    f"{_NCCL}_engine:NCCLWeightTransferEngine.init_transfer_engine": ("self", "init_info"),
    f"{_PYNCCL}:PyNcclCommunicator.broadcast": ("self", "tensor", "src", "stream"),
    f"{_PYNCCL}:PyNcclCommunicator.destroy": ("self",),
    f"{_PYNCCL}_wrapper:NCCLLibrary.ncclGetUniqueId": ("self",),
}

_ENGINE_ARGUMENTS = (
    "scheduler_cls",
    "scheduling_policy",
    "worker_extension_cls",
    "weight_transfer_config",
    "additional_config",
    "logprobs_mode",
    "kv_transfer_config",
    "enable_sleep_mode",
)
ATTRIBUTES: dict[str, tuple[str, ...]] = {
    f"{_ARGS}:EngineArgs": _ENGINE_ARGUMENTS,
    "vllm.config:WeightTransferConfig": ("backend",),
    "vllm.config.model:ModelConfig": ("quantization", "quantization_config"),
    "vllm.model_executor.layers.quantization.base_config:QuantizeMethodBase": ("uses_meta_device",),
    "vllm.model_executor.layers.fused_moe.fused_moe_method_base:FusedMoEMethodBase": ("moe_kernel", "moe_quant_config"),
    "vllm.config:KVTransferConfig": (
        "kv_connector",
        "kv_connector_module_path",
        "kv_role",
        "kv_load_failure_policy",
        "kv_connector_extra_config",
    ),
    f"{_ENDPOINTS}:EndpointPlugin": ("name", "required_tasks"),
    f"{_FACTORY}:WeightTransferEngineFactory": ("_registry",),
    _LLM: ("engine_core", "output_processor", "model_config"),
    f"{_OUTPUT}:OutputProcessor": ("request_states", "parent_requests"),
    _ASYNC: ("engine_core", "output_handler", "errored", "vllm_config"),
    _CORE: ("scheduler", "batch_queue", "model_executor", "vllm_config"),
    _SCHEDULER: (
        "running",
        "waiting",
        "kv_holding_waiting",
        "requests",
        "prev_step_scheduled_req_ids",
        "finished_recving_kv_req_ids",
        "max_num_active_reqs",
        "max_num_running_reqs",
        "max_num_scheduled_tokens",
        "num_waiting_for_streaming_input",
        "requires_kv_delivery",
        "prefill_capacity_bound",
        "pause_state",
        "current_step",
        "kv_cache_manager",
        "block_size",
        "num_lookahead_tokens",
        "deferred_frees",
        "scheduler_reserve_full_isl",
        "aux_output_connector",
        "connector",
        "hash_block_size",
        "vllm_config",
    ),
    _QUEUE: ("_heap",),
    _KV: ("block_pool", "watermark_blocks", "enable_kv_cache_events", "num_kv_cache_groups"),
    "vllm.v1.core.kv_cache_manager:KVCacheBlocks": ("blocks",),
    "vllm.v1.core.kv_cache_utils:KVCacheBlock": ("block_id", "ref_cnt", "is_null"),
    _POOL: ("num_gpu_blocks", "blocks", "free_block_queue"),
    "vllm.v1.worker.gpu.block_table:BlockTables": ("redirect_writes_to_null_block",),
    "vllm.config:CacheConfig": ("num_gpu_blocks",),
    "vllm.v1.kv_cache_interface:KVCacheTensor": ("size", "layers", "layer_stride", "block_stride", "offset"),
    "vllm.v1.core.sched.interface:PauseState": ("UNPAUSED",),
    "vllm.v1.request:RequestStatus": (
        "WAITING",
        "RUNNING",
        "PREEMPTED",
        "WAITING_FOR_REMOTE_KVS",
        "WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR",
        "FINISHED_ABORTED",
    ),
    "vllm.v1.request:Request": (
        "request_id",
        "session_id",
        "priority",
        "arrival_time",
        "status",
        "cache_salt",
        "block_hashes",
        "num_computed_tokens",
        "num_tokens",
        "num_tokens_with_spec",
        "num_output_tokens",
        "num_output_placeholders",
        "num_stale_output_tokens",
        "num_preemptions",
        "drop_stale_output",
        "kv_cache_report_mode",
        "structured_output_request",
        "client_index",
        "is_finished",
    ),
    "vllm.v1.engine:EngineCoreOutput": ("request_id", "new_token_ids", "finish_reason"),
    "vllm.v1.engine:EngineCoreOutputs": ("outputs",),
    "vllm.v1.engine:FinishReason": ("ABORT",),
    "vllm.v1.core.sched.output:SchedulerOutput": (
        "scheduled_new_reqs",
        "scheduled_cached_reqs",
        "total_num_scheduled_tokens",
        "num_scheduled_tokens",
    ),
    "vllm.v1.core.sched.output:NewRequestData": ("req_id", "num_computed_tokens"),
    "vllm.v1.core.sched.output:CachedRequestData": ("req_ids", "resumed_req_ids", "num_computed_tokens"),
    "vllm.config:SchedulerConfig": ("async_scheduling", "policy", "max_num_seqs", "enable_chunked_prefill"),
    "vllm.config:ModelConfig": (
        "model",
        "dtype",
        "max_model_len",
        "logprobs_mode",
        "get_vocab_size",
        "enable_sleep_mode",
        "sleep_mode_backend",
    ),
    "vllm.config:VllmConfig": ("aux_output_config",),
    "vllm.config.aux_output:AuxOutputConfig": ("enable_return_routed_experts",),
    "vllm.config:ParallelConfig": ("rank", "world_size", "data_parallel_size"),
    _WORKER: ("_weight_update_active", "sleep_mode_backend"),
    f"{_SLEEP}:AllocationData": ("handle", "tag", "is_asleep"),
    f"{_SLEEP}.cumem:CuMemAllocator": ("instance", "pointer_to_data"),
    "vllm.distributed.parallel_state": ("get_tp_group", "get_pp_group", "get_pcp_group"),
    "vllm.exceptions:GracefulHTTPError": ("http_status",),
    "vllm.outputs:CompletionOutput": ("token_ids", "logprobs", "finish_reason", "weight_versions", "routed_experts"),
}


_in_source: dict[str, bool] = {}  # attributes that were looked for in the sources; of this process


@functools.cache
def attribute_targets() -> tuple[str, ...]:
    """Every attribute as a target."""
    return tuple(
        f"{owner}.{name}" if ":" in owner else f"{owner}:{name}"  # a variable of a class, of a module
        for owner, attributes in ATTRIBUTES.items()
        for name in attributes
    )


def check_loaded() -> tuple[int, tuple[str, ...]]:
    """(how many hooks were checked, what differs), of those vLLM modules that this process has imported.

    They are the ones it uses, so nothing more is imported. Costs some 10 ms, and the first time what it takes to read their
    sources: 0.7 s for all of them. A server does that before it serves (:func:`require_loaded`), as its event loop waits.
    """
    hooks = {target: expected for target, expected in HOOKS.items() if _is_loaded(target)}
    attributes = [target for target in attribute_targets() if _is_loaded(target)]
    return len(hooks) + len(attributes), _differing(hooks, attributes)


def check_all() -> tuple[str, ...]:
    """What differs of all hooks. Imports the modules they are in, those of vLLM's worker included."""
    return _differing(HOOKS, attribute_targets())


def require_loaded() -> None:
    """Raises ConfigError that names every hook of :func:`check_loaded` which differs."""
    _, differing = check_loaded()
    if differing:
        version = (find_version(VLLM) or ("", "unknown"))[1]
        raise ConfigError("vLLM", version, "hooks changed:\n  " + "\n  ".join(differing))


def _differing(hooks: Mapping[str, tuple[str, ...]], attributes: Iterable[str]) -> tuple[str, ...]:
    found = [str(mismatch) for mismatch in signature_mismatches(hooks)]
    if "vllm" in sys.modules:  # variables of instances are nowhere to be seen but in the source
        found += [f"{target}: nothing there" for target in _not_in_source(tuple(attributes))]
    return tuple(found)


def _not_in_source(targets: tuple[str, ...]) -> list[str]:
    """Each source is read once a process: what it has imported does not change with the file."""
    if new := [target for target in targets if target not in _in_source]:
        sources = SourceTree.installed(Path(str(sys.modules["vllm"].__file__)).parent.parent)
        missing = set(missing_names(new, sources))
        _in_source.update((target, target not in missing) for target in new)
    return [target for target in targets if not _in_source[target]]


def _is_loaded(target: str) -> bool:
    return target.partition(":")[0] in sys.modules
