"""Reward functions: pure, JSON in and JSON out, served by the function host under ``module:function``.

Guarantee: the reward follows from the map and the tokens of the turns alone. It is computed by replaying them under the
rules written here, with no environment and no flag of the caller believed. Those of the tasks in text are in
``text_rewards.py``: this module imports nothing that would slow a cold start.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from orchestrator.tasks.frozenlake import MAX_TURNS, TASK, move_of, next_state, parse_map

WASTED_TURN = 0.04
"""What a turn without a move costs: 11 of them leave a success above 0.5, where evaluations count one."""


def frozenlake_success(payload: Mapping[str, Any]) -> dict[str, float | str]:
    """1.0 when the moves reach the goal of the map, else 0.0.

    ``payload``: ``task`` (``"frozenlake"``), ``prompt`` (the map, ``SFFF/FHFH/FFFH/HFFG``), ``actions`` (a list of
    token ids for each turn); other keys are ignored. Returns ``reward`` and ``outcome``: ``"goal"``, ``"hole"`` or
    ``"unfinished"``.
    Raises ValueError when the payload is not of this form, has more than 12 turns, or goes on after the episode's end.
    """
    outcome, _ = _replayed(payload)
    return {"reward": 1.0 if outcome == "goal" else 0.0, "outcome": outcome}


def frozenlake_moves(payload: Mapping[str, Any]) -> dict[str, float | str]:
    """``frozenlake_success``, less 0.04 per turn that was no move.

    Where such a turn costs nothing and an entropy term pays for it, a policy learns to say anything at all until its last
    turns, and groups have nothing to compare. Success rates are the same under both functions.
    """
    outcome, wasted = _replayed(payload)
    return {"reward": round((outcome == "goal") - WASTED_TURN * wasted, 6), "outcome": outcome}


def _replayed(payload: Mapping[str, Any]) -> tuple[str, int]:
    """How the episode ended, and its turns that were no move."""
    prompt, actions = checked(payload, TASK, "the map as text")
    if len(actions) > MAX_TURNS:
        raise ValueError(f"{len(actions)} turns: an episode has at most {MAX_TURNS}")
    cells = "".join(parse_map(prompt))
    state = wasted = 0
    for count, turn in enumerate(actions, start=1):
        move = move_of(turn)
        if move is None:
            wasted += 1
        else:
            state = next_state(state, move)
        if cells[state] in "GH" and count < len(actions):
            raise ValueError(f"the episode ended at turn {count}, but {len(actions)} turns were given")
    return {"G": "goal", "H": "hole"}.get(cells[state], "unfinished"), wasted


def checked(payload: Mapping[str, Any], task: str, form: str = "text") -> tuple[str, list[list[int]]]:
    """Prompt and actions of a payload; ``form`` says what the prompt is. Raises ValueError."""
    if payload.get("task") != task:
        raise ValueError(f"task = {payload.get('task')!r}: this function scores {task!r}")
    prompt, actions = payload.get("prompt"), payload.get("actions")
    if not isinstance(prompt, str):
        raise ValueError(f"prompt must be {form}")
    if not isinstance(actions, list) or not all(_is_turn(turn) for turn in actions):
        raise ValueError("actions must be a list of lists of token ids")
    return prompt, actions


def _is_turn(turn: object) -> bool:
    return isinstance(turn, list) and all(isinstance(token, int) and not isinstance(token, bool) for token in turn)
