"""Where the elements of published shards lie in the live model: interval and stride arithmetic, without any values.

A shard is a box of a checkpoint tensor; a slice (:class:`vllm_rlplugin.weights.checkpoint_mapping.Slice`) is a strided
view of the same tensor and the live view that holds it. Guarantees:

* :func:`locate_inside` finds, for positions in a tensor, those that a view has, and where; each once, exactly.
* :class:`LivePlaces` takes a tensor as *direct* only if every slice of it is a box of the tensor whose live elements
  have the published dtype, bit for bit: differences can then be applied where the values live. All others are
  *indirect* (cast, expanded, or cut across rows), and somebody must keep what was published.
* The places of a shard are where this rank has it: with :meth:`LivePlace.locate` for single elements, and with ``view``
  for all of them at once, in the shard's own order.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from orchestrator.api import ShardKey
from orchestrator.transfer import Region
from orchestrator.transfer.shard_routing import Box, ShardIndex, box_elements, box_of, box_shape
from vllm_rlplugin.weights.checkpoint_mapping import CheckpointLayout, CheckpointMapping, Slice

Index = npt.NDArray[Any]  # positions, int64 or int32
Dim = tuple[int, int, int]  # elements, stride of the source, stride of the target
Chosen = slice | npt.NDArray[np.bool_]


def merge_dims(size: Sequence[int], source: Sequence[int], target: Sequence[int]) -> list[Dim]:
    """The dimensions of a view, outermost first, with those made one that lie behind each other on both sides."""
    found: list[Dim] = []
    for count, one, other in zip(size, source, target, strict=True):
        if count == 1:
            continue
        if found and (found[-1][1], found[-1][2]) == (count * one, count * other):
            found[-1] = (found[-1][0] * count, one, other)
        else:
            found.append((count, one, other))
    return found


def sort_nested(dims: Iterable[Dim], side: int) -> list[Dim] | None:
    """Sorted by the strides of one side (1: source, 2: target); None where a position of it could belong to two elements."""
    ordered = sorted(dims, key=lambda dim: -dim[side])
    reach = 1  # elements that the dimensions inside take at most
    for dim in reversed(ordered):
        if dim[side] < reach:
            return None
        reach = dim[0] * dim[side]
    return ordered


def locate_inside(positions: Index, offset: int, dims: Sequence[Dim]) -> tuple[Chosen, Index]:
    """Which of these ascending positions a view has, and where in its target each of them lies, from the target's start.

    ``offset`` is the position of the view's first element; ``dims`` come from :func:`sort_nested` by their source.
    """
    last = offset + sum((count - 1) * stride for count, stride, _ in dims)
    low, high = (int(place) for place in np.searchsorted(positions, (offset, last + 1)))
    rest = positions[low:high] - offset
    if len(dims) == 1 and dims[0][1] == 1:
        return slice(low, high), rest * dims[0][2] if dims[0][2] != 1 else rest
    there = np.ones(rest.size, np.bool_)
    at = np.zeros_like(rest)
    for count, stride, step in dims:
        number = rest // stride  # by a constant: faster than divmod
        rest = rest - number * stride
        there &= number < count
        at += number * step
    there &= rest == 0
    chosen = np.zeros(positions.size, np.bool_)
    chosen[low:high] = there
    return chosen, at[there]


@dataclass(frozen=True, slots=True, eq=False)
class BoxSlice:
    """A slice that is a box of its tensor."""

    slice: Slice
    dims: list[Dim]  # checkpoint tensor -> the target's own memory, counted from its first element
    box: Box
    view: torch.Tensor  # live, of the box's shape


@dataclass(frozen=True, slots=True, eq=False)
class LivePlace:
    """What a slice has of a shard."""

    slice: Slice
    key: ShardKey
    source: Box  # in the shard
    view: torch.Tensor  # live, of the shape of ``source``
    dims: list[Dim]

    @property
    def has_whole_shard(self) -> bool:
        """Whether it has all of the shard."""
        return box_shape(self.source) == box_shape(box_of(self.key))

    def position_range(self) -> tuple[int, int]:
        """All positions of the shard that lie here are in this range of them; not all of the range need be."""
        last = self.slice.offset + sum((count - 1) * stride for count, stride, _ in self.dims)
        if self.key.dim > 0:
            return 0, box_elements(box_of(self.key))
        begin = self.key.start * math.prod(self.key.global_shape[1:]) if self.key.dim == 0 else 0
        return max(self.slice.offset - begin, 0), min(last + 1 - begin, box_elements(box_of(self.key)))

    def locate(self, positions: Index) -> tuple[Chosen, Index]:
        """Which of these ascending positions in the shard lie here, and where in the slice's live memory."""
        return locate_inside(_in_tensor(self.key, positions), self.slice.offset, self.dims)


