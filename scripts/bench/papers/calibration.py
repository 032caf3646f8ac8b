"""The constants of simulated figures that were taken from a printed number, frozen: one list for all figures.

Guarantees, tested: each constant has this value where it lives, so that no figure is played with another; each row that is
compared with what a constant was taken from is flagged with the constant's name, in the figure's file and on the page: it proves
nothing. What was taken from data sheets and from published measurements of kernels is not here
(:mod:`orchestrator.sim.hardware`), and neither is what is ASSUMED (the scenarios say it).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass


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
        {"borrowed": r"dedicated-first: rollout on 8 GPUs", "rose-figures": r"8B, ROLL: rollout"},
    ),
    Calibrated(
        "ROSE's spread of tokens, 8B",
        0.5,
        ("rose", "sim.tasks.frozenlake.response_sigma"),
        "ROSE figure 14, four borrowed devices",
        {"borrowed": r"dedicated-first: speed-up with 4 "},
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


def calibrated_by(figure: str, row: str) -> str:
    """The constant that was taken from what this row is compared with; "" for none."""
    for constant in CONSTANTS:
        pattern = constant.rows.get(figure)
        if pattern and re.search(pattern, row):
            return constant.name
    return ""
