"""Processor time of single engine steps, over batch sizes and lengths: what the simulator's cost model is compared with.

``python -m scripts.bench.probes.vllm.steptime_probe`` starts one stock ``LLMEngine`` in this process (a small random
Qwen3, one thread) and plays *cells*: ``sequences`` requests with prompts of ``prompt`` tokens, all at once. The first
steps of a cell, one for each chunk of tokens, prefill and make a token of each; each further step makes one more.
*Rollouts* are requests of given lengths, with fewer slots than requests, timed as a whole. All are interleaved, round
by round; a time is the median over the rounds. Processor time, since neighbours on a shared machine take the wall's;
and since they take caches and memory bandwidth, too, each measurement is divided by one of the same kind, the prefill
or the decode steps of the same small cell, right before and right after it, over that one's median. Prints one JSON
object on the last line.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scripts.bench.probes.vllm.overhead_probe import STOCK_ENVIRONMENT

SLOTS = 64
LONGEST = 1024  # tokens of a context
STEPS = 24  # that a cell takes after those that prefill
REFERENCE = (16, 64, 8)  # sequences, prompt, steps of the cell that says how fast the machine is at the moment
WINDOW = 8  # steps that are one figure
CHUNK = 8192  # tokens that one step may prefill: as the simulator counts (orchestrator/sim/cost_model.py)
MODEL = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": LONGEST,
}


def make_engine(folder: Path) -> Any:
    """A stock engine with random weights."""
    from transformers import Qwen3Config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    config = Qwen3Config(**MODEL, tie_word_embeddings=False, architectures=["Qwen3ForCausalLM"])
    config.save_pretrained(folder)
    arguments = EngineArgs(
        model=str(folder),
        load_format="dummy",
        skip_tokenizer_init=True,
        generation_config="vllm",
        dtype="float32",
        max_num_seqs=SLOTS,
        max_num_batched_tokens=CHUNK,
        max_model_len=LONGEST,
        block_size=32,
        kv_cache_memory_bytes=512 << 20,
        enforce_eager=True,
        enable_prefix_caching=False,
        disable_log_stats=True,
    )
    return LLMEngine.from_vllm_config(arguments.create_engine_config(), disable_log_stats=True)


def add(engine: Any, name: str, prompt: int, tokens: int, rng: random.Random) -> None:
    """A request of exactly these lengths."""
    from vllm.inputs import tokens_input
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    sampling = SamplingParams(
        max_tokens=tokens,
        ignore_eos=True,
        temperature=1.0,
        logprobs=0,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    ids = [rng.randrange(MODEL["vocab_size"]) for _ in range(prompt)]
    engine.add_request(name, tokens_input(ids), sampling)


def cell(engine: Any, label: str, sequences: int, prompt: int, steps: int) -> tuple[float, list[float]]:
    """Seconds until each has its first token, then of each further step in which all make one."""
    rng = random.Random(label)
    for index in range(sequences):
        add(engine, f"{label}-{index}", prompt, steps + 1, rng)
    times = []
    while engine.has_unfinished_requests():
        begun = time.process_time()
        engine.step()
        times.append(time.process_time() - begun)
    chunks = len(times) - steps  # the last to begin also ends last
    return sum(times[:chunks]), times[chunks : len(times) - (chunks - 1)]


def rollout(engine: Any, label: str, requests: Sequence[tuple[int, int]]) -> float:
    """Seconds for all of them, (prompt, tokens) each, added at once."""
    rng = random.Random(label)
    for index, (prompt, tokens) in enumerate(requests):
        add(engine, f"{label}-{index}", prompt, tokens, rng)
    begun = time.process_time()
    while engine.has_unfinished_requests():
        engine.step()
    return time.process_time() - begun


def reference(engine: Any, label: str) -> tuple[float, float]:
    """Seconds that the reference cell's prefill and its decode steps take now."""
    first, times = cell(engine, label, *REFERENCE)
    return first, sum(times)


def measure(engine: Any, work: dict[str, Any]) -> dict[str, Any]:
    """All rounds, at most ``rounds``, none begun after ``seconds``; the first warms up and does not count."""
    cells: list[tuple[int, int]] = [(int(row[0]), int(row[1])) for row in work["cells"]]
    firsts: list[list[float]] = [[] for _ in cells]  # of each cell, by round, over the reference's
    seen: list[list[list[float]]] = [[] for _ in cells]
    whole: list[list[float]] = [[] for _ in work["rollouts"]]
    speeds: list[tuple[float, float]] = []
    began = time.monotonic()
    number = 0
    while number <= work["rounds"] and (number < 2 or time.monotonic() - began < work["seconds"]):
        order = list(range(len(cells) + len(whole)))
        random.Random(number).shuffle(order)
        before = reference(engine, f"s{number}")
        for place in order:
            gc.collect()
            first, times = 0.0, list[float]()
            if place < len(cells):
                first, times = cell(engine, f"c{number}-{place}", *cells[place], STEPS)
            else:
                first = rollout(engine, f"r{number}-{place}", work["rollouts"][place - len(cells)])
            after = reference(engine, f"s{number}-{place}")
            prefill, decode = (before[0] + after[0]) / 2, (before[1] + after[1]) / 2
            before = after
            if not number:
                continue
            speeds.append((prefill, decode))
            if place < len(cells):
                firsts[place].append(first / prefill)
                seen[place].append([value / decode for value in times])
            else:
                whole[place - len(cells)].append(first / (prefill + decode))
        number += 1
    scale = statistics.median(pair[0] for pair in speeds), statistics.median(pair[1] for pair in speeds)
    rows = []
    for (sequences, prompt), prefills, rounds in zip(cells, firsts, seen, strict=True):
        seconds = statistics.median(prefills) * scale[0]
        rows.append({"sequences": sequences, "context": float(prompt), "prefill": prompt, "seconds": seconds})
        for begin in range(0, STEPS, WINDOW):
            part = [statistics.mean(times[begin : begin + WINDOW]) for times in rounds]
            middle = prompt + begin + 1 + (WINDOW - 1) / 2
            seconds = statistics.median(part) * scale[1]
            rows.append({"sequences": sequences, "context": middle, "prefill": 0, "seconds": seconds})
    both = [prefill + decode for prefill, decode in speeds]
    return {
        "steps": rows,
        "rollouts": [statistics.median(row) * statistics.median(both) for row in whole],
        "rounds": number - 1,
        "speeds": [min(both), statistics.median(both), max(both)],
        "spread": [_spread(values) for values in firsts],
    }


def _spread(values: Sequence[float]) -> float:
    """Half of what lies between the quartiles, over the median."""
    if len(values) < 4:
        return 0.0
    low, middle, high = statistics.quantiles(values, n=4)
    return (high - low) / 2 / middle


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line: the work as JSON on stdin."""
    parser = argparse.ArgumentParser(prog="python -m scripts.bench.probes.vllm.steptime_probe", description=__doc__)
    parser.add_argument("--work", required=True, help="JSON: cells, rollouts, rounds, seconds")
    options = parser.parse_args(arguments)
    os.environ.update(STOCK_ENVIRONMENT)
    os.environ["VLLM_PLUGINS"] = ""
    with tempfile.TemporaryDirectory(prefix="rl-coserve-probe-") as folder:
        engine = make_engine(Path(folder))
        result = measure(engine, json.loads(options.work))
    print(json.dumps({**result, "pid": os.getpid()}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
