"""A run folder, followed while it grows: the events that were appended, and what is under way.

Guarantees: every complete line is given out once, in order; a line that is being written is given out when it is complete, and
one that a kill cut in half is left out; the files are only read. A look reads at most ``CHUNK`` bytes, so that whoever
follows a long log can do something else in between.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from orchestrator.api.jsontext import parse_object
from orchestrator.observe.view.live_sample import FILE, read_record

CHUNK = 4 << 20  # bytes read at a time


class Follower:
    """Of one run folder. :attr:`behind`: there is more to read now."""

    def __init__(self, folder: Path) -> None:
        self._events = folder / "events.jsonl"
        self._live = folder / FILE
        self._offset = 0
        self._rest = b""
        self._live_seen: tuple[int, int] = (0, 0)
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

    def live(self) -> dict[str, Any] | None:
        """What is under way; None: nothing new since the last call."""
        try:
            found = self._live.stat()
            if (seen := (found.st_mtime_ns, found.st_ino)) == self._live_seen:
                return None
            record = read_record(self._live.read_bytes())
        except (OSError, ValueError):  # not there yet, or replaced by something else
            return None
        self._live_seen = seen
        return record

    def silent_for(self) -> float | None:
        """Seconds since the run last said what is under way; None: it never did."""
        try:
            return max(0.0, time.time() - self._live.stat().st_mtime)
        except OSError:
            return None
