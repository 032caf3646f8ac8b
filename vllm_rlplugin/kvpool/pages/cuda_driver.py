"""CUDA's driver, as far as the pool needs it: physical pages, ranges of device addresses, one behind the other (``csrc/vmm.c``).

Guarantees: loaded when asked for, so that everything imports without CUDA; a host without a driver or a device, and a page size
that the driver does not map, is one ConfigError that names it. A call for many pages is one call. No context is made, which
would cost memory of the device, but where pages are zeroed. Handles are ``uint64`` arrays, and belong to this process.
"""

from __future__ import annotations

import ctypes

import numpy as np
import numpy.typing as npt

from orchestrator.api import ConfigError
from vllm_rlplugin.kvpool.ledger import native_pages
from vllm_rlplugin.kvpool.ledger.page_ledger import Pages, PoolError

LIBRARY = "libcuda.so.1"
Handles = npt.NDArray[np.uint64]


class DeviceFull(PoolError):
    """The device has no room for so many pages; nothing was done. ``made``: for how many there was."""

    def __init__(self, text: str, made: int) -> None:
        super().__init__(text)
        self.made = made


class CudaDriver:
    """One device of ``library``, for pages of ``page_bytes``."""

    def __init__(self, page_bytes: int, *, ordinal: int = 0, library: str = LIBRARY) -> None:
        self._library = native_pages.library()
        self.page_bytes = page_bytes
        self.ordinal = ordinal
        handle = ctypes.c_void_p()
        code = self._library.rlc_cuda_open(library.encode(), ordinal, page_bytes, ctypes.addressof(handle))
        if code:
            raise _config_error(code, page_bytes, self._why())
        self._handle = handle.value
        numbers, name, uuid = ctypes.c_uint64(), ctypes.create_string_buffer(128), ctypes.create_string_buffer(64)
        self._library.rlc_cuda_facts(self._handle, ctypes.byref(numbers), name, uuid)
        self.name, self.uuid = name.value.decode(), uuid.value.decode()

    def close(self) -> None:
        """Let go of the library. Idempotent."""
        if self._handle:
            self._library.rlc_cuda_close(self._handle)
            self._handle = None

    def create_pages(self, count: int) -> Handles:
        """So many physical pages, all or none, that other processes may import. Raises DeviceFull."""
        out, made = np.zeros(count, np.uint64), ctypes.c_uint64()
        code = self._library.rlc_cuda_create(self._handle, count, out.ctypes.data, ctypes.byref(made))
        if code == native_pages.FULL_DEVICE:
            raise DeviceFull(f"{self.name} has room for {made.value} of {count} pages ({self._why()})", made.value)
        self._check(code)
        return out

    def release_handles(self, handles: Handles) -> None:
        """Their memory is free when nobody has mapped it or holds another handle of it."""
        self._check(self._library.rlc_cuda_release(self._handle, handles.ctypes.data, handles.size))

    def export_handle(self, handle: int) -> int:
        """A file descriptor for another process; the caller closes it."""
        found = ctypes.c_int(-1)
        self._check(self._library.rlc_cuda_export(self._handle, handle, ctypes.byref(found)))
        return found.value

    def import_handles(self, descriptors: list[int]) -> Handles:
        """Handles of what another process exported, all or none; the descriptors stay open."""
        given, out = np.array(descriptors, np.int32), np.zeros(len(descriptors), np.uint64)
        self._check(self._library.rlc_cuda_import(self._handle, given.ctypes.data, given.size, out.ctypes.data))
        return out

    def reserve(self, size: int) -> int:
        """Device addresses with nothing behind them."""
        found = ctypes.c_uint64()
        self._check(self._library.rlc_cuda_reserve(self._handle, size, ctypes.byref(found)))
        return found.value

    def free(self, address: int, size: int) -> None:
        """Give them back."""
        self._check(self._library.rlc_cuda_free(self._handle, address, size))

    def fill(self, address: int, places: Pages, dummy: int) -> None:
        """The same page behind all of these places, which have none."""
        self._check(self._library.rlc_cuda_fill(self._handle, address, places.ctypes.data, places.size, dummy))

    def map(self, address: int, places: Pages, handles: Handles, dummy: int = 0) -> None:
        """These pages at these places of the range, all or none. ``dummy``: the page that is there now; 0: none is."""
        self._check(
            self._library.rlc_cuda_map(
                *(self._handle, address, places.ctypes.data, handles.ctypes.data, places.size, dummy),
            )
        )

    def unmap(self, address: int, places: Pages, dummy: int = 0) -> None:
        """``dummy`` is there afterwards; 0: what touches them is an illegal address."""
        self._check(self._library.rlc_cuda_unmap(self._handle, address, places.ctypes.data, places.size, dummy))

    def zero(self, address: int, places: Pages) -> None:
        """Zeros, there when this returns."""
        self._check(self._library.rlc_cuda_zero(self._handle, address, places.ctypes.data, places.size))

    def synchronize(self) -> None:
        """Returns when all that this process told the device to do is done."""
        self._check(self._library.rlc_cuda_settle(self._handle))

    def _why(self) -> str:
        return str(self._library.rlc_cuda_why().decode(errors="replace"))

    def _check(self, code: int) -> None:
        if code == native_pages.FULL_DEVICE:
            raise DeviceFull(f"{self.name}: {self._why()}", 0)
        if code:
            raise PoolError(f"{self.name}: {self._why()}")


def _config_error(code: int, page_bytes: int, why: str) -> Exception:
    if code == native_pages.NO_LIBRARY:
        return ConfigError("kv_pool", "CUDA: no driver", f"{why}; install NVIDIA's driver, or run the engine on CPU")
    if code == native_pages.NO_DEVICE:
        fix = f"{why}; check nvidia-smi and CUDA_VISIBLE_DEVICES"
        return ConfigError("kv_pool", "CUDA: no device", fix)
    if code == native_pages.PAGE_SIZE:
        return ConfigError("kv_pool_page_kib", page_bytes >> 10, f"{why}; give a multiple of that")
    return PoolError(f"CUDA: {why}")
