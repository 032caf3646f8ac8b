"""Runs programs in a sandbox, from the event loop.

Guarantees: a program either runs inside the whole sandbox or not at all; when ``run`` returns, raises or is cancelled, no
process of it is left; at most ``slots`` run at once, the others wait their turn; a limit that is reached is an outcome, not
an error. A sandbox that could not be started is a RetryableError, never an outcome: what the machine did is not the
program's fault. Nothing of a run stays behind: its files are in memory that goes with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Literal

from orchestrator.api import ConfigError, RetryableError
from orchestrator.child_process import to_its_end
from orchestrator.sandbox.cgroups import RunCgroups, inode_bytes, resident_bytes, socket_bytes
from orchestrator.sandbox.cgroups import find_hierarchies as find_hierarchies
from orchestrator.sandbox.command import (
    FIRST_ID,
    ID_RANGE,
    NOTHING_SHARED,
    SCRATCH,
    WORK,
    SandboxFile,
    SandboxTools,
    SharedPaths,
    command_line,
    find_tools,
    packed_variables,
)
from orchestrator.sandbox.limits import SandboxLimits, SandboxOutcome
from orchestrator.sandbox.seccomp import program as system_call_filter
from orchestrator.sandbox.spawner import Spawned, readable, spawn

MEMORY_LOOK = (
    0.05  # seconds between two looks at a sandbox's memory: its sockets', and all of it where no cgroup limits it
)
STATUS_LOOK = 0.005  # seconds between two looks at whether bubblewrap has started its first process
REAP_LIMIT = 2.0  # seconds that bubblewrap may take to end by itself when what it started was killed
END_LIMIT = 10.0  # seconds that killed processes may take to be gone
MAX_FILES = 200  # of a run: each is a descriptor

CPU_EXIT_CODE = 128 + signal.SIGXCPU
_SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL


class Sandbox:
    """A place for model-written code. ``limits`` hold for every run that names no others.

    Raises ConfigError when this machine has no bubblewrap; :meth:`check` says whether it works.
    """

    def __init__(self, limits: SandboxLimits | None = None, *, slots: int = 4) -> None:
        self.limits = limits or SandboxLimits()
        self._tools: SandboxTools = find_tools()
        self._hierarchies = find_hierarchies()
        self._slots = asyncio.Semaphore(slots)
        self._free = list(range(slots))

    @property
    def interpreter(self) -> str:
        """The path of Python inside."""
        return self._tools.python

    @property
    def uses_cgroups(self) -> tuple[str, ...]:
        """The controllers that limit a run as a whole."""
        return tuple(name for hierarchy in self._hierarchies for name in hierarchy.controllers)

    async def check(self) -> None:
        """Run a program that does nothing. Raises ConfigError with the machine's own words when that fails."""
        try:
            outcome = await self.run(["/bin/true"])
        except RetryableError as error:
            fix = f"bubblewrap is here but does not start a sandbox: {error}. Are user namespaces allowed?"
            raise ConfigError("sandbox", self._tools.bwrap, fix) from error
        if not outcome.ok:
            raise ConfigError("sandbox", self._tools.bwrap, f"a sandbox starts but does not work: {outcome}")

    async def python(
        self,
        source: str,
        *,
        files: Mapping[str, bytes] | None = None,
        read_only: Mapping[str, bytes] | None = None,
        stdin: bytes = b"",
        limits: SandboxLimits | None = None,
    ) -> SandboxOutcome:
        """Run ``source`` as ``main.py`` (standard library only)."""
        return await self.run(
            [self.interpreter, "-I", "-S", "-B", f"{WORK}/main.py"],
            files=files,
            read_only={**(read_only or {}), "main.py": source.encode("utf-8", "surrogatepass")},
            stdin=stdin,
            limits=limits,
        )

    async def run(
        self,
        program: Sequence[str],
        *,
        files: Mapping[str, bytes] | None = None,
        read_only: Mapping[str, bytes] | None = None,
        stdin: bytes = b"",
        limits: SandboxLimits | None = None,
        environment: Mapping[str, str] | None = None,
        shared: SharedPaths = NOTHING_SHARED,
    ) -> SandboxOutcome:
        """Run a program (its path and arguments, seen from inside) in a fresh sandbox.

        ``files`` can be changed by it, ``read_only`` cannot; their names are paths inside the working folder. ``shared``: what
        of the host it sees beside that. Raises ValueError for a name that leads out of the working folder, RetryableError when
        the sandbox did not start.
        """
        limits = limits or self.limits
        contents = [(_inside(name), data, True) for name, data in (files or {}).items()]
        contents += [(_inside(name), data, False) for name, data in (read_only or {}).items()]
        if len(contents) > MAX_FILES:
            raise ValueError(f"{len(contents)} files: a run takes at most {MAX_FILES}")
        async with self._slots:
            slot = self._free.pop()
            try:
                return await self._run(program, contents, stdin, limits, environment or {}, slot, shared)
            finally:
                self._free.append(slot)

    async def _run(
        self,
        program: Sequence[str],
        contents: Sequence[tuple[str, bytes, bool]],
        stdin: bytes,
        limits: SandboxLimits,
        environment: Mapping[str, str],
        slot: int,
        shared: SharedPaths,
    ) -> SandboxOutcome:
        group = RunCgroups(self._hierarchies, limits) if self._hierarchies else None
        try:
            with contextlib.ExitStack() as held:
                placed = [SandboxFile(path, held.enter_context(_memory(data)), free) for path, data, free in contents]
                rules = system_call_filter()
                filter_fd = held.enter_context(_memory(rules)) if rules is not None else None
                variables = held.enter_context(_memory(packed_variables(environment)))
                status = held.enter_context(_Status())
                user = FIRST_ID + (os.getpid() + slot) % ID_RANGE if os.geteuid() == 0 else None
                if user is not None:
                    for _, path in shared.sockets:  # 0600 in a folder of 0700: nobody else's
                        os.chown(path, user, user)
                        os.chown(os.path.dirname(path), user, user)
                command = command_line(
                    self._tools,
                    limits,
                    program,
                    user=user,
                    files=placed,
                    variables=variables,
                    cgroups=group.procs if group is not None else (),
                    seccomp=filter_fd,
                    status=status.write_end,
                    shared=shared,
                )
                passed = [status.write_end, variables, *(file.fd for file in placed)]
                if filter_fd is not None:
                    passed.append(filter_fd)
                given = held.enter_context(_memory(stdin, sealed=True))
                output, errors = held.enter_context(_Output()), held.enter_context(_Output())
                # Not cut short: what was started without our knowledge would be nobody's.
                process = await to_its_end(
                    spawn(
                        command,
                        stdin=given,
                        stdout=output.write_end,
                        stderr=errors.write_end,
                        passed=passed,
                        environment={"PATH": os.defpath},
                    )
                )
                held.callback(process.close)
                run = _Run(process, status, limits, watched=group is None or not group.limits_memory)
                return await run.finish(output, errors, group)
        finally:
            if group is not None:
                await to_its_end(group.remove())


