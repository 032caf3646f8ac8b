"""Plays the simulated figures of the papers: each is a declaration (:class:`Figure`), and this the one way that it is run.

A figure is made of parts, each of which plays its runs and returns what it found and a row a printed number. Nothing is kept
between calls. A row says where the printed number is from; ``explained`` is why ours differs, where it does by more than the
simulator's error; rows that do not fit are shown like the others.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from importlib.resources import files
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from orchestrator.config import Config
from orchestrator.sim.simulated_run import simulate
from scripts.bench.result import frame, now

Row = dict[str, Any]
Found = tuple[dict[str, Any], list[Row]]  # for the detail, rows
Parts = Mapping[str, Callable[[], Found]]
Verdict = tuple[float, bool, dict[str, Any]]  # value, whether the bar holds, detail

_RESULTS = Path(str(files("orchestrator"))).parent / "docs" / "results"
_STUDENT = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}  # 97.5th percentile of Student's t, by the number of values


@dataclass(frozen=True, slots=True)
class Figure:
    """``claim``: what the value is; ``printed``: the number of ``paper`` that it stands beside; ``parts(quick)``: what is
    played, in its order; ``read(found, rows, quick)``: value, verdict and detail, from the details of the parts; ``statistic``:
    what is taken over runs; ``apart``: so many parts at a time are played, in processes of their own."""

    name: str
    claim: str
    paper: str
    printed: float
    bar: str
    parts: Callable[[bool], Parts]
    read: Callable[[dict[str, Any], list[Row], bool], Verdict]
    seeds: Sequence[int] = (0,)
    statistic: str = "one run each: a seed gives the same run again"
    apart: int = 1

    def run(self, quick: bool, nonce: str) -> dict[str, Any]:
        """Simulate: the result. Raises SimulationFailed."""
        begun, parts = now(), self.parts(quick)
        rows, details = list[Row](), dict[str, Any]()
        for name, (detail, more) in self._played(parts):
            print(
                f"{self.name}, {name}: {[(one['what'], one['simulated']) for one in more]}", file=sys.stderr, flush=True
            )
            rows += more
            details[name] = detail
        value, holds, detail = self.read(details, rows, quick)
        about = {"seeds": list(self.seeds[: 1 if quick else None]), "statistic": self.statistic}
        return frame(
            self.name,
            "simulated",
            value=value,
            unit=self.claim,
            reference=self.paper,
            reference_value=self.printed,
            bar=self.bar,
            holds=holds,
            detail={"rows": rows, **about, **detail, "simulator_error": own_error()},
            quick=quick,
            nonce=nonce,
            begun=begun,
        )

    def _played(self, parts: Parts) -> list[tuple[str, Found]]:
        workers = min(self.apart, len(parts))
        if workers == 1:
            return [(name, part()) for name, part in parts.items()]
        with ProcessPoolExecutor(min(workers, os.cpu_count() or 1), mp_context=get_context("spawn")) as pool:
            asked = {name: pool.submit(part) for name, part in parts.items()}
            return [(name, future.result()) for name, future in asked.items()]


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


def own_error() -> dict[str, Any]:
    """Of the simulator: from the committed result of ``sim-error``, where there is one."""
    file = _RESULTS / "sim-error.json"
    if not file.is_file():
        return {"step_time": None, "papers_median": None, "source": "no committed result of bench sim-error here"}
    found = json.loads(file.read_text(encoding="utf-8"))
    papers = found["detail"]["papers"]["median_error"]
    return {"step_time": found["value"], "papers_median": papers, "source": "docs/results/sim-error.json"}


def row(
    what: str, printed: float | tuple[float, float], ours: float, source: str, explained: str = "", text: str = ""
) -> Row:
    """A figure: the printed number or range (``text``: how it is printed), and ours. ``off``: how far ours is outside of it,
    relative to its nearer end."""
    low, high = printed if isinstance(printed, tuple) else (printed, printed)
    off = 0.0 if low <= ours <= high else (ours / high - 1.0 if ours > high else ours / low - 1.0)
    return {
        "what": what,
        "printed": text or (f"{low} to {high}" if isinstance(printed, tuple) else f"{printed}"),
        "simulated": round(ours, 4),
        "off": round(off, 4),
        "source": source,
        "explained": explained,
    }


def unprinted(what: str, ours: float, source: str) -> Row:
    """A row that no paper prints."""
    return row(what, (0.0, 1e9), ours, source, text="not printed")


def interval(values: Sequence[float]) -> dict[str, Any]:
    """Mean of what each seed gave, and the interval of 95 % of Student's t; None for one value."""
    mean, half = statistics.mean(values), None
    if len(values) > 1:
        half = _STUDENT[len(values)] * statistics.stdev(values) / len(values) ** 0.5
    return {"mean": mean, "by_seed": list(values), "interval": None if half is None else [mean - half, mean + half]}
