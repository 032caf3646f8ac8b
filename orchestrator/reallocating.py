"""The resource manager at work: what each step was like, which degrees engines are to have, and carrying it out (Heddle 6.2).

Guarantees: every step ends in one event ``degrees`` that says what was expected and decided, every change in one ``reshape``
with what it cost, as the parallelism planner's (:mod:`orchestrator.planning`); a change that fails leaves the engines as they
were. Engines whose degree stays go on while others are started anew (:mod:`orchestrator.reshaping`).
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.api import ConfigError, Task, Trajectory
from orchestrator.config import Config
from orchestrator.events import EventLog
from orchestrator.forecasting import Forecasts
from orchestrator.lanes import Lane
from orchestrator.placing import SpeedOf
from orchestrator.planning import Planning, planning_of
from orchestrator.policies.placement import Speed
from orchestrator.policies.planner import layouts_of
from orchestrator.policies.profile import Layout, Profile
from orchestrator.policies.reallocation import Reallocated, Reallocation, SpeedOfDegree, expected_lengths
from orchestrator.profile import load as load_profile
from orchestrator.proxy import LLMProxy
from orchestrator.reshaping import ReshapingProxy, ranks_of
from orchestrator.sections import PlacementSection

if TYPE_CHECKING:
    from orchestrator.parts import Parts

_FIELD = "rollout.placement.degrees"


def make_reallocation(config: Config, task: Task, heads: int = 0, speeds: SpeedOfDegree | None = None) -> Reallocation:
    """The resource manager of a run, at the degrees that it begins with. ``heads``: that degrees must divide, 0: not known;
    ``speeds``: what else is known of the degrees than the config says. Raises ConfigError."""
    settings, devices = config.rollout.placement.degrees, config.rollout.workers
    possible = [layout.tp for layout in layouts_of(devices, devices, heads=heads)]
    profile = read_profile(config)
    if profile is not None:
        possible = [tp for tp in possible if Layout(tp) in profile.layouts]
    elif speeds is None:
        possible = [tp for tp in possible if tp in settings.speeds]
    if not possible:
        fix = "says nothing of the degrees that divide the devices: name rollout.placement.degrees.speeds, or a profile of them"
        raise ConfigError(f"{_FIELD}.{'speeds' if profile is None else 'profile'}", settings.profile or {}, fix)
    fix = f"{devices} devices and {heads or 'unknown'} attention heads can be cut into engines of {possible}"
    try:
        return Reallocation(
            devices,
            possible,
            speeds or speed_of_degree(config, task, profile),
            random.Random(config.run.seed),
            degrees=settings.start,
            horizon=settings.horizon,
            start_seconds=_start_seconds(config, profile),
            per_server=devices,
        )
    except ValueError as error:
        raise ConfigError(f"{_FIELD}.start", list(settings.start), f"{error}; {fix}") from error


def read_profile(config: Config) -> Profile | None:
    """What the section names; None: nothing. Raises ConfigError."""
    name = config.rollout.placement.degrees.profile
    return load_profile(Path(name), f"{_FIELD}.profile").profile if name else None


def _start_seconds(config: Config, profile: Profile | None) -> float:
    """Of a change, before one was measured."""
    given = config.rollout.placement.degrees.start_seconds
    if given is not None or profile is None:
        return given or 0.0
    return max((shape.start_seconds for shape in profile.shapes.values()), default=0.0)


def speed_of_degree(config: Config, task: Task, profile: Profile | None) -> SpeedOfDegree:
    """By the profile; without one by ``speeds``, with the interference that placement counts with."""
    settings, slots = config.rollout.placement, config.rollout.engine.max_num_seqs

    def measured(degree: int, most: int, tokens: float) -> Speed:
        assert profile is not None
        layout = Layout(degree)
        context = max(1.0, task.max_context_tokens / 2)
        shape = profile.shapes.get(layout)
        room = max(1, min(slots, int(shape.kv_tokens / context))) if shape is not None else slots
        alone = profile.decode_seconds(1, context, layout)
        steps = [
            profile.decode_seconds(min(number, room), context, layout) * max(1.0, number / room)
            for number in range(1, most + 1)
        ]
        return Speed(alone, tuple(accumulate((seconds / alone for seconds in steps), max)))

    def given(degree: int, most: int, tokens: float) -> Speed:
        table = interference(settings, slots, most)
        return Speed(settings.token_seconds / settings.degrees.speeds.get(degree, 1.0), table)

    return measured if profile is not None else given


def interference(settings: PlacementSection, slots: int, most: int) -> tuple[float, ...]:
    """As :func:`orchestrator.placing.speed_of`: a line as far as there are slots; beyond, whole rounds of them."""
    return tuple(
        (1.0 + settings.interference * (min(number, slots) - 1)) * max(1.0, number / slots)
        for number in range(1, most + 1)
    )


def speed_of_lane(lanes: Sequence[Lane], speed: SpeedOfDegree) -> SpeedOf:
    """What placement is told of workers whose degrees change."""
    made: dict[tuple[int, int, int], Speed] = {}

    def of(worker: int, most: int, tokens: float) -> Speed:
        size, step = 1 << max(0, most - 1).bit_length(), round(2 * math.log2(max(1.0, tokens)))
        key = max(1, ranks_of(lanes[worker])), size, step
        if key not in made:
            made[key] = speed(key[0], size, 2 ** (step / 2))
        return made[key]

    return of


class Reallocating:
    """One run's. As :class:`orchestrator.planning.Planning`: begin, end, act. ``in_flight``: forecasts of tokens that those in
    flight have before them."""

    def __init__(
        self,
        policy: Reallocation,
        proxy: ReshapingProxy,
        events: EventLog,
        steps: int,
        in_flight: Callable[[], Sequence[float]] = tuple,
    ) -> None:
        self._policy, self._proxy, self._events = policy, proxy, events
        self._steps, self._in_flight = steps, in_flight
        self._begun = 0.0
        self._decided: Reallocated | None = None

    def begin(self) -> None:
        """The rollout of a step begins, or goes on."""
        self._begun = self._events.time()

    async def end(self, step: int, trained: Sequence[Trajectory]) -> None:
        """Its batch is complete: decide."""
        seconds = self._events.time() - self._begun
        said = [float(sum(len(turn.action_ids) for turn in item.turns)) for item in trained]
        lengths = expected_lengths([length for length in said if length], self._in_flight(), len(said))
        before = self._policy.degrees
        found = self._decided = self._policy.after(lengths, seconds, self._steps - step - 1)
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
            note.waiting_for = f"engines of {'+'.join(map(str, found.degrees))} devices to start"
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


def cutting_of(
    config: Config, parts: Parts, proxy: LLMProxy, forecasts: Forecasts | None
) -> Planning | Reallocating | None:
    """Who cuts the engines of a run anew between steps: the planner, the resource manager, or nobody (None)."""
    if not config.rollout.placement.degrees.enabled:
        return planning_of(config, parts.task, proxy, parts.events, parts.planner)
    assert isinstance(proxy, ReshapingProxy), "see the rollout"
    policy = parts.reallocation or make_reallocation(config, parts.task)
    policy.degrees = proxy.degrees  # what the workers were started with
    in_flight = tuple if forecasts is None else forecasts.remaining
    return Reallocating(policy, proxy, parts.events, config.run.steps, in_flight)


def _number(value: float) -> float | None:
    """JSON has no infinity."""
    return round(value, 6) if math.isfinite(value) else None
