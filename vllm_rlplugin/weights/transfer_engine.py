"""Weight updates from the relay, whole or by differences: a backend of vLLM's weight-transfer factory, ``rl_coserve``.

Guarantees:

* A received version equals a fresh load of the same checkpoint bit for bit, packed CPU linears and lm_head included.
* All or nothing, on all ranks: every byte is fetched, verified and checked against the checkpoint's layout before the
  model is touched, and no rank touches it unless all have the same published attempt at hand. When ``update_weights``
  raises, the model is as it was.
* Only ``finish_weight_update`` writes. Afterwards every live slice has the digest of the staged one; if not, or if
  anything raised on any rank, the weights are unusable (``damaged``) until an update succeeds, and it raises. A version that
  was followed by differences is taken back instead, on all ranks, bit for bit; only if that cannot be proved are they damaged.
* The fetch can overlap generation (:func:`prepare`); the pause is then a copy in place and its verification. Where the
  loader is more than copies of views, vLLM's layerwise reload does it (``report()["verified"]`` says so).
* With vLLM's own engine in place of the relay (:mod:`vllm_rlplugin.weights.stock_receiver`) the version is the sender's word:
  nothing is verified, nor taken back.
* Differences are applied to the live weights themselves (:mod:`vllm_rlplugin.weights.delta_update`), of which there is
  no other copy: only the tensors and elements that change are written (``report()["touched"]`` counts them).

The functions below take vLLM's worker, as ``collective_rpc`` passes it, and return plain data: errors too, because they
would cross vLLM's processes as text, and with several ranks put its executor out of step
(:mod:`vllm_rlplugin.weights.rank_votes`).
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from vllm.config import set_current_vllm_config
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from orchestrator.api import ConfigError, CoserveError, Meeting, RetryableError, RunError
from orchestrator.transfer import RelayEndpoint
from orchestrator.transfer.announcement import STOCK_BACKEND
from vllm_rlplugin.engine_activation import check_drafter, check_loader
from vllm_rlplugin.weights.checkpoint_mapping import CheckpointLayout, NoMappingError, TensorSpec, discover_mapping
from vllm_rlplugin.weights.delta_update import DeltaBase
from vllm_rlplugin.weights.live_weights import LiveWeights, MappedWeights, ReloadedWeights, describe_mismatches
from vllm_rlplugin.weights.quantised_layers import check_layers
from vllm_rlplugin.weights.rank_slices import SliceCutter
from vllm_rlplugin.weights.rank_votes import RankVotes
from vllm_rlplugin.weights.stock_receiver import StockReceiver
from vllm_rlplugin.weights.version_fetch import FetchRefusal, VersionFetcher
from vllm_rlplugin.weights.version_staging import StagedVersion, StagingPlan

_SAFETENSORS: dict[str, torch.dtype] = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}

_logger = logging.getLogger(__name__)
_progress = logging.getLogger("vllm.rl_coserve")  # where people look


@dataclass
class RelayInitInfo(WeightTransferInitInfo):  # type: ignore[misc]  # vLLM is untyped here
    """Where the relay is: ``RelayEndpoint.to_dict()``."""

    endpoint: dict[str, Any]


@dataclass
class RelayUpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """Which published version to load."""

    version: int


class RelayWeightTransferEngine(WeightTransferEngine[RelayInitInfo, RelayUpdateInfo]):  # type: ignore[misc]
    """One per vLLM worker process."""

    init_info_cls = RelayInitInfo
    update_info_cls = RelayUpdateInfo
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        self.damage = ""  # why the weights cannot be used; empty: they can
        self.refusal: CoserveError | None = None  # of the last call
        self.version = -1  # that is loaded; -1: what the engine was started with
        self.checksum = ""  # of its content
        self.received_bytes = 0  # of the last version that was received
        self.past_cache = ""  # see StagedVersion
        self.seconds: dict[str, float] = {}
        self.touched: dict[str, Any] = {}  # by the last version that was loaded
        self.fallback = ""  # why there is no mapping
        self.ranks = RankVotes(self.parallel_config)
        self._fetcher: VersionFetcher | None = None
        self._unprepared = ""  # why the last ``prepare`` did not begin
        self._staged: StagedVersion | None = None
        self._stock = StockReceiver(vllm_config, device, model)
        self._sent = False  # what is loaded next comes by vLLM's own engine
        self._layout = checkpoint_layout(
            self.model_config.model, self.model_config.revision, vllm_config.load_config.download_dir
        )
        self._plan: StagingPlan | None = None
        self._loaded: LiveWeights | None = None
        self._live: DeltaBase | None = None  # what differences can be applied to, unless the weights are damaged
        self._broken = False  # vLLM's reload failed half-way: its bookkeeping is in no defined state either
        self._worker: weakref.ref[Any] | None = None
        self._session_left_open = False

    # vLLM's life cycle.

    def init_transfer_engine(self, init_info: RelayInitInfo) -> None:
        """Connect to the relay; replaces an earlier connection. Raises ConfigError or RetryableError."""
        self.shutdown()
        self.refusal = None
        try:
            if self.vllm_config.quant_config is not None:
                check_layers(self.model, self.model_config.quantization)
            if any(getattr(layer, "is_amx_bmm_enabled", False) for layer in self.model.modules()):
                fix = "its kernels discard weights after packing them, and vLLM cannot reload those: "
                raise ConfigError("attention_config.backend", "AMX_MLA", fix + "take 'CPU_MLA'")
            if (drafts := self.vllm_config.speculative_config) is not None:
                check_drafter(drafts.method, drafts.rejection_sample_method)
            check_loader(type(self.model).__name__, {type(layer).__module__ for layer in self.model.modules()})
            endpoint = RelayEndpoint.from_dict(init_info.endpoint)
            self._fetcher = VersionFetcher(endpoint, self.ranks.number)
        except CoserveError as error:
            self.refusal = error
        if not self.ranks.all_agree(self._fetcher is not None):
            self._raise_refusal()
        self.make_plan()

    def start_weight_update(self) -> None:
        """Begin a session. The model is not touched yet. Never raises."""
        self._staged, self._sent = None, False
        self.refusal = None

    def receive_weights(self, update_info: RelayUpdateInfo) -> None:
        """Take the version that was prepared, or fetch, verify and stage it. Raises RetryableError; nothing is touched.

        With several ranks, before any of the functions below was called, it leaves the error to ``finish``.
        """
        if self._stock.version == update_info.version:
            if why := self._stock.refusal():
                self.refusal = RetryableError(f"weight version {update_info.version} from the trainer: {why}")
            self._sent = self.ranks.all_agree(not why)
            if not self._sent:
                self._stock.forget()
                self._raise_refusal(receiving=True)
            return
        self._staged = self._take_staged(update_info.version)
        staged = self._staged
        if not self.ranks.all_agree(staged is not None, staged.checksum if staged else "0"):
            self._staged = staged = None  # an exception keeps this frame's variables for as long as it is remembered
            self._raise_refusal(receiving=True)

    def finish_weight_update(self) -> None:
        """Load what was staged, in place (tensor storages stay, so CUDA graphs stay valid), and verify it."""
        if self._sent:
            self._load_sent()
            return
        staged, self._staged = self._staged, None
        if staged is not None and not staged.can_follow(self._delta_base()):
            self.refusal = RetryableError(f"weight version {staged.version} was made for other weights than are live")
            staged = None
        if not self.ranks.all_agree(staged is not None, staged.checksum if staged else "0") or staged is None:
            if self.ranks.size == 1 and self.refusal is None:
                self.refusal = RunError("finish_weight_update without received weights")
            staged = None  # see receive_weights
            self._raise_refusal()
            return
        self.damage = f"the update to version {staged.version} did not end"
        failure = self._load_staged(staged)
        if not self.ranks.all_agree(not failure):
            self._undo_load(
                staged, failure or "another rank of this engine could not load the version; its report says why"
            )
            staged = None
            self._raise_refusal()
            return
        self.damage = ""
        self.version, self.checksum = staged.version, staged.checksum
        self.refusal = None
        self._note_live(staged)

    def shutdown(self) -> None:
        """Close the relay connection. Idempotent."""
        self._staged = None
        self._stock.forget()
        self._stock.close()
        if self._fetcher is not None:
            self._fetcher.close()
            self._fetcher = None

    # What the functions of this module ask for.

    def attach_worker(self, worker: Any) -> None:
        """Know the worker: its session is then closed when an update fails, so that the next one can begin."""
        self._worker = weakref.ref(worker)
        if self._session_left_open:
            self._end_session()

    def drop_session(self) -> None:
        """What was received in it is dropped, too."""
        _progress.warning("rank %d: a weight update that was not finished is dropped", self.ranks.number)
        self._staged = None
        self._end_session()

    def make_plan(self) -> StagingPlan:
        """What this rank needs of a version. Only while the model does not run: it may have to find the mapping."""
        if self._plan is None or not (self._plan.mapping is None or self._plan.mapping.holds_for(self.model)):
            self._plan = self._make_plan(self._layout)
            self._loaded = None
        return self._plan

    def live_weights(self) -> LiveWeights:
        """The weights in the model."""
        if self._loaded is None:
            mapping = self.make_plan().mapping
            if mapping is None:
                self._loaded = ReloadedWeights(self.model, self.model_config, self.device, self.ranks.stage_agrees)
            else:
                self._loaded = MappedWeights(mapping, self.device)
        return self._loaded

    def stop_reading(self, *, dropped: bool) -> None:
        """The live weights go away for a while: nothing reads them when this returns. ``dropped``: they will not come back,
        so the next version is taken whole."""
        if self._fetcher is not None:
            self._fetcher.stop_reading()
        if dropped:
            self._live = None

    def prepare(self, version: int) -> None:
        """Begin to fetch; returns at once. Failures are told by :meth:`prepared`."""
        self._stock.forget()
        self._unprepared = "" if self._fetcher is not None else _NOT_CONNECTED
        if self._fetcher is not None:
            plan = self.make_plan()
            self._fetcher.start_fetch(version, plan, self._delta_base())

    def receive(self, version: int, meetings: Sequence[Meeting], place: int, limit: float) -> None:
        """The same as :meth:`prepare`, from the trainer (:mod:`vllm_rlplugin.weights.collective_receiver`)."""
        self._stock.forget()
        self._unprepared = "" if self._fetcher is not None else _NOT_CONNECTED
        if self._fetcher is not None and meetings[0].backend == STOCK_BACKEND:
            self._fetcher.drop_staged()
            self._stock.begin(version, meetings[0], place, limit)
        elif self._fetcher is not None:
            self._fetcher.start_receive(version, self.make_plan(), meetings, place, limit)

    def prepared(self, version: int) -> dict[str, Any]:
        """{"state", "error", ...} of what was prepared; "none" when it is another version."""
        if self._fetcher is None or self._unprepared:
            return _state("failed", self._unprepared or _NOT_CONNECTED, version)
        if self._stock.version == version:
            return self._stock.state()
        found = self._fetcher.fetch_state()
        return found if found["version"] == version else _state("none", "", -1)

    def verify(self) -> list[dict[str, str]]:
        """Compare the live weights with what was loaded. A difference makes them unusable."""
        found = self.live_weights().mismatches()
        if found:
            self.damage = f"rank {self.ranks.number}: {describe_mismatches(found)}"
        return found

    # Parts.

    def _delta_base(self) -> DeltaBase | None:
        """What is live and known to be."""
        live, mapping = self._live, self.make_plan().mapping
        return live if live is not None and not self.damage and live.mapping is mapping else None

    def _load_sent(self) -> None:
        """Let vLLM's own engine receive a version; all ranks come here together. There is no way back: the weights of before are
        overwritten while it comes, and what vLLM's reload has of it then is in no defined state."""
        version, self._sent = self._stock.version, False
        self.damage = failure = f"the update to version {version} did not end"
        try:
            self.seconds = {"receive": self._stock.load()}
            failure = ""
        except Exception as error:  # as in _load_staged
            _logger.exception("weight version %d did not come from the trainer", version)
            failure = (
                f"rank {self.ranks.number}: weight version {version} from the trainer: {error or type(error).__name__}"
            )
        if not self.ranks.all_agree(not failure):
            self._broken = True
            self.damage = failure or "another rank of this engine could not receive the version; its report says why"
            self.refusal = RunError(self.damage)
            self._stock.close()
            self._raise_refusal()
            return
        self.damage, self.refusal = "", None
        self.version, self.checksum, self.received_bytes = version, "", self._stock.bytes
        self._live = self._loaded = (
            None  # digests are those of the first look from now on, and no difference can follow
        )
        self.touched = {"how": "received into the model", "elements": self._stock.elements, "staged_bytes": 0}
        if self._fetcher is not None:
            self._fetcher.note_loaded(version)

    def _note_live(self, staged: StagedVersion) -> None:
        """What is live now."""
        loaded, origin, delta = self.live_weights(), staged.origin, staged.delta
        self._live = None
        if isinstance(loaded, MappedWeights) and origin is not None:
            self._live = DeltaBase(origin, loaded.mapping, loaded.digests)
        if delta is not None:
            counts = {"tensors": delta.tensors, "elements": delta.positions, "staged_bytes": delta.bytes}
            self.touched = {"how": "differences", **counts}
        else:
            tensors = len({piece.slice.tensor for piece in staged.pieces}) or len(staged.tensors)
            tensors = tensors if staged.layers is None else staged.layers.tensors
            elements = sum(piece.source.numel() for piece in staged.pieces)
            elements = elements or sum(tensor.numel() for tensor in staged.tensors.values())
            self.touched = {
                "how": "whole" if staged.layers is None else "layer by layer",
                "tensors": tensors,
                "elements": elements,
                "staged_bytes": staged.staged_bytes,
            }
        _progress.info("rank %d: weight version %d: %s", self.ranks.number, staged.version, self.touched)
        if self._fetcher is not None:
            self._fetcher.note_loaded(staged.version)

    def _undo_load(self, staged: StagedVersion, failure: str) -> None:
        """Bring back the weights of before, where that can be done; all ranks come here together."""
        problem = failure
        if staged.delta is not None or staged.layers is not None:
            try:
                problem = self._take_back(staged)
            except Exception as error:  # as in _apply
                _logger.exception("weight version %d could not be taken back", staged.version)
                problem = str(error) or type(error).__name__
            problem = problem and f"{failure}; and it could not be taken back: {problem}"
        if self.ranks.all_agree(not problem):
            self.damage = ""
            self.refusal = RetryableError(f"{failure}; the previous weights are restored")
            return
        self.damage = problem or f"{failure}; another rank could not take it back"
        self.refusal = RunError(self.damage)

    def _take_back(self, staged: StagedVersion) -> str:
        """Undo a load; returns why that cannot be."""
        loaded = self.live_weights()
        if not isinstance(loaded, ReloadedWeights):
            found = loaded.undo(staged)
            return describe_mismatches(found) if found else ""
        if self.ranks.stage_agrees(not loaded.touched):
            return ""
        before, why = self._version_before(staged)
        if not self.ranks.stage_agrees(before is not None) or before is None:
            return why or "another rank cannot; its report says why"
        loaded.load(before)
        return ""

    def _version_before(self, staged: StagedVersion) -> tuple[StagedVersion | None, str]:
        """The version that was live, or why it cannot be had."""
        if self.version < 0 or self._fetcher is None:
            return None, "the previous weights did not come from a relay"
        before = self._fetcher.take_staged(self.version, staged.plan)
        if isinstance(before, FetchRefusal):
            return None, before.error
        if before.checksum != self.checksum:
            return None, f"weight version {self.version} has changed on the relay"
        return before, ""

    def _take_staged(self, version: int) -> StagedVersion | None:
        """The staged version, or None with the reason noted."""
        if self._broken:
            self.refusal = RunError("an earlier reload failed half-way; restart the engine")
            return None
        if self._fetcher is None:
            self.refusal = RetryableError(_NOT_CONNECTED)
            return None
        plan = self.make_plan()
        outcome = self._fetcher.take_staged(version, plan, self._delta_base())
        if isinstance(outcome, FetchRefusal):
            self.refusal = outcome.exception()
            return None
        self.refusal = None
        self.received_bytes, self.past_cache = outcome.bytes, outcome.past_cache
        if plan.layout is None:  # the model is no local folder: this version says what a checkpoint looks like
            layout = {name: TensorSpec(tuple(tensor.shape), tensor.dtype) for name, tensor in outcome.tensors.items()}
            self._stage_by(self._make_plan(layout), outcome)
        return outcome

    def _stage_by(self, plan: StagingPlan, staged: StagedVersion) -> None:
        """Cut whole tensors by a mapping that was found only now, so that this and all later versions go in place."""
        if plan.mapping is None:
            return
        cutter = SliceCutter(plan.mapping, plan.device)
        for name, tensor in staged.tensors.items():
            staged.pieces.extend(cutter.cut_tensor(name, tensor))
        staged.packed = cutter.pack_layers()
        staged.tensors, staged.plan = {}, plan
        self._layout, self._plan, self._loaded = plan.layout, plan, None

    def _make_plan(self, layout: CheckpointLayout | None) -> StagingPlan:
        mapping = None
        self.fallback = "the checkpoint's layout is not known before the first update"
        if layout is not None:
            try:
                with set_current_vllm_config(self.vllm_config):
                    mapping = discover_mapping(self.model, layout)
                self.fallback = ""
            except NoMappingError as error:
                self.fallback = str(error)
                _logger.warning("weight updates go through vLLM's layerwise reload: %s", error)
        tied = bool(getattr(self.model_config.hf_text_config, "tie_word_embeddings", False))
        return StagingPlan(str(self.model_config.model), self.device, layout, tied, mapping)

    def _load_staged(self, staged: StagedVersion) -> str:
        """Load; returns what went wrong."""
        loaded = self.live_weights()
        try:
            seconds = loaded.load(staged)
        except Exception as error:  # whatever a copy or vLLM's loader raises, all ranks must hear of it
            self._broken = isinstance(loaded, ReloadedWeights) and loaded.broken
            _logger.exception("weight version %d could not be loaded", staged.version)
            return f"rank {self.ranks.number}: weight version {staged.version}: {error or type(error).__name__}"
        self.seconds = {**staged.seconds, **seconds}
        return ""

    def _raise_refusal(self, *, receiving: bool = False) -> None:
        """Raise ``refusal``, where vLLM's executor can bear it. All ranks come here together."""
        if self.refusal is None:
            self.refusal = RetryableError("another rank of this engine refused; its report says why")
        closed = self._end_session()
        if self.ranks.size > 1 and (not self.ranks.may_raise or (receiving and not closed)):
            return
        raise self.refusal

    def _end_session(self) -> bool:
        """vLLM leaves a session open when ``finish`` raises, and then refuses the next ``start``."""
        worker = self._worker() if self._worker is not None else None
        self._session_left_open = worker is None
        if worker is not None:
            self.reset_weight_update_target()
            worker._weight_update_active = False
        return worker is not None


