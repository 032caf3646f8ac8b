"""Fetches a version while the model runs, from the relay or from the trainer: one thread, and what is held between calls.

Guarantees:

* One daemon thread per :class:`VersionFetcher` opens, uses and closes the relay connection; the relay's buffers are born and die
  in it. What it hands out is memory of its own.
* What it hands out is a :class:`vllm_rlplugin.weights.version_staging.StagedVersion`, complete and verified; a version that
  was published again with another content is fetched again. Anything else is a :class:`FetchRefusal`. What the trainer sent
  is the version, also before the relay has it (:mod:`vllm_rlplugin.weights.collective_receiver`).
* Where versions travel as differences and there is a mapping, a version is followed from what is live
  (:mod:`vllm_rlplugin.weights.delta_update`): what is staged is as large as the change. Where that cannot be (the first
  update, damaged weights, a chain that is gone, a full snapshot that is smaller) all of it is staged, and nothing stays
  behind. Without a mapping the version is read while it is loaded, layer by layer, each put together by itself.
* Nothing here writes to the model.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from orchestrator.api import CoserveError, Meeting, RetryableError, RunError, WeightManifest
from orchestrator.transfer import (
    CorruptWeightsError,
    DeltaCodec,
    HostedWeights,
    Region,
    RelayEndpoint,
    RelayError,
    StoredManifest,
    Subscriber,
)
from orchestrator.transfer.job_head import FULL, PublishedVersion
from vllm_rlplugin.weights.collective_receiver import CollectiveReceiver
from vllm_rlplugin.weights.delta_update import DeltaBase
from vllm_rlplugin.weights.layer_stream import Tensors
from vllm_rlplugin.weights.version_staging import StagedVersion, StagingPlan, VersionStaging

CLOSE_SECONDS = 10.0  # how long ``close`` waits for a transfer in flight; it is a daemon, so nothing hangs on it

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FetchRefusal:
    """Why a version could not be staged."""

    error: str
    retryable: bool

    def exception(self) -> CoserveError:
        """Made anew in the thread that raises it: no traceback keeps the relay's buffers alive."""
        return RetryableError(self.error) if self.retryable else RunError(self.error)


