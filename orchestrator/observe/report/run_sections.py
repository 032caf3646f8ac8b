"""The parts of every run's page: each function takes the run and gives one section's markup, "" when there is nothing to say.

What only some runs have is in :mod:`orchestrator.observe.report.feature_sections`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from html import escape
from statistics import median
from typing import Any

from orchestrator.config import Config
from orchestrator.observe.event_records import Evaluation, LedgerCounts
from orchestrator.observe.report import charts
from orchestrator.observe.report.page_parts import (
    LegendItem,
    badge,
    card,
    columns,
    facts,
    figure,
    legend_of,
    notice,
    section,
    table,
)
from orchestrator.observe.report.page_text import (
    ALPHA,
    block,
    count,
    data_size,
    duration,
    interval,
    percent,
    plural,
    significant,
    tag,
)
from orchestrator.observe.report.plots import HALF, SMALL, Size
from orchestrator.observe.report.run_log import RunLog
from orchestrator.observe.report.timeline import Piece, clip, shares, typical_window

STATUS_WORDS = {
    "completed": "completed",
    "interrupted": "interrupted",
    "failed": "failed",
    "unfinished": "unfinished: it was killed, or is still running",
}


def header(run: RunLog) -> str:
    """Name, kind, mode, status, machine."""
    start = run.starts[-1] if run.starts else None
    status = tag("span", escape(STATUS_WORDS.get(run.status, run.status)), class_=f"status-{escape(run.status)}")
    mode = f"{escape(run.mode)}, staleness bound {ALPHA} = {run.alpha}"
    items = [badge(run.kind), tag("span", mode), status]
    if start is not None and start.started:
        items.append(tag("span", escape(start.started)))
    machine = " · ".join(
        escape(part)
        for part in (run.machine.get("cpu", ""), _unit(run, "cores", "cores"), _unit(run, "memory_gib", "GiB"))
        if part
    )
    if machine:
        items.append(tag("span", machine))
    return tag(
        "header",
        tag("p", "rl-coserve · run report", class_="eyebrow")
        + tag("h1", escape(run.name))
        + tag("div", "".join(items), class_="meta"),
    )


def notices(run: RunLog) -> str:
    """What must not be overlooked: a failure, a ledger that does not close, alarms, cut lines."""
    found = []
    if run.status == "failed":
        found.append(notice("bad", "The run failed.", escape(run.figures.reason)))
    elif run.status in ("interrupted", "unfinished"):
        done = f"{run.done_steps:,} of {plural(run.planned_steps, 'step')} are done."
        title = "The run was interrupted." if run.status == "interrupted" else "The run did not say that it ended."
        found.append(
            notice("warn", title, f"{done} {escape(run.figures.reason) if run.figures.reason != 'interrupted' else ''}")
        )
    if run.ledger.difference:
        number = plural(abs(run.ledger.difference), "trajectory", "trajectories")
        text = f"{number} {'unaccounted for' if run.ledger.difference > 0 else 'too many'}."
        found.append(notice("bad", "The ledger does not close.", text))
    if alarms := run.figures.incident_count("alarm"):
        text = f"See {tag('a', 'what went wrong', href='#incidents')}."
        found.append(notice("bad", f"{plural(alarms, 'alarm')}.", text))
    if run.unreadable:
        text = f"{plural(run.unreadable, 'line')} of the event log could not be read: cut when the process was killed."
        found.append(notice("warn", "The log has a gap.", text))
    return "".join(found)


def cards(run: RunLog) -> str:
    """The figures that people look for first."""
    resumes = len(run.starts) - 1
    rate = run.tokens_per_s_mean
    shown = [_success_card(run)]
    steps = (
        f"{run.done_steps:,} {tag('small', f'of {run.planned_steps:,}')}"
        if run.planned_steps
        else count(run.done_steps)
    )
    trained = sum(step.trained for step in run.steps)
    shown.append(card("Training steps", run.kind, steps, f"{count(trained)} trajectories trained"))
    resumed = f"; resumed {'once' if resumes == 1 else f'{resumes} times'}" if resumes > 0 else ""
    shown.append(card("Wall time", run.kind, duration(run.seconds), f"from start to end{resumed}"))
    if rate is not None:
        period = median(step.period for step in run.steps)
        value = f"{significant(rate)} {tag('small', 'tokens/s')}"
        shown.append(
            card(
                "Throughput",
                run.kind,
                value,
                f"mean of the run, generated and trained; {duration(period)} per step (median)",
            )
        )
    lags = run.lags
    if (mean := run.lag_mean) is not None:
        held = max(lags) <= run.alpha or run.mode == "areal"  # which bounds the start only
        shown.append(
            card(
                "Staleness at get_batch",
                run.kind,
                f"≤ {max(lags)} {tag('small', f'bound {ALPHA} = {run.alpha}')}",
                f"mean lag {significant(mean, 2)} versions{'' if held else '; the bound was broken'}",
                "" if held else "bad",
            )
        )
    if run.ledger.started:
        closed = run.ledger.difference == 0
        shown.append(
            card(
                "Ledger",
                run.kind,
                "closes" if closed else f"off by {count(abs(run.ledger.difference))}",
                f"{count(run.ledger.started)} trajectories started, {'every one' if closed else 'not every one'} accounted for",
                "good" if closed else "bad",
            )
        )
    return tag("div", "".join(shown), class_="cards")


def learning(run: RunLog) -> str:
    """Success on held-out prompts, and the training reward."""
    note = "Greedy play on prompts that are never trained on; bars and band are the 95 % Wilson interval."
    if run.warmup:
        warm = run.warmup
        note += (
            f" The warm-up ({plural(warm.steps, 'supervised step')}, {duration(warm.seconds)}, loss "
            f"{significant(warm.loss_first)} to {significant(warm.loss_last)}) teaches the format; what lies above the dashed "
            "line was learned by RL."
        )
    success = figure("Success on held-out prompts", run.kind, lambda size: charts.success(run, size), note=note)
    window = charts.smoothing(len(run.steps))
    reward = figure(
        "Training reward",
        run.kind,
        lambda size: charts.reward(run, size),
        note=f"Mean over each trained batch, sampled at training temperature; faint: raw, strong: mean of {window} steps."
        if window > 1
        else "Mean over each trained batch, sampled at training temperature.",
    )
    return section("learning", "Did it learn?", _learning_lead(run), success, reward)


def waiting(run: RunLog) -> str:
    """Who waited for whom."""
    pieces = run.lanes()
    place = typical_window(run.steps)
    if place is None:
        return ""
    seen = {piece.state for lane in pieces.values() for piece in clip(lane, place.start, place.end)}
    words = f"step {place.first}" if place.first == place.last else f"steps {place.first} to {place.last}"
    lane_chart = figure(
        f"Typical steps, close up: {words}",
        run.kind,
        lambda size: charts.typical_steps(run, pieces, place, size),
        legend=charts.state_legend(sorted(seen)),
        note="Hatched: waiting, in the colour of what is waited for. The window is the one whose steps are closest to the "
        "median duration. Rollout “generating” means that it may; its own queue is in the table of workers.",
    )
    states = {piece.state for lane in ("rollout", "trainer") for piece in pieces[lane]}
    whole = figure(
        "The whole run: where the time went",
        run.kind,
        lambda size: charts.time_shares(pieces, size),
        legend=charts.state_legend(sorted(states)),
        note="From the first batch to the last; startup, warm-up and the last evaluation are not in it.",
    )
    trainer_states = {piece.state for piece in pieces["trainer"]}
    times = figure(
        "Time of each step",
        run.kind,
        lambda size: charts.step_times(run, pieces["trainer"], size),
        legend=charts.state_legend(sorted(trainer_states)),
    )
    return section(
        "waiting",
        "Who waited for whom?",
        _waiting_lead(pieces),
        lane_chart,
        whole,
        times,
        _stage_table(run),
        _workers(run),
    )


def staleness(run: RunLog) -> str:
    """How old the trained data was."""
    lags = run.lags
    total = sum(lags.values())
    if not total:
        return ""
    trained = sum(step.trained for step in run.steps)
    mixed = sum(step.versions_mixed for step in run.steps)
    lead = f"{tag('strong', percent(lags.get(0, 0) / total))} of the trajectories were on policy when taken"
    lead += f"; {tag('strong', percent(mixed / trained))} span a weight update." if trained else "."
    legend: list[LegendItem] = [("when taken by get_batch", "c1", False), ("when trained", "c2", False)]
    histogram = figure(
        "Lag of the trajectories",
        run.kind,
        lambda size: charts.lag_histogram(run, size),
        (HALF,),
        legend,
        f"Lag: the trainer's version minus the version of the first token. {ALPHA} bounds it when get_batch takes the "
        "trajectory; by the time it is trained, the step before it may have added one.",
    )
    spanning = figure(
        "Trajectories that span a weight update",
        run.kind,
        lambda size: charts.mixed_versions(run, size),
        (HALF,),
        note="Their tokens come from more than one version; every token carries its own.",
    )
    return section("staleness", "How stale was the data?", lead, columns(histogram, spanning))


def speed(run: RunLog) -> str:
    """Throughput over steps."""
    rate = run.tokens_per_s_mean
    if rate is None:
        return ""
    trained = sum(step.trained for step in run.steps)
    seconds = sum(step.period for step in run.steps)
    lead = (
        f"{tag('strong', significant(rate) + ' tokens/s')} and {significant(trained / seconds)} trajectories/s, generated and "
        "trained, over the whole training time: weight updates, evaluations and waiting included."
    )
    tokens = figure("Tokens a second", run.kind, lambda size: charts.token_rate(run, size), (HALF,))
    trajectories = figure("Trajectories a second", run.kind, lambda size: charts.trajectory_rate(run, size), (HALF,))
    return section("speed", "How fast was it?", lead, columns(tokens, trajectories))


def trainer_health(run: RunLog) -> str:
    """Small multiples of the trainer's scalars."""
    shown, others = charts.metric_names(run.steps)
    more = _multiples(run, others)
    if more:
        more = tag("details", tag("summary", plural(len(others), "more scalar")) + more, class_="more")
    gaps = [gap for _, gap in charts.metric(run.steps, "logprob_gap_mean") if math.isfinite(gap)]
    lead = ""
    if gaps and run.gap_alarm is not None:
        over = sum(gap > run.gap_alarm for gap in gaps)
        lead = f"Log-prob gap between rollout and trainer at the same version: at most {tag('strong', significant(max(gaps)))}"
        lead += f", alarm at {significant(run.gap_alarm)}"
        lead += f"; {plural(over, 'step')} over it" if over else "; never over it"
        lead += f", measured in {len(gaps)} of {plural(len(run.steps), 'step')}."
    elif run.steps:
        lead = "The log-prob gap between rollout and trainer at the same version was not measured in any step."
    return section("health", "Is the trainer healthy?", lead, _multiples(run, shown), more)


