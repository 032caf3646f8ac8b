"""Real sessions behind the pool: what an environment does costs one trajectory, and nothing of a process is left."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from orchestrator import child_process
from orchestrator.api import Completion, ConfigError, GenerationRequest, Prompt, Sampling, TrajectoryError, jsontext
from orchestrator.build import build_environment_pool
from orchestrator.config import load_config
from orchestrator.environments import environment_wire, remote_session
from orchestrator.environments.environment_pool import EnvPool, PoolSettings
from orchestrator.environments.environment_session import EnvironmentBackend
from orchestrator.environments.environment_wire import longest_answer
from orchestrator.environments.inprocess import InProcessBackend
from orchestrator.environments.remote_session import RemoteSession
from orchestrator.environments.subprocesses import SubprocessBackend
from orchestrator.envs import EnvManager, Episode
from orchestrator.events import EventLog, MemorySink
from orchestrator.runtime.preflight import make_task
from orchestrator.sim.simulated_run import simulate

pytestmark = pytest.mark.slow

HERE = Path(__file__).parents[1] / "support"


def _load(name: str) -> Any:
    """A module beside this one: pytest puts no folder on the path."""
    spec = importlib.util.spec_from_file_location(name, HERE / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


MisbehavingTask = _load("misbehaving").MisbehavingTask
SAMPLING = Sampling(2, stop_token_ids=(1,))
STEP_LIMIT = 3.0  # seconds in a process of its own; the honest ones take milliseconds
GONE_LIMIT = 30.0

ANYWHERE = {
    "be good": "",
    "raise": "environment_error",
    "raise something unspeakable": "environment_error",
    "exit": "environment_error",
    "hang": "environment_timeout",
    "hang in reset": "environment_timeout",
    "swallow the cancellation": "environment_timeout",
    "return nothing": "environment_output",
    "return NaN": "environment_not_finite",
    "return text for a number": "environment_output",
    "return text for tokens": "environment_output",
    "return no observation": "environment_output",
    "return a number for done": "environment_output",
    "say too much": "environment_output",
    "speak another language": "environment_output",
    "hang in close": "",
}
IN_A_PROCESS = {
    "raise a cancellation": "environment_error",
    "busy loop": "environment_timeout",
    "end the process": "environment_died",
    "crash": "environment_died",
    "flood": "environment_output",
    "take all memory": "environment_error",
    "print": "",
    "start children": "environment_timeout",
}


class EchoProxy:
    async def generate(self, request: GenerationRequest) -> Completion:
        return Completion(request.request_id, (5, 1), (-0.5, -0.1), ((4, 2),), "stop")

    def note_fault(self, what: str, detail: str) -> None: ...


def subprocesses(**options: Any) -> SubprocessBackend:
    return SubprocessBackend("misbehaving:MisbehavingTask", {}, limits={"memory_mb": 2048, **options})


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [str(HERE), str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))


def with_pool(
    backend: EnvironmentBackend, scenario: Callable[[EnvPool, EnvManager], Awaitable[None]], size: int = 8
) -> list[Any]:
    """Runs the scenario; returns the events."""
    sink = MemorySink()

    async def whole() -> None:
        settings = PoolSettings(
            size, parallel_starts=3, kill_timeout=3.0, recycle_timeout=3.0, start_tries=2, backoff_first=0.1
        )
        pool = EnvPool(backend, settings, EventLog(sink, asyncio.get_running_loop().time))
        manager = EnvManager(
            MisbehavingTask(),
            EchoProxy(),  # type: ignore[arg-type]
            step_timeout=STEP_LIMIT if backend.name == "subprocess" else STEP_LIMIT / 3,
            trajectory_timeout=60.0,
            is_stale=lambda _: False,
            source=pool,
        )
        try:
            await pool.open()
            await scenario(pool, manager)
        finally:
            await pool.close()

    asyncio.run(asyncio.wait_for(whole(), 200))
    return [json.loads(line) for line in sink.lines]


async def cause_of(manager: EnvManager, what: str) -> str:
    """How an episode ends: "" well, else the cause."""
    episode = Episode(what, "g", Prompt("key", "misbehaving", 1, what), 0.0)
    try:
        await manager.play(episode, SAMPLING)
    except TrajectoryError as error:
        return error.cause if error.detail else f"{error.cause}, which says nothing"
    assert episode.env_version == "misbehaving 1"
    return ""


def gone(pids: list[int]) -> bool:
    """Whether none of them runs any more, within the limit."""
    deadline = time.monotonic() + GONE_LIMIT
    while time.monotonic() < deadline:
        if not any(_lives(pid) for pid in pids):
            return True
        time.sleep(0.05)
    return False


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def descendants(pid: int) -> list[int]:
    """With the children that went into sessions of their own, while their parents live."""
    found = []
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            for child in map(int, file.read_text().split()):
                found += [child, *descendants(child)]
    return found


# -- bad input ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["in-process-pool", "subprocess"])
def test_each_misbehaviour_has_its_cause_and_the_pool_goes_on(kind: str) -> None:
    wanted = dict(ANYWHERE) if kind == "in-process-pool" else {**ANYWHERE, **IN_A_PROCESS}

    async def scenario(pool: EnvPool, manager: EnvManager) -> None:
        causes = await asyncio.gather(*(cause_of(manager, what) for what in wanted))
        assert dict(zip(wanted, causes, strict=True)) == wanted
        assert await cause_of(manager, "be good") == ""
        stats = pool.stats()
        bad = sum(1 for cause in wanted.values() if cause)
        assert stats["replaced"]["misbehaved"] == bad
        assert stats["busy"] == 0

    backend = InProcessBackend(MisbehavingTask()) if kind == "in-process-pool" else subprocesses()
    with_pool(backend, scenario)


class Apart(MisbehavingTask):  # type: ignore[misc,valid-type]
    def environment_target(self) -> tuple[str, dict[str, Any]]:
        return "misbehaving:MisbehavingTask", {}


def test_no_more_of_an_answer_is_parsed_than_a_context_can_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is parsed holds the event loop up, 12 ms per MiB."""
    parsed: list[int] = []

    def parse_object(text: str | bytes, **options: Any) -> dict[str, Any]:
        parsed.append(len(text))
        return real(text, **options)

    async def scenario(pool: EnvPool, manager: EnvManager) -> None:
        assert await cause_of(manager, "say far too much") == "environment_output"
        assert await cause_of(manager, "be good") == ""

    real = jsontext.parse_object
    monkeypatch.setattr(jsontext, "parse_object", parse_object)
    config, events = load_config(None, ["environment.backend=subprocess"]), EventLog(MemorySink(), lambda: 0.0)
    made: Any = build_environment_pool(config, Apart(), "run", events)
    with_pool(made._backend, scenario)
    assert len(parsed) > 4
    assert max(parsed) <= longest_answer(Apart()) < 1 << 17


