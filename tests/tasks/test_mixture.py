"""Several tasks in one run: each plays and is scored as if it were alone, in words that all share."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest

from orchestrator.api import ConfigError, Environment, Prompt, StepResult, Trajectory, Turn, parts_of
from orchestrator.config import load_config
from orchestrator.environments.episode_context import setup_of
from orchestrator.rewards.reward_client import reward_event
from orchestrator.runtime import preflight
from orchestrator.tasks import mixture
from orchestrator.tasks.chat_task import ChatTask
from orchestrator.tasks.game_memory import MemoryTask
from orchestrator.tasks.mixture import MixtureTask
from orchestrator.tasks.nim import NimTask
from orchestrator.tasks.text import TextTask
from tests.support.tiny_tokenizer import write_tokenizer

ROOT = Path(__file__).parents[2]
SHARES = {"nim": 3.0, "household": 1.0, "calculator": 1.0}


@pytest.fixture(scope="module")
def mixed() -> MixtureTask:
    return MixtureTask(20, SHARES)


def test_prompts_are_drawn_by_share_and_follow_from_the_seed(mixed: MixtureTask) -> None:
    drawn = [prompt.task for prompt in islice(mixed.prompts("train", 0), 1000)]
    counts = Counter(drawn)
    assert set(counts) == set(SHARES)
    assert 540 < counts["nim"] < 660
    assert drawn == [prompt.task for prompt in islice(mixed.prompts("train", 0), 1000)]
    assert drawn != [prompt.task for prompt in islice(mixed.prompts("train", 1), 1000)]
    heldout = list(mixed.prompts("heldout", 0))
    assert len(heldout) == 20
    assert set(Counter(prompt.task for prompt in heldout).values()) <= {6, 7}
    trained = {(prompt.task, prompt.key) for prompt in islice(mixed.prompts("train", 0), 1000)}
    assert not trained & {(prompt.task, prompt.key) for prompt in heldout}


@pytest.mark.parametrize("name", ["nim", "household"])
def test_a_part_plays_in_the_mixture_as_it_does_alone(mixed: MixtureTask, name: str) -> None:
    task = mixed.tasks[name]
    assert isinstance(task, TextTask)
    prompt = next(prompt for prompt in mixed.prompts("train", 0) if prompt.task == name)
    own = [task.words.turn(said) for _, said in task.expert(prompt.payload)]
    words = mixed.words_of[name]
    spoken = [words.to_mixture(turn) for turn in own]
    assert all(turn[-1] == mixed.end_id for turn in spoken)

    async def play(environment: object, turns: list[tuple[int, ...]]) -> list[StepResult]:
        await environment.reset(prompt)  # type: ignore[attr-defined]
        return [await environment.step(turn) for turn in turns]  # type: ignore[attr-defined]

    alone = asyncio.run(play(task.environment(), own))
    among = asyncio.run(play(mixed.environment(), spoken))
    assert [words.to_part(result.observation.token_ids) for result in among] == [r.observation.token_ids for r in alone]
    assert [(result.reward, result.done) for result in among] == [(result.reward, result.done) for result in alone]
    assert among[-1].done
    assert mixed.played(name, spoken) == own
    payload = {"task": name, "prompt": prompt.payload, "actions": [list(turn) for turn in mixed.played(name, spoken)]}
    assert mixture.score(payload)["reward"] == 1.0


def test_a_word_that_the_part_has_not_is_no_answer_of_it(mixed: MixtureTask) -> None:
    nim, household = mixed.words_of["nim"], mixed.words_of["household"]
    stranger = household.to_mixture((7,))
    assert nim.to_part((*stranger, mixed.end_id)) == (NimTask.words.pad_id, NimTask.words.end_id)
    assert NimTask.words.said(nim.to_part((*stranger, mixed.end_id))) is None
    assert len(mixed.vocabulary) % 32 == 0
    assert len(set(mixed.vocabulary)) == len(mixed.vocabulary)


def test_demonstrations_are_in_the_words_of_the_mixture(mixed: MixtureTask) -> None:
    for tokens, mask in mixed.demonstrations(20, 0, 1.0):
        assert len(tokens) == len(mask)
        assert tokens[-1] == mixed.end_id
        assert all(0 <= token < len(mixed.vocabulary) for token in tokens)


def test_limits_and_context_rules_are_those_of_the_part(mixed: MixtureTask) -> None:
    assert mixed.parts["nim"].max_response_tokens == 2 < mixed.max_response_tokens == 48
    assert mixed.parts["household"].max_turns == 10
    config = load_config(None, ['context.tasks.household={strategy="restart", recent_turns=2}'])
    rules = {name: setup_of(config.context, part)[0] for name, part in parts_of(mixed).items()}
    assert (rules["household"].strategy, rules["nim"].strategy) == ("restart", "keep")
    remembering = MemoryTask(mixed, turns=4)
    assert parts_of(remembering)["household"].max_turns == 14


def test_the_reward_function_scores_built_in_tasks_only() -> None:
    for name in ("os:system", "mixture", "None"):
        with pytest.raises(ConfigError, match="must be one of"):
            mixture.score({"task": name, "prompt": "", "actions": []})


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["task.name=mixture"], "needs two tasks or more"),
        (["task.mixture={nim=1.0}"], "only for name = 'mixture'"),
        (["task.name=mixture", "task.mixture={nim=1.0, household=0.0}"], "more than 0"),
        (["task.name=mixture", "task.mixture={nim=1.0, agent=1.0}"], "must be one of .*write your own as module:Class"),
        (["task.name=mixture", "task.mixture={nim=1.0, reasoning_gym=1.0}"], "name = 'reasoning_gym' needs one"),
        (["task.name=mixture", "task.mixture={nim=1.0, household=1.0}", "task.dataset=x"], "only for name = 'reasoning_gym'"),
    ],
)  # fmt: skip
def test_a_mixture_that_cannot_be_is_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(None, overrides)


def test_the_example_of_several_tasks_could_start() -> None:
    config = load_config(ROOT / "examples/tasks.toml")
    task = preflight.make_task(config)
    preflight.check(config, task)
    assert set(parts_of(task)) == {"nim", "household", "calculator", "coding", "reasoning_gym"}
    assert isinstance(next(task.prompts("train", 0)), Prompt)


# -- tasks of users, and a pretrained model's tokens -------------------------------------------------------------------

GUESS = re.search(r"```python\n(.*?)```", (ROOT / "docs/tasks.md").read_text(), re.DOTALL)


@pytest.fixture
def guess(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The task of the page, as a user has it."""
    assert GUESS is not None
    (tmp_path / "guess_of_mine.py").write_text(GUESS[1].replace("guess:score", "guess_of_mine:score"))
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "guess_of_mine:GuessTask"
    sys.modules.pop("guess_of_mine", None)


