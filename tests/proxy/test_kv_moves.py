"""A turn whose prefix lies in another worker: its KV is moved first when that pays, and it goes to its worker in any case.

The workers here are scripted doubles behind the port, and simulated twins; real engines are in ``tests/vllm/test_kv_exact.py``.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, TypeVar

import pytest

from orchestrator.api import (
    Completion,
    CompletionTiming,
    ConfigError,
    GenerationRequest,
    KvMove,
    KvMoved,
    KvWorker,
    RetryableError,
    RunError,
    Sampling,
    UpdateResult,
    WorkerStats,
)
from orchestrator.config import load_config, parse_config
from orchestrator.config.rollout_keys import KvTransferSection
from orchestrator.events import EventLog, MemorySink
from orchestrator.policies.placement.kv_transfer_cost import BreakEven
from orchestrator.policies.routing.turn_routing import Seat, TurnRouter
from orchestrator.proxy.gateway import LLMProxy
from orchestrator.proxy.kv_moves import GapMover, KvMoves, kv_moves
from orchestrator.proxy.worker_state import WorkerLimits
from orchestrator.sim.simulated_run import simulate
from orchestrator.sim.simulated_worker import SimWeights, SimWorker
from scripts.bench import virtual_run as virtual
from scripts.bench.micro.kv_migrate import break_even_tokens

T = TypeVar("T")
LIMIT = 1.0


class Worker:
    """Answers each request at once, and each move as ``fetch`` says."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.added: list[str] = []
        self.moves: list[KvMove] = []
        self.fetch: Any = KvMoved(64, 64, 1000, 0.1)
        self.answers = True
        self.busy = self.most = 0  # moves at once
        self.place = f"{name}:1"
        self._done: asyncio.Queue[Completion] = asyncio.Queue()

    async def kv_place(self) -> str:
        return self.place

    async def fetch_kv(self, move: KvMove) -> KvMoved:
        self.moves.append(move)
        self.busy += 1
        self.most = max(self.most, self.busy)
        await asyncio.sleep(0.1)
        self.busy -= 1
        if isinstance(self.fetch, Exception):
            raise self.fetch
        if self.fetch is None:
            await asyncio.Event().wait()
        moved: KvMoved = self.fetch
        return moved

    async def add(self, requests: Sequence[GenerationRequest]) -> None:
        for request in requests:
            self.added.append(request.request_id)
            if self.answers:
                timing = CompletionTiming(0.0, 0.2, 0.1, 0.1)
                self._done.put_nowait(Completion(request.request_id, (5, 1), (-0.1, -0.1), ((0, 2),), "stop", timing))

    async def abort(
        self, request_ids: Sequence[str] = (), *, trajectories: Sequence[str] = (), groups: Sequence[str] = ()
    ) -> None: ...

    async def prioritize(self, priorities: Mapping[str, int]) -> None: ...

    async def completions(self) -> list[Completion]:
        return [await self._done.get()]

    async def suspend(self) -> None: ...

    async def prepare(self, version: int) -> None: ...

    async def update(self, version: int) -> UpdateResult:
        return UpdateResult(version, 0, 0.0)

    async def resume(self) -> None: ...

    async def restart(self) -> None: ...

    async def stats(self) -> WorkerStats:
        return WorkerStats(0, 0, 0, 0, 0, 0.0, 0)

    async def close(self) -> None: ...


class Always(BreakEven):
    """Moves everything."""

    def move_pays(self, tokens: int) -> bool:
        return True


