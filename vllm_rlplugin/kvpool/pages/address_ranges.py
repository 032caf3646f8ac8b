"""A range of addresses of this process, behind which pages of a pool come and go: what every kind of memory has in common.

Guarantees: the range keeps its address for life; what touches a place with no page behind it reaches no page
of the pool (in host memory it faults); a page is mapped here only while this tenant owns it, and released only after it is
unmapped.
:class:`~vllm_rlplugin.kvpool.pages.host_pages.HostRange` and :class:`~vllm_rlplugin.kvpool.pages.cuda_pages.CudaRange`
say how pages are mapped.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self

import numpy as np

from vllm_rlplugin.kvpool.ledger.page_ledger import PagePool, Pages


class PageRange(ABC):
    """``places`` pages of address space of a tenant of ``pool``. Of one thread."""

    def __init__(self, pool: PagePool, places: int) -> None:
        self.places = places
        self._pool = pool
        self._pages = np.full(places, -1, np.int64)  # place -> page
        self.address = 0
        self.address = self._reserve()

    @property
    def bytes(self) -> int:
        """Of the whole range."""
        return self.places * self._pool.page_bytes

    @property
    def mapped(self) -> int:
        """Places with a page."""
        return int((self._pages >= 0).sum())

    def map_places(self, places: Pages, *, lease: float | None = None) -> bool:
        """Acquire pages and map them at these places, all or none; False: there are not so many. Raises ValueError for a
        place that is outside, or has a page."""
        places = self._places(places, with_page=False)
        pages = self._pool.acquire(places.size, lease=lease)
        if pages.size < places.size:
            return False
        done = False
        try:
            done = self.map_pages(places, pages)
        finally:
            if not done:
                self._pool.release(pages)
        return done

    def unmap_places(self, places: Pages) -> None:
        """Unmap these places and release their pages. Nothing may use them any more. Raises ValueError."""
        self._pool.release(self.unmap_pages(places))

    def map_pages(self, places: Pages, pages: Pages) -> bool:
        """Map these pages, which are this tenant's, all or none; False: there is no memory for them. Raises ValueError."""
        places = self._places(places, with_page=False)
        done = self._map(places, np.ascontiguousarray(pages, np.uint64))
        if done:
            self._pages[places.astype(np.int64)] = pages.astype(np.int64)
        return done

    def unmap_pages(self, places: Pages) -> Pages:
        """Unmap these places; returns the pages that were there, which stay this tenant's. Raises ValueError."""
        places = self._places(places, with_page=True)
        pages = self._pages[places.astype(np.int64)].astype(np.uint64)
        self._unmap(places, pages)
        self._pages[places.astype(np.int64)] = -1
        return pages

    def pages_of(self, places: Pages) -> Pages:
        """The pages behind these places."""
        return self._pages[self._places(places, with_page=True).astype(np.int64)].astype(np.uint64)

    def with_pages(self, places: Pages) -> Pages:
        """Those of these places that have a page."""
        return places[self._pages[places.astype(np.int64)] >= 0]

    def places_of(self, pages: Pages) -> Pages:
        """Where these pages of ours are."""
        return np.flatnonzero(np.isin(self._pages, pages.astype(np.int64))).astype(np.uint64)

    def close(self) -> None:
        """Drop everything and give the addresses back. Idempotent."""
        if self.address:
            self.unmap_places(np.flatnonzero(self._pages >= 0).astype(np.uint64))
            self._free()
            self.address = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def synchronize(self) -> None:  # noqa: B027  nothing to wait for, unless a device computes by itself
        """Returns when nothing that was begun touches this range any more."""

    @abstractmethod
    def _reserve(self) -> int:
        """Addresses for ``self.bytes``, none of which may be touched yet."""

    @abstractmethod
    def _free(self) -> None:
        """Give them back; nothing is mapped."""

    @abstractmethod
    def _map(self, places: Pages, pages: Pages) -> bool:
        """These pages, which are ours, appear there, all or none. False: the memory for them is not to be had."""

    @abstractmethod
    def _unmap(self, places: Pages, pages: Pages) -> None:
        """They disappear. The pages may be released afterwards."""

    def _places(self, places: Pages, *, with_page: bool) -> Pages:
        places = np.ascontiguousarray(places, np.uint64)
        if places.size and (int(places.max()) >= self.places or np.unique(places).size != places.size):
            raise ValueError(f"places must be different and below {self.places}")
        if bool(((self._pages[places.astype(np.int64)] >= 0) != with_page).any()):
            raise ValueError("a place without a page" if with_page else "a place that has a page")
        return places
