"""What becomes of a server whose run died, stood still or could not say goodbye: it goes on for its users, whatever was under
way. The real endpoints, worker and client on a twin of vLLM's engine client."""

from __future__ import annotations

import asyncio
import fcntl
import os
import time
from pathlib import Path

import pytest

pytest.importorskip("fastapi")

from orchestrator.api import CommandError, GenerationRequest, RetryableError, Sampling
from orchestrator.borrowing.http_worker import HttpWorker
from tests.borrowing.test_run_lease import client, play
from tests.support.served_twins import until
from tests.support.vllm_twin import TOKEN, TwinServer
from vllm_rlplugin.server.server_lease import LeaseBook


def request(name: str, tokens: int = 200) -> GenerationRequest:
    return GenerationRequest(name, f"t-{name}", 0, (1, 2), Sampling(tokens), "test")


async def stopped(server: TwinServer, job: str, lease: float) -> HttpWorker:
    """A run that has suspended the engine, with a request on it, and is about to load weights."""
    worker = client(server, job, lease=lease)
    await worker.start()
    await worker.prepare(0)
    await worker.add([request("r")])
    await until(lambda: server.client.requests)
    await worker.suspend()
    return worker


def test_a_lease_that_ends_while_weights_are_being_loaded_lets_the_engine_go_on_when_they_are() -> None:
    async def scenario(server: TwinServer) -> None:
        dead = await stopped(server, "dead", 0.6)
        server.client.hold.clear()  # the update takes longer than the lease
        updating = asyncio.ensure_future(dead.update(0))
        await until(lambda: "finish_weight_update" in server.client.calls)
        await dead.disconnect()
        await asyncio.gather(updating, return_exceptions=True)
        await until(lambda: not server.client.requests)
        await asyncio.sleep(1.2)
        assert server.client.paused, "not half-way"
        server.client.hold.set()
        await until(lambda: not server.client.paused)

    play(scenario)


def test_the_next_job_gets_a_server_without_what_the_one_before_left_however_soon_it_asks() -> None:
    async def scenario(server: TwinServer) -> None:
        dead = await stopped(server, "dead", 0.6)
        await dead.disconnect()
        other = client(server, "other")
        while True:  # at once: before the server has looked
            try:
                await other.hold()
                break
            except CommandError:
                await asyncio.sleep(0.001)
        assert not server.client.requests
        async with asyncio.timeout(5):
            await other.start()
            await other.prepare(0)
        await other.suspend()
        await asyncio.sleep(1.2)
        assert server.client.paused, "what the new one stopped stands still"
        await other.update(0)
        await other.resume()
        await other.add([request("new", 4)])
        assert [done.request_id for done in await other.completions()] == ["new"]
        await other.close()

    play(scenario)


def test_a_run_whose_lease_has_run_out_stops_no_engine_until_it_has_one_again() -> None:
    async def scenario(server: TwinServer) -> None:
        run = client(server, "run", lease=0.6)
        await run.start()
        await run.prepare(0)
        assert run._lease is not None
        run._lease.stop()  # as when its loop stands still, or the network is away
        await until(lambda: server.control.lease.expired)
        for stop in (run.suspend, lambda: run._post("/pause", None)):
            with pytest.raises(RetryableError, match="lease of this server has run out"):
                await stop()
        assert not server.client.paused, "its users would wait for ever for who may be dead"
        await run.restart()
        await run._post("/pause?mode=keep", None)
        await run.disconnect()
        await until(lambda: server.client.paused)
        await until(lambda: not server.client.paused)

    play(scenario)


def test_a_run_that_ends_while_its_server_fails_to_answer_does_not_leave_the_engine_stopped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario(server: TwinServer) -> None:
        run = await stopped(server, "run", 60.0)

        async def no_answer() -> None:
            raise RetryableError("the abort was lost")

        monkeypatch.setattr(run, "_clear", no_answer)
        await run.close()  # the lease is given back all the same
        await until(lambda: not server.client.paused)

    play(scenario)


def test_a_server_answers_while_another_process_has_the_record_locked(tmp_path: Path) -> None:
    async def scenario(server: TwinServer) -> None:
        run = client(server, "run")
        await run.hold()
        handle = os.open(tmp_path / "pool.lease.lock", os.O_RDWR)
        fcntl.flock(handle, fcntl.LOCK_EX)  # a process that was stopped in there
        try:
            begun = time.monotonic()
            renewing = asyncio.ensure_future(run._lease._post("/rl/lease", run._lease._body))  # type: ignore[union-attr]
            await asyncio.sleep(0.1)
            asker = HttpWorker(server.url, TOKEN)
            await asker.status()
            assert time.monotonic() - begun < 0.8, "it waits for a second"
            await asker.disconnect()
            with pytest.raises(RetryableError, match="locked by another process"):
                await renewing
        finally:
            os.close(handle)
        await run.hold()
        await run.close()

    play(scenario, pool=tmp_path / "pool")


def test_a_record_that_is_damaged_leaves_the_status_answering(tmp_path: Path) -> None:
    async def scenario(server: TwinServer) -> None:
        (tmp_path / "pool.lease").write_text('{"job"')
        asker = HttpWorker(server.url, TOKEN)
        assert "cannot be read" in (await asker.status())["lease"]["error"]
        await asker.disconnect()

    play(scenario, pool=tmp_path / "pool")


def test_a_record_of_a_clock_that_was_set_back_does_not_hold(tmp_path: Path) -> None:
    LeaseBook("server", tmp_path / "pool.lease", clock=lambda: 1e6).grant("before", "", "the-key-of-before", 60)
    now = LeaseBook("server", tmp_path / "pool.lease", clock=lambda: 100.0)
    assert now.current_lease() is None
    assert now.grant("job", "", "the-key-of-the-job", 60).job == "job"


def test_no_file_of_another_is_written_through(tmp_path: Path) -> None:
    book, victim = LeaseBook("server", tmp_path / "pool.lease"), tmp_path / "victim"
    victim.write_text("mine")
    (tmp_path / f"pool.lease.{os.getpid()}").symlink_to(victim)
    book.grant("job", "", "the-key-of-the-job", 60)
    assert victim.read_text() == "mine"
    (tmp_path / "pool.lease.lock").unlink()
    (tmp_path / "pool.lease.lock").symlink_to(victim)
    with pytest.raises(RetryableError, match="cannot be opened"):
        book.grant("job", "", "the-key-of-the-job", 60)


def test_a_pipe_in_the_place_of_the_record_holds_up_nobody(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pool.lease")
    book = LeaseBook("server", tmp_path / "pool.lease")
    with pytest.raises(RetryableError, match="cannot be read"):
        book.current_lease()
