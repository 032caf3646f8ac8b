"""Everything that listens, with a slow, a flooding, a huge and a wrong client: it is rid of them, and answers who may ask."""

from __future__ import annotations

import argparse
import ast
import asyncio
import contextlib
import resource
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from orchestrator.agents import openai_endpoint
from orchestrator.agents.agent_session import AgentBounds, AgentSession
from orchestrator.agents.chat_template import VocabularyChat
from orchestrator.agents.openai_endpoint import AgentGateway
from orchestrator.api import GenerationRequest, Sampling, bearer, listener_limits
from orchestrator.api.listener_limits import LISTENERS, ListenerLimits
from orchestrator.environments import environment_process
from orchestrator.envs import StaleTrajectory
from orchestrator.observe.view import view_server
from orchestrator.rewards import host as function_host

ROOT = Path(__file__).parents[2]
PACKAGES = ("orchestrator", "vllm_rlplugin", "megatron_rlplugin", "patches")
TOKEN = "the-token-of-these-tests"
SECONDS = 0.4  # of a head here
Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@dataclass
class Place:
    """A listener that is up. ``head``: of a request by who may ask, without its end; ``body``: whether it takes one."""

    connect: Callable[[], Awaitable[Stream]]
    head: bytes
    limits: ListenerLimits
    body: bool = True
    http: bool = True

    async def asks(self) -> bytes:
        """The first line of an answer to who may ask."""
        reader, writer = await self.connect()
        end = b"Content-Length: 2\r\n\r\n{}" if self.body else b"\r\n"
        writer.write(self.head + (end if self.http else b"\n"))
        line = await asyncio.wait_for(reader.readline(), 20)
        writer.close()
        return line


def short(name: str) -> ListenerLimits:
    return replace(LISTENERS[name], connections=8, per_peer=8, header_seconds=SECONDS, body_seconds=SECONDS)


def request(method: str, path: str, token: str = TOKEN) -> bytes:
    return f"{method} {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token}\r\n".encode()


def to(port: int) -> Callable[[], Awaitable[Stream]]:
    return lambda: asyncio.open_connection("127.0.0.1", port)


@asynccontextmanager
async def gateway(patch: pytest.MonkeyPatch, *, unix: bool = False) -> AsyncIterator[Place]:
    limits = short("agent endpoint")
    patch.setattr(openai_endpoint, "LIMITS", limits)
    patch.setattr(openai_endpoint, "OF_ONE_AGENT", 4)
    chat = VocabularyChat()
    asked = GenerationRequest("", "t0", 0, (), Sampling(4), "agent", group_id="g")
    session = AgentSession(chat, asked, AgentBounds(4, 4, 100, concurrent=2), _nobody, lambda _: False, StaleTrajectory)
    server = AgentGateway(body_bytes=1 << 16)
    async with server.open_session(session) as door:
        head = request("POST", "/v1/chat/completions", door.key)
        connect = (lambda: asyncio.open_unix_connection(door.socket)) if unix else to(server._port)
        yield Place(connect, head, server.limits)


async def _nobody(*_: object) -> Any:
    raise AssertionError("nothing here asks the policy")


@asynccontextmanager
async def hosted(patch: pytest.MonkeyPatch, serve: Callable[[], Awaitable[None]]) -> Any:
    said: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    patch.setattr(listener_limits, "print", lambda text, **_: said.set_result(text), raising=False)
    running = asyncio.ensure_future(serve())
    try:
        yield int((await asyncio.wait_for(said, 20)).split(":")[1].strip(" }"))
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


@asynccontextmanager
async def functions(patch: pytest.MonkeyPatch) -> AsyncIterator[Place]:
    limits = short("function host")
    patch.setattr(function_host, "LIMITS", limits)
    options = argparse.Namespace(
        host="127.0.0.1", port=0, function=[], die_with_stdin=False, allow_plain_http=False, tls_certificate="",
        tls_key="", tls_authority="", tls_verify_clients=False,
    )  # fmt: skip
    async with hosted(patch, lambda: function_host.serve_functions(options, bearer.sealed(TOKEN))) as port:
        yield Place(to(port), request("POST", "/2015-03-31/functions/none/invocations"), limits)


@asynccontextmanager
async def judge(patch: pytest.MonkeyPatch) -> AsyncIterator[Place]:
    judge_server = pytest.importorskip("vllm_rlplugin.judge.judge_server")
    limits = short("judge")
    patch.setattr(judge_server, "LIMITS", limits)
    made = judge_server.JudgeServer(None, NoTemplate(), "judge", bearer.sealed(TOKEN), lambda: 0)
    async with hosted(patch, lambda: judge_server.serve(made, "127.0.0.1", 0, False)) as port:
        yield Place(to(port), request("POST", "/v1/chat/completions"), limits)


