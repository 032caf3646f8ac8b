"""A real run: stock vLLM in Ray actors or in servers that are there already, stock Megatron-Core in Ray actors, Mooncake
between them, rewards behind HTTP.

This module only assembles and takes apart: every part is started with a time limit and a name to wait for, and closed in
reverse order whatever happens. What the run does is :mod:`orchestrator.pipeline`.

A run is a chain of *lives*: one whose relay dies, or whose trainer does not come back, is taken apart like any other, and the
next one does what ``--resume`` does, in the same process and folder. Functions' hosts and the trainer come back within a life
(:mod:`orchestrator.runtime.process_keeper`, :mod:`orchestrator.runtime.revived_trainer`).
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import fcntl
import functools
import json
import logging
import os
import secrets
import shlex
import shutil
import signal
import sys
import tempfile
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, TypeVar, cast

from orchestrator.api import (
    ConfigError,
    DemonstratingTask,
    ManagedWorker,
    PartLost,
    RetryableError,
    RunError,
    Task,
    Trainer,
)
from orchestrator.borrowing import served_workers as servers
from orchestrator.borrowing.discovery import Market
from orchestrator.build import build_environment_pool, build_pipeline
from orchestrator.cluster.actor import LOGS, FirstReport
from orchestrator.colocation.stream_training import kv_bytes_per_token
from orchestrator.components import Components, PoolSizes, Position
from orchestrator.config import Config
from orchestrator.environments.tool_functions import ToolTally
from orchestrator.events import EventLog
from orchestrator.observe import run_view
from orchestrator.observe.occupancy import nvml
from orchestrator.observe.progress import Progress
from orchestrator.policies.placement.device_allocation import DeviceBinding
from orchestrator.resources import Placement, ResourceManager, cluster_resources
from orchestrator.resources.pool_sizes import pools_of, read_sizes
from orchestrator.run_folder import RunFolder, environment_owner
from orchestrator.runtime import (
    device_plan,
    function_hosts,
    garbage_collector,
    memory_plan,
    pool_requests,
    role_logs,
    tiny_model_setup,
)
from orchestrator.runtime.engine_actors import RayTrainer
from orchestrator.runtime.engine_cuts import engine_cuts
from orchestrator.runtime.loop_watch import LoopWatch
from orchestrator.runtime.mooncake_master import MooncakeMaster
from orchestrator.runtime.node_check import NodeCheck
from orchestrator.runtime.own_engines import OwnEngines, secret_files, thread_variables
from orchestrator.runtime.process_keeper import Keeper
from orchestrator.runtime.resume import Resumed
from orchestrator.runtime.revived_trainer import RevivedTrainer
from orchestrator.runtime.run_records import RunRecords
from orchestrator.runtime.shard_nodes import SpreadShards
from orchestrator.runtime.shard_process import LocalShards
from orchestrator.runtime.site_caches import start_site_caches
from orchestrator.transfer import RelayEndpoint, SqliteMetadata, open_metadata
from orchestrator.transfer.manifest_signing import KEY_FILE, Signer

TRAINER_CLASS = "megatron_rlplugin.trainer.megatron_trainer:MegatronTrainer"
COLOCATED_CLASS = "megatron_rlplugin.trainer.colocated_trainer:ColocatedTrainer"
_START_SECONDS = 60.0  # of a process of Ray on each node
_RESTART_PAUSE = 5.0  # seconds before a life that follows one which trained nothing, times the number of these

T = TypeVar("T")


async def within(seconds: float, starting: Awaitable[T], what: str, key: str) -> T:
    """What it answers when it has come up. Raises RunError after ``seconds``, which are the config's ``key``."""
    try:
        async with asyncio.timeout(seconds) as limit:
            return await starting
    except TimeoutError as error:
        if not limit.expired():
            raise
        raise RunError(f"{what} did not come up within {seconds:g} s: raise {key}, or read the logs") from error


