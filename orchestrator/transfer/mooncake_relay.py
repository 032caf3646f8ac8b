"""The relay on a Mooncake Store. Its library is loaded when the first relay is opened.

Guarantees, on a store whose own answers cannot be trusted alone (measured with 0.3.13): a put of an existing key is an
error (the store says 0 and keeps the OLD value); objects are hard-pinned, so a full store refuses instead of evicting;
a put counts only when the size reads back (a key whose writer died accepts puts for 30 s and keeps nothing); removal is
never forced. What a process that lends memory puts lies in its own, while there is room, and crosses no network on its
way there: the store's own choice is any. Transfers run directly from and to registered memory; other memory is registered
for the call.

Known limits: ``size`` leases the object as a reader does (10 s), so nothing is removed right after it was looked
at; a hung storage process blocks ``get_into`` for 30 s; the client listens on 0.0.0.0 without authentication.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import numpy as np

from orchestrator.api import ConfigError
from orchestrator.transfer.rdma_devices import check_device
from orchestrator.transfer.transfer_errors import RelayError

APT_PACKAGES: Final = {
    "libibverbs.so.1": "libibverbs1",
    "libnuma.so.1": "libnuma1",
    "libcurl.so.4": "libcurl4",
}
LOCAL_BUFFER_BYTES: Final = 16 << 20  # only for the copying calls, which are not used; the smallest that was tried
TCP_SLICE_BYTES: Final = 1 << 20  # 2.7 to 3.2 GB/s instead of 2.2 to 2.5 with the default (64 MB objects, loopback)

CONNECT_SECONDS: Final = 3.0

MISSING: Final = -704
NOT_READY: Final = -703
_REASONS: Final = {
    -200: ("relay_full", "no contiguous free space, everything is pinned or leased: lend a larger segment"),
    -600: ("buffer", "buffer too small, or memory that cannot be registered"),
    NOT_READY: ("missing", "not complete: its writer is still writing, or died less than 30 s ago"),
    MISSING: ("missing", "no such object"),
    -706: ("leased", "a reader holds it"),
    -707: ("transfer", "the lease ran out during the transfer: the object is too large or the network too slow"),
    -800: ("transfer", "transfer failed: the process that lends the memory is gone or hangs"),
    -900: ("unreachable", "the mooncake_master does not answer"),
}


def load_store() -> Any:
    """Mooncake's store module. ConfigError when the package, or a system library it needs, is missing."""
    # Read once, when the library is loaded. What the user set stays.
    os.environ.setdefault("MC_TCP_SLICE_SIZE", str(TCP_SLICE_BYTES))
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")  # else 16 lines on the engine's stderr for each connection
    try:
        from mooncake import store
    except ImportError as error:
        raise missing_library(str(error)) from error
    return store


def missing_library(message: str) -> ConfigError:
    """What to tell a user whose Mooncake does not load."""
    for library, package in APT_PACKAGES.items():
        if library in message:
            fix = f"Mooncake needs the system library {library}: apt-get install {' '.join(APT_PACKAGES.values())}"
            return ConfigError("relay.kind", "mooncake", f"{fix} ({package} is missing)")
    fix = "install one variant: mooncake-transfer-engine (NVIDIA hosts) or mooncake-transfer-engine-non-cuda"
    return ConfigError("relay.kind", "mooncake", f"Mooncake cannot be loaded ({message}); {fix}")


