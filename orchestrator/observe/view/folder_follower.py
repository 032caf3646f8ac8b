"""A run folder, followed while it grows: the events that were appended, and what is under way.

Guarantees: every complete line is given out once, in order; a line that is being written is given out when it is complete, and
one that a kill cut in half is left out; the files are only read. A look reads at most ``CHUNK`` bytes, so that whoever
follows a long log can do something else in between. How long a run is silent is measured by the clock of who looks, from the
last change that was seen: the clock of a file server may be another.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from orchestrator.api.jsontext import parse_object
from orchestrator.observe.view.live_sample import FILE, read_record

CHUNK = 4 << 20  # bytes read at a time
SKEW = 300.0  # seconds that the clock of a file server may be behind


class Follower:
    """Of one run folder. :attr:`behind`: there is more to read now."""

    def __init__(self, folder: Path) -> None:
        self._events = folder / "events.jsonl"
        self._live = folder / FILE
        self._offset = 0
        self._rest = b""
        self._live_read: tuple[int, int] | None = None  # which record was read last
        self._live_seen: tuple[int, int] | None = None  # which there was at the last look
        self._alive_at = 0.0  # when it was first seen, less its age where that is beyond doubt
        self.silent_for: float | None = (
            None  # seconds without a new record, at the last look; None: there never was one
        )
        self.behind = True

    def events(self) -> Iterator[dict[str, Any]]:
        """What was appended since the last call, at most a chunk of it."""
        try:
            with self._events.open("rb") as stream:
                stream.seek(self._offset)
                read = stream.read(CHUNK)
        except OSError:  # not there yet, or a file server that does not answer now: asked again
            self.behind = False
            return
        self._offset += len(read)
        self.behind = len(read) == CHUNK
        lines = (self._rest + read).split(b"\n")
        self._rest = lines.pop()
        for line in lines:
            try:
                event = parse_object(line)
            except ValueError:  # cut by a kill
                continue
            if "kind" in event:
                yield event

    def percent(self) -> int:
        """How much of the log has been read."""
        try:
            return min(100, 100 * self._offset // max(1, self._events.stat().st_size))
        except OSError:
            return 0

    def live(self) -> dict[str, Any] | None:
        """What is under way; None: nothing new since the last call."""
        now = time.monotonic()
        try:
            found = self._live.stat()
            seen = (found.st_mtime_ns, found.st_ino)
            if seen != self._live_seen:
                age = time.time() - found.st_mtime if self._live_seen is None else 0.0
                self._live_seen, self._alive_at = seen, now - (age if age > SKEW else 0.0)
            record = None if seen == self._live_read else read_record(self._live.read_bytes())
        except (
            OSError,
            ValueError,
        ):  # not there yet, a file server that does not answer, or replaced by something else
            record = None
        if self._live_seen is not None:
            self.silent_for = now - self._alive_at
        if record is not None:
            self._live_read = seen
        return record
