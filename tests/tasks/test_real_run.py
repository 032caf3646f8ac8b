"""All bundled tasks train in one real run: vLLM, Megatron-Core, Ray, Mooncake, the function host and the sandbox."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from orchestrator.events import read_events
from orchestrator.store import read_trajectories

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
TASKS = {"nim", "household", "calculator", "coding", "reasoning_gym"}
SETTINGS = [
    "run.name=t",
    "run.steps=3",
    "task.mixture={nim=1.0, household=1.0, calculator=1.0, coding=1.0, reasoning_gym=1.0}",
    "rollout.environments=48",
    "rollout.group_size=4",
    "rollout.groups_per_step=10",
    "rollout.dynamic_sampling=false",
    "filters.balance_share=0.2",
    "task.heldout_maps=10",
    "evaluation.prompts=10",
    "evaluation.samples=2",
    "evaluation.temperature=0.8",
    "warmup.steps=12",
]


ELASTIC = ["reward.host=ray_serve", "reward.serve={cpus=0.5, max_replicas=2}", "reward.timeout=adaptive"]


@pytest.mark.parametrize("options", [[], ELASTIC], ids=["embedded", "ray serve, adaptive timeouts"])
def test_every_bundled_task_trains_with_the_real_engines(tmp_path: Path, options: list[str]) -> None:
    if options:
        pytest.importorskip("grpc_reflection", reason="Ray Serve is not installed: pip install 'rl-coserve[ray-serve]'")
    command = [sys.executable, "-m", "orchestrator.cli", "train", "examples/tasks.toml", *SETTINGS, *options]
    with (tmp_path / "output").open("wb") as output:
        process = subprocess.Popen(
            [*command, f'run.folder="{tmp_path}"'], cwd=ROOT, stdout=output, stderr=output, start_new_session=True
        )
        try:
            code = process.wait(timeout=800)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    said = (tmp_path / "output").read_text()
    assert code == 0, said
    run = tmp_path / "t-001"
    events = read_events(run / "events.jsonl")
    steps = [event for event in events if event["kind"] == "step"]
    assert len(steps) == 3
    ledger = steps[-1]["ledger"]
    assert not ledger["failed_by_cause"], said
    rows = read_trajectories(run / "trajectories", ["task", "outcome"]).to_pylist()
    trained = Counter(row["task"] for row in rows if row["outcome"] == "trained")
    assert set(trained) == TASKS
    assert sum(trained.values()) == 3 * 10 * 4
    scored = [event for event in events if event["kind"] == "rewards"][-1]
    assert scored["calls"] >= sum(trained.values())
    assert scored["failed"] == 0
    assert ("timeouts" in scored) == bool(options)
    first, _, last = (event["metrics"]["logprob_gap_mean"] for event in steps)
    assert max(first, last) < 1e-3  # the trainer sees the tokens that the engine sampled
    evaluations = [event for event in events if event["kind"] == "evaluation"]
    assert all(event["failed"] == 0 for event in evaluations)
    for event in evaluations:
        assert (event["prompts"], event["samples"]) == (10, 2)
        assert set(event["tasks"]) == TASKS
        assert event["success"] <= event["solved"]
        assert event["tokens"] > 0
