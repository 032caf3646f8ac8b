"""How well the lengths of trajectories are known after turns 0, 1 and 2, on trajectories that were not trained on.

For each set: the progressive predictor (:mod:`orchestrator.policies.prediction.length_predictor`) beside the baselines
of Heddle 7.2, by the paper's two measures: recall of the longest tenth and fifth, and Pearson's correlation of
predicted and true length (tokens generated in all: what was said, and what is forecast), over the trajectories with
more than two turns, the same ones after each turn. Baselines are given what was said too (at least so much), which the
paper's are not.

Sets: those that come with the package (:func:`scripts.bench.papers.length_sets.built_in`) and, beside them,
``RL_COSERVE_PREDICTION_SETS``, ``name=PATH`` separated by blanks; a PATH is a run folder
(``scripts/bench/data/record_lengths.sh``), a packed set or a file of tau-bench. What is judged: recorded runs, in time:
each forecast is asked for when the run asked for it, and knows what had ended by then; it is judged from the second
quarter on. tau-bench, of which there are 200 only and no times: by the other trials of the same prompts, and by other
prompts. The baseline of the prompt alone knows the prompt's finished siblings too, which the paper's does not.

Each difference to the better baseline comes with an interval of 95 % (:mod:`scripts.bench.papers.resampling`): one that
has 0 in it is a tie, and is called so whatever its sign. Coverage of the intervals is that of all forecasts of a set,
the oracle's apart.
"""

from __future__ import annotations

import os
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from orchestrator.api import ConfigError
from orchestrator.policies.prediction.length_features import TrajectoryProgress
from orchestrator.policies.prediction.length_predictor import (
    HistoryPredictor,
    LengthForecast,
    LengthOutcome,
    LengthPredictor,
    ProgressivePredictor,
)
from scripts.bench.papers.length_sets import Case, built_in, packed, recorded, tau_bench
from scripts.bench.papers.resampling import paired, words
from scripts.bench.result import frame, now

Array = np.ndarray[Any, np.dtype[np.float64]]

NAME = "prediction"
SETS = "RL_COSERVE_PREDICTION_SETS"
TURNS = (0, 1, 2)
MOST_TURNS = 12  # of a trajectory that are asked for
COVERAGE = 0.8
BASELINES = ("prompt only", "history")
_TAILS = (0.1, 0.2)
PRIOR = 100.0  # tokens; before anything is learned


class OraclePredictor:
    """Knows. ``said``: by trajectory, tokens of each of its responses. For recorded trajectories."""

    def __init__(self, said: Mapping[str, Sequence[int]]) -> None:
        self._said = said

    def forecast(self, progress: TrajectoryProgress) -> LengthForecast:
        """See the protocol."""
        left = self._said[progress.trajectory][progress.turns :]
        tokens = float(sum(left))
        return LengthForecast(tokens, tokens, tokens, float(len(left)), "oracle")

    def learn(self, outcome: LengthOutcome) -> None:
        """There is nothing that it could learn."""


def predictors(seed: int) -> dict[str, Callable[[], LengthPredictor]]:
    """Those that are compared."""
    return {
        "progressive": lambda: ProgressivePredictor(PRIOR, coverage=COVERAGE, seed=seed),
        "prompt only": lambda: ProgressivePredictor(PRIOR, coverage=COVERAGE, seed=seed, prompt_only=True),
        "history": lambda: HistoryPredictor(PRIOR),
    }


class Tally:
    """Forecasts beside what came, by turn."""

    def __init__(self) -> None:
        self.rows: dict[int, list[tuple[float, float, float]]] = {turn: [] for turn in TURNS}
        self.whose: dict[int, list[str]] = {turn: [] for turn in TURNS}  # task and prompt of each row
        self.covered: list[bool] = []

    def ask(self, predictor: LengthPredictor, case: Case, turn: int) -> None:
        """A trajectory that the predictor has not seen, before a turn."""
        said = case.outcome.said
        if turn >= MOST_TURNS:
            return
        forecast, left = predictor.forecast(case.outcome.before[turn]), sum(said[turn:])
        self.covered.append(forecast.low <= left <= forecast.high)
        if turn in self.rows and len(said) > TURNS[-1]:
            self.rows[turn].append((forecast.tokens, float(left), float(sum(said[:turn]))))
            self.whose[turn].append(f"{case.outcome.before[0].task}/{case.prompt}")

    def lengths(self, turn: int) -> tuple[Array, Array]:
        """Predicted and true, of the whole."""
        data = np.array(self.rows[turn])
        return data[:, 0] + data[:, 2], data[:, 1] + data[:, 2]

    def measures(self) -> dict[str, Any]:
        """By turn."""
        found: dict[str, Any] = {"coverage": sum(self.covered) / len(self.covered)}
        for turn, rows in self.rows.items():
            data, (predicted, true) = np.array(rows), self.lengths(turn)
            found[f"turn {turn}"] = {
                "trajectories": len(rows),
                "pearson": pearson(predicted, true),
                "pearson_remaining": pearson(data[:, 0], data[:, 1]),
                **{f"recall_{share:g}": recall(predicted, true, share) for share in _TAILS},
            }
        return found


