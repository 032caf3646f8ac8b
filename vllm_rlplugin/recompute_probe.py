"""Does an in-flight request go on exactly as a fresh engine with the new weights would? Counts the tokens that differ.

``python -m vllm_rlplugin.recompute_probe --tokens N`` makes two tiny Qwen3 with different random weights, A and B, and:

1. serves requests under A, suspends while they generate, updates to B through the relay (in-memory twin), resumes;
   then the same from B to A;
2. lets fresh engines that loaded A and B from disk continue prompt plus the tokens so far, greedily, in fp32, and
   compares token by token: the figure;
3. shows that the comparison can fail: how many tokens the update changed, and how many differ when the KV of the old
   weights is kept (the reset left out).

Prints one JSON object on the last line. Measures afresh each time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.api import Completion, GenerationRequest, Sampling
from orchestrator.transfer import Publisher, RelayEndpoint
from vllm_rlplugin.engine import prepare_process
from vllm_rlplugin.worker import EngineWorker

VOCABULARY = 64
PROMPT_TOKENS = (20, 60)  # shortest, longest
NEW_TOKENS = 96  # a request; suspended somewhere before
CONCURRENT = 64
STEPS_BEFORE_UPDATE = (12, 48)  # engine steps, drawn once a round
MATRIX_SCALE = 8.0  # over transformers' initialisation: an untrained model is otherwise nearly uniform

Tensors = Mapping[str, Any]  # name -> torch tensor


def write_tiny_qwen3(folder: Path, seed: int, *, tied: bool = False) -> dict[str, Any]:
    """Save a random fp32 Qwen3 as a Hugging Face folder; returns its tensors in checkpoint coordinates."""
    import torch
    from safetensors.torch import load_file
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=tied,
    )
    generator = torch.Generator().manual_seed(seed)
    model = Qwen3ForCausalLM(config).float()
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() > 1:
                parameter.copy_(noise * config.initializer_range * MATRIX_SCALE)
            else:
                parameter.copy_(1.0 + 0.1 * noise)
    model.save_pretrained(folder)
    tensors: dict[str, Any] = load_file(str(folder / "model.safetensors"))
    return tensors


def publish(publisher: Publisher, version: int, tensors: Tensors) -> None:
    """Put torch tensors on the relay as one full version."""
    import torch

    publisher.publish(
        version,
        (
            (name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), _bytes(torch, tensor))
            for name, tensor in tensors.items()
        ),
    )


def _bytes(torch: Any, tensor: Any) -> Any:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy()


async def collect(worker: EngineWorker, count: int) -> dict[str, Completion]:
    """The next ``count`` completions by request id. Raises RuntimeError when one comes twice."""
    found: dict[str, Completion] = {}
    while len(found) < count:
        for completion in await worker.completions():
            if completion.request_id in found:
                raise RuntimeError(f"{completion.request_id} was completed twice")
            found[completion.request_id] = completion
    return found


def greedy(name: str, token_ids: Sequence[int], max_tokens: int) -> GenerationRequest:
    """A greedy request that ends by length."""
    return GenerationRequest(name, name, 0, tuple(token_ids), Sampling(max_tokens, temperature=0.0), "probe")


@dataclass(frozen=True, slots=True)
class Spanning:
    """A request that an update met in flight: its context then, and the tokens the engine wrote afterwards."""

    name: str
    version: int
    context: tuple[int, ...]
    prompt_tokens: int
    tail: tuple[int, ...]


async def serve_across_update(
    worker: EngineWorker, version: int, rng: random.Random, label: str
) -> tuple[list[Spanning], int]:
    """Requests that live through the update to ``version``, and how many running ones it preempted."""
    requests = [
        greedy(f"{label}-{index}", [rng.randrange(VOCABULARY) for _ in range(rng.randint(*PROMPT_TOKENS))], NEW_TOKENS)
        for index in range(CONCURRENT)
    ]
    await worker.add(requests)
    for _ in range(rng.randint(*STEPS_BEFORE_UPDATE)):
        await asyncio.sleep(0)  # the worker runs one engine step a turn of the event loop
    await worker.suspend()
    update = await worker.update(version)
    await worker.resume()
    completions = await collect(worker, len(requests))
    spanning = []
    for request in requests:
        completion = completions[request.request_id]
        if len(completion.versions) == 2:
            (_, kept), (newer, _) = completion.versions
            context = request.token_ids + completion.token_ids[:kept]
            tail = completion.token_ids[kept:]
            spanning.append(Spanning(request.request_id, newer, context, len(request.token_ids), tail))
    return spanning, update.preempted


async def continuations(model: Path, spanning: Iterable[Spanning]) -> dict[str, tuple[int, ...]]:
    """What a fresh engine that loads ``model`` from disk writes after the same contexts."""
    wanted = list(spanning)
    worker = EngineWorker(model=str(model), max_num_seqs=CONCURRENT)
    try:
        await worker.add([greedy(item.name, item.context, len(item.tail)) for item in wanted])
        completions = await collect(worker, len(wanted))
    finally:
        await worker.close()
    return {name: completion.token_ids for name, completion in completions.items()}


def differing(spanning: Iterable[Spanning], reference: Mapping[str, tuple[int, ...]]) -> int:
    """Positions at which tails and reference differ."""
    return sum(mine != other for item in spanning for mine, other in zip(item.tail, reference[item.name], strict=True))


async def measure(tokens: int, seed: int, folder: Path) -> dict[str, Any]:
    """The figure and its controls; see the module."""
    rng = random.Random(seed)
    models = (folder / "A", folder / "B")
    weights = [write_tiny_qwen3(model, seed * 2 + index) for index, model in enumerate(models)]
    endpoint = RelayEndpoint(job="recompute-probe", kind="memory", master=f"recompute-probe-{os.getpid()}")
    publisher = Publisher(endpoint)
    publisher.reset()
    spanning: list[Spanning] = []
    preempted = rounds = 0
    worker = EngineWorker(model=str(models[0]), max_num_seqs=CONCURRENT, relay=endpoint.to_dict())
    try:
        while sum(len(item.tail) for item in spanning) < tokens or rounds < 2:  # both directions at least once
            rounds += 1
            publish(publisher, rounds, weights[rounds % 2])
            found, ran = await serve_across_update(worker, rounds, rng, f"round{rounds}")
            spanning.extend(found)
            preempted += ran
    finally:
        await worker.close()
    # The control: the same worker, with the one line left out that drops the old weights' KV.
    kept_worker = EngineWorker(model=str(models[0]), max_num_seqs=CONCURRENT, relay=endpoint.to_dict())
    try:
        kept_worker._engine._drop_kv = lambda: 0  # type: ignore[method-assign]
        version = rounds if rounds % 2 else rounds - 1  # weights B
        without_reset, _ = await serve_across_update(kept_worker, version, rng, "kept")
    finally:
        await kept_worker.close()
    publisher.close()
    to_b = [item for item in spanning if item.version % 2]
    to_a = [item for item in spanning if not item.version % 2]
    fresh_b = await continuations(models[1], [*to_b, *without_reset])
    fresh_a = await continuations(models[0], [*to_a, *to_b])  # of to_b: what the update prevented
    return {
        "tokens": sum(len(item.tail) for item in spanning),
        "differing": differing(to_b, fresh_b) + differing(to_a, fresh_a),
        "requests": len(spanning),
        "updates": rounds,
        "preempted": preempted,
        "kept_tokens": sum(len(item.context) - item.prompt_tokens for item in spanning),
        "changed_by_update": differing(to_b, fresh_a),
        "changed_by_update_of": sum(len(item.tail) for item in to_b),
        "differing_without_reset": differing(without_reset, fresh_b),
        "differing_without_reset_of": sum(len(item.tail) for item in without_reset),
        "seed": seed,
        "pid": os.getpid(),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m vllm_rlplugin.recompute_probe", description=__doc__)
    parser.add_argument("--tokens", type=int, default=1000, help="compare at least this many tokens")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    prepare_process(threads=1)  # before transformers imports torch
    with tempfile.TemporaryDirectory(prefix="rl-coserve-probe-") as folder:
        result = asyncio.run(measure(options.tokens, options.seed, Path(folder)))
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
