"""``rl-coserve mps``: NVIDIA's MPS for the engines of one pool, started, watched, and stopped with this process.

Guarantees: one watcher a pool, by a lock that the kernel drops with it; engines refuse to start without. A daemon that does not
answer is started anew, said with a line; its clients have failed then, and whoever started them restarts them. Ended by SIGINT or
SIGTERM it ends daemon and server. The clients it shows are those that NVML sees under MPS, where pynvml is installed.
"""

from __future__ import annotations

import argparse
import asyncio
import fcntl
import json
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from orchestrator.api import ConfigError, RetryableError
from orchestrator.ops.mps import BINARY, MpsControl, MpsHealth
from orchestrator.ops.nvidia_driver import gpus
from orchestrator.ops.nvml import NvmlUnavailable, handles, started

FOLDER = Path("/dev/shm")
WATCH_SECONDS = 5.0
_SOCKET_PATH = 107  # bytes, of the kernel
_OTHERWISE = "without it let rollouts run in time that serving has left (--rl-kv-pool-admission dual)"


def folder_of(pool: str) -> Path:
    """Of the pool's daemon: the same in ``vllm_rlplugin/kvpool/serving/mps_client.py``."""
    return FOLDER / f"rlc-mps-{os.getuid()}-{pool}"


class Watcher:
    """Of one pool's daemon. ``say``: one line for people. Raises ConfigError: another one watches it, or the name is too long."""

    def __init__(self, control: MpsControl, folder: Path, say: Callable[[str], None]) -> None:
        if len(os.fsencode(folder / "pipes" / "control_privileged")) > _SOCKET_PATH:
            raise ConfigError("--pool", folder.name, "is too long for the sockets of MPS")
        self._control, self._say = control, say
        folder.mkdir(mode=0o700, exist_ok=True)
        if folder.stat().st_uid != os.geteuid():
            raise ConfigError("--pool", str(folder), "belongs to another user")
        self._file = os.open(folder / "watched", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(self._file)
            raise ConfigError("--pool", folder.name, "another process watches its MPS daemon") from error

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
                        self._say("MPS did not answer and was started anew: restart the engines that it served")
        finally:
            try:
                await self._control.stop()
            finally:
                os.close(self._file)


def clients() -> list[int] | None:
    """Processes that compute under MPS on this host's GPUs; None without pynvml or a GPU."""
    try:
        library = started()
    except NvmlUnavailable:
        return None
    found: set[int] = set()
    try:
        for handle in handles(library):
            found |= {int(process.pid) for process in library.nvmlDeviceGetMPSComputeRunningProcesses(handle)}
    except library.NVMLError:
        return None
    return sorted(found)


def describe(health: MpsHealth, seen: list[int] | None) -> str:
    """For people."""
    if not health.daemon:
        return f"MPS: no daemon ({health.error})"
    servers = ", ".join(map(str, health.servers)) or "none yet"
    computing = "" if seen is None else f"; clients by NVML: {', '.join(map(str, seen)) or 'none'}"
    return f"MPS: daemon up; server process: {servers}{computing}"


def run(options: argparse.Namespace, *, binary: str = BINARY) -> int:
    """The command; returns the exit code. Raises ConfigError: no GPU, no MPS on this host, or another watcher."""
    there = gpus()
    if there.missing and binary == BINARY:
        raise ConfigError("--pool", options.pool, f"MPS divides an NVIDIA GPU: {there.missing}; {_OTHERWISE}")
    folder = folder_of(options.pool)
    control = MpsControl(folder, options.devices, binary=binary, otherwise=_OTHERWISE)
    if options.status:
        health, seen = asyncio.run(control.check()), clients()
        print(json.dumps({**asdict(health), "clients": seen}) if options.json else describe(health, seen))
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
