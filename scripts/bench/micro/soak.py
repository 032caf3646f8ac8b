"""The run of ``event-loop``: the production pipeline on a real clock, with 2,000 environments of mixed speed.

Real: asyncio, pipeline, proxy, buffer, ledger and journal, event log, Parquet store, checkpoints, and the sandboxes. Twins:
engines, trainer, reward. Of 64 of the environments every step is a tool call into a bubblewrap sandbox of its own, in which a
Python program sleeps and computes; the others sleep in this process. Which episode gets a sandbox is decided when it
starts: the next one, while fewer than 64 have one.
"""

from __future__ import annotations

import asyncio
import os
import random
import zlib
from array import array
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

from orchestrator.api import ManagedWorker, TrainBatch, TrajectoryError
from orchestrator.build import build_pipeline
from orchestrator.components import Components
from orchestrator.config import Config, parse_config
from orchestrator.durable_files import GroupCommit
from orchestrator.events import EventLog
from orchestrator.ledger import Ledger, recount
from orchestrator.observe.view.live_sample import Sampler
from orchestrator.pipeline import Pipeline
from orchestrator.run_folder import RunFolder
from orchestrator.runtime import garbage_collector
from orchestrator.runtime.run_records import BesideTheLoop
from orchestrator.sandbox import Sandbox, SandboxLimits
from orchestrator.sim.run_audit import RunAudit
from orchestrator.sim.seeded_draws import lognormal
from orchestrator.sim.simulated_worker import SimWeights, SimWorker
from orchestrator.sim.twins import SimDisplay, SimEnvironment, SimReward, SimTask, SimTrainer
from orchestrator.store import TrajectoryStore
from scripts.bench.micro.loop_delay import LoopDelay, WatchedSelector

ENVIRONMENTS, SANDBOXED = 2000, 64
SPEEDS = (0.25, 1.0, 1.0, 4.0)  # of environments, in turn: how much slower than the mean of the config
_LIMITS = SandboxLimits(wall_seconds=300.0, cpu_seconds=5, memory_bytes=256 << 20, processes=8, scratch_bytes=1 << 20)
_PROGRAM = "import sys, time, zlib\ntime.sleep(float(sys.argv[1]))\nprint(zlib.crc32(sys.argv[2].encode()))\n"
_PAGE = os.sysconf("SC_PAGE_SIZE")
_LONGEST = 120.0  # seconds of a step
_MEMORY_EVERY = 5.0  # seconds between two looks at the memory


@dataclass
class Soaked:
    """What the run left. ``memory``: (seconds since its start, resident MiB)."""

    delay: dict[str, Any] = field(default_factory=dict)
    memory: list[tuple[float, float]] = field(default_factory=list)
    in_flight: list[int] = field(default_factory=list)  # at each look at the memory
    sandboxes: list[int] = field(default_factory=list)  # that ran then
    sandbox_runs: int = 0
    seconds: float = 0.0
    processor_seconds: float = 0.0
    steps: int = 0
    ledger: dict[str, Any] = field(default_factory=dict)
    closes: bool = False  # the journal, recounted, agrees with the ledger
    stored: int = 0
    descriptors: tuple[int, int] = (0, 0)  # before and after
    tasks_left: list[str] = field(default_factory=list)


def config_of(mean: float, seed: int) -> Config:
    """The run: ``mean`` seconds an environment's step takes, on average over the speeds and without the sandboxed ones."""
    return parse_config(
        {
            "run": {"name": "soak", "seed": seed, "steps": 1_000_000},
            "rollout": {
                "workers": 8,
                "environments": ENVIRONMENTS,
                "alpha": 32,
                "group_size": 8,
                "groups_per_step": 32,
                "environment_step_timeout": 600.0,
                "trajectory_timeout": 3600.0,
                "engine": {"max_num_seqs": 64},
            },
            "evaluation": {"prompts": 1},
            "checkpoint": {"every": 4},
            "sim": {
                "environment_seconds_mean": mean,
                "environment_seconds_sigma": 1.0,
                "train_seconds_per_token": 1e-4,
                "turns_max": 8,
                "response_tokens_max": 64,
            },
        }
    )


