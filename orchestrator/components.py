"""What a run is made of, and where it stands: records that :mod:`orchestrator.pipeline` is given and keeps."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from orchestrator.api import ManagedWorker, RewardFunction, Task, Trainer, Trajectory, Turn
from orchestrator.borrowing.server_exchange import Market
from orchestrator.checkpoint import Checkpoints
from orchestrator.environments.environment_session import EnvironmentSource
from orchestrator.events import EventLog
from orchestrator.ledger import Ledger
from orchestrator.observe.occupancy import Gpus
from orchestrator.placement.length_tracker import PredictorPort
from orchestrator.placement.placer import RatesOf
from orchestrator.policies.episodes.adaptive_timeouts import AdaptiveTimeouts
from orchestrator.policies.parallelism.degree_reallocation import DegreeReallocator
from orchestrator.policies.parallelism.parallelism_planner import ParallelismPlanner
from orchestrator.proxy.engine_scaling import EngineSource
from orchestrator.shards.shard_folder import LaidTrajectory


class Store(Protocol):
    """Where trajectories are kept (:mod:`orchestrator.store`)."""

    def append(
        self, trajectory: Trajectory, step: int, outcome: str, *, position: int | None = None, weight: float = 1.0
    ) -> None: ...

    def behind(self) -> str: ...

    def flush(self) -> None: ...

    async def flushed(self) -> None: ...


class Shards(Protocol):
    """Where the numbers of finished trajectories lie (:mod:`orchestrator.shards.shard_folder`)."""

    def finish(self, trajectory: Trajectory) -> Trajectory: ...

    async def finish_in_slices(self, trajectory: Trajectory) -> Trajectory: ...

    def lost(self, trajectories: Iterable[Trajectory]) -> list[str]: ...


class ShardLink(Protocol):
    """The way to a shard of environment managers that is up."""

    def send(self, message: bytes) -> None:
        """In order; what is sent to one that is gone is lost."""

    def kill(self) -> None:
        """End it at once. Idempotent."""


class ShardStarter(Protocol):
    """Starts one shard of environment managers, again and again."""

    async def start(self, heard: Callable[[bytes], None], lost: Callable[[str], None]) -> ShardLink:
        """One that is up. ``heard`` gets each of its messages, ``lost`` why it is gone, once; not after ``kill``. Raises
        ConfigError for what no other start cures, RunError and OSError when it does not come up."""


@dataclass(frozen=True, slots=True)
class ManagerParts:
    """Shards of environment managers (:mod:`orchestrator.manager_shards`). ``adopt``: the turns of a trajectory that a shard
    has laid; RunError where they are not there. ``shared``: how many of what they share, by the names of RESIZE."""

    starters: Sequence[ShardStarter]
    adopt: Callable[[LaidTrajectory], tuple[Turn, ...]]
    shared: Mapping[str, int] = field(default_factory=dict)


class InMemory:
    """They stay where they are: in a simulation."""

    def finish(self, trajectory: Trajectory) -> Trajectory:
        """See Shards."""
        return trajectory

    async def finish_in_slices(self, trajectory: Trajectory) -> Trajectory:
        """See Shards."""
        return trajectory

    def lost(self, trajectories: Iterable[Trajectory]) -> list[str]:
        """See Shards."""
        return []


class Display(Protocol):
    """Who watches (:mod:`orchestrator.observe.progress`). ``watched``: somebody does, so it is worth its time."""

    watched: bool

    def stage(self, name: str, detail: str = "") -> None: ...

    def waiting(self, reason: str) -> None: ...

    def update(self, **numbers: Any) -> None: ...

    def message(self, text: str) -> None: ...


@dataclass
class ForecastParts:
    """Of prediction and placement. ``predictor`` None: one in this process; ``rates`` of each worker, None: as the config
    says."""

    predictor: PredictorPort | None = None
    rates: RatesOf | None = None


@dataclass(frozen=True, slots=True)
class PoolSizes:
    """Of the pools that may change. ``begins``: what they have; ``read``: what they are to have
    (:func:`orchestrator.resources.pool_sizes.read_sizes`); ``tell``: who hears of it beside engines and environments."""

    begins: Mapping[str, int]
    read: Callable[[], Awaitable[Mapping[str, int]]]
    tell: Mapping[str, Callable[[int], None]] = field(default_factory=dict)


@dataclass
class Components:
    """Everything the pipeline talks to. Real or simulated, it cannot tell."""

    task: Task
    workers: list[ManagedWorker]
    trainer: Trainer
    reward: RewardFunction
    events: EventLog
    ledger: Ledger
    store: Store
    display: Display
    checkpoints: Checkpoints | None = None
    environments: EnvironmentSource | None = None  # None: fresh from the task for each episode
    tools: Callable[[], dict[str, Any]] | None = None  # counters of the tools that environments call
    rewards: Callable[[], dict[str, Any]] | None = None  # counters of the calls that score
    timeouts: AdaptiveTimeouts | None = None  # of test cases; None: fixed
    gpus: Gpus | None = None
    away: Callable[[], str] | None = None  # in words, which helper processes are being restarted; "": none
    kv_bytes: float = 0.0  # of one token in the model; 0: as the section `model` says
    # what predicts lengths, and what moves trajectories
    foresight: ForecastParts = field(default_factory=ForecastParts)
    planner: ParallelismPlanner | None = None  # at the layout that the workers were started with; None: a new one
    reallocation: DegreeReallocator | None = None  # the same, of rollout.placement.degrees
    market: Market | None = None  # of servers to borrow, exchanged between steps; None: workers stay
    engines: EngineSource | None = None  # of own engines that are added while it runs; None: they stay
    sizes: PoolSizes | None = None  # None: nothing is told another size
    shards: Shards = field(default_factory=InMemory)
    managers: ManagerParts | None = None  # None: environments, agents and rewards are called from the run's own process


@dataclass
class Position:
    """Where a run stands; what a resume starts from."""

    step: int = 0  # training steps done
    version: int = 0
    life: int = 0  # resumes so far; ids of what starts now carry it
    groups: int = 0  # ever started
    trajectories: int = 0
    buffered: tuple[Trajectory, ...] = ()
    success_history: list[tuple[int, float]] = field(default_factory=list)
    run_times: Mapping[str, Sequence[float]] = field(default_factory=dict)  # of adaptive timeouts
    kept: tuple[Trajectory, ...] = ()  # by the filters, before, oldest first: what they remember
    rounds: dict[str, Any] | None = None  # as in :class:`orchestrator.checkpoint.CheckpointState`
    degrees: dict[str, Any] | None = None  # the same
    entropies: tuple[float, ...] = ()  # the same
    redundancy: float | None = None  # the same
    lost: tuple[int, ...] = ()  # numbers of groups that are to be started again
    environments: Mapping[str, Sequence[str]] = field(default_factory=dict)  # their versions so far, by task
