"""Servers that a run gives back and takes while it goes on. Real clients, proxy, market, endpoints and workers on a twin of
vLLM's engine client; ``test_lent_run.py`` has it with real engines."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")

from orchestrator.api import CommandError, GenerationRequest, RetryableError, RunError, Sampling
from orchestrator.borrowing import served_workers
from orchestrator.borrowing.discovery import Market
from orchestrator.borrowing.http_worker import HttpWorker
from orchestrator.borrowing.server_exchange import Exchange
from orchestrator.config import Config, parse_config
from orchestrator.events import EventLog, MemorySink
from orchestrator.proxy.gateway import LLMProxy
from orchestrator.proxy.membership import Membership
from orchestrator.proxy.router_setup import planned_router
from orchestrator.proxy.worker_state import WorkerLimits
from orchestrator.tasks.frozenlake import FrozenLakeTask
from orchestrator.transfer import RelayEndpoint
from tests.support.served_twins import twins, until, used
from tests.support.vllm_twin import ENDPOINT, TOKEN, TwinServer


class Run:
    """As much of a run as borrows: market, proxy, exchange."""

    def __init__(self, config: Config, job: str = "run", resumed: bool = False) -> None:
        self.sink = MemorySink()
        self.events = EventLog(self.sink, time.monotonic)
        self.config = config
        self.fatal: list[RunError] = []
        endpoint = RelayEndpoint.from_dict({**ENDPOINT, "job": job})
        self.market = Market(config, FrozenLakeTask(200), endpoint, self.events, resumed=resumed)
        self.proxy: LLMProxy
        self.exchange: Exchange
        self.task: asyncio.Task[None]

    async def start(self) -> None:
        workers = await self.market.borrow()
        await served_workers.start(workers, self.events)
        names = [worker.name for worker in workers]
        router = planned_router(self.config.rollout.routing, names, [""] * len(names), [True] * len(names))
        self.proxy = LLMProxy(
            workers,
            self.events,
            limits=WorkerLimits(20, 20, 20, 20, 4 * 20),
            restarts=2,
            heartbeat=0.2,
            misses=50,
            router=router,
            on_fatal=self.fatal.append,
        )
        settings = self.config.rollout
        self.exchange = Exchange(
            self.market, Membership(self.proxy), self.events, settings.borrowed, settings.routing, self.market.first
        )
        self.proxy.start()
        await self.update(0)
        self.task = asyncio.create_task(self.exchange.run())

    async def update(self, version: int) -> None:
        await self.proxy.prepare(version)
        await self.proxy.suspend()
        await self.proxy.update(version)
        await self.proxy.resume()

    async def close(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        await self.proxy.close()
        await self.market.close()

    def told(self, kind: str) -> list[tuple[str, str]]:
        """Of the events of a kind, in order: server, reason."""
        return [(event["worker"], event.get("reason", "")) for event in self.said if event["kind"] == kind]

    @property
    def said(self) -> list[dict[str, Any]]:
        """All events."""
        return [json.loads(line) for line in self.sink.lines]

    @property
    def servers(self) -> set[str]:
        """That it has now."""
        return {lane.worker.name for lane in self.proxy.states if lane.usable}

    async def turn(self, number: int, tokens: int = 20) -> Any:
        request = GenerationRequest(f"r{number}", f"t{number}", 0, (1, 2, 3), Sampling(tokens), "test")
        return await self.proxy.generate(request)


def config_of(*urls: str, cap: int = 8, **borrowed: Any) -> Config:
    settings = {"every": 0.05, "patience": 1.0, "rest": 0.3, "idle": 0, "window": 0.5, **borrowed}
    routing = {"served_cap": cap}
    return parse_config({"rollout": {"workers": 0, "served": list(urls), "borrowed": settings, "routing": routing}})


def play(number: int, scenario: Callable[[list[TwinServer]], Awaitable[None]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RL_COSERVE_TOKEN", TOKEN)

    async def main() -> None:
        async with twins(number, versions=9) as servers:
            for server in servers:
                server.control.facts["options"] = {"kv_pool": "gpu0", "kv_pool_role": "rollout"}
                used(server, 0.1)
            await scenario(servers)

    asyncio.run(main())


def test_a_server_that_comes_under_a_second_name_is_not_taken_twice(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Two clients would take each other's completions."""
    file = tmp_path / "servers"
    file.write_text("")

    async def scenario(servers: list[TwinServer]) -> None:
        (server,) = servers
        run = Run(config_of(server.url, most=2, file=str(file)))
        await run.start()
        file.write_text(server.url.replace("127.0.0.1", "localhost") + "\n")
        await asyncio.sleep(0.5)
        assert run.servers == {server.url}
        assert sorted(offer.why for offer in await run.market.list_offers()) == [
            "",
            f"is the same server as {server.url}",
        ]
        done = await asyncio.gather(*(run.turn(number) for number in range(8)))
        assert [len(one.token_ids) for one in done] == [20] * 8
        await run.close()

    play(1, scenario, monkeypatch)


