"""Which pages of an engine's KV range its blocks lie in. Pure numbers, of vLLM's ``KVCacheConfig``.

A *group* is the least run of blocks that begins and ends at a page in every layer: its pages come and go together, and hold
nothing else. In a layer-outermost layout these are some pages of each layer's region; where all layers of a block lie together
it is one run, and the last group may have fewer blocks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vllm_rlplugin.kvpool.ledger.page_ledger import Pages


@dataclass(frozen=True, slots=True)
class PageGeometry:
    """``blocks``: of the engine; ``regions``: (offset of block 0, bytes from one block to the next), in bytes of the range."""

    blocks: int
    regions: tuple[tuple[int, int], ...]
    page_bytes: int
    group_blocks: int

    @classmethod
    def from_regions(cls, blocks: int, regions: Iterable[tuple[int, int]], page_bytes: int) -> PageGeometry:
        """Raises ValueError, with the number of blocks that would do, where groups do not lie in whole pages."""
        found = tuple(sorted(set(regions)))
        if blocks < 1 or not found:
            raise ValueError("there is no KV cache")
        group = math.lcm(*(page_bytes // math.gcd(page_bytes, stride) for _, stride in found))
        wrong = [offset for offset, _ in found if offset % page_bytes]
        if wrong or (blocks % group and len(found) > 1):
            best = max(group, blocks // group * group)
            raise ValueError(
                f"{blocks} blocks of {found[0][1]} bytes do not lie in whole pages of {page_bytes} bytes: give "
                f"--num-gpu-blocks-override {best} (a multiple of {group}), or another page size"
            )
        if group >= blocks:
            raise ValueError(
                f"all {blocks} blocks together are one group of pages of {page_bytes} bytes: give more blocks, or smaller pages"
            )
        return cls(blocks, found, page_bytes, group)

    @property
    def groups(self) -> int:
        """How many there are."""
        return -(-self.blocks // self.group_blocks)

    @property
    def pages_a_group(self) -> int:
        """Pages that come and go together, at most."""
        return sum(self.group_blocks * stride // self.page_bytes for _, stride in self.regions)

    def places(self, groups: Iterable[int]) -> Pages:
        """Places in the range, in pages, of these groups, one group after the other."""
        chosen = np.fromiter(groups, np.int64)
        if chosen.size and not (chosen.min() >= 0 and chosen.max() < self.groups):
            raise ValueError(f"group {chosen.max()} of {self.groups}")
        runs = []
        for offset, stride in self.regions:
            each = self.group_blocks * stride // self.page_bytes
            runs.append(offset // self.page_bytes + chosen[:, None] * each + np.arange(each))
        found = np.concatenate(runs, axis=1).ravel()
        if self.blocks % self.group_blocks:  # the last group has fewer; then there is one region
            ((offset, stride),) = self.regions
            found = found[found < offset // self.page_bytes - (-self.blocks * stride // self.page_bytes)]
        return found.astype(np.uint64)

    def blocks_of(self, group: int) -> range:
        """Block ids."""
        return range(group * self.group_blocks, min(self.blocks, (group + 1) * self.group_blocks))


def regions_of(tensors: Sequence[Any], layout: Any) -> list[tuple[int, int]]:
    """Of vLLM's ``KVCacheTensor`` and ``KVCacheLayout``: (offset of block 0, bytes from one block to the next) of each run of
    blocks. Raises ValueError for a layout in which a block of a layer is not one run of bytes."""
    if layout.is_block_outermost:  # all layers of a block lie together: one run, from its first byte on
        return [(min(tensor.offset for tensor in tensors), tensors[0].block_stride)]
    if not layout.is_block_compact:
        raise ValueError("the heads of a block lie apart there: set VLLM_KV_CACHE_LAYOUT to LBHNC or BLHNC")
    return [
        (tensor.offset + index * tensor.layer_stride, tensor.block_stride)
        for tensor in tensors
        for index in range(len(tensor.layers))
    ]
