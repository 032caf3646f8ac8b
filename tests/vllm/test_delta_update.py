"""Differences are applied where the weights live: to the published bits, by what changed alone, and a failure leaves no trace."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from orchestrator.api import ShardKey  # noqa: E402
from orchestrator.transfer import DeltaCodec, MemoryRelay, Publisher, RelayEndpoint  # noqa: E402
from orchestrator.transfer.job_head import FULL  # noqa: E402
from tests.support import transfer_twins as twins  # noqa: E402
from tests.support.relay_twin import RelayTwin  # noqa: E402
from vllm_rlplugin.worker.inprocess_engine import prepare_process  # noqa: E402

BF16, FP32 = torch.bfloat16, torch.float32
SHAPES = {
    "q": (96, 40), "k": (32, 40), "o": (40, 96), "up": (64, 40), "down": (40, 64), "norm": (40,), "fused": (48, 40),
    "rows": (48, 40),    "embed": (80, 40), "experts": (6, 16, 40), "turned": (24, 32), "one": (1,),
}  # fmt: skip
BITS = {"bfloat16": np.uint16, "float32": np.uint32}


class Rank:
    """One engine rank's live memory, laid out as vLLM lays it out, and the fetcher and the loader of a real engine."""

    def __init__(self, endpoint: RelayEndpoint, rank: int = 0, ranks: int = 1, *, odd: bool = False) -> None:
        prepare_process(1)
        from vllm_rlplugin.weights.checkpoint_mapping import CheckpointMapping, TensorSpec
        from vllm_rlplugin.weights.live_weights import MappedWeights
        from vllm_rlplugin.weights.version_fetch import VersionFetcher
        from vllm_rlplugin.weights.version_staging import StagingPlan

        self.ranks, self.rank = ranks, rank
        self.live: dict[str, Any] = {}
        self.slices: list[Any] = []
        self.fused(["q", "k", "up"], "qkv")  # rows of three tensors in one parameter
        self.fused(["down"], "down", dim=1)  # columns
        self.fused(["o"], "o", dim=1)
        self.fused(["embed"], "embed")
        self.fused(["experts"], "experts", dim=1)
        for name in ("norm", "one"):  # replicated
            self.live[name] = torch.zeros(SHAPES[name], dtype=BF16)
            self.slice(name, torch.empty(SHAPES[name]), name, self.live[name])
        self.live["thirds"] = torch.zeros(3, 16, 40, dtype=BF16)  # one checkpoint tensor, three slices of a parameter
        for part in range(3):
            self.slice("fused", torch.empty(SHAPES["fused"])[part::3], "thirds", self.live["thirds"][part])
        for part in range(3):  # the same, one after the other, in parameters of their own
            self.live[f"rows{part}"] = torch.zeros(16, 40, dtype=BF16)
            rows = torch.empty(SHAPES["rows"])[16 * part : 16 * part + 16]
            self.slice("rows", rows, f"rows{part}", self.live[f"rows{part}"])
        self.live["head"] = torch.zeros(SHAPES["k"], dtype=BF16)  # the same tensor in a second parameter
        self.slice("k", torch.empty(SHAPES["k"]), "head", self.live["head"])
        self.live["turned"] = torch.zeros(32, 24, dtype=BF16)
        self.slice("turned", torch.empty(SHAPES["turned"]), "turned", self.live["turned"].t())
        if odd:  # in another dtype
            self.live["norm"] = torch.zeros(SHAPES["norm"], dtype=FP32)
            self.slices = [item for item in self.slices if item.tensor != "norm"]
            self.slice("norm", torch.empty(SHAPES["norm"]), "norm", self.live["norm"])
        elements = sum(tensor.numel() for tensor in self.live.values())
        self.mapping = CheckpointMapping(tuple(self.slices), (), self.live, (), elements, (), {})
        layout = {name: TensorSpec(shape, BF16) for name, shape in SHAPES.items()}
        self.plan = StagingPlan("a model", torch.device("cpu"), layout, False, self.mapping)
        self.loaded = MappedWeights(self.mapping, torch.device("cpu"))
        self.fetcher = VersionFetcher(endpoint)
        self.base: Any = None

    def fused(self, names: list[str], parameter: str, dim: int = 0) -> None:
        """This rank's share of tensors along a dimension, one after the other in a parameter."""
        parts = []
        for name in names:
            size = SHAPES[name][dim] // self.ranks
            parts.append(torch.empty(SHAPES[name]).narrow(dim, size * self.rank, size))
        self.live[parameter] = torch.zeros([sum(part.shape[0] for part in parts), *parts[0].shape[1:]], dtype=BF16)
        row = 0
        for name, part in zip(names, parts, strict=True):
            self.slice(name, part, parameter, self.live[parameter][row : row + part.shape[0]])
            row += part.shape[0]

    def slice(self, tensor: str, part: Any, parameter: str, target: Any) -> None:
        from vllm_rlplugin.weights.checkpoint_mapping import Slice

        self.slices.append(Slice(tensor, part.storage_offset(), tuple(part.shape), part.stride(), parameter, target))

    def take(self, version: int) -> Any:
        from vllm_rlplugin.weights.version_staging import StagedVersion

        found = self.fetcher.take_staged(version, self.plan, self.base)
        assert isinstance(found, StagedVersion), found
        return found

    def update(self, version: int) -> Any:
        staged = self.take(version)
        self.loaded.load(staged)
        self.note(staged)
        return staged

    def note(self, staged: Any) -> None:
        from vllm_rlplugin.weights.delta_update import DeltaBase

        self.base = DeltaBase(staged.origin, self.mapping, self.loaded.digests)

    def holds(self, model: Any) -> bool:
        """Whether what is live is, bit for bit, what a whole load of this version would make it."""
        for item in self.slices:
            whole = torch.from_numpy(np.ascontiguousarray(model[item.tensor]).view(np.int16)).view(BF16)
            expected = item.cut_from(whole).to(item.target.dtype)
            if not np.array_equal(bits(expected), bits(item.target)):
                return False
        return True

    def bits(self) -> list[bytes]:
        return [bits(tensor).tobytes() for tensor in self.live.values()]


