"""Every task: deterministic, held-out apart from training, playable by anything, scored by what was done alone."""

from __future__ import annotations

import asyncio
import builtins
import importlib
import importlib.util
import itertools
import json
import os
import random
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from orchestrator.api import Completion, ConfigError, Environment, GenerationRequest, Prompt, Sampling, Task
from orchestrator.config import load_config
from orchestrator.envs import EnvManager, Episode
from orchestrator.runtime import preflight
from orchestrator.settings.user_functions import named_function
from orchestrator.tasks import registry, splits, vocabulary
from orchestrator.tasks.dataset import scorer
from orchestrator.tasks.household import HouseholdTask
from orchestrator.tasks.nim import Nim, NimTask
from orchestrator.tasks.text import Reply, TextTask

ROOT = Path(__file__).parents[2]
SANDBOXED = ("calculator", "coding", "repository")
HELDOUT = 20
needs_library = pytest.mark.skipif(
    importlib.util.find_spec("reasoning_gym") is None, reason="needs the library reasoning-gym"
)
needs_sandbox = pytest.mark.skipif(shutil.which("bwrap") is None, reason="needs bubblewrap")


def _marked(name: str) -> Any:
    marks = {"reasoning_gym": [needs_library, pytest.mark.slow], **{key: [needs_sandbox] for key in SANDBOXED}}
    return pytest.param(name, marks=marks.get(name, []))


NAMES = [_marked(name) for name in registry.BUILT_IN if name != "mixture"]  # it is made of the others
TEXT = [name for name in NAMES if name.values != ("frozenlake",)]


def make(name: str, heldout: int = HELDOUT) -> Any:
    return registry.make(name, heldout, **({"dataset": "chain_sum"} if name == "reasoning_gym" else {}))


def scored(task: Task, prompt: Prompt, actions: list[list[int]], other: dict[str, object] | None = None) -> float:
    module, _, function = registry.reward_of(task).partition(":")
    payload = {"trajectory_id": "t", "task": task.name, "prompt": prompt.payload, "actions": actions, **(other or {})}
    return float(getattr(importlib.import_module(module), function)(json.loads(json.dumps(payload)))["reward"])


class RandomPolicy:
    """A proxy whose answers are random tokens, often in the form of an answer: it ends most turns."""

    def __init__(self, task: Task, seed: int) -> None:
        self.task, self.chance = task, random.Random(seed)
        self.requests: list[GenerationRequest] = []

    async def generate(self, request: GenerationRequest) -> Completion:
        self.requests.append(request)
        length = self.chance.randint(1, request.sampling.max_tokens)
        tokens = [self.chance.randrange(len(self.task.vocabulary)) for _ in range(length)]
        if self.chance.random() < 0.8:
            tokens[-1] = self.task.end_id
        return Completion(request.request_id, tuple(tokens), (-1.0,) * length, ((0, length),), "stop")

    def note_fault(self, what: str, detail: str) -> None:
        raise AssertionError((what, detail))


def random_episode(task: Task, prompt: Prompt, seed: int) -> tuple[Episode, RandomPolicy]:
    async def run() -> tuple[Episode, RandomPolicy]:
        policy = RandomPolicy(task, seed)
        manager = EnvManager(task, policy, step_timeout=60, trajectory_timeout=300, is_stale=lambda _: False)  # type: ignore[arg-type]
        episode = Episode("t0", "g0", prompt, 0.0)
        await manager.play(episode, Sampling(task.max_response_tokens, stop_token_ids=(task.end_id,)))
        return episode, policy

    return asyncio.run(run())


async def play(environment: Environment, prompt: Prompt, actions: list[tuple[int, ...]]) -> list[Any]:
    seen: list[Any] = [await environment.reset(prompt)]
    for action in actions:
        seen.append(await environment.step(action))
        if seen[-1].done or seen[-1].truncated:
            break
    return seen


@pytest.mark.parametrize("name", NAMES)
def test_random_actions_play_an_episode_to_its_end_and_are_scored(name: str) -> None:
    task = make(name)
    for seed, prompt in enumerate(itertools.islice(task.prompts("train", 5), 2)):
        episode, policy = random_episode(task, prompt, seed)
        assert 1 <= len(episode.turns) <= task.max_turns
        assert episode.turns[-1].done or episode.truncated
        assert all(len(r.token_ids) + r.sampling.max_tokens <= task.max_context_tokens for r in policy.requests)
        reward = scored(task, prompt, [list(turn.action_ids) for turn in episode.turns])
        assert -0.5 < reward <= 1.0  # FrozenLake takes a little for turns without a move
        again, _ = random_episode(task, prompt, seed)
        assert [t.observation_ids for t in again.turns] == [t.observation_ids for t in episode.turns]


