"""What a run keeps does not grow with its trajectories: one three times as long ends with as many objects, and no trajectory is
left to the garbage collector, which looks at old objects once in days. In virtual time, with the production's loop and ledger;
engines, trainer and environments are twins, and are counted too."""

from __future__ import annotations

import asyncio
import gc
import sys
from collections.abc import Iterable
from types import FunctionType, ModuleType
from typing import Any, cast

import pytest

from orchestrator.api import ManagedWorker, Trajectory
from orchestrator.build import build_pipeline
from orchestrator.components import Components, Position
from orchestrator.config import Config, load_config
from orchestrator.environments.inprocess import InProcessSession
from orchestrator.envs import Episode
from orchestrator.events import EventLog
from orchestrator.ledger import Ledger
from orchestrator.policies.training import learning_alarms
from orchestrator.sim import simulated_worker
from orchestrator.sim.run_audit import RunAudit
from orchestrator.sim.simulated_shards import SimShards
from orchestrator.sim.simulated_worker import SimWeights, SimWorker, TurnMoves
from orchestrator.sim.twins import SimDisplay, SimReward, SimTask, SimTrainer
from scripts.bench.micro.environments import UnauditedBatches
from scripts.bench.virtual_run import run

STEPS = 10
_OF_THE_END = (asyncio.AbstractEventLoop, asyncio.Future, BaseException)
SHAPE = [
    "rollout.workers=2",
    "rollout.environments=48",
    "rollout.group_size=4",
    "rollout.groups_per_step=4",
    "evaluation.prompts=1",
    "sim.turns_max=4",
    "sim.response_tokens_mean=8",
    "sim.environment_seconds_sigma=1.5",
]


class Unkept:
    """For what a run writes down: journal, log, store."""

    def write(self, line: str, /) -> None:
        """Nothing."""

    def append(self, trajectory: Trajectory, step: int, outcome: str, **_: Any) -> None:
        """Nothing."""

    def behind(self) -> str:
        """Never."""
        return ""

    def flush(self) -> None:
        """Nothing."""


async def play(config: Config) -> tuple[int, int, int]:
    """A whole run. How many trajectories it had, and how many objects, and bytes, it ends with."""
    loop, weights, moves, unkept = asyncio.get_running_loop(), SimWeights(), TurnMoves(), Unkept()
    events = EventLog(unkept, loop.time)
    ledger = Ledger(unkept, events.time)
    task, reward = SimTask(config), SimReward(config)
    workers: list[ManagedWorker] = [
        SimWorker(f"sim-{index}", config, weights, moves=moves) for index in range(config.rollout.workers)
    ]
    trainer = SimTrainer(config, weights, cast(RunAudit, UnauditedBatches()))
    parts = Components(task, workers, trainer, reward, events, ledger, cast(Any, unkept), SimDisplay(False))
    shards = SimShards(config, task, reward, None, None, 0) if config.rollout.shards > 1 else None
    if shards is not None:
        parts.managers = shards.parts
    pipeline = build_pipeline(config, parts, Position())
    assert await pipeline.run() == "completed"
    if shards is not None:
        await shards.close()
    for worker in workers:
        await worker.close()
    await trainer.close()
    kept = reachable((pipeline, parts, moves))
    return ledger.counts.started, len(kept), sum(map(sys.getsizeof, kept))


def reachable(roots: Iterable[Any]) -> list[Any]:
    """All that these hold, but for code, and for what the event loop and the tasks and errors of the run's end hold."""
    found: dict[int, Any] = {}
    rest = list(roots)
    while rest:
        one = rest.pop()
        code = isinstance(one, (type, ModuleType, FunctionType)) or (type(one) is dict and "__builtins__" in one)
        if not code and id(one) not in found:
            found[id(one)] = one
            rest += [] if isinstance(one, _OF_THE_END) else gc.get_referents(one)
    return list(found.values())


MODES = pytest.mark.parametrize(
    "overrides",
    [
        ["run.mode=async"],
        ["run.mode=sync", "rollout.alpha=0"],
        ["run.mode=async", "rollout.shards=2"],
        ["run.mode=async", "rollout.redundant_groups=2", "rollout.environment_step_timeout=3"],
    ],
    ids=lambda overrides: " ".join(overrides),
)


@MODES
def test_a_run_three_times_as_long_ends_with_as_many_objects(
    overrides: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(simulated_worker, "REMEMBERED", 16)
    monkeypatch.setattr(learning_alarms, "_REMEMBERED", 16)
    runs = [run(play(load_config(None, [*SHAPE, *overrides, f"run.steps={steps}"]))) for steps in (STEPS, 3 * STEPS)]
    trajectories, objects, size = (later - sooner for sooner, later in zip(*runs, strict=True))
    assert trajectories > 250
    assert objects < trajectories / 2, f"{objects} more ({size} bytes) after {trajectories} more trajectories"


@MODES
def test_no_trajectory_is_left_to_the_garbage_collector_however_it_ends(overrides: list[str]) -> None:
    gc.collect()
    before = sum(isinstance(one, Episode | InProcessSession) for one in gc.get_objects())
    gc.disable()
    try:
        run(play(load_config(None, [*SHAPE, *overrides, f"run.steps={STEPS}"])))
        left = sum(isinstance(one, Episode | InProcessSession) for one in gc.get_objects()) - before
    finally:
        gc.enable()
    assert left <= 0, f"{left} episodes and sessions"
