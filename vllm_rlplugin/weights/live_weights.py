"""What is in the live model: puts a staged version there, and knows the digest that every part of it must have.

:class:`MappedWeights` copies slices in place and compares the digest of every live slice with that of the staged one.
:class:`ReloadedWeights` goes through vLLM's layerwise reload where no mapping exists (its tensors are verified before loading);
the digests are then those of the parameters as they came out, good for finding what changes later.

Both: ``load`` raises when the model is not, element by element, what was staged; it is then in no defined state. Where a
version was followed by differences (:mod:`vllm_rlplugin.weights.delta_update`) only the places that change are written
and only what they are part of is read, and ``undo`` brings back what was there: the old bits, proved by the digests
they had.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import torch
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from vllm_rlplugin.weights.checkpoint_mapping import CheckpointMapping, Fill, Slice
from vllm_rlplugin.weights.delta_update import DeltaUpdate
from vllm_rlplugin.weights.digests import digest_for
from vllm_rlplugin.weights.layer_stream import return_freed
from vllm_rlplugin.weights.quantised_layers import keep_kernel
from vllm_rlplugin.weights.rank_slices import pack_layer
from vllm_rlplugin.weights.rank_votes import LoadVotes
from vllm_rlplugin.weights.version_staging import StagedVersion

IN_PLACE = "in place, digest of every live slice compared"
RELOAD = "layerwise reload, tensors verified before loading"
_NAMED = 4  # mismatches spelled out in an error


class WeightMismatch(Exception):
    """Live weights are not those that were published; names tensor, parameter and both digests."""


class LiveWeights(Protocol):
    """The weights of one rank."""

    how: str

    def load(self, staged: StagedVersion) -> dict[str, float]:
        """Put a version into the model; returns seconds of each phase. See the module for what it raises."""

    def undo(self, staged: StagedVersion) -> list[dict[str, str]] | None:
        """Take back what ``load`` wrote, whether it raised or not. What is not as it was; None: it cannot be taken back."""

    def mismatches(self) -> list[dict[str, str]]:
        """Recompute every live digest; what differs from what was loaded. Before any ``load``: from the first look."""

    def slices(self) -> dict[str, list[list[Any]]]:
        """tensor -> [[offset, size, stride, dtype, digest], ...] of what must be live; {} where it is not known."""


class MappedWeights:
    """In place, slice by slice."""

    how = IN_PLACE

    def __init__(self, mapping: CheckpointMapping, device: torch.device) -> None:
        self.mapping = mapping
        self._device = device
        self._digest = digest_for(device)
        self._expected: dict[Slice | Fill, int] = {}

    def load(self, staged: StagedVersion) -> dict[str, float]:
        if staged.delta is not None:
            return self._apply_delta(staged.delta)
        marks = [time.perf_counter()]
        with torch.no_grad():
            for piece in staged.pieces:
                piece.slice.target.copy_(piece.source, non_blocking=True)
            for fill in self.mapping.fills:
                fill.target.fill_(fill.value)
        self._synchronize()
        marks.append(time.perf_counter())
        self._expected = {piece.slice: piece.digest for piece in staged.pieces}
        self._expected.update({fill: self._fill_digest(fill) for fill in self.mapping.fills})
        lost = [item.tensor for item in self.mapping.slices if item not in self._expected]
        if lost:
            raise WeightMismatch(f"nothing was staged for {', '.join(lost[:_NAMED])}")
        if found := self.mismatches():
            raise WeightMismatch(describe_mismatches(found))
        marks.append(time.perf_counter())
        for packed in staged.packed:
            packed.layer.cpu_linear = packed.linear
        marks.append(time.perf_counter())
        return dict(zip(("copy", "verify", "swap"), (b - a for a, b in itertools.pairwise(marks)), strict=True))

    def _apply_delta(self, delta: DeltaUpdate) -> dict[str, float]:
        """Write what changes, compare what it is part of, pack anew what computes with it."""
        marks = [time.perf_counter()]
        with torch.no_grad():
            for edits in delta.edits:
                edits.write_new()
        self._synchronize()
        marks.append(time.perf_counter())
        if found := self._differing((proof.slice, proof.view, proof.digest) for proof in delta.proofs):
            raise WeightMismatch(describe_mismatches(found))
        marks.append(time.perf_counter())
        self._pack_again(delta)
        self._expected = {**self._expected, **delta.digests}
        marks.append(time.perf_counter())
        return dict(zip(("copy", "verify", "swap"), (b - a for a, b in itertools.pairwise(marks)), strict=True))

    def undo(self, staged: StagedVersion) -> list[dict[str, str]] | None:
        delta = staged.delta
        if delta is None:
            return None
        with torch.no_grad():
            for edits in delta.edits:
                edits.restore_old()
        self._synchronize()
        before = {item: delta.base.digests[item] for item in delta.digests}
        self._pack_again(delta)
        self._expected = {**self._expected, **before}
        return self._differing((item, item.target, digest) for item, digest in before.items())

    @property
    def digests(self) -> dict[Slice | Fill, int]:
        """Of what was loaded last, or of what was there at the first look."""
        return dict(self._expected)

    def mismatches(self) -> list[dict[str, str]]:
        if not self._expected:
            parts: tuple[Slice | Fill, ...] = (*self.mapping.slices, *self.mapping.fills)
            self._expected = {item: self._digest(item.target) for item in parts}
            return []
        return self._differing((item, item.target, expected) for item, expected in self._expected.items())

    def _differing(self, parts: Iterable[tuple[Slice | Fill, torch.Tensor, int]]) -> list[dict[str, str]]:
        found = []
        for item, view, expected in parts:
            live = self._digest(view)
            if live != expected:
                tensor = item.tensor if isinstance(item, Slice) else f"(constant {item.value})"
                found.append(_mismatch(tensor, item.parameter, live, expected))
        return found

    def _pack_again(self, delta: DeltaUpdate) -> None:
        """A layer at a time: the copy that is replaced goes before the next one is made."""
        parameters = {item.slice.parameter for item in delta.edits}
        for layer, parameter in self.mapping.packed:
            if parameter in parameters:
                layer.cpu_linear = pack_layer(layer, self.mapping.live[parameter]).linear

    def _synchronize(self) -> None:
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)

    def slices(self) -> dict[str, list[list[Any]]]:
        rows: dict[str, list[list[Any]]] = {}
        for item, digest in self._expected.items():
            if isinstance(item, Slice):
                dtype = str(item.target.dtype).removeprefix("torch.")
                row = [item.offset, list(item.size), list(item.stride), dtype, f"{digest:016x}"]
                rows.setdefault(item.tensor, []).append(row)
        return rows

    def _fill_digest(self, fill: Fill) -> int:
        return self._digest(torch.full_like(fill.target, fill.value, memory_format=torch.contiguous_format))


class ReloadedWeights:
    """Through vLLM's own reload, a layer at a time, which allocates that layer anew and takes seconds for a large model.

    After a failure vLLM's bookkeeping is as before it, so that another version can be loaded, unless ``broken``. ``agree``: see
    :class:`LoadVotes`.
    """

    how = RELOAD

    def __init__(
        self,
        model: torch.nn.Module,
        model_config: Any,
        device: torch.device,
        agree: Callable[[bool], bool] = lambda fine: fine,
    ) -> None:
        self._model = model
        self._model_config = model_config
        self._agree = agree
        self._on_cpu = device.type == "cpu"
        self._digest = digest_for(device)
        self._expected: dict[str, int] = {}
        self.broken = False
        self.touched = False  # the latest load wrote into the model

    def load(self, staged: StagedVersion) -> dict[str, float]:
        self.touched = False
        votes = LoadVotes(self._agree)
        try:
            seconds = self._load(staged, votes)
        except BaseException:
            votes.give_up()
            raise
        votes.cast()
        return seconds

    def _load(self, staged: StagedVersion, votes: LoadVotes) -> dict[str, float]:
        started = time.perf_counter()
        expected = self._loaded_names()
        tensors = staged.layers.read_tensors(votes) if staged.layers is not None else iter(staged.tensors.items())
        self.broken = True
        initialize_layerwise_reload(self._model)
        # What vLLM made of loaded weights (MLA's absorbed projections, scales of online quantisation) is not there now.
        expected &= self._loaded_names()
        waiting = self._waiting_layers()
        with self._experts_packed_anew(), self._processed_alone():
            try:
                loaded = self._model.load_weights(tensors)
                self._refuse_lost(expected if loaded is None else loaded)
            except BaseException:
                self.touched = self._waiting_layers() < waiting
                self._give_up_reload()
                self.broken = False
                raise
            self.touched = True
            with _quiet_reload():
                finalize_layerwise_reload(self._model, self._model_config)
        self.broken = False
        if loaded is not None and (missing := sorted(expected - loaded)):
            raise WeightMismatch(f"the version lacks weights that the model has: {', '.join(missing[:8])}")
        self._repack_tied_heads()
        loaded_at = time.perf_counter()
        self._expected = self._digests()
        return {"reload": loaded_at - started, "verify": time.perf_counter() - loaded_at}

    def undo(self, staged: StagedVersion) -> list[dict[str, str]] | None:
        return None

    def mismatches(self) -> list[dict[str, str]]:
        live = self._digests()
        if not self._expected:
            self._expected = live
        return [
            _mismatch("", name, live.get(name, 0), expected)
            for name, expected in self._expected.items()
            if live.get(name) != expected
        ]

    def slices(self) -> dict[str, list[list[Any]]]:
        return {}

    def _digests(self) -> dict[str, int]:
        return {name: self._digest(parameter) for name, parameter in self._model.named_parameters()}

    def _loaded_names(self) -> set[str]:
        """Of its parameters, as the checkpoint's loader says them: with LoRA adapters those of the layers inside."""
        return {name.replace(".base_layer.", ".") for name, _ in self._model.named_parameters()}

    def _waiting_layers(self) -> int:
        """That vLLM has not put in place yet."""
        return sum(get_layerwise_info(layer).can_load() for layer in self._model.modules())

    def _refuse_lost(self, loaded: set[str]) -> None:
        """What the model's loader copies itself, past the loaders of parameters, goes to tensors without memory, and vLLM puts
        the old weights back without an error."""
        lost = []
        for path, layer in self._model.named_modules():
            info = get_layerwise_info(layer)
            if info.can_load():
                came = {name for name, _ in info.loaded_weights}
                own = layer.named_parameters(recurse=False)
                names = [f"{path}.{name}" for name, value in own if value.is_meta and name not in came]
                lost += [name for name in names if name.replace(".base_layer.", ".") in loaded]
        if lost:
            named = ", ".join(lost[:_NAMED])
            raise WeightMismatch(f"the loader of {type(self._model).__name__} writes past vLLM's reload: {named}")

    def _give_up_reload(self) -> None:
        """What a layer has of a version that did not come whole is dropped: it keeps the weights that it had."""
        for layer in self._model.modules():
            info = get_layerwise_info(layer)
            if info.can_load():
                info.loaded_weights.clear()
                info.load_numel = 0
        with _quiet_reload():
            finalize_layerwise_reload(self._model, self._model_config)

    @contextlib.contextmanager
    def _experts_packed_anew(self) -> Iterator[None]:
        """On CPU experts compute with packed weights, which vLLM packs only when it makes their kernel: a reload would put plain
        ones where packed ones belong, silently. Without a kernel it makes one, as at its start."""
        methods = [getattr(module, "quant_method", None) for module in self._model.modules()]
        kernels = {
            method: method.moe_kernel
            for method in methods
            if self._on_cpu and isinstance(method, UnquantizedFusedMoEMethod) and method.moe_kernel is not None
        }
        for method in kernels:
            method.moe_kernel = None
        try:
            yield
        finally:
            for method, kernel in kernels.items():
                method.moe_kernel = method.moe_kernel or kernel

    @contextlib.contextmanager
    def _processed_alone(self) -> Iterator[None]:
        """vLLM holds what it was handed of a layer until that is in place. Once loaded it is of no use, and beside the layer that
        was made of it, and the one that is packed from that, it would be a third copy."""
        found = (getattr(module, "quant_method", None) for module in self._model.modules())
        methods = {method for method in found if isinstance(method, QuantizeMethodBase)}
        for method in methods:
            process = method.process_weights_after_loading
            method.process_weights_after_loading = functools.partial(_process_alone, process)
        try:
            yield
        finally:
            for method in methods:
                del method.process_weights_after_loading

    def _repack_tied_heads(self) -> None:
        """Let a tied lm_head pack the new embedding.

        The stock reload processes a shared parameter for one of its owners only (vLLM's reload/layerwise.py, limitation
        2): on CPU, where lm_head computes with a packed copy, it would go on with the old weights, silently.
        """
        owners: dict[int, torch.nn.Module] = {}
        for module in self._model.modules():
            weight = getattr(module, "weight", None)
            if not isinstance(weight, torch.Tensor) or weight.numel() == 0:
                continue
            shared = owners.setdefault(id(weight), module) is not module
            method = getattr(module, "quant_method", None)
            if shared and isinstance(module, ParallelLMHead) and isinstance(method, QuantizeMethodBase):
                method.process_weights_after_loading(module)


