"""What an engine rank hosts of the weights, in host memory, and how it moves from version to version.

Guarantees:

* :meth:`HostedWeights.advance` is all or nothing: it ends at the new version, every shard with the digest that was published, or
  it raises and everything is as it was, bit for bit (differences are applied in place, with an undo log).
* Only the shards that the regions intersect are fetched and kept; of a difference, only those whose digest changed.
* A base that is missing needs no care by the caller: from what is held by differences where the chain is there and shorter,
  otherwise from a full snapshot and the chain after it. Where a difference turns out to be gone, or is not what was
  published, the snapshot is tried once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from orchestrator.api import ShardKey
from orchestrator.transfer.bucket import Bytes
from orchestrator.transfer.job_head import FULL
from orchestrator.transfer.manifest import StoredManifest, shard_bytes
from orchestrator.transfer.shard_codec import RAW, ShardCodec, apply_stored, decode_stored
from orchestrator.transfer.shard_routing import (
    Region,
    ShardIndex,
    box_elements,
    box_of,
    box_shape,
    copy_part,
    shard_label,
)
from orchestrator.transfer.subscriber import Subscriber
from orchestrator.transfer.transfer_errors import CorruptWeightsError, RelayError


class HostedWeights:
    """One rank's part. ``regions``: what it hosts; None: everything that is published. ``codec``: the subscriber's."""

    def __init__(
        self, subscriber: Subscriber, regions: Iterable[Region] | None = None, codec: ShardCodec | None = None
    ) -> None:
        self.version = -1  # nothing yet
        self.content = 0  # of the whole version, see StoredManifest.content
        self.fetched_bytes = 0  # of payload, by the last successful advance
        self._subscriber = subscriber
        self._regions = None if regions is None else list(regions)
        self._codec = codec
        self._epoch = 0
        self._shards: dict[str, Bytes] = {}  # by label
        self._digests: dict[str, int] = {}  # of these
        self._keys: list[ShardKey] = []  # of the whole version
        self._index: ShardIndex | None = None

    def advance(self, version: int, check: Callable[[], None] = lambda: None) -> frozenset[str]:
        """Move to a published version; returns the tensors that may have changed.

        ``check`` is called before every shard and may raise to give up. Raises CorruptWeightsError, or RelayError
        (retryable); nothing has moved then.
        """
        epoch = self._subscriber.epoch()
        held = self.version if epoch == self._epoch else -1  # numbers mean something within one epoch only
        if held == version:
            return frozenset()
        try:
            chain = self._subscriber.chain(version, held, self.content)
            changed = self._follow(chain, check)
        except (CorruptWeightsError, RelayError) as error:
            if held < 0 or (isinstance(error, RelayError) and error.reason != "missing"):
                raise
            chain = self._subscriber.chain(version)
            changed = self._follow(chain, check)
        self._epoch = epoch
        return changed

    def region(self, region: Region) -> Bytes:
        """The bytes of a region, contiguous: a copy. One of the regions, or of what lies inside of them."""
        if self._index is None:
            raise CorruptWeightsError("layout", f"tensor {region.tensor} is wanted, and no version was fetched yet")
        made: Bytes | None = None
        for part in self._index.parts(region):
            key = self._keys[part.shard]
            shard = self._shards.get(shard_label(key))
            if shard is None:
                raise CorruptWeightsError("layout", f"{shard_label(key)} is not held here, {region} needs it")
            held = box_shape(box_of(key))
            if made is None:
                itemsize = shard.nbytes // max(box_elements(box_of(key)), 1)
                made = np.empty(box_elements(region.box) * itemsize, dtype=np.uint8)
            copy_part(part, shard, held, made, box_shape(region.box))
        return np.empty(0, dtype=np.uint8) if made is None else made

    @property
    def bytes(self) -> int:
        """Memory held."""
        return sum(shard.nbytes for shard in self._shards.values())

    def _follow(self, chain: Sequence[StoredManifest], check: Callable[[], None]) -> frozenset[str]:
        """Fetch and apply a chain, all of it or nothing."""
        shards, digests = self._shards, dict(self._digests)
        fetched = 0
        changed: set[str] = set()
        undo: list[Callable[[], None]] = []
        try:
            for manifest in chain:
                hosted = self._hosted(manifest)
                needed = hosted
                if manifest.base_version == FULL:
                    shards, digests = self._load(manifest, hosted, check), {}
                else:
                    _check_cut(manifest, hosted, shards)
                    # What has the digest of the base is the base: nothing to fetch.
                    needed = [
                        number for number in hosted if manifest.pieces[number].digest != digests[_at(manifest, number)]
                    ]
                    for number, stored in self._subscriber.fetch_shards(manifest, needed):
                        check()
                        key, piece = manifest.shards[number], manifest.pieces[number]
                        take_back = apply_stored(self._codec, key, stored, shards[shard_label(key)], piece.digest)
                        if shards is self._shards:  # others are new, and dropped if this fails
                            undo.append(take_back)
                digests |= {_at(manifest, number): manifest.pieces[number].digest for number in needed}
                changed |= {manifest.shards[number].tensor for number in needed}
                fetched += sum(manifest.pieces[number].length for number in needed)
        except BaseException:
            for one in reversed(undo):
                one()
            raise
        last = chain[-1]
        self._shards, self._digests = shards, digests
        self._keys, self._index = list(last.shards), ShardIndex(last.shards)
        self.version, self.content, self.fetched_bytes = last.version, last.content(), fetched
        return frozenset(changed)

    def _hosted(self, manifest: StoredManifest) -> list[int]:
        if self._regions is None:
            return list(range(len(manifest.shards)))
        return ShardIndex(manifest.shards).needed_shards(self._regions)

    def _load(self, manifest: StoredManifest, needed: list[int], check: Callable[[], None]) -> dict[str, Bytes]:
        shards: dict[str, Bytes] = {}
        for number, stored in self._subscriber.fetch_shards(manifest, needed):
            check()
            key, piece = manifest.shards[number], manifest.pieces[number]
            length = stored.nbytes if key.encoding == RAW else shard_bytes(key)
            made = decode_stored(self._codec, key, stored, length, piece.digest)
            shards[shard_label(key)] = made.copy() if made is stored else made  # buffers of the relay are not kept
        return shards


def _at(manifest: StoredManifest, number: int) -> str:
    return shard_label(manifest.shards[number])


def _check_cut(manifest: StoredManifest, hosted: list[int], shards: dict[str, Bytes]) -> None:
    """A difference can be applied only to shards that were cut as its own."""
    strange = [_at(manifest, number) for number in hosted if _at(manifest, number) not in shards]
    if strange or len(hosted) != len(shards):
        detail = f"version {manifest.version} is cut differently from its base {manifest.base_version}"
        raise CorruptWeightsError("layout", f"{detail}: {', '.join(strange[:4])}")
