"""The simulated rollout worker: continuous batching in virtual time, with a linear cost model.

An engine step costs ``decode_seconds_per_step + decode_seconds_per_sequence x running + prefill_seconds_per_token x
tokens prefilled in it`` and makes one token for each running sequence. Commands take effect between two steps. Steps in
which nothing changes are crossed in one leap, so a response of a thousand tokens costs a few callbacks. A weight update
costs ``update_seconds``; the part of it that is the fetch is spent beforehand, beside generation, when it was prepared,
and is shorter when it was received from the trainer.

Guarantees of the port that it keeps: each added request ends in exactly one completion (aborted ones too), commands are
idempotent by request id, in-flight tokens survive ``suspend``/``update``/``resume`` and their KV is prefilled again after
an update, each token carries the version that made it. A death loses all requests; every call then raises RetryableError
until ``restart``. It starts with version -1: tokens made before the first update can be told. Weights that were spoilt
half-way (``spoil``) keep it suspended until an update succeeds.

Not modelled: KV pressure, preemption (priority decides who waits, never who runs), tensor parallelism, attention's growth.
"""

from __future__ import annotations

import asyncio
import heapq
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from orchestrator.api import (
    CommandError,
    Completion,
    CompletionTiming,
    GenerationRequest,
    Meeting,
    RetryableError,
    UpdateResult,
    VersionSpans,
    WorkerStats,
    merge_spans,
)
from orchestrator.config import Config
from orchestrator.sim.draws import END, logprobs
from orchestrator.sim.speech import Speech
from orchestrator.sim.traces import Traces

REMEMBERED = 4096  # requests that have ended, and are not begun anew when they are added again
RESTART_SECONDS = 5.0  # a process and a small engine; of this model, not a measurement
MODEL_BYTES = 1 << 20  # nominal payload of one version
FETCH_SHARE = 0.75  # of ``sim.update_seconds`` is the fetch, the rest is loading; a figure of this model too
SEND_SHARE = 0.15  # of them is what the trainer's own workers need to receive it from there; likewise


class SimWeights:
    """The relay's twin: which versions have been published."""

    def __init__(self) -> None:
        self._published: dict[int, None] = {}
        self.sent = -1  # the version that the trainer sends to its own workers, or sent last

    def put(self, version: int) -> None:
        """Make a version available."""
        self._published[version] = None

    def has(self, version: int) -> bool:
        """Whether a worker can pull it."""
        return version in self._published

    def content(self, version: int) -> str:
        """Its checksum, whichever way it came."""
        return f"{version:016x}"


@dataclass(slots=True, eq=False)
class _Sequence:
    """A request in the engine. ``tokens``: all that it will say; ``made``: how many of them are booked to a version, the
    last ones at engine step ``booked``."""

    request: GenerationRequest
    tokens: tuple[int, ...]
    arrived: float
    prefill: int
    number: int  # of arrival
    made: int = 0
    booked: int = 0
    spans: list[tuple[int, int]] = field(default_factory=list)
    started: float = -1.0
    first: float = -1.0  # when its first token was there
    done: bool = False

    @property
    def context(self) -> int:
        return len(self.request.token_ids) + self.made


