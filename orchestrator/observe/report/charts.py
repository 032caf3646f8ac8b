"""The charts of a run. Each takes a run and a size, and returns SVG; "" without data.

Of who waited for whom: colour says who (rollout, trainer, weights); hatching says waiting, in the colour of what is waited for.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from orchestrator.observe.curves import HEALTH, QUANTITIES, quantity_of
from orchestrator.observe.event_records import ENDS, Evaluation, LedgerCounts, Step
from orchestrator.observe.report.page_text import count, duration, interval, percent, significant
from orchestrator.observe.report.plots import Drawing, LegendItem, Margins, Point, Size, spread
from orchestrator.observe.report.run_log import RunLog
from orchestrator.observe.report.timeline import LANES, STATES, Piece, Window, clip, per_step, shares

SLACKS = (  # field, colour, words
    ("ttft_slack", "c1", "prompts that wait (TTFT)"),
    ("tpot_slack", "c2", "sequences that decode (TPOT)"),
    ("arriving", "c3", "a prompt that arrives now"),
)
SERVERS = 12  # that are drawn; all are in the tables
_PARTS = 80  # of the time of serving, each with a point
_COLUMNS = 100  # of the chart of step times; longer runs are averaged


@dataclass(frozen=True)
class Series:
    """A quantity over steps for a line chart. ``form`` writes one value, unit included."""

    title: str
    label: str
    points: Sequence[Point]
    form: Callable[[float], str] = significant
    colour: str = "c1"
    floor: float | None = 0.0  # the axis reaches down to this
    limit: float | None = None  # a value with a meaning, drawn as a line
    limit_label: str = ""
    axis: Callable[[float], str] | None = None  # writes a tick, where the number alone will not do


def as_percent(value: float) -> str:
    """A share as the tick of an axis in percent."""
    return f"{100 * value:g}"


def smoothing(steps: int) -> int:
    """The window of a smoothed line, odd, growing with the run."""
    return max(1, steps // 20) * 2 + 1 if steps >= 8 else 1


# -- learning, staleness, speed, health ----------------------------------------------------------------------------------


def success(run: RunLog, size: Size) -> str:
    """Held-out success with its interval over steps, and the level before RL."""
    shown = [item for item in run.evaluations if item.phase != "before_warmup"]
    if not shown:
        return ""
    about = "; ".join(f"step {item.step}: {percent(item.value)} ({interval(item.low, item.high)})" for item in shown)
    quantity = QUANTITIES["success"]
    plot = Drawing(size.width, 320 if size.narrow else 300, f"{quantity.title} over training steps", about)
    plot.x_scale(0, max(run.done_steps, shown[-1].step, 1), "training step", size.ticks)
    plot.y_scale(0.0, 1.0, quantity.label, form=as_percent)
    start, untrained = run.before, run.evaluation("before_warmup")
    if untrained is not None:
        plot.level(untrained.value, f"untrained {percent(untrained.value)}", "c0", below=True)
    if start is not None:
        name = "after warm-up, before RL" if run.warmup else "before RL"
        plot.level(start.value, f"{name}: {percent(start.value)}", "c2")
    plot.interval([(item.step, item.value, item.low, item.high) for item in shown], "c1")
    for item in shown:
        place = f"{'before RL' if item.step == 0 else f'after step {item.step}'}: {percent(item.value)}"
        about = f"{place} ({item.successes} of {item.episodes}; 95 % interval {interval(item.low, item.high)})"
        plot.dot(item.step, item.value, "c2" if item is start else "c1", about, 9)
    return plot.page_svg()


def line_chart(series: Series, last_step: int, size: Size, height: float, window: int = 1) -> str:
    """One quantity over steps; with a window, raw values are faint and their moving mean is strong."""
    finite = [y for _, y in series.points if math.isfinite(y)]
    if not finite:
        return ""
    low, high = min(finite), max(finite)
    if series.floor is not None:
        low = min(low, series.floor)
    if series.limit is not None and series.limit < 4 * high:
        high = max(high, series.limit)
    large, form = height > 180, series.form
    about = f"first {form(finite[0])}, last {form(finite[-1])}, least {form(min(finite))}, most {form(max(finite))}"
    margins = Margins() if large else Margins(bottom=24, top=14)
    plot = Drawing(size.width, height, f"{series.title} over training steps", about, margins)
    plot.x_scale(0, max(last_step, 1), "training step" if large else "", size.ticks)
    plot.y_scale(low, high, series.label, 4 if large else 3, series.axis)
    plot.smoothed(series.points, series.colour, window)
    if series.limit is not None and series.limit <= plot.axes.get_ylim()[1]:
        plot.level(series.limit, series.limit_label, "bad")
    places = [series.points[index] for index in spread(len(series.points))]
    plot.columns([(x, f"step {x:.0f}: {form(y)}") for x, y in places])
    return plot.page_svg()


def reward(run: RunLog, size: Size) -> str:
    """Mean reward of each trained batch, raw and smoothed."""
    points = [(float(step.number), step.reward_mean) for step in run.steps]
    quantity = QUANTITIES["reward"]
    series = Series(quantity.title, quantity.label, points)
    return line_chart(series, run.done_steps, size, 260, smoothing(len(points)))


def mixed_versions(run: RunLog, size: Size) -> str:
    """The share of trained trajectories whose tokens come from more than one version."""
    points = [(float(step.number), step.versions_mixed / step.trained) for step in run.steps if step.trained]
    title, label = "Share of trajectories with tokens of more than one version", "spanning a weight update (%)"
    series = Series(title, label, points, percent, "c3", axis=as_percent)
    return line_chart(series, run.done_steps, size, 270, smoothing(len(points)))


def rate(run: RunLog, amounts: Callable[[Step], int], unit: str, colour: str, size: Size) -> str:
    """What was trained per second of wall time."""
    points = [(float(step.number), amounts(step) / step.period) for step in run.steps if step.period > 0]
    label = f"{unit}/s"
    series = Series(f"Trained {unit} per second", label, points, lambda v: f"{significant(v)} {label}", colour)
    return line_chart(series, run.done_steps, size, 250, smoothing(len(points)))


def lag_histogram(run: RunLog, size: Size) -> str:
    """How many versions the trajectories lagged when get_batch took them, beside the lag at which they were trained."""
    taken = run.lags
    trained: Counter[int] = Counter()
    for step in run.steps:
        trained.update(step.lag_trained)
    totals = (sum(taken.values()), sum(trained.values()))
    if not totals[0]:
        return ""
    lags = list(range(max(run.alpha, max(taken, default=0), max(trained, default=0)) + 1))
    about = ", ".join(f"lag {lag}: {percent(taken.get(lag, 0) / totals[0])}" for lag in lags)
    plot = Drawing(size.width, 270, "Staleness of the trained trajectories", about)
    plot.x_scale(-0.6, len(lags) - 0.4, "lag (versions)", min(10, len(lags)))
    plot.axes.set_xticks(lags[:: max(1, len(lags) // 10)])
    most = [
        counts.get(lag, 0) / max(1, total)
        for counts, total in ((taken, totals[0]), (trained, totals[1]))
        for lag in lags
    ]
    plot.y_scale(0.0, min(1.0, 1.08 * max(most)), "share of trajectories (%)", form=as_percent)
    wide = min(0.36, 46.0 / plot.unit)
    for counts, total, colour, word, left in (
        (taken, totals[0], "c1", "when taken by get_batch", -wide - 1 / plot.unit),
        (trained, totals[1], "c2", "when trained", 1 / plot.unit),
    ):
        for lag in lags:
            if number := counts.get(lag, 0):
                share = number / total
                broken = lag > run.alpha and colour == "c1"
                tip = f"lag {lag} {word}: {count(number)} trajectories, {percent(share)}"
                plot.block(lag + left, 0.0, wide, share, "bad" if broken else colour, tip)
                if len(lags) <= 5:
                    value = percent(share, 0 if share >= 0.1 else 1)
                    plot.words(lag + left + wide / 2, share, value, "ink", ha="center", va="bottom")
    plot.mark(run.alpha + 0.5, f"bound when taken: lag ≤ {run.alpha}", "bad")
    return plot.page_svg()


def health(run: RunLog, name: str, size: Size) -> str:
    """One scalar of the trainer over steps; the mean log-prob gap with its alarm."""
    quantity = quantity_of(name)
    limit = run.gap_alarm if name == "logprob_gap_mean" else None
    words = f"alarm {significant(limit)}" if limit is not None else ""
    colour = "c2" if name.startswith("logprob_gap") else "c1"
    series = Series(quantity.title, "", metric(run.steps, name), significant, colour, quantity.floor, limit, words)
    return line_chart(series, run.done_steps, size, 140)


def metric(steps: Sequence[Step], name: str) -> list[Point]:
    """One of the trainer's scalars over steps; not a number where a step measured it on no token."""
    measured_on = {"logprob_gap_mean": "logprob_gap_tokens", "logprob_gap_max": "logprob_gap_tokens"}.get(name, "")
    return [
        (float(step.number), step.metrics[name] if step.metrics.get(measured_on, 1.0) > 0 else math.nan)
        for step in steps
        if name in step.metrics
    ]


