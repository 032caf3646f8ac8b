"""Engines of a proxy that are cut anew: between steps, by starting workers over more or fewer devices (RollPacker 4.2, Heddle
6).

Of the run's own workers w0, w1, ..., each with a device, an engine of t devices is a worker that runs over its own device and the
t - 1 after it; the others are parked: no process, no request, no command. TP t of all engines is every t-th worker; of unequal
degrees the engines stand one after the other (:func:`engine_seats`). Of a mixture of experts, a device may have whole ones in
place of slices of all (RollPacker 7). A worker whose devices stay, and what is on them, goes on as if nothing had been.

Guarantees: no request is lost and none is refused: those in flight keep their tokens, wait, and go on in the new engines,
prefilled again; served workers are not touched and take what they can meanwhile. New engines hold the proxy's version before
their first request. When one does not come up, all go back to the layout they had; one that does not come up even then is
restarted in the background, as ever, and removed after its restarts.

One call at a time, and none beside a loan or a weight update of the proxy.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from orchestrator.api import ConfigError, ExpertWorker, ManagedWorker, ResizableWorker
from orchestrator.policies.parallelism.engine_profile import EngineLayout
from orchestrator.proxy.gateway import LLMProxy
from orchestrator.proxy.worker_state import LOST, WorkerState, device_count

NO_EXPERTS = "real engines only use tensor parallelism, expert parallelism is simulated: set it to false"


@dataclass(frozen=True, slots=True)
class Reshaped:
    """``error`` empty: it was done. ``seconds``: generation stood still for so long in the engines that changed; ``moved``:
    requests that waited. ``tp``: devices of the largest engine; ``ep``: of those, devices that share out whole experts."""

    tp: int
    seconds: float
    moved: int
    error: str = ""
    ep: int = 1


class EngineResizing:
    """Over the workers of a proxy that can be cut anew. Made before the proxy starts."""

    def __init__(self, proxy: LLMProxy) -> None:
        self.proxy = proxy
        for state in self._own:
            if state.without_device:
                self._park(state)

    @property
    def layout(self) -> EngineLayout:
        """How the largest engine is cut, now."""
        cuts = [_cut_of(state) for state in self._own if ranks_of(state)]
        return EngineLayout(*max(cuts, default=(1, 1)))

    @property
    def degrees(self) -> tuple[int, ...]:
        """Devices of each engine, descending."""
        return tuple(sorted((ranks_of(state) for state in self._own if ranks_of(state)), reverse=True))

    @property
    def engines(self) -> int:
        """The run's own that are not parked."""
        return sum(ranks_of(state) > 0 for state in self._own)

    async def reshape(self, cut: int | Sequence[int] | EngineLayout) -> Reshaped:
        """Let the run's own engines have ``cut`` devices each, or one after the other so many, or each this layout. Raises
        ValueError for what does not make up the devices, and for whole experts where workers have slices only."""
        experts = cut.ep if isinstance(cut, EngineLayout) else 1
        ranks = [(rank, experts if rank else 1) for rank in engine_seats(cut, len(self._own))]
        if max(ep for _, ep in ranks) > 1 and not all(isinstance(state.worker, ExpertWorker) for state in self._own):
            raise ValueError(f"{cut}: these engines cannot have whole experts on a device")
        loop = asyncio.get_running_loop()
        begun, before = loop.time(), [_cut_of(state) for state in self._own]
        changes = [index for index, (now, then) in enumerate(zip(before, ranks, strict=True)) if now != then]
        states = [self._own[index] for index in changes]
        moved = len(self.proxy.pending) if len(states) == len(self._own) else sum(len(state.sent) for state in states)
        await self._stop_all(states, [ranks[index] for index in changes])
        why = await self._start_all(states, give_up=True)
        if why:
            await self._stop_all(states, [before[index] for index in changes])
            await self._start_all(states, give_up=False)
        self.proxy.dispatch()
        tp, ep = max(ranks)
        return Reshaped(tp, loop.time() - begun, moved, why, ep)

    @property
    def _own(self) -> list[WorkerState]:
        return [state for state in self.proxy.states if isinstance(state.worker, ResizableWorker)]

    def _park(self, state: WorkerState) -> None:
        state.alive, state.removed = False, True
        self.proxy.seat(state)

    async def _stop_all(self, states: Sequence[WorkerState], cuts: Sequence[tuple[int, int]]) -> None:
        """End these processes, their requests taken away first, and say what starts next."""
        for state in states:
            state.lent = True  # until it is open again: nothing is sent there
            self.proxy.seat(state)
        why = "it is restarted with what it had"
        await asyncio.gather(*(self.proxy.empty_worker(state, why, suspend=True) for state in states))
        for state, (ranks, expert_ranks) in zip(states, cuts, strict=True):
            worker = state.worker
            if isinstance(worker, ExpertWorker):
                await worker.resize(ranks, expert_ranks)
            else:
                assert isinstance(worker, ResizableWorker)
                await worker.resize(ranks)

    async def _start_all(self, states: Sequence[WorkerState], *, give_up: bool) -> str:
        """Start those that are to run; returns why one did not come up. ``give_up``: then the caller goes another way, else
        it is brought up in the background."""

        async def one(state: WorkerState) -> str:
            state.removed, state.lives = False, state.lives + 1
            self.proxy.router.readmit_worker(state.index)
            try:
                await self.proxy.bring_up(state)
            except (*LOST, TimeoutError) as error:
                return str(error) or f"no answer for {self.proxy.limits.restart:g} s"
            state.lent = False
            self.proxy.open_worker(state)
            state.wake.set()
            return ""

        running = [state for state in states if ranks_of(state)]
        for state in states:
            if not ranks_of(state):
                self._park(state)
        why = await asyncio.gather(*(one(state) for state in running))
        for state, failure in zip(running, why, strict=True):
            if failure and not give_up:
                state.lent = False
                self.proxy.note_fault(f"worker {state.worker.name}", failure)
                self.proxy.start_reviver(state)
        for state in states:
            if not ranks_of(state):
                state.lent = False
        return next((failure for failure in why if failure), "")


