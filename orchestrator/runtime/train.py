"""A real run: stock vLLM in Ray actors or in servers that are there already, stock Megatron-Core in Ray actors, Mooncake
between them, rewards behind HTTP.

This module only assembles and takes apart: every part is started with a time limit and a name to wait for, and closed in
reverse order whatever happens. What the run does is :mod:`orchestrator.pipeline`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any, cast

from orchestrator.api import (
    ConfigError,
    DemonstratingTask,
    ManagedWorker,
    RetryableError,
    RewardFunction,
    RunError,
    Task,
)
from orchestrator.checkpoint import Checkpoints
from orchestrator.config import Config
from orchestrator.events import EventLog, last_time
from orchestrator.ledger import Ledger
from orchestrator.pipeline import Parts, Pipeline, Position
from orchestrator.progress import Progress
from orchestrator.resume import Resumed, rewind
from orchestrator.rewards.client import HttpReward
from orchestrator.rewards.judge import TEMPLATE, LLMJudge
from orchestrator.rewards.launch import RewardHost
from orchestrator.rewards.voting import Voting
from orchestrator.runfolder import RunFolder
from orchestrator.runtime import served as servers
from orchestrator.runtime.actors import RayTrainer, RayWorker
from orchestrator.runtime.mooncake import MooncakeMaster
from orchestrator.store import TrajectoryStore
from orchestrator.tasks import registry
from orchestrator.transfer import RelayEndpoint

WORKER_CLASS = "vllm_rlplugin.worker:EngineWorker"
TRAINER_CLASS = "megatron_rlplugin.trainer:MegatronTrainer"
TINY_MODEL = "megatron_rlplugin.tiny:create_qwen3"
_START_LIMIT = 300.0  # seconds for an engine to come up on a slow machine


def start_ray(config: Config) -> None:
    """Connect to Ray, or start it on this machine. Before the event loop: it blocks for seconds."""
    import ray

    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_worker_niceness", "0")  # the engines are the work; Ray would run them at 15
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    common: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False}
    try:
        if config.ray.address:
            ray.init(address=config.ray.address, **common)
        else:
            ray.init(
                num_cpus=config.ray.cpus,
                object_store_memory=config.ray.object_store_mb << 20,
                include_dashboard=False,
                **common,
            )
    except (ConnectionError, OSError, RuntimeError, ValueError) as error:
        raise ConfigError("ray.address", config.ray.address or "(local)", f"Ray did not start: {error}") from error


async def train(config: Config, folder: RunFolder, task: Task, resume: bool, started: str) -> str:
    """One run, from nothing or from its newest checkpoint; ``started`` is a date. Returns why it ended."""
    loop = asyncio.get_running_loop()
    async with AsyncExitStack() as stack:
        display = Progress(steps=config.run.steps, minutes=config.run.minutes, name=folder.path.name, now=loop.time)
        stack.callback(display.close)
        events_stream = stack.enter_context(folder.append(folder.events_file))
        ledger_lines = folder.lines(folder.ledger_file)
        ledger_stream = stack.enter_context(folder.append(folder.ledger_file))
        events = EventLog(events_stream, loop.time, last_time(folder.events_file))
        ledger = Ledger(ledger_stream, events.time)
        store = TrajectoryStore(folder.trajectories)
        stack.callback(store.close)
        checkpoints = Checkpoints(folder.checkpoints, config.checkpoint.keep)
        resumed = rewind(checkpoints, ledger, ledger_lines, store) if resume else None
        for problem in resumed.damaged if resumed is not None else ():
            display.message(f"skipped a damaged checkpoint: {problem}")
        events.emit(
            "run_start",
            mode=config.run.mode,
            alpha=config.rollout.alpha,
            steps=config.run.steps,
            name=folder.path.name,
            simulated=False,
            started=started,
            resumed_from=resumed.step if resumed else None,
        )
        reason, status = "", "failed"
        try:
            with events.stage("startup", resumed.step if resumed else 0):
                assembly = _Assembly(config, folder, task, events, display, stack, resumed)
                parts, position = await assembly.start(ledger, store, checkpoints)
            pipeline = Pipeline(config, parts, position)
            watch = asyncio.create_task(_watch(assembly.children, pipeline), name="watch children")
            stack.callback(watch.cancel)
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.add_signal_handler(number, pipeline.stop, "interrupted")
                stack.callback(loop.remove_signal_handler, number)
            reason = await pipeline.run()
            status = "completed" if reason == "completed" else "interrupted"
            if status == "completed":
                await parts.trainer.call("export", str(folder.path / "model-final"))  # type: ignore[attr-defined]
        except (RunError, RetryableError) as error:
            reason = str(error)
            raise RunError(f"{reason}\n  resume with: rl-coserve train --resume {folder.path}") from error
        except asyncio.CancelledError:
            status, reason = "interrupted", "interrupted"
            raise
        finally:
            store.flush()
            events.emit("run_end", status=status, reason=reason, ledger=ledger.counts.as_dict())
        return reason


async def _watch(children: Sequence[tuple[str, Callable[[], bool]]], pipeline: Pipeline) -> None:
    """A child process that is gone ends the run with its name; Ray's actors are watched by their callers."""
    while True:
        await asyncio.sleep(1.0)
        for name, alive in children:
            if not alive():
                pipeline.fail(RunError(f"the {name} died; its log is in the run folder's logs"))
                return


