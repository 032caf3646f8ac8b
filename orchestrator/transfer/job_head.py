"""The head record of a job: one value in the metadata store that says which versions exist. Data and pure transitions.

Guarantees: every change of what exists (a new epoch, an attempt begun, a version committed, garbage dropped) is ONE
compare-and-set of this one value, so no reader and no crash ever sees half of it. An attempt is recorded before its
first object is written, so whatever a dead publisher left behind can be found and removed. Versions grow within an
epoch; an epoch never returns. Object keys are a function of (epoch, version, kind, attempt, bucket) and are never used
twice. A difference is published only to the newest version; the full snapshot of a version that is there as a difference
may follow, with the same content.

The functions take a head and return the next one, which :func:`update_head` stores; they raise
:class:`VersionTakenError` where the caller has lost.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import astuple, dataclass, replace
from typing import Any, TypeVar

import msgpack

from orchestrator.api import MetadataStore
from orchestrator.transfer.transfer_errors import CorruptWeightsError, RelayError, VersionTakenError

FORMAT = 2
RESERVE_BUCKETS = 64  # buckets a rank may write before it must record more: one control message per 64 buckets
FULL = -1  # the base of a full snapshot
CAS_TRIES = 24
# Seconds: of those who lost a compare-and-set each tries again at a random moment within as many, which double. Hundreds of
# ranks say at the same moment what they fetch; at once again, one of them would get through each time.
CAS_PAUSE, CAS_PAUSE_MOST = 0.002, 4.0
_chance = random.SystemRandom()
Record = TypeVar("Record")


@dataclass(frozen=True, slots=True)
class PublishAttempt:
    """One try to publish a version. ``buckets``: no bucket with this number or above was written.

    ``base``: the version that the content is a difference to, or ``FULL``.
    """

    epoch: int
    version: int
    number: int
    buckets: int
    base: int = FULL

    @property
    def kind(self) -> str:
        """As it stands in object keys."""
        return kind_of(self.base)

    def key(self, job: str, bucket: int) -> str:
        """Object key of a bucket."""
        return f"rlc/{job}/{self.epoch}/{self.version}/{self.kind}/{bucket}{self._suffix()}"

    def manifest_key(self, job: str) -> str:
        """Object key of the manifest."""
        return f"rlc/{job}/{self.epoch}/{self.version}/{self.kind}/manifest{self._suffix()}"

    def _suffix(self) -> str:
        return f".{self.number}" if self.number else ""

    def writes_same_keys(self, other: PublishAttempt) -> bool:
        """Whether both write the same keys."""
        return (self.epoch, self.version, self.number) == (other.epoch, other.version, other.number)


@dataclass(frozen=True, slots=True)
class PublishedVersion:
    """A version that exists, as a full snapshot or as a difference, and what its manifest must look like.

    ``payload_bytes``: what its shards have on the wire. ``content``: of the tensors it ends in, see
    :func:`orchestrator.transfer.manifest.content_of`.
    """

    attempt: PublishAttempt
    manifest_bytes: int
    manifest_checksum: int
    payload_bytes: int = 0
    content: int = 0


@dataclass(frozen=True, slots=True)
class JobHead:
    """``version`` -1: nothing published in this epoch. ``floor``: what the run was rolled back to.

    ``published`` is ordered by version; one that exists as a difference and as a full snapshot is in it twice.
    """

    epoch: int = 0
    version: int = -1
    floor: int = 0
    published: tuple[PublishedVersion, ...] = ()
    pending: tuple[PublishAttempt, ...] = ()
    garbage: tuple[PublishAttempt, ...] = ()
    tries: tuple[tuple[int, int], ...] = ()  # (version, attempts so far) of versions not committed yet

    def find_version(self, version: int, base: int | None = None) -> PublishedVersion | None:
        """The published version, a full snapshot rather than a difference, or None. ``base``: only that kind."""
        found = [item for item in self.published if item.attempt.version == version]
        found = [item for item in found if base is None or item.attempt.base == base]
        return min(found, key=lambda item: item.attempt.base, default=None)


def kind_of(base: int) -> str:
    """The word for full snapshots, or for differences to a base."""
    return "full" if base == FULL else f"delta-{base}"


def head_key(job: str) -> str:
    """Where the head is in the metadata store."""
    return f"rlc/{job}/head"


def open_epoch(head: JobHead, floor: int) -> JobHead:
    """A new history: nothing is published, everything before is garbage."""
    left = tuple(item.attempt for item in head.published) + head.pending
    return JobHead(epoch=head.epoch + 1, floor=floor, garbage=head.garbage + left)


def begin_attempt(
    head: JobHead, epoch: int, version: int, base: int = FULL, ranks: int = 1
) -> tuple[JobHead, PublishAttempt]:
    """Record an attempt before anything of it is written. ``ranks`` write it together."""
    tries = dict(head.tries)
    number = tries.get(version, 0)
    tries[version] = number + 1
    attempt = PublishAttempt(epoch, version, number, RESERVE_BUCKETS * ranks, base)
    _check_alive(head, attempt)
    return replace(head, pending=(*head.pending, attempt), tries=tuple(sorted(tries.items()))), attempt


def reserve_bucket(
    head: JobHead, attempt: PublishAttempt, bucket: int, ranks: int = 1
) -> tuple[JobHead, PublishAttempt]:
    """Let an attempt write ``bucket``, and each of its ranks ``RESERVE_BUCKETS`` from there on."""
    _check_alive(head, attempt)
    room = max((item.buckets for item in head.pending if item.writes_same_keys(attempt)), default=attempt.buckets)
    more = replace(attempt, buckets=room if bucket < room else bucket + RESERVE_BUCKETS * ranks)
    return replace(head, pending=tuple(more if item.writes_same_keys(attempt) else item for item in head.pending)), more


def commit_version(
    head: JobHead,
    done: PublishedVersion,
    retain: Callable[[tuple[PublishedVersion, ...]], tuple[PublishedVersion, ...]],
) -> JobHead:
    """Move the version pointer, or add the full snapshot to a version that is there as a difference.

    Committing twice is harmless. ``retain`` says which of the published are kept; the others become garbage.
    """
    mine = done.attempt
    if head.epoch == mine.epoch and any(item.attempt.writes_same_keys(mine) for item in head.published):
        return head
    _check_alive(head, mine)
    present = head.find_version(mine.version)
    if present is not None and present.content != done.content:
        detail = f"version {mine.version}: it was published with other content"
        raise VersionTakenError("version_taken", detail)
    versions = (*head.published, done)
    kept = retain(versions)
    beaten = tuple(item for item in head.pending if item.version <= mine.version and not item.writes_same_keys(mine))
    return replace(
        head,
        version=mine.version,
        published=kept,
        pending=tuple(item for item in head.pending if item.version > mine.version),
        garbage=head.garbage + tuple(item.attempt for item in versions if item not in kept) + beaten,
        # Of this version, too: a snapshot that is added later must not use the keys of an attempt that failed.
        tries=tuple(item for item in head.tries if item[0] >= mine.version),
    )


def trim_versions(
    head: JobHead, retain: Callable[[tuple[PublishedVersion, ...]], tuple[PublishedVersion, ...]]
) -> JobHead:
    """What ``retain`` does not keep any more becomes garbage."""
    kept = retain(head.published)
    left = tuple(item.attempt for item in head.published if item not in kept)
    return replace(head, published=kept, garbage=head.garbage + left) if left else head


def discard_attempt(head: JobHead, attempt: PublishAttempt) -> JobHead:
    """Give an attempt up: its objects are garbage from now on."""
    if any(item.attempt.writes_same_keys(attempt) for item in head.published):
        return head
    known = [item for item in (*head.pending, *head.garbage, attempt) if item.writes_same_keys(attempt)]
    widest = max(known, key=lambda item: item.buckets)  # another rank may have recorded more than this one knows
    return replace(
        head,
        pending=tuple(item for item in head.pending if not item.writes_same_keys(attempt)),
        garbage=(*(item for item in head.garbage if not item.writes_same_keys(attempt)), widest),
    )


def drop_garbage(head: JobHead, removed: tuple[PublishAttempt, ...]) -> JobHead:
    """Forget garbage whose objects are gone."""
    return replace(head, garbage=tuple(item for item in head.garbage if item not in removed))


def _check_alive(head: JobHead, attempt: PublishAttempt) -> None:
    epoch, version, base = attempt.epoch, attempt.version, attempt.base
    if head.epoch != epoch:
        detail = f"epoch {epoch} was replaced by epoch {head.epoch}: another run publishes under this job name"
        raise VersionTakenError("epoch_replaced", detail)
    adds_snapshot = base == FULL and version == head.version and head.find_version(version, FULL) is None
    if version <= head.version and not adds_snapshot:
        detail = (
            f"version {version}: epoch {epoch} is at version {head.version} already (on resume, call rollback first)"
        )
        raise VersionTakenError("version_taken", detail)
    if version < head.floor:
        raise VersionTakenError("version_taken", f"version {version} is before {head.floor}, where this epoch starts")
    if base != FULL and base != head.version:
        detail = f"version {version} is a difference to version {base}, but the newest is {head.version}"
        raise VersionTakenError("base_not_newest", detail)


def update_head(metadata: MetadataStore, job: str, transition: Callable[[JobHead], JobHead]) -> JobHead:
    """See :func:`update_record`."""
    return update_record(metadata, head_key(job), JobHead(), decode_head, encode_head, transition)


def update_record(
    metadata: MetadataStore,
    key: str,
    empty: Record,
    decode: Callable[[bytes], Record],
    encode: Callable[[Record], bytes],
    transition: Callable[[Record], Record],
) -> Record:
    """Apply a transition to a record by compare-and-set, again while others are faster; returns the new one (``empty``: what
    it is before the first). Raises RelayError."""
    for lost in range(CAS_TRIES):
        if lost:
            time.sleep(_chance.uniform(0, min(CAS_PAUSE * 2**lost, CAS_PAUSE_MOST)))
        present = metadata.get(key)
        before = empty if present is None else decode(present[0])
        after = transition(before)
        if after == before or metadata.compare_and_set(key, encode(after), 0 if present is None else present[1]):
            return after
    raise RelayError("metadata_contention", f"{key} changed {CAS_TRIES} times under a compare-and-set")


def encode_head(head: JobHead) -> bytes:
    """The value that is stored."""

    packed: bytes = msgpack.packb(
        {
            "format": FORMAT,
            "epoch": head.epoch,
            "version": head.version,
            "floor": head.floor,
            "published": [[*attempt, *rest] for attempt, *rest in map(astuple, head.published)],
            "pending": [astuple(item) for item in head.pending],
            "garbage": [astuple(item) for item in head.garbage],
            "tries": head.tries,
        }
    )
    return packed


def decode_head(value: bytes) -> JobHead:
    """Strict: anything unexpected is a CorruptWeightsError."""
    try:
        data: dict[str, Any] = msgpack.unpackb(value)
        if data["format"] != FORMAT:
            raise CorruptWeightsError("format", f"head record format {data['format']!r}, this version reads {FORMAT}")
        epoch, version, floor = _integers([data["epoch"], data["version"], data["floor"]], 3)
        published = [_integers(row, 9) for row in data["published"]]
        return JobHead(
            epoch=epoch,
            version=version,
            floor=floor,
            published=tuple(PublishedVersion(PublishAttempt(*row[:5]), *row[5:]) for row in published),
            pending=tuple(PublishAttempt(*_integers(row, 5)) for row in data["pending"]),
            garbage=tuple(PublishAttempt(*_integers(row, 5)) for row in data["garbage"]),
            tries=tuple((row[0], row[1]) for row in (_integers(row, 2) for row in data["tries"])),
        )
    except (ValueError, TypeError, KeyError, IndexError, msgpack.UnpackException) as error:
        raise CorruptWeightsError("format", f"the head record cannot be read: {error!r}") from error


def _integers(row: list[Any], count: int) -> list[int]:
    if len(row) != count or any(type(item) is not int for item in row):
        raise ValueError(f"{count} integers expected, got {row!r}")
    return row
