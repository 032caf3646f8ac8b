"""A run's curves as TensorBoard's event files, by the writer of the ``tensorboard`` package (``logging.tensorboard``).

Guarantees: no thread: an event is in the file when :meth:`TensorBoard.take` returns; times are the run's own (its start's date
and its events' seconds), so no clock is read; a resume begins a file that takes back what lay beyond its checkpoint; a file
that cannot be written is said once and ends the curves, not the run. The package brings neither torch nor TensorFlow.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from orchestrator.observe.view.scalars import scalars

FOLDER = "tensorboard"
_VERSION = "brain.Event:2"


class TensorBoard:
    """Give :meth:`take` every event of a run. ``folder``: the run's; ``say``: tells people."""

    def __init__(self, folder: Path, say: Callable[[str], None]) -> None:
        self._folder = folder / FOLDER
        self._say = say
        self._protocol: Any = importlib.import_module("tensorboard.compat.proto.event_pb2")
        self._records: Any = importlib.import_module("tensorboard.summary.writer.record_writer")
        self._writer: Any = None
        self._began = 0.0  # date of the run's time 0
        self._broken = False

    def take(self, event: Mapping[str, Any]) -> None:
        """One more event."""
        if self._broken:
            return
        try:
            if event["kind"] == "run_start":
                self._open(event)
                return
            step, values = scalars(event)
            if values and self._writer is not None:
                items = [{"tag": name, "simple_value": value} for name, value in values.items()]
                self._write(self._began + float(event["t"]), step=step, summary={"value": items})
        except OSError as error:
            self._broken = True
            self._say(f"no curves for TensorBoard: {self._folder} cannot be written ({error.strerror})")

    def _open(self, event: Mapping[str, Any]) -> None:
        """A new file: those of earlier lives are not touched."""
        started = datetime.fromisoformat(event["started"]).timestamp() if event.get("started") else 0.0
        self._began = started - float(event["t"])
        self._folder.mkdir(exist_ok=True)
        number = len(list(self._folder.iterdir()))
        name = f"events.out.tfevents.{int(started):010d}.rl-coserve.{number:04d}"
        self._writer = self._records.RecordWriter((self._folder / name).open("wb", buffering=0))
        self._write(started, file_version=_VERSION)
        if (resumed := event.get("resumed_from")) is not None:  # what others wrote from this step on counts no more
            self._write(started, step=int(resumed) + 1, session_log={"status": self._protocol.SessionLog.START})

    def _write(self, time: float, **fields: Any) -> None:
        self._writer.write(self._protocol.Event(wall_time=time, **fields).SerializeToString())

    def close(self) -> None:
        """Idempotent."""
        if self._writer is not None:
            self._writer.close()
        self._broken = True
