"""What a sandbox promises to who starts it; what it promises about the program inside is in test_escapes.py."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from dataclasses import replace
from pathlib import Path

import pytest

import orchestrator
from orchestrator.api import ConfigError, RetryableError
from orchestrator.sandbox import Sandbox, SandboxLimits, SandboxOutcome, cgroups, command, run, seccomp
from orchestrator.sandbox.run import diagnose_sandbox

pytestmark = [pytest.mark.slow, pytest.mark.skipif(shutil.which("bwrap") is None, reason="needs bubblewrap")]

FORK_BOMB = """
import os, time
for n in range(60):
    if os.fork() == 0: time.sleep(20)
print("ESCAPED")
"""
HOGS = """
import os, time
for n in range(8):
    if os.fork() == 0:
        block = b"x" * (60 << 20); time.sleep(3); os._exit(0)  # all hold theirs at the same time
print([os.waitpid(-1, 0)[1] for n in range(8)])
"""
HOG = """
import os, time
for n in range(8):
    if os.fork() == 0:
        block = b"x" * (60 << 20); time.sleep(20)
time.sleep(20)
"""


def python(source: str, sandbox: Sandbox | None = None, **options: object) -> SandboxOutcome:
    return asyncio.run((sandbox or Sandbox()).python(source, **options))


def marked(mark: str) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and mark in (entry / "cmdline").read_text(errors="replace"):
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def test_a_program_gets_its_input_and_files_and_gives_output_and_exit_code() -> None:
    source = "import sys; print(open('a/b').read() + input(), file=sys.stderr); print(open('c').read()); sys.exit(7)"
    outcome = python(source, files={"a/b": b"one "}, read_only={"c": b"three"}, stdin=b"two")
    assert (outcome.exit_code, outcome.limit, outcome.ok) == (7, "", False)
    assert (outcome.stdout, outcome.stderr) == (b"three\n", b"one two\n")


def test_files_can_be_changed_and_read_only_files_cannot() -> None:
    source = "open('free', 'w').write('new'); print(open('free').read())\nopen('fixed', 'w')"
    outcome = python(source, files={"free": b"old"}, read_only={"fixed": b"old"})
    assert outcome.stdout == b"new\n"
    assert b"Read-only" in outcome.stderr or b"Permission denied" in outcome.stderr


@pytest.mark.parametrize("name", ["", "/etc/passwd", "../x", "a/../../x", "a//b", "./a", "a\0b"])
def test_no_file_is_placed_outside_of_the_working_folder(name: str) -> None:
    with pytest.raises(ValueError, match="not the name of a file"):
        python("", files={name: b""})


@pytest.mark.parametrize(
    ("source", "limits", "limit"),
    [
        ("import time; time.sleep(60)", SandboxLimits(wall_seconds=0.5), "wall"),
        ("while True: print('x' * 1000)", SandboxLimits(output_bytes=10_000), "output"),
        (HOG, SandboxLimits(memory_bytes=150 << 20, wall_seconds=30), "memory"),
    ],
)
def test_a_limit_that_is_reached_is_named(source: str, limits: SandboxLimits, limit: str) -> None:
    sandbox = Sandbox()
    if limit == "memory":
        sandbox._hierarchies = ()
    outcome = python(source, sandbox, limits=limits)
    assert (outcome.limit, outcome.ok) == (limit, False)
    assert len(outcome.stdout) <= limits.output_bytes


def test_processor_time_is_limited_and_named() -> None:
    outcome = python("while True: pass", limits=SandboxLimits(cpu_seconds=1, wall_seconds=60))
    assert (outcome.limit, outcome.exit_code) == ("cpu", 128 + signal.SIGXCPU)


@pytest.mark.parametrize("cgrouped", [True, False])
def test_processes_and_memory_are_limited_with_cgroups_and_without(cgrouped: bool) -> None:
    sandbox = Sandbox()
    if not cgrouped:
        sandbox._hierarchies = ()
    elif not sandbox.uses_cgroups:
        pytest.skip("this process may not make cgroups here")
    forked = python(FORK_BOMB, sandbox, limits=SandboxLimits(processes=16, wall_seconds=30))
    assert b"BlockingIOError" in forked.stderr
    assert b"ESCAPED" not in forked.stdout
    # Without cgroups the whole run ends; with them the kernel chooses what to kill.
    hogs = python(HOGS, sandbox, limits=SandboxLimits(memory_bytes=200 << 20, wall_seconds=30))
    assert hogs.limit == "memory" or b"[9" in hogs.stdout.replace(b"0, ", b"")


def test_the_address_space_of_each_process_is_limited_though_nothing_of_it_is_used() -> None:
    source = (
        "import mmap; own = mmap.MAP_PRIVATE; mmap.mmap(-1, 100 << 20, own); print('fits', flush=True)\n"
        "mmap.mmap(-1, 2 << 30, own); print('ESCAPED')"
    )
    outcome = python(source, limits=SandboxLimits(memory_bytes=256 << 20))
    assert outcome.stdout == b"fits\n"
    assert b"Cannot allocate memory" in outcome.stderr


def test_no_cgroup_is_left() -> None:
    sandbox = Sandbox()
    before = [sorted(os.listdir(hierarchy.folder)) for hierarchy in sandbox._hierarchies]
    python("print(1)", sandbox)
    python("import time; time.sleep(9)", sandbox, limits=SandboxLimits(wall_seconds=0.3))
    ours = [f"rl-coserve-{os.getpid()}-"]
    after = [os.listdir(hierarchy.folder) for hierarchy in sandbox._hierarchies]
    assert not any(name.startswith(ours[0]) for folder in after for name in folder), before


def test_a_cancelled_run_leaves_no_process() -> None:
    mark = uuid.uuid4().hex

    async def cancelled() -> None:
        sandbox = Sandbox()
        task = asyncio.create_task(sandbox.run([sandbox.interpreter, "-c", "import time; time.sleep(60)", mark]))
        while not any("python" in Path(f"/proc/{pid}/comm").read_text() for pid in marked(mark) if pid != os.getpid()):
            await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert marked(mark) == []

    asyncio.run(cancelled())


def test_the_sandbox_dies_with_the_process_that_started_it() -> None:
    mark = uuid.uuid4().hex
    source = (
        "import asyncio; from orchestrator.sandbox import Sandbox, SandboxLimits; s = Sandbox(SandboxLimits(wall_seconds=100));"
        f"asyncio.run(s.run([s.interpreter, '-c', 'import time; time.sleep(100)', '{mark}']))"
    )
    process = subprocess.Popen([sys.executable, "-c", source])
    program = f"{Sandbox().interpreter}\0-c\0import time".encode()
    while not any(_cmdline(pid).startswith(program) for pid in marked(mark)):
        assert process.poll() is None
        time.sleep(0.01)
    process.kill()
    process.wait()
    for _ in range(500):
        if not marked(mark):
            return
        time.sleep(0.02)
    pytest.fail(f"still there: {[_cmdline(pid) for pid in marked(mark)]}")


def _cmdline(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def test_no_more_than_the_slots_run_at_once() -> None:
    async def several() -> int:
        sandbox = Sandbox(slots=2)
        most = 0
        real = sandbox._run

        running = 0

        async def counted(*arguments: object) -> SandboxOutcome:
            nonlocal most, running
            running += 1
            most = max(most, running)
            try:
                return await real(*arguments)
            finally:
                running -= 1

        sandbox._run = counted
        outcomes = await asyncio.gather(*(sandbox.run(["/bin/true"]) for _ in range(6)))
        assert all(outcome.ok for outcome in outcomes)
        assert sorted(sandbox._free) == [0, 1]
        return most

    assert asyncio.run(several()) == 2


def test_a_machine_without_bubblewrap_is_one_clear_error_and_nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    real = command.shutil.which
    monkeypatch.setattr(
        command.shutil, "which", lambda name, path=None: None if name == "bwrap" else real(name, path=path)
    )
    with pytest.raises(ConfigError, match="apt-get install bubblewrap"):
        Sandbox()


def test_the_doctor_says_whether_there_is_a_sandbox(monkeypatch: pytest.MonkeyPatch) -> None:
    status, detail, _ = diagnose_sandbox()
    assert status == "ok"
    assert "bubblewrap works" in detail
    monkeypatch.setattr(command.shutil, "which", lambda name, path=None: None)
    status, detail, fix = diagnose_sandbox()
    assert status == "warn"
    assert "apt-get install bubblewrap" in fix


def test_a_sandbox_that_does_not_start_is_no_outcome(monkeypatch: pytest.MonkeyPatch) -> None:
    real = run.command_line

    def refused(*arguments: object, **options: object) -> list[str]:
        line = real(*arguments, **options)
        return [*line[: line.index("--proc")], "--bind", "/no/such/folder", "/x", *line[line.index("--proc") :]]

    monkeypatch.setattr(run, "command_line", refused)
    sandbox = Sandbox()
    with pytest.raises(RetryableError, match="/no/such/folder"):
        asyncio.run(sandbox.run(["/bin/true"]))
    with pytest.raises(ConfigError, match="does not start a sandbox"):
        asyncio.run(sandbox.check())


def test_a_program_that_is_not_there_fails_by_itself() -> None:
    outcome = asyncio.run(Sandbox().run(["/no/such/program"]))
    assert outcome.exit_code != 0
    assert outcome.limit == ""
    assert b"/no/such/program" in outcome.stderr


@pytest.mark.parametrize("field", ["wall_seconds", "memory_bytes", "processes", "output_bytes"])
@pytest.mark.parametrize("value", [0, -1, float("nan"), True])
def test_there_is_no_unlimited_sandbox(field: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"sandbox.{field}"):
        SandboxLimits(**{field: value})


def test_the_filter_is_a_program_that_the_kernel_can_take_on_both_processors() -> None:
    for machine in seccomp.ARCHITECTURES:
        code = seccomp.program(machine)
        assert code is not None
        assert len(code) % 8 == 0
        steps = [(code[i], code[i + 2], code[i + 3]) for i in range(0, len(code), 8)]
        for index, (kind, if_true, if_false) in enumerate(steps):
            assert kind in (0x20, 0x15, 0x45, 0x35, 0x06)
            assert index + 1 + max(if_true, if_false) < len(steps) or kind == 0x06
    assert seccomp.program("riscv64") is None


def test_memory_of_a_tree_of_processes_is_seen_from_outside() -> None:
    source = "import subprocess, sys; b = b'x' * (30 << 20); subprocess.run([sys.executable, '-c', sys.argv[1]])"
    inner = "b = b'x' * (30 << 20); print('ready', flush=True); input()"
    process = subprocess.Popen([sys.executable, "-c", source, inner], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        assert len(cgroups.descendants(process.pid)) == 2
        assert cgroups.resident_bytes(process.pid) > 60 << 20
    finally:
        process.communicate(b"\n")
    assert cgroups.resident_bytes(process.pid) == 0


def test_cgroups_are_found_where_they_can_be_written_only(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.write_text("4:memory:/a\n5:pids,cpu:/\n6:devices:/\n9:name=systemd:/\n0::/b\n")
    for folder in ("memory/a", "pids,cpu", "devices", "b"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "b" / "cgroup.subtree_control").write_text("cpu memory io\n")
    found = cgroups.find_hierarchies(str(tmp_path), str(own))
    assert [(h.controllers, h.unified) for h in found] == [
        (("memory",), False),
        (("pids", "cpu"), False),
        (("memory", "cpu"), True),
    ]
    assert cgroups.find_hierarchies(str(tmp_path / "none"), str(own)) == ()
    assert cgroups.find_hierarchies(str(tmp_path), str(tmp_path / "none")) == ()


def test_folders_that_are_closed_are_empty_inside_and_take_nothing() -> None:
    """Where this package lies under /usr, what its tasks hold is not to be read."""
    sandbox = Sandbox(slots=1)
    sandbox._tools = replace(sandbox._tools, closed=("/usr/share",))
    source = "import os\nprint(os.listdir('/usr/share'), len(os.listdir('/usr/bin')) > 3)\nopen('/usr/share/x', 'w')"
    outcome = asyncio.run(sandbox.python(source))
    assert outcome.stdout.decode().strip() == "[] True"
    assert b"Read-only" in outcome.stderr or b"Permission" in outcome.stderr
    assert command._own_folders() == (str(Path(orchestrator.__file__).parent),)
