"""Rollout workers that a config names by URL: what is checked before a run, and a server that goes away and comes back.
Real client, proxy, endpoints and worker on a twin of vLLM's engine client."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

pytest.importorskip("fastapi")

from orchestrator.api import ConfigError, GenerationRequest, RunError, Sampling
from orchestrator.api import http as wire
from orchestrator.borrowing import discovery, served_workers
from orchestrator.borrowing.http_worker import HttpWorker
from orchestrator.config import Config, load_config, parse_config, to_json
from orchestrator.events import EventLog, MemorySink
from orchestrator.proxy import gateway as proxies
from orchestrator.proxy.gateway import LLMProxy
from orchestrator.proxy.worker_state import WorkerLimits
from orchestrator.runtime import preflight
from orchestrator.sim.simulated_run import simulate
from orchestrator.tasks.frozenlake import FrozenLakeTask
from orchestrator.transfer import RelayEndpoint
from orchestrator.transfer.turns.routed_experts import ExpertsOfModel
from tests.support import vllm_twin
from tests.support.served_twins import twins, until
from tests.support.vllm_twin import ENDPOINT, TOKEN, TwinServer

ROOT = Path(__file__).parents[2]
URL = "http://127.0.0.1:8000"


def config_of(*urls: str, **rollout: Any) -> Config:
    return parse_config({"rollout": {"workers": 0, "served": list(urls), **rollout}})


# The config.


@pytest.mark.parametrize(
    ("rollout", "field", "hint"),
    [
        ({"workers": 0}, "rollout.workers", "rollout.served"),
        ({"workers": -1, "served": [URL]}, "rollout.workers", "at least 0"),
        ({"served": [URL, f"{URL}/"]}, "rollout.served", "twice"),
        ({"served": ["127.0.0.1:8000"]}, "rollout.served", "http://host:port"),
        ({"served": ["http://host:99999"]}, "rollout.served", "http://host:port"),
        ({"served": ["http://me:secret@localhost:1"]}, "rollout.served", "without a password"),
        ({"served": ["http://10.0.0.1:8000"]}, "rollout.served", "unencrypted"),
        ({"served": URL}, "rollout.served", "must be a list"),
        ({"served_token": "abc"}, "rollout.served_token", "did you mean rollout.served_token_file"),
    ],
)
def test_a_wrong_value_is_named_with_its_fix(rollout: dict[str, Any], field: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config({"rollout": rollout})
    assert caught.value.field == field
    assert hint in str(caught.value)


def test_fleets_of_served_workers_and_of_both_kinds_are_valid_and_saved_as_they_are() -> None:
    for config in (
        config_of(URL),
        config_of(URL, "https://elsewhere:1", workers=2),
        config_of("http://10.0.0.1:1", served_allow_plain_http=True),
    ):
        assert parse_config(json.loads(to_json(config))) == config


def test_a_runs_requests_stand_behind_users_unless_its_config_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RL_COSERVE_TOKEN", TOKEN)
    request = GenerationRequest("r", "t", 0, (1, 2), Sampling(4), "test", priority=-40)
    cases: tuple[tuple[dict[str, Any], int], ...] = (({}, 999_960), ({"served_priority": 0}, -40))
    for settings, expected in cases:
        (worker,) = served_workers.workers(config_of(URL, **settings), RelayEndpoint.from_dict(ENDPOINT))
        assert worker._sent(request).priority == expected


def test_the_token_is_of_the_file_else_of_the_environment_and_never_of_the_config(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(f"{TOKEN}\n")
    environment = {"RL_COSERVE_TOKEN": "of-the-environment"}
    assert served_workers.read_token(config_of(URL, served_token_file=str(file)), environment) == f"file:{file}"
    assert served_workers.read_token(config_of(URL), environment) == "of-the-environment"
    (tmp_path / "empty").write_text("\n")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    for name in ("none", "empty", "binary", "."):
        with pytest.raises(ConfigError) as caught:
            served_workers.read_token(config_of(URL, served_token_file=str(tmp_path / name)), environment)
        assert caught.value.field == "rollout.served_token_file"
    with pytest.raises(ConfigError, match="RL_COSERVE_TOKEN"):
        served_workers.read_token(config_of(URL), {})


def test_the_simulator_says_that_it_has_no_servers() -> None:
    with pytest.raises(ConfigError, match="the simulator has no servers"):
        simulate(config_of(URL))


# Before a run.


def status_of(**changes: Any) -> dict[str, Any]:
    shape = {"architectures": ["Qwen3ForCausalLM"], "hidden_size": 128, "num_hidden_layers": 2, "vocab_size": 64}
    limits = {"max_model_len": 256, "vocabulary": 64}
    return {"logprobs_mode": "processed_logprobs", "limits": limits, "shape": shape, "broken": "", **changes}


def test_a_server_that_fits_has_no_mistakes_and_each_misfit_is_named_with_its_fix() -> None:
    config, task = config_of(URL), FrozenLakeTask(300)
    assert served_workers.mistakes(config, task, status_of()) == []
    short = {"max_model_len": task.max_context_tokens - 1, "vocabulary": 64}
    for changes, words in (
        ({"broken": "the vLLM engine died"}, "engine died"),
        ({"limits": short}, f"--max-model-len {task.max_context_tokens}"),
        ({"limits": {"max_model_len": 256, "vocabulary": 65}}, "vocabulary of 65"),
        ({"shape": {"hidden_size": 64}}, "hidden_size 64 (the run's: 128)"),
        ({"logprobs_mode": "raw_logits"}, "--logprobs-mode processed_logprobs"),
    ):
        (mistake,) = served_workers.mistakes(config, task, status_of(**changes))
        assert words in mistake
    replayed = config.model_copy(update={"trainer": config.trainer.model_copy(update={"routing_replay": True})})
    (mistake,) = served_workers.mistakes(replayed, task, status_of())
    assert "--enable-return-routed-experts" in mistake
    assert served_workers.mistakes(replayed, task, status_of(routed_experts=True)) == []
    raw = status_of(logprobs_mode="raw_logprobs")
    assert served_workers.mistakes(config, task, raw) == []  # at temperature 1 they are the sampled distribution's
    assert served_workers.mistakes(config_of(URL, temperature=0.7), task, raw)


def test_the_model_of_a_folder_must_be_the_one_that_is_served(tmp_path: Path) -> None:
    sizes = {"hidden_size": 96, "num_hidden_layers": 2, "vocab_size": 64}
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["Qwen3ForCausalLM"], **sizes}))
    config = parse_config({"model": {"path": str(tmp_path)}, "rollout": {"workers": 0, "served": [URL]}})
    (mistake,) = served_workers.mistakes(config, FrozenLakeTask(300), status_of())
    assert "hidden_size 128 (the run's: 96)" in mistake


@pytest.mark.parametrize("name", ["num_experts", "num_local_experts", "n_routed_experts"])
def test_a_run_that_replays_experts_looks_at_those_that_servers_say(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RL_COSERVE_TOKEN", TOKEN)
    sizes = {"num_hidden_layers": 3, "num_experts_per_tok": 2, name: 8}
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["Qwen3MoeForCausalLM"], **sizes}))
    given = {"model": {"path": str(tmp_path)}, "rollout": {"workers": 0, "served": [URL]}}
    for replay, expected in ((True, ExpertsOfModel(3, 2, 8)), (False, None)):
        config = parse_config({**given, "trainer": {"routing_replay": replay}})
        (worker,) = served_workers.workers(config, RelayEndpoint.from_dict(ENDPOINT))
        assert worker._experts == expected


@pytest.mark.parametrize(
    ("said", "dense"),
    [
        ({}, set()),
        ({"first_k_dense_replace": 2}, {0, 1}),
        ({"first_k_dense_replace": 0}, set()),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [3]}, {0, 2, 3}),
        ({"decoder_sparse_step": 1, "mlp_only_layers": []}, set()),
    ],
)
def test_layers_without_experts_are_those_that_the_trainer_builds_so(
    said: dict[str, Any], dense: set[int], tmp_path: Path
) -> None:
    sizes = {"num_hidden_layers": 4, "num_experts_per_tok": 2, "num_experts": 8}
    (tmp_path / "config.json").write_text(json.dumps({**sizes, **said}))
    found = served_workers._experts(parse_config({"model": {"path": str(tmp_path)}}))
    assert found == ExpertsOfModel(4, 2, 8, frozenset(dense))


def test_a_server_elsewhere_needs_a_relay_that_it_can_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RL_COSERVE_TOKEN", TOKEN)
    with pytest.raises(ConfigError) as caught:
        discovery.check(config_of("https://elsewhere:1"), FrozenLakeTask(300))
    assert caught.value.field == "relay.master"


def test_a_name_of_this_machine_that_means_loopback_is_no_relay_for_a_server_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As /etc/hosts of Debian has it: every worker would ask itself, minutes later."""
    monkeypatch.setenv("RL_COSERVE_TOKEN", TOKEN)
    monkeypatch.setattr(socket, "gethostbyname", {"node1": "127.0.1.1", "node2": "10.0.0.2"}.__getitem__)
    config = config_of("https://elsewhere:1")
    for host, fits in (("node1", False), ("node2", True)):
        named = config.model_copy(update={"relay": config.relay.model_copy(update={"kind": "mooncake", "host": host})})
        if fits:
            served_workers._reachable(named, ["https://elsewhere:1"])
            continue
        with pytest.raises(ConfigError, match=r"loopback \(node1\): set relay\.host"):
            served_workers._reachable(named, ["https://elsewhere:1"])


