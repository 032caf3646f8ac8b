"""Simulated throughput of the ladder sync, sync_plus, one_off, areal, async, async with affinity (RollArt, figure 10b and 7.2).

The same pipeline in virtual time on ``orchestrator/sim/scenarios/rollart.toml`` and its variants in
:func:`scripts.bench.papers.rollart_setups.rollart`: baselines on 128 H800, the last rung on 96 H800 and 32 H20. ``scale`` in
the detail: an n-th of the cluster and of the batch was played. Beside them, what explains them: the ladder with training and the
push to the relay for nothing, and the last rung with the push alone for nothing; and how far the gain hangs on one constant:
``band`` has the ladder with 0, half and twice the seconds of a trained token that no GPU shortens, which RollArt's figure 3 was
taken for (:mod:`scripts.bench.papers.calibration`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from orchestrator.sim.hardware import TRAIN_SERIAL_SECONDS
from scripts.bench.papers.rollart_setups import FREE, FREE_NAME, LADDER, MODELS, NO_PUSH, rollart
from scripts.bench.papers.run_figures import measure
from scripts.bench.papers.runner import Cells, Figure, Found, Reading, Row, each_seed, row, unprinted

_FIGURE = "RollArt 7.2, figure 10b"
_AREAL = "ours starts the next batch when a group ends, not when the batch does: more is hidden than in one_off"
_HIDDEN = "the gain is the training time that is hidden: the share of training in a step decides it"
_TURNS = "depends on how many turns all trajectories take in step; the paper prints no distribution of turns or times"
_PUSH = "what the push to the relay takes from the last rung, as the next training step waits for it"
_RUNGS = (  # better, worse, printed range over 8B to 32B, why ours differs
    ("sync_plus", "sync", (1.40, 2.40), _TURNS),
    ("one_off", "sync_plus", (1.31, 1.47), _HIDDEN),
    ("areal", "one_off", (1.03, 1.06), _AREAL),
    ("affinity", "areal", (1.22, 1.36), ""),
    ("affinity", "sync", (2.65, 4.58), ""),
)
_STEP_TIME = (("sync_plus", 2.05), ("one_off", 1.35), ("areal", 1.31))  # of the last over these, 32B (figure 10a)
BAND = (0.0, 0.5, 1.0, 2.0)  # of the constant
_BAND_RUNGS = ("sync", "sync_plus", "async", "affinity")
_SCALE, _QUICK_SCALE = 8, 32
_NO_PUSH_NAME = "affinity, push for nothing"


def _cell(model: str, rung: str, extra: Sequence[str], scale: int, steps: int, seed: int) -> dict[str, float]:
    return measure(rollart(model, rung, scale, steps=steps, seed=seed, extra=extra)).kept()


def _banded(factor: float) -> str:
    return f"serial x {factor:g}"


def _cells(quick: bool) -> Cells:
    if quick:
        return {f"8B/{rung}": partial(_cell, "8B", rung, (), _QUICK_SCALE, 4) for rung in LADDER}
    wanted: dict[str, tuple[str, str, Sequence[str]]] = {}
    for model in MODELS:
        wanted |= {f"{model}/{rung}": (model, rung, ()) for rung in LADDER}
        wanted[f"{model}/{_NO_PUSH_NAME}"] = (model, "affinity", NO_PUSH)
    wanted |= {f"{FREE_NAME}/{rung}": ("8B", rung, FREE) for rung in LADDER}
    for factor in BAND:
        given = (f"sim.trainer_serial_seconds={factor * TRAIN_SERIAL_SECONDS}",)
        if factor != 1.0:
            wanted |= {f"{one}/{of}, {_banded(factor)}": (one, of, given) for one in MODELS for of in _BAND_RUNGS}
    return {name: partial(_cell, *what, _SCALE, 5) for name, what in wanted.items()}


def _gain(found: Found, model: str, better: str, worse: str) -> float:
    return float(found[f"{model}/{better}"]["tokens_per_s"] / found[f"{model}/{worse}"]["tokens_per_s"])


def _rows(found: Found, ladders: Sequence[str], quick: bool) -> list[Row]:
    rows = [
        row(f"{model}: throughput of {better} over {worse}", printed, _gain(found, model, better, worse), _FIGURE, why)
        for better, worse, printed, why in _RUNGS
        for model in ladders
    ]
    if quick:
        return rows
    for model in MODELS:
        what = f"{model}, push for nothing: throughput of affinity over areal"
        rows.append(row(what, (1.22, 1.36), _gain(found, model, _NO_PUSH_NAME, "areal"), _FIGURE, _PUSH))
    last = found["32B/affinity"]["step_seconds"]
    for worse, printed in _STEP_TIME:
        ours = found[f"32B/{worse}"]["step_seconds"] / last
        rows.append(row(f"32B: step time of {worse} over affinity", printed, ours, "RollArt 7.2, figure 10a"))
    for model in MODELS:
        for factor, gains in _band(found, model).items():
            for worse, gain in gains.items():
                rows.append(unprinted(f"{model}, {_banded(factor)}: throughput of {worse}", gain, "ours"))
    return rows


def _band(found: Found, model: str) -> dict[float, dict[str, float]]:
    """By what the constant is multiplied with: gains."""
    gains = dict[float, dict[str, float]]()
    for factor in BAND:
        name = "" if factor == 1.0 else f", {_banded(factor)}"
        gains[factor] = {
            f"{better} over {worse}": _gain(found, model, f"{better}{name}", f"{worse}{name}")
            for better, worse in (("affinity", "sync"), ("async", "sync"), ("async", "sync_plus"))
        }
    return gains


def _read(found: Found, quick: bool) -> Reading:
    models = MODELS[:1] if quick else MODELS
    ladders = models if quick else (*models, FREE_NAME)
    rows = _rows(found, ladders, quick)
    rungs = [_gain(found, model, better, worse) for better, worse, *_ in _RUNGS for model in models]
    value = min(_gain(found, model, "affinity", "sync") for model in models)
    detail: dict[str, Any] = {
        "scale": _QUICK_SCALE if quick else _SCALE,
        "outside_the_printed_range": [one["what"] for one in rows if one["off"]],
        "runs": {model: {rung: found[f"{model}/{rung}"] for rung in LADDER} for model in ladders},
    }
    if not quick:
        detail["band"] = {model: {f"{key:g}": of for key, of in _band(found, model).items()} for model in MODELS}
    return Reading(value, value >= 2.65 and min(rungs) >= 0.99, rows, detail)


FIGURE = Figure(
    "modes",
    claim="throughput of async with affinity over sync, the least of the models",
    paper="RollArt 7.2, 8B to 32B (paper)",
    printed=2.65,
    bar=">= 2.65, and each rung at least its predecessor",
    cells=_cells,
    read=each_seed(_read),
)