@pytest.mark.parametrize("name", NAMES)
def test_prompts_are_deterministic_and_held_out_ones_are_never_trained_on(name: str) -> None:
    task = make(name)
    heldout = list(task.prompts("heldout", 1))
    assert heldout == list(make(name).prompts("heldout", 2))
    assert len({prompt.key for prompt in heldout}) == len(heldout) == HELDOUT
    train = list(itertools.islice(task.prompts("train", 3), 200))
    assert train == list(itertools.islice(make(name).prompts("train", 3), 200))
    assert train != list(itertools.islice(task.prompts("train", 4), 200))
    everything_heldout = {prompt.key for prompt in make(name, 20 if name == "repository" else 40).prompts("heldout", 0)}
    assert not everything_heldout & {prompt.key for prompt in train}
    assert all(prompt.task == name for prompt in (*heldout, *train))
    with pytest.raises(ValueError, match="split"):
        task.prompts("test", 0)


@pytest.mark.parametrize("name", NAMES)
def test_a_task_cannot_hold_out_more_than_there_is(name: str) -> None:
    with pytest.raises((ValueError, ConfigError)):
        make(name, 0)


@pytest.fixture
def runner() -> Iterator[asyncio.Runner]:
    """One loop for many episodes: a scorer in a process of its own is started once per loop."""
    with asyncio.Runner() as runner:
        yield runner


@pytest.mark.parametrize("name", TEXT)
def test_the_expert_succeeds_and_its_turns_fit(name: str, runner: asyncio.Runner) -> None:
    task = make(name)
    for prompt in itertools.islice(task.prompts("train", 1), 4 if name in SANDBOXED else 40):
        turns = task.expert(prompt.payload)
        actions = [task.words.turn(answer) for _, answer in turns]
        assert all(len(action) <= task.max_response_tokens for action in actions)
        seen = runner.run(play(task.environment(), prompt, actions))
        observations = [seen[0], *(step.observation for step in seen[1:-1])]
        assert [task.words.decode(o.token_ids) for o in observations] == [text for text, _ in turns]
        assert seen[-1].done
        assert scored(task, prompt, [list(action) for action in actions]) == 1.0


@pytest.mark.parametrize("name", NAMES)
def test_an_environment_that_is_reset_in_mid_episode_is_as_a_fresh_one(name: str) -> None:
    task = make(name)
    used, fresh = task.environment(), task.environment()
    first, second = itertools.islice(task.prompts("train", 9), 2)
    actions = [(2, task.end_id)] * 2

    async def compare() -> None:
        await play(used, first, actions)
        assert await play(used, second, actions) == await play(fresh, second, actions)
        await used.close()
        await used.close()
        with pytest.raises(RuntimeError, match="reset"):
            await used.step((2, task.end_id))

    asyncio.run(compare())


@pytest.mark.parametrize("name", TEXT)
def test_a_turn_that_is_not_ended_earns_nothing(name: str) -> None:
    task = make(name)
    prompt = next(task.prompts("train", 2))
    actions = [task.words.turn(answer) for _, answer in task.expert(prompt.payload)]
    for last in (actions[-1][:-1], (*actions[-1], 2), (task.end_id, *actions[-1]), ()):
        assert scored(task, prompt, [*map(list, actions[:-1]), list(last)]) == 0.0


@pytest.mark.parametrize("name", NAMES)
def test_the_reward_believes_nothing_but_the_tokens(name: str) -> None:
    task = make(name)
    prompt = next(task.prompts("train", 2))
    wasted = [[task.pad_id]]
    assert scored(task, prompt, wasted, {"reward": 1.0, "done": True, "outcome": "goal"}) <= 0.0
    for wrong in ({"task": "other"}, {"prompt": 3}, {"prompt": "nonsense"}, {"actions": "x"}, {"actions": [["x"]]}):
        with pytest.raises((ValueError, ConfigError)):
            scored(task, prompt, wasted, wrong)
    with pytest.raises(ValueError, match="turns"):
        scored(task, prompt, wasted * (task.max_turns + 1))


def test_turns_after_the_end_are_refused() -> None:
    task = make("household")
    prompt = next(task.prompts("train", 2))
    actions = [list(task.words.turn(answer)) for _, answer in task.expert(prompt.payload)]
    with pytest.raises(ValueError, match="ended at turn"):
        scored(task, prompt, [*actions, list(task.words.turn("open"))])


