"""The ports: protocols through which the orchestrator uses engines, environments, rewards, relays and stores.

Every adapter (Ray actor, HTTP, Mooncake, SQLite) and every simulated part implements one. Methods that wait are coroutines;
none may block the event loop or read a clock other than the loop's.
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

# A trainer rank may write this beside its checkpoint files: {name: [bytes, xxh3-64 in hex]}
CHECKPOINT_DIGESTS = "digests-{}.json"


@runtime_checkable
class RolloutWorker(Protocol):
    """A command-driven inference worker (RollArt 6.1): it takes commands between engine steps.

    Every added request ends in exactly one completion, even after ABORT. Commands are idempotent by request id.
    A dead worker raises :class:`~orchestrator.api.RetryableError` from every pending and later call.
    """

    name: str

    async def add(self, requests: Sequence[GenerationRequest]) -> None:
        """Enqueue turns. Accepted while suspended; they start after ``resume``."""

    async def abort(
        self, request_ids: Sequence[str] = (), *, trajectories: Sequence[str] = (), groups: Sequence[str] = ()
    ) -> None:
        """Cancel requests, by id, trajectory or group. Each still yields a completion, with finish reason ``abort`` and its
        tokens so far; when this returns, they generate nothing more. Unknown ids are ignored."""

    async def prioritize(self, priorities: Mapping[str, int]) -> None:
        """Change the priority of these trajectories' unfinished requests, waiting or running (Heddle 4.2). Unknown trajectories
        are ignored, as their requests may have just finished."""

    async def completions(self) -> list[Completion]:
        """Wait until at least one request has finished; return all finished ones, each once, in the order in which they
        finished."""

    async def suspend(self) -> None:
        """Stop between two engine steps; in-flight requests keep their tokens."""

    async def prepare(self, version: int) -> None:
        """Fetch and verify ``version`` while requests continue, so that ``update`` only has to load it. Optional, idempotent.
        Raises RetryableError, with nothing changed, if the relay does not deliver all of it."""

    async def update(self, version: int) -> UpdateResult:
        """Load ``version``, from the relay unless it was prepared. KV of older weights is never used again.

        Only while suspended. After CommandError (the caller's mistake) or RetryableError (the relay did not deliver all of it)
        the old weights are intact. CommandError ``weights_unusable``: it failed while being applied.
        """

    async def resume(self) -> None:
        """Continue: in-flight requests recompute their KV under the new weights (RollArt 6.2, step 5). After an update that
        failed half-way it raises CommandError ``weights_unusable``, and the worker stays suspended."""

    async def stats(self) -> WorkerStats:
        """A snapshot; cheap."""

    async def close(self) -> None:
        """Stop the worker and free what it holds. Idempotent."""


@runtime_checkable
class ManagedWorker(RolloutWorker, Protocol):
    """A worker whose process the orchestrator can bring back (RollArt 8: restart in place)."""

    async def restart(self) -> None:
        """Restart after a crash or a stall: without requests, not suspended, with the weights of its first start (version in
        ``stats``). Raises RetryableError if it does not start."""


@runtime_checkable
class ResizableWorker(ManagedWorker, Protocol):
    """A worker that can be restarted over another number of devices (RollPacker 4.2)."""

    ranks: int  # devices that it has, or will have at the next start; 0: not to be started

    async def resize(self, ranks: int) -> None:
        """End the process, whatever it is doing; ``restart`` then starts one over ``ranks`` devices (0: none)."""


@runtime_checkable
class ExpertWorker(ResizableWorker, Protocol):
    """A ResizableWorker that supports expert parallelism: whole experts on each device instead of a slice of every expert
    (RollPacker 7)."""

    expert_ranks: int  # expert-parallel size, a divisor of ``ranks``; 1: every expert is sliced

    async def resize(self, ranks: int, expert_ranks: int = 1) -> None:
        """See :class:`ResizableWorker`."""


@runtime_checkable
class PlacedWorker(Protocol):
    """A worker that knows which pool it was placed in."""

    hardware: str  # the class of its pool ("H800", "H20", ...); "" if none was requested


@runtime_checkable
class BorrowedWorker(ManagedWorker, Protocol):
    """A worker in a process that somebody else starts and stops: a server with its own users.

    ``restart`` reconnects if the server is up, and otherwise raises RetryableError at once: it may come back by itself, so try
    again later. ``close`` leaves it running without our requests.
    """

    url: str


@runtime_checkable
class Trainer(Protocol):
    """The training side. ``version`` counts published updates; one ``train_step`` makes the next one."""

    async def train_step(self, batch: TrainBatch) -> TrainMetrics:
        """Train on complete groups; afterwards the weights are version ``metrics.version``, not yet published."""

    async def feed(self, samples: Sequence[TrainSample], version: int) -> None:
        """Announce complete groups of the next ``train_step`` at ``version``, so that their gradients can be computed early
        (RollPacker 4.4). It never changes the result of ``train_step``: a batch that does not begin with exactly what was fed, in
        that order, or that is for another version, is trained from the start. May be ignored. Raises RetryableError if the
        trainer failed: its state is in the last checkpoint."""

    async def publish(self) -> PublishResult:
        """Put the current weights on the relay under the current version, then move the version pointer."""

    async def save(self, folder: str) -> None:
        """Begin to write model, optimizer, LR schedule, RNG and version to an existing empty folder; when it returns, they may
        change. Files listed in :data:`CHECKPOINT_DIGESTS` beside them are not digested again."""

    async def saved(self) -> None:
        """Wait until the save is written; may run beside other calls. Raises RetryableError if it failed."""

    async def load(self, folder: str) -> int:
        """Restore what ``save`` wrote; returns the version."""

    async def close(self) -> None:
        """Stop and free. Idempotent."""


class Environment(Protocol):
    """One environment instance: token ids in, token ids out. It may raise; the manager counts errors by cause."""

    version: str

    async def reset(self, prompt: Prompt) -> Observation:
        """Start an episode from a prompt."""

    async def step(self, action_ids: tuple[int, ...]) -> StepResult:
        """Apply one turn's tokens."""

    async def close(self) -> None:
        """Free the instance. Idempotent."""


TimeoutMeaning = Literal["failed", "truncated", "partial"]
"""How an episode that hit a time limit counts. ``failed``: masked, never trained on. ``truncated``: scored as it is, its last
action included. ``partial``: its reward is the sum of its turns' rewards, and no reward function is called. A task sets it as
``on_timeout``; the default is ``failed``, which also holds for an episode without a turn."""


class TaskLimits(Protocol):
    """How long an episode may be, and its vocabulary."""

    @property
    def name(self) -> str: ...

    @property
    def vocabulary(self) -> Sequence[str]:
        """Token id -> word."""

    @property
    def max_turns(self) -> int: ...

    @property
    def max_response_tokens(self) -> int:
        """Per turn."""

    @property
    def max_context_tokens(self) -> int:
        """Per trajectory."""


class Task(Protocol):
    """What is trained on: prompts, environments for them, and their vocabulary. A mixture of tasks also has ``parts``: the
    limits of each task, by ``Prompt.task``."""

    name: str
    vocabulary: Sequence[str]  # token id -> word
    pad_id: int
    end_id: int  # end of turn
    max_turns: int
    max_response_tokens: int  # per turn
    max_context_tokens: int  # per trajectory

    def prompts(self, split: str, seed: int) -> Iterator[Prompt]:
        """``"train"``: endless and deterministic in ``seed``. ``"heldout"``: finite, fixed, disjoint from training."""

    def environment(self) -> Environment:
        """A fresh environment instance."""


def stop_ids_of(task: Task) -> tuple[int, ...]:
    """The tokens that end a turn: ``end_id``, and those that a task has beside it, as ``stop_ids``."""
    return tuple(dict.fromkeys((task.end_id, *getattr(task, "stop_ids", ()))))


def parts_of(task: Task) -> Mapping[str, TaskLimits]:
    """The parts of a mixture; empty for any other task."""
    parts: Mapping[str, TaskLimits] = getattr(task, "parts", {})
    return parts


class DemonstratingTask(Task, Protocol):
    """A task that can show how it is done, for a supervised warm-up."""

    def demonstrations(self, n: int, seed: int, skill: float) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
        """``n`` episodes as (token ids, loss mask) of equal length. Each move is an expert's with probability ``skill``."""


class RewardFunction(Protocol):
    """Scores a finished trajectory. Raises RetryableError if the endpoint may recover, otherwise TrajectoryError."""

    async def score(self, trajectory: Trajectory) -> float:
        """The terminal reward; finite."""


@runtime_checkable
class LimitedReward(RewardFunction, Protocol):
    """A RewardFunction whose calls may wait for a slot."""

    limited: bool  # each call has its own time limit, counted from when it gets a slot


class Relay(Protocol):
    """Write-once objects under immutable keys (a Mooncake Store, files, or memory). Called inside engine processes."""

    def put(self, key: str, data: memoryview) -> None:
        """Store once. Verified by size. Raises RetryableError."""

    def get_into(self, key: str, buffer: memoryview) -> int:
        """Fill ``buffer`` from its start; returns the bytes written. Raises RetryableError if the key is missing or reading
        fails."""

    def size(self, key: str) -> int:
        """Bytes, or -1 when the key does not exist."""

    def remove(self, key: str) -> bool:
        """Delete it; False while it is leased to a reader (try again later)."""

    def close(self) -> None:
        """Idempotent."""


class MetadataStore(Protocol):
    """Small shared facts (version pointer, leases). Values are bytes; ``revision`` grows with every change of a key."""

    def get(self, key: str) -> tuple[bytes, int] | None:
        """(value, revision), or None."""

    def compare_and_set(self, key: str, value: bytes, revision: int) -> bool:
        """Set only if the key is at ``revision`` (0: it does not exist). False if somebody else was first."""

    def close(self) -> None:
        """Idempotent."""
