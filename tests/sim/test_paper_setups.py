"""The papers' setups load, the ablation counts what it says, and the fitted cost model recovers what it was made from."""

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from xml.etree import ElementTree

import pytest

from orchestrator import cli
from orchestrator.api import ConfigError
from orchestrator.config import Config, load_config
from orchestrator.sim.ablation import (
    FEATURES,
    PLANNED,
    SYNCHRONOUS,
    AblationFeature,
    AblationRow,
    ablate,
    ablation_svg,
    format_rows,
    planner_setup,
    synchronous_setup,
)
from orchestrator.sim.cost_model import CHUNK_TOKENS, seconds_of
from orchestrator.sim.paper_setups import load_scenario
from orchestrator.sim.simulated_cluster import engine_costs, fleet, trainer_costs
from scripts.bench import describe
from scripts.bench.papers import printed
from scripts.bench.papers.affinity import FLEETS, config_of, config_of_task
from scripts.bench.papers.calibrate import FittedCosts, Step, errors, fit, left_out, rollout_seconds
from scripts.bench.papers.rollart_setups import LADDER, rollart
from scripts.bench.papers.run_figures import measure
from scripts.bench.papers.runner import interval, row
from scripts.bench.papers.simulated_page import page

NAMES = sorted(file.name.removesuffix(".toml") for file in (files("orchestrator.sim") / "scenarios").iterdir())


@pytest.mark.parametrize("name", NAMES)
def test_every_scenario_loads_and_its_engines_exist(name: str) -> None:
    config = load_scenario(name)
    assert all(engine_costs(config, hardware).kv_tokens for hardware in set(fleet(config)))
    text = (files("orchestrator.sim") / "scenarios" / f"{name}.toml").read_text(encoding="utf-8")
    assert text.startswith(("# Roll", "# Heddle", "# ROSE"))  # its source
    assert (
        load_scenario(name, scale=4).batch_trajectories * 4 <= config.batch_trajectories + 3 * config.rollout.group_size
    )


def test_an_nth_of_a_setup_trains_an_nth_of_the_batch_in_the_same_time() -> None:
    whole, part = (trainer_costs(load_scenario("rollart", scale=scale)) for scale in (1, 8))
    assert part.train([64]) == pytest.approx(whole.train([64] * 8))
    doubled = trainer_costs(load_scenario("rollart", ["sim.trainer_gpus=64"])).train([64] * 8)
    assert whole.train([64] * 8) / 2 < doubled < whole.train([64] * 8)  # twice the GPUs are not twice as fast


def test_workers_stand_still_at_each_update_for_as_long_as_a_transfer_that_nothing_overlaps() -> None:
    plain, stalled = (measure(small([f"sim.stall_seconds={seconds}"])).step_seconds for seconds in (0, 50))
    assert stalled >= plain + 50


def test_every_rung_and_fleet_of_the_papers_is_a_valid_config() -> None:
    for model in ("8B", "14B", "32B"):
        for rung in LADDER:
            config = rollart(model, rung)
            gpus = config.sim.tensor_parallel * config.rollout.workers
            assert gpus == (128 if rung in ("sync", "sync_plus") else 96)
            assert engine_costs(config, fleet(config)[0]).kv_tokens
        assert all(config_of(model, name, 8, 5).rollout.workers for name in FLEETS)
    assert config_of_task("gem-math", "H20", 64).rollout.workers == 6
    with pytest.raises(ConfigError, match="scenario"):
        load_scenario("nobody's")


def small(overrides: Sequence[str]) -> Config:
    base = [
        "run.steps=4",
        "rollout.groups_per_step=3",
        "rollout.group_size=3",
        "rollout.environments=24",
        "rollout.workers=2",
    ]
    return load_config(None, [*base, "evaluation.prompts=1", "sim.train_seconds_per_token=0.02", *overrides])


