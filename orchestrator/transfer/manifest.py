"""The manifest of a version: every shard of every tensor, where it is, and its digest. Checksummed, strictly decoded.

    0  magic "RLCMAN01"      8  xxh3-64 of the rest, u64 little-endian      16  msgpack

The head record in the metadata store holds its size and checksum, the manifest holds size of every bucket and digest of
every shard: one chain, so no single object can be exchanged unnoticed. Decoding checks every count, length and offset
against limits before it is used; a decoded manifest is consistent in itself, and its shards are every tensor exactly once
(:func:`orchestrator.transfer.shard_routing.check_tiling`).

A **difference** names its base version and the ``content`` of that base, so a chain can only be applied to what it was made
from. ``content`` is a checksum over names, shapes and digests of all shards: equal for a snapshot and for a chain that
ends in the same weights, cut alike.

Several ranks write one version: each makes a :class:`RankShare`, one of them merges these (:func:`merge_shares`).
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import msgpack
import xxhash

from orchestrator.api import ShardKey, WeightManifest
from orchestrator.transfer.bucket import BODY_START, BucketName
from orchestrator.transfer.delta.delta_format import DTYPE_BYTES
from orchestrator.transfer.job_head import FULL, kind_of
from orchestrator.transfer.manifest_signing import DIGEST_BYTES
from orchestrator.transfer.shard_codec import RAW
from orchestrator.transfer.shard_routing import box_elements, box_of, box_shape, check_tiling, shard_label
from orchestrator.transfer.transfer_errors import CorruptWeightsError

MAGIC = b"RLCMAN01"
FORMAT = 2
MAX_MANIFEST_BYTES = 1 << 30  # about five million shards
MAX_DIMENSIONS = 16
MAX_BYTES = 1 << 50
_MAX_U64 = (1 << 64) - 1
_PREFIX = struct.Struct("<8sQ")
_ENCODING = re.compile(r"[a-z0-9._-]{1,32}")


@dataclass(frozen=True, slots=True)
class StoredShard:
    """Where one shard lies in the body of its bucket, encoded.

    ``digest``: xxh3-64 of the shard's own bytes, as they are once it is decoded (and applied to its base); ``stored``: of
    its bytes in the bucket, the same thing where it travels raw.
    """

    offset: int
    length: int
    digest: int
    stored: int


@dataclass(frozen=True, slots=True)
class StoredManifest(WeightManifest):
    """A :class:`~orchestrator.api.WeightManifest` with what is needed to fetch it. ``pieces`` is parallel to ``shards``.

    ``bytes`` counts payload as it travels, encoded.
    """

    job: str
    epoch: int
    attempt: int
    buckets: tuple[int, ...]  # size of each bucket object; 0: there is none of that number
    pieces: tuple[StoredShard, ...]
    base_content: int = 0  # what the base must be, 0 of a full snapshot
    # of each bucket, b"" where there is none of that number; empty: the version is not signed
    sha256: tuple[bytes, ...] = ()

    def bucket_name(self, bucket: int) -> BucketName:
        """What the bucket must say it is."""
        return BucketName(self.job, self.epoch, self.version, kind_of(self.base_version), self.attempt, bucket)

    def content(self) -> int:
        """Of the weights that this version ends in."""
        return content_of(self.shards, (piece.digest for piece in self.pieces))


@dataclass(slots=True)
class RankShare:
    """What one rank wrote of a version."""

    buckets: dict[int, int] = field(default_factory=dict)  # number -> size
    shards: list[ShardKey] = field(default_factory=list)
    pieces: list[StoredShard] = field(default_factory=list)
    sha256: dict[int, bytes] = field(default_factory=dict)  # number -> digest, of a version that is signed

    @property
    def bytes(self) -> int:
        """Payload."""
        return sum(piece.length for piece in self.pieces)


def content_of(shards: Iterable[ShardKey], digests: Iterable[int]) -> int:
    """A checksum of names, slices, shapes, dtypes and digests, whatever the order and the encoding."""
    rows = sorted(
        (shard_label(key), list(key.global_shape), key.dtype, made) for key, made in zip(shards, digests, strict=True)
    )
    return int(xxhash.xxh3_64_intdigest(msgpack.packb(rows)))


def encode_manifest(manifest: StoredManifest) -> bytes:
    """The object that is stored. ``checksum`` of the input is ignored: it is that of the result."""
    payload: bytes = msgpack.packb(
        {
            "format": FORMAT,
            "job": manifest.job,
            "epoch": manifest.epoch,
            "version": manifest.version,
            "attempt": manifest.attempt,
            "kind": kind_of(manifest.base_version),
            "base": manifest.base_version,
            "base_content": manifest.base_content,
            "bytes": manifest.bytes,
            "buckets": list(manifest.buckets),
            "shards": _rows(manifest.shards, manifest.pieces),
            **({"sha256": list(manifest.sha256)} if manifest.sha256 else {}),
        }
    )
    return _PREFIX.pack(MAGIC, xxhash.xxh3_64_intdigest(payload)) + payload


def manifest_checksum(encoded: bytes) -> int:
    """The checksum that an encoded manifest announces."""
    return int(_PREFIX.unpack_from(encoded)[1])


def decode_manifest(
    encoded: memoryview,
    checksum: int,
    job: str,
    epoch: int,
    version: int,
    attempt: int,
    base: int = FULL,
    *,
    only_raw: bool = True,
) -> StoredManifest:
    """Check and decode; ``checksum`` is the one that the head record holds. Raises CorruptWeightsError.

    ``only_raw``: the reader has no codec, so that any other encoding is refused.
    """
    if encoded.nbytes < _PREFIX.size:
        _bad(f"{encoded.nbytes} B are less than the prefix")
    magic, announced = _PREFIX.unpack_from(encoded)
    payload = encoded[_PREFIX.size :]
    found = int(xxhash.xxh3_64_intdigest(payload))
    if magic != MAGIC or announced != found or found != checksum:
        _bad(f"magic {magic!r}, xxh3-64 {found:016x}, announced {announced:016x}, published {checksum:016x}")
    wanted = (FORMAT, job, epoch, version, attempt, kind_of(base), base)
    try:
        data: dict[str, Any] = msgpack.unpackb(payload)
        head = tuple(data[name] for name in ("format", "job", "epoch", "version", "attempt", "kind", "base"))
        if head != wanted:
            _bad(f"this is {head}, wanted {wanted}")
        base_content = _integer(data["base_content"], 0, 0 if base == FULL else _MAX_U64)
        buckets = tuple(_integer(size, 0, MAX_BYTES) for size in data["buckets"])
        shards, pieces = _decode_shards(data["shards"], dict(enumerate(buckets)), only_raw)
        total = _integer(data["bytes"], 0, MAX_BYTES)
        sha256 = _digests(data.get("sha256", []), buckets)
        check_tiling(shards)
    except (ValueError, TypeError, KeyError, msgpack.UnpackException) as error:
        raise CorruptWeightsError("manifest", f"cannot be read: {error!r}") from error
    except CorruptWeightsError as error:
        _bad(error.detail)
    if total != sum(piece.length for piece in pieces):
        _bad(f"{total} B announced, the shards have {sum(piece.length for piece in pieces)} B")
    return StoredManifest(
        version, base, shards, total, f"{found:016x}", job, epoch, attempt, buckets, pieces, base_content, sha256
    )


def encode_share(share: RankShare) -> bytes:
    """For the way from the rank that wrote it to the one that merges."""
    packed: bytes = msgpack.packb(
        {
            "buckets": [list(item) for item in share.buckets.items()],
            "shards": _rows(share.shards, share.pieces),
            "sha256": list(share.sha256.values()),
        }
    )
    return packed


def merge_shares(shares: Sequence[bytes]) -> RankShare:
    """The shares of all ranks, in their order, as one. Raises CorruptWeightsError "manifest", and "layout" where tensors
    are not covered exactly once."""
    merged = RankShare()
    for rank, encoded in enumerate(shares):
        try:
            data: dict[str, Any] = msgpack.unpackb(encoded)
            rows = [(_integer(number, 0, MAX_BYTES), _integer(size, 0, MAX_BYTES)) for number, size in data["buckets"]]
            buckets = dict(rows)
            shards, pieces = _decode_shards(data["shards"], buckets, only_raw=False)
            made = _digests(data["sha256"], tuple(buckets.values()))
        except (ValueError, TypeError, KeyError, msgpack.UnpackException) as error:
            raise CorruptWeightsError("manifest", f"the share of rank {rank} cannot be read: {error!r}") from error
        foreign = [number for number in buckets if number % len(shares) != rank]
        if foreign or len(buckets) != len(rows):
            _bad(f"the share of rank {rank} has buckets of others, or the same twice: {sorted(foreign)[:8]}")
        merged.buckets |= buckets
        merged.shards += shards
        merged.pieces += pieces
        merged.sha256 |= dict(zip(buckets, made, strict=False))
    check_tiling(merged.shards)
    return merged


def check_tensor(tensor: str, shape: tuple[int, ...], dtype: str, length: int) -> None:
    """Raise ValueError unless ``length`` bytes can be a tensor of this shape and dtype; of an unknown dtype: whole elements."""
    if not 0 < len(tensor) <= 1024 or not 0 < len(dtype) <= 64 or len(shape) > MAX_DIMENSIONS:
        raise ValueError(f"tensor {tensor!r:.100}: bad name, dtype or number of dimensions")
    if any(type(size) is not int or size < 0 for size in shape):
        raise ValueError(f"tensor {tensor}: bad shape {shape}")
    elements = math.prod(shape)
    width = DTYPE_BYTES.get(dtype)
    whole = length == elements * width if width else length % max(elements, 1) == 0 and (elements > 0) == (length > 0)
    if not whole:
        raise ValueError(f"tensor {tensor}: {length} B are not {shape} of {dtype}")


def shard_bytes(key: ShardKey) -> int:
    """What a shard has, decoded. Raises CorruptWeightsError "layout" for a dtype whose size is not known."""
    if key.dtype not in DTYPE_BYTES:
        raise CorruptWeightsError("layout", f"tensor {key.tensor}: no size is known for dtype {key.dtype}")
    return box_elements(box_of(key)) * DTYPE_BYTES[key.dtype]


def check_shard(key: ShardKey, length: int) -> None:
    """Raise ValueError unless ``length`` bytes can be this shard, decoded. Its slice is checked with the others'."""
    if key.dim >= len(key.global_shape):
        raise ValueError(f"tensor {key.tensor}: {key.global_shape} has no dimension {key.dim}")
    check_tensor(key.tensor, box_shape(box_of(key)), key.dtype, length)


