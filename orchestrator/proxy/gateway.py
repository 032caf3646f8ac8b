"""LLMProxy: the gateway between environments and inference workers (RollArt 6.1).

Guarantees: ``generate`` ends in exactly one completion or one error, whatever happens to workers; a request whose worker
died or stalled is sent again elsewhere, or to the same worker once it is back; duplicated completions are ignored; while
suspended no request reaches a worker, and none is refused; no worker holds more requests than its cap, those beyond wait in
order (:mod:`orchestrator.policies.routing.turn_routing` says who goes where); a worker that comes back gets the current
weights before its first request; one that lacked contexts that it had been sent is an event ``contexts_resent``. All commands
of one tick of the event loop to one worker travel in one call. A worker
that refuses a command (its weights are unusable, or it is not in the state that it should be in) is brought up anew
like one that died. A request that a worker refuses ends as a completion with that error, and the worker goes on: unless it
refuses those of one group after another.

A borrowed worker, in a server that others start and end, is asked for again and again, and comes back however long it was
away, while another worker lives; the run ends when none does for some time. So does one of the run's own whose machine is gone.

A worker can be lent to a trainer on the same device (RollPacker 4.4): its requests go on elsewhere with the tokens that they
have, or, when no worker stays, wait in it; so do those that a worker gives back (ROSE 4.1: its pages or time were taken). Of
borrowed workers these are counted, and told as an event ``handed_back``: how many requests, how many tokens they kept.

What not every run needs is a strategy over this one class, and they compose: borrowed workers that come and go
(:mod:`orchestrator.proxy.membership`), engines that are cut anew (:mod:`orchestrator.proxy.resize`), turns that are served in
two parts (:mod:`orchestrator.proxy.prefill_decode`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from orchestrator.api import (
    CommandError,
    Completion,
    CoserveError,
    GenerationRequest,
    MachineGone,
    ManagedWorker,
    PartLost,
    PlacedWorker,
    ReleasingWorker,
    RetryableError,
    RunError,
    UpdateResult,
    WorkerStats,
)
from orchestrator.events import EventLog
from orchestrator.policies.routing.turn_routing import Seat, TurnRouter
from orchestrator.proxy.health import BorrowedCaps, Heartbeat
from orchestrator.proxy.kv_moves import KvMoves
from orchestrator.proxy.resume_turn import joined_completion, remaining_request
from orchestrator.proxy.worker_state import (
    LOST,
    MOST_REFUSED,
    RELAY_EMPTY,
    DeviceLoan,
    HandBacks,
    Pending,
    WorkerLimits,
    WorkerState,
    failure_of,
    others_live,
    rest_from,
    spawn_task,
    waiting_reason,
)

_TELL_AGAIN = 60.0  # seconds between two events of one worker's refusals of whole calls
_LONGEST_PAUSE = 600.0  # seconds between two restarts
_ASK_AGAIN = 2.0  # seconds between two looks for a borrowed worker that is away


class WorkerWatcher(Protocol):
    """Who is told that workers come and leave, by their place: of one that takes turns from now on before it gets any, of one
    that takes none any more (given back, or lost) before anything that it had is sent again."""

    def worker_came(self, worker: int) -> None:
        """It takes turns from now on."""

    def worker_left(self, worker: int) -> None:
        """It takes none any more."""


class TurnSplit(Protocol):
    """Serves some turns as several requests of :meth:`LLMProxy.serve`."""

    def applies(self, request: GenerationRequest) -> bool:
        """Whether this turn is one of them."""

    async def generate(self, request: GenerationRequest) -> Completion:
        """The whole turn."""

    def take_stranded(self, requests: Sequence[str]) -> Sequence[str]:
        """Nobody is left who may serve these requests as they are: have its own served otherwise; returns the others."""


class LLMProxy:
    """``version`` is that of the weights the workers hold. Call :meth:`start` once, :meth:`close` at the end. ``watcher``: who
    hears of workers; ``split``: how some turns are served; None: nobody, as one request each. What has no underscore is for the
    strategies of this package too."""

    def __init__(
        self,
        workers: Sequence[ManagedWorker],
        events: EventLog,
        *,
        limits: WorkerLimits,
        restarts: int,
        heartbeat: float = 5.0,
        misses: int = 4,
        current_only: bool = False,
        router: TurnRouter | None = None,
        kv: KvMoves | None = None,
        on_fatal: Callable[[RunError], None],
    ) -> None:
        self.states = [WorkerState(worker, index) for index, worker in enumerate(workers)]
        self.watcher: WorkerWatcher | None = None
        self.split: TurnSplit | None = None
        self._events = events
        self.limits = limits
        self._restarts = restarts
        self._current_only = current_only  # no request goes to a worker with older weights
        self.router = router or TurnRouter([Seat()] * len(workers))
        self.kv = kv or KvMoves()
        self.on_fatal = on_fatal
        self._pending: dict[str, Pending] = {}
        self.suspended = False
        self._preparing = -1  # the version that workers fetch, -1: none
        self._watch: asyncio.Task[None] | None = None
        self.caps = BorrowedCaps(self.states, self.router, self.seat, self.dispatch, patience=heartbeat)
        self._heartbeat = Heartbeat(
            self.states,
            self.lose_worker,
            lambda: self.suspended,
            interval=heartbeat,
            misses=misses,
            limits=limits,
            caps=self.caps,
        )
        self._hand_backs = HandBacks(events)
        self._most_turns = 0  # under way or waiting at once, since :meth:`peak_turns` was asked
        self.version = -1  # none yet
        self.unpublished = -1  # the version that is not on the relay yet, -1: none
        self.trainer_life: Callable[[], Awaitable[int]] | None = (
            None  # as WeightSync has it, of a trainer that comes back
        )
        self.tokens = self.borrowed_tokens = 0  # generated so far; of these by servers of others
        self.faults = 0
        for state in self.states:
            self.seat(state)

    # -- life --------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to pump completions. The workers are up."""
        for state in self.states:
            self.open_worker(state)
        self._watch = spawn_task(self._heartbeat.run(), "proxy heartbeat", self.on_fatal)

    async def close(self) -> None:
        """Stop all tasks. Workers are closed by their owner."""
        alive = [*self.kv.tasks, *(task for state in self.states for task in state.tasks), *filter(None, [self._watch])]
        for task in alive:
            task.cancel()
        await asyncio.gather(*alive, return_exceptions=True)

    # -- requests ----------------------------------------------------------------------------------------------------

    async def generate(self, request: GenerationRequest) -> Completion:
        """One turn. Cancelling the caller aborts the request in its worker. RunError: no worker is left for its task."""
        if self.split is not None and self.split.applies(request):
            return await self.split.generate(request)
        return await self.serve(request)

    async def serve(self, request: GenerationRequest) -> Completion:
        """One request, as :meth:`generate`."""
        self._most_turns = max(self._most_turns, len(self._pending) + 1)
        self.router.queue_turn(request.request_id, request.trajectory_id, request.task)
        answer: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        pending = self._pending[request.request_id] = Pending(request, answer)
        self.dispatch()
        try:
            return await answer
        finally:
            del self._pending[request.request_id]
            state = pending.worker
            if state is not None and state.sent.pop(pending.sent_as, None) is not None and answer.cancelled():
                state.aborts.append(pending.sent_as)
                state.wake.set()
                state.unanswered = asyncio.get_running_loop().time() - state.last_progress
            self.router.end_turn(request.request_id)
            self.dispatch()  # its slot is free

    def call_back(self, trajectories: Collection[str], stale: Callable[[int], bool]) -> None:
        """Have workers give back their answers to these trajectories that may have begun with weights too old (``stale``, told a
        version). One whose first token is of such ends as ``abort``, with what it has; another goes on where it was."""
        for pending in self._pending.values():
            state = pending.worker
            if state is None or pending.request.trajectory_id not in trajectories or not stale(pending.begun_version):
                continue
            if state.usable and not state.moving and all(one.request_id != pending.sent_as for one in state.outbox):
                pending.stale = stale
                state.aborts.append(pending.sent_as)
                state.wake.set()

    def peak_turns(self) -> int:
        """The most turns that were under way or waited at once since this was last asked."""
        most, self._most_turns = self._most_turns, len(self._pending)
        return max(most, self._most_turns)

    def forget(self, trajectory_id: str) -> None:
        """The trajectory ended: neither its prefix location nor what workers remember of it is of use any more."""
        self.router.forget_trajectory(trajectory_id)
        self.kv.forget(trajectory_id)
        for state in self.states:
            if state.session is not None:
                state.session.forget(trajectory_id)

    def dispatch(self) -> None:
        """Send what waits and can go; the rest goes when a worker is there, or has room."""
        while not self.suspended and (granted := self.router.grant_turn()) is not None:
            self._send_to(self.states[granted[1]], self._pending[granted[0]])

    def _send_to(self, state: WorkerState, pending: Pending) -> None:
        request = remaining_request(pending.request, pending.parts, pending.moves)
        if request is None or pending.answer.done():  # nothing is left to generate, or it was cancelled in this tick
            self.router.end_turn(pending.request.request_id)
            if not pending.answer.done():
                pending.answer.set_result(joined_completion(pending.request, pending.parts, None))
            return
        if not state.sent:
            state.last_progress = asyncio.get_running_loop().time() - state.unanswered
            state.answers = False
        pending.worker = state
        pending.sent_as = request.request_id
        pending.sent_version = pending.sent_version if pending.parts else state.version
        state.sent[pending.sent_as] = pending
        self.kv.send_turn(state, request, self.states, self.router.prefix_of(pending.request.request_id))

    def requeue(self, pending: Pending) -> None:
        """It waits again, in its old place."""
        pending.worker = None
        if not pending.answer.done():
            self.router.requeue_turn(pending.request.request_id)

    # -- the six-step protocol's commands ----------------------------------------------------------------------------

    async def prepare(self, version: int) -> list[str]:
        """Let every live worker without ``version`` fetch it while it generates. A failure costs only time: ``update``
        fetches what was not prepared, and a worker that died in it is noticed by its completions. Returns the failures."""

        async def one(state: WorkerState) -> str:
            limit = self.limits.prepare
            why = await failure_of(state.worker.prepare(version), limit, f"no answer for {limit} s")
            if why and (state.parked or state.lent):  # it was taken away meanwhile
                return ""
            if why:
                self.note_fault(f"prepare {state.worker.name}", why)
            return why

        self._preparing, behind = version, [state for state in self.states if state.usable and state.version != version]
        try:
            return [why for why in await asyncio.gather(*map(one, behind)) if why]
        finally:
            self._preparing = -1

    async def suspend(self, only: Sequence[int] | None = None) -> None:
        """Hold new requests, and stop every live worker (None: of all, else of these) between two steps; not a borrowed one,
        whose users would wait for the slowest of all: it stops when it loads, and goes on when it has."""
        self.suspended = True
        await self._each(lambda state: state.worker.suspend(), self._own_of(only))

    async def update(self, version: int, only: Sequence[int] | None = None) -> list[UpdateResult]:
        """Load ``version`` into every live worker, of all or of these; one that is being revived loads it when it is back."""
        self.version = version
        results: list[UpdateResult] = []

        async def update_one(state: WorkerState) -> None:
            results.append(await state.update(version))

        await self._each(update_one, only, self.limits.update)
        return results

    async def resume(self, only: Sequence[int] | None = None) -> None:
        """Let workers go on, and send what was held."""
        await self._each(lambda state: state.worker.resume(), self._own_of(only))
        self.suspended = False
        now = asyncio.get_running_loop().time()
        for state in self.states:
            state.last_progress, state.unanswered = now, 0.0
            state.wake.set()
            self.seat(state)
        self.dispatch()

    def _own_of(self, only: Sequence[int] | None) -> list[int]:
        """Of all workers (None), or of these, those that are not borrowed."""
        return [state.index for state in self.states if not state.borrowed and (only is None or state.index in only)]

    # -- rollout and training on the same devices --------------------------------------------------------------------

    async def lend(self, indices: Sequence[int], level: str) -> list[DeviceLoan]:
        """Let these workers release their memory (``level`` of RELEASE_LEVELS), in order of ``indices``; not while a weight
        update is in progress. Each is suspended, and gets neither requests nor commands until :meth:`take_back`, also
        when its loan has an ``error``: then its memory may still be held."""
        states = [self.states[index] for index in indices]
        for state in states:
            state.lent = True
            self.seat(state)
        return list(await asyncio.gather(*(self._lend(state, level) for state in states)))

    async def _lend(self, state: WorkerState, level: str) -> DeviceLoan:
        loop = asyncio.get_running_loop()
        begun, moved, released, why = loop.time(), 0, None, ""
        if state.reviver is not None and not state.reviver.done():
            await asyncio.wait([state.reviver])  # it holds the device, and may not be stopped half-way
        if state.removed:
            return DeviceLoan(state.worker.name, "", 0.0)  # it has no memory any more
        try:
            async with asyncio.timeout(self.limits.update):
                if not state.alive:
                    raise RetryableError(f"{state.worker.name} is not up")
                if not isinstance(state.worker, ReleasingWorker):
                    raise CommandError("no_sleep_mode", f"{state.worker.name} cannot release its memory")
                async with state.sending:
                    await state.worker.suspend()
                    if any(other.usable for other in self.states):
                        moved = await self.move_requests(state)
                    released = await state.worker.release(level)
                if level == "dropped":
                    state.version = -1
        except LOST as error:
            why = str(error)
        except TimeoutError:
            why = state.stuck = f"{state.worker.name}: no answer for {self.limits.update} s"
        finally:
            state.moving = False
        return DeviceLoan(state.worker.name, why, loop.time() - begun, moved, released)

    async def move_requests(self, state: WorkerState) -> int:
        """Take everything away from a suspended worker: what was not sent yet as it is, the rest with its tokens."""
        for request in [*state.outbox, *self.kv.take_waiting(state)]:
            if (pending := state.sent.pop(request.request_id, None)) is not None:
                self.requeue(pending)
        state.outbox.clear()
        moved = len(state.sent)
        state.moving = True
        await state.worker.abort(list(state.sent))
        while state.sent:
            state.emptied.clear()
            await state.emptied.wait()
        self.dispatch()
        return moved

    async def take_back(self, version: int | None = None) -> list[DeviceLoan]:
        """Bring every worker to ``version`` (None: the present one) and let it run: those that were lent take their memory
        first. One that fails is restarted in the background, as ever; its loan says so."""
        if version is not None:
            self.version = version
        states = [state for state in self.states if state.lent or (state.alive and state.version != self.version)]
        loans = await asyncio.gather(*(self._take_back(state) for state in states))
        self.dispatch()
        return list(loans)

    async def _take_back(self, state: WorkerState) -> DeviceLoan:
        loop = asyncio.get_running_loop()
        begun, why, life, result = loop.time(), "", state.lives, None
        if state.removed:
            state.lent = False
            return DeviceLoan(state.worker.name, "", 0.0)
        try:
            async with asyncio.timeout(self.limits.update):
                if not state.alive or state.stuck:
                    raise RetryableError(state.stuck or f"{state.worker.name} died while its device was lent")
                result = await state.load(self.version)
        except LOST as error:
            why = str(error)
        except TimeoutError:
            why = f"{state.worker.name}: no answer for {self.limits.update} s"
        state.lent, state.stuck, state.last_progress = False, "", loop.time()
        self.seat(state)
        if why and state.lives == life:
            if state.alive:
                self.lose_worker(state, why)
            elif state.reviver is None or state.reviver.done():
                self.start_reviver(state)
        state.wake.set()
        return DeviceLoan(state.worker.name, why, loop.time() - begun, update=result)

    async def stats(self) -> list[tuple[str, WorkerStats]]:
        """A snapshot of each live worker."""
        rows: list[tuple[str, WorkerStats]] = []

        async def one(state: WorkerState) -> None:
            rows.append((state.worker.name, await state.worker.stats()))

        await self._each(one)
        return sorted(rows, key=lambda row: row[0])

    async def _each(
        self,
        call: Callable[[WorkerState], Awaitable[object]],
        only: Sequence[int] | None = None,
        seconds: float | None = None,
    ) -> None:
        """Run a command on all live workers at once, or on some. A worker that fails it, or hangs in it for so many ``seconds``
        (None: ``limits.stall``), is revived."""
        limit = seconds or self.limits.stall

        async def guarded(state: WorkerState) -> None:
            life, silence = state.lives, f"no answer to a command for {limit} s"
            why = await failure_of(call(state), limit, silence)
            if why and state.lives == life:  # else it says something about a process that is gone already
                self.lose_worker(state, why)

        meant = [state for state in self.states if state.usable and (only is None or state.index in only)]
        await asyncio.gather(*(guarded(state) for state in meant))

    # -- workers -----------------------------------------------------------------------------------------------------

    def open_worker(self, state: WorkerState) -> None:
        """Serve a worker that is up; one without a device, or whose server was given back, is not."""
        if state.parked or state.without_device:
            return
        state.alive = True
        self.seat(state)
        state.last_progress, state.unanswered = asyncio.get_running_loop().time(), 0.0
        state.pump = spawn_task(self._pump(state), f"pump {state.worker.name}", self.on_fatal)
        state.sender = spawn_task(self._send(state), f"send {state.worker.name}", self.on_fatal)
        if self.watcher is not None:
            self.watcher.worker_came(state.index)

    async def _pump(self, state: WorkerState) -> None:
        """Deliver completions to the waiting environments as they come."""
        loop = asyncio.get_running_loop()
        try:
            while True:
                for completion in await state.worker.completions():
                    state.note_progress(loop.time())
                    if state.borrowed:
                        state.restarts.clear()
                    self.kv.learn_from(completion)
                    self._deliver(state, completion)
                self.dispatch()  # into the slots that became free
        except LOST as error:
            self.lose_worker(state, str(error))

    def _deliver(self, state: WorkerState, completion: Completion) -> None:
        pending = state.sent.pop(completion.request_id, None)
        if not state.sent:
            state.emptied.set()
        if pending is None or pending.answer.done():
            return  # delivered twice, or aborted meanwhile
        self.tokens += len(completion.token_ids)
        self.borrowed_tokens += len(completion.token_ids) * state.borrowed
        if completion.finish_reason == "abort":  # we abort what nobody waits for: the worker gave it back
            self._move(pending, completion)
            return
        self.router.end_turn(pending.request.request_id)
        if pending.moves:
            completion = joined_completion(pending.request, pending.parts, completion)
        pending.answer.set_result(completion)

    async def _send(self, state: WorkerState) -> None:
        """Send what accumulated since the last call. While suspended only aborts go out."""
        try:
            while True:
                await state.wake.wait()
                state.wake.clear()
                await asyncio.sleep(0)  # let the rest of this tick join the batch
                async with state.sending:
                    requests, state.outbox = state.outbox, []
                    aborts, state.aborts = state.aborts, []
                    unsent = {request.request_id for request in requests}
                    if gone := [name for name in aborts if name not in unsent]:
                        await state.worker.abort(gone)  # first: what is added may be over the cap else
                    if requests := [request for request in requests if request.request_id not in aborts]:
                        await self._add(state, requests)
                        self._note_resent(state)
        except LOST as error:
            self.lose_worker(state, str(error))

    async def _add(self, state: WorkerState, requests: Sequence[GenerationRequest], *, part: bool = False) -> None:
        """The worker refuses a call as a whole: find which of its requests it is, and end those. Raises what ``add`` raises."""
        try:
            await state.worker.add(requests)
        except CommandError as error:
            if error.code != "invalid_request":
                raise
            if half := len(requests) // 2:
                if not part:
                    self._note_halved(state, f"{len(requests)} requests: {error.detail}")
                await self._add(state, requests[:half], part=True)
                await self._add(state, requests[half:], part=True)
            else:
                self._refuse(state, requests[0], error.detail)
        else:
            state.refused.clear()

    def _note_halved(self, state: WorkerState, what: str) -> None:
        """It refused a call of several, and may take all of them in parts: said once in a while."""
        now = asyncio.get_running_loop().time()
        state.halved += 1
        if now >= state.halved_told + _TELL_AGAIN:
            why = f"gets what it refused in parts, {state.halved} calls since this was said last, now of {what}"
            self.note_fault(f"worker {state.worker.name}", why)
            state.halved, state.halved_told = 0, now

    def _refuse(self, state: WorkerState, request: GenerationRequest, why: str) -> None:
        state.refused[request.group_id or request.trajectory_id] = None
        if len(state.refused) > MOST_REFUSED:
            raise RetryableError(f"it refuses every request: {why}")
        said = f"{state.worker.name} refuses it: {why}"
        self.note_fault(f"request {request.request_id}", said)
        self._deliver(state, Completion(request.request_id, (), (), (), "error", error=said))
        self.dispatch()

    def _note_resent(self, state: WorkerState) -> None:
        if state.session is not None:
            contexts, tokens = state.session.take_resent()
            if contexts:
                self._events.emit("contexts_resent", worker=state.worker.name, requests=contexts, tokens=tokens)

    def _move(self, pending: Pending, part: Completion) -> None:
        """Go on with a request on another worker; or it was called back as stale."""
        stale, pending.stale = pending.stale, None
        if part.token_ids:
            pending.parts.append(part)
        if stale is not None and pending.parts and stale(pending.begun_version):
            self.router.end_turn(pending.request.request_id)
            so_far = joined_completion(pending.request, pending.parts, None)
            pending.answer.set_result(replace(so_far, finish_reason="abort"))
            return
        pending.moves += 1
        if (state := pending.worker) is not None and not state.moving and stale is None:
            if state.borrowed:
                self._hand_backs.note_request(state.worker.name, len(part.token_ids))
            rest_from(state, self.states, self.router, self.seat, self.dispatch)
        self.requeue(pending)
        self.dispatch()

    def lose_worker(self, state: WorkerState, why: str) -> None:
        """A worker is dead or stuck: take its requests back, bring it up again in the background."""
        if not state.alive:
            return
        self.router.close_worker(state.index)
        self.tell_left(state)
        state.failed = why
        self.note_fault(f"worker {state.worker.name}", why)
        self._abandon(state)
        if not state.lent:  # its device is the trainer's
            self.start_reviver(state)
        self.dispatch()

    def _abandon(self, state: WorkerState) -> None:
        """Its process is gone, or is ours no more: what it had goes on elsewhere."""
        state.alive = False
        self.router.close_worker(state.index, cache_lost=True)
        for pending in state.give_up():
            self.requeue(pending)

    async def empty_worker(self, state: WorkerState, why: str, *, suspend: bool) -> int:
        """Take away all that a worker has, which serves no more and is not brought up again; how many. What it does not give back
        is begun anew elsewhere, and said with ``why``."""
        moved = len(state.sent)
        if state.reviver is not None and not state.reviver.done():
            state.reviver.cancel()
            await asyncio.gather(state.reviver, return_exceptions=True)
        try:
            if state.alive:
                async with asyncio.timeout(self.limits.stall), state.sending:
                    if suspend:
                        await state.worker.suspend()
                    moved = await self.move_requests(state)
        except (*LOST, TimeoutError) as error:
            self.note_fault(f"worker {state.worker.name}", f"{why}: {str(error) or repr(error)}")
        finally:
            state.moving = False
            self._abandon(state)
        return moved

    def start_reviver(self, state: WorkerState) -> None:
        """Bring a worker up again, in the background."""
        state.reviver = spawn_task(self.revive(state), f"revive {state.worker.name}", self.on_fatal)

    def tell_left(self, state: WorkerState) -> None:
        """It takes no turns any more."""
        if self.watcher is not None:
            self.watcher.worker_left(state.index)

    async def revive(self, state: WorkerState) -> None:
        """Restart in place, up to the limit of a window, with pauses that grow; then the worker is removed (RollArt 8), which is
        an alarm."""
        loop = asyncio.get_running_loop()
        began, alone, why, pause = loop.time(), 0.0, "", self.limits.pause
        while (restarts := state.restarts_since(loop.time() - self.limits.window)) < self._restarts:
            begun = loop.time()
            state.lives += 1
            try:
                await self.bring_up(state)
            except PartLost as error:
                self.on_fatal(error)
                return
            except (*LOST, TimeoutError) as error:
                if not (state.borrowed or isinstance(error, MachineGone)):
                    state.restarts.append(begun)
                    state.failed = repr(error)
                    self.note_fault(f"worker {state.worker.name}", f"restart {restarts + 1} failed: {state.failed}")
                    if pause and restarts + 1 < self._restarts:
                        await asyncio.sleep(pause)
                        pause = min(2 * pause, _LONGEST_PAUSE)
                    continue
                state.away, state.failed = not state.borrowed, repr(error)
                await asyncio.sleep(_ASK_AGAIN)
                alone = 0.0 if others_live(self.states, state) else alone + loop.time() - begun
                if alone > self.limits.restart:
                    why = f"it was away for {loop.time() - began:.0f} s: {error}"
                    break
                continue
            state.away = False
            state.restarts.append(begun)
            if isinstance(state.worker, PlacedWorker) and state.worker.hardware:  # it may have moved to another pool
                self.tell_stranded(self.router.reseat_worker(state.index, state.worker.hardware))
            self.open_worker(state)
            state.wake.set()
            how, since = ("taken back", began) if state.borrowed else (f"restart {restarts + 1}", begun)
            detail = f"{how}, {loop.time() - since:.1f} s"
            self._events.emit("recovered", what=f"worker {state.worker.name}", detail=detail)
            self.dispatch()
            return
        state.removed = True
        why, last = why or f"it failed {restarts + 1} times", f"the last time: {state.failed[:300]}"
        left = [other for other in self.states if not (other.removed or other.parked)]
        if not left:
            self.on_fatal(RunError(f"no rollout worker left: {state.worker.name}: {why}, {last}"))
        else:
            detail = f"{state.worker.name} is given up, and the run continues on {len(left)} others: {why}, {last}"
            self._events.emit("alarm", what="worker", detail=detail[:300])
            self.tell_stranded(self.router.retire_worker(state.index))

    def tell_stranded(self, requests: Sequence[str]) -> None:
        """Nobody is left who may serve them."""
        left = requests if self.split is None else self.split.take_stranded(requests)
        if left:
            self.on_fatal(self.router.no_worker_error(self._pending[left[0]].request.task))
        if self.split is not None:
            self.dispatch()

    async def bring_up(self, state: WorkerState) -> None:
        """Restart a worker, and give it the present weights: once more for each life of a trainer that may have been away, and
        their memory with it. Raises PartLost when the relay has them no more: only the trainer of another life publishes them
        again."""
        async with asyncio.timeout(self.limits.restart):
            await state.worker.restart()
        loaded = state.version = lived = -1
        while loaded != self.version or self.suspended:
            # the version may move while we load it, a suspended proxy is about to move it, the relay may not have it yet
            if loaded != self.version != self.unpublished:
                loaded = self.version
                try:
                    async with asyncio.timeout(self.limits.update):
                        await state.load(loaded)
                except RetryableError as error:
                    if (life := await self._trainer_back(lived)) != lived:
                        loaded, lived = -1, life
                        continue
                    if RELAY_EMPTY in str(error) and loaded == self.version:  # no restart of an engine brings it back
                        raise PartLost(f"the relay has lost version {loaded}: {state.worker.name} needs it") from error
                    raise
            else:
                await asyncio.sleep(0.05)

    async def _trainer_back(self, seen: int) -> int:
        """Which life the trainer is in, once it is up; ``seen`` where it does not come back within an update's time."""
        if self.trainer_life is None:
            return seen
        try:
            async with asyncio.timeout(self.limits.update):
                return await self.trainer_life()
        except (CoserveError, TimeoutError):  # the loop hears of it from its own calls
            return seen

    def distrust(self, index: int, why: str) -> None:
        """Bring a worker up anew, like one that died."""
        self.lose_worker(self.states[index], why)

    def note_fault(self, what: str, detail: str) -> None:
        """Record something that went wrong and was handled."""
        self.faults += 1
        self._events.emit("fault", what=what, cause=what.split(" ")[0], detail=detail[:300])

    def seat(self, state: WorkerState) -> None:
        """Tell the router whether it may be given requests."""
        if state.takes and state.version == self.version:
            self.router.open_worker(state.index)
        elif state.takes and not self._current_only:  # else no tokens of new weights go on with old ones
            self.router.keep_worker(state.index)
        else:
            self.router.close_worker(state.index)

    def loads(self) -> list[int]:
        """Requests without an answer at each worker that can be given any."""
        return [len(state.sent) for state in self.states if state.usable]

    @property
    def waiting_for(self) -> str:
        """In words, what generation waits for, "" when nothing is unusual."""
        return waiting_reason(self.states, self.suspended, self._preparing)

    @property
    def behind(self) -> bool:
        """Whether a live worker has another version than ``version``."""
        return any(state.usable and state.version != self.version for state in self.states)

    @property
    def pending(self) -> Mapping[str, Pending]:
        """Requests without a completion, by id."""
        return self._pending

    @property
    def waiting(self) -> list[Pending]:
        """Requests that no worker has."""
        return [pending for pending in self._pending.values() if pending.worker is None]

    @property
    def generating(self) -> set[str]:
        """Trajectories whose turn is under way or waits."""
        return {pending.request.trajectory_id for pending in self._pending.values()}

    @property
    def in_flight(self) -> int:
        """Requests without a completion."""
        return len(self._pending)
