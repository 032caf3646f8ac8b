"""The five modes: what each promises about staleness, which is faster, and that none loses a trajectory."""

import asyncio
import json
from collections import Counter
from typing import Any

import pytest

from orchestrator.api import ConfigError, TrajectoryError
from orchestrator.config import Config, load_config
from orchestrator.environments.lockstep import Lockstep
from orchestrator.observe.report.run_log import load_run
from orchestrator.policies.batching import coordination_modes
from orchestrator.rollout import Rollout
from orchestrator.sim.simulated_run import SimResult, simulate
from orchestrator.sim.twins import SimTrainer
from orchestrator.sim.virtual_loop import VirtualTimeLoop
from scripts.bench.micro import ledger_faults

FITTING = [("sync", 0), ("sync_plus", 0), ("one_off", 1), ("areal", 1), ("areal", 2), ("async", 1), ("async", 2)]
FAULT_SEEDS = 6  # a mode; test_sim_run draws the mode of each of its seeds too


def long_tailed(mode: tuple[str, int], seed: int, *overrides: str) -> Config:
    """Environments whose steps differ a hundredfold, a trainer and updates that take time: what the modes differ in."""
    return load_config(
        None,
        [
            f"run.mode={mode[0]}",
            f"rollout.alpha={mode[1]}",
            f"run.seed={seed}",
            "run.steps=6",
            "rollout.workers=2",
            "rollout.groups_per_step=4",
            "rollout.group_size=4",
            "rollout.environments=64",
            "rollout.redundant_groups=1.5",
            "rollout.environment_step_timeout=1000",
            "rollout.trajectory_timeout=1000",
            "evaluation.prompts=2",
            "sim.environment_seconds_mean=4",
            "sim.environment_seconds_sigma=1.2",
            "sim.reward_seconds=2",
            "sim.train_seconds_per_token=0.004",
            "sim.update_seconds=4",
            *overrides,
        ],
    )


def events_of(result: SimResult, kind: str) -> list[dict[str, Any]]:
    every = [json.loads(line) for line in result.events.decode().splitlines()]
    return [event for event in every if event["kind"] == kind]


# -- checkpoints -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", FITTING)
def test_workers_take_the_new_weights_while_the_checkpoint_is_written(
    mode: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = SimTrainer.save

    async def slow(trainer: SimTrainer, folder: str) -> None:
        await asyncio.sleep(1000.0)
        await plain(trainer, folder)

    monkeypatch.setattr(SimTrainer, "save", slow)
    faults = ["sim.fault_rate=0.0001", 'sim.faults=["delay"]']  # with faults there are checkpoints
    result = simulate(long_tailed(mode, 1, "checkpoint.every=1", *faults))
    stages = events_of(result, "stage")
    written = {event["step"]: event for event in stages if event["stage"] == "checkpoint"}
    assert len(written) == 7
    loaded = [event for event in stages if event["stage"] == "update" and event["step"] > 0]
    assert len(loaded) >= 4
    trained = {event["step"]: event["end"] for event in stages if event["stage"] == "train_step"}
    for event in loaded:
        step = max(step for step, end in trained.items() if end <= event["start"]) + 1  # whose weights these are
        if step < 6:  # nobody waits for the last ones
            assert event["end"] < written[step]["end"], (mode, event, written[step])


@pytest.mark.parametrize(("every", "minutes", "expected"), [(0, 0.001, 7), (0, 1e6, 2), (4, 0, 3)])
def test_checkpoints_are_due_by_steps_or_by_minutes(every: int, minutes: float, expected: int) -> None:
    due = [
        f"checkpoint.every={every}",
        f"checkpoint.minutes={minutes}",
        "sim.fault_rate=0.0001",
        'sim.faults=["delay"]',
    ]
    result = simulate(long_tailed(("async", 1), 1, *due))
    assert sum(event["stage"] == "checkpoint" for event in events_of(result, "stage")) == expected


def test_no_checkpoint_at_all_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"checkpoint\.every = 0: with checkpoint\.minutes = 0 there would be none"):
        load_config(None, ["checkpoint.every=0", "checkpoint.minutes=0"])


# -- the table ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", FITTING)
def test_what_fits_together_is_accepted(mode: tuple[str, int]) -> None:
    config = load_config(None, [f"run.mode={mode[0]}", f"rollout.alpha={mode[1]}"])
    assert coordination_modes.coordination_mode(config.run.mode, config.rollout.alpha).alpha == mode[1]


