"""Pages mapped and unmapped per second through ``csrc/vmm.c`` and through NVIDIA's cuda-bindings, on the same libcuda.

``python -m scripts.bench.probes.vllm.driver_calls_probe [--fake FOLDER]``; JSON on the last line. On a GPU by default; with
``--fake`` on the stand-in of ``tests/support/fake_cuda.c``, built there. A batch is mapped page by page, given access and
unmapped in one call each. Processor time of the thread, the best of 20 rounds.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from vllm_rlplugin.kvpool.pages.cuda_driver import CudaDriver

PAGES = (512, 64, 8, 1)  # of a batch
_ROUNDS = 20


def _stand_in(folder: Path, page: int) -> None:
    from tests.support import fake_cuda

    folder.mkdir(parents=True, exist_ok=True)
    os.environ.update(fake_cuda.make_device(folder / "device", 2 * PAGES[0], page))
    fake_cuda.load_by_name(folder)


def by_library(page: int) -> dict[int, float]:
    """Pages of a batch -> pages per second."""
    driver = CudaDriver(page)
    handles, address = driver.create_pages(PAGES[0]), driver.reserve(PAGES[0] * page)
    places = np.arange(PAGES[0], dtype=np.uint64)

    def move(count: int) -> None:
        driver.map(address, places[:count], handles[:count])
        driver.unmap(address, places[:count])

    found = {count: _rate(move, count) for count in PAGES}
    driver.release_handles(handles)
    driver.free(address, PAGES[0] * page)
    driver.close()
    return found


def by_bindings(page: int) -> dict[int, float]:
    """The same."""
    cuda: Any = importlib.import_module("cuda.bindings.driver")

    def call(name: str, *arguments: Any) -> Any:
        error, *found = getattr(cuda, name)(*arguments)
        if int(error):
            raise RuntimeError(f"{name}: {error}")
        return found[0] if found else None

    call("cuInit", 0)
    place = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    asked, access = cuda.CUmemAllocationProp(), cuda.CUmemAccessDesc()
    asked.type = cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    asked.requestedHandleTypes = cuda.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    asked.location.type = access.location.type = place
    access.flags = cuda.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    handles = [call("cuMemCreate", page, asked, 0) for _ in range(PAGES[0])]
    address = int(call("cuMemAddressReserve", PAGES[0] * page, 0, 0, 0))

    def move(count: int) -> None:
        for place in range(count):
            call("cuMemMap", address + place * page, page, 0, handles[place], 0)
        call("cuMemSetAccess", address, count * page, [access], 1)
        call("cuMemUnmap", address, count * page)

    return {count: _rate(move, count) for count in PAGES}


def _rate(move: Callable[[int], None], count: int) -> float:
    best = float("inf")
    for _ in range(_ROUNDS):
        begun = time.thread_time()
        move(count)
        best = min(best, time.thread_time() - begun)
    return count / best


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--fake", type=Path)
    parser.add_argument("--page", type=int, default=4096)
    options = parser.parse_args()
    if options.fake:
        _stand_in(options.fake.resolve(), options.page)
    found = {"library": by_library(options.page), "bindings": by_bindings(options.page)}
    sys.stdout.write(json.dumps({"pages_per_s": found, "pid": os.getpid()}) + "\n")


if __name__ == "__main__":
    main()