@dataclass
class _Assembly:
    """Starts the parts of a run, in parallel where it can be; ``children`` are the processes to watch."""

    config: Config
    folder: RunFolder
    task: Task
    events: EventLog
    display: Progress
    stack: AsyncExitStack
    resumed: Resumed | None
    children: list[tuple[str, Callable[[], bool]]] = field(default_factory=list)

    async def start(self, ledger: Ledger, store: TrajectoryStore, checkpoints: Checkpoints) -> tuple[Parts, Position]:
        """Start everything; returns what the pipeline talks to, and where it begins."""
        config, resumed = self.config, self.resumed
        self.display.stage("startup", "relay, reward host, model")
        reward = await self._start_reward()
        endpoint = await self._start_relay()
        trainer = RayTrainer(TRAINER_CLASS, _environment(config.trainer.threads), _trainer_ranks(config))
        trainer.start()
        self.stack.push_async_callback(trainer.close)
        model = await self._model(trainer)
        workers = [
            RayWorker(
                f"vllm-{index}",
                WORKER_CLASS,
                _worker_arguments(config, model, endpoint, index),
                _environment(config.rollout.engine.threads),
            )
            for index in range(config.rollout.workers)
        ]
        served = servers.workers(config, endpoint)
        managed: list[ManagedWorker] = [*workers, *served]
        for worker in managed:
            self.stack.push_async_callback(worker.close)
        self.display.stage("startup", "vLLM and Megatron-Core")
        limit = _START_LIMIT + config.warmup.steps
        try:
            async with asyncio.timeout(limit):
                engines = asyncio.gather(*(worker.start() for worker in workers))
                starting = (self._start_trainer(trainer, model, endpoint), engines, servers.start(served))
                version, _, _ = await asyncio.gather(*starting)
        except TimeoutError as error:
            raise RunError(f"vLLM or Megatron-Core did not come up within {limit:.0f} s") from error
        await _write_processes(self.folder, trainer, workers)
        parts = Parts(self.task, managed, trainer, reward, self.events, ledger, store, self.display, checkpoints)
        position = resumed.position if resumed is not None else Position()
        if version != position.version:
            raise RunError(f"the checkpoint says version {position.version}, the trainer restored {version}")
        return parts, position

    async def _start_trainer(self, trainer: RayTrainer, model: str, endpoint: RelayEndpoint) -> int:
        """The version it starts at."""
        await trainer.create(_trainer_arguments(self.config, model, endpoint))
        if self.resumed is not None and self.resumed.checkpoint is not None:
            return int(await trainer.load(str(self.resumed.checkpoint / "trainer")))
        await self._warm_up(trainer)
        return 0

    async def _start_reward(self) -> RewardFunction:
        settings = self.config.reward
        reward = self._judge() if settings.judge.url else await self._function()
        self.stack.push_async_callback(reward.close)
        return reward if settings.votes == 1 else Voting(reward, settings.votes, settings.vote_by)

    def _judge(self) -> LLMJudge:
        settings, judge = self.config.reward, self.config.reward.judge
        return LLMJudge(
            self.task,
            judge.url,
            model=judge.model,
            criterion=judge.criterion,
            template=judge.template or TEMPLATE,
            low=judge.low,
            high=judge.high,
            structured=judge.structured,
            max_tokens=judge.max_tokens,
            temperature=0.0 if settings.votes == 1 else 0.7,  # else all votes would be the same
            token=os.environ.get("RL_COSERVE_JUDGE_TOKEN", ""),
            concurrency=settings.concurrency,
            timeout=settings.timeout,
            retries=settings.retries,
            seed=self.config.run.seed,
        )

    async def _function(self) -> HttpReward:
        settings = self.config.reward
        url, token = settings.url, os.environ.get("RL_COSERVE_REWARD_TOKEN", "")
        if not url:
            host = RewardHost(
                settings.function or registry.reward_of(self.task),
                concurrency=min(settings.concurrency, 2 * (os.cpu_count() or 1)),
                timeout=settings.timeout,
                idle_seconds=settings.idle_seconds,
                log=self.folder.logs / "reward-host.log",
            )
            await host.start()
            self.stack.push_async_callback(host.stop)
            self.children.append(("reward host", host.alive))
            url, token = host.url, host.token
        return HttpReward(
            url,
            token=token,
            concurrency=settings.concurrency,
            timeout=settings.timeout,
            retries=settings.retries,
            seed=self.config.run.seed,
        )

    async def _start_relay(self) -> RelayEndpoint:
        settings = self.config.relay
        address = settings.master
        if settings.kind == "fsspec":
            address = address or f"file://{self.folder.path.absolute() / 'relay'}"
        elif not address:
            master = MooncakeMaster(port=settings.port, log=self.folder.logs / "mooncake-master.log")
            await master.start()
            self.stack.push_async_callback(master.stop)
            self.children.append(("mooncake_master", master.alive))
            address = master.address
        return RelayEndpoint(
            job=self.folder.path.name,
            kind=settings.kind,
            master=address,
            metadata=str(self.folder.metadata.resolve()),  # servers have other working directories
            segment_bytes=settings.segment_mb << 20,
            bucket_bytes=settings.bucket_mb << 20,
            keep_versions=settings.keep_versions,
            snapshot_every=settings.snapshot_every,
        )

    async def _model(self, trainer: RayTrainer) -> str:
        """The model's folder; a tiny one is made in the trainer's process."""
        config, folder = self.config, self.folder.model
        if config.model.path:
            return config.model.path
        if not (folder / "config.json").exists():
            shape = config.model.model_dump(exclude={"path"})
            sizes = {"vocabulary": list(self.task.vocabulary), "max_positions": config.rollout.engine.max_model_len}
            await trainer.function(TINY_MODEL, {"folder": str(folder), **shape, **sizes, "seed": config.run.seed})
        return str(folder)

    async def _warm_up(self, trainer: RayTrainer) -> None:
        """Supervised steps before RL; none of this data is used again."""
        settings, seed = self.config.warmup, self.config.run.seed
        if settings.steps == 0:
            return
        self.display.stage("warmup", f"{settings.steps} supervised steps, skill {settings.skill:g}")
        begun = self.events.time()
        task = cast(DemonstratingTask, self.task)  # checked before the run
        samples = task.demonstrations(settings.steps * settings.batch_size, seed, settings.skill)
        losses: list[float] = []
        with self.events.stage("warmup", 0):
            for _ in range(settings.steps):
                batch = [next(samples) for _ in range(settings.batch_size)]
                metrics = await trainer.call("supervised_step", batch, settings.learning_rate)
                losses.append(float(metrics["loss"]))
            await trainer.call("finish_warmup")
        seconds = round(self.events.time() - begun, 3)
        first, last = losses[0], losses[-1]
        self.events.emit("warmup", steps=settings.steps, loss_first=first, loss_last=last, seconds=seconds)


