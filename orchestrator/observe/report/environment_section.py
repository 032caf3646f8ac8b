"""The part of a run's page about environments that are kept in a pool, the tools they call, and the calls that score."""

from __future__ import annotations

from html import escape
from typing import Any

from orchestrator.observe.report.page_parts import section, table
from orchestrator.observe.report.page_text import count, duration, percent, plural, tag
from orchestrator.observe.report.run_log import PoolSnapshot, RunLog

_CAUSES = {
    "misbehaved": "misbehaved, hung or was cut off",
    "ping": "failed a health check",
    "recycle": "could not be renewed",
    "age": "too old",
    "episodes": "played its last episode",
    "idle": "not needed",
}


def environments(run: RunLog) -> str:
    """How large the pool was, what was replaced and why, and who waited. "" where none of it was recorded."""
    parts = [_pool(run), _tools(run), _rewards(run)]
    if not any(parts):
        return ""
    return section("environments", "Did the environments hold?", _lead(run.pool[-1]) if run.pool else "", *parts)


def _lead(last: PoolSnapshot) -> str:
    waited = duration(last.wait_seconds / last.episodes) if last.episodes else "0 s"
    replaced = sum(number for cause, number in last.replaced.items() if cause not in ("idle", "age", "episodes"))
    share = percent(replaced / last.episodes if last.episodes else 0.0)
    lead = f"{tag('strong', count(last.episodes))} episodes on {plural(last.started, 'environment')} ({escape(last.backend)}); "
    lead += f"{tag('strong', share)} ended with one that had to be replaced; "
    return lead + f"an episode waited {tag('strong', waited)} for its environment on average."


def _pool(run: RunLog) -> str:
    if not run.pool:
        return ""
    last = run.pool[-1]
    busiest, most = max(item.busy for item in run.pool), max(item.waiting for item in run.pool)
    rows = [
        ["Pool size", count(last.size)],
        ["In use at the end of a step, at most", count(busiest)],
        ["Waited for one at the end of a step, at most", count(most)],
        ["Starts that failed", count(last.start_failures)],
        ["Could not be ended, abandoned", count(last.abandoned)],
        *([f"Replaced: {escape(_CAUSES.get(cause, cause))}", count(number)] for cause, number in last.replaced.items()),
        ["Versions", escape(", ".join(last.versions))],
    ]
    reasons = sorted({item.waiting_for for item in run.pool if item.waiting_for})
    if reasons:
        rows.append(["Waited for", escape("; ".join(reasons))])
    return table(("Environments", ""), rows, (1,), f"The pool of environments ({run.kind})")


def _tools(run: RunLog) -> str:
    if not run.tools:
        return ""
    rows = [[escape(name), *_calls(calls)] for name, calls in run.tools.items()]
    return table(
        ("Tool", *_CALLS), rows, tuple(range(1, len(_CALLS) + 1)), f"Tools, as called from all processes ({run.kind})"
    )


def _rewards(run: RunLog) -> str:
    if not run.rewards:
        return ""
    rows = [["Rewards", *_calls(run.rewards)]]
    calls = table(("Scoring", *_CALLS), rows, tuple(range(1, len(_CALLS) + 1)), f"Calls that score ({run.kind})")
    return calls + _timeouts(run, run.rewards.get("timeouts") or {})


def _timeouts(run: RunLog, counted: dict[str, Any]) -> str:
    if not counted:
        return ""
    rows = [
        ["Ran", count(int(counted.get("cases", 0)))],
        ["Under a limit of their own, below the fixed one", count(int(counted.get("adaptive", 0)))],
        ["Cut off at it", count(int(counted.get("cut_early", 0)))],
        ["Cut off at the fixed limit", count(int(counted.get("cut_at_most", 0)))],
        ["All took", duration(float(counted.get("seconds", 0.0)))],
        ["Saved, at most", duration(float(counted.get("saved", 0.0)))],
    ]
    return table(("Test cases under adaptive timeouts", ""), rows, (1,), f"RollPacker 4.3 ({run.kind})")


_CALLS = ("Calls", "Failed", "Retries", "Refused: burst", "Cold starts", "Waited for them", "All calls took")


def _calls(counted: dict[str, Any]) -> list[str]:
    numbers = [
        count(int(counted.get(name, 0))) for name in ("calls", "failed", "retries", "refused_burst", "cold_starts")
    ]
    return [*numbers, *(duration(float(counted.get(name, 0.0))) for name in ("cold_seconds", "seconds"))]
