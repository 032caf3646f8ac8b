"""The weights of an engine that is deactivated: out of this worker's memory, and back, bit for bit (ROSE 4.1, activation).

Guarantees: nothing reads the weights while they are away; they come back at the same addresses. ``kept``: what comes back is
verified by the digests that :mod:`vllm_rlplugin.weights.transfer_engine` verifies updates by. Not kept, they are worth
nothing until an update succeeds. What cannot leave stays, and the report says why. Bytes are measured.

On CUDA it is vLLM's sleep mode (:mod:`vllm_rlplugin.sleep.cuda_sleep`). On CPU, where stock vLLM has none, it is here:
the pages behind the parameters go back to the system, packed copies are freed and made anew. A file without a name has
what is kept: nobody else can open it, and it is gone with this process. Weights that are no views that are known (no
mapping) stay.
"""

from __future__ import annotations

import ctypes
import os
import tempfile
import time
from io import FileIO
from pathlib import Path
from typing import Any, Protocol

import torch

from orchestrator.api import RunError
from vllm_rlplugin.sleep import cuda_sleep
from vllm_rlplugin.sleep.memory_release import return_pages
from vllm_rlplugin.weights.checkpoint_mapping import CheckpointMapping
from vllm_rlplugin.weights.rank_slices import pack_layer
from vllm_rlplugin.weights.transfer_engine import RelayWeightTransferEngine

_NO_BACKEND = "the engine was started without weight_transfer_config backend 'rl_coserve'"


class WeightOffload(Protocol):
    """The weights of one worker while they are away. Made, it has what it needs to take them back. No step may run from
    :meth:`offload` until they are back. Bytes: of the parameters; ``left`` of these in memory; ``freed``, what was
    measured."""

    bytes: int
    left: int
    freed: int
    how: str

    def offload(self) -> None:
        """Out of memory with them."""

    def restore(self) -> None:
        """Raises RunError where they are not what they were, and worth nothing; NoDeviceRoom: not now, they are still away."""

    def memory_status(self) -> dict[str, int | None]:
        """What is told of memory beside the weights."""


class HostOffload:
    """See :class:`WeightOffload`: on CPU."""

    def __init__(
        self, engine: RelayWeightTransferEngine, mapping: CheckpointMapping, model: torch.nn.Module, kept: bool
    ) -> None:
        self._engine, self._mapping = engine, mapping
        self._file: FileIO | None = None
        self._parts = _storages(model)
        self.bytes = sum(part.nbytes for part in self._parts)
        if kept:
            if wrong := engine.verify():
                raise RunError(f"the weights are not what was loaded: {wrong[:3]}")
            self._file = self._written()
        self.left = self.bytes
        self.freed = 0
        self.how = f"the weights are in a file in {tempfile.gettempdir()}" if kept else "the weights are dropped"

    def memory_status(self) -> dict[str, int | None]:
        """{"process_bytes"}."""
        return {"process_bytes": resident_bytes()}

    def offload(self) -> None:
        """See the protocol."""
        self._engine.stop_reading(dropped=self._file is None)
        if self._file is None:
            self._engine.damage = "the weights were dropped when the engine was deactivated"
        before = resident_bytes()
        for layer, _ in self._mapping.packed:
            layer.cpu_linear = _is_away
        self.left = self.bytes - return_pages(self._parts)  # parts that are smaller than a page of memory
        ctypes.CDLL(None).malloc_trim(0)
        self.freed = max(0, before - resident_bytes())

    def restore(self) -> None:
        """See the protocol."""
        if self._file is None:
            return
        with self._file as file, torch.no_grad():
            file.seek(0)
            for part in self._parts:
                rest = memoryview(part.numpy())
                while rest:  # the system reads 2 GiB at a time
                    if not (count := file.readinto(rest)):
                        raise RunError("the file of the weights is shorter than they are")
                    rest = rest[count:]
        for layer, parameter in self._mapping.packed:
            layer.cpu_linear = pack_layer(layer, self._mapping.live[parameter]).linear
        if wrong := self._engine.verify():
            raise RunError(f"they are not what they were: {wrong[:3]}")

    def _written(self) -> FileIO:
        descriptor, name = tempfile.mkstemp(prefix="rl-coserve-weights-")
        os.unlink(name)
        file = FileIO(descriptor, "r+", closefd=True)
        for part in self._parts:
            rest = memoryview(part.numpy())
            while rest:
                rest = rest[file.write(rest) :]
        os.fsync(file.fileno())
        os.posix_fadvise(
            file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED
        )  # else the system's cache has what memory was given for
        return file


