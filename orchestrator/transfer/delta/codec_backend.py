"""What does the work on segments: the native library or its NumPy twin. Both give the same bytes and the same verdicts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

import orchestrator.transfer.delta.byte_planes as byte_planes
import orchestrator.transfer.delta.sparse_segments as sparse_segments
from orchestrator.transfer.delta.bf16_line import Steps, Words, advance_values, retreat_values, steps_between
from orchestrator.transfer.delta.rans import Bytes
from orchestrator.transfer.delta.sparse_segments import Positions
from orchestrator.transfer.transfer_errors import CorruptWeightsError

Lengths = npt.NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class AppliedSegments:
    """What a call that writes did: whole segments, in order, and then perhaps an error. ``changed``: 0 if not counted."""

    segments: int
    changed: int
    error: Exception | None


class CodecBackend(Protocol):
    """Segments ``first`` to ``last - 1`` of a shard, each of ``1 << log`` elements; arrays are contiguous."""

    def sparse_encode(self, old: Words, new: Words, log: int, first: int, last: int) -> tuple[Bytes, Lengths, int]:
        """Payload, length of each segment, number of changes."""
        ...

    def sparse_encode_steps(
        self, positions: Positions, steps: Steps, elements: int, log: int, first: int, last: int
    ) -> tuple[Bytes, Lengths]:
        """The same from positions and steps inside these segments. Raises ValueError unless sorted and none 0."""
        ...

    def sparse_decode(self, data: Bytes, elements: int) -> tuple[Positions, Steps]:
        """Positions and steps of one segment. Raises CorruptWeightsError."""
        ...

    def sparse_apply(
        self, data: Bytes, lengths: Lengths, base: Words, log: int, first: int, last: int, sign: int
    ) -> AppliedSegments:
        """Add (``sign`` 1) or take back (-1) the steps of segments, in place; ``base`` is the whole shard."""
        ...

    def planes_encode(
        self, old: Bytes | None, new: Bytes, width: int, log: int, first: int, last: int
    ) -> tuple[Bytes, Lengths]:
        """Payload and lengths; ``old`` is None for planes of the values."""
        ...

    def planes_apply(
        self, data: Bytes, lengths: Lengths, base: Bytes, width: int, log: int, first: int, last: int, xor: bool
    ) -> AppliedSegments:
        """Write (or XOR in) the planes of segments, in place; ``base`` is the whole shard."""
        ...


class NumpyCodec:
    """In NumPy: slower, but what the bytes mean is written here."""

    def sparse_encode(self, old: Words, new: Words, log: int, first: int, last: int) -> tuple[Bytes, Lengths, int]:
        parts, changed = [], 0
        for begin, end in _bounds(old.size, log, first, last):
            positions = np.flatnonzero(old[begin:end] != new[begin:end])
            changed += positions.size
            steps = steps_between(old[begin:end][positions], new[begin:end][positions])
            parts.append(sparse_segments.encode_segment(positions, steps))
        return (*_joined(parts), changed)

    def sparse_encode_steps(
        self, positions: Positions, steps: Steps, elements: int, log: int, first: int, last: int
    ) -> tuple[Bytes, Lengths]:
        bounds = _bounds(elements, log, first, last)
        inside = not positions.size or (bool(bounds) and positions[0] >= bounds[0][0] and positions[-1] < bounds[-1][1])
        if not inside or (np.diff(positions) <= 0).any() or (steps == 0).any():
            raise ValueError("positions are not sorted inside the shard, or a step is 0")
        parts = []
        for begin, end in bounds:
            low, high = np.searchsorted(positions, (begin, end))
            parts.append(sparse_segments.encode_segment(positions[low:high] - begin, steps[low:high]))
        return _joined(parts)

    def sparse_decode(self, data: Bytes, elements: int) -> tuple[Positions, Steps]:
        return sparse_segments.decode_segment(data, elements)

    def sparse_apply(
        self, data: Bytes, lengths: Lengths, base: Words, log: int, first: int, last: int, sign: int
    ) -> AppliedSegments:
        done = changed = at = 0
        for length, (begin, end) in zip(lengths.tolist(), _bounds(base.size, log, first, last), strict=True):
            try:
                positions, steps = sparse_segments.decode_segment(data[at : at + length], end - begin)
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
        was, now = None if old is None else old.reshape(-1, width), new.reshape(-1, width)
        return _joined(
            [
                byte_planes.encode_segment(None if was is None else was[begin:end], now[begin:end])
                for begin, end in _bounds(now.shape[0], log, first, last)
            ]
        )

    def planes_apply(
        self, data: Bytes, lengths: Lengths, base: Bytes, width: int, log: int, first: int, last: int, xor: bool
    ) -> AppliedSegments:
        rows = base.reshape(-1, width)
        done = at = 0
        for length, (begin, end) in zip(lengths.tolist(), _bounds(rows.shape[0], log, first, last), strict=True):
            try:
                values = byte_planes.decode_segment(data[at : at + length], end - begin, width)
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
