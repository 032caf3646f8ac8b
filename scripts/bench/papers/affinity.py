"""Simulated throughput of hardware affinity over one class of GPUs at about equal cost (RollArt, figure 11a and 7.3, R1).

32 H800 train; 64 H800 and 24 H20 with affinity generate, or 72 H800, or 208 H20; ``rollart.toml``, alpha 1, weights over the
relay for all three, so that only the devices and the routing differ; and once more with training and push for nothing, where
nothing but rollouts counts. Also figure 4: one task on two H800 or on six H20.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from orchestrator.config import Config
from orchestrator.sim.paper_setups import load_scenario
from scripts.bench.papers.rollart_setups import (
    COLLECTIVE,
    FREE,
    FREE_NAME,
    MODELS,
    NO_AFFINITY,
    NO_PUSH,
    rollart_fleet,
    without_tasks,
)
from scripts.bench.papers.run_figures import measure
from scripts.bench.papers.runner import Figure, Found, Parts, Row, Verdict, row

FLEETS = {"affinity": (64, 24), "h800": (72, 0), "h20": (0, 208)}
_SCALE = 8
_PRINTED = {"h800": (1.12, 1.37), "h20": (1.30, 1.68)}


def config_of(model: str, fleet: str, scale: int, steps: int, extra: Sequence[str] = ()) -> Config:
    """One of the three."""
    given = [f"run.steps={steps}", *rollart_fleet(model, *FLEETS[fleet]), *extra]
    return load_scenario("rollart", [*given, *([] if fleet == "affinity" else [NO_AFFINITY])], scale)


def config_of_task(task: str, hardware: str, batch: int) -> Config:
    """Figure 4: Qwen3-8B, one task, two H800 or six H20, no training beside it, one cluster: no relay across Ethernet."""
    workers = 2 if hardware == "H800" else 6
    others = sorted({"frozenlake", "webshop", "gem-math", "gem-game"} - {task})
    given = ["run.mode=sync_plus", "run.steps=3", "rollout.alpha=0", f"rollout.workers={workers}"]
    given += [f"sim.fleet={{{hardware}={workers}}}", NO_AFFINITY, f"rollout.environments={batch}"]
    given += [f"rollout.groups_per_step={batch // 8}", *COLLECTIVE, *NO_PUSH, "sim.trainer_gpus=100000"]
    return load_scenario("rollart", [*given, "sim.trainer_serial_seconds=0", *without_tasks(*others)])


def _fleets(quick: bool, extra: Sequence[str] = ()) -> Found:
    """Figure 11a, of each model: one class of GPUs over both with affinity."""
    steps, rows = dict[str, Any](), list[Row]()
    for model in MODELS[:1] if quick else MODELS:
        name = FREE_NAME.replace("8B", model) if extra else model
        fleets = ("affinity", "h800") if quick else FLEETS
        found = {
            fleet: measure(config_of(model, fleet, _SCALE, 3 if quick else 5, extra)).step_seconds for fleet in fleets
        }
        steps[name] = found
        for fleet, printed in _PRINTED.items():
            if fleet in found:
                what, ours = f"{name}: step time, {fleet} only over affinity", found[fleet] / found["affinity"]
                rows.append(row(what, printed, ours, "RollArt 7.3, figure 11a"))
    return steps, rows


def _figure_4() -> Found:
    rows = []
    for task, mine, other, printed, text in (
        ("frozenlake", "H800", "H20", (0.53, 1.0), "down to 0.53"),
        ("gem-math", "H20", "H800", (0.49, 0.79), "0.49 to 0.79"),
    ):
        for batch in (32, 64, 128):
            ours, theirs = (measure(config_of_task(task, name, batch)).step_seconds for name in (mine, other))
            what = f"{task}, batch {batch}: rollout time of {mine} over {other}, 2 H800 or 6 H20"
            rows.append(row(what, printed, ours / theirs, "RollArt 3.1, figure 4", text=text))
    return {}, rows


def _parts(quick: bool) -> Parts:
    further: Parts = {"free": lambda: _fleets(quick, FREE), "figure_4": _figure_4}
    return {"fleets": lambda: _fleets(quick), **({} if quick else further)}


def _read(found: dict[str, Any], rows: list[Row], quick: bool) -> Verdict:
    gains = [one["simulated"] for one in rows if "over affinity" in one["what"] and "nothing" not in one["what"]]
    steps = {**found["fleets"], **found.get("free", {})}
    return min(gains), min(gains) >= 1.12, {"scale": _SCALE, "step_seconds": steps}


FIGURE = Figure(
    "affinity",
    claim="step time of one class of GPUs over affinity, the least of models and classes",
    paper="RollArt 7.3, H800 only, 8B to 32B (paper)",
    printed=1.12,
    bar=">= 1.12",
    parts=_parts,
    read=_read,
)
