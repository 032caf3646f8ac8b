"""How versions reach workers: straight from the trainer beside the relay, and from there for all others. Simulated twins."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from typing import Any

import pytest

from orchestrator.api import (
    CollectiveTrainer,
    CollectiveWorker,
    GenerationRequest,
    Meeting,
    PartLost,
    ProcessDied,
    PublishResult,
    RetryableError,
    Sampling,
)
from orchestrator.config import Config, load_config
from orchestrator.events import EventLog, MemorySink
from orchestrator.proxy.gateway import LLMProxy
from orchestrator.proxy.worker_state import WorkerLimits
from orchestrator.sim.cost_model import SEND_SHARE
from orchestrator.sim.run_audit import RunAudit
from orchestrator.sim.simulated_run import SimResult, simulate
from orchestrator.sim.simulated_worker import SimWeights, SimWorker
from orchestrator.sim.twins import SimTrainer
from orchestrator.transfer.announcement import STOCK_BACKEND
from orchestrator.weight_sync import WeightSync
from scripts.bench.virtual_run import run

PUBLISH, UPDATE, LIMIT = 10.0, 4.0, 20.0
RESTART_SECONDS = 5.0  # the default of sim.start_seconds


def config(*overrides: str) -> Config:
    costs = (f"sim.publish_seconds={PUBLISH}", f"sim.update_seconds={UPDATE}")
    return load_config(None, ["rollout.weights=collective", f"rollout.collective_timeout={LIMIT}", *costs, *overrides])


class RelayOnly:
    """A worker that cannot receive: a server's, in a run."""

    def __init__(self, inner: SimWorker) -> None:
        names = ("add", "abort", "prioritize", "completions", "suspend", "prepare", "update", "resume", "stats")
        for name in (*names, "close", "restart"):
            setattr(self, name, getattr(inner, name))
        self.name = inner.name


class Rig:
    """A trainer at ``version``, workers, and the delivery between them."""

    def __init__(self, settings: Config, workers: int = 2, relay_only: int = 0, *, current_only: bool = False) -> None:
        self.sink = MemorySink()
        self.events = EventLog(self.sink, asyncio.get_running_loop().time, 0.0)
        self.weights = SimWeights()
        self.trainer = SimTrainer(settings, self.weights, RunAudit(settings))
        self.workers = [SimWorker(f"w{index}", settings, self.weights) for index in range(workers + relay_only)]
        ports: list[Any] = [*self.workers[:workers], *map(RelayOnly, self.workers[workers:])]
        self.proxy = LLMProxy(
            ports,
            self.events,
            limits=WorkerLimits(60.0, 60.0, 60.0, 60.0, 4 * 60.0),
            restarts=2,
            current_only=current_only,
            on_fatal=self._fail,
        )
        self.proxy.start()
        self.delivery = WeightSync(self.trainer, self.proxy, self.events, self._call, settings.collective_limit)
        self.asked: list[tuple[int, bool]] = []  # of the trainer: receivers, whether anew
        stock = self.trainer.send

        async def send(receivers: int, limit: float, anew: bool) -> tuple[Meeting, ...]:
            self.asked.append((receivers, anew))
            return await stock(receivers, limit, anew)

        self.trainer.send = send  # type: ignore[method-assign]

    def _fail(self, error: Exception) -> None:
        raise error

    async def _call(self, _: str, call: Coroutine[Any, Any, Any], /) -> Any:
        return await call

    async def deliver(self, version: int) -> None:
        self.trainer.version = version
        await self.delivery.begin_publishing(version, version)
        await self.delivery.lead(version, version)
        await self.delivery.follow(version, version)

    async def held(self) -> list[int]:
        return [(await worker.stats()).version for worker in self.workers]

    def seen(self, kind: str) -> list[dict[str, Any]]:
        return [event for line in self.sink.lines if (event := json.loads(line))["kind"] == kind]

    async def close(self) -> None:
        await self.delivery.close()
        await self.proxy.close()
        for worker in self.workers:
            await worker.close()


def request(name: str, tokens: int = 20, turn: int = 0) -> GenerationRequest:
    return GenerationRequest(f"{name}/{turn}", name, turn, (2, 3, 4), Sampling(tokens), "sim")


