"""Weights through a real Mooncake Store: a real master, publisher and subscriber in processes of their own."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from orchestrator.api import ConfigError, RunError
from orchestrator.config import parse_config
from orchestrator.runtime import mooncake_master as runtime
from orchestrator.runtime import preflight
from orchestrator.runtime.mooncake_master import MooncakeMaster
from orchestrator.transfer import RelayEndpoint, RelayError, open_relay
from orchestrator.transfer import mooncake_relay as transfer_mooncake
from orchestrator.transfer.rdma_devices import check_device

pytestmark = pytest.mark.engine

# One process that does what it is told, one JSON line a command. Mooncake is loaded in such processes only: it brings
# threads of its own, and a process that is killed must take its memory along.
CHILD = """
import json, os, sys, time
import numpy as np
from orchestrator.api import CoserveError, ShardKey
from orchestrator.transfer import (
    DeltaCodec, MooncakeRelay, Publisher, Region, RelayEndpoint, HostedWeights, SnapshotPolicy, Subscriber
)
from orchestrator.transfer.bucket import digest

endpoint = RelayEndpoint.from_dict(json.loads(sys.argv[1]))
held = {}

def tensors(seed, sizes, die_at=None):
    generator = np.random.default_rng(seed)
    for index, size in enumerate(sizes):
        if index == die_at:
            os.kill(os.getpid(), 9)
        yield f"w{index}", (size // 2,), "bfloat16", generator.integers(0, 256, size, dtype=np.uint8)

ROWS = 300_000

def model(version):
    values = np.random.default_rng(0).integers(0, 1 << 16, 4 * ROWS, dtype=np.uint16)
    for step in range(1, version + 1):
        values[step::97] ^= 1
    return values

def rows(values, part):
    return values[part * ROWS : (part + 1) * ROWS].view(np.uint8)

def one(kind):
    if kind not in held:
        held[kind] = {"p": Publisher, "s": Subscriber}[kind](endpoint) if kind != "r" else MooncakeRelay(endpoint.master)
    return held[kind]

def do(what, *a):
    if what == "host":
        held["host"] = held["r"] = MooncakeRelay(endpoint.master, segment_bytes=a[0])
    elif what == "rollback":
        return one("p").rollback(*a)
    elif what == "publish":
        version, seed, sizes, *die = a
        result = one("p").publish(version, tensors(seed, sizes, *die))
        return [result.bytes, result.buckets, result.seconds]
    elif what == "collect":
        return one("p").collect_garbage()
    elif what == "latest":
        return one("s").latest_version()
    elif what == "fetch":
        started = time.perf_counter()
        got = list(one("s").fetch(one("s").manifest(a[0])))
        seconds = time.perf_counter() - started
        return [[[key.tensor, digest(data)] for key, data in got], seconds]
    elif what == "expected":
        return [[name, digest(data)] for name, _, _, data in tensors(*a)]
    elif what == "put":
        one("r").put(a[0], memoryview(a[1].encode()))
    elif what == "get":
        buffer = bytearray(a[1])
        return bytes(buffer[: one("r").get_into(a[0], memoryview(buffer))]).decode()
    elif what == "size":
        return one("r").size(a[0])
    elif what == "remove":
        return one("r").remove(a[0])
    elif what == "ranges":
        buffer = bytearray(a[2])
        return [one("r").get_ranges(a[0], a[1], memoryview(buffer)), bytes(buffer).decode()]
    elif what == "step":  # publish as the publisher plans
        version = a[0]
        if "d" not in held:
            held["d"] = Publisher(endpoint, codec=DeltaCodec())
        plan, published = held["d"].plan_next(SnapshotPolicy(every=9)), 0
        old = model(plan.base) if plan.base >= 0 else None
        for base in ([plan.base] if old is not None else []) + ([-1] if plan.snapshot else []):
            shards = [
                (ShardKey("w", 0, part * ROWS, (part + 1) * ROWS, (4 * ROWS,), "bfloat16", "raw", 0),
                 rows(model(version), part), None if old is None else rows(old, part)) for part in range(4)
            ]
            published += held["d"].publish_shards(version, shards, base).bytes
        return [plan.base, published]
    elif what == "advance":  # what an engine does that hosts half of it
        region = Region("w", ((ROWS, 3 * ROWS),))
        if "e" not in held:
            held["e"] = HostedWeights(Subscriber(endpoint, codec=DeltaCodec()), [region], DeltaCodec())
        held["e"].advance(a[0])
        expected = model(a[0])[ROWS : 3 * ROWS].view(np.uint8)
        return [held["e"].fetched_bytes, bool(np.array_equal(held["e"].region(region), expected))]
    elif what == "speed":
        relay, size, times = one("r"), a[0], []
        data = np.random.default_rng(0).integers(0, 256, size, dtype=np.uint8)
        relay.register(data.data)
        for number in range(4):
            started = time.perf_counter()
            relay.put(f"speed/{number}", data.data)
            middle = time.perf_counter()
            relay.get_into(f"speed/{number}", data.data)
            times.append([middle - started, time.perf_counter() - middle])
        return times
    elif what == "close":
        for thing in held.values():
            thing.close()
            thing.close()
        held.clear()

for line in sys.stdin:
    try:
        reply = {"ok": do(*json.loads(line))}
    except CoserveError as error:
        reply = {"error": type(error).__name__, "reason": getattr(error, "reason", ""), "text": str(error)}
    print("REPLY " + json.dumps(reply), flush=True)
"""

MIB = 1 << 20
SIZES = [40_000, 2 * MIB, 6, 3 * MIB, 700_000]


class Child:
    def __init__(self, endpoint: RelayEndpoint) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", CHILD, json.dumps(endpoint.to_dict())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def send(self, *command: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()

    def receive(self) -> dict[str, Any] | None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("REPLY "):
                reply: dict[str, Any] = json.loads(line.removeprefix("REPLY "))
                return reply
        return None

    def tell(self, *command: Any) -> dict[str, Any] | None:
        self.send(*command)
        return self.receive()

    def ask(self, *command: Any) -> Any:
        reply = self.tell(*command)
        assert reply is not None, f"{command}: the process ended"
        assert "ok" in reply, f"{command}: {reply}"
        return reply["ok"]

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


class Rig:
    def __init__(self, master: MooncakeMaster, folder: Path, runner: asyncio.Runner) -> None:
        self.master = master
        self.runner = runner
        self.endpoint = RelayEndpoint(
            job="test",
            master=master.address,
            metadata=str(folder / "metadata.sqlite"),
            segment_bytes=64 * MIB,
            bucket_bytes=4 * MIB,
        )
        self.children: list[Child] = []

    def child(self, **changes: Any) -> Child:
        self.children.append(Child(RelayEndpoint.from_dict({**self.endpoint.to_dict(), **changes})))
        return self.children[-1]


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    monkeypatch.setattr(runtime, "LEASE_MS", 1500)  # so that what was read can be removed while we wait
    with asyncio.Runner() as runner:
        master = MooncakeMaster(log=tmp_path / "master.log")
        runner.run(master.start())
        made = Rig(master, tmp_path, runner)
        try:
            yield made
        finally:
            for child in made.children:
                child.end()
            runner.run(master.stop())


def test_two_processes_publish_and_fetch_bit_for_bit(rig: Rig) -> None:
    publisher, subscriber = rig.child(), rig.child()
    assert subscriber.ask("latest") == -1
    for version in (1, 2, 3, 4):
        size, buckets, _ = publisher.ask("publish", version, version, SIZES)
        assert (size, buckets) == (sum(SIZES), 2)
        assert subscriber.ask("latest") == version
        assert subscriber.ask("fetch", version)[0] == subscriber.ask("expected", version, SIZES)
    assert subscriber.ask("fetch", 3)[0] == subscriber.ask("expected", 3, SIZES)
    reply = subscriber.tell("fetch", 1)
    assert reply is not None
    assert reply["reason"] == "missing"
    subscriber.ask("close")
    publisher.ask("close")


def test_the_real_store_keeps_the_promises_of_a_relay(rig: Rig) -> None:
    """Write-once, -1 for what is missing, named errors, and removal that is refused while leased."""
    host, client = rig.child(), rig.child()
    host.ask("host", 16 * MIB)
    client.ask("put", "k", "first")
    reply = client.tell("put", "k", "again")
    assert reply is not None
    assert reply["reason"] == "exists"
    assert client.ask("get", "k", 100) == "first"
    assert client.ask("size", "k") == 5
    assert client.ask("size", "none") == -1
    assert client.ask("remove", "none") is True
    assert client.ask("remove", "k") is False  # it was just read
    for command, reason in (
        (("get", "none", 10), "missing"),
        (("get", "k", 2), "buffer"),
        (("put", "large", "x" * (17 * MIB)), "relay_full"),
    ):
        reply = client.tell(*command)
        assert reply is not None
        assert (reply["error"], reply["reason"]) == ("RelayError", reason)
    client.ask("close")
    host.ask("close")


def test_what_a_rank_puts_lies_in_its_own_memory_while_there_is_room(rig: Rig) -> None:
    """Not over the network to another rank's, with which it would be lost, too."""
    rank, *others = (rig.child() for _ in range(4))
    for each in (rank, *others):
        each.ask("host", 16 * MIB)
    for number in range(8):
        rank.ask("put", f"k{number}", f"value {number}")
    for other in others:
        other.end()
    assert [rank.ask("get", f"k{number}", 100) for number in range(8)] == [f"value {number}" for number in range(8)]
    rank.ask("close")


def test_a_rank_whose_memory_is_full_puts_into_that_of_others(rig: Rig) -> None:
    rank, other = rig.child(), rig.child()
    for each in (rank, other):
        each.ask("host", 16 * MIB)
    for number in range(6):
        rank.ask("put", f"k{number}", "x" * (4 * MIB))
    assert all(other.ask("size", f"k{number}") == 4 * MIB for number in range(6))
    for each in (rank, other):
        each.ask("close")


@pytest.mark.long  # 25 s
def test_what_a_rank_published_is_there_after_the_rank_stood_still(rig: Rig) -> None:
    """With Mooncake's own time limit the store has forgotten it all by then."""
    rank, reader = rig.child(), rig.child()
    rank.ask("publish", 1, 1, SIZES)
    os.kill(rank.process.pid, signal.SIGSTOP)
    time.sleep(20.0)
    os.kill(rank.process.pid, signal.SIGCONT)
    assert reader.ask("fetch", 1)[0] == reader.ask("expected", 1, SIZES)
    for each in (rank, reader):
        each.ask("close")


def test_parts_of_an_object_are_read_from_the_real_store(rig: Rig) -> None:
    host, client = rig.child(), rig.child()
    host.ask("host", 16 * MIB)
    client.ask("put", "k", "0123456789")
    assert client.ask("ranges", "k", [[6, 4, 0], [0, 2, 5]], 8) == [6, "6789\0" + "01\0"]
    for ranges, reason in (([[0, 1, 0]], "missing"),):
        reply = client.tell("ranges", "none", ranges, 8)
        assert reply is not None
        assert (reply["error"], reply["reason"]) == ("RelayError", reason)


def test_chains_of_differences_go_through_the_real_store_and_survive_its_restart(rig: Rig) -> None:
    """The store forgets everything with its master; the publisher finds that out, and starts from a snapshot again."""
    trainer, engine = rig.child(), rig.child(segment_bytes=0)
    size = 4 * 600_000
    assert trainer.ask("step", 0) == [-1, size]
    assert engine.ask("advance", 0) == [size // 2, True]
    for version in (1, 2):
        base, published = trainer.ask("step", version)
        assert (base, published < size / 20) == (version - 1, True)
    fetched, right = engine.ask("advance", 2)
    assert right
    assert 0 < fetched < size / 20
    assert rig.child(segment_bytes=0).ask("advance", 2)[1]  # from the snapshot, along the chain
    port = int(rig.master.address.rpartition(":")[2])
    rig.runner.run(rig.master.stop())
    rig.master = MooncakeMaster(port=port)
    rig.runner.run(rig.master.start())
    assert again(trainer, "step", 3) == [-1, size]
    assert again(engine, "advance", 3) == [size // 2, True]


def again(child: Child, *command: Any) -> Any:
    """The answer, once the process has joined the new master; until then every error is one that may be retried."""
    deadline = time.monotonic() + 60
    while True:
        reply = child.tell(*command)
        assert reply is not None
        if "ok" in reply:
            return reply["ok"]
        assert reply["error"] == "RelayError", reply
        assert time.monotonic() < deadline, reply
        time.sleep(0.5)


def test_a_publisher_killed_half_way_leaves_the_old_version_readable_and_a_resume_publishes_again(rig: Rig) -> None:
    host, subscriber = rig.child(), rig.child()
    host.ask("host", 96 * MIB)  # the memory outlives the publisher
    first = rig.child(segment_bytes=0)
    first.ask("publish", 1, 1, SIZES)
    assert first.tell("publish", 2, 2, SIZES, 4) is None  # killed when the first bucket is on the relay
    assert first.process.wait(timeout=10) == -signal.SIGKILL
    assert subscriber.ask("latest") == 1
    assert subscriber.ask("fetch", 1)[0] == subscriber.ask("expected", 1, SIZES)

    resumed = rig.child(segment_bytes=0)
    assert resumed.ask("rollback", 1) == 2
    assert subscriber.ask("latest") == -1
    resumed.ask("publish", 1, 11, SIZES)
    assert subscriber.ask("fetch", 1)[0] == subscriber.ask("expected", 11, SIZES)
    resumed.ask("publish", 2, 22, SIZES)
    assert subscriber.ask("latest") == 2
    assert subscriber.ask("fetch", 2)[0] == subscriber.ask("expected", 22, SIZES)


def test_old_versions_go_when_their_lease_ran_out(rig: Rig) -> None:
    publisher = rig.child()
    for version in range(4):
        publisher.ask("publish", version, version, [100_000])
    assert publisher.ask("collect") > 0  # published a moment ago, so leased by the check of their size
    deadline = time.monotonic() + 20
    while publisher.ask("collect") > 0:  # asking for removal does not renew a lease
        assert time.monotonic() < deadline
        time.sleep(0.5)
    with urllib.request.urlopen(f"http://127.0.0.1:{rig.master.metrics_port}/get_all_keys", timeout=20) as answer:
        keys = answer.read().decode().split()
    assert sorted(keys) == sorted(
        key for version in (2, 3) for key in (f"rlc/test/1/{version}/full/0", f"rlc/test/1/{version}/full/manifest")
    )


def test_a_dead_master_is_retryable_and_told_at_once(rig: Rig) -> None:
    pid = rig.master.pid or 0
    os.kill(pid, signal.SIGKILL)
    assert _ends(pid), "it listens until it is taken apart"
    child = rig.child()
    started = time.monotonic()
    reply = child.tell("publish", 1, 1, [100])
    assert reply is not None
    assert (reply["error"], reply["reason"]) == ("RelayError", "unreachable")
    assert time.monotonic() - started < 10  # the library alone tries for 90 s
    rig.runner.run(asyncio.sleep(0.1))  # the loop learns of the end of a child while it runs
    assert not rig.master.alive()


# --- the master process


def _ends(pid: int) -> bool:
    """Whether the process is gone, or a zombie of somebody else, soon."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return True
        if state == "Z":
            return True
        time.sleep(0.05)
    return False


def test_the_master_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    script = """
import asyncio, os, signal
from orchestrator.runtime.mooncake_master import MooncakeMaster
async def main():
    master = MooncakeMaster()
    await master.start()
    print(master.pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
asyncio.run(main())
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    pid = int(done.stdout)
    assert _ends(pid)


def test_a_stopped_master_is_reaped_and_its_port_is_free() -> None:
    async def scenario() -> None:
        master = MooncakeMaster()
        assert not master.alive()
        await master.start()
        address, pid = master.address, master.pid or 0
        assert master.alive()
        assert address.startswith("127.0.0.1:")
        await master.stop()
        await master.stop()
        assert not master.alive()
        assert _ends(pid)
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", int(address.rpartition(":")[2])))
        with pytest.raises(RunError):
            _ = master.address

    asyncio.run(scenario())


def test_a_taken_port_is_a_configuration_error_that_names_it() -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        with pytest.raises(ConfigError) as caught:
            asyncio.run(MooncakeMaster(port=port).start())
    assert (caught.value.field, caught.value.value) == ("relay.port", port)
    assert "another" in caught.value.fix


def _program(folder: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a shell script pass for the master."""
    file = folder / "mooncake_master"
    file.write_text(f"#!/bin/sh\n{text}\n")
    file.chmod(0o755)
    monkeypatch.setattr(runtime, "find_binary", lambda: str(file))


def test_a_missing_system_library_is_a_configuration_error_with_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    message = "error while loading shared libraries: libibverbs.so.1: cannot open shared object file: No such file"
    _program(tmp_path, f"echo '{message}' >&2; exit 127", monkeypatch)
    with pytest.raises(ConfigError, match="apt-get install libibverbs1") as caught:
        asyncio.run(MooncakeMaster().start())
    assert caught.value.field == "relay.kind"


def test_a_master_that_ends_or_never_answers_is_an_error_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _program(tmp_path, "echo 'bad flag'; exit 3", monkeypatch)
    with pytest.raises(RunError, match=r"code 3.*bad flag"):
        asyncio.run(MooncakeMaster().start())
    _program(tmp_path, f"echo $$ > {tmp_path}/pid; exec sleep 100", monkeypatch)
    monkeypatch.setattr(runtime, "START_LIMIT", 0.5)
    with pytest.raises(RunError, match="not healthy within"):
        asyncio.run(MooncakeMaster().start())
    assert _ends(int((tmp_path / "pid").read_text()))


# Healthy at once, and deaf to clients for a second: the real one does so for milliseconds, longer on a busy machine.
DEAF = """
import http.server, socket, sys, threading, time

class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *arguments):
        pass

flags = dict(text.lstrip("-").split("=") for text in sys.argv[1:] if "=" in text)
server = http.server.HTTPServer((flags["metrics_host"], int(flags["metrics_port"])), Health)
threading.Thread(target=server.serve_forever, daemon=True).start()
time.sleep(1.0)
with socket.create_server((flags["rpc_address"], int(flags["rpc_port"]))) as listening:
    while True:
        listening.accept()[0].close()
"""


def test_a_stand_in_of_the_master_that_is_healthy_before_it_listens_to_clients_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "deaf.py").write_text(DEAF)
    _program(tmp_path, f"exec {sys.executable} -S {tmp_path}/deaf.py $*", monkeypatch)

    async def scenario() -> None:
        master = MooncakeMaster()
        try:
            await master.start()
            host, port = master.address.split(":")
            _, writer = await asyncio.open_connection(host, int(port))  # who was told the address is answered
            writer.close()
        finally:
            await master.stop()

    asyncio.run(asyncio.wait_for(scenario(), 30))


def test_a_cancelled_start_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _program(tmp_path, f"echo $$ > {tmp_path}/pid; exec sleep 100", monkeypatch)

    async def scenario() -> None:
        task = asyncio.create_task(MooncakeMaster().start())
        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
            await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(asyncio.wait_for(scenario(), 20))
    assert _ends(int((tmp_path / "pid").read_text()))


def test_a_master_of_the_environment_below_is_found_in_its_package(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "mooncake", raising=False)
    binary = tmp_path / "mooncake" / "mooncake_master"
    binary.parent.mkdir()
    binary.with_name("__init__.py").touch()
    binary.touch(0o755)
    assert runtime.find_binary() == str(binary)


def test_no_master_in_the_environment_is_a_configuration_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="mooncake-transfer-engine"):
        runtime.find_binary()


# --- the store's answers


class FakeStore:
    """A store whose answers are given: for what the real one does only when a process dies at the right moment."""

    def __init__(self, **answers: int) -> None:
        self.answers = answers

    def __getattr__(self, name: str) -> Any:
        return lambda *_: self.answers.get(name, 0)


def relay_on(**answers: int) -> transfer_mooncake.MooncakeRelay:
    relay = transfer_mooncake.MooncakeRelay.__new__(transfer_mooncake.MooncakeRelay)
    relay._store, relay._config, relay._registered = FakeStore(**answers), None, {}
    return relay


@pytest.mark.parametrize("size", [-704, -703, 0, 4])
def test_a_put_that_was_acknowledged_but_not_kept_is_found(size: int) -> None:
    """What the real store does for 30 s with a key whose writer died."""
    with pytest.raises(RelayError) as caught:
        relay_on(put_from=0, get_size=size).put("k", memoryview(b"value"))
    assert caught.value.reason == "not_stored"
    relay_on(put_from=0, get_size=5).put("k", memoryview(b"value"))


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (-200, "relay_full"),
        (-704, "missing"),
        (-706, "leased"),
        (-707, "transfer"),
        (-800, "transfer"),
        (-900, "unreachable"),
        (-1, "unknown"),
    ],
)
def test_every_code_of_the_store_has_a_name(code: int, reason: str) -> None:
    with pytest.raises(RelayError) as caught:
        relay_on(get_into=code).get_into("k", memoryview(bytearray(4)))
    assert caught.value.reason == reason
    assert f"code {code}" in caught.value.detail


def test_an_object_that_is_still_being_written_is_missing_and_not_removed() -> None:
    relay = relay_on(get_size=-703, remove=-703)
    assert relay.size("k") == -1
    assert relay.remove("k") is False
    with pytest.raises(RelayError, match="master"):
        relay_on(remove=-900).remove("k")
    with pytest.raises(RelayError):
        relay_on(get_size=-900).size("k")


def test_mooncake_that_does_not_load_is_a_configuration_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mooncake", None)
    with pytest.raises(ConfigError, match="mooncake-transfer-engine-non-cuda"):
        transfer_mooncake.load_store()
    error = transfer_mooncake.missing_library("libnuma.so.1: cannot open shared object file")
    assert "apt-get install libibverbs1 libnuma1 libcurl4" in error.fix


def test_sixty_four_megabytes_pass_between_processes(rig: Rig) -> None:
    """The size of a real bucket, through the real transport; the speeds are printed, not judged."""
    host, client = rig.child(), rig.child(segment_bytes=0)
    host.ask("host", 400 * MIB)
    for put, get in client.ask("speed", 64 * MIB):
        print(
            f"64 MiB: put {put * 1e3:.0f} ms ({0.0671 / put:.2f} GB/s), get {get * 1e3:.0f} ms ({0.0671 / get:.2f} GB/s)"
        )
    size = 64 * MIB - 4096
    seconds = client.ask("publish", 1, 1, [size])[2]
    got, fetched = client.ask("fetch", 1)
    print(f"publish {seconds * 1e3:.0f} ms, fetch {fetched * 1e3:.0f} ms of one 64 MiB tensor")
    assert got == client.ask("expected", 1, [size])
    assert np.isfinite(seconds)


def test_weights_by_rdma_need_a_device_here_and_nothing_that_reads_over_a_slow_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check_device, "__defaults__", ("rollout.kv_transfer.", tmp_path))
    by_rdma = parse_config({"relay": {"protocol": "rdma", "device": "mlx5_0"}})
    endpoint = RelayEndpoint(job="rdma", master="127.0.0.1:1", protocol="rdma", device="mlx5_0")
    for refused in (lambda: preflight._relay(by_rdma), lambda: open_relay(endpoint)):
        with pytest.raises(ConfigError, match=r"relay.protocol = 'rdma': this machine has no RDMA device"):
            refused()
    (tmp_path / "mlx5_0").mkdir()
    preflight._relay(by_rdma)
    told: list[Any] = []

    def setup(*given: Any) -> int:
        told.extend(given)
        return 0

    monkeypatch.setattr(transfer_mooncake, "seen_from", lambda master: "127.0.0.1")
    store = SimpleNamespace(setup=setup, close=lambda: 0)
    module = SimpleNamespace(ReplicateConfig=SimpleNamespace, MooncakeDistributedStore=lambda: store)
    monkeypatch.setattr(transfer_mooncake, "load_store", lambda: module)
    open_relay(endpoint)
    assert told[4:6] == ["rdma", "mlx5_0"]
    for wrong in (
        {"device": "mlx5_0"},
        {"protocol": "rdma", "kind": "fsspec"},
        {"protocol": "rdma", "sites": {"b": {"label": "site=b"}}},
    ):
        with pytest.raises(ConfigError, match=r"^relay\.(device|protocol) = "):
            parse_config({"relay": wrong})
