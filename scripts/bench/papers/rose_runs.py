"""Rollout times of ROSE's setups, as its benchmarks measure them: the mean of so many steps of a seed, and what users saw.

The first step of a run is left out: it begins with an evaluation. A step's time is its longest trajectory's, which differs by a
third from step to step, so that one seed says little. Beside what users saw stands what they would have seen with no rollouts on
the same arrivals (``alone_...``): what is late there is not rollouts' doing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from statistics import mean
from typing import Any

from orchestrator.config import Config
from orchestrator.sim import hardware
from orchestrator.sim.coserving.serving_cluster import ServingCluster, tail_latency
from orchestrator.sim.paper_setups import load_scenario
from scripts.bench.papers.runner import Run
from scripts.bench.virtual_run import run

SETTINGS: dict[str, tuple[str, ...]] = {  # of routing: what each side of a comparison may have, at its best
    "dedicated-first": (),  # ROSE 4.3; a trajectory stays where its prefix is
    "dedicated-first, imbalance 2": ("rollout.routing.imbalance=2",),
    "least-utilized": ("rollout.routing.spread=least-utilized",),
    "least-utilized, imbalance 2": ("rollout.routing.spread=least-utilized", "rollout.routing.imbalance=2"),
}
PAPERS = "dedicated-first"
ROSES = "Azure's code trace"
LOADS: dict[str, tuple[str, ...]] = {
    ROSES: (),
    "Azure's code trace x 4": ("sim.borrowed.speed=6.0",),  # the scenario's is 1.5
    "Mooncake's conversation trace": (  # prompts of 12k tokens in the mean, up to 120k: no SLO of 0.5 s
        "sim.borrowed.trace=mooncake_conversation",
        "sim.borrowed.speed=1.0",
        "sim.borrowed.ttft=10.0",
    ),
}


def played(overrides: Sequence[str], steps: int, seed: int) -> dict[str, Any]:
    """``rollout_seconds``, the mean of ``steps``; with borrowed workers what :class:`BorrowedFleet` reports. Raises
    SimulationFailed."""
    one = Run(load_scenario("rose", [f"run.steps={steps + 1}", f"run.seed={seed}", *overrides]))
    seconds = [period - one.steps[step]["seconds"] for step, period in one.periods.items()]
    report = dict(one.result.summary.get("borrowed", {}))
    if one.config.sim.borrowed.how in ("coserve", "multiplex") and report:
        alone = serving_alone(one.config, one.seconds)
        report |= {f"alone_{key}": value for key, value in alone.items() if key != "requests"}
    return {"rollout_seconds": mean(seconds), "steps": [round(took, 1) for took in seconds], **report}


def serving_alone(config: Config, seconds: float) -> dict[str, Any]:
    """The same engines and requests for so many seconds, with no rollout: ``ttft_p99``, ``ttft_late`` (share beyond the SLO),
    ``tpot_p99``, ``tpot_late``, ``requests``. Raises ConfigError."""
    sim, settings = config.sim, config.sim.borrowed

    async def main() -> dict[str, Any]:
        engines = settings.serving or settings.workers
        tenant = hardware.model(sim.model).weight_bytes
        cluster = ServingCluster(settings, engines, hardware.device(sim.device), sim.tensor_parallel, tenant)
        cluster.start()
        await asyncio.sleep(seconds)
        cluster.close()
        found: dict[str, Any] = {"requests": cluster.requests}
        found["ttft_p99"], found["ttft_late"] = tail_latency(cluster.served.ttft, settings.ttft)
        found["tpot_p99"], found["tpot_late"] = tail_latency(cluster.served.tpot, settings.tpot)
        return found

    return run(main())
