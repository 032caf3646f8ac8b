"""The resource manager at work: what each step was like, which degrees engines are to have, and carrying it out (Heddle 6.2).

Guarantees: every step ends in one event ``degrees`` that says what was expected and decided, every change in one ``reshape``
with what it cost, as the parallelism planner's (:mod:`orchestrator.parallelism.step_planner`); a change that fails
leaves the engines as they were. Engines whose degree stays go on while others are started anew
(:mod:`orchestrator.proxy.resize`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator.api import ConfigError, Trajectory
from orchestrator.config import Config
from orchestrator.events import EventLog
from orchestrator.parallelism.step_planner import Planning, planning_of
from orchestrator.placement.length_tracker import Forecasts
from orchestrator.placement.worker_rates import RatesOf
from orchestrator.policies.parallelism.degree_reallocation import (
    Ended,
    RatesOfDegree,
    Reallocated,
    Reallocation,
    expected_loads,
    prior_loads,
    written,
)
from orchestrator.policies.parallelism.engine_profile import Layout, Profile
from orchestrator.policies.placement.worker_load import Rates, rates_of
from orchestrator.profiler import load as load_profile
from orchestrator.proxy.gateway import LLMProxy
from orchestrator.proxy.resize import ReshapingProxy, ranks_of
from orchestrator.proxy.worker_state import Lane

if TYPE_CHECKING:
    from orchestrator.components import Parts

POWERS = [1 << power for power in range(12)]  # degrees on offer; unequal ones need not divide the devices: 3 are 2+1
_FIELD = "rollout.placement.degrees"


def make_reallocation(
    config: Config,
    heads: int = 0,
    rates: RatesOfDegree | None = None,
    kept: Mapping[str, Any] | None = None,
    start_seconds: float = 0.0,
) -> Reallocation:
    """The resource manager of a run, at the degrees that it begins with: those it had when it goes on (``kept``, of its
    checkpoint), else those that the config names, else those for the lengths that it expects. ``heads``: that degrees must
    divide, 0: not known; ``rates``, ``start_seconds``: what else is known of the degrees and of an engine's start than the config
    says. Raises ConfigError."""
    settings, devices = config.rollout.placement.degrees, config.rollout.workers
    possible = [tp for tp in POWERS if tp <= devices and (not heads or heads % tp == 0)]
    profile = read_profile(config)
    if rates is None:
        known = [layout.tp for layout in profile.layouts] if profile is not None else [*settings.speeds]
        possible = [tp for tp in possible if tp in known]
    if not possible:
        fix = "says nothing of degrees that these devices can have: name rollout.placement.degrees.speeds, or a profile of them"
        field = f"{_FIELD}.speeds" if profile is None else "rollout.placement.profile"
        raise ConfigError(field, dict(settings.speeds) or config.rollout.placement.profile, fix)
    try:
        made = Reallocation(
            devices,
            possible,
            rates or rates_of_degree(config),
            degrees=settings.start,
            horizon=settings.horizon,
            start_seconds=_start_seconds(config, profile, start_seconds),
            per_server=devices,
        )
    except ValueError as error:
        fix = (
            f"{error}; {devices} devices and {heads or 'unknown'} attention heads can be cut into engines of {possible}"
        )
        raise ConfigError(f"{_FIELD}.start", list(settings.start), fix) from error
    if not (kept is not None and made.restore(kept)) and settings.expected_tokens:
        longest, count = config.rollout.engine.max_model_len, config.batch_trajectories
        made.begin(prior_loads(settings.expected_tokens, settings.expected_sigma, count, longest))
    return made


def read_profile(config: Config) -> Profile | None:
    """What ``rollout.placement.profile`` names; None: nothing. Raises ConfigError."""
    name = config.rollout.placement.profile
    return load_profile(Path(name), "rollout.placement.profile").profile if name else None


def _start_seconds(config: Config, profile: Profile | None, known: float) -> float:
    """Of a change, before one was measured."""
    given = config.rollout.placement.degrees.start_seconds
    if given is not None or profile is None:
        return known if given is None else given
    return max((shape.start_seconds for shape in profile.shapes.values()), default=0.0)


def rates_of_degree(config: Config) -> RatesOfDegree:
    """By the profile; without one by ``speeds``, with the interference that placement counts with."""
    settings, slots, profile = config.rollout.placement, config.rollout.engine.max_num_seqs, read_profile(config)
    made: dict[int, Rates] = {}

    def rates(degree: int) -> Rates:
        if degree not in made:
            alone = settings.token_seconds / settings.degrees.speeds.get(degree, 1.0)
            steps = (alone, alone * (1.0 + settings.interference))
            line = Rates(steps, prefill=settings.prefill_seconds, slots=slots)
            made[degree] = line if profile is None else rates_of(profile, Layout(degree), slots)
        return made[degree]

    return rates


def rates_of_lanes(lanes: Sequence[Lane], rates: RatesOfDegree) -> RatesOf:
    """What placement is told of workers whose degrees change."""
    return lambda worker: rates(max(1, ranks_of(lanes[worker])))


class Reallocating:
    """One run's. As :class:`orchestrator.parallelism.step_planner.Planning`: begin, end, act. ``in_flight``: forecasts
    of tokens that those in flight have before them; ``longest``: tokens of context at which a trajectory ends."""

    def __init__(
        self,
        policy: Reallocation,
        proxy: ReshapingProxy,
        events: EventLog,
        steps: int,
        in_flight: Callable[[], Sequence[float]] = tuple,
        longest: float = math.inf,
    ) -> None:
        self._policy, self._proxy, self._events = policy, proxy, events
        self._steps, self._in_flight, self._longest = steps, in_flight, longest
        self._begun = 0.0
        self._decided: Reallocated | None = None

    def state(self) -> dict[str, Any]:
        """What a resumed run goes on with."""
        return self._policy.state()

    def begin(self) -> None:
        """The rollout of a step begins, or goes on."""
        self._begun = self._events.time()

    async def end(self, step: int, trained: Sequence[Trajectory]) -> None:
        """Its batch is complete: decide."""
        seconds = self._events.time() - self._begun
        loads = expected_loads([_ended(item) for item in trained], self._in_flight(), len(trained), self._longest)
        before = self._policy.degrees
        found = self._decided = self._policy.after(loads, seconds, self._steps - step - 1)
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

    async def act(self, step: int) -> None:
        """Carry out what was decided."""
        found, self._decided = self._decided, None
        if found is None or not found.changes:
            return
        with self._events.stage("reshape", step) as note:
            note.waiting_for = f"engines of {written(found.degrees)} devices to start"
            done = await self._proxy.reshape(found.degrees)
        if done.error:
            self._policy.failed(found.degrees, done.seconds, done.error)
        else:
            self._policy.changed(found.degrees, done.seconds)
        self._events.emit(
            "reshape",
            step=step,
            tp=done.tp,
            degrees=list(found.degrees),
            seconds=round(done.seconds, 6),
            moved=done.moved,
            error=done.error[:300],
        )


def state_of(planning: Planning | Reallocating | None) -> dict[str, Any] | None:
    """For the checkpoint: the degrees, where the resource manager chooses them."""
    return planning.state() if isinstance(planning, Reallocating) else None


def _ended(trajectory: Trajectory) -> Ended:
    turns = trajectory.turns
    prompt = len(turns[0].observation_ids) if turns else 0
    heard = sum(len(turn.observation_ids) for turn in turns) - prompt
    gap = sum(turn.environment_seconds for turn in turns)
    return Ended(sum(len(turn.action_ids) for turn in turns), prompt, heard, gap)


def cutting_of(
    config: Config, parts: Parts, proxy: LLMProxy, forecasts: Forecasts | None
) -> Planning | Reallocating | None:
    """Who cuts the engines of a run anew between steps: the planner, the resource manager, or nobody (None)."""
    if not config.rollout.placement.degrees.enabled:
        return planning_of(config, parts.task, proxy, parts.events, parts.planner)
    assert isinstance(proxy, ReshapingProxy), "see the rollout"
    policy = parts.reallocation or make_reallocation(config)
    policy.degrees = proxy.degrees  # what the workers were started with
    in_flight = tuple if forecasts is None else forecasts.remaining
    longest = config.rollout.engine.max_model_len
    return Reallocating(policy, proxy, parts.events, config.run.steps, in_flight, longest)


def _number(value: float) -> float | None:
    """JSON has no infinity."""
    return round(value, 6) if math.isfinite(value) else None
