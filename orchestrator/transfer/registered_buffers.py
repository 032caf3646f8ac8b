"""Memory that relay objects are read into and written from: registered with the relay, reused only when nobody looks.

Guarantees: an array that was handed out keeps its content for as long as it, or any view of it (a torch tensor made
from it included), is referenced; only then is its memory used again or given back. So a consumer that holds tensors of
an earlier bucket, as layer-wise loaders do, can never see bytes of a later one. Two idle buffers are kept.

How it is known: each lease is a fresh array over an anonymous mmap. Views keep that array alive (numpy does not look
through an array whose owner is not an array), so a weak reference to it dies with the last view.
"""

from __future__ import annotations

import mmap
import threading
import weakref
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np

from orchestrator.api import Relay
from orchestrator.transfer.bucket import Bytes

IDLE_BUFFERS = 2
GRANULE = 1 << 16  # sizes are rounded up to this, so that buckets of nearly equal size share buffers


@runtime_checkable
class RegisteringRelay(Protocol):
    """A relay that transfers without a copy from memory it was told about."""

    def register(self, buffer: memoryview) -> None:
        """Prepare ``buffer`` for transfers."""

    def unregister(self, buffer: memoryview) -> None:
        """Before it is freed."""


@runtime_checkable
class RangeRelay(Protocol):
    """A relay that can read parts of an object."""

    def get_ranges(self, key: str, ranges: Sequence[tuple[int, int, int]], buffer: memoryview) -> int:
        """Fill ``buffer`` with (offset in the object, length, offset in the buffer); returns the bytes written.

        Raises RetryableError when missing or failed.
        """


@runtime_checkable
class BatchRelay(Protocol):
    """A relay that can read several objects in one call."""

    def get_many(self, wanted: Sequence[tuple[str, memoryview]]) -> list[int]:
        """As ``get_into`` for each (key, buffer); returns the bytes of each. Raises when one is missing or failed."""


@runtime_checkable
class RemovingRelay(Protocol):
    """A relay that removes many objects faster than one after the other."""

    def remove_all(self, keys: Sequence[str]) -> bool:
        """As ``remove`` for each, in any order; whether all are gone."""


class _Buffer:
    def __init__(self, size: int) -> None:
        self.memory = mmap.mmap(-1, size)
        self.lease: weakref.ref[Bytes] | None = None

    def idle(self) -> bool:
        return self.lease is None or self.lease() is None


class BufferPool:
    """Buffers of one publisher or subscriber. The last view of one may die in any thread."""

    def __init__(self, relay: Relay) -> None:
        self._relay = relay
        self._buffers: list[_Buffer] = []
        self._closed = False
        self._lock = threading.RLock()  # re-entrant: a garbage collection inside may end a view

    def acquire(self, size: int) -> Bytes:
        """An array of at least ``size`` bytes with undefined content, free again when its last view is gone."""
        with self._lock:
            fitting = [buffer for buffer in self._buffers if buffer.idle() and len(buffer.memory) >= size]
            buffer = min(fitting, key=lambda item: len(item.memory)) if fitting else self._new(size)
            array: Bytes = np.frombuffer(buffer.memory, dtype=np.uint8)
            buffer.lease = weakref.ref(array, lambda _: self._trim())
            return array

    @property
    def bytes(self) -> int:
        """Memory held now."""
        return sum(len(buffer.memory) for buffer in self._buffers)

    def close(self) -> None:
        """Forget all buffers; those with living views are freed when these die."""
        with self._lock:
            self._closed = True
            for buffer in self._buffers:
                self._unregister(buffer)
            self._buffers.clear()

    def _new(self, size: int) -> _Buffer:
        buffer = _Buffer(max(1, -(-size // GRANULE)) * GRANULE)
        if isinstance(self._relay, RegisteringRelay):
            self._relay.register(memoryview(buffer.memory))
        self._buffers.append(buffer)
        return buffer

    def _trim(self) -> None:
        with self._lock:
            if self._closed:
                return
            idle = [buffer for buffer in self._buffers if buffer.idle()]
            for buffer in idle[: max(0, len(idle) - IDLE_BUFFERS)]:
                self._unregister(buffer)
                self._buffers.remove(buffer)

    def _unregister(self, buffer: _Buffer) -> None:
        if isinstance(self._relay, RegisteringRelay):
            self._relay.unregister(memoryview(buffer.memory))
