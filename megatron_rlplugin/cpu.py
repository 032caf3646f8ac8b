"""What lets stock Megatron-Core (0.16.1 and 0.19.2) run on a machine without CUDA, over gloo: data, tensor, sequence,
pipeline (virtual too) and expert parallelism, the distributed optimizer, bfloat16 and clipping.

Guarantees: :func:`activate` does nothing where there is CUDA, nothing twice, and edits no file. Each shim cures one
named assumption of Megatron-Core and touches only the modules that make it; no torch function outside them gets slower
(a process-wide TorchFunctionMode, the obvious cure, would tax every operation). :func:`deactivate` puts all back.

| assumption in Megatron-Core                                | cure                                                    |
| ---------------------------------------------------------- | ------------------------------------------------------- |
| ``torch.cuda.current_device()`` is a device (buffers, RoPE) | answers the CPU                                        |
| ``torch.zeros(..., device="cuda")``, also ``tensor``       | where it is done, the module's ``torch`` is a proxy     |
| ``torch.cuda.synchronize()``, streams, events (pipeline    | the same proxy: on a CPU, work is done when the call    |
| sends, 0.19.2's gradient sync, the experts' all-to-all)    | returns, so there is nothing to wait for                |
| ``p.type() == "torch.cuda.FloatTensor"`` (clip, bf16 Adam) | CPU type names also equal their CUDA spelling           |
| a CUDA RNG tracker around dropout                          | a tracker whose ``fork`` leaves the generator alone     |
| CUDA's RNG state kept for recomputed activations           | there is none: nothing is kept                          |
| ``weight.cuda()`` of embeddings tied over pipeline stages  | answers the weight, during that method only             |
| split sizes of the experts' all-to-all come from a GPU     | they become numpy, as they do on their way from a GPU   |
| ``all_gather``, ``reduce_scatter`` of parts of other sizes  | gloo has neither: broadcasts, and a sum of everything   |
| (experts that are split over tensor-parallel ranks)        |                                                         |
| positions of a context-parallel rank go through a GPU       | they stay where they are                               |
| latent attention takes a class that is None for Transformer | it is told that there is none                          |
| Engine's                                                   |                                                         |
| 0.16.1: ``te_general_gemm`` is defined (router's product)  | it is None, which that code takes for "not installed"   |

The tracker is right only without dropout: ``megatron_rlplugin.model`` builds models without. What cannot be cured here
is avoided by the configuration made there (fused kernels, torch's norm under sequence parallelism).
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

from megatron_rlplugin.context_parallel import zigzag_places

_PROXIED_MODULES = (
    "megatron.core.pipeline_parallel.schedules",  # the token counter of a schedule
    "megatron.core.pipeline_parallel.p2p_communication",  # synchronises after a batch of sends
    "megatron.core.distributed.param_and_grad_buffer",  # 0.19.2: asks for the stream that wrote the gradients
    "megatron.core.transformer.moe.token_dispatcher",  # a stream of its own for split sizes
    "megatron.core.transformer.moe.moe_utils",  # the tracker of auxiliary losses
    "megatron.core.optimizer.optimizer",  # loss scale, overflow buffer
    "megatron.core.optimizer.clip_grads",  # overflow buffer, total norm
    "megatron.core.utils",  # the gradient norm without Apex
)
_FACTORIES = ("zeros", "tensor")
_ABSENT = object()
_undo: list[tuple[Any, str, Any]] = []  # what to put back, last first; not empty: the shims are live


class _Stream:
    """A CUDA stream or event where work is done when the call returns: there is nothing to record or wait for."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def record_event(self, event: Any = None) -> _Stream:
        return self

    def wait_stream(self, stream: Any) -> None:
        pass

    def wait_event(self, event: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass


class _CpuCuda(types.ModuleType):
    """Stands for ``torch.cuda`` inside one module: the same, but without anything to synchronise."""

    Stream = Event = _Stream

    def __init__(self) -> None:
        super().__init__("torch.cuda")
        self._only = _Stream()

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)

    def current_stream(self, device: Any = None) -> _Stream:
        return self._only

    default_stream = current_stream

    def stream(self, stream: Any) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def synchronize(self, device: Any = None) -> None:
        pass


