"""The events of a run as typed records: the one place that knows how the log's lines look.

Guarantee: an event that lacks a field, or holds something else there, is a ValueError and nothing else. Times are seconds since
the run's start.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from functools import partial
from typing import Any, NamedTuple, TypeVar

from orchestrator import ledger
from orchestrator.events import time_of

Seconds = float  # finite
Counts = Mapping[str, int]
Lags = Mapping[int, int]  # trajectories by lag in versions, in its order


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage of the loop; ``waiting_for`` is what it waited for, "" when it did not."""

    name: str
    step: int
    start: Seconds
    end: Seconds
    waiting_for: str = ""

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.end - self.start


class EndWords(NamedTuple):
    """How views call an end of the ledger, and its colour (page.css)."""

    words: str
    colour: str


ENDS = {
    "trained": EndWords("trained", "c1"),
    "evicted_stale": EndWords("too stale", "c2"),
    "aborted_redundant": EndWords("redundant", "c0"),
    "deferred": EndWords("deferred", "c4"),
    "filtered": EndWords("filtered", "c6"),
    "failed": EndWords("failed", "bad"),
    "in_flight": EndWords("in flight", "c5"),
}


class LedgerCounts(ledger.Counts):
    """A ledger's totals. ``rolled_back`` counts events, not trajectories: it is outside the sum."""

    @property
    def parts(self) -> dict[str, int]:
        """By end, and those in flight: what must sum up to what was started."""
        return {**self.ended, "in_flight": self.in_flight}

    @property
    def difference(self) -> int:
        """Started minus what is accounted for: 0 when the ledger closes."""
        return self.started - sum(self.parts.values())

    @property
    def sum_words(self) -> str:
        """The sum as a line of text: ``9 started = 8 trained + 1 in flight``, and by how many it is off."""
        terms = " + ".join(f"{count:,} {ENDS[end].words}" for end, count in self.parts.items() if count) or "0"
        return f"{self.started:,} started = {terms}" + (f", off by {self.difference:,}" if self.difference else "")

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> LedgerCounts:
        """From an event's ``ledger`` field."""
        return cls(
            started=int(data.get("started", 0)),
            ended={state: int(data.get(state, 0)) for state in ledger.END_STATES},
            in_flight=int(data.get("in_flight", 0)),
            rolled_back=int(data.get("rolled_back", 0)),
            failed_by_cause=_counts(data.get("failed_by_cause")),
            ended_by_cause=_counts(data.get("ended_by_cause")),
        )


@dataclass(frozen=True, slots=True)
class Step:
    """One training step. ``number`` counts from 1: the steps done after it. ``period``: seconds from the step before it, or from
    the first batch that was asked for after a start."""

    number: int
    version: int
    t: float
    trained: int
    tokens: int
    reward_mean: float
    success: float
    lag: Lags = field(default_factory=dict)
    lag_trained: Lags = field(default_factory=dict)
    versions_mixed: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)
    ledger: LedgerCounts = field(default_factory=LedgerCounts)
    period: float = 0.0


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Success on held-out prompts with its 95 % interval, after ``step`` training steps; :mod:`orchestrator.evaluation` says
    what the rest is."""

    step: int
    t: float
    phase: str
    value: float
    low: float
    high: float
    successes: int = 0
    prompts: int = 0
    failed: int = 0
    samples: int = 1
    solved: float | None = None
    reward: float | None = None
    tokens: float | None = None
    truncated: float | None = None
    tasks: Mapping[str, float] = field(default_factory=dict)

    @property
    def episodes(self) -> int:
        """How many were played."""
        return self.prompts * self.samples


@dataclass(frozen=True, slots=True)
class Update:
    """One rollout worker's weight update. ``preempted``: requests in flight whose KV it made recompute."""

    version: int
    bytes: int
    seconds: Seconds
    preempted: int


@dataclass(frozen=True, slots=True)
class WorkerSnapshot:
    """A rollout worker's state at a weight update."""

    name: str
    running: int
    waiting: int
    kv_used: int
    kv_capacity: int
    preemptions: int
    tokens_per_s: float
    version: int = 0

    @property
    def kv_share(self) -> float:
        """Share of its KV blocks in use."""
        return self.kv_used / self.kv_capacity if self.kv_capacity else 0.0


@dataclass(frozen=True, slots=True)
class PoolSnapshot:
    """The pool of environments at the end of a step; counts are since the start of that life of the run."""

    backend: str
    size: int
    busy: int
    ready: int
    waiting: int
    started: int
    start_failures: int
    episodes: int
    wait_seconds: float
    abandoned: int
    replaced: Counts
    versions: tuple[str, ...]
    waiting_for: str = ""


@dataclass(frozen=True, slots=True)
class Incident:
    """An alarm, a fault, or a recovery."""

    kind: str
    t: float
    what: str = ""
    cause: str = ""
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Start:
    """A start of the run; the second and later ones are resumes."""

    t: float
    mode: str
    alpha: int
    steps: int
    name: str
    simulated: bool
    resumed_from: int | None = None
    started: str = ""
    rolled_back: int = 0  # steps after it that were trained before


