"""Every rank publishes its own shards: what engines read is the model, bit for bit, in every layout, whole or by differences."""

from __future__ import annotations

import asyncio
import json
import os
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core")

from megatron_rlplugin import parallel_layout  # noqa: E402
from megatron_rlplugin.trainer import megatron_trainer  # noqa: E402
from megatron_rlplugin.trainer.megatron_trainer import MegatronTrainer  # noqa: E402
from megatron_rlplugin.weights import hf_bridge, rank_publisher  # noqa: E402
from orchestrator.settings.trainer_settings import TrainerSection  # noqa: E402
from orchestrator.transfer import (  # noqa: E402
    HostedWeights,
    RelayEndpoint,
    Subscriber,
    shard_routing,
)
from orchestrator.transfer.job_head import FULL  # noqa: E402
from orchestrator.transfer.shard_codec import DeltaCodec  # noqa: E402
from orchestrator.transfer.transfer_errors import RelayError  # noqa: E402
from scripts.bench.probes.megatron.trainer_probe import make_batch, tiny_folder, tiny_mixture  # noqa: E402
from tests.support.forked_ranks import ForkedRank, wait_for_all  # noqa: E402

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore::DeprecationWarning:megatron")]

# One rank: trains some steps, publishes after each, and says what the whole model was (rank 0).
RANK = """
import asyncio, json, sys
import numpy as np
from megatron_rlplugin.weights import hf_bridge as bridge
from megatron_rlplugin.trainer.megatron_trainer import MegatronTrainer
from scripts.bench.probes.megatron.trainer_probe import make_batch
import torch

order = json.loads(sys.argv[1])
rank, world, meet, out = int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], sys.argv[5]

async def main():
    trainer = MegatronTrainer(model=order["model"], settings=order["settings"], total_steps=10, seed=3, dtype=order["dtype"],
                              relay=order["relay"], rank=rank, world_size=world, init_method=meet)
    trainer._finds_changes = order["finds"]
    results = []
    for step in range(order["versions"]):
        if step:
            await trainer.train_step(make_batch(step - 1))
        result = await trainer.publish()
        results.append([result.version, result.bytes, result.buckets])
        weights = dict(bridge.export_hf(trainer._learner.chunks))
        if rank == 0:
            np.savez(f"{out}/{step}.npz", **{name: value.view(torch.uint8).numpy() for name, value in weights.items()})
    open(f"{out}/{rank}.json", "w").write(json.dumps(results))
    await trainer.close()

asyncio.run(main())
"""

# settings, ranks, whether the model is a mixture of experts, snapshot_every
LAYOUTS = {
    "one rank": ({}, 1, False, 2),
    "data parallel": ({"data_parallel": 2}, 2, False, 0),
    "tensor parallel": ({"tensor_parallel": 2}, 2, False, 2),
    "pipeline parallel": ({"pipeline_parallel": 2}, 2, False, 0),
    "context parallel": ({"context_parallel": 2}, 2, False, 2),
    "expert parallel": ({"data_parallel": 2, "expert_parallel": 2}, 2, True, 2),
    "tensor and pipeline parallel": ({"tensor_parallel": 2, "pipeline_parallel": 2}, 4, False, 2),
}


ALWAYS = "tensor parallel"  # shards to cut and copies to divide; a layout takes many seconds
CASES = [(name, False) for name in LAYOUTS] + [(name, True) for name, layout in LAYOUTS.items() if layout[3]]


