"""Clusters: role-specific groups of workers in Ray actors, called like one object (RollArt 5.1, 5.3, Listing 2).

``Cluster(manager, WorkerClass)`` binds devices by the declarations of the class, starts a process a worker, and gives itself
the methods of the class: ``cluster.method(...)`` blocks, ``cluster.method.start(...)`` returns a call to wait for or await.
``Cluster.over(WorkerClass, places)`` is one whose workers have their places already, or need none, and are started one by
one: a training run's (:mod:`orchestrator.runtime.engine_actors`).

Guarantees: all workers are there when the constructor returns, or none is and nothing stays bound; results are in order of
rank; errors name the rank; two workers never share an id or a device; after ``shutdown`` nothing is left.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, ClassVar, NoReturn, Self

from orchestrator.api import ConfigError, CoserveError, ProcessDied, RetryableError
from orchestrator.cluster.actor import Actor, Raised, first_line
from orchestrator.cluster.cluster_calls import Call, WorkerError
from orchestrator.cluster.decorators import (
    EXECUTE_ALL,
    EXECUTE_ONE,
    EXECUTE_RANK_ZERO,
    SCATTER,
    Declaration,
    declaration,
)
from orchestrator.cluster.dispatch import aggregate, scatter
from orchestrator.cluster.role_workers import ActorGenCls, ActorTrainCls, Identity, Worker
from orchestrator.policies.placement.device_allocation import AllocationView
from orchestrator.resources import ROLE_CLASSES, Placement, ResourceManager

START_SECONDS = 300.0  # for all workers to be made


@dataclass(frozen=True, slots=True)
class Bound:
    """A method of the worker class, as a method of the cluster."""

    _cluster: Cluster
    _name: str

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Carry it out as it was declared; wait; put the results together."""
        return self.start(*args, **kwargs).result()

    def start(self, *args: Any, **kwargs: Any) -> Call:
        """The same without waiting."""
        return self._cluster.start(self._name, args, kwargs)


