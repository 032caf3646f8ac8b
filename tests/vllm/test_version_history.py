"""Several runs on one served engine, one after the other: each has its own history of weight versions. The real endpoints,
worker and client on a twin of vLLM's engine client; ``test_served_run.py`` has it with real engines."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

pytest.importorskip("fastapi")

from orchestrator.api import BorrowedWorker, CommandError, Completion, GenerationRequest, RetryableError, Sampling
from orchestrator.api import http as wire
from orchestrator.borrowing import http_worker
from orchestrator.borrowing.http_worker import HttpWorker
from orchestrator.transfer import Publisher, RelayEndpoint
from tests.support.vllm_twin import ENDPOINT, TOKEN, TwinServer
from vllm_rlplugin.worker.inprocess_worker import EngineWorker
from vllm_rlplugin.worker.update_cycle import UpdateCycle


def run(scenario: Callable[[TwinServer], Awaitable[None]], **options: Any) -> None:
    async def main() -> None:
        server = await TwinServer().start(**options)
        server.client.relay.update(dict.fromkeys(range(20), ""))
        try:
            async with asyncio.timeout(60):
                await scenario(server)
        finally:
            await server.stop()

    asyncio.run(main())


def relay(job: str) -> dict[str, Any]:
    return {**ENDPOINT, "job": job}


def client(server: TwinServer, job: str, *, takeover: bool = False, key: str = "") -> HttpWorker:
    endpoint = RelayEndpoint.from_dict(relay(job))
    return HttpWorker(server.url, TOKEN, job, relay=endpoint, takeover=takeover, key=key)


def a_request(name: str, tokens: int = 5) -> GenerationRequest:
    return GenerationRequest(name, name, 0, (1, 2, 3), Sampling(tokens), "test")


async def updated(worker: HttpWorker, version: int) -> None:
    await worker.prepare(version)
    await worker.suspend()
    await worker.update(version)
    await worker.resume()


async def answered(worker: HttpWorker, name: str) -> Completion:
    await worker.add([a_request(name)])
    (found,) = await worker.completions()
    assert found.request_id == name
    return found


async def gone(worker: HttpWorker) -> None:
    """Its lease is given back, and nothing else of it."""
    assert worker._lease is not None
    await worker._lease.give_back()


async def refusal(call: Awaitable[Any]) -> str:
    with pytest.raises(CommandError) as caught:
        await call
    return caught.value.code


def test_each_run_counts_versions_from_its_own_start_and_may_use_the_request_ids_of_the_one_before() -> None:
    async def scenario(server: TwinServer) -> None:
        for job, versions in (("first", (0, 1, 7)), ("second", (0, 3)), ("first", (2,))):
            worker = client(server, job)
            assert isinstance(worker, BorrowedWorker)
            await worker.start()
            for version in versions:
                await updated(worker, version)
                assert (await answered(worker, f"t/{version}")).versions == ((version, 5),)
            assert await refusal(worker.prepare(versions[-1] - 1)) == "version_decreases"
            await worker.close()
        await asyncio.sleep(0)
        assert not server.client.requests
        assert not server.client.paused

    run(scenario)


def test_no_version_of_another_history_is_ever_told_before_the_first_update() -> None:
    """Tokens of the weights of before are of version -1, and vLLM's own label says whose they are."""

    async def scenario(server: TwinServer) -> None:
        worker = client(server, "first")
        await worker.start()
        await updated(worker, 3)
        await worker.close()
        other = client(server, "second")
        await other.start()
        status = await other.status()
        assert (status["weight_version"], status["weight_label"]) == (-1, "first:3")
        assert status["history"]["job"] == "second"
        await other._join()
        await other.add([a_request("early", 250)])
        while server.client.generated < 30:
            await asyncio.sleep(0.001)
        await updated(other, 3)
        (done,) = await other.completions()
        assert [version for version, _ in done.versions] == [-1, 3]
        await other.close()

    run(scenario)


def test_the_salts_of_two_histories_differ() -> None:
    async def scenario(server: TwinServer) -> None:
        salts = []
        for job in ("first", "second"):
            worker = client(server, job)
            await worker.start()
            await updated(worker, 4)
            salts.append(server.worker.cycle.loaded)
            await worker.close()
        assert salts[0][1] == salts[1][1] == 4
        assert salts[0] != salts[1]

    run(scenario)


