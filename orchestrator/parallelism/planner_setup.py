"""What cuts a run's engines anew between steps, made from the section `rollout` of its config: the parallelism planner, or the
resource manager, each at what the run begins with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

from orchestrator.api import ConfigError, Task
from orchestrator.config.rollout_keys import RolloutSection
from orchestrator.placement.placer import RatesOf, line_rates, profiled_rates
from orchestrator.policies.parallelism.degree_reallocation import DegreeReallocator, RatesOfDegree, prior_loads
from orchestrator.policies.parallelism.engine_profile import EngineProfile
from orchestrator.policies.parallelism.parallelism_planner import ParallelismPlanner, layouts_of
from orchestrator.policies.placement.worker_load import WorkerRates
from orchestrator.profiler.profile_file import load_profile
from orchestrator.proxy.resize import ranks_of
from orchestrator.proxy.worker_state import WorkerState

POWERS = [1 << power for power in range(12)]  # degrees on offer; unequal ones need not divide the devices: 3 are 2+1
_FIELD = "rollout.placement.degrees"
PLACED = "rollout.placement.profile"


def make_planner(
    rollout: RolloutSection,
    task: Task,
    heads: int = 0,
    profile: EngineProfile | None = None,
    kept: Mapping[str, Any] | None = None,
) -> ParallelismPlanner:
    """The planner of a run, at the layout that it begins with: that of its checkpoint when it continues (``kept``). ``profile``:
    where the config names none. Raises ConfigError for one that cannot be read."""
    settings, devices = rollout.planner, rollout.workers
    profile = read_profile(settings.profile, "rollout.planner.profile") or profile
    layouts = layouts_of(devices, devices, heads=heads, most=settings.max_tp, experts=settings.experts)
    planner = ParallelismPlanner(
        devices,
        layouts,
        profile,
        rise=settings.rise,
        calm_steps=settings.calm_steps,
        divergence=settings.divergence,
    )
    if kept is None or not planner.restore(kept):
        expected = settings.expected_tokens or task.max_response_tokens
        planner.choose_first([expected] * rollout.environments, task.max_context_tokens // 2)
    check_placement_profile(rollout, [layout.tp for layout in planner.candidates])
    return planner


def read_profile(name: str, field: str) -> EngineProfile | None:
    """Of the file that a config names in this field; None: it names none. Raises ConfigError."""
    return load_profile(Path(name), field).profile if name else None


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
    profile = read_profile(rollout.placement.profile, PLACED)
    if rates is None:
        known = [layout.tp for layout in profile.layouts] if profile is not None else [*settings.speeds]
        possible = [tp for tp in possible if tp in known]
    if not possible:
        fix = "has no degree that these devices allow: set rollout.placement.degrees.speeds, or profile one"
        field = f"{_FIELD}.speeds" if profile is None else PLACED
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
        fix = f"{error}; {devices} devices and {heads or 'unknown'} attention heads can be divided into engines of {possible}"
        raise ConfigError(f"{_FIELD}.start", list(settings.start), fix) from error
    if not (kept is not None and made.restore(kept)) and settings.expected_tokens:
        longest, count = rollout.engine.max_model_len, rollout.groups_per_step * rollout.group_size
        made.choose_first(prior_loads(settings.expected_tokens, settings.expected_sigma, count, longest))
    return made


def check_placement_profile(rollout: RolloutSection, degrees: Sequence[int] = ()) -> None:
    """Raises ConfigError where trajectories are placed by a profile that lacks one of these ``degrees`` (without any: those of
    engines that are never cut anew), or that of a borrowed server, before one of them comes."""
    if not rollout.placement.enabled or (profile := read_profile(rollout.placement.profile, PLACED)) is None:
        return
    given, usual = rollout.disaggregation.degrees, rollout.engine.ranks
    fixed = () if rollout.reshapes else {given.get(f"vllm-{index}", usual) for index in range(rollout.workers)}
    for degree in sorted({*(degrees or fixed), *([usual] if rollout.borrows else [])}):
        profiled_rates(profile, rollout.engine.max_num_seqs, degree)


def _start_seconds(rollout: RolloutSection, profile: EngineProfile | None, known: float) -> float:
    """Of a change, before one was measured."""
    given = rollout.placement.degrees.start_seconds
    if given is not None or profile is None:
        return known if given is None else given
    return max((shape.start_seconds for shape in profile.shapes.values()), default=0.0)


def rates_of_degree(rollout: RolloutSection) -> RatesOfDegree:
    """By the profile, a ConfigError for what it lacks; without one by ``speeds``, with the interference of placement."""
    settings, slots, profile = (
        rollout.placement,
        rollout.engine.max_num_seqs,
        read_profile(rollout.placement.profile, PLACED),
    )
    if profile is not None:
        return cache(partial(profiled_rates, profile, slots))

    @cache
    def rates(degree: int) -> WorkerRates:
        return line_rates(settings, settings.degrees.speeds.get(degree, 1.0), slots)

    return rates


def rates_of_workers(states: Sequence[WorkerState], rates: RatesOfDegree, usual: int = 1) -> RatesOf:
    """What placement is told of workers by their degrees, which may change. ``usual``: of a server, whose degree nobody says."""
    return lambda worker: rates(ranks_of(states[worker]) or usual)
