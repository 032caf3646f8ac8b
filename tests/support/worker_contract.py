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
from dataclasses import dataclass, replace
from itertools import count

from orchestrator.api import (
    CommandError,
    Completion,
    GenerationRequest,
    RetryableError,
    RolloutWorker,
    Sampling,
    SessionWorker,
    TokenSequence,
    UpdateResult,
)

_NUMBERS = count()  # request ids are never used twice on one worker
_ROUNDING = 1e-5  # seconds: workers may round their times


@dataclass
class Rig:
    """``publish`` makes the next version available to the worker and returns it; ``evict`` lets it lose the contexts that it
    remembers, where it does. ``quiet`` is how long nothing must come
    for the worker to count as done. ``limit``: seconds that any wait may take. The worker runs less than a quarter of
    ``many`` requests at once, and its model is shorter than ``too_long`` tokens."""

    worker: RolloutWorker
    publish: Callable[[], Awaitable[int]]
    prompt: tuple[int, ...] = (2, 3, 4, 5)
    max_tokens: int = 12
    long_tokens: int = 48  # of a response that is interrupted on the way
    many: int = 40  # requests; more than the worker runs at once
    too_long: int = 1024  # tokens
    quiet: float = 0.5
    limit: float = 60.0
    evict: Callable[[], None] = lambda: None

    def requests(
        self, number: int, max_tokens: int = 0, *, priority: int = 0, group: str = "", trajectory: str = ""
    ) -> list[GenerationRequest]:
        """Fresh requests of as many trajectories, or all of one."""
        names = [f"contract-{next(_NUMBERS)}" for _ in range(number)]
        sampling = Sampling(max_tokens or self.max_tokens)
        return [
            GenerationRequest(
                f"{name}/0",
                trajectory or name,
                0,
                self.prompt,
                sampling,
                "contract",
                priority=priority,
                group_id=group,
            )
            for name in names
        ]

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


