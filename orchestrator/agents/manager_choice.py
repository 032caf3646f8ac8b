"""Which manager plays the episodes of a task, and whether their end says the reward. Imports no server before it is needed."""

from __future__ import annotations

from orchestrator.api import Task
from orchestrator.config.reward_keys import RewardSection
from orchestrator.envs import EnvManager


def manager_of(task: Task) -> type[EnvManager]:
    """That of agent programs for tasks which have one, else the one that drives environments."""
    if not is_agent(task):
        return EnvManager
    from orchestrator.agents.agent_manager import AgentManager

    return AgentManager


def is_agent(task: object) -> bool:
    """Whether an agent program makes its trajectories."""
    return hasattr(task, "program") and hasattr(task, "chat")


def outcome_scores(reward: RewardSection, task: object) -> bool:
    """Whether the end of the agent is the reward: nothing else was named."""
    named = reward.url or reward.function or reward.judge.any or reward.judges
    return is_agent(task) and not named
