"""Rollout and training on the same devices, with twins in virtual time: whatever fails, the engines work afterwards."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from orchestrator.api import (
    Completion,
    CompletionTiming,
    ConfigError,
    GenerationRequest,
    RetryableError,
    RunError,
    Sampling,
    TrainBatch,
    TrainMetrics,
    TrainSample,
)
from orchestrator.colocation.handover import Colocation, DeviceHolder
from orchestrator.events import EventLog, MemorySink
from orchestrator.ledger import Ledger
from orchestrator.proxy.gateway import LLMProxy
from orchestrator.proxy.resume_turn import joined_completion, remaining_request
from orchestrator.proxy.worker_state import WorkerLimits
from scripts.bench.virtual_run import run
from tests.support import colocation_twins as twins

WORKERS, STEPS, GROUP = 4, 2, 12
STALL = 5.0  # seconds, of the proxy
TRAINER = 20.0
COMMANDS = ("suspend", "abort", "release", "reclaim", "update", "resume", "add")
Fault = tuple[str, str, int]


class Colocated:
    """Four workers and a trainer on four devices, and the run that alternates between them."""

    def __init__(self, faults: Mapping[Fault, str], level: str = "weights") -> None:
        self.faults = twins.Faults(faults)
        self.devices = [twins.Device(f"device-{index}") for index in range(WORKERS)]
        self.workers = [twins.TwinWorker(f"worker-{i}", device, self.faults) for i, device in enumerate(self.devices)]
        self.trainer = twins.TwinTrainer(self.devices, self.faults)
        self.sink = MemorySink()
        now = asyncio.get_running_loop().time
        self.events = EventLog(self.sink, now)
        self.ledger = Ledger(MemorySink(), now)
        self.fatal: list[RunError] = []
        self.proxy = LLMProxy(
            self.workers,
            self.events,
            limits=WorkerLimits(STALL, STALL, STALL, STALL, 4 * STALL),
            restarts=3,
            on_fatal=lambda error: self.fatal.append(error),
        )
        self.colocation = Colocation(
            self.proxy, self.trainer, self.events, engines=range(WORKERS), timeout=TRAINER, level=level
        )
        self.metrics: list[TrainMetrics] = []
        self.retried = 0
        self.answers: dict[str, tuple[GenerationRequest, asyncio.Task[Completion]]] = {}

    def handovers(self) -> list[dict[str, Any]]:
        events = [json.loads(line) for line in self.sink.lines]
        return [event for event in events if event["kind"] == "handover"]

    async def start(self) -> None:
        self.proxy.start()
        await self.proxy.suspend()
        await self.proxy.update(0)
        await self.proxy.resume()

    def roll_out(self, step: int) -> list[str]:
        names = [f"t{step}-{index}" for index in range(GROUP)]
        for number, name in enumerate(names):
            request = GenerationRequest(
                name, name, 0, (step + 2, number + 2), Sampling(20 + 15 * number, 0.0, stop_token_ids=(twins.END,)), "t"
            )
            self.ledger.start(name, f"g{step}")
            self.answers[name] = (request, asyncio.create_task(self.proxy.generate(request)))
        return names

    async def finished(self, names: list[str], count: int) -> list[str]:
        while True:
            done = [name for name in names if self.answers[name][1].done()]
            if len(done) >= count:
                return done
            await asyncio.sleep(0.02)

    async def step(self, step: int) -> None:
        """One training step as a run makes it; two turns of it are still under way when it trains."""
        names = self.roll_out(step)
        self.answers_of_step(step)
        done = await self.finished(names, GROUP // 3)
        await self.colocation.shrink([1, 3], [1, 3])
        await self.colocation.feed([sample(name) for name in done], self.trainer.version)
        done = await self.finished(names, GROUP - 2)
        batch = TrainBatch(step, self.trainer.version, tuple(sample(name) for name in done))
        while True:
            try:
                metrics = await self.colocation.train(batch)
                break
            except RetryableError:
                self.check_running()
                self.retried += 1
                assert self.retried < 20, "it never gets trained"
                await asyncio.sleep(3.0)
        self.metrics.append(metrics)
        while True:
            try:
                await self.trainer.publish()
                break
            except RetryableError as error:
                if self.trainer.dead:
                    raise RunError("the trainer died in publish") from error
        await self.colocation.give_back(metrics.version)
        self.check_running()
        for name in done:
            self.ledger.end(name, "trained", step=step)

    def answers_of_step(self, step: int) -> None:
        assert all(f"t{step}-{index}" in self.answers for index in range(GROUP))

    def check_running(self) -> None:
        """Between hand-overs: the workers have the devices."""
        assert self.colocation.holder is DeviceHolder.ROLLOUT
        assert self.colocation.waiting_for == ""
        assert all("trainer" not in device.owners for device in self.devices)

    async def settle(self) -> None:
        """Every turn is answered, every worker is back or reported dead."""
        for name, (request, answer) in self.answers.items():
            completion = await answer
            assert completion.request_id == name
            assert completion.token_ids == twins.whole_response(request), f"{name} says something else"
            assert len(completion.logprobs) == len(completion.token_ids)
            assert sum(count for _, count in completion.versions) == len(completion.token_ids)
            versions = [version for version, _ in completion.versions]
            assert versions == sorted(set(versions))
            if self.ledger.state(name) != "trained":
                self.ledger.end(name, "filtered")
        self.ledger.check()
        assert self.ledger.counts.in_flight == 0
        await asyncio.sleep(200.0)  # restarts in the background
        assert self.fatal == []
        for lane in self.proxy.states:
            worker = lane.worker
            assert not lane.lent
            assert lane.alive, f"{worker.name} was not brought back"
            assert (worker.suspended, worker.released, worker.version) == (False, "", self.proxy.version)
            assert worker.device.owners == [worker.name]
        extra = GenerationRequest("extra", "extra", 0, (9, 9), Sampling(30, 0.0, stop_token_ids=(twins.END,)), "t")
        assert (await self.proxy.generate(extra)).token_ids == twins.whole_response(extra)
        await self.proxy.close()
        for worker in self.workers:
            await worker.close()


def sample(name: str) -> TrainSample:
    return TrainSample(name, name.split("-")[0], (1,), (1,), (0.0,), ((0, 1),), 0.0)


async def whole_run(faults: Mapping[Fault, str], level: str = "weights") -> Colocated:
    run = Colocated(faults, level)
    await run.start()
    try:
        for step in range(STEPS):
            await run.step(step)
    except RunError:
        run.check_running()
        assert run.trainer.dead or any(what == "train_step" for _, what, _, _ in run.faults.hit)
    await run.settle()
    return run


def test_a_run_alternates_and_each_transition_is_an_event() -> None:
    async def main() -> Colocated:
        return await whole_run({})

    found = run(main())
    assert found.trainer.version == STEPS
    assert [len(batch) >= GROUP - 2 for batch in found.trainer.trained] == [True] * STEPS
    assert found.trainer.fed, "gradients were computed beside rollout"
    order = [event["what"] for event in found.handovers()]
    one = [*["release"] * 2, "residency stream", *["release"] * 2, "residency step", "train_step", "residency away"]
    assert order == [*one, *["reclaim"] * 4] * STEPS
    for event in found.handovers():
        assert event["seconds"] > 0
        assert event["error"] == ""
        assert (event["bytes"] > 0) == (event["what"].startswith(("release", "residency")))
    assert sum(event.get("moved", 0) for event in found.handovers()) > 0, "requests went on elsewhere"
    assert any(inside for worker in found.workers for inside in worker.releases), "requests waited inside"
    assert found.proxy.faults == 0


def test_the_same_run_again_writes_the_same_events() -> None:
    async def main() -> str:
        return (await whole_run({("worker-1", "release", 0): "hang", ("trainer", "feed", 1): "raise"})).sink.text()

    assert run(main()) == run(main())


EVERY = [
    *itertools.product(["worker-1"], COMMANDS, (0, 1), ("die", "hang", "refuse")),  # it lends first, and moves requests
    *itertools.product(["worker-2"], [c for c in COMMANDS if c != "abort"], (0, 1), ("die", "hang", "refuse")),
    *itertools.product(
        ["trainer"],
        ["residency stream", "residency step", "residency away", "feed", "train_step"],
        (0, 1),
        ("raise", "die", "hang"),
    ),
]


@pytest.mark.parametrize("fault", EVERY, ids=lambda fault: "-".join(map(str, fault)))
def test_a_failure_at_any_transition_leaves_working_engines(fault: tuple[str, str, int, str]) -> None:
    async def main() -> Colocated:
        return await whole_run({fault[:3]: fault[3]})

    found = run(main())
    assert found.faults.hit or fault[1:3] == ("residency away", 1), "the fault was injected"
    if found.faults.hit:
        reported = [event for event in found.handovers() if event["error"]]
        assert reported or found.proxy.faults, "what failed is in the event log"
    if not found.trainer.dead and fault[:2] != ("trainer", "train_step"):
        assert found.trainer.version == STEPS, "every step was trained"


@pytest.mark.parametrize("seed", range(40))
def test_any_mixture_of_failures_leaves_working_engines(seed: int) -> None:
    rng = random.Random(seed)
    choices = [
        (name, what, number, kind)
        for name, whats, kinds in (
            *((f"worker-{index}", (*COMMANDS, "restart"), ("die", "hang", "refuse")) for index in range(WORKERS)),
            ("trainer", ("residency stream", "residency step", "residency away", "feed", "publish"), ("raise", "hang")),
        )
        for what in whats
        for number in range(6)
        for kind in kinds
    ]
    faults = {fault[:3]: fault[3] for fault in rng.sample(choices, 8)}
    level = rng.choice(["kv", "weights", "dropped"])

    async def main() -> Colocated:
        return await whole_run(
            {fault: kind for fault, kind in faults.items() if fault[1] != "restart" or fault[2] < 1}, level
        )

    found = run(main(), seed=seed, shuffle=bool(seed % 2))
    assert found.trainer.version == STEPS or found.trainer.dead


def test_a_trainer_that_does_not_leave_is_closed_before_any_worker_reclaims() -> None:
    faults = {("trainer", "residency away", number): "raise" for number in range(2)}

    async def main() -> Colocated:
        return await whole_run(faults)

    found = run(main())
    assert found.trainer.dead
    order = [event["what"] for event in found.handovers()]
    assert order.index("close") < order.index("reclaim")


@pytest.mark.parametrize("what", ["residency stream", "feed", "residency step", "train_step"])
def test_a_mistake_of_the_configuration_is_told_as_one_with_the_engines_running(what: str) -> None:
    async def main() -> None:
        colocated = Colocated({("trainer", what, 0): "config"})
        await colocated.start()
        with pytest.raises(ConfigError):
            await colocated.step(0)
        colocated.check_running()
        await colocated.settle()

    run(main())


def test_commands_out_of_order_are_refused_and_a_cancelled_one_is_cured_by_give_back() -> None:
    async def main() -> None:
        colocated = Colocated({("worker-0", "release", 0): "hang"})
        await colocated.start()
        names = colocated.roll_out(0)
        colocation = colocated.colocation
        shrinking = asyncio.create_task(colocation.shrink([0, 1]))
        await asyncio.sleep(1.0)
        assert "release" in colocation.waiting_for
        shrinking.cancel()
        await asyncio.wait([shrinking])
        assert colocation.waiting_for == ""
        for call in (colocation.shrink([0]), colocation.train(TrainBatch(0, 0, ()))):
            with pytest.raises(RunError, match="give them back"):
                await call
        assert not await colocation.feed([], 0)
        await colocation.give_back()
        colocated.check_running()
        await colocated.finished(names, GROUP)
        await colocated.settle()

    run(main())


def moved(request: GenerationRequest, cuts: list[int]) -> Completion:
    """``request``, answered in pieces of so many tokens."""
    parts: list[Completion] = []
    for moves, cut in enumerate(cuts):
        now = remaining_request(request, parts, moves)
        if now is None:
            return joined_completion(request, parts, None)
        tokens = twins.whole_response(now)[:cut]
        timing = CompletionTiming(0.5, 1.0, 0.75 if tokens else 0.0, 0.01)
        spans = ((moves, len(tokens)),) if tokens else ()
        part = Completion(now.request_id, tokens, (-0.5,) * len(tokens), spans, "abort", timing)
        if tokens:
            parts.append(part)
    now = remaining_request(request, parts, len(cuts))
    if now is None:
        return joined_completion(request, parts, None)
    tokens = twins.whole_response(now)
    reason = "stop" if tokens[-1] == twins.END else "length"
    timing = CompletionTiming(0.5, 1.0, 0.75, 0.01)
    last = Completion(now.request_id, tokens, (-0.5,) * len(tokens), ((9, len(tokens)),), reason, timing)
    return joined_completion(request, parts, last)


@pytest.mark.parametrize("seed", range(30))
def test_a_turn_in_pieces_says_what_it_says_in_one(seed: int) -> None:
    rng = random.Random(seed)
    sampling = Sampling(rng.randint(1, 40), 0.0, stop_token_ids=(twins.END,))
    request = GenerationRequest("r", "t", 0, (seed + 2, 5), sampling, "t")
    found = moved(request, [rng.randint(0, 12) for _ in range(rng.randint(1, 4))])
    expected = twins.whole_response(request)
    assert (found.request_id, found.token_ids) == ("r", expected)
    assert found.finish_reason == ("stop" if expected[-1] == twins.END else "length")
    assert len(found.logprobs) == sum(count for _, count in found.versions) == len(expected)
    timing = found.timing
    assert timing.queued == 0.5
    whole = timing.queued + timing.running
    assert timing.first_token + timing.per_token * (len(expected) - 1) <= whole + 1e-9


def test_the_rest_of_a_seeded_turn_does_not_repeat_its_draws() -> None:
    request = GenerationRequest("r", "t", 0, (2,), Sampling(10, 1.0, seed=7), "t")
    part = Completion("r", (3, 4), (0.0, 0.0), ((0, 2),), "abort")
    again = remaining_request(request, [part], 1)
    assert again is not None
    assert again.sampling == replace(request.sampling, max_tokens=8, seed=again.sampling.seed)
    assert again.sampling.seed not in (7, None)
    assert (again.request_id, again.token_ids) == ("r~1", (2, 3, 4))