class NoTemplate:
    def apply_chat_template(self, messages: object, **_: object) -> str:
        raise ValueError("no template here")


class NoPicture:
    page, picture = "page.html", b"{}"

    async def newer_than(self, seen: int, /) -> tuple[int, bytes]:
        return seen + 1, b"{}"


@asynccontextmanager
async def page(patch: pytest.MonkeyPatch) -> AsyncIterator[Place]:
    limits = short("live page")
    patch.setitem(LISTENERS, "live page", limits)
    server = view_server.Server(NoPicture(), TOKEN)
    await server.start()
    try:
        yield Place(to(server.port), request("GET", "/state.json"), limits, body=False)
    finally:
        await server.close()


@asynccontextmanager
async def worker(patch: pytest.MonkeyPatch) -> AsyncIterator[Place]:
    limits = short("environment worker")
    patch.setitem(LISTENERS, "environment worker", limits)
    port: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    serving = environment_process.serve_tcp("127.0.0.1", 0, bearer.digest_of(TOKEN), 60.0, port.set_result)
    running = asyncio.ensure_future(serving)
    try:
        yield Place(to(await asyncio.wait_for(port, 20)), TOKEN.encode(), limits, http=False)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


PLACES: dict[str, Callable[[pytest.MonkeyPatch], Any]] = {
    "agent endpoint": gateway,
    "agent endpoint, a sandbox's socket": lambda patch: gateway(patch, unix=True),
    "function host": functions,
    "judge": judge,
    "live page": page,
    "environment worker": worker,
}


# What opens a socket for others to connect to: a listener of the table, or (what it is, and what protects it).
OPENS = {
    "megatron_rlplugin/weights/collective_sender.py": "(of NCCL's and gloo's rendezvous: networks of your own)",
    "orchestrator/agents/openai_endpoint.py": "agent endpoint",
    "orchestrator/agents/sandbox_bridge.py": "(inside a sandbox, on its own loopback)",
    "orchestrator/api/listener_limits.py": "(all of them)",
    "orchestrator/child_process.py": "(only to see which port is free)",
    "orchestrator/environments/environment_process.py": "environment worker",
    "orchestrator/observe/view/view_server.py": "live page",
    "orchestrator/rewards/host.py": "function host",
    "orchestrator/runtime/engine_actors.py": "(only to see which port is free)",
    "orchestrator/runtime/mooncake_master.py": "(only to see whether an address is this machine's)",
    "orchestrator/transfer/proven_link.py": "(KV and caches of sites: tests/transfer/test_kv_wire.py, test_site_cache.py)",
    "vllm_rlplugin/judge/judge_server.py": "judge",
    "vllm_rlplugin/kvpool/pages/page_keeper.py": "(a socket of mode 0600, whose peers' user the kernel tells)",
}
OPENING = {
    "create_server",
    "start_server",
    "create_unix_server",
    "start_unix_server",
    "TCPSite",
    "UnixSite",
    "HttpListener",
}


def opens(call: ast.Call) -> bool:
    name = ast.unparse(call.func).rpartition(".")[2]
    return name in OPENING or (name == "bind" and len(call.args) == 1)


def test_every_listener_is_here() -> None:
    assert {name.partition(",")[0] for name in PLACES} == set(LISTENERS)
    found = set()
    for file in (file for name in PACKAGES for file in sorted((ROOT / name).rglob("*.py"))):
        text = file.read_text(encoding="utf-8")
        if ".bind(" in text or any(name in text for name in OPENING):
            calls = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call))
            found |= {str(file.relative_to(ROOT))} if any(map(opens, calls)) else set()
    assert found == set(OPENS)
    assert {name for name in OPENS.values() if not name.startswith("(")} == set(LISTENERS)


def test_the_page_on_security_shows_the_limits_that_hold() -> None:
    assert listener_limits.table_of_listeners() in (ROOT / "docs" / "security.md").read_text()


async def ended(stream: Stream, seconds: float = 20.0) -> bytes:
    """What the other side said until it hung up."""
    with contextlib.suppress(ConnectionError):
        return await asyncio.wait_for(stream[0].read(), seconds)
    return b""


def right(line: bytes) -> bool:
    """An answer, whatever it says, to who may ask."""
    return line == b"{}\n" or (line.startswith(b"HTTP/1.1 ") and b" 401" not in line and b" 5" not in line[8:11])


