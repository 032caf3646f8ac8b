"""Short and long rounds (RollPacker 3) in a whole run with real engines: vLLM, Megatron-Core, Ray, Mooncake, HTTP rewards.

The orchestrator is killed in the middle of the run, while prompts are queued, and the run is resumed. What became of each
prompt is read from the journal and the event log alone.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from orchestrator.checkpoint import verify
from orchestrator.events import read_events
from orchestrator.sim.run_audit import account_epochs
from scripts.bench.papers.run_figures import epochs_done
from tests.support.real_runs import end, of, start

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
EPOCH, STEPS, KILL_AFTER = (
    22,
    8,
    3,
)  # four short rounds draw 20 of 22 prompts and put four off: a long round, then the rest
SETTINGS = [
    "run.name=t",
    f"run.steps={STEPS}",
    "run.mode=sync_plus",
    "rollout.alpha=0",
    "model.hidden_size=64",
    "model.intermediate_size=128",
    "rollout.groups_per_step=4",
    "rollout.dynamic_sampling=false",
    "rollout.group_size=4",
    "rollout.redundant_groups=1.0",
    "rollout.environments=32",
    "rollout.rounds.enabled=true",
    "rollout.rounds.eta_prompts=1.5",
    f"rollout.rounds.epoch_prompts={EPOCH}",
    "trainer.micro_batch_size=8",
    "checkpoint.every=1",
    "checkpoint.keep=99",
    "evaluation.prompts=20",
    "evaluation.every=0",
    "warmup.steps=5",
]


def test_each_prompt_is_trained_once_an_epoch_though_the_run_is_killed_with_prompts_in_the_long_prompt_queue(
    tmp_path: Path,
) -> None:
    run = tmp_path / "t-001"
    first = start("examples/frozenlake.toml", *SETTINGS, f'run.folder="{tmp_path}"')
    try:
        deadline = time.monotonic() + 240
        while not queued_at(run, newest := newest_step(run)):
            assert first.poll() is None, first.communicate()[0]
            assert time.monotonic() < deadline, "no prompt was ever queued"
            time.sleep(0.05)
    finally:
        end(first)
    second = start("--resume", str(run))
    try:
        output, _ = second.communicate(timeout=240)
    finally:
        end(second)
    assert second.returncode == 0, output

    resumed_from = of(run, "run_start")[-1]["resumed_from"]
    assert newest <= resumed_from < STEPS
    queued = queued_at(run, resumed_from)
    assert queued, "nothing was in the queue when the run was killed: the test proves nothing"

    events = read_events(run / "events.jsonl")
    again = max(index for index, event in enumerate(events) if event["kind"] == "run_start")
    rounds = [event for event in events[again:] if event["kind"] == "round"]
    assert [event["number"] for event in rounds] == list(range(rounds[0]["number"], rounds[0]["number"] + len(rounds)))
    assert {event["round"] for event in of(run, "round")} == {"short", "long"}
    assert any(event["round"] == "long" and not event["closing"] for event in of(run, "round")), "a batch was queued"
    assert sum(event["deferred"] for event in of(run, "round")) >= 4
    assert all(event["kept"] == 4 and event["lost"] == 0 for event in of(run, "round"))

    last = planner_at(run, STEPS)
    left = [*last["again"], *last["ready"], *(number for number, _ in (*last["queue"], *last["running"]))]
    journal = (run / "ledger.jsonl").read_text(encoding="utf-8").splitlines()
    found = account_epochs(journal, EPOCH, left, last["given_up"], last["next"])
    assert not found.violations
    assert len(found.trained) == STEPS * 4
    assert epochs_done(found, EPOCH) == 1
    lines = [json.loads(line) for line in journal if line.endswith("}")]
    starts = {line["id"]: line["prompt"] for line in lines if line["state"] == "running"}
    put_off = {starts[line["id"]] for line in lines if line["state"] == "deferred" and not line.get("cause")}
    for number in queued:
        assert number in put_off
        assert found.trained[number] >= resumed_from, f"prompt {number} waited in the queue and was trained before"

    done = subprocess.run(
        [sys.executable, "-m", "orchestrator.cli", "report", str(run), "--json"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=True,
    )
    said = json.loads(done.stdout)["rounds"]
    assert said["kinds"]["short"]["rounds"] >= 4
    assert said["kinds"]["long"]["rounds"] >= 1
    assert said["thrown_away"] > 0
    assert "What did the long tail cost?" in (run / "report.html").read_text(encoding="utf-8")


def newest_step(run: Path) -> int:
    return max((int(folder.name[-6:]) for folder in (run / "checkpoints").glob("step-*")), default=0)


def queued_at(run: Path, step: int) -> list[int]:
    """The long-prompt queue in the checkpoint of a step; none before the first step."""
    return [number for number, _ in planner_at(run, step)["queue"]] if step else []


def planner_at(run: Path, step: int) -> dict[str, Any]:
    """What the checkpoint of a step says of the prompts."""
    folder = run / "checkpoints" / f"step-{step:06d}"
    assert not verify(folder)
    planner: dict[str, Any] = json.loads((folder / "state.json").read_text(encoding="utf-8"))["rounds"]["planner"]
    return planner
