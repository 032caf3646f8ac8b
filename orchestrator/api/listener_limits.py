"""Limits of everything that listens for HTTP: one implementation, whatever application answers.

Guarantees of an :class:`HttpListener`: never more than ``connections`` at once, ``per_peer`` of them from one address; where
there is no room, the connection that has been longest without a request makes some, so that who holds connections open keeps
nobody out; a head that is not whole after ``header_seconds``, or has over ``header_bytes``, ends its connection, as does
``idle_seconds`` without a request, or with an answer that is not fetched; a body is read by :func:`read_body` only: at most so
many bytes, within ``body_seconds``, never compressed. The limit of open files is raised before anything listens.

Standard library only: the application's server (aiohttp's) is wrapped at the border of asyncio.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import socket
import ssl as ssl_module
import sys
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from math import inf
from typing import Any, cast

OPEN_FILES = 65_536  # what the soft limit is raised to, as far as the hard one allows
HANDSHAKE_SECONDS = 10.0  # of TLS
SERVER_OPTIONS: dict[str, Any] = {
    "lingering_time": 1.0,
    "auto_decompress": False,
    "read_bufsize": 1 << 16,
}  # of aiohttp's runner
_HEAD_ENDS = b"\r\n\r\n"
_REFUSAL = b"HTTP/1.1 431 Request Header Fields Too Large\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"


@dataclass(frozen=True, slots=True)
class ListenerLimits:
    """See the module."""

    connections: int = 256
    per_peer: int = 256
    body_bytes: int = 1 << 20
    header_bytes: int = 16 << 10
    header_seconds: float = 10.0
    body_seconds: float = 30.0
    idle_seconds: float = 60.0


# Who listens, with what: docs/security.md shows this table, tests/house/test_listeners.py attacks each row.
LISTENERS: dict[str, ListenerLimits] = {
    "agent endpoint": ListenerLimits(connections=4096, per_peer=1024, body_bytes=8 << 20),
    "function host": ListenerLimits(connections=1024, per_peer=1024),
    "judge": ListenerLimits(connections=1024, per_peer=1024, body_bytes=8 << 20),
    "live page": ListenerLimits(connections=128, per_peer=64, body_bytes=0),
    # JSON lines, not HTTP: the header is the line with the token.
    "environment worker": ListenerLimits(
        connections=8, per_peer=8, body_bytes=8 << 20, header_bytes=1 << 10, header_seconds=5.0, body_seconds=inf,
        idle_seconds=inf,
    ),
}  # fmt: skip


def table_of_listeners() -> str:
    """:data:`LISTENERS` in Markdown."""

    def seconds(value: float) -> str:
        return "none" if value == inf else f"{value:g} s"

    rows = [
        "| listener | connections | of one peer | header | header within | body | body within | idle |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, at in LISTENERS.items():
        body = f"{at.body_bytes >> 20} MiB" if at.body_bytes else "none"
        cells = [name, at.connections, at.per_peer, f"{at.header_bytes >> 10} KiB", seconds(at.header_seconds), body]
        cells += [seconds(at.body_seconds if at.body_bytes else inf), seconds(at.idle_seconds)]
        rows.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(rows)


def raise_open_files() -> int:
    """Raise this process's soft limit of open files; returns what it is then."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    return OPEN_FILES if soft == resource.RLIM_INFINITY else soft


