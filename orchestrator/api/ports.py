"""The ports: what the orchestrator asks of engines, environments, rewards, relays and stores.

Every adapter (Ray actor, HTTP, Mooncake, SQLite) and every simulated twin implements one of these. Methods that wait are
coroutines; none may block the event loop, none reads a clock other than the loop's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, Protocol, runtime_checkable

from orchestrator.api.types import (
    Completion,
    GenerationRequest,
    Observation,
    Prompt,
    PublishResult,
    StepResult,
    TrainBatch,
    TrainMetrics,
    TrainSample,
    Trajectory,
    UpdateResult,
    WorkerStats,
)

# What a rank of a trainer may leave beside the files that it wrote for a checkpoint: {name: [bytes, xxh3-64 in hex]}
CHECKPOINT_DIGESTS = "digests-{}.json"


@runtime_checkable
class RolloutWorker(Protocol):
    """A command-driven inference worker (RollArt 6.1): commands are taken between engine steps.

    Every request that was added ends in exactly one completion, ABORT included. Commands are idempotent by request id.
    A worker that died raises :class:`~orchestrator.api.RetryableError` from every pending and later call.
    """

    name: str

    async def add(self, requests: Sequence[GenerationRequest]) -> None:
        """Enqueue turns. Accepted while suspended; they start after ``resume``."""

    async def abort(
        self, request_ids: Sequence[str] = (), *, trajectories: Sequence[str] = (), groups: Sequence[str] = ()
    ) -> None:
        """Cancel requests, by id, by trajectory or by group. Each still yields a completion, with finish reason ``abort``
        and the tokens it has; when this returns, no further token of them is generated. Unknown ids are ignored."""

    async def prioritize(self, priorities: Mapping[str, int]) -> None:
        """Give the unfinished requests of these trajectories another priority, waiting or running (Heddle 4.2). Unknown
        trajectories are ignored: theirs may have just finished."""

    async def completions(self) -> list[Completion]:
        """Wait until at least one request has finished; return all that have, once each, in order of finishing."""

    async def suspend(self) -> None:
        """Stop between two engine steps; in-flight requests keep their tokens."""

    async def prepare(self, version: int) -> None:
        """Fetch and verify ``version`` while requests go on, so that ``update`` has only to load it. Optional, idempotent.
        Raises RetryableError when the relay does not deliver it whole; nothing changed then."""

    async def update(self, version: int) -> UpdateResult:
        """Load ``version``, from the relay unless it was prepared. KV of older weights is never used again.

        Only while suspended. Raises CommandError (a mistake of the caller) and RetryableError (the relay did not deliver
        it whole): the old weights are intact. CommandError ``weights_unusable``: it failed while it was applied.
        """

    async def resume(self) -> None:
        """Go on: in-flight requests recompute their KV under the new weights (RollArt 6.2, step 5). Raises CommandError
        ``weights_unusable`` after an update that failed half-way; the worker stays suspended."""

    async def stats(self) -> WorkerStats:
        """A snapshot; cheap."""

    async def close(self) -> None:
        """Stop the worker and free what it holds. Idempotent."""


@runtime_checkable
class ManagedWorker(RolloutWorker, Protocol):
    """A worker whose process the orchestrator can bring back (RollArt 8: restart in place)."""

    async def restart(self) -> None:
        """Start anew after a death or a stall: no requests, resumed, the weights it started with first (version in
        ``stats``). Raises RetryableError when it does not come up."""


@runtime_checkable
class ResizableWorker(ManagedWorker, Protocol):
    """A worker whose model can be cut over another number of devices by starting it anew (RollPacker 4.2)."""

    ranks: int  # devices that it has, or will have when it is started next; 0: it is not to be started

    async def resize(self, ranks: int) -> None:
        """End the process, whatever it does; ``restart`` then starts one over ``ranks`` devices (0: none)."""


@runtime_checkable
class ExpertWorker(ResizableWorker, Protocol):
    """A ResizableWorker that can share out whole experts of a mixture over its devices, in place of a slice of each expert on
    every device (RollPacker 7)."""

    expert_ranks: int  # devices that whole experts are shared out over; 1: slices. It divides ``ranks``

    async def resize(self, ranks: int, expert_ranks: int = 1) -> None:
        """See :class:`ResizableWorker`."""


@runtime_checkable
class PlacedWorker(Protocol):
    """A worker that knows which pool it was placed in."""

    hardware: str  # the class of its pool ("H800", "H20", ...); "" where none was asked for


@runtime_checkable
class BorrowedWorker(ManagedWorker, Protocol):
    """A worker in a process that somebody else starts and ends: a server with users of its own.

    ``restart`` takes it up again when it is there, and raises RetryableError at once while it is not: it may come back by
    itself, so whoever wants it asks again later. ``close`` leaves it running without our requests.
    """

    url: str


@runtime_checkable
class Trainer(Protocol):
    """The training side. ``version`` counts published updates; one ``train_step`` makes the next one."""

    async def train_step(self, batch: TrainBatch) -> TrainMetrics:
        """Train on complete groups; the weights are then those of ``metrics.version`` but not yet published."""

    async def feed(self, samples: Sequence[TrainSample], version: int) -> None:
        """Complete groups that the next ``train_step`` at ``version`` will contain, as soon as they are known: their gradient
        may be computed at once (RollPacker 4.4). Never changes what ``train_step`` does, only when: a batch that does not
        begin with just what was fed, once and in that order, or that is for another version, is trained from the start.
        It may be ignored. Raises RetryableError when the trainer failed: its state is in the last checkpoint."""

    async def publish(self) -> PublishResult:
        """Put the present weights on the relay under the present version, then move the version pointer."""

    async def save(self, folder: str) -> None:
        """Begin to write model, optimizer, LR schedule, RNG and version into an existing empty folder; when it returns they may
        change. Of files that are listed in :data:`CHECKPOINT_DIGESTS` beside them nobody else computes the digest."""

    async def saved(self) -> None:
        """Return when what was begun is written; beside other calls. Raises RetryableError when it could not be."""

    async def load(self, folder: str) -> int:
        """Restore what ``save`` wrote; returns the version."""

    async def close(self) -> None:
        """Stop and free. Idempotent."""


class Environment(Protocol):
    """One environment instance: token ids in, token ids out. May raise; the manager counts it by cause."""

    version: str

    async def reset(self, prompt: Prompt) -> Observation:
        """Start an episode from a prompt."""

    async def step(self, action_ids: tuple[int, ...]) -> StepResult:
        """Apply one turn's tokens."""

    async def close(self) -> None:
        """Free the instance. Idempotent."""