def start_ray(config: Config) -> None:
    """Connect to Ray, or start it on this machine. Before the event loop: it blocks for seconds."""
    os.environ.update(secret_files(config))  # a local Ray passes its environment on
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_worker_niceness", "0")  # the engines are the work; Ray would run them at 15
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_prestart_worker_first_driver", "0")  # our actors, with variables of their own, use none
    common: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False}
    try:
        if config.ray.address:
            import ray

            ray.init(address=config.ray.address, **common)
            if shlex.quote(sys.executable) != sys.executable:  # then its nodes may have such a path, too
                _check_interpreters(config.ray.address)
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


def _check_interpreters(address: str) -> None:
    """Raises ConfigError for a node whose Ray has an interpreter that a shell misreads: it gives its path to one as it is, and no
    process that has variables of its own would ever start there."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    say = ray.remote(num_cpus=0)(lambda: sys.executable)
    nodes = {str(node["NodeID"]): str(node["NodeManagerAddress"]) for node in ray.nodes() if node["Alive"]}
    asked = [
        say.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote() for node in nodes
    ]
    for host, path in zip(nodes.values(), ray.get(asked, timeout=_START_SECONDS), strict=True):
        if shlex.quote(path) != path:
            fix = f"Ray on {host} runs {path}, which it gives to a shell without quotes, so no engine would start there"
            raise ConfigError("ray.address", address, f"{fix}: install it in a folder whose path has no blanks")


@functools.cache
def _ray_folder() -> str:
    """Of this process's local Ray: its sockets, logs and token, which nobody else may reach. (Ray's own folder is 0777, its token
    0644.) Short: the paths of sockets have 107 characters. Those of processes that were killed are removed."""
    for lock in Path("/tmp").glob("rl-ray-*/lock"):
        _remove_unless_locked(lock)
    folder = tempfile.mkdtemp(prefix="rl-ray-", dir="/tmp")  # mode 0700
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    token, lock = Path(folder) / "token", Path(folder) / "lock"
    with os.fdopen(os.open(token, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii") as file:
        file.write(secrets.token_hex(32))
    held = os.open(lock.with_name(".lock"), os.O_RDONLY | os.O_CREAT | os.O_EXCL, 0o600)  # while this process lives
    fcntl.flock(held, fcntl.LOCK_EX)
    lock.with_name(".lock").rename(lock)
    return folder


def _remove_unless_locked(lock: Path) -> None:
    """The folder around it, if it is ours and its process is gone."""
    with contextlib.suppress(OSError):
        file = os.open(lock, os.O_RDONLY | os.O_NOFOLLOW)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if lock.parent.stat().st_uid == os.getuid():
                shutil.rmtree(lock.parent, ignore_errors=True)
        finally:
            os.close(file)


def _start_local_ray(**options: Any) -> None:
    """Ray gives its own processes 30 s to start, whatever the machine is busy with, and then raises a bare Exception. Two that
    start at once may choose one port. Neither lasts, so both are tried again."""
    folder = _ray_folder()
    if "ray" not in sys.modules:  # it looks at its mode when it is imported; a later start switches tokens on by itself
        os.environ.setdefault("RAY_AUTH_MODE", "token")
    if "RAY_AUTH_TOKEN" not in os.environ:
        os.environ.setdefault("RAY_AUTH_TOKEN_PATH", f"{folder}/token")
    import ray

    # "local": a new one, whatever an earlier Ray of this process left in the folder, which Ray makes 0777; nobody gets as far
    options |= {"address": "local", "_temp_dir": f"{folder}/r"}
    if (quoted := shlex.quote(sys.executable)) != sys.executable:
        # it gives this to a shell as it is: in a folder with a space no process that has variables of its own would ever start
        options["runtime_env"] = {"py_executable": quoted}
    if ray.is_initialized():  # what runs there is not ours to shut down
        raise RuntimeError("this process has a Ray already")
    _forget_ray_token()  # not while a Ray uses it
    for last in (False, False, True):
        try:
            ray.init(**options)
            return
        except Exception as error:
            ray.shutdown()
            if last or isinstance(error, ValueError | TypeError):  # of the options
                raise RuntimeError(str(error)) from error


def _forget_ray_token() -> None:
    """Ray reads its token once per process. An earlier Ray of this process may have had another, which the new head refuses."""
    from ray import _raylet

    if loader := getattr(_raylet, "AuthenticationTokenLoader", None):  # not in every version
        loader.instance().reset_cache()


async def train(config: Config, folder: RunFolder, task: Task, resume: bool, started: str) -> str:
    """One run, from nothing or from its newest checkpoint; ``started`` is a date. Returns why it ended. The folder stays locked:
    what its report says is this run's. A SIGTERM while parts start, or end, cancels that: the first process of a container
    would not be ended by it."""
    if warning := folder.lock():
        print(warning, flush=True)
    loop, this, asked = asyncio.get_running_loop(), asyncio.current_task(), False
    assert this is not None

    def end() -> None:
        nonlocal asked
        asked = True
        this.cancel()

    loop.add_signal_handler(signal.SIGTERM, end)
    try:
        return await _live(config, folder, task, resume, started, end)
    except asyncio.CancelledError:
        if not asked:
            raise
        this.uncancel()
        return "interrupted"
    finally:
        loop.remove_signal_handler(signal.SIGTERM)


async def _live(
    config: Config, folder: RunFolder, task: Task, resume: bool, started: str, end: Callable[[], None]
) -> str:
    """Life after life, while there is anything to continue."""
    loop = asyncio.get_running_loop()
    begun, lost_at = loop.time(), None
    trained, restarts = -1, 0  # steps ever trained; lives in a row that trained no new one
    while True:
        date = datetime.fromisoformat(started) + timedelta(seconds=round(loop.time() - begun))
        life = _Life(config, folder, task, resume, date.isoformat(), lost_at, end)
        try:
            return await life.run()
        except (RunError, RetryableError, ConfigError) as error:
            if isinstance(error, ConfigError) and lost_at is None:
                raise
            restarts = 0 if life.trained > trained else restarts + 1
            trained = max(trained, life.trained)
            curable = isinstance(error, PartLost) or (lost_at is not None and not life.up)
            if not curable or restarts >= config.run.restarts:
                hint = (
                    f"\n  resume with: rl-coserve train --resume {shlex.quote(str(folder.path))}" if life.opened else ""
                )
                tail = role_logs.tail_of(folder.logs, str(error))
                raise RunError("\n".join(filter(None, (f"{error}{hint}", tail)))) from error
            print(f"{error}\n  continuing from the newest checkpoint", flush=True)
            lost_at, resume = loop.time(), True
            await asyncio.sleep(restarts * _RESTART_PAUSE)


@dataclass
class _Life:
    """The run until it ends or loses a part. ``lost_at``: when the one before it did (loop time), None: there was none. ``end()``
    is what a SIGTERM does before all parts are there, and after."""

    config: Config
    folder: RunFolder
    task: Task
    resume: bool
    started: str
    lost_at: float | None
    end: Callable[[], None]
    opened: bool = False  # its records were read, so that a resume can read them
    up: bool = False  # all parts have been there
    trained: int = -1  # steps

    async def run(self) -> str:
        """Returns why it ended. Raises RunError and RetryableError."""
        async with AsyncExitStack() as stack:
            return await self._run(stack)

    async def _run(self, stack: AsyncExitStack) -> str:
        config, folder, task, started = self.config, self.folder, self.task, self.started
        loop = asyncio.get_running_loop()
        display = Progress(steps=config.run.steps, minutes=config.run.minutes, name=folder.path.name, now=loop.time)
        stack.callback(display.close)
        records = RunRecords.open(folder, config, loop.time, datetime.fromisoformat(started), resume=self.resume)
        stack.enter_context(records)
        stack.enter_context(role_logs.orchestrator_log(folder.logs))
        rotating = asyncio.create_task(role_logs.rotate_forever(folder.logs), name="rotate logs")
        stack.callback(rotating.cancel)
        self.opened = True
        events, ledger, store, resumed = records.events, records.ledger, records.store, records.resumed
        events.listen(display.take)
        for repair in records.repairs:
            display.message(repair)
        if resumed is not None:
            display.message(resumed.words(config.run.steps))
        sampler = await run_view.show_run(config, folder, events, display.message, stack)
        events.emit(
            "run_start",
            mode=config.run.mode,
            alpha=config.rollout.alpha,
            steps=config.run.steps,
            name=folder.path.name,
            simulated=False,
            started=started,
            resumed_from=resumed.step if resumed else None,
            rolled_back=resumed.rolled_back if resumed else 0,
        )
        reason, status = "", "failed"
        try:
            with events.stage("startup", resumed.step if resumed else 0):
                assembly = _Assembly(config, folder, task, events, display, stack, resumed)
                parts, position = await assembly.start(records)
            garbage_collector.calm()
            watch = LoopWatch(lambda detail: events.emit("alarm", what="event_loop", detail=detail)).start()
            stack.callback(watch.stop)
            nodes = assembly.nodes.watch(lambda detail: events.emit("alarm", what="installed", detail=detail))
            stack.callback(asyncio.create_task(nodes, name="look at what is installed").cancel)
            pipeline = build_pipeline(config, parts, position)
            await stack.enter_async_context(run_view.watch_pipeline(sampler, config, folder, events, pipeline))
            assembly.keeper.start(pipeline.fail)
            assembly.fail_with_beats(pipeline.fail)
            stack.push_async_callback(assembly.keeper.close)
            self.up = True
            if self.lost_at is not None:
                seconds = loop.time() - self.lost_at
                events.emit("recovered", what="run", detail=f"from step {position.step}, {seconds:.1f} s")
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.add_signal_handler(number, pipeline.stop, "interrupted", config.checkpoint.grace)
            stack.callback(loop.remove_signal_handler, signal.SIGINT)
            stack.callback(loop.add_signal_handler, signal.SIGTERM, self.end)
            try:
                reason = await pipeline.run()
            finally:
                self.trained = pipeline.position.step
            status = "completed" if reason == "completed" else "interrupted"
            if status == "completed":
                await _export(parts.trainer, folder)
        except (RunError, RetryableError, ConfigError) as error:
            reason = str(error)
            if isinstance(error, PartLost):
                events.emit("fault", what="run", cause="part lost", detail=reason[:300])
            raise
        except asyncio.CancelledError:
            status, reason = "interrupted", "interrupted"
            raise
        finally:
            store.flush()
            events.emit("run_end", status=status, reason=reason, ledger=ledger.counts.as_dict())
        return reason


async def _export(trainer: Any, folder: RunFolder) -> None:
    try:
        await trainer.call("export", str(folder.path / "model-final"))
    except RetryableError as error:
        raise PartLost(f"the trainer failed in export: {error}") from error


@dataclass
class _Assembly:
    """Starts the parts of a run, in parallel where it can be; ``keeper`` knows the processes to watch."""

    config: Config
    folder: RunFolder
    task: Task
    events: EventLog
    display: Progress
    stack: AsyncExitStack
    resumed: Resumed | None
    keeper: Keeper = field(init=False)
    nodes: NodeCheck = field(default_factory=NodeCheck)
    beating: asyncio.Task[None] | None = None  # where other jobs share the pools

    def __post_init__(self) -> None:
        self.keeper = Keeper(self.events)

    async def start(self, records: RunRecords) -> tuple[Components, Position]:
        """Start everything; returns what the pipeline talks to, and where it begins."""
        ledger, store, checkpoints = records.ledger, records.store, records.checkpoints
        config, resumed = self.config, self.resumed
        self.display.stage("startup", "relay, reward host, model")
        rewards = await function_hosts.start_reward(
            config, self.task, self.keeper, self.stack, self.folder, self.events
        )
        endpoint = await self._start_relay()
        printed = {LOGS: str(self.folder.logs.resolve())}
        spread, variables = bool(config.ray.address), trainer_environment(config) | printed
        ranks = pool_requests.trainer_ranks(config)
        manager, bound = await self._bound(endpoint)
        places, later = await asyncio.to_thread(self._places, endpoint, manager, bound)
        shared = config.rollout.colocation.enabled
        kind = COLOCATED_CLASS if shared else TRAINER_CLASS
        placed = list(places.values())[:ranks]
        new_trainer = functools.partial(RayTrainer, kind, variables, ranks, placed, spread=spread, heard=self._hear)
        trainer = new_trainer()
        self.stack.push_async_callback(trainer.close)
        await trainer.start()
        limit = config.run.trainer_start_timeout
        model = await within(limit, self._model(trainer), "the trainer's process", "run.trainer_start_timeout")
        kept = resumed.position.degrees if resumed is not None else None
        cut = await engine_cuts(config, self.task, model, _shape(model), trainer.function, kept)
        caches = await start_site_caches(config, places, self.stack)
        for name, at in caches.places.items():
            self.display.message(f"{name} reads weights at the cache of its site, {at}")
        beside = {**rewards.beside, **printed, **caches.variables}
        for label, at in caches.labels.items():
            self.display.message(f"engines on nodes with {label} read weights at the cache of their site, {at}")

        def told(worker: str, labels: Mapping[str, str]) -> RelayEndpoint:
            return caches.endpoint_of(worker, endpoint, labels)

        engines = OwnEngines(config, model, told, places, cut, beside, self._hear, later)
        self.stack.push_async_callback(engines.close)
        workers = engines.workers
        resuming = resumed is not None
        market = Market(config, self.task, endpoint, self.events, caches.endpoint_of, resumed=resuming)
        self.stack.push_async_callback(market.close)
        served = await market.borrow()
        managed: list[ManagedWorker] = [*workers, *served]
        tools = await function_hosts.start_tools(config, self.task, self.keeper, self.stack, self.folder.logs)
        if tools is not None and tools.cold:
            cold = ", ".join(tools.cold)
            self.display.message(f"no way to warm up tools {cold}: their first calls will be cold")
        log = self.folder.logs / "environments.log"
        settings = None if tools is None else tools.settings
        owner, tally = environment_owner(self.folder.path), ToolTally(settings["urls"] if settings else ())
        shards: LocalShards | SpreadShards | None = None
        if config.rollout.shards_on == "nodes":
            asked = config, rewards.call, rewards.host, records.shards, owner, self.folder.logs
            shards = SpreadShards(*asked, self._hear_shard)
            self.stack.push_async_callback(shards.close)
            await shards.open()
        elif config.rollout.shards > 1:
            shards = LocalShards(config, rewards.call, records.shards, owner, self.folder.logs)
            self.stack.push_async_callback(shards.close)
        pool = None
        if shards is None:
            pool = build_environment_pool(config, self.task, owner, self.events, log=log, tools=settings, tally=tally)
        if pool is not None:
            self.stack.push_async_callback(pool.close)
            self.display.stage("startup", "environments")
            await pool.open()
        self.display.stage("startup", "vLLM and Megatron-Core")
        up = asyncio.gather(*(worker.start() for worker in workers), servers.start(served, self.events))
        first = self._start_trainer(trainer, model, endpoint)
        limit = config.run.trainer_start_timeout + config.warmup.steps
        version, _ = await asyncio.gather(
            within(limit, first, "Megatron-Core", "run.trainer_start_timeout"),
            within(config.rollout.start_timeout, up, "vLLM", "rollout.start_timeout"),
        )
        ranks_alive = await trainer.pids()
        others = dict if shards is None else shards.pids

        def record() -> None:
            self.keeper.record(self.folder.path / "processes", lambda: {**ranks_alive, **engines.pids(), **others()})

        async def restore(new: RayTrainer, checkpoint: str) -> int:
            await new.start()
            await new.create(trainer_arguments(config, model) | {"relay": endpoint.to_dict()})
            found = int(await new.load(checkpoint))
            ranks_alive.update(await new.pids())
            record()
            return found

        def bring_back(new: RayTrainer, checkpoint: str) -> Awaitable[int]:
            key = "run.trainer_start_timeout"
            return within(config.run.trainer_start_timeout, restore(new, checkpoint), "Megatron-Core", key)

        reviving: Trainer = trainer
        if config.run.restarts and not shared:  # on the rollout's devices it begins a life with the engines
            reviving = RevivedTrainer(trainer, new_trainer, bring_back, checkpoints, self.events, config.run.restarts)
            self.stack.push_async_callback(reviving.close)
        record()
        parts = Components(
            self.task, managed, reviving, rewards.function, self.events, ledger, store, self.display, checkpoints, pool
        )
        parts.shards = records.shards
        parts.managers = None if shards is None else shards.parts
        parts.market = market if market.exchanged else None
        tell = {} if rewards.resize is None else {"rewards": rewards.resize}
        begins = {name: pool.begins for name, pool in pools_of(config).items()}
        parts.sizes = PoolSizes(begins, lambda: asyncio.to_thread(read_sizes, self.folder.path, config), tell)
        if any(name.startswith("rollout") for name in begins):
            parts.engines = engines
        if tools is not None:
            own = tools.client
            parts.tools = lambda: tally.stats(own.stats())
        parts.rewards, parts.timeouts = rewards.counters, rewards.timeouts
        parts.gpus, parts.away = nvml(), lambda: self.keeper.waiting_for
        parts.planner, parts.reallocation = cut.planner, cut.reallocation
        parts.foresight.predictor = await function_hosts.start_predictor(config, self.task, self.stack, self.folder)
        parts.kv_bytes = kv_bytes_per_token(_shape(model), config.model.dtype)
        position = resumed.position if resumed is not None else Position()
        if version != position.version:
            raise RunError(f"the checkpoint says version {position.version}, the trainer restored {version}")
        return parts, position

    async def _start_trainer(self, trainer: RayTrainer, model: str, endpoint: RelayEndpoint) -> int:
        """The version it starts at."""
        await trainer.create(trainer_arguments(self.config, model) | {"relay": endpoint.to_dict()})
        if self.resumed is not None and self.resumed.checkpoint is not None:
            return int(await trainer.load(str(self.resumed.checkpoint / "trainer")))
        if self.config.warmup.steps:
            self.display.stage(
                "warmup", f"{self.config.warmup.steps} supervised steps, skill {self.config.warmup.skill:g}"
            )
        await warm_up(self.config, self.task, trainer, self.events)
        return 0

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
            self.keeper.keep("mooncake_master", master)
            address = master.address
        if not settings.metadata_url:
            alone = not (self.config.ray.address or self.config.rollout.served)  # on one machine
            await asyncio.to_thread(lambda: SqliteMetadata(self.folder.metadata, write_ahead=alone).close())
        return RelayEndpoint(
            job=self.folder.job(shared=bool(settings.metadata_url or settings.master)),
            kind=settings.kind,
            master=address,
            metadata=settings.metadata_url
            or str(self.folder.metadata.resolve()),  # servers have other working directories
            segment_bytes=memory_plan.segment_bytes(self.config),
            protocol=settings.protocol,
            device=settings.device,
            bucket_bytes=settings.bucket_mb << 20,
            keep_versions=settings.keep_versions,
            snapshot_every=settings.snapshot_every,
            encoding=settings.encoding,
            codec_threads=settings.codec_threads,
            verify_key=Signer(settings.signing_key).verify_key if settings.signing_key else "",
        )

    async def _bound(self, endpoint: RelayEndpoint) -> tuple[ResourceManager | None, dict[str, Placement]]:
        """The pools, if the config has any, and by worker its place, bound; empty where nothing has devices of its own."""
        config = self.config
        if not config.resources.pools:
            return None, await asyncio.to_thread(pool_requests.without_pools, config, self.display.message)
        metadata = await asyncio.to_thread(open_metadata, endpoint)
        self.stack.callback(metadata.close)
        if not config.relay.metadata_url:  # the run's own, which no other job has
            return await asyncio.to_thread(pool_requests.place, config, metadata, endpoint.job, self._note_binding)
        told = self._note_binding, self.display.message
        manager, places = await pool_requests.place_beside_others(config, metadata, endpoint.job, *told)
        beating = pool_requests.keep_beating(manager, config.resources.silent)
        self.beating = asyncio.create_task(beating, name="heartbeats of this job")
        self.stack.callback(self.beating.cancel)
        return manager, places

    def fail_with_beats(self, fail: Callable[[BaseException], None]) -> None:
        """From now on the run ends when its heartbeats do."""

        def ended(task: asyncio.Task[None]) -> None:
            if not task.cancelled() and (error := task.exception()) is not None:
                fail(error)

        if self.beating is not None:
            self.beating.add_done_callback(ended)

    def _places(
        self, endpoint: RelayEndpoint, manager: ResourceManager | None, places: dict[str, Placement]
    ) -> tuple[dict[str, Placement], Callable[[int], Placement]]:
        """The places, reserved in Ray. And those of engines that are added later."""
        config, added = self.config, list[Placement]()
        owner = endpoint.job if config.resources.pools else ""

        def later(number: int) -> Placement:
            shared = manager is None and not places
            added.append(pool_requests.place_of_engine(config, manager, owner, number, shared, self._note_binding))
            return added[-1]

        def give_back() -> None:
            try:
                for placement in (*places.values(), *added):
                    placement.release()
                if manager is not None:
                    manager.close()
            except RetryableError as error:
                self.display.message(f"what this run had of the pools stays bound until it is started again: {error}")

        self.stack.callback(give_back)
        return self._reserved(places), later

    def _reserved(self, places: dict[str, Placement]) -> dict[str, Placement]:
        pool_requests.reserve_all(self.config, places)
        rows = device_plan.plan_rows(self.config, places)
        self.events.emit("places", processes=[asdict(row) for row in rows])
        if places:
            for line in device_plan.describe(rows):
                self.display.message(f"devices: {line}")
        return places

    def _note_binding(self, binding: DeviceBinding) -> None:
        wish, devices = binding.wish, list(binding.devices)
        self.events.emit(
            "bound", worker=wish.worker, hardware=binding.hardware, devices=devices, instead=binding.fallback
        )

    def _hear(self, worker: str, report: FirstReport) -> None:
        if report.devices:
            self.events.emit("devices", worker=worker, node=report.node, devices=list(report.devices))
        self.nodes.check(worker, report)

    def _hear_shard(self, shard: str, report: FirstReport) -> None:
        self.display.message(f"{shard} is on {report.node}")
        self.nodes.check(shard, report)

    async def _model(self, trainer: RayTrainer) -> str:
        """The model's folder; a tiny one is made in the trainer's process."""
        config, folder = self.config, self.folder.model
        if config.model.path:
            return config.model.path
        if not (folder / "config.json").exists():
            await trainer.function(tiny_model_setup.TINY_MODEL, tiny_model_setup.arguments(config, self.task, folder))
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


def _shape(model: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((Path(model) / "config.json").read_text(encoding="utf-8"))
    return found


def trainer_arguments(config: Config, model: str) -> dict[str, Any]:
    """Keywords of a trainer without a relay."""
    return {
        "model": model,
        "settings": config.trainer.model_dump(),
        "total_steps": config.run.steps,
        "seed": config.run.seed,
        "dtype": config.model.dtype,
        "temperature": config.rollout.temperature,
        "batch_size": config.batch_trajectories,
        "vllm_nccl": config.rollout.weights == "nccl",
    }


def trainer_environment(config: Config) -> dict[str, str]:
    """What the trainer's processes start with."""
    key = config.relay.signing_key
    signing = {KEY_FILE: str(Path(key).resolve())} if key else {}  # engines verify, they do not sign
    return thread_variables(config.trainer.threads) | secret_files(config) | signing


__all__ = ["start_ray", "train", "trainer_arguments", "trainer_environment", "warm_up"]
