"""Ports that are free, and conditions that come to hold."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable


def free_port() -> int:
    """Of the loopback interface; nothing keeps it free."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
    return port


def wait_for(true: Callable[[], object], seconds: float = 30.0, every: float = 0.005) -> None:
    """Until it holds; an AssertionError after so many seconds."""
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, f"it does not hold after {seconds:g} s"
        time.sleep(every)