def _multiples(run: RunLog, names: Sequence[str]) -> str:
    made = []
    for name in names:
        title, about, _ = charts.HEALTH.get(name, (name, "", None))

        def draw(size: Size, name: str = name) -> str:
            return charts.health(run, name, size)

        drawing = figure(title, run.kind, draw, (SMALL,))
        if drawing:
            words = block("p", escape(about), class_="figure-note")
            made.append(drawing.replace("</figcaption>", "</figcaption>" + words, 1))
    return tag("div", "".join(made), class_="multiples") if made else ""


def _success_card(run: RunLog) -> str:
    before, after = run.before, run.after
    label = f"Success on {after.prompts if after else ''} held-out prompts"
    if after is None:
        return card("Success on held-out prompts", run.kind, "not evaluated", "", "large")
    if before is None or before is after:
        return card(label, run.kind, percent(after.value), f"95 % interval {interval(after.low, after.high)}", "large")
    value = f"{percent(before.value)}{tag('span', '→', class_='arrow')}{percent(after.value)}"
    name = "after warm-up" if run.warmup else "before RL"
    legend = legend_of(
        [
            (f"{name}, {interval(before.low, before.high)}", "c2", False),
            (f"{_when(run, after)}, {interval(after.low, after.high)}", "c1", False),
        ]
    )
    drawing = charts.dumbbell((before.value, before.low, before.high), (after.value, after.low, after.high))
    return card(label, run.kind, value, "", "large", drawing + tag("div", legend, class_="card-detail"))


