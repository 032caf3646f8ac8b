"""The resource manager at work: what each step was like, and which degrees engines are to have (Heddle 6.2).

Guarantees: every step ends in one event ``degrees`` that says what was expected and decided. Engines whose degree stays go on
while others are started anew (:mod:`orchestrator.proxy.resize`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from orchestrator.api import Trajectory
from orchestrator.events import EventLog
from orchestrator.parallelism.replanner import Cut
from orchestrator.policies.parallelism.degree_reallocation import (
    DegreeReallocator,
    EndedTrajectory,
    expected_loads,
    format_degrees,
)
from orchestrator.policies.parallelism.engine_profile import EngineLayout
from orchestrator.proxy.resize import EngineResizing, Reshaped


class DegreePlanner:
    """A :class:`~orchestrator.parallelism.replanner.ReplanRule`. ``in_flight``: forecasts of tokens that those in flight have
    before them; ``longest``: tokens of context at which a trajectory ends."""

    def __init__(
        self,
        policy: DegreeReallocator,
        resizing: EngineResizing,
        events: EventLog,
        in_flight: Callable[[], Sequence[float]] = tuple,
        longest: float = math.inf,
    ) -> None:
        policy.degrees = resizing.degrees  # what the workers were started with
        self._policy, self._events = policy, events
        self._in_flight, self._longest = in_flight, longest

    def state(self) -> dict[str, Any]:
        """See the protocol."""
        return self._policy.state()

    async def decide_cut(self, step: int, seconds: float, trained: Sequence[Trajectory], steps_left: int) -> Cut | None:
        """See the protocol."""
        loads = expected_loads([_ended(item) for item in trained], self._in_flight(), len(trained), self._longest)
        before = self._policy.degrees
        found = self._policy.plan_next_step(loads, seconds, steps_left)
        self._events.emit(
            "degrees",
            step=step,
            degrees=list(before),
            next=list(found.degrees),
            seconds=round(seconds, 6),
            gain=round(found.gain, 6),
            cost=round(found.cost, 6),
            makespan=_number(found.makespan),
            present=_number(found.present),
            reason=found.reason,
        )

        return Cut(found.degrees, f"engines of {format_degrees(found.degrees)} devices") if found.changes else None

    def note_change(self, cut: Cut, done: Reshaped) -> dict[str, Any]:
        """See the protocol."""
        assert not isinstance(cut.engines, EngineLayout)
        degrees = tuple(cut.engines)
        if done.error:
            self._policy.reject_change(degrees, done.seconds, done.error)
        else:
            self._policy.confirm_change(degrees, done.seconds)
        return {"degrees": list(degrees)}


def _ended(trajectory: Trajectory) -> EndedTrajectory:
    turns = trajectory.turns
    prompt = len(turns[0].observation_ids) if turns else 0
    heard = sum(len(turn.observation_ids) for turn in turns) - prompt
    gap = sum(turn.environment_seconds for turn in turns)
    return EndedTrajectory(sum(len(turn.action_ids) for turn in turns), prompt, heard, gap)


def _number(value: float) -> float | None:
    """JSON has no infinity."""
    return round(value, 6) if math.isfinite(value) else None