TimeoutMeaning = Literal["failed", "truncated", "partial"]
"""What an episode is that a time limit ended. ``failed``: masked, never trained on. ``truncated``: scored as it is, its last
action included. ``partial``: its reward is what its turns have earned, and no reward function is asked. A task says so as
``on_timeout``; without a word it is ``failed``, as an episode without a turn is in any case."""


class TaskLimits(Protocol):
    """How long an episode may be, and in which words."""

    @property
    def name(self) -> str: ...

    @property
    def vocabulary(self) -> Sequence[str]:
        """Token id -> word."""

    @property
    def max_turns(self) -> int: ...

    @property
    def max_response_tokens(self) -> int:
        """Of a turn."""

    @property
    def max_context_tokens(self) -> int:
        """Of a trajectory."""


class Task(Protocol):
    """What is trained on: prompts, environments for them, and the vocabulary they speak. One that hands out prompts of several
    tasks has ``parts``: the limits of each by ``Prompt.task``."""

    name: str
    vocabulary: Sequence[str]  # token id -> word
    pad_id: int
    end_id: int  # end of turn
    max_turns: int
    max_response_tokens: int  # a turn
    max_context_tokens: int  # a trajectory

    def prompts(self, split: str, seed: int) -> Iterator[Prompt]:
        """``"train"``: endless and deterministic in ``seed``. ``"heldout"``: finite, fixed, disjoint from training."""

    def environment(self) -> Environment:
        """A fresh environment instance."""


def parts_of(task: Task) -> Mapping[str, TaskLimits]:
    """The parts of a mixture; empty for any other task."""
    parts: Mapping[str, TaskLimits] = getattr(task, "parts", {})
    return parts


class DemonstratingTask(Task, Protocol):
    """A task that can show how it is done, for a supervised warm-up."""

    def demonstrations(self, n: int, seed: int, skill: float) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
        """``n`` episodes as (token ids, loss mask) of equal length. Each move is an expert's with chance ``skill``."""


class RewardFunction(Protocol):
    """Scores a finished trajectory. Raises RetryableError when the endpoint may recover, TrajectoryError when not."""

    async def score(self, trajectory: Trajectory) -> float:
        """The terminal reward; finite."""


@runtime_checkable
class LimitedReward(RewardFunction, Protocol):
    """A RewardFunction whose calls may wait for a slot."""

    limited: bool  # each call ends by itself, in a time that begins when it has a slot


class Relay(Protocol):
    """Write-once objects under immutable keys (a Mooncake Store, or its in-memory twin). Called inside engine processes."""

    def put(self, key: str, data: memoryview) -> None:
        """Store once. Verified by size. Raises RetryableError."""

    def get_into(self, key: str, buffer: memoryview) -> int:
        """Fill ``buffer`` from its start; returns the bytes written. Raises RetryableError when missing or failed."""

    def size(self, key: str) -> int:
        """Bytes, or -1 when the key does not exist."""

    def remove(self, key: str) -> bool:
        """Drop it; False while it is leased to a reader (try again later)."""

    def close(self) -> None:
        """Idempotent."""


class MetadataStore(Protocol):
    """Small shared facts (version pointer, leases). Values are bytes; ``revision`` grows with every change of a key."""

    def get(self, key: str) -> tuple[bytes, int] | None:
        """(value, revision), or None."""

    def compare_and_set(self, key: str, value: bytes, revision: int) -> bool:
        """Set only if the key is at ``revision`` (0: it does not exist). False when somebody else was first."""

    def close(self) -> None:
        """Idempotent."""
