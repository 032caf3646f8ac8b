"""The parallelism planner at work: what each step was like, what is planned, and carrying it out between steps.

Guarantees: every step ends in one event ``plan`` that says what was seen and what was decided, every change in one event
``reshape`` with what it cost; a change that fails leaves the layout as it was and is not tried again. Where steps leave the
profile it is mended by what they take, which the events ``profile_scaled`` and ``profile_measured`` say; a whole new one is asked
for in an alarm.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean

from orchestrator.api import Task, Trajectory, Turn
from orchestrator.config import Config
from orchestrator.events import EventLog
from orchestrator.policies.parallelism.engine_profile import Profile
from orchestrator.policies.parallelism.parallelism_planner import ParallelismPlanner, Plan, StepLoad, layouts_of
from orchestrator.profiler import load as load_profile
from orchestrator.proxy.gateway import LLMProxy
from orchestrator.proxy.resize import ReshapingProxy


def make_planner(config: Config, task: Task, heads: int = 0, profile: Profile | None = None) -> ParallelismPlanner:
    """The planner of a run, at the layout that it begins with. ``profile``: where the config names none. Raises ConfigError for
    one that cannot be read."""
    settings, devices = config.rollout.planner, config.rollout.workers
    profile = read_profile(config) or profile
    layouts = layouts_of(devices, devices, heads=heads, most=settings.max_tp, experts=settings.experts)
    planner = ParallelismPlanner(
        devices,
        layouts,
        profile,
        rise=settings.rise,
        calm_steps=settings.calm_steps,
        divergence=settings.divergence,
    )
    expected = settings.expected_tokens or task.max_response_tokens
    planner.first([expected] * config.rollout.environments, task.max_context_tokens // 2)
    return planner


def read_profile(config: Config) -> Profile | None:
    """What ``rollout.planner.profile`` names; None: nothing. Raises ConfigError."""
    name = config.rollout.planner.profile
    return load_profile(Path(name), "rollout.planner.profile").profile if name else None


class Planning:
    """One run's. :meth:`begin` when a step's rollout begins, :meth:`end` when its batch is there, :meth:`act` between steps."""

    def __init__(self, planner: ParallelismPlanner, proxy: ReshapingProxy, events: EventLog, steps: int) -> None:
        self._planner = planner
        self._proxy = proxy
        self._events = events
        self._steps = steps
        self._begun = 0.0
        self._counts: dict[str, tuple[int, int]] = {}  # worker -> (life, preemptions in it)
        self._plan: Plan | None = None

    def begin(self) -> None:
        """The rollout of a step begins, or goes on."""
        self._begun = self._events.time()

    async def end(self, step: int, trained: Sequence[Trajectory]) -> None:
        """Its batch is complete: decide."""
        seconds = self._events.time() - self._begun
        load = self._load(*await self._counted(), seconds, trained)
        before, left = self._planner.layout, self._steps - step - 1
        plan = self._plan = self._planner.after(load, left)
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

    async def act(self, step: int) -> None:
        """Carry out what was decided."""
        plan, self._plan = self._plan, None
        if plan is None or not plan.changes:
            return
        with self._events.stage("reshape", step) as note:
            note.waiting_for = f"engines with {plan.layout} to start"
            done = await self._proxy.reshape(plan.layout)
        if done.error:
            self._planner.failed(plan.layout, done.seconds, done.error)
        else:
            self._planner.changed(plan.layout, done.seconds)
        seconds, error = round(done.seconds, 6), done.error[:300]
        self._events.emit("reshape", step=step, tp=done.tp, ep=done.ep, seconds=seconds, moved=done.moved, error=error)

    async def _counted(self) -> tuple[int, float]:
        """Preemptions since the last look, where a worker that was started anew begins at 0; the workers' mean imbalance now."""
        lives = {lane.worker.name: lane.lives for lane in self._proxy.lanes}
        total, imbalances = 0, []
        for name, stats in await self._proxy.stats():
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
        batch = max(1.0, busy / seconds / max(1, self._proxy.engines))
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


def planning_of(
    config: Config, task: Task, proxy: LLMProxy, events: EventLog, planner: ParallelismPlanner | None = None
) -> Planning | None:
    """None: it is off."""
    if not config.rollout.planner.enabled:
        return None
    assert isinstance(proxy, ReshapingProxy), "see the rollout"
    made = planner or make_planner(config, task)
    made.layout = proxy.layout  # what the workers were started with
    return Planning(made, proxy, events, config.run.steps)
