"""The buffer in whole simulated runs: its size is bounded, no member holds a group for ever, filters are counted.

On the virtual-time loop; every run is also checked from outside by the simulator's audit.
"""

import json
import math
from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from orchestrator.api import ConfigError, Observation, Prompt, StepResult, Trajectory
from orchestrator.buffer import SampleBuffer
from orchestrator.config import Config, load_config
from orchestrator.policies.batching.staleness import StartGate
from orchestrator.rollout import Rollout
from orchestrator.sim.simulated_run import SimulationFailed, simulate
from orchestrator.sim.twins import SimEnvironment, SimReward


def config(*overrides: str) -> Config:
    small = ["run.steps=4", "rollout.workers=2", "rollout.groups_per_step=3", "rollout.group_size=3"]
    return load_config(None, [*small, "rollout.environments=18", "evaluation.prompts=1", *overrides])


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many trajectories the buffer held after each that came."""
    seen: list[int] = []
    honest = SampleBuffer.put

    def put(self: SampleBuffer, trajectory: Trajectory) -> bool:
        answer = honest(self, trajectory)
        seen.append(self.scored)
        return answer

    monkeypatch.setattr(SampleBuffer, "put", put)
    return seen


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    alpha=st.integers(0, 4),
    group=st.integers(2, 4),
    groups=st.integers(1, 4),
    extra=st.integers(0, 20),
    redundancy=st.sampled_from([(1, 1), (1.5, 1), (1, 1.5), (2, 2)]),
    train=st.sampled_from([1e-4, 1e-2, 1e-1]),
    sigma=st.sampled_from([0.2, 1.5]),
    faults=st.sampled_from([0.0, 0.01]),
    seed=st.integers(0, 9),
)
@pytest.mark.slow
def test_the_buffer_never_holds_more_than_alpha_times_the_environments_and_a_batch(
    sizes: list[int],
    alpha: int,
    group: int,
    groups: int,
    extra: int,
    redundancy: tuple[float, float],
    train: float,
    sigma: float,
    faults: float,
    seed: int,
) -> None:
    """Whatever is fast or slow: with a trainer that is the bottleneck (back-pressure) as with one that starves."""
    members = math.ceil(group * redundancy[1])
    environments = members + extra
    sizes.clear()
    simulate(
        config(
            f"run.mode={'async' if alpha else 'sync'}",
            f"run.seed={seed}",
            f"rollout.alpha={alpha}",
            f"rollout.group_size={group}",
            f"rollout.groups_per_step={groups}",
            f"rollout.environments={environments}",
            f"rollout.redundant_groups={redundancy[0]}",
            f"rollout.redundant_members={redundancy[1]}",
            f"sim.train_seconds_per_token={train}",
            f"sim.environment_seconds_sigma={sigma}",
            f"sim.fault_rate={faults}",
        )
    )
    launched = math.ceil(groups * group * redundancy[0] * members / group)
    assert max(sizes) <= alpha * environments + launched


def test_a_gate_that_does_not_hold_starts_back_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StartGate, "may_start", lambda self, size, busy, waiting, lead: busy + size <= 18)
    with pytest.raises(SimulationFailed, match="in the buffer, which holds"):
        simulate(config("sim.train_seconds_per_token=0.1"))


class Stuck:
    """Makes every ``each``-th environment hang in its first step."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, each: int) -> None:
        self.made = 0
        honest = SimEnvironment.reset
        step = SimEnvironment.step

        async def reset(environment: SimEnvironment, prompt: Prompt) -> Observation:
            environment.hangs = prompt.key.startswith("train") and self.made % each == each - 1  # type: ignore[attr-defined]
            self.made += prompt.key.startswith("train")
            return await honest(environment, prompt)

        async def hang(environment: SimEnvironment, action_ids: tuple[int, ...]) -> StepResult:
            if environment.hangs:  # type: ignore[attr-defined]
                import asyncio

                await asyncio.sleep(1e6)
            return await step(environment, action_ids)

        monkeypatch.setattr(SimEnvironment, "__slots__", (), raising=False)
        monkeypatch.setattr(SimEnvironment, "reset", reset)
        monkeypatch.setattr(SimEnvironment, "step", hang)


SLOW = ("rollout.environment_step_timeout=3000", "rollout.trajectory_timeout=3000", "rollout.environments=36")


