"""What scores a run, from its config: a judge, or a function on Ray Serve. The embedded host is a child of the run
(:mod:`orchestrator.runtime.hosts`). Nothing is started here."""

from __future__ import annotations

import os
from pathlib import Path

from orchestrator.api import Task
from orchestrator.config import Config
from orchestrator.environments.assemble import owner_of
from orchestrator.policies.timeouts import AdaptiveTimeouts
from orchestrator.rewards.judge import TEMPLATE, LLMJudge
from orchestrator.rewards.ray_serve import Elasticity, RayServeHost
from orchestrator.tasks import registry

WAIT_SECONDS = 30.0  # of a call under adaptive timeouts for its process, beside what it may run


def judge_of(config: Config, task: Task) -> LLMJudge:
    """The model that the config names."""
    settings, judge = config.reward, config.reward.judge
    return LLMJudge(
        task,
        judge.url,
        model=judge.model,
        criterion=judge.criterion,
        template=judge.template or TEMPLATE,
        low=judge.low,
        high=judge.high,
        structured=judge.structured,
        max_tokens=judge.max_tokens,
        temperature=0.0 if settings.votes == 1 else 0.7,  # else all votes would be the same
        token=os.environ.get("RL_COSERVE_JUDGE_TOKEN", ""),
        concurrency=settings.concurrency,
        timeout=settings.call_seconds(by_case=False),
        retries=settings.retries,
        seed=config.run.seed,
    )


def elastic_host(config: Config, task: Task, run: Path) -> RayServeHost:
    """The reward function on Ray Serve, not started."""
    settings, serve = config.reward, config.reward.serve
    return RayServeHost(
        settings.function or registry.reward_of(task),
        application=f"rl-coserve-{owner_of(run)}",
        elasticity=Elasticity(
            serve.min_replicas, serve.max_replicas, serve.per_replica, serve.cpus, settings.idle_seconds
        ),
        timeout=call_seconds(config, task),
        port=serve.port,
        shared=bool(config.ray.address),
    )


def adaptive_timeouts(config: Config) -> AdaptiveTimeouts | None:
    """Of test cases; None: the config has fixed ones."""
    chosen = config.reward.adaptive
    if config.reward.timeout != "adaptive":
        return None
    return AdaptiveTimeouts(chosen.factor, chosen.least, chosen.most)


def call_seconds(config: Config, task: Task) -> float:
    """How long the function may run for one trajectory of this task."""
    return config.reward.call_seconds(getattr(task, "reward_by_case", False))
