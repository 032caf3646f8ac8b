"""The codec that jobs use: :mod:`orchestrator.transfer.delta` behind the protocol's seam.

Guarantees: what one side encodes the other applies bit for bit, or CorruptWeightsError is raised and the base is as it was;
a shard whose encoding would not be smaller travels raw.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from orchestrator.api import ConfigError
from orchestrator.transfer import delta
from orchestrator.transfer.codecs import RAW
from orchestrator.transfer.errors import CorruptWeightsError
from orchestrator.transfer.wire import Bytes


class DeltaCodec:
    """Implements :class:`orchestrator.transfer.codecs.Codec`. ``threads``: of one call.

    ``compress_full``: full snapshots are entropy-coded, too, which costs time on both sides; else they travel raw.
    """

    def __init__(self, *, threads: int = 1, compress_full: bool = False) -> None:
        if type(threads) is not int or threads < 1:
            raise ConfigError("threads", threads, "must be an integer of 1 or more")
        self._threads = threads
        self._compress_full = compress_full

    def encode(self, old: Bytes | None, new: Bytes, dtype: str) -> tuple[str, Bytes]:
        if old is None and not self._compress_full:
            return RAW, new
        change = delta.encode(old, new, dtype, threads=self._threads)
        return (RAW, new) if change.data.nbytes >= new.nbytes else (change.encoding, change.data)

    def apply(self, encoding: str, data: Bytes, base: Bytes) -> Callable[[], None]:
        try:
            found = delta.open_change(data).header.encoding
            if found != encoding:
                raise CorruptWeightsError("format", f"a change of encoding {found}, the manifest says {encoding}")
            log = delta.apply(data, base, threads=self._threads)
        except ConfigError as error:  # the header does not fit this shard
            raise CorruptWeightsError("layout", str(error)) from error
        return partial(delta.undo, log)