def diagnose_sandbox() -> tuple[Literal["ok", "warn"], str, str]:
    """Whether this machine can run model-written code, for ``rl-coserve doctor``:
    (status, what was found, what to do). A machine without a sandbox is a warning: most tasks do without."""
    try:
        sandbox = Sandbox(slots=1)
        asyncio.run(sandbox.check())
    except ConfigError as error:
        return "warn", f"none: tasks with model-written code cannot run ({error.value})", error.fix
    groups = ", ".join(sandbox.uses_cgroups) or "none (memory is watched, processes are counted by user)"
    calls = (
        "system calls filtered" if system_call_filter() is not None else "system calls not filtered on this processor"
    )
    return "ok", f"bubblewrap works; {calls}; cgroups: {groups}; inside: {sandbox.interpreter}", ""


class _Run:
    """One program from its start to its end."""

    def __init__(self, process: Spawned, status: _Status, limits: SandboxLimits, watched: bool) -> None:
        self._process = process
        self._status = status
        self._limits = limits
        self._watched = watched
        self._output, self._errors = bytearray(), bytearray()

    async def finish(self, output: _Output, errors: _Output, group: RunCgroups | None) -> SandboxOutcome:
        """Wait for the end, or bring it about."""
        loop = asyncio.get_running_loop()
        started = loop.time()
        self._status.start_reading(loop)
        readers: list[asyncio.StreamReader] = []
        limit = ""
        try:
            async with asyncio.timeout(self._limits.wall_seconds):
                readers += [await output.reader(), await errors.reader()]
                limit = await self._until_end_or_limit(*readers)
        except TimeoutError:
            limit = "wall"
        finally:
            await to_its_end(self._gone(*readers))
        exit_code = self._status.exit_code
        if group is not None and group.out_of_memory() and exit_code != 0:
            limit = limit or "memory"
        if exit_code is None and not limit:
            raise RetryableError(f"the sandbox did not start: {self._errors.decode(errors='replace').strip()[-500:]}")
        if exit_code == CPU_EXIT_CODE:
            limit = limit or "cpu"
        return SandboxOutcome(
            exit_code=-1 if exit_code is None or limit in ("wall", "output") else exit_code,
            limit=limit,
            stdout=bytes(self._output),
            stderr=bytes(self._errors),
            seconds=loop.time() - started,
        )

    async def _until_end_or_limit(self, output: asyncio.StreamReader, errors: asyncio.StreamReader) -> str:
        """The limit that was reached, or "" when the program ended by itself."""
        limit = ""
        try:
            async with asyncio.TaskGroup() as tasks:
                work = [
                    tasks.create_task(self._read(output, self._output)),
                    tasks.create_task(self._read(errors, self._errors)),
                    tasks.create_task(self._process.wait()),
                ]
                watcher = tasks.create_task(self._watch_memory())
                await asyncio.wait(work)
                watcher.cancel()
        except* _LimitReached as reached:
            limit = str(reached.exceptions[0])
        return limit

    async def _read(self, stream: asyncio.StreamReader, into: bytearray) -> None:
        while chunk := await stream.read(1 << 16):
            room = self._limits.output_bytes - len(self._output) - len(self._errors)
            into += chunk[:room]
            if room < len(chunk):
                raise _LimitReached("output")

    async def _drop(self, stream: asyncio.StreamReader) -> None:
        """Read what nobody wants, to the end: an unread pipe is never closed."""
        while await stream.read(1 << 16):
            pass

    async def _watch_memory(self) -> None:
        while True:
            await asyncio.sleep(MEMORY_LOOK)
            held = socket_bytes(self._process.pid) + (resident_bytes(self._process.pid) if self._watched else 0)
            held += inode_bytes(self._status.first_pid, SCRATCH, self._limits.scratch_bytes)
            if held > self._limits.memory_bytes:
                raise _LimitReached("memory")

    async def _gone(self, *readers: asyncio.StreamReader) -> None:
        """Kill whatever still runs, and wait until it is gone. The kernel kills the sandbox with its first process."""
        ended = asyncio.ensure_future(self._process.wait())
        for _ in range(int(REAP_LIMIT / STATUS_LOOK)):
            # Bubblewrap alone is not killed while it has not said what it started: that might outlive it.
            if ended.done() or self._status.kill():
                await asyncio.wait([ended], timeout=REAP_LIMIT)  # it reaps what was killed, and ends
                break
            await asyncio.wait([ended], timeout=STATUS_LOOK)
        self._process.kill()
        await ended
        await asyncio.gather(*(self._drop(reader) for reader in readers))
        try:
            async with asyncio.timeout(END_LIMIT):
                await self._status.wait_gone()
        except TimeoutError:
            raise RetryableError(f"a killed sandbox is still there after {END_LIMIT:g} s") from None


