"""Publishing and fetching: what is read is what one publisher published under that version, or an error."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from orchestrator.api import ConfigError, MetadataStore, Relay, RetryableError, RunError
from orchestrator.transfer import (
    CorruptWeightsError,
    MemoryMetadata,
    MemoryRelay,
    Publisher,
    RelayEndpoint,
    RelayError,
    Subscriber,
    VersionTakenError,
    open_relay,
    site_relay,
)
from orchestrator.transfer import job_head as heads
from orchestrator.transfer import registered_buffers as buffers_module
from orchestrator.transfer.job_head import update_head
from orchestrator.transfer.retention import VersionHolder
from orchestrator.transfer.version_leases import read_leases, renew_lease
from tests.support.relay_twin import RelayTwin

ENDPOINT = RelayEndpoint(job="job", kind="memory", master="unused", bucket_bytes=4096)
OBJECTS = 5  # buckets and manifest of one version of `weights`
Weights = dict[str, tuple[tuple[int, ...], str, np.ndarray]]


def weights(seed: int, sizes: tuple[int, ...] = (10, 1000, 300, 0, 900, 6000, 1, 64)) -> Weights:
    """Tensors of float32, bfloat16 and an unknown dtype, made from a seed."""
    generator = np.random.default_rng(seed)
    made: Weights = {}
    for index, size in enumerate(sizes):
        dtype, width = (("float32", 4), ("bfloat16", 2), ("float6_e3m2", 3))[index % 3]
        data = generator.integers(0, 256, size * width, dtype=np.uint8)
        made[f"layers.{index}.weight"] = ((size, 1), dtype, data)
    return made


def stream(made: Weights) -> Iterator[tuple[str, tuple[int, ...], str, np.ndarray]]:
    for name, (shape, dtype, data) in made.items():
        yield name, shape, dtype, data


class Rig:
    """One relay, one metadata store, and handles on them."""

    def __init__(self, endpoint: RelayEndpoint = ENDPOINT, capacity: int | None = None) -> None:
        self.endpoint = endpoint
        self.relay = RelayTwin(capacity)
        self.metadata = MemoryMetadata()

    def publisher(self, relay: Relay | None = None, metadata: MetadataStore | None = None) -> Publisher:
        return Publisher(self.endpoint, relay or self.relay, metadata or self.metadata)

    def subscriber(self) -> Subscriber:
        return Subscriber(self.endpoint, self.relay.handle(), self.metadata)

    def head(self) -> heads.JobHead:
        return update_head(self.metadata, self.endpoint.job, lambda head: head)

    def read(self, version: int) -> Weights:
        subscriber = self.subscriber()
        got = list(subscriber.fetch(subscriber.manifest(version)))
        return {key.tensor: (key.global_shape, key.dtype, data) for key, data in got}


def same(left: Weights, right: Weights) -> bool:
    return list(left) == list(right) and all(
        left[name][:2] == right[name][:2] and np.array_equal(left[name][2], right[name][2]) for name in left
    )


class Failing(RelayTwin):
    """Fails at the put of the given number, counting from 0."""

    def __init__(self, shared: RelayTwin, at: int, keep: bool = False) -> None:
        super().__init__()
        self._shared = shared._shared
        self._left = at
        self._keep = keep

    def put(self, key: str, data: memoryview) -> None:
        self._left -= 1
        if self._left < 0:
            if self._keep:
                return  # acknowledges and stores nothing, as Mooncake does for the key of a dead writer
            raise RelayError("transfer", "injected")
        super().put(key, data)


# --- content


def test_what_is_fetched_is_bit_for_bit_what_was_published() -> None:
    rig = Rig()
    assert rig.subscriber().latest_version() == -1
    result = rig.publisher().publish(3, stream(weights(3)))
    assert result.version == 3
    assert result.bytes == sum(data.nbytes for _, _, data in weights(3).values())
    assert result.buckets > 2
    assert rig.subscriber().latest_version() == 3
    assert same(rig.read(3), weights(3))


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(sizes=st.lists(st.integers(0, 5000), min_size=1, max_size=30), bucket=st.integers(1024, 20_000))
def test_any_sizes_in_any_buckets_come_back(sizes: list[int], bucket: int) -> None:
    rig = Rig(replace(ENDPOINT, bucket_bytes=bucket))
    made = weights(1, tuple(sizes))
    rig.publisher().publish(0, stream(made))
    assert same(rig.read(0), made)
    for key in rig.relay.keys():  # noqa: SIM118  not a dictionary
        largest = max(data.nbytes for _, _, data in made.values())
        assert "manifest" in key or rig.relay.size(key) <= max(bucket, largest + 1024)


def test_a_tensor_larger_than_a_bucket_gets_its_own() -> None:
    rig = Rig()
    rig.publisher().publish(0, stream(weights(0, (10, 50_000, 10))))
    subscriber = rig.subscriber()
    assert [key.bucket for key in subscriber.manifest(0).shards] == [0, 1, 2]


def test_arrays_may_be_reused_by_the_caller_once_taken() -> None:
    rig, buffer = Rig(), np.zeros(100, np.uint8)

    def reused() -> Iterator[tuple[str, tuple[int, ...], str, np.ndarray]]:
        for value in range(200):
            buffer[:] = value
            yield f"t{value}", (100,), "uint8", buffer

    rig.publisher().publish(0, reused())
    assert all((data == int(name[1:])).all() for name, (_, _, data) in rig.read(0).items())


def test_fetched_arrays_keep_their_content_while_they_are_held() -> None:
    """Layer-wise loaders hold tensors over several buckets: a reused buffer would change weights silently."""
    rig = Rig()
    rig.publisher().publish(0, stream(weights(0, (500,) * 40)))
    subscriber = rig.subscriber()
    held = [(key.tensor, data[:]) for key, data in subscriber.fetch(subscriber.manifest(0))]
    expected = weights(0, (500,) * 40)
    assert all(np.array_equal(data, expected[name][2]) for name, data in held)
    subscriber.close()
    gc.collect()
    assert all(np.array_equal(data, expected[name][2]) for name, data in held)


def test_a_consumer_that_lets_go_costs_two_buffers() -> None:
    rig = Rig(replace(ENDPOINT, bucket_bytes=1 << 17))
    rig.publisher().publish(0, stream(weights(0, (20_000,) * 40)))
    subscriber = rig.subscriber()
    manifest = subscriber.manifest(0)
    assert len(manifest.buckets) >= 20
    for _, data in subscriber.fetch(manifest):
        assert subscriber._pool.bytes <= (buffers_module.IDLE_BUFFERS + 1) * 2 * (1 << 17)
        del data
    everything = list(subscriber.fetch(manifest))
    assert subscriber._pool.bytes >= manifest.bytes
    del everything
    assert subscriber._pool.bytes <= buffers_module.IDLE_BUFFERS * 2 * (1 << 17)


def test_tensors_are_aligned_for_use_in_place() -> None:
    rig = Rig()
    rig.publisher().publish(0, stream(weights(0, (7, 9, 11, 13))))
    subscriber = rig.subscriber()
    assert all(data.ctypes.data % 64 == 0 for _, data in subscriber.fetch(subscriber.manifest(0)))


@pytest.mark.parametrize(
    ("tensors", "problem"),
    [
        ([], "no tensors"),
        ([("a", (4,), "uint8", np.zeros(4, np.uint8))] * 2, "twice"),
        ([("a", (4,), "uint8", np.zeros(5, np.uint8))], "5 B are not"),
        ([("a", (4,), "bfloat16", np.zeros(4, np.uint8))], "4 B are not"),
        ([("a", (3,), "new_dtype", np.zeros(4, np.uint8))], "4 B are not"),
        ([("a", (-1,), "uint8", np.zeros(4, np.uint8))], "bad shape"),
        ([("a", (1,), "float32", np.zeros(1, np.float32))], "uint8"),
        ([("a", (4,), "uint8", np.zeros(8, np.uint8)[::2])], "contiguous"),
        ([("a", (2, 2), "uint8", np.zeros((2, 2), np.uint8))], "one-dimensional"),
        ([("", (4,), "uint8", np.zeros(4, np.uint8))], "bad name"),
    ],
)
def test_wrong_tensors_are_refused_and_nothing_is_published(tensors: list, problem: str) -> None:
    rig = Rig()
    with pytest.raises(RunError, match=problem):
        rig.publisher().publish(0, tensors)
    assert rig.subscriber().latest_version() == -1


# --- commit


@pytest.mark.parametrize("at", range(OBJECTS))
@pytest.mark.parametrize("keep", [False, True], ids=["fails", "lies"])
def test_a_publication_that_fails_at_any_put_leaves_the_old_version_readable(at: int, keep: bool) -> None:
    rig = Rig()
    rig.publisher().publish(1, stream(weights(1)))
    objects_of_one = rig.relay.keys()
    assert len(objects_of_one) == OBJECTS  # so `at` meets every put, the manifest's included
    publisher = rig.publisher(relay=Failing(rig.relay, at, keep))
    with pytest.raises(RetryableError, match="not_stored" if keep else "injected"):
        publisher.publish(2, stream(weights(2)))
    assert rig.subscriber().latest_version() == 1
    assert same(rig.read(1), weights(1))
    # A retry uses new keys, and what the failure left behind goes away.
    publisher._relay = rig.relay
    publisher.publish(2, stream(weights(2)))
    assert same(rig.read(2), weights(2))
    publisher.collect_garbage()
    assert len(rig.relay.keys()) == 2 * OBJECTS


def test_a_stream_that_breaks_off_leaves_the_old_version_readable() -> None:
    rig = Rig()
    publisher = rig.publisher()
    publisher.publish(1, stream(weights(1)))

    def broken() -> Iterator[tuple[str, tuple[int, ...], str, np.ndarray]]:
        yield from stream(weights(2))
        raise KeyError("out of tensors")

    with pytest.raises(KeyError):
        publisher.publish(2, broken())
    assert rig.subscriber().latest_version() == 1
    assert same(rig.read(1), weights(1))


def test_a_reader_sees_the_old_or_the_new_version_never_between() -> None:
    """At every call that the publisher makes, a subscriber looks, and reads everything."""
    rig = Rig()
    rig.publisher().publish(1, stream(weights(1)))
    seen: list[int] = []

    def look() -> None:
        version = rig.subscriber().latest_version()
        assert same(rig.read(version), weights(version))
        seen.append(version)

    class Watched(RelayTwin):
        def put(self, key: str, data: memoryview) -> None:
            look()
            super().put(key, data)
            look()

    class WatchedMetadata(MemoryMetadata):
        def compare_and_set(self, key: str, value: bytes, revision: int) -> bool:
            look()
            done = super().compare_and_set(key, value, revision)
            look()
            return done

    relay, metadata = Watched(), WatchedMetadata()
    relay._shared, metadata._shared = rig.relay._shared, rig.metadata._shared
    rig.publisher(relay, metadata).publish(2, stream(weights(2)))
    assert seen == sorted(seen)
    assert seen[0] == 1
    assert seen[-1] == 2


def test_of_two_publishers_of_a_version_one_wins_and_the_other_is_told() -> None:
    rig = Rig()
    winner, loser = rig.publisher(), rig.publisher()
    assert winner.epoch == loser.epoch == 1

    def interrupted() -> Iterator[tuple[str, tuple[int, ...], str, np.ndarray]]:
        for index, tensor in enumerate(stream(weights(8))):
            if index == 4:  # the other one publishes from start to end in the middle of this
                winner.publish(7, stream(weights(7)))
            yield tensor

    with pytest.raises(VersionTakenError) as caught:
        loser.publish(7, interrupted())
    assert caught.value.reason == "version_taken"
    assert same(rig.read(7), weights(7))
    with pytest.raises(VersionTakenError):
        loser.publish(7, stream(weights(8)))
    # Both go on with later versions, and nothing of the loser stays.
    loser.publish(8, stream(weights(8)))
    winner.publish(9, stream(weights(9)))
    assert winner.collect_garbage() == 0
    assert len(rig.relay.keys()) == 2 * OBJECTS


def test_versions_only_grow() -> None:
    rig = Rig()
    publisher = rig.publisher()
    publisher.publish(5, stream(weights(5)))
    for version in (5, 4):
        with pytest.raises(VersionTakenError):
            publisher.publish(version, stream(weights(6)))
    publisher.publish(9, stream(weights(9)))  # gaps are fine
    for version in (-1, True, "1"):
        with pytest.raises(ConfigError):
            publisher.publish(version, stream(weights(6)))  # type: ignore[arg-type]


# --- epochs


def test_a_resumed_run_publishes_its_version_again_and_the_abandoned_ones_vanish() -> None:
    rig = Rig()
    before = rig.publisher()
    for version in (3, 4, 5):
        before.publish(version, stream(weights(version)))
    resumed = rig.publisher()
    resumed.rollback(4)
    assert rig.subscriber().latest_version() == -1
    for version in (3, 4, 5):
        with pytest.raises(RelayError, match="missing"):
            rig.subscriber().manifest(version)
    with pytest.raises(VersionTakenError):
        resumed.publish(3, stream(weights(3)))  # before what was restored: trainer and checkpoint disagree
    resumed.publish(4, stream(weights(44)))
    resumed.publish(5, stream(weights(55)))
    assert same(rig.read(5), weights(55))
    assert rig.subscriber().epoch() == 2
    assert resumed.collect_garbage() == 0
    assert all(key.startswith("rlc/job/2/") for key in rig.relay.keys())  # noqa: SIM118


def test_a_publisher_of_an_abandoned_epoch_is_locked_out_even_in_the_middle() -> None:
    rig = Rig()
    zombie, resumed = rig.publisher(), rig.publisher()
    zombie.publish(1, stream(weights(1)))

    def interrupted() -> Iterator[tuple[str, tuple[int, ...], str, np.ndarray]]:
        for index, tensor in enumerate(stream(weights(9))):
            if index == 4:
                resumed.rollback(1)
                resumed.publish(1, stream(weights(11)))
            yield tensor

    with pytest.raises(VersionTakenError) as caught:
        zombie.publish(2, interrupted())
    assert caught.value.reason == "epoch_replaced"
    with pytest.raises(VersionTakenError):
        zombie.publish(2, stream(weights(2)))
    assert rig.subscriber().latest_version() == 1
    assert same(rig.read(1), weights(11))
    assert resumed.collect_garbage() == 0
    assert len(rig.relay.keys()) == OBJECTS


def test_a_relay_that_lost_its_memory_is_filled_again() -> None:
    rig = Rig()
    publisher = rig.publisher()
    publisher.publish(1, stream(weights(1)))
    publisher.publish(2, stream(weights(2)))
    rig.relay._shared.data.clear()
    with pytest.raises(RetryableError, match="missing"):
        rig.read(2)
    publisher.publish(2, stream(weights(2)))
    assert rig.subscriber().epoch() == 2
    assert same(rig.read(2), weights(2))


class Deaf(MemoryMetadata):
    """Takes a change, and goes away before it says so."""

    def __init__(self) -> None:
        super().__init__()
        self.after = -1  # changes

    def compare_and_set(self, key: str, value: bytes, revision: int) -> bool:
        taken = super().compare_and_set(key, value, revision)
        self.after -= 1
        if self.after == 0:
            raise RelayError("metadata_unreachable", "the connection broke")
        return taken


@pytest.mark.parametrize("after", [1, 2])
def test_a_store_that_goes_away_without_saying_that_it_has_the_version_ends_no_run(after: int) -> None:
    """As it begins, or as the version is there."""
    rig = Rig()
    rig.metadata = store = Deaf()
    publisher = rig.publisher()
    publisher.publish(1, stream(weights(1)))
    store.after = after
    with pytest.raises(RetryableError, match="metadata_unreachable"):
        publisher.publish(2, stream(weights(2)))
    publisher.publish(2, stream(weights(2)))
    assert same(rig.read(2), weights(2))
    publisher.publish(3, stream(weights(3)))
    assert same(rig.read(3), weights(3))
    assert publisher.collect_garbage() == 0
    with pytest.raises(VersionTakenError):
        publisher.publish(3, stream(weights(4)))


def test_a_reset_starts_from_nothing() -> None:
    rig = Rig()
    rig.publisher().publish(7, stream(weights(7)))
    publisher = rig.publisher()
    assert publisher.reset() == 2
    publisher.publish(0, stream(weights(0)))
    assert rig.subscriber().latest_version() == 0


def test_jobs_do_not_see_each_other() -> None:
    rig = Rig()
    other = Publisher(replace(ENDPOINT, job="other"), rig.relay, rig.metadata)
    other.publish(1, stream(weights(9)))
    assert rig.subscriber().latest_version() == -1
    rig.publisher().publish(1, stream(weights(1)))
    assert same(rig.read(1), weights(1))


# --- keep and drop


def test_only_the_last_versions_are_kept() -> None:
    rig = Rig(replace(ENDPOINT, keep_versions=3))
    publisher = rig.publisher()
    for version in range(7):
        publisher.publish(version, stream(weights(version)))
    assert publisher.collect_garbage() == 0
    assert sorted({int(key.split("/")[3]) for key in rig.relay.keys()}) == [4, 5, 6]  # noqa: SIM118
    for version in (4, 5, 6):
        assert same(rig.read(version), weights(version))
    with pytest.raises(RelayError, match="missing"):
        rig.subscriber().manifest(3)


def test_a_leased_object_is_not_forced_out_but_removed_later() -> None:
    rig = Rig()
    publisher = rig.publisher()
    publisher.publish(0, stream(weights(0)))
    leased = "rlc/job/1/0/full/1"
    rig.relay.lease(leased)
    for version in (1, 2, 3):
        publisher.publish(version, stream(weights(version)))
    assert publisher.collect_garbage() == 1  # version 0 waits, version 1 is gone
    assert leased in rig.relay.keys()  # noqa: SIM118
    assert not [key for key in rig.relay.keys() if "/1/full/" in key]  # noqa: SIM118
    rig.relay.release(leased)
    assert publisher.collect_garbage() == 0
    assert not [key for key in rig.relay.keys() if "/0/full/" in key]  # noqa: SIM118


def test_what_a_dead_publisher_left_behind_is_removed_by_the_next_run() -> None:
    rig = Rig()
    dead = rig.publisher()
    dead.publish(0, stream(weights(0)))
    pieces = stream(weights(1, (900,) * 300))

    def dies() -> Iterator[tuple[str, tuple[int, ...], str, np.ndarray]]:
        for index, tensor in enumerate(pieces):
            if index == 290:
                raise SystemExit
            yield tensor

    with pytest.raises(SystemExit):
        dead.publish(1, dies())
    left = len(rig.relay.keys())
    assert left > heads.RESERVE_BUCKETS + OBJECTS  # so it had to record more buckets than it began with
    resumed = rig.publisher()
    resumed.rollback(0)
    resumed.publish(0, stream(weights(0)))
    assert resumed.collect_garbage() == 0
    assert len(rig.relay.keys()) == OBJECTS


def test_what_a_dead_publisher_left_behind_goes_when_another_publishes_that_version() -> None:
    rig = Rig()
    dead = rig.publisher(relay=Failing(rig.relay, 3))
    with pytest.raises(RelayError):
        dead.publish(0, stream(weights(9)))
    assert len(rig.relay.keys()) == 3
    publisher = rig.publisher()
    publisher.publish(0, stream(weights(0)))
    assert publisher.collect_garbage() == 0
    assert len(rig.relay.keys()) == OBJECTS
    assert same(rig.read(0), weights(0))


def test_a_failed_attempt_gives_its_room_back_before_the_next_one() -> None:
    one = Rig()
    one.publisher().publish(0, stream(weights(0)))
    rig = Rig(capacity=int(2.5 * one.relay.used))
    publisher = rig.publisher(relay=Failing(rig.relay, 2 * OBJECTS - 1))
    publisher.publish(0, stream(weights(0)))
    with pytest.raises(RelayError, match="injected"):
        publisher.publish(1, stream(weights(1)))
    publisher._relay = rig.relay
    publisher.publish(1, stream(weights(1)))
    assert same(rig.read(1), weights(1))
    assert same(rig.read(0), weights(0))


def test_a_full_relay_is_back_pressure_with_a_name() -> None:
    rig = Rig(capacity=70_000)
    publisher = rig.publisher()
    for version in (0, 1):
        publisher.publish(version, stream(weights(version)))
    with pytest.raises(RetryableError) as caught:
        publisher.publish(2, stream(weights(2)))
    assert isinstance(caught.value, RelayError)
    assert caught.value.reason == "relay_full"
    assert same(rig.read(1), weights(1))
    rig.relay.capacity = 100_000
    publisher.publish(2, stream(weights(2)))
    assert same(rig.read(2), weights(2))


# --- the relay's own promises


def test_objects_are_written_once() -> None:
    relay = RelayTwin()
    relay.put("k", memoryview(b"first"))
    with pytest.raises(RelayError) as caught:
        relay.put("k", memoryview(b"second"))
    assert caught.value.reason == "exists"
    buffer = bytearray(5)
    assert relay.get_into("k", memoryview(buffer)) == 5
    assert bytes(buffer) == b"first"


def test_a_missing_object_is_an_error_and_a_missing_size_is_minus_one() -> None:
    relay = RelayTwin()
    assert relay.size("k") == -1
    assert relay.remove("k")  # it is gone, which is what was asked
    with pytest.raises(RelayError) as caught:
        relay.get_into("k", memoryview(bytearray(5)))
    assert caught.value.reason == "missing"
    relay.close()
    relay.close()
    with pytest.raises(RelayError) as caught:
        relay.size("k")
    assert caught.value.reason == "closed"


class Crowd(MemoryMetadata):
    """So many others change each record, too: as long as they do, one in a millisecond, nobody else is fast enough."""

    def __init__(self, others: int) -> None:
        super().__init__()
        self.over, self.now, self.asked = others * 0.001, 0.0, 0

    def wait(self, seconds: float) -> None:
        self.now += seconds

    def compare_and_set(self, key: str, value: bytes, revision: int) -> bool:
        self.now, self.asked = self.now + 0.001, self.asked + 1
        return self.now > self.over and super().compare_and_set(key, value, revision)


def test_five_hundred_ranks_that_speak_at_once_all_get_through(monkeypatch: pytest.MonkeyPatch) -> None:
    crowd = Crowd(500)
    monkeypatch.setattr("orchestrator.transfer.job_head.time", SimpleNamespace(sleep=crowd.wait))
    renew_lease(crowd, "job", "node/1", 1, VersionHolder(3, fetching=4), 600)
    assert read_leases(crowd, "job")["node/1"].holder.fetching == 4
    assert crowd.asked <= 20  # and without a question a millisecond, each of which carries the record


def test_endless_contention_is_an_error_not_a_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("orchestrator.transfer.job_head.CAS_PAUSE_MOST", 0.0)

    class Busy(MemoryMetadata):
        def compare_and_set(self, key: str, value: bytes, revision: int) -> bool:
            return False

    rig = Rig()
    with pytest.raises(RetryableError, match="metadata_contention"):
        rig.publisher(metadata=Busy()).publish(0, stream(weights(0)))


# --- the endpoint


def test_an_endpoint_crosses_processes_as_plain_data() -> None:
    endpoint = RelayEndpoint(job="a.b-c", master="10.0.0.1:50051", metadata="/x/m.sqlite", keep_versions=5)
    assert RelayEndpoint.from_dict(json.loads(json.dumps(endpoint.to_dict()))) == endpoint


def test_who_is_not_upgraded_yet_is_told_no_key_that_it_would_refuse_unless_it_is_used() -> None:
    """Servers and site caches are upgraded at other times, and refuse unknown keys: these are those of the first caches that
    speak today's protocol."""
    known = {"job", "kind", "master", "metadata", "protocol", "host", "segment_bytes", "bucket_bytes", "keep_versions"}
    known |= {"snapshot_every", "encoding", "codec_threads", "verify_key", "cache", "cache_authority"}
    endpoint = RelayEndpoint(job="a.b-c", master="10.0.0.1:50051", metadata="/x/m.sqlite")
    assert site_relay.PROTOCOL == 1, "all caches of a newer one know more"
    assert endpoint.to_dict().keys() <= known
    assert replace(endpoint, protocol="rdma", device="mlx5_0").to_dict().keys() - known == {"device"}


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"jbo": "x"}, "relay.jbo"),
        ({"job": None}, "relay.job"),
        ({"job": "a/b"}, "relay.job"),
        ({"kind": "redis"}, "relay.kind"),
        ({"master": "localhost"}, "relay.master"),
        ({"metadata": ""}, "relay.metadata"),
        ({"bucket_bytes": 10}, "relay.bucket_bytes"),
        ({"bucket_bytes": 1e6}, "relay.bucket_bytes"),
        ({"segment_bytes": -1}, "relay.segment_bytes"),
        ({"keep_versions": 0}, "relay.keep_versions"),
        ({"keep_versions": True}, "relay.keep_versions"),
    ],
)
def test_a_wrong_endpoint_is_a_configuration_error(change: dict[str, object], field: str) -> None:
    data: dict[str, object] = {**RelayEndpoint(job="j", master="h:1").to_dict(), **change}
    with pytest.raises(ConfigError) as caught:
        RelayEndpoint.from_dict(data)
    assert caught.value.field == field
    with pytest.raises(ConfigError):
        RelayEndpoint.from_dict({"kind": "memory"})


def test_memory_relays_of_one_name_are_one_relay_and_end_with_their_last_user() -> None:
    endpoint = replace(ENDPOINT, master="shared by name")
    publisher, subscriber = Publisher(endpoint), Subscriber(endpoint)
    publisher.publish(0, stream(weights(0)))
    assert subscriber.latest_version() == 0
    publisher.close()
    assert len(list(subscriber.fetch(subscriber.manifest(0)))) == 8
    subscriber.close()
    del publisher, subscriber
    gc.collect()
    relay = open_relay(endpoint)
    assert isinstance(relay, MemoryRelay)
    assert relay.keys() == []


def test_a_damaged_head_record_is_told() -> None:
    rig = Rig()
    rig.publisher().publish(0, stream(weights(0)))
    value, revision = rig.metadata.get("rlc/job/head") or (b"", 0)
    for damaged in (b"", value[:-1], b"\xff" + value, value.replace(b"epoch", b"epocj")):
        rig.metadata._shared.data["rlc/job/head"] = (damaged, revision)
        with pytest.raises(CorruptWeightsError):
            rig.subscriber().latest_version()
