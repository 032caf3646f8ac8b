"""Several runs on one fleet of servers: each its share, a history of weights of its own, and what a dead one had is the others'.
Real clients, proxies, markets, endpoints and workers on twins of vLLM's engine client."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("fastapi")

from orchestrator.api import CommandError, GenerationRequest, Sampling
from orchestrator.borrowing import server_exchange
from orchestrator.borrowing.http_worker import HttpWorker
from orchestrator.borrowing.server_exchange import Claim, Offer, offer_of, share_of_fleet
from orchestrator.config import Config
from tests.borrowing.test_server_exchange import Run, config_of, play
from tests.support.served_twins import until, used
from tests.support.vllm_twin import TOKEN, TwinServer
from vllm_rlplugin.server.server_claims import MOST, ClaimBook


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Claims end soon, for tests of who stops claiming."""
    monkeypatch.setattr(server_exchange, "LOOK_SECONDS", 0.3)


def fleet_config(servers: list[TwinServer], lease: float = 60.0, **borrowed: float) -> Config:
    """Any number of them, with looks all the time."""
    config = config_of(*(server.url for server in servers), most=len(servers), **borrowed)
    given = config.rollout.borrowed.model_copy(update={"lease": lease})
    return config.model_copy(update={"rollout": config.rollout.model_copy(update={"borrowed": given})})


def holders(servers: list[TwinServer]) -> list[str]:
    found = (server.control.lease.book.current_lease() for server in servers)
    return sorted("" if lease is None else lease.job for lease in found)


