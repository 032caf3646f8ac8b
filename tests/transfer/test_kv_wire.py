"""KV over TCP: what arrives is what was sent, who has no token gets nothing, and every call ends within its time limit."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import msgpack
import numpy as np
import pytest

from orchestrator.api import ConfigError
from orchestrator.transfer import kv_wire, proven_link
from orchestrator.transfer.kv_wire import KvAsk, KvBlocks, KvRefused, KvServer, fetch_blocks

TOKEN = "a token of this test"
WIDTH = 4096
FACTS = {"weights": "v3:abc", "shape": [2, 1, 1, 32, 64]}


def ask(tokens: int = 320, first: int = 2, limit: float = 5.0) -> KvAsk:
    return KvAsk(np.arange(tokens, dtype=np.uint32), first, FACTS, limit)


def answer(request: KvAsk) -> KvBlocks:
    rows = np.random.default_rng(7).integers(0, 256, (8, WIDTH), np.uint8)
    return KvBlocks(request.first, rows, request.facts)


@contextmanager
def serving(how: Callable[[KvAsk], KvBlocks] = answer, token: str = TOKEN) -> Iterator[str]:
    server = KvServer(how, token, limit=5.0)
    try:
        yield server.place
    finally:
        server.close()


@contextmanager
def peer(talk: Callable[[socket.socket], None]) -> Iterator[str]:
    """A server that says what it likes."""
    listening = socket.create_server(("127.0.0.1", 0))

    def run() -> None:
        try:
            with listening.accept()[0] as client:
                try:
                    talk(client)
                finally:
                    client.shutdown(socket.SHUT_RDWR)  # another thread may read from it
        except OSError:
            return

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield f"127.0.0.1:{listening.getsockname()[1]}"
    finally:
        listening.close()
        thread.join(5.0)


@contextmanager
def through(place: str, spoil: Callable[[bytes, int], bytes]) -> Iterator[str]:
    """A way to ``place`` on which the answers pass ``spoil(bytes, how many went before)``."""
    host, port = proven_link.parse_place(place)

    def talk(client: socket.socket) -> None:
        with socket.create_connection((host, port)) as server:

            def up() -> None:
                try:
                    while data := client.recv(65536):
                        server.sendall(data)
                except OSError:
                    return

            threading.Thread(target=up, daemon=True).start()
            passed = 0
            while data := server.recv(1024):  # small: what is spoilt does not take what went before with it
                client.sendall(spoil(data, passed))
                passed += len(data)

    with peer(talk) as own:
        yield own


def reason_of(place: str, *, token: str = TOKEN, limit: float = 5.0, width: int = WIDTH) -> str:
    with pytest.raises(KvRefused) as refused:
        fetch_blocks(place, token, ask(limit=limit), width)
    return refused.value.reason


def test_what_arrives_is_what_was_sent_and_the_question_arrives_whole() -> None:
    asked: list[KvAsk] = []

    def how(request: KvAsk) -> KvBlocks:
        asked.append(request)
        return answer(request)

    with serving(how) as place:
        found = fetch_blocks(place, TOKEN, ask(), WIDTH)
    np.testing.assert_array_equal(found.payload, answer(ask()).payload)
    np.testing.assert_array_equal(asked[0].token_ids, ask().token_ids)
    assert (asked[0].first, dict(asked[0].facts)) == (2, FACTS)


def test_who_has_another_token_gets_nothing_and_the_engine_is_not_even_asked() -> None:
    asked: list[KvAsk] = []

    def how(request: KvAsk) -> KvBlocks:
        asked.append(request)
        return answer(request)

    with serving(how, token="another") as place:
        assert reason_of(place) in ("unreachable", "unauthorized")
    assert not asked


def test_a_server_without_the_token_is_not_believed() -> None:
    """It answers well-formed blocks, but cannot prove that it has the token."""

    def talk(client: socket.socket) -> None:
        send(client, {"nonce": b"n" * 16})
        client.recv(1 << 20)
        rows = answer(ask()).payload
        header = msgpack.packb(
            {"facts": FACTS, "blocks": 8, "block_bytes": WIDTH, "digests": kv_wire.block_digests(rows)}
        )
        send(client, {"header": header, "proof": b"p" * 32})
        client.sendall(rows.tobytes())

    with peer(talk) as place:
        assert reason_of(place) == "unauthorized"


def test_who_asks_cannot_be_had_to_prove_a_question_that_it_did_not_ask() -> None:
    """Somebody between the two, without the token, gives the server's nonce on with the beginning of a header of its own."""
    heard: list[bytes] = []
    asked = threading.Event()
    header = msgpack.packb({"what": "mine"})
    forged = msgpack.packb({"what": "theirs", "rest": header})[: -len(header)]

    def note(question: proven_link.ProvenAsk) -> None:
        heard.append(question.header)

    def between(client: socket.socket) -> None:
        with socket.create_connection(proven_link.parse_place(server.place)) as theirs:
            right = proven_link.FramedStream(theirs, time.monotonic() + 5)
            left = proven_link.FramedStream(client, time.monotonic() + 5)
            nonce = right.read_map(proven_link.GREETING_BYTES)["nonce"]
            left.write({"nonce": nonce + forged})
            with suppress(proven_link.LinkRefused):  # it hung up
                said = left.read_map(proven_link.HEADER_BYTES)
                right.write({**said, "header": forged + said["header"]})
                asked.set()
                right.until_closed()

    server = proven_link.LinkServer(note, TOKEN, "127.0.0.1", 0, field="x", clients=2, limit=5.0)
    try:
        with peer(between) as place, pytest.raises(proven_link.LinkRefused):
            proven_link.connect(place, 5.0, lambda stream: stream.ask(TOKEN, {"what": "mine"}))
        asked.wait(0.5)
    finally:
        server.close()
    assert heard == []


