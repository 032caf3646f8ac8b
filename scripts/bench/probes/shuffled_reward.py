"""The reward of a control: what another of the last answers earned, so that rewards say nothing of the answers they are given to.

Evaluations are scored as they are, by the ids that a run gives them. Each worker process shuffles what it scored itself.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Mapping
from typing import Any

from orchestrator.tasks.text_rewards import sums_answer

_AMONG = 64  # answers, a step's
_earned: deque[float] = deque(maxlen=_AMONG)
_chance = random.Random(0)


def shuffled_sums(payload: Mapping[str, Any]) -> dict[str, float | str]:
    """Of task sums: the reward of one of the last 64 answers, drawn at random."""
    found = sums_answer(payload)
    if str(payload["trajectory_id"]).startswith("eval-"):
        return found
    _earned.append(float(found["reward"]))
    return {**found, "reward": _chance.choice(_earned)}
