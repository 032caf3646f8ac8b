"""RELEASE and RECLAIM of the worker around a real vLLM engine: its memory is lent, and nothing of its requests is lost."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine, Iterator
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import pytest

from orchestrator.api import CommandError, Completion, ReleaseResult, RetryableError
from orchestrator.transfer import Publisher, RelayEndpoint
from scripts.bench.probes.vllm.recompute_probe import VOCABULARY, collect, greedy, publish, write_tiny_qwen3
from vllm_rlplugin.worker.inprocess_worker import EngineWorker

pytestmark = pytest.mark.engine
T = TypeVar("T")
KV_MB = 2


class Setup(NamedTuple):
    """One engine for all tests: starting it is what takes the time."""

    runner: asyncio.Runner
    worker: EngineWorker
    publisher: Publisher
    weights: tuple[dict[str, Any], dict[str, Any]]  # two different sets; the engine starts with the first
    versions: Iterator[int]

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(coroutine)

    def publish_next(self, other: bool) -> int:
        version = next(self.versions)
        publish(self.publisher, version, self.weights[other])
        return version


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setup]:
    folder: Path = tmp_path_factory.mktemp("model")
    other = write_tiny_qwen3(tmp_path_factory.mktemp("other"), 2)
    weights = write_tiny_qwen3(folder, 1)
    endpoint = RelayEndpoint(job="release-tests", kind="memory", master="release-tests")
    publisher = Publisher(endpoint)
    publisher.reset()
    with asyncio.Runner() as runner:
        worker = EngineWorker(
            model=str(folder),
            max_num_seqs=8,
            max_model_len=128,
            kv_cache_mb=KV_MB,
            relay=endpoint.to_dict(),
            sleep_mode=True,
        )
        yield Setup(runner, worker, publisher, (weights, other), count(1))
        runner.run(worker.close())
    publisher.close()


def prompt(seed: int, length: int = 40) -> tuple[int, ...]:
    rng = random.Random(seed)
    return tuple(rng.randrange(VOCABULARY) for _ in range(length))


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def refusal(call: Coroutine[Any, Any, Any]) -> str:
    with pytest.raises(CommandError) as refused:
        await call
    return refused.value.code


def kv_bytes_set(worker: EngineWorker) -> int:
    """Non-zero bytes of the engine's KV cache."""
    import torch

    runner = worker._engine._core.model_executor.driver_worker.worker.model_runner
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in runner.kv_caches}
    return sum(int(torch.tensor([], dtype=torch.uint8).set_(storage).count_nonzero()) for storage in storages.values())


def in_flight_state(worker: EngineWorker, name: str) -> tuple[int, int]:
    core = worker._engine._active[name].core
    return core.num_output_tokens, core.num_computed_tokens


@pytest.mark.parametrize("level", ["kv", "weights"])
def test_requests_go_on_after_a_release_as_if_nothing_had_been(setup: Setup, level: str) -> None:
    worker = setup.worker
    requests = [(f"{level}-{index}", prompt(index), 50 + index) for index in range(6)]

    async def scenario() -> tuple[dict[str, Completion], dict[str, Completion], ReleaseResult]:
        await worker.add([greedy(f"plain-{name}", tokens, size) for name, tokens, size in requests])
        plain = await collect(worker, len(requests))
        await worker.add([greedy(name, tokens, size) for name, tokens, size in requests])
        await turns(20)
        await worker.suspend()
        before = in_flight_state(worker, requests[0][0])
        assert min(before) > 0
        full = (await worker.stats()).kv_capacity
        result = await worker.release(level)
        assert in_flight_state(worker, requests[0][0]) == (before[0], 0), "tokens kept, KV to be recomputed"
        assert kv_bytes_set(worker) == 0, "no KV is left to be read"
        stats = await worker.stats()
        assert (stats.kv_used, stats.kv_capacity, stats.suspended) == (0, 0, True)
        assert (await worker.status())["released"] == level
        await worker.reclaim()
        assert (await worker.stats()).kv_capacity == full
        generated = worker._engine.counts().generated
        await turns(10)
        assert worker._engine.counts().generated == generated, "suspended until resume"
        await worker.resume()
        return plain, await collect(worker, len(requests)), result

    plain, found, result = setup.run(scenario())
    for name, _, _ in requests:
        assert found[name].token_ids == plain[f"plain-{name}"].token_ids
        assert found[name].logprobs == pytest.approx(plain[f"plain-{name}"].logprobs, abs=1e-5)
    assert result.level == level
    assert result.preempted == len(requests)
    assert 0 < result.bytes <= KV_MB << 20, "pages of the KV cache that were in memory and are not now"
    assert "CPU" in result.how
    assert "weights stay" in result.how


def test_an_update_between_release_and_resume_is_what_the_rest_is_generated_with(setup: Setup) -> None:
    worker = setup.worker

    async def scenario(other: bool) -> tuple[Completion, Completion]:
        await worker.add([greedy(f"moved-{other}", prompt(9), 60)])
        await turns(25)
        await worker.suspend()
        await worker.release("weights")
        version = setup.publish_next(other)
        await worker.reclaim()
        assert (await worker.update(version)).version == version
        await worker.resume()
        moved = (await collect(worker, 1))[f"moved-{other}"]
        (_, kept), (_, rest) = moved.versions
        await worker.add([greedy(f"fresh-{other}", (*prompt(9), *moved.token_ids[:kept]), rest)])
        return moved, (await collect(worker, 1))[f"fresh-{other}"]

    old, new = setup.run(scenario(True)), setup.run(scenario(False))
    for moved, fresh in (old, new):
        assert moved.token_ids[-len(fresh.token_ids) :] == fresh.token_ids
    assert old[0].token_ids != new[0].token_ids, "the two sets of weights say different things"


