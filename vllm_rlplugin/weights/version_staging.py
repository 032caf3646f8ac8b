"""Makes ready, while the model runs, what an update will copy: one version, from wherever its bytes come.

Guarantees:

* A :class:`StagedVersion` is complete and verified (checksums of the relay or of the sender, names and shapes of the model's
  checkpoint) and says which content it has.
* With a mapping only what this rank's slices are cut from is asked for, shard by shard, whatever the trainer's layout; only
  the slices are kept, cast to the parameter's dtype, each with the digest that the live slice must have after the update.
  On CPU the packed copies that layers compute with are made here, too: packing takes several times as long as copying.
* Without one, where the checkpoint's layout is known, nothing is staged: the version is read while it is loaded
  (:mod:`vllm_rlplugin.weights.layer_stream`).
* Nothing here writes to the model.
"""

from __future__ import annotations

import functools
import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from orchestrator.api import RetryableError, WeightManifest
from orchestrator.transfer import (
    DeltaCodec,
    HostedWeights,
    Region,
    StoredManifest,
    Subscriber,
)
from orchestrator.transfer.job_head import FULL, PublishedVersion
from orchestrator.transfer.shard_routing import RegionAssembler, box_shape, whole_box
from vllm_rlplugin.weights.checkpoint_mapping import CheckpointLayout, CheckpointMapping, TensorSpec
from vllm_rlplugin.weights.collective_receiver import Transmission
from vllm_rlplugin.weights.delta_update import DeltaBase, DeltaBuilder, DeltaUpdate, WeightsOrigin, make_origin
from vllm_rlplugin.weights.element_places import LivePlaces
from vllm_rlplugin.weights.layer_stream import LayerStream, Tensors, split_layers
from vllm_rlplugin.weights.rank_slices import PackedLayer, SliceCutter, StagedSlice

# ShardKey.dtype (numpy's and torch's common names) -> torch. What a checkpoint may hold; vLLM casts on load.
DTYPES: dict[str, torch.dtype] = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "float64": torch.float64,
    "int8": torch.int8,
    "int16": torch.int16,
    "int32": torch.int32,
    "int64": torch.int64,
    "uint8": torch.uint8,
}

_logger = logging.getLogger(__name__)

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
TIED_HEAD = "lm_head.weight"


@dataclass(frozen=True, slots=True, eq=False)
class StagingPlan:
    """What this rank wants of a version. No ``mapping``: whole tensors, for vLLM's own loader."""

    model: str  # for messages
    device: torch.device
    layout: CheckpointLayout | None  # None: not known yet; whatever is published is taken
    tied: bool  # the head is the embedding, so that a published lm_head is ignored unless the checkpoint has one
    mapping: CheckpointMapping | None


@dataclass(slots=True, eq=False)
class StagedVersion:
    """A verified version: with a mapping ``delta``, or ``pieces`` and what CPU layers pack of them; else ``layers``, verified as
    they come, or ``tensors``."""

    version: int
    checksum: str  # of its content, in hexadecimal: equal for equal weights, whatever way they came
    bytes: int  # as fetched
    plan: StagingPlan
    published: PublishedVersion | None = None  # as the metadata store had it when it was fetched
    sent: bool = False  # by the trainer: the relay need not have it
    pieces: list[StagedSlice] = field(default_factory=list)
    packed: list[PackedLayer] = field(default_factory=list)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)  # contiguous, of their whole shape
    layers: LayerStream | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    delta: DeltaUpdate | None = None  # by differences from what was live when it was made
    past_cache: str = ""  # what of it did not come from the cache of the site although there is one, and why
    origin: WeightsOrigin | None = None  # what differences of the next version can be applied to, once this one is live

    @property
    def staged_bytes(self) -> int:
        """Memory held, the packed copies not counted."""
        if self.delta is not None:
            return self.delta.bytes
        return sum(x.nbytes for x in (*(piece.source for piece in self.pieces), *self.tensors.values()))

    def can_follow(self, base: DeltaBase | None) -> bool:
        """Whether it can be put onto what is live."""
        return self.delta is None or self.delta.base is base


