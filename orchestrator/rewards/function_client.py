"""A client of one serverless function behind HTTP: what rewards and tools have in common.

    POST JSON  ->  JSON; a function of the embedded host (AWS Lambda's Invoke REST API), a Function Compute, Knative or
                   Lambda function URL, or any server that answers POST with 200 and JSON

Guarantees: transport failures (no connection, no answer in time, HTTP 408, 429, 5xx) are tried again ``retries`` times with
exponential back-off and seeded jitter, and not before the seconds of a ``Retry-After`` (a minute at most); what the function
itself did wrong is not. A host that cannot be connected to, or hangs up, is tried for ``patience`` seconds in any case: one
that the run started is being brought back. At most ``concurrency`` calls
are in flight, the time of a call begins when it is one of them, and at most ``burst`` more wait; one beyond that is refused at
once. Every way to fail is a :class:`FunctionFailed` with its kind, so that whoever calls decides what it means. No redirects: the
token is for this address only.
"""

from __future__ import annotations

import asyncio
import json
import random
from dataclasses import asdict, dataclass
from typing import Any, Literal
from urllib.parse import urlsplit

import aiohttp

from orchestrator.api import ConfigError, bearer, jsontext, urls
from orchestrator.api.errors import shown, writable
from orchestrator.api.tls import SYSTEM, Tls, refusal
from orchestrator.rewards.function_protocol import (
    COLD_START_HEADER,
    ERROR_HEADER,
    INVOKE_SUFFIX,
    MAX_BODY_BYTES,
    NOT_FINITE,
    PROVISION_PATH,
    TIMED_OUT,
)

BACKOFF_FIRST = 0.1  # seconds; doubles with each retry
BACKOFF_LIMIT = 5.0  # seconds
RETRY_AFTER_LIMIT = 60.0  # seconds that an endpoint may ask for
_SAID, _SAID_BYTES = 300, 2048  # characters of what one says of a refusal, and bytes of it that are read
_COLD_DIGITS = 9  # of the milliseconds that a start took, as a host says
_RETRIED = (408, 429)  # and every 5xx
_TOKEN_REFUSED, _MISCONFIGURED = (401, 403), (404, 405)

# unavailable: no try reached it. no_answer: the last try took too long. refused: wrong address or token, for every call.
# error: the function raised, exited, or answered no JSON. timeout: it ran too long. not_finite: NaN or infinity.
# burst: too many calls wait already.
Kind = Literal["unavailable", "no_answer", "refused", "error", "timeout", "not_finite", "burst"]


class FunctionFailed(Exception):
    """A call that has no result."""

    def __init__(self, kind: Kind, detail: str) -> None:
        super().__init__(f"{kind}: {detail}")
        self.kind: Kind = kind
        self.detail = detail


@dataclass
class FunctionCalls:
    """Since the client was made. ``cold_seconds``: what callers waited for processes to start, where the host says it."""

    calls: int = 0
    retries: int = 0
    failed: int = 0
    refused_burst: int = 0
    cold_starts: int = 0
    cold_seconds: float = 0.0
    queued_seconds: float = 0.0  # that calls waited for a slot, all together; no limit counts them
    longest_queued: float = 0.0  # seconds of one call
    seconds: float = 0.0  # of answered calls, retries and waits included


