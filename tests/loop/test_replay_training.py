"""Replay into training: the recorded batches, filtered and accounted for; and a real trainer on a real store."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from megatron_rlplugin.trainer.recorded_rows import read_batches
from orchestrator.api import (
    ConfigError,
    Prompt,
    PublishResult,
    RunError,
    TrainBatch,
    TrainMetrics,
    TrainSample,
    Trajectory,
    Turn,
)
from orchestrator.cli import main
from orchestrator.events import EventLog, MemorySink
from orchestrator.ledger import Ledger, recount
from orchestrator.policies.batching.trajectory_filters import CompletenessFilter, FilterChain, QualityFilter
from orchestrator.runtime.recorded_batches import Recording, replay
from orchestrator.store import TrajectoryStore
from orchestrator.tasks.frozenlake import FrozenLakeTask

STEPS, GROUPS, MEMBERS = 3, 2, 3


def trajectory(step: int, number: int) -> Trajectory:
    """A FrozenLake episode of one turn; one of each batch is truncated, rewards differ in a group."""
    turn = Turn(tuple(range(7, 24)), (2 + (step + number) % 4, 1), (-1.0, -0.5 - number / 7), ((max(0, step - 1), 2),))
    prompt = Prompt("k", "frozenlake", step, "")
    reward, cut = float(number % MEMBERS == 0), number == 1
    group = f"g{step}-{number // MEMBERS}"
    return Trajectory(f"t{step}-{number}", group, "frozenlake", prompt, (turn,), reward, "1", 0, cut)


def write(folder: Path, *, positions: bool = True) -> None:
    """A store of three steps: the middle of its order is not the order of places; each lag has its weight."""
    store = TrajectoryStore(folder / "trajectories")
    for step in range(STEPS):
        for number in reversed(range(GROUPS * MEMBERS)):
            place = number if positions else None
            store.append(trajectory(step, number), step, "trained", position=place, weight=1.0 / (1 + number))
        store.append(trajectory(step + 50, 0), step, "evicted_stale")
        store.flush()


class Recorder:
    """A trainer that keeps what it is given."""

    def __init__(self) -> None:
        self.batches: list[TrainBatch] = []

    async def train_step(self, batch: TrainBatch) -> TrainMetrics:
        self.batches.append(batch)
        await asyncio.sleep(0)
        return TrainMetrics(batch.step, batch.version + 1, {"loss": 0.5})

    async def feed(self, samples: Sequence[TrainSample], version: int) -> None:
        raise AssertionError("a replay is not streamed")

    async def publish(self) -> PublishResult:
        raise AssertionError("a replay publishes nothing")

    async def save(self, folder: str) -> None:
        raise AssertionError

    async def saved(self) -> None:
        raise AssertionError

    async def load(self, folder: str) -> int:
        raise AssertionError

    async def close(self) -> None:
        pass


def play(folder: Path, filters: FilterChain | None = None, steps: int = 100) -> tuple[Recorder, Ledger, list[Any], str]:
    trainer, events, journal = Recorder(), MemorySink(), MemorySink()

    async def run() -> Ledger:
        log = EventLog(events, asyncio.get_running_loop().time)
        ledger = Ledger(journal, log.time)
        await replay(Recording(folder), trainer, log, ledger, filters or FilterChain(), steps)
        return ledger

    return trainer, asyncio.run(run()), [json.loads(line) for line in events.lines], journal.text()


def test_without_filters_the_batches_are_those_that_the_run_was_trained_on(tmp_path: Path) -> None:
    write(tmp_path)
    trainer, ledger, events, journal = play(tmp_path)
    assert trainer.batches == list(read_batches(tmp_path))  # the plugin's own reader says the same
    assert [sample.trajectory_id for sample in trainer.batches[1].samples] == [f"t1-{n}" for n in range(6)]
    assert [sample.weight for sample in trainer.batches[0].samples] == [1.0 / (1 + n) for n in range(6)]
    assert ledger.counts.ended["trained"] == ledger.counts.started == STEPS * GROUPS * MEMBERS
    assert recount(journal.splitlines()) == ledger.counts.as_dict()
    steps = [event for event in events if event["kind"] == "step"]
    assert [(event["step"], event["version"], event["trained"]) for event in steps] == [(0, 1, 6), (1, 2, 6), (2, 3, 6)]
    assert steps[2]["lag"] == {"1": 6}


def test_filters_take_members_away_and_a_group_of_one_goes_with_them(tmp_path: Path) -> None:
    write(tmp_path)
    trainer, ledger, _, _ = play(tmp_path, FilterChain([CompletenessFilter(drop_truncated=True)]))
    assert [sample.trajectory_id for sample in trainer.batches[0].samples] == ["t0-0", "t0-2", "t0-3", "t0-4", "t0-5"]
    assert ledger.counts.ended_by_cause == {"filtered: truncated": STEPS}
    with pytest.raises(RunError, match="the filters left no batch"):
        play(tmp_path, FilterChain([QualityFilter(low=0.5)]))  # one member of each group passes


def test_it_ends_after_the_steps_asked_for_and_reads_the_folder_itself_too(tmp_path: Path) -> None:
    write(tmp_path)
    trainer, _, _, _ = play(tmp_path / "trajectories", steps=2)
    assert len(trainer.batches) == 2
    assert len(Recording(tmp_path)) == STEPS


def test_a_store_that_cannot_be_replayed_exactly_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no trained trajectory"):
        Recording(tmp_path / "nowhere")
    write(tmp_path / "unplaced", positions=False)
    with pytest.raises(ConfigError, match="do not stand at the places"):
        play(tmp_path / "unplaced")
    write(tmp_path / "twice")
    store = TrajectoryStore(tmp_path / "twice" / "trajectories")
    store.append(trajectory(0, 0), 0, "trained", position=0)
    store.close()
    with pytest.raises(ConfigError, match="are two runs mixed here"):
        play(tmp_path / "twice")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--replay", "nowhere"], "holds no trained trajectory"),
        (["--replay", "nowhere", "--resume", "nowhere"], "not a run folder"),
    ],
)
def test_a_replay_of_nothing_starts_nothing(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["train", *arguments]) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.engine
@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_real_trainer_learns_from_a_store_and_twice_the_same(tmp_path: Path) -> None:
    """Ray, Megatron-Core, the command line: the exported weights of two replays are equal and not those of the start."""
    pytest.importorskip("megatron.core")
    from safetensors.torch import load_file

    from megatron_rlplugin import tiny_model

    source = tmp_path / "source"
    write(source)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 8}
    words = list(FrozenLakeTask(300).vocabulary)
    tiny_model.create_qwen3(str(source / "model"), **sizes, vocabulary=words, max_positions=64, dtype="float32", seed=3)
    weights = []
    for number in (1, 2):
        command = [sys.executable, "-m", "orchestrator.cli", "train", "--replay", str(source)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))}
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=280)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "trained 3 of 3 recorded steps" in done.stdout
        run = tmp_path / "runs" / f"run-{number:03d}"
        assert (run / "report.html").is_file()
        weights.append(load_file(run / "model-final" / "model.safetensors"))
    before = load_file(source / "model" / "model.safetensors")
    assert all(weights[0][name].equal(weights[1][name]) for name in before)
    assert any(not weights[0][name].equal(before[name]) for name in before)
