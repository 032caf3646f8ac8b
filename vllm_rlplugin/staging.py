"""Fetches a version while the model runs, from the relay or from the trainer, and makes ready what the update will copy.

Guarantees:

* One daemon thread per :class:`Fetcher` opens, uses and closes the relay connection; the relay's buffers are born and die
  in it. What it hands out is memory of its own.
* A :class:`Staged` is complete and verified (checksums of the relay or of the sender, names and shapes of the model's
  checkpoint) and says which content it has: a version that was published again with another is fetched again. Anything else
  is a :class:`Refusal`. What the trainer sent is the version, also before the relay has it (:mod:`vllm_rlplugin.collective`).
* With a mapping only what this rank's slices are cut from is fetched, shard by shard, whatever the trainer's layout; only
  the slices are kept, cast to the parameter's dtype, each with the digest that the live slice must have after the update.
  On CPU the packed copies that layers compute with are made here, too: packing takes several times as long as copying.
* Where versions travel as differences, what they are applied to stays on the host beside it (:class:`Resident`): this
  rank's shards, once, as they were published.
* Nothing here touches the model.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from orchestrator.api import CoserveError, Meeting, RetryableError, RunError, WeightManifest
from orchestrator.transfer import (
    CorruptWeightsError,
    DeltaCodec,
    Region,
    RelayEndpoint,
    RelayError,
    Resident,
    StoredManifest,
    Subscriber,
)
from orchestrator.transfer.assembly import Assembler
from orchestrator.transfer.head import FULL
from orchestrator.transfer.routing import Box, extent, whole
from vllm_rlplugin.collective import Receiver, Transmission
from vllm_rlplugin.digests import digest_for
from vllm_rlplugin.mapping import Layout, Mapping, Slice, TensorSpec

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
CLOSE_SECONDS = (
    10.0  # how long ``close`` waits for a transfer in flight; the thread is a daemon, so nothing hangs on it
)

_logger = logging.getLogger(__name__)

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
TIED_HEAD = "lm_head.weight"


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """What this rank wants of a version. No ``mapping``: whole tensors, for vLLM's own loader."""

    model: str  # for messages
    device: torch.device
    layout: Layout | None  # None: not known yet; whatever is published is taken
    tied: bool  # the head is the embedding, so that a published lm_head is ignored unless the checkpoint has one
    mapping: Mapping | None


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """One slice, ready to be copied into its target, and the digest it must have there."""

    slice: Slice
    source: torch.Tensor  # a part of a twin of the live parameter: same shape, dtype and strides
    digest: int


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """What a CPU layer will compute with."""

    layer: torch.nn.Module
    linear: Callable[..., torch.Tensor]


@dataclass(slots=True, eq=False)
class Staged:
    """A verified version: ``pieces`` (and what CPU layers pack of them) with a mapping, ``tensors`` otherwise."""

    version: int
    checksum: str  # of its content, in hexadecimal: equal for equal weights, whatever way they came
    bytes: int  # as fetched
    plan: Plan
    sent: bool = False  # by the trainer: the relay need not have it
    pieces: list[Piece] = field(default_factory=list)
    packed: list[Packed] = field(default_factory=list)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)  # contiguous, of their whole shape
    seconds: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a version could not be staged."""

    error: str
    retryable: bool

    def exception(self) -> CoserveError:
        """Made anew in the thread that raises it: no traceback keeps the relay's buffers alive."""
        return RetryableError(self.error) if self.retryable else RunError(self.error)


