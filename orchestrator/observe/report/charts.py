"""The charts of learning, staleness, speed and trainer health. Each takes a run and a size, and returns SVG; "" without data."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from orchestrator.observe.report.page_text import count, interval, percent, significant
from orchestrator.observe.report.run_log import RunLog, Step
from orchestrator.observe.report.summary import lag_counts
from orchestrator.observe.report.svg import Axis, Margins, Plot, Point, nice_axis, smooth, spread, step_axis, thin_out

_POINTS = 400  # of a line: more would not be seen
_HOVERS = 120  # columns with a tooltip


@dataclass(frozen=True)
class Size:
    """A drawing's width in units, which are pixels at full size. ``narrow``: for a phone."""

    width: float
    narrow: bool = False

    @property
    def ticks(self) -> int:
        """How many ticks an x axis has room for."""
        return 4 if self.width < 500 else 8


WIDE, HALF, NARROW, SMALL = Size(960), Size(464), Size(440, narrow=True), Size(300)


@dataclass(frozen=True)
class Series:
    """A quantity over steps for a line chart. ``form`` writes one value, unit included."""

    title: str
    label: str
    points: Sequence[Point]
    form: Callable[[float], str]
    style: str = "c1"
    floor: float | None = None  # the axis reaches down to this
    limit: float | None = None  # a value with a meaning, drawn as a line
    limit_label: str = ""


def percent_axis(label: str, high: float = 1.0) -> Axis:
    """Shares from nothing to all, or to ``high``."""
    return nice_axis(0.0, high, label, lambda value: f"{100 * value:g}", ticks=5)


