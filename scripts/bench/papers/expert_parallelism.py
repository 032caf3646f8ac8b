"""A simulated run whose planner chooses expert parallelism between steps, over the best layout in hindsight (RollPacker 7).

Whole simulated runs of ``orchestrator/sim/scenarios/experts.toml``, where routing gets uneven and even again: the production
planner, the proxy that cuts engines anew, the roofline cost model. A change costs ``sim.start_seconds`` and the weights' way, on
the simulated clock. It is compared with runs of each layout that never changes, of which nobody knows the best beforehand. The
paper prints nothing of this. ``--quick``: fewer steps, against the layout that the planner begins with.
"""

from __future__ import annotations

from functools import partial
from statistics import fmean
from typing import Any

from orchestrator.config import Config
from orchestrator.policies.parallelism.engine_profile import EngineLayout
from orchestrator.sim.paper_setups import load_scenario
from scripts.bench.papers.runner import Figure, Found, Parts, Row, Run, Verdict

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


def _layouts(quick: bool) -> Found:
    given = QUICK if quick else ()
    planner = played(load_scenario("experts", given))
    layouts = [layout for layout in LAYOUTS if not quick or str(layout) == planner["layouts"][0]]
    others = {str(layout): played(fixed(layout, *given)) for layout in layouts}
    table = [
        {"layout": name, "seconds": one["seconds"], **_phases(one["rollouts"], planner["imbalance"])}
        for name, one in {"planner": planner, **others}.items()
    ]
    best = min(others, key=lambda name: float(others[name]["seconds"]))
    over = planner["seconds"] / others[best]["seconds"]
    return {"value": over, "detail": {"best_fixed": best, "rows": table, "planner": planner}}, []


def _phases(rollouts: list[float], imbalance: list[float]) -> dict[str, float]:
    """Mean seconds of a rollout while routing is even, and while it is not."""
    pairs = list(zip(rollouts, imbalance, strict=True))
    even, uneven = ([took for took, one in pairs if (one > 1.0) == worse] for worse in (False, True))
    return {"even": round(fmean(even), 3), "uneven": round(fmean(uneven), 3)}


def _parts(quick: bool) -> Parts:
    return {"layouts": partial(_layouts, quick)}


def _read(found: dict[str, Any], rows: list[Row], quick: bool) -> Verdict:
    one = found["layouts"]
    return one["value"], one["value"] < 1.0, one["detail"]


FIGURE = Figure(
    "expert-parallelism",
    claim="seconds of a run whose layout is chosen between steps, over the best layout that never changes",
    paper="the best fixed layout in hindsight",
    printed=1.0,
    bar="< 1, changes paid for",
    parts=_parts,
    read=_read,
)