@pytest.mark.parametrize(
    ("mode", "alpha", "fix"),
    [
        ("sync", 1, "set rollout.alpha=0"),
        ("sync_plus", 2, "set rollout.alpha=0"),
        ("one_off", 0, "set run.mode='sync' or 'sync_plus'"),
        ("one_off", 2, "set rollout.alpha=1"),
        ("areal", 0, "set run.mode='sync' or 'sync_plus'"),
        ("async", 0, "set run.mode='sync' or 'sync_plus'"),
    ],
)
def test_an_alpha_that_is_not_the_modes_is_one_clear_error(mode: str, alpha: int, fix: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, [f"run.mode={mode}", f"rollout.alpha={alpha}"])
    assert caught.value.field == "rollout.alpha"
    assert caught.value.value == str(alpha) or repr(caught.value.value) == str(alpha)
    assert fix in str(caught.value)


def test_a_mode_that_carries_nothing_over_starts_one_batch_at_a_time() -> None:
    """Also before anything was trained, when alpha alone would let two batches start."""
    for name, alpha in FITTING:
        mode = coordination_modes.coordination_mode(name, alpha)
        gate = mode.start_gate(batch=8, redundancy=1.0, environments=1000)
        assert gate.most_under_way(lead=0) == (8 * (alpha + 1) if mode.carries_over else 8)
        assert gate.most_under_way(lead=alpha + 1) == 0


# -- what each promises ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def runs() -> dict[tuple[str, int], list[SimResult]]:
    """The same workload in every mode, two seeds."""
    return {mode: [simulate(long_tailed(mode, seed), strict=False) for seed in range(2)] for mode in FITTING}


def step_time(results: list[SimResult]) -> float:
    return sum(float(result.summary["seconds_per_step"]) for result in results) / len(results)


@pytest.mark.slow
def test_the_more_a_mode_overlaps_the_shorter_is_its_step(runs: dict[tuple[str, int], list[SimResult]]) -> None:
    """RollArt 7.2: the throughput ladder, each rung on the same long-tailed workload."""
    times = {mode: step_time(results) for mode, results in runs.items()}
    ladder = [times[mode] for mode in (("sync", 0), ("sync_plus", 0), ("one_off", 1))]
    assert ladder == sorted(ladder, reverse=True), times
    assert times["sync", 0] > 1.3 * times["sync_plus", 0], times
    assert times["one_off", 1] > max(times["areal", 1], times["async", 1]), times
    assert times["async", 1] > times["async", 2], times


@pytest.mark.parametrize("mode", FITTING)
def test_every_mode_keeps_its_own_staleness_bound(
    mode: tuple[str, int], runs: dict[tuple[str, int], list[SimResult]]
) -> None:
    name, alpha = mode
    steps = [step for result in runs[mode] for step in events_of(result, "step")]
    lag = {int(k) for step in steps for k in step["lag"]}
    trained = [int(k) for step in steps for k in step["lag_trained"]]
    for result in runs[mode]:
        assert result.violations == []
        assert result.summary["reason"] == "completed"
    if name in ("sync", "sync_plus"):
        assert lag == {0}
        assert max(trained) == 0
    elif name == "one_off":
        assert lag <= {0, 1}
        assert {int(k) for step in steps for k in step["lag_trained"] if step["step"]} == {1}
    elif name == "async":
        assert lag == set(range(alpha + 1))
    else:  # looks at the start only, so that long trajectories end up older than alpha
        assert max(lag) > alpha
        assert sum(result.ledger["evicted_stale"] for result in runs[mode]) == 0
    mixed = sum(step["versions_mixed"] for step in steps)
    assert (mixed > 0) == (name in ("areal", "async"))


def test_the_audit_finds_a_rollout_that_is_carried_over_where_the_mode_forbids_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def nothing(self: Rollout) -> None:
        self.close_starts()

    monkeypatch.setattr(Rollout, "end_redundant", nothing)
    found = simulate(long_tailed(("one_off", 1), 1), strict=False).violations
    assert any("in mode one_off" in line for line in found)


def test_one_off_trains_beside_the_rollout_of_the_next_batch(runs: dict[tuple[str, int], list[SimResult]]) -> None:
    """Where sync_plus does not: there training and collecting never overlap."""

    def overlap(result: SimResult) -> float:
        stages = events_of(result, "stage")
        pairs = [
            min(a["end"], b["end"]) - max(a["start"], b["start"])
            for a in stages
            if a["stage"] == "train_step"
            for b in stages
            if b["stage"] == "get_batch"
        ]
        return sum(max(0.0, seconds) for seconds in pairs)

    assert overlap(runs["one_off", 1][0]) > 0
    assert overlap(runs["sync_plus", 0][0]) == overlap(runs["sync", 0][0]) == 0


def test_rewards_of_a_batch_are_asked_for_together_in_sync_and_one_by_one_elsewhere() -> None:
    def waves(mode: tuple[str, int]) -> list[int]:
        """How many trajectories of the first batch began to be scored at the same moment."""
        result = simulate(long_tailed(mode, 1, "rollout.redundant_groups=1.0", "run.steps=1"))
        lines = [json.loads(line) for line in result.journal.decode().splitlines()]
        return sorted(Counter(line["t"] for line in lines if line["state"] == "scoring").values())

    assert waves(("sync", 0)) == [16]
    assert len(waves(("sync_plus", 0))) > 10


