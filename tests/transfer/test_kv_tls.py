"""KV over TLS, on real sockets and with certificates made here: unreadable on its way, given to and taken from nobody else, and
an address of a network is not used in the clear unless that is said."""

from __future__ import annotations

import argparse
import asyncio
import shutil
import socket
import ssl
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from orchestrator.api import ConfigError, KvMove
from orchestrator.api.tls import SYSTEM, Tls
from orchestrator.config import parse_config
from orchestrator.runtime.kv_setup import check, kv_arguments
from orchestrator.transfer import proven_link
from orchestrator.transfer.kv_wire import KvAsk, KvBlocks, KvRefused, KvServer, fetch_blocks
from tests.house.test_tls import Authority
from vllm_rlplugin.kv.mover import KvMover, KvOptions
from vllm_rlplugin.options import FrontendOptions
from vllm_rlplugin.server import control_endpoints

pytestmark = pytest.mark.skipif(
    shutil.which("openssl") is None, reason="needs the openssl program to make certificates"
)
TOKEN = "a token of this test"
WIDTH = 4096
BLOCKS = 8
FACTS = {"weights": "v3:abc"}


def network_address() -> str:
    """One of this machine that is not loopback; "": it has none. Nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("203.0.113.1", 9))  # reserved for documentation
        except OSError:
            return ""
        return str(probe.getsockname()[0])


OWN = network_address()
elsewhere = pytest.mark.skipif(not OWN, reason="this machine has no address of a network")


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("kv-tls"), "authority")


@pytest.fixture(scope="module")
def good(authority: Authority) -> Tls:
    return authority.make("good", ",".join(f"IP:{host}" for host in ("127.0.0.1", OWN) if host))


def rows() -> Any:
    return np.random.default_rng(7).integers(0, 256, (BLOCKS, WIDTH), np.uint8)


def ask(limit: float = 5.0) -> KvAsk:
    return KvAsk(np.arange(320, dtype=np.uint32), 0, FACTS, limit)


class Engine:
    """What is behind a server: says its rows, and counts who asked."""

    def __init__(self) -> None:
        self.asked = 0

    def __call__(self, request: KvAsk) -> KvBlocks:
        self.asked += 1
        return KvBlocks(request.first, rows(), request.facts)


@contextmanager
def serving(tls: Tls, engine: Engine | None = None, **options: Any) -> Iterator[str]:
    server = KvServer(engine or Engine(), TOKEN, **{"limit": 5.0, **options}, tls=tls)
    try:
        yield server.place
    finally:
        server.close()


@contextmanager
def wiretap(place: str) -> Iterator[tuple[str, bytearray]]:
    """A way to ``place``, and every byte that passes on it, both ways."""
    host, port = proven_link.parse_place(place)
    seen, listening = bytearray(), socket.create_server(("127.0.0.1", 0))

    def pump(one: socket.socket, other: socket.socket) -> None:
        try:
            while data := one.recv(65536):
                seen.extend(data)
                other.sendall(data)
            other.shutdown(socket.SHUT_WR)
        except OSError:
            return

    def run() -> None:
        with listening.accept()[0] as client, socket.create_connection((host, port)) as server:
            up = threading.Thread(target=pump, args=(client, server), daemon=True)
            up.start()
            pump(server, client)
            up.join(5.0)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield (
            f"{proven_link.TLS if place.startswith(proven_link.TLS) else ''}127.0.0.1:{listening.getsockname()[1]}",
            seen,
        )
    finally:
        thread.join(5.0)
        listening.close()


def refused(place: str, context: ssl.SSLContext | None = None, **options: Any) -> KvRefused:
    with pytest.raises(KvRefused) as found:
        fetch_blocks(
            place, options.pop("token", TOKEN), ask(options.pop("limit", 5.0)), WIDTH, None, context, **options
        )
    return found.value


def test_blocks_come_over_tls_as_they_were_sent_and_nobody_on_the_way_can_read_them(good: Tls) -> None:
    trusting = Tls(authority=good.authority).client()
    block = rows()[3].tobytes()[:64]
    with serving(good) as place:
        assert place.startswith("tls://127.0.0.1:")
        with wiretap(place) as (way, seen):
            np.testing.assert_array_equal(fetch_blocks(way, TOKEN, ask(), WIDTH, None, trusting).payload, rows())
        assert len(seen) > BLOCKS * WIDTH
        assert block not in seen
        assert b"nonce" not in seen
    with serving(SYSTEM) as place, wiretap(place) as (way, seen):  # so the comparison above can fail
        fetch_blocks(way, TOKEN, ask(), WIDTH)
        assert block in seen
        assert b"nonce" in seen


WRONG = {
    "another authority": ("good", "other", "tls.authority must be the CA that signed it"),
    "the system's authorities": ("good", "none", "tls.authority must be the CA that signed it"),
    "expired": ("expired", "own", "give the server a new one"),
    "another name": ("elsewhere", "own", "use an address that it lists"),
    "no TLS": ("plain", "own", "does not speak TLS"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_server_that_cannot_prove_who_it_is_is_told_nothing(
    name: str, authority: Authority, good: Tls, tmp_path: Path
) -> None:
    which, trusted, words = WRONG[name]
    makers: dict[str, Callable[[], Tls]] = {
        "good": lambda: good,
        "expired": lambda: authority.make("expired", days=-1),
        "elsewhere": lambda: authority.make("elsewhere", "DNS:elsewhere.example"),
        "plain": Tls,
    }
    made = makers[which]()
    trust = {"own": good.authority, "none": "", "other": str(Authority(tmp_path, "other").file)}[trusted]
    engine = Engine()
    with serving(made, engine) as place:
        found = refused(proven_link.TLS + place.removeprefix(proven_link.TLS), Tls(authority=trust).client())
    assert found.reason == "untrusted"
    assert words in found.detail
    assert not engine.asked


def test_a_server_that_verifies_clients_gives_to_those_of_its_authority_only(
    authority: Authority, good: Tls, tmp_path: Path
) -> None:
    engine, stranger = Engine(), Authority(tmp_path, "stranger").make("somebody")
    with serving(replace(good, verify_clients=True), engine) as place:
        own = authority.make("client", "DNS:client").client()
        np.testing.assert_array_equal(fetch_blocks(place, TOKEN, ask(), WIDTH, None, own).payload, rows())
        for client in (Tls(authority=good.authority), Tls(stranger.certificate, stranger.key, good.authority)):
            assert refused(place, client.client()).reason in ("untrusted", "unreachable")
        assert refused(place, own, token="another").reason in ("unauthorized", "unreachable")
    assert engine.asked == 1


def test_without_the_token_a_certificate_is_not_enough(good: Tls) -> None:
    engine = Engine()
    with serving(good, engine) as place:
        found = refused(place, Tls(authority=good.authority).client(), token="another")
    assert found.reason in ("unauthorized", "unreachable")
    assert not engine.asked


def test_clients_that_never_finish_a_handshake_do_not_stop_the_next_one_and_a_silent_server_costs_the_limit(
    good: Tls,
) -> None:
    trusting = Tls(authority=good.authority).client()
    with serving(good, limit=300.0) as place:
        silent = [socket.create_connection(proven_link.parse_place(place)) for _ in range(40)]
        try:
            with socket.create_connection(proven_link.parse_place(place)) as rude:
                rude.sendall(b"GET / HTTP/1.1\r\n\r\n")  # no handshake at all
            assert len(fetch_blocks(place, TOKEN, ask(20.0), WIDTH, None, trusting).payload) == BLOCKS
        finally:
            for client in silent:
                client.close()
    with socket.create_server(("127.0.0.1", 0)) as mute:
        found = refused(f"tls://127.0.0.1:{mute.getsockname()[1]}", trusting, limit=0.3)
        assert found.reason == "timeout"


@elsewhere
def test_an_address_of_a_network_needs_tls_on_both_sides_unless_that_is_said(good: Tls) -> None:
    engine = Engine()
    with pytest.raises(ConfigError, match=r"kv_transfer\.host = .*others reach it.*tls\.certificate"):
        KvServer(engine, TOKEN, OWN)
    with serving(good, engine, host=OWN) as place:
        assert place.startswith(f"tls://{OWN}:")
        found = fetch_blocks(place, TOKEN, ask(), WIDTH, None, Tls(authority=good.authority).client())
        np.testing.assert_array_equal(found.payload, rows())
        assert (
            refused(place.removeprefix(proven_link.TLS)).reason == "plain"
        )  # a place that lost its scheme: nothing is sent
    assert engine.asked == 1
    with serving(SYSTEM, engine, host=OWN, allow_plain=True) as place:
        found_plain = refused(place)
        assert (found_plain.reason, "tls.certificate" in found_plain.detail) == ("plain", True)
        assert len(fetch_blocks(place, TOKEN, ask(), WIDTH, None, None, True).payload) == BLOCKS
    assert engine.asked == 2


async def _command(name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """An engine's answers."""
    if name == "kv_ask":
        return {"first": 0, "blocks": BLOCKS, "room": BLOCKS, "block_size": 32, "block_bytes": WIDTH, "facts": FACTS}
    if name == "kv_read":
        return {"blocks": BLOCKS, "payload": rows().tobytes(), "more": False}
    assert arguments["payload"] == rows().tobytes()
    return {"blocks": BLOCKS}