@pytest.mark.parametrize(
    ("layout", "finds"),
    [pytest.param(*case, marks=[] if case == (ALWAYS, False) else pytest.mark.long) for case in CASES],
)
def test_what_the_ranks_publish_is_the_model_bit_for_bit(layout: str, finds: bool, tmp_path: Path) -> None:
    """``finds``: the changes where the weights are, as on a GPU."""
    settings, world, mixture, snapshot_every = LAYOUTS[layout]
    endpoint = RelayEndpoint(
        job="ranks",
        kind="fsspec",
        master=f"file://{tmp_path}/relay",
        metadata=str(tmp_path / "metadata.sqlite"),
        bucket_bytes=16 << 10,
        snapshot_every=snapshot_every,
        keep_versions=9,
    )
    order = {
        "model": (tiny_mixture if mixture else tiny_folder)(tmp_path / "model"),
        "settings": {"learning_rate": 1e-4, "micro_batch_size": 4, "micro_batch_order": "arrival", **settings},
        "dtype": "bfloat16",
        "finds": finds,
        "relay": endpoint.to_dict(),
        "versions": 4 if snapshot_every else 2,
    }
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    words = (str(world), f"file://{tmp_path / 'meet'}" if world > 1 else "", str(tmp_path))
    ranks = [ForkedRank("-c", RANK, json.dumps(order), str(rank), *words, env=environment) for rank in range(world)]
    for ended in wait_for_all(ranks, 200):
        assert ended.code == 0, ended.err[-4000:]
    answers = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(world)]
    assert all(answer == answers[0] for answer in answers)
    codec = DeltaCodec()
    subscriber = Subscriber(endpoint, codec=codec)
    follower = HostedWeights(subscriber, None, codec)
    for version, size, _ in answers[0]:
        model = dict(np.load(tmp_path / f"{version}.npz"))
        follower.advance(version)
        newcomer = HostedWeights(subscriber, None, codec)
        newcomer.advance(version)
        manifest = subscriber.manifest(version)
        shapes = {key.tensor: key.global_shape for key in manifest.shards}
        assert shapes.keys() == model.keys()
        for resident in (follower, newcomer):
            for name, value in model.items():
                region = shard_routing.Region(name, shard_routing.whole_box(shapes[name]))
                assert resident.region(region).tobytes() == value.tobytes(), f"{name} of version {version}"
        whole = sum(value.nbytes for value in model.values())
        if not snapshot_every or not version:
            assert size == whole
        assert {key.bucket % world for key in manifest.shards} == set(range(world))
    if snapshot_every:
        kinds = {tuple(path.parts[-3:-1]) for path in (tmp_path / "relay").rglob("manifest*")}
        assert kinds == {("0", "full"), ("1", "delta-0"), ("2", "delta-1"), ("3", "delta-2"), ("3", "full")}
    subscriber.close()


def relay_at(place: Path) -> RelayEndpoint:
    """Differences, with a snapshot beside every second one."""
    keep = {"snapshot_every": 2, "keep_versions": 9}
    return RelayEndpoint(job="ranks", kind="fsspec", master=f"file://{place}", metadata=f"{place}.sqlite", **keep)


def test_changes_found_where_the_weights_are_travel_as_those_found_on_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU the same code finds them; that a GPU's weights do not pass to the host is counted, not measured."""
    read, told = [], {}
    as_bytes = rank_publisher.as_bytes
    monkeypatch.setattr(rank_publisher, "as_bytes", lambda tensor: read.append(tensor.nbytes) or as_bytes(tensor))
    model = tiny_folder(tmp_path / "model")
    settings = {"learning_rate": 1e-4, "micro_batch_size": 4, "distributed_optimizer": True}
    for finds in (False, True):
        place = tmp_path / f"finds-{finds}"
        endpoint = relay_at(place)
        trainer = MegatronTrainer(
            model=model, settings=settings, total_steps=9, seed=3, dtype="bfloat16", relay=endpoint.to_dict()
        )
        trainer._finds_changes = finds
        read.clear()
        asyncio.run(trainer.publish())
        first = len(read)
        for step in range(4):
            asyncio.run(trainer.train_step(make_batch(step, groups=2)))
            if step != 1:  # a version of two steps
                asyncio.run(trainer.publish())
        assert (len(read) == first) is finds  # never again, for snapshots neither
        asyncio.run(trainer.close())
        parallel_layout.shutdown_parallel()
        told[finds] = {file.relative_to(place): file.read_bytes() for file in place.rglob("*") if file.is_file()}
    kinds = {path.parts[-2] for path in told[True]}
    assert {"full", "delta-0"} <= kinds
    assert told[True] == told[False]


