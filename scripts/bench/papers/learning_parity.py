"""What asynchrony, tail batching and shared devices cost and gain in learning: held-out success of each variant over the
synchronous run's, same recipe.

Real: ``rl-coserve train`` of one recipe, the demo's shortened, for each variant of :data:`VARIANTS` and each seed; they differ in
mode and alpha, in short and long rounds (RollPacker 3), or in devices that rollout and training share within a step (4.4), and
in nothing else; all stream, as the recipe does (without it the weights are the same, bit for bit: `stream-equality`).

The value is the worst variant's final success less the synchronous one's, each over all its seeds; beside it, in ``detail``:
steps and wall time until the held-out success first reached the target, and the curves. Wall time counts from the first
evaluation, with start-up and warm-up left out and evaluations included.

``python -m scripts.bench.papers.learning_parity FOLDER --next`` makes one run that is missing in FOLDER and ends, with exit code
3 when none is, ``--only NAME`` of one variant; ``--result`` prints the figure from what there is. ``--quick`` makes two short
runs: it shows that the measurement works, not that the bar is met; ``--short`` makes those of ``--only`` so.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from orchestrator.evaluation import wilson
from orchestrator.events import read_events
from orchestrator.observe.report.summary import summarize
from scripts.bench.cells import Cells
from scripts.bench.papers.runner import interval
from scripts.bench.probes.training_run import train
from scripts.bench.result import frame, now

NAME = "learning-parity"
SEEDS = (0, 1, 2, 3, 4)
TARGET = 0.70  # held-out success
_CONFIG = Path("examples/frozenlake.toml")
_RECIPE = (
    "run.steps=120",
    "run.signal_share=0",
    "rollout.dynamic_sampling=false",  # as many trajectories in every variant
    "evaluation.every=20",
    "evaluation.prompts=200",
    "checkpoint.every=50",
)
_SHORT = ("run.steps=2", "evaluation.every=0", "evaluation.prompts=50", "warmup.steps=5", "checkpoint.every=50")


@dataclass(frozen=True)
class Variant:
    """A way to coordinate; ``overrides`` of the recipe."""

    name: str
    overrides: tuple[str, ...]
    reference: bool = False
    timed: bool = False  # it is to reach the target in less wall time


_ON_POLICY = ("run.mode=sync_plus", "rollout.alpha=0")
_ROUNDS = ("rollout.redundant_groups=1.0", "rollout.rounds.enabled=true")
VARIANTS = (
    Variant("sync_plus", _ON_POLICY, reference=True),
    Variant("async, alpha 1", ("run.mode=async", "rollout.alpha=1"), timed=True),
    Variant("async, alpha 2", ("run.mode=async", "rollout.alpha=2"), timed=True),
    Variant("tail batching", (*_ON_POLICY, *_ROUNDS)),
    Variant("shared devices", (*_ON_POLICY, "rollout.workers=2", "rollout.colocation.enabled=true")),
    Variant("tail batching of prompts", (*_ON_POLICY, *_ROUNDS, "rollout.rounds.eta_responses=1.0")),
)


def run(quick: bool, nonce: str) -> dict[str, Any]:
    """Measure. Needs the repository's ``examples`` folder. Raises RunError when a run fails."""
    begun = now()
    chosen = (VARIANTS[0], VARIANTS[1]) if quick else VARIANTS
    if quick:
        with tempfile.TemporaryDirectory(prefix="rl-coserve-parity-") as folder:
            rows = [one(variant, 0, _SHORT, Path(folder)) for variant in chosen]
    else:
        folder_kept = Path("runs") / f"parity-{begun.replace(':', '')[:17]}"
        rows = [one(variant, seed, _RECIPE, folder_kept) for seed in SEEDS for variant in chosen]
    return result(rows, quick, {"started": begun, "nonce": nonce})


def one(variant: Variant, seed: int, recipe: tuple[str, ...], folder: Path) -> dict[str, Any]:
    """One run: what is kept of it. Raises RunError when it fails."""
    name = f"{variant.name.replace(', ', '-').replace(' ', '')}-seed{seed}"
    load = os.getloadavg()[0]
    run_folder = train(_CONFIG, folder, name, [f"run.seed={seed}", *recipe, *variant.overrides])
    summary, events = summarize(run_folder), read_events(run_folder / "events.jsonl")
    return {
        "variant": variant.name,
        "seed": seed,
        "success_start": summary["success_start"],
        "success_end": summary["success_end"],
        "interval": summary["success_intervals"]["success_end"],
        "curve": curve(events),
        "steps": summary["steps"],
        "seconds": summary["seconds"],
        "staleness": summary["staleness"],
        "tokens_per_s": summary["tokens_per_s"],
        "evicted_stale": summary["ledger"]["evicted_stale"],
        "rounds": summary["rounds"],
        "freed": sum(event["kind"] == "stream_trigger" and bool(event["freed"]) for event in events),
        "started": summary["ledger"]["started"],
        "load_average": [round(load, 1), round(os.getloadavg()[0], 1)],
    }


def curve(events: list[dict[str, Any]]) -> list[list[float]]:
    """Each evaluation as [steps done, seconds since the first one, success]."""
    found = [event for event in events if event["kind"] == "evaluation" and event["phase"] in ("start", "mid", "end")]
    return [[event["step"], round(event["t"] - found[0]["t"], 3), event["success"]] for event in found]


def reached(points: list[list[float]], target: float = TARGET) -> tuple[int, float] | None:
    """(steps, seconds) at the first evaluation with at least the target; None: it never had it."""
    return next(((int(step), seconds) for step, seconds, success in points if success >= target), None)


