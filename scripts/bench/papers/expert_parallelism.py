"""A simulated run whose planner chooses expert parallelism between steps, over the best layout in hindsight (RollPacker 7).

Whole simulated runs of ``orchestrator/sim/scenarios/experts.toml``, where routing gets uneven and even again: the production
planner, the proxy that cuts engines anew, the roofline cost model. A change costs ``sim.start_seconds`` and the weights' way, on
the simulated clock. It is compared with runs of each layout that never changes, of which nobody knows the best beforehand. The
paper prints nothing of this. ``--quick``: fewer steps, against one layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from statistics import fmean
from typing import Any

from orchestrator.config import Config
from orchestrator.policies.parallelism.engine_profile import EngineLayout
from orchestrator.sim.paper_setups import load_scenario
from scripts.bench.papers.runner import Cells, Figure, Found, Reading, Run, each_seed, unprinted

DEVICES = 8
LAYOUTS = tuple(EngineLayout(tp, ep) for tp in (1, 2, 4, 8) for ep in sorted({1, tp}))
QUICK = ("run.steps=8", "sim.expert_imbalance={0 = 1.0, 3 = 4.0}")


def fixed(layout: EngineLayout, *overrides: str) -> Config:
    """The scenario without the planner, all engines in one layout."""
    given = ["rollout.planner.enabled=false", "rollout.planner.experts=false"]
    given += [f"rollout.workers={DEVICES // layout.tp}"]
    given += [f"sim.tensor_parallel={layout.tp}", f"sim.expert_parallel={layout.ep}"]
    return load_scenario("experts", [*given, *overrides])


def played(config: Config) -> dict[str, Any]:
    """Seconds of the whole run and of each step's rollout; the layout and the imbalance of each step, and what changes cost."""
    run = Run(config)
    plans, kept = run.events_of("plan"), ("step", "tp", "ep", "seconds", "error")
    return {
        "seconds": round(run.seconds, 3),
        "rollouts": [round(seconds, 3) for seconds in run.took.values()],
        "layouts": [str(EngineLayout(event["tp"], event["ep"])) for event in plans],
        "imbalance": [event["imbalance"] for event in plans],
        "reasons": {event["step"]: event["reason"] for event in plans if event["reason"]},
        "changes": [{name: event[name] for name in kept} for event in run.events_of("reshape")],
    }


def _planner(given: Sequence[str], seed: int) -> dict[str, Any]:
    return played(load_scenario("experts", [f"run.seed={seed}", *given]))


def _fixed(layout: EngineLayout, given: Sequence[str], seed: int) -> dict[str, Any]:
    return played(fixed(layout, f"run.seed={seed}", *given))


def _phases(rollouts: list[float], imbalance: list[float]) -> dict[str, float]:
    """Mean seconds of a rollout while routing is even, and while it is not."""
    pairs = list(zip(rollouts, imbalance, strict=True))
    even, uneven = ([took for took, one in pairs if (one > 1.0) == worse] for worse in (False, True))
    return {"even": round(fmean(even), 3), "uneven": round(fmean(uneven), 3)}


def _cells(quick: bool) -> Cells:
    given = QUICK if quick else ()
    layouts = [EngineLayout(1, 1)] if quick else LAYOUTS
    return {"planner": partial(_planner, given), **{str(one): partial(_fixed, one, given) for one in layouts}}


def _read(found: Found, quick: bool) -> Reading:
    planner = found["planner"]
    others = {name: one for name, one in found.items() if name != "planner"}
    table = [
        {"layout": name, "seconds": one["seconds"], **_phases(one["rollouts"], planner["imbalance"])}
        for name, one in found.items()
    ]
    best = min(others, key=lambda name: float(others[name]["seconds"]))
    over = planner["seconds"] / others[best]["seconds"]
    detail = {"best_fixed": best, "layouts": table, "planner": planner}
    rows = [unprinted("a layout chosen between steps over the best that never changes, s", over, "ours")]
    return Reading(over, over < 1.0, rows, detail)


FIGURE = Figure(
    "expert-parallelism",
    claim="seconds of a run whose layout is chosen between steps, over the best layout that never changes",
    paper="the best fixed layout in hindsight",
    printed=1.0,
    bar="< 1, changes paid for",
    cells=_cells,
    read=each_seed(_read, max),
)
