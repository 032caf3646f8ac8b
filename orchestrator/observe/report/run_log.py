"""A run folder as typed records: the one place that knows how the log's lines look.

Guarantees: a line that a kill cut in half is left out and counted, never an error; a folder that is no run is a
:class:`~orchestrator.api.ConfigError`. A resume appends to the same log, so what lies beyond the checkpoint that it went
back to is there twice: ``steps`` and ``evaluations`` hold only what the run now consists of, while stages, updates and
incidents hold all that happened, because it did take that time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from orchestrator.api import ConfigError, RunError
from orchestrator.api.jsontext import parse_object
from orchestrator.events import time_of
from orchestrator.ledger import END_STATES, recount
from orchestrator.observe.report.record_fields import counts, json_object, seconds, texts
from orchestrator.run_folder import check_format


@dataclass(frozen=True)
class Stage:
    """One stage of the loop; ``waiting_for`` is what it waited for, "" when it did not."""

    name: str
    step: int
    start: float
    end: float
    waiting_for: str = ""

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.end - self.start


@dataclass(frozen=True)
class LedgerCounts:
    """A ledger's totals. ``rolled_back`` counts events, not trajectories: it is outside the sum."""

    started: int = 0
    ended: Mapping[str, int] = field(default_factory=dict)
    in_flight: int = 0
    rolled_back: int = 0
    failed_by_cause: Mapping[str, int] = field(default_factory=dict)
    ended_by_cause: Mapping[str, int] = field(default_factory=dict)  # other ends with a reason: "filtered: truncated"

    @property
    def difference(self) -> int:
        """Started minus what is accounted for: 0 when the ledger closes."""
        return self.started - sum(self.ended.values()) - self.in_flight

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> LedgerCounts:
        """From an event's ``ledger`` field."""
        return cls(
            started=int(data.get("started", 0)),
            ended={state: int(data.get(state, 0)) for state in END_STATES},
            in_flight=int(data.get("in_flight", 0)),
            rolled_back=int(data.get("rolled_back", 0)),
            failed_by_cause={str(cause): int(n) for cause, n in (data.get("failed_by_cause") or {}).items()},
            ended_by_cause={str(cause): int(n) for cause, n in (data.get("ended_by_cause") or {}).items()},
        )


@dataclass(frozen=True)
class Step:
    """One training step. ``number`` counts from 1: the steps done after it. ``period``: seconds from the step before."""

    number: int
    version: int
    t: float
    trained: int
    tokens: int
    reward_mean: float
    success: float
    lag: Mapping[int, int]
    lag_trained: Mapping[int, int]
    versions_mixed: int
    metrics: Mapping[str, float]
    ledger: LedgerCounts
    period: float = 0.0


@dataclass(frozen=True)
class Evaluation:
    """Greedy success on held-out prompts with its 95 % interval, after ``step`` training steps."""

    step: int
    t: float
    phase: str
    value: float
    successes: int
    prompts: int
    low: float
    high: float


@dataclass(frozen=True)
class Update:
    """One rollout worker's weight update. ``preempted``: requests in flight whose KV it made recompute."""

    version: int
    bytes: int
    seconds: float
    preempted: int


@dataclass(frozen=True)
class WorkerSnapshot:
    """A rollout worker's state at a weight update."""

    name: str
    running: int
    waiting: int
    kv_share: float
    preemptions: int
    tokens_per_s: float


@dataclass(frozen=True)
class PoolSnapshot:
    """The pool of environments at the end of a step; counts are since the start of that life of the run."""

    backend: str
    size: int
    busy: int
    ready: int
    waiting: int
    waiting_for: str
    started: int
    start_failures: int
    episodes: int
    wait_seconds: float
    abandoned: int
    replaced: Mapping[str, int]
    versions: tuple[str, ...]


@dataclass(frozen=True)
class Incident:
    """An alarm, a fault, or a recovery."""

    kind: str
    t: float
    what: str
    cause: str
    detail: str


@dataclass(frozen=True)
class Start:
    """A start of the run; the second and later ones are resumes."""

    t: float
    mode: str
    alpha: int
    steps: int
    name: str
    simulated: bool
    resumed_from: int | None
    started: str


