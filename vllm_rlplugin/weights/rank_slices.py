"""This rank's slices of a whole version, in twins of the live parameters, and the packed copies that CPU layers compute with.

Guarantees: a piece has the bits that vLLM's loader would put into its slice, and the digest of just these; a packed copy is
made by vLLM's own functions, on a stand-in for the layer. Nothing here writes to the model.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from orchestrator.transfer.shard_routing import Box
from vllm_rlplugin.weights.checkpoint_mapping import CheckpointMapping, Slice
from vllm_rlplugin.weights.digests import digest_for


@dataclass(frozen=True, slots=True, eq=False)
class StagedSlice:
    """One slice, ready to be copied into its target, and the digest it must have there."""

    slice: Slice
    source: torch.Tensor  # a part of a twin of the live parameter: same shape, dtype and strides
    digest: int


@dataclass(frozen=True, slots=True, eq=False)
class PackedLayer:
    """What a CPU layer will compute with."""

    layer: torch.nn.Module
    linear: Callable[..., torch.Tensor]


def pack_layer(layer: torch.nn.Module, weight: torch.Tensor) -> PackedLayer:
    """What a layer will compute with when this is its weight."""
    stand_in = torch.nn.Module()
    stand_in.weight = torch.nn.Parameter(weight.detach(), requires_grad=False)
    layer.quant_method.process_weights_after_loading(stand_in)
    return PackedLayer(layer, stand_in.cpu_linear)


class SliceCutter:
    """Makes this rank's slices of one version, in twins of the live parameters (CUDA: pinned), each with its digest."""

    def __init__(self, mapping: CheckpointMapping, device: torch.device) -> None:
        self._mapping = mapping
        self._device = device
        self._digest = digest_for(device)
        self._twins: dict[str, torch.Tensor] = {}
        self._missing = Counter(item.parameter for item in mapping.slices)  # slices that were not cut yet
        self._packed: dict[torch.nn.Module, PackedLayer] = {}

    def cut_tensor(
        self, name: str, tensor: torch.Tensor, shape: Sequence[int] | None = None, box: Box = ()
    ) -> Iterator[StagedSlice]:
        """The slices of one checkpoint tensor, cast as vLLM's loader casts.

        ``tensor``: all of it, or with ``shape`` what lies in ``box`` of one of that shape.
        """
        for item in self._mapping.slices_of(name):
            live = self._mapping.live[item.parameter]
            offset = item.target.storage_offset() - live.storage_offset()
            source = self._twin(item.parameter).as_strided(item.target.size(), item.target.stride(), offset)
            source.copy_(item.cut_from(tensor) if shape is None else item.cut_box(shape, box, tensor))
            self._missing[item.parameter] -= 1
            yield StagedSlice(item, source, self._digest(source.to(self._device)))

    def pack_complete(self) -> None:
        """The packed copies of CPU layers whose slices were all cut, made by vLLM's own functions on a stand-in: packing takes
        several times as long as copying, so it is done while the next tensors come."""
        for layer, parameter in self._mapping.packed:
            if layer not in self._packed and not self._missing[parameter]:
                self._pack(layer, parameter)

    def pack_layers(self) -> list[PackedLayer]:
        """Once all tensors were cut: all packed copies."""
        for layer, parameter in self._mapping.packed:
            if layer not in self._packed:
                self._pack(layer, parameter)
        return [self._packed[layer] for layer, _ in self._mapping.packed]

    def _pack(self, layer: torch.nn.Module, parameter: str) -> None:
        for fill in self._mapping.fills:
            if fill.parameter == parameter:
                offset = fill.target.storage_offset() - self._mapping.live[parameter].storage_offset()
                twin = self._twin(parameter)
                twin.as_strided(fill.target.size(), fill.target.stride(), offset).fill_(fill.value)
        self._packed[layer] = pack_layer(layer, self._twin(parameter))

    def _twin(self, parameter: str) -> torch.Tensor:
        twin = self._twins.get(parameter)
        if twin is None:
            live = self._mapping.live[parameter]
            if self._device.type == "cuda":
                elements = 1 + sum(
                    (count - 1) * stride for count, stride in zip(live.size(), live.stride(), strict=True)
                )
                memory = pinned_memory(elements * live.element_size()).view(live.dtype)
                twin = memory.as_strided(live.size(), live.stride())
            else:
                twin = torch.empty_strided(live.size(), live.stride(), dtype=live.dtype)
            self._twins[parameter] = twin
        return twin


def pinned_memory(size: int) -> torch.Tensor:
    """uint8[size] that a device copies from by itself; its memory is free when the last view of it is gone.

    Torch's own (``pin_memory``) is rounded up to a power of two and kept for ever: up to twice the weights.
    """
    memory = np.empty(size, np.uint8)
    cuda = torch.cuda.cudart()
    torch.cuda.check_error(cuda.cudaHostRegister(memory.ctypes.data, size, 0))
    weakref.finalize(memory, cuda.cudaHostUnregister, memory.ctypes.data)
    return torch.from_numpy(memory)