def kept(rank: Rank) -> list[str]:
    """Tensors of which the fetcher has a copy: rows that alternate between parts of a parameter are no box."""
    return [region.tensor for region in rank.fetcher._resident[1]] if rank.fetcher._resident else []


def bits(tensor: Any) -> Any:
    return tensor.contiguous().view(torch.uint8).numpy()


class Trainer:
    """Publishes versions of random weights, cut anew at will."""

    def __init__(self, name: str, seed: int, **endpoint: Any) -> None:
        self.endpoint = RelayEndpoint(
            **{
                "job": "j",
                "kind": "memory",
                "master": name,
                "bucket_bytes": 4096,
                "snapshot_every": 9,
                "keep_versions": 9,
            }
            | endpoint
        )
        self.relay = RelayTwin.shared(name)
        self.publisher = Publisher(self.endpoint, codec=DeltaCodec())
        self.random = random.Random(seed)
        self.keys: list[ShardKey] = []
        for tensor, shape in SHAPES.items():
            dim = self.random.randrange(-1, len(shape))
            cuts = sorted(
                self.random.sample(range(1, max(shape[dim], 2)), min(self.random.randrange(4), shape[dim] - 1))
            )
            bounds = [0, *cuts, shape[dim]] if dim >= 0 else [0, 0]
            for start, stop in pairwise(bounds):
                self.keys.append(ShardKey(tensor, dim, start, stop, shape, "bfloat16", "raw", 0))
        self.models = [twins.weights(seed, SHAPES)]
        self.publish(0, FULL)

    def step(self, tensors: list[str] | None = None, share: float = 0.01) -> int:
        """Another version with a share of the elements of some tensors changed."""
        generator = np.random.default_rng(len(self.models))
        after = {name: values.copy() for name, values in self.models[-1].items()}
        for name in SHAPES if tensors is None else tensors:
            flat = after[name].reshape(-1)
            where = generator.random(flat.size) < share
            where[generator.integers(flat.size)] = True
            flat[where] ^= generator.integers(1, 4, int(where.sum()), dtype=np.uint16)
        self.models.append(after)
        self.publish(len(self.models) - 1, len(self.models) - 2)
        return len(self.models) - 1

    def publish(self, version: int, base: int) -> None:
        old = self.models[base] if base != FULL else None
        self.publisher.publish_shards(version, twins.shards(self.keys, self.models[version], old), base)

    def changed(self, version: int, base: int) -> int:
        """Elements."""
        return sum(int((self.models[version][name] != self.models[base][name]).sum()) for name in SHAPES)


