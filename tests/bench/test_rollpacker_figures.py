"""RollPacker's setups are valid, its figures weigh rounds as they come up, and the policies they need act in the simulator."""

import json
import re
import statistics
from pathlib import Path
from typing import Any

import pytest

from orchestrator.api import ConfigError
from orchestrator.build import training_units
from orchestrator.config import Config
from orchestrator.sim.paper_setups import ROLLPACKER, RUNGS, rollpacker
from orchestrator.sim.simulated_cluster import engine_costs, kv_bytes
from orchestrator.sim.simulated_run import simulate
from scripts.bench import describe
from scripts.bench.papers.rollpacker_figures import (
    FIGURE,
    OVER_RLHFUSE,
    PLANNER,
    SEARCHED,
    SIZES,
    STAGES,
    TABLE_2,
    Played,
    only,
    play,
    search,
    stages,
    table_2,
)
from scripts.bench.papers.rollpacker_why import BAR, WHY, reasons, unexplained

NO_REWARD = [f"sim.tasks.{task}.reward_seconds=0" for task in ("math", "code", "judged")]


def events_of(config: Config, kind: str) -> list[dict[str, Any]]:
    return [event for event in map(json.loads, simulate(config).events.splitlines()) if event["kind"] == kind]


def test_every_rung_of_every_setup_is_valid_and_has_the_papers_gpus() -> None:
    for size, (_, gpus, ranks, longest, replica) in ROLLPACKER.items():
        for rung in RUNGS:
            config = rollpacker(size, rung)
            assert config.rollout.workers * config.sim.tensor_parallel == config.sim.trainer_gpus == gpus
            units = training_units(config)
            assert len(units) * replica == gpus
            assert {len(unit) * ranks for unit in units} == {replica}
            assert config.rollout.environments >= 1024 * (1.5625 if config.rollout.rounds.enabled else 1)
            assert config.rollout.engine.max_model_len * config.sim.grain == 512 + longest
            tokens = engine_costs(config).kv_tokens
            assert tokens
            assert kv_bytes(config) * tokens == pytest.approx(config.rollout.engine.kv_cache_mb << 20)
    assert rollpacker("14B/16k", "veRL").sim.tasks["math"].response_tokens == pytest.approx(780, rel=0.01), "the file's"
    with pytest.raises(ConfigError, match="data_parallel"):
        rollpacker("14B/16k", "veRL", 8)


def test_a_period_weighs_rounds_as_they_come_up() -> None:
    times = {"short": [2.0, 4.0], "long": [13.0]}
    played = Played(times, times, {"": 1.0, "short": 128.0, "long": 32.0})
    assert played.step == pytest.approx((4 * 3 + 13) / 5)
    assert Played({"": [1.0, 3.0]}, {"": [1.0]}, {"": 1.0}).step == 2.0
    assert played.as_dict()["long_step_seconds"] == 13.0


def test_each_printed_number_of_table_2_has_its_row() -> None:
    one = Played({"short": [10.0], "long": [10.0]}, {"short": [5.0]}, {"": 1.0, "short": 4.0, "long": 1.0})
    rows = table_2({size: dict.fromkeys((*RUNGS, PLANNER), one) for size in SIZES})
    assert [row["printed"] for row in rows[:12]] == [f"{number}" for printed in TABLE_2.values() for number in printed]
    assert [row["printed"] for row in rows[12:15]] == [f"{number}" for number in OVER_RLHFUSE]
    assert all(row["simulated"] == 1.0 for row in rows)
    assert "rollpacker-figures" in dict(describe())


def test_with_rounds_a_synchronous_rollout_ends_with_its_winners_not_with_the_longest() -> None:
    """In step with the losers, before each phase of a turn, nobody would be ahead."""
    given = {"scale": 4, "steps": 3, "extra": ["rollout.rounds.epoch_prompts=0", *NO_REWARD]}
    plain, tail = (play(rollpacker("14B/16k", rung, **given)) for rung in ("veRL", "+ tail batching"))
    assert statistics.mean(tail.rollouts["short"]) < 0.7 * plain.rollout


def test_adaptive_timeouts_cut_what_runs_on_after_right_answers_and_earn_nothing_for_it() -> None:
    """The run's own policy, in the simulator."""
    found = {}
    for timeout in ("40", "adaptive"):
        extra = [*only("code"), f"reward.timeout={timeout}", "sim.reward_slots=0", "run.mode=sync"]
        steps = events_of(rollpacker("7B/8k", "veRL", 4, steps=3, extra=extra), "step")
        found[timeout] = statistics.mean(step["reward_mean"] for step in steps)
    assert 0 < found["adaptive"] < found["40"]


@pytest.mark.long
def test_the_quick_form_has_all_its_rungs() -> None:
    result = FIGURE.run(quick=True, nonce="n")
    assert result["kind"] == "simulated"
    assert set(result["detail"]["ladder"]["7B/8k"]) == {*RUNGS, PLANNER}
    assert result["detail"]["roofline_error"]["median"]


@pytest.mark.long
def test_the_searched_eta_is_the_one_that_took_the_least_where_it_was_tried() -> None:
    detail = search(0)
    tried = detail["rollout_seconds_tried"]
    assert [float(eta) for eta in tried] == list(SEARCHED)
    assert detail["stays_with"] == min(SEARCHED, key=lambda eta: tried[str(eta)])


def test_what_a_step_is_made_of_adds_up_and_more_scores_at_a_time_shorten_the_reward_alone() -> None:
    shape = {"scale": 4, "steps": 3}
    found = [
        stages(rollpacker("14B/16k", "veRL", **shape, extra=[*only("code"), f"sim.reward_slots={slots}"]))
        for slots in (32, 512)
    ]
    for one in found:
        assert sum(one[name] for name in STAGES) == pytest.approx(one["step"], rel=0.1)
    assert found[0]["reward"] > 1.5 * found[1]["reward"] > 1.0
    assert found[0]["rollout"] == pytest.approx(found[1]["rollout"])
    assert found[0]["training"] == pytest.approx(found[1]["training"])


def test_every_row_that_is_further_off_than_the_bar_has_a_reason_with_a_number_on_the_page() -> None:
    found = json.loads((Path(__file__).parents[2] / "docs" / "results" / "rollpacker-figures.json").read_text())
    rows = found["detail"]["rows"]
    assert unexplained(rows) == []
    assert unexplained([*rows, {"what": "something new", "off": 0.06}]) == ["something new"]
    said = reasons(found)
    assert all(re.search(r"\d", text.partition(":")[2]) for text in said)
    for why in WHY:
        covered = [row for row in rows if re.match(why.rows, row["what"])]
        assert covered, f"{why.title} covers no row"
        shown = any(text.startswith(f"- **{why.title}**") for text in said)
        assert shown is any(abs(row["off"]) > BAR for row in covered)
