"""Layers whose weights vLLM quantises itself as it loads them, so that versions in full precision can be loaded into them again.

Guarantees:

* :func:`check_layers` refuses every other kind: which is which vLLM says itself, by ``QuantizeMethodBase.uses_meta_device``, its
  own mark of a method whose weights come in full precision and are quantised layer by layer, at the start and in its layerwise
  reload (``OnlineLinearBase`` and ``OnlineMoEMethodBase``, 0.32.0; not where they start from quantised ones).
* :func:`keep_kernel` leaves what a layer computes with where it was. vLLM's reload writes new parameters into the memory of the
  old ones, but quantised experts make a new kernel each time, whose scales, strides and scratch lie elsewhere: captured CUDA
  graphs would read memory that is freed, or old scales (vllm-project/vllm#41670, #48312). The new values are written into the
  tensors of the old kernel, which stays.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

from orchestrator.api import ConfigError
from vllm_rlplugin.weights.checkpoint_mapping import PLAIN_METHODS

_KERNEL = ("moe_kernel", "moe_quant_config")  # of a method of experts: what it makes of a layer's loaded weights
_NO_KERNELS = ("builtins", "torch")  # packages whose objects are not looked into
_FULL_PRECISION = (*PLAIN_METHODS, UnquantizedFusedMoEMethod)


class KernelMoved(Exception):
    """What a layer computes with is not laid out as before, so that captured graphs would be wrong."""


def check_layers(model: torch.nn.Module, method: str | None) -> None:
    """``method``: vLLM's ``quantization``. Raises ConfigError for a layer that full precision cannot be loaded into."""
    for path, layer in model.named_modules():
        found = getattr(layer, "quant_method", None)
        if not isinstance(found, QuantizeMethodBase) or type(found) in _FULL_PRECISION:
            continue
        if not getattr(found, "uses_meta_device", False):
            from vllm.config.quantization import ONLINE_QUANT_SHORTHAND_NAMES as ONLINE

            fix = (
                f"versions come in full precision, and {path} is of {type(found).__name__}, which does not quantise as it loads: "
                f"serve an unquantised checkpoint with one of {', '.join(ONLINE)}, or without a weight relay"
            )
            raise ConfigError("quantization", method, fix)


@contextmanager
def keep_kernel(layer: torch.nn.Module) -> Iterator[None]:
    """Around the processing of its loaded weights. Raises KernelMoved; whatever is raised, the old kernel is back."""
    method = layer.quant_method
    held = {name: kernel for name in _KERNEL if (kernel := getattr(method, name, None)) is not None}
    loose = {name: value for name, value in vars(layer).items() if isinstance(value, torch.Tensor)}
    try:
        yield
        made = {name: getattr(method, name) for name in held}
        values = {name: vars(layer)[name] for name in loose if isinstance(vars(layer).get(name), torch.Tensor)}
        _write_values(type(layer).__name__, dict(_tensors([made, values])), dict(_tensors([held, loose])))
    finally:
        for name, kernel in held.items():
            setattr(method, name, kernel)
        for name, tensor in loose.items():
            if name in vars(layer):
                setattr(layer, name, tensor)


def _write_values(what: str, made: Mapping[str, torch.Tensor], held: Mapping[str, torch.Tensor]) -> None:
    """Of what was made anew to where it is held; what is held beside it was made when it computed, and stays."""
    for path, tensor in made.items():
        kept = held.get(path)
        if kept is None or (kept.shape, kept.dtype, kept.device) != (tensor.shape, tensor.dtype, tensor.device):
            raise KernelMoved(f"{what}{path} was made with other tensors than before")
    with torch.no_grad():
        for path, tensor in made.items():
            held[path].data.copy_(tensor.data)


def _tensors(value: Any, path: str = "", seen: set[int] | None = None) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors in a kernel, by where they are: in its objects, lists, tuples and dictionaries, but in no layer."""
    seen = set() if seen is None else seen
    if isinstance(value, torch.Tensor):
        yield path, value
        return
    if isinstance(value, torch.nn.Module) or id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, dict):
        parts = {f"[{key!r}]": item for key, item in value.items()}
    elif isinstance(value, list | tuple):
        parts = {f"[{index}]": item for index, item in enumerate(value)}
    elif hasattr(value, "__dict__") and type(value).__module__.partition(".")[0] not in _NO_KERNELS:
        parts = {f".{name}": item for name, item in vars(value).items()}
    else:
        return
    for name, item in parts.items():
        yield from _tensors(item, path + name, seen)
