"""Prompts that are predicted to be long wait for a long round unplayed; each is still trained once an epoch, whatever happens."""

from __future__ import annotations

import json
from typing import Any

import pytest

from orchestrator.api import ConfigError, Prompt, RunError
from orchestrator.build import build_rounds
from orchestrator.config import Config, load_config
from orchestrator.events import EventLog, MemorySink
from orchestrator.policies.batching.round_planner import RoundPlanner, RoundRules
from orchestrator.policies.prediction.prompt_lengths import LEAST, WINDOW, ForecastLengths, LengthHistory, LongPrompts
from orchestrator.sim.run_audit import account_epochs
from orchestrator.sim.simulated_run import SimResult, SimulationFailed, simulate
from orchestrator.sim.twins import SimTask
from orchestrator.tail_batching import PromptLengths
from scripts.bench.micro import ledger_faults
from scripts.bench.papers.run_figures import epochs_done

EPOCH = 18


def prompt(name: str) -> Prompt:
    return Prompt(name, "t", 1, "")


def at_number(number: Prompt) -> float:
    """A predictor for the tests: every third prompt is long."""
    return 900.0 if int(number.key.rsplit("-", 1)[1]) % 3 == 0 else 10.0


# -- who is long -------------------------------------------------------------------------------------------------------


def test_the_longest_share_of_what_was_predicted_lately_is_long_and_nothing_before_enough_was_seen() -> None:
    lengths = {f"p{number}": float(number % 10) for number in range(100)}
    found = LongPrompts(lambda one: lengths.get(one.key))
    said = [found.is_long(prompt(f"p{number}"), 0.2) for number in range(100)]
    assert not any(said[:LEAST])
    assert [number % 10 for number in range(20, 100) if said[number]] == [8, 9] * 8
    assert not found.is_long(prompt("unknown"), 0.2)
    assert not found.is_long(prompt("p9"), 0.0), "a round without speculation puts nobody off"


def test_where_all_are_alike_none_is_long_and_what_is_kept_is_bounded() -> None:
    found = LongPrompts(lambda one: 5.0)
    assert not any(found.is_long(prompt(str(number)), 0.3) for number in range(2 * WINDOW))
    assert len(found.state()) == WINDOW
    again = LongPrompts(lambda one: 6.0)
    again.restore(found.state())
    assert again.is_long(prompt("x"), 0.3)


def test_the_history_of_a_prompt_weighs_the_newest_most_and_survives_a_checkpoint() -> None:
    history = LengthHistory()
    assert history(prompt("a")) is None
    for tokens in (100, 20):
        history.record_length(prompt("a"), tokens)
    again = LengthHistory()
    again.restore(json.loads(json.dumps(history.state())))
    assert again(prompt("a")) == 60.0


