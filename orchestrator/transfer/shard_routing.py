"""Which bytes of which published shards an engine rank needs, and where they go: pure interval arithmetic.

A tensor is published as shards (:class:`orchestrator.api.ShardKey`): ranges along ONE dimension, in checkpoint coordinates,
whatever the trainer's tensor, pipeline, expert and data parallelism was. An engine rank wants regions: hyper-rectangles of
the same tensors. Neither side knows the layout of the other (ROSE 4.2: shard-aware transfer); what connects them is here.

Guarantees:

* :func:`check_tiling` accepts shards only if they cover every tensor exactly once; gaps, overlaps, ranges outside of the
  tensor, and different cuts of one tensor are refused, by the tensor's name.
* The parts of a region (:meth:`ShardIndex.parts`) are disjoint, and together they are the region, element by element.

A box is one (start, stop) for each dimension, in elements; a tensor without dimensions has the empty box.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from orchestrator.api import ShardKey
from orchestrator.transfer.bucket import Bytes
from orchestrator.transfer.transfer_errors import CorruptWeightsError

Box = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Region:
    """A wanted part of a tensor, in checkpoint coordinates."""

    tensor: str
    box: Box


@dataclass(frozen=True, slots=True)
class RegionPart:
    """What one shard has of a region. ``source`` counts from the shard's first element, ``target`` from the region's."""

    shard: int  # its place in the sequence that the index was made of
    source: Box
    target: Box


def whole_box(shape: Sequence[int]) -> Box:
    """The box of all of a tensor."""
    return tuple((0, size) for size in shape)


def box_shape(box: Box) -> tuple[int, ...]:
    """Its shape."""
    return tuple(stop - start for start, stop in box)


def box_elements(box: Box) -> int:
    """How many there are in it."""
    return math.prod(box_shape(box))


def box_of(key: ShardKey) -> Box:
    """What of its tensor a shard is."""
    full = whole_box(key.global_shape)
    if key.dim < 0:
        return full
    return (*full[: key.dim], (key.start, key.stop), *full[key.dim + 1 :])


def intersection(one: Box, other: Box) -> Box | None:
    """What both have; None: no element."""
    shared = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return shared if all(start < stop for start, stop in shared) else None


def enclosing_box(one: Box, other: Box) -> Box:
    """The smallest box that has both."""
    return tuple((min(a, c), max(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))


def shard_label(key: ShardKey) -> str:
    """How a shard is called where it is stored: its tensor and its slice. Two shards of one version never share it."""
    return key.tensor if key.dim < 0 else f"{key.tensor}[{key.dim}:{key.start}:{key.stop}]"


def check_tiling(keys: Iterable[ShardKey]) -> None:
    """Raise CorruptWeightsError "layout" unless the shards of each tensor are the tensor, each element exactly once."""
    by_tensor: dict[str, list[ShardKey]] = {}
    for key in keys:
        by_tensor.setdefault(key.tensor, []).append(key)
    for tensor, shards in by_tensor.items():
        problem = _gap_or_overlap(shards)
        if problem:
            raise CorruptWeightsError("layout", f"tensor {tensor}: {problem}")


def _gap_or_overlap(shards: list[ShardKey]) -> str:
    first = shards[0]
    for key in shards:
        if (key.dim, key.global_shape, key.dtype) != (first.dim, first.global_shape, first.dtype):
            one, other = (f"{shard_label(one)} {one.global_shape} {one.dtype}" for one in (key, first))
            return f"{one} and {other} differ"
    if first.dim < 0:
        if any((key.start, key.stop) != (0, 0) for key in shards):
            return "a whole tensor has no start and stop"
        return "" if len(shards) == 1 else f"comes {len(shards)} times"
    if first.dim >= len(first.global_shape):
        return f"has no dimension {first.dim}"
    size, end = first.global_shape[first.dim], 0
    for key in sorted(shards, key=lambda key: (key.start, key.stop)):
        if not 0 <= key.start < key.stop <= size:
            return f"{shard_label(key)} is not a part of 0:{size}"
        if key.start != end:
            between = f"{min(end, key.start)}:{max(end, key.start)} of dimension {first.dim}"
            return f"{between} {'is missing' if key.start > end else 'comes twice'}"
        end = key.stop
    return "" if end == size else f"{end}:{size} of dimension {first.dim} is missing"


class ShardIndex:
    """Finds the shards that a region needs. Raises as :func:`check_tiling`."""

    def __init__(self, keys: Sequence[ShardKey]) -> None:
        check_tiling(keys)
        self._keys = keys
        self._of: dict[str, list[int]] = {}
        for number in sorted(range(len(keys)), key=lambda number: keys[number].start):
            self._of.setdefault(keys[number].tensor, []).append(number)
        self._starts = {tensor: [keys[number].start for number in numbers] for tensor, numbers in self._of.items()}

    def __contains__(self, tensor: str) -> bool:
        return tensor in self._of

    def shape(self, tensor: str) -> tuple[int, ...]:
        """Of the whole tensor."""
        return self._keys[self._of[tensor][0]].global_shape

    def parts(self, region: Region) -> list[RegionPart]:
        """The region, cut along the shards, in their order. Raises CorruptWeightsError "layout" for what is not there."""
        numbers = self._of.get(region.tensor)
        if numbers is None:
            raise CorruptWeightsError("layout", f"tensor {region.tensor} is wanted and was not published")
        shape = self.shape(region.tensor)
        inside = len(shape) == len(region.box) and all(
            0 <= start <= stop <= size for (start, stop), size in zip(region.box, shape, strict=True)
        )
        if not inside:
            raise CorruptWeightsError("layout", f"tensor {region.tensor}: {region.box} is wanted of {shape}")
        dim = self._keys[numbers[0]].dim
        found: list[RegionPart] = []
        # Sorted and without gaps: the first one needed holds the region's start, the last one lies before its stop.
        first = 0 if dim < 0 else max(bisect_right(self._starts[region.tensor], region.box[dim][0]) - 1, 0)
        for number in numbers[first:]:
            box = box_of(self._keys[number])
            if dim >= 0 and box[dim][0] >= region.box[dim][1]:
                break
            shared = intersection(box, region.box)
            if shared is not None:
                found.append(RegionPart(number, _within(shared, box), _within(shared, region.box)))
        return found

    def needed_shards(self, regions: Iterable[Region]) -> list[int]:
        """The shards that any of the regions needs, ascending."""
        return sorted({part.shard for region in regions for part in self.parts(region)})


def copy_part(part: RegionPart, shard: Bytes, held: Sequence[int], region: Bytes, shape: Sequence[int]) -> None:
    """Copy a part. ``shard`` and ``region``: contiguous bytes of arrays of the shapes ``held`` and ``shape``."""
    itemsize = shard.nbytes // max(math.prod(held), 1)
    source = _elements(shard, held, itemsize)[tuple(slice(*bounds) for bounds in part.source)]
    target = _elements(region, shape, itemsize)[tuple(slice(*bounds) for bounds in part.target)]
    target[...] = source


class RegionAssembler:
    """Regions, put together from shards that come one after the other, in any order: each is handed out as soon as its last
    shard is there, and once. A shard that is a whole region is handed out as it is, without a copy; it is valid as long as the
    caller keeps the shard's bytes. Raises CorruptWeightsError "layout" for shards that are not every tensor exactly once, and
    for a region of none.

    ``needed``: places in ``shards`` of those that any region is made of; ``empty``: regions that no shard is needed for.
    """

    def __init__(self, shards: Sequence[ShardKey], regions: Iterable[Region]) -> None:
        self._shards = shards
        self._open: dict[int, _OpenRegion] = {}
        self._by_shard: dict[int, list[tuple[int, RegionPart]]] = {}
        self.empty: list[tuple[Region, Bytes]] = []
        index = ShardIndex(shards)
        for place, region in enumerate(regions):
            parts = index.parts(region)
            if not parts:
                self.empty.append((region, np.empty(0, dtype=np.uint8)))
                continue
            self._open[place] = _OpenRegion(region, len(parts))
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


class _OpenRegion:
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


def bounding_box(shape: Sequence[int], offset: int, size: Sequence[int], stride: Sequence[int]) -> Box:
    """The smallest box around a strided view of a contiguous tensor (as ``as_strided`` takes it, in elements).

    Exact for views that step along the tensor's dimensions, or along several of them at once; otherwise (a flattened
    tensor, say) whole rows of the first dimension. Raises ValueError for a view that leaves the tensor.
    """
    if any(step < 0 for step in stride) or offset < 0:
        raise ValueError(f"a view of {tuple(shape)} with offset {offset}, stride {tuple(stride)}")
    if math.prod(size) == 0:
        return tuple((0, 0) for _ in shape)
    last = offset + sum((count - 1) * step for count, step in zip(size, stride, strict=True))
    if last >= math.prod(shape):
        raise ValueError(f"a view of {tuple(shape)} that ends at element {last}")
    start = _unravel(offset, shape)
    stop = [
        at
        + sum((count - 1) * _unravel(step, shape)[dim] for count, step in zip(size, stride, strict=True) if count > 1)
        for dim, at in enumerate(start)
    ]
    if all(at < limit for at, limit in zip(stop, shape, strict=True)):
        return tuple((low, high + 1) for low, high in zip(start, stop, strict=True))
    return ((start[0], _unravel(last, shape)[0] + 1), *((0, limit) for limit in shape[1:]))


def rebase_view(
    shape: Sequence[int], box: Box, offset: int, size: Sequence[int], stride: Sequence[int]
) -> tuple[int, tuple[int, ...]]:
    """(offset, stride) of the same view in a contiguous array that holds only ``box``, which has the view's bounding box."""
    if math.prod(size) == 0:
        return 0, tuple(stride)
    steps = [math.prod(box_shape(box)[dim + 1 :]) for dim in range(len(shape))]
    start = [at - low for at, (low, _) in zip(_unravel(offset, shape), box, strict=True)]
    return sum(at * step for at, step in zip(start, steps, strict=True)), tuple(
        sum(at * step for at, step in zip(_unravel(move, shape), steps, strict=True)) if count > 1 else 1
        for count, move in zip(size, stride, strict=True)
    )


def _unravel(element: int, shape: Sequence[int]) -> list[int]:
    """The indices of an element; that of the first dimension may be past its end."""
    indices: list[int] = []
    for size in reversed(shape[1:]):
        indices.append(element % max(size, 1))
        element //= max(size, 1)
    return [element, *reversed(indices)] if shape else []


def _within(box: Box, outer: Box) -> Box:
    return tuple((start - low, stop - low) for (start, stop), (low, _) in zip(box, outer, strict=True))


def _elements(data: Bytes, shape: Sequence[int], itemsize: int) -> Bytes:
    """The bytes as an array of ``shape``, with the bytes of an element in a last dimension."""
    return data.reshape(*shape, itemsize)
