"""Bearer tokens of all our servers: the one place that reads them from a header or a file, and compares them.

Guarantees: what is compared are SHA-256 digests, in constant time, so that an answer's time tells neither where two tokens
differ nor how long the right one is; a server can keep the digest alone; an empty token is never right; a header may hold any
text, of any length; no message has a token in it. A token is changed by replacing its file, without a restart: who shows it sends
the new one from then on, who asks for it takes both for :data:`OVERLAP` seconds. One that came in an environment variable is
there no more once it was taken: neither a child nor ``/proc/PID/environ`` has it.

Wherever a token is given it may be ``file:PATH`` instead: what that file holds now. For a server it may be ``sha256:HEX``.
"""

from __future__ import annotations

import ctypes
import hashlib
import hmac
import logging
import os
import time
from collections.abc import Iterable, Mapping
from math import inf
from pathlib import Path

from orchestrator.api.errors import ConfigError

FILE = "file:"
_SEAL = "sha256:"
LONGEST = 8192  # characters of a header: what HTTP servers take for a line
OVERLAP = 300.0  # seconds after a file was replaced, by its own change time, in which the token of before opens too
# Where a run or a server looks for tokens of others; those of our own processes are in none.
VARIABLES = ("RL_COSERVE_TOKEN", "RL_COSERVE_REWARD_TOKEN", "RL_COSERVE_TOOLS_TOKEN", "RL_COSERVE_JUDGE_TOKEN")
_logger = logging.getLogger("rl-coserve")
_taken: dict[str, str] = {}


def digest_of(token: str) -> str:
    """SHA-256 (hex) of a token. One of 256 random bits cannot be found from it."""
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).hexdigest()


def sealed(token: str) -> str:
    """What a server is given instead of the token: enough to know it, not to call with it."""
    return f"{_SEAL}{digest_of(token)}"


def digest_in(given: str) -> str:
    """The digest of what a server was given: a token, or one that is :func:`sealed`. Empty: nothing was."""
    digest = given.removeprefix(_SEAL)
    if given.startswith(_SEAL) and len(digest) == 64:
        return digest
    return digest_of(given) if given else ""


def matches(given: str, digest: str) -> bool:
    """Whether ``given``, from anywhere, is the token of this digest."""
    return bool(given) and hmac.compare_digest(digest_of(given), digest)


def token_of(authorization: str | None) -> str:
    """The token of an ``Authorization: Bearer TOKEN`` header (RFC 6750; the scheme in any case); empty: it is none."""
    header = authorization or ""
    scheme, _, token = header.partition(" ")
    return token.strip(" \t") if scheme.lower() == "bearer" and len(header) <= LONGEST else ""


def admits(authorization: str | None, digest: str) -> bool:
    """Whether this header carries the token of this digest."""
    return matches(token_of(authorization), digest)


def can_be_sent(token: str) -> bool:
    """Whether it can stand in a header: printable ASCII without spaces."""
    return bool(token) and token.isascii() and token.isprintable() and " " not in token


def read_file(file: str, field: str, fix: str) -> str:
    """What a token file holds, without the space around it. Raises ConfigError for one that cannot be read, or holds nothing
    that can be sent."""
    try:
        token = Path(file).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "no UTF-8 text"
        raise ConfigError(field, file, f"cannot be read ({why}); {fix}") from error
    if not can_be_sent(token):
        raise ConfigError(field, file, f"holds no token; {fix}")
    return token


class Token:
    """A token as it is now. ``given``: itself, ``file:PATH``, or for a server also ``sha256:HEX``; a file is looked at before
    each use. Where what replaced it cannot be read, or is no token, that is said once, and the one of before holds. Raises
    ConfigError when the file is wrong from the start."""

    def __init__(self, given: str, field: str = "token", fix: str = "give a readable file that holds a token") -> None:
        self._file, self._field, self._fix = given[len(FILE) :] if given.startswith(FILE) else "", field, fix
        self._seen = self._stamp()
        token = read_file(self._file, field, fix) if self._file else given
        # Until when each opens, the present one first.
        self._open: tuple[tuple[str, float], ...] = ((token, inf),) if token else ()

    def current(self) -> str:
        """What to show; empty: there is none."""
        found = self.accepted()
        return found[0] if found else ""

    def accepted(self) -> tuple[str, ...]:
        """What may be shown, the present one first."""
        stamp = self._stamp()
        if stamp != self._seen:
            self._seen = stamp
            self._read_again()
        now = time.time() if len(self._open) > 1 else 0.0
        return tuple(token for token, until in self._open if now < until)

    def matches(self, given: str) -> bool:
        """Whether it is one of these."""
        return any(matches(given, digest_in(token)) for token in self.accepted())

    def admits(self, authorization: str | None) -> bool:
        """Whether this header carries one of these."""
        return self.matches(token_of(authorization))

    def header(self) -> dict[str, str]:
        """To send it."""
        token = self.current()
        return {"Authorization": f"Bearer {token}"} if token else {}

    def _stamp(self) -> tuple[int, ...]:
        """Another one: the file was replaced, or written."""
        try:
            found = os.stat(self._file) if self._file else None
        except OSError:
            return ()
        return () if found is None else (found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)

    def _read_again(self) -> None:
        try:
            token, changed = read_file(self._file, self._field, self._fix), os.stat(self._file).st_ctime
        except (ConfigError, OSError) as error:
            _logger.warning("%s; the token of before holds", error)
            return
        if token != self._open[0][0]:
            before = ((old, min(until, changed + OVERLAP)) for old, until in self._open if old != token)
            self._open = ((token, inf), *before)


def take_variables(names: Iterable[str] = VARIABLES) -> None:
    """Move what these environment variables hold out of this process's environment, where a child or the kernel's copy would
    show it; :func:`variable` has it from then on."""
    libc = ctypes.CDLL(None)
    libc.getenv.restype = ctypes.c_void_p
    for name in names:
        if value := os.environ.get(name, ""):
            ctypes.memset(libc.getenv(os.fsencode(name)), 0, len(os.fsencode(value)))
            del os.environ[name]
            _taken[name] = value
        else:
            _taken.pop(name, None)


def variable(name: str, environment: Mapping[str, str] = os.environ) -> str:
    """What it holds, or held before it was taken; empty: nothing."""
    return environment.get(name, "").strip() or _taken.get(name, "").strip()
