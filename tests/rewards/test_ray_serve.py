"""The function host on a real Ray Serve: the same protocol, more replicas under load, and fewer when it is gone."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from orchestrator.api import Prompt, RunError, Trajectory, TrajectoryError, Turn
from orchestrator.rewards import ray_serve
from orchestrator.rewards.function_client import FunctionClient
from orchestrator.rewards.ray_serve import Elasticity, RayServeHost
from orchestrator.rewards.reward_client import HttpReward

ray = pytest.importorskip("ray")
pytest.importorskip("grpc_reflection", reason="Ray Serve is not installed: pip install 'rl-coserve[ray-serve]'")
pytestmark = [pytest.mark.engine, pytest.mark.long]
ROOT = Path(__file__).parents[2]
FUNCTIONS = """
import os, time

def act(event):
    what = event.get("prompt", "")
    if what == "hang":
        while True:
            pass
    if what == "exit":
        os._exit(3)
    if what == "nan":
        return {"reward": float("nan")}
    if what == "raise":
        raise ValueError("no such map")
    if what == "sleep":
        time.sleep(0.5)
    return {"reward": 0.5, "pid": os.getpid(), "replica": os.getppid()}
"""


@pytest.fixture(scope="module")
def local_ray(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    folder = tmp_path_factory.mktemp("functions")
    (folder / "served_functions.py").write_text(FUNCTIONS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(folder), str(ROOT), os.environ.get("PYTHONPATH", "")]))
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        ray.init(
            address="local", num_cpus=4, object_store_memory=100 << 20, include_dashboard=False, log_to_driver=False
        )
        yield
        ray.shutdown()


def _host(**options: Any) -> RayServeHost:
    elasticity = Elasticity(min_replicas=1, max_replicas=2, cpus=0.5, idle_seconds=2.0)
    return RayServeHost(
        "served_functions:act", **{"application": "run-1", "elasticity": elasticity, "timeout": 5.0, **options}
    )


def _trajectory(prompt: str) -> Trajectory:
    return Trajectory(
        id="t1",
        group_id="g1",
        task="a task",
        prompt=Prompt(key="k", task="a task", seed=0, payload=prompt),
        turns=(Turn((1,), (2,), (-0.5,), ((0, 1),)),),
        reward=None,
        env_version="",
        env_seed=0,
        truncated=False,
    )


def test_the_protocol_is_that_of_the_embedded_host_and_replicas_follow_the_load(local_ray: None) -> None:
    async def scenario(host: RayServeHost) -> None:
        reward = HttpReward(host.url, token=host.token, timeout=20.0)
        assert await reward.score(_trajectory("a map")) == 0.5
        assert reward.counts.cold_starts == 1
        for prompt, cause in (
            ("raise", "reward_error"),
            ("exit", "reward_error"),
            ("nan", "reward_not_finite"),
            ("hang", "reward_timeout"),
        ):
            with pytest.raises(TrajectoryError) as failed:
                await reward.score(_trajectory(prompt))
            assert failed.value.cause == cause, prompt
            assert await reward.score(_trajectory("a map")) == 0.5, prompt
        await reward.close()

        async with aiohttp.ClientSession() as http:
            for token in ("", host.token[:-1]):
                headers = {"Authorization": f"Bearer {token}"}
                async with http.post(host.url, data=b"{}", headers=headers) as response:
                    assert response.status == 401
        with pytest.raises(RunError, match="refuses to score"):
            await HttpReward(host.url, token="wrong").score(_trajectory("a map"))

        assert await replicas(host) == 1
        client = FunctionClient(host.url, token=host.token, timeout=60.0, concurrency=16)
        load = asyncio.create_task(_load(client))
        async with asyncio.timeout(120):
            while await replicas(host) < 2:
                await asyncio.sleep(0.3)
        load.cancel()
        await asyncio.gather(load, return_exceptions=True)
        async with asyncio.timeout(120):
            while await replicas(host) > 1:
                await asyncio.sleep(0.3)
        where = (await client.call({}))["replica"]
        os.kill(where, signal.SIGKILL)
        async with asyncio.timeout(120):
            while (answer := await client.call({}))["replica"] == where:
                await asyncio.sleep(0.3)
        assert answer["reward"] == 0.5
        await client.close()

    async def whole() -> None:
        host = _host()
        await host.start()
        try:
            await scenario(host)
        finally:
            await host.stop()
            await host.stop()  # idempotent

    asyncio.run(whole())


async def replicas(host: RayServeHost) -> int:
    """That run now."""
    from ray import serve

    found = await asyncio.to_thread(serve.status)
    (deployment,) = found.applications[host._application].deployments.values()
    return int(deployment.replica_states.get("RUNNING", 0))


async def _load(client: FunctionClient) -> None:
    while True:
        await asyncio.gather(*(client.call({"prompt": "sleep"}) for _ in range(8)))


def test_replicas_for_which_ray_has_no_room_end_the_start_with_the_reason(
    local_ray: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_serve, "START_LIMIT", 8.0)
    host = _host(application="run-2", elasticity=Elasticity(cpus=64.0))
    with pytest.raises(RunError, match=r"no replica ready within 8 s; is there room for 1 x 64 CPUs"):
        asyncio.run(host.start())
