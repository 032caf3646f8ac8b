"""The live view in a terminal: ``rl-coserve top``. The same record as the page, in the same order.

Guarantees: pure; text from the run is never taken for markup, nor for what steers a terminal; as wide as it is told, and no
taller than a screen can be.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from orchestrator.observe.event_records import LedgerCounts
from orchestrator.observe.report.page_text import clock, printable, sparkline
from orchestrator.observe.report.timeline import STATES
from orchestrator.observe.run_figures import lag_words

_CURVE = 48  # points of a sparkline
_LANE = 60  # characters of a timeline
_ROWS = 8  # of a table
_DETAIL = 120  # characters of what happened
_COLOURS = {  # of a page (page.css) -> of a terminal
    "c0": "bright_black", "c1": "blue", "c2": "dark_orange", "c3": "green", "c4": "magenta", "c5": "cyan", "c6": "yellow",
    "c7": "bright_magenta",
}  # fmt: skip


def screen(now: Mapping[str, Any]) -> RenderableType:
    """One picture. ``now``: :meth:`orchestrator.observe.view.run_state.RunState.shown`, with ``silent`` where it is known."""
    now = _printable(now)
    parts: list[RenderableType] = [_head(now), _said(now), Text("")]
    parts += [_numbers(now), Text(""), _timeline(now["timeline"])]
    parts += [Text(""), _reasons(now), Text(""), _workers(now["workers"], now["workers_known"])]
    if now["workers_up"] < now["workers_known"]:
        parts.append(Text(f"{now['workers_up']:,} of {now['workers_known']:,} workers are up", "yellow"))
    if beside := [row for row in now["workers"] if "budget" in row]:
        parts += [Text(""), _beside(beside)]
    if now["incidents"]:
        parts += [Text(""), _incidents(now["incidents"])]
    return Group(*parts)


def _printable(value: Any) -> Any:
    """The same, with its texts and names as :func:`printable`."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, Mapping):
        return {_printable(name): _printable(item) for name, item in value.items()}
    return [_printable(item) for item in value] if isinstance(value, list | tuple) else value


def _head(now: Mapping[str, Any]) -> Text:
    run = now["run"]
    status = "running" if run["status"] == "unfinished" else run["status"]
    status = "reading the log" if "reading" in now else status
    style = {"running": "green", "completed": "green", "failed": "bold red"}.get(status, "yellow")
    words = Text.assemble((run["name"], "bold"), "  ", (status, style))
    words.append(f"  {run['mode']}, alpha {run['alpha']}, {run['kind']}\n", "dim")
    return words.append(f"step {now['step']:,} of {run['steps']:,}, version {now['version']:,}, {clock(now['t'])}")


def _said(now: Mapping[str, Any]) -> Text:
    run = now["run"]
    if "reading" in now:
        return Text(f"{now['reading']} % of it is read; the figures are of what has been read", "yellow")
    if run["status"] != "unfinished":
        return Text(run["reason"].splitlines()[0] if run["reason"] else "", "dim")
    if now.get("silent"):
        return Text(f"no sign of life for {now['silent']} s: it may be stopped, or gone", "bold red")
    waits = now["waiting_for"] or ", ".join(now["open"])
    return Text.assemble(("waiting for: ", "dim"), waits) if waits else Text("")


def _timeline(data: Mapping[str, Any]) -> Table:
    rows = Table.grid(padding=(0, 2))
    rows.add_column(style="dim")
    rows.add_column()
    begin, span = data["begin"], max(1e-9, data["end"] - data["begin"])
    for lane, pieces in data["lanes"].items():
        line = Text()
        for place in range(_LANE):
            at = begin + (place + 0.5) / _LANE * span
            state = next((state for state, start, end, _ in pieces if start <= at < end), "")
            _, colour, waits = STATES.get(state, ("", "", False))
            line.append(("░" if waits else "█") if colour else " ", _COLOURS.get(colour, "default"))
        rows.add_row(lane, line)
    rows.add_row("", Text(f"the last {span:.1f} s; light: it waits", "dim"))
    return rows


