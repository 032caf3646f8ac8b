"""The ranks that publish one version together, as the publisher sees them, and how an error crosses between them.

The publisher needs two collectives of bytes; whoever embeds it brings them (in a Megatron job: torch.distributed). Every rank
makes the same calls in the same order. A collective that fails (a rank died) raises, and the publication ends there.
"""

from __future__ import annotations

from typing import Any, Protocol

import msgpack

from orchestrator.api import ConfigError, CoserveError, RunError
from orchestrator.transfer.transfer_errors import CorruptWeightsError, RelayError, VersionTakenError

_NAMED = {kind.__name__: kind for kind in (RelayError, VersionTakenError, CorruptWeightsError)}


class PublishingRanks(Protocol):
    """Collectives over the ranks of one publisher."""

    @property
    def rank(self) -> int:
        """This one's number; 0 speaks to the metadata store."""

    @property
    def size(self) -> int:
        """How many."""

    def gather(self, data: bytes) -> list[bytes]:
        """On rank 0 what every rank gave, by number; on others anything."""

    def broadcast(self, data: bytes) -> bytes:
        """What rank 0 gave."""


class SingleRank:
    """One rank."""

    rank = 0
    size = 1

    def gather(self, data: bytes) -> list[bytes]:
        return [data]

    def broadcast(self, data: bytes) -> bytes:
        return data


def pack_answer(answer: Any) -> bytes:
    """Plain data for the others."""
    packed: bytes = msgpack.packb({"answer": answer})
    return packed


def pack_error(error: BaseException) -> bytes:
    """An error for the others, by kind and reason."""
    kind, reason = type(error).__name__, str(getattr(error, "reason", ""))
    detail = str(getattr(error, "detail", "") or error or kind)
    packed: bytes = msgpack.packb({"error": [kind if isinstance(error, CoserveError) else "", reason, detail]})
    return packed


def unpack_answer(data: bytes, who: str) -> Any:
    """The answer of another rank, or its error raised here; ``who`` says which. What is neither is a RunError."""
    try:
        message = msgpack.unpackb(data)
        if "answer" in message:
            return message["answer"]
        kind, reason, detail = map(str, message["error"])
    except (ValueError, TypeError, KeyError, msgpack.UnpackException) as error:
        raise RunError(f"{who}: what it says cannot be read: {error!r:.200}") from error
    if kind in _NAMED:
        raise _NAMED[kind](reason, f"{detail} ({who})")
    if kind == "ConfigError":
        raise ConfigError("publish", who, detail)
    raise RunError(f"{who}: {detail}")
