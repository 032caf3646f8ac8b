"""The subscriber: brings one published version into an engine. Pure client of the relay: lends it no memory.

Guarantees: bytes are yielded only after the bucket they are in passed its checksum, named itself as the bucket that was
asked for, agreed with the manifest about every tensor, and every tensor in it had the digest that was published. So
truncated, flipped, foreign or replayed data ends in :class:`CorruptWeightsError`, and what is missing or cannot be
transferred in a RelayError (retryable: the version may have been collected, or the relay restarted). Sizes are checked
before memory is allocated. An array stays valid for as long as it is referenced (:mod:`orchestrator.transfer.buffers`).
"""

from __future__ import annotations

from collections.abc import Container, Iterator

from orchestrator.api import MetadataStore, Relay, ShardKey, WeightManifest
from orchestrator.transfer.buffers import BufferPool
from orchestrator.transfer.endpoint import RelayEndpoint, open_metadata, open_relay
from orchestrator.transfer.errors import CorruptWeightsError, RelayError
from orchestrator.transfer.head import Attempt, Head, Published, decode_head, head_key
from orchestrator.transfer.manifest import MAX_MANIFEST_BYTES, StoredManifest, decode_manifest
from orchestrator.transfer.wire import Bytes, digest, open_bucket


class Subscriber:
    """One reader of one job. Closes only what it opened itself."""

    def __init__(
        self, endpoint: RelayEndpoint, relay: Relay | None = None, metadata: MetadataStore | None = None
    ) -> None:
        self._endpoint = endpoint
        self._own_metadata = metadata is None
        self._own_relay = relay is None
        self._metadata = metadata if metadata is not None else open_metadata(endpoint)
        self._relay = relay if relay is not None else open_relay(endpoint)
        self._pool = BufferPool(self._relay)

    def latest_version(self) -> int:
        """The newest version of the present epoch; -1: none yet."""
        return self._head().version

    def epoch(self) -> int:
        """The present epoch; 0: the job never published. A version number means something only within its epoch."""
        return self._head().epoch

    def manifest(self, version: int) -> StoredManifest:
        """What a version consists of. RelayError "missing" when it is not, or no longer, published."""
        head = self._head()
        found = head.find(version)
        if found is None:
            kept = [item.attempt.version for item in head.published]
            raise RelayError("missing", f"version {version} of job {self._endpoint.job}; epoch {head.epoch} has {kept}")
        return self._read_manifest(found)

    def fetch(self, manifest: WeightManifest, wanted: Container[str] | None = None) -> Iterator[tuple[ShardKey, Bytes]]:
        """Yield every tensor, bucket by bucket, each bucket verified as a whole before its first tensor.

        ``wanted``: tensor names; buckets that hold none of them are left out, other tensors may come with them.
        A later bucket may still fail: use :meth:`fetch_all` where nothing may be applied unless all is right.
        """
        stored = self._stored(manifest)
        needed = {key.bucket for key in stored.shards if wanted is None or key.tensor in wanted}
        for bucket in range(len(stored.buckets)):
            if bucket in needed or wanted is None:
                yield from self._fetch_bucket(stored, bucket)

    def fetch_all(self, manifest: WeightManifest) -> list[tuple[ShardKey, Bytes]]:
        """Every tensor, or an error and nothing. Holds the whole version in memory."""
        return list(self.fetch(manifest))

    def close(self) -> None:
        """Idempotent. Arrays that were handed out stay valid."""
        self._pool.close()
        if self._own_relay:
            self._relay.close()
        if self._own_metadata:
            self._metadata.close()

    def _head(self) -> Head:
        present = self._metadata.get(head_key(self._endpoint.job))
        return Head() if present is None else decode_head(present[0])

    def _stored(self, manifest: WeightManifest) -> StoredManifest:
        """A manifest that crossed a process border as the plain contract type is looked up again."""
        if isinstance(manifest, StoredManifest):
            return manifest
        stored = self.manifest(manifest.version)
        if stored.checksum != manifest.checksum:
            raise RelayError("missing", f"version {manifest.version} was published again since the manifest was read")
        return stored

    def _read_manifest(self, found: Published) -> StoredManifest:
        attempt, job = found.attempt, self._endpoint.job
        if not 0 < found.manifest_bytes <= MAX_MANIFEST_BYTES:
            raise CorruptWeightsError("manifest", f"{found.manifest_bytes} B announced, limit {MAX_MANIFEST_BYTES} B")
        data = self._read(attempt.manifest_key(job), found.manifest_bytes)
        return decode_manifest(data.data, found.manifest_checksum, job, attempt.epoch, attempt.version, attempt.number)

    def _fetch_bucket(self, manifest: StoredManifest, bucket: int) -> list[tuple[ShardKey, Bytes]]:
        attempt = Attempt(manifest.epoch, manifest.version, manifest.attempt, len(manifest.buckets))
        data = self._read(attempt.key(self._endpoint.job, bucket), manifest.buckets[bucket])
        arrived = open_bucket(data, manifest.bucket_name(bucket))
        wanted = [
            (key, piece) for key, piece in zip(manifest.shards, manifest.pieces, strict=True) if key.bucket == bucket
        ]
        listed = [(entry.tensor, entry.offset, entry.length) for entry, _ in arrived]
        if listed != [(key.tensor, piece.offset, piece.length) for key, piece in wanted]:
            raise CorruptWeightsError("layout", f"bucket {bucket} and manifest of version {manifest.version} disagree")
        for (key, piece), (_, view) in zip(wanted, arrived, strict=True):
            found = digest(view)
            if found != piece.digest:
                detail = f"tensor {key.tensor}: xxh3-64 {found:016x}, published {piece.digest:016x}"
                raise CorruptWeightsError("digest", detail)
        return [(key, view) for (key, _), (_, view) in zip(wanted, arrived, strict=True)]

    def _read(self, key: str, size: int) -> Bytes:
        found = self._relay.size(key)
        if found < 0:
            raise RelayError("missing", f"no object {key}: collected, or the relay lost its memory")
        if found != size:  # before anything is allocated
            raise CorruptWeightsError("truncated", f"{key} has {found} B, published were {size} B")
        buffer = self._pool.acquire(size)
        read = self._relay.get_into(key, buffer[:size].data)
        if read != size:
            raise CorruptWeightsError("truncated", f"{key}: {read} B of {size} B arrived")
        return buffer[:size]