class Fetcher:
    """See the module. All methods are for one thread, that of vLLM's worker.

    Making one connects: raises ConfigError or RetryableError.
    """

    def __init__(self, endpoint: RelayEndpoint, rank: int = 0) -> None:
        self._rank = rank  # in its engine
        self._receiver: Receiver | None = None  # used by the thread only
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._subscriber: Subscriber | None = None
        self._held: Staged | None = None  # written by the thread only
        self._cancel = threading.Event()
        self._prepared: Future[Staged | Refusal] | None = None
        self._version = -1  # of ``_prepared``
        self._thread = threading.Thread(target=self._work, name="rl-coserve-weights", daemon=True)
        self._thread.start()

        self._codec = DeltaCodec()
        self._differences = endpoint.snapshot_every > 0
        self._resident: tuple[Plan, Resident] | None = None  # what differences are applied to, and for which plan

        def connect() -> None:
            self._subscriber = Subscriber(endpoint, codec=self._codec)

        try:
            self._submit(connect).result()
        except BaseException:
            self.close()
            raise

    def begin(self, version: int, plan: Plan) -> None:
        """Start fetching; replaces what is being fetched or held for another version. Returns at once."""
        cancel = self._new(version)
        self._prepared = self._submit(lambda: self._obtain(version, plan, cancel))

    def receive(self, version: int, plan: Plan, meetings: Sequence[Meeting], place: int, limit: float) -> None:
        """The same, from the trainer; see :class:`orchestrator.api.CollectiveWorker`."""
        cancel = self._new(version)
        self._prepared = self._submit(lambda: self._receive(version, plan, meetings, place, limit, cancel))

    def state(self) -> dict[str, Any]:
        """{"state": "none" | "fetching" | "ready" | "failed", "version", "error", "seconds", "checksum"} of what was begun."""
        outcome = self._prepared.result() if self._prepared is not None and self._prepared.done() else None
        state = "none" if self._prepared is None else "fetching" if outcome is None else "ready"
        found: dict[str, Any] = {"state": state, "version": self._version, "error": "", "seconds": {}, "checksum": ""}
        if isinstance(outcome, Refusal):
            found.update(state="failed", error=outcome.error)
        elif outcome is not None:
            found.update(seconds=dict(outcome.seconds), checksum=outcome.checksum)
        return found

    def take(self, version: int, plan: Plan) -> Staged | Refusal:
        """The version, prepared or fetched now. It is the caller's afterwards."""
        if self._version != version:
            self._cancel.set()  # what is being fetched is not wanted
        cancel = threading.Event()
        outcome: Staged | Refusal = self._submit(lambda: self._obtain(version, plan, cancel)).result()
        self.drop()
        return outcome

    def drop(self) -> None:
        """Forget what was prepared."""
        self._cancel.set()
        self._prepared, self._version = None, -1

        def forget() -> None:
            self._held = None

        self._submit(forget)

    def close(self) -> None:
        """Idempotent. A transfer in flight is waited for, for a limited time."""
        self._cancel.set()
        self._jobs.put(None)
        self._thread.join(CLOSE_SECONDS)

    def _new(self, version: int) -> threading.Event:
        """Replaces what is being fetched for another version; returns how the next one will be told that it was."""
        if self._version != version:
            self._cancel.set()
        self._cancel, self._version = threading.Event(), version
        return self._cancel

    def _submit(self, job: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()

        def run() -> None:
            try:
                future.set_result(job())
            except Exception as error:  # noqa: BLE001  it is raised in the thread that asks for the result
                future.set_exception(error)

        self._jobs.put(run)
        return future

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
            del job  # not kept while waiting: it may hold a version
        self._held = self._resident = None
        if self._receiver is not None:
            self._receiver.close()
        if self._subscriber is not None:
            self._subscriber.close()

    def _obtain(self, version: int, plan: Plan, cancel: threading.Event) -> Staged | Refusal:
        """In the thread: what is held if it is the very thing, else a fetch."""
        subscriber = self._subscriber
        if subscriber is None:
            return Refusal("the relay is not connected", True)
        held = self._held
        if held is not None and held.sent and held.version == version and held.plan is plan:
            return held
        try:
            manifest = subscriber.manifest(version)
            checksum = f"{manifest.content():016x}"
            if held is not None and (held.version, held.checksum) == (version, checksum) and held.plan is plan:
                return held
            self._held = held = None  # two versions at a time would be too much memory
            staging = _Staging(manifest, checksum, plan, cancel)
            if self._differences:
                self._held = staging.from_resident(self._resident_of(subscriber, staging))
            else:
                self._held = staging.from_snapshot(subscriber, manifest)
        except CoserveError as error:
            return _refusal(error, f"weight version {version}")
        except Exception as error:  # a rank that raises puts vLLM's executor out of step: told, not raised
            _logger.exception("fetching weight version %d failed in an unforeseen way", version)
            return Refusal(f"weight version {version}: {error!r}", False)
        return self._held

    def _receive(
        self, version: int, plan: Plan, meetings: Sequence[Meeting], place: int, limit: float, cancel: threading.Event
    ) -> Staged | Refusal:
        """In the thread: from the trainer, unless it is held."""
        held = self._held
        if held is not None and held.sent and held.version == version and held.plan is plan:
            return held
        self._held = held = None
        if self._receiver is None:
            self._receiver = Receiver(plan.device, self._rank)
        try:
            coming = self._receiver.open(version, meetings, place, limit)
            try:
                manifest = WeightManifest(version, FULL, coming.shards, coming.bytes, "")
                staging = _Staging(manifest, "", plan, cancel)
            except BaseException:
                coming.refuse()
                raise
            self._held = staging.from_trainer(coming)
        except CoserveError as error:
            return _refusal(error, f"weight version {version} from the trainer")
        except Exception as error:  # as in ``_obtain``
            _logger.exception("receiving weight version %d failed in an unforeseen way", version)
            return Refusal(f"weight version {version} from the trainer: {error!r}", False)
        return self._held

    def _resident_of(self, subscriber: Subscriber, staging: _Staging) -> Resident:
        """What this rank hosts, at the version that is wanted."""
        if self._resident is None or self._resident[0] is not staging.plan:
            self._resident = staging.plan, Resident(subscriber, staging.regions, self._codec)
        resident = self._resident[1]
        subscriber.hold(resident.version, fetching=staging.version)
        try:
            resident.advance(staging.version, staging.check)
        except (CorruptWeightsError, RelayError) as error:
            if isinstance(error, CorruptWeightsError) or error.reason == "missing":
                subscriber.ask_snapshot()  # the way there is gone: the next version must bring one
            raise
        subscriber.hold(resident.version)
        return resident


def _refusal(error: CoserveError, what: str) -> Refusal:
    text = f"{what}: {error}" if isinstance(error, CorruptWeightsError) else str(error)
    return Refusal(text, isinstance(error, RetryableError | CorruptWeightsError))


class _Staging:
    """One version on its way: what is fetched of it, and what is made of that. Refuses what does not fit the plan."""

    def __init__(self, manifest: WeightManifest, checksum: str, plan: Plan, cancel: threading.Event) -> None:
        self.plan = plan
        self.version = manifest.version
        self._cancel = cancel
        self._started = time.perf_counter()
        self._cutting = 0.0
        ignored = match_layout(manifest, plan)
        self._published = specs(manifest)
        if plan.mapping is None:
            boxes = {name: whole(spec.shape) for name, spec in self._published.items() if name not in ignored}
        else:
            boxes = plan.mapping.boxes(self._published)
        self.regions = [Region(name, box) for name, box in boxes.items()]
        self._staged = Staged(manifest.version, checksum, 0, plan)
        self._cutter = None if plan.mapping is None else Cutter(plan.mapping, plan.device)

    def check(self) -> None:
        """Raises RetryableError when it is not wanted any more."""
        if self._cancel.is_set():
            raise RetryableError(f"the fetch of weight version {self.version} was replaced by another")

    def from_snapshot(self, subscriber: Subscriber, manifest: StoredManifest) -> Staged:
        """Nothing is kept but what the update needs."""
        with _own_stream(self.plan.device):
            for region, data in subscriber.fetch_regions(manifest, self.regions):
                self.check()
                self._staged.bytes += data.nbytes
                self._add(region, data)
            return self._finish()

    def from_resident(self, resident: Resident) -> Staged:
        """``resident`` stays what the next difference is applied to."""
        self._staged.bytes = resident.fetched_bytes
        with _own_stream(self.plan.device):
            for region in self.regions:
                self.check()
                self._add(region, resident.region(region))
            return self._finish()

    def from_trainer(self, coming: Transmission) -> Staged:
        """As from a snapshot; known by its content once all has come."""
        assembler = Assembler(coming.shards, self.regions)

        def use(place: int, data: Bytes) -> None:
            self.check()
            for region, whole_region in assembler.add(place, data):
                self._add(region, whole_region)

        with _own_stream(self.plan.device):
            for region, data in assembler.empty:
                self._add(region, data)
            self._staged.checksum = f"{coming.receive(use):016x}"
            self._staged.bytes, self._staged.sent = coming.bytes, True
            return self._finish()

    def _add(self, region: Region, data: Bytes) -> None:
        since = time.perf_counter()
        spec = self._published[region.tensor]
        part = torch.from_numpy(data).view(spec.dtype).view(extent(region.box))
        if self._cutter is None:
            self._staged.tensors[region.tensor] = part.clone()
        else:
            self._staged.pieces.extend(self._cutter.cut(region.tensor, part, spec.shape, region.box))
        self._cutting += time.perf_counter() - since

    def _finish(self) -> Staged:
        fetched = time.perf_counter()
        if self._cutter is not None:
            self._staged.packed = self._cutter.pack()
        self._staged.seconds = {
            "fetch": fetched - self._started - self._cutting,
            "cut_and_digest": self._cutting,
            "pack": time.perf_counter() - fetched,
        }
        return self._staged


class Cutter:
    """Makes this rank's slices of one version, in twins of the live parameters (CUDA: pinned), each with its digest."""

    def __init__(self, mapping: Mapping, device: torch.device) -> None:
        self._mapping = mapping
        self._device = device
        self._digest = digest_for(device)
        self._twins: dict[str, torch.Tensor] = {}

    def cut(
        self, name: str, tensor: torch.Tensor, shape: Sequence[int] | None = None, box: Box = ()
    ) -> Iterator[Piece]:
        """The slices of one checkpoint tensor, cast as vLLM's loader casts.

        ``tensor``: all of it, or with ``shape`` what lies in ``box`` of one of that shape.
        """
        for item in self._mapping.of(name):
            live = self._mapping.live[item.parameter]
            offset = item.target.storage_offset() - live.storage_offset()
            source = self._twin(item.parameter).as_strided(item.target.size(), item.target.stride(), offset)
            source.copy_(item.cut(tensor) if shape is None else item.cut_box(shape, box, tensor))
            yield Piece(item, source, self._digest(source.to(self._device)))

    def pack(self) -> list[Packed]:
        """Once all tensors were cut: the packed copies of CPU layers, made by vLLM's own functions on a stand-in."""
        for fill in self._mapping.fills:
            offset = fill.target.storage_offset() - self._mapping.live[fill.parameter].storage_offset()
            self._twin(fill.parameter).as_strided(fill.target.size(), fill.target.stride(), offset).fill_(fill.value)
        packed = []
        for layer, parameter in self._mapping.packed:
            stand_in = torch.nn.Module()
            stand_in.weight = torch.nn.Parameter(self._twin(parameter), requires_grad=False)
            layer.quant_method.process_weights_after_loading(stand_in)
            packed.append(Packed(layer, stand_in.cpu_linear))
        return packed

    def _twin(self, parameter: str) -> torch.Tensor:
        twin = self._twins.get(parameter)
        if twin is None:
            live = self._mapping.live[parameter]
            pinned = self._device.type == "cuda"
            twin = torch.empty_strided(live.size(), live.stride(), dtype=live.dtype, pin_memory=pinned)
            self._twins[parameter] = twin
        return twin


def match_layout(manifest: WeightManifest, plan: Plan) -> frozenset[str]:
    """Refuse, before anything is fetched, what vLLM's loader would refuse half-way; returns the names to leave out."""
    published = specs(manifest)
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


def specs(manifest: WeightManifest) -> Layout:
    """Names, shapes and dtypes of a version. Raises RetryableError for a dtype that torch does not have."""
    found: Layout = {}
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
    stream: AbstractContextManager[Any] = torch.cuda.stream(torch.cuda.Stream(device))
    return stream
