"""The control endpoints of ``vllm serve --plugin rl-coserve`` on a twin of vLLM's engine client: who may, what is refused
and how, vLLM's own verbs, metrics. ``test_served_lifecycle.py`` has the same on a real server."""

from __future__ import annotations

import asyncio
import json
import logging
from argparse import Namespace
from collections.abc import AsyncGenerator, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest

pytest.importorskip("fastapi")
from fastapi import FastAPI
from prometheus_client import generate_latest

from orchestrator.api import CommandError, ConfigError, GenerationRequest, KvMove, Sampling
from orchestrator.api import http as wire
from orchestrator.borrowing.http_worker import HttpWorker, _Asked
from tests.support.vllm_twin import ENDPOINT, TOKEN, TwinServer, a_request, collected, run
from vllm_rlplugin.kvpool.engine.idle_upkeep import PoolUpkeep
from vllm_rlplugin.options import FrontendOptions
from vllm_rlplugin.server import bearer_auth, control_endpoints, engine_metrics, server_lease
from vllm_rlplugin.server.engine_metrics import refresh_metrics
from vllm_rlplugin.worker.live_engine import LiveEngine


async def raw(server: TwinServer, method: str, path: str, token: str | None = TOKEN, **options: Any) -> tuple[int, Any]:
    """Status and answer of one call without the client."""
    headers = {**options.pop("headers", {}), **({"Authorization": f"Bearer {token}"} if token else {})}
    async with (
        aiohttp.ClientSession() as session,
        session.request(method, server.url + path, headers=headers, **options) as response,
    ):
        return response.status, json.loads(await response.read())


def our_routes() -> Iterator[tuple[str, str]]:
    for route in control_endpoints.router.routes:
        for method in route.methods:  # type: ignore[attr-defined]
            yield method, route.path  # type: ignore[attr-defined]


