"""Rows of simulated figures that a real run refuses: the simulator plays what the code cannot do yet.

Guarantees, tested: each key is refused by the checks of a real run; each row that is played with it is marked, in the figure's
file and on the page. Baselines that nobody would run here (spot devices, an autoscaler) are no rows of ours, and are not marked.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Refused:
    """``key``: of the config, which a real run refuses as ``why`` says. ``rows``: by figure, a pattern of name and source."""

    key: str
    why: str
    rows: Mapping[str, str]


REFUSED = (
    Refused(
        "rollout.planner.experts",
        "expert parallelism is chosen in simulated runs only",
        {"expert-parallelism": r""},
    ),
    Refused(
        "rollout.prediction.predictor",
        "an oracle of lengths",
        {"heddle": r"over ours, oracle"},
    ),
    Refused(
        "resources.rollout",
        "unequal degrees over two classes of devices",
        {"all-together": r"^RollArt's workload: .* degrees cut"},
    ),
)


def refused_for(figure: str, row: str) -> str:
    """Why a real run refuses what this row (its name and its source) is played with; "" where it does not."""
    for one in REFUSED:
        pattern = one.rows.get(figure)
        if pattern is not None and re.search(pattern, row):
            return one.why
    return ""
