"""``ServedWorker``: the command-driven rollout worker inside the API server of a stock ``vllm serve``. No HTTP in it.

Serving users keep the server: their requests run beside ours, under the same scheduler, and are paused with them.
Guarantees (``orchestrator.api.RolloutWorker`` says what the methods mean; ``vllm_rlplugin.worker.inprocess_worker`` is
the same worker with the engine in its own process):

* Every added request ends in exactly one completion: finished, aborted (with the tokens it had) or refused by the engine
  (finish reason ``error``). ADD or ABORT of an id that was seen before changes nothing. Completions go to the latest call
  of ``completions``; an earlier one that still waits (its client went away) returns nothing.
* When ABORT returns, the completions of what it named are there and the engine has taken the abort.
* Once the engine died, every pending and later call raises RetryableError.

All methods belong to the event loop of the API server; each request that the engine has is one task. Times are of the
monotonic clock, which the engine core stamps with too; only vLLM's arrival times are of the wall clock.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from orchestrator.api import (
    CommandError,
    Completion,
    CompletionTiming,
    ConfigError,
    GenerationRequest,
    RetryableError,
    TokenSequence,
    UpdateResult,
    WorkerStats,
    merge_spans,
)
from orchestrator.transfer.turns.routed_experts import pack_experts
from vllm_rlplugin.options import ROLLOUT_ID
from vllm_rlplugin.worker.cache_salt import make_salt
from vllm_rlplugin.worker.live_engine import EngineClient, LiveEngine
from vllm_rlplugin.worker.request_book import RequestBook, UnfinishedRequest
from vllm_rlplugin.worker.stats_window import StatsWindow, stats_of
from vllm_rlplugin.worker.update_cycle import Observe, UpdateCycle

ARRIVAL_STEP = 1e-6  # seconds; keeps arrival times distinct, so that the order within a priority is that of ADD
REMEMBERED_NAMES = 1 << 16  # trajectories and groups of which it is known that they were there
AT_ONCE = 32  # requests that vLLM is given in one turn of the event loop: some 4 ms of it
BUSY_SECONDS = (0.25, 4.0)  # between the first tries of a request that vLLM does not admit, and later ones
ENGINE_ID = f"{ROLLOUT_ID}{{}}"  # of our requests inside vLLM, whose own begin with cmpl- or chatcmpl-

_logger = logging.getLogger("vllm.rl_coserve")
# (request, cache salt, arrival time in seconds of the wall clock) -> (prompt, sampling parameters) of vLLM
Translate = Callable[[GenerationRequest, str | None, float], tuple[Any, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """What the served model takes, and how many requests run at once (``max_num_seqs``)."""

    model_len: int  # tokens, prompt and answer together
    vocabulary: int
    slots: int
    lookahead: int  # how many requests may wait inside the engine
    max_wait: float = math.inf  # seconds after which a request goes before those that overtook it
    salted: bool = True  # the weight version is in the cache salt (else KV is flushed on an update)
    remembers: str = ""  # a KV connector that would bring back KV of older weights: no updates beside it

    @classmethod
    def from_config(cls, vllm_config: Any) -> EngineLimits:
        """Those of a running vLLM."""
        from vllm_rlplugin.engine_activation import remembering_connector
        from vllm_rlplugin.options import PluginOptions

        options = PluginOptions.from_config(vllm_config)
        return cls(
            model_len=int(vllm_config.model_config.max_model_len),
            vocabulary=int(vllm_config.model_config.get_vocab_size()),
            slots=int(vllm_config.scheduler_config.max_num_seqs),
            lookahead=options.lookahead,
            max_wait=options.max_wait,
            salted=options.kv_on_update == "salt",
            remembers=remembering_connector(vllm_config.kv_transfer_config),
        )


_REMEMBERS = "it cannot forget KV of older weights: no weight updates beside it, drop one of the two"


@dataclass(slots=True)
class _Flight:
    """A request that the engine has, or is about to get."""

    entry: UnfinishedRequest
    fed_at: float
    registered: bool = False
    aborted: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None


def make_engine_request(request: GenerationRequest, salt: str | None, arrival: float) -> tuple[Any, Any]:
    """A request in vLLM's terms: final output only, token ids, log-probs of the sampled tokens, no text."""
    from vllm.inputs import tokens_input
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    sampling, routed = request.sampling, request.experts_from
    params = SamplingParams(
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        stop_token_ids=list(sampling.stop_token_ids),
        seed=sampling.seed,
        ignore_eos=True,
        logprobs=0,  # of the sampled token only
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        **({"routed_experts_prompt_start": routed} if routed else {}),
    )
    prompt = tokens_input(list(request.token_ids), cache_salt=salt)
    prompt["arrival_time"] = arrival  # orders requests of one priority
    return prompt, params


