"""Training on what a store holds: the batches of a recorded run, in its order, through the filters of today.

Guarantees: without filters each batch holds exactly the trajectories of one recorded training step, in their places and
with their weights; a filter only takes members away (a group of one that is left is dropped), each with a counted reason;
every trajectory that is read is started in the replay's ledger and ends there as trained or filtered. One step is in memory
at a time: the footers of the files say which step they hold.

A replay is offline: nothing generates, so nothing is published and evaluated. The trainer counts versions from its own
first step on, whatever the recorded ones were. ``rl-coserve train CONFIG --replay RUN`` trains stock Megatron-Core in Ray actors,
started and closed as in :mod:`orchestrator.runtime.real_run`; the model is the config's, or else the one that the recorded run
started from; a warm-up in the config is done again. What is trained is in the new run folder's ``model-final``; there are no
checkpoints: the same replay gives the same weights.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from orchestrator.api import ConfigError, RetryableError, RunError, Task, TrainBatch, Trainer, Trajectory
from orchestrator.build import make_filters
from orchestrator.config import Config
from orchestrator.evaluation import SOLVED
from orchestrator.events import EventLog
from orchestrator.ledger import Ledger
from orchestrator.observe import run_view
from orchestrator.policies.batching.trajectory_filters import FilterChain
from orchestrator.policies.training.sample_weights import OverlongPenalty, effective_share
from orchestrator.run_folder import RunFolder
from orchestrator.runtime.engine_actors import RayTrainer
from orchestrator.runtime.pool_requests import trainer_ranks
from orchestrator.runtime.real_run import TRAINER_CLASS, trainer_arguments, trainer_environment, warm_up, within
from orchestrator.shards.shard_folder import ShardFolder
from orchestrator.store import read_parts, to_trajectory, trained_parts
from orchestrator.train_samples import NO_LIMIT, histogram, to_samples

FIELD = "--replay"


@dataclass(frozen=True, slots=True)
class Recorded:
    """A trajectory as it was trained, with its weight in the loss."""

    trajectory: Trajectory
    weight: float


class Recording:
    """The trained steps of a run folder, or of its ``trajectories``. Raises ConfigError when there are none."""

    def __init__(self, folder: str | Path) -> None:
        path = Path(folder)
        self._folder = path
        for root in (path / "trajectories", path):
            self._files = trained_parts(root) if root.is_dir() else {}
            if self._files:
                self._folder = root
                break
        if not self._files:
            raise ConfigError(FIELD, str(folder), "holds no trained trajectory; give a run folder, or its trajectories")

    def __len__(self) -> int:
        """Training steps."""
        return len(self._files)

    def steps(self) -> Iterator[list[Recorded]]:
        """Each step's batch, in the order of its places. Raises ConfigError when places are missing or given twice."""
        for step in sorted(self._files):
            rows: list[dict[str, Any]] = read_parts(self._folder, self._files[step]).to_pylist()
            places = [row["position"] for row in rows]
            if sorted(place for place in places if place is not None) != list(range(len(rows))):
                fix = f"step {step}: {len(rows)} trajectories do not stand at the places 0 to {len(rows) - 1}"
                raise ConfigError(FIELD, str(self._folder), f"{fix}; are two runs mixed here, or is it an older store?")
            rows.sort(key=lambda row: int(row["position"]))
            yield [Recorded(to_trajectory(row), 1.0 if row["weight"] is None else row["weight"]) for row in rows]


