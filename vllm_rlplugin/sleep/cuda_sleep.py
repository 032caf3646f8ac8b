"""The weights of a deactivated engine on a CUDA device: out by stock vLLM's sleep mode, back bit for bit (ROSE 4.1, activation).

It is the worker's own ``sleep`` and ``wake_up(["weights"])``. ``kept`` is level 1, in pinned host memory; not kept is level 2,
nowhere, and an update must follow. What stays on the device: the CUDA context, captured graphs (vLLM's
``--sleep-mode-offload-cudagraph`` takes these too), libraries' workspaces.

Guarantees, of vLLM's sources as tested (``vllm_rlplugin/hookpoints.py``):

* Weights come back at the same addresses, so captured graphs hold: the allocator unmaps and releases the memory of an allocation,
  and keeps its reserved addresses, at which it maps new memory. Whole allocations move, whatever the layout of what is in them.
* The KV cache of a pool is in none of these allocations, so neither call touches its range. Were it, it would raise RunError.
* What comes back is verified: weights by the digests that updates are verified by, buffers and a draft model by others.
* Without room on the device the weights stay away, all of them, and another attempt may succeed (:class:`NoDeviceRoom`).
* Level 2 is for what an update brings back whole: parameters with a mapping, and buffers, which vLLM keeps. Where there is more
  (no mapping, a draft model, other tensors) level 1 does it instead; an update must follow all the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from orchestrator.api import RunError
from vllm_rlplugin.sleep.device_memory import free_memory, process_memory
from vllm_rlplugin.sleep.memory_release import SLEEP_LEVEL
from vllm_rlplugin.weights.digests import digest_for
from vllm_rlplugin.weights.transfer_engine import RelayWeightTransferEngine

_OURS = ("_parameters", "_buffers", "_modules")  # of a torch module: what is known without looking


class NoDeviceRoom(Exception):
    """The device has no memory for the weights now; they are away as before."""


def sleep_mode_obstacle(worker: Any) -> str:
    """Why vLLM's sleep mode cannot take this worker's weights; "": it can."""
    config = worker.vllm_config.model_config
    if not config.enable_sleep_mode:
        return "the engine was started without --enable-sleep-mode"
    if config.sleep_mode_backend != "cumem":
        return f"--sleep-mode-backend {config.sleep_mode_backend} takes more than weights"
    return ""


class CudaSleep:
    """See :class:`vllm_rlplugin.sleep.host_offload.WeightOffload`, whose methods these are. Raises RunError where the weights
    must stay."""

    def __init__(self, worker: Any, engine: RelayWeightTransferEngine, kept: bool) -> None:
        self._worker, self._engine, self._kept = worker, engine, kept
        self._model, self._draft = worker.model_runner.get_model(), worker.get_draft_model()
        self._storages = dict(_storages(self._model, self._draft))
        self.bytes = sum(self._storages.values())
        if any(item.tag == "kv_cache" for item in _allocations()):
            raise RunError("the KV cache is in vLLM's own memory, not in the pool")
        if kept and (wrong := engine.verify()):
            raise RunError(f"the weights are not what was loaded: {wrong[:3]}")
        more = "" if kept else self._not_in_updates()
        self.level = SLEEP_LEVEL["weights" if kept or more else "dropped"]
        if self.level == SLEEP_LEVEL["weights"]:
            _check_host(sum(_size(item) for item in _allocations() if not item.is_asleep))
        self._digests = self._other_digests()
        self.how = f"vLLM sleep level {self.level}: " + (
            "the weights are in host memory" if kept else f"the weights are dropped{more and f' (level 1: {more})'}"
        )
        self.left, self.freed = self.bytes, 0

    def offload(self) -> None:
        """Off the device with them. What it raises leaves some of them there: :meth:`restore` is for that too."""
        self._engine.stop_reading(dropped=not self._kept)
        if not self._kept:
            self._engine.damage = "the weights were dropped when the engine was deactivated"
        before = free_memory()
        try:
            self._worker.sleep(self.level)
        except AssertionError:
            # When all is done vLLM compares the free memory of the device, from which its other engines take meanwhile.
            if not all(item.is_asleep for item in _allocations()):
                raise
        self.freed = max(0, free_memory() - before)
        self.left = self._still_there()

    def restore(self) -> None:
        """Raises NoDeviceRoom; RunError where they are not what they were."""
        try:
            self._worker.wake_up(["weights"])
        except RuntimeError as error:
            if "out of memory" not in str(error):  # the driver's words, in what vLLM's extension and PyTorch raise
                raise
            # Not the worker's sleep: at level 2 that would read buffers which have no memory.
            self._worker.sleep_mode_backend.suspend(self.level)
            raise NoDeviceRoom(
                f"the weights do not fit on the device, which has {free_memory()} bytes free: {error}"
            ) from error
        found = self._other_digests()
        wrong: list[Any] = [name for name, digest in self._digests.items() if found.get(name) != digest]
        if self._kept:
            wrong += self._engine.verify()
        if wrong:
            raise RunError(f"they are not what they were: {wrong[:3]}")

    def memory_status(self) -> dict[str, int | None]:
        """{"device_free_bytes", "process_bytes"}: what the device has free, and what this process has of it; None: not known."""
        return {"device_free_bytes": free_memory(), "process_bytes": process_memory()}

    def _other_digests(self) -> dict[str, int]:
        """Of what the weights' own digests do not cover: buffers, and a draft model."""
        found = {name: item for name, item in self._model.named_buffers() if item.numel()}
        if self._draft is not None:
            parts = (*self._draft.named_parameters(), *self._draft.named_buffers())
            found |= {f"draft.{name}": item for name, item in parts if item.numel()}
        return {name: digest_for(item.device)(item) for name, item in found.items()}

    def _not_in_updates(self) -> str:
        """What of the weights no update brings back."""
        if self._engine.make_plan().mapping is None:
            return f"without a mapping an update might not restore all weights: {self._engine.fallback}"
        if self._draft is not None:
            return "updates do not restore the draft model"
        weights = [_extent(item) for item in _allocations() if item.tag == "weights"]
        known = {item.untyped_storage().data_ptr() for item in self._model.buffers()} | set(self._storages)
        for path, module in self._model.named_modules():
            for name, tensor in _tensors({key: value for key, value in vars(module).items() if key not in _OURS}):
                address = tensor.untyped_storage().data_ptr()
                if address not in known and any(begin <= address < end for begin, end in weights):
                    return f"{path}.{name} is no parameter and no buffer"
        return ""

    def _still_there(self) -> int:
        gone = [_extent(item) for item in _allocations() if item.is_asleep]
        return sum(
            size
            for address, size in self._storages.items()
            if not any(begin <= address and address + size <= end for begin, end in gone)
        )


