"""Which serving GPUs a job borrows: properties over any history of use, arrivals and departures, and the cases of ROSE 4."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.policies.serving.server_borrowing import (
    CROWDED,
    GONE,
    RECLAIMED,
    BorrowChange,
    BorrowDemand,
    BorrowRules,
    RecentUse,
    ServerBroker,
    turns_within,
)

GPUS = tuple(f"gpu-{number}" for number in range(6))
JOBS = ("one", "two")
shares = st.floats(0, 1, allow_nan=False)


def cluster(uses: dict[str, float], **rules: float) -> ServerBroker:
    made = ServerBroker(BorrowRules(**rules))
    for name, share in uses.items():
        made.observe_gpu(name, 0.0, share)
    return made


# What a job gets.


def test_a_job_gets_the_least_used_and_another_job_only_what_is_left() -> None:
    found = cluster({"a": 0.5, "b": 0.1, "c": 0.3, "d": 0.2})
    assert found.choose_gpus("one", 2, 10.0) == BorrowChange(("b", "d"))
    assert found.choose_gpus("two", 4, 10.0) == BorrowChange(("c", "a"))
    assert found.gpus_of("one") == ("b", "d")
    assert found.choose_gpus("three", 1, 10.0) == BorrowChange()


def test_use_counts_over_the_window_weighed_by_time_and_not_at_the_moment() -> None:
    found = cluster({"steady": 0.3, "bursty": 0.0}, window=100.0)
    found.observe_gpu("bursty", 90.0, 1.0)  # 10 of 100 s
    assert found.recent_use("bursty", 100.0) == pytest.approx(0.1)
    found.observe_gpu("steady", 100.0, 0.3)
    assert found.choose_gpus("one", 1, 100.0) == BorrowChange(("bursty",))


def test_what_is_older_than_the_window_counts_no_more() -> None:
    use = RecentUse(10.0)
    for time in range(100):
        use.add_sample(float(time), 1.0 if time < 50 else 0.0)
    assert use.mean(99.0) == 0.0
    assert use.mean(55.0 + 44.0) == 0.0


def test_a_job_keeps_what_it_has_until_another_is_clearly_less_used() -> None:
    found = cluster({"a": 0.2, "b": 0.5}, window=10.0, margin=0.1, silent=1000.0)
    assert found.choose_gpus("one", 1, 0.0) == BorrowChange(("a",))
    found.observe_gpu("a", 1.0, 0.55)
    assert found.choose_gpus("one", 1, 100.0) == BorrowChange()  # 0.05 are not worth an activation
    found.observe_gpu("a", 100.0, 0.9)
    assert found.choose_gpus("one", 1, 200.0, exchange=False) == BorrowChange()  # not in the middle of a step
    assert found.choose_gpus("one", 1, 200.0) == BorrowChange(("b",), ("a",))


def test_one_that_leaves_is_lost_to_its_job_and_replaced_at_once() -> None:
    found = cluster({"a": 0.1, "b": 0.2, "c": 0.3})
    found.choose_gpus("one", 2, 0.0)
    assert found.remove_gpu("a") == "one"
    assert found.remove_gpu("a") == ""
    assert found.choose_gpus("one", 2, 1.0, exchange=False) == BorrowChange(("c",))
    found.observe_gpu("a", 2.0, 0.1)  # it is back, as one that is new
    assert found.choose_gpus("two", 2, 2.0) == BorrowChange(("a",))


def test_one_that_is_silent_is_given_to_nobody_and_taken_from_its_job() -> None:
    found = cluster({"a": 0.1, "b": 0.9}, silent=5.0)
    found.choose_gpus("one", 1, 0.0)
    found.observe_gpu("b", 6.0, 0.9)
    assert found.silent_gpus(6.0) == ("a",)
    assert found.choose_gpus("one", 1, 6.0, exchange=False) == BorrowChange(("b",), ("a",))
    assert found.choose_gpus("two", 1, 6.0) == BorrowChange()


def test_fewer_wanted_gives_back_the_most_used_and_the_end_gives_back_all() -> None:
    found = cluster({"a": 0.1, "b": 0.2, "c": 0.3})
    found.choose_gpus("one", 3, 0.0)
    assert found.choose_gpus("one", 1, 1.0) == BorrowChange((), ("b", "c"))
    assert found.choose_gpus("one", 0, 1.5).given_back == ("a",)
    assert found.choose_gpus("two", 3, 2.0) == BorrowChange(("a", "b", "c"))


@pytest.mark.parametrize("wrong", [{"window": 0.0}, {"margin": 1.5}, {"margin": -0.1}, {"silent": float("inf")}])
def test_rules_that_make_no_sense_are_refused_by_name(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        BorrowRules(**wrong)


def test_a_share_beyond_the_whole_and_a_job_without_a_name_are_refused() -> None:
    found = ServerBroker()
    with pytest.raises(ValueError, match="share"):
        found.observe_gpu("a", 0.0, 1.1)
    with pytest.raises(ValueError, match="name"):
        found.choose_gpus("", 1, 0.0)


# Always.

events = st.lists(
    st.one_of(
        st.tuples(st.just("saw"), st.sampled_from(GPUS), shares),
        st.tuples(st.just("left"), st.sampled_from(GPUS), st.just(0.0)),
        st.tuples(st.just("ask"), st.sampled_from(JOBS), st.floats(0, 5)),
        st.tuples(st.just("fill"), st.sampled_from(JOBS), st.floats(0, 5)),
        st.tuples(st.just("end"), st.sampled_from(JOBS), st.just(0.0)),
    ),
    max_size=60,
)


@given(events)
def test_whatever_happens_a_gpu_has_one_job_and_a_job_no_more_than_it_asked_for(history: list[tuple]) -> None:  # type: ignore[type-arg]
    found = ServerBroker(BorrowRules(window=20.0, silent=15.0, margin=0.1))
    here: dict[str, float] = {}
    owned: dict[str, set[str]] = {job: set() for job in JOBS}  # kept by what the changes say alone
    for now, (what, name, value) in enumerate(history):
        if what == "saw":
            found.observe_gpu(name, float(now), value)
            here[name] = float(now)
        elif what == "left":
            assert found.remove_gpu(name) == next((job for job in JOBS if name in owned[job]), "")
            here.pop(name, None)
            for job in JOBS:
                owned[job].discard(name)
        elif what == "end":
            assert set(found.choose_gpus(name, 0, float(now)).given_back) == owned[name]
            owned[name].clear()
        else:
            before = set(owned[name])
            change = found.choose_gpus(name, int(value), float(now), exchange=what == "ask")
            assert set(change.given_back) <= before
            assert not set(change.taken) & before
            owned[name] = (before - set(change.given_back)) | set(change.taken)
            living = {gpu for gpu, heard in here.items() if now - heard <= 15.0}
            others = owned[JOBS[1 - JOBS.index(name)]]
            assert owned[name] <= living
            assert len(owned[name]) == min(int(value), len(living - others))  # all that may be had, no more
            if what == "fill":  # nothing is exchanged in the middle of a step
                assert not change.given_back or not change.taken or set(change.given_back) - living
            assert found.choose_gpus(name, int(value), float(now), exchange=what == "ask") == BorrowChange()
        assert not owned[JOBS[0]] & owned[JOBS[1]]
        assert all(set(found.gpus_of(job)) == owned[job] for job in JOBS)


@given(st.dictionaries(st.sampled_from(GPUS), shares, min_size=1), st.integers(0, 6))
def test_no_gpu_that_is_left_was_used_less_than_one_that_is_taken(uses: dict[str, float], most: int) -> None:
    found = cluster(uses)
    taken = set(found.choose_gpus("one", most, 10.0).taken)
    if taken and taken != set(uses):
        assert max(uses[name] for name in taken) <= min(uses[name] for name in set(uses) - taken)


@given(st.lists(st.tuples(st.floats(0, 10), shares), min_size=1, max_size=30), st.floats(1, 50))
def test_the_mean_is_that_of_the_values_integrated_step_by_step(
    steps: list[tuple[float, float]], window: float
) -> None:
    use, now, values = RecentUse(window), 0.0, []
    for seconds, share in steps:
        use.add_sample(now, share)
        values.append((now, share))
        now += seconds
    since = max(values[0][0], now - window)
    if now > since:
        ends = [*(start for start, _ in values[1:]), now]
        area = sum(max(0.0, end - max(start, since)) * share for (start, share), end in zip(values, ends, strict=True))
        assert use.mean(now) == pytest.approx(area / (now - since), abs=1e-6)


# How many turns.


@given(st.integers(-5, 10**6), st.floats(1, 10**5), st.integers(0, 64))
def test_turns_fit_into_the_budget_and_under_the_cap(budget: int, context: float, most: int) -> None:
    turns = turns_within(budget, context, most)
    assert not most or turns <= most
    assert (turns == 0) == (budget <= 0)
    if turns > 1:
        assert turns * context <= budget * (1 + 1e-9)
    if budget > 0 and (not most or turns < most):
        assert (turns + 1) * context >= budget * (1 - 1e-9)  # no fewer than fit


# Hysteresis.


def test_a_crowded_one_is_given_back_and_taken_again_only_when_it_is_clearly_calm_and_has_rested() -> None:
    found = cluster({"a": 0.2}, window=1.0, crowded=0.8, margin=0.2, rest=50.0, silent=1000.0)
    assert found.choose_gpus("one", 1, 0.0) == BorrowChange(("a",))
    found.observe_gpu("a", 10.0, 0.9)
    change = found.choose_gpus("one", 1, 20.0)
    assert (change, change.reasons) == (BorrowChange((), ("a",)), (CROWDED,))
    found.observe_gpu("a", 30.0, 0.1)
    assert found.choose_gpus("one", 1, 69.0) == BorrowChange(), "it rests"
    found.observe_gpu("a", 70.0, 0.7)
    assert found.choose_gpus("one", 1, 80.0) == BorrowChange(), "less than crowded, and not by the margin"
    found.observe_gpu("a", 81.0, 0.6)
    assert found.choose_gpus("one", 1, 90.0) == BorrowChange(("a",))
    found.observe_gpu("a", 91.0, 0.75)
    assert found.choose_gpus("one", 1, 99.0) == BorrowChange(), "and it stays, inside the band"


def test_what_lends_nothing_for_longer_than_patience_is_given_back_and_a_short_cut_moves_nobody() -> None:
    found = cluster({"a": 0.0, "b": 0.5}, patience=30.0, silent=1000.0, margin=0.0)
    found.choose_gpus("one", 1, 0.0)
    found.observe_gpu("a", 10.0, 0.0, lends=False)
    assert found.choose_gpus("one", 1, 30.0) == BorrowChange()
    found.observe_gpu("a", 31.0, 0.0)
    found.observe_gpu("a", 32.0, 0.0, lends=False)
    assert found.choose_gpus("one", 1, 61.0) == BorrowChange()
    change = found.choose_gpus("one", 1, 63.0)
    assert (change, change.reasons) == (BorrowChange(("b",), ("a",)), (RECLAIMED,))
    assert found.choose_gpus("two", 1, 64.0) == BorrowChange(), "nobody gets it while it lends nothing"


def test_the_least_that_a_job_asks_to_keep_it_keeps_whatever_is_wrong_until_there_is_another() -> None:
    found = cluster({"a": 0.1}, window=1.0, crowded=0.8, silent=5.0)
    found.choose_gpus("one", 1, 0.0)
    found.observe_gpu("a", 1.0, 0.95)
    assert found.choose_gpus("one", 1, 4.0, least=1) == BorrowChange()
    assert found.choose_gpus("one", 1, 100.0, least=1) == BorrowChange(), "it is silent, too"
    found.observe_gpu("b", 100.0, 0.3)
    change = found.choose_gpus("one", 1, 101.0, least=1)
    assert (change, change.reasons) == (BorrowChange(("b",), ("a",)), (GONE,))


def test_one_that_was_refused_is_left_alone_for_a_while_and_one_that_is_new_brings_its_past() -> None:
    found = cluster({"a": 0.1}, rest=10.0)
    assert found.choose_gpus("one", 1, 0.0) == BorrowChange(("a",))
    found.record_refusal("a", 1.0)
    assert (found.gpus_of("one"), found.choose_gpus("one", 1, 10.0)) == ((), BorrowChange())
    assert found.choose_gpus("one", 1, 11.0) == BorrowChange(("a",))
    found.observe_gpu("b", 100.0, 0.0, before=(0.6, 50.0))
    assert found.recent_use("b", 150.0) == pytest.approx(0.3)


@given(st.lists(st.tuples(st.floats(0, 40), st.integers(0, 60)), min_size=1, max_size=30), st.integers(1, 20))
def test_fewer_are_wanted_only_when_the_whole_idle_time_would_have_done_with_fewer(
    seen: list[tuple[float, int]], cap: int
) -> None:
    demand, now, history = BorrowDemand(60.0), 0.0, list[tuple[float, int]]()
    for passed, turns in seen:
        now += passed
        demand.observe_turns(now, turns)
        history.append((now, turns))
        wanted = demand.gpus_wanted(now, 10, cap, 5)
        recent = [turns for when, turns in history if when >= now - 60.0]
        assert 0 <= wanted <= 5
        if now - history[0][0] < 60.0:
            assert wanted == 5
        else:
            assert wanted == min(5, max(0, -((10 - max(recent)) // cap)))
        assert demand.gpus_wanted(now, None, cap, 5) == demand.gpus_wanted(now, 10, 0, 5) == 5, (
            "where nothing is limited"
        )


@given(st.lists(st.floats(0.65, 0.85), min_size=3, max_size=60))
def test_use_that_swings_inside_the_band_changes_a_server_once_at_most(shares: list[float]) -> None:
    found = cluster({"a": 0.5}, window=1.0, crowded=0.8, margin=0.2, silent=1000.0)
    found.choose_gpus("one", 1, 0.0)
    changes = 0
    for number, share in enumerate(shares):
        found.observe_gpu("a", 2.0 * number + 1, share)
        change = found.choose_gpus("one", 1, 2.0 * number + 2)
        changes += len(change.taken) + len(change.given_back)
    assert changes <= 1


@pytest.mark.parametrize("wrong", [{"crowded": 1.5}, {"crowded": 0.0}, {"patience": -1.0}, {"rest": float("nan")}])
def test_wrong_rules_of_return_are_refused_by_name(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        BorrowRules(**wrong)
