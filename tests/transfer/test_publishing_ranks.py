"""Many ranks publish one version: all of it or nothing, at a control cost that does not grow with the tensors."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from orchestrator.api import RunError, ShardKey
from orchestrator.transfer import (
    CorruptWeightsError,
    MemoryMetadata,
    Publisher,
    RelayEndpoint,
    RelayError,
    Subscriber,
    VersionTakenError,
    shard_routing,
    shard_writer,
)
from orchestrator.transfer import job_head as heads
from orchestrator.transfer import manifest as manifests
from orchestrator.transfer.shard_routing import Region
from tests.support import transfer_twins as twins
from tests.support.relay_twin import RelayTwin


def counting(counts: dict[str, int]) -> tuple[RelayTwin, MemoryMetadata]:
    """Twins that count every call."""
    lock = threading.Lock()

    def counted(kind: type, names: tuple[str, ...]) -> Any:
        def wrap(name: str) -> Any:
            def call(self: Any, *arguments: Any) -> Any:
                with lock:
                    counts[name] = counts.get(name, 0) + 1
                return getattr(kind, name)(self, *arguments)

            return call

        return type(f"Counting{kind.__name__}", (kind,), {name: wrap(name) for name in names})()

    relay = counted(RelayTwin, ("put", "size", "get_into", "get_ranges", "remove"))
    return relay, counted(MemoryMetadata, ("get", "compare_and_set"))


# --- what is published


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_what_ranks_publish_together_is_read_as_one_version(ranks: int) -> None:
    rig = twins.Rig(ranks, bucket_bytes=1024)
    model = twins.weights(1)
    results = rig.publish(4, model)
    assert len({(item.version, item.bytes, item.buckets) for item in results}) == 1
    assert results[0].bytes == sum(values.nbytes for values in model.values())
    manifest = rig.subscriber().manifest(4)
    assert sum(size > 0 for size in manifest.buckets) == results[0].buckets
    assert sorted(manifest.shards, key=shard_routing.shard_label) == sorted(
        (replace(key, bucket=shard.bucket) for keys in twins.cut(model, ranks) for key in keys for shard in
         manifest.shards if shard_routing.shard_label(shard) == shard_routing.shard_label(key)), key=shard_routing.shard_label
    )  # fmt: skip
    got = dict(
        rig.subscriber().fetch_regions(
            manifest, [Region(n, shard_routing.whole_box(v.shape)) for n, v in model.items()]
        )
    )
    assert {region.tensor: data.tobytes() for region, data in got.items()} == twins.whole(model)


def test_no_rank_writes_a_bucket_of_another() -> None:
    rig = twins.Rig(3, bucket_bytes=1024, parts=6)
    rig.publish(0, twins.weights(0))
    dealt = twins.cut(twins.weights(0), 3, 6)
    for key in rig.subscriber().manifest(0).shards:
        assert replace(key, bucket=0) in dealt[key.bucket % 3]


def test_a_rank_without_shards_takes_part() -> None:
    rig = twins.Rig(2)
    model = twins.weights(0)
    keys = [key for keys in twins.cut(model, 1) for key in keys]
    answers = rig.together(lambda one, rank: one.publish_shards(0, twins.shards([] if rank else keys, model)))
    assert not [answer for answer in answers if isinstance(answer, BaseException)], answers
    resident = rig.resident()
    resident.advance(0)
    assert twins.read(resident, model) == twins.whole(model)


# --- all or nothing


def wrong_cuts(model: Any) -> dict[str, tuple[Any, str]]:
    """name -> (what it does to the shards of rank 1, what the error says)."""

    def twice(keys: list[ShardKey]) -> list[ShardKey]:
        return [*keys, twins.cut(model, 2)[0][0]]

    def forged(keys: list[ShardKey]) -> list[ShardKey]:
        return [replace(keys[0], start=keys[0].start - 1), *keys[1:]]

    return {
        "missing": (lambda keys: keys[1:], "embed: 32:64 of dimension 0 is missing"),
        "twice": (twice, "embed: 0:32 of dimension 0 comes twice"),
        "forged": (forged, "embed: 31:32 of dimension 0 comes twice"),
    }


@pytest.mark.parametrize("wrong", ["missing", "twice", "forged"])
def test_shards_that_do_not_cover_a_tensor_once_are_refused_by_name_on_every_rank(wrong: str) -> None:
    rig, model = twins.Rig(2), twins.weights(0)
    change, problem = wrong_cuts(model)[wrong]
    dealt = twins.cut(model, 2)
    dealt[1] = change(dealt[1])
    answers = rig.together(lambda one, rank: one.publish_shards(0, twins.shards(dealt[rank], model)))
    assert all(isinstance(answer, CorruptWeightsError) and problem in str(answer) for answer in answers), answers
    assert rig.subscriber().latest_version() == -1
    rig.publish(0, model)  # and it goes on


class Breaking(RelayTwin):
    """Fails at a put, or dies there as a killed process does."""

    def __init__(self, shared: RelayTwin, error: BaseException) -> None:
        super().__init__()
        self._shared = shared._shared
        self.error: BaseException | None = error
        self.left = 1

    def put(self, key: str, data: memoryview) -> None:
        self.left -= 1
        if self.left < 0 and self.error is not None:
            raise self.error
        super().put(key, data)


@pytest.mark.parametrize("broken", [0, 1])
def test_an_error_of_one_rank_is_raised_on_all_and_the_old_version_stays(broken: int) -> None:
    rig = twins.Rig(2, bucket_bytes=1024)
    old, new = twins.weights(1), twins.weights(2)
    rig.publish(1, old)
    objects = len(rig.relay.keys())
    good = rig.publishers[broken]._relay
    rig.publishers[broken]._relay = Breaking(rig.relay, RelayError("relay_full", "injected"))
    dealt = twins.cut(new, 2)
    answers = rig.together(lambda one, rank: one.publish_shards(2, twins.shards(dealt[rank], new)))
    assert [(type(answer), answer.reason) for answer in answers] == [(RelayError, "relay_full")] * 2
    resident = rig.resident()
    assert rig.subscriber().latest_version() == 1
    resident.advance(1)
    assert twins.read(resident, old) == twins.whole(old)
    rig.publishers[broken]._relay = good
    rig.publish(2, new)
    resident.advance(2)
    assert twins.read(resident, new) == twins.whole(new)
    assert rig.publishers[0].collect_garbage() == 0
    assert len(rig.relay.keys()) == 2 * objects  # nothing of the failed attempt stays


@pytest.mark.parametrize("dead", [0, 1])
def test_what_a_dead_rank_leaves_is_collected_by_the_next_run(dead: int) -> None:
    rig = twins.Rig(2, bucket_bytes=1024)
    rig.publish(1, twins.weights(1))
    objects = len(rig.relay.keys())
    new = twins.weights(2)
    dealt = twins.cut(new, 2)
    pushed, put = threading.Event(), rig.relay.put

    def noticed(key: str, data: memoryview) -> None:
        put(key, data)
        pushed.set()

    rig.relay.put = noticed  # type: ignore[method-assign]

    def dies(one: Publisher, rank: int) -> Any:
        def stream() -> Any:
            for number, shard in enumerate(twins.shards(dealt[rank], new)):
                if rank == dead and number == 3:
                    # Not before a bucket is on the relay: the other rank stops as soon as it hears of the death.
                    assert pushed.wait(60)
                    one._ranks.meeting.leave()  # type: ignore[attr-defined]
                    raise SystemExit
                yield shard

        return one.publish_shards(2, stream())

    answers = rig.together(dies)
    assert all(isinstance(answer, BaseException) for answer in answers)
    assert len(rig.relay.keys()) > objects
    assert rig.subscriber().latest_version() == 1
    rig.publishers = rig.open(2)
    rig.together(lambda one, _: one.rollback(1))
    rig.publish(1, twins.weights(1))
    assert rig.publishers[0].collect_garbage() == 0
    assert len(rig.relay.keys()) == objects


def test_two_trainers_that_publish_the_same_version_the_second_is_refused_on_all_its_ranks() -> None:
    rig = twins.Rig(2)
    first, second = rig.publishers, rig.open(2)
    for one in second:
        assert one.epoch == first[0].epoch
    rig.publish(3, twins.weights(3))
    rig.publishers = second
    other = twins.weights(4)
    dealt = twins.cut(other, 2)
    answers = rig.together(lambda one, rank: one.publish_shards(3, twins.shards(dealt[rank], other)))
    assert [(type(answer), answer.reason) for answer in answers] == [(VersionTakenError, "version_taken")] * 2
    resident = rig.resident()
    resident.advance(3)
    assert twins.read(resident, other) == twins.whole(twins.weights(3))


def test_a_share_that_is_not_one_is_refused() -> None:
    share = manifests.RankShare(
        {1: 200}, [ShardKey("w", -1, 0, 0, (4,), "uint8", "raw", 1)], [manifests.StoredShard(0, 4, 5, 5)]
    )
    good = manifests.encode_share(share)
    empty = manifests.encode_share(manifests.RankShare())
    assert manifests.merge_shares([empty, good]).buckets == {1: 200}
    for wrong in ([good, empty], [empty, good, good], [empty, good[:-1]], [empty, b"\x01"], [empty, b""]):
        with pytest.raises(CorruptWeightsError) as caught:
            manifests.merge_shares(wrong)
        assert caught.value.reason == "manifest"
    with pytest.raises(CorruptWeightsError, match="w: comes 2 times"):
        manifests.merge_shares([manifests.encode_share(replace_bucket(share, 0)), good])


def replace_bucket(share: manifests.RankShare, bucket: int) -> manifests.RankShare:
    return manifests.RankShare({bucket: 200}, [replace(share.shards[0], bucket=bucket)], share.pieces)


# --- control cost


def cost(tensors: int, ranks: int, sizes: int) -> tuple[dict[str, int], dict[str, int], int]:
    """Calls of a publication and of a pull of the same bytes in so many tensors, and the rounds of the ranks."""
    rig = twins.Rig(ranks)
    rig.endpoint = RelayEndpoint(job="job", kind="memory", master="unused", bucket_bytes=4 << 20)
    counts: dict[str, int] = {}
    rig.relay, rig.metadata = counting(counts)
    rig.publishers = rig.open(ranks)
    rig.together(lambda one, _: one.rollback(0))
    rounds = rig.publishers[0]._ranks.meeting.rounds if ranks > 1 else 0  # type: ignore[attr-defined]
    counts.clear()
    values = np.zeros(sizes // tensors, dtype=np.uint8)
    stream = [
        (ShardKey(f"t{number}", -1, 0, 0, values.shape, "uint8", "raw", 0), values, None) for number in range(tensors)
    ]
    answers = rig.together(lambda one, rank: one.publish_shards(0, stream[rank::ranks]))
    assert not [answer for answer in answers if isinstance(answer, BaseException)], answers
    published = dict(counts)
    subscriber = Subscriber(rig.endpoint, rig.relay, rig.metadata)
    counts.clear()
    manifest = subscriber.manifest(0)
    assert sum(1 for _ in subscriber.fetch_regions(manifest, [Region(key.tensor, ((0, len(values)),)) for key, _, _
                                                              in stream])) == tensors  # fmt: skip
    subscriber.hold(0)
    rounds = (rig.publishers[0]._ranks.meeting.rounds - rounds) if ranks > 1 else 0  # type: ignore[attr-defined]
    return published, dict(counts), rounds


@pytest.mark.parametrize("ranks", [1, 4])
def test_ten_thousand_tensors_cost_no_more_control_messages_than_a_hundred(ranks: int) -> None:
    few, many = cost(100, ranks, 2_000_000), cost(10_000, ranks, 2_000_000)
    assert few == many
    published, pulled, rounds = many
    assert published["compare_and_set"] == 2  # begin, commit
    assert published["put"] == ranks + 1  # a bucket each, the manifest
    assert rounds == (3 if ranks > 1 else 0)  # attempt, shares, outcome
    assert pulled["compare_and_set"] == 1
    assert pulled["get"] == 3  # where the version is; the epoch and the record of the lease
    assert pulled["get_into"] == ranks + 1


def test_control_messages_grow_with_the_ranks_at_most() -> None:
    two, eight = cost(100, 2, 1_000_000)[0], cost(100, 8, 1_000_000)[0]
    for name in two:
        assert eight[name] - two[name] <= 2 * 6, name


# --- pushing


class Slow(RelayTwin):
    """Every put waits until it is let through."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Semaphore(0)
        self.waiting = threading.Event()

    def put(self, key: str, data: memoryview) -> None:
        self.waiting.set()
        assert self.gate.acquire(timeout=20)
        super().put(key, data)


