"""Engines in Ray actors: one process each, addressed through the same ports as the simulated ones.

Guarantees: plugin classes are named by string and resolved inside the actor, so the orchestrator imports no engine; what an
actor raises arrives as :class:`RetryableError` with its cause in words, or as the :class:`ConfigError` or
:class:`CommandError` that it is; a dead process is a :class:`RetryableError` from every call. A restarted actor is a new
process with the same arguments.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import socket
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from orchestrator.api import (
    CommandError,
    Completion,
    ConfigError,
    GenerationRequest,
    KvMove,
    KvMoved,
    Meeting,
    ProcessDied,
    PublishResult,
    ReleaseResult,
    ResidencyResult,
    RetryableError,
    TrainBatch,
    TrainMetrics,
    TrainSample,
    UpdateResult,
    WorkerStats,
)

if TYPE_CHECKING:
    from orchestrator.resources import Placement

_OK, _CONFIG, _COMMAND, _ERROR = "ok", "config", "command", "error"
_MEETING_POINT = "orchestrator.runtime.engine_actors:meeting_point"
_ADDRESS = "orchestrator.runtime.engine_actors:address"
_FAIL_TOGETHER = 20.0  # seconds that the other ranks of a trainer have to fail, too, after one has


class ActorHost:
    """Runs inside the actor's process: holds one object, made from a class named by string."""

    def __init__(self) -> None:
        self._object: Any = None

    async def create(self, target: str, kwargs: dict[str, Any]) -> tuple[str, Any]:
        """Import ``module:Class`` and construct it. Returns the process id."""
        return await self._answer(self._create, target, kwargs)

    async def function(self, target: str, kwargs: dict[str, Any]) -> tuple[str, Any]:
        """Call ``module:function``."""
        return await self._answer(_resolve(target), **kwargs)

    async def call(self, method: str, *args: Any, **kwargs: Any) -> tuple[str, Any]:
        """Call a method of the object."""
        return await self._answer(getattr(self._object, method), *args, **kwargs)

    async def process(self) -> tuple[str, int]:
        """The process id, for those who watch it."""
        return _OK, os.getpid()

    def _create(self, target: str, kwargs: dict[str, Any]) -> int:
        self._object = _resolve(target)(**kwargs)
        return os.getpid()

    async def _answer(self, function: Any, *args: Any, **kwargs: Any) -> tuple[str, Any]:
        """An answer that always crosses the process border: exceptions travel as words, never as pickled objects."""
        try:
            value = function(*args, **kwargs)
            return _OK, await value if asyncio.iscoroutine(value) else value
        except ConfigError as error:
            return _CONFIG, (error.field, str(error.value), error.fix)
        except CommandError as error:
            return _COMMAND, (error.code, error.detail)
        except Exception as error:  # noqa: BLE001  the border of a process: everything is reported to the other side
            where = "".join(traceback.format_exception(error)[-3:])
            return _ERROR, f"{type(error).__name__}: {error}\n{where}"


def _resolve(target: str) -> Any:
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)


