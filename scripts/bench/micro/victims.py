"""Processes as :mod:`scripts.bench.micro.kills` sees them: in /proc, without a library."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from pathlib import Path

_GONE = (FileNotFoundError, ProcessLookupError, PermissionError)


class RedisProcess:
    """A redis-server that keeps what it is told; the folder remembers its port, so that a later one takes its place."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        remembered = folder / "redis-port"
        if not remembered.exists():
            with socket.create_server(("127.0.0.1", 0)) as free:
                remembered.write_text(str(free.getsockname()[1]), encoding="utf-8")
        self.port = int(remembered.read_text(encoding="utf-8"))
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def pid(self) -> int:
        """Of the one that runs."""
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Start it and wait until it serves what it had."""
        keep = ["--save", "", "--appendonly", "yes", "--appendfsync", "always", "--dir", str(self._folder)]
        command = ["redis-server", "--bind", "127.0.0.1", "--port", str(self.port), *keep]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + 60.0
        while time.monotonic() < deadline:
            with (
                contextlib.suppress(OSError),
                socket.create_connection(("127.0.0.1", self.port), timeout=5) as connection,
            ):
                connection.sendall(b"PING\r\n")
                if connection.recv(64) == b"+PONG\r\n":  # else it is still loading
                    return
            time.sleep(0.02)
        raise TimeoutError("redis-server did not start")

    def kill(self) -> None:
        """With SIGKILL. Idempotent."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()


def identity(pid: int) -> str:
    """Start time and command of a living process, "" when it is gone: a process id alone may be somebody else's by now."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except _GONE:
        return ""
    fields = stat.rpartition(")")[2].split()
    return "" if fields[0] in "ZX" else f"{fields[19]} {command.strip()[:120]}"


def alive(pid: int) -> bool:
    """Whether it runs."""
    return bool(identity(pid))


def children(pid: int) -> list[int]:
    """Of all its threads."""
    found: list[int] = []
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(*_GONE):
            found += [int(child) for child in file.read_text(encoding="utf-8").split()]
    return found


def descendants(pid: int) -> list[int]:
    """Children, their children, and so on."""
    found = list(children(pid))
    for child in found:
        found += children(child)
    return found


def environment_workers(orchestrator: int) -> list[int]:
    """Environment processes, without their watchers."""

    def is_one(pid: int) -> bool:
        return "orchestrator.environments.environment_process" in identity(pid)

    watchers = [pid for pid in children(orchestrator) if is_one(pid)]
    return [pid for watcher in watchers for pid in children(watcher) if is_one(pid)]


def marked(variable: str, mark: str) -> dict[int, str]:
    """Living processes that were started with this environment variable."""
    wanted, found = f"{variable}={mark}".encode(), dict[int, str]()
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(*_GONE):
            if wanted in Path(entry.path, "environ").read_bytes().split(b"\0") and (name := identity(int(entry.name))):
                found[int(entry.name)] = name
    return found
