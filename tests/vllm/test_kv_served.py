"""KV between a running ``vllm serve`` and an engine of a run, both ways, bit for bit (CPU, tiny random Qwen3, greedy)."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from orchestrator.api import Completion, GenerationRequest, KvMove, KvWorker, RolloutWorker, Sampling
from orchestrator.api.tls import SYSTEM, Tls
from orchestrator.borrowing.http_worker import HttpWorker
from scripts.bench.probes.vllm.kv_engines import Child
from scripts.bench.probes.vllm.recompute_probe import VOCABULARY, write_tiny_qwen3
from tests.house.test_tls import Authority
from tests.transfer.test_kv_tls import OWN, elsewhere

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(900)]
BLOCK = 32
TOKEN = "the-token-of-these-tests-0123456789"


async def say(worker: RolloutWorker, name: str, tokens: tuple[int, ...], count: int) -> Completion:
    await worker.add([GenerationRequest(name, name, 0, tokens, Sampling(count, 0.0), "test")])
    found: list[Completion] = []
    while not found:
        found = [item for item in await worker.completions() if item.request_id == name]
    assert not found[0].error
    return found[0]


@pytest.mark.parametrize(
    ("carrier", "secure"),
    [
        pytest.param("tcp", False, id="tcp"),
        pytest.param("mooncake", False, id="mooncake"),
        pytest.param("tcp", True, id="tcp over TLS", marks=elsewhere),
    ],
)
def test_a_prefix_goes_from_a_server_to_an_engine_of_the_run_and_back(
    tmp_path: Path, vllm_serve: Callable[..., AbstractContextManager[Any]], carrier: str, secure: bool
) -> None:
    """``secure``: both at this machine's address of a network, the server with the certificate of its own https."""
    model = tmp_path / "model"
    write_tiny_qwen3(model, 1)
    plugin = {"kv_transfer": True}
    flags: tuple[str, ...] = ("--rl-kv-transfer", "--rl-kv-carrier", carrier, "--max-model-len", "512")
    kv: dict[str, Any] = {"token": TOKEN, "carrier": carrier}
    trusted = SYSTEM
    if secure:
        tls = Authority(tmp_path, "authority").make("both", f"IP:127.0.0.1,IP:{OWN}")
        flags += ("--rl-kv-host", OWN, "--ssl-certfile", tls.certificate, "--ssl-keyfile", tls.key)
        flags += ("--ssl-ca-certs", tls.authority)
        kv |= {"host": OWN, "tls": asdict(tls)}
        trusted = Tls(authority=tls.authority)
    child = Child("b", model=str(model), max_model_len=512, kv_cache_mb=4, plugin=plugin, kv=kv)

    async def scenario(url: str) -> None:
        served = HttpWorker(url, TOKEN, "served", tls=trusted)
        assert isinstance(served, KvWorker)
        await child.ready()
        rng = random.Random(5)
        context = tuple(rng.randrange(VOCABULARY) for _ in range(170))
        try:
            there, here = await served.kv_place(), await child.kv_place()
            assert there.startswith("tls://") == here.startswith("tls://") == secure
            context = (*context, *(await say(served, "first", context, 30)).token_ids, 1, 2, 3)
            moved = await child.fetch_kv(KvMove("t", context, there, 60.0))
            assert (moved.moved, moved.why, moved.carrier) == ((len(context) - 4) // BLOCK * BLOCK, "", carrier)
            counted = await child.computed()
            after = await say(child, "second", context, 40)
            assert await child.computed() - counted == len(context) - moved.moved + 39
            stayed = await say(served, "second", context, 40)
            assert (after.token_ids, after.logprobs) == (stayed.token_ids, stayed.logprobs)
            longer = (*context, *after.token_ids)
            back = (*longer, *(await say(child, "third", longer, 30)).token_ids, 7)
            before = (await served.stats()).prefix_hits
            returned = await served.fetch_kv(KvMove("t", back, here, 60.0))
            assert returned.tokens >= len(context) // BLOCK * BLOCK
            assert (returned.why, returned.carrier) == ("", carrier)
            await say(served, "fourth", back, 8)
            assert (await served.stats()).prefix_hits - before == returned.tokens
            await served.suspend()  # weights may be changing: nothing is handed out, or taken
            assert (await child.fetch_kv(KvMove("u", tuple(range(60)), there, 60.0))).why.startswith(
                ("updating", "gone")
            )
            assert (await served.fetch_kv(KvMove("u", tuple(range(60)), here, 60.0))).why.startswith("updating")
            await served.resume()
        finally:
            await served.close()
            await child.close()

    with vllm_serve(tmp_path, model, TOKEN, *flags) as server:
        asyncio.run(scenario(server.url))
