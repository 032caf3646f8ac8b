"""The reward of a control: what another of the last answers earned, so that rewards say nothing of the answers they are given to.

Evaluations are scored as they are, by the ids that a run gives them. Each worker process shuffles what it scored itself.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Mapping
from typing import Any

from examples.largest import score

_AMONG = 64  # answers, a step's
_earned: deque[float] = deque(maxlen=_AMONG)
_chance = random.Random(0)


def shuffled(payload: Mapping[str, Any]) -> dict[str, float]:
    """Of the task of ``examples/largest.py``: the reward of one of the last 64 answers, drawn at random."""
    found = score(payload)
    if str(payload["trajectory_id"]).startswith("eval-"):
        return found
    _earned.append(found["reward"])
    return {"reward": _chance.choice(_earned)}
