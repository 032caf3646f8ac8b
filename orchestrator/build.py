"""The composition root: it alone turns a config into the parts of a loop, for real and for simulated runs alike.

Who starts a run (:mod:`orchestrator.runtime.real_run`, :mod:`orchestrator.sim.simulated_run`) makes :class:`Components`, what is
behind the ports; :func:`build_pipeline` makes the rest around them. Everything else receives what it needs: settings of its own,
and the objects that it talks to. What cannot be together in one run is one ConfigError here, before anything is sent anywhere.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from orchestrator.agents.manager_choice import manager_of
from orchestrator.api import (
    BorrowedWorker,
    ConfigError,
    ManagedWorker,
    Task,
    Trajectory,
    parts_of,
)
from orchestrator.borrowing.server_exchange import Exchange
from orchestrator.buffer import SampleBuffer
from orchestrator.colocation.group_feeder import GroupFeeder
from orchestrator.colocation.stream_training import StreamTraining, kv_bytes_per_token
from orchestrator.components import Components, ForecastParts, ManagerParts, Position
from orchestrator.config import Config
from orchestrator.config.rollout_keys import FiltersSection, RolloutSection, RoutingSection
from orchestrator.environments.environment_pool import EnvPool, PoolSettings
from orchestrator.environments.environment_session import EnvironmentBackend, EnvironmentSource
from orchestrator.environments.environment_wire import longest_answer
from orchestrator.environments.episode_context import setup_of
from orchestrator.environments.inprocess import InProcessBackend
from orchestrator.environments.lockstep import Lockstep
from orchestrator.environments.tool_functions import ToolTally
from orchestrator.envs import EnvManager, EpisodePlayer, TurnServer
from orchestrator.evaluation import Evaluator
from orchestrator.events import EventLog
from orchestrator.manager_shards.shard_managers import ShardManagers
from orchestrator.parallelism.planner_setup import (
    make_planner,
    make_reallocation,
    rates_of_degree,
    rates_of_workers,
    read_profile,
)
from orchestrator.parallelism.replanner import DegreePlanner, Replanner, StepPlanner
from orchestrator.pipeline import Helper, LoopSettings, Pipeline, RunControl
from orchestrator.placement.forecast_setup import InProcessPredictor, make_predictor
from orchestrator.placement.length_tracker import LengthTracker, prioritize
from orchestrator.placement.placer import TrajectoryPlacer, rates_by_name
from orchestrator.policies.batching import coordination_modes
from orchestrator.policies.batching.round_planner import RoundRules
from orchestrator.policies.batching.stream_trigger import KvLimit, Unit
from orchestrator.policies.batching.trajectory_filters import (
    BatchBalance,
    CompletenessFilter,
    FilterChain,
    QualityFilter,
    RepetitionFilter,
    SimilarityFilter,
    TrajectoryFilter,
)
from orchestrator.policies.prediction.prompt_lengths import PromptLengthPredictor as LengthPredictor
from orchestrator.policies.training.learning_alarms import AlarmBars, LearningWatch, PromptRepeats
from orchestrator.policies.training.sample_weights import LagWeight
from orchestrator.proxy import router_setup
from orchestrator.proxy.engine_scaling import EngineScaling
from orchestrator.proxy.gateway import LLMProxy
from orchestrator.proxy.kv_moves import GapMover, kv_moves
from orchestrator.proxy.membership import Membership
from orchestrator.proxy.prefill_decode import PrefillDecode
from orchestrator.proxy.resize import EngineResizing, require_resizable
from orchestrator.proxy.worker_state import WorkerLimits
from orchestrator.resources.pool_sizes import PoolWatch
from orchestrator.rollout import BatchSize, Rollout
from orchestrator.tail_batching import PROGRESSIVE, PromptLengths, Rounds
from orchestrator.trainer_calls import TrainerCalls
from orchestrator.weight_sync import WeightSync

# seconds that a pod may outlive its greatest age and one trajectory: it waits in the pool, starts
LIFETIME_MARGIN = 600
SHARD_MARGIN = 30.0  # seconds that a shard may take to end an episode, beside the limits of its environment
TASK_OF_CONFIG = "orchestrator.environments.environment_process:task_of_config"


def build_pipeline(config: Config, parts: Components, position: Position | None = None) -> Pipeline:
    """The loop of a run around its components, from ``position`` on (None: the beginning). Within the event loop that it will run
    in; nothing is started. Raises ConfigError for what fits neither together nor to the task."""
    position, control = position or Position(), RunControl()

    def keep(trajectory: Trajectory, state: str, cause: str) -> None:
        parts.store.append(trajectory, position.step, f"{state}: {cause}" if cause else state)

    rollout, resizing = build_rollout(config, parts, position, keep, control.fail)
    calls = TrainerCalls(config.run.trainer_timeout)
    turns = _stream_training(config, parts, rollout)
    if turns is not None:
        parts.trainer, rollout.on_played = turns.trainer, turns.finished
    feeder = GroupFeeder(
        lambda samples, version: calls.final("feed", parts.trainer.feed(samples, version)),
        parts.events,
        config.trainer.stream,
    )
    weights = WeightSync(
        parts.trainer, rollout.proxy, parts.events, calls.limited, config.collective_limit, config.relay.patience
    )
    evaluator = Evaluator(
        rollout.environments,
        parts.task,
        rollout.reward,
        seed=config.run.seed,
        prompts=config.evaluation.prompts,
        slots=config.rollout.environments,
        timeout=config.rollout.trajectory_timeout,
        forget=rollout.proxy.forget,
        samples=config.evaluation.samples,
        temperature=config.evaluation.temperature,
        top_p=config.evaluation.top_p,
    )
    trainer = config.trainer
    bars = AlarmBars(trainer.logprob_gap_alarm, trainer.entropy_alarm, trainer.tis_alarm, config.rollout.ess_alarm)
    return Pipeline(
        _loop_settings(config),
        parts,
        position,
        control,
        calls,
        rollout,
        weights,
        feeder,
        evaluator,
        LearningWatch(bars, position.entropies),
        LagWeight(config.rollout.staleness_decay),
        helpers=_helpers(config, parts, rollout),
        turns=turns,
        replanner=_replanner(config, parts, resizing, rollout),
    )


def _loop_settings(config: Config) -> LoopSettings:
    return LoopSettings(
        steps=config.run.steps,
        minutes=config.run.minutes,
        groups_per_step=config.rollout.groups_per_step,
        checkpoint_every=config.checkpoint.every,
        checkpoint_seconds=60 * config.checkpoint.minutes,
        evaluate_every=config.evaluation.every,
        evaluation_prompts=config.evaluation.prompts,
        stream=config.trainer.stream,
        weights_overlap=config.rollout.weights_overlap,
        overlong=config.reward.overlong.rule,
        signal_share=config.run.signal_share,
    )


# -- the rollout side ------------------------------------------------------------------------------------------------


def build_rollout(
    config: Config,
    parts: Components,
    position: Position,
    keep: Callable[[Trajectory, str, str], None],
    fail: Callable[[BaseException], None],
) -> tuple[Rollout, EngineResizing | None]:
    """The rollout side, and what cuts its engines anew (None: nobody may). ``keep(trajectory, state, cause)`` stores what ends
    untrained; ``fail(error)`` ends the run."""
    settings, task, events = config.rollout, parts.task, parts.events
    mode = coordination_modes.coordination_mode(config.run.mode, settings.alpha)
    bound, filters = mode.staleness_bound(), make_filters(config.filters)
    buffer = SampleBuffer(
        bound,
        settings.max_filtered_groups,
        dynamic=settings.dynamic_sampling,
        filters=filters,
        balance=make_balance(config.filters),
    )
    proxy, resizing = build_proxy(config, parts.workers, events, mode, fail, parts.market is not None)
    lockstep = Lockstep()
    environments: EpisodePlayer
    forecasts, reward, shards = None, parts.reward, parts.shards
    if parts.managers is not None:
        environments = reward = shards = build_shards(config, parts.managers, proxy, parts, buffer.too_stale, fail)
    else:
        # a race in which all take their turns in step has no winner: with rounds only the rewards are waited for
        in_step = lockstep if mode.batch_environments and not settings.rounds.enabled else None
        environments = manager = build_manager(config, task, proxy, buffer.too_stale, parts.environments, in_step)
        forecasts = manager.forecasts = _length_tracker(config, task, proxy, events, parts.foresight)
    known = forecasts.prompts if forecasts and settings.rounds.predict == PROGRESSIVE else None
    rollout = Rollout(
        settings,
        BatchSize(config.batch_trajectories, config.group_members, config.redundancy),
        task,
        reward,
        events,
        parts.ledger,
        mode=mode,
        buffer=buffer,
        filters=filters,
        proxy=proxy,
        environments=environments,
        lockstep=lockstep,
        forecasts=forecasts,
        rounds=build_rounds(config, task, events, position.rounds, known) if settings.rounds.enabled else None,
        prompts=PromptRepeats(task.prompts("train", config.run.seed)),
        shards=shards,
        keep=keep,
        fail=fail,
        life=position.life,
        redundancy=position.redundancy,
        groups=position.groups,
        again=position.lost,
        trajectories=position.trajectories,
    )
    return rollout, resizing


def build_manager(
    config: Config,
    task: Task,
    proxy: TurnServer,
    is_stale: Callable[[int], bool],
    source: EnvironmentSource | None = None,
    lockstep: Lockstep | None = None,
) -> EnvManager:
    """The manager that plays the task's episodes, in a run's own process or in a shard."""
    settings = config.rollout
    return manager_of(task)(
        task,
        proxy,
        step_timeout=settings.environment_step_timeout,
        reset_timeout=_reset_seconds(settings),
        reset_tries=config.environment.reset_tries,
        start_timeout=config.environment.start_timeout,
        trajectory_timeout=settings.trajectory_timeout,
        is_stale=is_stale,
        source=source,
        context=setup_of(config.context, task),
        contexts={name: setup_of(config.context, part) for name, part in parts_of(task).items()},
        on_timeout=config.task.on_timeout,
        lockstep=lockstep,
    )


def build_shards(
    config: Config,
    managers: ManagerParts,
    proxy: TurnServer,
    parts: Components,
    is_stale: Callable[[int], bool],
    fail: Callable[[BaseException], None],
) -> ShardManagers:
    """The head's end of the shards; the run's counters are theirs from now on."""
    settings = config.rollout
    shards = ShardManagers(
        managers,
        proxy,
        parts.events,
        parts.shards,
        is_stale=is_stale,
        fail=fail,
        restarts=settings.worker_restarts,
        window=settings.restart_window,
        silence=settings.stall_timeout,
        patience=2 * max(settings.environment_step_timeout, _reset_seconds(settings)) + SHARD_MARGIN,
    )
    if parts.rewards is not None:
        parts.rewards = partial(shards.counted, "rewards")
    return shards


def build_proxy(
    config: Config,
    workers: Sequence[ManagedWorker],
    events: EventLog,
    mode: coordination_modes.CoordinationMode,
    fail: Callable[[BaseException], None],
    borrows: bool = False,
) -> tuple[LLMProxy, EngineResizing | None]:
    """The proxy over these workers with the strategies that the config asks for. ``borrows``: others may come. Raises ConfigError
    for workers that cannot do what they ask of them, and for strategies that exclude each other."""
    settings = config.rollout
    if settings.reshapes:
        require_resizable(workers, settings.planner.enabled, settings.planner.experts)
    borrows = borrows or any(isinstance(worker, BorrowedWorker) for worker in workers)
    proxy = LLMProxy(
        workers,
        events,
        limits=WorkerLimits.of(settings),
        restarts=settings.worker_restarts,
        heartbeat=settings.heartbeat_seconds,
        misses=settings.heartbeat_misses,
        current_only=not mode.carries_over,
        router=router_setup.router_of_workers(
            routing_of(config, borrows),
            workers,
            settings.disaggregation,
            partial(router_setup.may_come, settings),
            caps_of(config, borrows),
        ),
        kv=kv_moves(settings.kv_transfer, events),
        on_fatal=fail,
    )
    if settings.disaggregation.enabled:
        proxy.split = PrefillDecode(proxy, settings.disaggregation)
    return proxy, EngineResizing(proxy) if settings.reshapes else None


def routing_of(config: Config, borrows: bool) -> RoutingSection:
    """The routing of a run, its caps as numbers. ``borrows``: there are workers beside its own now; the config may say that they
    come. Raises ConfigError."""
    settings = config.rollout
    profile = read_profile(settings.routing.profile, "rollout.routing.profile")
    return router_setup.with_caps(settings, borrows or settings.borrows, profile)


def caps_of(config: Config, borrows: bool) -> Callable[[str], int]:
    """The same, of each of its own engines by name: a wide one has more room than a narrow one."""
    settings = config.rollout
    profile = read_profile(settings.routing.profile, "rollout.routing.profile")
    return router_setup.engine_caps(settings, borrows or settings.borrows, profile)


def make_filters(settings: FiltersSection) -> FilterChain:
    """The filters that the config switches on, the cheap ones first."""
    chain: list[TrajectoryFilter] = []
    if settings.completeness:
        chain.append(CompletenessFilter(settings.truncated == "drop"))
    if settings.reward_min is not None or settings.reward_max is not None:
        chain.append(QualityFilter(settings.reward_min, settings.reward_max))
    if settings.max_repetition is not None:
        chain.append(RepetitionFilter(settings.ngram, settings.max_repetition))
    if settings.max_similarity is not None:
        chain.append(SimilarityFilter(settings.ngram, settings.max_similarity, settings.similarity_window))
    return FilterChain(chain)


def make_balance(settings: FiltersSection) -> BatchBalance | None:
    """How a batch is balanced; None: groups in order of completion."""
    return None if settings.balance == "none" else BatchBalance(settings.balance, settings.balance_share)


def build_rounds(
    config: Config,
    task: Task,
    events: EventLog,
    state: Mapping[str, Any] | None,
    predict: LengthPredictor | None = None,
) -> Rounds:
    """Short and long rounds. ``state``: of a checkpoint; ``predict``: lengths of prompts, None: what the config says of them."""
    settings = config.rollout
    most = settings.rounds.max_active
    return Rounds(
        round_rules(config, task),
        task,
        config.run.seed,
        events,
        PromptLengths(settings.rounds.predict, predict),
        cap=most and most * (settings.workers + len(settings.served)),
        state=state,
    )


def round_rules(config: Config, task: Task) -> RoundRules:
    """The rules of short and long rounds. A task that goes through its data set again and again says its size as
    ``epoch_prompts``."""
    settings, rounds = config.rollout, config.rollout.rounds
    known = getattr(task, "epoch_prompts", 0)
    return RoundRules(
        settings.groups_per_step,
        settings.group_size,
        rounds.eta_prompts,
        rounds.eta_responses,
        known if rounds.epoch_prompts is None else rounds.epoch_prompts,
        rounds.tries,
        rounds.isolate_environments,
        rounds.search,
    )


# -- environments -----------------------------------------------------------------------------------------------------


def build_environment_pool(
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
    backend = _environment_backend(config, task, owner, log, tools, tally)
    if backend is None:
        return None
    return EnvPool(backend, _pool_settings(config, owner), events, getattr(task, "environment_template", None))


def environment_target(config: Config, task: Task) -> tuple[str, dict[str, Any]]:
    """What makes the task's environments in another process, and with which arguments: what the task's own
    ``environment_target()`` says, else the whole task from the config."""
    own = getattr(task, "environment_target", None)
    if own is None:
        return TASK_OF_CONFIG, {"config": config.model_dump(mode="json")}
    target, arguments = own()
    return str(target), dict(arguments)


def _environment_backend(
    config: Config,
    task: Task,
    owner: str,
    log: Path | None,
    tools: Mapping[str, Any] | None,
    tally: ToolTally | None,
) -> EnvironmentBackend | None:
    chosen = config.environment
    match chosen.backend:
        case "in-process":
            return None
        case "in-process-pool":
            return InProcessBackend(task)
        case "subprocess":
            from orchestrator.environments.subprocesses import SubprocessBackend

            target, arguments = environment_target(config, task)
            limits = {"memory_mb": chosen.memory_mb, "cpu_seconds": chosen.cpu_seconds}
            return SubprocessBackend(
                target,
                arguments,
                owner=owner,
                limits=limits,
                log=log,
                tools=tools,
                tally=tally,
                longest=longest_answer(task),
            )
        case "kubernetes":
            return _pod_backend(config, task, owner, tools, tally)


def _reset_seconds(rollout: RolloutSection) -> float:
    """For an environment to begin an episode, or to be made as new between two."""
    return rollout.environment_reset_timeout or rollout.environment_step_timeout


def _pod_backend(
    config: Config, task: Task, owner: str, tools: Mapping[str, Any] | None, tally: ToolTally | None
) -> EnvironmentBackend:
    from orchestrator.environments.pod_manifests import PodSettings
    from orchestrator.environments.pods import PodBackend

    if config.tools.functions:
        fix = "pods cannot reach the embedded host, which listens on loopback: give tools.urls that they can reach"
        raise ConfigError("tools.functions", sorted(config.tools.functions), fix)
    chosen, rollout = config.environment, config.rollout
    pods = chosen.kubernetes
    names = ("image", "namespace", "registry_mirror", "pull_policy", "cpu", "memory", "node_selector", "port")
    own_pod = (os.environ.get("POD_NAME", ""), os.environ.get("POD_UID", ""))
    settings = PodSettings(
        owner=owner,
        orphan_seconds=pods.orphan_seconds,
        # counted by the cluster from before the image is pulled, by the pool from when it has started
        lifetime=int(chosen.start_timeout + chosen.max_age_seconds + rollout.trajectory_timeout) + LIFETIME_MARGIN,
        owner_pod=own_pod if all(own_pod) else None,
        **{name: getattr(pods, name) for name in names},
    )
    target, arguments = environment_target(config, task)
    longest = max(rollout.environment_step_timeout, _reset_seconds(rollout))
    limits = {"cpu_seconds": chosen.cpu_seconds, "call_seconds": longest}
    return PodBackend(
        target,
        arguments,
        settings,
        limits=limits,
        context=pods.context,
        pre_pull=pods.pre_pull,
        tools=tools,
        tally=tally,
        longest=longest_answer(task),
    )


def _pool_settings(config: Config, owner: str) -> PoolSettings:
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
        recycle_timeout=_reset_seconds(config.rollout),
        kill_timeout=config.rollout.environment_step_timeout,
        ping_timeout=chosen.health_timeout,
        ping_every=chosen.health_seconds,
        idle=chosen.idle_seconds,
        max_age=chosen.max_age_seconds,
        max_episodes=chosen.max_episodes,
        seed=config.run.seed,
    )


# -- forecasts and placement -----------------------------------------------------------------------------------------


def _length_tracker(
    config: Config, task: Task, proxy: LLMProxy, events: EventLog, given: ForecastParts
) -> LengthTracker | None:
    """None: lengths are not predicted."""
    rollout = config.rollout
    if not rollout.prediction.enabled:
        return None
    prior, predictor = float(task.max_response_tokens), given.predictor
    if predictor is None:
        predictor = InProcessPredictor(make_predictor(rollout.prediction, prior, config.run.seed))
    placer = _placer(config, proxy, events, given) if rollout.placement.enabled else None
    return LengthTracker(
        rollout.prediction, predictor, events, prior, partial(prioritize, proxy, limit=rollout.stall_timeout), placer
    )


def _placer(config: Config, proxy: LLMProxy, events: EventLog, given: ForecastParts) -> TrajectoryPlacer:
    """Who places trajectories on workers; told of every one that comes or leaves."""
    rollout = config.rollout
    names = [state.worker.name for state in proxy.states]
    for name in rollout.placement.speeds:
        if name not in names and not router_setup.may_come(rollout, name):
            fix = f"no rollout worker has this name; there are: {', '.join(names)}"
            raise ConfigError("rollout.placement.speeds", name, fix)
    rates = given.rates
    if rates is None and (rollout.placement.profile or rollout.placement.degrees.enabled):
        rates = rates_of_workers(proxy.states, rates_of_degree(rollout), rollout.engine.ranks)
    mover = GapMover(proxy.kv, proxy.states, proxy.router) if rollout.kv_transfer.enabled else None
    rates = rates or rates_by_name(rollout.placement, proxy.states, partial(_slots_of, rollout))
    placer = TrajectoryPlacer(rollout.placement, proxy.router, events, rates, mover, rollout.longest_context)
    proxy.watcher = placer
    return placer


def _slots_of(rollout: RolloutSection, name: str) -> int:
    """Requests that a worker computes at once; of a server the least that an engine of the run's own does."""
    own = name.removeprefix("vllm-")
    if own != name and own.isdigit():
        return rollout.engine_of(int(own)).max_num_seqs
    return min(group.max_num_seqs for group in rollout.engine_groups)


