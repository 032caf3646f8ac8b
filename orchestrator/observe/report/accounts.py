"""The parts of a run's page that account for things: the ledger with its recounts, incidents, machine, config."""

from __future__ import annotations

import json
from collections.abc import Mapping
from html import escape
from typing import Any

from orchestrator.config import Config
from orchestrator.ledger import END_STATES
from orchestrator.observe.report.charts import Size
from orchestrator.observe.report.page_parts import LegendItem, facts, figure, section, table
from orchestrator.observe.report.page_text import block, count, duration, percent, plural, tag
from orchestrator.observe.report.run_log import LedgerCounts, RunLog
from orchestrator.observe.report.svg import Axis, Margins, Plot

# state -> (words, colour class)
_ENDS = {
    "trained": ("trained", "c1"),
    "evicted_stale": ("evicted: too stale", "c2"),
    "aborted_redundant": ("aborted: redundant", "c0"),
    "deferred": ("deferred: long round", "c4"),
    "filtered": ("filtered", "c6"),
    "failed": ("failed", "bad"),
    "in_flight": ("still in flight", "c5"),
}
_INCIDENTS = 200  # rows; the log has them all


def ledger(run: RunLog, stored: Mapping[str, int] | None) -> str:
    """Every trajectory, by how it ended. ``stored``: rows in Parquet by outcome, None without a store."""
    counts = run.ledger
    if not counts.started:
        return ""
    bar = figure(
        "How they ended",
        run.kind,
        lambda size: _bar(counts, size),
        legend=[_legend_item(state) for state, number in _parts(counts).items() if number],
        note=_sum_check(counts),
    )
    lead = (
        f"{tag('strong', count(counts.started))} trajectories started; {tag('strong', percent(_share(counts, 'trained')))} of "
        "them were trained on."
    )
    return section(
        "ledger", "Where did every trajectory go?", lead, bar, _ledger_table(run, stored), _failures(counts, run.kind)
    )


def incidents(run: RunLog) -> str:
    """Alarms, faults and recoveries in order of time."""
    if not run.incidents:
        return section("incidents", "What went wrong?", "No alarm, no fault.", " ")
    shown = run.incidents[-_INCIDENTS:]
    rows = [
        [
            duration(incident.t),
            tag("span", escape(incident.kind), class_="broken" if incident.kind == "alarm" else None),
            escape(incident.what),
            escape(incident.detail),
        ]
        for incident in shown
    ]
    totals = {kind: sum(item.kind == kind for item in run.incidents) for kind in ("alarm", "fault", "recovered")}
    lead = (
        f"{plural(totals['alarm'], 'alarm')}, {plural(totals['fault'], 'fault')}, "
        f"{plural(totals['recovered'], 'recovery', 'recoveries')}."
    )
    if len(shown) < len(run.incidents):
        lead += f" The last {len(shown)} are listed; {tag('code', 'events.jsonl')} has all."
    caption = f"Alarms, faults and recoveries ({run.kind})"
    return section("incidents", "What went wrong?", lead, table(("At", "Kind", "What", "Detail"), rows, (0,), caption))


def environment(run: RunLog) -> str:
    """What the run ran on, and with which configuration."""
    sheets = []
    if run.machine:
        sheets.append(tag("h3", "Machine") + facts([(name or "machine", value) for name, value in run.machine.items()]))
    if run.versions:
        sheets.append(tag("h3", "Versions") + facts(sorted(run.versions.items())))
    made = tag("div", "".join(sheets), class_="sheet") if sheets else ""
    return section("environment", "What did it run on?", "", made, _config(run))


def _parts(counts: LedgerCounts) -> dict[str, int]:
    return {**{state: counts.ended.get(state, 0) for state in END_STATES}, "in_flight": counts.in_flight}


def _share(counts: LedgerCounts, state: str) -> float:
    return _parts(counts)[state] / counts.started if counts.started else 0.0


def _legend_item(state: str) -> LegendItem:
    words, colour = _ENDS[state]
    return words, colour, False


def _bar(counts: LedgerCounts, size: Size) -> str:
    parts = _parts(counts)
    whole = max(counts.started, sum(parts.values()))
    axis = Axis(0.0, 1.0, tuple((tick / 4, f"{25 * tick}") for tick in range(5)), "share of trajectories (%)")
    about = ", ".join(f"{_ENDS[state][0]} {number:,}" for state, number in parts.items() if number)
    plot = Plot(
        size.width, 96, axis, Axis(0.0, 1.0, ()), "Trajectories by how they ended", about, Margins(1, 10, 4, 40)
    )
    begin = 0.0
    for state, number in parts.items():
        if not number:
            continue
        words, colour = _ENDS[state]
        left, right = plot.x(begin / whole), plot.x((begin + number) / whole)
        plot.rect(left, plot.top, right - left - 1, plot.bottom - plot.top - 8, f"bar {colour}", f"{words}: {number:,}")
        if right - left > 52:
            plot.text((left + right) / 2, plot.top + 27, percent(number / whole, 0), "inside middle")
        begin += number
    return plot.render()


