"""Where every element of the checkpoint lives in this rank's model, found by watching vLLM's own loader.

:func:`discover_mapping` runs ``model.load_weights`` on tensors of the *meta* device, which have a shape and strides and
no memory, and records each copy into the model: which part of which checkpoint tensor (offset, size, stride) goes to
which live view. Whatever the loader does by views (TP slices, fused qkv and gate_up, PP stages, expert lists) comes out
exactly.

Guarantees:

* Discovery writes nothing into the model: every write to a parameter or buffer is caught below Python (a dispatch mode,
  in this thread only) and noted instead of done.
* A mapping is returned only if it is the whole truth: every element of every parameter is written exactly once, by a copy
  of a view of a checkpoint tensor or by a constant (the padding of a vocabulary). Otherwise :class:`NoMappingError` says
  why: loaders that compute (transpose into new memory, cast, stack, read values), layers whose weights vLLM changes after
  loading (quantised, fused experts, latent attention), and CPU layers whose plain weights are gone
  (``patches/vllm/cpu_keep_weights``).

Call it while the model does not run.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

from orchestrator.transfer.shard_routing import Box, bounding_box, enclosing_box, rebase_view

_ATEN = torch.ops.aten
# Methods whose process_weights_after_loading leaves the weights what was loaded (on CPU it makes a packed copy beside).
PLAIN_METHODS = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)


class NoMappingError(Exception):
    """This model cannot be updated in place by plain copies; the text says why."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One checkpoint tensor, contiguous."""

    shape: tuple[int, ...]
    dtype: torch.dtype


CheckpointLayout = dict[str, TensorSpec]  # in checkpoint coordinates


@dataclass(frozen=True, slots=True, eq=False)
class Slice:
    """A part of a checkpoint tensor (in elements, as ``as_strided`` takes it) and the live view that holds it.

    ``parameter`` may be a buffer; of a shared one it is the first name.
    """

    tensor: str
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    parameter: str
    target: torch.Tensor

    def cut_from(self, tensor: torch.Tensor) -> torch.Tensor:
        """The part of a contiguous checkpoint tensor; a view."""
        flat = tensor.reshape(-1)
        return flat.as_strided(self.size, self.stride, flat.storage_offset() + self.offset)

    def box(self, shape: Sequence[int]) -> Box:
        """What of the checkpoint tensor of this shape it reads: the smallest box around it."""
        return bounding_box(shape, self.offset, self.size, self.stride)

    def cut_box(self, shape: Sequence[int], box: Box, part: torch.Tensor) -> torch.Tensor:
        """The same as :meth:`cut_from`, of a tensor that has only ``box`` of the checkpoint tensor; a view."""
        offset, stride = rebase_view(shape, box, self.offset, self.size, self.stride)
        flat = part.reshape(-1)
        return flat.as_strided(self.size, stride, flat.storage_offset() + offset)


@dataclass(frozen=True, slots=True, eq=False)
class Fill:
    """A part of the model that the loader sets to a constant."""

    parameter: str
    value: float
    target: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class CheckpointMapping:
    """The whole of one rank's model. ``elements``: of all its parameters, shared ones once."""

    slices: tuple[Slice, ...]
    fills: tuple[Fill, ...]
    live: dict[str, torch.Tensor]  # the parameters and buffers that slices and fills name
    packed: tuple[tuple[torch.nn.Module, str], ...]  # layers that compute with a packed copy of that parameter
    elements: int
    unused: tuple[str, ...]  # checkpoint tensors of which this rank takes nothing
    places: dict[str, tuple[int, tuple[int, ...], torch.dtype]]  # address, shape and dtype of every parameter
    _by_tensor: dict[str, list[Slice]] = field(init=False)

    def __post_init__(self) -> None:
        by_tensor: dict[str, list[Slice]] = {}
        for item in self.slices:
            by_tensor.setdefault(item.tensor, []).append(item)
        object.__setattr__(self, "_by_tensor", by_tensor)

    def slices_of(self, tensor: str) -> list[Slice]:
        """The slices of one checkpoint tensor."""
        return self._by_tensor.get(tensor, [])

    def tensor_boxes(self, layout: CheckpointLayout) -> dict[str, Box]:
        """The smallest box of each checkpoint tensor that has all that is read of it; others are not in it."""
        found: dict[str, Box] = {}
        for tensor, slices in self._by_tensor.items():
            shape = layout[tensor].shape
            read = [item.box(shape) for item in slices if 0 not in item.size]
            if read:
                found[tensor] = functools.reduce(enclosing_box, read)
        return found

    def holds_for(self, model: torch.nn.Module) -> bool:
        """Whether the parameters are still where they were found."""
        return _places(model) == self.places


