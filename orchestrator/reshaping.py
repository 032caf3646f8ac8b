"""A proxy that can cut its engines anew: between steps, by starting workers over more or fewer devices (RollPacker 4.2).

Of the run's own workers w0, w1, ..., each with a device, TP t has every t-th one run over its own device and the t - 1 after
it; the others are parked: no process, no request, no command.

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
from typing import Any

from orchestrator.api import ConfigError, ManagedWorker, ResizableWorker
from orchestrator.lanes import Lane
from orchestrator.proxy import _LOST, LLMProxy


@dataclass(frozen=True, slots=True)
class Reshaped:
    """``error`` empty: it was done. ``seconds``: generation stood still for so long; ``moved``: requests that waited."""

    tp: int
    seconds: float
    moved: int
    error: str = ""


class ReshapingProxy(LLMProxy):
    """An LLMProxy, with :meth:`reshape`."""

    def __init__(self, workers: Sequence[ManagedWorker], *arguments: Any, **keywords: Any) -> None:
        super().__init__(workers, *arguments, **keywords)
        for lane in self._own:
            if not _ranks(lane):
                self._park(lane)

    @property
    def tp(self) -> int:
        """Devices an engine, now."""
        return max((_ranks(lane) for lane in self._own), default=1)

    @property
    def engines(self) -> int:
        """The run's own that are not parked."""
        return sum(_ranks(lane) > 0 for lane in self._own)

    @property
    def devices(self) -> int:
        """Of the run's own workers."""
        return len(self._own)

    async def reshape(self, tp: int) -> Reshaped:
        """Let the run's own engines have ``tp`` devices each. Raises ValueError for a number that does not divide them."""
        if tp < 1 or not self._own or len(self._own) % tp:
            raise ValueError(f"{len(self._own)} devices cannot be cut into engines of {tp}")
        loop = asyncio.get_running_loop()
        begun, before, moved = loop.time(), self.tp, len(self._pending)
        await self._stop_all(tp)
        why = await self._start_all(give_up=True)
        if why:
            await self._stop_all(before)
            await self._start_all(give_up=False)
        self._dispatch()
        return Reshaped(tp, loop.time() - begun, moved, why)

    @property
    def _own(self) -> list[Lane]:
        return [lane for lane in self.lanes if isinstance(lane.worker, ResizableWorker)]

    def _open_lane(self, lane: Lane) -> None:
        if lane.removed and isinstance(lane.worker, ResizableWorker) and not lane.worker.ranks:
            return  # parked
        super()._open_lane(lane)

    def _park(self, lane: Lane) -> None:
        lane.alive, lane.removed = False, True
        self._seat(lane)

    async def _stop_all(self, tp: int) -> None:
        """End all processes, their requests taken away first, and say what starts next."""
        for lane in self._own:
            lane.lent = True  # until it is open again: nothing is sent there
            self._seat(lane)
        await asyncio.gather(*(self._empty(lane) for lane in self._own))
        for index, lane in enumerate(self._own):
            worker = lane.worker
            assert isinstance(worker, ResizableWorker)
            await worker.resize(tp if index % tp == 0 else 0)

    async def _empty(self, lane: Lane) -> None:
        if lane.reviver is not None and not lane.reviver.done():
            lane.reviver.cancel()
            await asyncio.gather(lane.reviver, return_exceptions=True)
        if lane.alive:
            try:
                async with asyncio.timeout(self._stall_timeout), lane.sending:
                    await lane.worker.suspend()
                    await self._move_requests(lane)
            except (*_LOST, TimeoutError) as error:
                self.note_fault(f"worker {lane.worker.name}", f"it is restarted with what it had: {error!r}")
            finally:
                lane.moving = False
        for pending in lane.give_up():
            self._requeue(pending)
        lane.alive = False
        self.router.close(lane.index, cache_lost=True)

    async def _start_all(self, *, give_up: bool) -> str:
        """Start those that are to run; returns why one did not come up. ``give_up``: then the caller goes another way, else
        it is brought up in the background."""

        async def one(lane: Lane) -> str:
            lane.removed, lane.lives = False, lane.lives + 1
            self.router.regain(lane.index)
            try:
                await self._bring_up(lane)
            except (*_LOST, TimeoutError) as error:
                return str(error) or f"no answer for {4 * self._stall_timeout:g} s"
            lane.lent = False
            self._open_lane(lane)
            lane.wake.set()
            return ""

        running = [lane for lane in self._own if _ranks(lane)]
        for lane in self._own:
            if not _ranks(lane):
                self._park(lane)
        why = await asyncio.gather(*(one(lane) for lane in running))
        for lane, failure in zip(running, why, strict=True):
            if failure and not give_up:
                lane.lent = False
                self.note_fault(f"worker {lane.worker.name}", failure)
                lane.reviver = asyncio.create_task(self._revive(lane), name=f"revive {lane.worker.name}")
        for lane in self._own:
            if not _ranks(lane):
                lane.lent = False
        return next((failure for failure in why if failure), "")


def require_resizable(workers: Sequence[ManagedWorker]) -> None:
    """Raises ConfigError where no worker can be cut anew."""
    if not any(isinstance(worker, ResizableWorker) for worker in workers):
        fix = "needs engines that the run starts itself (rollout.workers), in real processes; set it to false"
        raise ConfigError("rollout.planner.enabled", True, fix)


def _ranks(lane: Lane) -> int:
    return lane.worker.ranks if isinstance(lane.worker, ResizableWorker) else 0
