"""The RolloutWorker port as executable checks, for the simulated worker and for every real one.

Each check of :data:`CHECKS` is a coroutine function named after a guarantee of the port. It gets a :class:`Rig` around a
worker that is up, resumed, idle, and holds a published version, and raises AssertionError when the guarantee does not
hold. A check leaves the worker as it found it, except :func:`close_is_idempotent_and_final`, which is the last one. A test
runs them like this, with any event loop::

    @pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
    def test_worker_contract(check): runner.run(check(rig))
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from itertools import count

from orchestrator.api import Completion, GenerationRequest, RetryableError, RolloutWorker, Sampling

_NUMBERS = count()  # request ids are never used twice on one worker


@dataclass
class Rig:
    """``publish`` makes the next version available to the worker and returns it. ``quiet`` is how long nothing must come
    for the worker to count as done. ``limit``: seconds that any wait may take."""

    worker: RolloutWorker
    publish: Callable[[], Awaitable[int]]
    prompt: tuple[int, ...] = (2, 3, 4, 5)
    max_tokens: int = 12
    long_tokens: int = 48  # of a response that is interrupted on the way
    many: int = 40  # requests; more than the worker runs at once
    quiet: float = 0.5
    limit: float = 60.0

    def requests(self, number: int, max_tokens: int = 0) -> list[GenerationRequest]:
        """Fresh requests of as many trajectories."""
        names = [f"contract-{next(_NUMBERS)}" for _ in range(number)]
        sampling = Sampling(max_tokens or self.max_tokens)
        return [GenerationRequest(f"{name}/0", name, 0, self.prompt, sampling, "contract") for name in names]

    async def collect(self, number: int) -> dict[str, Completion]:
        """Wait for so many completions, and fail when one comes twice."""
        done: dict[str, Completion] = {}
        async with asyncio.timeout(self.limit):
            while len(done) < number:
                for completion in await self.worker.completions():
                    assert completion.request_id not in done, f"{completion.request_id} completed twice"
                    done[completion.request_id] = completion
        return done

    async def nothing_more(self) -> None:
        """Nothing comes for a while."""
        try:
            async with asyncio.timeout(self.quiet):
                late = await self.worker.completions()
        except TimeoutError:
            return
        raise AssertionError(f"unexpected completions: {late}")


def well_formed(completions: Iterable[Completion]) -> None:
    """Tokens, log-probs and version spans have one length; log-probs are finite and not positive."""
    for completion in completions:
        name, size = completion.request_id, len(completion.token_ids)
        assert completion.finish_reason in ("stop", "length", "abort", "error"), f"{name}: {completion.finish_reason}"
        assert len(completion.logprobs) == size, f"{name}: {size} tokens, {len(completion.logprobs)} log-probs"
        assert sum(spans for _, spans in completion.versions) == size, f"{name}: versions {completion.versions}"
        assert all(math.isfinite(value) and value <= 0 for value in completion.logprobs), f"{name}: log-probs"
        numbers = [version for version, _ in completion.versions]
        assert numbers == sorted(set(numbers)), f"{name}: versions {numbers} are not merged and rising"


async def every_request_ends_in_exactly_one_completion(rig: Rig) -> None:
    """More requests than run at once, in one call and in many."""
    requests = rig.requests(rig.many)
    half = len(requests) // 2
    await rig.worker.add(requests[:half])
    for request in requests[half:]:
        await rig.worker.add([request])
    done = await rig.collect(len(requests))
    assert sorted(done) == sorted(request.request_id for request in requests)
    well_formed(done.values())
    assert all(completion.finish_reason in ("stop", "length") for completion in done.values())
    await rig.nothing_more()


async def adding_a_request_twice_runs_it_once(rig: Rig) -> None:
    """While it runs, and after it has ended."""
    requests = rig.requests(3)
    await rig.worker.add([*requests, requests[0]])
    await rig.worker.add(requests)
    done = await rig.collect(3)
    await rig.worker.add(requests)
    await rig.nothing_more()
    well_formed(done.values())


async def an_aborted_request_ends_in_one_completion(rig: Rig) -> None:
    """Waiting or running, once or twice; the others are not touched; unknown and finished ids are ignored."""
    requests = rig.requests(rig.many, rig.long_tokens)
    await rig.worker.suspend()
    await rig.worker.add(requests)
    await rig.worker.resume()
    chosen = [request.request_id for request in requests[::2]]
    await rig.worker.abort([*chosen, chosen[0], "no such request"])
    await rig.worker.abort(chosen)
    done = await rig.collect(len(requests))
    assert sorted(done) == sorted(request.request_id for request in requests)
    well_formed(done.values())
    assert any(done[name].finish_reason == "abort" for name in chosen)
    assert all(done[request.request_id].finish_reason != "abort" for request in requests[1::2])
    await rig.worker.abort(chosen)
    await rig.nothing_more()


async def requests_added_while_suspended_start_after_resume(rig: Rig) -> None:
    """They are accepted, and nothing comes before."""
    await rig.worker.suspend()
    requests = rig.requests(2)
    await rig.worker.add(requests)
    await rig.nothing_more()
    await rig.worker.resume()
    assert len(await rig.collect(2)) == 2


async def in_flight_tokens_survive_an_update(rig: Rig) -> None:
    """Suspended on the way, updated, resumed: each response is one completion, its versions rise, none are lost."""
    requests = rig.requests(4, rig.long_tokens)
    old = (await rig.worker.stats()).version
    await rig.worker.add(requests)
    await rig.worker.suspend()
    version = await rig.publish()
    result = await rig.worker.update(version)
    assert result.version == version > old
    assert (await rig.worker.stats()).version == version
    await rig.worker.resume()
    done = await rig.collect(len(requests))
    well_formed(done.values())
    known = {old, version}
    assert all(number in known for item in done.values() for number, _ in item.versions)
    assert any(item.versions[-1][0] == version for item in done.values()), "nothing was made by the new weights"


async def suspend_and_resume_are_idempotent(rig: Rig) -> None:
    """Twice is as good as once."""
    requests = rig.requests(2)
    await rig.worker.suspend()
    await rig.worker.suspend()
    await rig.worker.add(requests)
    await rig.worker.resume()
    await rig.worker.resume()
    assert len(await rig.collect(2)) == 2


async def an_idle_worker_says_so(rig: Rig) -> None:
    """``stats`` counts nothing when nothing runs."""
    stats = await rig.worker.stats()
    assert (stats.running, stats.waiting) == (0, 0)
    assert 0 <= stats.kv_used <= stats.kv_capacity


async def close_is_idempotent_and_final(rig: Rig) -> None:
    """The last check: afterwards every call raises RetryableError, pending ones too."""
    pending = asyncio.ensure_future(rig.worker.completions())
    await asyncio.sleep(0)
    await rig.worker.close()
    await rig.worker.close()
    calls: list[Callable[[], Awaitable[object]]] = [
        lambda: pending,
        rig.worker.completions,
        lambda: rig.worker.add(rig.requests(1)),
        rig.worker.suspend,
        rig.worker.stats,
    ]
    for call in calls:
        try:
            async with asyncio.timeout(rig.limit):
                await call()
        except RetryableError:
            continue
        raise AssertionError("a closed worker answered")


CHECKS: tuple[Callable[[Rig], Awaitable[None]], ...] = (
    every_request_ends_in_exactly_one_completion,
    adding_a_request_twice_runs_it_once,
    an_aborted_request_ends_in_one_completion,
    requests_added_while_suspended_start_after_resume,
    in_flight_tokens_survive_an_update,
    suspend_and_resume_are_idempotent,
    an_idle_worker_says_so,
    close_is_idempotent_and_final,
)
