"""Success of the long demo run on held-out maps, by real RL, three seeds.

Runs ``rl-coserve train examples/frozenlake_long.toml`` once a seed, from nothing, and reports the lowest final success.
``--quick`` runs one seed for as long as 45 seconds allow: it shows that the measurement works, not that the bar is met.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from orchestrator.observe.report.summary import summarize
from scripts.bench.probes.training_run import train
from scripts.bench.result import frame, now

NAME = "learns"
_BAR = 0.80
_SEEDS = (0, 1, 2)
_CONFIG = Path("examples/frozenlake_long.toml")
_SHORT = ["run.steps=3", "evaluation.prompts=100", "evaluation.every=0", "warmup.steps=50"]


def run(quick: bool, nonce: str) -> dict[str, Any]:
    """Measure. Needs the repository's ``examples`` folder. Raises RunError when a run fails."""
    begun = now()
    seeds = _SEEDS[:1] if quick else _SEEDS
    short = _SHORT if quick else []
    folder = Path("runs") / f"learns-{begun.replace(':', '')[:17]}"  # kept: each run has its report
    summaries = [_train(seed, short, folder) for seed in seeds]
    ended = now()
    return result(summaries, quick, {"seeds": list(seeds), "started": begun, "ended": ended, "nonce": nonce})


def result(summaries: list[dict[str, Any]], quick: bool, detail: dict[str, Any]) -> dict[str, Any]:
    """The figure from the summaries of finished runs, one a seed."""
    finals = [float(summary["success_end"]) for summary in summaries]
    return frame(
        NAME,
        "real",
        value=min(finals),
        unit="success rate on held-out maps, worst seed",
        reference="success before RL, best seed",
        reference_value=max(float(summary["success_start"]) for summary in summaries),
        bar=f">= {_BAR:.2f}",
        holds=None if quick else min(finals) >= _BAR,
        detail={
            "success_end": finals,
            "intervals": [summary["success_intervals"]["success_end"] for summary in summaries],
            "curves": [summary["success_curve"] for summary in summaries],
            "steps": [summary["steps"] for summary in summaries],
            "seconds": [summary["seconds"] for summary in summaries],
            "samples": sum(int(summary["success_intervals"]["success_end"]["prompts"]) for summary in summaries),
            **({"shrunk": ["one seed", *_SHORT]} if quick else {}),
            **detail,
        },
        quick=quick,
    )


def _train(seed: int, overrides: list[str], folder: Path) -> dict[str, Any]:
    return summarize(train(_CONFIG, folder, f"seed{seed}", [f"run.seed={seed}", *overrides]))
