"""KV that moves: the prefix of one trajectory copied from one engine to another (Heddle 5.3), and its port.

Best effort: nothing ever waits for KV that does not come. Whoever cannot get a prefix recomputes it, and the tokens are the
same. A worker has these methods whether or not its engine was started to move KV.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from orchestrator.api.ports import RolloutWorker


@dataclass(frozen=True, slots=True)
class KvMove:
    """``token_ids``: the context whose KV is wanted, from its first token on. ``source``: where the worker that holds it hands
    it out (its ``kv_place``). ``limit``: seconds after which it is recomputed instead."""

    trajectory_id: str
    token_ids: tuple[int, ...]
    source: str
    limit: float


@dataclass(frozen=True, slots=True)
class KvMoved:
    """What became of a move. ``tokens``: of the context, whose KV the destination has now without computing it, its own cache
    included; ``moved``: of these, how many came over the wire, with ``bytes``. ``why``: empty, or why the rest is recomputed
    (a word, a colon, details). ``seconds``: from the command to the end. ``carrier``: how it came, "" where nothing did."""

    tokens: int
    moved: int
    bytes: int
    seconds: float
    why: str = ""
    carrier: str = ""


@runtime_checkable
class KvWorker(RolloutWorker, Protocol):
    """A rollout worker whose KV can go to another one, and that can take KV of another one."""

    async def kv_place(self) -> str:
        """host:port at which it hands out KV to who has the token; "": it does not. Raises RetryableError when it is dead."""

    async def fetch_kv(self, move: KvMove) -> KvMoved:
        """Get a prefix, verified, so that a request that begins with it finds it. Whatever goes wrong with the source, the
        way, the versions or the room is an answer with a ``why``, never an error; only a dead worker raises RetryableError."""
