"""Engines that are cut anew between steps: what each step was like, what is decided, and carrying it out.

One :class:`Replanner` a run, with the rule of its config: the parallelism planner (:class:`StepPlanner`, RollPacker 4.2) or the
resource manager (:class:`DegreePlanner`, Heddle 6.2). Guarantees: the rule is asked once a step, when its batch is there; every
change is one event ``reshape`` with what it cost; a change that fails leaves the engines as they were, and the rule is told.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Protocol

from orchestrator.api import Trajectory, Turn
from orchestrator.events import EventLog
from orchestrator.policies.parallelism.degree_reallocation import (
    DegreeReallocator,
    EndedTrajectory,
    expected_loads,
    format_degrees,
)
from orchestrator.policies.parallelism.engine_profile import EngineLayout
from orchestrator.policies.parallelism.parallelism_planner import ParallelismPlanner, StepLoad
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


class DegreePlanner:
    """The resource manager at work (Heddle 6.2). Guarantees: every step ends in one event ``degrees`` that says what was expected
    and decided. Engines whose degree stays continue while others are started anew (:mod:`orchestrator.proxy.resize`).

    ``in_flight``: forecasts of tokens that those in flight have
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
        return self._policy.state()

    async def decide_cut(self, step: int, seconds: float, trained: Sequence[Trajectory], steps_left: int) -> Cut | None:
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


class StepPlanner:
    """The parallelism planner at work (RollPacker 4.2). Guarantees: every step ends in one event ``plan`` that says what was seen
    and what was decided; a change that failed is not tried again. Where steps leave the profile it is mended by what they
    take, which the events ``profile_scaled`` and ``profile_measured`` say; a whole new one is asked for in an alarm.

    Preemptions for a waiting request that outranks (Heddle 4.2) are no sign of too little memory, and do not count. The engines
    are those of ``resizing``, as they were started; ``kind``: of the round under way (short or long), "" where there are none.
    """

    def __init__(
        self,
        planner: ParallelismPlanner,
        resizing: EngineResizing,
        events: EventLog,
        kind: Callable[[], str] = str,
    ) -> None:
        planner.layout = resizing.layout
        self._kind = kind
        self._planner = planner
        self._resizing = resizing
        self._events = events
        self._counts: dict[str, tuple[int, int]] = {}  # worker -> (life, preemptions in it for lack of memory)

    async def decide_cut(self, step: int, seconds: float, trained: Sequence[Trajectory], steps_left: int) -> Cut | None:
        load = self._load(*await self._counted(), seconds, trained)
        before, plan = self._planner.layout, self._planner.plan_next_step(load, steps_left)
        self._events.emit(
            "plan",
            step=step,
            tp=before.tp,
            next_tp=plan.layout.tp,
            ep=before.ep,
            next_ep=plan.layout.ep,
            preemptions=load.preemptions,
            round=load.kind,
            imbalance=round(load.imbalance, 6),
            seconds=round(seconds, 6),
            reason=plan.reason,
            gain=None if plan.gain is None else round(plan.gain, 6),
            cost=round(plan.cost, 6),
            correction=round(self._planner.correction, 6),
        )
        if plan.measured is not None:
            point = {name: round(getattr(plan.measured, name), 6) for name in ("batch", "context", "seconds")}
            self._events.emit("profile_measured", step=step, tp=before.tp, **point)
        if plan.reprofile is not None:
            found = f"steps with {plan.reprofile} take longer or shorter than the profile says"
            if plan.measured is not None:
                found = f"steps with {plan.reprofile} are outside the profile; their times were added to it"
            if plan.scaled is not None:
                total = self._planner.correction
                found = f"steps with {plan.reprofile} take {plan.scaled:.3g} times what the profile says; it is scaled by that"
                self._events.emit("profile_scaled", step=step, tp=before.tp, factor=plan.scaled, total=total)
            detail = f"{found}: measure again with `rl-coserve profile`, of a larger grid or on the idle machine"
            self._events.emit("alarm", what="profile", detail=detail)
        return Cut(plan.layout, f"engines with {plan.layout}") if plan.changes else None

    def note_change(self, cut: Cut, done: Reshaped) -> dict[str, Any]:
        assert isinstance(cut.engines, EngineLayout)
        if done.error:
            self._planner.reject_change(cut.engines, done.seconds, done.error)
        else:
            self._planner.confirm_change(cut.engines, done.seconds)
        return {"ep": done.ep}

    def state(self) -> dict[str, Any]:
        return self._planner.state()

    async def _counted(self) -> tuple[int, float]:
        """Preemptions for lack of memory since the last look, where a worker that was started anew begins at 0; the workers' mean
        imbalance now. Servers do not count: nobody cuts them, and their serving neighbours take their memory."""
        lives = {state.worker.name: state.lives for state in self._resizing.proxy.states if not state.borrowed}
        total, imbalances = 0, []
        for name, stats in await self._resizing.proxy.stats():
            if name not in lives:
                continue
            life, before = self._counts.get(name, (lives[name], 0))
            pressed = stats.preemptions - stats.outranked
            total += pressed - (before if life == lives[name] else 0)
            self._counts[name] = (lives[name], pressed)
            imbalances.append(stats.expert_imbalance)
        return total, fmean(imbalances) if imbalances else 1.0

    def _load(self, preemptions: int, imbalance: float, seconds: float, trained: Sequence[Trajectory]) -> StepLoad:
        turns = [(before, turn) for item in trained for before, turn in _contexts(item)]
        tokens = sum(len(turn.action_ids) for _, turn in turns)
        if not tokens or seconds <= 0:
            return StepLoad(preemptions, seconds, imbalance=imbalance, kind=self._kind())
        prompt = sum(before for before, _ in turns) / len(turns)
        busy = sum(turn.generate_seconds for _, turn in turns)  # request-seconds
        batch = max(1.0, busy / seconds / max(1, self._resizing.engines))
        return StepLoad(
            preemptions,
            seconds,
            [len(turn.action_ids) for _, turn in turns],
            round(prompt),
            token_seconds=self._token_seconds(busy, len(turns), prompt, tokens, imbalance),
            batch=batch,
            context=prompt + tokens / len(turns) / 2,
            imbalance=imbalance,
            kind=self._kind(),
        )

    def _token_seconds(self, busy: float, turns: int, prompt: float, tokens: int, imbalance: float) -> float:
        """Between two tokens, prefills left out as the profile has them; 0.0 without one."""
        profile, layout = self._planner.profile, self._planner.layout
        if profile is None:
            return 0.0
        return max(0.0, busy - turns * profile.prefill_seconds(prompt, 1, layout, min(imbalance, layout.ep))) / tokens


def _contexts(trajectory: Trajectory) -> Iterator[tuple[int, Turn]]:
    """(tokens that stood before the response, turn)"""
    before = 0
    for turn in trajectory.turns:
        if turn.context is not None:
            before = len(turn.context.token_ids)
        before += len(turn.observation_ids)
        yield before, turn
        before += len(turn.action_ids)