@pytest.fixture
def made(request: pytest.FixtureRequest) -> Iterator[tuple[Trainer, Rank]]:
    trainer = Trainer(request.node.name, 3)
    rank = Rank(trainer.endpoint)
    rank.update(0)
    yield trainer, rank
    rank.fetcher.close()
    trainer.publisher.close()


@pytest.mark.parametrize("seed", range(12))
def test_whatever_the_layouts_differences_end_in_the_published_bits(seed: int) -> None:
    trainer = Trainer(f"layouts-{seed}", seed)
    ranks = 1 + seed % 2
    engines = [Rank(trainer.endpoint, rank, ranks, odd=seed % 3 == 2) for rank in range(ranks)]
    for engine in engines:
        assert engine.update(0).delta is None
        assert engine.holds(trainer.models[0])
    for tensors, share, skip in ((None, 0.01, 0), (["q", "o", "fused"], 0.3, 0), (None, 0.002, 3), (["norm"], 1.0, 0)):
        for _ in range(skip):
            trainer.step(["o", "embed", "turned"], 0.05)
        version = trainer.step(tensors, share)
        for engine in engines:
            staged = engine.update(version)
            assert staged.delta is not None
            assert engine.holds(trainer.models[version])
            assert not engine.loaded.mismatches()
            known = engine.loaded.digests
            engine.loaded._expected = {}
            engine.loaded.mismatches()
            assert engine.loaded.digests == known  # predicted before anything was written
    for engine in engines:
        engine.fetcher.close()
    trainer.publisher.close()


def test_the_operations_of_a_gpu_run_on_a_cpu_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in: torch's gather and scatter, and its digest, on tensors of the host. No GPU takes part."""
    prepare_process(1)
    from vllm_rlplugin.weights import delta_update, digests, live_weights, rank_slices, slice_edits

    monkeypatch.setattr(slice_edits, "on_host", lambda memory: False)
    for module in (delta_update, live_weights, rank_slices):
        monkeypatch.setattr(module, "digest_for", lambda device: digests.mixsum)
    monkeypatch.setattr(delta_update, "digest_of_parts", lambda device: digests.mixsum_of_parts)
    monkeypatch.setattr(delta_update, "CHUNK_BYTES", 600)
    trainer = Trainer("torch", 5)
    rank = Rank(trainer.endpoint, 1, 2)
    rank.update(0)
    for version in (trainer.step(), trainer.step()):
        assert rank.update(version).delta is not None
        assert rank.holds(trainer.models[version])
        assert not rank.loaded.mismatches()
    before = rank.bits()
    rank.loaded.load(staged := rank.take(trainer.step()))
    assert rank.loaded.undo(staged) == []
    assert rank.bits() == before
    rank.fetcher.close()
    trainer.publisher.close()


