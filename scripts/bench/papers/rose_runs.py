"""Rollout times of ROSE's setups, as its benchmarks measure them: the mean of so many steps and seeds, and what users saw.

The first step of a run is left out: it begins with an evaluation. A step's time is its longest trajectory's, which differs by a
third from step to step, so that one seed says little. Beside what users saw stands what they would have seen with no rollouts on
the same arrivals (``alone_...``): what is late there is not rollouts' doing.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from statistics import mean
from typing import Any

from orchestrator.sim.paper_setups import load_scenario
from orchestrator.sim.simulated_run import simulate
from scripts.bench.papers.serving_alone import serving_alone


def played(overrides: Sequence[str], steps: int, seeds: int) -> dict[str, Any]:
    """``rollout_seconds``, and of each step of each seed; with borrowed workers what :class:`BorrowedFleet` reports: times and
    shares of users of the worst seed, all else in the mean. Raises SimulationFailed."""
    seconds: list[list[float]] = []
    reports: list[dict[str, Any]] = []
    for seed in range(seeds):
        config = load_scenario("rose", [f"run.steps={steps + 1}", f"run.seed={seed}", *overrides])
        result = simulate(config)
        events = [json.loads(line) for line in result.events.splitlines()]
        ends = [(event["t"], event["seconds"]) for event in events if event["kind"] == "step"]
        seconds.append([after - before - train for (before, _), (after, train) in pairwise(ends)])
        report = dict(result.summary.get("borrowed", {}))
        if config.sim.borrowed.how in ("coserve", "multiplex") and report:
            alone = serving_alone(config, result.summary["seconds"])
            report |= {f"alone_{key}": value for key, value in alone.items() if key != "requests"}
        reports.append(report)
    found: dict[str, Any] = {"rollout_seconds": mean(one for row in seconds for one in row)}
    found["steps"] = [[round(one, 1) for one in row] for row in seconds]
    for key, value in reports[0].items():
        values = [report[key] for report in reports]
        if isinstance(value, str):
            found[key] = value
        else:
            found[key] = max(values) if "ttft" in key or "tpot" in key else mean(values)
    return found
