"""The parts of every run's page: each function computes what one section shows and fills its template; nothing comes out when
there is nothing to say.

What only some runs have is in :mod:`orchestrator.observe.report.feature_sections`.
"""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean, median
from typing import Any

from markupsafe import Markup

from orchestrator.config import Config
from orchestrator.observe.curves import QUANTITIES, WEIGHTY, quantity_of
from orchestrator.observe.event_records import ENDS, LedgerCounts
from orchestrator.observe.report import charts
from orchestrator.observe.report.page_templates import NOTHING, fill
from orchestrator.observe.report.page_text import interval
from orchestrator.observe.report.plots import HALF, SMALL, Chart, chart
from orchestrator.observe.report.run_log import RunLog
from orchestrator.observe.report.timeline import clip, shares, typical_window

_INCIDENTS = 200  # rows; the log has them all


def overview(run: RunLog) -> Markup:
    """What must not be overlooked (a failure, a ledger that does not close, alarms, cut lines), and the figures that people look
    for first."""
    return fill(
        "overview.html",
        run=run,
        compared=_compared(run),
        trained=sum(step.trained for step in run.steps),
        resumes=max(0, len(run.starts) - 1),
        period=median(step.period for step in run.steps) if run.steps else None,
    )


def learning(run: RunLog) -> Markup:
    """Success on held-out prompts, and the training reward."""
    success = chart(lambda size: charts.success(run, size))
    reward = chart(lambda size: charts.reward(run, size))
    if not (success or reward):
        return NOTHING
    window = charts.smoothing(len(run.steps))
    return fill("learning.html", run=run, curves=QUANTITIES, success=success, reward=reward, window=window)


def waiting(run: RunLog) -> Markup:
    """Who waited for whom."""
    pieces = run.lanes()
    place = typical_window(run.steps)
    if place is None:
        return NOTHING

    def part(lane: str, *states: str) -> float:
        totals = shares(pieces[lane])
        whole = sum(totals.values())
        return sum(totals.get(state, 0.0) for state in states) / whole if whole else 0.0

    seen = {piece.state for lane in pieces.values() for piece in clip(lane, place.start, place.end)}
    trainer, rollout = ({piece.state for piece in pieces[lane]} for lane in ("trainer", "rollout"))
    updates = run.updates
    return fill(
        "waiting.html",
        run=run,
        place=place,
        trained=part("trainer", "train", "stream"),
        streamed=part("trainer", "stream"),
        waited=part("trainer", "wait_rollout"),
        still=part("rollout", "wait_weights", "wait_training", "wait_evaluation", "wait_store", "other"),
        close_up=chart(lambda size: charts.typical_steps(run, pieces, place, size), legend=charts.state_legend(seen)),
        whole=chart(lambda size: charts.time_shares(pieces, size), legend=charts.state_legend(trainer | rollout)),
        times=chart(lambda size: charts.step_times(run, pieces["trainer"], size), legend=charts.state_legend(trainer)),
        stages=list(_stages(run)),
        workers=list(_workers(run)),
        update_seconds=median(update.seconds for update in updates) if updates else 0.0,
        update_bytes=median(update.bytes for update in updates) if updates else 0,
        preempted=sum(update.preempted for update in updates) / max(1, len(updates)),
    )


def staleness(run: RunLog) -> Markup:
    """How old the trained data was."""
    lags = run.lags
    if not (total := sum(lags.values())):
        return NOTHING
    trained = sum(step.trained for step in run.steps)
    legend = [("when taken by get_batch", "c1", False), ("when trained", "c2", False)]
    return fill(
        "staleness.html",
        run=run,
        on_policy=lags.get(0, 0) / total,
        mixed=sum(step.versions_mixed for step in run.steps) / trained if trained else None,
        lags=chart(lambda size: charts.lag_histogram(run, size), (HALF,), legend),
        spanning=chart(lambda size: charts.mixed_versions(run, size), (HALF,)),
    )


def speed(run: RunLog) -> Markup:
    """Throughput over steps."""
    if run.tokens_per_s_mean is None:
        return NOTHING
    return fill(
        "speed.html",
        run=run,
        trajectories_per_s=sum(step.trained for step in run.steps) / sum(step.period for step in run.steps),
        tokens=chart(lambda size: charts.rate(run, lambda step: step.tokens, "tokens", "c1", size), (HALF,)),
        trajectories=chart(
            lambda size: charts.rate(run, lambda step: step.trained, "trajectories", "c3", size), (HALF,)
        ),
    )


def trainer_health(run: RunLog) -> Markup:
    """Small multiples of the trainer's scalars."""
    names, other_names = charts.metric_names(run.steps)
    shown = _multiples(run, [name for name in names if name in WEIGHTY])
    others = _multiples(run, [name for name in (*names, *other_names) if name not in WEIGHTY])
    if not (shown or others):
        return NOTHING
    gaps = [gap for _, gap in charts.metric(run.steps, "logprob_gap_mean") if math.isfinite(gap)]
    over = sum(run.gap_alarm is not None and gap > run.gap_alarm for gap in gaps)
    zeros = sum(norm == 0 for _, norm in charts.metric(run.steps, "grad_norm"))
    silent = [share for _, share in charts.metric(run.steps, "groups_silent_share")]
    half = len(silent) // 2
    signals = [1 - fmean(part) for part in (silent[:half], silent[half:])] if half else []
    return fill("health.html", run=run, shown=shown, others=others, gaps=gaps, over=over, zeros=zeros, signals=signals)


