"""From the config to where environments come from."""

from __future__ import annotations

from orchestrator.api import ConfigError, Task
from orchestrator.config import Config
from orchestrator.environments.inprocess import InProcessBackend
from orchestrator.environments.pool import EnvPool, PoolSettings
from orchestrator.environments.session import Backend
from orchestrator.events import EventLog


def make_pool(
    config: Config, task: Task, owner: str, events: EventLog, backend: Backend | None = None
) -> EnvPool | None:
    """The pool that the config asks for, not yet opened; None for fresh objects in this process. ``owner`` begins the names
    of its sessions; ``backend`` is the one for the environments of ``task``, when they are not in this process."""
    chosen = config.environment
    if chosen.backend == "in-process":
        return None
    if backend is None:
        if chosen.backend != "in-process-pool":
            fix = "this command runs environments in its own process only: use 'in-process' or 'in-process-pool'"
            raise ConfigError("environment.backend", chosen.backend, fix)
        backend = InProcessBackend(task)
    size = chosen.size or config.rollout.environments
    settings = PoolSettings(
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
    return EnvPool(backend, settings, events)
