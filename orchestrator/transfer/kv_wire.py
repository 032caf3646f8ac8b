"""Blocks of KV over TCP: who asks proves that it has the token, who answers sends headers in msgpack and raw bytes.

Guarantees, beside those of the connection (:mod:`orchestrator.transfer.proven_link`):

* Nothing is announced beyond what was asked for.
* The header of an answer holds the digest of every block (xxh3, 128 bits), so a block that was damaged on its way is never
  handed on.
* Every call of :func:`fetch_blocks` ends within its time limit, with blocks or with :class:`KvRefused`, whatever the
  other side does.
* At most ``CLIENTS`` clients have a thread of the server, each for ``limit`` seconds.

An answer is ``blocks`` times ``block_bytes`` raw bytes after its header; or, where both sides have the same :class:`Carrier`,
the header says where these lie, until the client closes the connection.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import xxhash
from numpy.typing import NDArray

import orchestrator.transfer.proven_link as proven_link
from orchestrator.api.tls import SYSTEM, Tls
from orchestrator.transfer.proven_link import FramedStream, LinkRefused, LinkServer, ProvenAsk

PROTOCOL = 1
CLIENTS = 16  # at a time; when all have the token, further ones wait
DIGEST_BYTES = 16

Bytes = NDArray[np.uint8]


class KvRefused(LinkRefused):
    """No KV: ``reason`` is a word (unreachable, timeout, untrusted, damaged, ...), ``detail`` says more."""


@dataclass(frozen=True, slots=True)
class KvAsk:
    """What is wanted: KV of ``token_ids`` (uint32) from block ``first`` on. ``facts`` must be the same on both sides: they say
    which weights made the KV, and how it is laid out."""

    token_ids: NDArray[np.uint32]
    first: int
    facts: Mapping[str, Any]
    limit: float = 10.0  # seconds


@dataclass(frozen=True, slots=True)
class KvBlocks:
    """``payload``: uint8 of shape (blocks, bytes of a block), from block ``first`` on. ``carrier``: how it came."""

    first: int
    payload: Bytes
    facts: Mapping[str, Any] = field(default_factory=dict)
    carrier: str = "tcp"


Answer = Callable[[KvAsk], KvBlocks]  # raises KvRefused


class Carrier(Protocol):
    """Another way for the payload (:mod:`orchestrator.transfer.kv_mooncake`); the sides use it where ``name`` and ``protocol``
    are equal. All methods are called in threads."""

    name: str
    protocol: str

    def lend(self, payload: Bytes) -> AbstractContextManager[Mapping[str, Any]]:
        """What the other side's :meth:`read` needs; while the context lasts. Raises KvRefused."""
        ...

    def read(self, offer: Mapping[str, Any], size: int, limit: float) -> Bytes:
        """So many bytes, in memory of the caller's own. Raises KvRefused, and TimeoutError after ``limit`` seconds."""
        ...

    def close(self) -> None:
        """Idempotent."""
        ...


def block_digests(payload: Bytes) -> bytes:
    """Of each row, one after the other."""
    return b"".join(xxhash.xxh3_128(row).digest() for row in payload)


def fetch_blocks(
    place: str,
    token: str,
    ask: KvAsk,
    block_bytes: int,
    carrier: Carrier | None = None,
    context: ssl.SSLContext | None = None,
    allow_plain: bool = False,
) -> KvBlocks:
    """Ask the server at ``place``. ``block_bytes``: of a block, as the asker lays it out. ``carrier``: for the payload, where the
    server has such a one too. ``context``: of a client, for a server with TLS (None: it trusts the system's authorities);
    ``allow_plain``: a server of a network may have none. Raises KvRefused, nothing else."""
    try:
        return proven_link.connect(
            place,
            ask.limit,
            lambda stream: _fetch_blocks(stream, token, ask, block_bytes, carrier),
            context,
            allow_plain,
        )
    except LinkRefused as error:
        raise KvRefused(error.reason, error.detail) from error


