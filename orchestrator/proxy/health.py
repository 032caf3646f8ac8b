"""Whether rollout workers that have work show signs of life (RollArt 6.1).

Guarantees: a worker with requests that was silent for ``interval`` seconds is asked how it is, at most ``misses`` times in a row
without an answer within ``interval`` seconds, and is then given up: a process whose event loop hangs, or that the network does
not reach, is noticed after ``(1 + misses) * interval`` seconds and one look. One that answers, but makes no progress for
``stall`` seconds, is given up as well; one that had nothing to do before, and says that it has requests now, has the longer of
these and ``first_token`` seconds (it may compile). A completion is progress, and so are tokens and steps that its statistics
count, while they count no fewer requests than it was sent: what it ended must arrive. On an engine that is shared those of its
users count too: rollouts that wait behind them, without end where they leave no room, are no reason to give up a server that
works (``rollout.trajectory_timeout`` ends each). A worker without work, or that stands still on command, is left alone.

With each beat the borrowed workers are asked what they have room for (:class:`BorrowedCaps`), none waits for the other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from orchestrator.policies.routing.turn_routing import TurnRouter
from orchestrator.policies.serving.server_borrowing import turns_within
from orchestrator.proxy.worker_state import LOST, WorkerLimits, WorkerState, failure_of


class Heartbeat:
    """Over these workers. ``lost(worker, why)`` gives one up; ``paused()``: no worker is meant to do anything now."""

    def __init__(
        self,
        states: Sequence[WorkerState],
        lost: Callable[[WorkerState, str], None],
        paused: Callable[[], bool],
        *,
        interval: float,
        misses: int,
        limits: WorkerLimits,
        caps: BorrowedCaps,
    ) -> None:
        self._lanes = states
        self.caps = caps
        self._lost = lost
        self._paused = paused
        self._interval = interval
        self._misses = misses
        self._limits = limits
        self._marks: dict[int, tuple[int, int, int]] = {}  # what each had computed when it last answered, in which life
        self._asking: dict[int, asyncio.Task[None]] = {}
        self._room: asyncio.Task[None] | None = None
        self._heard: dict[int, float] = {}  # when it last answered

    async def run(self) -> None:
        """Until cancelled."""
        loop = asyncio.get_running_loop()
        every = min(self._interval, self._limits.stall / 4)
        try:
            while True:
                await asyncio.sleep(every)
                if self.caps.states and (self._room is None or self._room.done()):
                    self._room = asyncio.create_task(self.caps.refresh_caps(), name="room of borrowed workers")
                for state in self._lanes:
                    if not self._should_work(state):
                        continue
                    limit = self._limits.stall if state.answers else max(self._limits.first_token, self._limits.stall)
                    if loop.time() - state.last_progress > limit:
                        self._lost(state, f"{len(state.sent)} requests, no progress for {limit} s")
                    elif loop.time() - max(state.last_progress, self._heard.get(state.index, 0.0)) > every:
                        self._begin(state)
        finally:
            asking = [*self._asking.values(), *([self._room] if self._room is not None else [])]
            for task in asking:
                task.cancel()
            await asyncio.gather(*asking, return_exceptions=True)

    def _should_work(self, state: WorkerState) -> bool:
        return state.usable and bool(state.sent) and not state.loading and not self._paused()

    def _begin(self, state: WorkerState) -> None:
        if state.index not in self._asking:
            task = asyncio.create_task(self._ask(state), name=f"heartbeat {state.worker.name}")
            self._asking[state.index] = task
            task.add_done_callback(lambda _: self._asking.pop(state.index))

    async def _ask(self, state: WorkerState) -> None:
        loop, life = asyncio.get_running_loop(), state.lives
        begun, why = loop.time(), ""
        for number in range(1, self._misses + 1):
            why = await failure_of(self._look(state, life), self._interval, f"no answer for {self._interval:g} s")
            if not why:
                self._heard[state.index] = loop.time()
                return
            await asyncio.sleep(max(begun + number * self._interval - loop.time(), 0.0))
            if state.lives != life or not self._should_work(state) or state.last_progress > begun:
                return
        silent = loop.time() - state.last_progress
        self._lost(state, f"no sign of life for {silent:.1f} s, asked {self._misses} times; the last time: {why}")

    async def _look(self, state: WorkerState, life: int) -> None:
        stats = await state.worker.stats()
        before, mark = self._marks.get(state.index), (life, stats.generated, stats.steps)
        self._marks[state.index] = mark
        computed = before is not None and before[0] == life == state.lives and mark != before
        held = stats.running + stats.waiting
        if not held:
            state.answers = True  # it never got any, or has ended all: no first token is on its way
        elif computed and held >= len(state.sent):
            state.note_progress(asyncio.get_running_loop().time())


class BorrowedCaps:
    """How many turns the borrowed workers of a run may have: as many as the budgets of their devices leave room for (ROSE 4.1,
    4.3), which their serving neighbours say, at any time.

    Guarantees: one without a budget gets no turn, and is asked again until it has one; no cap is above the configured one
    (``rollout.routing.served_cap``; without a cap nothing is asked, and nothing is limited); a worker that cannot be asked keeps
    its cap, since whether it lives is the heartbeat's affair. ``seat``: tells the router anew whether one is open; ``dispatch``:
    sends what waits."""

    def __init__(
        self,
        states: Sequence[WorkerState],
        router: TurnRouter,
        seat: Callable[[WorkerState], None],
        dispatch: Callable[[], None],
        *,
        patience: float,
    ) -> None:
        self._most = {
            state.index: router.cap_of(state.index) for state in states if state.borrowed and router.cap_of(state.index)
        }
        self.states = [state for state in states if state.index in self._most]
        self._router, self._seat, self._dispatch = router, seat, dispatch
        self._patience = patience
        self._contexts: dict[int, float] = {}  # blocks of a turn, when it last had some

    def join(self, state: WorkerState) -> None:
        """One more, whose cap the router knows already."""
        if cap := self._router.cap_of(state.index):
            self._most[state.index] = cap
            self.states.append(state)

    async def refresh_caps(self) -> None:
        """Ask every borrowed worker what it has room for, all at once."""
        changed = await asyncio.gather(*(self._one(state) for state in self.states if state.usable))
        if any(changed):
            self._dispatch()

    async def _one(self, state: WorkerState) -> bool:
        life = state.lives
        try:
            async with asyncio.timeout(self._patience):
                stats = await state.worker.stats()
        except (TimeoutError, *LOST):
            return False
        if state.lives != life or not state.usable:
            return False
        if stats.running:
            self._contexts[state.index] = stats.kv_used / stats.running
        turns = turns_within(stats.kv_capacity, self._contexts.get(state.index, 0.0), self._most[state.index])
        full = turns == 0
        if not full:
            self._router.set_cap(state.index, turns)
        if full != state.full:
            state.full = full
            self._seat(state)
        return True