class SimWorker:
    """A ManagedWorker without a process. ``die`` and ``spoil`` are for the fault injector; ``said(trajectory, turn,
    versions)`` is told of each response that ends by itself. ``incarnation`` changes with each death."""

    def __init__(
        self,
        name: str,
        config: Config,
        weights: SimWeights,
        said: Callable[[str, int, VersionSpans], None] | None = None,
        traces: Traces | None = None,
    ) -> None:
        self.name = name
        self.ranks = 1
        self._said = said
        self._speech = Speech(config, traces)
        self._costs = config.sim
        self._engine = config.rollout.engine
        self._weights = weights
        self.incarnation = 0
        self._dead = False
        self._closed = False
        self.generated = 0
        self._busy_seconds = 0.0
        self._reset()

    def _reset(self) -> None:
        self._version = -1
        self._prepared = -1  # the version that was fetched and not loaded yet
        self._updating = False
        self._unusable = ""  # why the weights are
        self._known: dict[str, _Sequence | None] = {}  # requests of this life; None when it has ended
        self._ended, self._numbers = deque[str](), 0  # in order, the last REMEMBERED of them; requests ever
        self._waiting: list[tuple[int, int, _Sequence]] = []
        self._running: dict[str, _Sequence] = {}
        self._ends: list[tuple[int, int, _Sequence]] = []  # running ones by the engine step that completes each
        self._aborting: list[_Sequence] = []  # running ones that end with the step in progress
        self._steps = 0  # engine steps done
        self._owed = 0  # tokens to prefill before the next step
        self._finished: list[Completion] = []
        self._prefix: dict[str, int] = {}  # trajectory -> tokens whose KV is held
        self._prompt_tokens = self._prompt_tokens_cached = 0
        self._news = asyncio.Event()
        self._suspended = False
        self._boundary: asyncio.Future[None] | None = None  # resolved when the step in progress has ended
        self._leap: asyncio.TimerHandle | None = None
        self._leap_start = 0.0  # when its first decode step begins
        self._leap_step = 0.0  # seconds a step
        self._leap_steps = 0

    # The port.

    async def add(self, requests: Sequence[GenerationRequest]) -> None:
        """See the protocol."""
        self._check()
        now = asyncio.get_running_loop().time()
        for request in requests:
            if request.request_id not in self._known:
                self._enqueue(request, now)
        self._kick()
        await self._answer()

    async def abort(
        self, request_ids: Sequence[str] = (), *, trajectories: Sequence[str] = (), groups: Sequence[str] = ()
    ) -> None:
        """See the protocol."""
        self._check()
        in_step = False
        for sequence in self._meant(request_ids, trajectories, groups):
            if sequence.request.request_id in self._running and self._leap is not None:
                self._aborting.append(sequence)
                in_step = True
            elif not sequence.done:
                self._finish(sequence, "abort")
        self._kick()
        if in_step:
            await self._step_ended()
        await self._answer()

    async def prioritize(self, priorities: Mapping[str, int]) -> None:
        """See the protocol."""
        self._check()
        for sequence in self._unfinished():
            priority = priorities.get(sequence.request.trajectory_id)
            if priority is not None:
                sequence.request = replace(sequence.request, priority=priority)
        waiting = [entry[2] for entry in self._waiting if not entry[2].done]
        self._waiting = [(sequence.request.priority, sequence.number, sequence) for sequence in waiting]
        heapq.heapify(self._waiting)
        await self._answer()

    async def completions(self) -> list[Completion]:
        """See the protocol."""
        self._check()
        incarnation = self.incarnation
        while not self._finished:
            self._news.clear()
            await self._news.wait()
            self._check(incarnation)
        finished, self._finished = self._finished, []
        return finished

    async def suspend(self) -> None:
        """See the protocol."""
        self._check()
        self._suspended = True
        if self._leap is not None:
            self._shorten()
            await self._step_ended()
        await self._answer()

    async def prepare(self, version: int) -> None:
        """See the protocol."""
        self._check()
        incarnation = self.incarnation
        self._check_version(version)
        if version != self._prepared:
            await asyncio.sleep(FETCH_SHARE * self._costs.update_seconds)
            self._check(incarnation)
            self._prepared = version
        await self._answer()

    async def receive(self, version: int, meetings: Sequence[Meeting], place: int, limit: float) -> str:
        """See :class:`orchestrator.api.CollectiveWorker`."""
        self._check()
        incarnation = self.incarnation
        if version != self._weights.sent or not 0 < place <= min(meeting.receivers for meeting in meetings):
            raise RetryableError(f"{self.name}: version {version} is not sent to place {place}")
        await asyncio.sleep(min(SEND_SHARE * self._costs.update_seconds, limit))
        self._check(incarnation)
        self._prepared = version
        return self._weights.content(version)

    async def update(self, version: int) -> UpdateResult:
        """See the protocol."""
        self._check()
        incarnation = self.incarnation
        if not self._suspended or self._leap is not None:
            raise CommandError("not_suspended", f"{self.name}: update to version {version} without suspend")
        if self._updating:
            raise CommandError("update_in_progress", f"{self.name}: another update is in progress")
        self._check_version(version)
        begun = asyncio.get_running_loop().time()
        costs = self._costs.update_seconds
        self._updating = True
        try:
            await asyncio.sleep(costs if version != self._prepared else (1.0 - FETCH_SHARE) * costs)
            self._check(incarnation)
        finally:
            if incarnation == self.incarnation:
                self._updating = False
        self._prepared, self._unusable = -1, ""
        for sequence in self._running.values():
            self._book(sequence)
        self._version = version
        self._prefix.clear()
        self._owed = sum(sequence.context for sequence in self._running.values())
        for _, _, sequence in self._waiting:
            sequence.prefill = sequence.context
        seconds = asyncio.get_running_loop().time() - begun
        return UpdateResult(version, MODEL_BYTES, seconds, len(self._running))

    async def resume(self) -> None:
        """See the protocol."""
        self._check()
        if self._updating:
            raise CommandError("update_in_progress", f"{self.name}: resume while an update is in progress")
        if self._unusable:
            raise CommandError("weights_unusable", f"{self.name}: {self._unusable}")
        self._suspended = False
        self._kick()
        await self._answer()

    async def stats(self) -> WorkerStats:
        """See the protocol."""
        self._check()
        await self._answer()
        block = self._engine.block_size
        for sequence in self._running.values():
            self._book(sequence)
        now = asyncio.get_running_loop().time()
        waiting = [entry[2] for entry in self._waiting if not entry[2].done]
        return WorkerStats(
            running=len(self._running),
            waiting=len(waiting),
            kv_used=sum(math.ceil(sequence.context / block) for sequence in self._running.values()),
            kv_capacity=self._engine.max_num_seqs * math.ceil(self._engine.max_model_len / block),
            preemptions=0,
            tokens_per_s=self.generated / self._busy_seconds if self._busy_seconds else 0.0,
            version=self._version,
            prefix_queries=self._prompt_tokens,
            prefix_hits=self._prompt_tokens_cached,
            generated=self.generated,
            oldest_wait=max((now - sequence.arrived for sequence in waiting), default=0.0),
            suspended=self._suspended,
        )

    async def restart(self) -> None:
        """See the protocol."""
        if self._closed:
            raise RetryableError(f"{self.name} is closed")
        self.die()
        incarnation = self.incarnation
        await asyncio.sleep(RESTART_SECONDS)
        if incarnation != self.incarnation:
            raise RetryableError(f"{self.name} was killed while it started")
        self._reset()
        self._dead = False

    async def close(self) -> None:
        """See the protocol."""
        self._closed = True
        self.die()
        await asyncio.sleep(0)

    def die(self) -> None:
        """The process is gone, with all its requests; pending calls learn of it."""
        self._dead = True
        self.incarnation += 1
        if self._leap is not None:
            self._leap.cancel()
            self._leap = None
        self._waiting.clear()
        self._running.clear()
        self._ends.clear()
        self._aborting.clear()
        self._finished.clear()
        self._known.clear()
        self._ended.clear()
        self._news.set()
        self._end_step()

    def spoil(self) -> None:
        """An update fails while it is applied: the weights are unusable from now on."""
        if self._dead:
            return
        self._unusable = "the last update failed half-way"
        self._prepared = -1
        raise CommandError("weights_unusable", f"{self.name}: {self._unusable}")

    # The engine.

    def _check_version(self, version: int) -> None:
        if version < self._version:
            raise CommandError("version_decreases", f"{self.name}: {version} asked for, {self._version} is loaded")
        if version != self._prepared and not self._weights.has(version):
            raise RetryableError(f"{self.name}: version {version} is not on the relay")

    def _unfinished(self) -> Iterator[_Sequence]:
        return (sequence for sequence in self._known.values() if sequence is not None)

    def _meant(self, request_ids: Sequence[str], trajectories: Sequence[str], groups: Sequence[str]) -> list[_Sequence]:
        """The unfinished requests that an ABORT names."""
        named = [self._known.get(request_id) for request_id in request_ids]
        found = [sequence for sequence in named if sequence is not None]
        if trajectories or groups:
            found += [
                sequence
                for sequence in self._unfinished()
                if sequence.request.trajectory_id in trajectories
                or (sequence.request.group_id and sequence.request.group_id in groups)
            ]
        return found

    async def _step_ended(self) -> None:
        """Wait until the engine step in progress has."""
        incarnation = self.incarnation
        if self._boundary is None:
            self._boundary = asyncio.get_running_loop().create_future()
        await asyncio.shield(self._boundary)
        self._check(incarnation)

    def _check(self, incarnation: int | None = None) -> None:
        if self._dead or (incarnation is not None and incarnation != self.incarnation):
            raise RetryableError(f"{self.name} is {'closed' if self._closed else 'dead'}")

    async def _answer(self) -> None:
        """The way back of a command: one turn of the loop, in which the worker may die."""
        incarnation = self.incarnation
        await asyncio.sleep(0)
        self._check(incarnation)

    def _enqueue(self, request: GenerationRequest, now: float) -> None:
        room = self._engine.max_model_len - len(request.token_ids)
        limit = min(request.sampling.max_tokens, self._speech.most, room)
        tokens: tuple[int, ...] = ()
        if limit >= 1:
            tokens = self._speech.response(request.token_ids, request.trajectory_id, request.turn, limit)
        cached = self._prefix.pop(request.trajectory_id, 0)
        self._prompt_tokens += len(request.token_ids)
        self._prompt_tokens_cached += min(cached, len(request.token_ids))
        sequence = _Sequence(request, tokens, now, max(1, len(request.token_ids) - cached), self._numbers)
        self._numbers += 1
        self._known[request.request_id] = sequence
        if tokens:
            heapq.heappush(self._waiting, (request.priority, sequence.number, sequence))
        else:
            error = f"context of {len(request.token_ids)} tokens leaves no room in {self._engine.max_model_len}"
            self._finish(sequence, "error", error)

    def _finish(self, sequence: _Sequence, reason: str, error: str = "") -> None:
        sequence.done = True
        self._known[sequence.request.request_id] = None
        self._ended.append(sequence.request.request_id)
        if len(self._ended) > REMEMBERED:
            del self._known[self._ended.popleft()]
        if self._running.pop(sequence.request.request_id, None) is not None:
            self._book(sequence)
        now = asyncio.get_running_loop().time()
        started = sequence.started if sequence.started >= 0 else now
        tokens = sequence.tokens[: sequence.made]
        first = sequence.first if tokens else sequence.arrived
        per_token = (now - first) / (len(tokens) - 1) if len(tokens) > 1 else 0.0
        self._finished.append(
            Completion(
                sequence.request.request_id,
                tokens,
                logprobs(tokens),
                merge_spans(sequence.spans),
                reason,
                CompletionTiming(
                    round(started - sequence.arrived, 6),
                    round(now - started, 6),
                    round(first - sequence.arrived, 6),
                    round(per_token, 9),
                ),
                error,
            )
        )
        self._prefix[sequence.request.trajectory_id] = sequence.context
        if self._said is not None and reason in ("stop", "length"):
            request = sequence.request
            self._said(request.trajectory_id, request.turn, self._finished[-1].versions)
        self._news.set()

    def _kick(self) -> None:
        """Something changed: let it take effect at the end of the step in progress, or now when there is none."""
        if self._leap is not None:
            self._shorten()
        elif not self._suspended and not self._dead:
            self._begin_leap()

    def _begin_leap(self) -> None:
        now = asyncio.get_running_loop().time()
        while self._waiting and len(self._running) < self._engine.max_num_seqs:
            number, sequence = heapq.heappop(self._waiting)[1:]
            if not sequence.done:
                sequence.started, sequence.booked = now, self._steps
                self._running[sequence.request.request_id] = sequence
                heapq.heappush(self._ends, (self._steps + len(sequence.tokens), number, sequence))
                self._owed += sequence.prefill
        while self._ends and self._ends[0][2].done:
            heapq.heappop(self._ends)
        if not self._running:
            return
        costs = self._costs
        self._leap_start = now + self._owed * costs.prefill_seconds_per_token
        self._leap_step = costs.decode_seconds_per_step + costs.decode_seconds_per_sequence * len(self._running)
        self._leap_steps = self._ends[0][0] - self._steps
        self._owed = 0
        self._busy_seconds += self._leap_start - now
        for sequence in self._running.values():
            if sequence.first < 0:
                sequence.first = self._leap_start + self._leap_step
        self._arm()

    def _arm(self) -> None:
        loop = asyncio.get_running_loop()
        self._leap = loop.call_at(self._leap_start + self._leap_steps * self._leap_step, self._end_leap)

    def _shorten(self) -> None:
        """End the leap with the step in progress."""
        assert self._leap is not None
        elapsed = asyncio.get_running_loop().time() - self._leap_start
        steps = max(1, math.ceil(elapsed / self._leap_step))
        if steps < self._leap_steps:
            self._leap.cancel()
            self._leap_steps = steps
            self._arm()

    def _end_leap(self) -> None:
        self._leap = None
        self._steps += self._leap_steps
        self._busy_seconds += self._leap_steps * self._leap_step
        while self._ends and self._ends[0][0] <= self._steps:
            sequence = heapq.heappop(self._ends)[2]
            if not sequence.done:
                self._finish(sequence, "stop" if sequence.tokens[-1] == END else "length")
        for sequence in self._aborting:
            if not sequence.done:
                self._finish(sequence, "abort")
        self._aborting.clear()
        self._end_step()
        if not self._suspended:
            self._begin_leap()

    def _book(self, sequence: _Sequence) -> None:
        """Count the tokens that a running sequence has made since it was last looked at."""
        tokens = self._steps - sequence.booked
        sequence.booked = self._steps
        sequence.made += tokens
        sequence.spans.append((self._version, tokens))
        self.generated += tokens

    def _end_step(self) -> None:
        if self._boundary is not None and not self._boundary.done():
            self._boundary.set_result(None)
        self._boundary = None
