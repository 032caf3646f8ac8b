"""The layers of a model in host memory, and their way into the buffers of a device (RollPacker 4.3).

Guarantees: a layer is one flat run of bytes, so it travels in one copy; what arrives is bit for bit what was stored; a buffer is
filled only after whoever computed with it released it, and read only after it was filled: ``fill`` may be called ahead of time,
``wait`` returns when the bytes are there.

On CUDA the host memory is pinned and copies run on a stream of their own; elsewhere they run in one thread, out of a file
(in ``/dev/shm`` it is shared memory, which several judges on one host read).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Protocol

import torch

ALIGN = 64  # bytes: where each tensor of a layer begins


@dataclass(frozen=True, slots=True)
class TensorSlot:
    """Where a tensor lies in its layer."""

    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    def view(self, flat: torch.Tensor) -> torch.Tensor:
        """The tensor in a layer's bytes."""
        size = prod(self.shape) * self.dtype.itemsize
        return flat[self.offset : self.offset + size].view(self.dtype).view(self.shape)


def make_layout(tensors: Mapping[str, torch.Tensor]) -> tuple[dict[str, TensorSlot], int]:
    """Of the tensors of one layer, and how many bytes it has."""
    slots, end = {}, 0
    for name, tensor in tensors.items():
        slots[name] = TensorSlot(end, tuple(tensor.shape), tensor.dtype)
        end += -(-tensor.nbytes // ALIGN) * ALIGN
    return slots, end


class HostLayers:
    """All layers, in pinned memory (``file`` None, CUDA), in memory, or in a file."""

    def __init__(
        self, layers: Sequence[Mapping[str, torch.Tensor]], file: Path | None = None, *, pin: bool = False
    ) -> None:
        self.slots, sizes = [], []
        for tensors in layers:
            slots, size = make_layout(tensors)
            self.slots.append(slots)
            sizes.append(size)
        self.layer_bytes = max(sizes)
        total = self.layer_bytes * len(layers)
        if file is not None:
            file.touch(mode=0o600)
            self._bytes = torch.from_file(str(file), shared=True, size=total, dtype=torch.uint8)
        else:
            self._bytes = torch.empty(total, dtype=torch.uint8, pin_memory=pin)
        for index, tensors in enumerate(layers):
            flat = self.flat(index)
            for name, tensor in tensors.items():
                self.slots[index][name].view(flat).copy_(tensor)

    def __len__(self) -> int:
        return len(self.slots)

    def flat(self, index: int) -> torch.Tensor:
        """A layer's bytes."""
        return self._bytes[index * self.layer_bytes : (index + 1) * self.layer_bytes]


class LayerMover(Protocol):
    """Copies layers into buffers, in the order in which it was asked."""

    def fill(self, source: torch.Tensor, buffer: int) -> None:
        """Begin to copy into a buffer, once what computed with it is done."""

    def wait(self, buffer: int) -> torch.Tensor:
        """Its bytes, when they are there."""

    def release(self, buffer: int) -> None:
        """What was asked of the device so far is the last that reads this buffer."""

    def close(self) -> None:
        """Stop; buffers go."""


class ThreadMover:
    """On the host: one thread copies while another computes."""

    def __init__(self, count: int, size: int) -> None:
        self._buffers = [torch.empty(size, dtype=torch.uint8) for _ in range(count)]
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="layers")
        self._filling: list[Future[Any] | None] = [None] * count

    def fill(self, source: torch.Tensor, buffer: int) -> None:
        """See the protocol: computation on the host is done when it returns, so a released buffer is free."""
        self._filling[buffer] = self._thread.submit(self._buffers[buffer].copy_, source)

    def wait(self, buffer: int) -> torch.Tensor:
        """See the protocol."""
        filling = self._filling[buffer]
        assert filling is not None, "a buffer is filled before it is read"
        filling.result()
        return self._buffers[buffer]

    def release(self, buffer: int) -> None:
        """See the protocol."""
        self._filling[buffer] = None

    def close(self) -> None:
        """See the protocol."""
        self._thread.shutdown()
        self._buffers.clear()


class CudaMover:
    """On CUDA: copies out of pinned memory on a stream of their own; the stream that computes waits for events, not the host."""

    def __init__(self, count: int, size: int, device: torch.device) -> None:
        self._buffers = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(count)]
        self._stream = torch.cuda.Stream(device)
        self._filled = [torch.cuda.Event() for _ in range(count)]
        self._free = [torch.cuda.Event() for _ in range(count)]
        self._device = device
        for buffer in range(count):
            self.release(buffer)

    def fill(self, source: torch.Tensor, buffer: int) -> None:
        """See the protocol."""
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(self._free[buffer])
            self._buffers[buffer].copy_(source, non_blocking=True)
            self._filled[buffer].record(self._stream)

    def wait(self, buffer: int) -> torch.Tensor:
        """See the protocol."""
        torch.cuda.current_stream(self._device).wait_event(self._filled[buffer])
        return self._buffers[buffer]

    def release(self, buffer: int) -> None:
        """See the protocol."""
        self._free[buffer].record(torch.cuda.current_stream(self._device))

    def close(self) -> None:
        """See the protocol."""
        self._stream.synchronize()
        torch.cuda.current_stream(self._device).synchronize()
        self._buffers.clear()


def make_mover(count: int, size: int, device: torch.device) -> LayerMover:
    """For this device."""
    return CudaMover(count, size, device) if device.type == "cuda" else ThreadMover(count, size)
