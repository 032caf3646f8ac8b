"""Tasks by name: the built-in ones, and any class on the path that has the ``Task`` port.

Guarantee: nothing of a task is imported before it is asked for. Everything wrong with a name is one ConfigError.
"""

from __future__ import annotations

from typing import Any

from orchestrator.api import ConfigError, Task
from orchestrator.settings.user_functions import load_named

BUILT_IN: dict[str, str] = {
    "frozenlake": "orchestrator.tasks.frozenlake:FrozenLakeTask",
    "household": "orchestrator.tasks.household:HouseholdTask",
    "nim": "orchestrator.tasks.nim:NimTask",
    "calculator": "orchestrator.tasks.calculator:CalculatorTask",
    "coding": "orchestrator.tasks.coding:CodingTask",
    "repository": "orchestrator.tasks.repository:RepositoryTask",
    "reasoning_gym": "orchestrator.tasks.reasoning_gym:ReasoningGymTask",
    "sums": "orchestrator.tasks.sums:SumsTask",
    "mixture": "orchestrator.tasks.mixture:MixtureTask",
}
BROUGHT: dict[str, str] = {  # made of what the user brings: a program, a data set
    "agent": "orchestrator.tasks.agent_task:AgentTask",
    "dataset": "orchestrator.tasks.dataset:DatasetTask",
}
_PORT = ("name", "vocabulary", "pad_id", "end_id", "max_turns", "max_response_tokens", "max_context_tokens", "prompts")


def find(name: str) -> Any:
    """The class of a task: a name of :data:`BUILT_IN`, or ``module:Class``. Raises ConfigError."""
    target = {**BUILT_IN, **BROUGHT}.get(name, name)
    if ":" not in target:
        fix = f"no such task; there are: {', '.join((*BUILT_IN, *BROUGHT))}; write your own as module:Class (docs/tasks.md)"
        raise ConfigError("task.name", name, fix)
    return load_named("task.name", target, "class")


def make(name: str, heldout: int, **options: object) -> Task:
    """The task, with ``heldout`` held-out prompts. Raises ConfigError, also for what the task says about its arguments."""
    made = find(name)
    try:
        task = made(heldout, **options)
        missing = [attribute for attribute in (*_PORT, "environment") if not hasattr(task, attribute)]
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError("task", name, str(error)) from error
    except (Exception, SystemExit) as error:  # a class of the user's may raise anything
        raise ConfigError("task", name, f"cannot be made: {type(error).__name__}: {error}") from error
    if missing:
        raise ConfigError("task.name", name, f"is not a task: it has no {', '.join(missing)} (docs/tasks.md)")
    found: Task = task
    return found


def reward_of(task: Task) -> str:
    """``module:function`` that scores its trajectories. Raises ConfigError when the task names none."""
    function = getattr(task, "reward", "")
    if not function:
        raise ConfigError(
            "reward.function", "", f"task {task.name} names none: write module:function, or set reward.url"
        )
    return str(function)
