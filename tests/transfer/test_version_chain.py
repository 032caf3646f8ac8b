"""Versions as chains of differences: what is kept, what a reader needs, and what no chain may end in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.api import ConfigError, RetryableError, RunError
from orchestrator.transfer import (
    CorruptWeightsError,
    HostedWeights,
    MemoryMetadata,
    RelayError,
    SnapshotPolicy,
    Subscriber,
    VersionTakenError,
    shard_routing,
    version_leases,
)
from orchestrator.transfer import job_head as heads
from orchestrator.transfer import subscriber as subscribers
from orchestrator.transfer.job_head import FULL, PublishAttempt, PublishedVersion
from orchestrator.transfer.publisher import PublishPlan
from orchestrator.transfer.retention import (
    VersionHolder,
    by_differences,
    choose_route,
    from_snapshot,
    retained_versions,
)
from orchestrator.transfer.shard_routing import Region
from tests.support import transfer_twins as twins
from tests.support.relay_twin import RelayTwin

HALF = [Region("embed", ((0, 32), (0, 32))), Region("o", ((0, 32), (0, 48))), Region("norm", ((0, 32),))]


def chained(rig: Any, first: int, last: int, snapshots: tuple[int, ...] = ()) -> None:
    """Publish versions: the first as a full snapshot, the others as differences; some as both."""
    for version in range(first, last + 1):
        if version == first and version - 1 not in rig.model:
            rig.publish(version, twins.weights(version))
            continue
        model = twins.stepped(rig.model[version - 1], version)
        rig.publish(version, model, version - 1)
        if version in snapshots:
            rig.publish(version, model)


def holds(resident: HostedWeights, model: Any) -> bool:
    return bool(twins.read(resident, model) == twins.whole(model))


# --- moving along


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_chain_of_differences_ends_in_the_weights_that_were_published(ranks: int) -> None:
    rig = twins.Rig(ranks, keep_versions=1)
    resident = rig.resident(name="one")
    chained(rig, 0, 0)
    resident.advance(0)
    for version in range(1, 6):
        chained(rig, version, version)
        resident.advance(version)
        assert holds(resident, rig.model[version])
        assert 0 < resident.fetched_bytes < 3000 < sum(values.nbytes for values in rig.model[0].values())
    newcomer = rig.resident()
    newcomer.advance(5)  # a snapshot and five differences
    assert holds(newcomer, rig.model[5])
    assert newcomer.content == resident.content


def test_only_what_is_hosted_and_what_changed_is_fetched() -> None:
    rig = twins.Rig()
    chained(rig, 0, 0)
    resident = rig.resident(HALF)
    assert resident.advance(0) == {"embed", "o", "norm"}
    assert resident.bytes == sum(rig.model[0][name].nbytes for name in ("embed", "o")) / 2 + 64
    rig.publish(1, twins.stepped(rig.model[0], 1, ["norm", "q"]), 0)
    assert resident.advance(1) == {"norm"}
    for region in HALF:
        box = tuple(slice(*bounds) for bounds in region.box)
        assert np.array_equal(resident.region(region).view(np.uint16), rig.model[1][region.tensor][box].reshape(-1))
    assert resident.advance(1) == frozenset()
    with pytest.raises(CorruptWeightsError, match="not held here"):
        resident.region(Region("embed", ((0, 33), (0, 32))))


def test_who_holds_an_old_version_takes_the_way_with_fewer_bytes() -> None:
    rig = twins.Rig(keep_versions=9)
    chained(rig, 0, 4, snapshots=(3,))
    resident = rig.resident()
    resident.advance(2)
    resident.advance(4)  # two differences rather than snapshot 3 and one difference
    assert resident.fetched_bytes < 6000
    assert holds(resident, rig.model[4])
    newcomer = rig.resident()
    newcomer.advance(4)
    full, last = rig.head().find_version(3), rig.head().find_version(4)
    assert full.payload_bytes < newcomer.fetched_bytes <= full.payload_bytes + last.payload_bytes


def test_a_missing_base_is_resolved_by_a_snapshot() -> None:
    rig = twins.Rig(keep_versions=1)
    chained(rig, 0, 1)
    resident = rig.resident()
    resident.advance(1)
    chained(rig, 2, 5, snapshots=(4,))  # nobody said that version 1 is held
    rig.publishers[0].collect_garbage()
    assert rig.versions() == [(4, "full"), (5, "delta-4")]
    resident.advance(5)
    assert holds(resident, rig.model[5])


def test_a_new_epoch_starts_from_its_own_snapshot() -> None:
    """The same number is another version there."""
    rig = twins.Rig()
    chained(rig, 0, 2)
    resident = rig.resident()
    resident.advance(2)
    rig.publishers[0].rollback(2)
    rig.model.clear()
    rig.publish(2, twins.weights(77))
    resident.advance(2)
    assert holds(resident, twins.weights(77))


def test_a_relay_that_lost_its_memory_is_said_and_filled_again() -> None:
    rig = twins.Rig()
    chained(rig, 0, 2)
    resident = rig.resident()
    resident.advance(1)
    rig.relay._shared.data.clear()
    with pytest.raises(RelayError, match="missing"):
        resident.advance(2)
    assert holds(resident, rig.model[1])
    assert rig.publishers[0].plan_next(SnapshotPolicy()) == PublishPlan(FULL, True)
    rig.publish(2, rig.model[2])
    resident.advance(2)
    assert holds(resident, rig.model[2])


# --- publishing rules


def test_a_difference_needs_the_newest_version_of_the_same_publisher_cut_alike() -> None:
    rig = twins.Rig()
    chained(rig, 0, 2)
    one = rig.publishers[0]
    keys = twins.cut(rig.model[2], 1)[0]
    for base in (0, 1, 7):
        with pytest.raises(RunError, match=f"base {base} is not what this publisher published last"):
            one.publish_shards(3, twins.shards(keys, rig.model[2], rig.model[2]), base)
    other = twins.cut(rig.model[2], 1, 4)[0]
    with pytest.raises(RunError, match="cut differently"):
        one.publish_shards(3, twins.shards(other, rig.model[2], rig.model[2]), 2)
    with pytest.raises(RunError, match="is not what this publisher"):
        rig.open(1)[0].publish_shards(3, twins.shards(keys, rig.model[2], rig.model[2]), 2)
    assert rig.subscriber().latest_version() == 2
    chained(rig, 3, 3)


def test_a_snapshot_beside_a_difference_must_have_its_content() -> None:
    rig = twins.Rig()
    chained(rig, 0, 1)
    with pytest.raises(VersionTakenError, match="other content"):
        rig.publish(1, twins.weights(5))
    intruder = rig.open(1)[0]
    with pytest.raises(VersionTakenError):
        intruder.publish(1, [("w", (4,), "uint8", np.zeros(4, np.uint8))])
    model = twins.stepped(rig.model[0], 1)
    rig.publish(1, model)
    with pytest.raises(VersionTakenError):
        rig.publish(1, model)
    resident = rig.resident()
    resident.advance(1)
    assert holds(resident, model)
    rig.publishers[0].collect_garbage()
    assert rig.versions() == [(0, "full"), (1, "delta-0"), (1, "full")]


def test_the_policy_asks_for_a_snapshot_every_k_differences_or_when_the_chain_outweighs_it() -> None:
    rig, policy = twins.Rig(), SnapshotPolicy(every=3, weight=0.9)
    one = rig.publishers[0]
    assert one.plan_next(policy) == PublishPlan(FULL, True)
    chained(rig, 0, 0)
    for version in (1, 2, 3):
        assert one.plan_next(policy) == PublishPlan(version - 1, False)
        chained(rig, version, version)
    assert one.plan_next(policy) == PublishPlan(3, True)
    assert one.plan_next(SnapshotPolicy(every=9)) == PublishPlan(3, False)
    assert one.plan_next(SnapshotPolicy(every=9, weight=0.05)) == PublishPlan(3, True)
    assert one.plan_next(SnapshotPolicy(every=0)) == PublishPlan(FULL, True)
    chained(rig, 4, 4, snapshots=(4,))
    assert one.plan_next(policy) == PublishPlan(4, False)
    for wrong in ({"every": -1}, {"every": True}, {"weight": 0}, {"weight": float("nan")}):
        with pytest.raises(ConfigError, match=r"relay\.snapshot"):
            SnapshotPolicy(**wrong)


def test_a_subscriber_for_whom_no_chain_leads_anywhere_gets_a_snapshot_with_the_next_version() -> None:
    rig, policy = twins.Rig(), SnapshotPolicy()
    chained(rig, 0, 2)
    lost = rig.resident(name="lost")
    rig.relay.remove(objects(rig, 0)[0])  # a part of the store went away with the machine that lent it
    with pytest.raises(RelayError, match="missing"):
        lost.advance(2)
    assert rig.publishers[0].plan_next(policy) == PublishPlan(2, False)
    lost._subscriber.ask_snapshot()
    assert rig.publishers[0].plan_next(policy) == PublishPlan(2, True)
    chained(rig, 3, 3, snapshots=(3,))
    lost.advance(3)
    assert holds(lost, rig.model[3])
    lost._subscriber.hold(3)
    assert rig.publishers[0].plan_next(policy) == PublishPlan(3, False)


# --- retention


def test_who_speaks_in_an_epoch_before_its_first_version_holds_up_no_publication() -> None:
    """The thread of a fetch outlives the run that began it: the run comes back, opens an epoch, and then the thread speaks."""
    rig = twins.Rig()
    chained(rig, 0, 1)
    subscriber = rig.subscriber("engine")
    assert rig.publishers[0].rollback(1) == 2
    subscriber.hold(1, fetching=1)
    rig.subscriber("newcomer").ask_snapshot()
    rig.publish(1, twins.weights(1))
    assert rig.versions() == [(1, "full")]


def entry(version: int, base: int = FULL, size: int = 1) -> PublishedVersion:
    return PublishedVersion(PublishAttempt(1, version, 0, 1, base), 1, 1, size)


@st.composite
def histories(draw: st.DrawFn) -> tuple[PublishedVersion, ...]:
    """Versions with gaps; each a snapshot, a difference to the one before, or both."""
    found: list[PublishedVersion] = []
    version = last = -1
    for number in range(draw(st.integers(1, 10))):
        version += draw(st.integers(1, 3))
        kinds = draw(st.sampled_from(["full", "delta", "both"])) if number else "full"
        if kinds != "full":
            found.append(entry(version, last, draw(st.integers(1, 9))))
        if kinds != "delta":
            found.append(entry(version, size=draw(st.integers(1, 99))))
        last = version
    return tuple(found)


@given(histories(), st.integers(1, 4), st.lists(st.integers(-1, 25), max_size=4), st.integers(-1, 25))
def test_what_is_kept_is_what_somebody_needs_and_can_be_read(
    published: tuple[PublishedVersion, ...], keep: int, held: list[int], fetching: int
) -> None:
    holders = [*(VersionHolder(version) for version in held), VersionHolder(-1, fetching)]
    kept = retained_versions(published, keep, holders)
    versions = sorted({item.attempt.version for item in published})
    for target in versions[-keep:]:
        way = from_snapshot(kept, target)
        assert way is not None
        assert way[0].attempt.base == FULL
    for version in held:
        before, after = by_differences(published, version, versions[-1]), by_differences(kept, version, versions[-1])
        assert (before is None) == (after is None)
    if fetching in versions:
        assert from_snapshot(kept, fetching)
    needed = [way for target in (*versions[-keep:], fetching) if (way := from_snapshot(published, target))]
    needed += [way for version in held if (way := by_differences(published, version, versions[-1]))]
    recent = {item for item in published if item.attempt.version in versions[-keep:]}
    assert set(kept) == recent | {item for way in needed for item in way}
    assert retained_versions(kept, keep, holders) == kept
    assert list(kept) == sorted(kept, key=published.index)


@given(histories(), st.integers(-1, 25))
def test_a_route_begins_at_what_is_held_or_at_a_snapshot(published: tuple[PublishedVersion, ...], held: int) -> None:
    target = published[-1].attempt.version
    way = choose_route(published, held, target)
    at = held
    for step in way:
        assert step.attempt.base in (FULL, at)
        at = step.attempt.version
    assert at == target
    with pytest.raises(RelayError, match="no chain"):
        choose_route(published, 3, 99)


def test_the_last_snapshot_and_the_chain_after_it_stay() -> None:
    rig = twins.Rig(keep_versions=2)
    chained(rig, 0, 7, snapshots=(3,))
    rig.publishers[0].collect_garbage()
    assert rig.versions() == [(3, "full"), *((version, f"delta-{version - 1}") for version in (4, 5, 6, 7))]


def test_what_a_live_subscriber_needs_stays_until_its_lease_runs_out() -> None:
    rig = twins.Rig(keep_versions=1)
    chained(rig, 0, 1)
    subscriber = rig.subscriber("engine")
    subscriber.hold(1)
    chained(rig, 2, 4, snapshots=(3,))
    rig.publishers[0].collect_garbage()
    assert rig.versions() == [(2, "delta-1"), (3, "delta-2"), (3, "full"), (4, "delta-3")]
    rig.now += 599
    subscriber.hold(1)
    chained(rig, 5, 5)
    rig.now += 599
    chained(rig, 6, 6)
    assert by_differences(rig.head().published, 1, 6)
    rig.now += 10
    chained(rig, 7, 7)
    rig.publishers[0].collect_garbage()
    assert rig.versions() == [(3, "full"), *((version, f"delta-{version - 1}") for version in (4, 5, 6, 7))]
    assert version_leases.read_leases(rig.metadata, "job") == {}


def test_what_is_being_fetched_stays() -> None:
    rig = twins.Rig(keep_versions=1)
    chained(rig, 0, 1)
    rig.subscriber("newcomer").hold(-1, fetching=1)
    chained(rig, 2, 4, snapshots=(4,))
    rig.publishers[0].collect_garbage()
    assert rig.versions() == [(0, "full"), (1, "delta-0"), (4, "delta-3"), (4, "full")]


def test_a_fetch_that_takes_longer_than_its_lease_keeps_what_it_reads(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Hundreds of gigabytes over 1 Gbit/s take an hour, and a lease is good for ten minutes."""
    rig = twins.Rig(keep_versions=1)
    monkeypatch.setattr(subscribers, "time", SimpleNamespace(monotonic=lambda: rig.now))
    chained(rig, 0, 1)
    subscriber = rig.subscriber("newcomer")
    subscriber.hold(-1, fetching=1)
    rig.publishers[0].collect_garbage()  # it is seen
    manifest = subscriber.manifest(0)
    for _ in range(3):
        rig.now += 400
        list(subscriber.fetch_shards(manifest, range(len(manifest.shards))))
        rig.publishers[0].collect_garbage()
    chained(rig, 2, 4, snapshots=(4,))
    rig.publishers[0].collect_garbage()
    assert rig.versions() == [(0, "full"), (1, "delta-0"), (4, "delta-3"), (4, "full")]
    rig.now += 400
    monkeypatch.setattr(rig.metadata, "get", lambda key: (_ for _ in ()).throw(RelayError("metadata_unreachable", "")))
    list(subscriber.fetch_shards(manifest, range(len(manifest.shards))))  # what is there is read without it
    assert len([one for one in caplog.messages if "was not renewed" in one]) == 1


