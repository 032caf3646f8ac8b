"""Processes as :mod:`scripts.bench.micro.kills` sees them, in /proc, and the servers that it brings along and takes away."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

_GONE = (FileNotFoundError, ProcessLookupError, PermissionError)


_DIES_WITH_US = ("setpriv", "--pdeathsig", "KILL")
START_SECONDS = 60.0


def free_port() -> int:
    """One that nobody listens at now."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def remembered_port(file: Path) -> int:
    """The same for all that ask with this file."""
    if not file.exists():
        file.write_text(str(free_port()), encoding="utf-8")
    return int(file.read_text(encoding="utf-8"))


class MasterProcess:
    """A mooncake_master that is not the run's own; one that takes its place listens at the same port, and knows nothing."""

    def __init__(self, folder: Path) -> None:
        self.port = remembered_port(folder / "master-port")
        self.address = f"127.0.0.1:{self.port}"
        self._log = folder / "master.log"
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        """Start it, and wait until it listens."""
        binary = str(Path(sys.executable).parent / "mooncake_master")
        ports = [f"--rpc_port={self.port}", "--metrics_host=127.0.0.1", f"--metrics_port={free_port()}"]
        command = [*_DIES_WITH_US, binary, "--rpc_address=127.0.0.1", *ports, "--client_ttl=60", "-logtostderr"]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen([*command, "--default_kv_lease_ttl=10000"], stdout=log, stderr=log)
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=5):
                return
            time.sleep(0.05)
        raise TimeoutError("mooncake_master did not start")

    def kill(self) -> None:
        """With SIGKILL. Idempotent."""
        _end(self._process)


def _end(process: subprocess.Popen[bytes] | None) -> None:
    if process is not None and process.poll() is None:
        process.send_signal(signal.SIGKILL)
        process.wait()


class RedisProcess:
    """A redis-server that keeps what it is told; the folder remembers its port, so that a later one takes its place."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._home = folder / "redis-home"  # names the folder of the one that has the data
        self.port = remembered_port(folder / "redis-port")
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
        home = self._home.read_text(encoding="utf-8") if self._home.exists() else "redis-0"
        self._process = self._launch(self.port, self._folder / home)

    def kill(self) -> None:
        """With SIGKILL. Idempotent."""
        _end(self._process)

    def fail_over(self) -> None:
        """It is killed, and a replica takes its address. As replication does not wait, the last writes may be missing."""
        name, port = f"redis-{time.time_ns()}", free_port()
        replica = self._launch(port, self._folder / name)
        self._ask(port, f"REPLICAOF 127.0.0.1 {self.port}")
        deadline = time.monotonic() + START_SECONDS
        wanted = ("master_link_status:up", "aof_rewrite_in_progress:0", "aof_rewrite_scheduled:0", "aof_enabled:1")
        while not all(
            one in self._ask(port, "INFO replication") + self._ask(port, "INFO persistence") for one in wanted
        ):
            if time.monotonic() > deadline:
                raise TimeoutError("the replica did not come up")
            time.sleep(0.05)
        self.kill()
        self._ask(port, "REPLICAOF NO ONE")
        answer = self._ask(port, f"CONFIG SET port {self.port}")
        if not answer.startswith("+OK"):
            raise RuntimeError(f"the replica did not take the address: {answer}")
        self._process = replica
        self._home.write_text(name, encoding="utf-8")

    def _launch(self, port: int, home: Path) -> subprocess.Popen[bytes]:
        home.mkdir(exist_ok=True)
        keep = ["--save", "", "--appendonly", "yes", "--appendfsync", "always", "--dir", str(home)]
        command = [*_DIES_WITH_US, "redis-server", "--bind", "127.0.0.1", "--port", str(port), *keep]
        process = subprocess.Popen([*command, "--repl-diskless-sync-delay", "0"], stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                if self._ask(port, "PING").startswith("+PONG"):  # else it is still loading
                    return process
            time.sleep(0.02)
        raise TimeoutError("redis-server did not start")

    @staticmethod
    def _ask(port: int, command: str) -> str:
        """A command, and the beginning of its answer."""
        with socket.create_connection(("127.0.0.1", port), timeout=5) as connection:
            connection.sendall(f"{command}\r\n".encode())
            return connection.recv(4096).decode(errors="replace")


def identity(pid: int) -> str:
    """Start time and command of a living process, "" when it is gone: a process id alone may be somebody else's by now."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except _GONE:
        return ""
    fields = stat.rpartition(")")[2].split()
    return "" if fields[0] in "ZX" else f"{fields[19]} {command.strip()[:120]}"


def is_still(pid: int, name: str) -> bool:
    """Whether it is the process of this identity, whatever program it runs by now."""
    return identity(pid).partition(" ")[0] == name.partition(" ")[0] != ""


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
