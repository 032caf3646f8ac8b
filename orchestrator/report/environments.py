"""The part of a run's page about environments that are kept in a pool, and the tools they call."""

from __future__ import annotations

from html import escape

from orchestrator.report.parts import section, table
from orchestrator.report.runlog import PoolSnapshot, RunLog
from orchestrator.report.text import count, duration, percent, plural, tag

_CAUSES = {
    "misbehaved": "misbehaved, hung or was cut off",
    "ping": "failed a health check",
    "recycle": "could not be renewed",
    "age": "too old",
    "episodes": "played its last episode",
    "idle": "not needed",
}


def environments(run: RunLog) -> str:
    """How large the pool was, what was replaced and why, and who waited. "" without a pool and without tools."""
    parts = [_pool(run), _tools(run)]
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
    rows = [
        [
            escape(name),
            count(int(calls.get("calls", 0))),
            count(int(calls.get("failed", 0))),
            count(int(calls.get("retries", 0))),
            count(int(calls.get("refused_burst", 0))),
            count(int(calls.get("cold_starts", 0))),
            duration(float(calls.get("cold_seconds", 0.0))),
        ]
        for name, calls in run.tools.items()
    ]
    head = ("Tool", "Calls", "Failed", "Retries", "Refused: burst", "Cold starts", "Waited for them")
    return table(head, rows, (1, 2, 3, 4, 5, 6), f"Tools, as called from the orchestrator's process ({run.kind})")
