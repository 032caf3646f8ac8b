"""Where the processes of a run go: the node, the class and the number of devices of each, before anything of it starts.

The plan is what Ray has reserved (:func:`orchestrator.runtime.pool_requests.reserve_all`), not a guess beside it: one machine, a
Ray cluster, and one made inside a Slurm or Kubernetes allocation give it in the same way.

Guarantees: every process of the config has a row; a device has two owners only where their rows say so; what Ray cannot hold is
one error with the numbers, and with the rows that had a place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from orchestrator.config import Config
from orchestrator.resources import Placement
from orchestrator.runtime import pool_requests
from orchestrator.runtime.engine_actors import part_name


@dataclass(frozen=True, slots=True)
class PlanRow:
    """One process. ``node``: its address, with Ray's id where several have one address; "" where Ray chooses when it starts.
    ``hardware``: the class of its devices, "" any; ``devices``: its own. ``note``: who shares them, or what it is instead."""

    process: str
    node: str
    hardware: str
    devices: int
    note: str = ""


def plan_rows(config: Config, places: Mapping[str, Placement]) -> list[PlanRow]:
    """Trainer ranks, engines, the run's own judge, borrowed servers. ``places``: reserved; those without one share."""
    rows: list[PlanRow] = []
    nodes = _node_names()
    for process, _, devices in pool_requests.wishes(config):
        placement = places.get(process)
        if placement is None:
            rows.append(PlanRow(process, "", "", 0, _shared(config)))
            continue
        binding = placement.bind()
        gpus = placement.bundle().get("GPU", 0)
        kind = binding.hardware or ("GPU" if gpus else "CPU")
        for part, node in enumerate(placement.nodes()):
            name = part_name(process, part)
            rows.append(PlanRow(name, nodes.get(node, ""), kind, devices // placement.parts, binding.fallback))
    for name, judge in config.reward.own_judges.items():
        note = (
            "the orchestrator's processors" if judge.streamed.device == "cpu" else "shares the devices of the engines"
        )
        rows.append(PlanRow(f"judge {name}".strip(), "", "", 0, note))
    rows += [PlanRow(url, "", "", 0, "borrowed: its owner's devices") for url in config.rollout.served]
    return rows


def describe(rows: Sequence[PlanRow]) -> list[str]:
    """A line per node: its processes and their devices; then what has no devices of its own."""
    by_node: dict[str, list[PlanRow]] = {}
    for row in rows:
        by_node.setdefault(row.node, []).append(row)
    lines = []
    for node, there in sorted(by_node.items(), key=lambda item: not item[0]):
        groups: dict[tuple[int, str, str], list[str]] = {}
        for row in there:
            groups.setdefault((row.devices, row.hardware, row.note), []).append(row.process)
        for (devices, hardware, note), names in groups.items():
            each = " each" if len(names) > 1 else ""
            what = f": {devices} {hardware}{each}" if devices else ""
            lines.append(f"{node or 'any node'}: {', '.join(names)}{what}{f' ({note})' if note else ''}")
    return lines


def rehearse(config: Config, say: Callable[[str], None]) -> list[PlanRow]:
    """The plan of a run that would start now, in the Ray that is connected: everything is reserved, read, and given back. Raises
    ConfigError and RetryableError. Blocks."""
    with ExitStack() as stack:
        if config.resources.pools:
            manager, places = pool_requests.place(config, None, "")
            stack.callback(manager.close)
        else:
            places = pool_requests.without_pools(config, say)
        for placement in places.values():
            stack.callback(placement.release)
        pool_requests.reserve_all(config, places)
        return plan_rows(config, places)


def _shared(config: Config) -> str:
    if config.rollout.colocation.enabled:
        return "trainer and engines take turns on the devices that they see"
    if config.rollout.reshapes:
        return "the engines share out the devices that they see"
    return "no device of its own"


def _node_names() -> dict[str, str]:
    """By Ray's id of a node, what tells it from the others."""
    import ray

    nodes = [(str(node["NodeID"]), str(node["NodeManagerAddress"])) for node in ray.nodes() if node["Alive"]]
    addresses = [address for _, address in nodes]
    return {key: address if addresses.count(address) == 1 else f"{address}/{key[:8]}" for key, address in nodes}
