"""What the processes of a run print is in a file per role, bounded, and an error that ends the run shows the end of it."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator.api import ConfigError
from orchestrator.cluster.actor import _print_into
from orchestrator.runtime import role_logs


def test_a_process_and_its_children_print_into_the_file_of_their_role(tmp_path: Path) -> None:
    program = f"""
import os, subprocess, sys
from orchestrator.cluster.actor import _print_into
_print_into({str(tmp_path)!r}, "vllm-0")
print("to stdout")
print("to stderr", file=sys.stderr)
subprocess.run(["sh", "-c", "echo from a child; echo and its errors >&2"])
os.write(2, b"at the very end")
os._exit(3)
"""
    for _ in range(2):  # it is restarted, and appends
        ended = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60, check=False)
        assert (ended.returncode, ended.stdout, ended.stderr) == (3, b"", b"")
    said = (tmp_path / "vllm-0.log").read_text()
    assert said.count("-- vllm-0: process ") == 2
    for line in ("to stdout", "to stderr", "from a child", "and its errors", "at the very end"):
        assert said.count(line) == 2, line
    assert (tmp_path / "vllm-0.log").stat().st_mode & 0o777 == 0o600


def test_a_node_that_cannot_write_there_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"run\.folder = .*away': vllm-0 cannot write there \(No such file"):
        _print_into(str(tmp_path / "away"), "vllm-0")


def test_a_file_beyond_its_limit_is_moved_aside_and_its_writers_continue(tmp_path: Path) -> None:
    file = tmp_path / "trainer.log"
    (tmp_path / "vllm-0.log").write_bytes(b"short")
    with file.open("ab", buffering=0) as writer:
        writer.write(b"old" * 100)
        role_logs.rotate(tmp_path, limit=200)
        writer.write(b"new")
    assert file.read_bytes() == b"new"
    assert (tmp_path / "trainer.log.1").read_bytes() == b"old" * 100
    assert sorted(os.listdir(tmp_path)) == ["trainer.log", "trainer.log.1", "vllm-0.log"]


def test_an_error_shows_the_end_of_the_log_of_the_process_that_it_names(tmp_path: Path) -> None:
    lines = [f"line {number}" for number in range(100)]
    (tmp_path / "trainer-1.log").write_text("\n".join([*lines, "CUDA out of memory \x1b[31m" + "x" * 500]))
    (tmp_path / "trainer.log").write_text("fine\n")
    (tmp_path / "vllm-0.log").write_text("")
    said = role_logs.tail_of(tmp_path, "rank 1 of 2: trainer-1: RuntimeError: see trainer").splitlines()
    assert said[0] == f"the end of {tmp_path / 'trainer-1.log'}:"
    assert said[1:3] == ["  | line 86", "  | line 87"]
    assert said[-1].startswith("  | CUDA out of memory \N{REPLACEMENT CHARACTER}[31mxxx")
    assert len(said[-1]) < 210
    assert role_logs.tail_of(tmp_path, "vllm-0 died") == ""
    (tmp_path / "logs").mkdir()
    assert role_logs.tail_of(tmp_path / "logs", "../trainer-1 and ../trainer of nobody") == ""


def test_the_warnings_of_the_orchestrator_are_kept_and_still_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = logging.getLogger()
    before, root.handlers = root.handlers, []
    try:
        with role_logs.orchestrator_log(tmp_path):
            logging.getLogger("rl-coserve").warning("the token of before holds")
        assert root.handlers == []
    finally:
        root.handlers = before
    assert "WARNING rl-coserve: the token of before holds" in (tmp_path / "orchestrator.log").read_text()
    assert "the token of before holds" in capsys.readouterr().err


def test_a_folder_that_cannot_be_read_for_a_while_is_looked_at_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file server that is away ends no rotation: a week without has filled disks."""
    (tmp_path / "vllm-0.log").write_bytes(b"x" * 300)
    looks: list[float] = []

    def away(*_: object) -> list[str]:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    async def main() -> None:
        with monkeypatch.context() as patched:
            patched.setattr(os, "listdir", away)
            patched.setattr(os, "scandir", away)
            rotating = asyncio.create_task(role_logs.rotate_forever(tmp_path))
            while len(looks) < 2:
                await asyncio.sleep(0.01)
        while not (tmp_path / "vllm-0.log.1").exists() and not rotating.done():
            await asyncio.sleep(0.01)
        rotating.cancel()

    real = role_logs.rotate

    def rotate(logs: Path) -> None:
        looks.append(0.0)
        real(logs, limit=200)

    monkeypatch.setattr(role_logs, "EVERY", 0.01)
    monkeypatch.setattr(role_logs, "rotate", rotate)
    asyncio.run(asyncio.wait_for(main(), 20))
    assert (tmp_path / "vllm-0.log.1").read_bytes() == b"x" * 300