class Actor:
    """A handle on one :class:`ActorHost`; ``environment`` is set before its process starts. ``placement``: its devices."""

    def __init__(self, name: str, environment: dict[str, str], placement: Placement | None = None) -> None:
        self.name = name
        self.placement = placement
        self._place: dict[str, Any] = {}
        self.environment = dict(environment)
        self._handle: Any = None

    async def place(self) -> None:
        """Reserve its place, where it has one in a pool. Before :meth:`start`."""
        if self.placement is not None:
            self._place = await self.placement.options()

    def start(self) -> None:
        """Start the process (Ray does it in the background)."""
        import ray

        options = {"num_cpus": 1, "max_concurrency": 64, "runtime_env": {"env_vars": self.environment}, **self._place}
        self._handle = ray.remote(ActorHost).options(**options).remote()

    async def ask(self, what: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the host and unwrap its answer."""
        import ray

        if self._handle is None:
            raise RetryableError(f"{self.name} is not running")
        try:
            tag, value = await getattr(self._handle, what).remote(*args, **kwargs)
        except ray.exceptions.RayError as error:
            reason = str(error).strip().splitlines()
            raise ProcessDied(f"{self.name} died: {reason[0] if reason else type(error).__name__}") from error
        if tag == _CONFIG:
            raise ConfigError(*value)
        if tag == _COMMAND:
            raise CommandError(*value)
        if tag == _ERROR:
            raise RetryableError(f"{self.name}: {value}")
        return value

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the hosted object."""
        return await self.ask("call", method, *args, **kwargs)

    async def pid(self) -> int:
        """Its process id."""
        return int(await self.ask("process"))

    def kill(self) -> None:
        """End the process at once. Idempotent."""
        import ray

        if self._handle is not None:
            ray.kill(self._handle)
            self._handle = None


class RayWorker:
    """A vLLM engine in a Ray actor, as a ManagedWorker. ``hardware``: the class of its pool, "" without one."""

    def __init__(
        self,
        name: str,
        target: str,
        kwargs: dict[str, Any],
        environment: dict[str, str],
        placement: Placement | None = None,
        *,
        first_device: int = -1,
        ranks: int | None = None,
    ) -> None:
        """``first_device``: where the devices begin that it may have, of this machine's; -1: nobody says. ``ranks``: how many
        it begins with, 0 for none (None: what ``kwargs`` say)."""
        self.name = name
        self._target = target
        self._kwargs = {**kwargs, "name": name}
        self.ranks = int(kwargs.get("tensor_parallel_size", 1)) * int(kwargs.get("pipeline_parallel_size", 1))
        self._first_device = first_device
        self._actor = Actor(name, environment, placement)
        if ranks is not None:
            self._resize(ranks)
        self._failed_here = False  # the last restart in this place
        self.process = 0  # its process id, 0 while it has none

    @property
    def hardware(self) -> str:
        """See :class:`orchestrator.api.PlacedWorker`."""
        placement = self._actor.placement
        return "" if placement is None else placement.bind().hardware

    async def start(self) -> None:
        """Start the process and the engine in it; with no ranks, nothing."""
        self.process = 0
        if not self.ranks:
            return
        await self._actor.place()
        self._actor.start()
        self.process = await self._actor.ask("create", self._target, self._kwargs)

    async def restart(self) -> None:
        """See the protocol. In place; where that failed, on other devices, if the pools have any (RollArt 8)."""
        self._actor.kill()
        if self._failed_here and self._actor.placement is not None:
            try:
                await asyncio.to_thread(self._actor.placement.move)
            except RetryableError as error:
                raise RetryableError(f"{self.name} did not come up, and has nowhere else to go: {error}") from error
        self._failed_here = True
        await self.start()
        self._failed_here = False

    async def resize(self, ranks: int) -> None:
        """See :class:`orchestrator.api.ResizableWorker`. It takes the devices from its own on."""
        self._actor.kill()
        self._resize(ranks)

    def _resize(self, ranks: int) -> None:
        self.ranks = ranks
        self._kwargs["tensor_parallel_size"] = max(1, ranks)
        if self._first_device >= 0:
            devices = range(self._first_device, self._first_device + max(1, ranks))
            self._actor.environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, devices))

    async def add(self, requests: Sequence[GenerationRequest]) -> None:
        """See the protocol."""
        await self._actor.call("add", list(requests))

    async def abort(
        self, request_ids: Sequence[str] = (), *, trajectories: Sequence[str] = (), groups: Sequence[str] = ()
    ) -> None:
        """See the protocol."""
        await self._actor.call("abort", list(request_ids), trajectories=list(trajectories), groups=list(groups))

    async def prioritize(self, priorities: Mapping[str, int]) -> None:
        """See the protocol."""
        await self._actor.call("prioritize", dict(priorities))

    async def completions(self) -> list[Completion]:
        """See the protocol."""
        finished: list[Completion] = await self._actor.call("completions")
        return finished

    async def suspend(self) -> None:
        """See the protocol."""
        await self._actor.call("suspend")

    async def prepare(self, version: int) -> None:
        """See the protocol."""
        await self._actor.call("prepare", version)

    async def receive(self, version: int, meetings: Sequence[Meeting], place: int, limit: float) -> str:
        """See :class:`orchestrator.api.CollectiveWorker`."""
        content: str = await self._actor.call("receive", version, list(meetings), place, limit)
        return content

    async def update(self, version: int) -> UpdateResult:
        """See the protocol."""
        result: UpdateResult = await self._actor.call("update", version)
        return result

    async def resume(self) -> None:
        """See the protocol."""
        await self._actor.call("resume")

    async def release(self, level: str) -> ReleaseResult:
        """See :class:`orchestrator.api.ReleasingWorker`."""
        result: ReleaseResult = await self._actor.call("release", level)
        return result

    async def reclaim(self) -> None:
        """See :class:`orchestrator.api.ReleasingWorker`."""
        await self._actor.call("reclaim")

    async def kv_place(self) -> str:
        """See :class:`orchestrator.api.KvWorker`."""
        return str(await self._actor.call("kv_place"))

    async def fetch_kv(self, move: KvMove) -> KvMoved:
        """See :class:`orchestrator.api.KvWorker`."""
        moved: KvMoved = await self._actor.call("fetch_kv", move)
        return moved

    async def stats(self) -> WorkerStats:
        """See the protocol."""
        stats: WorkerStats = await self._actor.call("stats")
        return stats

    async def status(self) -> dict[str, Any]:
        """Which hooks are live in the engine's process."""
        status: dict[str, Any] = await self._actor.call("status")
        return status

    async def pid(self) -> int:
        """Its process id."""
        return await self._actor.pid()

    async def close(self) -> None:
        """See the protocol."""
        self._actor.kill()


