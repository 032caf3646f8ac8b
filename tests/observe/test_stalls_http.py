"""Nobody who is served waits for our endpoints: what holds up the loop of a real ``vllm serve`` while all are used."""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest

from orchestrator.api import Completion, GenerationRequest, KvMove, Sampling
from orchestrator.borrowing.http_worker import HttpWorker
from orchestrator.runtime.mooncake_master import MooncakeMaster
from orchestrator.transfer import Publisher, RelayEndpoint
from scripts.bench.probes.vllm.recompute_probe import VOCABULARY, publish, write_tiny_qwen3

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(600)]

TOKEN = "the-token-of-these-tests-0123456789"
REQUESTS, PROMPT, ANSWER = 400, 150, 120
LIMIT = 0.02  # seconds


@dataclass
class Watched:
    """The server, and what its weights come from."""

    url: str
    publisher: Publisher
    endpoint: RelayEndpoint
    weights: list[dict[str, Any]]
    runner: asyncio.Runner


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory, vllm_serve: Any) -> Iterator[Watched]:
    folder = tmp_path_factory.mktemp("watched")
    weights = [write_tiny_qwen3(folder / f"model{seed}", seed) for seed in (1, 2)]
    with asyncio.Runner() as runner:
        master = MooncakeMaster(log=folder / "master.log")
        runner.run(master.start())
        endpoint = RelayEndpoint(
            job=f"stalls-{os.getpid()}",
            master=master.address,
            metadata=str(folder / "metadata.sqlite"),
            segment_bytes=16 << 20,
            bucket_bytes=64 << 10,
        )
        publisher = Publisher(endpoint)
        publisher.reset()
        (folder / "relay.json").write_text(json.dumps(endpoint.to_dict()))
        options = ["--rl-relay", str(folder / "relay.json"), "--max-model-len", "512", "--max-num-seqs", "256"]
        options += ["--served-model-name", "tiny", "--rl-kv-transfer"]
        try:
            with vllm_serve(folder, folder / "model1", TOKEN, *options, watched=True) as server:
                yield Watched(server.url, publisher, endpoint, weights, runner)
        finally:
            publisher.close()
            runner.run(master.stop())


def requests_of(label: str, number: int, answer: int = ANSWER) -> list[GenerationRequest]:
    rng = random.Random(label)
    prompts = [tuple(rng.randrange(VOCABULARY) for _ in range(PROMPT)) for _ in range(number)]
    sampling = Sampling(answer, temperature=0.0)
    return [
        GenerationRequest(f"{label}{i}", f"{label}-t{i}", 0, prompt, sampling, "test", group_id=f"{label}-g{i % 8}")
        for i, prompt in enumerate(prompts)
    ]


async def collected(worker: HttpWorker, number: int) -> list[Completion]:
    found: list[Completion] = []
    async with asyncio.timeout(200):
        while len(found) < number:
            found += await worker.completions()
    return found


async def stalls(server: Watched) -> list[dict[str, Any]]:
    """Since the last call."""
    async with aiohttp.ClientSession() as session, session.get(server.url + "/stalls") as response:
        found: list[dict[str, Any]] = await response.json()
        return found


@asynccontextmanager
async def ours(server: Watched) -> AsyncIterator[HttpWorker]:
    worker = HttpWorker(server.url, TOKEN, "watched")
    try:
        yield worker
    finally:
        await worker.close()


async def streamed(server: Watched) -> int:
    """A user of the server, who gets tokens one by one; how many came."""
    body = {"model": "tiny", "prompt": [1, 2, 3], "max_tokens": 200, "stream": True, "return_token_ids": True}
    body["ignore_eos"] = True
    async with aiohttp.ClientSession() as session, session.post(server.url + "/v1/completions", json=body) as response:
        assert response.status == 200, await response.text()
        chunks = [json.loads(line[6:]) async for line in response.content if line.startswith(b"data: {")]
        return sum(len(choice.get("token_ids") or ()) for chunk in chunks for choice in chunk.get("choices", ()))


async def get(server: Watched, path: str) -> None:
    headers = {"Authorization": f"Bearer {TOKEN}"}
    async with aiohttp.ClientSession(headers=headers) as session, session.get(server.url + path) as response:
        assert response.status == 200
        await response.read()


Step = Callable[[Watched, HttpWorker], Awaitable[None]]


async def add(server: Watched, worker: HttpWorker) -> None:
    await worker.add(requests_of("a", REQUESTS))


async def status(server: Watched, worker: HttpWorker) -> None:
    for _ in range(10):
        await worker.status()


async def stats(server: Watched, worker: HttpWorker) -> None:
    for _ in range(20):
        await worker.stats()


async def metrics(server: Watched, worker: HttpWorker) -> None:
    for _ in range(10):
        await get(server, "/metrics")


async def reprioritize(server: Watched, worker: HttpWorker) -> None:
    for number in range(5):
        await worker.prioritize({f"a-t{index}": (index + number) % 7 for index in range(REQUESTS)})


async def update(server: Watched, worker: HttpWorker) -> None:
    publish(server.publisher, 1, server.weights[1])
    await worker.prepare(1)
    await worker.suspend()
    await worker.update(1)
    await worker.resume()


async def kv(server: Watched, worker: HttpWorker) -> None:
    place = await worker.kv_place()
    for request in requests_of("k", 8):
        moved = await worker.fetch_kv(KvMove("k", request.token_ids, place, 10.0))
        assert moved.why == "" or moved.tokens == 0, moved


async def abort(server: Watched, worker: HttpWorker) -> None:
    await worker.abort([f"a{index}" for index in range(REQUESTS // 2)])


async def drain(server: Watched, worker: HttpWorker) -> None:
    await collected(worker, REQUESTS)


async def lease(server: Watched, worker: HttpWorker) -> None:
    """Another job comes, connects its relay, and goes."""
    other = HttpWorker(server.url, TOKEN, "job", relay=server.endpoint, lease=5.0)
    try:
        await other.start()
        await other.restart()
    finally:
        await other.close()


STEPS: tuple[Step, ...] = (add, status, stats, metrics, reprioritize, kv, update, abort, drain, lease)


def test_no_endpoint_holds_up_the_loop_that_serves_users(watched: Watched) -> None:
    async def scenario() -> dict[str, list[dict[str, Any]]]:
        found: dict[str, list[dict[str, Any]]] = {}
        async with ours(watched) as worker:
            await worker.add(requests_of("warm", 8))
            await asyncio.gather(collected(worker, 8), streamed(watched))
            await stalls(watched)
            users = [asyncio.ensure_future(streamed(watched)) for _ in range(8)]
            for step in STEPS:
                await step(watched, worker)
                found[step.__name__] = await stalls(watched)
            counts = await asyncio.gather(*users)
            print(counts)
        return found

    found = watched.runner.run(scenario())
    for name, rows in found.items():
        print(name, [round(row["own"] * 1000) for row in rows])
        for row in rows[:3]:
            print(json.dumps({k: v for k, v in row.items() if k != "stacks"}))
            print("\n--\n".join(row["stacks"]))
    worst = {name: [row for row in rows if row["own"] > LIMIT] for name, rows in found.items()}
    assert not any(worst.values())