def offload_weights(worker: Any, *, kept: bool) -> dict[str, Any]:
    """{"bytes": of the parameters, "left": of these in memory, "freed": by the process or on the device, packed copies
    included, "seconds", "how", "memory"}. After what it raises :func:`restore` makes good what was begun."""
    began = time.monotonic()
    engine = worker.weight_transfer_engine
    if not isinstance(engine, RelayWeightTransferEngine):
        raise RunError(_NO_BACKEND)
    engine.attach_worker(worker)
    model = worker.model_runner.get_model()
    mapping = engine.make_plan().mapping
    away: WeightOffload
    if why := cuda_sleep.sleep_mode_obstacle(worker):
        on_cpu = all(parameter.device.type == "cpu" for parameter in model.parameters())
        if mapping is None or not on_cpu:
            storages = {
                item.untyped_storage().data_ptr(): item.untyped_storage().nbytes() for item in model.parameters()
            }
            size = sum(storages.values())
            how = f"the weights stay in memory: {engine.fallback if on_cpu else why}"
            return {"bytes": size, "left": size, "freed": 0, "seconds": 0.0, "how": how, "memory": {}}
        away = HostOffload(engine, mapping, model, kept)
    else:
        away = cuda_sleep.CudaSleep(worker, engine, kept)
    worker.rl_away = away  # from here on they can be taken back
    away.offload()
    sizes = {"bytes": away.bytes, "left": away.left, "freed": away.freed}
    return {**sizes, "seconds": time.monotonic() - began, "how": away.how, "memory": away.memory_status()}


def restore_weights(worker: Any) -> dict[str, Any]:
    """{"seconds", "error", "no_room", "damage"}. Idempotent. ``no_room``: why they are still away, and may be asked for again;
    ``damage``: why they cannot be used until an update, which may be none of this."""
    began, away = time.monotonic(), getattr(worker, "rl_away", None)
    worker.rl_away = None
    error = no_room = ""
    if away is not None:
        try:
            away.restore()
        except cuda_sleep.NoDeviceRoom as failure:
            worker.rl_away, no_room = away, str(failure)
        except Exception as failure:  # noqa: BLE001  whatever it was, weights that are not back are used by nobody
            error = f"the weights did not come back: {failure or type(failure).__name__}"
            worker.weight_transfer_engine.damage = error
    damage = str(getattr(worker.weight_transfer_engine, "damage", ""))
    return {"seconds": time.monotonic() - began, "error": error, "no_room": no_room, "damage": damage}


def resident_bytes() -> int:
    """Bytes of this process's own memory that are in memory, shared ones (a pool's pages) not counted."""
    fields = Path("/proc/self/statm").read_text(encoding="ascii").split()
    return (int(fields[1]) - int(fields[2])) * os.sysconf("SC_PAGESIZE")


def _storages(model: torch.nn.Module) -> list[torch.Tensor]:
    """The memory of all parameters, each once, as bytes."""
    found: dict[int, torch.Tensor] = {}
    for parameter in model.parameters():
        storage = parameter.detach().untyped_storage()
        if storage.nbytes():
            found.setdefault(storage.data_ptr(), torch.empty(0, dtype=torch.uint8).set_(storage))
    return list(found.values())


def _is_away(*_: Any, **__: Any) -> torch.Tensor:
    raise RuntimeError("the weights of this engine are away: it is deactivated")
