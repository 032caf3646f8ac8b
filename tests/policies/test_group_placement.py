"""Placement and degrees: the cut is the dynamic program's optimum, the allocation is the best of all."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence

import pytest

from orchestrator.policies.parallelism.degree_reallocation import count_allocations
from scripts.bench.micro.placement import dynamic_program, random_case
from scripts.bench.papers.size_placement import (
    AnnealingSchedule,
    WorkerSpeed,
    allocate,
    anneal,
    cut_groups,
    place_groups,
)

FLAT = WorkerSpeed(1.0, (1.0,) * 50)


def seconds(groups: Sequence[Sequence[int]], lengths: Sequence[float], workers: Sequence[WorkerSpeed]) -> float:
    return max(
        (
            worker.costs[len(group) - 1] * max(lengths[one] for one in group)
            for group, worker in zip(groups, workers, strict=True)
            if group
        ),
        default=0.0,
    )


def test_the_makespan_is_the_dynamic_programs_to_the_last_bit_and_the_groups_have_it() -> None:
    draw = random.Random(20)
    for _ in range(2_000):
        lengths, workers = random_case(draw)
        placed = place_groups(lengths, workers)
        assert placed.makespan == dynamic_program(lengths, workers)
        groups = placed.groups()
        assert sorted(one for group in groups for one in group) == list(range(len(lengths)))
        assert [len(group) for group in groups] == placed.sizes()
        assert all(len(group) <= worker.capacity for group, worker in zip(groups, workers, strict=True))
        assert seconds(groups, lengths, workers) == placed.makespan
        ordered = [lengths[one] for group in groups for one in group]
        assert ordered == sorted(lengths, reverse=True)


def test_no_partition_of_any_shape_is_faster_on_workers_that_are_alike() -> None:
    draw = random.Random(21)
    for _ in range(60):
        lengths = [draw.choice([1, 2, 3, draw.paretovariate(1)]) for _ in range(draw.randint(1, 6))]
        table, value = [], 1.0
        for _ in lengths:
            table.append(value)
            value *= draw.uniform(1, 2)
        workers = [WorkerSpeed(0.5, tuple(table))] * draw.randint(1, 3)
        best = math.inf
        for owners in itertools.product(range(len(workers)), repeat=len(lengths)):
            groups = [[one for one, owner in enumerate(owners) if owner == worker] for worker in range(len(workers))]
            best = min(best, seconds(groups, lengths, workers))
        assert place_groups(lengths, workers).makespan == best


def test_equal_lengths_keep_their_order() -> None:
    assert place_groups([5.0] * 40, [FLAT, FLAT]).order.tolist() == list(range(40))
    assert place_groups([1, 7, 1, 7], [FLAT]).order.tolist() == [1, 3, 0, 2]


def test_nothing_below_a_known_makespan_is_one_question() -> None:
    lengths = [4.0, 3.0, 2.0, 1.0]
    workers = [WorkerSpeed(1.0, (1.0, 2.0, 3.0, 4.0))] * 2
    best = place_groups(lengths, workers).makespan
    assert cut_groups(lengths, workers, below=best) == ([], math.inf)
    starts, makespan = cut_groups(lengths, workers, below=math.nextafter(best, math.inf))
    assert makespan == best
    assert starts[-1] == 4


def test_more_workers_than_trajectories_and_none_at_all() -> None:
    placed = place_groups([3.0], [FLAT] * 3)
    assert placed.sizes() == [1, 0, 0]
    assert placed.makespan == 3.0
    assert place_groups([], [FLAT]).groups() == [()]
    assert place_groups([0.0, 0.0], [FLAT]).makespan == 0.0


@pytest.mark.parametrize("wrong", [math.nan, -1.0, math.inf])
def test_a_prediction_that_is_no_length_is_refused(wrong: float) -> None:
    with pytest.raises(ValueError, match="lengths"):
        place_groups([1.0, wrong], [FLAT])
    with pytest.raises(ValueError, match="lengths"):
        allocate([1.0, wrong], 2, {1: FLAT})


def test_what_no_worker_can_be_is_refused() -> None:
    with pytest.raises(ValueError, match="do not fit"):
        place_groups([1.0] * 3, [WorkerSpeed(1.0, (1.0,))] * 2)
    with pytest.raises(ValueError, match="at least one"):
        place_groups([1.0], [])
    for table in ((), (2.0, 1.0), (0.0,), (math.nan,)):
        with pytest.raises(ValueError, match="interference"):
            WorkerSpeed(1.0, table)
    with pytest.raises(ValueError, match="token_seconds"):
        WorkerSpeed(0.0, (1.0,))


def speeds(draw: random.Random, count: int) -> dict[int, WorkerSpeed]:
    """Degrees whose workers are faster the larger they are, by less than their size."""
    gain, slope = draw.uniform(0.3, 0.95), draw.uniform(0.01, 1)
    return {
        degree: WorkerSpeed(degree**-gain, tuple(1 + slope * number / degree for number in range(count)))
        for degree in (1, 2, 4, 8)
    }


def multisets(budget: int, degrees: Sequence[int]) -> set[tuple[int, ...]]:
    if not budget:
        return {()}
    return {
        tuple(sorted((*rest, degree), reverse=True))
        for degree in degrees
        if degree <= budget
        for rest in multisets(budget - degree, degrees)
    }


def test_the_allocation_is_the_best_of_all_and_annealing_is_within_one_percent() -> None:
    draw = random.Random(22)
    for _ in range(40):
        lengths = [draw.paretovariate(0.8) for _ in range(draw.randint(1, 40))]
        kinds = speeds(draw, len(lengths))
        budget = draw.choice([1, 3, 4, 7, 8, 16])
        every = multisets(budget, (1, 2, 4, 8))
        assert count_allocations(budget, (1, 2, 4, 8)) == len(every)
        best = min(place_groups(lengths, [kinds[degree] for degree in degrees]).makespan for degrees in every)
        found = allocate(lengths, budget, kinds)
        assert found.exact
        assert found.makespan == best
        assert found.degrees in every
        assert place_groups(lengths, [kinds[degree] for degree in found.degrees]).makespan == best
        annealed = anneal(lengths, budget, kinds, random.Random(1))
        assert not annealed.exact
        assert annealed.degrees in every
        assert best <= annealed.makespan <= 1.01 * best
        assert annealed == anneal(lengths, budget, kinds, random.Random(1))


def test_a_long_tail_gets_a_large_worker_and_short_ones_get_small_ones() -> None:
    kinds = {d: WorkerSpeed(d**-0.5, tuple(1 + 0.2 * number for number in range(200))) for d in (1, 2, 4, 8)}
    assert allocate([1000.0] + [10.0] * 100, 16, kinds).degrees[0] == 8
    assert allocate([10.0] * 100, 16, kinds).degrees == (1,) * 16


def test_budgets_and_degrees_that_do_not_go_together_are_refused() -> None:
    with pytest.raises(ValueError, match="whole servers"):
        allocate([1.0], 12, {1: FLAT})
    with pytest.raises(ValueError, match="no sum"):
        allocate([1.0], 3, {2: FLAT})
    with pytest.raises(ValueError, match="holds 9"):
        allocate([1.0] * 9, 8, {1: WorkerSpeed(1.0, (1.0,))})
    assert allocate([1.0], 8, {16: FLAT, 8: FLAT}).degrees == (8,), "16 would span servers"
    with pytest.raises(ValueError, match="between 0 and 1"):
        AnnealingSchedule(cooling=1.0)
