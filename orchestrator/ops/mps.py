"""NVIDIA's Multi-Process Service on one host: started, watched, brought back (RollPacker 4.3); ``rl-coserve mps``.

MPS lets the processes of a judge and of a rollout engine compute on one GPU at the same time. It gives no error isolation: a
fault of one client ends the server for all of them.

Guarantees: one control daemon with folders of its own, not the system's; what it does not do, or not within ``timeout``, is a
RetryableError in its words; :meth:`MpsControl.check` says whether the daemon answers, and :meth:`MpsControl.revive` starts it
anew: clients of the server that is gone have failed then, and are restarted by their owners. ``stop`` is idempotent and ends
the server with the daemon.

The command, for the engines of one pool: one watcher a pool, by a lock that the kernel drops with it; engines refuse to start
without. A daemon that does not answer is started anew, said with a line. Ended by SIGINT or SIGTERM it ends daemon and server.
The clients it shows are those that NVML sees under MPS, where pynvml is installed.
"""

from __future__ import annotations

import argparse
import asyncio
import fcntl
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from orchestrator.api import ConfigError, RetryableError
from orchestrator.ops.nvidia_driver import NvmlUnavailable, find_gpus, nvml_handles, start_nvml

BINARY = "nvidia-cuda-mps-control"
TIMEOUT = 10.0  # seconds for one command
FOLDER = Path("/dev/shm")
WATCH_SECONDS = 5.0
_SOCKET_PATH = 107  # bytes, of the kernel
_OTHERWISE = "without it, let rollouts run in serving's idle time (--rl-kv-pool-admission dual)"


@dataclass(frozen=True, slots=True)
class MpsHealth:
    """``daemon``: it answers. ``servers``: process ids; none before the first client came. ``error``: why not, in words."""

    daemon: bool
    servers: tuple[int, ...] = ()
    error: str = ""


class MpsControl:
    """``folder``: for its pipes and logs; ``devices``: CUDA_VISIBLE_DEVICES of the daemon, "" for all. Raises ConfigError where
    the control program is not installed."""

    def __init__(
        self,
        folder: Path,
        devices: str = "",
        *,
        binary: str = BINARY,
        timeout: float = TIMEOUT,
        otherwise: str = "without it set reward.judge.streamed.mps to false",
    ) -> None:
        found = shutil.which(binary)
        if found is None:
            fix = f"is not on this host: it comes with NVIDIA's driver; {otherwise}"
            raise ConfigError("mps", binary, fix)
        self._binary = found
        self._timeout = timeout
        self._folder = folder
        self._devices = devices

    def environment(self, percentage: int | None = None) -> dict[str, str]:
        """What a client's process starts with. ``percentage`` of the GPU's threads at most (None: the daemon's default)."""
        given = {
            "CUDA_MPS_PIPE_DIRECTORY": str(self._folder / "pipes"),
            "CUDA_MPS_LOG_DIRECTORY": str(self._folder / "logs"),
        }
        if percentage is not None:
            if not 0 < percentage <= 100:
                raise ConfigError("mps percentage", percentage, "give a share from 1 to 100")
            given["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = str(percentage)
        return given

    async def start(self) -> None:
        """Start the daemon, which puts itself into the background. Raises RetryableError."""
        for name in ("pipes", "logs"):
            folder = self._folder / name
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        await self.command("", "-d")
        if not (found := await self.check()).daemon:
            raise RetryableError(f"MPS did not start: {found.error}")

    async def check(self) -> MpsHealth:
        """Whether it works. Raises nothing."""
        try:
            answer = await self.command("get_server_list")
        except RetryableError as error:
            return MpsHealth(False, error=str(error))
        return MpsHealth(True, tuple(int(word) for word in answer.split() if word.isdigit()))

    async def revive(self) -> bool:
        """Start it anew if it does not answer. Returns whether that was necessary. Raises RetryableError."""
        if (await self.check()).daemon:
            return False
        await self.start()
        return True

    async def stop(self) -> None:
        """End server and daemon."""
        if (await self.check()).daemon:
            await self.command("quit -t 5")

    async def command(self, words: str, *arguments: str) -> str:
        """One command of the control program; its answer. Raises RetryableError."""
        environment = {"PATH": "/usr/bin:/bin", **self.environment()}
        if self._devices:
            environment["CUDA_VISIBLE_DEVICES"] = self._devices
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            self._binary, *arguments, stdin=pipe, stdout=pipe, stderr=asyncio.subprocess.STDOUT, env=environment
        )
        try:
            async with asyncio.timeout(self._timeout):
                answer, _ = await process.communicate(f"{words}\n".encode() if words else b"")
        except TimeoutError as error:
            process.kill()
            await process.wait()
            raise RetryableError(
                f"MPS does not answer {words or ' '.join(arguments)!r} within {self._timeout:g} s"
            ) from error
        said = answer.decode(errors="replace").strip()
        if process.returncode:
            raise RetryableError(f"MPS rejected {words or ' '.join(arguments)!r}: {said[:300] or process.returncode}")
        return said


