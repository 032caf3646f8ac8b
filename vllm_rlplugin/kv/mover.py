"""``KvMover``: hands out an engine's prefixes over TCP, and fetches those of others, beside whatever the worker does.

Guarantees:

* The engine works for a copy only (between two steps): while bytes travel and digests are taken it goes on.
* :meth:`KvMover.fetch` ends within the limit of its move (and one command of the engine), and raises nothing for what goes wrong:
  its ``why`` says what, and the prefix, or what is missing of it, is recomputed. Each kind of failure is logged once a process.
* What is longer than its engine stages at a time is asked for only so far, and the rest is recomputed.
* Nobody gets KV without the token, or KV of other weights than its own, or into another layout.
* What leaves this machine goes over TLS, unless ``allow_plain`` says otherwise; on loopback it does not.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import TimeoutError as Late
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from orchestrator.api import ConfigError, KvMove, KvMoved, RetryableError, bearer
from orchestrator.api.tls import SYSTEM, Tls, check_listener
from orchestrator.api.urls import is_loopback
from orchestrator.transfer.kv_mooncake import MooncakeCarrier
from orchestrator.transfer.kv_wire import Carrier, KvAsk, KvBlocks, KvRefused, KvServer, fetch_blocks
from orchestrator.transfer.rdma_devices import check_device

PIECE_BYTES = 4 << 20  # of KV that go between the front end and its engine at a time: neither stands still for longer
NODE = "node"  # as a host: this machine's own address
CARRIERS = ("tcp", "mooncake")
_logger = logging.getLogger("vllm.rl_coserve")
# A KV command to the engine, between two steps (vllm_rlplugin.kv.commands).
Command = Callable[[str, Mapping[str, Any]], Awaitable[dict[str, Any]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class KvOptions:
    """Where a worker hands out KV, and the token that both sides need (see :class:`orchestrator.api.bearer.Token`). ``limit``:
    seconds that it gives one client. ``carrier``: what the bytes travel over, with ``room_mb`` of memory; ``protocol`` and
    ``device`` are Mooncake's. ``tls``: of this machine, for another address than loopback; ``allow_plain``: it may do without."""

    token: str
    host: str = "127.0.0.1"
    port: int = 0  # a free one
    limit: float = 30.0
    carrier: str = "tcp"
    protocol: str = "tcp"
    device: str = ""  # names with commas between; empty: Mooncake chooses
    room_mb: int = 256
    tls: Mapping[str, Any] = field(default_factory=dict)  # fields of orchestrator.api.tls.Tls
    allow_plain: bool = False

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> KvOptions:
        """Raises ConfigError for an unknown key or an empty token."""
        if unknown := sorted(set(values) - set(cls.__slots__)):
            raise ConfigError("kv", unknown[0], f"unknown; the options are {', '.join(cls.__slots__)}")
        if not values.get("token"):
            raise ConfigError("kv.token", "", "KV is given only to clients with the token: give one")
        return cls(**values)

    def __post_init__(self) -> None:
        if self.carrier not in CARRIERS:
            raise ConfigError("kv.carrier", self.carrier, f"must be {' or '.join(map(repr, CARRIERS))}")
        if self.carrier == "tcp" and (self.protocol, self.device) != ("tcp", ""):
            raise ConfigError(
                "kv.protocol", self.protocol, "protocol and device are for Mooncake: set carrier to 'mooncake'"
            )
        check_device(self.protocol, self.device, "kv.")

    @property
    def address(self) -> str:
        """Of ``host``."""
        return socket.gethostbyname(socket.gethostname()) if self.host == NODE else self.host

    @property
    def listener(self) -> Tls:
        """What is spoken at :attr:`address`: nothing of TLS on loopback, whose name a certificate need not have."""
        return SYSTEM if is_loopback(self.address) else Tls(**self.tls)


