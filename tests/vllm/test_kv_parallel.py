"""KV between real engines of different parallelism (CPU, random Qwen3, fp32, greedy), over Mooncake's transfer engine and TCP: a
prefix that went to an engine cut otherwise, and came back, is bit for bit what it was."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

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
from scripts.bench.probes.vllm.kv_probe import VOCABULARY, say, write_model
from scripts.bench.probes.vllm.recompute_probe import write_tiny_qwen3

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(600)]
BLOCK = 32
SMALL = 64  # ids that both models know


def prompt(seed: int, length: int) -> tuple[int, ...]:
    rng = random.Random(seed)
    return tuple(rng.randrange(min(SMALL, VOCABULARY)) for _ in range(length))


def same(one: Completion, other: Completion) -> bool:
    return (one.token_ids, one.logprobs) == (other.token_ids, other.logprobs)


async def prefill_and_decode(prefill: Child, decode: Child) -> None:
    """Apart, on engines of unequal parallelism: the tokens of one engine, and not one token of a context computed by the second
    beyond its last block."""
    contexts = [prompt(40 + length, length) for length in (65, 129, 200)]
    whole = [await say(decode, f"whole {number}", context, 40) for number, context in enumerate(contexts)]
    for one in (prefill, decode):
        await one.forget()
    events = EventLog(MemorySink(), asyncio.get_running_loop().time)
    proxy = LLMProxy(
        [prefill, decode],
        events,
        limits=WorkerLimits(120.0),
        restarts=0,
        router=TurnRouter([Seat("P"), Seat("D")], phases={PREFILL: "P", DECODE: "D"}),
        kv=KvMoves(BreakEven(), events, 60.0),
        on_fatal=print,
    )
    settings = DisaggregationSection(enabled=True, prefill="P", decode="D", min_tokens=1)
    proxy.split = PrefillDecode(proxy, settings)
    proxy.version = -1
    proxy.start()
    counted = await decode.computed()
    for number, context in enumerate(contexts):
        request = GenerationRequest(f"pd{number}/0", f"pd{number}", 0, context, Sampling(40, 0.0), "task")
        said = await proxy.generate(request)
        assert said.token_ids == whole[number].token_ids
        assert said.logprobs == pytest.approx(whole[number].logprobs, abs=1e-4)
    assert proxy.kv.moves == len(contexts)
    assert not proxy.kv.failures
    left = sum(len(context) % BLOCK for context in contexts)
    assert await decode.computed() - counted == left + 39 * len(contexts)
    await proxy.close()


@pytest.mark.parametrize(
    ("cut", "heads", "carrier"),
    [
        pytest.param("tensor_parallel_size", 2, "mooncake", id="a KV head on each of two ranks, over Mooncake"),
        pytest.param("tensor_parallel_size", 1, "tcp", id="one KV head that two ranks keep copies of"),
        pytest.param("pipeline_parallel_size", 2, "tcp", id="half of the layers on each of two ranks"),
    ],
)
def test_a_prefix_goes_to_an_engine_cut_otherwise_and_back_and_decode_is_bit_for_bit_what_it_was(
    tmp_path: Path, cut: str, heads: int, carrier: str
) -> None:
    """Two engines with unequal sums of partial products differ in the last bits of what they compute themselves; what they are
    given they keep."""
    if heads == 2:
        write_model(tmp_path / "model", 512)
    else:
        write_tiny_qwen3(tmp_path / "model", 1)

    def engine(name: str, **parallel: int) -> Child:
        return Child(
            name,
            model=str(tmp_path / "model"),
            max_model_len=512,
            kv_cache_mb=8,
            plugin={"kv_transfer": True},
            kv={"token": "token of this test", "carrier": carrier},
            **parallel,
        )

    async def scenario() -> None:
        wide, single = engine("wide", **{cut: 2}), engine("single")
        try:
            await asyncio.gather(wide.ready(), single.ready())
            there, back = await wide.kv_place(), await single.kv_place()
            for number, length in enumerate((70, 200)):
                first = await say(wide, f"first {number}", prompt(number, length), 30)
                context = (*prompt(number, length), *first.token_ids, 1, 2, 3)
                stayed = await say(wide, f"stayed {number}", context, 40)
                blocks = (len(context) - 1) // BLOCK

                counted = await single.computed()
                moved = await single.fetch_kv(KvMove(f"t{number}", context, there, 60.0))
                assert (moved.moved, moved.why, moved.carrier) == (blocks * BLOCK, "", carrier)
                after = await say(single, f"after {number}", context, 40)
                assert after.token_ids == stayed.token_ids
                assert after.logprobs == pytest.approx(stayed.logprobs, abs=1e-4)
                assert await single.computed() - counted == len(context) - blocks * BLOCK + 39

                await wide.forget()
                counted = await wide.computed()
                returned = await wide.fetch_kv(KvMove(f"t{number}", context, back, 60.0))
                assert (returned.moved, returned.why, returned.carrier) == (blocks * BLOCK, "", carrier)
                again = await say(wide, f"again {number}", context, 40)
                assert same(again, stayed), "the blocks that came back are those that went"
                assert await wide.computed() - counted == len(context) - blocks * BLOCK + 39
            await prefill_and_decode(wide, single)
        finally:
            await wide.close()
            await single.close()

    asyncio.run(scenario())


CUTS: dict[str, dict[str, int]] = {"TP 2": {"tensor_parallel_size": 2}, "PP 2": {"pipeline_parallel_size": 2}}


@pytest.mark.parametrize(
    ("one", "other", "heads", "carrier"),
    [
        pytest.param("TP 2", "TP 2", 2, "tcp", id="TP 2 and TP 2, a KV head on each rank"),
        pytest.param("TP 2", "TP 2", 1, "mooncake", id="TP 2 and TP 2, ranks that keep copies, over Mooncake"),
        pytest.param("PP 2", "TP 2", 2, "tcp", id="PP 2 and TP 2, both ways"),
        pytest.param("PP 2", "PP 2", 2, "mooncake", id="PP 2 and PP 2, over Mooncake"),
    ],
)
def test_a_prefix_goes_between_two_engines_of_two_ranks_each(
    tmp_path: Path, one: str, other: str, heads: int, carrier: str
) -> None:
    """Each is the source once, with contexts of its own. Between engines cut alike decode is bit for bit what it is without a
    move; else the tokens are equal and log-probs within 1e-4, and what comes back to its source is bit for bit what it was."""
    if heads == 2:
        write_model(tmp_path / "model", 512)
    else:
        write_tiny_qwen3(tmp_path / "model", 1)

    async def scenario() -> None:
        engines = [
            Child(
                name,
                model=str(tmp_path / "model"),
                max_model_len=512,
                kv_cache_mb=8,
                plugin={"kv_transfer": True},
                kv={"token": "token of this test", "carrier": carrier},
                **CUTS[cut],
            )
            for name, cut in (("one", one), ("other", other))
        ]
        try:
            await asyncio.gather(*(engine.ready() for engine in engines))
            for turn, (source, target) in enumerate((engines, engines[::-1])):
                for length in (70, 200):
                    await there_and_back(source, target, prompt(1000 * turn + length, length), one == other, carrier)
        finally:
            for engine in engines:
                await engine.close()

    asyncio.run(scenario())


async def there_and_back(source: Child, target: Child, asked: tuple[int, ...], alike: bool, carrier: str) -> None:
    """The prefix of a turn goes to ``target``, which goes on with it; forgotten by ``source``, it comes back."""
    name = f"{source.name} {len(asked)}"
    first = await say(source, f"{name} first", asked, 30)
    context = (*asked, *first.token_ids, 1, 2, 3)
    stayed = await say(source, f"{name} stayed", context, 40)
    blocks = (len(context) - 1) // BLOCK
    counted = await target.computed()
    moved = await target.fetch_kv(KvMove(name, context, await source.kv_place(), 60.0))
    assert (moved.moved, moved.why, moved.carrier) == (blocks * BLOCK, "", carrier)
    after = await say(target, f"{name} after", context, 40)
    assert after.token_ids == stayed.token_ids
    assert after.logprobs == pytest.approx(stayed.logprobs, abs=1e-4)
    assert same(after, stayed) or not alike, "engines cut alike go on with the same bits"
    assert await target.computed() - counted == len(context) - blocks * BLOCK + 39
    await source.forget()
    counted = await source.computed()
    returned = await source.fetch_kv(KvMove(name, context, await target.kv_place(), 60.0))
    assert (returned.moved, returned.why, returned.carrier) == (blocks * BLOCK, "", carrier)
    assert same(await say(source, f"{name} again", context, 40), stayed), (
        "the blocks that came back are those that went"
    )
    assert await source.computed() - counted == len(context) - blocks * BLOCK + 39
