"""Byte streams, the reference: raw, constant, or order-0 rANS. ``csrc/rans.c`` writes and accepts the same bytes.

rANS (Duda, arXiv 1311.2540) codes a symbol of frequency f / 4096 in log2(4096 / f) bits. A stream is

    32 bytes: bit s set if symbol s is in use | u16 frequency of each of them, sum 4096 | 32 states u32 | words u16

Symbol i belongs to state i % 32, so that 32 symbols are decoded at once. A state lies in [2^16, 2^32) between symbols and
takes the next word when it falls below; the states of one round take theirs in order. After the last symbol every state
is 2^16 and no word is left: a stream that ends otherwise is refused.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from orchestrator.transfer.transfer_errors import CorruptWeightsError

Bytes = npt.NDArray[np.uint8]

RAW, CONSTANT, RANS = 0, 1, 2
LANES = 32
SCALE_BITS = 12
SCALE = 1 << SCALE_BITS
LOW = 1 << 16
BITMAP = 32


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
