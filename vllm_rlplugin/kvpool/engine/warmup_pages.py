"""An engine's start on a GPU, when only the null block's group has pages: vLLM profiles and warms up before a scheduler is there.

Guarantees: memory that vLLM takes to measure CUDA graphs before it knows how large the KV cache will be is its own, not the
pool's; what its warm-up writes to blocks that nobody has allocated goes to the null block, by vLLM's own switch for that
(``BlockTables.redirect_writes_to_null_block``), until there is a scheduler. Else the start ends with an illegal address.

Dummy runs and graph captures use the null block, or none, by themselves.
"""

from __future__ import annotations

from typing import Any


def is_profiling(vllm_config: Any) -> bool:
    """Whether this KV cache is a small one for a measurement: vLLM notes the number of blocks when it makes the real one."""
    return vllm_config.cache_config.num_gpu_blocks is None


def write_to_null_block(on: bool) -> None:
    """Of every runner of this process. On, a request that is no scheduler's has the null block for each of its own."""
    from vllm.v1.worker.gpu.block_table import BlockTables

    BlockTables.redirect_writes_to_null_block = on
