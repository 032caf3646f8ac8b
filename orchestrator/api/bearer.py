"""Bearer tokens of all our servers: the one place that reads them from a header or a file, and compares them.

Guarantees: what is compared are SHA-256 digests, in constant time, so that an answer's time tells neither where two tokens
differ nor how long the right one is; a server can keep the digest alone; an empty token is never right; a header may hold any
text, of any length; no message has a token in it.
"""

from __future__ import annotations

import hashlib
import hmac
from pathlib import Path

from orchestrator.api.errors import ConfigError

_SEAL = "sha256:"
LONGEST = 8192  # characters of a header: what HTTP servers take for a line


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
