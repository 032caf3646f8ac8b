"""Which versions stay on the relay, when the next full snapshot is due, and how a reader gets to a version. Pure functions.

Guarantees of :func:`retained_versions`: the last ``keep`` versions stay in every form they were published in, and can
be read from nothing (each with its chain of differences back to a full snapshot); a live subscriber can go on from the
version it holds by differences, as long as the chain was never broken; nothing else stays. Retention never makes
anything unreadable that it says is kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from orchestrator.api import ConfigError
from orchestrator.transfer.job_head import FULL, PublishedVersion
from orchestrator.transfer.transfer_errors import RelayError


@dataclass(frozen=True, slots=True)
class VersionHolder:
    """A live subscriber: the version it has (-1: none), and the one it fetches now (-1: none). Neither: it has found no
    chain to go along, and waits for a full snapshot."""

    version: int
    fetching: int = -1

    @property
    def waits_for_snapshot(self) -> bool:
        """For a full snapshot."""
        return self.version < 0 and self.fetching < 0


def retained_versions(
    published: tuple[PublishedVersion, ...], keep: int, holders: Iterable[VersionHolder] = ()
) -> tuple[PublishedVersion, ...]:
    """What of ``published`` (ordered by version) is kept. ``keep``: versions, 1 or more."""
    versions = sorted({item.attempt.version for item in published})
    wanted = versions[-keep:]
    kept = {item for item in published if item.attempt.version in wanted}
    holding = list(holders)
    for target in (*wanted, *(holder.fetching for holder in holding)):
        kept.update(from_snapshot(published, target) or ())
    # Who speaks before an epoch's first version has nothing to keep.
    for held in {holder.version for holder in holding} if versions else ():
        kept.update(by_differences(published, held, versions[-1]) or ())
    return tuple(item for item in published if item in kept)


def choose_route(published: Sequence[PublishedVersion], held: int, target: int) -> list[PublishedVersion]:
    """What to fetch, in order, to get from version ``held`` (-1: nothing) to ``target``: the way with fewer bytes.

    Raises RelayError "missing" when there is none.
    """
    if held == target:
        return []
    ways = [by_differences(published, held, target) if held >= 0 else None, from_snapshot(published, target)]
    found = [way for way in ways if way is not None]
    if not found:
        there = [(item.attempt.version, item.attempt.kind) for item in published]
        raise RelayError("missing", f"version {target}: no chain leads to it from a full snapshot; there are {there}")
    return min(found, key=lambda way: sum(item.payload_bytes for item in way))


def from_snapshot(published: Sequence[PublishedVersion], target: int) -> list[PublishedVersion] | None:
    """The nearest full snapshot and the chain of differences after it."""
    way: list[PublishedVersion] = []
    while True:
        entries = [item for item in published if item.attempt.version == target]
        entry = min(entries, key=lambda item: item.attempt.base, default=None)  # FULL is the smallest
        if entry is None:
            return None
        way.insert(0, entry)
        if entry.attempt.base == FULL:
            return way
        target = entry.attempt.base  # smaller than its version, so this ends


def by_differences(published: Sequence[PublishedVersion], held: int, target: int) -> list[PublishedVersion] | None:
    """The chain from ``held`` to ``target``."""
    way: list[PublishedVersion] = []
    while target > held:
        entry = next((i for i in published if i.attempt.version == target and i.attempt.base != FULL), None)
        if entry is None:
            return None
        way.insert(0, entry)
        target = entry.attempt.base
    return way if target == held else None


@dataclass(frozen=True, slots=True)
class SnapshotPolicy:
    """When a full snapshot is published beside the difference.

    ``every``: after so many differences at the latest (0: with every version, no differences at all). ``weight``: as soon as
    the chain that a newcomer must fetch after the snapshot has this share of the snapshot's bytes.
    """

    every: int = 32
    weight: float = 1.0

    def __post_init__(self) -> None:
        if type(self.every) is not int or self.every < 0:
            raise ConfigError("relay.snapshot_every", self.every, "must be an integer of 0 or more")
        if not self.weight > 0:
            raise ConfigError("relay.snapshot_weight", self.weight, "must be above 0")

    def snapshot_due(self, published: Sequence[PublishedVersion], newest: int) -> bool:
        """Whether the version after ``newest`` needs a full snapshot."""
        way = from_snapshot(published, newest)
        if way is None or self.every == 0:
            return True
        snapshot, *chain = way
        return len(chain) >= self.every or sum(item.payload_bytes for item in chain) >= (
            self.weight * snapshot.payload_bytes
        )
