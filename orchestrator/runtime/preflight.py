"""What is checked before anything starts: everything that would fail later for a reason that can be known now.

Each check raises one ConfigError that names the field, the value and the fix; :func:`check` raises all of them in one, and the
command ends with exit code 2.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import cast

from orchestrator.agents.chat_template import ModelChat
from orchestrator.agents.manager_choice import outcome_scores
from orchestrator.api import ConfigError, CoserveError, RetryableError, Task, TrajectoryError, parts_of
from orchestrator.api.ports import DemonstratingTask
from orchestrator.borrowing import discovery, served_workers
from orchestrator.config import Config
from orchestrator.environments.environment_wire import error_text, observation_of, step_of, version_of
from orchestrator.environments.episode_context import setup_of
from orchestrator.hooks import tested_versions
from orchestrator.observe import run_view
from orchestrator.ops import doctor_machine, requirements
from orchestrator.placement.forecast_setup import make_predictor
from orchestrator.resources import quantised_rollouts
from orchestrator.runtime import engine_cuts, judge_setup, kv_setup, memory_plan, pool_requests, site_caches
from orchestrator.runtime.mooncake_master import own_address, require_port
from orchestrator.runtime.reward_trial import try_reward
from orchestrator.sandbox import Sandbox
from orchestrator.settings.user_functions import named_function
from orchestrator.tasks import registry
from orchestrator.tasks.agent_task import AgentTask
from orchestrator.tasks.agent_trial import try_agent
from orchestrator.tasks.chat_task import ChatTask
from orchestrator.tasks.dataset import DatasetTask
from orchestrator.tasks.game_memory import MemoryTask
from orchestrator.transfer import RelayEndpoint, RelayError, open_relay
from orchestrator.transfer.rdma_devices import check_device
from orchestrator.transfer.redis_metadata import PASSWORD_FILE, RedisMetadata

_TRAINER = "megatron_rlplugin.trainer.learner:check_trainer"
_TURN_SECONDS = 20.0
_PER_CORE = 8  # engines and trainer ranks on a processor core: more never answer in time
_SHAPE = "megatron_rlplugin.model_families:read_shape"  # what the trainer computes; the engines compute more


def make_task(config: Config) -> Task:
    """The task that the config names. Raises ConfigError."""
    memory, chat, options = config.task.memory, config.task.chat, config.task.options

    def speak(inner: Task) -> ChatTask:
        return ChatTask(inner, spoken, chat.system, chat.response_tokens, chat.examples, chat.answer)

    if chat.tokenizer:
        spoken = ModelChat(chat.tokenizer, "task.chat.tokenizer")
        if config.task.name == "mixture":
            return registry.make(config.task.name, config.task.heldout_maps, speak=speak, **options)
        return speak(registry.make(config.task.name, config.task.heldout_maps, **options))
    task = registry.make(config.task.name, config.task.heldout_maps, **options)
    if isinstance(task, AgentTask) and not outcome_scores(config.reward, task):
        task.scored_elsewhere()
    if not memory.turns:
        return task
    embed = named_function("task.memory.embed", memory.embed) if memory.embed else None
    return MemoryTask(task, **memory.model_dump(exclude={"embed"}), embed=embed)


def prepare(config: Config) -> tuple[Task, list[str]]:
    """The task that the config names, and what :func:`check` says. Raises one ConfigError: of a task that cannot be made, with
    what else is wrong below its fix."""
    try:
        task = make_task(config)
    except ConfigError as error:
        without: list[Callable[[], object]] = [partial(_model, config, None), partial(_function, config, None, [])]
        checks = [*_of_versions(config), *without, *_of_run(config, [])]
        raise ConfigError.of_all([error, *_found(checks)]) from error
    return task, check(config, task)


def check(config: Config, task: Task) -> list[str]:
    """Run all checks; returns what could not be checked here, in words. Nothing is started or written. Raises one ConfigError:
    the first that a check found, with the others below its fix."""
    unplanned: list[str] = []
    of_task: list[Callable[[], object]] = [
        partial(_model, config, task),
        partial(_function, config, task, notes := list[str]()),
        *(partial(one, config, task) for one in (_task, _evaluated, _one_turn, _environments, _lengths, _predictor)),
        lambda: [setup_of(config.context, part) for part in (task, *parts_of(task).values())],
        lambda: notes.extend(try_agent(config, task)),
    ]
    last = partial(discovery.check, config, task)
    if found := _found([*_of_versions(config), *of_task, *_of_run(config, unplanned), last]):
        raise ConfigError.of_all(found)
    names = ", ".join(dict.fromkeys(name for group in config.rollout.engine_groups for name in group.unchecked))
    why = "vLLM is not installed here; each engine checks them when it starts"
    table = ".".join(config.rollout.engine_groups[0].table)
    return [
        *([task.about()] if isinstance(task, DatasetTask) else []),
        *notes,
        *unplanned,
        *([f"{table}: {names} could not be checked: {why}"] if names else []),
    ]


def _of_versions(config: Config) -> list[Callable[[], object]]:
    components = (partial(tested_versions.check_version, item) for item in requirements.required_components(config))
    return [*components, partial(requirements.require_packages, config)]


def _of_run(config: Config, unplanned: list[str]) -> list[Callable[[], object]]:
    """Of all but the task."""
    checks = (
        *(_trainer, _heldout, check_processors, _nccl, _room, _token, _relay, site_caches.check, check_port, _metadata),
        *(engine_cuts.check, kv_setup.check, pool_requests.check, run_view.check_view),
    )
    said = (quantised_rollouts.check, memory_plan.check)
    return [*(partial(one, config) for one in checks), *(lambda one=one: unplanned.extend(one(config)) for one in said)]


def _found(checks: Sequence[Callable[[], object]]) -> list[ConfigError]:
    """What is wrong, each once: one cause may fail two checks."""
    found: dict[str, ConfigError] = {}
    for one in checks:
        try:
            one()
        except ConfigError as error:
            found[str(error)] = error
        except CoserveError:
            if not found:  # else it may follow from what was found
                raise
    return list(found.values())


def _heldout(config: Config) -> None:
    if config.evaluation.prompts > config.task.heldout_maps:
        fix = f"there are task.heldout_maps = {config.task.heldout_maps} held-out prompts; ask for fewer, or hold out more"
        raise ConfigError("evaluation.prompts", config.evaluation.prompts, fix)


def check_processors(config: Config) -> None:
    """On a machine without a GPU each engine and each rank of the trainer computes on its processors. Raises ConfigError."""
    cores = len(os.sched_getaffinity(0))
    processes = config.rollout.workers + pool_requests.trainer_ranks(config)
    if config.ray.address or Path("/dev/nvidiactl").exists() or processes <= _PER_CORE * cores:
        return
    fix = f"{processes} engines and trainer ranks would share {cores} cores and no GPU: at most {_PER_CORE * cores} together"
    raise ConfigError("rollout.workers", config.rollout.workers, fix)


def _nccl(config: Config) -> None:
    if config.rollout.weights != "nccl":
        return
    if not (config.ray.address or Path("/dev/nvidiactl").exists()):
        fix = "NCCL connects GPUs, and this machine has none: take 'collective' (gloo on a CPU) or 'relay'"
        raise ConfigError("rollout.weights", "nccl", fix)
    installed = tested_versions.find_version(tested_versions.VLLM)
    if installed is not None and installed[1] in tested_versions.VersionRange(">=0.32,<0.33"):
        raise ConfigError("rollout.weights", "nccl", f"needs vLLM 0.33, installed is {installed[1]}: take 'collective'")


def _token(config: Config) -> None:
    if config.rollout.served:
        served_workers.read_token(config, os.environ)


def _relay(config: Config) -> None:
    if config.relay.kind == "fsspec" and config.relay.master:
        endpoint = RelayEndpoint(job="preflight", kind="fsspec", master=config.relay.master)
        open_relay(endpoint).close()
    if not config.ray.address:  # else it is said where the ranks and engines are
        check_device(config.relay.protocol, config.relay.device, "relay.")
    if config.relay.kind == "mooncake" and config.relay.master:
        from orchestrator.transfer.mooncake_relay import seen_from

        try:
            seen_from(config.relay.master)
        except RelayError as error:
            fix = f"{error}; start it there, or leave this out: then the run starts one"
            raise ConfigError("relay.master", config.relay.master, fix) from error


def _metadata(config: Config) -> None:
    url, file = config.relay.metadata_url, config.relay.metadata_password_file
    if not url:
        if file:
            fix = "is for a metadata store on a Redis server; give its relay.metadata_url, or leave this out"
            raise ConfigError("relay.metadata_password_file", file, fix)
        return
    if file:
        os.environ[PASSWORD_FILE] = str(Path(file).resolve())
    try:
        RedisMetadata(url).close()
    except RetryableError as error:
        raise ConfigError(
            "relay.metadata_url", url, f"cannot be used: {error}; is a Redis server running there?"
        ) from error


def check_port(config: Config) -> None:
    """Where the embedded master would listen. Raises ConfigError."""
    if config.relay.kind != "mooncake" or config.relay.master:
        return
    require_port(own_address(config.relay.host), config.relay.port)


def _room(config: Config) -> None:
    """What the doctor would call a failure: checkpoints and trajectories have no room, or may not be written there."""
    found = doctor_machine.check_disk(Path(config.run.folder))
    if found.status == "fail":
        raise ConfigError("run.folder", config.run.folder, f"{found.detail}; {found.fix}")


def _model(config: Config, task: Task | None) -> None:
    if not config.model.path:
        return
    shape = named_function("model.path", _SHAPE)(config.model.path)
    if task is not None and shape.vocab_size < len(task.vocabulary):
        fix = (
            f"task {task.name} uses {len(task.vocabulary)} tokens, this model has {shape.vocab_size}: use its tokenizer"
        )
        raise ConfigError(
            "model.path", config.model.path, f"{fix} (task.chat.tokenizer, task.agent.tokenizer, task.data.tokenizer)"
        )


def _trainer(config: Config) -> None:
    trainer = config.trainer
    sizes = trainer.tensor_parallel * trainer.pipeline_parallel * trainer.context_parallel * trainer.expert_parallel
    asked = (
        *(trainer.megatron, trainer.arguments, trainer.routing_replay, sizes > 1),
        *(trainer.loss_function, trainer.advantage, trainer.reference_path),
    )
    if any(asked):  # what one rank of the defaults does is known
        named_function("trainer.megatron", _TRAINER)(config.model.path, trainer, config.model.dtype)


def _environments(config: Config, task: Task) -> None:
    tools = config.tools
    for name, target in tools.functions.items():
        named_function(f"tools.functions.{name}", target)
    if tools.any and not hasattr(task, "use_tools"):
        names = sorted({*tools.functions, *tools.urls})
        raise ConfigError("tools", names, f"task {task.name} uses no tools: leave the section out")


def _task(config: Config, task: Task) -> None:
    if config.warmup.steps:
        _demonstrated(config, task)
    if getattr(task, "needs_sandbox", False):
        asyncio.run(Sandbox().check())
    seconds = getattr(task, "reward_seconds", 0.0)
    allowed = config.reward.call_seconds(getattr(task, "reward_by_case", False))
    if allowed < seconds:
        fix = (
            f"scoring a trajectory of task {task.name} may take {seconds:g} s, but {allowed:g} s are allowed; raise it"
        )
        raise ConfigError("reward.timeout", config.reward.timeout, fix)
    rule, most = config.reward.overlong, task.max_turns * task.max_response_tokens
    if config.context.strategy != "summarise" and not config.context.tasks and rule.limit - rule.buffer >= most:
        fix = (
            f"no answer of task {task.name} has more than {most} tokens, so none is penalised: less than that + buffer"
        )
        raise ConfigError("reward.overlong.limit", rule.limit, fix)


def _evaluated(config: Config, task: Task) -> None:
    """Success is a share of the prompts that the config says."""
    asked = min(config.evaluation.prompts, config.task.heldout_maps)  # else that is wrong
    try:
        there = sum(1 for _ in islice(task.prompts("heldout", config.run.seed), asked))
    except Exception as error:  # a class of the user's may raise anything
        fix = f"prompts('heldout', seed) failed: {error_text(error)} (docs/tasks.md, Write one)"
        raise ConfigError("task.name", config.task.name, fix) from error
    if there < asked:
        fix = f"prompts('heldout', seed) of task {task.name} yields {there}; ask for as many, or let it yield more"
        raise ConfigError("evaluation.prompts", asked, fix)


def _demonstrated(config: Config, task: Task) -> None:
    """Make a demonstration of each kind that the warm-up will have."""
    warmup = config.warmup
    if not hasattr(task, "demonstrations"):
        raise ConfigError("warmup.steps", warmup.steps, f"task {task.name} has no demonstrations; set it to 0")
    kinds = [skill for skill, some in ((1.0, warmup.skill > 0), (0.0, warmup.skill < 1)) if some]
    for one in (task, *parts_of(task).values()):
        try:
            for skill in kinds if hasattr(one, "demonstrations") else ():
                next(cast(DemonstratingTask, one).demonstrations(1, config.run.seed, skill))
        except Exception as error:  # a class of the user's may raise anything
            fix = f"a demonstration failed: {error_text(error)}; mend it, or set this to 0"
            raise ConfigError("warmup.steps", warmup.steps, fix) from error


def _one_turn(config: Config, task: Task) -> None:
    """Play one: methods of the wrong shape, and observations that the policy has no token for, are known now."""
    if hasattr(task, "gateway") or not config.environment.backend.startswith("in-process"):
        return  # an agent program makes its trajectories; what runs elsewhere may not run here

    async def play() -> None:
        environment = task.environment()
        try:
            version_of(environment.version)
            prompt, again = (next(task.prompts("train", config.run.seed), None) for _ in "ab")
            if prompt is None:
                raise ValueError("prompts('train', seed) yields none")
            if prompt != again:
                raise ValueError("prompts('train', seed) began with two different ones: a resume would draw others")
            _spoken(task, observation_of(await environment.reset(prompt), "reset").token_ids)
            _spoken(task, step_of(await environment.step((task.end_id,))).observation.token_ids)
        finally:
            await environment.close()

    try:
        asyncio.run(asyncio.wait_for(play(), _TURN_SECONDS))
    except ConfigError:
        raise
    except TimeoutError:
        fix = f"one turn took over {_TURN_SECONDS:g} s: use another environment.backend for calls that block"
        raise ConfigError("task.name", config.task.name, fix) from None
    except RetryableError:  # of the machine: a run tries again
        return
    except TrajectoryError as error:
        fix = f"a trial turn before the run failed: {error.detail}"
        raise ConfigError("task.name", config.task.name, f"{fix} (docs/tasks.md, Write one)") from error
    except Exception as error:  # a class of the user's may raise anything
        fix = f"a trial turn before the run failed: {type(error).__name__}: {error}"
        raise ConfigError("task.name", config.task.name, f"{fix} (docs/tasks.md, Write one)") from error


def _spoken(task: Task, token_ids: Sequence[int]) -> None:
    wrong = [token for token in token_ids if not 0 <= token < len(task.vocabulary)]
    if wrong:
        raise ValueError(f"an observation holds token {wrong[0]}, the vocabulary has {len(task.vocabulary)}")


def _function(config: Config, task: Task | None, notes: list[str]) -> None:
    reward = config.reward
    judge_setup.check(config)
    if not reward.url and not reward.judge.any and not outcome_scores(reward, task):
        if target := reward.function or (registry.reward_of(task) if task else ""):
            named_function("reward.function", target)
            if task is not None:
                notes += try_reward(config, task, target)
        if config.reward.host == "ray_serve":
            _ray_serve(config)


def _ray_serve(config: Config) -> None:
    serve, address = config.reward.serve, config.ray.address
    if address and not serve.port:
        raise ConfigError(
            "reward.serve.port", 0, "in a Ray that others run, name the port that Serve listens on or should use"
        )
    if not address and serve.min_replicas * serve.cpus > config.ray.cpus:
        fix = f"{serve.min_replicas} replicas of {serve.cpus:g} CPUs do not fit into ray.cpus = {config.ray.cpus}"
        raise ConfigError("reward.serve.min_replicas", serve.min_replicas, fix)


def _predictor(config: Config, task: Task) -> None:
    """Made once as the run will make it: a model, or what another run saved, that cannot be used is said now."""
    if config.rollout.prediction.enabled:
        make_predictor(config.rollout.prediction, float(task.max_response_tokens), config.run.seed)


def _lengths(config: Config, task: Task) -> None:
    room = config.rollout.longest_context
    if room < task.max_context_tokens:
        fix = f"a trajectory of task {task.name} may have {task.max_context_tokens} tokens; raise it to that or more"
        raise ConfigError(f"{'.'.join(config.rollout.engine_groups[0].table)}.max_model_len", room, fix)
