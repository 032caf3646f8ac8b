"""The engines of a run as RollArt's declared workers (section 5): ranks of Megatron-Core, and vLLM engines.

:class:`TrainerPort` and :class:`EnginePort` declare what is called and how; :class:`MegatronRank` and
:class:`VllmEngine` carry it out inside their processes; :class:`TrainerRanks` and :class:`ActorGen` are the clusters of
these; :class:`RayTrainer` and :class:`RayWorker` the ports that the loop holds, which ask their cluster for everything.

Guarantees: plugin classes are named by string and resolved inside the actor, so the orchestrator imports no engine; what an
actor raises arrives as :class:`RetryableError` with its cause in words, or as the :class:`ConfigError` or
:class:`CommandError` that it is; a dead process is a :class:`RetryableError` from every call. A restarted actor is a new
process with the same arguments.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import inspect
import os
import socket
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Concatenate, NoReturn, ParamSpec, TypeVar

from orchestrator.api import (
    CollectiveWorker,
    CommandError,
    Completion,
    ConfigError,
    GenerationRequest,
    HoldingTrainer,
    KvWorker,
    MachineGone,
    Meeting,
    ProcessDied,
    ReleasingWorker,
    ResidencyResult,
    ResidentTrainer,
    RetryableError,
    RolloutWorker,
    TrainBatch,
    Trainer,
    TrainMetrics,
    TrainSample,
)
from orchestrator.api.interfaces import interface_of
from orchestrator.cluster import ActorGen, ActorGenCls, ActorTrain, ActorTrainCls, Worker, register
from orchestrator.cluster.actor import Actor, FirstReport
from orchestrator.cluster.cluster import Heard
from orchestrator.resources import EngineSeat
from orchestrator.runtime.shard_objects import BatchReferences, NodeObjects
from orchestrator.transfer.turns import (
    ContextSession,
    HeldContexts,
    decode_completions,
    decode_turns,
    encode_completions,
)

if TYPE_CHECKING:
    from orchestrator.resources import Placement

_MEETING_POINT = "orchestrator.runtime.engine_actors:meeting_point"
_SPEAK_FROM = "orchestrator.runtime.engine_actors:speak_from"
_NODE_CLASS = "vllm_rlplugin.worker.engine_node:EngineNode"

Given = ParamSpec("Given")
Made = TypeVar("Made")


def _passed_on(
    declared: Callable[Concatenate[Any, Given], Awaitable[Made]],
) -> Callable[Concatenate[Any, Given], Coroutine[Any, Any, Made]]:
    """A method of a port, by ``_call``: a worker's asks its engine, an adapter's its cluster."""

    async def method(self: Any, /, *args: Given.args, **kwargs: Given.kwargs) -> Made:
        made: Made = await self._call(declared.__name__, *args, **kwargs)
        return made

    functools.update_wrapper(method, declared)
    return method


class TrainerPort:
    """What the loop asks of a trainer, and how it is carried out: by all ranks; "first": rank 0's answer is the trainer's."""

    train_step = register(aggregate="first")(_passed_on(Trainer.train_step))
    feed = register(aggregate="first")(_passed_on(Trainer.feed))
    publish = register(aggregate="first")(_passed_on(Trainer.publish))
    hold = register(aggregate="first")(_passed_on(HoldingTrainer.hold))
    publish_held = register(aggregate="first", beside=True)(_passed_on(HoldingTrainer.publish_held))
    save = register(aggregate="first")(_passed_on(Trainer.save))
    saved = register(aggregate="first")(_passed_on(Trainer.saved))
    load = register(aggregate="first")(_passed_on(Trainer.load))


class EnginePort:
    """What the loop asks of an engine. Its proxy chooses the engine for each turn, so it asks one by one; calls of the whole
    cluster are carried out as said here."""

    add = register(mode="execute_one")(_passed_on(RolloutWorker.add))
    abort = register()(_passed_on(RolloutWorker.abort))
    prioritize = register()(_passed_on(RolloutWorker.prioritize))
    completions = register(aggregate="concat")(_passed_on(RolloutWorker.completions))
    suspend = register()(_passed_on(RolloutWorker.suspend))
    prepare = register()(_passed_on(RolloutWorker.prepare))
    receive = register()(_passed_on(CollectiveWorker.receive))
    update = register()(_passed_on(RolloutWorker.update))
    resume = register()(_passed_on(RolloutWorker.resume))
    release = register()(_passed_on(ReleasingWorker.release))
    reclaim = register()(_passed_on(ReleasingWorker.reclaim))
    kv_place = register()(_passed_on(KvWorker.kv_place))
    fetch_kv = register(mode="execute_one")(_passed_on(KvWorker.fetch_kv))
    stats = register()(_passed_on(RolloutWorker.stats))


class PluginWorker(Worker):
    """A worker around one object of a plugin's class, in its own process."""

    concurrency = 64
    engine: Any = None

    @register(aggregate="first")
    async def create(self, target: str, kwargs: Mapping[str, Any]) -> int:
        """Import ``module:Class`` and construct it. Returns the process id."""
        self.engine = _resolve(target)(**kwargs)
        return os.getpid()

    @register(mode="execute_rank_zero")
    async def function(self, target: str, kwargs: Mapping[str, Any]) -> Any:
        """Call ``module:function``."""
        value = _resolve(target)(**kwargs)
        return await value if inspect.iscoroutine(value) else value

    @register()
    async def pid(self) -> int:
        """The process id, for those who watch it."""
        return os.getpid()

    @register(aggregate="first")
    async def beyond(self, method: str, *args: Any) -> Any:
        """A method of the engine that no port has: warm-up, export, status."""
        return await self._call(method, *args)

    async def _call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        value = getattr(self.engine, method)(*args, **kwargs)
        return await value if inspect.iscoroutine(value) else value