def pearson(predicted: Sequence[float] | np.ndarray[Any, Any], true: Sequence[float] | np.ndarray[Any, Any]) -> float:
    """The correlation; 0 where either does not vary."""
    if len(true) < 2 or np.std(predicted) == 0 or np.std(true) == 0:
        return 0.0
    return float(np.corrcoef(predicted, true)[0, 1])


def recall(predicted: np.ndarray[Any, Any], true: np.ndarray[Any, Any], share: float) -> float:
    """Of the longest ``share``: how many are among so many that were predicted longest. Ties count in part, as if they were
    broken at random."""
    number = max(1, round(share * len(true)))
    return float((_membership(predicted, number) * _membership(true, number)).sum() / number)


_MEASURES: dict[str, Callable[[Array, Array], float]] = {
    "pearson": pearson,
    **{f"recall_{share:g}": partial(recall, share=share) for share in _TAILS},
}


def _membership(values: np.ndarray[Any, Any], number: int) -> np.ndarray[Any, Any]:
    """How much each value belongs to the largest ``number``: 1, 0, or the share of those that tie at the edge."""
    edge = np.sort(values)[-number]
    above, at = values > edge, values == edge
    return np.asarray(above + at * ((number - above.sum()) / at.sum()))


def online(cases: Sequence[Case], make: Callable[[], LengthPredictor], first: float = 0.25) -> Tally:
    """In time: a forecast knows the trajectories that had ended when it was asked for, siblings that still ran it does not.
    Judged after the first part. Cases without times: all that ended before."""
    predictor, tally = make(), Tally()
    moments: list[tuple[float, int, int, int]] = []  # when, learned before asked, case, turn
    for number, case in enumerate(cases):
        asked = case.asked or (float(number),) * len(case.outcome.said)
        moments += [(when, 1, number, turn) for turn, when in enumerate(asked)]
        moments.append((case.ended if case.asked else number + 0.5, 0, number, 0))
    for _, ask, number, turn in sorted(moments):
        if not ask:
            predictor.learn(cases[number].outcome)
        elif number >= first * len(cases):
            tally.ask(predictor, cases[number], turn)
        else:
            predictor.forecast(cases[number].outcome.before[turn])
    return tally


def folds(cases: Sequence[Case], make: Callable[[], LengthPredictor], part: Callable[[Case], int]) -> Tally:
    """Each part is judged by a predictor that has learned the others."""
    tally = Tally()
    for held in sorted({part(case) for case in cases}):
        taught = [case for case in cases if part(case) != held]
        judge([case for case in cases if part(case) == held], taught, make(), tally)
    return tally


def judge(cases: Sequence[Case], taught: Sequence[Case], predictor: LengthPredictor, tally: Tally) -> None:
    """Ask for all boundaries of ``cases`` after ``taught`` was learned."""
    for case in taught:
        predictor.learn(case.outcome)
    if isinstance(predictor, ProgressivePredictor):
        predictor.finish()
    for case in cases:
        for turn in range(len(case.outcome.before)):
            tally.ask(predictor, case, turn)


def compare(cases: Sequence[Case], how: str, seed: int) -> dict[str, Any]:
    """All predictors on a set. ``how``: "online", "trials" or "prompts"."""
    ways: dict[str, Callable[[Callable[[], LengthPredictor]], Tally]] = {
        "online": lambda make: online(cases, make),
        "trials": lambda make: folds(cases, make, lambda case: case.trial % 4),
        "prompts": lambda make: folds(cases, make, lambda case: zlib.crc32(case.prompt.encode()) % 5),
    }
    tallies = {name: ways[how](make) for name, make in predictors(seed).items()}
    totals = {case.outcome.before[0].trajectory: case.outcome.said for case in cases}
    tallies["oracle"] = ways[how](lambda: OraclePredictor(totals))
    found: dict[str, Any] = {name: tally.measures() for name, tally in tallies.items()}
    found["differences"] = [differences(tallies, found, turn, seed) for turn in TURNS]
    return found


def differences(
    tallies: dict[str, Tally],
    found: dict[str, Any],
    turn: int,
    seed: int,
    name_of_ours: str = "progressive",
    others: Sequence[str] = BASELINES,
) -> dict[str, Any]:
    """After a turn: by how much ours is better than that of the others which is the best one there, by each measure."""
    ours, true = tallies[name_of_ours].lengths(turn)
    rows: dict[str, Any] = {"turn": turn}
    for name, measure in _MEASURES.items():
        other = max(others, key=lambda one: found[one][f"turn {turn}"][name])
        theirs = tallies[other].lengths(turn)[0]
        row = paired(ours, theirs, true, tallies[name_of_ours].whose[turn], measure, seed)
        rows[name] = {"over": other, **row, "is": words(row)}
    return rows


