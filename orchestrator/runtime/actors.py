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
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

from orchestrator.api import (
    CommandError,
    Completion,
    ConfigError,
    GenerationRequest,
    PublishResult,
    RetryableError,
    TrainBatch,
    TrainMetrics,
    UpdateResult,
    WorkerStats,
)

_OK, _CONFIG, _COMMAND, _ERROR = "ok", "config", "command", "error"


class ActorHost:
    """Runs inside the actor's process: holds one object, made from a class named by string."""

    def __init__(self) -> None:
        self._object: Any = None

    async def create(self, target: str, kwargs: dict[str, Any]) -> tuple[str, Any]:
        """Import ``module:Class`` and construct it."""
        return await self._answer(self._create, target, kwargs)

    async def function(self, target: str, kwargs: dict[str, Any]) -> tuple[str, Any]:
        """Call ``module:function``."""
        return await self._answer(_resolve(target), **kwargs)

    async def call(self, method: str, *args: Any, **kwargs: Any) -> tuple[str, Any]:
        """Call a method of the object."""
        return await self._answer(getattr(self._object, method), *args, **kwargs)

    def pid(self) -> int:
        """The process id, for those who watch it."""
        return os.getpid()

    def _create(self, target: str, kwargs: dict[str, Any]) -> None:
        self._object = _resolve(target)(**kwargs)

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
    """A handle on one :class:`ActorHost`; ``environment`` is set before its process starts."""

    def __init__(self, name: str, environment: dict[str, str]) -> None:
        self.name = name
        self._environment = environment
        self._handle: Any = None

    def start(self) -> None:
        """Start the process (Ray does it in the background)."""
        import ray

        options = {"num_cpus": 1, "max_concurrency": 64, "runtime_env": {"env_vars": self._environment}}
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
            raise RetryableError(f"{self.name} died: {reason[0] if reason else type(error).__name__}") from error
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
        import ray

        try:
            return int(await self._handle.pid.remote())
        except ray.exceptions.RayError as error:
            raise RetryableError(f"{self.name} died: {error}") from error

    def kill(self) -> None:
        """End the process at once. Idempotent."""
        import ray

        if self._handle is not None:
            ray.kill(self._handle)
            self._handle = None


class RayWorker:
    """A vLLM engine in a Ray actor, as a ManagedWorker."""

    def __init__(self, name: str, target: str, kwargs: dict[str, Any], environment: dict[str, str]) -> None:
        self.name = name
        self._target = target
        self._kwargs = {**kwargs, "name": name}
        self._actor = Actor(name, environment)

    async def start(self) -> None:
        """Start the process and the engine in it."""
        self._actor.start()
        await self._actor.ask("create", self._target, self._kwargs)

    async def restart(self) -> None:
        """See the protocol."""
        self._actor.kill()
        await self.start()

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

    async def update(self, version: int) -> UpdateResult:
        """See the protocol."""
        result: UpdateResult = await self._actor.call("update", version)
        return result

    async def resume(self) -> None:
        """See the protocol."""
        await self._actor.call("resume")

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
    """A Megatron rank in a Ray actor, as a Trainer."""

    def __init__(self, target: str, environment: dict[str, str]) -> None:
        self._target = target
        self._actor = Actor("trainer", environment)

    def start(self) -> None:
        """Start the process; :meth:`create` makes the trainer in it."""
        self._actor.start()

    async def function(self, target: str, kwargs: dict[str, Any]) -> Any:
        """Call a function of the plugin in the trainer's process."""
        return await self._actor.ask("function", target, kwargs)

    async def create(self, kwargs: dict[str, Any]) -> None:
        """Build model and optimizer."""
        await self._actor.ask("create", self._target, kwargs)

    async def call(self, method: str, *args: Any) -> Any:
        """A method beyond the port (warm-up, export, status)."""
        return await self._actor.call(method, *args)

    async def train_step(self, batch: TrainBatch) -> TrainMetrics:
        """See the protocol."""
        metrics: TrainMetrics = await self._actor.call("train_step", batch)
        return metrics

    async def publish(self) -> PublishResult:
        """See the protocol."""
        result: PublishResult = await self._actor.call("publish")
        return result

    async def save(self, folder: str) -> None:
        """See the protocol."""
        await self._actor.call("save", folder)

    async def load(self, folder: str) -> int:
        """See the protocol."""
        version: int = await self._actor.call("load", folder)
        return version

    async def pid(self) -> int:
        """Its process id."""
        return await self._actor.pid()

    async def close(self) -> None:
        """See the protocol."""
        self._actor.kill()
