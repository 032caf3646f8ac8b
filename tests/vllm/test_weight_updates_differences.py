"""A real vLLM engine that follows differences, cut as a tensor-parallel trainer cuts them, equals a freshly loaded one."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from orchestrator.api import RetryableError, ShardKey
from orchestrator.transfer import DeltaCodec, MemoryMetadata, Publisher, RelayEndpoint
from orchestrator.transfer.fetch_times import slowest_fetch
from orchestrator.transfer.job_head import FULL
from orchestrator.transfer.publisher import Shard
from scripts.bench.probes.vllm.recompute_probe import VOCABULARY, collect, greedy, write_tiny_qwen3
from tests.support.relay_twin import RelayTwin
from vllm_rlplugin.worker.inprocess_worker import EngineWorker

pytestmark = pytest.mark.engine
COLUMNS = ("o_proj", "down_proj")  # what tensor parallelism cuts by columns
Weights = dict[str, Any]


def shards(new: Weights, old: Weights | None) -> Iterator[Shard]:
    """Two tensor-parallel ranks' parts of every matrix; norms whole."""
    for name, tensor in new.items():
        dim = -1 if tensor.dim() == 1 else int(any(part in name for part in COLUMNS))
        half = tensor.shape[max(dim, 0)] // 2
        for start, stop in ((0, 0),) if dim < 0 else ((0, half), (half, tensor.shape[dim])):
            key = ShardKey(name, dim, start, stop, tuple(tensor.shape), "bfloat16", "raw", 0)
            yield key, raw(tensor, key), None if old is None else raw(old[name], key)


def raw(tensor: Any, key: ShardKey) -> Any:
    import torch

    part = tensor if key.dim < 0 else tensor.narrow(key.dim, key.start, key.stop - key.start)
    return part.contiguous().reshape(-1).view(torch.uint8).numpy()


def stepped(weights: Weights, seed: int) -> Weights:
    """Every hundredth value moved by one unit in the last place."""
    import torch

    after = {name: tensor.clone() for name, tensor in weights.items()}
    for tensor in after.values():
        tensor.view(-1).view(torch.int16)[seed::100] += 1
    return after


async def updated(worker: EngineWorker, version: int) -> int:
    await worker.suspend()
    try:
        return (await worker.update(version)).bytes
    finally:
        await worker.resume()


def report(worker: EngineWorker) -> dict[str, Any]:
    (found,) = worker._engine.report()
    return found


def parameters(worker: Any) -> Weights:
    return dict(worker.model_runner.model.named_parameters())


async def answers(worker: EngineWorker, label: str) -> list[Any]:
    rng = random.Random(5)
    prompts = [[rng.randrange(VOCABULARY) for _ in range(rng.randint(5, 60))] for _ in range(6)]
    await worker.add([greedy(f"{label}-{index}", prompt, 16) for index, prompt in enumerate(prompts)])
    found = await collect(worker, len(prompts))
    return [(found[f"{label}-{index}"].token_ids, found[f"{label}-{index}"].logprobs) for index in range(len(prompts))]