# -- between steps, and within them ----------------------------------------------------------------------------------


def _helpers(config: Config, parts: Components, rollout: Rollout) -> dict[str, Helper]:
    """What changes the pools of a run beside its loop: servers that it borrows, and whatever is told another size."""
    settings, members, found = config.rollout, Membership(rollout.proxy), dict[str, Helper]()
    if isinstance(rollout.environments, ShardManagers):
        found["shards"] = rollout.environments.run
    routing = routing_of(config, parts.market is not None)
    if parts.market is not None:
        market = parts.market
        exchange = Exchange(market, members, parts.events, settings.borrowed, routing, market.first)
        found["borrowing"] = exchange.run
    if parts.sizes is None:
        return found
    tell: dict[str, Callable[[int], None]] = {**parts.sizes.tell, "environments": rollout.resize}
    if isinstance(rollout.environments, ShardManagers):
        tell["rewards"] = partial(rollout.environments.share, "rewards")
    if parts.engines is not None:
        caps = caps_of(config, parts.market is not None)
        scaling = EngineScaling(parts.engines, members, parts.events, settings, caps)
        found["engines"] = scaling.run
        for group in range(len(settings.engine_groups)):
            name = f"rollout.{group}" if len(settings.engines) > 1 else "rollout"
            tell[name] = partial(scaling.want, group)
    return found | {"pool sizes": PoolWatch(parts.sizes.begins, parts.sizes.read, tell, parts.events).run}


