"""TensorBoard's event files, written without TensorBoard: always there, and read by any version of it.

An event file is a sequence of records (length, masked CRC-32C of it, data, masked CRC-32C of that), each a protocol buffer
``tensorflow.Event``; only five of its fields are needed for curves. See ``tensorboard/compat/proto/event.proto`` and
TensorFlow's ``record_writer``.

Guarantees: nothing but the standard library; times are the run's own (its start's date and its events' seconds), so no clock is
read; a resume begins a file that takes back what lay beyond its checkpoint; a file that cannot be written is said once and
ends the curves, not the run.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, BinaryIO

from orchestrator.observe.view.scalars import scalars

FOLDER = "tensorboard"
_VERSION = "brain.Event:2"
_POLYNOMIAL = 0x82F63B78  # CRC-32C (Castagnoli), reflected


def _table() -> tuple[int, ...]:
    found = []
    for value in range(256):
        for _ in range(8):
            value = value >> 1 ^ (_POLYNOMIAL if value & 1 else 0)
        found.append(value)
    return tuple(found)


_TABLE = _table()


def crc32c(data: bytes) -> int:
    """The checksum of RFC 3720, appendix B.4."""
    value = 0xFFFFFFFF
    for byte in data:
        value = _TABLE[(value ^ byte) & 0xFF] ^ value >> 8
    return value ^ 0xFFFFFFFF


def record(data: bytes) -> bytes:
    """One record of an event file."""
    length = struct.pack("<Q", len(data))
    return length + struct.pack("<I", _masked(length)) + data + struct.pack("<I", _masked(data))


def _masked(data: bytes) -> int:
    value = crc32c(data)
    return ((value >> 15 | value << 17 & 0xFFFFFFFF) + 0xA282EAD8) & 0xFFFFFFFF


def encode(
    time: float, step: int = 0, *, values: Mapping[str, float] | None = None, version: str = "", restart: bool = False
) -> bytes:
    """An Event. ``time``: seconds since 1970; ``restart``: what others wrote from this step on counts no more."""
    found = b"\x09" + struct.pack("<d", time)
    if step:
        found += b"\x10" + _varint(step)
    if version:
        found += b"\x1a" + _sized(version.encode())
    if values:
        items = (b"\x0a" + _sized(name.encode()) + b"\x15" + struct.pack("<f", value) for name, value in values.items())
        found += b"\x2a" + _sized(b"".join(b"\x0a" + _sized(item) for item in items))
    if restart:
        found += b"\x3a" + _sized(b"\x08\x01")
    return found


def _varint(value: int) -> bytes:
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*found, value])


def _sized(data: bytes) -> bytes:
    return _varint(len(data)) + data


class TensorBoard:
    """Give :meth:`take` every event of a run. ``folder``: the run's; ``say``: tells people."""

    def __init__(self, folder: Path, say: Callable[[str], None]) -> None:
        self._folder = folder / FOLDER
        self._say = say
        self._stream: BinaryIO | None = None
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
            if values and self._stream is not None:
                self._stream.write(record(encode(self._began + float(event["t"]), step, values=values)))
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
        self._stream = (self._folder / name).open("wb", buffering=0)
        self._stream.write(record(encode(started, version=_VERSION)))
        if (resumed := event.get("resumed_from")) is not None:
            self._stream.write(record(encode(started, int(resumed) + 1, restart=True)))

    def close(self) -> None:
        """Idempotent."""
        if self._stream is not None:
            self._stream.close()
        self._broken = True
