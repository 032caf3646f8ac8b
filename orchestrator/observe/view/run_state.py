"""What a run looks like now, folded from its events one by one, and from what is under way.

Guarantees: pure; the order of events is all that counts, so a finished run that is read at once looks as it did when its last
event was written; memory and what :meth:`RunState.shown` returns are bounded, however long the run is; of everything that is
shown all is in the events or in ``live.json``. Times are seconds since the run's start.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from orchestrator.events import time_of
from orchestrator.ledger import END_STATES
from orchestrator.observe.report.charts import HEALTH
from orchestrator.observe.report.run_log import MALFORMED, RunLog, Stage, Start, Step, take_event
from orchestrator.observe.report.timeline import LANES, clip, lanes

STAGES = 400  # kept for the timeline
WINDOW_STEPS = 4  # that it shows
POINTS = 400  # of a curve that are shown; twice as many are kept
INCIDENTS = 40
WORKERS = 1024  # whose last words are kept
CAUSES = 50  # kinds of faults that are counted apart
LEARNING = (  # of the trainer's figures, those that are shown live
    "entropy", "groups_silent_share", "advantage_std", "grad_norm", "clip_fraction", "approx_kl", "reference_kl", "tis_p01",
    "tis_p99", "tis_capped", "logprob_gap_mean", "response_tokens_mean", "truncated_share", "prompts_repeated",
)  # fmt: skip
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
            self._points = [point for point in self._points if (point[0] or 0) < step]
        self._last = [step, *(number(value) for value in values)]
        if self._seen % self._every == 0:
            self._points.append(self._last)
        self._seen += 1
        if len(self._points) > 2 * POINTS:
            self._points = self._points[::2]
            self._every *= 2

    def shown(self) -> list[list[float | None]]:
        """At most ``POINTS`` and the last."""
        stride = -(-len(self._points) // POINTS) or 1
        found = self._points[::stride]
        return found if self._last is None or (found and found[-1] is self._last) else [*found, self._last]


class RunState:
    """Of one run; see the module. The totals are for metrics: they only grow while a run is followed."""

    def __init__(self, folder: Path) -> None:
        # The report's own reading of stages and steps, of which only the newest are kept.
        self._log = RunLog(folder=folder, config={}, machine={}, versions={})
        self._stages: deque[Stage] = deque(maxlen=STAGES)
        self._steps: deque[Step] = deque(maxlen=WINDOW_STEPS + 2)
        self._incidents: deque[dict[str, Any]] = deque(maxlen=INCIDENTS)
        self.start: Start | None = None
        self.status, self.reason = "unfinished", ""
        self.t = 0.0
        self.step = 0
        self.version = 0
        self.reward, self.success, self.entropy = Curve(), Curve(), Curve()
        self.ledger: dict[str, Any] = {}
        self.lag: dict[int, int] = {}  # of the last batch
        self.workers: dict[str, dict[str, Any]] = {}  # as of the last weight update
        self.live: dict[str, Any] = {}
        self.pool: dict[str, Any] = {}
        self.last_step: dict[str, Any] = {}
        self.last_evaluation: dict[str, Any] = {}
        # totals, for metrics
        self.steps_seen = self.tokens_seen = self.trajectories_seen = 0
        self.lag_seen: dict[int, int] = {}
        self.faults: dict[tuple[str, str], int] = {}
        self.exchanges: dict[tuple[str, str], int] = {}  # (borrowed or returned, reason)
        self.handed_back: dict[str, list[int]] = {}  # server -> requests, tokens that they kept
        self.updates: list[int] = [0] * (len(UPDATE_BUCKETS) + 1)
        self.update_seconds = 0.0
        self.update_bytes = 0
        self.unreadable = 0  # events that were none

    def take(self, event: Mapping[str, Any]) -> None:
        """One more event, in the order of the log. One that lacks a field, or holds something else there, is only counted."""
        try:
            self._take(event)
        except MALFORMED:
            self.unreadable += 1
        else:
            self.t = max(self.t, time_of(event), time_of(event, "end"))

    def _take(self, event: Mapping[str, Any]) -> None:
        match event["kind"]:
            case "run_start":
                self._take_start(dict(event))
            case "stage":
                self._stages.append(self._parsed(event).stages.pop())
            case "step":
                self._take_step(event)
            case "evaluation":
                found = self._parsed(event).evaluations.pop()
                self.last_evaluation = dict(event)
                self.success.add(found.step, found.value, found.low, found.high)
            case "worker":
                name = self._parsed(event).workers.pop().name
                if name in self.workers or len(self.workers) < WORKERS:
                    self.workers[name] = _scalars(event)
            case "update":
                update = self._parsed(event).updates.pop()
                self._take_update(update.seconds, update.bytes)
            case "environments":
                self._parsed(event).pool.clear()
                self.pool = _scalars(event)
            case "alarm" | "fault" | "recovered":
                self._take_incident(event)
            case "borrowed" | "returned" | "handed_back":
                self._take_borrowing(self._parsed(event).borrowing.pop())
            case "run_end":
                self._parsed(event)
                self.status, self.reason = str(event["status"]), str(event.get("reason", ""))
                self.ledger = dict(event.get("ledger") or self.ledger)

    def take_live(self, record: dict[str, Any]) -> None:
        """What is under way."""
        self.live = record
        self.t = max(self.t, time_of(record))

    def _parsed(self, event: Mapping[str, Any]) -> RunLog:
        take_event(self._log, dict(event))
        return self._log

    def _take_start(self, event: dict[str, Any]) -> None:
        self.start = self._parsed(event).starts.pop()
        self._log.starts.clear()
        self.status, self.reason = "unfinished", ""
        if (resumed := self.start.resumed_from) is not None:
            self._steps = deque((step for step in self._steps if step.number <= resumed), self._steps.maxlen)
            self.step = min(self.step, resumed)

    def _take_step(self, event: Mapping[str, Any]) -> None:
        self._log.steps = []
        step = self._parsed(event).steps.pop()
        self._steps.append(step)
        self.step, self.version = step.number, step.version
        self.lag = dict(step.lag)
        self.ledger = dict(event.get("ledger") or {})
        self.last_step = dict(event)
        self.reward.add(step.number, step.reward_mean, step.success)
        if "entropy" in step.metrics:
            self.entropy.add(step.number, step.metrics["entropy"])
        self.steps_seen += 1
        self.tokens_seen += step.tokens
        self.trajectories_seen += step.trained
        for lag, count in step.lag.items():
            self.lag_seen[lag] = self.lag_seen.get(lag, 0) + count

    def _take_update(self, seconds: float, size: int) -> None:
        self.update_seconds += seconds
        self.update_bytes += size
        place = next((index for index, limit in enumerate(UPDATE_BUCKETS) if seconds <= limit), len(UPDATE_BUCKETS))
        self.updates[place] += 1

    def _take_incident(self, event: Mapping[str, Any]) -> None:
        row = {"kind": str(event["kind"]), "t": time_of(event)} | {
            name: event.get(name, "") for name in ("what", "detail")
        }
        self._incidents.appendleft({**row, "what": str(row["what"])[:120], "detail": str(row["detail"])[:300]})
        key = str(event["kind"]), str(event.get("cause") or event.get("what", ""))[:60]
        if key not in self.faults and len(self.faults) >= CAUSES:
            key = str(event["kind"]), "other"
        self.faults[key] = self.faults.get(key, 0) + 1

    def _take_borrowing(self, event: Mapping[str, Any]) -> None:
        kind, name = event["kind"], event["worker"]
        if kind == "handed_back":
            if name in self.handed_back or len(self.handed_back) < WORKERS:
                counts = self.handed_back.setdefault(name, [0, 0])
                counts[0] += int(event.get("requests", 0))
                counts[1] += int(event.get("tokens", 0))
            return
        key = kind, event["reason"][:60]
        if key not in self.exchanges and len(self.exchanges) >= CAUSES:
            key = kind, "other"
        self.exchanges[key] = self.exchanges.get(key, 0) + 1
        row = {"kind": kind, "t": event["t"], "what": name[:120], "detail": event["reason"][:300]}
        self._incidents.appendleft(row)

    # -- what is shown -----------------------------------------------------------------------------------------------

    @property
    def over(self) -> bool:
        """Whether the run has ended."""
        return self.status != "unfinished"

    @property
    def tokens_per_s(self) -> float | None:
        """Generated and trained tokens over the time of the last steps; None before the second."""
        steps = list(self._steps)
        if len(steps) < 2 or steps[-1].t <= steps[0].t:
            return None
        return sum(step.tokens for step in steps[1:]) / (steps[-1].t - steps[0].t)

    def counts(self) -> dict[str, int]:
        """The ledger, by end, newest first: while the run goes on what is under way knows it better than the last step."""
        known = self.ledger if self.over else self.live.get("ledger") or self.ledger
        return {name: int(known.get(name, 0)) for name in ("started", *END_STATES, "in_flight")}

    def rows(self) -> list[dict[str, Any]]:
        """The workers: as they are, or as they were at the last weight update."""
        live = [dict(row) for row in self.live.get("workers") or []]
        known = {str(row.get("name")) for row in live}
        found = live + [row for name, row in sorted(self.workers.items()) if name not in known][:64]
        told = self.handed_back
        return [row | {"handed_back": told[row["name"]][0]} if row.get("name") in told else row for row in found]

    def shown(self) -> dict[str, Any]:
        """All that a view draws, as JSON without NaN."""
        start, live = self.start, {} if self.over else self.live
        return {
            "run": {
                "name": start.name if start else self._log.folder.name,
                "mode": start.mode if start else "",
                "alpha": start.alpha if start else 0,
                "steps": start.steps if start else 0,
                "kind": "simulated" if start and start.simulated else "real",
                "started": start.started if start else "",
                "resumed_from": start.resumed_from if start else None,
                "status": self.status,
                "reason": self.reason[:500],
            },
            "t": round(self.t, 3),
            "step": self.step,
            "version": max(self.version, int(live.get("version", -1))),
            "tokens_per_s": number(self.tokens_per_s),
            "waiting_for": str(live.get("waiting_for", "")),
            "open": [f"{name}" for name, _, _ in live.get("stages") or []][:8],
            "in_flight": int(live.get("in_flight", 0)),
            "buffered": int(live.get("buffered", 0)),
            "queue": int(live.get("queue", 0)),
            "reasons": dict(live.get("reasons") or {}),
            "trajectories": list(live.get("trajectories") or []),
            "workers": self.rows(),
            "pool": {name: self.pool[name] for name in ("size", "busy", "ready", "waiting") if name in self.pool},
            "timeline": self._timeline(live),
            "reward": self.reward.shown(),
            "success": self.success.shown(),
            "entropy": self.entropy.shown(),
            "learning": self._learning(),
            "lag": {str(lag): count for lag, count in sorted(self.lag.items())},
            "ledger": self.counts(),
            "incidents": list(self._incidents),
        }

    def _learning(self) -> list[list[Any]]:
        """What people look at first, of the last step: [what it is, what to look for, value]."""
        last = self._steps[-1].metrics if self._steps else {}
        return [[*HEALTH[name][:2], number(last[name])] for name in LEARNING if name in last]

    def _timeline(self, live: Mapping[str, Any]) -> dict[str, Any]:
        """The lanes of the report over the last steps and what is under way: [state, start, end, note]."""
        stages = list(self._stages)
        for name, step, begun in live.get("stages") or []:
            stages.append(Stage(str(name), int(step), float(begun), max(self.t, float(begun)), "under way"))
        steps = list(self._steps)[-WINDOW_STEPS - 1 :]
        begin = steps[0].t if len(steps) > 1 else min((stage.start for stage in stages[-40:]), default=0.0)
        end = max((stage.end for stage in stages), default=self.t)
        near = [stage for stage in stages if stage.end > begin]
        log = RunLog(self._log.folder, {}, {}, {}, starts=[self.start] if self.start else [], stages=near)
        found = lanes(log)
        return {
            "begin": round(begin, 6),
            "end": round(end, 6),
            "steps": [[step.number, round(step.t, 3)] for step in steps if step.t > begin],
            "lanes": {
                lane: [
                    [piece.state, round(piece.start, 6), round(piece.end, 6), piece.note[:120]]
                    for piece in clip(found[lane], begin, end)[-STAGES:]
                ]
                for lane in LANES
            },
        }


def _scalars(event: Mapping[str, Any]) -> dict[str, Any]:
    """What a row of a table can show."""
    return {
        name: value
        for name, value in event.items()
        if name not in ("kind", "t", "step")
        and (isinstance(value, str | bool) or (isinstance(value, int | float) and math.isfinite(value)))
    }


def number(value: float | None) -> float | None:
    """Six digits, and null for what JSON cannot say."""
    return round(float(value), 6) if value is not None and math.isfinite(value) else None