def test_an_ablation_compares_each_feature_with_all_on_seed_by_seed() -> None:
    features = (
        AblationFeature("async", (), ("run.mode=sync_plus", "rollout.alpha=0")),
        AblationFeature("fast rewards", ("sim.reward_seconds=0",), ("sim.reward_seconds=40",)),
        AblationFeature("nothing", (), ()),
    )
    rows = ablate(2, features, small)
    assert [row.name for row in rows] == ["", "async", "fast rewards", "nothing"]
    assert rows[1].ratio > 1.05
    assert rows[2].ratio > 1.05
    assert rows[3].ratios == (1.0, 1.0)
    assert rows[2].seconds[0] / rows[0].seconds[0] == pytest.approx(rows[2].ratios[0])
    assert "fast rewards" in format_rows(rows)
    of_five = AblationRow("x", (), (1.0, 1.1, 1.2, 1.3, 1.4))  # deviation 0.158, t 2.776
    assert of_five.interval == pytest.approx((1.2 - 0.1963, 1.2 + 0.1963), abs=1e-4)
    assert (rows[3].interval, AblationRow("x", (), (1.2,)).as_dict()["interval"]) == ((1.0, 1.0), None)
    assert {"async", "fast rewards", "nothing", "all on"} <= set(ElementTree.fromstring(ablation_svg(rows)).itertext())
    with pytest.raises(ConfigError):
        ablate(0, features, small)


def test_features_have_names_of_their_own_and_valid_overrides() -> None:
    assert len({feature.name for feature in FEATURES}) == len(FEATURES)
    on = [override for feature in FEATURES for override in feature.on]
    for feature in FEATURES:
        assert load_scenario("rollart", [*on, *feature.off], 16) != load_scenario("rollart", on, 16)
    for features, base in ((SYNCHRONOUS, synchronous_setup), (PLANNED, planner_setup)):
        for feature in features:
            assert base([*feature.on, *feature.off]) != base(feature.on)
    assert planner_setup(PLANNED[0].off).rollout.workers * 2 == planner_setup(()).rollout.workers == 16