def test_a_run_that_comes_later_gets_its_share_what_was_under_way_goes_on_and_nothing_moves_after_that(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario(servers: list[TwinServer]) -> None:
        one, two = Run(fleet_config(servers), "one"), Run(fleet_config(servers), "two")
        await one.start()
        assert holders(servers) == ["one"] * 4
        for server in servers:
            server.client.paused = True
        turns = [asyncio.ensure_future(one.turn(number)) for number in range(8)]
        await until(lambda: sum(len(server.client.requests) for server in servers) == 8)
        await two.start()
        await until(lambda: holders(servers) == ["one", "one", "two", "two"])
        await until(lambda: len(one.servers) == len(two.servers) == 2)
        for server in servers:
            server.client.paused = False
        assert [len((await turn).token_ids) for turn in turns] == [20] * 8
        assert {why for _, why in one.told("returned")} == {"another job's share"}
        histories = sorted(server.worker.cycle.history.to_dict()["job"] for server in servers)
        assert histories == ["one", "one", "two", "two"]
        await asyncio.sleep(0.3)
        assert (len(one.told("returned")), two.told("returned")) == (2, []), "it stays so"
        await two.update(3)
        assert {(await one.turn(20)).versions, (await two.turn(20)).versions} == {((0, 20),), ((3, 20),)}
        await two.close()
        await until(lambda: len(one.servers) == 4)
        assert [*one.fatal, *two.fatal] == []
        await one.close()

    play(4, scenario, monkeypatch)


@pytest.mark.long
def test_a_run_of_three_times_the_weight_keeps_three_servers_of_four(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(servers: list[TwinServer]) -> None:
        heavy, light = Run(fleet_config(servers, weight=3.0), "heavy"), Run(fleet_config(servers), "light")
        await heavy.start()
        await light.start()
        await until(lambda: holders(servers) == ["heavy", "heavy", "heavy", "light"])
        await asyncio.sleep(0.4)
        assert holders(servers) == ["heavy", "heavy", "heavy", "light"]
        await light.close()
        await heavy.close()

    play(4, scenario, monkeypatch)


def test_what_a_run_had_that_died_is_the_others_when_its_leases_run_out(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(servers: list[TwinServer]) -> None:
        one, dead = Run(fleet_config(servers), "one"), Run(fleet_config(servers, lease=0.6), "dead")
        await one.start()
        await dead.start()
        await until(lambda: holders(servers) == ["dead", "one"])
        left = next(server for server in servers if server.url in dead.servers)
        left.client.paused = True
        lost = asyncio.ensure_future(dead.turn(1))
        await until(lambda: left.client.requests)
        await dead.proxy.suspend()
        dead.task.cancel()
        for worker in dead.market._made.values():
            await worker.disconnect()  # as when it is killed
        await until(lambda: holders(servers) == ["one", "one"])
        assert not left.client.requests
        await until(lambda: len(one.servers) == 2)
        assert left.worker.cycle.history.to_dict()["job"] == "one"
        assert len((await one.turn(2)).token_ids) == 20
        lost.cancel()
        await asyncio.gather(lost, dead.task, return_exceptions=True)
        await dead.proxy.close()
        await one.close()

    play(2, scenario, monkeypatch)


def test_a_second_orchestrator_of_the_same_name_is_refused_and_a_resumed_one_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario(servers: list[TwinServer]) -> None:
        first = Run(fleet_config(servers), "job")
        await first.start()
        (worker,) = first.market._made.values()
        with pytest.raises(CommandError, match=r"another process of this name: choose another run\.name"):
            await Run(fleet_config(servers), "job").market.worker(servers[0].url).hold()
        assert len((await first.turn(1)).token_ids) == 20, "who was there does not notice"
        resumed = Run(fleet_config(servers), "job", resumed=True)
        await resumed.start()
        assert worker._lease is not None
        with pytest.raises(CommandError, match="has this GPU"):
            await worker._lease.hold()
        assert len((await resumed.turn(1)).token_ids) == 20
        first.task.cancel()
        await asyncio.gather(first.task, return_exceptions=True)
        await first.proxy.close()
        await resumed.close()

    play(1, scenario, monkeypatch)


def test_a_claim_is_the_last_that_a_job_said_and_ends_by_itself() -> None:
    now = 0.0
    book = ClaimBook(lambda: now)
    book.record_claim("a", "/x", 4, 1.0, 10.0)
    book.record_claim("a", "/y", 2, 0.5, 5.0)
    book.record_claim("a", "/x", 3, 1.0, 10.0)
    assert [(claim["place"], claim["wanted"]) for claim in book.status()] == [("/y", 2), ("/x", 3)]
    now = 5.0
    assert book.status() == [{"job": "a", "place": "/x", "wanted": 3, "weight": 1.0}]
    for number in range(MOST + 10):
        book.record_claim(f"job-{number}", "", 1, 1.0, 100.0 + number)
    assert len(book.status()) == MOST
    assert book.status()[0]["job"] == "job-10", "those that end first made room"


def test_what_a_server_says_of_claims_that_cannot_be_counts_for_nothing() -> None:
    said = [None, {}, {"job": "a", "place": "", "wanted": 0, "weight": 1.0}]
    said += [{"job": "a", "place": "", "wanted": 1, "weight": weight} for weight in (0, -1.0, "1", float("nan"), True)]
    said += [{"job": "me", "place": "/m", "wanted": 3, "weight": 1.0}]
    for claims in (*([one] for one in said), "no list", 3):
        assert offer_of("u", {"claims": claims}, ("me", "/m")).claims == ()
    sound = {"job": "a", "place": "/a", "wanted": 2, "weight": 1.5}
    assert offer_of("u", {"claims": [*said, sound]}, ("me", "/m")).claims == (Claim(("a", "/a"), 2, 1.5),)


def test_alone_a_run_has_all_that_it_wants_though_some_are_silent() -> None:
    offers = [Offer("a"), Offer("b", "no answer"), Offer("c", "no answer")]
    assert share_of_fleet(offers, ["a", "b"], 3, 1.0) == 3
    claimed = [Offer("a", claims=(Claim(("other", ""), 3, 1.0),)), *offers[1:]]
    assert share_of_fleet(claimed, ["a", "b"], 3, 1.0) == 1


@pytest.mark.parametrize("wrong", [{"wanted": 0}, {"wanted": 1.5}, {"weight": 0}, {"seconds": 1e9}, {"job": ""}])
def test_a_wrong_claim_is_named(wrong: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(servers: list[TwinServer]) -> None:
        worker = HttpWorker(servers[0].url, TOKEN)
        body = {"job": "a", "place": "", "wanted": 1, "weight": 1.0, "seconds": 5.0, **wrong}
        with pytest.raises(CommandError, match=next(iter(wrong))) as caught:
            await worker._post("/rl/lease/claim", body)
        assert caught.value.code == "invalid_request"
        await worker.close()

    play(1, scenario, monkeypatch)


# -- a soak ------------------------------------------------------------------------------------------------------------

RUN = """
import asyncio, sys
from tests.borrowing.test_fleet_shares import soak_run
asyncio.run(soak_run(*sys.argv[1:]))
"""
SOAK_SECONDS = float(os.environ.get("RL_COSERVE_SOAK_SECONDS", "60"))
EACH = float(os.environ.get("RL_COSERVE_SOAK_KILL_EACH", "0"))  # seconds that the killed run has of each life, at least
LEASE, THINK = (30.0, 1.0) if EACH else (2.0, 0.0)  # seconds of a lease, and between two turns of a lane
PATIENCE = 30.0 + 3 * LEASE if EACH else 30.0  # seconds for what a death changes
ROOT = Path(__file__).parents[2]


async def soak_run(job: str, resumed: str, *urls: str) -> None:
    """A run, as far as servers go: turns all the time, a new version each second, and a line for each turn that is whole."""
    config = config_of(*urls, most=len(urls))
    given = config.rollout.borrowed.model_copy(update={"lease": LEASE})
    config = config.model_copy(update={"rollout": config.rollout.model_copy(update={"borrowed": given})})
    run = Run(config, job, resumed=bool(resumed))
    await run.start()

    async def turns(lane: int) -> None:
        number = 0
        while True:
            number += 1
            name = f"{job}-{lane}-{number}"
            request = GenerationRequest(name, name, 0, (1, 2, 3), Sampling(20), "test")
            done = await run.proxy.generate(request)
            assert (done.request_id, len(done.token_ids), run.fatal) == (name, 20, [])
            assert all(version <= run.proxy.version for version, _ in done.versions)
            print(name, flush=True)
            await asyncio.sleep(THINK)

    async def versions() -> None:
        version = 0
        while True:
            await asyncio.sleep(1.0)
            version += 1
            await run.update(version)

    async with asyncio.TaskGroup() as group:
        group.create_task(versions())
        for lane in range(8):
            group.create_task(turns(lane))


class SoakRun:
    """Such a run in a process of its own, and the turns that it had."""

    def __init__(self, job: str, urls: list[str]) -> None:
        self._job, self._urls = job, urls
        self._process: asyncio.subprocess.Process | None = None
        self.turns: list[str] = []
        self.starts = 0

    async def start(self) -> None:
        command = [sys.executable, "-c", RUN, self._job, "again" if self.starts else "", *self._urls]
        self.starts += 1
        self._process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, cwd=ROOT)
        self._reading = asyncio.create_task(self._read(self._process))

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        while line := await process.stdout.readline():
            self.turns.append(line.decode().strip())

    async def more(self) -> None:
        """Until it has had twenty turns more."""
        enough = len(self.turns) + 20
        await until(lambda: len(self.turns) > enough)

    async def kill(self) -> bool:
        """Whether it was alive. Idempotent."""
        process, self._process = self._process, None
        if process is None:
            return False
        alive = process.returncode is None
        if alive:
            process.send_signal(signal.SIGKILL)
        await process.wait()
        await self._reading
        return alive


@pytest.mark.long
@pytest.mark.timeout((SOAK_SECONDS + EACH) * 3 + 120)
def test_two_runs_share_a_fleet_while_one_is_killed_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RL_COSERVE_TOKEN", TOKEN)

    async def main() -> None:
        servers = [await TwinServer().start() for _ in range(4)]
        for server in servers:
            server.client.relay.update(dict.fromkeys(range(10_000), ""))
            used(server, 0.1)
        urls = [server.url for server in servers]
        steady, killed = SoakRun("steady", urls), SoakRun("killed", urls)
        try:
            kills = await soak(servers, steady, killed)
        finally:
            for run in (steady, killed):
                await run.kill()
            for server in servers:
                await server.stop()
        print(f"{kills} kills, {len(steady.turns)} turns of the one, {len(killed.turns)} of the other")

    asyncio.run(main())


async def soak(servers: list[TwinServer], steady: SoakRun, killed: SoakRun) -> int:
    """How often the one was killed."""
    end, kills = time.monotonic() + SOAK_SECONDS, 0
    await steady.start()
    await until(lambda: holders(servers) == ["steady"] * 4)
    while time.monotonic() < end:
        await killed.start()
        async with asyncio.timeout(2 * PATIENCE):
            await until(lambda: holders(servers) == ["killed", "killed", "steady", "steady"])
            await steady.more()
            await killed.more()
        await asyncio.sleep(EACH)
        assert holders(servers) == ["killed", "killed", "steady", "steady"], "nothing moved meanwhile"
        assert {server.worker.cycle.history.to_dict()["job"] for server in servers} == {"steady", "killed"}
        assert await killed.kill(), "it had not ended by itself"
        kills += 1
        async with asyncio.timeout(PATIENCE):
            await until(lambda: holders(servers) == ["steady"] * 4)
            await steady.more()
        left = [name for server in servers for name in server.client.requests if "killed" in name]
        assert left == [], "its engines' requests ended with its leases"
    assert len(set(steady.turns)) == len(steady.turns), "no turn comes twice"
    assert await steady.kill()
    async with asyncio.timeout(PATIENCE):
        await until(lambda: holders(servers) == [""] * 4 and not any(one.client.requests for one in servers))
    return kills