def test_an_answer_may_have_as_many_tokens_as_the_longest_context_of_a_mixture() -> None:
    parts = {name: SimpleNamespace(max_context_tokens=tokens) for name, tokens in (("a", 10), ("b", 32_000))}
    task: Any = SimpleNamespace(max_context_tokens=20, vocabulary=("",) * 151_936, parts=parts)
    full = environment_wire.encode_line({"id": 9, "result": {"observation": (151_935,) * 32_000}})
    assert len(full) <= longest_answer(task) < len(full) + (1 << 16)
    parts["b"].max_context_tokens = 10_000_000
    assert longest_answer(task) == environment_wire.MAX_LINE


@pytest.mark.long
def test_a_session_is_used_by_one_episode_after_the_other_and_renewed_between() -> None:
    async def scenario(pool: EnvPool, manager: EnvManager) -> None:
        for _ in range(5):
            assert await cause_of(manager, "be good") == ""
        assert pool.stats()["started"] == 1

    with_pool(subprocesses(), scenario, size=1)


def test_an_environment_that_cannot_be_built_says_why() -> None:
    async def scenario(pool: EnvPool, manager: EnvManager) -> None: ...

    with pytest.raises(Exception, match=r"no environment can be started .*the library is not there"):
        with_pool(SubprocessBackend("misbehaving:no_such_thing", {}), scenario)


@pytest.mark.long
def test_another_distribution_on_the_other_side_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(pool: EnvPool, manager: EnvManager) -> None: ...

    monkeypatch.setattr(remote_session.orchestrator, "__version__", "0.0.0+other")
    with pytest.raises(ConfigError, match="use the same there"):
        with_pool(subprocesses(), scenario)


# -- processes ---------------------------------------------------------------------------------------------------------


def test_kill_ends_what_an_environment_started_even_what_left_its_session() -> None:
    async def scenario() -> None:
        session = await subprocesses().start("e1")
        channel: Any = session._channel
        await session.reset(Prompt("k", "misbehaving", 1, "start children"))
        step = asyncio.create_task(session.step((1,)))
        while len(pids := descendants(channel.process.pid)) < 3:
            await asyncio.sleep(0.05)
        step.cancel()
        await session.kill()
        assert channel.process.returncode is not None
        assert await asyncio.to_thread(gone, [channel.process.pid, *pids])
        with pytest.raises(TrajectoryError, match="environment_protocol"):
            await session.ping()

    asyncio.run(asyncio.wait_for(scenario(), 100))


@pytest.mark.long
def test_orphans_of_an_environment_are_reaped_while_it_lives() -> None:
    async def scenario() -> None:
        session = await subprocesses().start("e1")
        channel: Any = session._channel
        await session.reset(Prompt("k", "misbehaving", 1, "leave orphans"))
        await session.step((1,))
        deadline = time.monotonic() + GONE_LIMIT
        while len(descendants(channel.process.pid)) > 1 and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        assert len(descendants(channel.process.pid)) == 1  # the environment's own process
        await session.kill()

    asyncio.run(asyncio.wait_for(scenario(), 100))


