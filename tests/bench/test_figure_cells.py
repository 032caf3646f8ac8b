"""A figure of cells: played in pieces it is what it is in one go; a cut loses one cell; sources that differ are refused."""

from __future__ import annotations

import json
import random
import re
import signal
import time
from collections.abc import Callable
from datetime import datetime
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from orchestrator.api import ConfigError
from orchestrator.config import load_config
from orchestrator.placement.forecast_setup import make_predictor
from orchestrator.runtime import engine_cuts
from orchestrator.sim.paper_setups import load_scenario
from scripts.bench import BENCHES
from scripts.bench.papers import borrowed, heddle, sweep
from scripts.bench.papers.calibration import CONSTANTS, SHARES, assumed_for, calibrated_by, played_before
from scripts.bench.papers.length_fit import FILE as FITTED
from scripts.bench.papers.refusals import REFUSED, refused_for
from scripts.bench.papers.rollart_setups import rollart
from scripts.bench.papers.rose_figures import SIZES
from scripts.bench.papers.runner import Cells, Figure, Found, Reading, as_kept, each_seed, row, rows_over_seeds
from scripts.bench.papers.simulated_page import page
from scripts.bench.papers.sweep import FIGURES, Sweep
from scripts.bench.result import frame

RESULTS = Path(__file__).parents[2] / "docs" / "results"
CLEAN = {"commit": "c", "clean": True, "sources": "one"}
SEEDS = (0, 1, 2)


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the tree says that it is."""
    source: dict[str, Any] = dict(CLEAN)
    monkeypatch.setattr("scripts.bench.cells.source", lambda name: dict(source))
    return source


def figure(played: list[tuple[str, int]], slow: Callable[[int], None] = lambda seed: None) -> Figure:
    """Its value is 2 + the seed."""

    def cell(name: str, number: int) -> Callable[[int], dict[str, float]]:
        def play(seed: int) -> dict[str, float]:
            if name == "b, + x/2":
                slow(seed)
            played.append((name, seed))
            return {"seconds": number * (2.0 + seed) if number == 1 else 1.0}

        return play

    def cells(quick: bool) -> Cells:
        return {"a/1": cell("a/1", 1), "b, + x/2": cell("b, + x/2", 2)}

    def read(found: Found, quick: bool) -> Reading:
        value = found["a/1"]["seconds"] / found["b, + x/2"]["seconds"]
        return Reading(value, value > 2.5, [row("a over b", 2.0, value, "s")], {"of": value})

    return Figure("tiny", "claim", "paper", 3.0, "> 2.5", cells, each_seed(read), SEEDS)


def test_the_value_is_the_worst_seeds_and_rows_have_intervals_over_all() -> None:
    result = figure([]).run(quick=False, nonce="n")
    assert (result["kind"], result["value"], result["holds"], result["reference_value"]) == (
        "simulated",
        2.0,
        False,
        3.0,
    )
    detail = result["detail"]
    assert (detail["seeds"], detail["nonce"], detail["of"], detail["detail_of_seed"]) == ([0, 1, 2], "n", 2.0, 0)
    (one,) = detail["rows"]
    assert (one["simulated"], one["by_seed"], one["off"]) == (3.0, [2.0, 3.0, 4.0], 0.5)
    assert one["interval"] == pytest.approx([3 - 4.303 / 3**0.5, 3 + 4.303 / 3**0.5])
    assert detail["value_by_seed"]["interval"] == one["interval"]
    quick = figure([]).run(quick=True, nonce="")["detail"]
    assert (quick["seeds"], quick["rows"][0]["interval"]) == ([0], None)


@pytest.mark.parametrize(("found", "quick", "whole"), [(True, None, True), (False, False, False), (None, None, None)])
def test_a_quick_form_may_fail_and_claims_nothing(found: bool | None, quick: bool | None, whole: bool | None) -> None:
    about: dict[str, Any] = {
        "value": 1.0,
        "unit": "s",
        "reference": "",
        "reference_value": 1.0,
        "bar": "",
        "detail": {},
    }
    assert frame("tiny", "real", holds=found, quick=True, **about)["holds"] is quick
    assert frame("tiny", "real", holds=found, quick=False, **about)["holds"] is whole


def test_where_less_is_better_the_worst_seed_is_the_largest() -> None:
    def read(found: Found, quick: bool) -> Reading:
        return Reading(found["x"], True, [], {})

    found = {seed: {"x": float(seed)} for seed in SEEDS}
    assert each_seed(read, max)(found, False).value == 2.0
    assert each_seed(read)(found, False).value == 0.0


def test_a_row_that_some_seeds_lack_is_of_those_that_have_it() -> None:
    rows = rows_over_seeds([[row("x", 1.0, 1.0, "s")], [row("x", 1.0, 3.0, "s"), row("y", 1.0, 1.0, "s")]])
    assert [(one["what"], one["by_seed"]) for one in rows] == [("x", [1.0, 3.0]), ("y", [1.0])]


def test_what_is_played_in_pieces_is_put_together_as_if_it_had_been_played_in_one_go(
    tmp_path: Path, said: dict[str, Any]
) -> None:
    played: list[tuple[str, int]] = []
    one = Sweep(figure(played), tmp_path)
    one.play(0, "a/1")
    with pytest.raises(ConfigError, match="5 are missing"):
        one.result()
    said["commit"] = "later"  # another day
    again = Sweep(figure(played), tmp_path)
    assert len(again.missing(SEEDS)) == 5
    sweep.play_all([again], SEEDS, time.monotonic() + 60)
    assert sorted(played) == sorted((name, seed) for seed in SEEDS for name in ("a/1", "b, + x/2"))
    assert again.missing(SEEDS) == []
    result, whole = again.result(), figure([]).run(quick=False, nonce="")
    assert result["source"] == CLEAN
    assert result["detail"]["cells"] == 6
    for key in ("rows", "of", "value_by_seed", "seeds"):
        assert result["detail"][key] == whole["detail"][key]


def test_a_cut_loses_the_cell_that_was_being_played_and_no_other(tmp_path: Path, said: dict[str, Any]) -> None:
    played: list[tuple[str, int]] = []

    def slow(seed: int) -> None:
        if seed == 1:
            time.sleep(60)

    one = Sweep(figure(played, slow), tmp_path)
    before = signal.getsignal(signal.SIGALRM)
    with pytest.raises(KeyboardInterrupt), sweep.ended_after(0.3) as until:
        sweep.play_all([one], SEEDS, until)
    assert signal.getsignal(signal.SIGALRM) == before
    assert played == [("a/1", 0), ("b, + x/2", 0), ("a/1", 1)]
    again = Sweep(figure(played), tmp_path)
    assert again.missing(SEEDS) == [(1, "b, + x/2"), (2, "a/1"), (2, "b, + x/2")]
    assert sweep.left([again], SEEDS).startswith("tiny: 3 of 6 cells left, about ")
    sweep.play_all([again], SEEDS, time.monotonic() + 60)
    assert len(played) == 6


def test_a_cell_that_fails_is_said_and_keeps_no_other_from_being_played(
    tmp_path: Path, said: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    def slow(seed: int) -> None:
        if seed == 1:
            raise ConfigError("rollout.alpha", 1, "no")

    one = Sweep(figure([], slow), tmp_path)
    assert sweep.play_all([one], SEEDS, time.monotonic() + 60) == 1
    assert one.missing(SEEDS) == [(1, "b, + x/2")]
    assert "FAILED: rollout.alpha = 1: no" in capsys.readouterr().err


def test_a_cell_that_would_not_end_in_time_is_not_begun(tmp_path: Path, said: dict[str, Any]) -> None:
    played: list[tuple[str, int]] = []
    one = Sweep(figure(played), tmp_path)
    one.play(0, "a/1")
    (file,) = (tmp_path / "tiny").iterdir()
    kept = json.loads(file.read_text())
    kept["found"]["seconds"] = 3600.0
    file.write_text(json.dumps(kept))
    sweep.play_all([one], SEEDS, time.monotonic() + 60)
    assert one.missing(SEEDS) == [(1, "a/1"), (2, "a/1")]
    assert sweep.left([one], SEEDS) == "tiny: 2 of 6 cells left, about 120 min"


def test_cells_of_other_sources_or_of_a_tree_with_changes_are_neither_added_to_nor_put_together(
    tmp_path: Path, said: dict[str, Any]
) -> None:
    one = Sweep(figure([]), tmp_path)
    one.play(0, "a/1")
    said["sources"] = "two"
    other = Sweep(figure([]), tmp_path)
    with pytest.raises(ConfigError, match="other sources"):
        sweep.play_all([other], SEEDS, time.monotonic() + 60)
    for seed, name in other.missing(SEEDS):
        other.play(seed, name)
    with pytest.raises(ConfigError, match="other sources"):
        other.result()
    said["clean"] = False
    with pytest.raises(ConfigError, match="tree with changes"):
        sweep.play_all([Sweep(figure([]), tmp_path / "elsewhere")], SEEDS, time.monotonic() + 60)


def test_the_command_says_what_is_left_and_refuses_what_there_is_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sweep.main([str(tmp_path), "--figures", "expert-parallelism", "--minutes", "0"]) == 0
    assert capsys.readouterr().out == "expert-parallelism: 40 of 40 cells left, nobody knows how long\n"
    assert sweep.main([str(tmp_path), "--figures", "nobody's"]) == 2
    assert sweep.main([str(tmp_path), "--seeds", "x", "--minutes", "0"]) == 2
    assert "0,1" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", FIGURES)
def test_every_figure_has_five_seeds_and_a_file_for_each_cell(name: str, tmp_path: Path) -> None:
    one: Figure = import_module(BENCHES[name].module).FIGURE
    assert one.name == name
    assert len(one.seeds) == 5
    assert len(Sweep(one, tmp_path).missing(one.seeds)) == 5 * len(one.cells(False))
    assert 0 < len(one.cells(True)) < len(one.cells(False))


@pytest.mark.parametrize("name", sorted(BENCHES))
def test_the_list_says_how_long_a_benchmark_takes(name: str) -> None:
    """To a factor of two, as the committed figure took it; cells are counted."""
    said, detail = BENCHES[name].whole, json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))["detail"]
    if name in FIGURES:
        one: Figure = import_module(BENCHES[name].module).FIGURE
        assert said.endswith(f", {len(one.seeds) * len(one.cells(False))} cells")
        seconds = float(detail["processor_seconds"])
    elif detail.get("started") and not detail.get("in_parts"):
        begun, ended = (datetime.fromisoformat(detail[when]) for when in ("started", "ended"))
        seconds = (ended - begun).total_seconds()
    else:
        return  # put together of parts: when the last of them began
    numbers = re.match(r"(?:(\d+) to )?(\d+) (s|min|h)\b", said)
    if numbers is None:
        assert said in {"a second", "a few seconds"}
        assert seconds < 15.0
        return
    unit = {"s": 1.0, "min": 60.0, "h": 3600.0}[numbers[3]]
    assert unit * int(numbers[1] or numbers[2]) / 2.0 - 60.0 <= seconds <= unit * int(numbers[2]) * 2.0


def test_every_simulated_figure_can_be_swept() -> None:
    declared = {name for name, bench in BENCHES.items() if hasattr(import_module(bench.module), "FIGURE")}
    assert declared == set(FIGURES)


@pytest.mark.parametrize("constant", CONSTANTS, ids=lambda constant: constant.name)
def test_each_calibrated_constant_has_its_frozen_value_where_it_lives(constant: Any) -> None:
    place, key = constant.where
    if place.startswith("orchestrator."):
        assert getattr(import_module(place), key) == pytest.approx(constant.value, rel=1e-3)
        return
    scenario, _, size = place.partition(" ")
    found: Any = load_scenario(scenario, SIZES[size][1] if size else ())
    for part in key.split("."):
        found = found[part] if isinstance(found, dict) else getattr(found, part)
    assert found == constant.value


def test_rows_are_flagged_where_a_constant_was_taken_from_what_they_are_compared_with() -> None:
    assert calibrated_by("modes", "8B: throughput of one_off over sync_plus") == "serial seconds per trained token"
    assert calibrated_by("modes", "8B: throughput of affinity over sync") == ""
    assert calibrated_by("borrowed", "dedicated-first: speed-up with 4 borrowed GPUs") == "ROSE's spread of tokens, 8B"
    assert calibrated_by("borrowed", "least-utilized, imbalance 2: speed-up with 4 borrowed GPUs") != "", (
        "the same printed number"
    )
    assert calibrated_by("borrowed", "least-utilized: rollout on 8 GPUs, s") == "ROSE's tokens a turn, 8B"
    assert calibrated_by("borrowed", "dedicated-first: speed-up with 16 borrowed GPUs") == ""
    assert set().union(*(constant.rows for constant in CONSTANTS)) <= {*BENCHES}


@pytest.mark.parametrize("name", FIGURES)
def test_rows_of_a_committed_figure_have_the_flags_of_the_list(name: str) -> None:
    for one in json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))["detail"]["rows"]:
        assert one.get("calibration", "") == calibrated_by(name, one["what"]), one["what"]
        assert one.get("refused", "") == refused_for(name, f"{one['what']} {one['source']}"), one["what"]
        assert one.get("assumed", "") == assumed_for(name, one["what"]), one["what"]


@pytest.mark.parametrize("taken", SHARES, ids=lambda taken: f"{taken.scenario} {taken.task}")
def test_each_assumed_share_is_that_of_the_committed_fit_and_is_what_its_scenario_plays(taken: Any) -> None:
    fitted = json.loads(FITTED.read_text(encoding="utf-8"))["sets"][taken.recorded]["shares"]
    assert taken.prompt == fitted["prompt"]["share"]
    assert taken.trajectory in (None, fitted["trajectory"]["share"])
    task = load_scenario(taken.scenario).sim.tasks[taken.task]
    assert (task.prompt_share, task.trajectory_share) == (taken.prompt, taken.trajectory or 0.0)
    if taken.trajectory is None:
        assert task.turns_max == 1
    assert set(taken.rows) <= {*BENCHES}


def test_swe_bench_in_the_mix_of_32b_is_the_scenario_s_own() -> None:
    assert rollart("32B", "async").sim.tasks["swe-bench"] == load_scenario("rollart-swe").sim.tasks["swe-bench"]


def test_rows_say_what_of_them_is_assumed_from_recorded_sets_and_older_ones_that_they_are_older() -> None:
    assert assumed_for("heddle", "anything").endswith("tau-bench/airline, smollm2/problems")
    assert assumed_for("rollart-figures", "three jobs on the 16 GPUs: rollout, serverless rewards, s").endswith(
        ": smollm2/problems"
    )
    assert assumed_for("rollpacker-figures", "anything") == ""
    assert played_before("heddle", [{"what": "a"}])
    assert not played_before("heddle", [{"what": "a", "assumed": "b"}])
    assert not played_before("borrowed", [{"what": "a"}])


@pytest.mark.parametrize(
    ("key", "given"),
    [
        ("rollout.planner.experts", ["rollout.planner.enabled=true", "rollout.planner.experts=true"]),
        (
            "resources.rollout",
            [
                "resources.pools={H800=4, H20=4}",
                "resources.rollout={H800=4, H20=4}",
                "rollout.workers=8",
                *(f"rollout.{on}.enabled=true" for on in ("prediction", "placement", "placement.degrees")),
            ],
        ),
    ],
)
def test_what_rows_are_said_to_be_refused_for_is_refused_by_the_checks_of_a_real_run(
    key: str, given: list[str]
) -> None:
    assert key in {one.key for one in REFUSED}
    with pytest.raises(ConfigError, match=re.escape(key)):
        engine_cuts.check(load_config(None, given))


def test_an_oracle_is_refused_and_its_rows_are_marked() -> None:
    settings = load_scenario("heddle", ["rollout.prediction.enabled=true", "rollout.prediction.predictor=oracle"])
    with pytest.raises(ConfigError, match=r"rollout\.prediction\.predictor"):
        make_predictor(settings.rollout.prediction, 100.0, 0)
    assert refused_for("heddle", "8 GPUs, math: ours over ours, oracle 7.2 to 7.4") == "an oracle of lengths"
    assert refused_for("heddle", "8 GPUs, math: ours over order fcfs 7.2 to 7.4") == ""
    assert refused_for("expert-parallelism", "any row") == "expert parallelism is chosen in simulated runs only"
    cut = "workload: all policies over ROSE's set async, degrees cut, 8 GPUs train"
    assert [bool(refused_for("all-together", f"{whose} {cut}")) for whose in ("RollArt's", "ROSE's")] == [True, False]


# What cells of each figure find, by the beginning of their names: of these shapes, with other numbers a seed.
RUN = {
    "step_seconds": 100.0,
    "train_seconds": 40.0,
    "tokens_per_step": 1e6,
    "tokens_per_s": 1e4,
    "evicted_stale_per_step": 0.5,
    "rollout_seconds": 60.0,
}
BORROWED = {
    "rollout_seconds": 400.0,
    "steps": [400.0],
    "starting_share": 0.001,
    "prefill_busy": 0.05,
    "decode_busy": 0.06,
    **{key: 0.3 for of in ("ttft", "tpot") for key in (f"{of}_p99", f"alone_{of}_p99")},
    **{key: 0.001 for of in ("ttft", "tpot") for key in (f"{of}_late", f"alone_{of}_late")},
}
USERS = {key: BORROWED[key] for key in ("ttft_late", "alone_ttft_late", "decode_busy")}
KINDS = {"short": [10.0, 12.0], "long": [30.0]}
ROUNDS = {"steps": KINDS, "rollouts": KINDS, "training": KINDS, "weights": {"": 1.0, "short": 128.0, "long": 32.0}}
PLANNED = [{"seconds": 5.0, "round": kind, "tp": 2, "preemptions": 3} for kind in ("long", "short", "short")]
SHAPES: dict[str, dict[str, Any]] = {
    "modes": {"": RUN},
    "affinity": {"": 100.0},
    "rollart-figures": {"": RUN},
    "expert-parallelism": {
        "": {
            "seconds": 100.0,
            "rollouts": [5.0, 6.0],
            "layouts": [],
            "imbalance": [1.0, 4.0],
            "reasons": {},
            "changes": [],
        }
    },
    "all-together": {"": {**RUN, "borrowed_tokens": 1e5, **USERS}},
    "heddle": {"": {"tokens_per_s": 1e4, "seconds": 100.0, "least": 80.0, "degrees": [4, 4]}},
    "rose-figures": {"": BORROWED, "8B, end": RUN, "32B, end": RUN},
    "borrowed": {"": BORROWED, "alone": {"rollout_seconds": 800.0, "steps": [800.0]}},
    "rollpacker-figures": {
        "": ROUNDS,
        "table 1": {"step": 100.0, "rollout": 70.0, "reward": 10.0, "training": 20.0},
        "table 4": 30.0,
        "search": {"rollout_seconds_tried": {"1.25": 30.0}, "rounds": 5, "stays_with": 1.25},
        "search/": ROUNDS,
        "figure 5": {
            **{of: {"ttft_seconds": 1.0, "tpot_seconds": 0.1, "early_tokens": 10.0} for of in ("short", "long")},
            "early_seconds": {"after": 3.0},
        },
        "figure 13": PLANNED,
        "figure 15b": [8000, 6000],
    },
    "reallocation": {
        "": {"seconds": 100.0, "degrees": ["8"], "changes": 0, "change_seconds": 0.0, "failed_changes": 0}
    },
    "rotation": {"": 100.0},
}


def drawn(shape: Any, draw: random.Random) -> Any:
    """Of this shape; floats are others."""
    if isinstance(shape, dict):
        return {key: drawn(value, draw) for key, value in shape.items()}
    if isinstance(shape, list):
        return [drawn(value, draw) for value in shape]
    return shape * draw.uniform(0.8, 1.2) if isinstance(shape, float) else shape


@pytest.mark.parametrize("name", FIGURES)
def test_a_whole_figure_can_be_read_and_shown(name: str, tmp_path: Path) -> None:
    """So that no sweep of hours ends in a mistake of the reading."""
    one: Figure = import_module(BENCHES[name].module).FIGURE
    found: dict[int, dict[str, Any]] = {}
    for seed in SEEDS:
        draw = random.Random(seed)
        for cell in one.cells(False):
            shape = max((key for key in SHAPES[name] if cell.startswith(key)), key=len)
            found.setdefault(seed, {})[cell] = as_kept(drawn(SHAPES[name][shape], draw))
    if name == "rollpacker-figures":  # rounds of a kind are those of runs with rounds
        for of in found.values():
            for cell, played in of.items():
                if ("veRL" in cell and "steps" in played) or cell.endswith("plain") or "RLHFuse" in cell:
                    of[cell] = {
                        **played,
                        **{key: {"": played[key]["long"]} for key in ("steps", "rollouts", "training")},
                    }
    result = json.loads(json.dumps(one.put_together(found)))
    assert result["value"] > 0
    assert isinstance(result["holds"], bool)
    names = [row["what"] for row in result["detail"]["rows"]]
    assert len(names) == len(set(names))
    assert all(len(row["by_seed"]) == len(SEEDS) for row in result["detail"]["rows"])
    flagged = {row["calibration"] for row in result["detail"]["rows"] if "calibration" in row}
    assert flagged == {constant.name for constant in CONSTANTS if name in constant.rows}
    refused = {row["refused"] for row in result["detail"]["rows"] if "refused" in row}
    assert refused <= {one.why for one in REFUSED if name in one.rows}
    assert refused or name not in ("expert-parallelism", "heddle")
    assert not played_before(name, result["detail"]["rows"])
    assert any("assumed" in row for row in result["detail"]["rows"]) == any(name in one.rows for one in SHARES)
    (tmp_path / f"{name}.json").write_text(json.dumps(result))
    assert page(tmp_path)


@pytest.mark.parametrize("degree", [1, 8])
def test_no_rollout_is_faster_than_the_clairvoyant_bound(degree: int) -> None:
    given = ["run.steps=2", "rollout.groups_per_step=16", *([] if degree == 1 else heddle.cut((degree,), 8))]
    found = heddle.measure(heddle.base("math", 8, given))
    assert 0.2 * found["seconds"] < found["least"] <= found["seconds"]


def test_a_setting_of_routing_is_judged_where_it_was_not_chosen() -> None:
    gains = {"a": {"x": 1.5, "y": 1.3}, "b": {"x": 1.1, "y": 1.5}, "c": {"x": 1.4, "y": 1.0}}
    found = borrowed.in_rotation(gains)
    assert {load: one["chosen"] for load, one in found.items()} == {"a": "x", "b": "x", "c": "y"}
    assert {load: one["gain"] for load, one in found.items()} == {"a": 1.5, "b": 1.1, "c": 1.0}
    assert found["c"]["gain_in_hindsight"] == 1.4
