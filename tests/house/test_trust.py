"""What broke when the whole was attacked, each as it was found: none of it does any more."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
from pydantic import ValidationError

from orchestrator.agents import openai_endpoint, openai_protocol
from orchestrator.agents.agent_session import AgentBounds, AgentSession
from orchestrator.agents.chat_template import VocabularyChat
from orchestrator.agents.openai_endpoint import AgentGateway
from orchestrator.api import (
    GenerationRequest,
    Prompt,
    RetryableError,
    RunError,
    Sampling,
    Trajectory,
    TrajectoryError,
    Turn,
    bearer,
    errors,
    jsontext,
)
from orchestrator.api import http as wire
from orchestrator.api.listener_limits import HttpListener
from orchestrator.environments import environment_wire
from orchestrator.environments.environment_process import EnvironmentService
from orchestrator.environments.remote_session import RemoteSession
from orchestrator.envs import StaleTrajectory
from orchestrator.rewards.function_client import FunctionClient
from orchestrator.rewards.process_pool import FunctionError, FunctionPool
from orchestrator.runtime.loop_watch import LoopWatch
from orchestrator.shards.shard_folder import ShardFolder
from orchestrator.store import TrajectoryStore
from orchestrator.tasks import reasoning_gym
from orchestrator.tasks.scoring import score_apart
from tests.support.waiting import wait_for

# -- agents ------------------------------------------------------------------------------------------------------------


def session(concurrent: int = 2) -> AgentSession:
    asked = GenerationRequest("", "t0", 0, (), Sampling(4), "agent", group_id="g")
    bounds = AgentBounds(4, 4, 100, concurrent=concurrent)

    async def nobody(*_: object) -> Any:
        raise AssertionError

    return AgentSession(VocabularyChat(), asked, bounds, nobody, lambda _: False, StaleTrajectory)


def test_an_agents_socket_is_its_owners_alone_and_each_has_its_own() -> None:
    async def scenario() -> None:
        gateway = AgentGateway()
        async with gateway.open_session(session()) as one, gateway.open_session(session()) as other:
            assert one.socket != other.socket
            for path in map(Path, (one.socket, other.socket)):
                assert stat.S_IMODE(path.stat().st_mode) == 0o600
                assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        assert not Path(one.socket).parent.exists()

    asyncio.run(scenario())


def test_a_trajectorys_requests_are_counted_before_their_bodies_come() -> None:
    async def scenario() -> list[bytes]:
        async with AgentGateway().open_session(session(concurrent=2)) as door:
            head = f"POST /k/{door.key}/v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 8000000\r\n\r\n"
            answers = []
            streams = []
            for _ in range(4):
                reader, writer = await asyncio.open_unix_connection(door.socket)
                writer.write(head.encode())
                streams.append(writer)
                with contextlib.suppress(TimeoutError):
                    answers.append(await asyncio.wait_for(reader.readline(), 0.5 if len(streams) <= 2 else 20))
            for writer in streams:
                writer.close()
            return answers

    assert [line.split()[1] for line in asyncio.run(scenario())] == [b"429", b"429"]


@pytest.mark.parametrize(("number", "kind"), [(24, RetryableError), (98, RunError)])  # EMFILE, EADDRINUSE
def test_only_a_port_that_is_taken_ends_the_run(
    number: int, kind: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fails(*_: object, **__: object) -> Any:
        raise OSError(number, os.strerror(number))

    async def scenario() -> None:
        monkeypatch.setattr(HttpListener, "listen", fails)
        async with AgentGateway().open_session(session()):
            raise AssertionError

    with pytest.raises(kind):
        asyncio.run(scenario())


def test_what_another_process_read_is_the_same_request() -> None:
    chat = {
        "messages": [
            {"role": "user", "content": "x" * 1000},
            {"role": "assistant", "content": None, "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": "{}"}}]},
        ],
        "stop": ["a", "b"], "n": 2, "tools": [{"type": "function", "function": {"name": "f"}}],
    }  # fmt: skip
    for is_chat, body in ((True, chat), (False, {"prompt": [1, 2, 3]}), (False, {"prompt": "text", "stream": True})):
        text = json.dumps(body)
        here = (openai_protocol.chat_request if is_chat else openai_protocol.plain_request)(text)
        told = json.loads(json.dumps(openai_protocol.read_apart({"chat": is_chat, "body": text})))
        assert openai_protocol.read_by_another(told) == here
    told = json.loads(json.dumps(openai_protocol.read_apart({"chat": True, "body": '{"messages":[1]}'})))
    with pytest.raises(openai_protocol.ApiError) as refused:
        openai_protocol.read_by_another(told)
    assert refused.value.status == 400
    assert refused.value.body["error"]["param"] == "messages.0"


def test_the_first_mistake_ends_the_reading_of_a_body() -> None:
    with pytest.raises(openai_protocol.ApiError) as refused:
        openai_protocol.chat_request(json.dumps({"messages": [1] * 9000}))
    assert refused.value.body["error"]["param"] == "messages.0"
    with pytest.raises(openai_protocol.ApiError, match="at most 10000"):
        openai_protocol.chat_request(json.dumps({"messages": [{"role": "user", "content": ""}] * 10_001}))


def test_of_a_list_no_more_than_the_first_mistake_is_looked_for() -> None:
    """Each is a record of a hundred bytes of Python: of two megabytes, 1.3 GiB."""
    many: list[Any] = [None] * 200
    bodies: dict[str, dict[str, Any]] = {
        "messages": {"messages": many},
        "parts": {"messages": [{"role": "user", "content": many}]},
        "calls of tools": {"messages": [{"role": "assistant", "tool_calls": many}]},
        "tools": {"messages": [{"role": "user", "content": "x"}], "tools": many},
        "stops": {"messages": [{"role": "user", "content": "x"}], "stop": [None] * openai_protocol.MAX_STOPS},
        "a prompt": {"prompt": many},
    }
    for what, body in bodies.items():
        form = openai_protocol._Plain if "prompt" in body else openai_protocol._Chat
        with pytest.raises(ValidationError) as refused:
            form.model_validate(body)
        assert refused.value.error_count() <= 3, what  # one of each form that the value could have


def test_a_large_body_is_read_by_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(sent: bytes) -> list[bool]:
        asked: list[bool] = []

        class Readers:
            async def invoke(self, event: dict[str, Any]) -> Any:
                asked.append(event["chat"])
                return openai_protocol.read_apart(event)

        server: Any = AgentGateway()
        server._readers = Readers()
        assert (await server._read(sent, chat=True)).messages[0].role == "user"
        return asked

    body = json.dumps({"messages": [{"role": "user", "content": "x" * openai_endpoint.READ_HERE}]}).encode()
    assert asyncio.run(scenario(body)) == [True]
    assert asyncio.run(scenario(body.replace(b"x" * 1000, b""))) == []


def test_json_has_a_depth() -> None:
    deepest = "[" * jsontext.DEPTH + "]" * jsontext.DEPTH
    jsontext.parse(deepest)
    for text in (f"[{deepest}]", '{"a":' * (jsontext.DEPTH + 1) + "1" + "}" * (jsontext.DEPTH + 1), "[" * 100_000):
        with pytest.raises(ValueError, match="nested"):
            jsontext.parse(text)
    assert len(jsontext.parse("[" + "[]," * 1000 + "[]]")) == 1001


HALF = '"\\ud800"'  # of a surrogate pair: JSON can say it, no file or pipe takes it


def test_json_has_no_text_that_cannot_be_written_down() -> None:
    assert jsontext.parse('"\\ud83d\\ude00 \\\\ud800"') == "\U0001f600 \\ud800"
    assert jsontext.parse(b"\xef\xbb\xbf[]") == []
    for text in (HALF, HALF.encode(), f'{{"a": [{{{HALF}: 1}}]}}', '"\\uDFFF"', '"\udc80"', b'"\xed\xa0\x80"'):
        with pytest.raises(ValueError, match="codec can't"):
            jsontext.parse(text)


def test_a_refusal_says_what_was_refused_whatever_that_is_and_however_long() -> None:
    looks = 0

    class Counted:
        def __repr__(self) -> str:
            nonlocal looks
            looks += 1
            return "x" * 1000

    class Wordless:
        def __repr__(self) -> str:
            raise ValueError

    for long in ([Counted()] * 10_000, {n: Counted() for n in range(10_000)}, [[Counted()] * 1000] * 1000):
        looks = 0
        assert len(errors.shown(long, 100)) == 100
        assert looks <= 64
    assert errors.shown(10**5000) == "<int>"
    assert errors.shown(Wordless()).startswith("<Wordless ")
    assert errors.shown("\ud800") == "'\\ud800'"
    assert [errors.shown(one) for one in (None, 1.5, [1], {"a": (1,)})] == ["None", "1.5", "[1]", "{'a': (1,)}"]


def test_what_others_say_of_a_trajectory_can_be_kept(tmp_path: Path) -> None:
    said = [TrajectoryError("strange", "\ud800"), TrajectoryError("\ud800" * 100, "x" * 10_000)]
    with pytest.raises(TrajectoryError) as refused:
        environment_wire.reply_of(f'{{"id": 1, "error": {{"cause": "x", "detail": {HALF}}}}}'.encode(), 1)
    turn = Turn((1,), (2,), (-0.5,), ((0, 1),))
    for error in (*said, refused.value):
        assert len(error.cause) <= 64 * 6
        assert len(error.detail) <= 2000
        kept = Trajectory("t", "g", "x", Prompt("k", "x", 0, ""), (turn,), None, "v", 0, False, (str(error),))
        folder = ShardFolder(tmp_path / "shards")
        store = TrajectoryStore(tmp_path / "store", finish=folder.finish)
        store.append(kept, 0, f"failed: {error.cause}")
        store.close()
        folder.close()


@pytest.mark.parametrize("version", ["\ud800", "x" * 10_000, None, 7])
def test_an_environments_version_is_text_that_can_be_kept(version: object) -> None:
    session = RemoteSession(cast("Any", None), "e0")
    with pytest.raises(TrajectoryError, match="version must be text"):
        session._take_version({"version": version})
    session._take_version({"version": "nim 1"})
    assert session.version == "nim 1"


# -- scores and rewards --------------------------------------------------------------------------------------------------


MODULE = """
import os, subprocess, sys, time

