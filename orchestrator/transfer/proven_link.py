"""One question and its answer over TCP, by two sides that prove to each other that they have one token.

Guarantees:

* Nothing is unpickled, nothing is read beyond what was announced, and every exchange ends at its deadline.
* The token never travels: both sides prove it by HMAC-SHA256 over a nonce of the other side and their own header. A nonce has
  one length: else who asks could be had to prove, by a longer one, the beginning of a header that it never said.
* With a certificate the server speaks TLS, and says so in its place (``tls://host:port``); the client then checks chain, dates
  and host name before it says anything. In a network nobody listens or asks in the clear unless that is allowed.
* At most ``clients`` clients have a thread of the server; who has proved nothing for ``PROOF_SECONDS``, or is the oldest such
  one when another comes and there is no room, is hung up on.

Frames: four bytes of length (big endian), then a msgpack map. Server: {nonce}. Client: {header, nonce, proof}. Server: {header,
proof}, then whatever its header announced.
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
from contextlib import suppress
from typing import Any, TypeVar

import msgpack

from orchestrator.api import ConfigError, bearer
from orchestrator.api.tls import SYSTEM, Tls, check_listener, refusal
from orchestrator.api.urls import is_loopback

TLS = "tls://"  # before a place
HEADER_BYTES = 4 << 20  # of a frame at most: a million token ids, or digests of 200,000 blocks
GREETING_BYTES = 256
NONCE_BYTES = 16
PROOF_SECONDS = 10.0
SEND_BYTES = 1 << 20  # in one call
_LENGTH = struct.Struct(">I")
_PLAIN_FIX = "give the other side tls.certificate and tls.key, or allow_plain on a network that you trust"

Answer = TypeVar("Answer")


class LinkRefused(Exception):
    """No answer: ``reason`` is a word (unreachable, timeout, untrusted, unauthorized, ...), ``detail`` says more."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason
        self.detail = detail


class FramedStream:
    """A socket with one deadline for all that is read and written. Raises TimeoutError, OSError, LinkRefused."""

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
            data = data[self._socket.send(data[:SEND_BYTES]) :]

    def read_into(self, buffer: memoryview) -> None:
        while buffer:
            self._arm()
            count = self._socket.recv_into(buffer)
            if not count:
                raise LinkRefused("unreachable", "the other side closed the connection half-way")
            buffer = buffer[count:]

    def read_map(self, most: int) -> dict[str, Any]:
        size = bytearray(_LENGTH.size)
        self.read_into(memoryview(size))
        (length,) = _LENGTH.unpack(size)
        if length > most:
            raise LinkRefused("malformed", f"a header of {length} bytes")
        body = bytearray(length)
        self.read_into(memoryview(body))
        return unpack_map(bytes(body))

    def ask(self, token: str, header: Mapping[str, Any]) -> dict[str, Any]:
        """The client's side: the header of the answer, from who has the token. A refusal is raised as what it is."""
        theirs, ours = nonce_of(self.read_map(GREETING_BYTES)), secrets.token_bytes(NONCE_BYTES)
        packed: bytes = msgpack.packb(dict(header))
        self.write({"header": packed, "nonce": ours, "proof": prove(token, b"ask", theirs, packed)})
        try:
            answer = self.read_map(HEADER_BYTES)
        except (LinkRefused, ConnectionError) as error:
            if isinstance(error, LinkRefused) and error.reason != "unreachable":
                raise
            raise LinkRefused("unauthorized", "the other side hung up: it has another token, or ends") from error
        said = bytes_of(answer, "header")
        if not hmac.compare_digest(bytes_of(answer, "proof"), prove(token, b"answer", ours, said)):
            raise LinkRefused("unauthorized", "the other side has another token")
        found = unpack_map(said)
        if found.get("refused"):
            raise LinkRefused(str(found["refused"]), str(found.get("detail", "")))
        return found


def prove(token: str, role: bytes, nonce: bytes, header: bytes) -> bytes:
    """That who says ``header`` has the token."""
    return hmac.new(token.encode(), role + nonce + header, hashlib.sha256).digest()


def unpack_map(data: bytes) -> dict[str, Any]:
    """Of msgpack. Raises LinkRefused."""
    try:
        found = msgpack.unpackb(data)
    except (ValueError, msgpack.UnpackException) as error:
        raise LinkRefused("malformed", "no msgpack") from error
    if not isinstance(found, dict):
        raise LinkRefused("malformed", "no map")
    return found


def bytes_of(values: Mapping[str, Any], name: str) -> bytes:
    """A value that must be bytes. Raises LinkRefused."""
    value = values.get(name)
    if not isinstance(value, bytes):
        raise LinkRefused("malformed", f"no {name}")
    return value


def nonce_of(values: Mapping[str, Any]) -> bytes:
    """Of the other side. Raises LinkRefused."""
    nonce = bytes_of(values, "nonce")
    if len(nonce) != NONCE_BYTES:
        raise LinkRefused("malformed", f"a nonce of {len(nonce)} bytes")
    return nonce


