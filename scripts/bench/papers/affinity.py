"""Simulated throughput of hardware affinity over one class of GPUs at about equal cost (RollArt, figure 11a and 7.3, R1).

32 H800 train; 64 H800 and 24 H20 with affinity generate, or 72 H800, or 208 H20; ``rollart.toml``, alpha 1, weights over the
relay for all three, so that only the devices and the routing differ; and once more with training and push for nothing, where
nothing but rollouts counts. Also figure 4: one task on two H800 or on six H20. ``band``: the same fleets where half or all of
FrozenLake's and WebShop's history is found in the prefix cache, of which figure 4a chose nothing of it
(:mod:`scripts.bench.papers.calibration`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

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
from scripts.bench.papers.runner import Cells, Figure, Found, Reading, Row, each_seed, row, unprinted

FLEETS = {"affinity": (64, 24), "h800": (72, 0), "h20": (0, 208)}
_SCALE = 8
_PRINTED = {"h800": (1.12, 1.37), "h20": (1.30, 1.68)}
_FIGURE_4 = (  # task, the class that it is for, the other, printed
    ("frozenlake", "H800", "H20", (0.53, 1.0), "down to 0.53"),
    ("gem-math", "H20", "H800", (0.49, 0.79), "0.49 to 0.79"),
)
_BATCHES = (32, 64, 128)
BAND = (0.5, 1.0)  # of a history that is reused; 0 in the scenario


def config_of(model: str, fleet: str, scale: int, steps: int, extra: Sequence[str] = ()) -> Config:
    """One of the three."""
    given = [f"run.steps={steps}", *rollart_fleet(model, *FLEETS[fleet]), *extra]
    return load_scenario("rollart", [*given, *([] if fleet == "affinity" else [NO_AFFINITY])], scale)


def config_of_task(task: str, hardware: str, batch: int, seed: int = 0) -> Config:
    """Figure 4: Qwen3-8B, one task, two H800 or six H20, no training beside it, one cluster: no relay across Ethernet."""
    workers = 2 if hardware == "H800" else 6
    others = sorted({"frozenlake", "webshop", "gem-math", "gem-game"} - {task})
    given = ["run.mode=sync_plus", "run.steps=3", "rollout.alpha=0", f"rollout.workers={workers}", f"run.seed={seed}"]
    given += [f"sim.fleet={{{hardware}={workers}}}", NO_AFFINITY, f"rollout.environments={batch}"]
    given += [f"rollout.groups_per_step={batch // 8}", *COLLECTIVE, *NO_PUSH, "sim.trainer_gpus=100000"]
    return load_scenario("rollart", [*given, "sim.trainer_serial_seconds=0", *without_tasks(*others)])


def _cell(model: str, fleet: str, steps: int, extra: Sequence[str], seed: int) -> float:
    return measure(config_of(model, fleet, _SCALE, steps, (f"run.seed={seed}", *extra))).step_seconds


def _cell_of_task(task: str, hardware: str, batch: int, seed: int) -> float:
    return measure(config_of_task(task, hardware, batch, seed)).step_seconds


def _reused(share: float) -> tuple[str, ...]:
    return tuple(f"sim.tasks.{task}.reuse={share}" for task in ("frozenlake", "webshop"))


def _cells(quick: bool) -> Cells:
    if quick:
        return {f"8B/{fleet}": partial(_cell, "8B", fleet, 3, ()) for fleet in ("affinity", "h800")}
    cells: dict[str, partial[float]] = {}
    for model in MODELS:
        for fleet in FLEETS:
            cells[f"{model}/{fleet}"] = partial(_cell, model, fleet, 5, ())
            cells[f"{_free(model)}/{fleet}"] = partial(_cell, model, fleet, 5, FREE)
    for share in BAND:
        cells |= {f"8B, reuse {share}/{fleet}": partial(_cell, "8B", fleet, 5, _reused(share)) for fleet in FLEETS}
    for task, mine, other, *_ in _FIGURE_4:
        for batch in _BATCHES:
            cells |= {f"{task}/{name}/{batch}": partial(_cell_of_task, task, name, batch) for name in (mine, other)}
    return cells


def _free(model: str) -> str:
    return FREE_NAME.replace("8B", model)


def _rows(found: Found, names: Sequence[str]) -> list[Row]:
    """Figure 11a: one class of GPUs over both with affinity."""
    return [
        row(
            f"{name}: step time, {fleet} only over affinity",
            printed,
            found[f"{name}/{fleet}"] / found[f"{name}/affinity"],
            "RollArt 7.3, figure 11a",
        )
        for name in names
        for fleet, printed in _PRINTED.items()
        if f"{name}/{fleet}" in found
    ]


def _figure_4(found: Found) -> list[Row]:
    return [
        row(
            f"{task}, batch {batch}: rollout time of {mine} over {other}, 2 H800 or 6 H20",
            printed,
            found[f"{task}/{mine}/{batch}"] / found[f"{task}/{other}/{batch}"],
            "RollArt 3.1, figure 4",
            text=text,
        )
        for task, mine, other, printed, text in _FIGURE_4
        for batch in _BATCHES
    ]


def _read(found: Found, quick: bool) -> Reading:
    rows = _rows(found, MODELS)
    gains, names = [one["simulated"] for one in rows], [*MODELS]
    if not quick:
        band = [f"8B, reuse {share}" for share in BAND]
        free = [_free(model) for model in MODELS]
        further = [unprinted(one["what"], one["simulated"], "ours") for one in _rows(found, band)]
        rows, names = [*rows, *_rows(found, free), *further, *_figure_4(found)], [*names, *free, *band]
    steps = {
        name: {fleet: found[f"{name}/{fleet}"] for fleet in FLEETS if f"{name}/{fleet}" in found} for name in names
    }
    return Reading(min(gains), min(gains) >= 1.12, rows, {"scale": _SCALE, "step_seconds": steps})


FIGURE = Figure(
    "affinity",
    claim="step time of one class of GPUs over affinity, the least of models and classes",
    paper="RollArt 7.3, H800 only, 8B to 32B (paper)",
    printed=1.12,
    bar=">= 1.12",
    cells=_cells,
    read=each_seed(_read),
)
