"""What preemption buys a request that outranks those that run, and what it costs them. Real engine, two ways in turn.

``python -m scripts.bench.probes.vllm.preemption_probe`` fills all slots with long greedy requests of a worse priority
and, while they run, sends short ones of a better priority, one after the other:

* ``preempting``: our scheduler's default, the urgent one takes the slot of the lowest-ranked running one;
* ``waiting``   : ``preemption`` off, as stock vLLM orders by priority: it goes first when a slot becomes free.

Reported for each: the urgent ones' mean time to first token, the time until the long ones are done, tokens per second over
all, how many were preempted, and how much of the preempted ones' prefix was found in the cache when they went on. The
long ones' tokens must be the same both ways. Prints one JSON object on the last line.
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
from pathlib import Path
from typing import Any

from orchestrator.api import Completion, GenerationRequest, Sampling
from scripts.bench.probes.vllm.recompute_probe import VOCABULARY, write_tiny_qwen3
from vllm_rlplugin.worker.inprocess_engine import prepare_process
from vllm_rlplugin.worker.inprocess_worker import EngineWorker

WAYS = ("preempting", "waiting")
SLOTS = 32
LONG = 96  # requests: slots are full until most of them are done
LONG_TOKENS = (96, 352)  # shortest, longest
LONG_PROMPT = 96
URGENT = 12  # requests, one after the other
URGENT_TOKENS = 8
TURNS_BETWEEN = 8  # engine steps between the end of an urgent one and the next
WORSE, BETTER = 10, 0  # priorities


def requests(label: str) -> list[GenerationRequest]:
    """The long ones; the same for every label."""
    shortest, longest = LONG_TOKENS
    return [
        GenerationRequest(
            f"{label}-long{index}",
            f"{label}-long{index}",
            0,
            tuple((7 * index + 3 * at) % VOCABULARY for at in range(LONG_PROMPT)),
            Sampling(shortest + (longest - shortest) * (index * 37 % LONG) // LONG, temperature=0.0),
            "probe",
            WORSE,
        )
        for index in range(LONG)
    ]


async def one_round(worker: EngineWorker, label: str) -> tuple[dict[str, Any], list[tuple[int, ...]]]:
    """Figures, and the tokens of the long ones in order."""
    found: dict[str, Completion] = {}
    before = await worker.stats()
    long = requests(label)
    began = time.perf_counter()
    await worker.add(long)
    for _ in range(2 * TURNS_BETWEEN):
        await asyncio.sleep(0)
    for index in range(URGENT):
        name = f"{label}-urgent{index}"
        prompt = tuple((5 * index + at) % VOCABULARY for at in range(16))
        sampling = Sampling(URGENT_TOKENS, temperature=0.0)
        await worker.add([GenerationRequest(name, name, 0, prompt, sampling, "probe", BETTER)])
        while name not in found:
            found.update({done.request_id: done for done in await worker.completions()})
        for _ in range(TURNS_BETWEEN):
            await asyncio.sleep(0)
    while len(found) < LONG + URGENT:
        found.update({done.request_id: done for done in await worker.completions()})
    seconds = time.perf_counter() - began
    after = await worker.stats()
    return {
        "urgent_ttft_ms": statistics.mean(
            found[f"{label}-urgent{index}"].timing.first_token * 1e3 for index in range(URGENT)
        ),
        "seconds": seconds,
        "tokens_per_s": sum(len(done.token_ids) for done in found.values()) / seconds,
        "outranked": after.outranked - before.outranked,
        "prefix_queries": after.prefix_queries - before.prefix_queries,
        "prefix_hits": after.prefix_hits - before.prefix_hits,
    }, [found[request.request_id].token_ids for request in long]


async def measure(rounds: int, model: Path) -> dict[str, Any]:
    """Medians over rounds; one engine after the other, as there is one in a process at a time."""
    ways: dict[str, dict[str, Any]] = {}
    tokens: dict[str, list[tuple[int, ...]]] = {}
    for way in WAYS:
        worker = EngineWorker(
            model=str(model),
            max_num_seqs=SLOTS,
            max_model_len=512,
            kv_cache_mb=64,
            plugin={"preemption": way == "preempting"},
        )
        try:
            rows = []
            for index in range(rounds + 1):
                row, tokens[way] = await one_round(worker, f"{way}{index}")
                if index:  # the first is a warm-up
                    rows.append(row)
        finally:
            await worker.close()
        ways[way] = {name: statistics.median(row[name] for row in rows) for name in rows[0]}
    mine, other = (tokens[way] for way in WAYS)
    differing = sum(a != b for one, two in zip(mine, other, strict=True) for a, b in zip(one, two, strict=True))
    return {
        "ways": ways,
        "differing_tokens": differing,
        "compared_tokens": sum(len(row) for row in mine),
        "rounds": rounds,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m scripts.bench.probes.vllm.preemption_probe", description=__doc__)
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args(arguments)
    prepare_process(threads=1)  # before transformers imports torch
    with tempfile.TemporaryDirectory(prefix="rl-coserve-probe-") as folder:
        write_tiny_qwen3(Path(folder), 0)
        result = asyncio.run(measure(options.rounds, Path(folder)))
    print(json.dumps({**result, "pid": os.getpid()}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
