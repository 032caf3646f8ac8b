"""Who cuts a run's own engines anew between steps, and over how many devices each of them starts.

Where prefill and decode are apart nobody does, but each engine may have a number of devices of its own.

Guarantees: at most one does, the parallelism planner or the resource manager (:mod:`orchestrator.config.rollout_keys`); a profile
that it reads is of this model, and of the engine and device that are here. Raises ConfigError.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.api import ConfigError, Task
from orchestrator.config import Config
from orchestrator.parallelism.planner_setup import (
    PLACED,
    check_placement_profile,
    make_planner,
    make_reallocation,
    read_profile,
)
from orchestrator.policies.parallelism.degree_reallocation import DegreeReallocator
from orchestrator.policies.parallelism.parallelism_planner import ParallelismPlanner
from orchestrator.profiler.profile_file import ProfileKey, check_profile, load_profile, model_name
from orchestrator.proxy.resize import NO_EXPERTS, engine_seats
from orchestrator.proxy.router_setup import with_caps

IDENTITY = "vllm_rlplugin.engine_profiler:identity"


@dataclass(frozen=True, slots=True)
class EngineCuts:
    """``ranks``: devices of each worker at its start; empty: what its settings say, and nobody cuts them. ``devices``: where they
    begin on this machine, unless Ray says which they are; empty: each at its own number."""

    planner: ParallelismPlanner | None = None
    reallocation: DegreeReallocator | None = None
    ranks: tuple[int, ...] = ()
    devices: tuple[int, ...] = ()

    def keywords_of(self, index: int) -> dict[str, int]:
        """Keywords of a worker: where its devices begin, and how many it begins with."""
        if not self.ranks:
            return {}
        return {"first_device": self.devices[index] if self.devices else index, "ranks": self.ranks[index]}


async def engine_cuts(
    config: Config,
    task: Task,
    model: str,
    shape: Mapping[str, Any],
    function: Callable[[str, dict[str, Any]], Awaitable[Any]],
    kept: Mapping[str, Any] | None = None,
) -> EngineCuts:
    """``shape``: of the model at ``model``; ``function``: asks a function of the plugin; ``kept``: the degrees that a run had
    which is resumed."""
    rollout, heads = config.rollout, int(shape["num_attention_heads"])
    planned = rollout.planner.enabled
    profiles = {
        "rollout.routing.profile": rollout.routing.profile,
        "rollout.placement.profile": rollout.placement.profile if rollout.placement.enabled else "",
        "rollout.planner.profile": rollout.planner.profile if planned else "",
    }
    if any(profiles.values()):
        here = await function(IDENTITY, {"threads": rollout.engine.threads})
        key = ProfileKey(model=model_name(Path(model), config.model.dtype), **here)
        for field, name in profiles.items():
            if name:
                check_profile(load_profile(Path(name), field), key, field)
    if planned:
        planner = make_planner(rollout, task, heads, kept=kept)
        return EngineCuts(planner, None, tuple(engine_seats(planner.layout.tp, rollout.workers)))
    if rollout.reshapes:
        reallocation = make_reallocation(rollout, heads, kept=kept)
        return EngineCuts(None, reallocation, tuple(engine_seats(reallocation.degrees, rollout.workers)))
    return _fixed(config, heads)


def _fixed(config: Config, heads: int) -> EngineCuts:
    """What ``rollout.disaggregation.degrees`` says."""
    given, field = config.rollout.disaggregation.degrees, "rollout.disaggregation.degrees"
    if not given:
        return EngineCuts()
    for name, degree in given.items():
        if heads % degree:
            fix = f"{name} cannot have {degree} devices: the model has {heads} attention heads"
            raise ConfigError(field, dict(given), fix)
    ranks = [given.get(f"vllm-{index}", 1) for index in range(config.rollout.workers)]
    begins = [sum(ranks[:index]) for index in range(len(ranks))]
    return EngineCuts(ranks=tuple(ranks), devices=tuple(begins))


def check(config: Config) -> None:
    """Of engines that are apart, devices are counted from this machine's first: one on another machine has none to add to its
    own. Those that are cut anew: :func:`_check_devices`."""
    if config.rollout.disaggregation.degrees and config.ray.address and not config.resources.pools:
        fix = "rollout.disaggregation.degrees counts this machine's devices: name resources.pools, or leave one out"
        raise ConfigError("ray.address", config.ray.address, fix)
    check_placement_profile(config.rollout)
    profile = read_profile(config.rollout.routing.profile, "rollout.routing.profile")
    with_caps(config.rollout, config.rollout.borrows, profile)
    if not config.rollout.reshapes:
        return
    _check_devices(config)
    if config.rollout.planner.experts:
        raise ConfigError("rollout.planner.experts", True, NO_EXPERTS)
    if config.rollout.planner.enabled:
        read_profile(config.rollout.planner.profile, "rollout.planner.profile")
    else:
        make_reallocation(config.rollout)  # as far as it can be known without the model


def _check_devices(config: Config) -> None:
    """Engines that are cut anew have devices of one class, on one node or on whole nodes. Raises ConfigError."""
    rollout, resources = config.rollout, config.resources
    who = "rollout.planner" if rollout.planner.enabled else "rollout.placement.degrees"
    if config.ray.address and rollout.colocation.enabled:
        fix = f"{who} with rollout.colocation needs all devices on this machine: leave this out, or one of the two"
        raise ConfigError("ray.address", config.ray.address, fix)
    if len(resources.rollout) > 1:
        fix = f"{who} divides devices of one class among own engines: name one class, or set it to false"
        raise ConfigError("resources.rollout", dict(resources.rollout), fix)
    if resources.devices_per_worker > 1:
        fix = f"{who} sets how many devices an engine has, and each worker counts as one: leave it at 1"
        raise ConfigError("resources.devices_per_worker", resources.devices_per_worker, fix)
    node = resources.devices_per_server
    if rollout.workers <= node or not (resources.pools or config.ray.address):
        return
    within = f"an engine must fit on a node of resources.devices_per_server = {node}"
    if node & (node - 1) or rollout.workers % node:
        fix = f"{within}; beyond that, use whole nodes, each with a power of two of devices"
        raise ConfigError("rollout.workers", rollout.workers, fix)
    if rollout.planner.enabled:
        if not 0 < rollout.planner.max_tp <= node:
            raise ConfigError("rollout.planner.max_tp", rollout.planner.max_tp, f"{within}: give at most that")
        return
    profile = read_profile(rollout.placement.profile, PLACED)
    known = [layout.tp for layout in profile.layouts] if profile is not None else [*rollout.placement.degrees.speeds]
    if wide := [degree for degree in known if node < degree <= rollout.workers]:
        field = PLACED if profile is not None else "rollout.placement.degrees.speeds"
        raise ConfigError(field, max(wide), f"{within}: leave out larger ones")