class _Slots(asyncio.Semaphore):
    """So many at a time; what is beyond a smaller number goes on to its end."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self._size, self._surplus = size, 0

    def resize(self, size: int) -> None:
        change, self._size = size - self._size, size
        for _ in range(change):
            self.release()
        while change < 0:
            if self._value > 0:
                self._value -= 1
            else:
                self._surplus += 1
            change += 1

    def release(self) -> None:
        if self._surplus:
            self._surplus -= 1
        else:
            super().release()


class FunctionClient:
    """Calls one function. ``field`` is the config's name of the URL, for its error; ``burst = None``: any number may wait."""

    field = "url"

    def __init__(
        self,
        url: str,
        *,
        token: str = "",
        concurrency: int = 32,
        timeout: float = 10.0,
        retries: int = 3,
        seed: int = 0,
        burst: int | None = None,
        patience: float = 0.0,
        tls: Tls = SYSTEM,
    ) -> None:
        if not urls.is_address(url):
            raise ConfigError(self.field, url, urls.ADDRESS)
        self._tls = tls.client() if urlsplit(url).scheme == "https" else None
        self.counts = FunctionCalls()
        self._url = url
        self._token = bearer.Token(token, f"{self.field} token")
        self._slots = _Slots(concurrency)
        self._room = None if burst is None else concurrency + burst
        self._inside = 0  # calls in flight, and those that wait for a slot
        self._timeout = timeout
        self._retries = retries
        self._patience = patience
        self._random = random.Random(seed)
        self._session: aiohttp.ClientSession | None = None
        self._closed = False

    async def call(self, event: Any) -> Any:
        """What the function answers to ``event``, parsed. Raises FunctionFailed; ValueError when ``event`` is not JSON."""
        body = json.dumps(event, allow_nan=False).encode()
        counts, loop = self.counts, asyncio.get_running_loop()
        if self._room is not None and self._inside >= self._room:
            counts.refused_burst += 1
            raise FunctionFailed("burst", f"{self._inside} calls are in flight or wait already")
        begun = loop.time()
        self._inside += 1
        counts.calls += 1
        try:
            async with self._slots:
                queued = loop.time() - begun
                counts.queued_seconds += queued
                counts.longest_queued = max(counts.longest_queued, queued)
                return await self._with_retries(body)
        except FunctionFailed:
            counts.failed += 1
            raise
        finally:
            self._inside -= 1
            counts.seconds += loop.time() - begun

    def resize(self, concurrency: int) -> None:
        """So many calls in flight at most from now on."""
        self._slots.resize(concurrency)

    async def prewarm(self, count: int) -> bool:
        """Ask the host to keep ``count`` processes of the function ready (Lambda's provisioned concurrency). False when this
        endpoint has no such request, or refuses it: then the first calls are cold."""
        if not urlsplit(self._url).path.endswith(INVOKE_SUFFIX):
            return False
        name = urlsplit(self._url).path.split("/")[-2]
        url = urlsplit(self._url)._replace(path=PROVISION_PATH.format(name=name)).geturl()
        try:
            async with asyncio.timeout(self._timeout):
                asked = {"ProvisionedConcurrentExecutions": count}
                async with self._connected().put(
                    url, json=asked, headers=self._token.header(), allow_redirects=False
                ) as answer:
                    return answer.status == 202
        except (TimeoutError, aiohttp.ClientError, OSError):
            return False

    def stats(self) -> dict[str, Any]:
        """For the event log."""
        return {name: round(value, 6) for name, value in asdict(self.counts).items()}

    async def close(self) -> None:
        """Idempotent. Calls in flight fail."""
        self._closed = True
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def _with_retries(self, body: bytes) -> Any:
        delay, tries, loop = BACKOFF_FIRST, 0, asyncio.get_running_loop()
        deadline = loop.time() + self._patience
        while True:
            timed_out, gone, wanted = False, False, 0.0
            try:
                async with asyncio.timeout(self._timeout):
                    return _answer(*await self._post(body))
            except TimeoutError:
                timed_out, reason = True, f"no answer within {self._timeout:g} s"
            except (aiohttp.ClientError, _Transport, OSError) as error:
                if why := refusal(error):
                    raise FunctionFailed("refused", f"{self._url}: {why}") from error
                gone = isinstance(error, aiohttp.ClientConnectionError | OSError)
                wanted = error.wanted if isinstance(error, _Transport) else 0.0
                reason = f"{type(error).__name__}: {error}"
            tries += 1
            if tries > self._retries and not (gone and loop.time() < deadline):
                break
            self.counts.retries += 1
            await asyncio.sleep(max(wanted, delay * self._random.uniform(0.5, 1.0)))
            delay = min(2 * delay, BACKOFF_LIMIT)
        detail = f"{self._url} failed {tries} times; the last time: {reason}"
        raise FunctionFailed("no_answer" if timed_out else "unavailable", detail)

    async def _post(self, body: bytes) -> tuple[bool, bytes]:
        """(whether the function failed, the body)."""
        headers = {**self._token.header(), "Content-Type": "application/json"}
        async with self._connected().post(self._url, data=body, headers=headers, allow_redirects=False) as response:
            status = response.status
            if status in _RETRIED or status >= 500:
                raise _Transport(f"HTTP {status}", _seconds(response.headers.get("Retry-After", "")))
            if status in _TOKEN_REFUSED:  # what else it says may hold the token
                raise FunctionFailed("refused", f"{self._url}: HTTP {status}; check its URL and token")
            if status != 200:
                said = f"HTTP {status}{self._words(await response.content.read(_SAID_BYTES))}"
                if status in _MISCONFIGURED or 300 <= status < 400:
                    raise FunctionFailed("refused", f"{self._url}: {said}; check its URL and token")
                raise FunctionFailed("error", said)
            if COLD_START_HEADER in response.headers:
                self._note_cold(response.headers[COLD_START_HEADER])
            answer = bytearray()
            async for chunk in response.content.iter_chunked(1 << 16):
                answer += chunk
                if len(answer) > MAX_BODY_BYTES:
                    raise FunctionFailed("error", f"the answer has more than {MAX_BODY_BYTES} B")
            return ERROR_HEADER in response.headers, bytes(answer)

    def _words(self, body: bytes) -> str:
        """What an endpoint says of its refusal, for people; the token, which it may repeat, left out."""
        said = body.decode(errors="replace")
        if token := self._token.current():
            said = said.replace(token, "...")
        plain = "".join(sign if sign.isprintable() else " " for sign in said)
        said = writable(" ".join(plain.split()), _SAID)
        return f" ({said})" if said else ""

    def _note_cold(self, milliseconds: str) -> None:
        self.counts.cold_starts += 1
        if milliseconds.isdecimal() and len(milliseconds) <= _COLD_DIGITS:
            self.counts.cold_seconds += int(milliseconds) / 1000

    def _connected(self) -> aiohttp.ClientSession:
        if self._closed:
            raise FunctionFailed("unavailable", "the client was closed")
        if self._session is None:
            # Its own limits are off: the semaphore bounds the calls, and asyncio.timeout each of them as a whole. (A limit
            # of connections would let a call wait inside its time.)
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, ssl=self._tls or True),
                timeout=aiohttp.ClientTimeout(total=None),
            )
        return self._session


class _Transport(Exception):
    """``wanted``: seconds that the other side asks to be left alone for."""

    def __init__(self, said: str, wanted: float) -> None:
        super().__init__(said)
        self.wanted = wanted


def _seconds(header: str) -> float:
    """Of a Retry-After; one that names a date, or nothing: none."""
    return min(float(header), RETRY_AFTER_LIMIT) if header.isdecimal() and len(header) <= _COLD_DIGITS else 0.0


def _answer(failed: bool, body: bytes) -> Any:
    """The JSON of an answer. Raises FunctionFailed."""
    try:
        answer: Any = jsontext.parse(body)
    except ValueError as error:
        raise FunctionFailed("error", f"the answer is not JSON: {error}") from error
    if failed:
        if not isinstance(answer, dict):
            raise FunctionFailed("error", f"the answer is not an object: {shown(answer, 200)}")
        what = str(answer.get("errorType", ""))
        kinds: dict[str, Kind] = {TIMED_OUT: "timeout", NOT_FINITE: "not_finite"}
        raise FunctionFailed(kinds.get(what, "error"), f"{what}: {answer.get('errorMessage', '')}"[:500])
    return answer