def mps_folder(pool: str) -> Path:
    """Of the pool's daemon: the same in ``vllm_rlplugin/kvpool/serving/mps_client.py``."""
    return FOLDER / f"rlc-mps-{os.getuid()}-{pool}"


class Watcher:
    """Of one pool's daemon. ``say``: one line for people. Raises ConfigError: another one watches it, or the name is too long."""

    def __init__(self, control: MpsControl, folder: Path, say: Callable[[str], None]) -> None:
        if len(os.fsencode(folder / "pipes" / "control_privileged")) > _SOCKET_PATH:
            raise ConfigError("--pool", folder.name, "is too long for a path of MPS's sockets")
        self._control, self._say = control, say
        folder.mkdir(mode=0o700, exist_ok=True)
        if folder.stat().st_uid != os.geteuid():
            raise ConfigError("--pool", str(folder), "belongs to another user")
        self._file = os.open(folder / "watched", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(self._file)
            raise ConfigError("--pool", folder.name, "another process is watching its MPS daemon") from error

    async def run(self, over: asyncio.Event, seconds: float = WATCH_SECONDS) -> None:
        """Until ``over``; the daemon is stopped then. Raises RetryableError where it does not start."""
        try:
            if await self._control.revive():
                self._say("MPS is up")
            while not over.is_set():
                try:
                    async with asyncio.timeout(seconds):
                        await over.wait()
                except TimeoutError:
                    if await self._control.revive():
                        self._say("MPS did not answer and was restarted: restart the engines that it served")
        finally:
            try:
                await self._control.stop()
            finally:
                os.close(self._file)


def mps_clients() -> list[int] | None:
    """Processes that compute under MPS on this host's GPUs; None without pynvml or a GPU."""
    try:
        library = start_nvml()
    except NvmlUnavailable:
        return None
    found: set[int] = set()
    try:
        for handle in nvml_handles(library):
            found |= {int(process.pid) for process in library.nvmlDeviceGetMPSComputeRunningProcesses(handle)}
    except library.NVMLError:
        return None
    return sorted(found)


def describe_mps(health: MpsHealth, seen: list[int] | None) -> str:
    """For people."""
    if not health.daemon:
        return f"MPS: no daemon ({health.error})"
    servers = ", ".join(map(str, health.servers)) or "none yet"
    computing = "" if seen is None else f"; clients by NVML: {', '.join(map(str, seen)) or 'none'}"
    return f"MPS: daemon up; server process: {servers}{computing}"


def run_mps(options: argparse.Namespace, *, binary: str = BINARY) -> int:
    """The command; returns the exit code. Raises ConfigError: no GPU, no MPS on this host, or another watcher."""
    there = find_gpus()
    if there.missing and binary == BINARY:
        raise ConfigError("--pool", options.pool, f"MPS divides an NVIDIA GPU: {there.missing}; {_OTHERWISE}")
    folder = mps_folder(options.pool)
    control = MpsControl(folder, options.devices, binary=binary, otherwise=_OTHERWISE)
    if options.status:
        health, seen = asyncio.run(control.check()), mps_clients()
        print(json.dumps({**asdict(health), "clients": seen}) if options.json else describe_mps(health, seen))
        return 0 if health.daemon else 1
    watcher = Watcher(control, folder, lambda text: print(text, flush=True))

    async def watch() -> None:
        over = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, over.set)
        await watcher.run(over)

    try:
        asyncio.run(watch())
    except RetryableError as error:
        print(f"rl-coserve mps: {error}", file=sys.stderr)
        return 1
    return 0
