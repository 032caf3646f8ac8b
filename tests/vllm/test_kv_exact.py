"""KV that moves, between real vLLM engines (CPU, tiny random Qwen3, fp32, greedy): bit for bit, and not computed again.

vLLM holds one KV connector a process, so the two engines live one after the other here: what the first hands out is kept
and handed out by a real server on its behalf.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest

from orchestrator.api import Completion, ConfigError, KvMove, KvMoved, KvWorker
from orchestrator.transfer import Publisher, RelayEndpoint
from orchestrator.transfer.kv_wire import KvAsk, KvBlocks, KvRefused, KvServer
from scripts.bench.probes.vllm.recompute_probe import VOCABULARY, collect, greedy, publish, write_tiny_qwen3
from vllm_rlplugin.worker.inprocess_worker import EngineWorker

pytestmark = pytest.mark.engine
T = TypeVar("T")
TOKEN = "token of this test"
BLOCK = 32
OBSERVATION = (1, 2, 3, 4, 5)
NEW = 40


@dataclass
class Source:
    """What the first engine said and handed out."""

    model: Path
    relay: RelayEndpoint
    publisher: Publisher
    weights: dict[str, Any]
    context: tuple[int, ...] = ()  # of the second turn
    turn: Completion | None = None  # the second turn, there
    read: dict[str, Any] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def rows(self) -> Any:
        return np.frombuffer(self.read["payload"], np.uint8).reshape(self.read["blocks"], -1)


def make(model: Path, relay: RelayEndpoint | None = None, **plugin: Any) -> EngineWorker:
    return EngineWorker(
        model=str(model),
        max_model_len=384,
        kv_cache_mb=2,
        plugin={"kv_transfer": True, **plugin},
        kv={"token": TOKEN},
        relay=None if relay is None else relay.to_dict(),
    )


async def say(worker: EngineWorker, name: str, tokens: Sequence[int], count: int) -> Completion:
    await worker.add([greedy(name, tokens, count)])
    return (await collect(worker, 1))[name]


async def update(worker: EngineWorker, version: int) -> None:
    await worker.suspend()
    await worker.update(version)
    await worker.resume()


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Source]:
    model = tmp_path_factory.mktemp("model")
    weights = write_tiny_qwen3(model, 1)
    relay = RelayEndpoint(job="kv-tests", kind="memory", master="kv-tests")
    publisher = Publisher(relay)
    publisher.reset()
    publish(publisher, 1, weights)
    found = Source(model, relay, publisher, weights)

    async def turns(worker: EngineWorker) -> None:
        assert isinstance(worker, KvWorker)
        await update(worker, 1)
        rng = random.Random(1)
        prompt = tuple(rng.randrange(VOCABULARY) for _ in range(201))
        first = await say(worker, "first", prompt, 30)
        found.context = (*prompt, *first.token_ids, *OBSERVATION)
        tokens = np.array(found.context, np.uint32).tobytes()
        asked = await worker._kv_command("kv_ask", {"tokens": tokens})
        found.facts = asked["facts"]
        found.read = await worker._kv_command("kv_read", {"tokens": tokens, "first": 0, "facts": found.facts})
        found.turn = await say(worker, "second", found.context, NEW)
        await worker.close()

    with asyncio.Runner() as runner:
        runner.run(turns(make(model, relay)))
    yield found
    publisher.close()


class Destination:
    """The second engine, and what it computed."""

    def __init__(self, runner: asyncio.Runner, worker: EngineWorker) -> None:
        self.runner, self.worker = runner, worker
        self.computed = 0
        scheduler = worker._engine._scheduler
        stock = scheduler.schedule

        def schedule(*args: Any, **kwargs: Any) -> Any:
            output = stock(*args, **kwargs)
            self.computed += output.total_num_scheduled_tokens
            return output

        scheduler.schedule = schedule

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(coroutine)

    def empty(self) -> None:
        """No KV of anything."""
        assert self.worker._engine._core.scheduler.reset_prefix_cache(reset_connector=True)
        self.computed = 0

    def fetch(self, place: str, context: tuple[int, ...], limit: float = 5.0) -> KvMoved:
        return self.run(self.worker.fetch_kv(KvMove("t", context, place, limit)))

    def say(self, name: str, context: tuple[int, ...]) -> Completion:
        return self.run(say(self.worker, name, context, NEW))


@pytest.fixture(scope="module")
def engine(source: Source) -> Iterator[Destination]:
    with asyncio.Runner() as runner:
        worker = make(source.model, source.relay, kv_staging_mb=1)
        runner.run(update(worker, 1))
        yield Destination(runner, worker)
        runner.run(worker.close())


@pytest.fixture
def there(engine: Destination) -> Destination:
    engine.empty()
    return engine


class Handing:
    """A server that hands out what the first engine did; ``how`` may spoil it."""

    def __init__(self, source: Source, how: Any = None) -> None:
        def answer(ask: KvAsk) -> KvBlocks:
            if dict(ask.facts) != source.facts:
                raise KvRefused("differs", f"{ask.facts} is not {source.facts}")
            return how(ask) if how else KvBlocks(ask.first, source.rows[ask.first :], ask.facts)

        self.server = KvServer(answer, TOKEN)

    def __enter__(self) -> str:
        return self.server.place

    def __exit__(self, *_: object) -> None:
        self.server.close()


names = iter(f"request {number}" for number in range(1000))


def same(one: Completion, other: Completion | None) -> bool:
    """Bit for bit."""
    assert other is not None
    return (one.token_ids, one.logprobs, one.versions) == (other.token_ids, other.logprobs, other.versions)


def test_decode_after_a_move_is_bit_for_bit_what_it_is_without_and_the_prefix_is_not_computed(
    source: Source, there: Destination
) -> None:
    blocks = (len(source.context) - len(OBSERVATION) - 1) // BLOCK  # the last generated token has no KV yet
    with Handing(source) as place:
        moved = there.fetch(place, source.context)
    assert (moved.tokens, moved.moved, moved.why) == (blocks * BLOCK, blocks * BLOCK, "")
    assert moved.bytes == source.rows.nbytes
    turn = there.say(next(names), source.context)
    assert same(turn, source.turn)
    # The engine computed what lies behind the blocks, and its own tokens but the last: not one token of the prefix.
    assert there.computed == len(source.context) - blocks * BLOCK + NEW - 1
    assert there.worker._engine.kv_command("kv_counts", {})["staged"] == 0  # in vLLM's own prefix cache now


def test_wrong_kv_would_be_seen_in_the_tokens(source: Source, there: Destination) -> None:
    """So the comparison above can fail: signed and well-formed KV of zeros is loaded, and decodes into something else."""
    zeros = np.zeros_like(source.rows)
    with Handing(source, lambda ask: KvBlocks(ask.first, zeros[ask.first :], ask.facts)) as place:
        there.fetch(place, source.context)
    assert not same(there.say(next(names), source.context), source.turn)


@pytest.mark.long
def test_only_what_is_missing_travels(source: Source, there: Destination) -> None:
    short = source.context[: 3 * BLOCK + 1]
    with Handing(source) as place:
        assert there.fetch(place, short).moved == 3 * BLOCK
        second = there.fetch(place, source.context)
        third = there.fetch(place, source.context)
    assert second.tokens == third.tokens == 7 * BLOCK
    assert (second.moved, third.moved, third.bytes) == (4 * BLOCK, 0, 0)
    assert same(there.say(next(names), source.context), source.turn)


@pytest.mark.long
def test_what_was_forgotten_and_came_again_is_there(source: Source, there: Destination) -> None:
    with Handing(source) as place:
        assert there.fetch(place, source.context).moved
        there.empty()
        assert there.fetch(place, source.context).moved
    there.say(next(names), (7,) * 40)  # a step in between
    there.computed = 0
    assert same(there.say(next(names), source.context), source.turn)
    assert there.computed < BLOCK + len(OBSERVATION) + NEW


def spoilt(source: Source, ask: KvAsk) -> KvBlocks:
    raise KvRefused("gone", "evicted")


def test_without_any_source_the_prefix_is_recomputed_and_it_is_said_once(
    source: Source, there: Destination, caplog: pytest.LogCaptureFixture
) -> None:
    before = there.worker._mover.failures["unreachable"]  # type: ignore[union-attr]
    for _ in range(3):
        moved = there.fetch("127.0.0.1:1", source.context)
        assert (moved.tokens, moved.moved, moved.why.partition(":")[0]) == (0, 0, "unreachable")
    assert there.worker._mover.failures["unreachable"] == before + 3  # type: ignore[union-attr]
    turn = there.say(next(names), source.context)
    assert turn.token_ids == source.turn.token_ids  # type: ignore[union-attr]
    assert there.computed == len(source.context) + NEW - 1  # all of it


@pytest.mark.long
def test_a_prefix_that_is_gone_and_a_slow_source_are_recomputed(source: Source, there: Destination) -> None:
    import time

    with Handing(source, lambda ask: spoilt(source, ask)) as place:
        assert there.fetch(place, source.context).why == "gone: evicted"

    def slow(ask: KvAsk) -> KvBlocks:
        time.sleep(1.0)
        return KvBlocks(ask.first, source.rows[ask.first :], ask.facts)

    with Handing(source, slow) as place:
        assert there.fetch(place, source.context, limit=0.1).why.startswith("timeout")
    assert there.say(next(names), source.context).token_ids == source.turn.token_ids  # type: ignore[union-attr]


def test_of_more_than_the_staging_room_only_what_fits_is_asked_for(source: Source, there: Destination) -> None:
    capacity, there.worker._engine._scheduler.connector._capacity = 1 << 20, 3 * source.rows.shape[1]
    asked: list[int] = []

    def hand_out(ask: KvAsk) -> KvBlocks:
        asked.append((len(ask.token_ids) - 1) // BLOCK)
        return KvBlocks(ask.first, source.rows[ask.first : asked[-1]], ask.facts)

    try:
        with Handing(source, hand_out) as place:
            moved = there.fetch(place, source.context)
            again = there.fetch(place, source.context)
        assert (moved.moved, moved.why, asked) == (3 * BLOCK, "", [3])
        assert (again.tokens, again.moved, again.why[:7]) == (3 * BLOCK, 0, "no_room"), (
            "more would push out its own beginning"
        )
        assert there.say(next(names), source.context).token_ids == source.turn.token_ids  # type: ignore[union-attr]
        assert there.computed == len(source.context) + NEW - 1 - 3 * BLOCK
        there.worker._engine._scheduler.connector._capacity = 1
        there.empty()
        with Handing(source) as place:
            assert there.fetch(place, source.context).why.startswith("no_room")
    finally:
        there.worker._engine._scheduler.connector._capacity = capacity


def test_a_prefix_in_pieces_is_the_prefix_and_room_is_asked_for_all_of_them(
    source: Source, there: Destination, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = there.worker._engine
    there.say(next(names), source.context)
    width = source.rows.shape[1]
    asked = {"tokens": np.array(source.context, np.uint32).tobytes(), "first": 0, "facts": source.facts}
    whole = engine.kv_command("kv_read", asked)
    assert not whole["more"]
    first = engine.kv_command("kv_read", {**asked, "most": 2 * width + 1})
    assert (first["blocks"], first["more"]) == (2, True)
    rest = engine.kv_command("kv_read", {**asked, "first": 2})
    assert first["payload"] + rest["payload"] == whole["payload"]
    assert engine.kv_command("kv_read", {**asked, "most": 1})["blocks"] == 1
    connector = engine._scheduler.connector
    monkeypatch.setattr(connector, "_capacity", 3 * width)
    piece = {**asked, "payload": whole["payload"][: 2 * width]}
    assert engine.kv_command("kv_stage", {**piece, "total": 4})["refused"] == "no_room"
    assert engine.kv_command("kv_stage", {**piece, "total": 3}) == {"blocks": 2}


def test_an_engine_with_other_weights_neither_gives_nor_takes(source: Source, there: Destination) -> None:
    """Last of the module: the version moves, with the same weights, so only the version is another."""
    with Handing(source) as place:
        there.fetch(place, source.context)  # staged, and not loaded before the version moves
        publish(source.publisher, 2, source.weights)
        there.run(update(there.worker, 2))
        assert there.fetch(place, source.context).why.startswith("differs")
    tokens = np.array(source.context, np.uint32).tobytes()
    asked = there.worker._engine.kv_command("kv_read", {"tokens": tokens, "first": 0, "facts": source.facts})
    assert asked["refused"] == "differs"
    assert "weights" in asked["detail"]
    there.computed = 0
    turn = there.say(next(names), source.context)
    assert there.computed == len(source.context) + NEW - 1  # what was staged of the old version is not used
    assert turn.token_ids == source.turn.token_ids  # type: ignore[union-attr]
    assert turn.versions == ((2, NEW),)


def test_without_the_option_nothing_is_configured(source: Source) -> None:
    from vllm_rlplugin.options import PluginOptions, engine_arguments

    assert "kv_transfer_config" not in engine_arguments(PluginOptions())
    with pytest.raises(ConfigError, match="token"):
        EngineWorker(model=str(source.model), kv={"token": ""}, plugin={"kv_transfer": True})
