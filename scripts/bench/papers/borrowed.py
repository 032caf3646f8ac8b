"""Simulated rollout speed-up with 4, 8 and 16 borrowed serving GPUs (ROSE, figure 14), beside three serving loads.

Five steps of each seed, in the mean. ``rose.toml``: 8 dedicated H800 generate with Qwen3-8B; 16 serving engines of Qwen2.5-7B
replay Azure's code trace as ROSE's setup has it, the same at four times the traffic, or Mooncake's conversation trace, one that
prefills to three that decode. What rollouts get of a serving GPU is decided by the policies of a real one (admission by both
SLOs, budgets with headroom, leases of 10 s), which GPU by its KV use, which worker a turn goes to by the run's own router: as
ROSE 4.3 has it, dedicated GPUs first, or by the share of each GPU's cap that is taken (``rollout.routing.spread``), each with the
scenario's ``imbalance`` and with 2: four settings, for runs that borrow and for the 8 dedicated GPUs alone, of which the fastest
stands on the other side of value and loads; figure 14's rows, on ROSE's own load, are over the same setting.

The value is judged in rotation: on each load with 16 borrowed GPUs, under the setting that is best on the other two, the least of
the three. Rows have every setting on every load; beside each what users saw more than without rollouts on the same arrivals, and
how busy serving kept its engines. Further, of the first and the last setting: a longer-tailed workload, and serving engines that
prefill and decode on one device (ROSE 4.3, of which it prints no figure). The workload was calibrated on the run without borrowed
GPUs and on four, under ROSE's rule (:mod:`scripts.bench.papers.calibration`): those rows prove nothing.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from scripts.bench.papers.rose_runs import LOADS, PAPERS, ROSES, SETTINGS, played
from scripts.bench.papers.runner import Cells, Figure, Found, Reading, Row, each_seed, row, unprinted

PRINTED = {4: 1.26, 8: 1.45, 16: 1.69}
BAR = 1.69
_LONGER = ("sim.tasks.frozenlake.response_sigma=1.0",)
_COLLOCATED = ("sim.borrowed.phases=collocated",)
_FURTHER = {"longer tail": _LONGER, "collocated": _COLLOCATED}
_ENDS = (PAPERS, "least-utilized, imbalance 2")
_QUICK = {name: SETTINGS[name] for name in _ENDS}
_LATE = 0.01  # of the prompts: P99 is late where more are


def _cell(count: int, given: Sequence[str], steps: int, seed: int) -> dict[str, Any]:
    return played([f"sim.borrowed.workers={count}", *given], steps, seed)


def _cells(quick: bool) -> Cells:
    steps, settings = (2, _QUICK) if quick else (5, SETTINGS)
    loads = {ROSES: LOADS[ROSES]} if quick else LOADS
    cells = {f"alone/{name}": partial(_cell, 0, given, steps) for name, given in settings.items()}
    for name, given in settings.items():
        cells |= {f"{load}/{name}/16": partial(_cell, 16, (*given, *more), steps) for load, more in loads.items()}
        if not quick:
            cells |= {f"{ROSES}/{name}/{count}": partial(_cell, count, given, steps) for count in (4, 8)}
    if not quick:
        for name in _ENDS:
            cells[f"longer tail, alone/{name}"] = partial(_cell, 0, (*SETTINGS[name], *_LONGER), steps)
            for what, more in _FURTHER.items():
                cells[f"{what}/{name}/16"] = partial(_cell, 16, (*SETTINGS[name], *more), steps)
    return cells


def _alone(found: Found, prefix: str) -> float:
    """Seconds of the dedicated GPUs alone, under the setting in which they are fastest."""
    return min(float(one["rollout_seconds"]) for name, one in found.items() if name.startswith(f"{prefix}/"))


def in_rotation(gains: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, Any]]:
    """By load: the setting that is best on the others (the largest mean of gains), and its gain here."""
    found = {}
    for load, here in gains.items():
        others = [there for name, there in gains.items() if name != load] or [here]
        chosen = max(here, key=lambda setting: statistics.fmean(there[setting] for there in others))
        found[load] = {"chosen": chosen, "gain": here[chosen], "gain_in_hindsight": max(here.values())}
    return found


def _figure_14(found: Found, settings: Sequence[str]) -> list[Row]:
    """ROSE's own load, each setting over itself."""
    rows, place = list[Row](), "ROSE appendix E, figure 14"
    for setting in settings:
        own = setting == PAPERS
        why = "the longest trajectories have fifteen neighbours on a dedicated GPU, however many are borrowed"
        why = why if own else "another setting than the paper's"
        seconds, what = float(found[f"alone/{setting}"]["rollout_seconds"]), f"{setting}: rollout on 8 GPUs, s"
        rows.append(row(what, (838.0, 840.0), seconds, "ROSE table 1 and figure 14", text="839"))
        for count, printed in PRINTED.items():
            if one := found.get(f"{ROSES}/{setting}/{count}"):
                what = f"{setting}: speed-up with {count} borrowed GPUs"
                rows.append(row(what, printed, seconds / one["rollout_seconds"], place, why))
    return rows


