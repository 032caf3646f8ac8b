"""The OpenAI-compatible endpoint of the rollout side: one server, a key for each trajectory.

    POST /v1/chat/completions, POST /v1/completions, GET /v1/models
    Authorization: Bearer KEY, or the key in the path: /k/KEY/v1/...

Guarantees: it listens on loopback, and on a Unix socket for each sandbox that its owner alone can connect to, and nowhere else;
connections, heads and bodies have the limits of :mod:`orchestrator.api.listener_limits`, each socket its own, so that no agent
keeps another out; a request without a key of a trajectory that is under way learns nothing, and one too many of a trajectory is
refused, both before its body is read; keys are compared in constant time; a large body is read in another process; every error
has OpenAI's form; when a client goes away, what it asked for is aborted in the worker. No key is logged.

An answer is generated whole before its first byte: a stream has OpenAI's form, and brings nothing sooner.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import secrets
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from aiohttp import web

from orchestrator.agents.agent_session import AgentSession
from orchestrator.agents.conversation import Answer
from orchestrator.agents.openai_protocol import (
    MAX_NAME,
    ApiError,
    ChatAsked,
    PlainAsked,
    chat_body,
    chat_chunks,
    chat_request,
    plain_body,
    plain_chunks,
    plain_request,
    read_by_another,
)
from orchestrator.api import RetryableError, RunError, bearer, jsontext
from orchestrator.api.listener_limits import LISTENERS, SERVER_OPTIONS, BodyRefused, HttpListener, read_body
from orchestrator.rewards.process_pool import FunctionError, FunctionPool, Throttled

LIMITS = LISTENERS["agent endpoint"]
OF_ONE_AGENT = 32  # connections at the socket of a sandbox, at least
READ_HERE = 1 << 17  # bytes of a body that take some milliseconds at most; a larger one is read by another process
READ_SECONDS = 10.0  # that may take
_WRITTEN = 1 << 13  # characters of an answer, at least
MODEL = "policy"  # what /v1/models lists; any other name is taken too
SOCKET = "gateway.sock"
SERVED = "there are /v1/chat/completions, /v1/completions and /v1/models: a client of /v1/responses can use the first"
_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.ENOSPC)


@dataclass
class AgentAccess:
    """What the agent of one trajectory is told. ``handlers``: its requests that are open."""

    session: AgentSession
    key: str
    url: str
    socket: str
    handlers: set[asyncio.Task[Any]] = field(default_factory=set)


class AgentGateway:
    """Open while somebody is inside: the first :meth:`open_session` starts it, the last one's end closes it. ``port``
    0: a free one.
    """

    def __init__(self, port: int = 0, body_bytes: int = LIMITS.body_bytes) -> None:
        self._wanted, self._port = port, 0
        self.limits = replace(LIMITS, body_bytes=body_bytes)
        self._doors: dict[str, AgentAccess] = {}
        self._opened = 0
        self._users = 0
        self._changing, self._writing = asyncio.Lock(), asyncio.Lock()
        self._runner: web.AppRunner | None = None
        self._listener: HttpListener | None = None
        self._readers: FunctionPool | None = None

    @asynccontextmanager
    async def open_session(self, session: AgentSession) -> AsyncIterator[AgentAccess]:
        """A key for this session, and a socket of its own in a folder of its own, good until the end of the block; then its open
        requests are cancelled. Raises RunError when the port is taken, RetryableError when this machine has no room."""
        async with self._changing:
            if self._runner is None:
                await self._start()
            self._users += 1
        try:
            async with self._opened_door(session) as door:
                yield door
        finally:
            async with self._changing:
                self._users -= 1
                if self._users == 0:
                    await self._stop()

    @asynccontextmanager
    async def _opened_door(self, session: AgentSession) -> AsyncIterator[AgentAccess]:
        assert self._listener is not None
        assert self._runner is not None
        assert self._runner.server is not None
        listener = self._listener
        self._opened += 1
        name = str(self._opened)
        key = f"rl-{name}-{secrets.token_urlsafe(32)}"
        try:
            folder = tempfile.mkdtemp(prefix="rl-coserve-agent-")  # mode 0700; its sandbox is given it
        except OSError as error:
            raise RetryableError(f"the endpoint of the agents cannot be opened: {error}") from error
        door = AgentAccess(session, key, f"http://127.0.0.1:{self._port}/v1", f"{folder}/{SOCKET}")
        server: asyncio.Server | None = None
        try:
            try:
                most = most_connections(session.bounds.concurrent)
                server = await listener.listen(self._runner.server, path=door.socket, most=most)
            except OSError as error:
                raise RetryableError(f"the endpoint of the agents cannot be opened: {error}") from error
            self._doors[name] = door
            yield door
        finally:
            self._doors.pop(name, None)
            for handler in door.handlers:
                handler.cancel()
            if server is not None:
                listener.end(server)
            shutil.rmtree(folder, ignore_errors=True)

    async def _start(self) -> None:
        listener = HttpListener(self.limits)
        app = web.Application(middlewares=[listener.middleware, _in_their_form])
        for head in ("/v1", "/k/{key}/v1"):
            app.router.add_post(f"{head}/chat/completions", partial(self._serve, chat=True))
            app.router.add_post(f"{head}/completions", partial(self._serve, chat=False))
            app.router.add_get(f"{head}/models", self._models)
            app.router.add_get(f"{head}/models/{{name}}", self._model)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.5, handler_cancellation=True, **SERVER_OPTIONS)
        try:
            await runner.setup()
            assert runner.server is not None
            server = await listener.listen(runner.server, "127.0.0.1", self._wanted)
        except BaseException as error:
            listener.close()
            await runner.cleanup()
            if not isinstance(error, OSError):
                raise
            told = f"the endpoint of the agents (task.agent.port = {self._wanted}) cannot be opened: {error}"
            if error.errno in _NO_ROOM:
                raise RetryableError(told) from error
            raise RunError(told) from error
        self._runner, self._listener = runner, listener
        self._port = server.sockets[0].getsockname()[1]
        self._readers = FunctionPool(
            "orchestrator.agents.openai_protocol:read_apart",
            concurrency=2,
            timeout=READ_SECONDS,
            idle_seconds=60.0,
            most_bytes=8 * self.limits.body_bytes,
        )

    async def _stop(self) -> None:
        runner, self._runner = self._runner, None
        listener, self._listener = self._listener, None
        readers, self._readers = self._readers, None
        if listener is not None:
            listener.close()
        if runner is not None:
            await runner.cleanup()
        if readers is not None:
            await readers.close()

    # -- requests ----------------------------------------------------------------------------------------------------

    def _door(self, request: web.Request) -> AgentAccess:
        """Whose request this is. Raises ApiError."""
        key = request.match_info.get("key") or bearer.token_of(request.headers.get("Authorization"))
        parts = key.split("-", 2)
        door = self._doors.get(parts[1]) if len(parts) == 3 else None
        known = door.key if door is not None else f"rl-0-{'x' * 43}"
        if not bearer.matches(key, bearer.digest_of(known)) or door is None:
            raise ApiError(
                401,
                "Incorrect API key provided: it is not the key of a running trajectory",
                code="invalid_api_key",
            )
        return door

    async def _models(self, request: web.Request) -> web.StreamResponse:
        self._door(request)
        return web.json_response({"object": "list", "data": [_model(MODEL)]})

    async def _model(self, request: web.Request) -> web.StreamResponse:
        self._door(request)
        return web.json_response(_model(request.match_info["name"]))

    async def _serve(self, request: web.Request, *, chat: bool) -> web.StreamResponse:
        door, this = self._door(request), asyncio.current_task()
        assert this is not None
        session, answers = door.session, list[Answer]()
        if len(door.handlers) >= session.bounds.concurrent:  # before the body is read
            text = f"{len(door.handlers)} requests are open: at most {session.bounds.concurrent} at once"
            raise ApiError(429, text, kind="rate_limit_exceeded", code="too_many_requests")
        door.handlers.add(this)
        try:
            wanted = await self._read(await self._body(request), chat=chat)
            answered, answers = await session.answer(wanted)
            told = (wanted.asked, answered, int(time.time()))  # a time for clients; nothing here goes by it
            if wanted.asked.stream:
                parts = _events((chat_chunks if chat else plain_chunks)(*told))
                return await self._written(request, parts, "text/event-stream")
            parts = jsontext.pieces((chat_body if chat else plain_body)(*told))
            return await self._written(request, parts, "application/json; charset=utf-8")
        except ApiError as error:
            session.note_refusal(error)
            raise
        except (asyncio.CancelledError, ConnectionError):
            session.conversation.withdraw(answers)
            raise
        finally:
            door.handlers.discard(this)

    async def _written(self, request: web.Request, text: Iterator[str], kind: str) -> web.StreamResponse:
        """Made as it is written, a part at a time, of all agents' answers in turn: with log-probs one may have 40 MB. The last
        part and the end are one: who reads a stream hangs up at its last line, and has heard it."""
        response = web.StreamResponse(headers={"Content-Type": kind, "Cache-Control": "no-cache"})
        await response.prepare(request)
        parts, last = _gathered(text), b""
        while True:
            async with self._writing:
                part = next(parts, None)
                await asyncio.sleep(0)
            if part is None:
                break
            if last:
                await response.write(last)
            last = part
        await response.write_eof(last)
        return response

    async def _body(self, request: web.Request) -> bytes:
        try:
            return await read_body(request, self.limits)
        except BodyRefused as error:
            code = "body_too_large" if error.status == 413 else ""
            raise ApiError(error.status, str(error), code=code) from error

    async def _read(self, body: bytes, *, chat: bool) -> ChatAsked | PlainAsked:
        """The request in a body. Raises ApiError."""
        if len(body) <= READ_HERE:
            return chat_request(body) if chat else plain_request(body)
        assert self._readers is not None
        try:
            found = await self._readers.invoke({"chat": chat, "body": body.decode()})
        except UnicodeDecodeError as error:
            raise ApiError(400, f"the body is not UTF-8: {error}"[:300]) from error
        except (FunctionError, Throttled, OSError) as error:
            raise ApiError(503, f"the body could not be read: {error}"[:300], kind="server_error") from error
        return read_by_another(found)


def most_connections(concurrent: int) -> int:
    """At the socket of a sandbox whose agent may have so many requests open."""
    return max(OF_ONE_AGENT, 2 * concurrent)


def _events(chunks: list[dict[str, Any]]) -> Iterator[str]:
    for chunk in chunks:
        yield "data: "
        yield from jsontext.pieces(chunk)
        yield "\n\n"
    yield "data: [DONE]\n\n"


def _gathered(text: Iterator[str]) -> Iterator[bytes]:
    """What is written at once: of some milliseconds each."""
    held, size = [], 0
    for part in text:
        held.append(part)
        size += len(part)
        if size >= _WRITTEN:
            yield "".join(held).encode()
            held, size = [], 0
    if held:
        yield "".join(held).encode()


@web.middleware
async def _in_their_form(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Errors as OpenAI's clients read them."""
    try:
        return await handler(request)
    except ApiError as error:
        headers = {"WWW-Authenticate": "Bearer"} if error.status == 401 else None
        with contextlib.suppress(ConnectionError):
            return web.json_response(error.body, status=error.status, headers=headers)
        raise
    except ConnectionError:  # the client has gone; raised, it would be logged as a fault of ours
        return web.Response(status=499)
    except web.HTTPException as error:
        told = ApiError(error.status, f"{request.method} {request.path[-MAX_NAME:]}: {error.reason}; {SERVED}")
        return web.json_response(told.body, status=error.status)


def _model(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "rl-coserve"}