class VersionStaging:
    """One version on its way: what is fetched of it, and what is made of that. Refuses what does not fit the plan."""

    def __init__(self, manifest: WeightManifest, checksum: str, plan: StagingPlan, cancel: threading.Event) -> None:
        self.plan = plan
        self.version = manifest.version
        self._cancel = cancel
        self._started = time.perf_counter()
        self._cutting = self._packing = 0.0  # seconds; the one holds the other
        ignored = match_layout(manifest, plan)
        self._published = tensor_specs(manifest)
        if plan.mapping is None:
            boxes = {name: whole_box(spec.shape) for name, spec in self._published.items() if name not in ignored}
        else:
            boxes = plan.mapping.tensor_boxes(self._published)
        self.regions = [Region(name, box) for name, box in boxes.items()]
        self.places = None if plan.mapping is None else LivePlaces(plan.mapping, self._published)
        direct = set() if self.places is None else {*self.places.direct_tensors}
        self.kept = [region for region in self.regions if region.tensor not in direct]
        self._staged = StagedVersion(manifest.version, checksum, 0, plan)
        self._cutter = None if plan.mapping is None else SliceCutter(plan.mapping, plan.device)

    def check_wanted(self) -> None:
        """Raises RetryableError when it is not wanted any more."""
        if self._cancel.is_set():
            raise RetryableError(
                f"the fetch of weight version {self.version} was replaced by another, or given up for a release"
            )

    def from_snapshot(self, subscriber: Subscriber, manifest: StoredManifest) -> StagedVersion:
        """Nothing is kept but what the update needs."""
        with _own_stream(self.plan.device):
            self._add_snapshot(subscriber, manifest, self.regions)
            return self._finish()

    def by_layers(self, read: Callable[[Sequence[Region]], Tensors]) -> StagedVersion:
        """Nothing is fetched yet. ``read``: see :class:`LayerStream`."""
        self._staged.layers = LayerStream(split_layers(self.regions), read)
        specs = (self._published[region.tensor] for region in self.regions)
        self._staged.bytes = sum(math.prod(spec.shape) * spec.dtype.itemsize for spec in specs)
        return self._staged

    def read_layer(
        self, subscriber: Subscriber, manifest: StoredManifest, codec: DeltaCodec, regions: Sequence[Region]
    ) -> Tensors:
        """All tensors of a layer, verified. Raises CorruptWeightsError or RelayError."""
        if manifest.base_version == FULL:
            found = {
                region.tensor: self._tensor_of(region, data).clone()
                for region, data in subscriber.fetch_regions(manifest, regions)
            }
        else:
            made = HostedWeights(subscriber, regions, codec)
            made.advance(self.version)
            found = {region.tensor: self._tensor_of(region, made.region(region)) for region in regions}
        return [(region.tensor, found[region.tensor]) for region in regions]

    def from_anything(
        self, subscriber: Subscriber, manifest: StoredManifest, codec: DeltaCodec, kept: HostedWeights | None
    ) -> StagedVersion:
        """All of it, by whatever there is: a full snapshot, or one and the differences after it, put together here."""
        known = {region.tensor for region in self.kept}
        others = [region for region in self.regions if region.tensor not in known]
        with _own_stream(self.plan.device):
            if kept is not None:
                self._add_resident(kept, self.kept)
            if manifest.base_version == FULL:
                self._add_snapshot(subscriber, manifest, others)
            elif others:
                made = HostedWeights(subscriber, others, codec)
                made.advance(self.version, self.check_wanted)
                self._add_resident(made, others)
            if self.places is not None:
                self._staged.origin = make_origin(manifest, self.places.places_of(manifest.shards))
            return self._finish()

    def from_live(
        self,
        subscriber: Subscriber,
        codec: DeltaCodec,
        base: DeltaBase,
        chain: Sequence[StoredManifest],
        kept: HostedWeights | None,
    ) -> StagedVersion:
        """By differences to what is live. Nothing of this staging is touched when it raises."""
        places = self.places
        assert places is not None
        with _own_stream(self.plan.device):
            builder = DeltaBuilder(base, places, codec, self.plan.device, self.check_wanted)
            builder.apply_chain(subscriber, chain)
            fetched = time.perf_counter()
            if kept is not None:
                builder.compare_resident(kept, self._published, self.kept)
            delta = builder.prove_shards()
        last = chain[-1]
        received = builder.fetched_bytes + (0 if kept is None else kept.fetched_bytes)
        return StagedVersion(
            self.version,
            self._staged.checksum,
            received,
            self.plan,
            seconds={"fetch": fetched - self._started, "prove": time.perf_counter() - fetched},
            delta=delta,
            origin=make_origin(last, places.places_of(last.shards)),
        )

    def from_trainer(self, coming: Transmission) -> StagedVersion:
        """As from a snapshot; known by its content once all has come."""
        assembler = RegionAssembler(coming.shards, self.regions)

        def use(place: int, data: Bytes) -> None:
            self.check_wanted()
            for region, whole_region in assembler.add(place, data):
                self._add_tensor(region, whole_region)

        with _own_stream(self.plan.device):
            for region, data in assembler.empty:
                self._add_tensor(region, data)
            self._staged.checksum = f"{coming.receive_shards(use):016x}"
            self._staged.bytes, self._staged.sent = coming.bytes, True
            return self._finish()

    def _add_snapshot(self, subscriber: Subscriber, manifest: StoredManifest, regions: Sequence[Region]) -> None:
        for region, data in subscriber.fetch_regions(manifest, regions):
            self.check_wanted()
            self._staged.bytes += data.nbytes
            self._add_tensor(region, data)

    def _add_resident(self, resident: HostedWeights, regions: Sequence[Region]) -> None:
        self._staged.bytes += resident.fetched_bytes
        for region in regions:
            self.check_wanted()
            self._add_tensor(region, resident.region(region))

    def _add_tensor(self, region: Region, data: Bytes) -> None:
        since = time.perf_counter()
        if self._cutter is None:
            self._staged.tensors[region.tensor] = self._tensor_of(region, data).clone()
        else:
            spec = self._published[region.tensor]
            part = torch.from_numpy(data).view(spec.dtype).view(box_shape(region.box))
            self._staged.pieces.extend(self._cutter.cut_tensor(region.tensor, part, spec.shape, region.box))
            cut = time.perf_counter()
            self._cutter.pack_complete()
            self._packing += time.perf_counter() - cut
        self._cutting += time.perf_counter() - since

    def _tensor_of(self, region: Region, data: Bytes) -> torch.Tensor:
        """A view. What is kept is copied: memory of the relay is used again."""
        return torch.from_numpy(data).view(self._published[region.tensor].dtype).view(box_shape(region.box))

    def _finish(self) -> StagedVersion:
        fetched = time.perf_counter()
        if self._cutter is not None:
            self._staged.packed = self._cutter.pack_layers()
        self._staged.seconds = {
            "fetch": fetched - self._started - self._cutting,
            "cut_and_digest": self._cutting - self._packing,
            "pack": self._packing + time.perf_counter() - fetched,
        }
        return self._staged


