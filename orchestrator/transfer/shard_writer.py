"""One rank's part of one attempt: encodes shards, fills buckets, sends them off, and says what it wrote.

Guarantees: an array is copied (or encoded) when it is given and may be reused after; buckets of one rank are those whose
number is its rank modulo the number of ranks, so ranks never write the same key and need not speak to each other; none is
written beyond what the head record says the attempt may have written.
"""

from __future__ import annotations

import hashlib
import queue
import threading
from collections.abc import Callable
from dataclasses import replace

from orchestrator.api import Relay, RunError, ShardKey
from orchestrator.transfer.bucket import BucketName, BucketWriter, Bytes, digest, room_for
from orchestrator.transfer.delta.delta_format import DTYPE_BYTES
from orchestrator.transfer.job_head import PublishAttempt
from orchestrator.transfer.manifest import RankShare, StoredShard, check_shard
from orchestrator.transfer.registered_buffers import BufferPool
from orchestrator.transfer.shard_codec import RAW, ShardCodec
from orchestrator.transfer.shard_routing import shard_label
from orchestrator.transfer.transfer_errors import RelayError

WAITING = 2  # buckets, sealed and not being stored yet


class ShardWriter:
    """Not reusable: one attempt, one rank. ``reserve``: asks for room up to a bucket, returns the attempt with it."""

    def __init__(
        self,
        relay: Relay,
        pool: BufferPool,
        job: str,
        attempt: PublishAttempt,
        reserve: Callable[[PublishAttempt, int], PublishAttempt],
        *,
        bucket_bytes: int,
        codec: ShardCodec | None = None,
        rank: int = 0,
        ranks: int = 1,
        signed: bool = False,
    ) -> None:
        self.attempt = attempt
        self._pool = pool
        self._job = job
        self._reserve = reserve
        self._bucket_bytes = bucket_bytes
        self._codec = codec
        self._ranks = ranks
        self._signed = signed
        self._bucket = rank  # the number of the one being filled
        self._writer: BucketWriter | None = None
        self._share = RankShare()
        self._labels: set[str] = set()
        self._pusher = BucketSender(lambda key, data: store_checked(relay, key, data))

    def add(self, key: ShardKey, new: Bytes, old: Bytes | None = None) -> None:
        """Write a shard (contiguous uint8). ``old``: its bytes in the base version. Raises RunError, or a push's error."""
        name = shard_label(key)
        for array in (new,) if old is None else (new, old):
            if array.dtype != "uint8" or array.ndim != 1 or not array.flags.c_contiguous:
                raise RunError(f"tensor {name}: give its bytes as a contiguous one-dimensional uint8 array")
        if name in self._labels:
            raise RunError(f"tensor {name} was given twice")
        self._labels.add(name)
        try:
            check_shard(key, new.nbytes)
        except ValueError as error:
            raise RunError(str(error)) from error
        made = digest(new)
        encoding, data = RAW, new
        if self._codec is not None and key.dtype in DTYPE_BYTES:  # a reader must know how long a decoded shard is
            encoding, data = self._codec.encode(old, new, key.dtype)
        if self._writer is not None and not self._writer.fits(name, data.nbytes):
            self._flush()
        if self._writer is None:
            size = max(self._bucket_bytes, room_for(name, data.nbytes))
            self._writer = BucketWriter(self._pool.acquire(size)[:size])
        offset = self._writer.add(name, data)
        self._share.shards.append(replace(key, encoding=encoding, bucket=self._bucket))
        stored = made if encoding == RAW else digest(data)
        self._share.pieces.append(StoredShard(offset, data.nbytes, made, stored))

    def finish(self) -> RankShare:
        """All is on the relay, read back by size."""
        self._flush()
        self._pusher.finish()
        return self._share

    def abandon(self) -> None:
        """Nothing more is written. Idempotent."""
        self._writer = None
        self._pusher.abandon()

    def _flush(self) -> None:
        if self._writer is None:
            return
        if self._bucket >= self.attempt.buckets:
            self.attempt = self._reserve(self.attempt, self._bucket)
        attempt, bucket = self.attempt, self._bucket
        name = BucketName(self._job, attempt.epoch, attempt.version, attempt.kind, attempt.number, bucket)
        sealed = self._writer.seal(name)
        self._writer = None
        self._share.buckets[bucket] = sealed.nbytes
        if self._signed:
            self._share.sha256[bucket] = hashlib.sha256(sealed).digest()
        self._bucket += self._ranks
        self._pusher.send_bucket(attempt.key(self._job, bucket), sealed)


def store_checked(relay: Relay, key: str, data: memoryview) -> None:
    """Put, and look. Raises RelayError."""
    relay.put(key, data)
    found = relay.size(key)  # a store may acknowledge what it did not keep
    if found != data.nbytes:
        raise RelayError("not_stored", f"{key}: {data.nbytes} B written, {found} B found")


class BucketSender:
    """Sealed buckets on their way to the relay, in one background thread, while the next ones are being filled.

    Guarantees: buckets are stored in the order they were pushed; at most ``WAITING`` of them wait, then :meth:`send_bucket`
    blocks, so that memory stays bounded; the first error ends it all and is raised by the next call of any kind; after
    :meth:`finish` or :meth:`abandon` nothing is being written any more. Its calls come from one thread.
    """

    def __init__(self, store: Callable[[str, memoryview], None]) -> None:
        self._store = store
        self._jobs: queue.Queue[tuple[str, memoryview] | None] = queue.Queue(WAITING)
        self._error: BaseException | None = None
        self._abandoned = False
        self._thread: threading.Thread | None = None

    def send_bucket(self, key: str, data: memoryview) -> None:
        """Hand a bucket over; its bytes must not change any more."""
        self._raise()
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="rl-coserve-push", daemon=True)
            self._thread.start()
        self._jobs.put((key, data))

    def finish(self) -> None:
        """Wait until all is stored."""
        self._end()
        self._raise()

    def abandon(self) -> None:
        """Forget what waits; what is being written is waited for. Idempotent, raises nothing."""
        self._abandoned = True
        self._end()

    def _end(self) -> None:
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()
            self._thread = None

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            if self._error is None and not self._abandoned:
                try:
                    self._store(*job)
                except BaseException as error:  # noqa: BLE001  it is raised in the thread that pushes
                    self._error = error
            job = None  # not kept while waiting: it holds a buffer