def _replanner(
    config: Config, parts: Components, resizing: EngineResizing | None, rollouts: Rollout
) -> Replanner | None:
    """Who cuts the engines of a run anew between steps: the planner, the resource manager, or nobody (None)."""
    rollout, events = config.rollout, parts.events
    if resizing is None:
        return None
    if not rollout.placement.degrees.enabled:
        planner = parts.planner or make_planner(rollout, parts.task)
        rule = StepPlanner(planner, resizing, events, lambda: rollouts.round_kind)
        return Replanner(rule, resizing, events, config.run.steps)
    policy = parts.reallocation or make_reallocation(rollout)
    in_flight = tuple if rollouts.forecasts is None else rollouts.forecasts.remaining
    degrees = DegreePlanner(policy, resizing, events, in_flight, rollout.engine.max_model_len)
    return Replanner(degrees, resizing, events, config.run.steps)


def _stream_training(config: Config, parts: Components, rollouts: Rollout) -> StreamTraining | None:
    """Where trainer and workers share devices; None: each has its own."""
    rollout = config.rollout
    if not rollout.colocation.enabled:
        return None
    bytes_each = parts.kv_bytes or kv_bytes_per_token(config.model.model_dump(), config.model.dtype)
    engine = rollout.engine
    return StreamTraining(
        rollout.colocation,
        parts.trainer,
        rollouts.proxy,
        parts.events,
        under_way=rollouts.episodes.values,
        training=training_units(config),
        limit=KvLimit(bytes_each, engine.kv_cache_mb << 20, engine.block_size),
        block_size=engine.block_size,
        longest=parts.task.max_context_tokens,
        timeout=config.run.trainer_timeout,
    )


def training_units(config: Config) -> list[Unit]:
    """The devices of each data-parallel replica, in Megatron's order of ranks (tp-cp-ep-dp-pp); rank r is on device r."""
    trainer = config.trainer
    stage = trainer.tensor_parallel * trainer.data_parallel
    block = math.lcm(trainer.tensor_parallel, trainer.tensor_parallel * trainer.expert_parallel)
    return [
        tuple(first + rank + number * stage for number in range(trainer.pipeline_parallel) for rank in range(block))
        for first in range(0, stage, block)
    ]
