"""What a run is doing right now, sampled once a second into the file ``live.json`` of its folder.

Guarantees: it changes nothing that it looks at; the record has a bounded size however many trajectories are in flight; it is
replaced as a whole, by a thread; a sample that cannot be written is said once and costs the run nothing, and
the next is tried. Events say what happened; this file says what is under way, which no event can. It holds no prompt, no
token id, no address and no secret.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import re
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, StrictStr, model_validator

from orchestrator.api import CommandError, ConfigError, RetryableError, SharedDevice, WorkerStats
from orchestrator.api.jsontext import parse_object
from orchestrator.durable_files import replace_text
from orchestrator.events import EventLog
from orchestrator.observe.view.serving_neighbours import Neighbours

if TYPE_CHECKING:  # who only reads the file needs no pipeline
    from orchestrator.pipeline import Pipeline
    from orchestrator.proxy.worker_state import WorkerState

FILE = "live.json"
SECONDS = 1.0  # between two samples
TRAJECTORIES = 40  # that are listed one by one, those that began first
WORKERS = 1024  # that are listed
ASKED = 64  # of them are asked how they are
REASONS = 16  # that are told apart
TEXT = 120  # characters of a reason
ANSWERS = 6  # of a worker that its means are over: ten seconds, without those in which weights are updated
_ASK_EVERY = 2  # samples between two questions to a worker
_ANSWER_SECONDS = 1.0
_GENERATION = "generation"  # as in orchestrator/envs.py
_SHARED = tuple(field.name for field in fields(SharedDevice))  # of a worker beside serving
_STATS = ("running", "waiting", "kv_used", "kv_capacity", "tokens_per_s", "preemptions", "oldest_wait")


_Number = Annotated[float, Field(strict=True, gt=-1e18, lt=1e18)]
_Count = Annotated[int, Field(strict=True, gt=-(10**18), lt=10**18)]


class _Row(BaseModel):
    """What is not named is a number."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, _Number] = Field(init=False)


class _TrajectoryRow(_Row):
    id: StrictStr
    task: StrictStr
    turns: _Number
    age: _Number
    waits: StrictStr
    worker: StrictStr


class _WorkerRow(_Row):
    name: StrictStr
    state: StrictStr
    version: _Number
    requests: _Number

    @model_validator(mode="after")
    def _whole(self) -> _WorkerRow:
        if "running" in self.__pydantic_extra__ and set(_STATS) - self.__pydantic_extra__.keys():
            raise ValueError("an answer that lacks a figure")
        return self


class _Record(BaseModel):
    t: _Number
    stages: list[tuple[StrictStr, _Count, _Number]]
    waiting_for: StrictStr = ""
    in_flight: _Count = 0
    buffered: _Count = 0
    tokens: _Count = 0
    version: _Count = 0
    queue: _Count = 0
    ledger: dict[str, _Count | dict[str, Any]] = {}
    reasons: dict[str, _Count] = {}
    trajectories: list[_TrajectoryRow] = Field([], max_length=TRAJECTORIES)
    workers: list[_WorkerRow] = Field([], max_length=WORKERS)


def read_record(text: bytes) -> dict[str, Any]:
    """What :meth:`Sampler.record` made, from the file. Raises ValueError for what is none: a view draws it as it is."""
    record = parse_object(text, finite=True)
    _Record.model_validate(record)
    return record


