"""One RL job a serving GPU: the lease of its server. The real endpoints, worker and client on a twin of vLLM's engine client, and
runs that are processes of their own."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("fastapi")

from orchestrator.api import CommandError, GenerationRequest, RetryableError, Sampling
from orchestrator.api import http as wire
from orchestrator.borrowing.http_worker import HttpWorker
from orchestrator.transfer import RelayEndpoint
from tests.support.served_twins import twins, until
from tests.support.vllm_twin import ENDPOINT, TOKEN, TwinServer
from vllm_rlplugin.server.server_lease import LeaseBook

ROOT = Path(__file__).parents[2]
# A run, as far as leases go: it takes one when it is told to, says how it went, and lives on.
RUN = """
import asyncio, sys
from orchestrator.api import CommandError
from orchestrator.borrowing.http_worker import HttpWorker
from orchestrator.transfer import RelayEndpoint

async def main(url, job, token, seconds):
    relay = RelayEndpoint.from_dict({"job": job, "kind": "memory", "master": "twin-relay"})
    worker = HttpWorker(url, token, relay=relay, lease=float(seconds))
    await worker.status()
    print("ready", flush=True)
    while await asyncio.to_thread(sys.stdin.readline):
        try:
            await worker.hold()
            print("held", flush=True)
        except CommandError as error:
            print(error.code, error.detail, flush=True)

asyncio.run(main(*sys.argv[1:]))
"""


def client(server: TwinServer, job: str, lease: float = 60.0) -> HttpWorker:
    return HttpWorker(server.url, TOKEN, job, relay=RelayEndpoint.from_dict({**ENDPOINT, "job": job}), lease=lease)


def play(scenario: Callable[..., Awaitable[None]], number: int = 1, pool: Path | None = None) -> None:
    async def main() -> None:
        async with twins(number, versions=20, pool=pool) as servers:
            await scenario(*servers)

    asyncio.run(main())


async def a_run(server: TwinServer, job: str, seconds: float) -> asyncio.subprocess.Process:
    pipe = asyncio.subprocess.PIPE
    arguments = (sys.executable, "-c", RUN, server.url, job, TOKEN, f"{seconds}")
    process = await asyncio.create_subprocess_exec(*arguments, stdin=pipe, stdout=pipe, cwd=ROOT)
    assert await said(process) == "ready"
    return process


async def said(process: asyncio.subprocess.Process) -> str:
    assert process.stdout is not None
    return (await process.stdout.readline()).decode().strip()


def tell(process: asyncio.subprocess.Process) -> None:
    assert process.stdin is not None
    process.stdin.write(b"go\n")


def test_of_two_runs_that_ask_at_once_one_gets_the_server_and_the_other_when_that_one_died() -> None:
    async def scenario(server: TwinServer) -> None:
        runs = dict(
            zip(("one", "two"), await asyncio.gather(*(a_run(server, job, 1.0) for job in ("one", "two"))), strict=True)
        )
        try:
            for process in runs.values():
                tell(process)
            answers = dict(zip(runs, await asyncio.gather(*map(said, runs.values())), strict=True))
            (winner,) = [job for job, answer in answers.items() if answer == "held"]
            (loser,) = [job for job in runs if job != winner]
            assert answers[loser].startswith(f"leased job {winner} has this GPU")
            await asyncio.sleep(1.5)  # renewed meanwhile
            tell(runs[loser])
            assert (await said(runs[loser])).startswith("leased")
            runs[winner].send_signal(signal.SIGKILL)
            await asyncio.sleep(1.2)
            tell(runs[loser])
            assert await said(runs[loser]) == "held"
        finally:
            for process in runs.values():
                if process.returncode is None:
                    process.kill()
                await process.wait()

    play(scenario)


def test_all_engines_of_a_pool_have_one_lease_which_ends_with_the_last_that_is_given_back(tmp_path: Path) -> None:
    async def scenario(left: TwinServer, right: TwinServer) -> None:
        one = [client(left, "one"), client(right, "one")]
        for each in one:  # two lives of one job would shut each other out
            each._headers[wire.LEASE_HEADER] = "the-key-of-this-run"
            await each.start()
        two = client(right, "two")
        for each in one:
            with pytest.raises(CommandError, match="job one has this GPU"):
                await two.start()
            await each.close()
        await two.start()
        assert (await two.status())["lease"]["job"] == "two"
        await two.close()
        assert list(tmp_path.glob("*.lease")) == []

    play(scenario, 2, tmp_path / "pool")


def test_servers_that_are_processes_of_their_own_never_give_one_gpu_to_two_jobs(tmp_path: Path) -> None:
    server = """
