"""Adaptive timeouts over real code in the real sandbox: a case is cut at its limit whatever the code does, correct answers
set the limits of the next ones, and a checkpoint keeps them."""

from __future__ import annotations

import asyncio
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from orchestrator.api import ConfigError, Prompt, Trajectory, TrajectoryError, Turn
from orchestrator.checkpoint import Checkpoints, CheckpointState
from orchestrator.config import load_config
from orchestrator.events import MemorySink
from orchestrator.ledger import Ledger
from orchestrator.observe.report.feature_sections import environments
from orchestrator.observe.report.run_log import RunLog
from orchestrator.policies.batching.trajectory_filters import FilterChain
from orchestrator.policies.episodes.adaptive_timeouts import AdaptiveTimeouts, CaseTime
from orchestrator.rewards.code_judge import CaseLimits, HiddenTests, JudgedCase, Verdict, judge_cases
from orchestrator.rewards.host_launch import RewardHost
from orchestrator.rewards.reward_client import HttpReward
from orchestrator.runtime import function_hosts as scoring
from orchestrator.runtime import preflight
from orchestrator.runtime.resume import rewind
from orchestrator.sandbox import Sandbox
from orchestrator.sim import simulated_run as sim_run
from orchestrator.tasks import coding_problems
from orchestrator.tasks.text_rewards import coding_tests
from orchestrator.tasks.vocabulary import CHARACTERS

pytestmark = pytest.mark.slow

needs_sandbox = pytest.mark.skipif(shutil.which("bwrap") is None, reason="needs bubblewrap")
TESTS = HiddenTests("f", [JudgedCase([1], 2), JudgedCase([2], 3), JudgedCase([3], 4)])
RIGHT = "def f(x):\n return x + 1"
STUBBORN = """
import os, signal, time
for number in range(1, 65):
    try:
        signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError):
        pass
def f(x):
    if x == 1:
        return 2
    if os.fork() == 0:
        while True:
            pass
    while True:
        time.sleep(1)
"""


def judged(solution: str, limits: CaseLimits) -> tuple[Verdict, list[CaseTime]]:
    return asyncio.run(judge_cases(Sandbox(slots=1), solution, TESTS, limits))


@needs_sandbox
def test_a_case_that_never_ends_is_cut_at_its_own_limit_and_ends_the_answer() -> None:
    verdict, times = judged(STUBBORN, CaseLimits([20.0, 0.5], 20.0, 60.0))
    assert not verdict.all_passed
    assert verdict.detail == "in case 2: wall limit"
    assert [(time.limit, time.cut) for time in times] == [(20.0, False), (0.5, True)]
    assert 0.5 <= times[1].seconds < 20.0


@needs_sandbox
def test_a_right_answer_passes_and_a_wrong_one_does_not_and_each_case_has_its_time() -> None:
    verdict, times = judged(RIGHT, CaseLimits([], 20.0, 60.0))
    assert verdict.all_passed
    assert len(times) == 3
    assert all(0 < time.seconds < 20.0 and time.limit == 20.0 and not time.cut for time in times)
    wrong, _ = judged("def f(x):\n return x + (x < 3)", CaseLimits([], 20.0, 60.0))
    assert wrong.passed == (True, True, False)
    raised, times = judged("def f(x):\n raise ValueError", CaseLimits([], 20.0, 60.0))
    assert (raised.detail, len(times)) == ("in case 1: no answer", 1)


@needs_sandbox
def test_all_cases_together_have_a_limit_too() -> None:
    verdict, times = judged("import time\ndef f(x):\n time.sleep(0.4)\n return x + 1", CaseLimits([], 20.0, 0.6))
    assert not verdict.all_passed
    assert len(times) < 3


@pytest.mark.parametrize("wrong", [0, -1.0, float("nan"), float("inf"), "2", True, None])
def test_limits_that_are_none_are_refused(wrong: Any) -> None:
    payload = {"task": "coding", "prompt": "line 3 4", "actions": [list(CHARACTERS.turn("def f(x):\n return 1"))]}
    with pytest.raises(ValueError, match="seconds above 0"):
        coding_tests({**payload, "timeouts": {"cases": [wrong], "other": 30.0, "whole": 120.0}})


@needs_sandbox
@pytest.mark.long
def test_what_right_answers_took_cuts_the_endless_ones_that_follow_over_the_whole_way() -> None:
    """Coding problems, the function host, HTTP, the sandbox."""
    name = "line 3 4"
    solution = coding_problems.problem(name).solution
    endless = "def f(x):\n while 1:\n  pass"

    def trajectory(said: str) -> Trajectory:
        action = CHARACTERS.turn(said)
        turn = Turn((2,), action, (0.0,) * len(action), ((0, len(action)),))
        return Trajectory("t", "g", "coding", Prompt("key", "coding", 0, name), (turn,), None, "1", 0, False)

    async def whole() -> None:
        host = RewardHost("orchestrator.tasks.text_rewards:coding_tests", timeout=200.0)
        await host.start()
        timeouts = AdaptiveTimeouts(1.5, 1.0, 6.0)
        reward = HttpReward(host.url, token=host.token, timeouts=timeouts, whole=180.0, timeout=200.0)
        try:
            assert await reward.score(trajectory(endless)) == 0.0
            assert (timeouts.counts.cut_at_most, timeouts.counts.cut_early) == (1, 0)  # nobody had solved it
            assert await reward.score(trajectory(solution)) == 1.0
            assert len(timeouts.limits("coding/key")) == coding_problems.TESTS
            assert await reward.score(trajectory(endless)) == 0.0
            assert (timeouts.counts.cut_at_most, timeouts.counts.cut_early) == (1, 1)
            assert await reward.score(trajectory(solution)) == 1.0
            assert reward.stats()["timeouts"] == asdict(timeouts.counts)
        finally:
            await reward.close()
            await host.stop()

    asyncio.run(whole())


