"""Other ways for a change to travel, behind the seam of the real protocol, so that only the encoding differs.

* ``coo``: int32 positions and the new bf16 values (ROSE 4.2 says COO; the widths are our reading).
* ``zstd-dense``: zstd of the new values. ``zstd-xor``: zstd of old XOR new. Level 3, pyarrow's.
* ``raw``: the new values.

Each is vectorised as far as NumPy goes, and applied in place with an undo, as ours. They are for benchmarks: what arrives is
trusted.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pyarrow

from orchestrator.transfer.bucket import Bytes
from orchestrator.transfer.shard_codec import RAW, ShardCodec

ZSTD_LEVEL = 3


class Raw:
    """Every shard as its own bytes."""

    def encode(self, old: Bytes | None, new: Bytes, dtype: str) -> tuple[str, Bytes]:
        return RAW, new

    def apply(self, encoding: str, data: Bytes, base: Bytes) -> Callable[[], None]:
        raise AssertionError("raw shards need no codec")


class Coo:
    """int32 positions, then the values at them; 16-bit dtypes, shards below 2^31 elements."""

    def encode(self, old: Bytes | None, new: Bytes, dtype: str) -> tuple[str, Bytes]:
        if old is None:
            return RAW, new
        values = new.view(np.uint16)
        where = np.flatnonzero(old.view(np.uint16) != values).astype(np.int32)
        return "coo", np.concatenate([where.view(np.uint8), values[where].view(np.uint8)])

    def apply(self, encoding: str, data: Bytes, base: Bytes) -> Callable[[], None]:
        count = data.nbytes // 6
        where, values = data[: 4 * count].view(np.int32), data[4 * count :].view(np.uint16)
        words = base.view(np.uint16)
        before = words[where]
        words[where] = values
        kept = where.copy()

        def undo() -> None:
            words[kept] = before

        return undo


class Zstd:
    """``xor``: of the change; else of the new values, which need no base."""

    def __init__(self, *, xor: bool) -> None:
        self._xor = xor
        self._codec = pyarrow.Codec("zstd", compression_level=ZSTD_LEVEL)

    def encode(self, old: Bytes | None, new: Bytes, dtype: str) -> tuple[str, Bytes]:
        if self._xor and old is None:
            return RAW, new
        packed = self._codec.compress((old ^ new if self._xor and old is not None else new).data)
        return ("zstd-xor" if self._xor else "zstd-dense"), np.frombuffer(packed, np.uint8)

    def apply(self, encoding: str, data: Bytes, base: Bytes) -> Callable[[], None]:
        found = np.frombuffer(self._codec.decompress(data.data, decompressed_size=base.nbytes), np.uint8)
        before = base.copy()
        if self._xor:
            base ^= found
        else:
            base[:] = found

        def undo() -> None:
            base[:] = before

        return undo


class Switch:
    """One of several codecs at a time, so that one job can try each on the same base. Adds up the seconds of each side."""

    def __init__(self, codecs: dict[str, ShardCodec], clock: Callable[[], float]) -> None:
        self._codecs, self._clock = codecs, clock
        self.use = next(iter(codecs))
        self.encode_seconds = self.apply_seconds = 0.0

    def encode(self, old: Bytes | None, new: Bytes, dtype: str) -> tuple[str, Bytes]:
        begun = self._clock()
        made = self._codecs[self.use].encode(old, new, dtype)
        self.encode_seconds += self._clock() - begun
        return made

    def apply(self, encoding: str, data: Bytes, base: Bytes) -> Callable[[], None]:
        begun = self._clock()
        undo = self._codecs[self.use].apply(encoding, data, base)
        self.apply_seconds += self._clock() - begun
        return undo
