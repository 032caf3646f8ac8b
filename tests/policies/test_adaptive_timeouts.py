"""Adaptive timeouts: what correct answers took decides, wrong ones never do, and an unsolved case has the fixed limit."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.policies.episodes.adaptive_timeouts import AdaptiveTimeouts, CaseTime


def ran(*seconds: float, limit: float = 30.0) -> list[CaseTime]:
    return [CaseTime(value, limit) for value in seconds]


def test_the_formula_is_that_of_the_paper() -> None:
    policy = AdaptiveTimeouts()
    policy.record_times("p", ran(0.1, 4.0, 25.0), correct=True)
    assert policy.limits("p") == [2.0, 6.0, 30.0]  # least, 1.5 times, most
    policy.record_times("p", ran(0.2, 2.0, 1.0), correct=True)
    assert policy.limits("p") == [2.0, 6.0, 30.0]  # the longest counts
    policy.record_times("p", ran(3.0, 8.0, 1.0), correct=True)
    assert policy.limits("p") == [4.5, 12.0, 30.0]


def test_a_case_that_no_answer_ever_solved_has_the_fixed_limit() -> None:
    policy = AdaptiveTimeouts()
    assert policy.limits("p") == []  # nothing is known of it: whoever asks gives every case ``most``
    policy.record_times("p", [*ran(0.1), CaseTime(30.0, 30.0, cut=True)], correct=False)
    assert policy.limits("p") == []
    assert policy.limits("another prompt") == []


@given(
    st.lists(
        st.tuples(st.sampled_from("pq"), st.lists(st.floats(0.001, 60), min_size=1, max_size=4), st.booleans()),
        max_size=20,
    ),
    st.floats(1, 4),
    st.floats(0.1, 5),
    st.floats(5, 60),
)
def test_whatever_is_noted_limits_follow_from_the_correct_answers_alone(
    answers: list[tuple[str, list[float], bool]], factor: float, least: float, most: float
) -> None:
    policy, shuffled, mute = (AdaptiveTimeouts(factor, least, most) for _ in range(3))
    for prompt, seconds, correct in answers:
        policy.record_times(prompt, ran(*seconds), correct=correct)
    for prompt, seconds, correct in reversed(answers):
        shuffled.record_times(prompt, ran(*seconds), correct=correct)
        if correct:
            mute.record_times(prompt, ran(*seconds), correct=True)
    for prompt in "pq":
        solved = [seconds for name, seconds, correct in answers if name == prompt and correct]
        limits = policy.limits(prompt)
        assert limits == shuffled.limits(prompt) == mute.limits(prompt)
        assert len(limits) == max((len(seconds) for seconds in solved), default=0)
        for place, limit in enumerate(limits):
            anchor = max(seconds[place] for seconds in solved if len(seconds) > place)
            assert limit == min(max(least, factor * anchor), most)
            assert anchor <= limit or limit == most  # a right answer as slow as the slowest is never cut off below most
    restored = AdaptiveTimeouts(factor, least, most)
    restored.restore(json.loads(json.dumps(policy.state())))
    assert all(restored.limits(prompt) == policy.limits(prompt) for prompt in "pq")


def test_what_was_cut_early_and_what_at_the_fixed_limit_are_counted_apart() -> None:
    policy = AdaptiveTimeouts()
    policy.record_times("p", [CaseTime(0.5, 30.0), CaseTime(30.0, 30.0, cut=True)], correct=False)
    policy.record_times("p", [CaseTime(2.0, 2.0, cut=True)], correct=False)
    counts = policy.counts
    assert (counts.cases, counts.adaptive, counts.cut_early, counts.cut_at_most) == (3, 1, 1, 1)
    assert (counts.seconds, counts.saved) == (32.5, 28.0)


def test_anchors_are_bounded_and_the_oldest_go() -> None:
    policy = AdaptiveTimeouts(cases=4)
    for prompt in ("a", "b", "c"):
        policy.record_times(prompt, ran(1.0, 1.0), correct=True)
    assert [bool(policy.limits(prompt)) for prompt in "abc"] == [False, True, True]
    policy.record_times("b", ran(1.0, 1.0), correct=True)
    policy.record_times("d", ran(1.0, 1.0), correct=True)
    assert [bool(policy.limits(prompt)) for prompt in "bcd"] == [True, False, True]
    assert sum(len(anchors) for anchors in policy.state().values()) == 4


@pytest.mark.parametrize(
    ("factor", "least", "most"),
    [(0.9, 2.0, 30.0), (math.nan, 2.0, 30.0), (1.5, 0.0, 30.0), (1.5, 31.0, 30.0), (1.5, 2.0, math.inf)],
)
def test_limits_that_make_no_sense_are_refused(factor: float, least: float, most: float) -> None:
    with pytest.raises(ValueError, match="must be"):
        AdaptiveTimeouts(factor, least, most)


@pytest.mark.parametrize("state", [{"p": [math.nan]}, {"p": [-1.0]}])
def test_a_state_that_is_none_is_refused(state: dict[str, list[float]]) -> None:
    with pytest.raises(ValueError, match="not run times"):
        AdaptiveTimeouts().restore(state)