@dataclass
class RunLog:
    """Everything the report shows of one run folder."""

    folder: Path
    config: dict[str, Any]
    machine: dict[str, str]
    versions: dict[str, str]
    starts: list[Start] = field(default_factory=list)
    stages: list[Stage] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    evaluations: list[Evaluation] = field(default_factory=list)
    updates: list[Update] = field(default_factory=list)
    workers: list[WorkerSnapshot] = field(default_factory=list)
    occupancy: list[dict[str, float]] = field(
        default_factory=list
    )  # totals of one step each, see orchestrator.observe.occupancy
    sample_seconds: float = 0.0  # between two samples of it
    incidents: list[Incident] = field(default_factory=list)
    pool: list[PoolSnapshot] = field(default_factory=list)  # empty without a pool
    tools: dict[str, dict[str, Any]] = field(default_factory=dict)  # counters by tool, of the last step
    rewards: dict[str, Any] = field(default_factory=dict)  # counters of the calls that score, of the last step
    plans: list[dict[str, Any]] = field(
        default_factory=list
    )  # events `plan` and `reshape`: see orchestrator.parallelism.replanner
    reshapes: list[dict[str, Any]] = field(default_factory=list)
    degrees: list[dict[str, Any]] = field(
        default_factory=list
    )  # events `degrees`: see orchestrator.parallelism.replanner
    rounds: list[dict[str, Any]] = field(default_factory=list)  # events of short and long rounds; empty without
    borrowing: list[dict[str, Any]] = field(
        default_factory=list
    )  # `borrowed`, `returned`, `handed_back`: orchestrator.borrowing.server_exchange
    serving: list[dict[str, Any]] = field(
        default_factory=list
    )  # events `serving`: orchestrator.observe.view.serving_neighbours
    warmup: tuple[int, float, float, float] | None = None  # steps, first loss, last loss, seconds
    status: str = "unfinished"
    reason: str = ""
    seconds: float = 0.0
    unreadable: int = 0  # lines cut by a kill
    ledger: LedgerCounts = field(default_factory=LedgerCounts)
    journal: LedgerCounts | None = None  # the ledger's journal, recounted; None without one

    @property
    def name(self) -> str:
        """The run's name; the folder's until it has said its own."""
        return self.starts[-1].name if self.starts else self.folder.name

    @property
    def kind(self) -> str:
        """How the figures were obtained."""
        return "simulated" if any(start.simulated for start in self.starts) else "real"

    @property
    def mode(self) -> str:
        """One of :mod:`orchestrator.policies.batching.coordination_modes`."""
        return self.starts[-1].mode if self.starts else str(self._of_config("run", "mode", ""))

    @property
    def alpha(self) -> int:
        """The staleness bound."""
        return self.starts[-1].alpha if self.starts else int(self._of_config("rollout", "alpha", 0))

    @property
    def planned_steps(self) -> int:
        """How many training steps were asked for."""
        return self.starts[-1].steps if self.starts else int(self._of_config("run", "steps", 0))

    @property
    def done_steps(self) -> int:
        """How many training steps the run now consists of."""
        return self.steps[-1].number if self.steps else 0

    @property
    def gap_alarm(self) -> float | None:
        """The limit of the mean log-prob gap between rollout and trainer."""
        value = self._of_config("trainer", "logprob_gap_alarm", None)
        return float(value) if value is not None else None

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

    def _of_config(self, section: str, key: str, default: Any) -> Any:
        part = self.config.get(section)
        return part.get(key, default) if isinstance(part, dict) else default