def test_the_token_never_travels() -> None:
    seen = bytearray()

    def talk(client: socket.socket) -> None:
        send(client, {"nonce": b"n" * 16})
        seen.extend(client.recv(1 << 20))

    with peer(talk) as place:
        reason_of(place)
    assert seen
    assert TOKEN.encode() not in seen


@pytest.mark.parametrize("byte", [0, WIDTH * 3 + 17, WIDTH * 8 - 1])
def test_a_block_with_one_wrong_bit_is_refused(byte: int) -> None:
    size = 8 * WIDTH

    def spoil(data: bytes, passed: int) -> bytes:
        nonlocal total
        total += len(data)
        place = byte + (total_of_answer - size) - passed
        if 0 <= place < len(data):
            return data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]
        return data

    total, total_of_answer = 0, 0
    with serving() as place:
        with through(place, lambda data, passed: count(data)) as way:
            sizes: list[int] = []

            def count(data: bytes) -> bytes:
                sizes.append(len(data))
                return data

            fetch_blocks(way, TOKEN, ask(), WIDTH)
            total_of_answer = sum(sizes)
        with through(place, spoil) as way:
            assert reason_of(way) == "damaged"


def test_a_server_that_dies_half_way_is_unreachable() -> None:
    def cut(data: bytes, passed: int) -> bytes:
        if passed + len(data) > 2 * WIDTH:
            raise OSError("the process is gone")
        return data

    with serving() as place, through(place, cut) as way:
        assert reason_of(way) == "unreachable"


def test_nobody_there_and_no_address_are_unreachable() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    assert reason_of(f"127.0.0.1:{port}") == "unreachable"
    assert reason_of("nonsense") == "unreachable"


def test_a_silent_server_costs_the_limit_and_no_more() -> None:
    with peer(lambda client: time.sleep(1.5)) as place:
        assert reason_of(place, limit=0.2) == "timeout"  # not "unreachable", which it is after its end


def test_a_slow_engine_costs_the_limit() -> None:
    def slow(request: KvAsk) -> KvBlocks:
        time.sleep(1.0)
        return answer(request)

    with serving(slow) as place:
        assert reason_of(place, limit=0.2) == "timeout"


def test_what_the_engine_refuses_arrives_with_its_reason() -> None:
    def refuses(request: KvAsk) -> KvBlocks:
        raise KvRefused("differs", "weights: v3 asked for, v4 here")

    with serving(refuses) as place, pytest.raises(KvRefused, match="v4 here") as refused:
        fetch_blocks(place, TOKEN, ask(), WIDTH)
    assert refused.value.reason == "differs"