def test_no_clock_is_compared_with_another() -> None:
    """A subscriber says no time at all; the collector measures on its own clock, from when it first sees a word."""
    metadata, now = MemoryMetadata(), 1e9
    watch = version_leases.LeaseWatch(metadata, "job", lambda: now)
    version_leases.renew_lease(metadata, "job", "a", 1, VersionHolder(4), 10)
    version_leases.renew_lease(metadata, "job", "b", 2, VersionHolder(5), 10)
    assert watch.live_holders(1) == [VersionHolder(4)]
    now -= 1e6  # a clock that was set back makes no lease shorter
    assert watch.live_holders(1) == [VersionHolder(4)]
    now += 1e6 + 10
    version_leases.renew_lease(metadata, "job", "a", 1, VersionHolder(6), 10)
    assert watch.live_holders(1) == [VersionHolder(6)]
    now += 9
    assert watch.live_holders(1) == [VersionHolder(6)]
    late = version_leases.LeaseWatch(metadata, "job", lambda: now)  # a collector that starts anew gives a whole lease
    now += 2
    assert watch.live_holders(1) == []
    version_leases.renew_lease(metadata, "job", "a", 1, VersionHolder(6), 10)
    assert late.live_holders(1) == [VersionHolder(6)]


@pytest.mark.parametrize(
    "value",
    [b"", b"\xc1", b"\x80", version_leases.encode_leases({})[:-1], version_leases.encode_leases({}).replace(b"\x01", b"\x02"),
     version_leases.encode_leases({"a": version_leases.VersionLease(1, VersionHolder(1), 0, 10)}).replace(b"\x95", b"\x94"),
     version_leases.encode_leases({"a": version_leases.VersionLease(1, VersionHolder("x"), 0, 10)})],
)  # fmt: skip
def test_a_damaged_lease_record_is_told(value: bytes) -> None:
    with pytest.raises(CorruptWeightsError) as caught:
        version_leases.decode_leases(value)
    assert caught.value.reason == "format"


