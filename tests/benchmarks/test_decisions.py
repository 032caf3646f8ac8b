"""Time of the policies that decide while a run waits. `make bench` times them; else each is called once, and must be right.

They call what ``rl-coserve bench routing``, ``placement`` and ``allocation`` call, which judge percentiles and bars.
"""

from __future__ import annotations

import random
from types import ModuleType

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from scripts.bench.micro import allocation, placement, routing
from scripts.bench.papers.size_placement import WorkerSpeed, allocate, anneal, place_groups

SEED = 11


@pytest.mark.parametrize("case", routing.CASES, ids=lambda case: case.name)
def test_a_turn_is_routed(benchmark: BenchmarkFixture, case: routing.Case) -> None:
    traffic = routing.Traffic(case, SEED)

    def decide(*asked: str) -> tuple[str, int] | None:
        granted = traffic.decide(*asked)
        if granted is not None:
            traffic.running.append(granted[0])
        return granted

    running = len(traffic.running)
    granted = benchmark.pedantic(decide, setup=lambda: (traffic.end_turn(), {}), rounds=2000)
    assert granted is not None  # a slot came free, and somebody wants it
    assert len(traffic.running) == running


@pytest.mark.parametrize("fleet", placement.fleets())
def test_a_batch_is_placed(benchmark: BenchmarkFixture, fleet: str) -> None:
    lengths, workers = placement.predictions(random.Random(SEED)), placement.fleets()[fleet]
    found = benchmark.pedantic(place_groups, (lengths, workers), rounds=50, warmup_rounds=1)
    assert (
        0 < found.makespan <= place_groups(lengths, workers[: len(workers) // 2]).makespan
    )  # half of the workers are no better


@pytest.mark.parametrize("how", ["best", "annealed"])
def test_gpus_are_cut_into_workers(benchmark: BenchmarkFixture, how: str) -> None:
    draw = random.Random(SEED)
    lengths, kinds = allocation.predictions(draw), allocation.speeds(draw)
    best = allocate(lengths, allocation.GPUS, kinds)
    if how == "best":
        found = benchmark.pedantic(allocate, (lengths, allocation.GPUS, kinds), rounds=5)
        assert found == best
    else:
        found = benchmark.pedantic(anneal, (lengths, allocation.GPUS, kinds, draw), rounds=5)
        assert best.makespan <= found.makespan <= 1.01 * best.makespan
    assert sum(found.degrees) <= allocation.GPUS


@pytest.mark.parametrize("bench", [allocation, placement])
def test_no_time_at_all_holds_no_bar(bench: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    case = [1.0], [WorkerSpeed(1.0, (1.0,))]
    monkeypatch.setattr(placement, "random_case", lambda draw: case)
    monkeypatch.setattr("time.process_time", lambda: 1.0)  # of whole ticks, as under a limit of processor time
    found = bench.run(True, "")
    assert (found["value"], found["holds"]) == (0.0, False)