def parse_place(place: str) -> tuple[str, int]:
    """host:port, with ``tls://`` before it or not. Raises LinkRefused."""
    host, _, port = place.removeprefix(TLS).rpartition(":")
    if not (host.isprintable() and port.isascii() and port.isdigit() and len(port) < 6 and 0 < int(port) < 1 << 16):
        raise LinkRefused("unreachable", f"{place!r:.200} is not host:port")
    try:
        host.encode("idna")  # as the socket does
    except UnicodeError as error:
        raise LinkRefused("unreachable", f"{place!r:.200}: {error}") from error
    return host.strip("[]"), int(port)


def connect(
    place: str,
    limit: float,
    talk: Callable[[FramedStream], Answer],
    context: ssl.SSLContext | None = None,
    allow_plain: bool = False,
) -> Answer:
    """What ``talk`` makes of a connection to ``place``, in ``limit`` seconds for all of it. ``context``: of a client, for a
    server with TLS (None: it trusts the system's authorities); ``allow_plain``: a server of a network may have none. Raises
    LinkRefused, and what ``talk`` raises but TimeoutError and OSError."""
    deadline = time.monotonic() + limit
    host, port = parse_place(place)
    secure = place.startswith(TLS)
    if not secure and not allow_plain and not is_loopback(host):
        raise LinkRefused("plain", f"{place} speaks no TLS, and all would travel unencrypted: {_PLAIN_FIX}")
    try:
        with socket.create_connection((host, port), timeout=limit) as sock:
            if not secure:
                return talk(FramedStream(sock, deadline))
            sock.settimeout(max(1e-3, deadline - time.monotonic()))  # of the whole handshake
            context = context or SYSTEM.client()
            with context.wrap_socket(sock, server_hostname=host) as safe:
                return talk(FramedStream(safe, deadline))
    except TimeoutError as error:
        raise LinkRefused("timeout", f"{place} did not answer within {limit:g} s") from error
    except OSError as error:
        if words := refusal(error, _PLAIN_FIX):
            raise LinkRefused("untrusted", f"{place}: {words}") from error
        raise LinkRefused("unreachable", f"{place}: {error}") from error


class ProvenAsk:
    """A question of who has the token. ``header``: msgpack, as it came; ``stream``: for what follows the answer's header."""

    def __init__(self, header: bytes, stream: FramedStream, token: str, nonce: bytes) -> None:
        self.header, self.stream = header, stream
        self._token, self._nonce = token, nonce

    def reply(self, answer: Mapping[str, Any]) -> None:
        """The answer's header, or {"refused": a word, "detail"}."""
        packed: bytes = msgpack.packb(dict(answer))
        self.stream.write({"header": packed, "proof": prove(self._token, b"answer", self._nonce, packed)})


class LinkServer:
    """Listens on ``host``:``port`` (0: a free one) and calls ``answer`` for each question, in a thread of each client's own; what
    the client is told is ``answer``'s matter, and LinkRefused or OSError out of it hang up. ``limit``: seconds of an answer.
    With a certificate in ``tls`` over TLS; without, on loopback only, or where ``allow_plain`` says so. ``token``: see
    :class:`orchestrator.api.bearer.Token`. ``field``: of the config, for what is said. Raises ConfigError."""

    def __init__(
        self,
        answer: Callable[[ProvenAsk], None],
        token: str,
        host: str,
        port: int,
        *,
        field: str,
        clients: int,
        limit: float,
        tls: Tls = SYSTEM,
        allow_plain: bool = False,
    ) -> None:
        if not token:
            raise ConfigError(f"{field}.token", "", "only clients with the token are answered: give one")
        self._token = bearer.Token(token, f"{field}.token")
        self._answer, self._limit = answer, limit
        self._context = check_listener(host, tls, f"{field}.host", allow_plain)
        try:
            self._socket = socket.create_server((host, port), backlog=64)
        except OSError as error:
            raise ConfigError(f"{field}.host", f"{host}:{port}", f"cannot listen there: {error}") from error
        self._host = host
        self._closed = threading.Event()
        self._slots = threading.Semaphore(clients)
        self._unproved: dict[int, socket.socket] = {}  # by thread, the oldest first
        self._thread = threading.Thread(target=self._accept, name=f"{field} server", daemon=True)
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
            threading.Thread(target=self._serve, args=(client,), name="link client", daemon=True).start()

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
                    self._hear(FramedStream(client, deadline))
                    return
                client.settimeout(limit)  # of the whole handshake
                with self._context.wrap_socket(client, server_side=True, do_handshake_on_connect=False) as safe:
                    self._unproved[thread] = safe
                    safe.do_handshake()
                    self._hear(FramedStream(safe, deadline))
        except (OSError, LinkRefused):
            return  # a client that goes away or talks nonsense is told nothing
        finally:
            self._unproved.pop(thread, None)
            self._slots.release()

    def _hear(self, stream: FramedStream) -> None:
        ours = secrets.token_bytes(NONCE_BYTES)
        stream.write({"nonce": ours})
        message = stream.read_map(HEADER_BYTES)
        packed, theirs = bytes_of(message, "header"), nonce_of(message)
        shown, tokens = bytes_of(message, "proof"), self._token.accepted()
        token = next((one for one in tokens if hmac.compare_digest(shown, prove(one, b"ask", ours, packed))), "")
        if not token:
            raise LinkRefused("unauthorized")
        self._unproved.pop(threading.get_ident(), None)
        stream.deadline = time.monotonic() + self._limit
        self._answer(ProvenAsk(packed, stream, token, theirs))