def test_a_full_relay_is_back_pressure_with_a_name_and_evicts_nothing() -> None:
    size = sum(values.nbytes for values in twins.weights(0).values())
    rig = twins.Rig(capacity=3 * size, keep_versions=1)
    chained(rig, 0, 1)
    rig.subscriber("engine").hold(-1, fetching=1)
    before = rig.relay.keys()
    one, model = rig.publishers[0], twins.weights(9)
    big = [(key, data, None) for key, data, _ in twins.shards(twins.cut(model, 1)[0], model)]
    one.publish_shards(2, big)
    with pytest.raises(RetryableError) as caught:
        one.publish_shards(3, big)
    assert caught.value.reason == "relay_full"
    assert set(before) <= set(rig.relay.keys())
    rig.now += 1000  # the engine is gone: what was kept for it makes room
    one.publish_shards(3, big)
    assert rig.subscriber().latest_version() == 3


# --- damage: every chain ends in the right weights or in an error, and what was held stays


def damaged(rig: Any, key: str, change: Callable[[bytes], bytes]) -> None:
    rig.relay.tamper(key, change(rig.relay._shared.data[key]))


def flip(value: bytes) -> bytes:
    return value[:70] + bytes([value[70] ^ 4]) + value[71:]


def objects(rig: Any, version: int, kind: str = "") -> list[str]:
    found = [key for key in rig.relay.keys() if f"/{version}/{kind}" in key]  # noqa: SIM118
    return [key for key in found if "manifest" not in key]


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        ("flipped", "checksum"),
        ("truncated", "truncated"),
        ("replayed", "identity"),
        ("reordered", "identity"),
        ("foreign", "identity"),
        ("manifest", "manifest"),
    ],
)
def test_a_difference_that_is_not_what_was_published_moves_nothing(damage: str, reason: str) -> None:
    rig = twins.Rig(bucket_bytes=1024)
    other = twins.Rig(bucket_bytes=1024, job="oth")
    for one in (rig, other):
        one.publish(0, twins.weights(0))
        one.publish(1, twins.stepped(one.model[0], 1), 0)
        one.publish(2, twins.stepped(one.model[1], 2), 1)
        one.publish(3, twins.stepped(one.model[2], 3), 2)
    resident = rig.resident()
    resident.advance(1)
    first, *_ = two = objects(rig, 2)
    data = dict(rig.relay._shared.data)
    same = {key: bytes(len(data[key])) for key in two}
    if damage == "flipped":
        damaged(rig, two[-1], flip)
    elif damage == "truncated":
        damaged(rig, two[-1], lambda value: value[:-1])
    elif damage == "replayed":  # an intact bucket of the version before, made as long as this one
        pad(rig, first, data[objects(rig, 1, "delta")[0]], len(same[first]))
    elif damage == "reordered":  # of the version after
        pad(rig, first, data[objects(rig, 3)[0]], len(same[first]))
    elif damage == "foreign":
        pad(rig, first, other.relay._shared.data[first.replace("/job/", "/oth/")], len(same[first]))
    else:
        damaged(rig, first.rpartition("/")[0] + "/manifest", flip)
    with pytest.raises(CorruptWeightsError) as caught:
        resident.advance(3)
    assert caught.value.reason == reason
    assert resident.version == 1
    assert holds(resident, rig.model[1])
    rig.relay._shared.data.update(data)
    resident.advance(3)
    assert holds(resident, rig.model[3])


