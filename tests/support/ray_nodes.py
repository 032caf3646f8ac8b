"""Ray's own cluster of many nodes on one machine, with logical GPUs of two classes; actors that only report what they see."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import ray

from orchestrator.cluster import ActorGen
from orchestrator.cluster.actor import FirstReport
from orchestrator.config import Config
from orchestrator.resources import Placement
from orchestrator.runtime import pool_requests
from orchestrator.runtime.engine_actors import MegatronRank, TrainerRanks, VllmEngine

GPUS = 8  # of a node
CLASSES = ("H800", "H20")  # of every other node


@contextmanager
def nodes(count: int) -> Iterator[None]:
    """Started and connected to."""
    from ray.cluster_utils import Cluster

    ray.cloudpickle.register_pickle_by_value(__import__(__name__, fromlist=["x"]))
    options = {"num_cpus": 8, "num_gpus": GPUS, "object_store_memory": 80 << 20, "include_log_monitor": False}
    first = {"include_dashboard": False, "_system_config": {"prestart_worker_first_driver": False}}
    cluster = Cluster()
    try:
        for number in range(count):
            cluster.add_node(False, resources={CLASSES[number % 2]: GPUS}, **options, **({} if number else first))
        cluster.wait_for_nodes()
        ray.init(address=cluster.address, log_to_driver=False)
        yield
    finally:
        ray.shutdown()
        cluster.shutdown()


def all_free() -> bool:
    """Whether Ray has every device back; it takes a while."""
    whole, deadline = ray.cluster_resources()["GPU"], time.monotonic() + 30
    while (free := ray.available_resources().get("GPU")) != whole and time.monotonic() < deadline:
        time.sleep(0.1)
    return bool(free == whole)


class Rank(MegatronRank):
    """Says on which node it is."""

    async def node(self) -> str:
        return str(ray.get_runtime_context().get_node_id())


class Engine(VllmEngine):
    """The same."""

    async def node(self) -> str:
        return str(ray.get_runtime_context().get_node_id())


@dataclass(frozen=True, slots=True)
class Seen:
    """By one process: the class of its node, Ray's id of it, and the devices there."""

    hardware: str
    node: str
    devices: tuple[str, ...]


def processes_seen(config: Config, places: dict[str, Placement]) -> dict[str, Seen]:
    """What every process of a run reports when it is started in its place; all are ended."""
    said: dict[str, FirstReport] = {}
    found: dict[str, Seen] = {}
    ranks = pool_requests.trainer_ranks(config)
    named = list(places.items())
    hear = said.__setitem__
    clusters = [
        TrainerRanks(Rank, dict(named[:ranks]), None, "trainer", hear),
        ActorGen(Engine, dict(named[ranks:]), None, "engines", hear),
    ]
    classes = {node["NodeID"]: next(name for name in CLASSES if name in node["Resources"]) for node in ray.nodes()}

    async def ask() -> None:
        for cluster in clusters:
            await cluster.launch()
        for cluster in clusters:
            for actor in cluster.actors:
                await cluster.hear(actor)
                node = await cluster.start_on(actor, "node")
                found[actor.name] = Seen(classes[node], node, said[actor.name].devices)

    try:
        asyncio.run(ask())
    finally:
        for cluster in clusters:
            cluster.close()
    return found
