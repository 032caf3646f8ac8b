"""Filters, balance and weights: each keeps what it should, names its reason, and forgets what has left its window."""

from __future__ import annotations

import math
import random
import tempfile
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.api import ConfigError, Prompt, Trajectory, Turn
from orchestrator.build import make_balance, make_filters
from orchestrator.components import Position
from orchestrator.config import parse_config
from orchestrator.policies.batching import trajectory_filters
from orchestrator.policies.batching.trajectory_filters import (
    BatchBalance,
    CompletenessFilter,
    FilterChain,
    QualityFilter,
    RepetitionFilter,
    SimilarityFilter,
    action_ngrams,
)
from orchestrator.policies.training.sample_weights import LagWeight, effective_share
from orchestrator.runtime.resume import Resumed, remember
from orchestrator.store import TrajectoryStore, recent_scored


def said(*turns: tuple[int, ...], group: str = "g", task: str = "t", reward: float = 1.0) -> Trajectory:
    made = tuple(Turn((1,), ids, (-0.5,) * len(ids), ((0, len(ids)),)) for ids in turns)
    return Trajectory("x", group, task, Prompt("k", task, 0, ""), made, reward, "1", 0, False)


def test_completeness_keeps_what_only_ran_into_a_limit_unless_it_is_asked_to_drop_it() -> None:
    whole = said((2, 3))
    assert CompletenessFilter().judge(whole) == ""
    assert CompletenessFilter().judge(replace(whole, errors=("environment died",))) == "errors"
    assert CompletenessFilter().judge(replace(whole, turns=())) == "empty"
    cut = replace(whole, truncated=True)
    assert CompletenessFilter().judge(cut) == ""
    assert CompletenessFilter(drop_truncated=True).judge(cut) == "truncated"
    assert CompletenessFilter(drop_truncated=True).judge(whole) == ""


@pytest.mark.parametrize(
    ("reward", "reason"), [(-0.1, "reward_low"), (0.0, ""), (1.0, ""), (1.5, "reward_high"), (None, "unscored")]
)
def test_quality_keeps_rewards_inside_the_limits_borders_included(reward: float | None, reason: str) -> None:
    assert QualityFilter(0.0, 1.0).judge(replace(said((2,)), reward=reward)) == reason


def test_a_loop_of_short_actions_is_seen_across_turns() -> None:
    loop = said(*[(5, 9)] * 10)
    assert len(action_ngrams(loop, 4)) == 17
    assert RepetitionFilter(4, 0.5).judge(loop) == "repetition"  # 2 distinct of 17
    assert RepetitionFilter(4, 0.9).judge(loop) == ""
    assert RepetitionFilter(4, 0.0).judge(said(tuple(range(2, 40)))) == ""
    assert RepetitionFilter(4, 0.0).judge(said((2, 2, 2))) == ""  # shorter than an n-gram


def test_similarity_is_to_other_groups_of_the_same_task_in_the_window_only() -> None:
    similar = SimilarityFilter(2, 0.5, window=2)
    first = said((2, 3, 4, 5), group="a")
    assert similar.judge(first) == ""
    similar.keep(first)
    assert similar.judge(replace(first, group_id="b")) == "similarity"
    assert similar.judge(first) == ""  # of its own group
    assert similar.judge(replace(first, group_id="b", task="other")) == ""
    assert similar.judge(said((2, 3, 9, 8, 7), group="b")) == ""  # 1 of 4 n-grams is known
    for number in (20, 30):
        similar.keep(said((number, number + 1), group="c"))
    assert similar.judge(replace(first, group_id="b")) == ""  # it has left the window


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.lists(st.integers(2, 5), max_size=6)), max_size=25), st.integers(1, 5)
)
def test_similarity_counts_as_a_recount_of_its_window_does(stream: list[tuple[str, list[int]]], window: int) -> None:
    similar, kept = SimilarityFilter(2, 0.4, window), []
    for group, tokens in stream:
        one = said(tuple(tokens), group=group)
        grams = set(action_ngrams(one, 2))
        others = {gram for other in kept[-window:] if other.group_id != group for gram in action_ngrams(other, 2)}
        expected = bool(grams) and len(grams & others) / len(grams) > 0.4
        assert (similar.judge(one) == "similarity") is expected
        if not expected:
            similar.keep(one)
            kept.append(one)


