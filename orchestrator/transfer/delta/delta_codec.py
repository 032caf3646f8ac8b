"""Encode a shard's change, apply it in place, take it back; or read what it does one segment at a time.

Guarantees: what was encoded is what is applied, bit for bit, for every bit pattern; the smallest of the encodings is taken where
the sparse one does not clearly win; a change that is damaged raises CorruptWeightsError and leaves the base as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

import orchestrator.transfer.delta.delta_format as wire
from orchestrator.api import ConfigError
from orchestrator.transfer.delta.delta_format import Bytes, ChangeHeader, OpenedChange
from orchestrator.transfer.delta.native_codec import NativeCodec, native
from orchestrator.transfer.delta.reference_codec import (
    AppliedSegments,
    Lengths,
    NumpyCodec,
    Positions,
    Steps,
    Words,
    advance_values,
)
from orchestrator.transfer.transfer_errors import CorruptWeightsError

ON_THE_LINE = frozenset(("bfloat16", "float16"))
CodecBackend = NativeCodec | NumpyCodec  # both give the same bytes and the same verdicts
T = TypeVar("T")
_TARGET = 32768  # changes in a segment: enough that its 0.3 KB of tables are below one percent
_WINDOW, _WINDOWS = 4096, 64  # what is looked at to guess the density


class ShardChange(NamedTuple):
    """A shard's change on the wire. ``encoding`` is what ``ShardKey.encoding`` says; ``changed``: 0 if nobody counted."""

    encoding: str
    data: Bytes
    changed: int


@dataclass(frozen=True, slots=True)
class UndoLog:
    """What :func:`undo_change` needs: the array that was changed, and either the change itself (``old`` None) or the
    old values.
    """

    base: Bytes
    opened: OpenedChange
    segments: int
    old: Bytes | None
    backend: CodecBackend

    @property
    def bytes(self) -> int:
        """Memory that the log holds."""
        return self.opened.payload.nbytes if self.old is None else self.old.nbytes


def default_backend() -> CodecBackend:
    """The native library where it could be loaded, else NumPy."""
    return native() or NumpyCodec()


# -- encode ------------------------------------------------------------------------------------------------------------


