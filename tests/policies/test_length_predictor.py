"""Length prediction: forecasts are always usable, learn online, are calibrated, survive being saved; the measures are right."""

from __future__ import annotations

import math
import random
import tracemalloc
from dataclasses import replace
from functools import lru_cache

import numpy as np
import pytest

from orchestrator.api import ContextStart, Prompt, Trajectory, Turn
from orchestrator.policies.prediction import length_predictor
from orchestrator.policies.prediction.length_features import (
    PROMPT_TOKENS,
    SIZE,
    TAIL_TOKENS,
    HistoryFeatures,
    TrajectoryProgress,
    encode_features,
    make_bends,
    progress_of,
    turn_boundaries,
)
from orchestrator.policies.prediction.length_predictor import (
    HistoryPredictor,
    LengthForecast,
    LengthOutcome,
    LengthPredictor,
    ProgressivePredictor,
    is_usable,
)
from orchestrator.policies.prediction.online_estimators import RATE, ConformalIntervals, RidgeRegression
from scripts.bench.papers import prediction as bench
from scripts.bench.papers.length_sets import Case, outcome_of


def episode(number: int, draw: random.Random, *, complete: bool = True, turns: int = 5) -> LengthOutcome:
    """Long if its prompt holds token 7, longer when the first answer holds token 9; lognormal beside."""
    long_prompt, plan = draw.random() < 0.3, draw.random() < 0.5
    scale = 40 * (4 if long_prompt else 1) * (3 if plan else 1)
    said = [max(1, round(scale * draw.lognormvariate(0, 0.25))) for _ in range(draw.randint(2, turns))]
    prompt = (7, 3, 4) if long_prompt else (5, 3, 4)
    tail = (*prompt, 9, 9) if plan else (*prompt, 8, 8)
    before = [
        TrajectoryProgress(
            f"t{number}",
            "made-up",
            f"p{number}",
            prompt,
            prompt if turn == 0 else tail,
            (3,) * (turn + 1),
            tuple(said[:turn]),
            (0.5,) * turn,
        )
        for turn in range(len(said))
    ]
    return LengthOutcome(tuple(before), tuple(said), complete)


@lru_cache
def lessons() -> bytes:
    predictor, draw = ProgressivePredictor(100.0, seed=3), random.Random(1)
    for one in range(500):
        predictor.learn(episode(one, draw))
    return predictor.dump()


def taught() -> ProgressivePredictor:
    predictor = ProgressivePredictor(100.0, seed=3)
    predictor.load(lessons())
    return predictor


def wrongness(predictor: LengthPredictor, turn: int) -> float:
    draw, found = random.Random(99), []
    for number in range(300):
        outcome = episode(10_000 + number, draw)
        forecast = predictor.forecast(outcome.before[turn])
        found.append(abs(math.log1p(forecast.tokens) - math.log1p(sum(outcome.said[turn:]))))
    return sum(found) / len(found)


@pytest.mark.slow
def test_what_is_learned_before_a_turn_helps_and_what_is_learned_in_it_helps_more() -> None:
    predictor, history = taught(), HistoryPredictor(100.0)
    draw = random.Random(1)
    for number in range(500):
        history.learn(episode(number, draw))
    assert wrongness(predictor, 0) < 0.9 * wrongness(history, 0)
    assert wrongness(predictor, 1) < 0.85 * wrongness(predictor, 0)  # the first answer tells which half it is


def test_before_anything_is_learned_the_prior_stands_in_then_the_task() -> None:
    predictor, outcome = ProgressivePredictor(100.0), episode(50, random.Random(5))
    first = predictor.forecast(outcome.before[0])
    assert (first.source, round(first.tokens, 6)) == ("prior", 100.0)
    for number in range(5):
        predictor.learn(episode(number, random.Random(number)))
    assert predictor.forecast(outcome.before[0]).source == "task"
    assert predictor.forecast(outcome.before[0]).tokens != first.tokens


@pytest.mark.parametrize(
    "progress",
    [
        TrajectoryProgress("t", "other task", "p", (), (), (), (), ()),
        TrajectoryProgress("t", "made-up", "p", (2**31,) * 999, (1,), (10**12,), (10**12,) * 300, (math.nan, math.inf)),
        TrajectoryProgress("t", "made-up", "p", (1,), (), (0,), (0, 0, 0), (-1.0, 0.0, 0.0)),
    ],
)
def test_every_forecast_is_usable_whatever_is_asked(progress: TrajectoryProgress) -> None:
    for predictor in (ProgressivePredictor(100.0), taught(), HistoryPredictor(100.0)):
        forecast = predictor.forecast(progress)
        assert is_usable(forecast)
        assert forecast.low <= forecast.tokens <= forecast.high


def test_values_that_are_no_forecast_are_found() -> None:
    good = LengthForecast(5.0, 1.0, 9.0, 2.0, "model")
    assert is_usable(good)
    for bad in (math.nan, math.inf, -1.0, "7", None):
        assert not is_usable(LengthForecast(bad, 1.0, 9.0, 2.0, "model"))  # type: ignore[arg-type]


