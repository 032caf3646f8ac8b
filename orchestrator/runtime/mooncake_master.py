"""The embedded relay: a ``mooncake_master`` child process, on loopback unless told otherwise.

Guarantees: after ``start`` returned it is healthy; when ``start`` raises or is cancelled, nothing is left behind; a port
that is taken, a missing binary and a missing system library are ConfigErrors that name the fix; ``stop`` is idempotent
and always reaps. It ends when this process does: a launcher sets PR_SET_PDEATHSIG on itself and becomes the master by
exec, which keeps the setting. (Not ``preexec_fn``: it runs Python between fork and exec, unsafe beside the threads of
Ray and gRPC. Linux ties the signal to the *thread* that forked: start the master from a thread that lives as long as
the run, as the event loop's does.)

The master keeps only the directory of objects; the objects are in the processes that publish. When it dies, all keys
are gone, and the trainer publishes again.
"""

from __future__ import annotations

import asyncio
import importlib.util
import ipaddress
import os
import shutil
import socket
import sys
import tempfile
from pathlib import Path
from typing import IO

import aiohttp

from orchestrator.api import ConfigError, RunError
from orchestrator.child_process import ChildProcess, free_port, port_taken
from orchestrator.transfer.mooncake_relay import missing_library

BINARY = "mooncake_master"
LOOPBACK = "127.0.0.1"
START_LIMIT = 20.0  # seconds; it takes less than 1 on an idle machine
POLL_SECONDS = 0.05
LEASE_MS = 10_000  # how long a read protects an object from removal, and the most that it may take
# Seconds without a sign of life until a client's memory counts as gone. Mooncake's default, 10, loses the versions of a rank that
# stood still for so long, on a starved host or while a checkpoint is written; readers of one that is dead are refused at once anyway.
CLIENT_TTL = 60
PORT_TRIES = 3  # a port that was free may be taken before the master binds it
_LOG_TAIL = 4000

# Runs in a bare interpreter: be killed with the parent, then become the program. The parent may have died before.
_LAUNCHER = """
import ctypes, os, sys
parent, program = int(sys.argv[1]), sys.argv[2:]
if ctypes.CDLL(None).prctl(1, 9, 0, 0, 0) != 0 or os.getppid() != parent:
    sys.exit("the parent is gone")
os.execv(program[0], program)
"""


class MooncakeMaster(ChildProcess):
    """One embedded master."""

    def __init__(self, *, port: int = 0, log: Path | None = None, host: str = LOOPBACK) -> None:
        super().__init__(log)
        self._host = host
        self._wanted_port = port
        self._port = 0
        self.metrics_port = 0  # of /health and /metrics, on loopback

    @property
    def address(self) -> str:
        """host:port, for :class:`~orchestrator.transfer.RelayEndpoint`."""
        if not self._port:
            raise RunError("the mooncake_master was not started")
        return f"{self._host}:{self._port}"

    async def start(self) -> None:
        """Start and wait until it is healthy."""
        binary = find_binary()
        address = own_address(self._host)
        require_port(address, self._wanted_port)
        for tries_left in reversed(range(PORT_TRIES)):
            port = self._wanted_port or free_port(address)
            metrics_port = free_port(LOOPBACK)
            with tempfile.TemporaryFile() if self._log is None else self._log.open("a+b") as log:
                try:
                    if await self._launch(binary, address, port, metrics_port, log):
                        self._port, self.metrics_port = port, metrics_port
                        return
                except BaseException:
                    await self.stop()
                    raise
                tail = _tail(log)
            if "cannot open shared object file" in tail:
                raise missing_library(tail.strip())
            if not tries_left or not (port_taken(port, address) or port_taken(metrics_port, LOOPBACK)):
                code = self._process.returncode if self._process is not None else None
                raise RunError(f"{BINARY} ended with code {code} before it was healthy: {tail.strip()[-500:]}")
            require_port(address, self._wanted_port)

    async def stop(self) -> None:
        """Stop, kill if need be, reap. Idempotent."""
        self._port = self.metrics_port = 0
        await super().stop()

    async def _launch(self, binary: str, address: str, port: int, metrics_port: int, log: IO[bytes]) -> bool:
        """Whether it became healthy; False when it ended."""
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", "-c", _LAUNCHER, str(os.getpid()), binary),
            # Its defaults listen on all interfaces.
            *(f"--rpc_address={address}", f"--rpc_port={port}"),
            *("--metrics_host=127.0.0.1", f"--metrics_port={metrics_port}"),
            *(f"--default_kv_lease_ttl={LEASE_MS}", f"--client_ttl={CLIENT_TTL}", "-logtostderr"),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,  # Ctrl-C is for the orchestrator, which stops the master last
        )
        try:
            async with asyncio.timeout(START_LIMIT), aiohttp.ClientSession() as session:
                while self._process.returncode is None:
                    if await _healthy(session, metrics_port) and await _listens(address, port) and self.alive():
                        return True
                    await asyncio.sleep(POLL_SECONDS)
        except TimeoutError:
            raise RunError(f"{BINARY} was not healthy within {START_LIMIT:g} s: {_tail(log).strip()[-500:]}") from None
        return False


def own_address(host: str) -> str:
    """The IPv4 address of a name of this machine. Raises ConfigError for one that is not this machine's alone."""
    fix = "must be an address of this machine that the workers reach, or 127.0.0.1"
    try:
        address = socket.gethostbyname(host)
        with socket.socket() as probe:
            probe.bind((address, 0))
    except OSError as error:
        raise ConfigError("relay.host", host, f"{fix} ({error})") from error
    if ipaddress.ip_address(address).is_unspecified:
        raise ConfigError("relay.host", host, f"{fix}: clients are told this address")
    return address


def require_port(address: str, port: int) -> None:
    """Raises ConfigError for a port that is taken; 0 never is."""
    if port and port_taken(port, address):
        fix = f"cannot be bound on {address}: choose another, or 0 for a free one, or stop what listens there"
        raise ConfigError("relay.port", port, fix)


def find_binary() -> str:
    """The master of this environment: beside its Python, on the path, or in Mooncake's package, which may be installed in the
    environment below this one. Raises ConfigError when there is none."""
    beside = Path(sys.executable).parent / BINARY
    found = str(beside) if os.access(beside, os.X_OK) else shutil.which(BINARY)
    package = importlib.util.find_spec("mooncake")
    if found is None and package is not None:
        found = shutil.which(BINARY, path=os.pathsep.join(package.submodule_search_locations or ()))
    if found is None:
        fix = "no mooncake_master: install mooncake-transfer-engine-non-cuda (or a CUDA variant), or set relay.master"
        raise ConfigError("relay.master", "", fix)
    return found


async def _listens(address: str, port: int) -> bool:
    """Its health says nothing of the port for clients, which is opened later."""
    try:
        _, writer = await asyncio.open_connection(address, port)
    except OSError:
        return False
    writer.close()
    return True


async def _healthy(session: aiohttp.ClientSession, port: int) -> bool:
    try:
        async with session.get(f"http://127.0.0.1:{port}/health") as response:
            return response.status == 200
    except aiohttp.ClientError:
        return False  # not listening yet


def _tail(log: IO[bytes]) -> str:
    log.seek(max(0, log.seek(0, os.SEEK_END) - _LOG_TAIL))
    return log.read().decode("utf-8", "replace")
