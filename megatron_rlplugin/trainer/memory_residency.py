"""Weights, gradients and optimizer state: on the device, or away on the host, in three levels (RollPacker 4.4 and 5).

Guarantees: a move keeps every bit and every view: storages are emptied and filled again in place, so that whatever aliases
them (DDP's buffers, ``main_grad``, the shards of a distributed optimizer, its fp32 masters) is as it was. Each storage is
whole on the device or whole on the host at any time; a move that fails half-way says what is where, and is repaired by the
same move again or given up by the opposite one. A forward pass or an optimizer step on what is away raises RunError.

Megatron's own ``offload_to_cpu`` of an optimizer is not used: it gives parameters new storages, which tears fp32 shards off
the weights that they alias, and moves fp32 weights themselves; its ``offload_grad_buffers`` drops the gradients. What is
not tracked stays where it is: activations, RoPE frequencies, attention masks, the loss scale.

Device bytes of a rank with P parameters (dense, bf16, fp32 gradients, Adam) and d data-parallel replicas: 0 at ``away``,
2 P + 4 P at ``stream``, 2 P + 4 P + 12 P / d at ``step`` with the distributed optimizer (12 P without).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_rlplugin.parallel_layout import device
from megatron_rlplugin.trainer.gradient_buffers import GradientBuffers, grad_buffers
from orchestrator.api import RESIDENCY_LEVELS, ConfigError, ResidencyResult, RetryableError, RunError

WEIGHTS, GRADIENTS, OPTIMIZER = "weights", "gradients", "optimizer"
_RESIDENT = {"away": (), "stream": (WEIGHTS, GRADIENTS), "step": (WEIGHTS, GRADIENTS, OPTIMIZER)}


class Storages:
    """A changing set of storages on one device. Each is whole on the device, or empty there and whole on the host."""

    def __init__(self, find: Callable[[], Iterable[Tensor]], on: torch.device) -> None:
        self._find = find
        self._device = on
        self._away: dict[
            int, tuple[torch.UntypedStorage, Tensor]
        ] = {}  # by the storage's identity: what is on the host

    @property
    def away_bytes(self) -> int:
        """Bytes that are on the host."""
        return sum(host.nbytes for _, host in self._away.values())

    @property
    def device_bytes(self) -> int:
        """Bytes that the device holds, as the storages say."""
        return sum(storage.nbytes() for storage in self.storages().values())

    def storages(self) -> dict[int, torch.UntypedStorage]:
        """Each storage once, whatever aliases it. An empty one is skipped unless it is away."""
        found = {key: storage for key, (storage, _) in self._away.items()}
        for tensor in self._find():
            storage = tensor.untyped_storage()
            if tensor.device == self._device and storage.nbytes():
                found.setdefault(storage._cdata, storage)
        return found

    def move_to_host(self) -> int:
        """Everything to the host; returns the bytes copied. What left before stays away."""
        moved = 0
        for key, storage in self.storages().items():
            if key in self._away:
                continue
            if not storage.resizable():
                raise ConfigError("residency", str(self._device), "a tensor there has memory of another owner (shared)")
            host = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=self._device.type == "cuda")
            _copy(host, _bytes(storage, self._device))
            self._away[key] = (storage, host)
            storage.resize_(0)
            moved += host.nbytes
        return moved

    def move_back(self) -> int:
        """Everything to the device again; returns the bytes copied. The host copy is dropped when the device has all."""
        moved = 0
        for key, (storage, host) in list(self._away.items()):
            try:
                storage.resize_(host.nbytes)
                _copy(_bytes(storage, self._device), host)
            except BaseException:
                storage.resize_(0)  # nothing half-filled is left for anybody to read
                raise
            del self._away[key]
            moved += host.nbytes
        return moved


class TrainerResidency:
    """Of this rank. ``optimizer``: Megatron's. ``stream``: the
    :class:`~megatron_rlplugin.stream.gradient_stream.GradientStream` over these chunks, if there is one: gradients of
    an open step are kept, between two steps they are freed without a copy. ``others``: further tensors that go where
    the weights go (a reference model, the previous version).

    Moves are local: no collective. Raises ConfigError where gradient buffers cannot be freed.
    """

    def __init__(
        self,
        model_chunks: Sequence[Any],
        optimizer: Any,
        stream: Any = None,
        others: Callable[[], Iterable[Tensor]] = tuple,
    ) -> None:
        self._chunks = list(model_chunks)
        self._optimizer = optimizer
        self._stream = stream
        self._gradients = stream.gradients if stream is not None else GradientBuffers(self._chunks)
        self._gradients_kept = False  # they are on the host, moved there by us
        self._level = "step"
        on = device()
        self._weights = Storages(lambda: [*self._weight_tensors(), *others()], on)
        self._state = Storages(self._optimizer_tensors, on)
        self._cuda = on.type == "cuda"
        self._peak = 0
        self._hooks = [chunk.register_forward_pre_hook(self._before_forward) for chunk in self._chunks]
        self._hooks += [inner.register_step_pre_hook(self._before_step) for inner in self._inner_optimizers()]

    @property
    def level(self) -> str:
        """The level that was reached last; "" after a move that failed half-way."""
        return self._level

    def where(self) -> dict[str, tuple[int, int]]:
        """Bytes by part: (on the device, on the host)."""
        offloaded = self._gradients_kept or self._stream_state == "offloaded"
        gradients = sum(tensor.untyped_storage().nbytes() for tensor in self._gradients.tensors)
        return {
            WEIGHTS: (self._weights.device_bytes, self._weights.away_bytes),
            GRADIENTS: (gradients, self._gradients.nbytes if offloaded else 0),
            OPTIMIZER: (self._state.device_bytes, self._state.away_bytes),
        }

    def require_level(self, level: str) -> None:
        """Raise RunError unless everything that ``level`` needs is on the device."""
        levels = list(_RESIDENT)
        if not self._level or levels.index(self._level) < levels.index(level):
            raise RunError(f"needs residency {level}, but it is {self._level or 'in between'}: {self._places()}")

    def move_to(self, level: str) -> ResidencyResult:
        """Move what ``level`` says, and nothing that is there already. RetryableError: some of it did not move; ``where``
        and the message say what is where; move again, or to another level."""
        if level not in _RESIDENT:
            raise ConfigError("residency", level, f"must be one of {', '.join(RESIDENCY_LEVELS)}")
        began = time.perf_counter()
        if self._cuda:
            torch.cuda.synchronize()  # nothing that still runs may read what moves
            torch.cuda.reset_peak_memory_stats()
        self._peak = self._device_bytes()
        wanted, moved = _RESIDENT[level], {"host": 0, "device": 0}
        self._level = ""
        try:
            for name, to_host, _ in reversed(self._moves()):  # first free, then fill: the peak is that of a level
                if name not in wanted:
                    moved["host"] += to_host()
            if self._cuda:
                torch.cuda.empty_cache()  # to the driver: the next owner is another process
            for name, _, back in self._moves():
                if name in wanted:
                    moved["device"] += back()
                    self._peak = max(self._peak, self._device_bytes())
        except (RuntimeError, MemoryError) as error:  # torch's out-of-memory errors are RuntimeErrors
            raise RetryableError(f"residency {level}: {error}; bytes now: {self._places()}") from error
        if self._cuda:
            torch.cuda.synchronize()
        self._level = level
        return ResidencyResult(
            level,
            moved["host"],
            moved["device"],
            self._device_bytes(),
            torch.cuda.max_memory_allocated() if self._cuda else self._peak,
            time.perf_counter() - began,
            "peak: torch.cuda.max_memory_allocated"
            if self._cuda
            else "sizes of the tracked storages; host memory is both",
        )

    def close(self) -> None:
        """Take the guards out. Everything stays where it is."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    # -- what there is -----------------------------------------------------------------------------------------------

    def _places(self) -> str:
        return ", ".join(f"{name} {d} on the device and {h} on the host" for name, (d, h) in self.where().items())

    def _device_bytes(self) -> int:
        return sum(on_device for on_device, _ in self.where().values())

    def _moves(self) -> list[tuple[str, Callable[[], int], Callable[[], int]]]:
        return [
            (WEIGHTS, self._weights.move_to_host, self._weights.move_back),
            (GRADIENTS, self._gradients_to_host, self._gradients_back),
            (OPTIMIZER, self._state.move_to_host, self._state.move_back),
        ]

    def _weight_tensors(self) -> Iterator[Tensor]:
        for buffer in grad_buffers(self._chunks):
            if buffer.param_data is not None:
                yield buffer.param_data
        for chunk in self._chunks:
            yield from (parameter.data for parameter in chunk.parameters())
            yield from chunk.module.buffers()  # DDP has an attribute of that name

    def _optimizer_tensors(self) -> Iterator[Tensor]:
        """Masters, moments and gradients of their own; not what aliases weights or gradient buffers."""
        shared = {tensor.untyped_storage()._cdata for tensor in (*self._weight_tensors(), *self._gradients.tensors)}
        for inner in self._inner_optimizers():
            parameters = [p for group in inner.param_groups for p in group["params"]]
            gradients = [getattr(p, name, None) for p in parameters for name in ("grad", "decoupled_grad")]
            state = [value for values in inner.state.values() for value in values.values()]
            for tensor in (*(p.data for p in parameters), *gradients, *state):
                if isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata not in shared:
                    yield tensor

    def _inner_optimizers(self) -> list[Any]:
        """The torch optimizers inside Megatron's. A rank without trainable parameters has none."""
        outer = getattr(self._optimizer, "chained_optimizers", [self._optimizer])
        return [one.optimizer for one in outer if getattr(one, "optimizer", None) is not None]

    # -- gradients: the stream knows whether they mean anything ------------------------------------------------------

    @property
    def _stream_state(self) -> str:
        return "none" if self._stream is None else str(self._stream.state)

    def _gradients_to_host(self) -> int:
        state = self._stream_state
        if state == "idle" or state == "offloaded" or self._gradients_kept:
            self._gradients.drop()  # nothing, nothing of value, or what a reload that failed had begun
            self._gradients_kept &= state != "idle"
            return 0
        if self._stream is None:
            self._gradients.offload()
        else:
            self._stream.offload()
        self._gradients_kept = True
        return int(self._gradients.nbytes)

    def _gradients_back(self) -> int:
        state, kept = self._stream_state, self._gradients_kept
        if state == "idle":  # no step is open: whatever was kept was abandoned meanwhile
            self._gradients.allocate()
        elif kept:
            self._gradients.drop()  # what a reload that failed had begun
            (self._gradients if self._stream is None else self._stream).reload()
        self._gradients_kept = False
        return int(self._gradients.nbytes) if kept and state != "idle" else 0

    # -- guards ------------------------------------------------------------------------------------------------------

    def _before_forward(self, *_: Any) -> None:
        self.require_level("stream")

    def _before_step(self, *_: Any) -> None:
        self.require_level("step")


def _bytes(storage: torch.UntypedStorage, on: torch.device) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=on).set_(storage)


def _copy(target: Tensor, source: Tensor) -> None:
    """In order with what the device does before and after; done when it returns."""
    target.copy_(source)
