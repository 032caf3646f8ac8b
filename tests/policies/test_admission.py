"""What a rollout may run beside a serving engine: slack by ROSE's equations, chunks that fit, and a guard that learns."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.policies.serving.admission import (
    Admission,
    AdmittedWork,
    Mode,
    ServingState,
    Slo,
    arriving_slack,
    arriving_tpot_slack,
    long_prompt,
    slo_floor,
    tpot_slack,
    ttft_slack,
)

SLO = Slo(ttft=0.1, tpot=0.05)


def prefill(tokens: int) -> float:
    return 0.001 + tokens * 0.0001


def decode(batch: int) -> float:
    return 0.004 + batch * 0.0005


def admission(mode: Mode = "dual", guard: float = 0.0) -> Admission:
    return Admission(prefill, decode, mode=mode, guard=guard)


def test_ttft_slack_is_equation_1_and_counts_those_ahead_in_the_queue() -> None:
    assert ttft_slack([], 5.0, SLO, prefill) == math.inf
    assert ttft_slack([(4.95, 100)], 5.0, SLO, prefill) == pytest.approx(4.95 + 0.1 - 5.0 - 0.011)
    both = ttft_slack([(4.95, 100), (4.96, 200)], 5.0, SLO, prefill)
    assert both == pytest.approx(min(0.039, 4.96 + 0.1 - 5.0 - 0.011 - 0.021))
    assert ttft_slack([(4.95, 100)], 5.0, SLO, prefill, running=0.02) == pytest.approx(0.019)


def test_tpot_slack_is_equation_2_of_the_request_that_has_waited_longest() -> None:
    assert tpot_slack([], 1.0, SLO, decode(0)) == math.inf
    times = [(0.9, 0.99, 9), (0.9, 0.97, 9)]
    assert tpot_slack(times, 1.0, SLO, decode(2)) == pytest.approx(0.97 + 0.05 - 1.0 - 0.005)


def test_a_request_whose_tokens_came_too_slowly_in_the_mean_has_no_slack_until_it_has_caught_up() -> None:
    late = [(0.5, 1.0, 8)]  # eight tokens in half a second, 50 ms each were to be
    assert tpot_slack(late, 1.0, SLO, 0.005) == pytest.approx(0.5 + 9 * 0.05 - 1.0 - 0.005)
    assert tpot_slack([(0.5, 1.0, 10)], 1.0, SLO, 0.005) == pytest.approx(0.045)
    assert tpot_slack([(0.5, 1.0, 90)], 1.0, SLO, 0.005) == pytest.approx(0.045), "tokens that came early are no credit"


def test_a_request_that_arrives_waits_for_those_before_it_and_is_longer_than_nine_of_ten() -> None:
    lengths = [100] * 9 + [300]
    assert arriving_slack(0.02, SLO, prefill(long_prompt(lengths))) == pytest.approx(0.1 - 0.02 - 0.031)
    assert long_prompt([]) == 0
    assert arriving_slack(0.02, SLO, math.inf) == pytest.approx(0.05), "half of the SLO where nothing is known"


def test_a_request_that_begins_to_decode_may_meet_a_rollout_step_and_those_beside_it_wait_for_its_prompt() -> None:
    assert arriving_tpot_slack(math.inf, SLO, 0.005, 0.08) == pytest.approx(0.045), "there is nobody beside it"
    assert arriving_tpot_slack(math.inf, SLO, math.inf, 0.08) == math.inf, "nobody ever decoded"
    assert arriving_tpot_slack(0.09, SLO, 0.005, 0.08) == pytest.approx(0.01), (
        "they have earned that much more than it costs"
    )
    assert arriving_tpot_slack(0.045, SLO, 0.005, 0.08) < 0, "and by one token nothing like it"
    assert arriving_tpot_slack(0.045, SLO, 0.005, math.inf) == -math.inf


@pytest.mark.parametrize(("mode", "seconds"), [("dual", 0.02), ("tpot", 0.02), ("ttft", 0.1), ("none", math.inf)])
def test_beside_an_idle_engine_no_step_is_longer_than_who_then_begins_to_decode_can_spare(
    mode: Mode, seconds: float
) -> None:
    idle = ServingState(at=1.0, arriving=0.1, arriving_tpot=0.02)
    assert admission(mode).slack(idle, 900.0) == seconds
    assert admission(mode).admit(idle, 900.0, 10_000, 0).seconds <= seconds


@pytest.mark.parametrize(("mode", "expected"), [("dual", 0.01), ("ttft", 0.03), ("tpot", 0.01), ("none", math.inf)])
def test_each_mode_looks_at_its_own_slack(mode: Mode, expected: float) -> None:
    state = ServingState(at=1.0, ttft_slack=0.03, tpot_slack=0.01, busy=True)
    assert admission(mode).slack(state, 1.0) == pytest.approx(expected)


@pytest.mark.parametrize(("mode", "tokens"), [("dual", 0), ("ttft", 0), ("tpot", 512), ("none", 512)])
def test_nothing_is_admitted_while_a_prompt_waits_for_its_first_token(mode: Mode, tokens: int) -> None:
    state = ServingState(at=1.0, ttft_slack=50.0, tpot_slack=50.0, step_end=2.0, busy=True, arriving=50.0, waiting=True)
    found = admission(mode).admit(state, 1.0, 10_000, 0)
    assert found.tokens == tokens
    assert (found.reason == "a prompt of serving waits") == (not tokens)


def test_the_largest_chunk_that_fits_is_admitted_and_never_more_than_512() -> None:
    busy = ServingState(at=1.0, ttft_slack=0.02, busy=True)
    idle = ServingState(at=1.0)
    assert admission().admit(idle, 1.0, 10_000, 0) == AdmittedWork(512, 0, prefill(512))
    found = admission().admit(busy, 1.0, 10_000, 0)
    assert found.tokens == 128
    assert prefill(2 * found.tokens) > 0.02
    assert admission().admit(busy, 1.0, 40, 0).tokens == 40
    assert admission().admit(busy, 1.0, 10_000, 64).decode == 32, (
        "who decodes holds memory: first, and half of them fit"
    )
    assert (
        admission().admit(ServingState(at=1.0, ttft_slack=0.001, busy=True), 1.0, 40, 3).reason
        == "serving has no slack"
    )
    assert admission().admit(idle, 1.0, 0, 0).reason == "nothing to do"


def test_slack_shrinks_as_the_state_ages_and_an_old_state_of_a_busy_engine_admits_nothing() -> None:
    state = ServingState(at=1.0, ttft_slack=0.06, tpot_slack=0.08, busy=True)
    assert admission().slack(state, 1.02) == pytest.approx(0.04)
    assert admission().admit(state, 1.11, 10, 0).reason == "serving has not said anything for too long"
    assert admission().admit(ServingState(at=1.0), 900.0, 10, 0).tokens == 10, "it said that it was idle"


def test_while_a_serving_step_runs_its_slack_stands_and_shrinks_once_it_is_late() -> None:
    state = ServingState(at=1.0, ttft_slack=0.06, step_end=1.5, busy=True)
    assert admission().slack(state, 1.4) == pytest.approx(0.06)
    assert admission().slack(state, 1.52) == pytest.approx(0.04)
    assert admission().admit(state, 1.61, 10, 0).reason == "serving has not said anything for too long"


def test_all_steps_of_one_tick_together_take_no_more_than_its_slack() -> None:
    policy, taken = admission(), 0.0
    state = ServingState(at=1.0, ttft_slack=0.03, step_end=1.9, busy=True, tick=7)
    for _ in range(10):
        taken += policy.admit(state, 1.0, 10_000, 4).seconds
    assert 0.02 < taken <= 0.0300001
    assert policy.admit(ServingState(at=1.0, ttft_slack=0.03, busy=True, tick=8), 1.0, 10_000, 4).seconds > 0.015


def test_engines_that_share_a_device_share_the_slack() -> None:
    state = ServingState(at=1.0, ttft_slack=0.03, busy=True, sharers=3)
    assert admission().slack(state, 1.0) == pytest.approx(0.01)


def test_beside_an_idle_engine_a_step_takes_no_more_than_a_request_that_arrives_can_spare() -> None:
    idle = ServingState(at=1.0, arriving=0.02)
    for _ in range(5):
        assert admission().admit(idle, 900.0, 10_000, 0).tokens == 128
    assert admission("tpot").admit(idle, 900.0, 10_000, 0).tokens == 512, (
        "it has no token yet, so no time between tokens"
    )


def test_a_chunk_joins_the_decoding_when_both_fit() -> None:
    state = ServingState(at=1.0, ttft_slack=0.02, busy=True)
    found = admission().admit(state, 1.0, 10_000, 4)
    assert (found.decode, found.tokens) == (4, 127)
    assert found.seconds == pytest.approx(decode(4) + prefill(127))
    assert admission().admit(ServingState(at=1.0), 1.0, 10_000, 100).tokens == 412


def test_the_guard_doubles_with_each_near_miss_up_to_its_bound_and_decays_slowly_to_where_it_began() -> None:
    found = admission(guard=0.002)
    for _ in range(3):
        found.record_step(-0.001, overran=True)
    assert found.guard == pytest.approx(0.016)
    found.record_step(-0.001, overran=False)
    assert found.guard == pytest.approx(0.016), "a burst took the slack, not a profile that is wrong"
    for _ in range(9):
        found.record_step(-0.001, overran=True)
    assert found.guard == 0.05
    before = found.guard
    found.record_step(0.01, overran=True)
    assert 0.98 * before < found.guard < before
    for _ in range(1000):
        found.record_step(0.01, overran=False)
    assert found.guard == pytest.approx(0.002)


def test_a_guard_that_keeps_every_step_out_decays_until_one_fits() -> None:
    found = admission(guard=0.002)
    for _ in range(10):
        found.record_step(-0.001, overran=True)
    state = ServingState(at=1.0, tpot_slack=0.03, busy=True)
    refusals = 0
    while not found.admit(state, 1.0, 10_000, 0).tokens:
        refusals += 1
        assert refusals < 200
    assert refusals > 40


def play(arrivals: list[tuple[float, int]], policy: Admission | None) -> tuple[list[float], int, float]:
    """Serving and rollouts on one device, one step at a time, costs as profiled. Seconds to each first token, tokens of
    rollouts, and the longest of their steps."""
    left, now, queue = list(arrivals), 0.0, list[tuple[float, int]]()
    found, rolled, longest = list[float](), 0, 0.0
    while left or queue:
        while left and left[0][0] <= now:
            queue.append(left.pop(0))
        state = ServingState(now, ttft_slack(queue, now, SLO, prefill), busy=bool(queue), waiting=bool(queue))
        step = policy.admit(state, now, 10_000, 0) if policy is not None else AdmittedWork()
        now, rolled, longest = now + step.seconds, rolled + step.tokens, max(longest, step.seconds)
        if queue:
            arrived, tokens = queue.pop(0)
            now += prefill(tokens)
            found.append(now - arrived)
        elif not step.seconds:
            now = left[0][0]
    return found, rolled, longest


LOADS = st.lists(st.tuples(st.floats(0.0, 0.2), st.integers(10, 600)), min_size=1, max_size=80)


@settings(max_examples=100)
@given(LOADS, st.sampled_from(("dual", "ttft")))
def test_whatever_bursts_come_a_prompt_waits_for_one_admitted_step_more_than_beside_nobody(
    load: list[tuple[float, int]], mode: Mode
) -> None:
    """So what is late beside rollouts was within one step of being late without them."""
    arrivals, at = [], 0.0
    for gap, tokens in load:
        at += gap if gap > 0.1 else 0.0  # many at once
        arrivals.append((at, tokens))
    alone, _, _ = play(arrivals, None)
    beside, _, longest = play(arrivals, admission(mode))
    assert longest <= prefill(512)
    assert all(now <= before + longest + 1e-9 for before, now in zip(alone, beside, strict=True))


def test_a_burst_is_late_where_only_the_slack_of_those_that_are_there_counts_and_rollouts_gain_nothing_by_it() -> None:
    """TPOT admission does not look at prompts: one step before each of them. The same tokens are made in the end, as the device
    is never idle."""
    rng, arrivals, at = random.Random(3), list[tuple[float, int]](), 0.0
    for _ in range(60):
        at += rng.expovariate(1.0)
        arrivals += [(at, 100)] * 6
    late, rolled = {}, {}
    for mode in ("tpot", "dual"):
        found, rolled[mode], _ = play(arrivals, admission(mode))
        late[mode] = sum(seconds > SLO.ttft for seconds in found)
    assert late["tpot"] > 150
    assert late["dual"] < 60, "one step at the begin of some bursts"
    assert rolled["dual"] > 0.97 * rolled["tpot"]


def test_an_slo_that_serving_alone_cannot_keep_is_told() -> None:
    assert slo_floor(SLO, 500, 32, prefill, decode) == ""
    assert "1000 tokens alone takes 0.101 s" in slo_floor(SLO, 1000, 32, prefill, decode)
    assert "decode step of 100 sequences" in slo_floor(SLO, 500, 100, prefill, decode)


@pytest.mark.parametrize("make", [lambda: Slo(0, 1), lambda: Slo(math.inf, 1)])
def test_what_makes_no_sense_is_refused(make: object) -> None:
    with pytest.raises(ValueError, match="must be positive"):
        make()  # type: ignore[operator]
    for wrong in ({"mode": "both"}, {"guard": 0.1}):
        with pytest.raises(ValueError, match=r"0 to 0.05 s|one of"):
            Admission(prefill, decode, **wrong)
