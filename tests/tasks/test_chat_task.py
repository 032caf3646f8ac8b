"""A task in text around a pretrained model's tokenizer and template: the task inside notices nothing, and no id changes."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from orchestrator.agents.chat_template import Message
from orchestrator.api import ConfigError, Prompt, Sampling, StepResult, Task, TrajectoryError, stop_ids_of
from orchestrator.config import load_config
from orchestrator.evaluation import Evaluator
from orchestrator.policies.batching.coordination_modes import coordination_mode
from orchestrator.rollout import BatchSize, Rollout
from orchestrator.runtime import preflight
from orchestrator.tasks import registry
from orchestrator.tasks.chat_task import ChatTask

tokenizers = pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SYSTEM = "Answer with one move."
needs_library = pytest.mark.skipif(
    importlib.util.find_spec("reasoning_gym") is None, reason="needs the library reasoning-gym"
)


def write_tokenizer(folder: Path, template: str = CHATML) -> Path:
    """A byte-level BPE with merges, as those of pretrained models are, and a template."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token=None))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=416,
        special_tokens=["<|im_start|>", "<|im_end|>", "<|pad|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )
    corpus = [
        "take the key and go to the kitchen, open the fridge, put the key in the fridge; the answer is 12 + 30 = 42"
    ]
    corpus += ["drawer cabinet shelf bedroom bathroom closed holding lamp soap apple user assistant system"]
    made.train_from_iterator(corpus * 30, trainer)
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|im_end|>", pad_token="<|pad|>")
    if template:
        fast.chat_template = template
    fast.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def make(folder: Path, *overrides: str) -> ChatTask:
    chat = [f'task.chat.tokenizer="{folder}"', f'task.chat.system="{SYSTEM}"', "task.heldout_maps=5"]
    task = preflight.make_task(load_config(None, [*chat, *overrides]))
    assert isinstance(task, ChatTask)
    return task


def play(task: ChatTask, prompt: Prompt, turns: Sequence[Sequence[int]]) -> tuple[list[tuple[int, ...]], StepResult]:
    """What is seen before each turn, and how the last one ended."""

    async def episode() -> tuple[list[tuple[int, ...]], StepResult]:
        environment = task.environment()
        seen = [(await environment.reset(prompt)).token_ids]
        for turn in turns:
            result = await environment.step(tuple(turn))
            seen.append(result.observation.token_ids)
        await environment.close()
        return seen, result

    return asyncio.run(episode())


def scored(task: ChatTask, prompt: Prompt, turns: Sequence[Sequence[int]]) -> float:
    """By the reward function, from what it is sent."""
    module, _, function = registry.reward_of(task).partition(":")
    actions = [list(action) for action in task.played(task.name, [tuple(turn) for turn in turns])]
    payload = {"trajectory_id": "t", "task": task.name, "prompt": prompt.payload, "actions": actions}
    return float(getattr(importlib.import_module(module), function)(json.loads(json.dumps(payload)))["reward"])


def said(task: ChatTask, text: str) -> tuple[int, ...]:
    return (*task.chat.encode(text), task.end_id)


TASKS = [
    pytest.param(["task.name=nim"], id="nim"),
    pytest.param(["task.name=household"], id="household"),
    pytest.param(
        ["task.name=reasoning_gym", "task.dataset=chain_sum"],
        id="reasoning_gym",
        marks=[needs_library, pytest.mark.slow],
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize("overrides", TASKS)
def test_an_expert_who_speaks_with_the_tokenizer_gets_the_tasks_own_reward(folder: Path, overrides: list[str]) -> None:
    task = make(folder, *overrides)
    inner: Any = preflight.make_task(load_config(None, [*overrides, "task.heldout_maps=5"]))
    for prompt in itertools.islice(task.prompts("train", 0), 5):
        expert = inner.expert(prompt.payload)
        turns = [said(task, answer) for _, answer in expert]
        seen, last = play(task, prompt, turns)
        assert last.done
        assert last.reward == scored(task, prompt, turns) == 1.0
        messages = [Message("system", SYSTEM)]
        context: list[int] = []
        for shown, (question, answer), turn in zip(seen, expert, turns, strict=False):
            messages.append(Message("user", question.strip()))
            context += shown
            assert tuple(context) == task.chat.encode_conversation(messages, ""), "the template's own ids"
            messages.append(Message("assistant", answer))
            context += turn
        assert seen[-1] == ()
        assert len(context) <= task.max_context_tokens
        assert max(map(len, seen[1:])) <= task.max_reply_tokens
        spoiled = [*turns[:-1], said(task, "nothing")]
        assert scored(task, prompt, spoiled) < 1.0


def test_what_the_policy_said_is_never_tokenized_again(folder: Path) -> None:
    """Other ids of the same text, and an answer that was cut off: both stay, and the template goes on behind them."""
    task = make(folder, "task.name=household")
    prompt = next(task.prompts("train", 0))
    letters = tuple(task.chat.encode(letter)[0] for letter in "open")
    assert letters != task.chat.encode("open")
    seen, _ = play(task, prompt, [(*letters, task.end_id), letters])
    between = task.chat.encode("\n<|im_start|>user\n")
    assert seen[1][: len(between)] == between
    assert seen[2][: len(between) + 1] == (task.end_id, *between), "what was cut off is closed"
    assert task.inner_action((*letters, task.end_id)) == task.inner_action(said(task, "open"))
    assert not task._task.words.said(task.inner_action(letters))


def test_a_turn_says_nothing_when_it_is_not_ended_or_holds_a_word_that_the_task_has_not(folder: Path) -> None:
    task = make(folder, "task.name=nim")
    prompt = next(task.prompts("train", 0))
    right = registry.make("nim", 5).expert(prompt.payload)[0][1]  # type: ignore[attr-defined]
    assert scored(task, prompt, [said(task, f" {right}\n")]) == 1.0
    cut = said(task, right)[:-1]
    for turn in (cut, said(task, f"{right} please"), said(task, "é"), (task.end_id,)):
        assert scored(task, prompt, [turn]) == 0.0
        _, last = play(task, prompt, [turn])
        assert (last.reward, last.done, last.truncated) == (0.0, True, turn == cut)


def test_with_a_pattern_the_task_hears_its_last_match_only(folder: Path) -> None:
    task = make(folder, "task.name=nim", "task.chat.answer=[a-d][0-7]", "task.chat.response_tokens=30")
    prompt = next(task.prompts("train", 0))
    right = registry.make("nim", 5).expert(prompt.payload)[0][1]  # type: ignore[attr-defined]
    assert scored(task, prompt, [said(task, f"Not d7, but {right}!")]) == 1.0
    for text in (f"{right}, or rather d7", "nothing of that kind", ""):
        assert scored(task, prompt, [said(task, text)]) == 0.0
    assert scored(task, prompt, [said(task, f"It is {right}.")[:-1]]) == 0.0, "not ended"
    with pytest.raises(ConfigError, match=r"^task\.chat\.answer = '\('"):
        make(folder, "task.name=nim", "task.chat.answer=(")
    with pytest.raises(ConfigError, match=r"^task\.chat\.answer = .*RE2 accepts \(no look-around"):
        make(folder, "task.name=nim", "task.chat.answer=(?=a)b")


@pytest.mark.parametrize("name", ["nim", "household"])
def test_examples_are_the_experts_episodes_of_the_training_split(folder: Path, name: str) -> None:
    task = make(folder, f"task.name={name}", "task.chat.examples=2", "task.heldout_maps=300")
    bare = make(folder, f"task.name={name}", "task.heldout_maps=300")
    inner: Any = registry.make(name, 300)
    told = [message for message in task.first if message.role != "system"]
    turns = [(ask.content, answer.content) for ask, answer in zip(told[::2], told[1::2], strict=True)]
    assert {message.role for message in told[::2]} == {"user"}
    heldout = [
        [(seen.strip(), answer) for seen, answer in inner.expert(p.payload)] for p in inner.prompts("heldout", 0)
    ]
    episodes = [turns[at:] for at in range(len(turns))]
    assert not any(episode[: len(held)] == held for held in heldout for episode in episodes)
    prompt = next(task.prompts("train", 0))
    ([seen, *_], _), ([plain, *_], _) = (play(each, prompt, [said(each, "nothing")]) for each in (task, bare))
    assert seen == task.chat.encode_conversation((*task.first, Message("user", inner.play(prompt.payload).start())), "")
    assert len(plain) < len(seen) <= task.max_prompt_tokens


def test_demonstrations_are_the_tasks_own_in_the_template_and_only_answers_are_learned(folder: Path) -> None:
    task = make(folder, "task.name=household")
    inner: Any = registry.make("household", 5)
    for (tokens, mask), (plain, acted) in zip(
        task.demonstrations(6, 0, 1.0), inner.demonstrations(6, 0, 1.0), strict=True
    ):
        learned = [
            list(group) for key, group in itertools.groupby(zip(tokens, mask, strict=True), lambda x: x[1]) if key
        ]
        expected = [
            list(group) for key, group in itertools.groupby(zip(plain, acted, strict=True), lambda x: x[1]) if key
        ]
        assert len(learned) == len(expected) > 1
        for ours, theirs in zip(learned, expected, strict=True):
            assert task.inner_action([token for token, _ in ours]) == tuple(token for token, _ in theirs)
        begins = f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\nput "
        assert tuple(tokens[: len(task.chat.encode(begins)) - 1]) == task.chat.encode(begins)[:-1]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["task.name=mixture", "task.mixture={nim=1.0, frozenlake=1.0}"], "frozenlake has no text"),
        (["task.name=nim", "task.memory.turns=2"], "not together with memory"),
        (["task.name=frozenlake"], "frozenlake has no text"),
    ],
)
def test_a_task_that_no_tokenizer_can_speak_is_refused(folder: Path, overrides: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make(folder, *overrides)


def test_a_tokenizer_is_named_and_has_a_template(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^task\.chat\.tokenizer = .*: name the folder"):
        load_config(None, ["task.name=nim", "task.chat.system=Hello"])
    with pytest.raises(ConfigError, match=r"^task\.chat\.tokenizer = .*not a folder"):
        make(tmp_path / "none", "task.name=nim")
    with pytest.raises(ConfigError, match=r"^task\.chat\.tokenizer = .*no chat template"):
        make(write_tokenizer(tmp_path / "plain", template=""), "task.name=nim")
    one = "{% if messages | length > 2 %}{{ raise_exception('one question only') }}{% endif %}" + CHATML
    once = write_tokenizer(tmp_path / "once", template=one)
    assert make(once, "task.name=nim").max_turns == 1
    with pytest.raises(ConfigError, match="household has 10 turns"):
        make(once, "task.name=household")


def test_the_models_folder_is_checked_before_anything_starts(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from megatron_rlplugin import tiny_model

    overrides = ["task.name=nim", "evaluation.prompts=5", f'model.path="{tmp_path}"']
    config = load_config(None, [*overrides, f'task.chat.tokenizer="{folder}"', "task.heldout_maps=5"])
    task = preflight.make_task(config)
    shape = {"hidden_size": 32, "intermediate_size": 32, "layers": 1, "heads": 2, "kv_heads": 1, "head_dim": 16}
    spoken = len(task.vocabulary)
    for size in (spoken - 8, spoken):
        words = [f"w{index}" for index in range(size)]
        tiny_model.create_llama(str(tmp_path), vocabulary=words, max_positions=64, dtype="float32", seed=0, **shape)
        if size < spoken:
            with pytest.raises(ConfigError, match=rf"uses {spoken} tokens, this model has {size}: use its tok"):
                preflight._model(config, task)
    preflight._model(config, task)
    data = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(data | {"mlp_bias": True}))
    with pytest.raises(ConfigError, match=r"^model\.mlp_bias = True"):
        preflight._model(config, task)


@needs_library
def test_a_data_set_of_reasoning_gym_takes_its_own_options() -> None:
    options = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    task = registry.make("reasoning_gym", 5, dataset="chain_sum", dataset_options=options)
    easy: Any = task
    for prompt in itertools.islice(task.prompts("train", 0), 20):
        (question, answer), *_ = easy.expert(prompt.payload)
        assert len(question.split(":")[1].split()) == 4, "two terms"
        assert abs(int(answer)) < 19
    for wrong, words in (
        ({"no_such": 1}, "does not take them"),
        ({"max_terms": 1}, "does not take"),
        ({"seed": 3}, "set by the run"),
    ):
        with pytest.raises(ConfigError, match=rf"^task\.dataset_options = .*{words}"):
            registry.make("reasoning_gym", 5, dataset="chain_sum", dataset_options=wrong)
    with pytest.raises(ConfigError, match=r"dataset_options: only for name = 'reasoning_gym'"):
        load_config(None, ["task.name=nim", "task.dataset_options={max_terms=2}"])


def test_an_answer_ends_by_any_token_that_the_models_folder_names(tmp_path: Path) -> None:
    """As GLM-4.5, which begins the next speaker's turn, and Gemma 3: neither says the tokenizer's eos_token."""
    folder = write_tokenizer(tmp_path)
    plain = make(folder, "task.name=nim")
    begins = plain.chat.encode("<|im_start|>")[0]
    (folder / "config.json").write_text(json.dumps({"eos_token_id": [plain.end_id, begins]}))
    task = make(folder, "task.name=nim")
    assert (stop_ids_of(plain), stop_ids_of(task)) == ((plain.end_id,), (plain.end_id, begins))
    prompt = next(task.prompts("train", 0))
    right = task.chat.encode(registry.make("nim", 5).expert(prompt.payload)[0][1])  # type: ignore[attr-defined]
    assert [scored(one, prompt, [(*right, begins)]) for one in (plain, task)] == [0.0, 1.0]
    shares = ["task.name=mixture", "task.mixture={nim=1.0, household=1.0}", f'task.chat.tokenizer="{folder}"']
    mixed = preflight.make_task(load_config(None, [*shares, "task.heldout_maps=2"]))
    for one in (task, mixed):
        asked = [*sampled_by_rollout(one), *sampled_by_evaluation(one)]
        assert len(asked) > 1
        assert {sampling.stop_token_ids for sampling in asked} == {stop_ids_of(task)}
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": task.end_id}))
    assert stop_ids_of(make(folder, "task.name=nim")) == (task.end_id,), "where both say, the first counts"


def sampled_by_rollout(task: Task) -> list[Sampling]:
    settings, mode = load_config(None).rollout, coordination_mode("async", 1)
    size, nothing, beside = (
        BatchSize(8, 8, 1.0),
        cast(Any, SimpleNamespace()),
        {"life": 0, "redundancy": None, "again": ()},
    )
    names = ("filters", "proxy", "environments", "lockstep", "forecasts", "rounds", "prompts", "shards", "keep", "fail")
    rest = dict.fromkeys(names, nothing) | beside
    rollout = Rollout(
        settings, size, task, nothing, nothing, nothing, mode=mode, buffer=nothing, groups=0, trajectories=0, **rest
    )
    return list(rollout._sampling.values())


def sampled_by_evaluation(task: Task) -> list[Sampling]:
    asked: list[Sampling] = []

    class Recorder:
        async def play(self, episode: Any, sampling: Sampling) -> None:
            asked.append(sampling)
            raise TrajectoryError("nothing", "")

    evaluator = Evaluator(
        cast(Any, Recorder()), task, cast(Any, None), seed=0, prompts=2, slots=2, timeout=1.0, forget=lambda _: None
    )
    asyncio.run(evaluator.evaluate("e"))
    return asked
