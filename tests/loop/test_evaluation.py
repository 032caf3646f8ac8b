"""What an evaluation adds up to: several samples of a prompt, rewards, tasks, and its interval."""

from __future__ import annotations

import asyncio
import itertools
from types import SimpleNamespace
from typing import Any, cast

import pytest

from orchestrator.api import ConfigError, Prompt, Sampling, TrajectoryError, Turn
from orchestrator.config import load_config
from orchestrator.envs import Episode
from orchestrator.evaluation import EvaluationResult, Evaluator, interval_of, wilson


class Played:
    """Environments in which an episode earns what ``rewards`` says for its prompt and its sample; None: it fails."""

    def __init__(self, *rewards: tuple[float | None, ...]) -> None:
        self.rewards, self.asked, self.names = rewards, list[Sampling](), list[str]()
        self.under_way = self.most = 0

    async def play(self, episode: Episode, sampling: Sampling) -> None:
        self.asked.append(sampling)
        self.names.append(episode.id)
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        await asyncio.sleep(0)
        self.under_way -= 1
        index, *sample = (int(part) for part in episode.id.split("-")[1:])
        reward = self.rewards[index][sample[0] if sample else 0]
        episode.turns.append(Turn((1,), (2,) * (index + 1), (0.0,) * (index + 1), ()))
        episode.truncated = index == 0
        if reward is None:
            raise TrajectoryError("environment_error", "")
        episode.earned = reward


def evaluated(played: Played, tasks: str = "a", **options: Any) -> EvaluationResult:
    prompts = [
        Prompt(f"{task}-{n}", task, n, "") for n, task in zip(range(len(played.rewards)), itertools.cycle(tasks))
    ]
    task = SimpleNamespace(prompts=lambda split, seed: iter(prompts), max_response_tokens=7, end_id=0)
    evaluator = Evaluator(
        cast(Any, played),
        cast(Any, task),
        cast(Any, None),
        seed=0,
        prompts=len(prompts),
        slots=2,
        timeout=1.0,
        forget=lambda _: None,
        **options,
    )
    return asyncio.run(evaluator.evaluate("e"))


def test_once_and_greedily_by_default() -> None:
    played = Played((1.0,), (0.0,), (None,), (0.6,))
    found = evaluated(played)
    assert {(sampling.temperature, sampling.top_p, sampling.max_tokens) for sampling in played.asked} == {(0.0, 1.0, 7)}
    assert (found.success, found.successes, found.prompts, found.failed, found.solved) == (0.5, 2, 4, 1, 0.5)
    assert (found.low, found.high) == pytest.approx(wilson(2, 4), abs=1e-6)
    assert found.reward == pytest.approx(1.6 / 3, abs=1e-6)  # the one that failed has none
    assert (found.tokens, found.truncated, found.tasks) == (2.5, 0.25, {})


def test_several_samples_of_a_prompt() -> None:
    played = Played((1.0, 0.0, 0.0, 0.0), (1.0, 1.0, 1.0, 1.0), (0.0, None, 0.2, 0.0))
    found = evaluated(played, samples=4, temperature=0.6, top_p=0.95)
    assert {(sampling.temperature, sampling.top_p) for sampling in played.asked} == {(0.6, 0.95)}
    assert len(set(played.names)) == 12
    assert played.most == 2
    assert (found.success, found.successes, found.prompts, found.samples) == (round(5 / 12, 6), 5, 3, 4)
    assert (found.solved, found.failed) == (round(2 / 3, 6), 1)


def test_success_by_task_of_a_mixture() -> None:
    found = evaluated(Played((1.0,), (0.0,), (1.0,), (1.0,)), tasks="ba")
    assert found.tasks == {"a": 0.5, "b": 1.0}


def test_the_interval_is_that_of_prompts_when_their_samples_agree_and_of_all_answers_when_they_do_not() -> None:
    alike, apart = [1.0, 0.0] * 50, [0.5] * 100
    assert interval_of(alike, 8) == pytest.approx(wilson(50, 100), abs=0.002)
    # each prompt is solved with a chance of a half: shares vary as eight tosses of a coin do
    tosses = [
        successes / 8
        for successes, times in zip(range(9), (1, 8, 28, 56, 70, 56, 28, 8, 1), strict=True)
        for _ in range(times)
    ]
    assert interval_of(tosses, 8) == pytest.approx(wilson(1024, 2048), abs=0.001)
    assert interval_of(apart, 8) == pytest.approx(
        wilson(400, 800)
    )  # never as if there were more answers than there are
    assert interval_of([1 / 3] * 99, 3) == pytest.approx(wilson(99, 297))
    assert interval_of([1.0] * 20, 8) == wilson(20, 20)
    assert interval_of([], 4) == (0.0, 1.0)


def test_nothing_that_was_held_out_is_no_success() -> None:
    found = evaluated(Played())
    assert (found.success, found.prompts, found.reward, found.tokens, found.high) == (0.0, 0, None, 0.0, 1.0)


@pytest.mark.parametrize(("key", "value"), [("samples", 4), ("top_p", 0.9)])
def test_what_needs_a_temperature(key: str, value: float) -> None:
    with pytest.raises(ConfigError, match=rf"evaluation\.{key} = {value}.*evaluation\.temperature"):
        load_config(None, [f"evaluation.{key}={value}"])
    load_config(None, [f"evaluation.{key}={value}", "evaluation.temperature=0.7"])
