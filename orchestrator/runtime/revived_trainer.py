"""A trainer that comes back while the run goes on: its processes start anew at the newest checkpoint, train again what was
trained since, and are then where they were.

Guarantees: engines, trajectories in flight and the buffer notice nothing but the time that it takes. The version stays what it
was, so nothing grows staler; what was trained stays trained. The same batches are trained in the same order: where the trainer
computes deterministically, its weights are bit for bit those that the engines have; where it does not, the event ``recovered``
says that they differ. What was on the relay is published there again. A checkpoint that was being written is lost
(:class:`CheckpointLost`), the one before it stays. Where a trainer cannot come back (no checkpoint, more than ``MOST`` batches
or ``MOST_TOKENS`` since, ``restarts`` in a row without a new step, a start that fails) the failure is raised as it was, and the
run begins a new life (:mod:`orchestrator.runtime.real_run`).
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from orchestrator.api import (
    CheckpointLost,
    Meeting,
    ProcessDied,
    PublishResult,
    RetryableError,
    RunError,
    TrainBatch,
    Trainer,
    TrainMetrics,
    TrainSample,
)
from orchestrator.checkpoint import Checkpoints, CheckpointState
from orchestrator.events import EventLog

MOST = 64  # batches that are kept, by reference where they lie in shards
MOST_TOKENS = 1 << 30  # in them; their shards take some 8 bytes each, of shared memory or of the run's disk
_PAUSE, _TRIES = 5.0, 12  # to publish again: the relay needs a while to forget memory that a dead process lent

Answer = TypeVar("Answer")


class Processes(Trainer, Protocol):
    """One set of processes (:class:`orchestrator.runtime.engine_actors.RayTrainer`)."""

    async def call(self, method: str, *args: Any) -> Any: ...

    async def send(self, receivers: int, limit: float, anew: bool) -> tuple[Meeting, ...]: ...

    async def hold(self) -> None: ...

    async def publish_held(self) -> PublishResult: ...

    async def pids(self) -> dict[str, int]: ...


Kind = TypeVar("Kind", bound=Processes)


class RevivedTrainer(Generic[Kind]):
    """``trainer``: the first one, up; ``make``: another, not started; ``restore``: starts it and loads a checkpoint's folder.
    ``restarts``: as `run.restarts`."""

    def __init__(
        self,
        trainer: Kind,
        make: Callable[[], Kind],
        restore: Callable[[Kind, str], Awaitable[int]],
        checkpoints: Checkpoints,
        events: EventLog,
        restarts: int,
    ) -> None:
        self._trainer, self._make, self._restore = trainer, make, restore
        self._checkpoints, self._events, self._restarts = checkpoints, events, restarts
        self._life = 0  # of the processes
        self._in_row = 0  # lives without a new step
        self._reviving = asyncio.Lock()
        self._kept: list[TrainBatch] = []  # trained since a checkpoint that is committed
        self._tokens = 0  # in them
        self._next: int | None = None  # the step after the last one, None: none was trained here
        self._published = PublishResult(-1, 0, 0, 0.0, "")
        self._held: int | None = None  # the step after those that the weights were held of
        self._saving = self._sent = self._seen = 0  # the lives that did so last

    async def train_step(self, batch: TrainBatch) -> TrainMetrics:
        """See the port."""
        metrics = await self._lived(lambda trainer: trainer.train_step(batch))
        self._kept.append(batch)
        self._next, self._in_row = batch.step + 1, 0
        self._tokens += _tokens_of(batch)
        if len(self._kept) > MOST or self._tokens > MOST_TOKENS:
            self._kept, self._tokens = [], 0  # from here on only a new checkpoint helps
        return metrics

    async def feed(self, samples: Sequence[TrainSample], version: int) -> None:
        """See the port. What a process had that died is trained with its batch."""
        trainer, life = await self._present()
        try:
            await trainer.feed(samples, version)
        except ProcessDied as error:
            await self._revive(life, error)

    async def publish(self) -> PublishResult:
        """See the port."""
        self._published = await self._lived(lambda trainer: trainer.publish())
        return self._published

    async def hold(self) -> None:
        """See :class:`orchestrator.api.HoldingTrainer`."""
        await self._lived(lambda trainer: trainer.hold())
        self._held = self._next

    async def publish_held(self) -> PublishResult:
        """See :class:`orchestrator.api.HoldingTrainer`. One that came back holds what the one before it held."""
        self._published = await self._lived(lambda trainer: trainer.publish_held())
        return self._published

    async def save(self, folder: str) -> None:
        """See the port."""
        committed = self._checkpoints.last_step()
        self._kept = [batch for batch in self._kept if batch.step >= committed]
        self._tokens = sum(map(_tokens_of, self._kept))

        async def save_anew(trainer: Processes) -> None:
            await asyncio.to_thread(_empty, folder)  # of what one wrote that died in it
            self._saving = self._life
            await trainer.save(folder)

        await self._lived(save_anew)

    async def saved(self) -> None:
        """See the port. Raises CheckpointLost."""
        if self._saving == self._life:
            try:
                await self._trainer.saved()
                return
            except ProcessDied as error:
                raise CheckpointLost(f"a checkpoint was not written: {error}") from error
        raise CheckpointLost("a checkpoint was not written: the trainer died meanwhile")

    async def load(self, folder: str) -> int:
        """See the port."""
        return await self._lived(lambda trainer: trainer.load(folder))

    async def send(self, receivers: int, limit: float, anew: bool) -> tuple[Meeting, ...]:
        """See :class:`orchestrator.api.CollectiveTrainer`. New processes have no groups yet."""
        trainer, life = await self._present()
        anew, self._sent = anew or self._sent != life, life
        return await trainer.send(receivers, limit, anew)

    async def call(self, method: str, *args: Any) -> Any:
        """A method beyond the port, of all ranks; rank 0's answer."""
        return await self._lived(lambda trainer: trainer.call(method, *args))

    async def stand_up(self) -> bool:
        """See :class:`orchestrator.weight_sync.MortalTrainer`."""
        await self._lived(lambda trainer: trainer.pids())
        seen, self._seen = self._seen, self._life
        return seen != self._life

    async def life(self) -> int:
        """See :class:`orchestrator.weight_sync.MortalTrainer`."""
        await self._lived(lambda trainer: trainer.pids())
        return self._life

    async def close(self) -> None:
        """See the port."""
        await self._trainer.close()

    async def _lived(self, call: Callable[[Processes], Awaitable[Answer]]) -> Answer:
        """What the trainer answers, or the one that comes after it."""
        while True:
            trainer, life = await self._present()
            try:
                return await call(trainer)
            except ProcessDied as error:
                await self._revive(life, error)

    async def _present(self) -> tuple[Processes, int]:
        """The trainer, when it is not on its way back."""
        async with self._reviving:
            return self._trainer, self._life

    async def _revive(self, life: int, error: ProcessDied) -> None:
        """Bring it back, unless another call has. Raises ``error``, or one that says more."""
        async with self._reviving:
            if self._life != life:
                return
            begun = self._events.time()
            folder, state, again = await self._history(error)
            self._events.emit("fault", what="trainer", cause="trainer died", detail=str(error)[:300])
            while True:
                if self._in_row >= self._restarts:
                    raise error
                self._in_row += 1
                try:
                    differs = await self._bring_back(folder, again, state)
                    break
                except (RetryableError, RunError) as second:
                    error = ProcessDied(f"{error}\n  it did not come back: {second}")
            seconds = self._events.time() - begun
            detail = f"from step {state.step}, {len(again)} steps trained again, {seconds:.1f} s{differs}"
            self._events.emit("recovered", what="trainer", detail=detail)

    async def _history(self, error: ProcessDied) -> tuple[Path, CheckpointState, list[TrainBatch]]:
        """The newest checkpoint, and what was trained since. Raises ``error`` where one of the two is not there."""
        try:
            found = await asyncio.to_thread(self._checkpoints.newest)
        except RunError as damaged:
            raise error from damaged
        if found is None:
            raise error
        folder, state, _ = found
        again = [batch for batch in self._kept if batch.step >= state.step]
        last = state.step if self._next is None else self._next
        if [batch.step for batch in again] != list(range(state.step, last)):
            raise error
        return folder, state, again

    async def _bring_back(self, folder: Path, again: Sequence[TrainBatch], state: CheckpointState) -> str:
        """To what it was. Returns how its weights are not those that were published, "" if they are."""
        await self._trainer.close()
        self._trainer = self._make()
        self._life += 1
        await self._restore(self._trainer, str(folder / "trainer"))
        differs = await self._publish_again(state.step, state.version, last=not again)
        for number, batch in enumerate(again, 1):
            await self._trainer.train_step(batch)
            differs += await self._publish_again(batch.step + 1, state.version + number, last=number == len(again))
        return differs

    async def _publish_again(self, step: int, version: int, *, last: bool) -> str:
        """It is at ``version``, after so many steps (``last``: where it was): hold it, or publish it, if it was. Weights that are
        on their way while another step trains are those of the version before the last. As :meth:`_bring_back`."""
        held = step == self._held
        if held:
            await self._trainer.hold()
        if self._published.version != version or not (held or last):
            return ""
        for final in (*[False] * (_TRIES - 1), True):
            try:
                result = await (self._trainer.publish_held() if held else self._trainer.publish())
                break
            except RetryableError as error:
                if final or isinstance(error, ProcessDied):
                    raise
                await asyncio.sleep(_PAUSE)
        same = result.content == self._published.content
        return "" if same else f"; its weights of version {version} are not those of the engines bit for bit"


def _tokens_of(batch: TrainBatch) -> int:
    return sum(len(sample.token_ids) for sample in batch.samples)


def _empty(folder: str) -> None:
    if os.listdir(folder):
        shutil.rmtree(folder)
        os.mkdir(folder)
