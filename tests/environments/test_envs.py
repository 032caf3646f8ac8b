"""EnvManager: whatever an environment does ends one trajectory, with a cause."""

import asyncio
import contextlib
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from orchestrator.api import (
    Completion,
    EnvironmentTemplate,
    GenerationRequest,
    Observation,
    Prompt,
    Sampling,
    StepResult,
    TrajectoryError,
)
from orchestrator.environments.inprocess import prepared_session
from orchestrator.envs import EnvManager, Episode, StaleTrajectory, reward_of_episode

PROMPT = Prompt("key", "toy", 3, "payload")
SAMPLING = Sampling(2, stop_token_ids=(1,))


class Toy:
    """Three turns, then done; ``misbehave`` replaces what ``step`` does."""

    version = "toy 1"

    def __init__(self, misbehave: Callable[[], object] | None, on_reset: Callable[[], object] | None) -> None:
        self.misbehave, self.on_reset = misbehave, on_reset
        self.turn = 0
        self.closed = False

    async def reset(self, prompt: Prompt) -> Observation:
        if self.on_reset is not None:
            answer = self.on_reset()
            return await answer if asyncio.iscoroutine(answer) else answer  # type: ignore[return-value]
        return Observation((2, 3))

    async def step(self, action_ids: tuple[int, ...]) -> StepResult:
        if self.misbehave is not None:
            answer = self.misbehave()
            return await answer if asyncio.iscoroutine(answer) else answer  # type: ignore[return-value]
        self.turn += 1
        return StepResult(Observation((4,)), 0.0, done=self.turn == 3)

    async def close(self) -> None:
        self.closed = True


class ToyTask:
    name = "toy"
    vocabulary: Sequence[str] = tuple("abcdefgh")
    pad_id, end_id, max_turns, max_response_tokens, max_context_tokens = 0, 1, 5, 2, 40

    def __init__(
        self, misbehave: Callable[[], object] | None = None, on_reset: Callable[[], object] | None = None
    ) -> None:
        self.made: list[Toy] = []
        self.misbehave, self.on_reset = misbehave, on_reset

    def prompts(self, split: str, seed: int):  # type: ignore[no-untyped-def]
        yield PROMPT

    def environment(self) -> Toy:
        self.made.append(Toy(self.misbehave, self.on_reset))
        return self.made[-1]


class EchoProxy:
    def __init__(self, finish: str = "stop", delay: float = 0.0) -> None:
        self.requests: list[GenerationRequest] = []
        self.finish, self.delay = finish, delay
        self.faults: list[str] = []

    async def generate(self, request: GenerationRequest) -> Completion:
        self.requests.append(request)
        await asyncio.sleep(self.delay)
        return Completion(request.request_id, (5, 1), (-0.5, -0.1), ((4, 2),), self.finish)

    def note_fault(self, what: str, detail: str) -> None:
        self.faults.append(what)


def play(task: ToyTask, proxy: EchoProxy, stale: bool = False, limit: float = 5.0, step: float = 0.2) -> Episode:
    async def run() -> Episode:
        manager = EnvManager(task, proxy, step_timeout=step, trajectory_timeout=limit, is_stale=lambda _: stale)  # type: ignore[arg-type]
        episode = Episode("t0", "g0", PROMPT, 0.0)
        try:
            await manager.play(episode, SAMPLING)
        finally:
            assert task.misbehave is stubborn or all(environment.closed for environment in task.made)
        return episode

    return asyncio.run(run())


def test_the_trained_tokens_are_exactly_those_the_policy_saw() -> None:
    proxy = EchoProxy()
    trajectory = play(ToyTask(), proxy).trajectory(1.0, reward=1.0)
    assert trajectory.token_ids == (2, 3, 5, 1, 4, 5, 1, 4, 5, 1)
    assert trajectory.loss_mask == (0, 0, 1, 1, 0, 1, 1, 0, 1, 1)
    assert trajectory.logprobs == (0.0, 0.0, -0.5, -0.1, 0.0, -0.5, -0.1, 0.0, -0.5, -0.1)
    assert [r.token_ids for r in proxy.requests] == [(2, 3), (2, 3, 5, 1, 4), (2, 3, 5, 1, 4, 5, 1, 4)]
    assert trajectory.versions == ((4, 6),)
    assert trajectory.env_version == "toy 1"


async def never() -> None:
    await asyncio.Event().wait()


def boom() -> None:
    raise ZeroDivisionError("inside the environment")


class Unspeakable(Exception):
    def __repr__(self) -> str:
        raise ValueError


def unspeakable() -> None:
    raise Unspeakable


