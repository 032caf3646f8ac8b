"""What a cluster raises when a worker's method did."""

from __future__ import annotations

from orchestrator.api import CoserveError


class WorkerError(CoserveError):
    """A method raised in a worker: the user's code, not the machinery. ``rank`` says where, ``kind`` and ``detail`` what,
    ``trace`` the last lines of its traceback there. ``others``: how many more ranks failed in the same call."""

    def __init__(
        self, method: str, worker: str, rank: int, size: int, kind: str, detail: str, trace: str = "", others: int = 0
    ) -> None:
        more = f" (and {others} other ranks)" if others else ""
        super().__init__(f"{method} failed on rank {rank} of {size}, {worker}{more}: {kind}: {detail}")
        self.method = method
        self.worker = worker
        self.rank = rank
        self.kind = kind
        self.detail = detail
        self.trace = trace
        self.others = others
