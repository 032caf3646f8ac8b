"""Bytes on the wire per changed bf16 weight, on made-up deltas of Qwen3-8B and -32B at 0.1 to 30 % density.

The models stream tensor by tensor (the largest in parts) through the encoder that a publisher uses; each is applied to its
base and compared bit by bit: all of both models at 1, 2 and 5 %, which are judged, else two layers of each, as all made-up
layers are alike.
How the deltas are made stands in :mod:`scripts.bench.micro.delta_synthetic`; deltas of real snapshots:
:mod:`scripts.bench.micro.delta_real`.

Beside it: COO (int32 and bf16), the entropy bound, zstd (level 3) on the new values and on old XOR new, on a sample of
2^23 weights of the same pool. Break-even: the density from which the encoder's dense forms are smaller, by bisection, for
steps of an optimizer and for values that were replaced by unrelated ones (the worst case).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from orchestrator.transfer.delta import delta_codec as delta
from orchestrator.transfer.delta import delta_format as wire
from orchestrator.transfer.delta.native_codec import native_status
from scripts.bench.micro.delta_synthetic import COO_BYTES, LAYOUTS, POOL, SMALL, Layout, Pool, Words, entropy_bound
from scripts.bench.result import frame, now

NAME = "delta-bytes"
DENSITIES = (0.001, 0.003, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3)
_BAR = 1.4
_JUDGED = (0.01, 0.05)
_SAMPLE = 1 << 23
_PART = 1 << 26  # weights that are encoded at once
_POINT = 1 << 18  # weights of one point of the search for the break-even


def run(quick: bool, nonce: str) -> dict[str, Any]:
    """Measure."""
    begun = now()
    layouts = [SMALL] if quick else list(LAYOUTS.values())
    size = 1 << 22 if quick else POOL
    rows = []
    for density in (0.01, 0.05) if quick else DENSITIES:
        pool = Pool(density, size)
        sample = slice(0, min(size, _SAMPLE))
        beside = {
            "coo": float(COO_BYTES),
            **{f"entropy_{key}": value for key, value in entropy_bound(pool.old, pool.new).items()},
            **_zstd(pool.old[sample], pool.new[sample]),
        }
        for layout in layouts:
            every = 1 if quick or _JUDGED[0] <= density <= _JUDGED[1] else layout.layers // 2
            rows.append(
                {"model": layout.name, "density": density, "lr": pool.rate, **_stream(layout, pool, every), **beside}
            )
            print(NAME, json.dumps(rows[-1]), file=sys.stderr)
    judged = [row["bytes_per_change"] for row in rows if _JUDGED[0] <= row["density"] <= _JUDGED[1]]
    exact = all(row["bit_exact"] for row in rows)
    return frame(
        NAME,
        "synthetic",
        value=max(judged),
        unit="bytes per changed weight, worst of 1 to 5 % density",
        reference="COO: int32 position and bf16 value",
        reference_value=float(COO_BYTES),
        bar=f"<= {_BAR}, bit-exact",
        holds=max(judged) <= _BAR and exact,
        detail={
            "native": native_status()["live"],
            "rows": rows,
            "break_even": {"optimizer": _break_even(_optimizer), "replaced": _break_even(_replaced)},
            "samples": len(rows),
        },
        quick=quick,
        nonce=nonce,
        begun=begun,
    )


def _stream(layout: Layout, pool: Pool, every: int = 1) -> dict[str, Any]:
    """All tensors of a model (of each ``every``-th layer), one at a time."""
    total = changed = wire = 0
    exact = True
    encodings: dict[str, int] = {}
    counts = [part for _, count in layout.tensors(every) for part in _parts(count)]
    bases = np.empty(max(counts), np.uint16)
    for count in counts:
        old, new = pool.cut(count)
        change = delta.encode_change(old.view(np.uint8), new.view(np.uint8), "bfloat16")
        base = bases[:count]
        base[:] = old
        delta.apply_change(change.data, base.view(np.uint8))
        exact = exact and _same(base, new)
        total, changed, wire = total + count, changed + change.changed, wire + change.data.nbytes
        encodings[change.encoding] = encodings.get(change.encoding, 0) + 1
    return {
        "every": every,
        "weights": total,
        "changed": changed,
        "measured_density": changed / total,
        "wire_bytes": wire,
        "bytes_per_change": wire / changed,
        "of_dense": wire / (2 * total),
        "bit_exact": exact,
        "encodings": encodings,
    }


def _parts(count: int) -> list[int]:
    """A tensor's elements in parts that memory has room for."""
    return [min(_PART, count - begin) for begin in range(0, count, _PART)]


def _same(one: Words, other: Words) -> bool:
    """Bit by bit, eight bytes at a time; a part at a time, so that no mask of a whole tensor is made."""
    whole = one.size // 4 * 4
    parts = [slice(at, min(at + (1 << 22), whole)) for at in range(0, whole, 1 << 22)]
    rest = np.array_equal(one[whole:], other[whole:])
    return rest and all(np.array_equal(one[part].view(np.uint64), other[part].view(np.uint64)) for part in parts)


def _zstd(old: Words, new: Words) -> dict[str, float]:
    """Bytes per changed weight of zstd, level 3, as far as pyarrow has it."""
    import pyarrow  # not at import time: the orchestrator's own start does not need it

    codec = pyarrow.Codec("zstd", compression_level=3)
    changed = np.count_nonzero(old != new)
    sizes = {"zstd_dense": new, "zstd_xor": old ^ new}
    return {name: len(codec.compress(words.tobytes(), asbytes=True)) / changed for name, words in sizes.items()}


def _optimizer(density: float) -> tuple[Words, Words]:
    pool = Pool(density, _POINT)
    return pool.old, pool.new


def _replaced(density: float) -> tuple[Words, Words]:
    pool, other = Pool(0.001, _POINT, seed=1), Pool(0.001, _POINT, seed=2)
    hit = np.random.default_rng(3).random(pool.old.size) < density
    return pool.old, np.where(hit, other.old, pool.old)


def _encoded_sizes(old: Words, new: Words) -> dict[str, int]:
    """Bytes of the change in each encoding that can carry it."""
    work, was, now = delta.default_backend(), old.view(np.uint8), new.view(np.uint8)
    made = [delta._encode_planes(known, now, 2, 1, work) for known in (was, None)]
    made.append(delta._encode_sparse(old, new, 1, work))
    return {wire.RAW: wire.HEADER_BYTES + now.size, **{change.encoding: change.data.size for change in made}}


def _break_even(make: Callable[[float], tuple[Words, Words]]) -> dict[str, float]:
    """The least density (to one percent) at which a form is as small as sparse; 1.0: none below 100 %."""

    @cache
    def sizes(density: float) -> dict[str, int]:
        old, new = make(density)
        found = _encoded_sizes(old, new)
        return {**found, "coo": COO_BYTES * int(np.count_nonzero(old != new))}

    found = {}
    pairs = [(form, "delta-sparse") for form in ("delta-xor", "dense-planes", "dense-raw")]
    for dense, sparse in (*pairs, ("dense-raw", "coo")):
        low, high = 0.0, 1.0
        for _ in range(7):
            middle = (low + high) / 2
            low, high = (low, middle) if sizes(middle)[dense] <= sizes(middle)[sparse] else (middle, high)
        found[f"{dense} over {sparse}"] = high
    return found
