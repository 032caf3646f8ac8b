"""Simulated workers whose devices change between steps, who cuts them, and the profile for that (RollPacker 4.2, Heddle 6.2).

The planner, the resource manager (:mod:`orchestrator.parallelism.replanner`) and :mod:`orchestrator.proxy.resize`
are those of a real run. As there, a worker stands for one device (here: ``sim.tensor_parallel`` devices), and an engine
of t runs over its own and the t - 1 after it, while those workers are parked.
Guarantees: requests that move go on with what they would have said; a layout in which the model does not fit, or in which the
longest request could never run, does not come up, and is not in the profile; a change costs ``sim.start_seconds``, then the new
engine's own time to fetch and to load the weights, during which nothing is generated.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from orchestrator.api import ConfigError, RetryableError, Task
from orchestrator.components import Components
from orchestrator.config import Config
from orchestrator.parallelism.planner_setup import make_planner, make_reallocation
from orchestrator.policies.parallelism.degree_reallocation import DegreeReallocator
from orchestrator.policies.parallelism.engine_profile import EngineLayout, EngineProfile, EngineShape, ProfilePoint
from orchestrator.policies.parallelism.parallelism_planner import ParallelismPlanner, layouts_of
from orchestrator.policies.placement.worker_load import WorkerRates, rates_of
from orchestrator.proxy.resize import engine_seats
from orchestrator.sim import hardware
from orchestrator.sim.cost_model import EngineCosts
from orchestrator.sim.simulated_cluster import costs_at_imbalance, engine_costs, fleet
from orchestrator.sim.simulated_worker import SimWorker, Watch

Cutter = ParallelismPlanner | DegreeReallocator


class ResizableSimWorker(SimWorker):
    """An :class:`~orchestrator.api.ExpertWorker`; made with ``costs`` of the layout that it begins in."""

    expert_ranks = 1
    _misfit = ""  # why it cannot be started as it is cut now

    def __init__(self, name: str, config: Config, *arguments: object, **keywords: object) -> None:
        super().__init__(name, config, *arguments, **keywords)  # type: ignore[arg-type]
        self._config = config

    async def resize(self, ranks: int, expert_ranks: int = 1) -> None:
        self.change_devices(ranks, expert_ranks)
        await asyncio.sleep(0)

    def change_devices(self, ranks: int, expert_ranks: int = 1) -> None:
        """End the process; the next one has ``ranks`` devices (0: there is none), so many of them with whole experts."""
        self.die()
        self._cut(ranks, expert_ranks)

    def set_devices(self, ranks: int, expert_ranks: int = 1) -> None:
        """It has so many devices from its first life on; with none there is no process."""
        self._cut(ranks, expert_ranks)
        if not ranks or self._misfit:
            self.die()

    def _cut(self, ranks: int, expert_ranks: int) -> None:
        self.ranks, self.expert_ranks, self._misfit = ranks, expert_ranks, ""
        if ranks:
            try:
                self._use(engine_costs(self._config, self.hardware, ranks, expert_ranks=expert_ranks))
            except ConfigError as error:
                self._misfit = str(error)

    async def restart(self) -> None:
        if self._misfit or not self.ranks:
            await asyncio.sleep(self._start_seconds)
            raise RetryableError(self._misfit or f"{self.name} is parked")
        await super().restart()


def planner_of(config: Config, task: Task, kept: Mapping[str, Any] | None = None) -> ParallelismPlanner | None:
    """The planner of a simulated run, at the layout that it begins with; None: it is off. Its profile is the cost model's, unless
    the config names a file. ``kept``: as of :func:`cutter_of`. Raises ConfigError for a model that fits in no layout."""
    if not config.rollout.planner.enabled:
        return None
    if config.sim.costs == "linear":
        return make_planner(config.rollout, task, kept=kept)
    heads = hardware.model(config.sim.model).heads
    width = max(1, heads // config.sim.tensor_parallel)
    return make_planner(config.rollout, task, width, roofline_profile(config), kept)


def check_planner(config: Config) -> None:
    """Raises ConfigError for what the simulator cannot cut."""
    given = config.rollout.disaggregation.degrees
    if given and config.sim.degrees:
        fix = "sim.degrees sets it for every worker: leave one of the two out"
        raise ConfigError("rollout.disaggregation.degrees", dict(given), fix)
    if given and config.sim.expert_parallel > 1:
        fix = (
            "workers of unequal degrees cannot use expert parallelism: leave this out, or set sim.expert_parallel to 1"
        )
        raise ConfigError("rollout.disaggregation.degrees", dict(given), fix)
    if not config.rollout.reshapes:
        return
    if config.rollout.disaggregation.enabled:
        fix = "the simulator supports it only with fixed engines: set it to false, or leave out what re-divides them"
        raise ConfigError("rollout.disaggregation.enabled", True, fix)
    who = "rollout.planner" if config.rollout.planner.enabled else "rollout.placement.degrees"
    if len(set(fleet(config))) > 1:
        fix = f"{who} divides devices of one class: leave this out, or set {who}.enabled to false"
        raise ConfigError("sim.fleet", dict(config.sim.fleet), fix)
    if config.sim.degrees:
        fix = f"{who} chooses them: leave this out (rollout.placement.degrees.start sets the initial ones)"
        raise ConfigError("sim.degrees", list(config.sim.degrees), fix)


def roofline_profile(config: Config) -> EngineProfile:
    """What ``rl-coserve profile`` would measure of the simulated engines, in simulated tokens, of every power of two of devices
    that the model runs on; with ``rollout.planner.experts`` also with whole experts on each, at imbalances of 1, 2, 4, ...
    Raises ConfigError where it runs on none."""
    engine, name = config.rollout.engine, fleet(config)[0]
    points: list[ProfilePoint] = []
    shapes = []
    widths = _powers(config.rollout.planner.max_tp or config.rollout.workers)
    for layout in layouts_of(widths[-1], widths[-1], experts=config.rollout.planner.experts):
        try:
            costs = engine_costs(config, name, layout.tp, expert_ranks=layout.ep)
        except ConfigError:
            continue  # it does not fit, or cannot be split so
        if (costs.kv_tokens or 0) >= engine.max_model_len:
            for imbalance in _powers(layout.ep):
                points += measured_points(config, costs_at_imbalance(costs, imbalance), layout, imbalance)
            shapes.append(shape_of(config, costs, layout))
    if not shapes:
        fix = (
            "the model fits on no number of these devices: use another device or a shorter rollout.engine.max_model_len"
        )
        raise ConfigError("sim.device", name or config.sim.device, fix)
    return EngineProfile(points, shapes)


def measured_points(
    config: Config, costs: EngineCosts, layout: EngineLayout, imbalance: float = 1.0
) -> list[ProfilePoint]:
    """What ``rl-coserve profile`` would measure of one simulated engine: every power of two of sequences, four lengths. ``costs``
    are those at this ``imbalance``."""
    engine, points = config.rollout.engine, list[ProfilePoint]()
    for batch in _powers(engine.max_num_seqs):
        fixed, growing = costs.decode(batch)
        for share in (1, 2, 4, 8):
            tokens = max(1, engine.max_model_len * share // 8)
            step = fixed + growing * batch * tokens
            points.append(ProfilePoint("decode", layout, batch, tokens, step, imbalance=imbalance))
            seconds = costs.prefill(batch * tokens, batch * tokens * tokens / 2, 1)
            points.append(ProfilePoint("prefill", layout, batch, tokens, max(seconds, 1e-9), imbalance=imbalance))
    return points


def shape_of(config: Config, costs: EngineCosts, layout: EngineLayout) -> EngineShape:
    """Its memory and start. Only where the cost model has a limit of KV."""
    start = config.sim.start_seconds + costs.weights.fetch + costs.weights.load
    model = hardware.model(config.sim.model)
    return EngineShape(layout, model.kv_bytes * config.sim.grain, costs.kv_tokens or 0, model.weight_bytes, start)


def _powers(most: int) -> list[int]:
    return [1 << power for power in range(most.bit_length()) if 1 << power <= most]


class SimRates:
    """What placement and degrees know of simulated workers: the profile that ``rl-coserve profile`` would have made of them."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._made: dict[tuple[str, int], WorkerRates] = {}

    def of_worker(self, workers: Sequence[SimWorker], worker: int) -> WorkerRates:
        """See :class:`orchestrator.placement.placer.TrajectoryPlacer`."""
        one = workers[worker]
        return self.rates_at(one.hardware, one.degree * max(1, one.ranks))

    def loading(self, hardware_class: str, degree: int) -> float:
        """Seconds until an engine of so many devices that has started has the weights."""
        costs = engine_costs(self._config, hardware_class, degree=degree)
        return costs.weights.fetch + costs.weights.load

    def rates_at(self, hardware_class: str, degree: int) -> WorkerRates:
        """Of a worker on so many devices. Raises ConfigError where the model does not fit."""
        found = self._made.get((hardware_class, degree))
        if found is None:
            config, layout = self._config, EngineLayout(degree)
            costs = engine_costs(config, hardware_class, degree=degree)
            shapes = [shape_of(config, costs, layout)] if costs.kv_tokens is not None else []
            profile = EngineProfile(measured_points(config, costs, layout), shapes)
            found = self._made[hardware_class, degree] = rates_of(profile, layout, config.rollout.engine.max_num_seqs)
        return found


