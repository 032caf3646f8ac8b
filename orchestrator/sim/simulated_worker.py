"""The simulated rollout worker: continuous batching in virtual time.

An engine step makes one token for each running sequence and costs what :mod:`orchestrator.sim.cost_model` says: of the running
sequences, of the tokens in their contexts, and of those prefilled in it; who runs is
:mod:`orchestrator.sim.engine_batch`. Commands take effect between two steps. Steps in which nothing changes are crossed
in one leap, so a response of a thousand tokens costs a few callbacks. The fetch of a weight update is spent beforehand,
beside generation, when it was prepared, and is shorter when it was received from the trainer.

Guarantees of the port that it keeps: each added request ends in exactly one completion (aborted ones too), commands are
idempotent by request id, in-flight tokens survive ``suspend``/``update``/``resume`` and their KV is prefilled again
after an update, each token carries the version that made it. A request may continue elsewhere with the tokens that it
has: it says there what it would have said where it began, and the audit hears of the whole turn, once. A death loses
all requests; every call then raises RetryableError until ``restart``. It starts with version -1: tokens made before the
first update can be told. Weights that were spoilt half-way (``spoil``) keep it suspended until an update succeeds.
"""

from __future__ import annotations

import asyncio
import math
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from orchestrator.api import (
    CommandError,
    Completion,
    CompletionTiming,
    ConfigError,
    GenerationRequest,
    KvMove,
    KvMoved,
    Meeting,
    RetryableError,
    RunError,
    TokenSequence,
    UpdateResult,
    VersionSpans,
    WorkerStats,
    merge_spans,
)
from orchestrator.config import Config
from orchestrator.sim import engine_batch
from orchestrator.sim.cost_model import CHUNK_TOKENS, EngineCosts, seconds_of, steps_in
from orchestrator.sim.recorded_traces import EpisodeTraces
from orchestrator.sim.seeded_draws import END, synthetic_logprobs
from orchestrator.sim.simulated_cluster import ExpertRouting, degree_of, engine_costs
from orchestrator.sim.simulated_speech import Speech
from orchestrator.sim.virtual_loop import VirtualTimeLoop
from orchestrator.transfer.turns import ContextSession, HeldContexts, TurnMessage, decode_turns

MODEL_BYTES = 1 << 20  # nominal payload of one version
FIRST = "~p"  # how the id of a turn's first part ends, see orchestrator.proxy.prefill_decode
REMEMBERED = 4096  # requests that have ended, and are not begun anew when they are added again
TURNS = 1 << 17  # more than have ever been under way, those that were broken off and never gone on with among them
Watch = Callable[[GenerationRequest, Completion], None]
Spans = tuple[tuple[int, int], ...]


class SimWeights:
    """The relay's twin: which versions have been published."""

    def __init__(self) -> None:
        self._published: dict[int, None] = {}
        self.holders: dict[str, SimWorker] = {}  # the workers whose KV may be asked for, by name
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


class TurnMoves:
    """What all workers of a life know of the turns that moved between them: where each began, and who has said what of it. A
    part that was lost on its way, and said again by another version, is there twice."""

    def __init__(self) -> None:
        # turn -> length of the context before the response; a run of days would fill the memory with those that are long over
        self.opened: OrderedDict[str, int] = OrderedDict()
        self._ended = deque[str]()  # in order, the last REMEMBERED of them
        self._parts: dict[str, dict[tuple[int, Spans], None]] = {}  # turn -> (tokens before it, versions) of each part

    def open_turn(self, turn: str, context: int) -> int:
        """How long the context of this turn was when it began, which is now if nobody has said so."""
        opened = self.opened.setdefault(turn, context)
        if len(self.opened) > TURNS:
            self._forget(next(iter(self.opened)))
        return opened

    def end_turn(self, turn: str) -> None:
        """All of it is said. It is remembered for a while: an answer that is lost is asked for again."""
        self._ended.append(turn)
        if len(self._ended) > REMEMBERED:
            self._forget(self._ended.popleft())

    def _forget(self, turn: str) -> None:
        self.opened.pop(turn, None)
        self._parts.pop(turn, None)

    def record_part(self, turn: str, before: int, versions: VersionSpans) -> None:
        """A part of a turn was said by a worker that does not continue it."""
        self._parts.setdefault(turn, {})[before, versions] = None

    def histories(self, turn: str, tokens: int) -> list[Spans]:
        """Who may have said the first ``tokens`` of a turn: versions of parts that follow one another."""
        found: dict[int, dict[Spans, None]] = {0: {(): None}}
        for before, versions in sorted(self._parts.get(turn, {})):
            after = before + sum(count for _, count in versions)
            for history in found.get(before, {}):
                found.setdefault(after, {})[(*history, *versions)] = None
        return list(found.get(tokens, {}))