def double(event):
    return 2 * event

def hang(event):
    time.sleep(600)

def fork(event):
    child = os.fork()
    if not child:
        os.setsid()
        child = os.fork()  # no child of the function's any more
        if child:
            open(event, "w").write(f"{os.getpid()} {child}")
            os._exit(0)
        time.sleep(120)
        os._exit(0)
    time.sleep(600)
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = f"of_a_user_{os.getpid()}"
    (tmp_path / f"{name}.py").write_text(MODULE)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    return name


def test_a_score_has_a_limit_of_time_and_the_loop_goes_on(module: str) -> None:
    async def scenario() -> tuple[int, float]:
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                await asyncio.sleep(0.01)
                ticks += 1

        ticking = asyncio.ensure_future(tick())
        with pytest.raises(TrajectoryError) as failed:
            await score_apart(f"{module}:hang", 0, seconds=0.5)
        assert failed.value.cause == "scoring_timeout"
        assert await score_apart(f"{module}:double", 4) == 8
        costs = []
        for _ in range(3):
            begun = time.process_time()
            for number in range(100):
                assert await score_apart(f"{module}:double", number) == 2 * number
            costs.append((time.process_time() - begun) / 100)
        ticking.cancel()
        return ticks, min(costs)

    ticks, seconds = asyncio.run(scenario())
    assert ticks > 10
    assert seconds < 0.001