class MegatronRank(TrainerPort, PluginWorker, ActorTrainCls):
    """One rank of a trainer."""

    beside = 1
    residency = register()(_passed_on(ResidentTrainer.residency))

    @register(aggregate="first")
    async def train_step(self, batch: TrainBatch, references: BatchReferences | None = None) -> TrainMetrics:
        """``references``: the batch's samples, where it has none itself."""
        if references is not None:
            batch = replace(batch, samples=await asyncio.to_thread(references.samples))
        metrics: TrainMetrics = await self._call("train_step", batch)
        return metrics

    @register(aggregate="first")
    async def feed(
        self, samples: Sequence[TrainSample], version: int, references: BatchReferences | None = None
    ) -> None:
        """The same of ``samples``."""
        if references is not None:
            samples = await asyncio.to_thread(references.samples)
        await self._call("feed", samples, version)

    @register()
    async def join(self, target: str, kwargs: Mapping[str, Any], meeting: str) -> None:
        """Build model and optimizer. Several ranks meet at ``meeting``."""
        where = {"rank": self.rank, "world_size": self.world_size, "init_method": meeting}
        await self.create(target, {**kwargs, **(where if self.world_size > 1 else {})})

    @register(aggregate="concat")
    async def send(self, receivers: int, limit: float, anew: bool, spread: bool) -> tuple[Meeting, ...]:
        """Where workers meet every rank. ``spread``: they may be on other machines."""
        host = address() if spread else "127.0.0.1"
        meetings: tuple[Meeting, ...] = await self._call("send", receivers, limit, anew, host)
        return meetings


class VllmEngine(EnginePort, PluginWorker, ActorGenCls):
    """One inference engine. Its proxy sends it turns as bytes, of what is new in them (:mod:`orchestrator.transfer.turns`)."""

    def __init__(self) -> None:
        self._contexts = HeldContexts()

    @register(aggregate="first")
    async def add_turns(self, message: bytes) -> list[str]:
        """ADD. Returns what :meth:`HeldContexts.take` does."""
        requests, digests = self._contexts.take(decode_turns(message))
        await self._call("add", requests)
        return digests

    @register(aggregate="first")
    async def finished_turns(self) -> bytes:
        """COMPLETIONS."""
        return encode_completions(0, await self._call("completions"))


def _resolve(target: str) -> Any:
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)