def mover(tls: Tls, **options: Any) -> KvMover:
    return KvMover(KvOptions.from_dict({"token": TOKEN, "tls": asdict(tls), **options}), _command)


@elsewhere
def test_movers_of_two_workers_speak_tls_in_a_network_and_plainly_on_loopback(good: Tls, tmp_path: Path) -> None:
    """With one section of certificates for both. The engines' answers are made up; real ones: tests/vllm/test_kv_served.py."""

    async def moved(source: KvMover, target: KvMover) -> tuple[str, str, int]:
        try:
            source.load_carrier()
            target.load_carrier()
            place = source.start_listener()
            found = await target.fetch(KvMove("t", tuple(range(320)), place, 5.0))
            return place, found.why, found.moved
        finally:
            source.close()
            target.close()

    place, why, count = asyncio.run(moved(mover(good, host=OWN), mover(good)))
    assert place.startswith("tls://")
    assert (why, count) == ("", BLOCKS * 32)
    assert not asyncio.run(moved(mover(good), mover(good)))[0].startswith("tls://")
    stranger = Tls(authority=str(Authority(tmp_path, "other").file))
    assert asyncio.run(moved(mover(good, host=OWN), mover(stranger)))[1].startswith("untrusted")
    allowed = mover(SYSTEM, host=OWN, allow_plain=True)
    assert asyncio.run(moved(allowed, mover(SYSTEM)))[1].startswith("plain")
    with pytest.raises(ConfigError, match=r"kv_transfer\.host"):
        mover(SYSTEM, host=OWN).load_carrier()
    with pytest.raises(ConfigError, match=r"tls\.authority"):
        mover(Tls(authority=str(tmp_path / "none"))).load_carrier()


