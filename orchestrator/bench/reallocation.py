"""Simulated runs whose engines' degrees are chosen between steps, over the best equal degrees in hindsight (Heddle 6.2).

Whole simulated runs, the production resource manager (:mod:`orchestrator.reallocating`) and proxy, the roofline cost model of 8
H800 with Qwen3-8B; lengths are ASSUMED, lognormal of mean 2,000 tokens a turn with three widths of their tail. The managed run
is told the mean of a trajectory's tokens and takes the tail for granted (``expected_sigma`` 1 in all, which is right for one of
the three): it begins with the degrees that are best for that, learns the lengths from its first step, and pays for each change:
the engines that change are started anew, weights included. It is compared with runs of fixed equal degrees, of which nobody knows
the best beforehand. The value is the mean over the workloads of its seconds over theirs. Nothing else differs: prediction,
placement and migration are on in all. ``detail`` has the same run when nothing is expected, which begins with eight engines of
one device. ``--quick``: one workload.
"""

from __future__ import annotations

import datetime
import json
import os
from typing import Any

from orchestrator.config import Config, load_config
from orchestrator.policies.reallocation import written
from orchestrator.runfolder import describe_machine
from orchestrator.sim.run import simulate

NAME = "reallocation"
DEVICES = 8
_TAILS = (0.5, 1.0, 1.5)  # sigma of log(length)
_EXPECTED = "rollout.placement.degrees.expected_tokens=187.5"  # 2,000 a turn, 1 or 2 turns, in grains of 16
_NEVER = "rollout.placement.degrees.start_seconds=1e12"


def config(tail: float, *overrides: str) -> Config:
    """A run of ten steps of 64 trajectories."""
    base = [
        "sim.costs=roofline",
        "sim.model=Qwen3-8B",
        "sim.device=H800",
        f"rollout.workers={DEVICES}",
        "sim.grain=16",
    ]
    base += [
        "rollout.engine.max_model_len=2048",
        "rollout.engine.max_num_seqs=64",
        "run.steps=10",
        "run.mode=sync_plus",
    ]
    base += ["rollout.alpha=0", "rollout.groups_per_step=8", "rollout.group_size=8", "rollout.environments=64"]
    base += ["rollout.trajectory_timeout=100000.0", "rollout.stall_timeout=9999.0", "rollout.weights=relay"]
    base += ["evaluation.every=0", "evaluation.prompts=4", "sim.start_seconds=20.0", "rollout.prediction.enabled=true"]
    base += ["rollout.placement.enabled=true", "rollout.placement.degrees.enabled=true"]
    task = f"response_tokens=2000.0, response_sigma={tail}, response_max=24000, turns_max=2, turns_min=1"
    return load_config(None, [*base, f"sim.tasks={{t={{{task}}}}}", *overrides])


def run(quick: bool, nonce: str) -> dict[str, Any]:
    """Simulate."""
    begun = datetime.datetime.now(datetime.UTC).isoformat()
    rows = [_row(tail) for tail in (_TAILS[1:2] if quick else _TAILS)]
    value = sum(row["over_best_equal"] for row in rows) / len(rows)
    return {
        "name": NAME,
        "kind": "simulated",
        "value": value,
        "unit": f"seconds of a run with degrees chosen between steps, over the best equal degrees of {DEVICES} devices",
        "reference": "the best equal degrees in hindsight, fixed",
        "reference_value": 1.0,
        "bar": "< 1, changes paid for",
        "holds": value < 1.0,
        **describe_machine(),
        "detail": {
            "quick": quick,
            "rows": rows,
            "started": begun,
            "ended": datetime.datetime.now(datetime.UTC).isoformat(),
            "pids": [os.getpid()],
            "nonce": nonce,
        },
    }


def _row(tail: float) -> dict[str, Any]:
    fixed = {}
    for degree in (1, 2, 4, 8):
        start = f"rollout.placement.degrees.start={[degree] * (DEVICES // degree)}"
        fixed[str(degree)] = float(simulate(config(tail, start, _NEVER)).summary["seconds"])
    managed = simulate(config(tail, _EXPECTED))
    untold = float(simulate(config(tail)).summary["seconds"])
    events = [json.loads(line) for line in managed.events.splitlines()]
    changes = [event for event in events if event["kind"] == "reshape"]
    seconds = float(managed.summary["seconds"])
    return {
        "sigma": tail,
        "seconds": seconds,
        "fixed": fixed,
        "over_best_equal": seconds / min(fixed.values()),
        "over_degree_1": seconds / fixed["1"],
        "nothing_expected": untold,
        "nothing_expected_over_best_equal": untold / min(fixed.values()),
        "degrees": [written(event["degrees"]) for event in events if event["kind"] == "degrees"],
        "changes": len(changes),
        "change_seconds": sum(event["seconds"] for event in changes),
        "failed_changes": sum(bool(event["error"]) for event in changes),
    }
