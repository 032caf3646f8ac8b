"""Where a bearer token may be sent: to this machine, over TLS, or (if somebody allows it) over a network in the clear."""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit


def mistake(url: str, allow_plain_http: bool) -> str:
    """Why the token must not or cannot go there, and what to write instead; empty: it may."""
    try:
        parts = urlsplit(url)
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


def is_loopback(host: str) -> bool:
    """Whether what is sent there stays on this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
