"""Simulated throughput of the ladder sync, sync_plus, one_off, areal, async, async with affinity (RollArt, figure 10b and 7.2).

The same pipeline in virtual time on ``orchestrator/sim/scenarios/rollart.toml`` and its variants in
:func:`scripts.bench.papers.rollart_setups.rollart`: baselines on 128 H800, the last rung on 96 H800 and 32 H20. ``scale`` in
the detail: an n-th of the cluster and of the batch was played. No constant was chosen by these figures. Beside them,
what explains them: the ladder with training and the push to the relay for nothing, and the last rung with the push
alone for nothing.
"""

from __future__ import annotations

from typing import Any

from scripts.bench.papers.rollart_setups import FREE, FREE_NAME, LADDER, MODELS, NO_PUSH, rollart
from scripts.bench.papers.run_figures import RunFigures, measure
from scripts.bench.papers.runner import Figure, Found, Parts, Row, Verdict, row

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


def _ladders(quick: bool) -> Found:
    scale = 32 if quick else 8
    models = MODELS[:1] if quick else MODELS
    steps = 4 if quick else 5
    found = {model: {rung: measure(rollart(model, rung, scale, steps=steps)) for rung in LADDER} for model in models}
    if not quick:
        found[FREE_NAME] = {rung: measure(rollart("8B", rung, scale, extra=FREE)) for rung in LADDER}
    rows = [
        row(
            f"{model}: throughput of {better} over {worse}", printed, _gain(ladder[better], ladder[worse]), _FIGURE, why
        )
        for better, worse, printed, why in _RUNGS
        for model, ladder in found.items()
    ]
    if not quick:
        for model in models:
            ours = _gain(measure(rollart(model, "affinity", scale, extra=NO_PUSH)), found[model]["areal"])
            what = f"{model}, push for nothing: throughput of affinity over areal"
            rows.append(row(what, (1.22, 1.36), ours, _FIGURE, _PUSH))
        last = found["32B"]["affinity"].step_seconds
        for worse, printed in _STEP_TIME:
            ours = found["32B"][worse].step_seconds / last
            rows.append(row(f"32B: step time of {worse} over affinity", printed, ours, "RollArt 7.2, figure 10a"))
    return {model: {rung: _figures(one) for rung, one in ladder.items()} for model, ladder in found.items()}, rows


def _gain(better: RunFigures, worse: RunFigures) -> float:
    return better.throughput / worse.throughput


def _figures(one: RunFigures) -> dict[str, float]:
    return {
        "step_seconds": round(one.step_seconds, 3),
        "train_seconds": round(one.train_seconds, 3),
        "tokens_per_step": round(one.tokens),
        "tokens_per_s": round(one.throughput, 1),
        "evicted_stale_per_step": round(one.staleness_aborts, 2),
    }


def _parts(quick: bool) -> Parts:
    return {"runs": lambda: _ladders(quick)}


def _read(found: dict[str, Any], rows: list[Row], quick: bool) -> Verdict:
    counted = [one for one in rows if "nothing" not in one["what"]]
    value = min(one["simulated"] for one in counted if one["what"].endswith("affinity over sync"))
    outside = [one["what"] for one in rows if one["off"]]
    detail = {"scale": 32 if quick else 8, "outside_the_printed_range": outside, **found}
    return value, value >= 2.65 and all(one["simulated"] >= 0.99 for one in counted), detail


FIGURE = Figure(
    "modes",
    claim="throughput of async with affinity over sync, the least of the models",
    paper="RollArt 7.2, 8B to 32B (paper)",
    printed=2.65,
    bar=">= 2.65, and each rung at least its predecessor",
    parts=_parts,
    read=_read,
)
