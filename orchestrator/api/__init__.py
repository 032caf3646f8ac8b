"""The contracts: data types, ports and errors that every part of rl-coserve shares. Standard library only.

Import names from here (``from orchestrator.api import Trajectory``), never from the submodules.
"""

from orchestrator.api.collective import CollectiveTrainer, CollectiveWorker, Meeting
from orchestrator.api.errors import (
    COMMAND_STATUS,
    CommandError,
    ConfigError,
    CoserveError,
    PartLost,
    ProcessDied,
    RetryableError,
    RunError,
    TrajectoryError,
)
from orchestrator.api.kv import KvMove, KvMoved, KvWorker
from orchestrator.api.ports import (
    BorrowedWorker,
    DemonstratingTask,
    Environment,
    ExpertWorker,
    ManagedWorker,
    MetadataStore,
    PlacedWorker,
    Relay,
    ResizableWorker,
    RewardFunction,
    RolloutWorker,
    Task,
    TaskLimits,
    Trainer,
    parts_of,
)
from orchestrator.api.residency import (
    RELEASE_LEVELS,
    RESIDENCY_LEVELS,
    ReleaseResult,
    ReleasingWorker,
    ResidencyResult,
    ResidentTrainer,
)
from orchestrator.api.types import (
    Completion,
    CompletionTiming,
    ContextStart,
    GenerationRequest,
    Observation,
    Prompt,
    PublishResult,
    Sampling,
    ShardKey,
    SharedDevice,
    StepResult,
    TrainBatch,
    TrainMetrics,
    TrainSample,
    Trajectory,
    Turn,
    UpdateResult,
    VersionSpans,
    WeightManifest,
    WorkerStats,
    merge_spans,
)
