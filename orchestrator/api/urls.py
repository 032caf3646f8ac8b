"""Where a bearer token or a password may be sent: to this machine, over TLS, or (if somebody allows it) in the clear."""

from __future__ import annotations

import ipaddress
import re
from urllib.parse import SplitResult, urlsplit

ADDRESS = "write it as http://host:port/path or https://..."


def split(url: str) -> SplitResult:
    """Raises ValueError also for a URL with a space or a control character: ``urlsplit`` takes such out, others may not, and then
    two readers see two hosts."""
    if any(character <= " " or character == "\x7f" for character in url):
        raise ValueError("it has a space or a control character in it")
    return urlsplit(url)


def mistake(url: str, allow_plain_http: bool) -> str:
    """Why the token must not or cannot go there, and what to write instead; empty: it may."""
    try:
        parts = split(url)
        host, _ = parts.hostname, parts.port
    except ValueError as error:
        return f"{error}; write it as http://host:port or https://host:port"
    if parts.scheme not in ("http", "https") or not host:
        return "write it as http://host:port or https://host:port"
    if parts.username is not None or parts.query or parts.fragment:
        return "write it as http://host:port or https://host:port, without a password or a query"
    if parts.scheme == "http" and not allow_plain_http and not is_loopback(host):
        return "the token would travel unencrypted: use https, or allow_plain_http on a network that you trust"
    return ""


def is_address(url: str) -> bool:
    """Whether it can be called: ``http://host:port/path`` or https."""
    try:
        parts = split(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # brackets that do not close, a port beyond all ports
        return False


def plain_mistake(url: str, allow_plain_http: bool) -> str:
    """Why what a run sends (trajectories, perhaps a token) cannot go there, or must not go unencrypted; empty: it may."""
    if not is_address(url):
        return ADDRESS
    parts = split(url)
    if parts.scheme == "http" and not allow_plain_http and not is_loopback(parts.hostname or ""):
        return "what is sent there would travel unencrypted: use https, or tls.allow_plain_http on a network that you trust"
    return ""


def redis_mistake(url: str, allow_plain: bool) -> str:
    """The same for the URL of a Redis server, which holds no password: configs are kept with the run."""
    form = "write it as redis://[user@]host[:port][/database], or rediss:// for TLS"
    try:
        parts = split(url)
        host, _ = parts.hostname, parts.port
    except ValueError as error:
        return f"{error}; {form}"
    if parts.scheme not in ("redis", "rediss") or not host or parts.query or parts.fragment:
        return form
    if parts.password is not None:
        return (
            "a password must not be in a URL that is written to files: put it in a file, and the file's path in "
            "relay.metadata_password_file"
        )
    if not re.fullmatch(r"(/\d{0,3})?", parts.path):
        return f"the database is a number; {form}"
    if parts.scheme == "redis" and not allow_plain and not is_loopback(host):
        return (
            "what is sent there would travel unencrypted: use rediss, or relay.metadata_allow_plain on a network that "
            "you trust"
        )
    return ""


def without_password(url: str) -> str:
    """For messages."""
    return re.sub(r"(//[^/@:]*):[^@]*@", r"\1:***@", url)


def is_loopback(host: str) -> bool:
    """Whether what is sent there stays on this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
