"""The publisher: turns a stream of tensors into one version on the relay. Lives in the trainer.

Guarantees: a version is visible to subscribers completely or not at all, because its pointer moves (one compare-and-set)
only after every bucket and the manifest were written and read back by size. What was published is never written again:
every attempt has keys of its own. Of two publishers of one version exactly one wins, the other gets
:class:`VersionTakenError`. A run that resumes calls :meth:`Publisher.rollback`, which opens a new epoch: versions of the
abandoned history vanish at once for readers, and the publisher that wrote them cannot publish any more.

Garbage (versions beyond the last ``keep_versions``, abandoned epochs, failed attempts) is removed at the start of the
next publication and by :meth:`Publisher.collect`: never by force, never under a reader, retried while leased. Nothing
that can fail runs between the moved pointer and the return, so an error always means "not published".
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import replace

from orchestrator.api import ConfigError, MetadataStore, PublishResult, Relay, RunError, ShardKey
from orchestrator.transfer import head as heads
from orchestrator.transfer.buffers import BufferPool
from orchestrator.transfer.endpoint import RelayEndpoint, open_metadata, open_relay
from orchestrator.transfer.errors import RelayError, VersionTakenError
from orchestrator.transfer.head import Attempt, Head, Published
from orchestrator.transfer.manifest import (
    ENCODING,
    KIND,
    Piece,
    StoredManifest,
    check_tensor,
    encode_manifest,
    manifest_checksum,
)
from orchestrator.transfer.wire import BucketName, BucketWriter, Bytes, digest, room_for

Tensor = tuple[str, tuple[int, ...], str, Bytes]  # name, shape, dtype, contiguous uint8 bytes
CAS_TRIES = 64  # a lost compare-and-set means that somebody else's succeeded, so contention ends


class Publisher:
    """One writer of one job. Closes only what it opened itself."""

    def __init__(
        self,
        endpoint: RelayEndpoint,
        relay: Relay | None = None,
        metadata: MetadataStore | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._endpoint = endpoint
        self._own_metadata = metadata is None
        self._own_relay = relay is None
        self._metadata = metadata if metadata is not None else open_metadata(endpoint)
        self._relay = relay if relay is not None else open_relay(endpoint, segment_bytes=endpoint.segment_bytes)
        self._pool = BufferPool(self._relay)
        self._clock = clock
        self._epoch: int | None = None
        self._last: Attempt | None = None  # what this publisher committed last
        self._failed: list[Attempt] = []  # attempts of ours that ended in an error

    @property
    def epoch(self) -> int:
        """The epoch this publisher writes in; joins the present one (the first publisher opens epoch 1)."""
        if self._epoch is None:
            self._epoch = self._update(lambda head: head if head.epoch else heads.open_epoch(head, 0)).epoch
        return self._epoch

    def rollback(self, version: int) -> int:
        """Open a new epoch whose first version is ``version`` or later; returns the epoch.

        Called once when a run starts or resumes, with the version that was restored. Until the next ``publish``
        subscribers see no version (-1). Any other publisher of the job is locked out from now on.
        """
        self._last = None
        self._epoch = self._update(lambda head: heads.open_epoch(head, version)).epoch
        return self._epoch

    def reset(self) -> int:
        """A run from scratch: ``rollback(0)``."""
        return self.rollback(0)

    def publish(self, version: int, tensors: Iterable[Tensor]) -> PublishResult:
        """Publish a full snapshot. Each array is copied when it is taken from the iterable and may be reused after.

        Raises VersionTakenError (lost, do not retry), RelayError (retryable; nothing was published; ``relay_full`` is
        back-pressure: subscribers still read old versions or the segment is too small), RunError (bad tensors).
        """
        started = self._clock()
        self._reopen_after_loss(version)
        written = _Writing(self, self._begin(version))
        try:
            self.collect()
            for tensor, shape, dtype, data in tensors:
                written.add(tensor, tuple(shape), dtype, data)
            done, size, buckets = written.finish()
            self._update(lambda head: heads.commit(head, done, self._endpoint.keep_versions))
        except VersionTakenError:
            # Whoever won may have collected this attempt already and not see what was written since: hand it in again.
            self._update(lambda head: heads.discard(head, written.attempt))
            raise
        except BaseException:
            self._failed.append(written.attempt)  # recorded as pending; becomes garbage before the next attempt
            raise
        self._last = done.attempt
        return PublishResult(version, size, buckets, self._clock() - started)

    def collect(self) -> int:
        """Remove garbage that no reader leases; returns how many publications are still waiting to be removed."""
        failed = tuple(self._failed)
        head = self._update(lambda head: _discard_all(head, failed))
        del self._failed[: len(failed)]
        removed = tuple(item for item in head.garbage if self._remove(item))
        return len(self._update(lambda head: heads.drop_garbage(head, removed)).garbage)

    def close(self) -> None:
        """Idempotent. The memory lent to a Mooncake Store goes with it, and with that what was published."""
        self._pool.close()
        if self._own_relay:
            self._relay.close()
        if self._own_metadata:
            self._metadata.close()

    def _begin(self, version: int) -> Attempt:
        if type(version) is not int or version < 0:
            raise ConfigError("version", version, "must be an integer of 0 or more")
        epoch = self.epoch
        begun: list[Attempt] = []

        def transition(head: Head) -> Head:
            head, attempt = heads.begin(head, epoch, version)
            begun.append(attempt)
            return head

        self._update(transition)
        return begun[-1]

    def _reopen_after_loss(self, version: int) -> None:
        """What this publisher published is gone (the relay restarted empty): publishing it again needs new keys."""
        if self._last is None or self._last.version != version or self._last.epoch != self._epoch:
            return
        if self._relay.size(self._last.manifest_key(self._endpoint.job)) < 0:
            epoch = self._last.epoch

            def transition(head: Head) -> Head:
                if head.epoch != epoch:
                    raise VersionTakenError("epoch_replaced", f"epoch {epoch} was replaced by epoch {head.epoch}")
                return heads.open_epoch(head, version)

            self._epoch = self._update(transition).epoch

    def _remove(self, attempt: Attempt) -> bool:
        job = self._endpoint.job
        # The manifest first: who cannot read it any more does not start on the buckets.
        keys = [attempt.manifest_key(job), *(attempt.key(job, bucket) for bucket in range(attempt.buckets))]
        return all(self._relay.remove(key) for key in keys)

    def _update(self, transition: Callable[[Head], Head]) -> Head:
        return update_head(self._metadata, self._endpoint.job, transition)


class _Writing:
    """One attempt in progress: fills buckets, stores them, collects the manifest."""

    def __init__(self, publisher: Publisher, attempt: Attempt) -> None:
        self._publisher = publisher
        self.attempt = attempt
        self._bucket_bytes = publisher._endpoint.bucket_bytes
        self._writer: BucketWriter | None = None
        self._sizes: list[int] = []
        self._shards: list[ShardKey] = []
        self._pieces: list[Piece] = []
        self._names: set[str] = set()

    def add(self, tensor: str, shape: tuple[int, ...], dtype: str, data: Bytes) -> None:
        if data.dtype != "uint8" or data.ndim != 1 or not data.flags.c_contiguous:
            raise RunError(f"tensor {tensor}: give its bytes as a contiguous one-dimensional uint8 array")
        if tensor in self._names:
            raise RunError(f"tensor {tensor} was given twice")
        self._names.add(tensor)
        try:
            check_tensor(tensor, shape, dtype, data.nbytes)
        except ValueError as error:
            raise RunError(str(error)) from error
        if self._writer is not None and not self._writer.fits(tensor, data.nbytes):
            self._flush()
        if self._writer is None:
            size = max(self._bucket_bytes, room_for(tensor, data.nbytes))
            self._writer = BucketWriter(self._publisher._pool.acquire(size)[:size])
        offset = self._writer.add(tensor, data)
        self._shards.append(ShardKey(tensor, -1, 0, 0, shape, dtype, ENCODING, len(self._sizes)))
        self._pieces.append(Piece(offset, data.nbytes, digest(data)))

    def finish(self) -> tuple[Published, int, int]:
        """Store what is left and the manifest: all but the pointer."""
        if not self._shards:
            raise RunError(f"version {self.attempt.version} has no tensors")
        self._flush()
        job = self._publisher._endpoint.job
        self.attempt = replace(self.attempt, buckets=len(self._sizes))
        total = sum(piece.length for piece in self._pieces)
        encoded = encode_manifest(
            StoredManifest(
                self.attempt.version, -1, tuple(self._shards), total, "", job, self.attempt.epoch, self.attempt.number,
                tuple(self._sizes), tuple(self._pieces),
            )
        )  # fmt: skip
        _store(self._publisher._relay, self.attempt.manifest_key(job), memoryview(encoded))
        return Published(self.attempt, len(encoded), manifest_checksum(encoded)), total, len(self._sizes)

    def _flush(self) -> None:
        if self._writer is None:
            return
        bucket = len(self._sizes)
        if bucket >= self.attempt.buckets:
            self._reserve()
        attempt, job = self.attempt, self._publisher._endpoint.job
        sealed = self._writer.seal(BucketName(job, attempt.epoch, attempt.version, KIND, attempt.number, bucket))
        _store(self._publisher._relay, attempt.key(job, bucket), sealed)
        self._sizes.append(sealed.nbytes)
        self._writer = None

    def _reserve(self) -> None:
        before = self.attempt

        def transition(head: Head) -> Head:
            head, self.attempt = heads.reserve(head, before)
            return head

        self._publisher._update(transition)


def update_head(metadata: MetadataStore, job: str, transition: Callable[[Head], Head]) -> Head:
    """Apply a transition to the head record by compare-and-set, again while others are faster; returns the new head."""
    key = heads.head_key(job)
    for _ in range(CAS_TRIES):
        present = metadata.get(key)
        before = Head() if present is None else heads.decode_head(present[0])
        after = transition(before)
        if after == before:
            return before
        if metadata.compare_and_set(key, heads.encode_head(after), 0 if present is None else present[1]):
            return after
    raise RelayError("metadata_contention", f"{key} changed {CAS_TRIES} times under a compare-and-set")


def _store(relay: Relay, key: str, data: memoryview) -> None:
    relay.put(key, data)
    found = relay.size(key)  # a store may acknowledge what it did not keep
    if found != data.nbytes:
        raise RelayError("not_stored", f"{key}: {data.nbytes} B written, {found} B found")


def _discard_all(head: Head, attempts: tuple[Attempt, ...]) -> Head:
    for attempt in attempts:
        head = heads.discard(head, attempt)
    return head
