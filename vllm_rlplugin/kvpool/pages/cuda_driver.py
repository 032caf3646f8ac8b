"""CUDA's driver, as far as the pool needs it: physical pages, ranges of device addresses, one behind the other (``csrc/vmm.c``).

Guarantees: loaded when asked for, so that everything imports without CUDA; a host without a driver or a device, and a page size
that the driver does not map, is one ConfigError that names it. A call for many pages is one call. No context is made, which
would cost memory of the device, but where pages are zeroed. Handles are ``uint64`` arrays, and belong to this process. Where
NVIDIA's cuda-bindings are installed (``pip install 'rl-coserve[cuda]'``; vLLM on GPUs brings them), the numbers and structures of
``csrc/vmm.c`` are compared with theirs before the driver is called.
"""

from __future__ import annotations

import ctypes
import importlib
from functools import cache
from typing import Any

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
        check_written()
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


@cache
def check_written() -> bool:
    """Whether there was something to compare with. Raises ConfigError: C's numbers or structures are not those of NVIDIA's
    headers."""
    try:
        theirs = importlib.import_module("cuda.bindings.driver")
    except ImportError:
        return False
    if differ := find_differences(theirs):
        fix = f"{'; '.join(differ)}: install rl-coserve again, for this cuda-bindings"
        raise ConfigError("kv_pool", "CUDA's numbers in csrc/vmm.c", fix)
    return True


def find_differences(theirs: Any) -> list[str]:
    """``theirs``: ``cuda.bindings.driver``."""
    numbers = (ctypes.c_int * 8)()
    properties, access = ctypes.create_string_buffer(32), ctypes.create_string_buffer(12)
    native_pages.library().rlc_cuda_written(numbers, properties, access)
    attribute, on_device = theirs.CUdevice_attribute, theirs.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    expected = (
        theirs.CUresult.CUDA_ERROR_OUT_OF_MEMORY,
        theirs.CUresult.CUDA_ERROR_INVALID_CONTEXT,
        attribute.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED,
        attribute.CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED,
        theirs.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED,
        on_device,
        theirs.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
        theirs.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
    )
    found = [
        f"{number.name} is {int(number)}, here {ours}"
        for ours, number in zip(numbers, expected, strict=True)
        if ours != int(number)
    ]
    asked, both = theirs.CUmemAllocationProp(), theirs.CUmemAccessDesc()
    asked.type, asked.requestedHandleTypes = expected[4], expected[6]
    asked.location.type, asked.location.id = on_device, 5
    both.location.type, both.location.id, both.flags = on_device, 5, expected[7]
    for name, ours, structure in (("CUmemAllocationProp", properties, asked), ("CUmemAccessDesc", access, both)):
        if ours.raw != ctypes.string_at(structure.getPtr(), len(ours)):
            found.append(f"{name} lies in memory otherwise")
    return found


def _config_error(code: int, page_bytes: int, why: str) -> Exception:
    if code == native_pages.NO_LIBRARY:
        return ConfigError("kv_pool", "CUDA: no driver", f"{why}; install NVIDIA's driver, or run the engine on CPU")
    if code == native_pages.NO_DEVICE:
        fix = f"{why}; check nvidia-smi and CUDA_VISIBLE_DEVICES"
        return ConfigError("kv_pool", "CUDA: no device", fix)
    if code == native_pages.PAGE_SIZE:
        return ConfigError("kv_pool_page_kib", page_bytes >> 10, f"{why}; give a multiple of that")
    return PoolError(f"CUDA: {why}")
