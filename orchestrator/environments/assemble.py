"""From the config to where environments come from."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from orchestrator.api import ConfigError, Task
from orchestrator.config import Config
from orchestrator.environments.inprocess import InProcessBackend
from orchestrator.environments.pool import EnvPool, PoolSettings
from orchestrator.environments.session import Backend
from orchestrator.events import EventLog

TASK_OF_CONFIG = "orchestrator.environments.worker:task_of_config"


def make_pool(
    config: Config,
    task: Task,
    owner: str,
    events: EventLog,
    *,
    log: Path | None = None,
    tools: Mapping[str, Any] | None = None,
) -> EnvPool | None:
    """The pool that the config asks for, not yet opened; None for fresh objects in this process. ``owner`` begins the names
    of its sessions and marks what is theirs; ``log`` gets what environments in other processes print, ``tools`` (fields of ToolSettings) is for them
    too: those in this process have the task's."""
    backend = _backend(config, task, owner, log, tools)
    return None if backend is None else EnvPool(backend, _settings(config, owner), events)


def target_of(config: Config, task: Task) -> tuple[str, dict[str, Any]]:
    """What makes the task's environments in another process, and with which arguments: what the task's own
    ``environment_target()`` says, else the whole task from the config."""
    own = getattr(task, "environment_target", None)
    if own is None:
        return TASK_OF_CONFIG, {"config": config.model_dump(mode="json")}
    target, arguments = own()
    return str(target), dict(arguments)


def _backend(
    config: Config, task: Task, owner: str, log: Path | None, tools: Mapping[str, Any] | None
) -> Backend | None:
    chosen = config.environment
    match chosen.backend:
        case "in-process":
            return None
        case "in-process-pool":
            return InProcessBackend(task)
        case "subprocess":
            from orchestrator.environments.subprocesses import SubprocessBackend

            target, arguments = target_of(config, task)
            limits = {"memory_mb": chosen.memory_mb, "cpu_seconds": chosen.cpu_seconds}
            return SubprocessBackend(target, arguments, owner=owner, log=log, tools=tools, **limits)
        case other:
            raise ConfigError("environment.backend", other, "not yet")


def _settings(config: Config, owner: str) -> PoolSettings:
    chosen = config.environment
    size = chosen.size or config.rollout.environments
    return PoolSettings(
        size=size,
        owner=owner,
        warm=min(chosen.warm, size),
        parallel_starts=chosen.parallel_starts,
        start_timeout=chosen.start_timeout,
        start_tries=chosen.start_tries,
        backoff_first=chosen.backoff_first,
        backoff_limit=chosen.backoff_limit,
        call_timeout=config.rollout.environment_step_timeout,
        ping_timeout=chosen.health_timeout,
        ping_every=chosen.health_seconds,
        idle=chosen.idle_seconds,
        max_age=chosen.max_age_seconds,
        max_episodes=chosen.max_episodes,
        seed=config.run.seed,
    )
