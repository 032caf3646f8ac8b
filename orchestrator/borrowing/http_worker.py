"""``HttpWorker``: the rollout worker on a ``vllm serve --plugin rl-coserve``, over HTTP.

Guarantees (``orchestrator.api.RolloutWorker`` says what the methods mean):

* A turn brings what is new in it (:mod:`orchestrator.transfer.turns`): the server remembers contexts, and asks for one that it
  lacks whole.
* Each completion is returned exactly once: the server keeps a batch until this client has acknowledged it, and a batch
  that comes twice is dropped here.
* A lost connection, no answer in time, and HTTP 5xx are RetryableErrors; repeating the call is harmless, since commands
  are idempotent by request id. Turns, aborts and the wait for completions are repeated here, for a second, when their connection
  is lost: who gives a worker up loses the tokens of all its requests. A server that was started anew has lost the requests:
  every call raises RetryableError until ``restart``. A refusal of the worker is the CommandError that it was there.
* A wrong token, a client address that is not allowed and another protocol version are ConfigErrors.
* With a ``relay``, ``start`` and ``restart`` tell the server of it, which begins a history of weight versions of its own
  there; another client's relay that was connected meanwhile is noticed: the server is not ours any more. Request ids on the
  wire are then unlike those of any other client or life of this one, so that none is taken for a repetition.
* The token goes to this one address only: no redirects, and not unencrypted over a network unless that is allowed.

The engine belongs to its server, which serves its users: ``close`` leaves it running without our requests, ``restart``
cannot start a process.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import fields, replace
from functools import partial
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

import aiohttp

from orchestrator.api import (
    COMMAND_STATUS,
    CommandError,
    Completion,
    ConfigError,
    GenerationRequest,
    KvMove,
    KvMoved,
    RetryableError,
    UpdateResult,
    WorkerStats,
    bearer,
    urls,
)
from orchestrator.api import http as wire
from orchestrator.api.jsontext import parse_object
from orchestrator.api.tls import SYSTEM, Tls, refusal
from orchestrator.transfer import RelayEndpoint
from orchestrator.transfer.turns import ContextSession, decode_completions
from orchestrator.transfer.turns.routed_experts import ExpertsOfModel

COMMAND_SECONDS = 60.0  # for an answer to a command; SUSPEND waits for a step of the engine
WEIGHTS_SECONDS = 1800.0  # for PREPARE and UPDATE, which fetch
CONNECT_SECONDS = 120.0  # for the server's processes to connect to a relay
OTHERS_SECONDS = 30.0  # that requests of an earlier run may take to end, when this one starts
POLL_SECONDS = 20.0  # that the server may hold back an answer without completions
POLL_GRACE_SECONDS = 20.0  # on top, for the answer to travel
MAX_ANSWER_BYTES = 4 << 20  # JSON
MAX_TURNS_BYTES = 256 << 20  # completions: of a quarter of a million tokens with the experts of sixty layers
LEASE_SECONDS = 60.0
_REPEATS = (0.2, 0.8)  # seconds before each repetition of a call whose connection was lost
_LEAST_LOGPROB = -1e6
_MOST_WRONG = 8  # answers in a row
_LOOKED_AT_HERE = 1 << 16  # bytes of experts, which take less than a millisecond; more are looked at in a thread
_RENEWALS = 3  # within the time of a lease
_ERRORS = (CommandError, ConfigError, RetryableError)

_logger = logging.getLogger(__name__)
_T = TypeVar("_T")
_Answer = TypeVar("_Answer")


class OtherProtocol(ConfigError):
    """The server's rl-coserve is another version's."""


class _ConnectionLost(RetryableError):
    """Nobody knows whether the server has got the call."""


class _Asked(NamedTuple):
    """Of a request: tokens that it may be answered with, those of its context, from which on experts were asked for."""

    most: int
    before: int = 0
    experts_from: int = 0


class HttpWorker:
    """Implements :class:`orchestrator.api.BorrowedWorker`. Connects with the first call.

    ``url``: http(s)://host:port of the server. ``relay``: the one that it is to fetch weights from; None: what it
    was started with. ``deactivate``: so ``close`` leaves it, if nobody else uses it.
    ``lease``: seconds for which the server's GPU is this job's alone, renewed while this object lives; a server that another
    job has refuses with a CommandError ``leased``. ``key``: proves that the lease is this life's; the same for all its workers.
    ``takeover``: an earlier life of the job has ended, and what it still has is this one's.
    ``mistakes``: why a server with such a status is not what it should be; such a one is never taken up (ConfigError).
    ``experts``: of the model, for a run that replays those of answers; None: nobody looks at them.
    ``priority``: added to every request's, so that users of the server (0) go first. ``tls``: whom https trusts, and what is
    shown to a server that asks for a certificate. Raises ConfigError for a URL over which the token must not go, and for
    files of ``tls`` that cannot be used; a call of a server whose certificate is not right raises ConfigError too.
    """

    def __init__(
        self,
        url: str,
        token: str,
        name: str = "",
        *,
        relay: RelayEndpoint | None = None,
        allow_plain_http: bool = False,
        deactivate: bool = False,
        priority: int = 0,
        tls: Tls = SYSTEM,
        lease: float = LEASE_SECONDS,
        key: str = "",
        takeover: bool = False,
        mistakes: Callable[[Mapping[str, Any]], Sequence[str]] | None = None,
        experts: ExpertsOfModel | None = None,
    ) -> None:
        if mistake := urls.mistake(url, allow_plain_http):
            raise ConfigError("worker.url", url, mistake)
        if not token:
            raise ConfigError("worker.token", "", "give the token that the server was started with or has generated")
        self.name = name or urlsplit(url).netloc
        self.url = self._url = url.rstrip("/")
        self._relay = relay
        self.deactivate = deactivate
        self._priority = priority
        self._mistakes = mistakes or (lambda status: ())
        self.activation: dict[str, Any] = {}  # what the server said of it, if ``start`` had to activate it
        self._joined = asyncio.Event()  # the relay was connected after its job had begun its epoch
        if relay is None:
            self._joined.set()
        self._place = ("", "", "")  # server process, job and metadata of its relay, when we connected
        self._life = ""  # before our request ids on the wire
        self._tls = tls.client() if url.startswith("https:") else None
        self._token = bearer.Token(token, "worker.token")
        self._headers = {wire.PROTOCOL_HEADER: str(wire.PROTOCOL)}
        self._lease = None
        if relay is not None:
            self._lease = ServerLease(self._post_lease, relay.job, relay.metadata, lease, takeover=takeover)
        if self._lease is not None:
            self._headers[wire.LEASE_HEADER] = key or secrets.token_hex(16)
        self._session: aiohttp.ClientSession | None = None
        self._calls: set[asyncio.Timeout] = set()  # in flight
        self._closed = False
        self._instance = ""  # of the server that has our requests
        self._acknowledged: int | None = None
        self._unfinished: dict[str, _Asked] = {}  # our requests
        self._experts = experts
        self._newest = -1  # version that it was told to load; -1: none by us
        self._wrong = 0  # answers in a row, by their experts
        self._vocabulary = 0  # of the server's model; 0: it has not said
        self._suspended = False  # by us
        self._contexts = ContextSession(self.name, self._send_turns)

    async def add(self, requests: Sequence[GenerationRequest]) -> None:
        sent = [self._sent(item) for item in requests]
        for request in sent:
            most, before = request.sampling.max_tokens, len(request.token_ids)
            self._unfinished[request.request_id] = _Asked(most, before, request.experts_from)
        await self._contexts.add(sent)

    async def _send_turns(self, message: bytes) -> list[object]:
        answer = await self._repeated(lambda: self._ask("POST", wire.TURNS, data=message))
        return _read(lambda answer: list(answer["contexts"]), answer, wire.TURNS)

    def forget(self, trajectory_id: str) -> None:
        """See :class:`orchestrator.api.SessionWorker`."""
        self._contexts.forget(trajectory_id)

    def take_resent(self) -> tuple[int, int]:
        """See :class:`orchestrator.api.SessionWorker`."""
        return self._contexts.take_resent()

    async def abort(
        self, request_ids: Sequence[str] = (), *, trajectories: Sequence[str] = (), groups: Sequence[str] = ()
    ) -> None:
        await self._abort([self._life + name for name in request_ids], trajectories, groups)

    async def _abort(self, names: Sequence[str], trajectories: Sequence[str] = (), groups: Sequence[str] = ()) -> None:
        body = {"request_ids": list(names), "trajectories": list(trajectories), "groups": list(groups)}
        try:
            await self._repeated(lambda: self._post(wire.ABORT, body))
        except CommandError as error:
            if error.code != "unknown_request":  # the port ignores unknown ones
                raise

    async def prioritize(self, priorities: Mapping[str, int]) -> None:
        moved = {trajectory: self._priority + priority for trajectory, priority in priorities.items()}
        await self._post(wire.PRIORITIZE, {"priorities": moved})

    def _sent(self, request: GenerationRequest) -> GenerationRequest:
        """As the server gets it: with an id of this life, and behind those that the server serves."""
        return replace(request, request_id=self._life + request.request_id, priority=self._priority + request.priority)

    async def completions(self) -> list[Completion]:
        await self._joined.wait()  # before its first weights it has no requests, and becomes another instance
        while True:
            found = await self._repeated(lambda: self._poll(POLL_SECONDS))
            # Others are of a client before this one, or of requests that restart has given up.
            ours = [completion for completion in found if completion.request_id in self._unfinished]
            for completion in ours:
                self._check_answer(completion, self._unfinished.pop(completion.request_id))
            if ours:
                cut = len(self._life)
                return [replace(item, request_id=item.request_id[cut:]) for item in ours] if cut else ours

    def _check_answer(self, completion: Completion, asked_for: _Asked) -> None:
        """What the trainer cannot take would end the run: tokens that are not there, numbers that are infinite in float32;
        tokens of weights that are to come would never be stale (those of before this run's are of version -1). Raises
        RetryableError."""
        tokens, logprobs, most = completion.token_ids, completion.logprobs, asked_for.most
        known = not tokens or 0 <= min(tokens) <= max(tokens) < (self._vocabulary or math.inf)
        likely = not logprobs or _LEAST_LOGPROB <= min(logprobs) <= max(logprobs) <= 1.0
        told = self._newest < 0 or all(-1 <= version <= self._newest for version, _ in completion.versions)
        if not told:
            asked = f"weights up to version {self._newest} were given to it"
            raise RetryableError(f"{self.name}: impossible versions in {completion.request_id}: {asked}")
        if not (known and likely and len(tokens) <= most):
            asked = f"at most {most} tokens of {self._vocabulary} were asked for, with their log-probs"
            raise RetryableError(f"{self.name}: impossible answer to {completion.request_id}: {asked}")

    async def _with_right_experts(self, found: Sequence[Completion]) -> list[Completion]:
        """One whose experts the model cannot have chosen is an error, which ends its trajectory; several in a row with no right
        one between are the server's failure. Raises RetryableError."""
        checked = []
        for item in found:
            said, model, asked = item.experts, self._experts, self._unfinished.get(item.request_id)
            if said and model and asked:
                look = partial(model.mistake, said, asked.experts_from, asked.before + len(item.token_ids))
                why = look() if len(said.data) < _LOOKED_AT_HERE else await asyncio.to_thread(look)
                self._wrong = self._wrong + 1 if why else 0
                if why:
                    why = f"{self.name}: impossible experts in {item.request_id}: {why}"
                    item = Completion(item.request_id, (), (), (), "error", item.timing, why)
                if self._wrong > _MOST_WRONG:
                    raise RetryableError(f"{self._wrong} answers in a row: {why}")
            checked.append(item)
        return checked

    async def suspend(self) -> None:
        self._suspended = True
        await self._post(wire.SUSPEND, None)

    async def prepare(self, version: int) -> None:
        await self._join()
        await self._post(wire.PREPARE, {"version": version}, WEIGHTS_SECONDS)

    async def update(self, version: int) -> UpdateResult:
        await self._join()
        self._newest = max(self._newest, version)
        answer = await self._post(wire.UPDATE, {"version": version}, WEIGHTS_SECONDS)
        return _read(wire.update_result_from_json, answer, wire.UPDATE)

    async def resume(self) -> None:
        await self._post(wire.RESUME, None)
        self._suspended = False

    async def kv_place(self) -> str:
        """See :class:`orchestrator.api.KvWorker`."""
        return _read(lambda answer: str(answer["place"]), await self._ask("GET", wire.KV_PLACE), wire.KV_PLACE)

    async def fetch_kv(self, move: KvMove) -> KvMoved:
        """See :class:`orchestrator.api.KvWorker`."""
        body = {item.name: getattr(move, item.name) for item in fields(move)} | {"token_ids": list(move.token_ids)}
        answer = await self._post(wire.KV_FETCH, body, move.limit + COMMAND_SECONDS)
        return _read(wire.kv_moved_from_json, answer, wire.KV_FETCH)

    async def stats(self) -> WorkerStats:
        return _read(wire.stats_from_json, await self._ask("GET", wire.STATS), wire.STATS)

    async def status(self) -> dict[str, Any]:
        """What the server says about itself: protocol, hooks that are live, limits, weight version."""
        return await self._ask("GET", wire.STATUS)

    async def start(self) -> None:
        """Take up the server for a run: activate it if it is not, tell it of our relay. Requests of an earlier life of the
        same job are aborted; for those of others it waits a while. Raises CommandError, ``requests_in_flight`` among them, and
        RetryableError."""
        await self._there()
        await self.hold()
        await self.activate_if_needed(await self._there())
        await self._take()

    async def hold(self) -> None:
        """Take the lease of the server's GPU, renewed from now on. Idempotent. Raises CommandError ``leased``, RetryableError."""
        if self._lease is not None:
            await self._lease.hold()

    async def claim(self, job: tuple[str, str], wanted: int, weight: float, seconds: float) -> None:
        """Say for so long that this job (name, metadata store) wants so many servers in all: who has this one may give it up.
        Raises CommandError, ConfigError, RetryableError."""
        said = {"job": job[0], "place": job[1], "wanted": wanted, "weight": weight, "seconds": seconds}
        await self._ask("POST", wire.CLAIM, body=said, any_instance=True)

    async def _post_lease(self, path: str, body: dict[str, Any] | None) -> None:
        """Of whatever instance the server is now: a lease outlives a history."""
        await self._ask("POST", path, body=body, any_instance=True)

    async def activate_if_needed(self, status: Mapping[str, Any]) -> None:
        """By its status. Raises RetryableError while its device has no pages for it."""
        state = status.get("activation")
        if isinstance(state, dict) and state.get("state", "active") != "active":
            self.activation = await self._post(wire.ACTIVATE, None, WEIGHTS_SECONDS)

    async def _take(self) -> None:
        """Connect our relay; see ``start``."""
        deadline = asyncio.get_running_loop().time() + OTHERS_SECONDS
        while True:
            try:
                return await self._connect()
            except CommandError as error:
                if error.code != "requests_in_flight":
                    raise
                if self._is_our_job(await self.status()):  # its publisher of then is locked out: nobody wants them
                    await self._post(wire.ABORT, {"all": True})
                elif asyncio.get_running_loop().time() > deadline:
                    raise
                else:
                    await asyncio.sleep(1.0)

    async def restart(self) -> None:
        """Take up a server that is back, or clear one that is there: no requests of ours, resumed (unless its weights are
        unusable, and an update from our relay can cure that).

        Raises RetryableError when there is none (a served engine cannot be started from here), or when it is another's.
        """
        if self._closed:
            raise RetryableError(f"{self.name} is closed")
        try:
            status = await self._there()
        except RetryableError as error:
            raise RetryableError(
                f"{self.name}: a served engine cannot be restarted from outside, and its server is not back: {error}"
            ) from error
        place = _read(_place, status, wire.STATUS)
        if self._relay is not None and place[0] == self._place[0] and not self._is_our_job(status):
            raise RetryableError(f"{self.name}: job {place[1]} has taken this server since")
        await self.hold()
        await self._clear()
        if self._relay is not None:
            await self.activate_if_needed(status)
            await self._connect()
            self._joined.set()
        try:
            await self.resume()
        except CommandError as error:
            if self._relay is None or error.code != "weights_unusable":
                raise RetryableError(f"{self.name}: {error.detail}; restart its server") from error

    async def _there(self) -> dict[str, Any]:
        """The status of whatever server is there now, which we talk to from now on. Raises RetryableError."""
        self._instance, self._acknowledged = "", None
        self._contexts.clear()
        status = await self.status()
        if status.get("broken"):
            raise RetryableError(f"{self.name}: its server's engine is broken: {status['broken']}")
        if found := self._mistakes(status):  # started anew, with another model for other users
            raise ConfigError("worker.url", self._url, "; ".join(found))
        limits = status.get("limits")
        size = limits.get("vocabulary") if isinstance(limits, dict) else None
        self._vocabulary = size if type(size) is int else 0
        return status

    async def _connect(self) -> None:
        """Tell the server where our weights are. It has no requests of ours."""
        if self._relay is None:
            return
        self._instance, self._acknowledged = "", None  # its answer says which it is from now on
        await self._post(wire.CONNECT, {"init_info": {"endpoint": self._relay.to_dict()}}, CONNECT_SECONDS)
        self._place = _read(_place, await self.status(), wire.STATUS)
        self._life = f"{secrets.token_hex(4)}."

    def _is_our_job(self, status: Mapping[str, Any]) -> bool:
        """Whether the server is connected to our run's relay, that of an earlier life of the run included."""
        _, job, metadata = _read(_place, status, wire.STATUS)
        return self._relay is not None and (job, metadata) == (self._relay.job, self._relay.metadata)

    async def _join(self) -> None:
        """Before the first weights: only now has our job begun its epoch."""
        if not self._joined.is_set():
            await self._take()
            self._joined.set()

    async def close(self) -> None:
        """Abort our unfinished requests, resume if we suspended, disconnect. The server goes on. Idempotent."""
        if self._closed:
            return
        session = self._session
        try:
            if session is not None:
                await self._clear()
                if self._suspended:
                    await self.resume()
                if self.deactivate:
                    await self._post(wire.DEACTIVATE, {"kept": True}, WEIGHTS_SECONDS)
        except _ERRORS as error:
            _logger.warning("%s was not left as it was found: %s", self.name, error)
        finally:
            if self._lease is not None:
                await self._lease.give_back()
            await self._end()

    async def disconnect(self) -> None:
        """Close, and leave the server as it is: for who only asked."""
        if self._lease is not None:
            self._lease.stop()
        await self._end()

    async def _clear(self) -> None:
        """Abort our requests, and take their completions off the server; nobody waits for them any more."""
        left = list(self._unfinished)
        for start in range(0, len(left), wire.MAX_IDS):
            await self._abort(left[start : start + wire.MAX_IDS])
        while await self._poll(0.0, look=False):
            pass
        self._unfinished.clear()
        self._wrong = 0

    async def _repeated(self, call: Callable[[], Awaitable[_T]]) -> _T:
        """A call that changes nothing when it comes twice. Raises what it raises, a lost connection at the last try only."""
        for pause in _REPEATS:
            try:
                return await call()
            except _ConnectionLost as error:
                _logger.info("%s; repeated", error)
            await asyncio.sleep(pause)
        return await call()

    async def _poll(self, seconds: float, *, look: bool = True) -> list[Completion]:
        query = {"timeout": f"{seconds:g}"}
        if self._acknowledged is not None:
            query["acknowledged"] = str(self._acknowledged)
        limit = seconds + POLL_GRACE_SECONDS
        payload = await self._exchange("GET", wire.COMPLETIONS, query=query, limit=limit, accept=wire.TURNS_TYPE)
        number, found = _read(partial(decode_completions, served=True), payload, wire.COMPLETIONS)
        if not found or number == self._acknowledged:
            return []
        if look:
            found = await self._with_right_experts(found)
        # No await from here on: a caller that is cancelled has either not got the batch, or has got it whole.
        self._acknowledged = number
        return found

    async def _post(self, path: str, body: dict[str, Any] | None, limit: float = COMMAND_SECONDS) -> dict[str, Any]:
        return await self._ask("POST", path, body=body, limit=limit)

    async def _ask(
        self,
        method: str,
        path: str,
        *,
        body: dict[str, Any] | None = None,
        data: bytes | None = None,
        limit: float = COMMAND_SECONDS,
        any_instance: bool = False,
    ) -> dict[str, Any]:
        """One call that is answered with a JSON object; see :meth:`_exchange`. ``body``: of JSON; ``data``: of turns."""
        kind = wire.TURNS_TYPE
        if body is not None:
            data, kind = json.dumps(body, allow_nan=False).encode(), "application/json"
        payload = await self._exchange(method, path, data=data, kind=kind, limit=limit, any_instance=any_instance)
        if (answer := _object(payload)) is None:
            raise RetryableError(f"{self.name}: the answer to {path} is not a JSON object")
        return answer

    async def _exchange(
        self,
        method: str,
        path: str,
        *,
        data: bytes | None = None,
        kind: str = "",
        accept: str = "",
        query: Mapping[str, str] | None = None,
        limit: float = COMMAND_SECONDS,
        any_instance: bool = False,
    ) -> bytes:
        """One call; see the module for what is raised. ``kind``: of ``data``; ``any_instance``: it is no matter of requests and
        weights."""
        session = self._connected()
        headers = self._token.header() | ({} if data is None else {"Content-Type": kind})
        if accept:
            headers["Accept"] = accept
        if self._instance and not any_instance:
            headers[wire.INSTANCE_HEADER] = self._instance
        try:
            async with (
                self._call(limit),
                session.request(
                    method, self._url + path, data=data, params=query, headers=headers, allow_redirects=False
                ) as response,
            ):
                status, seen = response.status, response.headers
                payload = await self._body(response, path, MAX_TURNS_BYTES if accept else MAX_ANSWER_BYTES)
        except TimeoutError as error:
            if self._closed:
                raise self._lost(path, error) from error
            raise RetryableError(f"{self.name}: no answer to {path} within {limit:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            if (why := refusal(error)) and not self._closed:
                raise ConfigError("worker.url", self._url, why) from error
            raise self._lost(path, error) from error
        if self._closed:
            raise RetryableError(f"{self.name} is closed")
        if status != 200:
            raise self._refusal(path, status, _object(payload))
        theirs = seen.get(wire.PROTOCOL_HEADER)
        if theirs != str(wire.PROTOCOL):
            fix = f"it speaks protocol {theirs or 'unknown'}, this client {wire.PROTOCOL}: install the same version"
            raise OtherProtocol("worker.url", self._url, fix)
        instance = seen.get(wire.INSTANCE_HEADER, "")
        if not any_instance:
            if self._instance and instance != self._instance:
                raise RetryableError(f"{self.name}: {_ANOTHER}")
            self._instance = instance
        return payload

    async def _body(self, response: aiohttp.ClientResponse, path: str, most: int) -> bytes:
        payload = bytearray()
        async for chunk in response.content.iter_any():
            payload += chunk
            if len(payload) > most:
                raise RetryableError(f"{self.name}: the answer to {path} has over {most} bytes")
        return bytes(payload)

    @asynccontextmanager
    async def _call(self, limit: float) -> AsyncIterator[None]:
        """A call that ends after ``limit`` seconds, or when this worker is closed. Raises TimeoutError."""
        async with asyncio.timeout(limit) as running:
            self._calls.add(running)
            try:
                yield
            finally:
                self._calls.discard(running)

    async def _end(self) -> None:
        """Whatever is in flight fails now: closing a session alone leaves it waiting."""
        self._closed, session, self._session = True, self._session, None
        self._joined.set()
        for running in self._calls:
            if not running.expired():
                running.reschedule(asyncio.get_running_loop().time())
        if session is not None:
            await session.close()

    def _refusal(self, path: str, status: int, answer: dict[str, Any] | None) -> Exception:
        error = answer.get("error") if answer is not None else None
        kind, message = "", f"HTTP {status}"
        if isinstance(error, dict):
            kind, message = str(error.get("type", "")), str(error.get("message", message))
        elif isinstance(error, str):
            message = error
        if status in (401, 403):
            return ConfigError("worker.token", "(not shown)" if status == 401 else self._url, message)
        if kind == wire.INSTANCE_MISMATCH:
            return RetryableError(f"{self.name}: {_ANOTHER}")
        if kind == wire.PROTOCOL_MISMATCH:
            return OtherProtocol("worker.url", self._url, message)
        if COMMAND_STATUS.get(kind) == status:
            return CommandError(kind, message)
        if status in (400, 413, 422):
            return CommandError("invalid_request", f"{path}: {message}")
        if status >= 500 or status in (408, 429):
            return RetryableError(f"{self.name}: {path}: {message}")
        fix = f"{path} does not exist (HTTP {status}): start the server with vllm serve MODEL --plugin rl-coserve"
        return ConfigError("worker.url", self._url, fix)

    def _lost(self, path: str, error: Exception) -> RetryableError:
        if self._closed:
            return RetryableError(f"{self.name} is closed")
        return _ConnectionLost(f"{self.name}: {path}: {type(error).__name__}: {error}")

    def _connected(self) -> aiohttp.ClientSession:
        if self._closed:
            raise RetryableError(f"{self.name} is closed")
        if self._session is None:
            # Its own limits are off: asyncio.timeout bounds every call as a whole.
            self._session = aiohttp.ClientSession(
                # vLLM's server closes a connection that was idle for 5 s: one used in that moment is lost with its call.
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=2.0, ssl=self._tls or True),
                timeout=aiohttp.ClientTimeout(total=None),
                headers={**self._headers, "Accept-Encoding": "identity"},
                auto_decompress=False,  # a few bytes may be very many then
                trust_env=False,  # no proxy gets the token
            )
        return self._session


class ServerLease:
    """A run's lease of a serving GPU (ROSE 4.1), for ``job`` at ``place``. ``post``: sends a command to its server.

    Guarantees: a run that dies, or whose event loop stands still for longer than the lease, loses it, and the server ends
    what it left there; renewal needs nothing but the loop, so a weight update or a long step costs no lease. A lease that
    another job has got meanwhile is not asked for again from here: the server refuses the next command, and whoever sent
    that decides.
    """

    def __init__(
        self,
        post: Callable[[str, dict[str, Any] | None], Awaitable[None]],
        job: str,
        place: str,
        seconds: float,
        *,
        takeover: bool = False,
    ) -> None:
        self._post = post
        self._body = {"job": job, "place": place, "seconds": seconds}
        self._takeover = takeover
        self._every = seconds / _RENEWALS
        self._renewing: asyncio.Task[None] | None = None

    async def hold(self) -> None:
        """Take it, and renew it from now on. Idempotent. Raises CommandError ``leased``, ConfigError, RetryableError."""
        await self._post(wire.LEASE, self._body | ({"takeover": True} if self._takeover else {}))
        self._takeover = False  # later it would be from a life after this one
        if self._renewing is None or self._renewing.done():
            self._renewing = asyncio.create_task(self._renew(), name="lease")

    async def give_back(self) -> None:
        """The server is not used any more. A server that does not answer gets it back when it runs out."""
        held = self._renewing is not None
        self.stop()
        if held:
            try:
                await self._post(wire.GIVE_BACK, None)
            except _ERRORS as error:
                _logger.info("a lease was not given back, and runs out: %s", error)

    def stop(self) -> None:
        """Renew it no more."""
        if self._renewing is not None:
            self._renewing.cancel()
            self._renewing = None

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(self._every)
            try:
                await self._post(wire.LEASE, self._body)
            except CommandError as error:
                _logger.warning("the lease was lost: %s", error)
                return
            except (ConfigError, RetryableError) as error:  # it may be back before the lease runs out
                _logger.info("the lease was not renewed: %s", error)


_ANOTHER = "its server was restarted, or given another relay, and has lost the requests: restart"


def _place(status: Mapping[str, Any]) -> tuple[str, str, str]:
    """Server process, job and metadata of the relay that it is connected to."""
    history = status["history"]
    return str(status["instance"]), str(history["job"]), str(history["metadata"])


def _object(payload: bytes) -> dict[str, Any] | None:
    try:
        return parse_object(payload)
    except ValueError:
        return None


def _read(parse: Callable[[_Answer], _T], answer: _Answer, path: str) -> _T:
    try:
        return parse(answer)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:  # the last: of an infinite number
        raise RetryableError(f"the answer to {path} is malformed: {error!r}") from error
