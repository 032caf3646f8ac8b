"""MPS for a pool's engines: who may start under it, and who watches it; against a stand-in for NVIDIA's program."""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from orchestrator.api import ConfigError, RetryableError
from orchestrator.ops import mps
from orchestrator.ops.mps import BINARY, MpsControl, MpsHealth, Watcher
from orchestrator.ops.nvidia_driver import find_gpus
from tests.ops.test_mps import STAND_IN
from vllm_rlplugin.kvpool.serving import mps_client
from vllm_rlplugin.options import PluginOptions

A_LIBRARY = "libc.so.6"  # for the driver's, which is only loaded
POOL = "gpu0"


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Of the pool's daemon: its sockets need a short path, which pytest's own folders may not have."""
    with tempfile.TemporaryDirectory(prefix="mps-") as short:
        for module in (mps_client, mps):
            monkeypatch.setattr(module, "FOLDER", Path(short))
        yield mps_client.folder_of(POOL)


@pytest.fixture
def control(folder: Path, tmp_path: Path) -> MpsControl:
    program = tmp_path / BINARY
    program.write_text(STAND_IN.format(python=sys.executable))
    program.chmod(0o755)
    return MpsControl(folder, binary=str(program), timeout=20.0)


def enter(percentage: int = 30, library: str = A_LIBRARY) -> dict[str, str]:
    environment: dict[str, str] = {}
    mps_client.join_mps(POOL, percentage, environment, library=library)
    return environment


def test_both_sides_mean_the_same_folder(folder: Path) -> None:
    assert mps.mps_folder(POOL) == folder


def test_an_engine_starts_under_mps_only_while_a_stand_in_for_it_is_watched(folder: Path, control: MpsControl) -> None:
    said: list[str] = []

    async def main() -> None:
        with pytest.raises(ConfigError, match=r"start `rl-coserve mps --pool gpu0` first"):
            enter()
        over = asyncio.Event()
        running = asyncio.create_task(Watcher(control, folder, said.append).run(over, 0.05))
        while not said:
            await asyncio.sleep(0.01)
        assert enter() == control.environment(30)
        with pytest.raises(ConfigError, match="another process is watching"):
            Watcher(control, folder, said.append)
        (folder / "pipes" / "alive").unlink()
        while len(said) < 2:
            await asyncio.sleep(0.01)
        over.set()
        await running
        assert not (await control.check()).daemon
        with pytest.raises(ConfigError, match="has no MPS daemon"):
            enter()

    asyncio.run(main())
    assert said == ["MPS is up", "MPS did not answer and was restarted: restart the engines that it served"]
    assert folder.stat().st_mode & 0o077 == 0


def test_a_stand_in_that_does_not_start_ends_the_watch_and_frees_its_place(folder: Path, control: MpsControl) -> None:
    (folder / "pipes").mkdir(parents=True)
    (folder / "pipes" / "broken").touch()
    for _ in range(2):
        with pytest.raises(RetryableError, match="cannot access the control pipe"):
            asyncio.run(Watcher(control, folder, print).run(asyncio.Event()))


def test_what_cannot_be_under_mps_is_one_error_that_says_why(folder: Path, control: MpsControl) -> None:
    with pytest.raises(ConfigError, match=r"there is no driver here \(libcuda-not-here\.so") as caught:
        enter(library="libcuda-not-here.so")
    assert caught.value.field == "kv_pool_mps"
    mps_client.check_mps(0, "cpu", {})
    assert enter(0, "libcuda-not-here.so") == {}
    with pytest.raises(ConfigError, match="this engine runs on cpu"):
        mps_client.check_mps(30, "cpu", {})
    with pytest.raises(ConfigError, match="CUDA started without it"):
        mps_client.check_mps(30, "cuda", {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "40"})
    mps_client.check_mps(30, "cuda", {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "30"})
    for percentage in (-1, 101):
        with pytest.raises(ConfigError, match="from 1 to 100 per cent"):
            PluginOptions(kv_pool=POOL, kv_pool_mps=percentage)
    with pytest.raises(ConfigError, match="only with kv_pool"):
        PluginOptions(kv_pool_mps=30)
    with pytest.raises(ConfigError, match="too long for a path"):
        Watcher(control, folder.with_name("x" * 90), print)


@pytest.mark.skipif(not find_gpus().missing, reason="there is a GPU here")
def test_the_command_refuses_a_host_without_a_gpu(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"MPS divides an NVIDIA GPU: no driver .*--rl-kv-pool-admission dual"):
        mps.run_mps(argparse.Namespace(pool=POOL, devices="", status=False, json=False))
    assert not folder.exists()


def test_the_status_shows_server_and_clients(
    folder: Path, control: MpsControl, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in for the program, another for NVML."""
    library: Any = types.ModuleType("pynvml")
    library.NVMLError = type("NVMLError", (Exception,), {})
    library.nvmlInit, library.nvmlDeviceGetCount = (lambda: None), (lambda: 2)
    library.nvmlDeviceGetHandleByIndex = lambda index: index
    library.nvmlDeviceGetMPSComputeRunningProcesses = lambda index: [types.SimpleNamespace(pid=40 + index)]
    monkeypatch.setitem(sys.modules, "pynvml", library)
    options = argparse.Namespace(pool=POOL, devices="", status=True, json=False)
    assert mps.run_mps(options, binary=control._binary) == 1
    asyncio.run(control.start())
    (folder / "pipes" / "client").touch()
    assert mps.run_mps(options, binary=control._binary) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "MPS: daemon up; server process: 4711; clients by NVML: 40, 41"
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert mps.mps_clients() is None
    assert mps.describe_mps(MpsHealth(True), None) == "MPS: daemon up; server process: none yet"
