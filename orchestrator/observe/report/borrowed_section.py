"""The part of a run's page about devices that it shared with serving engines, and servers that it borrowed of them."""

from __future__ import annotations

from html import escape
from typing import Any

from orchestrator.observe.report import serving_charts
from orchestrator.observe.report.page_parts import figure, section, table
from orchestrator.observe.report.page_text import count, duration, percent, plural, significant, tag
from orchestrator.observe.report.run_log import RunLog
from orchestrator.observe.report.summary import borrowed_of, serving_of


def borrowed(run: RunLog) -> str:
    """Which servers the run had when and why, what they handed back, and how near their serving engines were to their SLOs, with
    what rollouts had to do with it. "" without any."""
    found, beside = borrowed_of(run), serving_of(run)
    if found is None and beside is None:
        return ""
    lead = ""
    if found is not None:
        requests = sum(row["handed_back"] for row in found.values())
        kept = sum(row["tokens_kept"] for row in found.values())
        lead = f"{tag('strong', plural(len(found), 'server'))} of serving GPUs; "
        lead += f"{tag('strong', plural(requests, 'request'))} handed back by them, {count(kept)} tokens kept. "
    if beside is not None:
        tokens, late, blamed = (sum(row[name] for row in beside.values()) for name in ("tokens", "late", "blamed"))
        lead += f"Serving made {plural(tokens, 'token')} meanwhile: {tag('strong', f'{count(late)} late')}, "
        lead += f"{count(late - blamed)} of these without rollouts too, {count(blamed)} because of them."
    return section(
        "borrowed",
        "What was borrowed?",
        lead,
        figure("Servers over time", run.kind, lambda size: serving_charts.servers(run, size)),
        figure(
            "How near serving was to its SLOs",
            run.kind,
            lambda size: serving_charts.slack(run, size),
            legend=[(words, colour, False) for _, colour, words in serving_charts.SLACKS],
            note="The least of all servers, of each part of the run; below 0 serving was late, with rollouts or without.",
        ),
        _taken(found or {}, run),
        _beside(beside or {}, run),
    )


def _taken(found: dict[str, Any], run: RunLog) -> str:
    taken: dict[str, dict[str, int]] = {}
    for name, _, _, why, _ in serving_charts.held(run):
        taken.setdefault(name, {})[why] = taken.get(name, {}).get(why, 0) + 1
    rows = [
        [
            escape(name),
            count(row["borrowed"]),
            duration(row["seconds"]),
            _reasons(taken.get(name, {})),
            _reasons(row["reasons"]),
            count(row["handed_back"]),
            count(row["tokens_kept"]),
        ]
        for name, row in found.items()
    ]
    head = ("Server", "Borrowed", "For", "Taken because", "Given back because", "Requests handed back", "Tokens kept")
    return table(head, rows, (1, 2, 5, 6), f"Borrowed servers ({run.kind})")


def _beside(found: dict[str, Any], run: RunLog) -> str:
    rows = [
        [
            escape(name),
            duration(row["seconds"]),
            *(("-", "-") if row["serving_most"] is None else (percent(row["serving"]), percent(row["serving_most"]))),
            *("-" if row[slack] is None else f"{significant(row[slack])} s" for slack, _, _ in serving_charts.SLACKS),
            count(row["tokens"]),
            count(row["late_without"]),
            count(row["blamed"]),
        ]
        for name, row in found.items()
    ]
    head = (
        "Server",
        "Seen for",
        "Memory",
        "most",
        "Slack: TTFT",
        "TPOT",
        "arriving",
        "Tokens",
        "Late anyway",
        "by rollouts",
    )
    return table(head, rows, (1, 2, 3, 4, 5, 6, 7, 8, 9), f"Serving beside the run ({run.kind})")


def _reasons(found: dict[str, int]) -> str:
    return escape(", ".join(f"{why} ({times})" for why, times in sorted(found.items())) or "-")
