"""A turn that goes to another worker than its prefix lies in: have the KV moved first, when that pays (Heddle 5.3).

Guarantees: a turn that waits for its KV goes to its worker in any case, at the latest when the move's time is over; one whose
worker died, or that was aborted or taken back meanwhile, is not sent from here. What a move came to is an event; each kind of
failure is reported once, and counted. Without workers that can move KV, or with the section off, every turn goes at once.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from orchestrator.api import Completion, GenerationRequest, KvMove, KvMoved, KvWorker
from orchestrator.config.rollout_keys import KvTransferSection
from orchestrator.events import EventLog
from orchestrator.policies.placement.kv_transfer_cost import BreakEven
from orchestrator.policies.routing.turn_routing import TurnRouter
from orchestrator.proxy.worker_state import LOST, WorkerState

EVICTED = "gone"  # the source has not one block of it: the way of a cache, counted and not reported
# To one worker at a time: it has other calls to answer, and a burst of turns would wait for one another.
MOST_MOVES = 16
REMEMBERED = 4096  # turns whose prefix lay elsewhere and that have not ended


@dataclass(slots=True)
class _Elsewhere:
    """A turn whose prefix lay in another worker. ``seconds``: that its move took."""

    tokens: int
    moved: bool
    seconds: float = 0.0


class KvMoves:
    """Of one proxy. ``limit``: seconds of a move; ``policy`` None: nothing is ever moved."""

    def __init__(self, policy: BreakEven | None = None, events: EventLog | None = None, limit: float = 10.0) -> None:
        self._policy, self._events, self._limit = policy, events, limit
        self._held: dict[str, tuple[WorkerState, GenerationRequest]] = {}  # by id in the worker
        self._elsewhere: dict[str, _Elsewhere] = {}
        self._places: dict[int, tuple[int, str]] = {}  # worker -> (its life, where it hands out KV)
        self.sources: dict[str, int] = {}  # request -> the worker whose KV it needs, whatever it costs; -1: nobody's
        self._contexts: dict[str, GenerationRequest] | None = None  # by trajectory, its last turn
        self._tasks: set[asyncio.Task[None]] = set()
        self._doors: dict[int, asyncio.Semaphore] = {}  # of workers that KV goes to
        self.moves = self.tokens = self.bytes = 0  # that came about
        self.failures: Counter[str] = Counter()  # by kind

    @property
    def tasks(self) -> list[asyncio.Task[None]]:
        """Moves in progress."""
        return list(self._tasks)

    def send_turn(
        self, state: WorkerState, request: GenerationRequest, states: Sequence[WorkerState], holder: int
    ) -> None:
        """Send a turn to its worker, now or when its KV is there. ``holder``: which other one has its prefix, -1: none."""
        if self._contexts is not None:
            self._contexts[request.trajectory_id] = request
        needed = self.sources.get(request.request_id)
        holder = holder if needed is None else needed
        if self._policy is not None and holder >= 0 and states[holder] is not state:
            source = states[holder]
            tokens = len(request.token_ids)
            moves = self._can(state) and self._can(source) and source.usable
            room = sum(held is state for held, _ in self._held.values()) < MOST_MOVES
            moves = moves and (needed is not None or (room and self._policy.move_pays(tokens)))
            self._elsewhere[request.request_id] = _Elsewhere(tokens, moves)
            if len(self._elsewhere) > REMEMBERED:  # of those that never ended: their worker died
                del self._elsewhere[next(iter(self._elsewhere))]
            if moves:
                self._held[request.request_id] = state, request
                task = asyncio.create_task(self._move(state, request, source), name=f"kv {request.request_id}")
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
                return
        state.outbox.append(request)
        state.wake.set()

    def take_waiting(self, state: WorkerState) -> list[GenerationRequest]:
        """The turns of this worker that wait for their KV; they are not sent to it any more."""
        taken = [name for name, (held, _) in self._held.items() if held is state]
        return [self._held.pop(name)[1] for name in taken]

    def learn_from(self, completion: Completion) -> None:
        """A turn ended in its worker: what it took is what the policy learns from."""
        seen = self._elsewhere.pop(completion.request_id, None)
        if seen is None or self._policy is None or not completion.token_ids or not completion.timing.first_token:
            return
        waited = max(0.0, completion.timing.first_token - completion.timing.queued)
        self._policy.record_turn(seen.moved, seen.tokens, seen.seconds + waited)

    # -- between two turns -------------------------------------------------------------------------------------------

    def forget(self, trajectory: str) -> None:
        """It ended."""
        if self._contexts is not None:
            self._contexts.pop(trajectory, None)

    def keep_contexts(self) -> None:
        """Keep the contexts of trajectories, for :meth:`bring_prefix`."""
        self._contexts = {} if self._contexts is None else self._contexts

    def expected_seconds(self, source: WorkerState, state: WorkerState, tokens: int) -> float | None:
        """Seconds that a move takes, as far as is known; None: it cannot be."""
        if self._policy is None or not (self._can(source) and self._can(state) and source.usable and state.usable):
            return None
        return self._policy.expected(tokens)[0] if tokens >= self._policy.least else None

    async def bring_prefix(self, trajectory: str, source: WorkerState, state: WorkerState) -> bool:
        """Have the prefix of a trajectory's last turn moved; whether all of it is there now."""
        request = (self._contexts or {}).get(trajectory)
        if request is None or self._policy is None:
            return False
        moved, why, seconds = await self._attempt(state, request, source)
        self._policy.record_turn(True, len(request.token_ids), seconds)
        return moved is not None and not why

    def _can(self, state: WorkerState) -> bool:
        return isinstance(state.worker, KvWorker)

    async def _move(self, state: WorkerState, request: GenerationRequest, source: WorkerState) -> None:
        life = state.lives
        _, _, seconds = await self._attempt(state, request, source)
        if (seen := self._elsewhere.get(request.request_id)) is not None:
            seen.seconds = seconds
        if self._held.pop(request.request_id, None) is None:
            return  # it was taken back
        if state.lives == life and request.request_id in state.sent:
            state.outbox.append(request)
            state.wake.set()
        else:
            self._elsewhere.pop(request.request_id, None)

    async def _attempt(
        self, state: WorkerState, request: GenerationRequest, source: WorkerState
    ) -> tuple[KvMoved | None, str, float]:
        """(what the worker says, what went wrong, seconds); noted."""
        loop = asyncio.get_running_loop()
        begun, moved = loop.time(), None
        try:
            async with asyncio.timeout(2 * self._limit):  # its own limit is kept by the worker, while that answers
                async with self._doors.setdefault(state.index, asyncio.Semaphore(MOST_MOVES)):
                    moved = await self._fetch(state, request, source)
            why = moved.why
        except LOST as error:
            why = f"lost: {error}"
        except TimeoutError:
            why = f"timeout: no answer for {2 * self._limit:g} s"
        seconds, kind = loop.time() - begun, why.partition(":")[0]
        if moved is not None and moved.moved:
            self.moves += 1
            self.tokens += moved.moved
            self.bytes += moved.bytes
            if self._events is not None:
                self._events.emit(
                    "kv_moved",
                    trajectory=request.trajectory_id,
                    source=source.worker.name,
                    worker=state.worker.name,
                    tokens=moved.moved,
                    bytes=moved.bytes,
                    seconds=round(seconds, 6),
                    carrier=moved.carrier,
                )
        if why:
            self.failures[kind] += 1
            if self._events is not None and self.failures[kind] == 1 and kind != EVICTED:
                what = f"kv {source.worker.name} to {state.worker.name}"
                detail = f"{why[:200]}; recomputed (said once, counted from now on)"
                self._events.emit("fault", what=what, cause="kv", detail=detail)
        return moved, why, seconds

    async def _fetch(self, state: WorkerState, request: GenerationRequest, source: WorkerState) -> KvMoved:
        assert isinstance(state.worker, KvWorker)
        assert isinstance(source.worker, KvWorker)
        life, place = self._places.get(source.index, (-1, ""))
        if life != source.lives or not place:
            life, place = source.lives, await source.worker.kv_place()
            self._places[source.index] = life, place
        if not place:
            return KvMoved(0, 0, 0, 0.0, f"off: {source.worker.name} hands out no KV")
        return await state.worker.fetch_kv(KvMove(request.trajectory_id, request.token_ids, place, self._limit))


