"""``HttpWorker`` against the real endpoints and the real ``ServedWorker`` on a twin of vLLM's engine client: no vLLM here.
``test_served_lifecycle.py`` has the same on a real ``vllm serve``, ``test_control_endpoints.py`` the endpoints alone."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import asdict, replace
from typing import Any

import aiohttp
import pytest

pytest.importorskip("fastapi")

from orchestrator.api import (
    CommandError,
    ConfigError,
    ManagedWorker,
    RetryableError,
    TokenSequence,
)
from orchestrator.api import http as wire
from orchestrator.borrowing.http_worker import HttpWorker
from tests.support.vllm_twin import LIMITS, TOKEN, TwinServer, a_request, collected, run
from tests.support.worker_contract import CHECKS, Rig
from vllm_rlplugin.server import request_bodies


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_worker_contract_holds_over_http(check: Callable[[Rig], Awaitable[None]]) -> None:
    async def scenario(server: TwinServer, worker: HttpWorker) -> None:
        async def publish() -> int:
            return server.publish()

        assert isinstance(worker, ManagedWorker)
        await check(Rig(worker, publish, long_tokens=100, quiet=0.1, evict=server.control.contexts.clear))

    run(scenario)


def test_a_turn_as_json_is_the_same_request() -> None:
    request = a_request("a", group="g", priority=-(2**63))
    assert request_bodies.RequestBody(**json.loads(json.dumps(asdict(request)))).to_request() == request


def test_the_engine_gets_the_contexts_that_were_meant_and_a_server_that_lost_them_is_sent_them_again() -> None:
    async def scenario(server: TwinServer, worker: HttpWorker) -> None:
        context = TokenSequence((1, 2, 3))
        for turn in range(6):
            if turn == 3:
                server.control.contexts.clear()
            await worker.add([replace(a_request(f"r{turn}", trajectory="t"), turn=turn, token_ids=context)])
            found = await collected(worker, 1)
            assert server.client.prompt == context
            context = context + found[f"r{turn}"].token_ids + (9,)
        assert worker.take_resent() == (1, 3 + 3 * 6)
        worker.forget("t")
        await worker.add([a_request("other")])
        await collected(worker, 1)
        assert server.control.contexts.trajectories() == ["other"]
        assert (await worker.status())["contexts"]["missed"] == 1

    run(scenario)


def test_a_cancelled_caller_loses_no_completion() -> None:
    async def scenario(server: TwinServer, worker: HttpWorker) -> None:
        names = [f"r{index}" for index in range(60)]
        await worker.add([a_request(name, 1 + index % 9) for index, name in enumerate(names)])
        found: list[str] = []
        while len(found) < len(names):
            task = asyncio.ensure_future(worker.completions())
            await asyncio.sleep(0.001 * (len(found) % 5))
            task.cancel()
            try:
                found.extend(item.request_id for item in await task)
            except asyncio.CancelledError:
                if asyncio.current_task().cancelling():  # type: ignore[union-attr]
                    raise
                found.extend(item.request_id for item in await asyncio.wait_for(worker.completions(), 10))
        assert sorted(found) == sorted(names)

    run(scenario)


def test_a_failed_command_is_the_error_that_it_was_and_changes_nothing() -> None:
    async def scenario(server: TwinServer, worker: HttpWorker) -> None:
        async def code(call: Awaitable[Any]) -> str:
            with pytest.raises(CommandError) as caught:
                await call
            return caught.value.code

        version = server.publish()
        assert await code(worker.update(version)) == "not_suspended"
        await worker.suspend()
        with pytest.raises(RetryableError, match="version 99 is not on the relay"):
            await worker.update(99)
        server.client.fail_finish = "refused"  # before the model was touched
        with pytest.raises(RetryableError, match="refused"):
            await worker.update(version)
        server.client.fail_finish = ""
        await worker.resume()
        await worker.suspend()
        server.client.hold.clear()
        update = asyncio.ensure_future(worker.update(version))
        while "finish_weight_update" not in server.client.calls[-1:]:
            await asyncio.sleep(0.005)
        assert await code(worker.update(version)) == "update_in_progress"
        assert await code(worker.resume()) == "update_in_progress"
        assert await code(worker.prepare(version + 1)) == "update_in_progress"
        server.client.hold.set()
        assert (await update).bytes == 1000
        assert await code(worker.update(0)) == "version_decreases"
        assert await code(worker.prepare(0)) == "version_decreases"
        later = server.publish()
        server.client.fail_finish = "the model is half written"
        assert await code(worker.update(later)) == "weights_unusable"
        assert await code(worker.resume()) == "weights_unusable"
        assert server.client.paused
        assert (await worker.status())["unusable"].endswith("the model is half written")
        server.client.fail_finish = ""
        assert (await worker.update(later)).version == later
        await worker.resume()
        assert not server.client.paused

    run(scenario)


def test_a_server_with_weights_in_no_defined_state_is_not_healthy_until_an_update_has_cured_them() -> None:
    """Else a load balancer would go on sending users into an engine that is paused, for a run that may be dead."""

    async def scenario(server: TwinServer, worker: HttpWorker) -> None:
        async def health() -> int:
            async with aiohttp.ClientSession() as session, session.get(f"{server.url}/health") as response:
                return response.status

        version = server.publish()
        await worker.suspend()
        assert await health() == 404, "passed on to vLLM, which the twin is not"
        server.client.fail_finish = "the model is half written"
        with pytest.raises(CommandError, match="half written"):
            await worker.update(version)
        await worker.close()
        assert await health() == 503
        server.client.fail_finish = ""
        other = HttpWorker(server.url, TOKEN)
        server.client.hold.clear()
        update = asyncio.ensure_future(other.update(version))
        while "finish_weight_update" not in server.client.calls[-1:]:
            await asyncio.sleep(0.005)
        assert await health() == 404, "it is being cured"
        server.client.hold.set()
        await update
        assert await health() == 404
        await other.close()

    run(scenario)


def test_an_update_that_cannot_shut_out_old_kv_is_refused_before_the_model_is_touched() -> None:
    """Else the weights were new, KV was not, and the engine stood still for everybody, with those whom it waited for."""

    async def scenario(server: TwinServer, worker: HttpWorker) -> None:
        server.client.holders = "1 waiting requests hold KV blocks, first a user's"
        version = server.publish()
        await worker.suspend()
        with pytest.raises(RetryableError, match="hold KV blocks, first a user's: resume, and try again"):
            await worker.update(version)
        assert (server.client.loaded, (await worker.status())["unusable"]) == (-1, "")
        await worker.resume()
        assert not server.client.paused
        server.client.holders = ""
        await worker.suspend()
        assert (await worker.update(version)).version == version

    run(scenario)


def test_a_resume_counts_also_before_the_pause_has_ended_and_after_one_that_failed() -> None:
    async def scenario(server: TwinServer, worker: HttpWorker) -> None:
        server.client.pausing.clear()
        pause = asyncio.ensure_future(worker.suspend())
        while not server.client.paused:
            await asyncio.sleep(0.005)
        await worker.resume()  # as of a client that has waited for long enough
        server.client.pausing.set()
        await pause
        assert not server.client.paused
        assert not (await worker.status())["suspended"]
        server.client.fail_pause = "Failed to reset KV cache"
        with pytest.raises(RetryableError, match="500"):
            await worker.suspend()
        assert server.client.paused
        await worker.resume()
        assert not server.client.paused
        await worker.add([a_request("a")])
        assert list(await collected(worker, 1)) == ["a"]

    run(scenario)


def test_connections_that_are_lost_cost_neither_a_turn_nor_a_completion_nor_the_worker() -> None:
    async def scenario(server: TwinServer, worker: HttpWorker) -> None:
        def cut() -> None:
            for connection in list(server._server.server_state.connections):
                connection.transport.abort()

        take, lost = server.control.contexts.take, [1]

        def take_and_cut(message: Any) -> Any:
            while lost:
                lost.pop()
                cut()  # the answer never arrives, the turn did
            return take(message)

        server.control.contexts.take = take_and_cut  # type: ignore[method-assign]
        await worker.add([a_request("a", 250)])
        assert not lost
        waiting = asyncio.ensure_future(worker.completions())
        for _ in range(2):  # aiohttp itself asks once more where it has used the connection before
            await asyncio.sleep(0.05)
            cut()
        assert [item.request_id for item in await waiting] == ["a"]
        await server.stop()
        begun = asyncio.get_running_loop().time()
        with pytest.raises(RetryableError):
            await worker.completions()
        assert asyncio.get_running_loop().time() - begun < 5.0  # one that is gone is noticed

    run(scenario)


def test_what_the_owner_of_a_server_does_not_admit_yet_waits_and_can_be_aborted() -> None:
    async def scenario(server: TwinServer, worker: HttpWorker) -> None:
        server.client.most = 1
        await worker.add([a_request(name, 100) for name in ("a", "b", "never")])
        await worker.abort(["never"])
        found = await collected(worker, 3)
        assert {name: one.finish_reason for name, one in found.items()} == {
            "a": "length",
            "b": "length",
            "never": "abort",
        }

    run(scenario)


def test_an_update_goes_to_its_end_when_its_caller_is_cancelled() -> None:
    async def scenario(server: TwinServer, worker: HttpWorker) -> None:
        await worker.suspend()
        for caller in (server.worker, worker):
            version = server.publish()
            server.client.hold.clear()
            update = asyncio.ensure_future(caller.update(version))
            while "finish_weight_update" not in server.client.calls[-1:]:
                await asyncio.sleep(0.005)
            update.cancel()
            await asyncio.wait([update])
            server.client.hold.set()
            while (await worker.stats()).version != version:
                await asyncio.sleep(0.005)
        await worker.resume()

    run(scenario)


def test_the_best_ranked_go_into_the_engine_and_the_others_are_held_in_front_of_it() -> None:
    async def scenario(server: TwinServer, worker: HttpWorker) -> None:
        await worker.suspend()
        await worker.add([a_request(f"r{index}", priority=9) for index in range(500)])
        inside = LIMITS.slots + LIMITS.lookahead
        assert (await worker.stats()).waiting == 500
        assert (len(server.client.requests), server.worker.held) == (inside, 500 - inside)
        await worker.add([a_request("urgent", priority=1)])
        await worker.stats()
        assert "rl-urgent" in server.client.requests
        await worker.abort([f"r{index}" for index in range(500)])
        await worker.resume()
        assert len(await collected(worker, 501)) == 501

    run(scenario)


def test_a_dead_engine_fails_every_call_pending_ones_too() -> None:
    async def scenario(server: TwinServer, worker: HttpWorker) -> None:
        await worker.add([a_request("a", 250)])
        await worker.suspend()
        server.client.hold.clear()
        update = asyncio.ensure_future(worker.update(server.publish()))
        waiting = asyncio.ensure_future(worker.completions())
        while "finish_weight_update" not in server.client.calls[-1:]:
            await asyncio.sleep(0.005)
        server.client.die()
        for call in (
            update,
            waiting,
            worker.stats(),
            worker.add([a_request("b")]),
            worker.resume(),
            worker.abort(["a"]),
        ):
            with pytest.raises(RetryableError, match="engine died"):
                await call
        assert "engine died" in (await worker.status())["broken"]
        with pytest.raises(RetryableError, match="engine is broken"):
            await worker.restart()

    run(scenario)


def test_a_server_that_was_started_anew_is_noticed_and_taken_up_by_restart() -> None:
    async def scenario(server: TwinServer, worker: HttpWorker) -> None:
        await worker.add([a_request("lost", 250)])
        await server.stop()
        with pytest.raises(RetryableError):
            await worker.stats()
        with pytest.raises(RetryableError, match="cannot be restarted from outside"):
            await worker.restart()
        await server.start()
        await worker.restart()
        await worker.add([a_request("a")])
        assert list(await collected(worker, 1)) == ["a"]
        worker._instance = "another"
        with pytest.raises(RetryableError, match="restarted"):
            await worker.stats()
        await worker.restart()
        assert (await worker.stats()).waiting == 0

    run(scenario)


def test_restart_of_a_living_server_clears_it_of_our_requests() -> None:
    async def scenario(server: TwinServer, worker: HttpWorker) -> None:
        await worker.suspend()
        await worker.add([a_request(f"r{index}", 250) for index in range(30)])
        await worker.restart()
        assert (await worker.stats()).waiting == 0
        assert not server.client.paused
        await worker.add([a_request("a")])
        assert list(await collected(worker, 1)) == ["a"]

    run(scenario)


def test_closing_leaves_the_engine_running_without_our_requests() -> None:
    async def scenario(server: TwinServer, worker: HttpWorker) -> None:
        await worker.suspend()
        await worker.add([a_request(f"r{index}", 250) for index in range(30)])
        await worker.close()
        assert not server.client.requests
        assert not server.client.paused

    run(scenario)


def test_another_protocol_version_is_refused_by_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(server: TwinServer, worker: HttpWorker) -> None:
        worker._headers[wire.PROTOCOL_HEADER] = str(wire.PROTOCOL + 1)
        with pytest.raises(ConfigError, match="protocol"):
            await worker.stats()
        other = HttpWorker(server.url, TOKEN)
        monkeypatch.setattr(
            "vllm_rlplugin.server.control_route.PROTOCOL", 1.0
        )  # what a server of another version answers
        with pytest.raises(ConfigError, match="speaks protocol 1\\.0"):
            await other.stats()
        await other.close()

    run(scenario)


def test_the_token_goes_only_where_it_may() -> None:
    for url in ("http://example.org:8000", "http://10.0.0.1", "http://[2001:db8::1]:80"):
        with pytest.raises(ConfigError, match="unencrypted"):
            HttpWorker(url, TOKEN)
    for url in ("ftp://localhost", "localhost:8000", "", "http://"):
        with pytest.raises(ConfigError):
            HttpWorker(url, TOKEN)
    with pytest.raises(ConfigError, match="token"):
        HttpWorker("http://localhost:8000", "")
    for url in ("http://localhost:8000", "http://127.0.0.1:1", "http://[::1]:80", "https://example.org"):
        HttpWorker(url, TOKEN)
    HttpWorker("http://10.0.0.1", TOKEN, allow_plain_http=True)


def test_a_wrong_token_and_a_server_without_the_plugin_are_mistakes_of_the_configuration() -> None:
    async def scenario(server: TwinServer, worker: HttpWorker) -> None:
        other = HttpWorker(server.url, "wrong-token-of-the-tests")
        with pytest.raises(ConfigError, match="token"):
            await other.stats()
        await other.close()
        elsewhere = HttpWorker(f"{server.url}/elsewhere", TOKEN)
        with pytest.raises(ConfigError, match="--plugin rl-coserve"):
            await elsewhere.stats()
        await elsewhere.close()

    run(scenario)


def test_users_of_the_server_go_before_rollouts_whatever_their_order_among_themselves() -> None:
    async def scenario(server: TwinServer, worker: HttpWorker) -> None:
        behind = HttpWorker(server.url, TOKEN, "behind", priority=1_000_000)
        try:
            await behind.suspend()
            await behind.add([a_request("longest", 50, priority=-40), a_request("short", 50, priority=-3)])
            async with asyncio.timeout(10):
                while len(server.client.requests) < 2:
                    await asyncio.sleep(0.01)
            found = {request.session: request.priority for request in server.client.requests.values()}
            assert found == {"longest": 999_960, "short": 999_997}, "users have 0: the lower number goes first"
            await behind.prioritize({"short": -60})
            assert {request.session: request.priority for request in server.client.requests.values()} == {
                "longest": 999_960,
                "short": 999_940,
            }
        finally:
            await behind.close()

    run(scenario)
