"""Served workers that a run borrows: which of them, and how many turns one may have while its neighbour's budgets change. Real
clients, proxy, endpoints and workers on a twin of vLLM's engine client."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")

from orchestrator.api import ConfigError, GenerationRequest, RunError, Sampling
from orchestrator.borrowing import served_workers
from orchestrator.borrowing.discovery import Market, read_candidates
from orchestrator.borrowing.http_worker import HttpWorker
from orchestrator.config import Config, parse_config
from orchestrator.events import EventLog, MemorySink
from orchestrator.proxy.gateway import LLMProxy
from orchestrator.proxy.router_setup import planned_router
from orchestrator.proxy.worker_state import WorkerLimits
from orchestrator.tasks.frozenlake import FrozenLakeTask
from orchestrator.transfer import RelayEndpoint
from tests.support.served_twins import twins, until, used
from tests.support.vllm_twin import ENDPOINT, TOKEN, TwinServer

URL = "http://127.0.0.1:8000"
NOBODY = "http://127.0.0.1:1"  # no server answers there


def config_of(*urls: str, cap: int = 0, workers: int = 0, own: int = 0, **borrowed: Any) -> Config:
    routing = {"served_cap": cap, "cap": own}
    return parse_config(
        {"rollout": {"workers": workers, "served": list(urls), "borrowed": borrowed, "routing": routing}}
    )


def market(config: Config, job: str, resumed: bool = False) -> Market:
    events = EventLog(MemorySink(), time.monotonic)
    return Market(config, FrozenLakeTask(200), relay(job), events, resumed=resumed)


def relay(job: str) -> RelayEndpoint:
    return RelayEndpoint.from_dict({**ENDPOINT, "job": job})


def play(number: int, scenario: Callable[[list[TwinServer]], Awaitable[None]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RL_COSERVE_TOKEN", TOKEN)

    async def main() -> None:
        async with twins(number) as servers:
            await scenario(servers)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("wrong", "field", "hint"),
    [
        ({"most": 2}, "most", "names 1 servers"),
        ({"most": -1}, "most", "at least 0"),
        ({"moste": 1}, "moste", "did you mean rollout.borrowed.most"),
        ({"every": 0}, "every", "more than 0"),
        ({"lease": 1}, "lease", "at least 5"),
        ({"window": "long"}, "window", "number"),
        ({"crowded": 1.5}, "crowded", "at most 1"),
        ({"crowded": 0.1, "margin": 0.1}, "margin", "no server would ever be taken"),
        ({"patience": 0}, "patience", "more than 0"),
        ({"rest": -1}, "rest", "at least 0"),
        ({"idle": -1}, "idle", "at least 0"),
        ({"file": 1}, "file", "must be text"),
    ],
)
def test_a_wrong_value_is_named_with_its_fix(wrong: dict[str, Any], field: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config_of(URL, **wrong)
    assert caught.value.field == f"rollout.borrowed.{field}"
    assert hint in str(caught.value)


def test_the_file_of_servers_names_them_and_a_wrong_line_is_named(tmp_path: Path) -> None:
    file = tmp_path / "servers"
    config = config_of(URL, file=str(file))
    with pytest.raises(ConfigError, match="cannot be read"):
        read_candidates(config)
    file.write_text(f"# ours\n\n{URL}/\nhttp://127.0.0.1:8001  # the second\n")
    assert read_candidates(config) == (URL, "http://127.0.0.1:8001")
    file.write_text("http://127.0.0.1:8001\n10.0.0.1:8000\n")
    with pytest.raises(ConfigError, match="line 2") as caught:
        read_candidates(config)
    assert caught.value.field == "rollout.borrowed.file"


def test_a_run_borrows_the_servers_whose_neighbours_used_least_memory_and_none_of_another_job(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario(servers: list[TwinServer]) -> None:
        for server, share in zip(servers, (0.5, 0.1, 0.3, 0.0), strict=True):
            used(server, share)
        urls = [server.url for server in servers]
        every, config = market(config_of(*urls), "all"), config_of(*urls, NOBODY, most=2, every=0.01)
        impatient = config.rollout.model_copy(update={"restart_timeout": 0.1})  # with jobs that give nothing up
        config = config.model_copy(update={"rollout": impatient})
        assert [worker.url for worker in await every.borrow()] == urls, "all that are named"
        await every.close()
        # Three that start at once: each has servers of its own, and the least used are given first.
        runs = [market(config, job) for job in ("one", "two", "three")]
        found = await asyncio.gather(*(run.borrow() for run in runs[:2]))
        taken = [{worker.url for worker in workers} for workers in found]
        assert taken[0] | taken[1] == set(urls)
        assert not taken[0] & taken[1]
        with pytest.raises(RunError, match="has it"):
            await runs[2].borrow()
        with pytest.raises(RunError, match="another process of this name"):
            await market(config, "one").borrow()
        again = market(config, "one", resumed=True)
        assert {worker.url for worker in await again.borrow()} == taken[0], "its own, when it resumes"
        for run in (*runs, again):
            await run.close()
        assert {worker.url for worker in await runs[2].borrow()} == {urls[1], urls[3]}
        await runs[2].close()

    play(4, scenario, monkeypatch)


def test_a_run_with_nothing_else_ends_when_no_server_can_be_borrowed_and_says_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario(_: list[TwinServer]) -> None:
        with pytest.raises(RunError, match="is a server running there"):
            await market(config_of(NOBODY, most=1), "mine").borrow()
        assert await market(config_of(NOBODY, most=1, workers=1), "mine").borrow() == [], "it has workers of its own"

    play(0, scenario, monkeypatch)


def test_a_server_has_no_more_turns_than_its_budget_has_room_for_and_none_without_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario(servers: list[TwinServer]) -> None:
        config = config_of(*(server.url for server in servers), cap=6)
        workers = [HttpWorker(server.url, TOKEN, server.url, relay=relay("run")) for server in servers]
        names = [worker.name for worker in workers]
        router = planned_router(config.rollout.routing, names, ["", ""], [True, True])
        events = EventLog(MemorySink(), asyncio.get_running_loop().time)
        fatal: list[RunError] = []
        proxy = LLMProxy(
            workers,
            events,
            limits=WorkerLimits(30, 30, 30, 30, 4 * 30),
            restarts=2,
            heartbeat=0.05,
            router=router,
            on_fatal=fatal.append,
        )
        await served_workers.start(workers)
        proxy.start()
        for server in servers:
            server.client.relay[0] = ""
        await proxy.prepare(0)
        await proxy.suspend()
        await proxy.update(0)
        await proxy.resume()
        small, full = servers
        small.client.capacity, full.client.capacity = 6, 0
        await until(lambda: proxy.states[1].full)
        small.client.paused = full.client.paused = True  # what they have stays with them
        turns = [asyncio.ensure_future(turn(proxy, number)) for number in range(12)]
        await until(lambda: len(small.client.requests) == 6)
        assert (len(full.client.requests), router.queued) == (0, 6)
        small.client.capacity = 2  # a burst of its serving neighbour
        await until(lambda: router.cap_of(0) == 2)
        full.client.capacity = 3
        await until(lambda: len(full.client.requests) == 3)
        assert router.queued == 3
        small.client.paused = full.client.paused = False
        await asyncio.gather(*turns)
        assert not fatal
        assert router.cap_of(0) == 2, "what it has room for, though it was given six once"
        small.client.capacity = 100
        await until(lambda: router.cap_of(0) == 6)
        await proxy.close()
        for worker in workers:
            await worker.close()

    play(2, scenario, monkeypatch)


async def turn(proxy: LLMProxy, number: int) -> Any:
    return await proxy.generate(GenerationRequest(f"r{number}", f"t{number}", 0, (1, 2, 3), Sampling(20), "test"))
