"""The process that starts sandboxed programs: nothing but what was given reaches them, and nothing outlives its owner."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator.api import RetryableError
from orchestrator.sandbox import Sandbox, SandboxLimits, spawner
from tests.support.waiting import wait_for

LIST = "import os; print(sorted(int(n) for n in os.listdir('/proc/self/fd')))"


def running(mark: str) -> list[int]:
    """Processes with the mark in their command line, but for this one."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                if mark.encode() in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
    return found


def test_a_program_has_no_descriptor_but_its_own_three() -> None:
    """One of the spawner's socket would let model-written code start programs outside."""
    outcome = asyncio.run(Sandbox().python(LIST))
    assert outcome.ok, outcome
    assert outcome.stdout.strip() == b"[0, 1, 2, 3]"  # the last is the folder that it lists


def test_a_caller_with_many_descriptors_is_served() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < 2000:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))
    held = [os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC) for _ in range(900)]
    try:
        outcome = asyncio.run(Sandbox().python(LIST))
    finally:
        for number in held:
            os.close(number)
    assert outcome.stdout.strip() == b"[0, 1, 2, 3]"


def test_a_spawner_that_was_killed_is_replaced() -> None:
    async def scenario() -> None:
        sandbox = Sandbox()
        assert (await sandbox.run(["/bin/true"])).ok
        assert spawner._spawner is not None
        os.kill(spawner._spawner._process.pid, signal.SIGKILL)
        spawner._spawner._process.wait()
        assert (await sandbox.run(["/bin/true"])).ok

    asyncio.run(scenario())


def test_a_program_that_cannot_be_started_is_an_error_in_words() -> None:
    async def scenario() -> None:
        number = os.open(os.devnull, os.O_RDWR)
        try:
            await spawner.spawn(
                ["/nowhere/at-all"], stdin=number, stdout=number, stderr=number, passed=[], environment={}
            )
        finally:
            os.close(number)

    with pytest.raises(RetryableError, match="/nowhere/at-all cannot be started"):
        asyncio.run(scenario())


def test_a_cancelled_start_leaves_nothing_and_the_sandbox_in_order() -> None:
    async def scenario() -> None:
        sandbox = Sandbox(SandboxLimits(wall_seconds=30.0), slots=1)
        mark = f"spawner-test-{os.getpid()}"
        program = [sandbox.interpreter, "-I", "-S", "-c", "import time; time.sleep(60)", mark]
        for ticks in range(12):
            task = asyncio.ensure_future(sandbox.run(program))
            for _ in range(ticks):
                await asyncio.sleep(0.004)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert running(mark) == []
        assert (await sandbox.run(["/bin/true"])).ok

    asyncio.run(scenario())


def test_a_time_limit_of_the_caller_is_its_timeout() -> None:
    async def scenario() -> None:
        async with asyncio.timeout(0.3):
            await Sandbox().python("import time; time.sleep(60)")

    with pytest.raises(TimeoutError):
        asyncio.run(scenario())


def test_what_runs_ends_with_the_caller() -> None:
    """kill -9: neither the spawner nor a sandbox is left."""
    mark = f"spawner-orphan-{os.getpid()}"
    program = (
        "import asyncio\nfrom orchestrator.sandbox import Sandbox\ns = Sandbox()\n"
        f"asyncio.run(s.run([s.interpreter, '-I', '-S', '-c', 'import time; time.sleep(60)', '{mark}']))\n"
    )
    caller = subprocess.Popen([sys.executable, "-c", program])
    try:
        wait_for(lambda: len([pid for pid in running(mark) if pid != caller.pid]) > 0, every=0.05)
        caller.kill()
        caller.wait()
        wait_for(lambda: running(mark) == [])
    finally:
        caller.kill()
        caller.wait()


def test_a_program_that_does_not_ask_for_it_ends_with_the_caller_too() -> None:
    mark = "61.375"  # seconds of sleep that nobody else asks for
    program = (
        "import asyncio, os, time\nfrom orchestrator.sandbox.spawner import spawn\nnull = os.open('/dev/null', os.O_RDWR)\n"
        f"started = spawn(['/bin/sleep', '{mark}'], stdin=null, stdout=null, stderr=null, passed=(), environment={{}})\n"
        "asyncio.run(started)\ntime.sleep(60)\n"
    )
    caller = subprocess.Popen([sys.executable, "-c", program])
    try:
        wait_for(lambda: len([pid for pid in running(mark) if pid != caller.pid]) > 0, every=0.05)
    finally:
        caller.kill()
        caller.wait()
    wait_for(lambda: running(mark) == [])
