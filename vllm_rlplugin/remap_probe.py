"""Seconds in which 1 GiB of KV pages goes from a rollout process to a serving process (host memory).

``python -m vllm_rlplugin.remap_probe --mib 1024 --rounds 10``: a child maps so much of a pool and writes into every
page; told to, it unmaps and releases all of it, and this process acquires and maps it, and reads what the child wrote:
it is the same memory. Seconds are from the word to the last page mapped; ``release`` and ``map`` are the two halves.
Prints one JSON object on the last line.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import statistics
import sys
import time
from pathlib import Path

import numpy as np

from vllm_rlplugin.kvpool.host import HostRange
from vllm_rlplugin.kvpool.ledger import PAGE_BYTES, PagePool

_MARK = 7


def _rollout(path: Path, pages: int, told: int, tell: int) -> None:
    """The child: map, write, and give up at each word, for ever."""
    pool = PagePool.open(path)
    pool.join("rollout", "rollout", pages)
    places = np.arange(pages, dtype=np.uint64)
    with HostRange(pool, pages) as memory:
        while True:
            while not memory.back(places):
                time.sleep(0.001)
            for page in range(pages):
                ctypes.memset(memory.address + page * PAGE_BYTES, _MARK, 4096)
            os.write(tell, b"r")
            if not os.read(told, 1):
                return
            begun = time.monotonic()
            memory.drop(places)
            os.write(tell, np.float64(time.monotonic() - begun).tobytes())
            if not os.read(told, 1):
                return


def measure(path: Path, pages: int, rounds: int) -> list[tuple[float, float, float]]:
    """(all, release, map) of each round. Raises RuntimeError where the memory was not the same."""
    pool = PagePool.create(path, pages)
    pool.join("serving", "serving")
    to_child, to_parent = os.pipe(), os.pipe()
    child = os.fork()
    if not child:
        try:
            os.close(to_child[1])
            _rollout(path, pages, to_child[0], to_parent[1])
        finally:
            os._exit(0)
    os.close(to_child[0])
    places, found = np.arange(pages, dtype=np.uint64), []
    with HostRange(pool, pages) as memory:
        for _ in range(rounds):
            os.read(to_parent[0], 1)
            begun = time.monotonic()
            os.write(to_child[1], b"g")
            release = float(np.frombuffer(os.read(to_parent[0], 8), np.float64)[0])
            middle = time.monotonic()
            if not memory.back(places):
                raise RuntimeError("the pages are not free")
            ended = time.monotonic()
            if any(
                ctypes.c_uint8.from_address(memory.address + page * PAGE_BYTES).value != _MARK for page in range(pages)
            ):
                raise RuntimeError("what is mapped is not what the other process wrote")
            memory.drop(places)
            found.append((ended - begun, release, ended - middle))
            os.write(to_child[1], b"b")
    os.close(to_child[1])
    os.waitpid(child, 0)
    pool.close()
    return found


def main() -> int:
    """Exit code 0: measured."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args()
    path = Path(f"/dev/shm/rl-coserve-remap-{os.getpid()}")
    try:
        rows = measure(path, (options.mib << 20) // PAGE_BYTES, options.rounds)
    finally:
        path.unlink(missing_ok=True)
    parts = {name: [row[at] for row in rows] for at, name in enumerate(("seconds", "release", "map"))}
    medians = {name: statistics.median(values) for name, values in parts.items()}
    print(json.dumps({**medians, "worst": max(parts["seconds"]), "rounds": options.rounds, "pid": os.getpid()}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
