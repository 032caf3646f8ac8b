"""The metadata store of a cluster: a Redis server, by URL. The client (extra ``redis``) is loaded when a store is opened.

Guarantees: ``compare_and_set`` is atomic among all clients (one script in the server), and says whether this call won even
when the connection broke in the middle of it: a change carries its writer's mark, and the script recognises its own. A
revision is never used twice for a key. While the server is away every call raises one RelayError ``metadata_unreachable``
and changes nothing that it does not report; the first call after the server is back works. A server that comes back with
less than it had (no persistence, an eviction, a replica that was behind) is a RunError that says so: a store that forgets
epochs would let two histories share keys. The password is never part of the URL, an error, an event or an endpoint: it comes
from a file that :data:`PASSWORD_FILE` names.

The server should keep what it is told (``appendonly yes``, and ``appendfsync always``: with ``everysec`` a server that is
killed forgets up to two seconds, seen in a run), and evict nothing of it (``maxmemory-policy noeviction``).
"""

from __future__ import annotations

import itertools
import os
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from orchestrator.api import ConfigError, RunError, urls
from orchestrator.transfer.transfer_errors import RelayError

PASSWORD = "RL_COSERVE_REDIS_PASSWORD"
PASSWORD_FILE = "RL_COSERVE_REDIS_PASSWORD_FILE"
PREFIX = "rl-coserve:"  # of every key: others may use the same server
ANSWER_SECONDS = 5.0  # for a connection, and for one answer
_FIELD = "relay.metadata_url"
_TRIES = 2  # the first may meet a connection that a restart of the server has closed
_LATER = ("BUSY", "CLUSTERDOWN", "LOADING", "MASTERDOWN", "MISCONF", "NOREPLICAS", "OOM", "READONLY", "TRYAGAIN")
_REFUSED = ("NOAUTH", "NOPERM", "WRONGPASS")
_CHANGE = """
local present = tonumber(redis.call('HGET', KEYS[1], 'revision') or '0')
local expected = tonumber(ARGV[1])
if present == expected then
  redis.call('HSET', KEYS[1], 'value', ARGV[2], 'revision', expected + 1, 'writer', ARGV[3])
  return 1
end
if present == expected + 1 and redis.call('HGET', KEYS[1], 'writer') == ARGV[3] then return 1 end
return present < expected and -1 or 0
"""

Answer = TypeVar("Answer")


def redis_password(environment: Mapping[str, str]) -> str | None:
    """What the environment says; None: no password. Raises ConfigError, which never shows one."""
    file = environment.get(PASSWORD_FILE, "")
    if not file:
        if environment.get(PASSWORD):
            fix = f"child processes could read it: write it to a file (chmod 600) and name that in {PASSWORD_FILE}"
            raise ConfigError(PASSWORD, "(not shown)", fix)
        return None
    try:
        found = Path(file).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "no UTF-8 text"
        raise ConfigError(PASSWORD_FILE, file, f"cannot be read ({why}); name a file with the password") from error
    if not found:
        raise ConfigError(PASSWORD_FILE, file, "is empty; it must hold the password of the Redis server")
    return found


class RedisMetadata:
    """Implements :class:`orchestrator.api.MetadataStore`. ``url``: redis://[user@]host[:port][/database], or rediss:// (TLS).

    May be called from several threads. Raises ConfigError for a URL, password or server that cannot be used.
    """

    def __init__(self, url: str) -> None:
        if mistake := urls.redis_mistake(url, allow_plain=True):
            raise ConfigError(_FIELD, urls.without_password(url), mistake)
        try:
            import redis
        except ImportError as error:
            raise ConfigError(_FIELD, url, "needs the package redis: pip install rl-coserve[redis]") from error
        self._url = url
        self._errors = redis.exceptions
        self._seen: dict[str, int] = {}  # key -> the newest revision that this process knows of
        self._writer, self._changes = secrets.token_hex(8), itertools.count()
        self._client: Any = redis.Redis.from_url(
            url,
            password=redis_password(os.environ),
            socket_timeout=ANSWER_SECONDS,
            socket_connect_timeout=ANSWER_SECONDS,
            retry=redis.retry.Retry(redis.backoff.NoBackoff(), 0),  # a repeated change must be recognised: see _ask
        )
        self._script = self._client.register_script(_CHANGE)
        try:
            self._check_server()
        except BaseException:
            self.close()
            raise

    def get(self, key: str) -> tuple[bytes, int] | None:
        client, known = self._open(), self._seen.get(key, 0)
        value, revision = self._ask(lambda: client.hmget(PREFIX + key, ("value", "revision")))
        found = 0 if revision is None else int(revision)
        if found < known:
            raise self._lost(key)
        self._note(key, found)
        return (bytes(value), found) if found else None

    def compare_and_set(self, key: str, value: bytes, revision: int) -> bool:
        self._open()
        known = self._seen.get(key, 0)
        mark = f"{self._writer}.{next(self._changes)}"
        answer = int(self._ask(lambda: self._script(keys=[PREFIX + key], args=[revision, value, mark])))
        if answer == 1:
            self._note(key, revision + 1)
        elif answer == -1 and known >= revision:
            raise self._lost(key)
        return answer == 1

    def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            client.close()

    def _open(self) -> Any:
        if self._client is None:
            raise RelayError("closed", "this metadata store was closed")
        return self._client

    def _ask(self, call: Callable[[], Answer]) -> Answer:
        """One answer of the server; every way to fail is one of our errors."""
        for attempt in range(_TRIES):
            try:
                return call()
            except (self._errors.AuthenticationError, self._errors.AuthorizationError) as error:
                raise self._refused(str(error)) from error
            except (self._errors.ConnectionError, self._errors.TimeoutError) as error:
                if attempt == _TRIES - 1:
                    raise RelayError("metadata_unreachable", f"{self._url}: {error}") from error
            except self._errors.ResponseError as error:
                text = str(error)
                kind = text.partition(" ")[0]
                if kind in _REFUSED:
                    raise self._refused(text) from error
                if kind in _LATER or type(error).__name__ in ("OutOfMemoryError", "ReadOnlyError", "BusyLoadingError"):
                    raise RelayError("metadata_busy", f"{self._url}: {text}") from error
                raise RunError(f"the metadata store {self._url} is damaged or misused: {text}") from error
        raise AssertionError("the last attempt raises")

    def _check_server(self) -> None:
        """It answers, lets us in, and drops nothing by itself."""
        client = self._open()
        self._ask(client.ping)
        try:
            memory = client.info("memory")
        except self._errors.RedisError:
            return  # not every account may ask
        policy = str(memory.get("maxmemory_policy", ""))
        if int(memory.get("maxmemory", 0)) and policy.startswith("allkeys"):
            fix = f"this server drops keys when it is full ({policy}): set maxmemory-policy noeviction"
            raise ConfigError(_FIELD, self._url, fix)

    def _refused(self, why: str) -> ConfigError:
        fix = f"the server refuses access ({why}); set {PASSWORD_FILE} where this process runs"
        return ConfigError(_FIELD, self._url, fix)

    def _note(self, key: str, revision: int) -> None:
        self._seen[key] = max(revision, self._seen.get(key, 0))  # another thread may have been faster

    def _lost(self, key: str) -> RunError:
        return RunError(
            f"the metadata store {self._url} has lost {key}: it came back with less than it had; "
            "run it with appendonly yes, appendfsync always and maxmemory-policy noeviction"
        )
