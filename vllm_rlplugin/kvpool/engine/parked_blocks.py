"""Blocks of vLLM's own ``BlockPool`` that have pages behind them, and those that are parked because they have none.

Guarantees (tests/kvpool/test_pool_engine.py, on a real engine):

* Only a block that nobody references is parked, the null block never. A parked block is in no free queue and in no prefix
  cache, so that nothing stock does can touch it: "no page" is to stock "no free block".
* A group's pages are dropped when all of its blocks are parked and every step is over that was scheduled before that: with
  async scheduling a batch in flight still reads and writes them. Steps are counted when they are scheduled and when their
  outputs are there, in that order; nothing else, such as a look, counts as one. A drafter goes on on the device, and writes
  KV, when the output of its step is here already: that is waited for too.
* The pool grows by what is wanted and there is; what there is not is not waited for.
* A group that nobody has used for ``keep`` seconds is given back, the least recently used first.

The stock pool stays as it is; block ids are those of vLLM. One thread: the scheduler's.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from vllm_rlplugin.kvpool.pages.page_geometry import PageGeometry

_MORE = 32  # a part of the groups that it has: so many more are mapped where some have to be
_PARTS = 128  # steps in which every group that has pages is looked at once


class PageMapper(Protocol):
    """What maps pages behind groups, all or none; see :class:`vllm_rlplugin.kvpool.engine.pool_engine.EnginePool`."""

    def map_groups(self, groups: list[int]) -> bool:
        """Pages behind these groups; False: there are not so many."""

    def unmap_groups(self, groups: list[int]) -> None:
        """Their pages are free for others."""

    def synchronize(self) -> None:
        """Returns when the device has done what it was told to do before."""


class ParkedBlocks:
    """``after``: steps that must have ended after the last one that may use a group (1 with a drafter); where none is in flight,
    the device is waited for. ``now``: seconds, monotonic."""

    def __init__(
        self,
        pool: Any,
        geometry: PageGeometry,
        backing: PageMapper,
        *,
        backed: Iterable[int],
        now: Callable[[], float],
        keep: float = 10.0,
        after: int = 0,
    ) -> None:
        self.geometry = geometry
        self.keep = keep
        self._pool = pool
        self._backing = backing
        self._now = now
        self._after = after
        self._used: OrderedDict[int, float] = OrderedDict.fromkeys(backed, now())  # backed groups -> last seen in use
        self._scheduled = self._ended = 0  # steps
        self._seen = 0  # of those scheduled, at the latest look without a step
        self._parked: list[int] = []  # without pages: a heap
        self._unseen: list[int] = []  # groups that the present round of looks has not come to
        self._part = 1  # how many of them a step looks at
        self._leaving: dict[int, int] = {}  # parked, still mapped -> steps that had been scheduled by then
        self.most = geometry.groups  # that may have pages: less in a static partition
        self.asleep = False  # nothing has pages; no step may run
        for group in range(geometry.groups):
            if group not in self._used:
                self._park(group)
                self._parked.append(group)

    @property
    def backed_groups(self) -> int:
        """Groups whose blocks may be used."""
        return len(self._used)

    @property
    def held_groups(self) -> int:
        """Groups that have pages."""
        return len(self._used) + len(self._leaving)

    @property
    def free_blocks(self) -> int:
        """That stock may hand out."""
        return int(self._pool.get_num_free_blocks())

    @property
    def steps_in_flight(self) -> int:
        """Steps that were scheduled, and whose outputs are not there yet."""
        return self._scheduled - self._ended

    def note_scheduled(self) -> None:
        """A step was scheduled, an empty one too."""
        self._scheduled += 1

    def note_ended(self) -> None:
        """The output of the earliest step in flight is there."""
        self._ended += 1
        if self._leaving:
            self._unmap_parked()

    def ensure_free(self, blocks: int, allowed: int | None = None) -> bool:
        """Have so many free blocks, if there are pages; whether there are so many now. ``allowed``: groups that may be
        used; those on their way beyond it go on leaving. Where pages have to come, some more come with them, so that not
        every step waits for a few."""
        missing = blocks - self._pool.get_num_free_blocks()
        if missing <= 0 or self.asleep:
            return not self.asleep
        room = max(0, (self.most if allowed is None else min(self.most, allowed)) - len(self._used))
        needed = min(-(-missing // self.geometry.group_blocks), room)
        coming = list(self._leaving)[:needed]  # these have their pages still
        for group in coming:
            del self._leaving[group]
        self._unpark(coming)
        needed -= len(coming)
        count = min(needed + len(self._used) // _MORE, room - len(coming)) if needed else 0
        fresh = [heapq.heappop(self._parked) for _ in range(min(count, len(self._parked)))]
        while fresh and not self._backing.map_groups(fresh):
            fewer = needed if len(fresh) > needed else len(fresh) // 2
            for group in fresh[fewer:]:
                heapq.heappush(self._parked, group)
            fresh = fresh[:fewer]
        self._unpark(fresh)
        return bool(self._pool.get_num_free_blocks() >= blocks)

    def park_idle(self, *, running: bool = False) -> None:
        """Note which groups are in use; give back what was not for ``keep`` seconds. Costs a look at every backed block, but not
        where requests are ``running`` and there were steps since the last time: those look at parts of them."""
        now, seen, self._seen = self._now(), self._seen, self._scheduled
        if self.asleep or (running and seen != self._scheduled):
            return
        for group in list(self._used):
            if self._in_use(group):
                self._used[group] = now
                self._used.move_to_end(group)
        idle = [group for group, since in self._used.items() if now - since >= self.keep and not self._in_use(group)]
        self._park_groups(idle)

    def park_idle_part(self) -> None:
        """The same for one of ``_PARTS`` of the groups that have pages, before a step: none waits for a look at all of them."""
        if self.asleep:
            return
        now = self._now()
        if not self._unseen:
            self._unseen = list(self._used)
            self._part = -(-len(self._unseen) // _PARTS)
        part = self._unseen[-self._part :]
        del self._unseen[-self._part :]
        idle = []
        for group in part:
            if group not in self._used:
                continue
            if self._in_use(group):
                self._used[group] = now
                self._used.move_to_end(group)
            elif now - self._used[group] >= self.keep:
                idle.append(group)
        if idle:
            self._park_groups(idle)

    def shrink(self, groups: int) -> int:
        """Give back so many groups that nobody references now, the least recently used first; returns how many that were.
        Group 0, with the null block, stays."""
        idle = [group for group in self._used if not self._in_use(group)][: max(0, groups)]
        self._park_groups(idle)
        return len(idle)

    def groups_left(self, leaving: Mapping[int, int]) -> int:
        """Groups in use that nobody would reference without these references. ``leaving``: block -> references."""
        if not leaving:
            return 0
        kept = [
            any(block.is_null or block.ref_cnt > leaving.get(block.block_id, 0) for block in self._blocks(group))
            for group in self._used
            if self._in_use(group)
        ]
        return kept.count(False)

    def sleep(self) -> None:
        """Give back everything, the null block's group too: no step may run until :meth:`wake`. Raises RuntimeError while blocks
        are in use, or a step is in flight."""
        if self.steps_in_flight:
            raise RuntimeError(f"{self.steps_in_flight} steps are in flight")
        self.shrink(len(self._used))
        if set(self._used) != {0} or self._pool.get_num_free_blocks() != self.geometry.group_blocks - 1:
            raise RuntimeError("blocks are in use")
        self._backing.synchronize()
        self._backing.unmap_groups([0])
        self.asleep = True

    def wake(self) -> bool:
        """Have the first group again; False: there are no pages for it."""
        if self.asleep and self._backing.map_groups([0]):
            self.asleep = False
        return not self.asleep

    # -- blocks --------------------------------------------------------------------------------------------------------

    def _park_groups(self, groups: list[int]) -> None:
        for group in groups:
            del self._used[group]
            self._park(group)
            self._leaving[group] = self._scheduled
        self._unmap_parked()

    def _unmap_parked(self) -> None:
        ended = self._ended - self._after
        if self._after and self._leaving and not self.steps_in_flight:
            self._backing.synchronize()
            ended = self._ended
        gone = [group for group, before in self._leaving.items() if before <= ended]
        if gone:
            self._backing.unmap_groups(gone)
            for group in gone:
                del self._leaving[group]
                heapq.heappush(self._parked, group)

    def _blocks(self, group: int) -> list[Any]:
        size = self.geometry.group_blocks
        found: list[Any] = self._pool.blocks[group * size : (group + 1) * size]
        return found

    def _in_use(self, group: int) -> bool:
        for block in self._blocks(group):  # noqa: SIM110  # some for each step: a generator costs three times as much
            if block.ref_cnt > 0 or block.is_null:
                return True
        return False

    def _park(self, group: int) -> None:
        blocks = self._blocks(group)
        for block in blocks:
            self._pool._maybe_evict_cached_block(block)
            self._pool.free_block_queue.remove(block)
        self._pool.num_gpu_blocks -= len(blocks)  # reset_prefix_cache and get_usage count with it

    def _unpark(self, groups: list[int]) -> None:
        blocks = [block for group in groups for block in self._blocks(group)]
        self._pool.free_block_queue.append_n(blocks)
        self._pool.num_gpu_blocks += len(blocks)
        self._used |= dict.fromkeys(groups, self._now())
