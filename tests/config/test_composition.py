"""Where two papers' policies want different things (docs/composition.md): what is decided holds."""

from __future__ import annotations

import asyncio

import pytest

from orchestrator.api import ConfigError, GenerationRequest, KvMove, Sampling
from orchestrator.config import load_config
from orchestrator.config.prediction_keys import PlacementSection
from orchestrator.events import EventLog, MemorySink
from orchestrator.placement.placer import TrajectoryPlacer
from orchestrator.policies.placement.worker_load import WorkerRates
from orchestrator.policies.prediction.length_predictor import LengthForecast
from orchestrator.policies.routing.turn_routing import Seat, TurnRouter
from orchestrator.sim.simulated_worker import SimWeights, SimWorker
from scripts.bench.virtual_run import run


def placing(router: TurnRouter, *rates: WorkerRates) -> TrajectoryPlacer:
    chosen = PlacementSection.model_validate({"enabled": True, "certainty": 0.0, "prefill_seconds": 0.0})
    events = EventLog(MemorySink(), asyncio.get_running_loop().time)
    return TrajectoryPlacer(chosen, router, events, lambda worker: rates[worker], None, 1000.0)


def opened(*seats: Seat, **settings: object) -> TurnRouter:
    router = TurnRouter(seats, **settings)  # type: ignore[arg-type]
    for worker in range(len(seats)):
        router.open_worker(worker)
    return router


def granted(router: TurnRouter, name: str, task: str) -> int:
    router.queue_turn(f"{name}/1", name, task)
    found = router.grant_turn()
    assert found is not None
    router.end_turn(f"{name}/1")
    return found[1]


def test_placement_never_leaves_the_class_that_a_task_asks_for() -> None:
    async def scenario() -> None:
        router = opened(Seat("H800"), Seat("H20"), Seat("H20"), affinity={"game": "H20", "code": "H800"})
        found = placing(
            router, WorkerRates((0.001, 0.002)), WorkerRates((1.0, 1.1)), WorkerRates((1.0, 1.1))
        )  # the H800 is much faster
        for number in range(8):
            found.begin(f"g{number}", "game", 100.0 - number)
            found.begin(f"c{number}", "code", 100.0 - number)
        for number in range(8):
            await found.before(f"g{number}")
            await found.before(f"c{number}")
        assert {granted(router, f"g{number}", "game") for number in range(8)} == {1, 2}
        assert {granted(router, f"c{number}", "code") for number in range(8)} == {0}
        found.turn_over("g7", 10, 10)
        found.update(
            "g7", LengthForecast(900.0, 900.0, 900.0, 2.0, "model")
        )  # the longest of all: still not on the H800
        await found.before("g7")
        assert granted(router, "g7", "game") in (1, 2)

    run(scenario())


def test_the_longest_begins_first_where_kv_has_no_room_for_all_and_every_one_begins() -> None:
    async def scenario() -> None:
        router = opened(Seat())
        found = placing(router, WorkerRates((1.0, 1.1), room=300.0))
        begun: list[str] = []

        async def play(name: str) -> None:
            await found.before(name)
            begun.append(name)
            await asyncio.sleep(10.0)
            found.end(name)

        lengths = {"a": 100.0, "b": 300.0, "c": 200.0, "d": 400.0}
        for name, tokens in lengths.items():
            found.begin(name, "game", tokens)
        tasks = [asyncio.create_task(play(name)) for name in lengths]
        await asyncio.sleep(1.0)
        assert begun == ["a", "b"], "b alone ends with 300; a third would have 100 to 200 more meanwhile"
        await asyncio.wait(tasks)
        assert begun == ["a", "b", "d", "c"], "the longest that waits goes first"

    run(scenario())


def test_forecasts_that_tell_nothing_apart_spread_trajectories_evenly_and_sure_ones_set_the_longest_apart() -> None:
    async def scenario(spread: float, power: float) -> list[int]:
        router = opened(Seat(), Seat())
        rates = WorkerRates(tuple(1.0 + 0.05 * n for n in range(64)))
        found = placing(router, rates, rates)
        lengths = {f"t{number}": 400.0 / (1 + number) ** power for number in range(40)}
        for name, tokens in lengths.items():
            found.begin(name, "game", tokens)
            found.update(name, LengthForecast(tokens, tokens / spread, tokens * spread, 1.0, "model"))
        for name in lengths:
            await found.before(name)
        return [granted(router, name, "game") for name in lengths]

    unsure = run(scenario(6.0, 0.1))
    assert unsure.count(0) == unsure.count(1) == 20
    sure = run(scenario(1.0, 1.0))
    assert sure.count(sure[0]) < 10, "the longest has few beside it"


def test_a_worker_that_is_done_soon_relieves_one_that_is_not_of_what_is_in_a_gap() -> None:
    async def scenario() -> None:
        router = opened(Seat(), Seat())
        rates = WorkerRates((1.0, 1.5, 2.0, 2.5))
        found = placing(router, rates, rates)
        for number in range(4):
            found.begin(f"t{number}", "game", 100.0)
            found.update(f"t{number}", LengthForecast(100.0, 10.0, 400.0, 2.0, "model"))
        for number in range(4):
            await found.before(f"t{number}")
        homes = {f"t{number}": granted(router, f"t{number}", "game") for number in range(4)}
        assert sorted(homes.values()) == [0, 0, 1, 1]
        gone = [name for name, worker in homes.items() if worker == 1]
        for name in gone:
            found.end(name)
        stays = next(name for name, worker in homes.items() if worker == 0)
        found.turn_over(stays, 10, 10)
        found.update(stays, LengthForecast(90.0, 9.0, 360.0, 1.0, "model"))
        await found.before(stays)
        assert granted(router, stays, "game") == 1, "nobody is there any more"
        assert found.moved == 1

    run(scenario())


def test_kv_moves_between_workers_of_one_weight_version_only() -> None:
    async def scenario(same: bool) -> int:
        config = load_config(None, ["rollout.workers=2", "sim.update_seconds=0.01", "sim.response_tokens_mean=4"])
        weights = SimWeights()
        weights.put(0)
        weights.put(1)
        workers = [SimWorker(name, config, weights) for name in ("sim-0", "sim-1")]
        for worker, version in zip(workers, (1, 1 if same else 0), strict=True):
            await worker.suspend()
            await worker.update(version)
            await worker.resume()
            weights.holders[worker.name] = worker
        prompt = tuple(range(2, 40))
        await workers[0].add([GenerationRequest("r", "t", 0, prompt, Sampling(max_tokens=8), "sim")])
        done = await workers[0].completions()
        context = prompt + done[0].token_ids + (3,)
        moved = await workers[1].fetch_kv(KvMove("t", context, workers[0].name, 5.0))
        for worker in workers:
            await worker.close()
        return moved.tokens

    assert run(scenario(True)) > 30
    assert run(scenario(False)) == 0


@pytest.mark.parametrize("eta", ["redundant_groups", "redundant_members"])
def test_rounds_speculate_themselves(eta: str) -> None:
    with pytest.raises(ConfigError, match="speculates itself"):
        load_config(None, ["rollout.rounds.enabled=true", f"rollout.{eta}=1.5"])
