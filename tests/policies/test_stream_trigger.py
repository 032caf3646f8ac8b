"""The stream trigger (RollPacker 4.4, Algorithm 1): when half of the GPUs go over to training, which, and never wrongly."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from orchestrator.policies.batching.stream_trigger import (
    KvLimit,
    LengthDistribution,
    StreamTrigger,
    TriggerDecision,
    Unit,
)

SINGLES = [(gpu,) for gpu in range(8)]
PAIRS = [(0, 1), (2, 3), (4, 5), (6, 7)]
KNOWN = LengthDistribution([100, 200, 300, 400], longest=1000)
PLENTY = KvLimit(bytes_per_token=1.0, bytes_per_gpu=1e9)


def trigger(
    rollout: list[Unit] = SINGLES,
    training: list[Unit] = SINGLES,
    requests: int = 100,
    limit: KvLimit = PLENTY,
    lengths: LengthDistribution = KNOWN,
) -> StreamTrigger:
    return StreamTrigger(requests, rollout, training, limit, lengths)


def nothing_held(rollout: list[Unit]) -> list[list[int]]:
    return [[] for _ in rollout]


# -- when --------------------------------------------------------------------------------------------------------------


def test_it_looks_first_at_20_percent_and_no_more_after_50() -> None:
    early, late = trigger(), trigger()
    assert all(early.observe(finished, nothing_held(SINGLES)) is None for finished in range(20))
    first = early.observe(20, nothing_held(SINGLES))
    assert first is not None
    assert first.freed
    assert first.fraction == 0.2
    assert all(late.observe(finished, nothing_held(SINGLES)) is None for finished in range(51, 101))
    assert not late.decided


def test_it_tries_again_after_every_further_5_percent_and_only_then() -> None:
    full = trigger(limit=KvLimit(1.0, 10.0))
    held = [[50] for _ in SINGLES]
    tried = [finished for finished in range(101) if full.observe(finished, held) is not None]
    assert tried == [20, 25, 30, 35, 40, 45, 50]


def test_milestones_are_exact_fractions() -> None:
    """3 of 60 are 5 %, though 0.05 * 60 is a little more in binary."""
    full = trigger(requests=60, limit=KvLimit(1.0, 10.0))
    tried = [finished for finished in range(61) if full.observe(finished, [[50] for _ in SINGLES]) is not None]
    assert tried == [12, 15, 18, 21, 24, 27, 30]


def test_finished_requests_that_come_in_lumps_make_one_attempt_each() -> None:
    full = trigger(limit=KvLimit(1.0, 10.0))
    tried = [n for n in (3, 19, 33, 36, 38, 49, 60) if full.observe(n, [[50] for _ in SINGLES]) is not None]
    assert tried == [33, 38, 49]


def test_an_attempt_that_fails_for_memory_is_made_again_when_there_is_room() -> None:
    one = trigger(limit=KvLimit(1.0, 700.0))
    crowded, sparse = [[10, 10, 10] for _ in SINGLES], [[10] for _ in SINGLES]
    refused = one.observe(20, crowded)
    assert refused is not None
    assert refused.freed == refused.engines == refused.replicas == ()
    assert "projected KV is 2.14" in refused.reason  # 6 contexts of 250 tokens on each GPU of 700
    assert not one.decided
    assert one.observe(24, sparse) is None  # no milestone
    made = one.observe(25, sparse)
    assert made is not None
    assert len(made.freed) == 4
    assert made.peak == pytest.approx(500 / 700)


def test_it_decides_once() -> None:
    one = trigger()
    assert one.observe(20, nothing_held(SINGLES)) is not None
    assert one.decided
    assert all(one.observe(finished, nothing_held(SINGLES)) is None for finished in range(21, 101))


# -- which -------------------------------------------------------------------------------------------------------------


def test_half_is_freed_where_the_fewest_tokens_are_recomputed() -> None:
    held = [[40], [1], [40], [2], [40], [3], [40], [4]]
    made = trigger().observe(20, held)
    assert made == TriggerDecision((1, 3, 5, 7), (1, 3, 5, 7), (1, 3, 5, 7), 0.2, made.peak if made else 0.0)


def test_neither_kind_of_group_is_split() -> None:
    """Engines are pairs, training replicas are fours that cross them: only whole fours can go."""
    training = [(0, 1, 4, 5), (2, 3, 6, 7)]
    made = trigger(PAIRS, training).observe(20, [[9], [1], [9], [9]])
    assert made is not None
    assert (made.freed, made.engines, made.replicas) == ((2, 3, 6, 7), (1, 3), (1,))


@pytest.mark.parametrize(
    ("rollout", "training"),
    [
        (SINGLES, [tuple(range(8))]),  # one training replica over all
        ([tuple(range(8))], SINGLES),  # one engine over all
        ([(0, 1, 2), (3, 4, 5)], [(0, 1, 2, 3), (4, 5)]),  # tied crosswise
        ([(0,), (1,), (2,)], [(0,), (1,), (2,)]),  # no half of three
        ([(0, 1, 2), (3,)], [(0, 1, 2), (3,)]),  # three and one
        ([], []),
        (SINGLES, []),  # nobody trains there
        ([(0,), (1,)], [(0, 8), (1, 9), (2, 3)][:0]),
    ],
)
def test_what_cannot_be_halved_is_aborted_and_says_so(rollout: list[Unit], training: list[Unit]) -> None:
    one = trigger(rollout, training)
    made = one.observe(20, nothing_held(rollout))
    assert made is not None
    assert (made.freed, made.peak) == ((), 0.0)
    assert "without splitting a communication group" in made.reason
    assert one.observe(21, nothing_held(rollout)) is None
    assert one.observe(25, nothing_held(rollout)) is not None


def test_an_engine_that_no_replica_could_use_is_not_freed() -> None:
    made = trigger([(0,), (1,), (2,), (3,)], [(1,), (3,)]).observe(20, [[0], [500], [0], [500]])
    assert made is not None
    assert made.freed == (1, 3)


def test_a_training_replica_may_have_gpus_that_never_roll_out() -> None:
    made = trigger([(0,), (1,)], [(0, 8), (1, 9)]).observe(20, [[5], [1]])
    assert made is not None
    assert (made.freed, made.replicas) == ((1,), (1,))


# -- the projection ----------------------------------------------------------------------------------------------------


def test_the_expected_final_length_is_the_mean_of_those_that_got_longer() -> None:
    assert KNOWN.expected(0) == 250
    assert KNOWN.expected(100) == 300
    assert KNOWN.expected(399) == 400
    assert KNOWN.expected(400) == 1000  # longer than anything before: the worst case
    assert LengthDistribution([], 64).expected(3) == 64
    assert LengthDistribution([500], 64).expected(3) == 64  # nothing is longer than the longest


def test_contexts_take_whole_blocks() -> None:
    assert KvLimit(2.0, 1.0, block_tokens=16).bytes_of(17) == 64
    assert KvLimit(2.0, 1.0).bytes_of(17) == 34


def test_the_fullest_unit_decides_not_the_sum() -> None:
    """The GPUs that stay could hold everything together, but one of them cannot hold the context it has."""
    lengths = LengthDistribution([900, 100, 100], longest=1000)
    singles: list[Unit] = [(gpu,) for gpu in range(4)]
    held = [[500], [], [5], [5]]  # at the end 900, none, 1100 / 3 and as much
    roomy = trigger(singles, singles, limit=KvLimit(1.0, 900.0), lengths=lengths).observe(20, held)
    refused = trigger(singles, singles, limit=KvLimit(1.0, 850.0), lengths=lengths).observe(20, held)
    assert roomy is not None
    assert refused is not None
    assert (roomy.freed, roomy.peak) == ((1, 2), 1.0)
    assert 900 + 2 * 367 < 2 * 850
    assert (refused.freed, refused.peak) == ((), pytest.approx(900 / 850))


def test_what_migrates_goes_to_the_emptiest_unit_longest_first() -> None:
    lengths = LengthDistribution([100], longest=100)
    one = trigger([(0,), (1,), (2,), (3,)], [(0,), (1,), (2,), (3,)], limit=KvLimit(1.0, 300.0), lengths=lengths)
    made = one.observe(20, [[10, 10, 10], [30], [1], [2]])  # 2 and 3 go; 0 holds 300, 1 holds 100 and takes both
    assert made is not None
    assert made.freed == (2, 3)
    assert made.peak == 1.0


def test_kv_is_spread_over_the_gpus_of_a_unit() -> None:
    small, large = ([(gpu,) for gpu in range(4)], [(0, 1), (2, 3)])
    lengths = LengthDistribution([100], longest=100)
    on_one = trigger(small, small, limit=KvLimit(1.0, 99.0), lengths=lengths).observe(20, [[1], [], [], []])
    on_two = trigger(large, large, limit=KvLimit(1.0, 99.0), lengths=lengths).observe(20, [[1], []])
    assert on_one is not None
    assert on_two is not None
    assert not on_one.freed
    assert on_two.freed == (2, 3)
    assert on_two.peak == pytest.approx(100 / 198)


# -- bad input ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rollout", "training", "words"),
    [
        ([(0, 1), (1, 2)], SINGLES, r"GPU 1 is in the rollout units \(0, 1\) and \(1, 2\)"),
        (SINGLES, [(0,), (0,)], "GPU 0 is in the training units"),
        ([(0,), ()], SINGLES, "a rollout unit is empty"),
    ],
)
def test_units_that_are_none_are_refused(rollout: list[Unit], training: list[Unit], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        trigger(rollout, training)


def test_numbers_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="requests = 0"):
        trigger(requests=0)
    with pytest.raises(ValueError, match="longest = 0"):
        LengthDistribution([], 0)
    with pytest.raises(ValueError, match="sizes must be positive"):
        KvLimit(0.0, 1.0)
    with pytest.raises(ValueError, match="low <= high"):
        StreamTrigger(10, SINGLES, SINGLES, PLENTY, KNOWN, low=0.6, high=0.5)
    with pytest.raises(ValueError, match="lengths of 2 engines, there are 8"):
        trigger().observe(20, [[], []])


# -- properties --------------------------------------------------------------------------------------------------------


@st.composite
def units(draw: st.DrawFn, gpus: int) -> list[Unit]:
    """Some of the GPUs, dealt to disjoint units."""
    order = draw(st.permutations(range(gpus)))[: draw(st.integers(0, gpus))]
    sizes = draw(st.lists(st.integers(1, 4), min_size=len(order), max_size=len(order)))
    found, rest = [], list(order)
    for size in sizes:
        if rest:
            found.append(tuple(rest[:size]))
            rest = rest[size:]
    return found


@st.composite
def steps(draw: st.DrawFn) -> tuple[list[Unit], list[Unit], int, list[int], list[tuple[int, list[list[int]]]]]:
    """Units, requests, a history of lengths, and what is observed in the course of the step."""
    gpus = draw(st.integers(1, 10))
    rollout, training = draw(units(gpus)), draw(units(gpus))
    requests = draw(st.integers(1, 80))
    history = draw(st.lists(st.integers(0, 60), max_size=12))
    moments = sorted(draw(st.lists(st.integers(0, requests), max_size=10)))
    length = st.lists(st.integers(0, 50), max_size=3)
    held = st.lists(length, min_size=len(rollout), max_size=len(rollout))
    return rollout, training, requests, history, [(finished, draw(held)) for finished in moments]


LONGEST = 64


def play(case: tuple[list[Unit], list[Unit], int, list[int], list[tuple[int, list[list[int]]]]], memory: float):
    rollout, training, requests, history, moments = case
    one = StreamTrigger(requests, rollout, training, KvLimit(1.0, memory, 4), LengthDistribution(history, LONGEST))
    return [(finished, held, one.observe(finished, held)) for finished, held in moments]


@settings(max_examples=400)
@given(steps(), st.floats(0, 400))
def test_no_step_splits_a_group_leaves_the_window_or_passes_the_limit(case, memory: float) -> None:
    rollout, training, requests, history, _ = case
    attempts = [(finished, held, attempt) for finished, held, attempt in play(case, memory) if attempt is not None]
    assert sum(bool(attempt.freed) for _, _, attempt in attempts) <= 1
    milestones = [Fraction(finished, requests) for finished, _, _ in attempts]
    assert all(Fraction(1, 5) <= at <= Fraction(1, 2) for at in milestones)
    assert all(later - earlier >= Fraction(1, 20) for earlier, later in itertools.pairwise(milestones))
    for _, held, attempt in attempts:
        assert bool(attempt.freed) is not bool(attempt.reason)
        assert bool(attempt.freed) or attempt.peak > 1.0 or attempt.peak == 0.0
        if not attempt.freed:
            continue
        freed = set(attempt.freed)
        assert 2 * len(freed) == sum(map(len, rollout))
        for unit in (*rollout, *training):
            rolls = set(unit) & {gpu for engine in rollout for gpu in engine}
            assert not (freed & rolls) or rolls <= freed, f"{unit} is split"
        assert freed == {gpu for engine in attempt.engines for gpu in rollout[engine]}
        assert freed <= {gpu for replica in attempt.replicas for gpu in training[replica]}
        # The whole demand, counted anew, fits what stays; and the fullest unit is not above its share of it.
        lengths = LengthDistribution(history, LONGEST)
        demand = sum(math.ceil(lengths.expected(now) / 4) * 4 for lengths_of in held for now in lengths_of)
        room = memory * len(freed)
        assert demand <= room + 1e-6
        assert attempt.peak <= 1.0
        if room:
            assert attempt.peak >= demand / room - 1e-9


@settings(max_examples=300)
@given(steps(), st.floats(0, 400), st.floats(1, 10))
def test_more_memory_never_frees_later(case, memory: float, factor: float) -> None:
    def freed_at(found: list) -> int:
        return next((index for index, (_, _, attempt) in enumerate(found) if attempt and attempt.freed), len(found))

    less, more = play(case, memory), play(case, memory * factor)
    assert freed_at(more) <= freed_at(less)


@settings(max_examples=200)
@given(steps())
def test_with_memory_to_spare_it_frees_at_the_first_milestone_when_a_half_exists(case) -> None:
    """The half is searched completely: compared with trying every set of engines."""
    rollout, training, *_ = case
    found = [attempt for _, _, attempt in play(case, 1e12) if attempt is not None]
    assume(found)
    trains = {gpu for unit in training for gpu in unit}
    total = sum(map(len, rollout))
    rolls = {gpu for unit in rollout for gpu in unit}
    halves = []
    for size in range(1, len(rollout) + 1):
        for engines in itertools.combinations(range(len(rollout)), size):
            freed = {gpu for engine in engines for gpu in rollout[engine]}
            whole = all(not (set(u) & freed) or (set(u) & rolls) <= freed for u in training)
            if 2 * len(freed) == total and whole and freed <= trains:
                halves.append(engines)
    assert bool(found[0].freed) is bool(halves)
    if halves:
        held = next(held for finished, held, attempt in play(case, 1e12) if attempt is not None)
        cost = min(sum(sum(held[engine]) for engine in engines) for engines in halves)
        assert sum(sum(held[engine]) for engine in found[0].engines) == cost


@settings(max_examples=200)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=20), st.integers(0, 59), st.integers(0, 59))
def test_the_sum_of_expected_final_lengths_bounds_the_demand_at_any_time(
    history: list[int], now: int, later: int
) -> None:
    lengths = LengthDistribution(history, LONGEST)
    longer = [length for length in history if length > now]
    assume(longer)
    alive = sum(length > now + later for length in longer) / len(longer)
    assert (now + later) * alive <= lengths.expected(now) + 1e-9
