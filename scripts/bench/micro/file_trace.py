"""A recorder of what a program does to the files under a folder: writes, syncs, new names, in order.

It stands at Python's layer of files (``os`` and ``open``), within :func:`recorded`. What is written past it, by Arrow's C++ or
through a buffered ``open``, is seen whole at the next operation on any file, so never later than its own sync or rename; lines
of journals go through ``os.write`` and are seen one by one.
"""

from __future__ import annotations

import builtins
import io
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

_REAL_OPEN = io.open


@dataclass(frozen=True, slots=True)
class Operation:
    """``kind``: create, write, truncate, sync, rename, unlink, mkdir, rmdir or mark; paths are relative to the folder, "." is
    itself. ``at``: offset of a write, size of a truncation. ``to``: the new name. ``mark``: what the program said then."""

    kind: str
    path: str = ""
    at: int = 0
    data: bytes = b""
    to: str = ""
    mark: Any = None


@dataclass
class Trace:
    """What was done under ``root``."""

    root: Path
    operations: list[Operation] = field(default_factory=list)
    _lock: threading.RLock = field(default_factory=threading.RLock)
    _seen: dict[str, int] = field(default_factory=dict)  # size of each file, as recorded
    _open: dict[str, bytes] = field(default_factory=dict)  # content, as recorded, of files written past us

    def mark(self, what: Any) -> None:
        """Note something between two operations."""
        with self._lock:
            self._catch_up()
            self._add(Operation("mark", mark=what))

    def _add(self, operation: Operation) -> None:
        self.operations.append(operation)

    def _name(self, path: Any, directory: int | None = None) -> str | None:
        """Relative to the root; None: not under it."""
        text = os.fspath(path)
        text = text.decode() if isinstance(text, bytes) else text
        if directory is not None:
            text = os.path.join(os.readlink(f"/proc/self/fd/{directory}"), text)
        found = os.path.relpath(os.path.abspath(text), self.root)
        return None if found.startswith("..") else found

    def _catch_up(self) -> None:
        for name, before in list(self._open.items()):
            try:
                with _REAL_OPEN(self.root / name, "rb") as stream:
                    content = stream.read()
            except FileNotFoundError:
                del self._open[name]
                continue
            if content == before:
                continue
            begin = len(before) if content.startswith(before) else 0
            if begin == 0 and before:
                self._add(Operation("truncate", name, 0))
            self._add(Operation("write", name, begin, content[begin:]))
            self._open[name], self._seen[name] = content, len(content)

    def _meet(self, name: str) -> None:
        """A file that was made past us."""
        if name not in self._seen and (self.root / name).is_file():
            self._add(Operation("create", name))
            self._seen[name] = 0
            self._open[name] = b""
        self._catch_up()

    def _forget(self, name: str) -> None:
        for known in [one for one in self._seen if one == name or one.startswith(f"{name}/")]:
            self._seen.pop(known)
            self._open.pop(known, None)

    def _renamed(self, name: str, to: str) -> None:
        moved = [one for one in self._seen if one == name or one.startswith(f"{name}/")]
        sizes = {f"{to}{one[len(name) :]}": self._seen[one] for one in moved}
        self._forget(name)
        self._forget(to)
        self._seen.update(sizes)


@contextmanager
def recorded(root: Path) -> Iterator[Trace]:
    """Record, until the end. Files that are there already are known, and taken as recorded before."""
    trace = Trace(Path(os.path.abspath(root)))
    for file in trace.root.rglob("*"):
        if file.is_file():
            trace._seen[str(file.relative_to(trace.root))] = file.stat().st_size
    replaced = _replacements(trace)
    with (
        patch.multiple(os, **replaced["os"]),
        patch.object(io, "open", replaced["open"]),
        patch.object(builtins, "open", replaced["open"]),
    ):
        yield trace
    with trace._lock:
        trace._catch_up()


def _replacements(trace: Trace) -> dict[str, Any]:
    real = {name: getattr(os, name) for name in _OF_OS}

    def named(kind: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """mkdir, rmdir, unlink and remove."""

        def wrapped(path: Any, *rest: Any, dir_fd: int | None = None, **more: Any) -> Any:
            with trace._lock:
                name = trace._name(path, dir_fd)
                if name is not None:
                    trace._catch_up()
                result = call(path, *rest, dir_fd=dir_fd, **more)
                if name is not None:
                    trace._add(Operation(kind, name))
                    trace._forget(name)
                return result

        return wrapped

    def rename(source: Any, target: Any, **more: Any) -> None:
        with trace._lock:
            name, to = trace._name(source), trace._name(target)
            if os.path.islink(source):  # `latest`, beside the run folders
                name = None
            if name is not None and to is not None:
                trace._meet(name)
            real["replace"](source, target, **more)
            if name is not None and to is not None:
                trace._add(Operation("rename", name, to=to))
                trace._renamed(name, to)

    def of_descriptor(descriptor: int) -> str | None:
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        return trace._name(path) if path.startswith("/") else None

    def fsync(descriptor: int) -> None:
        with trace._lock:
            name = of_descriptor(descriptor)
            if name is not None:
                trace._meet(name)
            real["fsync"](descriptor)
            if name is not None:
                trace._add(Operation("sync", name))
                trace._open.pop(name, None)

    def write(descriptor: int, data: Any) -> int:
        with trace._lock:
            name = of_descriptor(descriptor)
            if name is not None:
                trace._catch_up()
            written: int = real["write"](descriptor, data)
            if name is not None:
                size = trace._seen.get(name, 0)  # all that write here append
                trace._add(Operation("write", name, size, bytes(data[:written])))
                trace._seen[name] = size + written
            return written

    def ftruncate(descriptor: int, length: int) -> None:
        with trace._lock:
            name = of_descriptor(descriptor)
            real["ftruncate"](descriptor, length)
            if name is not None:
                trace._add(Operation("truncate", name, length))
                trace._seen[name] = length

    def pwrite(descriptor: int, data: Any, offset: int) -> int:
        with trace._lock:
            name = of_descriptor(descriptor)
            written: int = real["pwrite"](descriptor, data, offset)
            if name is not None:
                trace._add(Operation("write", name, offset, bytes(data[:written])))
                trace._seen[name] = max(trace._seen.get(name, 0), offset + written)
            return written

    def os_open(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        with trace._lock:
            name = trace._name(path, dir_fd) if flags & os.O_CREAT else None
            descriptor: int = real["open"](path, flags, mode, dir_fd=dir_fd)
            if name is not None and name not in trace._seen:
                trace._add(Operation("create", name))
                trace._seen[name] = 0
            return descriptor

    def python_open(file: Any, mode: str = "r", *rest: Any, **more: Any) -> Any:
        writes = not isinstance(file, int) and not mode.startswith("r")
        with trace._lock:
            name = trace._name(file) if writes else None
            if name is not None:
                trace._catch_up()
            stream = _REAL_OPEN(file, mode, *rest, **more)
            if name is not None:
                trace._add(Operation("truncate", name, 0) if name in trace._seen else Operation("create", name))
                trace._seen[name] = 0
                trace._open[name] = b""
            return stream

    made = {"rename": rename, "replace": rename, "fsync": fsync, "write": write, "ftruncate": ftruncate}
    made |= {"pwrite": pwrite, "open": os_open}
    made |= {name: named(kind, real[name]) for name, kind in _NAMED.items()}
    return {"os": made, "open": python_open}


_NAMED = {"mkdir": "mkdir", "rmdir": "rmdir", "unlink": "unlink", "remove": "unlink"}
_OF_OS = ("replace", "fsync", "write", "pwrite", "ftruncate", "open", *_NAMED)