async def stubborn() -> None:
    """Never returns, whatever is done to it, until long after."""
    for _ in range(5):
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(0.5)


async def late() -> StepResult:
    """Answers after it was cancelled."""
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.sleep(100)
    return StepResult(Observation((4,)), 1.0, True)


@pytest.mark.parametrize(
    ("misbehave", "cause"),
    [
        (boom, "environment_error"),
        (never, "environment_timeout"),
        (lambda: StepResult(Observation((4,)), math.nan, False), "environment_not_finite"),
        (lambda: "text", "environment_output"),
        (lambda: StepResult(Observation((4, 99)), 0.0, False), "environment_output"),
        (lambda: StepResult(Observation((4,) * 41), 0.0, False), "environment_output"),
        (lambda: StepResult(Observation(()), 0.0, False), "environment_output"),
        (lambda: StepResult(Observation((4,)), "1", False), "environment_output"),
        (lambda: StepResult(Observation((4,)), None, False), "environment_output"),
        (lambda: StepResult(Observation((4,)), 10**400, False), "environment_not_finite"),
        (lambda: StepResult(Observation((4,)), 0.0, "yes"), "environment_output"),
        (lambda: StepResult(None, 0.0, False), "environment_output"),
        (lambda: StepResult(Observation(None), 0.0, False), "environment_output"),
        (lambda: StepResult(Observation((4, 2.5)), 0.0, False), "environment_output"),
        (sys.exit, "environment_error"),
        (unspeakable, "environment_error"),
        (stubborn, "environment_timeout"),
        (late, "environment_timeout"),
    ],
)
def test_each_misbehaviour_of_a_step_has_its_cause(misbehave: Callable[[], object], cause: str) -> None:
    with pytest.raises(TrajectoryError) as caught:
        play(ToyTask(misbehave), EchoProxy())
    assert caught.value.cause == cause


def test_a_reset_that_raises_has_a_cause() -> None:
    with pytest.raises(TrajectoryError, match="environment_error"):
        play(ToyTask(on_reset=boom), EchoProxy())


def test_an_environment_that_is_none_has_a_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    task = ToyTask()
    monkeypatch.setattr(Toy, "step", lambda *_: boom())  # no coroutine: raises when it is called
    with pytest.raises(TrajectoryError, match="environment_error"):
        play(task, EchoProxy())
    monkeypatch.setattr(Toy, "step", None)
    with pytest.raises(TrajectoryError, match="environment_error"):
        play(task, EchoProxy())
    monkeypatch.setattr(Toy, "version", property(lambda _: boom()))
    with pytest.raises(TrajectoryError, match="environment_error"):
        play(task, EchoProxy())
    monkeypatch.setattr(ToyTask, "environment", sys.exit)
    with pytest.raises(TrajectoryError, match="environment_start"):
        play(ToyTask(), EchoProxy())


def slow_from(turn: int, seconds: float = 10.0) -> Callable[[], object]:
    """Steps that earn 0.25 each, until one takes long."""
    count = 0

    async def step() -> StepResult:
        nonlocal count
        count += 1
        if count >= turn:
            await asyncio.sleep(seconds)
        return StepResult(Observation((4,)), 0.25, False)

    return step


@pytest.mark.parametrize("limits", [{"step": 0.05}, {"limit": 0.05}])
@pytest.mark.parametrize("meaning", ["truncated", "partial"])
def test_a_time_limit_means_what_the_task_says(meaning: str, limits: dict[str, float]) -> None:
    task, proxy = ToyTask(slow_from(3)), EchoProxy()
    task.on_timeout = meaning  # type: ignore[attr-defined]
    episode = play(task, proxy, **limits)
    assert episode.truncated
    assert [turn.reward for turn in episode.turns] == [0.25, 0.25, 0.0], "the last action was told the environment too"
    assert episode.turns[-1].action_ids == (5, 1)
    assert episode.earned == (0.5 if meaning == "partial" else None)
    assert proxy.faults == ["environment_timeout" if "step" in limits else "trajectory_timeout"]

    class Asked:
        async def score(self, trajectory: object) -> float:
            return 7.0

    reward = asyncio.run(reward_of_episode(Asked(), episode, 1.0, 1.0))
    assert reward == (0.5 if meaning == "partial" else 7.0)


