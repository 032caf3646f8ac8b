"""The relay on a file system: objects are written once, whole or not at all, and errors have names."""

from __future__ import annotations

import builtins
import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from orchestrator.api import ConfigError
from orchestrator.transfer import (
    CorruptWeightsError,
    MemoryMetadata,
    MemoryRelay,
    Publisher,
    RelayEndpoint,
    RelayError,
    Subscriber,
    open_relay,
)
from orchestrator.transfer import subscriber as subscribers
from orchestrator.transfer.filesystem_relay import FsspecRelay
from orchestrator.transfer.registered_buffers import RemovingRelay
from orchestrator.transfer.shard_routing import Region, whole_box
from tests.support import transfer_twins as twins

fsspec = pytest.importorskip("fsspec")


@pytest.fixture(params=["file", "memory"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "file":
        yield f"file://{tmp_path}/relay"
        return
    yield "memory://relay/of/a/test"
    memory = fsspec.filesystem("memory")
    if memory.exists("/relay"):
        memory.rm("/relay", recursive=True)


def reason(action: Any, *arguments: Any) -> str:
    with pytest.raises(RelayError) as caught:
        action(*arguments)
    return caught.value.reason


# The twin gives the same answers.
@pytest.mark.parametrize("kind", ["fsspec", "twin"])
def test_what_a_relay_promises(url: str, kind: str) -> None:
    relay = FsspecRelay(url) if kind == "fsspec" else MemoryRelay()
    assert relay.size("a/b/1") == -1
    assert relay.remove("a/b/1") is True
    relay.put("a/b/1", memoryview(b"first value"))
    relay.put("a/b/empty", memoryview(b""))
    assert reason(relay.put, "a/b/1", memoryview(b"second")) == "exists"
    assert (relay.size("a/b/1"), relay.size("a/b/empty")) == (11, 0)
    buffer = bytearray(20)
    assert relay.get_into("a/b/1", memoryview(buffer)) == 11
    assert bytes(buffer[:12]) == b"first value\0"
    assert reason(relay.get_into, "a/b/1", memoryview(bytearray(10))) == "buffer"
    assert reason(relay.get_into, "a/b/2", memoryview(buffer)) == "missing"
    assert relay.get_ranges("a/b/1", [(6, 5, 0), (0, 2, 8)], memoryview(buffer)) == 7
    assert bytes(buffer[:10]) == b"value valufi"[:8] + b"fi"
    assert reason(relay.get_ranges, "a/b/2", [(0, 1, 0)], memoryview(buffer)) == "missing"
    assert reason(relay.get_ranges, "a/b/1", [(0, 11, 10)], memoryview(buffer)) == "buffer"
    assert relay.remove("a/b/1") is True
    assert relay.size("a/b/1") == -1
    relay.close()
    relay.close()
    assert reason(relay.size, "a/b/empty") == "closed"


def test_versions_travel_through_a_file_system(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subscribers, "RANGES_SAVE", 100)
    endpoint = RelayEndpoint(job="job", kind="fsspec", master=url, bucket_bytes=4096)
    metadata = MemoryMetadata()
    publisher, subscriber = Publisher(endpoint, metadata=metadata), Subscriber(endpoint, metadata=metadata)
    model = twins.weights(0)
    for version in range(4):
        model = twins.weights(version)
        publisher.publish_shards(version, twins.shards(twins.cut(model, 1)[0], model))
    got = subscriber.fetch_regions(subscriber.manifest(3), [Region(n, whole_box(v.shape)) for n, v in model.items()])
    assert {region.tensor: data.tobytes() for region, data in got} == twins.whole(model)
    [(_, few)] = subscriber.fetch_regions(subscriber.manifest(3), [Region("norm", ((0, 16),))])
    assert np.array_equal(few.view(np.uint16), model["norm"][:16])
    assert publisher.collect_garbage() == 0
    fs, root = fsspec.core.url_to_fs(url)
    left = {path.split("/job/1/")[1].split("/")[0] for path in fs.find(root)}
    assert left == {"2", "3"}
    broken = next(path for path in fs.find(root) if "/3/full/0" in path)
    fs.pipe_file(broken, fs.cat_file(broken)[:-1] + b"\xff")
    with pytest.raises(CorruptWeightsError):
        list(subscriber.fetch(subscriber.manifest(3)))


# --- on a real file system


@pytest.fixture
def local(tmp_path: Path) -> FsspecRelay:
    return FsspecRelay(f"file://{tmp_path}")


def test_of_many_writers_of_a_key_one_wins_and_its_object_is_whole(local: FsspecRelay, tmp_path: Path) -> None:
    """The check before writing is switched off: what decides is the file system."""
    values = [bytes([number]) * 300_000 for number in range(8)]
    outcomes: list[str] = []
    start = threading.Barrier(len(values))

    def write(value: bytes) -> None:
        relay = FsspecRelay(f"file://{tmp_path}")
        relay._fs = type("Blind", (), {"exists": lambda *_: False})()
        start.wait()
        try:
            relay.put("k", memoryview(value))
            outcomes.append("written")
        except RelayError as error:
            outcomes.append(error.reason)

    threads = [threading.Thread(target=write, args=(value,)) for value in values]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) == ["exists"] * 7 + ["written"]
    assert (tmp_path / "k").read_bytes() in values
    assert [path.name for path in tmp_path.iterdir()] == ["k"]


def test_a_write_that_breaks_off_leaves_no_object(
    local: FsspecRelay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(os, "link", full)
    assert reason(local.put, "a/k", memoryview(b"value")) == "relay_full"
    assert local.size("a/k") == -1
    assert list((tmp_path / "a").iterdir()) == []


def test_what_a_killed_writer_left_goes_with_the_object(local: FsspecRelay, tmp_path: Path) -> None:
    local.put("a/k", memoryview(b"value"))
    for name in (".k.tmp", ".k2.tmp"):
        (tmp_path / "a" / name).write_bytes(b"half")
    local.remove("a/k")
    assert [path.name for path in (tmp_path / "a").iterdir()] == [".k2.tmp"]


def test_removing_thousands_of_objects_looks_through_no_folder(
    local: FsspecRelay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 235 billion parameters a version has seven thousand, and a look at a folder of them for each took 78 s."""
    keys = [f"a/1/full/{number}" for number in range(40)]
    for key in keys:
        local.put(key, memoryview(b"value"))

    def look(*_: Any) -> None:
        raise AssertionError("a folder is looked through")

    for name in ("scandir", "listdir"):
        monkeypatch.setattr(os, name, look)
    assert isinstance(local, RemovingRelay)
    assert local.remove_all(keys)
    monkeypatch.undo()
    assert list(tmp_path.iterdir()) == []


def test_empty_folders_go_and_a_writer_that_loses_its_folder_makes_it_again(
    local: FsspecRelay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    local.put("a/1/full/0", memoryview(b"value"))
    local.put("a/2/full/0", memoryview(b"value"))
    local.remove("a/1/full/0")
    local.remove("a/1/full/manifest")
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == ["2"]
    link, left = os.link, [2]

    def collected(source: Path, target: Path) -> None:
        if left[0]:
            left[0] -= 1
            source.unlink()
            source.parent.rmdir()
        link(source, target)

    monkeypatch.setattr(os, "link", collected)
    local.put("a/3/0", memoryview(b"value"))
    assert local.size("a/3/0") == 5
    local.remove("a/3/0")
    local.remove("a/2/full/0")
    assert list(tmp_path.iterdir()) == []


def test_a_file_system_without_hard_links_will_do(
    local: FsspecRelay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOTSUP, "no links")

    monkeypatch.setattr(os, "link", refuse)
    local.put("k", memoryview(b"value"))
    assert (tmp_path / "k").read_bytes() == b"value"
    assert reason(local.put, "k", memoryview(b"other")) == "exists"


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (PermissionError("no"), "setup"),
        (TimeoutError("slow"), "unreachable"),
        (OSError(errno.EDQUOT, "quota"), "relay_full"),
        (OSError(errno.EIO, "disk"), "transfer"),
        (FileNotFoundError("gone"), "missing"),
    ],
)
def test_every_error_of_the_store_has_a_name(local: FsspecRelay, error: OSError, expected: str) -> None:
    class Failing:
        def __getattr__(self, name: str) -> Any:
            def call(*_: Any, **__: Any) -> None:
                raise error

            return call

    local._fs, local._local = Failing(), False
    assert reason(local.get_into, "k", memoryview(bytearray(4))) == expected
    assert reason(local.put, "k", memoryview(b"value")) == expected
    if expected == "missing":
        assert local.size("k") == -1
        assert local.remove("k") is True


# --- the endpoint


def test_a_wrong_url_is_a_configuration_error(monkeypatch: pytest.MonkeyPatch) -> None:
    for master in ("", "/mnt/relay", "host:80", "file://"):
        with pytest.raises(ConfigError) as caught:
            RelayEndpoint(job="j", kind="fsspec", master=master)
        assert caught.value.field == "relay.master"
    with pytest.raises(ConfigError, match="fsspec cannot open it"):
        open_relay(RelayEndpoint(job="j", kind="fsspec", master="nosuch://x"))
    real = builtins.__import__

    def without(name: str, *arguments: Any, **options: Any) -> Any:
        if name == "fsspec":
            raise ImportError(name)
        return real(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ConfigError, match="pip install"):
        FsspecRelay("memory://x")
