"""Workers of every kind behind the faults of :mod:`orchestrator.sim.fault_injector`: fixed, cut anew between steps, borrowed."""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.api import ManagedWorker
from orchestrator.sim.coserving.shared_worker import BorrowedSimWorker
from orchestrator.sim.fault_injector import FaultInjector, FaultyWorker
from orchestrator.sim.resizable_worker import ResizableSimWorker
from orchestrator.sim.simulated_worker import SimWorker


class FaultyResizableWorker(FaultyWorker):
    """A ResizableWorker around another one. Ending a process does not fail, as nothing limits its time; starting it does."""

    def __init__(self, inner: ResizableSimWorker, faults: FaultInjector) -> None:
        super().__init__(inner, faults)
        self._resizable = inner

    @property
    def expert_ranks(self) -> int:
        """Devices that whole experts are shared out over."""
        return self._resizable.expert_ranks

    @expert_ranks.setter
    def expert_ranks(self, ranks: int) -> None:
        self._resizable.expert_ranks = ranks

    async def resize(self, ranks: int, expert_ranks: int = 1) -> None:
        """See the protocol."""
        await self._resizable.resize(ranks, expert_ranks)


class FaultyBorrowedWorker(FaultyWorker):
    """A BorrowedWorker around another one: it takes weights from the relay alone."""

    receive = None  # type: ignore[assignment]

    def __init__(self, inner: BorrowedSimWorker, faults: FaultInjector) -> None:
        super().__init__(inner, faults)
        self.url = inner.url


def faulty_workers(workers: Sequence[SimWorker], faults: FaultInjector) -> list[ManagedWorker]:
    """The workers, each behind its faults."""
    return [_behind(worker, faults) for worker in workers]


def _behind(worker: SimWorker, faults: FaultInjector) -> ManagedWorker:
    if isinstance(worker, ResizableSimWorker):
        return FaultyResizableWorker(worker, faults)
    if isinstance(worker, BorrowedSimWorker):
        return FaultyBorrowedWorker(worker, faults)
    return FaultyWorker(worker, faults)