class BodyRefused(Exception):
    """``status``: 408 (too slow), 413 (too large), 415 (compressed)."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


async def read_body(request: Any, limits: ListenerLimits) -> bytes:
    """The body of an aiohttp request, once its sender may send one. Raises BodyRefused."""
    too_large = BodyRefused(413, f"the body has over {limits.body_bytes} bytes")
    if request.headers.get("Content-Encoding", "identity").lower() != "identity":
        raise BodyRefused(415, "Content-Encoding: send the body as it is")
    if (request.content_length or 0) > limits.body_bytes:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(limits.body_seconds):
            while chunk := await request.content.readany():
                body += chunk
                if len(body) > limits.body_bytes:
                    raise too_large
    except TimeoutError:
        raise BodyRefused(408, f"the body was not whole after {limits.body_seconds:g} s") from None
    return bytes(body)


class EndOfInput(asyncio.Protocol):
    """For ``connect_read_pipe``: sets ``ended`` when the other end of the pipe is gone."""

    def __init__(self, ended: asyncio.Event) -> None:
        self._ended = ended

    def connection_lost(self, error: Exception | None) -> None:
        self._ended.set()


async def serve_until_told(
    runner: Any, listener: HttpListener, listen: Mapping[str, Any], die_with_stdin: bool
) -> None:
    """Set up aiohttp's ``runner``, listen (``listen``: arguments of :meth:`HttpListener.listen`), print ``{"port": P}``, and
    serve until SIGTERM, SIGINT or, if so asked, the end of standard input. Raises OSError."""
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ended.set)
    await runner.setup()
    try:
        server = await listener.listen(runner.server, **listen)
        print(json.dumps({"port": server.sockets[0].getsockname()[1]}), flush=True)
        if die_with_stdin:
            await loop.connect_read_pipe(lambda: EndOfInput(ended), sys.stdin)
        await ended.wait()
    finally:
        listener.close()
        await runner.cleanup()


class HttpListener:
    """The connections of one application, at one or more addresses. Give its application :meth:`middleware` first of all."""

    def __init__(self, limits: ListenerLimits) -> None:
        self.limits = limits
        self._most = min(limits.connections, raise_open_files() // 2)
        self._open: dict[asyncio.BaseTransport, _Connection] = {}  # the one that became idle first comes first
        self._of: dict[str, int] = {}  # how many, by peer
        self._servers: dict[asyncio.Server, str] = {}  # with the paths of Unix sockets
        self._sweep: asyncio.TimerHandle | None = None

    async def listen(
        self,
        serve: Callable[[], Any],
        host: str = "",
        port: int = 0,
        *,
        path: str = "",
        most: int = 0,
        context: ssl_module.SSLContext | None = None,
    ) -> asyncio.Server:
        """At a port, or a Unix socket that only its owner can connect to, who is one peer. ``serve`` makes a protocol for each
        connection; ``most`` of one peer there, 0: as the limits say. Raises OSError."""
        loop = asyncio.get_running_loop()

        def connection() -> _Connection:
            return _Connection(self, serve, path, most or self.limits.per_peer)

        if path:
            own = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                own.bind(path)
                os.chmod(path, 0o600)
                server = await loop.create_unix_server(connection, sock=own)
            except BaseException:
                own.close()
                raise
        else:
            shake = HANDSHAKE_SECONDS if context is not None else None
            server = await loop.create_server(connection, host, port, ssl=context, ssl_handshake_timeout=shake)
        self._servers[server] = path
        return server

    def end(self, server: asyncio.Server) -> None:
        """Nobody may connect there any more; who is connected to its Unix socket is hung up on."""
        server.close()
        if path := self._servers.pop(server):
            for each in [each for each in self._open.values() if each.peer == path]:
                each.end()

    def close(self) -> None:
        """Nobody may connect any more. Idempotent; the application ends the connections that there are."""
        for server in self._servers:
            server.close()
        self._servers.clear()
        if self._sweep is not None:
            self._sweep.cancel()
            self._sweep = None

    async def middleware(self, request: Any, handler: Callable[[Any], Awaitable[Any]]) -> Any:
        """aiohttp's: tells when a request has come whole, and when it has been answered."""
        connection = self._open.get(request.transport)
        if connection is None:
            return await handler(request)
        connection.begin()
        try:
            return await handler(request)
        finally:
            connection.finish(request.content.is_eof())

    middleware.__middleware_version__ = 1  # type: ignore[attr-defined]  # what aiohttp's decorator sets

    # -- connections -------------------------------------------------------------------------------------------------

    def admit(self, new: _Connection) -> bool:
        """Make room for it, if that can be done."""
        for peer, most in ((new.peer, new.most), ("", self._most)):
            held = self._of.get(peer, 0) if peer else len(self._open)
            if held >= most:
                idle = (each for each in self._open.values() if not each.working and peer in ("", each.peer))
                if (first := next(idle, None)) is None:
                    return False
                first.end()
        self._of[new.peer] = self._of.get(new.peer, 0) + 1
        self._open[new.transport] = new
        if self._sweep is None:
            self._sweep = asyncio.get_running_loop().call_later(self._pause, self._end_late)
        return True

    def moved(self, connection: _Connection) -> None:
        """It has become idle: the last to be ended."""
        if self._open.pop(connection.transport, None) is not None:
            self._open[connection.transport] = connection

    def forget(self, connection: _Connection) -> None:
        """It is gone. Idempotent."""
        if self._open.pop(connection.transport, None) is not None:
            self._of[connection.peer] -= 1
            if not self._of[connection.peer]:
                del self._of[connection.peer]

    @property
    def _pause(self) -> float:
        return min(1.0, self.limits.header_seconds / 4)

    def _end_late(self) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time()
        for each in [each for each in self._open.values() if each.deadline <= now]:
            each.end()
        self._sweep = loop.call_later(self._pause, self._end_late) if self._open else None