class ServedWorker:
    """Implements :class:`orchestrator.api.RolloutWorker` on vLLM's ``AsyncLLM``. Make it inside the event loop."""

    def __init__(
        self,
        client: EngineClient,
        limits: EngineLimits,
        *,
        name: str = "vllm-serve",
        translate: Translate = make_engine_request,
        observe_update: Observe | None = None,
        observe_completion: Callable[[Completion], None] | None = None,
    ) -> None:
        self.name = name
        self.limits = limits
        self._client = client
        self._engine = LiveEngine(client, self._break)
        self.cycle = UpdateCycle(self._engine, observe_update)
        self._translate = translate
        self._observe = observe_completion or (lambda completion: None)
        self._book = RequestBook(limits.lookahead)
        self._adding = asyncio.Lock()  # nothing is added while another relay is being connected
        self._unfinished: dict[str, float] = {}  # request ids -> arrival time
        self._last_arrival = 0.0
        self._seen: OrderedDict[tuple[str, str], None] = OrderedDict()  # trajectories and groups; see RequestBook
        self._flights: dict[str, _Flight] = {}
        self._registered = 0  # of them, those that vLLM counts among its unfinished requests
        self._finished: deque[Completion] = deque()
        self._news = asyncio.Event()  # something for completions() to return or raise
        self._reader = 0  # the latest call of completions()
        self._broken = ""
        self._window = StatsWindow()
        self._window.begin(time.monotonic())

    async def open(self, relay: Mapping[str, Any] | None = None) -> None:
        """Make sure of scheduler and worker extension, learn the version, connect to the relay.

        Raises ConfigError when this engine was started without our parts, RetryableError when the relay is not there.
        """
        # vLLM asks for it, once, before a request is registered; known, a request is registered in its task's first step.
        await self._engine.guard_call(self._client.get_supported_tasks())
        try:
            await self._engine.command("snapshot", {})
            await self._engine.rpc("rl_ready")
        except RetryableError:
            raise
        except Exception as error:  # what vLLM makes of an unknown method
            fix = "this engine lacks our scheduler class and worker extension: start it with --plugin rl-coserve"
            raise ConfigError("engine", str(error), fix) from error
        if relay is not None and self.limits.remembers:
            raise ConfigError("--kv-transfer-config", self.limits.remembers, _REMEMBERS)
        await self.cycle.open(relay)

    async def connect(self, init_info: Mapping[str, Any]) -> None:
        """To a relay. Another one than before, or another epoch of its job, begins a new history: see
        :class:`~vllm_rlplugin.worker.update_cycle.UpdateCycle`. Raises CommandError, also ``requests_in_flight``,
        RetryableError."""
        self._check()
        if self.limits.remembers:
            raise CommandError("invalid_request", f"--kv-transfer-config {self.limits.remembers}: {_REMEMBERS}")
        async with self._adding:
            await self.cycle.connect(init_info, lambda: len(self._book))

    # Requests.

    def check(self, requests: Sequence[GenerationRequest]) -> None:
        """Raises CommandError ``invalid_request`` for the first, never seen, that this model cannot take."""
        for request in requests:
            if not self._book.was_added(request.request_id) and (mistake := self._refusal(request)):
                raise CommandError("invalid_request", f"{request.request_id}: {mistake}")

    async def add(self, requests: Sequence[GenerationRequest]) -> None:
        async with self._adding:
            self._add(requests)

    def _add(self, requests: Sequence[GenerationRequest]) -> None:
        self._check()
        fresh = [request for request in requests if not self._book.was_added(request.request_id)]
        if not self._book.add(fresh, time.monotonic()):
            return
        for request in fresh:
            self._last_arrival = max(time.time(), self._last_arrival + ARRIVAL_STEP)
            self._unfinished.setdefault(request.request_id, self._last_arrival)
            self._seen[("trajectory", request.trajectory_id)] = None
            self._seen[("group", request.group_id)] = None
            if mistake := self._refusal(request):
                self._finish(request.request_id, _failed(request.request_id, mistake))
        while len(self._seen) > REMEMBERED_NAMES:
            self._seen.popitem(last=False)
        self._feed()

    async def abort(
        self, request_ids: Sequence[str] = (), *, trajectories: Sequence[str] = (), groups: Sequence[str] = ()
    ) -> None:
        self._check()
        pending: list[asyncio.Task[None]] = []
        for request_id in self._book.select(request_ids, trajectories, groups):
            flight = self._flights.get(request_id)
            if flight is None:  # held back: the engine never had it
                self._finish(request_id, self._note_aborted(request_id))
            elif flight.task is not None:
                flight.aborted.set()
                pending.append(flight.task)
        names = [name for name, flight in self._flights.items() if flight.aborted.is_set()]
        while pending:
            await self._engine.guard_call(self._client.abort([ENGINE_ID.format(name) for name in names]))
            # Answered between two steps, after the abort was taken: no further token of them is generated.
            await self._engine.guard_call(self._client.is_paused())
            pending = [task for task in pending if not task.done()]

    async def abort_all(self) -> int:
        """Whatever was added and is unfinished; returns how many."""
        await self.abort(ours := self.unfinished_ids)
        return len(ours)

    @property
    def unfinished_ids(self) -> list[str]:
        """Of all requests that were added here."""
        return list(self._unfinished)

    def known(self, request_ids: Sequence[str], trajectories: Sequence[str], groups: Sequence[str]) -> bool:
        """Whether any of these names something that was ever added (as far as remembered)."""
        return (
            any(self._book.was_added(name) for name in request_ids)
            or any(("trajectory", name) in self._seen for name in trajectories)
            or any(("group", name) in self._seen for name in groups)
        )

    def unfinished(
        self, request_ids: Sequence[str] = (), trajectories: Sequence[str] = (), groups: Sequence[str] = ()
    ) -> list[str]:
        """The ids of the unfinished requests that are meant."""
        return self._book.select(request_ids, trajectories, groups)

    async def abort_stock(self, request_ids: Sequence[str] | None) -> int:
        """vLLM's ``/abort_requests``: ids of ours and of serving users; none: everything. Returns how many were named."""
        self._check()
        if request_ids:
            await self.abort(request_ids)
            await self._engine.guard_call(self._client.abort(list(request_ids)))
            return len(request_ids)
        ours = await self.abort_all()
        processor = self._client.output_processor
        internal = [*processor.request_states, *processor.parent_requests]
        await self._engine.guard_call(self._client.abort(internal, internal=True))
        return ours + len(internal)

    async def prioritize(self, priorities: Mapping[str, int]) -> None:
        self._check()
        if self._book.prioritize(priorities):
            await self._engine.command("prioritize", {"priorities": dict(priorities)})
        self._feed()

    async def completions(self) -> list[Completion]:
        self._check()
        self._reader += 1
        reader = self._reader
        self._news.set()  # an earlier call that still waits lost its caller, else it would not be repeated
        while not self._finished:
            self._news.clear()
            await self._news.wait()
            self._check()
            if reader != self._reader:
                return []
        completions = list(self._finished)
        self._finished.clear()
        return completions

    # Weights.

    async def suspend(self) -> None:
        self._check()
        await self.cycle.suspend()

    async def prepare(self, version: int) -> None:
        self._check()
        await self.cycle.prepare(version)

    async def update(self, version: int) -> UpdateResult:
        self._check()
        return await self.cycle.update(version)

    async def resume(self) -> None:
        self._check()
        await self.cycle.resume()

    async def kv_command(self, command: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """See :mod:`vllm_rlplugin.kv.commands`. Not while paused: the weights may be changing, the KV not yet."""
        self._check()
        if self.cycle.suspended:
            return {"refused": "updating", "detail": "the engine is paused"}
        return await self._engine.command(command, arguments)

    async def reset_prefix_cache(self, running: bool, connector: bool) -> bool:
        """vLLM's own; whether it succeeded."""
        self._check()
        return bool(await self._engine.guard_call(self._client.reset_prefix_cache(running, connector)))

    # Introspection.

    @property
    def held(self) -> int:
        """Requests of ours that wait in front of the engine."""
        return self._book.held_count

    @property
    def busy(self) -> bool:
        """Whether anything is unfinished, requests of serving users included."""
        return bool(len(self._book)) or self._client.get_num_unfinished_requests() > 0

    @property
    def broken(self) -> str:
        """Why every call raises RetryableError; empty: it does not."""
        return self._broken

    async def stats(self) -> WorkerStats:
        self._check()
        await asyncio.sleep(0)  # requests that were fed just now register
        on_the_way = len(self._flights) - self._registered
        counts = await self._engine.command("snapshot", {})
        return self._window.complete(
            stats_of(counts),
            time.monotonic(),
            computed=int(counts["generated"]) + int(counts["steps"]),
            idle=self.cycle.suspended or not self.busy,
            held=self._book.held_count + on_the_way,
            oldest=self._book.oldest() if self._book.held_count else None,
            suspended=self.cycle.suspended,
            version=self.cycle.version,
        )

    async def close(self) -> None:
        """Abort what is unfinished; the engine is vLLM's own and goes on. Idempotent."""
        if not self._broken:
            for flight in self._flights.values():
                if flight.task is not None:
                    flight.task.cancel()  # vLLM aborts a request whose consumer is cancelled
            self._break(f"{self.name} is closed")

    # The requests inside the engine.

    def _feed(self) -> None:
        best = self._book.best_held
        if best is None:
            return
        # The engine's queue is in another process. It runs the best-ranked `slots` of what it has, so of those that rank at
        # least as the best one held does, these wait; requests of serving users are counted as running.
        others = max(0, self._client.get_num_unfinished_requests() - self._registered)
        waiting = max(0, self._book.fed_ahead(best) + others - self.limits.slots)
        free = max(0, self.limits.slots - len(self._flights) - others)
        now = time.monotonic()
        overdue = now - self.limits.max_wait / 2  # the scheduler counts the wait anew
        for number, entry in enumerate(self._book.next_to_feed(waiting, free, None, overdue=overdue)):
            flight = self._flights[entry.request.request_id] = _Flight(entry, now)
            flight.task = asyncio.create_task(
                self._run_request(flight, number // AT_ONCE), name=f"{self.name} {entry.request.request_id}"
            )

    async def _run_request(self, flight: _Flight, turns: int) -> None:
        request_id = flight.entry.request.request_id
        try:
            for _ in range(turns):  # of the loop, in which others of a large batch begin
                await asyncio.sleep(0)
            pause, longest = BUSY_SECONDS
            while (completion := await self._generate(flight)) is None:
                self._registered -= flight.registered
                flight.registered = False
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(flight.aborted.wait(), pause)
                pause = min(2 * pause, longest)
        except Exception as error:  # whatever vLLM raises for one request
            if self._engine.dead:
                self._break(f"the vLLM engine died: {error}")
                return
            cause = error if error.__cause__ is None else error.__cause__
            _logger.warning("request %s failed: %r", request_id, cause, exc_info=True)
            completion = _failed(request_id, f"{cause}" or type(cause).__name__)
        finally:
            self._registered -= flight.registered
        self._finish(request_id, completion)
        self._feed()

    async def _generate(self, flight: _Flight) -> Completion | None:
        """None: the server has as many as its owner allows (``--max-num-queued-reqs``, ``--max-num-queued-tokens``)."""
        request = flight.entry.request
        if flight.aborted.is_set():
            return self._note_aborted(request.request_id)
        # The scheduler puts in the salt of the present version in any case; the right one at once saves it the hashing.
        history, version = self.cycle.loaded
        salt = make_salt(None, version, history) if self.limits.salted else None
        prompt, params = self._translate(request, salt, self._unfinished[request.request_id])
        flight.registered = True
        self._registered += 1
        outputs = self._client.generate(
            prompt,
            params,
            ENGINE_ID.format(request.request_id),
            priority=request.priority,
            session_id=request.trajectory_id,
        )
        try:
            final = [output async for output in outputs]  # one: only the final output was asked for
        except Exception as error:
            if getattr(error, "http_status", None) == HTTPStatus.SERVICE_UNAVAILABLE:  # of vLLM's GracefulHTTPError
                return None
            raise
        if not final:
            return _failed(request.request_id, "vLLM gave no output")
        return self._completion(flight, final[-1], time.monotonic())

    def _completion(self, flight: _Flight, output: Any, now: float) -> Completion:
        request_id = flight.entry.request.request_id
        result = output.outputs[0]
        tokens = tuple(result.token_ids)
        logprobs = tuple(result.logprobs.logprobs) if result.logprobs is not None else ()
        if not all(map(math.isfinite, logprobs)):
            return _failed(request_id, "the model gave a log-prob that is not finite")
        spans = merge_spans(
            (self.cycle.version_of_label(span.version), span.end - span.start) for span in result.weight_versions or ()
        )
        return Completion(
            request_id,
            tokens,
            logprobs,
            spans,
            result.finish_reason,
            make_timing(flight.entry.added_at, flight.fed_at, output.metrics, len(tokens), now),
            error="" if result.finish_reason != "error" else "vLLM ended the request with an error",
            experts=pack_experts(getattr(result, "routed_experts", None), flight.entry.request.experts_from),
        )

    def _finish(self, request_id: str, completion: Completion) -> None:
        self._flights.pop(request_id, None)
        self._unfinished.pop(request_id, None)
        if self._book.finish(request_id) is None:
            return
        self._finished.append(completion)
        self._observe(completion)
        self._news.set()

    def _note_aborted(self, request_id: str) -> Completion:
        """Of a request that never reached the engine."""
        entry = self._book.get(request_id)
        waited = 0.0 if entry is None else max(0.0, time.monotonic() - entry.added_at)
        return Completion(request_id, (), (), (), "abort", CompletionTiming(waited))

    def _refusal(self, request: GenerationRequest) -> str:
        """Why this model cannot take it; empty: it can."""
        tokens, limits = TokenSequence.of(request.token_ids), self.limits
        low, high = tokens.bounds
        if not tokens:
            return "the prompt is empty"
        if len(tokens) >= limits.model_len:
            return f"{len(tokens)} prompt tokens plus a generated one exceed the model's length of {limits.model_len}"
        if not 0 <= low <= high < limits.vocabulary:
            return f"token ids must lie in [0, {limits.vocabulary})"
        return ""

    def _break(self, reason: str) -> None:
        if not self._broken:
            self._broken = reason
            self._news.set()

    def _check(self) -> None:
        if self._broken:
            raise RetryableError(self._broken)
        self._engine.check()


def _failed(request_id: str, reason: str) -> Completion:
    return Completion(request_id, (), (), (), "error", error=reason)


def make_timing(added: float, fed: float, stats: Any, tokens: int, now: float) -> CompletionTiming:
    """Of a request that was ``added`` here, ``fed`` to vLLM, and ended ``now`` (seconds of the monotonic clock, which the engine
    core stamps with too) with so many tokens. With --disable-log-stats there are no stamps: then only the sum is right."""
    whole = max(0.0, now - added)
    if stats is None or not tokens or not stats.first_token_ts:
        queued = min(whole, fed - added)
        return CompletionTiming(queued, whole - queued)
    first = min(whole, max(0.0, stats.first_token_ts - added))
    queued = min(first, max(0.0, stats.scheduled_ts - added))
    between = (stats.last_token_ts - stats.first_token_ts) / (tokens - 1) if tokens > 1 else 0.0
    return CompletionTiming(queued, whole - queued, first, max(0.0, between))