def test_on_a_device_no_shard_is_copied_to_the_host_and_weights_that_changed_are_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What a difference is applied to must have the digest of when it was loaded, made where it is."""
    prepare_process(1)
    from vllm_rlplugin.weights import delta_update, digests, live_weights, rank_slices

    for module in (delta_update, live_weights, rank_slices):
        monkeypatch.setattr(module, "digest_for", lambda device: digests.mixsum)
    monkeypatch.setattr(delta_update, "digest_of_parts", lambda device: digests.mixsum_of_parts)
    monkeypatch.setattr(digests, "_on_host", lambda tensor: pytest.fail("a copy on the host"))
    trainer = Trainer("device", 6)
    rank = Rank(trainer.endpoint)
    rank.update(0)
    version = trainer.step()
    assert rank.update(version).delta is not None
    assert rank.holds(trainer.models[version])
    version = trainer.step(["q", "embed"])
    rank.live["qkv"].view(torch.int16)[1, 3] ^= 1  # of q, a place that may not change
    assert rank.take(version).delta is None, "it is taken whole"
    rank.fetcher.close()
    trainer.publisher.close()


@pytest.mark.parametrize("version", [0, 2])
def test_without_a_mapping_a_version_is_read_while_it_is_loaded_whole_or_put_together_from_differences(
    version: int,
) -> None:
    prepare_process(1)
    from vllm_rlplugin.weights.checkpoint_mapping import TensorSpec
    from vllm_rlplugin.weights.version_fetch import VersionFetcher
    from vllm_rlplugin.weights.version_staging import StagedVersion, StagingPlan

    trainer = Trainer(f"streamed-{version}", 7)
    trainer.step()
    trainer.step()
    layout = {name: TensorSpec(shape, BF16) for name, shape in SHAPES.items()}
    fetcher = VersionFetcher(trainer.endpoint)
    staged = fetcher.take_staged(version, StagingPlan("a model", torch.device("cpu"), layout, False, None))
    assert isinstance(staged, StagedVersion)
    assert staged.layers is not None
    assert (staged.staged_bytes, staged.layers.tensors) == (0, len(SHAPES))
    found = dict(staged.layers.read_tensors())
    for name, expected in trainer.models[version].items():
        assert np.array_equal(found[name].view(torch.int16).numpy(), expected.view(np.int16)), name
    fetcher.close()
    trainer.publisher.close()


def test_a_version_is_there_before_its_time_is_reported_and_whether_or_not_that_can_be(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prepare_process(1)
    from orchestrator.transfer import RelayError, Subscriber

    trainer = Trainer("reported-late", 3, encoding="auto")
    trainer.step()
    asked, answered = threading.Event(), threading.Event()

    def refuse(*_: Any) -> None:
        asked.set()
        answered.wait(20)
        raise RelayError("relay_unreachable", "the metadata store does not answer")

    monkeypatch.setattr(Subscriber, "report_fetch", refuse)
    rank = Rank(trainer.endpoint)
    try:
        rank.take(0)  # asserts that it is no refusal
        assert asked.wait(20)
        answered.set()
        rank.take(0)
    finally:
        answered.set()
        rank.fetcher.close()
        trainer.publisher.close()


def test_layers_are_the_numbered_modules_in_the_order_in_which_the_model_has_them() -> None:
    from orchestrator.transfer import Region
    from vllm_rlplugin.weights.layer_stream import split_layers

    names = [
        "embed.weight",
        "m.layers.0.a",
        "m.layers.1.mlp.experts.3.up",
        "m.layers.0.b",
        "v.blocks.0.x",
        "m.layers.10.a",
    ]
    found = split_layers([Region(name, ((0, 1),)) for name in names])
    assert [[region.tensor for region in layer] for layer in found] == [
        ["embed.weight"],
        ["m.layers.0.a", "m.layers.0.b"],
        ["m.layers.1.mlp.experts.3.up"],
        ["v.blocks.0.x"],
        ["m.layers.10.a"],
    ]


def test_what_is_staged_is_as_large_as_the_change_and_no_copy_of_the_weights_stays(made: tuple[Trainer, Rank]) -> None:
    trainer, rank = made
    version = trainer.step(["q", "embed"])
    changed = trainer.changed(version, 0)
    staged = rank.take(version)
    assert not staged.pieces
    assert not staged.tensors
    assert not staged.packed
    assert staged.delta.positions == changed
    assert staged.staged_bytes == staged.delta.bytes == 8 * changed  # a place, the old and the new value
    assert {item.slice.tensor for item in staged.delta.edits} == {"q", "embed"}
    assert staged.bytes < 8 * changed + 2000
    assert kept(rank) == ["fused"]


def test_a_chain_sees_what_the_difference_before_it_did(made: tuple[Trainer, Rank]) -> None:
    trainer, rank = made
    first = trainer.models[0]["norm"][0]
    for value in (first ^ 1, first ^ 3, first):  # there and back again
        after = {name: values.copy() for name, values in trainer.models[-1].items()}
        after["norm"][0] = value
        after["k"][5, :] ^= 1
        trainer.models.append(after)
        trainer.publish(len(trainer.models) - 1, len(trainer.models) - 2)
    staged = rank.update(3)
    assert rank.holds(trainer.models[3])
    assert {item.slice.tensor for item in staged.delta.edits} == {"k"}
    assert staged.delta.positions == 2 * 40  # in both parameters that have it


@pytest.mark.parametrize("packs", [False, True])
def test_a_bad_digest_after_writing_takes_everything_back_bit_for_bit(
    made: tuple[Trainer, Rank], packs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm_rlplugin.weights import live_weights

    trainer, rank = made
    before, digests = rank.bits(), rank.loaded.digests
    staged = rank.take(trainer.step())
    if packs:  # writing goes well, what comes after it does not

        def fail(*_: Any) -> None:
            raise RuntimeError("no memory to pack")

        monkeypatch.setattr(live_weights.MappedWeights, "_pack_again", fail)
    else:
        staged.delta.edits[-1].new[0] ^= 1
    with pytest.raises((live_weights.WeightMismatch, RuntimeError)):
        rank.loaded.load(staged)
    assert rank.bits() != before
    monkeypatch.undo()
    assert rank.loaded.undo(staged) == []
    assert rank.bits() == before
    assert rank.loaded.digests == digests
    assert rank.update(1).delta is not None
    assert rank.holds(trainer.models[1])


def test_what_cannot_be_taken_back_is_named(made: tuple[Trainer, Rank]) -> None:
    trainer, rank = made
    staged = rank.take(trainer.step())
    rank.loaded.load(staged)
    untouched = np.setdiff1d(np.arange(40), staged.delta.edits[-1].index)
    rank.live["norm"].view(torch.int16)[
        int(np.flatnonzero(trainer.models[0]["norm"] == trainer.models[1]["norm"])[0])
    ] ^= 1
    assert untouched.size
    assert [item["tensor"] for item in rank.loaded.undo(staged)] == ["norm"]


def test_weights_that_are_not_what_was_loaded_are_taken_whole(made: tuple[Trainer, Rank]) -> None:
    trainer, rank = made
    version = trainer.step()
    rank.live["qkv"].view(torch.int16)[7, 7] ^= 1
    staged = rank.take(version)
    assert staged.delta is None
    rank.loaded.load(staged)
    assert rank.holds(trainer.models[version])
    assert kept(rank) == ["fused"]


def test_a_shard_that_is_here_only_in_part_needs_what_was_loaded_to_be_live() -> None:
    trainer = Trainer("part", 3)
    trainer.keys = [ShardKey(name, -1, 0, 0, shape, "bfloat16", "raw", 0) for name, shape in SHAPES.items()]
    trainer.models = trainer.models[:1]
    trainer.publisher.rollback(-1)
    trainer.publish(0, FULL)
    rank = Rank(trainer.endpoint, 1, 2)
    rank.update(0)
    version = trainer.step()
    staged = rank.take(version)
    assert staged.delta is not None
    rank.live["down"].view(torch.int16)[7, 7] ^= 1
    rank.fetcher.drop_staged()
    staged = rank.take(version)
    assert staged.delta is None
    rank.loaded.load(staged)
    assert rank.holds(trainer.models[version])
    rank.fetcher.close()
    trainer.publisher.close()


def test_a_damaged_difference_changes_nothing_and_a_chain_that_is_gone_ends_in_the_snapshot(
    made: tuple[Trainer, Rank],
) -> None:
    from vllm_rlplugin.weights.version_fetch import FetchRefusal

    trainer, rank = made
    before = rank.bits()
    version = trainer.step()
    bucket = next(key for key in trainer.relay.keys() if f"/{version}/delta-0/0" in key)  # noqa: SIM118
    intact = bytearray(trainer.relay.size(bucket))
    trainer.relay.get_into(bucket, memoryview(intact))
    trainer.relay.tamper(bucket, bytes([*intact[:-1], intact[-1] ^ 1]))
    refused = rank.fetcher.take_staged(version, rank.plan, rank.base)
    assert isinstance(refused, FetchRefusal)
    assert refused.retryable
    assert rank.bits() == before
    trainer.publish(version, FULL)
    staged = rank.update(version)
    assert staged.delta is None
    assert rank.holds(trainer.models[version])
    assert rank.update(trainer.step()).delta is not None  # and on from there


def test_what_was_prepared_for_other_weights_is_prepared_again(made: tuple[Trainer, Rank]) -> None:
    trainer, rank = made
    trainer.step()
    version = trainer.step()
    rank.fetcher.start_fetch(version, rank.plan, rank.base)
    staged = rank.take(1)
    rank.loaded.load(staged)
    rank.note(staged)
    rank.fetcher.start_fetch(version, rank.plan, rank.base)
    staged = rank.take(version)
    assert staged.can_follow(rank.base)
    old = rank.base
    rank.loaded.load(staged)
    rank.note(staged)
    assert not staged.can_follow(rank.base)
    assert staged.can_follow(old)
    assert rank.holds(trainer.models[version])


def test_what_was_prepared_is_taken_without_reading_the_relay_again(
    made: tuple[Trainer, Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, rank = made
    read, stock = list[str](), MemoryRelay.get_into

    def get_into(relay: MemoryRelay, key: str, buffer: memoryview) -> int:
        read.append(key)
        return stock(relay, key, buffer)

    monkeypatch.setattr(MemoryRelay, "get_into", get_into)
    version = trainer.step()
    rank.fetcher.start_fetch(version, rank.plan, rank.base)
    rank.fetcher._prepared.result()  # type: ignore[union-attr]
    assert sum("manifest" in key for key in read) == 1 + bool(kept(rank)), "once, and once for the copies"
    prepared = list(read)
    assert rank.update(version).delta is not None
    assert read == prepared
    assert rank.holds(trainer.models[version])


def test_what_was_prepared_and_then_published_again_is_compared_with_what_is_there_now(
    made: tuple[Trainer, Rank],
) -> None:
    trainer, rank = made
    version = trainer.step()
    rank.fetcher.start_fetch(version, rank.plan, rank.base)
    rank.fetcher._prepared.result()  # type: ignore[union-attr]
    trainer.models[version] = twins.weights(9, SHAPES)
    trainer.publisher.rollback(version)  # the number now stands for other weights
    trainer.publish(version, FULL)
    rank.update(version)
    assert rank.holds(trainer.models[version])


def test_nothing_reads_the_live_weights_once_the_fetch_was_settled(
    made: tuple[Trainer, Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, rank = made
    version = trainer.step()
    gate, stock = threading.Event(), MemoryRelay.get_into

    def get_into(relay: MemoryRelay, key: str, buffer: memoryview) -> int:
        assert gate.wait(60)
        return stock(relay, key, buffer)

    monkeypatch.setattr(MemoryRelay, "get_into", get_into)
    rank.fetcher.start_fetch(version, rank.plan, rank.base)
    threading.Timer(0.2, gate.set).start()
    rank.fetcher.stop_reading()
    assert gate.is_set()
    state = rank.fetcher.fetch_state()
    assert (state["state"], "given up" in state["error"]) == ("failed", True)
    rank.fetcher.start_fetch(version, rank.plan, rank.base)
    assert rank.update(version).delta is not None
    rank.fetcher.stop_reading()
    assert rank.holds(trainer.models[version])


def test_boxes_and_places_are_those_that_torch_finds() -> None:
    """Any view: its places in the tensor, one by one, against as_strided itself."""
    prepare_process(1)
    from vllm_rlplugin.weights.checkpoint_mapping import Slice
    from vllm_rlplugin.weights.element_places import _spot, locate_inside, merge_dims, sort_nested

    shape = (6, 8, 4)
    whole = torch.arange(6 * 8 * 4).reshape(shape)
    views = [
        whole, whole[2:5], whole[:, 3:5], whole[..., 1:3], whole.view(-1), whole.view(48, 4)[8:16], whole[1:3, 2:4, 1:2],
        whole.view(-1)[32:96], whole.view(2, 3, 32)[1], whole.permute(2, 0, 1), whole[3, 2], whole[3, 2, 1],
    ]  # fmt: skip
    for view in views:
        item = Slice("t", view.storage_offset(), tuple(view.shape), view.stride(), "p", torch.empty(view.shape))
        spot = _spot(item, shape)
        assert spot is not None
        item.target.copy_(view)
        box = tuple(slice(*bounds) for bounds in spot.box)
        assert torch.equal(spot.view, whole[box].to(spot.view.dtype))
        positions = np.arange(whole.numel())
        chosen, index = locate_inside(positions, item.offset, spot.dims)
        memory = item.target.as_strided((item.target.numel(),), (1,))
        assert np.array_equal(memory[torch.from_numpy(index)].numpy(), positions[chosen])
        assert len(index) == view.numel()
    for view in (whole.view(-1)[3:40], whole[::2], whole.view(-1)[:64:2], whole[0, 0].expand(3, 4)):
        item = Slice("t", view.storage_offset(), tuple(view.shape), view.stride(), "p", torch.empty(view.shape))
        spot = _spot(item, shape)
        assert spot is None
    assert sort_nested(merge_dims((3, 4), (1, 2), (4, 1)), 1) is None  # overlapping
