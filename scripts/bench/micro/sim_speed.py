"""Processor seconds of the simulator for RollPacker's largest setup: 128 GPUs, 4,096 responses a step, 20 steps, on one core.

The veRL baseline of ``orchestrator/sim/scenarios/rollpacker.toml`` (figure 16's largest), with the audit of every trajectory. The
quick form plays a small part of it, and says what the whole would take at its rate.
"""

from __future__ import annotations

import os
import time
from typing import Any

from orchestrator.sim.paper_setups import rollpacker
from orchestrator.sim.simulated_run import simulate
from scripts.bench.result import frame, now

NAME = "sim-speed"
_BAR = 60.0  # seconds
_GROUPS, _STEPS = 512, 20


def run(quick: bool, nonce: str) -> dict[str, Any]:
    """Simulate. Raises SimulationFailed."""
    begun, times, steps = now(), 1 if quick else 4, 3 if quick else _STEPS
    given = {
        "rollout.workers": 16,
        "rollout.groups_per_step": 128,
        "rollout.environments": 2048,
        "sim.trainer_gpus": 32,
        "sim.reward_slots": 128,
        "trainer.data_parallel": 4,
    }
    extra = [f"{key}={value * times}" for key, value in given.items()]
    config = rollpacker("14B/16k", "veRL", 1, steps=steps, extra=extra)
    load, start = os.getloadavg(), time.process_time()
    callbacks = simulate(config).summary["callbacks"]
    seconds = time.process_time() - start
    value = seconds * (_GROUPS * _STEPS) / (128 * times * steps)
    return frame(
        NAME,
        "simulated",
        value=value,
        unit="processor seconds for 128 GPUs x 20 steps (81,920 trajectories)",
        reference="the goal",
        reference_value=_BAR,
        bar=f"<= {_BAR:g}",
        holds=value <= _BAR,
        detail={
            "processor_seconds": seconds,
            "callbacks": callbacks,
            "microseconds_a_callback": 1e6 * seconds / callbacks,
            "load_average": list(load),
        },
        quick=quick,
        nonce=nonce,
        begun=begun,
    )
