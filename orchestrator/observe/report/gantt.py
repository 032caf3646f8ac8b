"""The charts of who waited for whom: a window of typical steps, shares of the whole run, and the time of each step.

Colour says who (rollout, trainer, weights); hatching says waiting, in the colour of what is waited for.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from orchestrator.observe.report.charts import Size
from orchestrator.observe.report.page_text import duration, percent, tag
from orchestrator.observe.report.run_log import RunLog, Step
from orchestrator.observe.report.svg import Axis, Margins, Plot, hatch, nice_axis, step_axis
from orchestrator.observe.report.timeline import LANES, STATES, Piece, Window, clip, per_step, shares

_LANE_NAMES = {"rollout": "Rollout", "trainer": "Trainer", "weights": "Weights"}
_COLUMNS = 100  # of the chart of step times; longer runs are averaged


def window(run: RunLog, pieces: dict[str, list[Piece]], place: Window, size: Size) -> str:
    """The lanes during a few steps, each step marked where it ends."""
    margin = 0.02 * (place.end - place.start)
    start, end = place.start - margin, place.end + margin
    axis = nice_axis(0, end - start, "seconds", lambda value: f"{value:g}", 4 if size.narrow else 10)
    axis = Axis(0.0, end - start, tuple(tick for tick in axis.ticks if tick[0] <= end - start), axis.label)
    plot = _lane_plot(
        size,
        axis,
        3,
        f"Steps {place.first} to {place.last}: who did what",
        "; ".join(f"{_LANE_NAMES[lane]}: {_spoken(clip(pieces[lane], start, end))}" for lane in LANES),
    )
    identity = f"hw{int(size.width)}"
    plot.add(hatch(identity, _waiting_colours()))
    for step in run.steps:
        if start < step.t <= end:
            at = plot.x(step.t - start)
            plot.add(tag("line", x1=at, x2=at, y1=plot.top - 8, y2=plot.bottom, class_="boundary"))
            plot.text(at - 5, plot.top - 10, f"step {step.number}" if not size.narrow else str(step.number), "note end")
    for row, lane in enumerate(LANES):
        top, height = _row(plot, row, 3)
        _lane_name(plot, lane, top + height / 2)
        for piece in clip(pieces[lane], start, end):
            left, right = plot.x(piece.start - start), plot.x(piece.end - start)
            _block(plot, piece.state, left, top, right - left, height, _about(piece), identity)
            label = STATES[piece.state][0]
            if right - left > 7.4 * len(label) and not STATES[piece.state][2]:
                plot.text((left + right) / 2, top + height / 2 + 4, label, f"inside middle {STATES[piece.state][1]}")
    return plot.render()


def overview(pieces: dict[str, list[Piece]], size: Size) -> str:
    """For rollout and trainer: what share of the time between first and last batch went where."""
    rows = [lane for lane in ("rollout", "trainer") if pieces[lane]]
    if not rows:
        return ""
    axis = Axis(0.0, 1.0, tuple((tick / 4, f"{25 * tick}") for tick in range(5)), "share of the time (%)")
    totals = {lane: shares(pieces[lane]) for lane in rows}
    spoken = "; ".join(f"{_LANE_NAMES[lane]}: {_spoken(pieces[lane])}" for lane in rows)
    plot = _lane_plot(size, axis, len(rows), "Where the time went", spoken, top=2)
    identity = f"ho{int(size.width)}"
    plot.add(hatch(identity, _waiting_colours()))
    for row, lane in enumerate(rows):
        top, height = _row(plot, row, len(rows))
        _lane_name(plot, lane, top + height / 2)
        whole = sum(totals[lane].values())
        begin = 0.0
        for state, seconds in totals[lane].items():
            share = seconds / whole
            left, width = plot.x(begin), plot.x(begin + share) - plot.x(begin)
            name, colour, waits = STATES[state]
            about = f"{_LANE_NAMES[lane]}, {name}: {percent(share)}, {duration(seconds)}"
            _block(plot, state, left, top, width, height, about, identity)
            label = percent(share, 0)
            if width > 9 * len(label):
                style = "inside-waiting" if waits else "inside"
                plot.text(left + width / 2, top + height / 2 + 4, label, f"{style} middle {colour}")
            begin += share
    return plot.render()


def step_times(run: RunLog, pieces: Sequence[Piece], size: Size) -> str:
    """Wall seconds of each step by what the trainer did or waited for; long runs in averaged columns."""
    parts = per_step(run.steps, list(pieces))
    if not parts:
        return ""
    columns = _averaged(parts, _COLUMNS)
    high = sorted(sum(totals.values()) for _, _, totals in columns)
    top_value = min(high[-1], 3 * high[len(high) // 2])  # one stall must not flatten all others
    y_axis = nice_axis(0.0, max(top_value, 1e-9), "seconds a step", ticks=4)
    plot = Plot(
        size.width,
        260,
        step_axis(run.done_steps, ticks=size.ticks),
        y_axis,
        "Wall time of each training step, by what the trainer did or waited for",
        f"median {duration(high[len(high) // 2])}, most {duration(high[-1])}",
    )
    identity = f"hs{int(size.width)}"
    plot.add(hatch(identity, _waiting_colours()))
    order = [state for state in STATES if any(state in totals for _, _, totals in columns)]
    for first, last, totals in columns:
        left, right = plot.x(first - 1), plot.x(last)
        gap = min(1.5, (right - left) * 0.15)
        words = ", ".join(f"{STATES[state][0]} {duration(totals[state])}" for state in order if state in totals)
        steps = f"step {first}" if first == last else f"steps {first} to {last}, mean"
        about = f"{steps}: {duration(sum(totals.values()))} ({words})"
        height = 0.0
        for state in order:
            if state not in totals:
                continue
            bottom, top = plot.y(height), plot.y(height + totals[state])
            if bottom - top > 0.2:
                _block(plot, state, left + gap / 2, top, right - left - gap, bottom - top, about, identity, flat=True)
            height += totals[state]
        if height > y_axis.high:
            plot.text((left + right) / 2, plot.top - 3, "↑", "note middle")
    return plot.render()


def legend(states: Sequence[str]) -> list[tuple[str, str, bool]]:
    """(words, colour class, hatched) of the states that a chart shows, in the order of :data:`STATES`."""
    return [STATES[state] for state in STATES if state in states]


def _averaged(parts: list[tuple[Step, dict[str, float]]], limit: int) -> list[tuple[int, int, dict[str, float]]]:
    """(first step, last step, mean seconds by state)."""
    columns = min(limit, len(parts))
    result = []
    for index in range(columns):
        group = parts[index * len(parts) // columns : (index + 1) * len(parts) // columns]
        totals: dict[str, float] = {}
        for _, seconds in group:
            for state, value in seconds.items():
                totals[state] = totals.get(state, 0.0) + value / len(group)
        result.append((group[0][0].number, group[-1][0].number, totals))
    return result


def _lane_plot(size: Size, axis: Axis, rows: int, title: str, about: str, top: float = 26) -> Plot:
    room = Margins(left=62, right=10, top=top, bottom=40)
    height = room.top + room.bottom + rows * 46
    return Plot(size.width, height, axis, Axis(0.0, 1.0, ()), title, about, margins=room, style="lanes")


def _row(plot: Plot, row: int, rows: int) -> tuple[float, float]:
    """(top, height) of a lane's blocks."""
    unit = (plot.bottom - plot.top) / rows
    return plot.top + row * unit + 7, unit - 14


