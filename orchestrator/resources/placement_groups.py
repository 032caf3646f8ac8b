"""Bindings made real in Ray: a bundle of a placement group per worker, of the GPUs and of the resource of its class.

A class is a custom resource of that name, one unit a device (class CPU is Ray's own CPU, class GPU its GPU; class "" is any
device); where its nodes have GPUs, a device is one of Ray's GPUs too, so that Ray says which one it is (CUDA_VISIBLE_DEVICES)
and gives it to nobody else. Guarantees: a worker's devices are reserved whole, in one node or in as many as are asked for, before
its process starts, and are given back with it; what the Ray cluster has not enough of is an error that says what is missing, a
ConfigError where it never can have it; a worker whose place does not come, or failed, goes to another pool by the manager's
rules, and its devices are marked.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from orchestrator.api import ConfigError, RetryableError
from orchestrator.policies.placement.device_allocation import ACCELERATOR, DeviceBinding, DeviceWish, kind_of
from orchestrator.resources.resource_manager import ResourceManager

RESERVE_SECONDS = 60.0  # for Ray to reserve a place; a free one takes milliseconds. Ray counts whole seconds


def cluster_resources(pools: Mapping[str, int]) -> dict[str, float]:
    """The custom resources of a local Ray that stands for these pools."""
    return {hardware: float(count) for hardware, count in pools.items() if hardware not in ("CPU", "GPU")}


@dataclass(slots=True)
class _Reserved:
    """A placement group: its bundles, and how many workers still have theirs."""

    group: Any
    bundles: Sequence[Mapping[str, float]]
    holders: int


class Placement:
    """One worker's place: bound on first use, bound anew when it did not work. ``manager`` None: no pools, any device of the
    cluster. ``nodes``: that its devices lie on, as many on each; on each one is a process of it. ``note``: hears of every
    binding."""

    def __init__(
        self,
        manager: ResourceManager | None,
        worker: str,
        hardware: str,
        devices: int = 1,
        *,
        nodes: int = 1,
        cpus: float = 1.0,
        reserve_seconds: float = RESERVE_SECONDS,
        note: Callable[[DeviceBinding], None] | None = None,
    ) -> None:
        self.worker = worker
        self.parts = nodes
        self._manager = manager
        self._wish = DeviceWish(worker, hardware, devices)
        self._cpus = cpus
        self._limit = reserve_seconds
        self._note = note
        self._reserved: tuple[_Reserved, int] | None = None
        self.binding: DeviceBinding | None = None

    @property
    def whole(self) -> Placement:
        """What is reserved in Ray so that it has a place."""
        return self

    @property
    def devices_per_node(self) -> int:
        """Of its own."""
        return self._wish.devices // self.parts

    def bind(self) -> DeviceBinding:
        """Devices, without a place in Ray yet. Idempotent."""
        if self.binding is None:
            wish = self._wish
            if self._manager is None:
                self.binding = DeviceBinding(wish, wish.hardware, ())
            else:
                self._keep(self._manager.bind(wish.worker, wish.hardware, wish.devices))
        assert self.binding is not None
        return self.binding

    def bundle(self) -> dict[str, float]:
        """What this worker takes of a node."""
        hardware, count = self.bind().hardware, float(self.devices_per_node)
        if hardware == "CPU":
            return {"CPU": max(count, self._cpus)}
        of_class = {hardware: count} if hardware else {}
        gpus = {"GPU": count} if count and kind_of(hardware) == ACCELERATOR and _has_gpus(hardware) else {}
        return of_class | gpus | ({"CPU": self._cpus} if self._cpus else {})

    def place(self, part: int = 0) -> dict[str, Any]:
        """Ray's options for the process of this worker, of this ``part``; reserves the place, unless it is already. Raises
        RetryableError, and what binding does. Blocks."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        if self._reserved is None and (short := _reserve([self], "SPREAD", self._limit)):
            raise RetryableError(f"{self.worker}: Ray could not place it within {self._limit:g} s ({short})")
        assert self._reserved is not None
        reserved, index = self._reserved[0], self._reserved[1] + part
        where = PlacementGroupSchedulingStrategy(reserved.group, index)
        return {**self._options(reserved.bundles[index]), "scheduling_strategy": where}

    def node(self) -> str:
        """Ray's id of the node that the place is in, the first of several; "" without a place."""
        return self.nodes()[0]

    def nodes(self) -> list[str]:
        """The same of every part."""
        if self._reserved is None:
            return [""] * self.parts
        reserved, index = self._reserved
        return _nodes_of(reserved.group)[index : index + self.parts]

    def machine_gone(self) -> bool:
        """Whether the place is on a node that died, and Ray has none elsewhere yet: it waits until there is one. Blocks."""
        import ray

        there = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
        return self.whole._reserved is not None and not there.issuperset(self.nodes())

    def move(self) -> DeviceBinding:
        """The place did not work: other devices, the old ones marked as failed, and all that are free of a class of which Ray
        has not enough any more (a node died). RetryableError: there are none; it keeps its place, for when the node is back.
        Blocks."""
        import ray

        gone = self.machine_gone()
        if self._manager is not None:
            old = self.bind()
            gone = gone or ray.cluster_resources().get(old.hardware, 0) < self._wish.devices
            free = self._manager.view().free(old.hardware) if gone else ()
            try:
                self._keep(self._manager.rebind(self.worker, failed=True, gone=gone))
            except RetryableError:
                if gone:  # away, not broken
                    self._manager.repair(old.hardware, [*old.devices, *free])
                raise
        elif gone:
            raise RetryableError(f"{self.worker}: Ray has no other place")
        self.drop()
        return self.bind()

    def drop(self) -> None:
        """Give the place in Ray back, with the last worker of its group; the binding stays. Idempotent."""
        from ray.util import remove_placement_group

        had, self._reserved = self._reserved, None
        if had is not None:
            had[0].holders -= 1
            if not had[0].holders:
                remove_placement_group(had[0].group)

    def release(self) -> None:
        """Give everything back. Idempotent."""
        self.drop()
        if self.binding is not None and self._manager is not None:
            self._manager.release(self.worker)
        self.binding = None

    def hold(self, reserved: _Reserved, index: int) -> None:
        """Its place is this bundle of a group."""
        self._reserved = reserved, index

    @staticmethod
    def _options(wanted: Mapping[str, float]) -> dict[str, Any]:
        return {
            "num_cpus": wanted.get("CPU", 0),
            "num_gpus": wanted.get("GPU", 0),
            "resources": {name: count for name, count in wanted.items() if name not in ("CPU", "GPU")},
        }

    def _keep(self, binding: DeviceBinding) -> None:
        self.binding = binding
        if self._note is not None:
            self._note(binding)


