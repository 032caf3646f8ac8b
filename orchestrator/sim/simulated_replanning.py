"""Who cuts the workers of a simulated run anew between steps, as in a real one: the planner, the resource manager, or nobody."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from orchestrator.api import Task
from orchestrator.components import Components
from orchestrator.config import Config
from orchestrator.parallelism.planner_setup import make_reallocation
from orchestrator.policies.parallelism.degree_reallocation import DegreeReallocator
from orchestrator.policies.parallelism.engine_profile import EngineLayout
from orchestrator.policies.parallelism.parallelism_planner import ParallelismPlanner
from orchestrator.proxy.resize import engine_seats
from orchestrator.sim import hardware
from orchestrator.sim.movable_worker import TurnMoves
from orchestrator.sim.resizable_worker import ResizableSimWorker, planner_of
from orchestrator.sim.simulated_cluster import engine_costs, fleet
from orchestrator.sim.simulated_forecasts import SimRates
from orchestrator.sim.simulated_worker import SimWorker, Watch

Cutter = ParallelismPlanner | DegreeReallocator


def cutter_of(config: Config, task: Task, kept: Mapping[str, Any] | None = None) -> Cutter | None:
    """Who cuts the workers of a simulated run anew, at what it begins with; None: nobody. ``kept``: the degrees that it had,
    where it is resumed. Raises ConfigError."""
    if not config.rollout.placement.degrees.enabled:
        return planner_of(config, task)
    if config.sim.costs == "linear" or not config.sim.tasks or config.rollout.placement.profile:
        return make_reallocation(config.rollout, kept=kept)
    per, rates, name = config.sim.tensor_parallel, SimRates(config), fleet(config)[0]
    heads = hardware.model(config.sim.model).heads
    start = config.sim.start_seconds + rates.loading(name, per)
    return make_reallocation(
        config.rollout, max(1, heads // per), lambda degree: rates.rates_at(name, per * degree), kept, start
    )


def resizable(config: Config, cutter: Cutter) -> Callable[..., SimWorker]:
    """Makes the workers of a run with this one, all of one life. Arguments as :class:`ResizableSimWorker`."""
    layout = cutter.layout if isinstance(cutter, ParallelismPlanner) else EngineLayout(cutter.degrees[0])
    costs = engine_costs(config, fleet(config)[0], layout.tp, expert_ranks=layout.ep)
    return partial(ResizableSimWorker, moves=TurnMoves(), costs=costs)


def seat_workers(workers: Sequence[SimWorker], cutter: Cutter | None, watch: Watch | None) -> None:
    """Before they start: who watches them; where they are cut, each over its devices, the others parked."""
    for worker in workers:
        worker.watch = watch
    if cutter is None:
        return
    if isinstance(cutter, ParallelismPlanner):
        ranks, experts = engine_seats(cutter.layout, len(workers)), cutter.layout.ep
    else:
        ranks, experts = engine_seats(cutter.degrees, len(workers)), 1
    for worker, count in zip(workers, ranks, strict=True):
        assert isinstance(worker, ResizableSimWorker)
        worker.set_devices(count, experts if count else 1)


def hand_over(parts: Components, cutter: Cutter | None) -> None:
    """Give it to a simulated run."""
    if cutter is None:
        return
    parts.kv_bytes = 0.0
    if isinstance(cutter, DegreeReallocator):
        parts.reallocation = cutter
    else:
        parts.planner = cutter
