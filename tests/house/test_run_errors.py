"""No trajectory, reward or agent ends a run: what may is a list, and anything else is raised here at every seam."""

from __future__ import annotations

import ast
import asyncio
import itertools
import json
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from orchestrator import rollout
from orchestrator.agents.agent_manager import AgentManager
from orchestrator.agents.agent_program import AgentProgram
from orchestrator.api import (
    CommandError,
    ConfigError,
    GenerationRequest,
    Observation,
    RetryableError,
    RunError,
    Sampling,
    StepResult,
    TrajectoryError,
)
from orchestrator.config import load_config
from orchestrator.envs import Episode
from orchestrator.sim.simulated_run import SimResult, simulate
from orchestrator.sim.simulated_worker import SimWorker
from orchestrator.sim.twins import SimEnvironment, SimReward
from tests.agents import test_agent_program as agents

ROOT = Path(__file__).parents[2] / "orchestrator"
# Who may raise a RunError in the rooms that trajectories pass through: what no trajectory can bring about, and all would meet.
MAY_END_A_RUN = {
    "agents/openai_endpoint.py": {"_start"},  # the port is taken
    "environments/environment_pool.py": {
        "_take",
        "close",
        "_start_failed",
        "_done",
        "done",
    },  # no environment can be started
    "manager_shards/shard_managers.py": {
        "_serve",  # no engine is left that could answer
        "_keep",  # no shard of managers is left
        "_raise_for",  # what a shard says of one of the others
    },
    "rewards/host_launch.py": {"base_url"},  # the run's own servers, when they are started
    "rewards/ray_serve.py": {"url", "start", "stop"},
    "rewards/reward_client.py": {"call_reward"},  # a refused token, or an address without a function
    "sandbox/workspace.py": {"check_fresh"},  # an episode of coding that does not begin with the task's files
    "envs.py": {"next_prompt"},  # no prompts, or a task that fails to give one
    "rollout.py": {
        "_start_member",
        "done",
        "_member_done",
        "_note_failure",
    },  # our own defect; nothing ends well
}


class Unspeakable(Exception):
    def __repr__(self) -> str:
        raise ValueError("no repr")

    __str__ = __repr__


class Foreign(BaseException):
    """Not even an Exception."""


def everything() -> list[BaseException]:
    return [
        ValueError("x"), KeyError("x"), OSError(24, "Too many open files"), MemoryError(), RecursionError(), AssertionError(),
        StopAsyncIteration(), UnicodeDecodeError("utf-8", b"\xff", 0, 1, "x"), OverflowError(), TimeoutError(), SystemExit(3),
        KeyboardInterrupt(), Foreign(), Unspeakable(), EOFError(), ConnectionResetError(), RetryableError("x"),
        ConfigError("a", 1, "b"), CommandError("released", "x"), TrajectoryError("strange", "x"), asyncio.CancelledError(),
        asyncio.InvalidStateError(), json.JSONDecodeError("x", "y", 0),
    ]  # fmt: skip


def test_who_may_raise_a_run_error_is_a_list() -> None:
    rooms = ("agents", "rewards", "tasks", "environments", "sandbox", "manager_shards")
    files = [file for room in rooms for file in sorted((ROOT / room).rglob("*.py"))]
    found: dict[str, set[str]] = {}
    for file in [*files, ROOT / "envs.py", ROOT / "rollout.py"]:
        for function in ast.walk(ast.parse(file.read_text())):
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef) and _makes_one(function):
                found.setdefault(str(file.relative_to(ROOT)), set()).add(function.name)
    assert found == MAY_END_A_RUN


def _makes_one(function: ast.AST) -> bool:
    calls = (node.func for node in ast.walk(function) if isinstance(node, ast.Call))
    return any(isinstance(name, ast.Name) and name.id == "RunError" for name in calls)


def run(*overrides: str) -> SimResult:
    small = ("run.steps=3", "rollout.environments=32", "rollout.group_size=4", "rollout.groups_per_step=4")
    more = ("evaluation.prompts=4", "rollout.trajectory_timeout=60.0", *overrides)
    return simulate(load_config(None, ["run.mode=async", *small, *more]), strict=False)


def steps_of(result: SimResult) -> int:
    assert result.violations == []
    assert result.ledger["in_flight"] == 0
    return sum(b'"kind":"step"' in line for line in result.events.splitlines())


