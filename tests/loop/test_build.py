"""The composition root: which strategies of the proxy a config asks for, that they compose, and what cannot be together."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import pytest

from orchestrator.api import Completion, ConfigError, GenerationRequest, ManagedWorker, Sampling
from orchestrator.build import build_proxy
from orchestrator.config import Config, load_config
from orchestrator.events import EventLog, MemorySink
from orchestrator.policies.batching.coordination_modes import coordination_mode
from orchestrator.policies.routing.turn_routing import Seat
from orchestrator.proxy.membership import Membership
from orchestrator.proxy.prefill_decode import PrefillDecode
from orchestrator.rollout import Rollout
from orchestrator.sim.resizable_worker import ResizableSimWorker
from orchestrator.sim.simulated_worker import SimWeights, SimWorker, TurnMoves
from scripts.bench.virtual_run import run

SERVER, LATER = "http://127.0.0.1:1", "http://127.0.0.1:2"
APART = (
    "rollout.kv_transfer.enabled=true",
    "rollout.disaggregation.enabled=true",
    "rollout.disaggregation.prefill=P",
    "rollout.disaggregation.decode=D",
    "rollout.disaggregation.min_tokens=8",
)
CUT = ("rollout.weights=relay", "rollout.planner.enabled=true")


def config_of(*overrides: str, own: str = "DD") -> Config:
    named = ", ".join(f'"vllm-{index}" = "{name}"' for index, name in enumerate(own))
    hardware = f'rollout.routing.hardware={{{named}, "{SERVER}" = "P"}}'
    shape = [f"rollout.workers={len(own)}", f'rollout.served=["{SERVER}"]', hardware, "sim.response_tokens_mean=60"]
    return load_config(None, [*shape, *APART, *overrides])


class Server(SimWorker):
    """A borrowed server in virtual time."""

    receive = None  # type: ignore[assignment]
    url = "simulated"


def workers_of(config: Config) -> tuple[list[ManagedWorker], SimWeights, TurnMoves]:
    weights, moves = SimWeights(), TurnMoves()
    weights.put(0)
    own = [ResizableSimWorker(f"vllm-{i}", config, weights, moves=moves) for i in range(config.rollout.workers)]
    return [*own, Server(SERVER, config, weights, moves=moves)], weights, moves


def test_engines_are_cut_anew_while_turns_go_over_two_classes_and_a_server_comes_and_goes() -> None:
    """All three strategies over one proxy: no turn is lost, and none is answered twice."""

    async def main() -> None:
        config = config_of(*CUT)
        workers, weights, moves = workers_of(config)
        failed: list[BaseException] = []
        events = EventLog(MemorySink(), asyncio.get_running_loop().time)
        proxy, resizing = build_proxy(config, workers, events, coordination_mode("async", 1), failed.append)
        assert isinstance(proxy.split, PrefillDecode)
        assert resizing is not None
        members = Membership(proxy)
        proxy.start()
        await proxy.suspend()
        await proxy.update(0)
        await proxy.resume()

        def ask(count: int, prefix: str) -> list[asyncio.Task[Completion]]:
            names = [f"{prefix}{number}" for number in range(count)]
            requests = [GenerationRequest(name, name, 0, (2,) * 20, Sampling(80, 1.0), "sim") for name in names]
            return [asyncio.create_task(proxy.generate(request)) for request in requests]

        asked = ask(8, "a")
        await asyncio.sleep(0.3)
        done = await resizing.reshape(2)
        assert (done.error, resizing.degrees) == ("", (2,))
        asked += ask(4, "b")
        await asyncio.sleep(0.3)
        late = Server(LATER, config, weights, moves=moves)
        taken = await members.take_worker(late, Seat("P", 0, True))
        asked += ask(4, "c")
        await asyncio.sleep(0.3)
        await members.give_back(taken)
        await resizing.reshape(1)
        for task in asked:
            said = await task
            assert 0 < len(said.token_ids) <= 80
            assert said.finish_reason in ("stop", "length")
        assert proxy.split.served == 16
        assert (failed, proxy.in_flight) == ([], 0)
        await proxy.close()
        for worker in (*workers, late):
            await worker.close()

    run(main())


def test_devices_of_two_classes_are_not_cut_into_one_engine() -> None:
    with pytest.raises(ConfigError, match=r"rollout\.routing\.hardware.*rollout\.planner.*devices of one class"):
        config_of(*CUT, own="PD")


def test_without_borrowed_workers_two_classes_and_engines_that_are_cut_anew_are_refused_before_anything_starts() -> (
    None
):
    with pytest.raises(ConfigError, match=r"rollout\.disaggregation\.enabled"):
        load_config(
            None, ["rollout.workers=2", 'rollout.routing.hardware={"vllm-0" = "P", "vllm-1" = "D"}', *APART, *CUT]
        )


def test_prompts_of_before_a_resume_are_drawn_again_while_others_have_turns() -> None:
    """A week may have a million, of 25 microseconds each where arithmetic is asked: all at once held the loop up."""
    drawn: list[float] = []
    turns = 0

    def draw() -> int:
        time.sleep(0.001)  # as a task may take for one
        drawn.append(0.0)
        return len(drawn) - 1

    async def main() -> None:
        nonlocal turns
        rollout: Any = SimpleNamespace(groups=200, rounds=None, prompts=SimpleNamespace(repeated_share=dict))
        rollout._next_prompt, rollout._lost, rollout._again = draw, {7: None, 150: None}, []
        skipping = asyncio.create_task(Rollout._skip_prompts(rollout))
        while not skipping.done():
            await asyncio.sleep(0)
            turns += 1
        assert rollout._again == [(7, 7), (150, 150)], "those of lost groups, with their numbers"

    asyncio.run(main())
    assert len(drawn) == 200
    assert turns > 10
