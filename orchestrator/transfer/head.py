"""The head record of a job: one value in the metadata store that says which versions exist. Pure data and transitions.

Guarantees: every change of what exists (a new epoch, an attempt begun, a version committed, garbage dropped) is ONE
compare-and-set of this one value, so no reader and no crash ever sees half of it. An attempt is recorded before its
first object is written, so whatever a dead publisher left behind can be found and removed. Versions grow within an
epoch; an epoch never returns. Object keys are a function of (epoch, version, attempt, bucket) and are never used twice.

The functions take a head and return the next one; they raise :class:`VersionTakenError` where the caller has lost.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import msgpack

from orchestrator.transfer.errors import CorruptWeightsError, VersionTakenError

FORMAT = 1
RESERVE_BUCKETS = 64  # buckets an attempt may write before it must record more: one control message per 64 buckets


@dataclass(frozen=True, slots=True)
class Attempt:
    """One try to publish a version. ``buckets``: no bucket with this number or above was written."""

    epoch: int
    version: int
    number: int
    buckets: int

    def key(self, job: str, bucket: int) -> str:
        """Object key of a bucket."""
        return f"rlc/{job}/{self.epoch}/{self.version}/full/{bucket}{self._suffix()}"

    def manifest_key(self, job: str) -> str:
        """Object key of the manifest."""
        return f"rlc/{job}/{self.epoch}/{self.version}/full/manifest{self._suffix()}"

    def _suffix(self) -> str:
        return f".{self.number}" if self.number else ""

    def same(self, other: Attempt) -> bool:
        """Whether both write the same keys."""
        return (self.epoch, self.version, self.number) == (other.epoch, other.version, other.number)


@dataclass(frozen=True, slots=True)
class Published:
    """A version that exists, and what its manifest must look like."""

    attempt: Attempt
    manifest_bytes: int
    manifest_checksum: int


@dataclass(frozen=True, slots=True)
class Head:
    """``version`` -1: nothing published in this epoch. ``floor``: what the run was rolled back to."""

    epoch: int = 0
    version: int = -1
    floor: int = 0
    published: tuple[Published, ...] = ()
    pending: tuple[Attempt, ...] = ()
    garbage: tuple[Attempt, ...] = ()
    tries: tuple[tuple[int, int], ...] = ()  # (version, attempts so far) of versions not committed yet

    def find(self, version: int) -> Published | None:
        """The published version, or None."""
        return next((item for item in self.published if item.attempt.version == version), None)


def head_key(job: str) -> str:
    """Where the head is in the metadata store."""
    return f"rlc/{job}/head"


def open_epoch(head: Head, floor: int) -> Head:
    """A new history: nothing is published, everything before is garbage."""
    left = tuple(item.attempt for item in head.published) + head.pending
    return Head(epoch=head.epoch + 1, floor=floor, garbage=head.garbage + left)


def begin(head: Head, epoch: int, version: int) -> tuple[Head, Attempt]:
    """Record an attempt before anything of it is written."""
    _check_alive(head, epoch, version)
    tries = dict(head.tries)
    number = tries.get(version, 0)
    tries[version] = number + 1
    attempt = Attempt(epoch, version, number, RESERVE_BUCKETS)
    return replace(head, pending=(*head.pending, attempt), tries=tuple(sorted(tries.items()))), attempt


def reserve(head: Head, attempt: Attempt) -> tuple[Head, Attempt]:
    """Let an attempt write ``RESERVE_BUCKETS`` more buckets."""
    _check_alive(head, attempt.epoch, attempt.version)
    more = replace(attempt, buckets=attempt.buckets + RESERVE_BUCKETS)
    return replace(head, pending=tuple(more if item.same(attempt) else item for item in head.pending)), more


def commit(head: Head, done: Published, keep: int) -> Head:
    """Move the version pointer. Committing twice is harmless; what falls out of the last ``keep`` becomes garbage."""
    mine = done.attempt
    present = head.find(mine.version)
    if head.epoch == mine.epoch and present is not None and present.attempt.same(mine):
        return head
    _check_alive(head, mine.epoch, mine.version)
    versions = (*head.published, done)
    beaten = tuple(item for item in head.pending if item.version <= mine.version and not item.same(mine))
    return replace(
        head,
        version=mine.version,
        published=versions[-keep:],
        pending=tuple(item for item in head.pending if item.version > mine.version),
        garbage=head.garbage + tuple(item.attempt for item in versions[:-keep]) + beaten,
        tries=tuple(item for item in head.tries if item[0] > mine.version),
    )


def discard(head: Head, attempt: Attempt) -> Head:
    """Give an attempt up: its objects are garbage from now on."""
    if any(item.attempt.same(attempt) for item in head.published):
        return head
    return replace(
        head,
        pending=tuple(item for item in head.pending if not item.same(attempt)),
        garbage=(*(item for item in head.garbage if not item.same(attempt)), attempt),
    )


def drop_garbage(head: Head, removed: tuple[Attempt, ...]) -> Head:
    """Forget garbage whose objects are gone."""
    return replace(head, garbage=tuple(item for item in head.garbage if item not in removed))


def _check_alive(head: Head, epoch: int, version: int) -> None:
    if head.epoch != epoch:
        detail = f"epoch {epoch} was replaced by epoch {head.epoch}: another run publishes under this job name"
        raise VersionTakenError("epoch_replaced", detail)
    if version <= head.version:
        detail = (
            f"version {version}: epoch {epoch} is at version {head.version} already (on resume, call rollback first)"
        )
        raise VersionTakenError("version_taken", detail)
    if version < head.floor:
        raise VersionTakenError("version_taken", f"version {version} is before {head.floor}, where this epoch starts")


def encode_head(head: Head) -> bytes:
    """The value that is stored."""

    def flat(item: Attempt) -> list[int]:
        return [item.epoch, item.version, item.number, item.buckets]

    packed: bytes = msgpack.packb(
        {
            "format": FORMAT,
            "epoch": head.epoch,
            "version": head.version,
            "floor": head.floor,
            "published": [
                [*flat(item.attempt), item.manifest_bytes, item.manifest_checksum] for item in head.published
            ],
            "pending": [flat(item) for item in head.pending],
            "garbage": [flat(item) for item in head.garbage],
            "tries": [list(item) for item in head.tries],
        }
    )
    return packed


def decode_head(value: bytes) -> Head:
    """Strict: anything unexpected is a CorruptWeightsError."""
    try:
        data: dict[str, Any] = msgpack.unpackb(value)
        if data["format"] != FORMAT:
            raise CorruptWeightsError("format", f"head record format {data['format']!r}, this version reads {FORMAT}")
        epoch, version, floor = _integers([data["epoch"], data["version"], data["floor"]], 3)
        published = [_integers(row, 6) for row in data["published"]]
        return Head(
            epoch=epoch,
            version=version,
            floor=floor,
            published=tuple(Published(Attempt(*row[:4]), row[4], row[5]) for row in published),
            pending=tuple(Attempt(*_integers(row, 4)) for row in data["pending"]),
            garbage=tuple(Attempt(*_integers(row, 4)) for row in data["garbage"]),
            tries=tuple((row[0], row[1]) for row in (_integers(row, 2) for row in data["tries"])),
        )
    except (ValueError, TypeError, KeyError, IndexError, msgpack.UnpackException) as error:
        raise CorruptWeightsError("format", f"the head record cannot be read: {error!r}") from error


def _integers(row: list[Any], count: int) -> list[int]:
    if len(row) != count or any(type(item) is not int for item in row):
        raise ValueError(f"{count} integers expected, got {row!r}")
    return row
