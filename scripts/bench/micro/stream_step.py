"""What streamed training takes off a step: seconds unstreamed over streamed, on policy, on the real engines (RollPacker 4.4).

Real: ``rl-coserve train`` of the demo in mode sync_plus, streamed and not, in turn; the two of a pair have the same seed and the
same rule for micro-batches (order of arrival) and differ in ``trainer.stream`` alone. A step is the time between two of them:
rollout, training and publishing together; the first one is left out. ``after_batch`` in the detail: seconds from the complete
batch to the published weights, which is what streaming shortens. Where no processor is idle beside the engine the rollout pays
for the gradients of the stream: the paper's gain is that of GPUs that would be idle.

``python -m scripts.bench.micro.stream_step FOLDER --next`` makes one run that is missing in FOLDER, with exit code 3
when none is; ``--result`` prints the figure from what there is. ``--quick`` makes one short pair: it shows that the
measurement works.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from orchestrator.events import read_events
from scripts.bench.cells import Cells
from scripts.bench.probes.training_run import train
from scripts.bench.result import frame, now

NAME = "stream-step"
PAIRS, STEPS, QUICK_STEPS = 3, 16, 4
BAR = 1.0  # streaming must not make a step longer
_CONFIG = Path("examples/frozenlake.toml")
_RECIPE = (
    "run.mode=sync_plus",
    "rollout.alpha=0",
    "rollout.redundant_groups=1.0",
    "trainer.micro_batch_order=arrival",
    "checkpoint.every=50",
    "evaluation.every=0",
    "evaluation.prompts=8",
    "warmup.steps=5",
)


def run(quick: bool, nonce: str) -> dict[str, Any]:
    """Measure. Needs the repository's ``examples`` folder. Raises RunError when a run fails."""
    begun = now()
    pairs, steps = (1, QUICK_STEPS) if quick else (PAIRS, STEPS)
    with tempfile.TemporaryDirectory(prefix="rl-coserve-stream-") as folder:
        rows = [one(streamed, pair, steps, Path(folder)) for pair in range(pairs) for streamed in _order(pair)]
    return result(rows, quick, {"started": begun, "nonce": nonce})


def _order(pair: int) -> tuple[bool, bool]:
    return (True, False) if pair % 2 else (False, True)


def one(streamed: bool, pair: int, steps: int, folder: Path) -> dict[str, Any]:
    """One run: what is kept of it. Raises RunError when it fails."""
    name = f"{'streamed' if streamed else 'whole'}-{pair}"
    own = [f"run.seed={pair}", f"run.steps={steps}", f"trainer.stream={str(streamed).lower()}"]
    load = os.getloadavg()[0]
    events = read_events(train(_CONFIG, folder, name, [*_RECIPE, *own]) / "events.jsonl")
    return {
        "streamed": streamed,
        "pair": pair,
        **times(events),
        "load_average": [round(load, 1), round(os.getloadavg()[0], 1)],
    }


def times(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Of each step but the first: ``seconds`` of it, ``after_batch`` of these; ``fed``: share of its trajectories streamed."""
    steps = [event for event in events if event["kind"] == "step"]
    batches = {
        event["step"]: event["end"] for event in events if event["kind"] == "stage" and event["stage"] == "get_batch"
    }
    return {
        "seconds": [round(now["t"] - before["t"], 4) for before, now in pairwise(steps)],
        "after_batch": [round(step["t"] - batches[step["step"]], 4) for step in steps[1:]],
        "fed": [round(step["metrics"].get("stream_fed", 0.0), 4) for step in steps[1:]],
        "tokens": [step["tokens"] for step in steps[1:]],
    }


def result(rows: list[dict[str, Any]], quick: bool, detail: dict[str, Any]) -> dict[str, Any]:
    """The figure from runs; a pair that lacks one is left out."""
    kinds = {streamed: {row["pair"]: row for row in rows if row["streamed"] == streamed} for streamed in (False, True)}
    pairs = sorted(kinds[False].keys() & kinds[True].keys())
    ratios = [median(kinds[False][pair]["seconds"]) / median(kinds[True][pair]["seconds"]) for pair in pairs]
    after = {
        name: round(median([found for pair in pairs for found in kinds[streamed][pair]["after_batch"]]), 4)
        for name, streamed in (("whole", False), ("streamed", True))
    }
    value = round(median(ratios), 4)
    return frame(
        NAME,
        "real",
        value=value,
        unit="seconds of a step unstreamed over streamed (medians of a run, median of the pairs)",
        reference="the same run, unstreamed",
        reference_value=round(median([median(kinds[False][pair]["seconds"]) for pair in pairs]), 4),
        bar=f">= {BAR:g}, in {PAIRS} pairs at least",
        holds=None if quick else len(pairs) >= PAIRS and value >= BAR,
        detail={
            "recipe": [str(_CONFIG), *_RECIPE],
            "ratios": [round(ratio, 4) for ratio in ratios],
            "after_batch": after,
            "fed": round(median([share for pair in pairs for share in kinds[True][pair]["fed"]]), 4),
            "runs": rows,
            "samples": sum(len(row["seconds"]) for row in rows),
            **({"shrunk": f"one pair, of {QUICK_STEPS} steps each"} if quick else {}),
            **detail,
        },
        quick=quick,
    )


def make_next(folder: Path) -> int:
    """Make the first run that is missing. 3: none is."""
    cells = Cells(folder, NAME)
    for pair in range(PAIRS):
        for streamed in _order(pair):
            key = f"{pair}-{'streamed' if streamed else 'whole'}"
            if not cells.has(key):
                row = one(streamed, pair, STEPS, folder / "runs")
                cells.keep(key, row)
                print(f"{key}: {median(row['seconds']):.3f} s a step", file=sys.stderr)
                return 0
    return 3


def main(arguments: list[str]) -> int:
    """See the module."""
    parser = argparse.ArgumentParser(prog="python -m scripts.bench.micro.stream_step", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--next", action="store_true")
    parser.add_argument("--result", action="store_true")
    options = parser.parse_args(arguments)
    code = make_next(options.folder) if options.next else 0
    if options.result:
        rows = Cells(options.folder, NAME).found()
        print(json.dumps(result(rows, False, {"in_parts": True}), indent=1, sort_keys=True))
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
