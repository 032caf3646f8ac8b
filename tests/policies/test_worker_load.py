"""What groups of trajectories take by a profile: KV, tool calls and spread count, and the best cut and degrees are the best."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence

import numpy as np
import pytest

from orchestrator.policies.parallelism.degree_reallocation import allocate_loads
from orchestrator.policies.parallelism.engine_profile import EngineLayout, EngineProfile, EngineShape, ProfilePoint
from orchestrator.policies.placement.worker_load import (
    TrajectoryLoads,
    TurnStatistics,
    WorkerRates,
    expected_makespan,
    place_loads,
    rates_of,
    sorted_loads,
)
from scripts.bench.papers.heddle import base, degrees
from scripts.bench.papers.size_placement import anneal


def drawn(draw: random.Random, count: int) -> TrajectoryLoads:
    """In which the order by tokens is also one by everything else."""
    tokens = sorted((draw.lognormvariate(4, 1) for _ in range(count)), reverse=True)
    gap, context, spread = draw.choice([0.0, 1.0]), draw.uniform(0, 30), draw.choice([0.0, 0.7])
    contexts, spreads = [context] * count, [spread] * count
    return sorted_loads(tokens, contexts, contexts, [gap * one for one in tokens], spreads, 1.5, 5000.0)[0]


def kinds(draw: random.Random) -> dict[int, WorkerRates]:
    gain, slope, read = draw.uniform(0.3, 0.9), draw.uniform(0, 0.3), draw.choice([0.0, 1e-5, 1e-4])
    room = draw.choice([math.inf, 500.0, 5000.0])
    return {d: WorkerRates((d**-gain, d**-gain * (1 + slope)), read / d, 1e-4 / d, room * d, 64) for d in (1, 2, 4)}


def slowest(loads: TrajectoryLoads, workers: Sequence[WorkerRates], sizes: Sequence[int]) -> float:
    starts = itertools.accumulate(sizes, initial=0)
    return max(
        loads.group_seconds(worker, start, size) for worker, start, size in zip(workers, starts, sizes, strict=False)
    )


def placed(loads: TrajectoryLoads, workers: Sequence[WorkerRates]) -> float:
    return expected_makespan(loads, place_loads(loads, workers)[0], workers)


def partitions(count: int, groups: int) -> list[tuple[int, ...]]:
    return [sizes for sizes in itertools.product(range(count + 1), repeat=groups) if sum(sizes) == count]


def test_the_cut_and_the_degrees_are_the_best_of_all() -> None:
    draw = random.Random(30)
    for _ in range(25):
        loads, rates = drawn(draw, draw.randint(1, 6)), kinds(draw)
        workers = [rates[degree] for degree in sorted(draw.choices((1, 2, 4), k=3), reverse=True)]
        starts, makespan = place_loads(loads, workers)
        sizes = [end - start for start, end in itertools.pairwise(starts)]
        best = min(slowest(loads, workers, sizes) for sizes in partitions(loads.count, 3))
        assert makespan == pytest.approx(best, rel=1e-9)
        assert slowest(loads, workers, sizes) == pytest.approx(makespan, rel=1e-12)
        every = [(4,), (2, 2), (2, 1, 1), (1, 1, 1, 1)]
        found = allocate_loads(loads, 4, rates)
        costs = {degrees: placed(loads, [rates[degree] for degree in degrees]) for degrees in every}
        if (
            loads.unsure
        ):  # the search takes each group's mean time for sure; equal degrees are compared with what it finds
            assert found.makespan == pytest.approx(costs[found.degrees], rel=1e-9)
            assert found.makespan <= min(costs[4,], costs[2, 2], costs[1, 1, 1, 1]) * (1 + 1e-9)
            continue
        assert found.makespan == pytest.approx(min(costs.values()), rel=1e-9)
        assert costs[found.degrees] == pytest.approx(found.makespan, rel=1e-9)
        assert anneal(loads, 4, rates, random.Random(0)).makespan <= 1.01 * found.makespan


def test_a_group_takes_longer_with_one_more_and_less_when_all_are_shorter() -> None:
    draw = random.Random(31)
    for _ in range(200):
        loads, rates = drawn(draw, 30), draw.choice(list(kinds(draw).values()))
        start, count = draw.randint(0, 10), draw.randint(1, 10)
        here = loads.group_seconds(rates, start, count)
        assert loads.group_seconds(rates, start, count + 1) >= here
        assert loads.group_seconds(rates, start + 1, count) <= here * (1 + 1e-12)
        limit = here * draw.uniform(0.5, 3)
        most, seconds, beyond = loads.most_within(rates, start, limit, draw.randint(0, 40))
        assert most == max((k for k in range(31 - start) if loads.group_seconds(rates, start, k) <= limit), default=0)
        assert seconds == (loads.group_seconds(rates, start, most) if most else 0.0)
        assert beyond == (math.inf if start + most == 30 else loads.group_seconds(rates, start, most + 1))


def even(count: int, tokens: float = 100.0, gap: float = 0.0, spread: float = 0.0) -> TrajectoryLoads:
    return sorted_loads([tokens] * count, [0.0] * count, [0.0] * count, [gap] * count, [spread] * count)[0]


def test_trajectories_whose_kv_does_not_fit_together_wait_for_each_other() -> None:
    roomy, tight = (WorkerRates((1.0, 1.01), room=room) for room in (math.inf, 1000.0))
    few, many = even(10), even(40)
    assert few.group_seconds(tight, 0, 10) == few.group_seconds(roomy, 0, 10)
    assert many.group_seconds(tight, 0, 40) > 1.5 * many.group_seconds(roomy, 0, 40)
    sizes = np.diff(place_loads(many, [tight, roomy])[0]).tolist()
    assert sizes[0] < sizes[1], "what would not fit is cut off"


def test_while_the_longest_waits_for_its_tools_the_others_stand_less_in_its_way() -> None:
    rates = WorkerRates((1.0, 1.5))
    busy, apart = even(8).group_seconds(rates, 0, 8), even(8, gap=300.0).group_seconds(rates, 0, 8)
    assert busy == pytest.approx(100 * 4.5)
    assert 300 + 100 < apart < 300 + busy
    assert even(1, gap=300.0).group_seconds(rates, 0, 1) == pytest.approx(400.0)


def test_of_many_that_may_become_long_some_do() -> None:
    sure, unsure = even(64), even(64, spread=1.0)
    assert sure.longest(0, 64) == 100.0
    assert unsure.longest(0, 1) == pytest.approx(100.0 * math.exp(-0.5)), "the median, of the same mean"
    assert unsure.longest(0, 64) > 5 * unsure.longest(0, 1)
    rates = WorkerRates((1e-9,), context=1.0)
    assert sure.group_seconds(rates, 0, 1) < unsure.group_seconds(rates, 0, 1), (
        "the same tokens, but some contexts are read for long"
    )
    slow, fast = WorkerRates((2.0, 2.01)), WorkerRates((1.0, 1.1))
    shares = [np.diff(place_loads(loads, [fast, slow])[0]).tolist()[1] for loads in (sure, unsure)]
    assert shares[1] < shares[0], "a slow worker gets fewer of them"


@pytest.mark.parametrize("workers", [1, 2, 4, 8])
def test_the_makespan_that_is_expected_is_the_mean_of_many_draws(workers: int) -> None:
    """Heddle takes lengths for known (5.2). The more engines, the further is the last one's mean end beyond each one's mean."""
    draw, count, spread = random.Random(5), 160, 0.6
    means = sorted((draw.lognormvariate(5, 0.3) for _ in range(count)), reverse=True)
    loads = sorted_loads(means, [50.0] * count, [50.0] * count, [0.0] * count, [spread] * count, 1.5, 4000.0)[0]
    rates = [WorkerRates((1.0, 1.02), 1e-5, 1e-3)] * workers
    starts, makespan = place_loads(loads, rates)
    groups = [(one, start, end - start) for one, start, end in zip(rates, starts, starts[1:], strict=False)]
    most, drawn_ends = (4000.0 - 50.0) / 1.5, list[float]()
    for _ in range(2000):
        said = [min(most, mean * math.exp(draw.gauss(-spread * spread / 2, spread))) for mean in means]
        longest = [max(said[start : start + size]) for _, start, size in groups]
        drawn_ends.append(max(loads.group_seconds(*group, one) for group, one in zip(groups, longest, strict=True)))
    found = expected_makespan(loads, starts, rates)
    assert found == pytest.approx(sum(drawn_ends) / len(drawn_ends), rel=0.02)
    assert found > {1: 1.2, 2: 1.35, 4: 1.6, 8: 1.9}[workers] * makespan
    sure = even(160)
    assert expected_makespan(sure, *(place_loads(sure, rates)[0], rates)) == place_loads(sure, rates)[1]


def test_the_manager_counts_on_one_of_several_engines_being_unlucky() -> None:
    """Heddle's search workload: by the longest mean time of a group degree 2 is better by 1 %, and it takes 1.1 times as long."""
    assert degrees(base("search", 8)) == (4, 4)