def meeting_point() -> str:
    """``tcp://host:port`` of a free port on this node. Runs in the first rank's process."""
    host = address()
    with socket.create_server(("", 0)) as server:
        return f"tcp://{host}:{server.getsockname()[1]}"


def part_name(worker: str, part: int) -> str:
    """Of its process on another node than its first."""
    return f"{worker}-node-{part}" if part else worker


def speak_from(host: str) -> None:
    """What this process and its children say to other nodes leaves from this address. Runs in an actor's process."""
    os.environ["VLLM_HOST_IP"] = host
    if found := interface_of(host):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", found)


def address() -> str:
    """Of this node. Runs in an actor's process."""
    import ray

    return str(ray.util.get_node_ip_address())


class TrainerRanks(ActorTrain):
    """The ranks of one trainer. A rank that died, or failed alone, leaves the others waiting for it in a collective: the
    trainer is then broken, and says so on every later call, until it is closed."""

    _patience = 20.0  # seconds that the other ranks have to fail, too, after one has
    _broken = ""

    def start(self, method: str, /, *args: Any, **kwargs: Any) -> Coroutine[Any, Any, Any]:
        """See :class:`orchestrator.cluster.Cluster`."""
        if self._broken:
            raise ProcessDied(self._broken)
        return super().start(method, *args, **kwargs)

    def _fail(self, failed: Mapping[Actor, BaseException], waiting: Sequence[Actor]) -> NoReturn:
        # A refusal says why; else a rank that died is the cause of what the others say.
        order = (ConfigError, CommandError, ProcessDied)
        first, error = min(failed.items(), key=lambda item: [not isinstance(item[1], kind) for kind in order])
        rank, size = first.identity.rank, first.identity.world_size
        if size == 1 or isinstance(error, ConfigError | CommandError):
            raise error
        message = f"rank {rank} of {size}: {error}"
        if waiting or isinstance(error, ProcessDied):
            others = ", ".join(str(actor.identity.rank) for actor in waiting)
            late = f"; waiting for it: rank {others}" if waiting else ""
            self._broken = f"the {self.name} has lost a rank, {message}{late}"
            raise ProcessDied(self._broken) from error
        raise RetryableError(message) from error


