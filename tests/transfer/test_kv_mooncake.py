"""KV over a real Mooncake transfer engine between two processes: the bytes and the refusals are those of plain TCP, and a peer
that hangs costs its limit."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from orchestrator.api import ConfigError
from orchestrator.config import parse_config
from orchestrator.runtime import kv_setup as runtime_kv
from orchestrator.runtime.kv_setup import kv_arguments
from orchestrator.transfer.kv_mooncake import MooncakeCarrier, SpanAllocator
from orchestrator.transfer.kv_wire import KvAsk, KvBlocks, KvRefused, KvServer, block_digests, fetch_blocks
from orchestrator.transfer.rdma_devices import check_device
from vllm_rlplugin.kv.mover import KvOptions
from vllm_rlplugin.options import FrontendOptions

TOKEN = "a token of this test"
WIDTH = 4096
BLOCKS = 300
FACTS = {"weights": "v3:abc"}
SOURCE = """
import sys, threading
import numpy as np
from orchestrator.transfer.kv_wire import KvBlocks, KvServer
from orchestrator.transfer.kv_mooncake import MooncakeCarrier

rows = np.random.default_rng(7).integers(0, 256, (300, 4096), np.uint8)
carrier = MooncakeCarrier("127.0.0.1", room=8 << 20)
server = KvServer(lambda ask: KvBlocks(ask.first, rows, ask.facts), "a token of this test", carrier=carrier)
with carrier.lend(rows) as kept:  # as long as this process lives
    print(server.place, kept["place"], kept["address"], flush=True)
    for line in sys.stdin:
        if line.strip() == "spoil":
            carrier._region[:] ^= 1
        print(carrier._out.free, flush=True)
"""


def rows() -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.random.default_rng(7).integers(0, 256, (BLOCKS, WIDTH), np.uint8)


def ask(limit: float = 20.0) -> KvAsk:
    return KvAsk(np.arange(BLOCKS, dtype=np.uint32), 0, FACTS, limit)


class Source:
    """A process with a server and Mooncake."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", SOURCE],
            cwd=Path(__file__).parents[2],
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.server, place, address = self.process.stdout.readline().split()
        self.kept = {"place": place, "address": int(address)}

    def say(self, what: str = "") -> int:
        """Its free bytes for KV that goes out."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(what + "\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline())


@pytest.fixture(scope="module")
def source() -> Iterator[Source]:
    found = Source()
    yield found
    found.process.kill()
    found.process.wait()


@pytest.fixture(scope="module")
def carrier() -> Iterator[MooncakeCarrier]:
    found = MooncakeCarrier("127.0.0.1", room=8 << 20)
    yield found
    found.close()


def settled(look: Any, limit: float = 20.0) -> None:
    until = time.monotonic() + limit
    while not look():
        assert time.monotonic() < until
        time.sleep(0.02)


def test_blocks_come_over_mooncake_bit_for_bit_and_their_place_is_free_again(
    source: Source, carrier: MooncakeCarrier, monkeypatch: pytest.MonkeyPatch
) -> None:
    free, received = source.say(), []
    stock = socket.socket.recv_into
    monkeypatch.setattr(
        socket.socket, "recv_into", lambda *args: received.append(stock(*args)) or received[-1], raising=False
    )
    for _ in range(3):
        found = fetch_blocks(source.server, TOKEN, ask(), WIDTH, carrier)
        assert found.carrier == "mooncake"
        np.testing.assert_array_equal(found.payload, rows())
    assert sum(received) < BLOCKS * WIDTH / 10, "the connection carries headers and digests only"
    settled(lambda: source.say() == free)
    assert carrier._in.free == carrier._half


def test_a_side_without_mooncake_gets_and_gives_the_same_blocks_over_plain_tcp(
    source: Source, carrier: MooncakeCarrier
) -> None:
    plain = fetch_blocks(source.server, TOKEN, ask(), WIDTH)
    assert plain.carrier == "tcp"
    np.testing.assert_array_equal(plain.payload, rows())
    server = KvServer(lambda asked: KvBlocks(asked.first, rows(), asked.facts), TOKEN)
    try:
        found = fetch_blocks(server.place, TOKEN, ask(), WIDTH, carrier)
    finally:
        server.close()
    assert found.carrier == "tcp"
    np.testing.assert_array_equal(found.payload, rows())


def test_who_has_another_token_is_told_no_place(source: Source, carrier: MooncakeCarrier) -> None:
    free = source.say()
    with pytest.raises(KvRefused) as refused:
        fetch_blocks(source.server, "another", ask(2.0), WIDTH, carrier)
    assert refused.value.reason in ("unreachable", "unauthorized")
    assert source.say() == free


def test_what_is_read_after_its_place_was_used_for_something_else_is_refused_by_its_digest(
    source: Source, carrier: MooncakeCarrier
) -> None:
    """The region outlives what it lends: a late read gets other bytes, and no fault."""
    size = BLOCKS * WIDTH
    assert block_digests(carrier.read(source.kept, size, 20.0).reshape(-1, WIDTH)) == block_digests(rows())
    source.say("spoil")
    assert block_digests(carrier.read(source.kept, size, 20.0).reshape(-1, WIDTH)) != block_digests(rows())
    source.say("spoil")
    server = KvServer(lambda asked: KvBlocks(asked.first, rows(), asked.facts), TOKEN, carrier=Elsewhere(source.kept))
    try:
        assert fetch_blocks(server.place, TOKEN, ask(), WIDTH, carrier).carrier == "mooncake"
        source.say("spoil")
        with pytest.raises(KvRefused) as refused:
            fetch_blocks(server.place, TOKEN, ask(), WIDTH, carrier)
        assert refused.value.reason == "damaged"
    finally:
        source.say("spoil")
        server.close()


class Elsewhere(MooncakeCarrier):
    """Says that its blocks lie in another process."""

    def __init__(self, offer: dict[str, Any]) -> None:
        self.protocol, self._offer = "tcp", offer

    def lend(self, payload: Any) -> Any:
        from contextlib import nullcontext

        return nullcontext(self._offer)


def test_more_than_there_is_room_for_is_refused_on_either_side(source: Source, carrier: MooncakeCarrier) -> None:
    with pytest.raises(KvRefused, match="no_room"), carrier.lend(np.zeros((1, 5 << 20), np.uint8)):
        pass
    with pytest.raises(KvRefused, match="no_room"):
        carrier.read(source.kept, 5 << 20, 5.0)
    for offer in ({}, {"place": 1, "address": 1}, {"place": "x:1", "address": "1"}, {"place": "x:1", "address": -1}):
        with pytest.raises(KvRefused, match="malformed"):
            carrier.read(offer, 10, 5.0)
    with pytest.raises(KvRefused, match="unreachable"):
        carrier.read({"place": "127.0.0.1:1", "address": 4096}, 10, 5.0)
    assert carrier._in.free == carrier._half


def test_a_peer_that_hangs_costs_the_limit_and_its_place_is_kept_until_nothing_can_write_there() -> None:
    """In a process of its own: Mooncake reads its time limits once."""
    code = """
