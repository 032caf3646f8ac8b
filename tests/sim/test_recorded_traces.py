"""Recorded trajectories as a workload: a simulated run plays just what a store holds, and reads little of it."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest

from orchestrator.api import ConfigError, Prompt, Trajectory, Turn
from orchestrator.config import Config, load_config
from orchestrator.sim.crash_remains import SimStore
from orchestrator.sim.recorded_traces import MOST, PREFIX, EpisodeTraces, load_traces
from orchestrator.sim.simulated_run import simulate
from orchestrator.store import TrajectoryStore

GROUPS, MEMBERS = 5, 3


def recorded() -> list[Trajectory]:
    """Trajectories of 1 to 4 turns with 1 to 30 tokens each, that took some time; the last one never came to a turn."""
    rng = random.Random(1)
    found = []
    for number in range(GROUPS * MEMBERS):
        turns = tuple(
            Turn(
                tuple([7] * rng.randint(PREFIX, 20)),
                tuple([9] * (said := rng.randint(1, 30))),
                (-0.5,) * said,
                ((0, said // 2), (1, said - said // 2)) if said > 1 else ((0, said),),
                generate_seconds=0.25,
                environment_seconds=round(rng.uniform(0.0, 3.0), 6),
            )
            for _ in range(rng.randint(1, 4))
        )
        seconds = 0.5 + sum(turn.generate_seconds + turn.environment_seconds for turn in turns)
        name, group = f"t{number:08d}", f"g{number // MEMBERS:07d}"
        prompt = Prompt(group, "maths", number, "")
        reward = rng.choice((0.0, 1.0))
        found.append(
            Trajectory(name, group, "maths", prompt, turns, reward, "1", 0, False, (), 10.0, 10.0 + seconds, 99.0)
        )
    return [*found, Trajectory("dead", "g9", "maths", Prompt("k", "maths", 0, ""), (), None, "1", 0, False, ("x",))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("run")
    store = TrajectoryStore(run / "trajectories")
    for trajectory in recorded():
        store.append(trajectory, 0, "trained" if trajectory.turns else "failed: environment_start")
    store.close()
    return run


def config(folder: Path, *overrides: str) -> Config:
    small = ["run.steps=4", "rollout.groups_per_step=3", f"rollout.group_size={MEMBERS}", "evaluation.prompts=4"]
    return load_config(None, [*small, "rollout.environments=18", f'sim.trace="{folder}"', *overrides])


def shape(trajectory: Trajectory) -> tuple[object, ...]:
    turns = trajectory.turns
    lengths = tuple((len(turn.observation_ids), len(turn.action_ids)) for turn in turns)
    return trajectory.reward, lengths, tuple(round(turn.environment_seconds, 5) for turn in turns)


def test_a_trace_has_the_lengths_times_and_rewards_of_the_store(folder: Path) -> None:
    traces = load_traces(folder, 1000)
    originals = [trajectory for trajectory in recorded() if trajectory.turns]
    assert len(traces.episodes) == len(originals)
    assert [len(group) for group in traces.groups] == [MEMBERS] * GROUPS
    assert traces.tasks == ("maths",) * GROUPS
    for trace, original in zip(traces.episodes, originals, strict=True):
        assert trace.reward == original.reward
        assert trace.reset_seconds == pytest.approx(0.5)
        assert [(turn.observation, turn.response) for turn in trace.turns] == list(shape(original)[1])  # type: ignore[arg-type]
    for number in (0, 14, MOST - 1):
        assert traces.episode_of(traces.opening(number)) == traces.episodes[number % len(originals)]
    assert len(load_traces(folder / "trajectories", 4).episodes) == 4


@pytest.mark.parametrize("faults", [0.0, 0.02])
def test_a_simulated_run_plays_the_recorded_episodes_group_by_group(
    folder: Path, faults: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    played: list[Trajectory] = []
    honest = SimStore.append

    def append(
        self: SimStore,
        trajectory: Trajectory,
        step: int,
        outcome: str,
        *,
        position: int | None = None,
        weight: float = 1.0,
    ) -> None:
        if outcome == "trained":
            played.append(trajectory)
        honest(self, trajectory, step, outcome, position=position, weight=weight)

    monkeypatch.setattr(SimStore, "append", append)
    result = simulate(config(folder, f"sim.fault_rate={faults}"))
    assert result.summary["reason"] == "completed"
    known = {shape(trajectory)[:2] for trajectory in recorded() if trajectory.turns}
    assert {shape(trajectory)[:2] for trajectory in played} <= known
    if not faults:
        assert {shape(trajectory) for trajectory in played} <= {shape(one) for one in recorded()}
        by_group: dict[str, list[object]] = {}
        for trajectory in played:
            by_group.setdefault(trajectory.group_id, []).append(shape(trajectory))
        originals = Counter(
            tuple(sorted(map(repr, map(shape, recorded()[start : start + MEMBERS]))))
            for start in range(0, GROUPS * MEMBERS, MEMBERS)
        )
        assert all(tuple(sorted(map(repr, shapes))) in originals for shapes in by_group.values())
        assert len(by_group) == 12


def test_a_short_simulation_of_spread_groups_plays_what_the_whole_recording_has() -> None:
    groups = tuple((2 * number, 2 * number + 1) for number in range(500))
    spread = EpisodeTraces((), groups, tuple(map(str, groups))).spread()
    assert sorted(spread.groups) == list(groups)
    assert spread.tasks == tuple(map(str, spread.groups)), "each group keeps its task"
    for most in (8, 21, 100):
        parts = Counter(members[0] // 250 for members in spread.groups[:most])  # quarters of the recording
        assert max(parts.values()) - min(parts[part] for part in range(4)) <= 3, most


def test_a_run_with_spread_groups_plays_other_episodes_first(folder: Path) -> None:
    short = ("run.steps=1", "rollout.groups_per_step=1", "rollout.environments=3", "rollout.alpha=1")
    ordered, spread = (simulate(config(folder, *short, *more)).summary for more in ((), ("sim.trace_spread=true",)))
    assert (ordered["tokens"], ordered["seconds"]) != (spread["tokens"], spread["seconds"])


def test_the_same_trace_and_seed_give_the_same_bytes_and_slower_environments_a_slower_run(folder: Path) -> None:
    first, again = simulate(config(folder)), simulate(config(folder))
    assert first.events == again.events
    assert simulate(config(folder, "sim.decode_seconds_per_step=0.2")).summary["seconds"] > first.summary["seconds"]


def test_a_folder_without_traces_is_one_clear_error(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"sim\.trace.*holds no trajectories"):
        simulate(config(tmp_path))
    with pytest.raises(ConfigError, match=r"sim\.trace_rows"):
        load_traces(folder, MOST + 1)
    store = TrajectoryStore(tmp_path / "trajectories")
    store.append(recorded()[-1], 0, "failed: environment_start")
    store.close()
    with pytest.raises(ConfigError, match="no trajectory with a turn"):
        load_traces(tmp_path, 10)
    next(tmp_path.rglob("part-*.parquet")).write_bytes(b"PAR1")
    with pytest.raises(ConfigError, match="cannot be read as Parquet"):
        load_traces(tmp_path, 10)