def _allocations() -> list[Any]:
    """vLLM's ``AllocationData`` of this process."""
    from vllm.device_allocator.cumem import CuMemAllocator

    return [] if CuMemAllocator.instance is None else list(CuMemAllocator.instance.pointer_to_data.values())


def _size(item: Any) -> int:
    return int(item.handle[1])


def _extent(item: Any) -> tuple[int, int]:
    """(first address, first address behind it)."""
    return int(item.handle[2]), int(item.handle[2]) + _size(item)


def _storages(*models: torch.nn.Module | None) -> Iterator[tuple[int, int]]:
    """(address, bytes) of the memory of all parameters; shared ones come again."""
    for model in models:
        for parameter in model.parameters() if model is not None else ():
            storage = parameter.untyped_storage()
            if storage.nbytes():
                yield storage.data_ptr(), storage.nbytes()


def _tensors(named: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors among these values, and in the lists, tuples and dictionaries among them."""
    for name, value in named.items():
        if isinstance(value, torch.Tensor):
            yield name, value
        elif isinstance(value, dict):
            yield from _tensors({f"{name}[{key!r}]": item for key, item in value.items()})
        elif isinstance(value, list | tuple):
            yield from _tensors({f"{name}[{index}]": item for index, item in enumerate(value)})


def _check_host(needed: int) -> None:
    """Raises RunError before the host runs out of memory, which would end some process."""
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    there = next((int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")), needed)
    if there < needed:
        fix = 'deactivate with {"kept": false}, and update afterwards'
        raise RunError(f"the host has {there} bytes available for {needed} bytes of weights: {fix}")