def expert_turns(task: object, prompt: Prompt) -> list[str]:
    return [said for _, said in task.expert(prompt.payload)]  # type: ignore[attr-defined]


def test_a_task_of_a_user_is_a_part_and_its_own_function_scores_it(guess: str) -> None:
    config = load_config(None, ["task.name=mixture", f'task.mixture={{nim=1.0, "{guess}"=1.0}}', "task.heldout_maps=4"])
    task = preflight.make_task(config)
    assert isinstance(task, MixtureTask)
    assert set(task.parts) == {"nim", "guess"}
    prompt = next(prompt for prompt in task.prompts("train", 0) if prompt.task == "guess")
    own = task.tasks["guess"]
    spoken = [task.words_of["guess"].to_mixture(own.words.turn(said)) for said in expert_turns(own, prompt)]  # type: ignore[attr-defined]
    turns = tuple(Turn((2,), turn, (0.0,) * len(turn), ((0, len(turn)),)) for turn in spoken)
    trajectory = Trajectory("t", "g", "guess", prompt, turns, None, "", 0, False)
    event = json.loads(json.dumps(reward_event(trajectory, task.played, None, task.scorers)))
    assert mixture.score(event)["reward"] == 1.0
    assert "scorer" not in reward_event(replace(trajectory, task="nim"), task.played, None, task.scorers)


def test_two_parts_of_one_name_are_refused(guess: str, tmp_path: Path) -> None:
    (tmp_path / "other_nim.py").write_text("from orchestrator.tasks.nim import NimTask\nclass Mine(NimTask): ...\n")
    with pytest.raises(ConfigError, match="another part has the same name, 'nim'"):
        MixtureTask(4, {"nim": 1.0, "other_nim:Mine": 1.0})
    with pytest.raises(ConfigError, match="another part has the same name, 'nim'"):
        MixtureTask(4, {guess: 1.0, "other_nim:Mine": 1.0})
    sys.modules.pop("other_nim", None)


def test_parts_speak_a_pretrained_model_s_tokens_each_behind_its_own_template(guess: str, tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    folder = write_tokenizer(tmp_path / "tokenizer")
    shares = f'task.mixture={{household=1.0, nim=1.0, "{guess}"=1.0}}'
    given = [
        "task.name=mixture",
        shares,
        "task.heldout_maps=6",
        f"task.chat.tokenizer={folder}",
        "task.chat.examples=1",
    ]
    task = preflight.make_task(load_config(None, given))
    assert isinstance(task, MixtureTask)
    assert set(task.parts) == {"household", "nim", "guess"}
    assert task.parts["nim"].max_context_tokens < task.parts["household"].max_context_tokens
    for name in task.parts:
        part, prompt = task.tasks[name], next(prompt for prompt in task.prompts("train", 0) if prompt.task == name)
        assert isinstance(part, ChatTask)
        assert part.vocabulary is task.vocabulary or list(part.vocabulary) == list(task.vocabulary)
        spoken = [(*part.chat.encode(said), task.end_id) for said in expert_turns(part._task, prompt)]

        async def play(environment: Environment, prompt: Prompt, spoken: list[tuple[int, ...]]) -> list[StepResult]:
            seen = await environment.reset(prompt)
            assert max(seen.token_ids) < len(task.vocabulary)
            return [await environment.step(turn) for turn in spoken]

        assert asyncio.run(play(task.environment(), prompt, spoken))[-1].done
        event = {"task": name, "prompt": prompt.payload, "actions": [list(turn) for turn in task.played(name, spoken)]}
        if name in task.scorers:
            event["scorer"] = task.scorers[name]
        assert mixture.score(event)["reward"] == 1.0
    assert len(list(islice(task.demonstrations(3, 0, 1.0), 3))) == 3
    with pytest.raises(ConfigError, match="frozenlake has no text"):
        preflight.make_task(load_config(None, [*given, "task.mixture={frozenlake=1.0, nim=1.0}"]))
