"""How a shard travels when not as its own bytes: the one seam between the protocol and the compression of differences, and the
codec that jobs use, :mod:`orchestrator.transfer.delta` behind that seam.

Guarantees: what one side encodes the other applies bit for bit, or CorruptWeightsError is raised and the base is as it was;
a shard whose encoding would not be smaller travels raw.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Protocol

import numpy as np

import orchestrator.transfer.delta.delta_codec as delta
from orchestrator.api import ConfigError, ShardKey
from orchestrator.transfer.bucket import Bytes, digest
from orchestrator.transfer.delta.delta_format import OpenedChange, open_change
from orchestrator.transfer.transfer_errors import CorruptWeightsError

RAW = "raw"  # the encoding of a shard that travels as its own bytes; needs no codec
_PIECE = 1 << 16  # elements at a time where a shard travels raw


class ShardCodec(Protocol):
    """Both sides of a job have the same one."""

    def encode(self, old: Bytes | None, new: Bytes, dtype: str) -> tuple[str, Bytes]:
        """(encoding, bytes) of the change from ``old`` (None: nothing is known) to ``new``. "raw": the bytes of ``new``."""

    def apply(self, encoding: str, data: Bytes, base: Bytes) -> Callable[[], None]:
        """Make ``base`` the new values, in place; returns how to undo that. Raises CorruptWeightsError, base as it was."""


class DeltaCodec:
    """Implements :class:`ShardCodec`. ``threads``: of one call.

    ``compress_full``: full snapshots are entropy-coded, too, which costs time on both sides; else they travel raw.
    """

    def __init__(self, *, threads: int = 1, compress_full: bool = False) -> None:
        if type(threads) is not int or threads < 1:
            raise ConfigError("threads", threads, "must be an integer of 1 or more")
        self._threads = threads
        self._compress_full = compress_full

    def encode(self, old: Bytes | None, new: Bytes, dtype: str) -> tuple[str, Bytes]:
        if old is None and not self._compress_full:
            return RAW, new
        change = delta.encode_change(old, new, dtype, threads=self._threads)
        return (RAW, new) if change.data.nbytes >= new.nbytes else (change.encoding, change.data)

    def apply(self, encoding: str, data: Bytes, base: Bytes) -> Callable[[], None]:
        try:
            log = delta.apply_change(_opened(encoding, data), base, threads=self._threads)
        except ConfigError as error:  # the header does not fit this shard
            raise CorruptWeightsError("layout", str(error)) from error
        return partial(delta.undo_change, log)

    def edits(
        self, encoding: str, data: Bytes, elements: int, width: int, start: int = 0, stop: int | None = None
    ) -> Iterator[delta.ShardEdit]:
        """What a stored shard of ``elements`` of ``width`` bytes does to its base, a piece at a time; RAW ones, too.

        Only positions in ``[start, stop)``. Raises CorruptWeightsError, at the latest before what is damaged is yielded.
        """
        if encoding == RAW:
            if data.nbytes != elements * width:
                raise CorruptWeightsError("layout", f"{data.nbytes} B for {elements} elements of {width} B")
            values = data.view(f"<u{width}") if data.ctypes.data % width == 0 else data.copy().view(f"<u{width}")
            last = elements if stop is None else min(stop, elements)
            for begin in range(max(start, 0), last, _PIECE):
                piece = values[begin : min(begin + _PIECE, last)]
                yield delta.ShardEdit(np.arange(begin, begin + piece.size), piece, encoding)
            return
        opened = _opened(encoding, data)
        if (opened.header.elements, opened.header.width) != (elements, width):
            raise CorruptWeightsError("layout", f"{opened.header} for {elements} elements of {width} B")
        yield from delta.read_edits(opened, start, stop)


def _opened(encoding: str, data: Bytes) -> OpenedChange:
    """Checked, once. Raises CorruptWeightsError."""
    opened = open_change(data)
    if opened.header.encoding != encoding:
        detail = f"a change of encoding {opened.header.encoding}, the manifest says {encoding}"
        raise CorruptWeightsError("format", detail)
    return opened


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
