"""Is the run bound by its environments or by its GPUs? From the events of the run (study notes, Q9).

Guarantee: every number says what it was measured with: NVML where the orchestrator's machine has a GPU; else the share of
the time in which an engine had work, which says nothing of how well it used its device meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from orchestrator.observe.report.run_log import RunLog
from orchestrator.observe.report.timeline import shares
from orchestrator.observe.run_figures import number
from orchestrator.policies.episodes.run_bottleneck import (
    bottleneck_of,
    environments_to_try,
    environments_wanted,
    generation_ratio,
)


@dataclass(frozen=True)
class Analysis:
    """Shares are of the time in which trajectories were in flight; ``gpu_busy`` None: no GPU was seen."""

    verdict: str
    measured_by: str
    engine_busy: float
    gpu_busy: float | None
    requests_per_engine: float
    in_flight: float
    turns: int
    generate_seconds: float  # of a turn, mean
    environment_seconds: float  # of a turn, mean; its share of the environment's start included
    environments: int
    environments_busy: int | None  # keep one request in every engine
    environments_full: int | None  # fill rollout.engine.max_num_seqs
    environments_suggested: int
    trainer_busy: float  # of the time from the first batch to the last
    generation_to_training: float | None  # busy seconds of rollout engines for one of the trainer


def analyse_bottleneck(run: RunLog) -> Analysis | None:
    """What the run's log says; None where it does not say how busy the engines were (older runs, no step done)."""
    seen = {name: sum(found[name] for found in run.occupancy) for name in _TOTALS}
    if not seen["samples"] or not seen["usable"]:
        return None
    rollout: Any = run.config.get("rollout") or {}
    environments = int(rollout.get("environments", 0))
    most = int((rollout.get("engine") or {}).get("max_num_seqs", 0))
    workers = max(1, round(seen["usable"] / seen["samples"]))
    engine = seen["busy"] / seen["usable"]
    gpu = seen["gpu"] / seen["gpu_samples"] if seen["gpu_samples"] else None
    turns, generating = int(seen["turns"]), seen["generate_seconds"]
    acting = max(0.0, seen["episode_seconds"] - generating)
    busy = engine if gpu is None else gpu
    wanted = environments_wanted(generating, acting, workers)
    full = environments_wanted(generating, acting, workers, most) if most else None
    trainer = run.lanes()["trainer"]
    working = shares(trainer)
    span = sum(working.values())
    trained = sum(working.get(state, 0.0) for state in ("train", "stream"))
    return Analysis(
        verdict=bottleneck_of(busy),
        measured_by="NVML" if gpu is not None else "share of the time with a request",
        engine_busy=round(engine, 6),
        gpu_busy=number(gpu),
        requests_per_engine=round(seen["requests"] / seen["usable"], 3),
        in_flight=round(seen["in_flight"] / seen["samples"], 3),
        turns=turns,
        generate_seconds=round(generating / max(1, turns), 6),
        environment_seconds=round(acting / max(1, turns), 6),
        environments=environments,
        environments_busy=wanted,
        environments_full=full,
        environments_suggested=environments_to_try(busy, environments, wanted, full),
        trainer_busy=round(trained / span, 6) if span else 0.0,
        generation_to_training=number(generation_ratio(trained, seen["busy"] * run.sample_seconds)),
    )


_TOTALS = (
    "samples", "in_flight", "busy", "usable", "requests", "gpu", "gpu_samples",
    "turns", "generate_seconds", "episode_seconds",
)  # fmt: skip
