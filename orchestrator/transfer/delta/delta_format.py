"""One shard's change on the wire: header, lengths of the segments, segments. Checked before anything is allocated.

    0   magic "RLCDLT01"                      8   xxh3-64 of all that follows, u64
    16  encoding u8, width u8, log u8, 0      20  segments, u32
    24  elements, u64                         32  changed elements, u64 (0 where nobody counted)
    40  payload bytes, u64                    48  zeros up to 64
    64  length of each segment, u32           ..  payload: the segments one after the other

All integers are little-endian. A segment covers ``1 << log`` elements (the last one fewer) and needs nothing but itself
and the base, so segments are coded in parallel and a reader of a slice skips those outside it. Encodings, by the name
that ``ShardKey.encoding`` carries:

* ``delta-sparse`` : changed 16-bit floats, positions and steps (:mod:`.reference_codec`).
* ``delta-xor``    : byte planes of old XOR new (:mod:`.reference_codec`).
* ``dense-planes`` : byte planes of the new values; needs no base.
* ``dense-raw``    : the new values as they are; no segments, needs no base.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import xxhash

from orchestrator.transfer.transfer_errors import CorruptWeightsError

Bytes = npt.NDArray[np.uint8]

MAGIC = b"RLCDLT01"
SPARSE, XOR, PLANES, RAW = "delta-sparse", "delta-xor", "dense-planes", "dense-raw"
ENCODINGS = (RAW, PLANES, XOR, SPARSE)  # in the order of their number in the header
NEEDS_BASE = frozenset((SPARSE, XOR))
HEADER_BYTES = 64
CHECKED_FROM = 16
MIN_LOG, MAX_LOG, PLANES_LOG = 12, 24, 16
MAX_ELEMENTS = 1 << 40
# Bytes per element of the dtypes that are known.
DTYPE_BYTES = {
    "float64": 8, "int64": 8, "float32": 4, "int32": 4, "bfloat16": 2, "float16": 2, "int16": 2, "int8": 1, "uint8": 1,
    "bool": 1, "float8_e4m3fn": 1, "float8_e5m2": 1,
}  # fmt: skip
_HEADER = struct.Struct("<8sQ4BI3Q16s")


@dataclass(frozen=True, slots=True)
class ChangeHeader:
    """What a shard's change says it is. ``elements`` of ``width`` bytes, segments of ``1 << log`` elements."""

    encoding: str
    width: int
    log: int
    segments: int
    elements: int
    changed: int
    payload: int

    def segment_bounds(self, index: int) -> tuple[int, int]:
        """First element of a segment, and the one after its last."""
        return index << self.log, min(self.elements, (index + 1) << self.log)


@dataclass(frozen=True, slots=True)
class OpenedChange:
    """A checked change: ``lengths`` uint32 [segments], ``starts`` int64 [segments + 1] into ``payload``."""

    header: ChangeHeader
    lengths: npt.NDArray[np.uint32]
    starts: npt.NDArray[np.int64]
    payload: Bytes

    def segments(self, first: int, last: int) -> Bytes:
        """The bytes of segments ``first`` to ``last - 1``."""
        return self.payload[self.starts[first] : self.starts[last]]


def segments_of(elements: int, log: int) -> int:
    """How many segments that many elements have."""
    return -(-elements >> log) if elements else 0


def seal_change(header: ChangeHeader, lengths: npt.NDArray[np.uint32], parts: list[Bytes]) -> Bytes:
    """The bytes on the wire; ``parts`` one after the other are the payload."""
    data = np.empty(HEADER_BYTES + 4 * header.segments + header.payload, np.uint8)
    fields = (ENCODINGS.index(header.encoding), header.width, header.log, 0, header.segments)
    counts = (header.elements, header.changed, header.payload)
    at = HEADER_BYTES + 4 * header.segments
    data[HEADER_BYTES:at] = np.frombuffer(lengths.astype("<u4").tobytes(), np.uint8)
    for part in parts:
        data[at : at + part.size] = part
        at += part.size
    _HEADER.pack_into(data.data, 0, MAGIC, 0, *fields, *counts, bytes(16))
    _HEADER.pack_into(
        data.data, 0, MAGIC, xxhash.xxh3_64_intdigest(data[CHECKED_FROM:].data), *fields, *counts, bytes(16)
    )
    return data


def open_change(data: Bytes) -> OpenedChange:
    """Check a whole change. The segments themselves are checked when they are decoded. Raises CorruptWeightsError."""
    if data.dtype != np.uint8 or data.ndim != 1 or not data.flags.c_contiguous:
        raise TypeError(f"a change is a contiguous uint8 array, not {data.dtype} of shape {data.shape}")
    if data.size < HEADER_BYTES:
        raise CorruptWeightsError("truncated", f"{data.size} B are less than the header of a change")
    magic, checksum, number, width, log, zero, segments, elements, changed, payload, rest = _HEADER.unpack_from(
        data.data
    )
    if magic != MAGIC:
        raise CorruptWeightsError("format", f"not a weight change, or of another format: {magic!r}")
    if data.size != HEADER_BYTES + 4 * segments + payload:
        detail = f"{HEADER_BYTES} + {4 * segments} + {payload} B announced, {data.size} B arrived"
        raise CorruptWeightsError("truncated", detail)
    found = xxhash.xxh3_64_intdigest(data[CHECKED_FROM:].data)
    if found != checksum:
        raise CorruptWeightsError("checksum", f"xxh3-64 is {found:016x}, announced {checksum:016x}")
    if number >= len(ENCODINGS) or width not in (1, 2, 4, 8) or zero or any(rest):
        raise CorruptWeightsError("format", f"encoding {number}, width {width}: cannot be read")
    header = ChangeHeader(ENCODINGS[number], width, log, segments, elements, changed, payload)
    lengths = np.frombuffer(data.data, "<u4", segments, HEADER_BYTES).astype(np.uint32)  # aligned, and our own
    starts = np.zeros(segments + 1, np.int64)
    np.cumsum(lengths, out=starts[1:])
    _check(header, int(starts[-1]))
    return OpenedChange(header, lengths, starts, data[HEADER_BYTES + 4 * segments :])


def _check(header: ChangeHeader, length: int) -> None:
    problem = ""
    if header.elements > MAX_ELEMENTS or header.changed > header.elements:
        problem = "too many elements"
    elif header.encoding == RAW:
        if header.segments or header.log or header.payload != header.elements * header.width:
            problem = "the length does not fit the elements"
    elif not MIN_LOG <= header.log <= MAX_LOG or header.segments != segments_of(header.elements, header.log):
        problem = "the segments do not fit the elements"
    elif length != header.payload:
        problem = f"the segments have {length} B"
    elif header.encoding == SPARSE and header.width != 2:
        problem = "not a 16-bit type"
    if problem:
        raise CorruptWeightsError("format", f"{problem}: {header}")
