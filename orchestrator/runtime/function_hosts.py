"""The rewards and the tools of a run: clients, and the hosts of functions that the run starts and keeps.

Guarantees: a host that the run started is in its keeper, which brings it back at its old address, and its clients are patient
for that long; everything is closed with the run's exit stack.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from orchestrator.agents.manager_choice import outcome_scores
from orchestrator.api import RewardFunction, Task, bearer
from orchestrator.config import Config
from orchestrator.config.reward_keys import JudgeSection
from orchestrator.environments.tool_functions import ToolClient, ToolSettings, ToolUser
from orchestrator.events import EventLog
from orchestrator.placement.length_tracker import PredictorPort
from orchestrator.placement.predictor_client import PredictorProcess
from orchestrator.policies.episodes.adaptive_timeouts import AdaptiveTimeouts
from orchestrator.resources.pool_sizes import pools_of
from orchestrator.rewards.host_launch import PATIENCE, FunctionHost, JudgeHost, RewardHost
from orchestrator.rewards.llm_judge import TEMPLATE, LLMJudge
from orchestrator.rewards.ray_serve import Elasticity, RayServeHost
from orchestrator.rewards.reward_client import HttpReward, RewardByTask
from orchestrator.rewards.voting import MajorityVote
from orchestrator.run_folder import RunFolder, environment_owner
from orchestrator.runtime import judge_setup as judges
from orchestrator.runtime.process_keeper import Keeper
from orchestrator.tasks import registry

WAIT_SECONDS = 30.0  # of a call for its process to start, beside what it may run, where the function's host limits that


@dataclass(frozen=True)
class Rewards:
    """``counters``: of the calls that score, since the start; ``resize``: how many of them may be in flight, None: it stays."""

    function: RewardFunction
    counters: Callable[[], dict[str, Any]]
    timeouts: AdaptiveTimeouts | None  # of test cases; None: fixed
    beside: Mapping[str, str] = field(default_factory=dict)  # what engines beside the run's judge start with
    resize: Callable[[int], None] | None = None
    call: Mapping[str, Any] | None = (
        None  # keywords of the client, for another process; None: it is asked from here only
    )
    host: Mapping[str, Any] | None = (
        None  # keywords of a host like the run's own, for another machine; None: it has none
    )


async def start_reward(
    config: Config, task: Task, keeper: Keeper, stack: AsyncExitStack, folder: RunFolder, events: EventLog
) -> Rewards:
    """What scores trajectories. Raises ConfigError and RunError."""
    settings = config.reward
    timeouts = adaptive_timeouts(config)
    if outcome_scores(config.reward, task):
        from orchestrator.agents.agent_manager import OutcomeReward

        return Rewards(OutcomeReward(), dict, None)
    hosts, beside = await judges.start(config, keeper, stack, folder, events)
    reward: LLMJudge | HttpReward | RewardByTask
    call: dict[str, Any] | None = None
    alike: dict[str, Any] | None = None
    if settings.judge.any:
        reward = judge_of(config, task, settings.judge, hosts.get(""))
    else:
        call = await _function(config, task, timeouts, keeper, stack, folder)
        if not settings.url and settings.host == "embedded":
            alike = _host_keywords(config, task)
        said: dict[str, Any] = {name: getattr(task, name, None) for name in ("played", "said", "scorers")}
        reward = function = HttpReward(timeouts=timeouts, tls=config.tls.files(), **said, **call)
        if settings.judges:
            asked = {name: judge_of(config, task, one, hosts.get(name)) for name, one in settings.judges.items()}
            reward = RewardByTask(asked, function)
    stack.push_async_callback(reward.close)
    return Rewards(
        reward if settings.votes == 1 else MajorityVote(reward, settings.votes, settings.vote_by),
        reward.stats,
        timeouts,
        beside,
        None if isinstance(reward, LLMJudge) else reward.resize,
        call,
        alike,
    )


def _host_keywords(config: Config, task: Task) -> dict[str, Any]:
    settings = config.reward
    return {
        "function": settings.function or registry.reward_of(task),
        "concurrency": settings.concurrency,  # the client has fewer calls in flight, and may get more
        "timeout": call_seconds(config, task),
        "idle_seconds": settings.idle_seconds,
    }


async def _function(
    config: Config,
    task: Task,
    timeouts: AdaptiveTimeouts | None,
    keeper: Keeper,
    stack: AsyncExitStack,
    folder: RunFolder,
) -> dict[str, Any]:
    """Keywords of the client."""
    settings, seconds = config.reward, call_seconds(config, task)
    url, token, patience = settings.url, bearer.variable("RL_COSERVE_REWARD_TOKEN"), 0.0
    slots, beside = settings.concurrency, WAIT_SECONDS  # a host of ours limits a call itself, once it runs
    if url:
        beside = WAIT_SECONDS if timeouts is not None else 0.0
    elif settings.host == "ray_serve":
        slots = min(slots, settings.serve.max_replicas * settings.serve.per_replica)
        served = elastic_host(config, task, folder.path)
        await served.start()
        stack.push_async_callback(served.stop)
        url, token, patience = served.url, served.token, PATIENCE  # Serve replaces what dies by itself
    else:
        slots = pools_of(config)["rewards"].begins
        host = RewardHost(**_host_keywords(config, task), log=folder.logs / "reward-host.log")
        await host.start()
        stack.push_async_callback(host.stop)
        keeper.keep("reward host", host, settings.host_restarts)
        url, token, patience = host.url, host.token, PATIENCE
    return {
        "url": url,
        "token": token,
        "concurrency": slots,
        "whole": settings.adaptive.whole,
        "timeout": seconds + beside,
        "retries": settings.retries,
        "seed": config.run.seed,
        "patience": patience,
    }


def judge_of(config: Config, task: Task, judge: JudgeSection, own: JudgeHost | None = None) -> LLMJudge:
    """A model that the config names; ``own``: the run's, which is started, and restarted when it dies."""
    settings = config.reward
    token = bearer.variable("RL_COSERVE_JUDGE_TOKEN") if own is None else own.token
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
        concurrency=settings.concurrency,
        # ours computes what waits as one batch; where memory is for one at a time, the last of them waits for all others
        timeout=settings.judge_seconds(judge) * (1 if own is None else settings.concurrency),
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


