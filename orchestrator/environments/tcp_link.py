"""The way to an environment in a pod: one lasting TCP connection, authenticated by a token of that pod alone.

Guarantees (RollArt 8: persistent sessions and exponential back-off): a lost connection is made again, with growing pauses;
the request under way is sent again under its number, and the environment carries it out once. Only when nobody listens for
all tries is the environment given up. The connection is not encrypted: it belongs into the cluster's own network.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable

from orchestrator.api import TrajectoryError
from orchestrator.environments.environment_wire import MAX_LINE

CONNECT_TRIES = 6
CONNECT_PAUSE = 0.1  # seconds; doubles with each try: 3 s in all
CONNECT_LIMIT = 5.0  # seconds for one try


class TcpChannel:
    """Implements :class:`~orchestrator.environments.remote_session.Channel`. ``end`` ends what runs at the other side."""

    def __init__(self, host: str, port: int, token: str, end: Callable[[], Awaitable[None]], seed: object) -> None:
        self._host = host
        self._port = port
        self._token = token
        self._end = end
        self._random = random.Random(f"{seed}/connect")
        self._connection: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self.connections = 0

    async def exchange(self, line: bytes) -> bytes:
        for _ in range(CONNECT_TRIES):
            try:
                if self._connection is None:
                    self._connection = await self._connect()
                reader, writer = self._connection
                writer.write(line)
                await writer.drain()
                answer = await reader.readline()
                if answer.endswith(b"\n"):
                    return answer
            except ConnectionError:
                pass  # as its end, without a word
            except ValueError as error:  # longer than the limit
                raise TrajectoryError("environment_output", f"an answer of more than {MAX_LINE} B") from error
            self._disconnect()
        raise TrajectoryError("environment_died", f"{self._host}:{self._port} ends every connection")

    async def kill(self) -> None:
        self._disconnect()
        await self._end()

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        pause = CONNECT_PAUSE
        for left in reversed(range(CONNECT_TRIES)):
            try:
                async with asyncio.timeout(CONNECT_LIMIT):
                    reader, writer = await asyncio.open_connection(self._host, self._port, limit=MAX_LINE)
                    try:
                        writer.write(self._token.encode() + b"\n")
                        await writer.drain()
                        if await reader.readline() != b"{}\n":
                            raise ConnectionResetError("it refuses the token")
                    except BaseException:
                        writer.close()
                        raise
                self.connections += 1
                return reader, writer
            except (OSError, TimeoutError) as error:
                if not left:
                    where = f"{self._host}:{self._port}"
                    raise TrajectoryError("environment_died", f"no connection to {where}: {error!r}") from error
            await asyncio.sleep(pause * self._random.uniform(0.5, 1.0))
            pause *= 2
        raise AssertionError

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection[1].close()
