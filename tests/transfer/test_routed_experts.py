"""Routed experts on their way from an engine to a rank of the trainer: over the wire, in turns that moved, in shards."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.api import (
    Completion,
    ContextStart,
    GenerationRequest,
    Prompt,
    RoutedExperts,
    RunError,
    Sampling,
    TokenSequence,
    Trajectory,
    Turn,
)
from orchestrator.environments.episode_context import EpisodeContext
from orchestrator.policies.episodes.context_rule import ContextRules
from orchestrator.proxy.resume_turn import joined_completion, remaining_request
from orchestrator.shards.sample_references import pack, unpack
from orchestrator.shards.shard_folder import ShardFolder
from orchestrator.train_samples import to_samples
from orchestrator.transfer.turns import decode_completions, decode_turns, encode_completions, encode_turns
from orchestrator.transfer.turns.routed_experts import UNKNOWN, joined_experts, pack_experts, unpack_experts
from vllm_rlplugin.worker.served_worker import ServedWorker

LAYERS, CHOICES = 3, 2
ANSWER = Completion("r", (1, 2, 3), (-0.5, -0.25, -1.0), ((4, 3),), "stop")


def rows(first: int, end: int, width: int = 1) -> np.ndarray:
    """Of each token something else: token, layer and choice can be read from the number."""
    token, layer, choice = np.ogrid[first:end, :LAYERS, :CHOICES]
    return (token * 6 + layer * 2 + choice).astype(f"uint{8 * width}")


def experts(first: int, end: int, width: int = 1) -> RoutedExperts:
    found = pack_experts(rows(first, end, width), first)
    assert found is not None
    return found


@given(first=st.integers(0, 9), tokens=st.integers(1, 12), width=st.sampled_from([1, 2]), since=st.integers(0, 25))
def test_what_was_packed_is_unpacked_and_cut(first: int, tokens: int, width: int, since: int) -> None:
    part = experts(first, first + tokens, width)
    assert (part.end, len(part.data)) == (first + tokens, tokens * LAYERS * CHOICES * width)
    whole = unpack_experts([part], part.end + 2)
    assert whole is not None
    assert np.array_equal(whole[first : part.end], rows(first, part.end))
    assert (whole[:first] == UNKNOWN).all()
    assert (whole[part.end :] == UNKNOWN).all()
    left = unpack_experts([part.since(since)], part.end + 2)
    assert left is not None
    begin = max(first, since)
    assert np.array_equal(left[begin : part.end], whole[begin : part.end])
    assert (left[:begin] == UNKNOWN).all()


def test_what_was_there_when_a_token_was_computed_counts() -> None:
    later = pack_experts(rows(0, 6) + 100, 0)
    assert later is not None
    whole = unpack_experts([experts(0, 4), later], 6)
    assert whole is not None
    assert np.array_equal(whole[:4], rows(0, 4))
    assert np.array_equal(whole[4:], rows(4, 6).astype(np.int16) + 100)
    short = unpack_experts([experts(0, 4)], 2)
    assert short is not None
    assert short.shape == (2, LAYERS, CHOICES)
    assert unpack_experts([], 3) is None
    with pytest.raises(RunError, match="different models"):
        unpack_experts([experts(0, 1), RoutedExperts(1, 1, 1, 1, b"\x00")], 2)


def test_they_cross_the_wire_unchanged_and_a_malformed_one_is_refused() -> None:
    done = [replace(ANSWER, experts=experts(2, 9)), ANSWER, replace(ANSWER, experts=experts(0, 3, 2))]
    message = encode_completions(7, done)
    assert decode_completions(message) == (7, done)
    for damaged in (message[:-1], message + b"x", message.replace(b"\x95\x02\x03\x02\x01", b"\x95\x02\x03\x02\x07")):
        with pytest.raises(ValueError, match="experts"):
            decode_completions(damaged)
    context = TokenSequence(range(5))
    request = GenerationRequest("r", "t", 0, context, Sampling(4), "task", experts_from=3)
    assert decode_turns(encode_turns([(request, context, None)])).turns[0].request.experts_from == 3


def test_an_engines_answer_has_them_from_the_token_that_was_asked_for() -> None:
    request = GenerationRequest("r", "t", 0, tuple(range(6)), Sampling(2), "task", experts_from=4)
    flight = SimpleNamespace(entry=SimpleNamespace(request=request, added_at=0.0), fed_at=0.0)
    span = SimpleNamespace(version="3", start=0, end=2)
    answer = SimpleNamespace(
        token_ids=[1, 2],
        logprobs=SimpleNamespace(logprobs=[-0.5, -0.25]),
        weight_versions=(span,),
        finish_reason="length",
        routed_experts=rows(4, 7),  # of 6 + 2 tokens all but the last one, from the fifth on
    )
    worker = SimpleNamespace(cycle=SimpleNamespace(version_of_label=int))
    output = SimpleNamespace(outputs=[answer], metrics=None)
    done = ServedWorker._completion(worker, flight, output, 1.0)  # type: ignore[arg-type]
    assert done.experts == experts(4, 7)
    assert done.versions == ((3, 2),)


def test_a_turn_that_moved_has_those_of_both_engines() -> None:
    request = GenerationRequest("r", "t", 0, TokenSequence(range(6)), Sampling(9), "task", experts_from=2)
    first = replace(ANSWER, experts=experts(2, 8), finish_reason="abort")  # 6 + 3 tokens, the last one not computed
    following = remaining_request(request, [first], 1)
    assert following is not None
    assert following.experts_from == 8
    whole = joined_completion(request, [first], replace(ANSWER, experts=experts(8, 11)))
    assert whole.experts == experts(2, 11)
    silent = remaining_request(request, [replace(first, experts=None)], 1)
    assert silent is not None
    assert silent.experts_from == 2  # so the second engine says them all
    assert joined_experts([None, experts(2, 11)]) == experts(2, 11)
    assert joined_experts([experts(2, 5), experts(4, 11)]) == experts(2, 11)
    assert joined_experts([experts(2, 5), experts(7, 11)]) == experts(2, 5)  # up to the gap
    assert joined_experts([None, None]) is None


def episode() -> Trajectory:
    """Two contexts: the first of two turns, whose second says what is new; the other one begins anew, and says nothing."""
    start = ContextStart((9, 9), "restart", 1, 4)
    turns = (
        Turn((5, 6), (1, 2), (-0.5, -0.5), ((0, 2),), experts=experts(0, 3)),
        Turn((7,), (3,), (-0.25,), ((1, 1),), experts=experts(3, 5)),
        Turn((8,), (4,), (-0.125,), ((1, 1),), context=start),
    )
    return Trajectory("t", "g", "task", Prompt("k", "task", 0, ""), turns, 1.0, "v", 0, False)


def test_a_sample_has_them_from_memory_and_from_a_shard(tmp_path: Path) -> None:
    folder = ShardFolder(tmp_path / "disk", tmp_path)
    try:
        whole = episode()
        kept = folder.finish(whole)
        assert all(turn.experts is None for turn in kept.turns)  # their bytes lie in the shard alone
        there, referenced = to_samples(whole), to_samples(kept)
        packed = pack(referenced)
        assert packed is not None
        crossed = unpack(packed)
        for memory, sample in zip(there, crossed, strict=True):
            assert sample.source is not None
            assert sample.source.experts() == memory.experts
        assert [one.first for one in there[0].experts] == [0, 3]
        assert there[1].experts == ()
        assert sample.source is not None
        found = unpack_experts(there[0].experts, len(there[0].token_ids))
        assert found is not None
        assert np.array_equal(found[:5], rows(0, 5))
        assert (found[5] == UNKNOWN).all()
        assert crossed[0].source is not None
        assert crossed[0].source.shard.open().trajectory() == whole  # type: ignore[attr-defined]
    finally:
        folder.close()


def test_a_context_that_begins_anew_asks_for_all_of_its_tokens() -> None:
    context = EpisodeContext(ContextRules("keep", 100, 10, 0))
    context.observe((1, 2))
    context.routed = 3
    context.acted((3, 4))
    assert context.routed == 3
    context.begin_anew("restart", (5,))
    assert context.routed == 0
