"""Where trajectories go when the servers that they are placed on come and leave: by rank, over those that are there, at once."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from orchestrator.api import ConfigError
from orchestrator.config import parse_config
from orchestrator.config.prediction_keys import PlacementSection
from orchestrator.events import EventLog, MemorySink
from orchestrator.placement.placer import TrajectoryPlacer, rates_by_name
from orchestrator.policies.placement.worker_load import WorkerRates
from orchestrator.policies.prediction.length_predictor import LengthForecast
from orchestrator.policies.routing.turn_routing import Seat, TurnRouter
from orchestrator.proxy.router_setup import may_come, planned_router
from orchestrator.proxy.worker_state import WorkerState
from scripts.bench.virtual_run import run

URL, OTHER = "http://127.0.0.1:8000", "http://127.0.0.1:8001"


class Wire:
    """Sends any prefix in ``took`` seconds."""

    def __init__(self, took: float) -> None:
        self.took = took
        self.begun: list[tuple[int, int]] = []
        self.ended: list[tuple[int, int]] = []

    def seconds(self, source: int, target: int, tokens: int) -> float | None:
        return self.took

    async def send(self, trajectory: str, source: int, target: int, tokens: int) -> bool:
        self.begun.append((source, target))
        await asyncio.sleep(self.took)
        self.ended.append((source, target))
        return True


class Fleet:
    """A placement over workers that come and leave, as a proxy would say it."""

    def __init__(self, number: int, wire: Wire | None = None, room: float = float("inf"), **settings: Any) -> None:
        chosen = PlacementSection.model_validate(
            {"enabled": True, "certainty": 0.0, "prefill_seconds": 0.0, "renew_seconds": 1000.0, **settings}
        )
        self.router = TurnRouter([Seat() for _ in range(number)])
        events = EventLog(MemorySink(), asyncio.get_running_loop().time)
        rates = WorkerRates((0.01, 0.015), room=room)
        self.placing = TrajectoryPlacer(chosen, self.router, events, lambda worker: rates, wire, 1e6)
        for worker in range(number):
            self.come(worker)

    def come(self, worker: int) -> None:
        self.router.open_worker(worker)
        self.placing.worker_came(worker)

    def leave(self, worker: int) -> None:
        self.router.close_worker(worker, cache_lost=True)
        self.placing.worker_left(worker)

    async def fill(self, number: int) -> None:
        """So many trajectories, the longest first, each on the worker of its rank."""
        for name in range(number):
            self.placing.begin(f"t{name}", "game", 1000.0 / (name + 1))
        for name in range(number):
            await self.placing.before(f"t{name}")

    def told(self, name: str, tokens: float, context: int) -> None:
        self.placing.turn_over(name, context, 0)
        self.placing.update(name, LengthForecast(tokens, tokens, tokens, 1.0, "model"))

    def where(self, name: str, task: str = "game") -> int:
        self.router.queue_turn(f"{name}/1", name, task)
        found = self.router.grant_turn()
        if found is None:
            self.router.end_turn(f"{name}/1")
            return -1
        self.router.end_turn(f"{name}/1")
        return found[1]


def test_what_a_server_that_left_had_goes_by_its_rank_over_the_others_at_once() -> None:
    async def scenario() -> None:
        fleet = Fleet(3)
        await fleet.fill(9)
        had = {name: fleet.where(name) for name in (f"t{number}" for number in range(9))}
        assert set(had.values()) == {0, 1, 2}
        solved = fleet.placing.stats()["solved"]
        fleet.leave(0)  # the one with the longest
        assert fleet.placing.stats()["solved"] == solved + 1, "placed anew, though nothing else has changed"
        now = {name: fleet.where(name) for name in had}
        assert set(now.values()) == {1, 2}
        assert {name for name, worker in had.items() if worker == 0} == {name for name in had if now[name] != had[name]}
        assert now["t0"] == 1, "the longest with the longest"
        fleet.leave(1)
        fleet.leave(2)
        assert [fleet.where(name) for name in had] == [-1] * 9
        fleet.come(1)  # they are placed anew, at their next turns
        for name in had:
            await fleet.placing.before(name)
        assert {fleet.where(name) for name in had} == {1}

    run(scenario())


def test_a_trajectory_that_no_forecast_has_come_of_since_looks_at_its_next_turn() -> None:
    async def scenario(migrate: bool) -> int:
        fleet = Fleet(1, migrate=migrate)
        await fleet.fill(4)
        fleet.told("t3", 100.0, 100)  # in a gap, and its forecast is there
        fleet.router.add_worker(Seat())
        fleet.come(1)
        await fleet.placing.before("t3")
        fleet.placing.begin("new", "game", 10000.0)
        await fleet.placing.before("new")
        assert {fleet.where("t3"), fleet.where("new")} <= {0, 1}
        return [fleet.where(f"t{number}") for number in range(4)].count(1)

    assert run(scenario(migrate=True)) == 1, "it takes up the server that came"
    assert run(scenario(migrate=False)) == 0, "trajectories stay where they are"


def test_what_waits_for_room_begins_on_a_server_that_came_and_leaves_one_that_left() -> None:
    async def scenario() -> None:
        fleet = Fleet(1, room=300.0)
        begun: dict[str, float] = {}

        async def play(name: str) -> None:
            await fleet.placing.before(name)
            begun[name] = asyncio.get_running_loop().time()

        for name in ("a", "b", "c"):
            fleet.placing.begin(name, "game", 250.0)
        tasks = [asyncio.create_task(play(name)) for name in ("a", "b", "c")]
        await asyncio.sleep(1.0)
        assert list(begun) == ["a"]
        fleet.router.add_worker(Seat())
        fleet.come(1)
        await asyncio.sleep(0.0)
        await asyncio.sleep(0.0)
        assert list(begun) == ["a", "b"]
        assert (fleet.where("a"), fleet.where("b")) == (0, 1)
        # c waits for one of the two. It leaves, and what has begun there goes on at the other: c waits there, not for ever.
        fleet.leave(fleet.placing._placed["c"].worker)
        left = 1 - next(iter(fleet.placing._groups.values())).partition.workers[0]  # type: ignore[union-attr]
        await asyncio.sleep(1.0)
        assert list(begun) == ["a", "b"]
        for name in ("a", "b"):
            fleet.placing.end(name)
        await asyncio.sleep(0.1)
        assert list(begun) == ["a", "b", "c"]
        assert fleet.where("c") == 1 - left
        await asyncio.gather(*tasks)

    run(scenario())


def test_who_waits_for_room_on_the_last_server_waits_for_nobody_when_it_leaves() -> None:
    async def scenario() -> None:
        fleet = Fleet(1, room=300.0)
        for name in ("a", "b"):
            fleet.placing.begin(name, "game", 250.0)
        tasks = [asyncio.create_task(fleet.placing.before(name)) for name in ("a", "b")]
        await asyncio.sleep(0.1)
        fleet.leave(0)
        async with asyncio.timeout(1.0):
            await asyncio.gather(*tasks)  # the router's queue has them now
        fleet.placing.end("a")
        fleet.placing.end("b")

    run(scenario())


def test_no_kv_is_sent_from_or_to_a_server_that_left_and_none_is_put_there_by_a_transfer_that_ends() -> None:
    async def scenario(leaves: int) -> None:
        wire = Wire(5.0)
        fleet = Fleet(3, wire, prefill_seconds=1.0)
        await fleet.fill(9)
        home = fleet.where("t8")
        fleet.told("t8", 1e6, 1000)  # the longest now: sent to 0
        fleet.told("t7", 2e6, 1000)  # waits: t8 is under way between the same workers
        await asyncio.sleep(1.0)
        assert (home, wire.begun) == (2, [(2, 0)])
        fleet.leave(leaves)
        await asyncio.sleep(10.0)
        await fleet.placing.before("t8")
        assert not any(leaves in ends for ends in (*wire.ended, *wire.begun[1:]))
        assert fleet.where("t8") != leaves
        assert fleet.placing._placed["t8"].worker != leaves

    for leaves in (0, 2):
        run(scenario(leaves))


def test_a_server_that_left_takes_nobody_when_one_of_its_trajectories_ends() -> None:
    async def scenario() -> None:
        fleet = Fleet(2, room=300.0)
        for name in ("a", "b", "c", "d"):
            fleet.placing.begin(name, "game", 250.0)
        tasks = [asyncio.create_task(fleet.placing.before(name)) for name in ("a", "b", "c", "d")]
        await asyncio.sleep(0.1)
        fleet.leave(1)
        fleet.placing._admit(1)  # as when something ends that was there
        assert {one.worker for one in fleet.placing._placed.values()} == {0}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    run(scenario())


def test_tasks_share_a_placement_as_long_as_they_share_workers() -> None:
    async def scenario() -> None:
        router = TurnRouter([Seat("H800"), Seat("H20")], affinity={"game": "H20", "code": "H800"})
        chosen = PlacementSection.model_validate({"enabled": True})
        events = EventLog(MemorySink(), asyncio.get_running_loop().time)
        rates = WorkerRates((0.01, 0.015))
        placing = TrajectoryPlacer(chosen, router, events, lambda worker: rates, None, 1e6)
        router.open_worker(0)
        placing.worker_came(0)
        placing.begin("g", "game", 10.0)  # no worker of its class is up in this moment
        placing.begin("c", "code", 10.0)
        router.open_worker(1)
        placing.worker_came(1)
        assert placing._group("game") is not placing._group("code"), "what was open in a moment is no matter"
        router.retire_worker(1)
        assert placing._group("game") is placing._group("code"), "the class is gone: both are on the other one"
        assert [name for _, name in placing._group("game").ranks] == ["c", "g"]
        router.readmit_worker(1)
        placing.begin("late", "game", 10.0)  # groups are made anew in this call, and in the next one
        assert [name for _, name in placing._group("game").ranks] == ["g", "late"]
        router.retire_worker(1)
        placing.end("g")
        assert [name for _, name in placing._group("code").ranks] == ["c", "late"]
        placing.end("c")
        placing.end("late")

    run(scenario())


def test_speeds_and_classes_may_name_servers_that_come_later_and_nothing_else(tmp_path: Any) -> None:
    def rollout(**more: Any) -> Any:
        base = {"workers": 1, "served": [URL, OTHER], "prediction": {"enabled": True}, "placement": {"enabled": True}}
        return parse_config({"rollout": {**base, "borrowed": {"most": 1}, **more}}).rollout

    settings = rollout()  # no error
    assert may_come(settings, OTHER)
    assert not may_come(settings, "http://127.0.0.1:8002")
    assert not may_come(rollout(borrowed={}), OTHER)
    named = rollout(borrowed={"file": "servers"})
    assert may_come(named, "http://127.0.0.1:8002")
    assert not may_come(named, "vllm-7")
    routing = rollout(routing={"hardware": {OTHER: "H20"}}).routing
    with pytest.raises(ConfigError, match="no rollout worker has this name"):
        planned_router(routing, ["vllm-0", URL], ["", ""], [False, True])
    planned_router(routing, ["vllm-0", URL], ["", ""], [False, True], others=lambda name: may_come(settings, name))


def test_what_a_server_does_that_came_later_is_known_by_its_name() -> None:
    lanes = [WorkerState(SimpleNamespace(name=name), index) for index, name in enumerate("ab")]
    rates = rates_by_name(
        PlacementSection.model_validate({"enabled": True, "speeds": {"c": 2.0}}), lanes, lambda name: 8
    )
    alone = rates(0).steps[0]
    lanes.append(WorkerState(SimpleNamespace(name="c"), 2))
    assert rates(2).steps[0] == alone / 2
