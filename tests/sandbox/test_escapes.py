"""No way out of the sandbox: every attempt is stopped inside, and would succeed outside."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest

from orchestrator.sandbox import Sandbox, SandboxLimits

pytestmark = [pytest.mark.slow, pytest.mark.skipif(shutil.which("bwrap") is None, reason="needs bubblewrap")]
ROOT = Path(__file__).parents[2]


def _load() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "escape_attempts", Path(__file__).parents[1] / "support" / "escape_attempts.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


ATTEMPTS = _load().ATTEMPTS
AT_ONCE = 3
LIMITS = SandboxLimits(
    wall_seconds=30.0,  # of a busy machine
    cpu_seconds=1,
    memory_bytes=256 << 20,
    processes=24,
    file_bytes=8 << 20,
    scratch_bytes=12 << 20,
    output_bytes=1 << 18,
)
SHORT = SandboxLimits(wall_seconds=1.0)
SLEEPERS = ("sleep past the limit", "refuse to end")
DAEMON = "outlive the run as a daemon"


class Host:
    """Things of this machine that a program inside must not reach."""

    def __init__(self, folder: Path) -> None:
        self.unique = f"escape-{uuid.uuid4().hex}"
        self.folder = folder
        (folder / "secret").write_text("ESCAPED")
        self.victim = subprocess.Popen(["sleep", "600"])
        self.tcp = socket.create_server(("127.0.0.1", 0))
        self.udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.udp.bind(("127.0.0.1", 0))
        self.named, self.abstract = socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)
        self.named.bind(str(folder / "s"))
        self.abstract.bind(f"\0{self.unique}")
        for listening in (self.named, self.abstract):
            listening.listen(8)
        self.thread = threading.Thread(target=self._answer, daemon=True)
        self.thread.start()

    def _answer(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                data, sender = self.udp.recvfrom(99)
                if data == b"end":
                    return
                self.udp.sendto(b"ESCAPED", sender)

    def fill_in(self, source: str, mark: str, scratch: Path | str) -> str:
        values = {
            "TCP": self.tcp.getsockname()[1],
            "UDP": self.udp.getsockname()[1],
            "ABSTRACT": self.unique,
            "UNIQUE": mark,
            "FOLDER": self.folder,
            "HOME": Path.home(),
            "REPOSITORY": ROOT,
            "VICTIM": self.victim.pid,
            "SCRATCH": scratch,
        }
        for name, value in values.items():
            source = source.replace(f"@{name}@", str(value))
        return source

    def left_running(self, mark: str) -> list[int]:
        """Processes that carry it."""
        found = []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if entry.name.isdigit() and mark in (entry / "cmdline").read_text(errors="replace"):
                    found.append(int(entry.name))
        return found

    def close(self) -> None:
        for pid in self.left_running(self.unique):
            os.kill(pid, signal.SIGKILL)
        self.victim.kill()
        self.victim.wait()
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as last:
            last.sendto(b"end", self.udp.getsockname())
        self.thread.join()
        for opened in (self.tcp, self.udp, self.named, self.abstract):
            opened.close()
        for folder in ("/", "/tmp", "/dev/shm", "/dev", "/run", "/var/tmp"):
            for left in Path(folder).glob(f"{self.unique}*"):
                left.unlink()


@dataclass(frozen=True)
class Result:
    """What an attempt printed, what it left running, and its errors for a reader."""

    output: str
    left: bool
    errors: str


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    """With a secret in this process's environment, and one behind a descriptor that children inherit."""
    made = Host(tmp_path_factory.mktemp("host"))
    fd = os.open(made.folder / "secret", os.O_RDONLY)
    os.set_inheritable(fd, True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("A_SECRET", "SECRET")
        yield made
    os.close(fd)
    made.close()


@pytest.fixture(scope="module")
def inside(host: Host) -> dict[str, Result]:
    """All attempts in sandboxes."""

    async def one(sandbox: Sandbox, number: int) -> Result:
        attempt, mark = ATTEMPTS[number], f"{host.unique}-{number}-"
        output, errors = "", ""
        for source in attempt.sources:
            text = host.fill_in(source, mark, "/box")
            limits = SHORT if attempt.name in SLEEPERS else LIMITS
            outcome = await sandbox.python(text, read_only={"given": b"as it is"}, limits=limits)
            assert len(outcome.stdout) + len(outcome.stderr) <= limits.output_bytes
            output += outcome.stdout.decode(errors="replace")
            errors += outcome.stderr.decode(errors="replace") + outcome.limit
        return Result(output, bool(host.left_running(mark)), errors)

    async def all_of_them() -> list[Result]:
        sandbox = Sandbox(slots=AT_ONCE)
        await sandbox.check()
        return await asyncio.gather(*(one(sandbox, number) for number in range(len(ATTEMPTS))))

    return {attempt.name: result for attempt, result in zip(ATTEMPTS, asyncio.run(all_of_them()), strict=True)}


@pytest.fixture(scope="module")
def outside(host: Host) -> Iterator[dict[str, Result]]:
    """All attempts on this machine, those that take root only if we are."""
    python = Sandbox().interpreter

    def one(number: int) -> Result:
        attempt, mark = ATTEMPTS[number], f"{host.unique}-{number}+"
        work = host.folder / str(number)
        work.mkdir()
        (work / "given").write_text("as it is")
        output, errors = "", ""
        for source in attempt.sources:
            command = [*attempt.outside, python, "-I", "-S", "-c", host.fill_in(source, mark, work)]
            done = subprocess.run(command, cwd=work, capture_output=True, timeout=60, close_fds=False, text=True)
            output, errors = output + done.stdout, errors + done.stderr
        return Result(output, bool(host.left_running(mark)), errors)

    chosen = [n for n, attempt in enumerate(ATTEMPTS) if os.geteuid() == 0 or not attempt.root]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        yield {ATTEMPTS[n].name: result for n, result in zip(chosen, pool.map(one, chosen), strict=True)}


NAMES = [attempt.name for attempt in ATTEMPTS]


def test_there_are_thirty_attempts_and_no_two_are_the_same() -> None:
    assert len(set(NAMES)) == len(NAMES) >= 30
    assert len({attempt.sources for attempt in ATTEMPTS}) == len(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_it_is_stopped_inside(name: str, inside: dict[str, Result], host: Host) -> None:
    assert "ESCAPED" not in inside[name].output
    assert not inside[name].left
    assert host.victim.poll() is None


@pytest.mark.parametrize("name", NAMES)
def test_it_would_succeed_outside(name: str, outside: dict[str, Result]) -> None:
    if name not in outside:
        pytest.skip("takes root outside")
    result = outside[name]
    assert result.left if name == DAEMON else "ESCAPED" in result.output, result.errors