def test_a_server_whose_pages_are_reclaimed_is_given_back_its_turns_go_on_elsewhere_and_it_is_taken_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario(servers: list[TwinServer]) -> None:
        first, second = servers
        used(second, 0.3)
        run = Run(config_of(first.url, second.url, most=1))
        await run.start()
        assert run.servers == {first.url}
        first.client.paused = True  # what it has stays with it
        turns = [asyncio.ensure_future(run.turn(number)) for number in range(4)]
        await until(lambda: len(first.client.requests) == 4)
        for request in first.client.requests.values():
            request.tokens.extend((1, 2, 3))
            request.versions.extend(["run:0"] * 3)
        used(first, 0.1, lends=False)  # rl-coserve reclaim
        done = await asyncio.gather(*turns)
        assert [len(turn.token_ids) for turn in done] == [20] * 4
        assert all(turn.token_ids[:3] == (1, 2, 3) for turn in done), "they kept what they had"
        await until(lambda: run.told("returned") == [(first.url, "reclaimed")])
        assert run.told("borrowed") == [(first.url, "the run starts"), (second.url, "used least")]
        assert run.servers == {second.url}
        await until(lambda: first.control.activation.state == "inactive")
        assert first.control.lease.book.current_lease() is None
        # It lends again, and is clearly less used: it is taken back when a step begins, and not before.
        used(first, 0.0)
        await asyncio.sleep(0.8)
        assert run.servers == {second.url}
        await run.update(1)
        await until(lambda: run.servers == {first.url})
        await until(lambda: run.told("returned")[1:] == [(second.url, "another is used less")])
        assert first.control.activation.state == "active"
        assert run.told("activated") == [(first.url, "")]
        assert (await run.turn(9)).versions == ((1, 20),), "the present weights, before its first request"
        assert not run.fatal
        await run.close()
        assert first.control.lease.book.current_lease() is None

    play(2, scenario, monkeypatch)


