"""The worker processes of one function: started on demand, capped, killed when they hang, gone when nobody calls.

Guarantees: never more than ``concurrency`` processes; a worker runs one call at a time; a call that exceeds
``timeout`` ends in an error and its process is killed with all that the function started, busy loops included; a
worker whose reply cannot be trusted is killed, never reused; an idle worker ends after ``idle_seconds``, unless it is
one of those that :meth:`FunctionPool.provision` keeps ready. Every process that was started is reaped.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
from dataclasses import dataclass
from typing import Any

from orchestrator.api import jsontext
from orchestrator.api.errors import shown
from orchestrator.child_process import kill_watched, public_environment
from orchestrator.rewards.function_protocol import (
    BAD_RESULT,
    EXITED,
    IMPORT_FAILED,
    MAX_BODY_BYTES,
    TIMED_OUT,
)

START_LIMIT = 30.0  # seconds for a worker to import its function on a busy machine
QUEUE_PER_WORKER = 64  # calls that may wait for each worker slot; more are refused, which is back-pressure


class FunctionError(Exception):
    """The function failed: what the caller is told."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind = kind
        self.message = message


class Throttled(Exception):
    """Too many calls wait already."""


@dataclass
class Invocation:
    """What a call cost beside its work."""

    cold_seconds: float | None = None  # waited for a process to start; None when one was ready


