"""How far off what `rl-coserve cost --from RUN` says of another run is: time per step and wall time of the demo, real engines.

Real: one run of the demo is calibrated; another one, with another seed, staleness bound and batch, is predicted before it is
looked at. Both are made in pairs, the one or the other first in turn, as the load of a shared machine is in both; its load
average is in the detail. A run before them all is not counted: it alone reads the libraries from the disk. How far the runs that
are calibrated, alike but for their seeds, are from each other is in the detail too: no prediction can be nearer than that.
Each has 120 steps, about as many as the demo has before it ends by itself. ``--quick`` makes one pair of few steps: it shows that
the measurement works.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from orchestrator.observe.report.run_log import load_run
from orchestrator.ops.calibration import FEWEST_STEPS, calibrate, config_from, measured_step, predicted
from scripts.bench.probes.training_run import train
from scripts.bench.result import frame, now

NAME = "calibrated-prediction"
PAIRS, STEPS = 3, 120
STEP_BAR, WALL_BAR = 0.10, 0.15
_CONFIG = Path("examples/frozenlake.toml")
_BOTH = ("evaluation.prompts=100", "run.minutes=20", "run.signal_share=0")
_OTHER = ("rollout.alpha=2", "rollout.groups_per_step=6")


def run(quick: bool, nonce: str) -> dict[str, Any]:
    """Measure. Needs the repository's ``examples`` folder. Raises RunError when a run fails."""
    begun = now()
    pairs, steps = (1, FEWEST_STEPS) if quick else (PAIRS, STEPS)
    with tempfile.TemporaryDirectory(prefix="rl-coserve-calibrated-") as folder:
        if not quick:
            train(_CONFIG, Path(folder), "first", [*_BOTH, "run.steps=2"])
        rows = [_pair(pair, steps, Path(folder)) for pair in range(pairs)]
    step = median(abs(row["step"] / row["measured_step"] - 1) for row in rows)
    wall = median(abs(row["wall"] / row["measured_wall"] - 1) for row in rows)
    return frame(
        NAME,
        "real",
        value=round(step, 4),
        unit="of the time per step of another run: prediction off by (median of the pairs)",
        reference="the other run, measured",
        reference_value=round(median(row["measured_step"] for row in rows), 4),
        bar=f"<= {STEP_BAR:g}, and the wall time within {WALL_BAR:g}, in {PAIRS} pairs",
        holds=None if quick else step <= STEP_BAR and wall <= WALL_BAR,
        detail={
            "recipe": [str(_CONFIG), *_BOTH, f"run.steps={steps}"],
            "changed": [*_OTHER, "run.seed"],
            "wall": round(wall, 4),
            "pairs": rows,
            "alike": round(max(row["own_step"] for row in rows) / min(row["own_step"] for row in rows) - 1, 4),
            "samples": len(rows),
            **({"shrunk": f"one pair, of {steps} steps each"} if quick else {}),
        },
        quick=quick,
        nonce=nonce,
        begun=begun,
    )


def _pair(pair: int, steps: int, folder: Path) -> dict[str, Any]:
    both = [*_BOTH, f"run.steps={steps}"]
    load = os.getloadavg()[0]
    changed = [*both, *_OTHER, f"run.seed={pair + 10}"]
    asked = {"own": [*both, f"run.seed={pair}"], "other": changed}
    made = {
        name: train(_CONFIG, folder, f"{name}-{pair}", asked[name]) for name in sorted(asked, reverse=pair % 2 == 0)
    }
    own, other = made["own"], made["other"]
    loads = [round(load, 1), round(os.getloadavg()[0], 1)]
    found = calibrate(own)
    config = config_from(own, None, changed)
    step = predicted(config).seconds_per_step
    log = load_run(other)
    return {
        "step": round(step, 4),
        "measured_step": round(measured_step(log), 4),
        "wall": round(found.wall_seconds(config, step), 2),
        "measured_wall": round(log.seconds, 2),
        "own_step": round(found.step, 4),
        "factor": found.factor,
        "load_average": loads,
    }
