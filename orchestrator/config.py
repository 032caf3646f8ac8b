"""The configuration of a run: typed, closed (an unknown key is an error), importable without torch or an engine.

A config comes from a TOML file plus dotted overrides (``rollout.alpha=2``). :func:`load_config` reports every violation
at once, each with field, value and fix, as a :class:`~orchestrator.api.ConfigError`. Times are seconds, sizes are in the
unit that the field's name ends with.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import InitErrorDetails, PydanticCustomError

from orchestrator.api import ConfigError, urls
from orchestrator.policies.objectives import OBJECTIVES, conflicts
from orchestrator.tasks import registry

Positive = Annotated[int, Field(gt=0)]
PositiveSeconds = Annotated[float, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]


class Section(BaseModel):
    """Base of all sections: closed and immutable."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class RunSection(Section):
    """What runs, for how long, and where its folder is."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]+$")] = "run"  # folder name prefix under `folder`
    folder: str = "runs"
    seed: Annotated[int, Field(ge=0)] = 0
    mode: Literal["sync", "async"] = "async"
    steps: Positive = 100
    trainer_timeout: PositiveSeconds = 3600.0  # a trainer that does not answer one call for this long ends the run
    minutes: Annotated[float, Field(gt=0)] | None = None  # stop starting new steps after this many minutes of training


class ModelSection(Section):
    """Which model: a Hugging Face folder, or (``path`` empty) a tiny Qwen3 that the run creates."""

    path: str = ""
    hidden_size: Positive = 128
    intermediate_size: Positive = 256
    layers: Positive = 2
    heads: Positive = 4
    kv_heads: Positive = 2
    head_dim: Positive = 32
    dtype: Literal["float32", "bfloat16"] = "float32"

    @model_validator(mode="after")
    def _shapes(self) -> ModelSection:
        if self.heads % self.kv_heads:
            raise ValueError(f"heads ({self.heads}) must be a multiple of kv_heads ({self.kv_heads})")
        return self


class TaskSection(Section):
    """What is trained on: see docs/tasks.md."""

    name: Annotated[str, Field(pattern=r"^(\w+|[\w.]+:\w+)$")] = "frozenlake"  # or module:Class of your own
    heldout_maps: Annotated[int, Field(ge=1, le=700)] = 300  # distinct held-out prompts (maps, problems) to evaluate on
    dataset: str = ""  # of reasoning_gym
    prompt_tokens: Positive | None = None  # of reasoning_gym, at most; None: the task's own
    response_tokens: Positive | None = None  # the same for an answer

    @model_validator(mode="after")
    def _known(self) -> TaskSection:
        if ":" not in self.name and self.name not in registry.BUILT_IN:
            known = ", ".join(registry.BUILT_IN)
            raise ValueError(
                f"name = {self.name!r}: no such task; there are: {known}; your own is written module:Class"
            )
        if self.name != "reasoning_gym" and self.options:
            raise ValueError(f"{', '.join(self.options)}: only for name = 'reasoning_gym'")
        if self.name == "reasoning_gym" and not self.dataset:
            raise ValueError("dataset: name = 'reasoning_gym' needs one, chain_sum for example")
        return self

    @property
    def options(self) -> dict[str, str | int]:
        """What the task's class is given beside the number of held-out prompts."""
        given = {"dataset": self.dataset, "prompt_tokens": self.prompt_tokens, "response_tokens": self.response_tokens}
        return {name: value for name, value in given.items() if value}


class EngineSection(Section):
    """The vLLM engine of a rollout worker."""

    max_num_seqs: Positive = 64
    max_model_len: Positive = 256
    block_size: Annotated[int, Field(gt=0, multiple_of=32)] = 32
    kv_cache_mb: Positive = 64
    threads: Positive = 1


