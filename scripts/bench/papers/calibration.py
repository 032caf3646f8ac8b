"""The constants of simulated figures that were taken from a printed number, frozen: one list for all figures.

Guarantees, tested: each constant has this value where it lives, so that no figure is played with another; each row that is
compared with what a constant was taken from is flagged with the constant's name, in the figure's file and on the page: it
proves nothing. Beside them, what is ASSUMED by what was recorded of something alike (:data:`SHARES`): each has the value of the
committed fit, and each row that is played with it says so, under ``assumed``. What was taken from data sheets and from published
measurements of kernels is not here (:mod:`orchestrator.sim.hardware`), and neither is what else is ASSUMED: scenarios say it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Calibrated:
    """``where`` it lives: a module and a name in it, or a scenario and a key; "rose 32B": with the overrides of that setup.
    ``taken_from``: printed numbers, by value or by its form. ``rows``: by figure, a pattern of the rows that therefore test
    nothing."""

    name: str
    value: float
    where: tuple[str, str]
    taken_from: str
    rows: Mapping[str, str]


CONSTANTS = (
    Calibrated(
        "serial seconds per trained token",
        1.6230e-5,
        ("orchestrator.sim.hardware", "TRAIN_SERIAL_SECONDS"),
        "RollArt figure 3; its form: RollPacker table 1 and figure 16, RollArt 7.2 (one-off over Sync+)",
        {
            "modes": r"^\w+: throughput of one_off over sync_plus",
            "rollpacker-figures": r"^veRL, 14B/16k, \w+: training|^14B/16k: throughput with twice",
            "sim-error": r"^training in it|^training, share",
        },
    ),
    Calibrated(
        "GB/s to the relay",
        0.485,
        ("rollart", "sim.push_gb_s"),
        "RollArt table 4",
        {"rollart-figures": r"push and pull in the way", "sim-error": r"^push of"},
    ),
    Calibrated(
        "GB/s from the relay",
        2.2,
        ("rollart", "sim.pull_gb_s"),
        "RollArt table 4",
        {"sim-error": r"^accumulated pull of"},
    ),
    Calibrated(
        "share of FrozenLake's history that is reused",
        0.0,
        ("rollart", "sim.tasks.frozenlake.reuse"),
        "RollArt figure 4a",
        {"affinity": r"^frozenlake, batch"},
    ),
    Calibrated(
        "SWE-bench's tokens a turn",
        300,
        ("rollart-swe", "sim.tasks.swe-bench.response_tokens"),
        "RollArt figure 3, 69 % of 366 s",
        {"sim-error": r"^step of Qwen3-8B on SWE-bench|^generation and environments in it"},
    ),
    Calibrated(
        "GEM-math's tokens a turn at 16k",
        500,
        ("rollart-rewards", "sim.tasks.gem-math.response_tokens"),
        "RollArt figure 12, serverless rewards, three jobs",
        {"rollart-figures": r"^three jobs on the 16 GPUs: rollout, serverless"},
    ),
    Calibrated(
        "scores at a time, a GPU",
        16,
        ("orchestrator.sim.paper_setups", "SCORES"),
        "RollPacker table 1",
        {"rollpacker-figures": r"^veRL, 14B/16k, \w+: reward", "sim-error": r"^reward, share"},
    ),
    Calibrated(
        "ROSE's tokens a turn, 8B",
        2600,
        ("rose", "sim.tasks.frozenlake.response_tokens"),
        "ROSE table 1 and figure 14, no borrowed device",
        {"borrowed": r": rollout on 8 GPUs, s$", "rose-figures": r"8B, ROLL: rollout"},
    ),
    Calibrated(
        "ROSE's spread of tokens, 8B",
        0.5,
        ("rose", "sim.tasks.frozenlake.response_sigma"),
        "ROSE figure 14, four borrowed devices",
        {"borrowed": r": speed-up with 4 borrowed"},
    ),
    Calibrated(
        "speed of ROSE's serving trace, 8B",
        1.5,
        ("rose", "sim.borrowed.speed"),
        "ROSE table 1, serving alone",
        {"rose-figures": r"8B, serving alone"},
    ),
    Calibrated(
        "ROSE's tokens a turn, 32B",
        750,
        ("rose 32B", "sim.tasks.frozenlake.response_tokens"),
        "ROSE 6.1, no borrowed device",
        {"rose-figures": r"32B, ROLL: rollout"},
    ),
    Calibrated(
        "speed of ROSE's serving trace, 32B",
        0.98,
        ("rose 32B", "sim.borrowed.speed"),
        "ROSE table 1, serving alone",
        {"rose-figures": r"32B, serving alone"},
    ),
)


@dataclass(frozen=True, slots=True)
class RecordedShares:
    """``sim.tasks``' prompt_share and trajectory_share of ``task`` in ``scenario``, from ``recorded``, a set of
    ``length_fit.json``; None: not set, as the task has one turn. ``rows``: by figure, a pattern of the rows that are played with
    it."""

    scenario: str
    task: str
    recorded: str
    prompt: float
    trajectory: float | None
    rows: Mapping[str, str]


_MIX = {
    "modes": "",
    "affinity": "",
    "rollart-figures": r"alpha|throughput of async|step time, transfer|s a step of affinity|redundant",
    "all-together": r"^RollArt's workload",
}
_SWE = {
    "modes": r"^32B",
    "affinity": r"^32B",
    "rollart-figures": r"1P3D|2P2D",
    "sim-error": r"SWE-bench|^generation and environments|^training in it",
}
_REWARDS, _HEDDLE = {"rollart-figures": r"^16 GPUs a job|^three jobs"}, {"heddle": ""}
_SOLVED, _ASKED, _PLAYED = "smollm2/problems", "tau-bench/airline", "smollm2/puzzles"
# by what is said in a turn, chosen before any of them was played: reasoned maths, reasoned moves, an agent's calls and messages,
# bare moves. ROSE's FrozenLake has none: its tokens and their spread were calibrated together with the share that it has.
SHARES = (
    RecordedShares("rollart", "frozenlake", "tasks/household", 0.344, 0.076, _MIX),
    RecordedShares("rollart", "webshop", _ASKED, 0.078, 0.015, _MIX),
    RecordedShares("rollart", "gem-math", _SOLVED, 0.13, 0.495, _MIX),
    RecordedShares("rollart", "gem-game", _PLAYED, 0.289, None, _MIX),
    RecordedShares("rollart-rewards", "gem-math", _SOLVED, 0.13, 0.495, _REWARDS),
    RecordedShares("rollart-swe", "swe-bench", _ASKED, 0.078, 0.015, _SWE),
    RecordedShares("heddle", "coding", _ASKED, 0.078, 0.015, _HEDDLE),
    RecordedShares("heddle", "search", _ASKED, 0.078, 0.015, _HEDDLE),
    RecordedShares("heddle", "math", _SOLVED, 0.13, 0.495, _HEDDLE),
)


def assumed_for(figure: str, row: str) -> str:
    """What is ASSUMED from recorded sets in this row; "" for nothing."""
    sets = dict.fromkeys(one.recorded for one in SHARES if figure in one.rows and re.search(one.rows[figure], row))
    return f"shares of lengths, as recorded: {', '.join(sets)}" if sets else ""


def played_before(figure: str, rows: Sequence[Mapping[str, Any]]) -> bool:
    """Whether rows of a file were played before the shares that they would be played with now."""
    return any(assumed_for(figure, row["what"]) and not row.get("assumed") for row in rows)


def calibrated_by(figure: str, row: str) -> str:
    """The constant that was taken from what this row is compared with; "" for none."""
    for constant in CONSTANTS:
        pattern = constant.rows.get(figure)
        if pattern and re.search(pattern, row):
            return constant.name
    return ""
