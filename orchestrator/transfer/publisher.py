"""The publisher: turns a stream of tensors, or of every rank's shards, into one version on the relay. Lives in the trainer.

Guarantees: a version is visible to subscribers completely or not at all, because its pointer moves (one compare-and-set)
only after every bucket of every rank and the manifest were written and read back by size, and the ranks' shards were found
to be every tensor exactly once. What was published is never written again: every attempt has keys of its own. Of two
publishers of one version exactly one wins, the other gets :class:`VersionTakenError`. A run that resumes calls
:meth:`Publisher.rollback`, which opens a new epoch: versions of the abandoned history vanish at once for readers, and the
publisher that wrote them cannot publish any more.

Garbage (what :func:`orchestrator.transfer.retention.retained_versions` does not keep, abandoned epochs, failed attempts, those of
ranks that died included) is removed at the start of the next publication and by :meth:`Publisher.collect_garbage`:
never by force, never under a reader, retried while leased. Alone, nothing that can fail runs between the moved pointer
and the return, so an error always means "not published". Of several ranks one may die there: the others then raise, the
version exists, and who publishes it again is told so.

Control messages of a version: two compare-and-sets and one manifest by rank 0, one more compare-and-set for every 64
buckets of a rank, one gather and two broadcasts. How many tensors there are does not matter.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack, closing
from dataclasses import astuple, dataclass, replace
from typing import Any, Protocol

import msgpack

import orchestrator.transfer.job_head as heads
from orchestrator.api import ConfigError, CoserveError, MetadataStore, PublishResult, Relay, RunError, ShardKey
from orchestrator.transfer.bucket import Bytes
from orchestrator.transfer.delta.delta_format import DTYPE_BYTES
from orchestrator.transfer.encoding_choice import EncodingChoice, TransferTime
from orchestrator.transfer.fetch_times import slowest_fetch
from orchestrator.transfer.job_head import FULL, JobHead, PublishAttempt, PublishedVersion
from orchestrator.transfer.manifest import (
    RankShare,
    StoredManifest,
    content_of,
    encode_manifest,
    encode_share,
    manifest_checksum,
    merge_shares,
    shard_bytes,
)
from orchestrator.transfer.manifest_signing import signer_of
from orchestrator.transfer.registered_buffers import BufferPool, RemovingRelay
from orchestrator.transfer.relay_endpoint import RelayEndpoint, open_metadata, open_relay
from orchestrator.transfer.retention import SnapshotPolicy, retained_versions
from orchestrator.transfer.shard_codec import RAW, ShardCodec
from orchestrator.transfer.shard_routing import shard_label
from orchestrator.transfer.shard_writer import ShardWriter, store_checked
from orchestrator.transfer.transfer_errors import CorruptWeightsError, RelayError, VersionTakenError
from orchestrator.transfer.version_leases import LeaseWatch

Tensor = tuple[str, tuple[int, ...], str, Bytes]  # name, shape, dtype, contiguous uint8 bytes
Shard = tuple[ShardKey, Bytes, Bytes | None]  # where it belongs, its bytes, its bytes in the base version (if known)
# Of a difference at most: a rank's share of one is often less than a bucket, and would otherwise leave only when all of it
# is encoded. 2 MiB still outweigh the two messages that a bucket costs (docs/results/transfer-limit.md).
DIFFERENCE_BUCKET_BYTES = 2 << 20
Cuts = dict[str, tuple[tuple[int, ...], str]]  # label -> shape and dtype: how a version is cut into shards

# Errors that cross between ranks as what they are.
_NAMED = {kind.__name__: kind for kind in (RelayError, VersionTakenError, CorruptWeightsError)}


@dataclass(frozen=True, slots=True)
class PublishPlan:
    """What to publish next. ``base``: the version to publish a difference to, or FULL: no difference. ``snapshot``:
    publish a full snapshot, beside the difference if there is one."""

    base: int
    snapshot: bool


class PublishingRanks(Protocol):
    """The ranks that publish one version together: two collectives of bytes, which whoever embeds the publisher brings (in a
    Megatron job: torch.distributed). Every rank makes the same calls in the same order. A collective that fails (a rank died)
    raises, and the publication ends there."""

    @property
    def rank(self) -> int:
        """This one's number; 0 speaks to the metadata store."""

    @property
    def size(self) -> int:
        """How many."""

    def gather(self, data: bytes) -> list[bytes]:
        """On rank 0 what every rank gave, by number; on others anything."""

    def broadcast(self, data: bytes) -> bytes:
        """What rank 0 gave."""