class RolloutSection(Section):
    """How trajectories are produced, and how stale they may be."""

    workers: Annotated[int, Field(ge=0)] = 1  # vLLM engines that the run starts; 0 with `served`
    served: tuple[str, ...] = ()  # URLs of running `vllm serve MODEL --plugin rl-coserve`, rollout workers beside these
    served_token_file: str = ""  # holds their bearer token; empty: the environment variable RL_COSERVE_TOKEN
    served_allow_plain_http: bool = False  # to other machines too: the token travels unencrypted
    environments: Positive = 64  # trajectories in flight at most
    alpha: Annotated[int, Field(ge=0, le=64)] = 1  # versions a trajectory may lag (RollArt 6.2)
    group_size: Annotated[int, Field(ge=2, le=1024)] = 8  # GRPO needs at least two members to compare
    groups_per_step: Positive = 32
    redundant_groups: Annotated[float, Field(ge=1.0, le=4.0)] = 1.0  # launched over needed
    member_refills: Annotated[int, Field(ge=0, le=16)] = 2  # replacements for failed members, a group
    dynamic_sampling: bool = False  # replace complete groups whose rewards are all equal by other groups (DAPO)
    max_filtered_groups: Positive = 64  # so replaced, a step; those beyond are trained as they are
    temperature: Annotated[float, Field(gt=0, le=10)] = 1.0
    environment_step_timeout: PositiveSeconds = 10.0
    trajectory_timeout: PositiveSeconds = 120.0
    worker_restarts: Annotated[int, Field(ge=0)] = 2
    stall_timeout: PositiveSeconds = 60.0  # a worker with work but no completion for this long is restarted
    engine: EngineSection = EngineSection()

    @model_validator(mode="after")
    def _fleet(self) -> RolloutSection:
        allow = self.served_allow_plain_http
        found: list[tuple[str, object, str]] = []
        found += [("served", url, fix) for url in self.served if (fix := urls.mistake(url, allow))]
        given = [url.rstrip("/") for url in self.served]
        found += [
            ("served", url, "is there twice: name each server once")
            for index, url in enumerate(given)
            if given.index(url) != index
        ]
        if not (self.workers or self.served):
            fix = "nothing would generate: give at least 1, or the URL of a running server in rollout.served"
            found.append(("workers", 0, fix))
        if found:
            raise ValidationError.from_exception_data("rollout", [_violation(*item) for item in found])
        return self


def _violation(name: str, value: object, fix: str) -> InitErrorDetails:
    return InitErrorDetails(type=PydanticCustomError("conflict", "{fix}", {"fix": fix}), loc=(name,), input=value)


class TrainerSection(Section):
    """The objective and its optimizer; truncated importance sampling stands between trainer and rollout."""

    learning_rate: Annotated[float, Field(gt=0, lt=1)] = 1e-3
    final_learning_rate: Annotated[float, Field(gt=0, lt=1)] | None = None  # linear decay to this over run.steps
    lr_warmup_steps: Annotated[int, Field(ge=0)] = 0
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    adam_beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    adam_beta2: Annotated[float, Field(gt=0, lt=1)] = 0.95
    clip_grad: Annotated[float, Field(ge=0)] = 1.0  # 0 switches gradient clipping off
    objective: Literal["grpo", "dapo", "ppo", "reinforce++", "rloo", "gspo"] = "grpo"
    clip_low: Annotated[float, Field(gt=0, lt=1)] | None = None  # None: the objective's own, see docs/megatron.md
    clip_high: Annotated[float, Field(gt=0)] | None = None
    kl_coefficient: Annotated[float, Field(ge=0)] = 0.0  # of the KL to the reference, the weights RL began with
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    kl_in_reward: bool = False  # subtract the KL from each token's reward instead of adding it to the loss (k1)
    gamma: Annotated[float, Field(gt=0, le=1)] = 1.0  # discount of a token (ppo, reinforce++)
    gae_lambda: Annotated[float, Field(ge=0, le=1)] = 0.95  # ppo
    value_learning_rate: Annotated[float, Field(gt=0, lt=1)] | None = None  # of the critic; None: learning_rate
    value_clip: Annotated[float, Field(gt=0)] = 0.2  # ppo
    max_token_lag: Annotated[int, Field(ge=0)] | None = None  # mask tokens of weights older by more versions
    tis_cap: Annotated[float, Field(gt=0)] = 2.0  # cap of pi_old / pi_rollout
    entropy_coefficient: Annotated[float, Field(ge=0)] = 0.0
    normalize_advantage: bool = True  # divide by the group's standard deviation; ppo: whiten over the batch
    loss: Literal["token-mean", "sequence-mean", "sequence-sum"] | None = None  # None: the objective's own
    minibatches: Positive = 1  # optimizer steps a batch
    micro_batch_size: Positive = 64  # trajectories a forward and backward
    micro_batch_order: Literal["length", "arrival"] = "length"  # what goes into one micro-batch; `stream` means arrival
    pack_tokens: Positive | None = None  # several trajectories in one row of at most so many tokens; None: padded rows
    stream: bool = False  # compute gradients of finished groups while the rollout still runs (RollPacker 4.4)
    grad_offload: bool = False  # keep gradients in host memory between the parts of a stream
    tensor_parallel: Positive = 1
    pipeline_parallel: Positive = 1
    expert_parallel: Positive = 1
    data_parallel: Positive = 1
    distributed_optimizer: bool = False  # optimizer state split over the data-parallel replicas
    threads: Positive = 1
    logprob_gap_samples: Annotated[int, Field(ge=0)] = 32  # trajectories the gap is measured on, a version; 0: off
    logprob_gap_alarm: Annotated[float, Field(gt=0)] = 0.02  # mean |log pi_trainer - log pi_rollout|, same version

    @model_validator(mode="after")
    def _fits(self) -> TrainerSection:
        found = [_violation(name, getattr(self, name), fix) for name, fix in conflicts(self)]
        if found:
            raise ValidationError.from_exception_data("trainer", found)
        return self


