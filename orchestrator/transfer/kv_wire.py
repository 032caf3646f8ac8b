"""Blocks of KV over TCP: who asks proves that it has the token, who answers sends headers in msgpack and raw bytes.

Guarantees:

* Nothing is unpickled, nothing is read beyond what was announced, and nothing is announced beyond what was asked for.
* The token never travels: both sides prove it by HMAC-SHA256 over a nonce of the other side and their own header. The header of
  an answer holds the digest of every block (xxh3, 128 bits), so a block that was damaged on its way is never handed on.
* With a certificate the server speaks TLS, and says so in its place (``tls://host:port``); the client then checks chain, dates
  and host name before it says anything. In a network nobody listens or asks in the clear unless that is allowed.
* Every call of :func:`fetch_blocks` ends within its time limit, with blocks or with :class:`KvRefused`, whatever the
  other side does.
* At most ``CLIENTS`` clients have a thread of the server, each for ``limit`` seconds; who has proved nothing for
  ``PROOF_SECONDS``, or is the oldest such one when another comes and there is no room, is hung up on.

Frames: four bytes of length (big endian), then a msgpack map. Server: {nonce}. Client: {header, nonce, proof}. Server: {header,
proof}, then ``blocks`` times ``block_bytes`` raw bytes; or, where both sides have the same :class:`Carrier`, the header says
where these lie, until the client closes the connection.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgpack
import numpy as np
import xxhash
from numpy.typing import NDArray

from orchestrator.api import ConfigError, bearer
from orchestrator.api.tls import SYSTEM, Tls, check_listener, refusal
from orchestrator.api.urls import is_loopback

TLS = "tls://"  # before a place
PROTOCOL = 1
HEADER_BYTES = 4 << 20  # of a frame at most: a million token ids, or digests of 200,000 blocks
GREETING_BYTES = 256
CLIENTS = 16  # at a time; when all have the token, further ones wait
PROOF_SECONDS = 10.0
DIGEST_BYTES = 16
_LENGTH = struct.Struct(">I")

_PLAIN_FIX = "give the other side tls.certificate and tls.key, or allow_plain on a network that you trust"

Bytes = NDArray[np.uint8]


class KvRefused(Exception):
    """No KV: ``reason`` is a word (unreachable, timeout, untrusted, damaged, ...), ``detail`` says more."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason
        self.detail = detail


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


def parse_place(place: str) -> tuple[str, int]:
    """host:port, with ``tls://`` before it or not. Raises KvRefused."""
    host, _, port = place.removeprefix(TLS).rpartition(":")
    if not (host.isprintable() and port.isascii() and port.isdigit() and len(port) < 6 and 0 < int(port) < 1 << 16):
        raise KvRefused("unreachable", f"{place!r:.200} is not host:port")
    try:
        host.encode("idna")  # as the socket does
    except UnicodeError as error:
        raise KvRefused("unreachable", f"{place!r:.200}: {error}") from error
    return host.strip("[]"), int(port)


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
    deadline = time.monotonic() + ask.limit
    host, port = parse_place(place)
    secure = place.startswith(TLS)
    if not secure and not allow_plain and not is_loopback(host):
        raise KvRefused("plain", f"{place} speaks no TLS, and KV would travel unencrypted: {_PLAIN_FIX}")
    try:
        with socket.create_connection((host, port), timeout=ask.limit) as sock:
            if not secure:
                return _fetch_blocks(_Stream(sock, deadline), token, ask, block_bytes, carrier)
            sock.settimeout(max(1e-3, deadline - time.monotonic()))  # of the whole handshake
            context = context or SYSTEM.client()
            with context.wrap_socket(sock, server_hostname=host) as safe:
                return _fetch_blocks(_Stream(safe, deadline), token, ask, block_bytes, carrier)
    except TimeoutError as error:
        raise KvRefused("timeout", f"{place} did not answer within {ask.limit:g} s") from error
    except OSError as error:
        if words := refusal(error, _PLAIN_FIX):
            raise KvRefused("untrusted", f"{place}: {words}") from error
        raise KvRefused("unreachable", f"{place}: {error}") from error