def test_of_many_long_trajectories_a_sample_is_remembered_and_says_about_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(trajectory_filters, "MOST_NGRAMS", 1000)
    rng, similar = random.Random(1), SimilarityFilter(2, 0.5, window=20)
    texts = [tuple(rng.randrange(2, 10_000) for _ in range(600)) for _ in range(30)]
    for number, text in enumerate(texts):
        similar.keep(said(text, group=f"{number}"))
        assert len(similar._counts["t"]) <= 1000
        assert sum(held.size for _, held in similar._seen["t"]) < 1100
    known, new = texts[-1], tuple(range(20_000, 20_600))
    assert similar.judge(said(known[:400] + new[:200], group="x")) == "similarity"
    assert similar.judge(said(known[:400] + new[:200], group="29")) == "", "its own group"
    assert similar.judge(said(known[:200] + new[:400], group="x")) == ""
    assert similar.judge(said(texts[0], group="x")) == "", "it has left the window"


def test_the_first_filter_that_rejects_names_the_reason_and_nothing_remembers_the_rejected() -> None:
    chain = FilterChain([QualityFilter(low=0.5), SimilarityFilter(2, 0.5, 8)])
    low = said((2, 3, 4), group="a", reward=0.0)
    assert chain.screen(low) == "reward_low"
    assert chain.screen(replace(low, reward=1.0, group_id="b")) == ""  # the rejected one was not remembered
    assert chain.screen(replace(low, reward=1.0, group_id="c")) == "similarity"


@settings(max_examples=100)
@given(st.lists(st.sampled_from("abc"), max_size=20), st.integers(1, 12), st.floats(0.05, 1.0))
def test_a_balanced_batch_keeps_to_the_share_and_takes_whatever_fits(
    kinds: list[str], wanted: int, share: float
) -> None:
    balance = BatchBalance("task", share)
    ready, taken = list(kinds), []
    while len(taken) < wanted and (index := balance.pick_group(ready, taken, wanted)) is not None:
        taken.append(ready.pop(index))
    assert all(taken.count(kind) <= balance.most_of_kind(wanted) for kind in "abc")
    if len(taken) < wanted:  # it stopped only because nothing that is left may be taken
        assert all(taken.count(kind) == balance.most_of_kind(wanted) for kind in ready)


def test_difficulty_is_told_by_the_share_of_positive_rewards() -> None:
    def group(*rewards: float) -> list[Trajectory]:
        return [said((2,), reward=reward) for reward in rewards]

    balance = BatchBalance("difficulty", 0.5)
    kinds = [balance.kind_of(group(*rewards)) for rewards in ((0, 0, 0, 1), (0, 0, 1), (0, 1), (1, 1, 0), (1, 1, 1, 0))]
    assert kinds == ["hard", "medium", "medium", "medium", "easy"]
    assert BatchBalance("task", 0.5).kind_of(group(0.0)) == "t"


def test_the_lag_weight_is_exactly_one_when_off_and_falls_with_the_lag() -> None:
    assert [LagWeight().weight_for(lag) for lag in range(4)] == [1.0] * 4
    assert [LagWeight(0.5).weight_for(lag) for lag in (0, 1, 2)] == [1.0, math.exp(-0.5), math.exp(-1.0)]


@settings(max_examples=100)
@given(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=50))
def test_the_effective_share_lies_between_one_sample_and_all(weights: list[float]) -> None:
    share = effective_share(weights)
    assert 1 / len(weights) - 1e-9 <= share <= 1 + 1e-9
    assert effective_share([2.0] * len(weights)) == pytest.approx(1.0)
    assert effective_share([]) == effective_share([0.0]) == 0.0


