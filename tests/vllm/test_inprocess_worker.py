"""The command-driven worker around a real vLLM engine on a tiny random Qwen3 (RollArt 6.1)."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import pytest

from orchestrator.api import CommandError, Completion, GenerationRequest, RetryableError, RolloutWorker, Sampling
from orchestrator.transfer import Publisher, RelayEndpoint
from scripts.bench.probes.vllm.recompute_probe import VOCABULARY, collect, greedy, publish, write_tiny_qwen3
from vllm_rlplugin.worker.inprocess_worker import EngineWorker

pytestmark = pytest.mark.engine
T = TypeVar("T")
SEQUENCES = 24  # fewer than some tests add, so that requests wait; more than the KV cache holds when they are long
MODEL_LENGTH = 128


class Setup(NamedTuple):
    """One engine for most tests: starting it is what takes the time."""

    runner: asyncio.Runner
    worker: EngineWorker
    publisher: Publisher
    model: Path
    weights: dict[str, Any]

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(coroutine)

    def publish_next(self) -> int:
        """Publish the same weights under the next version: tokens stay, versions move."""
        version = self.worker._engine.version + 1
        publish(self.publisher, version, self.weights)
        return version


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setup]:
    model = tmp_path_factory.mktemp("model")
    weights = write_tiny_qwen3(model, 1)
    endpoint = RelayEndpoint(job="worker-tests", kind="memory", master="worker-tests")
    publisher = Publisher(endpoint)
    publisher.reset()
    with asyncio.Runner() as runner:
        worker = EngineWorker(
            model=str(model),
            max_num_seqs=SEQUENCES,
            max_model_len=MODEL_LENGTH,
            kv_cache_mb=1,
            max_logprobs=7,  # vLLM's own
            relay=endpoint.to_dict(),
        )
        yield Setup(runner, worker, publisher, model, weights)
        runner.run(worker.close())
    publisher.close()


def prompt(seed: int, length: int = 30) -> tuple[int, ...]:
    rng = random.Random(seed)
    return tuple(rng.randrange(VOCABULARY) for _ in range(length))


def sampled(name: str, token_ids: Sequence[int], sampling: Sampling) -> GenerationRequest:
    return GenerationRequest(name, name, 0, tuple(token_ids), sampling, "test")


async def turns(count: int) -> None:
    """Let the engine task run about this many steps."""
    for _ in range(count):
        await asyncio.sleep(0)


def check_shape(completion: Completion) -> None:
    versions = [version for version, _ in completion.versions]
    assert len(completion.token_ids) == len(completion.logprobs) == sum(count for _, count in completion.versions)
    assert versions == sorted(set(versions)), "versions never decrease, and neighbours differ"
    assert all(math.isfinite(value) and value <= 0.0 for value in completion.logprobs)
    assert completion.timing.queued >= 0.0
    assert completion.timing.running >= 0.0


def test_an_option_of_vllm_reaches_the_engine(setup: Setup) -> None:
    assert setup.worker._engine._llm.vllm_config.model_config.max_logprobs == 7


def test_the_worker_fulfils_the_port(setup: Setup) -> None:
    assert isinstance(setup.worker, RolloutWorker)


def test_status_says_which_hooks_are_live(setup: Setup) -> None:
    status = setup.run(setup.worker.status())
    assert status["backend_registered"]
    assert status["signatures_checked"]
    assert status["signature_mismatches"] == []
    assert status["broken"] == ""


def test_suspend_keeps_tokens_and_stops_the_engine(setup: Setup) -> None:
    worker = setup.worker

    async def scenario() -> tuple[Completion, Completion]:
        await worker.add([greedy("plain", prompt(7), 60)])
        plain = (await collect(worker, 1))["plain"]
        await worker.add([greedy("paused", prompt(7), 60)])
        await turns(20)
        await worker.suspend()
        await worker.suspend()  # idempotent
        before, computed = worker._engine.counts(), worker._engine.computed
        assert before.running == 1
        await worker.add([greedy("late", prompt(8), 2)])  # accepted, not started
        await turns(30)
        after = worker._engine.counts()
        assert (after.generated, worker._engine.computed) == (before.generated, computed)
        stats = await worker.stats()
        assert (stats.waiting, stats.suspended) == (1, True)
        await worker.resume()
        await worker.resume()
        found = await collect(worker, 2)
        assert len(found["late"].token_ids) == 2
        idle = await worker.stats()  # nothing runs any more, yet it says what its steps were like
        steps = idle.steps - stats.steps
        assert (idle.running, idle.kv_used) == (0, 0)
        assert 0 < steps <= idle.step_requests - stats.step_requests <= 2 * steps
        assert steps <= idle.step_kv - stats.step_kv <= 2 * steps * idle.kv_capacity
        return plain, found["paused"]

    plain, paused = setup.run(scenario())
    assert paused.token_ids == plain.token_ids
    assert paused.logprobs == pytest.approx(plain.logprobs, abs=1e-5)  # fp32, other batch sizes


def test_spans_say_which_version_made_which_token(setup: Setup) -> None:
    worker = setup.worker

    async def scenario() -> tuple[Completion, list[tuple[int, int]]]:
        await worker.add([greedy("spans", prompt(9), 80)])
        cuts = []
        for steps in (10, 25):
            await turns(steps)
            await worker.suspend()
            cuts.append((worker._engine.version, worker._engine._active["spans"].core.num_output_tokens))
            result = await worker.update(setup.publish_next())
            assert result.version == worker._engine.version
            assert result.preempted == 1
            assert result.bytes > 0
            assert result.seconds > 0
            await worker.resume()
        return (await collect(worker, 1))["spans"], cuts

    completion, cuts = setup.run(scenario())
    check_shape(completion)
    (first, first_count), (second, second_count), (third, _) = completion.versions
    assert cuts == [(first, first_count), (second, first_count + second_count)]
    assert third == second + 1
    assert len(completion.token_ids) == 80


@pytest.mark.parametrize(("temperature", "top_p"), [(0.0, 1.0), (1.0, 1.0), (0.6, 1.0), (1.3, 0.8)])
def test_logprobs_are_those_of_the_distribution_that_was_sampled(
    setup: Setup, temperature: float, top_p: float
) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    def sampling(seed: int) -> Sampling:
        return Sampling(24, temperature=temperature, top_p=top_p, stop_token_ids=(3, 5, 8, 13, 21), seed=seed)

    requests = [sampled(f"lp{temperature}-{index}", prompt(index, 20 + index), sampling(index)) for index in range(10)]

    async def scenario() -> dict[str, Completion]:
        await setup.worker.add(requests)
        return await collect(setup.worker, len(requests))

    completions = setup.run(scenario())
    assert "stop" in {completion.finish_reason for completion in completions.values()}
    reference = AutoModelForCausalLM.from_pretrained(setup.model, dtype=torch.float32)
    for request in requests:
        completion = completions[request.request_id]
        check_shape(completion)
        token_ids = torch.tensor([request.token_ids + completion.token_ids])
        with torch.no_grad():
            logits = reference(token_ids).logits[0, len(request.token_ids) - 1 : -1]
        scaled = logits / (temperature or 1.0)
        if top_p < 1.0:
            ordered, order = scaled.softmax(-1).sort(-1, descending=True)
            outside = ordered.cumsum(-1) - ordered >= top_p  # keep the smallest set whose mass reaches top_p
            scaled = scaled.masked_fill(torch.zeros_like(outside).scatter(-1, order, outside), -math.inf)
        chosen = torch.tensor(completion.token_ids)[:, None]
        expected = scaled.log_softmax(-1).gather(-1, chosen)[:, 0]
        assert completion.logprobs == pytest.approx(expected.tolist(), abs=2e-4)  # two fp32 implementations


def test_a_seed_fixes_the_tokens_whatever_runs_beside(setup: Setup) -> None:
    one = Sampling(20, seed=11)

    async def scenario() -> None:
        await setup.worker.add([sampled("seed-alone", prompt(1), one)])
        alone = (await collect(setup.worker, 1))["seed-alone"]
        others = [sampled(f"seed-beside{index}", prompt(index), Sampling(20)) for index in range(10)]
        await setup.worker.add([*others, sampled("seed-again", prompt(1), one)])
        assert (await collect(setup.worker, 11))["seed-again"].token_ids == alone.token_ids

    setup.run(scenario())


def test_requests_that_do_not_fit_the_kv_cache_are_preempted_and_lose_nothing(setup: Setup) -> None:
    worker = setup.worker

    async def scenario() -> None:
        before = (await worker.stats()).preemptions
        await worker.add([greedy(f"roomy{index}", prompt(index, 60), 60) for index in range(4)])
        roomy = await collect(worker, 4)
        assert (await worker.stats()).preemptions == before
        await worker.add([greedy(f"tight{index}", prompt(index, 60), 60) for index in range(SEQUENCES)])
        await turns(10)
        assert (await worker.stats()).running > 0
        tight = await collect(worker, SEQUENCES)
        stats = await worker.stats()
        assert stats.preemptions > before
        assert stats.kv_used == 0
        for index in range(4):
            assert tight[f"tight{index}"].token_ids == roomy[f"roomy{index}"].token_ids

    setup.run(scenario())


def test_refused_requests_end_as_errors_and_harm_nobody(setup: Setup) -> None:
    bad = [
        sampled("empty", (), Sampling(4)),
        sampled("long", prompt(0, MODEL_LENGTH + 1), Sampling(4)),
        sampled("outside", (1, VOCABULARY), Sampling(4)),
        sampled("negative", (1, -1), Sampling(4)),
        sampled("nothing", (1, 2), Sampling(0)),
        sampled("cold", (1, 2), Sampling(4, temperature=-1.0)),
        sampled("top", (1, 2), Sampling(4, top_p=0.0)),
        replace(greedy("rank", (1, 2), 4), priority=1 << 63),
    ]

    async def scenario() -> dict[str, Completion]:
        await setup.worker.add([greedy("good", prompt(3), 5), *bad])
        with pytest.raises(CommandError) as refused:
            await setup.worker.prioritize({"good": 1 << 63})
        assert refused.value.code == "invalid_request"
        return await collect(setup.worker, len(bad) + 1)

    completions = setup.run(scenario())
    for request in bad:
        completion = completions[request.request_id]
        assert (completion.finish_reason, completion.token_ids) == ("error", ())
        assert completion.error
    assert completions["good"].finish_reason == "length"


def test_an_aborted_request_yields_the_tokens_it_had(setup: Setup) -> None:
    worker = setup.worker

    async def scenario() -> tuple[Completion, Completion]:
        await worker.add([greedy("whole", prompt(4), 40)])
        whole = (await collect(worker, 1))["whole"]
        await worker.add([greedy("cut", prompt(4), 40)])
        await turns(12)
        await worker.abort(["cut", "cut", "unknown"])
        cut = (await collect(worker, 1))["cut"]
        await worker.abort(["cut"])
        await worker.add([greedy("cut", prompt(4), 40), greedy("other", prompt(5), 3)])
        assert (await collect(worker, 1)).keys() == {"other"}  # "cut" is not answered a second time
        return whole, cut

    whole, cut = setup.run(scenario())
    check_shape(cut)
    assert cut.finish_reason == "abort"
    assert 0 < len(cut.token_ids) < 40
    assert cut.token_ids == whole.token_ids[: len(cut.token_ids)]


def test_priority_decides_who_starts_first_and_arrival_breaks_ties(setup: Setup) -> None:
    async def scenario() -> list[str]:
        await setup.worker.suspend()
        await setup.worker.add(
            [
                GenerationRequest(f"p{index}", "t", 0, prompt(index), Sampling(4, temperature=0.0), "test", priority)
                for index, priority in enumerate([5] * SEQUENCES + [0] * SEQUENCES)
            ]
        )
        await setup.worker.resume()
        return list(await collect(setup.worker, 2 * SEQUENCES))

    order = setup.run(scenario())
    assert order == [f"p{index}" for index in (*range(SEQUENCES, 2 * SEQUENCES), *range(SEQUENCES))]


def test_an_update_needs_suspend_a_newer_version_and_a_relay_that_has_it(setup: Setup) -> None:
    worker = setup.worker

    async def scenario() -> None:
        await worker.suspend()
        version = (await worker.update(setup.publish_next())).version
        await worker.resume()
        with pytest.raises(CommandError, match="call suspend first"):
            await worker.update(version + 1)
        await worker.suspend()
        with pytest.raises(RetryableError, match="missing"):
            await worker.update(version + 1)
        with pytest.raises(CommandError, match="never decrease"):
            await worker.update(version - 1)
        assert (await worker.stats()).version == version
        await worker.resume()  # a failed update that touched nothing: the old version goes on
        await worker.add([greedy("after-failure", prompt(6), 4)])
        (completion,) = (await collect(worker, 1)).values()
        assert completion.versions == ((version, 4),)

    setup.run(scenario())


def test_an_idle_or_suspended_worker_does_not_spin(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, steps = setup.worker._engine, 0
    step = engine.step

    def counted(now: float) -> list[Completion]:
        nonlocal steps
        steps += 1
        return step(now)

    monkeypatch.setattr(engine, "step", counted)

    async def scenario() -> None:
        await setup.worker.add([greedy("count", prompt(2), 5)])
        await collect(setup.worker, 1)
        assert steps == 5
        await turns(50)
        await setup.worker.suspend()
        await setup.worker.add([greedy("count2", prompt(2), 5)])
        await turns(50)
        assert steps == 5
        await setup.worker.resume()
        await collect(setup.worker, 1)
        assert steps == 10

    setup.run(scenario())


def test_completions_are_never_lost_to_a_caller_that_went_away(setup: Setup) -> None:
    worker = setup.worker

    async def scenario() -> None:
        cancelled = asyncio.create_task(worker.completions())
        await turns(2)
        cancelled.cancel()
        forgotten = asyncio.create_task(worker.completions())  # in an actor the cancellation does not arrive
        await turns(2)
        present = asyncio.create_task(worker.completions())
        await turns(2)
        await worker.add([greedy("kept", prompt(1), 2)])
        assert [completion.request_id for completion in await present] == ["kept"]
        assert await forgotten == []

    setup.run(scenario())


def test_a_stall_is_reported_and_its_end_too(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = setup.worker
    monkeypatch.setattr("vllm_rlplugin.worker.stats_window.STALL_SECONDS", 0.05)

    async def scenario() -> None:
        monkeypatch.setattr(worker._engine, "step", lambda now: [])  # an engine that computes nothing
        await worker.add([greedy("stuck", prompt(1), 4)])
        await turns(3)
        assert not (await worker.stats()).stalled
        await asyncio.sleep(0.1)
        assert (await worker.stats()).stalled
        monkeypatch.undo()
        await collect(worker, 1)
        assert not (await worker.stats()).stalled

    setup.run(scenario())


def test_what_cannot_run_soon_is_held_in_front_of_the_engine_and_outranking_requests_go_in_at_once(
    setup: Setup,
) -> None:
    worker, lookahead = setup.worker, 16

    async def scenario() -> None:
        many = [replace(greedy(f"held{index}", prompt(index), 40), priority=5) for index in range(200)]
        started = asyncio.get_running_loop().time()
        await worker.add(many)
        await turns(6)
        inside = worker._engine.counts()
        stats = await worker.stats()
        assert inside.running == SEQUENCES
        assert inside.waiting <= lookahead
        assert stats.running + stats.waiting == len(many)
        assert 0 < stats.oldest_wait <= asyncio.get_running_loop().time() - started
        before = stats.outranked
        await worker.add([greedy("first", prompt(1), 4)])  # priority 0
        await turns(8)
        assert "first" not in worker._engine._active or worker._engine._active["first"].core.num_output_tokens
        assert (await worker.stats()).outranked == before + 1
        await worker.abort([request.request_id for request in many])
        found = await collect(worker, len(many) + 1)
        assert found["first"].finish_reason == "length"
        assert sum(completion.finish_reason == "abort" for completion in found.values()) > 150

    setup.run(scenario())


def test_a_held_request_of_low_priority_is_not_starved_by_better_ones_that_keep_coming(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = setup.worker
    monkeypatch.setattr(worker, "_held_limit", 0.0)
    scheduler = worker._engine._scheduler
    monkeypatch.setattr(scheduler, "_rl_policy", replace(scheduler._rl_policy, max_wait=1e-9))
    monkeypatch.setattr(scheduler, "_rl_next_scan", 0.0)  # not when the wait of before would have it

    async def scenario() -> None:
        rich = 0
        while True:
            fresh = [greedy(f"rich{rich + index}", prompt(index), 20) for index in range(4 if rich else 200)]
            rich += len(fresh)
            assert rich < 3000, "starved"
            await worker.add(fresh)
            await turns(3)
            if rich == 200:  # no slot is free, and the engine has as many better ones as it may
                await worker.add([replace(greedy("poor", prompt(0), 3), priority=9)])
            if any(completion.request_id == "poor" for completion in worker._finished):
                break
        await worker.abort(["poor", *(f"rich{index}" for index in range(rich))])
        assert len(await collect(worker, rich + 1)) == rich + 1

    setup.run(scenario())


def test_a_priority_that_changes_while_a_request_runs_decides_who_is_preempted(setup: Setup) -> None:
    worker = setup.worker

    async def scenario() -> None:
        lows = [replace(greedy(f"run{index}", prompt(index), 60), priority=3) for index in range(SEQUENCES)]
        await worker.add(lows)
        await turns(6)
        await worker.prioritize({"run5": 8, "nobody": 1})
        await worker.add([replace(greedy("wants", prompt(90), 10), priority=3)])
        await turns(4)
        assert worker._engine._active["run5"].core.num_preemptions == 1
        assert all(worker._engine._active[f"run{index}"].core.num_preemptions == 0 for index in (0, 4, 6))
        found = await collect(worker, SEQUENCES + 1)
        assert all(completion.finish_reason == "length" for completion in found.values())

    setup.run(scenario())


def test_times_to_first_and_between_tokens_are_those_of_the_engine_steps(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a clock that advances by one in each engine step, and does not otherwise."""
    worker, now = setup.worker, 0.0
    step = worker._engine._llm.step

    def counted() -> list[Any]:
        nonlocal now
        now += 1.0
        return list(step())

    async def scenario() -> Completion:
        nonlocal now
        now = asyncio.get_running_loop().time()
        monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: now)
        monkeypatch.setattr(worker._engine._llm, "step", counted)
        await worker.add([greedy("timed", prompt(3), 9)])
        done: dict[str, Completion] = {}
        while not done:
            await asyncio.sleep(0)
            done = {completion.request_id: completion for completion in worker._finished}
        monkeypatch.undo()
        worker._finished.clear()
        return done["timed"]

    timing = setup.run(scenario()).timing
    assert timing.queued == pytest.approx(0.0, abs=1e-6)
    assert timing.running == pytest.approx(9.0)
    assert timing.first_token == pytest.approx(1.0)
    assert timing.per_token == pytest.approx(1.0)


