"""Seconds in which 1 GiB of KV pages goes from a rollout process to a serving process.

``python -m scripts.bench.probes.vllm.remap_probe --mib 1024 --rounds 10 [--kind host]``: another process maps so much
of a pool and writes into every page; told to, it unmaps and releases all of it, and this process acquires and maps it.
Seconds are from the word to the last page mapped; ``release`` and ``map`` are the two halves. Prints one JSON object on
the last line. Kinds:

* ``host``: pages of host memory. Reads what the other wrote: it is the same memory.
* ``kept``: pages of GPU memory that a process of their own keeps; the same check.
* ``created``: pages of GPU memory that each process makes and releases.
* ``kvcached``: the same through kvcached's own map and unmap (its package must be installed), which has no ledger.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import json
import os
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from vllm_rlplugin.kvpool.ledger.page_ledger import PAGE_BYTES
from vllm_rlplugin.kvpool.pages.address_ranges import PageRange
from vllm_rlplugin.kvpool.pages.cuda_driver import LIBRARY
from vllm_rlplugin.kvpool.pages.page_backends import CudaBackend, HostBackend, PageBackend

KINDS = ("host", "kept", "created", "kvcached")
_MARK = 7


class Side(Protocol):
    """What one of the two processes does."""

    def back(self) -> bool:
        """Have memory behind every page; False: there is not so much now."""

    def drop(self) -> None:
        """Give all of it up."""

    def mark(self) -> None:
        """Write into every page."""

    def marked(self) -> bool:
        """Whether every page holds what the other side wrote."""


class PoolSide:
    """On a pool: as an engine does it."""

    def __init__(self, path: Path, pages: int, kind: str, library: str, *, serving: bool) -> None:
        backend: PageBackend = HostBackend(PAGE_BYTES)
        if kind != "host":
            backend = CudaBackend(PAGE_BYTES, 0, "kept" if kind == "kept" else "created", library)
        self._pool = backend.pool(path, pages if serving else 0)
        role = "serving" if serving else "rollout"
        self._pool.join(role, "serving" if serving else "rollout", pages)
        self._memory: PageRange = backend.range(self._pool, pages, "serving" if serving else "rollout", scrub=False)
        self._places = np.arange(pages, dtype=np.uint64)
        on_gpu = kind != "host" and library == LIBRARY  # any other library is a test's, of this host's memory
        self._tensor: Any = backend.tensor(self._memory.address, self._memory.bytes) if on_gpu else None
        self._same = kind != "created"

    def back(self) -> bool:
        """See the protocol."""
        return self._memory.map_places(self._places)

    def drop(self) -> None:
        """See the protocol."""
        self._memory.unmap_places(self._places)

    def mark(self) -> None:
        """See the protocol."""
        if self._tensor is not None:
            self._tensor.view(-1, PAGE_BYTES)[:, :4096].fill_(_MARK)
            _synchronize()
            return
        for page in self._places.tolist():
            ctypes.memset(self._memory.address + page * PAGE_BYTES, _MARK, 4096)

    def marked(self) -> bool:
        """See the protocol."""
        if not self._same:
            return True
        if self._tensor is not None:
            return bool((self._tensor.view(-1, PAGE_BYTES)[:, :4096] == _MARK).all())
        at = self._memory.address
        return all(ctypes.c_uint8.from_address(at + page * PAGE_BYTES).value == _MARK for page in self._places.tolist())

    def close(self) -> None:
        """Leave the pool."""
        self._memory.close()
        self._pool.close()


class KvcachedSide:
    """Through kvcached: pages are made by one process and released to the driver by the other."""

    def __init__(self, pages: int) -> None:
        self._native: Any = importlib.import_module("kvcached.vmm_ops")
        self._native.init_kvcached("cuda:0", PAGE_BYTES, False)
        (self._tensor,) = self._native.create_kv_tensors(
            size=pages * PAGE_BYTES, dtype_size=2, dev_str="cuda:0", num_layers=1, num_kv_buffers=1
        )
        self._offsets = [page * PAGE_BYTES for page in range(pages)]

    def back(self) -> bool:
        """See the protocol."""
        return bool(self._native.map_to_kv_tensors(self._offsets, 0))

    def drop(self) -> None:
        """See the protocol."""
        if not self._native.unmap_from_kv_tensors(self._offsets, 0):
            raise RuntimeError("kvcached did not unmap")

    def mark(self) -> None:
        """See the protocol."""
        self._tensor.view(-1)[:: PAGE_BYTES // 2].fill_(_MARK)
        _synchronize()

    def marked(self) -> bool:
        """See the protocol."""
        return True

    def close(self) -> None:
        """Give its memory back."""
        self._native.shutdown_kvcached()


def _synchronize() -> None:
    import torch

    torch.cuda.synchronize()


def _side(options: argparse.Namespace, path: Path, pages: int, *, serving: bool) -> PoolSide | KvcachedSide:
    if options.kind == "kvcached":
        return KvcachedSide(pages)
    return PoolSide(path, pages, options.kind, options.library, serving=serving)


def _rollout(options: argparse.Namespace, pages: int) -> None:
    """The other process: map, write, and give up at each word, until there is none."""
    side = _side(options, options.child, pages, serving=False)
    words, tell = sys.stdin.buffer, sys.stdout.buffer
    while True:
        while not side.back():
            time.sleep(0.001)
        side.mark()
        tell.write(b"r")
        tell.flush()
        if not words.read(1):
            break
        begun = time.monotonic()
        side.drop()
        tell.write(np.float64(time.monotonic() - begun).tobytes())
        tell.flush()
        if not words.read(1):
            return
    side.close()


def measure(options: argparse.Namespace, path: Path, pages: int) -> list[tuple[float, float, float]]:
    """(all, release, map) of each round. Raises RuntimeError where the memory was not the same."""
    found = []
    with ExitStack() as stack:
        side = _side(options, path, pages, serving=True)
        stack.callback(side.close)
        command = [
            sys.executable,
            "-m",
            "scripts.bench.probes.vllm.remap_probe",
            "--child",
            str(path),
            "--mib",
            str(options.mib),
        ]
        command += ["--kind", options.kind, "--library", options.library]
        child = stack.enter_context(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
        stack.callback(child.kill)
        assert child.stdin is not None
        assert child.stdout is not None
        for _ in range(options.rounds):
            if child.stdout.read(1) != b"r":
                raise RuntimeError("the other process ended")
            begun = time.monotonic()
            child.stdin.write(b"g")
            child.stdin.flush()
            release = float(np.frombuffer(child.stdout.read(8), np.float64)[0])
            middle = time.monotonic()
            while not side.back():  # where each makes its pages the driver may not have them yet
                if time.monotonic() - middle > 5:
                    raise RuntimeError("the pages are not free")
            ended = time.monotonic()
            if not side.marked():
                raise RuntimeError("what is mapped is not what the other process wrote")
            side.drop()
            found.append((ended - begun, release, ended - middle))
            child.stdin.write(b"b")
            child.stdin.flush()
    return found


def main() -> int:
    """Exit code 0: measured."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--kind", choices=KINDS, default="host")
    parser.add_argument("--library", default=LIBRARY)
    parser.add_argument("--child", type=Path)
    options = parser.parse_args()
    pages = (options.mib << 20) // PAGE_BYTES
    if options.child is not None:
        _rollout(options, pages)
        return 0
    path = Path(f"/dev/shm/rl-coserve-remap-{os.getpid()}")
    try:
        rows = measure(options, path, pages)
    finally:
        path.unlink(missing_ok=True)
    parts = {name: [row[at] for row in rows] for at, name in enumerate(("seconds", "release", "map"))}
    medians = {name: statistics.median(values) for name, values in parts.items()}
    told = {"worst": max(parts["seconds"]), "rounds": options.rounds, "kind": options.kind, "pid": os.getpid()}
    print(json.dumps({**medians, **told}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