@pytest.mark.long
def test_processor_time_of_one_call_is_limited() -> None:
    async def scenario() -> None:
        session = await subprocesses(cpu_seconds=1).start("e1")
        await session.reset(Prompt("k", "misbehaving", 1, "busy loop"))
        with pytest.raises(TrajectoryError, match=r"environment_died: .*cpu_seconds"):
            await session.step((1,))
        await session.kill()

    asyncio.run(asyncio.wait_for(scenario(), 100))


def test_an_answer_after_a_cancelled_call_is_never_taken_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    class Late:
        async def exchange(self, line: bytes) -> bytes:
            await asyncio.sleep(0.01)
            return b'{"id":1,"result":{"observation":[2]}}\n'

        async def kill(self) -> None: ...

    async def scenario() -> None:
        session = RemoteSession(Late(), "e1")
        first = asyncio.create_task(session.reset(Prompt("k", "t", 1, "p")))
        await asyncio.sleep(0)
        first.cancel()
        with pytest.raises(TrajectoryError, match="its reset was not answered"):
            await session.step((1,))

    asyncio.run(scenario())


_ORCHESTRATOR = """
import asyncio, sys
from tests.environments.test_remote_session import *

async def main():
    pool = EnvPool(subprocesses(), PoolSettings(4, warm=2), EventLog(MemorySink(), asyncio.get_running_loop().time))
    await pool.open()
    prompt = Prompt("k", "misbehaving", 1, "start children")
    environment = await pool.acquire(prompt, lambda _: None)
    await environment.reset(prompt)
    asyncio.create_task(environment.step((1,)))
    while len(descendants(os.getpid())) < 8:
        await asyncio.sleep(0.05)
    print(json.dumps(descendants(os.getpid())), flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.long)])
def test_when_the_orchestrator_is_killed_no_process_of_an_environment_is_left(number: signal.Signals) -> None:
    process = subprocess.Popen([sys.executable, "-c", _ORCHESTRATOR], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        pids: list[int] = json.loads(process.stdout.readline())
        assert len(pids) >= 8  # a watcher and a worker each, and two children of one of them
        assert all(_lives(pid) for pid in pids)
        process.send_signal(number)
        process.wait()
        assert gone(pids)
    finally:
        process.kill()
        process.wait()


def test_what_an_environment_sees_holds_no_secret_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RL_COSERVE_TOKEN", "nobody-may-see-4711")

    async def scenario() -> None:
        session = await subprocesses().start("e1")
        channel: Any = session._channel
        seen = [
            Path(f"/proc/{pid}/environ").read_bytes()
            for pid in [channel.process.pid, *descendants(channel.process.pid)]
        ]
        assert len(seen) == 2
        assert not any(b"nobody-may-see-4711" in variables for variables in seen)
        await session.kill()

    asyncio.run(asyncio.wait_for(scenario(), 100))


def test_the_task_of_a_config_plays_in_another_process() -> None:
    config = load_config(None, ["environment.backend=subprocess", "environment.warm=0", "environment.size=1"])

    async def scenario() -> None:
        task = make_task(config)
        events = EventLog(MemorySink(), asyncio.get_running_loop().time)
        pool = build_environment_pool(config, task, "run-1", events)
        assert pool is not None
        try:
            await pool.open()
            here, prompt = task.environment(), next(task.prompts("train", 0))
            environment = await pool.acquire(prompt, lambda _: None)
            assert environment.version == here.version
            assert await environment.reset(prompt) == await here.reset(prompt)
            assert await environment.step((3, 1)) == await here.step((3, 1))
            await pool.release(environment, True)
        finally:
            await pool.close()

    asyncio.run(asyncio.wait_for(scenario(), 100))


# -- config ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("environment.backend=docker", "environment.backend"),
        ("environment.backend=kubernetes", "environment.kubernetes.image"),
        ("environment.memory_mb=8", "no Python process fits"),
        ("environment.sise=3", "did you mean environment.size"),
        ("environment.kubernetes.namespace=Not_Valid", "environment.kubernetes.namespace"),
    ],
)
def test_a_wrong_setting_is_named_with_its_fix(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(None, [override])


def test_the_simulator_starts_no_processes() -> None:
    with pytest.raises(ConfigError, match="the simulator starts no processes"):
        simulate(load_config(None, ["environment.backend=subprocess"]))


def test_a_process_that_closed_its_pipe_and_lives_on_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its pipe is lost before anybody ends it: nothing is left to abort."""
    monkeypatch.setattr(child_process, "KILL_LIMIT", 0.5)
    code = "import os, sys, time; os.close(0); print('up', flush=True); time.sleep(60)"

    async def end() -> int | None:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", code),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        await process.stdout.readline()
        while not process.stdin.transport.is_closing():
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        await child_process.kill_watched(process)
        return process.returncode

    assert asyncio.run(end()) == -signal.SIGKILL
