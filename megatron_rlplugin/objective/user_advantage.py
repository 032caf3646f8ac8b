"""Advantages of the user's (``trainer.advantage = "module:function"``), for objectives whose advantages are of groups.

The function gets the rewards of a group's members and how many tokens of each are trained, and returns a number for each member,
in that order; it is called for every group, also one whose rewards are all equal. It must follow from what it gets: each replica
of the trainer calls it.

Guarantees: before anything starts it is called with made-up groups, and what is not of the contract is one ConfigError that names
it; a RunError where it breaks the contract in a step. A member with several contexts is one member: all have its advantage.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from orchestrator.api import ConfigError, RunError
from orchestrator.settings.trainer_settings import TrainerSettings
from orchestrator.settings.user_functions import named_function

FIELD = "trainer.advantage"
_GROUPS = ([0.0, 1.0, 0.5], [1.0, 1.0], [0.25])  # rewards that it is tried with


def own_advantages(
    target: str, rewards: Sequence[float], tokens: Sequence[int], groups: Sequence[str], names: Sequence[str]
) -> list[float]:
    """Of each trajectory, or of each context of one. ``names``: see ``group_advantages``. Raises RunError."""
    function = named_function(FIELD, target)
    members: dict[str, dict[object, list[int]]] = {}  # group -> member -> where it stands
    for place, (group, name) in enumerate(zip(groups, names, strict=True)):
        members.setdefault(group, {}).setdefault(name or place, []).append(place)
    found = [0.0] * len(rewards)
    for places in members.values():
        each = list(places.values())
        given = [rewards[own[0]] for own in each], [sum(tokens[place] for place in own) for own in each]
        try:
            values = _checked(function(*given), len(each))
        except Exception as error:  # whatever a user's function raises, it is named
            raise RunError(f"{FIELD} = {target!r}: {type(error).__name__}: {error}") from error
        for own, value in zip(each, values, strict=True):
            for place in own:
                found[place] = value
    return found


def check_advantage(settings: TrainerSettings) -> None:
    """Raises ConfigError."""
    if (target := settings.advantage) is None:
        return
    for rewards in _GROUPS:
        try:
            own_advantages(target, rewards, range(1, len(rewards) + 1), ["trial"] * len(rewards), [""] * len(rewards))
        except RunError as error:
            raise ConfigError(FIELD, target, f"tried with the rewards {rewards}: {error.__cause__}") from error


def _checked(answer: Any, members: int) -> list[float]:
    values = [float(value) for value in answer]
    if len(values) != members:
        raise ValueError(f"returned {len(values)} numbers for a group of {members}")
    if not all(map(math.isfinite, values)):
        raise ValueError(f"returned {values}, not finite numbers")
    return values
