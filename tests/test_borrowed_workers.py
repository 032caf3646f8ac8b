"""Served workers that a run borrows: which of them, and how many turns one may have while its neighbour's budgets change. Real
clients, proxy, endpoints and workers on a twin of vLLM's engine client."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("fastapi")

from orchestrator.api import ConfigError, GenerationRequest, RunError, Sampling
from orchestrator.config import Config, parse_config
from orchestrator.events import EventLog, MemorySink
from orchestrator.fleet import plan
from orchestrator.http_worker import HttpWorker
from orchestrator.proxy import LLMProxy
from orchestrator.runtime import served
from orchestrator.transfer import RelayEndpoint
from vllm_rlplugin.twin import ENDPOINT, TOKEN, TwinServer

NOBODY = "http://127.0.0.1:1"  # no server answers there


def config_of(*urls: str, most: int = 0, workers: int = 0, cap: int = 0) -> Config:
    rollout = {"workers": workers, "served": list(urls), "borrowed": {"most": most}, "routing": {"served_cap": cap}}
    return parse_config({"rollout": rollout})


def relay(job: str) -> RelayEndpoint:
    return RelayEndpoint.from_dict({**ENDPOINT, "job": job})


def play(number: int, scenario: Callable[[list[TwinServer]], Awaitable[None]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RL_COSERVE_TOKEN", TOKEN)

    async def main() -> None:
        servers = [await TwinServer().start() for _ in range(number)]
        try:
            async with asyncio.timeout(60):
                await scenario(servers)
        finally:
            for server in servers:
                await server.stop()

    asyncio.run(main())


def used(server: TwinServer, share: float) -> None:
    """As the metrics of a KV pool in which serving used so much in the mean."""
    server.control.device = SimpleNamespace(recent={"serving_use": share, "seconds": 3600.0})  # type: ignore[assignment]


def test_more_than_are_named_cannot_be_borrowed() -> None:
    with pytest.raises(ConfigError) as caught:
        config_of("http://127.0.0.1:8000", most=2)
    assert caught.value.field == "rollout.borrowed.most"
    assert "names 1 servers" in str(caught.value)


def test_a_run_borrows_the_servers_whose_neighbours_used_least_memory_and_none_of_another_job(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario(servers: list[TwinServer]) -> None:
        for server, share in zip(servers, (0.5, 0.1, 0.3, 0.0), strict=True):
            used(server, share)
        urls = [server.url for server in servers]
        config = config_of(*urls, NOBODY, most=2)
        assert await served.choose(config_of(*urls), "mine") == tuple(urls), "all that are named"
        assert await served.choose(config, "mine") == (urls[1], urls[3])
        theirs = HttpWorker(urls[3], TOKEN, relay=relay("theirs"))
        await theirs.start()
        servers[3].client.relay[0] = ""
        await theirs.prepare(0)
        await theirs.suspend()
        await theirs.update(0)
        await theirs.resume()
        servers[3].client.paused = True
        await theirs.add([GenerationRequest("r", "t", 0, (1, 2), Sampling(5), "test")])
        assert await served.choose(config, "mine") == (urls[1], urls[2])
        assert await served.choose(config, "theirs") == (urls[1], urls[3]), "its own, when it resumes"
        chosen = await served.choose(config, "mine")
        assert [worker.url for worker in served.workers(config, relay("mine"), chosen)] == list(chosen)
        await theirs.close()

    play(4, scenario, monkeypatch)


def test_a_run_with_nothing_else_ends_when_no_server_can_be_borrowed_and_says_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario(_: list[TwinServer]) -> None:
        with pytest.raises(RunError, match="is a server running there"):
            await served.choose(config_of(NOBODY, most=1), "mine")
        assert await served.choose(config_of(NOBODY, most=1, workers=1), "mine") == (), "it has workers of its own"

    play(0, scenario, monkeypatch)


def test_a_server_has_no_more_turns_than_its_budget_has_room_for_and_none_without_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario(servers: list[TwinServer]) -> None:
        config = config_of(*(server.url for server in servers), cap=6)
        workers = [HttpWorker(server.url, TOKEN, relay=relay("run")) for server in servers]
        names = [worker.name for worker in workers]
        router = plan(config.rollout.routing, names, ["", ""], [True, True])
        events = EventLog(MemorySink(), asyncio.get_running_loop().time)
        fatal: list[RunError] = []
        proxy = LLMProxy(
            workers, events, stall_timeout=30, restarts=2, heartbeat=0.05, router=router, on_fatal=fatal.append
        )
        await served.start(workers)
        proxy.start()
        for server in servers:
            server.client.relay[0] = ""
        await proxy.prepare(0)
        await proxy.suspend()
        await proxy.update(0)
        await proxy.resume()
        small, full = servers
        small.client.capacity, full.client.capacity = 6, 0
        await until(lambda: proxy.lanes[1].full)
        small.client.paused = full.client.paused = True  # what they have stays with them
        turns = [asyncio.ensure_future(turn(proxy, number)) for number in range(12)]
        await until(lambda: len(small.client.requests) == 6)
        assert (len(full.client.requests), router.queued) == (0, 6)
        small.client.capacity = 2  # a burst of its serving neighbour
        await until(lambda: router.cap(0) == 2)
        full.client.capacity = 3
        await until(lambda: len(full.client.requests) == 3)
        assert router.queued == 3
        small.client.paused = full.client.paused = False
        await asyncio.gather(*turns)
        assert not fatal
        assert router.cap(0) == 2, "what it has room for, though it was given six once"
        small.client.capacity = 100
        await until(lambda: router.cap(0) == 6)
        await proxy.close()
        for worker in workers:
            await worker.close()

    play(2, scenario, monkeypatch)


async def turn(proxy: LLMProxy, number: int) -> Any:
    return await proxy.generate(GenerationRequest(f"r{number}", f"t{number}", 0, (1, 2, 3), Sampling(20), "test"))


async def until(true: Callable[[], bool]) -> None:
    while not true():
        await asyncio.sleep(0.01)
