"""The summary of a run: a plain JSON object with a fixed set of keys, the same figures that the report shows.

* ``success_start``, ``success_end``, ``success_before_warmup``: ``{value, low, high, prompts}`` on held-out prompts (95 %
  Wilson interval), or null; ``success_end`` is null unless the run was evaluated after its last step.
* ``tokens_per_s``: trained tokens that the policy generated, over the wall time of the training steps: evaluations,
  weight updates and waiting included, startup and warm-up not.
* ``staleness``: ``lag`` at ``get_batch`` by number of versions, with mean and max.
* ``status``: completed, interrupted or failed as the run said it; unfinished when it said nothing (killed, or running).
* ``ledger``: totals as the run ended with; of an unfinished run, recounted from its journal.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from orchestrator.report.runlog import Evaluation, RunLog, load_run


def summarize(run_folder: str | Path) -> dict[str, Any]:
    """The summary of a run folder. Raises ConfigError when it is none."""
    return summary_of(load_run(run_folder))


def summary_of(run: RunLog) -> dict[str, Any]:
    """The summary of a run that was read already."""
    return {
        "name": run.name,
        "kind": run.kind,
        "mode": run.mode,
        "alpha": run.alpha,
        "steps": run.done_steps,
        "status": run.status,
        "success_before_warmup": _success(run.evaluation("before_warmup")),
        "success_start": _success(run.before),
        "success_end": _success(run.evaluation("end")),
        "tokens_per_s": tokens_per_s(run),
        "seconds": round(run.seconds, 3),
        "staleness": _staleness(run),
        "ledger": {
            "started": run.ledger.started,
            **dict(run.ledger.ended),
            "in_flight": run.ledger.in_flight,
            "rolled_back": run.ledger.rolled_back,
            "failed_by_cause": dict(sorted(run.ledger.failed_by_cause.items())),
        },
        "machine": run.machine,
        "versions": run.versions,
    }


def tokens_per_s(run: RunLog) -> float | None:
    """Generated and trained tokens over the wall time of the training steps; None before the first."""
    seconds = sum(step.period for step in run.steps)
    return round(sum(step.tokens for step in run.steps) / seconds, 3) if seconds > 0 else None


def lag_counts(run: RunLog) -> dict[int, int]:
    """Trajectories by lag at ``get_batch``, over all steps."""
    totals: dict[int, int] = {}
    for step in run.steps:
        for lag, count in step.lag.items():
            totals[lag] = totals.get(lag, 0) + count
    return dict(sorted(totals.items()))


def _staleness(run: RunLog) -> dict[str, Any]:
    counts = lag_counts(run)
    total = sum(counts.values())
    mean = sum(lag * count for lag, count in counts.items()) / total if total else None
    return {
        "lag": {str(lag): count for lag, count in counts.items()},
        "mean": round(mean, 6) if mean is not None else None,
        "max": max(counts, default=None),
    }


def _success(evaluation: Evaluation | None) -> dict[str, Any] | None:
    if evaluation is None:
        return None
    return {
        "value": evaluation.value,
        "low": evaluation.low,
        "high": evaluation.high,
        "prompts": evaluation.prompts,
    }