class Cluster:
    """``workers``: how many, or class -> how many; None: as many as the free devices of its classes make. The classes are
    that of the role (:data:`orchestrator.resources.ROLE_CLASSES`), or ``hardware``.
    ``arguments`` go to the worker's ``__init__``; ``environment`` is set before its process starts.

    Raises ConfigError (declarations, ids, pools), RetryableError (no room, Ray gives no place), WorkerError (``__init__``).
    """

    base: ClassVar[type[Worker]] = Worker
    _patience: ClassVar[float | None] = None  # see Call
    _heard: Callable[[str, str, Sequence[str]], None] | None = None

    def __init__(
        self,
        res_manager: ResourceManager,
        worker_cls: type[Worker],
        *,
        workers: int | Mapping[str, int] | None = None,
        hardware: str = "",
        devices_per_worker: int = 1,
        name: str = "",
        arguments: Mapping[str, Any] | None = None,
        environment: Mapping[str, str] | None = None,
        cpus_per_worker: float = 1.0,
        start_seconds: float = START_SECONDS,
    ) -> None:
        self._declare(worker_cls, name, res_manager)
        classes = self._plan(res_manager.view(), workers, hardware, devices_per_worker)
        try:
            for rank, wanted in enumerate(classes):
                identity = Identity(f"{self.name}-{rank}", rank, len(classes), wanted, ())
                place = Placement(res_manager, identity.worker_id, wanted, devices_per_worker, cpus=cpus_per_worker)
                self.actors.append(Actor(worker_cls, identity, place, dict(environment or {}), dict(arguments or {})))
                place.bind()
            self._launch(self.actors, start_seconds)
        except BaseException:
            self.shutdown()
            raise

    @classmethod
    def over(
        cls,
        worker_cls: type[Worker],
        places: Mapping[str, Placement | None],
        environment: Mapping[str, str] | None = None,
        name: str = "",
        heard: Callable[[str, str, Sequence[str]], None] | None = None,
    ) -> Self:
        """A cluster of these workers, by rank: id -> place. Nothing is started: that is done actor by actor
        (:attr:`actors`), and the places stay those of whoever made them. ``heard(id, node, devices)`` is told of the devices
        that a process sees (:meth:`report_devices`)."""
        cluster = cls.__new__(cls)
        cluster._declare(worker_cls, name, None)
        cluster._heard = heard
        cluster.actors = [
            Actor(worker_cls, Identity(worker, rank, len(places), "", ()), place, dict(environment or {}))
            for rank, (worker, place) in enumerate(places.items())
        ]
        return cluster

    async def report_devices(self, actor: Actor) -> None:
        """Which devices a started process sees, where Ray counts them. Raises ConfigError when they are not its own."""
        if actor.gpus:
            node, devices = await Call(
                [(actor, actor.ask("seen"))], lambda values: values[0], partial(self._fail, "seen")
            )
            if self._heard is not None:
                self._heard(actor.name, node, devices)

    # -- construction ------------------------------------------------------------------------------------------------

    def _declare(self, worker_cls: type[Worker], name: str, manager: ResourceManager | None) -> None:
        """Bind the methods of the class, as they were declared."""
        if not (isinstance(worker_cls, type) and issubclass(worker_cls, self.base) and worker_cls.role):
            wanted = self.base.__name__ if self.base is not Worker else "ActorTrainCls or ActorGenCls"
            raise ConfigError("worker_cls", worker_cls, f"derive it from {wanted}")
        self.role = worker_cls.role
        self.name = name or self.role.lower()
        self.actors: list[Actor] = []
        self._manager = manager
        self._class = worker_cls
        self._lock = threading.Lock()
        self._methods = {key: declaration(method) for key, method in _public(worker_cls)}
        for key in self._methods:
            if hasattr(self, key):
                raise ConfigError(
                    f"{worker_cls.__name__}.{key}", key, "clusters have a member of this name: choose another"
                )
            setattr(self, key, Bound(self, key))

    def _plan(
        self, view: AllocationView, workers: int | Mapping[str, int] | None, hardware: str, per_worker: int
    ) -> list[str]:
        """The class of each worker, by rank."""
        if isinstance(workers, Mapping):
            return [name for name, count in workers.items() for _ in range(count)]
        wanted = hardware or ROLE_CLASSES[self.role]
        classes = view.candidates(wanted)
        if not classes:
            have = ", ".join(pool.hardware for pool in view.pools)
            raise ConfigError("resources.pools", wanted, f"no pool serves this class (there are: {have})")
        if workers is None:
            planned = [classes[0]] * (len(view.free(classes[0])) // per_worker)
        else:
            planned = [wanted] * workers
        if not planned:
            raise ConfigError("workers", workers, "a cluster needs at least one worker, and devices for it")
        return planned

    def _launch(self, actors: Sequence[Actor], seconds: float) -> None:
        """Start the processes where their workers are bound to now, and wait until they are there; raises what ``__init__``
        did."""
        for actor in actors:
            actor.place()
            actor.start()
        self._ready(actors, f"{self._class.__name__}.__init__").result(seconds)
        for actor in actors:
            actor.alive = True

    def _ready(self, actors: Sequence[Actor], method: str) -> Call:
        return Call([(actor, actor.ask("ready")) for actor in actors], list, partial(self._fail, method))

    # -- calls -------------------------------------------------------------------------------------------------------

    def start(self, method: str, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None) -> Call:
        """A call of a method, as it was declared."""
        said = self._said(method)
        return self._call(said.mode, method, args, dict(kwargs or {}), how=said.aggregate)

    def start_on(self, actor: Actor, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call:
        """A call of a method of this worker only: its result."""
        self._said(method)
        return self._call(EXECUTE_RANK_ZERO, method, args, dict(kwargs), among=[actor])

    def _said(self, method: str) -> Declaration:
        if method not in self._methods:
            raise ConfigError("method", method, f"{self._class.__name__} has: {', '.join(self._methods)}")
        return self._methods[method]

    def execute_all(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Every worker's result, by rank."""
        result: list[Any] = self._call(EXECUTE_ALL, method, args, kwargs).result()
        return result

    def execute_one(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """The result of the least busy worker."""
        return self._call(EXECUTE_ONE, method, args, kwargs).result()

    def _call(
        self,
        mode: str,
        method: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        how: str = "list",
        among: Sequence[Actor] | None = None,
    ) -> Call:
        actors, fail = list(self.actors if among is None else among), partial(self._fail, method)
        if not actors:
            raise RetryableError(f"{self.name}.{method}: no worker is there")
        if mode == EXECUTE_RANK_ZERO:
            return Call([(actors[0], actors[0].ask("call", method, args, kwargs))], lambda values: values[0], fail)
        if mode == EXECUTE_ONE:
            return self._call_one(method, args, kwargs, actors)
        parts = [args] * len(actors)
        if mode == SCATTER:
            parts = [(part, *args[1:]) for part in scatter(method, args[0] if args else None, len(actors))]
        asked = [(actor, actor.ask("call", method, part, kwargs)) for actor, part in zip(actors, parts, strict=False)]
        return Call(asked, partial(aggregate, method, how), fail, self._patience)

    def _call_one(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], actors: Sequence[Actor]) -> Call:
        """On the least busy one."""
        chosen = self._least_busy(method, actors)
        reference = chosen.ask("call", method, args, kwargs)

        def answered(_: Any) -> None:
            with self._lock:
                chosen.busy.discard(reference)

        def first(values: list[Any]) -> Any:
            answered(None)  # who has the result must not find the worker busy with it
            return values[0]

        with self._lock:
            chosen.busy.add(reference)
        reference.future().add_done_callback(answered)
        return Call([(chosen, reference)], first, partial(self._fail, method))

    def _least_busy(self, method: str, actors: Sequence[Actor]) -> Actor:
        with self._lock:
            alive = [actor for actor in actors if actor.alive]
            if not alive:
                raise RetryableError(f"{self.name}.{method}: all workers that could run it are gone")
            return min(alive, key=lambda actor: (len(actor.busy), actor.identity.rank))

    def _fail(self, method: str, failed: Mapping[Actor, BaseException], waiting: Sequence[Actor]) -> NoReturn:
        """Raise the error that tells most: what user code raised, then who died, then who is late."""
        found = [(actor, said) for actor, error in failed.items() if (said := _raised(error)) is not None]
        if found:
            (actor, said), others = found[0], len(found) - 1
            rank, size = actor.identity.rank, actor.identity.world_size
            raise WorkerError(method, actor.where, rank, size, said.kind, said.detail, said.trace, others)
        for cause, what in ((ProcessDied, "its process died"), (TimeoutError, "it hangs")):
            for actor, error in failed.items():
                if isinstance(error, cause):
                    who = f"rank {actor.identity.rank} of {actor.identity.world_size}, {actor.where}"
                    raise RetryableError(f"{method}: {who}: {what}: {first_line(error.__cause__ or error)}") from error
        raise next(iter(failed.values()))

    # -- life --------------------------------------------------------------------------------------------------------

    def recover(self, *, elsewhere: bool = False, seconds: float = START_SECONDS) -> list[int]:
        """Start the workers that died anew, in place, or where their place is gone (or ``elsewhere``) on other devices by
        the manager's rules. Returns their ranks. Raises RetryableError when there is no room for one."""
        gone = [actor for actor in self.actors if not actor.alive]
        for actor in gone:
            actor.kill()
            try:
                if not elsewhere:
                    self._launch([actor], seconds)
                    continue
            except RetryableError:
                pass
            if actor.placement is not None:
                actor.placement.move()
            self._launch([actor], seconds)
        return [actor.identity.rank for actor in gone]

    @property
    def workers(self) -> list[Identity]:
        """Who they are and where they run, by rank."""
        return [actor.identity for actor in self.actors]

    @property
    def pids(self) -> list[int]:
        """Their process ids, by rank."""
        found: list[int] = self._ready(self.actors, "pid").result()
        return found

    def shutdown(self) -> None:
        """End all workers and give back what they had. Idempotent."""
        actors, self.actors = self.actors, []
        failures: list[Exception] = []
        for actor in actors:
            actor.kill()
            try:
                if self._manager is not None and actor.placement is not None:
                    actor.placement.release()
            except CoserveError as error:  # the others are given back all the same
                failures.append(error)
        if failures:
            raise failures[0]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()


class ActorTrain(Cluster):
    """Training workers."""

    base = ActorTrainCls


class ActorGen(Cluster):
    """Generation workers."""

    base = ActorGenCls


def _raised(error: BaseException) -> Raised | None:
    """What user code raised, a ConfigError too."""
    return next((one for one in (error, error.__cause__) if isinstance(one, Raised)), None)


def _public(worker_cls: type[Worker]) -> Iterator[tuple[str, Any]]:
    """The methods that a user wrote: neither those of the role classes nor private ones."""
    for name, method in inspect.getmembers(worker_cls, inspect.isfunction):
        if not name.startswith("_") and not hasattr(Worker, name):
            yield name, method