def test_the_twins_have_the_ports_and_a_server_has_not() -> None:
    async def main() -> None:
        rig = Rig(config(), 1, 1)
        assert isinstance(rig.trainer, CollectiveTrainer)
        assert [isinstance(lane.worker, CollectiveWorker) for lane in rig.proxy.states] == [True, False]
        await rig.close()

    run(main())


def stages(result: SimResult, name: str) -> list[dict[str, Any]]:
    events = [json.loads(line) for line in result.events.decode().splitlines()]
    return [event for event in events if event["kind"] == "stage" and event["stage"] == name]


@pytest.mark.parametrize("mode", [("sync", 0), ("async", 1)])
def test_own_workers_resume_before_the_version_is_on_the_relay_and_the_run_is_faster(mode: tuple[str, int]) -> None:
    small = ["run.steps=4", "rollout.workers=2", "rollout.groups_per_step=3", "rollout.group_size=3"]
    small += ["rollout.environments=18", "evaluation.prompts=4", f"run.mode={mode[0]}", f"rollout.alpha={mode[1]}"]
    result = simulate(config(*small))
    plain = simulate(config(*small, "rollout.weights=relay"))
    assert result.summary["reason"] == "completed"
    ends = {event["step"]: event["end"] for event in stages(result, "publish")[1:]}
    resumed = stages(result, "resume")[1:]
    assert len(resumed) == 4
    # An asynchronous run may have begun to train when its version had been out for long: those of others come first.
    first = sum(event["end"] < ends[event["step"] - mode[1]] for event in resumed)
    assert first == 4 if mode[0] == "sync" else first >= 2
    assert result.summary["seconds"] < plain.summary["seconds"]
    if mode[0] == "sync":
        asked = {event["step"]: event["start"] for event in stages(result, "get_batch")}
        assert all(asked[step + 1] < ends[step] for step in (0, 1, 2)), "the next batch does not wait for the relay"
    for published, trained in zip(stages(result, "publish")[1:], stages(result, "train_step")[1:], strict=False):
        assert trained["start"] >= published["end"], "the weights stay as they are until they are published"


def test_those_that_cannot_receive_get_the_version_from_the_relay_after_the_others_have_resumed() -> None:
    async def main() -> None:
        rig = Rig(config(), 2, 1)
        await rig.deliver(0)
        rig.trainer.version = 1
        clock = asyncio.get_running_loop().time
        begun = clock()
        await rig.delivery.begin_publishing(1, 1)
        await rig.delivery.lead(1, 1)
        assert clock() - begun == pytest.approx(SEND_SHARE * UPDATE + 0.25 * UPDATE, abs=0.1)
        assert await rig.held() == [1, 1, 0]
        assert rig.proxy.unpublished == 1
        assert rig.proxy.behind
        await rig.delivery.follow(1, 1)
        assert clock() - begun == pytest.approx(PUBLISH + UPDATE, abs=0.1)
        assert await rig.held() == [1, 1, 1]
        assert not rig.proxy.behind
        assert len(rig.seen("update")) == 6
        assert rig.asked == [(2, True), (2, False)]
        assert rig.seen("fault") == []
        await rig.close()

    run(main())


def test_a_worker_behind_the_others_goes_on_with_its_own_trajectories_only_where_staleness_is_allowed() -> None:
    async def answered_by(current_only: bool) -> list[int]:
        rig = Rig(config(), 1, 1, current_only=current_only)
        await rig.deliver(0)
        await asyncio.gather(*(rig.proxy.generate(request(f"r{index}")) for index in range(6)))
        rig.trainer.version = 1
        await rig.delivery.begin_publishing(1, 1)
        await rig.delivery.lead(1, 1)
        new = await asyncio.gather(*(rig.proxy.generate(request(f"n{index}")) for index in range(6)))
        assert {span[0] for item in new for span in item.versions} == {1}, "none begins there"
        done = await asyncio.gather(*(rig.proxy.generate(request(f"r{index}", turn=1)) for index in range(6)))
        await rig.delivery.follow(1, 1)
        later = await asyncio.gather(*(rig.proxy.generate(request(f"s{index}")) for index in range(6)))
        assert {span[0] for item in later for span in item.versions} == {1}
        assert min(worker.generated for worker in rig.workers) > 0, "after it, both work"
        await rig.close()
        return sorted({span[0] for item in done for span in item.versions})

    assert run(answered_by(True)) == [1]
    assert run(answered_by(False)) == [0, 1]


