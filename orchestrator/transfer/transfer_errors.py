"""The errors of weight transfer. Each carries ``reason``, a short stable word to count and to test by.

* :class:`CorruptWeightsError` : bytes arrived that are not what was published. Nothing of them may be used.
* :class:`RelayError` : the relay (or the metadata store) could not serve; the same call may succeed later.
* :class:`VersionTakenError` : another publisher was first, or this one was replaced by a newer epoch. Never retried.
"""

from __future__ import annotations

from orchestrator.api import CoserveError, RetryableError, RunError


class TransferError(CoserveError):
    """``reason`` and ``detail`` of one of the errors below."""

    form = "{}: {}"

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(self.form.format(reason, detail))
        self.reason = reason
        self.detail = detail


class CorruptWeightsError(TransferError):
    """What arrived is not what was published. ``reason``: truncated, format, checksum, identity, layout, digest, manifest,
    chain, signature, replayed."""

    form = "corrupt weights ({}): {}"


class RelayError(TransferError, RetryableError):
    """The relay cannot serve now. ``reason``: relay_full, missing, exists, not_stored, leased, transfer, unreachable,
    buffer, closed, setup, unknown; of the metadata store: metadata_busy, metadata_contention,
    metadata_unreachable."""


class VersionTakenError(TransferError, RunError):
    """This publisher lost. ``reason``: version_taken (somebody published it), epoch_replaced (a newer run owns the job)."""
