"""The FrozenLake task: splits, text, environment, reward, demonstrations."""

import asyncio
import itertools
import json
import random
import subprocess
import sys

import pytest

from orchestrator.api import Environment, Prompt, Task
from orchestrator.tasks.frozenlake import (
    END_ID,
    MAX_TURNS,
    MOVES,
    VOCABULARY,
    FrozenLakeEnv,
    FrozenLakeTask,
    decode,
    distances,
    encode,
    is_heldout,
    move_of,
    next_state,
    solvable_maps,
)
from orchestrator.tasks.rewards import frozenlake_moves, frozenlake_success
from orchestrator.tasks.splits import key_of

CLASSIC = "SFFF/FHFH/FFFH/HFFG"


def prompt_of(payload: str) -> Prompt:
    return Prompt(key=key_of(payload), task="frozenlake", seed=0, payload=payload)


def play(payload: str, words: list[str]) -> list:
    """Step results of one answer a turn (words without ``<end>`` get it)."""

    async def run() -> list:
        env: Environment = FrozenLakeEnv()
        await env.reset(prompt_of(payload))
        results = [await env.step(encode(text)) for text in words]
        await env.close()
        return results

    return asyncio.run(run())


def score(payload: str, actions: list[list[int]], **other: object) -> float:
    body = {"trajectory_id": "t", "task": "frozenlake", "prompt": payload, "actions": actions, **other}
    return frozenlake_success(json.loads(json.dumps(body)))["reward"]


def test_vocabulary_is_one_word_a_token() -> None:
    assert len(VOCABULARY) == len(set(VOCABULARY)) == 64
    text = "<lake> a1S b1. c1H d4G @b3 down <end>"
    assert decode(encode(text)) == text
    with pytest.raises(ValueError, match="jump"):
        encode("left jump")
    with pytest.raises(ValueError, match="64"):
        decode([64])


def test_importing_the_package_imports_no_gymnasium() -> None:
    code = "import sys, orchestrator.tasks.rewards; assert not {'gymnasium', 'numpy', 'torch'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_splits_are_disjoint_solvable_and_deterministic() -> None:
    task: Task = FrozenLakeTask(heldout_maps=400)
    heldout = list(task.prompts("heldout", 0))
    train = list(itertools.islice(task.prompts("train", 0), 3000))
    assert len({p.key for p in heldout}) == len(heldout) == 400
    assert all(is_heldout(p.payload) for p in heldout)
    assert len(solvable_maps()) == 3828
    assert len({p.key for p in train}) == 3000  # each map once an epoch
    assert not {p.payload for p in train} & {p.payload for p in heldout}
    assert all(p.key == key_of(p.payload) for p in heldout + train)
    for prompt in heldout + train:
        assert distances(prompt.payload)[0] == 6 <= MAX_TURNS
    assert list(FrozenLakeTask(heldout_maps=400).prompts("heldout", 5)) == heldout
    assert list(itertools.islice(FrozenLakeTask().prompts("train", 0), 50)) == train[:50]
    assert list(itertools.islice(FrozenLakeTask().prompts("train", 1), 50)) != train[:50]


def test_every_solvable_map_takes_six_moves() -> None:
    solvable = 0
    for holes in itertools.product("FH", repeat=14):
        cells = "S" + "".join(holes) + "G"
        away = distances("/".join(cells[i : i + 4] for i in range(0, 16, 4)))[0]
        assert away in (None, 6)
        solvable += away == 6
    assert solvable == 3828


@pytest.mark.parametrize("wrong", [{"heldout_maps": 10_000}, {"heldout_maps": 0}])
def test_wrong_arguments_are_refused(wrong: dict) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        FrozenLakeTask(**wrong)
    with pytest.raises(ValueError, match="split"):
        FrozenLakeTask().prompts("validation", 0)


def test_an_episode_to_the_goal_reads_as_text() -> None:
    async def run() -> list[str]:
        env = FrozenLakeTask().environment()
        said = [decode((await env.reset(prompt_of(CLASSIC))).token_ids)]
        for word in ("down", "down", "right", "right", "down", "right"):
            result = await env.step(encode(f"{word} <end>"))
            said.append(decode(result.observation.token_ids))
        assert (result.reward, result.done, result.truncated) == (1.0, True, False)
        with pytest.raises(RuntimeError, match="reset"):
            await env.step(encode("left <end>"))
        await env.close()
        await env.close()
        return said

    assert asyncio.run(run()) == [
        "<lake> a1S b1. c1. d1. a2. b2H c2. d2H a3. b3. c3. d3H a4H b4. c4. d4G @a1",
        *("@a2", "@a3", "@b3", "@c3", "@c4", ""),
    ]


def test_a_hole_ends_and_a_wall_stays() -> None:
    wall, on, hole = play(CLASSIC, ["up <end>", "right <end>", "down <end>"])
    assert decode(wall.observation.token_ids) == "@a1"
    assert not wall.invalid_action
    assert decode(on.observation.token_ids) == "@b1"
    assert (hole.done, hole.truncated, hole.reward) == (True, False, 0.0)


@pytest.mark.parametrize("text", ["", "right", "<end>", "<end> right", "right right", "right <end> <end>", "@b1 <end>"])
def test_a_wrong_answer_wastes_the_turn(text: str) -> None:
    assert move_of(encode(text)) is None
    (result,) = play(CLASSIC, [text])
    assert result.invalid_action
    assert decode(result.observation.token_ids) == "@a1"
    results = play(CLASSIC, [text] * MAX_TURNS)
    assert [r.truncated for r in results] == [False] * (MAX_TURNS - 1) + [True]
    assert not any(r.done for r in results)
    assert score(CLASSIC, [list(encode(text))] * MAX_TURNS) == 0.0


