"""The part of a run's page about servers that it borrowed of serving GPUs."""

from __future__ import annotations

from html import escape

from orchestrator.report.parts import section, table
from orchestrator.report.runlog import RunLog
from orchestrator.report.summary import borrowed_of
from orchestrator.report.text import count, duration, plural, tag


def borrowed(run: RunLog) -> str:
    """How long each server was the run's, why it was given back, and what it handed back. "" without any."""
    found = borrowed_of(run)
    if found is None:
        return ""
    requests = sum(row["handed_back"] for row in found.values())
    kept = sum(row["tokens_kept"] for row in found.values())
    lead = (
        f"{tag('strong', plural(len(found), 'server'))} of serving GPUs; {tag('strong', plural(requests, 'request'))} "
    )
    lead += f"handed back by them, {count(kept)} tokens kept."
    rows = [
        [
            escape(name),
            count(row["borrowed"]),
            duration(row["seconds"]),
            escape(", ".join(f"{why} ({times})" for why, times in sorted(row["reasons"].items())) or "-"),
            count(row["handed_back"]),
            count(row["tokens_kept"]),
        ]
        for name, row in found.items()
    ]
    head = ("Server", "Borrowed", "For", "Given back because", "Requests handed back", "Tokens kept")
    return section(
        "borrowed", "What was borrowed?", lead, table(head, rows, (1, 2, 4, 5), f"Borrowed servers ({run.kind})")
    )
