"""Whatever commands come in whatever order, a real engine keeps the port's promises: seeded random schedules.

Each seed is one schedule of ADD, repeated ADD, ABORT (by id, trajectory, group), PRIORITIZE, PREPARE, SUSPEND, UPDATE (also
refused ones, ones that the relay does not have, and ones that fail half-way), RESUME and plain engine steps, over requests
with shared prefixes and random priorities, on an engine with few slots and little KV, so that requests outrank each other
and run out of blocks all the time. Between some seeds the engine is closed and another one made.

Greedy tokens are compared with those of transformers, an independent implementation: each token of a span of one version
must be the one that these weights write, whatever preemption, update or abort the request met.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from orchestrator.api import CommandError, Completion, GenerationRequest, RetryableError, Sampling
from orchestrator.transfer import Publisher, RelayEndpoint
from scripts.bench.probes.vllm.recompute_probe import VOCABULARY, publish, write_tiny_qwen3
from vllm_rlplugin.worker.inprocess_worker import EngineWorker

pytestmark = pytest.mark.engine
SEQUENCES = 5
MODEL_LENGTH = 128
KV_BLOCKS = 12  # of 32 tokens; five sequences of full length would take 20
LOOKAHEAD = 4
PROMPTS = 7
NEW_TOKENS = 40
ACTIONS = 90  # a seed
FAST_SEEDS = range(6)
LONG_SEEDS = range(100, 300)
RESTART_EVERY = 3  # seeds an engine lives

References = dict[tuple[int, int], tuple[int, ...]]  # (weights 0 or 1, prompt) -> greedy tokens


class World:
    """Two sets of weights, a relay, and the engine that lives at the moment. Weights of version v are those of v mod 2."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.runner = asyncio.Runner()
        self.weights = [write_tiny_qwen3(folder / f"weights{index}", 20 + index) for index in range(2)]
        self.endpoint = RelayEndpoint(job="property-tests", kind="memory", master="property-tests")
        self.publisher = Publisher(self.endpoint)
        self.publisher.reset()
        self.published = 0
        rng = random.Random(5)
        shared = [rng.randrange(VOCABULARY) for _ in range(64)]
        lengths = (3, 20, 33, 40, 64, 65, 70)
        self.prompts = [
            tuple((shared + [rng.randrange(VOCABULARY) for _ in range(9)])[-length:])
            if index % 2
            else tuple((shared[:length] + [rng.randrange(VOCABULARY) for _ in range(9)])[:length])
            for index, length in enumerate(lengths)
        ]
        self.references: References = {}
        self.engines = 0
        self.worker: EngineWorker | None = None

    def fresh_worker(self) -> EngineWorker:
        """Close the engine that lives, if any, and make another, with the other way of shutting out old KV."""
        self.close_worker()
        self.engines += 1
        self.worker = EngineWorker(
            model=str(self.folder / "weights0"),
            max_num_seqs=SEQUENCES,
            max_model_len=MODEL_LENGTH,
            kv_cache_mb=1,
            relay=self.endpoint.to_dict(),
            plugin={
                "lookahead": LOOKAHEAD,
                "max_wait": 0.2,  # short, so that requests become overdue
                "quantum": 8,
                "kv_on_update": ("salt", "flush")[self.engines % 2],
            },
        )
        pool = self.worker._engine._scheduler.kv_cache_manager.block_pool
        taken = pool.get_num_free_blocks() - KV_BLOCKS  # a cache of whole MiB would never be short of blocks here
        pool.free_block_queue.popleft_n(taken)
        pool.num_gpu_blocks -= taken
        return self.worker

    def close_worker(self) -> None:
        if self.worker is not None:
            self.runner.run(self.worker.close())
            self.worker = None

    def publish_next(self) -> int:
        self.published += 1
        publish(self.publisher, self.published, self.weights[self.published % 2])
        return self.published

    def make_references(self) -> None:
        """By transformers, without a KV cache."""
        import torch
        from transformers import AutoModelForCausalLM

        for index in range(2):
            model = AutoModelForCausalLM.from_pretrained(self.folder / f"weights{index}", dtype=torch.float32)
            for number, prompt in enumerate(self.prompts):
                token_ids = list(prompt)
                with torch.no_grad():
                    for _ in range(NEW_TOKENS):
                        token_ids.append(int(model(torch.tensor([token_ids])).logits[0, -1].argmax()))
                self.references[index, number] = tuple(token_ids[len(prompt) :])


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    world = World(tmp_path_factory.mktemp("models"))
    world.fresh_worker()  # vLLM first: it sets up torch's threads
    world.make_references()
    yield world
    world.close_worker()
    world.runner.close()
    world.publisher.close()


