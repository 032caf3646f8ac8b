"""Servers with the real control endpoints around a stand-in of the engine: for tests of what runs and servers say."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.support.vllm_twin import TwinServer


@asynccontextmanager
async def twins(number: int, *, versions: int = 0, pool: Path | None = None) -> AsyncIterator[list[TwinServer]]:
    """So many, stopped at the end, with a minute for what is done with them. ``versions``: of weights that their relay has."""
    servers = [await TwinServer().start(pool=pool) for _ in range(number)]
    for server in servers:
        server.client.relay.update(dict.fromkeys(range(versions), ""))
    try:
        async with asyncio.timeout(60):
            yield servers
    finally:
        for server in servers:
            await server.stop()


async def until(true: Callable[[], Any]) -> None:
    while not true():
        await asyncio.sleep(0.01)


def used(server: TwinServer, share: float, *, lends: bool = True) -> None:
    """As the metrics of a KV pool in which serving uses so much, and did in the last hour."""
    said = {"serving_use": share, "seconds": 3600.0, "serving_now": share, "lends": lends}
    server.control.device = SimpleNamespace(recent_use=said)  # type: ignore[assignment]