def test_the_context_bound_is_exact() -> None:
    task = FrozenLakeTask()
    results = play(CLASSIC, ["left <end>"] * MAX_TURNS)
    tokens = 18 + sum(len(r.observation.token_ids) for r in results) + 2 * MAX_TURNS
    assert tokens == task.max_context_tokens
    assert results[-1].observation.token_ids == ()


def test_the_reward_agrees_with_gymnasium_on_random_play() -> None:
    """Random, half-skilled and broken answers on 300 maps: replay and environment must tell the same story."""
    chance = random.Random(0)
    task = FrozenLakeTask()
    outcomes = {"goal": 0, "hole": 0, "unfinished": 0}

    async def episode(prompt: Prompt) -> tuple[list[list[int]], float, bool]:
        env = task.environment()
        await env.reset(prompt)
        actions, reward, state = [], 0.0, 0
        away, skill = distances(prompt.payload), chance.choice([0.0, 0.9])
        while True:
            word = chance.choice([*MOVES, "@a1"])
            if chance.random() < skill:
                word = next(
                    w for move, w in enumerate(MOVES) if away[next_state(state, move)] == (away[state] or 0) - 1
                )
            action = encode(chance.choice([f"{word} <end>"] * 9 + [word]))
            actions.append(list(action))
            move = move_of(action)
            state = state if move is None else next_state(state, move)
            result = await env.step(action)
            reward += result.reward
            if result.done or result.truncated:
                await env.close()
                return actions, reward, result.done

    for prompt in itertools.islice(task.prompts("train", 3), 300):
        actions, reward, done = asyncio.run(episode(prompt))
        answer = frozenlake_success({"task": "frozenlake", "prompt": prompt.payload, "actions": actions})
        assert answer["reward"] == reward
        assert (answer["outcome"] == "unfinished") == (not done)
        outcomes[str(answer["outcome"])] += 1
    assert min(outcomes.values()) > 10, outcomes


def test_the_reward_believes_no_flag_and_refuses_malformed_payloads() -> None:
    right, down = (list(encode(f"{word} <end>")) for word in ("right", "down"))
    assert score(CLASSIC, [right, down], reward=1.0, done=True) == 0.0
    assert score(CLASSIC, []) == 0.0
    assert score(CLASSIC, [down, down, right, right, down, right]) == 1.0
    for wrong in (
        {"task": "chess"},
        {"prompt": "SFFF"},
        {"prompt": "SFFF/FHFH/FFFH/HFFX"},
        {"prompt": None},
        {"actions": None},
        {"actions": [["down"]]},
        {"actions": [[True, END_ID]]},
        {"actions": [down] * (MAX_TURNS + 1)},
        {"actions": [right, down, right]},
    ):
        with pytest.raises(ValueError, match=r".+"):
            frozenlake_success({"task": "frozenlake", "prompt": CLASSIC, "actions": [right], **wrong})


def test_a_turn_without_a_move_costs_a_little_and_never_a_success() -> None:
    wasted, right, down = (list(encode(words)) for words in ("down down", "right <end>", "down <end>"))
    won = [down, down, right, right, down, right]
    payload = {"task": "frozenlake", "prompt": CLASSIC}
    rewards = [frozenlake_moves({**payload, "actions": [wasted] * n + won})["reward"] for n in range(7)]
    assert rewards == pytest.approx([1.0 - 0.04 * n for n in range(7)])
    assert frozenlake_moves({**payload, "actions": [wasted] * MAX_TURNS})["reward"] == pytest.approx(-0.48)
    assert 1.0 - 0.04 * MAX_TURNS > 0.5, "an evaluation counts a reward above 0.5 as a success"


def test_demonstrations_are_legal_episodes_on_training_maps() -> None:
    task = FrozenLakeTask()
    episodes = list(task.demonstrations(200, 1, 0.0))
    assert episodes == list(task.demonstrations(200, 1, 0.0))
    assert episodes != list(task.demonstrations(200, 2, 0.0))
    moves = dict.fromkeys(("left", "down", "right", "up"), 0)
    for tokens, mask in episodes:
        turns = (len(tokens) - 17) // 3
        assert len(tokens) == len(mask) == 17 + 3 * turns <= task.max_context_tokens
        assert mask == (0,) * 17 + (0, 1, 1) * turns
        words = decode(tokens).split()
        cells = "".join(word[-1] for word in words[1:17]).replace(".", "F")
        payload = "/".join(cells[i : i + 4] for i in range(0, 16, 4))
        assert not is_heldout(payload)
        answers = [f"{words[17 + 3 * t + 1]} {words[17 + 3 * t + 2]}" for t in range(turns)]
        results = play(payload, answers)
        assert ["@a1", *(decode(r.observation.token_ids) for r in results[:-1])] == words[17::3]
        assert results[-1].done or results[-1].truncated
        for answer in answers:
            moves[answer.split()[0]] += 1
    assert max(moves.values()) < 1.5 * min(moves.values()), moves


@pytest.mark.parametrize(("skill", "low", "high"), [(0.0, 0.0, 0.15), (1.0, 1.0, 1.0)])
def test_skill_is_the_share_of_expert_moves(skill: float, low: float, high: float) -> None:
    wins = 0
    for tokens, _ in FrozenLakeTask().demonstrations(200, 4, skill):
        before, move = decode(tokens[-3:]).split()[:2]
        wins += (before, move) in {("@d3", "down"), ("@c4", "right")}
    assert low <= wins / 200 <= high
    with pytest.raises(ValueError, match="skill"):
        FrozenLakeTask().demonstrations(1, 0, 1.5)
