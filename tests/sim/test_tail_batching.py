"""Short and long rounds in whole simulated runs: each prompt once an epoch, in every mode, under faults, and when it is killed.

Every run is also checked from outside by the simulator's audit, and the journal by :mod:`orchestrator.sim.run_audit`.
The mutations at the end break the rounds on purpose: each must be found.
"""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from orchestrator.config import Config, load_config
from orchestrator.observe.report.report_page import render_report
from orchestrator.observe.report.run_log import load_run
from orchestrator.observe.report.summary import summary_of
from orchestrator.policies.batching.round_planner import RoundPlanner
from orchestrator.rollout import Rollout
from orchestrator.sim.run_audit import account_epochs
from orchestrator.sim.simulated_run import SimResult, SimulationFailed, simulate
from orchestrator.tail_batching import Rounds
from scripts.bench.micro import ledger_faults
from scripts.bench.papers.run_figures import epochs_done

MODES = [("sync", 0), ("sync_plus", 0), ("one_off", 1), ("areal", 1), ("async", 1), ("async", 2)]
EPOCH = 18


def config(mode: tuple[str, int], *overrides: str) -> Config:
    """Long-tailed episodes; the 9 steps of 4 prompts are two epochs of 18."""
    return load_config(
        None,
        [
            f"run.mode={mode[0]}",
            f"rollout.alpha={mode[1]}",
            "run.steps=9",
            "rollout.workers=2",
            "rollout.groups_per_step=4",
            "rollout.group_size=4",
            "rollout.environments=64",
            "rollout.member_refills=8",
            "rollout.environment_step_timeout=1000",
            "rollout.trajectory_timeout=1000",
            "evaluation.prompts=2",
            "rollout.rounds.enabled=true",
            f"rollout.rounds.epoch_prompts={EPOCH}",
            "sim.environment_seconds_sigma=1.0",
            *overrides,
        ],
    )


def events_of(result: SimResult, kind: str) -> list[dict[str, Any]]:
    every = [json.loads(line) for line in result.events.decode().splitlines() if line]
    return [event for event in every if event["kind"] == kind]


def journal(result: SimResult) -> list[dict[str, Any]]:
    return [json.loads(line) for line in result.journal.decode().splitlines() if line.endswith("}")]


@pytest.mark.parametrize("mode", MODES)
def test_each_prompt_is_trained_once_an_epoch_and_late_ones_in_long_rounds(mode: tuple[str, int]) -> None:
    result = simulate(config(mode))
    rounds = events_of(result, "round")
    found = account_epochs(result.journal.decode().splitlines(), EPOCH, left=range(2 * EPOCH, 100))
    assert not found.violations
    assert epochs_done(found, EPOCH) == 2
    assert sorted(found.trained) == list(range(2 * EPOCH))
    first = rounds[:3]
    assert [(event["round"], event["launched"], event["deferred"]) for event in first] == [("short", 5, 1)] * 3
    assert (rounds[3]["round"], rounds[3]["launched"], rounds[3]["deferred"]) == ("long", 4, 0)
    assert all(event["kept"] == 4 and event["lost"] == 0 for event in rounds)
    assert sum(event["thrown_away"] for event in rounds) > 0
    ends = Counter((line["state"], line.get("cause", "")) for line in journal(result))
    short = sum(event["round"] == "short" for event in rounds[:9])
    surplus = ends["aborted_redundant", "surplus"] + result.ledger["evicted_stale"]
    assert surplus >= short * 4, "the members beyond R0 of the prompts that were kept"
    deferred = sum(event["deferred"] for event in rounds)
    assert deferred * 4 <= ends["deferred", ""] <= deferred * 5


def test_where_rewards_wait_for_all_the_race_is_decided_by_playing() -> None:
    """In mode sync nobody is scored before everybody has ended: losers must be ended before."""
    result = simulate(config(("sync", 0), "sim.reward_seconds=5"))
    starts = {line["id"] for line in journal(result) if line["state"] == "running"}
    scored = {line["id"] for line in journal(result) if line["state"] == "scoring"}
    assert result.ledger["deferred"] > 0
    trained = result.ledger["trained"]
    assert trained == 9 * 16
    assert len(scored) == trained, "what was deferred, or is surplus, was scored all the same"
    assert len(starts) > trained * 1.2


