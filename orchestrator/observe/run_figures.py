"""The figures of a run, folded from its events one by one and from what is under way: the one data model of all that shows a run
(progress line, ``top``, live page, runs page, metrics, report), so that a figure has one name, one meaning and one value.

Guarantees: the order of events is all that counts: a run that is read at once has the figures of one that was followed; memory
is bounded, however long the run is (a report keeps the records besides, :mod:`orchestrator.observe.report.run_log`). Times are
seconds since the run's start.

* ``tokens_per_s``: generated and trained tokens over the wall time of the last ``RATE_STEPS`` training steps: weight updates,
  evaluations and waiting included, startups not. ``seconds_per_step``: the mean of that time.
* ``lag``, and ``reward`` and ``success`` of ``curves``: of the last batch that was trained, and of the last evaluation.
* ``ledger``: as the run's end, its last step or what is under way said last.
* Totals (``*_total``) only grow while a run is followed: after a resume they count again what was rolled back.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from orchestrator.events import time_of
from orchestrator.observe.curves import DRAWN, QUANTITIES
from orchestrator.observe.event_records import (
    Borrowing,
    End,
    Evaluation,
    Incident,
    LedgerCounts,
    PoolSnapshot,
    ScaledEngine,
    Stage,
    Start,
    Step,
    Update,
    WorkerSnapshot,
    record_of,
)

RATE_STEPS = 5  # that the figures of now are over
STAGES = 400  # that are kept
POINTS = 400  # of a curve that are shown; twice as many are kept
INCIDENTS = 40  # that are kept
WORKERS = 1024  # whose last words are kept
CAUSES = 50  # kinds of faults that are counted apart
LAG_BUCKETS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128)  # versions; `areal` has no bound of lag
UPDATE_BUCKETS = (0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 60.0, 300.0)  # seconds


class Curve:
    """Points (step, values...) of one run, thinned evenly when they become too many; the newest is always there."""

    def __init__(self) -> None:
        self._points: list[list[float | None]] = []
        self._every = 1
        self._seen = 0
        self._last: list[float | None] | None = None

    def add(self, step: int, *values: float) -> None:
        """One more, or again what lies after a checkpoint that the run went back to."""
        if self._last is not None and step <= (self._last[0] or 0):
            self.forget_from(step)
        self._last = [step, *(number(value) for value in values)]
        if self._seen % self._every == 0:
            self._points.append(self._last)
        self._seen += 1
        if len(self._points) > 2 * POINTS:
            self._points = self._points[::2]
            self._every *= 2

    def forget_from(self, step: int) -> None:
        """What lies at or beyond this step was rolled back."""
        self._points = [point for point in self._points if (point[0] or 0) < step]
        if self._last is not None and (self._last[0] or 0) >= step:
            self._last = self._points[-1] if self._points else None

    def shown(self) -> list[list[float | None]]:
        """At most ``POINTS`` and the last."""
        stride = -(-len(self._points) // POINTS) or 1
        found = self._points[::stride]
        return found if self._last is None or (found and found[-1] is self._last) else [*found, self._last]

    @property
    def last(self) -> float | None:
        """The first value of the newest point."""
        return self._last[1] if self._last is not None else None


class EventFigures:
    """Of one run; see the module. ``name``: until the run says its own."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.start: Start | None = None  # the newest
        self.simulated = False
        self.status, self.reason = "unfinished", ""
        self.seconds = 0.0
        self.step = 0  # steps done
        self.steps: deque[Step] = deque(maxlen=RATE_STEPS)
        self.stages: deque[Stage] = deque(maxlen=STAGES)
        self.curves = {name: Curve() for name in DRAWN}
        self.last_evaluation: Evaluation | None = None
        self.ledger = LedgerCounts()
        self.pool: PoolSnapshot | None = None
        self.workers: dict[str, WorkerSnapshot] = {}  # as of the last weight update
        self.incidents: deque[Incident] = deque(maxlen=INCIDENTS)  # the newest first
        self.live: Mapping[str, Any] = {}  # what is under way: empty when the run has ended
        self.tokens_total = self.trajectories_total = self.steps_total = 0
        self.lags_total = [0] * (len(LAG_BUCKETS) + 1)  # trajectories, by their lag
        self.lag_sum = 0
        self.incidents_total: dict[tuple[str, str], int] = {}  # by kind and cause
        self.exchanges_total: dict[tuple[str, str], int] = {}  # by kind (borrowed or returned) and reason
        self.handed_back: dict[str, list[int]] = {}  # server -> requests, tokens that they kept
        self.contexts_resent: dict[str, list[int]] = {}  # worker -> contexts that it lacked, their tokens
        self.scaled_total: Counter[str] = Counter()  # engines that were added, removed
        self.updates_total = [0] * (len(UPDATE_BUCKETS) + 1)  # by how long they took
        self.update_seconds = 0.0
        self.update_bytes = 0
        self._version = 0
        self._begun = 0.0  # from when on the next step is timed: the step before it, or the first batch of this life
        self._asked = False  # for a batch, in this life

    def take(self, event: Mapping[str, Any]) -> Any:
        """One more event, in the order of the log. Returns its record (:func:`orchestrator.observe.event_records.record_of`), of
        a step with its period. Raises ValueError for one that lacks a field or holds something else there: nothing is taken."""
        record = record_of(event)
        match record:
            case Start():
                self._take_start(record)
            case Stage():
                self.stages.append(record)
                if record.name == "get_batch" and not self._asked:
                    self._begun, self._asked = max(self._begun, record.start), True
            case Step():
                record = self._take_step(record)
            case Evaluation():
                self.last_evaluation = record
                self._draw(record, record.step)
            case WorkerSnapshot():
                if record.name in self.workers or len(self.workers) < WORKERS:
                    self.workers[record.name] = record
            case Update():
                self.update_seconds += record.seconds
                self.update_bytes += record.bytes
                self.updates_total[bisect_left(UPDATE_BUCKETS, record.seconds)] += 1
            case PoolSnapshot():
                self.pool = record
            case Incident():
                self._note_incident(record)
                _count(self.incidents_total, record.kind, record.cause or record.what)
            case Borrowing():
                self._take_borrowing(record)
            case ScaledEngine():
                self.scaled_total[record.what] += 1
                self._note_incident(Incident("scaled", record.t, record.worker, "", record.words))
            case End():
                self.status, self.reason = record.status, record.reason
                self.ledger, self.live = record.ledger or self.ledger, {}
        self.seconds = max(self.seconds, time_of(event), time_of(event, "end"))
        return record

    def take_live(self, record: Mapping[str, Any]) -> None:
        """What is under way; of a run that has ended, nothing is."""
        if self.over:
            return
        self.live = record
        self.seconds = max(self.seconds, time_of(record))
        if counted := record.get("ledger"):
            plain = {name: count for name, count in counted.items() if not name.endswith("_by_cause")}
            self.ledger = LedgerCounts.of(plain)

    def _take_start(self, start: Start) -> None:
        self.start, self.live = start, {}
        self.simulated |= start.simulated
        self.status, self.reason = "unfinished", ""
        self._begun, self._asked = start.t, False
        if (
            resumed := start.resumed_from
        ) is not None:  # the checkpoint holds so many steps; the others are rolled back
            self.steps = deque((step for step in self.steps if step.number <= resumed), RATE_STEPS)
            self.step = min(self.step, resumed)
            self._version = self.steps[-1].version if self.steps else min(self._version, resumed)
            for curve in self.curves.values():
                curve.forget_from(resumed + 1)
            if self.last_evaluation is not None and self.last_evaluation.step > resumed:
                self.last_evaluation = None

    def _take_step(self, found: Step) -> Step:
        step = replace(found, period=found.t - self._begun)
        self._begun, self._asked = step.t, True
        self.steps.append(step)
        self.step, self._version, self.ledger = step.number, step.version, step.ledger
        self._draw(step, step.number)
        self.steps_total += 1
        self.tokens_total += step.tokens
        self.trajectories_total += step.trained
        for lag, count in step.lag.items():
            self.lags_total[bisect_left(LAG_BUCKETS, lag)] += count
            self.lag_sum += lag * count
        return step

    def _draw(self, record: Step | Evaluation, step: int) -> None:
        for name, curve in self.curves.items():
            if values := QUANTITIES[name].values(name, record):
                curve.add(step, *values)

    def _take_borrowing(self, event: Borrowing) -> None:
        counted = {"handed_back": self.handed_back, "contexts_resent": self.contexts_resent}.get(event.kind)
        if counted is not None:
            if event.worker in counted or len(counted) < WORKERS:
                requests, tokens = counted.get(event.worker, (0, 0))
                counted[event.worker] = [requests + event.requests, tokens + event.tokens]
            return
        _count(self.exchanges_total, event.kind, event.reason)
        self._note_incident(Incident(event.kind, event.t, event.worker, "", event.reason))

    def _note_incident(self, incident: Incident) -> None:
        self.incidents.appendleft(replace(incident, what=incident.what[:120], detail=incident.detail[:300]))

    # -- figures -------------------------------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """The run's name."""
        return self.start.name if self.start else self._name

    @property
    def mode(self) -> str:
        """One of :mod:`orchestrator.policies.batching.coordination_modes`; "" until the run has said it."""
        return self.start.mode if self.start else ""

    @property
    def alpha(self) -> int:
        """The staleness bound."""
        return self.start.alpha if self.start else 0

    @property
    def planned_steps(self) -> int:
        """How many training steps were asked for."""
        return self.start.steps if self.start else 0

    @property
    def kind(self) -> str:
        """How the figures were obtained."""
        return "simulated" if self.simulated else "real"

    @property
    def over(self) -> bool:
        """Whether the run has ended."""
        return self.status != "unfinished"

    @property
    def version(self) -> int:
        """The newest weight version."""
        return max(self._version, int(self.live.get("version", -1)))

    @property
    def last_step(self) -> Step | None:
        """The newest one that the run consists of."""
        return self.steps[-1] if self.steps else None

    @property
    def lag(self) -> Mapping[int, int]:
        """Trajectories of the last batch by lag."""
        return self.steps[-1].lag if self.steps else {}

    @property
    def tokens_per_s(self) -> float | None:
        """See the module; None before the first step."""
        return rate_of([step.tokens for step in self.steps], self.steps)

    @property
    def seconds_per_step(self) -> float | None:
        """See the module; None before the first step."""
        return sum(step.period for step in self.steps) / len(self.steps) if self.steps else None

    @property
    def seconds_since_step(self) -> float:
        """Since the last step, or what the next one is timed from."""
        return max(0.0, self.seconds - self._begun)

    def incident_count(self, *kinds: str) -> int:
        """How many there were of these kinds: alarm, fault, recovered."""
        return sum(count for (kind, _), count in self.incidents_total.items() if kind in kinds)


def rate_of(amounts: Sequence[float], steps: Sequence[Step]) -> float | None:
    """What steps made, per second of their wall time; None without any."""
    seconds = sum(step.period for step in steps)
    return sum(amounts) / seconds if seconds > 0 else None


def lag_mean(lags: Mapping[int, int]) -> float | None:
    """In versions, of trajectories by lag; None without any."""
    total = sum(lags.values())
    return sum(lag * count for lag, count in lags.items()) / total if total else None


def lag_words(lags: Mapping[Any, int]) -> str:
    """``0: 75 %, 1: 25 %`` of the trajectories; "" without any."""
    total = sum(lags.values())
    return ", ".join(f"{lag}: {100 * count / total:.0f} %" for lag, count in lags.items())


def number(value: float | None) -> float | None:
    """Six digits, and null for what JSON cannot say."""
    return round(float(value), 6) if value is not None and math.isfinite(value) else None


def _count(totals: dict[tuple[str, str], int], kind: str, cause: str) -> None:
    key = kind, cause[:60]
    if key not in totals and len(totals) >= CAUSES:
        key = kind, "other"
    totals[key] = totals.get(key, 0) + 1