def smoothing(steps: int) -> int:
    """The window of a smoothed line, odd, growing with the run."""
    return max(1, steps // 20) * 2 + 1 if steps >= 8 else 1


def success(run: RunLog, size: Size) -> str:
    """Held-out success with its interval over steps, and the level before RL."""
    shown = [item for item in run.evaluations if item.phase != "before_warmup"]
    if not shown:
        return ""
    plot = Plot(
        size.width,
        300 if not size.narrow else 320,
        step_axis(max(run.done_steps, shown[-1].step), ticks=size.ticks),
        percent_axis("success on held-out prompts (%)"),
        "Success on held-out prompts over training steps",
        "; ".join(f"step {item.step}: {percent(item.value)} ({interval(item.low, item.high)})" for item in shown),
    )
    start, untrained = run.before, run.evaluation("before_warmup")
    if untrained is not None:
        plot.level(untrained.value, f"untrained {percent(untrained.value)}", "c0", below=True)
    if start is not None:
        name = "after warm-up, before RL" if run.warmup else "before RL"
        plot.level(start.value, f"{name}: {percent(start.value)}", "c2")
    plot.band([(item.step, item.low, item.high) for item in shown], "c1")
    plot.line([(item.step, item.value) for item in shown], "strong c1")
    for item in shown:
        place = f"{'before RL' if item.step == 0 else f'after step {item.step}'}: {percent(item.value)}"
        about = f"{place} ({item.successes} of {item.prompts}; 95 % interval {interval(item.low, item.high)})"
        plot.whisker(item.step, item.low, item.high, "c1")
        plot.dot(item.step, item.value, "c2" if item is start else "c1", 4.5, about)
    return plot.render()


def reward(run: RunLog, size: Size) -> str:
    """Mean reward of each trained batch, raw and smoothed."""
    points = [(float(step.number), step.reward_mean) for step in run.steps]
    series = Series("Mean reward of the trained batch", "mean reward", points, significant, floor=0.0)
    return line_chart(series, run.done_steps, size, 260, smooth_window=smoothing(len(points)))


def line_chart(series: Series, last_step: int, size: Size, height: float, smooth_window: int = 1) -> str:
    """One quantity over steps; with a window, raw values are faint and their moving mean is strong."""
    finite = [y for _, y in series.points if math.isfinite(y)]
    if not finite:
        return ""
    low, high = min(finite), max(finite)
    if series.floor is not None:
        low = min(low, series.floor)
    if series.limit is not None and series.limit < 4 * high:
        high = max(high, series.limit)
    y_axis = nice_axis(low, high, series.label, ticks=4 if height > 180 else 3)
    about = f"first {series.form(finite[0])}, last {series.form(finite[-1])}, least {series.form(min(finite))}"
    plot = Plot(
        size.width,
        height,
        step_axis(last_step, ticks=size.ticks, label="training step" if height > 180 else ""),
        y_axis,
        f"{series.title} over training steps",
        f"{about}, most {series.form(max(finite))}",
        margins=Margins(left=36) if height > 180 else Margins(left=36, bottom=24, top=14),
    )
    if smooth_window > 1:
        plot.line(thin_out(series.points, _POINTS), f"faint {series.style}")
        plot.line(thin_out(smooth(series.points, smooth_window), _POINTS), f"strong {series.style}")
    else:
        plot.line(thin_out(series.points, _POINTS), f"medium {series.style}")
    if series.limit is not None and series.limit <= y_axis.high:
        plot.level(series.limit, series.limit_label, "bad")
    plot.hover(
        [
            (series.points[index][0], f"step {series.points[index][0]:.0f}: {series.form(series.points[index][1])}")
            for index in spread(len(series.points), _HOVERS)
        ]
    )
    return plot.render()


def lag_histogram(run: RunLog, size: Size) -> str:
    """How many versions the trajectories lagged when get_batch took them, beside the lag at which they were trained."""
    taken = lag_counts(run)
    trained: dict[int, int] = {}
    for step in run.steps:
        for lag, number in step.lag_trained.items():
            trained[lag] = trained.get(lag, 0) + number
    totals = (sum(taken.values()), sum(trained.values()))
    if not totals[0]:
        return ""
    lags = list(range(max(run.alpha, max(taken, default=0), max(trained, default=0)) + 1))
    every = max(1, len(lags) // 10)
    x_axis = Axis(-0.6, len(lags) - 0.4, tuple((lag, str(lag)) for lag in lags if lag % every == 0), "lag (versions)")
    shares = [taken.get(lag, 0) / totals[0] for lag in lags]
    shares += [trained.get(lag, 0) / totals[1] if totals[1] else 0.0 for lag in lags]
    plot = Plot(
        size.width,
        270,
        x_axis,
        percent_axis("share of trajectories (%)", 1.08 * max(shares)),
        "Staleness of the trained trajectories",
        ", ".join(f"lag {lag}: {percent(taken.get(lag, 0) / totals[0])}" for lag in lags),
    )
    unit = plot.x(1) - plot.x(0)
    bar = min(unit * 0.36, 46.0)
    for lag in lags:
        for counts, total, style, word, left in (
            (taken, totals[0], "c1", "when taken by get_batch", plot.x(lag) - bar - 1),
            (trained, totals[1], "c2", "when trained", plot.x(lag) + 1),
        ):
            number = counts.get(lag, 0)
            if not number:
                continue
            share = number / total
            top = plot.y(share)
            beyond = " over" if lag > run.alpha and style == "c1" else ""
            about = f"lag {lag} {word}: {count(number)} trajectories, {percent(share)}"
            plot.rect(left, top, bar, plot.bottom - top, f"bar {style}{beyond}", about)
            if len(lags) <= 5:
                plot.text(left + bar / 2, top - 6, percent(share, 0 if share >= 0.1 else 1), "value middle")
    plot.mark(run.alpha + 0.5, f"bound: lag ≤ {run.alpha}", "bad")
    return plot.render()


def mixed_versions(run: RunLog, size: Size) -> str:
    """The share of trained trajectories whose tokens come from more than one version."""
    points = [(float(step.number), step.versions_mixed / step.trained) for step in run.steps if step.trained]
    if not points:
        return ""
    high = max(y for _, y in points)
    plot = Plot(
        size.width,
        270,
        step_axis(run.done_steps, ticks=size.ticks),
        percent_axis("spanning a weight update (%)", max(high, 0.05)),
        "Share of trajectories with tokens of more than one version",
        f"last step {percent(points[-1][1])}, most {percent(high)}",
    )
    plot.line(thin_out(points, _POINTS), "faint c3")
    plot.line(thin_out(smooth(points, smoothing(len(points))), _POINTS), "strong c3")
    plot.hover(
        [(points[i][0], f"step {points[i][0]:.0f}: {percent(points[i][1])}") for i in spread(len(points), _HOVERS)]
    )
    return plot.render()


def token_rate(run: RunLog, size: Size) -> str:
    """Trained tokens per second of wall time."""
    points = [(float(step.number), step.tokens / step.period) for step in run.steps if step.period > 0]
    return line_chart(
        Series("Trained tokens a second", "tokens/s", points, lambda v: f"{significant(v)} tokens/s", "c1", floor=0.0),
        run.done_steps,
        size,
        250,
        smooth_window=smoothing(len(points)),
    )


def trajectory_rate(run: RunLog, size: Size) -> str:
    """Trained trajectories per second of wall time."""
    points = [(float(step.number), step.trained / step.period) for step in run.steps if step.period > 0]
    return line_chart(
        Series(
            "Trained trajectories a second",
            "trajectories/s",
            points,
            lambda v: f"{significant(v)} trajectories/s",
            "c3",
            floor=0.0,
        ),
        run.done_steps,
        size,
        250,
        smooth_window=smoothing(len(points)),
    )


# Scalars of the trainer that have a place of their own: name -> (title, what to look for, lowest axis value).
HEALTH: dict[str, tuple[str, str, float | None]] = {
    "loss": ("Policy loss", "hovers around zero", None),
    "entropy": ("Entropy", "falls slowly; a sudden fall is collapse", 0.0),
    "groups_silent_share": ("Groups without variance", "all members the same reward: nothing to learn from", 0.0),
    "advantage_std": ("Advantage, deviation", "over the tokens that are trained on", 0.0),
    "grad_norm": ("Gradient norm", "before clipping", 0.0),
    "clip_fraction": ("Clip fraction", "share of tokens whose gradient the clip removed", 0.0),
    "approx_kl": ("Approximate KL", "of the update, against the policy before it", 0.0),
    "reference_kl": ("KL to the reference", "how far it has gone from where RL began", 0.0),
    "tis_p01": ("Trainer over rollout, 1st percentile", "ratio of a token's probabilities, before any cap", None),
    "tis_p99": ("Trainer over rollout, 99th percentile", "far from 1: staleness, or engine and trainer differ", None),
    "tis_mean": ("TIS weight, mean", "1 when rollout and trainer agree", None),
    "tis_max": ("TIS weight, maximum", "held at the cap", None),
    "tis_capped": ("TIS weights at a bound", "share of tokens held at the cap, or left out", 0.0),
    "ess": ("Effective sample size", "share of the batch that counts after weighting", 0.0),
    "logprob_gap_mean": ("Log-prob gap, mean", "rollout against trainer, same version", 0.0),
    "logprob_gap_max": ("Log-prob gap, maximum", "the worst token", 0.0),
    "logprob_gap_all": ("Log-prob distance", "rollout against trainer, staleness included", 0.0),
    "rollout_kl": ("KL of rollout to trainer", "what TIS corrects", 0.0),
    "advantage_nonzero": ("Trajectories with a signal", "share whose advantage is not zero", 0.0),
    "response_tokens_mean": ("Response length, mean", "generated tokens of an episode", 0.0),
    "response_tokens_p95": ("Response length, 95th percentile", "near the limit: answers are cut", 0.0),
    "truncated_share": ("Truncated", "share of episodes that ran into a limit", 0.0),
    "prompts_repeated": ("Prompts asked before", "of those drawn; high: it may learn them by heart", 0.0),
    "learning_rate": ("Learning rate", "", 0.0),
}


def health(run: RunLog, name: str, size: Size) -> str:
    """One scalar of the trainer over steps; the mean log-prob gap with its alarm."""
    title, _, floor = HEALTH.get(name, (name, "", None))
    points = metric(run.steps, name)
    limit = run.gap_alarm if name == "logprob_gap_mean" else None
    series = Series(
        title,
        "",
        points,
        significant,
        "c2" if name.startswith("logprob_gap") else "c1",
        floor,
        limit,
        f"alarm {significant(limit)}" if limit is not None else "",
    )
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


def dumbbell(before: tuple[float, float, float], after: tuple[float, float, float] | None) -> str:
    """Two success rates with their intervals on one line from 0 to 100 %: (value, low, high)."""
    axis = Axis(0.0, 1.0, (*((share / 4, f"{25 * share}") for share in range(4)), (1.0, percent(1, 0))))
    plot = Plot(
        600, 72, axis, Axis(0.0, 1.0, ()), "Success before and after", margins=Margins(10, 14, 4, 24), style="mini"
    )
    for style, height, rate in (("c2", 0.72, before), ("c1", 0.28, after)):
        if rate is None:
            continue
        value, low, high = rate
        at = plot.y(height)
        left, right = plot.x(low), plot.x(high)
        plot.add(f'<line x1="{left:.1f}" x2="{right:.1f}" y1="{at:.1f}" y2="{at:.1f}" class="bounds {style}"/>')
        plot.dot(value, height, style, 5, f"{percent(value)}, 95 % interval {interval(low, high)}")
    return plot.render()