class MixedTask(SimTask):
    """SimTask whose environments differ in speed, and some of which are in sandboxes."""

    def __init__(self, config: Config, sandbox: Sandbox, sandboxed: int, mark: str) -> None:
        super().__init__(config)
        self.sandbox = sandbox
        self.mark = mark
        self.running = 0  # programs in sandboxes now
        self.runs = 0
        self._free = sandboxed
        self._made = 0

    def environment(self) -> SimEnvironment:
        """See the protocol."""
        self._made += 1
        if self._made == 1:
            return MixedEnvironment(self, 0.0)  # of the evaluation, which comes first
        if self._free:
            self._free -= 1
            return SandboxedEnvironment(self)
        return MixedEnvironment(self, SPEEDS[self._made % len(SPEEDS)])

    def give_back(self) -> None:
        """A sandboxed episode has ended."""
        self._free += 1


class MixedEnvironment(SimEnvironment):
    """One of some speed."""

    def __init__(self, task: MixedTask, speed: float) -> None:
        super().__init__(task)
        self._speed = speed

    async def _work(self, rng: random.Random) -> None:
        costs = self._task.costs
        mean = costs.environment_seconds_mean * self._speed
        await asyncio.sleep(min(_LONGEST, lognormal(rng, mean, costs.environment_seconds_sigma)))
        self._check()


class SandboxedEnvironment(SimEnvironment):
    """One whose steps are programs in sandboxes, four times as slow as the mean."""

    def __init__(self, task: MixedTask) -> None:
        super().__init__(task)
        self._mixed = task
        self._given_back = False

    async def _work(self, rng: random.Random) -> None:
        costs, mixed = self._task.costs, self._mixed
        seconds = min(_LONGEST, lognormal(rng, 4 * costs.environment_seconds_mean, costs.environment_seconds_sigma))
        given = f"{mixed.mark}/{rng.random()}"
        program = [mixed.sandbox.interpreter, "-I", "-S", "-B", "-c", _PROGRAM, f"{seconds:.3f}", given]
        mixed.running, mixed.runs = mixed.running + 1, mixed.runs + 1
        try:
            outcome = await mixed.sandbox.run(program)
        finally:
            mixed.running -= 1
        if outcome.stdout.strip() != str(zlib.crc32(given.encode())).encode():
            raise TrajectoryError("environment_error", f"sandbox: {outcome}"[:300])
        self._check()

    async def close(self) -> None:
        """See the protocol."""
        if not self._given_back:
            self._given_back = True
            self._mixed.give_back()
        await super().close()


class UnauditedBatches:
    """For the trainer's twin: an audit remembers every trajectory, which a memory figure must not show."""

    trained_ids: tuple[str, ...] = ()

    def check_batch(self, batch: TrainBatch, version: int) -> None:
        """Nothing."""

    def record_training(self, batch: TrainBatch) -> None:
        """Nothing."""