def test_what_the_config_switches_on_is_what_filters() -> None:
    assert make_filters(parse_config({}).filters).screen(replace(said((2,)), truncated=True)) == ""
    assert make_filters(parse_config({}).filters).screen(replace(said((2,)), errors=("x",))) == "errors"
    off = parse_config({"filters": {"completeness": False}})
    assert make_filters(off.filters).screen(replace(said((2,)), errors=("x",))) == ""
    values = {"truncated": "drop", "reward_min": 0.0, "ngram": 2, "max_repetition": 0.5, "max_similarity": 0.5}
    chain = make_filters(parse_config({"filters": {**values, "balance": "task"}}).filters)
    assert chain.screen(replace(said((2,)), truncated=True)) == "truncated"
    assert chain.screen(said((2,), reward=-1.0)) == "reward_low"
    assert chain.screen(said((2, 2, 2, 2))) == "repetition"
    assert chain.screen(said((2, 3, 4))) == ""
    assert chain.screen(said((2, 3, 4), group="other")) == "similarity"
    assert make_balance(parse_config({}).filters) is None
    assert make_balance(parse_config({"filters": {"balance": "task"}}).filters) == BatchBalance("task", 0.5)


@pytest.mark.parametrize(
    ("section", "values", "field"),
    [
        ("filters", {"reward_min": 2.0, "reward_max": 1.0}, "filters.reward_min"),
        ("filters", {"truncated": "drop", "completeness": False}, "filters.truncated"),
        ("filters", {"max_repetition": 1.5}, "filters.max_repetition"),
        ("filters", {"balance": "luck"}, "filters.balance"),
        ("rollout", {"buffer_limit": 10}, "rollout.buffer_limit"),
        ("rollout", {"redundant_members": 2.0, "group_size": 40}, "redundant_members"),
    ],
)
def test_contradictory_settings_are_one_clear_error(section: str, values: dict[str, object], field: str) -> None:
    with pytest.raises(ConfigError, match=field.replace(".", r"\.")):
        parse_config({section: values})


def test_what_is_ready_waits_when_all_of_it_is_of_kinds_that_have_their_share() -> None:
    balance = BatchBalance("task", 0.5)
    assert balance.pick_group(["a", "a"], ["a", "a"], 4) is None
    assert balance.pick_group(["a", "b"], ["a", "a"], 4) == 1
    assert balance.pick_group(["a", "b"], ["a", "a", "b", "b"], 4) is None


@settings(max_examples=10)
@given(
    st.lists(
        st.tuples(st.sampled_from("ab"), st.lists(st.integers(2, 4), min_size=2, max_size=6)), min_size=4, max_size=14
    ),
    st.integers(1, 5),
    st.data(),
)
def test_after_a_resume_a_similarity_window_is_what_it_was_at_the_checkpoint(
    stream: list[tuple[str, list[int]]], window: int, data: st.DataObject
) -> None:
    """Some are stored as trained, some were filtered, some waited in the buffer; what was scored later is forgotten."""
    checkpoint = data.draw(st.integers(1, len(stream)))
    before, resumed_filter = SimilarityFilter(2, 0.4, window), SimilarityFilter(2, 0.4, window)
    buffered: list[Trajectory] = []
    with tempfile.TemporaryDirectory() as folder:
        store = TrajectoryStore(folder)
        for number, (task, tokens) in enumerate(stream):
            one = said(tuple(tokens), task=task, group=f"g{number}")
            one = replace(one, id=f"t{number}", scored_at=float(number))
            if number >= checkpoint:  # after it
                store.append(one, 3, "evicted_stale")
                continue
            if reason := before.judge(one):
                store.append(one, 1, f"filtered: {reason}")
                continue
            before.keep(one)
            end = data.draw(st.sampled_from(["trained", "filtered: zero_variance", "aborted_redundant", "buffered"]))
            if end == "buffered":
                buffered.append(one)
            else:
                store.append(one, 1, end)
        store.append(
            replace(said((2, 3, 4), group="f"), id="tf", reward=None, scored_at=0.0), 1, "failed: reward_error"
        )
        store.flush()
        resumed = Resumed(None, Position(buffered=tuple(buffered)), (), float(checkpoint - 1))
        remember(resumed, recent_scored(folder, window, resumed.elapsed), window)
    FilterChain([resumed_filter]).recall(resumed.position.kept)
    held = [
        {task: [(group, grams.tolist()) for group, grams in seen] for task, seen in one._seen.items()}
        for one in (resumed_filter, before)
    ]
    assert held[0] == held[1]
    assert resumed_filter._counts == before._counts
