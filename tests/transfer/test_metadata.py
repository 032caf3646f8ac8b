"""The metadata store: compare-and-set is atomic, in one process and among processes."""

from __future__ import annotations

import asyncio
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from orchestrator.api import ConfigError, MetadataStore, RetryableError
from orchestrator.config import load_config
from orchestrator.run_folder import RunFolder
from orchestrator.runtime.real_run import _Assembly
from orchestrator.transfer import RelayEndpoint, RelayError, SqliteMetadata, open_metadata

Open = Callable[[], MetadataStore]


def test_a_key_is_created_only_once(open_store: Open) -> None:
    first, second = open_store(), open_store()
    assert first.get("k") is None
    assert first.compare_and_set("k", b"mine", 0)
    assert not second.compare_and_set("k", b"yours", 0)
    assert second.get("k") == (b"mine", 1)


def test_a_stale_revision_never_wins_and_revisions_grow(open_store: Open) -> None:
    first, second = open_store(), open_store()
    assert first.compare_and_set("k", b"1", 0)
    assert second.compare_and_set("k", b"2", 1)
    assert not first.compare_and_set("k", b"3", 1)
    assert not first.compare_and_set("k", b"3", 3)
    assert first.get("k") == (b"2", 2)
    assert first.get("other") is None


def test_the_same_value_still_makes_a_new_revision(open_store: Open) -> None:
    """Else a writer that read revision 1 could overwrite what it never saw (A, B, A)."""
    store = open_store()
    assert store.compare_and_set("k", b"a", 0)
    assert store.compare_and_set("k", b"a", 1)
    assert store.get("k") == (b"a", 2)


def test_a_closed_store_says_so(open_store: Open) -> None:
    store = open_store()
    store.close()
    store.close()
    with pytest.raises(RelayError) as caught:
        store.get("k")
    assert caught.value.reason == "closed"


def test_sqlite_keeps_values_across_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "m.sqlite"
    store = SqliteMetadata(path)
    assert store.compare_and_set("k", b"\x00binary\xff", 0)
    store.close()
    assert SqliteMetadata(path).get("k") == (b"\x00binary\xff", 1)


def opened(where: str) -> MetadataStore:
    return open_metadata(RelayEndpoint("job", "memory", metadata=where))


@pytest.mark.parametrize("kind", ["sqlite", "redis"])
def test_four_processes_lose_no_update(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    rounds, writers = 50 if kind == "sqlite" else 25, 4
    path = str(tmp_path / "m.sqlite")
    if kind == "redis":
        server = request.getfixturevalue("redis_server")
        server.flush()
        path = server.url
    first = opened(path)
    child = """
import sys, time
from orchestrator.transfer import RelayEndpoint, open_metadata
store, lost = open_metadata(RelayEndpoint("job", "memory", metadata=sys.argv[1])), 0
print("ready", flush=True)
sys.stdin.read()  # all start together
for _ in range(int(sys.argv[2])):
    while True:
        value, revision = store.get("n") or (b"0", 0)
        time.sleep(0.0005)  # long enough for another to be first
        if store.compare_and_set("n", str(int(value) + 1).encode(), revision):
            break
        lost += 1
print(lost)
"""
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", child, path, str(rounds)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(writers)
    ]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.close()
    lost = 0
    for process in processes:
        assert process.stdout is not None
        lost += int(process.stdout.read())
        assert process.wait(timeout=60) == 0
    assert first.get("n") == (str(rounds * writers).encode(), rounds * writers)
    assert lost > 0  # they did meet: the test tested something


def test_a_writer_killed_inside_its_transaction_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "m.sqlite"
    store = SqliteMetadata(path)
    assert store.compare_and_set("k", b"old", 0)
    child = """
import os, sqlite3, sys
connection = sqlite3.connect(sys.argv[1], isolation_level=None)
connection.execute("BEGIN IMMEDIATE")
connection.execute("UPDATE facts SET value = 'new', revision = 2")
os._exit(9)
"""
    assert subprocess.run([sys.executable, "-c", child, str(path)], timeout=30, check=False).returncode == 9
    assert store.get("k") == (b"old", 1)
    assert store.compare_and_set("k", b"next", 1)


def test_a_locked_file_is_retryable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("orchestrator.transfer.sqlite_metadata.BUSY_SECONDS", 0.01)
    store = SqliteMetadata(tmp_path / "m.sqlite")
    other = sqlite3.connect(tmp_path / "m.sqlite", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(RetryableError, match="metadata_busy"):
        store.compare_and_set("k", b"v", 0)
    other.execute("ROLLBACK")
    assert store.compare_and_set("k", b"v", 0)


@pytest.mark.parametrize("content", [None, b"this is not a data base, it is a text file" * 100])
def test_an_unusable_file_is_a_configuration_error(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "missing" / "m.sqlite"
    if content is not None:
        path = tmp_path / "m.sqlite"
        path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        SqliteMetadata(path)
    assert caught.value.field == "relay.metadata"
    assert caught.value.value == str(path)


def test_an_endpoint_opens_the_store_it_names(tmp_path: Path) -> None:
    path = tmp_path / "m.sqlite"
    on_disk = open_metadata(RelayEndpoint(job="j", kind="memory", master="a", metadata=str(path)))
    assert on_disk.compare_and_set("k", b"v", 0)
    assert SqliteMetadata(path).get("k") == (b"v", 1)
    one, same = (open_metadata(RelayEndpoint(job="j", kind="memory", master="one")) for _ in range(2))
    other = open_metadata(RelayEndpoint(job="j", kind="memory", master="other"))
    assert one.compare_and_set("k", b"v", 0)
    assert same.get("k") == (b"v", 1)
    assert other.get("k") is None


SECOND_MACHINE = """
import sys
from orchestrator.transfer import SqliteMetadata
store = SqliteMetadata(sys.argv[1])
print(store.get("k"), flush=True)
sys.stdin.readline()
print(store.compare_and_set("k", b"other", 1), store.get("k"))
"""


def test_two_machines_that_share_only_the_file_never_both_win(tmp_path: Path) -> None:
    """As on a network file system: locks and what is in the file are shared, memory that is mapped is each machine's own."""
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    SqliteMetadata(here / "m.sqlite", write_ahead=True).close()  # of a run that was on one machine
    store = SqliteMetadata(here / "m.sqlite", write_ahead=False)
    assert store.compare_and_set("k", b"first", 0)
    for file in here.iterdir():
        if not file.name.endswith("-shm"):
            (there / file.name).hardlink_to(file)
    command = [sys.executable, "-c", SECOND_MACHINE, str(there / "m.sqlite")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "(b'first', 1)\n"
        assert store.compare_and_set("k", b"second", 1)
        assert other.communicate("go\n")[0] == "False (b'second', 2)\n"


@pytest.mark.parametrize(("where", "expected"), [([], "wal"), (["ray.address=10.0.0.1:6379"], "delete")])
def test_a_run_over_machines_has_a_pointer_file_that_they_can_share(
    where: list[str], expected: str, tmp_path: Path
) -> None:
    config = load_config(None, [f"run.folder={tmp_path}", "relay.kind=fsspec", *where])
    folder = RunFolder.create(config)
    nothing: Any = None  # that the relay needs
    assembly = _Assembly(config, folder, nothing, nothing, nothing, nothing, None)
    asyncio.run(assembly._start_relay())
    with closing(sqlite3.connect(folder.metadata)) as connection:
        assert connection.execute("PRAGMA journal_mode").fetchone() == (expected,)
