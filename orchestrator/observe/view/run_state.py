"""What a view draws of a run: its figures (:mod:`orchestrator.observe.run_figures`) as one JSON object.

Guarantees: pure; what :meth:`RunState.shown` returns is bounded, however long the run is; of everything that is shown all is in
the events or in ``live.json``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from orchestrator.observe.curves import QUANTITIES, TOLD
from orchestrator.observe.event_records import ENDS, Stage
from orchestrator.observe.report.timeline import LANES, STATES, clip, lanes_of
from orchestrator.observe.run_figures import STAGES, EventFigures, number

_WORKERS = 128  # that are drawn one by one


def is_up(row: Mapping[str, Any]) -> bool:
    """Whether a worker takes requests, as its row says."""
    return bool(row.get("state", "up") == "up")


class RunState:
    """Of one run; see the module."""

    def __init__(self, folder: Path) -> None:
        self.figures = EventFigures(folder.name)
        self.unreadable = 0  # events that were none

    def take(self, event: Mapping[str, Any]) -> None:
        """One more event, in the order of the log. One that lacks a field, or holds something else there, is only counted."""
        try:
            self.figures.take(event)
        except ValueError:
            self.unreadable += 1

    def rows(self) -> list[dict[str, Any]]:
        """The workers: as they are, or as they were at the last weight update."""
        figures = self.figures
        live = [dict(row) for row in figures.live.get("workers") or []]
        known = {str(row.get("name")) for row in live}
        before = [worker for name, worker in sorted(figures.workers.items()) if name not in known][:64]
        found = live + [asdict(worker) | {"tokens_per_s": number(worker.tokens_per_s) or 0.0} for worker in before]
        told = figures.handed_back
        return [row | {"handed_back": told[row["name"]][0]} if row.get("name") in told else row for row in found]

    def shown(self) -> dict[str, Any]:
        """All that a view draws, as JSON without NaN."""
        figures, live, pool = self.figures, self.figures.live, self.figures.pool
        start, workers = figures.start, self.rows()
        workers.sort(key=is_up)
        return {
            "run": {
                **{name: getattr(figures, name) for name in ("name", "mode", "alpha", "kind", "status")},
                "steps": figures.planned_steps,
                "started": start.started if start else "",
                "resumed_from": start.resumed_from if start else None,
                "rolled_back": start.rolled_back if start else 0,
                "reason": figures.reason[:500],
            },
            "t": round(figures.seconds, 3),
            "step": figures.step,
            "version": figures.version,
            "tokens_per_s": number(figures.tokens_per_s),
            "waiting_for": str(live.get("waiting_for", "")),
            "open": [str(name) for name, _, _ in live.get("stages") or []][:8],
            **{name: int(live.get(name, 0)) for name in ("in_flight", "buffered", "queue")},
            "reasons": dict(live.get("reasons") or {}),
            "trajectories": list(live.get("trajectories") or []),
            "workers": workers[:_WORKERS],
            "workers_up": sum(map(is_up, workers)),
            "workers_known": len(workers),
            "pool": {name: getattr(pool, name) for name in ("size", "busy", "ready", "waiting")} if pool else {},
            "timeline": self._timeline(live),
            "curves": [
                {
                    "name": name,
                    "title": QUANTITIES[name].title,
                    "label": QUANTITIES[name].label,
                    "points": curve.shown(),
                }
                for name, curve in figures.curves.items()
            ],
            "learning": self._learning(),
            "lag": {str(lag): count for lag, count in figures.lag.items()},
            "ledger": {"started": figures.ledger.started, **figures.ledger.parts},
            "ends": [[*ENDS[end], count] for end, count in figures.ledger.parts.items()],
            "incidents": [
                {name: getattr(row, name) for name in ("kind", "t", "what", "detail")} for row in figures.incidents
            ],
        }

    def _learning(self) -> list[list[Any]]:
        """What people look at first, of the last step: [what it is, what to look for, value]."""
        last = step.metrics if (step := self.figures.last_step) else {}
        return [[QUANTITIES[name].title, QUANTITIES[name].about, number(last[name])] for name in TOLD if name in last]

    def _timeline(self, live: Mapping[str, Any]) -> dict[str, Any]:
        """The lanes of the report over the last steps and what is under way: [state, start, end, note]."""
        figures = self.figures
        stages = list(figures.stages)
        for name, step, begun in live.get("stages") or []:
            stages.append(Stage(str(name), int(step), float(begun), max(figures.seconds, float(begun)), "under way"))
        steps = list(figures.steps)
        begin = steps[0].t if len(steps) > 1 else min((stage.start for stage in stages[-40:]), default=0.0)
        end = max((stage.end for stage in stages), default=figures.seconds)
        near = [stage for stage in stages if stage.end > begin]
        found = lanes_of(near, figures.mode, [figures.start.t] if figures.start else [])
        return {
            "states": STATES,
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