import os, sys, time
from pathlib import Path
from orchestrator.api import CommandError
from vllm_rlplugin.server.server_lease import LeaseBook
folder, job = Path(sys.argv[1]), sys.argv[2]
book, alone, had = LeaseBook(job, folder / "pool.lease"), folder / "alone", 0
end = time.monotonic() + 30
while had < 50 and time.monotonic() < end:
    try:
        book.grant(job, "", f"the-key-of-{job}", 10)
    except CommandError:
        time.sleep(0.0003)
        continue
    os.close(os.open(alone, os.O_CREAT | os.O_EXCL))  # fails if anybody else has it
    time.sleep(0.0003)
    alone.unlink()
    book.end_lease(f"the-key-of-{job}")
    had += 1
    time.sleep(0.0005)
print(had)
"""
    words = [sys.executable, "-c", server, str(tmp_path)]
    servers = [subprocess.Popen([*words, job], cwd=ROOT, stdout=subprocess.PIPE, text=True) for job in ("a", "b", "c")]
    told = [process.communicate(timeout=60)[0].strip() for process in servers]
    assert ([process.returncode for process in servers], told) == ([0] * 3, ["50"] * 3)


def test_two_jobs_of_one_name_are_two_and_a_resumed_one_shuts_its_former_life_out() -> None:
    now = 0.0
    book = LeaseBook("server", clock=lambda: now)
    book.grant("run-001", "/a/metadata", "k1", 10)
    with pytest.raises(CommandError, match="job run-001 has this GPU for at least 10 s more"):
        book.grant("run-001", "/b/metadata", "k2", 10)
    with pytest.raises(CommandError, match="another process of this name"):
        book.grant("run-001", "/a/metadata", "k3", 10)
    book.grant("run-001", "/a/metadata", "k3", 10, takeover=True)
    assert (book.refusal("k3"), bool(book.refusal("k1")), bool(book.refusal(""))) == ("", True, True)
    assert not book.end_lease("k1")
    now = 10.0
    assert book.current_lease() is None
    assert book.refusal("") == ""


def test_nobody_but_the_holder_commands_the_engine_and_everybody_may_look() -> None:
    async def scenario(server: TwinServer) -> None:
        mine, other = client(server, "mine"), HttpWorker(server.url, TOKEN)
        await mine.start()
        request = GenerationRequest("r", "t", 0, (1, 2), Sampling(4), "test")
        for call in (
            other.add([request]),
            other.suspend(),
            other.prepare(0),
            other.update(0),
            other.resume(),
            other.prioritize({"t": 1}),
            other.completions(),
            other._post("/pause", None),
            other._post(wire.CONNECT, {"init_info": {"endpoint": ENDPOINT}}),
        ):
            with pytest.raises(CommandError) as caught:
                await call
            assert caught.value.code == "leased"
        assert (await other.status())["lease"]["job"] == "mine"
        assert (await other.stats()).running == 0
        await mine.close()
        await other.add([request])
        assert [done.request_id for done in await other.completions()] == ["r"]
        await other.close()

    play(scenario)


def test_what_a_dead_run_left_is_ended_and_the_engine_that_it_had_stopped_goes_on_for_its_users() -> None:
    async def scenario(server: TwinServer) -> None:
        dead = client(server, "dead", lease=0.6)
        await dead.start()
        await dead.prepare(0)
        await dead.suspend()
        await dead.add([GenerationRequest("r", "t", 0, (1, 2), Sampling(200), "test")])
        await until(lambda: server.client.requests)
        await dead.disconnect()  # as when it is killed
        await until(lambda: not server.client.paused)
        assert not server.client.requests
        assert (
            server.control.lease.expired >= 1
        )  # a loop that stands still for longer than the lease loses it once more
        other = client(server, "other")
        await other.start()
        await other.close()

    play(scenario)


@pytest.mark.parametrize(
    ("body", "key", "named"),
    [
        ({"job": "", "place": "", "seconds": 5}, "k" * 16, "job"),
        ({"job": "a", "place": "", "seconds": 0}, "k" * 16, "seconds"),
        ({"job": "a", "place": "", "seconds": 1e9}, "k" * 16, "seconds"),
        ({"job": "a", "place": "", "seconds": 301}, "k" * 16, "seconds"),  # that users may wait for a dead run
        ({"job": "a", "place": "", "seconds": 5, "force": True}, "k" * 16, "force"),
        ({"job": "a", "place": "", "seconds": 5}, "short", wire.LEASE_HEADER),
    ],
)
def test_a_wrong_request_for_a_lease_is_named(body: dict[str, Any], key: str, named: str) -> None:
    async def scenario(server: TwinServer) -> None:
        worker = HttpWorker(server.url, TOKEN)
        worker._headers[wire.LEASE_HEADER] = key
        with pytest.raises(CommandError, match=named) as caught:
            await worker._post(wire.LEASE, body)
        assert caught.value.code == "invalid_request"
        await worker.close()

    play(scenario)


def test_a_record_that_is_damaged_or_locked_is_an_error_that_names_it(tmp_path: Path) -> None:
    book = LeaseBook("server", tmp_path / "pool.lease")
    book.grant("job", "", "k", 5)
    assert (tmp_path / "pool.lease").stat().st_mode & 0o777 == 0o600
    (tmp_path / "pool.lease").write_text('{"job"')
    with pytest.raises(RetryableError, match=r"pool\.lease cannot be read"):
        book.current_lease()
    (tmp_path / "pool.lease").unlink()
    (tmp_path / "elsewhere").write_text("{}")
    os.symlink(tmp_path / "elsewhere", tmp_path / "pool.lease")
    with pytest.raises(RetryableError, match="cannot be read"):
        book.grant("job", "", "k", 5)


asked = st.tuples(st.sampled_from("abc"), st.sampled_from(("s1", "s2")), st.floats(0.1, 20), st.floats(0, 10))


@given(st.lists(st.tuples(st.booleans(), asked), max_size=40))
def test_whatever_happens_at_most_one_job_holds_and_it_is_the_one_that_was_granted(history: list[Any]) -> None:
    now, granted = 0.0, dict[tuple[str, str], float]()  # (job, server) -> until, by the answers alone
    books = {name: LeaseBook(name, clock=lambda: now) for name in ("s1", "s2")}
    books["s2"]._read, books["s2"]._write = books["s1"]._read, books["s1"]._write  # type: ignore[method-assign]
    for takes, (job, server, seconds, passed) in history:
        now += passed
        holders = {name for (name, _), until in granted.items() if until > now}
        if takes:
            try:
                books[server].grant(job, "", job, seconds)
                assert holders <= {job}
                granted[job, server] = now + seconds
            except CommandError:
                assert holders - {job}
        else:
            books[server].end_lease(job)
            granted.pop((job, server), None)
        holders = {name for (name, _), until in granted.items() if until > now}
        found = books["s1"].current_lease()
        assert holders == (set() if found is None else {found.job})
        assert len(holders) <= 1
