"""A run's Prometheus metrics: what ``/metrics`` of its view says, under the prefix ``rl_coserve:run_``.

Guarantees: no label has a value per trajectory, prompt or address: labels are ends of the ledger, reasons without numbers,
workers and kinds of faults, each of a bounded number, and limits of histograms, which never change. Names carry base
units. Counters count what this process has read of the log: after a resume they go on, where the run's own step goes back.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from orchestrator.observe.curves import HEADLINES, QUANTITIES
from orchestrator.observe.run_figures import LAG_BUCKETS, UPDATE_BUCKETS, EventFigures
from orchestrator.observe.view.run_state import RunState, is_up

PREFIX = "rl_coserve:run_"

# name -> (type, labels, what it says). docs/seeing.md has the same table; a test compares them.
TABLE: dict[str, tuple[str, tuple[str, ...], str]] = {
    "info": ("gauge", ("name", "mode", "kind"), "1; the run's name, mode, and whether it is real or simulated."),
    "up": ("gauge", (), "1 while the run has not ended."),
    "disk_free_bytes": ("gauge", (), "Bytes that are free in the run folder's file system."),
    "silent_seconds": ("gauge", (), "Seconds without a sign of life of a run that has not ended; 0: there are some."),
    "step": ("gauge", (), "Training steps done."),
    "steps_planned": ("gauge", (), "Training steps asked for."),
    "version": ("gauge", (), "The newest weight version."),
    "seconds": ("gauge", (), "Seconds since the run's start."),
    "step_seconds": ("gauge", (), "Mean wall time of the last five steps."),
    "since_step_seconds": (
        "gauge",
        (),
        "Seconds since the last step ended, or the first batch of this life was asked for.",
    ),
    **{name: ("gauge", (), QUANTITIES[name].about) for name in HEADLINES},
    "tokens_per_second": ("gauge", (), "Generated and trained tokens over the time of the last five steps."),
    "steps": ("counter", (), "Training steps that were made."),
    "trained_tokens": ("counter", (), "Generated tokens that were trained on."),
    "trained_trajectories": ("counter", (), "Trajectories that were trained on."),
    "lag": ("histogram", (), "Lag of trained trajectories, in versions, when their batch was taken."),
    "trajectories_started": ("gauge", (), "Trajectories that were started: the ledger's total."),
    "trajectories": ("gauge", ("end",), "The ledger: trajectories by their end, and those in flight."),
    "waiting": ("gauge", ("reason",), "Trajectories in flight by what they wait for; 16 reasons and the others."),
    "buffered": ("gauge", (), "Scored trajectories that wait for their group."),
    "queue": ("gauge", (), "Turns that wait for a worker."),
    "worker_up": ("gauge", ("worker",), "1 while the worker takes requests."),
    "worker_requests": ("gauge", ("worker",), "Requests at the worker without an answer."),
    "worker_running": ("gauge", ("worker",), "Requests that the worker computes."),
    "worker_waiting": ("gauge", ("worker",), "Requests that wait in the worker."),
    "worker_kv_used_ratio": ("gauge", ("worker",), "Share of the worker's KV blocks in use."),
    "worker_version": ("gauge", ("worker",), "The weight version that the worker holds."),
    "worker_tokens_per_second": ("gauge", ("worker",), "Tokens that the worker generates per second."),
    "worker_lent_pages": ("gauge", ("worker",), "Pages of serving's device that the worker has."),
    "worker_lent_pages_budget": ("gauge", ("worker",), "Pages of serving's device that the worker may have."),
    "worker_slo_slack_seconds": (
        "gauge",
        ("worker", "slo"),
        "Seconds that serving beside the worker has before it misses an SLO; below 0: it is late.",
    ),
    "worker_slo_late_tokens": ("counter", ("worker", "slo"), "Tokens of serving beside the worker beyond their SLO."),
    "weight_update_seconds": ("histogram", (), "Time of a worker's weight update, in which it stands still."),
    "weight_bytes": ("counter", (), "Bytes of weights that workers took up."),
    "incidents": ("counter", ("kind", "cause"), "Faults, recoveries and alarms, by kind and cause."),
    "exchanges": ("counter", ("kind", "reason"), "Servers that were borrowed and returned, by kind and reason."),
    "scaled": ("counter", ("what",), "Engines of the run's own that were added and removed while it ran."),
    "handed_back_requests": ("counter", ("worker",), "Requests that a borrowed server handed back."),
    "handed_back_tokens": ("counter", ("worker",), "Tokens that these had, and kept."),
    "contexts_resent": ("counter", ("worker",), "Contexts that the worker lacked, and was sent whole."),
    "contexts_resent_tokens": ("counter", ("worker",), "Tokens of these."),
    "metric": ("gauge", ("metric",), "The trainer's own figures of the last step: loss, entropy, ess, and so on."),
}
_TRAINER_METRICS = 64  # of a step, at most
# Alarms that are there with 0 before the first: an increase from nothing is none.
ALARMS = ("entropy", "ess", "event_loop", "gradient", "logprob_gap", "policies", "store", "worker")


def exposition(state: RunState, silent: int = 0, free: int = 0) -> bytes:
    """The metrics of now, in Prometheus' text format. ``silent``: seconds without a sign of life; ``free``: bytes on the disk."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Metrics(state, silent, free))
    return generate_latest(registry)


