"""A libcuda and a device that are none (tests/support/fake_cuda.c), compiled and made where a test asks; memory is this
host's."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from functools import cache
from pathlib import Path

COMPILER = shutil.which(os.environ.get("CC", "cc"))
_HERE = Path(__file__).parent


def compile_c(target: Path, *arguments: str) -> Path:
    """With warnings as errors."""
    command = [str(COMPILER), "-std=gnu11", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-o", str(target)]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return target


@cache
def library(folder: Path, *options: str) -> Path:
    """The driver, as a shared object in this folder."""
    return compile_c(folder / "libfakecuda.so", "-O1", "-pthread", *options, str(_HERE / "fake_cuda.c"))


def load_by_name(folder: Path) -> Path:
    """The same, and from here on ``libcuda.so.1`` of this process: by that name cuda-bindings load the driver."""
    made = library(folder, "-Wl,-soname,libcuda.so.1")
    ctypes.CDLL(str(made))
    return made


def make_device(path: Path, pages: int, page_bytes: int) -> dict[str, str]:
    """A device of so many pages; returns the environment in which the driver finds it."""
    with path.open("wb") as file:
        file.truncate(pages * page_bytes)
    return {"FAKE_CUDA_DEVICE": str(path), "FAKE_CUDA_GRANULARITY": str(page_bytes)}


def calls(driver: Path, name: str) -> int:
    """How often this process called that function."""
    return int(ctypes.CDLL(str(driver)).fake_cuda_calls(name.encode()))


def fail(driver: Path, name: str, after: int, code: int) -> None:
    """The call after so many of that function is refused with this code, once."""
    ctypes.CDLL(str(driver)).fake_cuda_fail(name.encode(), after, code)


def elsewhere(driver: Path) -> int:
    """This thread's context is one of another device from here on; returns how many contexts it has on its stack."""
    found = ctypes.CDLL(str(driver))
    found.fake_cuda_elsewhere()
    return depth(driver)


def depth(driver: Path) -> int:
    """Contexts on this thread's stack."""
    return int(ctypes.CDLL(str(driver)).fake_cuda_depth())


def work(driver: Path) -> None:
    """Kernels of this process run from here on, until they are waited for; unmapping meanwhile is an illegal address."""
    ctypes.CDLL(str(driver)).fake_cuda_work()


def settled(driver: Path) -> int:
    """How often they were waited for."""
    return int(ctypes.CDLL(str(driver)).fake_cuda_settled())


def reset(driver: Path) -> None:
    """As if this process had not used it yet."""
    ctypes.CDLL(str(driver)).fake_cuda_reset()


def left(driver: Path) -> tuple[int, int]:
    """Handles and mappings that this process has."""
    found = ctypes.CDLL(str(driver))
    return int(found.fake_cuda_open_handles()), int(found.fake_cuda_mappings())
