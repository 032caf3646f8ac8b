"""What cuts a run's engines anew between steps, made from the section `rollout` of its config: the parallelism planner, or the
resource manager, each at what the run begins with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from orchestrator.api import ConfigError, Task
from orchestrator.config.sections import RolloutSection
from orchestrator.placement.worker_rates import RatesOf
from orchestrator.policies.parallelism.degree_reallocation import DegreeReallocator, RatesOfDegree, prior_loads
from orchestrator.policies.parallelism.engine_profile import EngineLayout, EngineProfile
from orchestrator.policies.parallelism.parallelism_planner import ParallelismPlanner, layouts_of
from orchestrator.policies.placement.worker_load import WorkerRates, rates_of
from orchestrator.profiler.profile_file import load_profile
from orchestrator.proxy.resize import ranks_of
from orchestrator.proxy.worker_state import WorkerState

POWERS = [1 << power for power in range(12)]  # degrees on offer; unequal ones need not divide the devices: 3 are 2+1
_FIELD = "rollout.placement.degrees"


def make_planner(
    rollout: RolloutSection, task: Task, heads: int = 0, profile: EngineProfile | None = None
) -> ParallelismPlanner:
    """The planner of a run, at the layout that it begins with. ``profile``: where the config names none. Raises ConfigError for
    one that cannot be read."""
    settings, devices = rollout.planner, rollout.workers
    profile = read_planner_profile(rollout) or profile
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
    planner.choose_first([expected] * rollout.environments, task.max_context_tokens // 2)
    return planner


def read_planner_profile(rollout: RolloutSection) -> EngineProfile | None:
    """What ``rollout.planner.profile`` names; None: nothing. Raises ConfigError."""
    name = rollout.planner.profile
    return load_profile(Path(name), "rollout.planner.profile").profile if name else None


def make_reallocation(
    rollout: RolloutSection,
    heads: int = 0,
    rates: RatesOfDegree | None = None,
    kept: Mapping[str, Any] | None = None,
    start_seconds: float = 0.0,
) -> DegreeReallocator:
    """The resource manager of a run, at the degrees that it begins with: those it had when it goes on (``kept``, of its
    checkpoint), else those that the config names, else those for the lengths that it expects. ``heads``: that degrees must
    divide, 0: not known; ``rates``, ``start_seconds``: what else is known of the degrees and of an engine's start than the config
    says. Raises ConfigError."""
    settings, devices = rollout.placement.degrees, rollout.workers
    possible = [tp for tp in POWERS if tp <= devices and (not heads or heads % tp == 0)]
    profile = read_placement_profile(rollout)
    if rates is None:
        known = [layout.tp for layout in profile.layouts] if profile is not None else [*settings.speeds]
        possible = [tp for tp in possible if tp in known]
    if not possible:
        fix = "says nothing of degrees that these devices can have: name rollout.placement.degrees.speeds, or a profile of them"
        field = f"{_FIELD}.speeds" if profile is None else "rollout.placement.profile"
        raise ConfigError(field, dict(settings.speeds) or rollout.placement.profile, fix)
    try:
        made = DegreeReallocator(
            devices,
            possible,
            rates or rates_of_degree(rollout),
            degrees=settings.start,
            horizon=settings.horizon,
            start_seconds=_start_seconds(rollout, profile, start_seconds),
            per_server=devices,
        )
    except ValueError as error:
        fix = (
            f"{error}; {devices} devices and {heads or 'unknown'} attention heads can be cut into engines of {possible}"
        )
        raise ConfigError(f"{_FIELD}.start", list(settings.start), fix) from error
    if not (kept is not None and made.restore(kept)) and settings.expected_tokens:
        longest, count = rollout.engine.max_model_len, rollout.groups_per_step * rollout.group_size
        made.choose_first(prior_loads(settings.expected_tokens, settings.expected_sigma, count, longest))
    return made


def read_placement_profile(rollout: RolloutSection) -> EngineProfile | None:
    """What ``rollout.placement.profile`` names; None: nothing. Raises ConfigError."""
    name = rollout.placement.profile
    return load_profile(Path(name), "rollout.placement.profile").profile if name else None


def _start_seconds(rollout: RolloutSection, profile: EngineProfile | None, known: float) -> float:
    """Of a change, before one was measured."""
    given = rollout.placement.degrees.start_seconds
    if given is not None or profile is None:
        return known if given is None else given
    return max((shape.start_seconds for shape in profile.shapes.values()), default=0.0)


def rates_of_degree(rollout: RolloutSection) -> RatesOfDegree:
    """By the profile; without one by ``speeds``, with the interference that placement counts with."""
    settings, slots, profile = rollout.placement, rollout.engine.max_num_seqs, read_placement_profile(rollout)
    made: dict[int, WorkerRates] = {}

    def rates(degree: int) -> WorkerRates:
        if degree not in made:
            alone = settings.token_seconds / settings.degrees.speeds.get(degree, 1.0)
            steps = (alone, alone * (1.0 + settings.interference))
            line = WorkerRates(steps, prefill=settings.prefill_seconds, slots=slots)
            made[degree] = line if profile is None else rates_of(profile, EngineLayout(degree), slots)
        return made[degree]

    return rates


def rates_of_workers(states: Sequence[WorkerState], rates: RatesOfDegree) -> RatesOf:
    """What placement is told of workers whose degrees change."""
    return lambda worker: rates(max(1, ranks_of(states[worker])))