def test_a_config_says_it_before_anything_starts(good: Tls) -> None:
    for host in ("node", "10.0.0.5", "0.0.0.0"):
        data: dict[str, Any] = {"rollout": {"kv_transfer": {"enabled": True, "host": host}}}
        with pytest.raises(ConfigError, match=r"kv_transfer\.host = .*or rollout\.kv_transfer\.allow_plain"):
            parse_config(data)
        tls = {"certificate": good.certificate, "key": good.key, "authority": good.authority}
        check(parse_config({**data, "tls": tls}))
        with pytest.raises(ConfigError, match=r"tls\.key = .*none\.key.*cannot be read"):
            check(parse_config({**data, "tls": {**tls, "key": "none.key"}}))
        told = kv_arguments(parse_config({**data, "tls": tls}))["kv"]
        assert KvOptions.from_dict(told).tls == asdict(good)
        data["rollout"]["kv_transfer"]["allow_plain"] = True
        assert KvOptions.from_dict(kv_arguments(parse_config(data))["kv"]).allow_plain
    assert KvOptions.from_dict(kv_arguments(parse_config({"rollout": {"kv_transfer": {"enabled": True}}}))["kv"])


def test_a_server_takes_the_certificate_of_its_own_https(good: Tls) -> None:
    """As its flags say; a served one with them: tests/vllm/test_kv_served.py."""
    config = SimpleNamespace(additional_config={})
    for given, expected in (
        ({}, {}),
        ({"ssl_certfile": "both.pem"}, {"certificate": "both.pem", "key": "both.pem"}),
        (
            {"ssl_certfile": "c", "ssl_keyfile": "k", "ssl_ca_certs": "a", "ssl_cert_reqs": 2},
            {"certificate": "c", "key": "k", "authority": "a", "verify_clients": True},
        ),
    ):
        assert control_endpoints._kv(config, FrontendOptions(), TOKEN, argparse.Namespace(**given)).tls == expected

    def flags(**values: Any) -> argparse.Namespace:
        return argparse.Namespace(ssl_certfile=None, ssl_keyfile=None, ssl_ca_certs=None, ssl_cert_reqs=0, **values)

    for host, plain, fine in (("127.0.0.1", False, True), ("10.0.0.5", False, False), ("10.0.0.5", True, True)):
        args = flags(rl_kv_host=host, rl_kv_allow_plain=plain)
        options = FrontendOptions.from_args(args)
        if fine:
            options.check_kv(args)
            continue
        with pytest.raises(ConfigError, match=r"--rl-kv-host = '10\.0\.0\.5': .*--ssl-certfile"):
            options.check_kv(args)
        args.ssl_certfile = good.certificate
        options.check_kv(args)