def _fetch_blocks(stream: FramedStream, token: str, ask: KvAsk, block_bytes: int, carrier: Carrier | None) -> KvBlocks:
    found = stream.ask(
        token,
        {
            "protocol": PROTOCOL,
            "first": ask.first,
            "facts": dict(ask.facts),
            "tokens": np.ascontiguousarray(ask.token_ids, np.uint32).tobytes(),
            **({} if carrier is None else {"carrier": _kind(carrier)}),
        },
    )
    count, expected = found.get("blocks"), proven_link.bytes_of(found, "digests")
    most = len(ask.token_ids)  # a block holds one token at least
    if type(count) is not int or not 0 <= count <= most or len(expected) != count * DIGEST_BYTES:
        raise KvRefused("malformed", f"{count!r} blocks, {len(expected)} bytes of digests")
    if found.get("block_bytes") != block_bytes or found.get("facts") != dict(ask.facts):
        raise KvRefused("differs", f"blocks of {found.get('block_bytes')!r} bytes; {block_bytes} are expected")
    offer = found.get("carrier")
    if carrier is not None and isinstance(offer, dict) and count:
        payload = carrier.read(offer, count * block_bytes, stream.left).reshape(count, block_bytes)
    else:
        payload = np.empty((count, block_bytes), np.uint8)
        stream.read_into(payload.reshape(-1).data if count else memoryview(b""))
    if block_digests(payload) != expected:
        raise KvRefused("damaged", "a block is not what was sent")
    return KvBlocks(ask.first, payload, ask.facts, carrier.name if carrier is not None and offer else "tcp")


class KvServer(LinkServer):
    """Hands out blocks on ``host``:``port``, see :class:`orchestrator.transfer.proven_link.LinkServer`. ``answer`` is called in
    threads. Raises ConfigError."""

    def __init__(
        self,
        answer: Answer,
        token: str,
        host: str = "127.0.0.1",
        port: int = 0,
        limit: float = 30.0,
        carrier: Carrier | None = None,
        tls: Tls = SYSTEM,
        allow_plain: bool = False,
    ) -> None:
        self._blocks, self._carrier, self._seconds = answer, carrier, limit
        super().__init__(
            self._tell_blocks,
            token,
            host,
            port,
            field="kv_transfer",
            clients=CLIENTS,
            limit=limit,
            tls=tls,
            allow_plain=allow_plain,
        )

    def _tell_blocks(self, ask: ProvenAsk) -> None:
        with ExitStack() as stack:  # what a carrier has to offer lies there until this ends
            payload = np.empty((0, 0), np.uint8)
            answer: dict[str, Any]
            try:
                asked = proven_link.unpack_map(ask.header)
                found = self._blocks(_asked(asked, self._seconds))
                payload = np.ascontiguousarray(found.payload)
                answer = {
                    "facts": dict(found.facts),
                    "blocks": len(payload),
                    "block_bytes": payload.shape[1],
                    "digests": block_digests(payload),
                }
                if self._carrier is not None and len(payload) and asked.get("carrier") == _kind(self._carrier):
                    answer["carrier"] = dict(stack.enter_context(self._carrier.lend(payload)))
            except LinkRefused as refusal:
                answer = {"refused": refusal.reason, "detail": refusal.detail[:500]}
            ask.reply(answer)
            if "carrier" in answer:
                ask.stream.until_closed()
            elif "blocks" in answer and len(payload):
                ask.stream.send(payload.reshape(-1).data)


def _kind(carrier: Carrier) -> list[str]:
    return [carrier.name, carrier.protocol]


def _asked(header: Mapping[str, Any], limit: float) -> KvAsk:
    if header.get("protocol") != PROTOCOL:
        raise KvRefused("protocol", f"{header.get('protocol')!r} asked for, {PROTOCOL} is spoken here")
    first, facts, tokens = header.get("first"), header.get("facts"), proven_link.bytes_of(header, "tokens")
    if type(first) is not int or first < 0 or not isinstance(facts, dict) or not tokens or len(tokens) % 4:
        raise KvRefused("malformed", "first, facts or tokens")
    return KvAsk(np.frombuffer(tokens, np.uint32), first, facts, limit)
