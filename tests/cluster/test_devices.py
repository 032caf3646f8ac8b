"""Devices by the cluster: nodes with logical GPUs, an actor per role that only reports what it sees. No device has two owners."""

from __future__ import annotations

import asyncio
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence

import pytest

from orchestrator.api import ConfigError
from orchestrator.cluster import ActorGen
from orchestrator.config import Config, load_config
from orchestrator.resources import Placement, reserve
from orchestrator.runtime import device_plan, pool_requests
from orchestrator.runtime.engine_actors import MegatronRank, RayWorker, TrainerRanks, VllmEngine
from tests.support.engines import rollout_worker

ray = pytest.importorskip("ray")
pytestmark = [pytest.mark.engine, pytest.mark.timeout(180)]

NODES, GPUS = 4, 8
CLASSES = ("H800", "H20")  # two nodes of each
POOLS = ["resources.pools={H800=16, H20=16}", "ray.address=auto"]
# 4 ranks of 4 devices, 4 engines of TP 2 x PP 2: every device of the cluster.
WHOLE = [*POOLS, "trainer.tensor_parallel=4", "resources.devices_per_rank=4", "rollout.workers=4"]
WHOLE += ["rollout.engine.tensor_parallel_size=2", "rollout.engine.pipeline_parallel_size=2"]


@pytest.fixture(scope="module", autouse=True)
def nodes() -> Iterator[None]:
    from ray.cluster_utils import Cluster

    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    options = {"num_cpus": 4, "num_gpus": GPUS, "object_store_memory": 80 << 20, "include_log_monitor": False}
    first = {"include_dashboard": False, "_system_config": {"prestart_worker_first_driver": False}}
    cluster = Cluster()
    for number in range(NODES):
        cluster.add_node(False, resources={CLASSES[number % 2]: GPUS}, **options, **({} if number else first))
    cluster.wait_for_nodes()
    ray.init(address=cluster.address, log_to_driver=False)
    yield
    ray.shutdown()
    cluster.shutdown()


@pytest.fixture(autouse=True)
def start_free() -> None:
    all_free()


def all_free() -> None:
    """Ray takes a while to have everything back."""
    deadline = time.monotonic() + 30
    while ray.available_resources().get("GPU") != NODES * GPUS and time.monotonic() < deadline:
        time.sleep(0.1)


class Rank(MegatronRank):
    async def node(self) -> str:
        return str(ray.get_runtime_context().get_node_id())


class Engine(VllmEngine):
    async def node(self) -> str:
        return str(ray.get_runtime_context().get_node_id())


def seen(config: Config, places: dict[str, Placement]) -> dict[str, tuple[str, tuple[str, ...]]]:
    """Worker -> its node and the devices it sees, as started processes report them."""
    said: dict[str, Sequence[str]] = {}
    found: dict[str, tuple[str, tuple[str, ...]]] = {}
    ranks = pool_requests.trainer_ranks(config)
    named = list(places.items())
    hear = lambda name, _, devices: said.update({name: devices})  # noqa: E731
    clusters = [
        TrainerRanks(Rank, dict(named[:ranks]), None, "trainer", hear),
        ActorGen(Engine, dict(named[ranks:]), None, "engines", hear),
    ]

    async def ask() -> None:
        for cluster in clusters:
            await cluster.launch()
        for cluster in clusters:
            for actor in cluster.actors:
                await cluster.report_devices(actor)
                node = await cluster.start_on(actor, "node")
                found[actor.name] = node, tuple(said[actor.name])

    try:
        asyncio.run(ask())
    finally:
        for cluster in clusters:
            cluster.close()
    return found


def class_of(node: str) -> str:
    resources = next(item["Resources"] for item in ray.nodes() if item["NodeID"] == node)
    return next(name for name in CLASSES if name in resources)


def test_a_run_over_nodes_gives_every_device_one_owner_of_its_class_and_an_engine_one_node() -> None:
    config = load_config(None, WHOLE)
    manager, places = pool_requests.place(config, None, "job")
    try:
        pool_requests.reserve_all(config, places)
        found = seen(config, places)
    finally:
        for place in places.values():
            place.release()
    owners = [(node, device) for node, devices in found.values() for device in devices]
    assert len(owners) == len(set(owners)) == NODES * GPUS
    assert all(len(devices) == 4 for _, devices in found.values())  # of one node each, as a process is in one
    assert {name: class_of(node) for name, (node, _) in found.items()} == {
        **dict.fromkeys(("trainer", "trainer-1", "trainer-2", "trainer-3"), "H800"),
        **{f"vllm-{number}": "H20" for number in range(4)},
    }
    assert manager.view().bindings == {}


def test_the_plan_of_a_run_names_a_node_for_every_process_and_gives_all_of_it_back() -> None:
    begun = time.monotonic()
    rows = device_plan.rehearse(load_config(None, WHOLE), print)
    assert time.monotonic() - begun < 5
    assert [row.process for row in rows] == [name for name, _, _ in pool_requests.wishes(load_config(None, WHOLE))]
    assert sum(row.devices for row in rows) == NODES * GPUS
    assert {row.hardware for row in rows if row.process.startswith("trainer")} == {"H800"}
    by_node = Counter(row.node for row in rows)  # 4 devices of a process, 8 of a node
    assert len(by_node) == NODES
    assert set(by_node.values()) == {2}
    lines = device_plan.describe(rows)
    assert len(lines) == NODES
    assert sum(bool(re.fullmatch(r".*: vllm-\d, vllm-\d: 4 H20 each", line)) for line in lines) == 2, lines
    all_free()
    assert ray.available_resources()["GPU"] == NODES * GPUS


def test_a_plan_that_does_not_fit_says_what_had_a_place() -> None:
    config = load_config(None, ["rollout.engine.tensor_parallel_size=12", "ray.address=auto"])
    with pytest.raises(ConfigError, match=r"no node alone has the 12 GPU.*trainer's 1 ranks had their places"):
        device_plan.rehearse(config, print)
    all_free()
    assert ray.available_resources()["GPU"] == NODES * GPUS


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
        found = seen(config, places)
    finally:
        for place in places.values():
            place.release()
    assert len({found[f"vllm-{number}"][0] for number in range(4)}) == NODES - 1  # the ranks have all CPUs of one
    assert len({node for name, (node, _) in found.items() if name.startswith("trainer")}) == 1


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
    assert heard == ["the run wants 33 GPUs and Ray has 32: its processes share the devices that they see"]


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
