"""The KV cache of the engine in this process, in a device's pool.

Guarantees: the KV tensors that vLLM's runner gets are views of one range of addresses that never moves; the first group of
blocks (the null block's) has pages from the beginning, every other one when the scheduler wants it. What cannot be (a layout
that does not lie in pages, ranks that disagree, a device without a backend) ends the engine's start with a ConfigError.

On a GPU vLLM profiles and warms up before a scheduler is there. Memory that it takes to measure CUDA graphs before it knows how
large the KV cache will be is its own, not the pool's; what its warm-up writes to blocks that nobody has allocated goes to the
null block, by vLLM's own switch for that (``BlockTables.redirect_writes_to_null_block``), until there is a scheduler: else the
start ends with an illegal address. Dummy runs and graph captures use the null block, or none, by themselves.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from orchestrator.api import ConfigError
from vllm_rlplugin.kvpool.engine.pool_agreement import PoolAgreement
from vllm_rlplugin.kvpool.engine.pool_processes import check_connector, check_workers
from vllm_rlplugin.kvpool.ledger.page_ledger import PagePool, Pages, Role
from vllm_rlplugin.kvpool.ledger.tenant_words import ControlWord, RolloutWords
from vllm_rlplugin.kvpool.pages.address_ranges import PageRange
from vllm_rlplugin.kvpool.pages.page_backends import HostBackend, PageBackend, backend_for
from vllm_rlplugin.kvpool.pages.page_geometry import PageGeometry, regions_of
from vllm_rlplugin.kvpool.serving import mps_client
from vllm_rlplugin.options import PluginOptions
from vllm_rlplugin.sleep import sleep_options

_FOLDER = Path("/dev/shm")
PATIENCE = 2.0  # seconds that a rollout engine waits for the pages that it needs at least
_here: dict[int, SchedulerPool] = {}  # process -> its engine's; a fork has none
_ranks: dict[int, RankPages] = {}
_SHARED = (
    "kv_pool",
    "kv_pool_role",
    "kv_pool_mib",
    "kv_pool_page_kib",
    "kv_pool_supply",
    "kv_pool_scrub",
)  # by all ranks


def pool_path(name: str) -> Path:
    """Of a pool's file: in shared memory, one name a user."""
    return _FOLDER / f"rl-coserve-kv-{os.getuid()}-{name}"