def test_preparing_fetches_while_the_engine_goes_on_and_the_update_then_fetches_nothing(setup: Setup) -> None:
    worker = setup.worker

    async def scenario() -> None:
        version = setup.publish_next()
        await worker.add([greedy("beside", prompt(2), 90)])
        await turns(4)
        before = worker._engine.counts().generated
        await worker.prepare(version)
        assert worker._engine.counts().generated > before
        fetched: list[str] = []
        stock = worker._engine._rpc

        def rpc(method: str, *args: Any, **kwargs: Any) -> list[Any]:
            fetched.append(method)
            return stock(method, *args, **kwargs)

        worker._engine._rpc = rpc  # type: ignore[method-assign]
        try:
            await worker.suspend()
            await worker.update(version)
        finally:
            del worker._engine._rpc  # type: ignore[method-assign]
        assert "rl_prepare" not in fetched
        assert fetched.count("rl_prepared") == 2, "it was ready at the first look, and at the one that found it so"
        await worker.resume()
        (completion,) = (await collect(worker, 1)).values()
        assert [number for number, _ in completion.versions] == [version - 1, version]

    setup.run(scenario())


def test_while_an_update_is_in_progress_another_and_resume_are_refused_and_stats_and_aborts_answered(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = setup.worker
    arrived = False
    monkeypatch.setattr(worker._engine, "is_prepared", lambda version: arrived)

    async def scenario() -> None:
        nonlocal arrived
        version = setup.publish_next()
        await worker.add([greedy("pending", prompt(2), 50)])
        await turns(3)
        await worker.suspend()
        updating = asyncio.create_task(worker.update(version))
        await turns(5)
        for call in (worker.update(version), worker.resume(), worker.prepare(version + 1)):
            with pytest.raises(CommandError) as refused:
                await call
            assert refused.value.code == "update_in_progress"
        assert (await worker.stats()).version == version - 1
        await worker.abort(["pending"])
        assert (await collect(worker, 1))["pending"].finish_reason == "abort"
        arrived = True
        assert (await updating).version == version
        cancelled = asyncio.create_task(worker.update(version))
        await turns(1)
        cancelled.cancel()
        await asyncio.wait([cancelled])
        await worker.resume()  # a caller that went away does not leave the worker in an update for ever
        assert not (await worker.stats()).suspended

    setup.run(scenario())