class RayWorker(EnginePort):
    """One of a run's engines, as a ManagedWorker. ``hardware``: the class of its pool, "" without one."""

    def __init__(
        self,
        engines: ActorGen,
        actor: Actor,
        target: str,
        kwargs: Mapping[str, Any],
        *,
        there: Callable[[FirstReport], Mapping[str, Any]] = lambda report: {},
        beside: Sequence[Actor] = (),
        first_device: int = -1,
        ranks: int | None = None,
    ) -> None:
        """``target``: the plugin's class. ``there``: keywords that depend on where it started. ``beside``: its processes on
        other nodes, which start and end with it. ``first_device``: where the devices begin that it may have, of this machine's,
        where it has no place in Ray; -1: nobody says. ``ranks``: how many it begins with, 0 for none (None: what ``kwargs``
        say)."""
        self.name = actor.name
        self._engines = engines
        self._actor = actor
        self._target = target
        self._kwargs = {**kwargs, "name": self.name}
        self._there = there
        self._beside = beside
        self._watch: asyncio.Task[None] | None = None  # of those
        self.ranks = int(kwargs.get("tensor_parallel_size", 1)) * int(kwargs.get("pipeline_parallel_size", 1))
        self._first_device = first_device if actor.placement is None else -1
        if ranks is not None:
            self._resize(ranks)
        self._failed_here = False  # the last restart in this place
        self.process = 0  # its process id, 0 while it has none
        self._contexts = ContextSession(self.name, self._send_turns)

    async def add(self, requests: Sequence[GenerationRequest]) -> None:
        """See the protocol."""
        await self._contexts.add(requests)

    async def _send_turns(self, message: bytes) -> list[object]:
        return list(await self._call("add_turns", message))

    async def completions(self) -> list[Completion]:
        """See the protocol."""
        try:
            return decode_completions(await self._call("finished_turns"))[1]
        except ValueError as error:
            raise RetryableError(f"{self.name}: its completions are malformed: {error}") from error

    def forget(self, trajectory_id: str) -> None:
        """See :class:`orchestrator.api.SessionWorker`."""
        self._contexts.forget(trajectory_id)

    def take_resent(self) -> tuple[int, int]:
        """See :class:`orchestrator.api.SessionWorker`."""
        return self._contexts.take_resent()

    @property
    def hardware(self) -> str:
        """See :class:`orchestrator.api.PlacedWorker`."""
        placement = self._actor.placement
        return "" if placement is None else placement.bind().hardware

    async def start(self) -> None:
        """Start the process and the engine in it; with no ranks, nothing."""
        self.process = 0
        self._contexts.clear()
        if not self.ranks:
            return
        await asyncio.to_thread(self._actor.place)
        self._actor.start()
        report = await self._engines.hear(self._actor)
        arguments = {**self._kwargs, **self._there(report)}
        if not self._beside:
            self.process = await self._call("create", self._target, arguments)
            return
        try:
            arguments["master"] = await self._meet(report)
            parts = [(self._actor, self._target), *((actor, _NODE_CLASS) for actor in self._beside)]
            made = [
                self._engines.start_on(actor, "create", target, {**arguments, "node_rank": actor.part})
                for actor, target in parts
            ]
            self.process, *_ = await asyncio.gather(*made)  # each waits for the others
        except BaseException:
            self._kill()
            raise
        self._watch = asyncio.create_task(self._end_with_any())

    async def _meet(self, first: FirstReport) -> str:
        """Start the processes on the other nodes: host:port where the ranks of all meet."""
        reports = [(self._actor, first)]
        for actor in self._beside:
            await asyncio.to_thread(actor.place)
            actor.start()
            reports.append((actor, await self._engines.hear(actor)))
        for actor, report in reports:
            await self._engines.start_on(actor, "function", _SPEAK_FROM, {"host": report.node})
        point: str = await self._call("function", _MEETING_POINT, {})
        return point.removeprefix("tcp://")

    async def _end_with_any(self) -> None:
        """A part that ends ends the engine: the others would wait for it."""
        ends = [asyncio.ensure_future(self._engines.start_on(actor, "beyond", "ended")) for actor in self._beside]
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._kill()
            await asyncio.gather(*ends, return_exceptions=True)

    def _kill(self) -> None:
        for actor in (self._actor, *self._beside):
            actor.kill()

    async def restart(self) -> None:
        """See the protocol. In place; where that failed, on other devices, if the pools have any (RollArt 8). Raises MachineGone
        while its machine is away and there are none."""
        await self._end()
        await self._leave_place(self._failed_here)
        self._failed_here = True
        try:
            await self.start()
        except RetryableError:
            await self._leave_place(failed=False)
            raise
        self._failed_here = False

    async def _leave_place(self, failed: bool) -> None:
        """To other devices, where it ``failed`` in its place or the machine is gone."""
        placement = self._actor.placement
        if placement is None or not ((gone := await asyncio.to_thread(placement.machine_gone)) or failed):
            return
        try:
            await asyncio.to_thread(placement.move)
        except RetryableError as error:
            if gone:
                self._failed_here = (
                    False  # nothing is wrong with the place: it is where it starts when the machine is back
                )
                raise MachineGone(f"the machine of {self.name} is gone") from error
            raise RetryableError(f"{self.name} did not come up, and has nowhere else to go: {error}") from error
        self._failed_here = False  # nor is it known of the new one

    async def resize(self, ranks: int) -> None:
        """See :class:`orchestrator.api.ResizableWorker`. It takes the devices from its own on."""
        await self._end()
        self._resize(ranks)

    def _resize(self, ranks: int) -> None:
        self.ranks = ranks
        self._kwargs["tensor_parallel_size"] = max(1, ranks)
        if isinstance(self._actor.placement, EngineSeat):
            self._actor.placement.resize(max(1, ranks))
        if self._first_device >= 0:
            devices = range(self._first_device, self._first_device + max(1, ranks))
            self._actor.environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, devices))

    async def _call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return await self._engines.start_on(self._actor, method, *args, **kwargs)

    async def close(self) -> None:
        """See the protocol."""
        await self._end()
        self._failed_here = False

    async def _end(self) -> None:
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)
        self._kill()

    async def let_go(self) -> None:
        """End the process, and give its devices back; ``restart`` asks for others."""
        await self.close()
        if self._actor.placement is not None:
            await asyncio.to_thread(self._actor.placement.release)


