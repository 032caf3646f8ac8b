"""Simulated workers whose tensor parallelism changes between steps, and the profile that their planner reads (RollPacker 4.2).

The planner, :mod:`orchestrator.planning` and :mod:`orchestrator.reshaping` are those of a real run. As there, a worker stands for
one device (here: ``sim.tensor_parallel`` devices), and in layout TP t every t-th runs over t of them while the others are parked.
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
from orchestrator.planning import make_planner
from orchestrator.policies.planner import ParallelismPlanner
from orchestrator.policies.profile import EngineShape, Layout, Phase, Point, Profile
from orchestrator.sim import hardware
from orchestrator.sim.cluster import engine_costs, fleet
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
        self.ranks, self._misfit = ranks, ""
        if ranks:
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
    if not config.rollout.planner.enabled:
        return
    if len(set(fleet(config))) > 1:
        fix = "the planner cuts devices of one class: leave it out, or set rollout.planner.enabled to false"
        raise ConfigError("sim.fleet", dict(config.sim.fleet), fix)


def resizable(config: Config, planner: ParallelismPlanner) -> Callable[..., SimWorker]:
    """Makes the workers of a run with this planner, all of one life. Arguments as :class:`ResizableSimWorker`."""
    costs = engine_costs(config, fleet(config)[0], planner.layout.tp)
    return partial(ResizableSimWorker, moves=Moves(), costs=costs)


def seat(workers: Sequence[SimWorker], planner: ParallelismPlanner | None, watch: Watch | None) -> None:
    """Before they start: who watches them; with a planner every so many-th over its devices, the others parked."""
    for worker in workers:
        worker.watch = watch
    tp = planner.layout.tp if planner is not None else 1
    for index, worker in enumerate(workers if planner is not None else ()):
        worker.ranks = tp if index % tp == 0 else 0
        if not worker.ranks:
            worker.die()


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
