"""A whole run (vLLM, Megatron-Core, Ray, Mooncake) scored by a judge with streamed layers, which the run starts itself and which
is killed meanwhile (RollPacker 4.3). On a CPU; the judge is made of nothing, and says one of two scores."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from orchestrator.ledger import recount
from orchestrator.store import read_trajectories
from tests.support.real_runs import of
from tests.support.tiny_judge import LAYERS, write_judge

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
SETTINGS = [
    "run.name=t",
    "run.steps=3",
    "run.mode=sync_plus",
    "rollout.alpha=0",
    "model.hidden_size=64",
    "model.intermediate_size=128",
    "rollout.groups_per_step=4",
    "rollout.dynamic_sampling=false",
    "rollout.group_size=4",
    "rollout.redundant_groups=1.0",
    "rollout.environments=16",
    "trainer.micro_batch_size=8",
    "evaluation.prompts=4",
    "evaluation.every=0",
    "warmup.steps=5",
    "reward.timeout=60",
    'reward.judge.criterion="It is good."',
    'reward.judge.template="{criterion} {episode} {form}"',
    "reward.judge.max_tokens=8",
    "reward.judge.streamed.dtype=float32",
]


def test_a_run_starts_its_streamed_judge_and_brings_it_back_when_it_is_killed(tmp_path: Path) -> None:
    judge = write_judge(tmp_path / "judge")
    own = [f'reward.judge.path="{judge}"', "reward.judge.streamed.memory_mb=12", f'run.folder="{tmp_path}"']
    run = tmp_path / "t-001"
    with (tmp_path / "output").open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "orchestrator.cli", "train", "examples/frozenlake.toml", *SETTINGS, *own],
            cwd=ROOT,
            stdout=output,
            stderr=output,
            env={**os.environ, "NO_COLOR": "1", "CUDA_VISIBLE_DEVICES": ""},
            start_new_session=True,
        )
    try:
        deadline = time.monotonic() + 300
        while not of(run, "step"):
            assert process.poll() is None, (tmp_path / "output").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.1)
        pids = dict(line.split() for line in (run / "processes").read_text().splitlines())
        os.kill(int(pids["judge"]), signal.SIGKILL)
        code = process.wait(timeout=200)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    said = (tmp_path / "output").read_text()
    assert code == 0, said
    (started,) = of(run, "judge")
    assert (started["device"], started["layers"], started["mps"]) == ("cpu", LAYERS, False)
    assert "no GPU" in started["why"]
    assert [event["what"] for event in of(run, "recovered")] == ["judge"]
    scored = of(run, "rewards")
    assert [event["judge_layers"] for event in scored] == [LAYERS] * 3
    assert all(0 <= event["judge_resident"] < LAYERS for event in scored), "memory for all layers: nothing was streamed"
    assert all((event["failed"], event["unreadable"]) == (0, 0) for event in scored)
    counts = recount((run / "ledger.jsonl").read_text().splitlines())
    assert (counts["trained"], counts["failed"]) == (3 * 16, 0)
    rows = read_trajectories(run / "trajectories", ["total_reward", "outcome"]).to_pylist()
    assert {round(row["total_reward"], 6) for row in rows if row["outcome"] == "trained"} <= {0.3, 0.7}
    assert not _alive(int(pids["judge"]))


def _alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()
