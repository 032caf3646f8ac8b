"""Speed of encoding and of applying a weight change: GB/s of dense weights, over this machine's memory copy.

One shard of 2^26 bf16 weights (128 MB), changed as by an optimizer (:mod:`scripts.bench.micro.delta_synthetic`). A memory
copy of the same 128 MB (it reads and writes as much as an encoder reads), the encoder and the in-place apply take turns;
the rounds are interleaved, with one thread against a copy by one thread, and with two against a copy by two.
Encoding includes header, checksum and assembly of the bytes; applying includes the check of the checksum and the undo log.

Ratios are of processor time, which leaves out what other processes of a shared machine took (with two threads: half of the
sum of both), each against the copy of its own round, the median of the rounds; the wall clock stands beside it. Where the
CPU has AVX-512, it is switched off: most have no more than AVX2.
"""

from __future__ import annotations

import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np

from orchestrator.transfer.delta import delta_codec as delta
from orchestrator.transfer.delta.native_codec import native, native_status
from scripts.bench.micro.delta_synthetic import Bytes, Pool
from scripts.bench.result import frame, now

NAME = "delta-speed"
DENSITIES = (0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3)
_BAR = 0.5
_JUDGED = (0.005, 0.1)  # from a light update of RL (ROSE, figure 11a: 1 %) to a heavy one


def run(quick: bool, nonce: str) -> dict[str, Any]:
    """Measure."""
    begun = now()
    library = native()
    if library is not None and library.level == "avx512":
        library.use_level("avx2")
    size, rounds = (1 << 24, 5) if quick else (1 << 26, 9)
    rows = []
    for density in (0.001, 0.01, 0.05) if quick else DENSITIES:
        old, new = Pool(density).cut(size)
        rows.append({"density": density, **_measure(old.view(np.uint8), new.view(np.uint8), rounds)})
    judged = [row for row in rows if _JUDGED[0] <= row["density"] <= _JUDGED[1]]
    value = min(
        row[f"{work}_{threads}_over_copy"] for row in judged for work in ("encode", "apply") for threads in (1, 2)
    )
    return frame(
        NAME,
        "real code, synthetic deltas",
        value=value,
        unit="GB/s over those of a copy (processor time), worst of encode, apply, 1 and 2 threads, 0.5 to 10% density",
        reference="memory copy, GB/s, one thread",
        reference_value=judged[0]["copy_1_gb_s"],
        bar=f">= {_BAR}",
        holds=None if quick else value >= _BAR,
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
    cpu: dict[str, list[float]] = defaultdict(list)
    wall: dict[str, list[float]] = defaultdict(list)
    exact = True

    def timed(name: str, threads: int, work: Callable[[], Any]) -> Any:
        key = f"{name}_{threads}"
        begun, started = time.process_time(), time.perf_counter()
        result = work()
        wall[key].append(time.perf_counter() - started)
        cpu[key].append((time.process_time() - begun) / threads)
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
        row[f"{key}_gb_s"] = old.nbytes / statistics.median(seconds) / 1e9
        row[f"{key}_wall_gb_s"] = old.nbytes / statistics.median(wall[key]) / 1e9
        if not key.startswith("copy"):
            copies = cpu[f"copy_{key[-1]}"]
            row[f"{key}_over_copy"] = statistics.median(copy / mine for copy, mine in zip(copies, seconds, strict=True))
    return row


def _copy(target: Bytes, source: Bytes, pool: ThreadPoolExecutor | None) -> None:
    """By one thread, or half each by two."""
    if pool is None:
        np.copyto(target, source)
        return
    halves = [slice(0, source.size // 2), slice(source.size // 2, None)]
    list(pool.map(lambda part: np.copyto(target[part], source[part]), halves))
