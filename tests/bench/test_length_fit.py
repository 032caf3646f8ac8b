"""The fit of recorded lengths finds the shares that lengths were made with, sizes are solved for printed times, and what is
committed is what was found."""

import json
import math

import numpy as np
import pytest

from orchestrator.sim.paper_setups import load_scenario
from scripts.bench.papers import response_sizes
from scripts.bench.papers.length_fit import (
    FILE,
    LengthShares,
    RecordedEpisode,
    distance,
    drawn_again,
    main,
    of_set,
    recorded_tasks,
    shares_of,
)

TRUE = LengthShares(mean=5.0, sigma=0.8, prompt=0.3, trajectory=0.4)


def made(shares: LengthShares, prompts: int = 120, members: int = 6, seed: int = 1) -> list[RecordedEpisode]:
    """A set of these shares, with unequal numbers of turns."""
    rng = np.random.default_rng(seed)
    rest = 1.0 - shares.prompt - shares.trajectory
    parts = [shares.sigma * math.sqrt(share) for share in (shares.prompt, shares.trajectory, rest)]
    found = []
    for prompt in range(prompts):
        common = parts[0] * rng.standard_normal()
        for _ in range(members):
            own, turns = parts[1] * rng.standard_normal(), int(rng.integers(1, 7))
            logs = shares.mean + common + own + parts[2] * rng.standard_normal(turns)
            found.append(RecordedEpisode(str(prompt), 0, tuple(int(one) for one in np.exp(logs) + 1)))
    return found


def test_a_fit_recovers_the_shares_that_lengths_were_made_with_within_its_intervals() -> None:
    found = of_set(made(TRUE))
    assert found["sigma"] == pytest.approx(TRUE.sigma, rel=0.08)
    for name, true in (("prompt", TRUE.prompt), ("trajectory", TRUE.trajectory)):
        low, high = found["shares"][name]["interval"]
        assert low <= true <= high, name
        assert high - low < 0.25
    error = found["error"]
    assert error["trajectory, fitted"]["distance"] < 0.6 * error["trajectory, independent"]["distance"]
    assert error["turn, fitted"]["distance"] < 0.1


def test_what_never_varies_has_no_shares_and_a_single_turn_none_of_its_trajectory() -> None:
    assert shares_of([RecordedEpisode(str(one // 2), 0, (2, 2)) for one in range(8)]) == LengthShares(
        math.log(2), 0.0, 0.0, 0.0
    )
    single = shares_of([RecordedEpisode(one.prompt, 0, one.said[:1]) for one in made(TRUE)])
    assert single.trajectory == 0.0
    assert single.prompt == pytest.approx(TRUE.prompt, abs=0.12)
    with pytest.raises(ValueError, match="two prompts"):
        shares_of([RecordedEpisode("one", 0, (2, 3))])


def test_lengths_are_drawn_again_within_their_limit_and_a_prompt_s_part_is_its_trajectories_own() -> None:
    episodes = [RecordedEpisode("a", 0, (1,) * 3), RecordedEpisode("a", 0, (1,) * 3)]
    first, second = drawn_again(LengthShares(5.0, 1.0, 1.0, 0.0), episodes, 400, np.random.default_rng(0))
    assert first.shape == (20, 3)
    assert np.abs(first - second).max() <= 1, "nothing but the rounding differs"
    assert first.min() >= 1
    assert first.max() <= 400
    assert distance(np.array([1.0, 2.0]), np.array([1.0, 2.0])) == 0.0
    assert distance(np.array([1.0, 1.0]), np.array([2.0, 2.0])) == 1.0


def test_prompts_that_come_back_are_told_from_prompts_that_do_not() -> None:
    once = made(TRUE, prompts=20)
    assert of_set(once)["visits"] is None
    twice = [RecordedEpisode(one.prompt, place % 2, one.said) for place, one in enumerate(once)]
    assert of_set(twice)["visits"]["correlation"] > 0.3


def test_the_committed_fit_is_that_of_the_committed_sets() -> None:
    kept = json.loads(FILE.read_text(encoding="utf-8"))["sets"]
    sets = recorded_tasks()
    assert {*sets, "tau-bench/airline"} == set(kept)
    for name in ("smollm2/puzzles", "smollm2/problems"):
        assert json.loads(json.dumps(of_set(sets[name]))) == kept[name]


def test_a_file_without_tau_bench_is_not_written() -> None:
    with pytest.raises(SystemExit):
        main(["--write"])


def test_a_size_is_solved_for_a_printed_time_and_none_is_made_up_where_none_gives_it() -> None:
    assert response_sizes.solved(lambda size: 3 * size + 20, 320.0, 10.0, 900.0) == pytest.approx(100, rel=0.01)
    assert response_sizes.solved(lambda size: size**2, 2500.0, 10.0, 90.0) == pytest.approx(50, rel=0.06)
    assert response_sizes.solved(lambda size: size, 100.0, 1.0, 90.0) is None


def test_the_committed_sizes_are_those_of_the_scenarios_and_their_residuals_are_said() -> None:
    found = json.loads(response_sizes.FILE.read_text(encoding="utf-8"))["sizes"]
    assert [one["solved_tokens"] is None for one in found] == [False, False, True]
    for one in found:
        scenario, task = one["task"].split(" and ")[0].split(", ")
        assert load_scenario(scenario).sim.tasks[task].response_tokens == one["frozen_tokens"]
        if one["solved_tokens"]:
            assert abs(one["residual"]["off"]) < 0.05
            assert one["frozen_tokens"] == pytest.approx(one["solved_tokens"], rel=0.1)
            assert one["tests"]
        else:
            assert one["why_not_frozen"]