def _sum_check(counts: LedgerCounts) -> str:
    terms = " + ".join(f"{number:,}" for number in _parts(counts).values())
    if counts.difference == 0:
        return f"{counts.started:,} = {terms}: {tag('span', 'the sum closes', class_='ok')}."
    total = counts.started - counts.difference
    words = f"the sum does not close: it is {total:,}, off by {abs(counts.difference):,}"
    return f"{counts.started:,} ≠ {terms}: {tag('span', words, class_='broken')}."


def _ledger_table(run: RunLog, stored: Mapping[str, int] | None) -> str:
    counts, journal = run.ledger, run.journal
    rows_by_state: dict[str, int] = {}
    for outcome, number in (stored or {}).items():
        state = outcome.partition(":")[0]
        rows_by_state[state] = rows_by_state.get(state, 0) + number
    head = ["How it ended", "Trajectories", "Share"]
    head += ["Journal, recounted"] if journal else []
    head += ["Rows in Parquet"] if stored is not None else []
    rows = []
    recounted = _parts(journal) if journal else {}
    for state, number in _parts(counts).items():
        words, colour = _ENDS[state]
        row = [
            block("span", class_=f"chip {colour}", aria_hidden="true") + escape(words),
            count(number),
            percent(_share(counts, state)) if number else "",
        ]
        row += [_checked(recounted[state], number)] if journal else []
        row += [_stored_rows(run, state, rows_by_state.get(state, 0))] if stored is not None else []
        rows.append(row)
    total = [tag("strong", "Started"), tag("strong", count(counts.started)), ""]
    total += [_checked(journal.started, counts.started)] if journal else []
    total += [tag("strong", count(sum(rows_by_state.values())))] if stored is not None else []
    caption = f"The ledger ({run.kind})"
    made = table(head, [*rows, total], tuple(range(1, len(head))), caption)
    if counts.rolled_back:
        made += tag(
            "p",
            f"{plural(counts.rolled_back, 'trajectory was', 'trajectories were')} trained after the checkpoint that a resume "
            "went back to: rolled back, then trained again or ended, and counted above once, as they ended.",
            class_="figure-note",
        )
    return made


def _stored_rows(run: RunLog, state: str, number: int) -> str:
    """Rows of one end. Only trained ones must agree, and only when the run said that it ended: what a killed run had not
    flushed yet is in the journal alone."""
    if state == "in_flight":
        return ""
    checked = state == "trained" and run.status != "unfinished"
    return _checked(number, run.ledger.ended.get(state, 0)) if checked else count(number)


def _checked(number: int, expected: int) -> str:
    if number == expected:
        return f"{count(number)} {tag('span', '✓', class_='ok', title='agrees')}"
    return tag("span", f"{count(number)} ✗", class_="broken", title="differs")


def _failures(counts: LedgerCounts, kind: str) -> str:
    """Why trajectories failed, were filtered, or were not needed any more."""
    failed = {f"failed: {cause}": number for cause, number in counts.failed_by_cause.items()}
    causes = sorted({**failed, **counts.ended_by_cause}.items(), key=lambda item: (-item[1], item[0]))
    most = max((number for _, number in causes), default=1)
    rows = [
        [
            tag("code", escape(cause)),
            block(
                "span", block("i", style=f"width:{100 * number / most:.0f}%"), class_="meter bad", aria_hidden="true"
            ),
            count(number),
            percent(number / counts.started),
        ]
        for cause, number in causes
    ]
    return table(("Cause", "", "Trajectories", "Of all started"), rows, (2, 3), f"Ends by cause ({kind})")


def _config(run: RunLog) -> str:
    """The resolved config, folded; what differs from the defaults is marked."""
    if not run.config:
        return ""
    defaults: dict[str, Any] = Config().model_dump(mode="json")
    lines = []
    for section_name, values in sorted(run.config.items()):
        lines.append(escape(f"[{section_name}]"))
        lines += _config_lines(section_name, values, defaults.get(section_name), "")
        lines.append("")
    inside = tag("summary", "The resolved configuration") + tag(
        "p", f"{tag('span', 'Blue', class_='changed')}: not the default.", class_="figure-note"
    )
    return tag("div", tag("details", inside + tag("pre", "\n".join(lines).rstrip())), class_="sheet")


def _config_lines(section_name: str, values: Any, defaults: Any, prefix: str) -> list[str]:
    if not isinstance(values, dict):
        return [escape(f"{section_name} = {json.dumps(values)}")]
    known = defaults if isinstance(defaults, dict) else {}
    lines: list[str] = []
    for key, value in sorted(values.items()):
        if isinstance(value, dict):
            lines += _config_lines(section_name, value, known.get(key), f"{prefix}{key}.")
            continue
        line = escape(f"{prefix}{key} = {json.dumps(value)}")
        lines.append(line if key in known and known[key] == value else tag("span", line, class_="changed"))
    return lines
