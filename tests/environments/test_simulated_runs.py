"""Whole simulated runs over the pool: the ledger closes whatever environments do, the same seed gives the same bytes, and what
happened to the environments can be read afterwards."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import pytest

from orchestrator.config import Config, load_config
from orchestrator.observe.report.report_page import write_report
from orchestrator.observe.report.run_log import load_run
from orchestrator.rollout import Rollout
from orchestrator.sim.simulated_run import simulate
from orchestrator.sim.twins import SimEnvironment

SEEDS = 6


def config(*overrides: str) -> Config:
    small = [
        "run.steps=3",
        "rollout.workers=2",
        "rollout.groups_per_step=3",
        "rollout.group_size=3",
        "rollout.environments=18",
        "evaluation.prompts=4",
        "environment.backend=in-process-pool",
    ]
    return load_config(None, [*small, *overrides])


def events_of(lines: bytes, kind: str) -> list[dict[str, Any]]:
    return [event for event in map(json.loads, lines.decode().splitlines()) if event["kind"] == kind]


def test_a_pool_smaller_than_the_rollout_makes_it_wait_and_says_so() -> None:
    result = simulate(config("environment.size=5", "environment.warm=1"))
    pools = events_of(result.events, "environments")
    assert len(pools) == 3
    assert pools[-1]["size"] == pools[-1]["started"] == 5
    assert pools[-1]["episodes"] >= result.ledger["started"]
    assert pools[-1]["wait_seconds"] > 0
    assert {pool["waiting_for"] for pool in pools} <= {
        "",
        "a free environment, all in use",
        "an environment to be renewed",
    }
    assert result.ledger["failed"] == 0
    unpooled = simulate(config("environment.backend=in-process"))
    assert events_of(unpooled.events, "environments") == []


@pytest.mark.parametrize("seed", range(SEEDS))
def test_under_faults_every_trajectory_over_the_pool_is_accounted_for(seed: int) -> None:
    options = ["sim.fault_rate=0.04", f"run.seed={seed}", "environment.size=6", "environment.warm=2"]
    first = simulate(config(*options, "environment.max_episodes=5"))
    assert not first.violations
    if seed == 0:
        again = simulate(config(*options, "environment.max_episodes=5"))
        assert (first.events, first.journal) == (again.events, again.journal)


def test_an_environment_that_changes_in_mid_run_is_an_alarm(monkeypatch: pytest.MonkeyPatch) -> None:
    made = 0

    def version(_: SimEnvironment) -> str:
        nonlocal made
        made += 1
        return "sim-1" if made < 20 else "sim-2"

    monkeypatch.setattr(SimEnvironment, "version", property(version))
    result = simulate(config("environment.backend=in-process"))
    alarms = events_of(result.events, "alarm")
    assert [alarm["detail"] for alarm in alarms] == ["task sim: 'sim-2' beside 'sim-1'"]


@pytest.mark.usefixtures("undrawn")
def test_the_report_shows_the_pool(tmp_path: Path) -> None:
    simulate(config("environment.size=5", "sim.fault_rate=0.05", "sim.faults=['drop','duplicate']"), tmp_path)
    run = load_run(tmp_path)
    assert run.pool[-1].replaced["misbehaved"] > 0
    page = write_report(tmp_path).read_text()
    assert "Did the environments hold?" in page
    assert "misbehaved, hung or was cut off" in page
    events = tmp_path / "events.jsonl"
    counts = {"calls": 7, "failed": 1, "retries": 2, "refused_burst": 0, "cold_starts": 1, "cold_seconds": 0.5}
    tools = {"kind": "tools", "t": 1.0, "step": 0, "tools": {"calculator": counts}}
    events.write_text(events.read_text() + json.dumps(tools) + "\n")
    assert "calculator" in write_report(tmp_path).read_text()


@pytest.mark.parametrize("meaning", ["failed", "truncated", "partial"])
def test_a_simulated_time_limit_means_what_the_run_says(meaning: str) -> None:
    slow = [
        "sim.environment_seconds_mean=4.0",
        "sim.environment_seconds_sigma=1.5",
        "rollout.environment_step_timeout=6",
    ]
    result = simulate(config(*slow, f"task.on_timeout={meaning}", "rollout.environment_reset_timeout=600"))
    assert not result.violations
    over = [event for event in events_of(result.events, "fault") if event["cause"] == "environment_timeout"]
    if meaning == "failed":
        assert result.ledger["failed_by_cause"]["environment_timeout"] > 3
    else:
        assert len(over) > 3
        assert "environment_timeout" not in result.ledger["failed_by_cause"]


def test_a_stale_answer_is_broken_off_in_its_midst(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the bound looked at between turns only, long answers were generated to their end first."""
    long = [
        "sim.turns_max=2",
        "sim.response_tokens_max=4000",
        "sim.response_tokens_mean=1000",
        "sim.environment_seconds_mean=0.01",
        "rollout.redundant_groups=4.0",
        "rollout.environments=64",
    ]
    shape = [*long, "run.steps=12", "run.seed=3", "environment.size=64", "rollout.engine.max_model_len=9000"]

    def waited() -> list[float]:
        """Seconds between the update that made a trajectory stale and its end, one each."""
        result = simulate(config(*shape))
        assert not result.violations
        moved = [event["t"] for event in events_of(result.events, "step")]
        ends = [
            line["t"]
            for line in map(json.loads, result.journal.decode().splitlines())
            if line["state"] == "evicted_stale"
        ]
        return [min(end - moment for moment in moved if moment <= end) for end in ends]

    now = waited()
    assert len(now) > 5
    monkeypatch.setattr(Rollout, "set_version", lambda self, version: self.buffer.set_version(version))
    assert statistics.mean(now) < 0.2 * statistics.mean(waited())


@pytest.mark.parametrize("backend", ["in-process", "in-process-pool"])
def test_simulated_prompts_begin_from_templates_and_none_gets_another_s(backend: str) -> None:
    shape = ["sim.templates=3", f"environment.backend={backend}", "environment.size=5", "environment.warm=2"]
    result = simulate(config(*shape))
    assert not result.violations
    assert result.ledger["failed"] == 0
    if backend != "in-process":
        assert events_of(result.events, "environments")[-1]["replaced"].get("template", 0) > 0
    faulty = simulate(config(*shape, "sim.fault_rate=0.04"))
    assert not faulty.violations
    assert sum(faulty.injected.values()) > 0
