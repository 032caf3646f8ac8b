"""The bucket: how tensors travel. Raw bytes and a msgpack directory, under one xxh3-64 checksum.

    0   magic "RLCBKT01"
    8   xxh3-64 of all that follows, u64
    16  body bytes, u64        24  directory bytes, u64        32  zeros up to 64
    64  body: tensors one after the other, each at a multiple of 64
    ..  directory (msgpack): job, epoch, version, kind, attempt, bucket, tensors [[name, offset, length], ...]

All integers are little-endian; offsets count from the start of the body. The directory stands behind the body because
a bucket is filled in one pass over a stream of tensors, when nobody knows yet how many will fit; a body that starts at
64 also keeps every tensor aligned for the reader, which uses it in place.

Guarantees of :func:`open_bucket`: lengths are checked against the bytes at hand before anything is sliced; the checksum
covers every byte but itself and the magic, which are compared; the directory must name the bucket that was asked for;
tensors lie inside the body, in order, without overlap. It allocates nothing but the directory.
"""

from __future__ import annotations

import struct
from dataclasses import asdict, astuple, dataclass, fields
from typing import Any

import msgpack
import numpy as np
import numpy.typing as npt
import xxhash

from orchestrator.transfer.transfer_errors import CorruptWeightsError

Bytes = npt.NDArray[np.uint8]

MAGIC = b"RLCBKT01"
BODY_START = 64
ALIGNMENT = 64  # a cache line; also enough for every dtype and for AVX-512 loads
CHECKED_FROM = 16
_PREFIX = struct.Struct("<8sQQQ32x")
_DIRECTORY_FIXED = 512  # bound of the directory without its tensors: five integers, a job of 128 characters, six names
_DIRECTORY_PER_TENSOR = 24  # bound of one entry without its name


def digest(data: Bytes) -> int:
    """xxh3-64 of raw bytes."""
    return int(xxhash.xxh3_64_intdigest(data.data))


@dataclass(frozen=True, slots=True)
class BucketName:
    """Which bucket this is; part of its checksummed content, so that no other can pass for it."""

    job: str
    epoch: int
    version: int
    kind: str
    attempt: int
    bucket: int


@dataclass(frozen=True, slots=True)
class BucketEntry:
    """One tensor of a bucket."""

    tensor: str
    offset: int
    length: int


def room_for(tensor: str, length: int) -> int:
    """Size of a bucket that holds just this tensor, rounded up."""
    return BODY_START + _aligned(length) + _DIRECTORY_FIXED + _DIRECTORY_PER_TENSOR + len(tensor.encode())


class BucketWriter:
    """Fills ``buffer`` with tensors. Not reusable: one writer, one bucket."""

    def __init__(self, buffer: Bytes) -> None:
        self._buffer = buffer
        self._body = 0
        self._directory_bound = _DIRECTORY_FIXED
        self.entries: list[BucketEntry] = []

    def fits(self, tensor: str, length: int) -> bool:
        """Whether ``add`` has room."""
        entry = _DIRECTORY_PER_TENSOR + len(tensor.encode())
        return BODY_START + _aligned(self._body) + length + self._directory_bound + entry <= self._buffer.nbytes

    def add(self, tensor: str, data: Bytes) -> int:
        """Copy a tensor in; returns its offset. The caller asked ``fits`` before."""
        offset = _aligned(self._body)
        self._buffer[BODY_START + self._body : BODY_START + offset] = 0  # the gap is checksummed, so it must be defined
        self._buffer[BODY_START + offset : BODY_START + offset + data.nbytes] = data
        self._body = offset + data.nbytes
        self._directory_bound += _DIRECTORY_PER_TENSOR + len(tensor.encode())
        self.entries.append(BucketEntry(tensor, offset, data.nbytes))
        return offset

    def seal(self, name: BucketName) -> memoryview:
        """Write directory and checksum; returns the bytes to store."""
        directory: bytes = msgpack.packb(
            {**asdict(name), "tensors": [[entry.tensor, entry.offset, entry.length] for entry in self.entries]}
        )
        start = BODY_START + self._body
        total = start + len(directory)
        self._buffer[start:total] = np.frombuffer(directory, np.uint8)
        _PREFIX.pack_into(self._buffer.data, 0, MAGIC, 0, self._body, len(directory))
        checksum = digest(self._buffer[CHECKED_FROM:total])
        _PREFIX.pack_into(self._buffer.data, 0, MAGIC, checksum, self._body, len(directory))
        return self._buffer[:total].data


