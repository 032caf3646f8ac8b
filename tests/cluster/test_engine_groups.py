"""A whole run whose engines are of two kinds: one of them over two devices, with options of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import real_runs

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(600)]
GROUPS = "[{kv_cache_mb=64, max_num_seqs=4}, {tensor_parallel_size=2, kv_cache_mb=32, enable_prefix_caching=false}]"
RUN = ["examples/frozenlake.toml", "rollout.engine={}", f"rollout.engines={GROUPS}", "run.steps=3", "warmup.steps=2"]
RUN += [
    "evaluation.prompts=4",
    "rollout.environments=16",
    "rollout.dynamic_sampling=false",  # nothing is learned here: 24 groups a step would be replaced
    "rollout.groups_per_step=4",
    "rollout.routing.policy=round-robin",
]


@pytest.mark.parametrize("weights", ["relay", "collective"])
def test_a_run_uses_engines_of_one_and_of_two_devices_side_by_side(weights: str, tmp_path: Path) -> None:
    process = real_runs.start(*RUN, f"run.folder={tmp_path}", f"rollout.weights={weights}")
    try:
        said, _ = process.communicate(timeout=500)
    finally:
        real_runs.end(process)
    assert process.returncode == 0, said[-3000:]
    run = next(tmp_path.glob("*-001"))
    last = real_runs.of(run, "run_end")[-1]
    assert (last["status"], last["ledger"]["in_flight"]) == ("completed", 0)
    assert not real_runs.of(run, "fault")
    workers = real_runs.of(run, "worker")
    assert {event["version"] for event in workers if event["name"] == "vllm-1"} >= {1, 2, 3}
    assert all(event["prefix_hits"] == 0 for event in workers if event["name"] == "vllm-1")
    assert any(event["prefix_hits"] > 0 for event in workers if event["name"] == "vllm-0")
    turns = (run / "turns.jsonl").read_text(encoding="utf-8")
    assert '"vllm-0"' in turns
    assert '"vllm-1"' in turns
