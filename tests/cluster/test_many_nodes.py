"""A run over 128 devices: planned in seconds, and carried out by processes that only report what they see."""

from __future__ import annotations

import gc
import time
from collections import Counter
from pathlib import Path

import pytest

from orchestrator.api import Prompt, Trajectory, Turn
from orchestrator.config import load_config
from orchestrator.runtime import device_plan, pool_requests
from orchestrator.runtime.shard_objects import BatchReferences, NodeObjects
from orchestrator.shards.shard_folder import ShardFolder
from orchestrator.train_samples import to_samples

pytest.importorskip("ray")
from tests.support.ray_nodes import CLASSES, GPUS, all_free, nodes, processes_seen

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


def test_a_rank_on_another_node_reads_the_shard_that_it_was_referred_to(tmp_path: Path) -> None:
    import ray

    tokens, shards = 20_000, ShardFolder(tmp_path / "shards", tmp_path)
    turn = Turn((1, 2), tuple(range(tokens)), (-0.5,) * tokens, ((4, tokens),))
    made = Trajectory("t", "g", "task", Prompt("k", "task", 0, ""), (turn,), 1.0, "v", 0, False)
    samples = to_samples(shards.finish(made))

    def read(references: BatchReferences) -> tuple[str, int]:
        [sample] = references.samples()
        assert sample.source is not None
        return str(ray.get_runtime_context().get_node_id()), int(sample.source.read()[0].sum())

    with nodes(2):
        objects = NodeObjects(spread=True)
        references = objects.refer(samples)
        again = objects.refer(samples)
        assert references is not None
        assert again is not None
        assert ray.get(again.message) == ray.get(references.message), "the shard is not put again"
        del again
        elsewhere = ray.remote(read).options(num_cpus=1, resources={CLASSES[1]: 1})
        node, total = ray.get(elsewhere.remote(references))
        assert total == 3 + tokens * (tokens - 1) // 2
        assert node != ray.get_runtime_context().get_node_id()
        del samples
        gc.collect()
        assert list(objects._references) == []
    shards.close()
