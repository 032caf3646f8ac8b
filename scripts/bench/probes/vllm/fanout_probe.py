"""One process of the bench ``site-fanout``, told what to do by lines of JSON, each answered by one.

``python -m scripts.bench.probes.vllm.fanout_probe publisher|receiver|engine ENDPOINT MODEL``. The **publisher** starts the relay
on its own address and pushes versions of a model's size, random bfloat16 that nothing compresses. A **receiver** is what the
plugin runs in a vLLM worker (:class:`vllm_rlplugin.weights.version_fetch.VersionFetcher`), without the model; an **engine** is a
vLLM with the plugin in it, which also loads what it received. ``model LAYERS FOLDER`` writes the model.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from orchestrator.runtime.mooncake_master import MooncakeMaster
from orchestrator.transfer import Publisher, RelayEndpoint
from vllm_rlplugin.worker.inprocess_engine import prepare_process

POLL_SECONDS = 0.01
VOCABULARY = 2048


def write_model(folder: Path, layers: int, seed: int) -> None:
    """A bfloat16 Qwen3 with random weights, 25 MB a layer and 8 more, as a Hugging Face folder."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=64,
        max_position_embeddings=256,
        tie_word_embeddings=False,
    )
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


def publisher(endpoint: RelayEndpoint, model: Path) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Answers {"publish": version}."""
    import torch
    from safetensors.torch import load_file

    tensors = load_file(str(model / "model.safetensors"))
    loop = asyncio.new_event_loop()
    master = MooncakeMaster(host=endpoint.host)
    loop.run_until_complete(master.start())
    endpoint = replace(endpoint, master=master.address)
    publishing = Publisher(endpoint)
    publishing.rollback(0)

    def obey(told: dict[str, Any]) -> dict[str, Any]:
        if "publish" not in told:
            loop.run_until_complete(master.stop())
            return {}
        generator = torch.Generator().manual_seed(int(told["publish"]))
        made = {name: torch.randn(one.shape, generator=generator).to(one.dtype) * 0.02 for name, one in tensors.items()}
        began = time.monotonic()
        shards = (
            (name, tuple(one.shape), "bfloat16", one.reshape(-1).view(torch.uint8).numpy())
            for name, one in made.items()
        )
        result = publishing.publish(int(told["publish"]), shards)
        return {"began": began, "ended": time.monotonic(), "bytes": result.bytes, "content": result.content}

    print(json.dumps({"master": master.address, "bytes": sum(one.nbytes for one in tensors.values())}), flush=True)
    return obey


def receiver(endpoint: RelayEndpoint, model: Path) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Answers {"fetch": version}."""
    import torch

    from vllm_rlplugin.weights.transfer_engine import checkpoint_layout
    from vllm_rlplugin.weights.version_fetch import VersionFetcher
    from vllm_rlplugin.weights.version_staging import StagedVersion, StagingPlan

    plan = StagingPlan(str(model), torch.device("cpu"), checkpoint_layout(str(model)), False, None)
    fetcher = VersionFetcher(endpoint)

    def obey(told: dict[str, Any]) -> dict[str, Any]:
        if "fetch" not in told:
            fetcher.close()
            return {}
        fetcher.start_fetch(int(told["fetch"]), plan)
        while (state := fetcher.fetch_state())["state"] == "fetching":
            time.sleep(POLL_SECONDS)
        staged = fetcher.take_staged(int(told["fetch"]), plan)
        if isinstance(staged, StagedVersion) and staged.layers is not None:
            for _ in staged.layers.read_tensors():  # without a mapping that is when it is fetched
                pass
        past_cache = getattr(staged, "past_cache", "")
        return {
            "ended": time.monotonic(),
            "past_cache": past_cache,
            "error": state["error"],
            "content": state["checksum"],
        }

    print(json.dumps({"ready": True}), flush=True)
    return obey


def engine(endpoint: RelayEndpoint, model: Path) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Answers {"fetch": version} when it is loaded."""
    from vllm_rlplugin.worker.inprocess_worker import EngineWorker

    loop = asyncio.new_event_loop()
    worker = EngineWorker(
        model=str(model), max_num_seqs=4, max_model_len=128, kv_cache_mb=64, dtype="bfloat16", relay=endpoint.to_dict()
    )

    async def update(version: int) -> dict[str, Any]:
        await worker.prepare(version)
        prepared = time.monotonic()
        await worker.suspend()
        result = await worker.update(version)
        await worker.resume()
        ended = time.monotonic()
        report = worker._engine.report()[0]
        return {
            "prepared": prepared,
            "ended": ended,
            "past_cache": result.past_cache,
            "error": report["error"],
            "content": report["checksum"],
            "seconds": report["seconds"],
        }

    def obey(told: dict[str, Any]) -> dict[str, Any]:
        if "fetch" in told:
            return loop.run_until_complete(update(int(told["fetch"])))
        loop.run_until_complete(worker.close())
        return {}

    print(json.dumps({"ready": True}), flush=True)
    return obey


def main() -> int:
    """Obey until the input ends."""
    role, told, model = sys.argv[1:]
    prepare_process(threads=1)
    if role == "model":
        write_model(Path(model), int(told), seed=0)
        return 0
    os.environ.setdefault("VLLM_HOST_IP", "127.0.0.1")
    endpoint = RelayEndpoint.from_dict(json.loads(told))
    obey = {"publisher": publisher, "receiver": receiver, "engine": engine}[role](endpoint, Path(model))
    for line in sys.stdin:
        print(json.dumps(obey(json.loads(line))), flush=True)
    obey({})
    return 0


if __name__ == "__main__":
    sys.exit(main())
