"""Blocks of KV over ranks: what one layout wrote, every other reads, bit for bit. On made-up caches, without an engine."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from vllm_rlplugin.kv.blocks import KvLayout, RankCache, RankPart, owned_heads

torch = pytest.importorskip("torch")
LAYERS, HEADS, TOKENS, HEAD = 4, 4, 32, 8
BLOCKS = 6


def model_cache() -> dict[str, torch.Tensor]:
    """vLLM's views [blocks, heads, tokens, content] of a whole model."""
    generator = torch.Generator().manual_seed(3)
    return {
        f"layer.{index}": torch.randn(BLOCKS, HEADS, TOKENS, 2 * HEAD, generator=generator) for index in range(LAYERS)
    }


def cut(whole: dict[str, torch.Tensor], tp: int, pp: int) -> tuple[KvLayout, list[RankCache]]:
    """The caches of an engine's ranks, and how they fit together."""
    parts, caches = [], []
    for stage, rank in itertools.product(range(pp), range(tp)):
        head, heads = owned_heads(HEADS, rank, tp)
        mine = list(whole)[stage * LAYERS // pp : (stage + 1) * LAYERS // pp]
        cache = RankCache({name: whole[name][:, head : head + heads].clone() for name in mine}, TOKENS)
        parts.append(RankPart(cache.layers, cache.parts, head, heads, HEADS, cache.tokens, cache.width))
        caches.append(cache)
    return KvLayout.from_ranks(parts), caches


@pytest.mark.parametrize("source", [(1, 1), (2, 1), (4, 1), (8, 1), (2, 2), (1, 4)])
@pytest.mark.parametrize("target", [(1, 1), (2, 1), (8, 1), (2, 2), (1, 2)])
def test_any_layout_reads_what_any_other_wrote(source: tuple[int, int], target: tuple[int, int]) -> None:
    whole = model_cache()
    theirs, from_ranks = cut(whole, *source)
    ours, to_ranks = cut({name: torch.zeros_like(cache) for name, cache in whole.items()}, *target)
    assert theirs.facts == ours.facts
    rows = theirs.join_parts([cache.read([4, 1, 3]) for cache in from_ranks])
    assert rows.shape == (3, ours.block_bytes)
    for cache, data in zip(to_ranks, ours.cut_rows(rows), strict=True):
        cache.write([0, 5, 2], list(np.frombuffer(data, np.uint8).reshape(3, -1)))
    _, expected = cut(whole, *target)
    for cache, wanted in zip(to_ranks, expected, strict=True):
        assert cache.read([0, 5, 2]) == wanted.read([4, 1, 3])
        assert cache.read([1, 3, 4]) == bytes(len(cache.read([1, 3, 4])))  # the others are untouched


def test_a_block_of_the_scheduler_may_be_several_of_the_kernel() -> None:
    whole = model_cache()
    halves = {name: cache.reshape(BLOCKS * 2, HEADS, TOKENS // 2, 2 * HEAD) for name, cache in whole.items()}
    cache = RankCache(halves, TOKENS)
    assert cache.parts == 2
    row = cache.read([2])
    cache.write([5], [np.frombuffer(row, np.uint8)])
    assert cache.read([5]) == row
    for view in halves.values():
        torch.testing.assert_close(view[10:12], view[4:6], rtol=0, atol=0)


def test_ranks_that_do_not_make_a_whole_are_refused() -> None:
    part = RankPart(("layer.0",), 1, 0, 2, 4, 32, 64)
    with pytest.raises(ValueError, match="KV heads"):
        KvLayout.from_ranks([part])
    other = RankPart(("layer.0",), 1, 2, 2, 4, 16, 64)
    with pytest.raises(ValueError, match="differently"):
        KvLayout.from_ranks([part, other])
    mixed = {"layer.0": torch.zeros(2, 1, 32, 8), "layer.1": torch.zeros(2, 2, 32, 8)}
    with pytest.raises(ValueError, match="shapes"):
        RankCache(mixed, 32)