def checked(config: Config, monkeypatch: pytest.MonkeyPatch, token: str = TOKEN, **options: Any) -> None:
    """The whole preflight, with a server beside it; ``{port}`` in the URLs is the server's."""
    monkeypatch.setenv("RL_COSERVE_TOKEN", token)

    async def main() -> None:
        server = await TwinServer().start(**options)
        try:
            urls = [url.replace("{port}", str(server.port)) for url in config.model_dump()["rollout"]["served"]]
            rollout = config.rollout.model_copy(update={"served": tuple(urls)})
            await asyncio.to_thread(
                preflight.check, config.model_copy(update={"rollout": rollout}), FrozenLakeTask(300)
            )
        finally:
            await server.stop()

    asyncio.run(main())


def test_every_server_is_asked_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    twice = parse_config({"rollout": {"workers": 0, "served": ["http://127.0.0.1:1", "http://localhost:1"]}})
    here = twice.rollout.model_copy(update={"served": ("http://127.0.0.1:{port}",)})
    both = twice.rollout.model_copy(update={"served": ("http://127.0.0.1:{port}", "http://localhost:{port}")})
    fits = twice.model_copy(update={"rollout": here})
    checked(fits, monkeypatch)
    with pytest.raises(ConfigError, match="is a server running there"):
        checked(twice, monkeypatch)
    with pytest.raises(ConfigError, match="is the same server as"):
        checked(twice.model_copy(update={"rollout": both}), monkeypatch)
    with pytest.raises(ConfigError, match="refuses it") as caught:
        checked(fits, monkeypatch, token="another-token-0123456789")
    assert caught.value.field == "rollout.served_token_file"
    assert "another-token" not in str(caught.value)
    with pytest.raises(ConfigError, match="--rl-allow-clients"):
        checked(fits, monkeypatch, networks="10.0.0.0/8")
    monkeypatch.setitem(vllm_twin.FACTS, "logprobs_mode", "raw_logits")
    with pytest.raises(ConfigError, match="--logprobs-mode"):
        checked(fits, monkeypatch)


