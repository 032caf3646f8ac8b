"""What scores a run, from its config: a judge, or a function on Ray Serve. The embedded host is a child of the run
(:mod:`orchestrator.runtime.function_hosts`). Nothing is started here."""

from __future__ import annotations

import os
from pathlib import Path

from orchestrator.api import Task
from orchestrator.config import Config
from orchestrator.policies.episodes.adaptive_timeouts import AdaptiveTimeouts
from orchestrator.rewards.host_launch import PATIENCE
from orchestrator.rewards.judge_host import JudgeHost
from orchestrator.rewards.llm_judge import TEMPLATE, LLMJudge
from orchestrator.rewards.ray_serve import Elasticity, RayServeHost
from orchestrator.run_folder import environment_owner
from orchestrator.tasks import registry

WAIT_SECONDS = 30.0  # of a call under adaptive timeouts for its process, beside what it may run


def judge_of(config: Config, task: Task, own: JudgeHost | None = None) -> LLMJudge:
    """The model that the config names; ``own``: the run's, which is started, and restarted when it dies."""
    settings, judge = config.reward, config.reward.judge
    token = os.environ.get("RL_COSERVE_JUDGE_TOKEN", "") if own is None else own.token
    return LLMJudge(
        task,
        judge.url if own is None else own.url,
        model=judge.model or Path(judge.path).name,
        criterion=judge.criterion,
        template=judge.template or TEMPLATE,
        low=judge.low,
        high=judge.high,
        structured=own is None and judge.structured is not False,
        max_tokens=judge.max_tokens,
        temperature=0.0 if settings.votes == 1 else 0.7,  # else all votes would be the same
        token=token,
        concurrency=settings.concurrency if own is None else 1,  # it answers one at a time, and waiting is not its time
        timeout=settings.call_seconds(by_case=False),
        retries=settings.retries,
        seed=config.run.seed,
        tls=config.tls.files(),
        patience=0.0 if own is None else PATIENCE + judge.streamed.start_seconds,
    )


def elastic_host(config: Config, task: Task, run: Path) -> RayServeHost:
    """The reward function on Ray Serve, not started."""
    settings, serve = config.reward, config.reward.serve
    return RayServeHost(
        settings.function or registry.reward_of(task),
        application=f"rl-coserve-{environment_owner(run)}",
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