class SimWorker:
    """A ManagedWorker without a process. ``die`` and ``spoil`` are for the fault injector; ``said(trajectory, turn,
    versions)`` is told of each response that ends by itself. ``incarnation`` changes with each death. ``hardware``:
    the class of its devices, "" for ``sim.device``; ``moves``: the same of all of a life that requests move between; ``costs``:
    of its engine, None: as the config says. ``watch`` is shown
    every request that ended and how."""

    watch: Watch | None = None

    def __init__(
        self,
        name: str,
        config: Config,
        weights: SimWeights,
        said: Callable[[str, int, VersionSpans], None] | None = None,
        traces: EpisodeTraces | None = None,
        hardware: str = "",
        speech: Speech | None = None,
        moves: TurnMoves | None = None,
        costs: EngineCosts | None = None,
    ) -> None:
        self.name = name
        self.hardware = hardware
        self.ranks = 1
        self.degree = degree_of(config, name)
        self._said = said
        self._moves = moves or TurnMoves()
        self._speech = speech or Speech(config, traces)
        self._engine = config.rollout.engine
        self._reuse = {task: section.reuse for task, section in config.sim.tasks.items()}
        self._start_seconds, self._stall_seconds = config.sim.start_seconds, config.sim.stall_seconds
        self._chunk_tokens = max(1, CHUNK_TOKENS // config.sim.grain)
        self._routing = ExpertRouting(config)
        self._use(costs or engine_costs(config, hardware, degree=self.degree))
        self._weights = weights
        weights.holders[name] = self
        self.incarnation = 0
        self._dead = self._closed = False
        self.busy_seconds = 0.0  # in which it computed
        self._generated = 0  # in former lives
        self.held = HeldContexts()
        self.session = ContextSession(name, self._take_turns)
        self.damaged = -1  # which byte of the next new tokens is another one when they come, -1: none
        self._intended: Sequence[GenerationRequest] = ()  # what is being added, as it was asked for
        self._batch = engine_batch.EngineBatch(0, None)
        self._reset()

    @property
    def generated(self) -> int:
        """Tokens made so far, those in progress at the last look."""
        return self._generated + self._batch.generated

    def _use(self, costs: EngineCosts) -> None:
        """What its steps cost from now on. Raises ConfigError where no request of the longest length could run."""
        most = self._engine.max_model_len
        if costs.kv_tokens is not None and costs.kv_tokens < most:
            fix = f"{self.name} has KV for only {costs.kv_tokens} tokens: a request of that length could never run"
            raise ConfigError("rollout.engine.max_model_len", most, fix)
        self._costs = self._routing.costs(costs)
        self._decode: dict[int, tuple[float, float]] = {}  # what the cost model said of so many sequences

    def _reset(self) -> None:
        self._generated += self._batch.generated
        self._batch = engine_batch.EngineBatch(self._engine.max_num_seqs, self._costs.kv_tokens, self._reuse)
        self._prepared = -1  # the version that was fetched and not loaded yet
        self._updating = False
        self._unusable = ""  # why the weights are
        self._known: dict[str, engine_batch.EngineSequence | None] = {}  # requests of this life; None when it has ended
        self._ended, self._numbers = deque[str](), 0  # in order, the last REMEMBERED of them; requests ever
        self._aborting: list[engine_batch.EngineSequence] = []  # running ones that end with the step in progress
        self._finished: list[Completion] = []
        self._news = asyncio.Event()
        self._suspended = False
        self._boundary: asyncio.Future[None] | None = None  # resolved when the step in progress has ended
        self._leap: asyncio.Handle | None = None
        # When its first decode step begins, on the clock of its device; seconds of that step; that each further one takes more.
        self._leap_start = self._leap_first = self._leap_growth = 0.0
        self._leap_steps = 0
        self._leap_prefill = 0.0  # seconds before the first of them
        self._chunks = self._chunks_before = 0  # steps of only a prefill: of this leap, of those before it

    # The port.

    async def add(self, requests: Sequence[GenerationRequest]) -> None:
        self._check()
        self._intended = requests
        await self.session.add(requests)
        self._kick()
        await self._answer()

    async def _take_turns(self, message: bytes) -> list[str]:
        """As they come over a wire. Raises RunError where what came is not what was meant."""
        sent = decode_turns(message)
        if self.damaged >= 0:
            sent, self.damaged = _damaged(sent, self.damaged), -1
        requests, digests = self.held.take(sent)
        meant = {request.request_id: request for request in self._intended}
        now = asyncio.get_running_loop().time()
        for request in requests:
            if request != meant[request.request_id]:
                raise RunError(f"{self.name} was given another request than was meant: {request}")
            if request.request_id not in self._known:
                self._enqueue(request, now)
        return digests

    def forget(self, trajectory_id: str) -> None:
        """See :class:`orchestrator.api.SessionWorker`."""
        self.session.forget(trajectory_id)

    def take_resent(self) -> tuple[int, int]:
        """See :class:`orchestrator.api.SessionWorker`."""
        return self.session.take_resent()

    async def abort(
        self, request_ids: Sequence[str] = (), *, trajectories: Sequence[str] = (), groups: Sequence[str] = ()
    ) -> None:
        self._check()
        in_step = False
        for sequence in self._meant(request_ids, trajectories, groups):
            if sequence.request.request_id in self._batch.running and self._leap is not None:
                self._aborting.append(sequence)
                in_step = True
            elif not sequence.done:
                self._finish(sequence, "abort")
        self._kick()
        if in_step:
            await self._step_ended()
        await self._answer()

    async def prioritize(self, priorities: Mapping[str, int]) -> None:
        self._check()
        for sequence in self._unfinished():
            priority = priorities.get(sequence.request.trajectory_id)
            if priority is not None:
                sequence.request = replace(sequence.request, priority=priority)
        self._batch.reorder()
        await self._answer()

    async def completions(self) -> list[Completion]:
        self._check()
        incarnation = self.incarnation
        while not self._finished:
            self._news.clear()
            await self._news.wait()
            self._check(incarnation)
        finished, self._finished = self._finished, []
        return finished

    async def suspend(self) -> None:
        self._check()
        self._suspended = True
        if self._leap is not None:
            self._shorten()
            await self._step_ended()
        await self._answer()

    async def prepare(self, version: int) -> None:
        self._check()
        incarnation = self.incarnation
        self._check_version(version)
        if version != self._prepared:
            await asyncio.sleep(self._costs.weights.fetch)
            self._check(incarnation)
            self._prepared = version
        await self._answer()

    async def receive(self, version: int, meetings: Sequence[Meeting], place: int, limit: float) -> str:
        """See :class:`orchestrator.api.CollectiveWorker`."""
        self._check()
        incarnation = self.incarnation
        if version != self._weights.sent or not 0 < place <= min(meeting.receivers for meeting in meetings):
            raise RetryableError(f"{self.name}: version {version} is not sent to place {place}")
        await asyncio.sleep(min(self._costs.weights.receive, limit))
        self._check(incarnation)
        self._prepared = version
        return self._weights.content(version)

    async def update(self, version: int) -> UpdateResult:
        self._check()
        incarnation = self.incarnation
        if not self._suspended or self._leap is not None:
            raise CommandError("not_suspended", f"{self.name}: update to version {version} without suspend")
        if self._updating:
            raise CommandError("update_in_progress", f"{self.name}: another update is in progress")
        self._check_version(version)
        begun = asyncio.get_running_loop().time()
        fetch = self._costs.weights.fetch if version != self._prepared else 0.0
        self._updating = True
        try:
            await asyncio.sleep(fetch + self._costs.weights.load + self._stall_seconds)
            self._check(incarnation)
        finally:
            if incarnation == self.incarnation:
                self._updating = False
        self._prepared, self._unusable = -1, ""
        self._batch.change_weights(version)
        if self._routing.load_version(version):
            self._use(self._costs)
        return UpdateResult(version, MODEL_BYTES, asyncio.get_running_loop().time() - begun, len(self._batch.running))

    async def resume(self) -> None:
        self._check()
        if self._updating:
            raise CommandError("update_in_progress", f"{self.name}: resume while an update is in progress")
        if self._unusable:
            raise CommandError("weights_unusable", f"{self.name}: {self._unusable}")
        self._suspended = False
        self._kick()
        await self._answer()

    async def kv_place(self) -> str:
        """See :class:`orchestrator.api.KvWorker`."""
        self._check()
        return self.name

    async def fetch_kv(self, move: KvMove) -> KvMoved:
        """See :class:`orchestrator.api.KvWorker`. A move waits for no other one."""
        self._check()
        incarnation, loop = self.incarnation, asyncio.get_running_loop()
        begun, source = loop.time(), self._weights.holders.get(move.source)
        held = self._batch.prefix_tokens(move.trajectory_id)
        version = self._batch.version
        theirs = None if source is None else source.prefix_under(version, move.trajectory_id)
        if source is None or theirs is None:
            return KvMoved(held, 0, 0, 0.0, "unreachable: it is gone, or has other weights")
        life = source.incarnation
        tokens = min(theirs, len(move.token_ids) - 1)
        if tokens <= held:
            return KvMoved(held, 0, 0, 0.0, "" if held else "gone: the prefix is not cached at the source")
        await asyncio.sleep(min(move.limit, seconds := self._costs.kv_move(tokens - held)))
        self._check(incarnation)
        if seconds > move.limit or source.incarnation != life or version != self._batch.version:
            return KvMoved(held, 0, 0, loop.time() - begun, "timeout: or the source died, or the weights changed")
        self._batch.adopt(move.trajectory_id, tokens)
        return KvMoved(tokens, tokens - held, 0, loop.time() - begun)

    def prefix_under(self, version: int, trajectory_id: str) -> int | None:
        """Cached tokens of a trajectory's prefix; None: it is dead, or has other weights than this version's."""
        return None if self._dead or self._batch.version != version else self._batch.prefix_tokens(trajectory_id)

    async def stats(self) -> WorkerStats:
        self._check()
        await self._answer()
        block = self._engine.block_size
        held, now = self._batch, asyncio.get_running_loop().time()
        held.book_tokens()
        waiting, running = held.waiting(), held.running.values()
        capacity = self._costs.kv_tokens
        longest = self._engine.max_num_seqs * math.ceil(self._engine.max_model_len / block)
        return WorkerStats(
            running=len(running),
            waiting=len(waiting),
            kv_used=sum(math.ceil(sequence.context / block) for sequence in running),
            kv_capacity=longest if capacity is None else capacity // block,
            preemptions=held.preemptions,
            outranked=held.outranked,
            tokens_per_s=self.generated / self.busy_seconds if self.busy_seconds else 0.0,
            version=held.version,
            prefix_queries=held.prompt_tokens,
            prefix_hits=held.prompt_tokens_cached,
            generated=self.generated,
            oldest_wait=max((now - sequence.arrived for sequence in waiting), default=0.0),
            suspended=self._suspended,
            expert_imbalance=self._routing.imbalance,
            steps=self._steps_so_far(),
        )

    def _steps_so_far(self) -> int:
        """Those of the leap in progress, too, and all chunks of a prefill but the last: whoever asks sees that it works."""
        done = self._batch.steps + self._chunks_before
        if self._leap is None:
            return done
        elapsed = self._clock() - self._leap_start
        if elapsed < 0:
            return done + int(self._chunks * (1.0 + elapsed / self._leap_prefill))
        steps = steps_in(elapsed, self._leap_first, self._leap_growth) if elapsed else 1
        return done + self._chunks + min(steps, self._leap_steps) - 1

    async def restart(self) -> None:
        if self._closed:
            raise RetryableError(f"{self.name} is closed")
        self.die()
        incarnation = self.incarnation
        await asyncio.sleep(self._start_seconds)
        if incarnation != self.incarnation:
            raise RetryableError(f"{self.name} was killed while it started")
        self._reset()
        self._dead = False

    async def close(self) -> None:
        self._closed = True
        self.die()
        await asyncio.sleep(0)

    def die(self) -> None:
        """The process is gone, with all its requests; pending calls learn of it."""
        self._dead = True
        self.incarnation += 1
        self.held.clear()
        self.session.clear()
        if self._leap is not None:
            self._leap.cancel()
            self._leap = None
        self._batch.clear()
        self._aborting.clear()
        self._finished.clear()
        self._known.clear()
        self._ended.clear()
        self._news.set()
        self._end_step()

    def spoil_weights(self) -> None:
        """An update fails while it is applied: the weights are unusable from now on."""
        if self._dead:
            return
        self._unusable = "the last update failed half-way"
        self._prepared = -1
        raise CommandError("weights_unusable", f"{self.name}: {self._unusable}")

    # The engine.

    def _check_version(self, version: int) -> None:
        if version < self._batch.version:
            why = f"{self.name}: {version} asked for, {self._batch.version} is loaded"
            raise CommandError("version_decreases", why)
        if version != self._prepared and not self._weights.has(version):
            raise RetryableError(f"{self.name}: version {version} is not on the relay")

    def _unfinished(self) -> Iterator[engine_batch.EngineSequence]:
        return (sequence for sequence in self._known.values() if sequence is not None)

    def _meant(
        self, request_ids: Sequence[str], trajectories: Sequence[str], groups: Sequence[str]
    ) -> list[engine_batch.EngineSequence]:
        """The unfinished requests that an ABORT names."""
        named = [self._known.get(request_id) for request_id in request_ids]
        found = [sequence for sequence in named if sequence is not None]
        for sequence in self._unfinished() if trajectories or groups else ():
            asked = sequence.request
            if asked.trajectory_id in trajectories or (asked.group_id and asked.group_id in groups):
                found.append(sequence)
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
        before, tokens = self._says(request, limit) if limit >= 1 else (0, ())
        sequence = engine_batch.EngineSequence(request, tokens, now, self._numbers, before)
        self._numbers += 1
        self._known[request.request_id] = sequence
        if tokens:
            self._batch.add(sequence)
        else:
            error = f"context of {len(request.token_ids)} tokens leaves no room in {self._engine.max_model_len}"
            self._finish(sequence, "error", error)

    def _says(self, request: GenerationRequest, limit: int) -> tuple[int, tuple[int, ...]]:
        """How many tokens of the turn others have said, and what is left to say."""
        opened = self._moves.open_turn(_turn(request), len(request.token_ids))
        said = len(request.token_ids) - opened
        context = request.token_ids[:opened] if said else request.token_ids
        most = min(limit + said, self._speech.most)
        return said, self._speech.response(context, request.trajectory_id, request.turn, most)[said:]

    def _finish(self, sequence: engine_batch.EngineSequence, reason: str, error: str = "") -> None:
        self._batch.remove(sequence)
        self._known[sequence.request.request_id] = None
        self._ended.append(sequence.request.request_id)
        if len(self._ended) > REMEMBERED:
            del self._known[self._ended.popleft()]
        now = asyncio.get_running_loop().time()
        started = sequence.started if sequence.started >= 0 else now
        tokens = sequence.tokens[: sequence.made]
        first = sequence.first if tokens else sequence.arrived
        per_token = (now - first) / (len(tokens) - 1) if len(tokens) > 1 else 0.0
        self._finished.append(
            Completion(
                sequence.request.request_id,
                tokens,
                synthetic_logprobs(tokens),
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
        if self.watch is not None:
            self.watch(sequence.request, self._finished[-1])
        request, turn, versions = sequence.request, _turn(sequence.request), self._finished[-1].versions
        if reason in ("stop", "length") and self._said is not None:
            for history in self._moves.histories(turn, sequence.before):
                self._said(request.trajectory_id, request.turn, merge_spans((*history, *versions)))
        is_part = reason == "abort" or request.request_id.endswith(FIRST)
        if sequence.made and is_part:
            self._moves.record_part(turn, sequence.before, versions)
        if not is_part:
            self._moves.end_turn(turn)
        self._news.set()

    def _kick(self) -> None:
        """Something changed: let it take effect at the end of the step in progress, or now when there is none."""
        if self._leap is not None:
            self._shorten()
        elif not self._suspended and not self._dead:
            self._begin_leap()

    def _begin_leap(self) -> None:
        now = asyncio.get_running_loop().time()
        held = self._batch
        owed, pairs = held.fill(now)
        running = len(held.running)
        if not running:
            return
        cost = self._decode.get(running)
        if cost is None:
            cost = self._decode[running] = self._costs.decode(running)
        fixed, growing = cost
        prefill = self._leap_prefill = self._costs.prefill(owed, pairs, running)
        self._chunks_before += self._chunks
        self._chunks = owed // self._chunk_tokens
        self._leap_start = self._clock() + prefill
        self._leap_first = fixed + growing * held.context
        self._leap_growth = growing * running
        self._leap_steps = held.horizon()
        self.busy_seconds += prefill
        if owed:  # somebody started, or everybody began anew
            for sequence in held.running.values():
                if sequence.first < 0:
                    sequence.first = self._at(self._leap_start + self._leap_first)
        self._arm()

    def _clock(self) -> float:
        return asyncio.get_running_loop().time()

    def _at(self, seconds: float) -> float:
        return seconds

    def _arm(self) -> None:
        seconds = seconds_of(self._leap_steps, self._leap_first, self._leap_growth)
        self._leap = asyncio.get_running_loop().call_at(self._at(self._leap_start + seconds), self._end_leap)

    def _shorten(self) -> None:
        """End the leap with the step in progress."""
        assert self._leap is not None
        elapsed = self._clock() - self._leap_start
        steps = steps_in(elapsed, self._leap_first, self._leap_growth)
        if steps < self._leap_steps:
            self._leap.cancel()
            self._leap_steps = steps
            self._arm()

    def _end_leap(self) -> None:
        self._take_steps()
        self._between_steps()

    def _take_steps(self) -> None:
        self.busy_seconds += seconds_of(self._leap_steps, self._leap_first, self._leap_growth)
        self._batch.advance(self._leap_steps)
        for sequence in self._batch.complete():
            self._finish(sequence, "stop" if sequence.tokens[-1] == END else "length")

    def _between_steps(self) -> None:
        self._leap = None
        for sequence in self._aborting:
            if not sequence.done:
                self._finish(sequence, "abort")
        self._aborting.clear()
        self._end_step()
        if not self._suspended:
            self._begin_leap()

    def _end_step(self) -> None:
        if self._boundary is not None and not self._boundary.done():
            self._boundary.set_result(None)
        self._boundary = None


class InlineSimWorker(SimWorker):
    """Its engine is a task of the pipeline's own event loop, as in a process that has both: a step computes while nobody else
    does, and then the loop has one turn. What follows from an answer within n turns of the loop is n steps late."""

    def _kick(self) -> None:
        if self._leap is None and not self._suspended and not self._dead:
            self._leap = asyncio.get_running_loop().call_soon(self._between_steps)

    def _arm(self) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualTimeLoop)
        loop.compute_until(self._leap_start + self._leap_first)
        self._leap_steps = 1
        self._take_steps()
        self._leap = loop.call_soon(self._between_steps)


def _damaged(message: TurnMessage, place: int) -> TurnMessage:
    """With another token in the last turn that brings any."""
    turns = list(message.turns)
    for number, turn in reversed(list(enumerate(turns))):
        if tokens := list(turn.request.token_ids):
            tokens[place % len(tokens)] ^= 1
            turns[number] = replace(turn, request=replace(turn.request, token_ids=TokenSequence(tokens)))
            break
    return replace(message, turns=tuple(turns))


def _turn(request: GenerationRequest) -> str:
    """The id of the request that asked for the turn, whatever part of it this one is (:mod:`orchestrator.proxy.resume_turn`)."""
    return request.request_id.partition("~")[0]
