"""In-memory relay and metadata store: the semantics of the real ones, one process, no clock.

Guarantees: an object is written once (a second put of its key is an error, never a silent change); a missing key is a
RelayError. What is stored lives as long as a handle of the same store does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Self
from weakref import WeakValueDictionary

from orchestrator.transfer.transfer_errors import RelayError


class _Stored:
    """What all handles of one store share."""

    def __init__(self) -> None:
        self.data: dict[str, Any] = {}


class _Handle:
    """One of a store's handles, closed independently."""

    _named: ClassVar[WeakValueDictionary[str, _Stored]]

    def __init__(self) -> None:
        self._shared = _Stored()
        self._closed = False

    @classmethod
    def shared(cls, name: str) -> Self:
        """A handle of the store of that name in this process; the first one creates it."""
        handle = cls()
        handle._shared = cls._named.setdefault(name, handle._shared)
        return handle

    def close(self) -> None:
        self._closed = True

    def _open(self) -> dict[str, Any]:
        if self._closed:
            raise RelayError("closed", f"this handle of a {type(self).__name__} was closed")
        return self._shared.data


class MemoryRelay(_Handle):
    """Implements :class:`orchestrator.api.Relay`."""

    _named: ClassVar[WeakValueDictionary[str, _Stored]] = WeakValueDictionary()

    def put(self, key: str, data: memoryview) -> None:
        if key in self._open():
            raise RelayError("exists", f"{key} was already written; objects are written once")
        self._open()[key] = bytes(data)

    def get_into(self, key: str, buffer: memoryview) -> int:
        value = self._value(key)
        if len(value) > buffer.nbytes:
            raise RelayError("buffer", f"{key} has {len(value)} B, the buffer {buffer.nbytes} B")
        buffer.cast("B")[: len(value)] = value
        return len(value)

    def get_many(self, wanted: Sequence[tuple[str, memoryview]]) -> list[int]:
        """See :class:`orchestrator.transfer.registered_buffers.BatchRelay`."""
        return [self.get_into(key, buffer) for key, buffer in wanted]

    def get_ranges(self, key: str, ranges: Sequence[tuple[int, int, int]], buffer: memoryview) -> int:
        """See :class:`orchestrator.transfer.registered_buffers.RangeRelay`."""
        value, target, written = self._value(key), buffer.cast("B"), 0
        for offset, length, place in ranges:
            if offset + length > len(value) or place + length > target.nbytes:
                detail = f"{key} has {len(value)} B, the buffer {target.nbytes} B: {offset}, {length}"
                raise RelayError("buffer", detail)
            target[place : place + length] = value[offset : offset + length]
            written += length
        return written

    def size(self, key: str) -> int:
        value = self._open().get(key)
        return -1 if value is None else len(value)

    def remove(self, key: str) -> bool:
        self._open().pop(key, None)
        return True

    def keys(self) -> list[str]:
        """All object keys, sorted."""
        return sorted(self._open())

    def _value(self, key: str) -> bytes:
        value: bytes | None = self._open().get(key)
        if value is None:
            raise RelayError("missing", f"no object {key}")
        return value


class MemoryMetadata(_Handle):
    """Implements :class:`orchestrator.api.MetadataStore`."""

    _named: ClassVar[WeakValueDictionary[str, _Stored]] = WeakValueDictionary()

    def get(self, key: str) -> tuple[bytes, int] | None:
        return self._open().get(key)

    def compare_and_set(self, key: str, value: bytes, revision: int) -> bool:
        data = self._open()
        _, present = data.get(key, (b"", 0))
        if present != revision:
            return False
        data[key] = (bytes(value), revision + 1)
        return True