async def trajectories_and_groups_are_aborted_whole_and_nothing_else(rig: Rig) -> None:
    """Members that wait and members that run."""
    label = f"abort-{next(_NUMBERS)}"
    of_trajectory = rig.requests(3, rig.long_tokens, trajectory=label, group=f"{label}-a")
    of_group = rig.requests(rig.many // 2, rig.long_tokens, group=f"{label}-b")
    others = rig.requests(3, group=f"{label}-a")
    await rig.worker.suspend()  # so that none of them has ended when the commands come
    await rig.worker.add([*of_trajectory, *of_group, *others])
    await rig.worker.abort(trajectories=[label, "no such trajectory"], groups=[f"{label}-b", "no such group"])
    await rig.worker.resume()
    chosen = [request.request_id for request in (*of_trajectory, *of_group)]
    done = await rig.collect(len(chosen) + len(others))
    well_formed(done.values())
    for name, completion in done.items():
        assert (completion.finish_reason == "abort") is (name in chosen), f"{name}: {completion.finish_reason}"
    await rig.nothing_more()


async def no_token_of_an_aborted_request_is_made_after_the_answer(rig: Rig) -> None:
    """Running ones, by id, by trajectory and by group: from the answer on the worker generates nothing."""
    group = f"stop-{next(_NUMBERS)}"
    requests = rig.requests(9, rig.long_tokens, group=group)
    await rig.worker.add(requests)
    await rig.worker.abort([request.request_id for request in requests[:3]])
    await rig.worker.abort(trajectories=[request.trajectory_id for request in requests[3:6]])
    await rig.worker.abort(groups=[group])
    before = await rig.worker.stats()
    assert (before.running, before.waiting) == (0, 0), f"{before.running} run, {before.waiting} wait"
    done = await rig.collect(len(requests))
    well_formed(done.values())
    await rig.nothing_more()
    assert (await rig.worker.stats()).generated == before.generated


async def a_prompt_that_does_not_fit_ends_in_an_error(rig: Rig) -> None:
    """One completion, that says why; its neighbour is not touched."""
    good, bad = rig.requests(2)
    bad = replace(bad, token_ids=tuple(rig.prompt[index % len(rig.prompt)] for index in range(rig.too_long)))
    await rig.worker.add([bad, good])
    done = await rig.collect(2)
    assert done[good.request_id].finish_reason in ("stop", "length")
    refused = done[bad.request_id]
    assert (refused.finish_reason, refused.token_ids) == ("error", ())
    assert refused.error


async def a_turn_goes_on_from_the_context_before_it_whatever_became_of_that(rig: Rig) -> None:
    """Remembered, lost, or given up: the request has the whole of it, as its length shows."""
    (request,) = rig.requests(1)
    context, session = TokenSequence(rig.prompt), rig.worker if isinstance(rig.worker, SessionWorker) else None
    for turn, lost in enumerate((False, False, True, False)):
        if lost:
            rig.evict()
        sent = replace(request, request_id=f"{request.trajectory_id}/{turn}", turn=turn, token_ids=context)
        await rig.worker.add([sent])
        ((_, completion),) = (await rig.collect(1)).items()
        well_formed([completion])
        assert completion.finish_reason in ("stop", "length"), completion.error
        context = context + completion.token_ids + rig.prompt
    long = context + [rig.prompt[index % len(rig.prompt)] for index in range(rig.too_long - len(context))]
    await rig.worker.add([replace(request, request_id=f"{request.trajectory_id}/long", turn=4, token_ids=long)])
    ((_, completion),) = (await rig.collect(1)).items()
    assert (completion.finish_reason, completion.token_ids) == ("error", ())
    if session is not None:
        session.forget(request.trajectory_id)
        session.take_resent()


async def priority_can_be_raised_and_lowered_while_a_request_waits(rig: Rig) -> None:
    """Lower numbers first. The one that came last starts among the first, and the other way round."""
    requests = rig.requests(rig.many, priority=5)
    first, last = requests[0], requests[-1]
    await rig.worker.suspend()
    await rig.worker.add(requests)
    await rig.worker.prioritize({last.trajectory_id: 1, first.trajectory_id: 9, "no such trajectory": 0})
    await rig.worker.resume()
    done = await rig.collect(len(requests))
    well_formed(done.values())
    waited = {name: completion.timing.queued for name, completion in done.items()}
    before_last = sum(seconds < waited[last.request_id] for seconds in waited.values())
    before_first = sum(seconds < waited[first.request_id] for seconds in waited.values())
    assert before_last < rig.many // 2, f"{before_last} started before the one that was raised"
    assert before_first >= rig.many // 2, f"only {before_first} started before the one that was lowered"
    await rig.worker.prioritize({last.trajectory_id: 0})  # theirs has ended


async def times_of_a_completion_add_up(rig: Rig) -> None:
    """Nothing is negative; the first token comes while the request runs, and the others after it."""
    requests = rig.requests(rig.many)
    await rig.worker.add(requests)
    for completion in (await rig.collect(len(requests))).values():
        timing, size = completion.timing, len(completion.token_ids)
        whole = timing.queued + timing.running
        assert min(timing.queued, timing.running, timing.first_token, timing.per_token) >= 0, f"{timing}"
        assert timing.queued - _ROUNDING <= timing.first_token <= whole + _ROUNDING, f"{timing}"
        others = timing.first_token + timing.per_token * (size - 1)
        assert others <= whole + size * _ROUNDING, f"{timing}, {size} tokens"
        assert (timing.per_token > 0) is (size > 1), f"{timing}, {size} tokens"


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
    for _ in range(4):  # on a starved machine the suspension may come after the last token
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
        assert all(number in {old, version} for item in done.values() for number, _ in item.versions)
        if any(item.versions[-1][0] == version for item in done.values()):
            return
    raise AssertionError("nothing was made by the new weights")


async def a_prepared_version_is_loaded_and_preparing_disturbs_nothing(rig: Rig) -> None:
    """Twice, while requests run; what the relay does not have is told, and changes nothing."""
    requests = rig.requests(4, rig.long_tokens)
    old = (await rig.worker.stats()).version
    await rig.worker.add(requests)
    version = await rig.publish()
    await rig.worker.prepare(version)
    await rig.worker.prepare(version)
    assert (await rig.worker.stats()).version == old
    assert all(item.versions[-1][0] == old for item in (await rig.collect(len(requests))).values())
    await rig.worker.suspend()
    assert (await rig.worker.update(version)).version == version
    await rig.worker.resume()
    try:
        await rig.worker.prepare(version + 1000)
    except RetryableError:
        assert (await rig.worker.stats()).version == version
    else:
        raise AssertionError("a version that nobody published was prepared")
    requests = rig.requests(1)
    await rig.worker.add(requests)
    ((_, completion),) = (await rig.collect(1)).items()
    assert completion.versions == ((version, len(completion.token_ids)),)


async def an_update_is_refused_when_it_cannot_be_and_the_old_weights_go_on(rig: Rig) -> None:
    """Without SUSPEND, to an older version, to one that the relay does not have."""
    version = await rig.publish()
    assert await _refusal(rig, version) == "not_suspended"
    await rig.worker.suspend()
    await rig.worker.update(version)
    assert await _refusal(rig, version - 1) == "version_decreases"
    try:
        await rig.worker.update(version + 1000)
    except RetryableError:
        pass
    else:
        raise AssertionError("a version that nobody published was loaded")
    await rig.worker.resume()
    stats = await rig.worker.stats()
    assert (stats.version, stats.suspended) == (version, False)
    requests = rig.requests(1)
    await rig.worker.add(requests)
    ((_, completion),) = (await rig.collect(1)).items()
    assert completion.versions == ((version, len(completion.token_ids)),)


async def two_updates_at_once_are_not_mixed(rig: Rig) -> None:
    """One waits for the other, or is refused. Afterwards the worker is in a defined state."""
    version = await rig.publish()
    await rig.worker.suspend()
    answers = await asyncio.gather(rig.worker.update(version), rig.worker.update(version), return_exceptions=True)
    refused = [answer for answer in answers if not isinstance(answer, UpdateResult)]
    assert len(refused) < 2, f"{answers}"
    assert all(isinstance(answer, CommandError) and answer.code == "update_in_progress" for answer in refused)
    await rig.worker.resume()
    stats = await rig.worker.stats()
    assert (stats.version, stats.suspended) == (version, False)


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
    assert 0 <= stats.prefix_hits <= stats.prefix_queries
    assert stats.oldest_wait == 0.0
    assert (stats.suspended, stats.stalled) == (False, False)


async def statistics_count_what_happens(rig: Rig) -> None:
    """Tokens, those that wait while suspended, and that it is suspended."""
    before = await rig.worker.stats()
    requests = rig.requests(3)
    await rig.worker.suspend()
    await rig.worker.add(requests)
    stats = await rig.worker.stats()
    assert (stats.running, stats.waiting, stats.suspended) == (0, 3, True)
    assert stats.oldest_wait >= 0.0
    await rig.worker.resume()
    done = await rig.collect(3)
    after = await rig.worker.stats()
    tokens = sum(len(completion.token_ids) for completion in done.values())
    assert after.generated - before.generated == tokens
    assert after.prefix_queries > before.prefix_queries


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
        lambda: rig.worker.abort(["no such request"]),
        lambda: rig.worker.prioritize({"no such trajectory": 1}),
        lambda: rig.worker.prepare(1),
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


async def _refusal(rig: Rig, version: int) -> str:
    try:
        await rig.worker.update(version)
    except CommandError as error:
        return error.code
    return ""


CHECKS: tuple[Callable[[Rig], Awaitable[None]], ...] = (
    every_request_ends_in_exactly_one_completion,
    adding_a_request_twice_runs_it_once,
    an_aborted_request_ends_in_one_completion,
    trajectories_and_groups_are_aborted_whole_and_nothing_else,
    no_token_of_an_aborted_request_is_made_after_the_answer,
    a_prompt_that_does_not_fit_ends_in_an_error,
    a_turn_goes_on_from_the_context_before_it_whatever_became_of_that,
    priority_can_be_raised_and_lowered_while_a_request_waits,
    times_of_a_completion_add_up,
    requests_added_while_suspended_start_after_resume,
    in_flight_tokens_survive_an_update,
    a_prepared_version_is_loaded_and_preparing_disturbs_nothing,
    an_update_is_refused_when_it_cannot_be_and_the_old_weights_go_on,
    two_updates_at_once_are_not_mixed,
    suspend_and_resume_are_idempotent,
    an_idle_worker_says_so,
    statistics_count_what_happens,
    close_is_idempotent_and_final,
)
