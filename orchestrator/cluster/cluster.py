"""Clusters: role-specific groups of workers in Ray actors, called like one object (RollArt 5.1, 5.3, Listing 2).

``Cluster(WorkerClass, places)`` has a worker for every place and gives itself the methods of the class: ``await
cluster.method(...)`` carries one out as it was declared. A training run's trainer and engines are such clusters
(:mod:`orchestrator.runtime.engine_actors`).

Guarantees: nothing is started before :meth:`Cluster.launch`, or actor by actor (:attr:`Cluster.actors`); results are in order of
rank; errors name the worker; where workers wait for each other, nobody is waited for for ever once one has failed; after
:meth:`Cluster.close` no process is left. Places stay those of whoever made them.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, NoReturn

from orchestrator.api import ConfigError, ProcessDied, RetryableError
from orchestrator.cluster.actor import Actor, FirstReport
from orchestrator.cluster.decorators import EXECUTE_ONE, EXECUTE_RANK_ZERO, Declaration, declaration
from orchestrator.cluster.role_workers import ActorGenCls, ActorTrainCls, Identity, Worker
from orchestrator.resources import Placement

Heard = Callable[[str, FirstReport], None]
Result = Coroutine[Any, Any, Any]  # of a call: it is under way already


class Cluster:
    """Workers by rank: id -> place; None: any. ``environment`` is set before their processes start. ``heard(id, report)``: hears
    what a process says of itself (:meth:`hear`), and raises what is wrong with it. Raises ConfigError (a class of another role, a
    method that would hide one of the cluster's)."""

    base: ClassVar[type[Worker]] = Worker
    _patience: ClassVar[float | None] = None  # seconds that the others have after one has failed; None: all they take

    def __init__(
        self,
        worker_cls: type[Worker],
        places: Mapping[str, Placement | None],
        environment: Mapping[str, str] | None = None,
        name: str = "",
        heard: Heard | None = None,
    ) -> None:
        if not (isinstance(worker_cls, type) and issubclass(worker_cls, self.base) and worker_cls.role):
            wanted = self.base.__name__ if self.base is not Worker else "ActorTrainCls or ActorGenCls"
            raise ConfigError("worker_cls", worker_cls, f"derive it from {wanted}")
        self.name = name or worker_cls.role.lower()
        self.actors = [
            Actor(worker_cls, Identity(worker, rank, len(places), "", ()), place, dict(environment or {}))
            for rank, (worker, place) in enumerate(places.items())
        ]
        self._class = worker_cls
        self._heard = heard
        self._methods = {key: declaration(method) for key, method in _public(worker_cls)}
        for key in self._methods:
            if hasattr(self, key):
                fix = "clusters have a member of this name: choose another"
                raise ConfigError(f"{worker_cls.__name__}.{key}", key, fix)
            if self._methods[key].beside and not worker_cls.beside:
                fix = "runs beside the other methods: set how many at a time, beside = 1 in the class"
                raise ConfigError(f"{worker_cls.__name__}.{key}", key, fix)
            setattr(self, key, partial(self.start, key))

    def add_worker(self, worker: str, place: Placement | None, environment: Mapping[str, str], part: int = 0) -> Actor:
        """One more, not started, of the next rank, in this part of its place; the others go on with the size that they know."""
        rank = len(self.actors)
        self.actors.append(Actor(self._class, Identity(worker, rank, rank + 1, "", ()), place, dict(environment), part))
        return self.actors[-1]

    async def launch(self) -> None:
        """Reserve the places, where there are some in a pool, then start all processes (Ray does it in the background)."""
        await asyncio.gather(*(asyncio.to_thread(actor.place) for actor in self.actors))
        for actor in self.actors:
            actor.start()

    async def hear(self, actor: Actor) -> FirstReport:
        """The first report of a started process. Raises ConfigError when the devices that it sees are not its own."""
        report: FirstReport = await self._results("seen", [(actor, actor.ask("seen"))], "first")
        if self._heard is not None:
            self._heard(actor.name, report)
        return report

    def start(self, method: str, /, *args: Any, **kwargs: Any) -> Result:
        """Ask the workers as the method was declared; to await: their results, put together."""
        said = self._said(method)
        if said.mode == EXECUTE_ONE:
            actors = [self._least_busy(method)]
        else:
            actors = self.actors[:1] if said.mode == EXECUTE_RANK_ZERO else self.actors
        asked = [(actor, actor.ask("call", method, args, kwargs, beside=said.beside)) for actor in actors]
        return self._results(method, asked, said.aggregate)

    def start_on(self, actor: Actor, method: str, /, *args: Any, **kwargs: Any) -> Result:
        """The same of this worker only: its result."""
        beside = self._said(method).beside
        return self._results(method, [(actor, actor.ask("call", method, args, kwargs, beside=beside))], "first")

    def close(self) -> None:
        """End all processes at once. Idempotent."""
        for actor in self.actors:
            actor.kill()

    def _said(self, method: str) -> Declaration:
        if method not in self._methods:
            raise ConfigError("method", method, f"{self._class.__name__} has: {', '.join(self._methods)}")
        return self._methods[method]

    def _least_busy(self, method: str) -> Actor:
        alive = [actor for actor in self.actors if actor.alive]
        if not alive:
            raise RetryableError(f"{self.name}.{method}: all workers that could run it are gone")
        return min(alive, key=lambda actor: (actor.busy, actor.identity.rank))

    async def _results(self, method: str, asked: Sequence[tuple[Actor, Any]], aggregate: str) -> Any:
        values = [await self._answer_of(*asked[0])] if len(asked) == 1 else await self._answers(asked)
        if aggregate == "first":
            return values[0]
        return list(itertools.chain.from_iterable(values)) if aggregate == "concat" else values

    async def _answer_of(self, actor: Actor, reference: Any) -> Any:
        """Of one alone, as a turn's calls are: without a task of its own."""
        try:
            return await actor.answer(reference)
        except Exception as error:  # noqa: BLE001  raised as the cluster has it
            self._fail({actor: error}, ())

    async def _answers(self, asked: Sequence[tuple[Actor, Any]]) -> list[Any]:
        tasks = {actor: asyncio.create_task(actor.answer(reference)) for actor, reference in asked}
        try:
            await self._settled(list(tasks.values()))
            errors = {actor: task.exception() for actor, task in tasks.items() if task.done()}
        finally:
            for task in tasks.values():
                task.cancel()
            await asyncio.gather(*tasks.values(), return_exceptions=True)
        if failed := {actor: error for actor, error in errors.items() if error is not None}:
            self._fail(failed, [actor for actor in tasks if actor not in errors])
        return [task.result() for task in tasks.values()]

    async def _settled(self, tasks: Sequence[asyncio.Task[Any]]) -> None:
        """All have ended; or one failed, and the others have seen it too, or wait for it for ever."""
        if self._patience is None:
            await asyncio.wait(tasks)
            return
        now = asyncio.get_running_loop().time
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        deadline = now() + self._patience
        while (waiting := [task for task in tasks if not task.done()]) and not any(map(_died, tasks)):
            if (left := deadline - now()) <= 0:
                return
            await asyncio.wait(waiting, timeout=left, return_when=asyncio.FIRST_COMPLETED)

    def _fail(self, failed: Mapping[Actor, BaseException], waiting: Sequence[Actor]) -> NoReturn:
        """Raise the error that tells most; ``waiting``: who has not answered."""
        raise next(iter(failed.values()))


class ActorTrain(Cluster):
    """Training workers."""

    base = ActorTrainCls


class ActorGen(Cluster):
    """Generation workers."""

    base = ActorGenCls


def _died(task: asyncio.Task[Any]) -> bool:
    return task.done() and isinstance(task.exception(), ProcessDied)


def _public(worker_cls: type[Worker]) -> Iterator[tuple[str, Any]]:
    """The methods that a user wrote: neither those of the role classes nor private ones."""
    for name, method in inspect.getmembers(worker_cls, inspect.isfunction):
        if not name.startswith("_") and not hasattr(Worker, name):
            yield name, method
