"""Success of the demo on its 400 held-out maps after eight minutes, by real RL: mean and worst of five seeds.

Runs ``rl-coserve train examples/frozenlake.toml`` once per seed, from nothing. Each seed is kept as it ends
(:mod:`scripts.bench.cells`, under ``runs/cells/demo-seeds``), so that they may be measured one by one, on different days; all
must be of the same sources, which the figure names. ``python -m scripts.bench.papers.demo_seeds`` measures the first seed that
is missing and ends, with exit code 3 when none is; ``rl-coserve bench demo-seeds`` measures all that are missing and gives the
figure. ``--quick`` runs one seed for a few steps: it shows that the measurement works, not that the bar is met.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
import zlib
from pathlib import Path
from typing import Any

from orchestrator.events import read_events
from orchestrator.observe.report.summary import summarize
from scripts.bench.cells import Cells
from scripts.bench.probes.training_run import train
from scripts.bench.result import frame, now

NAME = "demo-seeds"
SEEDS = (0, 1, 2, 3, 4)
MEAN, WORST, START, SECONDS = 0.85, 0.80, 0.41, 480.0
CELLS = Path("runs/cells") / NAME
_CONFIG = Path("examples/frozenlake.toml")
_SHORT = ("run.steps=3", "evaluation.prompts=50", "evaluation.every=0", "warmup.steps=20")


def run(quick: bool, nonce: str) -> dict[str, Any]:
    """Measure. Needs the repository's ``examples`` folder. Raises RunError when a run fails, ConfigError for seeds that were kept
    of other sources."""
    begun = now()
    if quick:
        with tempfile.TemporaryDirectory(prefix="rl-coserve-demo-") as folder:
            rows = [one(0, _SHORT, Path(folder))]
    else:
        kept_cells().check_current()
        while measure_next():
            pass
        kept = kept_cells()
        return result(kept.found(), False, {"started": begun, "nonce": nonce}) | {"source": kept.measured_on()}
    return result(rows, True, {"started": begun, "nonce": nonce})


def measure_next() -> bool:
    """Measure the first seed that is missing; False: none is."""
    cells = kept_cells()
    seed = next((seed for seed in SEEDS if not cells.has(str(seed))), None)
    if seed is None:
        return False
    row = one(seed, (), Path("runs/demo-seeds"))
    cells.keep(str(seed), row)
    print(f"seed {seed}: {row['success_start']} -> {row['success_end']} in {row['seconds']} s", file=sys.stderr)
    return True


def kept_cells() -> Cells:
    """Of the demo as it is now: another recipe has other files."""
    return Cells(CELLS, NAME, f"{zlib.crc32(_CONFIG.read_bytes()):08x}")


def one(seed: int, short: tuple[str, ...], folder: Path) -> dict[str, Any]:
    """A run of the demo: what is kept of it. ``seconds``: of the whole command, start-up and last evaluation included."""
    load, begun = os.getloadavg()[0], time.monotonic()
    run_folder = train(_CONFIG, folder, f"seed{seed}", [f"run.seed={seed}", *short])
    seconds = time.monotonic() - begun
    summary, events = summarize(run_folder), read_events(run_folder / "events.jsonl")
    metrics = [event["metrics"] for event in events if event["kind"] == "step"]
    late = metrics[len(metrics) // 2 :]
    return {
        "seed": seed,
        "success_start": summary["success_start"],
        "success_end": summary["success_end"],
        "interval": summary["success_intervals"]["success_end"],
        "curve": summary["success_curve"],
        "steps": summary["steps"],
        "seconds": round(seconds, 1),
        "signal_late": round(sum(1 - each["groups_silent_share"] for each in late) / len(late), 4),
        "zero_gradients": sum(each["grad_norm"] == 0 for each in metrics),
        "ended": [event["detail"] for event in events if event["kind"] == "alarm" and event["what"] == "signal"],
        "load_average": [round(load, 1), round(os.getloadavg()[0], 1)],
    }


def result(rows: list[dict[str, Any]], quick: bool, detail: dict[str, Any]) -> dict[str, Any]:
    """The figure from finished runs, one per seed."""
    finals = [float(row["success_end"]) for row in rows]
    start, seconds = max(float(row["success_start"]) for row in rows), max(float(row["seconds"]) for row in rows)
    mean = sum(finals) / len(finals)
    met = mean >= MEAN and min(finals) >= WORST and start <= START and seconds <= SECONDS
    return frame(
        NAME,
        "real",
        value=round(mean, 4),
        unit="success rate on held-out maps, mean of the seeds",
        reference="success before RL, best seed",
        reference_value=start,
        bar=f"mean >= {MEAN:.2f}, worst >= {WORST:.2f}, before RL <= {START:.2f}, each command within {SECONDS:.0f} s, two cores",
        holds=None if quick else met and len(rows) == len(SEEDS),
        detail={
            "worst": min(finals),
            "longest": seconds,
            "runs": rows,
            "samples": sum(int(row["interval"]["prompts"]) for row in rows),
            **({"shrunk": ["one seed", *_SHORT]} if quick else {}),
            **detail,
        },
        quick=quick,
    )


if __name__ == "__main__":
    kept_cells().check_current()
    sys.exit(0 if measure_next() else 3)
