"""Configs of simulated runs whose borrowed servers are exchanged while faults strike: one a seed."""

from __future__ import annotations

from orchestrator.config import Config
from orchestrator.sim.paper_setups import load_scenario
from orchestrator.sim.seeded_draws import random_stream

STEPS, BATCH = 2, 16


def shape(seed: int) -> Config:
    """Few workers of its own, both rules; servers that crowd, are not needed, end unforeseen or by load; faults of every kind."""
    draw = random_stream(seed, "shape", "market")
    given = {
        "run.seed": seed,
        "run.steps": STEPS,
        "run.mode": (mode := draw.choice(("sync_plus", "one_off", "async"))),
        "rollout.workers": draw.choice((1, 1, 2)),
        "rollout.weights": draw.choice(("collective", "relay")),
        "rollout.alpha": 0 if mode == "sync_plus" else 1,
        "rollout.environments": BATCH,
        "rollout.group_size": 4,
        "rollout.groups_per_step": BATCH // 4,
        "rollout.environment_step_timeout": 10.0,
        "rollout.trajectory_timeout": 150.0,
        "rollout.stall_timeout": 30.0,
        "rollout.first_token_timeout": 30.0,
        "rollout.prepare_timeout": 30.0,
        "rollout.update_timeout": 30.0,
        "rollout.restart_timeout": 120.0,
        "rollout.collective_timeout": 20.0,
        "rollout.worker_restarts": 4,
        "rollout.member_refills": draw.choice((0, 2)),
        "rollout.routing.cap": (cap := draw.choice((2, 4, 16))),
        "rollout.routing.served_cap": cap,
        "rollout.routing.imbalance": draw.choice((0, 2, 16)),
        "rollout.routing.spread": draw.choice(("dedicated-first", "least-utilized")),
        "rollout.borrowed.every": draw.choice((2, 5)),
        "rollout.borrowed.window": 10,
        "rollout.borrowed.patience": draw.choice((4, 15)),
        "rollout.borrowed.rest": 4,
        "rollout.borrowed.idle": draw.choice((0, 6, 20)),
        "rollout.borrowed.crowded": draw.choice((0.002, 0.9)),
        "rollout.borrowed.margin": 0.001,
        "checkpoint.every": 1,
        "sim.tasks.frozenlake.response_tokens": draw.choice((100, 300)),
        "sim.borrowed.serving": 8,
        "sim.borrowed.workers": draw.choice((1, 3, 5)),
        "sim.borrowed.exchanged": "true",
        "sim.borrowed.speed": draw.choice((1.0, 3.0)),
        "sim.borrowed.scaled": draw.choice(("true", "false")),
        "sim.borrowed.outage_seconds": draw.choice((0.0, 5.0, 20.0)),
        "sim.borrowed.reload_seconds": draw.choice((2.0, 20.0)),
        "sim.fault_rate": draw.choice((0.0, 0.01, 0.03)),
    }
    return load_scenario("rose", [f"{key}={value}" for key, value in given.items()])