def test_intervals_cover_what_they_say_on_what_comes_after() -> None:
    predictor, draw, inside, asked = taught(), random.Random(7), 0, 0
    for number in range(250):
        outcome = episode(20_000 + number, draw)
        for turn, progress in enumerate(outcome.before):
            forecast = predictor.forecast(progress)
            inside += forecast.low <= sum(outcome.said[turn:]) <= forecast.high
            asked += 1
    assert 0.74 <= inside / asked <= 0.87  # 0.8 is asked for


@pytest.mark.slow
def test_trajectories_that_were_cut_off_do_not_teach_that_nothing_is_long() -> None:
    """From some moment on every long one is cut off after its first turn."""
    draw = random.Random(4)
    censored, naive = taught(), taught()
    for number in range(300):
        outcome = episode(number, draw)
        if sum(outcome.said) > 300:
            short = LengthOutcome(outcome.before[:1], outcome.said[:1], False)
            censored.learn(short)
            naive.learn(LengthOutcome(short.before, short.said, True))
        else:
            censored.learn(outcome)
            naive.learn(outcome)
    long_one = next(one for one in (episode(n, random.Random(n)) for n in range(99)) if sum(one.said) > 1500)
    assert censored.forecast(long_one.before[0]).tokens > 1.2 * naive.forecast(long_one.before[0]).tokens


def test_a_saved_predictor_goes_on_as_it_was() -> None:
    first, draw = taught(), random.Random(11)
    second = ProgressivePredictor(100.0, seed=3)
    second.load(first.dump())
    for number in range(50):
        outcome = episode(number, draw)
        assert [first.forecast(one) for one in outcome.before] == [second.forecast(one) for one in outcome.before]
        first.learn(outcome)
        second.learn(outcome)
    assert second.version == first.version


def test_what_is_no_saved_predictor_is_refused_and_changes_nothing() -> None:
    predictor, outcome = taught(), episode(1, random.Random(2))
    before = predictor.forecast(outcome.before[1])
    other = ProgressivePredictor(100.0, seed=4)  # other rectifiers: its weights mean something else
    for data in (b"", b"PK\x03\x04junk", b"\x80\x04\x95", predictor.dump()[:-50], other.dump()):
        with pytest.raises(ValueError, match=r"saved|kind|stages|archive|pickle|zip"):
            predictor.load(data)
    assert predictor.forecast(outcome.before[1]) == before


def test_boundaries_are_what_was_known_when_the_forecasts_were_made() -> None:
    turns = (
        Turn(tuple(range(300)), (1, 2, 3), (0.0,) * 3, ((0, 3),), environment_seconds=0.5),
        Turn((9,), (4, 5), (0.0,) * 2, ((0, 2),), environment_seconds=0.25),
        Turn((8,), (6,), (0.0,), ((1, 1),), context=ContextStart((77, 78), "restart", 2, 300)),
    )
    trajectory = Trajectory("t1", "g1", "task", Prompt("p1", "task", 0, ""), turns, 1.0, "1", 0, False)
    first, second, third = turn_boundaries(trajectory)
    assert first == TrajectoryProgress(
        "t1", "task", "p1", tuple(range(44, 300)), tuple(range(204, 300)), (300,), (), ()
    )
    assert len(first.prompt_ids) == PROMPT_TOKENS
    assert len(first.tail_ids) == TAIL_TOKENS
    assert (second.said, second.heard, second.tool_seconds) == ((3,), (300,), ())  # the environment is at work
    assert second.tail_ids[-4:] == (299, 1, 2, 3)
    assert (third.said, third.heard, third.tool_seconds) == ((3, 2), (300, 1), (0.5,))
    assert third.tail_ids[-6:] == (1, 2, 3, 9, 4, 5)
    begun = progress_of("t1", trajectory.prompt, turns, 3)
    assert begun.tail_ids == (77, 78, 8, 6)  # the context began anew
    assert outcome_of(trajectory).said == (3, 2, 1)


def test_vectors_have_their_size_and_tell_tokens_apart() -> None:
    bends, past = make_bends(0), HistoryFeatures(3.0, 2.0, 1.0)
    one = TrajectoryProgress("t", "a", "p", (1, 2, 3), (4, 5), (3,), (), ())
    other = TrajectoryProgress("t", "a", "p", (3, 2, 1), (4, 5), (3,), (), ())
    assert encode_features(one, past, bends).shape == (SIZE,)
    assert np.abs(encode_features(one, past, bends) - encode_features(other, past, bends)).max() > 0.1


