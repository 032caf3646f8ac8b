"""The HTTP carrier on one real ``vllm serve --plugin rl-coserve`` with a real relay: the whole life cycle, from outside."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

requests = pytest.importorskip("requests")

from orchestrator.api import (  # noqa: E402
    CommandError,
    Completion,
    ConfigError,
    GenerationRequest,
    RetryableError,
    Sampling,
)
from orchestrator.api import http as wire  # noqa: E402
from orchestrator.borrowing.http_worker import HttpWorker  # noqa: E402
from orchestrator.runtime.mooncake_master import MooncakeMaster  # noqa: E402
from orchestrator.transfer import Publisher, RelayEndpoint  # noqa: E402
from scripts.bench.probes.vllm.recompute_probe import VOCABULARY, publish, write_tiny_qwen3  # noqa: E402
from tests.support.worker_contract import CHECKS, Rig, well_formed  # noqa: E402

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

DOCUMENT = Path(__file__).parents[2] / "docs" / "vllm.md"
TOKEN = "the-token-of-these-tests-0123456789"
SLOTS = 8
MODEL_LEN = 256


@dataclass
class Served:
    """A running server, and what it was started with."""

    process: subprocess.Popen[bytes]
    url: str
    log: Path
    model: str
    publisher: Publisher
    weights: list[dict[str, Any]]  # of the model as it was started, and others
    version: int = 0
    runner: Any = None

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {TOKEN}"}

    def worker(self) -> HttpWorker:
        return HttpWorker(self.url, TOKEN, "served")

    def publish(self, which: int) -> int:
        """Publish one of the weights as the next version."""
        self.version += 1
        publish(self.publisher, self.version, self.weights[which])
        return self.version

    def call(self, method: str, path: str, **options: Any) -> Any:
        """One call with the token, as a client of stock vLLM makes it: (status, answer)."""
        response = requests.request(method, self.url + path, headers=self.headers, timeout=120, **options)
        return response.status_code, response.json()

    def run(self, scenario: Callable[[HttpWorker], Awaitable[None]]) -> None:
        async def main() -> None:
            worker = self.worker()
            try:
                await scenario(worker)
            finally:
                await worker.close()

        self.runner.run(main())


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, vllm_serve: Any) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("served")
    weights = [write_tiny_qwen3(folder / f"model{seed}", seed) for seed in (1, 2)]
    with asyncio.Runner() as runner:
        master = MooncakeMaster(log=folder / "master.log")
        runner.run(master.start())
        endpoint = RelayEndpoint(
            job=f"http-{os.getpid()}",
            master=master.address,
            metadata=str(folder / "metadata.sqlite"),
            segment_bytes=16 << 20,
            bucket_bytes=64 << 10,
        )
        publisher = Publisher(endpoint)
        publisher.reset()
        (folder / "relay.json").write_text(json.dumps(endpoint.to_dict()))
        options = ["--rl-relay", str(folder / "relay.json"), "--rl-max-body-mb", "1", "--rl-max-wait", "20"]
        options += ["--max-model-len", str(MODEL_LEN), "--max-num-seqs", str(SLOTS)]
        options += ["--served-model-name", "tiny", "--api-key", "key-of-the-serving-users"]
        try:
            with vllm_serve(folder, folder / "model1", TOKEN, *options) as server:
                model = str(folder / "model1")
                yield Served(server.process, server.url, server.log, model, publisher, weights, runner=runner)
        finally:
            publisher.close()
            runner.run(master.stop())


def greedy(name: str, tokens: tuple[int, ...], number: int, **options: Any) -> GenerationRequest:
    return GenerationRequest(name, name, 0, tokens, Sampling(number, temperature=0.0), "test", **options)


async def collected(worker: HttpWorker, number: int) -> dict[str, Completion]:
    found: dict[str, Completion] = {}
    async with asyncio.timeout(120):
        while len(found) < number:
            for completion in await worker.completions():
                assert completion.request_id not in found
                found[completion.request_id] = completion
    well_formed(found.values())
    return found


async def answers(worker: HttpWorker, label: str) -> list[tuple[Any, ...]]:
    """What the model writes after fixed prompts: tokens and log-probs, to be compared bit for bit."""
    rng = random.Random(5)
    prompts = [tuple(rng.randrange(VOCABULARY) for _ in range(rng.randint(5, 90))) for _ in range(SLOTS)]
    batch = [greedy(f"{label}-{index}", prompt, 24) for index, prompt in enumerate(prompts)]
    for request in batch:  # one at a time: a batch of another size may round otherwise
        await worker.add([request])
    found = await collected(worker, len(batch))
    return [(found[request.request_id].token_ids, found[request.request_id].logprobs) for request in batch]


async def updated(worker: HttpWorker, number: int) -> None:
    await worker.suspend()
    await worker.update(number)
    await worker.resume()


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_worker_contract_holds_on_a_served_engine(served: Served, check: Callable[[Rig], Awaitable[None]]) -> None:
    async def scenario(worker: HttpWorker) -> None:
        async def publish_next() -> int:
            return served.publish(served.version % 2)

        await check(Rig(worker, publish_next, long_tokens=200, limit=120.0))

    served.run(scenario)


def test_an_update_changes_the_answers_and_updating_back_restores_them_bit_for_bit(served: Served) -> None:
    """So no KV of other weights is used for a prompt that was seen before."""

    async def scenario(worker: HttpWorker) -> None:
        await updated(worker, served.publish(0))
        before = await answers(worker, "before")
        await worker.prepare(number := served.publish(1))
        await updated(worker, number)
        between = await answers(worker, "between")
        await updated(worker, served.publish(0))
        assert await answers(worker, "after") == before
        assert all(old != new for old, new in zip(before, between, strict=True))

    served.run(scenario)


def test_an_in_flight_request_goes_on_as_the_new_weights_would_and_every_token_has_its_version(served: Served) -> None:
    async def scenario(worker: HttpWorker) -> None:
        await updated(worker, old := served.publish(0))
        new = served.publish(1)
        await worker.prepare(new)
        batch = [greedy(f"flight{index}", tuple(range(index, index + 20)), 160) for index in range(4)]
        await worker.add(batch)
        while (await worker.stats()).running < 4:
            await asyncio.sleep(0)
        await updated(worker, new)
        done = await collected(worker, 4)
        spanning = 0
        for request in batch:
            found = done[request.request_id]
            assert found.versions[-1][0] == new, found.versions
            head = found.versions[0][1] if found.versions[0][0] == old else 0
            spanning += head > 0
            tail = found.token_ids[head:]
            await worker.add(
                [greedy(f"fresh-{request.request_id}", request.token_ids + found.token_ids[:head], len(tail))]
            )
            fresh = (await collected(worker, 1)).popitem()[1]
            assert fresh.token_ids == tail
            assert fresh.versions == ((new, len(tail)),)
        assert spanning > 0, "no request was in flight when the update came"

    served.run(scenario)


def test_a_request_of_better_priority_takes_the_place_of_a_running_one(served: Served) -> None:
    async def scenario(worker: HttpWorker) -> None:
        before = await worker.stats()
        low = [greedy(f"low{index}", (index,) * 10, 200, priority=10) for index in range(SLOTS + 4)]
        await worker.add(low)
        while (await worker.stats()).running < SLOTS:
            await asyncio.sleep(0)
        await worker.add([greedy("high", (1, 2, 3), 4, priority=-1)])
        order = list(await collected(worker, len(low) + 1))
        assert order[0] == "high"
        assert (await worker.stats()).outranked > before.outranked

    served.run(scenario)


def test_an_abort_by_id_trajectory_or_group_keeps_the_tokens_and_is_idempotent(served: Served) -> None:
    async def scenario(worker: HttpWorker) -> None:
        batch = [greedy(f"abort{index}", (index,) * 8, 220, group_id="abort-group") for index in range(5)]
        await worker.add(batch)
        while (await worker.stats()).running < len(batch):
            await asyncio.sleep(0)
        await worker.abort(["abort0"])
        await worker.abort(["abort0"])
        await worker.abort(trajectories=["abort1"])
        await worker.abort(groups=["abort-group"])
        stats = await worker.stats()
        assert (stats.running, stats.waiting, stats.kv_used) == (0, 0, 0)
        done = await collected(worker, len(batch))
        assert {item.finish_reason for item in done.values()} <= {"abort", "length"}
        assert done["abort0"].finish_reason == "abort"
        assert any(item.token_ids for item in done.values())

    served.run(scenario)


def test_every_refusal_has_the_status_that_vllm_clients_expect(served: Served) -> None:
    request = {"request_id": "long", "trajectory_id": "t", "token_ids": [1] * MODEL_LEN, "sampling": {"max_tokens": 1}}
    expected: list[tuple[str, Any, int, str]] = [
        (wire.ADD, {"requests": [request]}, 400, "invalid_request"),
        (wire.ADD, {"requests": [{**request, "token_ids": [VOCABULARY]}]}, 400, "invalid_request"),
        (wire.ADD, {"requests": [], "unknown": 1}, 400, "invalid_request"),
        (wire.ABORT, {"request_ids": ["never added"]}, 404, "unknown_request"),
        (wire.UPDATE, {"version": 10_000}, 409, "not_suspended"),
        ("/start_weight_update", None, 409, "not_suspended"),
        (wire.PREPARE, {"version": 10_000}, 503, "retryable"),
    ]
    for path, body, status, kind in expected:
        found, answer = served.call("POST", path, json=body)
        assert (found, answer["error"]["type"], answer["error"]["code"]) == (status, kind, status), (path, answer)
        assert set(answer["error"]) == {"message", "type", "param", "code"}


def test_control_endpoints_need_our_token_and_the_api_key_guards_the_serving_ones(served: Served) -> None:
    paths = requests.get(f"{served.url}/openapi.json", timeout=60).json()["paths"]
    ours = [path for path in paths if path.startswith("/rl/") or path in ("/pause", "/resume", "/abort_requests")]
    assert len(ours) >= 13
    for path in ours:
        for headers in ({}, {"Authorization": "Bearer key-of-the-serving-users"}):
            method = next(iter(paths[path]))
            assert requests.request(method, served.url + path, headers=headers, timeout=60).status_code == 401, path
    assert "/collective_rpc" not in paths
    body = {"model": "tiny", "prompt": [1, 2, 3], "max_tokens": 3}
    assert (
        requests.post(f"{served.url}/v1/completions", json=body, headers=served.headers, timeout=60).status_code == 401
    )
    assert TOKEN not in served.log.read_text()

    async def scenario(_: HttpWorker) -> None:
        stranger = HttpWorker(served.url, "another-token-0123456789")
        with pytest.raises(ConfigError, match="token"):
            await stranger.stats()
        await stranger.close()

    served.run(scenario)


def test_the_token_is_another_one_when_its_file_is_replaced_and_nothing_is_restarted(served: Served) -> None:
    file, new = served.log.parent / "token", "another-token-0123456789"

    def status(token: str) -> int:
        headers = {"Authorization": f"Bearer {token}"}
        return requests.get(served.url + wire.STATUS, headers=headers, timeout=60).status_code

    assert [status(token) for token in (TOKEN, new)] == [200, 401]
    for token in (new, TOKEN):
        file.with_name("next").write_text(token)
        file.with_name("next").replace(file)
        assert [status(shown) for shown in (TOKEN, new, "of-nobody-0123456789")] == [200, 200, 401]


def test_a_body_over_the_limit_is_a_413(served: Served) -> None:
    status, answer = served.call("POST", wire.ADD, data=b" " * ((1 << 20) + 1))
    assert (status, answer["error"]["type"]) == (413, "body_too_large")

    async def scenario(worker: HttpWorker) -> None:
        with pytest.raises(CommandError, match="--rl-max-body-mb"):
            await worker.add([greedy("big", (10,) * 500_000, 1)])

    served.run(scenario)


def test_the_verbs_of_stock_vllm_update_the_weights(served: Served) -> None:
    """As in vLLM's own examples, with a token added."""
    number = served.publish(1)
    assert served.call("GET", "/get_world_size") == (200, {"world_size": 1})
    assert served.call("POST", "/pause", params={"mode": "keep"}) == (200, {"status": "paused"})
    assert served.call("GET", "/is_paused") == (200, {"is_paused": True})
    for _ in range(2):  # the first is of a client that died then
        assert served.call("POST", "/start_weight_update") == (200, {"message": "Weight update started"})
    body = {"update_info": {"version": number}}
    assert served.call("POST", "/update_weights", json=body) == (200, {"message": "Weights updated"})
    body = {"weight_version": f"step-{number}"}
    assert served.call("POST", "/finish_weight_update", json=body) == (200, {"message": "Weight update finished"})
    assert served.call("POST", "/resume") == (200, {"status": "resumed"})
    assert served.call("GET", "/weight_info") == (200, {"weight_version": f"step-{number}"})
    found = served.call("POST", "/weight_checker", json={"action": "checksum"})[1]["checksums"]
    name = next(name for name in found if "q_proj" in name or "qkv_proj" in name)
    for baseline, differ in ((found, []), ({**found, name: "other"}, [name])):
        body = {"action": "compare", "baseline": baseline}
        assert served.call("POST", "/weight_checker", json=body) == (200, {"match": not differ, "mismatches": differ})

    async def scenario(worker: HttpWorker) -> None:
        await worker.add([greedy("stock", (1, 2), 5)])
        assert (await collected(worker, 1))["stock"].versions == ((number, 5),)

    served.run(scenario)


