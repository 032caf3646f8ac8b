"""From the config to where environments come from."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from orchestrator.api import ConfigError, Task
from orchestrator.config import Config
from orchestrator.environments.environment_pool import EnvPool, PoolSettings
from orchestrator.environments.environment_session import Backend
from orchestrator.environments.inprocess import InProcessBackend
from orchestrator.environments.tool_functions import ToolTally
from orchestrator.events import EventLog

LIFETIME_MARGIN = (
    600  # seconds that a pod may outlive its greatest age and one trajectory: it waits in the pool, starts
)
TASK_OF_CONFIG = "orchestrator.environments.environment_process:task_of_config"


def make_pool(
    config: Config,
    task: Task,
    owner: str,
    events: EventLog,
    *,
    log: Path | None = None,
    tools: Mapping[str, Any] | None = None,
    tally: ToolTally | None = None,
) -> EnvPool | None:
    """The pool that the config asks for, not yet opened; None for fresh objects in this process. ``owner`` begins the names
    of its sessions and marks what is theirs. For environments in other processes: ``log`` gets what they print, ``tools``
    are the fields of their ToolSettings (those in this process have the task's), ``tally`` counts their calls."""
    backend = _backend(config, task, owner, log, tools, tally)
    return None if backend is None else EnvPool(backend, _settings(config, owner), events)


def owner_of(run: Path) -> str:
    """Who owns what environments leave outside this machine: the same for every life of a run, no two runs share it."""
    file = run / "owner"
    if not file.exists():
        file.write_text(f"{run.name}-{secrets.token_hex(4)}\n", encoding="utf-8")
    return file.read_text(encoding="utf-8").strip()


def target_of(config: Config, task: Task) -> tuple[str, dict[str, Any]]:
    """What makes the task's environments in another process, and with which arguments: what the task's own
    ``environment_target()`` says, else the whole task from the config."""
    own = getattr(task, "environment_target", None)
    if own is None:
        return TASK_OF_CONFIG, {"config": config.model_dump(mode="json")}
    target, arguments = own()
    return str(target), dict(arguments)


def _backend(
    config: Config,
    task: Task,
    owner: str,
    log: Path | None,
    tools: Mapping[str, Any] | None,
    tally: ToolTally | None,
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
            return SubprocessBackend(target, arguments, owner=owner, log=log, tools=tools, tally=tally, **limits)
        case "kubernetes":
            return _pods(config, task, owner, tools, tally)


def _pods(config: Config, task: Task, owner: str, tools: Mapping[str, Any] | None, tally: ToolTally | None) -> Backend:
    from orchestrator.environments.pod_manifests import PodSettings
    from orchestrator.environments.pods import PodBackend

    if config.tools.functions:
        fix = "pods do not reach the embedded host, which listens on loopback: give tools.urls that they reach"
        raise ConfigError("tools.functions", sorted(config.tools.functions), fix)
    chosen, rollout = config.environment, config.rollout
    pods = chosen.kubernetes
    names = ("image", "namespace", "registry_mirror", "pull_policy", "cpu", "memory", "node_selector", "port")
    own_pod = (os.environ.get("POD_NAME", ""), os.environ.get("POD_UID", ""))
    settings = PodSettings(
        owner=owner,
        orphan_seconds=pods.orphan_seconds,
        lifetime=int(chosen.max_age_seconds + rollout.trajectory_timeout) + LIFETIME_MARGIN,
        owner_pod=own_pod if all(own_pod) else None,
        **{name: getattr(pods, name) for name in names},
    )
    target, arguments = target_of(config, task)
    limits = {"cpu_seconds": chosen.cpu_seconds, "call_seconds": rollout.environment_step_timeout}
    return PodBackend(
        target,
        arguments,
        settings,
        limits=limits,
        context=pods.context,
        pre_pull=pods.pre_pull,
        tools=tools,
        tally=tally,
    )


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
