"""The report: one self-contained HTML file for a run, or for the comparison of several.

Guarantees: the file needs nothing else (no script, no font, no request); it is replaced as a whole or not at all; the same
folder gives the same bytes; every figure says whether it is real or simulated.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from html import escape
from pathlib import Path

from orchestrator.observe.report import feature_sections, run_sections
from orchestrator.observe.report.compare import comparison
from orchestrator.observe.report.page_parts import page
from orchestrator.observe.report.page_text import tag
from orchestrator.observe.report.run_log import RunLog, load_run

_NAVIGATION = (
    ("learning", "Learning"),
    ("waiting", "Waiting"),
    ("bottleneck", "Bottleneck"),
    ("staleness", "Staleness"),
    ("speed", "Speed"),
    ("health", "Trainer"),
    ("parallelism", "Parallelism"),
    ("environments", "Environments"),
    ("rounds", "Rounds"),
    ("borrowed", "Borrowed"),
    ("ledger", "Ledger"),
    ("incidents", "Incidents"),
    ("environment", "Machine"),
)


def write_report(run: str | Path | Sequence[str | Path]) -> Path:
    """Write ``report.html`` into a run's folder; for several runs ``compare-A-B.html`` beside the first one's. Returns the
    file. Raises ConfigError for a folder that is no run."""
    if isinstance(run, str | Path):
        log = load_run(run)
        return _write(log.folder / "report.html", render_report(log))
    logs = [load_run(folder) for folder in run]
    if len(logs) == 1:
        return _write(logs[0].folder / "report.html", render_report(logs[0]))
    names = [log.folder.name for log in logs]
    label = "-".join(names) if len(names) <= 3 else f"{names[0]}-and-{len(names) - 1}-others"
    return _write(logs[0].folder.parent / f"compare-{label}.html", comparison(logs))


def render_report(run: RunLog) -> str:
    """The report of one run as HTML."""
    parts = [
        run_sections.learning(run),
        run_sections.waiting(run),
        feature_sections.bottleneck(run),
        run_sections.staleness(run),
        run_sections.speed(run),
        run_sections.trainer_health(run),
        feature_sections.parallelism(run),
        feature_sections.environments(run),
        feature_sections.rounds(run),
        feature_sections.borrowed(run),
        run_sections.ledger(run, _stored(run)),
        run_sections.incidents(run),
        run_sections.environment(run),
    ]
    links = "".join(
        tag("li", tag("a", name, href=f"#{identity}"))
        for (identity, name), part in zip(_NAVIGATION, parts, strict=True)
        if part
    )
    head = run_sections.header(run) + tag("nav", tag("ul", links), aria_label="Sections")
    footer = tag(
        "footer", f"Written by rl-coserve from {tag('code', escape(run.folder.name))}. Point at a mark for its figures."
    )
    body = tag("main", head + run_sections.notices(run) + run_sections.cards(run) + "".join(parts) + footer)
    return page(f"{run.name} · rl-coserve", body)


def _stored(run: RunLog) -> dict[str, int] | None:
    folder = run.folder / "trajectories"
    if not folder.is_dir():
        return None
    from orchestrator.store import count_by_outcome  # pyarrow: not needed for a run without a store

    return count_by_outcome(folder)


def _write(file: Path, text: str) -> Path:
    partial = file.with_name(f".{file.name}.partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, file)
    return file