@pytest.mark.parametrize("name", TEXT)
def test_demonstrations_teach_the_form_and_skill_says_how_often_the_content(name: str) -> None:
    task: TextTask = make(name)
    expert = list(task.demonstrations(6, 0, 1.0))
    assert expert == list(task.demonstrations(6, 0, 1.0))
    assert expert != list(task.demonstrations(6, 1, 1.0))
    assert expert != list(task.demonstrations(6, 0, 0.0))
    for tokens, mask in (*expert, *task.demonstrations(6, 0, 0.0)):
        assert len(tokens) == len(mask) <= task.max_context_tokens
        assert all(0 <= token < len(task.vocabulary) for token in tokens)
        assert mask[-1] == 1
        assert tokens[-1] == task.end_id
        assert 0 in mask
    with pytest.raises(ValueError, match="skill"):
        task.demonstrations(1, 0, 1.5)


# ------------------------------------------------------------------------------------------------------ single tasks


def test_nim_knows_the_winning_moves_that_searching_finds() -> None:
    def wins(heaps: tuple[int, ...], seen: dict[tuple[int, ...], bool]) -> bool:
        if heaps not in seen:
            after = ((*h[:i], left, *h[i + 1 :]) for h in [heaps] for i in range(len(h)) for left in range(h[i]))
            seen[heaps] = any(not wins(tuple(each), seen) for each in after)
        return seen[heaps]

    seen: dict[tuple[int, ...], bool] = {}
    for prompt in itertools.islice(NimTask(5).prompts("train", 0), 60):
        heaps = tuple(map(int, prompt.payload.split("/")))
        game = Nim(prompt.payload)
        for index, heap in enumerate("abcd"):
            for left in range(8):
                legal = left < heaps[index]
                expected = legal and not wins((*heaps[:index], left, *heaps[index + 1 :]), seen)
                assert game.wins(f"{heap}{left}") == expected
    assert not any(game.wins(move) for move in ("", "a", "e0", "a0 b0", "<pad>", None))


HOUSE = "hall/fridge/apple:kitchen cup:hall key:hall/apple drawer"


def house(*commands: str) -> list[str]:
    task = HouseholdTask(5)

    async def run() -> list[str]:
        game = task.play(HOUSE)
        said = [game.start()]
        for command in commands:
            reply = await game.act(command)
            said.append(reply.text if not reply.done else f"done {reply.reward}")
        return said

    return asyncio.run(run())


def test_a_house_obeys_and_refuses() -> None:
    assert house("go kitchen", "take apple", "open", "take apple", "take apple", "go bedroom", "put") == [
        "put apple in drawer @hall shelf cup key",
        "@kitchen fridge closed",
        "no @kitchen fridge closed",
        "@kitchen fridge apple",
        "@kitchen fridge holding apple",
        "no @kitchen fridge holding apple",
        "@bedroom drawer holding apple",
        "done 1.0",
    ]
    assert house("take cup", "go bedroom", "put", "open", "go bedroom", "go attic", "dance", "")[3:] == [
        "@bedroom drawer cup",
        *["no @bedroom drawer cup"] * 5,
    ]


@pytest.mark.parametrize(
    "payload", ["", "hall", "attic///key fridge", "hall//key:attic/key fridge", "hall//key:hall/cup fridge"]
)
def test_what_is_no_house_is_refused(payload: str) -> None:
    with pytest.raises(ValueError, match="not a house"):
        HouseholdTask(5).play(payload)


@needs_sandbox
@pytest.mark.parametrize(
    ("program", "reply"),
    [
        (">6*7", "42\n"),
        (">x = 3\nfor i in range(2):\n    print(i)\nx", "0\n1\n3\n"),
        (">None", "\n"),
        (">1/0", "ZeroDivisionError\n"),
        (">import socket; socket.create_connection(('127.0.0.1', 1))", "ConnectionRefusedError\n"),
        (">1+", "SyntaxError\n"),
        ("6*7", "?\n"),
    ],
)
def test_the_tool_answers_what_the_program_prints(program: str, reply: str) -> None:
    game = make("calculator").play("6*7")
    assert asyncio.run(game.act(program)).text == reply


def test_a_tool_that_floods_is_cut_and_the_episode_goes_on() -> None:
    class Flood:
        def start(self) -> str:
            return "a1"

        async def act(self, said: str | None) -> Reply:
            return Reply("a1 " * 99)

    class FloodTask(NimTask):
        max_turns, max_reply_tokens = 3, 5

        def play(self, payload: str) -> Any:
            return Flood()

    task = FloodTask(5)
    seen = asyncio.run(play(task.environment(), next(task.prompts("train", 0)), [(2, 1)]))
    assert len(seen[1].observation.token_ids) == 5