def test_eleven_characters_hang_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("reasoning_gym")
    for answer in ("1e999999999", "1e+9_999_999_99", "1.E-99999999", "2/1e999999999"):
        begun = time.process_time()
        assert reasoning_gym.score("coin_flip/1", answer) == 0.0
        assert time.process_time() - begun < 5.0
    right = str(reasoning_gym.item_of("coin_flip/1")["answer"])
    assert reasoning_gym.score("coin_flip/1", right) == 1.0

    asked = []

    async def apart(target: str, event: Any) -> float:
        asked.append((target, event["answer"]))
        return 0.5

    monkeypatch.setattr(reasoning_gym, "score_apart", apart)
    assert asyncio.run(reasoning_gym.Question("coin_flip/1").act("x")).reward == 0.5
    assert asked == [(reasoning_gym.SCORER, "x")]


def is_gone(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_nothing_that_a_function_forked_survives_its_host(module: str, tmp_path: Path) -> None:
    """``kill -9`` of the host, while a child that left its session and its parent sleeps."""
    source = (
        "import asyncio\nfrom orchestrator.rewards.process_pool import FunctionPool\n"
        f"pool = FunctionPool('{module}:fork', concurrency=1, timeout=500.0, idle_seconds=5.0)\n"
        f"asyncio.run(pool.invoke({str(tmp_path / 'child')!r}))\n"
    )
    host = subprocess.Popen([sys.executable, "-c", source])
    try:
        wait_for(lambda: (tmp_path / "child").exists() and len((tmp_path / "child").read_text().split()) == 2)
        children = (tmp_path / "child").read_text().split()
        assert not is_gone(children[1])
    finally:
        host.kill()
        host.wait()
    for child in children:
        wait_for(lambda child=child: is_gone(child))


def test_a_function_that_left_its_group_ends_with_its_call(module: str, tmp_path: Path) -> None:
    async def scenario() -> float:
        pool = FunctionPool(f"{module}:fork", concurrency=1, timeout=1.5, idle_seconds=5.0)
        begun = time.monotonic()
        with pytest.raises(FunctionError):
            await pool.invoke(str(tmp_path / "child"))
        took = time.monotonic() - begun
        await pool.close()
        return took

    took = asyncio.run(scenario())
    gc.collect()  # a pipe that is still held ends here: within the report of a failure its finalizer would break that
    for child in (tmp_path / "child").read_text().split():
        wait_for(lambda child=child: is_gone(child))
    assert took < 20.0, "the call waited for what the function had left behind"


@pytest.mark.parametrize("digits", [400, 5000])
def test_a_header_of_many_digits_is_no_time(digits: int) -> None:
    client = FunctionClient.__new__(FunctionClient)
    FunctionClient.__init__(client, "http://127.0.0.1:9/")
    client._note_cold("9" * digits)
    client._note_cold("1500")
    assert (client.counts.cold_starts, client.counts.cold_seconds) == (2, 1.5)


# -- tokens ----------------------------------------------------------------------------------------------------------------


def test_a_server_can_know_a_token_without_having_it() -> None:
    token = "a-token-of-256-random-bits"
    for given in (token, bearer.sealed(token)):
        assert bearer.admits(f"Bearer {token}", bearer.digest_in(given))
        assert not bearer.admits(f"Bearer {given}x", bearer.digest_in(given))
    assert not bearer.admits(f"Bearer {bearer.sealed(token)}", bearer.digest_in(bearer.sealed(token)))
    assert token not in bearer.sealed(token)
    assert bearer.digest_in("") == ""


def test_an_environment_is_started_once() -> None:
    async def scenario() -> list[dict[str, Any]]:
        service = EnvironmentService()
        target = {"call": "start", "target": "tests.support.misbehaving:Misbehaving"}
        calls = [{"id": 1, **target}, {"id": 1, **target}, {"id": 2, "call": "start", "target": "os:getcwd"}]
        lines = [await service.answer_line(environment_wire.encode_line(call)) for call in calls]
        return [environment_wire.decode_line(line) for line in lines]

    first, again, other = asyncio.run(scenario())
    assert first["result"] == again["result"]
    assert other["error"]["detail"] == "it was started already"


@pytest.mark.parametrize("prefix", ["", "/v"])
def test_a_lease_holds_under_a_prefix_too(prefix: str) -> None:
    from fastapi import APIRouter, FastAPI, Request
    from starlette.testclient import TestClient

    from vllm_rlplugin.server.bearer_auth import BearerGuard
    from vllm_rlplugin.server.control_route import STATE, ControlRoute, RouteContext

    router = APIRouter(route_class=ControlRoute)

    @router.post(wire.SUSPEND)
    async def suspend(request: Request) -> dict[str, str]:
        return {}

    app = FastAPI(root_path=prefix)
    app.include_router(router)
    import ipaddress

    guard = BearerGuard("t" * 16, (ipaddress.ip_network("0.0.0.0/0"),))
    setattr(app.state, STATE, RouteContext(guard, 1000, "s", lambda: 0, lambda key: "another job has it"))
    client = TestClient(app, root_path=prefix, client=("127.0.0.1", 1))
    for path in {wire.SUSPEND, prefix + wire.SUSPEND}:
        answer = client.post(path, headers={"Authorization": f"Bearer {'t' * 16}"})
        assert (answer.status_code, answer.json()["error"]["type"]) == (409, "leased"), path


# -- the event loop ----------------------------------------------------------------------------------------------------------


def test_an_alarm_names_who_held_the_loop_up() -> None:
    told: list[str] = []

    def greedy(until: Callable[[], bool]) -> None:
        while not until():
            pass

    async def scenario() -> None:
        watch = LoopWatch(told.append, seconds=0.2).start()
        await asyncio.sleep(0.3)
        end = time.thread_time() + 0.6
        greedy(lambda: time.thread_time() > end)
        await asyncio.sleep(0.3)
        watch.stop()
        watch.stop()

    asyncio.run(scenario())
    [alarm] = told
    assert alarm.startswith(("held up for 0.", "held up for 1."))
    assert "greedy (house/test_trust.py" in alarm
