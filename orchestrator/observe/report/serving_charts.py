"""The charts of devices that a run shared with serving: which servers it had when, and how near serving was to its SLOs."""

from __future__ import annotations

from orchestrator.observe.report.charts import Size
from orchestrator.observe.report.page_text import duration, significant
from orchestrator.observe.report.run_log import RunLog
from orchestrator.observe.report.svg import Axis, Margins, Plot, Point, nice_axis

SLACKS = (  # field, colour, words
    ("ttft_slack", "c1", "prompts that wait (TTFT)"),
    ("tpot_slack", "c2", "sequences that decode (TPOT)"),
    ("arriving", "c3", "a prompt that arrives now"),
)
SERVERS = 12  # that are drawn; all are in the tables
_ROW = 26.0  # units
_PARTS = 80  # of the time, each with a point


def held(run: RunLog) -> list[tuple[str, float, float, str, str]]:
    """(server, from, to, why it was taken, why it was given back, "" while it is the run's) in the order of the log."""
    found: list[tuple[str, float, float, str, str]] = []
    since: dict[str, tuple[float, str]] = {}
    for event in run.borrowing:
        if event["kind"] == "borrowed":
            since[event["worker"]] = event["t"], event["reason"]
        elif event["kind"] == "returned" and event["worker"] in since:
            begun, why = since.pop(event["worker"])
            found.append((event["worker"], begun, event["t"], why, event["reason"]))
    found += [(name, begun, max(begun, run.seconds), why, "") for name, (begun, why) in since.items()]
    return sorted(found, key=lambda row: row[1])


def servers(run: RunLog, size: Size) -> str:
    """A bar for each time that a server was the run's; "" without any."""
    rows = held(run)
    names = list(dict.fromkeys(row[0] for row in rows))[:SERVERS]
    if not names:
        return ""
    spoken = "; ".join(
        f"{name}: from {duration(begun)} ({why}) to {duration(end)} ({back or 'the end'})"
        for name, begun, end, why, back in rows[: 3 * SERVERS]
    )
    margins = Margins(left=10, top=8)
    height = margins.top + _ROW * 1.7 * len(names) + margins.bottom
    axis = _time_axis(run, size)
    plot = Plot(size.width, height, axis, Axis(0.0, 1.0, ()), "Borrowed servers over time", spoken, margins)
    for at, name in enumerate(names):
        top = plot.top + at * _ROW * 1.7
        plot.text(plot.left + 2, top + 13, name, "note")
        for _, begun, end, why, back in (row for row in rows if row[0] == name):
            left, right = plot.x(begun), plot.x(min(end, axis.high))
            about = f"{name}: taken at {duration(begun)} ({why}), " + (
                f"given back after {duration(end - begun)} ({back})" if back else "not given back"
            )
            plot.rect(left, top + 18, max(2.0, right - left), _ROW * 0.7, "piece c1", about)
            if back and right - left > 7 * len(back):
                plot.text(right - 5, top + 31, back, "inside end c1")
    return plot.render()


def slack(run: RunLog, size: Size) -> str:
    """The least slack over all servers, of each of ``_PARTS`` parts of the run; below 0 serving was late. "" without any."""
    lines: dict[str, list[Point]] = {}
    for name, _, _ in SLACKS:
        lines[name] = _least([(row["until"], row[name]) for row in run.serving if row[name] is not None])
    values = [value for points in lines.values() for _, value in points]
    if not values:
        return ""
    y_axis = nice_axis(min(0.0, *values), max(0.0, *values), "least slack of serving (s)", ticks=4)
    spoken = "; ".join(
        f"{words}: least {significant(min(value for _, value in lines[name]))} s"
        for name, _, words in SLACKS
        if lines[name]
    )
    plot = Plot(size.width, 240, _time_axis(run, size), y_axis, "Slack of serving over time", spoken)
    if y_axis.low < 0:
        plot.level(0.0, "late below this line", "bad", below=True)
    for name, colour, words in SLACKS:
        plot.line(lines[name], f"medium {colour}")
        for at, value in lines[name]:
            plot.dot(at, value, colour, 2.5, f"{words}: {significant(value)} s until {duration(at)}")
    return plot.render()


def _least(points: list[Point]) -> list[Point]:
    """The least of each part of the time from the first to the last, where it was."""
    if not points:
        return []
    first, last = min(points)[0], max(points)[0]
    wide = max(last - first, 1e-9) / _PARTS
    found: dict[int, Point] = {}
    for at, value in points:
        part = min(_PARTS - 1, int((at - first) / wide))
        if part not in found or value < found[part][1]:
            found[part] = (at, value)
    return sorted(found.values())


def _time_axis(run: RunLog, size: Size) -> Axis:
    last = max([run.seconds, 1.0, *(row["until"] for row in run.serving), *(row["t"] for row in run.borrowing)])
    unit, word = (3600.0, "hours") if last > 7200 else (60.0, "minutes") if last > 180 else (1.0, "seconds")
    axis = nice_axis(0.0, last / unit, word, ticks=size.ticks)
    return Axis(0.0, last, tuple((at * unit, text) for at, text in axis.ticks if at * unit <= last), word)
