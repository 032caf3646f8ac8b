"""The cache of a site: a version comes over the slow link once, and nothing of what readers are promised is lost by it."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from orchestrator.api import ConfigError
from orchestrator.config import Config
from orchestrator.transfer import (
    CorruptWeightsError,
    DeltaCodec,
    HostedWeights,
    Publisher,
    RelayEndpoint,
    RelayError,
    Subscriber,
    proven_link,
    site_cache,
    site_relay,
)
from orchestrator.transfer.proven_link import LinkRefused
from orchestrator.transfer.publisher import Shard
from orchestrator.transfer.shard_routing import Region
from orchestrator.transfer.site_cache import SiteCache
from orchestrator.transfer.site_relay import TOKEN_FILE
from tests.support.transfer_twins import Weights, cut, shards, whole
from tests.support.waiting import wait_for

TOKEN = "of-the-site-0123456789"


class Far:
    """A relay of files, a publisher, and a site with a cache."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.endpoint = RelayEndpoint(
            "job", "fsspec", f"file://{folder}/relay", f"{folder}/metadata.sqlite", bucket_bytes=1 << 16, **settings
        )
        self.token = folder / "token"
        self.token.write_text(TOKEN)
        self.cache = SiteCache(f"file:{self.token}")
        self.publisher = Publisher(self.endpoint, codec=DeltaCodec())
        self.publisher.rollback(0)
        self.model: Weights = {}

    @property
    def there(self) -> RelayEndpoint:
        return replace(self.endpoint, cache=self.cache.place)

    @property
    def job(self) -> site_cache.CachedJob:
        (found,) = self.cache._jobs.values()
        return found

    def subscriber(self) -> Subscriber:
        return Subscriber(self.there, codec=DeltaCodec())

    def shards(self, old: Weights | None = None) -> list[Shard]:
        return list(shards(cut(self.model, 1, 4)[0], self.model, old))

    def publish(self, version: int, base: int = -1, seed: int | None = None) -> None:
        """A model in several buckets; a difference of 1 % to the one before."""
        old = self.model
        generator = np.random.default_rng(version if seed is None else seed)
        if base < 0:
            self.model = {f"w{i}": generator.integers(0, 1 << 16, (64, 512), np.uint16) for i in range(6)}
        else:
            self.model = {name: values.copy() for name, values in old.items()}
            for values in self.model.values():
                values.flat[generator.integers(0, values.size, values.size // 100)] += 1
        self.publisher.publish_shards(version, self.shards(old if base >= 0 else None), base)

    def on_relay(self, kind: str = "") -> int:
        return sum(file.stat().st_size for file in self.token.parent.glob(f"relay/rlc/job/*/*/{kind or '*'}/*"))


@pytest.fixture
def far(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Far]:
    monkeypatch.setenv(TOKEN_FILE, str(tmp_path / "token"))
    site = Far(tmp_path)
    yield site
    site.publisher.close()
    site.cache.close()


def read(subscriber: Subscriber, version: int) -> dict[str, bytes]:
    parts: dict[str, list[tuple[int, bytes]]] = {}
    for key, data in subscriber.fetch(subscriber.manifest(version)):
        parts.setdefault(key.tensor, []).append((key.start, data.tobytes()))
    return {name: b"".join(data for _, data in sorted(found)) for name, found in parts.items()}


def test_two_readers_get_the_version_and_it_was_fetched_once(far: Far) -> None:
    readers = [far.subscriber() for _ in range(2)]
    far.publish(1)
    for reader in readers:
        assert read(reader, 1) == whole(far.model)
        assert reader.past_cache() == ""
    assert far.job.pulled_bytes == far.on_relay()
    regions = [Region("w3", ((0, 64), (0, 512)))]  # of a reader that hosts a part: in ranges
    (found,) = readers[0].fetch_regions(readers[0].manifest(1), regions)
    assert found[1].tobytes() == far.model["w3"].tobytes()
    assert far.job.pulled_bytes == far.on_relay()


def test_buckets_come_while_the_version_is_still_pushed(far: Far) -> None:
    reader, go = far.subscriber(), threading.Event()
    far.publish(1)
    far.model = {name: values + 1 for name, values in far.model.items()}

    def slowly() -> Iterator[Shard]:
        given = far.shards()
        yield from given[:-1]
        assert go.wait(20)
        yield given[-1]

    pushing = threading.Thread(target=lambda: far.publisher.publish_shards(2, slowly()))
    before = far.on_relay()
    pushing.start()
    wait_for(lambda: far.job.pulled_bytes > before + 3 * far.endpoint.bucket_bytes)
    assert reader.latest_version() == 1
    go.set()
    pushing.join(20)
    assert read(reader, 2) == whole(far.model)
    assert reader.past_cache() == ""


def test_the_next_bucket_is_on_its_way_while_one_is_verified(far: Far, monkeypatch: pytest.MonkeyPatch) -> None:
    reader, checked, meanwhile = far.subscriber(), threading.Event(), threading.Event()
    whole_one, transfer = site_cache.is_whole, site_cache._Pull._transfer
    begun: list[str] = []

    def verify(buffer: Any) -> bool:
        if not checked.is_set():  # the first one
            checked.set()
            meanwhile.wait(10)
        return whole_one(buffer)

    def carry(pull: Any, key: str, buffer: Any) -> Any:
        begun.append(key)
        if checked.is_set():
            meanwhile.set()
        return transfer(pull, key, buffer)

    monkeypatch.setattr(site_cache, "is_whole", verify)
    monkeypatch.setattr(site_cache._Pull, "_transfer", carry)
    far.publish(1)
    assert read(reader, 1) == whole(far.model)
    assert meanwhile.is_set()
    assert len(begun) == len(set(begun))


def test_a_difference_is_fetched_and_the_snapshot_beside_it_only_for_who_comes_late(far: Far) -> None:
    holder = HostedWeights(far.subscriber(), None, DeltaCodec())
    far.publish(0)
    holder.advance(0)
    whole_bytes = far.job.pulled_bytes
    far.publish(1, base=0)
    far.publisher.publish_shards(1, far.shards())
    holder.advance(1)
    assert far.job.pulled_bytes - whole_bytes < whole_bytes / 10
    assert read(far.subscriber(), 1) == whole(far.model)
    assert far.job.pulled_bytes > 2 * whole_bytes - 1000


def test_it_holds_what_the_relay_has_and_no_more(far: Far) -> None:
    reader = far.subscriber()
    for version in range(6):
        far.publish(version)
        assert read(reader, version) == whole(far.model)
    far.publisher.collect_garbage()
    wait_for(lambda: far.job.held_bytes <= far.on_relay())
    assert far.job.held_bytes > far.on_relay() / 3
    far.publisher.rollback(0)
    wait_for(lambda: far.job.held_bytes == 0)


def test_a_cache_that_is_gone_is_passed_by_said_and_counted_and_used_again_when_it_is_back(
    far: Far, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = far.subscriber()
    far.publish(1)
    port = proven_link.parse_place(far.cache.place)[1]
    far.cache.close()
    with caplog.at_level(logging.WARNING):
        assert read(reader, 1) == whole(far.model)
    assert "objects came from the relay itself" in reader.past_cache()
    assert reader.past_cache() == "", "said once"
    assert len([record for record in caplog.records if "passed by" in record.message]) == 1
    far.cache = SiteCache(f"file:{far.token}", port=port)
    monkeypatch.setattr(reader._relay, "_until", 0.0)
    assert read(reader, 1) == whole(far.model)
    assert reader.past_cache() == ""
    assert far.job.pulled_bytes == far.on_relay()


def test_a_cache_that_is_gone_from_the_start_is_no_error(far: Far) -> None:
    endpoint = far.there
    far.cache.close()
    far.publish(1)
    reader = Subscriber(endpoint)
    assert read(reader, 1) == whole(far.model)
    assert "unreachable" in reader.past_cache()


def test_what_the_cache_has_wrong_is_read_again_from_the_relay(far: Far) -> None:
    reader = far.subscriber()
    far.publish(1)
    assert read(reader, 1) == whole(far.model)
    for key, data in far.job._objects.items():
        if "manifest" not in key:
            data.flags.writeable = True
            data[len(data) // 2] ^= 1
    assert read(reader, 1) == whole(far.model)
    assert "what it had was wrong" in reader.past_cache()


def test_a_bucket_that_is_damaged_on_the_relay_is_not_handed_on(far: Far) -> None:
    far.publish(1)
    file = next(far.token.parent.glob("relay/rlc/job/*/1/full/2"))
    data = bytearray(file.read_bytes())
    data[1000] ^= 1
    file.write_bytes(data)
    with pytest.raises(CorruptWeightsError):
        read(far.subscriber(), 1)
    assert not [key for key in far.job._objects if key.endswith("/2")]


def test_a_reader_with_another_token_is_told_so_before_anything_is_read(
    far: Far, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "other").write_text("another-token-0123456789")
    monkeypatch.setenv(TOKEN_FILE, str(tmp_path / "other"))
    with pytest.raises(ConfigError, match="another token"):
        far.subscriber()
    assert not far.cache._jobs
    monkeypatch.setenv(TOKEN_FILE, "")
    with pytest.raises(ConfigError, match=TOKEN_FILE):
        far.subscriber()


@pytest.mark.parametrize(
    "asked",
    [
        {"what": "read", "key": "rlc/job/1/1/full/../../../../../token"},
        {"what": "read", "key": "rlc/other/1/1/full/0"},
        {"what": "remove", "key": "rlc/job/1/1/full/0"},
        {"what": "read", "key": "rlc/job/1/1/full/0", "ranges": [[0, 1 << 40]]},
        {"what": "read", "key": "rlc/job/1/1/full/0", "ranges": [["a", 1]]},
        {"what": "read", "key": 7},
        {"what": "look", "endpoint": {"job": 7}},
        {"what": "look", "endpoint": None},
        {"what": "look", "protocol": 2},
    ],
)
def test_who_has_the_token_reads_objects_of_the_relay_and_nothing_else(far: Far, asked: dict[str, Any]) -> None:
    far.publish(1)
    header = {"protocol": 1, "endpoint": far.endpoint.to_dict(), **asked}
    with pytest.raises(LinkRefused) as refused:
        proven_link.connect(far.cache.place, 20.0, lambda stream: stream.ask(TOKEN, header))
    assert refused.value.reason in ("malformed", "protocol")
    assert read(far.subscriber(), 1) == whole(far.model)


def test_an_object_that_is_not_there_is_missing_and_not_waited_for(far: Far) -> None:
    far.publish(1)
    relay = far.subscriber()._relay
    assert relay.size("rlc/job/1/9/full/0") == -1


def test_jobs_that_nobody_asks_for_are_forgotten(far: Far, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(site_cache.JOBS + 2):
        site_relay.SiteRelay(_Nothing(), far.cache.place, replace(far.endpoint, job=f"job{number}").to_dict())
    assert len(far.cache._jobs) == site_cache.JOBS
    monkeypatch.setattr(site_cache, "IDLE_SECONDS", -1.0)
    far.subscriber()
    assert [endpoint.job for endpoint in far.cache._jobs] == ["job"]


def test_what_nobody_asks_for_any_more_is_dropped_without_another_question(
    far: Far, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last run of a site has ended, and its head still names versions."""
    far.publish(1)
    assert read(far.subscriber(), 1) == whole(far.model)
    job = far.job
    assert job.held_bytes > 0
    monkeypatch.setattr(site_cache, "IDLE_SECONDS", 0.1)
    wait_for(lambda: not job._thread.is_alive())
    assert job.held_bytes == 0
    assert not job._objects
    monkeypatch.undo()
    monkeypatch.setenv(TOKEN_FILE, str(far.token))
    reader = far.subscriber()
    assert read(reader, 1) == whole(far.model)
    assert not reader.past_cache()
    assert far.job is not job


def test_a_relay_that_cannot_be_opened_costs_nothing_however_often_it_is_tried(
    far: Far, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[_Counted] = []

    class _Counted:
        closed = False

        def close(self) -> None:
            self.closed = True

    def metadata(endpoint: RelayEndpoint) -> _Counted:
        opened.append(_Counted())
        return opened[-1]

    def away(endpoint: RelayEndpoint) -> None:
        raise RelayError("unreachable", "no master")

    monkeypatch.setattr(site_cache, "AWAY_SECONDS", 0.01)
    monkeypatch.setattr(site_cache, "open_metadata", metadata)
    monkeypatch.setattr(site_cache, "open_relay", away)
    site_relay.SiteRelay(_Nothing(), far.cache.place, far.endpoint.to_dict())
    wait_for(lambda: len(opened) > 5)
    assert len([one for one in opened if not one.closed]) <= 1


class _Nothing:
    def put(self, key: str, data: memoryview) -> None: ...
    def get_into(self, key: str, buffer: memoryview) -> int:
        return 0

    def size(self, key: str) -> int:
        return -1

    def remove(self, key: str) -> bool:
        return True

    def close(self) -> None: ...


def test_the_command_serves_a_site_until_it_is_told_to_end(far: Far) -> None:
    command = [sys.executable, "-m", "orchestrator.cli", "site-cache", "--token-file", str(far.token)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        place = json.loads(process.stdout.readline())["place"]
        far.publish(1)
        reader = Subscriber(replace(far.endpoint, cache=place))
        assert read(reader, 1) == whole(far.model)
        assert reader.past_cache() == ""
        process.terminate()
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.wait()
    assert read(reader, 1) == whole(far.model)
    assert "unreachable" in reader.past_cache()


def test_a_cache_of_a_network_has_tls_unless_that_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="tls"):
        SiteCache(TOKEN, "0.0.0.0")
    SiteCache(TOKEN, "0.0.0.0", allow_plain=True).close()


SITE = {"workers": ["vllm-1"]}


@pytest.mark.parametrize(
    ("sites", "more", "field"),
    [
        ({"far": {"workers": ["vllm-7"]}}, {}, "relay.sites.far.workers"),
        ({"far": {"workers": ["http://127.0.0.1:9"], "cache": "far:1"}}, {}, "relay.sites.far.workers"),
        ({"far": {"workers": []}}, {}, "relay.sites.far.workers"),
        ({"far": SITE, "near": SITE}, {}, "relay.sites.near.workers"),
        ({"far": {"workers": ["http://127.0.0.1:9"]}}, {}, "relay.sites.far.cache"),
        ({"far": {**SITE, "cache": "nowhere"}}, {}, "relay.sites.far.cache"),
        ({"far": SITE}, {"ray": {"address": "auto"}}, "relay.sites.far.cache"),
        ({"far": {**SITE, "link": "x"}}, {}, "relay.sites.far.link"),
        ({"far": {**SITE, "label": "x"}}, {}, "relay.sites.far.label"),
        ({"far": {"label": "rack=2"}, "near": {"label": "rack=2"}}, {}, "relay.sites.near.label"),
    ],
)
def test_a_site_that_cannot_be_is_one_error(sites: dict[str, Any], more: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as error:
        Config.from_dict({"rollout": {"workers": 2}, "relay": {"sites": sites}, **more})
    assert error.value.field == field
