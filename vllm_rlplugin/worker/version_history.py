"""``History``: within which weight versions are comparable. One epoch of one job on one relay.

Guarantees: two runs never share a history, nor do a run and its own resumption (which opens a new epoch), even if job,
folder and version numbers are the same; connecting the same relay in the same epoch again goes on with the present one.
Numbers count from 0 in one server's life and never return, so that they can stand in cache salts.
"""

from __future__ import annotations

import asyncio
from dataclasses import asdict, dataclass, replace
from typing import Any

from orchestrator.api import CommandError, CoserveError, RetryableError
from orchestrator.transfer import RelayEndpoint, open_metadata
from orchestrator.transfer.job_head import decode_head, head_key

NOTHING_LOADED = -1  # the version until the first update of a history


@dataclass(frozen=True, slots=True)
class VersionHistory:
    """``job`` empty: no relay was connected yet. ``relay``: its kind and address. ``epoch`` 0: nothing was published
    there when it was connected."""

    number: int = 0
    job: str = ""
    relay: tuple[str, str] = ("", "")
    metadata: str = ""
    epoch: int = 0

    async def next_history(self, endpoint: RelayEndpoint) -> VersionHistory:
        """The history that ``endpoint`` belongs to now. The first relay of a server continues history 0.

        Raises CommandError ``invalid_request`` when its metadata cannot be opened, RetryableError when it cannot be read.
        """
        try:
            epoch = await asyncio.to_thread(present_epoch, endpoint)
        except RetryableError:
            raise
        except CoserveError as error:
            raise CommandError("invalid_request", str(error)) from error
        found = replace(
            self, job=endpoint.job, relay=(endpoint.kind, endpoint.master), metadata=endpoint.metadata, epoch=epoch
        )
        return replace(found, number=self.number + 1) if self.job and found != self else found

    def to_dict(self) -> dict[str, Any]:
        """As the status shows it."""
        found = asdict(self)
        del found["relay"]
        return found


def present_epoch(endpoint: RelayEndpoint) -> int:
    """Of the job, read from its metadata; 0: it never published. Blocks for a read of a file."""
    metadata = open_metadata(endpoint)
    try:
        present = metadata.get(head_key(endpoint.job))
    finally:
        metadata.close()
    return 0 if present is None else decode_head(present[0]).epoch
