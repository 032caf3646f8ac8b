"""Several runs on one page: a table of their headline figures, and their success and reward over steps and over time."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from markupsafe import Markup

from orchestrator.observe.curves import QUANTITIES
from orchestrator.observe.report.charts import as_percent, smoothing, time_scale
from orchestrator.observe.report.page_templates import fill
from orchestrator.observe.report.page_text import duration, interval, percent
from orchestrator.observe.report.plots import Chart, Drawing, Point, Size, chart
from orchestrator.observe.report.run_log import RunLog

# A run keeps its colour and its dash through the page; beyond twelve they repeat.
_COLOURS = ("c1", "c2", "c3", "c4", "c5", "c6")
_DASHES = ("solid", "dashed", "dotted")
_Style = tuple[str, str]


def comparison(runs: Sequence[RunLog]) -> Markup:
    """The comparison as HTML."""
    styles = [(_COLOURS[n % len(_COLOURS)], _DASHES[n // len(_COLOURS) % len(_DASHES)]) for n in range(len(runs))]
    legend = [(name, style[0], False) for name, style in zip(_distinct_names(runs), styles, strict=True)]
    kinds = {run.kind for run in runs}

    def over(draw: Callable[[Sequence[RunLog], Sequence[_Style], Size, bool], str], by_time: bool) -> Chart | None:
        return chart(lambda size: draw(runs, styles, size, by_time), legend=legend)

    return fill(
        "comparison.html",
        runs=runs,
        legend=legend,
        kind=kinds.pop() if len(kinds) == 1 else "mixed",
        machines_differ=len({tuple(sorted(run.machine.items())) for run in runs}) > 1,
        success_by_step=over(_success, False),
        success_by_time=over(_success, True),
        reward_by_step=over(_reward, False),
        reward_by_time=over(_reward, True),
    )


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
    plot.y_scale(0.0, 1.0, QUANTITIES["success"].label, form=as_percent)
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
        size.width,
        280,
        f"{QUANTITIES['reward'].title} of {len(runs)} runs by {'wall time' if by_time else 'training step'}",
    )
    _x_scale(plot, max(x for curve in curves for x, _ in curve), size, by_time)
    plot.y_scale(min(0.0, min(values, default=0.0)), max(values, default=1.0), QUANTITIES["reward"].label, 4)
    for curve, (colour, dash) in zip(curves, styles, strict=True):
        plot.smoothed(curve, colour, smoothing(len(curve)), linestyle=dash)
    return plot.page_svg()


def _x_scale(plot: Drawing, last: float, size: Size, by_time: bool) -> None:
    if by_time:
        time_scale(plot, max(last, 1.0), size, "wall time ({})")
    else:
        plot.x_scale(0.0, max(last, 1.0), "training step", size.ticks)


def _distinct_names(runs: Sequence[RunLog]) -> list[str]:
    """Names, with the folder where several runs have the same one."""
    names = [run.name for run in runs]
    return [
        name if names.count(name) == 1 else f"{run.folder.parent.name}/{run.folder.name}"
        for name, run in zip(names, runs, strict=True)
    ]