@pytest.mark.parametrize("mode", [("sync_plus", 0), ("one_off", 1)])
def test_a_short_round_is_shorter_than_a_plain_one_and_all_rounds_together_too(mode: tuple[str, int]) -> None:
    shape = ("rollout.rounds.epoch_prompts=0", "sim.environment_seconds_sigma=1.5", "run.steps=10")
    plain = simulate(config(mode, "rollout.rounds.enabled=false", *shape))
    tail = simulate(config(mode, *shape))
    seconds = {
        kind: [e["seconds"] for e in events_of(tail, "round") if e["round"] == kind] for kind in ("short", "long")
    }
    assert len(seconds["long"]) == 2
    assert sum(seconds["short"]) / 8 < sum(seconds["long"]) / 2
    assert tail.summary["seconds"] < plain.summary["seconds"]


def test_dynamic_sampling_discards_by_design_says_how_many_and_never_queues_them() -> None:
    result = simulate(config(("sync_plus", 0), "rollout.dynamic_sampling=true", "rollout.group_size=2", "run.steps=8"))
    found = account_epochs(result.journal.decode().splitlines(), EPOCH, left=range(1000))
    events = events_of(result, "round")
    assert sum(event["discarded"] for event in events) == events[-1]["discarded_ever"] > 0
    groups: dict[int, list[str]] = {}
    for line in journal(result):
        if line["state"] == "running" and line["group"] not in groups.setdefault(line["prompt"], []):
            groups[line["prompt"]].append(line["group"])
    filtered = {line["id"] for line in journal(result) if line.get("cause") == "zero_variance"}
    gone = {line["group"] for line in journal(result) if line["state"] == "running" and line["id"] in filtered}
    for number, names in groups.items():
        assert not gone.intersection(names[:-1]), f"prompt {number} was launched again after it was discarded"
    assert not [violation for violation in found.violations if "times" in violation]


def test_no_more_than_the_cap_are_in_flight() -> None:
    capped = simulate(config(("sync_plus", 0), "rollout.rounds.max_active=6", "run.steps=4"))
    running, most = 0, 0
    for line in journal(capped):
        running += (line["state"] == "running") - (line["state"] in ("buffered", "deferred", "aborted_redundant"))
        most = max(most, running)
    assert most <= 12
    assert capped.summary["reason"] == "completed"


def test_without_rounds_nothing_speaks_of_them() -> None:
    result = simulate(config(("async", 1), "rollout.rounds.enabled=false", "run.steps=3"))
    assert not events_of(result, "round")
    assert result.ledger["deferred"] == 0
    assert not any("prompt" in line for line in journal(result))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "seeds"), [(0, 45), pytest.param(10_000, 1500, marks=[pytest.mark.long, pytest.mark.timeout(1800)])]
)
def test_no_prompt_is_lost_or_trained_twice_under_faults_kills_and_resumes(first: int, seeds: int) -> None:
    """Seeded runs of many shapes, drawn by the fault bench, those with rounds only."""
    seen: Counter[str] = Counter()
    for seed in range(first, first + seeds):
        shape = ledger_faults.config_of(seed)
        if not shape.rollout.rounds.enabled:
            continue
        result = simulate(shape, strict=False)
        assert not result.violations, f"seed {seed}: {result.violations[:3]}"
        assert result.summary["reason"] == "completed"
        rounds = events_of(result, "round")
        seen.update(event["round"] for event in rounds)
        seen.update({"lives": result.lives, "runs": 1, shape.run.mode: 1})
        for name in ("deferred", "lost", "discarded", "closing"):
            seen[name] += sum(event[name] for event in rounds)
    assert seen["runs"] > seeds / 5
    assert seen["lives"] > 2 * seen["runs"]
    modes = ("sync", "sync_plus", "one_off", "areal", "async") if seeds > 100 else ("sync", "async")
    for name in ("short", "long", "deferred", "lost", "discarded", "closing", *modes):
        assert seen[name] > 0, (name, seen)


@pytest.mark.parametrize("seed", [4334, 7415])
def test_complete_groups_that_a_resume_loses_are_played_again_before_the_next_epoch(seed: int) -> None:
    """4334: two files are lost while a complete group of the next epoch waits beside them; 7415: one of a batch that the trainer
    had, but had not begun to train, when the checkpoint was made."""
    result = simulate(ledger_faults.config_of(seed), strict=False)
    assert not result.violations
    assert "reference_lost" in result.journal.decode()


# -- mutations: each must be caught ------------------------------------------------------------------------------------


def failures(settings: Config) -> str:
    with pytest.raises(SimulationFailed) as caught:
        simulate(settings)
    return str(caught.value)


