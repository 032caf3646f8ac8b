"""Learning that is measured seed by seed: what is kept, what continues it, and what the figures say of it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from scripts.bench.papers import demo_seeds, pretrained_learns
from scripts.bench.papers.pretrained_learns import compared
from scripts.bench.probes.shuffled_reward import shuffled
from scripts.bench.probes.training_run import train_for

STAND_IN = """#!{python}
import json, pathlib, signal, sys, time
words = sys.argv[4:]
if words[0] == "--resume":
    folder = pathlib.Path(words[1])
else:
    given = dict(word.split("=", 1) for word in words[1:])
    folder = pathlib.Path(given["run.folder"].strip('"')) / (given["run.name"] + "-001")
    folder.mkdir()
lives = len(list(folder.iterdir())) + 1
(folder / f"life{{lives}}").touch()
def interrupted(number, frame):
    (folder / "summary.json").write_text(json.dumps({{"status": "interrupted"}}))
    sys.exit(130)
signal.signal(signal.SIGINT, interrupted)
if lives == 1:
    time.sleep(60)
(folder / "summary.json").write_text(json.dumps({{"status": "completed"}}))
"""


def test_a_run_in_sessions_is_interrupted_resumed_and_then_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "python"
    program.write_text(STAND_IN.format(python=f"{sys.executable} -S"))
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    runs = tmp_path / "runs"
    found = [train_for(0.4, Path("some.toml"), runs, "rewards-0", ["run.seed=0"]) for _ in range(3)]
    assert found == [(runs / "rewards-0-001", complete) for complete in (False, True, True)]
    assert len(list((runs / "rewards-0-001").glob("life*"))) == 2


def kept(right: int, questions: int = 450) -> list[list[bool]]:
    return [[number < right, True] for number in range(questions)]


def test_questions_are_compared_one_by_one() -> None:
    found = compared(kept(100), kept(130))
    assert (found["before"], found["after"], found["gain"]) == (0.2222, 0.2889, 0.0667)
    assert found["low"] > 0
    assert found["p"] == pytest.approx(2**-29)
    assert found["format"] == [1.0, 1.0]
    same = compared(kept(100), kept(100))
    assert (same["gain"], same["low"], same["p"]) == (0.0, 0.0, 1.0)
    swapped = compared([[True, True], [False, True]], [[False, False], [True, True]])
    assert (swapped["gain"], swapped["p"], swapped["format"]) == (0.0, 1.0, [1.0, 0.5])
    assert (swapped["well_formed"]["questions"], swapped["well_formed"]["gain"]) == (1, 1.0)


def rows(gains: dict[str, int]) -> list[dict[str, Any]]:
    return [{"run": name, "before": kept(100), "after": kept(100 + gain)} for name, gain in gains.items()]


GAINS = {"rewards-0": 30, "rewards-1": 25, "rewards-2": 40, "shuffled-0": 0}


@pytest.mark.parametrize(
    ("changed", "holds"),
    [
        ({}, True),
        ({"rewards-1": 2}, False),
        ({"shuffled-0": 30}, False),
        ({"rewards-2": -30}, False),
    ],
    ids=["all gain", "one does not", "the control does too", "one loses"],
)
def test_a_model_has_learned_where_each_seed_gains_and_the_control_does_not(
    changed: dict[str, int], holds: bool
) -> None:
    found = pretrained_learns.result(rows(GAINS | changed), False, {})
    assert found["holds"] is holds
    assert found["value"] == min(round(gain / 450, 4) for gain in list((GAINS | changed).values())[:3])
    assert pretrained_learns.result(rows({"rewards-0": 30}), False, {})["holds"] is False


def test_shuffled_rewards_are_those_of_other_answers_and_evaluations_are_scored_as_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from scripts.bench.probes import shuffled_reward

    monkeypatch.setattr(shuffled_reward, "score", lambda payload: {"reward": payload["right"]})
    shuffled_reward._earned.clear()
    drawn = {True: 0.0, False: 0.0}
    for number in range(2000):
        right = number % 4 == 0
        drawn[right] += float(shuffled({"trajectory_id": f"t{number:08d}", "right": float(right)})["reward"])
    assert drawn[True] / 500 == pytest.approx(0.25, abs=0.08)
    assert drawn[False] / 1500 == pytest.approx(0.25, abs=0.05)
    assert shuffled({"trajectory_id": "eval-0-start-3", "right": 1.0})["reward"] == 1.0


def seeds(**changed: Any) -> list[dict[str, Any]]:
    row = {"success_start": 0.4, "success_end": 0.87, "seconds": 470.0, "interval": {"prompts": 400}}
    return [row | {"seed": seed} | (changed if seed == 3 else {}) for seed in demo_seeds.SEEDS]


@pytest.mark.parametrize(
    ("changed", "holds"),
    [
        ({}, True),
        ({"success_end": 0.81}, True),
        ({"success_end": 0.79}, False),
        ({"success_start": 0.42}, False),
        ({"seconds": 481.0}, False),
    ],
)
def test_the_demo_is_judged_by_its_mean_its_worst_seed_its_start_and_its_time(
    changed: dict[str, float], holds: bool
) -> None:
    assert demo_seeds.result(seeds(**changed), False, {})["holds"] is holds
    assert demo_seeds.result(seeds()[:4], False, {})["holds"] is False


def test_seeds_are_measured_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def one(seed: int, *_: Any) -> dict[str, Any]:
        asked.append(seed)
        return seeds()[seed]

    monkeypatch.setattr(demo_seeds, "one", one)
    monkeypatch.setattr(demo_seeds, "CELLS", tmp_path / "cells")
    monkeypatch.chdir(Path(__file__).parents[2])
    while demo_seeds.measure_next():
        assert len(asked) <= 5
    assert asked == [0, 1, 2, 3, 4]
    files = sorted((tmp_path / "cells").iterdir())
    assert [json.loads(file.read_text())["found"]["seed"] for file in files] == asked
    assert {len(json.loads(file.read_text())["source"]["sources"]) for file in files} == {16}
