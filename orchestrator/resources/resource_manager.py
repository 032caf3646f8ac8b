"""The resource manager: binds workers to pools and keeps the live view of them in the metadata store (RollArt 5.2).

Guarantees: every change is one compare-and-set of one record, decided by
:mod:`orchestrator.policies.placement.device_allocation`, so managers of several processes and jobs never give one
device twice; the record says who has what, and why it is not what was wished for. Bindings belong to a job (``owner``);
a job that starts again, after whatever end, begins without any. A job that counts its heartbeats (:meth:`ResourceManager.beat`)
loses its bindings when it stops, to whoever needs devices and watches for long enough (:meth:`ResourceManager.free_silent`), and
hears of it when it counts again; one that never counted keeps them until somebody calls :meth:`ResourceManager.release_owner`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import msgpack

from orchestrator.api import ConfigError, MetadataStore, RetryableError, RunError
from orchestrator.policies.placement import device_allocation
from orchestrator.policies.placement.device_allocation import (
    SERVER_DEVICES,
    AllocationView,
    DeviceBinding,
    DevicePool,
    DeviceWish,
)
from orchestrator.policies.placement.owner_heartbeats import OwnerHeartbeats
from orchestrator.transfer import MemoryMetadata

FORMAT = 1
CAS_TRIES = 64  # a lost compare-and-set means that somebody else's succeeded
# What a role runs on where nothing is said (RollArt 5.2): training on compute-optimised GPUs, generation on
# bandwidth-optimised ones.
ROLE_CLASSES: Mapping[str, str] = {"ActorTrain": "H800", "ActorGen": "H20"}

Made = TypeVar("Made")


class ResourceManager:
    """``pools``: class -> ids of its devices, or how many. ``metadata``: where the view is kept; None: in this process only.
    ``name``: of the view, for several clusters in one store. ``compatible``: class -> classes that may stand in for it; of a
    class that is not in it, all of its kind may (accelerators for accelerators).

    Raises ConfigError: no pools, a device twice, other pools than the store has under this name.
    """

    def __init__(
        self,
        pools: Mapping[str, Iterable[int] | int],
        *,
        metadata: MetadataStore | None = None,
        name: str = "default",
        owner: str = "",
        compatible: Mapping[str, Sequence[str]] | None = None,
        per_server: int = SERVER_DEVICES,
    ) -> None:
        made = tuple(DevicePool(hardware, _devices(hardware, given), per_server) for hardware, given in pools.items())
        if not made:
            raise ConfigError("resources.pools", {}, "name at least one pool: class -> devices")
        stand_ins = {hardware: tuple(names) for hardware, names in (compatible or {}).items()}
        self.owner = owner
        self._metadata = metadata if metadata is not None else MemoryMetadata()
        self._key = f"rlc/resources/{name}"
        self._fresh = AllocationView(made, compatible=stand_ins)
        self._bound: set[str] = set()  # by this object
        self._change(self._join)

    # -- workers -----------------------------------------------------------------------------------------------------

    def bind(self, worker: str, hardware: str, devices: int = 1) -> DeviceBinding:
        """Devices for a worker, of this class or a compatible one. ConfigError: an id that is taken, a class that no pool
        serves, more devices than there are. RetryableError: none are left now."""
        wish = DeviceWish(worker, hardware, devices, self.owner)
        bound: DeviceBinding = self._change(lambda view: device_allocation.bind_worker(view, wish))
        self._bound.add(worker)
        return bound

    def rebind(self, worker: str, *, failed: bool = False, gone: bool = False) -> DeviceBinding:
        """Other devices for a bound worker, by the same rules. ``failed``: its old ones are broken, nobody gets them until
        :meth:`repair`; ``gone``: nor the free ones of their class. When there are none it keeps what it has
        (RetryableError), and what is broken stays marked."""
        if failed or gone:
            old = self.binding(worker)

            def mark(view: AllocationView) -> tuple[AllocationView, None]:
                broken = [*old.devices, *(view.free(old.hardware) if gone else ())]
                return device_allocation.fail_devices(view, old.hardware, broken), None

            self._change(mark)
        return self._change(lambda view: device_allocation.rebind_worker(view, worker))

    def release(self, *workers: str) -> None:
        """They need their devices no more. Unknown ones are ignored."""
        self._bound.difference_update(workers)
        self._change(lambda view: (device_allocation.release_workers(view, workers), None))

    def release_owner(self, owner: str) -> None:
        """Everything that a job has."""
        if owner == self.owner:
            self._bound.clear()
        self._change(lambda view: (_without(view, owner), None))

    def repair(self, hardware: str, devices: Sequence[int]) -> None:
        """These devices work again."""
        self._change(lambda view: (device_allocation.repair_devices(view, hardware, devices), None))

    def beat(self) -> None:
        """A sign of life of this job. Raises RunError when it has lost its bindings, as it was silent for too long."""
        self._count_beat()
        if lost := self._bound - self.view().bindings.keys():
            raise RunError(
                f"this job was silent for too long: another job now has the devices of {', '.join(sorted(lost))}"
            )

    def free_silent(self, beats: OwnerHeartbeats, now: float) -> tuple[str, ...]:
        """Look at the heartbeats of the other jobs, at ``now`` of one clock; what the silent ones have is free. Returns them."""
        view = self.view()
        owners = sorted({item.wish.owner for item in view.bindings.values()} - {self.owner})
        counts = {owner: count for owner in owners if (count := self._beats_of(owner)[0])}
        silent = beats.silent_owners(counts, now)
        for owner in silent:
            self.release_owner(owner)
        return silent

    def _count_beat(self) -> None:
        for _ in range(CAS_TRIES):
            count, version = self._beats_of(self.owner)
            if self._metadata.compare_and_set(self._beat_key(self.owner), b"%d" % (count + 1), version):
                return
        raise RetryableError(f"the heartbeat of {self.owner} changed {CAS_TRIES} times under a compare-and-set")

    def _beats_of(self, owner: str) -> tuple[int, int]:
        """(heartbeats so far, version of their record). Raises RunError for what is no count."""
        value, version = self._metadata.get(self._beat_key(owner)) or (b"0", 0)
        if not value.isdigit():
            raise RunError(f"the heartbeat of job {owner} in the metadata store cannot be read: {value[:40]!r}")
        return int(value), version

    def _beat_key(self, owner: str) -> str:
        return f"{self._key}/beats/{owner}"

    # -- the view ----------------------------------------------------------------------------------------------------

    def view(self) -> AllocationView:
        """As it is now."""
        present = self._metadata.get(self._key)
        if present is None:
            raise RunError(f"the metadata store has lost {self._key}")
        return replace(decode_view(present[0]), compatible=self._fresh.compatible)

    def binding(self, worker: str) -> DeviceBinding:
        """What a worker has. Raises ConfigError for an unknown one."""
        found = self.view().bindings.get(worker)
        if found is None:
            raise ConfigError("resources.worker", worker, "no worker with this id is bound")
        return found

    def close(self) -> None:
        """Give back all that this job has. Idempotent; the store stays open."""
        self.release_owner(self.owner)

    def _join(self, view: AllocationView) -> tuple[AllocationView, None]:
        """The pools are those that are there; what an earlier life of this job left bound is free."""
        there, given = ({pool.hardware: pool.devices for pool in pools} for pools in (view.pools, self._fresh.pools))
        if there != given:  # in any order: a resume reads them from a file that sorts its keys
            have = ", ".join(f"{pool.hardware}: {len(pool.devices)}" for pool in view.pools)
            fix = f"the metadata store has other pools under {self._key} ({have}); give the same ones, or another name"
            raise ConfigError("resources.pools", [pool.hardware for pool in self._fresh.pools], fix)
        return _without(view, self.owner), None

    def _change(self, decide: Callable[[AllocationView], tuple[AllocationView, Made]]) -> Made:
        for _ in range(CAS_TRIES):
            present = self._metadata.get(self._key)
            before = self._fresh if present is None else decode_view(present[0])
            after, made = decide(replace(before, compatible=self._fresh.compatible))
            value = encode_view(after)
            if present is not None and value == present[0]:
                return made
            if self._metadata.compare_and_set(self._key, value, 0 if present is None else present[1]):
                return made
        raise RetryableError(f"{self._key} changed {CAS_TRIES} times under a compare-and-set")


def _devices(hardware: str, given: Iterable[int] | int) -> tuple[int, ...]:
    devices = tuple(range(given)) if isinstance(given, int) else tuple(given)
    whole = all(type(device) is int and device >= 0 for device in devices)
    if not hardware or not devices or not whole or len(set(devices)) != len(devices):
        raise ConfigError(
            f"resources.pools.{hardware}", given, "give the ids of its devices, each once, or their number"
        )
    return devices


def _without(view: AllocationView, owner: str) -> AllocationView:
    return device_allocation.release_workers(
        view, [name for name, item in view.bindings.items() if item.wish.owner == owner]
    )


def encode_view(view: AllocationView) -> bytes:
    """The value that is stored; the rules of compatibility are each manager's own."""
    packed: bytes = msgpack.packb(
        {
            "format": FORMAT,
            "pools": [[p.hardware, list(p.devices), p.per_server, list(p.failed)] for p in view.pools],
            "bindings": [
                [
                    *(b.wish.worker, b.wish.hardware, b.wish.devices, b.wish.owner),
                    b.hardware,
                    list(b.devices),
                    b.fallback,
                ]
                for _, b in sorted(view.bindings.items())
            ],
        }
    )
    return packed


def decode_view(value: bytes) -> AllocationView:
    """Strict: anything unexpected is a RunError."""
    try:
        data = msgpack.unpackb(value)
        if data["format"] != FORMAT:
            raise ValueError(f"format {data['format']!r}, this version reads {FORMAT}")
        pools = tuple(
            DevicePool(str(name), _numbers(ids), _numbers([per_server])[0], _numbers(failed))
            for name, ids, per_server, failed in data["pools"]
        )
        bindings = [
            DeviceBinding(
                DeviceWish(str(worker), str(wished), _numbers([count])[0], str(owner)),
                str(got),
                _numbers(ids),
                str(why),
            )
            for worker, wished, count, owner, got, ids, why in data["bindings"]
        ]
        return AllocationView(pools, {item.wish.worker: item for item in bindings})
    except (ValueError, TypeError, KeyError, msgpack.UnpackException) as error:
        raise RunError(f"the record of resources in the metadata store cannot be read: {error!r}") from error


def _numbers(values: Any) -> tuple[int, ...]:
    if not isinstance(values, list) or any(type(value) is not int for value in values):
        raise ValueError(f"{values!r:.100} are no whole numbers")
    return tuple(values)
