"""In-memory twins of the relay and the metadata store: same semantics, one process, no clock. For tests and simulator.

Guarantees: an object is written once (a second put of its key is an error, never a silent change); a missing key is a
RelayError; a put beyond ``capacity_bytes`` is ``relay_full``; a leased object is not removed. Where Mooncake leases by
time, the twin is told: :meth:`MemoryRelay.lease` and :meth:`MemoryRelay.release`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Self
from weakref import WeakValueDictionary

from orchestrator.transfer.transfer_errors import RelayError


class _Objects:
    """What all handles of one in-memory relay share."""

    def __init__(self, capacity_bytes: int | None) -> None:
        self.capacity_bytes = capacity_bytes
        self.data: dict[str, bytes] = {}
        self.leases: dict[str, int] = {}
        self.used = 0


class MemoryRelay:
    """Implements :class:`orchestrator.api.Relay`. Objects live as long as a handle of the same relay does."""

    _named: ClassVar[WeakValueDictionary[str, _Objects]] = WeakValueDictionary()

    def __init__(self, capacity_bytes: int | None = None) -> None:
        self._shared = _Objects(capacity_bytes)
        self._closed = False

    @classmethod
    def shared(cls, name: str) -> Self:
        """A handle of the relay of that name in this process; the first one creates it, without a capacity limit."""
        handle = cls()
        handle._shared = cls._named.setdefault(name, handle._shared)
        return handle

    def handle(self) -> MemoryRelay:
        """Another handle of the same objects, closed independently."""
        other = MemoryRelay()
        other._shared = self._shared
        return other

    def put(self, key: str, data: memoryview) -> None:
        objects = self._open()
        if key in objects.data:
            raise RelayError("exists", f"{key} was already written; objects are written once")
        if objects.capacity_bytes is not None and objects.used + data.nbytes > objects.capacity_bytes:
            raise RelayError(
                "relay_full", f"{key} needs {data.nbytes} B, {objects.capacity_bytes - objects.used} B are free"
            )
        objects.data[key] = bytes(data)
        objects.used += data.nbytes

    def get_into(self, key: str, buffer: memoryview) -> int:
        value = self._open().data.get(key)
        if value is None:
            raise RelayError("missing", f"no object {key}")
        if len(value) > buffer.nbytes:
            raise RelayError("buffer", f"{key} has {len(value)} B, the buffer {buffer.nbytes} B")
        buffer.cast("B")[: len(value)] = value
        return len(value)

    def get_many(self, wanted: Sequence[tuple[str, memoryview]]) -> list[int]:
        """See :class:`orchestrator.transfer.registered_buffers.BatchRelay`."""
        return [self.get_into(key, buffer) for key, buffer in wanted]

    def get_ranges(self, key: str, ranges: Sequence[tuple[int, int, int]], buffer: memoryview) -> int:
        """See :class:`orchestrator.transfer.registered_buffers.RangeRelay`."""
        value = self._open().data.get(key)
        if value is None:
            raise RelayError("missing", f"no object {key}")
        target, written = buffer.cast("B"), 0
        for offset, length, place in ranges:
            if offset + length > len(value) or place + length > target.nbytes:
                raise RelayError(
                    "buffer", f"{key} has {len(value)} B, the buffer {target.nbytes} B: {offset}, {length}"
                )
            target[place : place + length] = value[offset : offset + length]
            written += length
        return written

    def size(self, key: str) -> int:
        value = self._open().data.get(key)
        return -1 if value is None else len(value)

    def remove(self, key: str) -> bool:
        objects = self._open()
        if objects.leases.get(key, 0) > 0:
            return False
        value = objects.data.pop(key, None)
        if value is not None:
            objects.used -= len(value)
        return True

    def close(self) -> None:
        self._closed = True

    def keys(self) -> list[str]:
        """All object keys, sorted."""
        return sorted(self._open().data)

    def lease(self, key: str) -> None:
        """Protect an object from removal, as a reader of the real store does; counted."""
        leases = self._open().leases
        leases[key] = leases.get(key, 0) + 1

    def release(self, key: str) -> None:
        """Undo one ``lease``."""
        leases = self._open().leases
        if leases.get(key, 0) < 1:
            raise RelayError("unknown", f"{key} is not leased")
        leases[key] -= 1

    def tamper(self, key: str, value: bytes) -> None:
        """Replace an object's bytes behind everybody's back: fault injection only."""
        objects = self._open()
        objects.used += len(value) - len(objects.data.get(key, b""))
        objects.data[key] = value

    def _open(self) -> _Objects:
        if self._closed:
            raise RelayError("closed", "this relay handle was closed")
        return self._shared


class _Values:
    def __init__(self) -> None:
        self.data: dict[str, tuple[bytes, int]] = {}


class MemoryMetadata:
    """Implements :class:`orchestrator.api.MetadataStore`."""

    _named: ClassVar[WeakValueDictionary[str, _Values]] = WeakValueDictionary()

    def __init__(self) -> None:
        self._shared = _Values()
        self._closed = False

    @classmethod
    def shared(cls, name: str) -> Self:
        """A handle of the store of that name in this process."""
        handle = cls()
        handle._shared = cls._named.setdefault(name, handle._shared)
        return handle

    def get(self, key: str) -> tuple[bytes, int] | None:
        return self._open().data.get(key)

    def compare_and_set(self, key: str, value: bytes, revision: int) -> bool:
        data = self._open().data
        _, present = data.get(key, (b"", 0))
        if present != revision:
            return False
        data[key] = (bytes(value), revision + 1)
        return True

    def close(self) -> None:
        self._closed = True

    def _open(self) -> _Values:
        if self._closed:
            raise RelayError("closed", "this metadata handle was closed")
        return self._shared
