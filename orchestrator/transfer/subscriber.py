"""The subscriber: brings published versions into an engine. Pure client of the relay: lends it no memory.

Guarantees: bytes are yielded only after they were verified. A bucket that was read as a whole passed its checksum, named
itself as the bucket that was asked for, and agreed with the manifest about every shard; a shard that was read alone, and
every shard of a whole bucket, had the digest that was published. So truncated, flipped, foreign or replayed data ends in
:class:`CorruptWeightsError`, and what is missing or cannot be transferred in a RelayError (retryable: the version may have
been collected, or the relay restarted). Sizes are checked before memory is allocated. An array stays valid for as long as
it is referenced (:mod:`orchestrator.transfer.registered_buffers`).

A version costs one control message, one look at the manifest and one at each bucket that is needed; :meth:`Subscriber.hold`
two more. How many tensors there are does not matter.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import os
import socket
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from functools import partial
from typing import TypeVar

import orchestrator.transfer.version_leases as leases
from orchestrator.api import ConfigError, MetadataStore, Relay, ShardKey
from orchestrator.transfer.bucket import ALIGNMENT, BODY_START, Bytes, digest, open_bucket
from orchestrator.transfer.fetch_times import FetchTime, report_fetch
from orchestrator.transfer.job_head import FULL, JobHead, PublishAttempt, PublishedVersion, decode_head, head_key
from orchestrator.transfer.manifest import MAX_MANIFEST_BYTES, StoredManifest, decode_manifest, shard_bytes
from orchestrator.transfer.manifest_signing import Verifier
from orchestrator.transfer.registered_buffers import BatchRelay, BufferPool, RangeRelay
from orchestrator.transfer.relay_endpoint import RelayEndpoint, open_metadata, open_relay
from orchestrator.transfer.retention import VersionHolder, choose_route
from orchestrator.transfer.shard_codec import RAW, ShardCodec, decode_stored
from orchestrator.transfer.shard_routing import Region, RegionAssembler, shard_label
from orchestrator.transfer.site_relay import SiteRelay
from orchestrator.transfer.transfer_errors import CorruptWeightsError, RelayError

Read = TypeVar("Read")
LEASE_SECONDS = 600  # how long a subscriber's word is good for
# A bucket is read in ranges, where the relay can, when that saves at least half of it and so many bytes: ranges cost time
# of their own, and a small bucket is read faster than its parts.
RANGES_BELOW = 0.5
RANGES_SAVE = 1 << 20
# Of whole buckets that are asked for in one call, where the relay can: as many as come in about a second. A Mooncake Store
# protects what is being read for a few seconds only, so that 1 GiB over a slow link fails as a whole.
PULL_BYTES, FIRST_PULL_BYTES, PULL_SECONDS = 1 << 30, 128 << 20, 1.0
_logger = logging.getLogger(__name__)
_numbers = itertools.count()  # of the subscribers of this process


class Subscriber:
    """One reader of one job. Closes only what it opened itself.

    ``codec``: the publisher's; without one, only raw shards can be read. ``name``: of its lease, unique in the job.
    """

    def __init__(
        self,
        endpoint: RelayEndpoint,
        relay: Relay | None = None,
        metadata: MetadataStore | None = None,
        *,
        codec: ShardCodec | None = None,
        name: str = "",
        lease_seconds: int = LEASE_SECONDS,
    ) -> None:
        if len(name) > leases.MAX_NAME:
            raise ConfigError("name", name, f"must have at most {leases.MAX_NAME} characters")
        self._endpoint = endpoint
        self._opened = ExitStack()
        if metadata is None:
            metadata = self._opened.enter_context(closing(open_metadata(endpoint)))
        if relay is None:
            relay = self._opened.enter_context(closing(open_relay(endpoint)))
        self._metadata, self._relay = metadata, relay
        self._pool = self._opened.enter_context(closing(BufferPool(relay)))
        self._codec = codec
        self._name = name or f"{socket.gethostname()}/{os.getpid()}/{next(_numbers)}"
        self._lease_seconds = lease_seconds
        self._said = VersionHolder(-1), 0.0  # last, and when
        self._verifier = Verifier(endpoint.verify_key) if endpoint.verify_key else None
        self._pull_bytes = min(FIRST_PULL_BYTES, PULL_BYTES)
        self._newest = (0, -1)  # epoch and version of the newest signed one that was asked for

    def latest_version(self) -> int:
        """The newest version of the present epoch; -1: none yet."""
        return self._head().version

    def epoch(self) -> int:
        """The present epoch; 0: the job never published. A version number means something only within its epoch."""
        return self._head().epoch

    def published(self, version: int) -> PublishedVersion:
        """What the metadata store says of a version: its full snapshot, or, where there is none, its difference to a base.

        RelayError "missing" when it is not, or no longer, published.
        """
        head = self._head()
        found = head.find_version(version)
        if found is None:
            kept = [item.attempt.version for item in head.published]
            raise RelayError("missing", f"version {version} of job {self._endpoint.job}; epoch {head.epoch} has {kept}")
        return found

    def manifest(self, version: int | PublishedVersion) -> StoredManifest:
        """What a version, or what :meth:`published` said of it, consists of. Raises as that."""
        manifest = self._read_manifest(self.published(version) if isinstance(version, int) else version)
        self._not_replayed(manifest)
        return manifest

    def chain(
        self,
        target: int,
        held: int = -1,
        content: int = 0,
        known: tuple[PublishedVersion, StoredManifest] | None = None,
    ) -> list[StoredManifest]:
        """What to fetch, in this order, to get to ``target``: differences to what is held, or a full snapshot and the
        differences after it, whatever has fewer bytes.

        ``held``: a version of the present epoch with that ``content``; -1: nothing. ``known``: a manifest that was read already,
        and is not read again. Raises RelayError "missing", and CorruptWeightsError "chain" when what is published does not fit
        together.
        """
        head = self._head()
        manifests = [
            known[1] if known is not None and known[0] == item else self._read_manifest(item)
            for item in choose_route(head.published, held, target)
        ]
        for manifest in manifests:
            if manifest.base_version != FULL and (manifest.base_version, manifest.base_content) != (held, content):
                detail = f"version {manifest.version} is a difference to {manifest.base_version} with content "
                detail += f"{manifest.base_content:016x}; the one before it is {held} with {content:016x}"
                raise CorruptWeightsError("chain", detail)
            held, content = manifest.version, manifest.content()
        if manifests:
            self._not_replayed(manifests[-1])
        return manifests

    def _not_replayed(self, target: StoredManifest) -> None:
        """Of versions that are signed, nobody may bring an older one back."""
        found = target.epoch, target.version
        if self._verifier is not None and found < self._newest:
            detail = f"epoch and version {found} are signed, but {self._newest} were there before: somebody replays the old ones"
            raise CorruptWeightsError("replayed", detail)
        self._newest = max(self._newest, found)

    def hold(self, version: int, fetching: int = -1) -> None:
        """Say what this subscriber holds (-1: nothing), and what it is about to fetch (-1: nothing): neither is collected
        while it lives. To be repeated within ``lease_seconds``; what is read meanwhile repeats it. RelayError."""
        holder = VersionHolder(version, fetching)
        self._said = holder, time.monotonic()
        leases.renew_lease(self._metadata, self._endpoint.job, self._name, self.epoch(), holder, self._lease_seconds)

    def _hold_on(self) -> None:
        """A fetch over a slow link takes longer than its lease is good for."""
        holder, since = self._said
        if holder.fetching >= 0 and time.monotonic() - since > self._lease_seconds / 3:
            try:
                self.hold(holder.version, holder.fetching)
            except RelayError as error:  # a lease only keeps what is read; it may well stay without
                _logger.warning("the lease of weight version %d was not renewed: %s", holder.fetching, error)

    def report_fetch(self, version: int, whole: bool, seconds: float) -> None:
        """Say what it took to have a version verified, whole or by differences. RelayError."""
        took = FetchTime(self.epoch(), version, whole, int(seconds * 1e6))
        report_fetch(self._metadata, self._endpoint.job, self._name, took)

    def ask_snapshot(self) -> None:
        """Say that no chain leads anywhere from what this subscriber has: the next version comes with a full snapshot.

        Stands until the next :meth:`hold`. RelayError.
        """
        self.hold(-1)

    def fetch(self, manifest: StoredManifest) -> Iterator[tuple[ShardKey, Bytes]]:
        """Yield every shard of a full snapshot, bucket by bucket, each bucket verified as a whole before its first shard: a later
        one may still fail."""
        _require_full(manifest)
        for bucket, numbers in sorted(_by_bucket(manifest, range(len(manifest.shards))).items()):
            data = self._read(self._bucket_key(manifest, bucket), manifest.buckets[bucket])
            for number, view in self._open_checked(manifest, bucket, numbers, data):
                yield manifest.shards[number], self._decoded(manifest, number, view)

    def fetch_shards(self, manifest: StoredManifest, needed: Collection[int]) -> Iterator[tuple[int, Bytes]]:
        """Yield (place in ``manifest.shards``, its bytes as stored, encoded) of these shards and no others.

        Where few shards of a bucket are needed and the relay can, only those are read.
        """
        everything = _by_bucket(manifest, range(len(manifest.shards)))
        whole: list[int] = []  # buckets
        chosen: set[int] = set()
        for bucket, numbers in sorted(_by_bucket(manifest, sorted(needed)).items()):
            wanted = sum(manifest.pieces[number].length for number in numbers)
            size = manifest.buckets[bucket]
            worth = wanted < RANGES_BELOW * size and size - wanted >= RANGES_SAVE
            if worth and isinstance(self._relay, RangeRelay) and self._verifier is None:
                yield from self._again_if_wrong(partial(self._fetch_ranges, manifest, bucket, numbers))
            else:
                whole.append(bucket)
                chosen.update(numbers)
        for bucket, data in self._read_buckets(manifest, whole):
            opened = self._open_checked(manifest, bucket, everything[bucket], data)
            yield from (item for item in opened if item[0] in chosen)

    def fetch_regions(self, manifest: StoredManifest, regions: Iterable[Region]) -> Iterator[tuple[Region, Bytes]]:
        """Yield (region, its bytes, contiguous) of a full snapshot, each as soon as it is complete.

        Only the shards that the regions intersect are fetched. Raises CorruptWeightsError "layout" for a region that was
        not published.
        """
        _require_full(manifest)
        assembler = RegionAssembler(manifest.shards, regions)
        yield from assembler.empty
        for number, view in self.fetch_shards(manifest, assembler.needed):
            yield from assembler.add(number, self._decoded(manifest, number, view))

    def close(self) -> None:
        """Idempotent. Arrays that were handed out stay valid. The lease, if there is one, stays until it runs out."""
        self._opened.close()

    def _head(self) -> JobHead:
        present = self._metadata.get(head_key(self._endpoint.job))
        return JobHead() if present is None else decode_head(present[0])

    def past_cache(self) -> str:
        """What was read from the relay itself since the last call although there is a cache, with the cause; "": nothing."""
        relay = self._relay
        if not isinstance(relay, SiteRelay) or not relay.past_cache:
            return ""
        count, relay.past_cache = relay.past_cache, 0
        return f"{count} objects came from the relay itself, not from the site cache at {relay.why}"

    def _again_if_wrong(self, read: Callable[[], Read]) -> Read:
        """What is read and verified; from the relay itself where the cache of the site had it wrong."""
        try:
            return read()
        except CorruptWeightsError as error:
            if not (isinstance(self._relay, SiteRelay) and self._relay.distrust(str(error))):
                raise
        return read()

    def _read_manifest(self, found: PublishedVersion) -> StoredManifest:
        return self._again_if_wrong(lambda: self._read_manifest_once(found))

    def _read_manifest_once(self, found: PublishedVersion) -> StoredManifest:
        attempt, job = found.attempt, self._endpoint.job
        if not 0 < found.manifest_bytes <= MAX_MANIFEST_BYTES:
            raise CorruptWeightsError("manifest", f"{found.manifest_bytes} B announced, limit {MAX_MANIFEST_BYTES} B")
        data = self._read(attempt.manifest_key(job), found.manifest_bytes).data
        if self._verifier is not None:
            data = self._verifier.open_manifest(data)
        manifest = decode_manifest(
            data,
            found.manifest_checksum,
            job,
            attempt.epoch,
            attempt.version,
            attempt.number,
            attempt.base,
            only_raw=self._codec is None,
        )
        if self._verifier is not None and not manifest.sha256:
            raise CorruptWeightsError("signature", "the manifest is signed, but names no SHA-256 of its buckets")
        return manifest

    def _decoded(self, manifest: StoredManifest, number: int, view: Bytes) -> Bytes:
        key = manifest.shards[number]
        if key.encoding == RAW:
            return view
        return decode_stored(self._codec, key, view, shard_bytes(key), manifest.pieces[number].digest)

    def _read_buckets(self, manifest: StoredManifest, buckets: Iterable[int]) -> Iterator[tuple[int, Bytes]]:
        """Whole buckets, several in one call. Views of one buffer: it is held as long as one of them."""
        batch: list[int] = []
        total = 0
        for bucket in buckets:
            size = manifest.buckets[bucket]
            if batch and total + size > self._pull_bytes:
                yield from self._read_batch(manifest, batch)
                batch, total = [], 0
            batch.append(bucket)
            total += size
        if batch:
            yield from self._read_batch(manifest, batch)

    def _read_batch(self, manifest: StoredManifest, batch: Sequence[int]) -> Iterator[tuple[int, Bytes]]:
        relay = self._relay
        keys = [self._bucket_key(manifest, bucket) for bucket in batch]
        sizes = [manifest.buckets[bucket] for bucket in batch]
        if len(batch) == 1 or not isinstance(relay, BatchRelay):
            for bucket, key, size in zip(batch, keys, sizes, strict=True):
                began = time.monotonic()
                data = self._read(key, size)
                self._note_pull(size, began)
                yield bucket, data
            return
        for key, size in zip(keys, sizes, strict=True):
            self._check_size(key, size)
        starts = [0, *itertools.accumulate(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes)]
        buffer = self._pool.acquire(starts[-1])
        views = [buffer[start : start + size] for start, size in zip(starts, sizes, strict=False)]
        began = time.monotonic()
        try:
            read = relay.get_many([(key, view.data) for key, view in zip(keys, views, strict=True)])
        except RelayError as error:
            if error.reason != "transfer":
                raise
            self._pull_bytes = max(starts[-1] // 8, 1)  # it was too much in one call for this link
            for bucket, key, size in zip(batch, keys, sizes, strict=True):
                yield bucket, self._read(key, size)
            return
        self._note_pull(starts[-1], began)
        for key, size, found in zip(keys, sizes, read, strict=True):
            if found != size:
                raise CorruptWeightsError("truncated", f"{key}: {found} B of {size} B arrived")
        yield from zip(batch, views, strict=True)

    def _note_pull(self, size: int, began: float) -> None:
        """What a call took decides how much the next one asks for: after a slow one, too, which asked for one bucket only."""
        seconds = max(time.monotonic() - began, 1e-3)
        self._pull_bytes = min(PULL_BYTES, max(int(size * PULL_SECONDS / seconds), 1))

    def _open_checked(
        self, manifest: StoredManifest, bucket: int, wanted: list[int], data: Bytes
    ) -> list[tuple[int, Bytes]]:
        """As :meth:`_open_bucket`; what a cache had wrong is read again."""
        came: list[Bytes] = [data]

        def read() -> list[tuple[int, Bytes]]:
            found = came.pop() if came else self._read(self._bucket_key(manifest, bucket), manifest.buckets[bucket])
            return self._open_bucket(manifest, bucket, wanted, found)

        return self._again_if_wrong(read)

    def _open_bucket(
        self, manifest: StoredManifest, bucket: int, wanted: list[int], data: Bytes
    ) -> list[tuple[int, Bytes]]:
        """All shards of a bucket, as stored. ``wanted``: those that the manifest has in it."""
        if self._verifier is not None and hashlib.sha256(data.data).digest() != manifest.sha256[bucket]:
            raise CorruptWeightsError(
                "signature", f"bucket {bucket} of version {manifest.version} is not what was signed"
            )
        arrived = open_bucket(data, manifest.bucket_name(bucket))
        expected = [
            (shard_label(manifest.shards[number]), manifest.pieces[number].offset, manifest.pieces[number].length)
            for number in wanted
        ]
        if [(entry.tensor, entry.offset, entry.length) for entry, _ in arrived] != expected:
            raise CorruptWeightsError("layout", f"bucket {bucket} and manifest of version {manifest.version} disagree")
        for number, (_, view) in zip(wanted, arrived, strict=True):
            _check_digest(manifest, number, view)
        return [(number, view) for number, (_, view) in zip(wanted, arrived, strict=True)]

    def _fetch_ranges(self, manifest: StoredManifest, bucket: int, numbers: list[int]) -> list[tuple[int, Bytes]]:
        """Some shards of a bucket, as stored, read alone."""
        key = self._bucket_key(manifest, bucket)
        self._check_size(key, manifest.buckets[bucket])
        ranges: list[tuple[int, int, int]] = []
        end = 0
        for number in numbers:
            piece = manifest.pieces[number]
            ranges.append((BODY_START + piece.offset, piece.length, end))
            end += -(-piece.length // ALIGNMENT) * ALIGNMENT
        buffer = self._pool.acquire(end)
        wanted = sum(length for _, length, _ in ranges)
        relay = self._relay
        assert isinstance(relay, RangeRelay)
        asked = [item for item in ranges if item[1]]
        read = relay.get_ranges(key, asked, buffer[:end].data) if asked else 0
        if read != wanted:
            raise CorruptWeightsError("truncated", f"{key}: {read} B of {wanted} B arrived")
        views = [buffer[place : place + length] for _, length, place in ranges]
        for number, view in zip(numbers, views, strict=True):
            _check_digest(manifest, number, view)
        return list(zip(numbers, views, strict=True))

    def _bucket_key(self, manifest: StoredManifest, bucket: int) -> str:
        number, base = manifest.attempt, manifest.base_version
        attempt = PublishAttempt(manifest.epoch, manifest.version, number, len(manifest.buckets), base)
        return attempt.key(self._endpoint.job, bucket)

    def _read(self, key: str, size: int) -> Bytes:
        self._check_size(key, size)
        buffer = self._pool.acquire(size)
        read = self._relay.get_into(key, buffer[:size].data)
        if read != size:
            raise CorruptWeightsError("truncated", f"{key}: {read} B of {size} B arrived")
        return buffer[:size]

    def _check_size(self, key: str, size: int) -> None:
        """Before anything is allocated."""
        self._hold_on()
        found = self._relay.size(key)
        if found < 0:
            raise RelayError("missing", f"no object {key}: collected, or the relay lost its memory")
        if found != size:
            raise CorruptWeightsError("truncated", f"{key} has {found} B, published were {size} B")


def _by_bucket(manifest: StoredManifest, numbers: Iterable[int]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for number in numbers:
        found.setdefault(manifest.shards[number].bucket, []).append(number)
    return found


def _require_full(manifest: StoredManifest) -> None:
    if manifest.base_version != FULL:
        detail = f"version {manifest.version} is a difference to {manifest.base_version}, not a full snapshot"
        raise RelayError("missing", detail)


def _check_digest(manifest: StoredManifest, number: int, view: Bytes) -> None:
    found, expected = digest(view), manifest.pieces[number].stored
    if found != expected:
        detail = f"tensor {shard_label(manifest.shards[number])}: xxh3-64 {found:016x}, published {expected:016x}"
        raise CorruptWeightsError("digest", detail)