def test_buckets_are_pushed_while_later_ones_are_filled_and_only_so_many_wait() -> None:
    relay = Slow()
    publisher = Publisher(replace(twins.ENDPOINT, bucket_bytes=1024), relay, MemoryMetadata())
    filled: list[int] = []
    limit = 2 + shard_writer.WAITING  # one in flight, those that wait, and the one that was just filled

    def stream() -> Any:
        for number in range(12):
            if number == 3:
                assert relay.waiting.wait(20)  # the first bucket is on its way, and the iteration goes on
                assert relay.keys() == []
            if number > limit + 1:
                relay.gate.release(100)
            filled.append(number)
            yield f"t{number}", (600,), "uint8", np.full(600, number, np.uint8)

    opener = threading.Timer(0.3, lambda: relay.gate.release(100))
    opener.start()
    publisher.publish(0, stream())
    opener.join()
    assert len(filled) == 12
    assert publisher._pool.bytes <= (limit + 1) << 16


def test_a_failed_push_ends_the_stream_early_and_is_raised() -> None:
    relay = Breaking(RelayTwin(), RelayError("transfer", "injected"))
    publisher = Publisher(replace(twins.ENDPOINT, bucket_bytes=1024), relay, MemoryMetadata())
    taken: list[int] = []

    def stream() -> Any:
        for number in range(10_000):
            taken.append(number)
            yield f"t{number}", (600,), "uint8", np.zeros(600, np.uint8)

    with pytest.raises(RelayError, match="injected"):
        publisher.publish(0, stream())
    assert len(taken) < 20
    assert threading.active_count() < 20
    assert not [thread for thread in threading.enumerate() if thread.name == "rl-coserve-push"]


