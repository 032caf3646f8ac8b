"""Whole or as a difference: after both were measured the better one is taken, and found again when links or densities change."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.transfer import (
    CorruptWeightsError,
    DeltaCodec,
    HostedWeights,
    MemoryMetadata,
    Publisher,
    RelayEndpoint,
    SnapshotPolicy,
    Subscriber,
)
from orchestrator.transfer.encoding_choice import AGAIN, EncodingChoice, TransferTime
from orchestrator.transfer.fetch_times import FetchTime, decode_fetches, fetches_key, report_fetch, slowest_fetch
from orchestrator.transfer.job_head import FULL
from tests.support.relay_twin import RelayTwin
from tests.support.transfer_twins import Weights, cut, shards, whole

RAW = 1 << 30


def seconds(kind_is_whole: bool, link: float, density: float, encode: float = 4e9, decode: float = 5e9) -> float:
    """Of a version of ``RAW`` bytes over ``link`` bytes per second; a whole one is neither searched nor put together."""
    if kind_is_whole:
        return RAW / link + RAW / 10e9
    return RAW / encode + 0.6 * density * RAW / link + RAW / decode


def play(choice: EncodingChoice, versions: int, link: float, density: float, noise: float = 0.0) -> list[float]:
    """What each version took over the better of the two."""
    generator, found = np.random.default_rng(1), []
    for _ in range(versions):
        kind = choice.choose_whole()
        took = seconds(kind, link, density) * (1 + noise * generator.random())
        choice.note(TransferTime(kind, took, RAW))
        found.append(seconds(kind, link, density) / min(seconds(kind, link, density) for kind in (True, False)))
    return found


@settings(max_examples=200)
@given(st.floats(1e7, 1e11), st.floats(1e-4, 1.0))
def test_after_one_of_each_it_is_the_better_one(link: float, density: float) -> None:
    ratios = play(EncodingChoice(), AGAIN - 2, link, density, noise=0.05)
    assert all(ratio <= 1.1 for ratio in ratios[2:])


@pytest.mark.parametrize(("before", "after"), [((1.25e9, 0.01), (1e10, 1.0)), ((2.5e10, 0.3), (1.25e7, 0.01))])
def test_another_link_or_density_is_noticed(before: tuple[float, float], after: tuple[float, float]) -> None:
    choice = EncodingChoice()
    assert play(choice, 10, *before)[-1] == 1
    late = play(choice, 3 * AGAIN, *after)
    assert late[-1] == 1 or late[-2] == 1
    assert sum(ratio > 1.1 for ratio in late[-AGAIN:]) <= 1


def test_the_other_one_is_measured_again_now_and_then_and_the_more_rarely_the_slower_it_is() -> None:
    ratios = play(EncodingChoice(), 40 * AGAIN, 1.25e8, 0.01)
    assert 1 <= sum(ratio > 1.1 for ratio in ratios[2:]) <= 40 * AGAIN / AGAIN
    assert sum(ratios) / len(ratios) < 1 + 2 / AGAIN


class Link:
    """A clock that the relay's bytes and the codec move: what a version takes is exact."""

    def __init__(self, rate: float, codec: float) -> None:
        self.now, self.rate, self.codec = 0.0, rate, codec


class Timed(RelayTwin):
    link: Link

    def put(self, key: str, data: memoryview) -> None:
        super().put(key, data)
        self.link.now += data.nbytes / self.link.rate


@pytest.mark.parametrize(("rate", "codec", "expected"), [(1e5, 1e9, False), (1e12, 1e3, True)])
def test_a_publisher_takes_what_its_readers_and_itself_were_faster_with(
    rate: float, codec: float, expected: bool
) -> None:
    link, metadata, relay = Link(rate, codec), MemoryMetadata(), Timed()
    relay.link = link

    class Slow(DeltaCodec):
        def encode(self, old, new, dtype):  # type: ignore[no-untyped-def]
            link.now += 0 if old is None else new.nbytes / link.codec
            return super().encode(old, new, dtype)

    endpoint = RelayEndpoint("job", "memory", "unused", bucket_bytes=4096, snapshot_every=99, encoding="auto")
    publisher = Publisher(endpoint, relay, metadata, lambda: link.now, codec=Slow())
    publisher.rollback(0)
    reader = Subscriber(endpoint, relay.handle(), metadata, codec=DeltaCodec())
    holder, choice, kinds = HostedWeights(reader, None, DeltaCodec()), EncodingChoice(), list[bool]()
    model: Weights = {"w": np.random.default_rng(0).integers(0, 1 << 16, (64, 64), np.uint16)}
    for version in range(8):
        old = model
        model = {"w": old["w"].copy()}
        model["w"].flat[version * 3] += 1
        plan = publisher.plan_next(SnapshotPolicy(99), choice)
        kinds.append(plan.base == FULL)
        publisher.publish_shards(version, shards(cut(model, 1)[0], model, old), plan.base)
        holder.advance(version)
        reader.report_fetch(version, plan.base == FULL, 0.01)
        assert whole(model)["w"] == holder.region(_all("w", (64, 64))).tobytes()
    assert kinds[:2] == [True, False]
    assert kinds[3:] == [expected] * 5
    publisher.close()


def _all(name: str, shape: tuple[int, ...]):  # type: ignore[no-untyped-def]
    from orchestrator.transfer.shard_routing import Region, whole_box

    return Region(name, whole_box(shape))


def test_the_slowest_reader_of_the_newest_version_counts_and_those_that_are_gone_are_forgotten() -> None:
    metadata = MemoryMetadata()
    took = FetchTime(1, 4, True, 2_000_000)
    report_fetch(metadata, "job", "a", replace(took, version=1))
    report_fetch(metadata, "job", "b", took)
    report_fetch(metadata, "job", "c", replace(took, microseconds=3_000_000))
    report_fetch(metadata, "job", "d", replace(took, whole=False, microseconds=9_000_000))
    assert slowest_fetch(metadata, "job", 1, 4, True) == 3.0
    assert slowest_fetch(metadata, "job", 1, 5, True) is None
    assert slowest_fetch(metadata, "job", 2, 4, True) is None
    stored = metadata.get(fetches_key("job"))
    assert stored is not None
    assert set(decode_fetches(stored[0])) == {"b", "c", "d"}
    for damaged in (b"", b"\xc1", stored[0][:-1], stored[0].replace(b"fetches", b"fetchez")):
        with pytest.raises(CorruptWeightsError):
            decode_fetches(damaged)
