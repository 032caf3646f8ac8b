"""Engines that are added and taken away: what is in flight goes on elsewhere, what fails costs nothing. Workers are doubles."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable

import pytest

from orchestrator.api import (
    Completion,
    GenerationRequest,
    MachineGone,
    ManagedWorker,
    RetryableError,
    RunError,
    Sampling,
)
from orchestrator.config import parse_config
from orchestrator.events import EventLog, MemorySink
from orchestrator.proxy import engine_scaling
from orchestrator.proxy.engine_scaling import EngineScaling
from orchestrator.proxy.gateway import LLMProxy
from orchestrator.proxy.membership import Membership
from orchestrator.proxy.worker_state import WorkerLimits
from tests.proxy.test_gateway import ScriptedWorker


class Aborting(ScriptedWorker):
    """Gives back what it is told to abort, as an engine does."""

    async def abort(self, request_ids=(), *, trajectories=(), groups=()) -> None:  # type: ignore[no-untyped-def]
        await super().abort(request_ids)
        for name in request_ids:
            self.give_back(name)

    def give_back(self, name: str) -> None:
        self.held.pop(name)
        self._done.put_nowait(Completion(name, (7,), (-0.1,), ((self.version, 1),), "abort"))


class Source:
    """``fail``: how many starts fail."""

    def __init__(self) -> None:
        self.made: dict[int, Aborting] = {}
        self.gone: list[str] = []
        self.fail = 0

    def make(self, number: int) -> ManagedWorker:
        worker = self.made.setdefault(number, Aborting(f"vllm-{number}", auto=False))
        worker.fail_restarts, self.fail = self.fail, 0
        return worker

    async def let_go(self, worker: ManagedWorker) -> None:
        self.gone.append(worker.name)


class Run:
    """As much of one as scales."""

    def __init__(self, workers: int = 2, **rollout: object) -> None:
        settings = parse_config({"rollout": {"workers": workers, **rollout}}).rollout
        self.sink, self.fatal, self.source = MemorySink(), list[RunError](), Source()
        self.first = [Aborting(f"vllm-{number}", auto=False) for number in range(workers)]
        events = EventLog(self.sink, lambda: 0.0)
        limits = WorkerLimits(20, 20, 20, 20, 20)
        self.proxy = LLMProxy(self.first, events, limits=limits, restarts=0, on_fatal=self.fatal.append)
        self.scaling = EngineScaling(self.source, Membership(self.proxy), events, settings)

    async def settle(self, group: int, engines: int, total: int = 0) -> None:
        """Wanted, and there."""
        self.scaling.want(group, engines)
        async with asyncio.timeout(5):
            while self.engines != (total or engines) or self.scaling._coming or self.scaling._leaving:
                await asyncio.sleep(0.01)

    @property
    def engines(self) -> int:
        return sum(not state.parked for state in self.proxy.states)

    @property
    def said(self) -> list[dict[str, object]]:
        return [json.loads(line) for line in self.sink.lines]

    def scaled(self) -> list[tuple[object, ...]]:
        found = [event for event in self.said if event["kind"] == "scaled"]
        return [(event["worker"], event["what"], event["engines"], event["requests"]) for event in found]


def play(
    scenario: Callable[[Run], Awaitable[None]], monkeypatch: pytest.MonkeyPatch, run: Callable[[], Run] = Run
) -> None:
    monkeypatch.setattr(engine_scaling, "_EVERY", 0.01)
    monkeypatch.setattr(engine_scaling, "PAUSE", 0.05)

    async def main() -> None:
        made = run()
        made.proxy.start()
        await made.proxy.update(4)
        task = asyncio.create_task(made.scaling.run())
        try:
            await scenario(made)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await made.proxy.close()
        assert made.fatal == []

    asyncio.run(main())


def request(number: int) -> GenerationRequest:
    return GenerationRequest(f"r{number}", f"t{number}", 0, (1, 2, 3), Sampling(20), "test")


def test_an_engine_that_is_added_has_the_present_weights_before_its_first_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario(run: Run) -> None:
        await run.settle(0, 4)
        assert [worker.name for worker in run.source.made.values()] == ["vllm-2", "vllm-3"]
        assert all(worker.commands == ["suspend", "update 4", "resume"] for worker in run.source.made.values())
        turns = [asyncio.create_task(run.proxy.generate(request(number))) for number in range(4)]
        await asyncio.sleep(0.05)
        workers = [*run.first, *run.source.made.values()]
        assert [len(worker.added) for worker in workers] == [1, 1, 1, 1]
        for worker in workers:
            worker.answer(worker.added[0])
        await asyncio.gather(*turns)
        assert [what for _, what, _, _ in run.scaled()] == ["added", "added"]

    play(scenario, monkeypatch)


def test_what_an_engine_had_goes_on_elsewhere_with_its_tokens_when_it_is_taken_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario(run: Run) -> None:
        turns = [asyncio.create_task(run.proxy.generate(request(number))) for number in range(4)]
        await asyncio.sleep(0.05)
        assert [len(worker.held) for worker in run.first] == [2, 2]
        await run.settle(0, 1)
        await asyncio.sleep(0.05)
        assert run.source.gone == ["vllm-1"]
        assert run.scaled() == [("vllm-1", "removed", 1, 2)]
        assert len(run.first[0].held) == 4
        for name in list(run.first[0].held):
            run.first[0].answer(name)
        answers = await asyncio.gather(*turns)
        assert sorted(answer.token_ids for answer in answers) == [(5, 1), (5, 1), (7, 5, 1), (7, 5, 1)]
        run.source.make(1).hardware = "L20"  # type: ignore[attr-defined]  # its devices are of another class now
        await run.settle(0, 2)  # under the same number
        assert [state.worker.name for state in run.proxy.states] == ["vllm-0", "vllm-1"]
        assert [seat.hardware for seat in run.proxy.router._seats] == ["any", "L20"]

    play(scenario, monkeypatch)


def test_one_that_does_not_come_up_is_tried_again_and_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(run: Run) -> None:
        run.source.fail = 1
        await run.settle(0, 3)
        assert run.source.gone == ["vllm-2"]
        assert run.source.made[2].restarts == 2
        assert [event["what"] for event in run.said if event["kind"] == "fault"] == ["scaling vllm-2"]
        assert run.scaled() == [("vllm-2", "added", 3, 0)]

    play(scenario, monkeypatch)


def test_nothing_changes_beside_a_weight_update_and_what_is_wanted_no_more_is_not_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario(run: Run) -> None:
        await run.proxy.suspend()
        run.scaling.want(0, 3)
        await asyncio.sleep(0.05)
        assert run.source.made == {}
        await run.proxy.resume()
        run.proxy.unpublished = run.proxy.version  # it waits for its weights
        while not run.scaling._coming:
            await asyncio.sleep(0.01)
        await run.settle(0, 2)
        assert run.source.gone == ["vllm-2"]
        assert run.scaled() == []

    play(scenario, monkeypatch)


def test_one_that_is_taken_away_while_it_fetches_weights_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(run: Run) -> None:
        let_go = asyncio.Event()

        async def prepare(version: int) -> None:
            await let_go.wait()
            raise RetryableError("vllm-1 died")

        monkeypatch.setattr(run.first[1], "prepare", prepare)
        preparing = asyncio.create_task(run.proxy.prepare(5))
        await run.settle(0, 1)
        let_go.set()
        assert await preparing == []
        assert run.proxy.faults == 0
        monkeypatch.setattr(run.first[0], "prepare", prepare)
        assert await run.proxy.prepare(5) == ["vllm-1 died"], "one that is there still counts"
        assert run.proxy.faults == 1

    play(scenario, monkeypatch)


def test_a_dead_engine_is_not_replaced_by_itself_and_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(run: Run) -> None:
        run.first[0].die()
        while not run.proxy.states[0].removed:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        assert run.source.made == {}
        await run.settle(0, 3)
        assert [*run.source.made] == [2]
        await run.settle(0, 2)
        assert run.source.gone == ["vllm-0"]
        assert [state.alive for state in run.proxy.states] == [False, True, True]
        await run.settle(0, 3)  # a new process, in the place of the dead one
        assert [state.alive for state in run.proxy.states] == [True, True, True]

    play(scenario, monkeypatch)


def test_each_group_has_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    def run() -> Run:
        return Run(3, engines=[{"count": 2}, {"max_num_seqs": 8}])

    async def scenario(run: Run) -> None:
        await run.settle(1, 2, total=4)
        await run.settle(0, 1, total=3)
        assert [*run.source.made] == [4]
        assert run.source.gone == ["vllm-1"]

    play(scenario, monkeypatch, run)


def test_a_machine_that_is_gone_is_waited_for_and_counts_as_no_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    from orchestrator.proxy import gateway

    monkeypatch.setattr(gateway, "_ASK_AGAIN", 0.01)
    tries: list[int] = []

    async def restart(self: ScriptedWorker) -> None:
        tries.append(1)
        if len(tries) < 5:
            raise MachineGone("the machine of vllm-0 is gone")
        self.dead, self._died = False, asyncio.Event()

    async def scenario(run: Run) -> None:
        run.proxy._restarts = 1
        monkeypatch.setattr(Aborting, "restart", restart)
        run.first[0].die()
        async with asyncio.timeout(5):
            while not run.proxy.states[0].alive or not tries:
                await asyncio.sleep(0.01)
        assert len(tries) == 5
        assert not run.proxy.states[0].removed

    play(scenario, monkeypatch)
