"""NVIDIA's driver on this host: the devices that it sees, by its library alone, and its management library (NVML), by pynvml
(extra ``nvml``): the one place where that is imported and started.

Guarantees: no context is made; a host without a driver is an answer, no error; a machine without pynvml or without a driver is
one exception that says which, and nothing is imported before.
"""

from __future__ import annotations

import ctypes
import importlib
from dataclasses import dataclass
from typing import Any

from orchestrator.ops.check import Finding

LIBRARY = "libcuda.so.1"
_VMM, _DESCRIPTORS = 102, 103  # CUdevice_attribute: virtual memory management; handles as file descriptors


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


def find_gpus(library: str = LIBRARY) -> Gpus:
    """Those that CUDA_VISIBLE_DEVICES leaves to this process."""
    try:
        driver = ctypes.CDLL(library)
    except OSError as error:
        return Gpus(f"no driver ({error})")
    count, version = ctypes.c_int(), ctypes.c_int()
    for name, arguments in (("cuInit", (0,)), ("cuDeviceGetCount", (ctypes.byref(count),))):
        if code := int(getattr(driver, name)(*arguments)):
            return Gpus(f"no device: {name} ends with error {code}")
    driver.cuDriverGetVersion(ctypes.byref(version))
    found = tuple(_gpu(driver, ordinal) for ordinal in range(count.value))
    return Gpus("" if found else "no device", f"{version.value // 1000}.{version.value % 1000 // 10}", found)


def _gpu(driver: ctypes.CDLL, ordinal: int) -> Gpu:
    name, value = ctypes.create_string_buffer(128), ctypes.c_int()
    driver.cuDeviceGetName(name, len(name), ordinal)
    can = True
    for attribute in (_VMM, _DESCRIPTORS):
        can = driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, ordinal) == 0 and value.value != 0 and can
    return Gpu(name.value.decode(errors="replace"), can)


def check_driver(library: str = LIBRARY) -> Finding:
    """For the doctor."""
    found = find_gpus(library)
    if found.missing:
        return Finding("skip", f"CUDA: {found.missing}; pools of KV pages lie in host memory here")
    names = ", ".join(gpu.name for gpu in found.devices)
    if not all(gpu.pages for gpu in found.devices):
        fix = "a pool (--rl-kv-pool) needs a device with virtual memory management, outside of WSL and vGPUs without it"
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
