"""Rollout engines that are deactivated and activated: who asks, when it may be, and what is left in memory meanwhile.
The front end, its endpoints and the run's client on a twin of vLLM's engine client; a real vLLM engine with a real relay."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")

from orchestrator.api import CommandError, ConfigError, GenerationRequest, RetryableError, RunError, Sampling
from orchestrator.borrowing import served_workers
from orchestrator.borrowing.http_worker import HttpWorker
from orchestrator.config import parse_config
from orchestrator.events import EventLog, MemorySink
from orchestrator.transfer import RelayEndpoint
from tests.support.served_twins import until
from tests.support.vllm_twin import ENDPOINT, TOKEN, TwinServer
from vllm_rlplugin.kvpool.engine.pool_engine import pool_path
from vllm_rlplugin.options import FrontendOptions

ROOT = Path(__file__).parents[2]


def play(scenario: Callable[[TwinServer, HttpWorker], Awaitable[None]], **options: Any) -> None:
    async def main() -> None:
        server = await TwinServer().start(**options)
        worker = HttpWorker(server.url, TOKEN, "twin")
        try:
            async with asyncio.timeout(60):
                await scenario(server, worker)
        finally:
            await worker.close()
            await server.stop()

    asyncio.run(main())


def turn(name: str, tokens: int = 4) -> GenerationRequest:
    return GenerationRequest(name, name, 0, (1, 2, 3), Sampling(tokens), "test")


async def finished(worker: HttpWorker, name: str) -> str:
    found = {item.request_id: item for item in await worker.completions()}
    return found[name].finish_reason


# -- who asks, and when it may be --------------------------------------------------------------------------------------


def test_a_command_that_needs_the_engine_activates_it_first_and_looking_at_it_does_not() -> None:
    async def scenario(server: TwinServer, worker: HttpWorker) -> None:
        activation = server.control.activation
        uses: list[Callable[[], Awaitable[object]]] = [
            lambda: worker.add([turn("a")]),
            worker.suspend,
            lambda: worker.prepare(1),
            worker.resume,
        ]
        for use in uses:
            if server.worker.busy:
                assert await finished(worker, "a") == "length"
            if server.worker.cycle.suspended:
                await worker.resume()
            server.client.relay[1] = ""
            assert (await activation.deactivate())["state"] == "inactive"
            await worker.stats()
            assert (await worker.status())["activation"]["state"] == "inactive"
            assert server.client.asleep
            await use()
            assert activation.state == "active"
            assert not server.client.asleep
        assert server.client.calls.count("rl_weights_back") == 4

    play(scenario)


def test_a_users_request_that_waits_activates_it_too() -> None:
    async def scenario(server: TwinServer, _: HttpWorker) -> None:
        await server.control.activation.deactivate()
        answers = server.client.generate({"tokens": (1,)}, Sampling(3), "cmpl-1", priority=0, session_id="")
        (answer,) = [item async for item in answers]
        assert len(answer.outputs[0].token_ids) == 3
        assert server.control.activation.state == "active"

    play(scenario)


def test_without_any_use_it_deactivates_itself_and_not_while_it_works() -> None:
    async def scenario(server: TwinServer, worker: HttpWorker) -> None:
        activation = server.control.activation
        server.client.paused = True  # it takes long
        await worker.add([turn("long", 200)])
        await asyncio.sleep(0.5)
        assert activation.state == "active"
        server.client.paused = False
        assert await finished(worker, "long") == "length"
        await until(lambda: activation.state == "inactive")
        await worker.suspend()  # it is used, and then paused for longer
        await asyncio.sleep(0.6)
        assert activation.state == "active"
        await worker.resume()
        await until(lambda: activation.state == "inactive")

    play(scenario, deactivate_after=0.3)


def test_an_engine_with_requests_or_paused_or_of_another_kind_is_not_deactivated() -> None:
    async def scenario(server: TwinServer, worker: HttpWorker) -> None:
        activation = server.control.activation
        await worker.add([turn("busy", 500)])
        with pytest.raises(CommandError, match="unfinished requests"):
            await activation.deactivate()
        await worker.abort(["busy"])
        await worker.completions()
        await worker.suspend()
        with pytest.raises(CommandError, match="suspended"):
            await activation.deactivate()
        await worker.resume()
        activation._rollout = False
        with pytest.raises(CommandError, match="--rl-kv-pool-role rollout"):
            await activation.deactivate()
        assert "rl_weights_away" not in server.client.calls

    play(scenario)


def test_without_pages_it_stays_inactive_and_says_so_until_there_are_some() -> None:
    async def scenario(server: TwinServer, worker: HttpWorker) -> None:
        await server.control.activation.deactivate()
        server.client.pages = False
        with pytest.raises(RetryableError, match="no pages"):
            await worker.add([turn("a")])
        assert server.control.activation.state == "inactive"
        assert server.client.asleep
        server.client.pages = True
        await worker.add([turn("a")])
        assert await finished(worker, "a") == "length"

    play(scenario)


@pytest.mark.parametrize(("kept", "back"), [(False, ""), (True, "the weights did not come back as they were")])
def test_weights_that_were_dropped_or_damaged_are_used_by_nobody_until_an_update(kept: bool, back: str) -> None:
    async def scenario(server: TwinServer, worker: HttpWorker) -> None:
        activation = server.control.activation
        await activation.deactivate(kept)
        server.client.back = back
        if back:
            with pytest.raises(CommandError, match="did not come back"):
                await activation.activate()
        await worker.suspend()
        with pytest.raises(CommandError) as caught:
            await worker.resume()
        assert caught.value.code == "weights_unusable"
        server.client.relay[1] = ""
        await worker.update(1)
        await worker.resume()
        await worker.add([turn("a")])
        assert await finished(worker, "a") == "length"

    play(scenario)


def test_a_deactivation_that_fails_half_way_leaves_a_running_engine() -> None:
    async def scenario(server: TwinServer, worker: HttpWorker) -> None:
        async def fail(kept: bool) -> dict[str, Any]:
            raise OSError(28, "No space left on device")

        server.client._rl_weights_away = fail  # type: ignore[method-assign]
        with pytest.raises(RetryableError, match="No space left"):
            await server.control.activation.deactivate()
        assert server.control.activation.state == "active"
        await worker.add([turn("a")])
        assert await finished(worker, "a") == "length"

    play(scenario)


@pytest.mark.parametrize("value", [-1.0, float("inf"), float("nan")])
def test_a_time_that_is_none_is_refused(value: float) -> None:
    with pytest.raises(ConfigError, match="--rl-deactivate-after"):
        FrontendOptions(deactivate_after=value)


# -- a run -------------------------------------------------------------------------------------------------------------


def test_a_run_activates_its_servers_and_leaves_them_inactive_at_the_end_if_told_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RL_COSERVE_TOKEN", TOKEN)

    async def scenario(server: TwinServer, _: HttpWorker) -> None:
        activation, sink = server.control.activation, MemorySink()
        rollout = {"workers": 0, "served": [server.url], "served_deactivate": True}
        config = parse_config({"rollout": rollout})
        endpoint = RelayEndpoint.from_dict({**ENDPOINT, "job": "activation"})
        for life in range(2):
            await activation.deactivate()
            (worker,) = served_workers.workers(config, endpoint)
            await served_workers.start([worker], EventLog(sink, asyncio.get_running_loop().time))
            assert activation.status()["state"] == "active"
            (event,) = [row for row in map(json.loads, sink.lines[life:]) if row["kind"] == "activated"]
            assert (event["worker"], event["weights_bytes"]) == (server.url, 1000)
            assert event["activation_seconds"] >= 0
            await worker.add([turn("unfinished", 500)])
            await worker.close()
            assert activation.status()["state"] == "inactive"
            assert not server.worker.busy
        await activation.deactivate()
        server.client.pages = False
        (worker,) = served_workers.workers(config, endpoint)
        with pytest.raises(RunError, match="no pages"):
            await served_workers.start([worker])
        await worker.close()

    play(scenario)


# -- a real engine -----------------------------------------------------------------------------------------------------

_ENGINE = """
import json, os, sys
from pathlib import Path
folder, name = Path(sys.argv[1]), sys.argv[2]
from orchestrator.transfer import Publisher, RelayEndpoint
from vllm_rlplugin.worker.inprocess_engine import EngineOptions, InprocessEngine
from scripts.bench.probes.vllm.recompute_probe import publish, write_tiny_qwen3
from orchestrator.api import GenerationRequest, Sampling
from vllm_rlplugin.sleep import host_offload as away
import time

