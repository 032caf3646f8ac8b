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
from datetime import datetime, timedelta
from pathlib import Path
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
from orchestrator.environments.assemble import make_pool, owner_of
from orchestrator.environments.tools import ToolClient, ToolSettings, ToolUser
from orchestrator.events import EventLog, last_time
from orchestrator.ledger import Ledger
from orchestrator.occupancy import nvml
from orchestrator.parts import Parts, Position
from orchestrator.pipeline import Pipeline
from orchestrator.policies.allocation import Binding
from orchestrator.progress import Progress
from orchestrator.resources import Placement, cluster_resources
from orchestrator.resume import Resumed, rewind
from orchestrator.rewards.client import HttpReward
from orchestrator.rewards.judge import TEMPLATE, LLMJudge
from orchestrator.rewards.launch import FunctionHost, RewardHost
from orchestrator.rewards.voting import Voting
from orchestrator.runfolder import RunFolder
from orchestrator.runtime import collector, pools
from orchestrator.runtime import served as servers
from orchestrator.runtime.actors import RayTrainer, RayWorker
from orchestrator.runtime.checkpoints import BesideTheLoop
from orchestrator.runtime.mooncake import MooncakeMaster
from orchestrator.store import TrajectoryStore
from orchestrator.tasks import registry
from orchestrator.transfer import RelayEndpoint, open_metadata
from orchestrator.transfer.redis import PASSWORD_FILE

WORKER_CLASS = "vllm_rlplugin.worker:EngineWorker"
TRAINER_CLASS = "megatron_rlplugin.trainer:MegatronTrainer"
TINY_MODEL = "megatron_rlplugin.tiny:create_qwen3"
_START_LIMIT = 300.0  # seconds for an engine to come up on a slow machine


def start_ray(config: Config) -> None:
    """Connect to Ray, or start it on this machine. Before the event loop: it blocks for seconds."""
    import ray

    os.environ.update(_secrets(config))  # a local Ray passes its environment on
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_worker_niceness", "0")  # the engines are the work; Ray would run them at 15
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    common: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False}
    try:
        if config.ray.address:
            ray.init(address=config.ray.address, **common)
        else:
            _start_local_ray(
                num_cpus=config.ray.cpus,
                object_store_memory=config.ray.object_store_mb << 20,
                resources=cluster_resources(config.resources.pools),
                include_dashboard=False,
                **common,
            )
    except (ConnectionError, OSError, RuntimeError, ValueError) as error:
        raise ConfigError("ray.address", config.ray.address or "(local)", f"Ray did not start: {error}") from error