def ledger(run: RunLog, stored: Mapping[str, int] | None) -> Markup:
    """Every trajectory, by how it ended. ``stored``: rows in Parquet by outcome, None without a store."""
    counts = run.ledger
    if not counts.started:
        return NOTHING
    rows: Counter[str] = Counter()
    for outcome, number in (stored or {}).items():
        rows[outcome.partition(":")[0]] += number
    legend = [(ENDS[state].words, ENDS[state].colour, False) for state, number in counts.parts.items() if number]
    return fill(
        "ledger.html",
        run=run,
        ends=ENDS,
        stored=None if stored is None else rows,
        bar=chart(lambda size: charts.ends(counts, size), legend=legend),
        causes=_causes(counts),
    )


def incidents(run: RunLog) -> Markup:
    """Alarms, faults and recoveries in order of time."""
    return fill("incidents.html", run=run, shown=run.incidents[-_INCIDENTS:])


def environment(run: RunLog) -> Markup:
    """What the run ran on, and with which configuration: resolved, and what differs from the defaults is marked."""
    if not (run.machine or run.versions or run.config):
        return NOTHING
    machine = [(name or "machine", value) for name, value in run.machine.items()]
    return fill("environment.html", run=run, machine=machine, config=list(_config(run.config)))


def _compared(run: RunLog) -> Chart | None:
    """Success before and after RL; None without both."""
    before, after = run.before, run.after
    if before is None or after is None or before is after:
        return None
    when = "at the end" if after.step >= run.done_steps else f"after step {after.step}, the last evaluation"
    legend = [
        (f"{'after warm-up' if run.warmup else 'before RL'}, {interval(before.low, before.high)}", "c2", False),
        (f"{when}, {interval(after.low, after.high)}", "c1", False),
    ]
    return chart(lambda _: charts.dumbbell(before, after), (HALF,), legend)


def _stages(run: RunLog) -> Iterator[tuple[str, int, float, float, float, str]]:
    """(name, times, seconds in all, median, longest, what it waited for mostly)."""
    for name in dict.fromkeys(stage.name for stage in run.stages):
        mine = [stage for stage in run.stages if stage.name == name]
        seconds = [stage.seconds for stage in mine]
        waits: dict[str, float] = defaultdict(float)
        for stage in mine:
            if stage.waiting_for:
                # the weights of version 12 and those of version 13 are one reason
                reason = " ".join("N" if word.isdigit() else word for word in stage.waiting_for.split())
                waits[reason] += stage.seconds
        most = max(waits, key=lambda reason: waits[reason]) if waits else ""
        yield name, len(mine), sum(seconds), median(seconds), max(seconds), most


def _workers(run: RunLog) -> Iterator[tuple[str, float, float, float, int, float]]:
    """(name, running, queued, share of KV used, preemptions, tokens per second)."""
    for name in dict.fromkeys(snapshot.name for snapshot in run.workers):
        mine = [snapshot for snapshot in run.workers if snapshot.name == name]
        yield (
            name,
            fmean(item.running for item in mine),
            fmean(item.waiting for item in mine),
            fmean(item.kv_share for item in mine),
            max(item.preemptions for item in mine),
            median(item.tokens_per_s for item in mine),
        )


def _multiples(run: RunLog, names: Sequence[str]) -> list[tuple[str, str, str]]:
    """(title, what to look for, drawing)."""
    found = []
    for name in names:
        if drawing := charts.health(run, name, SMALL):
            quantity = quantity_of(name)
            found.append((quantity.title, quantity.about, drawing))
    return found


def _causes(counts: LedgerCounts) -> list[tuple[str, int]]:
    """Why trajectories failed, were filtered, or were not needed any more; the most frequent first."""
    failed = {f"failed: {cause}": number for cause, number in counts.failed_by_cause.items()}
    return sorted({**failed, **counts.ended_by_cause}.items(), key=lambda item: (-item[1], item[0]))


def _config(config: Mapping[str, Any]) -> Iterator[tuple[str, bool]]:
    """(line, whether it differs from the default)."""
    defaults: dict[str, Any] = Config().model_dump(mode="json") if config else {}
    for name, values in sorted(config.items()):
        yield f"[{name}]", False
        if isinstance(values, dict):
            yield from _config_lines(values, defaults.get(name), "")
        else:
            yield f"{name} = {json.dumps(values)}", False
        yield "", False


def _config_lines(values: Mapping[str, Any], defaults: Any, prefix: str) -> Iterator[tuple[str, bool]]:
    known = defaults if isinstance(defaults, dict) else {}
    for key, value in sorted(values.items()):
        if isinstance(value, dict):
            yield from _config_lines(value, known.get(key), f"{prefix}{key}.")
        else:
            yield f"{prefix}{key} = {json.dumps(value)}", not (key in known and known[key] == value)