@needs_library
def test_no_answer_is_ever_run_by_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    from orchestrator.tasks import reasoning_gym

    for name in ("countdown", "n_queens", "spiral_matrix", "bitwise_arithmetic"):
        with pytest.raises(ConfigError, match=r"runs .*answer.* as code"):
            reasoning_gym.load(name)

    class Evaluates:
        def score_answer(self, answer: str, item: object) -> float:
            return float(eval(answer))

    with pytest.raises(ValueError, match="wanted to run code"):
        reasoning_gym._score(Evaluates(), {}, "1 + 1")
    ran: list[int] = []
    monkeypatch.setattr(builtins, "an_answer_ran", ran, raising=False)
    with pytest.raises(ValueError, match="wanted to run code"):
        reasoning_gym._score(Evaluates(), {}, "an_answer_ran.append(1) or 1.0")
    assert ran == []
    assert eval("1 + 1") == 2  # the guard is over


@needs_library
def test_a_data_set_that_is_not_there_or_does_not_fit_is_one_error() -> None:
    with pytest.raises(ConfigError, match="no such data set"):
        registry.make("reasoning_gym", 5, dataset="nothing")
    with pytest.raises(ConfigError, match="prompt_tokens"):
        registry.make("reasoning_gym", 5, dataset="leg_counting", prompt_tokens=10)


def test_without_the_library_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    from orchestrator.tasks import reasoning_gym

    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    reasoning_gym.load.cache_clear()
    with pytest.raises(ConfigError, match=r"pip install rl-coserve\[reasoning-gym\]"):
        registry.make("reasoning_gym", 5, dataset="chain_sum")


# ------------------------------------------------------------------------------------------------------- names, config


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nothing", "no such task; there are: frozenlake"),
        ("no.such.module:Task", "cannot be imported"),
        ("orchestrator.tasks.nim:Nothing", "has no class"),
        ("fractions:Fraction", "is not a task"),
        ("orchestrator.tasks.nim:Nim", "task = "),
    ],
)
def test_a_name_that_is_no_task_is_one_clear_error(name: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        registry.make(name, 5)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("def right(said, answer, row)\n    return 1\n", r"SyntaxError: expected ':' \(mine_{}\.py, line 1\)"),
        ("raise RuntimeError('no key')\n", "RuntimeError: no key"),
        ("import sys; sys.exit(2)\n", "SystemExit: 2"),
        ("import no_such_library\n", "No module named 'no_such_library'$"),
    ],
)
def test_a_module_that_cannot_be_imported_is_one_error_wherever_it_is_named(
    source: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = f"mine_{len(source)}"
    (tmp_path / f"{module}.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    ways: dict[str, Callable[[], object]] = {
        "task.name": lambda: registry.make(f"{module}:Right", 5),
        "task.data.reward": lambda: scorer(f"{module}:right"),
        "reward.function": lambda: named_function("reward.function", f"{module}:right"),
    }
    for field, way in ways.items():
        with pytest.raises(ConfigError, match=f"^{field} = '{module}:[Rr]ight': {module} cannot be imported: ") as said:
            way()
        assert re.search(words.format(len(source)), str(said.value).removesuffix("; write module:function"))
    with pytest.raises(ConfigError, match=rf"{module}\.py is a file, not a module; write {module}:Right$"):
        registry.make(f"{module}.py:Right", 5)


def test_a_task_needs_an_expert_for_a_warm_up_and_for_examples_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (ROOT / "docs" / "tasks.md").read_text(encoding="utf-8")
    example = page.split("Most tasks are a class")[1].split("```python\n")[1].split("```")[0]
    head, shown = example.split("    def expert", 1)
    (tmp_path / "bare.py").write_text(head + shown[shown.index("class Guess:") :].replace("guess:score", "bare:score"))
    monkeypatch.syspath_prepend(str(tmp_path))
    config = load_config(
        ROOT / "examples/frozenlake.toml",
        ["task.name=bare:GuessTask", "task.heldout_maps=20", "evaluation.prompts=20", "reward.function=bare:score"],
    )
    task = preflight.make_task(config)
    with pytest.raises(ConfigError, match=r"warmup\.steps = .*task guess has no expert.*set this to 0"):
        preflight.check(config, task)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))  # for the reward's processes
    preflight.check(config.model_copy(update={"warmup": config.warmup.model_copy(update={"steps": 0})}), task)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["task.name=nothing"], "there are: frozenlake"),
        (["task.dataset=chain_sum"], "only for name = 'reasoning_gym'"),
        (["task.name=reasoning_gym"], "needs one"),
    ],
)
def test_a_task_section_that_makes_no_sense_is_refused(overrides: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_config(None, overrides)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["task.name=coding"], "there are only about"),
        (["task.name=coding", "task.heldout_maps=20"], "scoring a trajectory"),
        (["task.name=household", "rollout.engine.max_model_len=64"], "may have 122 tokens"),
    ],
)
def test_what_a_task_needs_is_checked_before_a_run(overrides: list[str], words: str) -> None:
    config = load_config(
        ROOT / "examples/frozenlake.toml", ["evaluation.prompts=20", "rollout.engine.max_model_len=1024", *overrides]
    )
    with pytest.raises(ConfigError, match=words):
        preflight.check(config, preflight.make_task(config))


