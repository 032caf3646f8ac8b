"""Speed of encoding and of applying a weight change: GB/s of dense weights, over this machine's memory copy.

One shard of 2^26 bf16 weights (128 MB), changed as by an optimizer (:mod:`scripts.bench.micro.delta_synthetic`). A memory
copy of the same 128 MB (it reads and writes as much as an encoder reads), the encoder and the in-place apply take turns;
the best of the rounds counts for each, with one thread against a copy by one thread, and with two against a copy by two.
Encoding includes header, checksum and assembly of the bytes; applying includes the check of the checksum and the undo log.

Ratios are of processor time, which leaves out what other processes of a shared machine took (with two threads: half of the
sum of both); the wall clock stands beside it.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np

from orchestrator.transfer.delta import delta_codec as delta
from orchestrator.transfer.delta.native_codec import native_status
from scripts.bench.micro.delta_synthetic import Bytes, Pool
from scripts.bench.result import frame, now

NAME = "delta-speed"
DENSITIES = (0.001, 0.003, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3)
_BAR = 0.5
_JUDGED = 0.01  # what RL updates have at most in ROSE, figure 11a (sparsity around 99 %)


def run(quick: bool, nonce: str) -> dict[str, Any]:
    """Measure."""
    begun = now()
    size, rounds = (1 << 24, 5) if quick else (1 << 26, 9)
    rows = []
    for density in (0.001, 0.01, 0.05) if quick else DENSITIES:
        old, new = Pool(density).cut(size)
        rows.append({"density": density, **_measure(old.view(np.uint8), new.view(np.uint8), rounds)})
    judged = next(row for row in rows if row["density"] == _JUDGED)
    value = min(judged[f"{work}_{threads}_over_copy"] for work in ("encode", "apply") for threads in (1, 2))
    return frame(
        NAME,
        "real code, synthetic deltas",
        value=value,
        unit=f"GB/s over those of a copy (processor time), worst of encode, apply, 1 and 2 threads at {_JUDGED:.0%} density",
        reference="memory copy, GB/s, one thread",
        reference_value=judged["copy_1_gb_s"],
        bar=f">= {_BAR}",
        holds=value >= _BAR,
        detail={
            "native": native_status()["live"],
            "rows": rows,
            "samples": rounds * len(rows),
            "load_average": os.getloadavg(),
        },
        quick=quick,
        nonce=nonce,
        begun=begun,
    )


def _measure(old: Bytes, new: Bytes, rounds: int) -> dict[str, Any]:
    change = delta.encode_change(old, new, "bfloat16")
    base, target = old.copy(), old.copy()
    cpu: dict[str, float] = {}
    wall: dict[str, float] = {}
    exact = True

    def timed(name: str, threads: int, work: Callable[[], Any]) -> Any:
        key = f"{name}_{threads}"
        begun, started = time.process_time(), time.perf_counter()
        result = work()
        wall[key] = min(wall.get(key, math.inf), time.perf_counter() - started)
        cpu[key] = min(cpu.get(key, math.inf), (time.process_time() - begun) / threads)
        return result

    with ThreadPoolExecutor(2) as pool:
        for _ in range(rounds):
            for threads in (1, 2):
                timed("copy", threads, partial(_copy, target, old, pool if threads == 2 else None))
                timed("encode", threads, partial(delta.encode_change, old, new, "bfloat16", threads=threads))
                log = timed("apply", threads, partial(delta.apply_change, change.data, base, threads=threads))
                exact = exact and bool(np.array_equal(base, new))
                timed("undo", threads, partial(delta.undo_change, log))
                exact = exact and bool(np.array_equal(base, old))
    row: dict[str, Any] = {"encoding": change.encoding, "changed": change.changed, "bit_exact": exact}
    for key, seconds in cpu.items():
        row[f"{key}_gb_s"] = old.nbytes / seconds / 1e9
        row[f"{key}_wall_gb_s"] = old.nbytes / wall[key] / 1e9
        if not key.startswith("copy"):
            row[f"{key}_over_copy"] = cpu[f"copy_{key[-1]}"] / seconds
    return row


def _copy(target: Bytes, source: Bytes, pool: ThreadPoolExecutor | None) -> None:
    """By one thread, or half each by two."""
    if pool is None:
        np.copyto(target, source)
        return
    halves = [slice(0, source.size // 2), slice(source.size // 2, None)]
    list(pool.map(lambda part: np.copyto(target[part], source[part]), halves))