def test_no_prefix_is_found_that_was_computed_before_a_release(setup: Setup) -> None:
    worker = setup.worker

    async def hits(name: str) -> int:
        before = worker._engine.counts().prefix_hits
        await worker.add([greedy(name, prompt(77, 96), 2)])
        await collect(worker, 1)
        return worker._engine.counts().prefix_hits - before

    async def scenario() -> None:
        assert await hits("first") == 0
        assert await hits("second") > 0
        await worker.suspend()
        await worker.release("kv")
        await worker.reclaim()
        await worker.resume()
        assert await hits("third") == 0

    setup.run(scenario())


def test_dropped_weights_must_be_replaced_before_resume(setup: Setup) -> None:
    worker = setup.worker

    async def scenario() -> None:
        await worker.add([greedy("waits", prompt(3), 30)])
        await turns(10)
        await worker.suspend()
        await worker.release("weights")
        assert await refusal(worker.release("dropped")) == "released", "they are on the host by now"
        await worker.reclaim()
        await worker.release("kv")
        assert (await worker.release("dropped")).level == "dropped"
        assert (await worker.release("weights")).level == "dropped", "a lesser release changes nothing"
        await worker.reclaim()
        assert await refusal(worker.resume()) == "weights_unusable"
        version = worker._engine.version
        with pytest.raises(RetryableError):  # nothing was loaded, so nothing is better
            await worker.update(version + 50)
        assert await refusal(worker.resume()) == "weights_unusable"
        loaded = setup.publish_next(False)
        await worker.update(loaded)
        await worker.resume()
        (completion,) = (await collect(worker, 1)).values()
        assert [number for number, _ in completion.versions] == [version, loaded]

    setup.run(scenario())


def test_what_needs_the_memory_is_refused_while_it_is_released_and_the_rest_is_answered(setup: Setup) -> None:
    worker = setup.worker

    async def scenario() -> None:
        assert await refusal(worker.release("kv")) == "not_suspended"
        await worker.reclaim()  # nothing is released: nothing happens
        await worker.add([greedy("cut", prompt(1), 60), greedy("kept", prompt(2), 20)])
        await turns(8)
        await worker.suspend()
        assert await refusal(worker.release("everything")) == "invalid_request"
        first = await worker.release("weights")
        again = await worker.release("weights")
        assert (again.bytes, again.preempted) == (first.bytes, first.preempted)
        version = setup.publish_next(False)
        for call in (worker.resume(), worker.update(version), worker.prepare(version), worker.checksums()):
            assert await refusal(call) == "released"
        await worker.add([greedy("late", prompt(4), 5)])
        await worker.abort(["cut"])
        assert (await collect(worker, 1))["cut"].finish_reason == "abort"
        await worker.prioritize({"kept": 3})
        assert (await worker.stats()).waiting == 2
        await worker.reclaim()
        await worker.reclaim()
        await worker.resume()
        assert (await collect(worker, 2)).keys() == {"kept", "late"}

    setup.run(scenario())


def test_without_sleep_mode_a_release_is_refused_and_changes_nothing(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = setup.worker
    monkeypatch.setattr(worker._engine._releaser, "_sleep_mode", False)

    async def scenario() -> None:
        await worker.add([greedy("untouched", prompt(5), 20)])
        await turns(8)
        await worker.suspend()
        before = in_flight_state(worker, "untouched")
        assert await refusal(worker.release("kv")) == "no_sleep_mode"
        assert in_flight_state(worker, "untouched") == before
        await worker.resume()
        assert len(await collect(worker, 1)) == 1

    setup.run(scenario())


@pytest.mark.parametrize(("level", "calls"), [("weights", ["sleep 1", "wake_up"]), ("dropped", ["sleep 2", "wake_up"])])
def test_on_cuda_stock_sleep_and_wake_up_do_it_and_the_engine_stays_paused_until_resume(
    setup: Setup, monkeypatch: pytest.MonkeyPatch, level: str, calls: list[str]
) -> None:
    """The stock engine core and executor as they are; only the worker's own sleep, which the CPU ignores, is a recorder."""
    worker, seen = setup.worker, []
    engine = worker._engine
    stock_worker = engine._core.model_executor.driver_worker.worker
    free = iter([100, 700])
    monkeypatch.setattr(engine._releaser, "_on_cpu", False)
    monkeypatch.setattr(type(stock_worker), "sleep", lambda self, level: seen.append(f"sleep {level}"))
    monkeypatch.setattr(type(stock_worker), "wake_up", lambda self, tags=None: seen.append("wake_up"))
    monkeypatch.setattr(type(stock_worker), "rl_free_memory", lambda self: next(free))

    async def scenario() -> None:
        await worker.add([greedy(f"cuda-{level}", prompt(6), 40)])
        await turns(12)
        await worker.suspend()
        result = await worker.release(level)
        assert (result.bytes, result.preempted) == (600, 1)
        assert engine._core.is_sleeping()
        await worker.reclaim()
        assert not engine._core.model_executor.is_sleeping
        assert engine._core.is_scheduler_paused(), "waking up resumes stock's scheduler; ours waits for RESUME"
        if level == "dropped":
            await worker.update(setup.publish_next(False))
        await worker.resume()
        assert len((await collect(worker, 1))[f"cuda-{level}"].token_ids) == 40

    setup.run(scenario())
    assert seen == calls