first, second = (write_tiny_qwen3(folder / f"model{seed}", seed) for seed in (1, 2))
endpoint = RelayEndpoint(job="activation", kind="fsspec", master=f"file://{folder / 'relay'}",
                         metadata=str(folder / "metadata.sqlite"))
publisher = Publisher(endpoint)
publisher.reset()
for version, tensors in ((1, second), (2, first)):
    publish(publisher, version, tensors)
plugin = {"kv_pool": name, "kv_pool_mib": 4, "kv_pool_page_kib": 32, "kv_pool_budget_mib": 4}
engine = InprocessEngine(EngineOptions(model=str(folder / "model1"), kv_cache_mb=2, relay=endpoint.to_dict(), plugin=plugin),
                time.monotonic)
core = engine._core

def answers(tag):
    found = []
    for number in range(3):
        prompt = tuple((7 * at + 13 * number) % 60 for at in range(40 + 20 * number))
        engine.add(GenerationRequest(f"{tag}{number}", "t", 0, prompt, Sampling(24, temperature=0.0), "test"),
                   time.monotonic())
        while engine.has_work:
            found += [[list(done.token_ids), list(done.logprobs)] for done in engine.step(time.monotonic())]
    return found

def memory():
    rows = (row.split() for row in Path("/proc/self/status").read_text().splitlines() if row.startswith("Rss"))
    return {kind.rstrip(":"): int(size) for kind, size, _ in rows}

