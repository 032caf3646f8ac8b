"""What lets stock Megatron-Core run on a machine without CUDA (gloo, one or two ranks, a dense model).

Guarantees: :func:`activate` does nothing where there is CUDA, nothing twice, and edits no file. Each shim cures one named
assumption of Megatron-Core and touches only the modules that make it; no torch function outside them gets slower (a
process-wide TorchFunctionMode, the obvious cure, would tax every operation).

| assumption in Megatron-Core 0.16.1                         | cure                                                    |
| ---------------------------------------------------------- | ------------------------------------------------------- |
| ``torch.cuda.current_device()`` is a device (buffers, RoPE) | answers the CPU                                         |
| ``torch.zeros(..., device="cuda")``, the same for ``tensor`` | in the modules that do it, the name ``torch`` is a proxy |
| ``p.type() == "torch.cuda.FloatTensor"`` (clip, bf16 Adam)  | CPU type names also compare equal to their CUDA spelling |
| a CUDA RNG tracker around dropout                           | a tracker whose ``fork`` leaves the generator alone      |

The last one is right only without dropout: ``megatron_rlplugin.model`` builds models without.
"""

from __future__ import annotations

import contextlib
import importlib
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

_PROXIED_MODULES = (
    "megatron.core.pipeline_parallel.schedules",  # the token counter of a schedule
    "megatron.core.optimizer.optimizer",  # loss scale, overflow buffer
    "megatron.core.optimizer.clip_grads",  # overflow buffer, total norm
    "megatron.core.utils",  # the gradient norm without Apex
)
_FACTORIES = ("zeros", "tensor")
_undo: list[tuple[Any, str, Any]] = []  # what to put back, last first; not empty: the shims are live


class _CpuTorch(types.ModuleType):
    """Stands for ``torch`` inside one module: the same, but its factories read ``device="cuda"`` as the CPU."""

    def __init__(self) -> None:
        super().__init__("torch")
        for name in _FACTORIES:
            setattr(self, name, _on_cpu(getattr(torch, name)))

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def _on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    def make(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("device") == "cuda":
            kwargs["device"] = "cpu"
        return factory(*args, **kwargs)

    return make


class _TypeName(str):
    """``"torch.FloatTensor"`` that also equals ``"torch.cuda.FloatTensor"``; prints and hashes as what it is."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return str.__eq__(self, other) or (isinstance(other, str) and other == self.replace("torch.", "torch.cuda.", 1))

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__


class NoForkTracker:
    """In place of Megatron's CUDA RNG tracker: there is one generator, and without dropout nobody draws from it."""

    def is_initialized(self) -> bool:
        return True

    def get_states(self) -> dict[str, Any]:
        return {}

    @contextlib.contextmanager
    def fork(self, name: str = "") -> Iterator[None]:
        yield


def needed() -> bool:
    """Whether this process has no CUDA."""
    return not torch.cuda.is_available()


def is_active() -> bool:
    """Whether the shims are live in this process."""
    return bool(_undo)


def activate() -> bool:
    """Make them live where they are needed. Returns whether they are."""
    if _undo or not needed():
        return is_active()
    original_type = torch.Tensor.type

    def tensor_type(self: Any, *args: Any, **kwargs: Any) -> Any:
        answer = original_type(self, *args, **kwargs)
        return _TypeName(answer) if isinstance(answer, str) and self.device.type == "cpu" else answer

    _replace(torch.cuda, "current_device", lambda: torch.device("cpu"))
    _replace(torch.Tensor, "type", tensor_type)
    proxy = _CpuTorch()
    for name in _PROXIED_MODULES:
        _replace(importlib.import_module(name), "torch", proxy)
    rng = importlib.import_module("megatron.core.tensor_parallel.random")
    _replace(rng, "_CUDA_RNG_STATE_TRACKER", NoForkTracker())
    _replace(rng, "_CUDA_RNG_STATE_TRACKER_INITIALIZED", True)
    return True


def deactivate() -> None:
    """Put back what :func:`activate` replaced; for processes that go on to do other things (tests)."""
    while _undo:
        target, name, original = _undo.pop()
        setattr(target, name, original)


def _replace(target: Any, name: str, value: Any) -> None:
    _undo.append((target, name, getattr(target, name)))
    setattr(target, name, value)
