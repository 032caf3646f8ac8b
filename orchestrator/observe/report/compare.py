"""Several runs on one page: a table of their headline figures, and their success and reward over steps and over time."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape

from orchestrator.observe.event_records import Evaluation
from orchestrator.observe.report.charts import as_percent, smoothing
from orchestrator.observe.report.page_parts import LegendItem, badge, figure, notice, page, section, table
from orchestrator.observe.report.page_text import ALPHA, block, count, duration, interval, percent, significant, tag
from orchestrator.observe.report.plots import Drawing, Point, Size
from orchestrator.observe.report.run_log import RunLog

# A run keeps its colour and its dash through the page; beyond twelve they repeat.
_COLOURS = ("c1", "c2", "c3", "c4", "c5", "c6")
_DASHES = ("solid", "dashed", "dotted")
_Style = tuple[str, str]


def comparison(runs: Sequence[RunLog]) -> str:
    """The comparison as HTML."""
    names = _distinct_names(runs)
    styles = [_style(index) for index in range(len(runs))]
    legend: list[LegendItem] = [(name, style[0], False) for name, style in zip(names, styles, strict=True)]
    kinds = {run.kind for run in runs}
    kind = kinds.pop() if len(kinds) == 1 else "mixed"

    def over(
        which: Callable[[Sequence[RunLog], Sequence[_Style], Size, bool], str], by_time: bool
    ) -> Callable[[Size], str]:
        return lambda size: which(runs, styles, size, by_time)

    note = "Held-out prompts, greedy; the band is the 95 % Wilson interval."
    parts = [
        section("table", "Side by side", "", _table(runs, names, styles)),
        section(
            "learning",
            "Success on held-out prompts",
            "By training step, and by wall time: a faster run may need more steps.",
            figure("By training step", kind, over(_success, False), legend=legend, note=note),
            figure(
                "By wall time",
                kind,
                over(_success, True),
                legend=legend,
                note="Wall time includes startup and warm-up.",
            ),
        ),
        section(
            "reward",
            "Training reward",
            "",
            figure("By training step", kind, over(_reward, False), legend=legend),
            figure("By wall time", kind, over(_reward, True), legend=legend),
        ),
    ]
    title = f"{len(runs)} runs compared"
    head = tag("header", tag("p", "rl-coserve · comparison", class_="eyebrow") + tag("h1", title))
    return page(f"{title} · rl-coserve", tag("main", head + _cautions(runs) + "".join(parts)))


def _cautions(runs: Sequence[RunLog]) -> str:
    found = []
    if len({run.kind for run in runs}) > 1:
        found.append(notice("bad", "Real and simulated runs are mixed.", "Their times and rates do not compare."))
    if len({tuple(sorted(run.machine.items())) for run in runs}) > 1:
        found.append(notice("warn", "The machines differ.", "Times and rates do not compare; success by step does."))
    open_runs = [run.name for run in runs if run.status != "completed"]
    if open_runs:
        found.append(notice("warn", "Not every run completed:", escape(", ".join(open_runs)) + "."))
    broken = [run.name for run in runs if run.ledger.difference]
    if broken:
        found.append(notice("bad", "A ledger does not close:", escape(", ".join(broken)) + "."))
    return "".join(found)


def _table(runs: Sequence[RunLog], names: Sequence[str], styles: Sequence[_Style]) -> str:
    rows = []
    for run, name, style in zip(runs, names, styles, strict=True):
        lags, mean, rate = run.lags, run.lag_mean, run.tokens_per_s_mean
        closes = tag("span", "closes ✓", class_="ok")
        if run.ledger.difference:
            closes = tag("span", f"off by {abs(run.ledger.difference)} ✗", class_="broken")
        rows.append(
            [
                block("span", class_=f"chip {style[0]}", aria_hidden="true")
                + tag("strong", escape(name))
                + badge(run.kind),
                f"{escape(run.mode)}, {ALPHA} = {run.alpha}",
                count(run.done_steps),
                _rate(run.before),
                _rate(run.evaluation("end")),
                significant(rate) if rate is not None else "",
                duration(run.seconds),
                f"{significant(mean, 2)} {_under(f'at most {max(lags)}')}" if mean is not None else "",
                closes,
            ]
        )
    head = (
        "Run",
        "Mode",
        "Steps",
        "Success before",
        "Success after",
        "Tokens/s, mean",
        "Wall time",
        "Lag, mean",
        "Ledger",
    )
    return table(head, rows, (2, 5, 6), "Headline figures; intervals are 95 %", style="tight")


def _rate(evaluation: Evaluation | None) -> str:
    if evaluation is None:
        return ""
    return f"{percent(evaluation.value)} {_under(interval(evaluation.low, evaluation.high))}"


def _under(text: str) -> str:
    return tag("span", text, class_="under")


def _success(runs: Sequence[RunLog], styles: Sequence[_Style], size: Size, by_time: bool) -> str:
    curves = [
        [(item.t if by_time else item.step, item) for item in run.evaluations if item.phase != "before_warmup"]
        for run in runs
    ]
    if not any(curves):
        return ""
    title = f"Success of {len(runs)} runs by {'wall time' if by_time else 'training step'}"
    told = zip(runs, curves, strict=True)
    about = "; ".join(f"{run.name} ends at {percent(curve[-1][1].value)}" for run, curve in told if curve)
    plot = Drawing(size.width, 320, title, about)
    _x_scale(plot, max(x for curve in curves for x, _ in curve), size, by_time)
    plot.y_scale(0.0, 1.0, "success on held-out prompts (%)", form=as_percent)
    for run, curve, (colour, dash) in zip(runs, curves, styles, strict=True):
        plot.interval([(x, item.value, item.low, item.high) for x, item in curve], colour, linestyle=dash, bars=False)
        for x, item in curve:
            about = f"{run.name}, step {item.step}, {duration(item.t)}: {percent(item.value)} ({interval(item.low, item.high)})"
            plot.dot(x, item.value, colour, about)
    return plot.page_svg()


def _reward(runs: Sequence[RunLog], styles: Sequence[_Style], size: Size, by_time: bool) -> str:
    curves: list[list[Point]] = [
        [(step.t if by_time else float(step.number), step.reward_mean) for step in run.steps] for run in runs
    ]
    if not any(curves):
        return ""
    values = [y for curve in curves for _, y in curve if math.isfinite(y)]
    plot = Drawing(
        size.width, 280, f"Training reward of {len(runs)} runs by {'wall time' if by_time else 'training step'}"
    )
    _x_scale(plot, max(x for curve in curves for x, _ in curve), size, by_time)
    plot.y_scale(min(0.0, min(values, default=0.0)), max(values, default=1.0), "mean reward", 4)
    for curve, (colour, dash) in zip(curves, styles, strict=True):
        plot.smoothed(curve, colour, smoothing(len(curve)), linestyle=dash)
    return plot.page_svg()


def _x_scale(plot: Drawing, last: float, size: Size, by_time: bool) -> None:
    unit, name = 1.0, "training step"
    if by_time:
        unit, name = (1.0, "s") if last < 180 else (60.0, "min") if last < 3 * 3600 else (3600.0, "h")
        name = f"wall time ({name})"
    plot.x_scale(0.0, max(last, 1.0), name, size.ticks, unit=unit)


def _style(index: int) -> _Style:
    return _COLOURS[index % len(_COLOURS)], _DASHES[index // len(_COLOURS) % len(_DASHES)]


def _distinct_names(runs: Sequence[RunLog]) -> list[str]:
    """Names, with the folder where several runs have the same one."""
    names = [run.name for run in runs]
    return [
        name if names.count(name) == 1 else f"{run.folder.parent.name}/{run.folder.name}"
        for name, run in zip(names, runs, strict=True)
    ]