def test_a_crowded_server_is_given_back_and_not_taken_again_before_it_is_clearly_calm(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario(servers: list[TwinServer]) -> None:
        first, second = servers
        run = Run(config_of(first.url, second.url, most=2, crowded=0.8, margin=0.2))
        await run.start()
        assert run.servers == {first.url, second.url}
        used(first, 0.95)
        await until(lambda: run.servers == {second.url})
        for share in (0.75, 0.85, 0.7, 0.9) * 2:  # it goes up and down
            used(first, share)
            await asyncio.sleep(0.2)
        assert run.servers == {second.url}
        used(first, 0.3)
        await until(lambda: run.servers == {first.url, second.url})
        await until(lambda: run.told("returned") == [(first.url, "crowded")])
        used(first, 0.95)
        used(second, 0.95)
        await until(lambda: len(run.servers) == 1)
        await asyncio.sleep(0.8)
        assert len(run.servers) == 1, "the last one is kept: nothing else would generate"
        await run.close()

    play(2, scenario, monkeypatch)


def test_one_that_disappears_is_replaced_and_one_that_the_file_names_later_is_taken(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async def scenario(servers: list[TwinServer]) -> None:
        first, second, third = servers
        file = tmp_path / "servers"
        file.write_text(f"{second.url}\n")
        run = Run(config_of(first.url, most=2, file=str(file)))
        await run.start()
        assert run.servers == {first.url, second.url}
        file.write_text(f"{second.url}\n{third.url}\n")
        await first.stop()
        await until(lambda: run.servers == {second.url, third.url})
        await until(lambda: (first.url, "gone") in run.told("returned"))
        file.write_text(f"{third.url}\n")
        await until(lambda: run.servers == {third.url})
        await until(lambda: (second.url, "no candidate any more") in run.told("returned"))
        assert [len((await run.turn(number)).token_ids) for number in range(3)] == [20] * 3
        file.unlink()
        await until(lambda: any("cannot be read" in str(event.get("detail")) for event in run.said))
        await asyncio.sleep(0.2)
        assert run.servers == {third.url}, "a file that is away changes nothing"
        faults = [event for event in run.said if "cannot be read" in str(event.get("detail"))]
        assert len(faults) == 1, "said once"
        await run.close()

    play(3, scenario, monkeypatch)


def test_a_server_that_another_job_has_is_left_alone_and_taken_when_that_job_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario(servers: list[TwinServer]) -> None:
        first, second = servers
        other = HttpWorker(second.url, TOKEN, relay=RelayEndpoint.from_dict({**ENDPOINT, "job": "other"}))
        await other.start()
        run = Run(config_of(first.url, second.url, most=2))
        await run.start()
        await asyncio.sleep(0.3)
        assert run.servers == {first.url}
        assert [event for event in run.said if event["kind"] == "fault"] == []
        await other.close()
        await until(lambda: run.servers == {first.url, second.url})
        # The run stood still for longer than its lease, and the other job was there first.
        lane = run.exchange._members.find_worker(second.url)
        assert lane is not None
        assert isinstance(lane.worker, HttpWorker)
        assert lane.worker._lease is not None
        await lane.worker._lease.give_back()
        late = HttpWorker(second.url, TOKEN, relay=RelayEndpoint.from_dict({**ENDPOINT, "job": "other"}))
        await late.hold()
        await until(lambda: run.servers == {first.url})
        await until(lambda: run.told("returned") == [(second.url, "another job has it")])
        with pytest.raises(CommandError, match="job other"):
            await run.market.worker(second.url).hold()
        await late.close()
        await run.close()

    play(2, scenario, monkeypatch)


def test_a_server_whose_taking_ended_as_nobody_foresaw_is_a_fault_and_is_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    take, failed = Membership.take_worker, []

    async def broken_once(members: Membership, *arguments: Any) -> Any:
        if not failed:
            failed.append(True)
            raise ZeroDivisionError("nobody foresaw this")
        return await take(members, *arguments)

    monkeypatch.setattr(Membership, "take_worker", broken_once)

    async def scenario(servers: list[TwinServer]) -> None:
        first, second = servers
        other = HttpWorker(second.url, TOKEN, relay=RelayEndpoint.from_dict({**ENDPOINT, "job": "other"}))
        await other.start()
        run = Run(config_of(first.url, second.url, most=2))
        await run.start()
        await other.close()
        async with asyncio.timeout(10):
            await until(lambda: run.servers == {first.url, second.url})
        faults = [event["detail"] for event in run.said if event["kind"] == "fault"]
        assert any("nobody foresaw this" in detail for detail in faults)
        assert not run.fatal
        await run.close()

    play(2, scenario, monkeypatch)


def test_one_that_is_not_needed_goes_back_and_comes_again_when_turns_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(servers: list[TwinServer]) -> None:
        first, second = servers
        run = Run(config_of(first.url, second.url, most=2, cap=4, idle=0.5))
        await run.start()
        await until(lambda: len(run.servers) == 1)
        await until(lambda: [why for _, why in run.told("returned")] == ["not needed"])
        for server in servers:
            server.client.paused = True
        turns = [asyncio.ensure_future(run.turn(number)) for number in range(7)]
        await until(lambda: len(run.servers) == 2)
        for server in servers:
            server.client.paused = False
        assert len(await asyncio.gather(*turns)) == 7
        await run.close()

    play(2, scenario, monkeypatch)


def test_what_a_server_hands_back_is_an_event_with_its_requests_and_the_tokens_that_they_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario(servers: list[TwinServer]) -> None:
        first, second = servers
        run = Run(config_of(first.url, second.url, most=2))
        await run.start()
        first.client.paused = second.client.paused = True
        turns = [asyncio.ensure_future(run.turn(number)) for number in range(4)]
        await until(lambda: len(first.client.requests) == len(second.client.requests) == 2)
        for request in first.client.requests.values():
            request.tokens.extend((1, 2))
            request.versions.extend(["run:0"] * 2)
        await first.client.abort(list(first.client.requests))  # as when a cut takes their pages
        second.client.paused = False
        assert [len(turn.token_ids) for turn in await asyncio.gather(*turns)] == [20] * 4
        told = [event for event in run.said if event["kind"] == "handed_back"]
        assert {event["worker"] for event in told} == {first.url}
        assert (sum(event["requests"] for event in told), sum(event["tokens"] for event in told)) == (2, 4)
        await run.close()

    play(2, scenario, monkeypatch)


def test_a_call_that_is_in_flight_when_its_client_is_closed_fails_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(servers: list[TwinServer]) -> None:
        (server,) = servers
        worker = HttpWorker(server.url, TOKEN, relay=RelayEndpoint.from_dict({**ENDPOINT, "job": "run"}))
        await worker.start()
        await worker.suspend()
        server.client.hold.clear()  # an update that takes for ever
        updating = asyncio.ensure_future(worker.update(0))
        await until(lambda: "finish_weight_update" in server.client.calls)
        begun = time.monotonic()
        await worker.disconnect()
        with pytest.raises(RetryableError, match="is closed"):
            await updating
        assert time.monotonic() - begun < 2
        server.client.hold.set()

    play(1, scenario, monkeypatch)


def test_a_server_that_the_proxy_gave_up_while_it_says_that_it_is_well_is_given_back_and_taken_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario(servers: list[TwinServer]) -> None:
        first, second = servers
        run = Run(config_of(first.url, second.url, most=2))
        await run.start()
        lane = run.exchange._members.find_worker(second.url)
        assert lane is not None
        lane.alive, lane.removed = False, True  # as the end of a recovery that took too long leaves it
        run.proxy.tell_stranded(run.proxy.router.retire_worker(lane.index))
        assert run.servers == {first.url}
        async with asyncio.timeout(10):
            await until(lambda: run.told("returned") == [(second.url, "gone")])
            await until(lambda: run.servers == {first.url, second.url})
        assert not run.fatal
        await run.close()

    play(2, scenario, monkeypatch)