def checkpoint_layout(model: str, revision: str | None = None, cache: str | None = None) -> CheckpointLayout | None:
    """The tensors of the checkpoint the engine was started from: a folder, or a name in the Hugging Face cache.

    None when it has no safetensors files. Nothing is downloaded: vLLM has loaded the model before.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
    from safetensors import safe_open

    folder = Path(model)
    if not folder.is_dir():
        try:
            folder = Path(snapshot_download(model, revision=revision, cache_dir=cache, local_files_only=True))
        except (HFValidationError, LocalEntryNotFoundError):
            return None
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        return None

    layout: CheckpointLayout = {}
    for file in files:
        with safe_open(str(file), framework="pt") as checkpoint:
            for name in checkpoint.keys():  # noqa: SIM118  (not a dictionary)
                part = checkpoint.get_slice(name)
                # A dtype that torch lacks matters only to loaders that look at it, and those have no mapping.
                dtype = _SAFETENSORS.get(part.get_dtype(), torch.uint8)
                layout[name] = TensorSpec(tuple(part.get_shape()), dtype)
    return layout


def attach_engine(worker: Any) -> dict[str, Any]:
    """After the engine's start: lets failed updates close vLLM's session. {"rank", "backend": whether it is ours}."""
    return {"rank": int(worker.rank), "backend": _engine(worker) is not None}


def prepare(worker: Any, version: int) -> None:
    """Begin to fetch and verify ``version`` in a thread of this process; returns at once. Ask :func:`prepared`."""
    engine = _engine(worker)
    if engine is not None:
        engine.prepare(version)


def receive(worker: Any, version: int, meetings: Sequence[Mapping[str, Any]], place: int, limit: float) -> None:
    """Begin to receive and verify ``version`` from the trainer, likewise. ``meetings``: as dictionaries."""
    engine = _engine(worker)
    if engine is not None:
        engine.receive(version, [Meeting(**meeting) for meeting in meetings], place, limit)


def prepared(worker: Any, version: int) -> dict[str, Any]:
    """{"state": "none" | "fetching" | "ready" | "failed", "error", "version", "seconds", "checksum"} of ``version``."""
    engine = _engine(worker)
    if engine is None:
        return _state("failed", _NO_BACKEND, version)
    return engine.prepared(version)


def drop_session(worker: Any) -> None:
    """End vLLM's session of an update that nobody will finish; the model was not touched. Nothing without one."""
    engine = _engine(worker)
    if engine is not None and worker._weight_update_active:
        engine.drop_session()


