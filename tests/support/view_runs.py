"""Run folders and live records for the tests of views: no engine, but the lines that a real run writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.support.report_runs import SyntheticRun, write_run

__all__ = ["LIVE", "SyntheticRun", "write_run", "write_unfinished"]

LIVE: dict[str, Any] = {
    "t": 100.0,
    "stages": [["get_batch", 12, 99.0], ["train_step", 11, 99.5]],
    "waiting_for": "5 of 8 groups complete; 41 in generation, 9 in environment step",
    "in_flight": 64,
    "buffered": 27,
    "tokens": 12345,
    "version": 12,
    "queue": 5,
    "ledger": {
        "started": 800, "trained": 700, "evicted_stale": 4, "aborted_redundant": 0, "deferred": 0, "filtered": 0,
        "failed": 5, "in_flight": 91, "failed_by_cause": {"environment_timeout": 5},
    },
    "reasons": {"generation": 41, "environment step": 9, "a free worker": 5, "environment reset": 6, "reward": 3},
    "trajectories": [
        {"id": f"t{place:08d}", "task": "frozenlake", "turns": place % 5, "age": 4.0 - place / 10,
         "waits": "generation" if place % 3 else "environment step", "worker": "vllm-0" if place % 3 else ""}
        for place in range(40)
    ],
    "workers": [
        {"name": "vllm-0", "state": "up", "version": 12, "requests": 32, "running": 24, "waiting": 8, "kv_used": 256,
         "kv_capacity": 1024, "tokens_per_s": 811.2, "preemptions": 0, "oldest_wait": 0.01, "running_mean": 18.4,
         "kv_mean": 0.4},
        {"name": "served-0", "state": "up", "version": 12, "requests": 3, "running": 3, "waiting": 0, "kv_used": 24,
         "kv_capacity": 128, "tokens_per_s": 96.4, "preemptions": 0, "oldest_wait": 0.0, "running_mean": 2.2,
         "kv_mean": 0.25, "pages": 37, "budget": 64, "page_bytes": 2097152, "ttft_slack": 0.412,
         "tpot_slack": -0.0312, "arriving": 0.38, "firsts": 940, "late_first": 3, "blamed_first": 1, "nexts": 15120,
         "late_next": 21, "blamed_next": 7},
        {"name": "vllm-1", "state": "coming back", "version": 11, "requests": 0},
    ],
}  # fmt: skip


def write_unfinished(folder: Path, steps: int = 40) -> Path:
    """A run in the middle, with what is under way."""
    run = SyntheticRun(folder, steps=2 * steps)
    run.start()
    run.loop(0, steps)
    run.write()
    t = max(event["t"] for event in run.events)
    live = {**LIVE, "t": t + 1.0, "stages": [["get_batch", steps, t - 0.6], ["train_step", steps - 1, t - 0.3]]}
    live["ledger"] = {**run.ledger(), "in_flight": run.counts["in_flight"]}
    (folder / "live.json").write_text(json.dumps(live))
    return folder
