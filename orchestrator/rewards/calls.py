"""Calls of an HTTP endpoint that scores: retried where that may help, limited in number and time.

Guarantees: transport failures (no connection, no answer in time, HTTP 408, 429, 5xx) are tried again ``retries`` times with
exponential back-off and seeded jitter, then end in RetryableError, or in TrajectoryError "reward_timeout" when the last one
was a timeout. A refused token or an unknown address is a RunError: every trajectory would meet it. Another status is a
TrajectoryError "reward_error". At most ``concurrency`` calls are in flight. The token goes to this address only.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping
from typing import TypeVar
from urllib.parse import urlsplit

import aiohttp

from orchestrator.api import ConfigError, RetryableError, RunError, TrajectoryError
from orchestrator.rewards.protocol import MAX_BODY_BYTES

BACKOFF_FIRST = 0.1  # seconds; doubles with each retry
BACKOFF_LIMIT = 5.0  # seconds
_RETRIED = (408, 429)  # and every 5xx
_MISCONFIGURED = (401, 403, 404, 405)

Read = TypeVar("Read")


class Endpoint:
    """One address. ``field`` is the config's name of it, for errors. Raises ConfigError for what is no URL."""

    def __init__(
        self, field: str, url: str, *, token: str, concurrency: int, timeout: float, retries: int, seed: int
    ) -> None:
        if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).netloc:
            raise ConfigError(field, url, "write it as http://host:port/path or https://...")
        self._url = url
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._slots = asyncio.Semaphore(concurrency)
        self._timeout = timeout
        self._retries = retries
        self._random = random.Random(seed)
        self._session: aiohttp.ClientSession | None = None
        self._closed = False

    async def call(self, body: bytes, read: Callable[[Mapping[str, str], bytes], Read]) -> Read:
        """Post JSON; what ``read`` makes of the answer's headers and body. ``read`` may raise TrajectoryError."""
        async with self._slots:
            return await self._with_retries(body, read)

    async def close(self) -> None:
        """Idempotent. Calls in flight fail."""
        self._closed = True
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def _with_retries(self, body: bytes, read: Callable[[Mapping[str, str], bytes], Read]) -> Read:
        delay = BACKOFF_FIRST
        for attempt in range(self._retries + 1):
            if attempt:
                await asyncio.sleep(delay * self._random.uniform(0.5, 1.0))
                delay = min(2 * delay, BACKOFF_LIMIT)
            try:
                async with asyncio.timeout(self._timeout):
                    return read(*await self._post(body))
            except TimeoutError:
                timed_out, reason = True, f"no answer within {self._timeout:g} s"
            except (aiohttp.ClientError, _Transport, OSError) as error:
                timed_out, reason = False, f"{type(error).__name__}: {error}"
        detail = f"{self._url} failed {self._retries + 1} times; the last time: {reason}"
        if timed_out:
            raise TrajectoryError("reward_timeout", detail)
        raise RetryableError(detail)

    async def _post(self, body: bytes) -> tuple[Mapping[str, str], bytes]:
        """Headers and body of an answer with status 200."""
        headers = {**self._headers, "Content-Type": "application/json"}
        # No redirects: the token is for this address only.
        async with self._connected().post(self._url, data=body, headers=headers, allow_redirects=False) as response:
            status = response.status
            if status in _RETRIED or status >= 500:
                raise _Transport(f"HTTP {status}")
            if status in _MISCONFIGURED or 300 <= status < 400:
                raise RunError(
                    f"the reward endpoint {self._url} refuses to score: HTTP {status}; check its URL and token"
                )
            if status != 200:
                raise TrajectoryError("reward_error", f"HTTP {status}")
            answer = bytearray()
            async for chunk in response.content.iter_chunked(1 << 16):
                answer += chunk
                if len(answer) > MAX_BODY_BYTES:
                    raise TrajectoryError("reward_error", f"the answer has more than {MAX_BODY_BYTES} B")
            return response.headers, bytes(answer)

    def _connected(self) -> aiohttp.ClientSession:
        if self._closed:
            raise RetryableError("the reward client was closed")
        if self._session is None:
            # Its own limits are off: the semaphore bounds the calls, and asyncio.timeout each of them as a whole. (A limit
            # of connections would let a call wait inside its time.)
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None)
            )
        return self._session


class _Transport(Exception):
    pass
