"""A run over 128 devices: planned in seconds, and carried out by processes that only report what they see."""

from __future__ import annotations

import time
from collections import Counter

import pytest

from orchestrator.config import load_config
from orchestrator.runtime import device_plan, pool_requests

pytest.importorskip("ray")
from tests.support.ray_nodes import GPUS, all_free, nodes, processes_seen

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(900)]
NODES = 16
WHOLE = [
    "resources.pools={H800=64, H20=64}",
    "ray.address=auto",
    "trainer.tensor_parallel=4",
    "trainer.data_parallel=4",
    "resources.devices_per_rank=4",
    "rollout.engines=[{count=8, hardware='H20', tensor_parallel_size=4},"
    "{count=12, hardware='H20', tensor_parallel_size=2}, {count=8, hardware='H20'}]",
]


def test_128_devices_of_16_nodes_have_one_owner_each_as_planned() -> None:
    config = load_config(None, WHOLE)
    with nodes(NODES):
        begun = time.monotonic()
        rows = device_plan.rehearse(config, print)
        assert time.monotonic() - begun < 5
        by_node: Counter[str] = Counter()
        for row in rows:
            by_node[row.node] += row.devices
        assert len(by_node) == NODES
        assert set(by_node.values()) == {GPUS}
        assert all_free()
        _, places = pool_requests.place(config, None, "job")
        try:
            pool_requests.reserve_all(config, places)
            found = processes_seen(config, places)
        finally:
            for place in places.values():
                place.release()
        assert all_free()
    assert [*found] == [row.process for row in rows]
    owners = [(seen.node, device) for seen in found.values() for device in seen.devices]
    assert len(owners) == len(set(owners)) == NODES * GPUS
    for row in rows:
        assert (found[row.process].hardware, len(found[row.process].devices)) == (row.hardware, row.devices)
