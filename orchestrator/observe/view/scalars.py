"""A run's figures for tools that draw curves: one name a curve, with ``/`` between its parts, the same in all of them.

Guarantees: pure; the names of curves are bounded (workers, ends and the trainer's own figures, never a trajectory); a value
that is not finite is left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from orchestrator.observe.event_records import ENDS
from orchestrator.observe.run_figures import lag_mean

KINDS = frozenset({"step", "evaluation", "update", "worker"})  # the events that have any


def scalars(event: Mapping[str, Any]) -> tuple[int, dict[str, float]]:
    """(step, name -> value) of one event: training steps are counted from 1, weights by their version. Empty for others."""
    match event["kind"]:
        case "step":
            return int(event["step"]) + 1, _finite(_of_step(event))
        case "evaluation":
            return int(event["step"]), _finite(_of_evaluation(event))
        case "update":
            names = ("seconds", "bytes", "preempted")
            return int(event["version"]), _finite((f"weights/{name}", event[name]) for name in names)
        case "worker":
            return int(event["version"]), _finite(_of_worker(event))
    return 0, {}


def _of_step(event: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    yield "train/reward", event["reward_mean"]
    yield "train/success", event["success"]
    for name, value in (event.get("metrics") or {}).items():
        yield f"train/{name}", value
    lag = {int(versions): count for versions, count in (event.get("lag") or {}).items()}
    if (mean := lag_mean(lag)) is not None:
        yield "batch/lag_mean", mean
        yield "batch/lag_max", max(lag)
    yield "batch/tokens", event["tokens"]
    yield "batch/trajectories", event["trained"]
    yield "time/train_step_seconds", event["seconds"]
    yield "time/since_start_seconds", event["t"]
    ledger = event.get("ledger") or {}
    for end in ENDS:
        if end in ledger:
            yield f"ledger/{end}", ledger[end]


def _of_evaluation(event: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name in ("success", "low", "high"):
        yield f"eval/{name}", event[name]
    for name in ("solved", "reward", "tokens", "truncated"):
        if event.get(name) is not None:  # older logs have none
            yield f"eval/{name}", event[name]
    for task, success in (event.get("tasks") or {}).items():
        yield f"eval/{task}/success", success


def _of_worker(event: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    head = f"worker/{event['name']}"
    if event.get("kv_capacity"):
        yield f"{head}/kv_used_ratio", event["kv_used"] / event["kv_capacity"]
    for name in ("running", "waiting", "tokens_per_s", "preemptions"):
        yield f"{head}/{name}", event[name]


def _finite(pairs: Iterator[tuple[str, Any]]) -> dict[str, float]:
    return {name: float(value) for name, value in pairs if value is not None and math.isfinite(value)}
