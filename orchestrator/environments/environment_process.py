"""The process of one environment: answers the calls of :mod:`orchestrator.environments.environment_wire`, one after the other.

    python -m orchestrator.environments.environment_process                                       over standard input and output
    python -m orchestrator.environments.environment_process --listen 0.0.0.0:8011 --token-digest HEX   over TCP, for a pod

Guarantees: the pipe carries nothing but replies, whatever the environment prints; what the environment raises, ``exit``
included, is an answer; it is started once; over TCP nobody without the token of that digest is heard, and the process itself does
not have it; a request that is sent again (its answer got lost with the connection) is answered again and not
carried out twice. It ends, with all it started, when the pipe closes; over TCP when nobody with the token has been
connected for ``--orphan-seconds``, and when one call takes that much longer than the caller waits for it, even in a busy
loop. Memory and processor limits are the kernel's (setrlimit(2)).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import importlib
import math
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from typing import Any

from orchestrator.process_watcher import fork_under_watch, take_pipes


class EnvironmentService:
    """One environment and the calls into it."""

    def __init__(self, orphan_seconds: float = 0.0) -> None:
        self._number: object = None
        self._task: asyncio.Task[bytes] | None = None
        self._started = False
        self._inner: Any = None  # a Renewable, once started
        self._tools: Any = None  # a ToolClient, where there are tools
        self._orphan_seconds = orphan_seconds
        self._call_seconds = 0.0
        self._cpu_seconds = 0

    async def answer_line(self, line: bytes) -> bytes:
        """The reply to one request, carried out once however often it is sent."""
        from orchestrator.api import TrajectoryError
        from orchestrator.environments import environment_wire

        try:
            message = environment_wire.decode_line(line)
        except TrajectoryError as error:
            return environment_wire.encode_line(environment_wire.failure_reply(None, error))
        number = message.get("id")
        if self._task is None or number != self._number:
            if self._task is not None and not self._task.done():
                busy = TrajectoryError("environment_protocol", f"request {self._number} is still at work")
                return environment_wire.encode_line(environment_wire.failure_reply(number, busy))
            self._number, self._task = number, asyncio.ensure_future(self._reply(message))
        return await asyncio.shield(self._task)

    async def _reply(self, message: dict[str, Any]) -> bytes:
        from orchestrator.api import TrajectoryError
        from orchestrator.environments import environment_wire

        number = message.get("id")
        self._arm()
        try:
            result = await self._call(message)
            line = environment_wire.encode_line({"id": number, "result": result, **self._tool_calls()})
            if len(line) > environment_wire.MAX_LINE:
                raise TrajectoryError(
                    "environment_output", f"an answer of {len(line)} B, more than {environment_wire.MAX_LINE}"
                )
        except environment_wire.THIRD_PARTY as error:
            line = environment_wire.encode_line({**environment_wire.failure_reply(number, error), **self._tool_calls()})
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        return line

    async def _call(self, message: Mapping[str, Any]) -> dict[str, Any]:
        from orchestrator.api import Prompt, TrajectoryError
        from orchestrator.environments import environment_wire

        match message.get("call"):
            case "start":
                return await self._start(message)
            case "ping" if self._inner is not None:
                await self._inner.ping()
                return {}
            case "recycle" if self._inner is not None:
                await self._inner.recycle()
                return {"version": self._inner.version}
            case "reset" if self._inner is not None:
                answer = await self._inner.environment.reset(Prompt(**message["prompt"]))
                return {"observation": environment_wire.observation_of(answer, "reset").token_ids}
            case "step" if self._inner is not None:
                answer = await self._inner.environment.step(tuple(message["action"]))
                return environment_wire.step_fields(environment_wire.step_of(answer))
            case other:
                started = "" if self._inner is not None else " before start"
                raise TrajectoryError("environment_protocol", f"no such call: {other!r:.40}{started}")

    async def _start(self, message: Mapping[str, Any]) -> dict[str, Any]:
        import orchestrator
        from orchestrator.api import TrajectoryError
        from orchestrator.environments import environment_wire
        from orchestrator.environments.environment_session import RenewableEnvironment

        if self._started:
            raise TrajectoryError("environment_protocol", "it was started already")
        self._started = True  # though it may fail: what is imported here is said once
        limits = message.get("limits") or {}
        memory = int(limits.get("memory_mb", 0)) << 20
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if memory:
            resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
        self._cpu_seconds = int(limits.get("cpu_seconds", 0))
        self._call_seconds = float(limits.get("call_seconds", 0.0))
        if message.get("tools"):
            from orchestrator.environments.tool_functions import ToolClient, ToolSettings

            self._tools = ToolClient(ToolSettings(**message["tools"]))
        maker = maker_of(str(message["target"]), dict(message.get("arguments") or {}), self._tools)
        self._inner = RenewableEnvironment(maker, str(message.get("setup") or ""))
        await self._inner.prepare()
        return {
            "protocol": environment_wire.PROTOCOL,
            "distribution": orchestrator.__version__,
            "version": self._inner.version,
        }

    def _tool_calls(self) -> dict[str, Any]:
        """What a reply says of the calls of tools so far."""
        return {} if self._tools is None else {"tools": self._tools.stats()}

    def _arm(self) -> None:
        """Limits of the next call: signals without a handler, which end the process whatever it does."""
        if self._cpu_seconds:
            used = resource.getrusage(resource.RUSAGE_SELF)
            soft = math.ceil(used.ru_utime + used.ru_stime) + self._cpu_seconds
            resource.setrlimit(resource.RLIMIT_CPU, (soft, resource.getrlimit(resource.RLIMIT_CPU)[1]))
        if self._orphan_seconds and self._call_seconds:
            signal.setitimer(signal.ITIMER_REAL, self._call_seconds + self._orphan_seconds)


def maker_of(target: str, arguments: dict[str, Any], tools: Any = None) -> Any:
    """What makes environments: the named object called with ``arguments`` is a task, or is itself an environment. One of the
    two is given the tools."""
    module, _, name = target.partition(":")
    make = functools.partial(getattr(importlib.import_module(module), name), **arguments)
    made = make()
    if not callable(getattr(made, "environment", None)):
        return _Maker(make, tools)
    if tools is not None:
        made.use_tools(tools)
    return made


class _Maker:
    def __init__(self, make: Any, tools: Any) -> None:
        self._make = make
        self._tools = tools

    def environment(self) -> Any:
        made = self._make()
        if self._tools is not None:
            made.use_tools(self._tools)
        return made


def task_of_config(config: dict[str, Any]) -> Any:
    """The task that a config names: the target for a task that names none of its own."""
    from orchestrator.config import parse_config
    from orchestrator.runtime.preflight import make_task

    return make_task(parse_config(config))


async def serve_pipes(requests_fd: int, replies_fd: int) -> None:
    """Until the other end closes the pipe."""
    from orchestrator.environments import environment_wire

    reader = asyncio.StreamReader(limit=environment_wire.MAX_LINE)
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(requests_fd, "rb"))
    replies = os.fdopen(replies_fd, "wb")
    service = EnvironmentService()
    while line := await reader.readline():
        replies.write(await service.answer_line(line))
        replies.flush()


async def serve_tcp(
    host: str, port: int, digest: str, orphan_seconds: float, ready: Callable[[int], None] | None = None
) -> None:
    """Until nobody has been connected for ``orphan_seconds``. One connection at a time: a newer one is the same caller's.
    ``digest``: of its token. ``ready`` is told the port."""
    from orchestrator.api import bearer
    from orchestrator.api.listener_limits import LISTENERS, raise_open_files
    from orchestrator.environments import environment_wire

    service, limits = EnvironmentService(orphan_seconds), LISTENERS["environment worker"]
    current: asyncio.StreamWriter | None = None
    waiting: dict[asyncio.StreamWriter, None] = {}  # without a token so far, the oldest first
    left = asyncio.Event()
    raise_open_files()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal current
        try:
            if len(waiting) >= limits.connections:
                oldest = next(iter(waiting))
                oldest.transport.abort()
                del waiting[oldest]
            waiting[writer] = None
            _keep_alive(writer, orphan_seconds)
            async with asyncio.timeout(limits.header_seconds):
                given = (await reader.readline()).strip()
            waiting.pop(writer, None)
            if not bearer.matches(given.decode("utf-8", "surrogateescape"), digest):
                return
            if current is not None:
                current.close()
            current = writer
            writer.write(b"{}\n")
            while line := await environment_wire.read_line(reader):
                writer.write(await service.answer_line(line))
                await writer.drain()
        except (OSError, ValueError, TimeoutError):
            return  # of this connection; the caller may come back
        finally:
            waiting.pop(writer, None)
            writer.close()
            if current is writer:
                current = None
                left.set()

    # Of who shows no token no more is kept than this, twice.
    async with await asyncio.start_server(connected, host, port, limit=limits.header_bytes) as server:
        if ready is not None:
            ready(server.sockets[0].getsockname()[1])
        while True:
            left.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(orphan_seconds):
                    await left.wait()
                continue
            if current is None:
                return


def _keep_alive(writer: asyncio.StreamWriter, seconds: float) -> None:
    """A caller whose machine is gone without a word is noticed after about ``seconds``."""
    connection: socket.socket = writer.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, max(1, int(seconds / 2)))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, max(1, int(seconds / 6)))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)


def main(arguments: list[str]) -> int:
    """0: the caller is gone. 2: wrong arguments, or no digest."""
    parser = argparse.ArgumentParser(
        prog="python -m orchestrator.environments.environment_process", description=__doc__
    )
    parser.add_argument("--listen", metavar="HOST:PORT", default="")
    parser.add_argument("--token-digest", default="", help="SHA-256 (hex) of the token of a TCP caller")
    parser.add_argument("--orphan-seconds", type=float, default=120.0)
    parser.add_argument("--owner", default="", help="whose it is, for people who read a list of processes")
    options = parser.parse_args(arguments)
    if options.listen and len(options.token_digest) != 64:
        print(
            f"--token-digest {options.token_digest!r}: 64 hex digits, of the token that a caller must show",
            file=sys.stderr,
        )
        return 2
    fork_under_watch()
    if options.listen:
        host, _, port = options.listen.rpartition(":")
        asyncio.run(serve_tcp(host, int(port), options.token_digest, options.orphan_seconds))
    else:
        asyncio.run(serve_pipes(*take_pipes()))
    return 0


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(code)  # what the environment registered for the end of its process does not hold it up