def metric_names(steps: Sequence[Step]) -> tuple[list[str], list[str]]:
    """The trainer's scalars: those to look at, in their order, and the others by name. What was skipped is to be looked at
    as soon as anything was."""
    seen = {name for step in steps for name in step.metrics}
    shown = [name for name in HEALTH if name in seen]
    shown += sorted(n for n in seen if n.startswith("skipped") and any(step.metrics.get(n, 0.0) for step in steps))
    return shown, sorted(seen.difference(shown))


def dumbbell(before: Evaluation, after: Evaluation) -> str:
    """Two success rates with their intervals on one line from 0 to 100 %."""
    plot = Drawing(600, 72, "Success before and after", margins=Margins(10, 14, 4, 24))
    plot.x_scale(0.0, 1.0, ticks=4, form=lambda value: percent(1, 0) if value == 1 else as_percent(value))
    for colour, height, item in (("c2", 0.72, before), ("c1", 0.28, after)):
        plot.line([(item.low, height), (item.high, height)], colour, linewidth=4, alpha=0.35)
        tip = f"{percent(item.value)}, 95 % interval {interval(item.low, item.high)}"
        plot.dot(item.value, height, colour, tip, 10)
    return plot.page_svg()


def ends(counts: LedgerCounts, size: Size) -> str:
    """One bar of what became of all trajectories."""
    parts = [(*ENDS[state], number) for state, number in counts.parts.items() if number]
    whole = max(counts.started, sum(number for *_, number in parts))
    about = ", ".join(f"{words} {number:,}" for words, _, number in parts)
    plot = Drawing(size.width, 96, "Trajectories by how they ended", about, Margins(1, 10, 4, 40))
    plot.x_scale(0.0, 1.0, "share of trajectories (%)", 4, as_percent)
    begin = 0.0
    for words, colour, number in parts:
        share = number / whole
        plot.block(begin, 0.15, share - min(share / 2, 1 / plot.unit), 0.85, colour, f"{words}: {number:,}")
        if share * plot.unit > 52:
            plot.words(begin + share / 2, 0.57, percent(share, 0), "on", ha="center", va="center")
        begin += share
    return plot.page_svg()


