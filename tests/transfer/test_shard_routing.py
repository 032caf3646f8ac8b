"""Interval arithmetic: every element of every engine shard is written exactly once, with the right value."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from orchestrator.api import ShardKey
from orchestrator.transfer import CorruptWeightsError, shard_routing
from orchestrator.transfer.shard_routing import Box, Region, ShardIndex

Array = np.ndarray
WIDTH = {"bfloat16": 2, "float32": 4}


def key(tensor: str, dim: int, start: int, stop: int, shape: tuple[int, ...], dtype: str = "bfloat16") -> ShardKey:
    return ShardKey(tensor, dim, start, stop, shape, dtype, "raw", 0)


def as_array(dtype: str) -> type:
    return {"bfloat16": np.uint16, "float32": np.uint32}[dtype]


class Model:
    """A random mixture model in checkpoint coordinates: name -> (values, dimension that tensor parallelism cuts)."""

    def __init__(self, draw: st.DrawFn) -> None:
        size = st.integers(1, 3)
        self.tp = draw(st.sampled_from([1, 2, 4]))  # the trainer's
        self.heads, self.groups = 4 * draw(size), 4
        self.head, self.ffn, self.hidden = draw(size), 4 * draw(size), 4 * draw(size)
        self.vocab, self.layers, self.experts = 4 * draw(st.integers(1, 4)), draw(size), 2 * draw(st.integers(0, 2))
        self.tied = draw(st.booleans())
        self.tensors: dict[str, tuple[Array, int]] = {}
        self._next = 0
        self._make()

    def add(self, name: str, dim: int, *shape: int, dtype: str = "bfloat16") -> None:
        count = math.prod(shape)
        values = (np.arange(self._next, self._next + count) % 65521).astype(as_array(dtype)).reshape(shape)
        self._next += count
        self.tensors[name] = values, dim

    def dtype(self, name: str) -> str:
        return "float32" if self.tensors[name][0].dtype == np.uint32 else "bfloat16"

    def _make(self) -> None:
        q, kv = self.heads * self.head, self.groups * self.head
        self.add("embed", 0, self.vocab, self.hidden)
        for layer in range(self.layers):
            self.add(f"{layer}.norm", -1, self.hidden)
            for name, rows in (("q", q), ("k", kv), ("v", kv)):
                self.add(f"{layer}.{name}", 0, rows, self.hidden)
            self.add(f"{layer}.q_bias", 0, q)
            self.add(f"{layer}.o", 1, self.hidden, q)
            if self.experts:
                self.add(f"{layer}.router", -1, self.experts, self.hidden, dtype="float32")
            for mlp in [f"{layer}.e{e}" for e in range(self.experts)] or [f"{layer}"]:
                self.add(f"{mlp}.gate", 0, self.ffn, self.hidden)
                self.add(f"{mlp}.up", 0, self.ffn, self.hidden)
                self.add(f"{mlp}.down", 1, self.hidden, self.ffn)
        if not self.tied:
            self.add("head", 0, self.vocab, self.hidden)


def published(draw: st.DrawFn, model: Model) -> tuple[list[ShardKey], list[Array]]:
    """What trainer ranks of a random layout export: tensor-parallel pieces, cut again into parts, each from one rank.

    Pipeline, expert and data parallelism decide only which rank a part comes from, so the parts come in any order.
    """
    keys: list[ShardKey] = []
    for name, (values, dim) in model.tensors.items():
        pieces = model.tp if dim >= 0 else 1
        along = max(dim, 0)
        size = values.shape[along]
        cuts = {size * piece // pieces for piece in range(pieces + 1)}
        cuts |= set(draw(st.lists(st.integers(0, size), max_size=3)))
        if cuts == {0, size} and draw(st.booleans()):
            keys.append(key(name, -1, 0, 0, values.shape, model.dtype(name)))
            continue
        keys += [key(name, along, a, b, values.shape, model.dtype(name)) for a, b in pairwise(sorted(cuts))]
    keys = draw(st.permutations(keys))
    return keys, [taken(model.tensors[key.tensor][0], shard_routing.box_of(key)) for key in keys]


def taken(values: Array, box: Box) -> Array:
    """The bytes of a box, made by numpy alone."""
    return np.ascontiguousarray(values[tuple(slice(*bounds) for bounds in box)]).reshape(-1).view(np.uint8)


def engine_parameters(model: Model, tp: int, pp: int) -> Iterator[tuple[str, list[Region]]]:
    """The parameters of all ranks of an engine: what of which tensors each one stacks along dim 0, as vLLM fuses them."""

    def rows(name: str, rank: int, parts: int = tp) -> Region:
        values, dim = model.tensors[name]
        dim = max(dim, 0)
        size = values.shape[dim]
        box = list(shard_routing.whole_box(values.shape))
        box[dim] = size * rank // parts, size * (rank + 1) // parts
        return Region(name, tuple(box))

    for layer in range(model.layers):
        stage = layer * pp // model.layers
        for rank in range(tp):
            at = f"rank {rank} of stage {stage}: {layer}"
            kv = rank if tp <= model.groups else rank * model.groups // tp, min(tp, model.groups)  # else replicated
            yield f"{at}.qkv", [rows(f"{layer}.q", rank), rows(f"{layer}.k", *kv), rows(f"{layer}.v", *kv)]
            yield f"{at}.q_bias", [rows(f"{layer}.q_bias", rank)]
            yield f"{at}.o", [rows(f"{layer}.o", rank)]
            yield f"{at}.norm", [rows(f"{layer}.norm", 0, 1)]
            if model.experts:
                yield f"{at}.router", [rows(f"{layer}.router", 0, 1)]
            mlps = [f"{layer}.e{e}" for e in range(model.experts)] or [f"{layer}"]
            yield f"{at}.gate_up", [rows(f"{mlp}.{c}", rank) for mlp in mlps for c in ("gate", "up")]
            yield f"{at}.down", [rows(f"{mlp}.down", rank) for mlp in mlps]
    for rank in range(tp):
        yield f"rank {rank}: embed", [rows("embed", rank)]
        yield f"rank {rank}: head", [rows("embed" if model.tied else "head", rank)]


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(st.data())
def test_every_element_of_every_engine_shard_is_written_exactly_once_with_the_right_value(data: st.DataObject) -> None:
    """Any trainer layout to any engine layout: fused qkv and gate-up, tied embeddings, norms, experts, fp32 routers."""
    model = data.draw(st.composite(Model)())
    keys, stored = data.draw(st.composite(lambda draw: published(draw, model))())
    tp, pp = data.draw(st.sampled_from([1, 2, 4, 8])), data.draw(st.integers(1, 3))
    index = ShardIndex(keys)
    for name, regions in engine_parameters(model, tp, pp):
        for region in regions:
            expected = taken(model.tensors[region.tensor][0], region.box)
            shape = shard_routing.box_shape(region.box)
            found = np.zeros_like(expected)
            written = np.zeros(shape, dtype=int)
            for part in index.parts(region):
                held = shard_routing.box_shape(shard_routing.box_of(keys[part.shard]))
                shard_routing.copy_part(part, stored[part.shard], held, found, shape)
                written[tuple(slice(*bounds) for bounds in part.target)] += 1
            assert (written == 1).all(), f"{name}: {region}"
            assert np.array_equal(found, expected), f"{name}: {region}"


@given(st.data())
def test_a_strided_view_is_found_again_in_the_box_around_it(data: st.DataObject) -> None:
    """Views as vLLM's loaders make them (narrowed, transposed, reshaped, flattened), and any others."""
    shape = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
    tensor = np.arange(math.prod(shape)).reshape(shape)
    view = tensor
    for _ in range(data.draw(st.integers(0, 4))):
        kind = data.draw(st.sampled_from(["narrow", "transpose", "flatten", "split", "diagonal"]))
        if kind == "narrow":
            dim = data.draw(st.integers(0, view.ndim - 1))
            start = data.draw(st.integers(0, view.shape[dim] - 1))
            stop = data.draw(st.integers(start, view.shape[dim]))
            if stop > start:
                view = view[tuple([slice(None)] * dim + [slice(start, stop)])]
        elif kind == "transpose":
            view = view.transpose(data.draw(st.permutations(range(view.ndim))))
        elif kind == "flatten" and view.flags.c_contiguous:
            view = view.reshape(-1)
        elif kind == "split" and view.flags.c_contiguous and view.shape[0] % 2 == 0:
            view = view.reshape(2, -1, *view.shape[1:])
        elif kind == "diagonal" and view.ndim == 2:
            view = np.diagonal(view)
    offset = (view.__array_interface__["data"][0] - tensor.__array_interface__["data"][0]) // 8
    stride = tuple(step // 8 for step in view.strides)
    box = shard_routing.bounding_box(shape, offset, view.shape, stride)
    extra = tuple(
        (data.draw(st.integers(0, a)), data.draw(st.integers(b, size))) for (a, b), size in zip(box, shape, strict=True)
    )
    for around in (box, shard_routing.enclosing_box(box, extra), shard_routing.whole_box(shape)):
        held = tensor[tuple(slice(*bounds) for bounds in around)].copy()
        start, steps = shard_routing.rebase_view(shape, around, offset, view.shape, stride)
        again = np.lib.stride_tricks.as_strided(held.reshape(-1)[start:], view.shape, [8 * step for step in steps])
        assert np.array_equal(again, view)


def test_a_view_that_leaves_its_tensor_is_refused() -> None:
    with pytest.raises(ValueError, match="ends at element 12"):
        shard_routing.bounding_box((3, 4), 1, (3, 4), (4, 1))
    with pytest.raises(ValueError, match="stride"):
        shard_routing.bounding_box((3, 4), 0, (3,), (-1,))
    assert shard_routing.bounding_box((3, 4), 1, (2, 2), (4, 1)) == ((0, 2), (1, 3))
    assert shard_routing.bounding_box((3, 4), 3, (2,), (1,)) == ((0, 2), (0, 4))  # over the end of a row: whole rows
    assert shard_routing.bounding_box((3, 4), 0, (0, 4), (4, 1)) == ((0, 0), (0, 0))


SHARDS = [key("w", 0, 0, 4, (10, 3)), key("w", 0, 4, 9, (10, 3)), key("w", 0, 9, 10, (10, 3)), key("n", -1, 0, 0, (5,))]


@pytest.mark.parametrize(
    ("shards", "problem"),
    [
        ([*SHARDS[:1], *SHARDS[2:]], r"tensor w: 4:9 of dimension 0 is missing"),
        (SHARDS[1:], "tensor w: 0:4 of dimension 0 is missing"),
        ([*SHARDS[:2], SHARDS[3]], "tensor w: 9:10 of dimension 0 is missing"),
        ([*SHARDS, SHARDS[1]], "tensor w: 4:9 of dimension 0 comes twice"),
        ([*SHARDS, SHARDS[3]], "tensor n: comes 2 times"),
        ([replace(SHARDS[0], stop=5), *SHARDS[1:]], "tensor w: 4:5 of dimension 0 comes twice"),
        ([replace(SHARDS[0], start=1), *SHARDS[1:]], "tensor w: 0:1 of dimension 0 is missing"),
        ([*SHARDS[:2], replace(SHARDS[2], stop=11), SHARDS[3]], r"w\[0:9:11\] is not a part of 0:10"),
        ([replace(SHARDS[0], start=-4), *SHARDS[1:]], "is not a part of 0:10"),
        ([replace(SHARDS[0], start=4, stop=0), *SHARDS[1:]], "is not a part of 0:10"),
        ([replace(SHARDS[0], dim=1, stop=3), *SHARDS[1:]], "tensor w: .* differ"),
        ([replace(SHARDS[0], global_shape=(11, 3)), *SHARDS[1:]], "tensor w: .* differ"),
        ([replace(SHARDS[0], dtype="float32"), *SHARDS[1:]], "tensor w: .* differ"),
        ([replace(SHARDS[3], dim=1, stop=5)], "tensor n: has no dimension 1"),
        ([replace(SHARDS[3], stop=5)], "tensor n: a whole tensor has no start and stop"),
    ],
)
def test_forged_overlapping_and_missing_shards_are_refused_by_name(shards: list[ShardKey], problem: str) -> None:
    shard_routing.check_tiling(SHARDS)
    with pytest.raises(CorruptWeightsError, match=problem) as caught:
        ShardIndex(shards)
    assert caught.value.reason == "layout"


def test_what_was_not_published_is_refused_by_name() -> None:
    index = ShardIndex(SHARDS)
    for region in (Region("x", ()), Region("w", ((0, 11), (0, 3))), Region("w", ((0, 5),)), Region("n", ((3, 2),))):
        with pytest.raises(CorruptWeightsError, match=f"tensor {region.tensor}"):
            index.parts(region)
    assert index.needed_shards([Region("w", ((3, 5), (1, 2))), Region("n", ((0, 1),))]) == [0, 1, 3]
    assert index.parts(Region("w", ((4, 4), (0, 3)))) == []


def test_labels_name_the_slice() -> None:
    assert [shard_routing.shard_label(shard) for shard in SHARDS] == ["w[0:0:4]", "w[0:4:9]", "w[0:9:10]", "n"]
