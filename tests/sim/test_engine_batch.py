"""The simulated engine's batch: room for KV, preemption, prefixes; one leap ends where single steps end."""

import asyncio
import random

import pytest

from orchestrator.api import ConfigError, GenerationRequest, Sampling
from orchestrator.config import Config, load_config
from orchestrator.sim.engine_batch import EngineBatch, EngineSequence
from orchestrator.sim.simulated_worker import SimWeights, SimWorker
from scripts.bench.virtual_run import run


def sequence(number: int, prompt: int, tokens: int, priority: int = 0, trajectory: str = "") -> EngineSequence:
    name = trajectory or f"t{number}"
    request = GenerationRequest(f"r{number}", name, 0, (2,) * prompt, Sampling(tokens), "sim", priority)
    return EngineSequence(request, (3,) * tokens, 0.0, number)


def play(batch: EngineBatch, limit: int = 10**6) -> tuple[dict[str, int], list[tuple[int, float]]]:
    """To the end, at most ``limit`` steps at a time: the step after which each ended, and what was prefilled when."""
    ended: dict[str, int] = {}
    prefilled: list[tuple[int, float]] = []
    while True:
        owed, pairs = batch.fill(0.0)
        if owed:
            prefilled.append((batch.steps * 100_000 + owed, pairs))
        if not batch.running:
            return ended, prefilled
        batch.advance(min(limit, batch.horizon()))
        for done in batch.complete():
            batch.remove(done)
            ended[done.request.request_id] = batch.steps


def test_when_kv_runs_out_the_latest_waits_and_computes_again_what_was_overwritten() -> None:
    batch = EngineBatch(slots=8, room=100)
    first, second = sequence(0, 40, 20), sequence(1, 40, 20)
    batch.add(first)
    batch.add(second)
    assert batch.fill(0.0) == (80, 2 * 40 * 40 / 2)
    assert batch.horizon() == 10  # 80 + 2 x 10 tokens
    batch.advance(10)
    assert batch.fill(0.0) == (0, 0.0)
    assert (list(batch.running), batch.preemptions, second.made) == (["r0"], 1, 10)
    assert batch.horizon() == 10  # alone it ends by itself
    batch.advance(10)
    assert [done.request.request_id for done in batch.complete()] == ["r0"]
    batch.remove(first)
    # 60 tokens of the first one stay; of the second one's 50, ten were overwritten by what the first one wrote
    owed, pairs = batch.fill(0.0)
    assert (owed, pairs) == (10, 10 * (50 - 5))
    assert batch.horizon() == 10
    assert play(batch)[0] == {"r1": 30}
    assert (batch.generated, second.spans) == (40, [(-1, 10), (-1, 10)])


def test_a_turn_finds_what_its_task_can_reuse_and_a_preempted_request_all_it_had() -> None:
    batch = EngineBatch(slots=1, room=None, reuse={"sim": 0.25})
    batch.add(sequence(0, 40, 10, priority=5, trajectory="a"))
    assert batch.fill(0.0)[0] == 40
    batch.advance(4)
    batch.add(sequence(1, 8, 1, priority=0, trajectory="b"))
    assert batch.fill(0.0)[0] == 8  # it outranks the first one, whose 44 tokens stay as they are
    batch.advance(1)
    for done in list(batch.complete()):
        batch.remove(done)
    assert batch.fill(0.0)[0] == 1
    assert (batch.prefix_tokens("b"), batch.preemptions) == (2, 1)
    play(batch)
    batch.add(sequence(2, 60, 1, trajectory="a"))
    assert batch.fill(0.0)[0] == 60 - 12  # a quarter of the 50 tokens of the turn before, rounded down


def test_who_does_not_fit_waits_until_there_is_room() -> None:
    batch = EngineBatch(slots=8, room=100)
    for number, prompt in enumerate((60, 50, 10)):
        batch.add(sequence(number, prompt, 5))
    batch.fill(0.0)
    assert list(batch.running) == ["r0"]  # the third would fit, but is not next
    ended, _ = play(batch)
    assert ended == {"r0": 5, "r1": 10, "r2": 10}
    assert batch.preemptions == 0


def test_the_worst_priority_gives_way_whoever_came_last() -> None:
    batch = EngineBatch(slots=8, room=100)
    for number, priority in enumerate((7, 0, 3)):
        batch.add(sequence(number, 30, 20, priority))
    batch.fill(0.0)
    batch.advance(batch.horizon())
    batch.fill(0.0)
    assert sorted(batch.running) == ["r1", "r2"]


