"""The event log of a run: one sorted-key JSON object a line, in the order in which things happened.

Guarantee: for the same seed, config and Python build, a simulated run writes the same bytes. So nothing here reads a
wall clock, and values that depend on the machine belong into ``environment.json``, not here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

from orchestrator.api.jsontext import parse_object

_ETERNITY = 1e12  # seconds


class LineSink(Protocol):
    """Where lines go: a file opened for appending, or a list in the simulator."""

    def write(self, line: str, /) -> object: ...


class MemorySink:
    """Collects lines in memory."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def write(self, line: str, /) -> None:
        """Keep one line."""
        self.lines.append(line)

    def text(self) -> str:
        """All lines as one string."""
        return "".join(self.lines)


class EventLog:
    """Writes events stamped with the loop's time since the run's start (seconds, rounded to microseconds)."""

    def __init__(self, sink: LineSink, now: Callable[[], float], offset: float = 0.0) -> None:
        self._sink = sink
        self._now = now
        self._origin = now() - offset  # a resumed run goes on where the log ended
        self._last = (self._origin, 0.0)  # the clock, and what it means: much happens in one tick of the event loop
        self._open: dict[int, tuple[str, int, float]] = {}  # stages that have begun
        self._listeners: list[Callable[[Mapping[str, Any]], None]] = []

    def listen(self, listener: Callable[[Mapping[str, Any]], None]) -> None:
        """Call ``listener`` with every event from now on. It must be quick, and must not raise."""
        self._listeners.append(listener)

    def open_stages(self) -> list[tuple[str, int, float]]:
        """(stage, step, start) of those that have begun and not ended."""
        return list(self._open.values())

    def time(self) -> float:
        """Seconds since the run's start."""
        now = self._now()
        if now != self._last[0]:
            self._last = now, round(now - self._origin, 6)
        return self._last[1]

    def emit(self, kind: str, **fields: Any) -> None:
        """Append one event."""
        record = {"kind": kind, "t": self.time(), **fields}
        line = json.dumps(record, sort_keys=True, separators=(",", ":"), allow_nan=True)
        # perhaps half of a surrogate pair, of a foreign error's text: no reader takes a line with one
        if "\\ud" in line:
            whole = json.dumps(json.loads(line), ensure_ascii=False).encode("utf-8", "replace").decode()
            line = json.dumps(json.loads(whole), sort_keys=True, separators=(",", ":"), allow_nan=True)
        self._sink.write(line + "\n")
        for listener in self._listeners:
            listener(record)

    @contextmanager
    def stage(self, name: str, step: int) -> Iterator[StageNote]:
        """Record a stage with start and end; the body may say what it waited for."""
        note = StageNote()
        start = self.time()
        self._open[id(note)] = (name, step, start)
        try:
            yield note
        finally:
            del self._open[id(note)]
            self.emit(
                "stage",
                stage=name,
                step=step,
                start=start,
                end=self.time(),
                waiting_for=note.waiting_for,
                **note.counts,
            )


class StageNote:
    """What a stage says about itself."""

    def __init__(self) -> None:
        self.waiting_for = ""
        self.counts: dict[str, int] = {}  # of what it worked on, beside its times


def read_events(file: Path) -> list[dict[str, Any]]:
    """All complete events of a log; a half-written last line (the process was killed), and others that are no objects, are
    left out."""
    return list(each_event(file))


def each_event(file: Path) -> Iterator[dict[str, Any]]:
    """They, each read when it is asked for."""
    with file.open(encoding="utf-8", errors="replace", newline="\n") as stream:
        for line in stream:
            with suppress(ValueError):
                yield parse_object(line)


def last_time(file: Path) -> float:
    """The largest event time in a log, 0.0 when there is none."""
    if not file.exists():
        return 0.0
    return max((time_of(event) for event in each_event(file)), default=0.0)


def time_of(event: Mapping[str, Any], field: str = "t") -> float:
    """Seconds since the run's start; 0.0 where it does not say."""
    t = event.get(field, 0.0)
    return float(t) if type(t) in (int, float) and 0 <= t < _ETERNITY else 0.0