def pad(rig: Any, key: str, value: bytes, size: int) -> None:
    """Put another bucket there, whose size is what was published for this one (in its body, under a right checksum)."""
    from orchestrator.transfer import bucket

    _, _, body, directory = bucket._PREFIX.unpack_from(value, 0)
    assert len(value) <= size + 64
    rest = value[bucket.BODY_START :][:body], value[bucket.BODY_START + body :]
    body = size - bucket.BODY_START - directory
    filled = np.zeros(size, np.uint8)
    filled[bucket.BODY_START : bucket.BODY_START + min(body, len(rest[0]))] = np.frombuffer(rest[0], np.uint8)[:body]
    filled[bucket.BODY_START + body :] = np.frombuffer(rest[1], np.uint8)
    bucket._PREFIX.pack_into(filled.data, 0, bucket.MAGIC, 0, body, directory)
    checksum = bucket.digest(filled[bucket.CHECKED_FROM :])
    bucket._PREFIX.pack_into(filled.data, 0, bucket.MAGIC, checksum, body, directory)
    rig.relay.tamper(key, filled.tobytes())


def test_a_damaged_difference_is_gone_round_by_a_snapshot() -> None:
    rig = twins.Rig(keep_versions=9)
    chained(rig, 0, 3, snapshots=(3,))
    resident = rig.resident()
    resident.advance(1)
    damaged(rig, objects(rig, 2)[0], flip)
    resident.advance(3)
    assert holds(resident, rig.model[3])


