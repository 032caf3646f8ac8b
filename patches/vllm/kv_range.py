"""The KV cache's memory from a device's pool instead of ``torch.zeros``, all layers of a block together where that can be."""

from __future__ import annotations

import functools
import sys
from typing import Any

from orchestrator.hooks.patch_register import Patch
from orchestrator.hooks.tested_versions import VersionRange

_MODULES = ("vllm.v1.worker.gpu_model_runner", "vllm.v1.worker.gpu.attn_utils")
_MARK = "_rl_coserve_pool"


def _apply() -> None:
    import importlib

    from vllm.v1.worker import utils
    from vllm_rlplugin.kvpool.engine import pool_engine

    stock = utils.allocate_kv_cache

    @functools.wraps(stock)
    def allocate_kv_cache(*args: Any) -> Any:
        return pool_engine.allocate_kv_cache(stock, *args)

    setattr(allocate_kv_cache, _MARK, True)
    for name in _MODULES:
        importlib.import_module(name).allocate_kv_cache = allocate_kv_cache  # type: ignore[attr-defined]

    from vllm.v1.worker import worker_base

    layouts = worker_base.get_supported_kv_cache_layouts

    @functools.wraps(layouts)
    def get_supported_kv_cache_layouts(*args: Any) -> list[Any]:
        """A page then holds whole blocks, whose number is free; with layers outermost it holds blocks of one layer, and
        fewest blocks that come and go together have a page of every layer. VLLM_KV_CACHE_LAYOUT still wins."""
        return sorted(layouts(*args), key=lambda layout: not layout.is_block_outermost)

    worker_base.get_supported_kv_cache_layouts = get_supported_kv_cache_layouts


def _is_live() -> bool:
    modules = [sys.modules.get(name) for name in _MODULES]
    return all(module is not None and hasattr(module.allocate_kv_cache, _MARK) for module in modules)


PATCH = Patch(
    name="kv_range",
    target="vllm.v1.worker.utils:allocate_kv_cache (as imported by its two model runners), "
    "vllm.v1.worker.worker_base:get_supported_kv_cache_layouts",
    reason="the KV cache of two engines comes and goes page by page behind fixed addresses; vLLM allocates it with one "
    "torch.zeros, and its memory-pool contexts map whole allocations. Applied only where --rl-kv-pool is given. For that one "
    "call torch.zeros gives the pool's range; on CUDA vLLM's own switch BlockTables.redirect_writes_to_null_block is on "
    "until there is a scheduler",
    tested=VersionRange(">=0.32,<0.34"),
    upstream="none: vLLM has no seam for the memory of the KV cache on CPU; on CUDA a pluggable allocator in "
    "Worker._maybe_get_memory_pool_context could do it",
    remove_when="vLLM lets a worker provide the KV cache's backing memory",
    apply=_apply,
    is_live=_is_live,
)
