"""Starts programs from a small process of its own, so that the event loop does not wait until the kernel has run them.

Starting a program from a Python process stops all of that process, the interpreter's lock included, until the new process
has got a processor and executed the program: tens of milliseconds on a busy machine. A *spawner* is asked over a socket
instead, and the loop goes on. One a process, started on first use.

Guarantees: a program that was started ends with the spawner where it asked for that (``PR_SET_PDEATHSIG``), and the spawner
with this process, however it ends; the program has exactly the descriptors that it was given, under the same numbers; it is
watched by a descriptor (pidfd), never by a number that another process may get.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from orchestrator.api import RetryableError

ASK_LIMIT = 20.0  # seconds that the spawner may take to answer
BUSY = 0.01  # seconds between two tries while it has no room for another request
_MOST = 240  # descriptors of one program; the kernel passes 253 at once


async def readable(descriptor: int) -> None:
    """Until it can be read, or the process that it stands for has ended. One waiter a descriptor: a loop has one reader."""
    loop, ready = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(descriptor, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(descriptor)


class Spawned:
    """A program that was started. ``pid``: for looking at it; it is ended and awaited by its descriptor."""

    def __init__(self, pid: int, descriptor: int) -> None:
        self.pid = pid
        self.ended = descriptor < 0
        self._descriptor = descriptor

    async def wait(self) -> None:
        """Until it has ended."""
        if self.ended:
            return
        other = os.dup(self._descriptor)  # each waiter its own
        try:
            await readable(other)
            self.ended = True
        finally:
            os.close(other)

    def kill(self) -> None:
        """End it, if it has not ended."""
        if not self.ended:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._descriptor, signal.SIGKILL)

    def close(self) -> None:
        """The descriptor is not needed any more. Idempotent."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor, self.ended = -1, True


class _Spawner:
    """The spawner of this process."""

    def __init__(self) -> None:
        self.owner = os.getpid()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-B", str(Path(__file__).with_name("spawn.py")), str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                cwd="/",
            )
        self._socket.setblocking(False)

    @property
    def alive(self) -> bool:
        """Whether it can be asked."""
        return self.owner == os.getpid() and self._process.poll() is None

    async def ask(self, program: Mapping[str, object], descriptors: Sequence[int]) -> None:
        """Send a request; the last of the descriptors is the one to answer on. Raises OSError."""
        text = json.dumps(program).encode()
        while True:
            try:
                socket.send_fds(self._socket, [text], descriptors)
                return
            except BlockingIOError:  # it has many to start
                await asyncio.sleep(BUSY)


_lock = threading.Lock()
_spawner: _Spawner | None = None


def _present() -> _Spawner:
    global _spawner
    with _lock:
        if _spawner is None or not _spawner.alive:
            _spawner = _Spawner()
        return _spawner


async def spawn(
    command: Sequence[str],
    *,
    stdin: int,
    stdout: int,
    stderr: int,
    passed: Sequence[int],
    environment: Mapping[str, str],
) -> Spawned:
    """Start ``command`` (its first word a path) in ``/``, with these descriptors as its standard ones, and ``passed`` under
    their own numbers. Raises RetryableError when it cannot be started."""
    if len(passed) > _MOST:
        raise RetryableError(f"{len(passed)} descriptors are too many for one program: at most {_MOST}")
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        ours.setblocking(False)
        request = {"command": list(command), "environment": dict(environment), "numbers": [0, 1, 2, *passed]}
        try:
            await _present().ask(request, [stdin, stdout, stderr, *passed, theirs.fileno()])
        except OSError as error:
            raise RetryableError(f"the spawner cannot be asked: {error}") from error
        theirs.close()
        try:
            async with asyncio.timeout(ASK_LIMIT):
                await readable(ours.fileno())
        except TimeoutError as error:
            raise RetryableError(f"the spawner did not answer for {ASK_LIMIT:g} s") from error
        text, descriptors, _, _ = socket.recv_fds(ours, 1 << 12, 1)
    if not text:
        raise RetryableError("the spawner died")
    for descriptor in descriptors:
        fcntl.fcntl(descriptor, fcntl.F_SETFD, fcntl.FD_CLOEXEC)
    try:
        return Spawned(read_answer(text), descriptors[0] if descriptors else -1)
    except RetryableError as error:
        for descriptor in descriptors:
            os.close(descriptor)
        raise RetryableError(f"{command[0]} cannot be started: {error}") from error


def read_answer(text: bytes) -> int:
    """The process id in what the spawner says. Raises RetryableError, also with what it says went wrong."""
    try:
        answer = json.loads(text)
        if "error" not in answer and type(answer["pid"]) is int and 0 < answer["pid"] < 1 << 31:
            return int(answer["pid"])
        why = str(answer["error"])
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise RetryableError(f"the spawner's answer cannot be read: {text!r:.100}") from error
    raise RetryableError(why)
