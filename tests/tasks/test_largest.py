"""The task of examples/smollm2.toml: three numbers are one question in any order, and only the largest is right."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from examples.largest import LargestTask, score
from orchestrator.config import load_config
from orchestrator.runtime.preflight import make_task
from tests.support.tiny_tokenizer import write_tokenizer

ROOT = Path(__file__).parents[2]


def numbers(payload: str) -> tuple[int, ...]:
    return tuple(sorted(int(number) for number in payload.split(", ")))


def test_no_question_that_is_held_out_is_trained_on_in_another_order() -> None:
    task = LargestTask(600)
    heldout = {numbers(prompt.payload) for prompt in task.prompts("heldout", 0)}
    asked = {numbers(prompt.payload) for prompt in itertools.islice(task.prompts("train", 0), 20_000)}
    assert len(heldout) == 600
    assert not heldout & asked
    assert all(10 <= one < two < three <= 99 for one, two, three in heldout | asked)


def test_the_largest_number_is_right_and_nothing_else_is() -> None:
    words = LargestTask.words

    def scored(said: str) -> float:
        return score({"task": "largest", "prompt": "34, 58, 12", "actions": [list(words.turn(said))]})["reward"]

    assert [scored(said) for said in ("58", "34", "12", "85", "34, 58", "")] == [1.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    unended = list(words.turn("58"))[:-1]
    assert score({"task": "largest", "prompt": "34, 58, 12", "actions": [unended]}) == {"reward": 0.0}
    with pytest.raises(ValueError, match="invalid literal"):
        score({"task": "largest", "prompt": "34, x, 12", "actions": [unended]})


def test_in_the_example_the_last_number_of_a_sentence_is_the_answer(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    tokenizer = write_tokenizer(tmp_path / "model")
    task: Any = make_task(load_config(ROOT / "examples/smollm2.toml", [f'task.chat.tokenizer="{tokenizer}"']))
    said = (*task.chat.encode("Of 34, 58 and 12 the largest is 58."), task.end_id)
    event = {
        "task": "largest",
        "prompt": "34, 58, 12",
        "actions": [list(one) for one in task.played("largest", [said])],
    }
    assert score(event) == {"reward": 1.0}