def match_layout(manifest: WeightManifest, plan: StagingPlan) -> frozenset[str]:
    """Refuse, before anything is fetched, what vLLM's loader would refuse half-way; returns the names to leave out."""
    published = tensor_specs(manifest)
    layout = plan.layout
    if layout is None:
        return frozenset()
    ignored = frozenset({TIED_HEAD} if plan.tied and TIED_HEAD not in layout else ())
    reshaped = [
        f"{name} {spec.shape} (the model has {layout[name].shape})"
        for name, spec in published.items()
        if name in layout and spec.shape != layout[name].shape
    ]
    problems = [
        f"{what}: {', '.join(names[:4])}{' ...' if len(names) > 4 else ''}"
        for what, names in (
            ("missing", [name for name in layout if name not in published]),
            ("unknown", [name for name in published if name not in layout and name not in ignored]),
            ("other shape", reshaped),
        )
        if names
    ]
    if problems:
        raise RetryableError(f"weight version {manifest.version} does not fit {plan.model}: {'; '.join(problems)}")
    return ignored


def tensor_specs(manifest: WeightManifest) -> CheckpointLayout:
    """Names, shapes and dtypes of a version. Raises RetryableError for a dtype that torch does not have."""
    found: CheckpointLayout = {}
    for key in manifest.shards:
        dtype = DTYPES.get(key.dtype)
        if dtype is None:
            raise RetryableError(f"{key.tensor}: dtype {key.dtype!r} is not one of {', '.join(DTYPES)}")
        found[key.tensor] = TensorSpec(tuple(key.global_shape), dtype)
    return found


def _own_stream(device: torch.device) -> AbstractContextManager[Any]:
    """Uploads for digests must not queue behind the model's kernels."""
    if device.type != "cuda":
        return nullcontext()
    stream: AbstractContextManager[Any] = torch.cuda.stream(_stream(device))
    return stream


@functools.cache
def _stream(device: torch.device) -> Any:
    """One for all versions: memory that torch has cached for a stream is of use to no other."""
    return torch.cuda.Stream(device)
