"""The codec that the transfer protocol takes: encode a shard, apply it in place, say how to undo that."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from orchestrator.transfer.delta import codec
from orchestrator.transfer.delta.format import ENCODINGS, RAW, Bytes, open_change
from orchestrator.transfer.errors import CorruptWeightsError

PLAIN = "raw"  # the protocol's name for a shard that travels as its own bytes, without a header


class DeltaCodec:
    """Stateless; one may serve many threads. ``threads``: how many cores one shard may use."""

    def __init__(self, threads: int = 1) -> None:
        self._threads = threads

    def encode(self, old: Bytes | None, new: Bytes, dtype: str) -> tuple[str, Bytes]:
        """(encoding, bytes) of the change from ``old`` (None: nothing is known) to ``new``, the smallest there is."""
        change = codec.encode(old, new, dtype, threads=self._threads)
        return (PLAIN, new) if change.encoding == RAW else (change.encoding, change.data)

    def apply(self, encoding: str, data: Bytes, base: Bytes) -> Callable[[], None]:
        """Make ``base`` the new values, in place; returns how to undo that. Raises CorruptWeightsError, base as it was."""
        if encoding not in ENCODINGS:
            raise CorruptWeightsError("format", f"no encoding {encoding!r:.100}; known: {', '.join(ENCODINGS)}")
        if (found := open_change(data).header.encoding) != encoding:
            raise CorruptWeightsError("identity", f"the change is {found}, its key says {encoding}")
        return partial(codec.undo, codec.apply(data, base, threads=self._threads))
