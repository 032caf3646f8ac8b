"""``KvMover``: hands out an engine's prefixes over TCP, and fetches those of others, beside whatever the worker does.

Guarantees:

* The engine works for a copy only (between two steps): while bytes travel and digests are taken it goes on.
* :meth:`KvMover.fetch` ends within the limit of its move (and one command of the engine), and raises nothing for what goes wrong:
  its ``why`` says what, and the prefix, or what is missing of it, is recomputed. Each kind of failure is logged once a process.
* Nobody gets KV without the token, or KV of other weights than its own, or into another layout.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import TimeoutError as Late
from dataclasses import dataclass
from typing import Any

import numpy as np

from orchestrator.api import ConfigError, KvMove, KvMoved, RetryableError
from orchestrator.transfer.kv import KvAsk, KvBlocks, KvRefused, KvServer, fetch

NODE = "node"  # as a host: this machine's own address
_logger = logging.getLogger("vllm.rl_coserve")
# A KV command to the engine, between two steps (vllm_rlplugin.kv_commands).
Command = Callable[[str, Mapping[str, Any]], Awaitable[dict[str, Any]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class KvOptions:
    """Where a worker hands out KV, and the token that both sides need. ``limit``: seconds that it gives one client."""

    token: str
    host: str = "127.0.0.1"
    port: int = 0  # a free one
    limit: float = 30.0

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> KvOptions:
        """Raises ConfigError for an unknown key or an empty token."""
        if unknown := sorted(set(values) - set(cls.__slots__)):
            raise ConfigError("kv", unknown[0], f"unknown; the options are {', '.join(cls.__slots__)}")
        if not values.get("token"):
            raise ConfigError("kv.token", "", "KV is handed out to who has the token: give one")
        return cls(**values)


class KvMover:
    """Of one engine. Make it anywhere; :meth:`open` it inside the event loop that the commands belong to."""

    def __init__(self, options: KvOptions, command: Command) -> None:
        self._options, self._command = options, command
        self._loop: asyncio.AbstractEventLoop | None = None
        self._server: KvServer | None = None
        self.failures: Counter[str] = Counter()  # by kind; of this worker as a destination
        self.sent = 0  # blocks handed out

    def open(self) -> str:
        """Begin to hand out. Returns the place, host:port. Idempotent."""
        if self._server is None:
            self._loop = asyncio.get_running_loop()
            options = self._options
            host = socket.gethostbyname(socket.gethostname()) if options.host == NODE else options.host
            self._server = KvServer(self._answer, options.token, host, options.port, options.limit)
        return self._server.place

    def close(self) -> None:
        """Hand out no more. Idempotent."""
        if self._server is not None:
            self._server.close()

    async def fetch(self, move: KvMove) -> KvMoved:
        """See :meth:`orchestrator.api.KvWorker.fetch_kv`."""
        started = time.monotonic()
        have = moved = size = 0
        why = ""
        tokens = np.array(move.token_ids, np.uint32)
        try:
            asked = _checked(await self._command("kv_ask", {"tokens": tokens.tobytes()}))
            have, size = int(asked["first"]), int(asked["block_size"])
            block_bytes = int(asked["block_bytes"])
            if have < asked["blocks"]:
                ask = KvAsk(tokens, have, asked["facts"], move.limit)
                found = await asyncio.to_thread(fetch, move.source, self._options.token, ask, block_bytes)
                taken = found.payload[: asked["blocks"] - have]
                staged = {
                    "tokens": tokens.tobytes(),
                    "first": have,
                    "facts": asked["facts"],
                    "payload": taken.tobytes(),
                }
                moved = int(_checked(await self._command("kv_stage", staged))["blocks"])
        except KvRefused as refusal:
            why = str(refusal)
            self._note(refusal, move)
        seconds = time.monotonic() - started
        return KvMoved((have + moved) * size, moved * size, moved * block_bytes if moved else 0, seconds, why)

    def _note(self, refusal: KvRefused, move: KvMove) -> None:
        self.failures[refusal.reason] += 1
        if self.failures[refusal.reason] == 1:
            said = "KV from %s: %s; the prefix is recomputed (said once, counted from now on)"
            _logger.warning(said, move.source, refusal)

    def _answer(self, ask: KvAsk) -> KvBlocks:
        """In a thread of the server: have the engine copy the blocks between two steps."""
        if self._loop is None or self._loop.is_closed():
            raise KvRefused("unreachable", "the worker is closing")
        arguments = {"tokens": ask.token_ids.tobytes(), "first": ask.first, "facts": dict(ask.facts)}
        future = asyncio.run_coroutine_threadsafe(_run(self._command, "kv_read", arguments), self._loop)
        try:
            found = _checked(future.result(ask.limit))
        except Late as error:
            future.cancel()
            raise KvRefused("timeout", f"the engine did not answer within {ask.limit:g} s") from error
        except RetryableError as error:
            raise KvRefused("unreachable", str(error)) from error
        payload = np.frombuffer(found["payload"], np.uint8).reshape(int(found["blocks"]), -1)
        self.sent += len(payload)
        return KvBlocks(ask.first, payload, ask.facts)


async def _run(command: Command, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    return await command(name, arguments)


def _checked(answer: Mapping[str, Any]) -> Mapping[str, Any]:
    if "refused" in answer:
        raise KvRefused(str(answer["refused"]), str(answer["detail"]))
    return answer
