"""Regions of tensors, put together from shards that come one after the other, in any order.

Guarantees: a region is handed out as soon as its last shard is there, and once. A shard that is a whole region is handed out
as it is, without a copy; it is valid as long as the caller keeps the shard's bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from orchestrator.api import ShardKey
from orchestrator.transfer.bucket import Bytes
from orchestrator.transfer.shard_routing import (
    Region,
    RegionPart,
    ShardIndex,
    box_elements,
    box_of,
    box_shape,
    copy_part,
)


class RegionAssembler:
    """Raises CorruptWeightsError "layout" for shards that are not every tensor exactly once, and for a region of none.

    ``needed``: places in ``shards`` of those that any region is made of; ``empty``: regions that no shard is needed for.
    """

    def __init__(self, shards: Sequence[ShardKey], regions: Iterable[Region]) -> None:
        self._shards = shards
        self._open: dict[int, _Region] = {}
        self._by_shard: dict[int, list[tuple[int, RegionPart]]] = {}
        self.empty: list[tuple[Region, Bytes]] = []
        index = ShardIndex(shards)
        for place, region in enumerate(regions):
            parts = index.parts(region)
            if not parts:
                self.empty.append((region, np.empty(0, dtype=np.uint8)))
                continue
            self._open[place] = _Region(region, len(parts))
            for part in parts:
                self._by_shard.setdefault(part.shard, []).append((place, part))
        self.needed = frozenset(self._by_shard)

    def add(self, number: int, data: Bytes) -> Iterator[tuple[Region, Bytes]]:
        """The regions that this shard (its place and its decoded bytes) completes; contiguous. One that is not needed: none."""
        held = box_shape(box_of(self._shards[number]))
        for place, part in self._by_shard.get(number, ()):
            if self._open[place].add(part, data, held):
                done = self._open.pop(place)
                yield done.region, done.data


class _Region:
    """One that is being put together."""

    def __init__(self, region: Region, missing: int) -> None:
        self.region = region
        self.missing = missing
        self.data: Bytes = np.empty(0, dtype=np.uint8)

    def add(self, part: RegionPart, shard: Bytes, held: tuple[int, ...]) -> bool:
        """Whether that was the last part."""
        shape = box_shape(self.region.box)
        if self.missing == 1 and not self.data.size and held == shape:
            self.data = shard  # the very shard
        else:
            if not self.data.size:
                itemsize = shard.nbytes // max(box_elements(tuple((0, size) for size in held)), 1)
                self.data = np.empty(box_elements(self.region.box) * itemsize, dtype=np.uint8)
            copy_part(part, shard, held, self.data, shape)
        self.missing -= 1
        return self.missing == 0