def _start_local_ray(**options: Any) -> None:
    """Ray gives its own processes 30 s to start, whatever the machine is busy with, and then raises a bare Exception."""
    import ray

    for last in (False, False, True):
        try:
            ray.init(**options)
            return
        except Exception as error:
            if type(error) is not Exception:
                raise
            ray.shutdown()
            if last:
                raise RuntimeError(str(error)) from error


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
        epoch = datetime.fromisoformat(started) - timedelta(seconds=events.time())  # a resume goes on counting
        store = TrajectoryStore(folder.trajectories, epoch=epoch)
        stack.callback(store.close)
        checkpoints = BesideTheLoop(folder.checkpoints, config.checkpoint.keep)
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
            collector.calm()
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
    tools: ToolClient | None = None

    async def start(self, ledger: Ledger, store: TrajectoryStore, checkpoints: Checkpoints) -> tuple[Parts, Position]:
        """Start everything; returns what the pipeline talks to, and where it begins."""
        config, resumed = self.config, self.resumed
        self.display.stage("startup", "relay, reward host, model")
        reward = await self._start_reward()
        endpoint = await self._start_relay()
        spread, variables = bool(config.ray.address), trainer_environment(config)
        ranks = pools.trainer_ranks(config)
        places = await asyncio.to_thread(self._places, endpoint)
        trainer = RayTrainer(TRAINER_CLASS, variables, ranks, list(places.values())[:ranks], spread=spread)
        self.stack.push_async_callback(trainer.close)
        await trainer.place()
        trainer.start()
        model = await self._model(trainer)
        workers = [
            RayWorker(
                f"vllm-{index}",
                WORKER_CLASS,
                _worker_arguments(config, model, endpoint, index),
                _environment(config.rollout.engine.threads) | _secrets(config),
                places.get(f"vllm-{index}"),
            )
            for index in range(config.rollout.workers)
        ]
        served = servers.workers(config, endpoint)
        managed: list[ManagedWorker] = [*workers, *served]
        for worker in managed:
            self.stack.push_async_callback(worker.close)
        tools = await self._start_tools()
        log = self.folder.logs / "environments.log"
        pool = make_pool(config, self.task, owner_of(self.folder.path), self.events, log=log, tools=tools)
        if pool is not None:
            self.stack.push_async_callback(pool.close)
            self.display.stage("startup", "environments")
            await pool.open()
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
        parts = Parts(self.task, managed, trainer, reward, self.events, ledger, store, self.display, checkpoints, pool)
        parts.tools = self.tools.stats if self.tools is not None else None
        parts.gpus = nvml()
        position = resumed.position if resumed is not None else Position()
        if version != position.version:
            raise RunError(f"the checkpoint says version {position.version}, the trainer restored {version}")
        return parts, position

    async def _start_trainer(self, trainer: RayTrainer, model: str, endpoint: RelayEndpoint) -> int:
        """The version it starts at."""
        await trainer.create(_trainer_arguments(self.config, model, endpoint))
        if self.resumed is not None and self.resumed.checkpoint is not None:
            return int(await trainer.load(str(self.resumed.checkpoint / "trainer")))
        if self.config.warmup.steps:
            self.display.stage(
                "warmup", f"{self.config.warmup.steps} supervised steps, skill {self.config.warmup.skill:g}"
            )
        await warm_up(self.config, self.task, trainer, self.events)
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

    async def _start_tools(self) -> dict[str, Any] | None:
        """The tools of the environments, warmed up; the task has them, other processes are sent what this returns."""
        settings = self.config.tools
        if not settings.any:
            return None
        urls, token = dict(settings.urls), os.environ.get("RL_COSERVE_TOOLS_TOKEN", "")
        if settings.functions:
            host = FunctionHost(
                settings.functions,
                field="tools.functions",
                concurrency=min(settings.concurrency, 2 * (os.cpu_count() or 1)),
                timeout=settings.timeout,
                idle_seconds=settings.idle_seconds,
                log=self.folder.logs / "tools-host.log",
            )
            await host.start()
            self.stack.push_async_callback(host.stop)
            self.children.append(("tools host", host.alive))
            urls, token = {name: host.url_of(name) for name in settings.functions}, host.token
        limits = {name: getattr(settings, name) for name in ("concurrency", "burst", "timeout", "retries")}
        found = ToolSettings(urls, token, seed=self.config.run.seed, **limits)
        self.tools = ToolClient(found)
        self.stack.push_async_callback(self.tools.close)
        user: object = self.task
        assert isinstance(user, ToolUser), "see preflight"
        user.use_tools(self.tools)
        cold = await self.tools.prewarm(settings.warm)
        if cold:
            self.display.message(f"no way to warm up tools {', '.join(cold)}: their first calls will be cold")
        return dict(vars(found))

    async def _start_relay(self) -> RelayEndpoint:
        settings = self.config.relay
        address = settings.master
        if settings.kind == "fsspec":
            address = address or f"file://{self.folder.path.absolute() / 'relay'}"
        elif not address:
            master = MooncakeMaster(
                port=settings.port, log=self.folder.logs / "mooncake-master.log", host=settings.host
            )
            await master.start()
            self.stack.push_async_callback(master.stop)
            self.children.append(("mooncake_master", master.alive))
            address = master.address
        return RelayEndpoint(
            job=self.folder.job(shared=bool(settings.metadata_url)),
            kind=settings.kind,
            master=address,
            metadata=settings.metadata_url
            or str(self.folder.metadata.resolve()),  # servers have other working directories
            segment_bytes=settings.segment_mb << 20,
            bucket_bytes=settings.bucket_mb << 20,
            keep_versions=settings.keep_versions,
            snapshot_every=settings.snapshot_every,
            codec_threads=settings.codec_threads,
        )

    def _places(self, endpoint: RelayEndpoint) -> dict[str, Placement]:
        """By worker; empty without pools."""
        if not self.config.resources.pools:
            return {}
        metadata = open_metadata(endpoint)
        self.stack.callback(metadata.close)
        manager, places = pools.place(self.config, metadata, endpoint.job, self._note_binding)

        def give_back() -> None:
            try:
                for placement in places.values():
                    placement.release()
                manager.close()
            except RetryableError as error:
                self.display.message(f"what this run had of the pools stays bound until it is started again: {error}")

        self.stack.callback(give_back)
        return places

    def _note_binding(self, binding: Binding) -> None:
        wish, devices = binding.wish, list(binding.devices)
        self.events.emit(
            "bound", worker=wish.worker, hardware=binding.hardware, devices=devices, instead=binding.fallback
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


async def warm_up(config: Config, task: Task, trainer: RayTrainer, events: EventLog) -> None:
    """Supervised steps before RL, as many as the config says; none of this data is used again."""
    settings, seed = config.warmup, config.run.seed
    if settings.steps == 0:
        return
    begun = events.time()
    samples = cast(DemonstratingTask, task).demonstrations(settings.steps * settings.batch_size, seed, settings.skill)
    losses: list[float] = []
    with events.stage("warmup", 0):
        for _ in range(settings.steps):
            batch = [next(samples) for _ in range(settings.batch_size)]
            metrics = await trainer.call("supervised_step", batch, settings.learning_rate)
            losses.append(float(metrics["loss"]))
        await trainer.call("finish_warmup")
    seconds = round(events.time() - begun, 3)
    events.emit("warmup", steps=settings.steps, loss_first=losses[0], loss_last=losses[-1], seconds=seconds)


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


def trainer_environment(config: Config) -> dict[str, str]:
    """What the trainer's processes start with."""
    return _environment(config.trainer.threads) | _secrets(config)


def _environment(threads: int) -> dict[str, str]:
    """Set before the process starts: thread pools are sized when libraries load."""
    return {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}


def _secrets(config: Config) -> dict[str, str]:
    """Where processes find secrets: a path, never the secret, as Ray keeps what it is told."""
    file = config.relay.metadata_password_file
    return {PASSWORD_FILE: str(Path(file).resolve())} if file else {}


async def _write_processes(folder: RunFolder, trainer: RayTrainer, workers: list[RayWorker]) -> None:
    """Process ids, for people and for fault tests."""
    lines = [f"{name} {pid}" for name, pid in (await trainer.pids()).items()]
    lines += [f"{worker.name} {await worker.pid()}" for worker in workers]
    (folder.path / "processes").write_text("\n".join([*lines, f"orchestrator {os.getpid()}"]) + "\n", encoding="utf-8")


__all__ = ["start_ray", "train", "trainer_environment", "warm_up"]
