"""Clusters on a real local Ray, whose classes of hardware are custom resources: calls, ranks in errors, deaths, places."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import orchestrator.cluster as rdist
from orchestrator.api import RetryableError
from orchestrator.resources import Placement, ResourceManager, cluster_resources
from tests.support.engines import rollout_worker

ray = pytest.importorskip("ray")
pytestmark = pytest.mark.engine
ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "examples"))
POOLS = {"H800": 1, "H20": 2}


class Gen(rdist.ActorGenCls):
    def __init__(self, broken: int = -1) -> None:
        if self.rank == broken:
            raise ValueError("no weights")
        self.calls = 0

    @rdist.register(mode="execute_one")
    def generate(self, ids: list[int]) -> int:
        self.calls += 1
        return self.rank

    @rdist.register(mode="scatter")
    def double(self, ids: list[int]) -> list[int]:
        return [2 * one for one in ids]

    def where(self) -> tuple[int, str, tuple[int, ...]]:
        return self.rank, self.hardware, self.devices

    @rdist.register(aggregate="sum")
    def count(self) -> int:
        return self.calls

    @rdist.register(mode="execute_one")
    def sleep(self, seconds: float) -> int:
        time.sleep(seconds)
        return self.rank

    def fail_on(self, ranks: list[int]) -> None:
        if self.rank in ranks:
            raise KeyError(f"made on {self.rank}")


@pytest.fixture(scope="module", autouse=True)
def local_ray() -> Iterator[None]:
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    options = {"include_dashboard": False, "log_to_driver": False, "object_store_memory": 100 << 20}
    ray.init(num_cpus=2, resources=cluster_resources({"H800": 1 + 24, "H20": 2 + 24, "L20": 1}), **options)
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def manager() -> ResourceManager:
    return ResourceManager(POOLS)


@pytest.fixture(scope="module")
def cluster(manager: ResourceManager) -> Iterator[Any]:
    with rdist.ActorGen(manager, Gen, workers=POOLS, cpus_per_worker=0) as made:
        yield made
    assert manager.view().bindings == {}
    deadline = time.monotonic() + 30
    while ray.available_resources().get("H20") != 26 and time.monotonic() < deadline:
        time.sleep(0.1)
    assert ray.available_resources().get("H20") == 26, "Ray has everything back"


def test_calls_go_where_they_were_declared_to_and_come_back_in_order_of_rank(cluster: Any) -> None:
    assert cluster.where() == [(0, "H800", (0,)), (1, "H20", (0,)), (2, "H20", (1,))]
    assert cluster.double([1, 2, 3, 4]) == [2, 4, 6, 8]
    assert cluster.generate([1]) == 0
    assert cluster.count() == 1
    busy = [cluster.sleep.start(0.3) for _ in range(3)]
    assert sorted(call.result() for call in busy) == [0, 1, 2]
    assert cluster.execute_all("where") == cluster.where()

    async def both() -> list[Any]:
        return await asyncio.gather(cluster.count.start(), cluster.generate.start([1]))

    assert asyncio.run(both()) == [1, 0]


def test_what_a_method_raises_names_the_rank_and_who_is_late_too(cluster: Any) -> None:
    with pytest.raises(
        rdist.WorkerError, match=r"fail_on failed on rank 1 of 3, actorgen-1 \(H20 0\).*KeyError"
    ) as caught:
        cluster.fail_on([1, 2])
    assert (caught.value.rank, caught.value.others) == (1, 1)
    assert "made on 1" in caught.value.trace
    with pytest.raises(RetryableError, match=r"sleep: rank 0 of 3.*no answer within 0\.1 s"):
        cluster.sleep.start(1.0).result(timeout=0.1)


def test_a_dead_worker_is_named_calls_go_elsewhere_and_it_comes_back(cluster: Any) -> None:
    dead, *others = cluster.pids
    os.kill(dead, signal.SIGKILL)
    with pytest.raises(RetryableError, match=r"where: rank 0 of 3, actorgen-0 \(H800 0\): its process died"):
        cluster.where()
    assert cluster.generate([1]) == 1
    assert cluster.recover() == [0]
    assert cluster.generate([1]) == 0
    again, *same = cluster.pids
    assert again != dead
    assert same == others


def test_a_worker_whose_init_raises_is_named_and_nothing_stays(manager: ResourceManager) -> None:
    there = dict(manager.view().bindings)
    cpus = ResourceManager({"CPU": 2}, name="other")
    with pytest.raises(rdist.WorkerError, match=r"__init__ failed on rank 1 of 2.*no weights"):
        rdist.ActorGen(cpus, Gen, workers={"CPU": 2}, arguments={"broken": 1}, name="b")
    assert cpus.view().bindings == {}
    assert dict(manager.view().bindings) == there


def test_a_class_that_ray_does_not_have_is_said_and_the_worker_goes_to_another_pool() -> None:
    manager = ResourceManager({"B200": 4, "CPU": 2}, compatible={"B200": ["CPU"]}, name="elsewhere")
    heard = []
    placement = Placement(manager, "w", "B200", cpus=0, reserve_seconds=1, note=heard.append)
    with pytest.raises(RetryableError, match=r"no place within 1 s \(B200: 1 wanted, 0 of 0 free"):
        placement.place()
    placement._limit = 60.0
    placement.move()
    assert placement.place()["num_cpus"] == 1
    placement.release()
    assert [(item.hardware, item.fallback) for item in heard] == [
        ("B200", ""),
        ("CPU", "B200 has 0 devices free of 1 wished for"),
    ]
    assert [pool.failed for pool in manager.view().pools] == [(0, 1, 2, 3), ()]


def test_a_rollout_worker_has_its_place_and_keeps_it_over_a_restart() -> None:
    placement = Placement(ResourceManager({"L20": 1}, name="rollout"), "vllm-0", "L20", cpus=0)
    worker = rollout_worker("vllm-0", "types:SimpleNamespace", placement=placement)

    async def scenario() -> None:
        await worker.start()
        first = worker.process
        assert "L20" not in ray.available_resources()
        await worker.restart()
        assert worker.process not in (0, first)
        assert (worker.hardware, placement.bind().devices) == ("L20", (0,))
        await worker.close()

    asyncio.run(scenario())
    placement.release()


EXPECTED = {
    "gradient": 5.0,
    "answer": [3, 2, 1],
    "workers": [
        ("actorgen-0", "H800", 8),
        ("actorgen-1", "H20", 8),
        ("actorgen-2", "H20", 8),
        ("actorgen-3", "H20", 8),
    ],
}


def test_the_clusters_of_listing_1_do_what_the_paper_says() -> None:
    import listing1

    ray.cloudpickle.register_pickle_by_value(listing1)
    assert listing1.run() == EXPECTED


@pytest.mark.long
def test_listing_1_runs_as_a_program() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "RAY_USAGE_STATS_ENABLED": "0"}
    environment.pop("RAY_ADDRESS", None)
    command = [sys.executable, str(ROOT / "examples/listing1.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment)
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stdout.splitlines() if line.partition(":")[0] in EXPECTED]
    assert said == [f"{name}: {value}" for name, value in EXPECTED.items()]