class RayTrainer:
    """The ranks of one Megatron trainer, an actor each, as a Trainer: every call goes to all of them, rank 0 answers.

    A rank that died, or failed alone, leaves the others waiting for it in a collective: the trainer is then broken, and says
    so on every later call, until it is closed.
    """

    def __init__(
        self,
        target: str,
        environment: dict[str, str],
        ranks: int = 1,
        placements: Sequence[Placement] = (),
        *,
        spread: bool = False,
    ) -> None:
        """``spread``: workers may run on other machines than the trainer."""
        self._target = target
        self._spread = spread
        places: Sequence[Placement | None] = placements or [None] * ranks
        pairs = zip(trainer_names(ranks), places, strict=True)
        self._actors = [Actor(name, environment, place) for name, place in pairs]
        self._broken = ""

    async def place(self) -> None:
        """Reserve the places of its ranks, where they have some in a pool. Before :meth:`start`."""
        await asyncio.gather(*(actor.place() for actor in self._actors))

    def start(self) -> None:
        """Start the processes; :meth:`create` makes the trainer in them."""
        for actor in self._actors:
            actor.start()

    async def function(self, target: str, kwargs: dict[str, Any]) -> Any:
        """Call a function of the plugin in the first rank's process."""
        return await self._actors[0].ask("function", target, kwargs)

    async def create(self, kwargs: dict[str, Any]) -> None:
        """Build model and optimizer. Several ranks meet at a free port of the first one's node."""
        ranks: list[dict[str, Any]] = [{}]
        if len(self._actors) > 1:
            where = {"world_size": len(self._actors), "init_method": await self.function(_MEETING_POINT, {})}
            ranks = [{"rank": rank, **where} for rank in range(len(self._actors))]
        await self._gather([("create", (self._target, {**kwargs, **rank})) for rank in ranks])

    async def call(self, method: str, *args: Any) -> Any:
        """A method of all ranks, also one beyond the port (warm-up, export, status); rank 0's answer."""
        return (await self._all(method, *args))[0]

    async def train_step(self, batch: TrainBatch) -> TrainMetrics:
        """See the protocol."""
        metrics: TrainMetrics = await self.call("train_step", batch)
        return metrics

    async def feed(self, samples: Sequence[TrainSample], version: int) -> None:
        """See the protocol."""
        await self.call("feed", list(samples), version)

    async def publish(self) -> PublishResult:
        """See the protocol."""
        result: PublishResult = await self.call("publish")
        return result

    async def send(self, receivers: int, limit: float, anew: bool) -> tuple[Meeting, ...]:
        """See :class:`orchestrator.api.CollectiveTrainer`."""
        hosts = ["127.0.0.1"] * len(self._actors)
        if self._spread:
            hosts = [await actor.ask("function", _ADDRESS, {}) for actor in self._actors]
        answers = await self._gather([("call", ("send", receivers, limit, anew, host)) for host in hosts])
        return tuple(meeting for meetings in answers for meeting in meetings)

    async def residency(self, level: str, replicas: Sequence[int] | None = None) -> ResidencyResult:
        """See :class:`orchestrator.api.ResidentTrainer`: bytes of all ranks, seconds of the slowest."""
        results: list[ResidencyResult] = await self._all("residency", level, replicas)
        sums = {
            name: sum(getattr(result, name) for result in results)
            for name in ("to_host", "to_device", "device_bytes", "peak_bytes")
        }
        return replace(results[0], **sums, seconds=max(result.seconds for result in results))

    async def save(self, folder: str) -> None:
        """See the protocol. The folder must be one that every rank sees."""
        await self.call("save", folder)

    async def load(self, folder: str) -> int:
        """See the protocol."""
        version: int = await self.call("load", folder)
        return version

    async def pid(self) -> int:
        """The first rank's process id."""
        return await self._actors[0].pid()

    async def pids(self) -> dict[str, int]:
        """The process id of every rank."""
        return {actor.name: await actor.pid() for actor in self._actors}

    async def close(self) -> None:
        """See the protocol."""
        for actor in self._actors:
            actor.kill()

    async def _all(self, method: str, *args: Any) -> list[Any]:
        return await self._gather([("call", (method, *args))] * len(self._actors))

    async def _gather(self, calls: Sequence[tuple[str, tuple[Any, ...]]]) -> list[Any]:
        """One call a rank; returns their answers, or raises what tells most of the ranks' errors."""
        if self._broken:
            raise ProcessDied(self._broken)
        pairs = zip(self._actors, calls, strict=True)
        asked = [asyncio.create_task(actor.ask(what, *args)) for actor, (what, args) in pairs]
        try:
            await asyncio.wait(asked, return_when=asyncio.FIRST_EXCEPTION)
            deadline = asyncio.get_running_loop().time() + _FAIL_TOGETHER
            while (waiting := [rank for rank, task in enumerate(asked) if not task.done()]) and not _has_died(asked):
                # One failed: the others see it too in a moment, or wait for it for ever.
                left = deadline - asyncio.get_running_loop().time()
                if left <= 0:
                    break
                await asyncio.wait([asked[rank] for rank in waiting], timeout=left, return_when=asyncio.FIRST_COMPLETED)
            failed = {rank: error for rank, task in enumerate(asked) if (error := _error(task)) is not None}
        finally:
            for task in asked:
                task.cancel()
            await asyncio.gather(*asked, return_exceptions=True)
        if not failed:
            return [task.result() for task in asked]
        # A refusal says why; else a rank that died is the cause of what the others say.
        rank, error = min(failed.items(), key=lambda item: (_telling(item[1]), item[0]))
        if len(self._actors) == 1 or isinstance(error, ConfigError | CommandError):
            raise error
        message = f"rank {rank} of {len(self._actors)}: {error}"
        if waiting or isinstance(error, ProcessDied):
            others = f"; waiting for it: rank {', '.join(map(str, waiting))}" if waiting else ""
            self._broken = f"the trainer has lost a rank, {message}{others}"
            raise ProcessDied(self._broken) from error
        raise RetryableError(message) from error


def trainer_names(ranks: int) -> list[str]:
    """Of the processes of a trainer, by rank."""
    return ["trainer", *(f"trainer-{rank}" for rank in range(1, ranks))]


def _error(task: asyncio.Task[Any]) -> BaseException | None:
    return task.exception() if task.done() else None


def _has_died(tasks: Sequence[asyncio.Task[Any]]) -> bool:
    return any(isinstance(_error(task), ProcessDied) for task in tasks)


def _telling(error: BaseException) -> int:
    order = (ConfigError, CommandError, ProcessDied)
    return next((place for place, kind in enumerate(order) if isinstance(error, kind)), len(order))


def meeting_point() -> str:
    """``tcp://host:port`` of a free port on this node. Runs in the first rank's process."""
    host = address()
    with socket.create_server(("", 0)) as server:
        return f"tcp://{host}:{server.getsockname()[1]}"


def address() -> str:
    """Of this node. Runs in an actor's process."""
    import ray

    return str(ray.util.get_node_ip_address())
