"""Sparse segments of 16-bit floats, the reference: gaps Rice coded, steps entropy coded. Twin of ``csrc/sparse.c``.

    count u32 | unary bytes u32 | step bytes u32 | escapes u32 | k u8 | mode u8 | zero u16        (20 bytes)
    low k bits of each gap | unary: gap >> k zero bits and a one | step stream | escapes u16

A gap is the number of unchanged words before a change. Gaps of independent changes are geometric, for which Rice codes
lie within a few hundredths of a bit of the entropy; k is chosen anew in each segment, so that rows that change more cost less.
A step is zigzagged (:mod:`.line`); from 255 on it is the symbol 255 and an escape. Bits fill bytes from the lowest.
"""

from __future__ import annotations

import struct
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from orchestrator.transfer.delta.bf16_line import Steps, unzigzag, zigzag
from orchestrator.transfer.delta.rans import Bytes, decode_stream, encode_stream
from orchestrator.transfer.transfer_errors import CorruptWeightsError

Positions = npt.NDArray[np.int64]

HEADER = struct.Struct("<4I2BH")
ESCAPE = 255
LARGEST = 65534
MAX_RICE = 24


def encode_segment(positions: Positions, steps: Steps) -> bytes:
    """Sorted positions within the segment and their steps, none of them 0. Nothing changed: no bytes."""
    if not positions.size:
        return b""
    gaps = np.diff(positions, prepend=-1) - 1
    k = _best_k(gaps, int(positions[-1]) + 1)
    low = (gaps[:, None] >> np.arange(k)) & 1
    ones = np.cumsum((gaps >> k) + 1) - 1
    unary = np.zeros(int(ones[-1]) + 1, np.uint8)
    unary[ones] = 1
    symbols = zigzag(steps)
    escapes = symbols[symbols >= ESCAPE].astype("<u2").tobytes()
    mode, stream = encode_stream(np.minimum(symbols, ESCAPE).astype(np.uint8))
    packed = np.packbits(unary, bitorder="little").tobytes()
    header = HEADER.pack(positions.size, len(packed), len(stream), len(escapes) // 2, k, mode, 0)
    return b"".join((header, np.packbits(low.astype(np.uint8), bitorder="little").tobytes(), packed, stream, escapes))


def decode_segment(data: Bytes, elements: int) -> tuple[Positions, Steps]:
    """Positions and steps of a segment of ``elements`` words. Raises CorruptWeightsError."""
    if not data.size:
        return np.empty(0, np.int64), np.empty(0, np.int16)
    if data.size < HEADER.size:
        raise CorruptWeightsError("truncated", f"{data.size} B are less than the header of a segment")
    count, unary_bytes, step_bytes, escaped, k, mode, zero = HEADER.unpack(data[: HEADER.size].tobytes())
    if not 0 < count <= elements or k > MAX_RICE or escaped > count or zero:
        raise CorruptWeightsError("format", f"a segment of {elements} words with {count} changes, k {k}")
    low_bytes = (count * k + 7) // 8
    ends = np.cumsum([HEADER.size, low_bytes, unary_bytes, step_bytes, 2 * escaped])
    if ends[-1] != data.size:
        raise CorruptWeightsError("truncated", f"a segment of {ends[-1]} B has {data.size} B")
    if count > 8 * unary_bytes:
        raise CorruptWeightsError("format", f"{count} changes in {unary_bytes} B of unary code")
    low, unary, stream, tail = (data[begin:end] for begin, end in pairwise(ends.tolist()))
    positions = _positions(low, unary, count, k, elements)
    symbols = decode_stream(stream, mode, count).astype(np.uint16)
    large = symbols == ESCAPE
    values = np.frombuffer(tail.tobytes(), "<u2")
    if np.count_nonzero(large) != escaped or ((values < ESCAPE) | (values > LARGEST)).any():
        raise CorruptWeightsError("format", f"{escaped} escapes do not fit their symbols")
    symbols[large] = values
    return positions, unzigzag(symbols)


def _best_k(gaps: Positions, span: int) -> int:
    """The k with the fewest bits among those of the mean gap and the three below; the least of equals."""
    high = (span // gaps.size).bit_length() - 1
    candidates = range(max(0, high - 3), high + 1)
    return min(candidates, key=lambda k: int((gaps >> k).sum()) + gaps.size * (k + 1))


def _positions(low: Bytes, unary: Bytes, count: int, k: int, elements: int) -> Positions:
    ones = np.flatnonzero(np.unpackbits(unary, bitorder="little"))
    if ones.size != count or ones[-1] // 8 != unary.size - 1:
        raise CorruptWeightsError("format", f"{ones.size} gaps for {count} changes")
    quotients = np.diff(ones, prepend=-1) - 1
    bits = np.unpackbits(low, count=count * k, bitorder="little").reshape(count, k)
    gaps = (quotients << k) + (bits.astype(np.int64) << np.arange(k)).sum(axis=1)
    positions: Positions = np.cumsum(gaps + 1) - 1
    if positions[-1] >= elements:
        raise CorruptWeightsError("format", f"a change at {positions[-1]} of {elements} words")
    return positions
