"""A simulated run whose planner chooses expert parallelism between steps, over the best layout in hindsight (RollPacker 7).

Whole simulated runs of ``orchestrator/sim/scenarios/experts.toml``, where routing gets uneven and even again: the production
planner, the proxy that cuts engines anew, the roofline cost model. A change costs ``sim.start_seconds`` and the weights' way, on
the simulated clock. It is compared with runs of each layout that never changes, of which nobody knows the best beforehand. The
paper prints nothing of this. ``--quick``: fewer steps, against the layout that the planner begins with.
"""

from __future__ import annotations

import json
from statistics import fmean
from typing import Any

from orchestrator.config import Config
from orchestrator.policies.parallelism.engine_profile import EngineLayout
from orchestrator.sim.paper_setups import load_scenario
from orchestrator.sim.simulated_run import simulate
from scripts.bench.papers.simulated import simulated_frame
from scripts.bench.result import now

NAME = "expert-parallelism"
DEVICES = 8
LAYOUTS = tuple(EngineLayout(tp, ep) for tp in (1, 2, 4, 8) for ep in sorted({1, tp}))
QUICK = ("run.steps=8", "sim.expert_imbalance={0 = 1.0, 3 = 4.0}")


def fixed(layout: EngineLayout, *overrides: str) -> Config:
    """The scenario without the planner, all engines in one layout."""
    given = [
        "rollout.planner.enabled=false",
        "rollout.planner.experts=false",
        f"rollout.workers={DEVICES // layout.tp}",
    ]
    given += [f"sim.tensor_parallel={layout.tp}", f"sim.expert_parallel={layout.ep}"]
    return load_scenario("experts", [*given, *overrides])


def played(config: Config) -> dict[str, Any]:
    """Seconds of the whole run and of each step's rollout; the layout and the imbalance of each step, and what changes cost."""
    result = simulate(config)
    events = [json.loads(line) for line in result.events.splitlines()]
    took = {event["step"]: event["end"] - event["start"] for event in events if event.get("stage") == "get_batch"}
    plans = [event for event in events if event["kind"] == "plan"]
    changes = [event for event in events if event["kind"] == "reshape"]
    return {
        "seconds": round(result.summary["seconds"], 3),
        "rollouts": [round(took[step], 3) for step in sorted(took)],
        "layouts": [str(EngineLayout(event["tp"], event["ep"])) for event in plans],
        "imbalance": [event["imbalance"] for event in plans],
        "reasons": {event["step"]: event["reason"] for event in plans if event["reason"]},
        "changes": [{name: event[name] for name in ("step", "tp", "ep", "seconds", "error")} for event in changes],
    }


def run(quick: bool, nonce: str) -> dict[str, Any]:
    """Simulate. Raises SimulationFailed."""
    begun, given = now(), QUICK if quick else ()
    planner = played(load_scenario("experts", given))
    layouts = LAYOUTS if not quick else [layout for layout in LAYOUTS if str(layout) == planner["layouts"][0]]
    others = {str(layout): played(fixed(layout, *given)) for layout in layouts}
    best = min(others, key=lambda name: others[name]["seconds"])
    value = planner["seconds"] / others[best]["seconds"]
    rows = [
        {"layout": name, "seconds": one["seconds"], **_phases(one["rollouts"], planner["imbalance"])}
        for name, one in {"planner": planner, **others}.items()
    ]
    return simulated_frame(
        NAME,
        value=value,
        unit="seconds of a run whose layout is chosen between steps, over the best layout that never changes",
        reference="the best fixed layout in hindsight",
        reference_value=1.0,
        bar="< 1, changes paid for",
        holds=value < 1.0,
        detail={"best_fixed": best, "rows": rows, "planner": planner},
        quick=quick,
        nonce=nonce,
        begun=begun,
    )


def _phases(rollouts: list[float], imbalance: list[float]) -> dict[str, float]:
    """Mean seconds of a rollout while routing is even, and while it is not."""
    pairs = list(zip(rollouts, imbalance, strict=True))
    even, uneven = ([took for took, one in pairs if (one > 1.0) == worse] for worse in (False, True))
    return {"even": round(fmean(even), 3), "uneven": round(fmean(uneven), 3)}
