"""The relay's twin: which versions of the weights there are, and who holds whose KV."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from orchestrator.sim.simulated_worker import SimWorker

MODEL_BYTES = 1 << 20  # nominal payload of one version


class SimWeights:
    """The relay's twin: which versions have been published."""

    def __init__(self) -> None:
        self._published: dict[int, None] = {}
        self.holders: dict[str, SimWorker] = {}  # the workers whose KV may be asked for, by name
        self.sent = -1  # the version that the trainer sends to its own workers, or sent last

    def put(self, version: int) -> None:
        """Make a version available."""
        self._published[version] = None

    def has(self, version: int) -> bool:
        """Whether a worker can pull it."""
        return version in self._published

    def content(self, version: int) -> str:
        """Its checksum, whichever way it came."""
        return f"{version:016x}"