class _Connection(asyncio.Protocol):
    """Hands everything on to the application's protocol, and counts."""

    transport: asyncio.Transport

    def __init__(self, listener: HttpListener, serve: Callable[[], Any], path: str, most: int) -> None:
        self._listener, self._serve, self.most = listener, serve, most
        self._inner: Any = None
        self.peer = path
        self.working = 0  # requests that have come whole and are not answered
        self.deadline = asyncio.get_running_loop().time() + listener.limits.header_seconds
        self._head = 0  # bytes of the head so far; -1: it is whole
        self._last = b""

    def begin(self) -> None:
        """A request is here."""
        self.working += 1
        self.deadline = inf

    def finish(self, whole: bool) -> None:
        """It has been answered, or its answer is on its way; ``whole``: with all of its body read."""
        self.working -= 1
        if not self.working:
            limits = self._listener.limits
            self._head, self._last = 0 if whole else -1, b""  # what comes is the rest of a body, which nobody wants
            pause = limits.idle_seconds if whole else limits.header_seconds
            self.deadline = asyncio.get_running_loop().time() + pause
            self._listener.moved(self)

    def end(self) -> None:
        """At once."""
        self._listener.forget(self)
        self.transport.abort()

    # -- asyncio's ---------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        if not self.peer:
            self.peer = str((transport.get_extra_info("peername") or ("?",))[0])
        if self._listener.admit(self):
            self._inner = self._serve()
            self._inner.connection_made(transport)
        else:
            self.transport.abort()

    def data_received(self, data: bytes) -> None:
        if self._inner is None:
            return
        if not self.working and self._head >= 0 and not self._count_head(data):
            return
        self._inner.data_received(data)

    def _count_head(self, data: bytes) -> bool:
        """Whether the head is within its limit; else the connection ends."""
        limits = self._listener.limits
        if not self._head:
            self.deadline = min(self.deadline, asyncio.get_running_loop().time() + limits.header_seconds)
        seen = self._last + data
        end = seen.find(_HEAD_ENDS)
        self._head += len(data) if end < 0 else end + len(_HEAD_ENDS) - len(self._last)
        self._last = seen[-(len(_HEAD_ENDS) - 1) :]
        if self._head > limits.header_bytes:
            self.transport.write(_REFUSAL)
            self.transport.close()
            self._head, self.deadline = 0, 0.0
            return False
        if end >= 0:
            self._head = -1
        return True

    def eof_received(self) -> bool | None:
        return bool(self._inner.eof_received()) if self._inner is not None else None

    def connection_lost(self, error: Exception | None) -> None:
        self._listener.forget(self)
        if self._inner is not None:
            self._inner.connection_lost(error)

    def pause_writing(self) -> None:
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._inner.resume_writing()
