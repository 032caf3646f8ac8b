"""A whole run whose two engines of one device become one of two between steps: real vLLM and Megatron-Core, in Ray actors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator.events import read_events
from orchestrator.ledger import recount

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(900)]
ROOT = Path(__file__).parents[2]
RUN = [
    "model.hidden_size=64",
    "model.intermediate_size=128",
    "rollout.groups_per_step=2",
    "rollout.dynamic_sampling=false",
    "rollout.environments=16",
    "rollout.workers=2",
    "rollout.trajectory_timeout=900.0",
    "trainer.micro_batch_size=8",
    "evaluation.prompts=8",
    "evaluation.every=0",
    "warmup.steps=2",
    "run.steps=3",
    "rollout.prediction.enabled=true",
    "rollout.prediction.in_process=true",
    "rollout.placement.enabled=true",
    "rollout.placement.degrees.enabled=true",
    "rollout.placement.degrees.speeds={1=1.0, 2=10.0}",  # no such engine is here: so that the change surely pays
]


@pytest.mark.parametrize("more", [[], ["resources.pools={H800 = 1, H20 = 2}"]], ids=["no pools", "pools"])
def test_a_run_cuts_its_engines_anew_charges_what_it_took_and_accounts_for_every_trajectory(
    tmp_path: Path, more: list[str]
) -> None:
    command = [sys.executable, "-m", "orchestrator.cli", "train", "examples/frozenlake.toml", *RUN]
    done = subprocess.run(
        [*command, *more, f'run.folder="{tmp_path}"', "run.name=t"],
        cwd=ROOT,
        env={**os.environ, "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    folder = tmp_path / "t-001"
    events = list(read_events(folder / "events.jsonl"))
    decided = [event for event in events if event["kind"] == "degrees"]
    changes = [event for event in events if event["kind"] == "reshape"]
    assert [(event["degrees"], event["next"]) for event in decided][:2] == [([1, 1], [2]), ([2], [2])]
    assert len(decided) == 3
    assert [(event["step"], event["degrees"], event["tp"], event["error"]) for event in changes] == [(0, [2], 2, "")]
    assert decided[0]["cost"] == 0.0
    assert decided[1]["cost"] == changes[0]["seconds"] > 1.0, "what it took is what the next change is charged with"
    if more:
        bound = [(event["worker"].partition("/")[2], event["hardware"]) for event in events if event["kind"] == "bound"]
        assert bound == [("trainer", "H800"), ("engines", "H20")]
    faults = [event for event in events if event["kind"] == "fault"]
    assert not faults, faults
    counted = recount((folder / "ledger.jsonl").read_text().splitlines())
    ends = ("trained", "evicted_stale", "aborted_redundant", "deferred", "filtered", "failed", "in_flight")
    assert counted["started"] == sum(counted[name] for name in ends)
    assert counted["failed"] == 0
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["steps"] == 3
    assert "Degrees of parallelism" in (folder / "report.html").read_text()