def test_a_run_s_config_says_what_a_time_limit_means_before_the_task_does() -> None:
    async def run(on_timeout: str | None) -> Episode:
        task = ToyTask(slow_from(2))
        task.on_timeout = "partial"  # type: ignore[attr-defined]
        manager = EnvManager(
            task,
            EchoProxy(),  # type: ignore[arg-type]
            step_timeout=0.05,
            trajectory_timeout=5.0,
            is_stale=lambda _: False,
            on_timeout=on_timeout,  # type: ignore[arg-type]
        )
        episode = Episode("t0", "g0", PROMPT, 0.0)
        await manager.play(episode, SAMPLING)
        return episode

    assert asyncio.run(run(None)).earned == 0.25
    assert asyncio.run(run("truncated")).earned is None
    with pytest.raises(TrajectoryError, match="environment_timeout"):
        asyncio.run(run("failed"))


def test_an_episode_without_a_turn_has_failed_whatever_its_time_limit_means() -> None:
    task = ToyTask(on_reset=never)
    task.on_timeout = "partial"  # type: ignore[attr-defined]
    with pytest.raises(TrajectoryError, match="reset took over"):
        play(task, EchoProxy(), step=0.05)
    task = ToyTask()
    task.on_timeout = "truncated"  # type: ignore[attr-defined]
    with pytest.raises(TrajectoryError, match="trajectory_timeout"):
        play(task, EchoProxy(delay=1.0), limit=0.05)


def test_a_trajectory_over_its_time_limit_ends() -> None:
    with pytest.raises(TrajectoryError, match="trajectory_timeout"):
        play(ToyTask(), EchoProxy(delay=0.2), limit=0.3)


@pytest.mark.parametrize("finish", ["error", "abort"])
def test_a_failed_generation_has_a_cause(finish: str) -> None:
    with pytest.raises(TrajectoryError, match=f"generation_{finish}"):
        play(ToyTask(), EchoProxy(finish))


def test_staleness_is_checked_at_the_turn_boundary() -> None:
    with pytest.raises(StaleTrajectory):
        play(ToyTask(), EchoProxy(), stale=True)


def test_an_answer_that_was_called_back_as_stale_is_no_failure() -> None:
    with pytest.raises(StaleTrajectory):
        play(ToyTask(), EchoProxy("abort"), stale=True)


def test_an_episode_that_does_not_end_is_truncated_at_the_turn_limit_or_the_context() -> None:
    endless = ToyTask(lambda: StepResult(Observation((4,)), 0.0, False))
    episode = play(endless, EchoProxy())
    assert (len(episode.turns), episode.truncated) == (5, True)
    wordy = ToyTask(lambda: StepResult(Observation((4,) * 20), 0.0, False))
    episode = play(wordy, EchoProxy())
    assert (len(episode.turns), episode.truncated) == (2, True)


def test_one_that_is_being_prepared_is_closed_however_often_its_user_is_cancelled() -> None:
    made: list[Any] = []

    class Slow:
        version = "1"
        closed = False

        def __init__(self) -> None:
            made.append(self)

        async def prepare(self, setup: str) -> None:
            await asyncio.sleep(100)

        async def close(self) -> None:
            await asyncio.sleep(0.02)
            self.closed = True

    class Maker:
        def environment(self) -> Slow:
            return Slow()

    async def play() -> None:
        user = asyncio.create_task(prepared_session(Maker(), EnvironmentTemplate(setup="x"), "in-process"))  # type: ignore[arg-type]
        await asyncio.sleep(0.01)
        for _ in range(3):
            user.cancel()
            await asyncio.sleep(0.001)
        with pytest.raises(asyncio.CancelledError):
            await user

    asyncio.run(play())
    assert made[0].closed


def test_one_is_closed_although_who_began_to_end_it_was_cancelled() -> None:
    made: list[Any] = []

    class Stubborn:
        version = "1"
        closed = 0

        def __init__(self) -> None:
            made.append(self)

        async def step(self, action_ids: tuple[int, ...]) -> StepResult:
            try:
                await asyncio.sleep(100)
            finally:
                await asyncio.sleep(0.01)  # the end of the call takes a while
            raise AssertionError

        async def close(self) -> None:
            self.closed += 1

    class Maker:
        def environment(self) -> Stubborn:
            return Stubborn()

    async def play() -> None:
        session = await prepared_session(Maker(), EnvironmentTemplate(), "in-process")  # type: ignore[arg-type]
        user = asyncio.create_task(session.step((1,)))
        await asyncio.sleep(0.001)
        first = asyncio.create_task(session.kill())
        await asyncio.sleep(0.001)
        for task in (user, first):  # as a pool does that closes meanwhile
            task.cancel()
        await asyncio.gather(user, first, return_exceptions=True)
        await session.kill()
        await session.kill()

    asyncio.run(play())
    assert made[0].closed == 1