class WarmupSection(Section):
    """Supervised warm-up before RL. None of its data is used in RL. ``steps = 0``: none."""

    steps: Annotated[int, Field(ge=0)] = 0
    batch_size: Positive = 64
    learning_rate: Annotated[float, Field(gt=0, lt=1)] = 1e-3
    skill: Fraction = 0.0  # chance that a demonstrated move is the expert's; 0: uniformly random moves, format only


class JudgeSection(Section):
    """A model that scores, behind an OpenAI-compatible endpoint; ``url`` empty: none. Its bearer token is in the environment
    variable RL_COSERVE_JUDGE_TOKEN."""

    url: str = ""  # the base, http://host:port/v1
    model: str = ""
    criterion: str = ""  # what is graded, in words
    template: str = ""  # the whole message, with {criterion} and {episode}; empty: the built-in one
    low: int = 0
    high: int = 10
    structured: bool = True  # the endpoint enforces the form of the answer (response_format)
    max_tokens: Positive = 64

    @model_validator(mode="after")
    def _whole(self) -> JudgeSection:
        for name in ("model", "criterion"):
            if self.url and not getattr(self, name):
                raise ValueError(f"{name}: a judge needs one")
        if self.low >= self.high:
            raise ValueError(f"high ({self.high}) must be above low ({self.low})")
        return self


class RewardSection(Section):
    """The reward function behind HTTP. ``url`` empty: the embedded function host runs ``function``."""

    function: Annotated[str, Field(pattern=r"^([\w.]+:\w+)?$")] = ""  # module:function; empty: the task's own
    url: str = ""
    concurrency: Positive = 32
    timeout: PositiveSeconds = 10.0
    retries: Annotated[int, Field(ge=0, le=20)] = 3
    idle_seconds: PositiveSeconds = 30.0  # the embedded host scales to zero after this
    votes: Annotated[int, Field(ge=1, le=15)] = 1  # how often a trajectory is scored; odd
    vote_by: Literal["majority", "median"] = "majority"  # what of the votes counts
    judge: JudgeSection = JudgeSection()

    @model_validator(mode="after")
    def _odd(self) -> RewardSection:
        if self.votes % 2 == 0:
            raise ValueError(f"votes ({self.votes}) must be odd, so that there is a majority")
        return self


class RelaySection(Section):
    """The weight relay. ``kind`` "mooncake": ``master`` is host:port; empty: a `mooncake_master` child process is started.
    "fsspec": ``master`` is the URL of a folder or prefix that all processes reach; empty: a folder of the run."""

    kind: Literal["mooncake", "fsspec"] = "mooncake"
    master: str = ""
    port: Annotated[int, Field(ge=0, le=65535)] = 0  # of the embedded master; 0: a free one
    segment_mb: Positive = 256
    bucket_mb: Positive = 64
    keep_versions: Annotated[int, Field(ge=2)] = 2
    snapshot_every: Annotated[int, Field(ge=0)] = 0  # differences, and a full snapshot after so many; 0: always whole


class EvaluationSection(Section):
    """Greedy evaluation on held-out prompts: at the start, every ``every`` steps, and at the end."""

    every: Annotated[int, Field(ge=0)] = 0  # 0: start and end only
    prompts: Positive = 300


class CheckpointSection(Section):
    """Atomic checkpoints; the last ``keep`` stay."""

    every: Positive = 1
    keep: Positive = 2


class RaySection(Section):
    """The local Ray, or the address of a cluster."""

    address: str = ""
    cpus: Positive = 4
    object_store_mb: Annotated[int, Field(ge=80)] = 128


class SimSection(Section):
    """The simulated twins of `rl-coserve sim`: linear cost model, environments, rewards (seconds), and faults."""

    prefill_seconds_per_token: Annotated[float, Field(ge=0)] = 2e-6
    decode_seconds_per_step: Annotated[float, Field(gt=0)] = 0.02
    decode_seconds_per_sequence: Annotated[float, Field(ge=0)] = 1e-4
    response_tokens_mean: Annotated[float, Field(gt=0)] = 20.0
    response_tokens_max: Positive = 256
    turns_max: Positive = 8
    environment_seconds_mean: Annotated[float, Field(ge=0)] = 0.5
    environment_seconds_sigma: Annotated[float, Field(ge=0)] = 0.5
    reward_seconds: Annotated[float, Field(ge=0)] = 0.05
    train_seconds_per_token: Annotated[float, Field(ge=0)] = 2e-4
    publish_seconds: Annotated[float, Field(ge=0)] = 0.5
    update_seconds: Annotated[float, Field(ge=0)] = 0.5
    fault_rate: Fraction = 0.0  # chance of a fault at each call of a port
    faults: tuple[Literal["crash", "delay", "drop", "duplicate", "cancel"], ...] = (
        "crash",
        "delay",
        "drop",
        "duplicate",
        "cancel",
    )