def cutter_of(config: Config, task: Task, kept: Mapping[str, Any] | None = None) -> Cutter | None:
    """Who cuts the workers of a simulated run anew, at what it begins with; None: nobody. ``kept``: the degrees that it had,
    where it is resumed. Raises ConfigError."""
    if not config.rollout.placement.degrees.enabled:
        return planner_of(config, task, kept)
    if config.sim.costs == "linear" or not config.sim.tasks or config.rollout.placement.profile:
        return make_reallocation(config.rollout, kept=kept)
    per, rates, name = config.sim.tensor_parallel, SimRates(config), fleet(config)[0]
    heads = hardware.model(config.sim.model).heads
    start = config.sim.start_seconds + rates.loading(name, per)
    return make_reallocation(
        config.rollout, max(1, heads // per), lambda degree: rates.rates_at(name, per * degree), kept, start
    )


def resizable(config: Config, cutter: Cutter, kind: type[ResizableSimWorker] | None = None) -> Callable[..., SimWorker]:
    """Makes the workers of a run with this one. Arguments as :class:`ResizableSimWorker`."""
    layout = cutter.layout if isinstance(cutter, ParallelismPlanner) else EngineLayout(cutter.degrees[0])
    costs = engine_costs(config, fleet(config)[0], layout.tp, expert_ranks=layout.ep)
    return partial(kind or ResizableSimWorker, costs=costs)


def seat_workers(workers: Sequence[SimWorker], cutter: Cutter | None, watch: Watch | None) -> None:
    """Before they start: who watches them; where they are cut, each over its devices, the others parked."""
    for worker in workers:
        worker.watch = watch
    if cutter is None:
        return
    own = [worker for worker in workers if isinstance(worker, ResizableSimWorker)]  # the others are borrowed
    if isinstance(cutter, ParallelismPlanner):
        ranks, experts = engine_seats(cutter.layout, len(own)), cutter.layout.ep
    else:
        ranks, experts = engine_seats(cutter.degrees, len(own)), 1
    for worker, count in zip(own, ranks, strict=True):
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
