"""Rollout and training on the same devices (RollPacker 4.4): who holds what of a device's memory, and its two ports.

A rollout worker releases memory and reclaims it; a trainer moves between three levels of residency. Neither knows of the
other: :mod:`orchestrator.colocation.handover` keeps the order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from orchestrator.api.ports import ManagedWorker, Trainer

# What a rollout worker releases. "kv": the KV cache; "weights": that, and the weights are kept on the host; "dropped": that,
# and the weights are gone until an UPDATE brings new ones.
RELEASE_LEVELS = ("kv", "weights", "dropped")
# What a trainer has on its devices. "away": nothing; "stream": weights and gradient buffers; "step": optimizer state too.
RESIDENCY_LEVELS = ("away", "stream", "step")


@dataclass(frozen=True, slots=True)
class ReleaseResult:
    """What a worker gave back. ``bytes``: measured, 0 for nothing; ``preempted``: requests in flight whose KV is recomputed;
    ``how``: by which means, in words, what stayed included."""

    level: str
    bytes: int
    preempted: int
    seconds: float
    how: str


@dataclass(frozen=True, slots=True)
class ResidencyResult:
    """What a change of residency moved: bytes copied ``to_host`` and ``to_device``, tracked bytes on the devices afterwards
    (``device_bytes``) and at most during the move (``peak_bytes``). ``how``: what the figures are."""

    level: str
    to_host: int
    to_device: int
    device_bytes: int
    peak_bytes: int
    seconds: float
    how: str


@runtime_checkable
class ReleasingWorker(ManagedWorker, Protocol):
    """A rollout worker that can lend its device to a trainer. Both commands are idempotent, and only while suspended."""

    async def release(self, level: str) -> ReleaseResult:
        """Give back memory; requests in flight keep their tokens, their KV is recomputed. Until ``reclaim``, UPDATE and
        RESUME are refused with CommandError ``released``. CommandError ``no_sleep_mode``: it cannot, nothing changed."""

    async def reclaim(self) -> None:
        """Take the memory again; still suspended. After level ``dropped``, RESUME is refused (``weights_unusable``) until an
        UPDATE has succeeded."""


@runtime_checkable
class ResidentTrainer(Trainer, Protocol):
    """A trainer that can leave its devices and come back."""

    async def residency(self, level: str, replicas: Sequence[int] | None = None) -> ResidencyResult:
        """Bring weights, gradients and optimizer state to where ``level`` says, on these data-parallel replicas (None: on
        all; the others stay as they are). Raises RetryableError when it could not; then ``residency("away")`` gives up
        what was already moved, and no weight is wrong."""