def report(worker: Any) -> dict[str, Any]:
    """What this rank has loaded. Plain data; :func:`vllm_rlplugin.weights.version_agreement.find_disagreement` compares
    those of all ranks.

    ``state`` is "intact" (the version named by ``version``; -1: what the engine was started with) or "unusable";
    ``error`` and ``kind`` ("retryable", "fatal") say what went wrong last; ``seconds`` are of the phases of the last
    update; ``touched`` says what it wrote: {"how": "differences" or "whole", "tensors", "elements", "staged_bytes":
    memory held for it until then}; ``slices`` are {checkpoint tensor: [[offset, size, stride, dtype, digest], ...]} in
    elements.
    """
    engine = _engine(worker)
    if engine is None:
        return {"state": "intact", "error": _NO_BACKEND, "kind": "fatal", "damaged": False, "version": -1, "bytes": 0}
    loaded = engine.live_weights()
    mapping = loaded.mapping if isinstance(loaded, MappedWeights) else None
    layout = engine.make_plan().layout or {}
    error = engine.damage or str(engine.refusal or "")
    retryable = not engine.damage and isinstance(engine.refusal, RetryableError)
    return {
        "rank": engine.ranks.number,
        "world_size": engine.ranks.size,
        "version": engine.version,
        "checksum": engine.checksum,
        "bytes": engine.received_bytes,
        "past_cache": engine.past_cache,
        "state": "unusable" if engine.damage else "intact",
        "damaged": bool(engine.damage),
        "error": error,
        "kind": "" if not error else "retryable" if retryable else "fatal",
        "verified": {
            "how": loaded.how,
            "why": engine.fallback,
            "elements": 0 if mapping is None else mapping.elements,
            "slices": 0 if mapping is None else len(mapping.slices),
        },
        "seconds": dict(engine.seconds),
        "touched": dict(engine.touched),
        "shapes": {name: list(spec.shape) for name, spec in layout.items()},
        "slices": loaded.slices(),
        "unused": [] if mapping is None else list(mapping.unused),
    }


