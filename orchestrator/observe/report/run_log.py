"""A run folder, read whole: its figures (:mod:`orchestrator.observe.run_figures`) and every record that a report draws.

Guarantees: a line that a kill cut in half is left out and counted, never an error; a folder that is no run is a
:class:`~orchestrator.api.ConfigError`. A resume appends to the same log, so what lies beyond the checkpoint that it went
back to is there twice: ``steps`` and ``evaluations`` hold only what the run now consists of, while stages, updates and
incidents hold all that happened, because it did take that time. The journal, which may be larger than memory, is read a line
at a time, once, and only for who asks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from orchestrator.api import ConfigError, RunError
from orchestrator.api.jsontext import parse_object
from orchestrator.ledger import recount
from orchestrator.observe.event_records import (
    Borrowing,
    Evaluation,
    Incident,
    LedgerCounts,
    PoolSnapshot,
    ScaledEngine,
    Stage,
    Start,
    Step,
    Update,
    Warmup,
    WorkerSnapshot,
)
from orchestrator.observe.report.timeline import Piece, lanes_of
from orchestrator.observe.run_figures import EventFigures, lag_mean, rate_of
from orchestrator.run_folder import check_format


class Held(NamedTuple):
    """A time that a server was the run's; ``returned``: why it was given back, "" while it is the run's."""

    server: str
    begun: float
    end: float
    taken: str
    returned: str


@dataclass
class RunLog:
    """Everything the report shows of one run folder. ``figures``: those that all views share."""

    folder: Path
    config: dict[str, Any] = field(default_factory=dict)
    machine: dict[str, str] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    starts: list[Start] = field(default_factory=list)
    stages: list[Stage] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    evaluations: list[Evaluation] = field(default_factory=list)
    updates: list[Update] = field(default_factory=list)
    workers: list[WorkerSnapshot] = field(default_factory=list)
    occupancy: list[dict[str, float]] = field(default_factory=list)  # totals of a step: orchestrator.observe.occupancy
    incidents: list[Incident] = field(default_factory=list)
    pool: list[PoolSnapshot] = field(default_factory=list)  # empty without a pool
    tools: dict[str, dict[str, Any]] = field(default_factory=dict)  # counters by tool, of the last step
    rewards: dict[str, Any] = field(default_factory=dict)  # counters of the calls that score, of the last step
    plans: list[dict[str, Any]] = field(default_factory=list)  # orchestrator.parallelism.replanner
    reshapes: list[dict[str, Any]] = field(default_factory=list)
    degrees: list[dict[str, Any]] = field(default_factory=list)  # orchestrator.parallelism.replanner
    rounds: list[dict[str, Any]] = field(default_factory=list)  # short and long ones; empty without
    borrowing: list[Borrowing] = field(default_factory=list)  # orchestrator.borrowing.server_exchange
    scalings: list[ScaledEngine] = field(default_factory=list)  # orchestrator.proxy.engine_scaling
    serving: list[dict[str, Any]] = field(default_factory=list)  # orchestrator.observe.view.serving_neighbours
    warmup: Warmup | None = None
    unreadable: int = 0  # lines cut by a kill

    def __post_init__(self) -> None:
        self.figures = EventFigures(self.folder.name)

    def take(self, event: Mapping[str, Any]) -> None:
        """One more event, in the order of the log. Raises ValueError for what is none: nothing of it is taken."""
        found = self.figures.take(event)
        match event["kind"]:
            case "run_start":
                self._take_start(found)
            case "step":
                while self.steps and self.steps[-1].number >= found.number:
                    self.steps.pop()
                self.steps.append(found)
            case "round":
                while self.rounds and self.rounds[-1]["step"] >= found["step"]:
                    self.rounds.pop()
                self.rounds.append(found)
            case "tools" | "rewards" | "warmup":
                setattr(self, event["kind"], found)
            case kind if kind in _LISTS:
                getattr(self, _LISTS[kind]).append(found)

    def _take_start(self, start: Start) -> None:
        self.starts.append(start)
        if (
            resumed := start.resumed_from
        ) is not None:  # the checkpoint holds so many steps; the others are rolled back
            self.steps = [step for step in self.steps if step.number <= resumed]
            self.evaluations = [item for item in self.evaluations if item.step <= resumed]

    @property
    def name(self) -> str:
        """The run's name; the folder's until it has said its own."""
        return self.figures.name

    @property
    def kind(self) -> str:
        """How the figures were obtained."""
        return self.figures.kind

    @property
    def status(self) -> str:
        """As the run said it; unfinished when it said nothing."""
        return self.figures.status

    @property
    def seconds(self) -> float:
        """From the run's start to its last event."""
        return self.figures.seconds

    @property
    def done_steps(self) -> int:
        """How many training steps the run now consists of."""
        return self.figures.step

    @property
    def mode(self) -> str:
        """One of :mod:`orchestrator.policies.batching.coordination_modes`."""
        return self.figures.mode or str(self._of_config("run", "mode", ""))

    @property
    def alpha(self) -> int:
        """The staleness bound."""
        return self.figures.alpha if self.starts else int(self._of_config("rollout", "alpha", 0))

    @property
    def planned_steps(self) -> int:
        """How many training steps were asked for."""
        return self.figures.planned_steps if self.starts else int(self._of_config("run", "steps", 0))

    @property
    def ended_early(self) -> str:
        """Why a run that is complete has not done all its steps, in words; "" for others."""
        minutes = self._of_config("run", "minutes", None)
        if self.status != "completed" or self.done_steps >= self.planned_steps:
            return ""
        if isinstance(minutes, int | float) and self.seconds >= 60 * minutes:
            return f"its time was over, run.minutes = {minutes:g}"
        silent = any(one.kind == "alarm" and one.what == "signal" for one in self.incidents)
        return "its groups had next to nothing to teach, run.signal_share" if silent else ""

    @property
    def ledger(self) -> LedgerCounts:
        """As the run ended with; killed, or still running: the journal is ahead of the last step's totals."""
        return self.figures.ledger if self.figures.over else self.journal or self.figures.ledger

    @cached_property
    def journal(self) -> LedgerCounts | None:
        """The ledger's journal, recounted; None without one. Raises ConfigError where it is damaged."""
        file = self.folder / "ledger.jsonl"
        if not file.is_file():
            return None
        try:
            with file.open(encoding="utf-8", errors="replace", newline="\n") as lines:
                return LedgerCounts.of(recount(lines))
        except RunError as error:
            raise ConfigError("run", str(file), f"is damaged: {error}") from error

    @property
    def sample_seconds(self) -> float:
        """Between two samples of ``occupancy``."""
        return self.occupancy[-1]["every"] if self.occupancy else 0.0

    @property
    def gap_alarm(self) -> float | None:
        """The limit of the mean log-prob gap between rollout and trainer."""
        value = self._of_config("trainer", "logprob_gap_alarm", None)
        return float(value) if value is not None else None

    @property
    def tokens_per_s_mean(self) -> float | None:
        """Generated and trained tokens over the wall time of all training steps; None before the first."""
        rate = rate_of([step.tokens for step in self.steps], self.steps)
        return None if rate is None else round(rate, 3)

    @property
    def lags(self) -> dict[int, int]:
        """Trajectories by lag at ``get_batch``, over all steps."""
        totals: Counter[int] = Counter()
        for step in self.steps:
            totals.update(step.lag)
        return dict(sorted(totals.items()))

    @property
    def lag_mean(self) -> float | None:
        """In versions, over all steps."""
        return lag_mean(self.lags)

    def lanes(self) -> dict[str, list[Piece]]:
        """Who did what when: :func:`orchestrator.observe.report.timeline.lanes_of`."""
        return lanes_of(self.stages, self.mode, [start.t for start in self.starts])

    def held(self) -> list[Held]:
        """When which server was the run's, in the order of the log."""
        found: list[Held] = []
        since: dict[str, tuple[float, str]] = {}
        for event in self.borrowing:
            if event.kind == "borrowed":
                since[event.worker] = event.t, event.reason
            elif event.kind == "returned" and event.worker in since:
                found.append(
                    Held(event.worker, since[event.worker][0], event.t, since.pop(event.worker)[1], event.reason)
                )
        found += [Held(name, begun, max(begun, self.seconds), why, "") for name, (begun, why) in since.items()]
        return sorted(found, key=lambda row: row.begun)

    def evaluation(self, phase: str) -> Evaluation | None:
        """The latest evaluation of a phase. ``end`` counts only when no step follows it."""
        found = [item for item in self.evaluations if item.phase == phase]
        if not found or (phase == "end" and found[-1].step < self.done_steps):
            return None
        return found[-1]

    @property
    def before(self) -> Evaluation | None:
        """Before the first step of RL."""
        return next((item for item in self.evaluations if item.phase == "start"), None)

    @property
    def after(self) -> Evaluation | None:
        """At the end; else the last one."""
        return self.evaluation("end") or (self.evaluations[-1] if self.evaluations else None)

    def _of_config(self, section: str, key: str, default: Any) -> Any:
        part = self.config.get(section)
        return part.get(key, default) if isinstance(part, dict) else default


