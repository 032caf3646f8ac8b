"""NVIDIA's management library (NVML), by pynvml (extra ``nvml``): the one place where it is imported and started.

Guarantees: a machine without the package or without a driver is one exception that says which; nothing is imported before.
"""

from __future__ import annotations

import importlib
from typing import Any


class NvmlUnavailable(Exception):
    """NVML cannot be asked. ``installed``: pynvml is there, and what it misses is a driver."""

    def __init__(self, why: str, installed: bool) -> None:
        super().__init__(why)
        self.installed = installed


def started() -> Any:
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


def handles(library: Any) -> list[Any]:
    """Of every GPU of this machine. Raises the library's ``NVMLError``."""
    return [library.nvmlDeviceGetHandleByIndex(index) for index in range(library.nvmlDeviceGetCount())]
