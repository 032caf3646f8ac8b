"""Clusters: role-specific groups of workers in Ray actors, called like one object (RollArt 5.1, 5.3, Listing 2).

``Cluster(manager, WorkerClass)`` binds devices by the declarations of the class, starts a process a worker, and gives itself
the methods of the class: ``cluster.method(...)`` blocks, ``cluster.method.start(...)`` returns a call to wait for or await.

Guarantees: all workers are there when the constructor returns, or none is and nothing stays bound; results are in order of
rank; errors name the rank; two workers never share an id or a device; after ``shutdown`` nothing is left.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, ClassVar, Self

from orchestrator.api import ConfigError, CoserveError, RetryableError
from orchestrator.cluster.cluster_calls import Call
from orchestrator.cluster.decorators import (
    DEFAULT_TAG,
    EXECUTE_ALL,
    EXECUTE_ONE,
    EXECUTE_RANK_ZERO,
    SCATTER,
    Declaration,
    declaration,
)
from orchestrator.cluster.dispatch import aggregate, scatter
from orchestrator.cluster.role_workers import (
    SERVERLESS_CALLS,
    SERVERLESS_GROUP,
    ActorGenCls,
    ActorTrainCls,
    EnvironmentCls,
    Identity,
    RewardCls,
    Worker,
    WorkerHost,
)
from orchestrator.policies.placement.device_allocation import Binding
from orchestrator.resources import ROLE_CLASSES, Placement, ResourceManager

START_SECONDS = 300.0  # for all workers to be made
_TAG = "tag_name"


@dataclass(eq=False, slots=True)
class Member:
    """One worker of a cluster."""

    identity: Identity
    placement: Placement
    handle: Any = None
    alive: bool = True
    busy: set[Any] = field(default_factory=set)  # calls of single workers that it has

    @property
    def where(self) -> str:
        """For messages."""
        devices = ", ".join(map(str, self.identity.devices))
        return f"{self.identity.worker_id} ({self.identity.hardware} {devices})"


class Bound:
    """A method of the worker class, as a method of the cluster."""

    def __init__(self, cluster: Cluster, name: str, said: Declaration, signature: inspect.Signature) -> None:
        self._cluster = cluster
        self._name = name
        self._said = said
        self._signature = signature

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Carry it out as it was declared; wait; put the results together."""
        return self.start(*args, **kwargs).result()

    def start(self, *args: Any, **kwargs: Any) -> Call:
        """The same without waiting."""
        said = self._said
        among = self._cluster.eligible(said.affinity, self._tag(args, kwargs)) if said.affinity else None
        mode = said.mode or (EXECUTE_ONE if said.affinity else EXECUTE_ALL)
        return self._cluster.start(mode, self._name, args, kwargs, how=said.aggregate or "list", among=among)

    def _tag(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        try:
            given = self._signature.bind(None, *args, **kwargs).arguments.get(_TAG)
        except TypeError as error:
            raise ConfigError(f"{self._name}: arguments", args, str(error)) from error
        if given is None:
            given = self._signature.parameters[_TAG].default
        return given if isinstance(given, str) else DEFAULT_TAG


class Cluster:
    """``workers``: how many, or class -> how many; None: as many as the free devices of its classes make. The classes are
    those of the declared affinity, or that of the role (:data:`orchestrator.resources.ROLE_CLASSES`), or ``hardware``.
    ``arguments`` go to the worker's ``__init__``; ``environment`` is set before its process starts.

    Raises ConfigError (declarations, ids, pools), RetryableError (no room, Ray gives no place), WorkerError (``__init__``).
    """

    base: ClassVar[type[Worker]] = Worker

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
        if not (isinstance(worker_cls, type) and issubclass(worker_cls, self.base) and worker_cls.role):
            wanted = (
                self.base.__name__
                if self.base is not Worker
                else "ActorTrainCls, ActorGenCls, RewardCls, EnvironmentCls"
            )
            raise ConfigError("worker_cls", worker_cls, f"derive it from {wanted}")
        self.role = worker_cls.role
        self.name = name or self.role.lower()
        self._manager = res_manager
        self._class = worker_cls
        self._arguments = dict(arguments or {})
        self._environment = dict(environment or {})
        self._lock = threading.Lock()
        self._members: list[Member] = []
        self._methods = {key: declaration(method) for key, method in _public(worker_cls)}
        self._proxies = {said.attribute: said.url for said in self._methods.values() if said.attribute}
        wanted_classes = self._plan(workers, hardware, devices_per_worker)
        self._bind_worker_method()
        try:
            self._create_worker(wanted_classes, devices_per_worker, cpus_per_worker, start_seconds)
        except BaseException:
            self.shutdown()
            raise

    # -- construction ------------------------------------------------------------------------------------------------

    def _plan(self, workers: int | Mapping[str, int] | None, hardware: str, per_worker: int) -> list[str]:
        """The class of each worker, by rank."""
        if isinstance(workers, Mapping):
            return [name for name, count in workers.items() for _ in range(count)]
        declared = [name for said in self._methods.values() for name in (said.affinity or {}).values()]
        classes = list(dict.fromkeys([hardware] if hardware else declared or [ROLE_CLASSES[self.role]]))
        view = self._manager.view()
        for name in classes:
            if not view.candidates(name):
                have = ", ".join(pool.hardware for pool in view.pools)
                raise ConfigError("resources.pools", name, f"no pool serves this class (there are: {have})")
        if workers is None:
            present = list(dict.fromkeys(view.candidates(name)[0] for name in classes))
            planned = [name for name in present for _ in range(len(view.free(name)) // per_worker)]
        else:
            planned = sorted((classes[index % len(classes)] for index in range(workers)), key=classes.index)
        if not planned:
            raise ConfigError("workers", workers, "a cluster needs at least one worker, and devices for it")
        return planned

    def _create_worker(self, classes: Sequence[str], devices: int, cpus: float, seconds: float) -> None:
        bound: list[tuple[Placement, Binding]] = []
        for rank, hardware in enumerate(classes):
            placement = Placement(self._manager, f"{self.name}-{rank}", hardware, devices, cpus=cpus)
            self._members.append(Member(Identity(f"{self.name}-{rank}", rank, len(classes), hardware, ()), placement))
            bound.append((placement, placement.bind()))
        for member in self._members:
            self._launch(member)
        self._made(self._members, seconds)

    def _launch(self, member: Member) -> None:
        """Start the process, where the worker is bound to now."""
        import ray

        options = member.placement.place()
        binding, old = member.placement.bind(), member.identity
        member.identity = Identity(old.worker_id, old.rank, old.world_size, binding.hardware, binding.devices)
        host = ray.remote(concurrency_groups={SERVERLESS_GROUP: SERVERLESS_CALLS})(WorkerHost)
        handle = host.options(**options, runtime_env={"env_vars": self._environment} if self._environment else {})
        member.handle = handle.remote(self._class, member.identity, self._proxies, self._arguments)

    def _made(self, members: Sequence[Member], seconds: float) -> None:
        """Wait until they are there; raises what their ``__init__`` did."""
        asked = [(member, member.handle.ready.remote()) for member in members]
        Call(f"{self._class.__name__}.__init__", len(self._members), asked, lambda _: None, self._lost).result(seconds)
        for member in members:
            member.alive = True

    def _bind_worker_method(self) -> None:
        for name, said in self._methods.items():
            if hasattr(self, name):
                raise ConfigError(
                    f"{self._class.__name__}.{name}", name, "clusters have a member of this name: choose another"
                )
            signature = inspect.signature(getattr(self._class, name))
            if said.affinity and _TAG not in signature.parameters:
                fix = f'hw_mapping routes by the argument {_TAG}: add {_TAG}: str = "{DEFAULT_TAG}"'
                raise ConfigError(f"{self._class.__name__}.{name}", str(signature), fix)
            setattr(self, name, Bound(self, name, said, signature))

    # -- calls -------------------------------------------------------------------------------------------------------

    def execute_all(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Every worker's result, by rank."""
        result: list[Any] = self.start(EXECUTE_ALL, method, args, kwargs).result()
        return result

    def execute_one(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """The result of the least busy worker."""
        return self.start(EXECUTE_ONE, method, args, kwargs).result()

    def start(
        self,
        mode: str,
        method: str,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        how: str = "list",
        among: Sequence[Member] | None = None,
    ) -> Call:
        """A call in one of the modes of :func:`orchestrator.cluster.register`, on these workers or on all."""
        if method not in self._methods:
            raise ConfigError("method", method, f"{self._class.__name__} has: {', '.join(self._methods)}")
        given, members = dict(kwargs or {}), list(self._members if among is None else among)
        if not members:
            raise RetryableError(f"{self.name}.{method}: no worker is there")
        if mode in (EXECUTE_ONE, EXECUTE_RANK_ZERO):
            anywhere = mode == EXECUTE_ONE
            chosen = self._least_busy(method, members) if anywhere else members[0]
            others = [member for member in members if member is not chosen]

            def again() -> Call:
                return self.start(mode, method, args, given, how=how, among=others)

            retry = again if anywhere and among is not None else None
            reference = self._ask(chosen, method, args, given, counted=anywhere)

            def first(values: list[Any]) -> Any:
                self._answered(chosen, reference)  # who has the result must not find the worker busy with it
                return values[0]

            return Call(method, len(self._members), [(chosen, reference)], first, self._lost, retry)
        if mode == SCATTER:
            parts = scatter(method, args[0] if args else None, len(members))
            asked = [
                (member, self._ask(member, method, (part, *args[1:]), given))
                for member, part in zip(members, parts, strict=False)
            ]
        else:
            asked = [(member, self._ask(member, method, args, given)) for member in members]
        return Call(method, len(self._members), asked, lambda values: aggregate(method, how, values), self._lost)

    def eligible(self, affinity: Mapping[str, str], tag: str) -> list[Member]:
        """The living workers of the class that a tag maps to; else of the first compatible class that has some."""
        wanted = affinity.get(tag, affinity.get(DEFAULT_TAG, ""))
        alive = [member for member in self._members if member.alive]
        if not wanted:
            return alive
        for hardware in self._manager.view().candidates(wanted):
            if found := [member for member in alive if member.identity.hardware == hardware]:
                return found
        raise RetryableError(f"{self.name}: no worker is there for tag {tag!r}, which runs on class {wanted}")

    def _least_busy(self, method: str, members: Sequence[Member]) -> Member:
        with self._lock:
            alive = [member for member in members if member.alive]
            if not alive:
                raise RetryableError(f"{self.name}.{method}: all workers that could run it are gone")
            return min(alive, key=lambda member: (len(member.busy), member.identity.rank))

    def _ask(
        self, member: Member, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], *, counted: bool = False
    ) -> Any:
        reference = member.handle.call.remote(method, args, kwargs)
        if counted:
            with self._lock:
                member.busy.add(reference)
            reference.future().add_done_callback(lambda _: self._answered(member, reference))
        return reference

    def _answered(self, member: Member, reference: Any) -> None:
        with self._lock:
            member.busy.discard(reference)

    def _lost(self, member: Member) -> None:
        member.alive = False

    # -- life --------------------------------------------------------------------------------------------------------

    def recover(self, *, elsewhere: bool = False, seconds: float = START_SECONDS) -> list[int]:
        """Start the workers that died anew, in place, or where their place is gone (or ``elsewhere``) on other devices by
        the manager's rules. Returns their ranks. Raises RetryableError when there is no room for one."""
        import ray

        gone = [member for member in self._members if not member.alive]
        for member in gone:
            ray.kill(member.handle)
            try:
                if elsewhere:
                    member.placement.move()
                self._launch(member)
                self._made([member], seconds)
            except RetryableError:
                if elsewhere:
                    raise
                member.placement.move()
                self._launch(member)
                self._made([member], seconds)
        return [member.identity.rank for member in gone]

    @property
    def workers(self) -> list[Identity]:
        """Who they are and where they run, by rank."""
        return [member.identity for member in self._members]

    @property
    def pids(self) -> list[int]:
        """Their process ids, by rank."""
        asked = [(member, member.handle.ready.remote()) for member in self._members]
        found: list[int] = Call("pid", len(asked), asked, list, self._lost).result()
        return found

    def shutdown(self) -> None:
        """End all workers and give back what they had. Idempotent."""
        import ray

        members, self._members = self._members, []
        failures: list[Exception] = []
        for member in members:
            if member.handle is not None and ray.is_initialized():
                ray.kill(member.handle)
            try:
                member.placement.release()
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


class Reward(Cluster):
    """Reward workers."""

    base = RewardCls


class Environment(Cluster):
    """Environment workers."""

    base = EnvironmentCls


def _public(worker_cls: type[Worker]) -> Iterator[tuple[str, Any]]:
    """The methods that a user wrote: neither those of the role classes nor private ones."""
    for name, method in inspect.getmembers(worker_cls, inspect.isfunction):
        if not name.startswith("_") and not hasattr(Worker, name):
            yield name, method
