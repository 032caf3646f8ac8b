"""How a shard travels when not as its own bytes: the one seam between the protocol and the compression of differences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np

from orchestrator.api import ShardKey
from orchestrator.transfer.bucket import Bytes, digest
from orchestrator.transfer.transfer_errors import CorruptWeightsError

RAW = "raw"  # the encoding of a shard that travels as its own bytes; needs no codec


class ShardCodec(Protocol):
    """Both sides of a job have the same one."""

    def encode(self, old: Bytes | None, new: Bytes, dtype: str) -> tuple[str, Bytes]:
        """(encoding, bytes) of the change from ``old`` (None: nothing is known) to ``new``. "raw": the bytes of ``new``."""

    def apply(self, encoding: str, data: Bytes, base: Bytes) -> Callable[[], None]:
        """Make ``base`` the new values, in place; returns how to undo that. Raises CorruptWeightsError, base as it was."""


def apply_stored(
    codec: ShardCodec | None, key: ShardKey, data: Bytes, base: Bytes, expected: int
) -> Callable[[], None]:
    """Bring the stored bytes of a shard into ``base``, in place, and compare the digest; returns how to undo that.

    Raises CorruptWeightsError; ``base`` is then as it was.
    """
    if key.encoding == RAW:
        if data.nbytes != base.nbytes:
            raise CorruptWeightsError("layout", f"tensor {key.tensor}: {data.nbytes} B, its base has {base.nbytes} B")
        before = base.copy()
        base[:] = data

        def undo() -> None:
            base[:] = before

    elif codec is None:
        raise CorruptWeightsError("format", f"tensor {key.tensor}: no codec for encoding {key.encoding}")
    else:
        undo = codec.apply(key.encoding, data, base)
    found = digest(base)
    if found != expected:
        undo()
        raise CorruptWeightsError("digest", f"tensor {key.tensor}: xxh3-64 {found:016x}, published {expected:016x}")
    return undo


def decode_stored(codec: ShardCodec | None, key: ShardKey, data: Bytes, length: int, expected: int) -> Bytes:
    """A shard of a full snapshot; a view of ``data`` where it travelled raw. Raises CorruptWeightsError."""
    if key.encoding == RAW:
        return data  # its digest is that of the stored bytes, which was compared
    made = np.zeros(length, dtype=np.uint8)
    apply_stored(codec, key, data, made, expected)
    return made