def load_run(folder: str | Path) -> RunLog:
    """Read a run folder. Raises ConfigError when it is none."""
    path = Path(folder).resolve()
    if not (path / "config.json").is_file() and not (path / "events.jsonl").is_file():
        raise ConfigError("run", str(folder), "is no run folder (neither config.json nor events.jsonl); see `ls runs`")
    check_format(path)
    environment = json_object(path / "environment.json")
    run = RunLog(
        folder=path,
        config=json_object(path / "config.json"),
        machine=texts(environment.get("machine")),
        versions=texts(environment.get("versions")),
    )
    for event in _events(run, path / "events.jsonl"):
        try:
            take_event(run, event)
        except ValueError:
            run.unreadable += 1
            continue
        run.seconds = max(run.seconds, time_of(event), time_of(event, "end"))
    run.steps = _with_periods(run)
    journal = path / "ledger.jsonl"
    if journal.is_file():
        try:
            lines = journal.read_text(encoding="utf-8", errors="replace").split("\n")
            run.journal = LedgerCounts.of(recount(lines))
        except RunError as error:
            raise ConfigError("run", str(journal), f"is damaged: {error}") from error
    if run.status == "unfinished":  # killed, or still running: the journal is ahead of the last step's totals
        run.ledger = run.journal or (run.steps[-1].ledger if run.steps else LedgerCounts())
    return run


def _events(run: RunLog, file: Path) -> Iterable[dict[str, Any]]:
    if not file.is_file():
        return
    for line in file.read_text(encoding="utf-8", errors="replace").split("\n"):
        if not line:
            continue
        try:
            event = parse_object(line)
        except ValueError:
            run.unreadable += 1
            continue
        if "kind" in event:
            yield event
        else:
            run.unreadable += 1


# What folding a damaged event may raise.
MALFORMED = (LookupError, TypeError, ValueError, AttributeError, OverflowError)


def take_event(run: RunLog, event: dict[str, Any]) -> None:
    """Fold one event into the records, in the order of the log. Raises ValueError for one that lacks a field or holds a value
    of another kind: then nothing of it was taken."""
    try:
        _fold(run, event)
    except MALFORMED as error:
        raise ValueError(f"no event of this kind: {error!r:.200}") from error


def _fold(run: RunLog, event: dict[str, Any]) -> None:
    t = time_of(event)
    match event["kind"]:
        case "run_start":
            _take_start(run, event, t)
        case "stage":
            run.stages.append(
                Stage(
                    str(event["stage"]),
                    int(event["step"]),
                    seconds(event["start"]),
                    seconds(event["end"]),
                    str(event.get("waiting_for", "")),
                )
            )
        case "step":
            taken = _step(event, t)
            run.steps = [step for step in run.steps if step.number < taken.number]
            run.steps.append(taken)
        case "evaluation":
            run.evaluations.append(
                Evaluation(
                    step=int(event["step"]),
                    t=t,
                    phase=str(event["phase"]),
                    value=float(event["success"]),
                    successes=int(event.get("successes", 0)),
                    prompts=int(event.get("prompts", 0)),
                    low=float(event["low"]),
                    high=float(event["high"]),
                )
            )
        case "update":
            run.updates.append(
                Update(int(event["version"]), int(event["bytes"]), seconds(event["seconds"]), int(event["preempted"]))
            )
        case "worker":
            run.workers.append(
                WorkerSnapshot(
                    name=str(event["name"]),
                    running=int(event["running"]),
                    waiting=int(event["waiting"]),
                    kv_share=event["kv_used"] / event["kv_capacity"] if event["kv_capacity"] else 0.0,
                    preemptions=int(event["preemptions"]),
                    tokens_per_s=float(event["tokens_per_s"]),
                )
            )
        case "occupancy":
            sample = {name: float(value) for name, value in event.items() if name not in ("kind", "t")}
            run.sample_seconds = sample["every"]
            run.occupancy.append(sample)
        case "warmup":
            run.warmup = (
                int(event["steps"]),
                float(event["loss_first"]),
                float(event["loss_last"]),
                float(event["seconds"]),
            )
        case "environments":
            run.pool.append(_pool(event))
        case "round":
            number = int(event["step"])
            run.rounds = [*(before for before in run.rounds if before["step"] < number), event]
        case "tools":
            run.tools = {str(name): dict(counts) for name, counts in (event.get("tools") or {}).items()}
        case "rewards":
            run.rewards = {name: value for name, value in event.items() if name not in ("kind", "t", "step")}
        case "plan":
            run.plans.append(dict(event))
        case "reshape":
            run.reshapes.append(dict(event))
        case "degrees":
            run.degrees.append(dict(event))
        case "borrowed" | "returned" | "handed_back":
            run.borrowing.append(_of_server(event))
        case "serving":
            run.serving.append(_of_neighbour(event))
        case "alarm" | "fault" | "recovered":
            run.incidents.append(
                Incident(
                    kind=str(event["kind"]),
                    t=t,
                    what=str(event.get("what", "")),
                    cause=str(event.get("cause", "")),
                    detail=str(event.get("detail", "")),
                )
            )
        case "run_end":
            run.ledger = LedgerCounts.of(event.get("ledger") or {})
            run.status, run.reason = str(event["status"]), str(event.get("reason", ""))