def _of_load(load: str, setting: str, one: Mapping[str, Any], gain: float) -> list[Row]:
    """What borrowing brings there, what users saw of it, and how busy serving was."""
    name = f"{load}, {setting}, 16 borrowed:"
    late = {what: max(0.0, one[f"{what}_late"] - one[f"alone_{what}_late"]) for what in ("ttft", "tpot")}
    return [
        unprinted(f"{name} speed-up", gain, "ours"),
        row(f"{name} prompts late beside rollouts, less those late without, share", (0.0, 0.0005), late["ttft"],
            "ROSE 6: no violation of P99", text="0"),
        row(f"{name} answers whose tokens are late, less those without, share", (0.0, 0.0005), late["tpot"],
            "ROSE 6: no violation of P99", text="0"),
        *(
            unprinted(f"{name} {key.removesuffix('_busy')} engines of serving busy with it, share", one[key], "ours")
            for key in one
            if key.endswith("_busy")
        ),
    ]  # fmt: skip


def _read(found: Found, quick: bool) -> Reading:
    settings = list(_QUICK if quick else SETTINGS)
    alone = _alone(found, "alone")
    runs = {
        load: {name: found[f"{load}/{name}/16"] for name in settings}
        for load in LOADS
        if f"{load}/{settings[0]}/16" in found
    }
    gains = {load: {name: alone / one["rollout_seconds"] for name, one in of.items()} for load, of in runs.items()}
    rows = _figure_14(found, settings)
    for load, of in runs.items():
        for name, one in of.items():
            rows += _of_load(load, name, one, gains[load][name])
    for what in () if quick else _FURTHER:
        base = _alone(found, "longer tail, alone") if what == "longer tail" else alone
        for name in _ENDS:
            one = found[f"{what}/{name}/16"]
            rows += _of_load(what, name, one, base / one["rollout_seconds"])
    judged = in_rotation(gains)
    value = min(one["gain"] for one in judged.values())
    kept = all(
        runs[load][one["chosen"]][key] - runs[load][one["chosen"]][f"alone_{key}"] <= _LATE
        for load, one in judged.items()
        for key in ("ttft_late", "tpot_late")
    )
    detail = {"alone": alone, "judged": judged, "speed_up": gains, "serving": runs, "settings": settings}
    return Reading(value, value >= BAR and kept, rows, detail)


FIGURE = Figure(
    "borrowed",
    claim="rollout time on 8 dedicated GPUs over that with 16 borrowed ones beside, setting chosen on two serving loads and "
    "judged on the third, the least of three",
    paper="ROSE figure 14 (paper)",
    printed=PRINTED[16],
    bar=f">= {BAR}, and at most 1 % more of the prompts and answers late than without rollouts",
    cells=_cells,
    read=each_seed(_read),
)
