"""Plays the simulated figures of the papers: each is a declaration (:class:`Figure`), and this the one way that it is run.

A figure is made of cells, each a function of a seed that plays a run or a few and returns what it found; and of a reading, which
makes value, rows and detail of what the cells found and plays nothing. Cells share nothing, so that they may be played on
different days (:mod:`scripts.bench.papers.sweep`). A row says where the printed number is from; ``explained`` is why ours
differs, where it does by more than the simulator's error; rows that do not fit are shown like the others.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

from orchestrator.config import Config
from orchestrator.sim.simulated_run import simulate
from scripts.bench.papers.calibration import assumed_for, calibrated_by
from scripts.bench.papers.refusals import refused_for
from scripts.bench.result import frame, now

Row = dict[str, Any]
Cell = Callable[[int], Any]  # of a seed: what JSON can say
Cells = Mapping[str, Cell]  # by a name such as "8B/affinity"
Found = Mapping[str, Any]  # what the cells of one seed found, by their names

SEEDS = (0, 1, 2, 3, 4)
_RESULTS = Path(str(files("orchestrator"))).parent / "docs" / "results"
_STUDENT = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}  # 97.5th percentile of Student's t, by the number of values
_WORST = "value: the worst seed; rows: means over seeds, with the interval of 95 % of Student's t; all else: of the worst seed"


class Reading(NamedTuple):
    """Of a figure: ``value``, whether its bar ``holds``, its rows, all else."""

    value: float
    holds: bool
    rows: list[Row]
    detail: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Figure:
    """``claim``: what the value is; ``printed``: the number of ``paper`` that it stands beside; ``cells(quick)``: what is played,
    in its order; ``read(found, quick)``: of what the cells of each seed found; ``statistic``: what is taken over seeds."""

    name: str
    claim: str
    paper: str
    printed: float
    bar: str
    cells: Callable[[bool], Cells]
    read: Callable[[Mapping[int, Found], bool], Reading]
    seeds: Sequence[int] = SEEDS
    statistic: str = _WORST

    def run(self, quick: bool, nonce: str) -> dict[str, Any]:
        """Play all cells of all seeds, one after the other: the result. Nothing is kept. Raises SimulationFailed."""
        begun, found = now(), dict[int, dict[str, Any]]()
        for seed in self.seeds[: 1 if quick else None]:
            for name, cell in self.cells(quick).items():
                print(f"{self.name}, seed {seed}: {name}", file=sys.stderr, flush=True)
                found.setdefault(seed, {})[name] = as_kept(cell(seed))
        return self.put_together(found, quick=quick, nonce=nonce, begun=begun)

    def put_together(
        self, found: Mapping[int, Found], *, quick: bool = False, nonce: str = "", begun: str = ""
    ) -> dict[str, Any]:
        """The result of what the cells found, by seed."""
        value, holds, rows, detail = self.read(found, quick)
        about = {"seeds": sorted(found), "statistic": self.statistic, "roofline_error": roofline_error()}
        return frame(
            self.name,
            "simulated",
            value=value,
            unit=self.claim,
            reference=self.paper,
            reference_value=self.printed,
            bar=self.bar,
            holds=holds,
            detail={"rows": [_flagged(self.name, one) for one in rows], **detail, **about},
            quick=quick,
            nonce=nonce,
            begun=begun,
        )


def as_kept(found: Any) -> Any:
    """What a file of it would give back."""
    return json.loads(json.dumps(found))


def each_seed(
    read: Callable[[Found, bool], Reading], worst: Callable[[Iterable[float]], float] = min
) -> Callable[[Mapping[int, Found], bool], Reading]:
    """A figure's reading from that of one seed: the value is the ``worst`` seed's, the detail is that seed's, the bar holds where
    it holds for each, and rows are means over the seeds."""

    def whole(found: Mapping[int, Found], quick: bool) -> Reading:
        readings = {seed: read(one, quick) for seed, one in found.items()}
        values = [one.value for one in readings.values()]
        value = worst(values)
        shown = next(seed for seed, one in readings.items() if one.value == value)
        about = {"value_by_seed": interval(values), "detail_of_seed": shown}
        rows = rows_over_seeds([one.rows for one in readings.values()])
        return Reading(value, all(one.holds for one in readings.values()), rows, {**readings[shown].detail, **about})

    return whole


def rows_over_seeds(rows: Sequence[Sequence[Row]]) -> list[Row]:
    """``rows`` of each seed: one a name, with the mean, its interval, and each seed's."""
    table = dict[str, list[Row]]()
    for one in (one for of_seed in rows for one in of_seed):
        table.setdefault(one["what"], []).append(one)
    return [_mean_row(ones) for ones in table.values()]


def _mean_row(ones: Sequence[Row]) -> Row:
    spread = interval([one["simulated"] for one in ones])
    low, high = ones[0]["range"]
    about = {"by_seed": spread["by_seed"], "interval": spread["interval"]}
    return {**ones[0], "simulated": round(spread["mean"], 4), "off": _off(low, high, spread["mean"]), **about}


