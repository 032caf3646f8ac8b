"""When a trajectory moves to another worker, and in which order its data is sent (Heddle 5.3).

Guarantees: a rank's worker is that of the last placement, its group sizes scaled by how many trajectories are still active (so
placement is not repeated for every forecast); a trajectory with an uncertain forecast stays while its worker is within that
uncertainty; a move must gain more than it costs; no two transfers in progress share a sender or a receiver, and the longest
trajectory's goes first.

Pure: the caller knows the time. Beyond the paper: the uncertainty, and the break-even of a move.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

How = Literal["stay", "transfer", "recompute"]


@dataclass(frozen=True, slots=True)
class WorkerPartition:
    """``workers`` in the order of the placement, fastest first, and the ``sizes`` of their groups at that time."""

    workers: tuple[int, ...]
    sizes: tuple[int, ...]

    def worker_of(self, rank: int, active: int) -> int:
        """The worker for the trajectory of that rank (0: the longest) among ``active`` ones. Raises ValueError without
        workers."""
        if not self.workers or len(self.workers) != len(self.sizes):
            raise ValueError("workers: at least one, each with the size of its group")
        total = sum(self.sizes)
        if not total:
            return self.workers[0]
        scale = active / total  # group i ends at rank scale x (sizes of it and those before it)
        ends = list(accumulate(self.sizes))
        place = bisect_right(ends, rank / scale if scale else 0.0)
        last = max(index for index, size in enumerate(self.sizes) if size)
        return self.workers[min(place, last)]

    def target_worker(self, current: int, rank: int, least: int, most: int, active: int) -> int:
        """Where a trajectory of ``rank`` belongs. ``least`` and ``most``: the ranks that its forecast's interval allows,
        ``least`` for the longest. ``current``: where it is, -1: nowhere yet."""
        wanted = self.worker_of(rank, active)
        if current < 0 or current == wanted or current not in self.workers:
            return wanted
        place = self.workers.index(current)
        first = self.workers.index(self.worker_of(min(least, rank), active))
        last = self.workers.index(self.worker_of(max(most, rank), active))
        return current if first <= place <= last else wanted


def choose_transfer(gain: float, transfer: float | None, recompute: float) -> How:
    """Whether a move pays, all in seconds. ``gain``: how much sooner the trajectory ends on the new worker; ``transfer``: to
    send its KV there, None: it cannot be sent; ``recompute``: to prefill its context there."""
    if gain <= (recompute if transfer is None else min(transfer, recompute)):
        return "stay"
    return "transfer" if transfer is not None and transfer <= recompute else "recompute"


@dataclass(frozen=True, slots=True)
class TrajectoryMove:
    """``length``: predicted tokens; the longest goes first."""

    trajectory: str
    source: int
    target: int
    length: float


class TransmissionScheduler:
    """The transfer scheduler: :meth:`request_move`, then :meth:`start_moves` whenever something changed, and :meth:`end_move`
    for each."""

    def __init__(self) -> None:
        self._waiting: dict[str, TrajectoryMove] = {}
        self._running: dict[str, TrajectoryMove] = {}

    def request_move(self, move: TrajectoryMove) -> None:
        """Request a move; it replaces one of the same trajectory that is still waiting."""
        if move.trajectory in self._running:
            raise ValueError(f"{move.trajectory} is being sent")
        self._waiting[move.trajectory] = move

    def start_moves(self) -> list[TrajectoryMove]:
        """The moves that begin now: longest first, none sharing an endpoint with one that begins or is in progress."""
        busy = {end for move in self._running.values() for end in (move.source, move.target)}
        begun = []
        for move in sorted(self._waiting.values(), key=lambda one: (-one.length, one.trajectory)):
            if move.source not in busy and move.target not in busy:
                busy |= {move.source, move.target}
                begun.append(move)
        for move in begun:
            self._running[move.trajectory] = self._waiting.pop(move.trajectory)
        return begun

    def end_move(self, trajectory: str) -> None:
        """It was sent, could not be, or is no longer wanted. Unknown ones are ignored."""
        self._running.pop(trajectory, None)
        self._waiting.pop(trajectory, None)

    def is_moving(self, trajectory: str) -> bool:
        """Whether it is in progress."""
        return trajectory in self._running
