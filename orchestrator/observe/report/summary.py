"""The summary of a run: a plain JSON object with a fixed set of keys, the same figures that the report shows.

* ``success_start``, ``success_end``, ``success_before_warmup``: success rates on held-out prompts, or null; ``success_end``
  is null unless the run was evaluated after its last step. ``success_intervals`` has ``{low, high, prompts}`` of each (95 %
  Wilson interval), ``success_curve`` every evaluation as ``[steps done, success]``, ``evaluations`` all that is
  known of each.
* ``tokens_per_s``: the mean over the whole run: trained tokens that the policy generated, over the wall time of the training
  steps: evaluations, weight updates and waiting included, startup and warm-up not. (What a run's views call tokens/s while it
  goes on is the same over its last steps.)
* ``streamed``: share of the trained trajectories whose gradient was taken before their training step began; null when
  nothing was to be streamed.
* ``staleness``: ``lag`` at ``get_batch`` by number of versions, with mean and max.
* ``rounds``: what short and long rounds took, put off and threw away; null without them.
* ``borrowed``: by server, how often and how long it was borrowed, why it was given back, and what it handed back; null without.
* ``serving``: by server, how serving was beside the run: its share of the memory, its least slack in seconds, its tokens, how
  many were late, and how many of these because of rollouts; null without.
* ``analysis``: environment-bound or engine-bound, with the numbers
  (:mod:`orchestrator.observe.report.bottleneck_analysis`); null where the log has none.
* ``status``: completed, interrupted or failed as the run said it; unfinished when it said nothing (killed, or running).
* ``ledger``: totals as the run ended with; of an unfinished run, recounted from its journal.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from orchestrator.observe.report.bottleneck_analysis import analyse_bottleneck
from orchestrator.observe.report.run_log import RunLog, load_run
from orchestrator.observe.run_figures import number


def summarize(run_folder: str | Path) -> dict[str, Any]:
    """The summary of a run folder. Raises ConfigError when it is none."""
    return summary_of(load_run(run_folder))


def summary_of(run: RunLog) -> dict[str, Any]:
    """The summary of a run that was read already."""
    evaluations = {
        "success_before_warmup": run.evaluation("before_warmup"),
        "success_start": run.before,
        "success_end": run.evaluation("end"),
    }
    return {
        "name": run.name,
        "kind": run.kind,
        "mode": run.mode,
        "alpha": run.alpha,
        "steps": run.done_steps,
        "status": run.status,
        **{name: found.value if found else None for name, found in evaluations.items()},
        "success_intervals": {
            name: {"low": found.low, "high": found.high, "prompts": found.prompts}
            for name, found in evaluations.items()
            if found
        },
        "success_curve": [[found.step, found.value] for found in run.evaluations],
        "evaluations": [asdict(found) for found in run.evaluations],
        "tokens_per_s": run.tokens_per_s_mean,
        "streamed": _streamed(run),
        "seconds": round(run.seconds, 3),
        "staleness": _staleness(run),
        "rounds": rounds_of(run),
        "borrowed": borrowed_of(run),
        "serving": serving_of(run),
        "analysis": asdict(found) if (found := analyse_bottleneck(run)) else None,
        "ledger": run.ledger.as_dict(),
        "machine": run.machine,
        "versions": run.versions,
    }


def borrowed_of(run: RunLog) -> dict[str, Any] | None:
    """By server, what the run had of it; None when it borrowed none. Seconds run to the log's end where one is still borrowed."""
    if not run.borrowing:
        return None
    empty = {"borrowed": 0, "seconds": 0.0, "handed_back": 0, "tokens_kept": 0}
    found: dict[str, Any] = {
        name: {**empty, "reasons": {}} for name in sorted({event.worker for event in run.borrowing})
    }
    for held in run.held():
        row = found[held.server]
        row["borrowed"] += 1
        row["seconds"] = round(row["seconds"] + held.end - held.begun, 3)
        if held.returned:
            row["reasons"][held.returned] = row["reasons"].get(held.returned, 0) + 1
    for event in run.borrowing:
        if event.kind == "handed_back":
            found[event.worker]["handed_back"] += event.requests
            found[event.worker]["tokens_kept"] += event.tokens
    return found


def serving_of(run: RunLog) -> dict[str, Any] | None:
    """By server, how its serving engine was; None when the run shared no device. ``late_without``: tokens that would have been
    late without rollouts too."""
    found: dict[str, dict[str, Any]] = {}
    for event in run.serving:
        row = found.setdefault(event["worker"], dict.fromkeys(("seconds", "samples", "tokens", "late", "blamed"), 0))
        for name in ("seconds", "samples", "tokens", "late", "blamed"):
            row[name] += event[name]
        row["_share"] = row.get("_share", 0.0) + (event["serving"] or 0.0) * event["samples"]
        for name, choose in (("serving_most", max), ("ttft_slack", min), ("tpot_slack", min), ("arriving", min)):
            known = [value for value in (row.get(name), event[name]) if value is not None]
            row[name] = choose(known) if known else None
    for row in found.values():
        row["serving"] = round(row.pop("_share") / row["samples"], 6) if row["samples"] else None
        row["late_without"] = row["late"] - row["blamed"]
        row["seconds"] = round(row["seconds"], 3)
    return dict(sorted(found.items())) or None


def rounds_of(run: RunLog) -> dict[str, Any] | None:
    """Totals over a run's rounds; None when it had none."""
    if not run.rounds:
        return None
    last = run.rounds[-1]
    names = ("launched", "deferred", "thrown_away", "seconds")
    kinds = {
        kind: {"rounds": len(found), **{name: round(sum(event[name] for event in found), 6) for name in names}}
        for kind in ("short", "long")
        if (found := [event for event in run.rounds if event["round"] == kind])
    }
    totals = {
        name: sum(event[name] for event in run.rounds) for name in ("deferred", "thrown_away", "put_back", "lost")
    }
    return {
        "kinds": kinds,
        **totals,
        "diverted": sum(event.get("diverted", 0) for event in run.rounds),  # not in logs of before
        "queue": last["queue"],
        "discarded": last["discarded_ever"],
        "given_up": last["given_up"],
        "search": last["search"],
    }


def _streamed(run: RunLog) -> float | None:
    steps = [step for step in run.steps if "stream_fed" in step.metrics]
    trained = sum(step.trained for step in steps)
    return round(sum(step.metrics["stream_fed"] * step.trained for step in steps) / trained, 6) if trained else None


def _staleness(run: RunLog) -> dict[str, Any]:
    counts = run.lags
    return {
        "lag": {str(lag): count for lag, count in counts.items()},
        "mean": number(run.lag_mean),
        "max": max(counts, default=None),
    }
