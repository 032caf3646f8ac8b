"""The hosts that other tests run on: links with a limit, processes of their own, and nothing left of them."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.hosts import Host, Hosts, why_not
from tests.support.waiting import wait_for

pytestmark = [pytest.mark.skipif(bool(why_not()), reason=why_not()), pytest.mark.timeout(60)]
BYTES = 24 << 20
SERVE = """
import socket
with socket.create_server(("0.0.0.0", 9)) as server:
    print("up", flush=True)
    peer, _ = server.accept()
    while peer.recv(1 << 20): pass
"""
SEND = f"""
import socket, time
peer = socket.create_connection(("10.77.0.1", 9), 10)
begun = time.monotonic()
peer.sendall(bytes({BYTES}))
peer.shutdown(socket.SHUT_WR)
peer.recv(1)
print(time.monotonic() - begun)
"""


@pytest.fixture(scope="module")
def hosts() -> Iterator[list[Host]]:
    with Hosts(2, "200mbit") as made:
        yield made.all


def test_a_link_has_its_rate_and_counts_its_bytes(hosts: list[Host]) -> None:
    server = hosts[0].start([sys.executable, "-S", "-c", SERVE], stdout=subprocess.PIPE)
    assert server.stdout is not None
    assert server.stdout.readline() == "up\n"
    before = hosts[1].sent(), hosts[0].received()
    seconds = float(hosts[1].run([sys.executable, "-S", "-c", SEND]))
    assert server.wait(10) == 0
    sent, received = hosts[1].sent() - before[0], hosts[0].received() - before[1]
    assert min(sent, received) > BYTES
    assert max(sent, received) < 1.1 * BYTES
    assert BYTES * 8 / seconds < 1.2 * 200e6  # and a burst of 1 MB


def test_a_rank_that_ran_alone_in_the_test_leaves_nothing_to_a_host(
    hosts: list[Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert "GLOO_SOCKET_IFNAME" not in hosts[0].run(["env"])


def test_what_a_host_has_in_shared_memory_is_its_own(hosts: list[Host]) -> None:
    hosts[0].run(["touch", "/dev/shm/of-a-host"])
    assert hosts[0].run(["ls", "/dev/shm"]) == "of-a-host\n"
    assert hosts[1].run(["ls", "/dev/shm"]) == ""
    assert not Path("/dev/shm/of-a-host").exists()


def test_a_host_that_dies_and_a_link_that_is_cut_leave_the_others_alone(hosts: list[Host]) -> None:
    sleepers = [host.start(["sleep", "60"]) for host in hosts]
    deadline = time.monotonic() + 10
    while not all(host.pids() for host in hosts) and time.monotonic() < deadline:
        time.sleep(0.05)
    hosts[0].kill()
    assert sleepers[0].wait(10) != 0
    assert hosts[0].pids() == []
    assert sleepers[1].poll() is None
    ping = 'import socket; socket.create_connection(("10.77.0.2", 9), 2)'
    assert "refused" in failure(hosts[0], ping)
    hosts[1].set_link(up=False)
    assert "refused" not in failure(hosts[0], ping)
    hosts[1].set_link(up=True)
    assert "refused" in failure(hosts[0], ping)


def failure(host: Host, program: str) -> str:
    with pytest.raises(subprocess.CalledProcessError) as error:
        host.run([sys.executable, "-S", "-c", program], timeout=20)
    return str(error.value.output)


def test_nothing_is_left_of_hosts_and_their_processes() -> None:
    with Hosts(1) as made:
        process = made.all[0].start(["sleep", "61"])
        deadline = time.monotonic() + 10
        while not made.all[0].pids() and time.monotonic() < deadline:
            time.sleep(0.05)
    assert process.wait(10) != 0
    assert subprocess.run(["pgrep", "-f", "sleep 61"], check=False, capture_output=True).stdout == b""
    assert "br0" not in subprocess.run(["ip", "link"], check=True, capture_output=True, text=True).stdout


def test_nothing_is_left_of_hosts_whose_test_was_killed() -> None:
    program = (
        "import subprocess, time; from tests.support.hosts import Hosts\n"
        "with Hosts(1) as made:\n"
        "    made.all[0].start(['sleep', '62'], stdin=subprocess.DEVNULL)\n"
        "    while not made.all[0].pids(): time.sleep(0.05)\n"
        "    print(made._first(), flush=True); time.sleep(60)"
    )
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as test:
        assert test.stdout is not None
        first = Path("/proc", test.stdout.readline().strip())
        assert first.exists()
        test.kill()
    wait_for(lambda: not first.exists())
    wait_for(lambda: not subprocess.run(["pgrep", "-f", "sleep 62"], check=False, capture_output=True).stdout)
