"""Resource binding: which devices of which pool a worker gets (RollArt 5.2). Pure: a view of the pools in, the next one out.

A pool is the devices of one hardware class. A worker asks for a number of devices of a class; if the class does not have that
many free, it gets them in a compatible one, and the binding says so. A worker's devices are in one server if they fit; among
the servers with room the fullest is used, so that whole servers stay free.

Guarantees: a healthy device belongs to at most one worker, a failed one is given to no new one; a worker is bound once; a
request that can never be met is a ConfigError, one that can when others release devices is a RetryableError; the same view and
request give the same answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from orchestrator.api.errors import ConfigError, RetryableError

CPU, SERVERLESS, ACCELERATOR = "CPU", "serverless", "accelerator"
SERVER_DEVICES = 8  # devices of one server where nothing is said: what the papers' clusters have


def kind_of(hardware: str) -> str:
    """Classes of one kind are compatible unless the config says otherwise: any GPU runs what a GPU runs, faster or slower."""
    return {CPU.lower(): CPU, SERVERLESS: SERVERLESS}.get(hardware.lower(), ACCELERATOR)


@dataclass(frozen=True, slots=True)
class DevicePool:
    """The devices of one class: ids, each in server ``id // per_server``. ``failed``: given to nobody."""

    hardware: str
    devices: tuple[int, ...]
    per_server: int = SERVER_DEVICES
    failed: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class DeviceWish:
    """A worker's request for ``devices`` devices of class ``hardware``. ``owner``: the job that it belongs to."""

    worker: str
    hardware: str
    devices: int = 1
    owner: str = ""


@dataclass(frozen=True, slots=True)
class DeviceBinding:
    """What a worker got. ``fallback``: why it is not of the requested class, in words; "" if it is."""

    wish: DeviceWish
    hardware: str
    devices: tuple[int, ...]
    fallback: str = ""


@dataclass(frozen=True, slots=True)
class AllocationView:
    """All pools and bindings. ``compatible``: class -> the classes that may replace it, in order; a class that is not in it
    may be replaced by any of its kind."""

    pools: tuple[DevicePool, ...]
    bindings: Mapping[str, DeviceBinding] = field(default_factory=dict)
    compatible: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def pool(self, hardware: str) -> DevicePool | None:
        """The pool of a class, or None."""
        return next((pool for pool in self.pools if pool.hardware == hardware), None)

    def free(self, hardware: str) -> list[int]:
        """The healthy, unbound devices of a class."""
        pool = self.pool(hardware)
        if pool is None:
            return []
        taken = {device for item in self.bindings.values() if item.hardware == hardware for device in item.devices}
        return [device for device in pool.devices if device not in taken and device not in pool.failed]

    def candidates(self, hardware: str) -> list[str]:
        """The classes that can serve a request for this one, best first, without those that have no pool."""
        known = [pool.hardware for pool in self.pools]
        alike = [name for name in known if kind_of(name) == kind_of(hardware)]
        order = [hardware, *self.compatible.get(hardware, tuple(alike))]
        return [name for name in dict.fromkeys(order) if name in known]


def bind_worker(view: AllocationView, wish: DeviceWish) -> tuple[AllocationView, DeviceBinding]:
    """Give a worker its devices. Raises ConfigError (an id twice, a class that no pool serves, more devices than there are)
    and RetryableError (all are in use or failed)."""
    if wish.worker in view.bindings:
        there = view.bindings[wish.worker]
        has = f"{there.hardware} {', '.join(map(str, there.devices))}"
        fix = f"a worker with this id already has {has}; each worker needs its own id"
        raise ConfigError("resources.worker", wish.worker, fix)
    if wish.devices < 1:
        raise ConfigError("resources.devices", wish.devices, "a worker needs at least one device")
    candidates = view.candidates(wish.hardware)
    if not candidates:
        have = ", ".join(pool.hardware for pool in view.pools) or "none"
        fix = f"no pool serves this class (there are: {have}); add one, or name a compatible class for it"
        raise ConfigError("resources.pools", wish.hardware, fix)
    for hardware in candidates:
        devices = _pick(view, hardware, wish.devices)
        if devices:
            binding = DeviceBinding(wish, hardware, devices, _why(view, wish, hardware))
            return replace(view, bindings={**view.bindings, wish.worker: binding}), binding
    biggest = max(len(pool.devices) for pool in view.pools if pool.hardware in candidates)  # empty and healthy
    if wish.devices > biggest:
        fix = f"no pool of {', '.join(candidates)} has that many (at most {biggest})"
        raise ConfigError("resources.devices", wish.devices, f"{wish.worker}: {fix}")
    states = ", ".join(f"{name}: {len(view.free(name))} free" for name in candidates)
    raise RetryableError(
        f"{wish.worker} needs {wish.devices} devices of {wish.hardware}, but not enough are left ({states})"
    )


def release_workers(view: AllocationView, workers: Iterable[str]) -> AllocationView:
    """These workers gave their devices back. Unknown ones are ignored."""
    gone = frozenset(workers)
    return replace(view, bindings={name: item for name, item in view.bindings.items() if name not in gone})


def fail_devices(view: AllocationView, hardware: str, devices: Sequence[int]) -> AllocationView:
    """These devices are not to be used until they are repaired. Workers on them keep their binding: see ``rebind``."""
    return _marked(view, hardware, devices, broken=True)


def repair_devices(view: AllocationView, hardware: str, devices: Sequence[int]) -> AllocationView:
    """They may be used again."""
    return _marked(view, hardware, devices, broken=False)


def rebind_worker(view: AllocationView, worker: str) -> tuple[AllocationView, DeviceBinding]:
    """Give a worker other devices, as if it asked now; its old ones are free if they are healthy. Where there are none, the
    view stays as it is and the errors are those of ``bind``."""
    present = view.bindings.get(worker)
    if present is None:
        raise ConfigError("resources.worker", worker, "no worker with this id is bound")
    return bind_worker(release_workers(view, [worker]), present.wish)


def _pick(view: AllocationView, hardware: str, count: int) -> tuple[int, ...]:
    pool, free = view.pool(hardware), view.free(hardware)
    if pool is None or len(free) < count:
        return ()
    servers: dict[int, list[int]] = {}
    for device in sorted(free):
        servers.setdefault(device // pool.per_server, []).append(device)
    fitting = [devices for _, devices in sorted(servers.items()) if len(devices) >= count]
    if fitting:
        return tuple(min(fitting, key=len)[:count])
    if count <= pool.per_server:
        return ()  # it would be cut in two: parts of a worker that fits into a server do not talk over the network
    whole = sorted(servers.values(), key=lambda devices: -len(devices))
    return tuple(sorted([device for devices in whole for device in devices][:count]))


def _why(view: AllocationView, wish: DeviceWish, hardware: str) -> str:
    if hardware == wish.hardware:
        return ""
    if view.pool(wish.hardware) is None:
        return f"there is no pool of class {wish.hardware}"
    return f"{wish.hardware} has {len(view.free(wish.hardware))} devices free of {wish.devices} needed"


def _marked(view: AllocationView, hardware: str, devices: Sequence[int], *, broken: bool) -> AllocationView:
    pool = view.pool(hardware)
    unknown = [device for device in devices if pool is None or device not in pool.devices]
    if pool is None or unknown:
        raise ConfigError("resources.devices", unknown, f"class {hardware} has no such devices")
    failed = {*pool.failed, *devices} if broken else {*pool.failed} - {*devices}
    marked = replace(pool, failed=tuple(sorted(failed)))
    return replace(view, pools=tuple(marked if item is pool else item for item in view.pools))
