"""A slow network link in front of a relay: a token bucket in user space, for benchmarks. Not a network.

What it does: a call that carries n bytes returns no sooner than n / rate after the link was free, and each call waits one
round trip first. Bytes cross while the call behind it does its own work (as a stream through a router does), so a call
takes the longer of the two, not their sum. Calls of several threads share the link in the order they come. What it does
not do: packets, headers, losses, slow start, a queue that overflows. A real link is slower by these.

Counted on the way: calls by name, and payload bytes.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence

from orchestrator.api import MetadataStore, Relay
from orchestrator.transfer.registered_buffers import RangeRelay, RegisteringRelay

BURST_BYTES = 64 << 10  # what may cross at once after the link was idle


class Link:
    """``bits_per_second`` may be changed between calls; infinite: only counts."""

    def __init__(
        self,
        bits_per_second: float = math.inf,
        round_trip: float = 0.0,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.bits_per_second, self.round_trip = bits_per_second, round_trip
        self.calls: Counter[str] = Counter()
        self.bytes = 0
        self._clock, self._sleep = clock, sleep
        self._free = -math.inf
        self._lock = threading.Lock()

    def restart(self, bits_per_second: float) -> None:
        """Count from nothing, at another speed."""
        with self._lock:
            self.bits_per_second, self.bytes, self._free = bits_per_second, 0, -math.inf
            self.calls.clear()

    def begin(self, call: str) -> float:
        """One message there and back; returns when the call began."""
        with self._lock:
            self.calls[call] += 1
        begun = self._clock()
        if self.round_trip > 0:
            self._sleep(self.round_trip)
        return begun

    def cross(self, begun: float, size: int) -> None:
        """Return when ``size`` bytes, offered at ``begun``, are across."""
        rate = self.bits_per_second / 8
        with self._lock:
            self.bytes += size
            self._free = max(self._free, begun - BURST_BYTES / rate) + size / rate
            rest = self._free - self._clock()
        if rest > 0:
            self._sleep(rest)


class LinkedRelay:
    """Implements :class:`orchestrator.api.Relay`, ``RegisteringRelay`` and ``RangeRelay``: a relay behind a link.
    Closes it, too.
    """

    def __init__(self, relay: Relay, link: Link) -> None:
        self._relay, self._link = relay, link

    def put(self, key: str, data: memoryview) -> None:
        begun = self._link.begin("put")
        self._relay.put(key, data)
        self._link.cross(begun, data.nbytes)

    def get_into(self, key: str, buffer: memoryview) -> int:
        begun = self._link.begin("get_into")
        read = self._relay.get_into(key, buffer)
        self._link.cross(begun, read)
        return read

    def get_ranges(self, key: str, ranges: Sequence[tuple[int, int, int]], buffer: memoryview) -> int:
        relay = self._relay
        if not isinstance(relay, RangeRelay):
            raise TypeError(f"{type(relay).__name__} cannot read parts of an object")
        begun = self._link.begin("get_ranges")
        read = relay.get_ranges(key, ranges, buffer)
        self._link.cross(begun, read)
        return read

    def size(self, key: str) -> int:
        self._link.begin("size")
        return self._relay.size(key)

    def remove(self, key: str) -> bool:
        self._link.begin("remove")
        return self._relay.remove(key)

    def register(self, buffer: memoryview) -> None:
        if isinstance(self._relay, RegisteringRelay):
            self._relay.register(buffer)

    def unregister(self, buffer: memoryview) -> None:
        if isinstance(self._relay, RegisteringRelay):
            self._relay.unregister(buffer)

    def close(self) -> None:
        self._relay.close()


class LinkedMetadata:
    """Implements :class:`orchestrator.api.MetadataStore`: a store behind a link. Its values are counted as messages only."""

    def __init__(self, store: MetadataStore, link: Link) -> None:
        self._store, self._link = store, link

    def get(self, key: str) -> tuple[bytes, int] | None:
        self._link.begin("get")
        return self._store.get(key)

    def compare_and_set(self, key: str, value: bytes, revision: int) -> bool:
        self._link.begin("compare_and_set")
        return self._store.compare_and_set(key, value, revision)

    def close(self) -> None:
        self._store.close()
