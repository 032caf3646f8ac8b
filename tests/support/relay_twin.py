"""The in-memory relay with what a real store does to its users: it fills up, readers lease objects, bytes get damaged."""

from __future__ import annotations

from orchestrator.transfer import MemoryRelay, RelayError


class RelayTwin(MemoryRelay):
    """A put beyond ``capacity`` bytes (None: any) is ``relay_full``; a leased object is not removed. Where Mooncake leases by
    time, the twin is told: :meth:`lease` and :meth:`release`. Handles of one twin share all that."""

    @property
    def used(self) -> int:
        return sum(map(len, self._shared.data.values()))

    @property
    def capacity(self) -> int | None:
        return getattr(self._shared, "capacity", None)

    @capacity.setter
    def capacity(self, size: int | None) -> None:
        self._shared.capacity = size  # type: ignore[attr-defined]

    @property
    def leases(self) -> dict[str, int]:
        return self._shared.__dict__.setdefault("leases", {})

    def __init__(self, capacity: int | None = None) -> None:
        super().__init__()
        self.capacity = capacity

    def handle(self) -> RelayTwin:
        """Another handle of the same objects, closed independently."""
        other = RelayTwin()
        other._shared = self._shared
        return other

    def put(self, key: str, data: memoryview) -> None:
        if key not in self._open() and self.capacity is not None and self.used + data.nbytes > self.capacity:
            raise RelayError("relay_full", f"{key} needs {data.nbytes} B, {self.capacity - self.used} B are free")
        super().put(key, data)

    def remove(self, key: str) -> bool:
        return not self.leases.get(key, 0) and super().remove(key)

    def lease(self, key: str) -> None:
        """Protect an object from removal, as a reader of the real store does; counted."""
        self.leases[key] = self.leases.get(key, 0) + 1

    def release(self, key: str) -> None:
        """Undo one ``lease``."""
        self.leases[key] -= 1

    def tamper(self, key: str, value: bytes) -> None:
        """Replace an object's bytes behind everybody's back."""
        self._open()[key] = value
