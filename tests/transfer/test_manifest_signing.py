"""Signed versions: what somebody else put on the relay, or in the head record, is refused; the run goes on with its own."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import xxhash

from orchestrator.api import ConfigError, ShardKey
from orchestrator.config import parse_config
from orchestrator.transfer import (
    CorruptWeightsError,
    DeltaCodec,
    MemoryMetadata,
    Publisher,
    RelayEndpoint,
    Subscriber,
    manifest_signing,
)
from orchestrator.transfer import job_head as heads
from orchestrator.transfer import manifest as manifests
from orchestrator.transfer.filesystem_relay import FsspecRelay
from tests.support.relay_twin import RelayTwin

pytest.importorskip("cryptography")
SHAPE = (4000,)
KEY = ShardKey("w", -1, 0, 0, SHAPE, "bfloat16", "raw", 0)


def private_key(folder: Path, name: str = "key") -> Path:
    """As docs/security.md says: with openssl."""
    file = folder / f"{name}.pem"
    subprocess.run(["openssl", "genpkey", "-algorithm", "ed25519", "-out", str(file)], check=True, capture_output=True)
    file.chmod(0o600)
    return file


def values(version: int) -> np.ndarray:
    base = np.random.default_rng(1).integers(0, 1 << 16, SHAPE, dtype=np.uint16)
    base[: 100 * version] ^= 1
    return base.view(np.uint8)


class Job:
    """One publisher, one subscriber, and a relay that others write to."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        key = private_key(folder)
        monkeypatch.setenv(manifest_signing.KEY_FILE, str(key))
        self.endpoint = RelayEndpoint(
            job="job",
            kind="memory",
            master="x",
            bucket_bytes=4096,
            snapshot_every=4,
            verify_key=manifest_signing.Signer(str(key)).verify_key,
        )
        self.relay, self.metadata = RelayTwin(None), MemoryMetadata()
        self.publisher = Publisher(self.endpoint, self.relay, self.metadata, codec=DeltaCodec())
        self.subscriber = self.reader()

    def reader(self, endpoint: RelayEndpoint | None = None) -> Subscriber:
        return Subscriber(endpoint or self.endpoint, self.relay, self.metadata, codec=DeltaCodec())

    def publish(self, version: int, base: int = heads.FULL) -> None:
        old = None if base == heads.FULL else values(base)
        self.publisher.publish_shards(version, [(KEY, values(version), old)], base)

    def head(self) -> heads.JobHead:
        found = self.metadata.get(heads.head_key("job"))
        assert found is not None
        return heads.decode_head(found[0])

    def set_head(self, head: heads.JobHead) -> None:
        found = self.metadata.get(heads.head_key("job"))
        assert found is not None
        assert self.metadata.compare_and_set(heads.head_key("job"), heads.encode_head(head), found[1])

    def object(self, key: str) -> bytes:
        data = bytearray(self.relay.size(key))
        self.relay.get_into(key, memoryview(data))
        return bytes(data)


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    return Job(tmp_path, monkeypatch)


def fetched(subscriber: Subscriber, version: int) -> bytes:
    ((_, data),) = subscriber.fetch(subscriber.manifest(version))
    return data.tobytes()


def test_a_signed_snapshot_and_signed_differences_arrive(job: Job) -> None:
    job.publish(0)
    assert fetched(job.subscriber, 0) == values(0).tobytes()
    job.publish(1, base=0)
    full, change = job.subscriber.chain(1)
    assert [len(item) for item in (full.sha256, change.sha256)] == [len(full.buckets), len(change.buckets)]
    assert {number for number, _ in job.subscriber.fetch_shards(change, [0])} == {0}


def test_a_forged_bucket_whose_checksums_all_fit_is_refused_and_the_next_version_arrives(job: Job) -> None:
    """The forger writes weights of his own under the keys of a version, with every checksum and the head record made anew:
    without a signature that is taken, with one it is not."""
    job.publish(0)
    assert fetched(job.subscriber, 0) == values(0).tobytes()
    job.publish(1)
    forger = Publisher(replace(job.endpoint, verify_key=""), forged := RelayTwin(None), other := MemoryMetadata())
    evil = values(1).copy()
    evil[:] = 7
    for version in (0, 1):
        forger.publish_shards(version, [(KEY, evil if version else values(0), None)])
    honest = {name: job.object(name) for name in job.relay.keys()}  # noqa: SIM118
    honest_head = job.head()
    for name in forged.keys():  # noqa: SIM118
        data = bytearray(forged.size(name))
        forged.get_into(name, memoryview(data))
        job.relay.tamper(name, bytes(data))
    theirs = other.get(heads.head_key("job"))
    assert theirs is not None
    job.set_head(heads.decode_head(theirs[0]))
    unsigned = job.reader(replace(job.endpoint, verify_key=""))
    assert fetched(unsigned, 1) == evil.tobytes()  # the attack works where nothing is signed
    with pytest.raises(CorruptWeightsError, match="not signed") as error:
        job.subscriber.manifest(1)
    assert error.value.reason == "signature"
    # The manifest is the true one, a bucket is not.
    bucket = next(name for name in honest if "/1/full/0" in name)
    for name, data in honest.items():
        if name != bucket:
            job.relay.tamper(name, data)
    job.set_head(honest_head)
    manifest = job.subscriber.manifest(1)
    with pytest.raises(CorruptWeightsError):
        list(job.subscriber.fetch(manifest))
    job.publish(2)  # the run goes on
    assert fetched(job.subscriber, 2) == values(2).tobytes()


