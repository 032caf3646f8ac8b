"""Clusters on a real local Ray, whose classes of hardware are custom resources: calls, ranks in errors, deaths, places."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import orchestrator.cluster as rdist
from orchestrator.api import ConfigError, ProcessDied, RetryableError
from orchestrator.cluster.actor import FirstReport
from orchestrator.config import load_config
from orchestrator.resources import Placement, ResourceManager, cluster_resources
from orchestrator.runtime.site_caches import SiteCaches, start_site_caches
from orchestrator.transfer import Publisher, RelayEndpoint, Subscriber
from orchestrator.transfer.proven_link import LinkRefused, connect, parse_place
from orchestrator.transfer.site_relay import TOKEN_FILE
from tests.support.engines import rollout_worker
from tests.support.waiting import wait_for

ray = pytest.importorskip("ray")
psutil = pytest.importorskip("psutil")
pytestmark = pytest.mark.engine
ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "examples"))
POOLS = {"H800": 1, "H20": 2}


class Gen(rdist.ActorGenCls):
    def __init__(self) -> None:
        if self.hardware == "H800" and self.world_size == 1:
            raise ValueError("no weights")

    @rdist.register(mode="execute_one")
    def generate(self, ids: list[int]) -> int:
        return self.rank

    @rdist.register(aggregate="concat")
    def double(self, ids: list[int]) -> list[int]:
        return [2 * one for one in ids]

    def where(self) -> tuple[int, str, tuple[int, ...]]:
        return self.rank, self.hardware, self.devices

    def pid(self) -> int:
        return os.getpid()

    @rdist.register(mode="execute_one")
    def sleep(self, seconds: float) -> int:
        time.sleep(seconds)
        return self.rank

    @rdist.register(mode="execute_rank_zero")
    def first(self) -> int:
        return self.rank

    def fail_on(self, ranks: list[int]) -> None:
        if self.rank in ranks:
            raise KeyError(f"made on {self.rank}")


class Computes(rdist.ActorTrainCls):
    """A trainer's shape: its calls compute without yielding, and something is sent beside them."""

    concurrency = 8
    beside = 1

    @rdist.register(aggregate="first")
    def compute(self, seconds: float) -> int:
        time.sleep(seconds)
        return threading.get_ident()

    @rdist.register(aggregate="first", beside=True)
    async def send(self) -> int:
        await asyncio.sleep(0.05)
        return threading.get_ident()

    @rdist.register(aggregate="first", beside=True)
    async def refuse(self) -> None:
        raise KeyError("the relay is away")


@pytest.fixture(scope="module", autouse=True)
def local_ray() -> Iterator[None]:
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    options = {"include_dashboard": False, "log_to_driver": False, "object_store_memory": 100 << 20}
    ray.init(
        address="local", num_cpus=2, resources=cluster_resources({"H800": 1 + 24, "H20": 2 + 24, "L20": 1}), **options
    )
    yield
    ray.shutdown()


def places(*hardware: str) -> dict[str, Placement]:
    manager = ResourceManager(POOLS, name="-".join(hardware))
    return {f"gen-{rank}": Placement(manager, f"gen-{rank}", name, cpus=0) for rank, name in enumerate(hardware)}


def test_calls_go_where_they_were_declared_to_and_a_dead_worker_is_named() -> None:
    homes = places("H800", "H20", "H20")
    cluster: Any = rdist.ActorGen(Gen, homes)

    async def scenario() -> None:
        await cluster.launch()
        assert await cluster.where() == [(0, "H800", (0,)), (1, "H20", (0,)), (2, "H20", (1,))]
        assert await cluster.double([1, 2]) == [2, 4] * 3
        assert await cluster.first() == 0
        busy = [cluster.sleep(0.3) for _ in range(3)]
        assert sorted(await asyncio.gather(*busy)) == [0, 1, 2]
        assert await cluster.generate([1]) == 0
        with pytest.raises(RetryableError, match=r"(?s)^gen-1: KeyError: 'made on 1'.*fail_on"):
            await cluster.fail_on([1, 2])
        os.kill((await cluster.pid())[0], signal.SIGKILL)
        with pytest.raises(ProcessDied, match="gen-0 died"):
            await cluster.where()
        assert await cluster.generate([1]) == 1
        cluster.actors[0].start()
        assert await cluster.generate([1]) == 0

    try:
        asyncio.run(scenario())
    finally:
        cluster.close()
        for home in homes.values():
            home.release()
    deadline = time.monotonic() + 30
    while ray.available_resources().get("H20") != 26 and time.monotonic() < deadline:
        time.sleep(0.1)
    assert ray.available_resources().get("H20") == 26, "Ray has everything back"


def test_a_call_beside_the_others_is_answered_while_another_computes() -> None:
    cluster: Any = rdist.ActorTrain(Computes, {"train-0": None})

    async def scenario() -> None:
        await cluster.launch()
        thread = await cluster.compute(0.0)
        computing = asyncio.ensure_future(cluster.compute(20.0))
        await asyncio.sleep(0.5)
        async with asyncio.timeout(15):
            assert await cluster.send() != thread
            with pytest.raises(RetryableError, match="the relay is away"):
                await cluster.refuse()
        assert not computing.done()
        computing.cancel()
        await asyncio.gather(computing, return_exceptions=True)

    try:
        asyncio.run(scenario())
    finally:
        cluster.close()