class MooncakeRelay:
    """Implements :class:`orchestrator.api.Relay`. One thread may transfer while another registers memory."""

    def __init__(
        self, master: str, *, host: str = "", protocol: str = "tcp", device: str = "", segment_bytes: int = 0
    ) -> None:
        """``device``: RDMA devices, with commas between them; empty: Mooncake chooses. Raises ConfigError where this machine
        has none for ``protocol`` "rdma", RelayError when the store cannot be joined."""
        check_device(protocol, device, "relay.")
        module = load_store()
        seen = seen_from(master)
        host = host or seen
        self._config = module.ReplicateConfig()
        self._config.replica_num = 1
        self._config.with_hard_pin = True
        self._store: Any = module.MooncakeDistributedStore()
        self._registered: dict[int, int] = {}  # address -> size
        code = self._store.setup(host, "P2PHANDSHAKE", segment_bytes, LOCAL_BUFFER_BYTES, protocol, device, master)
        if code != 0:
            self._store = None
            raise RelayError(
                "setup", f"cannot join the Mooncake Store of {master} as {host} over {protocol} (code {code})"
            )
        if segment_bytes:
            self._config.preferred_segment = self._store.get_hostname()

    def put(self, key: str, data: memoryview) -> None:
        store = self._open()
        exists = store.is_exist(key)
        if exists != 0:
            raise _error(key, exists) if exists < 0 else RelayError("exists", f"{key}: objects are written once")
        address, size = _span(data)
        with self._registration(data):
            code = store.put_from(key, address, size, self._config)
        if code != 0:
            raise _error(key, code, size)
        found = store.get_size(key)
        if found != size:
            raise RelayError("not_stored", f"{key}: {size} B written, the store has {found}: retry under another key")

    def get_into(self, key: str, buffer: memoryview) -> int:
        store = self._open()
        address, size = _span(buffer)
        with self._registration(buffer):
            read = int(store.get_into(key, address, size))
        if read < 0:
            raise _error(key, read, size)
        return read

    def get_many(self, wanted: Sequence[tuple[str, memoryview]]) -> list[int]:
        """See :class:`orchestrator.transfer.registered_buffers.BatchRelay`. The buffers must be registered."""
        store = self._open()
        spans = [_span(buffer) for _, buffer in wanted]
        read = store.batch_get_into([key for key, _ in wanted], [at for at, _ in spans], [size for _, size in spans])
        for (key, _), (_, size), found in zip(wanted, spans, read, strict=True):
            if found < 0:
                raise _error(key, int(found), size)
        return [int(found) for found in read]

    def get_ranges(self, key: str, ranges: Sequence[tuple[int, int, int]], buffer: memoryview) -> int:
        """See :class:`orchestrator.transfer.registered_buffers.RangeRelay`."""
        store = self._open()
        address, _ = _span(buffer)
        sources, lengths, targets = ([item[at] for item in ranges] for at in range(3))
        with self._registration(buffer):
            found = store.get_into_ranges([address], [[key]], [[targets]], [[sources]], [[lengths]])[0][0]
        failed = [code for code in found if code < 0]
        if failed:
            raise _error(key, failed[0], sum(lengths))
        return int(sum(found))

    def size(self, key: str) -> int:
        found = int(self._open().get_size(key))
        if found in (MISSING, NOT_READY):
            return -1
        if found < 0:
            raise _error(key, found)
        return found

    def remove(self, key: str) -> bool:
        code = int(self._open().remove(key))
        if code in (0, MISSING):
            return True
        if _REASONS.get(code, ("", ""))[0] == "leased" or code == NOT_READY:
            return False
        raise _error(key, code)

    def register(self, buffer: memoryview) -> None:
        """Prepare memory for transfers; it stays registered until ``unregister`` or ``close``."""
        address, size = _span(buffer)
        code = self._open().register_buffer(address, size)
        if code != 0:
            raise _error(f"memory of {size} B", code)
        self._registered[address] = size

    def unregister(self, buffer: memoryview) -> None:
        """Undo ``register``. Nothing to do when closed."""
        address, _ = _span(buffer)
        if self._registered.pop(address, None) is not None and self._store is not None:
            code = self._store.unregister_buffer(address)
            if code != 0:
                raise _error("registered memory", code)

    def close(self) -> None:
        store, self._store = self._store, None
        if store is not None:
            for address in self._registered:
                store.unregister_buffer(address)
            self._registered.clear()
            store.close()

    def covers(self, address: int, size: int) -> bool:
        """Whether this memory is registered."""
        known = list(self._registered.items())  # a copy: another thread may register
        return any(start <= address and address + size <= start + length for start, length in known)

    @contextmanager
    def _registration(self, buffer: memoryview) -> Iterator[None]:
        """For one call, unless it is registered already."""
        if self.covers(*_span(buffer)):
            yield
            return
        self.register(buffer)
        try:
            yield
        finally:
            self.unregister(buffer)

    def _open(self) -> Any:
        if self._store is None:
            raise RelayError("closed", "this relay was closed")
        return self._store


def seen_from(master: str) -> str:
    """The address of this machine that the master sees. The store's own setup tries for 90 s when nobody listens."""
    host, _, port = master.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=CONNECT_SECONDS) as connection:
            own: str = connection.getsockname()[0]
            return own
    except (OSError, ValueError, OverflowError) as error:
        raise RelayError("unreachable", f"no mooncake_master answers at {master}: {error}") from error


def _span(buffer: memoryview) -> tuple[int, int]:
    array = np.frombuffer(buffer, dtype=np.uint8)
    return array.ctypes.data, array.nbytes


def _error(what: str, code: int, size: int | None = None) -> RelayError:
    reason, meaning = _REASONS.get(code, ("unknown", "unexpected answer of the Mooncake Store"))
    length = "" if size is None else f" ({size} B)"
    return RelayError(reason, f"{what}{length}: {meaning} (code {code})")
