"""The sections of a run's configuration: field by field what may be written, and what it is when nothing is.

Guarantees: unknown keys are errors; a value that no run could use is an error that names the field, the value and the fix.
"""

from __future__ import annotations

from orchestrator.sections.agents import AgentSection
from orchestrator.sections.base import Section
from orchestrator.sections.cluster import RaySection, RelaySection, ResourcesSection
from orchestrator.sections.environments import EnvironmentSection, KubernetesSection, ToolsSection
from orchestrator.sections.prediction import PlacementSection, PredictionSection
from orchestrator.sections.rewards import AdaptiveTimeoutSection, JudgeSection, RewardSection, ServeSection
from orchestrator.sections.rollout import (
    BorrowedSection,
    ColocationSection,
    ContextSection,
    DisaggregationSection,
    EngineSection,
    FiltersSection,
    KvTransferSection,
    PlannerSection,
    RolloutSection,
    RoundsSection,
    RoutingSection,
    TaskContextSection,
)
from orchestrator.sections.run import (
    CheckpointSection,
    EvaluationSection,
    MemorySection,
    ModelSection,
    RunSection,
    TaskSection,
)
from orchestrator.sections.sim import SimSection
from orchestrator.sections.tls import TlsSection
from orchestrator.sections.trainer import TrainerSection, WarmupSection
from orchestrator.sections.view import LoggingSection, OtlpSection, ViewSection, WandbSection

__all__ = [
    "AdaptiveTimeoutSection",
    "AgentSection",
    "BorrowedSection",
    "CheckpointSection",
    "ColocationSection",
    "ContextSection",
    "DisaggregationSection",
    "EngineSection",
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
