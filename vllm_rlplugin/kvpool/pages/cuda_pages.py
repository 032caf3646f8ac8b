"""Pages of GPU memory, by CUDA's virtual memory management (ROSE 4.1): reserved once, mapped and unmapped while the engine runs.

Where the memory of a page comes from is hidden from the range, and is the same for all engines of a pool:

* *kept*: a process of its own (:mod:`vllm_rlplugin.kvpool.pages.page_keeper`) has made all pages when the pool was
  made. Each engine imports a page when it first gets it, and keeps the handle: from then on a page that moves costs a
  map and an unmap. Who serves imports all of them at its start, so that it needs the keeper no more.
* *created*: each engine makes the pages that the ledger gives it, and releases them to the driver. Nothing is reserved: where
  others took the device's memory, there is "no page".

Memory that is not to be had is "no page" for now, said once, never an exception in a step. A process that dies leaves no
memory behind: the driver takes back its mappings and handles.
"""

from __future__ import annotations

import logging
from typing import Literal, Protocol

import numpy as np

from orchestrator.api import ConfigError
from vllm_rlplugin.kvpool.ledger import native_pages
from vllm_rlplugin.kvpool.ledger.page_ledger import PagePool, Pages, PoolError
from vllm_rlplugin.kvpool.pages.address_ranges import PageRange
from vllm_rlplugin.kvpool.pages.cuda_driver import CudaDriver, DeviceFull, Handles
from vllm_rlplugin.kvpool.pages.page_keeper import KeeperGone, KeptPages

Supply = Literal["kept", "created"]
SUPPLIES: tuple[Supply, ...] = ("kept", "created")

_logger = logging.getLogger(__name__)


class PageSource(Protocol):
    """Where the memory of pages comes from."""

    def acquire_handles(self, pages: Pages) -> Handles:
        """Of these pages, which are ours now. Raises DeviceFull or KeeperGone, and then nothing was taken."""

    def release_handles(self, pages: Pages) -> None:
        """They are not mapped any more, and will be somebody else's."""

    def close(self) -> None:
        """Let go of all handles."""


class CreatedPages:
    """Made when they are needed, released to the driver when not."""

    def __init__(self, driver: CudaDriver, pages: int) -> None:
        self._driver = driver
        self._handles: Handles = np.zeros(pages, np.uint64)

    def acquire_handles(self, pages: Pages) -> Handles:
        """See :class:`PageSource`."""
        at = pages.astype(np.int64)
        self._handles[at] = self._driver.create_pages(pages.size)
        return self._handles[at]

    def release_handles(self, pages: Pages) -> None:
        """See the protocol."""
        at = pages.astype(np.int64)
        self._driver.release_handles(self._handles[at])
        self._handles[at] = 0

    def close(self) -> None:
        """See the protocol."""
        self.release_handles(np.flatnonzero(self._handles).astype(np.uint64))


class CudaRange(PageRange):
    """``places`` pages of device addresses. ``scrub``: what appears here is zeroed before.

    Places without a page have one page of this process behind them, all the same one, of zeros at first: a kernel that follows
    an old row of a block table (windows, rows beyond a request's blocks) ends in it, not with an illegal address. While a page
    comes or goes its place has nothing, for some microseconds.
    """

    def __init__(
        self, pool: PagePool, places: int, driver: CudaDriver, memory: PageSource, *, scrub: bool = False
    ) -> None:
        self._driver, self._memory, self._scrub = driver, memory, scrub
        self._said = ""
        self._dummy = 0
        super().__init__(pool, places)
        try:
            (handle,) = driver.create_pages(1)
        except DeviceFull as error:
            self._free()
            self.address = 0
            raise ConfigError(
                "kv_pool", str(pool.path), f"{error}: one page beside those of the pool is needed"
            ) from error
        everywhere = np.arange(places, dtype=np.uint64)
        driver.fill(self.address, everywhere, int(handle))
        driver.zero(self.address, everywhere[:1])
        self._dummy = int(handle)

    def close(self) -> None:
        """See the base class. Lets go of the handles, not of the driver."""
        if self.address:
            super().close()
            self._memory.close()

    def synchronize(self) -> None:
        """See the base class."""
        self._driver.synchronize()

    def _reserve(self) -> int:
        return self._driver.reserve(self.bytes)

    def _free(self) -> None:
        if self._dummy:
            self._driver.unmap(self.address, np.arange(self.places, dtype=np.uint64))
            self._driver.release_handles(np.array([self._dummy], np.uint64))
            self._dummy = 0
        self._driver.free(self.address, self.bytes)

    def _map(self, places: Pages, pages: Pages) -> bool:
        try:
            handles = self._memory.acquire_handles(pages)
        except (DeviceFull, KeeperGone) as error:
            self._say(str(error))
            return False
        done = False
        try:
            self._mark(pages, True)
            self._driver.map(self.address, places, handles, self._dummy)
            if self._scrub:
                self._zero(places)
            done = True
        except DeviceFull as error:  # it needs memory for its own tables too
            self._say(str(error))
        finally:
            if not done:
                self._memory.release_handles(pages)
                self._mark(pages, False)
        return done

    def _zero(self, places: Pages) -> None:
        try:
            self._driver.zero(self.address, places)
        except PoolError:
            self._driver.unmap(self.address, places, self._dummy)
            raise

    def _unmap(self, places: Pages, pages: Pages) -> None:
        self._driver.unmap(self.address, places, self._dummy)
        self._memory.release_handles(pages)
        self._mark(pages, False)

    def _mark(self, pages: Pages, mapped: bool) -> None:
        code = native_pages.library().rlc_pool_mark(self._pool.handle, pages.ctypes.data, pages.size, mapped)
        if code:
            raise PoolError(f"{self._pool.path}: a page is not ours, or is mapped already ({code})")

    def _say(self, text: str) -> None:
        if text != self._said:
            self._said = text
            _logger.warning("no memory for pages that the pool has: %s", text)


def open_page_source(pool: PagePool, driver: CudaDriver, supply: Supply) -> PageSource:
    """Of this pool. Raises KeeperGone."""
    return KeptPages(pool, driver) if supply == "kept" else CreatedPages(driver, pool.pages)
