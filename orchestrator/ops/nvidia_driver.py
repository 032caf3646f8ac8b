"""NVIDIA's driver on this host: the devices that it sees, by cuda-bindings (extra ``cuda``; PyTorch for CUDA brings them), and
its management library (NVML), by pynvml (extra ``nvml``): the one place where that is imported and started.

Guarantees: no context is made; a host without a driver or without the package is an answer, no error; a machine without pynvml or
without a driver is one exception that says which, and nothing is imported before.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

from orchestrator.ops.check import Finding


@dataclass(frozen=True, slots=True)
class Gpu:
    """``pages``: it can map and unmap memory of other processes page by page, which a pool of KV pages needs."""

    name: str
    pages: bool


@dataclass(frozen=True, slots=True)
class Gpus:
    """``missing``: why there are none, in words. ``version``: of CUDA, the newest that the driver knows."""

    missing: str
    version: str = ""
    devices: tuple[Gpu, ...] = ()


class _RefusedError(Exception):
    """What the driver answers, by its own name."""


def find_gpus() -> Gpus:
    """Those that CUDA_VISIBLE_DEVICES leaves to this process."""
    try:
        cuda: Any = importlib.import_module("cuda.bindings.driver")
    except ImportError:
        return Gpus("cuda-bindings are not installed (pip install 'rl-coserve[cuda]')")
    try:
        _ask(cuda.cuInit, 0)
        version, count = _ask(cuda.cuDriverGetVersion), _ask(cuda.cuDeviceGetCount)
        found = tuple(_gpu(cuda, ordinal) for ordinal in range(count))
    except _RefusedError as error:
        return Gpus(f"no device: {error}")
    except RuntimeError as error:  # of cuda-bindings, where there is no libcuda
        return Gpus(f"no driver ({error})")
    return Gpus("" if found else "no device", f"{version // 1000}.{version % 1000 // 10}", found)


def _gpu(cuda: Any, ordinal: int) -> Gpu:
    device, attribute = _ask(cuda.cuDeviceGet, ordinal), cuda.CUdevice_attribute
    name = _ask(cuda.cuDeviceGetName, 128, device).partition(b"\0")[0].decode(errors="replace")
    needed = (
        attribute.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED,
        attribute.CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED,
    )
    return Gpu(name, all(_ask(cuda.cuDeviceGetAttribute, one, device) for one in needed))


def _ask(call: Any, *arguments: Any) -> Any:
    error, *found = call(*arguments)
    if int(error):
        raise _RefusedError(f"{call.__name__} ends with {error.name}")
    return found[0] if found else None


def check_driver() -> Finding:
    """For the doctor."""
    found = find_gpus()
    if found.missing:
        return Finding("skip", f"CUDA: {found.missing}; without a GPU, KV page pools are in host memory")
    names = ", ".join(gpu.name for gpu in found.devices)
    if not all(gpu.pages for gpu in found.devices):
        fix = "a KV pool (--rl-kv-pool) needs CUDA virtual memory management, which WSL and some vGPUs lack"
        return Finding("warn", f"CUDA {found.version}: {names}, without page mapping", fix)
    return Finding("ok", f"CUDA {found.version}: {names}; KV pages can be mapped")


class NvmlUnavailable(Exception):
    """NVML cannot be asked. ``installed``: pynvml is there, and what it misses is a driver."""

    def __init__(self, why: str, installed: bool) -> None:
        super().__init__(why)
        self.installed = installed


def start_nvml() -> Any:
    """The module pynvml, with NVML started. Its calls raise its ``NVMLError``. Raises NvmlUnavailable."""
    try:
        library: Any = importlib.import_module("pynvml")
    except ImportError as error:
        raise NvmlUnavailable("pynvml is not installed", False) from error
    try:
        library.nvmlInit()
    except library.NVMLError as error:
        raise NvmlUnavailable(str(error), True) from error
    return library


def nvml_handles(library: Any) -> list[Any]:
    """Of every GPU of this machine. Raises the library's ``NVMLError``."""
    return [library.nvmlDeviceGetHandleByIndex(index) for index in range(library.nvmlDeviceGetCount())]