# -- who waited for whom -------------------------------------------------------------------------------------------------


def typical_steps(run: RunLog, pieces: dict[str, list[Piece]], place: Window, size: Size) -> str:
    """The lanes during a few steps, each step marked where it ends."""
    margin = 0.02 * (place.end - place.start)
    start, end = place.start - margin, place.end + margin
    about = "; ".join(f"{lane.capitalize()}: {_spoken(clip(pieces[lane], start, end))}" for lane in LANES)
    plot = _lanes(size, LANES, f"Steps {place.first} to {place.last}: who did what", about, 26)
    plot.x_scale(0.0, end - start, "seconds", 4 if size.narrow else 10)
    for step in run.steps:
        if start < step.t <= end:
            plot.mark(step.t - start, str(step.number) if size.narrow else f"step {step.number}", "faint", before=True)
    for row, lane in enumerate(LANES):
        for piece in clip(pieces[lane], start, end):
            words, colour, waits = STATES[piece.state]
            tip = f"{words}, {duration(piece.seconds)}" + (f"; waited for: {piece.note}" if piece.note else "")
            plot.block(piece.start - start, row + 0.15, piece.seconds, 0.7, colour, tip, waits)
            if piece.seconds * plot.unit > 7.4 * len(words) and not waits:
                middle = (piece.start + piece.end) / 2 - start
                plot.words(middle, row + 0.5, words, "on", ha="center", va="center")
    return plot.page_svg()