def _fetch_blocks(stream: _Stream, token: str, ask: KvAsk, block_bytes: int, carrier: Carrier | None) -> KvBlocks:
    greeting = stream.read_map(GREETING_BYTES)
    theirs, ours = _bytes(greeting, "nonce"), secrets.token_bytes(16)
    header = msgpack.packb(
        {
            "protocol": PROTOCOL,
            "first": ask.first,
            "facts": dict(ask.facts),
            "tokens": np.ascontiguousarray(ask.token_ids, np.uint32).tobytes(),
            **({} if carrier is None else {"carrier": _kind(carrier)}),
        }
    )
    stream.write({"header": header, "nonce": ours, "proof": _proof(token, b"ask", theirs, header)})
    answer = stream.read_map(HEADER_BYTES)
    packed = _bytes(answer, "header")
    if not hmac.compare_digest(_bytes(answer, "proof"), _proof(token, b"answer", ours, packed)):
        raise KvRefused("unauthorized", "the other side has another token")
    found = _unpack(packed)
    if found.get("refused"):
        raise KvRefused(str(found["refused"]), str(found.get("detail", "")))
    count, expected = found.get("blocks"), _bytes(found, "digests")
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


class KvServer:
    """Hands out blocks on ``host``:``port`` (0: a free one), from threads of its own. ``answer`` is called in them. With a
    certificate in ``tls`` over TLS; without, on loopback only, or where ``allow_plain`` says so. ``token``: see
    :class:`orchestrator.api.bearer.Token`. Raises ConfigError."""

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
        if not token:
            raise ConfigError("kv_transfer.token", "", "KV is handed out to who has the token: give one")
        self._token = bearer.Token(token, "kv_transfer.token")
        self._answer, self._limit, self._carrier = answer, limit, carrier
        self._context = check_listener(host, tls, "kv_transfer.host", allow_plain)
        try:
            self._socket = socket.create_server((host, port), backlog=64)
        except OSError as error:
            raise ConfigError("kv_transfer.host", f"{host}:{port}", f"cannot listen there: {error}") from error
        self._host = host
        self._closed = threading.Event()
        self._slots = threading.Semaphore(CLIENTS)
        self._unproved: dict[int, socket.socket] = {}  # by thread, the oldest first
        self._thread = threading.Thread(target=self._accept, name="kv server", daemon=True)
        self._thread.start()

    @property
    def place(self) -> str:
        """host:port, with ``tls://`` before it where TLS is spoken."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"{TLS if self._context else ''}{host}:{self._socket.getsockname()[1]}"

    def close(self) -> None:
        """Take no more clients. Idempotent."""
        if not self._closed.is_set():
            self._closed.set()
            try:
                self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread
            finally:
                self._socket.close()
                self._thread.join(5.0)

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                client, _ = self._socket.accept()
            except OSError:
                if self._closed.is_set():
                    return
                time.sleep(0.05)  # out of file descriptors, or the client was gone already
                continue
            if not self._slots.acquire(blocking=False):
                self._make_room()
                self._slots.acquire()
            threading.Thread(target=self._serve, args=(client,), name="kv client", daemon=True).start()

    def _make_room(self) -> None:
        """Hang up on the client that has been longest without a proof, if there is one."""
        for thread in list(self._unproved):
            if (oldest := self._unproved.pop(thread, None)) is not None:
                with suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)  # its thread reads the end
                return

    def _serve(self, client: socket.socket) -> None:
        limit, thread = min(self._limit, PROOF_SECONDS), threading.get_ident()
        deadline = time.monotonic() + limit
        try:
            with client:
                self._unproved[thread] = client
                if self._context is None:
                    self._talk(_Stream(client, deadline))
                    return
                client.settimeout(limit)  # of the whole handshake
                with self._context.wrap_socket(client, server_side=True, do_handshake_on_connect=False) as safe:
                    self._unproved[thread] = safe
                    safe.do_handshake()
                    self._talk(_Stream(safe, deadline))
        except (OSError, KvRefused):
            return  # a client that goes away or talks nonsense is told nothing
        finally:
            self._unproved.pop(thread, None)
            self._slots.release()

    def _talk(self, stream: _Stream) -> None:
        ours = secrets.token_bytes(16)
        stream.write({"nonce": ours})
        message = stream.read_map(HEADER_BYTES)
        packed, theirs = _bytes(message, "header"), _bytes(message, "nonce")
        shown, tokens = _bytes(message, "proof"), self._token.accepted()
        token = next((one for one in tokens if hmac.compare_digest(shown, _proof(one, b"ask", ours, packed))), "")
        if not token:
            raise KvRefused("unauthorized")
        self._unproved.pop(threading.get_ident(), None)
        stream.deadline = time.monotonic() + self._limit
        with ExitStack() as stack:  # what a carrier has to offer lies there until this ends
            payload = np.empty((0, 0), np.uint8)
            answer: dict[str, Any]
            try:
                asked = _unpack(packed)
                found = self._answer(_asked(asked, self._limit))
                payload = np.ascontiguousarray(found.payload)
                answer = {
                    "facts": dict(found.facts),
                    "blocks": len(payload),
                    "block_bytes": payload.shape[1],
                    "digests": block_digests(payload),
                }
                if self._carrier is not None and len(payload) and asked.get("carrier") == _kind(self._carrier):
                    answer["carrier"] = dict(stack.enter_context(self._carrier.lend(payload)))
            except KvRefused as refusal:
                answer = {"refused": refusal.reason, "detail": refusal.detail[:500]}
            header = msgpack.packb(answer)
            stream.write({"header": header, "proof": _proof(token, b"answer", theirs, header)})
            if "carrier" in answer:
                stream.until_closed()
            elif "blocks" in answer and len(payload):
                stream.send(payload.reshape(-1).data)


def _kind(carrier: Carrier) -> list[str]:
    return [carrier.name, carrier.protocol]


def _asked(header: Mapping[str, Any], limit: float) -> KvAsk:
    if header.get("protocol") != PROTOCOL:
        raise KvRefused("protocol", f"{header.get('protocol')!r} asked for, {PROTOCOL} is spoken here")
    first, facts, tokens = header.get("first"), header.get("facts"), _bytes(header, "tokens")
    if type(first) is not int or first < 0 or not isinstance(facts, dict) or not tokens or len(tokens) % 4:
        raise KvRefused("malformed", "first, facts or tokens")
    return KvAsk(np.frombuffer(tokens, np.uint32), first, facts, limit)


def _proof(token: str, role: bytes, nonce: bytes, header: bytes) -> bytes:
    return hmac.new(token.encode(), role + nonce + header, hashlib.sha256).digest()


def _unpack(data: bytes) -> dict[str, Any]:
    try:
        found = msgpack.unpackb(data)
    except (ValueError, msgpack.UnpackException) as error:
        raise KvRefused("malformed", "no msgpack") from error
    if not isinstance(found, dict):
        raise KvRefused("malformed", "no map")
    return found


def _bytes(values: Mapping[str, Any], name: str) -> bytes:
    value = values.get(name)
    if not isinstance(value, bytes):
        raise KvRefused("malformed", f"no {name}")
    return value


class _Stream:
    """A socket with one deadline for all that is read and written. Raises TimeoutError, OSError, KvRefused."""

    def __init__(self, sock: socket.socket, deadline: float) -> None:
        self._socket, self.deadline = sock, deadline
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    @property
    def left(self) -> float:
        """Seconds."""
        return self.deadline - time.monotonic()

    def _arm(self) -> None:
        left = self.left
        if left <= 0:
            raise TimeoutError
        self._socket.settimeout(left)

    def until_closed(self) -> None:
        """By the other side, which says nothing more."""
        self._arm()
        self._socket.recv(1)

    def write(self, values: Mapping[str, Any]) -> None:
        body = msgpack.packb(dict(values))
        self.send(memoryview(_LENGTH.pack(len(body)) + body))

    def send(self, data: memoryview) -> None:
        while data:
            self._arm()
            data = data[self._socket.send(data[: 1 << 20]) :]

    def read_into(self, buffer: memoryview) -> None:
        while buffer:
            self._arm()
            count = self._socket.recv_into(buffer)
            if not count:
                raise KvRefused("unreachable", "the other side closed the connection half-way")
            buffer = buffer[count:]

    def read_map(self, most: int) -> dict[str, Any]:
        size = bytearray(_LENGTH.size)
        self.read_into(memoryview(size))
        (length,) = _LENGTH.unpack(size)
        if length > most:
            raise KvRefused("malformed", f"a header of {length} bytes")
        body = bytearray(length)
        self.read_into(memoryview(body))
        return _unpack(bytes(body))
