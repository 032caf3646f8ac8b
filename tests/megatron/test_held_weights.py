"""What is published beside a training step is the version that was held, bit for bit, whatever the step makes of the weights."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core")

from megatron_rlplugin import parallel_layout  # noqa: E402
from megatron_rlplugin.trainer.megatron_trainer import MegatronTrainer  # noqa: E402
from megatron_rlplugin.weights import hf_bridge  # noqa: E402
from orchestrator.api import HoldingTrainer  # noqa: E402
from orchestrator.transfer import HostedWeights, RelayEndpoint, Subscriber, shard_routing  # noqa: E402
from orchestrator.transfer.shard_codec import DeltaCodec  # noqa: E402
from orchestrator.transfer.transfer_errors import RelayError  # noqa: E402
from scripts.bench.probes.megatron.trainer_probe import make_batch, tiny_folder  # noqa: E402
from tests.support.forked_ranks import ForkedRank, wait_for_all  # noqa: E402

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore::DeprecationWarning:megatron")]

# One rank: holds each version, and lets it be published no sooner than the next step has changed the weights.
RANK = """
import asyncio, json, sys, threading
import numpy as np
import torch
from megatron_rlplugin.trainer.megatron_trainer import MegatronTrainer
from megatron_rlplugin.weights import hf_bridge as bridge
from scripts.bench.probes.megatron.trainer_probe import make_batch

order = json.loads(sys.argv[1])
rank, world, meet, out = int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], sys.argv[5]

async def main():
    trainer = MegatronTrainer(model=order["model"], settings=order["settings"], total_steps=10, seed=3, dtype="bfloat16",
                              relay=order["relay"], rank=rank, world_size=world, init_method=meet)
    trainer._finds_changes = order["finds"]
    results, late, beside = [], threading.Event(), []
    for version in range(order["versions"]):
        await trainer.hold()
        weights = dict(bridge.export_hf(trainer._learner.chunks))
        if rank == 0:
            np.savez(f"{out}/{version}.npz", **{name: value.view(torch.uint8).numpy() for name, value in weights.items()})
        publisher = trainer._publisher._publisher
        publish_shards = type(publisher).publish_shards

        def when_trained(*arguments, _late=late, _do=publish_shards, _own=publisher):
            assert _late.wait(60)
            return _do(_own, *arguments)

        publisher.publish_shards = when_trained
        publishing = asyncio.ensure_future(trainer.publish_held())
        await asyncio.sleep(0.05)  # the thread is in it
        await trainer.train_step(make_batch(version))
        beside.append(not publishing.done())
        late.set()
        result = await publishing
        late.clear()
        results.append([result.version, result.content])
    assert all(beside), "the step ran beside the publication"
    open(f"{out}/{rank}.json", "w").write(json.dumps(results))
    await trainer.close()

