"""Settings chosen on two sets and judged on the third: by these two alone, on the lengths that were recorded."""

from __future__ import annotations

import math

import pytest

from scripts.bench.papers import rotation
from scripts.bench.papers.length_sets import built_in, episodes, packed
from scripts.bench.papers.rotation import FAMILIES, in_order, recorded, rotate, step_seconds


def test_the_setting_is_chosen_on_the_other_sets_alone() -> None:
    speeds = {
        "a": {"off": [1.0, 1.0], "x": [1.1, 1.3], "y": [2.0, 2.2]},
        "b": {"off": [1.0, 1.0], "x": [1.3, 1.3], "y": [0.8, 1.0]},
        "c": {"off": [1.0, 1.0], "x": [0.7, 0.9], "y": [0.5, 0.5]},
    }
    found = rotate(speeds)
    assert {name: one["chosen"] for name, one in found.items()} == {"a": "x", "b": "y", "c": "y"}
    assert found["c"]["gain"]["mean"] == 0.5  # what was best elsewhere costs half here
    assert (found["c"]["best_in_hindsight"], found["c"]["gain_in_hindsight"]) == ("off", 1.0)
    assert found["b"]["gain"]["by_seed"] == [0.8, 1.0]
    assert found["b"]["where_chosen"] == {"a": pytest.approx(2.1), "c": 0.5}


def test_the_lengths_are_those_of_the_packed_set_in_its_groups() -> None:
    traces, cases = recorded("smollm2"), packed(built_in()["smollm2"])
    assert len(traces.episodes) == len(cases) == 299
    said = [sum(turn.response for turn in episode.turns) for episode in traces.episodes]
    assert said == [sum(case.outcome.said) for case in cases]
    assert sorted(number for group in traces.groups for number in group) == list(range(299))
    assert len(traces.tasks) == len(traces.groups) == 43
    assert math.isclose(max(turn.environment_seconds for one in traces.episodes for turn in one.turns), 11.218649)


def test_a_seed_draws_the_order_of_groups_and_nothing_else() -> None:
    traces = episodes(built_in()["frozenlake"])
    one, again, other = (in_order(traces, seed) for seed in (1, 1, 2))
    assert one == again
    assert one.groups != other.groups
    assert sorted(one.groups) == sorted(other.groups) == sorted(traces.groups)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_setting_of_a_family_can_be_played_and_does_something(family: str) -> None:
    off, *others = FAMILIES[family].values()
    short = ("run.steps=2", "rollout.groups_per_step=4", "rollout.environments=40")
    seconds = [step_seconds("smollm2", setting, 0, short) for setting in (off, others[-1])]
    assert all(one > 0 for one in seconds)
    assert seconds[0] != seconds[1]


def test_quick_plays_one_family() -> None:
    played = {quick: {name.partition("/")[0]: None for name in rotation.FIGURE.cells(quick)} for quick in (True, False)}
    assert list(played[True]) == ["redundancy"]
    assert list(played[False]) == list(FAMILIES)
