"""Real engines side by side, a process each: for tests and benchmarks of KV that moves.

``Child`` is a proxy of an :class:`~vllm_rlplugin.worker.inprocess_worker.EngineWorker` in a process that this one
started (multiprocessing's own pipe, to our own child). It is a rollout worker as the orchestrator knows it. Not for
runs: those have Ray.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import signal
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

from orchestrator.api import Completion, GenerationRequest, KvMove, KvMoved, RetryableError, UpdateResult, WorkerStats

_CLOSED = "its process has ended"


def _serve(pipe: Any, arguments: dict[str, Any]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    from vllm_rlplugin.worker.inprocess_worker import EngineWorker

    async def main() -> None:
        worker = EngineWorker(**arguments)
        watch: dict[str, Any] = {"worker": worker, "computed": 0}
        _count(watch)
        pipe.send((-1, True, None))
        tasks = set()
        while True:
            message = await asyncio.to_thread(_receive, pipe)
            if message is None:
                return
            task = asyncio.create_task(_answer(pipe, watch, *message))
            tasks.add(task)
            task.add_done_callback(tasks.discard)

    asyncio.run(main())


def _receive(pipe: Any) -> Any:
    try:
        return pipe.recv()
    except EOFError:
        return None


def _count(watch: dict[str, Any]) -> None:
    """How many tokens the engine has computed, prompts and answers."""
    scheduler = watch["worker"]._engine._scheduler
    stock = scheduler.schedule

    def schedule(*args: Any, **kwargs: Any) -> Any:
        output = stock(*args, **kwargs)
        watch["computed"] += output.total_num_scheduled_tokens
        return output

    scheduler.schedule = schedule


async def _answer(pipe: Any, watch: dict[str, Any], number: int, method: str, args: Any, kwargs: Any) -> None:
    try:
        worker = watch["worker"]
        if method == "computed":
            value = watch["computed"]
        elif method == "forget":
            value = worker._engine._scheduler.reset_prefix_cache(reset_connector=True)
        else:
            value = await getattr(worker, method)(*args, **kwargs)
    except Exception as error:  # noqa: BLE001  the border of a process: everything is reported to the other side
        where = "".join(traceback.format_exception(error)[-3:])
        pipe.send((number, False, f"{type(error).__name__}: {error}\n{where}"))
    else:
        pipe.send((number, True, value))


class Child:
    """An engine in a process of its own. :meth:`ready` before anything else."""

    hardware = ""

    def __init__(self, name: str, **arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self.name = name
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, {**arguments, "name": name}), daemon=False)
        self._process.start()
        theirs.close()
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._number = -1
        self._reader: asyncio.Task[None] | None = None
        self._ended = False

    async def ready(self) -> None:
        """It is up. Raises RetryableError."""
        up: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting[-1] = up
        self._reader = asyncio.create_task(self._read())
        await up

    @property
    def pid(self) -> int:
        """Of its process."""
        return int(self._process.pid or 0)

    def kill(self) -> None:
        """End its process at once. Idempotent."""
        self._process.kill()
        self._process.join(10.0)

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """A method of the worker. Raises RetryableError, for whatever it raises or when its process is gone."""
        if self._ended:
            raise RetryableError(f"{self.name}: {_CLOSED}")
        self._number += 1
        number = self._number
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        try:
            self._pipe.send((number, method, args, kwargs))
        except OSError as error:
            raise RetryableError(f"{self.name}: {_CLOSED}") from error
        return await answer

    async def _read(self) -> None:
        while True:
            try:
                message = await asyncio.to_thread(_receive, self._pipe)
            except OSError:
                message = None
            if message is None:
                break
            number, fine, value = message
            answer = self._waiting.pop(number, None)
            if answer is not None and not answer.done():
                if fine:
                    answer.set_result(value)
                else:
                    answer.set_exception(RetryableError(f"{self.name}: {value}"))
        self._ended = True
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(RetryableError(f"{self.name}: {_CLOSED}"))
        self._waiting.clear()

    async def computed(self) -> int:
        """Tokens that it has computed so far."""
        return int(await self.call("computed"))

    async def forget(self) -> None:
        """Drop everything that it has cached; nothing may be running."""
        await self.call("forget")

    # The port.

    async def add(self, requests: Sequence[GenerationRequest]) -> None:
        """See the protocol."""
        await self.call("add", list(requests))

    async def abort(
        self, request_ids: Sequence[str] = (), *, trajectories: Sequence[str] = (), groups: Sequence[str] = ()
    ) -> None:
        """See the protocol."""
        await self.call("abort", list(request_ids), trajectories=list(trajectories), groups=list(groups))

    async def prioritize(self, priorities: Mapping[str, int]) -> None:
        """See the protocol."""
        await self.call("prioritize", dict(priorities))

    async def completions(self) -> list[Completion]:
        """See the protocol."""
        found: list[Completion] = await self.call("completions")
        return found

    async def suspend(self) -> None:
        """See the protocol."""
        await self.call("suspend")

    async def prepare(self, version: int) -> None:
        """See the protocol."""
        await self.call("prepare", version)

    async def update(self, version: int) -> UpdateResult:
        """See the protocol."""
        result: UpdateResult = await self.call("update", version)
        return result

    async def resume(self) -> None:
        """See the protocol."""
        await self.call("resume")

    async def stats(self) -> WorkerStats:
        """See the protocol."""
        stats: WorkerStats = await self.call("stats")
        return stats

    async def kv_place(self) -> str:
        """See :class:`orchestrator.api.KvWorker`."""
        return str(await self.call("kv_place"))

    async def fetch_kv(self, move: KvMove) -> KvMoved:
        """See :class:`orchestrator.api.KvWorker`."""
        moved: KvMoved = await self.call("fetch_kv", move)
        return moved

    async def restart(self) -> None:
        """It is not started again."""
        raise RetryableError(f"{self.name}: {_CLOSED}")

    async def close(self) -> None:
        """End its process. Idempotent."""
        self._ended = True
        self.kill()
        if self._reader is not None:
            await self._reader