asyncio.run(main())
"""


def relay_at(place: Path, snapshot_every: int) -> RelayEndpoint:
    keep = {"snapshot_every": snapshot_every, "keep_versions": 9, "bucket_bytes": 16 << 10}
    return RelayEndpoint(job="held", kind="fsspec", master=f"file://{place}", metadata=f"{place}.sqlite", **keep)


def check_reads(endpoint: RelayEndpoint, version: int, model: dict[str, Any], followers: list[HostedWeights]) -> None:
    """What the relay has of a version is this model, for readers that had the one before, and for new ones."""
    codec = DeltaCodec()
    subscriber = Subscriber(endpoint, codec=codec)
    for hosted in (*followers, HostedWeights(subscriber, None, codec)):
        hosted.advance(version)
        for name, value in model.items():
            shape = next(key.global_shape for key in subscriber.manifest(version).shards if key.tensor == name)
            region = shard_routing.Region(name, shard_routing.whole_box(shape))
            assert hosted.region(region).tobytes() == value.tobytes(), f"{name} of version {version}"
    subscriber.close()


@pytest.mark.parametrize(
    ("snapshot_every", "finds"),
    [(0, False), (2, False), pytest.param(2, True, marks=pytest.mark.long)],
    ids=["whole", "differences", "differences found where the weights are"],
)
def test_what_is_on_the_relay_is_the_version_that_was_held_though_a_step_ran_beside(
    snapshot_every: int, finds: bool, tmp_path: Path
) -> None:
    endpoint = relay_at(tmp_path / "relay", snapshot_every)
    order = {
        "model": tiny_folder(tmp_path / "model"),
        "settings": {"learning_rate": 1e-3, "micro_batch_size": 4, "tensor_parallel": 2},
        "finds": finds,
        "relay": endpoint.to_dict(),
        "versions": 4,
    }
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    words = ("2", f"file://{tmp_path / 'meet'}", str(tmp_path))
    ranks = [ForkedRank("-c", RANK, json.dumps(order), str(rank), *words, env=environment) for rank in range(2)]
    for ended in wait_for_all(ranks, 200):
        assert ended.code == 0, ended.err[-4000:]
    answers = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert answers[0] == answers[1]
    assert [version for version, _ in answers[0]] == [0, 1, 2, 3]
    codec = DeltaCodec()
    reader = Subscriber(endpoint, codec=codec)
    follower = HostedWeights(reader, None, codec)
    models = [dict(np.load(tmp_path / f"{version}.npz")) for version in range(4)]
    assert any(models[0][name].tobytes() != models[1][name].tobytes() for name in models[0])
    for version, model in enumerate(models):
        check_reads(endpoint, version, model, [follower])
    reader.close()
    if snapshot_every:
        kinds = {tuple(path.parts[-3:-1]) for path in (tmp_path / "relay").rglob("manifest*")}
        assert kinds == {("0", "full"), ("1", "delta-0"), ("2", "delta-1"), ("3", "delta-2"), ("3", "full")}


@pytest.mark.parametrize("finds", [False, True])
def test_a_held_version_that_fails_is_published_again_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, finds: bool
) -> None:
    """The relay is away while the next step changes the weights; one that is never published leaves the next one right."""
    endpoint = relay_at(tmp_path / "relay", 2)
    trainer = MegatronTrainer(
        model=tiny_folder(tmp_path / "model"),
        settings={"learning_rate": 1e-3},
        total_steps=9,
        seed=3,
        dtype="bfloat16",
        relay=endpoint.to_dict(),
    )
    assert isinstance(trainer, HoldingTrainer)
    trainer._finds_changes = finds
    followers: list[HostedWeights] = []

    def model() -> dict[str, Any]:
        return {
            name: value.contiguous().view(torch.uint8).numpy().copy()
            for name, value in hf_bridge.export_hf(trainer._learner.chunks)
        }

    async def play() -> None:
        await trainer.hold()
        with pytest.raises(RelayError, match="away"):
            await away(trainer.publish_held)
        first = model()
        await trainer.train_step(make_batch(0, groups=2))
        assert (await trainer.publish_held()).version == 0
        check_reads(endpoint, 0, first, followers)
        await trainer.hold()  # given up
        with pytest.raises(RelayError, match="away"):
            await away(trainer.publish_held)
        await trainer.train_step(make_batch(1, groups=2))
        for version in (2, 3, 4):
            await trainer.hold()
            held = model()
            await trainer.train_step(make_batch(version, groups=2))
            content = (await trainer.publish_held()).content
            assert (await trainer.publish_held()).content == content  # once more: the same bytes
            check_reads(endpoint, version, held, followers)
        assert (await trainer.publish()).version == 5  # as without holding
        check_reads(endpoint, 5, model(), followers)
        await trainer.close()

    async def away(call: Any) -> None:
        def refuse(*arguments: Any) -> Any:
            raise RelayError("relay_unreachable", "away")

        assert trainer._publisher is not None
        with monkeypatch.context() as patch:
            patch.setattr(trainer._publisher._publisher, "publish_shards", refuse)
            await call()

    asyncio.run(play())
    parallel_layout.shutdown_parallel()


def test_closing_waits_for_what_is_being_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    endpoint = relay_at(tmp_path / "relay", 0)
    trainer = MegatronTrainer(
        model=tiny_folder(tmp_path / "model"), settings={}, total_steps=9, seed=3, relay=endpoint.to_dict()
    )

    async def play() -> None:
        await trainer.hold()
        assert trainer._publisher is not None
        publisher = trainer._publisher._publisher
        begun, publish_shards = threading.Event(), publisher.publish_shards

        def slowly(*arguments: Any) -> Any:
            begun.set()
            threading.Event().wait(0.5)
            return publish_shards(*arguments)

        monkeypatch.setattr(publisher, "publish_shards", slowly)
        publishing = asyncio.ensure_future(trainer.publish_held())
        assert await asyncio.to_thread(begun.wait, 10)
        await trainer.close()
        assert (await publishing).version == 0  # it was whole before anything was closed

    asyncio.run(play())
    parallel_layout.shutdown_parallel()


@pytest.mark.parametrize(
    ("snapshot_every", "finds", "copies"),
    [(0, False, 1), (2, False, 2), (2, True, 1)],
    ids=["whole", "differences", "differences found where the weights are"],
)
def test_holding_costs_one_copy_on_the_host_and_none_where_the_changes_are_known(
    snapshot_every: int, finds: bool, copies: int, tmp_path: Path
) -> None:
    """Beside the copy that differences need anyway; the same memory for every version."""
    trainer = MegatronTrainer(
        model=tiny_folder(tmp_path / "model"),
        settings={"learning_rate": 1e-3},
        total_steps=9,
        seed=3,
        dtype="bfloat16",
        relay=relay_at(tmp_path / "relay", snapshot_every).to_dict(),
    )
    trainer._finds_changes = finds
    share = sum(value.nbytes for _, value in hf_bridge.export_hf(trainer._learner.chunks))

    async def play() -> None:
        await trainer.publish()
        publisher = trainer._publisher
        assert publisher is not None
        for version in range(4):
            await trainer.train_step(make_batch(version, groups=2))
            await trainer.hold()
            held = [data for _, data in publisher._held or ()]
            kept = [*publisher._kept.values(), *publisher._spare.values(), *held]
            assert sum({data.ctypes.data: data.nbytes for data in kept}.values()) == copies * share
            await trainer.publish_held()
        await trainer.close()

    asyncio.run(play())
    parallel_layout.shutdown_parallel()
