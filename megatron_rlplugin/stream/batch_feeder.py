"""Groups that are trained on before their batch is complete (RollPacker, 4.4), and whether the batch then keeps to them.

Guarantees: what was fed counts only if the batch begins with exactly that, unchanged, in that order, at that version, and
no group of it goes on after it; otherwise its gradient is dropped and the whole batch is trained from the start. So the
step is the one without feeding, bit for bit: micro-batches are closed by their own limits, never by the end of a feed.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from megatron_rlplugin.trainer.experience import Experience
from megatron_rlplugin.trainer.micro_batches import ArrivalPacker, LengthPool, MicroBatchLimits, TrainRow, arrival_order
from megatron_rlplugin.trainer.optimizer_step import Stepper, StepReport
from orchestrator.api import TrainBatch, TrainSample


@dataclass(slots=True)
class FedBatch:
    """What the open step has been given so far. ``gradients``: of how many rows they have been taken."""

    version: int
    arrival: ArrivalPacker | LengthPool
    samples: list[TrainSample] = field(default_factory=list)
    kept: list[TrainSample] = field(default_factory=list)
    rows: list[TrainRow] = field(default_factory=list)
    skipped: Counter[str] = field(default_factory=Counter)
    gradients: int = 0


class BatchFeeder:
    """The open step of a streaming trainer. ``offload``: gradients wait in host memory between feeds."""

    def __init__(self, stepper: Stepper, experience: Experience, limits: MicroBatchLimits, *, offload: bool) -> None:
        self._stepper = stepper
        self._experience = experience
        self._limits = limits
        self._offload = offload
        self._fed: FedBatch | None = None
        self.restarts = 0  # since the last step: streams that were begun and dropped
        self.seconds = 0.0  # since the last step: computing before the batch was complete

    @property
    def fed(self) -> int:
        """Trajectories whose gradient is taken and still counts."""
        return self._fed.gradients if self._fed is not None else 0

    def feed(self, samples: Sequence[TrainSample], version: int, *, last: bool = False) -> FedBatch:
        """Take the gradients of what fills micro-batches; ``last``: of everything. An error leaves no step open."""
        begun = time.perf_counter()
        try:
            fed = self._take(samples, version, last=last)
        except BaseException:
            self.drop_fed()
            raise
        if not last:
            self.seconds += time.perf_counter() - begun
        return fed

    def rest_of(self, batch: TrainBatch) -> Sequence[TrainSample] | None:
        """What of the batch was not fed; None when what was fed does not count for this batch."""
        if self._fed is None:
            return batch.samples
        fed = self._fed.samples
        begins, rest = batch.samples[: len(fed)], batch.samples[len(fed) :]
        groups = {sample.group_id for sample in fed}
        keeps = (
            batch.version == self._fed.version
            and len(begins) == len(fed)
            and all(_same(one, other) for one, other in zip(fed, begins, strict=True))
            and not any(sample.group_id in groups for sample in rest)
        )
        return rest if keeps else None

    def finish_batch(self, fed: FedBatch) -> StepReport | None:
        """Take the step over everything fed; None when there was nothing to train on."""
        try:
            if fed.rows:
                return self._stepper.finish_step(fed.rows)
            return None
        finally:
            self._close()

    def drop_fed(self) -> None:
        """Forget what was fed; its gradients are gone. Counted as a restart if there was any."""
        self.restarts += self._fed is not None
        self._close()

    def _close(self) -> None:
        self._fed = None
        self._stepper.abandon_step()

    def _take(self, samples: Sequence[TrainSample], version: int, *, last: bool) -> FedBatch:
        if self._fed is None:
            self._fed = FedBatch(version, arrival_order(self._limits))
            self._stepper.begin_step()
        fed = self._fed
        rows, kept, skipped = self._experience.rows(samples, version)
        first = len(fed.rows)
        fed.samples += samples
        fed.kept += kept
        fed.rows += rows
        fed.skipped.update(skipped)
        plans = fed.arrival.add((index, row.group, len(row)) for index, row in enumerate(rows, first))
        if last:
            plans += fed.arrival.rest()
        self._stepper.feed(fed.rows, plans, last=last)
        if not last:
            fed.gradients += sum(len(members) for members in plans)
            if self._offload:
                self._stepper.offload()
        return fed


def _same(one: TrainSample, other: TrainSample) -> bool:
    """Equal, NaN being equal to NaN: it may have crossed a process."""
    return one == other or repr(one) == repr(other)
