"""The embedded function host, as a real process with real workers: what a function does wrong stays its caller's problem."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from orchestrator.api import ConfigError, Prompt, RunError, Trajectory, TrajectoryError, Turn
from orchestrator.rewards.function_protocol import MAX_BODY_BYTES
from orchestrator.rewards.host_launch import RewardHost
from orchestrator.rewards.reward_client import HttpReward

pytestmark = pytest.mark.slow

FUNCTIONS = '''
import json, os, signal, subprocess, sys, time

def act(event):
    """Does what the event says."""
    what = event.get("do") or event.get("prompt")
    if what == "raise":
        raise ValueError("no such map")
    if what == "hang":
        if "mark" in event:
            open(event["mark"] + str(os.getpid()), "w").close()
        while True:
            pass
    if what == "sleep":
        time.sleep(event["seconds"])
    if what == "sleep with a child":
        child = subprocess.Popen(["sleep", "100"])
        open(event["file"], "w").write(str(child.pid))
        time.sleep(100)
    if what == "exit":
        os._exit(3)
    if what == "sys.exit":
        sys.exit(0)
    if what == "print":
        print('{"id":0,"result":{"reward":99}}', flush=True)
        os.write(1, b"garbage\\n" * 10000)
        subprocess.run(["echo", "from a child"])
        return {"reward": 1.0, "read": sys.stdin.read()}
    if what == "write into the pipe":
        for descriptor in range(3, 30):
            try:
                os.write(descriptor, b'{"id": 12345, "result": {"reward": 99}}\\n')
            except OSError:
                pass
    if what == "raise half of a pair":
        raise ValueError("\\ud800")
    if what == "half of a pair":
        return {"reward": 1.0, "text": "\\ud800"}
    if what == "nan":
        return {"reward": float("nan")}
    if what == "object":
        return {"reward": object()}
    if what == "deep":
        value = []
        for _ in range(100_000):
            value = [value]
        return {"reward": value}
    if what == "large":
        return {"reward": 1.0, "text": "x" * (2 << 20)}
    if what == "environment":
        return {"names": sorted(os.environ)}
    return {"reward": 0.5, "pid": os.getpid(), "event": event}

def handler(event, context):
    """Of AWS's form."""
    return {"reward": 0.25, "context": context}