class Fleet:
    """Two workers with one slot each under a proxy."""

    def __init__(self, policy: BreakEven | None = None) -> None:
        self.workers = [Worker("a"), Worker("b")]
        self.sink = MemorySink()
        self.events = EventLog(self.sink, asyncio.get_running_loop().time)
        self.moves = KvMoves(policy or Always(), self.events, LIMIT)
        self.fatal: list[RunError] = []
        self.proxy = LLMProxy(
            self.workers,
            self.events,
            limits=WorkerLimits(50.0, 50.0, 50.0, 50.0, 4 * 50.0),
            restarts=2,
            router=TurnRouter([Seat(cap=1), Seat(cap=1)], imbalance=0),
            kv=self.moves,
            on_fatal=self.fatal.append,
        )
        self.proxy.start()

    async def turn(self, trajectory: str, number: int, tokens: int = 100) -> Completion:
        request = GenerationRequest(
            f"{trajectory}/{number}", trajectory, number, tuple(range(tokens)), Sampling(8), "task"
        )
        return await self.proxy.generate(request)

    async def send_elsewhere(self) -> asyncio.Task[Completion]:
        """The second turn of a trajectory whose worker ``a`` is taken by another's request."""
        await self.turn("t", 0)
        self.workers[0].answers = False
        blocker = asyncio.create_task(self.turn("blocker", 0))
        await asyncio.sleep(0.01)
        self.blocker = blocker
        return asyncio.create_task(self.turn("t", 1))

    def events_of(self, kind: str) -> list[dict[str, Any]]:
        return [found for line in self.sink.lines if (found := json.loads(line))["kind"] == kind]

    async def close(self) -> None:
        self.blocker.cancel()
        await asyncio.gather(self.blocker, return_exceptions=True)
        await self.proxy.close()


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    return virtual.run(coroutine)


def test_a_turn_that_goes_elsewhere_waits_for_its_kv_and_is_sent_once() -> None:
    async def scenario() -> None:
        fleet = Fleet()
        turn = await fleet.send_elsewhere()
        await asyncio.sleep(0.05)
        a, b = fleet.workers
        assert [move.source for move in b.moves] == ["a:1"]
        assert b.moves[0].token_ids == tuple(range(100))
        assert b.added == []  # it waits
        assert (await turn).token_ids == (5, 1)
        assert b.added == ["t/1"]
        assert (fleet.moves.moves, fleet.moves.tokens, fleet.moves.bytes) == (1, 64, 1000)
        assert [event["tokens"] for event in fleet.events_of("kv_moved")] == [64]
        assert not a.moves
        await fleet.close()

    run(scenario())


def test_a_turn_that_stays_with_its_prefix_is_not_moved() -> None:
    async def scenario() -> None:
        fleet = Fleet()
        fleet.blocker = asyncio.create_task(asyncio.sleep(0, Completion("", (), (), (), "stop")))
        for number in range(3):
            await fleet.turn("t", number)
        assert not any(worker.moves for worker in fleet.workers)
        await fleet.close()

    run(scenario())


@pytest.mark.parametrize(
    ("outcome", "kind"),
    [
        (KvMoved(0, 0, 0, 0.1, "damaged: a block is not what was sent"), "damaged"),
        (RetryableError("no engine"), "lost"),
        (None, "timeout"),
    ],
)
def test_a_move_that_fails_or_hangs_costs_its_limit_and_is_said_once(outcome: Any, kind: str) -> None:
    async def scenario() -> None:
        fleet = Fleet()
        fleet.workers[1].fetch = outcome
        turn = await fleet.send_elsewhere()
        begun = asyncio.get_running_loop().time()
        assert (await turn).token_ids == (5, 1)
        assert asyncio.get_running_loop().time() - begun <= 2 * LIMIT + 0.1
        a, b = fleet.proxy.states
        again = GenerationRequest("again", "again", 1, (1, 2), Sampling(8), "task")
        await fleet.moves._move(b, again, a)
        assert fleet.moves.failures[kind] == 2
        assert len([event for event in fleet.events_of("fault") if event["cause"] == "kv"]) == 1
        assert not fleet.fatal
        await fleet.close()

    run(scenario())


@pytest.mark.parametrize("needed", [False, True])
def test_a_burst_of_turns_asks_a_worker_for_a_few_moves_at_a_time(needed: bool) -> None:
    """A worker in an actor answers 64 calls at once: with more moves under way it gives neither completions nor a sign of life.
    Turns beyond compute their prefix, unless they need the KV, and then they wait for their move."""

    async def scenario() -> None:
        fleet = Fleet()
        fleet.blocker = asyncio.create_task(asyncio.sleep(0, Completion("", (), (), (), "stop")))
        a, b = fleet.proxy.states
        for index in range(100):
            request = GenerationRequest(f"r{index}", f"r{index}", 1, tuple(range(100)), Sampling(8), "task")
            if needed:
                fleet.moves.sources[request.request_id] = a.index
            fleet.moves.send_turn(b, request, fleet.proxy.states, a.index)
        await asyncio.sleep(2.0)
        worker = fleet.workers[1]
        assert (worker.most, len(worker.moves)) == (16, 100 if needed else 16)
        assert len(worker.added) == (0 if needed else 84)  # those that moved are no turns of the proxy here
        await fleet.close()

    run(scenario())


