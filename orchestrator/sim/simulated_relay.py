"""The relay's twin: which versions of the weights there are, and who holds whose KV."""

from __future__ import annotations

from typing import Protocol

MODEL_BYTES = 1 << 20  # nominal payload of one version


class KvHolder(Protocol):
    """A worker whose KV others may ask for."""

    incarnation: int

    def prefix_under(self, version: int, trajectory_id: str) -> int | None:
        """Cached tokens of a trajectory's prefix; None: it is dead, or has other weights than this version's."""
        ...


class SimWeights:
    """The relay's twin: which versions have been published."""

    def __init__(self) -> None:
        self._published: dict[int, None] = {}
        self.holders: dict[str, KvHolder] = {}  # the workers whose KV may be asked for, by name
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