'''


@dataclass
class Answer:
    status: int
    failed: bool
    body: Any


class Session:
    """A started host and raw calls to it."""

    def __init__(self, host: RewardHost, http: aiohttp.ClientSession) -> None:
        self.host = host
        self.http = http

    async def invoke(
        self, event: Any = None, *, data: bytes | None = None, url: str = "", token: str | None = None
    ) -> Answer:
        headers = {"Authorization": f"Bearer {self.host.token if token is None else token}"}
        body = json.dumps(event).encode() if data is None else data
        async with self.http.post(url or self.host.url, data=body, headers=headers) as response:
            failed = "X-Amz-Function-Error" in response.headers
            return Answer(response.status, failed, json.loads(await response.read()))

    async def stats(self) -> dict[str, int]:
        headers = {"Authorization": f"Bearer {self.host.token}"}
        async with self.http.get(self.host.base_url + "/stats", headers=headers) as response:
            functions: dict[str, dict[str, int]] = (await response.json())["functions"]
            return functions[self.host.url.split("/")[-2]]


Scenario = Callable[[Session], Awaitable[None]]
With = Callable[..., None]


@pytest.fixture(scope="module")
def shared_host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[With]:
    """Run scenarios against one host, for those that need no options: a start costs half a second."""
    folder = tmp_path_factory.mktemp("host")
    (folder / "functions_under_test.py").write_text(FUNCTIONS)
    with pytest.MonkeyPatch.context() as patch, asyncio.Runner() as runner:
        patch.setenv("PYTHONPATH", str(folder))
        host = RewardHost("functions_under_test:act", log=folder / "host.log", timeout=5.0, concurrency=2)
        runner.run(host.start())

        def run(scenario: Scenario) -> None:
            async def whole() -> None:
                async with aiohttp.ClientSession() as http, asyncio.timeout(50):
                    await scenario(Session(host, http))

            runner.run(whole())

        yield run
        runner.run(host.stop())


@pytest.fixture
def with_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> With:
    """Run a scenario against a host of its own."""
    (tmp_path / "functions_under_test.py").write_text(FUNCTIONS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def run(scenario: Scenario, *, function: str = "functions_under_test:act", **options: Any) -> None:
        async def whole() -> None:
            host = RewardHost(function, log=tmp_path / "host.log", **{"timeout": 5.0, "concurrency": 2, **options})
            await host.start()
            pid = host.pid or 0
            try:
                async with aiohttp.ClientSession() as http, asyncio.timeout(50):
                    await scenario(Session(host, http))
            finally:
                await host.stop()
            assert not host.alive()
            assert _children(pid) == []

        asyncio.run(whole())

    return run


def test_a_function_is_called_and_its_worker_is_used_again(shared_host: With) -> None:
    async def scenario(session: Session) -> None:
        first = await session.invoke({"n": 1, "text": "ä\n\u2028"})
        second = await session.invoke({"n": 2})
        assert (first.status, first.failed) == (200, False)
        assert first.body["event"] == {"n": 1, "text": "ä\n\u2028"}
        assert second.body["pid"] == first.body["pid"]

    shared_host(scenario)


def test_whatever_a_function_does_wrong_is_an_error_and_the_next_call_works(shared_host: With) -> None:
    async def scenario(session: Session) -> None:
        for what, kind in (
            ("raise", "ValueError"),
            ("raise half of a pair", "ValueError"),
            ("half of a pair", "Runtime.MarshalError"),
            ("exit", "Runtime.ExitError"),
            ("sys.exit", "Runtime.ExitError"),
            ("nan", "Runtime.NotFinite"),
            ("object", "Runtime.MarshalError"),
            ("deep", "Runtime.MarshalError"),
            ("large", "Runtime.MarshalError"),
            ("write into the pipe", "Runtime.MarshalError"),
        ):
            answer = await session.invoke({"do": what})
            assert (answer.status, answer.failed, answer.body["errorType"]) == (200, True, kind), what
            assert (await session.invoke({})).body["reward"] == 0.5, what
        stats = await session.stats()
        assert stats["live"] == stats["idle"] == 1  # no worker was left behind

    shared_host(scenario)


def test_what_a_function_prints_never_becomes_a_result(shared_host: With) -> None:
    async def scenario(session: Session) -> None:
        pid = (await session.invoke({})).body["pid"]
        for _ in range(2):
            answer = await session.invoke({"do": "print"})
            assert (answer.failed, answer.body) == (False, {"reward": 1.0, "read": ""})
        assert (await session.invoke({})).body["pid"] == pid

    shared_host(scenario)


def test_a_call_that_hangs_is_killed_with_all_it_started(with_host: With, tmp_path: Path) -> None:
    async def scenario(session: Session) -> None:
        await session.invoke({})
        started = time.monotonic()
        answer = await session.invoke({"do": "hang"})  # a busy loop: nothing in the process could stop it
        assert (answer.status, answer.failed, answer.body["errorType"]) == (200, True, "Sandbox.Timedout")
        assert time.monotonic() - started < 5
        file = tmp_path / "child"
        answer = await session.invoke({"do": "sleep with a child", "file": str(file)})
        assert answer.body["errorType"] == "Sandbox.Timedout"
        assert _ends(int(file.read_text()))
        assert (await session.invoke({})).body["reward"] == 0.5

    with_host(scenario, timeout=0.7)


def test_at_most_so_many_workers_run_at_once(with_host: With) -> None:
    async def scenario(session: Session) -> None:
        calls = [asyncio.create_task(session.invoke({"do": "sleep", "seconds": 0.2})) for _ in range(8)]
        most = 0
        while not all(call.done() for call in calls):
            most = max(most, (await session.stats())["live"])
            await asyncio.sleep(0.02)
        answers = [await call for call in calls]
        assert all(not answer.failed for answer in answers)
        assert len({answer.body["pid"] for answer in answers}) == most == 2

    with_host(scenario)


def test_too_many_waiting_calls_are_refused(with_host: With, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(session: Session) -> None:
        calls = [asyncio.create_task(session.invoke({"do": "sleep", "seconds": 0.005})) for _ in range(70)]
        statuses = sorted([(await call).status for call in calls])
        assert statuses[0] == 200
        assert statuses[-1] == 429

    with_host(scenario, concurrency=1)


def test_an_idle_host_has_no_workers_and_wakes_up_again(with_host: With) -> None:
    async def scenario(session: Session) -> None:
        pid = (await session.invoke({})).body["pid"]
        assert (await session.stats())["live"] == 1
        async with asyncio.timeout(10):
            while (await session.stats())["live"]:
                await asyncio.sleep(0.05)
        assert _ends(pid)
        assert _children(session.host.pid or 0) == []
        assert (await session.invoke({})).body["pid"] != pid

    with_host(scenario, idle_seconds=0.3)


def test_what_cold_starts_cost_is_counted(with_host: With) -> None:
    async def scenario(session: Session) -> None:
        reward = HttpReward(session.host.url, token=session.host.token)
        for _ in range(3):
            await reward.score(_trajectory("map"))
        assert (reward.counts.calls, reward.counts.cold_starts) == (3, 1)
        assert 0 < reward.counts.cold_seconds < reward.counts.seconds
        await reward.close()

    with_host(scenario, idle_seconds=60.0)


def test_a_worker_that_died_while_idle_costs_no_call(shared_host: With) -> None:
    async def scenario(session: Session) -> None:
        pid = (await session.invoke({})).body["pid"]
        os.kill(pid, signal.SIGKILL)
        await asyncio.sleep(0.2)
        answer = await session.invoke({})
        assert (answer.failed, answer.body["reward"]) == (False, 0.5)

    shared_host(scenario)


def test_nobody_is_answered_without_the_token(with_host: With) -> None:
    async def scenario(session: Session) -> None:
        for token in ("", "wrong", session.host.token + "x", session.host.token[:-1], "ü"):
            answer = await session.invoke({}, token=token)
            assert answer.status == 401
        for path in ("/stats", "/", "/anything"):
            async with session.http.get(session.host.base_url + path) as response:
                assert response.status == 401
        assert (await session.stats())["live"] == 0  # none of them reached a worker

    with_host(scenario)


def test_the_token_is_neither_an_argument_nor_known_to_functions(shared_host: With) -> None:
    async def scenario(session: Session) -> None:
        names = (await session.invoke({"do": "environment"})).body["names"]
        assert "PATH" in names
        assert not [name for name in names if name.startswith("RL_COSERVE_")]
        token = session.host.token.encode()
        for pid in (session.host.pid, *_children(session.host.pid or 0)):
            assert token not in Path(f"/proc/{pid}/cmdline").read_bytes()
            assert token not in Path(f"/proc/{pid}/environ").read_bytes()

    shared_host(scenario)


def test_bad_requests_are_refused_before_a_worker_is_started(with_host: With) -> None:
    async def scenario(session: Session) -> None:
        for data in (b"{", b"NaN", b"[" * 100_000, b"\xff\xfe"):
            assert (await session.invoke(data=data)).status == 400, data[:10]
        assert (await session.invoke(data=b"x" * (MAX_BODY_BYTES + 1))).status == 413
        assert (await session.invoke({}, url=session.host.url.replace("/act/", "/other/"))).status == 404
        assert (await session.stats())["live"] == 0

    with_host(scenario)


def test_it_listens_on_loopback_only(shared_host: With) -> None:
    async def scenario(session: Session) -> None:
        port = f"{int(session.host.base_url.rpartition(':')[2]):04X}"
        listening = [
            line.split()[1]
            for table in ("/proc/net/tcp", "/proc/net/tcp6")
            for line in Path(table).read_text().splitlines()[1:]
            if line.split()[3] == "0A" and line.split()[1].endswith(":" + port)
        ]
        assert listening == [f"0100007F:{port}"]

    shared_host(scenario)


def test_handlers_of_the_form_of_aws_are_called_with_a_context(with_host: With) -> None:
    async def scenario(session: Session) -> None:
        assert (await session.invoke({})).body == {"reward": 0.25, "context": None}

    with_host(scenario, function="functions_under_test:handler")


@pytest.mark.parametrize("function", ["no_such_module:act", "functions_under_test:missing"])
def test_a_function_that_cannot_be_imported_is_an_error_of_every_call(with_host: With, function: str) -> None:
    async def scenario(session: Session) -> None:
        for _ in range(2):
            answer = await session.invoke({})
            assert (answer.failed, answer.body["errorType"]) == (True, "Runtime.ImportModuleError")
        assert (await session.stats())["live"] == 0

    with_host(scenario, function=function)


def test_stopping_in_the_middle_of_calls_leaves_no_process(with_host: With, tmp_path: Path) -> None:
    async def scenario(session: Session) -> None:
        event = {"do": "hang", "mark": f"{tmp_path}/hangs-"}
        calls = [asyncio.create_task(session.invoke(event)) for _ in range(2)]
        workers = await _hanging(tmp_path, 2)
        watchers = _children(session.host.pid or 0)
        assert sorted(workers) == sorted(child for watcher in watchers for child in _children(watcher))
        await session.host.stop()
        assert all(_ends(worker) for worker in workers)
        await asyncio.gather(*calls, return_exceptions=True)

    with_host(scenario, timeout=30.0)


@pytest.mark.parametrize("busy", [False, True])
def test_the_host_ends_with_the_process_that_started_it(with_host: With, tmp_path: Path, busy: bool) -> None:
    """Killed, so that it cannot clean up: the host sees the end of its pipe, its workers the end of the host."""
    script = f"""
import asyncio, os, signal
import aiohttp
from orchestrator.rewards.host_launch import RewardHost
async def main():
    host = RewardHost("functions_under_test:act", timeout=60.0)
    await host.start()
    headers = {{"Authorization": f"Bearer {{host.token}}"}}
    async with aiohttp.ClientSession(headers=headers) as http:
        async with http.post(host.url, json={{}}) as response:
            print(host.pid, (await response.json())["pid"], flush=True)
        if {busy}:
            call = asyncio.create_task(http.post(host.url, json={{"do": "hang"}}))
            await asyncio.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
asyncio.run(main())
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(pids) == 2, done.stderr
    assert all(_ends(pid) for pid in pids)


def test_workers_end_with_a_host_that_is_killed_even_in_a_busy_loop(with_host: With, tmp_path: Path) -> None:
    async def scenario(session: Session) -> None:
        call = asyncio.create_task(session.invoke({"do": "hang", "mark": f"{tmp_path}/hangs-"}))
        workers = await _hanging(tmp_path, 1)
        os.kill(session.host.pid or 0, signal.SIGKILL)
        assert all(_ends(worker) for worker in workers)
        with pytest.raises(aiohttp.ClientError):
            await call

    with_host(scenario, timeout=30.0)


def test_the_client_scores_through_the_real_host(with_host: With) -> None:
    async def scenario(session: Session) -> None:
        reward = HttpReward(session.host.url, token=session.host.token, timeout=20.0, retries=1)
        assert await reward.score(_trajectory("map")) == 0.5
        for what, cause in (
            ("raise", "reward_error"),
            ("exit", "reward_error"),
            ("nan", "reward_not_finite"),
            ("hang", "reward_timeout"),
        ):
            with pytest.raises(TrajectoryError) as caught:
                await reward.score(_trajectory(what))
            assert caught.value.cause == cause
        scores = await asyncio.gather(*(reward.score(_trajectory("map")) for _ in range(50)))
        assert scores == [0.5] * 50
        await reward.close()
        stranger = HttpReward(session.host.url, token="wrong")
        with pytest.raises(RunError, match="401"):
            await stranger.score(_trajectory("map"))
        await stranger.close()

    with_host(scenario, timeout=1.0)


def test_the_payload_is_the_prompt_and_the_token_ids_of_every_turn(shared_host: With) -> None:
    async def scenario(session: Session) -> None:
        reward = HttpReward(session.host.url, token=session.host.token)
        posted = []
        post = reward._post

        async def recorded(body: bytes) -> tuple[bool, bytes]:
            posted.append(json.loads(body))
            return await post(body)

        reward._post = recorded  # type: ignore[method-assign]
        await reward.score(_trajectory("SFFF/FHFH"))
        await reward.close()
        assert posted == [
            {"trajectory_id": "t1", "task": "frozenlake", "prompt": "SFFF/FHFH", "actions": [[5, 6], [7]]}
        ]

    shared_host(scenario)


@pytest.mark.parametrize("function", ["nonsense", "module:", ":name"])
def test_a_function_that_is_not_a_name_is_a_configuration_error(function: str, tmp_path: Path) -> None:
    host = RewardHost(function, log=tmp_path / "log")
    with pytest.raises(ConfigError) as caught:
        asyncio.run(host.start())
    assert caught.value.field == "reward.function"
    assert not host.alive()


def test_a_host_that_never_gets_ready_is_an_error_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    slow = tmp_path / "python"
    slow.write_text(f"#!/bin/sh\necho $$ > {tmp_path}/pid\nexec sleep 100\n")
    slow.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(slow))
    monkeypatch.setattr(RewardHost, "start_limit", 0.5)
    with pytest.raises(RunError, match="not ready within"):
        asyncio.run(RewardHost("a:b").start())
    assert _ends(int((tmp_path / "pid").read_text()))


def test_a_host_refuses_to_start_without_a_token_or_on_a_taken_port(monkeypatch: pytest.MonkeyPatch) -> None:
    command = [
        sys.executable,
        "-m",
        "orchestrator.rewards.host",
        "--function",
        "a:b",
        "--token-env",
        "X_TOKEN",
    ]
    environment = {**os.environ, "X_TOKEN": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode, "X_TOKEN" in done.stderr) == (2, True)
    import socket

    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        taken = [*command, "--port", str(holder.getsockname()[1])]
        environment["X_TOKEN"] = "t"
        done = subprocess.run(taken, env=environment, capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode, "cannot listen" in done.stderr) == (2, True)


def _trajectory(prompt: str) -> Trajectory:
    turns = tuple(Turn((1, 2), ids, (0.0,) * len(ids), ((0, len(ids)),)) for ids in ((5, 6), (7,)))
    return Trajectory("t1", "g1", "frozenlake", Prompt("k", "frozenlake", 1, prompt), turns, None, "1", 1, False)


async def _hanging(folder: Path, count: int) -> list[int]:
    """Processes whose function is in its endless loop by now, not just starting."""
    async with asyncio.timeout(60):
        while len(found := list(folder.glob("hangs-*"))) < count:
            await asyncio.sleep(0.02)
    return sorted(int(file.name.partition("-")[2]) for file in found)


def _children(pid: int) -> list[int]:
    """Living children of a process, by the kernel's account."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except (FileNotFoundError, ProcessLookupError):
                continue
            if int(fields[1]) == pid and fields[0] != "Z":
                found.append(int(entry.name))
    return sorted(found)


def _ends(pid: int) -> bool:
    """Whether the process is gone, or a zombie of somebody else, soon."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state == "Z":
            return True
        time.sleep(0.05)
    return False
