"""What the scheduler sums over its steps: vLLM's class with our hooks, driven by hand as in test_scheduler.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.bench.probes.vllm.recompute_probe import write_tiny_qwen3
from tests.vllm.test_scheduler import Harness


@pytest.mark.parametrize("run_ahead", [False, True], ids=["sync", "async"])
def test_sums_over_steps_say_what_they_were_like_when_nothing_runs_any_more(tmp_path: Path, run_ahead: bool) -> None:
    write_tiny_qwen3(tmp_path, 0)
    harness = Harness(tmp_path, run_ahead=run_ahead, seqs=4)
    before = harness.rl("snapshot")
    assert (before["steps"], before["step_requests"], before["step_kv"]) == (0, 0, 0)
    for name, prompt in (("a", 20), ("b", 40), ("c", 60)):
        harness.add(name, prompt)
    blocks = 0
    while harness.scheduler.has_requests() or harness._flight:
        computed = harness.step()
        blocks += harness.rl("snapshot")["kv_used"] if computed and not run_ahead else 0
    found, computed_steps = harness.rl("snapshot"), [step for step in harness.trace if step]
    assert (found["running"], found["kv_used"], found["shared"]) == (0, 0, None)
    assert found["steps"] == len(computed_steps) > 1
    assert found["step_requests"] == sum(len(step) for step in computed_steps)
    assert found["step_kv"] >= max(blocks, found["steps"])
    assert found["step_kv"] <= found["steps"] * found["kv_capacity"]
