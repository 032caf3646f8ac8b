"""Programs in processes of their own that find PyTorch and Megatron-Core imported: one process imports them, and forks for each.

A rank in a fresh interpreter imports for 5 s of processor time. Tests of what a program imports, of the environment that imports
read, and of another Megatron-Core need that one; ranks that compute do not.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

_server = multiprocessing.get_context("forkserver")
_server.set_forkserver_preload(
    ["megatron.core.models.gpt", "megatron_rlplugin.trainer.megatron_trainer", "transformers.models.auto"]
)


class Ended(NamedTuple):
    code: int  # minus the signal's number, where one ended it
    out: str
    err: str


class ForkedRank:
    """Does what ``python ARGUMENTS`` does: ``-c TEXT``, ``-m MODULE`` or a file, and its arguments; in the same folder."""

    def __init__(self, *arguments: str, env: Mapping[str, str] = os.environ) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._out, self._err = (Path(self._folder.name, name) for name in ("out", "err"))
        words = (arguments, dict(env), os.getcwd(), str(self._out), str(self._err))
        self._process = _server.Process(target=_run_program, args=words)
        self._process.start()

    def wait(self, limit: float) -> Ended:
        """How it ended; :class:`subprocess.TimeoutExpired` after ``limit`` seconds."""
        self._process.join(limit)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("a forked rank", limit)
        out, err = (file.read_text(errors="replace") if file.exists() else "" for file in (self._out, self._err))
        return Ended(self._process.exitcode, out, err)

    def kill(self) -> None:
        self._process.kill()
        self._process.join()
        self._folder.cleanup()


def wait_for_all(ranks: Sequence[ForkedRank], limit: float) -> list[Ended]:
    """How each ended, within ``limit`` seconds each; none is left."""
    try:
        return [rank.wait(limit) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()


def first_of_ranks(world: int, program: Sequence[str], arguments: Sequence[str], limit: float = 280.0) -> Any:
    """What rank 0 of a probe of ``scripts/bench/probes/megatron`` printed last, parsed: its ``spawn``, but forked."""
    with tempfile.TemporaryDirectory() as folder:
        words = ["--world", str(world), "--rendezvous", f"file://{folder}/rendezvous", *arguments]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        ranks = [ForkedRank(*program, "--rank", str(rank), *words, env=environment) for rank in range(world)]
        ended = wait_for_all(ranks, limit)
    assert all(rank.code == 0 for rank in ended), ended
    return json.loads(ended[0].out.strip().splitlines()[-1])


def _run_program(arguments: tuple[str, ...], environment: dict[str, str], folder: str, out: str, err: str) -> None:
    gc.freeze()  # what was imported is no garbage, and not to be copied for the marks of a collection
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    for number, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
    if arguments[0] == "-c":
        sys.argv = ["-c", *arguments[2:]]
        exec(compile(arguments[1], "<string>", "exec"), {"__name__": "__main__"})
    elif arguments[0] == "-m":
        sys.argv = list(arguments[1:])
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(arguments)
        runpy.run_path(arguments[0], run_name="__main__")
