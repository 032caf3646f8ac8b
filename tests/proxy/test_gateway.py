"""LLMProxy: each request ends once, whatever workers do. The workers here are scripted doubles behind the port."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest

from orchestrator.api import (
    CommandError,
    Completion,
    GenerationRequest,
    PartLost,
    ProcessDied,
    RetryableError,
    RunError,
    Sampling,
    UpdateResult,
    WorkerStats,
)
from orchestrator.events import EventLog, MemorySink
from orchestrator.policies.routing.turn_routing import Seat, TurnRouter
from orchestrator.proxy import gateway
from orchestrator.proxy.gateway import LLMProxy
from orchestrator.proxy.membership import Membership
from orchestrator.proxy.worker_state import MOST_REFUSED, WorkerLimits
from orchestrator.transfer import MemoryMetadata, MemoryRelay, Publisher, RelayEndpoint, RelayError, Subscriber


class ScriptedWorker:
    """Answers each request when told to (``answer``), or at once (``auto``)."""

    def __init__(self, name: str, auto: bool = True) -> None:
        self.name = name
        self.auto = auto
        self.held: dict[str, GenerationRequest] = {}
        self.added: list[str] = []
        self.add_calls = 0
        self.aborted: list[str] = []
        self.commands: list[str] = []
        self.restarts = 0
        self.dead = False
        self.fail_restarts = 0
        self.fail_prepare: Exception | None = None
        self.refuse_updates = 0
        self.version = 0
        self._done: asyncio.Queue[Completion] = asyncio.Queue()
        self._died = asyncio.Event()

    def _check(self) -> None:
        if self.dead:
            raise RetryableError(f"{self.name} is dead")

    async def add(self, requests: Sequence[GenerationRequest]) -> None:
        self._check()
        self.add_calls += 1
        for request in requests:
            self.added.append(request.request_id)
            self.held[request.request_id] = request
            if self.auto:
                self.answer(request.request_id)

    def answer(self, name: str) -> None:
        done = Completion(name, (5, 1), (-0.1, -0.1), ((self.version, 2),), "stop")
        self.held.pop(name, None)
        self._done.put_nowait(done)

    async def abort(
        self, request_ids: Sequence[str] = (), *, trajectories: Sequence[str] = (), groups: Sequence[str] = ()
    ) -> None:
        self._check()
        self.aborted.extend(request_ids)

    async def prioritize(self, priorities: Mapping[str, int]) -> None:
        self._check()

    async def completions(self) -> list[Completion]:
        self._check()
        getter = asyncio.ensure_future(self._done.get())
        died = asyncio.ensure_future(self._died.wait())
        await asyncio.wait([getter, died], return_when=asyncio.FIRST_COMPLETED)
        died.cancel()
        if getter.done():
            return [getter.result()]
        getter.cancel()
        raise RetryableError(f"{self.name} is dead")

    def die(self) -> None:
        self.dead = True
        self.held.clear()
        self._died.set()

    async def suspend(self) -> None:
        self._check()
        self.commands.append("suspend")

    async def prepare(self, version: int) -> None:
        self._check()
        self.commands.append(f"prepare {version}")
        if self.fail_prepare is not None:
            raise self.fail_prepare

    async def update(self, version: int) -> UpdateResult:
        self._check()
        self.commands.append(f"update {version}")
        if self.refuse_updates:
            self.refuse_updates -= 1
            raise CommandError("weights_unusable", "the update failed half-way")
        self.version = version
        return UpdateResult(version, 0, 0.0)

    async def resume(self) -> None:
        self._check()
        self.commands.append("resume")

    async def stats(self) -> WorkerStats:
        return WorkerStats(len(self.held), 0, 0, 1, 0, 0.0, self.version)

    async def restart(self) -> None:
        self.restarts += 1
        if self.fail_restarts:
            self.fail_restarts -= 1
            raise RetryableError("no")
        self.dead = False
        self._died = asyncio.Event()
        self._done = asyncio.Queue()

    async def close(self) -> None:
        self.die()


def request(name: str, trajectory: str = "t", turn: int = 0) -> GenerationRequest:
    return GenerationRequest(name, trajectory, turn, (1, 2, 3), Sampling(2), "task")


def play(
    workers: Sequence[ScriptedWorker],
    scenario: Callable[[LLMProxy, list[BaseException]], Awaitable[None]],
    stall: float = 5.0,
    restarts: int = 2,
    router: TurnRouter | None = None,
    limits: WorkerLimits | None = None,
) -> MemorySink:
    sink, given = MemorySink(), limits or WorkerLimits(stall, stall, stall, stall, 4 * stall)

    async def run() -> None:
        fatal: list[BaseException] = []
        events = EventLog(sink, asyncio.get_running_loop().time)
        proxy = LLMProxy(list(workers), events, limits=given, restarts=restarts, router=router, on_fatal=fatal.append)
        proxy.start()
        try:
            async with asyncio.timeout(10):
                await scenario(proxy, fatal)
        finally:
            await proxy.close()

    asyncio.run(run())
    return sink


def test_requests_of_one_tick_travel_in_one_call() -> None:
    worker = ScriptedWorker("w")

    async def scenario(proxy: LLMProxy, _: list[BaseException]) -> None:
        done = await asyncio.gather(*(proxy.generate(request(f"r{i}", f"t{i}")) for i in range(64)))
        assert [c.request_id for c in done] == [f"r{i}" for i in range(64)]
        assert proxy.tokens == 128

    play([worker], scenario)
    assert worker.add_calls == 1


def test_a_dead_workers_requests_are_sent_again_and_the_worker_gets_the_current_weights_first() -> None:
    worker = ScriptedWorker("w", auto=False)

    async def scenario(proxy: LLMProxy, _: list[BaseException]) -> None:
        await proxy.suspend()
        await proxy.update(7)
        await proxy.resume()
        waiting = asyncio.ensure_future(proxy.generate(request("r")))
        await asyncio.sleep(0.05)
        worker.auto = True
        worker.die()
        done = await waiting
        assert done.versions == ((7, 2),)

    sink = play([worker], scenario)
    assert worker.added == ["r", "r"]
    assert worker.commands[-3:] == ["suspend", "update 7", "resume"]
    assert any('"recovered"' in line for line in sink.lines)


@pytest.mark.parametrize(
    "failure", [RetryableError("not on the relay yet"), CommandError("no_relay", "it was told no relay")]
)
def test_a_version_that_cannot_be_prepared_is_a_fault_and_the_update_fetches_it(failure: Exception) -> None:
    first, second = ScriptedWorker("a"), ScriptedWorker("b")
    first.fail_prepare = failure

    async def scenario(proxy: LLMProxy, fatal: list[BaseException]) -> None:
        await proxy.prepare(3)
        assert proxy.waiting_for == ""
        await proxy.suspend()
        assert [result.version for result in await proxy.update(3)] == [3, 3]
        await proxy.resume()
        assert not fatal

    sink = play([first, second], scenario)
    assert first.commands == second.commands == ["prepare 3", "suspend", "update 3", "resume"]
    assert first.restarts == 0
    assert sum('"fault"' in line for line in sink.lines) == 1


def test_a_worker_that_hangs_in_prepare_does_not_hold_up_the_run() -> None:
    worker = ScriptedWorker("w")

    async def hang(version: int) -> None:
        await asyncio.get_running_loop().create_future()

    async def scenario(proxy: LLMProxy, _: list[BaseException]) -> None:
        worker.prepare = hang  # type: ignore[method-assign]
        preparing = asyncio.ensure_future(proxy.prepare(3))
        await asyncio.sleep(0.05)
        assert "version 3" in proxy.waiting_for
        assert (await proxy.generate(request("r"))).finish_reason == "stop"
        await preparing

    play([worker], scenario, stall=0.4)
    assert worker.restarts == 0


def test_a_worker_whose_weights_are_unusable_is_brought_up_anew() -> None:
    worker = ScriptedWorker("w")
    worker.refuse_updates = 1

    async def scenario(proxy: LLMProxy, fatal: list[BaseException]) -> None:
        await proxy.suspend()
        assert await proxy.update(4) == []
        await proxy.resume()
        assert (await proxy.generate(request("r"))).versions == ((4, 2),)
        assert not fatal

    sink = play([worker], scenario)
    assert worker.restarts == 1
    assert worker.commands == ["suspend", "update 4", "suspend", "update 4", "resume"]
    assert any("half-way" in line for line in sink.lines)


class PickyWorker(ScriptedWorker):
    """Refuses a call with a request that it does not take, as a whole, and with another error what is a command of the run."""

    def __init__(self, name: str, refused: Sequence[str], code: str = "invalid_request") -> None:
        super().__init__(name)
        self.refused = refused
        self.code = code

    async def add(self, requests: Sequence[GenerationRequest]) -> None:
        for request in requests:
            if request.request_id.startswith(tuple(self.refused)):
                raise CommandError(self.code, f"{request.request_id}: token 64 is none of this model")
        await super().add(requests)


def test_a_request_that_a_worker_refuses_ends_with_the_reason_and_neither_the_worker_nor_the_others_do() -> None:
    workers = [PickyWorker(name, ["bad"]) for name in ("a", "b")]

    async def scenario(proxy: LLMProxy, fatal: list[BaseException]) -> None:
        names = [*(f"r{i}" for i in range(8)), "bad0", "bad1"]
        found = await asyncio.gather(*(proxy.generate(request(name, f"t{name}")) for name in names))
        assert [one.finish_reason for one in found] == ["stop"] * 8 + ["error"] * 2
        assert "refuses it: bad0: token 64 is none" in found[8].error
        for number in range(2 * MOST_REFUSED):  # those of one group after another, while others are taken
            await proxy.generate(request(f"bad.{number}", f"u{number}"))
            await proxy.generate(request(f"r.{number}", f"v{number}"))
        assert not fatal
        assert not any(state.sent for state in proxy.states)

    sink = play(workers, scenario)
    assert [worker.restarts for worker in workers] == [0, 0]
    assert any('"fault"' in line and '"request bad0"' in line for line in sink.lines)


def test_calls_that_a_worker_refuses_and_takes_in_parts_are_said_now_and_then() -> None:
    class Narrow(ScriptedWorker):
        async def add(self, requests: Sequence[GenerationRequest]) -> None:
            if len(requests) > 2:
                raise CommandError("invalid_request", "its body is too large")
            await super().add(requests)

    async def scenario(proxy: LLMProxy, fatal: list[BaseException]) -> None:
        for number in range(3):
            names = [f"r{number}.{i}" for i in range(8)]
            found = await asyncio.gather(*(proxy.generate(request(name, f"t{name}")) for name in names))
            assert {one.finish_reason for one in found} == {"stop"}
            proxy.states[0].halved_told -= 60.0 * (number == 1)
        assert not fatal

    sink = play([Narrow("w")], scenario)
    told = [line for line in sink.lines if "gets what it refused in parts" in line]
    assert len(told) == 2
    assert "1 calls since" in told[0]
    assert "2 calls since this was said last, now of 8 requests: its body is too large" in told[1]


def test_members_of_a_group_that_are_all_refused_do_not_fell_a_worker() -> None:
    worker = PickyWorker("w", ["bad"])

    async def scenario(proxy: LLMProxy, fatal: list[BaseException]) -> None:
        members = [replace(request(f"bad{i}", f"t{i}"), group_id="g") for i in range(4 * MOST_REFUSED)]
        found = await asyncio.gather(*map(proxy.generate, members))
        assert {one.finish_reason for one in found} == {"error"}
        assert not fatal

    play([worker], scenario)
    assert worker.restarts == 0


def test_a_worker_that_refuses_whatever_it_is_given_is_brought_up_anew_and_its_requests_go_elsewhere() -> None:
    picky, other = PickyWorker("a", [""]), ScriptedWorker("b")
    picky.fail_restarts = 99

    async def scenario(proxy: LLMProxy, fatal: list[BaseException]) -> None:
        found = await asyncio.gather(*(proxy.generate(request(f"r{i}", f"t{i}")) for i in range(40)))
        assert sum(one.finish_reason == "error" for one in found) == MOST_REFUSED
        assert len(other.added) == 40 - MOST_REFUSED
        assert not fatal

    sink = play([picky, other], scenario)
    assert any("it refuses every request" in line for line in sink.lines)


def test_who_cannot_take_requests_now_is_lost_and_these_are_not() -> None:
    picky, other = PickyWorker("a", [""], "weights_unusable"), ScriptedWorker("b")

    async def scenario(proxy: LLMProxy, fatal: list[BaseException]) -> None:
        found = await asyncio.gather(*(proxy.generate(request(f"r{i}", f"t{i}")) for i in range(8)))
        assert {one.finish_reason for one in found} == {"stop"}

    play([picky, other], scenario)
    assert len(other.added) == 8


def test_with_another_worker_alive_the_request_does_not_wait_for_the_restart() -> None:
    first, second = ScriptedWorker("a", auto=False), ScriptedWorker("b")
    first.fail_restarts = 99

    async def scenario(proxy: LLMProxy, fatal: list[BaseException]) -> None:
        waiting = asyncio.ensure_future(proxy.generate(request("r")))
        await asyncio.sleep(0.05)
        assert list(first.held) == ["r"]
        first.die()
        await waiting
        assert not fatal

    play([first, second], scenario)
    assert second.added == ["r"]


def test_when_no_worker_is_left_the_run_ends_with_the_reason() -> None:
    worker = ScriptedWorker("w", auto=False)
    worker.fail_restarts = 99

    async def scenario(proxy: LLMProxy, fatal: list[BaseException]) -> None:
        waiting = asyncio.ensure_future(proxy.generate(request("r")))
        await asyncio.sleep(0.05)
        worker.die()
        while not fatal:
            await asyncio.sleep(0.01)
        assert isinstance(fatal[0], RunError)
        assert "w: it failed 3 times, the last time: " in str(fatal[0])
        assert str(fatal[0]).endswith("')")  # what the last restart raised
        waiting.cancel()

    play([worker], scenario, restarts=2)
    assert worker.restarts == 2


def test_restarts_that_fail_pause_and_a_worker_that_is_given_up_is_an_alarm_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gateway, "_LONGEST_PAUSE", 0.15)
    worker, other, tried = ScriptedWorker("w"), ScriptedWorker("o"), list[float]()

    async def restart() -> None:
        tried.append(asyncio.get_running_loop().time())
        raise RetryableError("its node is out of memory")

    worker.restart = restart  # type: ignore[method-assign]

    async def scenario(proxy: LLMProxy, fatal: list[BaseException]) -> None:
        worker.die()
        while not proxy.states[0].removed:
            await asyncio.sleep(0.01)
        assert not fatal

    sink = play([worker, other], scenario, restarts=3, limits=WorkerLimits(5.0, pause=0.1))
    assert [a < b for a, b in zip((0.09, 0.14), np.diff(tried), strict=True)] == [True, True]
    (alarm,) = [event for event in map(json.loads, sink.lines) if event["kind"] == "alarm"]
    assert alarm["what"] == "worker"
    assert alarm["detail"].startswith("w is given up, and the run continues on 1 others: it failed 4 times, the last")


def test_a_version_that_the_relay_has_lost_ends_this_life_of_the_run_as_no_restart_brings_it_back() -> None:
    worker = ScriptedWorker("w", auto=False)
    relay, sent = MemoryRelay(), RelayEndpoint(job="gateway", kind="memory", master="gateway")
    metadata = MemoryMetadata()
    publisher = Publisher(sent, relay, metadata)
    publisher.publish(1, [("a", (4,), "uint8", np.zeros(4, np.uint8))])
    subscriber = Subscriber(sent, MemoryRelay(), metadata)  # it comes back empty, and the pointer stands

    async def update(version: int) -> UpdateResult:
        try:
            subscriber.manifest(version)
        except RelayError as error:
            raise RetryableError(f"w: RelayError: {error}") from error
        raise AssertionError("it was there")

    worker.update = update  # type: ignore[method-assign]

    async def scenario(proxy: LLMProxy, fatal: list[BaseException]) -> None:
        await proxy.suspend()
        await proxy.update(1)
        await proxy.resume()
        while not fatal:
            await asyncio.sleep(0.01)
        assert isinstance(fatal[0], PartLost)
        assert str(fatal[0]) == "the relay has lost version 1: w needs it"

    play([worker], scenario, restarts=2)
    assert worker.restarts == 1


@pytest.mark.parametrize(("comes_back", "restarts"), [(True, 1), (False, 2)])
def test_a_worker_that_comes_up_while_the_trainer_is_away_waits_for_it_and_spends_no_restart(
    comes_back: bool, restarts: int
) -> None:
    worker, published = ScriptedWorker("w", auto=False), [True]

    async def update(version: int) -> UpdateResult:
        if not published[0]:
            raise RetryableError(f"w: weights of version {version}: missing: epoch 2 has []")
        worker.version = version
        return UpdateResult(version, 0, 0.0)

    async def life() -> int:
        if not comes_back:
            raise ProcessDied("the trainer died for good")
        await asyncio.sleep(0.05)
        published[0] = True
        return 1

    worker.update = update  # type: ignore[method-assign]

    async def scenario(proxy: LLMProxy, fatal: list[BaseException]) -> None:
        proxy.trainer_life = life
        await proxy.suspend()
        await proxy.update(1)
        await proxy.resume()
        published[0] = False  # it was in the memory of the trainer, which died
        proxy.distrust(0, "it died, too")
        while not (fatal or (worker.restarts and proxy.states[0].usable)):
            await asyncio.sleep(0.01)
        assert bool(fatal) is not comes_back

    play([worker], scenario, restarts=2, limits=WorkerLimits(5.0, 5.0, 5.0, 5.0, 20.0, pause=0.0))
    assert worker.restarts == restarts


@pytest.mark.parametrize("where", ["restart", "add", "completions"])
def test_what_nobody_foresaw_of_a_worker_ends_the_run_instead_of_waiting_for_ever(where: str) -> None:
    worker = ScriptedWorker("w", auto=False)

    async def broken(*_: object) -> None:
        raise ValueError("nobody foresaw this")

    async def scenario(proxy: LLMProxy, fatal: list[BaseException]) -> None:
        if where != "completions":
            setattr(worker, where, broken)
        waiting = [asyncio.ensure_future(proxy.generate(request("r0")))]
        await asyncio.sleep(0.05)
        if where == "completions":  # the one under way ends as ever, the next one does not
            worker.completions = broken  # type: ignore[method-assign,assignment]
            worker.answer("r0")
            waiting.append(asyncio.ensure_future(proxy.generate(request("r1"))))
        elif where == "restart":
            worker.die()
        async with asyncio.timeout(1):
            while not fatal:
                await asyncio.sleep(0.01)
        assert isinstance(fatal[0], RunError)
        assert "nobody foresaw this" in str(fatal[0])
        for one in waiting:
            one.cancel()

    play([worker], scenario)


def test_a_stalled_worker_is_restarted() -> None:
    worker = ScriptedWorker("w", auto=False)

    async def scenario(proxy: LLMProxy, _: list[BaseException]) -> None:
        waiting = asyncio.ensure_future(proxy.generate(request("r")))
        await asyncio.sleep(0.1)
        worker.auto = True
        await waiting

    play([worker], scenario, stall=0.4)
    assert worker.restarts == 1


def test_a_worker_that_hangs_is_noticed_although_nobody_waits_for_it_so_long() -> None:
    """Callers that give up sooner than the stall timeout, and come again, must not hide it for ever."""
    worker = ScriptedWorker("w", auto=False)

    async def scenario(proxy: LLMProxy, _: list[BaseException]) -> None:
        for number in range(100):
            try:
                async with asyncio.timeout(0.15):
                    await proxy.generate(request(f"r{number}"))
                return
            except TimeoutError:
                worker.auto = worker.restarts > 0

    play([worker], scenario, stall=0.6)
    assert worker.restarts == 1


def test_while_suspended_nothing_is_sent_and_nothing_refused() -> None:
    worker = ScriptedWorker("w")

    async def scenario(proxy: LLMProxy, _: list[BaseException]) -> None:
        await proxy.suspend()
        waiting = asyncio.ensure_future(proxy.generate(request("r")))
        await asyncio.sleep(0.05)
        assert worker.added == []
        await proxy.update(1)
        await proxy.resume()
        assert (await waiting).versions == ((1, 2),)

    play([worker], scenario)


def test_cancelling_the_caller_aborts_in_the_worker() -> None:
    worker = ScriptedWorker("w", auto=False)

    async def scenario(proxy: LLMProxy, _: list[BaseException]) -> None:
        waiting = asyncio.ensure_future(proxy.generate(request("r")))
        await asyncio.sleep(0.05)
        waiting.cancel()
        await asyncio.sleep(0.05)
        assert worker.aborted == ["r"]
        assert proxy.in_flight == 0
        worker.answer("r")  # too late: nobody waits, nothing breaks
        worker.auto = True
        await proxy.generate(request("s"))

    play([worker], scenario)


@pytest.mark.parametrize("began", [0, 1])
def test_a_first_answer_that_may_be_stale_is_called_back_and_ends_only_if_it_is(began: int) -> None:
    """It was sent to weights of version 0; whether its first token is of them, only the worker knows."""
    worker = ScriptedWorker("w", auto=False)

    async def scenario(proxy: LLMProxy, _: list[BaseException]) -> None:
        proxy.version = proxy.states[0].version = 0
        waiting = asyncio.ensure_future(proxy.generate(request("r", "old")))
        await asyncio.sleep(0.02)
        proxy.states[0].version = 1
        young = asyncio.ensure_future(proxy.generate(request("s", "young")))
        other = asyncio.ensure_future(proxy.generate(request("u", "other")))
        await asyncio.sleep(0.02)
        proxy.call_back({"old": None, "young": None}, lambda version: version < 1)
        await asyncio.sleep(0.02)
        assert worker.aborted == ["r"], "the others began later, or are nobody's concern"
        worker._done.put_nowait(Completion("r", (7,), (-0.5,), ((began, 1),), "abort"))
        await asyncio.sleep(0.02)
        if began == 0:
            done = await waiting
            assert (done.finish_reason, done.token_ids, done.versions) == ("abort", (7,), ((0, 1),))
            assert proxy.in_flight == 2
        else:
            assert worker.held[worker.added[-1]].token_ids[-1] == 7, "it goes on with its token, where it was"
            proxy.call_back({"old": None}, lambda version: version < 1)
            await asyncio.sleep(0.02)
            assert worker.aborted == ["r"], "its first version is known now"
            worker.answer(worker.added[-1])
            assert (await waiting).token_ids == (7, 5, 1)
        worker.answer("s")
        worker.answer("u")
        await asyncio.gather(young, other)

    play([worker], scenario)


def test_what_a_worker_gives_back_goes_on_elsewhere_with_its_tokens_and_it_rests_for_a_while() -> None:
    first, second = ScriptedWorker("a", auto=False), ScriptedWorker("b", auto=False)

    async def scenario(proxy: LLMProxy, _: list[BaseException]) -> None:
        waiting = asyncio.ensure_future(proxy.generate(request("r")))
        await asyncio.sleep(0.02)
        owner, other = (first, second) if first.added else (second, first)
        owner._done.put_nowait(Completion("r", (7,), (-0.5,), ((0, 1),), "abort"))
        await asyncio.sleep(0.02)
        assert len(other.added) == 1
        assert other.held[other.added[0]].token_ids[-1] == 7
        more = asyncio.ensure_future(proxy.generate(request("s")))
        await asyncio.sleep(0.02)
        assert other.added[-1] == "s", "it has one already, but the first one rests"
        other.answer(other.added[0])
        other.answer("s")
        done = await waiting
        assert (done.token_ids, done.finish_reason) == ((7, 5, 1), "stop")
        await more

    play([first, second], scenario)


def test_a_worker_that_is_alone_goes_on_with_what_it_gave_back() -> None:
    worker = ScriptedWorker("w", auto=False)

    async def scenario(proxy: LLMProxy, _: list[BaseException]) -> None:
        waiting = asyncio.ensure_future(proxy.generate(request("r")))
        await asyncio.sleep(0.02)
        worker._done.put_nowait(Completion("r", (7,), (-0.5,), ((0, 1),), "abort"))
        await asyncio.sleep(0.02)
        worker.answer(worker.added[-1])
        assert (await waiting).token_ids == (7, 5, 1)

    play([worker], scenario)


def test_a_completion_delivered_twice_is_used_once() -> None:
    worker = ScriptedWorker("w", auto=False)

    async def scenario(proxy: LLMProxy, _: list[BaseException]) -> None:
        waiting = asyncio.ensure_future(proxy.generate(request("r")))
        await asyncio.sleep(0.05)
        worker.answer("r")
        worker.answer("r")
        await waiting
        await asyncio.sleep(0.05)
        assert proxy.tokens == 2

    play([worker], scenario)


@pytest.mark.parametrize("turns", [6])
def test_later_turns_go_where_the_prefix_is(turns: int) -> None:
    first, second = ScriptedWorker("a"), ScriptedWorker("b")

    async def scenario(proxy: LLMProxy, _: list[BaseException]) -> None:
        async def trajectory(name: str) -> None:
            for turn in range(turns):
                await proxy.generate(request(f"{name}/{turn}", name, turn))

        await asyncio.gather(trajectory("x"), trajectory("y"))

    play([first, second], scenario)
    for worker in (first, second):
        assert len({name.split("/")[0] for name in worker.added}) == 1
        assert len(worker.added) == turns


def test_no_worker_gets_more_than_its_cap_and_what_waits_goes_in_order() -> None:
    worker = ScriptedWorker("w", auto=False)

    async def scenario(proxy: LLMProxy, _: list[BaseException]) -> None:
        asked = [asyncio.ensure_future(proxy.generate(request(f"r{n}", f"t{n}"))) for n in range(6)]
        await asyncio.sleep(0.02)
        assert worker.added == ["r0", "r1"]
        worker.answer("r1")
        await asked[1]
        asked[0].cancel()  # its slot is free as well
        asked[3].cancel()  # and this one needs none any more
        await asyncio.sleep(0.02)
        assert worker.added == ["r0", "r1", "r2", "r4"]
        assert worker.aborted == ["r0"]
        for name in ("r2", "r4"):
            worker.answer(name)
        await asyncio.sleep(0.02)
        worker.answer("r5")
        assert [done.request_id for done in await asyncio.gather(asked[2], asked[4], asked[5])] == ["r2", "r4", "r5"]
        assert proxy.in_flight == 0

    play([worker], scenario, router=TurnRouter([Seat(cap=2)]))


def test_what_a_dead_worker_had_goes_before_what_waited_all_along() -> None:
    first, second = ScriptedWorker("a", auto=False), ScriptedWorker("b", auto=False)
    first.fail_restarts = 99

    async def scenario(proxy: LLMProxy, _: list[BaseException]) -> None:
        asked = [asyncio.ensure_future(proxy.generate(request(f"r{n}", f"t{n}"))) for n in range(3)]
        await asyncio.sleep(0.02)
        assert (first.added, second.added) == (["r0"], ["r1"])
        first.die()
        await asyncio.sleep(0.02)
        for name in ("r1", "r0", "r2"):
            second.answer(name)
            await asyncio.sleep(0.02)
        await asyncio.gather(*asked)

    play([first, second], scenario, router=TurnRouter([Seat(cap=1), Seat(cap=1)]))
    assert second.added == ["r1", "r0", "r2"]


def test_while_suspended_a_free_slot_stays_free() -> None:
    worker = ScriptedWorker("w", auto=False)

    async def scenario(proxy: LLMProxy, _: list[BaseException]) -> None:
        asked = [asyncio.ensure_future(proxy.generate(request(f"r{n}", f"t{n}"))) for n in range(2)]
        await asyncio.sleep(0.02)
        await proxy.suspend()
        worker.answer("r0")
        await asked[0]
        await asyncio.sleep(0.02)
        assert worker.added == ["r0"]
        await proxy.resume()
        await asyncio.sleep(0.02)
        worker.answer("r1")
        await asked[1]

    play([worker], scenario, router=TurnRouter([Seat(cap=1)]))


def test_when_the_last_worker_for_a_task_is_gone_the_run_ends_with_the_reason() -> None:
    gone, other = ScriptedWorker("a", auto=False), ScriptedWorker("b")
    gone.fail_restarts = 99
    router = TurnRouter([Seat("H800"), Seat("H20")], affinity={"task": "H800", "default": "H20"}, fallback=False)

    async def scenario(proxy: LLMProxy, fatal: list[BaseException]) -> None:
        waiting = asyncio.ensure_future(proxy.generate(request("r")))
        await asyncio.sleep(0.02)
        gone.die()
        await asyncio.sleep(0.05)
        assert "no rollout worker is left for task task, which needs class H800 only" in str(fatal.pop())
        waiting.cancel()
        with pytest.raises(RunError, match="H800"):
            await proxy.generate(request("r2"))
        elsewhere = GenerationRequest("r3", "t3", 0, (1,), Sampling(2), "maths")
        assert (await proxy.generate(elsewhere)).finish_reason == "stop"
        assert not fatal

    play([gone, other], scenario, restarts=1, router=router)


class Remembering(ScriptedWorker):
    """A borrowed server's client, which remembers contexts; with ``lies`` its server never has the right one."""

    def __init__(self, url: str, lies: bool = False) -> None:
        super().__init__(url)
        self.url, self.lies = url, lies
        self.forgotten: list[str] = []

    async def add(self, requests: Sequence[GenerationRequest]) -> None:
        if self.lies:
            self.add_calls += 1
            raise RetryableError(
                f"{self.name}: claims a context for {requests[0].request_id} that is not the one meant"
            )
        await super().add(requests)

    def forget(self, trajectory_id: str) -> None:
        self.forgotten.append(trajectory_id)

    def take_resent(self) -> tuple[int, int]:
        return 1, 3


