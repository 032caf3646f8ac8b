"""The metadata store on a real redis-server: secrets stay secret, an outage is one retryable error, a loss is noticed."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from orchestrator.api import ConfigError, RunError
from orchestrator.config import load_config
from orchestrator.run_folder import RunFolder
from orchestrator.runtime import preflight
from orchestrator.transfer import MemoryRelay, Publisher, RelayEndpoint, RelayError, open_metadata
from orchestrator.transfer import redis_metadata as module
from orchestrator.transfer.redis_metadata import PASSWORD, PASSWORD_FILE, RedisMetadata

pytestmark = pytest.mark.slow

SECRET = "correct-horse-battery"


# -- what needs no server ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "words"),
    [
        (f"redis://:{SECRET}@127.0.0.1:1/0", "password must not be in a URL"),
        (f"rediss://me:{SECRET}@127.0.0.1", "password must not be in a URL"),
        ("http://127.0.0.1:6379", "write it as redis://"),
        ("redis://127.0.0.1:6379/jobs", "the database is a number"),
        ("redis://127.0.0.1:notaport", "write it as redis://"),
        ("redis://10.0.0.9:6379", "metadata_allow_plain"),
    ],
)
def test_a_url_that_cannot_be_used_is_one_error_that_shows_no_password(url: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        load_config(None, [f"relay.metadata_url={url}"])
    assert caught.value.field == "relay.metadata_url"
    assert SECRET not in str(caught.value)
    if "10.0.0.9" not in url:
        with pytest.raises(ConfigError) as caught:
            RelayEndpoint("job", "memory", metadata=url)
        assert SECRET not in str(caught.value)
    else:
        load_config(None, [f"relay.metadata_url={url}", "relay.metadata_allow_plain=true"])


def test_the_password_comes_from_a_file_and_never_from_a_variable(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text(f"{SECRET}\n")
    assert module.redis_password({}) is None
    with pytest.raises(ConfigError, match=f"write it to a file .*{PASSWORD_FILE}") as caught:
        module.redis_password({PASSWORD: SECRET})
    assert SECRET not in str(caught.value)
    assert module.redis_password({PASSWORD: "other", PASSWORD_FILE: str(file)}) == SECRET
    file.write_text("\n")
    for named in (str(file), str(tmp_path / "none")):
        with pytest.raises(ConfigError) as caught:
            module.redis_password({PASSWORD_FILE: named})
        assert caught.value.field == PASSWORD_FILE


def test_runs_that_share_a_server_have_jobs_of_their_own_and_keep_them(tmp_path: Path) -> None:
    folders = [tmp_path / name / "run-001" for name in "ab"]
    for folder in folders:
        folder.mkdir(parents=True)
    names = [RunFolder(folder).job(shared=True) for folder in folders]
    assert len({*names, "run-001"}) == 3
    assert [RunFolder(folder).job(shared=True) for folder in folders] == names
    assert RunFolder(folders[0]).job(shared=False) == "run-001"
    RelayEndpoint(names[0], "memory")


# -- what does -------------------------------------------------------------------------------------------------------


def test_a_wrong_or_missing_password_is_a_configuration_error_and_the_right_one_works(
    redis_servers: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = redis_servers(password=SECRET)
    file = tmp_path / "secret"
    file.write_text("guess")
    for wrong in ("", str(file)):
        monkeypatch.setenv(PASSWORD_FILE, wrong)
        with pytest.raises(ConfigError) as caught:
            RedisMetadata(server.url)
        assert caught.value.field == "relay.metadata_url"
        assert "guess" not in str(caught.value)
    file.write_text(SECRET)
    endpoint = RelayEndpoint("job", "memory", metadata=server.url)
    store = open_metadata(endpoint)
    assert store.compare_and_set("k", b"\x00v\xff", 0)
    assert store.get("k") == (b"\x00v\xff", 1)
    assert SECRET not in str(endpoint.to_dict()) + repr(vars(store)["_seen"])
    server.kill()
    with pytest.raises(RelayError) as lost:
        store.get("k")
    assert SECRET not in str(lost.value)


@pytest.fixture
def outage(redis_servers: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.delenv(PASSWORD_FILE, raising=False)
    return redis_servers()


def test_a_server_that_dies_in_mid_run_is_one_retryable_error_and_the_run_goes_on_when_it_is_back(outage: Any) -> None:
    endpoint = RelayEndpoint("job", "memory", master="outage", metadata=outage.url)
    relay = MemoryRelay.shared("outage")
    publisher = Publisher(endpoint, relay, open_metadata(endpoint))
    store = open_metadata(endpoint)
    publisher.rollback(0)
    assert store.compare_and_set("k", b"1", 0)
    outage.kill()
    for call in (lambda: store.get("k"), lambda: store.compare_and_set("k", b"2", 1), lambda: publisher.rollback(0)):
        with pytest.raises(RelayError, match="metadata_unreachable") as caught:
            call()
        assert outage.url in str(caught.value)
    with pytest.raises(RelayError, match="metadata_unreachable"):
        RedisMetadata(outage.url)
    outage.start()
    assert store.get("k") == (b"1", 1)
    assert store.compare_and_set("k", b"2", 1)
    publisher.rollback(0)


def test_a_server_that_hangs_is_a_retryable_error_in_time(outage: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ANSWER_SECONDS", 0.3)
    store = RedisMetadata(outage.url)
    outage.kill(signal.SIGSTOP)
    try:
        with pytest.raises(RelayError, match="metadata_unreachable"):
            store.get("k")
    finally:
        outage.kill(signal.SIGCONT)
    assert store.get("k") is None


def test_a_server_that_forgot_is_noticed_and_named(outage: Any) -> None:
    store, other = RedisMetadata(outage.url), RedisMetadata(outage.url)
    for revision in range(3):
        assert store.compare_and_set("k", b"v", revision)
    outage.flush()
    with pytest.raises(RunError, match=r"has lost k: .*appendonly yes"):
        store.compare_and_set("k", b"v", 3)
    with pytest.raises(RunError, match="has lost k"):
        store.get("k")
    assert not other.compare_and_set("k", b"v", 3), "it never saw the key: for it somebody else is behind, as ever"
    assert other.get("k") is None


@contextmanager
def cutting(port: int, cut_answers: int) -> Iterator[int]:
    """A proxy before the server that swallows this many answers to scripts, and closes the connection instead."""
    left = [cut_answers]

    def serve(client: socket.socket) -> None:
        with client, socket.create_connection(("127.0.0.1", port)) as server:
            while data := client.recv(1 << 16):
                server.sendall(data)
                answer = server.recv(1 << 16)
                if b"EVAL" in data and answer.startswith(b":") and left[0]:
                    left[0] -= 1
                    return  # it was done, and nobody hears of it
                client.sendall(answer)

    def accept() -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=serve, args=(client,), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=accept, daemon=True).start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)


def test_a_change_whose_answer_was_lost_is_known_to_have_been_made(outage: Any) -> None:
    """Else the winner would believe that somebody else was first, and a publisher would give up its version."""
    with cutting(outage.port, 1) as port:
        store = RedisMetadata(f"redis://127.0.0.1:{port}/0")
        assert store.compare_and_set("k", b"mine", 0)
        assert store.get("k") == (b"mine", 1)
        assert not store.compare_and_set("k", b"mine", 0), "another call is another change"
        store.close()
    with cutting(outage.port, 2) as port:
        store = RedisMetadata(f"redis://127.0.0.1:{port}/0")
        with pytest.raises(RelayError, match="metadata_unreachable"):
            store.compare_and_set("k", b"again", 1)
        assert store.get("k") == (b"again", 2)
        store.close()


def test_a_server_that_evicts_is_refused(redis_servers: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PASSWORD_FILE, raising=False)
    server = redis_servers("--maxmemory", "100mb", "--maxmemory-policy", "allkeys-lru")
    with pytest.raises(ConfigError, match="noeviction"):
        RedisMetadata(server.url)


def test_before_a_run_starts_a_server_that_is_not_there_is_named(redis_servers: Callable[..., Any]) -> None:
    url = "redis://127.0.0.1:9/0"
    with pytest.raises(ConfigError, match="is a Redis server running there"):
        preflight._metadata(load_config(None, [f"relay.metadata_url={url}"]))
    with pytest.raises(ConfigError, match="metadata_url"):
        preflight._metadata(load_config(None, ["relay.metadata_password_file=x"]))


ENGINE = """
import json, sys
from orchestrator.transfer import RelayEndpoint, RelayError, Subscriber
subscriber = None
for line in sys.stdin:
    try:
        subscriber = subscriber or Subscriber(RelayEndpoint.from_dict(json.loads(sys.argv[1])))
        version = subscriber.latest_version()
        data = [int(data[0]) for _, data in subscriber.fetch(subscriber.manifest(version))] if version >= 0 else []
        print("holds", version, data, flush=True)
    except RelayError as error:
        print(error.reason, flush=True)