def _rows(shards: Iterable[ShardKey], pieces: Iterable[StoredShard]) -> list[list[Any]]:
    return [
        [
            *(key.tensor, key.dim, key.start, key.stop, key.global_shape, key.dtype, key.encoding, key.bucket),
            *(piece.offset, piece.length, piece.digest, piece.stored),
        ]
        for key, piece in zip(shards, pieces, strict=True)
    ]


def _decode_shards(
    rows: list[Any], buckets: dict[int, int], only_raw: bool
) -> tuple[tuple[ShardKey, ...], tuple[StoredShard, ...]]:
    shards: list[ShardKey] = []
    pieces: list[StoredShard] = []
    ends = dict.fromkeys(buckets, 0)
    for tensor, dim, start, stop, shape, dtype, encoding, bucket, offset, length, checksum, stored in rows:
        if not all(isinstance(text, str) for text in (tensor, dtype, encoding)):
            raise ValueError(f"tensor {tensor!r:.100} of dtype {dtype!r:.100}, encoding {encoding!r:.100}")
        if not _ENCODING.fullmatch(encoding) or (only_raw and encoding != RAW):
            raise ValueError(f"tensor {tensor:.100}: encoding {encoding:.100} cannot be read")
        for bound in (start, stop, *shape):
            _integer(bound, 0, MAX_BYTES)
        key = ShardKey(
            tensor, _integer(dim, -1, MAX_DIMENSIONS - 1), start, stop, tuple(shape), dtype, encoding, bucket
        )
        _integer(length, 0, MAX_BYTES)
        if encoding == RAW:
            check_shard(key, length)
            if stored != checksum:
                raise ValueError(f"tensor {tensor}: raw, with two digests")
        else:
            check_shard(key, shard_bytes(key))
        if bucket not in buckets or type(bucket) is not int:
            raise ValueError(f"tensor {tensor}: there is no bucket {bucket!r:.100}")
        # In order and disjoint within a bucket, and inside it: what the bucket's own directory must repeat.
        _integer(offset, ends[bucket], buckets[bucket] - BODY_START - length)
        ends[bucket] = offset + length
        shards.append(key)
        pieces.append(StoredShard(offset, length, _integer(checksum, 0, _MAX_U64), _integer(stored, 0, _MAX_U64)))
    return tuple(shards), tuple(pieces)


def _digests(rows: Any, buckets: tuple[int, ...]) -> tuple[bytes, ...]:
    """SHA-256 of each bucket; none at all where the version is not signed."""
    if not isinstance(rows, list) or len(rows) not in (0, len(buckets)):
        raise ValueError("not as many digests as buckets")
    for row, size in zip(rows, buckets, strict=False):
        if type(row) is not bytes or len(row) != (DIGEST_BYTES if size else 0):
            raise ValueError(f"{row!r:.80} is no SHA-256 of a bucket")
    return tuple(rows)


def _integer(value: Any, low: int, high: int) -> int:
    if type(value) is not int or not low <= value <= high:
        raise ValueError(f"{value!r:.100} is not an integer in {low}..{high}")
    return value


def _bad(detail: str) -> NoReturn:
    raise CorruptWeightsError("manifest", detail)
