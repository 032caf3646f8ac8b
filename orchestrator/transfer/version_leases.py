"""Who holds which version: one record in the metadata store, kept by the subscribers, read by the collector.

Guarantees: nobody compares clocks. A subscriber says only how long its word is good for and counts a beat with every word;
the collector watches, on its own clock, whether the beat moves. So clocks may disagree by any amount, a subscriber that died
is forgotten after its lease as the collector measures it, and a collector that starts anew gives everybody a whole lease.
A lease only keeps objects from being collected: a subscriber whose lease ran out finds its way from a full snapshot.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgpack

from orchestrator.api import MetadataStore
from orchestrator.transfer.job_head import update_record
from orchestrator.transfer.retention import VersionHolder
from orchestrator.transfer.transfer_errors import CorruptWeightsError, RelayError

FORMAT = 1
MAX_SUBSCRIBERS = 65536
MAX_NAME = 256
MAX_SECONDS = 7 * 24 * 3600


@dataclass(frozen=True, slots=True)
class VersionLease:
    """A subscriber's last word. ``seconds``: how long it is good for, from when somebody sees it."""

    epoch: int
    holder: VersionHolder
    beat: int
    seconds: int


def leases_key(job: str) -> str:
    """Where the record is in the metadata store."""
    return f"rlc/{job}/subscribers"


def renew_lease(metadata: MetadataStore, job: str, name: str, epoch: int, holder: VersionHolder, seconds: int) -> None:
    """Take or renew the lease of ``name``: two control messages. Raises RelayError."""

    def change(leases: dict[str, VersionLease]) -> dict[str, VersionLease]:
        before = leases.get(name)
        if before is None and len(leases) >= MAX_SUBSCRIBERS:
            raise RelayError("too_many_subscribers", f"job {job} has {len(leases)} subscribers")
        return {**leases, name: VersionLease(epoch, holder, before.beat + 1 if before else 0, seconds)}

    _update(metadata, job, change)


def read_leases(metadata: MetadataStore, job: str) -> dict[str, VersionLease]:
    """All leases, dead ones included."""
    present = metadata.get(leases_key(job))
    return {} if present is None else decode_leases(present[0])


class LeaseWatch:
    """The collector's view. ``clock``: seconds on a monotonic clock."""

    def __init__(self, metadata: MetadataStore, job: str, clock: Callable[[], float]) -> None:
        self._metadata = metadata
        self._job = job
        self._clock = clock
        self._seen: dict[str, tuple[VersionLease, float]] = {}  # the last word, and when it was first seen here

    def live_holders(self, epoch: int) -> list[VersionHolder]:
        """What the live subscribers of an epoch hold; leases that ran out are dropped from the record."""
        now = self._clock()
        leases = read_leases(self._metadata, self._job)
        seen = {name: (lease, self._since(name, lease, now)) for name, lease in leases.items()}
        dead = frozenset(name for name, (lease, since) in seen.items() if now - since > lease.seconds)
        self._seen = {name: item for name, item in seen.items() if name not in dead}
        if dead:
            words = {name: leases[name] for name in dead}
            # One that speaks in this very moment stays.
            _update(self._metadata, self._job, lambda now: {n: word for n, word in now.items() if words.get(n) != word})
        return [lease.holder for lease, _ in self._seen.values() if lease.epoch == epoch]

    def _since(self, name: str, lease: VersionLease, now: float) -> float:
        before, since = self._seen.get(name, (None, now))
        return since if before == lease else now


def encode_leases(leases: dict[str, VersionLease]) -> bytes:
    """The value that is stored."""
    rows = {
        name: [lease.epoch, lease.holder.version, lease.holder.fetching, lease.beat, lease.seconds]
        for name, lease in leases.items()
    }
    packed: bytes = msgpack.packb({"format": FORMAT, "leases": rows})
    return packed


def decode_leases(value: bytes) -> dict[str, VersionLease]:
    """Strict: anything unexpected is a CorruptWeightsError."""
    try:
        data: dict[str, Any] = msgpack.unpackb(value)
        if data["format"] != FORMAT:
            raise CorruptWeightsError("format", f"lease record format {data['format']!r}, this version reads {FORMAT}")
        rows = data["leases"]
        if not isinstance(rows, dict) or len(rows) > MAX_SUBSCRIBERS:
            raise ValueError("no leases, or too many")
        leases: dict[str, VersionLease] = {}
        for name, (epoch, version, fetching, beat, seconds) in rows.items():
            numbers = (epoch, version, fetching, beat, seconds)
            if not isinstance(name, str) or any(type(number) is not int for number in numbers):
                raise ValueError(f"bad lease of {name!r:.100}")
            leases[name] = VersionLease(
                epoch, VersionHolder(version, fetching), beat, max(0, min(seconds, MAX_SECONDS))
            )
        return leases
    except (ValueError, TypeError, KeyError, AttributeError, msgpack.UnpackException) as error:
        raise CorruptWeightsError("format", f"the lease record cannot be read: {error!r}") from error


def _update(
    metadata: MetadataStore, job: str, change: Callable[[dict[str, VersionLease]], dict[str, VersionLease]]
) -> None:
    update_record(metadata, leases_key(job), dict[str, VersionLease](), decode_leases, encode_leases, change)
