"""A run with engines of unequal degrees is killed and resumed: it goes on with those that it had, not with those that a run
begins with. Real vLLM (an engine over two ranks beside one of one) and Megatron-Core, in Ray actors."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from orchestrator.events import read_events
from orchestrator.ledger import recount
from tests.support.real_runs import end, of, start

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(900)]
ROOT = Path(__file__).parents[2]
STEPS = 5
RUN = [
    "run.name=t",
    f"run.steps={STEPS}",
    "model.hidden_size=64",
    "model.intermediate_size=128",
    "rollout.groups_per_step=2",
    "rollout.dynamic_sampling=false",
    "rollout.environments=16",
    "rollout.workers=3",
    "rollout.trajectory_timeout=900.0",
    "trainer.micro_batch_size=8",
    "checkpoint.every=1",
    "checkpoint.keep=99",
    "evaluation.prompts=8",
    "evaluation.every=0",
    "warmup.steps=2",
    "rollout.prediction.enabled=true",
    "rollout.prediction.in_process=true",
    "rollout.placement.enabled=true",
    "rollout.placement.degrees.enabled=true",
    "rollout.placement.degrees.speeds={1=1.0, 2=10.0}",  # no such engine is here: so that the change surely pays
]


def test_a_killed_run_goes_on_with_the_unequal_degrees_that_its_engines_had(tmp_path: Path) -> None:
    run = tmp_path / "t-001"
    first = start("examples/frozenlake.toml", *RUN, f'run.folder="{tmp_path}"')
    try:
        deadline = time.monotonic() + 400
        while kept(run) != [2, 1]:
            assert first.poll() is None, first.communicate()[0]
            assert time.monotonic() < deadline, "no checkpoint ever had other degrees than the first"
            time.sleep(0.05)
    finally:
        end(first)
    before = of(run, "reshape")
    assert [(event["degrees"], event["error"]) for event in before] == [([2, 1], "")]
    assert of(run, "degrees")[0]["degrees"] == [1, 1, 1], "what this config begins with"

    second = start("--resume", str(run))
    try:
        output, _ = second.communicate(timeout=400)
    finally:
        end(second)
    assert second.returncode == 0, output

    events = list(read_events(run / "events.jsonl"))
    again = max(index for index, event in enumerate(events) if event["kind"] == "run_start")
    assert 1 <= events[again]["resumed_from"] < STEPS
    after = [event for event in events[again:] if event["kind"] == "degrees"]
    assert [event["degrees"] for event in after] == [[2, 1]] * len(after)
    assert after[0]["cost"] == before[0]["seconds"], "what changes cost is known after a resume"
    assert of(run, "reshape") == before, "nothing was cut anew"
    counted = recount((run / "ledger.jsonl").read_text().splitlines())
    ends = ("trained", "evicted_stale", "aborted_redundant", "deferred", "filtered", "failed", "in_flight")
    assert counted["started"] == sum(counted[name] for name in ends)
    assert json.loads((run / "summary.json").read_text())["steps"] == STEPS


def kept(run: Path) -> list[int]:
    """The degrees in the newest checkpoint."""
    newest = max((run / "checkpoints").glob("step-*/state.json"), default=None)
    if newest is None:
        return []
    found: list[int] = (json.loads(newest.read_text(encoding="utf-8"))["degrees"] or {}).get("degrees", [])
    return found
