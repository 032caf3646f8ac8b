"""What readers took to have a version: one record in the metadata store, written by them, read by the publisher.

Guarantees: nobody compares clocks, a reader says how long it took; who says nothing of the newest two versions is forgotten, so
the record stays as large as the readers are many.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass

import msgpack

from orchestrator.api import MetadataStore
from orchestrator.transfer.job_head import update_record
from orchestrator.transfer.transfer_errors import CorruptWeightsError
from orchestrator.transfer.version_leases import MAX_SUBSCRIBERS

FORMAT = 1


@dataclass(frozen=True, slots=True)
class FetchTime:
    """One reader's last version. ``whole``: not as a difference. From when it was asked until it was verified."""

    epoch: int
    version: int
    whole: bool
    microseconds: int


def fetches_key(job: str) -> str:
    """Where the record is in the metadata store."""
    return f"rlc/{job}/fetches"


def report_fetch(metadata: MetadataStore, job: str, name: str, took: FetchTime) -> None:
    """By the reader of that ``name``: two control messages. Raises RelayError."""

    def change(found: dict[str, FetchTime]) -> dict[str, FetchTime]:
        kept = {key: one for key, one in found.items() if one.epoch == took.epoch and one.version >= took.version - 1}
        return kept if len(kept) >= MAX_SUBSCRIBERS else {**kept, name: took}

    update_record(metadata, fetches_key(job), dict[str, FetchTime](), decode_fetches, encode_fetches, change)


def slowest_fetch(metadata: MetadataStore, job: str, epoch: int, version: int, whole: bool) -> float | None:
    """Seconds of the slowest reader that got this version in this form; None: nobody says. Raises RelayError."""
    present = metadata.get(fetches_key(job))
    found = {} if present is None else decode_fetches(present[0])
    took = [
        one.microseconds for one in found.values() if (one.epoch, one.version, one.whole) == (epoch, version, whole)
    ]
    return max(took) / 1e6 if took else None


def encode_fetches(found: dict[str, FetchTime]) -> bytes:
    """The value that is stored."""
    packed: bytes = msgpack.packb({"format": FORMAT, "fetches": {name: astuple(one) for name, one in found.items()}})
    return packed


def decode_fetches(value: bytes) -> dict[str, FetchTime]:
    """Strict: anything unexpected is a CorruptWeightsError."""
    try:
        data = msgpack.unpackb(value)
        if data["format"] != FORMAT:
            raise CorruptWeightsError("format", f"record format {data['format']!r}, this version reads {FORMAT}")
        found: dict[str, FetchTime] = {}
        for name, row in data["fetches"].items():
            if not isinstance(name, str) or [type(item) for item in row] != [int, int, bool, int]:
                raise ValueError(f"bad row {row!r:.100}")
            found[name] = FetchTime(*row)
        return found
    except (ValueError, TypeError, KeyError, AttributeError, msgpack.UnpackException) as error:
        raise CorruptWeightsError("format", f"the record of fetches cannot be read: {error!r}") from error
