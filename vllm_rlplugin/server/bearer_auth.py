"""Who may use the control endpoints: a bearer token, from an allowed network. Both are checked before a body is read.

The token is what the file of ``--rl-token-file`` holds, else the environment variable RL_COSERVE_TOKEN (which is taken out of the
environment before an engine starts), else a generated one, which is written to a file only its owner can read. Whoever replaces
the file changes the token (:mod:`orchestrator.api.bearer`). It never stands in a log, but for a generated one, which is shown
once on stderr (as Jupyter does).
"""

from __future__ import annotations

import atexit
import ipaddress
import logging
import os
import secrets
import shutil
import stat
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from orchestrator.api import ConfigError, bearer
from orchestrator.api.http import FORBIDDEN, UNAUTHORIZED
from vllm_rlplugin.options import FrontendOptions

VARIABLE = "RL_COSERVE_TOKEN"
SHORTEST = 16  # characters of a token
_FIX = f"a token is at least {SHORTEST} printable ASCII characters without spaces"
_logger = logging.getLogger("vllm.rl_coserve")
Network = ipaddress.IPv4Network | ipaddress.IPv6Network


class AccessDenied(Exception):
    """The caller may not. ``status`` is 401 or 403."""

    def __init__(self, status: int, kind: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind


class BearerGuard:
    """Checks token (see :class:`orchestrator.api.bearer.Token`) and address of one call."""

    def __init__(self, token: str, networks: tuple[Network, ...]) -> None:
        self._token = bearer.Token(token, "--rl-token-file", _FIX)
        self._networks = networks

    def check_caller(self, authorization: str | None, client: str | None) -> None:
        """``authorization``: the header. ``client``: the peer's address; None: a Unix socket. Raises AccessDenied."""
        if client is not None and not self._allows(client):
            raise AccessDenied(
                403, FORBIDDEN, f"clients at {client} may not use the control endpoints (--rl-allow-clients)"
            )
        if not self._token.admits(authorization):
            raise AccessDenied(401, UNAUTHORIZED, "give the token of this server: Authorization: Bearer TOKEN")

    def _allows(self, client: str) -> bool:
        try:
            address = ipaddress.ip_address(client.partition("%")[0])
        except ValueError:
            return False
        mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
        return any((mapped or address) in network for network in self._networks)


def find_token(options: FrontendOptions, environment: Mapping[str, str]) -> str:
    """The token to use, ``file:PATH`` for one in a file; see the module. Raises ConfigError for one that is too short or cannot
    be sent."""
    if options.token_file:
        file, field = options.token_file, "--rl-token-file"
        _checked(bearer.read_file(file, field, _FIX), field, file)
        if Path(file).stat().st_mode & (stat.S_IRGRP | stat.S_IROTH):
            _logger.warning("others can read %s, which holds the token of the control endpoints: chmod 600", file)
        return bearer.FILE + os.path.abspath(file)
    given = bearer.variable(VARIABLE, environment)
    return _checked(given, VARIABLE, "(not shown)") if given or VARIABLE in environment else _generated()


def _checked(token: str, field: str, shown: str) -> str:
    if len(token) < SHORTEST or not bearer.can_be_sent(token):
        raise ConfigError(field, shown, _FIX)
    return token


def _generated() -> str:
    token = secrets.token_urlsafe(32)
    folder = tempfile.mkdtemp(prefix="rl-coserve-")  # mode 0700
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    path = Path(folder) / "token"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        file.write(token + "\n")
    _logger.info("no token was given for the control endpoints; the generated one is in %s", path)
    sys.stderr.write(f"rl-coserve: token of the control endpoints, until this server ends: {token}\n")
    sys.stderr.flush()
    return f"{bearer.FILE}{path}"