class Raising:
    """Every so many calls another of all errors, and what is not a number."""

    def __init__(self, right: Any, every: int, answers: tuple[object, ...] = ()) -> None:
        self.right, self.every, self.calls = right, every, 0
        self.wrong: list[object] = [*everything(), *answers]
        self.met = 0

    async def __call__(self, owner: Any, argument: Any) -> Any:
        self.calls += 1
        if self.calls % self.every == 0 and self.met < len(self.wrong):
            self.met += 1
            bad = self.wrong[self.met - 1]
            if isinstance(bad, BaseException):
                raise bad
            return bad
        return await self.right(owner, argument)

    def method(self) -> Any:
        async def called(owner: Any, argument: Any) -> Any:
            return await self(owner, argument)

        return called


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("seam", ["reset", "step", "score"])
def test_whatever_is_raised_there_costs_one_trajectory(seam: str, shards: int, monkeypatch: pytest.MonkeyPatch) -> None:
    owner: Any = SimReward if seam == "score" else SimEnvironment
    answers: tuple[object, ...] = (None, "7", True, 1 << 2000, 10**5000, [], object(), Unspeakable())
    if seam == "reset":
        answers = (None, "text", 7, *map(Observation, (Unspeakable(), [1, Unspeakable()], [10**5000], {})))  # type: ignore[arg-type]
    elif seam == "step":
        seen, odd = Observation((1,)), (10**5000, Unspeakable(), float("nan"))
        answers = (None, "text", 7, Unspeakable(), *(StepResult(seen, reward, False, False) for reward in odd))  # type: ignore[arg-type]
        answers += (StepResult(seen, 0.0, Unspeakable(), False), StepResult(Unspeakable(), 0.0, False, False))  # type: ignore[arg-type]
    raising = Raising(getattr(owner, seam), 2 if seam == "score" else 3, answers)
    monkeypatch.setattr(owner, seam, raising.method())
    result = run(f"rollout.shards={shards}")
    assert steps_of(result) == 3
    assert raising.met == len(raising.wrong)


def test_whatever_causes_environments_name_they_end_no_run_and_are_not_counted_one_by_one_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    right, calls = SimEnvironment.step, itertools.count()

    async def step(self: SimEnvironment, action: Any) -> Any:
        if (number := next(calls)) % 6 == 0:
            raise TrajectoryError(f"cause_{number}" if number % 12 else "")
        return await right(self, action)

    monkeypatch.setattr(SimEnvironment, "step", step)
    monkeypatch.setattr(rollout, "MANY", 4)
    result = run()
    assert steps_of(result) == 3
    causes = result.ledger["failed_by_cause"]
    assert len(causes) == 5
    assert causes["other_cause"] > 1
    assert causes["unnamed"] > 1


@pytest.mark.parametrize("shards", [1, 2])
def test_an_environment_that_says_no_text_as_its_version_costs_one_trajectory(
    shards: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = itertools.count()
    said = property(lambda self: "sim 1" if next(calls) % 8 else "\ud800")
    monkeypatch.setattr(SimEnvironment, "version", said)
    assert steps_of(run(f"rollout.shards={shards}")) == 3


@pytest.mark.parametrize("shards", [1, 2])
def test_a_request_that_every_worker_refuses_costs_its_trajectory_and_no_worker(
    shards: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    right, refused = SimWorker.add, set()

    async def add(self: SimWorker, requests: Sequence[GenerationRequest]) -> None:
        for request in requests:
            if zlib.crc32(request.trajectory_id.encode()) % 8 == 0:
                refused.add(request.trajectory_id)
                raise CommandError("invalid_request", f"{request.request_id}: its context is another")
        await right(self, requests)

    monkeypatch.setattr(SimWorker, "add", add)
    result = run(f"rollout.shards={shards}")
    assert steps_of(result) == 3
    assert refused
    assert result.ledger["failed_by_cause"] == {"generation_error": len(refused)}
    assert b'"kind":"recovered"' not in result.events


def test_a_reward_may_end_the_run_only_by_a_run_error(monkeypatch: pytest.MonkeyPatch) -> None:
    async def score(self: SimReward, trajectory: Any) -> float:
        raise RunError("the reward endpoint refuses to score")

    monkeypatch.setattr(SimReward, "score", score)
    [reason] = run().violations
    assert "refuses to score" in reason


def test_whatever_an_agents_start_raises_costs_one_trajectory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = agents.task_of(tmp_path, "pass")
    wrong = [error for error in everything() if not isinstance(error, SystemExit | KeyboardInterrupt)]  # ours to raise

    async def scenario() -> list[str]:
        causes = []
        for error in wrong:

            async def fails(*_: object, error: BaseException = error, **__: object) -> Any:
                raise error

            monkeypatch.setattr(AgentProgram, "run", fails)
            manager = AgentManager(
                task, agents.EchoProxy(), step_timeout=5.0, trajectory_timeout=5.0, is_stale=lambda _: False
            )
            episode = Episode("t0", "g0", next(task.prompts("train", 0)), 0.0)
            try:
                await manager.play(episode, Sampling(16, stop_token_ids=(task.end_id,)))
            except TrajectoryError as failed:
                causes.append(failed.cause)
            except asyncio.CancelledError:
                causes.append("cancelled")
        return causes

    assert len(asyncio.run(scenario())) == len(wrong)


def test_a_defect_where_a_trajectory_ends_ends_the_run_and_does_not_let_it_wait_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """asyncio only writes down what a done-callback raises."""

    def untrained(self: rollout.Rollout, trajectory: Any, state: str, cause: str) -> None:
        raise KeyError("a defect of ours")

    async def step(self: SimEnvironment, action: Any) -> Any:
        raise TrajectoryError("strange", "x")

    monkeypatch.setattr(rollout.Rollout, "_untrained", untrained)
    monkeypatch.setattr(SimEnvironment, "step", step)
    assert any("the end of trajectory " in line and "a defect of ours" in line for line in run().violations)