def result(rows: list[dict[str, Any]], quick: bool, detail: dict[str, Any]) -> dict[str, Any]:
    """The figure from finished runs; seeds that only some variants have are left out."""
    seeds = sorted(
        set.intersection(*({row["seed"] for row in rows if row["variant"] == name} for name in _names(rows)))
    )
    table = [
        _variant(name, [row for row in rows if row["variant"] == name and row["seed"] in seeds])
        for name in _names(rows)
    ]
    base = next(row for row in table if row["variant"] == next(v.name for v in VARIANTS if v.reference))
    others = [row for row in table if row is not base]
    for row in others:
        row["difference"] = difference(row, base)
    worst = min(others, key=lambda row: float(row["difference"]["value"]))
    parity = all((row["difference"]["high"] or 0.0) >= 0 for row in others)
    limit = base["seconds_to_target_median"]
    timed = [row for row in others if any(row["variant"] == variant.name and variant.timed for variant in VARIANTS)]
    # Where the reference misses the target, too, nobody has shown to be sooner.
    faster = limit is not None and all((row["seconds_to_target_median"] or math.inf) <= limit for row in timed)
    return frame(
        NAME,
        "real",
        value=worst["difference"]["value"],
        unit=f"held-out success less that of {base['variant']}, worst variant",
        reference=f"held-out success of {base['variant']}, mean of its seeds",
        reference_value=base["success_end"],
        bar="no significant loss in five seeds (the 95 % interval of the difference, paired by seed, reaches 0); asynchronous, "
        "less wall time to a target that both reach",
        holds=None if quick else len(seeds) >= len(SEEDS) and parity and faster,
        detail={
            "recipe": [str(_CONFIG), *(_SHORT if quick else _RECIPE)],
            "variants": {variant.name: list(variant.overrides) for variant in VARIANTS},
            "target": TARGET,
            "seeds": seeds,
            "table": table,
            "runs": rows,
            "samples": sum(int(row["interval"]["prompts"]) for row in rows),
            **({"shrunk": "two variants, one seed, a recipe of two steps"} if quick else {}),
            **detail,
        },
        quick=quick,
    )


def _names(rows: list[dict[str, Any]]) -> list[str]:
    return [variant.name for variant in VARIANTS if any(row["variant"] == variant.name for row in rows)]


def _variant(name: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Its seeds together: all evaluation episodes as one sample, and the medians of what it took."""
    prompts = sum(int(row["interval"]["prompts"]) for row in rows)
    successes = sum(round(row["success_end"] * row["interval"]["prompts"]) for row in rows)
    to_target = [reached(row["curve"]) for row in rows]
    low, high = wilson(successes, prompts)
    missed = any(item is None for item in to_target)
    return {
        "variant": name,
        "success_end": successes / prompts,
        "low": low,
        "high": high,
        "prompts": prompts,
        "by_seed": [row["success_end"] for row in rows],
        "steps_to_target": [item and item[0] for item in to_target],
        "seconds_to_target": [item and item[1] for item in to_target],
        "steps_to_target_median": None if missed else median(item[0] for item in to_target if item),
        "seconds_to_target_median": None if missed else median(item[1] for item in to_target if item),
        "seconds_of_training": [row["curve"][-1][1] for row in rows],
    }


def difference(one_: dict[str, Any], base: dict[str, Any]) -> dict[str, float | None]:
    """Of final successes, paired by seed: the mean, and 95 % of Student's t over seeds. A seed's maps, prompts and start are the
    same for both, and what differs between seeds is in it, as pooled episodes would not have it. One seed has no interval."""
    found = interval([ours - its for ours, its in zip(one_["by_seed"], base["by_seed"], strict=True)])
    low, high = (round(bound, 4) for bound in found["interval"]) if found["interval"] else (None, None)
    return {"value": round(found["mean"], 4), "low": low, "high": high}


def _cells(folder: Path) -> Cells:
    return Cells(folder, NAME, f"{zlib.crc32(' '.join(_RECIPE).encode()):08x}")


def make_next(folder: Path, only: str = "") -> int:
    """Make the first run that is missing, of one variant or of all. 3: none is."""
    cells = _cells(folder)
    for seed in SEEDS:
        for number, variant in enumerate(VARIANTS):
            if only not in ("", variant.name):
                continue
            key = f"{seed}-{number}"
            if not cells.has(key):
                row = one(variant, seed, _RECIPE, folder / "runs")
                cells.keep(key, row)
                print(f"{variant.name}, seed {seed}: {row['success_end']}, {row['curve'][-1][1]} s", file=sys.stderr)
                return 0
    return 3


def main(arguments: list[str]) -> int:
    """See the module."""
    parser = argparse.ArgumentParser(prog="python -m scripts.bench.papers.learning_parity", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--next", action="store_true")
    parser.add_argument("--only", choices=[variant.name for variant in VARIANTS], default="")
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--result", action="store_true")
    options = parser.parse_args(arguments)
    if options.short:
        chosen = [variant for variant in VARIANTS if options.only in ("", variant.name)]
        print(json.dumps([one(variant, 0, _SHORT, options.folder) for variant in chosen], indent=1, sort_keys=True))
        return 0
    code = make_next(options.folder, options.only) if options.next else 0
    if options.result:
        kept = _cells(options.folder)
        found = result(kept.found(), False, {"in_parts": True}) | {"source": kept.measured_on()}
        print(json.dumps(found, indent=1, sort_keys=True))
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
