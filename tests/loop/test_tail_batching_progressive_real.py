"""Rounds that go by the run's own forecasts (`predict = "progressive"`) in a whole run: real vLLM, Megatron-Core, Ray.

The data set is so small that prompts come again. The run is killed in its second epoch and resumed; what was forecast of each
prompt, and who waited for a long round unplayed, is read from checkpoints, journal and event log alone.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from orchestrator.events import read_events
from orchestrator.sim.run_audit import account_epochs
from scripts.bench.papers.run_figures import epochs_done
from tests.support.real_runs import end, start

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
EPOCH, STEPS = 18, 12
TASK = f'''
"""FrozenLake with {EPOCH} training maps."""

from orchestrator.tasks.frozenlake import FrozenLakeTask


class SmallLake(FrozenLakeTask):
    def __init__(self, heldout_maps=300):
        super().__init__(heldout_maps)
        self._training = self._training[:: len(self._training) // {EPOCH}][:{EPOCH}]
        self.epoch_prompts = len(self._training)
'''
SETTINGS = [
    "run.name=t",
    f"run.steps={STEPS}",
    "run.mode=sync_plus",
    "task.name=small_lake:SmallLake",
    "rollout.alpha=0",
    "model.hidden_size=64",
    "model.intermediate_size=128",
    "rollout.groups_per_step=4",
    "rollout.group_size=4",
    "rollout.redundant_groups=1.0",
    "rollout.environments=32",
    "rollout.dynamic_sampling=false",  # nothing is learned here: 24 groups a step would be replaced
    "rollout.rounds.enabled=true",
    "rollout.rounds.eta_prompts=1.5",
    "rollout.rounds.predict=progressive",
    "rollout.prediction.enabled=true",
    "trainer.micro_batch_size=8",
    "checkpoint.every=1",
    "checkpoint.keep=99",
    "evaluation.prompts=20",
    "evaluation.every=0",
    "warmup.steps=5",
]


def test_prompts_that_a_real_runs_forecasts_call_long_wait_unplayed_and_a_resumed_run_still_knows_them(
    tmp_path: Path,
) -> None:
    (tmp_path / "small_lake.py").write_text(TASK, encoding="utf-8")
    run = tmp_path / "t-001"
    first = start("examples/frozenlake.toml", *SETTINGS, f'run.folder="{tmp_path}"', path=tmp_path)
    try:
        deadline = time.monotonic() + 400
        while newest_step(run) < 1 + EPOCH // 4:  # in the second epoch
            assert first.poll() is None, first.communicate()[0]
            assert time.monotonic() < deadline, "the second epoch never began"
            time.sleep(0.05)
    finally:
        end(first)
    second = start("--resume", str(run), path=tmp_path)
    try:
        output, _ = second.communicate(timeout=400)
    finally:
        end(second)
    assert second.returncode == 0, output

    events = list(read_events(run / "events.jsonl"))
    again = max(index for index, event in enumerate(events) if event["kind"] == "run_start")
    resumed_from = events[again]["resumed_from"]
    assert EPOCH // 4 < resumed_from < STEPS
    before, after = known_at(run, resumed_from), known_at(run, STEPS)
    assert len(before) == EPOCH, "something is known of every prompt that was played"
    assert len(set(before.values())) > EPOCH // 3, "forecasts differ"
    assert set(before) == set(after)
    assert before != after, "the resumed run learns on"
    rounds = [event for event in events if event["kind"] == "round"]
    assert not any(event["diverted"] for event in rounds if event["step"] < 2), (
        "nothing is known before they were played"
    )
    late = [event for event in events[again:] if event["kind"] == "round"]
    assert sum(event["diverted"] for event in late) > 0, "nobody waited for a long round unplayed"
    assert {event["round"] for event in rounds} == {"short", "long"}
    assert all(event["kept"] == 4 and event["lost"] == 0 for event in rounds)
    assert not [event for event in events if event["kind"] in ("fault", "alarm")]

    last = planner_at(run, STEPS)
    left = [*last["again"], *last["ready"], *(number for number, _ in (*last["queue"], *last["running"]))]
    journal = (run / "ledger.jsonl").read_text(encoding="utf-8").splitlines()
    found = account_epochs(journal, EPOCH, left, last["given_up"], last["next"])
    assert not found.violations
    assert len(found.trained) == STEPS * 4
    assert epochs_done(found, EPOCH) == 2


def newest_step(run: Path) -> int:
    return max((int(folder.name[-6:]) for folder in (run / "checkpoints").glob("step-*")), default=0)


def rounds_at(run: Path, step: int) -> dict[str, Any]:
    """What the checkpoint of a step says of rounds."""
    text = (run / "checkpoints" / f"step-{step:06d}" / "state.json").read_text(encoding="utf-8")
    found: dict[str, Any] = json.loads(text)["rounds"]
    return found


def known_at(run: Path, step: int) -> dict[str, float]:
    """The longest that was forecast of each prompt, by key."""
    found: dict[str, float] = rounds_at(run, step)["lengths"]["history"]
    return found


def planner_at(run: Path, step: int) -> dict[str, Any]:
    found: dict[str, Any] = rounds_at(run, step)["planner"]
    return found
