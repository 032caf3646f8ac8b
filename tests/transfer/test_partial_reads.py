"""Reading parts of buckets: only where it saves something, and never less verified."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

from orchestrator.transfer import CorruptWeightsError, RelayError, Subscriber
from orchestrator.transfer import subscriber as subscribers
from orchestrator.transfer.shard_routing import Region
from tests.support import transfer_twins as twins
from tests.support.relay_twin import RelayTwin


def test_few_shards_of_a_bucket_are_read_alone_and_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subscribers, "RANGES_SAVE", 1000)
    rig = twins.Rig(bucket_bytes=1 << 20)
    rig.publish(0, twins.weights(0))
    reads: list[int] = []

    class Counting(RelayTwin):
        def get_ranges(self, key: str, ranges: Any, buffer: memoryview) -> int:
            reads.append(sum(length for _, length, _ in ranges))
            return super().get_ranges(key, ranges, buffer)

    relay = Counting()
    relay._shared = rig.relay._shared
    subscriber = Subscriber(rig.endpoint, relay, rig.metadata)
    region = Region("norm", ((2, 6),))
    [(found, data)] = subscriber.fetch_regions(subscriber.manifest(0), [region])
    assert found == region
    assert np.array_equal(data.view(np.uint16), twins.weights(0)["norm"][2:6])
    assert reads == [32]
    place = rig.relay._shared.data["rlc/job/1/0/full/0"].index(twins.weights(0)["norm"][:16].tobytes())
    value = bytearray(rig.relay._shared.data["rlc/job/1/0/full/0"])
    value[place + 5] ^= 1
    rig.relay.tamper("rlc/job/1/0/full/0", bytes(value))
    with pytest.raises(CorruptWeightsError) as caught:
        list(subscriber.fetch_regions(subscriber.manifest(0), [region]))
    assert caught.value.reason == "digest"
    rig.relay.tamper("rlc/job/1/0/full/0", bytes(value[:-1]))
    with pytest.raises(CorruptWeightsError) as caught:
        list(subscriber.fetch_regions(subscriber.manifest(0), [region]))
    assert caught.value.reason == "truncated"


def test_a_region_that_was_not_published_is_refused_before_anything_is_fetched() -> None:
    rig = twins.Rig()
    rig.publish(0, twins.weights(0))
    subscriber = rig.subscriber()
    manifest = subscriber.manifest(0)
    rig.relay._shared.data.clear()
    with pytest.raises(CorruptWeightsError, match="tensor x is wanted"):
        list(subscriber.fetch_regions(manifest, [Region("norm", ((0, 32),)), Region("x", ((0, 8),))]))


@pytest.mark.parametrize("limit", [1, 5000, 1 << 30])
def test_whole_buckets_are_asked_for_together_up_to_a_limit(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subscribers, "PULL_BYTES", limit)
    rig = twins.Rig(bucket_bytes=1024)
    rig.publish(0, twins.weights(0))
    calls: list[list[int]] = []

    class Counting(RelayTwin):
        def get_many(self, wanted: Any) -> list[int]:
            calls.append([buffer.nbytes for _, buffer in wanted])
            read = super().get_many(wanted)
            return [read[0] - 1, *read[1:]] if short else read

    short = False
    relay = Counting()
    relay._shared = rig.relay._shared
    subscriber = Subscriber(rig.endpoint, relay, rig.metadata)
    manifest = subscriber.manifest(0)
    assert len(manifest.buckets) > 3
    regions = [Region(name, tuple((0, size) for size in value.shape)) for name, value in twins.weights(0).items()]
    found = {region.tensor: data.tobytes() for region, data in subscriber.fetch_regions(manifest, regions)}
    assert found == {name: value.tobytes() for name, value in twins.weights(0).items()}
    assert all(sum(sizes) <= limit for sizes in calls)
    if limit == 1:
        assert calls == []  # each alone
    elif limit == 5000:
        assert len(calls) > 1
    else:
        assert calls == [list(manifest.buckets)]
    short = True
    if calls:
        with pytest.raises(CorruptWeightsError) as caught:
            list(subscriber.fetch_regions(manifest, regions))
        assert caught.value.reason == "truncated"


def test_a_call_that_is_too_long_for_the_store_is_made_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Mooncake Store protects what is being read for seconds only: 1 GiB over 1 Gbit/s takes more. Where the link has become
    fast again, buckets are asked for together again."""
    monkeypatch.setattr(subscribers, "PULL_SECONDS", 0.01)
    rig = twins.Rig(bucket_bytes=1024)
    rig.publish(0, twins.weights(0))
    calls: list[int] = []
    rate = 200_000.0  # bytes a second

    class Slow(RelayTwin):
        def get_into(self, key: str, buffer: memoryview) -> int:
            time.sleep(buffer.nbytes / rate)
            return super().get_into(key, buffer)

        def get_many(self, wanted: Any) -> list[int]:
            calls.append(sum(buffer.nbytes for _, buffer in wanted))
            if calls[-1] > rate / 50:
                raise RelayError("transfer", "the lease ran out during the transfer")
            return super().get_many(wanted)

    relay = Slow()
    relay._shared = rig.relay._shared
    subscriber = Subscriber(rig.endpoint, relay, rig.metadata)
    regions = [Region(name, tuple((0, size) for size in value.shape)) for name, value in twins.weights(0).items()]

    def read() -> None:
        found = {
            region.tensor: data.tobytes() for region, data in subscriber.fetch_regions(subscriber.manifest(0), regions)
        }
        assert found == {name: value.tobytes() for name, value in twins.weights(0).items()}

    for _ in range(3):
        read()
    assert len([size for size in calls if size > rate / 50]) == 1
    rate = 1e12
    calls.clear()
    read()
    assert sum(calls) > rig.relay.size("rlc/job/1/0/full/0") * 2
