"""What some workers and trainers can do beside their port: move KV, send and receive weights, lend devices.

* Contexts that are remembered: what was sent of a trajectory need not be sent again.
* KV that moves: the prefix of one trajectory copied from one engine to another (Heddle 5.3). Best effort: nothing ever waits
  for KV that does not come. Whoever cannot get a prefix recomputes it, and the tokens are the same. A worker has these methods
  whether or not its engine was started to move KV.
* Weights straight from the trainer to the run's own workers, by a collective (RollArt 6.3, ROSE 4.2). The trainer sends and the
  workers receive beside whatever else they do: the relay is published meanwhile, requests go on. Optional on both sides: who
  does not have these methods uses the relay. :mod:`orchestrator.weight_sync` keeps the order.
* Rollout and training on the same devices (RollPacker 4.4): a rollout worker releases memory and reclaims it; a trainer moves
  between three levels of residency. Neither knows of the other: :mod:`orchestrator.colocation.handover` keeps the order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from orchestrator.api.ports import ManagedWorker, RolloutWorker, Trainer
from orchestrator.api.types import PublishResult

# What a rollout worker releases. "kv": the KV cache; "weights": that, and the weights are kept on the host; "dropped": that,
# and the weights are gone until an UPDATE brings new ones.
RELEASE_LEVELS = ("kv", "weights", "dropped")
# What a trainer has on its devices. "away": nothing; "stream": weights and gradient buffers; "step": optimizer state too.
RESIDENCY_LEVELS = ("away", "stream", "step")


@dataclass(frozen=True, slots=True)
class KvMove:
    """``token_ids``: the context whose KV is wanted, from its first token on. ``source``: where the worker that holds it hands
    it out (its ``kv_place``). ``limit``: seconds after which it is recomputed instead."""

    trajectory_id: str
    token_ids: Sequence[int]
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


@runtime_checkable
class SessionWorker(RolloutWorker, Protocol):
    """A rollout worker in another process that remembers the contexts of trajectories: a turn brings it what is new."""

    def forget(self, trajectory_id: str) -> None:
        """The trajectory has ended: what is remembered of it is of no use. Costs nothing, never fails."""

    def take_resent(self) -> tuple[int, int]:
        """How many contexts the worker lacked, and their tokens, which were sent it whole, since this was last asked."""


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where one sender and its receivers form a group. The sender is rank 0, receivers are ranks 1 to ``receivers``.

    ``name``: another one for every group; the same name again means that the group of the last version is used again.
    ``backend`` "gloo": ``where`` is host:port of the sender's store; "nccl": NCCL's unique id in base64, as vLLM takes it;
    "vllm-nccl": JSON of what vLLM's own engines are told (:mod:`megatron_rlplugin.weights.stock_sender`).
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
        hexadecimal; "" where ``update`` receives it, by vLLM's own engine, which sends no digests. Raises RetryableError
        after ``limit`` seconds at most; nothing changed then, and its groups are left.
        """


@runtime_checkable
class CollectiveTrainer(Trainer, Protocol):
    """A trainer that can send its weights to workers of its own cluster."""

    async def send(self, receivers: int, limit: float, anew: bool) -> tuple[Meeting, ...]:
        """Begin to send the present weights under the present version, and return where to receive them: one meeting a
        rank of the trainer. It goes on in the background, beside ``publish``, for ``limit`` seconds at most, and ends
        before the weights change. ``anew``: form new groups (a receiver is another one, or the last version failed); else
        those of the last version are used again, as far as they still work."""


@runtime_checkable
class HoldingTrainer(Trainer, Protocol):
    """A trainer whose next step may run while the version of the last one is published."""

    async def hold(self) -> None:
        """Fix the present weights, under the present version, as what :meth:`publish_held` publishes; when it returns they may
        change. Waits for what is being published."""

    async def publish_held(self) -> PublishResult:
        """As ``publish``, of what was held last, and beside other calls, ``train_step`` among them. Called again after a failure
        it publishes the same bytes."""


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