def test_a_difference_that_decodes_to_something_else_is_taken_back() -> None:
    """The publisher's old values were not those of the base: everything is intact, only wrong. Nothing of it stays."""
    rig = twins.Rig(bucket_bytes=1024)
    chained(rig, 0, 1)
    resident = rig.resident()
    resident.advance(1)
    rig.model[1] = twins.stepped(rig.model[1], 99, ["gate"])  # what the publisher believes to be the base
    held = twins.read(resident, rig.model[1])
    chained(rig, 2, 2)
    with pytest.raises(CorruptWeightsError) as caught:
        resident.advance(2)
    assert caught.value.reason == "digest"
    assert twins.read(resident, rig.model[1]) == held


def test_a_chain_with_another_base_is_refused() -> None:
    """Right version numbers, other content: an abandoned history, or a forged manifest."""
    rig = twins.Rig()
    chained(rig, 0, 2)
    subscriber = rig.subscriber()
    manifest = subscriber.manifest(1)
    assert [item.version for item in subscriber.chain(2, 1, manifest.content())] == [2]
    with pytest.raises(CorruptWeightsError) as caught:
        subscriber.chain(2, 1, manifest.content() ^ 1)
    assert caught.value.reason == "chain"


def test_a_reader_without_the_codec_says_so() -> None:
    rig = twins.Rig()
    chained(rig, 0, 1)
    plain = Subscriber(rig.endpoint, rig.relay, rig.metadata)
    assert len(list(plain.fetch(plain.manifest(0)))) == 10
    with pytest.raises(CorruptWeightsError, match="toy-xor cannot be read"):
        plain.manifest(1)
    with pytest.raises(RelayError, match="not a full snapshot"):
        list(rig.subscriber().fetch(rig.subscriber().manifest(1)))


