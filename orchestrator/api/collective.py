"""Weights straight from the trainer to the run's own workers, by a collective (RollArt 6.3, ROSE 4.2), and its two ports.

The trainer sends and the workers receive beside whatever else they do: the relay is published meanwhile, requests go on.
Optional on both sides: who does not have these methods uses the relay. :mod:`orchestrator.weight_sync` keeps the order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from orchestrator.api.ports import ManagedWorker, Trainer


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where one sender and its receivers form a group. The sender is rank 0, receivers are ranks 1 to ``receivers``.

    ``name``: another one for every group; the same name again means that the group of the last version is used again.
    ``backend`` "gloo": ``where`` is host:port of the sender's store; "nccl": NCCL's unique id in base64, as vLLM takes it.
    """

    name: str
    backend: str
    where: str
    receivers: int


@runtime_checkable
class CollectiveWorker(ManagedWorker, Protocol):
    """A rollout worker that can receive weights from the trainer of its own cluster."""

    ranks: int  # receivers that it is: its tensor parallelism times its pipeline parallelism

    async def receive(self, version: int, meetings: Sequence[Meeting], place: int, limit: float) -> str:
        """Receive and verify ``version`` while requests go on, as ``prepare`` fetches it: ``update`` then has only to load
        it. One meeting a sender; ``place`` is the first of this worker's ranks in each group.

        Returns the content of the version, the checksum over its tensors' digests that the relay publishes, in
        hexadecimal. Raises RetryableError after ``limit`` seconds at most; nothing changed then, and its groups are left.
        """


@runtime_checkable
class CollectiveTrainer(Trainer, Protocol):
    """A trainer that can send its weights to workers of its own cluster."""

    async def send(self, receivers: int, limit: float, anew: bool) -> tuple[Meeting, ...]:
        """Begin to send the present weights under the present version, and return where to receive them: one meeting a
        rank of the trainer. It goes on in the background, beside ``publish``, for ``limit`` seconds at most, and ends
        before the weights change. ``anew``: form new groups (a receiver is another one, or the last version failed); else
        those of the last version are used again, as far as they still work."""
