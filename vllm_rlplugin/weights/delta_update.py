"""From the version that is live to another one by differences, without a second copy of the weights: what to write where.

Runs while the model generates: it reads live weights, which nobody writes then, and writes nothing. Guarantees of
:func:`follow`:

* It starts from what is live and from nothing else: epoch, version and content of :class:`DeltaBase` are those that the first
  difference names. Of a shard whose digest did not change nothing is fetched.
* It keeps places, old and new values (:class:`~vllm_rlplugin.weights.slice_edits.SliceEdits`): memory as large as the
  change. To prove what will be there it makes one shard at a time, and drops it.
* On a host: of a shard that lies wholly in this rank, the live values with the change in them have the digest that was
  published.
* Of a shard that lies here only in part no published digest can be computed here; and of one in a device's memory only by a
  copy of it to the host, which would be most of the model for each update. Its bytes are those that were published
  (checksum and digest of the encoded shard), what they are applied to has the digest that was taken when it was loaded, the
  steps are exact, and what the update must find in the model afterwards is the digest of the outcome.
* Tensors that cannot be followed in place (:class:`~vllm_rlplugin.weights.element_places.LivePlaces`: cast, for example)
  have their published values in a :class:`~orchestrator.transfer.HostedWeights`, which holds these tensors only; they are
  compared with what is live.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from orchestrator.transfer import CorruptWeightsError, DeltaCodec, HostedWeights, Region, StoredManifest, Subscriber
from orchestrator.transfer.bucket import Bytes
from orchestrator.transfer.delta.delta_codec import ShardEdit
from orchestrator.transfer.job_head import FULL
from orchestrator.transfer.shard_routing import Box, box_elements, box_of, box_shape, shard_label
from vllm_rlplugin.weights.checkpoint_mapping import CheckpointLayout, CheckpointMapping, Fill, Slice
from vllm_rlplugin.weights.digests import digest_for, digest_of_parts, xxh3
from vllm_rlplugin.weights.element_places import LivePlace, LivePlaces, cover_shard
from vllm_rlplugin.weights.slice_edits import ScratchMemory, SliceEdits

CHUNK_BYTES = 16 << 20  # of a slice at a time, while its digest is made


@dataclass(frozen=True, slots=True, eq=False)
class WeightsOrigin:
    """Which weights: a version within its epoch, and the published digests of the shards that this rank has in place."""

    epoch: int
    version: int
    content: int
    shards: Mapping[str, int]  # by label


@dataclass(frozen=True, slots=True, eq=False)
class DeltaBase:
    """What is live, verified: what a difference is applied to."""

    origin: WeightsOrigin
    mapping: CheckpointMapping
    digests: Mapping[Slice | Fill, int]  # of the live slices


@dataclass(frozen=True, slots=True, eq=False)
class DigestProof:
    """A digest that a part of the live model must have after the update."""

    slice: Slice
    view: torch.Tensor
    digest: int


@dataclass(slots=True, eq=False)
class DeltaUpdate:
    """What the update has to do."""

    base: DeltaBase
    edits: list[SliceEdits]
    proofs: list[DigestProof] = field(default_factory=list)
    digests: dict[Slice | Fill, int] = field(default_factory=dict)  # of the touched slices, afterwards

    @property
    def tensors(self) -> int:
        """Checkpoint tensors of which something changes here."""
        return len({item.slice.tensor for item in self.edits})

    @property
    def positions(self) -> int:
        """Live elements that change."""
        return sum(item.index.size for item in self.edits)

    @property
    def bytes(self) -> int:
        """Memory held."""
        return sum(item.bytes for item in self.edits)


def make_origin(manifest: StoredManifest, places: Mapping[int, Sequence[LivePlace]]) -> WeightsOrigin:
    """What is live once this version is."""
    shards = {shard_label(manifest.shards[number]): manifest.pieces[number].digest for number in places}
    return WeightsOrigin(manifest.epoch, manifest.version, manifest.content(), shards)


class DeltaBuilder:
    """One version on its way to where it will live. ``check`` is called before every shard and may raise to give up."""

    def __init__(
        self, base: DeltaBase, places: LivePlaces, codec: DeltaCodec, device: torch.device, check: Callable[[], None]
    ):
        self.fetched_bytes = 0
        self._base = base
        self._places = places
        self._codec = codec
        self._device = device
        self._check = check
        self._digest = digest_for(device)
        self._parts = digest_of_parts(device)
        self._scratch = ScratchMemory(device)
        self._edits: dict[Slice, SliceEdits] = {}
        self._changed: dict[str, list[LivePlace]] = {}  # by the label of a shard that came
        self._expected: dict[str, int] = {}  # its published digest, of the last version that it came with
        self._proofs: dict[Slice, list[DigestProof]] = {}  # of the shards that came
        self._update = DeltaUpdate(base, [])

    def apply_chain(self, subscriber: Subscriber, chain: Sequence[StoredManifest]) -> None:
        """Take in differences, in their order. Raises CorruptWeightsError or RelayError."""
        digests = dict(self._base.origin.shards)
        for manifest in chain:
            if manifest.base_version == FULL:
                raise CorruptWeightsError("chain", f"version {manifest.version} is no difference")
            places = self._places.places_of(manifest.shards)
            origin = make_origin(manifest, places)
            if origin.shards.keys() != digests.keys():
                detail = f"version {manifest.version} is cut differently from its base {manifest.base_version}"
                raise CorruptWeightsError("layout", detail)
            # What has the digest of the base is the base: nothing to fetch.
            needed = [
                number for number in places if manifest.pieces[number].digest != digests[_label(manifest, number)]
            ]
            for number, stored in subscriber.fetch_shards(manifest, needed):
                self._check()
                self._apply_stored(manifest, number, stored, places[number])
            for item in self._edits.values():
                item.end_difference()
            self.fetched_bytes += sum(manifest.pieces[number].length for number in needed)
            digests.update(origin.shards)

    def compare_resident(self, resident: HostedWeights, published: CheckpointLayout, regions: Iterable[Region]) -> None:
        """Take in what a resident holds of tensors that cannot be followed in place: what differs from what is live."""
        for region in regions:
            self._check()
            spec = published[region.tensor]
            part = torch.from_numpy(resident.region(region)).view(spec.dtype).view(box_shape(region.box))
            for item in self._base.mapping.slices_of(region.tensor):
                self._compare_slice(item, spec.shape, region.box, part)

    def prove_shards(self) -> DeltaUpdate:
        """Make sure of what will be live. Raises CorruptWeightsError."""
        update = self._update
        partial: dict[Slice, None] = {}
        for name, places in self._changed.items():
            self._check()
            if not self._prove_shard(name, places):
                partial.update(dict.fromkeys(place.slice for place in places))
        for item in partial:
            self._check()
            self._compare_base(item)
        for item, edits in self._edits.items():
            if edits.index.size:
                self._check()
                update.edits.append(edits)
                self._expect_digests(item, edits)
        return update

    def _expect_digests(self, item: Slice, edits: SliceEdits) -> None:
        """What the update must find in a slice: its shards where each of them lies in one piece, else all of it at once."""
        update = self._update
        if item not in update.digests:
            chunks = (edits.predict_view(chunk, self._scratch) for chunk in _chunks(item.target))
            update.digests[item] = self._parts(chunks)
        proofs = self._proofs.get(item, [])
        if not proofs or any(not proof.view.is_contiguous() for proof in proofs):
            proofs = [DigestProof(item, item.target, update.digests[item])]
        update.proofs += proofs

    def _apply_stored(self, manifest: StoredManifest, number: int, stored: Bytes, places: list[LivePlace]) -> None:
        """Where a stored shard changes what, from what is there now."""
        key = manifest.shards[number]
        spans = [place.position_range() for place in places]
        start, stop = min(span[0] for span in spans), max(span[1] for span in spans)
        width = places[0].view.element_size()
        for edit in self._codec.edits(key.encoding, stored, box_elements(box_of(key)), width, start, stop):
            for place in places:
                self._edit_place(place, edit)
        self._changed[shard_label(key)] = places
        self._expected[shard_label(key)] = manifest.pieces[number].digest

    def _edit_place(self, place: LivePlace, edit: ShardEdit) -> None:
        chosen, index = place.locate(edit.positions)
        if index.size:
            self._edits_of(place.slice).add_change(index, edit.select(chosen).new_values)

    def _edits_of(self, item: Slice) -> SliceEdits:
        found = self._edits.get(item)
        if found is None:
            found = self._edits[item] = SliceEdits(item)
        return found

    def _compare_slice(self, item: Slice, shape: tuple[int, ...], box: Box, part: torch.Tensor) -> None:
        if 0 in item.size:
            return
        made = torch.empty(item.target.size(), dtype=item.target.dtype)
        made.copy_(item.cut_box(shape, box, part))  # cast as vLLM's loader casts
        edits = self._edits_of(item)
        edits.replace_values(made)
        if edits.index.size:
            self._update.digests[item] = self._digest(made.to(self._device))

    def _prove_shard(self, name: str, places: list[LivePlace]) -> bool:
        """Whether a shard was proved by its published digest, with a copy of it that is dropped at once: on a host, where this
        rank has all of it."""
        if self._digest is not xxh3:
            return False
        whole = cover_shard(places)
        if len(whole) > 1:
            assembled = torch.empty(box_shape(box_of(whole[0].key)), dtype=whole[0].view.dtype, device=self._device)
            for place in whole:
                assembled[tuple(slice(*bounds) for bounds in place.source)] = self._predict_place(place)
            self._compare_digest(name, xxh3(assembled))
        for place in places:
            made = self._predict_place(place)
            found = xxh3(made)
            if place.has_whole_shard:
                self._compare_digest(name, found)
            self._proofs.setdefault(place.slice, []).append(DigestProof(place.slice, place.view, found))
            if _same(place.view, place.slice.target):
                self._update.digests[place.slice] = found
        return bool(whole)

    def _predict_place(self, place: LivePlace) -> torch.Tensor:
        return self._edits_of(place.slice).predict_view(place.view, self._scratch)

    def _compare_digest(self, name: str, found: int) -> None:
        expected = self._expected[name]
        if found != expected:
            detail = f"tensor {name}: xxh3-64 {found:016x} where it lives, published {expected:016x}"
            raise CorruptWeightsError("digest", detail)

    def _compare_base(self, item: Slice) -> None:
        """What no published digest covers must be live as it was loaded."""
        found, expected = self._parts(_chunks(item.target)), self._base.digests[item]
        if found != expected:
            detail = f"tensor {item.tensor} in {item.parameter}: digest {found:016x}, loaded was {expected:016x}"
            raise CorruptWeightsError("base", detail)


def _label(manifest: StoredManifest, number: int) -> str:
    return shard_label(manifest.shards[number])


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two views of one parameter are the same elements in the same order."""
    return (one.numel(), one.storage_offset()) == (other.numel(), other.storage_offset()) and (
        (one.size(), one.stride()) == (other.size(), other.stride()) or (one.is_contiguous() and other.is_contiguous())
    )


def _chunks(target: torch.Tensor) -> Iterator[torch.Tensor]:
    """The target in parts, in its order; all but the last have a multiple of 8 elements."""
    if target.dim() == 0 or target.numel() * target.element_size() <= CHUNK_BYTES:
        yield target
        return
    row = target[0].numel() * target.element_size()
    rows = max(CHUNK_BYTES // row // 8, 1) * 8
    for begin in range(0, target.size(0), rows):
        yield target[begin : begin + rows]
