"""What a trainer's rank says around the weights that it sends to a group of receivers, and how these are packed.

    opening   magic "RLCSND01"   version, u64   bytes of the announcement, u64       all integers little-endian
    announcement   xxh3-64 of the rest, u64   msgpack: every shard of this sender, in the order in which it comes
    packs          the shards' raw bytes, several in one message, each at a multiple of 64
    closing        xxh3-64 of every shard, u64 each, and of those together

The digests come last because the sender makes them while it sends: nothing is read twice. A receiver uses nothing of what
came before it has compared them. Decoding is strict: lengths before anything is allocated, every shard as in a manifest; what
is wrong is a CorruptWeightsError. The version's ``content`` is that of the relay's manifest: equal weights, equal checksum.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence

import msgpack
import numpy as np
import xxhash

from orchestrator.api import ShardKey
from orchestrator.transfer.bucket import ALIGNMENT
from orchestrator.transfer.manifest import MAX_BYTES, MAX_DIMENSIONS, MAX_MANIFEST_BYTES, check_shard, shard_bytes
from orchestrator.transfer.shard_codec import RAW
from orchestrator.transfer.transfer_errors import CorruptWeightsError

MAGIC = b"RLCSND01"
STOCK_BACKEND = "vllm-nccl"  # of a meeting where vLLM's own engines send and receive, with nothing of this around it
PACK_BYTES = 64 << 20  # a pack is sent when it has more; as the relay's buckets
# Over gloo: smaller ones, each in pieces that sockets can hold. When a connection breaks off within a message, gloo leaves
# the other side of it waiting for its whole time limit; when it breaks between two, it tells it at once.
HOST_PACK_BYTES = 4 << 20
HOST_MESSAGE_BYTES = 1 << 20
_OPENING = struct.Struct("<8sQQ")
_WORD = struct.Struct("<Q")
OPENING_BYTES = _OPENING.size


def pack_opening(version: int, announcement: bytes) -> bytes:
    """``OPENING_BYTES`` long."""
    return _OPENING.pack(MAGIC, version, len(announcement))


def unpack_opening(data: bytes, version: int) -> int:
    """How long the announcement is. Raises CorruptWeightsError, also when another version is sent."""
    if len(data) != _OPENING.size:
        raise CorruptWeightsError("truncated", f"an opening of {len(data)} B instead of {_OPENING.size} B")
    magic, sent, length = _OPENING.unpack(data)
    if magic != MAGIC:
        raise CorruptWeightsError("format", f"this is no sender of weights, or one of another format: {magic!r}")
    if sent != version:
        raise CorruptWeightsError("identity", f"version {sent} is sent, {version} was wanted")
    if not _WORD.size < length <= MAX_MANIFEST_BYTES:
        raise CorruptWeightsError("format", f"an announcement of {length} B, limit {MAX_MANIFEST_BYTES} B")
    return int(length)


def pack_announcement(shards: Iterable[ShardKey]) -> bytes:
    """Every shard that this sender will send, in order."""
    rows = [[key.tensor, key.dim, key.start, key.stop, key.global_shape, key.dtype] for key in shards]
    payload: bytes = msgpack.packb(rows)
    return _WORD.pack(xxhash.xxh3_64_intdigest(payload)) + payload


def unpack_announcement(data: bytes) -> tuple[ShardKey, ...]:
    """Whether they are every tensor exactly once is seen when those of all senders are together."""
    payload = memoryview(data)[_WORD.size :]
    if len(data) < _WORD.size:
        raise CorruptWeightsError("truncated", f"an announcement of {len(data)} B")
    if _WORD.unpack_from(data)[0] != xxhash.xxh3_64_intdigest(payload):
        raise CorruptWeightsError("checksum", "the announcement of the shards is damaged")
    try:
        return tuple(_shard(*row) for row in msgpack.unpackb(payload))
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise CorruptWeightsError("format", f"the announcement of the shards cannot be read: {error!r}") from error


def pack_digests(digests: Sequence[int]) -> bytes:
    """``closing_bytes(len(digests))`` long."""
    words = np.asarray(digests, dtype="<u8").tobytes()
    return words + _WORD.pack(xxhash.xxh3_64_intdigest(words))


def closing_bytes(shards: int) -> int:
    """How long the closing of so many shards is."""
    return _WORD.size * (shards + 1)


def check_digests(data: bytes, shards: Sequence[ShardKey], found: Sequence[int]) -> None:
    """Raise CorruptWeightsError unless these are the digests of what came."""
    words, end = data[: -_WORD.size], data[-_WORD.size :]
    if len(data) != closing_bytes(len(shards)) or _WORD.unpack(end)[0] != xxhash.xxh3_64_intdigest(words):
        raise CorruptWeightsError("checksum", "the digests of the shards are damaged")
    for key, announced, made in zip(shards, np.frombuffer(words, dtype="<u8").tolist(), found, strict=True):
        if announced != made:
            detail = f"tensor {key.tensor}: xxh3-64 {made:016x} arrived, {announced:016x} was sent"
            raise CorruptWeightsError("digest", detail)


def pack_layout(sizes: Sequence[int], limit: int = PACK_BYTES) -> list[tuple[int, tuple[int, ...]]]:
    """How shards of these sizes share messages: (bytes, offset of each shard in it), in order. Sender and receiver compute
    the same."""
    found: list[tuple[int, tuple[int, ...]]] = []
    end, offsets = 0, list[int]()
    for size in sizes:
        offsets.append(end)
        end += -(-size // ALIGNMENT) * ALIGNMENT
        if end > limit:
            found.append((end, tuple(offsets)))
            end, offsets = 0, []
    if offsets:
        found.append((end, tuple(offsets)))
    return found


def _shard(tensor: str, dim: int, start: int, stop: int, shape: list[int], dtype: str) -> ShardKey:
    texts, numbers = (tensor, dtype), (dim, start, stop, *shape)
    if not all(type(item) is str for item in texts) or not all(type(item) is int for item in numbers):
        raise ValueError(f"bad shard {tensor!r:.100}")
    if not -1 <= dim < MAX_DIMENSIONS or not 0 <= min(numbers[1:]) <= max(numbers[1:]) <= MAX_BYTES:
        raise ValueError(f"bad shard {tensor:.100}: {numbers!r:.200}")
    key = ShardKey(tensor, dim, start, stop, tuple(shape), dtype, RAW, 0)
    check_shard(key, shard_bytes(key))
    return key
