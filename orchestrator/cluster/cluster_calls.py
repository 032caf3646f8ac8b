"""Calls of a cluster's methods: started on some workers, waited for by blocking or by ``await``.

Guarantees: a call ends in one result or one error, which the cluster makes of its workers' errors. Where
workers wait for each other (``patience``), nobody is waited for for ever once one has failed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from orchestrator.api import CoserveError, ProcessDied
from orchestrator.cluster.actor import Actor


class WorkerError(CoserveError):
    """A method raised in a worker: the user's code, not the machinery. ``rank`` says where, ``kind`` and ``detail`` what,
    ``trace`` the last lines of its traceback there. ``others``: how many more ranks failed in the same call."""

    def __init__(
        self, method: str, worker: str, rank: int, size: int, kind: str, detail: str, trace: str = "", others: int = 0
    ) -> None:
        more = f" (and {others} other ranks)" if others else ""
        super().__init__(f"{method} failed on rank {rank} of {size}, {worker}{more}: {kind}: {detail}")
        self.method = method
        self.worker = worker
        self.rank = rank
        self.kind = kind
        self.detail = detail
        self.trace = trace
        self.others = others


@dataclass(eq=False, slots=True)
class Call:
    """One call, in progress: workers and Ray's references. ``result()`` blocks; ``await call`` waits in an event loop.

    ``fail`` raises what tells most of the errors by worker, given the workers that were still waited for. ``patience``:
    seconds that the others have, in an event loop, after one has failed (None: as long as they take).
    """

    _asked: Sequence[tuple[Actor, Any]]
    _join: Callable[[list[Any]], Any]
    _fail: Callable[[Mapping[Actor, BaseException], Sequence[Actor]], NoReturn]
    _patience: float | None = None

    def result(self, timeout: float | None = None) -> Any:
        """Wait at most ``timeout`` seconds for each worker."""
        import ray

        done: dict[Actor, Any] = {}
        failed: dict[Actor, BaseException] = {}
        for actor, reference in self._asked:
            try:
                with actor.reaching():
                    done[actor] = actor.unwrap(ray.get(reference, timeout=timeout))
            except ray.exceptions.GetTimeoutError:
                failed[actor] = TimeoutError(f"no answer within {timeout:g} s")
            except CoserveError as error:
                failed[actor] = error
        return self._joined(done, failed)

    def __await__(self) -> Generator[Any, None, Any]:
        return self._wait().__await__()

    async def _wait(self) -> Any:
        tasks = {actor: asyncio.create_task(_answer(actor, reference)) for actor, reference in self._asked}
        try:
            await self._settled(list(tasks.values()))
            errors = {actor: task.exception() for actor, task in tasks.items() if task.done()}
        finally:
            for task in tasks.values():
                task.cancel()
            await asyncio.gather(*tasks.values(), return_exceptions=True)
        failed = {actor: error for actor, error in errors.items() if error is not None}
        return self._joined({actor: tasks[actor].result() for actor in errors if actor not in failed}, failed)

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

    def _joined(self, done: Mapping[Actor, Any], failed: Mapping[Actor, BaseException]) -> Any:
        if failed:
            self._fail(failed, [actor for actor, _ in self._asked if actor not in done and actor not in failed])
        return self._join(list(done.values()))


async def _answer(actor: Actor, reference: Any) -> Any:
    with actor.reaching():
        answer = await reference
    return actor.unwrap(answer)


def _died(task: asyncio.Task[Any]) -> bool:
    return task.done() and isinstance(task.exception(), ProcessDied)