def test_a_worker_whose_init_raises_says_so_by_every_call() -> None:
    homes = places("H800")
    cluster: Any = rdist.ActorGen(Gen, homes)

    async def scenario() -> None:
        await cluster.launch()
        for _ in range(2):
            with pytest.raises(RetryableError, match="gen-0: ValueError: no weights"):
                await cluster.where()

    try:
        asyncio.run(scenario())
    finally:
        cluster.close()
        homes["gen-0"].release()


def test_a_class_that_ray_does_not_have_is_said_and_the_worker_goes_to_another_pool() -> None:
    manager = ResourceManager({"B200": 4, "CPU": 2}, compatible={"B200": ["CPU"]}, name="elsewhere")
    heard = []
    placement = Placement(manager, "w", "B200", cpus=0, reserve_seconds=1, note=heard.append)
    with pytest.raises(RetryableError, match=r"could not place it within 1 s \(B200: 1 wanted, 0 of 0 free"):
        placement.place()
    placement._limit = 60.0
    placement.move()
    assert placement.place()["num_cpus"] == 1
    placement.release()
    assert [(item.hardware, item.fallback) for item in heard] == [
        ("B200", ""),
        ("CPU", "B200 has 0 devices free of 1 needed"),
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
    "gradients": [4.0, 6.0],
    "answer": [3, 2, 1],
    "workers": [("gen-0", "H800", 8), ("gen-1", "H20", 8), ("gen-2", "H20", 8), ("gen-3", "H20", 8)],
}


def test_the_clusters_of_listing_1_do_what_the_paper_says() -> None:
    import listing1

    ray.cloudpickle.register_pickle_by_value(listing1)
    assert asyncio.run(listing1.run()) == EXPECTED


@pytest.mark.long
def test_listing_1_runs_as_a_program() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "RAY_USAGE_STATS_ENABLED": "0"}
    environment.pop("RAY_ADDRESS", None)
    command = [sys.executable, str(ROOT / "examples/listing1.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment)
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stdout.splitlines() if line.partition(":")[0] in EXPECTED]
    assert said == [f"{name}: {value}" for name, value in EXPECTED.items()]


def test_the_cache_of_a_site_comes_back_at_its_port_and_ends_with_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(TOKEN_FILE, raising=False)
    config = load_config(None, ["rollout.workers=2", 'relay.sites={far={workers=["vllm-1"]}}'])
    endpoint = RelayEndpoint("job", "fsspec", f"file://{tmp_path}/relay", f"{tmp_path}/metadata.sqlite")
    publisher = Publisher(endpoint)
    publisher.rollback(0)
    publisher.publish(1, [("w", (4,), "uint8", np.arange(4, dtype=np.uint8))])

    def came_by_the_cache(there: RelayEndpoint) -> bool:
        reader = Subscriber(there)
        assert [data.tolist() for _, data in reader.fetch(reader.manifest(1))] == [[0, 1, 2, 3]]
        return not reader.past_cache()

    async def scenario() -> tuple[str, Path]:
        async with AsyncExitStack() as stack:
            caches = await start_site_caches(config, {}, stack)
            assert caches.endpoint_of("vllm-0", endpoint, {"rack": "2"}) == endpoint
            there, token = caches.endpoint_of("vllm-1", endpoint), Path(caches.variables[TOKEN_FILE])
            assert token.stat().st_mode & 0o777 == 0o600
            monkeypatch.setenv(TOKEN_FILE, str(token))
            assert came_by_the_cache(there)
            port = parse_place(there.cache)[1]
            (pid,) = {
                one.pid for one in psutil.net_connections("tcp") if one.laddr.port == port and one.status == "LISTEN"
            }
            os.kill(pid, signal.SIGKILL)
            wait_for(lambda: came_by_the_cache(there), every=0.2)
            return there.cache, token

    with pytest.raises(
        ConfigError, match=r"far.label = 'rack=2': no node of this Ray carries it, but none has a label"
    ):
        asyncio.run(_start_at("rack=2"))
    place, token = asyncio.run(scenario())
    publisher.close()
    assert not token.exists()
    wait_for(lambda: gone(place))


def gone(place: str) -> bool:
    try:
        connect(place, 1.0, lambda _: False)
    except LinkRefused as refused:
        return refused.reason == "unreachable"  # while it ends it still listens
    return False


async def _start_at(label: str) -> SiteCaches:
    config = load_config(None, [f"relay.sites={{far={{label={label!r}}}}}"])
    async with AsyncExitStack() as stack:
        return await start_site_caches(config, {}, stack)


def test_an_engine_reads_at_the_site_of_the_node_where_it_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TOKEN_FILE, raising=False)
    node = ray.nodes()[0]["NodeID"]
    caches = asyncio.run(_start_at(f"ray.io/node-id={node}"))
    ((_, place),) = caches.labels.items()
    endpoint = RelayEndpoint("job", "fsspec", "file:///nowhere", "/nowhere.sqlite")
    told: list[str] = []

    def there(report: FirstReport) -> dict[str, Any]:
        told.append(caches.endpoint_of("vllm-7", endpoint, report.labels).cache)
        return {"heard": len(told)}

    worker = rollout_worker("vllm-7", there=there)
    try:
        asyncio.run(worker.start())
        assert asyncio.run(worker._call("beyond", "__getattribute__", "heard")) == 1
    finally:
        asyncio.run(worker.close())
    assert told == [place]