def discover_mapping(model: torch.nn.Module, layout: CheckpointLayout) -> CheckpointMapping:
    """Find the mapping for a checkpoint with these tensors. Raises NoMappingError; see the module."""
    _refuse_changed_layers(model)
    recorder = _Recorder(model)
    tensors = {name: torch.empty(spec.shape, dtype=spec.dtype, device="meta") for name, spec in layout.items()}
    recorder.sources = {_storage(tensor): (name, tensor) for name, tensor in tensors.items()}
    memory = [(parameter, parameter.data) for parameter in model.parameters()]
    try:
        with torch.no_grad(), recorder:
            model.load_weights(iter(tensors.items()))
    except Exception as error:  # the loaders of some hundred models: whatever they raise without data
        raise NoMappingError(f"the loader needs more than shapes: {error!r:.300}") from error
    finally:
        replaced = [item for item in memory if _storage(item[0]) != _storage(item[1])]
        for parameter, data in replaced:  # `parameter.data = ...` is no operation that a mode sees
            parameter.data = data
    if replaced:
        raise NoMappingError("the loader replaces the memory of parameters")
    if recorder.problem:
        raise NoMappingError(recorder.problem)
    elements = _check_coverage(model, recorder)
    used = {item.tensor for item in recorder.slices}
    return CheckpointMapping(
        tuple(recorder.slices),
        tuple(recorder.fills),
        recorder.live(),
        tuple((layer, recorder.name_of(layer.weight)) for layer in _packed_layers(model)),
        elements,
        tuple(name for name in layout if name not in used),
        _places(model),
    )


