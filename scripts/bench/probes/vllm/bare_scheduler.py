"""A scheduler of vLLM, stock or with our hooks, without an engine around it: for probes of what a scheduler costs."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

BLOCK = 16  # tokens

Hasher = Callable[..., Any]


def build_scheduler(
    model: Path,
    *,
    requests: int,
    tokens: int,
    length: int,
    blocks: int,
    plugin: dict[str, Any] | None,
    hashing: Callable[[Any], bytes] | None = None,
) -> tuple[Any, Hasher]:
    """For so many requests, tokens per step, tokens of a request and blocks of KV. ``plugin``: our options; None: stock's
    scheduler. ``hashing``: of blocks, vLLM's sha256 by default. The hasher is what its requests need."""
    os.environ["VLLM_ALLOW_LONG_MAX_MODEL_LEN"] = "1"  # no model runs
    import torch
    from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.structured_output import StructuredOutputManager

    from vllm_rlplugin.scheduler import create_scheduler

    config = VllmConfig(
        model_config=ModelConfig(model=str(model), dtype="float32", skip_tokenizer_init=True, max_model_len=length),
        scheduler_config=SchedulerConfig(
            max_num_seqs=requests,
            max_num_batched_tokens=tokens,
            max_model_len=length,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
            policy="fcfs" if plugin is None else "priority",
        ),
        cache_config=CacheConfig(block_size=BLOCK, enable_prefix_caching=True),
        additional_config={"rl_coserve": plugin or {}},
    )
    shape: dict[str, Any] = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": 1, "dtype": torch.float32}
    groups = [KVCacheGroupSpec(["layer"], FullAttentionSpec(**shape))]
    config.cache_config.num_gpu_blocks = blocks
    register_all_kvcache_specs(config)
    init_none_hash(sha256)
    make: Any = Scheduler if plugin is None else create_scheduler
    scheduler: Any = make(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=groups),
        block_size=BLOCK,
        hash_block_size=BLOCK,
        log_stats=False,
        structured_output_manager=StructuredOutputManager(config),
    )
    return scheduler, get_request_block_hasher(BLOCK, hashing or sha256)


def make_request(name: str, prompt: list[int], answer: int, hasher: Hasher) -> Any:
    """vLLM's own; it generates ``answer`` tokens."""
    from vllm.sampling_params import SamplingParams
    from vllm.v1.request import Request

    return Request(
        request_id=name,
        prompt_token_ids=prompt,
        sampling_params=SamplingParams(max_tokens=answer, ignore_eos=True),
        pooling_params=None,
        arrival_time=time.time(),
        block_hasher=hasher,
    )
