"""The order of requests inside a vLLM scheduler: preemption for those that outrank, and that nothing starves.

:class:`PriorityPreemption` is mixed in before a stock ``Scheduler``; the decisions are those of :class:`ProgressivePriority`.
Guarantees:

* With equal priorities (and nothing overdue) each step is exactly stock's.
* A preempted request keeps its tokens and loses none in flight; its KV stays in the prefix cache until its blocks are
  needed, so it recomputes only what was evicted.
* A rollout over the control endpoints that ranks behind users is never put before them, however long it waited.
* While the engine is paused nobody's wait grows. All times are of the monotonic clock.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any

from vllm.v1.core.sched.interface import PauseState
from vllm.v1.request import RequestStatus

from orchestrator.policies.routing.priority import (
    NO_FLOOR,
    Arrival,
    ProgressivePriority,
    QueueWait,
    RunningRequest,
    WaitingRequest,
)
from vllm_rlplugin.options import ROLLOUT_ID

BEHIND_USERS = 1  # vLLM's priority behind that of users who say none
OVERDUE = -(2**63) - 1  # a vLLM priority before any that fits into the 64 bits of a request on the wire
SCANS_A_WAIT = 32  # how often in a max_wait the queue is searched for overdue requests
QUIET_STEPS = 8  # after deciding to do nothing for this head of the queue, before it is looked at again
FUTILE_STEPS = 64  # the same, after somebody was preempted for it and stock did not start it

_PRIORITY = attrgetter("priority")


class _Clock:
    """How long a request has waited since it last got a quantum of tokens."""

    __slots__ = ("base", "before", "since")

    def __init__(self, now: float) -> None:
        self.before = 0.0  # seconds waited in earlier spells
        self.since: float | None = now  # start of this spell; None while running
        self.base = 0  # output tokens when it was started last

    def seconds(self, now: float) -> float:
        return self.before + (max(now - self.since, 0.0) if self.since is not None else 0.0)


class _Blocks:
    """KV blocks as :meth:`ProgressivePriority.takeovers` asks for them, with blocks shared by prefix counted right."""

    def __init__(
        self, scheduler: Any, candidates: Sequence[Any], running: Sequence[Any], records: Sequence[RunningRequest]
    ) -> None:
        self._scheduler, self._candidates, self._running = scheduler, candidates, running
        manager = scheduler.kv_cache_manager
        # Stock serves the running ones first: the blocks into which they grow in this step are not free.
        self._growth = [self._grows(request, record.tokens) for request, record in zip(running, records, strict=True)]
        # Blocks whose free waits for a step in flight (KV connectors) come back without further preemption.
        deferred = sum(block.ref_cnt == 1 for _, blocks in scheduler.deferred_frees for block in blocks)
        self.free: int = manager.block_pool.get_num_free_blocks() + deferred - sum(self._growth)
        self._left = self.free
        self._hits: set[int] = set()  # blocks in use that the present candidate will share
        self._released: dict[int, int] = {}  # block -> references that the preemptions so far give up

    def _grows(self, request: Any, tokens: int) -> int:
        size, computed = self._scheduler.block_size, request.num_computed_tokens
        tokens = min(tokens, self._scheduler.max_num_scheduled_tokens) + self._scheduler.num_lookahead_tokens
        groups: int = self._scheduler.kv_cache_manager.num_kv_cache_groups
        return int(-(-(computed + tokens) // size) - -(-computed // size)) * groups

    def need(self, index: int) -> int:
        """As stock admits: the whole sequence must fit (``scheduler_reserve_full_isl``), less what it finds in use."""
        scheduler, request = self._scheduler, self._candidates[index]
        manager = scheduler.kv_cache_manager
        self._hits = set()
        needed: int = scheduler._request_remaining_blocks(request) + manager.watermark_blocks
        if not scheduler.scheduler_reserve_full_isl:
            step = -(-scheduler.max_num_scheduled_tokens // scheduler.block_size) * manager.num_kv_cache_groups
            needed = min(needed, step + manager.watermark_blocks)
        reports = (
            manager.enable_kv_cache_events and request.kv_cache_report_mode == "full"
        )  # a look-up would be reported
        if needed > self._left and request.num_computed_tokens == 0 and not reports:
            found = manager.get_computed_blocks(request)[0]
            blocks = {block.block_id: block for group in found.blocks for block in group if not block.is_null}
            self._hits = {name for name, block in blocks.items() if block.ref_cnt > self._released.get(name, 0)}
            needed = max(needed - len(self._hits), 0)
        self._left -= needed
        return needed

    def gain(self, index: int, position: int) -> int:
        """A block comes free with its last reference, unless the candidate takes it over as a prefix hit."""
        gained = self._growth[position]
        for group in self._scheduler.kv_cache_manager.get_blocks(self._running[position].request_id).blocks:
            for block in group:
                if not block.is_null:
                    released = self._released[block.block_id] = self._released.get(block.block_id, 0) + 1
                    gained += released == block.ref_cnt and block.block_id not in self._hits
        self._left += gained
        return gained


class PriorityPreemption:
    """Mixed in before a stock scheduler, which must order its queue by priority."""

    # Stock's attributes and methods that are used here.
    running: list[Any]
    waiting: Any
    kv_holding_waiting: Any
    requests: dict[str, Any]
    prev_step_scheduled_req_ids: set[str]
    finished_recving_kv_req_ids: set[str]
    current_step: int
    pause_state: Any
    _enqueue_waiting_request: Any

    def _rl_start_preempting(self, policy: ProgressivePriority, preemption: bool) -> None:
        self._rl_policy = policy
        self._rl_preemption = preemption
        self._rl_clocks: dict[str, _Clock] = {}
        self._rl_overdue: dict[Any, int] = {}  # overdue request -> its own priority
        self._rl_next_scan = 0.0
        self._rl_moves = 0  # grows whenever a request comes, starts, is preempted, ends or changes its rank
        self._rl_settled = -1  # moves when nobody that waited outranked anybody
        self._rl_quiet = ("", 0)  # (head of the queue, step before which it is not looked at again)
        self._rl_paused_at: float | None = None
        self._rl_updating = False  # preemptions of now are those of a weight update
        self._rl_preemptions = 0  # all but those of weight updates
        self._rl_outranked = 0

    # ---- hooks into stock methods ----

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        stock: Any = super()
        started: Sequence[Any] = ()
        if self.waiting or self._rl_overdue or self.kv_holding_waiting:
            started = self._rl_make_way(*args, **kwargs)
        preemptions = self._rl_preemptions
        output = stock.schedule(*args, **kwargs)
        for new in output.scheduled_new_reqs:  # with the V2 model runner the resumed ones are among them
            self._rl_started(new.req_id, new.num_computed_tokens)
        cached = output.scheduled_cached_reqs
        if cached.resumed_req_ids:
            for request_id, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
                if request_id in cached.resumed_req_ids:
                    self._rl_started(request_id, computed)
        # Stock starts nobody in a step in which it preempted for lack of blocks. Otherwise a limit that is not known here
        # (LoRA adapters, a connector) stands against this request, and must not cost further running ones their place.
        refused = started and started[0].status in (RequestStatus.WAITING, RequestStatus.PREEMPTED)
        if refused and self._rl_preemptions == preemptions:
            self._rl_quiet = (started[0].request_id, self.current_step + FUTILE_STEPS)
        return output

    def add_request(self, request: Any) -> None:
        stock: Any = super()
        known = request.request_id in self.requests  # the next chunk of a streaming session
        stock.add_request(request)
        self._rl_moves += 1
        if not known:
            self._rl_clocks[request.request_id] = _Clock(time.monotonic())

    def _preempt_request(self, request: Any, timestamp: float, *args: Any, **kwargs: Any) -> None:
        stock: Any = super()
        clock = self._rl_clocks.get(request.request_id)
        if clock is not None:
            self._rl_end_quantum(request, clock)
            clock.since = time.monotonic()
        self._rl_moves += 1
        if not self._rl_updating:
            self._rl_preemptions += 1
        stock._preempt_request(request, timestamp, *args, **kwargs)

    def _free_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        stock: Any = super()
        self._rl_moves += 1
        self._rl_clocks.pop(request.request_id, None)
        self._rl_overdue.pop(request, None)
        return stock._free_request(request, *args, **kwargs)

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> bool:
        stock: Any = super()
        self._rl_updating = True
        try:
            return bool(stock.reset_prefix_cache(*args, **kwargs))
        finally:
            self._rl_updating = False

    def set_pause_state(self, pause_state: Any) -> None:
        stock: Any = super()
        stock.set_pause_state(pause_state)
        now = time.monotonic()
        if pause_state != PauseState.UNPAUSED:
            if self._rl_paused_at is None:
                self._rl_paused_at = now
        elif self._rl_paused_at is not None:
            for clock in self._rl_clocks.values():
                if clock.since is not None:
                    clock.since += now - max(clock.since, self._rl_paused_at)
            self._rl_paused_at = None

    # ---- what our other modules use ----

    def _rl_started(self, request_id: str, cached: int) -> None:
        """A request was given a slot; ``cached``: how many of its tokens were found, not computed."""
        self._rl_moves += 1
        clock = self._rl_clocks.get(request_id)
        if clock is not None and clock.since is not None:
            clock.before, clock.since = clock.seconds(time.monotonic()), None
            clock.base = self.requests[request_id].num_output_tokens

    def _rl_oldest_wait(self) -> float:
        """Seconds that the longest-waiting request has waited since it last got a quantum; pauses are not counted."""
        now = time.monotonic() if self._rl_paused_at is None else self._rl_paused_at
        return max((clock.seconds(now) for clock in self._rl_clocks.values() if clock.since is not None), default=0.0)

    def _rl_waiting_ahead(self, priority: int) -> int:
        """How many of those that wait rank at least as one of this priority; asked before many steps."""
        return sum(request.priority <= priority for request in _unordered(self.kv_holding_waiting, self.waiting))

    def _rl_set_priorities(self, priorities: Mapping[Any, int]) -> int:
        """Give requests, waiting or running, other priorities of their own; returns how many changed."""
        changed = {request: new for request, new in priorities.items() if self._rl_own(request) != new}
        for request in self._rl_overdue.keys() & changed.keys():
            self._rl_overdue[request] = changed[request]
        self._rl_requeue({request: new for request, new in changed.items() if request not in self._rl_overdue})
        self._rl_quiet = ("", 0)
        return len(changed)

    # ---- before a step ----

    def _rl_make_way(self, throttle_prefills: bool = False) -> Sequence[Any]:
        """Preempt for those that outrank; returns for whom, in order."""
        stock: Any = self
        if self.pause_state != PauseState.UNPAUSED:
            return ()
        for request in list(self._rl_overdue):
            if request.status == RequestStatus.RUNNING:
                self._rl_end_quantum(request, self._rl_clocks[request.request_id])
        queues = [queue for queue in (self.kv_holding_waiting, self.waiting) if queue]
        if not queues:
            return ()
        now = time.monotonic()
        if now >= self._rl_next_scan:
            self._rl_next_scan = now + self._rl_policy.max_wait / SCANS_A_WAIT
            self._rl_mark_overdue(now)
        if not self._rl_preemption:
            return ()
        if self._rl_settled == self._rl_moves:
            return ()
        heads = [queue.peek_request() for queue in queues]
        if not self._rl_policy.may_decide(min(map(_PRIORITY, heads)), map(_PRIORITY, self.running)):
            self._rl_settled = self._rl_moves
            return ()
        if throttle_prefills and not stock.prefill_capacity_bound:
            return ()  # stock starts nobody in this step
        head = heads[-1].request_id
        if self._rl_quiet[0] == head and self.current_step < self._rl_quiet[1]:
            return ()
        started = self._rl_preempt(min(map(self._rl_own, heads)))
        if not started:
            self._rl_quiet = (head, self.current_step + QUIET_STEPS)
        return started

    def _rl_preempt(self, best: int) -> Sequence[Any]:
        stock: Any = self
        running = list(self.running)
        records = [
            RunningRequest(
                self._rl_own(request),
                _arrival(request),
                # stock's formula for what a running request computes in a step
                request.num_tokens_with_spec + request.num_output_placeholders - request.num_computed_tokens,
                request in self._rl_overdue,
                self._rl_floor(request),
            )
            for request in running
        ]
        candidates: list[Any] = []
        blocks = _Blocks(stock, candidates, running, records)
        decided = self._rl_policy.takeovers(
            self._rl_candidates(candidates, best),
            records,
            slots=stock.max_num_active_reqs - len(running) - stock.num_waiting_for_streaming_input,
            tokens=stock.max_num_scheduled_tokens - sum(record.tokens for record in records),
            blocks=blocks.free,
            need=blocks.need,
            gain=blocks.gain,
        )
        for takeover in decided:
            for position in takeover.victims:
                victim = running[position]
                self.running.remove(victim)
                # As stock does for lack of blocks: output in flight (async scheduling, pipeline stages) is delivered when it
                # returns, and stock does not resume the victim before (num_stale_output_tokens), so tokens are neither lost
                # nor sampled twice. reset_prefix_cache drops that output, because it must let the request resume at once.
                stock._preempt_request(victim, time.monotonic(), drop_stale_output=stock.requires_kv_delivery)
                # With nothing in flight and blocks left over, the victim may resume in this very step; the V1 model runner
                # then needs its tokens again, as if it had not been in the last step. Stock clears the set for the same.
                self.prev_step_scheduled_req_ids.discard(victim.request_id)
                self._rl_outranked += 1
        return [candidates[takeover.waiting] for takeover in decided]

    def _rl_candidates(self, seen: list[Any], best: int) -> Iterator[WaitingRequest]:
        """Those that stock would try to start now, in its order; each is put into ``seen`` as it is read."""
        for queue in (self.kv_holding_waiting, self.waiting):
            for request in queue:
                if not self._rl_ready(request):
                    continue
                seen.append(request)
                # Who holds KV blocks is started before all others, so that they wait for it: it inherits their rank.
                own = self._rl_own(request)
                priority = min(own, best) if queue is self.kv_holding_waiting else own
                tokens = request.num_tokens - request.num_computed_tokens
                overdue = request in self._rl_overdue
                yield WaitingRequest(priority, _arrival(request), tokens, overdue, self._rl_floor(request))

    def _rl_ready(self, request: Any) -> bool:
        """Whether stock would try to start it, not skip it (its own conditions)."""
        if request.num_stale_output_tokens and not request.drop_stale_output:
            return False
        if request.status == RequestStatus.WAITING_FOR_REMOTE_KVS:
            return request.request_id in self.finished_recving_kv_req_ids
        if request.status == RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR:
            wanted = request.structured_output_request
            return wanted is not None and wanted.grammar is not None
        return bool(request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED))

    # ---- overdue requests ----

    def _rl_own(self, request: Any) -> int:
        own: int = self._rl_overdue.get(request, request.priority)
        return own

    def _rl_floor(self, request: Any) -> int:
        """The best priority among those of which it counts as overdue."""
        lent = self._rl_own(request) >= BEHIND_USERS and request.request_id.startswith(ROLLOUT_ID)
        return BEHIND_USERS if lent else NO_FLOOR

    def _rl_mark_overdue(self, now: float) -> None:
        limit = self._rl_policy.max_wait
        waits = (clock for clock in self._rl_clocks.values() if clock.since is not None)
        if not any(clock.seconds(now) >= limit for clock in waits):
            return  # as the policy would say; but it has to be given the queue, which sorts itself for whoever reads it
        waiting, records = [], []
        for request in _unordered(self.kv_holding_waiting, self.waiting):
            clock = self._rl_clocks.get(request.request_id)
            if clock is not None and request not in self._rl_overdue:
                waiting.append(request)
                floor = self._rl_floor(request)
                records.append(QueueWait(clock.seconds(now), request.priority, _arrival(request), floor))
        others = {*self.running, *self._rl_overdue}
        found = self._rl_policy.overdue(records, ((self._rl_own(other), _arrival(other)) for other in others))
        for index in found:
            self._rl_overdue[waiting[index]] = waiting[index].priority
        ranks = {waiting[index]: records[index].floor for index in found}
        self._rl_requeue({request: OVERDUE if floor == NO_FLOOR else floor for request, floor in ranks.items()})

    def _rl_end_quantum(self, request: Any, clock: _Clock) -> None:
        """Of a request that is in no queue: once it has had its quantum, its own rank and a new wait count."""
        if self._rl_policy.quantum_is_over(request.num_output_tokens - clock.base):
            clock.before = 0.0
            if request in self._rl_overdue:
                request.priority = self._rl_overdue.pop(request)
                self._rl_moves += 1

    def _rl_requeue(self, priorities: Mapping[Any, int]) -> None:
        """Set vLLM's own priorities: the queues are heaps by it, so what waits is taken out and put in again."""
        self._rl_moves += 1
        waiting = {request for request in priorities if request.status != RequestStatus.RUNNING}
        if waiting:
            self.waiting.remove_requests(waiting)
            self.kv_holding_waiting.remove_requests(waiting)
        for request, priority in priorities.items():
            request.priority = priority
            if request in waiting:
                self._enqueue_waiting_request(request)


def _arrival(request: Any) -> Arrival:
    return (request.arrival_time, request.request_id)


def _unordered(*queues: Any) -> Iterator[Any]:
    """vLLM's queues sort themselves for whoever iterates over them, with a comparison in Python for each move."""
    for queue in queues:
        yield from queue._heap
