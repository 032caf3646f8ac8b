"""The parallelism planner at work: what each step was like, and which layout the engines are to have (RollPacker 4.2).

Guarantees: every step ends in one event ``plan`` that says what was seen and what was decided; a change that failed is not tried
again. Where steps leave the
profile it is mended by what they take, which the events ``profile_scaled`` and ``profile_measured`` say; a whole new one is asked
for in an alarm.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import fmean
from typing import Any

from orchestrator.api import Trajectory, Turn
from orchestrator.events import EventLog
from orchestrator.parallelism.replanner import Cut
from orchestrator.policies.parallelism.engine_profile import EngineLayout
from orchestrator.policies.parallelism.parallelism_planner import ParallelismPlanner, StepLoad
from orchestrator.proxy.resize import EngineResizing, Reshaped


class StepPlanner:
    """A :class:`~orchestrator.parallelism.replanner.ReplanRule`. The engines are those of ``resizing``, as they were started."""

    def __init__(self, planner: ParallelismPlanner, resizing: EngineResizing, events: EventLog) -> None:
        planner.layout = resizing.layout
        self._planner = planner
        self._resizing = resizing
        self._events = events
        self._counts: dict[str, tuple[int, int]] = {}  # worker -> (life, preemptions in it)

    async def decide_cut(self, step: int, seconds: float, trained: Sequence[Trajectory], steps_left: int) -> Cut | None:
        """See the protocol."""
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
            found = f"steps with {plan.reprofile} do not take what the profile says"
            if plan.measured is not None:
                found = f"steps with {plan.reprofile} lie outside of the profile; what they took was added to it"
            if plan.scaled is not None:
                total = self._planner.correction
                found = f"steps with {plan.reprofile} take {plan.scaled:.3g} times what the profile says; it is scaled by that"
                self._events.emit("profile_scaled", step=step, tp=before.tp, factor=plan.scaled, total=total)
            detail = f"{found}: measure again with `rl-coserve profile`, of a larger grid or on the idle machine"
            self._events.emit("alarm", what="profile", detail=detail)

        return Cut(plan.layout, f"engines with {plan.layout}") if plan.changes else None

    def note_change(self, cut: Cut, done: Reshaped) -> dict[str, Any]:
        """See the protocol."""
        assert isinstance(cut.engines, EngineLayout)
        if done.error:
            self._planner.reject_change(cut.engines, done.seconds, done.error)
        else:
            self._planner.confirm_change(cut.engines, done.seconds)
        return {"ep": done.ep}

    def state(self) -> None:
        """See the protocol."""

    async def _counted(self) -> tuple[int, float]:
        """Preemptions since the last look, where a worker that was started anew begins at 0; the workers' mean imbalance now."""
        lives = {state.worker.name: state.lives for state in self._resizing.proxy.states}
        total, imbalances = 0, []
        for name, stats in await self._resizing.proxy.stats():
            life, before = self._counts.get(name, (lives[name], 0))
            total += stats.preemptions - (before if life == lives[name] else 0)
            self._counts[name] = (lives[name], stats.preemptions)
            imbalances.append(stats.expert_imbalance)
        return total, fmean(imbalances) if imbalances else 1.0

    def _load(self, preemptions: int, imbalance: float, seconds: float, trained: Sequence[Trajectory]) -> StepLoad:
        turns = [(before, turn) for item in trained for before, turn in _contexts(item)]
        tokens = sum(len(turn.action_ids) for _, turn in turns)
        if not tokens or seconds <= 0:
            return StepLoad(preemptions, seconds, imbalance=imbalance)
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
