"""Several experts become one forecast: never much worse than the best of them, and from what was known when it was asked."""

from __future__ import annotations

import asyncio
import lzma
import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from orchestrator.api import ConfigError, Prompt, Trajectory, Turn
from orchestrator.policies.prediction import length_predictor
from orchestrator.policies.prediction.history_encoder import HashedEncoder
from orchestrator.policies.prediction.length_features import DENSE, TrajectoryProgress
from orchestrator.policies.prediction.length_predictor import (
    HistoryPredictor,
    LengthOutcome,
    LengthPredictor,
    ProgressivePredictor,
)
from orchestrator.policies.prediction.online_estimators import ForecastStack, best_of_simplex
from scripts.bench.data.chat_tasks import ChatTask, Chores, Problems, Puzzles
from scripts.bench.papers import prediction as bench
from scripts.bench.papers.length_sets import Case, built_in, pack, packed, trajectories_of
from scripts.bench.papers.resampling import paired, words


def test_the_weights_are_the_best_of_the_simplex() -> None:
    """Karush, Kuhn, Tucker: where there is weight the gradient is smallest, and the same."""
    draw = np.random.default_rng(0)
    for size in (1, 2, 5, 8):
        for _ in range(40):
            rows = draw.standard_normal((30, size)) + draw.standard_normal(size)
            products, crosses = rows.T @ rows, rows.T @ (rows[:, 0] * 0.5 + draw.standard_normal(30))
            weights = best_of_simplex(products, crosses)
            gradient = products @ weights - crosses
            assert weights.min() >= 0
            assert weights.sum() == pytest.approx(1.0)
            assert (gradient[weights > 1e-6] <= gradient.min() + 1e-6 * np.abs(products).max()).all()


