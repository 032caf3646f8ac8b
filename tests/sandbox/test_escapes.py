"""No way out of the sandbox: every attempt is stopped inside, and would succeed outside."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import threading
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from orchestrator.sandbox import Sandbox, SandboxLimits
from orchestrator.sandbox.workspace import Workspace
from tests.support.escape_attempts import ATTEMPTS, PAGE, RESULTS, TOGETHER, Attempt, written

pytestmark = [pytest.mark.slow, pytest.mark.skipif(shutil.which("bwrap") is None, reason="needs bubblewrap")]
ROOT = Path(__file__).parents[2]


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
LONG = SandboxLimits(wall_seconds=120.0, cpu_seconds=20, memory_bytes=LIMITS.memory_bytes)  # of many, one after another
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
        self.tcp6 = self.tcp
        with contextlib.suppress(OSError):  # a machine without IPv6
            self.tcp6 = socket.create_server(("::1", 0), family=socket.AF_INET6)
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
            "TCP6": self.tcp6.getsockname()[1],
            "UDP": self.udp.getsockname()[1],
            "ABSTRACT": self.unique,
            "UNIQUE": mark,
            "FOLDER": self.folder,
            "HOME": Path.home(),
            "REPOSITORY": ROOT,
            "VICTIM": self.victim.pid,
            "SCRATCH": scratch,
            "NAP": 60 if scratch == "/box" else 1.2,  # well over the limit, however late a busy machine sees it
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
        for opened in (self.tcp, self.tcp6, self.udp, self.named, self.abstract):
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


ALONE = [number for number, attempt in enumerate(ATTEMPTS) if not attempt.together]
OTHERS = [number for number, attempt in enumerate(ATTEMPTS) if attempt.together]
MODES = ("with cgroups", "without cgroups")


def read_together(output: str, errors: str) -> dict[str, Result]:
    """What each of those that ran together said."""
    found = json.loads(output)
    return {name: Result(text, False, errors) for name, text in found.items()}


@pytest.fixture(scope="module")
def inside(host: Host) -> dict[tuple[str, str], Result]:
    """All attempts in sandboxes, in both modes; by mode and name. Without the first, where no cgroup can be made."""

    async def one(sandbox: Sandbox, number: int) -> dict[str, Result]:
        attempt, mark = ATTEMPTS[number], f"{host.unique}-{number}-"
        output, errors = "", ""
        for source in attempt.sources:
            text = host.fill_in(source, mark, "/box")
            limits = SHORT if attempt.name in SLEEPERS else LIMITS
            outcome = await sandbox.python(text, read_only={"given": b"as it is"}, limits=limits)
            assert len(outcome.stdout) + len(outcome.stderr) <= limits.output_bytes
            output += outcome.stdout.decode(errors="replace")
            errors += outcome.stderr.decode(errors="replace") + outcome.limit
        return {attempt.name: Result(output, bool(host.left_running(mark)), errors)}

    async def together(sandbox: Sandbox) -> dict[str, Result]:
        texts = [(ATTEMPTS[n].name, host.fill_in(ATTEMPTS[n].sources[0], host.unique, "/box")) for n in OTHERS]
        files = {"attempts.json": json.dumps(texts).encode()}
        outcome = await sandbox.python(TOGETHER, read_only=files, limits=LONG)
        assert outcome.ok, outcome
        return read_together(outcome.stdout.decode(), outcome.stderr.decode())

    async def all_of_them(mode: str) -> dict[tuple[str, str], Result]:
        sandbox = Sandbox(slots=AT_ONCE)
        if mode == MODES[1]:
            sandbox._hierarchies = ()
        elif not sandbox.uses_cgroups:
            return {}
        await sandbox.check()
        parts = await asyncio.gather(together(sandbox), *(one(sandbox, number) for number in ALONE))
        return {(mode, name): result for part in parts for name, result in part.items()}

    return {key: result for mode in MODES for key, result in asyncio.run(all_of_them(mode)).items()}


@pytest.fixture(scope="module")
def outside(host: Host) -> dict[str, Result]:
    """All attempts on this machine, those that take root only if we are."""
    python = Sandbox().interpreter

    def run(command: list[str], work: Path) -> tuple[str, str]:
        done = subprocess.run(command, cwd=work, capture_output=True, timeout=120, close_fds=False, text=True)
        return done.stdout, done.stderr

    def one(number: int) -> Result:
        attempt, mark = ATTEMPTS[number], f"{host.unique}-{number}+"
        work = host.folder / str(number)
        work.mkdir()
        (work / "given").write_text("as it is")
        output, errors = "", ""
        for source in attempt.sources:
            found = run([*(attempt.outside or ()), python, "-I", "-S", "-c", host.fill_in(source, mark, work)], work)
            output, errors = output + found[0], errors + found[1]
        return Result(output, bool(host.left_running(mark)), errors)

    def allowed(attempt: Attempt) -> bool:
        return attempt.outside is not None and (os.geteuid() == 0 or not attempt.root)

    chosen = [number for number in ALONE if allowed(ATTEMPTS[number])]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        found = {ATTEMPTS[n].name: result for n, result in zip(chosen, pool.map(one, chosen), strict=True)}
    texts = [
        (ATTEMPTS[n].name, host.fill_in(ATTEMPTS[n].sources[0], host.unique, host.folder))
        for n in OTHERS
        if allowed(ATTEMPTS[n])
    ]
    (host.folder / "attempts.json").write_text(json.dumps(texts))
    return found | read_together(*run([python, "-I", "-S", "-c", TOGETHER], host.folder))


NAMES = [attempt.name for attempt in ATTEMPTS]


def test_there_are_eighty_attempts_and_no_two_are_the_same() -> None:
    assert len(set(NAMES)) == len(NAMES) >= 80
    assert len({attempt.sources for attempt in ATTEMPTS}) == len(NAMES)
    assert all(len(attempt.sources) == 1 and not attempt.outside for attempt in ATTEMPTS if attempt.together)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", NAMES)
def test_it_is_stopped_inside(name: str, mode: str, inside: dict[tuple[str, str], Result], host: Host) -> None:
    if mode == MODES[0] and not Sandbox().uses_cgroups:
        pytest.skip("this process may not make cgroups here")
    result = inside[mode, name]
    assert "ESCAPED" not in result.output
    assert not result.left
    assert host.victim.poll() is None


@pytest.mark.parametrize("name", NAMES)
def test_it_would_succeed_outside(name: str, outside: dict[str, Result]) -> None:
    if name not in outside:
        pytest.skip("takes root outside, or would do harm there")
    result = outside[name]
    if next(attempt for attempt in ATTEMPTS if attempt.name == name).kernel and "ESCAPED" not in result.output:
        pytest.skip(f"this machine does not have it: {result.output.strip()[-100:]}")
    assert result.left if name == DAEMON else "ESCAPED" in result.output, result.errors


@pytest.mark.parametrize("name", RESULTS)
def test_what_a_turn_leaves_in_its_folder_leads_nowhere(name: str, host: Host) -> None:
    """Whatever is there under the name of a result: a workspace keeps plain files of the sandbox, and no others."""
    _, source = RESULTS[name]
    workspace = Workspace(Sandbox(LIMITS, slots=1), {"result": b""}, protected={"given": b"as it is"})
    program = [Sandbox().interpreter, "-I", "-S", "-c", host.fill_in(source, host.unique, "/box")]
    asyncio.run(workspace.run(program, stdin=b"as it came"))
    tree = workspace.tree()
    assert not any(b"ESCAPED" in data or name.encode() == b"escaped" for name, data in tree.items())
    assert tree["given"] == b"as it is"
    assert all(not part.startswith("..") for path in tree for part in path.split("/"))


def test_the_page_lists_every_attempt() -> None:
    assert PAGE.read_text(encoding="utf-8") == written(), "python -m tests.support.escape_attempts"
