"""The relay on a file system or object store that fsspec knows (``s3://``, ``gs://``, ``file://``, ...), for clusters without a
Mooncake Store between them. fsspec, and what it needs for the protocol, is loaded when the first relay is opened.

Guarantees: an object is written once and appears whole or not at all. On a local or mounted file system it is written under
a temporary name beside it and linked to its own, which fails where something has that name; elsewhere it is one exclusive
create (``mode="create"``) of the whole object, as object stores make it visible. What a killed writer left under a temporary
name goes when the object is removed. Nothing is cached: a size is asked from the store each time.

Known limits: there are no leases, so an object may be removed under a reader, who then gets RelayError "missing" and starts
again (a file that is open stays readable); subscribers therefore say what they fetch (``Subscriber.hold``). Whether an
exclusive create is atomic is the store's matter; the publisher never uses a key twice, so this guards against mistakes
only. Files are not synced: after a power cut, what the store lost is found by size and digest.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from orchestrator.api import ConfigError
from orchestrator.transfer.transfer_errors import RelayError

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)
_MKDIR_TRIES = 8
_REMOVERS = (
    16  # threads: of a version of hundreds of gigabytes there are thousands of objects, each a round trip or three
)


class FsspecRelay:
    """Implements :class:`orchestrator.api.Relay`. ``url``: the folder or prefix that objects are kept under."""

    def __init__(self, url: str) -> None:
        try:
            import fsspec
        except ImportError as error:
            raise ConfigError(
                "relay.kind", "fsspec", "needs the package fsspec: pip install rl-coserve[fsspec]"
            ) from error
        try:
            self._fs, root = fsspec.core.url_to_fs(url, use_listings_cache=False)
        except (ImportError, ValueError, OSError) as error:
            raise ConfigError("relay.master", url, f"fsspec cannot open it: {error}") from error
        self._root = str(root).rstrip("/")
        self._local = "file" in _protocols(self._fs)
        self._closed = False

    def put(self, key: str, data: memoryview) -> None:
        path = self._path(key)
        with _named(key):
            if self._fs.exists(path):
                raise FileExistsError(path)
            if self._local:
                self._put_file(Path(path), data)
            else:
                self._fs.pipe_file(path, bytes(data), mode="create")

    def get_into(self, key: str, buffer: memoryview) -> int:
        path, target = self._path(key), buffer.cast("B")
        with _named(key):
            if not self._local:
                value = self._fs.cat_file(path)
                _check_room(key, len(value), target)
                target[: len(value)] = value
                return len(value)
            with open(path, "rb", buffering=0) as file:
                _check_room(key, os.fstat(file.fileno()).st_size, target)
                return _read(file, target)

    def get_ranges(self, key: str, ranges: Sequence[tuple[int, int, int]], buffer: memoryview) -> int:
        """See :class:`orchestrator.transfer.registered_buffers.RangeRelay`."""
        path, target, written = self._path(key), buffer.cast("B"), 0
        for _, length, place in ranges:
            _check_room(key, place + length, target)
        with _named(key):
            if not self._local:
                starts, ends = [start for start, _, _ in ranges], [start + length for start, length, _ in ranges]
                found = self._fs.cat_ranges([path] * len(ranges), starts, ends, on_error="raise")
                for value, (_, length, place) in zip(found, ranges, strict=True):
                    target[place : place + len(value[:length])] = value[:length]
                    written += len(value[:length])
                return written
            with open(path, "rb", buffering=0) as file:
                for start, length, place in ranges:
                    file.seek(start)
                    written += _read(file, target[place : place + length])
        return written

    def size(self, key: str) -> int:
        path = self._path(key)
        try:
            with _named(key):
                return int(self._fs.size(path))
        except RelayError as error:
            if error.reason == "missing":
                return -1
            raise

    def remove(self, key: str) -> bool:
        path = self._path(key)
        with _named(key):
            if self._local:
                left = Path(path)
                for one in (left, _aside(left)):
                    one.unlink(missing_ok=True)
                self._drop_empty(left.parent)
                return True
            try:
                self._fs.rm_file(path)
            except FileNotFoundError:
                return True  # it is gone, which is what was asked
        return True

    def remove_all(self, keys: Sequence[str]) -> bool:
        """See :class:`orchestrator.transfer.registered_buffers.RemovingRelay`."""
        with ThreadPoolExecutor(_REMOVERS, "relay remove") as threads:
            return all(threads.map(self.remove, keys))

    def close(self) -> None:
        self._closed = True

    def _drop_empty(self, folder: Path) -> None:
        """A long run has thousands of versions."""
        while folder != Path(self._root) and Path(self._root) in folder.parents:
            try:
                folder.rmdir()
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT):
                    raise
                return
            folder = folder.parent

    def _put_file(self, path: Path, data: memoryview) -> None:
        for _ in range(_MKDIR_TRIES - 1):
            try:
                self._write_file(path, data)
                return
            except FileNotFoundError:  # somebody removed the last object beside it, and with it the folder
                continue
        self._write_file(path, data)

    def _write_file(self, path: Path, data: memoryview) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = _aside(path)
        file = open(aside, "xb", buffering=0)  # noqa: SIM115  who finds it there has lost: it is another's, not to be removed
        try:
            with file:
                rest = data.cast("B")
                while rest.nbytes:
                    rest = rest[file.write(rest) :]
            try:
                os.link(aside, path)
            except OSError as error:
                if error.errno not in _NO_LINKS:
                    raise
                os.replace(aside, path)  # no hard links here; that nothing had the name was checked
        finally:
            aside.unlink(missing_ok=True)

    def _path(self, key: str) -> str:
        if self._closed:
            raise RelayError("closed", "this relay was closed")
        return f"{self._root}/{key}"


def _aside(path: Path) -> Path:
    """Where an object is while it is written. One name, so that nobody has to look through a folder of thousands for it."""
    return path.with_name(f".{path.name}.tmp")


def _read(file: Any, target: memoryview) -> int:
    read = 0
    while read < target.nbytes and (count := file.readinto(target[read:])):
        read += count
    return read


def _check_room(key: str, size: int, target: memoryview) -> None:
    if size > target.nbytes:
        raise RelayError("buffer", f"{key} needs {size} B, the buffer has {target.nbytes} B")


def _protocols(fs: Any) -> tuple[str, ...]:
    return (fs.protocol,) if isinstance(fs.protocol, str) else tuple(fs.protocol)


@contextmanager
def _named(key: str) -> Iterator[None]:
    """The store's errors as ours."""
    try:
        yield
    except FileExistsError as error:
        raise RelayError("exists", f"{key} was already written; objects are written once") from error
    except FileNotFoundError as error:
        raise RelayError("missing", f"no object {key}") from error
    except (PermissionError, NotADirectoryError, IsADirectoryError) as error:
        raise RelayError("setup", f"{key}: {error}") from error
    except TimeoutError as error:
        raise RelayError("unreachable", f"{key}: {error}") from error
    except OSError as error:
        reason = "relay_full" if error.errno in _FULL else "transfer"
        raise RelayError(reason, f"{key}: {error}") from error