def test_a_replaced_token_file_opens_the_routes_without_a_restart(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("of-before-0123456789")
    given = bearer_auth.find_token(FrontendOptions(token_file=str(file)), {})
    guard = bearer_auth.BearerGuard(given, ())
    guard.check_caller("Bearer of-before-0123456789", None)
    (tmp_path / "new").write_text("of-now-0123456789")
    (tmp_path / "new").replace(file)
    guard.check_caller("Bearer of-now-0123456789", None)
    guard.check_caller("Bearer of-before-0123456789", None)  # for bearer.OVERLAP
    with pytest.raises(bearer_auth.AccessDenied):
        guard.check_caller("Bearer of-nobody-0123456789", None)


def test_every_route_refuses_a_call_without_the_token_and_does_nothing() -> None:
    async def scenario(server: TwinServer, worker: HttpWorker) -> None:
        routes = list(our_routes())
        assert len(routes) >= 20
        for method, path in routes:
            for token in (None, "wrong-token-of-the-tests", TOKEN + "x"):
                status, answer = await raw(server, method, path, token, data=b"{" * 2_000_000)  # not even read
                assert (status, answer["error"]["type"]) == (401, "unauthorized"), (method, path)
            status, _ = await raw(server, method, path, None, headers={"Authorization": f"Basic {TOKEN}"})
            assert status == 401
        assert server.client.calls == ["snapshot", "rl_ready", "init_weight_transfer_engine"]

    run(scenario)


def test_a_client_outside_the_allowed_networks_is_refused_whatever_its_token() -> None:
    async def scenario(server: TwinServer, worker: HttpWorker) -> None:
        for method, path in our_routes():
            assert (await raw(server, method, path))[0] == 403, path
        with pytest.raises(ConfigError, match="--rl-allow-clients"):
            await worker.stats()

    run(scenario, networks="10.0.0.0/8")


def test_addresses_are_judged_as_networks_and_a_unix_socket_is_local() -> None:
    guard = bearer_auth.BearerGuard(TOKEN, FrontendOptions().networks())
    good = f"bearer {TOKEN}"
    for client in ("127.0.0.1", "127.9.9.9", "::1", "::ffff:127.0.0.1", None):
        guard.check_caller(good, client)
    for client in ("10.0.0.1", "::ffff:10.0.0.1", "fe80::1%eth0", "testclient", ""):
        with pytest.raises(bearer_auth.AccessDenied):
            guard.check_caller(good, client)


def test_a_body_over_the_limit_is_refused_before_it_is_read_whole() -> None:
    async def scenario(server: TwinServer, worker: HttpWorker) -> None:
        sent = 0

        async def endless() -> AsyncGenerator[bytes, None]:
            nonlocal sent
            while sent < 1 << 26:
                sent += 1 << 16
                yield b" " * (1 << 16)

        status, answer = await raw(server, "POST", wire.ADD, data=b" " * ((1 << 20) + 1))
        assert (status, answer["error"]["code"]) == (413, 413)
        try:
            status, _ = await raw(server, "POST", wire.ADD, data=endless())
            assert status == 413
        except aiohttp.ClientConnectionError:
            pass  # the server answered and hung up while we were sending
        assert sent < 1 << 25
        big = GenerationRequest("big", "big", 0, (1,) * 600_000, Sampling(1), "test")
        with pytest.raises(CommandError, match="1048576 B"):
            await worker.add([big])

    run(scenario)


@pytest.mark.parametrize(
    ("path", "body", "where"),
    [
        (wire.ADD, b"no json", ""),
        (wire.ADD, b"", ""),
        (wire.ADD, {"requests": [], "more": 1}, "more"),
        (wire.ADD, {"requests": [{"request_id": "a"}]}, "requests.0.trajectory_id"),
        (wire.ADD, {"requests": [{}] * (wire.MAX_REQUESTS + 1)}, "requests"),
        (wire.ABORT, {"request_ids": ["x" * 257]}, "request_ids.0"),
        (wire.ABORT, {"request_ids": "abc"}, "request_ids"),
        (wire.PRIORITIZE, {"priorities": {"t": 1 << 63}}, "priorities"),
        (wire.PRIORITIZE, {"priorities": {"t": 1.5}}, "priorities"),
        (wire.UPDATE, {"version": -1}, "version"),
        (wire.UPDATE, {"version": True}, "version"),
        ("/update_weights", {"update_info": {"version": 1, "file": "/etc/passwd"}}, ""),
        ("/init_weight_transfer_engine", {"init_info": {"endpoint": {"job": "x", "kind": "nfs"}}}, ""),
        ("/init_weight_transfer_engine", {"init_info": {}}, ""),
        ("/finish_weight_update", {}, ""),
    ],
)
def test_a_malformed_body_is_a_400_that_names_the_place(path: str, body: Any, where: str) -> None:
    async def scenario(server: TwinServer, worker: HttpWorker) -> None:
        await worker.suspend()
        options = {"data": body} if isinstance(body, bytes) else {"json": body}
        status, answer = await raw(server, "POST", path, **options)
        assert (status, answer["error"]["type"], answer["error"]["code"]) == (400, "invalid_request", 400), answer
        assert (answer["error"]["param"] or "").startswith(where)
        assert not server.client.requests
        assert server.worker.cycle.version == 0

    run(scenario)


@pytest.mark.parametrize(
    ("tokens", "sampling"),
    [((), {}), ((64,), {}), ((1,) * 256, {}), ((1,), {"temperature": float("nan")}), ((1,), {"max_tokens": 0})],
)
def test_a_request_that_the_model_cannot_take_refuses_the_call_unless_partial(
    tokens: tuple[int, ...], sampling: dict[str, Any]
) -> None:
    async def scenario(server: TwinServer, worker: HttpWorker) -> None:
        good = {"request_id": "good", "trajectory_id": "t", "token_ids": [1], "sampling": {"max_tokens": 2}}
        bad = {**good, "request_id": "bad", "token_ids": tokens, "sampling": {"max_tokens": 2, **sampling}}
        status, answer = await raw(server, "POST", wire.ADD, json={"requests": [good, bad]})
        assert (status, answer["error"]["type"]) == (400, "invalid_request")
        assert len(server.worker.unfinished(["good", "bad"])) == 0
        if sampling:
            return
        status, _ = await raw(server, "POST", wire.ADD, json={"requests": [good, bad], "partial": True})
        assert status == 200
        worker._unfinished |= {"good": _Asked(2), "bad": _Asked(2)}
        done = await collected(worker, 2)
        assert (done["bad"].finish_reason, done["good"].finish_reason) == ("error", "length")

    run(scenario)


def test_an_exception_of_one_request_ends_that_request_only() -> None:
    async def scenario(server: TwinServer, worker: HttpWorker) -> None:
        bad = GenerationRequest("bad", "bad", 0, (63,), Sampling(3), "test")
        await worker.add([bad, a_request("good")])
        done = await collected(worker, 2)
        assert done["good"].finish_reason == "length"
        assert (done["bad"].finish_reason, done["bad"].error) == ("error", "the twin does not like token 63")

    run(scenario)


def test_an_answer_that_was_lost_is_given_again_and_nothing_comes_twice() -> None:
    async def scenario(server: TwinServer, worker: HttpWorker) -> None:
        await worker.add([a_request("a")])
        path = wire.COMPLETIONS
        _, first = await raw(server, "GET", path, params={"timeout": "10"})
        assert [item["request_id"] for item in first["completions"]] == ["a"]
        _, again = await raw(server, "GET", path, params={"timeout": "10"})  # as a client that saw nothing
        assert again == first
        await worker.add([a_request("b")])
        while server.worker.unfinished(["b"]):
            await asyncio.sleep(0.01)
        assert (await raw(server, "GET", path, params={"acknowledged": "99"}))[1] == first
        number = str(first["sequence"])
        _, second = await raw(server, "GET", path, params={"acknowledged": number})
        assert [item["request_id"] for item in second["completions"]] == ["b"]
        assert second["sequence"] == first["sequence"] + 1
        params = {"acknowledged": str(second["sequence"]), "timeout": "0"}
        assert (await raw(server, "GET", path, params=params))[1] == {**second, "completions": []}

    run(scenario)


def test_without_a_relay_there_are_no_updates_until_a_stock_client_names_one() -> None:
    async def scenario(server: TwinServer, worker: HttpWorker) -> None:
        await worker.suspend()
        for call in (worker.update(1), worker.prepare(1)):
            with pytest.raises(CommandError) as caught:
                await call
            assert (caught.value.code, caught.value.status) == ("no_relay", 409)
        body = {"init_info": {"endpoint": {**ENDPOINT, "master": "gone"}}}
        assert (await raw(server, "POST", "/init_weight_transfer_engine", json=body))[0] == 503
        body = {"init_info": {"endpoint": ENDPOINT}}
        assert (await raw(server, "POST", "/init_weight_transfer_engine", json=body))[0] == 200
        assert (await worker.update(server.publish())).version == 1

    run(scenario, relay=False)


def test_beside_a_connector_that_remembers_kv_of_older_weights_no_relay_is_connected() -> None:
    async def scenario(server: TwinServer, worker: HttpWorker) -> None:
        server.worker.limits = replace(server.worker.limits, remembers="LMCacheConnectorV1")
        told = {"init_info": {"endpoint": ENDPOINT}}
        status, answer = await raw(server, "POST", "/init_weight_transfer_engine", json=told)
        assert (status, answer["error"]["type"]) == (400, "invalid_request")
        assert "LMCacheConnectorV1: it cannot forget KV" in answer["error"]["message"]
        with pytest.raises(ConfigError, match="cannot forget KV"):
            await server.worker.open(ENDPOINT)

    run(scenario, relay=False)


@pytest.mark.engine
@pytest.mark.parametrize(
    ("name", "remembers"),
    [
        ("ExampleConnector", True),  # it finds KV by tokens alone
        ("LMCacheConnectorV1", True),
        ("OffloadingConnector", False),
        ("NixlConnector", False),  # of requests that name their source only
    ],
)
def test_which_connectors_of_vllm_remember_kv_of_older_weights(name: str, remembers: bool) -> None:
    from vllm.config import KVTransferConfig

    from vllm_rlplugin.engine_activation import remembering_connector

    config = KVTransferConfig(kv_connector=name, kv_role="kv_both")
    parts = {
        "connectors": [
            {"kv_connector": "NixlConnector", "kv_role": "kv_both"},
            {"kv_connector": name, "kv_role": "kv_both"},
        ]
    }
    several = KVTransferConfig(kv_connector="MultiConnector", kv_role="kv_both", kv_connector_extra_config=parts)
    for given in (config, several):
        assert remembering_connector(given) == (name if remembers else "")
    assert remembering_connector(None) == ""


def test_an_update_that_its_client_started_and_left_stands_in_nobodys_way() -> None:
    async def scenario(server: TwinServer, worker: HttpWorker) -> None:
        server.client.relay |= {5: "", 6: "", 7: ""}
        await raw(server, "POST", "/pause", params={"mode": "keep"})
        assert (await raw(server, "POST", "/start_weight_update"))[0] == 200
        assert (await raw(server, "POST", "/update_weights", json={"update_info": {"version": 5}}))[0] == 200
        assert (await raw(server, "POST", "/start_weight_update"))[0] == 200, "another client, from the start"
        assert (await raw(server, "POST", "/resume"))[0] == 200, "and this one goes on without it"
        await worker.suspend()
        assert (await worker.update(6)).version == 6
        await worker.resume()

    run(scenario)


def test_a_finish_that_could_not_shut_out_old_kv_is_refused_before_the_model_is_touched() -> None:
    """The version, and with it how KV is shut out, is known after the start only; and requests end while a client transfers."""

    async def scenario(server: TwinServer, worker: HttpWorker) -> None:
        server.client.relay |= {5: "", 6: ""}
        await raw(server, "POST", "/pause", params={"mode": "keep"})
        assert (await raw(server, "POST", "/start_weight_update"))[0] == 200
        assert (await raw(server, "POST", "/update_weights", json={"update_info": {"version": 5}}))[0] == 200
        server.client.holders = "1 requests that ended hold KV blocks"
        assert (await raw(server, "POST", "/finish_weight_update"))[0] == 503
        assert ((await worker.status())["unusable"], server.client.loaded) == ("", -1)
        assert server.client.may == [{}, {"version": 5, "history": 0}]
        assert (await raw(server, "POST", "/resume"))[0] == 200
        server.client.holders = ""
        await worker.suspend()
        assert (await worker.update(6)).version == 6
        assert server.client.may[2:] == [{"version": 6, "history": 0}] * 2

    run(scenario)


def test_a_client_of_stock_vllm_needs_only_the_token() -> None:
    async def scenario(server: TwinServer, worker: HttpWorker) -> None:
        async def post(path: str, **options: Any) -> Any:
            status, answer = await raw(server, "POST", path, **options)
            return answer if status == 200 else (status, answer["error"]["type"])

        await worker.add([a_request("a", 100)])
        assert await post("/start_weight_update") == (409, "not_suspended")
        assert await post("/pause", params={"mode": "keep", "clear_cache": "true"}) == {"status": "paused"}
        assert (await raw(server, "GET", "/is_paused"))[1] == {"is_paused": True}
        assert await post("/init_weight_transfer_engine", json={"init_info": {"endpoint": ENDPOINT}}) == {
            "message": "Weight transfer initialized"
        }
        server.client.relay |= {5: "", 6: ""}
        assert await post("/start_weight_update") == {"message": "Weight update started"}
        assert await post("/update_weights", json={"update_info": {"version": 5}}) == {"message": "Weights updated"}
        assert await post("/finish_weight_update", json={"weight_version": "6"}) == (400, "invalid_request")
        assert await post("/finish_weight_update", json={"weight_version": "step-5"}) == {
            "message": "Weight update finished"
        }
        assert (await raw(server, "GET", "/weight_info"))[1] == {"weight_version": "step-5"}
        assert (await worker.stats()).version == 5
        assert server.client.calls[-2:] == ["advance_version", "snapshot"]
        assert "loading" in server.client.calls, "a neighbour in a pool knows why nothing is given back"
        assert await post("/update_weights", json={"update_info": {"version": 4}}) == (409, "version_decreases")
        assert await post("/update_weights", json={"update_info": {"version": 6}}) == {"message": "Weights updated"}
        assert await post("/resume") == {"status": "resumed"}  # what was received and not finished is dropped
        assert (await collected(worker, 1))["a"].versions[-1][0] == 5
        await worker.add([a_request("b", 250), a_request("c", 250)])
        assert await post("/abort_requests", json={"request_ids": ["b"]}) == {"status": "aborted", "aborted": 1}
        assert (await collected(worker, 1))["b"].finish_reason == "abort"
        assert (await post("/abort_requests", json={}))["status"] == "aborted"
        assert (await collected(worker, 1))["c"].finish_reason == "abort"
        assert await post("/reset_prefix_cache") == {"success": True}

    run(scenario)


def test_the_other_verbs_of_stock_name_the_weights_compare_them_and_let_go_of_the_relay() -> None:
    async def scenario(server: TwinServer, worker: HttpWorker) -> None:
        async def post(path: str, **body: Any) -> Any:
            status, answer = await raw(server, "POST", path, json=body)
            return answer if status == 200 else (status, answer["error"]["type"])

        for params in ({}, {"include_dp": "false"}):
            assert await raw(server, "GET", "/get_world_size", params=params) == (200, {"world_size": 1})
        before = (await post("/weight_checker", action="checksum"))["checksums"]
        assert await post("/weight_checker", action="compare", baseline=before) == {"match": True, "mismatches": []}
        for wrong in ({"action": "reset"}, {"action": "compare"}, {"action": "zero"}, {}):
            assert await post("/weight_checker", **wrong) == (400, "invalid_request")
        assert await post("/start_draft_weight_update") == (400, "invalid_request")

        await worker.suspend()
        await worker.update(server.publish())
        found = await post("/weight_checker", action="compare", baseline={**before, "more": "x"})
        assert found == {"match": False, "mismatches": ["more", "rank0.embed"]}
        assert await post("/update_weight_version", new_version="first") == {"success": True, "new_version": "first"}
        assert (await raw(server, "GET", "/weight_info"))[1] == {"weight_version": "first"}
        assert await post("/update_weight_version", new_version="2") == (400, "invalid_request")
        await worker.resume()
        await worker.add([a_request("a")])
        assert {version for version, _ in (await collected(worker, 1))["a"].versions} == {1}, (
            "that is what it is called"
        )

        await worker.suspend()
        await worker.update(server.publish())
        for label in ("first", "default"):  # tokens of before have these labels
            assert await post("/update_weight_version", new_version=label) == (400, "invalid_request")
        assert await post("/shutdown_weight_transfer_engine") == {"message": "Weight transfer shut down"}
        assert await post("/start_weight_update") == (409, "no_relay")
        await worker.resume()
        assert (await worker.stats()).version == 2

    run(scenario)


def test_a_server_without_kv_transfer_says_so_and_a_wrong_move_is_a_400() -> None:
    async def scenario(server: TwinServer, worker: HttpWorker) -> None:
        assert await worker.kv_place() == ""
        moved = await worker.fetch_kv(KvMove("t", (1, 2, 3), "127.0.0.1:1", 5.0))
        assert (moved.tokens, moved.moved, moved.why.partition(":")[0]) == (0, 0, "off")
        body = {"trajectory_id": "t", "token_ids": [1], "source": "127.0.0.1:1", "limit": 5.0}
        for change in ({"token_ids": []}, {"token_ids": [-1]}, {"limit": 0.0}, {"limit": 1e9}, {"other": 1}):
            status, _ = await raw(server, "POST", wire.KV_FETCH, data=json.dumps(body | change))
            assert status == 400, change

    run(scenario)


def test_a_client_of_another_protocol_version_is_refused() -> None:
    async def scenario(server: TwinServer, worker: HttpWorker) -> None:
        for theirs, status in ((str(wire.PROTOCOL + 1), 400), (str(wire.PROTOCOL), 200), ("", 400)):
            found, answer = await raw(server, "GET", wire.STATUS, headers={wire.PROTOCOL_HEADER: theirs})
            assert found == status
            assert status == 200 or answer["error"]["type"] == "protocol_mismatch"

    run(scenario)


def test_an_unknown_id_is_a_404_and_a_repeated_abort_is_not() -> None:
    async def scenario(server: TwinServer, worker: HttpWorker) -> None:
        await worker.add([a_request("a", 250, trajectory="t", group="g")])
        for _ in range(2):
            for body in ({"request_ids": ["a", "zz"]}, {"trajectories": ["t"]}, {"groups": ["g"]}, {}):
                assert (await raw(server, "POST", wire.ABORT, json=body))[0] == 200, body
        for body in ({"request_ids": ["zz"]}, {"trajectories": ["a"]}, {"groups": ["t", "zz"]}):
            status, answer = await raw(server, "POST", wire.ABORT, json=body)
            assert (status, answer["error"]["type"]) == (404, "unknown_request"), body
        await worker.abort(["zz"])  # the port ignores unknown ids

    run(scenario)


def test_a_generated_token_lies_in_a_file_that_only_its_owner_reads(
    tmp_path: Any, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    logger = logging.getLogger("vllm.rl_coserve")  # vLLM, once imported, keeps its loggers from the root's handlers
    logger.addHandler(caplog.handler)
    try:
        with caplog.at_level("INFO", logger=logger.name):
            given = bearer_auth.find_token(FrontendOptions(), {})
    finally:
        logger.removeHandler(caplog.handler)
    path = next(word for word in caplog.text.split() if word.endswith("/token"))

    assert given == f"file:{path}"
    token = Path(path).read_text().strip()
    assert Path(path).stat().st_mode & 0o777 == 0o600
    assert Path(path).parent.stat().st_mode & 0o777 == 0o700
    assert token in capsys.readouterr().err
    assert token not in caplog.text
    assert Path(bearer_auth.find_token(FrontendOptions(), {}).removeprefix("file:")).read_text().strip() != token
    assert bearer_auth.find_token(FrontendOptions(), {"RL_COSERVE_TOKEN": TOKEN}) == TOKEN
    file = tmp_path / "token"
    file.write_text("from-a-file-0123456789\n")
    options = FrontendOptions(token_file=str(file))
    assert bearer_auth.find_token(options, {"RL_COSERVE_TOKEN": TOKEN}) == f"file:{file}"
    for bad in ("", "short", "with spaces in the middle of it", "täglich-frisch-und-neu"):
        with pytest.raises(ConfigError) as caught:
            bearer_auth.find_token(FrontendOptions(), {"RL_COSERVE_TOKEN": bad})
        assert not bad or bad not in str(caught.value)


@pytest.mark.parametrize(
    ("servers", "replicas", "flag"), [(2, 1, "--api-server-count"), (1, 2, "--data-parallel-size")]
)
def test_more_processes_than_one_worker_can_command_are_refused_at_the_start(
    servers: int, replicas: int, flag: str
) -> None:
    def config(size: int) -> Any:
        return SimpleNamespace(parallel_config=SimpleNamespace(data_parallel_size=size))

    control_endpoints._check_topology(config(1), Namespace(api_server_count=None))
    with pytest.raises(ConfigError, match=flag):
        control_endpoints._check_topology(config(replicas), Namespace(api_server_count=servers))


def test_loaded_but_not_asked_for_there_are_no_routes(monkeypatch: pytest.MonkeyPatch) -> None:
    for value, expected in (("", 0), ("1", len(control_endpoints.router.routes))):
        monkeypatch.setenv("RL_COSERVE_ACTIVE", value)
        app = FastAPI(openapi_url=None)
        control_endpoints.ControlPlugin().attach_router(app)
        assert len(app.routes) == expected


@pytest.mark.parametrize("what", ["pages", "metrics", "lease"])
def test_what_goes_on_by_itself_says_once_what_failed_and_goes_on(
    what: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An error of the engine's process has no type here; ended by it, the loop was gone without a word."""
    monkeypatch.setattr(engine_metrics, "REFRESH_SECONDS", 0.01)
    monkeypatch.setattr(server_lease, "WATCH_SECONDS", 0.01)
    looks: list[bool] = []

    async def scenario(server: TwinServer, worker: HttpWorker) -> None:
        for task in server.control.tasks:
            task.cancel()
        upkeep, lease = PoolUpkeep(LiveEngine(server.client), 0.01), server.control.lease
        owner, name, loop = {
            "pages": (upkeep, "check_pages", upkeep.run),
            "metrics": (server.worker, "stats", lambda: refresh_metrics(server.metrics, server.worker)),
            "lease": (lease, "_check_lease", lease.watch),
        }[what]
        stock = getattr(owner, name)

        async def look() -> Any:
            looks.append(len(looks) >= 3)
            if not looks[-1]:
                raise Exception("Call to rl_coserve method failed: the ledger is damaged")
            return await stock()

        monkeypatch.setattr(owner, name, look)
        going = asyncio.create_task(loop())
        while looks.count(True) < 2:
            assert not going.done(), "it ended"
            await asyncio.sleep(0.01)
        going.cancel()

    with caplog.at_level(logging.INFO, "vllm.rl_coserve"):
        run(scenario)
    said = [record.levelno for record in caplog.records if "the ledger is damaged" in record.getMessage()]
    assert said == [logging.WARNING]


def test_metrics_have_our_prefix_base_units_and_what_happened() -> None:
    async def scenario(server: TwinServer, worker: HttpWorker) -> None:
        await worker.add([a_request("a", 4), a_request("b", 4)])
        await collected(worker, 2)
        await worker.suspend()
        await worker.update(server.publish())
        stats = await server.worker.stats()
        for _ in range(2):  # counters are raised to the totals, not by them
            server.metrics.refresh(stats, 7, server.worker.cycle.updates, 1)
        text = generate_latest(server.registry).decode()
        for line in (
            "rl_coserve:generated_tokens_total 8.0",
            "rl_coserve:outranked_total 2.0",
            "rl_coserve:preemptions_total 3.0",
            "rl_coserve:requests_held 7.0",
            "rl_coserve:kv_blocks_free 100.0",
            "rl_coserve:weight_version 1.0",
            "rl_coserve:suspended 1.0",
            "rl_coserve:time_to_first_token_seconds_count 2.0",
            "rl_coserve:time_per_output_token_seconds_count 2.0",
            'rl_coserve:weight_updates_total{result="ok"} 1.0',
            'rl_coserve:weight_updates_total{result="failed"} 1.0',
            'rl_coserve:weight_update_seconds_count{phase="load"} 1.0',
            'rl_coserve:requests_finished_total{reason="length"} 2.0',
        ):
            assert f"{line}\n" in text, line

    run(scenario)