class Schedule:
    """One seed. ``run`` raises AssertionError when a promise is broken."""

    def __init__(self, world: World, worker: EngineWorker, seed: int) -> None:
        self.world, self.worker, self.seed = world, worker, seed
        self.rng = random.Random(seed)
        self.added: list[GenerationRequest] = []
        self.prompt_of: dict[str, int] = {}
        self.got: dict[str, Completion] = {}
        self.acknowledged: dict[str, tuple[int, ...]] = {}  # aborted request -> tokens when ABORT returned
        self.suspended = False
        self.unusable = False

    async def run(self) -> None:
        start = await self.worker.stats()
        assert (start.running, start.waiting, start.kv_used) == (0, 0, 0)
        reader = asyncio.create_task(self._read())
        actions: list[tuple[int, Callable[[], Any]]] = [
            (24, self._add),
            (5, self._add_again),
            (10, self._abort),
            (10, self._prioritize),
            (7, self._suspend),
            (9, self._resume),
            (12, self._update),
            (3, self._update_that_fails_half_way),
            (3, self._update_that_is_missing),
            (4, self._prepare),
            (18, self._steps),
        ]
        weights, calls = zip(*actions, strict=True)
        for _ in range(ACTIONS):
            await self.rng.choices(calls, weights)[0]()
            if self.rng.random() < 0.5:
                await self._steps()
        await self._settle(reader)
        self._check_completions()
        await self._check_idle(start.kv_capacity)

    async def _read(self) -> None:
        while True:
            for completion in await self.worker.completions():
                assert completion.request_id not in self.got, f"{completion.request_id} ended twice"
                self.got[completion.request_id] = completion

    # What is done.

    async def _add(self) -> None:
        fresh = [self._new_request() for _ in range(self.rng.choice((1, 1, 2, 5, 12)))]
        self.added.extend(fresh)
        await self.worker.add(fresh)

    def _new_request(self) -> GenerationRequest:
        rng, number = self.rng, len(self.prompt_of)
        name, index = f"s{self.seed}-{number}", rng.randrange(PROMPTS)
        token_ids, temperature = self.world.prompts[index], rng.choice((0.0, 0.0, 1.0))
        if rng.random() < 0.05:  # refused
            token_ids = rng.choice(((), (1,) * (MODEL_LENGTH + 1), (VOCABULARY,), (-1, 2)))
            index = -1
        self.prompt_of[name] = index if temperature == 0.0 else -1
        stops = tuple(rng.sample(range(VOCABULARY), 3)) if rng.random() < 0.2 else ()
        return GenerationRequest(
            name,
            f"t{self.seed}-{rng.randrange(12)}",
            0,
            token_ids,
            Sampling(rng.choice((1, 2, 9, NEW_TOKENS, NEW_TOKENS)), temperature=temperature, stop_token_ids=stops),
            "properties",
            priority=rng.randrange(-2, 3),
            group_id=f"g{rng.randrange(4)}" if rng.random() < 0.7 else "",
        )

    async def _add_again(self) -> None:
        if self.added:
            await self.worker.add(self.rng.choices(self.added, k=3))

    async def _abort(self) -> None:
        if not self.added:
            return
        rng, worker = self.rng, self.worker
        ids = [rng.choice(self.added[-8:]).request_id for _ in range(rng.choice((0, 1, 3)))]
        trajectories = [f"t{self.seed}-{rng.randrange(14)}"] if rng.random() < 0.4 else []
        groups = [f"g{rng.randrange(5)}"] if rng.random() < 0.15 else []
        meant = {
            item.request_id
            for item in self.added
            if item.request_id in ids or item.trajectory_id in trajectories or item.group_id in groups
        }
        queued = {completion.request_id for completion in worker._finished}
        open_ones = meant - self.got.keys() - queued
        before = {
            name: active.core.num_output_tokens for name, active in worker._engine._active.items() if name in open_ones
        }
        await worker.abort([*ids, "never added"], trajectories=trajectories, groups=groups)
        told = {**self.got, **{completion.request_id: completion for completion in worker._finished}}
        for name in open_ones:
            assert name not in worker._engine._active
            assert name in told, f"{name}: ABORT returned, and its completion is not there"
            size = len(told[name].token_ids)
            assert before.get(name, 0) <= size <= before.get(name, 0) + 1, "more than the step in progress"
            self.acknowledged[name] = told[name].token_ids

    async def _prioritize(self) -> None:
        chosen = [f"t{self.seed}-{self.rng.randrange(13)}" for _ in range(self.rng.choice((1, 4)))]
        await self.worker.prioritize({name: self.rng.randrange(-3, 4) for name in chosen})

    async def _suspend(self) -> None:
        await self.worker.suspend()
        self.suspended = True

    async def _resume(self) -> None:
        if self.unusable:
            assert await self._refusal(self.worker.resume()) == "weights_unusable"
        else:
            await self.worker.resume()
            self.suspended = False

    async def _update(self) -> None:
        version = self.world.publish_next()
        if not self.suspended:
            assert await self._refusal(self.worker.update(version)) == "not_suspended"
            return
        await self.worker.update(version)
        self.unusable = False
        assert await self._refusal(self.worker.update(version - 1)) == "version_decreases"

    async def _update_that_is_missing(self) -> None:
        if self.suspended:
            with pytest.raises(RetryableError):
                await self.worker.update(self.world.published + 1)

    async def _update_that_fails_half_way(self) -> None:
        if not self.suspended:
            return
        from vllm_rlplugin.weights.live_weights import MappedWeights

        stock, cut = MappedWeights.load, self.rng.randrange(5)

        def load(loaded: Any, staged: Any) -> dict[str, float]:
            for piece in staged.pieces[:cut]:
                piece.slice.target.copy_(piece.source)
            raise RuntimeError("power cut")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(MappedWeights, "load", load)
            assert MappedWeights.load is not stock
            assert await self._refusal(self.worker.update(self.world.publish_next())) == "weights_unusable"
        self.unusable = True

    async def _prepare(self) -> None:
        await self.worker.prepare(self.world.publish_next())

    async def _steps(self) -> None:
        for _ in range(self.rng.randrange(1, 20)):
            await asyncio.sleep(0)

    async def _refusal(self, call: Any) -> str:
        with pytest.raises(CommandError) as refused:
            await call
        return refused.value.code

    # What must hold.

    async def _settle(self, reader: asyncio.Task[None]) -> None:
        if self.unusable:
            await self._update()
        await self._resume()
        stats, steps = await self.worker.stats(), 0
        while len(self.got) < len(self.added):
            assert not reader.done(), reader.exception()
            await asyncio.sleep(0)
            steps += 1
            assert steps < 50 * len(self.added) + 5000, f"{len(self.added) - len(self.got)} never end: {stats}"
        await self._steps()
        reader.cancel()
        await asyncio.wait([reader])
        assert reader.cancelled(), reader.exception()

    def _check_completions(self) -> None:
        assert sorted(self.got) == sorted(request.request_id for request in self.added)
        for request in self.added:
            completion = self.got[request.request_id]
            name, size = request.request_id, len(completion.token_ids)
            assert len(completion.logprobs) == sum(count for _, count in completion.versions) == size, name
            assert all(math.isfinite(value) and value <= 0 for value in completion.logprobs), name
            versions = [version for version, _ in completion.versions]
            assert versions == sorted(set(versions)), f"{name}: {versions}"
            assert completion.finish_reason in ("stop", "length", "abort", "error"), name
            if completion.finish_reason == "length":
                assert size == request.sampling.max_tokens, name
            if completion.finish_reason == "stop":
                assert completion.token_ids[-1] in request.sampling.stop_token_ids, name
            assert not any(token in request.sampling.stop_token_ids for token in completion.token_ids[:-1]), name
            if name in self.acknowledged:
                assert completion.token_ids == self.acknowledged[name], name
            elif completion.finish_reason == "abort":
                raise AssertionError(f"{name} was aborted by nobody")
            if self.prompt_of[name] >= 0:
                self._check_greedy(name, completion)

    def _check_greedy(self, name: str, completion: Completion) -> None:
        """The first span continues the prompt alone; what follows an update continues other tokens (recompute_probe)."""
        if completion.versions:
            version, count = completion.versions[0]
            expected = self.world.references[version % 2, self.prompt_of[name]][:count]
            assert completion.token_ids[:count] == expected, f"{name}, version {version}, of {completion.versions}"

    async def _check_idle(self, capacity: int) -> None:
        worker, engine = self.worker, self.worker._engine
        stats = await worker.stats()
        assert (stats.running, stats.waiting, stats.kv_used, stats.kv_capacity) == (0, 0, 0, capacity)
        assert (len(worker._book), worker._book.held_count) == (0, 0)
        for index in (worker._book._trajectories, worker._book._groups, worker._book._unfed):
            assert not index
        assert not engine._active
        assert not engine._silent
        assert not engine._scheduler.requests
        assert not engine._scheduler._rl_clocks
        assert not engine._scheduler._rl_overdue
        assert not engine._llm.output_processor.request_states