class RayTrainer(TrainerPort):
    """The ranks of one Megatron trainer, as a Trainer: every call is one of the cluster :attr:`ranks`."""

    def __init__(
        self,
        target: str,
        environment: Mapping[str, str],
        ranks: int = 1,
        placements: Sequence[Placement] = (),
        *,
        spread: bool = False,
        heard: Heard | None = None,
    ) -> None:
        """``target``: the plugin's class. ``spread``: workers may run on other machines than the trainer. ``heard``: see
        :class:`orchestrator.cluster.Cluster`."""
        self._target = target
        self._spread = spread
        self._objects = NodeObjects(spread)
        places: Sequence[Placement | None] = placements or [None] * ranks
        named = dict(zip(trainer_names(ranks), places, strict=True))
        self.ranks = TrainerRanks(MegatronRank, named, environment, "trainer", heard)

    async def start(self) -> None:
        """Start the processes, in their places; :meth:`create` makes the trainer in them."""
        await self.ranks.launch()

    async def function(self, target: str, kwargs: dict[str, Any]) -> Any:
        """Call a function of the plugin in the first rank's process."""
        return await self._call("function", target, kwargs)

    async def create(self, kwargs: Mapping[str, Any]) -> None:
        """Build model and optimizer. Several ranks meet at a free port of the first one's node."""
        await asyncio.gather(*map(self.ranks.hear, self.ranks.actors))
        meeting = await self.function(_MEETING_POINT, {}) if len(self.ranks.actors) > 1 else ""
        await self._call("join", self._target, kwargs, meeting)

    async def train_step(self, batch: TrainBatch) -> TrainMetrics:
        """See the protocol. What lies in shards goes by reference."""
        references = await self._references(batch.samples)
        if references is not None:
            batch = replace(batch, samples=())
        metrics: TrainMetrics = await self._call("train_step", batch, references)
        return metrics

    async def feed(self, samples: Sequence[TrainSample], version: int) -> None:
        """See the protocol. What lies in shards goes by reference."""
        references = await self._references(samples)
        await self._call("feed", samples if references is None else (), version, references)

    async def _references(self, samples: Sequence[TrainSample]) -> BatchReferences | None:
        return await asyncio.to_thread(self._objects.refer, samples)

    async def call(self, method: str, *args: Any) -> Any:
        """A method beyond the port (warm-up, export, status), of all ranks; rank 0's answer."""
        return await self._call("beyond", method, *args)

    async def _call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return await self.ranks.start(method, *args, **kwargs)

    async def send(self, receivers: int, limit: float, anew: bool) -> tuple[Meeting, ...]:
        """See :class:`orchestrator.api.CollectiveTrainer`."""
        return tuple(await self._call("send", receivers, limit, anew, self._spread))

    async def residency(self, level: str, replicas: Sequence[int] | None = None) -> ResidencyResult:
        """See :class:`orchestrator.api.ResidentTrainer`: bytes of all ranks, seconds of the slowest."""
        results: list[ResidencyResult] = await self._call("residency", level, replicas)
        sums = {
            name: sum(getattr(result, name) for result in results)
            for name in ("to_host", "to_device", "device_bytes", "peak_bytes")
        }
        return replace(results[0], **sums, seconds=max(result.seconds for result in results))

    async def pids(self) -> dict[str, int]:
        """The process id of every rank."""
        return dict(zip([actor.name for actor in self.ranks.actors], await self._call("pid"), strict=True))

    async def close(self) -> None:
        """See the protocol."""
        self.ranks.close()


def trainer_names(ranks: int) -> list[str]:
    """Of the processes of a trainer, by rank."""
    return ["trainer", *(f"trainer-{rank}" for rank in range(1, ranks))]
