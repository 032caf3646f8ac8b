"""A pool under an engine of several ranks: one process decides for all, each rank maps its own memory.

Guarantees: every rank has the same page behind the same place, or none has one there; a page is released only when every rank has
acknowledged that it unmapped it (the ledger refuses anything else); a rank that has no memory for a page is "no page" for all.

Ranks are told through vLLM's own executor, in the order of the steps. An answer is waited for: with async scheduling that ends a
step in flight first, so that pages which come or go cost such an engine its overlap for one step.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from vllm.v1.executor.multiproc_executor import MultiprocExecutor

from vllm_rlplugin.kvpool.engine.pool_engine import set_current
from vllm_rlplugin.kvpool.ledger.page_ledger import PagePool, Role
from vllm_rlplugin.kvpool.pages.page_geometry import PageGeometry

Call = Callable[..., list[Any]]  # a method of the worker extension on every rank: its answers by rank


class RankedPool:
    """The pool as the scheduler of such an engine has it. ``facts``: of its ranks
    (:attr:`vllm_rlplugin.kvpool.engine.pool_engine.RankPages.facts`)."""

    def __init__(self, call: Call, facts: dict[str, Any]) -> None:
        self._call = call
        self.geometry = PageGeometry.from_regions(
            facts["blocks"], [(offset, stride) for offset, stride in facts["regions"]], facts["page_bytes"]
        )
        self.role: Role = facts["role"]
        self.slot = int(facts["slot"])
        self.pool = PagePool.open(Path(facts["path"]))
        self.pool.decide(self.slot, facts["generation"], self.role)
        first = dict(zip(self.geometry.places([0]).tolist(), facts["first"], strict=True))
        self._pages: dict[int, int] = first  # place -> page

    def map_groups(self, groups: list[int]) -> bool:
        """See :class:`vllm_rlplugin.kvpool.engine.parked_blocks.PageMapper`."""
        places = self.geometry.places(groups).tolist()
        pages = self.pool.acquire(len(places))
        if pages.size < len(places):
            return False
        if not all(self._call("rl_map_pages", places, pages.tolist())):
            self._call("rl_unmap_pages", places)  # of those that did
            self.pool.release(pages)
            return False
        self._pages.update(zip(places, pages.tolist(), strict=True))
        return True

    def unmap_groups(self, groups: list[int]) -> None:
        """See the protocol."""
        places = self.geometry.places(groups).tolist()
        self._call("rl_unmap_pages", places)
        self.pool.release(np.array([self._pages.pop(place) for place in places], np.uint64))

    def synchronize(self) -> None:
        """Nothing: each rank waits for its device before it unmaps."""

    def begin_allocating(self) -> None:
        """See :class:`vllm_rlplugin.kvpool.engine.pool_engine.SchedulerPool`."""
        self._call("rl_begin_allocating")


class RankExecutor(MultiprocExecutor):  # type: ignore[misc]  # vLLM is untyped here
    """vLLM's own, which leaves the way to its ranks where the scheduler of its process finds it."""

    def initialize_from_config(self, *args: Any, **kwargs: Any) -> Any:
        """Stock's, in which the ranks join the pool."""
        answer = super().initialize_from_config(*args, **kwargs)
        every = self.collective_rpc("rl_pool_facts")
        if every[0]:
            set_current(RankedPool(lambda method, *given: self.collective_rpc(method, args=given), every[0]))
        return answer