def longest_wait(events: bytes) -> float:
    records = [json.loads(line) for line in events.decode().splitlines()]
    return max(e["end"] - e["start"] for e in records if e["kind"] == "stage" and e["stage"] == "get_batch")


def test_a_stuck_member_does_not_hold_its_group_for_longer_than_the_group_timeout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Stuck(monkeypatch, 5)
    without = simulate(config(*SLOW)).events
    assert longest_wait(without) > 2_000  # the trajectory's own limit is all there is
    result = simulate(config(*SLOW, "rollout.group_timeout=60"))
    assert longest_wait(result.events) < 200
    assert result.ledger["ended_by_cause"]["aborted_redundant: group_timeout"] > 0
    assert result.ledger["trained"] > 4 * 3 * 2 - 1


def test_a_redundant_member_takes_the_place_of_a_stuck_one(monkeypatch: pytest.MonkeyPatch) -> None:
    Stuck(monkeypatch, 5)
    result = simulate(config(*SLOW, "rollout.redundant_members=1.6"))
    assert longest_wait(result.events) < 200
    assert result.ledger["ended_by_cause"]["aborted_redundant: surplus"] > 0
    assert result.ledger["trained"] == 4 * 3 * 3  # no group had to shrink


def test_where_too_few_would_be_left_stragglers_are_replaced_while_refills_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Stuck(monkeypatch, 2)
    result = simulate(config(*SLOW, "rollout.group_size=2", "rollout.group_timeout=60", "rollout.member_refills=4"))
    assert result.summary["reason"] == "completed"
    assert longest_wait(result.events) < 4 * 60 + 200
    assert result.ledger["started"] > 4 * 3 * 2 + 4  # members were added to groups that were there


def test_what_is_filtered_is_counted_by_reason_in_the_ledger_and_the_run_goes_on() -> None:
    result = simulate(config("filters.reward_min=0.5", "rollout.member_refills=16", "run.steps=6"))
    counted = result.ledger["ended_by_cause"]
    assert counted["filtered: reward_low"] > 5
    assert sum(n for name, n in counted.items() if name.startswith("filtered")) == result.ledger["filtered"]
    ends = Counter(json.loads(line).get("cause", "") for line in result.journal.decode().splitlines())
    assert ends["reward_low"] == counted["filtered: reward_low"]
    records = [json.loads(line) for line in result.events.decode().splitlines()]
    assert all(e["reward_mean"] == 1.0 for e in records if e["kind"] == "step")