def _numbers(now: Mapping[str, Any]) -> Table:
    rows = Table.grid(padding=(0, 2))
    rows.add_column(style="dim")
    rows.add_column(overflow="fold")
    for curve in now["curves"]:
        values = [point[1] for point in curve["points"] if point[1] is not None]
        if values:
            rows.add_row(curve["name"], Text(f"{values[-1]:.3f}  {sparkline(values[-_CURVE:])}"))
    if now["learning"]:
        told = (f"{what.lower()} {'-' if value is None else f'{value:.3g}'}" for what, _, value in now["learning"])
        rows.add_row("learning", Text(", ".join(told)))
    rate = now["tokens_per_s"]
    rows.add_row("speed", "-" if rate is None else f"{rate:,.0f} tokens/s")
    rows.add_row("staleness", lag_words(now["lag"]) or "-")
    ledger = LedgerCounts.of(now["ledger"])
    rows.add_row("ledger", Text(ledger.sum_words, "bold red" if ledger.difference else ""))
    rows.add_row(
        "rollout", f"{now['in_flight']:,} in flight, {now['buffered']:,} buffered, {now['queue']:,} turns queued"
    )
    return rows


def _reasons(now: Mapping[str, Any]) -> Table:
    rows = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    rows.add_column("trajectories wait for", overflow="fold")
    rows.add_column("", justify="right")
    rows.add_column("oldest", overflow="fold")
    oldest = {row["waits"]: row for row in reversed(now["trajectories"])}
    for reason, count in list(now["reasons"].items())[:_ROWS]:
        row = oldest.get(reason)
        which = f"{row['id']}, turn {row['turns']}, {row['age']:.1f} s {row['worker']}" if row else ""
        rows.add_row(Text(reason), f"{count:,}", Text(which, "dim"))
    if not now["reasons"]:
        rows.add_row(Text("none in flight", "dim"), "", "")
    return rows


def _workers(found: Sequence[Mapping[str, Any]], known: int) -> Table:
    rows = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    rows.add_column("worker")
    rows.add_column("state")
    for name in ("KV used", "requests", "running", "waiting", "version", "tokens/s"):
        rows.add_column(name, justify="right")
    for row in found[:_ROWS]:
        capacity = row.get("kv_capacity")
        share = f"{100 * row['kv_used'] / capacity:.0f} %" if capacity and "kv_used" in row else "-"
        state = row.get("state", "-")
        cells = [_count(row.get(name)) for name in ("requests", "running", "waiting", "version", "tokens_per_s")]
        if row.keys() >= {"running_mean", "kv_mean"}:  # of its steps: between two, when it answers, often nothing runs
            share, cells[1] = f"{100 * row['kv_mean']:.0f} %", f"{row['running_mean']:.1f}"
        rows.add_row(Text(str(row["name"])), Text(state, "" if state in ("up", "-") else "yellow"), share, *cells)
    if known > _ROWS:
        rows.add_row(Text(f"and {known - _ROWS} more", "dim"))
    return rows


def _beside(found: Sequence[Mapping[str, Any]]) -> Table:
    """Workers on devices of serving: what they have, and what serving can spare."""
    rows = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    rows.add_column("serving", no_wrap=True)
    for name in ("pages", "TTFT slack", "TPOT slack", "arrival", "late first", "late next"):
        rows.add_column(name, justify="right")
    for row in found[:_ROWS]:
        slacks = [
            Text("-") if (left := row.get(name)) is None else Text(f"{left:.3f} s", "bold red" if left < 0 else "")
            for name in ("ttft_slack", "tpot_slack", "arriving")
        ]
        shares = [
            f"{row[name]:,} / {row[of]:,}" if name in row and of in row else "-"
            for name, of in (("pages", "budget"), ("late_first", "firsts"), ("late_next", "nexts"))
        ]
        rows.add_row(Text(str(row["name"])), shares[0], *slacks, *shares[1:])
    return rows


def _incidents(found: Sequence[Mapping[str, Any]]) -> Table:
    rows = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    shown = found[:_ROWS]
    for name, least in (("when", 5), ("kind", max(len(row["kind"]) for row in shown)), ("what", 4)):
        rows.add_column(name, min_width=least, overflow="fold")
    rows.add_column("detail", overflow="fold", ratio=1)
    for row in shown:
        colour = {"recovered": "green", "borrowed": "green", "returned": "yellow", "scaled": "cyan"}.get(
            row["kind"], "red"
        )
        detail = str(row["detail"]).splitlines()[0] if row["detail"] else ""
        detail = detail if len(detail) <= _DETAIL else f"{detail[:_DETAIL]}…"
        rows.add_row(clock(float(row["t"])), Text(row["kind"], colour), Text(row["what"]), Text(detail))
    return rows


def _count(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"
