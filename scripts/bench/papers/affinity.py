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
from scripts.bench.papers.modes import FREE, FREE_NAME
from scripts.bench.papers.rollart_setups import rollart_fleet
from scripts.bench.papers.run_figures import measure
from scripts.bench.papers.simulated import row, simulated_frame, within
from scripts.bench.result import now

NAME = "affinity"
_MODELS = ("8B", "14B", "32B")
FLEETS = {"affinity": (64, 24), "h800": (72, 0), "h20": (0, 208)}
_NO_AFFINITY = "rollout.routing.affinity={}"


def config_of(model: str, fleet: str, scale: int, steps: int, extra: Sequence[str] = ()) -> Config:
    """One of the three."""
    given = [f"run.steps={steps}", *rollart_fleet(model, *FLEETS[fleet]), *extra]
    return load_scenario("rollart", [*given, *([] if fleet == "affinity" else [_NO_AFFINITY])], scale)


def config_of_task(task: str, hardware: str, batch: int) -> Config:
    """Figure 4: Qwen3-8B, one task, two H800 or six H20, no training beside it."""
    workers = 2 if hardware == "H800" else 6
    others = {"frozenlake", "webshop", "gem-math", "gem-game"} - {task}
    given = [
        "run.mode=sync_plus",
        "run.steps=3",
        "rollout.alpha=0",
        f"rollout.workers={workers}",
        f"sim.fleet={{{hardware}={workers}}}",
        _NO_AFFINITY,
        f"rollout.environments={batch}",
        f"rollout.groups_per_step={batch // 8}",
        "rollout.weights=collective",
        "rollout.collective_timeout=3600.0",
        "sim.push_gb_s=0",  # one cluster: no relay across Ethernet
        "sim.pull_gb_s=0",
        "sim.trainer_gpus=100000",
        "sim.trainer_serial_seconds=0",
        *(f"sim.tasks.{name}.weight=1e-9" for name in sorted(others)),
    ]
    return load_scenario("rollart", given)


def run(quick: bool, nonce: str) -> dict[str, Any]:
    """Simulate. Raises SimulationFailed."""
    begun = now()
    scale = 8
    models = ("8B",) if quick else _MODELS
    steps: dict[str, dict[str, float]] = {}
    for model in models:
        fleets = FLEETS if not quick else {"affinity": 0, "h800": 0}
        steps[model] = {name: measure(config_of(model, name, scale, 3 if quick else 5)).step_seconds for name in fleets}
    rows = [one for model, found in steps.items() for one in _rows(model, found)]
    if not quick:
        for model in models:
            free = {name: measure(config_of(model, name, scale, 5, FREE)).step_seconds for name in FLEETS}
            name = FREE_NAME.replace("8B", model)
            steps[name] = free
            rows += _rows(name, free)
        rows += _figure_4()
    gains = [one["simulated"] for one in rows if "over affinity" in one["what"] and "nothing" not in one["what"]]
    value = min(gains)
    return simulated_frame(
        NAME,
        value=value,
        unit="step time of one class of GPUs over affinity, the least of models and classes",
        reference="RollArt 7.3, H800 only, 8B to 32B (paper)",
        reference_value=1.12,
        bar=">= 1.12",
        holds=value >= 1.12,
        detail={"scale": scale, "rows": rows, "step_seconds": steps},
        quick=quick,
        nonce=nonce,
        begun=begun,
    )


def _rows(model: str, found: dict[str, float]) -> list[dict[str, Any]]:
    rows = []
    for name, low, high in (("h800", 1.12, 1.37), ("h20", 1.30, 1.68)):
        if name in found:
            ours = found[name] / found["affinity"]
            what = f"{model}: step time, {name} only over affinity"
            rows.append(within(what, low, high, ours, "RollArt 7.3, figure 11a"))
    return rows


def _figure_4() -> list[dict[str, Any]]:
    found = []
    for task, over, low, high in (
        ("frozenlake", "H800 over H20", 0.53, 1.0),
        ("gem-math", "H20 over H800", 0.49, 0.79),
    ):
        for batch in (32, 64, 128):
            seconds = {name: measure(config_of_task(task, name, batch)).step_seconds for name in ("H800", "H20")}
            mine, other = ("H800", "H20") if task == "frozenlake" else ("H20", "H800")
            text = "down to 0.53" if task == "frozenlake" else "0.49 to 0.79"
            what = f"{task}, batch {batch}: rollout time of {over}, 2 H800 or 6 H20"
            found.append(row(what, text, low, high, seconds[mine] / seconds[other], "RollArt 3.1, figure 4"))
    return found
