"""Devices by the cluster: nodes with logical GPUs, an actor per role that only reports what it sees. No device has two owners."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.api import ConfigError, RetryableError
from orchestrator.cluster import ActorGen
from orchestrator.cluster.actor import FirstReport
from orchestrator.config import load_config
from orchestrator.proxy.resize import engine_seats
from orchestrator.resources import EngineSeat, Placement, placement_groups, reserve
from orchestrator.runtime import device_plan, engine_actors, engine_cuts, pool_requests
from orchestrator.runtime.engine_actors import RayWorker, VllmEngine
from orchestrator.runtime.node_check import NodeCheck
from tests.support.engines import rollout_worker

ray = pytest.importorskip("ray")
from tests.support.ray_nodes import GPUS, all_free, nodes, processes_seen  # noqa: E402

pytestmark = [pytest.mark.engine, pytest.mark.timeout(180)]

NODES = 4
# Of two classes, two nodes each: 4 ranks of 4 devices, 2 engines of TP 2 x PP 2, 4 of TP 2. Every device of the cluster.
POOLS = ["resources.pools={H800=16, H20=16}", "ray.address=auto"]
WHOLE = [*POOLS]
WHOLE += ["trainer.tensor_parallel=4", "resources.devices_per_rank=4"]
WHOLE += [
    "rollout.engines=[{count=4, hardware='H20', tensor_parallel_size=2},"
    "{count=2, hardware='H20', tensor_parallel_size=2, pipeline_parallel_size=2}]"
]


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    with nodes(NODES):
        yield


@pytest.fixture(autouse=True)
def start_free() -> None:
    assert all_free()


def test_a_run_over_nodes_gives_every_device_one_owner_of_its_class_and_an_engine_one_node() -> None:
    config = load_config(None, WHOLE)
    manager, places = pool_requests.place(config, None, "job")
    try:
        pool_requests.reserve_all(config, places)
        found = processes_seen(config, places)
    finally:
        for place in places.values():
            place.release()
    owners = [(seen.node, device) for seen in found.values() for device in seen.devices]
    assert len(owners) == len(set(owners)) == NODES * GPUS  # each process is in one node
    assert {name: (seen.hardware, len(seen.devices)) for name, seen in found.items()} == {
        **dict.fromkeys(("trainer", "trainer-1", "trainer-2", "trainer-3"), ("H800", 4)),
        **{f"vllm-{number}": ("H20", 2) for number in range(4)},
        **{f"vllm-{number}": ("H20", 4) for number in (4, 5)},
    }
    assert manager.view().bindings == {}


def test_the_plan_of_a_run_names_a_node_for_every_process_and_gives_all_of_it_back() -> None:
    begun = time.monotonic()
    rows = device_plan.rehearse(load_config(None, WHOLE), print)
    assert time.monotonic() - begun < 5
    assert [row.process for row in rows] == [name for name, _, _ in pool_requests.wishes(load_config(None, WHOLE))]
    assert {row.hardware for row in rows if row.process.startswith("trainer")} == {"H800"}
    by_node: Counter[str] = Counter()
    for row in rows:
        by_node[row.node] += row.devices
    assert len(by_node) == NODES
    assert set(by_node.values()) == {GPUS}
    lines = device_plan.describe(rows)
    assert sum(bool(re.fullmatch(r".*: trainer\S*, trainer-\d: 4 H800 each", line)) for line in lines) == 2, lines
    assert sum(bool(re.fullmatch(r".*: vllm-\d, vllm-\d: 2 H20 each", line)) for line in lines) == 2, lines
    assert all_free()


def test_a_plan_that_does_not_fit_says_what_had_a_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_requests, "RESERVE_SECONDS", 1.0)
    config = load_config(None, ["rollout.engine.tensor_parallel_size=12", "ray.address=auto"])
    with pytest.raises(ConfigError, match=r"no node alone has the 12 GPU.*trainer's 1 ranks had their places"):
        device_plan.rehearse(config, print)
    assert all_free()


def test_the_plan_says_who_shares_devices() -> None:
    def said(*overrides: str) -> list[str]:
        return device_plan.describe(device_plan.plan_rows(load_config(None, list(overrides)), {}))

    turns = "trainer and engines take turns on the devices that they see"
    assert said("rollout.colocation.enabled=true", "run.mode=sync", "rollout.alpha=0", "trainer.stream=true") == [
        f"any node: trainer, vllm-0 ({turns})"
    ]
    assert (
        said('rollout.served=["http://127.0.0.1:1"]')[1]
        == "any node: http://127.0.0.1:1 (borrowed: its owner's devices)"
    )


def test_engines_are_spread_over_nodes_and_ranks_are_beside_each_other() -> None:
    config = load_config(None, ["rollout.workers=4", "trainer.tensor_parallel=4", "ray.address=auto"])
    places = pool_requests.without_pools(config, print)
    assert len(places) == 8
    try:
        pool_requests.reserve_all(config, places)
        found = processes_seen(config, places)
    finally:
        for place in places.values():
            place.release()
    assert len({found[f"vllm-{number}"].node for number in range(4)}) == NODES
    assert len({seen.node for name, seen in found.items() if name.startswith("trainer")}) == 1


def test_ranks_that_follow_each_other_are_on_one_node() -> None:
    """Tensor parallelism speaks in every layer: Megatron-Core takes ranks in a row for it. Ray shuffles more than 16 bundles."""
    config = load_config(None, ["trainer.tensor_parallel=8", "trainer.data_parallel=3", "ray.address=auto"])
    places = pool_requests.without_pools(config, print)
    try:
        pool_requests.reserve_all(config, places)
        nodes_of = [place.node() for name, place in places.items() if name.startswith("trainer")]
    finally:
        for place in places.values():
            place.release()
    assert len(nodes_of) == 24
    assert [len(set(nodes_of[first : first + 8])) for first in (0, 8, 16)] == [1, 1, 1]


def test_an_engine_of_the_beginning_that_is_taken_away_gives_its_devices_to_others_and_is_placed_anew() -> None:
    config = load_config(None, ["rollout.engines=[{count=4, tensor_parallel_size=6}]", "ray.address=auto"])
    places = pool_requests.without_pools(config, print)
    other = Placement(None, "another-run", "", 6, reserve_seconds=10.0)
    try:
        pool_requests.reserve_all(config, places)
        nodes_of = {name: place.node() for name, place in places.items()}
        gone = rollout_worker("vllm-3", placement=places["vllm-3"])
        asyncio.run(gone.let_go())
        other.place()
        assert other.node() == nodes_of["vllm-3"]
        assert {name: place.node() for name, place in places.items() if name != "vllm-3"} == {
            name: node for name, node in nodes_of.items() if name != "vllm-3"
        }
        other.release()
        places["vllm-3"].place()
        assert places["vllm-3"].node() == nodes_of["vllm-3"], "the only node with room"
    finally:
        for place in (*places.values(), other):
            place.release()


CUT = ["resources.pools={H800=16, H20=16}", "ray.address=auto", "rollout.workers=16", "resources.rollout={H20=16}"]
CUT += [f"rollout.{on}.enabled=true" for on in ("prediction", "placement", "placement.degrees")]
CUT += ["rollout.placement.degrees.speeds={1=1.0, 2=0.7, 4=0.6, 8=0.5}"]


@pytest.mark.parametrize("pools", [True, pytest.param(False, marks=pytest.mark.long)], ids=["pools", "no pools"])
def test_engines_that_are_cut_anew_over_nodes_have_devices_of_their_own_within_one(pools: bool) -> None:
    config = load_config(None, CUT if pools else [one for one in CUT if not one.startswith("resources")])
    engine_cuts.check(config)
    places = pool_requests.place(config, None, "job")[1] if pools else pool_requests.without_pools(config, print)
    trainer, later = {"trainer": places["trainer"]}, Placement(None, "another-run", "", 6, reserve_seconds=1.0)
    try:
        pool_requests.reserve_all(config, places)
        for degrees in ([4, 2, 2, *[1] * 8], [8, 4, 4], [8, 8]):
            seats = engine_seats(degrees, 16)
            for place, devices in zip(list(places.values())[1:], seats, strict=True):
                assert isinstance(place, EngineSeat)
                place.resize(max(1, devices))
            running = {f"vllm-{number}": places[f"vllm-{number}"] for number, devices in enumerate(seats) if devices}
            found = processes_seen(config, trainer | running)
            found.pop("trainer")
            assert [len(seen.devices) for seen in found.values()] == degrees
            owners = [(seen.node, device) for seen in found.values() for device in seen.devices]
            assert len(owners) == len(set(owners)) == 16
            assert len({node for node, _ in owners}) == 2
            assert not pools or {seen.hardware for seen in found.values()} == {"H20"}
            assert places["vllm-0"].bind().hardware == ("H20" if pools else "")
        wait_for_free("GPU", NODES * GPUS - 17)  # all are ended, and nobody else gets what they had
        others = [Placement(None, f"other-{number}", "", 8) for number in range(2)]
        with pytest.raises(RetryableError, match="GPU: 16 wanted, 15 of 32 free"):
            reserve(others, "SPREAD", 1)
        later.place()
    finally:
        for place in (*places.values(), later):
            place.release()
    assert all_free()


def test_a_worker_that_is_cut_anew_starts_with_the_devices_that_ray_gives_it() -> None:
    config = load_config(None, ["rollout.workers=4", "rollout.planner.enabled=true"])
    places = pool_requests.without_pools(config, print)
    heard: list[tuple[str, FirstReport]] = []

    def hear(name: str, report: FirstReport) -> None:
        heard.append((name, report))

    workers = [
        rollout_worker(
            f"vllm-{number}", placement=places[f"vllm-{number}"], heard=hear, first_device=number, ranks=ranks
        )
        for number, ranks in enumerate((2, 0, 1, 1))
    ]

    async def scenario() -> None:
        for worker in workers:
            await worker.start()
        assert [len(report.devices) for _, report in heard] == [2, 1, 1]
        for worker in workers[1:]:
            await worker.resize(0)
        await workers[0].resize(4)
        await workers[0].restart()
        name, report = heard[-1]
        assert (name, sorted(report.devices)) == ("vllm-0", sorted({one for _, r in heard[:3] for one in r.devices}))

    try:
        pool_requests.reserve_all(config, places)
        asyncio.run(scenario())
    finally:
        for worker in workers:
            asyncio.run(worker.close())
        for place in places.values():
            place.release()
    assert all_free()


def test_engines_go_where_the_fewest_are_the_largest_first() -> None:
    free = {"a": {"GPU": 8.0, "CPU": 8.0}, "b": {"GPU": 8.0, "CPU": 8.0}, "c": {"CPU": 8.0}}
    bundles = [{"GPU": 2.0, "CPU": 1.0}] * 2 + [{"GPU": 8.0, "CPU": 1.0}, {"GPU": 4.0, "CPU": 1.0}, {"GPU": 1.0}]
    assert placement_groups._spread(bundles, free) == ["b", "b", "a", "b", None]
    assert placement_groups._spread([{"CPU": 1.0}] * 3, free) == ["a", "b", "c"]


def test_an_engine_over_two_nodes_has_a_process_on_each_and_ends_with_either(monkeypatch: pytest.MonkeyPatch) -> None:
    part = "tests.support.engine_parts:Part"
    monkeypatch.setattr(engine_actors, "_NODE_CLASS", part)
    config = load_config(None, ["rollout.engines=[{tensor_parallel_size=12, nodes=2}]", "ray.address=auto"])
    rows = device_plan.rehearse(config, print)
    assert [(row.process, row.devices) for row in rows] == [("trainer", 1), ("vllm-0", 6), ("vllm-0-node-1", 6)]
    assert rows[1].node != rows[2].node
    place = pool_requests.without_pools(config, print)["vllm-0"]
    heard: dict[str, FirstReport] = {}
    engines = ActorGen(VllmEngine, {}, heard=heard.__setitem__)
    first, second = (engines.add_worker(name, place, {}, at) for at, name in enumerate(("vllm-0", "vllm-0-node-1")))
    worker = RayWorker(engines, first, part, {"nodes": 2}, beside=[second])

    async def scenario() -> None:
        await worker.start()
        told = [await engines.start_on(actor, "beyond", "told") for actor in (first, second)]
        assert [one.pop("node_rank") for one in told] == [0, 1]
        assert told[0] == told[1]
        assert told[0]["master"].startswith(heard["vllm-0"].node)
        assert [len(heard[name].devices) for name in heard] == [6, 6]
        os.kill(await engines.start_on(second, "pid"), signal.SIGKILL)
        deadline = time.monotonic() + 20
        with pytest.raises(RetryableError):  # noqa: PT012  soon
            while time.monotonic() < deadline:
                await engines.start_on(first, "pid")
                await asyncio.sleep(0.05)
        await worker.restart()
        assert await engines.start_on(second, "pid") > 0
        await worker.let_go()

    asyncio.run(scenario())


def test_an_engine_over_more_nodes_than_have_its_devices_is_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_requests, "RESERVE_SECONDS", 1.0)
    config = load_config(None, ["rollout.engines=[{tensor_parallel_size=5, nodes=5}]", "ray.address=auto"])
    with pytest.raises(ConfigError, match=r"4 nodes of 5 have the 1 GPU, 1 CPU of vllm-0"):
        device_plan.rehearse(config, print)
    assert all_free()


def test_what_the_cluster_can_never_hold_is_one_error_with_the_numbers() -> None:
    wide = load_config(None, ["rollout.engine.tensor_parallel_size=12", "ray.address=auto"])
    places = pool_requests.without_pools(wide, print)
    with pytest.raises(ConfigError, match=r"GPU: 12 wanted.*no node alone has the 12 GPU.*most GPUs of a node: 8"):
        reserve([places["vllm-0"]], "SPREAD", 1)
    many = [Placement(None, f"vllm-{number}", "", 8) for number in range(5)]
    with pytest.raises(ConfigError, match="GPU: 40 wanted, 32 of 32 free"):
        reserve(many, "SPREAD", 1)
    heard: list[str] = []
    assert pool_requests.without_pools(load_config(None, ["rollout.workers=32"]), heard.append) == {}
    assert heard == ["the run needs 33 GPUs and Ray has 32: its processes share the devices that they see"]


def test_what_a_run_wants_of_a_cluster_without_pools_is_one_error_with_the_numbers() -> None:
    config = load_config(None, ["rollout.workers=32", "ray.address=auto"])
    with pytest.raises(ConfigError, match="needs 33 GPUs and this cluster has 32"):
        device_plan.rehearse(config, print)


def test_a_class_that_no_node_has_is_one_error_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_requests, "RESERVE_SECONDS", 1.0)
    pools = ["resources.pools={H800=1, B200=2}", "ray.address=auto"]
    config = load_config(None, [*pools, "rollout.engines=[{hardware='B200'}]"])
    with pytest.raises(ConfigError, match=r"no node alone has the 1 B200, .*trainer's 1 ranks had their places"):
        device_plan.rehearse(config, print)
    assert all_free()


def wait_for_free(name: str, count: float) -> None:
    deadline = time.monotonic() + 10
    while ray.available_resources().get(name) != count and time.monotonic() < deadline:
        time.sleep(0.1)
    assert ray.available_resources().get(name) == count


def test_the_second_run_of_a_full_cluster_is_told_what_is_free_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pool_requests, "RESERVE_SECONDS", 1.0)
    first = load_config(None, [*POOLS, "trainer.tensor_parallel=4", "rollout.engines=[{count=15, hardware='H20'}]"])
    second = load_config(None, [*POOLS, "rollout.engines=[{count=2, hardware='H20'}]"])
    _, places = pool_requests.place(first, None, "one")
    try:
        pool_requests.reserve_all(first, places)
        wait_for_free("H20", 1)  # Ray's own view of what is free lags behind
        with pytest.raises(RetryableError, match=r"H20: 2 wanted, 1 of 16 free.*trainer's 1 ranks had their places"):
            device_plan.rehearse(second, print)
        wait_for_free("GPU", NODES * GPUS - 19)  # what the first has stays, and the second left nothing
    finally:
        for place in places.values():
            place.release()


def test_a_node_with_another_version_of_an_engine_is_one_error_before_it_loads(tmp_path: Path) -> None:
    nodes = NodeCheck()
    for version, folder in (("0.32.0", tmp_path / "a"), ("0.33.1", tmp_path / "b")):
        found = folder / f"megatron_core-{version}.dist-info"
        found.mkdir(parents=True)
        (found / "METADATA").write_text(f"Metadata-Version: 2.1\nName: megatron-core\nVersion: {version}\n")
        paths = {"PYTHONPATH": f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
        worker = rollout_worker(f"vllm-{folder.name}", environment=paths, heard=nodes.check)
        worker._target = "builtins:never"  # what it would load
        try:
            kind = ConfigError if folder.name == "b" else RetryableError
            with pytest.raises(kind) as caught:
                asyncio.run(worker.start())
        finally:
            asyncio.run(worker.close())
    assert "megatron-core = '0.33.1': vllm-b on " in str(caught.value)
    assert "vllm-a on " in str(caught.value)


def test_a_process_that_sees_other_devices_than_its_own_refuses_to_start() -> None:
    placement = Placement(None, "vllm-0", "", 2)
    blind = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1", "CUDA_VISIBLE_DEVICES": "0,1,2"}
    worker: RayWorker = rollout_worker("vllm-0", environment=blind, placement=placement)
    try:
        with pytest.raises(ConfigError, match=r"vllm-0 has devices .* in its placement group") as caught:
            asyncio.run(worker.start())
    finally:
        asyncio.run(worker.close())
        placement.release()
    assert caught.value.field == "CUDA_VISIBLE_DEVICES"