@pytest.mark.parametrize("value", [float("nan"), -1.0])
def test_a_predictor_that_fails_or_says_no_number_ends_the_run_with_its_name(value: float) -> None:
    with pytest.raises(RunError, match=r"rollout\.rounds\.predict.*prompt p-1"):
        PromptLengths("", lambda one: value).is_long(1, prompt("p-1"), 0.2)

    def broken(one: Prompt) -> float:
        raise KeyError("no such prompt")

    with pytest.raises(RunError, match="no such prompt"):
        PromptLengths("", broken).is_long(1, prompt("p-1"), 0.2)


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("no_such_module:f", "cannot be imported"),
        ("json:no_such", "json has no function 'no_such'"),
        ("json:__doc__", "not callable"),
    ],
)
def test_a_predictor_that_is_none_is_refused(setting: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        PromptLengths(setting)


# -- what a round does with it -----------------------------------------------------------------------------------------


def test_a_round_diverts_no_more_than_it_would_have_launched_beyond_its_batch() -> None:
    planner = RoundPlanner(RoundRules(4, 4, 1.5, 1.0))
    planner.begin_round()
    for _ in range(2):
        assert planner.divertible() is not None
        planner.divert()
    assert planner.divertible() is None
    with pytest.raises(ValueError, match="diverted"):
        planner.divert()
    assert [planner.launch_next() for _ in range(4)] == [2, 3, 4, 5]
    assert planner.members_wanted() == 0
    assert (planner.queue_length(), planner.drawn) == (2, 6)
    assert planner.outstanding == list(range(6))


def config(*overrides: str) -> Config:
    return load_config(
        None,
        [
            "run.mode=sync_plus",
            "rollout.alpha=0",
            "run.steps=14",
            "rollout.workers=2",
            "rollout.groups_per_step=4",
            "rollout.group_size=4",
            "rollout.environments=64",
            "rollout.member_refills=8",
            "rollout.environment_step_timeout=1000",
            "rollout.trajectory_timeout=1000",
            "evaluation.prompts=2",
            "rollout.rounds.enabled=true",
            f"sim.data_set={EPOCH}",
            *overrides,
        ],
    )


def rounds_in(result: SimResult) -> list[dict[str, Any]]:
    events = [json.loads(line) for line in result.events.decode().splitlines() if line]
    return [event for event in events if event["kind"] == "round"]


def test_from_the_second_epoch_on_what_was_long_is_not_played_to_be_thrown_away() -> None:
    """Each prompt is trained once an epoch all the same: the journal says so, and the simulator's audit."""
    plain, predicted = (rounds_in(simulate(config(f"rollout.rounds.predict={name}"))) for name in ("''", "history"))
    assert not any(event["diverted"] for event in plain)
    diverted = [event["number"] for event in predicted if event["diverted"]]
    assert diverted
    assert diverted[0] * 4 >= EPOCH - 4, "nothing is known in the first epoch"
    waste = [sum(event["thrown_away"] for event in rounds[5:]) for rounds in (plain, predicted)]
    assert waste[1] < waste[0]
    result = simulate(config("rollout.rounds.predict=history"))
    found = account_epochs(result.journal.decode().splitlines(), EPOCH)
    assert epochs_done(found, EPOCH) == 3
    assert not [said for said in found.violations if "times" in said or "is not trained yet" in said]


@pytest.mark.slow
def test_prompts_that_the_runs_own_forecasts_call_long_go_to_the_long_queue_those_that_were_put_off_too() -> None:
    """A whole run: fewer tokens are thrown away from the second epoch on, and each prompt is trained once an epoch."""
    given = ("rollout.prediction.enabled=true", "rollout.rounds.predict=progressive")
    result, plain = simulate(config(*given)), rounds_in(simulate(config()))
    rounds = rounds_in(result)
    diverted = [event["number"] for event in rounds if event["diverted"]]
    assert diverted
    assert diverted[0] * 4 >= EPOCH - 4, "nothing is known in the first epoch"
    waste = [sum(event["thrown_away"] for event in found[5:]) for found in (plain, rounds)]
    assert waste[1] < 0.9 * waste[0]
    found = account_epochs(result.journal.decode().splitlines(), EPOCH)
    assert not [said for said in found.violations if "times" in said or "is not trained yet" in said]
    with pytest.raises(ConfigError, match=r"rollout\.prediction\.enabled"):
        config(given[1])
    known = ForecastLengths()
    known.record_length(prompt("a"), 10.0)
    known.record_length(prompt("a"), 90.0)  # aborted after 20 tokens, 70 were still expected
    known.record_length(prompt("a"), 10.0)
    assert (known(prompt("a")), known(prompt("b"))) == (50.0, None)


@pytest.mark.slow
def test_a_run_that_goes_by_its_own_forecasts_is_killed_again_and_again_and_loses_nothing() -> None:
    given = ("rollout.prediction.enabled=true", "rollout.rounds.predict=progressive", "sim.fault_rate=0.01")
    result = simulate(config(*given, "run.seed=2"))  # raises for what its audit finds
    assert result.lives > 2
    assert result.summary["reason"] == "completed"
    assert any(event["diverted"] for event in rounds_in(result))


def test_forecasts_of_prompts_are_known_after_a_resume() -> None:
    settings = config("rollout.prediction.enabled=true", "rollout.rounds.predict=progressive")
    task, events = SimTask(settings), EventLog(MemorySink(), lambda: 0.0)
    first, second = ForecastLengths(), ForecastLengths()
    rounds = build_rounds(settings, task, events, None, first)
    rounds.begin_round()
    first.record_length(prompt("a"), 90.0)
    state = json.loads(json.dumps(rounds.state()))
    assert build_rounds(settings, task, events, state, second).state()["lengths"] == state["lengths"]
    assert second(prompt("a")) == 90.0


@pytest.mark.slow
def test_nothing_is_kept_of_held_out_prompts_which_no_round_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    known = set[str]()
    seen = ForecastLengths.record_length

    def spy(self: ForecastLengths, one: Prompt, tokens: float) -> None:
        known.add(one.key.split("-", 1)[0])
        seen(self, one, tokens)

    monkeypatch.setattr(ForecastLengths, "record_length", spy)
    simulate(config("rollout.prediction.enabled=true", "rollout.rounds.predict=progressive", "evaluation.every=3"))
    assert known == {"train"}


def test_a_predictor_of_the_user_is_asked_and_believed() -> None:
    settings = config("run.steps=1", "rollout.rounds.eta_prompts=4.0")
    found = build_rounds(settings, SimTask(settings), EventLog(MemorySink(), lambda: 0.0), None, at_number)
    numbers = []
    found.begin_round()
    while found.wanted(0):
        group = f"g{len(numbers)}"
        found.start_group(group)
        numbers.append(found.number(group))
    assert numbers == [*range(LEAST + 1), 10, 11, 13, 14]
    assert found.planner.outstanding == list(range(16)), "those that were not launched are queued"


def test_a_checkpoint_keeps_what_is_known_of_lengths() -> None:
    settings = config("rollout.rounds.predict=history")
    task, events = SimTask(settings), EventLog(MemorySink(), lambda: 0.0)
    first = build_rounds(settings, task, events, None)
    first.begin_round()
    for number in range(4):
        first.start_group(f"g{number}")
        first.settled(f"g{number}", "complete")
    first.end_round(0, [f"g{number}" for number in range(4)], [], 0)
    first.trained({f"g{number}": 10 * number for number in range(4)}, 1.0)
    state = json.loads(json.dumps(first.state()))
    assert build_rounds(settings, task, events, state).state()["lengths"] == first.state()["lengths"]
    assert list(state["lengths"]["history"].values()) == [0.0, 10.0, 20.0, 30.0]
    off = config()
    assert "lengths" not in build_rounds(off, task, events, None).state()
    assert "lengths" not in build_rounds(off, task, events, state).state(), "a run that stops predicting goes on"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "seeds"), [(0, 16), pytest.param(20_000, 400, marks=[pytest.mark.long, pytest.mark.timeout(1800)])]
)
def test_no_prompt_is_lost_or_trained_twice_though_some_are_diverted_under_faults_kills_and_resumes(
    first: int, seeds: int
) -> None:
    """The shapes of the fault bench that have rounds, with a data set that repeats and prompts that are predicted."""
    diverted = lives = 0
    for seed in range(first, first + seeds):
        shape = ledger_faults.config_of(seed)
        rounds = shape.rollout.rounds
        if not rounds.enabled or not rounds.epoch_prompts:
            continue
        update = {"predict": "history", "eta_prompts": max(rounds.eta_prompts, 1.5), "search": ()}
        rollout = shape.rollout.model_copy(update={"rounds": rounds.model_copy(update=update)})
        sim = shape.sim.model_copy(update={"data_set": rounds.epoch_prompts})
        result = simulate(shape.model_copy(update={"rollout": rollout, "sim": sim}), strict=False)
        assert not result.violations, f"seed {seed}: {result.violations[:3]}"
        assert result.summary["reason"] == "completed"
        diverted += sum(event["diverted"] for event in rounds_in(result))
        lives += result.lives
    assert lives > 0
    assert diverted > 0 or seeds < 100


def test_a_diverted_prompt_that_is_forgotten_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = RoundPlanner.divert

    def forget(self: RoundPlanner) -> None:
        number = self.divertible()
        honest(self)
        assert number is not None
        del self._queue[number]

    monkeypatch.setattr(RoundPlanner, "divert", forget)
    with pytest.raises(SimulationFailed, match="is missing"):
        simulate(config("rollout.rounds.predict=history"))


@pytest.mark.parametrize("kind", [LengthHistory, ForecastLengths])
def test_lengths_of_prompts_that_never_come_again_do_not_fill_the_memory(
    kind: type[LengthHistory], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orchestrator.policies.prediction.prompt_lengths.PROMPTS", 3)
    history = kind()
    for number in (0, 1, 2, 0, 3, 4):
        history.record_length(Prompt(f"p{number}", "t", number, ""), 10.0 + number)
    assert history.state() == {"p0": 10.0, "p3": 13.0, "p4": 14.0}, "those that were recorded last"
    history.restore({f"p{number}": 1.0 for number in range(9)})
    assert [*history.state()] == ["p6", "p7", "p8"]
