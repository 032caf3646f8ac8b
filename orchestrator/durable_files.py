"""Files that survive a power cut: what :func:`sync` returned from is on disk, and so is its name in its folder.

A file is written aside, synced, renamed, and then its folder is synced, in this order: a name never stands for half a file. A
log (:class:`JournalFile`) reaches the operating system line by line, so that a killed process loses none, and the disk at
:meth:`JournalFile.sync`: before a checkpoint is committed and a trajectory stored, and by :class:`GroupCommit` in between, in
a thread, as an event loop must not wait for a disk.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Protocol, Self

from orchestrator.api import RunError

_TAIL = 1 << 20  # bytes that are read at a time to find the last line


class Syncable(Protocol):
    """What has to be on disk before something else may be."""

    def sync(self) -> None: ...


def sync(path: Path) -> None:
    """A file's content, or the names in a folder, are on disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def describe_byte(byte: int) -> str:
    """What is wrong with a line that is no text."""
    return f"byte 0x{byte:02x} that is not UTF-8: the file is damaged"


def replace_text(file: Path, text: str) -> None:
    """The whole of ``text`` under this name, or what was there before; a power cut may leave neither. Raises OSError."""
    partial = file.with_name(f".{file.name}.partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, file)


def write_durably(file: Path, text: str) -> None:
    """The whole of ``text`` under this name, or what was there before. Raises OSError."""
    partial = file.with_name(f".{file.name}.partial")
    partial.write_text(text, encoding="utf-8")
    sync(partial)
    os.replace(partial, file)
    sync(file.parent)


class JournalFile:
    """A log of lines that is appended to. Half a line at its end, of a process or a machine that died while it wrote, is cut off
    when it is opened; ``cut`` is its bytes. After an error nothing more is written, as it would stand behind half a line: each
    :meth:`write` and :meth:`sync` then raises RunError."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.cut = 0
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        self._lock = threading.Lock()  # of closing: a thread may be syncing
        self._unsynced = True  # what an earlier process left may be
        self._error = ""
        self._close_off()
        sync(path.parent)

    def write(self, line: str, /) -> None:
        """Append a line, with its end. Raises RunError when it cannot be."""
        if self._error:
            raise RunError(self._error)
        rest = line.encode()
        self._unsynced = True
        try:
            while rest:
                rest = rest[os.write(self._file, rest) :]
        except OSError as error:
            raise self._broken("written", error) from error

    def sync(self) -> None:
        """All lines so far are on disk; from any thread. Raises RunError when they cannot be: a second try would say that they
        are, though the system has dropped them."""
        with self._lock:
            if self._error:
                raise RunError(self._error)
            if self._file < 0 or not self._unsynced:
                return
            self._unsynced = False  # a line that comes meanwhile is for the next time
            try:
                os.fsync(self._file)
            except OSError as error:
                raise self._broken("synced", error) from error

    def lines(self) -> Iterator[str]:
        """All lines, each read when it is asked for: a week's are gigabytes. What is not UTF-8 comes as lone surrogates."""
        with self.path.open(encoding="utf-8", errors="surrogateescape", newline="\n") as stream:
            for line in stream:
                yield line.removesuffix("\n")

    def keep(self, lines: int) -> None:
        """Cut off what comes after so many lines, durably."""
        with self.path.open("rb") as stream:
            end = sum(map(len, islice(stream, lines)))
        os.ftruncate(self._file, end)
        os.fsync(self._file)

    def close(self) -> None:
        """Sync, unless it failed before, and close. Idempotent."""
        try:
            if not self._error:
                self.sync()
        finally:
            with self._lock:
                if self._file >= 0:
                    os.close(self._file)
                self._file = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _close_off(self) -> None:
        end, last = os.fstat(self._file).st_size, b""
        while end and b"\n" not in last:
            begin = max(0, end - _TAIL)
            last = os.pread(self._file, end - begin, begin) + last
            end = begin
        last = last[last.rfind(b"\n") + 1 :]
        if not last:
            return
        try:
            json.loads(last)  # all but the line's end was written
        except (ValueError, RecursionError):
            self.cut = len(last)
            os.ftruncate(self._file, os.fstat(self._file).st_size - len(last))
        else:
            os.write(self._file, b"\n")

    def _broken(self, what: str, error: OSError) -> RunError:
        self._error = f"{self.path} cannot be {what}: {error.strerror or error}"
        return RunError(self._error)


class GroupCommit:
    """Syncs logs every ``seconds``, in a thread, until it is closed. What fails is raised by the log's next write."""

    def __init__(self, files: Sequence[JournalFile], seconds: float) -> None:
        self._files = files
        self._seconds = seconds
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="group commit", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop. The logs are not synced once more: closing them does that."""
        self._ended.set()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self) -> None:
        while not self._ended.wait(self._seconds):
            for file in self._files:
                try:
                    file.sync()
                except RunError:  # the run meets it at its next line
                    return