def _process_alone(process: Callable[[torch.nn.Module], None], layer: torch.nn.Module) -> None:
    """What was loaded into the layer is let go of first; vLLM still asks for the names."""
    info = get_layerwise_info(layer)
    info.loaded_weights = [(name, None) for name, _ in info.loaded_weights]
    return_freed()
    with keep_kernel(layer) if getattr(layer.quant_method, "uses_meta_device", False) else contextlib.nullcontext():
        process(layer)


def describe_mismatches(mismatches: list[dict[str, str]]) -> str:
    """One line for people."""
    named = "; ".join(
        f"{item['tensor'] or 'parameter'} in {item['parameter']} has digest {item['found']}, expected {item['expected']}"
        for item in mismatches[:_NAMED]
    )
    more = f"; and {len(mismatches) - _NAMED} more" if len(mismatches) > _NAMED else ""
    return f"live weights differ from what was published: {named}{more}"


def _mismatch(tensor: str, parameter: str, live: int, expected: int) -> dict[str, str]:
    return {"tensor": tensor, "parameter": parameter, "found": f"{live:016x}", "expected": f"{expected:016x}"}


@contextlib.contextmanager
def _quiet_reload() -> Iterator[None]:
    """Drop vLLM's "Failed to load weights" for layers that have only buffers (rotary caches) or tied weights.

    It would come with every update. Nothing is hidden: the caller compares what was loaded with the parameters there are.
    """

    def keep(record: logging.LogRecord) -> bool:
        return "Failed to load weights" not in record.getMessage()

    logger = logging.getLogger("vllm.model_executor.model_loader.reload.layerwise")
    logger.addFilter(keep)
    try:
        yield
    finally:
        logger.removeFilter(keep)