def test_ridge_is_weighted_least_squares_whose_old_rows_fade() -> None:
    draw = np.random.default_rng(0)
    ridge = RidgeRegression(np.full(3, 1e-6), 1, 1, memory=200.0)
    for slope in (1.0, 5.0):
        for _ in range(1500):
            x = np.concatenate([[1.0], draw.standard_normal(2)])[None, :]
            ridge.add(x, x[:, 1:2] * slope, (0,))
    ridge.solve()
    assert ridge.predict(np.array([[1.0, 1.0, 0.0]]), (0,))[0, 0] == pytest.approx(5.0, abs=0.1)


def test_bounds_are_order_statistics_and_unknown_while_there_are_too_few() -> None:
    conformal = ConformalIntervals(2, 100, 0.8, rate=0.0)
    assert conformal.bounds(0) == (-math.inf, math.inf)
    for value in range(-9, 10):
        conformal.add(0, float(value), (-math.inf, math.inf))
    conformal.refresh()
    assert conformal.bounds(0) == (-8.0, 8.0)
    assert conformal.bounds(1) == (-8.0, 8.0)  # the other class stands in


@pytest.mark.parametrize("shift", [0.0, 3.0, -3.0])
def test_intervals_cover_what_they_say_in_the_long_run_though_what_comes_changes(shift: float) -> None:
    """Half way the residuals become ``shift`` larger, and vary a third as much; fixed quantiles of the window miss that."""
    covered = {}
    for rate in (0.0, RATE):
        draw, conformal, inside = random.Random(3), ConformalIntervals(1, 2000, 0.8, rate), []
        for number in range(2400):
            late = number >= 1200
            value = draw.gauss(shift * late, 1.0 / 3.0 if late else 1.0)
            low, high = conformal.bounds(0)
            inside.append((low <= value, value <= high))
            conformal.add(0, value, (low, high))
            if number % 16 == 0:
                conformal.refresh()
        for side in (0, 1):  # proposition 4.1 of Gibbs and Candes
            missed = 1.0 - sum(row[side] for row in inside) / len(inside)
            if rate:
                assert missed - 0.1 <= (1.0 + rate) / (rate * len(inside))
        late_ones = inside[1200:1600]
        covered[rate] = sum(all(row) for row in late_ones) / len(late_ones)
    assert abs(covered[RATE] - 0.8) < abs(covered[0.0] - 0.8) - 0.05


def test_recall_counts_ties_in_part_and_the_oracle_is_perfect() -> None:
    true = np.array([1.0, 2.0, 3.0, 4.0, 5.0])
    assert bench.recall(true, true, 0.2) == 1.0
    assert bench.recall(-true, true, 0.2) == 0.0
    assert bench.recall(np.ones(5), true, 0.2) == pytest.approx(0.2)
    draw = random.Random(3)
    cases = [Case(f"p{number}", 0, episode(number, draw)) for number in range(60)]
    said = {case.outcome.before[0].trajectory: case.outcome.said for case in cases}
    found = bench.online(cases, lambda: bench.OraclePredictor(said)).measures()
    assert all(found[f"turn {turn}"]["recall_0.1"] == 1.0 for turn in bench.TURNS)
    assert found["turn 1"]["pearson"] == pytest.approx(1.0)


def test_a_trajectory_is_judged_before_it_is_learned() -> None:
    """Else the history of a prompt that comes once would be perfect."""
    draw = random.Random(3)
    cases = [Case(f"p{number}", 0, episode(number, draw)) for number in range(80)]
    assert bench.online(cases, lambda: HistoryPredictor(10.0)).measures()["turn 0"]["recall_0.1"] < 0.6


def test_what_is_remembered_of_prompts_is_bounded_by_their_turns_and_survives_a_file(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("orchestrator.policies.prediction.length_predictor._RESPONSES", 60)
    made = ProgressivePredictor(50.0)
    for number in range(40):
        said = (5,) * 10
        before = tuple(
            TrajectoryProgress(f"t{number}", "t", f"p{number // 2}", (1,), (2,), (1,), said[:turn], ())
            for turn in range(10)
        )
        made.learn(LengthOutcome(before, said, True))
    assert [*made.memory.prompts] == ["t\np17", "t\np18", "t\np19"], "the last ones, with 20 turns each"
    assert made.memory.responses == 60
    again = ProgressivePredictor(50.0)
    again.load(made.dump())
    assert (again.memory.prompts, again.memory.responses) == (made.memory.prompts, 60)


def test_a_trajectory_is_learned_as_it_was_asked_about_with_ten_thousand_beside_it() -> None:
    """20 turns each: when it ends, nothing of what it was asked may be gone."""
    made = ProgressivePredictor(50.0)
    assert length_predictor._ASKED >= 200_000
    progress = [
        TrajectoryProgress("t", "t", "p", (1, 2), (3, turn), (4,) * (turn + 1), (7,) * turn, ()) for turn in range(20)
    ]
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for number in range(50):
            for one in progress:
                made.forecast(replace(one, trajectory=f"t{number}"))
        each = (tracemalloc.get_traced_memory()[0] - before) / 1000
    finally:
        tracemalloc.stop()
    assert each < 1000, f"{each} bytes of each"
