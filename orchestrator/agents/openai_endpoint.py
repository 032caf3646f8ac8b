"""The OpenAI-compatible endpoint of the rollout side: one server, a key for each trajectory.

    POST /v1/chat/completions, POST /v1/completions, GET /v1/models
    Authorization: Bearer KEY, or the key in the path: /k/KEY/v1/...

Guarantees: it listens on loopback (and on a Unix socket for sandboxes) and nowhere else; a request without a key of a trajectory
that is under way learns nothing, before its body is read; keys are compared in constant time; a body over ``body_bytes`` is
refused; every error has OpenAI's form; when a client goes away, what it asked for is aborted in the worker. No key is logged.

An answer is whole before its first byte: a stream has OpenAI's form, and brings nothing sooner.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web

from orchestrator.agents import openai_protocol
from orchestrator.agents.agent_session import AgentSession
from orchestrator.agents.conversation import Answer
from orchestrator.agents.openai_protocol import Answered, ApiError, Asked
from orchestrator.api import bearer

BODY_BYTES = 8 << 20
MODEL = "policy"  # what /v1/models lists; any other name is taken too
SOCKET = "gateway.sock"
_Work = Callable[[AgentSession, Any], Awaitable[tuple[Asked, Answered, list[Answer]]]]
_Form = Callable[[Asked, Answered, int], Any]


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

    def __init__(self, port: int = 0, body_bytes: int = BODY_BYTES) -> None:
        self._wanted, self._port = port, 0
        self._body_bytes = body_bytes
        self._doors: dict[str, AgentAccess] = {}
        self._opened = 0
        self._users = 0
        self._changing = asyncio.Lock()
        self._runner: web.AppRunner | None = None
        self._folder = ""

    @asynccontextmanager
    async def open_session(self, session: AgentSession) -> AsyncIterator[AgentAccess]:
        """A key for this session, good until the end of the block; then its open requests are cancelled. Raises OSError when
        the port is taken."""
        async with self._changing:
            if self._runner is None:
                await self._start()
            self._users += 1
        self._opened += 1
        name = str(self._opened)
        key = f"rl-{name}-{secrets.token_urlsafe(32)}"
        door = AgentAccess(session, key, f"http://127.0.0.1:{self._port}/v1", f"{self._folder}/{SOCKET}")
        self._doors[name] = door
        try:
            yield door
        finally:
            del self._doors[name]
            for handler in door.handlers:
                handler.cancel()
            async with self._changing:
                self._users -= 1
                if self._users == 0:
                    await self._stop()

    async def _start(self) -> None:
        app = web.Application(middlewares=[_in_their_form], client_max_size=self._body_bytes)
        for head in ("/v1", "/k/{key}/v1"):
            app.router.add_post(f"{head}/chat/completions", self._chat)
            app.router.add_post(f"{head}/completions", self._plain)
            app.router.add_get(f"{head}/models", self._models)
            app.router.add_get(f"{head}/models/{{name}}", self._model)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.5, handler_cancellation=True)
        folder = tempfile.mkdtemp(prefix="rl-coserve-agents-")
        try:
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", self._wanted).start()
            await web.UnixSite(runner, f"{folder}/{SOCKET}").start()
            # Sandboxes run as users of their own: they may connect, and nobody may list the folder. What opens is the key.
            os.chmod(folder, 0o711)
            os.chmod(Path(folder) / SOCKET, 0o666)
        except BaseException:
            await runner.cleanup()
            shutil.rmtree(folder, ignore_errors=True)
            raise
        self._runner, self._folder = runner, folder
        self._port = next(address[1] for address in runner.addresses if isinstance(address, tuple))

    async def _stop(self) -> None:
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()
        shutil.rmtree(self._folder, ignore_errors=True)

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
                "Incorrect API key provided: it is no key of a trajectory that is under way",
                code="invalid_api_key",
            )
        return door

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        async def work(session: AgentSession, body: Any) -> tuple[Asked, Answered, list[Answer]]:
            wanted = openai_protocol.chat_asked(body)
            return wanted.asked, *await session.answer_chat(wanted)

        return await self._serve(request, work, openai_protocol.chat_body, openai_protocol.chat_chunks)

    async def _plain(self, request: web.Request) -> web.StreamResponse:
        async def work(session: AgentSession, body: Any) -> tuple[Asked, Answered, list[Answer]]:
            wanted = openai_protocol.plain_asked(body)
            return wanted.asked, *await session.answer_plain(wanted)

        return await self._serve(request, work, openai_protocol.plain_body, openai_protocol.plain_chunks)

    async def _models(self, request: web.Request) -> web.StreamResponse:
        self._door(request)
        return web.json_response({"object": "list", "data": [_model(MODEL)]})

    async def _model(self, request: web.Request) -> web.StreamResponse:
        self._door(request)
        return web.json_response(_model(request.match_info["name"]))

    async def _serve(self, request: web.Request, work: _Work, whole: _Form, chunks: _Form) -> web.StreamResponse:
        door, this = self._door(request), asyncio.current_task()
        assert this is not None
        door.handlers.add(this)
        session, answers = door.session, list[Answer]()
        try:
            asked, answered, answers = await work(session, await self._body(request))
            created = int(time.time())  # for clients; nothing here goes by it
            if asked.stream:
                return await _streamed(request, chunks(asked, answered, created))
            response = web.json_response(whole(asked, answered, created))
            await response.prepare(request)
            await response.write_eof()
            return response
        except (asyncio.CancelledError, ConnectionError):
            session.conversation.withdraw(answers)
            raise
        finally:
            door.handlers.discard(this)

    async def _body(self, request: web.Request) -> Any:
        if (request.content_length or 0) > self._body_bytes:
            raise ApiError(413, f"the body has over {self._body_bytes} bytes", code="body_too_large")
        try:
            return json.loads(await request.read())
        except web.HTTPRequestEntityTooLarge as error:
            raise ApiError(413, f"the body has over {self._body_bytes} bytes", code="body_too_large") from error
        except (ValueError, RecursionError) as error:
            raise ApiError(400, f"the body is not JSON: {error}"[:300]) from error


async def _streamed(request: web.Request, chunks: list[dict[str, Any]]) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await response.prepare(request)
    for chunk in chunks:
        await response.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
    await response.write(b"data: [DONE]\n\n")
    await response.write_eof()
    return response


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
    except web.HTTPException as error:
        told = ApiError(error.status, f"{request.method}: {error.reason}")
        return web.json_response(told.body, status=error.status)


def _model(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "rl-coserve"}
