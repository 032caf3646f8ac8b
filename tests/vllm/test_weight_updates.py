"""Weight updates of a real vLLM engine from the relay: exact, all or nothing, and in-flight requests recompute."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from orchestrator.api import Completion, RetryableError
from orchestrator.transfer import Publisher, RelayEndpoint
from scripts.bench.probes.vllm.recompute_probe import VOCABULARY, collect, greedy, measure, publish, write_tiny_qwen3
from tests.support.relay_twin import RelayTwin
from vllm_rlplugin.worker.inprocess_engine import prepare_process
from vllm_rlplugin.worker.inprocess_worker import EngineWorker

pytestmark = pytest.mark.engine


def memory_endpoint(name: str) -> RelayEndpoint:
    """A relay of its own for each test; small buckets, so that there are many."""
    return RelayEndpoint(job="weights-tests", kind="memory", master=f"weights-{name}", bucket_bytes=32 << 10)


async def answers(worker: EngineWorker, label: str) -> list[tuple[tuple[int, ...], tuple[float, ...]]]:
    """What the worker writes after fixed prompts: tokens and log-probs, to be compared bit for bit."""
    rng = random.Random(5)
    requests = [
        greedy(f"{label}-{index}", [rng.randrange(VOCABULARY) for _ in range(rng.randint(5, 60))], 24)
        for index in range(12)
    ]
    await worker.add(requests)
    found: dict[str, Completion] = await collect(worker, len(requests))
    return [(found[request.request_id].token_ids, found[request.request_id].logprobs) for request in requests]


async def updated(worker: EngineWorker, version: int) -> int:
    await worker.suspend()
    result = await worker.update(version)
    await worker.resume()
    return result.bytes


@pytest.mark.parametrize(
    ("dtype", "tied"), [("float32", False), ("float32", True), ("bfloat16", False)], ids=["fp32", "fp32-tied", "bf16"]
)
def test_an_updated_engine_equals_a_fresh_one_bit_for_bit(tmp_path: Path, dtype: str, tied: bool) -> None:
    write_tiny_qwen3(tmp_path / "old", 1, tied=tied)
    weights = write_tiny_qwen3(tmp_path / "new", 2, tied=tied)
    endpoint = memory_endpoint(f"{dtype}-{tied}")
    publisher = Publisher(endpoint)
    needed = sum(tensor.nbytes for tensor in weights.values())
    if tied:
        weights = {**weights, "lm_head.weight": weights["model.embed_tokens.weight"]}  # as some trainers publish it
    publish(publisher, 1, weights)

    async def scenario() -> None:
        worker = EngineWorker(model=str(tmp_path / "old"), dtype=dtype, relay=endpoint.to_dict())
        before = await answers(worker, "before")
        assert await updated(worker, 1) == needed  # nothing that the model does not have
        after, sums = await answers(worker, "after"), await worker.checksums()
        publish(publisher, 2, weights)
        await updated(worker, 2)  # a second update of an updated engine
        again = await answers(worker, "again")
        await worker.close()
        fresh = EngineWorker(model=str(tmp_path / "new"), dtype=dtype)
        expected, expected_sums = await answers(fresh, "fresh"), await fresh.checksums()
        await fresh.close()
        assert before != expected
        assert after == expected
        assert again == expected
        assert sums == expected_sums

    asyncio.run(scenario())
    publisher.close()


def test_a_version_that_is_not_whole_and_right_leaves_the_old_one_untouched(tmp_path: Path) -> None:
    write_tiny_qwen3(tmp_path / "old", 1)
    weights = write_tiny_qwen3(tmp_path / "new", 2)
    endpoint = memory_endpoint("faults")
    relay = RelayTwin.shared(endpoint.master)
    publisher = Publisher(endpoint)

    def without(name: str) -> dict[str, Any]:
        return {key: tensor for key, tensor in weights.items() if key != name}

    norm = weights["model.norm.weight"]
    misfits = {
        "missing: model.norm.weight": without("model.norm.weight"),
        "unknown: model.extra.weight": {**weights, "model.extra.weight": norm},
        r"other shape: model.norm.weight \(32,\)": {**weights, "model.norm.weight": norm[:32]},
        "dtype 'complex64'": {**weights, "model.norm.weight": norm[:32].to(dtype=__import__("torch").complex64)},
    }

    def flip(data: bytes) -> bytes:
        return data[:-1] + bytes([data[-1] ^ 1])

    damages: dict[str, Callable[[bytes], bytes]] = {"flipped": flip, "truncated": lambda data: data[:-64]}

    async def scenario() -> None:
        worker = EngineWorker(model=str(tmp_path / "old"), relay=endpoint.to_dict())
        expected = await answers(worker, "expected")
        version = 0
        for message, tensors in misfits.items():
            version += 1
            publish(publisher, version, tensors)
            with pytest.raises(RetryableError, match=message):
                await updated(worker, version)
            await worker.resume()
            assert await answers(worker, f"misfit{version}") == expected
        for name, damage in damages.items():
            version += 1
            known = relay.keys()
            publish(publisher, version, weights)
            published = relay.keys()
            bucket = [key for key in published if key not in known][-2]  # the last before the manifest
            intact = relay.size(bucket)
            data = bytearray(intact)
            relay.get_into(bucket, memoryview(data))
            relay.tamper(bucket, damage(bytes(data)))
            with pytest.raises(RetryableError, match="corrupt weights"):
                await updated(worker, version)
            assert (await worker.stats()).version == 0
            await worker.resume()
            assert await answers(worker, f"damage-{name}") == expected
            relay.tamper(bucket, bytes(data))
        assert await updated(worker, version) > 0  # the same version, once it is right
        assert await answers(worker, "repaired") != expected
        assert (await worker.stats()).version == version
        await worker.close()

    asyncio.run(scenario())
    publisher.close()


def test_in_flight_requests_go_on_exactly_as_a_fresh_engine_with_the_new_weights(tmp_path: Path) -> None:
    result = asyncio.run(measure(1000, 7, tmp_path))
    assert result["tokens"] >= 1000
    assert result["preempted"] > 0
    assert result["kept_tokens"] > 0
    assert result["differing"] == 0
    # The comparison can fail: the update mattered, and keeping the KV of the old weights is caught.
    assert result["changed_by_update"] > result["changed_by_update_of"] / 2
    assert result["differing_without_reset"] > result["differing_without_reset_of"] / 2


def test_an_engine_pulls_weights_from_a_real_mooncake_store(tmp_path: Path) -> None:
    from orchestrator.runtime.mooncake_master import MooncakeMaster

    write_tiny_qwen3(tmp_path / "old", 1)
    weights = write_tiny_qwen3(tmp_path / "new", 2)

    async def scenario() -> None:
        master = MooncakeMaster(log=tmp_path / "master.log")
        await master.start()
        endpoint = RelayEndpoint(
            job=f"weights-{os.getpid()}",
            master=master.address,
            metadata=str(tmp_path / "metadata.sqlite"),
            segment_bytes=16 << 20,
            bucket_bytes=64 << 10,
        )
        publisher = Publisher(endpoint)
        publish(publisher, 1, weights)
        worker = EngineWorker(model=str(tmp_path / "old"), relay=endpoint.to_dict())
        await updated(worker, 1)
        pulled, sums = await answers(worker, "pulled"), await worker.checksums()
        await worker.close()
        publisher.close()
        await master.stop()
        fresh = EngineWorker(model=str(tmp_path / "new"))
        assert pulled == await answers(fresh, "fresh")
        assert sums == await fresh.checksums()
        await fresh.close()

    asyncio.run(scenario())


def test_the_layout_of_a_checkpoint_is_found_in_a_folder_and_in_the_hugging_face_cache(tmp_path: Path) -> None:
    prepare_process(1)
    from vllm_rlplugin.weights.transfer_engine import checkpoint_layout

    snapshot = tmp_path / "models--org--tiny" / "snapshots" / "abc"
    weights = write_tiny_qwen3(snapshot, 1)
    (tmp_path / "models--org--tiny" / "refs").mkdir()
    (tmp_path / "models--org--tiny" / "refs" / "main").write_text("abc")
    layout = checkpoint_layout(str(snapshot))
    assert layout is not None
    assert {name: spec.shape for name, spec in layout.items()} == {
        name: tuple(tensor.shape) for name, tensor in weights.items()
    }
    assert {str(spec.dtype) for spec in layout.values()} == {"torch.float32"}
    assert checkpoint_layout("org/tiny", None, str(tmp_path)) == layout
    assert checkpoint_layout("org/other", None, str(tmp_path)) is None
    assert checkpoint_layout(str(tmp_path)) is None


def test_a_slice_is_the_same_cut_out_of_the_tensor_or_of_the_box_around_it() -> None:
    torch = pytest.importorskip("torch")
    prepare_process(1)
    from vllm_rlplugin.weights.checkpoint_mapping import CheckpointMapping, Slice, TensorSpec

    whole = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    views = [whole[1:3], whole[:, 2:4], whole[1:3, 1:4], whole.t()[2:5], whole.view(-1)[5:15], whole.view(2, 2, 6)[1]]
    slices = [
        Slice("w", view.storage_offset(), tuple(view.shape), view.stride(), "p", torch.empty(view.shape))
        for view in views
    ]
    layout = {"w": TensorSpec((4, 6), torch.float32), "x": TensorSpec((1,), torch.float32)}
    for chosen in ([0], [1], [2], [3], [4], [5], [1, 2], [0, 4]):
        mapping = CheckpointMapping(tuple(slices[index] for index in chosen), (), {}, (), 0, (), {})
        boxes = mapping.tensor_boxes(layout)
        assert boxes.keys() == {"w"}
        (top, bottom), (left, right) = boxes["w"]
        part = whole[top:bottom, left:right].contiguous()
        for index in chosen:
            assert torch.equal(slices[index].cut_box((4, 6), boxes["w"], part), views[index])
            assert torch.equal(slices[index].cut_from(whole), views[index])
    assert CheckpointMapping((slices[2],), (), {}, (), 0, (), {}).tensor_boxes(layout) == {"w": ((1, 3), (1, 4))}