def _lane_name(plot: Plot, lane: str, middle: float) -> None:
    plot.text(0, middle + 4, _LANE_NAMES[lane], "lane")


def _block(
    plot: Plot,
    state: str,
    left: float,
    top: float,
    width: float,
    height: float,
    about: str,
    identity: str,
    flat: bool = False,
) -> None:
    _, colour, waits = STATES[state]
    plot.add(
        tag(
            "rect",
            tag("title", escape(about)),
            x=left,
            y=top,
            width=max(width, 0.5),
            height=height,
            rx=0 if flat else min(3.0, width / 3),
            class_=f"piece {colour}" if not waits else "piece waits",
            style=f"fill:url(#{identity}-{colour})" if waits else None,
        )
    )


def _about(piece: Piece) -> str:
    words = f"{STATES[piece.state][0]}, {duration(piece.seconds)}"
    return f"{words}; waited for: {piece.note}" if piece.note else words


def _spoken(pieces: Sequence[Piece]) -> str:
    totals = shares(pieces)
    whole = sum(totals.values())
    return ", ".join(f"{STATES[state][0]} {percent(seconds / whole, 0)}" for state, seconds in totals.items() if whole)


def _waiting_colours() -> list[str]:
    return list(dict.fromkeys(colour for _, colour, waits in STATES.values() if waits))