def _flagged(figure: str, one: Row) -> Row:
    """With the constant that was taken from what the row is compared with, what is ASSUMED from recorded sets, and why a real run
    refuses it."""
    assumed = assumed_for(figure, one["what"])
    constant, why = calibrated_by(figure, one["what"]), refused_for(figure, f"{one['what']} {one['source']}")
    flags = {"calibration": constant, "assumed": assumed, "refused": why}
    return {**one, **{name: flag for name, flag in flags.items() if flag}}


class Run:
    """A simulated run as figures read it: by step, of which the first begins with an evaluation. Raises SimulationFailed."""

    def __init__(self, config: Config, **given: Any) -> None:
        self.config = config
        self.result = simulate(config, **given)
        self.events: list[dict[str, Any]] = [json.loads(line) for line in self.result.events.splitlines()]

    def events_of(self, kind: str) -> list[dict[str, Any]]:
        """Those of a kind, in their order."""
        return [event for event in self.events if event["kind"] == kind]

    @cached_property
    def seconds(self) -> float:
        """Of the whole run."""
        return float(self.result.summary["seconds"])

    @cached_property
    def rollouts(self) -> dict[int, tuple[float, float]]:
        """When each step began to wait for its batch, and had it."""
        stages = [event for event in self.events_of("stage") if event["stage"] == "get_batch"]
        return {
            event["step"]: (event["start"], event["end"]) for event in sorted(stages, key=lambda one: int(one["step"]))
        }

    @cached_property
    def took(self) -> dict[int, float]:
        """Seconds of each step's rollout."""
        return {step: end - start for step, (start, end) in self.rollouts.items()}

    @cached_property
    def steps(self) -> dict[int, dict[str, Any]]:
        """The event of each step: its ``t`` is when it ended, ``seconds`` those of its training."""
        return {event["step"]: event for event in sorted(self.events_of("step"), key=lambda one: int(one["step"]))}

    @cached_property
    def periods(self) -> dict[int, float]:
        """Seconds from the end of the step before to its own; not of the first."""
        return {step: self.steps[step]["t"] - self.steps[step - 1]["t"] for step in list(self.steps)[1:]}

    @cached_property
    def rounds(self) -> dict[int, str]:
        """``short`` or ``long``, of steps that have rounds."""
        return {event["step"]: event["round"] for event in self.events_of("round")}

    @cached_property
    def journal(self) -> list[dict[str, Any]]:
        """Changes of trajectories' states."""
        return [json.loads(line) for line in self.result.journal.splitlines()]

    def stages(self) -> dict[int, tuple[float, float]]:
        """Of each step: seconds from the first start of its batch's trajectories to the last response, and from there to the last
        reward."""
        of: dict[str, dict[str, float]] = {}
        batches: dict[int, list[str]] = {}
        for line in self.journal:
            of.setdefault(line["id"], {}).setdefault(line["state"], line["t"])
            if line["state"] == "trained":
                batches.setdefault(line["step"], []).append(line["id"])
        found = {}
        for step, batch in sorted(batches.items()):
            begun, played = min(of[one]["running"] for one in batch), max(of[one]["scoring"] for one in batch)
            found[step] = (played - begun, max(of[one]["buffered"] for one in batch) - played)
        return found


def roofline_error() -> dict[str, Any]:
    """Of the cost model that figures are played with: the median over the papers' absolute numbers that no constant was taken
    from, by the committed result of ``sim-error``, where there is one."""
    file = _RESULTS / "sim-error.json"
    if not file.is_file():
        return {"median": None, "source": "no committed result of bench sim-error here"}
    papers = json.loads(file.read_text(encoding="utf-8"))["detail"]["papers"]
    return {"median": papers["median_error"], "source": "docs/results/sim-error.json, the papers' absolute numbers"}


def row(
    what: str, printed: float | tuple[float, float], ours: float, source: str, explained: str = "", text: str = ""
) -> Row:
    """A figure: the printed number or range (``text``: how it is printed), and ours. ``off``: how far ours is outside of it,
    relative to its nearer end."""
    low, high = printed if isinstance(printed, tuple) else (printed, printed)
    return {
        "what": what,
        "printed": text or (f"{low} to {high}" if isinstance(printed, tuple) else f"{printed}"),
        "range": [low, high],
        "simulated": round(ours, 4),
        "off": _off(low, high, ours),
        "source": source,
        "explained": explained,
    }


def _off(low: float, high: float, ours: float) -> float:
    return round(0.0 if low <= ours <= high else (ours / high - 1.0 if ours > high else ours / low - 1.0), 4)


def unprinted(what: str, ours: float, source: str) -> Row:
    """A row that no paper prints."""
    return row(what, (0.0, 1e9), ours, source, text="not printed")


def interval(values: Sequence[float]) -> dict[str, Any]:
    """Mean of what each seed gave, and the interval of 95 % of Student's t; None for one value."""
    mean, half = statistics.mean(values), None
    if len(values) > 1:
        half = _STUDENT[len(values)] * statistics.stdev(values) / len(values) ** 0.5
    return {"mean": mean, "by_seed": list(values), "interval": None if half is None else [mean - half, mean + half]}
