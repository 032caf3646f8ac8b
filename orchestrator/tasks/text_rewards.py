"""Reward functions of the tasks in text: JSON in and JSON out, served by the function host under ``module:function``.

Guarantee: the reward follows from the start state and the tokens of the turns alone. It is computed by replaying them under
the task's rules, with no environment and no flag of the caller believed. ``coding_tests`` and ``repository_tests`` need a
sandbox.

``payload``: ``task``, ``prompt`` (the start state, as the task writes it), ``actions`` (a list of token ids for each turn);
other keys are ignored. Returns ``reward`` and ``outcome``, a word. Raises ValueError when the payload is not of this form, has
more turns than an episode may have, or goes on after the episode's end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from orchestrator.rewards.code_judge import CaseLimits, Verdict, judge_cases, judge_solution
from orchestrator.rewards.suite_judge import judge_suite
from orchestrator.sandbox import Sandbox
from orchestrator.tasks import reasoning_gym
from orchestrator.tasks.calculator import CalculatorTask, answers, is_answer, value_of
from orchestrator.tasks.coding import CodingTask, hidden_tests, is_handed_in
from orchestrator.tasks.household import HouseholdTask
from orchestrator.tasks.nim import NimTask
from orchestrator.tasks.repository import RepositoryTask, left_by, opened
from orchestrator.tasks.repository_bundles import HIDDEN, RepositoryBundle
from orchestrator.tasks.rewards import checked
from orchestrator.tasks.sums import SumsTask
from orchestrator.tasks.text import TextTask, replay_now
from orchestrator.tasks.vocabulary import CHARACTERS


def nim_move(payload: Mapping[str, Any]) -> dict[str, float | str]:
    """1.0 for a winning move, else 0.0."""
    return _replayed(payload, NimTask(heldout=1))


def sums_answer(payload: Mapping[str, Any]) -> dict[str, float | str]:
    """1.0 for the right number, else 0.0."""
    return _replayed(payload, SumsTask(heldout=1))


def household_goal(payload: Mapping[str, Any]) -> dict[str, float | str]:
    """1.0 when the thing is where it belongs, else 0.0."""
    return _replayed(payload, HouseholdTask(heldout=1))


def calculator_answer(payload: Mapping[str, Any]) -> dict[str, float | str]:
    """1.0 for the right answer, else 0.0. ``outcome``: ``"right"``, ``"wrong"`` or ``"unanswered"``. What the tool said does
    not count, so no sandbox is needed."""
    prompt, actions = checked(payload, CalculatorTask.name)
    value_of(prompt)  # refuses what is no expression, answered or not
    said = _final_turn(actions, CalculatorTask.max_turns, is_answer)
    if said is None:
        return {"reward": 0.0, "outcome": "unanswered"}
    right = answers(prompt, said)
    return {"reward": float(right), "outcome": "right" if right else "wrong"}


def coding_tests(payload: Mapping[str, Any]) -> dict[str, Any]:
    """1.0 when what was handed in passes every hidden test, else 0.0. ``outcome``: how many passed, and why not.
    With ``timeouts`` in the payload (``cases``, ``other``, ``whole``: seconds) each test case runs under its own limit, and
    ``cases`` says how those went that ran, ``correct`` whether all passed.
    Raises RetryableError when the sandbox does not start: a failure of the machine is no reward."""
    name, actions = checked(payload, CodingTask.name)
    tests = hidden_tests(name)
    solution = _final_turn(actions, CodingTask.max_turns, is_handed_in)
    if solution is None:
        return {"reward": 0.0, "outcome": "nothing handed in"}
    sandbox = Sandbox(slots=1)
    given = payload.get("timeouts")
    if given is None:
        return _scored(asyncio.run(judge_solution(sandbox, solution, tests)))
    limits = CaseLimits(given["cases"], given["other"], given["whole"])
    verdict, times = asyncio.run(judge_cases(sandbox, solution, tests, limits))
    return {**_scored(verdict), "correct": verdict.all_passed, "cases": [asdict(time) for time in times]}


def repository_tests(payload: Mapping[str, Any]) -> dict[str, Any]:
    """1.0 when every hidden test that should pass does with the files as they were left, else 0.0, as without ``done``.
    ``outcome``: how many passed, and why not. Raises RetryableError when the sandbox does not start."""
    prompt, actions = checked(payload, RepositoryTask.name)
    if len(actions) > RepositoryTask.max_turns:
        raise ValueError(f"{len(actions)} turns: an episode has at most {RepositoryTask.max_turns}")
    bundle, _ = opened(prompt)
    return asyncio.run(_judged(bundle, prompt, [CHARACTERS.said(turn) for turn in actions]))


async def _judged(bundle: RepositoryBundle, prompt: str, turns: Sequence[str | None]) -> dict[str, Any]:
    files, done = await left_by(prompt, turns)
    if not done:
        return {"reward": 0.0, "outcome": "nothing handed in"}
    verdict = await judge_suite(Sandbox(slots=1), files, bundle.hidden_files(), bundle.modules, HIDDEN)
    passed = len(set(bundle.passing) & set(verdict.passed))
    outcome = f"{passed} of {len(bundle.passing)} passed {verdict.detail}".rstrip()
    return {"reward": float(passed == len(bundle.passing)), "outcome": outcome}


def _scored(verdict: Verdict) -> dict[str, Any]:
    outcome = f"{sum(verdict.passed)} of {len(verdict.passed)} passed {verdict.detail}".rstrip()
    return {"reward": float(verdict.all_passed), "outcome": outcome}


def reasoning_gym_score(payload: Mapping[str, Any]) -> dict[str, float | str]:
    """The library's score of the answer, 0 to 1; 0.0 for a turn that was not ended."""
    prompt, actions = checked(payload, "reasoning_gym")
    if len(actions) > 1:
        raise ValueError(f"{len(actions)} turns: an episode has at most 1")
    reasoning_gym.item_of(prompt)
    said = CHARACTERS.said(actions[0]) if actions else None
    if said is None:
        return {"reward": 0.0, "outcome": "unanswered"}
    reward = reasoning_gym.score(prompt, said)
    return {"reward": reward, "outcome": "right" if reward == 1.0 else "wrong"}


def _replayed(payload: Mapping[str, Any], task: TextTask) -> dict[str, float | str]:
    prompt, actions = checked(payload, task.name)
    reward = replay_now(task, prompt, actions)
    return {"reward": reward, "outcome": "success" if reward > 0 else "failure"}


def _final_turn(actions: Sequence[Sequence[int]], most: int, ends: Callable[[str], bool]) -> str | None:
    """What the last turn says, when it ends the episode. Raises ValueError for too many turns, or one that ended the episode
    before the last."""
    if len(actions) > most:
        raise ValueError(f"{len(actions)} turns: an episode has at most {most}")
    said = [CHARACTERS.said(turn) for turn in actions]
    ended = [text is not None and ends(text) for text in said]
    if any(ended[:-1]):
        raise ValueError(f"the episode ended at turn {ended.index(True) + 1}, but {len(actions)} turns were given")
    return said[-1] if said and ended[-1] else None