def test_in_a_fleet_that_is_half_upgraded_a_run_chooses_among_the_servers_of_its_own_version(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One that it needs is refused by name, with both versions."""
    fix = "this server speaks protocol 8, the client 9: install the same rl-coserve"
    mismatch = {"error": {"message": fix, "type": wire.PROTOCOL_MISMATCH, "param": None, "code": 400}}

    async def answer(request: web.Request) -> web.Response:
        return web.json_response(mismatch, status=400)

    async def check(served: dict[str, Any]) -> None:
        config = parse_config({"rollout": {"workers": 0, **served}})
        await asyncio.to_thread(served_workers.check, config, FrozenLakeTask(300), config.rollout.served)

    async def main() -> None:
        twin, app = await TwinServer().start(), web.Application()
        app.router.add_get(wire.STATUS, answer)
        runner = web.AppRunner(app)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            other = f"http://127.0.0.1:{runner.addresses[0][1]}"
            await check({"served": [other, twin.url], "borrowed": {"most": 1}})
            for served in ({"served": [other], "borrowed": {"most": 1}}, {"served": [other, twin.url]}):
                with pytest.raises(ConfigError, match=f"{other}.*{fix}"):
                    await check(served)
        finally:
            await runner.cleanup()
            await twin.stop()

    monkeypatch.setenv("RL_COSERVE_TOKEN", TOKEN)
    asyncio.run(main())


def test_a_config_whose_server_is_not_there_ends_with_exit_code_2(tmp_path: Path) -> None:
    (tmp_path / "token").write_text(TOKEN)
    command = [sys.executable, "-m", "orchestrator.cli", "train", "examples/frozenlake.toml", "rollout.workers=0"]
    command += ['rollout.served=["http://127.0.0.1:1"]', f"rollout.served_token_file={tmp_path / 'token'}"]
    done = subprocess.run([*command, f"run.folder={tmp_path}"], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 2, done.stderr
    assert "rollout.served" in done.stderr
    assert "http://127.0.0.1:1" in done.stderr
    assert "Traceback" not in done.stderr


# While a run goes on.


def relay(job: str) -> RelayEndpoint:
    return RelayEndpoint.from_dict({**ENDPOINT, "job": job})


class Fleet:
    """Served workers and a proxy in front of them, as a run has them. ``events``: (kind, what, detail)."""

    def __init__(self, servers: list[TwinServer], stall: float = 5.0) -> None:
        self.servers = servers
        config = config_of(*(server.url for server in servers))
        self.workers = [HttpWorker(url, TOKEN, url, relay=relay("fleet")) for url in config.rollout.served]
        self.sink = MemorySink()
        self.fatal: list[RunError] = []
        events = EventLog(self.sink, asyncio.get_running_loop().time)
        self.proxy = LLMProxy(
            self.workers,
            events,
            limits=WorkerLimits(stall, stall, stall, stall, 4 * stall),
            restarts=2,
            on_fatal=self.fatal.append,
        )
        self._turn = 0

    async def move_to(self, version: int) -> None:
        for server in self.servers:
            server.client.relay[version] = ""
        await self.proxy.prepare(version)
        await self.proxy.suspend()
        await self.proxy.update(version)
        await self.proxy.resume()

    async def turn(self, trajectory: str = "", tokens: int = 5) -> tuple[int, ...]:
        """Play one turn; the versions of its tokens."""
        self._turn += 1
        name = trajectory or f"t{self._turn}"
        request = GenerationRequest(f"{name}/{self._turn}", name, 0, (1, 2, 3), Sampling(tokens), "test")
        return tuple(version for version, _ in (await self.proxy.generate(request)).versions)

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in map(json.loads, self.sink.lines) if event["kind"] == kind]


def play(number: int, scenario: Callable[[Fleet], Awaitable[None]], stall: float = 5.0) -> None:
    async def main() -> None:
        async with twins(number, versions=1) as servers:
            fleet = Fleet(servers, stall)
            try:
                await served_workers.start(fleet.workers)
                fleet.proxy.start()
                await fleet.move_to(0)
                await scenario(fleet)
            finally:
                await fleet.proxy.close()
                for worker in fleet.workers:
                    await worker.close()

    asyncio.run(main())


def test_a_server_that_disappears_costs_no_request_and_is_taken_back_with_the_weights_of_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(proxies, "_ASK_AGAIN", 0.05)

    async def scenario(fleet: Fleet) -> None:
        stays, goes = fleet.servers
        assert set(await asyncio.gather(*(fleet.turn() for _ in range(8)))) == {(0,)}
        turns = [asyncio.ensure_future(fleet.turn(f"long{index}", 200)) for index in range(6)]
        await until(lambda: bool(stays.client.requests) and bool(goes.client.requests))
        goes.client.paused = True  # else it may be done with them before it has gone
        await goes.stop()
        assert set(await asyncio.gather(*turns)) == {(0,)}
        await fleet.move_to(1)
        for _ in range(3):
            assert await fleet.turn() == (1,)
        await asyncio.sleep(0.3)  # several looks in vain
        (fault,) = [event for event in fleet.events("fault") if event["what"].startswith("worker")]
        assert fault["what"] == f"worker {goes.url}"
        assert fleet.events("recovered") == []
        await goes.start()
        goes.client.relay.update({0: "collected", 1: ""})
        await until(lambda: bool(fleet.events("recovered")))
        assert fleet.events("recovered")[0]["what"] == f"worker {goes.url}"
        assert goes.worker.cycle.version == 1, "before its first request"
        assert set(await asyncio.gather(*(fleet.turn() for _ in range(8)))) == {(1,)}
        assert goes.client.generated > 0
        await fleet.move_to(2)
        assert {server.worker.cycle.version for server in fleet.servers} == {2}
        assert not fleet.fatal

    play(2, scenario)


def test_the_only_server_may_be_started_anew_any_number_of_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proxies, "_ASK_AGAIN", 0.05)

    async def scenario(fleet: Fleet) -> None:
        (server,) = fleet.servers
        for life in range(4):
            turn = asyncio.ensure_future(fleet.turn("same", 100))
            await until(lambda: bool(server.client.requests))
            server.client.paused = True  # else it may be done before the server has gone
            await server.stop()
            await asyncio.sleep(0.1)
            await server.start()
            server.client.relay[0] = ""
            assert await turn == (0,)
            assert len(fleet.events("recovered")) == life + 1
        assert not fleet.fatal

    play(1, scenario)


def test_when_no_server_comes_back_the_run_ends_and_names_the_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proxies, "_ASK_AGAIN", 0.02)

    async def scenario(fleet: Fleet) -> None:
        turn = asyncio.ensure_future(fleet.turn())
        await turn
        turn = asyncio.ensure_future(fleet.turn())
        for server in fleet.servers:
            await server.stop()
        await until(lambda: bool(fleet.fatal))
        assert "no rollout worker left" in str(fleet.fatal[0])
        assert any(server.url in str(fleet.fatal[0]) for server in fleet.servers)
        assert "cannot be restarted from outside" in str(fleet.fatal[0])
        turn.cancel()

    play(2, scenario, stall=0.5)


def test_a_server_that_comes_back_with_another_token_stays_out_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(proxies, "_ASK_AGAIN", 0.02)

    async def scenario(fleet: Fleet) -> None:
        monkeypatch.setattr(vllm_twin, "TOKEN", "another-token-0123456789")
        goes = fleet.servers[1]
        await goes.stop()
        await goes.start()
        for _ in range(8):
            assert await fleet.turn() == (0,)
        await asyncio.sleep(0.2)
        assert goes.client.generated == 0
        assert not fleet.fatal

    play(2, scenario)


def test_users_of_a_server_wait_for_its_own_update_and_for_no_other_worker() -> None:
    async def scenario(fleet: Fleet) -> None:
        quick, slow = (server.client for server in fleet.servers)
        slow.hold.clear()  # it loads for long, as where the network or the metadata store is slow
        moving = asyncio.ensure_future(fleet.move_to(1))
        await until(lambda: "finish_weight_update" in slow.calls[-1:] and quick.loaded == 1)
        await asyncio.sleep(0.1)
        assert (quick.paused, slow.paused) == (False, True)
        before = quick.steps
        users = [
            output async for output in quick.generate({"tokens": [1]}, Sampling(3), "user", priority=0, session_id="u")
        ]
        assert len(users) == 1
        assert quick.steps > before
        slow.hold.set()
        await moving
        assert not slow.paused
        assert await fleet.turn() == (1,)

    play(2, scenario)


def test_users_of_a_server_do_not_wait_while_it_fetches_whatever_it_is_brought_up_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(proxies, "_ASK_AGAIN", 0.05)

    async def scenario(fleet: Fleet) -> None:
        (server,) = (server.client for server in fleet.servers)
        server.relay[1] = ""
        prepare, fetching = server._rl_prepare, asyncio.Event()

        async def slow(version: int) -> None:
            there = server.fetched["prepared"] == version
            await prepare(version)
            if not there:
                server.fetching = 1 << 30  # until it is told
                fetching.set()

        monkeypatch.setattr(server, "_rl_prepare", slow)
        for begin in (
            lambda: fleet.proxy.update(1),  # what was not prepared in time is fetched then
            lambda: fleet.proxy.distrust(0, "as when it comes back, or is taken anew"),
        ):
            await fleet.proxy.suspend()
            fetching.clear()
            server.fetched["prepared"] = None
            if (updating := begin()) is not None:
                updating = asyncio.ensure_future(updating)
            await fetching.wait()
            await asyncio.sleep(0.1)
            assert not server.paused
            server.fetching = 0
            if updating is not None:
                await updating
            await fleet.proxy.resume()
            assert await fleet.turn() == (1,)

    play(1, scenario)


def test_users_of_a_server_go_on_while_the_runs_metadata_store_is_away() -> None:
    async def scenario(fleet: Fleet) -> None:
        (server,) = (server.client for server in fleet.servers)
        await fleet.move_to(1)
        fleet.servers[0].client.relay[2] = "metadata_unreachable: nobody answers"
        await fleet.proxy.suspend()
        updating = asyncio.ensure_future(fleet.proxy.update(2))
        await until(lambda: "rl_prepared" in server.calls[-1:])
        await until(lambda: not server.paused)
        await asyncio.sleep(0.2)
        assert not server.paused
        server.relay[2] = ""
        await updating
        await fleet.proxy.resume()
        assert await fleet.turn() == (2,)

    play(1, scenario)


def test_at_the_end_the_servers_go_on_without_our_requests() -> None:
    async def scenario(fleet: Fleet) -> None:
        turns = [asyncio.ensure_future(fleet.turn(tokens=200)) for _ in range(6)]
        await until(lambda: all(server.client.requests for server in fleet.servers))
        await fleet.proxy.suspend()
        await fleet.proxy.close()
        for turn in turns:
            turn.cancel()
        for worker in fleet.workers:
            await worker.close()
        for server in fleet.servers:
            assert not server.client.requests
            assert not server.client.paused
            assert not server.client.dead

    play(2, scenario)


def test_a_server_that_another_run_uses_ends_the_start_with_its_url_and_the_way_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("orchestrator.borrowing.http_worker.OTHERS_SECONDS", 0.0)

    async def scenario(fleet: Fleet) -> None:
        (server,) = fleet.servers
        await fleet.proxy.suspend()
        await fleet.workers[0].add([GenerationRequest("a", "a", 0, (1,), Sampling(200), "test")])
        other = HttpWorker(server.url, TOKEN, server.url, relay=relay("other"))
        with pytest.raises(RunError, match="job fleet has this GPU") as caught:
            await served_workers.start([other])
        assert server.url in str(caught.value)
        assert "rollout.borrowed.most" in str(caught.value)
        assert fleet.workers[0]._lease is not None
        await fleet.workers[0]._lease.give_back()  # as that of a run of before leases
        server.client.paused = True
        with pytest.raises(RunError, match="job fleet") as caught:
            await served_workers.start([other])
        assert server.url in str(caught.value)
        assert '{"all": true}' in str(caught.value)
        await other.close()

    play(1, scenario)


def test_every_example_of_the_documentation_is_a_valid_config(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "vllm.md").read_text()
    block = next(part.split("```")[0] for part in text.split("```toml\n")[1:] if "served" in part)
    (tmp_path / "run.toml").write_text(block)
    assert load_config(tmp_path / "run.toml").rollout.served
