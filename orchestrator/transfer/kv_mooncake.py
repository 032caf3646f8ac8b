"""Blocks of KV over Mooncake's transfer engine: TCP, or RDMA where there is a device (Heddle 5.3; RollArt 6.3).

Only the bytes go this way. Who wants a prefix asks as ever (:mod:`orchestrator.transfer.kv_wire`): that channel proves
the token on both sides, checks versions and layout, and carries the digests. The source lays the blocks into memory
that Mooncake was told of, and says where; the destination reads them from there, into such memory of its own.

Guarantees:

* What was read is copied out before it is compared with its digests, so that nothing changes after it was checked.
* The memory of both is one region that stays until :meth:`MooncakeCarrier.close`: whoever reads late reads other bytes, which the
  digests refuse, and never memory that is gone. A place that a read may still write to is not given to another one.
* A read ends within the limit of its move, whatever the peer does; Mooncake's own call, which may take 30 s on a peer that hangs,
  is left behind in its thread.

What it does not do: Mooncake's port is open on all interfaces and asks nobody who he is. Whoever reaches it can read and write
that region (nothing else of the process; tried with 0.3.13). docs/kv_transfer.md says what follows.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from orchestrator.api import ConfigError
from orchestrator.transfer.kv_wire import KvRefused
from orchestrator.transfer.mooncake_relay import TCP_SLICE_BYTES, missing_library
from orchestrator.transfer.rdma_devices import check_device

ALIGNMENT = 4096  # bytes

Bytes = NDArray[np.uint8]


class SpanAllocator:
    """Places in ``size`` bytes, first fit. Thread-safe."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._taken: dict[int, int] = {}  # start -> end
        self._lock = threading.Lock()

    def allocate(self, size: int) -> int:
        """Where so many bytes begin; -1: there is no room."""
        size = max(ALIGNMENT, -(-size // ALIGNMENT) * ALIGNMENT)
        with self._lock:
            begin = 0
            for start, end in sorted(self._taken.items()):
                if start - begin >= size:
                    break
                begin = end
            if begin + size > self._size:
                return -1
            self._taken[begin] = begin + size
            return begin

    def free_span(self, start: int) -> None:
        """It is free again."""
        with self._lock:
            del self._taken[start]

    @property
    def free(self) -> int:
        """Bytes, not necessarily in one piece."""
        with self._lock:
            return self._size - sum(end - start for start, end in self._taken.items())


class MooncakeCarrier:
    """One process's end. ``host``: the address that peers reach it at; ``room``: bytes of its region, one half for blocks that go
    out, one for those that come. Raises ConfigError."""

    name = "mooncake"

    def __init__(self, host: str, protocol: str = "tcp", device: str = "", room: int = 256 << 20) -> None:
        check_device(protocol, device)
        os.environ.setdefault("MC_TCP_SLICE_SIZE", str(TCP_SLICE_BYTES))  # read once, when the library is loaded
        os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
        try:
            from mooncake.engine import TransferEngine
        except ImportError as error:
            found = missing_library(str(error))
            raise ConfigError("rollout.kv_transfer.carrier", self.name, found.fix) from error
        self.protocol = protocol
        self._engine: Any = TransferEngine()
        half = max(ALIGNMENT, room // 2 // ALIGNMENT * ALIGNMENT)
        if self._engine.initialize(host, "P2PHANDSHAKE", protocol, device):
            fix = f"Mooncake's transfer engine does not start at {host}; see its message above"
            raise ConfigError("rollout.kv_transfer.protocol", protocol, fix)
        self._region = np.empty(2 * half, np.uint8)  # pages come as they are used
        self._out, self._in, self._half = SpanAllocator(half), SpanAllocator(half), half
        if self._engine.register_memory(self._region.ctypes.data, self._region.nbytes):
            fix = f"Mooncake cannot use {self._region.nbytes >> 20} MiB of memory; with RDMA see `ulimit -l`"
            raise ConfigError("rollout.kv_transfer.staging_mb", room >> 20, fix)
        port = self._engine.get_rpc_port()
        self.place = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self._closed = threading.Event()

    @contextmanager
    def lend(self, payload: Bytes) -> Iterator[dict[str, Any]]:
        """For as long as it lasts these bytes can be read at what it gives. Raises KvRefused."""
        start = -1 if self._closed.is_set() else self._out.allocate(payload.nbytes)
        if start < 0:
            raise KvRefused("no_room", f"{payload.nbytes} bytes, {self._out.free} are free for KV that goes out")
        try:
            self._region[start : start + payload.nbytes] = payload.reshape(-1)
            yield {"place": self.place, "address": self._region.ctypes.data + start}
        finally:
            self._out.free_span(start)

    def read(self, offer: Mapping[str, Any], size: int, limit: float) -> Bytes:
        """So many bytes of what :meth:`lend` gave elsewhere, within ``limit`` seconds. Raises KvRefused."""
        place, address = offer.get("place"), offer.get("address")
        if not isinstance(place, str) or type(address) is not int or not 0 < address < 1 << 64:
            raise KvRefused("malformed", "no place in Mooncake's memory")
        start = -1 if self._closed.is_set() else self._in.allocate(size)
        if start < 0:
            raise KvRefused("no_room", f"{size} bytes, {self._in.free} are free for KV that comes")
        begin = self._half + start
        codes: list[int] = []

        def go() -> None:
            try:
                codes.append(self._engine.transfer_sync_read(place, self._region.ctypes.data + begin, address, size))
            finally:
                done.set()
                with guard:
                    if left.is_set():  # nobody waits any more
                        self._in.free_span(start)

        done, left, guard = threading.Event(), threading.Event(), threading.Lock()
        threading.Thread(target=go, name="kv mooncake", daemon=True).start()
        try:
            if not done.wait(max(0.0, limit)):
                raise TimeoutError
            if codes != [0]:
                raise KvRefused("unreachable", f"Mooncake could not read from {place} (code {codes})")
            return self._region[begin : begin + size].copy()
        finally:
            with guard:
                if done.is_set():
                    self._in.free_span(start)
                else:
                    left.set()

    def close(self) -> None:
        """Lend and read no more. The region stays as long as the engine, which has no end of its own. Idempotent."""
        if not self._closed.is_set():
            self._closed.set()
            self._engine.unregister_memory(self._region.ctypes.data)
