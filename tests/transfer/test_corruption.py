"""Whatever is wrong with the bytes, no wrong tensor comes out.

Every test asserts the ``reason`` of the error, so that each check is tested by itself: take one away, and another one
behind it may still catch the damage, but the test of the first fails.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import msgpack
import numpy as np
import pytest
import xxhash

from orchestrator.transfer import CorruptWeightsError, MemoryMetadata, Publisher, RelayEndpoint, Subscriber
from orchestrator.transfer import bucket as wire
from orchestrator.transfer import job_head as heads
from orchestrator.transfer import manifest as manifests
from orchestrator.transfer import registered_buffers as buffers_module
from orchestrator.transfer.job_head import update_head
from tests.support.relay_twin import RelayTwin

ENDPOINT = RelayEndpoint(job="job", kind="memory", master="unused", bucket_bytes=1100)
NAMES = tuple(f"w{index}" for index in range(6))  # two fit into a bucket


def tensors(seed: int) -> Iterator[tuple[str, tuple[int, ...], str, np.ndarray]]:
    generator = np.random.default_rng(seed)
    for name in NAMES:
        yield name, (100,), "bfloat16", generator.integers(0, 256, 200, dtype=np.uint8)


def expected(seed: int) -> dict[str, bytes]:
    return {name: data.tobytes() for name, _, _, data in tensors(seed)}


class Rig:
    """Two versions of one job, and the same versions of another."""

    def __init__(self) -> None:
        self.relay, self.metadata = RelayTwin(), MemoryMetadata()
        for job in ("job", "other"):
            endpoint = RelayEndpoint(**{**ENDPOINT.to_dict(), "job": job})  # type: ignore[arg-type]
            publisher = Publisher(endpoint, self.relay, self.metadata)
            for version in (1, 2):
                publisher.publish(version, tensors(version if job == "job" else 100 + version))
        self.subscriber = Subscriber(ENDPOINT, self.relay, self.metadata)

    def object(self, bucket: int | str, version: int = 2, job: str = "job") -> bytes:
        return self.relay._shared.data[f"rlc/{job}/1/{version}/full/{bucket}"]

    def replace(self, bucket: int | str, value: bytes) -> None:
        self.relay.tamper(f"rlc/job/1/2/full/{bucket}", value)

    def fetch(self) -> dict[str, bytes]:
        return {key.tensor: data.tobytes() for key, data in self.subscriber.fetch(self.subscriber.manifest(2))}

    def refused(self) -> str:
        """Why version 2 is refused."""
        with pytest.raises(CorruptWeightsError) as caught:
            self.fetch()
        return caught.value.reason


@pytest.fixture
def rig() -> Rig:
    made = Rig()
    assert made.fetch() == expected(2)
    assert len(made.subscriber.manifest(2).buckets) == 3
    return made


def flipped(value: bytes, bit: int) -> bytes:
    changed = bytearray(value)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def forged(value: bytes, change: Callable[[dict, bytearray], None]) -> bytes:
    """A bucket with changed content and a right checksum, as a buggy or malicious writer would make it."""
    _, _, body_bytes, _ = wire._PREFIX.unpack_from(value, 0)
    body = bytearray(value[wire.BODY_START : wire.BODY_START + body_bytes])
    directory = msgpack.unpackb(value[wire.BODY_START + body_bytes :])
    change(directory, body)
    return sealed(bytes(body), msgpack.packb(directory))


def sealed(body: bytes, directory: bytes) -> bytes:
    def prefix(checksum: int) -> bytes:
        return wire._PREFIX.pack(wire.MAGIC, checksum, len(body), len(directory))

    rest = prefix(0)[wire.CHECKED_FROM :] + body + directory
    return prefix(xxhash.xxh3_64_intdigest(rest))[: wire.CHECKED_FROM] + rest


# --- buckets


def test_every_single_flipped_bit_of_a_bucket_is_found(rig: Rig) -> None:
    """All of them: prefix, checksum, body, gaps between tensors, directory."""
    value = rig.object(0)
    name = rig.subscriber.manifest(2).bucket_name(0)
    reasons: dict[str, int] = {}
    for bit in range(8 * len(value)):
        with pytest.raises(CorruptWeightsError) as caught:
            wire.open_bucket(np.frombuffer(flipped(value, bit), np.uint8), name)
        reasons[caught.value.reason] = reasons.get(caught.value.reason, 0) + 1
    # The magic is compared, both lengths must add up, all else is the checksum's.
    assert reasons == {"format": 64, "truncated": 128, "checksum": 8 * len(value) - 192}


@pytest.mark.parametrize("bucket", [0, 1, 2])
def test_a_flipped_bit_on_the_relay_stops_the_fetch_before_its_bucket(rig: Rig, bucket: int) -> None:
    rig.replace(bucket, flipped(rig.object(bucket), 8 * (wire.BODY_START + 5)))
    taken = []

    def consume() -> None:
        for key, data in rig.subscriber.fetch(rig.subscriber.manifest(2)):
            assert data.tobytes() == expected(2)[key.tensor]
            taken.append(key.bucket)

    with pytest.raises(CorruptWeightsError) as caught:
        consume()
    assert caught.value.reason == "checksum"
    assert taken == [number for number in (0, 0, 1, 1, 2, 2) if number < bucket]


def test_a_fetch_of_all_gives_nothing_when_the_last_bucket_is_wrong(rig: Rig) -> None:
    rig.replace(2, flipped(rig.object(2), 900))
    got = None
    with pytest.raises(CorruptWeightsError):
        got = list(rig.subscriber.fetch(rig.subscriber.manifest(2)))
    assert got is None


def test_a_bucket_cut_anywhere_is_found(rig: Rig) -> None:
    value, name = rig.object(0), rig.subscriber.manifest(2).bucket_name(0)
    for length in range(len(value)):
        with pytest.raises(CorruptWeightsError) as caught:
            wire.open_bucket(np.frombuffer(value[:length], np.uint8), name)
        assert caught.value.reason == "truncated"


@pytest.mark.parametrize("change", [lambda value: value[:-1], lambda value: value + b"\0", lambda value: b""])
def test_an_object_of_another_size_is_refused_before_memory_is_taken(
    rig: Rig, change: Callable[[bytes], bytes]
) -> None:
    rig.replace(1, change(rig.object(1)))
    manifest = rig.subscriber.manifest(2)
    list(zip(range(2), rig.subscriber.fetch(manifest), strict=False))  # bucket 0 is fine
    acquired = []
    acquire = rig.subscriber._pool.acquire
    rig.subscriber._pool.acquire = lambda size: acquired.append(size) or acquire(size)  # type: ignore[method-assign,func-returns-value]
    assert rig.refused() == "truncated"
    assert len(acquired) == 2  # manifest and bucket 0


def test_a_transfer_that_ends_early_is_refused(rig: Rig) -> None:
    """The buffer still holds the end of what was read into it before: exactly the right bytes, by chance."""
    manifest = rig.subscriber.manifest(2)
    assert len(list(rig.subscriber.fetch(manifest))) == 6

    class Short(RelayTwin):
        def get_into(self, key: str, buffer: memoryview) -> int:
            return super().get_into(key, buffer) - ("/full/1" in key)

    relay = Short()
    relay._shared = rig.relay._shared
    with pytest.raises(CorruptWeightsError) as caught:
        list(Subscriber(ENDPOINT, relay, rig.metadata).fetch(manifest))
    assert caught.value.reason == "truncated"


def test_a_replayed_bucket_of_another_version_is_refused(rig: Rig) -> None:
    """It is intact, of the same size, with the same tensors at the same places: only old."""
    assert len(rig.object(0, version=1)) == len(rig.object(0))
    rig.replace(0, rig.object(0, version=1))
    assert rig.refused() == "identity"


def test_a_bucket_of_another_place_is_refused(rig: Rig) -> None:
    rig.replace(0, rig.object(1))
    assert rig.refused() == "identity"


def test_a_bucket_of_another_job_is_refused(rig: Rig) -> None:
    value = rig.object(0, job="other")
    same_size = forged(rig.object(0), lambda directory, _: directory.update(job="oth"))
    with pytest.raises(CorruptWeightsError) as caught:
        wire.open_bucket(np.frombuffer(value, np.uint8), rig.subscriber.manifest(2).bucket_name(0))
    assert caught.value.reason == "identity"
    rig.replace(0, same_size)
    assert rig.refused() == "identity"


@pytest.mark.parametrize("field", ["epoch", "version", "attempt", "bucket"])
def test_every_part_of_the_identity_counts(rig: Rig, field: str) -> None:
    rig.replace(0, forged(rig.object(0), lambda directory, _: directory.update({field: 77})))
    assert rig.refused() == "identity"


def test_other_content_under_a_right_identity_is_found_by_the_digest(rig: Rig) -> None:
    def change(_: dict, body: bytearray) -> None:
        body[3] ^= 0x40

    rig.replace(2, forged(rig.object(2), change))
    assert rig.refused() == "digest"


def test_swapped_tensors_are_refused(rig: Rig) -> None:
    def rename(directory: dict, _: bytearray) -> None:
        rows = directory["tensors"]
        rows[0][0], rows[1][0] = rows[1][0], rows[0][0]

    rig.replace(0, forged(rig.object(0), rename))
    assert rig.refused() == "layout"


@pytest.mark.parametrize(
    "tensors_of_bucket",
    [
        [["w0", 0, 200], ["w1", 64, 200]],  # overlap
        [["w0", 0, 200], ["w1", 256, 1 << 40]],  # leaves the body
        [["w0", 0, 200], ["w1", -256, 200]],
        [["w0", 0, 200], ["w1", 256, -1]],
        [["w0", 1, 200], ["w1", 256, 200]],  # not aligned
        [["w1", 256, 200], ["w0", 0, 200]],  # not in order
    ],
)
def test_tensors_outside_of_their_place_are_refused_by_the_bucket_itself(rig: Rig, tensors_of_bucket: list) -> None:
    value = forged(rig.object(0), lambda directory, _: directory.update(tensors=tensors_of_bucket))
    with pytest.raises(CorruptWeightsError) as caught:
        wire.open_bucket(np.frombuffer(value, np.uint8), rig.subscriber.manifest(2).bucket_name(0))
    assert caught.value.reason == "layout"
    assert "disagree" not in caught.value.detail


@pytest.mark.parametrize("tensors_of_bucket", [[["w0", 0, 200]], [["w0", 0, 200], ["w1", 256, 199]], []])
def test_a_bucket_that_disagrees_with_the_manifest_is_refused(rig: Rig, tensors_of_bucket: list) -> None:
    value = forged(rig.object(0), lambda directory, _: directory.update(tensors=tensors_of_bucket))
    padding = len(rig.object(0)) - len(value)
    rig.replace(0, forged(value, lambda _, body: body.extend(bytes(padding))))  # so that its size is as published
    assert rig.refused() == "layout"


@pytest.mark.parametrize(
    "directory",
    [
        b"",
        b"\xc1",
        b"\xdd\xff\xff\xff\xff",  # an array of 4 G entries, in five bytes
        b"\xdf\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\x91" * 5000,  # nested too deep
        msgpack.packb([1, 2]),
        msgpack.packb({}) + b"\x01",
    ],
)
def test_a_directory_that_is_not_one_is_refused_without_taking_memory(rig: Rig, directory: bytes) -> None:
    with pytest.raises(CorruptWeightsError) as caught:
        wire.open_bucket(np.frombuffer(sealed(b"", directory), np.uint8), rig.subscriber.manifest(2).bucket_name(0))
    assert caught.value.reason == "format"


@pytest.mark.parametrize("rows", [None, [None], [["w0", 0]], [["w0", 0, True]], [[b"w0", 0, 1]], [["w0", 0.0, 1]], {}])
def test_directory_entries_of_a_wrong_form_are_refused(rig: Rig, rows: object) -> None:
    value = forged(rig.object(0), lambda directory, _: directory.update(tensors=rows))
    with pytest.raises(CorruptWeightsError) as caught:
        wire.open_bucket(np.frombuffer(value, np.uint8), rig.subscriber.manifest(2).bucket_name(0))
    assert caught.value.reason == "format"


def test_random_damage_never_gets_through(rig: Rig) -> None:
    """Any object of the version, any run of bytes replaced: an error, or the right tensors (nothing had changed)."""
    generator = random.Random(0)
    for _ in range(300):
        bucket = generator.choice([0, 1, 2, "manifest"])
        value = bytearray(rig.object(bucket))
        start = generator.randrange(len(value))
        length = generator.randrange(1, 40)
        value[start : start + length] = generator.randbytes(len(value[start : start + length]))
        before = rig.object(bucket)
        rig.replace(bucket, bytes(value))
        try:
            got = rig.fetch()
        except CorruptWeightsError:
            got = expected(2)
        assert got == expected(2)
        rig.replace(bucket, before)


# --- manifests


def decode(encoded: bytes) -> manifests.StoredManifest:
    checksum = manifests.manifest_checksum(encoded)
    return manifests.decode_manifest(memoryview(encoded), checksum, "job", 1, 2, 0)


def rebuilt(encoded: bytes, change: Callable[[dict], None]) -> bytes:
    """A manifest with changed content and a right checksum."""
    data = msgpack.unpackb(encoded[16:])
    change(data)
    payload = msgpack.packb(data)
    return manifests._PREFIX.pack(manifests.MAGIC, xxhash.xxh3_64_intdigest(payload)) + payload


def test_every_single_flipped_bit_of_a_manifest_is_found(rig: Rig) -> None:
    value, checksum = rig.object("manifest"), manifests.manifest_checksum(rig.object("manifest"))
    for bit in range(8 * len(value)):
        with pytest.raises(CorruptWeightsError) as caught:
            manifests.decode_manifest(memoryview(flipped(value, bit)), checksum, "job", 1, 2, 0)
        assert "xxh3-64" in caught.value.detail  # the checksum's finding, not a later check's
    for length in range(16):
        with pytest.raises(CorruptWeightsError, match="prefix"):
            manifests.decode_manifest(memoryview(value[:length]), checksum, "job", 1, 2, 0)


def test_an_intact_manifest_that_was_not_the_published_one_is_refused(rig: Rig) -> None:
    """Same version, same size, its own checksum right: the head record knows better."""
    other = rebuilt(rig.object("manifest"), lambda data: data["shards"][0].__setitem__(0, "w9"))
    assert len(other) == len(rig.object("manifest"))
    assert decode(other).shards[0].tensor == "w9"
    rig.replace("manifest", other)
    assert rig.refused() == "manifest"


@pytest.mark.parametrize(
    ("field", "value"),
    [("job", "other"), ("epoch", 2), ("version", 1), ("attempt", 1), ("kind", "delta"), ("base", 0), ("format", 3)],
)
def test_a_manifest_of_something_else_is_refused(rig: Rig, field: str, value: object) -> None:
    with pytest.raises(CorruptWeightsError, match="wanted"):
        decode(rebuilt(rig.object("manifest"), lambda data: data.update({field: value})))


# Columns of a shard: tensor, dim, start, stop, global_shape, dtype, encoding, bucket, offset, length, digest, stored
@pytest.mark.parametrize(
    ("column", "value"),
    [
        (0, "w1"),  # twice
        (0, ""),
        (0, 5),
        (1, 0),  # a range without length
        (1, 1),
        (1, -2),
        (2, -1),
        (3, 7),
        (3, True),
        (6, "delta"),  # this reader has no codec
        (6, ""),
        (6, 1),
        (4, [101]),  # 200 B are not 101 bfloat16
        (4, [-100]),
        (4, [1] * 16 + [100]),
        (4, 100),
        (5, "float32"),
        (5, None),
        (7, 3),
        (7, -1),
        (7, True),
        (8, -64),
        (8, 1 << 60),
        (9, 1 << 60),
        (9, -1),
        (9, 198),
        (10, -1),
        (10, 1 << 63),  # the stored bytes are the shard's own: one digest
        (11, 1 << 63),
        (11, None),
    ],
)
def test_a_shard_that_cannot_be_is_refused(rig: Rig, column: int, value: object) -> None:
    encoded = rebuilt(rig.object("manifest"), lambda data: data["shards"][0].__setitem__(column, value))
    with pytest.raises(CorruptWeightsError) as caught:
        decode(encoded)
    assert caught.value.reason == "manifest"


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data.update(bytes=data["bytes"] + 1),
        lambda data: data.update(bytes=float(data["bytes"])),
        lambda data: data.update(buckets=[10, *data["buckets"][1:]]),
        lambda data: data.update(buckets=[]),
        lambda data: data.update(shards=5),
        lambda data: data["shards"][0].append(1),
        lambda data: data["shards"][1].__setitem__(8, 0),  # overlaps the tensor before it
        lambda data: data.pop("buckets"),
        lambda data: data.update(base_content=1),  # of a full snapshot
        lambda data: data["shards"].append(data["shards"][0]),
    ],
)
def test_a_manifest_that_contradicts_itself_is_refused(rig: Rig, change: Callable[[dict], None]) -> None:
    with pytest.raises(CorruptWeightsError) as caught:
        decode(rebuilt(rig.object("manifest"), change))
    assert caught.value.reason == "manifest"


def test_an_absurd_manifest_size_is_refused_before_memory_is_taken(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    def grow(head: heads.JobHead) -> heads.JobHead:
        *others, last = head.published
        size = manifests.MAX_MANIFEST_BYTES + 1
        larger = heads.PublishedVersion(last.attempt, size, last.manifest_checksum)
        return heads.JobHead(
            **{**{name: getattr(head, name) for name in head.__slots__}, "published": (*others, larger)}
        )

    update_head(rig.metadata, "job", grow)
    monkeypatch.setattr(rig.relay, "size", lambda _: manifests.MAX_MANIFEST_BYTES + 1)
    monkeypatch.setattr(buffers_module.BufferPool, "acquire", lambda *_: pytest.fail("memory was taken"))
    assert rig.refused() == "manifest"
