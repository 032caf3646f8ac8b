"""Bindings made real in Ray: a placement group a worker, of the custom resource that its class is there.

A class is a custom resource of that name, one unit a device (class CPU is Ray's own CPU, class GPU its GPU). Guarantees: a
worker's group is reserved whole, in one node, before its process starts, and is given back with it; a class that the Ray
cluster does not have enough of is a RetryableError that says what is missing; a worker whose place does not come, or failed,
goes to another pool by the manager's rules, and its devices are marked.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from orchestrator.api import RetryableError
from orchestrator.policies.placement.device_allocation import DeviceBinding
from orchestrator.resources.resource_manager import ResourceManager

RESERVE_SECONDS = 60.0  # for Ray to reserve a place; a free one takes milliseconds. Ray counts whole seconds


def cluster_resources(pools: Mapping[str, int]) -> dict[str, float]:
    """The custom resources of a local Ray that stands for these pools."""
    return {hardware: float(count) for hardware, count in pools.items() if hardware not in ("CPU", "GPU")}


def bundle(hardware: str, devices: int, cpus: float) -> dict[str, float]:
    """What a worker takes of a node."""
    if hardware == "CPU":
        return {"CPU": max(float(devices), cpus)}
    return {hardware: float(devices), **({"CPU": cpus} if cpus else {})}


class Placement:
    """One worker's place: bound on first use, bound anew when it did not work. ``note``: hears of every binding."""

    def __init__(
        self,
        manager: ResourceManager,
        worker: str,
        hardware: str,
        devices: int = 1,
        *,
        cpus: float = 1.0,
        reserve_seconds: float = RESERVE_SECONDS,
        note: Callable[[DeviceBinding], None] | None = None,
    ) -> None:
        self._manager = manager
        self._worker = worker
        self._hardware = hardware
        self._devices = devices
        self._cpus = cpus
        self._limit = reserve_seconds
        self._note = note
        self._group: Any = None
        self.binding: DeviceBinding | None = None

    def bind(self) -> DeviceBinding:
        """Devices, without a place in Ray yet. Idempotent."""
        if self.binding is None:
            self._keep(self._manager.bind(self._worker, self._hardware, self._devices))
        assert self.binding is not None
        return self.binding

    def place(self) -> dict[str, Any]:
        """Ray's options for the process of this worker; reserves the place. Raises RetryableError, and what binding does.
        Blocks."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        if self._group is None:
            self._reserve(self.bind())
        wanted = bundle(self.bind().hardware, self._devices, self._cpus)
        custom = {name: count for name, count in wanted.items() if name not in ("CPU", "GPU")}
        return {
            "num_cpus": wanted.get("CPU", 0),
            "num_gpus": wanted.get("GPU", 0),
            "resources": custom,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(self._group, 0),
        }

    def move(self) -> DeviceBinding:
        """The place did not work: other devices, the old ones marked as failed, and all that are free of a class of which Ray
        has not enough any more (a node died). Blocks."""
        import ray

        self.drop()
        old = self.bind().hardware
        gone = ray.cluster_resources().get(old, 0) < self._devices
        self._keep(self._manager.rebind(self._worker, failed=True, gone=gone))
        return self.bind()

    def drop(self) -> None:
        """Give the place in Ray back; the binding stays. Idempotent."""
        from ray.util import remove_placement_group

        group, self._group = self._group, None
        if group is not None:
            remove_placement_group(group)

    def release(self) -> None:
        """Give everything back. Idempotent."""
        self.drop()
        if self.binding is not None:
            self._manager.release(self._worker)
            self.binding = None

    def _reserve(self, binding: DeviceBinding) -> None:
        from ray.util import placement_group

        wanted = bundle(binding.hardware, self._devices, self._cpus)
        self._group = placement_group([wanted], strategy="STRICT_PACK")
        if not self._group.wait(math.ceil(self._limit)):
            self.drop()
            why = f"Ray gives it no place within {self._limit:g} s ({_shortage(wanted)})"
            raise RetryableError(f"{self._worker}: {why}")

    def _keep(self, binding: DeviceBinding) -> None:
        self.binding = binding
        if self._note is not None:
            self._note(binding)


def _shortage(wanted: Mapping[str, float]) -> str:
    import ray

    free, whole = ray.available_resources(), ray.cluster_resources()
    rows = [
        f"{name}: {count:g} wanted, {free.get(name, 0):g} of {whole.get(name, 0):g} free"
        for name, count in wanted.items()
    ]
    return "; ".join(rows)