def kv_moves(settings: KvTransferSection, events: EventLog) -> KvMoves:
    """As the config has it."""
    if not settings.enabled:
        return KvMoves()
    return KvMoves(BreakEven(min_tokens=settings.min_tokens), events, settings.limit)


class GapMover:
    """KV that moves in an environment gap, to the worker that a trajectory was placed on anew (Heddle 5.3), over the workers'
    own ports.

    What was sent is known to the router, so that the next turn finds it; a move that fails, or takes longer than
    ``rollout.kv_transfer.limit``, is an answer and an event like any other, and the prefix is computed anew. Contexts are
    remembered of every trajectory until it ends."""

    def __init__(self, kv: KvMoves, states: Sequence[WorkerState], router: TurnRouter) -> None:
        self._kv, self._states, self._router = kv, states, router
        kv.keep_contexts()

    def seconds(self, source: int, target: int, tokens: int) -> float | None:
        """What it expects to take; None: it cannot."""
        return self._kv.expected_seconds(self._states[source], self._states[target], tokens)

    async def send(self, trajectory: str, source: int, target: int, tokens: int) -> bool:
        """Whether the target has the KV of the trajectory's prefix now. Never raises: what went wrong is an event."""
        life = self._states[target].lives
        arrived = await self._kv.bring_prefix(trajectory, self._states[source], self._states[target])
        if arrived and self._states[target].lives == life:
            self._router.record_prefix_copy(trajectory, target)
            return True
        return False