class _Worker:
    """A process that is ready for calls."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.expiry: asyncio.TimerHandle | None = None
        self._ids = itertools.count()

    async def call(self, event: Any) -> Any:
        """The result. Raises FunctionError; afterwards ``trusted`` says whether the process may serve again."""
        number = next(self._ids)
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps({"id": number, "event": event}, separators=(",", ":")).encode() + b"\n")
            await self.process.stdin.drain()
        except ConnectionError as error:
            raise _Untrusted(EXITED, "the worker ended between calls") from error
        reply = await self.receive()
        if reply.get("id") != number or not ("result" in reply or "errorType" in reply):
            raise _Untrusted(BAD_RESULT, f"the worker answered something else: {shown(reply, 200)}")
        if "errorType" in reply:
            raise FunctionError(str(reply["errorType"]), str(reply.get("errorMessage", "")))
        return reply["result"]

    async def receive(self) -> dict[str, Any]:
        """The next reply line."""
        assert self.process.stdout is not None
        try:
            line = await self.process.stdout.readline()
            reply = jsontext.parse(line, finite=True) if line else None
        except ValueError as error:  # not JSON, or longer than the limit
            raise _Untrusted(BAD_RESULT, f"the worker's reply cannot be read: {error}") from error
        if reply is None:
            raise _Untrusted(EXITED, "the function ended its process")
        if not isinstance(reply, dict):
            raise _Untrusted(BAD_RESULT, "the worker's reply is not an object")
        return reply

    async def kill(self) -> None:
        """End it with all that the function started, sessions of their own included, and reap it."""
        if self.expiry is not None:
            self.expiry.cancel()
        await kill_watched(self.process)


class _Untrusted(FunctionError):
    """The worker is in no defined state."""


class FunctionPool:
    """All workers of one function."""

    def __init__(
        self,
        target: str,
        *,
        concurrency: int,
        timeout: float,
        idle_seconds: float,
        most_bytes: int = MAX_BODY_BYTES,
    ) -> None:
        self.target = target
        self._most_bytes = most_bytes  # of a result
        self._timeout = timeout
        self._idle_seconds = idle_seconds
        self._concurrency = concurrency
        self._slots = asyncio.Semaphore(concurrency)
        self._waiting = 0
        self._idle: list[_Worker] = []
        self._live = 0
        self._kept = 0  # processes that stay, called or not
        self._ending: dict[int, asyncio.Task[None]] = {}
        self._provisioning: asyncio.Task[None] | None = None

    def provision(self, count: int) -> int:
        """Keep so many processes ready, as far as the concurrency allows. Returns how many; they start in the background."""
        self._kept = min(count, self._concurrency)
        if self._provisioning is None or self._provisioning.done():
            self._provisioning = asyncio.ensure_future(self._provision())
        return self._kept

    async def invoke(self, event: Any, note: Invocation | None = None) -> Any:
        """Run the function on one event; ``note`` is told what it cost. Raises FunctionError or Throttled."""
        if self._waiting >= QUEUE_PER_WORKER * self._concurrency:
            raise Throttled
        self._waiting += 1
        try:
            await self._slots.acquire()
        finally:
            self._waiting -= 1
        try:
            return await self._run(event, note or Invocation())
        finally:
            self._slots.release()

    def stats(self) -> dict[str, int]:
        """Processes now."""
        idle = len(self._idle)
        return {"live": self._live, "idle": idle, "busy": self._live - idle}

    async def close(self) -> None:
        """Kill all idle workers. Calls in progress were cancelled by the caller, which kills theirs."""
        if self._provisioning is not None:
            self._provisioning.cancel()
            await asyncio.gather(self._provisioning, return_exceptions=True)
        workers, self._idle = self._idle, []
        for worker in workers:
            await self._end(worker)
        await asyncio.gather(*self._ending.values())

    async def _provision(self) -> None:
        """One after the other, so that calls get their turn."""
        while self._live < self._kept:
            async with self._slots:
                if self._live < self._kept:
                    try:
                        self._rest(await self._start())
                    except FunctionError:
                        return  # who calls next is told why

    async def _run(self, event: Any, note: Invocation) -> Any:
        worker = await self._take_idle()
        if worker is None:
            begun = asyncio.get_running_loop().time()
            try:
                worker = await self._start()
            finally:
                note.cold_seconds = asyncio.get_running_loop().time() - begun
        trusted = False
        try:
            async with asyncio.timeout(self._timeout):
                result = await worker.call(event)
            trusted = True
            return result
        except TimeoutError:
            raise FunctionError(TIMED_OUT, f"the function did not answer within {self._timeout:g} s") from None
        except _Untrusted:
            raise
        except FunctionError:
            trusted = True
            raise
        finally:
            if trusted:
                self._rest(worker)
            else:
                await self._end(worker)

    async def _take_idle(self) -> _Worker | None:
        """The worker that was used last, so that the others may go."""
        while self._idle:
            worker = self._idle.pop()
            if worker.process.returncode is None:
                if worker.expiry is not None:
                    worker.expiry.cancel()
                return worker
            await self._end(worker)  # it died while nobody called
        return None

    async def _start(self) -> _Worker:
        self._live += 1
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "orchestrator.rewards.function_process", self.target),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                limit=self._most_bytes,
                env=public_environment(),
                start_new_session=True,  # a group of its own, so that what the function started dies with it
            )
        except BaseException:
            self._live -= 1
            raise
        worker = _Worker(process)
        try:
            async with asyncio.timeout(START_LIMIT):
                reply = await worker.receive()
            if not reply.get("ready"):
                raise FunctionError(str(reply.get("errorType", BAD_RESULT)), str(reply.get("errorMessage", reply)))
        except TimeoutError:
            await self._end(worker)
            raise FunctionError(IMPORT_FAILED, f"{self.target} was not imported within {START_LIMIT:g} s") from None
        except BaseException:
            await self._end(worker)
            raise
        return worker

    def _rest(self, worker: _Worker) -> None:
        worker.expiry = asyncio.get_running_loop().call_later(self._idle_seconds, self._expire, worker)
        self._idle.append(worker)

    def _expire(self, worker: _Worker) -> None:
        self._idle.remove(worker)
        if self._live <= self._kept:
            self._rest(worker)
            return
        task = asyncio.ensure_future(self._end(worker))
        self._ending[id(worker)] = task
        task.add_done_callback(lambda _: self._ending.pop(id(worker)))

    async def _end(self, worker: _Worker) -> None:
        try:
            await worker.kill()
        finally:
            self._live -= 1