class Sampler:
    """Writes the file until it is closed. ``pipeline`` is set when there is one; ``say`` tells people."""

    def __init__(self, folder: Path, events: EventLog, say: Callable[[str], None]) -> None:
        self.pipeline: Pipeline | None = None
        self._file = folder / FILE
        self._events = events
        self._say = say
        self._asked: dict[str, deque[WorkerStats]] = {}  # the newest answers
        self._neighbours = Neighbours(events)
        self._silent: set[str] = set()
        self._told = False  # that it cannot be written
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to sample."""
        self._task = asyncio.create_task(self._run(), name="sample what is under way")

    async def close(self) -> None:
        """The last sample is of now. Idempotent."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await self._write()
            self._neighbours.end()

    async def _run(self) -> None:
        for number in itertools.count():
            if self.pipeline is not None and number % _ASK_EVERY == 0:
                await self._ask(self.pipeline)
            await self._write()
            await asyncio.sleep(SECONDS)

    async def _ask(self, pipeline: Pipeline) -> None:
        """The workers that may be asked say how they are; what stands still on command is left alone."""

        async def one(state: WorkerState) -> None:
            name = state.worker.name
            try:
                async with asyncio.timeout(_ANSWER_SECONDS):
                    answer = await state.worker.stats()
                answers = self._asked.setdefault(name, deque(maxlen=ANSWERS))
                if answers and answer.steps < answers[-1].steps:  # it was started anew
                    answers.clear()
                answers.append(answer)
                self._neighbours.saw(name, answer.shared)
                self._silent.discard(name)
            except (RetryableError, CommandError, ConfigError, TimeoutError):
                self._silent.add(name)  # shown; whether it is lost is the heartbeat's to say

        if pipeline.rollout.proxy.waiting_for != "weight update":
            asked = [state for state in pipeline.rollout.proxy.states if state.usable and not state.loading][:ASKED]
            await asyncio.gather(*(one(state) for state in asked))

    async def _write(self) -> None:
        text = json.dumps(self.record(), separators=(",", ":"))
        try:
            await asyncio.to_thread(replace_text, self._file, text + "\n")
        except OSError as error:  # a file server that is away for a while; the next sample may be written
            if not self._told:
                self._say(f"what is under way cannot be shown: {self._file.name} cannot be written ({error.strerror})")
            self._told = True

    def record(self) -> dict[str, Any]:
        """What goes into the file."""
        stages = [[name, step, start] for name, step, start in self._events.open_stages()]
        found: dict[str, Any] = {"t": self._events.time(), "stages": stages}
        pipeline = self.pipeline
        if pipeline is None:
            return found
        rollout, proxy = pipeline.rollout, pipeline.rollout.proxy
        placed = {
            item.request.trajectory_id: state.worker.name for state in proxy.states for item in state.sent.values()
        }
        counts: dict[str, int] = {}  # thousands of episodes: words are made of few reasons, not of each
        for episode in rollout.episodes.values():
            counts[episode.waiting_for] = counts.get(episode.waiting_for, 0) + 1
        queue = max(0, counts.get(_GENERATION, 0) - sum(name in rollout.episodes for name in placed))
        reasons: dict[str, int] = {_reason(_GENERATION, False): queue} if queue else {}
        if _GENERATION in counts:
            counts[_GENERATION] -= queue
        for waiting_for, count in counts.items():
            reason = _reason(waiting_for, True)
            reasons[reason] = reasons.get(reason, 0) + count
        now = found["t"]
        return found | {
            "waiting_for": pipeline.waiting_for[: 3 * TEXT],
            "in_flight": rollout.in_flight,
            "buffered": rollout.buffer.scored,
            "tokens": proxy.tokens,
            "version": proxy.version,
            "queue": queue,
            "ledger": pipeline.parts.ledger.counts.as_dict(),
            "reasons": _largest(reasons),
            "trajectories": [
                {
                    "id": episode.id,
                    "task": episode.prompt.task[:TEXT],
                    "turns": len(episode.turns),
                    "age": round(now - episode.started_at, 1),
                    "waits": _reason(episode.waiting_for, episode.id in placed),
                    "worker": placed.get(episode.id, ""),
                }
                for episode in itertools.islice(rollout.episodes.values(), TRAJECTORIES)
            ],
            "workers": [self._worker(state) for state in proxy.states if not state.parked][:WORKERS],
        }

    def _worker(self, state: WorkerState) -> dict[str, Any]:
        name = state.worker.name
        row: dict[str, Any] = {"name": name, "state": _state(state, name in self._silent), "version": state.version}
        row["requests"] = len(state.sent)
        if (answers := self._asked.get(name)) and not state.removed:
            row |= worker_row(answers)
        return row


def worker_row(answers: Sequence[WorkerStats]) -> dict[str, Any]:
    """Of a worker's answers, the newest last: what it says now, and what its engine steps since the first of them were like on
    average. It answers between two steps, often when all that ran has just ended: what it says of now alone means little."""
    newest = asdict(answers[-1])
    row: dict[str, Any] = {field: round(newest[field], 3) for field in _STATS}
    last, first = answers[-1], answers[0] if len(answers) > 1 else WorkerStats(0, 0, 0, 0, 0, 0.0, 0)
    if steps := last.steps - first.steps:
        row["running_mean"] = round((last.step_requests - first.step_requests) / steps, 1)
        row["kv_mean"] = round((last.step_kv - first.step_kv) / steps / max(1, last.kv_capacity), 4)
    beside = newest["shared"] or {}
    return row | {field: round(beside[field], 6) for field in _SHARED if beside.get(field) is not None}


def _state(state: WorkerState, silent: bool) -> str:
    if state.removed:
        return "removed"
    if state.lent:
        return "being given back" if state.borrowed else "lent to the trainer"
    if not state.alive:
        return "coming back"
    if state.loading:
        return "loading weights"
    return "does not answer" if silent else "up"


def _reason(waiting_for: str, placed: bool) -> str:
    """What a trajectory waits for, without numbers: "3 of 4" and "4 of 4" are one reason."""
    if waiting_for == _GENERATION and not placed:
        return "a free worker"
    return re.sub(r"\d+", "#", waiting_for)[:TEXT]


def _largest(reasons: dict[str, int]) -> dict[str, int]:
    ordered = sorted(((name, count) for name, count in reasons.items() if count), key=lambda item: (-item[1], item[0]))
    found = dict(ordered[:REASONS])
    if rest := sum(count for _, count in ordered[REASONS:]):
        found["other"] = rest
    return found