def test_any_number_of_trajectories_can_bring_their_kv_along_until_they_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("orchestrator.proxy.kv_moves.REMEMBERED", 2)

    async def scenario() -> None:
        fleet = Fleet()
        fleet.blocker = asyncio.create_task(asyncio.sleep(0))
        mover = GapMover(fleet.moves, fleet.proxy.states, fleet.proxy.router)
        for number in range(5):
            await fleet.turn(f"t{number}", 0)
        for worker in fleet.workers:
            worker.fetch = KvMoved(100, 100, 1000, 0.1)
        assert await mover.send("t0", 0, 1, 100), "the one whose turn began first: it has the longest turn, or tool"
        fleet.proxy.forget("t0")
        assert not await mover.send("t0", 0, 1, 100)
        for number in range(5):
            fleet.proxy.forget(f"t{number}")
        assert not fleet.moves._contexts
        await fleet.close()

    run(scenario())


def test_a_prefix_that_was_evicted_is_counted_and_no_fault() -> None:
    async def scenario() -> None:
        fleet = Fleet()
        fleet.workers[1].fetch = KvMoved(0, 0, 0, 0.1, "gone: the prefix is not cached here any more")
        await (await fleet.send_elsewhere())
        assert fleet.moves.failures["gone"] == 1
        assert not fleet.events_of("fault")
        await fleet.close()

    run(scenario())


def test_a_turn_that_is_cancelled_while_it_waits_for_its_kv_is_never_sent() -> None:
    async def scenario() -> None:
        fleet = Fleet()
        turn = await fleet.send_elsewhere()
        await asyncio.sleep(0.05)
        turn.cancel()
        await asyncio.gather(turn, return_exceptions=True)
        await asyncio.sleep(1.0)
        assert fleet.workers[1].added == []
        assert fleet.proxy.in_flight == 1  # the blocker
        await fleet.close()

    run(scenario())


def test_a_worker_that_dies_while_a_turn_waits_for_its_kv_loses_no_turn() -> None:
    async def scenario() -> None:
        fleet = Fleet()
        turn = await fleet.send_elsewhere()
        await asyncio.sleep(0.05)
        fleet.proxy.distrust(1, "killed")
        assert (await turn).token_ids == (5, 1)
        assert fleet.workers[1].added == ["t/1"]  # once, of its next life
        await fleet.close()

    run(scenario())


def test_a_worker_that_hands_out_nothing_is_not_asked_for_kv() -> None:
    async def scenario() -> None:
        fleet = Fleet()
        fleet.workers[0].place = ""
        turn = await fleet.send_elsewhere()
        await turn
        assert not fleet.workers[1].moves
        assert fleet.moves.failures["off"] == 1
        await fleet.close()

    run(scenario())


def test_with_the_section_off_every_turn_goes_at_once() -> None:
    async def scenario() -> None:
        events = EventLog(MemorySink(), asyncio.get_running_loop().time)
        fleet = Fleet()
        fleet.proxy.kv = kv_moves(KvTransferSection(), events)
        await (await fleet.send_elsewhere())
        assert not fleet.workers[1].moves
        await fleet.close()

    run(scenario())


# -- the break-even --------------------------------------------------------------------------------------------------


def learned(move: tuple[float, float], compute: tuple[float, float], **options: Any) -> BreakEven:
    policy = BreakEven(explore=1000, **options)
    for tokens in (100, 300, 500, 900):
        policy.record_turn(True, tokens, move[0] + move[1] * tokens)
        policy.record_turn(False, tokens, compute[0] + compute[1] * tokens)
    return policy


def test_a_move_pays_from_the_length_on_at_which_the_lines_cross() -> None:
    policy = learned(move=(0.1, 0.0001), compute=(0.0, 0.0005))
    assert break_even_tokens(policy) == pytest.approx(250)
    assert [policy.move_pays(tokens) for tokens in (10, 200, 300, 5000)] == [False, False, True, True]