def test_a_rank_records_more_buckets_before_it_writes_them() -> None:
    rig, model = twins.Rig(2, bucket_bytes=1024), twins.weights(0, {f"t{n}": (600,) for n in range(400)})
    rig.publish(0, model)
    attempt = rig.head().published[0].attempt
    assert attempt.buckets > 2 * heads.RESERVE_BUCKETS
    resident = rig.resident()
    resident.advance(0)
    assert twins.read(resident, model) == twins.whole(model)
    rig.together(lambda one, _: one.rollback(1))
    rig.publish(1, twins.weights(1))
    assert rig.publishers[0].collect_garbage() == 0
    assert {version for version, _ in rig.versions()} == {1}


def test_wrong_arrays_are_refused_by_name() -> None:
    rig, key = twins.Rig(), ShardKey("w", 0, 0, 4, (8, 2), "bfloat16", "raw", 0)
    for data, problem in ((np.zeros(15, np.uint8), "15 B are not"), (np.zeros(8, np.uint16), "uint8")):
        with pytest.raises(RunError, match=problem):
            rig.publishers[0].publish_shards(0, [(key, data, None)])
    with pytest.raises(RunError, match="has no dimension 2"):
        rig.publishers[0].publish_shards(0, [(replace(key, dim=2), np.zeros(16, np.uint8), None)])
