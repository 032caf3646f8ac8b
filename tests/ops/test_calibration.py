"""What a run took is found again in its files, and carried over to another one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from orchestrator.cli import main
from orchestrator.config import load_config
from orchestrator.ops import calibration
from orchestrator.sim.simulated_run import simulate

STEP, SEQUENCE = 0.004, 0.0005  # seconds of the engine that is played here
SMALL = ["rollout.groups_per_step=2", "rollout.group_size=2", "rollout.environments=8", "evaluation.prompts=2"]
SMALL += ["sim.environment_seconds_mean=0.01", f"run.steps={calibration.SIMULATED_STEPS}", "warmup.steps=0"]


def write_turns(folder: Path) -> None:
    """Turns of 1 to 6 tokens beside 1 to 8 others: as engines write them, with the times of the engine above."""
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    rows: list[dict[str, Any]] = []
    lines = []
    for wave in range(40):
        beside = 1 + wave % 8
        for member in range(beside):
            tokens = 1 + (wave * 5 + member) % 6
            seconds = tokens * (STEP + SEQUENCE * beside)
            begin = 1 + wave - seconds / 2  # all of a wave share their middle
            name = f"t{wave}-{member}"
            lines.append([name, 0, "vllm-0", begin, begin + seconds, begin + seconds, begin + seconds])
            turn = {"observation_ids": [2] * 8, "versions": [{"version": 0, "count": tokens}]}
            turn |= {"generate_seconds": seconds, "environment_seconds": 0.01}
            row = {"trajectory_id": name, "group_id": f"g{wave // 2}", "total_reward": 1.0, "turns": [turn]}
            rows.append(row | {"wall_time": seconds + 0.01})
    lines.append(["t0-0", 0])  # cut by a kill
    file = folder / "trajectories/task=sim/date=2026-01-01/version=0/part-0.parquet"
    file.parent.mkdir(parents=True)
    parquet.write_table(pa.Table.from_pylist(rows), file)
    (folder / "turns.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("calibrated") / "run"
    simulate(load_config(None, SMALL), folder)
    write_turns(folder)
    return folder


def test_the_engines_own_seconds_are_found_in_its_turns(run: Path) -> None:
    step, sequence = calibration._decode(run)
    assert step == pytest.approx(STEP, rel=0.05)
    assert sequence == pytest.approx(SEQUENCE, rel=0.05)


def test_the_run_itself_simulated_takes_what_it_took_and_another_one_is_predicted_with_that(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["calibrate", str(run)]) == 0
    assert "s per step as measured" in capsys.readouterr().out
    found = calibration.read_calibration(run)
    assert found.simulated == pytest.approx(found.step, rel=0.02)
    assert found.sim["trace"] == str(run)
    assert main(["cost", "--from", str(run), "--json"]) == 0
    own = json.loads(capsys.readouterr().out)
    assert own["calibrated_with"] == found.run
    assert own["simulated_steps"] == calibration.SIMULATED_STEPS, "as the run itself was: a part of it is another mix"
    assert own["seconds_per_step"] == pytest.approx(found.step, rel=0.02)
    assert main(["cost", "--from", str(run)]) == 0
    assert f"with the durations of {found.run})" in capsys.readouterr().out
    assert own["wall_seconds"] >= own["seconds_per_step"] * calibration.SIMULATED_STEPS
    assert main(["cost", "--from", str(run), "rollout.groups_per_step=16", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["seconds_per_step"] > own["seconds_per_step"]
    assert main(["sim", "--from", str(run), "run.steps=3"]) == 0
    text, _, data = capsys.readouterr().out.partition("\n\n")
    assert "3 steps in" in text
    assert json.loads(data)["steps"] == 3


def test_what_the_config_says_of_the_simulator_itself_counts_more(run: Path, tmp_path: Path) -> None:
    if not (run / calibration.FILE).exists():
        calibration.calibrate(run)
    (tmp_path / "c.toml").write_text("[sim]\nreward_seconds = 7.0\n")
    made = calibration.config_from(run, str(tmp_path / "c.toml"), ["sim.update_seconds=8.0"])
    found = calibration.read_calibration(run)
    assert (made.sim.reward_seconds, made.sim.update_seconds) == (7.0, 8.0)
    assert made.sim.publish_seconds == found.sim["publish_seconds"]


def test_a_run_that_cannot_be_calibrated_is_one_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    short = tmp_path / "short"
    simulate(load_config(None, [*SMALL, "run.steps=5"]), short)
    assert main(["cost", "--from", str(short)]) == 2
    assert "rl-coserve calibrate" in capsys.readouterr().err
    assert main(["calibrate", str(short)]) == 2
    assert "was simulated: calibrate a real run" in capsys.readouterr().err
    write_turns(short)
    assert main(["calibrate", str(short)]) == 2
    assert "at least 20" in capsys.readouterr().err
    (short / calibration.FILE).write_text('{"run": 3')
    assert main(["cost", "--from", str(short)]) == 2
    assert "calibrate the run again" in capsys.readouterr().err
