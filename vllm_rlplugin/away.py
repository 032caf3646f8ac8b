"""The weights of an engine that is deactivated: out of this worker's memory, and back, bit for bit (ROSE 4.1, activation).

Guarantees: nothing reads the weights while they are away; they come back at the same addresses. ``kept``: a file without a name
has them, which nobody else can open and which is gone with this process; what comes back is verified by the digests that
:mod:`vllm_rlplugin.weights` verifies updates by. Not kept, they are worth nothing until an update succeeds. Where the weights are
not views that are known (no mapping), they stay, and the report says so. Bytes are measured, of this process's own memory.

On CPU only, where stock vLLM has no sleep mode: the pages behind the parameters go back to the system, packed copies are freed
and made anew. On another device the weights stay, which the report says.
"""

from __future__ import annotations

import ctypes
import os
import tempfile
import time
from io import FileIO
from pathlib import Path
from typing import Any

import torch

from orchestrator.api import RunError
from vllm_rlplugin.cutting import pack
from vllm_rlplugin.mapping import Mapping
from vllm_rlplugin.release import give_back
from vllm_rlplugin.weights import RelayWeightTransferEngine

_NO_BACKEND = "the engine was started without weight_transfer_config backend 'rl_coserve'"


class Away:
    """The weights of one worker while they are away. Made, it has what it needs to take them back; :meth:`go` lets them go. No
    step may run from then on."""

    def __init__(self, engine: RelayWeightTransferEngine, mapping: Mapping, model: torch.nn.Module, kept: bool) -> None:
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

    def go(self) -> None:
        """Out of memory with them."""
        self._engine.leave(dropped=self._file is None)
        if self._file is None:
            self._engine.damage = "the weights were dropped when the engine was deactivated"
        before = resident()
        for layer, _ in self._mapping.packed:
            layer.cpu_linear = _is_away
        self.left = self.bytes - give_back(self._parts)  # parts that are smaller than a page of memory
        ctypes.CDLL(None).malloc_trim(0)
        self.freed = max(0, before - resident())

    def come_back(self) -> None:
        """Raises RunError where they are not what they were; they are worth nothing then."""
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
            layer.cpu_linear = pack(layer, self._mapping.live[parameter]).linear
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


def leave(worker: Any, *, kept: bool) -> dict[str, Any]:
    """{"bytes": of the parameters, "left": of these in memory, "freed": by the process, packed copies included,
    "seconds", "how"}; what it raises leaves the weights where they were."""
    began = time.monotonic()
    engine = worker.weight_transfer_engine
    if not isinstance(engine, RelayWeightTransferEngine):
        raise RunError(_NO_BACKEND)
    engine.attach(worker)
    model = worker.model_runner.get_model()
    mapping = engine.plan().mapping
    why = engine.fallback if mapping is None else ""
    if any(parameter.device.type != "cpu" for parameter in model.parameters()):
        why = "they are on a device, from which nothing takes them so far"
    if why or mapping is None:
        storages = {item.untyped_storage().data_ptr(): item.untyped_storage().nbytes() for item in model.parameters()}
        size = sum(storages.values())
        return {"bytes": size, "left": size, "freed": 0, "seconds": 0.0, "how": f"the weights stay in memory: {why}"}
    away = Away(engine, mapping, model, kept)
    worker.rl_away = away  # from here on they can be taken back
    away.go()
    how = f"the weights are in a file in {_folder()}" if kept else "the weights are dropped"
    seconds = time.monotonic() - began
    return {"bytes": away.bytes, "left": away.left, "freed": away.freed, "seconds": seconds, "how": how}


def come_back(worker: Any) -> dict[str, Any]:
    """{"seconds", "error"}. Idempotent."""
    began, away = time.monotonic(), getattr(worker, "rl_away", None)
    worker.rl_away = None
    error = ""
    if away is not None:
        try:
            away.come_back()
        except Exception as failure:  # noqa: BLE001  whatever it was, weights that are not back are used by nobody
            error = f"the weights did not come back: {failure or type(failure).__name__}"
            worker.weight_transfer_engine.damage = error
    return {"seconds": time.monotonic() - began, "error": error}


def resident() -> int:
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


def _folder() -> str:
    return tempfile.gettempdir()
