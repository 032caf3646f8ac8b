"""Sealed buckets on their way to the relay, in one background thread, while the next ones are being filled.

Guarantees: buckets are stored in the order they were pushed; at most ``WAITING`` of them wait, then :meth:`Pusher.send_bucket`
blocks, so that memory stays bounded; the first error ends it all and is raised by the next call of any kind; after
:meth:`Pusher.finish` or :meth:`Pusher.abandon` nothing is being written any more.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

Store = Callable[[str, memoryview], None]
WAITING = 2


class BucketSender:
    """For one publication. Its calls come from one thread."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._jobs: queue.Queue[tuple[str, memoryview] | None] = queue.Queue(WAITING)
        self._error: BaseException | None = None
        self._abandoned = False
        self._thread: threading.Thread | None = None

    def send_bucket(self, key: str, data: memoryview) -> None:
        """Hand a bucket over; its bytes must not change any more."""
        self._raise()
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="rl-coserve-push", daemon=True)
            self._thread.start()
        self._jobs.put((key, data))

    def finish(self) -> None:
        """Wait until all is stored."""
        self._end()
        self._raise()

    def abandon(self) -> None:
        """Forget what waits; what is being written is waited for. Idempotent, raises nothing."""
        self._abandoned = True
        self._end()

    def _end(self) -> None:
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()
            self._thread = None

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            if self._error is None and not self._abandoned:
                try:
                    self._store(*job)
                except BaseException as error:  # noqa: BLE001  it is raised in the thread that pushes
                    self._error = error
            job = None  # not kept while waiting: it holds a buffer
