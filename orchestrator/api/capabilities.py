"""Optional capabilities of workers and trainers: moving KV, sending and receiving weights, lending devices.

* Remembered contexts: tokens of a trajectory that a worker has are not sent again.
* KV transfer: the prefix of a trajectory is copied from one engine to another (Heddle 5.3). Best effort: nothing waits forever
  for KV. A worker that cannot get a prefix recomputes it, with the same tokens. A worker has these methods even if its engine
  was started without KV transfer.
* Weights by a collective, directly from the trainer to the run's own workers (RollArt 6.3, ROSE 4.2), while the relay is
  published and requests continue. Optional on both sides: without these methods the relay is used.
  :mod:`orchestrator.weight_sync` keeps the order.
* Colocation, rollout and training on the same devices (RollPacker 4.4): a rollout worker releases and reclaims memory; a trainer
  moves between three levels of residency. Neither knows the other: :mod:`orchestrator.colocation.handover` keeps the order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from orchestrator.api.ports import ManagedWorker, RolloutWorker, Trainer
from orchestrator.api.types import PublishResult

# What a rollout worker releases. "kv": the KV cache; "weights": also the weights, kept on the host; "dropped": also the
# weights, which are gone until an UPDATE loads new ones.
RELEASE_LEVELS = ("kv", "weights", "dropped")
# What a trainer has on its devices. "away": nothing; "stream": weights and gradient buffers; "step": optimizer state too.
RESIDENCY_LEVELS = ("away", "stream", "step")


@dataclass(frozen=True, slots=True)
class KvMove:
    """``token_ids``: the context whose KV is wanted, from its first token. ``source``: the ``kv_place`` of the worker that has
    it. ``limit``: seconds after which it is recomputed instead."""

    trajectory_id: str
    token_ids: Sequence[int]
    source: str
    limit: float


@dataclass(frozen=True, slots=True)
class KvMoved:
    """The result of a move. ``tokens``: context tokens whose KV the destination now has, its own cache included; ``moved``: those
    of them that came over the wire, in ``bytes``. ``why``: empty, or why the rest is recomputed (a word, a colon, details).
    ``seconds``: from the command to the end. ``carrier``: the transport, "" if nothing came."""

    tokens: int
    moved: int
    bytes: int
    seconds: float
    why: str = ""
    carrier: str = ""


@runtime_checkable
class KvWorker(RolloutWorker, Protocol):
    """A rollout worker that can send KV to another one and receive it."""

    async def kv_place(self) -> str:
        """host:port at which it serves KV to clients with the token; "": it does not. Raises RetryableError if it is dead."""

    async def fetch_kv(self, move: KvMove) -> KvMoved:
        """Fetch and verify a prefix, so that a request that begins with it finds it in the cache. Problems with the source, the
        network, versions or memory give an answer with a ``why``; only a dead worker raises RetryableError."""


@runtime_checkable
class SessionWorker(RolloutWorker, Protocol):
    """A rollout worker in another process that remembers trajectories' contexts: a turn sends only the new tokens."""

    def forget(self, trajectory_id: str) -> None:
        """The trajectory has ended: forget its context. Costs nothing, never fails."""

    def take_resent(self) -> tuple[int, int]:
        """(contexts that the worker lacked and were sent in full, their tokens), since the last call."""


@dataclass(frozen=True, slots=True)
class Meeting:
    """The rendezvous of one sender and its receivers. The sender is rank 0, receivers are ranks 1 to ``receivers``.

    ``name``: unique per group; the same name again means that the last version's group is reused. ``where``: with ``backend``
    "gloo" the host:port of the sender's store; with "nccl" NCCL's unique id in base64, as vLLM takes it; with "vllm-nccl" JSON
    for vLLM's own engines (:mod:`megatron_rlplugin.weights.stock_sender`).
    """

    name: str
    backend: str
    where: str
    receivers: int


@runtime_checkable
class CollectiveWorker(ManagedWorker, Protocol):
    """A rollout worker that can receive weights from the trainer of its own cluster."""

    ranks: int  # its number of receivers: tensor parallel size times pipeline parallel size

    async def receive(self, version: int, meetings: Sequence[Meeting], place: int, limit: float) -> str:
        """Receive and verify ``version`` while requests continue, in place of ``prepare``: ``update`` then only has to load it.
        One meeting per sender; ``place`` is the first of this worker's ranks in each group.

        Returns the version's content: the checksum over its tensors' digests that the relay publishes too, in hexadecimal; ""
        where ``update`` receives it, by vLLM's own engine, which sends no digests. Raises RetryableError within ``limit``
        seconds; nothing has changed then, and its groups are left.
        """


@runtime_checkable
class CollectiveTrainer(Trainer, Protocol):
    """A trainer that can send its weights to workers of its own cluster."""

    async def send(self, receivers: int, limit: float, anew: bool) -> tuple[Meeting, ...]:
        """Begin to send the current weights under the current version, and return where to receive them: one meeting per trainer
        rank. Sending continues in the background, beside ``publish``, for at most ``limit`` seconds, and ends before the
        weights change. ``anew``: form new groups (a receiver changed, or the last version failed); otherwise the last
        version's groups are reused, if they still work."""


@runtime_checkable
class HoldingTrainer(Trainer, Protocol):
    """A trainer whose next step may run while the version of the last one is published."""

    async def hold(self) -> None:
        """Copy the current weights and version for :meth:`publish_held`; when it returns, the weights may change. Waits for a
        publication in progress."""

    async def publish_held(self) -> PublishResult:
        """Like ``publish``, but of the held weights, and beside other calls such as ``train_step``. Called again after a failure,
        it publishes the same bytes."""


@dataclass(frozen=True, slots=True)
class ReleaseResult:
    """What a worker released. ``bytes``: measured; ``preempted``: requests in flight whose KV is recomputed; ``how``: by which
    means, in words, including what stayed."""

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
    """A rollout worker that can lend its device to a trainer. Both commands are idempotent and need a suspended worker."""

    async def release(self, level: str) -> ReleaseResult:
        """Release memory; requests in flight keep their tokens, their KV is recomputed. Until ``reclaim``, UPDATE and RESUME
        are refused with CommandError ``released``. CommandError ``no_sleep_mode``: it cannot, and nothing changed."""

    async def reclaim(self) -> None:
        """Take the memory back; the worker stays suspended. After level ``dropped``, RESUME is refused (``weights_unusable``)
        until an UPDATE has succeeded."""


@runtime_checkable
class ResidentTrainer(Trainer, Protocol):
    """A trainer that can leave its devices and come back."""

    async def residency(self, level: str, replicas: Sequence[int] | None = None) -> ResidencyResult:
        """Move weights, gradients and optimizer state as ``level`` says, on these data-parallel replicas (None: all; others
        stay as they are). Raises RetryableError if it fails; ``residency("away")`` then undoes what was moved, and no weight
        is wrong."""
