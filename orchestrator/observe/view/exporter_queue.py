"""One exporter of a run's events, behind a bounded queue, in a thread of its own.

Guarantees: one that hangs, fails or is slow holds up nothing; that it failed, or does not keep up, is said once; at the end it
has some seconds to send what is left.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping
from typing import Any, Protocol

QUEUE = 10_000  # events that may wait
FINISH_SECONDS = 15.0  # to send what is left

Event = Mapping[str, Any]
Say = Callable[[str], None]


class Exporter(Protocol):
    """What sends events somewhere. Its methods are called in one thread; they may block, and raise what they like."""

    def take(self, event: Event) -> None: ...

    def close(self) -> None: ...


class Beside:
    """One exporter, behind its queue. ``make`` is called in its thread: it may take long, and fail."""

    def __init__(
        self, name: str, kinds: frozenset[str], make: Callable[[], Exporter], say: Say, limit: int = QUEUE
    ) -> None:
        self._name, self._kinds, self._say, self._make = name, kinds, say, make
        self._waiting: queue.Queue[Event | None] = queue.Queue(limit)
        self._told = False
        self._over = False
        self._thread = threading.Thread(target=self._run, name=f"export to {name}", daemon=True)
        self._thread.start()

    def take(self, event: Event) -> None:
        """Never waits."""
        if self._over or event["kind"] not in self._kinds:
            return
        try:
            self._waiting.put_nowait(event)
        except queue.Full:
            self._tell("does not keep up; some of its events are left out")

    def close(self, seconds: float = FINISH_SECONDS) -> None:
        """Give it so long to send what is left."""
        try:
            self._waiting.put(None, timeout=seconds)
        except queue.Full:
            self._tell("did not send everything in time")
            return
        self._thread.join(seconds)
        if self._thread.is_alive():
            self._tell("did not send everything in time")

    def _run(self) -> None:
        try:
            exporter = self._make()
            while (event := self._waiting.get()) is not None:
                exporter.take(event)
            exporter.close()
        except Exception as error:  # noqa: BLE001 - a library of others, which may raise anything: it is said, and ends only itself
            self._over = True
            text = (str(error).splitlines() or [""])[0]
            self._tell(f"failed ({type(error).__name__}: {text[:200]}); the run continues without it")

    def _tell(self, what: str) -> None:
        if not self._told:
            self._told = True
            self._say(f"{self._name} {what}")