class _Metrics(Collector):
    def __init__(self, state: RunState, silent: int, free: int) -> None:
        self._state, self._outside = state, (("silent_seconds", float(silent)), ("disk_free_bytes", float(free)))

    def collect(self) -> Iterator[Metric]:
        """One family after the other."""
        figures = self._state.figures
        for name, value in (*_plain(figures), *self._outside):
            yield _family(name, [((), value)])
        if figures.start is not None:
            yield _family("info", [((figures.name, figures.mode, figures.kind), 1.0)])
        yield _family("trajectories", [((end,), n) for end, n in figures.ledger.parts.items()])
        yield _family("waiting", [((reason,), n) for reason, n in (figures.live.get("reasons") or {}).items()])
        yield from _workers(self._state.rows())
        incidents = {**{("alarm", what): 0 for what in ALARMS}, **figures.incidents_total}
        yield _family("incidents", [(key, float(n)) for key, n in sorted(incidents.items())])
        yield _family("exchanges", [(key, float(n)) for key, n in sorted(figures.exchanges_total.items())])
        yield _family("scaled", [((what,), float(n)) for what, n in sorted(figures.scaled_total.items())])
        told = sorted(figures.handed_back.items())
        yield _family("handed_back_requests", [((name,), float(counts[0])) for name, counts in told])
        yield _family("handed_back_tokens", [((name,), float(counts[1])) for name, counts in told])
        resent = sorted(figures.contexts_resent.items())
        yield _family("contexts_resent", [((name,), float(counts[0])) for name, counts in resent])
        yield _family("contexts_resent_tokens", [((name,), float(counts[1])) for name, counts in resent])
        last = figures.last_step.metrics if figures.last_step else {}
        yield _family("metric", [((name,), last[name]) for name in sorted(last)[:_TRAINER_METRICS]])
        yield _histogram("lag", LAG_BUCKETS, figures.lags_total, figures.lag_sum)
        yield _histogram("weight_update_seconds", UPDATE_BUCKETS, figures.updates_total, figures.update_seconds)


def _plain(figures: EventFigures) -> Iterator[tuple[str, float]]:
    yield "up", float(not figures.over)
    yield "step", figures.step
    yield "steps_planned", figures.planned_steps
    yield "version", figures.version
    yield "seconds", figures.seconds
    yield "since_step_seconds", figures.seconds_since_step
    if (period := figures.seconds_per_step) is not None:
        yield "step_seconds", period
    for name in HEADLINES:
        if (value := figures.curves[name].last) is not None:
            yield name, value
    if (rate := figures.tokens_per_s) is not None:
        yield "tokens_per_second", rate
    yield "steps", figures.steps_total
    yield "trained_tokens", figures.tokens_total
    yield "trained_trajectories", figures.trajectories_total
    yield "trajectories_started", figures.ledger.started
    yield "buffered", int(figures.live.get("buffered", 0))
    yield "queue", int(figures.live.get("queue", 0))
    yield "weight_bytes", figures.update_bytes


def _workers(rows: list[dict[str, Any]]) -> Iterator[Metric]:
    def each(field: str) -> list[tuple[tuple[str, ...], float]]:
        return [((str(row["name"]),), float(row[field])) for row in rows if row.get(field) is not None]

    yield _family("worker_up", [((str(row["name"]),), float(is_up(row))) for row in rows])
    for name in ("requests", "running", "waiting", "version"):
        yield _family(f"worker_{name}", each(name))
    shares = [
        ((str(row["name"]),), row["kv_used"] / row["kv_capacity"])
        for row in rows
        if "kv_used" in row and row.get("kv_capacity")
    ]
    yield _family("worker_kv_used_ratio", shares)
    yield _family("worker_tokens_per_second", each("tokens_per_s"))
    yield _family("worker_lent_pages", each("pages"))
    yield _family("worker_lent_pages_budget", each("budget"))
    for name, fields in (
        ("worker_slo_slack_seconds", {"ttft": "ttft_slack", "tpot": "tpot_slack", "arriving": "arriving"}),
        ("worker_slo_late_tokens", {"ttft": "late_first", "tpot": "late_next"}),
    ):
        yield _family(name, [((worker, slo), n) for slo, field in fields.items() for (worker,), n in each(field)])


def _family(name: str, values: Sequence[tuple[tuple[str, ...], float]]) -> Metric:
    kind, labels, text = TABLE[name]
    make = CounterMetricFamily if kind == "counter" else GaugeMetricFamily
    family = make(PREFIX + name, text, labels=labels)
    for given, value in values:
        family.add_metric(given, value)
    return family


def _histogram(name: str, limits: Sequence[float], counts: Sequence[int], total: float) -> Metric:
    """``counts``: up to each limit, and beyond the last."""
    names = [*(f"{limit:g}" for limit in limits), "+Inf"]
    buckets = list(zip(names, map(float, itertools.accumulate(counts)), strict=True))
    family = HistogramMetricFamily(PREFIX + name, TABLE[name][2], labels=())
    family.add_metric((), buckets, sum_value=total)
    return family