@dataclass(frozen=True, slots=True)
class End:
    """How the run ended. ``ledger`` None: it did not say."""

    status: str
    reason: str = ""
    ledger: LedgerCounts | None = None


@dataclass(frozen=True, slots=True)
class Borrowing:
    """A server that was ``borrowed`` or ``returned``, or ``handed_back`` requests; or a worker, borrowed or not, that lacked the
    contexts of some (``contexts_resent``)."""

    kind: str
    worker: str
    t: float
    reason: str = ""
    requests: int = 0
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class ScaledEngine:
    """An own engine that was ``added`` or ``removed`` while the run went on: what its group has since, the requests that it
    handed over, and how long it took."""

    worker: str
    what: str
    t: float
    engines: int
    requests: int
    seconds: Seconds

    @property
    def words(self) -> str:
        """For people: ``removed in 2.1 s, 3 requests moved; its group has 4``."""
        moved = f", {self.requests:,} request{'s' * (self.requests != 1)} moved" if self.requests else ""
        return f"{self.what} in {self.seconds:.1f} s{moved}; its group has {self.engines:,}"


@dataclass(frozen=True, slots=True)
class Warmup:
    """The supervised steps before RL."""

    steps: int
    loss_first: float
    loss_last: float
    seconds: float


def record_of(event: Mapping[str, Any]) -> Any:
    """The record of one event; a plain dictionary of its fields for kinds without one, None for kinds that nobody reads. Raises
    ValueError for an event that lacks a field or holds a value of another kind."""
    try:
        read = _READERS.get(event["kind"])
        return read(event) if read is not None else None
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise ValueError(f"no event of this kind: {error!r:.200}") from error


Record = TypeVar("Record")


def _of(record: type[Record], event: Mapping[str, Any], **known: Any) -> Record:
    """A record whose fields are the event's, but for those that are ``known``; what has a default may be missing."""
    for part in fields(record):  # type: ignore[arg-type]
        if part.name == "t":
            known["t"] = time_of(event)
        elif part.name not in known and part.name in event:
            known[part.name] = _CONVERT[str(part.type)](event[part.name])
        elif part.name not in known and part.default is MISSING and part.default_factory is MISSING:
            raise KeyError(part.name)
    return record(**known)


def _counts(data: Any) -> dict[str, int]:
    return {str(name): int(number) for name, number in (data or {}).items()}


def _lags(data: Any) -> dict[int, int]:
    return {int(lag): int(count) for lag, count in sorted((data or {}).items(), key=lambda item: int(item[0]))}


def _seconds(value: Any) -> float:
    seconds = float(value)
    if not math.isfinite(seconds):
        raise ValueError(f"{seconds} seconds")
    return seconds


_CONVERT: dict[str, Callable[[Any], Any]] = {
    "str": str, "int": int, "float": float, "bool": bool, "Seconds": _seconds, "Counts": _counts, "Lags": _lags,
    "int | None": lambda value: None if value is None else int(value),
    "float | None": lambda value: None if value is None else float(value),
    "Mapping[str, float]": lambda data: {str(name): float(value) for name, value in (data or {}).items()},
    "tuple[str, ...]": lambda values: tuple(map(str, values)),
    "LedgerCounts": lambda data: LedgerCounts.of(data or {}),
    "LedgerCounts | None": lambda data: LedgerCounts.of(data) if data else None,
}  # fmt: skip


def _occupancy(event: Mapping[str, Any]) -> dict[str, float]:
    found = {name: float(value) for name, value in event.items() if name not in ("kind", "t")}
    return found | {"every": found["every"]}


def _serving(event: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {"worker": str(event["worker"]), "until": float(event["until"])}
    found |= {name: int(event[name]) for name in ("samples", "pages", "budget", "tokens", "late", "blamed")}
    maybe = ("serving", "serving_most", "ttft_slack", "tpot_slack", "arriving")
    found |= {name: None if event[name] is None else float(event[name]) for name in maybe}
    return found | {"seconds": float(event["seconds"])}


_READERS: dict[str, Callable[[Mapping[str, Any]], Any]] = {
    "run_start": partial(_of, Start), "run_end": partial(_of, End), "update": partial(_of, Update),
    "worker": partial(_of, WorkerSnapshot), "warmup": partial(_of, Warmup), "environments": partial(_of, PoolSnapshot),
    "scaled": partial(_of, ScaledEngine),
    "stage": lambda event: _of(Stage, event, name=str(event["stage"])),
    "step": lambda event: _of(Step, event, number=int(event["step"]) + 1, period=0.0),
    "evaluation": lambda event: _of(Evaluation, event, value=float(event["success"])),
    **dict.fromkeys(("alarm", "fault", "recovered"), partial(_of, Incident)),
    **dict.fromkeys(("borrowed", "returned", "handed_back", "contexts_resent"), partial(_of, Borrowing)),
    "occupancy": _occupancy, "serving": _serving, "round": lambda event: {**event, "step": int(event["step"])},
    "tools": lambda event: {str(name): dict(found) for name, found in (event.get("tools") or {}).items()},
    "rewards": lambda event: {name: value for name, value in event.items() if name not in ("kind", "t", "step")},
    "plan": dict, "reshape": dict, "degrees": dict,
}  # fmt: skip
