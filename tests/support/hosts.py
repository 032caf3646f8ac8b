"""Hosts on one machine: network namespaces on a bridge, each with an address, a link of a limited rate, shared memory and
processes of its own.

Everything lies inside one process tree with namespaces of its own (network, mounts, processes): when its first process ends, the
kernel ends all others and takes bridge, links and names along. It ends with the pipe that the test's process holds: nothing is
left behind, however that ends. As root, or in a user namespace where the kernel lets anyone make one; :func:`why_not` says why
where neither works.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NETWORK = "10.77.0"
_UNSHARE = ["unshare", *(["-Ur"] if os.getuid() else []), "-nmp", "--fork", "--mount-proc", "--kill-child"]
# As init does, until the other end of its pipe is closed.
_REAP = "import signal, sys; signal.signal(signal.SIGCHLD, signal.SIG_IGN); sys.stdin.buffer.read()"
_FOLDERS = "mount -t tmpfs none /run && mkdir /run/netns /run/shm"
_SETUP = f"{_FOLDERS} && ip link add br0 type bridge && ip link set br0 up && ip link set lo up"


@functools.cache
def why_not() -> str:
    """Why there can be no hosts here; "" when there can."""
    missing = [name for name in ("unshare", "nsenter", "ip", "tc") if shutil.which(name) is None]
    if missing:
        return f"{', '.join(missing)} not installed (Debian: iproute2, util-linux)"
    probe = f"{_SETUP} && tc qdisc add dev br0 root tbf rate 1gbit burst 1mb latency 50ms"
    try:
        said = subprocess.run([*_UNSHARE, "sh", "-c", probe], capture_output=True, text=True, timeout=20, check=False)
    except subprocess.TimeoutExpired:
        return "namespaces were not made in 20 s"
    return "" if said.returncode == 0 else f"namespaces or tbf refused: {said.stderr.strip()[-200:]}"


@dataclass(frozen=True, slots=True)
class Host:
    """One of them. ``address``: IPv4, on the interface ``eth0``."""

    name: str
    address: str
    hosts: Hosts

    def start(
        self, command: Sequence[str], environment: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[str]:
        """A process of this host."""
        entered = 'mount --bind "$0" /dev/shm && exec "$@"'
        wrapped = self.hosts.inside(
            "ip", "netns", "exec", self.name, "sh", "-c", entered, f"/run/shm/{self.name}", *command
        )
        own = {
            name: value for name, value in os.environ.items() if name != "GLOO_SOCKET_IFNAME"
        }  # "lo" since a rank ran here
        return subprocess.Popen(wrapped, env={**own, **(environment or {})}, text=True, **options)

    def run(self, command: Sequence[str], environment: Mapping[str, str] | None = None, timeout: float = 60) -> str:
        """What it printed. Raises CalledProcessError with its output."""
        process = self.start(command, environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        try:
            said, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
        if process.returncode:
            raise subprocess.CalledProcessError(process.returncode, command, said)
        return said

    def sent(self) -> int:
        """Bytes that left its link, as the kernel counts."""
        return self._count("tx")

    def received(self) -> int:
        """Bytes that came in."""
        return self._count("rx")

    def _count(self, way: str) -> int:
        said = self.hosts.command("ip", "-n", self.name, "-s", "-j", "link", "show", "eth0")
        return int(json.loads(said)[0]["stats64"][way]["bytes"])

    def set_link(self, up: bool) -> None:
        """Cut its link, or mend it."""
        self.hosts.command("ip", "-n", self.name, "link", "set", "eth0", "up" if up else "down")

    def pids(self) -> list[int]:
        """Of its processes, as the others of :class:`Hosts` number them."""
        return [int(pid) for pid in self.hosts.command("ip", "netns", "pids", self.name).split()]

    def kill(self) -> None:
        """Every process of it dies at once, as when its power fails."""
        if pids := self.pids():
            self.hosts.command("kill", "-KILL", *map(str, pids))


class Hosts:
    """``count`` hosts ``h1``, ``h2`` ... on one switch. ``rate``: of each link, in each direction, in the words of tc(8)."""

    def __init__(self, count: int, rate: str = "1gbit") -> None:
        self._count, self._rate = count, rate
        self._anchor: subprocess.Popen[bytes] | None = None
        self.all: list[Host] = []

    def __enter__(self) -> Hosts:
        ready = f'{_SETUP} && touch /run/ready && exec "$0" -S -c "$1"'
        command = [*_UNSHARE, "sh", "-c", ready, sys.executable, _REAP]
        self._anchor = subprocess.Popen(command, stdin=subprocess.PIPE)
        try:
            self._wait()
            for number in range(1, self._count + 1):
                self.all.append(self._add(number))
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        assert self._anchor is not None
        self._anchor.kill()
        self._anchor.communicate(timeout=30)

    def inside(self, *command: str) -> list[str]:
        """The command line that runs ``command`` among the hosts."""
        user = ["-U", "--preserve-credentials"] if os.getuid() else []
        return ["nsenter", "-t", str(self._first()), *user, "-n", "-m", "-p", f"--wdns={os.getcwd()}", "--", *command]

    def command(self, *command: str) -> str:
        """What it printed. Raises RuntimeError."""
        said = subprocess.run(self.inside(*command), capture_output=True, text=True, timeout=30, check=False)
        if said.returncode:
            raise RuntimeError(f"{' '.join(command)}: {said.stderr.strip()}")
        return said.stdout

    def _first(self) -> int:
        """The first process inside: unshare's child."""
        assert self._anchor is not None
        children = (
            Path(f"/proc/{self._anchor.pid}/task/{self._anchor.pid}/children").read_text(encoding="ascii").split()
        )
        return int(children[0])

    def _wait(self) -> None:
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            try:
                self.command("test", "-e", "/run/ready")
                return
            except (RuntimeError, OSError, IndexError):
                time.sleep(0.05)
        raise RuntimeError("the namespaces were not made in 20 s")

    def _add(self, number: int) -> Host:
        host = Host(f"h{number}", f"{NETWORK}.{number}", self)
        limit = ["root", "tbf", "rate", self._rate, "burst", "1mb", "latency", "50ms"]
        outside = f"ve{number}"
        for command in (
            ["mkdir", "-m", "1777", f"/run/shm/{host.name}"],
            ["ip", "netns", "add", host.name],
            ["ip", "link", "add", outside, "type", "veth", "peer", "name", "eth0", "netns", host.name],
            ["ip", "link", "set", outside, "master", "br0", "up"],
            ["ip", "-n", host.name, "addr", "add", f"{host.address}/24", "dev", "eth0"],
            ["ip", "-n", host.name, "link", "set", "eth0", "up"],
            ["ip", "-n", host.name, "link", "set", "lo", "up"],
            ["ip", "netns", "exec", host.name, "tc", "qdisc", "add", "dev", "eth0", *limit],
            ["tc", "qdisc", "add", "dev", outside, *limit],  # what comes in
        ):
            self.command(*command)
        return host


def end(process: subprocess.Popen[str], seconds: float = 20) -> None:
    """SIGTERM, then SIGKILL."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(timeout=10)