def asleep(kept):
    engine.pause(time.monotonic())
    before = {"memory": memory(), "pages": core.rl_coserve("page_pool", {})["pages"]}
    refused = core.rl_coserve("deactivate", {})
    (report,) = engine._rpc("rl_weights_away", (kept,))
    inner = [item.detach().flatten()[1024:-1024] for item in model.parameters() if item.nbytes >= 16384]  # without their edges
    weights = [int(part.abs().max() > 0) for part in inner]
    return before | {"refused": refused.get("refused", ""), "report": report, "left": weights, "after": memory(),
                     "pages_after": core.rl_coserve("page_pool", {})["pages"]}

def awake():
    found = core.rl_coserve("activate", {})
    (report,) = engine._rpc("rl_weights_back")
    return {"found": found, "report": report, "verified": engine._rpc("rl_verify")[0]["state"]}

model = core.model_executor.driver_worker.worker.model_runner.get_model()
out = {"first": answers("a")}
out["slept"] = asleep(True)
out["woke"] = awake()
engine.resume()
out["again"] = answers("b")
engine.pause(time.monotonic()); engine.update(1); engine.resume()
out["second"] = answers("c")
out["slept_updated"] = asleep(True)
out["woke_updated"] = awake()
engine.resume()
out["second_again"] = answers("d")
out["slept_dropped"] = asleep(False)
out["woke_dropped"] = awake()
engine.update(2); engine.resume()
out["third"] = answers("e")
engine.pause(time.monotonic())
core.rl_coserve("deactivate", {})
engine._rpc("rl_weights_away", (True,))
kept = core.model_executor.driver_worker.worker.rl_away
kept._file.seek(4096), kept._file.write(b"x")  # what came back would be other weights
out["damaged"] = awake()
print("answer " + json.dumps(out))
"""


@pytest.mark.engine
@pytest.mark.timeout(300)
def test_a_deactivated_engine_has_no_pages_and_no_weights_and_comes_back_bit_for_bit(tmp_path: Path) -> None:
    """Tokens and log-probs; with the weights it was started with and with those of an update, kept in a file or taken from the
    relay; a file that was changed is noticed by the digests of the weights."""
    name = f"test-activation-{os.getpid()}"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "VLLM_LOGGING_LEVEL": "ERROR"}
    try:
        done = subprocess.run(
            [sys.executable, "-c", _ENGINE, str(tmp_path), name],
            capture_output=True, text=True, env=environment, timeout=280, check=False,
        )  # fmt: skip
    finally:
        pool_path(name).unlink(missing_ok=True)
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = [row for row in done.stdout.splitlines() if row.startswith("answer ")]
    found = json.loads(line.removeprefix("answer "))
    assert found["again"] == found["first"]
    assert found["second"] != found["first"]
    assert found["second_again"] == found["second"]
    assert found["third"] == found["first"], "version 2 is what it was started with"
    for slept in ("slept", "slept_updated", "slept_dropped"):
        row = found[slept]
        assert row["refused"] == ""
        assert row["pages"] > 0
        assert row["pages_after"] == 0
        assert row["after"]["RssShmem"] < row["memory"]["RssShmem"]
        assert row["after"]["RssAnon"] <= row["memory"]["RssAnon"] - row["report"]["bytes"] // 1024
        assert row["report"]["left"] < row["report"]["bytes"] / 4
        assert row["left"]
        assert not any(row["left"]), "what is read there now is zeros"
    for woke in ("woke", "woke_updated"):
        assert found[woke]["report"]["error"] == ""
        assert found[woke]["verified"] == "intact"
    assert found["woke_dropped"]["verified"] == "unusable"
    assert "not what they were" in found["damaged"]["report"]["error"]
    assert found["damaged"]["verified"] == "unusable"