async def start_predictor(config: Config, task: Task, stack: AsyncExitStack, folder: RunFolder) -> PredictorPort | None:
    """The process that predicts lengths; None: none is wanted. Raises RunError; a file that cannot be used: see preflight."""
    settings = config.rollout.prediction
    if not settings.enabled or settings.in_process:
        return None
    prior, seed = float(task.max_response_tokens), config.run.seed
    process = PredictorProcess(settings, prior, seed, folder.path / "predictor.npz", folder.logs / "predictor.log")
    await process.start()
    stack.push_async_callback(process.stop)
    return process


@dataclass(frozen=True)
class Tools:
    """``settings``: what other processes are sent; ``cold``: tools that could not be warmed up."""

    client: ToolClient
    settings: dict[str, Any]
    cold: tuple[str, ...]


async def start_tools(config: Config, task: Task, keeper: Keeper, stack: AsyncExitStack, logs: Path) -> Tools | None:
    """The tools of the environments, warmed up; the task has them. None: the config has none. Raises ConfigError, RunError."""
    settings = config.tools
    if not settings.any:
        return None
    urls, token, patience = dict(settings.urls), bearer.variable("RL_COSERVE_TOOLS_TOKEN"), 0.0
    if settings.functions:
        host = FunctionHost(
            settings.functions,
            field="tools.functions",
            concurrency=min(settings.concurrency, 2 * (os.cpu_count() or 1)),
            timeout=settings.timeout,
            idle_seconds=settings.idle_seconds,
            log=logs / "tools-host.log",
        )
        await host.start()
        stack.push_async_callback(host.stop)
        keeper.keep("tools host", host, settings.host_restarts)
        urls, token = {name: host.url_of(name) for name in settings.functions}, host.token
        patience = PATIENCE
    beside = WAIT_SECONDS if settings.functions else 0.0  # else a tool that the host would end is asked once more
    limits = {name: getattr(settings, name) for name in ("concurrency", "burst", "retries")}
    limits["timeout"] = settings.timeout + beside
    found = ToolSettings(urls, token, seed=config.run.seed, patience=patience, tls=asdict(config.tls.files()), **limits)
    client = ToolClient(found)
    stack.push_async_callback(client.close)
    user: object = task
    assert isinstance(user, ToolUser), "see preflight"
    user.use_tools(client)
    return Tools(client, dict(vars(found)), await client.prewarm(settings.warm))