class KvMover:
    """Of one engine. Make it anywhere; :meth:`start_listener` it inside the event loop that the commands belong to."""

    def __init__(self, options: KvOptions, command: Command) -> None:
        self._options, self._command = options, command
        self._token = bearer.Token(options.token, "kv.token")
        self._loop: asyncio.AbstractEventLoop | None = None
        self._server: KvServer | None = None
        self._carrier: Carrier | None = None
        self._trust: ssl.SSLContext | None = None
        self._others: set[str] = set()  # sources that had no such carrier
        self.failures: Counter[str] = Counter()  # by kind; of this worker as a destination
        self.sent = 0  # blocks handed out

    def load_carrier(self) -> None:
        """Start the carrier, when the engine's processes are started: it brings threads; and read the files of TLS. Idempotent.
        Raises ConfigError, also for an address of a network without TLS."""
        options = self._options
        check_listener(options.address, options.listener, "kv_transfer.host", options.allow_plain)
        if options.tls:
            self._trust = Tls(**options.tls).client()
        if options.carrier == "mooncake" and self._carrier is None:
            self._carrier = MooncakeCarrier(options.address, options.protocol, options.device, options.room_mb << 20)

    def start_listener(self) -> str:
        """Begin to hand out. Returns the place, host:port or tls://host:port. Idempotent."""
        if self._server is None:
            self._loop = asyncio.get_running_loop()
            options = self._options
            self._server = KvServer(
                self._answer_request,
                options.token,
                options.address,
                options.port,
                options.limit,
                self._carrier,
                options.listener,
                options.allow_plain,
            )
        return self._server.place

    def close(self) -> None:
        """Hand out no more. Idempotent."""
        if self._server is not None:
            self._server.close()
        if self._carrier is not None:
            self._carrier.close()

    async def fetch(self, move: KvMove) -> KvMoved:
        """See :meth:`orchestrator.api.KvWorker.fetch_kv`."""
        started = time.monotonic()
        have = moved = size = 0
        why = carrier = ""
        tokens = np.array(move.token_ids[:], np.uint32)
        try:
            asked = _checked(await self._command("kv_ask", {"tokens": tokens.tobytes()}))
            have, size = int(asked["first"]), int(asked["block_size"])
            block_bytes = int(asked["block_bytes"])
            wanted = min(int(asked["blocks"]), have + int(asked["room"]))  # neither side holds more of it in memory
            if have < asked["blocks"]:
                if wanted == have:
                    raise KvRefused("no_room", f"no further block of {block_bytes} bytes can be staged")
                tokens = tokens[: wanted * size + 1]
                ask = KvAsk(tokens, have, asked["facts"], move.limit)
                found = await asyncio.to_thread(
                    fetch_blocks,
                    move.source,
                    self._token.current(),
                    ask,
                    block_bytes,
                    self._carrier,
                    self._trust,
                    self._options.allow_plain,
                )
                carrier = found.carrier
                self._log_carrier(carrier, move)
                taken = found.payload[: wanted - have]
                place = {"tokens": tokens.tobytes(), "facts": asked["facts"], "total": len(taken)}
                step = max(1, PIECE_BYTES // block_bytes)
                for at in range(0, len(taken), step):
                    piece = {**place, "first": have + at, "payload": taken[at : at + step].tobytes()}
                    moved += int(_checked(await self._command("kv_stage", piece))["blocks"])
        except KvRefused as refusal:
            why = str(refusal)
            self._log_refusal(refusal, move)
        seconds = time.monotonic() - started
        sent = moved * block_bytes if moved else 0
        return KvMoved((have + moved) * size, moved * size, sent, seconds, why, carrier if moved else "")

    def _log_carrier(self, carrier: str, move: KvMove) -> None:
        if self._carrier is not None and carrier != self._carrier.name and move.source not in self._others:
            self._others.add(move.source)
            said = "KV from %s came over %s: it has no %s over %s (said once)"
            _logger.warning(said, move.source, carrier, self._carrier.name, self._carrier.protocol)

    def _log_refusal(self, refusal: KvRefused, move: KvMove) -> None:
        self.failures[refusal.reason] += 1
        if self.failures[refusal.reason] == 1:
            said = "KV from %s: %s; the prefix is recomputed (said once, counted from now on)"
            _logger.warning(said, move.source, refusal)

    def _answer_request(self, ask: KvAsk) -> KvBlocks:
        """In a thread of the server: have the engine copy the blocks between two steps."""
        if self._loop is None or self._loop.is_closed():
            raise KvRefused("unreachable", "the worker is closing")
        pieces: list[Any] = []
        deadline = time.monotonic() + ask.limit
        while True:
            first = ask.first + sum(map(len, pieces))
            found = self._read_piece(ask, first, self._loop, deadline)
            if "refused" in found and pieces:
                break  # the rest is gone, or of other weights by now; these are what was asked for
            piece = np.frombuffer(_checked(found)["payload"], np.uint8)
            pieces.append(piece.reshape(int(found["blocks"]), -1))
            if not found["more"]:
                break
        payload = np.concatenate(pieces)
        self.sent += len(payload)
        return KvBlocks(ask.first, payload, ask.facts)

    def _read_piece(
        self, ask: KvAsk, first: int, loop: asyncio.AbstractEventLoop, deadline: float
    ) -> Mapping[str, Any]:
        """One piece of it, from the block ``first`` on."""
        tokens = ask.token_ids.tobytes()
        arguments = {"tokens": tokens, "first": first, "facts": dict(ask.facts), "most": PIECE_BYTES}
        future = asyncio.run_coroutine_threadsafe(_run_command(self._command, "kv_read", arguments), loop)
        try:
            return future.result(max(0.0, deadline - time.monotonic()))
        except Late as error:
            future.cancel()
            raise KvRefused("timeout", f"the engine did not answer within {ask.limit:g} s") from error
        except RetryableError as error:
            raise KvRefused("unreachable", str(error)) from error


async def _run_command(command: Command, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    return await command(name, arguments)


def _checked(answer: Mapping[str, Any]) -> Mapping[str, Any]:
    if "refused" in answer:
        raise KvRefused(str(answer["refused"]), str(answer["detail"]))
    return answer