class Dying(RelayTwin):
    """Breaks at a read."""

    def __init__(self, shared: RelayTwin, at: int, error: Exception) -> None:
        super().__init__()
        self._shared, self.left, self.error = shared._shared, at, error

    def get_into(self, key: str, buffer: memoryview) -> int:
        self.left -= 1
        if self.left < 0:
            raise self.error
        return super().get_into(key, buffer)

    def get_ranges(self, key: str, ranges: Any, buffer: memoryview) -> int:
        self.left -= 1
        if self.left < 0:
            raise self.error
        return super().get_ranges(key, ranges, buffer)


@pytest.mark.parametrize("error", [RelayError("transfer", "injected"), KeyError("killed")], ids=["relay", "death"])
def test_a_pull_that_ends_at_any_read_leaves_the_old_weights(error: Exception) -> None:
    rig = twins.Rig(bucket_bytes=1024, keep_versions=9)
    chained(rig, 0, 3)
    for at in range(40):
        subscriber = rig.subscriber()
        resident = HostedWeights(subscriber, None, twins.XorCodec())
        resident.advance(1)
        subscriber._relay = Dying(rig.relay, at, error)
        try:
            resident.advance(3)
        except type(error):
            assert resident.version == 1
            assert holds(resident, rig.model[1])
            subscriber._relay = rig.relay
            resident.advance(3)
        else:
            assert at > 3
            break
        finally:
            assert holds(resident, rig.model[resident.version])
    else:
        pytest.fail("it never got through")


# --- the head record


def test_the_head_record_keeps_kinds_contents_and_sizes() -> None:
    rig = twins.Rig(keep_versions=3)
    chained(rig, 0, 3, snapshots=(2,))
    head = rig.head()
    assert heads.decode_head(heads.encode_head(head)) == head
    assert [(item.attempt.version, item.attempt.kind) for item in head.published] == [
        (0, "full"), (1, "delta-0"), (2, "delta-1"), (2, "full"), (3, "delta-2")
    ]  # fmt: skip
    assert head.find_version(2).attempt.base == FULL
    assert head.find_version(2, 1).content == head.find_version(2).content != head.find_version(3).content
    assert head.find_version(2, 7) is None
    assert shard_routing.shard_label(rig.subscriber().manifest(3).shards[0]) == "embed[0:0:32]"
    assert replace(head, floor=1) != head