def test_the_command_line_ablates_and_draws(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    speed = AblationFeature("speed", (), ("sim.decode_seconds_per_step=0.5",))
    monkeypatch.setattr("orchestrator.sim.ablation.FEATURES", (speed,))
    config = tmp_path / "c.toml"
    config.write_text(
        "[run]\nsteps = 3\n[rollout]\ngroups_per_step = 2\ngroup_size = 2\nenvironments = 8\n[evaluation]\nprompts = 1\n"
    )
    assert cli.main(["sim", str(config), "--ablate", "--seeds", "1", "--svg", str(tmp_path / "a.svg"), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["without"] for row in rows] == ["", "speed"]
    assert rows[1]["over_all_on"] > 1
    assert "speed" in (tmp_path / "a.svg").read_text()


def test_measure_leaves_out_the_steps_that_fill_the_pipeline() -> None:
    config = small(["run.steps=5"])
    found = measure(config)
    steps = [e for e in map(json.loads, found.result.events.splitlines()) if e["kind"] == "step"]
    assert found.step_seconds == pytest.approx((steps[4]["t"] - steps[1]["t"]) / 3)
    assert found.throughput == pytest.approx(found.tokens / found.step_seconds)


# -- calibration -------------------------------------------------------------------------------------------------------

TRUE = FittedCosts(step=5e-3, sequence=2e-4, context=3e-7, token=4e-5, pair=1e-8)


def measured(sizes: Sequence[tuple[int, int]], noise: float = 0.0) -> list[Step]:
    rng = random.Random(1)
    rows = []
    for sequences, prompt in sizes:
        for prefill, context in ((prompt, prompt), (0, prompt + 12)):
            step = Step(sequences, context, prefill, 1.0)
            rows.append(Step(sequences, context, prefill, TRUE.seconds(step) * rng.uniform(1 - noise, 1 + noise)))
    return rows


def test_a_fit_recovers_the_costs_and_predicts_sizes_it_has_not_seen() -> None:
    found = fit(measured([(1, 32), (16, 32), (64, 32), (1, 256), (16, 256)]))
    assert [found.step, found.sequence, found.context, found.token, found.pair] == pytest.approx(
        [TRUE.step, TRUE.sequence, TRUE.context, TRUE.token, TRUE.pair]
    )
    held = measured([(8, 192), (48, 224)])
    assert max(map(abs, errors(found, held))) < 1e-9
    noisy = fit(measured([(1, 32), (16, 32), (64, 32), (1, 256), (16, 256)], 0.05))
    assert 0 < max(map(abs, errors(noisy, held))) < 0.15


def test_prefills_of_several_chunks_and_beyond_the_caches_are_fitted_and_played_alike() -> None:
    true = replace(TRUE, chunk=1e-3, spill=2e-5, cached=4096)
    sizes = [(1, 32), (16, 32), (64, 32), (1, 256), (16, 256), (24, 256), (32, 256), (64, 256), (4, 512), (64, 128)]
    rows = []
    for sequences, prompt in sizes:
        for prefill, context in ((prompt, prompt), (0, prompt + 12)):
            step = Step(sequences, context, prefill, 1.0)
            rows.append(Step(sequences, context, prefill, true.seconds(step)))
    found = fit(rows)
    assert found.cached == 4096
    assert found.costs == pytest.approx(true.costs, rel=1e-6)
    step = Step(48, 224.0, 224, 1.0)  # 10,752 tokens: a whole chunk, and 2,560
    assert step.features(4096)[-1] == CHUNK_TOKENS - 4096
    tokens, pairs = 48 * 224, 48 * 224 * 112.0
    fixed, growing = true.decode(48)
    assert true.seconds(step) == pytest.approx(true.prefill(tokens, pairs, 0) + fixed + growing * 48 * 224)
    assert true.seconds(step) > replace(true, spill=0.0, chunk=0.0).seconds(step) + 2 * 1e-3


def test_a_size_that_is_left_out_is_predicted_by_the_others_and_a_wrong_one_shows() -> None:
    sizes = [measured([size]) for size in ((1, 32), (16, 32), (64, 32), (1, 256), (16, 256))]
    assert max(map(abs, left_out(sizes))) < 1e-4
    step = sizes[2][1]
    sizes[2][1] = Step(step.sequences, step.context, step.prefill, 1.3 * step.seconds)
    assert max(map(abs, left_out(sizes))) > 0.1


def test_no_fitted_cost_is_negative() -> None:
    rows = [Step(count, 10.0, 0, 1.0 + 0.1 * count - 1e-4 * count * 10) for count in (1, 2, 4, 8, 16, 32, 64, 128)]
    found = fit(rows)
    assert min(found.step, found.sequence, found.context, found.token, found.pair) >= 0
    with pytest.raises(ConfigError):
        fit(rows[:3])


def test_a_rollout_is_the_sum_of_its_steps() -> None:
    """Three requests in two slots, step by step by hand."""
    expected = 0.0
    # r0 and r1 start: 10 + 20 tokens; two steps of both, then r0 has said its 2
    expected += 30 * TRUE.token + (50 + 200) * TRUE.pair
    fixed = TRUE.step + 2 * TRUE.sequence
    expected += seconds_of(2, fixed + 30 * TRUE.context, 2 * TRUE.context)
    # r2 starts beside r1; one step, then r1 has said its 3; then r2 alone
    expected += 5 * TRUE.token + 12.5 * TRUE.pair + fixed + (22 + 5) * TRUE.context
    expected += seconds_of(3, TRUE.step + TRUE.sequence + 6 * TRUE.context, TRUE.context)
    assert rollout_seconds(TRUE, [(10, 2), (20, 3), (5, 4)], 2) == pytest.approx(expected)


def test_the_papers_table_counts_only_rows_that_no_constant_came_from() -> None:
    rows = printed.rows(simulate=False)
    assert all(one["source"] and one["printed"] for one in rows)
    assert any(one["calibration"] for one in rows)
    for one in rows:
        assert one["error"] == pytest.approx(one["predicted"] / one["printed"] - 1, abs=1e-3)
    proving = sorted(abs(one["error"]) for one in rows if not one["calibration"])
    assert proving[0] <= printed.median_error(rows) <= proving[-1]
    assert [one["error"] for one in rows if one["what"].startswith("size")] == pytest.approx([0, 0, 0], abs=0.002)


def test_a_row_says_how_far_it_is_outside_of_the_printed_range() -> None:
    inside, above, below = (row("x", (1.0, 2.0), ours, "s") for ours in (1.5, 3.0, 0.5))
    assert (inside["off"], above["off"], below["off"]) == (0.0, 0.5, -0.5)
    assert (inside["printed"], row("x", 2, 3.0, "s")["printed"]) == ("1.0 to 2.0", "2")
    assert {"modes", "affinity", "sim-error", "sim-speed", "rollart-figures"} <= {name for name, _ in describe()}


def test_the_page_of_simulated_figures_is_what_its_files_say() -> None:
    folder = Path(__file__).parents[2] / "docs" / "results"
    assert (folder / "simulated.md").read_text(encoding="utf-8") == page(folder)


def test_an_interval_is_students_over_the_seeds_and_one_seed_has_none() -> None:
    found = interval([1.0, 2.0, 3.0])
    assert found["mean"] == 2.0
    assert found["interval"] == pytest.approx([2 - 4.303 / 3**0.5, 2 + 4.303 / 3**0.5])
    assert interval([5.0])["interval"] is None
