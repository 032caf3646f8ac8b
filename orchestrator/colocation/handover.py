"""Rollout and training on the same devices: who has them, and the order in which they change hands (RollPacker 4.4).

    rollout --shrink--> streaming --feed...--> streaming --train--> trained --give_back--> rollout
       |                                          ^
       +------------------train-------------------+   (a step that was not streamed)

``shrink``: half of the workers give their requests to the others and release memory; the trainer takes weights and gradient
buffers there. ``feed``: gradients of finished groups. ``train``: rollout has ended; the other workers release, the trainer
takes its optimizer state and makes the step. The caller publishes. ``give_back``: the trainer leaves; the workers reclaim,
load the new version and go on.

Guarantees, whatever fails on either side:

* Nothing is loaded on a device before its worker has said that it released it, and no worker reclaims before the trainer
  has said that it left: a trainer that cannot say so is closed first (RunError: the run goes on from its last checkpoint).
* A call that fails ends with every worker running again, or being restarted by the proxy, and says so in the event log; a
  step that could not be streamed, or not yet be trained, can be trained later. No request is lost: those of a worker that
  lends go on elsewhere, or wait in it, with the tokens that they have.
* Each transition is one event with seconds, bytes and, when it failed, why; meanwhile ``waiting_for`` names what is awaited.

One call at a time, and none beside a weight update of the proxy. Time is the event loop's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from enum import Enum
from typing import Any, Protocol, TypeVar

from orchestrator.api import (
    ConfigError,
    CoserveError,
    ResidencyResult,
    ResidentTrainer,
    RetryableError,
    RunError,
    TrainBatch,
    TrainMetrics,
    TrainSample,
)
from orchestrator.events import EventLog
from orchestrator.proxy.worker_state import DeviceLoan

T = TypeVar("T")
_FAILED = (CoserveError, TimeoutError)
_LEAVE_TRIES = 2  # before a trainer that does not leave its devices is closed


class DeviceHolder(Enum):
    """Who has the devices."""

    ROLLOUT = "rollout"  # the workers, all
    STREAMING = "streaming"  # some are the trainer's: weights and gradients
    TRAINED = "trained"  # all are the trainer's, and the step is made
    CHANGING = "changing"  # in a transition, or one that was cancelled: only give_back is left


class Fleet(Protocol):
    """The workers (:class:`orchestrator.proxy.gateway.LLMProxy`)."""

    async def lend(self, indices: Sequence[int], level: str) -> list[DeviceLoan]: ...

    async def take_back(self, version: int | None = None) -> list[DeviceLoan]: ...


class Colocation:
    """One run's. ``engines``: the workers, by index in the fleet, that share devices with the trainer. ``level``: what they
    release; ``dropped`` saves the host's copy of their weights, and costs an update also where a step is not made.
    ``timeout``: seconds for any answer of the trainer."""

    def __init__(
        self,
        fleet: Fleet,
        trainer: ResidentTrainer,
        events: EventLog,
        *,
        engines: Sequence[int],
        timeout: float,
        level: str = "weights",
    ) -> None:
        self._fleet = fleet
        self._trainer = trainer
        self._events = events
        self._all = tuple(engines)
        self._timeout = timeout
        self._level = level
        self._lent: tuple[int, ...] = ()
        self._closed = False  # the trainer was, by force
        self.holder = DeviceHolder.ROLLOUT
        self.waiting_for = ""  # what a transition waits for; empty: there is none

    async def shrink(self, engines: Sequence[int], replicas: Sequence[int] | None = None) -> bool:
        """Free these workers' devices, and let the trainer's replicas on them stream (None: it has no others). Both as
        :class:`orchestrator.policies.batching.stream_trigger.StreamTrigger` chose them. False: the devices could not be
        freed, and everything is as before; the step is trained without streaming."""
        self._require("shrink", DeviceHolder.ROLLOUT)
        self.holder = DeviceHolder.CHANGING
        if not await self._release(engines):
            await self._retreat()
            return False
        try:
            await self._move("stream", replicas)
        except CoserveError as error:
            await self._retreat()
            if isinstance(error, RetryableError):
                return False
            raise
        self.holder = DeviceHolder.STREAMING
        return True

    async def feed(self, samples: Sequence[TrainSample], version: int) -> bool:
        """Complete groups of the coming batch, to the trainer. False: nothing was fed (not streaming, or the trainer failed:
        then the devices are the workers' again)."""
        if self.holder is not DeviceHolder.STREAMING:
            return False
        try:
            await self._ask("the gradients of what was fed", self._trainer.feed(samples, version))
        except _FAILED as error:
            self._event("feed", "trainer", 0.0, 0, _words(error))
            self.holder = DeviceHolder.CHANGING
            await self._retreat()
            if isinstance(error, ConfigError | RunError):
                raise
            return False
        return True

    async def train(self, batch: TrainBatch) -> TrainMetrics:
        """Train the step on all devices; what was fed of it counts. RetryableError: a device could not be handed over; the
        workers run on, the step can be trained later. RunError: the step itself failed; the workers run on, too."""
        self._require("train", DeviceHolder.ROLLOUT, DeviceHolder.STREAMING)
        await self._take_others(f"step {batch.step} is not trained yet: a worker did not release its device")
        begun = self._events.time()
        try:
            metrics: TrainMetrics = await self._ask("the training step", self._trainer.train_step(batch))
        except _FAILED as error:
            self._event("train_step", "trainer", self._events.time() - begun, 0, _words(error))
            await self._retreat()
            if isinstance(error, ConfigError | RunError):
                raise
            raise RunError(f"the trainer failed in train_step: {_words(error)}") from error  # its state is not known
        self._event("train_step", "trainer", self._events.time() - begun, 0)
        self.holder = DeviceHolder.TRAINED
        return metrics

    async def take_all(self) -> None:
        """All devices to the trainer, for something other than a step (a checkpoint, an export); :meth:`give_back` ends it.
        RetryableError: a device could not be handed over, and the workers run on."""
        self._require("take_all", DeviceHolder.ROLLOUT)
        await self._take_others("a worker did not release its device")
        self.holder = DeviceHolder.TRAINED

    async def give_back(self, version: int | None = None) -> None:
        """The trainer leaves, the workers reclaim, load ``version`` (None: what they had) and run. From any state."""
        self.holder = DeviceHolder.CHANGING
        await self._retreat(version)

    # -- transitions -------------------------------------------------------------------------------------------------

    async def _take_others(self, refused: str) -> None:
        """Also the devices that the workers still have, for the trainer to make a step on. RetryableError ``refused``."""
        self.holder = DeviceHolder.CHANGING
        if not await self._release([index for index in self._all if index not in self._lent]):
            await self._retreat()
            raise RetryableError(refused)
        try:
            await self._move("step")
        except CoserveError:
            await self._retreat()
            raise

    async def _release(self, engines: Sequence[int]) -> bool:
        """Whether all of these workers released their memory."""
        self._lent = (*self._lent, *engines)
        self.waiting_for = f"{len(engines)} workers to hand over their requests and release their devices"
        try:
            loans = await self._fleet.lend(engines, self._level)
        finally:
            self.waiting_for = ""
        for loan in loans:
            freed = 0 if loan.released is None else loan.released.bytes
            detail = "" if loan.released is None else loan.released.how
            self._event("release", loan.name, loan.seconds, freed, loan.error, detail=detail, moved=loan.moved)
        return not any(loan.error for loan in loans)

    async def _move(self, level: str, replicas: Sequence[int] | None = None) -> None:
        """Change the trainer's residency. Raises RetryableError, or the ConfigError or RunError that it is."""
        begun = self._events.time()
        waiting = (
            "the trainer to leave its devices" if level == "away" else f"the trainer to take its devices ({level})"
        )
        try:
            result: ResidencyResult = await self._ask(waiting, self._trainer.residency(level, replicas))
        except _FAILED as error:
            self._event(f"residency {level}", "trainer", self._events.time() - begun, 0, _words(error))
            if isinstance(error, ConfigError | RunError):
                raise
            raise RetryableError(f"residency {level}: {_words(error)}") from error
        moved = result.to_host + result.to_device
        seconds = self._events.time() - begun
        self._event(f"residency {level}", "trainer", seconds, moved, device=result.device_bytes, peak=result.peak_bytes)

    async def _retreat(self, version: int | None = None) -> None:
        """The devices to the workers, by force if need be."""
        failure = ""
        for _ in range(_LEAVE_TRIES):
            try:
                await self._move("away")
                break
            except CoserveError as error:
                failure = str(error)
        else:
            await self._close_trainer()
        self.waiting_for = "the workers to reclaim their devices"
        try:
            loans = await self._fleet.take_back(version)
        finally:
            self.waiting_for = ""
        for loan in loans:
            self._event("reclaim", loan.name, loan.seconds, 0, loan.error)
        self._lent = ()
        self.holder = DeviceHolder.ROLLOUT
        if self._closed:
            raise RunError(f"the trainer did not leave its devices and was closed ({failure}); resume the run")

    async def _close_trainer(self) -> None:
        """End its process: that frees its devices whatever state it is in."""
        begun, why = self._events.time(), ""
        self._closed = True
        try:
            await self._ask("the trainer to end", self._trainer.close())
        except _FAILED as error:
            why = _words(error)  # a worker that then finds no memory is restarted, as ever
        self._event("close", "trainer", self._events.time() - begun, 0, why)

    async def _ask(self, what: str, call: Coroutine[Any, Any, T]) -> T:
        self.waiting_for = what
        try:
            async with asyncio.timeout(self._timeout):
                return await call
        except TimeoutError as error:
            raise TimeoutError(f"no answer for {self._timeout:g} s") from error
        finally:
            self.waiting_for = ""

    def _event(self, what: str, name: str, seconds: float, size: int, error: str = "", **more: Any) -> None:
        self._events.emit(
            "handover", what=what, name=name, seconds=round(seconds, 6), bytes=size, error=error[:300], **more
        )

    def _require(self, what: str, *holders: DeviceHolder) -> None:
        if self.holder not in holders:
            raise RunError(f"{what}: the devices are in state {self.holder.value!r}; give them back first")


def _words(error: BaseException) -> str:
    return str(error) or type(error).__name__
