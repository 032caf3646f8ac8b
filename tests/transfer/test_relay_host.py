"""``relay.host``: where the embedded master listens, and what clients say their own address is."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator.api import ConfigError
from orchestrator.borrowing import served_workers
from orchestrator.config import parse_config
from orchestrator.ops.check import Check, Finding
from orchestrator.ops.doctor import CHECKS
from orchestrator.ops.doctor_config import checks_for_config
from orchestrator.runtime.mooncake_master import MooncakeMaster, own_address
from orchestrator.transfer import RelayEndpoint
from orchestrator.transfer.mooncake_relay import seen_from

# In a process of its own, as everywhere: Mooncake brings threads.
CLIENT = """
import sys
from orchestrator.transfer import RelayEndpoint, open_relay
endpoint = RelayEndpoint(job="host", master=sys.argv[1])
lender = open_relay(endpoint, segment_bytes=16 << 20)
lender.put("host/1", memoryview(b"1234"))
reader, buffer = open_relay(endpoint), bytearray(4)
assert reader.get_into("host/1", memoryview(buffer)) == 4 and buffer == b"1234"
reader.close()
lender.close()
"""


@pytest.mark.parametrize("host", ["", "0.0.0.0:1", "a b", "-x", "http://x", "::1"])
def test_what_is_no_host_is_refused_with_the_field(host: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config({"relay": {"host": host}})
    assert caught.value.field == "relay.host"


@pytest.mark.parametrize("host", ["0.0.0.0", "192.0.2.1", "no-such-host.invalid"])
def test_an_address_that_is_not_this_machines_alone_is_refused_before_anything_starts(host: str) -> None:
    with pytest.raises(ConfigError) as caught:
        own_address(host)
    assert caught.value.field == "relay.host"
    assert own_address("127.0.0.1") == "127.0.0.1"


def test_a_server_elsewhere_needs_a_relay_that_it_reaches() -> None:
    urls = ["https://gpu.example:8000"]
    elsewhere = {"workers": 0, "served": urls}
    with pytest.raises(ConfigError, match=r"relay\.host"):
        served_workers._reachable(parse_config({"rollout": elsewhere}), urls)
    served_workers._reachable(parse_config({"rollout": elsewhere, "relay": {"host": "10.0.0.5"}}), urls)


def test_a_client_says_the_address_that_the_master_sees() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        own = seen_from(f"127.0.0.1:{listener.getsockname()[1]}")
        connection, (peer, _) = listener.accept()
        connection.close()
    assert own == peer
    assert RelayEndpoint(job="j", master="m:1").host == ""


@pytest.mark.engine
def test_the_master_listens_at_its_host_only_and_weights_go_through_it(tmp_path: Path) -> None:
    async def measure() -> None:
        for last in (False, False, True):  # another program may have the same port of the other address
            master = MooncakeMaster(host="127.0.0.2", log=tmp_path / "log")
            await master.start()
            host, _, port = master.address.rpartition(":")
            with socket.socket() as probe:
                free = probe.connect_ex(("127.0.0.1", int(port))) != 0
            if free or last:
                break
            await master.stop()
        try:
            assert host == "127.0.0.2"
            assert free
            done = await asyncio.to_thread(
                subprocess.run,
                [sys.executable, "-c", CLIENT, master.address],
                capture_output=True,
                text=True,
                timeout=60,
            )
            assert done.returncode == 0, done.stderr[-800:]
        finally:
            await master.stop()

    asyncio.run(measure())


def relay_finding(relay: dict[str, object]) -> Finding:
    checks = checks_for_config(CHECKS, parse_config({"relay": relay}))
    assert ("mooncake store" in [check.name for check in checks]) == (relay.get("kind", "mooncake") == "mooncake")
    return next(result for result in map(_result, checks) if result is not None)


def _result(check: Check) -> Finding | None:
    return check.run() if check.name == "relay" else None


def test_the_doctor_looks_at_the_relay_of_a_config(tmp_path: Path) -> None:
    found = relay_finding({"kind": "fsspec", "master": f"file://{tmp_path}/relay"})
    assert found.status == "ok"
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []  # nothing stays
    (tmp_path / "file").write_text("in the way")
    assert relay_finding({"kind": "fsspec", "master": f"file://{tmp_path}/file"}).status == "fail"
    assert relay_finding({}).status == "ok"
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        assert "127.0.0.1" in relay_finding({"master": address}).detail
    gone = relay_finding({"master": address})
    assert (gone.status, bool(gone.fix)) == ("fail", True)
    with pytest.raises(ConfigError):
        relay_finding({"host": "192.0.2.1"})