"""


def test_weights_go_from_a_trainer_to_an_engine_process_across_an_outage(
    redis_servers: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The path of a run, without the engines: one endpoint for both, the password in each process's environment."""
    server = redis_servers(password=SECRET)
    (tmp_path / "secret").write_text(SECRET)
    monkeypatch.setenv(PASSWORD_FILE, str(tmp_path / "secret"))
    endpoint = RelayEndpoint("job", "fsspec", f"file://{tmp_path}/relay", server.url)
    publisher = Publisher(endpoint)
    publisher.rollback(0)

    def publish(version: int) -> None:
        publisher.publish(version, [("w", (4,), "uint8", np.full(4, version, np.uint8))])

    command = [sys.executable, "-c", ENGINE, json.dumps(endpoint.to_dict())]
    engine = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert engine.stdin is not None
    assert engine.stdout is not None

    def ask() -> str:
        engine.stdin.write("\n")
        engine.stdin.flush()
        return engine.stdout.readline().strip()

    try:
        publish(1)
        assert ask() == "holds 1 [1]"
        server.kill()
        assert ask() == "metadata_unreachable"
        with pytest.raises(RelayError, match="metadata_unreachable"):
            publish(2)
        server.start()
        assert ask() == "holds 1 [1]"
        publish(2)
        assert ask() == "holds 2 [2]"
    finally:
        engine.kill()
        engine.wait()