class _UnevenDistributed(types.ModuleType):
    """Stands for ``torch.distributed`` inside one module: its collectives over lists take parts of different sizes."""

    def __init__(self) -> None:
        super().__init__("torch.distributed")

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.distributed, name)

    def all_gather(self, parts: list[Any], mine: Any, group: Any) -> None:
        for rank, part in enumerate(parts):
            if part.numel():
                if rank == group.rank():
                    part.copy_(mine)
                torch.distributed.broadcast(part, torch.distributed.get_global_rank(group, rank), group=group)

    def reduce_scatter(self, output: Any, parts: list[Any], group: Any) -> None:
        whole = torch.cat(parts)
        torch.distributed.all_reduce(whole, group=group)
        output.copy_(whole.split([len(part) for part in parts])[group.rank()])


class _CpuTorch(types.ModuleType):
    """Stands for ``torch`` inside one module: the same, but its factories read ``device="cuda"`` as the CPU."""

    def __init__(self) -> None:
        super().__init__("torch")
        self.cuda = _CpuCuda()
        self.distributed = torch.distributed
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

    def set_states(self, states: dict[str, Any]) -> None:
        pass

    @contextlib.contextmanager
    def fork(self, name: str = "") -> Iterator[None]:
        yield


def _splits_on_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """In place of ``maybe_move_tensor_to_cpu``, which leaves a CPU tensor a tensor; gloo wants numbers."""
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def _positions_on_host(pos_emb: Any, seq_dim: int, cp_group: Any) -> Any:
    places = zigzag_places(pos_emb.shape[seq_dim], cp_group.rank(), cp_group.size())
    return pos_emb.index_select(seq_dim, places)


def _without_move(method: Callable[..., Any]) -> Callable[..., Any]:
    """``method``, during which ``Tensor.cuda()`` answers the tensor itself."""

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        original = torch.Tensor.cuda
        torch.Tensor.cuda = lambda self, *a, **k: self
        try:
            return method(*args, **kwargs)
        finally:
            torch.Tensor.cuda = original

    return call


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
    uneven = _CpuTorch()
    uneven.distributed = _UnevenDistributed()
    _replace(importlib.import_module("megatron.core.tensor_parallel.mappings"), "torch", uneven)
    rng = importlib.import_module("megatron.core.tensor_parallel.random")
    _replace(rng, "_CUDA_RNG_STATE_TRACKER", NoForkTracker())
    _replace(rng, "_CUDA_RNG_STATE_TRACKER_INITIALIZED", True)
    _replace(rng, "_get_cuda_rng_state", lambda *args, **kwargs: None)
    _replace(rng, "_set_cuda_rng_state", lambda *args, **kwargs: None)
    language = importlib.import_module("megatron.core.models.common.language_module.language_module").LanguageModule
    tie = "setup_embeddings_and_output_layer"
    _replace(language, tie, _without_move(getattr(language, tie)))
    dispatcher = importlib.import_module("megatron.core.transformer.moe.token_dispatcher")
    _replace(dispatcher, "maybe_move_tensor_to_cpu", _splits_on_host)
    _replace(dispatcher.MoEAlltoAllTokenDispatcher, "cuda_dtoh_stream", None)  # so that no stand-in outlives the shims
    _replace(importlib.import_module("megatron.core.transformer.multi_latent_attention"), "HAVE_TE", False)
    for name in ("rotary_pos_embedding", "yarn_rotary_pos_embedding"):
        rope = importlib.import_module(f"megatron.core.models.common.embeddings.{name}")
        _replace(rope, "get_pos_emb_on_this_cp_rank", _positions_on_host)
    moe = importlib.import_module("megatron.core.transformer.moe.moe_utils")
    if not hasattr(moe, "te_general_gemm"):
        _replace(moe, "te_general_gemm", None)
    return True


def deactivate() -> None:
    """Put back what :func:`activate` replaced; for processes that go on to do other things (tests)."""
    while _undo:
        target, name, original = _undo.pop()
        if original is _ABSENT:
            delattr(target, name)
        else:
            setattr(target, name, original)


def _replace(target: Any, name: str, value: Any) -> None:
    _undo.append((target, name, getattr(target, name, _ABSENT)))
    setattr(target, name, value)