class LivePlaces:
    """The live model, as published tensors see it."""

    def __init__(self, mapping: CheckpointMapping, published: CheckpointLayout) -> None:
        self.indirect: list[str] = []
        self._spots: dict[str, list[BoxSlice]] = {}
        for tensor in dict.fromkeys(item.tensor for item in mapping.slices if 0 not in item.size):
            spec = published[tensor]
            spots = [_spot(item, spec.shape) for item in mapping.slices_of(tensor) if 0 not in item.size]
            plain = [spot for spot in spots if spot is not None and spot.view.dtype == spec.dtype]
            if len(plain) == len(spots):
                self._spots[tensor] = plain
            else:
                self.indirect.append(tensor)

    @property
    def direct_tensors(self) -> list[str]:
        """Tensors to which differences can be applied where they live."""
        return list(self._spots)

    def places_of(self, keys: Sequence[ShardKey]) -> dict[int, list[LivePlace]]:
        """The places of each shard of a direct tensor, by its number. Raises CorruptWeightsError as ShardIndex."""
        index = ShardIndex(keys)
        found: dict[int, list[LivePlace]] = {}
        for tensor, spots in self._spots.items():
            for spot in spots:
                for part in index.parts(Region(tensor, spot.box)):
                    view = spot.view[tuple(slice(*bounds) for bounds in part.target)]
                    place = LivePlace(spot.slice, keys[part.shard], part.source, view, spot.dims)
                    found.setdefault(part.shard, []).append(place)
        return found


def cover_shard(places: Sequence[LivePlace]) -> list[LivePlace]:
    """Places that are the shard together, each element once; empty: this rank does not have all of it."""
    for place in places:
        if place.has_whole_shard:
            return [place]
    parts = list({place.source: place for place in places}.values())
    boxes = [place.source for place in parts]
    apart = all(
        any(one[1] <= other[0] or other[1] <= one[0] for one, other in zip(box, boxes[number], strict=True))
        for place, box in enumerate(boxes)
        for number in range(place)
    )
    whole = sum(box_elements(box) for box in boxes) == box_elements(box_of(places[0].key))
    return parts if apart and whole else []


def _spot(item: Slice, shape: tuple[int, ...]) -> BoxSlice | None:
    dims = merge_dims(item.size, item.stride, item.target.stride())
    ordered = sort_nested(dims, 1)
    if ordered is None or sort_nested(dims, 2) is None:
        return None
    found = _box(ordered, item.offset, shape)
    if found is None:
        return None
    box, strides = found
    return BoxSlice(item, ordered, box, item.target.as_strided(box_shape(box), strides, item.target.storage_offset()))


def _box(dims: Sequence[Dim], offset: int, shape: tuple[int, ...]) -> tuple[Box, list[int]] | None:
    """The box of a tensor that a view of it is, and its live strides; None: it is no box."""
    steps = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    start = [offset // step % size for step, size in zip(steps, shape, strict=True)]
    sizes, strides = [1] * len(shape), [1] * len(shape)
    real = [dim for dim in reversed(range(len(shape))) if shape[dim] > 1]  # innermost first
    for count, source, target in dims:
        way = [dim for dim in real if steps[dim] >= source]
        if not way or steps[way[0]] != source:
            return None
        for dim in way:  # one dimension of the view may run over several of the tensor
            if sizes[dim] != 1:
                return None
            if count <= shape[dim] - start[dim]:
                sizes[dim], strides[dim], count = count, target, 1
                break
            if start[dim] or count % shape[dim]:
                return None
            sizes[dim], strides[dim] = shape[dim], target
            count, target = count // shape[dim], target * shape[dim]
        if count != 1:
            return None
    return tuple((first, first + size) for first, size in zip(start, sizes, strict=True)), strides


def _in_tensor(key: ShardKey, positions: Index) -> Index:
    """Positions in a shard as positions in its tensor; both ascend."""
    if key.dim < 0:
        return positions
    row = math.prod(key.global_shape[key.dim + 1 :])
    if key.dim == 0:
        return positions + key.start * row
    part = (key.stop - key.start) * row
    number = positions // part
    found: Index = number * (key.global_shape[key.dim] * row - part) + (positions + key.start * row)
    return found
