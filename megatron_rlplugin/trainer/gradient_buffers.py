"""The gradient buffers of Megatron's DDP: to host memory and back, dropped, checked for numbers that are none.

Guarantees: offload and reload keep every value bit for bit, and every view of a buffer (``main_grad``, the buckets, the
shards of a distributed optimizer) is valid again afterwards; Megatron's own ``offload_grad_buffers`` drops the values.
While a buffer is away nothing may read or write a gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from orchestrator.api import ConfigError, RunError


def grad_buffers(chunks: Sequence[Any]) -> list[Any]:
    """Megatron's parameter-and-gradient buffers of these DDP chunks, the dense ones of a chunk before its experts'."""
    return [buffer for chunk in chunks for buffer in [*chunk.buffers, *chunk.expert_parallel_buffers]]


def bucket_groups(chunks: Sequence[Any]) -> list[Any]:
    """Megatron's bucket groups of these DDP chunks, in the same order."""
    return [g for chunk in chunks for g in [*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups]]


class GradientBuffers:
    """The flat gradient tensors of this rank's DDP chunks."""

    def __init__(self, chunks: Sequence[Any]) -> None:
        self.tensors: list[Tensor] = []
        for buffer in grad_buffers(chunks):
            # 0.19: parameters that accumulate in a precision of their own keep a tensor beside the buffer.
            self.tensors += [buffer.grad_data, *getattr(buffer, "extra_main_grads", [])]
        self._registered = any(getattr(chunk.ddp_config, "nccl_ub", False) for chunk in chunks)
        self._bytes = [tensor.untyped_storage().nbytes() for tensor in self.tensors]
        self._host: list[Tensor] = []  # kept from step to step: pinning memory is slow

    @property
    def nbytes(self) -> int:
        """Bytes of all gradients of this rank, on the device or on the host."""
        return sum(self._bytes)

    @property
    def resident(self) -> bool:
        """Whether the gradients are where Megatron expects them."""
        sizes = [tensor.untyped_storage().nbytes() for tensor in self.tensors]
        return sizes == self._bytes

    def offload(self) -> None:
        """Copy to host memory (pinned where there is CUDA), then free the device's. Raises RunError when not there."""
        if not self.resident:
            raise RunError("the gradient buffers are not on the device: there is nothing to offload")
        if not self._host:
            self._host = [torch.empty_like(t, device="cpu", pin_memory=t.is_cuda) for t in self.tensors]
        for tensor, host in zip(self.tensors, self._host, strict=True):
            host.copy_(tensor, non_blocking=True)
        self.drop()

    def reload(self) -> None:
        """The values of the last :meth:`offload`, on the device again."""
        if self.resident or not self._host:
            raise RunError("the gradient buffers were not offloaded: there is nothing to reload")
        self.allocate()
        for tensor, host in zip(self.tensors, self._host, strict=True):
            tensor.copy_(host, non_blocking=True)
        self._wait()  # the host copy may be overwritten or freed from here on

    def drop(self) -> None:
        """Free the device memory; the values are lost unless :meth:`offload` copied them. Between steps nothing is."""
        if self._registered:
            raise ConfigError("ddp.nccl_ub", True, "must be off: NCCL holds the gradient buffers, they cannot be freed")
        self._wait()
        for tensor in self.tensors:
            tensor.untyped_storage().resize_(0)

    def allocate(self) -> None:
        """Device memory again where there is none; its values are undefined."""
        for tensor, size in zip(self.tensors, self._bytes, strict=True):
            if tensor.untyped_storage().nbytes() != size:
                tensor.untyped_storage().resize_(size)

    def forget(self) -> None:
        """Give the host memory back."""
        self._host = []

    def finite(self) -> bool:
        """Whether every gradient of this rank is a finite number. Reads the buffers once, allocates nothing."""
        # The largest magnitude: a sum could overflow where no element does. NaN propagates through it.
        largest = [torch.linalg.vector_norm(t, ord=float("inf")) for t in self.tensors if t.numel()]
        return not largest or bool(torch.isfinite(torch.stack([value.float() for value in largest])).all())

    def _wait(self) -> None:
        if any(tensor.is_cuda for tensor in self.tensors):
            torch.cuda.current_stream().synchronize()
