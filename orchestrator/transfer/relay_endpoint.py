"""Where the weights of one job travel: the one record that crosses from the orchestrator into the engines.

A :class:`RelayEndpoint` is plain data (``to_dict`` / ``from_dict``, JSON- and msgpack-safe), checked when it is made. It
says nothing about the epoch: that is in the metadata store, because it changes while the endpoint does not.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from orchestrator.api import ConfigError, MetadataStore, Relay, urls
from orchestrator.transfer.memory_relay import MemoryMetadata, MemoryRelay
from orchestrator.transfer.rdma_devices import PROTOCOLS

MIB = 1 << 20
SMALLEST_BUCKET_BYTES = 1024
_JOB = re.compile(r"[A-Za-z0-9._-]{1,128}")  # goes into object keys, whose separator is "/"
_URL = re.compile(r"[a-z][a-z0-9+.-]*://.+")
_KEY = re.compile(r"[0-9a-f]{64}")
_PLACE = re.compile(r"(tls://)?[^\s/]+:\d{1,5}")
_MASTER = re.compile(r"[^\s:/]+:\d{1,5}")


@dataclass(frozen=True, slots=True)
class RelayEndpoint:
    """How to reach the relay of one job.

    ``kind`` "mooncake": ``master`` is "host:port" of its mooncake_master. ``kind`` "fsspec": it is the URL of a folder or
    prefix (file:///mnt/shared/relay, s3://bucket/relay) that all processes reach. ``kind`` "memory": it is any name; all
    endpoints of one process with the same name share one in-memory relay. ``metadata`` is the path of a SQLite file, the
    URL of a Redis server (without a password: each process has that in its environment), or "memory" (same rule).
    ``protocol`` and ``device``: what Mooncake carries objects by, "tcp" or "rdma", and its devices; empty: it chooses. ``host``
    is the address that a process is reached at; empty: that of the interface which leads to the master, on whatever machine
    the process is. ``segment_bytes`` is what a publisher lends to the store, each of its ranks: room for
    ``keep_versions + 1`` versions, or 0 when other processes lend it. Subscribers lend nothing. ``snapshot_every``: versions
    travel as differences, with a full snapshot after so many; 0: always whole. ``encoding`` "auto": whole all the same where that
    takes less time (:mod:`orchestrator.transfer.encoding_choice`). ``codec_threads``: processor threads of each rank that encode
    and apply differences; more help where the link is faster than one core scans (4 to 5 GB/s).
    ``verify_key``: the Ed25519 public key of the job, in hexadecimal; then versions are signed, and nothing else is taken
    (:mod:`orchestrator.transfer.manifest_signing`); empty: they are not. ``cache``: host:port (tls://host:port) of the cache of
    the reader's site (:mod:`orchestrator.transfer.site_cache`), with ``cache_authority`` the PEM file of whom it trusts there.
    """

    job: str
    kind: str = "mooncake"
    master: str = ""
    metadata: str = "memory"
    protocol: str = "tcp"
    device: str = ""
    host: str = ""
    segment_bytes: int = 256 * MIB
    bucket_bytes: int = 64 * MIB
    keep_versions: int = 2
    snapshot_every: int = 0
    encoding: str = "difference"
    codec_threads: int = 1
    verify_key: str = ""
    cache: str = ""
    cache_authority: str = ""

    def __post_init__(self) -> None:
        for field in fields(self):
            if type(getattr(self, field.name)).__name__ != field.type:
                fix = "must be an integer" if field.type == "int" else "must be a string"
                raise ConfigError(f"relay.{field.name}", getattr(self, field.name), fix)
        url, host = (
            "write it as a URL, for instance file:///mnt/shared/relay",
            "write it as host:port of the mooncake_master",
        )
        store = "give the path of a SQLite file, the URL of a Redis server, or 'memory'"
        key = "is not an Ed25519 public key in hexadecimal (64 digits)"
        for name, right, fix in (
            ("job", _JOB.fullmatch(self.job), "use 1 to 128 of A-Z a-z 0-9 . _ -"),
            ("kind", self.kind in ("mooncake", "fsspec", "memory"), "must be 'mooncake', 'fsspec' or 'memory'"),
            ("master", self.kind != "mooncake" or _MASTER.fullmatch(self.master), host),
            ("master", self.kind != "fsspec" or _URL.fullmatch(self.master), url),
            ("protocol", self.protocol in PROTOCOLS, f"must be {' or '.join(map(repr, PROTOCOLS))}"),
            ("metadata", self.metadata, store),
            ("segment_bytes", self.segment_bytes >= 0, "must be 0 (lend nothing) or more"),
            ("bucket_bytes", self.bucket_bytes >= SMALLEST_BUCKET_BYTES, f"must be at least {SMALLEST_BUCKET_BYTES}"),
            ("keep_versions", self.keep_versions >= 1, "must be at least 1"),
            ("snapshot_every", self.snapshot_every >= 0, "must be 0 (no differences) or more"),
            ("encoding", self.encoding in ("auto", "difference"), "must be 'auto' or 'difference'"),
            ("codec_threads", self.codec_threads >= 1, "must be 1 or more"),
            (
                "cache",
                not self.cache or _PLACE.fullmatch(self.cache),
                "write it as host:port, with tls:// before it for TLS",
            ),
            ("verify_key", not self.verify_key or _KEY.fullmatch(self.verify_key), key),
        ):
            if not right:
                raise ConfigError(f"relay.{name}", getattr(self, name), fix)
        if "://" in self.metadata and (mistake := urls.redis_mistake(self.metadata, allow_plain=True)):
            raise ConfigError("relay.metadata", urls.without_password(self.metadata), mistake)

    def to_dict(self) -> dict[str, str | int]:
        """A plain dictionary; ``from_dict`` gives the same endpoint back. What is empty by default and empty here is left out:
        a server, engine or cache of an earlier version, which may not know that key, understands the rest."""
        said = [(field, getattr(self, field.name)) for field in fields(self)]
        return {field.name: value for field, value in said if not value == field.default == ""}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> RelayEndpoint:
        """Strict: an unknown or missing key, or a wrong type, is a ConfigError."""
        known = [field.name for field in fields(cls)]
        for key in data:
            if key not in known:
                raise ConfigError(f"relay.{key}", data[key], f"no such key; known keys: {', '.join(known)}")
        if "job" not in data:
            raise ConfigError("relay.job", None, "is required")
        return cls(**data)


def open_relay(endpoint: RelayEndpoint, *, segment_bytes: int = 0) -> Relay:
    """Connect to the relay, lending it ``segment_bytes`` of this process's memory (0: pure client); through the cache of the
    site, where the endpoint names one.

    Raises ConfigError when Mooncake or fsspec cannot be loaded or the cache refuses the token, RelayError when the master does
    not answer.
    """
    if endpoint.cache:
        from orchestrator.transfer.site_relay import SiteRelay

        itself = replace(endpoint, cache="", cache_authority="")
        relay = open_relay(itself, segment_bytes=segment_bytes)
        try:
            return SiteRelay(relay, endpoint.cache, itself.to_dict(), endpoint.cache_authority)
        except BaseException:
            relay.close()
            raise
    if endpoint.kind == "memory":
        return MemoryRelay.shared(endpoint.master)
    if endpoint.kind == "fsspec":
        from orchestrator.transfer.filesystem_relay import FsspecRelay

        return FsspecRelay(endpoint.master)
    from orchestrator.transfer.mooncake_relay import MooncakeRelay  # lazily: only who uses it needs a Mooncake variant

    carried = {"protocol": endpoint.protocol, "device": endpoint.device}
    return MooncakeRelay(endpoint.master, host=endpoint.host, segment_bytes=segment_bytes, **carried)


def open_metadata(endpoint: RelayEndpoint) -> MetadataStore:
    """Open the metadata store. Raises ConfigError when the file or server cannot be used, RelayError when it is away."""
    if endpoint.metadata == "memory":
        return MemoryMetadata.shared(endpoint.master)
    if "://" in endpoint.metadata:
        from orchestrator.transfer.redis_metadata import RedisMetadata  # lazily: only who uses it needs the client

        return RedisMetadata(endpoint.metadata)
    from orchestrator.transfer.sqlite_metadata import SqliteMetadata

    return SqliteMetadata(endpoint.metadata)
