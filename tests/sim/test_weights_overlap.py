"""A version travels beside the next training step (``rollout.weights_overlap``): simulated runs, in virtual time."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest

from orchestrator.api import ConfigError
from orchestrator.config import Config, load_config
from orchestrator.sim.simulated_run import SimResult, simulate

PUBLISH, UPDATE = 26.0, 6.0  # 64 GB over 20 Gbit/s; then the workers' part
ON = "rollout.weights_overlap=true"
SLOW_LINK = (f"sim.publish_seconds={PUBLISH}", f"sim.update_seconds={UPDATE}", "sim.train_seconds_per_token=0.2")


def config(*overrides: str) -> Config:
    small = ["run.steps=8", "run.mode=async", "rollout.workers=2", "rollout.groups_per_step=3", "rollout.group_size=3"]
    return load_config(None, [*small, "rollout.environments=36", "evaluation.prompts=4", *overrides])


def events(result: SimResult, kind: str) -> list[dict[str, Any]]:
    return [event for line in result.events.decode().splitlines() if (event := json.loads(line))["kind"] == kind]


def stages(result: SimResult, name: str) -> list[dict[str, Any]]:
    return [event for event in events(result, "stage") if event["stage"] == name]


def pauses(result: SimResult) -> list[float]:
    """Seconds between training steps, that the trainer does not train."""
    trained = stages(result, "train_step")
    return [after["start"] - before["end"] for before, after in itertools.pairwise(trained)]


@pytest.mark.parametrize("alpha", [1, 2, 3])
def test_where_the_trainer_is_the_bottleneck_a_step_is_as_long_as_its_training(alpha: int) -> None:
    plain = simulate(config(f"rollout.alpha={alpha}", *SLOW_LINK))
    beside = simulate(config(f"rollout.alpha={alpha}", *SLOW_LINK, ON))
    assert pauses(plain)[2:] == pytest.approx([PUBLISH + UPDATE] * 5, abs=0.1)
    assert pauses(beside)[2:] == pytest.approx([0.0] * 5, abs=0.1)
    saved = plain.summary["seconds"] - beside.summary["seconds"]
    assert saved == pytest.approx(7 * (PUBLISH + UPDATE), abs=0.1)
    for published, trained in zip(stages(beside, "publish")[1:], stages(beside, "train_step")[1:], strict=False):
        assert max(published["start"], trained["start"]) < min(published["end"], trained["end"]), "beside each other"


def test_on_a_link_slower_than_a_step_one_version_is_under_way_at_a_time() -> None:
    result = simulate(config("rollout.alpha=2", "sim.publish_seconds=300", f"sim.update_seconds={UPDATE}", ON))
    published, resumed = stages(result, "publish"), stages(result, "resume")
    assert len(published) == len(resumed) == 9
    for there, following in zip(resumed, published[1:], strict=False):
        assert following["start"] >= there["end"]
    waits = stages(result, "wait_weights")
    assert len(waits) == 7, "the first step waits for nothing"
    assert all("to be with all workers" in stage["waiting_for"] for stage in waits)


@pytest.mark.parametrize(("mode", "alpha"), [("async", 1), ("async", 2), ("areal", 1)])
def test_the_bound_of_staleness_is_exact_while_versions_travel(mode: str, alpha: int) -> None:
    """The audit of the simulator has the trainer's versions and the engines' own word; it shares no code with the bound."""
    slow = ["sim.environment_seconds_mean=8", "sim.environment_seconds_sigma=1.5", "rollout.redundant_groups=3"]
    slow += ["rollout.environment_step_timeout=1000", "rollout.trajectory_timeout=1000", "rollout.environments=60"]
    slow += ["sim.publish_seconds=40", "sim.train_seconds_per_token=0.02", f"run.mode={mode}", f"rollout.alpha={alpha}"]
    evicted, lags = 0, {}
    for seed in range(3):
        result = simulate(config(*slow, f"run.seed={seed}", ON))  # raises what the audit finds
        evicted += result.ledger["evicted_stale"]
        for event in events(result, "step"):
            lags |= event["lag"]
            if mode == "async":
                assert max(map(int, event["lag_trained"])) <= alpha + 1
    if mode == "async":
        assert max(map(int, lags)) == alpha, "the bound is reached, and not passed"
        assert evicted > 0


def test_a_relay_that_is_away_meanwhile_costs_time_and_no_trajectory() -> None:
    found: dict[str, int] = {}
    lives = 0
    for seed in range(5, 17):
        faults = [
            "sim.fault_rate=0.05",
            f"run.seed={seed}",
            "rollout.alpha=1",
            "evaluation.every=3",
            "checkpoint.every=2",
        ]
        result = simulate(config(*faults, "sim.publish_seconds=20", "sim.train_seconds_per_token=0.02", ON))
        assert result.violations == []
        assert result.ledger["in_flight"] == 0
        lives += result.lives
        for name, count in result.injected.items():
            found[name] = found.get(name, 0) + count
    for name in ("crash trainer.publish_held", "delay trainer.publish_held", "duplicate trainer.publish_held"):
        assert found.get(name), f"{name} was never injected"
    assert found.get("crash trainer.hold") or found.get("delay trainer.hold")
    assert lives > 12, "nothing was ever resumed"


def test_the_workers_keep_their_weights_while_they_are_evaluated() -> None:
    small = ["run.steps=6", "rollout.alpha=2", "evaluation.every=2", "evaluation.prompts=30", "rollout.environments=12"]
    result = simulate(config(*small, "sim.publish_seconds=1", "sim.train_seconds_per_token=0.001", ON))
    evaluated = stages(result, "evaluate")
    assert len(evaluated) >= 4
    assert sum(stage["end"] - stage["start"] > 5 for stage in evaluated) >= 4, "longer than a version takes"
    for loading in stages(result, "update"):
        for stage in evaluated:
            assert loading["end"] <= stage["start"] or loading["start"] >= stage["end"]


def test_a_checkpoint_of_a_version_that_is_on_its_way_resumes_with_it() -> None:
    """The orchestrator is killed now and then, and its trainer dies: each life publishes the version that it begins at."""
    lives = 0
    for seed in range(6):
        crash = [
            "sim.fault_rate=0.02",
            'sim.faults=["crash"]',
            f"run.seed={seed}",
            "rollout.alpha=1",
            "checkpoint.every=1",
        ]
        result = simulate(config(*crash, "sim.publish_seconds=30", "sim.train_seconds_per_token=0.02", ON))
        lives += result.lives
        assert [event["step"] for event in events(result, "step")][-1] == 7
    assert lives > 8


@pytest.mark.parametrize(
    ("given", "field", "why"),
    [
        (["run.mode=sync", "rollout.alpha=0"], "weights_overlap", "'async' and 'areal'"),
        (["run.mode=sync_plus", "rollout.alpha=0"], "weights_overlap", "no trajectory is in progress"),
        (["run.mode=one_off", "rollout.alpha=1"], "weights_overlap", "one version"),
        (["rollout.alpha=0"], "rollout.alpha", "alpha"),
        (["rollout.weights=collective"], "weights_overlap", "set rollout.weights = 'relay'"),
        (["rollout.planner.enabled=true"], "weights_overlap", "rollout.planner re-divides engines"),
        (
            [
                "rollout.prediction.enabled=true",
                "rollout.placement.enabled=true",
                "rollout.placement.degrees.enabled=true",
                "rollout.placement.degrees.speeds={1 = 1.0, 2 = 0.7}",
            ],
            "weights_overlap",
            "rollout.placement.degrees re-divides engines",
        ),
    ],
)
def test_what_needs_the_workers_to_have_a_version_first_is_refused(given: list[str], field: str, why: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config(*given, ON)
    assert field in str(caught.value)
    assert why in str(caught.value)