def test_a_bucket_that_was_changed_with_its_own_checksum_and_digests_fitting_is_refused_by_its_sha256(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """xxh3 is no cryptographic digest: suppose that somebody found a bucket with the same one."""
    job.publish(0)
    bucket = next(name for name in job.relay.keys() if name.endswith("/full/0"))  # noqa: SIM118
    data = bytearray(job.object(bucket))
    data[200] ^= 1
    job.relay.tamper(bucket, bytes(data))
    monkeypatch.setattr("orchestrator.transfer.subscriber.open_bucket", lambda *_: pytest.fail("it was opened"))
    with pytest.raises(CorruptWeightsError, match="not what was signed"):
        list(job.subscriber.fetch(job.subscriber.manifest(0)))


@pytest.mark.parametrize("place", [0, 8, 71, 72, 90, -1])
def test_a_flipped_bit_anywhere_in_a_signed_manifest_is_refused(job: Job, place: int) -> None:
    job.publish(0)
    name = next(name for name in job.relay.keys() if "manifest" in name)  # noqa: SIM118
    data = bytearray(job.object(name))
    data[place] ^= 1
    job.relay.tamper(name, bytes(data))
    with pytest.raises(CorruptWeightsError) as error:
        job.subscriber.manifest(0)
    assert error.value.reason == "signature"


def test_an_older_signed_version_or_history_is_not_brought_back(job: Job) -> None:
    job.publish(0)
    old_head = job.head()
    kept = {name: job.object(name) for name in job.relay.keys()}  # noqa: SIM118
    job.publish(1)
    assert fetched(job.subscriber, 1) == values(1).tobytes()
    # The store says again what it said before: the older version is the newest one.
    for name, data in kept.items():
        job.relay.tamper(name, data)
    newer = job.head()
    job.set_head(old_head)
    for ask in (lambda: job.subscriber.manifest(0), lambda: job.subscriber.chain(0)):
        with pytest.raises(CorruptWeightsError) as error:
            ask()
        assert error.value.reason == "replayed"
    # The old version under the new one's number: the signature is of another version.
    published = replace(old_head.published[0], attempt=newer.published[-1].attempt)
    job.set_head(replace(newer, published=(published,)))
    name = newer.published[-1].attempt.manifest_key("job")
    job.relay.tamper(name, kept[old_head.published[0].attempt.manifest_key("job")])
    with pytest.raises(CorruptWeightsError, match="manifest"):
        job.subscriber.manifest(1)
    # A rollback of the run is no replay: its epoch is newer. And the run goes on.
    job.set_head(newer)
    job.publisher.rollback(0)
    job.publish(0)
    assert fetched(job.subscriber, 0) == values(0).tobytes()


def test_another_key_is_refused(job: Job, tmp_path: Path) -> None:
    job.publish(0)
    other = manifest_signing.Signer(str(private_key(tmp_path, "other")))
    with pytest.raises(CorruptWeightsError, match="not signed by the job's key"):
        job.reader(replace(job.endpoint, verify_key=other.verify_key)).manifest(0)
    with pytest.raises(ConfigError, match="is not the private key of the job's public key"):
        Publisher(replace(job.endpoint, verify_key=other.verify_key), job.relay, job.metadata)


def test_a_key_that_cannot_be_used_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key = private_key(tmp_path)
    public = manifest_signing.Signer(str(key)).verify_key
    key.chmod(0o644)
    with pytest.raises(ConfigError, match="can be read by others"):
        manifest_signing.Signer(str(key))
    rubbish = tmp_path / "rubbish"
    rubbish.write_text("no key")
    rubbish.chmod(0o600)
    for file, words in ((rubbish, "does not hold a private key"), (tmp_path / "none", "cannot be read")):
        with pytest.raises(ConfigError, match=words):
            manifest_signing.Signer(str(file))
    monkeypatch.delenv(manifest_signing.KEY_FILE, raising=False)
    with pytest.raises(ConfigError, match=r"relay\.signing_key"):
        manifest_signing.signer_of(public)
    with pytest.raises(ConfigError, match=r"relay\.verify_key"):
        RelayEndpoint(job="x", kind="memory", verify_key="abc")
    with pytest.raises(ConfigError, match="sends weights unsigned"):
        parse_config({"relay": {"signing_key": "key.pem"}, "rollout": {"weights": "collective"}})


def test_signed_versions_travel_over_files_too(job: Job, tmp_path: Path) -> None:
    relay = FsspecRelay(f"file://{tmp_path}/relay")
    metadata = MemoryMetadata()
    Publisher(job.endpoint, relay, metadata, codec=DeltaCodec()).publish_shards(0, [(KEY, values(0), None)])
    assert fetched(Subscriber(job.endpoint, relay, metadata, codec=DeltaCodec()), 0) == values(0).tobytes()
    (file,) = (tmp_path / "relay").rglob("manifest*")
    encoded = file.read_bytes()[manifest_signing.OVERHEAD :]
    assert manifests.manifest_checksum(encoded) == xxhash.xxh3_64_intdigest(encoded[16:])
