"""A run's processes in its pools: what does not fit is refused before anything starts; a worker moves when its place fails."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest

from orchestrator.api import ConfigError, MachineGone, PlacedWorker, RetryableError, RunError
from orchestrator.cluster import ActorGen
from orchestrator.cluster.actor import Actor
from orchestrator.config import load_config
from orchestrator.policies.placement.device_allocation import DeviceBinding, DeviceWish
from orchestrator.resources import EngineSeat, Placement, ResourceManager
from orchestrator.runtime import engine_cuts, pool_requests
from orchestrator.transfer import MemoryMetadata
from scripts.bench.virtual_run import run
from tests.support.engines import rollout_worker

COLOCATED = ["run.mode=sync_plus", "rollout.alpha=0", "trainer.stream=true", "rollout.engine.kv_cache_mb=8"]
SMALL = ["rollout.workers=3", "resources.pools={H800 = 2, H20 = 2}", "resources.rollout={H800 = 1, H20 = 2}"]


def test_each_process_asks_for_its_class_and_gets_devices_of_its_own() -> None:
    config = load_config(None, SMALL)
    metadata = MemoryMetadata()
    heard: list[DeviceBinding] = []
    manager, places = pool_requests.place(config, metadata, "job-1", heard.append)
    assert [(item.wish.worker, item.hardware, item.devices) for item in heard] == [
        ("job-1/trainer", "H800", (0,)),
        ("job-1/vllm-0", "H800", (1,)),
        ("job-1/vllm-1", "H20", (0,)),
        ("job-1/vllm-2", "H20", (1,)),
    ]
    assert [*places] == ["trainer", "vllm-0", "vllm-1", "vllm-2"]
    with pytest.raises(RetryableError, match="job-2/trainer needs 1 devices of H800"):
        pool_requests.place(config, metadata, "job-2")
    manager.close()
    pool_requests.place(config, metadata, "job-2")


def test_a_run_gets_the_devices_of_a_job_that_died_and_none_of_one_that_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    config, metadata = load_config(None, [*SMALL, "resources.silent=6"]), MemoryMetadata()
    said: list[str] = []

    async def at_once(work: Any, *given: Any) -> Any:
        return work(*given)

    monkeypatch.setattr(pool_requests.asyncio, "to_thread", at_once)  # virtual time knows no threads

    async def main() -> None:
        first, _ = pool_requests.place(config, metadata, "first")
        beating = asyncio.create_task(pool_requests.keep_beating(first, 6.0))
        with pytest.raises(RetryableError, match="second/trainer needs 1 devices"):
            await pool_requests.place_beside_others(config, metadata, "second", lambda _: None, said.append)
        assert (said, len(first.view().bindings)) == ([], 4)
        beating.cancel()  # it is killed
        begun = asyncio.get_running_loop().time()
        manager, places = await pool_requests.place_beside_others(
            config, metadata, "second", lambda _: None, said.append
        )
        assert asyncio.get_running_loop().time() - begun == pytest.approx(6.0, abs=1.1)
        assert said == ["no sign of life from first for 6 s: its devices are free"]
        assert {item.wish.owner for item in manager.view().bindings.values()} == {"second"}
        assert len(places) == 4
        with pytest.raises(RunError, match="another job now has"):
            await pool_requests.keep_beating(first, 6.0)

    run(main())


def test_the_slurm_job_of_one_node_asks_for_the_gpus_that_a_default_run_reserves() -> None:
    script = Path(__file__).parents[2] / "deploy" / "slurm" / "one_node.sbatch"
    asked = re.search(r"^#SBATCH --gres=gpu:(\d+)$", script.read_text(encoding="utf-8"), re.MULTILINE)
    assert asked is not None
    assert int(asked[1]) == sum(devices for _, _, devices in pool_requests.wishes(load_config(None, [])))


def test_without_pools_nothing_is_bound_and_nothing_is_checked() -> None:
    pool_requests.check(load_config(None, []))
    worker = rollout_worker("vllm-0")
    assert isinstance(worker, PlacedWorker)
    assert worker.hardware == ""


@pytest.mark.parametrize(
    ("overrides", "field", "words"),
    [
        ([*SMALL, "rollout.workers=4"], "resources.rollout", "add up to rollout.workers = 4"),
        (["resources.rollout={H20 = 1}"], "resources.rollout", "name the pools too"),
        (["resources.pools={CPU = 4}"], "resources.pools", "no pool serves this class"),
        (["resources.pools={H800 = 1}"], "resources.pools", "does not fit"),
        (["resources.pools={H800 = 1, H20 = 1}", "resources.devices_per_worker=2"], "resources.devices", "at most 1"),
        ([*SMALL, "rollout.routing.affinity.default=B200"], "rollout.routing.affinity.default", "there are: H800, H20"),
        (["rollout.routing.hardware={vllm-9 = 'H20'}"], "rollout.routing.hardware", "vllm-0"),
    ],
)
def test_what_does_not_fit_is_one_clear_error_before_anything_starts(
    overrides: list[str], field: str, words: str
) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        pool_requests.check(load_config(None, overrides))
    assert caught.value.field == field


def test_routing_finds_the_classes_that_the_pools_give() -> None:
    pool_requests.check(load_config(None, [*SMALL, "rollout.routing.affinity={frozenlake = 'H800', default = 'H20'}"]))


class PlacementDouble:
    """Counts; a place named "bad" cannot be reserved."""

    def __init__(self, places: list[str]) -> None:
        self.left = places
        self.moves = 0
        self.gone = False

    def machine_gone(self) -> bool:
        return self.gone

    def bind(self) -> DeviceBinding:
        return DeviceBinding(DeviceWish("w", "H800"), self.left[0], (0,))

    def place(self, part: int = 0) -> dict[str, Any]:
        if self.left[0] == "bad":
            raise RetryableError("Ray could not place it")
        return {}

    def move(self) -> DeviceBinding:
        if len(self.left) == 1:
            raise RetryableError("none are left")
        self.moves += 1
        self.left.pop(0)
        return self.bind()


def test_a_worker_restarts_in_place_first_and_moves_when_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    placement = PlacementDouble(["H800", "bad", "H20"])
    worker = rollout_worker("vllm-0", placement=placement)  # type: ignore[arg-type]
    started: list[str] = []

    async def create(*args: Any) -> int:
        started.append(worker.hardware)
        if started == ["H800", "H800"]:
            raise RetryableError("no engine")
        return 1

    async def hear(*_: Any) -> None: ...

    monkeypatch.setattr(Actor, "start", lambda self: None)
    monkeypatch.setattr(ActorGen, "hear", hear)
    monkeypatch.setattr(worker, "_call", create)

    async def scenario() -> None:
        await worker.start()
        with pytest.raises(RetryableError, match="no engine"):
            await worker.restart()
        assert placement.moves == 0
        with pytest.raises(RetryableError, match="Ray could not place it"):
            await worker.restart()
        await worker.restart()
        assert (worker.hardware, placement.moves) == ("H20", 2)
        await worker.restart()
        assert placement.moves == 2, "in place again"

    asyncio.run(scenario())
    assert started == ["H800", "H800", "H20", "H20"]


def test_a_worker_whose_machine_is_gone_moves_at_once_and_waits_for_it_where_it_cannot(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    placement = PlacementDouble(["H800", "H20"])
    worker = rollout_worker("vllm-0", placement=placement)  # type: ignore[arg-type]

    async def nothing(*_: Any) -> int:
        if dies:
            placement.gone = dies.pop()
            raise RetryableError("the node died meanwhile")
        return 1

    dies: list[bool] = []
    monkeypatch.setattr(Actor, "start", lambda self: None)
    monkeypatch.setattr(ActorGen, "hear", nothing)
    monkeypatch.setattr(worker, "_call", nothing)

    async def scenario() -> None:
        placement.gone = True
        await worker.restart()
        assert (worker.hardware, placement.moves) == ("H20", 1)
        for _ in range(3):
            with pytest.raises(MachineGone, match="the machine of vllm-0 is gone"):
                await worker.restart()
        placement.gone = False
        dies.append(True)  # while it starts
        with pytest.raises(MachineGone):
            await worker.restart()
        placement.gone = False
        await worker.restart()
        assert placement.moves == 1, "in its place"

    asyncio.run(scenario())


def test_devices_that_are_away_with_their_machine_are_not_marked_as_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = pytest.importorskip("ray")
    config = load_config(None, ["resources.pools={H800=1, H20=2}", "resources.compatible={H20=['H20']}"])
    manager, places = pool_requests.place(config, None, "")
    monkeypatch.setattr(Placement, "machine_gone", lambda self: True)
    monkeypatch.setattr(ray, "cluster_resources", dict)
    with pytest.raises(RetryableError):
        places["vllm-0"].move()
    assert manager.view().free("H20") == [1]
    assert places["vllm-0"].bind().devices == (0,)


NODES = ["ray.address=auto", "resources.devices_per_server=4", "rollout.workers=8"]
PLANNED = "rollout.planner.enabled=true"
DEGREES = [f"rollout.{on}.enabled=true" for on in ("prediction", "placement", "placement.degrees")]


@pytest.mark.parametrize(
    ("key", "given"),
    [
        ("resources.rollout", [*SMALL, PLANNED]),
        ("resources.devices_per_worker", [PLANNED, "resources.pools={H800=8}", "resources.devices_per_worker=2"]),
        ("rollout.workers", [*NODES, PLANNED, "rollout.workers=6"]),
        ("rollout.workers", [*NODES, PLANNED, "resources.devices_per_server=3", "rollout.workers=6"]),
        ("rollout.planner.max_tp", [*NODES, PLANNED]),
        ("rollout.planner.max_tp", [*NODES, PLANNED, "rollout.planner.max_tp=8"]),
        ("rollout.placement.degrees.speeds", [*NODES, *DEGREES, "rollout.placement.degrees.speeds={4=1.0, 8=0.5}"]),
        ("ray.address", [PLANNED, "ray.address=auto", "rollout.colocation.enabled=true", *COLOCATED]),
    ],
)
def test_what_engines_that_are_cut_anew_cannot_have_is_one_error(key: str, given: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        engine_cuts.check(load_config(None, given))
    assert caught.value.field == key


@pytest.mark.parametrize(
    "given",
    [
        [*NODES, PLANNED, "rollout.planner.max_tp=4"],
        [
            *NODES,
            *DEGREES,
            "rollout.placement.degrees.speeds={1=1.0, 4=0.6, 16=0.5}",
        ],  # 16: of more devices than there are
        [*NODES[1:], PLANNED, "rollout.workers=6"],
        [PLANNED, "rollout.colocation.enabled=true", *COLOCATED],
    ],
    ids=["within a node", "more devices than there are", "this machine, however many", "colocated on this machine"],
)
def test_what_engines_that_are_cut_anew_can_have_is_not_refused(given: list[str]) -> None:
    engine_cuts.check(load_config(None, given))


def test_engines_that_are_cut_anew_have_devices_of_one_class_that_are_bound_together() -> None:
    config = load_config(None, [PLANNED, "resources.pools={H800=1, H20=4}", "rollout.workers=4"])
    engine_cuts.check(config)
    pool_requests.check(config)
    manager, places = pool_requests.place(config, None, "job")
    bindings = manager.view().bindings
    assert {name: item.devices for name, item in bindings.items()} == {"job/trainer": (0,), "job/engines": (0, 1, 2, 3)}
    seat = places["vllm-2"]
    assert isinstance(seat, EngineSeat)
    seat.resize(2)
    assert (seat.bind().hardware, seat.bind().devices) == ("H20", (2, 3))


def test_the_compatible_classes_of_a_config_are_used() -> None:
    config = load_config(None, ["resources.pools={H800 = 1, CPU = 2}", "resources.compatible={H20 = ['CPU']}"])
    _, places = pool_requests.place(config, None, "")
    binding = places["vllm-0"].bind()
    assert (binding.hardware, binding.fallback) == ("CPU", "there is no pool of class H20")
    assert isinstance(places["vllm-0"]._manager, ResourceManager)
