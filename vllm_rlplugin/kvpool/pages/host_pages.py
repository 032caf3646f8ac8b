"""Pages in host memory: a file in shared memory, parts of which are mapped into a range of addresses of this process.

The twin of CUDA's virtual memory on a host without a GPU, with real remapping between real processes.
"""

from __future__ import annotations

import ctypes

from vllm_rlplugin.kvpool.ledger import native_pages
from vllm_rlplugin.kvpool.ledger.page_ledger import PagePool, Pages, PoolError
from vllm_rlplugin.kvpool.pages.address_ranges import PageRange


class HostRange(PageRange):
    """``places`` pages of address space. ``scrub``: a page that another tenant had is zeroed before it appears here."""

    def __init__(self, pool: PagePool, places: int, *, scrub: bool = False) -> None:
        self._scrub = scrub
        self._library = native_pages.library()
        super().__init__(pool, places)

    def _reserve(self) -> int:
        base = ctypes.c_void_p()
        if self._library.rlc_range_reserve(self.bytes, ctypes.addressof(base)):
            raise native_pages.system_error()
        assert base.value is not None
        return base.value

    def _free(self) -> None:
        self._library.rlc_range_free(self.address, self.bytes)

    def _map(self, places: Pages, pages: Pages) -> bool:
        done = self._library.rlc_range_map(
            *(self._pool.handle, self.address, places.ctypes.data, pages.ctypes.data, places.size, self._scrub),
        )
        if done == places.size:
            return True
        error = (
            native_pages.system_error()
            if done >= 0 or done == native_pages.SYSTEM
            else PoolError(f"cannot map ({done})")
        )
        mapped = max(0, int(done))
        self._unmap(places[:mapped], pages[:mapped])
        raise error

    def _unmap(self, places: Pages, pages: Pages) -> None:
        code = self._library.rlc_range_unmap(
            *(self._pool.handle, self.address, places.ctypes.data, pages.ctypes.data, places.size),
        )
        if code:
            raise native_pages.system_error() if code == native_pages.SYSTEM else PoolError(f"cannot unmap ({code})")
