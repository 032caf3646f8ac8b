"""The KV cache of the engine in this process, in a device's pool.

Guarantees: the KV tensors that vLLM's runner gets are views of one range of addresses that never moves; the first group of
blocks (the null block's) has pages from the beginning, every other one when the scheduler wants it. What cannot be (a layout
that does not lie in pages, several workers a scheduler, a device without a backend) ends the engine's start with a ConfigError.

On a GPU vLLM profiles and warms up before a scheduler is there. Memory that it takes to measure CUDA graphs before it knows how
large the KV cache will be is its own, not the pool's; what its warm-up writes to blocks that nobody has allocated goes to the
null block, by vLLM's own switch for that (``BlockTables.redirect_writes_to_null_block``), until there is a scheduler: else the
start ends with an illegal address. Dummy runs and graph captures use the null block, or none, by themselves.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from orchestrator.api import ConfigError
from vllm_rlplugin.kvpool.engine.single_process import check_connector
from vllm_rlplugin.kvpool.ledger.page_ledger import Role
from vllm_rlplugin.kvpool.ledger.tenant_words import RolloutWords
from vllm_rlplugin.kvpool.pages.page_backends import HostBackend, PageBackend, backend_for
from vllm_rlplugin.kvpool.pages.page_geometry import PageGeometry, regions_of
from vllm_rlplugin.kvpool.serving import mps_client
from vllm_rlplugin.options import PluginOptions
from vllm_rlplugin.sleep import sleep_options

_FOLDER = Path("/dev/shm")
PATIENCE = 2.0  # seconds that a rollout engine waits for the pages that it needs at least
_here: dict[int, EnginePool] = {}  # process -> its engine's; a fork has none


def pool_path(name: str) -> Path:
    """Of a pool's file: in shared memory, one name a user."""
    return _FOLDER / f"rl-coserve-kv-{os.getuid()}-{name}"


class EnginePool:
    """A tenant of the pool, with the range behind the KV tensors."""

    def __init__(
        self,
        options: PluginOptions,
        blocks: int,
        regions: list[tuple[int, int]],
        size: int,
        backend: PageBackend | None = None,
    ) -> None:
        page = options.kv_pool_page_kib << 10
        self.name = options.kv_pool
        self._backend = backend or HostBackend(page)
        try:
            self.geometry = PageGeometry.from_regions(blocks, regions, page)
        except ValueError as error:
            raise ConfigError("kv_pool", options.kv_pool, str(error)) from error
        pages = (options.kv_pool_mib << 20) // page
        if options.kv_pool_mib and not pages:
            raise ConfigError("kv_pool_mib", options.kv_pool_mib, f"is less than a page of {page >> 10} KiB")
        self.pool = self._backend.pool(pool_path(options.kv_pool), pages)
        role: Role = "serving" if options.kv_pool_role == "serving" else "rollout"
        self.role = role
        self.slot = self.pool.join(f"{role}-{os.getpid()}", role, options.kv_pool_budget_mib * (1 << 20) // page)
        if role == "rollout":  # known before anything is owned: pages that it cannot give back while it lives
            self.pool.publish(RolloutWords(minimum=self.geometry.pages_a_group).pack())
        self.memory = self._backend.range(self.pool, -(-size // page), role, scrub=options.kv_pool_scrub)
        deadline = time.monotonic() + PATIENCE
        while not (had := self.map_groups([0])) and role == "rollout" and time.monotonic() < deadline:
            time.sleep(0.01)  # the serving engine may not have seen yet what this one needs at least
        if not had:
            fix = f"its first {self.geometry.pages_a_group} pages cannot be had (free: {self.pool.view().free}, budget of a "
            raise ConfigError("kv_pool", options.kv_pool, fix + "rollout engine: kv_pool_budget_mib)")

    def map_groups(self, groups: list[int]) -> bool:
        """See :class:`vllm_rlplugin.kvpool.engine.parked_blocks.PageMapper`."""
        return self.memory.map_places(self.geometry.places(groups))

    def unmap_groups(self, groups: list[int]) -> None:
        """See the protocol."""
        self.memory.unmap_places(self.geometry.places(groups))

    def synchronize(self) -> None:
        """See the protocol."""
        self.memory.synchronize()

    def buffer(self, size: int) -> Any:
        """The range as a tensor of ``size`` bytes. Reading a place without a page faults."""
        return self._backend.tensor(self.memory.address, size)


def current_pool() -> EnginePool | None:
    """Of the engine in this process; None: its KV cache is vLLM's own."""
    return _here.get(os.getpid())


def allocate_kv_cache(stock: Callable[..., Any], config: Any, device: Any, layout: Any, *more: Any) -> Any:
    """Stands in for vLLM's ``allocate_kv_cache``: the same views, of a range in the pool."""
    from vllm.config import get_current_vllm_config

    vllm_config = get_current_vllm_config()
    options = PluginOptions.from_config(vllm_config)
    if not options.kv_pool or is_profiling(vllm_config):
        return stock(config, device, layout, *more)
    workers = vllm_config.parallel_config.world_size
    if workers != 1:
        raise ConfigError(
            "kv_pool", f"{options.kv_pool} with {workers} workers", "an engine in a pool has one worker so far"
        )
    check_connector(vllm_config.kv_transfer_config)
    tensors = config.kv_cache_tensors
    try:
        regions = regions_of(tensors, layout)
    except ValueError as error:
        raise ConfigError("kv_pool", f"{options.kv_pool} with KV layout {layout.name}", str(error)) from error
    size = tensors[0].size
    mps_client.check_mps(options.kv_pool_mps, device.type, os.environ)
    sleep_options.check_sleep_mode(options, vllm_config, os.environ)
    backend = backend_for(device, options.kv_pool_page_kib << 10, options.kv_pool_supply)
    pool = EnginePool(options, config.num_blocks, regions, size, backend)
    _here[os.getpid()] = pool
    if device.type == "cuda":
        write_to_null_block(True)

    import torch

    zeros = torch.zeros

    def backed(*shape: Any, **settings: Any) -> Any:
        return pool.buffer(size) if shape == (size,) else zeros(*shape, **settings)

    torch.zeros = backed  # for the one call below, in the thread that starts the engine
    try:
        return stock(config, device, layout, *more)
    finally:
        torch.zeros = zeros


def is_profiling(vllm_config: Any) -> bool:
    """Whether this KV cache is a small one for a measurement: vLLM notes the number of blocks when it makes the real one."""
    return vllm_config.cache_config.num_gpu_blocks is None


def write_to_null_block(on: bool) -> None:
    """Of every runner of this process. On, a request that is no scheduler's has the null block for each of its own."""
    from vllm.v1.worker.gpu.block_table import BlockTables

    BlockTables.redirect_writes_to_null_block = on