def test_with_requests_in_flight_another_relay_is_refused_and_nothing_changes() -> None:
    async def scenario(server: TwinServer) -> None:
        worker = client(server, "first")
        await worker.start()
        await updated(worker, 2)
        server.client.paused = True  # the engine itself: one that its holder had suspended goes on without it
        await worker.add([a_request("a")])
        before = await worker.status()
        other = client(server, "second")
        assert await refusal(other.start()) == "leased"
        await gone(worker)
        before["lease"] = None
        body = {"init_info": {"endpoint": relay("second")}}
        assert await refusal(other._post(wire.CONNECT, body)) == "requests_in_flight"
        assert await worker.status() == before
        await worker._post(wire.CONNECT, {"init_info": {"endpoint": relay("first")}})  # the same again is no other
        assert await worker.status() == before
        server.client.paused = False
        ((name, versions),) = [(item.request_id, item.versions) for item in await worker.completions()]
        assert (name, versions) == ("a", ((2, 5),))
        await other._connect()
        await worker.close()
        await other.close()

    run(scenario)


def test_requests_that_come_while_another_relay_is_being_connected_wait_for_it() -> None:
    async def scenario(server: TwinServer) -> None:
        worker = HttpWorker(server.url, TOKEN)
        await updated(worker, 2)
        gate, connect = asyncio.Event(), server.client._init_weight_transfer_engine

        async def slow(init_info: dict[str, Any]) -> None:
            await gate.wait()
            await connect(init_info)

        server.client._init_weight_transfer_engine = slow  # type: ignore[method-assign]
        connecting = asyncio.ensure_future(server.worker.connect({"endpoint": relay("second")}))
        while "init_weight_transfer_engine" not in server.client.calls[-1:]:
            await asyncio.sleep(0.001)
        adding = asyncio.ensure_future(server.worker.add([a_request("a")]))
        await asyncio.sleep(0.02)
        assert not adding.done()
        assert await refusal(server.worker.resume()) == "update_in_progress"
        gate.set()
        await connecting
        await adding
        (done,) = await server.worker.completions()
        assert done.versions == ((-1, 5),)
        await worker.close()

    run(scenario)


def test_a_client_of_before_is_told_that_the_server_is_anothers_and_none_of_its_calls_does_anything() -> None:
    async def scenario(server: TwinServer) -> None:
        worker, other = client(server, "first"), client(server, "second")
        await worker.start()
        await updated(worker, 2)
        await gone(worker)
        await other.start()
        await updated(other, 1)
        await gone(other)
        calls = list(server.client.calls)
        for call in (
            worker.add([a_request("a")]),
            worker.suspend(),
            worker.update(3),
            worker.resume(),
            worker.prepare(3),
            worker.completions(),
            worker.abort(["a"]),
        ):
            with pytest.raises(RetryableError, match="another relay"):
                await call
        assert server.client.calls == calls
        with pytest.raises(RetryableError, match="job second has taken this server"):
            await worker.restart()
        await other.hold()
        await worker.close()
        assert (await answered(other, "a")).versions == ((1, 5),)
        await other.close()

    run(scenario)


def test_a_connection_whose_answer_was_lost_is_not_taken_for_somebody_elses() -> None:
    async def scenario(server: TwinServer) -> None:
        worker = client(server, "run", key="one key of this run")
        await worker.start()
        await updated(worker, 2)
        publisher = Publisher(RelayEndpoint.from_dict(relay("run")))
        publisher.rollback(2)
        # The history is another one now, and the worker does not know.
        await client(server, "run", key="one key of this run").start()
        await worker.restart()
        await updated(worker, 2)
        assert (await answered(worker, "a")).versions == ((2, 5),)
        await worker.close()
        publisher.close()

    run(scenario)


def test_a_resumed_run_aborts_what_its_killed_self_left_and_may_go_back_to_an_older_version() -> None:
    async def scenario(server: TwinServer) -> None:
        publisher = Publisher(RelayEndpoint.from_dict(relay("run")))
        worker = client(server, "run")
        await worker.start()
        publisher.rollback(0)
        await updated(worker, 6)
        await worker.suspend()
        await worker.add([a_request("t/0", 250)])
        await worker.disconnect()  # as when it is killed: suspended, with a request in flight
        resumed = client(server, "run", takeover=True)
        await resumed.start()
        publisher.rollback(4)
        await updated(resumed, 4)
        assert (await answered(resumed, "t/0")).versions == ((4, 5),)
        assert (await resumed.stats()).running == 0
        await resumed.close()
        publisher.close()

    run(scenario)


