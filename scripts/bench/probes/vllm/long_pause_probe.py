"""What shutting out old KV costs inside the pause of an update, with many long requests in flight: hashes, blocks, seconds.

``python -m scripts.bench.probes.vllm.long_pause_probe --requests 256 --tokens 32768``; JSON on the last line. vLLM's scheduler
with our hooks and no model: all prompts are computed in one step by assumption, so lengths are simulated and what the scheduler
does is real. Each way is a scheduler of its own: ``chosen`` as an engine does it (a flush above
``vllm_rlplugin.scheduler.REHASH_TOKENS`` tokens), ``salt``: a new salt whatever it costs. ``hashes``: of blocks, between SUSPEND
and RESUME; ``after``: in the first step behind it.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from scripts.bench.probes.vllm.bare_scheduler import BLOCK, build_scheduler, make_request
from scripts.bench.probes.vllm.recompute_probe import write_tiny_qwen3


def measure(model: Path, requests: int, tokens: int, always_salt: bool) -> dict[str, Any]:
    """One update."""
    from vllm.utils.hashing import sha256
    from vllm.v1.core.sched.interface import PauseState
    from vllm.v1.outputs import ModelRunnerOutput

    from vllm_rlplugin import scheduler as ours

    hashes = [0]

    def counting(value: Any) -> bytes:
        hashes[0] += 1
        return bytes(sha256(value))

    length = tokens + 2 * BLOCK
    scheduler, hasher = build_scheduler(
        model,
        requests=requests,
        tokens=requests * length,
        length=length,
        blocks=requests * (length // BLOCK + 1) + 64,
        plugin={},
        hashing=counting,
    )
    for number in range(requests):
        prompt = [1 + (31 * number + at) % 499 for at in range(tokens)]
        scheduler.add_request(make_request(f"r{number}", prompt, BLOCK, hasher))

    def step() -> int:
        output = scheduler.schedule()
        names = list(output.num_scheduled_tokens)
        at = {name: place for place, name in enumerate(names)}
        scheduler.update_from_output(output, ModelRunnerOutput(names, at, [[7] for _ in names]))
        return len(names)

    if step() != requests:
        raise RuntimeError("not every request is in the first step")
    step()
    gc.collect()
    gc.freeze()
    limit, ours.REHASH_TOKENS = ours.REHASH_TOKENS, sys.maxsize if always_salt else ours.REHASH_TOKENS
    before, begun, clock = hashes[0], time.thread_time(), time.perf_counter()
    scheduler.set_pause_state(PauseState.PAUSED_ALL)
    answer = scheduler.rl_command("advance_version", {"version": 1})
    scheduler.set_pause_state(PauseState.UNPAUSED)
    inside, seconds, clock = hashes[0] - before, time.thread_time() - begun, time.perf_counter() - clock
    ours.REHASH_TOKENS = limit
    step()
    return {
        "how": answer["how"],
        "hashes": inside,
        "hashes_per_request": inside / requests,
        "after": hashes[0] - before - inside,
        "seconds": seconds,
        "clock_seconds": clock,
        "preempted": answer["preempted"],
    }


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=32768)
    options = parser.parse_args()
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder, "model")
        write_tiny_qwen3(model, 1)
        ways = {name: measure(model, options.requests, options.tokens, name == "salt") for name in ("chosen", "salt")}
    found = {"requests": options.requests, "tokens": options.tokens, "block": BLOCK, "ways": ways, "pid": os.getpid()}
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