@pytest.mark.parametrize(
    "cases", ["many", [1.0], [{"seconds": 1.0}], [{"seconds": float("nan"), "limit": 1, "cut": True}]]
)
def test_run_times_that_are_none_are_an_error_of_the_function(cases: Any) -> None:
    class Answering(HttpReward):
        async def call(self, event: Any) -> Any:
            assert event["timeouts"] == {"cases": [], "other": 30.0, "whole": 120.0}
            return {"reward": 1.0, "correct": True, "cases": cases}

    turn = Turn((2,), (3,), (0.0,), ((0, 1),))
    trajectory = Trajectory("t", "g", "x", Prompt("k", "x", 0, ""), (turn,), None, "1", 0, False)
    timeouts = AdaptiveTimeouts()
    with pytest.raises(TrajectoryError) as caught:
        asyncio.run(Answering("http://127.0.0.1:1/", timeouts=timeouts).score(trajectory))
    assert caught.value.cause == "reward_error"
    assert timeouts.limits("x/k") == []


def test_a_checkpoint_keeps_what_right_answers_took_and_older_ones_have_none(tmp_path: Path) -> None:
    timeouts = AdaptiveTimeouts()
    timeouts.record_times("coding/a", [CaseTime(4.0, 30.0), CaseTime(0.1, 30.0)], correct=True)
    checkpoints = Checkpoints(tmp_path, 2)
    checkpoints.commit(checkpoints.begin(1), CheckpointState(1, 1, 0, 5.0, (), run_times=timeouts.state()))

    class Nothing:
        def lines(self) -> list[str]:
            return []

        def keep(self, lines: int) -> None: ...

        def discard_after(self, steps_done: int) -> None: ...

    resumed = rewind(checkpoints, Ledger(MemorySink(), lambda: 0.0), Nothing(), Nothing(), 1)
    restored = AdaptiveTimeouts()
    restored.restore(resumed.position.run_times)
    assert restored.limits("coding/a") == [6.0, 2.0]
    older = CheckpointState(1, 1, 0, 5.0, ())
    assert older.run_times == {}


def test_a_resumed_run_gets_back_its_run_times_and_its_filters_what_they_had_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A simulated run from a position that a resume would give it, and what its own checkpoints then hold."""
    timeouts, recalled = AdaptiveTimeouts(), []
    turn = Turn((2,), (3,), (0.0,), ((0, 1),))
    kept = Trajectory("t", "g", "x", Prompt("k", "x", 0, ""), (turn,), 1.0, "1", 0, False)
    start = sim_run._Simulation._start

    async def resumed(self: Any, *arguments: Any) -> Any:
        parts, position = await start(self, *arguments)
        parts.timeouts, position.run_times, position.kept = timeouts, {"coding/a": [4.0]}, (kept,)
        return parts, position

    monkeypatch.setattr(sim_run._Simulation, "_start", resumed)
    monkeypatch.setattr(FilterChain, "recall", lambda self, trajectories: recalled.append(tuple(trajectories)))
    small = ["run.steps=1", "rollout.groups_per_step=2", "rollout.group_size=2", "evaluation.prompts=2"]
    sim_run.simulate(load_config(None, [*small, "rollout.environments=8", "sim.fault_rate=0.000001"]), tmp_path)
    assert recalled[0] == (kept,)
    assert timeouts.limits("coding/a") == [6.0]
    found = Checkpoints(tmp_path / "checkpoints", 2).newest()
    assert found is not None
    assert found[1].run_times == {"coding/a": [4.0]}


def test_the_config_says_how_long_a_call_may_run() -> None:
    fixed = load_config(None, ["task.name=coding", "task.heldout_maps=20", "reward.timeout=50.0"])
    task = preflight.make_task(fixed)
    assert scoring.adaptive_timeouts(fixed) is None
    assert scoring.call_seconds(fixed, task) == 50.0
    adaptive = load_config(
        None,
        [
            "task.name=coding",
            "task.heldout_maps=20",
            "reward.timeout=adaptive",
            "reward.adaptive={factor=2.0, most=20.0}",
        ],
    )
    policy = scoring.adaptive_timeouts(adaptive)
    assert policy is not None
    assert (policy.factor, policy.least, policy.most) == (2.0, 2.0, 20.0)
    assert scoring.call_seconds(adaptive, task) == 140.0
    nim = load_config(None, ["task.name=nim", "reward.timeout=adaptive"])
    assert scoring.call_seconds(nim, preflight.make_task(nim)) == 2.0  # a rule without code


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("reward.adaptive={factor=0.5}", "at least 1"),
        ("reward.adaptive={least=5.0, most=3.0}", "must be between"),
        ("reward.adaptive={whole=10.0}", "must be between"),
        ("reward.timeout=sometimes", "adaptive"),
        (
            'reward={timeout="adaptive", judge={url="http://x/v1", model="m", criterion="c"}}',
            "a judge has no test cases",
        ),
    ],
)
def test_limits_that_make_no_sense_are_refused(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(None, [override])


def test_the_report_shows_what_was_cut_early_and_what_at_the_fixed_limit(tmp_path: Path) -> None:
    run = RunLog(tmp_path)
    counts = {"cases": 1234, "adaptive": 1100, "cut_early": 77, "cut_at_most": 5, "seconds": 90.0, "saved": 2000.0}
    run.rewards = {"calls": 1, "timeouts": counts}
    page = environments(run)
    for number in ("1,234", "1,100", "77", "5"):
        assert f">{number}<" in page, number