def verdict(found: dict[str, Any]) -> dict[str, Any]:
    """Of one set: by how much ours is better than the better baseline after each turn, whether that is more than chance, and
    whether it rises."""
    values = [found["progressive"][f"turn {turn}"]["pearson"] for turn in TURNS]
    rows: dict[str, Any] = {"rises": values[0] < values[-1]}
    for name in _MEASURES:
        rows[f"{name}_over_best_baseline"] = [row[name]["gain"] for row in found["differences"]]
        rows[f"{name}_interval"] = [[row[name]["low"], row[name]["high"]] for row in found["differences"]]
        rows[f"{name}_is"] = [row[name]["is"] for row in found["differences"]]
    rows["better"] = min(rows["pearson_over_best_baseline"]) > 0
    return rows


def lines(tables: dict[str, Any]) -> list[str]:
    """For a reader: each set's differences with their intervals, a tie called so."""
    found = []
    for name, table in tables.items():
        for row in table["differences"]:
            said = row["pearson"]
            sure = f"95 %: {said['low']:+.3f} to {said['high']:+.3f}"
            found.append(f"{name}, turn {row['turn']}: {said['gain']:+.3f} over {said['over']} ({sure}), {said['is']}")
        found.append(f"{name}: intervals of {COVERAGE:.0%} cover {table['progressive']['coverage']:.0%}")
    return found


def sets() -> dict[str, list[tuple[str, list[Case]]]]:
    """By name: how each is judged, and its cases. Raises ConfigError."""
    found: dict[str, list[tuple[str, list[Case]]]] = {
        name: [("online", packed(path))] for name, path in built_in().items()
    }
    for item in os.environ.get(SETS, "").split():
        name, separator, path = item.partition("=")
        if not separator or not Path(path).exists():
            raise ConfigError(SETS, item, "write NAME=PATH, of a run folder, a packed set or a file of tau-bench")
        if Path(path).is_dir():
            found[name] = [("online", recorded(path))]
        elif path.endswith(".xz"):
            found[name] = [("online", packed(path))]
        else:
            cases = tau_bench(path)
            found[name] = [("trials", cases), ("prompts", cases)]
    return found


def run(quick: bool, nonce: str) -> dict[str, Any]:
    """Measure. Raises ConfigError for a set that cannot be read."""
    begun, seed = now(), zlib.crc32(nonce.encode())
    tables: dict[str, Any] = {}
    for name, ways in sets().items():
        for how, cases in ways[:1] if quick else ways:
            table = compare(cases[:500] if quick else cases, how, seed)
            tables[f"{name}, {how}"] = {"trajectories": len(cases), **verdict(table), **table}
    gains = [min(table["pearson_over_best_baseline"]) for table in tables.values()]
    errors = [abs(table["progressive"]["coverage"] - COVERAGE) for table in tables.values()]
    return frame(
        NAME,
        "real",
        value=min(gains),
        unit="Pearson's r of the progressive predictor less that of the better baseline, least of turns 0, 1, 2 and sets",
        reference="prompt only and history (Heddle 7.2, figure 13, whose bars are not in our copy)",
        reference_value=0.0,
        bar="> 0 on every set, rising with turns",
        holds=min(gains) > 0 and all(table["rises"] for table in tables.values()),
        detail={
            "sets": tables,
            "lines": lines(tables),
            "calibration_error": max(errors),
            "coverage_wanted": COVERAGE,
            "cost": cost(seed),
            "load_average": os.getloadavg()[0],
        },
        quick=quick,
        nonce=nonce,
        begun=begun,
    )


def cost(seed: int) -> dict[str, float]:
    """Microseconds of processor time of a forecast and of learning a trajectory, in process, on made-up trajectories."""
    draw = np.random.default_rng(seed)
    predictor = ProgressivePredictor(PRIOR, seed=seed)
    outcomes = [_made_up(number, draw) for number in range(400)]
    start = time.process_time()
    for outcome in outcomes:
        predictor.learn(outcome)
    middle = time.process_time()
    asked = 0
    for outcome in outcomes:
        for progress in outcome.before:
            predictor.forecast(progress)
            asked += 1
    ended = time.process_time()
    return {"forecast_us": (ended - middle) / asked * 1e6, "learn_us": (middle - start) / len(outcomes) * 1e6}


def _made_up(number: int, draw: np.random.Generator) -> Any:
    from orchestrator.api import Prompt, Trajectory, Turn
    from scripts.bench.papers.length_sets import outcome_of

    turns = tuple(
        Turn(tuple(draw.integers(0, 50_000, 200).tolist()), tuple(draw.integers(0, 50_000, 100).tolist()), (), ())
        for _ in range(int(draw.integers(1, 12)))
    )
    prompt = Prompt(f"p{number // 8}", "made-up", number, "")
    return outcome_of(Trajectory(f"t{number}", f"g{number // 8}", "made-up", prompt, turns, 0.0, "1", 0, False))