async def soak(config: Config, folder: Path, selector: WatchedSelector, mark: str, seconds: float) -> Soaked:
    """Run for ``config.run.minutes``. ``mark`` is in the command line of every program that it starts. Raises what ends a
    run, and ConfigError where there is no sandbox."""
    loop = asyncio.get_running_loop()
    found, run = Soaked(), RunFolder(folder)
    sandbox = Sandbox(_LIMITS, slots=SANDBOXED)
    await sandbox.check()
    before = len(os.listdir("/proc/self/fd"))
    started, processor = loop.time(), os.times()
    with (
        run.append(run.events_file) as events_stream,
        run.append(run.ledger_file) as journal,
        GroupCommit((journal, events_stream), config.run.sync_seconds),
    ):
        events = EventLog(events_stream, loop.time)
        ledger = Ledger(journal, events.time)
        journals = (journal, events_stream)
        store = TrajectoryStore(run.trajectories, epoch=datetime.now(UTC), journals=journals)
        weights = SimWeights()
        task = MixedTask(config, sandbox, SANDBOXED, mark)
        workers: list[ManagedWorker] = [
            SimWorker(f"sim-{index}", config, weights) for index in range(config.rollout.workers)
        ]
        trainer = SimTrainer(config, weights, cast(RunAudit, UnauditedBatches()))
        checkpoints = BesideTheLoop(run.checkpoints, config.checkpoint.keep, journals)
        parts = Components(task, workers, trainer, SimReward(config), events, ledger, store, SimDisplay(), checkpoints)
        pipeline = build_pipeline(config, parts)
        garbage_collector.calm()  # as a real run does, and it is sampled for who looks at it
        sampler = Sampler(folder, events, print)
        sampler.pipeline = pipeline
        sampler.start()
        probe = LoopDelay(selector)
        watch = asyncio.create_task(_watch(found, pipeline, task, started, probe), name="memory")

        def stop() -> None:  # ending all at once is measured no more
            watch.cancel()
            probe.stop()
            pipeline.stop("the time is up")

        loop.call_later(seconds, stop)
        try:
            await pipeline.run()
        finally:
            probe.stop()
            watch.cancel()
            await sampler.close()
            for worker in workers:
                await worker.close()
            await trainer.close()
            store.close()
        found.ledger = ledger.counts.as_dict()
        found.steps = pipeline.position.step
    ended = os.times()
    found.seconds = loop.time() - started
    found.processor_seconds = ended.user + ended.system - processor.user - processor.system
    found.delay = probe.as_dict()
    found.sandbox_runs = task.runs
    found.closes = recount(run.lines(run.ledger_file)) == found.ledger
    await asyncio.sleep(0)
    found.tasks_left = [left.get_name() for left in asyncio.all_tasks() if left is not asyncio.current_task()]
    found.descriptors = (before, len(os.listdir("/proc/self/fd")))
    return found


async def _watch(found: Soaked, pipeline: Pipeline, task: MixedTask, started: float, probe: LoopDelay) -> None:
    """Memory and load, now and then; the delay from the moment on at which the environments are all there."""
    loop = asyncio.get_running_loop()
    while True:
        full = pipeline.rollout.in_flight >= ENVIRONMENTS * 0.99
        if not full and not found.memory:
            await asyncio.sleep(0.25)
            continue
        if not found.memory:
            probe.start()
        found.memory.append((loop.time() - started, resident_mib()))
        found.in_flight.append(pipeline.rollout.in_flight)
        found.sandboxes.append(task.running)
        await asyncio.sleep(_MEMORY_EVERY)


def resident_mib() -> float:
    """Of this process."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * _PAGE / 2**20


def marked_processes(mark: str) -> list[int]:
    """Processes whose command line has the mark, but for this one."""
    found = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) == os.getpid():
            continue
        try:
            text = (Path("/proc") / entry / "cmdline").read_bytes()
        except OSError:
            continue
        if mark.encode() in text:
            found.append(int(entry))
    return found


def slope(points: list[tuple[float, float]]) -> tuple[float, float, float]:
    """(MiB an hour, low, high): least squares over the medians of one-minute windows, 95 % interval of Student's t. Raises
    ValueError for fewer than three windows."""
    windows: dict[int, array[float]] = {}
    for seconds, mib in points:
        windows.setdefault(int(seconds // 60), array("d")).append(mib)
    rows = [((minute + 0.5) / 60, sorted(values)[len(values) // 2]) for minute, values in sorted(windows.items())]
    count = len(rows)
    if count < 3:
        raise ValueError(f"{count} minutes are too few for a slope")
    mean_x, mean_y = sum(x for x, _ in rows) / count, sum(y for _, y in rows) / count
    spread = sum((x - mean_x) ** 2 for x, _ in rows)
    rise = sum((x - mean_x) * (y - mean_y) for x, y in rows) / spread
    left = sum((y - mean_y - rise * (x - mean_x)) ** 2 for x, y in rows)
    half = _student(count - 2) * (left / (count - 2) / spread) ** 0.5
    return rise, rise - half, rise + half


def _student(freedom: int) -> float:
    """Quantile 0.975 of Student's t."""
    table = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
    return table[freedom - 1] if freedom <= len(table) else 1.96 + 2.5 / freedom
