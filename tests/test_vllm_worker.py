"""The command-driven worker around a real vLLM engine on a tiny random Qwen3 (RollArt 6.1)."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import pytest

from orchestrator.api import Completion, GenerationRequest, RetryableError, RolloutWorker, Sampling
from orchestrator.transfer import Publisher, RelayEndpoint
from vllm_rlplugin.recompute_probe import VOCABULARY, collect, greedy, publish, write_tiny_qwen3
from vllm_rlplugin.worker import EngineWorker

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


def test_the_worker_fulfils_the_port(setup: Setup) -> None:
    assert isinstance(setup.worker, RolloutWorker)


def test_status_says_which_hooks_are_live(setup: Setup) -> None:
    status = setup.run(setup.worker.status())
    assert status["backend_registered"]
    assert status["signatures_checked"]
    assert status["signature_mismatches"] == []
    assert status["broken"] == ""


@pytest.mark.parametrize("seed", [0, 1, 2, 3])
def test_every_request_ends_once_under_any_interleaving_and_frees_its_blocks(setup: Setup, seed: int) -> None:
    worker, rng = setup.worker, random.Random(seed)
    got: list[Completion] = []
    added: list[GenerationRequest] = []

    async def collector() -> None:
        while True:
            got.extend(await worker.completions())

    def new_request() -> GenerationRequest:
        shared = prompt(rng.randrange(3), rng.choice((0, 32, 64)))  # some start with the same blocks
        length = rng.choice((0, 1, 20, 50, MODEL_LENGTH + 1))  # 0 and the longest are refused
        maximum = rng.choice((1, 2, 8, 90))
        stops = tuple(rng.sample(range(VOCABULARY), rng.choice((0, 0, 0, 3))))
        sampling = Sampling(maximum, temperature=rng.choice((0.0, 1.0)), stop_token_ids=stops)
        token_ids = (shared + prompt(rng.randrange(1000), length)) if length else ()
        return sampled(f"fuzz{seed}-{len(added)}", token_ids, sampling)

    async def scenario() -> None:
        free = (await worker.stats()).kv_capacity
        reader = asyncio.create_task(collector())
        suspended = False
        for _ in range(150):
            action = rng.choice(("add", "add", "add", "again", "abort", "suspend", "resume", "update", "run", "run"))
            if action == "add":
                fresh = [new_request()]
                added.extend(fresh)
                while rng.random() < 0.8:
                    added.append(new_request())
                    fresh.append(added[-1])
                await worker.add(fresh)
            elif action == "again" and added:
                await worker.add([rng.choice(added)])
            elif action == "abort" and added:
                await worker.abort([rng.choice(added).request_id, "never-added", rng.choice(added[-4:]).request_id])
            elif action == "suspend":
                await worker.suspend()
                suspended = True
            elif action == "resume":
                await worker.resume()
                suspended = False
            elif action == "update" and suspended:
                await worker.update(setup.publish_next())
            await turns(rng.randrange(12))
        await worker.resume()
        while len(got) < len(added):
            await asyncio.sleep(0)
        await turns(20)
        reader.cancel()
        await asyncio.wait([reader])
        stats = await worker.stats()
        assert (stats.running, stats.waiting, stats.kv_used, stats.kv_capacity) == (0, 0, 0, free)

    setup.run(scenario())
    assert sorted(completion.request_id for completion in got) == sorted(request.request_id for request in added)
    asked = {request.request_id: request for request in added}
    reasons = set()
    for completion in got:
        check_shape(completion)
        request = asked[completion.request_id]
        reasons.add(completion.finish_reason)
        invalid = not 0 < len(request.token_ids) < MODEL_LENGTH
        assert (completion.finish_reason == "error") is (bool(completion.error) or invalid)
        if completion.finish_reason == "stop":
            assert completion.token_ids[-1] in request.sampling.stop_token_ids
        if completion.finish_reason == "length":
            room = MODEL_LENGTH - len(request.token_ids)
            assert len(completion.token_ids) == min(request.sampling.max_tokens, room)
    assert {"length", "abort", "error", "stop"} <= reasons
    assert not setup.worker._engine._scheduler.requests


def test_suspend_keeps_tokens_and_stops_the_engine(setup: Setup) -> None:
    worker = setup.worker

    async def scenario() -> tuple[Completion, Completion]:
        await worker.add([greedy("plain", prompt(7), 60)])
        plain = (await collect(worker, 1))["plain"]
        await worker.add([greedy("paused", prompt(7), 60)])
        await turns(20)
        await worker.suspend()
        await worker.suspend()  # idempotent
        before = worker._engine.counts()
        assert before.running == 1
        await worker.add([greedy("late", prompt(8), 2)])  # accepted, not started
        await turns(30)
        after = worker._engine.counts()
        assert (after.generated, after.progress) == (before.generated, before.progress)
        assert after.waiting == 1
        await worker.resume()
        await worker.resume()
        found = await collect(worker, 2)
        assert len(found["late"].token_ids) == 2
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
    ]

    async def scenario() -> dict[str, Completion]:
        await setup.worker.add([*bad, greedy("good", prompt(3), 5)])
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
        with pytest.raises(ValueError, match="call suspend first"):
            await worker.update(version + 1)
        await worker.suspend()
        with pytest.raises(RetryableError, match="missing"):
            await worker.update(version + 1)
        with pytest.raises(ValueError, match="never decrease"):
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
    monkeypatch.setattr("vllm_rlplugin.worker.STALL_SECONDS", 0.05)

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