class SchedulerPool(Protocol):
    """What a scheduler needs of its engine's pool: :class:`EnginePool`, or of several ranks
    :class:`vllm_rlplugin.kvpool.engine.ranked_pool.RankedPool`."""

    pool: PagePool
    geometry: PageGeometry
    role: Role
    slot: int

    def map_groups(self, groups: list[int]) -> bool:
        """See :class:`vllm_rlplugin.kvpool.engine.parked_blocks.PageMapper`."""

    def unmap_groups(self, groups: list[int]) -> None:
        """See the protocol."""

    def synchronize(self) -> None:
        """See the protocol."""

    def begin_allocating(self) -> None:
        """From now on a scheduler allocates blocks, and sees to it that they have pages."""


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """What an engine asks of a pool. ``pages``: of the pool, if it is to be made; ``budget``: pages of a rollout engine."""

    geometry: PageGeometry
    pages: int
    budget: int
    role: Role

    @classmethod
    def of_engine(cls, options: PluginOptions, blocks: int, regions: list[tuple[int, int]]) -> PoolPlan:
        """Raises ConfigError."""
        page = options.kv_pool_page_kib << 10
        try:
            geometry = PageGeometry.from_regions(blocks, regions, page)
        except ValueError as error:
            raise ConfigError("kv_pool", options.kv_pool, str(error)) from error
        pages = (options.kv_pool_mib << 20) // page
        if options.kv_pool_mib and not pages:
            raise ConfigError("kv_pool_mib", options.kv_pool_mib, f"is less than a page of {page >> 10} KiB")
        role: Role = "serving" if options.kv_pool_role == "serving" else "rollout"
        return cls(geometry, pages, options.kv_pool_budget_mib * (1 << 20) // page, role)

    def join(self, pool: PagePool) -> int:
        """Become a tenant; returns the slot. A rollout engine has no more than what is lent and nobody has, also until a serving
        engine says so. Raises ConfigError."""
        controls, budget = pool.controls(), self.budget
        if said := controls[ControlWord.LENT] or controls[ControlWord.FLAG]:
            others = sum(tenant.budget for tenant in pool.view().tenants if tenant.role == "rollout")
            left = int((said - 1) / 1e6 * pool.pages) - others
            budget = min(budget, max(0, left) + self.geometry.pages_a_group)
        slot = pool.join(f"{self.role}-{os.getpid()}", self.role, budget)
        if self.role == "rollout":  # known before anything is owned: pages that it cannot give back while it lives
            pool.publish(RolloutWords(minimum=self.geometry.pages_a_group).pack())
        return slot

    def try_first(self, attempt: Callable[[], bool], pool: PagePool) -> None:
        """Have the first group's pages, which a serving engine may have to give back first. Raises ConfigError."""
        deadline = time.monotonic() + PATIENCE
        while not (had := attempt()) and self.role == "rollout" and time.monotonic() < deadline:
            time.sleep(0.01)  # the serving engine may not have seen yet what this one needs at least
        if not had:
            fix = f"its first {self.geometry.pages_a_group} pages cannot be had (free: {pool.view().free}, budget of a "
            raise ConfigError("kv_pool", str(pool.path), fix + "rollout engine: kv_pool_budget_mib)")


class EnginePool:
    """A tenant of the pool, with the range behind the KV tensors; of one rank."""

    def __init__(
        self,
        options: PluginOptions,
        blocks: int,
        regions: list[tuple[int, int]],
        size: int,
        backend: PageBackend | None = None,
    ) -> None:
        page = options.kv_pool_page_kib << 10
        self._backend = backend or HostBackend(page)
        plan = PoolPlan.of_engine(options, blocks, regions)
        self.geometry, self.role = plan.geometry, plan.role
        self.pool = self._backend.pool(pool_path(options.kv_pool), plan.pages)
        self.slot = plan.join(self.pool)
        self.memory = self._backend.range(self.pool, -(-size // page), self.role, scrub=options.kv_pool_scrub)
        plan.try_first(lambda: self.map_groups([0]), self.pool)

    def map_groups(self, groups: list[int]) -> bool:
        """See :class:`vllm_rlplugin.kvpool.engine.parked_blocks.PageMapper`."""
        return self.memory.map_places(self.geometry.places(groups))

    def unmap_groups(self, groups: list[int]) -> None:
        """See the protocol."""
        self.memory.unmap_places(self.geometry.places(groups))

    def synchronize(self) -> None:
        """See the protocol."""
        self.memory.synchronize()

    def begin_allocating(self) -> None:
        """See the protocol."""
        write_to_null_block(False)

    def buffer(self, size: int) -> Any:
        """The range as a tensor of ``size`` bytes. Reading a place without a page faults."""
        return self._backend.tensor(self.memory.address, size)


class RankPages:
    """One rank's part of the memory of a pool's pages; which pages are where, the scheduler's process decides for all ranks
    (:class:`vllm_rlplugin.kvpool.engine.ranked_pool.RankedPool`). Made by all ranks at the same time; what one of them cannot do
    is an error of all."""

    def __init__(
        self,
        options: PluginOptions,
        blocks: int,
        regions: list[tuple[int, int]],
        size: int,
        backend: PageBackend,
        agreement: PoolAgreement,
    ) -> None:
        self._backend, page = backend, options.kv_pool_page_kib << 10
        agreement.require_same(
            {"blocks": blocks, "regions": regions, "bytes": size, **{name: getattr(options, name) for name in _SHARED}}
        )
        plan = PoolPlan.of_engine(options, blocks, regions)
        rank, ranks = agreement.rank, agreement.ranks
        path = pool_path(options.kv_pool)
        opened: list[PagePool] = []
        agreement.each_does(lambda: None if rank else opened.append(backend.pool(path, plan.pages, ranks)))
        agreement.each_does(lambda: opened.append(backend.pool(path, plan.pages, ranks, rank)) if rank else None)
        (self.pool,) = opened

        def join() -> tuple[int, int]:
            slot = plan.join(self.pool)
            return slot, next(tenant.generation for tenant in self.pool.view().tenants if tenant.slot == slot)

        slot, generation = agreement.each_does(lambda: None if rank else join())[0]
        agreement.each_does(
            lambda: self.pool.attach(slot, generation, backend.device(self.pool)) if rank else None,
        )
        ranges: list[PageRange] = []
        agreement.each_does(
            lambda: ranges.append(
                backend.range(self.pool, -(-size // page), plan.role, scrub=options.kv_pool_scrub),
            )
        )
        (self.memory,) = ranges
        places = plan.geometry.places([0])
        had: list[int] = []

        def try_acquire() -> bool:
            had.extend(int(page) for page in self.pool.acquire(places.size))
            return bool(had)

        def acquire() -> list[int]:
            plan.try_first(try_acquire, self.pool)
            return had

        first = agreement.each_does(lambda: None if rank else acquire())[0]
        agreement.each_does(lambda: self._map_first(places, first))
        self.facts = {
            "slot": slot,
            "generation": generation,
            "role": plan.role,
            "path": str(path),
            "blocks": blocks,
            "regions": regions,
            "page_bytes": page,
            "first": first,
        }

    def _map_first(self, places: Pages, pages: list[int]) -> None:
        if not self.memory.map_pages(places, np.array(pages, np.uint64)):
            fix = f"rank {self.pool.rank} has no memory for its first {len(pages)} pages"
            raise ConfigError("kv_pool", str(self.pool.path), fix)

    def map_pages(self, places: list[int], pages: list[int]) -> bool:
        """All or none; False: the memory is not to be had here."""
        return self.memory.map_pages(np.array(places, np.uint64), np.array(pages, np.uint64))

    def unmap_pages(self, places: list[int]) -> None:
        """Those that have pages; the device is done with them when this returns."""
        self.memory.synchronize()
        self.memory.unmap_pages(self.memory.with_pages(np.array(places, np.uint64)))

    def buffer(self, size: int) -> Any:
        """See :meth:`EnginePool.buffer`."""
        return self._backend.tensor(self.memory.address, size)


def current_pool() -> SchedulerPool | None:
    """Of the engine whose scheduler is in this process; None: its KV cache is vLLM's own."""
    return _here.get(os.getpid())


def set_current(pool: SchedulerPool) -> None:
    """That is it."""
    _here[os.getpid()] = pool


def rank_facts() -> dict[str, Any]:
    """:attr:`RankPages.facts` of the rank in this process; {}: it is none, or in no pool."""
    found = _ranks.get(os.getpid())
    return {} if found is None else found.facts


def current_rank() -> RankPages:
    """Of the rank in this process, of an engine of several. Raises KeyError: there is none."""
    return _ranks[os.getpid()]


def allocate_kv_cache(stock: Callable[..., Any], config: Any, device: Any, layout: Any, *more: Any) -> Any:
    """Stands in for vLLM's ``allocate_kv_cache``: the same views, of a range in the pool."""
    from vllm.config import get_current_vllm_config

    vllm_config = get_current_vllm_config()
    options = PluginOptions.from_config(vllm_config)
    if not options.kv_pool or is_profiling(vllm_config):
        return stock(config, device, layout, *more)
    parallel = vllm_config.parallel_config
    ranks = check_workers(parallel.tensor_parallel_size, parallel.pipeline_parallel_size)
    if (parallel.world_size, parallel.local_world_size) != (ranks, ranks):
        fix = f"an engine in a pool has as many workers as --tensor-parallel-size, here {ranks}, on one machine"
        raise ConfigError("kv_pool", f"{options.kv_pool} with {parallel.world_size} workers", fix)
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
    pool: EnginePool | RankPages
    if ranks == 1:
        pool = EnginePool(options, config.num_blocks, regions, size, backend)
        set_current(pool)
    else:
        pool = RankPages(options, config.num_blocks, regions, size, backend, PoolAgreement(parallel.rank, ranks))
        _ranks[os.getpid()] = pool
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
