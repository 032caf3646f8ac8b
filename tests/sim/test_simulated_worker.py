"""The simulated worker keeps the RolloutWorker port, and its cost model is the one it states."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest

from orchestrator.api import CommandError, Completion, GenerationRequest, ManagedWorker, RetryableError, Sampling
from orchestrator.config import Config, load_config
from orchestrator.sim.cost_model import CHUNK_TOKENS, FETCH_SHARE
from orchestrator.sim.fault_injector import FaultInjector, FaultyWorker
from orchestrator.sim.seeded_draws import END, draw_response
from orchestrator.sim.simulated_worker import InlineSimWorker, SimWeights, SimWorker
from scripts.bench.virtual_run import run
from tests.support.worker_contract import CHECKS, Rig

STEP, SEQUENCE, PREFILL = 0.02, 0.001, 0.0001
RESTART_SECONDS = 5.0  # the default of sim.start_seconds


def config(*overrides: str) -> Config:
    return load_config(
        None,
        [
            f"sim.decode_seconds_per_step={STEP}",
            f"sim.decode_seconds_per_sequence={SEQUENCE}",
            f"sim.prefill_seconds_per_token={PREFILL}",
            "rollout.engine.max_num_seqs=8",
            *overrides,
        ],
    )


async def worker_at_version_0(settings: Config) -> tuple[SimWorker, SimWeights]:
    weights = SimWeights()
    worker = SimWorker("w", settings, weights)
    weights.put(0)
    await worker.suspend()
    await worker.update(0)
    await worker.resume()
    return worker, weights


def request(name: str, turn: int = 0, tokens: int = 10, limit: int = 256) -> GenerationRequest:
    return GenerationRequest(f"{name}/{turn}", name, turn, (2,) * tokens, Sampling(limit), "sim")


async def drain(worker: ManagedWorker, number: int) -> dict[str, Completion]:
    done: dict[str, Completion] = {}
    while len(done) < number:
        done.update({item.request_id: item for item in await worker.completions()})
    return done


def test_an_engine_in_the_pipelines_loop_makes_a_step_in_each_of_its_turns() -> None:
    """As stock vLLM does in the process of ``tail-batching``: whoever needs n turns of the loop between a completion and an abort
    finds n more tokens. An engine apart makes none: nothing on the way takes time there."""

    long = next(f"t{n}" for n in range(1000) if len(draw_response(0, f"t{n}", 0, 32.0, 100)) == 100)

    def said(kind: type[SimWorker], turns: int) -> tuple[int, float]:
        async def main() -> tuple[int, float]:
            worker, loop = kind("w", config("sim.response_tokens_mean=32"), SimWeights()), asyncio.get_running_loop()
            await worker.add([request("short", limit=4), request(long, limit=100)])
            first = await drain(worker, 1)
            begun = loop.time()
            for _ in range(turns):
                await asyncio.sleep(0)
            await worker.abort([f"{long}/0"])
            taken = loop.time() - begun
            done = await drain(worker, 1)
            await worker.close()
            assert (len(first["short/0"].token_ids), done[f"{long}/0"].finish_reason) == (4, "abort")
            return len(done[f"{long}/0"].token_ids), taken

        return run(main())

    apart, inline = [[said(kind, turns) for turns in (0, 10)] for kind in (SimWorker, InlineSimWorker)]
    assert apart[1] == apart[0]
    assert inline[1][0] - inline[0][0] == 10
    assert inline[1][1] - inline[0][1] == pytest.approx(10 * (STEP + SEQUENCE))


def test_steps_are_counted_while_they_are_taken_and_prefill_by_its_chunks() -> None:
    async def main() -> list[int]:
        settings = config("rollout.engine.max_model_len=100000", "sim.response_tokens_mean=2000")
        worker, found = SimWorker("w", settings, SimWeights()), list[int]()
        await worker.add([request("a", tokens=5 * CHUNK_TOKENS, limit=1000)])
        for pause in (0.5, PREFILL * 2 * CHUNK_TOKENS, PREFILL * 3 * CHUNK_TOKENS, 10 * (STEP + SEQUENCE)):
            await asyncio.sleep(pause)
            found.append((await worker.stats()).steps)
        await worker.close()
        return found

    found = run(main())
    assert found[:2] == [0, 2]
    assert 5 + 20 <= found[2] < found[3] == found[2] + 10


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("wrapped", [False, True], ids=["bare", "behind an idle fault injector"])
@pytest.mark.parametrize("seed", range(3))
def test_worker_contract(check: Callable[[Rig], Awaitable[None]], wrapped: bool, seed: int) -> None:
    async def main() -> None:
        settings = config()
        worker, weights = await worker_at_version_0(settings)
        versions = iter(range(1, 100))

        async def publish() -> int:
            version = next(versions)
            weights.put(version)
            return version

        port: ManagedWorker = FaultyWorker(worker, _idle_faults(settings)) if wrapped else worker
        await check(Rig(port, publish, quiet=600.0, limit=3600.0, evict=worker.held.clear))
        await worker.close()

    run(main(), seed=seed, shuffle=seed > 0)


def _idle_faults(settings: Config) -> FaultInjector:
    from orchestrator.events import EventLog, MemorySink

    return FaultInjector(settings, EventLog(MemorySink(), lambda: 0.0), 0, {})


def timed(main: Coroutine[Any, Any, None]) -> float:
    async def clock() -> float:
        await main
        return asyncio.get_running_loop().time()

    return run(clock())


def test_a_step_costs_what_the_linear_model_says() -> None:
    settings = config("sim.update_seconds=0.0")
    tokens = len(draw_response(0, "a", 0, settings.sim.response_tokens_mean, 246))

    async def main() -> None:
        worker, _ = await worker_at_version_0(settings)
        await worker.add([request("a", tokens=10)])
        done = await drain(worker, 1)
        assert len(done["a/0"].token_ids) == tokens

    assert timed(main()) == pytest.approx(10 * PREFILL + tokens * (STEP + SEQUENCE))


def test_leaping_over_steps_costs_the_same_as_taking_them_one_by_one() -> None:
    """Poking the worker with commands that change nothing ends each leap early, and must not move a completion."""
    settings = config("sim.update_seconds=0.0")

    async def play(poke: bool) -> dict[str, float]:
        worker, _ = await worker_at_version_0(settings)
        loop = asyncio.get_running_loop()
        ended: dict[str, float] = {}

        async def collect() -> None:
            while len(ended) < 12:
                for item in await worker.completions():
                    ended[item.request_id] = round(loop.time(), 9)

        await worker.add([request(f"t{number}") for number in range(12)])  # more than run at once
        collecting = asyncio.create_task(collect())
        while poke and not collecting.done():
            await asyncio.sleep(0.0137)
            await worker.abort(["nobody"])
        await collecting
        return ended

    assert run(play(False)) == run(play(True))


def test_responses_do_not_depend_on_the_worker_or_the_company() -> None:
    settings = config()

    async def alone(name: str) -> Completion:
        worker, _ = await worker_at_version_0(settings)
        await worker.add([request(name)])
        return (await drain(worker, 1))[f"{name}/0"]

    async def together() -> dict[str, Completion]:
        worker, _ = await worker_at_version_0(settings)
        await worker.add([request(f"t{number}") for number in range(30)])
        return await drain(worker, 30)

    company = run(together())
    for number in range(0, 30, 7):
        single = run(alone(f"t{number}"))
        assert single.token_ids == company[f"t{number}/0"].token_ids
        assert single.finish_reason == company[f"t{number}/0"].finish_reason


def test_an_update_on_the_way_splits_the_versions_and_charges_the_prefill_again() -> None:
    settings = config("sim.update_seconds=3.0", "sim.response_tokens_mean=200")
    name = next(f"t{n}" for n in range(100) if len(draw_response(0, f"t{n}", 0, 200.0, 246)) > 100)
    total = len(draw_response(0, name, 0, 200.0, 246))

    async def main() -> None:
        loop = asyncio.get_running_loop()
        worker, weights = await worker_at_version_0(settings)
        weights.put(1)
        begun = loop.time()
        await worker.add([request(name)])
        await asyncio.sleep(1.0)
        await worker.suspend()
        made = round((loop.time() - begun - 10 * PREFILL) / (STEP + SEQUENCE))
        assert loop.time() == pytest.approx(begun + 10 * PREFILL + made * (STEP + SEQUENCE))  # between two steps
        result = await worker.update(1)
        assert result.preempted == 1
        await worker.resume()
        done = (await drain(worker, 1))[f"{name}/0"]
        assert done.versions == ((0, made), (1, total - made))
        again = (10 + made) * PREFILL
        assert loop.time() - begun == pytest.approx(10 * PREFILL + total * (STEP + SEQUENCE) + 3.0 + again)

    run(main())


def test_a_later_turn_prefills_only_what_is_new() -> None:
    settings = config("sim.update_seconds=0.0", "sim.prefill_seconds_per_token=1.0")

    async def main() -> None:
        loop = asyncio.get_running_loop()
        worker, _ = await worker_at_version_0(settings)
        await worker.add([request("a", tokens=10)])
        first = (await drain(worker, 1))["a/0"]
        begun = loop.time()
        context = 10 + len(first.token_ids) + 5
        await worker.add([request("a", turn=1, tokens=context)])
        second = (await drain(worker, 1))["a/1"]
        assert loop.time() - begun == pytest.approx(5.0 + len(second.token_ids) * (STEP + SEQUENCE))

    run(main())


def test_responses_end_by_themselves_or_at_the_limit() -> None:
    async def main() -> None:
        worker, _ = await worker_at_version_0(config())
        await worker.add([request("short", limit=256), request("cut", limit=1), request("full", tokens=256)])
        done = await drain(worker, 3)
        assert done["short/0"].finish_reason == "stop"
        assert done["short/0"].token_ids[-1] == END
        assert done["cut/0"].finish_reason == "length"
        assert len(done["cut/0"].token_ids) == 1
        assert done["full/0"].finish_reason == "error"
        assert "no room" in done["full/0"].error

    run(main())


def test_death_loses_all_requests_and_every_call_says_so_until_restart() -> None:
    async def main() -> None:
        worker, _ = await worker_at_version_0(config())
        await worker.add([request("a")])
        waiting = asyncio.create_task(worker.completions())
        await asyncio.sleep(0.01)
        worker.die()
        with pytest.raises(RetryableError):
            await waiting
        calls: tuple[Callable[[], Awaitable[object]], ...] = (
            worker.suspend,
            worker.resume,
            worker.stats,
            worker.completions,
            lambda: worker.add([request("b")]),
            lambda: worker.abort(["a/0"]),
            lambda: worker.prioritize({"a": 1}),
            lambda: worker.prepare(0),
            lambda: worker.update(0),
        )
        for call in calls:
            with pytest.raises(RetryableError):
                await call()
        before = asyncio.get_running_loop().time()
        await worker.restart()
        assert asyncio.get_running_loop().time() == pytest.approx(before + RESTART_SECONDS)
        stats = await worker.stats()
        assert (stats.running, stats.waiting, stats.version) == (0, 0, -1)
        await worker.add([request("c")])
        assert [item.request_id for item in await worker.completions()] == ["c/0"]

    run(main())


def test_a_death_during_suspend_update_or_restart_is_told_to_the_caller() -> None:
    async def main() -> None:
        settings = config("sim.update_seconds=5.0", "sim.decode_seconds_per_step=10.0")
        loop = asyncio.get_running_loop()
        worker, _ = await worker_at_version_0(settings)
        await worker.add([request("a")])
        loop.call_later(1.0, worker.die)
        with pytest.raises(RetryableError):
            await worker.suspend()
        loop.call_later(1.0, worker.die)
        with pytest.raises(RetryableError):
            await worker.restart()
        await worker.restart()
        await worker.suspend()
        loop.call_later(1.0, worker.die)
        with pytest.raises(RetryableError):
            await worker.update(0)

    run(main())


def test_commands_that_cannot_be_are_refused_and_change_nothing() -> None:
    async def main() -> None:
        worker, weights = await worker_at_version_0(config())
        with pytest.raises(CommandError, match="without suspend"):
            await worker.update(0)
        await worker.suspend()
        with pytest.raises(RetryableError, match="not on the relay"):
            await worker.update(7)
        weights.put(7)
        first = asyncio.create_task(worker.update(7))
        await asyncio.sleep(0)
        for call in (worker.update(7), worker.resume()):
            with pytest.raises(CommandError, match="in progress"):
                await call
        assert (await first).version == 7

    run(main())


def test_a_prepared_update_costs_only_the_loading() -> None:
    async def main() -> None:
        worker, weights = await worker_at_version_0(config("sim.update_seconds=8.0"))
        loop = asyncio.get_running_loop()
        for prepared in (False, True, False):
            version = (await worker.stats()).version + 1
            weights.put(version)
            begun = loop.time()
            if prepared:
                await worker.prepare(version)
                await worker.prepare(version)
                assert loop.time() - begun == pytest.approx(FETCH_SHARE * 8.0)
            await worker.suspend()
            seconds = (await worker.update(version)).seconds
            assert seconds == pytest.approx((1 - FETCH_SHARE) * 8.0 if prepared else 8.0)
            await worker.resume()

    run(main())


def test_spoilt_weights_keep_the_worker_suspended_until_an_update_succeeds() -> None:
    async def main() -> None:
        worker, weights = await worker_at_version_0(config())
        await worker.suspend()
        with pytest.raises(CommandError, match="half-way"):
            worker.spoil_weights()
        with pytest.raises(CommandError) as refused:
            await worker.resume()
        assert refused.value.code == "weights_unusable"
        assert (await worker.stats()).suspended
        weights.put(1)
        await worker.update(1)
        await worker.resume()
        assert not (await worker.stats()).suspended

    run(main())


def test_priority_decides_who_waits() -> None:
    async def main() -> None:
        worker, _ = await worker_at_version_0(config("rollout.engine.max_num_seqs=1"))
        first = request("first")
        rest = [
            GenerationRequest(f"p{value}/0", f"p{value}", 0, (2, 3), Sampling(4), "sim", priority=value)
            for value in (5, 1, 3)
        ]
        await worker.add([first])
        await worker.add(rest)
        order: list[str] = []
        while len(order) < 4:
            order += [item.request_id for item in await worker.completions()]
        assert order == ["first/0", "p1/0", "p3/0", "p5/0"]

    run(main())
