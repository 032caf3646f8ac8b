"""MPS control: against a stand-in for NVIDIA's program everywhere, and for real where there is a GPU."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator.api import ConfigError, RetryableError
from orchestrator.ops.mps import BINARY, MpsControl

STAND_IN = """#!{python}
import os, pathlib, sys, time
pipes = pathlib.Path(os.environ["CUDA_MPS_PIPE_DIRECTORY"])
state = pipes / "alive"
if sys.argv[1:] == ["-d"]:
    if (pipes / "broken").exists():
        sys.exit("cannot access the control pipe")
    state.touch()
    sys.exit(0)
words = sys.stdin.readline().split()
if (pipes / "hangs").exists():
    time.sleep(60)
if not state.exists():
    sys.exit("Cannot find MPS control daemon process")
if words[0] == "get_server_list":
    print("4711" if (pipes / "client").exists() else "")
elif words[0] == "quit":
    state.unlink()
"""


@pytest.fixture
def stand_in(tmp_path: Path) -> MpsControl:
    program = tmp_path / BINARY
    program.write_text(STAND_IN.format(python=sys.executable))
    program.chmod(0o755)
    return MpsControl(tmp_path / "mps", "0", binary=str(program), timeout=20.0)


def test_a_stand_in_is_started_watched_and_stopped(stand_in: MpsControl, tmp_path: Path) -> None:
    async def main() -> None:
        assert not (await stand_in.check()).daemon
        await stand_in.start()
        assert (await stand_in.check()).servers == ()
        (tmp_path / "mps" / "pipes" / "client").touch()
        assert (await stand_in.check()).servers == (4711,)
        assert await stand_in.revive() is False
        await stand_in.stop()
        await stand_in.stop()
        assert not (await stand_in.check()).daemon

    asyncio.run(main())
    assert (tmp_path / "mps" / "pipes").stat().st_mode & 0o077 == 0
    given = stand_in.environment(30)
    assert given["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "30"
    assert given["CUDA_MPS_PIPE_DIRECTORY"] == str(tmp_path / "mps" / "pipes")
    assert "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE" not in stand_in.environment()


def test_a_stand_in_that_crashed_is_brought_back_and_one_that_cannot_says_why(
    stand_in: MpsControl, tmp_path: Path
) -> None:
    async def main() -> None:
        await stand_in.start()
        (tmp_path / "mps" / "pipes" / "alive").unlink()
        found = await stand_in.check()
        assert not found.daemon
        assert "Cannot find MPS control daemon" in found.error
        assert await stand_in.revive() is True
        (tmp_path / "mps" / "pipes" / "alive").unlink()
        (tmp_path / "mps" / "pipes" / "broken").touch()
        with pytest.raises(RetryableError, match="cannot access the control pipe"):
            await stand_in.revive()

    asyncio.run(main())


def test_a_stand_in_that_hangs_is_given_up_within_its_limit(stand_in: MpsControl, tmp_path: Path) -> None:
    async def main() -> None:
        await stand_in.start()
        (tmp_path / "mps" / "pipes" / "hangs").touch()
        stand_in._timeout = 0.2
        assert "does not answer 'get_server_list' within 0.2 s" in (await stand_in.check()).error

    asyncio.run(main())


def test_a_host_without_the_program_and_a_share_that_is_none_are_refused(stand_in: MpsControl, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="comes with NVIDIA's driver"):
        MpsControl(tmp_path, binary="no-such-program")
    for percentage in (0, -5, 101):
        with pytest.raises(ConfigError, match="from 1 to 100"):
            stand_in.environment(percentage)


CLIENT = "import torch; x = torch.ones(1 << 20, device='cuda'); print(float(x.sum()))"


def clients_say(environment: dict[str, str]) -> list[str]:
    """What two processes print that compute at the same time."""
    command = [sys.executable, "-c", CLIENT]
    clients = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    return [client.communicate(timeout=240)[0].strip() for client in clients]


@pytest.mark.gpu
@pytest.mark.skipif(shutil.which(BINARY) is None, reason="no MPS control program on this host")
def test_two_processes_share_a_gpu_under_mps_and_a_crash_is_noticed(tmp_path: Path) -> None:
    import torch

    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    control = MpsControl(tmp_path / "mps")

    async def main() -> None:
        await control.start()
        try:
            environment = {**os.environ, **control.environment(50)}
            said = await asyncio.to_thread(clients_say, environment)
            assert said == ["1048576.0", "1048576.0"]
            servers = (await control.check()).servers
            assert len(servers) == 1, "both were clients of one server"
            await control.command("quit -t 1")
            assert not (await control.check()).daemon
            assert await control.revive() is True
        finally:
            await control.stop()

    asyncio.run(main())
