"""Engines that are cut anew between steps: what each step was like, what is decided, and carrying it out.

One :class:`Replanner` a run, with the rule of its config: the parallelism planner (:mod:`.step_planner`, RollPacker 4.2) or the
resource manager (:mod:`.degree_planner`, Heddle 6.2). Guarantees: the rule is asked once a step, when its batch is there; every
change is one event ``reshape`` with what it cost; a change that fails leaves the engines as they were, and the rule is told.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from orchestrator.api import Trajectory
from orchestrator.events import EventLog
from orchestrator.policies.parallelism.engine_profile import EngineLayout
from orchestrator.proxy.resize import EngineResizing, Reshaped


@dataclass(frozen=True, slots=True)
class Cut:
    """What the run's engines are to be: of one layout, or of these degrees. ``words``: the same for people."""

    engines: EngineLayout | Sequence[int]
    words: str


class ReplanRule(Protocol):
    """Which cut the next step is to have. Its decisions are its own events."""

    async def decide_cut(self, step: int, seconds: float, trained: Sequence[Trajectory], steps_left: int) -> Cut | None:
        """``seconds``: of the step's rollout, whose batch is ``trained``. None: as it is."""

    def note_change(self, cut: Cut, done: Reshaped) -> dict[str, Any]:
        """It was carried out, or failed (``done.error``). Returns what the event says of it beside what all say."""

    def state(self) -> dict[str, Any] | None:
        """For a checkpoint; None: nothing."""


class Replanner:
    """:meth:`begin_rollout`, :meth:`end_rollout`, :meth:`apply_change`: once a step each, in this order."""

    def __init__(self, rule: ReplanRule, resizing: EngineResizing, events: EventLog, steps: int) -> None:
        self._rule, self._resizing, self._events, self._steps = rule, resizing, events, steps
        self._begun = 0.0
        self._cut: Cut | None = None

    def begin_rollout(self) -> None:
        """The rollout of a step begins, or goes on."""
        self._begun = self._events.time()

    async def end_rollout(self, step: int, trained: Sequence[Trajectory]) -> None:
        """Its batch is complete: decide."""
        seconds = self._events.time() - self._begun
        self._cut = await self._rule.decide_cut(step, seconds, trained, self._steps - step - 1)

    async def apply_change(self, step: int) -> None:
        """Carry out what was decided."""
        cut, self._cut = self._cut, None
        if cut is None:
            return
        with self._events.stage("reshape", step) as note:
            note.waiting_for = f"{cut.words} to start"
            done = await self._resizing.reshape(cut.engines)
        told = {"tp": done.tp, "seconds": round(done.seconds, 6), "moved": done.moved, "error": done.error[:300]}
        self._events.emit("reshape", step=step, **told, **self._rule.note_change(cut, done))

    def state(self) -> dict[str, Any] | None:
        """What a resumed run goes on with."""
        return self._rule.state()