def test_a_deferred_prompt_that_is_forgotten_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def forget(self: RoundPlanner, number: int, lane: str = "") -> None:
        del self._running[number]

    monkeypatch.setattr(RoundPlanner, "defer", forget)
    assert "is missing" in failures(config(("sync_plus", 0)))


def test_a_prompt_that_is_queued_though_it_is_trained_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = RoundPlanner.handed_over

    def keep(self: RoundPlanner, numbers: list[int]) -> None:
        honest(self, numbers)
        self._again[numbers[0]] = None

    monkeypatch.setattr(RoundPlanner, "handed_over", keep)
    assert "times" in failures(config(("sync_plus", 0)))


def test_an_epoch_that_begins_before_the_one_before_it_is_done_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = RoundPlanner.begin_round

    def hasty(self: RoundPlanner) -> Any:
        if self._end is not None and self._end - self.drawn < 4:
            self._end += EPOCH
        return honest(self)

    monkeypatch.setattr(RoundPlanner, "begin_round", hasty)
    monkeypatch.setattr(RoundPlanner, "_behind", lambda self: False)
    assert "is not trained yet" in failures(config(("sync_plus", 0)))


@pytest.mark.parametrize("broken", ["resumed", pytest.param("state", marks=pytest.mark.slow)])
def test_a_queue_that_does_not_survive_a_kill_is_caught(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A resume that forgets what was in flight, and a checkpoint without the queue."""
    honest = Rounds.state

    def emptied(self: Rounds) -> dict[str, Any]:
        state = honest(self)
        return {**state, "planner": {**state["planner"], "queue": []}}

    def forgetful(self: Rounds) -> list[str]:
        self.planner._running = {}
        self._numbers = {group: n for group, n in self._numbers.items() if n in self.planner._ready}
        return []

    changed: Callable[..., Any] = emptied if broken == "state" else forgetful
    monkeypatch.setattr(Rounds, broken, changed)
    found: list[str] = []
    for seed in range(120):
        shape = ledger_faults.config_of(seed)
        if shape.rollout.rounds.enabled and not found:
            found += simulate(shape, strict=False).violations
    assert any("is missing" in line for line in found), found[:3]


def test_a_loser_that_is_not_ended_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(self: Rollout, rounds: Rounds, group_id: str) -> list[str]:
        rounds.defer(group_id, [])
        return []

    monkeypatch.setattr(Rollout, "_defer", nothing)
    settings = config(("async", 2), "sim.environment_seconds_sigma=1.5")
    assert failures(settings)


def test_a_run_tries_its_values_of_eta_first_and_stays_with_the_one_that_took_the_least() -> None:
    shape = ("rollout.rounds.epoch_prompts=0", "sim.environment_seconds_sigma=1.5", "run.steps=24")
    result = simulate(config(("sync_plus", 0), "rollout.rounds.search=[1.0, 1.25, 1.5]", *shape))
    rounds = events_of(result, "round")
    tried = [event["eta_prompts"] for event in rounds if event["round"] == "short"]
    costs = {float(eta): cost for eta, cost in rounds[-1]["search"].items()}
    assert list(costs) == [1.0, 1.25, 1.5]
    assert list(dict.fromkeys(tried)) == [1.0, 1.25, 1.5]
    best = min(costs, key=lambda eta: costs[eta])
    done = next(place for place, event in enumerate(rounds) if len(event["search"]) == 3)
    after = {event["eta_prompts"] for event in rounds[done + 1 :] if event["round"] == "short"}
    assert after == {best}
    assert best > 1.0, "with a tail as long as this one speculation pays"


# -- what it says ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_report_and_the_summary_say_what_rounds_took_and_threw_away(tmp_path: Path) -> None:
    result = simulate(config(("sync_plus", 0), "rollout.rounds.search=[1.1, 1.25]"), tmp_path)
    run = load_run(tmp_path)
    rounds = summary_of(run)["rounds"]
    assert rounds["deferred"] == sum(event["deferred"] for event in events_of(result, "round"))
    assert rounds["thrown_away"] > 0
    assert rounds["kinds"]["short"]["rounds"] + rounds["kinds"]["long"]["rounds"] == 9
    page = render_report(run)
    assert "What did the long tail cost?" in page
    assert "Seconds a prompt with eta 1.1" in page
    plain = simulate(config(("sync_plus", 0), "rollout.rounds.enabled=false", "run.steps=2"), tmp_path / "plain")
    assert plain.ledger["deferred"] == 0
    assert "long tail" not in render_report(load_run(tmp_path / "plain"))
