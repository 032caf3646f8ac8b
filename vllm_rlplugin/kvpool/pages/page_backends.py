"""Where the pages of an engine's pool are: in host memory for a device of type "cpu", in GPU memory for "cuda".

Guarantees: what the pool's maker chose (which memory, which device, how pages are had) stands in the pool, and an engine that
does not fit is refused with both sides named. The tensor over the range is on the engine's device.
"""

from __future__ import annotations

import ctypes
import logging
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from orchestrator.api import ConfigError
from vllm_rlplugin.kvpool.ledger.page_ledger import PagePool, Role
from vllm_rlplugin.kvpool.pages import page_keeper
from vllm_rlplugin.kvpool.pages.address_ranges import PageRange
from vllm_rlplugin.kvpool.pages.cuda_driver import LIBRARY, CudaDriver
from vllm_rlplugin.kvpool.pages.cuda_pages import SUPPLIES, CudaRange, Supply, open_page_source
from vllm_rlplugin.kvpool.pages.dlpack import byte_tensor
from vllm_rlplugin.kvpool.pages.host_pages import HostRange
from vllm_rlplugin.kvpool.pages.page_keeper import KeeperGone

_logger = logging.getLogger(__name__)


class PageBackend(Protocol):
    """Of one engine."""

    def pool(self, path: Path, pages: int, ranks: int = 1, rank: int = 0) -> PagePool:
        """Open it, for this rank of so many; with ``pages``, of the first rank: make it if nobody lives in it. Raises
        ConfigError."""

    def device(self, pool: PagePool) -> str:
        """What this engine's pages of an opened pool are, as the pool has it."""

    def range(self, pool: PagePool, places: int, role: Role, *, scrub: bool) -> PageRange:
        """Addresses for a tenant that has joined. Raises ConfigError."""

    def tensor(self, address: int, size: int) -> Any:
        """int8[size] of torch over a range; reading a place without a page faults."""


class HostBackend:
    """Pages of ``page_bytes`` in shared memory."""

    def __init__(self, page_bytes: int) -> None:
        self._page_bytes = page_bytes

    def pool(self, path: Path, pages: int, ranks: int = 1, rank: int = 0) -> PagePool:
        """See the protocol."""
        made = pages and not rank
        pool = (
            PagePool.create(path, pages, page_bytes=self._page_bytes, ranks=ranks)
            if made
            else PagePool.open(path, rank)
        )
        return _fitting(pool, self._page_bytes, ("cpu",), ranks)

    def device(self, pool: PagePool) -> str:
        """See the protocol."""
        return "cpu"

    def range(self, pool: PagePool, places: int, role: Role, *, scrub: bool) -> PageRange:
        """See the protocol."""
        return HostRange(pool, places, scrub=scrub)

    def tensor(self, address: int, size: int) -> Any:
        """See the protocol."""
        import torch

        return torch.frombuffer((ctypes.c_int8 * size).from_address(address), dtype=torch.int8)


class CudaBackend:
    """Pages of ``page_bytes`` on device ``ordinal``; ``supply``: how the pool that this engine makes has them."""

    def __init__(self, page_bytes: int, ordinal: int, supply: Supply, library: str = LIBRARY) -> None:
        self._driver = CudaDriver(page_bytes, ordinal=ordinal, library=library)
        self._page_bytes, self._ordinal, self._supply, self._library = page_bytes, ordinal, supply, library

    def pool(self, path: Path, pages: int, ranks: int = 1, rank: int = 0) -> PagePool:
        """See the protocol. Raises RunError: its keeper did not start."""
        device = self._device(self._supply)
        if not pages or rank:
            pool = _fitting(
                PagePool.open(path, rank), self._page_bytes, [self._device(supply) for supply in SUPPLIES], ranks
            )
        else:
            pool = PagePool.create(path, pages, page_bytes=self._page_bytes, host=False, device=device, ranks=ranks)
        if pages and self.device(pool).endswith("kept"):
            try:
                page_keeper.ensure_keeper(pool, self._driver, library=self._library)
            except Exception:
                pool.close()
                raise
        return pool

    def device(self, pool: PagePool) -> str:
        """See the protocol. A rank that nobody had before gets its pages as this engine's own ``supply`` says."""
        return pool.device or self._device(self._supply)

    def range(self, pool: PagePool, places: int, role: Role, *, scrub: bool) -> PageRange:
        """See the protocol."""
        supply: Supply = "kept" if self.device(pool) == self._device("kept") else "created"
        memory = open_page_source(pool, self._driver, supply)
        if supply == "kept":
            first = pool.pages if role == "serving" else 1
            try:
                memory.acquire_handles(np.arange(first, dtype=np.uint64))
            except KeeperGone as error:
                raise ConfigError("kv_pool", str(pool.path), str(error)) from error
        _logger.info("KV pages on %s (%s), %s", self._driver.name, self._driver.uuid, supply)
        return CudaRange(pool, places, self._driver, memory, scrub=scrub)

    def tensor(self, address: int, size: int) -> Any:
        """See the protocol."""
        return byte_tensor(address, size, cuda=self._ordinal)

    def _device(self, supply: str) -> str:
        return f"cuda {self._driver.uuid} {supply}"


def backend_for(device: Any, page_bytes: int, supply: str) -> PageBackend:
    """Of vLLM's ``device``. Raises ConfigError: no driver, no device, a page size, or a kind of device without a backend."""
    if device.type == "cpu":
        return HostBackend(page_bytes)
    if device.type != "cuda":
        fix = "pools are in host memory or on a CUDA device, not on others"
        raise ConfigError("kv_pool", str(device), fix)
    import torch

    ordinal = device.index if device.index is not None else torch.cuda.current_device()
    return CudaBackend(page_bytes, ordinal, "kept" if supply == "kept" else "created")


def _fitting(pool: PagePool, page_bytes: int, devices: Any, ranks: int) -> PagePool:
    if pool.ranks != ranks:
        fix = f"the pool is for engines of {pool.ranks} ranks, this one has {ranks}: give another pool name"
        pool.close()
        raise ConfigError("--tensor-parallel-size", ranks, fix)
    if pool.page_bytes != page_bytes:
        fix = f"the pool has pages of {pool.page_bytes >> 10} KiB"
        pool.close()
        raise ConfigError("kv_pool_page_kib", page_bytes >> 10, fix)
    if pool.device not in devices and (pool.device or not pool.rank):
        fix = f"its pages are on {pool.device!r}, this engine computes on {devices[0]!r}: give another pool name"
        pool.close()
        raise ConfigError("kv_pool", str(pool.path), fix)
    return pool