class VersionFetcher:
    """See the module. All methods are for one thread, that of vLLM's worker.

    Making one connects: raises ConfigError or RetryableError.
    """

    def __init__(self, endpoint: RelayEndpoint, rank: int = 0) -> None:
        self._rank = rank  # in its engine
        self._receiver: CollectiveReceiver | None = None  # used by the thread only
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._subscriber: Subscriber | None = None
        self._held: StagedVersion | None = None  # written by the thread only
        self._cancel = threading.Event()
        self._prepared: Future[StagedVersion | FetchRefusal] | None = None
        self._version = -1  # of ``_prepared``
        self._loaded = -1  # that is live; of the thread
        self._thread = threading.Thread(target=self._run_jobs, name="rl-coserve-weights", daemon=True)
        self._thread.start()

        self._codec = DeltaCodec(threads=endpoint.codec_threads)
        self._differences = endpoint.snapshot_every > 0
        self._reports = self._differences and endpoint.encoding == "auto"
        self._resident: tuple[StagingPlan, list[Region], HostedWeights] | None = (
            None  # what is kept of what was published, for which plan
        )

        def connect() -> None:
            self._subscriber = Subscriber(endpoint, codec=self._codec)

        try:
            self._submit(connect).result()
        except BaseException:
            self.close()
            raise

    def start_fetch(self, version: int, plan: StagingPlan, base: DeltaBase | None = None) -> None:
        """Start fetching; replaces what is being fetched or held for another version. Returns at once.

        ``base``: what is live and stays so meanwhile, where differences can be applied to it.
        """
        cancel = self._new_fetch(version)
        self._prepared = self._submit(lambda: self._obtain(version, plan, base, cancel))

    def start_receive(
        self, version: int, plan: StagingPlan, meetings: Sequence[Meeting], place: int, limit: float
    ) -> None:
        """The same, from the trainer; see :class:`orchestrator.api.CollectiveWorker`."""
        cancel = self._new_fetch(version)
        self._prepared = self._submit(lambda: self._receive(version, plan, meetings, place, limit, cancel))

    def fetch_state(self) -> dict[str, Any]:
        """{"state": "none" | "fetching" | "ready" | "failed", "version", "error", "seconds", "checksum"} of what was begun."""
        outcome = self._prepared.result() if self._prepared is not None and self._prepared.done() else None
        state = "none" if self._prepared is None else "fetching" if outcome is None else "ready"
        found: dict[str, Any] = {"state": state, "version": self._version, "error": "", "seconds": {}, "checksum": ""}
        if isinstance(outcome, FetchRefusal):
            found.update(state="failed", error=outcome.error)
        elif outcome is not None:
            found.update(seconds=dict(outcome.seconds), checksum=outcome.checksum)
        return found

    def take_staged(
        self, version: int, plan: StagingPlan, base: DeltaBase | None = None
    ) -> StagedVersion | FetchRefusal:
        """The version, prepared or fetched now. It is the caller's afterwards. ``base``: see :meth:`start_fetch`."""
        if self._version != version:
            self._cancel.set()  # what is being fetched is not wanted
        cancel = threading.Event()
        outcome: StagedVersion | FetchRefusal = self._submit(lambda: self._obtain(version, plan, base, cancel)).result()
        self.drop_staged()
        return outcome

    def drop_staged(self) -> None:
        """Forget what was prepared."""
        self._cancel.set()
        self._prepared, self._version = None, -1

        def forget() -> None:
            self._held = None

        self._submit(forget)

    def note_loaded(self, version: int) -> None:
        """Say that this version is live now, so that the way on from it is kept. Returns at once."""

        def hold() -> None:
            self._loaded = version
            if self._subscriber is not None and self._differences:
                try:
                    self._subscriber.hold(version)
                except CoserveError as error:  # a lease only saves a full snapshot; the next fetch says it again
                    _logger.warning("the relay was not told that weight version %d is live: %s", version, error)

        self._submit(hold)

    def stop_reading(self) -> None:
        """Give up what is being fetched and wait until nothing reads the live weights; what is ready stays."""
        self._cancel.set()
        self._submit(lambda: None).result()

    def close(self) -> None:
        """Idempotent. A transfer in flight is waited for, for a limited time."""
        self._cancel.set()
        self._jobs.put(None)
        self._thread.join(CLOSE_SECONDS)

    def _new_fetch(self, version: int) -> threading.Event:
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

    def _run_jobs(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
            del job  # not kept while waiting: it may hold a version
        self._held = self._resident = None
        if self._receiver is not None:
            self._receiver.close()
        if self._subscriber is not None:
            self._subscriber.close()

    def _obtain(
        self, version: int, plan: StagingPlan, base: DeltaBase | None, cancel: threading.Event
    ) -> StagedVersion | FetchRefusal:
        """In the thread: what is held if it is the very thing, else a fetch."""
        subscriber = self._subscriber
        if subscriber is None:
            return FetchRefusal("the relay is not connected", True)
        held = self._held
        if held is not None and held.sent and held.version == version and held.plan is plan:
            return held
        began = time.perf_counter()
        try:
            published = subscriber.published(version)
            usable = held if held is not None and held.plan is plan and held.can_follow(base) else None
            if usable is not None and usable.published == published:
                return usable
            manifest = subscriber.manifest(published)
            checksum = f"{manifest.content():016x}"
            if usable is not None and (usable.version, usable.checksum) == (version, checksum):
                return usable
            self._held = held = None  # two versions at a time would be too much memory
            staging = VersionStaging(manifest, checksum, plan, cancel)
            if plan.mapping is None and plan.layout is not None:
                if self._differences:
                    subscriber.hold(self._loaded, fetching=version)
                self._held = staging.by_layers(lambda layer: self._read_layer(staging, manifest, layer))
            elif self._differences:
                self._held = self._fetch_by_differences(subscriber, (published, manifest), staging, base)
            else:
                self._held = staging.from_snapshot(subscriber, manifest)
            self._held.published, self._held.past_cache = published, subscriber.past_cache()
            if self._reports:
                whole = manifest.base_version == FULL and self._held.delta is None
                self._report_later(version, whole, time.perf_counter() - began)
        except CoserveError as error:
            return _refusal(error, f"weight version {version}")
        except Exception as error:
            _logger.exception("fetching weight version %d failed in an unforeseen way", version)
            return FetchRefusal(f"weight version {version}: {error!r}", False)
        return self._held

    def _report_later(self, version: int, whole: bool, seconds: float) -> None:
        """In the thread, once who waits for the version has it: three control messages must neither delay it nor fail it."""

        def report() -> None:
            if self._subscriber is not None:
                try:
                    self._subscriber.report_fetch(version, whole, seconds)
                except CoserveError as error:  # the publisher then chooses by what it knows
                    _logger.warning("the relay was not told how long weight version %d took: %s", version, error)

        self._submit(report)

    def _read_layer(self, staging: VersionStaging, manifest: StoredManifest, layer: Sequence[Region]) -> Tensors:
        """In whatever thread loads it, which waits. Raises CoserveError."""

        def read() -> Tensors:
            if self._subscriber is None:
                raise RetryableError("the relay is not connected")
            return staging.read_layer(self._subscriber, manifest, self._codec, layer)

        found: Tensors = self._submit(read).result()
        return found

    def _receive(
        self,
        version: int,
        plan: StagingPlan,
        meetings: Sequence[Meeting],
        place: int,
        limit: float,
        cancel: threading.Event,
    ) -> StagedVersion | FetchRefusal:
        """In the thread: from the trainer, unless it is held."""
        held = self._held
        if held is not None and held.sent and held.version == version and held.plan is plan:
            return held
        self._held = held = None
        if self._receiver is None:
            self._receiver = CollectiveReceiver(plan.device, self._rank)
        try:
            coming = self._receiver.join_version(version, meetings, place, limit)
            try:
                manifest = WeightManifest(version, FULL, coming.shards, coming.bytes, "")
                staging = VersionStaging(manifest, "", plan, cancel)
            except BaseException:
                coming.refuse()
                raise
            self._held = staging.from_trainer(coming)
        except CoserveError as error:
            return _refusal(error, f"weight version {version} from the trainer")
        except Exception as error:
            _logger.exception("receiving weight version %d failed in an unforeseen way", version)
            return FetchRefusal(f"weight version {version} from the trainer: {error!r}", False)
        return self._held

    def _fetch_by_differences(
        self,
        subscriber: Subscriber,
        known: tuple[PublishedVersion, StoredManifest],
        staging: VersionStaging,
        base: DeltaBase | None,
    ) -> StagedVersion:
        """The version, by differences or whole. Says to the relay what is live meanwhile."""
        kept = self._resident_of(subscriber, staging)
        live = base.origin.version if base is not None else -1
        subscriber.hold(live if staging.places is not None or kept is None else kept.version, fetching=staging.version)
        try:
            if kept is not None:
                kept.advance(staging.version, staging.check_wanted)
            found = None if base is None else self._fetch_delta(subscriber, known, staging, base, kept)
            return found or staging.from_anything(subscriber, known[1], self._codec, kept)
        except (CorruptWeightsError, RelayError) as error:
            if isinstance(error, CorruptWeightsError) or error.reason == "missing":
                subscriber.ask_snapshot()  # the way there is gone: the next version must bring one
            raise

    def _fetch_delta(
        self,
        subscriber: Subscriber,
        known: tuple[PublishedVersion, StoredManifest],
        staging: VersionStaging,
        base: DeltaBase,
        kept: HostedWeights | None,
    ) -> StagedVersion | None:
        """By differences from what is live; None where that cannot be."""
        origin = base.origin
        if staging.places is None or origin.epoch != subscriber.epoch() or origin.version == staging.version:
            return None
        try:
            chain = subscriber.chain(staging.version, origin.version, origin.content, known)
            if not chain or chain[0].base_version == FULL:
                return None
            return staging.from_live(subscriber, self._codec, base, chain, kept)
        except (CorruptWeightsError, RelayError) as error:
            if isinstance(error, RelayError) and error.reason != "missing":
                raise
            _logger.warning("weight version %d is taken whole, not by differences: %s", staging.version, error)
            return None

    def _resident_of(self, subscriber: Subscriber, staging: VersionStaging) -> HostedWeights | None:
        """What holds the published values that are not where they could be followed in place; None: there are none."""
        if not staging.kept:
            self._resident = None
            return None
        if self._resident is None or self._resident[0] is not staging.plan or self._resident[1] != staging.kept:
            self._resident = staging.plan, staging.kept, HostedWeights(subscriber, staging.kept, self._codec)
        return self._resident[2]


def _refusal(error: CoserveError, what: str) -> FetchRefusal:
    text = f"{what}: {error}" if isinstance(error, CorruptWeightsError) else str(error)
    return FetchRefusal(text, isinstance(error, RetryableError | CorruptWeightsError))
