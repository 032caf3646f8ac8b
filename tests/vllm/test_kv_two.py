"""Two real engines side by side (CPU, tiny random Qwen3, fp32, greedy): KV that moves, prefill and decode apart, and deaths."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from orchestrator.api import Completion, GenerationRequest, KvMove, Sampling
from orchestrator.config.rollout_keys import DisaggregationSection
from orchestrator.events import EventLog, MemorySink
from orchestrator.policies.placement.kv_transfer_cost import BreakEven
from orchestrator.policies.routing.turn_routing import DECODE, PREFILL, Seat, TurnRouter
from orchestrator.proxy.gateway import LLMProxy
from orchestrator.proxy.kv_moves import KvMoves
from orchestrator.proxy.prefill_decode import PrefillDecode
from orchestrator.proxy.worker_state import WorkerLimits
from scripts.bench.probes.vllm.kv_engines import Child
from scripts.bench.probes.vllm.kv_probe import say
from scripts.bench.probes.vllm.recompute_probe import VOCABULARY, write_tiny_qwen3

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(900)]
BLOCK = 32


def prompt(seed: int, length: int) -> tuple[int, ...]:
    rng = random.Random(seed)
    return tuple(rng.randrange(VOCABULARY) for _ in range(length))


def engine(name: str, model: Path) -> Child:
    return Child(
        name,
        model=str(model),
        max_model_len=512,
        kv_cache_mb=4,
        plugin={"kv_transfer": True},
        kv={"token": "token of this test"},
    )


class Pair:
    """Two engines and the loop they are spoken to from."""

    def __init__(self, model: Path) -> None:
        self.runner = asyncio.Runner()
        self.engines = [engine(name, model) for name in ("a", "b")]
        self.run(self._ready())

    async def _ready(self) -> None:
        await asyncio.gather(*(one.ready() for one in self.engines))

    def run(self, coroutine: Any) -> Any:
        return self.runner.run(coroutine)

    def close(self) -> None:
        async def all_of() -> None:
            for one in self.engines:
                await one.close()

        self.run(all_of())
        self.runner.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_tiny_qwen3(folder, 1)
    return folder


@pytest.fixture(scope="module")
def pair(model: Path) -> Iterator[Pair]:
    found = Pair(model)
    yield found
    found.close()


def same(one: Completion, other: Completion) -> bool:
    return (one.token_ids, one.logprobs) == (other.token_ids, other.logprobs)


def test_a_prefix_goes_from_one_engine_to_the_other_while_both_serve_and_decode_is_bit_for_bit_the_same(
    pair: Pair,
) -> None:
    async def scenario() -> None:
        a, b = pair.engines
        place = await a.kv_place()
        contexts = []
        for number, length in enumerate((40, 97, 160, 333)):
            first = await say(a, f"first {number}", prompt(number, length), 30)
            contexts.append((*prompt(number, length), *first.token_ids, 1, 2, 3))
        for number, context in enumerate(contexts):
            counted = await b.computed()
            moved = await b.fetch_kv(KvMove(f"t{number}", context, place, 30.0))
            blocks = (len(context) - 4) // BLOCK
            assert (moved.moved, moved.why) == (blocks * BLOCK, "")
            after = await say(b, f"after {number}", context, 40)
            assert same(after, await say(a, f"stayed {number}", context, 40))
            assert await b.computed() - counted == len(context) - blocks * BLOCK + 39

    pair.run(scenario())


def parted(pair: Pair) -> LLMProxy:
    loop = asyncio.get_running_loop()
    events = EventLog(MemorySink(), loop.time)
    failed: list[Exception] = []
    proxy = LLMProxy(
        pair.engines,
        events,
        limits=WorkerLimits(120.0),
        restarts=0,
        router=TurnRouter([Seat("P"), Seat("D")], phases={PREFILL: "P", DECODE: "D"}),
        kv=KvMoves(BreakEven(), events, 30.0),
        on_fatal=failed.append,
    )
    settings = DisaggregationSection(enabled=True, prefill="P", decode="D", min_tokens=1)
    proxy.split = PrefillDecode(proxy, settings)
    proxy.version = -1
    proxy.start()
    return proxy


def test_prefill_on_one_engine_and_decode_on_the_other_is_bit_for_bit_what_one_engine_says(pair: Pair) -> None:
    """1P1D, three turns. The lengths are whole blocks, so that one engine, too, computes each token in the same company; of
    others see the next test."""

    async def scenario() -> None:
        a, b = pair.engines
        for one in (a, b):
            await one.forget()
        turns: list[tuple[tuple[int, ...], Completion]] = []
        context = prompt(77, 4 * BLOCK)
        for number in range(3):
            whole = await say(b, f"whole {number}", context, BLOCK + 1)
            turns.append((context, whole))
            rest = prompt(78 + number, 2 * BLOCK - (len(context) + len(whole.token_ids)) % BLOCK)
            context = (*context, *whole.token_ids, *rest)
        for one in (a, b):
            await one.forget()
        proxy = parted(pair)
        for number, (context, whole) in enumerate(turns):
            counted = [await one.computed() for one in (a, b)]
            sampling = Sampling(BLOCK + 1, 0.0)
            said = await proxy.generate(GenerationRequest(f"pd/{number}", "pd", number, context, sampling, "task"))
            assert said.token_ids == whole.token_ids, number
            assert said.logprobs == whole.logprobs, number
            prefilled, decoded = [await one.computed() - was for one, was in zip((a, b), counted, strict=True)]
            assert decoded == BLOCK, number  # not one token of the context
            new = len(context) - (len(turns[number - 1][0]) + BLOCK if number else 0)
            assert prefilled == new, number  # nor what the decode worker had generated in whole blocks
        assert proxy.kv.moves == 5
        await proxy.close()

    pair.run(scenario())


def test_prefill_and_decode_apart_say_the_same_tokens_whatever_the_length(pair: Pair) -> None:
    async def scenario() -> None:
        for one in pair.engines:
            await one.forget()
        whole = [
            await say(pair.engines[1], f"one {length}", prompt(length, length), 40) for length in (33, 50, 95, 300)
        ]
        for one in pair.engines:
            await one.forget()
        proxy = parted(pair)
        requests = [
            GenerationRequest(f"{length}/0", f"{length}", 0, prompt(length, length), Sampling(40, 0.0), "task")
            for length in (33, 50, 95, 300)
        ]
        said = await asyncio.gather(*map(proxy.generate, requests))
        for one, other in zip(said, whole, strict=True):
            assert one.token_ids == other.token_ids
            assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)
        await proxy.close()

    pair.run(scenario())


def test_a_source_that_is_stopped_or_killed_in_mid_transfer_costs_the_limit_and_the_prefix_is_recomputed(
    pair: Pair,
) -> None:
    """Last of the module: the first engine does not survive it."""

    async def scenario() -> None:
        a, b = pair.engines
        await b.forget()
        context = (*prompt(99, 300), 1)
        whole = await say(a, "whole", context, 20)
        place = await a.kv_place()
        os.kill(a.pid, signal.SIGSTOP)  # it has taken the connection, and says nothing any more
        move = KvMove("t", context, place, 1.0)
        assert (await b.fetch_kv(move)).why.startswith("timeout")
        task = asyncio.create_task(b.fetch_kv(KvMove("t", context, place, 30.0)))
        await asyncio.sleep(0.5)
        a.kill()
        moved = await task
        assert moved.why.startswith("unreachable")
        assert moved.moved == 0
        counted = await b.computed()
        assert (await say(b, "recomputed", context, 20)).token_ids == whole.token_ids
        assert await b.computed() - counted == len(context) + 19

    pair.run(scenario())