@pytest.mark.parametrize("faults", [0.0, 0.02])
def test_a_balanced_run_comes_to_its_end_though_one_kind_may_never_be_there(
    faults: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every group is easy, and no more than a third of a batch may be: bounded filtering, then whatever there is."""

    async def always(self: SimReward, trajectory: Trajectory) -> float:
        return 1.0

    monkeypatch.setattr(SimReward, "score", always)
    balanced = (
        "filters.balance=difficulty",
        "filters.balance_share=0.3",
        "rollout.max_filtered_groups=5",
        "checkpoint.every=1",
    )
    result = simulate(config(*balanced, f"sim.fault_rate={faults}"))
    assert result.summary["reason"] == "completed"
    assert 0 < result.ledger["ended_by_cause"]["filtered: balance"] <= 5 * 4 * 3 + 30 * (faults > 0)


def test_lag_weights_reach_the_trainer_and_without_a_decay_all_weigh_one(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = ("run.steps=8", "sim.environment_seconds_mean=8", "sim.environment_seconds_sigma=1.5", "rollout.alpha=3")
    slow = (*slow, *SLOW, "rollout.redundant_groups=2")

    def steps(*overrides: str) -> list[dict[str, object]]:
        records = [json.loads(line) for line in simulate(config(*slow, *overrides)).events.decode().splitlines()]
        return [record for record in records if record["kind"] == "step"]

    assert {step["weight_ess"] for step in steps()} == {1.0}
    weighed = steps("rollout.staleness_decay=1.0", "trainer.stream=true")
    mixed = [step for step in weighed if len(step["lag"]) > 1]  # type: ignore[arg-type]
    for step in mixed:
        lags = [int(lag) for lag, count in step["lag"].items() for _ in range(count)]  # type: ignore[attr-defined]
        weights = [math.exp(-lag) for lag in lags]
        expected = sum(weights) ** 2 / (len(weights) * sum(w * w for w in weights))
        assert step["weight_ess"] == pytest.approx(expected, abs=1e-6)
    assert mixed, "this workload has no batch of several lags"


@pytest.mark.parametrize("mode", ["sync_plus", "async"])
def test_the_count_that_the_buffer_keeps_is_what_it_holds_whatever_leaves_it_and_how(
    monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    kept, wrong = SampleBuffer.scored, []

    def checked(self: SampleBuffer) -> int:
        assert isinstance(kept, property)
        assert kept.fget is not None
        said: int = kept.fget(self)
        if said != len(self.stored()):
            wrong.append((said, len(self.stored())))
        return said

    monkeypatch.setattr(SampleBuffer, "scored", property(checked))
    lively = ["rollout.dynamic_sampling=true", "rollout.redundant_groups=2.0", "rollout.redundant_members=1.5"]
    alpha = 1 if mode == "async" else 0
    for rate in (0.0, 0.03):
        simulate(config(*lively, f"run.mode={mode}", f"rollout.alpha={alpha}", f"sim.fault_rate={rate}"))
    assert not wrong


def test_a_batch_launches_what_the_one_before_it_took_with_what_dynamic_sampling_replaced() -> None:
    """ROSE 6: DAPO's concurrency follows from step to step; off, each batch begins with the same."""
    lively = ["run.steps=12", "run.mode=sync_plus", "rollout.alpha=0", "rollout.dynamic_sampling=true"]
    lively += ["rollout.group_size=2", "rollout.environments=48"]

    def played(follows: bool) -> tuple[list[dict[str, float]], float]:
        found = simulate(config(*lively, f"rollout.dynamic_concurrency={str(follows).lower()}"))
        events = [json.loads(line) for line in found.events.decode().splitlines()]
        waits = [event["end"] - event["start"] for event in events if event.get("stage") == "get_batch"]
        return [event for event in events if event["kind"] == "dynamic_sampling"], sum(waits)

    told, quick = played(follows=True)
    assert [event["redundancy"] for event in told] == [
        pytest.approx(1 + event["filtered"] / 3, abs=1e-6) for event in told
    ]
    assert max(event["redundancy"] for event in told) >= 2
    fixed, slow = played(follows=False)
    assert not [event for event in fixed if "redundancy" in event]
    assert quick < 0.6 * slow, "replacements start at once, not one after the other"


def test_a_resumed_run_launches_what_the_batch_before_its_checkpoint_took(monkeypatch: pytest.MonkeyPatch) -> None:
    lives: list[float] = []  # what each began with, over needed
    honest = Rollout.__post_init__

    def made(self: Rollout, life: int, redundancy: float | None, again: tuple[int, ...]) -> None:
        honest(self, life, redundancy, again)
        lives.append(round(self.gate.redundancy, 6))

    monkeypatch.setattr(Rollout, "__post_init__", made)
    killed = ["run.steps=12", "sim.fault_rate=0.02", 'sim.faults=["crash"]', "checkpoint.every=1"]
    follows = ["run.mode=sync_plus", "rollout.alpha=0", "rollout.dynamic_sampling=true", "rollout.environments=48"]
    for seed in range(4):
        found = simulate(config(*killed, *follows, f"run.seed={seed}", "rollout.dynamic_concurrency=true"))
        assert not found.violations
        told: dict[int, float] = {}
        expected = []
        for event in map(json.loads, found.events.decode().splitlines()):
            if event["kind"] == "run_start":
                expected.append(told.get(event["resumed_from"] or -1, 1.0))
            elif event["kind"] == "dynamic_sampling":
                told[event["step"] + 1] = event["redundancy"]
        assert lives == expected
        assert max(lives) >= 2, "killed after a batch that took more"
        lives.clear()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ([], "follows the groups that dynamic sampling replaces"),
        (
            ["rollout.dynamic_sampling=true", "rollout.rounds.enabled=true"],
            "a round decides itself how much it launches",
        ),
    ],
)
def test_concurrency_that_nothing_can_follow_is_refused(given: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=f"rollout.dynamic_concurrency.*{words}"):
        config("rollout.dynamic_concurrency=true", *given)