def test_a_better_one_takes_a_slot_and_an_equal_one_waits() -> None:
    batch = EngineBatch(slots=1, room=None)
    batch.add(sequence(0, 5, 20, 1))
    batch.fill(0.0)
    batch.advance(3)
    batch.add(sequence(1, 5, 2, 1))
    batch.fill(0.0)
    assert list(batch.running) == ["r0"]
    batch.add(sequence(2, 5, 2, 0))
    batch.fill(0.0)
    assert list(batch.running) == ["r2"]
    assert batch.preemptions == 1
    assert play(batch)[0] == {"r2": 5, "r0": 22, "r1": 24}


def test_nobody_is_preempted_in_vain() -> None:
    batch = EngineBatch(slots=8, room=100)
    batch.add(sequence(0, 70, 5, 0))
    batch.add(sequence(1, 10, 5, 5))
    batch.fill(0.0)
    batch.add(sequence(2, 60, 5, 1))  # it outranks the second only, whose 10 tokens are not enough
    batch.fill(0.0)
    assert list(batch.running) == ["r0", "r1"]
    assert batch.preemptions == 0


def test_unused_prefixes_give_way_the_oldest_first_from_their_ends() -> None:
    batch = EngineBatch(slots=1, room=100)
    for number in range(3):
        batch.add(sequence(number, 38, 2, trajectory=f"t{number}"))
    play(batch)
    again = []
    for number in (2, 1, 0):
        batch.add(sequence(3 + number, 50, 2, trajectory=f"t{number}"))
        again.append(play(batch)[1][0][0] % 100_000)
    assert again == [10, 10, 50]  # 20 of the oldest one's 40 tokens went at first, then all


@pytest.mark.parametrize("seed", range(6))
def test_leaping_ends_where_single_steps_end(seed: int) -> None:
    """Random lengths and priorities in little room: preemption, queueing and prefixes included."""

    def fresh() -> EngineBatch:
        rng = random.Random(seed)
        batch = EngineBatch(slots=6, room=400)
        for number in range(40):
            trajectory = f"t{rng.randrange(20)}-{number % 2}"
            batch.add(sequence(number, rng.randint(1, 200), rng.randint(1, 150), rng.choice((0, 0, 2)), trajectory))
        return batch

    leaping, stepping = fresh(), fresh()
    assert play(leaping) == play(stepping, 1)
    assert leaping.preemptions == stepping.preemptions > 0
    assert leaping.generated == stepping.generated
    assert leaping.prompt_tokens_cached == stepping.prompt_tokens_cached


@pytest.mark.parametrize("seed", range(4))
def test_kv_never_exceeds_the_room_and_everybody_ends(seed: int) -> None:
    rng = random.Random(seed)
    batch = EngineBatch(slots=9, room=300)
    waiting = [sequence(number, rng.randint(1, 150), rng.randint(1, 150), rng.randrange(3)) for number in range(60)]
    ended = 0
    while ended < 60:
        for _ in range(min(len(waiting), rng.randrange(4))):
            batch.add(waiting.pop())
        batch.fill(0.0)
        if not batch.running:
            continue
        assert len(batch.running) <= 9
        batch.advance(min(rng.randint(1, 30), batch.horizon()))
        batch.book_tokens()
        assert batch.context == sum(one.context for one in batch.running.values()) <= 300
        for done in batch.complete():
            assert done.made == len(done.tokens)
            batch.remove(done)
            ended += 1


def settings(*overrides: str) -> Config:
    small = ["sim.costs=roofline", "rollout.engine.max_model_len=2048", "sim.response_tokens_max=1024"]
    return load_config(None, [*small, "sim.response_tokens_mean=300", "sim.kv_tokens=6000", *overrides])


async def ends(config: Config, number: int, poke: float) -> dict[str, float]:
    weights = SimWeights()
    worker = SimWorker("w", config, weights)
    weights.put(0)
    await worker.suspend()
    await worker.update(0)
    await worker.resume()
    loop = asyncio.get_running_loop()
    found: dict[str, float] = {}

    async def collect() -> None:
        while len(found) < number:
            for item in await worker.completions():
                found[item.request_id] = round(loop.time(), 7)

    await worker.add(
        [GenerationRequest(f"t{n}/0", f"t{n}", 0, (2,) * (50 + 37 * n), Sampling(1024), "sim") for n in range(number)]
    )
    collecting = asyncio.create_task(collect())
    while poke and not collecting.done():
        await asyncio.sleep(poke)
        await worker.abort(["nobody"])
    await collecting
    assert worker._batch.preemptions > 0
    return found


def test_a_worker_with_growing_steps_and_little_room_leaps_as_if_it_stepped() -> None:
    assert run(ends(settings(), 30, 0.0)) == run(ends(settings(), 30, 0.00713))


def test_a_worker_that_could_never_hold_one_request_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_model_len"):
        SimWorker("w", settings("sim.kv_tokens=2000"), SimWeights())