class _Output:
    """A pipe that a program writes into."""

    def __init__(self) -> None:
        self.write_end = self._read_end = -1
        self._transport: asyncio.ReadTransport | None = None

    def __enter__(self) -> _Output:
        self._read_end, self.write_end = os.pipe2(os.O_CLOEXEC)
        return self

    def __exit__(self, *_: object) -> None:
        if self._transport is not None:
            self._transport.close()
        for fd in (self._read_end, self.write_end):
            if fd >= 0:
                os.close(fd)

    async def reader(self) -> asyncio.StreamReader:
        """What it reads; the other process has the write end now."""
        os.close(self.write_end)
        self.write_end = -1
        found = asyncio.StreamReader()
        pipe, self._read_end = os.fdopen(self._read_end, "rb", buffering=0), -1
        loop = asyncio.get_running_loop()
        self._transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(found), pipe)
        return found


class _LimitReached(Exception):
    pass


class _Status:
    """What bubblewrap reports: the id of the sandbox's first process (whose end is the end of all), and the exit code."""

    def __init__(self) -> None:
        self.exit_code: int | None = None
        self.first_pid = 0  # for looking at it
        self.write_end = -1
        self._read_end = -1
        self._first = -1  # a descriptor of the first process: unlike its id, never another's
        self._text = b""
        self._loop: asyncio.AbstractEventLoop | None = None

    def __enter__(self) -> _Status:
        self._read_end, self.write_end = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        os.set_blocking(self.write_end, True)
        return self

    def __exit__(self, *_: object) -> None:
        if self._loop is not None:
            self._loop.remove_reader(self._read_end)
        for fd in (self._read_end, self.write_end, self._first):
            if fd >= 0:
                os.close(fd)

    def start_reading(self, loop: asyncio.AbstractEventLoop) -> None:
        """The other process has the write end now."""
        os.close(self.write_end)
        self.write_end = -1
        self._loop = loop
        loop.add_reader(self._read_end, self._receive)

    def kill(self) -> bool:
        """Kill the first process, and so all of them; False when there is none yet."""
        self._receive()
        if self._first < 0:
            return False
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._first, signal.SIGKILL)
        return True

    async def wait_gone(self) -> None:
        """Wait until the first process has ended, which the kernel lets it do as the last one."""
        self._receive()
        if self._first >= 0:
            await readable(self._first)

    def _receive(self) -> None:
        while True:
            try:
                data = os.read(self._read_end, 1 << 12)
            except BlockingIOError:
                return
            if not data:
                if self._loop is not None:
                    self._loop.remove_reader(self._read_end)
                return
            self._text += data
            *lines, self._text = self._text.split(b"\n")
            for line in lines:
                self._record(json.loads(line))

    def _record(self, record: Mapping[str, object]) -> None:
        first, code = record.get("child-pid"), record.get("exit-code")
        if isinstance(first, int):
            with contextlib.suppress(ProcessLookupError):  # it has ended already
                self._first = os.pidfd_open(first)
                self.first_pid = first
        if isinstance(code, int):
            self.exit_code = code


@contextmanager
def _memory(data: bytes, *, sealed: bool = False) -> Iterator[int]:
    """A descriptor to read ``data`` from; ``sealed``: nobody can change it any more."""
    fd = os.memfd_create("sandbox-file", os.MFD_CLOEXEC | (os.MFD_ALLOW_SEALING if sealed else 0))
    try:
        with open(fd, "wb", closefd=False) as file:
            file.write(data)
        if sealed:
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        os.lseek(fd, 0, os.SEEK_SET)
        yield fd
    finally:
        os.close(fd)


def check_name(name: str) -> None:
    """Raises ValueError when this is not the name of a file in the working folder, or leads out of it."""
    if not name or "\0" in name or any(part in ("", ".", "..") for part in name.split("/")):
        raise ValueError(f"not the name of a file in the working folder: {name!r}")


def _inside(name: str) -> str:
    """The path of a file in the working folder."""
    check_name(name)
    return f"{WORK}/{name}"