class SingleRank:
    """One rank."""

    rank = 0
    size = 1

    def gather(self, data: bytes) -> list[bytes]:
        return [data]

    def broadcast(self, data: bytes) -> bytes:
        return data


class Publisher:
    """The writers of one job: alone, or one of several ``ranks`` that make the same calls in the same order.

    ``codec``: how shards are encoded; None: as their own bytes. ``timer`` measures leases (monotonic seconds). Closes only
    what it opened itself.
    """

    def __init__(
        self,
        endpoint: RelayEndpoint,
        relay: Relay | None = None,
        metadata: MetadataStore | None = None,
        clock: Callable[[], float] = time.perf_counter,
        *,
        ranks: PublishingRanks | None = None,
        codec: ShardCodec | None = None,
        timer: Callable[[], float] = time.monotonic,
    ) -> None:
        self._endpoint = endpoint
        self._opened = ExitStack()
        if metadata is None:
            metadata = self._opened.enter_context(closing(open_metadata(endpoint)))
        if relay is None:
            relay = self._opened.enter_context(closing(open_relay(endpoint, segment_bytes=endpoint.segment_bytes)))
        self._metadata, self._relay = metadata, relay
        self._pool = self._opened.enter_context(closing(BufferPool(relay)))
        self._clock = clock
        self._ranks: PublishingRanks = ranks if ranks is not None else SingleRank()
        self._codec = codec
        self._signer = signer_of(endpoint.verify_key) if self._ranks.rank == 0 else None  # rank 0 writes manifests
        self._leases = LeaseWatch(self._metadata, endpoint.job, timer)
        self._epoch: int | None = None
        self._last: PublishAttempt | None = None  # what this publisher committed last
        self._cuts: Cuts = {}  # of ``_last``; on rank 0
        self._took: list[tuple[int, bool, float]] = []  # version, whether whole, seconds to publish it; on rank 0
        self._raw_bytes = 0  # of ``_last``, before they were encoded
        self._failed: list[PublishAttempt] = []  # attempts of ours that ended in an error

    @property
    def epoch(self) -> int:
        """The epoch this publisher writes in; joins the present one (the first publisher opens epoch 1)."""
        if self._epoch is None:
            self._epoch = self._update(lambda head: head if head.epoch else heads.open_epoch(head, 0)).epoch
        return self._epoch

    def rollback(self, version: int) -> int:
        """Open a new epoch whose first version is ``version`` or later; returns the epoch. Called by every rank.

        Called once when a run starts or resumes, with the version that was restored. Until the next ``publish``
        subscribers see no version (-1). Any other publisher of the job is locked out from now on.
        """

        def first() -> int:
            self._last, self._cuts = None, {}
            return self._update(lambda head: heads.open_epoch(head, version)).epoch

        self._epoch = int(self._first(first))
        return self._epoch

    def reset(self) -> int:
        """A run from scratch: ``rollback(0)``."""
        return self.rollback(0)

    def publish(self, version: int, tensors: Iterable[Tensor]) -> PublishResult:
        """Publish a full snapshot of whole tensors. Each array may be reused when the next one is taken.

        Several ranks: each gives tensors of its own. Raises as :meth:`publish_shards`.
        """
        shards = ((ShardKey(name, -1, 0, 0, tuple(shape), dtype, RAW, 0), data) for name, shape, dtype, data in tensors)
        return self.publish_shards(version, ((key, data, None) for key, data in shards))

    def publish_shards(self, version: int, shards: Iterable[Shard], base: int = FULL) -> PublishResult:
        """Publish this rank's shards; over all ranks they are every tensor exactly once. Called by every rank.

        ``base``: the version, published last by this publisher and cut alike, that it is a difference to; FULL: a full
        snapshot, which may follow a difference of the same version. The result counts the bytes of all ranks.

        Raises VersionTakenError (lost, do not retry), RelayError (retryable; nothing was published; ``relay_full`` is
        back-pressure: subscribers still read old versions or the segment is too small), RunError (bad tensors). An error
        of one rank is raised on all.
        """
        started = self._clock()
        attempt = PublishAttempt(*self._first(lambda: astuple(self._begin(version, base))))
        bucket_bytes = self._endpoint.bucket_bytes
        writer = ShardWriter(
            self._relay,
            self._pool,
            self._endpoint.job,
            attempt,
            self._reserve,
            bucket_bytes=bucket_bytes if base == FULL else min(bucket_bytes, DIFFERENCE_BUCKET_BYTES),
            codec=self._codec,
            rank=self._ranks.rank,
            ranks=self._ranks.size,
            signed=bool(self._endpoint.verify_key),
        )
        failure: BaseException | None = None
        try:
            for key, new, old in shards:
                writer.add(key, new, None if base == FULL else old)
            message = pack_answer(encode_share(writer.finish()))
        except BaseException as error:  # noqa: BLE001  raised below, once the other ranks know
            writer.abandon()
            failure, message = error, pack_error(error)
        conclude = self._lead if self._ranks.rank == 0 else self._follow
        size, buckets, content = conclude(attempt, message, failure)
        seconds = self._clock() - started
        if self._ranks.rank == 0:
            earlier = [one for one in self._took if one[0] == version]  # the difference beside this snapshot
            self._took = [*earlier, (version, base == FULL, seconds)]
        return PublishResult(version, size, buckets, seconds, f"{content:016x}")

    def plan_next(self, policy: SnapshotPolicy, choice: EncodingChoice | None = None) -> PublishPlan:
        """What to publish next; the same on all ranks, each of which calls it. ``choice``: may take a version whole that could be
        a difference; it hears what the last one took, its readers included."""
        base, snapshot = self._first(lambda: self._plan(policy, choice))
        return PublishPlan(base, snapshot)

    def collect_garbage(self) -> int:
        """Remove garbage that no reader leases; returns how many publications are still waiting to be removed.

        What only subscribers needed that are gone now is garbage, too.
        """
        failed = tuple(self._failed)
        retain = self._retain(self._head().epoch)
        head = self._update(lambda head: heads.trim_versions(_discard_all(head, failed), retain))
        del self._failed[: len(failed)]
        removed = tuple(item for item in head.garbage if self._remove(item))
        return len(self._update(lambda head: heads.drop_garbage(head, removed)).garbage)

    def close(self) -> None:
        """Idempotent. The memory lent to a Mooncake Store goes with it, and with that what was published."""
        self._opened.close()

    # -- what rank 0 does for all ----------------------------------------------------------------------------------------

    def _first(self, action: Callable[[], Any]) -> Any:
        """The answer of rank 0, on every rank; its error, on every rank."""
        if self._ranks.rank:
            return unpack_answer(self._ranks.broadcast(b""), "rank 0")
        try:
            answer = action()
        except Exception as error:
            self._ranks.broadcast(pack_error(error))
            raise
        return unpack_answer(self._ranks.broadcast(pack_answer(answer)), "rank 0")

    def _begin(self, version: int, base: int) -> PublishAttempt:
        if type(version) is not int or version < 0:
            raise ConfigError("version", version, "must be an integer of 0 or more")
        self._reopen_after_loss(version, base)
        if base != FULL and (self._last is None or self._last.version != base):
            raise RunError(f"version {version}: its base {base} is not what this publisher published last")
        epoch, ranks = self.epoch, self._ranks.size
        begun = self._record_attempt(lambda head: heads.begin_attempt(head, epoch, version, base, ranks))
        try:
            self.collect_garbage()  # before any rank needs the room
        except BaseException as error:
            self._give_up(begun, error)
            raise
        return begun

    def _reserve(self, before: PublishAttempt, bucket: int) -> PublishAttempt:
        return self._record_attempt(lambda head: heads.reserve_bucket(head, before, bucket, self._ranks.size))

    def _record_attempt(self, transition: Callable[[JobHead], tuple[JobHead, PublishAttempt]]) -> PublishAttempt:
        """As it is in the new head."""
        found: list[PublishAttempt] = []

        def changed(head: JobHead) -> JobHead:
            head, attempt = transition(head)
            found.append(attempt)
            return head

        self._update(changed)
        return found[-1]

    def _plan(self, policy: SnapshotPolicy, choice: EncodingChoice | None) -> tuple[int, bool]:
        last, head = self._last, self._head()
        if last is None or last.epoch != head.epoch or head.version != last.version or self._lost(last):
            return FULL, True
        waiting = any(holder.waits_for_snapshot for holder in self._leases.live_holders(head.epoch))
        snapshot = waiting or policy.snapshot_due(head.published, last.version)
        if choice is not None and self._prefers_whole(choice, last):
            return FULL, True
        return (FULL if policy.every == 0 else last.version), snapshot

    def _prefers_whole(self, choice: EncodingChoice, last: PublishAttempt) -> bool:
        """Tells the choice what the last version took; where it was there in both forms, those who follow took the difference."""
        for version, whole, seconds in self._took[:1]:
            fetched = slowest_fetch(self._metadata, self._endpoint.job, last.epoch, version, whole)
            if version == last.version and fetched is not None:
                choice.note(TransferTime(whole, seconds + fetched, self._raw_bytes))
                self._took.clear()
        return choice.choose_whole()

    def _follow(self, attempt: PublishAttempt, message: bytes, failure: BaseException | None) -> tuple[int, int, int]:
        self._ranks.gather(message)
        answer = self._ranks.broadcast(b"")
        if failure is not None:
            raise failure
        size, buckets, content = unpack_answer(answer, "rank 0")
        self._last = attempt
        return size, buckets, content

    def _lead(self, attempt: PublishAttempt, message: bytes, failure: BaseException | None) -> tuple[int, int, int]:
        """Merge what the ranks wrote, move the pointer, tell everybody: (payload bytes, buckets, content)."""
        try:
            messages = self._ranks.gather(message)
        except BaseException as error:
            self._give_up(attempt, error)
            raise
        try:
            if failure is not None:
                raise failure
            done = self._commit(attempt, messages)
        except BaseException as error:
            self._give_up(attempt, error)
            self._ranks.broadcast(pack_error(error))
            raise
        self._ranks.broadcast(pack_answer(done))
        return done

    def _commit(self, attempt: PublishAttempt, messages: list[bytes]) -> tuple[int, int, int]:
        shares = [unpack_answer(message, f"rank {rank}") for rank, message in enumerate(messages)]
        share = merge_shares(shares)
        if not share.shards:
            raise RunError(f"version {attempt.version} has no tensors")
        cuts: Cuts = {shard_label(key): (key.global_shape, key.dtype) for key in share.shards}
        if attempt.base != FULL and cuts != self._cuts:
            other = sorted(set(cuts.items()) ^ set(self._cuts.items()))[0][0]
            raise RunError(f"version {attempt.version} and its base {attempt.base} are cut differently: {other}")
        done = self._store_manifest(attempt, share)
        retain = self._retain(attempt.epoch)
        self._update(lambda head: heads.commit_version(head, done, retain))
        self._last, self._cuts = done.attempt, cuts
        self._raw_bytes = sum(shard_bytes(key) for key in share.shards if key.dtype in DTYPE_BYTES)
        return done.payload_bytes, len(share.buckets), done.content

    def _store_manifest(self, attempt: PublishAttempt, share: RankShare) -> PublishedVersion:
        """All but the pointer."""
        job, base = self._endpoint.job, attempt.base
        attempt = replace(attempt, buckets=max(share.buckets) + 1)
        parent = None if base == FULL else self._head().find_version(base)
        if base != FULL and parent is None:
            raise VersionTakenError("epoch_replaced", f"the base {base} of version {attempt.version} is gone")
        numbers = range(attempt.buckets)
        encoded = encode_manifest(
            StoredManifest(
                attempt.version, base, tuple(share.shards), share.bytes, "", job, attempt.epoch, attempt.number,
                tuple(share.buckets.get(number, 0) for number in numbers), tuple(share.pieces),
                0 if parent is None else parent.content,
                tuple(share.sha256.get(number, b"") for number in numbers) if share.sha256 else (),
            )
        )  # fmt: skip
        checksum = manifest_checksum(encoded)
        if self._signer is not None:
            encoded = self._signer.sign(encoded)
        store_checked(self._relay, attempt.manifest_key(job), memoryview(encoded))
        content = content_of(share.shards, (piece.digest for piece in share.pieces))
        return PublishedVersion(attempt, len(encoded), checksum, share.bytes, content)

    def _retain(self, epoch: int) -> Callable[[tuple[PublishedVersion, ...]], tuple[PublishedVersion, ...]]:
        """What of an epoch is kept, with the subscribers that are alive now."""
        holders, keep = self._leases.live_holders(epoch), self._endpoint.keep_versions
        return lambda published: retained_versions(published, keep, holders)

    def _give_up(self, attempt: PublishAttempt, error: BaseException) -> None:
        if isinstance(error, VersionTakenError):
            # Whoever won may have collected this attempt already and not see what was written since: hand it in again.
            self._update(lambda head: heads.discard_attempt(head, attempt))
        else:
            self._failed.append(attempt)  # recorded as pending; becomes garbage before the next attempt

    def _reopen_after_loss(self, version: int, base: int) -> None:
        """What this publisher published is gone (the relay restarted empty), or was published and the answer of the metadata
        store, which went away, did not say so: publishing it again needs new keys."""
        last, epoch = self._last, self._epoch
        if base != FULL:
            return
        gone = last is not None and (last.epoch, last.version) == (epoch, version) and self._lost(last)
        if not gone and not self._unheard(version):
            return

        def transition(head: JobHead) -> JobHead:
            if head.epoch != epoch:
                raise VersionTakenError("epoch_replaced", f"epoch {epoch} was replaced by epoch {head.epoch}")
            return heads.open_epoch(head, version)

        self._epoch = self._update(transition).epoch

    def _unheard(self, version: int) -> bool:
        """Whether an attempt of ours that ended in an error is there, whole."""
        failed = [attempt for attempt in self._failed if attempt.version == version]
        found = self._head().find_version(version, FULL) if failed else None
        return found is not None and any(found.attempt.writes_same_keys(attempt) for attempt in failed)

    def _lost(self, published: PublishAttempt) -> bool:
        return self._relay.size(published.manifest_key(self._endpoint.job)) < 0

    def _remove(self, attempt: PublishAttempt) -> bool:
        job = self._endpoint.job
        # The manifest first: who cannot read it any more does not start on the buckets.
        if not self._relay.remove(attempt.manifest_key(job)):
            return False
        keys = [attempt.key(job, bucket) for bucket in range(attempt.buckets)]
        if isinstance(self._relay, RemovingRelay):
            return self._relay.remove_all(keys)
        return all(self._relay.remove(key) for key in keys)

    def _head(self) -> JobHead:
        return self._update(lambda head: head)

    def _update(self, transition: Callable[[JobHead], JobHead]) -> JobHead:
        return heads.update_head(self._metadata, self._endpoint.job, transition)