import os, signal, sys, time
from pathlib import Path
import numpy as np
from tests.transfer.test_kv_mooncake import BLOCKS, WIDTH, MooncakeCarrier, Source, ask, block_digests, rows, settled
source = Source()
carrier = MooncakeCarrier("127.0.0.1", room=8 << 20)
size = BLOCKS * WIDTH
carrier.read(source.kept, size, 20.0)
os.kill(source.process.pid, signal.SIGSTOP)
threads = list(Path(f"/proc/{source.process.pid}/task").iterdir())
settled(lambda: all((thread / "stat").read_text().rpartition(")")[2].split()[0] == "T" for thread in threads))
begun = time.monotonic()
try:
    carrier.read(source.kept, size, 0.5)
except TimeoutError:
    took = time.monotonic() - begun
assert 0.4 < took < 1.5, took
assert carrier._in.free < carrier._half
settled(lambda: carrier._in.free == carrier._half)
source.process.kill()
print("fine", flush=True)
os._exit(0)
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parents[2],
        env={
            **os.environ,
            "PYTHONPATH": str(Path(__file__).parents[2]),
            "MC_TCP_PROGRESS_TIMEOUT_SEC": "1",
            "MC_TCP_STATUS_TIMEOUT_SEC": "1",
        },
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout.strip() == "fine", done.stderr[-2000:]


def test_places_are_never_given_twice() -> None:
    spans = SpanAllocator(5 * 4096)
    starts = [spans.allocate(4000) for _ in range(5)]
    assert starts == [0, 4096, 8192, 12288, 16384]
    assert spans.allocate(1) == -1
    spans.free_span(4096)
    spans.free_span(8192)
    assert spans.allocate(3 * 4096) == -1
    assert spans.allocate(2 * 4096) == 4096


def test_rdma_without_a_device_is_one_clear_error_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check_device, "__defaults__", ("rollout.kv_transfer.", tmp_path))
    data: dict[str, Any] = {"enabled": True, "carrier": "mooncake", "protocol": "rdma"}
    config = parse_config({"rollout": {"kv_transfer": data}})
    for refused in (
        lambda: runtime_kv.check(config),
        lambda: KvOptions.from_dict(kv_arguments(config)["kv"]),
        lambda: FrontendOptions(kv_carrier="mooncake", kv_protocol="rdma"),
        lambda: MooncakeCarrier("127.0.0.1", "rdma"),
    ):
        with pytest.raises(ConfigError, match=r"protocol = 'rdma': this machine has no RDMA device"):
            refused()
    (tmp_path / "mlx5_0").mkdir()
    runtime_kv.check(config)
    data["device"] = "mlx5_0,mlx5_7"
    with pytest.raises(ConfigError, match="there is no mlx5_7; there are: mlx5_0"):
        runtime_kv.check(parse_config({"rollout": {"kv_transfer": data}}))
    for wrong in ({"protocol": "rdma"}, {"device": "mlx5_0"}):
        with pytest.raises(ConfigError, match="set carrier to 'mooncake'"):
            parse_config({"rollout": {"kv_transfer": {"enabled": True, **wrong}}})
    with pytest.raises(ConfigError, match="needs --rl-kv-carrier mooncake"):
        FrontendOptions(kv_protocol="rdma")
    check_device("tcp", "")
