"""A device for vLLM's sleep mode on a host without a GPU: a stand-in of vLLM's C extension ``cumem_allocator`` and of cudaMemcpy.

What is above is vLLM's own and runs: ``CuMemAllocator``, ``CuMemBackend``, ``Worker.sleep`` and ``Worker.wake_up`` of its GPU
worker. Memory is this host's. As with the driver, an address stays reserved when its memory is gone, touching it then ends the
process, and memory that is mapped again does not hold what was there. A device has so much room, for everybody on it.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
from types import MethodType, SimpleNamespace
from typing import Any

import pytest
import torch

_FIXED, _PRIVATE, _ANONYMOUS = 0x10, 0x02, 0x20
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]


class Device:
    """``others``: bytes that other processes have."""

    def __init__(self, room: int = 1 << 30) -> None:
        self.room, self.others, self.used = room, 0, 0
        self.greedy = 0  # what others take each time that this process gives something back
        self._handles = itertools.count(1)

    @property
    def free(self) -> int:
        return self.room - self.others - self.used

    def map(self, device: int, size: int, address: int, handle: int) -> None:
        if size > self.free:
            raise RuntimeError("CUDA Error: out of memory at cumem_allocator.cpp")
        self._mmap(address, size, mmap.PROT_READ | mmap.PROT_WRITE)
        ctypes.memset(address, 0xAB, size)
        self.used += size

    def unmap(self, device: int, size: int, address: int, handle: int) -> None:
        self._mmap(address, size, 0)
        self.used -= size
        self.others += self.greedy

    def allocate(self, allocator: Any, size: int, tag: str) -> int:
        """As ``my_malloc`` of the extension, in the memory pool of this tag."""
        size = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        address = int(_libc.mmap(None, size, 0, _PRIVATE | _ANONYMOUS, -1, 0))
        allocator.current_tag = tag
        allocator._python_malloc_callback((0, size, address, next(self._handles)))
        self.map(0, size, address, 0)
        return address

    def _mmap(self, address: int, size: int, protection: int) -> None:
        found = _libc.mmap(address, size, protection, _PRIVATE | _ANONYMOUS | _FIXED, -1, 0)
        assert found == address, ctypes.get_errno()


def install(device: Device, patch: pytest.MonkeyPatch) -> Any:
    """vLLM's allocator on this device, until ``patch`` is undone."""
    import vllm.device_allocator
    from vllm.device_allocator import cumem

    patch.setattr(cumem, "cumem_available", True)
    patch.setattr(cumem, "python_create_and_map", device.map)
    patch.setattr(cumem, "python_unmap_and_release", device.unmap)
    copy = SimpleNamespace(cudaMemcpy=lambda to, source, size: ctypes.memmove(to, source, size))
    patch.setattr(cumem, "libcudart", copy)
    patch.setattr(cumem, "gc", SimpleNamespace(collect=lambda: 0))  # seconds each, among the objects of a test process
    patch.setattr(cumem.CuMemAllocator, "instance", None)
    patch.setattr(vllm.device_allocator, "get_mem_allocator_instance", cumem.CuMemAllocator.get_instance)
    patch.setattr(torch.accelerator, "synchronize", lambda *_: None)
    patch.setattr(torch.accelerator, "empty_cache", lambda: None)
    patch.setattr(torch.accelerator, "get_memory_info", lambda *_: (device.free, device.room))
    return cumem.CuMemAllocator.get_instance()


def put_on(device: Device, allocator: Any, worker: Any) -> None:
    """The weights and buffers of a worker of vLLM's CPU build on this device, as if it had been started with sleep mode."""
    from vllm.v1.worker.gpu_worker import Worker

    model = worker.model_runner.get_model()
    moved: dict[int, torch.UntypedStorage] = {}
    for item in (*model.parameters(), *model.buffers()):
        old = item.data.untyped_storage()
        if not old.nbytes():
            continue
        if old.data_ptr() not in moved:
            address = device.allocate(allocator, old.nbytes(), "weights")
            ctypes.memmove(address, old.data_ptr(), old.nbytes())
            array = (ctypes.c_uint8 * old.nbytes()).from_address(address)
            moved[old.data_ptr()] = torch.frombuffer(array, dtype=torch.uint8).untyped_storage()
        view = torch.empty(0, dtype=item.dtype)
        item.data = view.set_(moved[old.data_ptr()], item.storage_offset(), item.size(), item.stride())
    compute_with_live_weights(model)
    worker.vllm_config.model_config.enable_sleep_mode = True
    worker.sleep, worker.wake_up = MethodType(Worker.sleep, worker), MethodType(Worker.wake_up, worker)


def compute_with_live_weights(model: torch.nn.Module) -> None:
    """As on a GPU: on CPU vLLM computes with packed copies."""
    for layer in model.modules():
        if hasattr(layer, "cpu_linear"):
            layer.cpu_linear = lambda x, weight, bias=None: torch.nn.functional.linear(x, weight, bias)
