"""Whether rollout workers that have work show signs of life (RollArt 6.1).

Guarantees: a worker with requests that was silent for ``interval`` seconds is asked how it is, at most ``misses`` times in a row
without an answer within ``interval`` seconds, and is then given up: a process whose event loop hangs, or that the network does
not reach, is noticed after ``(1 + misses) * interval`` seconds and one look. One that answers, but finishes nothing for
``stall_timeout`` seconds, is given up as well. A worker without work, or that stands still on command, is left alone.

With each beat the borrowed workers are asked what they have room for (:mod:`orchestrator.proxy.capacity`), none waits
for the other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from orchestrator.api import CommandError, ConfigError, RetryableError
from orchestrator.proxy.capacity import BorrowedCaps
from orchestrator.proxy.worker_state import WorkerState


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
        stall_timeout: float,
        caps: BorrowedCaps | None = None,
    ) -> None:
        self._lanes = states
        self.caps = caps
        self._lost = lost
        self._paused = paused
        self._interval = interval
        self._misses = misses
        self._stall_timeout = stall_timeout
        self._asking: dict[int, asyncio.Task[None]] = {}
        self._room: asyncio.Task[None] | None = None
        self._heard: dict[int, float] = {}  # when it last answered

    async def run(self) -> None:
        """Until cancelled."""
        loop = asyncio.get_running_loop()
        try:
            while True:
                await asyncio.sleep(min(self._interval, self._stall_timeout / 4))
                if self.caps is not None and self.caps.states and (self._room is None or self._room.done()):
                    self._room = asyncio.create_task(self.caps.refresh_caps(), name="room of borrowed workers")
                for state in self._lanes:
                    if not self._should_work(state):
                        continue
                    silent = loop.time() - state.last_progress
                    if silent > self._stall_timeout:
                        self._lost(state, f"{len(state.sent)} requests, no completion for {self._stall_timeout} s")
                    elif loop.time() - max(state.last_progress, self._heard.get(state.index, 0.0)) > self._interval:
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
            try:
                async with asyncio.timeout(self._interval):
                    await state.worker.stats()
            except TimeoutError:
                why = f"no answer for {self._interval:g} s"
            except (RetryableError, CommandError, ConfigError) as error:
                why = str(error)
            else:
                self._heard[state.index] = loop.time()
                return
            await asyncio.sleep(max(begun + number * self._interval - loop.time(), 0.0))
            if state.lives != life or not self._should_work(state) or state.last_progress > begun:
                return
        silent = loop.time() - state.last_progress
        self._lost(state, f"no sign of life for {silent:.1f} s, asked {self._misses} times; the last time: {why}")