def _when(run: RunLog, evaluation: Evaluation) -> str:
    return "at the end" if evaluation.step >= run.done_steps else f"after step {evaluation.step}, the last evaluation"


def _learning_lead(run: RunLog) -> str:
    before, after = run.before, run.after
    if before is None or after is None or before is after:
        return ""
    words = f"from {tag('strong', percent(before.value))} to {tag('strong', percent(after.value))}"
    words += f" in {plural(after.step, 'step')}"
    if after.low > before.high:
        return f"Success on held-out prompts rose {words}; the intervals do not overlap."
    if after.high < before.low:
        return f"Success on held-out prompts fell {words}."
    return f"Success on held-out prompts went {words}; the intervals overlap, so this run alone does not show learning."


def _waiting_lead(pieces: dict[str, list[Piece]]) -> str:
    def part(lane: str, *states: str) -> float:
        totals = shares(pieces[lane])
        whole = sum(totals.values())
        return sum(totals.get(state, 0.0) for state in states) / whole if whole else 0.0

    streamed = part("trainer", "stream")
    early = f", {tag('strong', percent(streamed, 0))} of it on the coming batch," if streamed else ""
    still = part("rollout", "wait_weights", "wait_training", "wait_evaluation", "other")
    return (
        f"The trainer trained {tag('strong', percent(part('trainer', 'train', 'stream'), 0))} of the time{early} and waited "
        f"{tag('strong', percent(part('trainer', 'wait_rollout'), 0))} of it for trajectories; rollout stood still "
        f"{tag('strong', percent(still, 0))} of it."
    )


