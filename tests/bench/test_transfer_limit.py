"""What the figure of transfer time stands on: the shaped link, the other encodings, the clock, and overlap with encoding."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from orchestrator.api import ShardKey
from orchestrator.transfer import DeltaCodec, MemoryMetadata, MemoryRelay, Publisher
from orchestrator.transfer.shard_codec import ShardCodec
from orchestrator.transfer.shard_routing import shard_label
from scripts.bench.micro import transfer_limit
from scripts.bench.micro.delta_synthetic import Layout, Pool
from scripts.bench.micro.link import BURST_BYTES, Link, LinkedMetadata, LinkedRelay
from scripts.bench.micro.peer_codecs import Coo, Zstd
from tests.support import transfer_twins as twins


class Time:
    """Moves only when somebody sleeps."""

    def __init__(self) -> None:
        self.now = 0.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def link(self, bits_per_second: float, round_trip: float = 0.0) -> Link:
        return Link(bits_per_second, round_trip, clock=lambda: self.now, sleep=self.sleep)


def test_bytes_cross_a_link_at_its_rate_and_calls_wait_for_one_another() -> None:
    time = Time()
    relay = LinkedRelay(MemoryRelay(), time.link(8e6))  # a megabyte a second
    relay.put("a", memoryview(bytes(1_000_000)))
    assert time.now == pytest.approx(1.0 - BURST_BYTES / 1e6)
    relay.put("b", memoryview(bytes(500_000)))
    assert time.now == pytest.approx(1.5 - BURST_BYTES / 1e6)
    target = bytearray(1_000_000)
    assert relay.get_into("a", memoryview(target)) == 1_000_000
    assert relay.get_ranges("a", [(0, 250_000, 0), (500_000, 250_000, 250_000)], memoryview(target)) == 500_000
    assert time.now == pytest.approx(3.0 - BURST_BYTES / 1e6)
    time.sleep(100)  # what was not used is lost but for the burst
    relay.put("c", memoryview(bytes(1_000_000)))
    assert time.now == pytest.approx(104.0 - 2 * BURST_BYTES / 1e6)


def test_every_call_of_a_link_costs_a_round_trip_and_is_counted() -> None:
    time = Time()
    link = time.link(8e12, round_trip=0.5)
    relay, metadata = LinkedRelay(MemoryRelay(), link), LinkedMetadata(MemoryMetadata(), link)
    relay.put("a", memoryview(b"1234"))
    assert relay.size("a") == 4
    assert metadata.get("k") is None
    assert metadata.compare_and_set("k", b"v", 0)
    assert relay.remove("a")
    assert time.now == pytest.approx(2.5)
    assert link.calls == {"put": 1, "size": 1, "get": 1, "compare_and_set": 1, "remove": 1}
    assert link.bytes == 4
    link.restart(1.0)
    assert (link.bytes, dict(link.calls)) == (0, {})


@pytest.mark.parametrize(
    ("codec", "encoding"), [(Coo(), "coo"), (Zstd(xor=True), "zstd-xor"), (Zstd(xor=False), "zstd-dense")]
)
def test_the_other_encodings_are_exact_too_and_can_be_taken_back(codec: ShardCodec, encoding: str) -> None:
    pool = Pool(0.02, 1 << 16)
    old, new = pool.old.view("u1"), pool.new.view("u1")
    name, data = codec.encode(old, new, "bfloat16")
    assert name == encoding
    base = old.copy()
    undo = codec.apply(name, data, base)
    assert np.array_equal(base, new)
    undo()
    assert np.array_equal(base, old)
    assert codec.encode(None, new, "bfloat16")[0] == ("zstd-dense" if encoding == "zstd-dense" else "raw")
    if encoding == "coo":
        assert data.nbytes == 6 * np.count_nonzero(pool.old != pool.new)


def test_the_figure_counts_what_crosses_and_moves_the_weights_there_and_back() -> None:
    layout = Layout("tiny", 256, 512, 2, 2, 1, vocab=4_000)
    share = transfer_limit.Share(layout, 0.02, 2, 1)
    items = share.items(Pool(0.02, 1 << 18))
    assert share.measured(items) == pytest.approx(1.0, rel=0.001)
    job = transfer_limit.Job(MemoryRelay(), "tiny", items)
    job.link.round_trip = 0.0
    sizes = {}
    for method in ("ours", "coo", "zstd-xor", "zstd-dense", "raw"):
        row = job.move(method, 1000.0)
        held = b"".join(job.resident._shards[label].tobytes() for label in sorted(job.resident._shards))
        wanted = sorted((shard_label(key), new if job.version % 2 else old) for key, old, new in items)
        assert held == b"".join(data.tobytes() for _, data in wanted)
        sizes[method] = row["wire_bytes"]
        assert row["seconds"] >= row["wire_seconds"] > 0
        if method in ("ours", "coo", "zstd-xor"):
            assert row["calls"]["put"] == 2  # one bucket, one manifest
        assert row["messages"] == sum(row["calls"].values())
    manifest = sizes["raw"] - sum(old.nbytes for _, old, _ in items)
    changed = sum(int(np.count_nonzero(old.view("<u2") != new.view("<u2"))) for _, old, new in items)
    assert 0 < manifest < 200 * len(items) + 1000
    assert sizes["ours"] < sizes["zstd-xor"] < sizes["coo"] < sizes["zstd-dense"] < sizes["raw"]
    assert abs(sizes["coo"] - 6 * changed - manifest) < 100 * len(items)


class Watched(MemoryRelay):
    """Says when the first bucket has come."""

    def __init__(self) -> None:
        super().__init__()
        self.came = threading.Event()

    def put(self, key: str, data: memoryview) -> None:
        super().put(key, data)
        self.came.set()


def test_a_difference_leaves_while_its_later_shards_are_still_encoded() -> None:
    relay = Watched()
    publisher = Publisher(replace(twins.ENDPOINT, bucket_bytes=64 << 20), relay, MemoryMetadata(), codec=DeltaCodec())
    pool = Pool(0.3, 1 << 20)  # a third of a megabyte as a difference: 20 of them are far less than a bucket
    old, new = pool.old.view("u1"), pool.new.view("u1")
    keys = [ShardKey(f"w{number}", -1, 0, 0, (1 << 20,), "bfloat16", "raw", 0) for number in range(20)]
    publisher.publish_shards(0, ((key, old, None) for key in keys))
    relay.came.clear()

    def stream() -> Iterator[Any]:
        for number, key in enumerate(keys):
            if number == len(keys) - 1:
                assert relay.came.wait(20), "nothing left before the last shard was asked for"
            yield key, new, old

    found = publisher.publish_shards(1, stream(), 0)
    assert 2 <= found.buckets <= 5
    assert found.bytes < 64 << 20


def calls(tensors: int) -> dict[str, int]:
    """What crosses the link, both ways, for a difference of 2^18 weights in so many tensors; COO, which has no headers."""
    pool = Pool(0.05, 1 << 18)
    size = pool.old.size // tensors
    cuts = [slice(start, start + size) for start in range(0, size * tensors, size)]
    items = [
        (ShardKey(f"w{number}", -1, 0, 0, (size,), "bfloat16", "raw", 0), pool.old[cut].view("u1"), pool.new[cut].view("u1"))
        for number, cut in enumerate(cuts)
    ]  # fmt: skip
    job = transfer_limit.Job(MemoryRelay(), f"calls-{tensors}", items)
    job.link.round_trip = 0.0
    return dict(job.move("coo", 1000.0)["calls"])


def test_a_difference_of_ten_thousand_tensors_costs_no_more_messages_than_one_of_a_hundred() -> None:
    assert calls(10_000) == calls(100) == {"put": 2, "size": 2, "get": 2}