def encode_change(
    old: Bytes | None, new: Bytes, dtype: str, *, threads: int = 1, backend: CodecBackend | None = None
) -> ShardChange:
    """The change from ``old`` to ``new``: uint8 arrays of equal length, contiguous; ``old`` None: no base is known.

    Raises ConfigError for arrays that do not fit each other or ``dtype`` (an unknown dtype is taken as single bytes).
    """
    width = wire.DTYPE_BYTES.get(dtype, 1)
    _check_array("new", new, width)
    if old is not None:
        _check_array("old", old, width)
        if old.size != new.size:
            raise ConfigError("old", old.size, f"must have the {new.size} B of the new values")
    work = backend or default_backend()
    raw = wire.HEADER_BYTES + new.size
    best: ShardChange | None = None
    if old is not None and dtype in ON_THE_LINE:
        best = _encode_sparse(old.view(np.uint16), new.view(np.uint16), threads, work)
        if best.data.size <= raw // 8:  # 30 % of the weights changed by an optimizer are below that
            return best
    for base in (old, None) if old is not None else (None,):
        found = _encode_planes(base, new, width, threads, work)
        if best is None or found.data.size < best.data.size:
            best = found
    if best is None or best.data.size >= raw:
        header = ChangeHeader(wire.RAW, width, 0, 0, new.size // width, 0, new.size)
        return ShardChange(wire.RAW, wire.seal_change(header, np.empty(0, np.uint32), [new]), 0)
    return best


def encode_steps(
    positions: Positions, steps: Steps, elements: int, *, backend: CodecBackend | None = None
) -> ShardChange:
    """A sparse change of ``elements`` 16-bit floats from what an accelerator gathered.

    ``positions`` int64 in strictly ascending order, ``steps`` int16 (:func:`.reference_codec.steps_between`), none of them 0.
    There is no fall-back to dense: the caller has no old and new values at hand. Raises ConfigError.
    """
    if positions.shape != steps.shape or positions.ndim != 1 or positions.dtype != np.int64 or steps.dtype != np.int16:
        raise ConfigError("steps", str(steps.dtype), "positions int64 and steps int16 must be parallel")
    log = _log(positions.size, elements)
    segments = wire.segments_of(elements, log)
    contiguous = np.ascontiguousarray(positions), np.ascontiguousarray(steps)
    try:
        payload, lengths = (backend or default_backend()).sparse_encode_steps(*contiguous, elements, log, 0, segments)
    except ValueError as error:
        raise ConfigError("positions", positions.size, str(error)) from error
    header = ChangeHeader(wire.SPARSE, 2, log, segments, elements, positions.size, payload.size)
    return ShardChange(wire.SPARSE, wire.seal_change(header, lengths, [payload]), positions.size)


def _encode_sparse(old: Words, new: Words, threads: int, work: CodecBackend) -> ShardChange:
    log = _guess_log(old, new)
    segments = wire.segments_of(new.size, log)
    parts = _in_threads(lambda first, last: work.sparse_encode(old, new, log, first, last), segments, threads)
    changed = sum(part[2] for part in parts)
    return _sealed(wire.SPARSE, 2, log, new.size, changed, [part[:2] for part in parts])


def _encode_planes(old: Bytes | None, new: Bytes, width: int, threads: int, work: CodecBackend) -> ShardChange:
    log, elements = wire.PLANES_LOG, new.size // width
    parts = _in_threads(
        lambda first, last: work.planes_encode(old, new, width, log, first, last),
        wire.segments_of(elements, log),
        threads,
    )
    return _sealed(wire.PLANES if old is None else wire.XOR, width, log, elements, 0, parts)


def _sealed(
    encoding: str, width: int, log: int, elements: int, changed: int, parts: list[tuple[Bytes, Lengths]]
) -> ShardChange:
    payload = sum(part.size for part, _ in parts)
    header = ChangeHeader(encoding, width, log, wire.segments_of(elements, log), elements, changed, payload)
    lengths = np.concatenate([np.empty(0, np.uint32), *(lengths for _, lengths in parts)])
    return ShardChange(encoding, wire.seal_change(header, lengths, [part for part, _ in parts]), changed)


def _guess_log(old: Words, new: Words) -> int:
    """From all of a small shard, from windows spread over a large one: no pass of its own, the same for each backend."""
    if old.size <= _WINDOW * _WINDOWS:
        return _log(int(np.count_nonzero(old != new)), old.size)
    begins = np.linspace(0, old.size - _WINDOW, _WINDOWS).astype(np.int64)
    changed = sum(int(np.count_nonzero(old[at : at + _WINDOW] != new[at : at + _WINDOW])) for at in begins)
    return _log(changed, _WINDOW * _WINDOWS)


def _log(changed: int, elements: int) -> int:
    wanted = _TARGET * elements // max(changed, 1)
    return min(max(wanted.bit_length(), wire.MIN_LOG), wire.MAX_LOG)


# -- apply -------------------------------------------------------------------------------------------------------------


def apply_change(
    data: Bytes | OpenedChange, base: Bytes, *, threads: int = 1, backend: CodecBackend | None = None
) -> UndoLog:
    """Change ``base`` (uint8, contiguous, writable) in place; returns what :func:`undo_change` needs. ``data``: or the
    change opened.

    The log holds a copy of a sparse change, which is as good as the old values at a fifth of their size, or the old array
    where all of it was replaced. ``data`` is not needed any more. Raises CorruptWeightsError, and then base is as before;
    ConfigError when base is no array that can be changed.
    """
    opened = _opened(data)
    header = opened.header
    _check_array("base", base, header.width)
    if not base.flags.writeable:
        raise ConfigError("base", "read-only", "the array that is changed in place must be writable")
    if base.size != header.elements * header.width:
        detail = f"{header.elements} elements of {header.width} B for an array of {base.size} B"
        raise CorruptWeightsError("layout", detail)
    work = backend or default_backend()
    if header.encoding in wire.NEEDS_BASE:
        opened = OpenedChange(header, opened.lengths, opened.starts, opened.payload.copy())
        log = UndoLog(base, opened, header.segments, None, work)
    else:
        log = UndoLog(base, opened, header.segments, base.copy(), work)
        if header.encoding == wire.RAW:
            base[:] = opened.payload
            return log
    changed, failure, spans = 0, None, []
    for first, done in _run(opened, base, 1, threads, work):
        spans.append((first, first + done.segments))
        changed += done.changed
        failure = failure or done.error
    if failure is None and header.encoding == wire.SPARSE and changed != header.changed:
        failure = CorruptWeightsError("format", f"{header.changed} changes announced, {changed} found")
    if failure is not None:
        _revert(log, spans)
        raise failure
    return log


def undo_change(log: UndoLog) -> None:
    """Bring back the bits that were there before :func:`apply_change`. Once, and before anything else changed the array."""
    _revert(log, [(0, log.segments)])


def _revert(log: UndoLog, spans: list[tuple[int, int]]) -> None:
    if log.old is not None:
        log.base[:] = log.old
        return
    for first, last in spans:
        done = _apply_segments(log.opened, log.base, -1, first, last, log.backend)
        if done.error is not None:
            raise done.error


def _run(
    opened: OpenedChange, base: Bytes, sign: int, threads: int, work: CodecBackend
) -> list[tuple[int, AppliedSegments]]:
    return _in_threads(
        lambda first, last: (first, _apply_segments(opened, base, sign, first, last, work)),
        opened.header.segments,
        threads,
    )


def _apply_segments(
    opened: OpenedChange, base: Bytes, sign: int, first: int, last: int, work: CodecBackend
) -> AppliedSegments:
    header = opened.header
    data, lengths = opened.segments(first, last), opened.lengths[first:last]
    if header.encoding == wire.SPARSE:
        return work.sparse_apply(data, lengths, base.view(np.uint16), header.log, first, last, sign)
    xor = header.encoding == wire.XOR
    return work.planes_apply(data, lengths, base, header.width, header.log, first, last, xor)


# -- read --------------------------------------------------------------------------------------------------------------


def read_steps(
    data: Bytes | OpenedChange, start: int = 0, stop: int | None = None, *, backend: CodecBackend | None = None
) -> Iterator[tuple[Positions, Steps]]:
    """Positions (int64, in the shard, ascending) and steps of a sparse change, a segment at a time; no base needed.

    For a reader that hosts a slice and knows where its positions lie in its own storage: ``mine[at] = advance(mine[at], steps)``.
    Only positions in ``[start, stop)``; segments outside are not decoded. Raises CorruptWeightsError, at the latest before
    the segment that is damaged is yielded, and ConfigError for another encoding.
    """
    opened = _opened(data)
    header = opened.header
    if header.encoding != wire.SPARSE:
        raise ConfigError("encoding", header.encoding, "only a sparse change has steps; apply it, or read its edits")
    stop = header.elements if stop is None else min(stop, header.elements)
    work = backend or default_backend()
    total = 0
    for index in range(max(start, 0) >> header.log, wire.segments_of(max(stop, 0), header.log)):
        begin, end = header.segment_bounds(index)
        positions, found = work.sparse_decode(opened.segments(index, index + 1), end - begin)
        total += positions.size
        if not positions.size:
            continue
        positions += begin
        if begin < start or end > stop:
            low, high = np.searchsorted(positions, (start, stop))
            positions, found = positions[low:high], found[low:high]
        yield positions, found
    if start <= 0 and stop == header.elements and total != header.changed:
        raise CorruptWeightsError("format", f"{header.changed} changes announced, {total} found")


@dataclass(frozen=True, slots=True)
class ShardEdit:
    """What a change does to some elements: ``positions`` (int64, in the shard, ascending), and how they get their values."""

    positions: Positions
    operand: npt.NDArray[Any]  # steps on the line, bits to flip, or the new values
    encoding: str

    def new_values(self, old: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """The new values of these elements from their old ones: unsigned integers of the tensor's width."""
        if self.encoding == wire.SPARSE:
            return advance_values(old, self.operand)
        found: npt.NDArray[Any] = old ^ self.operand if self.encoding == wire.XOR else self.operand
        return found

    def select(self, chosen: slice | npt.NDArray[np.bool_]) -> ShardEdit:
        """Some of them."""
        return ShardEdit(self.positions[chosen], self.operand[chosen], self.encoding)


def read_edits(
    data: Bytes | OpenedChange, start: int = 0, stop: int | None = None, *, backend: CodecBackend | None = None
) -> Iterator[ShardEdit]:
    """Any change, a segment at a time, without the base: for a reader that knows where each element lies in its own storage.

    Only positions in ``[start, stop)``; segments outside are not decoded. Of the encodings that need no base every position
    comes, of the others those that change. Raises CorruptWeightsError, at the latest before what is damaged is yielded.
    """
    opened = _opened(data)
    header = opened.header
    if header.encoding == wire.SPARSE:
        for positions, found in read_steps(opened, start, stop, backend=backend):
            yield ShardEdit(positions, found, wire.SPARSE)
        return
    stop = header.elements if stop is None else min(stop, header.elements)
    work, log = backend or default_backend(), header.log or wire.PLANES_LOG
    for index in range(max(start, 0) >> log, wire.segments_of(max(stop, 0), log)):
        begin, end = index << log, min(header.elements, (index + 1) << log)
        if header.encoding == wire.RAW:
            now = opened.payload[begin * header.width : end * header.width].copy()  # aligned
        else:
            now = np.zeros((end - begin) * header.width, np.uint8)
            lengths, segment = opened.lengths[index : index + 1], opened.segments(index, index + 1)
            done = work.planes_apply(segment, lengths, now, header.width, log, 0, 1, False)
            if done.error is not None:
                raise done.error
        values = now.view(f"<u{header.width}")
        low, high = max(start - begin, 0), min(stop, end) - begin
        values = values[low:high]
        where = np.flatnonzero(values) if header.encoding == wire.XOR else np.arange(values.size)
        yield ShardEdit(
            where + (begin + low), values[where] if header.encoding == wire.XOR else values, header.encoding
        )


# -- helpers -----------------------------------------------------------------------------------------------------------


def _opened(change: Bytes | OpenedChange) -> OpenedChange:
    """Checked once: what was opened before is taken as it is."""
    return change if isinstance(change, OpenedChange) else wire.open_change(change)


def _in_threads(work: Callable[[int, int], T], segments: int, threads: int) -> list[T]:
    """``work(first, last)`` over equal ranges of segments, in order; native calls run at the same time."""
    ranges = max(1, min(threads, segments))
    bounds = [segments * index // ranges for index in range(ranges + 1)]
    if ranges == 1:
        return [work(0, segments)]
    with ThreadPoolExecutor(ranges, "delta") as pool:
        return list(pool.map(work, bounds[:-1], bounds[1:]))


def _check_array(field: str, array: Bytes, width: int) -> None:
    if array.dtype != np.uint8 or array.ndim != 1 or not array.flags.c_contiguous:
        raise ConfigError(field, f"{array.dtype} {array.shape}", "must be a contiguous uint8 array of one dimension")
    if array.size % width:
        raise ConfigError(field, array.size, f"must have whole elements of {width} B")