def play(world: World, seeds: Sequence[int]) -> None:
    outranked = preempted = spanning = aborted = 0
    for position, seed in enumerate(seeds):
        worker = world.worker
        if worker is None or (position and position % RESTART_EVERY == 0):
            worker = world.fresh_worker()
        schedule = Schedule(world, worker, seed)
        try:
            world.runner.run(schedule.run())
        except BaseException as error:
            error.add_note(f"seed {seed}, engine {world.engines}, position {position} of {seeds}")
            world.close_worker()  # whatever it is in now, the next seed gets another one
            raise
        stats = world.runner.run(worker.stats())
        outranked, preempted = outranked + stats.outranked, preempted + stats.preemptions - stats.outranked
        spanning += sum(len(completion.versions) > 1 for completion in schedule.got.values())
        aborted += sum(bool(tokens) for tokens in schedule.acknowledged.values())
    assert min(outranked, preempted, spanning, aborted) > 0, "the schedules met too little"


def test_any_interleaving_of_commands_keeps_the_promises(world: World) -> None:
    play(world, FAST_SEEDS)


@pytest.mark.long
@pytest.mark.parametrize("first", LONG_SEEDS[::20])
def test_any_interleaving_of_commands_keeps_the_promises_for_many_seeds(world: World, first: int) -> None:
    play(world, range(first, first + 20))
