"""Whole runs in virtual time over rewards and environments that do all that is wrong: masked, counted, and the run goes on; or,
when nothing is right any more, it stops and says why."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from orchestrator.api import Observation, Prompt, RetryableError, StepResult, Trajectory, TrajectoryError
from orchestrator.config import Config, load_config
from orchestrator.rollout import Rollout
from orchestrator.sim.simulated_run import SimResult, simulate
from orchestrator.sim.twins import SimEnvironment, SimReward


def config(*overrides: str) -> Config:
    small = (
        "run.steps=3",
        "rollout.environments=32",
        "rollout.group_size=4",
        "rollout.groups_per_step=4",
        "evaluation.prompts=4",
    )
    return load_config(None, ["run.mode=async", "rollout.trajectory_timeout=60.0", *small, *overrides])


def failed(result: SimResult) -> dict[str, int]:
    steps = [json.loads(line) for line in result.events.splitlines() if b'"kind":"step"' in line]
    causes: dict[str, int] = steps[-1]["ledger"]["failed_by_cause"]
    assert result.ledger["started"] == sum(
        count for name, count in result.ledger.items() if isinstance(count, int) and name != "started"
    )
    assert len(steps) == 3
    return causes


async def _never() -> float:
    await asyncio.Event().wait()
    raise AssertionError


def _raises(error: Exception) -> Callable[[], Awaitable[float]]:
    async def score() -> float:
        raise error

    return score


async def _nan() -> float:
    return math.nan


async def _infinite() -> float:
    return -math.inf


async def _large() -> float:
    return 1e200


WRONG: tuple[tuple[Callable[[], Awaitable[float]], str], ...] = (
    (_raises(RetryableError("down")), "reward_unavailable"),
    (_never, "reward_timeout"),
    (_nan, "reward_not_finite"),
    (_infinite, "reward_not_finite"),
    (_large, "reward_too_large"),
    (_raises(TrajectoryError("reward_error", "the answer has more than 1048576 B")), "reward_error"),
)


def test_rewards_that_are_down_slow_huge_or_wrong_are_masked_and_counted_and_the_run_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    right = SimReward.score
    seen = 0

    async def score(self: SimReward, trajectory: Trajectory) -> float:
        nonlocal seen
        seen += 1
        if seen % 3:
            return await right(self, trajectory)
        return await WRONG[seen // 3 % len(WRONG)][0]()

    monkeypatch.setattr(SimReward, "score", score)
    causes = failed(simulate(config()))
    assert set(causes) == {cause for _, cause in WRONG}


def test_a_reward_url_that_is_down_for_good_ends_the_run_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    async def score(self: SimReward, trajectory: Trajectory) -> float:
        raise RetryableError("http://127.0.0.1:9/ failed 4 times; the last time: connection refused")

    told: list[str] = []
    note = Rollout._note_failure

    def noted(self: Rollout, error: TrajectoryError) -> None:
        note(self, error)
        told.append(self.waits())

    monkeypatch.setattr(Rollout, "_note_failure", noted)
    monkeypatch.setattr(SimReward, "score", score)
    result = simulate(config(), strict=False)
    assert "failed" not in told[14]
    assert "; 16 in a row failed, the last: reward_unavailable: http" in told[15], "long before the run ends of it"
    [reason] = result.violations
    assert "128 trajectories in a row failed, none was scored; the last: reward_unavailable" in reason
    assert "connection refused" in reason
    assert result.ledger["in_flight"] == 0


async def _hangs() -> StepResult:
    await asyncio.Event().wait()
    raise AssertionError


async def _late() -> StepResult:
    """Returns after it was cut off."""
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        await asyncio.sleep(1.0)
    return StepResult(Observation((4,)), 1.0, True)


def _answers(answer: Any) -> Callable[[], Awaitable[Any]]:
    async def step() -> Any:
        if isinstance(answer, BaseException):
            raise answer
        return answer

    return step


BAD: tuple[tuple[Callable[[], Awaitable[Any]], str], ...] = (
    (_answers(StepResult(Observation((2,) * 100_000), 0.0, False)), "environment_output"),
    (_answers("text"), "environment_output"),
    (_answers(StepResult(Observation((4,)), math.nan, False)), "environment_not_finite"),
    (_answers(ZeroDivisionError("inside")), "environment_error"),
    (_answers(SystemExit(3)), "environment_error"),
    (_hangs, "environment_timeout"),
    (_late, "environment_timeout"),
)


@pytest.mark.parametrize("backend", ["in-process", "in-process-pool"])
def test_environments_that_do_all_that_is_wrong_are_masked_and_counted_and_the_run_goes_on(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = SimEnvironment.step
    seen = 0

    async def step(self: SimEnvironment, action_ids: tuple[int, ...]) -> StepResult:
        nonlocal seen
        seen += 1
        if seen % 8:
            return await right(self, action_ids)
        answer: StepResult = await BAD[seen // 8 % len(BAD)][0]()
        return answer

    monkeypatch.setattr(SimEnvironment, "step", step)
    causes = failed(simulate(config(f"environment.backend={backend}", "rollout.environment_step_timeout=20.0")))
    assert set(causes) == {cause for _, cause in BAD}


@pytest.mark.parametrize("backend", ["in-process", "in-process-pool"])
@pytest.mark.parametrize(("limit", "causes"), [("", {"environment_timeout"}), ("400", set())])
def test_a_reset_has_a_limit_of_its_own_and_a_step_keeps_the_shorter_one(
    limit: str, causes: set[str], backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = SimEnvironment.reset
    seen = 0

    async def reset(self: SimEnvironment, prompt: Prompt) -> Observation:
        nonlocal seen
        seen += 1
        await asyncio.sleep(300.0 if seen % 16 == 0 else 0.0)
        return await right(self, prompt)

    monkeypatch.setattr(SimEnvironment, "reset", reset)
    given = [f"environment.backend={backend}", "rollout.trajectory_timeout=500", "environment.reset_tries=1"]
    given += [f"rollout.environment_reset_timeout={limit}"] if limit else []
    assert set(failed(simulate(config(*given)))) == causes
    assert failed(simulate(config(*given, "environment.reset_tries=3"))) == {}, "another environment begins the episode"


def test_environments_that_never_work_end_the_run_with_their_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    async def step(self: SimEnvironment, action_ids: tuple[int, ...]) -> StepResult:
        raise ZeroDivisionError("inside")

    monkeypatch.setattr(SimEnvironment, "step", step)
    result = simulate(config(), strict=False)
    [reason] = result.violations
    assert "in a row failed, none was scored; the last: environment_error: step: ZeroDivisionError" in reason