def test_a_run_waits_for_requests_of_another_one_for_a_while_and_then_says_what_is_in_its_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario(server: TwinServer) -> None:
        worker = client(server, "first")
        await worker.start()
        await updated(worker, 2)
        await worker.add([a_request("a", 200)])
        await gone(worker)
        other = client(server, "second")
        await other.start()  # they end by themselves
        await updated(other, 0)
        server.client.paused = True
        await other.add([a_request("b")])
        await gone(other)
        monkeypatch.setattr(http_worker, "OTHERS_SECONDS", 0.0)
        third = client(server, "third")
        with pytest.raises(CommandError, match="1 rollout requests are unfinished"):
            await third.start()
        await third._post(wire.ABORT, {"all": True})
        await third.start()
        for each in (worker, other, third):
            await each.close()

    run(scenario)


def test_an_update_of_unusable_weights_by_a_new_run_cures_them() -> None:
    async def scenario(server: TwinServer) -> None:
        worker = client(server, "first")
        await worker.start()
        server.client.fail_finish = "the model is half written"
        await worker.suspend()
        assert await refusal(worker.update(1)) == "weights_unusable"
        await worker.close()
        server.client.fail_finish = ""
        other = client(server, "second")
        await other.start()
        await other.restart()
        await updated(other, 0)
        assert (await answered(other, "a")).versions == ((0, 5),)
        await other.close()

    run(scenario)


def test_the_verbs_of_stock_vllm_begin_a_history_too() -> None:
    async def scenario(server: TwinServer) -> None:
        worker = HttpWorker(server.url, TOKEN)
        await updated(worker, 5)
        await worker.close()
        stock = HttpWorker(server.url, TOKEN)
        await stock._post("/init_weight_transfer_engine", {"init_info": {"endpoint": relay("second")}})
        stock._instance = ""
        assert (await stock._ask("GET", "/weight_info"))["weight_version"] == "twin:5"
        await stock._post("/pause", None)
        await stock._post("/start_weight_update", None)
        await stock._post("/update_weights", {"update_info": {"version": 2}})
        await stock._post("/finish_weight_update", {"weight_version": "2"})
        await stock._post("/resume", None)
        assert (await stock._ask("GET", "/weight_info"))["weight_version"] == "2"
        assert (await answered(stock, "a")).versions == ((2, 5),)
        await stock.close()

    run(scenario)


def test_a_relay_that_cannot_be_read_is_told_and_the_connection_of_before_stays() -> None:
    async def scenario(server: TwinServer) -> None:
        worker = HttpWorker(server.url, TOKEN)
        endpoint = {**relay("second"), "metadata": "/nowhere/at/all.sqlite"}
        assert await refusal(worker._post(wire.CONNECT, {"init_info": {"endpoint": endpoint}})) == "invalid_request"
        with pytest.raises(RetryableError, match="does not answer"):
            await worker._post(wire.CONNECT, {"init_info": {"endpoint": {**relay("second"), "master": "gone"}}})
        assert (await worker.status())["history"] == {"number": 0, "job": "twin", "epoch": 0, "metadata": "memory"}
        await updated(worker, 1)
        await worker.close()

    run(scenario)


def test_a_version_that_takes_long_to_fetch_is_looked_at_ever_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """With several ranks each look waits for the steps in flight. Both front ends; time is what was slept."""
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    async def is_prepared(*given: Any) -> bool:
        return sum(slept) > 100.0

    class Engine:
        async def rpc(self, method: str, *given: Any) -> list[dict[str, str]]:
            return [{"state": "ready" if await is_prepared() else "fetching"}]

    worker: Any = EngineWorker.__new__(EngineWorker)
    worker._run_command = is_prepared
    cycle: Any = UpdateCycle(Engine())  # type: ignore[arg-type]
    monkeypatch.setattr(asyncio, "sleep", sleep)
    for fetch in (cycle._prepare, worker._wait_fetched):
        slept.clear()
        asyncio.run(fetch(1))
        assert len(slept) < 130, "2,000 and 5,000 at the pace of the first ones"
        assert 100.0 < sum(slept) < 107.0, "and it is loaded soon after it is there"
