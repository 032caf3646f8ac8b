"""The parallelism planner: the paper's rule, where TP may go, what a change must gain, when to profile anew."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.policies.parallelism.engine_profile import EngineLayout, EngineProfile, EngineShape, ProfilePoint
from orchestrator.policies.parallelism.parallelism_planner import (
    LayoutPlan,
    MeasuredStep,
    ParallelismPlanner,
    StepLoad,
    layouts_of,
)
from orchestrator.profiler.measurement import profile_grid

LOAD = StepLoad(0, 100.0)  # no lengths: nothing is known of gains, so nothing keeps the rule from acting
# Made up, in the shape of RollPacker figure 7a: four short rounds and a long one, then calmer ones.
SERIES = (0, 12, 12, 13, 7, 13, 14, 0, 0, 0, 0, 3, 0, 0, 0, 0)


def table(
    layouts: Sequence[EngineLayout],
    *,
    step: float = 1e-2,
    gain: float = 0.6,
    room: int = 10_000,
    start: float = 20.0,
    expert_gain: float = 1.0,
) -> EngineProfile:
    """Each doubling of TP takes ``gain`` of the time of a step that is full, and of a small batch all of it."""
    points, shapes = [], []
    for place in profile_grid(layouts, (1, 64), (32, 4096)):
        speed = gain ** (place.layout.tp.bit_length() - 1) if place.batch > 1 else 1.0
        speed *= expert_gain if place.layout.ep > 1 else 1.0
        each = step * speed * (1 + place.batch / 16)
        points.append(ProfilePoint(place.phase, place.layout, place.batch, place.tokens, each))
    for layout in layouts:
        shapes.append(EngineShape(layout, 1.0, room * layout.tp, 1, start))
    return EngineProfile(points, shapes)


def planner(devices: int = 8, per_server: int = 8, **options: object) -> ParallelismPlanner:
    return ParallelismPlanner(devices, layouts_of(devices, per_server), **options)  # type: ignore[arg-type]


def replay_preemptions(planner: ParallelismPlanner, preemptions: Sequence[int], load: StepLoad) -> list[LayoutPlan]:
    """What the planner says to a recorded series of preemption counts, every change made at once and for nothing."""
    plans = []
    for count in preemptions:
        plan = planner.plan_next_step(replace(load, preemptions=count))
        if plan.changes:
            planner.confirm_change(plan.layout, 0.0)
        plans.append(plan)
    return plans


def tps(counts: Sequence[int], made: ParallelismPlanner | None = None) -> list[int]:
    return [plan.layout.tp for plan in replay_preemptions(made or planner(), counts, LOAD)]


def test_a_rise_over_five_per_cent_doubles_and_four_steps_at_zero_halve() -> None:
    assert tps([100, 105, 106]) == [1, 1, 1], "5 % is no rise, and 106 is none over 105"
    assert tps([100, 106]) == [1, 2]
    assert tps([0, 1]) == [1, 2], "any preemption is a rise over none"
    assert tps([100, 106, 0, 0, 0, 0]) == [1, 2, 2, 2, 2, 1]
    assert tps([100, 106, 0, 0, 0, 5]) == [1, 2, 2, 2, 2, 4]
    assert tps([0] * 20) == [1] * 20, "there is nothing under TP 1"


def test_a_series_of_rounds_is_replayed_as_the_rule_says() -> None:
    assert tps(SERIES) == [1, 2, 2, 4, 4, 8, 8, 8, 8, 8, 4, 8, 8, 8, 8, 4]


def test_rounds_are_compared_with_the_last_one_of_their_kind() -> None:
    made, changes = planner(), 0
    for _ in range(6):
        for count, kind in ((179, "short"),) * 4 + ((100, "long"),):
            plan = made.plan_next_step(replace(LOAD, preemptions=count, kind=kind))
            changes += plan.changes
    assert changes == 0, "a short round after a long one is no rise"


def test_a_preemption_or_two_are_no_rise_of_a_large_round() -> None:
    made, load = planner(), replace(LOAD, lengths=[400] * 1024)
    assert [made.plan_next_step(replace(load, preemptions=count)).changes for count in (0, 1, 40)] == [False] * 3
    assert made.plan_next_step(replace(load, preemptions=92)).changes, "52 more, 5 % of 1,024 responses are 51"


def test_after_halving_the_zeros_are_counted_anew() -> None:
    assert tps([9, 10, 0, 0, 0, 0, 0, 0, 0, 0]) == [1, 2, 2, 2, 2, 1, 1, 1, 1, 1]
    start = planner()
    start.confirm_change(EngineLayout(8), 0.0)
    assert tps([0] * 13, start) == [8, 8, 8, 4, 4, 4, 4, 2, 2, 2, 2, 1, 1]


@given(
    st.sampled_from([1, 2, 3, 4, 6, 8, 16, 24]),
    st.sampled_from([1, 2, 4, 6, 8]),
    st.sampled_from([0, 6, 32]),
    st.lists(st.integers(0, 30), max_size=60),
)
def test_no_engine_is_ever_cut_across_servers_or_leaves_a_device_idle(
    devices: int, per_server: int, heads: int, counts: list[int]
) -> None:
    layouts = layouts_of(devices, per_server, heads=heads)
    made = ParallelismPlanner(devices, layouts)
    before = made.layout.tp
    for plan in replay_preemptions(made, counts, LOAD):
        tp = plan.layout.tp
        assert tp <= per_server
        assert per_server % tp == 0
        assert devices % tp == 0
        assert not heads or heads % tp == 0
        assert tp in (before // 2, before, 2 * before)
        assert plan.changes == (tp != before)
        before = tp


@given(st.lists(st.integers(0, 30), max_size=40))
def test_only_a_rise_raises_and_only_zeros_lower(counts: list[int]) -> None:
    plans = replay_preemptions(planner(), counts, LOAD)
    before = 1
    for index, plan in enumerate(plans):
        if plan.layout.tp > before:
            assert counts[index] > 1.05 * counts[index - 1]
        if plan.layout.tp < before:
            assert counts[index - 3 : index + 1] == [0, 0, 0, 0]
        before = plan.layout.tp


def test_at_the_largest_tp_a_rise_says_why_nothing_changes() -> None:
    plans = replay_preemptions(planner(devices=2), [1, 2, 9], LOAD)
    assert [plan.layout.tp for plan in plans] == [1, 2, 2]
    assert plans[-1].reason == "preemptions rose from 2 to 9; TP 2 stays: TP 4 is not possible"


def test_it_begins_with_what_the_profile_finds_best_for_the_expected_lengths() -> None:
    layouts = layouts_of(4, 4)
    many = [500] * 256
    assert ParallelismPlanner(4, layouts, table(layouts, gain=0.3)).choose_first(many, 100) == EngineLayout(4)
    assert ParallelismPlanner(4, layouts, table(layouts, gain=1.0)).choose_first(many, 100) == EngineLayout(1), (
        "no gain, TP 1"
    )
    tight = table(layouts, gain=0.5, room=1500)  # TP 1 holds two and a half contexts an engine
    assert ParallelismPlanner(4, layouts, tight).choose_first(many, 100).tp > 1
    assert ParallelismPlanner(4, layouts).choose_first(many, 100) == EngineLayout(1), "nothing known"
    assert ParallelismPlanner(4, layouts, table(layouts[:2])).choose_first(many, 100).tp <= 2, "TP 4 was not profiled"


def test_a_change_that_would_not_pay_is_not_made_and_says_what_it_would_gain() -> None:
    layouts = layouts_of(2, 2)
    load = StepLoad(10, 30.0, [400] * 64, 100)
    dear, cheap = (ParallelismPlanner(2, layouts, table(layouts, start=seconds)) for seconds in (1e4, 1e-3))
    for made in (dear, cheap):
        assert made.plan_next_step(load).reason == ""
    refused, taken = (made.plan_next_step(replace(load, preemptions=20)) for made in (dear, cheap))
    assert (refused.changes, refused.layout, refused.cost) == (False, EngineLayout(1), 1e4)
    assert "would gain" in refused.reason
    assert "costs 1e+04 s" in refused.reason
    assert taken.changes
    assert taken.gain is not None
    assert taken.gain == pytest.approx(refused.gain)


def test_what_changes_were_measured_to_cost_replaces_the_estimate() -> None:
    layouts = layouts_of(2, 2)
    load = StepLoad(10, 30.0, [400] * 64, 100)
    made = ParallelismPlanner(2, layouts, table(layouts, start=1e-3))
    made.plan_next_step(load)
    assert made.plan_next_step(replace(load, preemptions=20)).changes
    made.confirm_change(EngineLayout(2), 5000.0)
    plans = [made.plan_next_step(replace(load, preemptions=0)) for _ in range(4)]
    assert not any(plan.changes for plan in plans)
    assert plans[-1].cost == 5000.0
    assert "no preemption in 4 steps" in plans[-1].reason


def test_a_layout_that_was_slower_when_it_was_tried_is_not_gone_back_to_until_that_is_forgotten() -> None:
    made = planner(devices=2, per_server=2)  # no profile
    slow, fast = StepLoad(10, 100.0, [100] * 8), StepLoad(0, 50.0, [100] * 8)
    made.plan_next_step(slow)
    assert made.plan_next_step(replace(slow, preemptions=20)).changes
    made.confirm_change(EngineLayout(2), 1.0)
    plans = [made.plan_next_step(fast) for _ in range(40)]
    asked = [plan for plan in plans if plan.reason]
    assert all(not plan.changes and plan.gain == pytest.approx(-50.0) for plan in asked[:8])
    assert asked[8].changes, "32 steps later nobody knows any more"


def test_with_no_step_left_nothing_changes() -> None:
    made = planner()
    made.plan_next_step(replace(LOAD, preemptions=1), 2)
    plan = made.plan_next_step(replace(LOAD, preemptions=9), 0)
    assert (plan.changes, plan.layout) == (False, EngineLayout(1))


def test_a_layout_whose_engines_did_not_come_up_is_not_asked_for_again() -> None:
    made = planner()
    made.plan_next_step(replace(LOAD, preemptions=1))
    assert made.plan_next_step(replace(LOAD, preemptions=2)).changes
    made.reject_change(EngineLayout(2), 3.0, "no memory")
    assert made.layout == EngineLayout(1)
    plan = made.plan_next_step(replace(LOAD, preemptions=9))
    assert (plan.changes, plan.layout) == (False, EngineLayout(1))


def test_a_resumed_planner_continues_with_the_engines_it_had_and_what_a_change_costs() -> None:
    made = planner(rise=1.05)
    assert made.state() == {"degrees": [1] * 8, "experts": 1, "cost": 0.0, "measured": False}
    made.confirm_change(EngineLayout(4), 70.0)
    state = json.loads(json.dumps(made.state()))
    again = planner()
    assert again.restore(state)
    assert again.layout == EngineLayout(4)
    assert again.state() == state
    assert not planner(4).restore(state), "of other devices"
    whole = ParallelismPlanner(8, layouts_of(8, 8, experts=True))
    whole.confirm_change(EngineLayout(4, 4), 70.0)
    other = ParallelismPlanner(8, layouts_of(8, 8, experts=True))
    assert other.restore(whole.state())
    assert other.layout == EngineLayout(4, 4)
    assert not again.restore(whole.state()), "it may not have whole experts"
    fixed = planner(8, 2)
    assert not fixed.restore(state), "an engine that no server has room for"
    assert fixed.layout.tp == 1


def test_re_profiling_is_asked_for_once_when_the_engine_leaves_its_profile() -> None:
    layouts = layouts_of(2, 2)
    profile = table(layouts)
    made = ParallelismPlanner(2, layouts, profile)
    near = profile.decode_seconds(8, 1000)

    def load(times: float, batch: float = 8) -> StepLoad:
        return replace(LOAD, token_seconds=times * near, batch=batch, context=1000)

    assert [made.plan_next_step(load(times)).reprofile for times in (1.4, 0.7, 1.6, 1.6, 1.2, 1.6, 1.6)] == [None] * 7
    asked = [made.plan_next_step(load(1.6)).reprofile for _ in range(5)]
    assert asked == [EngineLayout(1), None, None, None, None]
    made = ParallelismPlanner(2, layouts, table(layouts, step=1.6e-2))
    assert [made.plan_next_step(load(1.6)).reprofile for _ in range(5)] == [None] * 5
    beyond = [made.plan_next_step(load(1.6 * 200 / 24, batch=999)).reprofile for _ in range(4)]
    assert beyond[:3] == [None, None, EngineLayout(1)], "an unprofiled regime, whatever the extrapolation says"


def test_until_it_is_measured_again_a_profile_that_is_wrong_is_scaled_by_what_steps_take() -> None:
    """Three steps on end, by their median; again when that is wrong too; prefills and steps outside of it stay as they are."""
    layouts = layouts_of(2, 2)
    profile = table(layouts)
    near, wide = profile.decode_seconds(8, 1000), profile.decode_seconds(8, 1000, EngineLayout(2))
    made = ParallelismPlanner(2, layouts, profile)

    def after(times: float, batch: float = 8) -> float | None:
        return made.plan_next_step(replace(LOAD, token_seconds=times * near, batch=batch, context=1000)).scaled

    assert [after(times) for times in (2.0, 4.0, 3.0, 3.0, 2.5)] == [None, None, pytest.approx(3.0), None, None]
    assert made.profile is not None
    assert made.profile.decode_seconds(8, 1000) == pytest.approx(3.0 * near)
    assert made.profile.decode_seconds(8, 1000, EngineLayout(2)) == pytest.approx(3.0 * wide)
    assert made.profile.prefill_seconds(100) == profile.prefill_seconds(100)
    assert made.profile.shape(EngineLayout(2)) == profile.shape(EngineLayout(2))
    assert [after(1.0) for _ in range(3)] == [None, None, pytest.approx(1 / 3)], "the machine is idle again"
    assert made.correction == pytest.approx(1.0)
    assert [after(50.0, batch=999) for _ in range(9)] == [None] * 9, "nothing was measured there that could be wrong"
    assert [after(2.0) for _ in range(3)][2] == pytest.approx(2.0)


def test_steps_beyond_the_profile_are_measurements_of_their_own_and_leave_what_was_measured_alone() -> None:
    layouts = layouts_of(2, 2)
    profile = table(layouts)
    made = ParallelismPlanner(2, layouts, profile)

    def after(seconds: float, batch: float, context: float = 1000) -> LayoutPlan:
        return made.plan_next_step(replace(LOAD, token_seconds=seconds, batch=batch, context=context))

    beyond = profile.decode_seconds(256, 1000)
    plans = [after(times * beyond, 256) for times in (4.0, 6.0, 5.0)]
    assert [plan.measured for plan in plans[:2]] == [None, None]
    assert plans[2].measured == MeasuredStep(256, 1000, 5.0 * beyond)
    assert plans[2].reprofile == EngineLayout(1)
    assert made.profile is not None
    assert made.profile.decode_seconds(256, 1000) == pytest.approx(5.0 * beyond)
    assert made.profile.decode_seconds(256, 32) == pytest.approx(5.0 * profile.decode_seconds(256, 32))
    for batch, context in ((1, 32), (64, 4096), (8, 1000)):
        assert made.profile.decode_seconds(batch, context) == profile.decode_seconds(batch, context)
    assert made.profile.decode_seconds(256, 1000, EngineLayout(2)) == profile.decode_seconds(256, 1000, EngineLayout(2))
    assert made.correction == 1.0
    assert [after(5.0 * beyond, 256).measured for _ in range(5)] == [None] * 5, "now it is known"
    longer = profile.decode_seconds(8, 9000)
    plans = [after(3.0 * longer, 8, 9000) for _ in range(3)]
    assert plans[2].measured == MeasuredStep(8, 9000, 3.0 * longer)
    assert plans[2].reprofile is None, "a whole new one was asked for before"
    assert made.profile.decode_seconds(8, 9000) == pytest.approx(3.0 * longer)
    assert made.profile.decode_seconds(8, 4096) == pytest.approx(profile.decode_seconds(8, 4096))


def test_what_is_expected_of_a_layout_goes_by_the_scaled_profile() -> None:
    layouts = layouts_of(2, 2)
    gains = []
    for times in (1.0, 3.0):
        made = ParallelismPlanner(2, layouts, table(layouts, start=0.0), rise=1.0)
        assert made.profile is not None
        near = made.profile.decode_seconds(8, 1000)
        for _ in range(3):
            made.plan_next_step(replace(LOAD, token_seconds=times * near, batch=8, context=1000))
        predicted = made.profile.rollout_seconds([200] * 8, 100, EngineLayout(2))
        gains.append(predicted)
    assert gains[1] > 2.5 * gains[0]


def test_experts_go_whole_to_devices_while_their_load_is_even_and_in_slices_when_it_is_not() -> None:
    layouts = layouts_of(2, 2, experts=True)
    assert layouts == (EngineLayout(1), EngineLayout(2), EngineLayout(2, 2))
    profile = table(layouts, expert_gain=0.7, start=0.0)
    made = ParallelismPlanner(2, layouts, profile)
    made.confirm_change(EngineLayout(2), 0.0)
    lengths = [400] * 64
    now = profile.rollout_seconds(lengths, 100, EngineLayout(2))
    even = StepLoad(0, now, lengths, 100, imbalance=1.0)
    plan = made.plan_next_step(even)
    assert (plan.changes, plan.layout) == (True, EngineLayout(2, 2))
    made.confirm_change(plan.layout, 0.0)
    skewed = made.plan_next_step(replace(even, seconds=now * 0.7 * 2.0, imbalance=3.0))
    assert (skewed.changes, skewed.layout) == (True, EngineLayout(2))
    assert "imbalance of 3" in skewed.reason
    made.confirm_change(EngineLayout(2), 0.0)
    assert not made.plan_next_step(replace(even, imbalance=3.0)).changes


@pytest.mark.parametrize(
    "options", [{"rise": 0.9}, {"calm_steps": 0}, {"divergence": 1.0}, {"patience": 0}, {"expert_share": 2.0}]
)
def test_a_planner_that_makes_no_sense_is_refused(options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r">="):
        planner(**options)
    with pytest.raises(ValueError, match="no layout"):
        ParallelismPlanner(2, layouts_of(2, 2), EngineProfile([]))