@pytest.mark.parametrize("finds", [False, True])
def test_a_snapshot_that_fails_beside_its_difference_leaves_the_next_one_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, finds: bool
) -> None:
    model = tiny_folder(tmp_path / "model")
    endpoint = relay_at(tmp_path / "relay")
    trainer = MegatronTrainer(
        model=model, settings={"learning_rate": 1e-4}, total_steps=9, seed=3, dtype="bfloat16", relay=endpoint.to_dict()
    )
    trainer._finds_changes = finds
    asyncio.run(trainer.publish())
    assert trainer._publisher is not None
    publisher = trainer._publisher._publisher
    publish_shards = publisher.publish_shards

    def without_snapshots(version: int, shards: Any, base: int = FULL) -> Any:
        if base == FULL:
            raise RelayError("relay_full", "no room for it")
        return publish_shards(version, shards, base)

    failed = 0
    for step in range(4):
        asyncio.run(trainer.train_step(make_batch(step, groups=2)))
        monkeypatch.setattr(publisher, "publish_shards", without_snapshots if step < 3 else publish_shards)
        try:
            asyncio.run(trainer.publish())
        except RelayError:
            failed += 1
    assert failed
    codec = DeltaCodec()
    follower = HostedWeights(Subscriber(endpoint, codec=codec), None, codec)
    follower.advance(4)
    for name, value in hf_bridge.export_hf(trainer._learner.chunks):
        region = shard_routing.Region(name, shard_routing.whole_box(tuple(value.shape)))
        assert follower.region(region).tobytes() == value.contiguous().view(torch.uint8).numpy().tobytes(), name
    asyncio.run(trainer.close())
    parallel_layout.shutdown_parallel()


def test_ranks_that_publish_wait_for_each_other_as_long_as_they_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    monkeypatch.setattr(rank_publisher.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(rank_publisher.dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(rank_publisher.dist, "new_group", lambda **given: made.append(given["timeout"]))
    rank_publisher.TorchRanks(7200.0)
    rank_publisher.TorchRanks()
    assert made == [timedelta(hours=2), None]


def test_the_trainer_publishes_with_its_own_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    class Made(Exception):
        pass

    def ranks(timeout: float | None = None) -> None:
        raise Made(timeout)

    trainer = MegatronTrainer.__new__(MegatronTrainer)
    trainer._settings = TrainerSection.from_dict({"collective_timeout": 90.0})
    trainer._learner = SimpleNamespace(chunks=[])  # type: ignore[assignment]
    trainer._publisher, trainer._version, trainer._finds_changes = None, 0, False
    monkeypatch.setattr(rank_publisher, "TorchRanks", ranks)
    with pytest.raises(Made, match=r"90\.0"):
        trainer._opened(RelayEndpoint(job="job", kind="memory", master="limit", metadata="memory"))


@pytest.mark.parametrize(
    ("settings", "own", "found"),
    [
        ({}, "", None),
        ({"tensor_parallel": 2}, "", "1"),
        ({"context_parallel": 2}, "", "1"),
        ({"tensor_parallel": 2}, "8", "8"),
    ],
)
def test_kernels_start_in_order_where_megatron_counts_on_it(
    settings: dict[str, Any], own: str, found: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA reads it once: it is there before anything asks for a device, and what the user set stays."""
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    monkeypatch.setenv(name, own or "0")  # so that it is put back
    if not own:
        monkeypatch.delenv(name)

    def asked() -> str:
        raise RuntimeError(str(os.environ.get(name)))

    monkeypatch.setattr(megatron_trainer, "require_megatron", asked)
    with pytest.raises(RuntimeError, match=f"^{found}$"):
        MegatronTrainer(model="", settings=settings)