def test_the_rollout_lane_of_one_off_stands_from_its_batch_to_the_update(tmp_path: Any) -> None:
    simulate(long_tailed(("one_off", 1), 0, "sim.train_seconds_per_token=0.1"), tmp_path / "run")
    states = [piece.state for piece in load_run(tmp_path / "run").lanes()["rollout"]]
    assert "wait_training" in states
    assert "generate" in states


# -- nothing is lost ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", FITTING)
def test_the_ledger_closes_in_seeded_fault_runs_of_every_mode(mode: tuple[str, int]) -> None:
    for seed in range(FAULT_SEEDS):
        shape = ledger_faults.config_of(seed).model_dump(mode="json")
        shape["run"]["mode"], shape["rollout"]["alpha"] = mode
        shape["environment"]["size"] = 0  # sync needs one for everybody, and all of them in one process
        shape["rollout"]["shards"] = 1
        result = simulate(Config.model_validate(shape), strict=False)
        assert result.violations == [], f"seed {seed}"
        assert result.unaccounted == 0
        assert result.summary["reason"] == "completed"
        assert sum(result.injected.values()) > 0


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("mode", FITTING)
def test_the_ledger_closes_in_many_seeded_fault_runs_of_every_mode(mode: tuple[str, int]) -> None:
    for seed in range(FAULT_SEEDS, 150):
        shape = ledger_faults.config_of(seed).model_dump(mode="json")
        shape["run"]["mode"], shape["rollout"]["alpha"] = mode
        shape["environment"]["size"] = 0  # sync needs one for everybody, and all of them in one process
        shape["rollout"]["shards"] = 1
        shape["sim"]["tool_concurrency"] = 16  # and one call at a time is refused to all but one, again and again
        result = simulate(Config.model_validate(shape), strict=False)
        assert result.violations == [], f"seed {seed}"
        assert result.unaccounted == 0


# -- lockstep ----------------------------------------------------------------------------------------------------------


def in_virtual_time(work: Any) -> Any:
    loop = VirtualTimeLoop(seed="lockstep")
    try:
        return loop.run_until_complete(work)
    finally:
        loop.finish()


def test_a_phase_begins_when_the_last_has_arrived_and_waiting_is_not_charged() -> None:
    async def run() -> dict[str, float]:
        lockstep, began = Lockstep(), {}
        loop = asyncio.get_running_loop()

        async def member(name: str, seconds: float) -> None:
            async with asyncio.timeout(12) as limit:  # b waits 30 s for a: more than its limit, and is not charged
                await asyncio.sleep(seconds)
                await lockstep.arrive(name, "environment step", limit)
                began[name] = loop.time()
                await asyncio.sleep(seconds)
            lockstep.leave(name)

        async def slow() -> None:
            await asyncio.sleep(30)
            await lockstep.arrive("a", "environment step")
            began["a"] = loop.time()
            lockstep.leave("a")

        for name in "abc":
            lockstep.enter(name)
        await asyncio.gather(slow(), member("b", 1.0), member("c", 5.0))
        return began

    began = in_virtual_time(run())
    assert began == {"a": 30.0, "b": 30.0, "c": 30.0}


def test_whoever_leaves_is_waited_for_no_longer_and_a_time_limit_still_ends_the_slow() -> None:
    async def run() -> tuple[float, str]:
        lockstep = Lockstep()
        loop = asyncio.get_running_loop()

        async def hangs() -> None:
            try:
                async with asyncio.timeout(10):
                    await asyncio.sleep(1000)
            except TimeoutError as error:
                raise TrajectoryError("trajectory_timeout", "") from error
            finally:
                lockstep.leave("slow")

        lockstep.enter("slow")
        lockstep.enter("quick")
        slow = asyncio.ensure_future(hangs())
        await lockstep.arrive("quick", "generation")
        cause = ""
        try:
            await slow
        except TrajectoryError as error:
            cause = error.cause
        return loop.time(), cause

    assert in_virtual_time(run()) == (10.0, "trajectory_timeout")


def test_reward_opens_only_when_nobody_takes_turns_any_more() -> None:
    async def run() -> list[str]:
        lockstep, order = Lockstep(), []

        async def member(name: str, turns: int) -> None:
            for _ in range(turns):
                await lockstep.arrive(name, "generation")
                order.append(f"{name} turn")
                await asyncio.sleep(1)
            await lockstep.arrive(name, "reward")
            order.append(f"{name} reward")
            lockstep.leave(name)

        for name in "ab":
            lockstep.enter(name)
        await asyncio.gather(member("a", 1), member("b", 3))
        return order

    order = in_virtual_time(run())
    assert sorted(order[:2]) == ["a turn", "b turn"]
    assert order[2:4] == ["b turn", "b turn"]
    assert sorted(order[4:]) == ["a reward", "b reward"]
