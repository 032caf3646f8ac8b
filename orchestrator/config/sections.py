"""The sections of a run's configuration: field by field what may be written, and what it is when nothing is.

Guarantees: unknown keys are errors; a value that no run could use is an error that names the field, the value and the fix.
"""

from __future__ import annotations

from orchestrator.config.agent_keys import AgentSection
from orchestrator.config.cluster_keys import RaySection, RelaySection, ResourcesSection
from orchestrator.config.environment_keys import EnvironmentSection, KubernetesSection, ToolsSection
from orchestrator.config.prediction_keys import PlacementSection, PredictionSection
from orchestrator.config.reward_keys import AdaptiveTimeoutSection, JudgeSection, RewardSection, ServeSection
from orchestrator.config.rollout_keys import (
    BorrowedSection,
    ColocationSection,
    ContextSection,
    DisaggregationSection,
    FiltersSection,
    KvTransferSection,
    PlannerSection,
    RolloutSection,
    RoundsSection,
    RoutingSection,
    TaskContextSection,
)
from orchestrator.config.run_keys import (
    CheckpointSection,
    EvaluationSection,
    MemorySection,
    ModelSection,
    RunSection,
    TaskSection,
    WarmupSection,
)
from orchestrator.config.sim_keys import SimSection
from orchestrator.config.tls_keys import TlsSection
from orchestrator.config.view_keys import LoggingSection, OtlpSection, ViewSection, WandbSection
from orchestrator.settings.engine_settings import EngineSettings
from orchestrator.settings.section import Section
from orchestrator.settings.trainer_settings import TrainerSection

__all__ = [
    "AdaptiveTimeoutSection",
    "AgentSection",
    "BorrowedSection",
    "CheckpointSection",
    "ColocationSection",
    "ContextSection",
    "DisaggregationSection",
    "EngineSettings",
    "EnvironmentSection",
    "EvaluationSection",
    "FiltersSection",
    "JudgeSection",
    "KubernetesSection",
    "KvTransferSection",
    "LoggingSection",
    "MemorySection",
    "ModelSection",
    "OtlpSection",
    "PlacementSection",
    "PlannerSection",
    "PredictionSection",
    "RaySection",
    "RelaySection",
    "ResourcesSection",
    "RewardSection",
    "RolloutSection",
    "RoundsSection",
    "RoutingSection",
    "RunSection",
    "Section",
    "ServeSection",
    "SimSection",
    "TaskContextSection",
    "TaskSection",
    "TlsSection",
    "ToolsSection",
    "TrainerSection",
    "ViewSection",
    "WandbSection",
    "WarmupSection",
]