def test_serving_users_keep_the_server_and_are_paused_with_it(served: Served) -> None:
    async def scenario(worker: HttpWorker) -> None:
        body = {"model": "tiny", "prompt": [1, 2, 3], "max_tokens": 8, "return_token_ids": True, "ignore_eos": True}
        key = {"Authorization": "Bearer key-of-the-serving-users"}

        def complete() -> list[int]:
            answer = requests.post(f"{served.url}/v1/completions", json=body, headers=key, timeout=120)
            assert answer.status_code == 200, answer.text
            tokens: list[int] = answer.json()["choices"][0]["token_ids"]
            return tokens

        await worker.add([greedy(f"beside{index}", (index,), 100) for index in range(4)])
        assert len(await asyncio.to_thread(complete)) == 8
        await worker.suspend()
        held = asyncio.ensure_future(asyncio.to_thread(complete))
        while (await worker.stats()).waiting < 1:
            await asyncio.sleep(0.01)
        assert not held.done()
        await worker.resume()
        assert len(await held) == 8
        await collected(worker, 4)

    served.run(scenario)


def test_metrics_stand_beside_those_of_vllm(served: Served) -> None:
    async def scenario(worker: HttpWorker) -> None:
        stats = await worker.stats()
        while True:  # they are refreshed once a second
            text = requests.get(f"{served.url}/metrics", timeout=60).text
            found = re.search(r"^rl_coserve:generated_tokens_total (\S+)$", text, re.MULTILINE)
            assert found is not None
            if float(found[1]) == stats.generated:
                break
            await asyncio.sleep(0.1)
        for name in ("requests_running", "requests_held", "kv_blocks_free", "weight_version", "suspended"):
            assert re.search(rf"^rl_coserve:{name} \d", text, re.MULTILINE), name
        for name in ("time_to_first_token_seconds", "time_per_output_token_seconds"):
            count = re.search(rf"^rl_coserve:{name}_count (\S+)$", text, re.MULTILINE)
            assert count is not None
            assert float(count[1]) > 0, name
        assert 'rl_coserve:weight_update_seconds_count{phase="load"}' in text
        assert "\nvllm:num_requests_running" in text

    served.run(scenario)


