"""A child process of the orchestrator: who it is, whether it lives, and how it is stopped.

Guarantees: ``stop`` is idempotent, asks first, kills after a limit, and always reaps; where a start raises, or is cancelled,
nothing is left behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

from orchestrator.api import CoserveError, RunError

T = TypeVar("T")
HIDDEN = "RL_COSERVE_"  # environment variables that begin so are the orchestrator's
STOP_LIMIT = 5.0  # seconds to stop by itself before it is killed
KILL_LIMIT = 3.0  # seconds for a watcher to end everything, before its group is killed


def public_environment() -> dict[str, str]:
    """Our environment variables without those that hold secrets of the run."""
    return {name: value for name, value in os.environ.items() if not name.startswith(HIDDEN)}


class ChildProcess:
    """Base of the children that the orchestrator starts; a subclass sets ``_process`` when it starts one, or has
    :meth:`_start_process` do it. ``name``: for errors."""

    name = "child"

    def __init__(self, log: Path | None) -> None:
        self._log = log
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int | None:
        """Process id while it runs."""
        return self._process.pid if self._process is not None and self.alive() else None

    def alive(self) -> bool:
        """Whether the process runs."""
        return self._process is not None and self._process.returncode is None

    async def ended(self) -> None:
        """Wait until the process is gone; at once when there is none."""
        if self._process is not None:
            await self._process.wait()

    async def _start_process(
        self, command: Sequence[str], environment: Mapping[str, str], seconds: float, line_bytes: int = 1 << 16
    ) -> None:
        """Start a program that says a line when it is ready (:meth:`_heard`), and ends when its standard input does. Raises
        RunError when it is not ready within so many ``seconds``, and what :meth:`_ended_early` says when it ended."""
        with ExitStack() as stack:
            log = None if self._log is None else stack.enter_context(self._log.open("ab"))
            self._process = process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                limit=line_bytes,
                env=dict(environment),
                start_new_session=True,  # Ctrl-C is for the orchestrator, which stops it when it is done
            )
        assert process.stdout is not None
        try:
            async with asyncio.timeout(seconds):
                if not (line := await process.stdout.readline()):
                    raise self._ended_early(await process.wait())
            self._heard(line)
        except TimeoutError:
            await ChildProcess.stop(self)
            raise RunError(f"the {self.name} was not ready within {seconds:g} s{self._hint()}") from None
        except BaseException:
            await ChildProcess.stop(self)
            raise

    def _heard(self, line: bytes) -> None:
        """It is ready."""

    def _ended_early(self, code: int) -> CoserveError:
        return RunError(f"the {self.name} ended with code {code} before it was ready{self._hint()}")

    def _hint(self) -> str:
        return f"; see {self._log}" if self._log is not None else ""

    async def stop(self) -> None:
        """Stop, kill if need be, reap. Idempotent."""
        process = self._process
        if process is None or process.returncode is not None:
            return
        process.terminate()
        try:
            async with asyncio.timeout(STOP_LIMIT):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()


async def kill_watched(process: asyncio.subprocess.Process) -> None:
    """End a process that began with :func:`orchestrator.process_watcher.fork_under_watch` in a session of its own, with all that
    it started, and reap it. Idempotent."""
    if process.returncode is None:
        assert process.stdin is not None
        if not process.stdin.transport.is_closing():  # else the pipe is lost already, and to abort it once more raises
            process.stdin.transport.abort()  # the watcher sees it, and kills
        try:
            return await _read_out(process)
        except (TimeoutError, asyncio.CancelledError) as error:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            if isinstance(error, asyncio.CancelledError):
                raise
    with contextlib.suppress(TimeoutError):  # who left the group and keeps the pipe holds up nobody here
        await _read_out(process)


async def _read_out(process: asyncio.subprocess.Process) -> None:
    """Until it has ended: what was not read keeps the pipe open. Raises TimeoutError."""
    assert process.stdout is not None
    async with asyncio.timeout(KILL_LIMIT):
        with contextlib.suppress(RuntimeError):  # a call in progress reads to the end itself
            while await process.stdout.read(1 << 16):
                pass
        await process.wait()


async def to_its_end(work: Coroutine[Any, Any, T]) -> T:
    """Await it, whatever cancels the caller meanwhile; the cancellation strikes at what the caller awaits next."""
    doing, caller = asyncio.ensure_future(work), asyncio.current_task()
    assert caller is not None
    cancelled = 0
    while not doing.done():
        try:
            await asyncio.shield(doing)
        except asyncio.CancelledError:
            caller.uncancel()
            cancelled += 1
    for _ in range(cancelled):
        caller.cancel()
    return doing.result()


def free_port(address: str) -> int:
    """Of this machine, for a child to listen on; another process may be faster."""
    with socket.create_server((address, 0)) as server:
        port: int = server.getsockname()[1]
    return port


def port_taken(port: int, address: str) -> OSError | None:
    """Why nothing can listen there; None: it can. A port in TIME_WAIT is free for a listener."""
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
            probe.listen()
        except OSError as error:
            return error
    return None
