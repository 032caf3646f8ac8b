"""What a scheduler's step costs in a KV pool, and stock's beside it: the same requests in both, step by step in turn.

``python -m scripts.bench.probes.vllm.pool_step_probe --requests 1024 --steps 600``; JSON on the last line. vLLM's own schedulers,
a real ledger and real mapped host memory; no model: each request that a step has gets one token. A step is what the engine's loop
asks of a scheduler: schedule, the look while the batch computes, and the outputs. Three engines of a pool, each beside a stock
one of its own:

* ``serving``: with a rollout engine in its pool, so that it publishes its slack;
* ``rollout``: beside a serving engine that does not limit it (``--rl-kv-pool-admission none``);
* ``admitted``: beside one that admits 512 tokens per step; stock has that as ``--max-num-batched-tokens``.

Seconds of the thread's processor time, and of the clock. ``threads``: processor time of this process's other threads (the serving
engine's guardian) while its steps ran.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from scripts.bench.probes.vllm.bare_scheduler import BLOCK, build_scheduler, make_request
from scripts.bench.probes.vllm.recompute_probe import write_tiny_qwen3

BLOCK_BYTES, PAGE = 256, 4096  # 16 blocks lie in a page
PROMPT = 40
_LIMITED = 512


class Loop:
    """One scheduler with its requests. ``plugin``: of an engine in a pool; None: stock's."""

    def __init__(self, model: Path, requests: int, steps: int, tokens: int, plugin: dict[str, Any] | None) -> None:
        from vllm.v1.outputs import ModelRunnerOutput

        from vllm_rlplugin.kvpool.engine import pool_engine
        from vllm_rlplugin.options import PluginOptions

        self._output = ModelRunnerOutput
        length = PROMPT + steps + 64
        blocks = requests * -(-length // BLOCK) + 512
        blocks -= blocks % (PAGE // BLOCK_BYTES)
        if plugin:
            options = PluginOptions.from_dict(plugin)
            pool_engine.set_current(pool_engine.EnginePool(options, blocks, [(0, BLOCK_BYTES)], blocks * BLOCK_BYTES))
        self.scheduler, hasher = build_scheduler(
            model, requests=requests, tokens=max(tokens, requests), length=length, blocks=blocks, plugin=plugin
        )
        if not plugin:
            self.scheduler.max_num_scheduled_tokens = tokens
        for number in range(requests):
            prompt = [1 + (number * 7 + at) % 97 for at in range(PROMPT)]
            self.scheduler.add_request(make_request(f"r{number}", prompt, length - PROMPT, hasher))

    def step(self) -> tuple[float, float, float]:
        """(processor time of this thread, of the others meanwhile, time), in seconds."""
        scheduler = self.scheduler
        begun = time.thread_time(), time.process_time(), time.perf_counter()
        output = scheduler.schedule()
        scheduler.get_grammar_bitmask(output)
        middle = time.thread_time(), time.process_time(), time.perf_counter()
        names = list(output.num_scheduled_tokens)
        requests = scheduler.requests
        made = [[7] if requests[name].num_computed_tokens >= requests[name].num_tokens else [] for name in names]
        answer = self._output(names, {name: at for at, name in enumerate(names)}, made)
        again = time.thread_time(), time.process_time(), time.perf_counter()
        scheduler.update_from_output(output, answer)
        ended = time.thread_time(), time.process_time(), time.perf_counter()
        own, every, clock = (a - b + d - c for a, b, c, d in zip(middle, begun, again, ended, strict=True))
        return own, every - own, clock


def compare(model: Path, requests: int, steps: int, role: str, stack: ExitStack) -> dict[str, Any]:
    """One engine of a pool beside stock."""
    from orchestrator.policies.serving.admission import ServingState
    from vllm_rlplugin.kvpool.engine.pool_engine import pool_path
    from vllm_rlplugin.kvpool.ledger.page_ledger import PagePool
    from vllm_rlplugin.kvpool.ledger.tenant_words import RolloutWords, ServingWords

    name = f"step-{role}-{os.getpid()}"
    path = pool_path(name)
    stack.callback(path.unlink, missing_ok=True)
    length = requests * (-(-(PROMPT + steps + 64) // BLOCK) * BLOCK_BYTES) + (64 << 20)
    size = -(-length >> 20)
    other = PagePool.create(path, size * (1 << 20) // PAGE, page_bytes=PAGE)
    shared = {"kv_pool": name, "kv_pool_page_kib": PAGE >> 10}
    if role == "serving":
        other.join("rollout", "rollout", 64)
        other.publish(RolloutWords(minimum=1).pack())
        plugin = {**shared, "kv_pool_role": "serving", "kv_pool_lent": 0.5}
        tokens = 8192
    else:
        other.join("serving", "serving")
        plugin = {**shared, "kv_pool_budget_mib": size}
        tokens = 8192 if role == "rollout" else _LIMITED
    mode = "dual" if role == "admitted" else "none"

    def say() -> None:
        """Serving has all the time of the world."""
        if role != "serving":
            state = ServingState(time.monotonic(), 10.0, 10.0, busy=True, arriving=10.0, tick=time.monotonic_ns())
            other.publish(ServingWords(state, mode).pack())  # type: ignore[arg-type]

    say()
    stock = Loop(model, requests, steps, tokens, None)
    ours = Loop(model, requests, steps, 8192 if role == "admitted" else tokens, plugin)
    for loop in (stock, ours):
        gc.freeze()
        for _ in range(
            requests * PROMPT // tokens + requests // tokens + 8
        ):  # until as many decode as a step has room for
            say()
            loop.step()
    rows = []
    gc.collect()
    gc.freeze()
    for number in range(steps):
        say()
        pair = (ours, stock) if number % 2 else (stock, ours)
        found = {loop is ours: loop.step() for loop in pair}
        rows.append((found[True], found[False]))
    ours.scheduler.shutdown()
    other.close()
    processor, clock = ([row[side][at] for row in rows] for side, at in ((0, 0), (0, 2)))
    theirs, passed = ([row[1][at] for row in rows] for at in (0, 2))
    scheduled = ours.scheduler._rl_step_requests / max(1, ours.scheduler._rl_steps)
    return {
        "ratio": sum(processor) / sum(theirs),
        "clock_ratio": sum(clock) / sum(passed),
        "median_ratio": statistics.median(processor) / statistics.median(theirs),
        "stock_ms": 1000 * statistics.median(theirs),
        "ours_ms": 1000 * statistics.median(processor),
        "worst_ms": [1000 * max(processor), 1000 * max(theirs)],
        "threads": sum(row[0][1] for row in rows) / sum(processor),
        "requests_per_step": scheduled,
        "steps": steps,
    }


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--roles", nargs="+", default=["serving", "rollout", "admitted"])
    options = parser.parse_args()
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ["VLLM_ALLOW_LONG_MAX_MODEL_LEN"] = "1"  # no model runs
    from vllm_rlplugin.engine_activation import activate

    activate(kv_pool=True)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        model = Path(folder, "model")
        write_tiny_qwen3(model, 1)
        roles = {role: compare(model, options.requests, options.steps, role, stack) for role in options.roles}
    sys.stdout.write(json.dumps({"roles": roles, "requests": options.requests, "pid": os.getpid()}) + "\n")


if __name__ == "__main__":
    main()