def test_what_is_combined_is_as_good_as_the_best_and_better_where_errors_differ() -> None:
    draw, stack = np.random.default_rng(1), ForecastStack(4, [0, 0], 4000.0)
    truth = draw.uniform(50.0, 150.0, 1200)
    said = np.stack([truth + draw.normal(0.0, wrong, 1200) for wrong in (10.0, 12.0, 60.0)] + [0.5 * truth], axis=1)
    said[:, 3] += draw.normal(0.0, 40.0, 1200)
    for start in range(0, 600, 10):
        stack.add(said[start : start + 10], truth[start : start + 10].tolist(), [start // 10 % 2] * 10, 1.0)
    stack.solve()
    combined = np.array([stack.combine(row, 0) for row in said[600:]])
    assert np.abs(combined - truth[600:]).mean() < 0.9 * np.abs(said[600:, 0] - truth[600:]).mean()
    assert stack.weights[0][2:].max() < 0.1


def world(kind: str, number: int, draw: random.Random) -> LengthOutcome:
    """What tells the length: the prompt's name (as siblings have it), its text, or what was said first. Three turns."""
    name, marked, first = number // 8, draw.random() < 0.3, draw.choice((10, 40))
    each = {"history": 20 * (1 + name * 7 % 9), "text": 160 if marked else 20, "progress": 4 * first}[kind]
    said = (first, *(max(1, round(each * draw.lognormvariate(0.0, 0.2))) for _ in range(2)))
    prompt = (7, 3, 4) if marked else (5, 3, 4)
    who = (f"t{number}", "made-up", f"p{name % 12}" if kind == "history" else f"p{number}")
    before = [
        TrajectoryProgress(*who, prompt, prompt, (3,) * max(1, turn), said[:turn], (0.1,) * (turn - 1))
        for turn in range(3)
    ]
    return LengthOutcome(tuple(before), said, True)


@pytest.mark.parametrize("kind", ["history", "text", "progress"])
def test_it_is_never_much_worse_than_a_baseline_whatever_tells_the_length(kind: str) -> None:
    wrong: dict[str, list[float]] = {}
    made: dict[str, LengthPredictor] = {
        "ours": ProgressivePredictor(50.0, seed=1),
        "prompt": ProgressivePredictor(50.0, seed=1, prompt_only=True),
        "history": HistoryPredictor(50.0),
    }
    for name, predictor in made.items():
        draw = random.Random(5)
        for number in range(240):
            outcome = world(kind, number, draw)
            for turn, progress in enumerate(outcome.before):
                error = predictor.forecast(progress).tokens - sum(outcome.said[turn:])
                if number >= 120 and turn:
                    wrong.setdefault(name, []).append(abs(error))
            predictor.learn(outcome)
    means = {name: sum(errors) / len(errors) for name, errors in wrong.items()}
    assert means["ours"] < 1.1 * min(means["prompt"], means["history"])
    if kind == "progress":
        assert means["ours"] < 0.7 * min(means["prompt"], means["history"])


def test_the_order_in_which_siblings_end_teaches_nothing() -> None:
    """Members begin together and end by length. Learned as of their end, those without finished siblings would be the short
    ones, and every trajectory that begins would be taken for one."""
    draw, predictor = random.Random(2), ProgressivePredictor(50.0, seed=1)
    forecasts = []
    for group in range(40):
        members = []
        for member in range(8):
            said = (10 * (member + 1) + draw.randint(0, 4),)
            begun = TrajectoryProgress(f"t{group}-{member}", "made-up", f"p{group}", (3, 4), (3, 4), (2,), (), ())
            members.append(LengthOutcome((begun,), said, True))
        forecasts += [predictor.forecast(one.before[0]).tokens for one in members]
        for one in members:
            predictor.learn(one)
    later = forecasts[-120:]
    assert 38 < sum(later) / len(later) < 58  # 47 in the mean


def test_the_encoder_learns_what_a_token_means_and_goes_on_from_its_arrays() -> None:
    def row(number: int) -> TrajectoryProgress:
        tokens = (*random.Random(number).choices(range(10, 30), k=6), 7 if number % 2 else 8)
        return TrajectoryProgress("t", "made-up", "p", tokens, tokens, (7,), (), ())

    encoder, other = HashedEncoder(seed=3), HashedEncoder(seed=3)
    numbers = np.zeros((1, DENSE))
    for number in range(300):
        encoder.learn([row(number)], numbers, np.array([[float(number % 2), 0.0]]), 1.0)
    said = [float(encoder.predict([row(1000 + number)], numbers)[0, 0]) for number in range(40)]
    assert min(said[1::2]) > max(said[0::2])
    other.restore(encoder.arrays())
    for one in (encoder, other):
        one.learn([row(1)], numbers, np.array([[1.0, 0.0]]), 1.0)
    assert np.array_equal(encoder.predict([row(5)], numbers), other.predict([row(5)], numbers))
    arrays = encoder.arrays()
    for broken in ({}, {**arrays, "out": np.full_like(arrays["out"], np.nan)}, {**arrays, "hidden": np.zeros((2, 2))}):
        with pytest.raises(ValueError, match="of another kind"):
            other.restore(broken)


def test_forecasts_that_are_all_equal_and_lengths_that_never_vary_are_borne() -> None:
    predictor = ProgressivePredictor(50.0, seed=1)
    for number in range(120):
        one = TrajectoryProgress(f"t{number}", "made-up", "p", (1,), (1,), (1,), (), ())
        predictor.learn(LengthOutcome((one,), (12,), True))
    forecast = predictor.forecast(TrajectoryProgress("x", "made-up", "p", (1,), (1,), (1,), (), ()))
    assert forecast.tokens == pytest.approx(12.0, rel=0.01)
    assert forecast.low <= 12.0 <= forecast.high + 0.1


def test_intervals_of_new_prompts_are_calibrated_on_known_ones_as_if_they_were_new(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Forty prompts come six times. What was new came first, when everything was four times as long."""

    def one(number: int, prompt: str, early: bool, draw: random.Random) -> LengthOutcome:
        said = (max(1, round((200 if early else 50) * draw.lognormvariate(0.0, 0.5))),)
        return LengthOutcome(
            (TrajectoryProgress(f"t{number}", "made-up", prompt, (3,), (3,), (1,), (), ()),), said, True
        )

    covered = {}
    for fresh in (0, 512):
        monkeypatch.setattr(length_predictor, "_FRESH", fresh)
        draw, predictor = random.Random(4), ProgressivePredictor(50.0, seed=1)
        for number in range(240):
            predictor.learn(one(number, f"p{number % 40}", number < 40, draw))
        predictor.finish()
        new = [one(1000 + number, f"new{number}", False, draw) for number in range(200)]
        made = [predictor.forecast(each.before[0]) for each in new]
        inside = [said.low <= each.said[0] <= said.high for said, each in zip(made, new, strict=True)]
        covered[fresh] = sum(inside) / len(inside)
    assert 0.7 <= covered[512] <= 0.9
    assert abs(covered[0] - 0.8) > 0.1, "the way that was left shows nothing"


# -- how sure a difference is ----------------------------------------------------------------------------------------------


def test_a_difference_has_an_interval_by_which_it_is_better_worse_or_a_tie() -> None:
    draw = np.random.default_rng(3)
    true = draw.uniform(10.0, 100.0, 300)
    good, bad = true + draw.normal(0.0, 10.0, 300), true + draw.normal(0.0, 60.0, 300)
    alike = true + draw.normal(0.0, 10.0, 300)
    groups = [f"p{number // 4}" for number in range(300)]
    found = [paired(ours, theirs, true, groups, bench.pearson, 1) for ours, theirs in ((good, bad), (bad, good))]
    assert [words(row) for row in found] == ["better", "worse"]
    for ours, theirs in ((good, alike), (alike, good)):
        assert words(paired(ours, theirs, true, groups, bench.pearson, 1)) == "tie"
    same = paired(good, good, true, groups, bench.pearson, 1)
    assert (same["gain"], same["low"], same["high"]) == (0.0, 0.0, 0.0)
    assert found[0] == paired(good, bad, true, groups, bench.pearson, 1)
    assert found[0]["low"] < found[0]["gain"] < found[0]["high"]
    for rows in (np.zeros(0), true[:5]):
        with pytest.raises(ValueError, match="as many of each"):
            paired(rows, true, true, groups, bench.pearson, 1)


def test_trajectories_of_one_prompt_are_drawn_together() -> None:
    """Ten alike say no more than one: counted one by one the interval would be a third as wide."""
    draw = np.random.default_rng(5)
    true = np.repeat(draw.uniform(10.0, 100.0, 40), 10)
    ours, theirs = (true + np.repeat(draw.normal(0.0, wide, 40), 10) for wide in (20.0, 30.0))
    width = {}
    for name, groups in (("prompts", [str(n // 10) for n in range(400)]), ("rows", [str(n) for n in range(400)])):
        row = paired(ours, theirs, true, groups, bench.pearson, 1)
        width[name] = row["high"] - row["low"]
    assert width["prompts"] > 2.0 * width["rows"]


def test_the_bench_says_of_each_measure_by_how_much_and_how_sure() -> None:
    cases = [
        Case(f"p{number // 4}", number % 4, world("progress", number, random.Random(number))) for number in range(120)
    ]
    found = bench.compare(cases, "online", 1)
    said = bench.verdict(found)
    for name in ("pearson", "recall_0.1", "recall_0.2"):
        for turn, gain, (low, high), is_ in zip(
            bench.TURNS, *(said[f"{name}_{what}"] for what in ("over_best_baseline", "interval", "is")), strict=True
        ):
            best = max(found[other][f"turn {turn}"][name] for other in bench.BASELINES)
            assert gain == pytest.approx(found["progressive"][f"turn {turn}"][name] - best, abs=1e-4)
            assert is_ == ("better" if low > 0 else "worse" if high < 0 else "tie")
    assert said["pearson_is"][2] == "better"
    told = bench.lines({"made up": found})
    assert len(told) == len(bench.TURNS) + 1
    assert told[2].startswith("made up, turn 2: +")
    assert told[2].endswith("better")


# -- sets ----------------------------------------------------------------------------------------------------------------


def played(number: int, started: float, seconds: Sequence[float]) -> Trajectory:
    turns = tuple(Turn((1, 2), (3,) * 5, (), (), generate_seconds=each, environment_seconds=0.5) for each in seconds)
    ended = started + sum(seconds) + 0.5 * len(seconds)
    prompt = Prompt("p1", "made-up", 0, "")
    return Trajectory(f"t{number}", "g1", "made-up", prompt, turns, None, "1", 0, False, (), started, ended)


def test_a_packed_set_is_the_same_set_and_a_damaged_one_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "lengths_x.json.xz"
    file.write_bytes(pack([played(0, 1.0, (1.0, 2.0, 0.5)), played(1, 1.5, (4.0,))], {"what": "made up"}))
    first, second = packed(file)
    assert (first.asked, first.ended, second.asked, second.ended) == ((1.0, 2.0, 4.5), 6.0, (1.5,), 6.0)
    assert (first.outcome.said, second.trial) == ((5, 5, 5), 1)
    file.write_bytes(lzma.compress(b'{"format": "another"}'))
    for content in (file.read_bytes(), b"junk", b""):
        file.write_bytes(content)
        with pytest.raises(ConfigError, match="no packed set"):
            packed(file)
    with pytest.raises(ConfigError, match="not a run folder"):
        trajectories_of(tmp_path)


def test_the_sets_that_come_along_are_whole_and_say_where_they_are_from() -> None:
    assert {"frozenlake", "tasks"} <= set(built_in())
    for path in built_in().values():
        assert path.stat().st_size < 1 << 20
        text = lzma.decompress(path.read_bytes()).decode()
        assert '"licence":' in text[:1000]
        assert '"how":' in text[:1000]
        assert len(packed(path)) > 100


def test_a_forecast_does_not_know_of_siblings_that_still_ran() -> None:
    """Three at once: the history has heard of none when they are asked for; one later has heard of three."""
    heard: list[tuple[str, int]] = []

    class Listening(HistoryPredictor):
        def forecast(self, progress: TrajectoryProgress):  # type: ignore[no-untyped-def]
            members = self.memory.prompts.get("made-up\np1", [])
            heard.append((progress.trajectory, len(members)))
            return super().forecast(progress)

    runs = [
        played(0, 0.0, (1.0,) * 3),
        played(1, 0.0, (2.0,) * 3),
        played(2, 0.0, (4.0,) * 3),
        played(3, 50.0, (1.0,) * 3),
    ]
    from scripts.bench.papers.length_sets import _cases

    bench.online(_cases(runs), lambda: Listening(10.0), first=0.0)
    assert [known for name, known in heard if name in ("t0", "t1") and known] == [1]  # the last turn of the second
    assert [known for name, known in heard if name == "t3"] == [3, 3, 3]


# -- the tasks that chat models are recorded on ----------------------------------------------------------------------------


class Letters:
    """A chat template of characters."""

    end_id = 1

    def opening(self, text: str) -> tuple[int, ...]:
        return tuple(map(ord, text))

    def following(self, text: str, ended: bool) -> tuple[int, ...]:
        return (*(() if ended else (1,)), *map(ord, text))

    def text(self, token_ids: Sequence[int]) -> str:
        return "".join(chr(token) for token in token_ids if token != 1)


def talk(task: ChatTask, payload: str, say: Callable[[int], str]) -> tuple[int, bool]:
    async def scenario() -> tuple[int, bool]:
        environment = task.environment()
        await environment.reset(Prompt("p", task.name, 0, payload))
        for turn in range(1, task.max_turns + 1):
            result = await environment.step((*map(ord, say(turn)), 1))
            if result.done or result.truncated:
                return turn, result.done
        raise AssertionError("it never ended")

    return asyncio.run(scenario())


def test_a_right_answer_ends_a_problem_and_wrong_ones_last_to_the_limit() -> None:
    task = Problems(Letters(), 128)
    assert talk(task, "Two and two?|4", lambda turn: "It is 5, no: 4." if turn == 2 else "None.") == (2, True)
    assert talk(task, "Two and two?|4", lambda turn: "5") == (task.max_turns, False)


def test_a_puzzle_is_asked_for_again_until_its_answer_is_said() -> None:
    pytest.importorskip("reasoning_gym")
    task = Puzzles(Letters(), 128)
    assert talk(task, "calendar_arithmetic/3", lambda turn: "A Tuesday." if turn == 3 else "Sunday") == (3, True)
    assert talk(task, "gcd/3", lambda turn: "It is 1.") == (1, True)
    assert talk(task, "gcd/3", lambda turn: "Who knows") == (task.max_turns, False)
    kinds = {next(task.prompts("train", seed)).payload.partition("/")[0] for seed in range(40)}
    assert len(kinds) > 4


def test_a_chore_is_done_by_the_commands_that_it_names() -> None:
    plan = ["go hall", "take key", "go bedroom", "open", "put it there"]
    task = Chores(Letters(), 128)
    payload = "kitchen/drawer/key:hall lamp:kitchen soap:bathroom/key drawer"
    assert talk(task, payload, lambda turn: f"I {plan[turn - 1]} now.") == (5, True)
    assert talk(task, payload, lambda turn: "Hm.") == (task.max_turns, False)
    assert math.isfinite(len(next(task.prompts("train", 0)).payload))


def test_cases_without_times_are_asked_in_their_order() -> None:
    cases = [Case(f"p{number}", 0, world("text", number, random.Random(number))) for number in range(40)]
    assert bench.online(cases, lambda: HistoryPredictor(10.0)).measures()["turn 0"]["trajectories"] == 30