def is_whole(data: Bytes) -> bool:
    """Whether these are all bytes of a bucket, whichever, as its checksum says."""
    if data.nbytes < BODY_START:
        return False
    magic, checksum, body_bytes, directory_bytes = _PREFIX.unpack_from(data.data, 0)
    if magic != MAGIC or BODY_START + body_bytes + directory_bytes != data.nbytes:
        return False
    return digest(data[CHECKED_FROM:]) == int(checksum)


def open_bucket(data: Bytes, expected: BucketName) -> list[tuple[BucketEntry, Bytes]]:
    """Check a whole bucket and return its tensors as views. Raises CorruptWeightsError."""
    where = f"bucket {expected.bucket} of version {expected.version}"
    if data.nbytes < BODY_START:
        raise CorruptWeightsError("truncated", f"{where}: {data.nbytes} B are less than the prefix")
    magic, checksum, body_bytes, directory_bytes = _PREFIX.unpack_from(data.data, 0)
    if magic != MAGIC:
        raise CorruptWeightsError("format", f"{where}: not a bucket, or of another format: {magic!r}")
    if BODY_START + body_bytes + directory_bytes != data.nbytes:
        detail = f"{where}: {BODY_START} + {body_bytes} + {directory_bytes} B announced, {data.nbytes} B arrived"
        raise CorruptWeightsError("truncated", detail)
    found = digest(data[CHECKED_FROM:])
    if found != checksum:
        raise CorruptWeightsError("checksum", f"{where}: xxh3-64 is {found:016x}, announced {checksum:016x}")
    directory = _decode(data[BODY_START + body_bytes :], where)
    name, wanted = tuple(directory.get(field.name) for field in fields(expected)), astuple(expected)
    if name != wanted:
        raise CorruptWeightsError("identity", f"{where}: this is {name}, wanted {wanted}")
    body = data[BODY_START : BODY_START + body_bytes]
    tensors: list[tuple[BucketEntry, Bytes]] = []
    end = 0
    for entry in _entries(directory.get("tensors"), where):
        if (
            entry.offset % ALIGNMENT
            or entry.offset < end
            or entry.length < 0
            or entry.offset + entry.length > body_bytes
        ):
            raise CorruptWeightsError("layout", f"{where}: {entry} overlaps, is not aligned or leaves the body")
        end = entry.offset + entry.length
        tensors.append((entry, body[entry.offset : end]))
    return tensors


def _decode(data: Bytes, where: str) -> dict[str, Any]:
    try:
        directory = msgpack.unpackb(data.data)  # lengths inside are limited by the length of the input
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise CorruptWeightsError("format", f"{where}: the directory cannot be read: {error!r}") from error
    if not isinstance(directory, dict):
        raise CorruptWeightsError("format", f"{where}: the directory is a {type(directory).__name__}")
    return directory


def _entries(rows: Any, where: str) -> list[BucketEntry]:
    if not isinstance(rows, list):
        raise CorruptWeightsError("format", f"{where}: the directory lists no tensors")
    for row in rows:
        if not (isinstance(row, list) and [type(item) for item in row] == [str, int, int]):
            raise CorruptWeightsError("format", f"{where}: bad directory entry {row!r:.100}")
    return [BucketEntry(*row) for row in rows]


def _aligned(length: int) -> int:
    return -(-length // ALIGNMENT) * ALIGNMENT