# Kind of event -> the list of its records.
_LISTS = {
    "stage": "stages", "evaluation": "evaluations", "update": "updates", "worker": "workers", "occupancy": "occupancy",
    "environments": "pool", "plan": "plans", "reshape": "reshapes", "degrees": "degrees", "serving": "serving",
    "scaled": "scalings",
    "borrowed": "borrowing", "returned": "borrowing", "handed_back": "borrowing",
    "alarm": "incidents", "fault": "incidents", "recovered": "incidents",
}  # fmt: skip


def load_run(folder: str | Path) -> RunLog:
    """Read a run folder. Raises ConfigError when it is none."""
    path = Path(folder).resolve()
    if not (path / "config.json").is_file() and not (path / "events.jsonl").is_file():
        raise ConfigError(
            "run", str(folder), "is not a run folder (neither config.json nor events.jsonl); see `ls runs`"
        )
    check_format(path)
    environment = _json_object(path / "environment.json")
    machine, versions = (_texts(environment.get(name)) for name in ("machine", "versions"))
    run = RunLog(path, _json_object(path / "config.json"), machine, versions)
    events = path / "events.jsonl"
    if events.is_file():
        with events.open("rb") as stream:  # a line at a time: a log may be larger than memory
            for line in stream:
                if line.strip(b"\n"):
                    _take_line(run, line)
    return run


def _take_line(run: RunLog, line: bytes) -> None:
    try:
        event = parse_object(line.decode(errors="replace"))
        if "kind" not in event:
            raise ValueError("no event")
        run.take(event)
    except ValueError:
        run.unreadable += 1


def _json_object(file: Path) -> dict[str, Any]:
    """A JSON object from a file, {} when there is no such file."""
    if not file.is_file():
        return {}
    try:
        return parse_object(file.read_bytes())
    except ValueError as error:
        raise ConfigError("run", str(file), f"is damaged: {error}") from error


def _texts(data: Any) -> dict[str, str]:
    if isinstance(data, dict):
        return {str(key): str(value) for key, value in data.items()}
    return {"": str(data)} if data else {}