def test_an_engine_that_follows_differences_equals_a_fresh_one_bit_for_bit(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    write_tiny_qwen3(tmp_path / "old", 1)
    versions = [{name: tensor.to(torch.bfloat16) for name, tensor in write_tiny_qwen3(tmp_path / "new", 2).items()}]
    for version in range(1, 5):
        versions.append(stepped(versions[-1], version))
    save_file(versions[4], str(tmp_path / "new" / "model.safetensors"), metadata={"format": "pt"})
    endpoint = RelayEndpoint(
        job="j", kind="memory", master="differences", bucket_bytes=32 << 10, snapshot_every=9, encoding="auto"
    )
    metadata = MemoryMetadata.shared(endpoint.master)

    def said(version: int, whole: bool) -> float | None:
        """What the engine says that it took, to who chooses the encoding."""
        return slowest_fetch(metadata, "j", publisher.epoch, version, whole)

    relay = RelayTwin.shared(endpoint.master)
    publisher = Publisher(endpoint, codec=DeltaCodec())

    def publish(version: int) -> int:
        base = version - 1 if version else FULL
        old = versions[base] if version else None
        return publisher.publish_shards(version, shards(versions[version], old), base).bytes

    async def scenario() -> None:
        worker = EngineWorker(model=str(tmp_path / "old"), dtype="bfloat16", relay=endpoint.to_dict())
        size = publish(0)
        assert await updated(worker, 0) == size
        for version in (1, 2):
            assert publish(version) < size / 10
        assert report(worker)["touched"]["how"] == "whole"
        assert said(0, True)
        assert said(0, False) is None
        assert 0 < await updated(worker, 2) < size / 10  # two versions at once
        elements = sum(int((versions[2][name] != tensor).sum()) for name, tensor in versions[0].items())
        counts = {"tensors": len(versions[0]), "elements": elements, "staged_bytes": 8 * elements}
        assert report(worker)["touched"] == {"how": "differences", **counts}
        assert said(2, False)
        sums = await worker.checksums()
        publish(3)
        bucket = next(key for key in relay.keys() if "/3/delta-2/0" in key)  # noqa: SIM118
        intact = bytearray(relay.size(bucket))
        relay.get_into(bucket, memoryview(intact))
        relay.tamper(bucket, bytes([*intact[:-1], intact[-1] ^ 1]))
        with pytest.raises(RetryableError, match="corrupt weights"):
            await updated(worker, 3)
        assert await worker.checksums() == sums  # the old weights, bit for bit
        relay.tamper(bucket, bytes(intact))
        publish(4)
        assert 0 < await updated(worker, 4) < size / 10
        found, sums = await answers(worker, "followed"), await worker.checksums()
        await worker.close()
        fresh = EngineWorker(model=str(tmp_path / "new"), dtype="bfloat16")
        expected, expected_sums = await answers(fresh, "fresh"), await fresh.checksums()
        await fresh.close()
        assert sums == expected_sums
        assert found == expected

    asyncio.run(scenario())
    publisher.close()


def test_our_way_and_the_loader_of_vllm_end_in_the_same_bits_and_a_failure_in_the_model_is_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same difference through vLLM's own ``load_checkpoint_weight_patches``, in the same model."""
    import torch
    from vllm.model_executor.model_loader.checkpoint_weight_patch import (
        CheckpointWeightPatch,
        load_checkpoint_weight_patches,
    )

    from vllm_rlplugin.weights.delta_update import DeltaBuilder, DeltaUpdate

    before = {
        name: tensor.to(torch.bfloat16) for name, tensor in write_tiny_qwen3(tmp_path / "m", 1, tied=True).items()
    }
    after = stepped(before, 3)
    endpoint = RelayEndpoint(job="o", kind="memory", master="oracle", bucket_bytes=32 << 10, snapshot_every=9)
    publisher = Publisher(endpoint, codec=DeltaCodec())
    publisher.publish_shards(0, shards(before, None), FULL)
    publisher.publish_shards(1, shards(after, before), 0)
    prove = DeltaBuilder.prove_shards

    def tampered(self: DeltaBuilder) -> DeltaUpdate:
        found = prove(self)
        found.edits[-1].new[0] ^= 1  # the memory of what was staged goes bad
        return found

    def by_vllm(worker: Any) -> Weights:
        model, kept = worker.model_runner.model, {name: one.clone() for name, one in parameters(worker).items()}
        patches = []
        for name, tensor in after.items():
            where = (tensor.view(torch.int16) != before[name].view(torch.int16)).flatten().nonzero().flatten()
            patches.append(
                CheckpointWeightPatch(name, tuple(tensor.shape), tensor.dtype, tensor.flatten()[where], where)
            )
        load_checkpoint_weight_patches(model, patches)
        found = {name: one.clone() for name, one in parameters(worker).items()}
        for name, one in parameters(worker).items():
            one.data.copy_(kept[name])
        return found

    async def scenario() -> None:
        worker = EngineWorker(model=str(tmp_path / "m"), dtype="bfloat16", relay=endpoint.to_dict(), sleep_mode=True)
        await updated(worker, 0)
        old, sums = await answers(worker, "old"), await worker.checksums()
        monkeypatch.setattr(DeltaBuilder, "prove_shards", tampered)
        with pytest.raises(RetryableError, match="the previous weights are restored"):
            await updated(worker, 1)
        monkeypatch.undo()
        assert (await worker.stats()).version == 0
        assert await worker.checksums() == sums
        assert await answers(worker, "still") == old
        (expected,) = worker._engine._rpc(by_vllm)
        assert await worker.checksums() == sums
        await updated(worker, 1)
        assert report(worker)["touched"]["how"] == "differences"
        (found,) = worker._engine._rpc(parameters)
        assert found.keys() == expected.keys()
        for name, one in found.items():
            assert torch.equal(one.view(torch.int16), expected[name].view(torch.int16)), name
        assert await worker.checksums() != sums
        assert await answers(worker, "new") != old
        publisher.publish_shards(2, shards(before, after), 1)
        await worker.suspend()
        await worker.release("dropped")  # whatever is in the memory now, no difference is applied to it
        await worker.reclaim()
        await worker.update(2)
        await worker.resume()
        assert report(worker)["touched"]["how"] == "whole"
        assert await worker.checksums() == sums
        await worker.close()

    asyncio.run(scenario())
    publisher.close()