def test_equal_degrees_are_kept_unless_others_are_better_by_the_margin() -> None:
    rates = {1: WorkerRates((1.0, 1.01)), 2: WorkerRates((0.9, 0.905))}
    loads = sorted_loads([1000.0] + [990.0] * 3, [0.0] * 4, [0.0] * 4, [0.0] * 4, [0.0] * 4)[0]
    found = allocate_loads(loads, 4, rates)
    assert len(set(found.degrees)) == 2 or found.exact
    kept = allocate_loads(loads, 4, rates, margin=0.5)
    assert len(set(kept.degrees)) == 1
    assert kept.makespan <= found.makespan / 0.5


def test_a_profile_gives_its_rates_back() -> None:
    truth = WorkerRates(tuple(0.01 + 0.001 * n for n in range(1, 17)), 1e-6, 2e-5, 4000.0, 16)
    layout, points = EngineLayout(2), []
    for batch in (1, 2, 4, 8, 16):
        for tokens in (100, 400, 1600):
            seconds = truth.step_seconds(batch) + truth.context * batch * tokens
            points += [ProfilePoint("decode", layout, batch, tokens, seconds)]
            points += [ProfilePoint("prefill", layout, batch, tokens, truth.prefill * batch * tokens)]
    found = rates_of(EngineProfile(points, [EngineShape(layout, 1.0, 4000, 1, 1.0)]), layout, 16)
    assert found.steps == pytest.approx(truth.steps)
    assert (found.context, found.prefill) == pytest.approx((1e-6, 2e-5))
    assert (found.room, found.slots) == (4000.0, 16)
    with pytest.raises(KeyError):
        rates_of(EngineProfile(points), EngineLayout(8), 16)


@pytest.mark.parametrize("wrong", [math.nan, -1.0, math.inf])
def test_what_is_no_number_is_refused(wrong: float) -> None:
    with pytest.raises(ValueError, match="tokens"):
        sorted_loads([wrong], [0.0], [0.0], [0.0], [0.0])
    with pytest.raises(ValueError, match="gaps"):
        sorted_loads([1.0], [0.0], [0.0], [wrong], [0.0])
    with pytest.raises(ValueError, match="steps"):
        WorkerRates((wrong,))
    with pytest.raises(ValueError, match="at least one"):
        place_loads(even(1), [])


def test_the_pace_of_turns_is_a_mean_by_task() -> None:
    pace = TurnStatistics()
    assert (pace.context_growth(["a"]), pace.gap_seconds("a"), pace.prompt_tokens("a")) == (1.0, 0.0, 0.0)
    pace.record_turn("a", 100, 30, True)
    pace.record_turn("a", 100, 50, False)
    pace.record_gap("a", 2.0)
    pace.record_gap("a", 4.0)
    assert (pace.context_growth(["a", "b"]), pace.gap_seconds("a"), pace.prompt_tokens("a")) == (1.25, 3.0, 30.0)