def _discard_all(head: JobHead, attempts: tuple[PublishAttempt, ...]) -> JobHead:
    for attempt in attempts:
        head = heads.discard_attempt(head, attempt)
    return head


def pack_answer(answer: Any) -> bytes:
    """Plain data for the others."""
    packed: bytes = msgpack.packb({"answer": answer})
    return packed


def pack_error(error: BaseException) -> bytes:
    """An error for the others, by kind and reason."""
    kind, reason = type(error).__name__, str(getattr(error, "reason", ""))
    detail = str(getattr(error, "detail", "") or error or kind)
    packed: bytes = msgpack.packb({"error": [kind if isinstance(error, CoserveError) else "", reason, detail]})
    return packed


def unpack_answer(data: bytes, who: str) -> Any:
    """The answer of another rank, or its error raised here; ``who`` says which. What is neither is a RunError."""
    try:
        message = msgpack.unpackb(data)
        if "answer" in message:
            return message["answer"]
        kind, reason, detail = map(str, message["error"])
    except (ValueError, TypeError, KeyError, msgpack.UnpackException) as error:
        raise RunError(f"{who}: what it says cannot be read: {error!r:.200}") from error
    if kind in _NAMED:
        raise _NAMED[kind](reason, f"{detail} ({who})")
    if kind == "ConfigError":
        raise ConfigError("publish", who, detail)
    raise RunError(f"{who}: {detail}")
