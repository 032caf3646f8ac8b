"""Ports that are free, and conditions that come to hold."""

from __future__ import annotations

import random
import socket
import time
from collections.abc import Callable

_PORTS = range(20_000, 32_000)  # below those that a kernel gives to whoever asks for any: connections of other tests


def free_port() -> int:
    """Of the loopback interface; nothing keeps it free, and nobody is given it who does not ask for it by its number."""
    for port in random.SystemRandom().sample(_PORTS, 100):
        try:
            socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue
        return port
    raise AssertionError(f"none of 100 ports of {_PORTS} is free")


def wait_for(true: Callable[[], object], seconds: float = 30.0, every: float = 0.005) -> None:
    """Until it holds; an AssertionError after so many seconds."""
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, f"it does not hold after {seconds:g} s"
        time.sleep(every)
