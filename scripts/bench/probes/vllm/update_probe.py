"""How long an in-flight request stands still in a weight update, over a link of limited speed. Three ways, real engine.

``python -m scripts.bench.probes.vllm.update_probe`` serves greedy requests from a model of about 64 MB and updates it
in the middle:

* ``overlapped``: PREPARE fetches and verifies while the requests go on; then SUSPEND, UPDATE, RESUME;
* ``blocking``  : SUSPEND, UPDATE (which fetches), RESUME;
* ``resubmit``  : the way without in-flight updates: abort everything, UPDATE (prepared as well), send it again.

Reported for each: the pause (from the call of SUSPEND until RESUME took effect), the longest gap between two tokens of an
in-flight request (which holds the recomputation of its KV too), and tokens lost or repeated. The link is the in-memory
relay, slowed down to the given bits per second by sleeping in the reader: what a slow network looks like from inside.
Prints one JSON object on the last line.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from orchestrator.api import Completion
from orchestrator.transfer import MemoryRelay, Publisher, RelayEndpoint
from scripts.bench.probes.vllm.recompute_probe import VOCABULARY, greedy, publish
from vllm_rlplugin.worker.inprocess_engine import prepare_process
from vllm_rlplugin.worker.inprocess_worker import EngineWorker

WAYS = ("overlapped", "blocking", "resubmit")
IN_FLIGHT = 8
PROMPT_TOKENS = 16
NEW_TOKENS = 160
TURNS_BEFORE = 24  # engine steps before the update begins


def write_model(folder: Path, seed: int) -> dict[str, Any]:
    """A random fp32 Qwen3 of about 64 MB as a Hugging Face folder; returns its tensors."""
    import torch
    from safetensors.torch import load_file
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=384,
        intermediate_size=1024,
        num_hidden_layers=10,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=512,
        tie_word_embeddings=False,
    )
    Qwen3ForCausalLM(config).float().save_pretrained(folder)
    tensors: dict[str, Any] = load_file(str(folder / "model.safetensors"))
    return tensors


def slow_down(bits_per_second: float) -> None:
    """Make every read of the in-memory relay take as long as a link of this speed would."""
    stock = MemoryRelay.get_into

    def get_into(self: MemoryRelay, key: str, buffer: memoryview) -> int:
        read = stock(self, key, buffer)
        time.sleep(read * 8 / bits_per_second)
        return read

    MemoryRelay.get_into = get_into  # type: ignore[method-assign]


class Watch:
    """When each in-flight request got its tokens, seen after every engine step."""

    def __init__(self, worker: EngineWorker) -> None:
        self._engine = worker._engine
        self._stock = self._engine.step
        self._engine.step = self._step  # type: ignore[method-assign]
        self._stock_resume = self._engine.resume
        self._engine.resume = self._resume  # type: ignore[method-assign]
        self._last: dict[str, tuple[int, float]] = {}
        self.resumed = 0.0  # when the engine was set going; the caller of RESUME hears of it one engine step later
        self.gaps: dict[str, float] = {}  # the longest, in seconds

    def _step(self, now: float) -> list[Completion]:
        completions = self._stock(now)
        at = time.perf_counter()
        for name, active in self._engine._active.items():
            count = active.core.num_output_tokens
            seen = self._last.get(name)
            if count and (seen is None or count > seen[0]):
                if seen is not None:
                    self.gaps[name] = max(self.gaps.get(name, 0.0), at - seen[1])
                self._last[name] = (count, at)
        return completions

    def _resume(self) -> None:
        self._stock_resume()
        self.resumed = time.perf_counter()

    def stop(self) -> None:
        """Leave the engine as it was."""
        self._engine.step = self._stock  # type: ignore[method-assign]
        self._engine.resume = self._stock_resume  # type: ignore[method-assign]


async def one_update(worker: EngineWorker, way: str, version: int, label: str) -> dict[str, Any]:
    """Requests in flight through one update, by one of the ways."""
    requests = [
        greedy(f"{label}-{index}", [(7 * index + at) % VOCABULARY for at in range(PROMPT_TOKENS)], NEW_TOKENS)
        for index in range(IN_FLIGHT)
    ]
    watch = Watch(worker)
    await worker.add(requests)
    for _ in range(TURNS_BEFORE):
        await asyncio.sleep(0)
    before_prepare = (await worker.stats()).generated
    if way != "blocking":
        await worker.prepare(version)
    meanwhile = (await worker.stats()).generated - before_prepare
    lost = 0
    if way == "resubmit":
        await worker.abort([request.request_id for request in requests])
        lost = sum(len(completion.token_ids) for completion in await _collect(worker, len(requests)))
    began = time.perf_counter()
    await worker.suspend()
    suspended = time.perf_counter()
    result = await worker.update(version)
    updated = time.perf_counter()
    await worker.resume()
    pause = watch.resumed - began
    if way == "resubmit":
        requests = [replace(request, request_id=f"{request.request_id}-again") for request in requests]
        await worker.add(requests)
    completions = await _collect(worker, len(requests))
    watch.stop()
    return {
        "pause_ms": pause * 1e3,
        "suspend_ms": (suspended - began) * 1e3,
        "update_ms": (updated - suspended) * 1e3,
        "gap_ms": statistics.median(watch.gaps.values()) * 1e3,
        "generated_while_fetching": meanwhile,
        "tokens_lost": lost + sum(NEW_TOKENS - len(completion.token_ids) for completion in completions),
        "spanning": sum(len(completion.versions) == 2 for completion in completions),
        "bytes": result.bytes,
    }


async def _collect(worker: EngineWorker, count: int) -> list[Completion]:
    found: list[Completion] = []
    while len(found) < count:
        found.extend(await worker.completions())
    return found


async def measure(rounds: int, bits_per_second: float, folder: Path) -> dict[str, Any]:
    """Medians of each way over interleaved rounds."""
    weights = [write_model(folder / name, seed) for seed, name in enumerate(("A", "B"))]
    endpoint = RelayEndpoint(job="update-probe", kind="memory", master=f"update-probe-{os.getpid()}")
    publisher = Publisher(endpoint)
    publisher.reset()
    slow_down(bits_per_second)
    worker = EngineWorker(model=str(folder / "A"), max_num_seqs=IN_FLIGHT, relay=endpoint.to_dict())
    rows: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    version = 0
    try:
        for index in range(rounds + 1):
            for way in WAYS:
                version += 1
                publish(publisher, version, weights[version % 2])
                row = await one_update(worker, way, version, f"{way}{index}")
                if index:  # the first of each is a warm-up
                    rows[way].append(row)
    finally:
        await worker.close()
        publisher.close()
    medians = {
        way: {name: statistics.median(row[name] for row in found) for name in found[0]} for way, found in rows.items()
    }
    return {"ways": medians, "rounds": rounds, "bits_per_second": bits_per_second, "pid": os.getpid()}


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m scripts.bench.probes.vllm.update_probe", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--gbps", type=float, default=1.0, help="speed of the link, in Gbit/s")
    options = parser.parse_args(arguments)
    prepare_process(threads=1)  # before transformers imports torch
    with tempfile.TemporaryDirectory(prefix="rl-coserve-probe-") as folder:
        result = asyncio.run(measure(options.rounds, options.gbps * 1e9, Path(folder)))
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
