"""Segments of byte planes, the reference: for tensors that are not 16-bit floats, and where too much changed.

Byte b of every element is a stream of its own (exponents compress, mantissas do not), of the values or of old XOR new:

    for each plane, from the lowest byte:  stream bytes u32 | mode u8 | zero u24 | stream

Twin of ``csrc/planes.c``. Arrays are uint8 of shape [elements, width].
"""

from __future__ import annotations

import struct

import numpy as np

from orchestrator.transfer.delta.rans import RANS, Bytes, decode_stream, encode_stream
from orchestrator.transfer.transfer_errors import CorruptWeightsError

HEADER = struct.Struct("<II")


def encode_segment(old: Bytes | None, new: Bytes) -> bytes:
    """Planes of ``new``, or of ``old ^ new``."""
    values = new if old is None else old ^ new
    parts = []
    for plane in range(values.shape[1]):
        mode, stream = encode_stream(values[:, plane])
        parts += [HEADER.pack(len(stream), mode), stream]
    return b"".join(parts)


def decode_segment(data: Bytes, elements: int, width: int) -> Bytes:
    """The planes, put together. Raises CorruptWeightsError."""
    values = np.empty((elements, width), np.uint8)
    at = 0
    for plane in range(width):
        if data.size - at < HEADER.size:
            raise CorruptWeightsError("truncated", f"plane {plane} of a segment of {data.size} B has no header")
        length, mode = HEADER.unpack(data[at : at + HEADER.size].tobytes())
        at += HEADER.size
        if length > data.size - at or mode > RANS:
            raise CorruptWeightsError(
                "format", f"plane {plane}: {length} B of mode {mode}, {data.size - at} B are left"
            )
        values[:, plane] = decode_stream(data[at : at + length], mode, elements)
        at += length
    if at != data.size:
        raise CorruptWeightsError("format", f"{data.size - at} B behind the last plane")
    return values
