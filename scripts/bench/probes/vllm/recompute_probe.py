"""Does anything that an engine writes after a weight update still depend on the old weights? Counts the tokens that differ.

``python -m scripts.bench.probes.vllm.recompute_probe --tokens N`` makes two tiny Qwen3 with different random weights, A
and B, and does the following once for each way of shutting out old KV (``kv_on_update``: the version in the cache salt,
or a flush):

1. serves requests under A, suspends while they generate, updates to B through the relay (in-memory twin), resumes;
   then the same from B to A. The tokens after the update are compared with those of fresh engines that loaded A and B
   from disk and continue prompt plus the tokens so far, greedily, in fp32;
2. sends the same prompts before and after each update (*repeated*), compares what comes after it with the fresh engines
   too, and counts prefix-cache hits: none with KV of the old weights, though the cache works (sent once more, they hit).

It shows that the comparisons can fail: how many tokens the update changed, and how many differ when the KV of the old
weights is kept (the scheduler's ``advance_version`` left out). Prints one JSON object on the last line. Measures afresh each
time.
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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from orchestrator.api import Completion, GenerationRequest, Sampling
from orchestrator.transfer import Publisher, RelayEndpoint
from vllm_rlplugin.options import KV_ON_UPDATE
from vllm_rlplugin.worker.inprocess_engine import prepare_process
from vllm_rlplugin.worker.inprocess_worker import EngineWorker

VOCABULARY = 64
PROMPT_TOKENS = (20, 60)  # shortest, longest
NEW_TOKENS = 96  # a request; suspended somewhere before
CONCURRENT = 64
STEPS_BEFORE_UPDATE = (12, 48)  # engine steps, drawn once a round
REPEATED = 12  # prompts that are sent again and again
REPEATED_PROMPT_TOKENS = 72  # two whole blocks of the KV cache, and some
REPEATED_NEW_TOKENS = 8
MATRIX_SCALE = 8.0  # over transformers' initialisation: an untrained model is otherwise nearly uniform

Tensors = Mapping[str, Any]  # name -> torch tensor


def write_tiny_qwen3(folder: Path, seed: int, *, tied: bool = False, vocabulary: int = VOCABULARY) -> dict[str, Any]:
    """Save a random fp32 Qwen3 as a Hugging Face folder; returns its tensors in checkpoint coordinates."""
    import torch
    from safetensors.torch import load_file
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=vocabulary,
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


@dataclass(slots=True)
class Found:
    """What was seen over some updates of one worker."""

    spanning: list[Spanning] = field(default_factory=list)
    repeated: list[Spanning] = field(default_factory=list)  # prompts sent again after the update
    repeated_hits: int = 0  # tokens of theirs that were found in the prefix cache: KV of the old weights
    repeated_again_hits: int = 0  # the same, sent a second time after the update: KV of the present weights
    preempted: int = 0
    updates: int = 0
    advance_ms: list[float] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        """How many tokens of in-flight requests can be compared."""
        return sum(len(item.tail) for item in self.spanning)


async def serve_repeated(worker: EngineWorker, seed: int, label: str) -> tuple[list[Spanning], int]:
    """The prompts that follow from ``seed``, under the present weights; and tokens of theirs found in the prefix cache."""
    rng = random.Random(f"repeated {seed}")  # not the numbers that in-flight prompts are made of: those may share KV
    requests = [
        greedy(
            f"{label}-{index}", [rng.randrange(VOCABULARY) for _ in range(REPEATED_PROMPT_TOKENS)], REPEATED_NEW_TOKENS
        )
        for index in range(REPEATED)
    ]
    before = (await worker.stats()).prefix_hits
    await worker.add(requests)
    completions = await collect(worker, len(requests))
    version = (await worker.stats()).version
    hits = (await worker.stats()).prefix_hits - before
    size = REPEATED_PROMPT_TOKENS
    return [
        Spanning(item.request_id, version, tuple(item.token_ids), size, completions[item.request_id].token_ids)
        for item in requests
    ], hits


async def update_between(worker: EngineWorker, version: int, rng: random.Random, seed: int, found: Found) -> None:
    """One update to ``version`` with requests in flight, and the repeated prompts on both sides of it."""
    label = f"{found.updates}-to-{version}"
    await serve_repeated(worker, seed, f"before-{label}")
    spanning, preempted = await serve_across_update(worker, version, rng, f"flight-{label}")
    found.spanning.extend(spanning)
    found.preempted += preempted
    found.updates += 1
    repeated, hits = await serve_repeated(worker, seed, f"after-{label}")
    found.repeated.extend(repeated)
    found.repeated_hits += hits
    found.repeated_again_hits += (await serve_repeated(worker, seed, f"again-{label}"))[1]
    found.advance_ms.append(worker._engine.advanced["seconds"] * 1e3)


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
            context = (*request.token_ids, *completion.token_ids[:kept])
            tail = completion.token_ids[kept:]
            spanning.append(Spanning(request.request_id, newer, context, len(request.token_ids), tail))
    return spanning, update.preempted


async def continuations(model: Path, spanning: Iterable[Spanning], **options: Any) -> dict[str, tuple[int, ...]]:
    """What a fresh engine that loads ``model`` from disk writes after the same contexts. ``options``: of the engine."""
    wanted = list(spanning)
    worker = EngineWorker(model=str(model), max_num_seqs=CONCURRENT, **options)
    try:
        await worker.add([greedy(item.name, item.context, len(item.tail)) for item in wanted])
        completions = await collect(worker, len(wanted))
    finally:
        await worker.close()
    return {name: completion.token_ids for name, completion in completions.items()}


def differing(spanning: Iterable[Spanning], reference: Mapping[str, tuple[int, ...]]) -> int:
    """Positions at which tails and reference differ."""
    return sum(mine != other for item in spanning for mine, other in zip(item.tail, reference[item.name], strict=True))


def keep_old_kv(worker: EngineWorker) -> None:
    """The control: leave out the one command that shuts out the KV of old weights."""
    scheduler = worker._engine._scheduler
    stock = scheduler.rl_command

    def rl_command(command: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        if command == "advance_version":
            return {"preempted": 0, "how": "kept", "seconds": 0.0}
        answer: dict[str, Any] = stock(command, arguments)
        return answer

    scheduler.rl_command = rl_command


async def measure(tokens: int, seed: int, folder: Path, **options: Any) -> dict[str, Any]:
    """The figures and their controls; see the module. ``options``: of the engines."""
    rng = random.Random(seed)
    models = (folder / "A", folder / "B")
    weights = [write_tiny_qwen3(model, seed * 2 + index) for index, model in enumerate(models)]
    endpoint = RelayEndpoint(job="recompute-probe", kind="memory", master=f"recompute-probe-{os.getpid()}")
    publisher = Publisher(endpoint)
    publisher.reset()
    ways = {way: Found() for way in KV_ON_UPDATE}
    version = 0  # odd: weights B, even: A
    for way, found in ways.items():
        version += version % 2
        worker = EngineWorker(
            model=str(models[0]),
            max_num_seqs=CONCURRENT,
            relay=endpoint.to_dict(),
            plugin={"kv_on_update": way},
            **options,
        )
        try:
            while found.tokens * len(ways) < tokens or found.updates < 2:  # both directions at least once
                version += 1
                publish(publisher, version, weights[version % 2])
                await update_between(worker, version, rng, seed, found)
        finally:
            await worker.close()
    kept = Found()
    worker = EngineWorker(model=str(models[0]), max_num_seqs=CONCURRENT, relay=endpoint.to_dict(), **options)
    try:
        keep_old_kv(worker)
        version += 1 + version % 2  # weights B
        publish(publisher, version, weights[1])
        worker._engine.advanced = {"seconds": 0.0}
        await update_between(worker, version, rng, seed, kept)
    finally:
        await worker.close()
        publisher.close()
    of_flight = [item for found in ways.values() for item in found.spanning]
    of_repeated = [item for found in ways.values() for item in found.repeated]
    to_b = [item for item in of_flight if item.version % 2]
    both = [*of_flight, *of_repeated]
    of_b = [*(i for i in both if i.version % 2), *kept.spanning, *kept.repeated]
    fresh_b = await continuations(models[1], of_b, **options)
    # Of to_b also what the update prevented.
    fresh_a = await continuations(models[0], [*(i for i in both if not i.version % 2), *to_b], **options)
    fresh = (fresh_a, fresh_b)

    def wrong(items: Iterable[Spanning]) -> int:
        return sum(differing([item], fresh[item.version % 2]) for item in items)

    return {
        "tokens": sum(len(item.tail) for item in of_flight),
        "differing": wrong(of_flight),
        "requests": len(of_flight),
        "updates": sum(found.updates for found in ways.values()),
        "preempted": sum(found.preempted for found in ways.values()),
        "kept_tokens": sum(len(item.context) - item.prompt_tokens for item in of_flight),
        "changed_by_update": differing(to_b, fresh_a),
        "changed_by_update_of": sum(len(item.tail) for item in to_b),
        "differing_without_reset": differing(kept.spanning, fresh_b),
        "differing_without_reset_of": sum(len(item.tail) for item in kept.spanning),
        "repeated_tokens": sum(len(item.tail) for item in of_repeated),
        "repeated_differing": wrong(of_repeated),
        "repeated_hits": sum(found.repeated_hits for found in ways.values()),
        "repeated_again_hits": sum(found.repeated_again_hits for found in ways.values()),
        "repeated_differing_without_reset": wrong(kept.repeated),
        "repeated_hits_without_reset": kept.repeated_hits,
        "ways": {
            way: {
                "tokens": found.tokens,
                "differing": wrong(found.spanning),
                "repeated_differing": wrong(found.repeated),
                "repeated_hits": found.repeated_hits,
                "repeated_again_hits": found.repeated_again_hits,
                "updates": found.updates,
                "preempted": found.preempted,
                "advance_ms": [round(milliseconds, 3) for milliseconds in found.advance_ms],
            }
            for way, found in ways.items()
        },
        "seed": seed,
        "pid": os.getpid(),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m scripts.bench.probes.vllm.recompute_probe", description=__doc__)
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
