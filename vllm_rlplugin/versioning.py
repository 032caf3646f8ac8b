"""The weight version in a request's cache salt, by which KV of other weights can never be hit. Standard library only.

vLLM hashes ``cache_salt`` into a request's first block and chains all later blocks to it, so equal tokens under another
version have other hashes. The user's own salt stays part of it: requests that were kept apart stay apart.
"""

from __future__ import annotations

import re

_SALTED = re.compile(r"rl-coserve:v\d+(?:\|(?P<user>.*))?", re.DOTALL)


def salted(user_salt: str | None, version: int) -> str | None:
    """The salt of a request under ``version``, from the user's own (or none).

    The version that an engine starts with before any update is 0, and leaves the salt as it is: until the first update
    blocks are hashed as stock vLLM does. Raises ValueError for a negative version.
    """
    if version < 0:
        raise ValueError(f"weight versions count from 0, not {version}")
    if version == 0:
        return user_salt
    return f"rl-coserve:v{version}|{user_salt}" if user_salt else f"rl-coserve:v{version}"


def user_part(salt: str | None) -> str | None:
    """The user's own salt again, whatever version :func:`salted` put before it."""
    match = _SALTED.fullmatch(salt) if salt else None
    return salt if match is None else match["user"]