def _of_server(event: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {"kind": str(event["kind"]), "worker": str(event["worker"]), "t": float(event["t"])}
    found["reason"] = str(event.get("reason", ""))
    return found | {name: float(event[name]) for name in ("use", "requests", "tokens", "seconds") if name in event}


def _of_neighbour(event: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {"worker": str(event["worker"]), "until": float(event["until"])}
    found |= {name: int(event[name]) for name in ("samples", "pages", "budget", "tokens", "late", "blamed")}
    maybe = ("serving", "serving_most", "ttft_slack", "tpot_slack", "arriving")
    found |= {name: None if event[name] is None else float(event[name]) for name in maybe}
    return found | {"seconds": float(event["seconds"])}


def _pool(event: Mapping[str, Any]) -> PoolSnapshot:
    return PoolSnapshot(
        backend=str(event["backend"]),
        size=int(event["size"]),
        busy=int(event["busy"]),
        ready=int(event["ready"]),
        waiting=int(event["waiting"]),
        waiting_for=str(event.get("waiting_for", "")),
        started=int(event["started"]),
        start_failures=int(event["start_failures"]),
        episodes=int(event["episodes"]),
        wait_seconds=float(event["wait_seconds"]),
        abandoned=int(event["abandoned"]),
        replaced={str(cause): int(number) for cause, number in event["replaced"].items()},
        versions=tuple(str(version) for version in event["versions"]),
    )


def _take_start(run: RunLog, event: dict[str, Any], t: float) -> None:
    resumed_from = None if event.get("resumed_from") is None else int(event["resumed_from"])
    run.starts.append(
        Start(
            t=t,
            mode=str(event["mode"]),
            alpha=int(event["alpha"]),
            steps=int(event["steps"]),
            name=str(event["name"]),
            simulated=bool(event["simulated"]),
            resumed_from=resumed_from,
            started=str(event.get("started", "")),
        )
    )
    run.status, run.reason = "unfinished", ""
    if resumed_from is not None:  # the checkpoint holds the first `resumed_from` steps; the others are rolled back
        run.steps = [step for step in run.steps if step.number <= resumed_from]
        run.evaluations = [item for item in run.evaluations if item.step <= resumed_from]


def _step(event: dict[str, Any], t: float) -> Step:
    return Step(
        number=int(event["step"]) + 1,
        version=int(event["version"]),
        t=t,
        trained=int(event["trained"]),
        tokens=int(event["tokens"]),
        reward_mean=float(event["reward_mean"]),
        success=float(event["success"]),
        lag=counts(event.get("lag")),
        lag_trained=counts(event.get("lag_trained")),
        versions_mixed=int(event.get("versions_mixed", 0)),
        metrics={name: float(value) for name, value in (event.get("metrics") or {}).items()},
        ledger=LedgerCounts.of(event.get("ledger") or {}),
    )


def _with_periods(run: RunLog) -> list[Step]:
    """Each step with the seconds since the step before it, or since the first batch was asked for after a start."""
    asked = sorted(stage.start for stage in run.stages if stage.name == "get_batch")
    starts = [start.t for start in run.starts]
    result: list[Step] = []
    previous = float("-inf")
    for step in run.steps:
        segment = max((t for t in starts if t <= step.t), default=0.0)
        if previous < segment:
            previous = next((t for t in asked if segment <= t <= step.t), segment)
        result.append(replace(step, period=step.t - previous))
        previous = step.t
    return result
