"""The example of docs/agents.md in a whole run: agent programs in sandboxes, vLLM, Megatron-Core, Ray, Mooncake."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator.events import read_events
from orchestrator.ledger import recount
from orchestrator.store import read_trajectories

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]


def test_agents_that_know_only_a_base_url_are_trained_on(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "orchestrator.cli", "train", "examples/agents.toml"]
    options = ["run.name=t", "run.steps=3", f'run.folder="{tmp_path}"']
    with (tmp_path / "output").open("wb") as output:
        process = subprocess.Popen([*command, *options], cwd=ROOT, stdout=output, stderr=output, start_new_session=True)
        try:
            code = process.wait(timeout=500)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    said = (tmp_path / "output").read_text()
    assert code == 0, said
    run = tmp_path / "t-001"
    steps = [event for event in read_events(run / "events.jsonl") if event["kind"] == "step"]
    assert [step["version"] for step in steps] == [1, 2, 3]
    assert max(step["metrics"]["logprob_gap_mean"] for step in steps) < 1e-3  # the trainer sees what the engine sampled
    assert max(int(lag) for step in steps for lag in step["lag"]) <= 1
    ledger = steps[-1]["ledger"]
    assert not ledger["failed_by_cause"], said
    counted = recount((run / "ledger.jsonl").read_text().splitlines())
    assert counted["trained"] == 3 * 4 * 4
    rows = read_trajectories(run / "trajectories").to_pylist()
    trained = [row for row in rows if row["outcome"] == "trained"]
    assert len(trained) == counted["trained"]
    assert {row["task"] for row in trained} == {"agent"}
    assert len({row["total_reward"] for row in trained}) > 1
    assert all(row["total_reward"] == row["turns"][-1]["reward_step"] for row in trained)