class Config(Section):
    """A whole run."""

    run: RunSection = RunSection()
    model: ModelSection = ModelSection()
    task: TaskSection = TaskSection()
    rollout: RolloutSection = RolloutSection()
    trainer: TrainerSection = TrainerSection()
    warmup: WarmupSection = WarmupSection()
    reward: RewardSection = RewardSection()
    relay: RelaySection = RelaySection()
    evaluation: EvaluationSection = EvaluationSection()
    checkpoint: CheckpointSection = CheckpointSection()
    ray: RaySection = RaySection()
    sim: SimSection = SimSection()

    @model_validator(mode="after")
    def _across(self) -> Config:
        if self.run.mode == "sync" and self.rollout.alpha != 0:
            raise ValueError(
                "rollout.alpha must be 0 when run.mode is 'sync' (set rollout.alpha=0, or run.mode='async')"
            )
        if self.run.mode == "async" and self.rollout.alpha == 0:
            raise ValueError("rollout.alpha = 0 is synchronous: set run.mode='sync', or rollout.alpha >= 1")
        if self.rollout.environments < self.rollout.group_size:
            raise ValueError("rollout.environments must be at least rollout.group_size: a group starts as a whole")
        compared = OBJECTIVES[self.trainer.objective].advantage in ("group", "leave-one-out")
        if self.rollout.dynamic_sampling and not compared:
            raise ValueError(
                f"rollout.dynamic_sampling drops what trainer.objective = {self.trainer.objective!r} learns from: it does "
                "not compare the members of a group (set it to false, or use grpo, dapo, rloo or gspo)"
            )
        return self

    @property
    def batch_trajectories(self) -> int:
        """Trajectories a step trains on."""
        return self.rollout.groups_per_step * self.rollout.group_size


def load_config(path: str | Path | None, overrides: Sequence[str] = ()) -> Config:
    """Read a TOML file (None: all defaults) and apply dotted overrides. Raises ConfigError."""
    data: dict[str, Any] = {}
    if path is not None:
        file = Path(path)
        try:
            data = tomllib.loads(file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ConfigError("config", str(file), "no such file; give the path of a TOML file") from None
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise ConfigError("config", str(file), f"cannot be read as TOML: {error}") from error
    for override in overrides:
        _apply_override(data, override)
    return parse_config(data)


def parse_config(data: dict[str, Any]) -> Config:
    """Validate a plain dictionary. Raises one ConfigError that lists every violation."""
    try:
        return Config.model_validate(data)
    except ValidationError as error:
        problems = [
            (".".join(str(part) for part in item["loc"]) or "config", item["input"], _fix(item))
            for item in error.errors()
        ]
    field, value, fix = problems[0]
    if len(problems) > 1:
        fix += "".join(f"\n  {name} = {_short(item)}: {how}" for name, item, how in problems[1:])
    raise ConfigError(field, _Short(value), fix)


class _Short:
    """A value whose repr does not flood the terminal."""

    def __init__(self, value: object) -> None:
        self.value = value

    def __repr__(self) -> str:
        return _short(self.value)


def _short(value: object) -> str:
    text = repr(value) if not isinstance(value, BaseModel | dict) else "(the section)"
    return text if len(text) <= 60 else text[:57] + "..."


def _fix(item: Any) -> str:
    if item["type"] == "extra_forbidden":
        parent: Any = Config
        for part in item["loc"][:-1]:
            parent = parent.model_fields[part].annotation
        import difflib  # only on the way to an error

        known = sorted(parent.model_fields)
        near = difflib.get_close_matches(str(item["loc"][-1]), known, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        return f"no such key; {hint}known keys: {', '.join(known)}"
    message = str(item["msg"]).removeprefix("Value error, ")
    return message[0].lower() + message[1:]


def _apply_override(data: dict[str, Any], override: str) -> None:
    name, separator, raw = override.partition("=")
    name = name.strip()
    if not separator or not name:
        raise ConfigError("override", override, "write it as section.key=value")
    try:
        value = tomllib.loads(f"value = {raw}")["value"]
    except tomllib.TOMLDecodeError:
        value = raw.strip()  # a bare word is a string
    *sections, key = name.split(".")
    table = data
    for section in sections:
        child = table.setdefault(section, {})
        if not isinstance(child, dict):
            raise ConfigError(name, raw, f"{section} is not a section")
        table = child
    table[key] = value


def to_json(config: Config) -> str:
    """The resolved config, stable and readable; saved with every run."""
    return json.dumps(config.model_dump(mode="json"), indent=2, sort_keys=True)