def test_blocks_of_another_size_or_of_other_weights_are_refused() -> None:
    with serving() as place:
        assert reason_of(place, width=WIDTH // 2) == "differs"
    with serving(lambda request: KvBlocks(2, answer(request).payload, {"weights": "v4:def"})) as place:
        assert reason_of(place) == "differs"


def test_more_blocks_than_tokens_are_refused_before_memory_is_taken_for_them() -> None:
    """The header is signed, by somebody with the token; what it announces is not read."""

    def talk(client: socket.socket) -> None:
        send(client, {"nonce": b"n" * 16})
        size = struct.unpack(">I", client.recv(4))[0]
        body = b""
        while len(body) < size:
            body += client.recv(size - len(body))
        header = msgpack.packb({"facts": FACTS, "blocks": 1000, "block_bytes": WIDTH, "digests": bytes(16_000)})
        proof = proven_link.prove(TOKEN, b"answer", msgpack.unpackb(body)["nonce"], header)
        send(client, {"header": header, "proof": proof})

    with peer(talk) as place:
        assert reason_of(place) == "malformed"


@pytest.mark.parametrize(
    "nonsense",
    [b"", b"\xff" * 64, struct.pack(">I", 1 << 31), struct.pack(">I", 3) + b"abc", struct.pack(">I", 1) + b"\x90"],
)
def test_a_client_that_talks_nonsense_leaves_the_server_serving(nonsense: bytes) -> None:
    with serving() as place:
        with socket.create_connection(proven_link.parse_place(place)) as client:
            client.sendall(nonsense)
        assert len(fetch_blocks(place, TOKEN, ask(), WIDTH).payload) == 8


def test_many_silent_clients_hold_up_nobody_who_has_the_token() -> None:
    """The one that has been longest without a proof makes room."""
    server = KvServer(answer, TOKEN, limit=300.0)
    silent = [socket.create_connection(proven_link.parse_place(server.place)) for _ in range(40)]
    try:
        for _ in range(3):
            assert (
                len(fetch_blocks(server.place, TOKEN, ask(limit=0.8 * proven_link.PROOF_SECONDS), WIDTH).payload) == 8
            )
        silent[0].settimeout(20.0)
        while silent[0].recv(1 << 10):
            pass  # its greeting; then it was hung up on
        silent[-1].setblocking(False)
        assert silent[-1].recv(1 << 10), "greeted, and there still"
        with pytest.raises(BlockingIOError):
            silent[-1].recv(1)
    finally:
        for client in silent:
            client.close()
        server.close()


def test_who_proves_nothing_is_hung_up_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proven_link, "PROOF_SECONDS", 0.2)
    server = KvServer(answer, TOKEN, limit=300.0)
    try:
        with socket.create_connection(proven_link.parse_place(server.place), timeout=20.0) as client:
            while client.recv(1 << 10):
                pass
    finally:
        server.close()


@pytest.mark.parametrize("host", ["a" * 64 + ".example", "..", "x\x00y", "\udcff", "h" * 5000])
def test_a_host_that_is_no_name_is_a_refusal(host: str) -> None:
    assert reason_of(f"{host}:80") == "unreachable"
    assert reason_of(f"127.0.0.1:{'1' * 5000}") == "unreachable"


def test_a_server_without_a_token_or_with_a_taken_port_does_not_start() -> None:
    with pytest.raises(ConfigError, match="token"):
        KvServer(answer, "")
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(ConfigError, match="cannot listen"):
        KvServer(answer, TOKEN, port=taken.getsockname()[1])


def test_closing_twice_is_closing_once() -> None:
    server = KvServer(answer, TOKEN)
    server.close()
    server.close()
    assert reason_of(server.place if server._socket.fileno() >= 0 else "127.0.0.1:1") == "unreachable"


def send(client: socket.socket, values: dict[str, object]) -> None:
    body = msgpack.packb(values)
    client.sendall(struct.pack(">I", len(body)) + body)
