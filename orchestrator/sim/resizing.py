"""Simulated workers whose devices change between steps, and the profile that their planner reads (RollPacker 4.2, Heddle 6.2).

The planner, the resource manager (:mod:`orchestrator.reallocating`) and :mod:`orchestrator.reshaping` are those of a real run. As
there, a worker stands for one device (here: ``sim.tensor_parallel`` devices), and an engine of t runs over its own and the t - 1
after it, while those workers are parked.
Guarantees: requests that move go on with what they would have said; a layout in which the model does not fit, or in which the
longest request could never run, does not come up, and is not in the profile; a change costs ``sim.start_seconds``, then the new
engine's own time to fetch and to load the weights, during which nothing is generated.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial

from orchestrator.api import ConfigError, RetryableError, Task
from orchestrator.config import Config
from orchestrator.parts import Parts
from orchestrator.planning import make_planner
from orchestrator.policies.planner import ParallelismPlanner
from orchestrator.policies.profile import EngineShape, Layout, Phase, Point, Profile
from orchestrator.policies.reallocation import Reallocation
from orchestrator.reallocating import make_reallocation
from orchestrator.reshaping import seats
from orchestrator.sim import hardware
from orchestrator.sim.cluster import engine_costs, fleet
from orchestrator.sim.foresight import Speeds
from orchestrator.sim.moving import Moves, MovingWorker
from orchestrator.sim.worker import SimWorker, Watch


class ResizableSimWorker(MovingWorker):
    """A :class:`~orchestrator.api.ResizableWorker`; made with ``costs`` of the layout that it begins in."""

    _misfit = ""  # why it cannot be started as it is cut now

    def __init__(self, name: str, config: Config, *arguments: object, **keywords: object) -> None:
        super().__init__(name, config, *arguments, **keywords)  # type: ignore[arg-type]
        self._config = config

    async def resize(self, ranks: int) -> None:
        """See the protocol."""
        self.cut(ranks)
        await asyncio.sleep(0)

    def cut(self, ranks: int) -> None:
        """End the process; the next one has ``ranks`` devices (0: there is none)."""
        self.die()
        self._cut(ranks)

    def begin(self, ranks: int) -> None:
        """It has so many devices from its first life on; with none there is no process."""
        self._cut(ranks)
        if not ranks or self._misfit:
            self.die()

    def _cut(self, ranks: int) -> None:
        self.ranks, self._misfit = ranks, ""
        if ranks:
            self.degree = ranks
            try:
                self._use(engine_costs(self._config, self.hardware, ranks))
            except ConfigError as error:
                self._misfit = str(error)

    async def restart(self) -> None:
        """See the protocol."""
        if self._misfit or not self.ranks:
            await asyncio.sleep(self._start_seconds)
            raise RetryableError(self._misfit or f"{self.name} is parked")
        await super().restart()


def planner_of(config: Config, task: Task) -> ParallelismPlanner | None:
    """The planner of a simulated run, at the layout that it begins with; None: it is off. Its profile is the cost model's, unless
    the config names a file. Raises ConfigError for a model that fits in no layout."""
    if not config.rollout.planner.enabled:
        return None
    if config.sim.costs == "linear":
        return make_planner(config, task)
    heads = hardware.model(config.sim.model).heads
    return make_planner(config, task, max(1, heads // config.sim.tensor_parallel), roofline_profile(config))


def check_planner(config: Config) -> None:
    """Raises ConfigError for what the simulator cannot cut."""
    if config.rollout.disaggregation.degrees:
        fix = "devices of a simulated worker are in sim.degrees: leave this out"
        raise ConfigError("rollout.disaggregation.degrees", dict(config.rollout.disaggregation.degrees), fix)
    if not config.rollout.reshapes:
        return
    who = "rollout.planner" if config.rollout.planner.enabled else "rollout.placement.degrees"
    if len(set(fleet(config))) > 1:
        fix = f"{who} cuts devices of one class: leave this out, or set {who}.enabled to false"
        raise ConfigError("sim.fleet", dict(config.sim.fleet), fix)
    if config.sim.fault_rate:
        fix = f"faults are not played with workers that change: set it to 0, or {who}.enabled to false"
        raise ConfigError("sim.fault_rate", config.sim.fault_rate, fix)
    if config.sim.degrees:
        fix = f"{who} chooses them: leave this out (rollout.placement.degrees.start says what the run begins with)"
        raise ConfigError("sim.degrees", list(config.sim.degrees), fix)


Cutter = ParallelismPlanner | Reallocation


def cutter_of(config: Config, task: Task) -> Cutter | None:
    """Who cuts the workers of a simulated run anew, at what it begins with; None: nobody. Raises ConfigError."""
    if not config.rollout.placement.degrees.enabled:
        return planner_of(config, task)
    if config.sim.costs == "linear" or not config.sim.tasks:
        return make_reallocation(config, task)
    heads = hardware.model(config.sim.model).heads
    speeds, name = Speeds(config), fleet(config)[0]
    return make_reallocation(config, task, max(1, heads // config.sim.tensor_parallel), partial(speeds.of, name))


def resizable(config: Config, cutter: Cutter) -> Callable[..., SimWorker]:
    """Makes the workers of a run with this one, all of one life. Arguments as :class:`ResizableSimWorker`."""
    degree = cutter.layout.tp if isinstance(cutter, ParallelismPlanner) else cutter.degrees[0]
    costs = engine_costs(config, fleet(config)[0], degree)
    return partial(ResizableSimWorker, moves=Moves(), costs=costs)


def seat(workers: Sequence[SimWorker], cutter: Cutter | None, watch: Watch | None) -> None:
    """Before they start: who watches them; where they are cut, each over its devices, the others parked."""
    for worker in workers:
        worker.watch = watch
    if cutter is None:
        return
    ranks = seats(cutter.layout.tp if isinstance(cutter, ParallelismPlanner) else cutter.degrees, len(workers))
    for worker, count in zip(workers, ranks, strict=True):
        assert isinstance(worker, ResizableSimWorker)
        worker.begin(count)


def hand_over(parts: Parts, cutter: Cutter | None) -> None:
    """Give it to a simulated run."""
    if cutter is None:
        return
    parts.kv_bytes = 0.0
    if isinstance(cutter, Reallocation):
        parts.reallocation = cutter
    else:
        parts.planner = cutter


def roofline_profile(config: Config) -> Profile:
    """What ``rl-coserve profile`` would measure of the simulated engines, in simulated tokens, of every power of two of devices
    that the model runs on. Raises ConfigError where it runs on none."""
    engine, name = config.rollout.engine, fleet(config)[0]
    batches = _powers(engine.max_num_seqs)
    lengths = [max(1, engine.max_model_len * share // 8) for share in (1, 2, 4, 8)]
    points: list[Point] = []
    shapes = []
    for tp in _powers(config.rollout.planner.max_tp or config.rollout.workers):
        try:
            costs = engine_costs(config, name, tp)
        except ConfigError:
            continue  # it does not fit, or cannot be split so
        room = costs.kv_tokens or 0
        if room < engine.max_model_len:
            continue
        layout = Layout(tp)
        for batch in batches:
            fixed, growing = costs.decode(batch)
            for tokens in lengths:
                decode: Phase = "decode"
                points.append(Point(decode, layout, batch, tokens, fixed + growing * batch * tokens))
                seconds = costs.prefill(batch * tokens, batch * tokens * tokens / 2, 1)
                points.append(Point("prefill", layout, batch, tokens, max(seconds, 1e-9)))
        start = config.sim.start_seconds + costs.fetch_seconds + costs.load_seconds
        bytes_of = hardware.model(config.sim.model)
        shapes.append(EngineShape(layout, bytes_of.kv_bytes * config.sim.grain, room, bytes_of.weight_bytes, start))
    if not shapes:
        fix = "the model runs on no number of these devices: take another device or a shorter rollout.engine.max_model_len"
        raise ConfigError("sim.device", name or config.sim.device, fix)
    return Profile(points, shapes)


def _powers(most: int) -> list[int]:
    return [1 << power for power in range(most.bit_length()) if 1 << power <= most]