async def slow(place: Place) -> None:
    """Heads that never end, one dripping."""
    silent, begun, dripping = [await place.connect() for _ in range(3)]
    begun[1].write(place.head[:9])

    async def drip() -> None:
        with contextlib.suppress(ConnectionError):
            while not dripping[1].is_closing():
                dripping[1].write(b"X")
                await asyncio.sleep(SECONDS / 8)

    dripper = asyncio.ensure_future(drip())
    try:
        assert right(await place.asks())
        for stream in (silent, begun, dripping):
            await ended(stream)
    finally:
        dripper.cancel()
        for _, writer in (silent, begun, dripping):
            writer.close()
    if place.body and place.http:
        stream = await place.connect()
        stream[1].write(place.head + b"Content-Length: 50\r\n\r\n{")
        line = await asyncio.wait_for(stream[0].readline(), 20)
        assert b" 408 " in line, line
        stream[1].close()


async def flooding(place: Place) -> None:
    """Many times what may be open, all held."""
    held: list[Stream] = []
    for _ in range(5 * place.limits.connections):
        with contextlib.suppress(OSError):
            held.append(await place.connect())
    assert right(await place.asks())
    await asyncio.sleep(0.05)
    assert sum(not reader.at_eof() for reader, _ in held) <= place.limits.connections
    for _, writer in held:
        writer.close()


async def huge(place: Place) -> None:
    """A head without end, and a body that is said to be a terabyte, which nobody waits for."""
    stream = await place.connect()
    with contextlib.suppress(ConnectionError):
        stream[1].write(place.head if place.http else b"")  # else it is refused for its first line
        for _ in range(64):
            stream[1].write(b"X-More: " + b"x" * 4000 + b"\r\n" if place.http else b"x" * 4000)
            await stream[1].drain()
    said = await ended(stream)
    assert b"200" not in said
    assert b"{}" not in said
    stream[1].close()
    if place.http:
        for head, status in ((place.head, b" 413 "), (request("POST", "/", "wrong"), b" 401 ")):
            if place.body or status == b" 401 ":
                stream = await place.connect()
                stream[1].write(head + b"Content-Length: 1000000000000\r\n\r\n")
                line = await asyncio.wait_for(stream[0].readline(), 20)
                assert status in line or b" 404 " in line, line
                stream[1].close()
    assert right(await place.asks())


async def wrong(place: Place) -> None:
    """Tokens of all kinds, and bodies of none."""
    path = place.head.split(b"\r\n")[0]
    for token in (b"Bearer wrong", b"Bearer \xff", b"Basic x", b"Bearer " + b"x" * 5000, b"\xff\xfe"):
        stream = await place.connect()
        if place.http:
            stream[1].write(path + b"\r\nHost: x\r\nAuthorization: " + token + b"\r\n\r\n")
            line = await asyncio.wait_for(stream[0].readline(), 20)
            assert b" 401 " in line or b" 400 " in line, (token, line)
        else:
            stream[1].write(token + b"\n")
            assert await ended(stream) == b"", token
        stream[1].close()
    if place.http and place.body:
        for body in (
            b"[" * 20_000,
            b"\xff",
            b"[1]",
            b"1e999",
            b'{"messages":[{"role":"user","content":1e400}]}',
            b'{"messages":[{"role":"user","content":"x"}],"max_tokens":1e400}',
            b'{"messages":[1]}',
            b"null",
        ):
            for more, allowed in ((b"", b"4"), (b"Content-Encoding: gzip\r\n", b"415")):
                stream = await place.connect()
                stream[1].write(place.head + more + b"Content-Length: %d\r\n\r\n" % len(body) + body)
                line = await asyncio.wait_for(stream[0].readline(), 20)
                assert line.split()[1].startswith(allowed), (body[:20], line)
                stream[1].close()
    assert right(await place.asks())


@pytest.mark.parametrize("name", PLACES)
@pytest.mark.parametrize("client", [slow, flooding, huge, wrong], ids=lambda client: client.__name__)
def test_a_listener_is_rid_of_it_and_answers_who_may_ask(
    name: str, client: Callable[[Place], Awaitable[None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    if client is huge:  # its length ends it, not its time
        monkeypatch.setattr(sys.modules[__name__], "SECONDS", 100.0)

    async def scenario() -> None:
        async with PLACES[name](monkeypatch) as place:
            async with asyncio.timeout(60):
                await client(place)

    asyncio.run(scenario())


def test_the_soft_limit_of_open_files_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 500_000))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: asked.append(limits))
    assert listener_limits.raise_open_files() == listener_limits.OPEN_FILES
    assert asked == [(listener_limits.OPEN_FILES, 500_000)]
