"""Migration: scaled ranks, the uncertainty in which nobody moves, the break-even, and exclusive endpoints."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from types import SimpleNamespace

import pytest

from orchestrator.api import RetryableError
from orchestrator.config.prediction_keys import PlacementSection
from orchestrator.events import EventLog, MemorySink
from orchestrator.placement.placer import TrajectoryPlacer, rates_by_name
from orchestrator.policies.placement.migration import (
    TrajectoryMove,
    TransmissionScheduler,
    WorkerPartition,
    choose_transfer,
)
from orchestrator.policies.prediction.length_predictor import LengthForecast
from orchestrator.policies.routing.turn_routing import Seat, TurnRouter
from orchestrator.proxy.worker_state import WorkerState
from scripts.bench.virtual_run import run


def test_group_sizes_scale_with_what_is_active() -> None:
    partition = WorkerPartition((7, 3, 5), (10, 30, 60))
    whole = [partition.worker_of(rank, 100) for rank in range(100)]
    assert [whole.count(worker) for worker in (7, 3, 5)] == [10, 30, 60]
    half = [partition.worker_of(rank, 50) for rank in range(50)]
    assert [half.count(worker) for worker in (7, 3, 5)] == [5, 15, 30]
    assert partition.worker_of(400, 100) == 5  # ranks beyond are the last one's
    assert WorkerPartition((1, 2, 3), (0, 4, 0)).worker_of(9, 4) == 2  # a worker without a group gets nobody
    with pytest.raises(ValueError, match="workers"):
        WorkerPartition((), ()).worker_of(0, 1)


def test_an_uncertain_trajectory_stays_while_its_worker_is_within_its_interval() -> None:
    partition = WorkerPartition((0, 1, 2), (10, 10, 10))
    assert partition.target_worker(-1, 15, 0, 29, 30) == 1  # it is nowhere yet
    assert partition.target_worker(0, 15, 5, 29, 30) == 0
    assert partition.target_worker(0, 15, 12, 29, 30) == 1
    assert partition.target_worker(2, 5, 0, 12, 30) == 0
    assert partition.target_worker(9, 5, 0, 29, 30) == 0  # its worker is gone


def test_a_move_is_made_where_it_pays_and_the_cheaper_way() -> None:
    assert choose_transfer(gain=1.0, transfer=0.5, recompute=2.0) == "transfer"
    assert choose_transfer(gain=1.0, transfer=2.0, recompute=0.5) == "recompute"
    assert choose_transfer(gain=0.4, transfer=0.5, recompute=2.0) == "stay"
    assert choose_transfer(gain=1.0, transfer=None, recompute=0.5) == "recompute"
    assert choose_transfer(gain=0.0, transfer=None, recompute=0.0) == "stay"


def test_transmissions_share_no_endpoint_and_the_longest_goes_first() -> None:
    transmissions = TransmissionScheduler()
    for name, source, target, length in (("a", 0, 1, 10.0), ("b", 1, 2, 30.0), ("c", 3, 4, 20.0), ("d", 5, 4, 40.0)):
        transmissions.request_move(TrajectoryMove(name, source, target, length))
    assert [move.trajectory for move in transmissions.start_moves()] == ["d", "b"]
    assert transmissions.start_moves() == []
    with pytest.raises(ValueError, match="is being sent"):
        transmissions.request_move(TrajectoryMove("d", 0, 1, 1.0))
    transmissions.end_move("d")
    assert [move.trajectory for move in transmissions.start_moves()] == ["c"]
    transmissions.end_move("b")
    assert [move.trajectory for move in transmissions.start_moves()] == ["a"]


def test_no_two_transmissions_ever_share_an_endpoint() -> None:
    draw = random.Random(5)
    for _ in range(200):
        transmissions, running = TransmissionScheduler(), {}
        for number in range(40):
            source, target = draw.sample(range(6), 2)
            transmissions.request_move(TrajectoryMove(f"{number}", source, target, draw.random()))
            running.update({move.trajectory: move for move in transmissions.start_moves()})
            ends = [end for move in running.values() for end in (move.source, move.target)]
            assert len(ends) == len(set(ends))
            if running and draw.random() < 0.6:
                gone = draw.choice(sorted(running))
                del running[gone]
                transmissions.end_move(gone)
        while transmissions._waiting or transmissions._running:
            running.update({move.trajectory: move for move in transmissions.start_moves()})
            assert running, "nothing starts though something waits"
            gone = sorted(running)[0]
            del running[gone]
            transmissions.end_move(gone)


class Wire:
    """Takes ``took`` seconds for any prefix; ``fails`` so often."""

    def __init__(self, took: float, fails: int = 0) -> None:
        self.took, self.fails = took, fails
        self.calls: list[tuple[str, int, int]] = []
        self.closed = False  # nothing can be sent

    def seconds(self, source: int, target: int, tokens: int) -> float | None:
        return None if self.closed else self.took

    async def send(self, trajectory: str, source: int, target: int, tokens: int) -> bool:
        self.calls.append((trajectory, source, target))
        await asyncio.sleep(self.took)
        if len(self.calls) <= self.fails:
            raise RetryableError("the wire broke")
        return True


def forecast(tokens: float) -> LengthForecast:
    return LengthForecast(tokens, tokens, tokens, 1.0, "model")


def fleet(wire: Wire | None, **settings: object) -> tuple[TrajectoryPlacer, TurnRouter, MemorySink]:
    chosen = PlacementSection.model_validate(
        {"enabled": True, "interference": 0.5, "certainty": 0.0, "renew_seconds": 1000.0, **settings}
    )
    router, sink = TurnRouter([Seat()] * 3), MemorySink()
    for worker in range(3):
        router.open_worker(worker)
    events = EventLog(sink, asyncio.get_running_loop().time)
    lanes = [WorkerState(SimpleNamespace(name=name), index) for index, name in enumerate("abc")]
    return TrajectoryPlacer(chosen, router, events, rates_by_name(chosen, lanes, lambda name: 64), wire), router, sink


def told(placing: TrajectoryPlacer, name: str, tokens: float, context: int) -> None:
    """A turn is over, and its forecast is there."""
    placing.turn_over(name, context, 0)
    placing.update(name, forecast(tokens))


def granted(router: TurnRouter, name: str) -> int:
    router.queue_turn(f"{name}/1", name, "game")
    found = router.grant_turn()
    assert found is not None
    router.end_turn(f"{name}/1")
    return found[1]


async def settled(placing: TrajectoryPlacer, router: TurnRouter) -> None:
    """Nine trajectories, the longest first, each on the worker of its rank."""
    for number in range(9):
        placing.begin(f"t{number}", "game", 1000.0 / (number + 1))
    for number in range(9):
        await placing.before(f"t{number}")
    workers = [granted(router, f"t{number}") for number in range(9)]
    assert workers == sorted(workers)
    assert set(workers) == {0, 1, 2}


def test_engines_that_come_between_two_steps_share_the_next_one() -> None:
    """As after a change of degrees: all trajectories are over, and the next ones begin within ``renew_seconds``."""

    async def scenario() -> None:
        placing, router, _ = fleet(None)
        placing.begin("before", "game", 100.0)
        await placing.before("before")
        placing.end("before")
        router.close_worker(2)
        placing.worker_left(2)
        router.open_worker(2)
        placing.worker_came(2)
        await settled(placing, router)

    run(scenario())


def test_a_trajectory_that_gets_longer_goes_to_the_long_ones_without_kv_transfer_too() -> None:
    async def scenario() -> None:
        placing, router, _ = fleet(None)
        await settled(placing, router)
        home = granted(router, "t8")
        told(placing, "t8", 5000.0, 100)
        await placing.before("t8")
        assert (home, granted(router, "t8")) == (2, 0)
        assert placing.stats()["moved"] == 1

    run(scenario())


def test_what_a_profile_says_of_prefill_is_what_a_move_without_kv_costs() -> None:
    async def moved(**settings: object) -> int:
        placing, router, _ = fleet(None, **settings)
        rates_of = placing.rates_of
        placing.rates_of = lambda worker: replace(rates_of(worker), prefill=10.0)
        await settled(placing, router)
        told(placing, "t8", 5000.0, 100)
        return placing.stats()["moved"]

    assert run(moved()) == 1, "100 tokens by rollout.placement.prefill_seconds: 0.01 s"
    assert run(moved(profile="p.json")) == 0, "by the profile: 1000 s, more than is gained"


def test_kv_is_sent_in_the_gap_and_waited_for_only_when_it_is_under_way() -> None:
    async def scenario() -> None:
        wire = Wire(0.01)
        placing, router, _ = fleet(wire)
        await settled(placing, router)
        told(placing, "t8", 5000.0, 1000)
        told(placing, "t7", 6000.0, 1000)  # the same ends: it has to wait for the other
        began = asyncio.get_running_loop().time()
        await placing.before("t7")  # its turn is ready: the move is given up
        assert asyncio.get_running_loop().time() == began
        assert granted(router, "t7") == 2
        await placing.before("t8")
        assert asyncio.get_running_loop().time() == pytest.approx(began + 0.01)
        assert granted(router, "t8") == 0
        assert wire.calls == [("t8", 2, 0)]
        assert placing.stats() == {"moved": 1, "sent": 1, "solved": 1}

    run(scenario())


def test_a_trajectory_that_moved_without_its_kv_is_not_moved_again_by_the_transfer_that_it_waited_for() -> None:
    async def scenario() -> None:
        wire = Wire(0.001)
        placing, router, _ = fleet(wire)
        await settled(placing, router)
        told(placing, "t8", 5000.0, 100)
        told(placing, "t7", 6000.0, 100)  # waits: t8 is under way between the same workers
        wire.closed = True
        placing.update("t7", forecast(7000.0))  # in the same gap: it goes at once, as no KV can be sent
        assert granted(router, "t7") == 0
        wire.closed = False
        await asyncio.sleep(1)
        assert wire.calls == [("t8", 2, 0)]
        assert placing.stats()["moved"] == 2

    run(scenario())


def test_a_transfer_that_fails_is_said_and_the_prefix_is_computed_anew() -> None:
    async def scenario() -> None:
        placing, router, sink = fleet(Wire(0.01, fails=1))
        await settled(placing, router)
        told(placing, "t8", 5000.0, 1000)
        await placing.before("t8")
        assert granted(router, "t8") == 0
        assert placing.stats() == {"moved": 1, "sent": 0, "solved": 1}
        assert "the wire broke" in sink.text()

    run(scenario())


def test_a_move_that_does_not_pay_is_not_made() -> None:
    async def scenario() -> None:
        placing, router, _ = fleet(None, prefill_seconds=10.0)
        await settled(placing, router)
        told(placing, "t8", 5000.0, 100)
        await placing.before("t8")
        assert granted(router, "t8") == 2

    run(scenario())


def test_what_was_placed_on_a_worker_that_is_gone_goes_on_elsewhere() -> None:
    async def scenario() -> None:
        placing, router, _ = fleet(None)
        await settled(placing, router)
        router.close_worker(2, cache_lost=True)
        await placing.before("t8")
        assert granted(router, "t8") in (0, 1)
        told(placing, "t8", 100.0, 100)
        await placing.before("t8")
        placing.end("t8")
        placing.end("t8")

    run(scenario())


def test_more_workers_than_trajectories_and_ends_in_any_order() -> None:
    async def scenario() -> None:
        placing, router, _ = fleet(None)
        placing.begin("only", "game", 10.0)
        await placing.before("only")
        assert granted(router, "only") in (0, 1, 2)
        told(placing, "only", 99.0, 5)
        told(placing, "unknown", 99.0, 5)
        await placing.before("unknown")
        placing.end("only")

    run(scenario())


def test_above_the_skew_a_turn_leaves_its_prefix_for_the_least_busy_worker() -> None:
    router = TurnRouter([Seat()] * 2, skew=3.0)
    router.open_worker(0)
    router.open_worker(1)
    assert granted(router, "mine") == 0
    for number in range(4):  # 0, 1, 0, 1, then only the first keeps its turns
        router.queue_turn(f"r{number}", f"other{number}", "game")
        router.grant_turn()
    router.end_turn("r1")
    router.queue_turn("r9", "other0", "game")  # 3 against 1: stays
    assert router.grant_turn() == ("r9", 0)
    assert granted(router, "mine") == 0
    router.queue_turn("r10", "other0", "game")
    router.grant_turn()
    assert granted(router, "mine") == 1  # 4 against 1