def test_every_task_names_a_reward_function_that_is_there() -> None:
    for target in registry.BUILT_IN.values():
        module, _, name = target.partition(":")
        reward = getattr(importlib.import_module(module), name).reward
        module, _, function = reward.partition(":")
        assert callable(getattr(importlib.import_module(module), function))


# ------------------------------------------------------------------------------------------------- vocabulary, splits


def test_text_comes_back_as_it_was() -> None:
    text = "def f(x):\n return ~{x}\n"
    assert vocabulary.CHARACTERS.decode(vocabulary.CHARACTERS.encode(text)) == text
    assert len(vocabulary.CHARACTERS.words) % 32 == 0
    assert vocabulary.printable("a\tb\u2028ü\n~") == "a    b??\n~"
    listed = vocabulary.words(["a", "b"])
    assert listed.decode(listed.encode("b a b")) == "b a b"
    assert listed.said(listed.turn("a b")) == "a b"
    for wrong in (listed.encode("a"), (1, 1), (0, 1), ()):
        assert listed.said(wrong) is None
    with pytest.raises(ValueError, match="'c'"):
        listed.encode("c")
    with pytest.raises(ValueError, match="outside"):
        listed.decode((999,))
    with pytest.raises(ValueError, match="twice"):
        vocabulary.words(["a", "a"])


@pytest.mark.parametrize("draw", [lambda _: "one", lambda chance: str(chance.randrange(3))])
def test_a_task_with_too_few_start_states_says_so(draw: Callable[[random.Random], str]) -> None:
    def identity(payload: str) -> str:
        return payload

    with pytest.raises(ValueError, match="there are only about"):
        splits.heldout("x", draw, identity, 5)
    heldout = [p for p in ("one", "0", "1", "2") if splits.is_heldout(splits.key_of(p))]
    if heldout == ["one"]:
        with pytest.raises(ValueError, match="no start state"):
            next(splits.training("x", lambda _: "one", identity, "s"))


# ---------------------------------------------------------------------------------------------------------- the page


@pytest.fixture
def page_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs/tasks.md").read_text(), re.DOTALL)
    (tmp_path / "guess.py").write_text(blocks[0])
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("guess", None)


def test_the_task_of_the_page_works_as_it_says(page_task: None) -> None:
    task = registry.make("guess:GuessTask", 5)
    prompt = next(task.prompts("train", 0))
    right = [list(task.words.turn(answer)) for _, answer in task.expert(prompt.payload)]  # type: ignore[attr-defined]
    assert scored(task, prompt, right) == 1.0
    episode, _ = random_episode(task, prompt, 0)
    assert 1 <= len(episode.turns) <= 4
    config = load_config(None, ["task.name='guess:GuessTask'", "task.heldout_maps=5"])
    assert preflight.make_task(config).name == "guess"


def test_the_table_of_the_page_lists_every_task() -> None:
    table = (ROOT / "docs/tasks.md").read_text().partition("| `task.name` |")[2].partition("\n\n")[0]
    assert re.findall(r"^\| `(\w+)`", table, re.M) == list(registry.BUILT_IN)


def test_the_configs_of_the_page_are_valid(tmp_path: Path) -> None:
    votes = []
    for text in re.findall(r"```toml\n(.*?)```", (ROOT / "docs/tasks.md").read_text(), re.DOTALL):
        (tmp_path / "c.toml").write_text(text)
        votes.append(load_config(tmp_path / "c.toml").reward.votes)
    assert 3 in votes


@needs_sandbox
def test_the_sandbox_example_of_the_page_runs() -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs/tasks.md").read_text(), re.DOTALL)
    body = "".join(f"    {line}\n" for line in blocks[1].splitlines())
    names: dict[str, Any] = {}
    exec(f"from orchestrator.sandbox import Sandbox, SandboxLimits\nasync def example():\n{body}", names)
    asyncio.run(names["example"]())