def test_what_a_server_that_was_taken_again_remembers_is_forgotten_and_counted() -> None:
    """Its client is another one."""
    own, first, again = ScriptedWorker("own"), Remembering("server"), Remembering("server")
    own.auto = False

    async def scenario(proxy: LLMProxy, _: list[BaseException]) -> None:
        await proxy.suspend()
        await proxy.update(1)
        await proxy.resume()
        members = Membership(proxy)
        await members.give_back(proxy.states[1])
        await members.take_worker(again, Seat())
        proxy.router.close_worker(0)
        await proxy.generate(request("r", "t"))
        proxy.forget("t")

    sink = play([own, first], scenario)
    assert (first.forgotten, again.forgotten) == ([], ["t"])
    assert [json.loads(line)["tokens"] for line in sink.lines if '"contexts_resent"' in line] == [3]


def test_a_server_that_lies_about_contexts_is_given_up_and_ends_the_run_only_where_nobody_else_is_left() -> None:
    async def alone(proxy: LLMProxy, fatal: list[BaseException]) -> None:
        waiting = asyncio.ensure_future(proxy.generate(request("r")))
        while not fatal:
            await asyncio.sleep(0.01)
        assert "no rollout worker left: liar: it failed 3 times" in str(fatal[0])
        assert "claims a context for r that is not the one meant" in str(fatal[0])
        waiting.cancel()

    play([Remembering("liar", lies=True)], alone)
    liar, other = Remembering("liar", lies=True), ScriptedWorker("own")

    async def beside(proxy: LLMProxy, fatal: list[BaseException]) -> None:
        for number in range(8):
            await proxy.generate(request(f"r{number}", f"t{number}"))
        while not proxy.states[0].removed:
            await proxy.generate(request(f"s{liar.add_calls}", f"s{liar.add_calls}"))
            await asyncio.sleep(0.01)
        assert not fatal

    play([liar, other], beside)
    assert liar.add_calls == 3