def verify(worker: Any) -> dict[str, Any]:
    """Recompute the digests of the live weights. {"rank", "state", "error", "mismatches", "slices"}.

    Before the first update there is nothing to compare with: the first look becomes what later ones compare with.
    """
    engine = _engine(worker)
    if engine is None:
        return {"rank": 0, "state": "intact", "error": _NO_BACKEND, "mismatches": [], "slices": {}}
    found = engine.verify()
    return {
        "rank": engine.ranks.number,
        "state": "unusable" if engine.damage else "intact",
        "error": engine.damage,
        "mismatches": found,
        "slices": engine.live_weights().slices(),
    }


def stop_reading(worker: Any, *, dropped: bool) -> None:
    """Before the memory of the live weights is lent. ``dropped``: without what is in it."""
    engine = _engine(worker)
    if engine is not None:
        engine.stop_reading(dropped=dropped)


_NOT_CONNECTED = "the weight-transfer engine was not initialised with a relay endpoint"
_NO_BACKEND = "the engine was started without weight_transfer_config backend 'rl_coserve'"


def _state(state: str, error: str, version: int) -> dict[str, Any]:
    return {"state": state, "error": error, "version": version, "seconds": {}, "checksum": ""}


def _engine(worker: Any) -> RelayWeightTransferEngine | None:
    engine = worker.weight_transfer_engine
    if not isinstance(engine, RelayWeightTransferEngine):
        return None
    engine.attach_worker(worker)
    return engine