def engine_seats(cut: int | Sequence[int] | EngineLayout, devices: int) -> list[int]:
    """The ranks of each worker: engines of ``cut`` devices each, or of these degrees one after the other; 0: parked. Raises
    ValueError."""
    width = cut.tp if isinstance(cut, EngineLayout) else cut
    degrees = ([width] * (devices // width) if width > 0 else []) if isinstance(width, int) else list(width)
    if not devices or sum(degrees) != devices or min(degrees) < 1:
        raise ValueError(f"{devices} devices cannot be cut into engines of {cut}")
    return [rank for degree in degrees for rank in (degree, *[0] * (degree - 1))]


def require_resizable(workers: Sequence[ManagedWorker], planner: bool = True, experts: bool = False) -> None:
    """Raises ConfigError where no worker can be cut anew. ``planner``: it is the one that asks for it; ``experts``: it may ask
    for whole experts on a device."""
    field = "rollout.planner.enabled" if planner else "rollout.placement.degrees.enabled"
    if not any(isinstance(worker, ResizableWorker) for worker in workers):
        fix = "needs engines that the run starts itself (rollout.workers), in real processes; set it to false"
        raise ConfigError(field, True, fix)
    own = [worker for worker in workers if isinstance(worker, ResizableWorker)]
    if experts and not all(isinstance(worker, ExpertWorker) for worker in own):
        raise ConfigError("rollout.planner.experts", True, NO_EXPERTS)


def ranks_of(state: WorkerState) -> int:
    """Devices of a worker that can be cut anew; 0: it is parked, or no such worker."""
    return device_count(state) if isinstance(state.worker, ResizableWorker) else 0


def _cut_of(state: WorkerState) -> tuple[int, int]:
    """Devices, and how many of them share out whole experts."""
    return ranks_of(state), state.worker.expert_ranks if isinstance(state.worker, ExpertWorker) else 1