def _worker_arguments(config: Config, model: str, endpoint: RelayEndpoint, index: int) -> dict[str, Any]:
    engine = config.rollout.engine
    return {
        "model": model,
        "dtype": config.model.dtype,
        "max_num_seqs": engine.max_num_seqs,
        "max_model_len": engine.max_model_len,
        "block_size": engine.block_size,
        "kv_cache_mb": engine.kv_cache_mb,
        "threads": engine.threads,
        "seed": config.run.seed + index,
        "relay": endpoint.to_dict(),
    }


def _trainer_ranks(config: Config) -> int:
    """Experts are split over data-parallel ranks: they need no ranks of their own."""
    trainer = config.trainer
    return trainer.tensor_parallel * trainer.pipeline_parallel * trainer.data_parallel


def _trainer_arguments(config: Config, model: str, endpoint: RelayEndpoint) -> dict[str, Any]:
    return {
        "model": model,
        "settings": config.trainer.model_dump(),
        "total_steps": config.run.steps,
        "seed": config.run.seed,
        "dtype": config.model.dtype,
        "relay": endpoint.to_dict(),
        "temperature": config.rollout.temperature,
    }


def _environment(threads: int) -> dict[str, str]:
    """Set before the process starts: thread pools are sized when libraries load."""
    return {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}


async def _write_processes(folder: RunFolder, trainer: RayTrainer, workers: list[RayWorker]) -> None:
    """Process ids, for people and for fault tests."""
    lines = [f"{name} {pid}" for name, pid in (await trainer.pids()).items()]
    lines += [f"{worker.name} {await worker.pid()}" for worker in workers]
    (folder.path / "processes").write_text("\n".join([*lines, f"orchestrator {os.getpid()}"]) + "\n", encoding="utf-8")


__all__ = ["start_ray", "train"]