class _Recorder(TorchDispatchMode):  # type: ignore[misc]
    """Notes writes into the model's memory and leaves them out; lets everything else happen."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.sources: dict[int, tuple[str, torch.Tensor]] = {}
        self.slices: list[Slice] = []
        self.fills: list[Fill] = []
        self.problem = ""
        self._live: dict[int, tuple[str, torch.Tensor]] = {}
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            self._live.setdefault(_storage(tensor), (name, tensor.detach()))

    def name_of(self, tensor: torch.Tensor) -> str:
        """Of a parameter or buffer."""
        return self._live[_storage(tensor)][0]

    def live(self) -> dict[str, torch.Tensor]:
        """What is written, by name."""
        written = {*(item.parameter for item in self.slices), *(item.parameter for item in self.fills)}
        return {name: tensor for name, tensor in self._live.values() if name in written}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        target = self._written(func, args, kwargs)
        if func is _ATEN.copy_.default and not args[0].numel():  # a rank that has only padding of a vocabulary
            return args[0]
        if target is None:
            return func(*args, **kwargs)
        parameter = self.name_of(target)
        if func is _ATEN.copy_.default and args[1].device.type == "meta":
            self._note_copy(parameter, target, args[1])
        elif func is _ATEN.fill_.Scalar or func is _ATEN.zero_.default:
            value = 0 if func is _ATEN.zero_.default else args[1]
            self.fills.append(Fill(parameter, value, target.detach()))
        else:
            self._give_up(f"{parameter} is written by {func}")
        return target

    def _written(self, func: Any, args: Any, kwargs: Any) -> torch.Tensor | None:
        """The tensor of the model that this operation would write to."""
        for position, argument in enumerate(func._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            for tensor in value if isinstance(value, list | tuple) else (value,):
                if isinstance(tensor, torch.Tensor) and tensor.numel() and _storage(tensor) in self._live:
                    return tensor
        return None

    def _note_copy(self, parameter: str, target: torch.Tensor, source: torch.Tensor) -> None:
        name, whole = self.sources.get(_storage(source), ("", None))
        if whole is None or source.dtype != whole.dtype:
            self._give_up(f"{parameter} is made from a computed tensor, not from a view of a checkpoint tensor")
            return
        view = source.expand(target.shape)
        self.slices.append(
            Slice(name, view.storage_offset(), tuple(view.shape), tuple(view.stride()), parameter, target.detach())
        )

    def _give_up(self, problem: str) -> None:
        self.problem = self.problem or problem


def _refuse_changed_layers(model: torch.nn.Module) -> None:
    devices = sorted({parameter.device.type for parameter in model.parameters()})
    if devices not in (["cpu"], ["cuda"]):
        raise NoMappingError(f"its parameters are on {', '.join(devices)}: neither all CPU nor all CUDA")
    for path, module in model.named_modules():
        name, kind = path or "the model", type(module).__name__
        method = getattr(module, "quant_method", None)
        if method is not None and type(method) not in PLAIN_METHODS:
            raise NoMappingError(f"{name} ({kind}) has weights that {type(method).__name__} changes after loading")
        if method is not None and devices == ["cpu"] and not hasattr(module, "cpu_linear"):
            raise NoMappingError(f"{name} ({kind}) is packed in a way that is not known here")
        if hasattr(module, "process_weights_after_loading") and type(module) is not Attention:
            raise NoMappingError(f"{name} ({kind}) changes its weights after loading")


def _check_coverage(model: torch.nn.Module, recorder: _Recorder) -> int:
    """Every element of every parameter exactly once; returns how many there are."""
    written: dict[int, list[torch.Tensor]] = {}
    for target in (*(item.target for item in recorder.slices), *(item.target for item in recorder.fills)):
        written.setdefault(_storage(target), []).append(target)
    elements = 0
    seen: set[int] = set()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        storage = _storage(parameter)
        if parameter.numel() == 0:
            raise NoMappingError(f"{name} is empty: its plain weights were dropped after packing")
        if storage in seen:
            continue
        seen.add(storage)
        elements += parameter.numel()
        problem = _gap_or_overlap(parameter, written.get(storage, []))
        if problem:
            raise NoMappingError(f"{name}: {problem}")
    return elements


def _gap_or_overlap(parameter: torch.Tensor, targets: Iterable[torch.Tensor]) -> str:
    parts = [target for target in targets if target.numel()]
    if all(item.is_contiguous() and item.dtype == parameter.dtype for item in (parameter, *parts)):
        end = parameter.storage_offset()
        for start, length in sorted((item.storage_offset(), item.numel()) for item in parts):
            if start != end:
                return f"{abs(start - end)} elements are {'never written' if start > end else 'written twice'}"
            end = start + length
        missing = parameter.storage_offset() + parameter.numel() - end
        return f"{missing} elements are written never" if missing else ""
    if any(item.dtype != parameter.dtype for item in parts):
        return "it is written as another dtype"
    room = parameter.untyped_storage().nbytes() // parameter.element_size()
    count = torch.zeros(room, dtype=torch.uint8)
    for item in parts:
        count.as_strided(item.size(), item.stride(), item.storage_offset()).add_(1)
    own = count.as_strided(parameter.size(), parameter.stride(), parameter.storage_offset())
    if bool((own == 1).all()) and int(count.sum()) == parameter.numel():
        return ""
    return f"{int((own == 0).sum())} elements are never written, {int((count > 1).sum())} more than once"


def _packed_layers(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Layers that compute with a packed copy of their weight (vLLM's CPU backend), which a changed weight makes stale.

    A tied head counts by itself: it packs its own copy of the embedding that it shares.
    """
    return [
        module
        for module in model.modules()
        if hasattr(module, "cpu_linear") and isinstance(getattr(module, "quant_method", None), PLAIN_METHODS)
    ]


def _places(model: torch.nn.Module) -> dict[str, tuple[int, tuple[int, ...], torch.dtype]]:
    return {
        name: (parameter.data_ptr(), tuple(parameter.shape), parameter.dtype)
        for name, parameter in model.named_parameters(remove_duplicate=False)
    }


def _storage(tensor: torch.Tensor) -> int:
    """Which memory a tensor is a view of; meta tensors have one each, too. Valid while the tensor lives."""
    return int(tensor.untyped_storage()._cdata)
