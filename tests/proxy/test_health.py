"""The proxy's heartbeat on virtual time: who is given up, when, and what becomes of the requests; and workers that move."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import pytest

from orchestrator.api import Completion, GenerationRequest, RetryableError, Sampling, UpdateResult, WorkerStats
from orchestrator.events import EventLog, MemorySink
from orchestrator.policies.routing.turn_routing import Seat, TurnRouter
from orchestrator.proxy.gateway import LLMProxy
from orchestrator.proxy.worker_state import WorkerLimits
from scripts.bench.virtual_run import run

INTERVAL, MISSES, STALL = 5.0, 4, 60.0
LIMITS = WorkerLimits(STALL)
HOUR = 3600.0


class Worker:
    """Answers a request after ``seconds``. While ``hung``, nothing that it is asked is answered, like a process whose event
    loop hangs; ``deaf`` is how many of its next ``stats`` are lost on the way."""

    def __init__(self, name: str, seconds: float, hardware: str = "") -> None:
        self.name, self.hardware, self.moves_to = name, hardware, hardware
        self.seconds = seconds
        self.hung = False
        self.tokens_per_s, self.running = 0.0, 0  # that its statistics count
        self.loading = self.starting = 0.0  # seconds of preparing or updating, of a restart
        self.deaf = 0
        self.asked: list[float] = []
        self.restarted: list[float] = []
        self.done: asyncio.Queue[Completion] = asyncio.Queue()

    async def _answer(self) -> None:
        if self.hung:
            await asyncio.get_running_loop().create_future()

    async def add(self, requests: Sequence[GenerationRequest]) -> None:
        await self._answer()
        for request in requests:
            done = Completion(request.request_id, (5, 1), (-0.1, -0.1), ((0, 2),), "stop")
            asyncio.get_running_loop().call_later(self.seconds, self.done.put_nowait, done)

    async def abort(
        self, request_ids: Sequence[str] = (), *, trajectories: Sequence[str] = (), groups: Sequence[str] = ()
    ) -> None:
        await self._answer()

    async def prioritize(self, priorities: Mapping[str, int]) -> None:
        await self._answer()

    async def completions(self) -> list[Completion]:
        await self._answer()
        done = await self.done.get()
        await self._answer()
        return [done]

    async def suspend(self) -> None:
        await self._answer()

    async def prepare(self, version: int) -> None:
        await self._answer()
        await asyncio.sleep(self.loading)

    async def update(self, version: int) -> UpdateResult:
        await self._answer()
        await asyncio.sleep(self.loading)
        return UpdateResult(version, 0, 0.0)

    async def resume(self) -> None:
        await self._answer()

    async def stats(self) -> WorkerStats:
        self.asked.append(asyncio.get_running_loop().time())
        await self._answer()
        if self.deaf:
            self.deaf -= 1
            if self.deaf % 2:
                raise RetryableError("connection reset")
            await asyncio.get_running_loop().create_future()
        generated = int(self.tokens_per_s * asyncio.get_running_loop().time())
        return WorkerStats(self.running, 0, 0, 1, 0, 0.0, 0, generated=generated)

    async def restart(self) -> None:
        self.restarted.append(asyncio.get_running_loop().time())
        self.hung, self.hardware = False, self.moves_to
        self.done = asyncio.Queue()
        await asyncio.sleep(self.starting)

    async def close(self) -> None:
        pass


def played(
    workers: Sequence[Worker],
    scenario: Callable[[LLMProxy, list[BaseException]], Awaitable[None]],
    router: TurnRouter | None = None,
) -> list[dict[str, Any]]:
    """The events of a scenario."""
    sink = MemorySink()

    async def main() -> None:
        fatal: list[BaseException] = []
        proxy = LLMProxy(
            list(workers),
            EventLog(sink, asyncio.get_running_loop().time),
            limits=LIMITS,
            restarts=2,
            heartbeat=INTERVAL,
            misses=MISSES,
            router=router,
            on_fatal=fatal.append,
        )
        proxy.start()
        await proxy.suspend()
        await proxy.update(0)
        await proxy.resume()
        try:
            await scenario(proxy, fatal)
        finally:
            await proxy.close()

    run(main())
    return [json.loads(line) for line in sink.lines]


def turn(name: str, task: str = "t") -> GenerationRequest:
    return GenerationRequest(name, name, 0, (1, 2), Sampling(2), task)


def test_a_worker_whose_event_loop_hangs_is_noticed_well_before_the_stall_timeout_and_its_request_goes_on() -> None:
    hung, other = Worker("a", 1.0), Worker("b", 1.0)

    async def scenario(proxy: LLMProxy, _: list[BaseException]) -> None:
        waiting = asyncio.create_task(proxy.generate(turn("r")))
        await asyncio.sleep(0.5)
        hung.hung = True
        assert (await waiting).token_ids == (5, 1)
        assert asyncio.get_running_loop().time() < (2 + MISSES) * INTERVAL + 2
        await asyncio.sleep(1)

    faults = [event for event in played([hung, other], scenario) if event["kind"] == "fault"]
    assert len(hung.restarted) == 1
    assert len(hung.asked) == MISSES
    assert (len(faults), faults[0]["what"]) == (1, "worker a")
    assert "no sign of life" in faults[0]["detail"]
    assert other.asked == other.restarted == []


def test_a_worker_that_had_no_work_before_has_its_time_to_the_first_token() -> None:
    slow, slower = Worker("a", STALL - 5), Worker("b", 10 * STALL)
    slow.running = slower.running = 1

    async def scenario(proxy: LLMProxy, _: list[BaseException]) -> None:
        first, second = (asyncio.create_task(proxy.generate(turn(name))) for name in "rs")
        await first
        assert (slow.restarted, slower.restarted) == ([], [])
        assert len(slow.asked) >= 5
        slower.seconds = 1.0
        await second
        assert len(slower.restarted) == 1
        assert LIMITS.first_token < slower.restarted[0] < LIMITS.first_token + 2 * INTERVAL

    played([slow, slower], scenario)


def test_a_worker_that_has_answered_and_computes_nothing_more_is_restarted_after_the_stall_timeout() -> None:
    worker = Worker("a", 1.0)

    async def scenario(proxy: LLMProxy, _: list[BaseException]) -> None:
        first = asyncio.create_task(proxy.generate(turn("r")))
        await asyncio.sleep(0.5)
        worker.seconds = HOUR
        second = asyncio.create_task(proxy.generate(turn("s")))
        await first
        worker.seconds = 1.0
        await second

    played([worker], scenario)
    assert len(worker.restarted) == 1
    assert STALL < worker.restarted[0] < STALL + 3 * INTERVAL


def test_a_worker_whose_statistics_count_new_tokens_is_healthy_however_long_its_first_answer_takes() -> None:
    worker = Worker("a", HOUR)
    worker.tokens_per_s, worker.running = 0.5, 1

    async def scenario(proxy: LLMProxy, _: list[BaseException]) -> None:
        await proxy.generate(turn("r"))

    assert not [event for event in played([worker], scenario) if event["kind"] == "fault"]
    assert worker.restarted == []


def test_tokens_of_others_are_no_progress_where_a_worker_no_longer_has_what_it_was_sent() -> None:
    worker = Worker("a", HOUR)
    worker.tokens_per_s = 20.0  # and it runs nothing of ours: the completion was lost

    async def scenario(proxy: LLMProxy, _: list[BaseException]) -> None:
        waiting = asyncio.create_task(proxy.generate(turn("r")))
        await asyncio.sleep(STALL)
        worker.seconds = 1.0
        await waiting

    played([worker], scenario)
    assert len(worker.restarted) == 1
    assert STALL < worker.restarted[0] < STALL + 3 * INTERVAL


def test_starting_preparing_and_updating_have_limits_of_their_own() -> None:
    worker = Worker("a", 1.0)

    async def scenario(proxy: LLMProxy, _: list[BaseException]) -> None:
        worker.loading = LIMITS.update - 1
        assert await proxy.prepare(1) == []
        await proxy.suspend()
        assert [result.version for result in await proxy.update(1)] == [1]
        await proxy.resume()
        assert worker.restarted == []
        worker.starting = LIMITS.restart - 1
        proxy.distrust(0, "it died")
        await proxy.generate(turn("r"))
        assert len(worker.restarted) == 1
        worker.loading, worker.starting = LIMITS.update + 1, 1.0
        assert await proxy.prepare(2) == [f"no answer for {LIMITS.prepare} s"]
        await proxy.suspend()
        assert await proxy.update(2) == []
        await proxy.resume()
        worker.loading = 1.0
        await proxy.generate(turn("s"))
        assert len(worker.restarted) == 2

    played([worker], scenario)


@pytest.mark.parametrize(("pause", "restarts"), [(56 * HOUR, 9), (LIMITS.window / 4, 2)])
def test_restarts_count_against_the_limit_for_a_window_only(pause: float, restarts: int) -> None:
    worker = Worker("a", 1.0)

    async def scenario(proxy: LLMProxy, fatal: list[BaseException]) -> None:
        for _ in range(9):
            proxy.distrust(0, "it died")
            await asyncio.sleep(pause)
        assert bool(fatal) == (restarts == 2)
        if fatal:
            assert "no rollout worker left: a: it failed 3 times" in str(fatal[0])

    played([worker], scenario)
    assert len(worker.restarted) == restarts


def test_answers_that_are_lost_cost_nothing_while_one_arrives() -> None:
    worker = Worker("a", 50.0)
    worker.deaf = MISSES - 1

    async def scenario(proxy: LLMProxy, _: list[BaseException]) -> None:
        await proxy.generate(turn("r"))

    assert not [event for event in played([worker], scenario) if event["kind"] == "fault"]
    assert worker.restarted == []
    assert worker.deaf == 0


def test_who_has_no_work_or_stands_still_is_not_asked() -> None:
    worker = Worker("a", 1.0)

    async def scenario(proxy: LLMProxy, _: list[BaseException]) -> None:
        await asyncio.sleep(500)
        await proxy.suspend()
        waiting = asyncio.create_task(proxy.generate(turn("r")))
        await asyncio.sleep(500)
        await proxy.resume()
        await waiting

    played([worker], scenario)
    assert worker.asked == worker.restarted == []


@pytest.mark.parametrize("fallback", [True, False])
def test_a_worker_that_moved_is_routed_to_by_its_new_class(fallback: bool) -> None:
    moving, other = Worker("a", 1.0, "H800"), Worker("b", 1.0, "H20")
    moving.moves_to = "H20"
    affinity = {"maths": "H800", "default": "H20"}
    router = TurnRouter([Seat("H800"), Seat("H20")], affinity=affinity, fallback=fallback)

    async def scenario(proxy: LLMProxy, fatal: list[BaseException]) -> None:
        await asyncio.gather(*(proxy.generate(turn(name)) for name in "rs"))
        assert [len(lane.sent) for lane in proxy.states] == [0, 0]
        moving.hung = True
        waiting = asyncio.create_task(proxy.generate(turn("m", "maths")))
        await asyncio.sleep(40)
        moving.seconds = other.seconds = 500.0
        turns = [asyncio.create_task(proxy.generate(turn(f"x{number}"))) for number in range(4)]
        await asyncio.sleep(1)
        assert [len(lane.sent) for lane in proxy.states] == [2, 2], "two of one class share the work"
        if fallback:
            assert (await waiting).finish_reason == "stop"
            assert not fatal
        else:
            assert "no rollout worker is left for task maths, which needs class H800 only" in str(fatal.pop())
        for task in [*turns, waiting]:
            task.cancel()
        await asyncio.gather(*turns, waiting, return_exceptions=True)

    played([moving, other], scenario, router)
    assert len(moving.restarted) == 1