def test_the_status_says_what_is_live(served: Served) -> None:
    async def scenario(worker: HttpWorker) -> None:
        status = await worker.status()
        assert status["protocol"] == wire.PROTOCOL
        assert status["logprobs_mode"] == "processed_logprobs"
        assert status["limits"]["max_num_seqs"] == SLOTS
        assert (status["options"]["max_wait"], status["options"]["lookahead"]) == (20.0, 16)
        assert status["relay"] is True
        assert status["hooks"]["signature_mismatches"] == []
        assert (await worker.stats()).version == status["weight_version"]

    served.run(scenario)


def test_the_client_of_the_documentation_runs_as_shown(served: Served, tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    block = next(block for block in blocks if "import requests" in block)
    assert len([line for line in block.splitlines() if line.strip()]) <= 12
    environment = {**os.environ, "RL_COSERVE_URL": served.url, "RL_COSERVE_TOKEN": TOKEN}
    done = subprocess.run([sys.executable, "-c", block], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"ten-lines/0 length 8 \[\[\d+, 8\]\]\n", done.stdout), done.stdout


def test_when_the_engine_is_killed_every_call_says_so_and_the_server_ends(served: Served) -> None:
    """The last test: there is no server afterwards."""
    found = subprocess.run(
        ["pgrep", "-P", str(served.process.pid), "-f", "EngineCore"], capture_output=True, text=True, check=True
    )
    (engine,) = map(int, found.stdout.split())

    async def scenario(worker: HttpWorker) -> None:
        async def to_the_end() -> None:
            while True:
                await worker.completions()

        await worker.add([greedy(f"killed{index}", (index,), 250) for index in range(20)])
        waiting = asyncio.ensure_future(to_the_end())
        await asyncio.sleep(0)
        os.kill(engine, signal.SIGKILL)
        async with asyncio.timeout(120):
            with pytest.raises(RetryableError):
                await waiting
            for call in (worker.stats(), worker.suspend(), worker.add([greedy("late", (1,), 1)])):
                with pytest.raises(RetryableError):
                    await call
            await asyncio.to_thread(served.process.wait)
            with pytest.raises(RetryableError, match="cannot be restarted from outside"):
                await worker.restart()

    served.run(scenario)
