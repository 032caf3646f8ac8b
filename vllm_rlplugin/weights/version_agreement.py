"""Do the ranks of one engine hold one version of the weights, and all of it? For the engine process; stdlib only.

Input: what every rank reports (``rl_report``, :func:`vllm_rlplugin.weights.transfer_engine.report`), in any order.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Box = tuple[tuple[int, int], ...]  # start and stop in every dimension


def find_disagreement(reports: Sequence[Mapping[str, Any]]) -> str | None:
    """None, or why this engine must not serve: a rank is missing or unusable, versions or replicas differ, or a part of a
    checkpoint tensor is on no rank.

    A tensor of which no rank takes anything is what vLLM's loader leaves out from this checkpoint (a tied head, rotary
    tables, layers for speculation); every rank has checked that all of its parameters come from the version. Where a rank
    went through vLLM's reload its slices are not known, and only its state and version are compared.
    """
    size = reports[0].get("world_size") if reports else 0
    ranks = sorted(report.get("rank", -1) for report in reports)
    if not reports or ranks != list(range(size or 0)):
        return f"ranks {ranks} reported, the engine has {size}"
    for report in reports:
        if report["state"] != "intact":
            return f"rank {report['rank']}: {report['error']}"
    first = reports[0]
    for report in reports[1:]:
        for field in ("version", "checksum", "shapes"):
            if report[field] != first[field]:
                shown = (
                    ""
                    if field == "shapes"
                    else f": {first[field]} on {first['rank']}, {report[field]} on {report['rank']}"
                )
                return f"ranks {first['rank']} and {report['rank']} differ in the {field} of their weights{shown}"
    if not all(report["verified"]["slices"] for report in reports):
        return None
    return _compare_replicas(reports) or _find_gap(reports)


def _compare_replicas(reports: Iterable[Mapping[str, Any]]) -> str | None:
    found: dict[tuple[Any, ...], tuple[str, int]] = {}
    for report in reports:
        for tensor, rows in report["slices"].items():
            for offset, size, stride, dtype, digest in rows:
                key = (tensor, offset, tuple(size), tuple(stride), dtype)
                known, rank = found.setdefault(key, (digest, report["rank"]))
                if known != digest:
                    return (
                        f"{tensor}: digest {known} on rank {rank}, {digest} on rank {report['rank']} for the same slice"
                    )
    return None


def _find_gap(reports: Sequence[Mapping[str, Any]]) -> str | None:
    parts: dict[str, set[tuple[int, tuple[int, ...], tuple[int, ...]]]] = {}
    for report in reports:
        for tensor, rows in report["slices"].items():
            known = parts.setdefault(tensor, set())
            known.update((offset, tuple(size), tuple(stride)) for offset, size, stride, _, _ in rows)
    for tensor, slices in parts.items():
        shape = tuple(reports[0]["shapes"][tensor])
        missing = math.prod(shape) - count_covered(shape, slices)
        if missing:
            return f"{tensor}: {missing} of {math.prod(shape)} elements are on no rank"
    return None


def count_covered(shape: tuple[int, ...], slices: Iterable[tuple[int, tuple[int, ...], tuple[int, ...]]]) -> int:
    """How many elements of a contiguous tensor lie in at least one of the slices (offset, size, stride)."""
    boxes = []
    flat: set[int] = set()
    for offset, size, stride in slices:
        if 0 in size:
            continue
        box = _box(shape, offset, size, stride)
        if box is not None:
            boxes.append(box)
        else:  # a view across dimensions: rare, and its elements are counted one by one
            flat.update(_elements(offset, size, stride))
    inside = _union(boxes)
    return inside + sum(1 for element in flat if not any(_holds(box, _place(shape, element)) for box in boxes))


def _box(shape: tuple[int, ...], offset: int, size: tuple[int, ...], stride: tuple[int, ...]) -> Box | None:
    """The slice as a box, when its strides are those of the tensor's own dimensions, in whatever order."""
    strides = _strides(shape)
    starts = _place(shape, offset)
    if math.prod(size) == math.prod(shape) and _real(size, stride) == _real(size, _strides(size)):
        return tuple((0, extent) for extent in shape)  # whole, whatever its shape as a view
    extents = [1] * len(shape)
    for extent, step in _real(size, stride):
        fitting = [
            dim
            for dim, own in enumerate(strides)
            if own == step and shape[dim] > 1 and starts[dim] + extent <= shape[dim]
        ]
        if not fitting:
            return None
        extents[fitting[0]] = extent
    return tuple((start, start + extent) for start, extent in zip(starts, extents, strict=True))


def _union(boxes: Sequence[Box]) -> int:
    """Volume of the union, over the grid that the boxes' faces make; there are few boxes a tensor."""
    if not boxes:
        return 0
    if not boxes[0]:
        return 1  # a scalar
    edges = sorted({edge for box in boxes for edge in box[0]})
    total = 0
    for low, high in itertools.pairwise(edges):
        crossing = [box[1:] for box in boxes if box[0][0] <= low and high <= box[0][1]]
        total += (high - low) * _union(crossing)
    return total


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


def _place(shape: tuple[int, ...], element: int) -> tuple[int, ...]:
    return tuple(element // step % extent for step, extent in zip(_strides(shape), shape, strict=True))


def _real(size: tuple[int, ...], stride: tuple[int, ...]) -> list[tuple[int, int]]:
    return [(extent, step) for extent, step in zip(size, stride, strict=True) if extent > 1]


def _elements(offset: int, size: tuple[int, ...], stride: tuple[int, ...]) -> Iterable[int]:
    if not size:
        yield offset
        return
    for index in range(size[0]):
        yield from _elements(offset + index * stride[0], size[1:], stride[1:])


def _holds(box: Box, place: tuple[int, ...]) -> bool:
    return all(low <= value < high for (low, high), value in zip(box, place, strict=True))
