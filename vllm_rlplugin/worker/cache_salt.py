"""The weight version in a request's cache salt, by which KV of other weights can never be hit. Standard library only.

vLLM hashes ``cache_salt`` into a request's first block and chains all later blocks to it, so equal tokens under another
version have other hashes. The user's own salt stays part of it: requests that were kept apart stay apart.
"""

from __future__ import annotations

import re

_SALTED = re.compile(r"rl-coserve:(?:h\d+)?v\d+(?:\|(?P<user>.*))?", re.DOTALL)


def make_salt(user_salt: str | None, version: int, history: int = 0) -> str | None:
    """The salt of a request under ``version`` of a ``history`` (in each of which versions count anew), from the user's own
    (or none). Two pairs of history and version never share a salt.

    The version that an engine starts with before any update is 0 of history 0, and leaves the salt as it is: until the
    first update blocks are hashed as stock vLLM does. Raises ValueError for a negative version or history.
    """
    if version < 0 or history < 0:
        raise ValueError(f"weight versions and histories count from 0, not {version} of {history}")
    if version == 0 and history == 0:
        return user_salt
    own = f"rl-coserve:h{history}v{version}" if history else f"rl-coserve:v{version}"
    return f"{own}|{user_salt}" if user_salt else own


def user_salt_of(salt: str | None) -> str | None:
    """The user's own salt again, whatever version :func:`make_salt` put before it."""
    match = _SALTED.fullmatch(salt) if salt else None
    return salt if match is None else match["user"]