def test_a_link_that_is_slower_than_computing_is_never_used_and_one_that_is_free_always() -> None:
    never = learned(move=(0.1, 0.001), compute=(0.0, 0.0005))
    assert break_even_tokens(never) == math.inf
    assert not any(never.move_pays(tokens) for tokens in (10, 10_000))
    always = learned(move=(0.0, 0.0001), compute=(0.01, 0.0005))
    assert break_even_tokens(always) == 0
    assert always.move_pays(1)


def test_both_ways_are_tried_before_either_is_believed_and_again_now_and_then() -> None:
    policy = BreakEven(tries=2, explore=10)
    tried = []
    for _ in range(4):
        tried.append(policy.move_pays(100))
        policy.record_turn(tried[-1], 100, 0.01 if tried[-1] else 1.0)
    assert sorted(tried) == [False, False, True, True]
    later = [policy.move_pays(100) for _ in range(20)]
    assert later.count(False) == 2


def test_a_link_that_becomes_slow_is_given_up_and_taken_up_again() -> None:
    policy = BreakEven(memory=20, explore=5)

    def live(link: float, turns: int) -> int:
        moved = 0
        for _ in range(turns):
            pays = policy.move_pays(100)
            moved += pays
            policy.record_turn(pays, 100, link if pays else 0.5)
        return moved

    assert live(0.1, 40) > 28
    live(2.0, 100)
    assert live(2.0, 40) < 12
    live(0.1, 300)
    assert live(0.1, 40) > 28


def test_short_contexts_are_computed_and_nonsense_is_not_learned() -> None:
    policy = BreakEven(min_tokens=64)
    assert not policy.move_pays(63)
    for seconds in (math.nan, math.inf, -1.0):
        policy.record_turn(True, 100, seconds)
    policy.record_turn(True, 0, 1.0)
    assert policy.expected(100) == (0.0, 0.0)
    with pytest.raises(ConfigError):
        BreakEven(tries=0)


# -- configuration and the simulated twin ----------------------------------------------------------------------------


def test_the_section_refuses_what_no_run_could_use() -> None:
    for key, value in (("limit", 0.0), ("staging_mb", 0), ("min_tokens", -1)):
        with pytest.raises(ConfigError, match=key):
            parse_config({"rollout": {"kv_transfer": {key: value}}})


def test_a_simulated_move_takes_the_link_s_time_and_is_not_prefilled() -> None:
    async def scenario() -> None:
        config = parse_config({"sim": {"prefill_seconds_per_token": 0.01}})
        weights = SimWeights()
        weights.put(0)
        a, b = (SimWorker(name, config, weights) for name in ("a", "b"))
        assert isinstance(a, KvWorker)
        for worker in (a, b):
            await worker.suspend()
            await worker.update(0)
            await worker.resume()
        request = GenerationRequest("t/0", "t", 0, tuple(range(100)), Sampling(4), "sim")
        await a.add([request])
        said = (await a.completions())[0]
        context = (*request.token_ids, *said.token_ids, 1)
        loop = asyncio.get_running_loop()
        begun = loop.time()
        moved = await b.fetch_kv(KvMove("t", context, await a.kv_place(), 5.0))
        assert moved.tokens == moved.moved == len(context) - 1
        assert loop.time() - begun == pytest.approx(0.1 * 0.01 * moved.moved)
        await b.add([GenerationRequest("t/1", "t", 1, context, Sampling(4), "sim")])
        await b.completions()
        assert (await b.stats()).prefix_hits == moved.moved
        a.die()
        assert (await b.fetch_kv(KvMove("u", context, "a", 5.0))).why.startswith("unreachable")

    run(scenario())


@pytest.mark.parametrize(("faults", "seeds"), [(0.0, 1), pytest.param(0.01, 3, marks=pytest.mark.long)])
def test_simulated_runs_move_kv_and_lose_nothing(faults: float, seeds: int) -> None:
    moved = 0
    for seed in range(seeds):
        result = simulate(
            load_config(
                None,
                [
                    "rollout.kv_transfer.enabled=true",
                    "rollout.kv_transfer.min_tokens=1",
                    "rollout.routing.policy=least-loaded",
                    "rollout.workers=4",
                    "run.steps=2",
                    "rollout.groups_per_step=2",
                    "rollout.environments=16",
                    f"sim.fault_rate={faults}",
                    f"run.seed={seed}",
                ],
            )
        )
        assert result.unaccounted == 0
        moved += result.events.count(b'"kind":"kv_moved"')
    assert moved > 0
