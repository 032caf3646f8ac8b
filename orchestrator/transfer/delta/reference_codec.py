"""What the bytes of a segment mean, in NumPy: the reference of the native library (``csrc``), which writes and accepts the same
bytes and gives the same verdicts, faster.

**Steps** (both 16-bit floats): the bits are sign and magnitude. Mirrored below zero they become an integer that grows with
the number: ..., -smallest, -0, +0, +smallest, ..., with infinities and NaN payloads at both ends. A change of a weight is the
difference of two such integers, modulo 2^16: mostly +1 or -1 after an optimizer step, and it brings back every pattern
(an added bf16 difference would not). The line is its own inverse, so adding a step needs no branch.

**Streams of bytes**: raw, constant, or order-0 rANS (Duda, arXiv 1311.2540), which codes a symbol of frequency f / 4096 in
log2(4096 / f) bits (``csrc/rans.c``):

    32 bytes: bit s set if symbol s is in use | u16 frequency of each of them, sum 4096 | 32 states u32 | words u16

Symbol i belongs to state i % 32, so that 32 symbols are decoded at once. A state lies in [2^16, 2^32) between symbols and
takes the next word when it falls below; the states of one round take theirs in order. After the last symbol every state
is 2^16 and no word is left: a stream that ends otherwise is refused.

**Sparse segments** of 16-bit floats, gaps Rice coded, steps entropy coded (``csrc/sparse.c``):

    count u32 | unary bytes u32 | step bytes u32 | escapes u32 | k u8 | mode u8 | zero u16        (20 bytes)
    low k bits of each gap | unary: gap >> k zero bits and a one | step stream | escapes u16

A gap is the number of unchanged words before a change. Gaps of independent changes are geometric, for which Rice codes
lie within a few hundredths of a bit of the entropy; k is chosen anew in each segment, so that rows that change more cost less.
A step is zigzagged; from 255 on it is the symbol 255 and an escape. Bits fill bytes from the lowest.

**Segments of byte planes**, for tensors that are not 16-bit floats, and where too much changed (``csrc/planes.c``). Byte b of
every element is a stream of its own (exponents compress, mantissas do not), of the values or of old XOR new:

    for each plane, from the lowest byte:  stream bytes u32 | mode u8 | zero u24 | stream
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from orchestrator.transfer.transfer_errors import CorruptWeightsError

Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[np.uint16]
Steps = npt.NDArray[np.int16]
Positions = npt.NDArray[np.int64]
Lengths = npt.NDArray[np.uint32]

RAW, CONSTANT, RANS = 0, 1, 2  # modes of a stream
LANES = 32
SCALE_BITS = 12
SCALE = 1 << SCALE_BITS
LOW = 1 << 16
BITMAP = 32
ESCAPE = 255
LARGEST = 65534
MAX_RICE = 24
_SPARSE = struct.Struct("<4I2BH")
_PLANE = struct.Struct("<II")


def to_line(bits: Words) -> Words:
    """Bits to integers (as uint16, modulo 2^16) and back."""
    mirror = np.where(bits >> 15, np.uint16(0x7FFF), np.uint16(0))
    integers: Words = np.bitwise_xor(bits, mirror)
    return integers


def steps_between(old: Words, new: Words) -> Steps:
    """``new - old`` on the line. 0 where the bits are the same, and only there."""
    return (to_line(new) - to_line(old)).view(np.int16)


def advance_values(values: Words, steps: Steps) -> Words:
    """The values ``steps`` further on the line: what the publisher has, from what the engine has."""
    return to_line(to_line(values) + steps.view(np.uint16))


def retreat_values(values: Words, steps: Steps) -> Words:
    """Takes :func:`advance_values` back, bit for bit."""
    return to_line(to_line(values) - steps.view(np.uint16))


def zigzag(steps: Steps) -> Words:
    """Steps other than 0 as small numbers 0..65534: -1, 1, -2, 2, ..."""
    wide = steps.astype(np.int32)
    return (((wide << 1) ^ (wide >> 31)) - 1).astype(np.uint16)


def unzigzag(symbols: Words) -> Steps:
    """Takes :func:`zigzag` back; 65535 is no symbol."""
    wide = symbols.astype(np.int32) + 1
    return ((wide >> 1) ^ -(wide & 1)).astype(np.int16)


def normalise(counts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Frequencies with sum 4096, at least 1 for each symbol that occurs; ``counts`` has 256 entries, two not 0."""
    frequencies: npt.NDArray[np.int64] = counts * SCALE // counts.sum()
    frequencies[(counts > 0) & (frequencies == 0)] = 1
    while (missing := SCALE - int(frequencies.sum())) != 0:
        top = int(frequencies.argmax())
        frequencies[top] += max(missing, -(int(frequencies[top]) // 2))
    return frequencies


def encode_stream(symbols: Bytes) -> tuple[int, bytes]:
    """The mode and the bytes of the shortest of the three forms."""
    counts = np.bincount(symbols, minlength=256)
    if np.count_nonzero(counts) == 1:
        return CONSTANT, bytes([int(symbols[0])])
    if symbols.size:
        data = _encode_rans(symbols, counts)
        if len(data) < symbols.size:
            return RANS, data
    return RAW, symbols.tobytes()


def decode_stream(data: Bytes, mode: int, count: int) -> Bytes:
    """``count`` symbols. Raises CorruptWeightsError."""
    if mode == RANS:
        return _decode_rans(data, count)
    if mode not in (RAW, CONSTANT):
        raise CorruptWeightsError("format", f"a stream of mode {mode}")
    if data.size != (count if mode == RAW else 1):
        raise CorruptWeightsError("truncated", f"a stream of mode {mode} has {data.size} B for {count} symbols")
    return data if mode == RAW else np.full(count, data[0], np.uint8)


def _encode_rans(symbols: Bytes, counts: npt.NDArray[np.int64]) -> bytes:
    frequencies = normalise(counts)
    starts = np.cumsum(frequencies) - frequencies
    states = np.full(LANES, LOW, np.uint64)
    frequency, start = frequencies.astype(np.uint64)[symbols], starts.astype(np.uint64)[symbols]
    shift, high = np.uint64(SCALE_BITS), np.uint64(20)
    words: list[npt.NDArray[np.uint64]] = []
    for begin in reversed(range(0, symbols.size, LANES)):
        f, first = frequency[begin : begin + LANES], start[begin : begin + LANES]
        x = states[: f.size]
        spill = x >= f << high
        words.append((x & np.uint64(0xFFFF))[spill])
        x = np.where(spill, x >> np.uint64(16), x)
        states[: f.size] = (x // f << shift) + x % f + first
    used = frequencies > 0
    return b"".join(
        (
            np.packbits(used, bitorder="little").tobytes(),
            frequencies[used].astype("<u2").tobytes(),
            states.astype("<u4").tobytes(),
            np.concatenate(words[::-1]).astype("<u2").tobytes(),
        )
    )


def _decode_rans(data: Bytes, count: int) -> Bytes:
    if data.size < BITMAP:
        raise CorruptWeightsError("truncated", f"{data.size} B are less than the symbols of a stream")
    used = np.flatnonzero(np.unpackbits(data[:BITMAP], bitorder="little"))
    at = BITMAP + 2 * used.size + 4 * LANES
    if data.size < at:
        raise CorruptWeightsError("truncated", f"a stream of {data.size} B needs {at} B before its words")
    frequencies = np.frombuffer(data[BITMAP : BITMAP + 2 * used.size].tobytes(), "<u2").astype(np.uint64)
    if frequencies.sum() != SCALE or (frequencies == 0).any() or (frequencies == SCALE).any():
        raise CorruptWeightsError("format", f"frequencies of a stream have the sum {frequencies.sum()}")
    states = np.frombuffer(data[at - 4 * LANES : at].tobytes(), "<u4").astype(np.uint64)
    if (states < LOW).any() or (data.size - at) % 2:
        raise CorruptWeightsError("format", "a state of a stream is too small, or half a word is left")
    words = np.frombuffer(data[at:].tobytes(), "<u2").astype(np.uint64)
    slot_symbol = np.repeat(used.astype(np.uint8), frequencies.astype(np.int64))
    slot_frequency = np.repeat(frequencies, frequencies.astype(np.int64))
    starts = np.repeat(np.cumsum(frequencies) - frequencies, frequencies.astype(np.int64))
    slot_bias = np.arange(SCALE, dtype=np.uint64) - starts

    symbols = np.empty(count, np.uint8)
    shift, mask = np.uint64(SCALE_BITS), np.uint64(SCALE - 1)
    taken = 0
    for begin in range(0, count, LANES):
        x = states[: min(LANES, count - begin)]
        slot = x & mask
        symbols[begin : begin + LANES] = slot_symbol[slot]
        x[:] = slot_frequency[slot] * (x >> shift) + slot_bias[slot]
        needy = np.flatnonzero(x < LOW)
        if needy.size > words.size - taken:
            raise CorruptWeightsError("truncated", "a stream ends before its symbols do")
        x[needy] = x[needy] << np.uint64(16) | words[taken : taken + needy.size]
        taken += needy.size
    if taken != words.size or (states != LOW).any():
        raise CorruptWeightsError("format", "a stream does not end where its symbols do")
    return symbols


def encode_sparse(positions: Positions, steps: Steps) -> bytes:
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
    header = _SPARSE.pack(positions.size, len(packed), len(stream), len(escapes) // 2, k, mode, 0)
    return b"".join((header, np.packbits(low.astype(np.uint8), bitorder="little").tobytes(), packed, stream, escapes))


def decode_sparse(data: Bytes, elements: int) -> tuple[Positions, Steps]:
    """Positions and steps of a segment of ``elements`` words. Raises CorruptWeightsError."""
    if not data.size:
        return np.empty(0, np.int64), np.empty(0, np.int16)
    if data.size < _SPARSE.size:
        raise CorruptWeightsError("truncated", f"{data.size} B are less than the header of a segment")
    count, unary_bytes, step_bytes, escaped, k, mode, zero = _SPARSE.unpack(data[: _SPARSE.size].tobytes())
    if not 0 < count <= elements or k > MAX_RICE or escaped > count or zero:
        raise CorruptWeightsError("format", f"a segment of {elements} words with {count} changes, k {k}")
    low_bytes = (count * k + 7) // 8
    ends = np.cumsum([_SPARSE.size, low_bytes, unary_bytes, step_bytes, 2 * escaped])
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


def encode_planes(old: Bytes | None, new: Bytes) -> bytes:
    """Planes of ``new``, or of ``old ^ new``."""
    values = new if old is None else old ^ new
    parts = []
    for plane in range(values.shape[1]):
        mode, stream = encode_stream(values[:, plane])
        parts += [_PLANE.pack(len(stream), mode), stream]
    return b"".join(parts)


def decode_planes(data: Bytes, elements: int, width: int) -> Bytes:
    """The planes, put together. Raises CorruptWeightsError."""
    values = np.empty((elements, width), np.uint8)
    at = 0
    for plane in range(width):
        if data.size - at < _PLANE.size:
            raise CorruptWeightsError("truncated", f"plane {plane} of a segment of {data.size} B has no header")
        length, mode = _PLANE.unpack(data[at : at + _PLANE.size].tobytes())
        at += _PLANE.size
        if length > data.size - at or mode > RANS:
            raise CorruptWeightsError(
                "format", f"plane {plane}: {length} B of mode {mode}, {data.size - at} B are left"
            )
        values[:, plane] = decode_stream(data[at : at + length], mode, elements)
        at += length
    if at != data.size:
        raise CorruptWeightsError("format", f"{data.size - at} B behind the last plane")
    return values


@dataclass(frozen=True, slots=True)
class AppliedSegments:
    """What a call that writes did: whole segments, in order, and then perhaps an error. ``changed``: 0 if not counted."""

    segments: int
    changed: int
    error: Exception | None


class NumpyCodec:
    """Segments ``first`` to ``last - 1`` of a shard, each of ``1 << log`` elements; arrays are contiguous."""

    def sparse_encode(self, old: Words, new: Words, log: int, first: int, last: int) -> tuple[Bytes, Lengths, int]:
        """Payload, length of each segment, number of changes."""
        parts, changed = [], 0
        for begin, end in _bounds(old.size, log, first, last):
            positions = np.flatnonzero(old[begin:end] != new[begin:end])
            changed += positions.size
            steps = steps_between(old[begin:end][positions], new[begin:end][positions])
            parts.append(encode_sparse(positions, steps))
        return (*_joined(parts), changed)

    def sparse_encode_steps(
        self, positions: Positions, steps: Steps, elements: int, log: int, first: int, last: int
    ) -> tuple[Bytes, Lengths]:
        """The same from positions and steps inside these segments. Raises ValueError unless sorted and none 0."""
        bounds = _bounds(elements, log, first, last)
        inside = not positions.size or (bool(bounds) and positions[0] >= bounds[0][0] and positions[-1] < bounds[-1][1])
        if not inside or (np.diff(positions) <= 0).any() or (steps == 0).any():
            raise ValueError("positions are not sorted inside the shard, or a step is 0")
        parts = []
        for begin, end in bounds:
            low, high = np.searchsorted(positions, (begin, end))
            parts.append(encode_sparse(positions[low:high] - begin, steps[low:high]))
        return _joined(parts)

    def sparse_decode(self, data: Bytes, elements: int) -> tuple[Positions, Steps]:
        """Positions and steps of one segment. Raises CorruptWeightsError."""
        return decode_sparse(data, elements)

    def sparse_apply(
        self, data: Bytes, lengths: Lengths, base: Words, log: int, first: int, last: int, sign: int
    ) -> AppliedSegments:
        """Add (``sign`` 1) or take back (-1) the steps of segments, in place; ``base`` is the whole shard."""
        done = changed = at = 0
        for length, (begin, end) in zip(lengths.tolist(), _bounds(base.size, log, first, last), strict=True):
            try:
                positions, steps = decode_sparse(data[at : at + length], end - begin)
            except CorruptWeightsError as error:
                return AppliedSegments(done, changed, error)
            words = base[begin:end]
            words[positions] = (advance_values if sign > 0 else retreat_values)(words[positions], steps)
            at += length
            done += 1
            changed += positions.size
        return AppliedSegments(done, changed, None)

    def planes_encode(
        self, old: Bytes | None, new: Bytes, width: int, log: int, first: int, last: int
    ) -> tuple[Bytes, Lengths]:
        """Payload and lengths; ``old`` is None for planes of the values."""
        was, now = None if old is None else old.reshape(-1, width), new.reshape(-1, width)
        return _joined(
            [
                encode_planes(None if was is None else was[begin:end], now[begin:end])
                for begin, end in _bounds(now.shape[0], log, first, last)
            ]
        )

    def planes_apply(
        self, data: Bytes, lengths: Lengths, base: Bytes, width: int, log: int, first: int, last: int, xor: bool
    ) -> AppliedSegments:
        """Write (or XOR in) the planes of segments, in place; ``base`` is the whole shard."""
        rows = base.reshape(-1, width)
        done = at = 0
        for length, (begin, end) in zip(lengths.tolist(), _bounds(rows.shape[0], log, first, last), strict=True):
            try:
                values = decode_planes(data[at : at + length], end - begin, width)
            except CorruptWeightsError as error:
                return AppliedSegments(done, 0, error)
            rows[begin:end] = rows[begin:end] ^ values if xor else values
            at += length
            done += 1
        return AppliedSegments(done, 0, None)


def _bounds(elements: int, log: int, first: int, last: int) -> list[tuple[int, int]]:
    return [(index << log, min(elements, (index + 1) << log)) for index in range(first, last)]


def _joined(parts: list[bytes]) -> tuple[Bytes, Lengths]:
    lengths = np.array([len(part) for part in parts], np.uint32)
    return np.frombuffer(b"".join(parts), np.uint8), lengths
