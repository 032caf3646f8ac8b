"""The manifest of a version: every tensor, where it is, and its digest. Checksummed, strictly decoded.

    0  magic "RLCMAN01"      8  xxh3-64 of the rest, u64 little-endian      16  msgpack

The head record in the metadata store holds its size and checksum, the manifest holds size of every bucket and digest of
every tensor: one chain, so no single object can be exchanged unnoticed. Decoding checks every count, length and offset
against limits before it is used; a decoded manifest is consistent in itself.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import Any, NoReturn

import msgpack
import numpy as np
import xxhash

from orchestrator.api import ShardKey, WeightManifest
from orchestrator.transfer.errors import CorruptWeightsError
from orchestrator.transfer.wire import BODY_START, BucketName

MAGIC = b"RLCMAN01"
FORMAT = 1
KIND = "full"
ENCODING = "raw"
MAX_MANIFEST_BYTES = 1 << 30  # about five million tensors
MAX_DIMENSIONS = 16
MAX_BYTES = 1 << 50
# Bytes per element of the dtypes that are known; others are only checked to be whole elements.
DTYPE_BYTES = {
    "float64": 8, "int64": 8, "float32": 4, "int32": 4, "bfloat16": 2, "float16": 2, "int16": 2, "int8": 1, "uint8": 1,
    "bool": 1, "float8_e4m3fn": 1, "float8_e5m2": 1,
}  # fmt: skip
_PREFIX = struct.Struct("<8sQ")


@dataclass(frozen=True, slots=True)
class Piece:
    """Where one shard lies in the body of its bucket, and the xxh3-64 of its bytes."""

    offset: int
    length: int
    digest: int


@dataclass(frozen=True, slots=True)
class StoredManifest(WeightManifest):
    """A :class:`~orchestrator.api.WeightManifest` with what is needed to fetch it. ``pieces`` is parallel to ``shards``."""

    job: str
    epoch: int
    attempt: int
    buckets: tuple[int, ...]  # size of each bucket object
    pieces: tuple[Piece, ...]

    def bucket_name(self, bucket: int) -> BucketName:
        """What the bucket must say it is."""
        return BucketName(self.job, self.epoch, self.version, KIND, self.attempt, bucket)


def encode_manifest(manifest: StoredManifest) -> bytes:
    """The object that is stored. ``checksum`` of the input is ignored: it is that of the result."""
    shards = [
        [
            *(key.tensor, key.dim, key.start, key.stop, key.global_shape, key.dtype, key.encoding, key.bucket),
            *(piece.offset, piece.length, piece.digest),
        ]
        for key, piece in zip(manifest.shards, manifest.pieces, strict=True)
    ]
    payload: bytes = msgpack.packb(
        {
            "format": FORMAT,
            "job": manifest.job,
            "epoch": manifest.epoch,
            "version": manifest.version,
            "attempt": manifest.attempt,
            "kind": KIND,
            "base": manifest.base_version,
            "bytes": manifest.bytes,
            "buckets": list(manifest.buckets),
            "shards": shards,
        }
    )
    return _PREFIX.pack(MAGIC, xxhash.xxh3_64_intdigest(payload)) + payload


def manifest_checksum(encoded: bytes) -> int:
    """The checksum that an encoded manifest announces."""
    return int(_PREFIX.unpack_from(encoded)[1])


def decode_manifest(
    encoded: memoryview, checksum: int, job: str, epoch: int, version: int, attempt: int
) -> StoredManifest:
    """Check and decode; ``checksum`` is the one that the head record holds. Raises CorruptWeightsError."""
    if encoded.nbytes < _PREFIX.size:
        _bad(f"{encoded.nbytes} B are less than the prefix")
    magic, announced = _PREFIX.unpack_from(encoded)
    payload = encoded[_PREFIX.size :]
    found = int(xxhash.xxh3_64_intdigest(payload))
    if magic != MAGIC or announced != found or found != checksum:
        _bad(f"magic {magic!r}, xxh3-64 {found:016x}, announced {announced:016x}, published {checksum:016x}")
    try:
        data: dict[str, Any] = msgpack.unpackb(payload)
        head = tuple(data[name] for name in ("format", "job", "epoch", "version", "attempt", "kind", "base"))
        if head != (FORMAT, job, epoch, version, attempt, KIND, -1):
            _bad(f"this is {head}, wanted {(FORMAT, job, epoch, version, attempt, KIND, -1)}")
        buckets = tuple(_integer(size, BODY_START, MAX_BYTES) for size in data["buckets"])
        shards, pieces = _decode_shards(data["shards"], buckets)
        total = _integer(data["bytes"], 0, MAX_BYTES)
    except (ValueError, TypeError, KeyError, msgpack.UnpackException) as error:
        raise CorruptWeightsError("manifest", f"cannot be read: {error!r}") from error
    if total != sum(piece.length for piece in pieces):
        _bad(f"{total} B announced, the tensors have {sum(piece.length for piece in pieces)} B")
    return StoredManifest(version, -1, shards, total, f"{found:016x}", job, epoch, attempt, buckets, pieces)


def check_tensor(tensor: str, shape: tuple[int, ...], dtype: str, length: int) -> None:
    """Raise ValueError unless ``length`` bytes can be a tensor of this shape and dtype."""
    if not 0 < len(tensor) <= 1024 or not 0 < len(dtype) <= 64 or len(shape) > MAX_DIMENSIONS:
        raise ValueError(f"tensor {tensor!r:.100}: bad name, dtype or number of dimensions")
    if any(type(size) is not int or size < 0 for size in shape):
        raise ValueError(f"tensor {tensor}: bad shape {shape}")
    elements = math.prod(shape)
    width = DTYPE_BYTES.get(dtype)
    whole = length == elements * width if width else length % max(elements, 1) == 0 and (elements > 0) == (length > 0)
    if not whole:
        raise ValueError(f"tensor {tensor}: {length} B are not {shape} of {dtype}")


def _decode_shards(rows: list[Any], buckets: tuple[int, ...]) -> tuple[tuple[ShardKey, ...], tuple[Piece, ...]]:
    shards: list[ShardKey] = []
    pieces: list[Piece] = []
    ends = np.zeros(len(buckets), dtype=np.int64)
    names: set[str] = set()
    for tensor, dim, start, stop, shape, dtype, encoding, bucket, offset, length, checksum in rows:
        if not (isinstance(tensor, str) and isinstance(dtype, str)) or tensor in names:
            raise ValueError(f"tensor {tensor!r:.100} of dtype {dtype!r:.100}: bad or twice")
        names.add(tensor)
        if (dim, start, stop, encoding) != (-1, 0, 0, ENCODING):
            raise ValueError(f"tensor {tensor}: dim {dim}, {start}:{stop}, encoding {encoding!r} cannot be read yet")
        check_tensor(tensor, tuple(shape), dtype, _integer(length, 0, MAX_BYTES))
        _integer(bucket, 0, len(buckets) - 1)
        # In order and disjoint within a bucket, and inside it: what the bucket's own directory must repeat.
        _integer(offset, int(ends[bucket]), buckets[bucket] - BODY_START - length)
        ends[bucket] = offset + length
        shards.append(ShardKey(tensor, -1, 0, 0, tuple(shape), dtype, encoding, bucket))
        pieces.append(Piece(offset, length, _integer(checksum, 0, (1 << 64) - 1)))
    return tuple(shards), tuple(pieces)


def _integer(value: Any, low: int, high: int) -> int:
    if type(value) is not int or not low <= value <= high:
        raise ValueError(f"{value!r:.100} is not an integer in {low}..{high}")
    return value


def _bad(detail: str) -> NoReturn:
    raise CorruptWeightsError("manifest", detail)
