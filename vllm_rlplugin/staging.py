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
* Where versions travel as differences and there is a mapping, a version is followed from what is live
  (:mod:`vllm_rlplugin.following`): what is staged is as large as the change. Where that cannot be (the first update, damaged
  weights, a chain that is gone, a full snapshot that is smaller) all of it is staged, and nothing stays behind. Without a
  mapping what differences are applied to stays on the host (:class:`Resident`): this rank's shards, once, as published.
* Nothing here writes to the model.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
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
from orchestrator.transfer.routing import extent, whole
from vllm_rlplugin.collective import Receiver, Transmission
from vllm_rlplugin.cutting import Cutter, Packed, Piece
from vllm_rlplugin.following import Base, Followed, Following, Origin, origin_of
from vllm_rlplugin.mapping import Layout, Mapping, TensorSpec
from vllm_rlplugin.places import Places

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


@dataclass(slots=True, eq=False)
class Staged:
    """A verified version: with a mapping ``followed``, or ``pieces`` and what CPU layers pack of them; else ``tensors``."""

    version: int
    checksum: str  # of its content, in hexadecimal: equal for equal weights, whatever way they came
    bytes: int  # as fetched
    plan: Plan
    sent: bool = False  # by the trainer: the relay need not have it
    pieces: list[Piece] = field(default_factory=list)
    packed: list[Packed] = field(default_factory=list)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)  # contiguous, of their whole shape
    seconds: dict[str, float] = field(default_factory=dict)
    followed: Followed | None = None  # by differences from what was live when it was made
    origin: Origin | None = None  # what differences of the next version can be applied to, once this one is live

    @property
    def staged_bytes(self) -> int:
        """Memory held, the packed copies not counted."""
        if self.followed is not None:
            return self.followed.bytes
        return sum(x.nbytes for x in (*(piece.source for piece in self.pieces), *self.tensors.values()))

    def follows(self, base: Base | None) -> bool:
        """Whether it can be put onto what is live."""
        return self.followed is None or self.followed.base is base


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
        self._resident: tuple[Plan, list[Region], Resident] | None = (
            None  # what is kept of what was published, for which plan
        )

        def connect() -> None:
            self._subscriber = Subscriber(endpoint, codec=self._codec)

        try:
            self._submit(connect).result()
        except BaseException:
            self.close()
            raise

    def begin(self, version: int, plan: Plan, base: Base | None = None) -> None:
        """Start fetching; replaces what is being fetched or held for another version. Returns at once.

        ``base``: what is live and stays so meanwhile, where differences can be applied to it.
        """
        cancel = self._new(version)
        self._prepared = self._submit(lambda: self._obtain(version, plan, base, cancel))

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

    def take(self, version: int, plan: Plan, base: Base | None = None) -> Staged | Refusal:
        """The version, prepared or fetched now. It is the caller's afterwards. ``base``: see :meth:`begin`."""
        if self._version != version:
            self._cancel.set()  # what is being fetched is not wanted
        cancel = threading.Event()
        outcome: Staged | Refusal = self._submit(lambda: self._obtain(version, plan, base, cancel)).result()
        self.drop()
        return outcome

    def drop(self) -> None:
        """Forget what was prepared."""
        self._cancel.set()
        self._prepared, self._version = None, -1

        def forget() -> None:
            self._held = None

        self._submit(forget)

    def loaded(self, version: int) -> None:
        """Say that this version is live now, so that the way on from it is kept. Returns at once."""

        def hold() -> None:
            if self._subscriber is not None and self._differences:
                try:
                    self._subscriber.hold(version)
                except CoserveError as error:  # a lease only saves a full snapshot; the next fetch says it again
                    _logger.warning("the relay was not told that weight version %d is live: %s", version, error)

        self._submit(hold)

    def settle(self) -> None:
        """Give up what is being fetched and wait until nothing reads the live weights; what is ready stays."""
        self._cancel.set()
        self._submit(lambda: None).result()

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

    def _obtain(self, version: int, plan: Plan, base: Base | None, cancel: threading.Event) -> Staged | Refusal:
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
            same = held is not None and (held.version, held.checksum) == (version, checksum)
            if held is not None and same and held.plan is plan and held.follows(base):
                return held
            self._held = held = None  # two versions at a time would be too much memory
            staging = _Staging(manifest, checksum, plan, cancel)
            if self._differences:
                self._held = self._from_differences(subscriber, manifest, staging, base)
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

    def _from_differences(
        self, subscriber: Subscriber, manifest: StoredManifest, staging: _Staging, base: Base | None
    ) -> Staged:
        """The version, by differences or whole. Says to the relay what is live meanwhile."""
        kept = self._resident_of(subscriber, staging)
        live = base.origin.version if base is not None else -1
        subscriber.hold(live if staging.places is not None or kept is None else kept.version, fetching=staging.version)
        try:
            if kept is not None:
                kept.advance(staging.version, staging.check)
            found = None if base is None else self._follow(subscriber, staging, base, kept)
            return found or staging.from_anything(subscriber, manifest, self._codec, kept)
        except (CorruptWeightsError, RelayError) as error:
            if isinstance(error, CorruptWeightsError) or error.reason == "missing":
                subscriber.ask_snapshot()  # the way there is gone: the next version must bring one
            raise

    def _follow(self, subscriber: Subscriber, staging: _Staging, base: Base, kept: Resident | None) -> Staged | None:
        """By differences from what is live; None where that cannot be."""
        origin = base.origin
        if staging.places is None or origin.epoch != subscriber.epoch() or origin.version == staging.version:
            return None
        try:
            chain = subscriber.chain(staging.version, origin.version, origin.content)
            if not chain or chain[0].base_version == FULL:
                return None
            return staging.from_live(subscriber, self._codec, base, chain, kept)
        except (CorruptWeightsError, RelayError) as error:
            if isinstance(error, RelayError) and error.reason != "missing":
                raise
            _logger.warning("weight version %d is taken whole, not by differences: %s", staging.version, error)
            return None

    def _resident_of(self, subscriber: Subscriber, staging: _Staging) -> Resident | None:
        """What holds the published values that are not where they could be followed in place; None: there are none."""
        if not staging.kept:
            self._resident = None
            return None
        if self._resident is None or self._resident[0] is not staging.plan or self._resident[1] != staging.kept:
            self._resident = staging.plan, staging.kept, Resident(subscriber, staging.kept, self._codec)
        return self._resident[2]


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
        self.places = None if plan.mapping is None else Places(plan.mapping, self._published)
        direct = set() if self.places is None else {*self.places.direct}
        self.kept = [region for region in self.regions if region.tensor not in direct]
        self._staged = Staged(manifest.version, checksum, 0, plan)
        self._cutter = None if plan.mapping is None else Cutter(plan.mapping, plan.device)

    def check(self) -> None:
        """Raises RetryableError when it is not wanted any more."""
        if self._cancel.is_set():
            raise RetryableError(
                f"the fetch of weight version {self.version} was replaced by another, or given up for a release"
            )

    def from_snapshot(self, subscriber: Subscriber, manifest: StoredManifest) -> Staged:
        """Nothing is kept but what the update needs."""
        with _own_stream(self.plan.device):
            self._add_snapshot(subscriber, manifest, self.regions)
            return self._finish()

    def from_anything(
        self, subscriber: Subscriber, manifest: StoredManifest, codec: DeltaCodec, kept: Resident | None
    ) -> Staged:
        """All of it, by whatever there is: a full snapshot, or one and the differences after it, put together here."""
        known = {region.tensor for region in self.kept}
        others = [region for region in self.regions if region.tensor not in known]
        with _own_stream(self.plan.device):
            if kept is not None:
                self._add_resident(kept, self.kept)
            if manifest.base_version == FULL:
                self._add_snapshot(subscriber, manifest, others)
            elif others:
                made = Resident(subscriber, others, codec)
                made.advance(self.version, self.check)
                self._add_resident(made, others)
            if self.places is not None:
                self._staged.origin = origin_of(manifest, self.places.of(manifest.shards))
            return self._finish()

    def from_live(
        self,
        subscriber: Subscriber,
        codec: DeltaCodec,
        base: Base,
        chain: Sequence[StoredManifest],
        kept: Resident | None,
    ) -> Staged:
        """By differences to what is live. Nothing of this staging is touched when it raises."""
        places = self.places
        assert places is not None
        with _own_stream(self.plan.device):
            following = Following(base, places, codec, self.plan.device, self.check)
            following.chain(subscriber, chain)
            fetched = time.perf_counter()
            if kept is not None:
                following.compare(kept, self._published, self.kept)
            followed = following.prove()
        last = chain[-1]
        received = following.fetched_bytes + (0 if kept is None else kept.fetched_bytes)
        return Staged(
            self.version,
            self._staged.checksum,
            received,
            self.plan,
            seconds={"fetch": fetched - self._started, "prove": time.perf_counter() - fetched},
            followed=followed,
            origin=origin_of(last, places.of(last.shards)),
        )

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

    def _add_snapshot(self, subscriber: Subscriber, manifest: StoredManifest, regions: Sequence[Region]) -> None:
        for region, data in subscriber.fetch_regions(manifest, regions):
            self.check()
            self._staged.bytes += data.nbytes
            self._add(region, data)

    def _add_resident(self, resident: Resident, regions: Sequence[Region]) -> None:
        self._staged.bytes += resident.fetched_bytes
        for region in regions:
            self.check()
            self._add(region, resident.region(region))

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
