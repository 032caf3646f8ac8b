"""Sums: none is asked twice before all were, none that is held out is trained on in either order, and options are checked."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest

from orchestrator.api import ConfigError
from orchestrator.config import load_config
from orchestrator.runtime import preflight
from orchestrator.tasks import registry, splits
from orchestrator.tasks.sums import SumsTask, value_of
from orchestrator.tasks.text_rewards import sums_answer


def made(**options: object) -> SumsTask:
    return SumsTask(20, options)


def test_every_training_question_is_asked_once_an_epoch_in_an_order_of_the_seed() -> None:
    task = made(largest=9)
    everything = [f"{a}{sign}{b}" for a, b in itertools.product(range(10), repeat=2) for sign in "+-"]
    trained = {payload for payload in everything if not splits.is_heldout(splits.key_of(task.identity(payload)))}
    assert 100 < len(trained) < 200 == len(everything) == task.questions
    stream = task.prompts("train", 3)
    first, second = ([prompt.payload for prompt in itertools.islice(stream, len(trained))] for _ in range(2))
    assert sorted(first) == sorted(second) == sorted(trained)
    assert first != second
    assert first[:50] != [prompt.payload for prompt in itertools.islice(task.prompts("train", 4), 50)]


def test_thousands_of_questions_and_none_of_them_repeats_or_is_held_out() -> None:
    task = SumsTask(700, {"largest": 99})
    asked = [prompt.payload for prompt in itertools.islice(task.prompts("train", 0), 10_000)]
    assert len(set(asked)) == len(asked)
    heldout = [prompt.payload for prompt in task.prompts("heldout", 0)]
    twins = {f"{b}+{a}" for a, _, b in (payload.partition("+") for payload in heldout) if _}
    assert not (set(heldout) | twins) & set(asked)
    assert {value_of(payload) < 0 for payload in heldout} == {True, False}


@pytest.mark.parametrize(
    ("options", "field", "says"),
    [
        ({"largest": 0}, "largest", "from 1 to 499"),
        ({"largest": 2.5}, "largest", "from 1 to 499"),
        ({"largest": True}, "largest", "from 1 to 499"),
        ({"smallest": 1}, "smallest", "no such option"),
        ({"question": "and?"}, "question", "{} once"),
        ({"question": "{} + ü"}, "question", "{} once"),
    ],
)
def test_a_wrong_option_is_refused_by_name(options: dict[str, Any], field: str, says: str) -> None:
    with pytest.raises(ConfigError, match=f"^task.dataset_options.{field} = .*{says}"):
        registry.make("sums", 20, dataset_options=options)


def test_a_config_words_the_question_and_other_tasks_take_no_options_of_it() -> None:
    config = load_config(
        None,
        ["task.name=sums", "task.heldout_maps=50", 'task.dataset_options={largest=20, question="How much is {}?"}'],
    )
    task: Any = preflight.make_task(config)
    assert task.play("3+18").start() == "How much is 3 + 18?\n"
    assert len(task.play("20-20").start()) == task.max_prompt_tokens
    for wrong in (["task.name=nim", "task.dataset_options={largest=20}"], ["task.name=sums", "task.dataset=chain_sum"]):
        with pytest.raises(ConfigError, match="only for name = 'reasoning_gym'"):
            load_config(None, wrong)


def test_only_the_right_number_is_rewarded() -> None:
    task = made()

    def reward(payload: str, said: str) -> float:
        actions = [list(task.words.turn(said))]
        found = sums_answer(json.loads(json.dumps({"task": "sums", "prompt": payload, "actions": actions})))
        return float(found["reward"])

    assert (reward("34+58", "92"), reward("7-30", "-23"), reward("0-0", "0")) == (1.0, 1.0, 1.0)
    assert (reward("34+58", "91"), reward("7-30", "23"), reward("34+58", "092"), reward("34+58", "")) == (0, 0, 0, 0)
    with pytest.raises(ValueError, match="no sum"):
        reward("34*58", "1972")