def test_a_worker_that_dies_while_it_receives_is_brought_up_from_the_relay_and_the_next_groups_are_new() -> None:
    async def main() -> None:
        rig = Rig(config(), 3)
        await rig.deliver(0)
        rig.trainer.version = 1
        await rig.delivery.begin_publishing(1, 1)
        await asyncio.sleep(0.1)
        rig.workers[1].die()
        await rig.delivery.lead(1, 1)
        assert [lane.version for lane in rig.proxy.states if lane.usable] == [1, 1]
        await asyncio.sleep(RESTART_SECONDS + 1)
        assert not rig.proxy.states[1].alive, "it waits: the relay has not got the version yet"
        assert rig.proxy.states[1].restarts == []
        await rig.delivery.follow(1, 1)
        await asyncio.sleep(UPDATE + 1)
        assert await rig.held() == [1, 1, 1]
        await rig.deliver(2)
        await rig.deliver(3)
        assert await rig.held() == [3, 3, 3]
        assert rig.asked == [(3, True), (3, False), (3, True), (3, False)]
        assert [event["workers"] for event in rig.seen("collective")] == [3, 2, 3, 3]
        await rig.close()

    run(main())


def test_a_worker_that_hangs_costs_the_time_limit_and_takes_the_version_from_the_relay() -> None:
    async def main() -> None:
        rig = Rig(config(), 2)
        await rig.deliver(0)

        async def hang(version: int, meetings: Sequence[Meeting], place: int, limit: float) -> str:
            await asyncio.sleep(1e6)
            return ""

        rig.workers[0].receive = hang  # type: ignore[method-assign]
        rig.trainer.version = 1
        begun = asyncio.get_running_loop().time()
        await rig.delivery.begin_publishing(1, 1)
        await rig.delivery.lead(1, 1)
        assert asyncio.get_running_loop().time() - begun < LIMIT + 10
        assert await rig.held() == [0, 1]
        await rig.delivery.follow(1, 1)
        assert await rig.held() == [1, 1]
        assert [event["what"] for event in rig.seen("fault")] == ["receive w0"]
        rig.trainer.version = 2
        await rig.delivery.begin_publishing(2, 2)
        assert rig.asked[-1] == (2, True), "the same workers, but their group is lost"
        await rig.close()

    run(main())


def test_when_nobody_received_it_all_take_it_from_the_relay_as_ever() -> None:
    async def main() -> None:
        rig = Rig(config(), 2)

        async def refuse(version: int, meetings: Sequence[Meeting], place: int, limit: float) -> str:
            raise RetryableError("corrupt weights (digest)")

        for worker in rig.workers:
            worker.receive = refuse  # type: ignore[method-assign]
        await rig.deliver(0)
        await rig.deliver(1)
        assert await rig.held() == [1, 1]
        waits = [event["waiting_for"] for event in rig.seen("stage") if event["stage"] == "prepare"]
        assert waits == [
            f"weights of version {version} from the {where}" for version in (0, 1) for where in ("trainer", "relay")
        ]
        await rig.close()

    run(main())


def test_a_worker_that_received_other_weights_than_the_relay_has_is_brought_up_anew() -> None:
    async def main() -> None:
        rig = Rig(config(), 2)
        await rig.deliver(0)
        stock = rig.workers[0].receive

        async def other(version: int, meetings: Sequence[Meeting], place: int, limit: float) -> str:
            await stock(version, meetings, place, limit)
            return "00000000deadbeef"

        rig.workers[0].receive = other  # type: ignore[method-assign]
        lives = [lane.lives for lane in rig.proxy.states]
        await rig.deliver(1)
        await asyncio.sleep(RESTART_SECONDS + UPDATE + 1)
        assert [lane.lives for lane in rig.proxy.states] == [lives[0] + 1, lives[1]]
        [fault] = rig.seen("fault")
        assert "not those of the relay: 00000000deadbeef, 0000000000000001" in fault["detail"]
        assert await rig.held() == [1, 1]
        await rig.close()

    run(main())


