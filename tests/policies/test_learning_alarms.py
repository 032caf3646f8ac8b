"""Alarms come when there is a reason and name it, and not when a run is simply good at its task."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from orchestrator.api import Prompt
from orchestrator.policies.training.learning_alarms import (
    Alarm,
    AlarmBars,
    LearningWatch,
    PromptRepeats,
    answer_figures,
)

BARS = AlarmBars(gap=0.02, entropy=0.2, tis=0.1, ess=0.3)


def run(entropies: list[float], *, silent: float = 0.9, success: float = 0.46, **more: float) -> list[Alarm]:
    watch, found = LearningWatch(BARS), []
    for step, entropy in enumerate(entropies):
        found += watch.check_step(step, {"entropy": entropy, "groups_silent_share": silent, **more}, success, 1.0)
    return found


FALL = [0.5] * 5 + [0.3, 0.2, 0.12, 0.08, 0.06, 0.05, 0.05, 0.05]


def test_entropy_collapse_is_said_once_with_what_it_was() -> None:
    (alarm,) = run(FALL)
    assert alarm.what == "entropy"
    raised = "it gives only one answer per prompt: raise trainer.entropy_coefficient"
    assert alarm.detail.startswith(f"{raised} or trainer.kl_coefficient, or lower"), "where nothing is clipped"
    (clipped,) = run(FALL, clip_fraction=0.01)
    assert clipped.detail.startswith(f"{raised}, trainer.clip_high or trainer.kl_coefficient, or lower")
    assert "0.072 after step 12, 14% of the 0.5 of the first 5 steps (trainer.entropy_alarm = 20%)" in alarm.detail
    assert alarm.detail.endswith("90% of the groups with equal rewards")


def test_prompts_that_repeat_are_named_as_the_reason() -> None:
    (alarm,) = run(FALL, prompts_repeated=0.62)
    assert alarm.detail.startswith("it memorises its prompts, 62% were asked before: add more of them; 0.072")


@pytest.mark.parametrize(
    "more",
    [
        pytest.param({"silent": 0.7}, id="groups still differ"),
        pytest.param({"success": 0.6}, id="most answers are right"),
    ],
)
def test_a_low_entropy_alone_is_no_alarm(more: dict[str, Any]) -> None:
    assert run(FALL, **more) == []


def test_one_low_step_is_no_alarm_and_a_second_collapse_is_another() -> None:
    assert run([0.5] * 6 + [0.01] + [0.5] * 3) == []
    assert len(run([0.5] * 5 + [0.01] * 6 + [0.5] * 6 + [0.01] * 6)) == 2
    hovering = [0.5] * 5 + [0.09, 0.11] * 20  # about the bar of 0.1
    assert len(run(hovering)) <= 1


def test_a_run_that_goes_on_compares_with_what_it_began_with() -> None:
    before = LearningWatch(BARS)
    for step in range(5):
        before.check_step(step, {"entropy": 0.5}, 0.4, 1.0)
    watch = LearningWatch(BARS, before.entropies)
    values = {"entropy": 0.05, "groups_silent_share": 0.9}
    found = [alarm for step in range(5, 11) for alarm in watch.check_step(step, values, 0.4, 1.0)]
    assert [alarm.what for alarm in found] == ["entropy"]
    assert "0.5 of the first 5" in found[0].detail


def test_policies_that_differ_for_the_engines_arithmetic_and_for_age_are_told_apart() -> None:
    values = {"tis_capped": 0.25, "tis_p01": 0.2, "tis_p99": 4.0}

    def said(gap: float, lag: float) -> str:
        alarms = LearningWatch(BARS).check_step(9, {**values, "logprob_gap_mean": gap}, 0.5, lag)
        return next(alarm.detail for alarm in alarms if alarm.what == "policies")

    assert "25.0% of the tokens" in said(0.0, 2.0)
    assert "(1 % of the weights below 0.2, 1 % above 4)" in said(0.0, 2.0)
    assert said(0.001, 2.0).startswith("staleness, 2 versions on average: lower rollout.alpha")
    assert said(0.015, 2.0).startswith("engine and trainer, not staleness")
    assert "gradient norm" in said(0.001, 0.0)


def test_bars_of_zero_are_off_and_each_alarm_is_said_when_its_bar_is_crossed() -> None:
    bad = {"tis_capped": 0.9, "ess": 0.1, "entropy": 0.0, "groups_silent_share": 1.0}
    off = LearningWatch(AlarmBars(gap=0.02, entropy=0.0, tis=0.0, ess=0.0))
    assert [alarm for step in range(12) for alarm in off.check_step(step, bad, 0.0, 1.0)] == []
    on = LearningWatch(BARS)
    found = [
        [alarm.what for alarm in on.check_step(step, values, 0.0, 1.0)]
        for step, values in enumerate([bad, bad, {}, bad])
    ]
    assert found == [["ess", "policies"], [], [], ["ess", "policies"]]
    gap = LearningWatch(BARS)
    assert [len(gap.check_step(step, {"logprob_gap_mean": 0.03}, 0.5, 0.0)) for step in range(3)] == [1, 1, 1]


def test_gradients_that_are_gone_are_said_once_with_why() -> None:
    zero = {"grad_norm": 0.0, "groups_silent_share": 1.0}
    (alarm,) = steps_of(LearningWatch(BARS), [zero] * 25)
    assert alarm.what == "gradient"
    assert alarm.detail.startswith(
        "no group had members with different rewards, 79% of the last answers were right: set "
    )
    assert alarm.detail.endswith("the gradient was 0 in 10 steps, after step 10")
    assert steps_of(LearningWatch(BARS), [*[zero] * 9, {"grad_norm": 1e-9}] * 3) == []
    (alarm,) = steps_of(LearningWatch(BARS), [{"grad_norm": 0.0, "groups_silent_share": 0.4}] * 12)
    assert "does the loss reach the parameters?" in alarm.detail


def steps_of(watch: LearningWatch, values: list[dict[str, float]]) -> list[Alarm]:
    return [alarm for step, each in enumerate(values) for alarm in watch.check_step(step, each, 0.79, 1.0)]


def test_past_its_half_a_run_without_a_signal_is_to_end() -> None:
    watch = LearningWatch(BARS)
    steps_of(watch, [{"groups_silent_share": 0.75}] * 19)
    assert watch.exhausted(0.9, 0.3) is None  # not enough steps to tell
    steps_of(watch, [{"groups_silent_share": 0.75}])
    assert watch.exhausted(0.49, 0.3) is None
    assert watch.exhausted(0.5, 0.0) is None
    assert watch.exhausted(0.5, 0.25) is None
    alarm = watch.exhausted(0.5, 0.3)
    assert alarm is not None
    assert alarm.detail.startswith(
        "25% of the groups of the last 20 steps had members with different rewards, under run.sig"
    )
    steps_of(watch, [{"groups_silent_share": 0.6}] * 10)  # groups differ again
    assert watch.exhausted(0.9, 0.3) is None


def test_what_is_said_of_a_batchs_answers() -> None:
    batch: Any = [SimpleNamespace(generated_tokens=n, truncated=n > 18) for n in range(1, 21)]
    found = answer_figures(batch)
    assert found == {
        "response_tokens_mean": 10.5,
        "response_tokens_p95": 19.0,
        "response_tokens_max": 20.0,
        "truncated_share": 0.1,
    }
    assert answer_figures([]) == {}


def test_prompts_that_were_asked_before_are_counted_as_they_are_drawn() -> None:
    prompts = PromptRepeats(Prompt(key=key, task="t", seed=0, payload=key) for key in "abacab")
    assert [next(prompts).key for _ in range(3)] == ["a", "b", "a"]
    assert prompts.repeated_share() == {"prompts_repeated": pytest.approx(1 / 3, abs=1e-6)}
    assert prompts.repeated_share() == {}
    assert [prompt.key for prompt in prompts] == ["c", "a", "b"]
    assert prompts.repeated_share() == {"prompts_repeated": pytest.approx(2 / 3, abs=1e-6)}
