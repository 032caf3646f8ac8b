"""The reward function behind HTTP: the embedded host, a cloud function URL, or any server that speaks the same JSON.

    POST {"trajectory_id", "task", "prompt", "actions": [[token ids of a turn], ...]}  ->  {"reward": number, ...}

Guarantees: what ``score`` returns is a finite float that the function computed; an infrastructure failure is never a
reward. Transport failures (no connection, no answer in time, HTTP 408, 429, 5xx) are tried again ``retries`` times with
exponential back-off and seeded jitter, then end in RetryableError, or in TrajectoryError "reward_timeout" when the last
one was a timeout. What the function itself did wrong is not retried: TrajectoryError "reward_error" (raised, exited,
answered something else), "reward_timeout" (ran too long), "reward_not_finite". A refused token or an unknown function is
a RunError: every trajectory would meet it. At most ``concurrency`` calls are in flight.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from orchestrator.api import ConfigError, RetryableError, RunError, Trajectory, TrajectoryError
from orchestrator.rewards.protocol import ERROR_HEADER, MAX_BODY_BYTES, NOT_FINITE, TIMED_OUT

BACKOFF_FIRST = 0.1  # seconds; doubles with each retry
BACKOFF_LIMIT = 5.0  # seconds
_RETRIED = (408, 429)  # and every 5xx
_MISCONFIGURED = (401, 403, 404, 405)


class HttpReward:
    """Implements :class:`orchestrator.api.RewardFunction`."""

    def __init__(
        self,
        url: str,
        *,
        token: str = "",
        concurrency: int = 32,
        timeout: float = 10.0,
        retries: int = 3,
        seed: int = 0,
    ) -> None:
        if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).netloc:
            raise ConfigError("reward.url", url, "write it as http://host:port/path or https://...")
        self._url = url
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._slots = asyncio.Semaphore(concurrency)
        self._timeout = timeout
        self._retries = retries
        self._random = random.Random(seed)
        self._session: aiohttp.ClientSession | None = None
        self._closed = False

    async def score(self, trajectory: Trajectory) -> float:
        """The terminal reward; finite."""
        payload = {
            "trajectory_id": trajectory.id,
            "task": trajectory.task,
            "prompt": trajectory.prompt.payload,
            "actions": [list(action) for action in trajectory.actions],
        }
        async with self._slots:
            return await self._with_retries(json.dumps(payload, allow_nan=False).encode())

    async def close(self) -> None:
        """Idempotent. Calls in flight fail."""
        self._closed = True
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def _with_retries(self, body: bytes) -> float:
        delay = BACKOFF_FIRST
        for attempt in range(self._retries + 1):
            if attempt:
                await asyncio.sleep(delay * self._random.uniform(0.5, 1.0))
                delay = min(2 * delay, BACKOFF_LIMIT)
            try:
                async with asyncio.timeout(self._timeout):
                    return _reward(*await self._post(body))
            except TimeoutError:
                timed_out, reason = True, f"no answer within {self._timeout:g} s"
            except (aiohttp.ClientError, _Transport, OSError) as error:
                timed_out, reason = False, f"{type(error).__name__}: {error}"
        detail = f"{self._url} failed {self._retries + 1} times; the last time: {reason}"
        if timed_out:
            raise TrajectoryError("reward_timeout", detail)
        raise RetryableError(detail)

    async def _post(self, body: bytes) -> tuple[bool, bytes]:
        """(whether the function failed, the body)."""
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
            return ERROR_HEADER in response.headers, bytes(answer)

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


def _reward(failed: bool, body: bytes) -> float:
    """The reward in an answer. Raises TrajectoryError."""
    try:
        answer: Any = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise TrajectoryError("reward_error", f"the answer is not JSON: {error}") from error
    if not isinstance(answer, dict):
        raise TrajectoryError("reward_error", f"the answer is not an object: {answer!r:.200}")
    if failed:
        kind = str(answer.get("errorType", ""))
        cause = {TIMED_OUT: "reward_timeout", NOT_FINITE: "reward_not_finite"}.get(kind, "reward_error")
        raise TrajectoryError(cause, f"{kind}: {answer.get('errorMessage', '')}"[:500])
    reward = answer.get("reward")
    if not isinstance(reward, int | float) or isinstance(reward, bool):
        raise TrajectoryError("reward_error", f'no number under "reward": {answer!r:.200}')
    try:
        value = float(reward)
    except OverflowError:
        value = math.inf
    if not math.isfinite(value):
        raise TrajectoryError("reward_not_finite", f"the reward is {value}")
    return value
