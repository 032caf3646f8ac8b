"""A whole run whose environments are in two shard processes: real engines, a real trainer, a tiny model on a CPU."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from orchestrator.ledger import END_STATES, recount
from tests.support.real_runs import end, of, start

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(540)]
STEPS = 5
SMALL = [
    "examples/frozenlake.toml",
    "model.hidden_size=64",
    "model.intermediate_size=128",
    "run.name=t",
    f"run.steps={STEPS}",
    "rollout.shards=2",
    "rollout.groups_per_step=4",
    "rollout.group_size=4",
    "rollout.environments=32",
    "rollout.dynamic_sampling=false",  # nothing is learned here: 24 groups a step would be replaced
    "trainer.micro_batch_size=4",
    "checkpoint.every=2",
    "evaluation.prompts=4",
    "evaluation.every=0",
    "warmup.steps=2",
]


def test_a_run_in_shards_trains_while_one_of_them_is_killed(tmp_path: Path) -> None:
    process = start(*SMALL, f"run.folder={tmp_path}")
    run, deadline = tmp_path / "t-001", time.monotonic() + 400
    try:
        while len(of(run, "step")) < 2 and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.1)
        assert process.poll() is None, process.communicate()[0][-3000:]
        pids = dict(line.split() for line in (run / "processes").read_text(encoding="utf-8").splitlines())
        os.kill(int(pids["shard-1"]), signal.SIGKILL)
        said, _ = process.communicate(timeout=400)
        assert process.returncode == 0, said[-3000:]
    finally:
        end(process)
    (last,) = of(run, "run_end")
    assert (last["status"], last["ledger"]["in_flight"]) == ("completed", 0)
    assert len(of(run, "step")) == STEPS
    assert {event["version"] for event in of(run, "update")} >= {0, STEPS - 1}
    assert "shard 1" in [event["what"] for event in of(run, "fault")]
    assert not Path(f"/proc/{pids['shard-0']}").exists()
    counted = recount((run / "ledger.jsonl").read_text(encoding="utf-8").splitlines())
    assert counted["started"] == sum(counted[state] for state in END_STATES) > STEPS * 16
    assert counted["trained"] == STEPS * 16