def reserve(places: Sequence[Placement], strategy: Literal["PACK", "SPREAD"], seconds: float = RESERVE_SECONDS) -> None:
    """The places of several workers, all or none: beside each other, in order node by node, and given back together; or over as
    many nodes as there are, and each given back alone. The devices of one worker are in one node either way, or on as many as it
    has parts. Raises ConfigError for what the nodes that are there could never hold, and RetryableError for what others have now.
    Blocks."""
    import ray

    if not places or not (lacking := _reserve(places, strategy, seconds)):
        return
    bundles = [place.bundle() for place in places for _ in range(place.parts)]
    short = f"Ray has no place for {', '.join(place.worker for place in places)} ({lacking})"
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    for place in places:
        wanted = place.bundle()
        fit = sum(all(node.get(name, 0) >= count for name, count in wanted.items()) for node in nodes)
        if fit < place.parts:
            most = max((node.get("GPU", 0) for node in nodes), default=0)
            there = "no node alone has" if place.parts == 1 else f"{fit} nodes of {place.parts} have"
            short += f"; {there} the {_words(wanted)} of {place.worker} (most GPUs of a node: {most:g})"
            fix = "an engine or rank must fit on one node, unless its engine sets `nodes`; engines that are re-divided"
            fix += " need nodes with resources.devices_per_server devices"
            raise ConfigError("resources.pools", place.worker, f"{short}: {fix}")
    whole = ray.cluster_resources()
    if any(count > whole.get(name, 0) for name, count in _sum(bundles).items()):
        raise ConfigError("resources.pools", len(places), f"{short}: start fewer or smaller ones, or add nodes")
    raise RetryableError(short)


