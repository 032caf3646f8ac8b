"""The process that writes what a run keeps: the store's files and its checkpoints, from shards, by reference.

Guarantees: the orchestrator's interpreter neither converts, compresses, digests nor writes what is written here; a job is one
message of references, answered when what it asked for is on disk, or with the error that it met. A writer that dies is started
again with the same job, which it does from the start: nothing committed is lost, as nothing is committed before its answer, and
nothing is done twice, as files get their names last. A writer whose orchestrator is gone gives no file its name any more.

Jobs are asked for by threads (the store's, a checkpoint's), one at a time; none of this is called on the event loop.
"""

from __future__ import annotations

import contextlib
import json
import os
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import IO, Any

import msgpack

from orchestrator import __version__
from orchestrator.api import RunError
from orchestrator.api.jsontext import pieces
from orchestrator.checkpoint import CheckpointState, write_checkpoint
from orchestrator.child_process import STOP_LIMIT, public_environment
from orchestrator.process_watcher import take_pipes
from orchestrator.shards.shard_folder import Shard
from orchestrator.store import StoredRow, write_part

DEATHS = 3  # in one job: then it is the job
_LENGTH = struct.Struct("<Q")
_STATE = tuple(item.name for item in fields(CheckpointState) if item.name != "buffer")
_ROW = tuple(item.name for item in fields(StoredRow) if item.name != "trajectory")


class RecordWriter:
    """The orchestrator's side. ``log`` gets what the process prints, which begins with the first job. ``deaths``: so far."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self.deaths = 0

    @property
    def pid(self) -> int | None:
        """Of the present process, if there is one."""
        return None if self._process is None else self._process.pid

    def write_part(self, final: Path, step: int, trained: bool, rows: Sequence[StoredRow]) -> None:
        """See :func:`orchestrator.store.write_part`."""
        listed = [(_place(row.trajectory), [getattr(row, name) for name in _ROW]) for row in rows]
        self._ask("part", str(final), step, trained, listed)

    def write_checkpoint(self, partial: Path, state: CheckpointState, shards: Sequence[Shard]) -> Path:
        """See :func:`orchestrator.checkpoint.write_checkpoint`."""
        facts = "".join(pieces({name: getattr(state, name) for name in _STATE}))
        return Path(self._ask("checkpoint", str(partial), facts, [_place(shard) for shard in shards]))

    def close(self) -> None:
        """End the process when its job is done. Idempotent."""
        with self._lock:
            self._end()

    def _ask(self, *job: Any) -> Any:
        message = msgpack.packb(job)
        with self._lock:
            for _ in range(DEATHS):
                process = self._process = self._process or self._start()
                assert process.stdin is not None
                assert process.stdout is not None
                try:
                    _send(process.stdin, message)
                    kind, *answer = _receive(process.stdout)
                    break
                except (OSError, EOFError):
                    self.deaths += 1
                    self._end()
            else:
                raise RunError(f"the record writer died {DEATHS} times in the job {job[0]} {job[1]}; see {self._log}")
        if kind == "ok":
            return answer[0]
        if kind == "os":
            raise OSError(*answer)
        raise RunError(f"the record writer: {answer[0]}")

    def _start(self) -> subprocess.Popen[bytes]:
        with self._log.open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "orchestrator.runtime.record_writer", str(os.getpid()), __version__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=public_environment(),
                start_new_session=True,  # Ctrl-C is for the orchestrator, which ends it when it is done
            )

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        for pipe in (process.stdin, process.stdout):
            with contextlib.suppress(OSError):
                assert pipe is not None
                pipe.close()
        try:
            process.wait(STOP_LIMIT)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _place(shard: object) -> tuple[str, int, str]:
    assert isinstance(shard, Shard), "what a writer is asked to write lies in shards"
    return shard.path, shard.size, shard.digest


def _send(pipe: IO[bytes], message: bytes) -> None:
    pipe.write(_LENGTH.pack(len(message)) + message)
    pipe.flush()


def _receive(pipe: IO[bytes]) -> Any:
    """The next message. Raises EOFError where there is none, or half of one."""
    head = pipe.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        raise EOFError
    (length,) = _LENGTH.unpack(head)
    body = pipe.read(length)
    if len(body) < length:
        raise EOFError
    return msgpack.unpackb(body)


# -- in the process --------------------------------------------------------------------------------------------------


def _part(
    wanted: Callable[[], None], final: str, step: int, trained: bool, rows: Sequence[tuple[Any, Sequence[Any]]]
) -> None:
    write_part(Path(final), step, trained, [StoredRow(Shard(*place), *facts) for place, facts in rows], wanted)


def _checkpoint(wanted: Callable[[], None], partial: str, facts: str, places: Sequence[Any]) -> str:
    state = CheckpointState(buffer=(), **json.loads(facts))
    return str(write_checkpoint(Path(partial), state, [Shard(*place) for place in places], wanted))


_JOBS: dict[str, Callable[..., Any]] = {"part": _part, "checkpoint": _checkpoint}


def main() -> None:
    """Do jobs until there are no more. The arguments: the process id of whose they are, and its version: one that was replaced
    while it lives gets an error for each, as its jobs may mean something else by now."""
    owner, theirs = int(sys.argv[1]), sys.argv[2]
    requests, replies = take_pipes()

    def wanted() -> None:
        if os.getppid() != owner:  # a resume may have begun: what is not there by now is not to come
            os._exit(1)

    with os.fdopen(requests, "rb") as asked, os.fdopen(replies, "wb") as answers:
        while True:
            try:
                name, *arguments = _receive(asked)
            except EOFError:
                return
            answer: tuple[Any, ...]
            try:
                if theirs != __version__:
                    raise RunError(f"it is rl-coserve {__version__}, the run {theirs}: end the run and resume it")
                answer = "ok", _JOBS[name](wanted, *arguments)
            except OSError as error:
                answer = "os", error.errno or 0, error.strerror or str(error), str(error.filename or "")
            except Exception as error:  # noqa: BLE001  the border of a process: everything is reported to the other side
                answer = "error", str(error) if isinstance(error, RunError) else repr(error)
            _send(answers, msgpack.packb(answer))


if __name__ == "__main__":
    main()