def time_shares(pieces: dict[str, list[Piece]], size: Size) -> str:
    """For rollout and trainer: what share of the time between first and last batch went where."""
    rows = [lane for lane in ("rollout", "trainer") if pieces[lane]]
    if not rows:
        return ""
    about = "; ".join(f"{lane.capitalize()}: {_spoken(pieces[lane])}" for lane in rows)
    plot = _lanes(size, rows, "Where the time went", about, 2)
    plot.x_scale(0.0, 1.0, "share of the time (%)", 4, as_percent)
    for row, lane in enumerate(rows):
        totals = shares(pieces[lane])
        whole, begin = sum(totals.values()), 0.0
        for state, seconds in totals.items():
            share, (name, colour, waits) = seconds / whole, STATES[state]
            tip = f"{lane.capitalize()}, {name}: {percent(share)}, {duration(seconds)}"
            plot.block(begin, row + 0.15, share, 0.7, colour, tip, waits)
            label = percent(share, 0)
            if share * plot.unit > 9 * len(label):
                plot.words(begin + share / 2, row + 0.5, label, "ink" if waits else "on", ha="center", va="center")
            begin += share
    return plot.page_svg()


def step_times(run: RunLog, pieces: Sequence[Piece], size: Size) -> str:
    """Wall seconds of each step by what the trainer did or waited for; long runs in averaged columns."""
    parts = per_step(run.steps, list(pieces))
    if not parts:
        return ""
    columns = _averaged(parts, _COLUMNS)
    high = sorted(sum(totals.values()) for _, _, totals in columns)
    middle = high[len(high) // 2]
    title = "Wall time of each training step, by what the trainer did or waited for"
    plot = Drawing(size.width, 260, title, f"median {duration(middle)}, most {duration(high[-1])}")
    plot.x_scale(0, max(run.done_steps, 1), "training step", size.ticks)
    plot.y_scale(
        0.0, max(min(high[-1], 3 * middle), 1e-9), "seconds a step", 4
    )  # one stall must not flatten all others
    top = plot.axes.get_ylim()[1]
    order = [state for state in STATES if any(state in totals for _, _, totals in columns)]
    begun = dict.fromkeys(range(len(columns)), 0.0)
    for state in order:
        _, colour, waits = STATES[state]
        bars = [(at, first, last, totals[state]) for at, (first, last, totals) in enumerate(columns) if state in totals]
        gaps = [min(1.5 / plot.unit, 0.15 * (last - first + 1)) for _, first, last, _ in bars]
        spans = [
            (first - 1 + gap / 2, last - first + 1 - gap) for (_, first, last, _), gap in zip(bars, gaps, strict=True)
        ]
        plot.stack(spans, [begun[at] for at, *_ in bars], [seconds for *_, seconds in bars], colour, waits)
        for at, _, _, seconds in bars:
            begun[at] += seconds
    for at, (first, last, totals) in enumerate(columns):
        told = ", ".join(f"{STATES[state][0]} {duration(totals[state])}" for state in order if state in totals)
        steps = f"step {first}" if first == last else f"steps {first} to {last}, mean"
        plot.tip(first - 1, last, 0.0, begun[at], f"{steps}: {duration(begun[at])} ({told})")
        if begun[at] > top:
            plot.words((first - 1 + last) / 2, top, "↑", "soft", ha="center", va="bottom")
    return plot.page_svg()


def state_legend(states: Collection[str]) -> list[LegendItem]:
    """(words, colour, hatched) of the states that a chart shows, in the order of :data:`STATES`."""
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


def _lanes(size: Size, names: Sequence[str], title: str, about: str, top: float) -> Drawing:
    """One row a lane, the first above."""
    margins = Margins(left=62, right=10, top=top, bottom=40)
    plot = Drawing(size.width, top + 40 + 46 * len(names), title, about, margins)
    plot.rows([name.capitalize() for name in names])
    return plot


def _spoken(pieces: Sequence[Piece]) -> str:
    totals = shares(pieces)
    whole = sum(totals.values())
    return ", ".join(f"{STATES[state][0]} {percent(seconds / whole, 0)}" for state, seconds in totals.items() if whole)


# -- devices that a run shared with serving ------------------------------------------------------------------------------


def servers(run: RunLog, size: Size) -> str:
    """A bar for each time that a server was the run's; "" without any."""
    rows = run.held()
    names = list(dict.fromkeys(row[0] for row in rows))[:SERVERS]
    if not names:
        return ""
    about = "; ".join(
        f"{name}: from {duration(begun)} ({why}) to {duration(end)} ({back or 'the end'})"
        for name, begun, end, why, back in rows[: 3 * SERVERS]
    )
    plot = Drawing(size.width, 48 + 44 * len(names), "Borrowed servers over time", about, Margins(left=10, top=8))
    last = _last_seconds(run)
    time_scale(plot, last, size)
    plot.rows([""] * len(names))
    for at, name in enumerate(names):
        plot.words(0.0, at + 0.28, f" {name}", "soft")
        for _, begun, end, why, back in (row for row in rows if row[0] == name):
            tip = f"{name}: taken at {duration(begun)} ({why}), " + (
                f"given back after {duration(end - begun)} ({back})" if back else "not given back"
            )
            wide = max(2.0 / plot.unit, min(end, last) - begun)
            plot.block(begun, at + 0.4, wide, 0.42, "c1", tip)
            if back and wide * plot.unit > 7 * len(back):
                plot.words(begun + wide - 5 / plot.unit, at + 0.61, back, "on", ha="right", va="center")
    return plot.page_svg()


def slack(run: RunLog, size: Size) -> str:
    """The least slack over all servers, of each of ``_PARTS`` parts of the run; below 0 serving was late. "" without any."""
    lines: dict[str, list[Point]] = {}
    for name, _, _ in SLACKS:
        lines[name] = _least([(row["until"], row[name]) for row in run.serving if row[name] is not None])
    values = [value for points in lines.values() for _, value in points]
    if not values:
        return ""
    about = "; ".join(
        f"{words}: least {significant(min(value for _, value in lines[name]))} s"
        for name, _, words in SLACKS
        if lines[name]
    )
    plot = Drawing(size.width, 240, "Slack of serving over time", about)
    time_scale(plot, _last_seconds(run), size)
    plot.y_scale(min(0.0, *values), max(0.0, *values), "least slack of serving (s)", 4)
    if min(values) < 0:
        plot.level(0.0, "late below this line", "bad", below=True)
    for name, colour, words in SLACKS:
        plot.line(lines[name], colour, marker="o", markersize=4)
        for at, value in lines[name]:
            plot.tip_at(at, value, f"{words}: {significant(value)} s until {duration(at)}")
    return plot.page_svg()


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


def time_scale(plot: Drawing, last: float, size: Size, form: str = "{}") -> None:
    """Seconds from 0 on, written in the unit that suits them; ``form``: its name in the axis' name."""
    unit, word = (3600.0, "hours") if last > 7200 else (60.0, "minutes") if last > 180 else (1.0, "seconds")
    plot.x_scale(0.0, last, form.format(word), size.ticks, unit=unit)


def _last_seconds(run: RunLog) -> float:
    return float(max([run.seconds, 1.0, *(row["until"] for row in run.serving), *(event.t for event in run.borrowing)]))