def _reserve(places: Sequence[Placement], strategy: str, seconds: float) -> str:
    """What Ray lacked when it was asked, where it could not; else "". It keeps a group whole, so what is to be given back alone
    is a group of its own."""
    import ray
    from ray.util import placement_group, remove_placement_group

    bundles, free = [place.bundle() for place in places for _ in range(place.parts)], ray.available_resources()
    if strategy == "PACK":
        groups = [(placement_group(bundles, strategy="PACK"), list(places))]
    else:
        wide = [place for place in places if place.parts > 1]  # first: the others go round them
        groups = [
            (placement_group([place.bundle()] * place.parts, strategy="STRICT_SPREAD"), [place]) for place in wide
        ]
        narrow = [place for place in places if place.parts == 1]
        targets = _spread([place.bundle() for place in narrow], _free_by_node())
        groups += [
            (placement_group([place.bundle()], strategy="STRICT_PACK", _soft_target_node_id=target), [place])
            for target, place in zip(targets, narrow, strict=True)
        ]
    deadline = time.monotonic() + seconds
    if not all(group.wait(max(1, math.ceil(deadline - time.monotonic()))) for group, _ in groups):
        for group, _ in groups:
            remove_placement_group(group)
        return _shortage(bundles, free)
    for group, holders in groups:
        reserved = _Reserved(group, [place.bundle() for place in holders for _ in range(place.parts)], len(holders))
        order = range(len(holders)) if strategy != "PACK" else _by_node(reserved.bundles, _nodes_of(group))
        for index, place in zip(order, holders, strict=True):
            place.hold(reserved, index)
    return ""


def _nodes_of(group: Any) -> list[str]:
    """Of its bundles."""
    from ray.util import placement_group_table

    found = placement_group_table(group)["bundles_to_node_id"]
    return [str(found[index]) for index in range(len(found))]


def _by_node(bundles: Sequence[Mapping[str, float]], nodes: Sequence[str]) -> list[int]:
    """Bundles in an order in which those of a node follow each other, the fullest node first. Ray gives equal bundles to nodes in
    any order, and ranks that follow each other (of one tensor-parallel group) must not speak over the network."""
    if any(bundle != bundles[0] for bundle in bundles):
        return list(range(len(bundles)))
    return sorted(range(len(bundles)), key=lambda index: (-nodes.count(nodes[index]), nodes.index(nodes[index]), index))


def _spread(bundles: Sequence[Mapping[str, float]], free: Mapping[str, Mapping[str, float]]) -> list[str | None]:
    """A node for each bundle: the largest first, each where the fewest of these are and then most is free. None: no node has
    room for it now, and Ray may know one later. ``free``: by node."""
    left = {node: dict(resources) for node, resources in free.items()}
    count = dict.fromkeys(left, 0)
    found: list[str | None] = [None] * len(bundles)
    for index in sorted(range(len(bundles)), key=lambda index: _size(bundles[index]), reverse=True):
        wanted = bundles[index]
        fits = [node for node, has in left.items() if all(has.get(name, 0) >= n for name, n in wanted.items())]
        if fits:
            node = min(fits, key=lambda node: (count[node], *(-size for size in _size(left[node])), node))
            found[index] = node
            count[node] += 1
            for name, n in wanted.items():
                left[node][name] -= n
    return found


def _size(resources: Mapping[str, float]) -> tuple[float, float]:
    return resources.get("GPU", 0), resources.get("CPU", 0)


def _free_by_node() -> dict[str, dict[str, float]]:
    from ray._private.state import available_resources_per_node

    return {str(node): resources for node, resources in available_resources_per_node().items()}


def _has_gpus(hardware: str) -> bool:
    """Whether the nodes of this class have devices that Ray counts; "": any node."""
    import ray

    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    return any(node.get("GPU") and (not hardware or node.get(hardware)) for node in nodes)


def _sum(bundles: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: sum(wanted.get(name, 0) for wanted in bundles) for name in {n: 0 for w in bundles for n in w}}


def _words(wanted: Mapping[str, float]) -> str:
    return ", ".join(f"{count:g} {name}" for name, count in wanted.items())


def _shortage(bundles: Sequence[Mapping[str, float]], free: Mapping[str, float]) -> str:
    import ray

    whole = ray.cluster_resources()
    rows = [
        f"{name}: {count:g} wanted, {free.get(name, 0):g} of {whole.get(name, 0):g} free"
        for name, count in _sum(bundles).items()
    ]
    return "; ".join(rows)