@pytest.mark.parametrize("backend", [STOCK_BACKEND, "gloo"])
def test_a_version_whose_content_was_not_said_is_believed_of_vllms_own_engines_alone(backend: str) -> None:
    """They send no digests."""

    async def main() -> None:
        rig = Rig(config("rollout.weights=nccl"), 2)
        stock, send = rig.workers[0].receive, rig.trainer.send

        async def met(*given: Any) -> tuple[Meeting, ...]:
            return tuple(replace(meeting, backend=backend) for meeting in await send(*given))

        async def unsaid(version: int, meetings: Sequence[Meeting], place: int, limit: float) -> str:
            await stock(version, meetings, place, limit)
            return ""

        rig.workers[0].receive = unsaid  # type: ignore[method-assign]
        rig.trainer.send = met  # type: ignore[method-assign]
        for version in (0, 1):
            await rig.deliver(version)
        await asyncio.sleep(RESTART_SECONDS + UPDATE + 1)
        assert rig.seen("collective")[0]["workers"] == 2
        assert bool(rig.seen("fault")) is (backend == "gloo")
        assert await rig.held() == [1, 1]
        await rig.close()

    run(main())


def test_a_trainer_that_cannot_publish_ends_the_run_though_workers_have_the_version() -> None:
    async def main() -> None:
        rig = Rig(config(), 2)
        await rig.deliver(0)

        async def full() -> PublishResult:
            raise RetryableError("relay_full: no room")

        rig.trainer.publish = full  # type: ignore[method-assign]
        rig.trainer.version = 1
        await rig.delivery.begin_publishing(1, 1)
        await rig.delivery.lead(1, 1)
        with pytest.raises(Exception, match="the trainer failed in publish: relay_full"):
            await rig.delivery.finish_publishing()
        await rig.close()

    run(main())


def test_a_relay_that_is_away_for_minutes_is_waited_for_by_name() -> None:
    async def main() -> None:
        rig = Rig(config("rollout.weights=relay"), 1)
        await rig.deliver(0)
        stock, back = rig.trainer.publish, asyncio.get_running_loop().time() + 200

        async def away() -> PublishResult:
            if asyncio.get_running_loop().time() < back:
                raise RetryableError("metadata_unreachable: connection refused\nand more")
            return await stock()

        rig.trainer.publish = away  # type: ignore[method-assign]
        rig.trainer.version = 1
        waiting = asyncio.create_task(rig.delivery.begin_publishing(1, 1))
        await asyncio.sleep(100)
        assert rig.delivery.waiting_for == "the relay to take the version: metadata_unreachable: connection refused"
        await waiting
        assert (asyncio.get_running_loop().time() < back + 30, rig.delivery.waiting_for) == (True, "")
        await rig.delivery.follow(1, 1)
        assert await rig.held() == [1]
        assert 10 < len(rig.seen("fault")) < 30
        await rig.close()

    run(main())


def test_a_trainer_that_died_is_not_asked_to_publish_again() -> None:
    async def main() -> None:
        rig = Rig(config("rollout.weights=relay"), 1)
        await rig.deliver(0)
        asked: list[float] = []

        async def dead() -> PublishResult:
            asked.append(asyncio.get_running_loop().time())
            raise ProcessDied("trainer died")

        rig.trainer.publish = dead  # type: ignore[method-assign]
        with pytest.raises(PartLost, match="the trainer failed in publish: trainer died"):
            await rig.delivery.begin_publishing(1, 1)
        assert len(asked) == 1
        await rig.close()

    run(main())


@pytest.mark.parametrize("asked", ["prepare", "update"])
def test_while_the_metadata_store_is_away_workers_generate_and_none_is_restarted(asked: str) -> None:
    async def main() -> None:
        rig = Rig(config("rollout.weights=relay"), 2)
        await rig.deliver(0)
        back = asyncio.get_running_loop().time() + 50

        def until(stock: Any) -> Any:
            async def away(version: int) -> Any:
                if asyncio.get_running_loop().time() < back:
                    raise RetryableError("w: RelayError: metadata_unreachable: redis://: connection refused")
                return await stock(version)

            return away

        for worker in rig.workers:
            setattr(worker, asked, until(getattr(worker, asked)))
        if asked == "prepare":
            generated = asyncio.create_task(rig.proxy.generate(request("t")))
            delivering = asyncio.create_task(rig.deliver(1))
            await asyncio.sleep(45)
            assert rig.delivery.waiting_for == "the metadata store to come back, for weights of version 1"
            assert generated.done(), "it goes on meanwhile"
            await delivering
        else:
            await rig.deliver(1)
        assert back <= asyncio.get_running_loop().time() < back + 30
        assert await rig.held() == [1, 1]
        assert rig.delivery.waiting_for == ""
        assert [lane.lives for lane in rig.proxy.states] == [0, 0]
        await rig.close()

    run(main())
