"""A range of addresses of this process, behind which pages of a pool in host memory come and go.

Guarantees: the range keeps its address for life; a place with no page behind it faults when it is touched; a page is mapped
here only while this tenant owns it, and released only after it is unmapped. The twin of CUDA's virtual memory on a host
without a GPU, with real remapping between real processes.
"""

from __future__ import annotations

import ctypes
from types import TracebackType
from typing import Self

import numpy as np

from vllm_rlplugin.kvpool import native
from vllm_rlplugin.kvpool.ledger import PagePool, Pages, PoolError


class HostRange:
    """``places`` pages of address space. ``scrub``: a page that another tenant had is zeroed before it appears here."""

    def __init__(self, pool: PagePool, places: int, *, scrub: bool = False) -> None:
        self.places = places
        self._pool = pool
        self._scrub = scrub
        self._library = native.library()
        self._pages = np.full(places, -1, np.int64)  # place -> page
        base = ctypes.c_void_p()
        if self._library.rlc_range_reserve(places * pool.page_bytes, ctypes.addressof(base)):
            raise native.system_error()
        assert base.value is not None
        self.address = base.value

    @property
    def bytes(self) -> int:
        """Of the whole range."""
        return self.places * self._pool.page_bytes

    @property
    def mapped(self) -> int:
        """Places with a page."""
        return int((self._pages >= 0).sum())

    def back(self, places: Pages, *, lease: float | None = None) -> bool:
        """Acquire pages and map them at these places, all or none; False: there are not so many. Raises ValueError for a
        place that is outside, or has a page."""
        places = self._places(places, with_page=False)
        pages = self._pool.acquire(places.size, lease=lease)
        if pages.size < places.size:
            return False
        done = self._library.rlc_range_map(
            *(self._pool.handle, self.address, places.ctypes.data, pages.ctypes.data, places.size, self._scrub),
        )
        if done != places.size:
            error = native.system_error() if done >= 0 or done == native.SYSTEM else PoolError(f"cannot map ({done})")
            mapped = max(0, int(done))
            self._unmap(places[:mapped], pages[:mapped])
            self._pool.release(pages)
            raise error
        self._pages[places.astype(np.int64)] = pages.astype(np.int64)
        return True

    def drop(self, places: Pages) -> None:
        """Unmap these places and release their pages. Nothing may use them any more. Raises ValueError."""
        places = self._places(places, with_page=True)
        pages = self._pages[places.astype(np.int64)].astype(np.uint64)
        self._unmap(places, pages)
        self._pages[places.astype(np.int64)] = -1
        self._pool.release(pages)

    def pages_of(self, places: Pages) -> Pages:
        """The pages behind these places."""
        return self._pages[self._places(places, with_page=True).astype(np.int64)].astype(np.uint64)

    def places_of(self, pages: Pages) -> Pages:
        """Where these pages of ours are."""
        return np.flatnonzero(np.isin(self._pages, pages.astype(np.int64))).astype(np.uint64)

    def close(self) -> None:
        """Drop everything and give the addresses back. Idempotent."""
        if self.address:
            self.drop(np.flatnonzero(self._pages >= 0).astype(np.uint64))
            self._library.rlc_range_free(self.address, self.bytes)
            self.address = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _unmap(self, places: Pages, pages: Pages) -> None:
        code = self._library.rlc_range_unmap(
            *(self._pool.handle, self.address, places.ctypes.data, pages.ctypes.data, places.size),
        )
        if code:
            raise native.system_error() if code == native.SYSTEM else PoolError(f"cannot unmap ({code})")

    def _places(self, places: Pages, *, with_page: bool) -> Pages:
        places = np.ascontiguousarray(places, np.uint64)
        if places.size and (int(places.max()) >= self.places or np.unique(places).size != places.size):
            raise ValueError(f"places must be different and below {self.places}")
        if bool(((self._pages[places.astype(np.int64)] >= 0) != with_page).any()):
            raise ValueError("a place without a page" if with_page else "a place that has a page")
        return places