def _stage_table(run: RunLog) -> str:
    rows = []
    for name in dict.fromkeys(stage.name for stage in run.stages):
        mine = [stage for stage in run.stages if stage.name == name]
        seconds = [stage.seconds for stage in mine]
        waits: dict[str, float] = {}
        for stage in mine:
            if stage.waiting_for:
                # the weights of version 12 and those of version 13 are one reason
                reason = " ".join("N" if word.isdigit() else word for word in stage.waiting_for.split())
                waits[reason] = waits.get(reason, 0.0) + stage.seconds
        most = max(waits, key=lambda reason: waits[reason]) if waits else ""
        rows.append(
            [
                tag("code", escape(name)),
                count(len(mine)),
                duration(sum(seconds)),
                duration(median(seconds)),
                duration(max(seconds)),
                escape(most),
            ]
        )
    head = ("Stage", "Times", "In all", "Median", "Longest", "Waited mostly for")
    return table(head, rows, (1, 2, 3, 4), f"Stages of the loop ({run.kind}; they overlap in async mode)")


def _workers(run: RunLog) -> str:
    rows = []
    for name in dict.fromkeys(snapshot.name for snapshot in run.workers):
        mine = [snapshot for snapshot in run.workers if snapshot.name == name]
        rows.append(
            [
                tag("code", escape(name)),
                significant(sum(item.running for item in mine) / len(mine)),
                significant(sum(item.waiting for item in mine) / len(mine)),
                percent(sum(item.kv_share for item in mine) / len(mine)),
                count(max(item.preemptions for item in mine)),
                significant(median(item.tokens_per_s for item in mine)),
            ]
        )
    head = ("Rollout worker", "Running (mean)", "Queued (mean)", "KV used (mean)", "Preemptions", "Tokens/s (median)")
    made = table(head, rows, (1, 2, 3, 4, 5), f"Rollout workers, at each weight update ({run.kind})")
    if run.updates:
        seconds = [update.seconds for update in run.updates]
        mean = sum(update.preempted for update in run.updates) / len(run.updates)
        made += tag(
            "p",
            f"Weight updates: {count(len(run.updates))}, median {duration(median(seconds))} for "
            f"{data_size(median(update.bytes for update in run.updates))}. On average {significant(mean, 2)} requests in flight "
            "had their KV recomputed and went on.",
            class_="figure-note",
        )
    return made


def _unit(run: RunLog, key: str, unit: str) -> str:
    value = run.machine.get(key, "")
    return f"{value} {unit}" if value else ""


# -- accounts: the ledger with its recounts, incidents, machine, config -----------------------------------------------

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
        legend=[_legend_item(state) for state, number in counts.parts.items() if number],
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
    totals = {kind: run.figures.incident_count(kind) for kind in ("alarm", "fault", "recovered")}
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


def _share(counts: LedgerCounts, state: str) -> float:
    return counts.parts[state] / counts.started if counts.started else 0.0


def _legend_item(state: str) -> LegendItem:
    words, colour = _ENDS[state]
    return words, colour, False


def _bar(counts: LedgerCounts, size: Size) -> str:
    parts = counts.parts
    shown = [(*_ENDS[state], number) for state, number in parts.items() if number]
    return charts.ends(shown, max(counts.started, sum(parts.values())), size)


def _sum_check(counts: LedgerCounts) -> str:
    terms = " + ".join(f"{number:,}" for number in counts.parts.values())
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
    recounted = journal.parts if journal else {}
    for state, number in counts.parts.items():
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
