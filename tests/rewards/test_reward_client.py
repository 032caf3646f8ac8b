"""The reward client against servers that misbehave: an infrastructure failure is never a reward."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web

from orchestrator.api import ConfigError, Prompt, RetryableError, RunError, Score, Trajectory, TrajectoryError, Turn
from orchestrator.config import load_config
from orchestrator.envs import Episode, reward_of_episode, score_of
from orchestrator.events import EventLog, MemorySink
from orchestrator.policies.training.learning_alarms import metric_means
from orchestrator.rewards import function_client as client_module
from orchestrator.rewards.reward_client import HttpReward, not_kept
from orchestrator.rewards.voting import MajorityVote
from orchestrator.runtime import function_hosts
from orchestrator.runtime.function_hosts import WAIT_SECONDS
from orchestrator.runtime.preflight import make_task
from orchestrator.runtime.process_keeper import Keeper
from orchestrator.sim.twins import SimReward
from scripts.bench.virtual_run import run as virtual_run

TRAJECTORY = Trajectory(
    "t1", "g1", "task", Prompt("k", "task", 1, "map"), (Turn((1,), (2,), (0.0,), ((0, 1),)),), None, "1", 1, False
)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Server:
    """Answers with what the list holds, the last entry for ever."""

    def __init__(self, *answers: web.Response | Handler | None) -> None:
        self.answers = answers
        self.calls = 0
        self.url = ""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        answer = self.answers[min(self.calls, len(self.answers) - 1)]
        self.calls += 1
        if answer is None:
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        if isinstance(answer, web.Response):
            return web.Response(body=answer.body, status=answer.status, headers=answer.headers)
        return await answer(request)

    async def __aenter__(self) -> Server:
        application = web.Application()
        application.router.add_route("*", "/{path:.*}", self.handle)
        self._runner = web.AppRunner(application, shutdown_timeout=0.05)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}/reward"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "BACKOFF_FIRST", 0.001)


def run(*answers: web.Response | Handler | None, **options: Any) -> tuple[float | Exception, int]:
    """(the score or the error, calls that the server saw)."""

    async def scenario() -> tuple[float | Exception, int]:
        async with Server(*answers) as server:
            reward = HttpReward(server.url, **{"retries": 2, "timeout": 5.0, **options})
            try:
                return await reward.score(TRAJECTORY), server.calls
            except (RetryableError, TrajectoryError, RunError) as error:
                return error, server.calls
            finally:
                await reward.close()
                await reward.close()

    return asyncio.run(asyncio.wait_for(scenario(), 30))


def text(body: str, status: int = 200, **headers: str) -> web.Response:
    return web.Response(body=body.encode(), status=status, headers=headers)


def test_a_number_is_the_reward() -> None:
    assert run(text('{"reward": 0.75, "more": 1}')) == (0.75, 1)
    assert run(text('{"reward": -2}')) == (-2.0, 1)


def test_numbers_beside_the_reward_are_kept_with_the_trajectory_and_other_fields_are_not() -> None:
    found, _ = run(text('{"reward": 0.5, "length": 12, "format": true, "outcome": "goal", "parts": {"a": 1}}'))
    assert isinstance(found, Score)
    assert found.metrics == (("format", 1.0), ("length", 12.0))
    assert not_kept({"reward": 1, "outcome": "goal", "cases": [], "why": "x", "parts": {}}) == ["why", "parts"]

    async def scored() -> Trajectory:
        async with Server(text('{"reward": 0.5, "length": 12}')) as server:
            client = HttpReward(server.url)
            episode = Episode("t1", "g1", TRAJECTORY.prompt, 0.0, turns=list(TRAJECTORY.turns))
            try:
                return episode.trajectory(1.0, reward=await reward_of_episode(client, episode, 1.0, 5.0))
            finally:
                await client.close()

    trajectory = asyncio.run(scored())
    assert (trajectory.reward, trajectory.metrics) == (0.5, (("length", 12.0),))


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({f"m{number:02d}": number for number in range(33)}, "'m32': is one of 33 numbers"),
        ({"x" * 101: 1}, "a metric's name has 1 to 100 printable"),
        ({"a\n": 1}, "a metric's name"),
        ({"big": 10**301}, "'big': a metric is a number of at most 1e+300"),
    ],
)
def test_a_metric_that_cannot_be_kept_is_named(more: dict[str, int], said: str) -> None:
    error, _ = run(text(json.dumps({"reward": 1.0, **more})))
    assert isinstance(error, TrajectoryError)
    assert error.cause == "reward_error"
    assert said in error.detail


def test_a_steps_metrics_are_the_means_of_those_that_have_them_and_bounded() -> None:
    given = [(("a", 1.0),), (("a", 0.0), ("b", 4.0)), tuple((f"z{number:02d}", 1.0) for number in range(40))]
    means = metric_means([replace(TRAJECTORY, metrics=metrics) for metrics in given])
    assert list(means.items())[:3] == [("reward/a", 0.5), ("reward/b", 4.0), ("reward/z00", 1.0)]
    assert len(means) == 32


@pytest.mark.parametrize("failure", [None, text("", 500), text("", 503), text("", 429), text("", 408)])
def test_transport_failures_are_tried_again(failure: web.Response | None) -> None:
    assert run(failure, failure, text('{"reward": 1}')) == (1.0, 3)
    error, calls = run(failure)
    assert isinstance(error, RetryableError)
    assert "failed 3 times" in str(error)
    assert calls == 3


def test_an_endpoint_that_asks_to_be_left_alone_is(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    sleep = asyncio.sleep

    async def noted(seconds: float) -> None:
        waits.append(seconds)
        await sleep(0)

    monkeypatch.setattr(client_module.asyncio, "sleep", noted)
    busy = [text("", 429, **{"Retry-After": said}) for said in ("7", "99999", "Fri, 31 Dec 1999 23:59:59 GMT")]
    assert run(*busy, text('{"reward": 1}'), retries=3) == (1.0, 4)
    seven, most, other = [seconds for seconds in waits if seconds]
    assert (seven, most) == (7.0, client_module.RETRY_AFTER_LIMIT)
    assert other < 1.0


def test_what_an_endpoint_says_of_its_refusal_is_told_without_the_token() -> None:
    said = '{"error": {"message":\n "too long: 40000 tokens\x1b[1m", "shown": "Bearer secret"}}'
    error, calls = run(text(said, 400), token="secret")
    assert (getattr(error, "cause", ""), calls) == ("reward_error", 1)
    assert "HTTP 400 (" in str(error)
    assert "too long: 40000 tokens" in str(error)
    error, _ = run(text('{"message": "The model `x` does not exist"}', 404))
    assert "The model `x` does not exist" in str(error)
    for known, status in ((error, 404), (run(text(said, 400), token="secret")[0], 400), (run(text(said, 401))[0], 401)):
        assert "\x1b" not in str(known), status
        assert "secret" not in str(known), status


def test_nobody_listening_is_retryable() -> None:
    async def scenario() -> None:
        async with Server(text("{}")) as server:
            url = server.url
        reward = HttpReward(url, retries=1)
        with pytest.raises(RetryableError):
            await reward.score(TRAJECTORY)
        await reward.close()

    asyncio.run(scenario())


async def _never(_: web.Request) -> web.StreamResponse:
    await asyncio.Event().wait()
    raise AssertionError


async def _drip(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    await response.write(b'{"reward"')
    await asyncio.Event().wait()
    raise AssertionError


@pytest.mark.parametrize("handler", [_never, _drip])
def test_no_answer_in_time_is_tried_again_then_fatal_to_the_trajectory(handler: Handler) -> None:
    assert run(handler, text('{"reward": 1}'), timeout=0.2) == (1.0, 2)
    error, calls = run(handler, timeout=0.1, retries=1)
    assert isinstance(error, TrajectoryError)
    assert (error.cause, calls) == ("reward_timeout", 2)


@pytest.mark.parametrize(
    ("answer", "cause"),
    [
        (text('{"reward": NaN}'), "reward_not_finite"),
        (text('{"reward": -Infinity}'), "reward_not_finite"),
        (text('{"reward": 1e999}'), "reward_not_finite"),
        (text('{"reward": 1' + "0" * 400 + "}"), "reward_not_finite"),
        (text('{"reward": true}'), "reward_error"),
        (text('{"reward": "1"}'), "reward_error"),
        (text('{"reward": null}'), "reward_error"),
        (text("{}"), "reward_error"),
        (text("0.5"), "reward_error"),
        (text(""), "reward_error"),
        (text("<html>"), "reward_error"),
        (text("[" * 100_000), "reward_error"),
        (text('{"reward": 1, "text": "' + "x" * (2 << 20) + '"}'), "reward_error"),
        (text("", 400), "reward_error"),
        (text("", 413), "reward_error"),
        (text('{"reward": 1.0}', **{"X-Amz-Function-Error": "Unhandled"}), "reward_error"),
        (text('{"errorType": "Sandbox.Timedout"}', **{"X-Amz-Function-Error": "Unhandled"}), "reward_timeout"),
    ],
)
def test_what_the_function_did_wrong_is_fatal_to_the_trajectory_and_not_retried(
    answer: web.Response, cause: str
) -> None:
    error, calls = run(answer)
    assert isinstance(error, TrajectoryError)
    assert (error.cause, calls) == (cause, 1)


@pytest.mark.parametrize("status", [301, 307, 401, 403, 404, 405])
def test_a_wrong_address_or_token_ends_the_run(status: int) -> None:
    error, calls = run(text("", status, Location="http://127.0.0.1:1/stolen"), token="secret")
    assert isinstance(error, RunError)
    assert str(status) in str(error)
    assert "secret" not in str(error)
    assert calls == 1


def test_no_more_calls_are_in_flight_than_allowed() -> None:
    running = most = 0

    async def slow(_: web.Request) -> web.StreamResponse:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.01)
        running -= 1
        return text('{"reward": 1}')

    async def scenario() -> None:
        async with Server(slow) as server:
            reward = HttpReward(server.url, concurrency=3)
            assert await asyncio.gather(*(reward.score(TRAJECTORY) for _ in range(20))) == [1.0] * 20
            await reward.close()

    asyncio.run(scenario())
    assert most == 3


def test_the_number_of_calls_in_flight_changes_beside_them() -> None:
    running, most = 0, [0]

    async def slow(_: web.Request) -> web.StreamResponse:
        nonlocal running
        running += 1
        most[-1] = max(most[-1], running)
        await asyncio.sleep(0.02)
        running -= 1
        return text('{"reward": 1}')

    async def scenario() -> None:
        async with Server(slow) as server:
            reward = HttpReward(server.url, concurrency=3)
            for size in (1, 4, 2, 5):
                before = asyncio.gather(*(reward.score(TRAJECTORY) for _ in range(6)))
                await asyncio.sleep(0.01)
                reward.resize(size)  # with three calls or more in flight
                await before
                most.append(0)
                assert await asyncio.gather(*(reward.score(TRAJECTORY) for _ in range(12))) == [1.0] * 12
                assert most[-1] == size
            await reward.close()

    asyncio.run(scenario())


def test_waits_grow_have_jitter_and_follow_from_the_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "BACKOFF_FIRST", 0.1)

    def waits(seed: int) -> list[float]:
        slept: list[float] = []

        async def sleep(seconds: float) -> None:
            slept.append(seconds)

        async def scenario() -> None:
            reward = HttpReward("http://127.0.0.1:9/x", retries=8, seed=seed)

            async def fail(_: bytes) -> tuple[bool, bytes]:
                raise ConnectionResetError

            reward._post = fail  # type: ignore[method-assign]
            with pytest.raises(RetryableError):
                await reward.score(TRAJECTORY)
            await reward.close()

        with monkeypatch.context() as patch:
            patch.setattr(client_module.asyncio, "sleep", sleep)
            asyncio.run(scenario())
        return slept

    state = random.getstate()
    first = waits(1)
    assert random.getstate() == state  # the global generator is not touched
    assert len(first) == 8
    for number, seconds in enumerate(first):
        longest = min(0.1 * 2**number, client_module.BACKOFF_LIMIT)
        assert 0.5 * longest <= seconds <= longest
    assert waits(1) == first
    assert waits(2) != first


def test_a_cancelled_score_frees_its_slot() -> None:
    async def scenario() -> None:
        async with Server(_never, text('{"reward": 1}')) as server:
            reward = HttpReward(server.url, concurrency=1)
            task = asyncio.create_task(reward.score(TRAJECTORY))
            while not server.calls:
                await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert await reward.score(TRAJECTORY) == 1.0
            await reward.close()

    asyncio.run(asyncio.wait_for(scenario(), 20))


@pytest.mark.parametrize("url", ["", "localhost:80", "ftp://x/y", "http://"])
def test_a_wrong_url_is_a_configuration_error(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        HttpReward(url)
    assert caught.value.field == "reward.url"


class Slow(HttpReward):
    """An endpoint whose tests of a trajectory take a minute each."""

    async def _post(self, body: bytes) -> tuple[bool, bytes]:
        await asyncio.sleep(60)
        return False, b'{"reward": 1}'


@pytest.mark.parametrize("votes", [1, 3])
def test_the_time_of_a_call_begins_when_it_has_a_slot_and_what_it_waited_is_reported(votes: int) -> None:
    async def scenario() -> None:
        reward = Slow("http://127.0.0.1:1", concurrency=32, timeout=61.0)
        asked = reward if votes == 1 else MajorityVote(reward, votes)
        scores = await asyncio.gather(*(score_of(asked, TRAJECTORY, 120.0) for _ in range(65)))
        assert scores == [1.0] * 65
        assert reward.counts.retries == 0
        assert reward.stats()["longest_queued"] >= 120
        await reward.close()

    virtual_run(scenario())


def test_a_simulated_reward_that_waits_for_a_slot_is_not_late() -> None:
    config = load_config(None, ["sim.reward_slots=1", "sim.reward_seconds=60"])

    async def scenario() -> None:
        reward = SimReward(config)
        assert len(await asyncio.gather(*(score_of(reward, TRAJECTORY, 120.0) for _ in range(5)))) == 5

    virtual_run(scenario())


@pytest.mark.parametrize(("url", "slots"), [("", 2), ("http://127.0.0.1:1/", 32)])
def test_no_more_calls_are_sent_to_the_host_of_a_run_than_it_runs_at_once(
    url: str, slots: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    started: list[Any] = []

    class Host:
        url, token = "http://127.0.0.1:2/", "t"

        def __init__(self, *_: Any, **options: Any) -> None:
            started.append(options)

        async def start(self) -> None: ...

        async def stop(self) -> None: ...

    async def scenario() -> None:
        monkeypatch.setattr(function_hosts, "RewardHost", Host)
        monkeypatch.setattr(function_hosts.os, "cpu_count", lambda: 1)
        config = load_config(None, [f"reward.url={url}"])
        folder: Any = SimpleNamespace(path=tmp_path, logs=tmp_path)
        async with AsyncExitStack() as stack:
            events = EventLog(MemorySink(), asyncio.get_running_loop().time)
            rewards = await function_hosts.start_reward(
                config, make_task(config), Keeper(events), stack, folder, events
            )
            reward: Any = rewards.function
            assert reward._slots._value == slots
            assert [options["concurrency"] for options in started] == ([] if url else [config.reward.concurrency])
            assert reward._timeout == config.reward.call_seconds(False) + (0.0 if url else WAIT_SECONDS)

    asyncio.run(scenario())