async def replay(
    recording: Recording,
    trainer: Trainer,
    events: EventLog,
    ledger: Ledger,
    filters: FilterChain,
    steps: int,
    overlong: OverlongPenalty = NO_LIMIT,
    shards: ShardFolder | None = None,
) -> int:
    """Train on at most ``steps`` recorded batches; returns how many there were. A batch of which nothing is left after
    filtering takes no step. ``shards``: where they lie for the trainer; None: they go by value. Raises RunError when the ledger
    does not close."""
    version = done = 0
    for recorded in recording.steps():
        if done == steps:
            break
        kept = _screen(recorded, ledger, filters)
        if not kept:
            continue
        if shards is not None:
            kept = [replace(item, trajectory=shards.finish(item.trajectory)) for item in kept]
        batch = TrainBatch(
            done,
            version,
            tuple(sample for item in kept for sample in to_samples(item.trajectory, item.weight, overlong)),
        )
        begun = events.time()
        with events.stage("train_step", done):
            metrics = await trainer.train_step(batch)
        for item in kept:
            ledger.end(item.trajectory.id, "trained", step=done)
        ledger.check()
        rewards = [float(item.trajectory.reward or 0.0) for item in kept]
        events.emit(
            "step",
            step=done,
            version=metrics.version,
            trained=len(kept),
            tokens=sum(item.trajectory.generated_tokens for item in kept),
            turns=sum(len(item.trajectory.turns) for item in kept),
            reward_mean=round(sum(rewards) / len(rewards), 6),
            success=round(sum(reward > SOLVED for reward in rewards) / len(rewards), 6),
            lag=histogram([max(0, version - item.trajectory.first_version) for item in kept]),
            weight_ess=round(effective_share([item.weight for item in kept]), 6),
            versions_mixed=sum(len(item.trajectory.versions) > 1 for item in kept),
            seconds=round(events.time() - begun, 6),
            fed=0,
            fed_seconds=0.0,
            metrics=dict(metrics.values),
            ledger=ledger.counts.as_dict(),
        )
        version, done = metrics.version, done + 1
    if not done:
        raise RunError("nothing was trained: the filters left no batch")
    return done


def _screen(recorded: list[Recorded], ledger: Ledger, filters: FilterChain) -> list[Recorded]:
    """Those of a batch that are trained, all of them in the ledger as taken; the others end as filtered."""
    passed: list[Recorded] = []
    for item in recorded:
        trajectory = item.trajectory
        ledger.start(trajectory.id, trajectory.group_id)
        for state in ("scoring", "buffered"):
            ledger.move(trajectory.id, state)
        if reason := filters.screen(trajectory):
            ledger.end(trajectory.id, "filtered", reason)
        else:
            passed.append(item)
    members = Counter(item.trajectory.group_id for item in passed)
    kept = []
    for item in passed:
        if members[item.trajectory.group_id] < 2:  # alone, it has nothing to be compared with
            ledger.end(item.trajectory.id, "filtered", "group_too_small")
        else:
            ledger.move(item.trajectory.id, "taken")
            kept.append(item)
    return kept


def recorded_model(config: Config, source: Path) -> str:
    """The folder of the model to begin with. Raises ConfigError when neither the config nor the run has one."""
    path = config.model.path or str(source / "model")
    if not (Path(path) / "config.json").is_file():
        raise ConfigError(FIELD, str(source), "has no model/ to begin with; name a Hugging Face folder in model.path")
    return path


async def replay_run(config: Config, folder: RunFolder, source: Path, task: Task, started: str) -> str:
    """One replay; ``started`` is a date. Returns "completed"."""
    loop = asyncio.get_running_loop()
    model, recording = recorded_model(config, source), Recording(source)
    steps = min(config.run.steps, len(recording))
    async with AsyncExitStack() as stack:
        events = EventLog(stack.enter_context(folder.append(folder.events_file)), loop.time)
        ledger = Ledger(stack.enter_context(folder.append(folder.ledger_file)), events.time)
        facts = {"mode": config.run.mode, "alpha": config.rollout.alpha, "name": folder.path.name, "simulated": False}
        await run_view.show_run(config, folder, events, print, stack)
        events.emit("run_start", **facts, steps=steps, started=started, resumed_from=None, replay=str(source))
        status, reason = "failed", ""
        try:
            trainer = RayTrainer(TRAINER_CLASS, trainer_environment(config), trainer_ranks(config))
            await trainer.start()
            stack.push_async_callback(trainer.close)
            with events.stage("startup", 0):
                starting = trainer.create(trainer_arguments(config, model) | {"total_steps": steps})
                await within(config.run.trainer_start_timeout, starting, "Megatron-Core", "run.trainer_start_timeout")
            await warm_up(config, task, trainer, events)
            overlong = config.reward.overlong.rule
            shards = ShardFolder(folder.shards)
            stack.callback(shards.close)
            filters = make_filters(config.filters)
            done = await replay(recording, trainer, events, ledger, filters, steps, overlong, shards)
            await trainer.call("export", str(folder.path / "model-final"))
            print(f"trained {done} of {len(recording)} recorded steps")
            status = reason = "completed"
        except (RunError, RetryableError) as error:
            reason = str(error)
            raise
        finally:
            events.emit("run_end", status=status, reason=reason, ledger=ledger.counts.as_dict())
    return reason
