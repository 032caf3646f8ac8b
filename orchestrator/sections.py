"""The sections of a run's configuration: field by field what may be written, and what it is when nothing is.

Guarantees: unknown keys are errors; a value that no run could use is an error that names the field, the value and the fix.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import InitErrorDetails, PydanticCustomError

from orchestrator.api import urls
from orchestrator.policies.objectives import conflicts
from orchestrator.tasks import registry

Positive = Annotated[int, Field(gt=0)]
PositiveSeconds = Annotated[float, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
ToolName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]  # also a part of a URL


class Section(BaseModel):
    """Base of all sections: closed and immutable."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class RunSection(Section):
    """What runs, for how long, and where its folder is."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]+$")] = "run"  # folder name prefix under `folder`
    folder: str = "runs"
    seed: Annotated[int, Field(ge=0)] = 0
    mode: Literal["sync", "sync_plus", "one_off", "areal", "async"] = "async"  # docs/modes.md
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


class RoutingSection(Section):
    """Which worker generates the next turn of a trajectory (ROSE 4.3, RollArt 5.2): `orchestrator/policies/routing.py`."""

    policy: Literal["cache-affine", "least-loaded", "round-robin"] = "cache-affine"
    imbalance: Annotated[int, Field(ge=0)] = 16  # requests that staying with the prefix may cost before load decides
    cap: Annotated[int, Field(ge=0)] = (
        0  # requests a dedicated worker has at a time; the others go to served workers, or wait
    )
    served_cap: Annotated[int, Field(ge=0)] = (
        0  # the same of a served worker. 0: no limit. ROSE takes 16 a dedicated GPU
    )
    hardware: dict[
        str, str
    ] = {}  # worker (vllm-0, the URL of a served one) -> class of its hardware, where no pool says it
    affinity: dict[str, str] = {}  # task, or "default" -> class that it should run on (RollArt, Listing 1)
    fallback: bool = True  # a task may use the other classes while its own has no room


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
    redundant_members: Annotated[float, Field(ge=1.0, le=4.0)] = (
        1.0  # the same of a group's members; the rest is aborted
    )
    member_refills: Annotated[int, Field(ge=0, le=16)] = 2  # replacements for failed members, a group
    group_timeout: PositiveSeconds | None = None  # then a group is trained without its stragglers, or they are replaced
    buffer_limit: Positive | None = None  # trajectories between start and training; None: what alpha allows
    staleness_decay: Annotated[float, Field(ge=0)] = 0.0  # a trajectory counts exp(-this * lag) in the loss; 0: off
    ess_alarm: Fraction = 0.0  # alarm when a step's effective sample size falls below this share; 0: off
    dynamic_sampling: bool = False  # replace complete groups whose rewards are all equal by other groups (DAPO)
    max_filtered_groups: Positive = 64  # so replaced, a step; those beyond are trained as they are
    temperature: Annotated[float, Field(gt=0, le=10)] = 1.0
    environment_step_timeout: PositiveSeconds = 10.0
    trajectory_timeout: PositiveSeconds = 120.0
    worker_restarts: Annotated[int, Field(ge=0)] = 2
    stall_timeout: PositiveSeconds = 60.0  # a worker with work but no completion for this long is restarted
    weights: Literal["relay", "collective"] = "relay"  # how the run's own workers get a version; others: by the relay
    collective_timeout: PositiveSeconds = 60.0  # to deliver a version; workers that lack it then take it from the relay
    engine: EngineSection = EngineSection()
    routing: RoutingSection = RoutingSection()

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
        if self.weights == "collective" and self.served and not self.workers:
            fix = "reaches the run's own workers only, and rollout.workers is 0: use 'relay'"
            found.append(("weights", self.weights, fix))
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


class TaskContextSection(Section):
    """What long episodes are shown: docs/long_episodes.md. Sizes are tokens."""

    strategy: Literal["keep", "summarise", "restart"] = "keep"
    tokens: Annotated[int, Field(ge=0)] = 0  # a context with its response; 0: all that the task has room for
    recent_turns: Annotated[int, Field(ge=0)] = 3  # the last turns, that stay when a context begins anew
    summary: Annotated[str, Field(pattern=r"^(model|[\w.]+:\w+)$")] = "model"  # by the policy, or module:function
    summary_tokens: Annotated[int, Field(ge=0)] = 0  # at most; 0: as a response
    ask: tuple[int, ...] = ()  # token ids that ask the policy for a summary

    @model_validator(mode="after")
    def _asks(self) -> TaskContextSection:
        if self.strategy == "summarise" and self.summary == "model" and not self.ask:
            fix = "the policy must be asked for its summary: give the token ids of the question"
            found = _violation("ask", list(self.ask), fix)
            raise ValidationError.from_exception_data("context", [found])
        return self


class ContextSection(TaskContextSection):
    """The same for all tasks, but for those that have a table of their own: ``[context.tasks.NAME]``."""

    tasks: dict[str, TaskContextSection] = {}

    def of(self, task: str) -> TaskContextSection:
        """The rules of a task."""
        return self.tasks.get(task, self)


class WarmupSection(Section):
    """Supervised warm-up before RL. None of its data is used in RL. ``steps = 0``: none."""

    steps: Annotated[int, Field(ge=0)] = 0
    batch_size: Positive = 64
    learning_rate: Annotated[float, Field(gt=0, lt=1)] = 1e-3
    skill: Fraction = 0.0  # chance that a demonstrated move is the expert's; 0: uniformly random moves, format only


class KubernetesSection(Section):
    """Pods that environments run in (environment.backend = "kubernetes")."""

    image: str = ""  # has Python, this package in this version, and what the task needs
    namespace: Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", max_length=63)] = "default"
    context: str = ""  # of the kubeconfig; empty: the current one, or the pod's own account inside a cluster
    registry_mirror: str = ""  # images are pulled from here first: replaces the registry in `image` (RollArt 8)
    pull_policy: Literal["IfNotPresent", "Always", "Never"] = "IfNotPresent"
    pre_pull: bool = False  # pull the image onto every node when the run starts
    cpu: Annotated[str, Field(pattern=r"^[0-9]+m?$|^[0-9]+\.[0-9]+$")] = "500m"  # request and limit of a pod
    memory: Annotated[str, Field(pattern=r"^[0-9]+(Ki|Mi|Gi|K|M|G)?$")] = "512Mi"
    node_selector: dict[str, str] = {}
    port: Annotated[int, Field(ge=1024, le=65535)] = 8011  # that the environment listens on, in its pod
    orphan_seconds: PositiveSeconds = 120.0  # a pod to which nobody is connected for this long ends


class EnvironmentSection(Section):
    """Where environments run. "in-process": a fresh object in the orchestrator's process for every episode, no pool. The others
    keep a pool of instances that live on between episodes. Limits of a step and of a trajectory are in [rollout]."""

    backend: Literal["in-process", "in-process-pool", "subprocess", "kubernetes"] = "in-process"
    size: Annotated[int, Field(ge=0)] = 0  # instances at most; 0: rollout.environments
    warm: Annotated[int, Field(ge=0)] = 4  # instances kept ready beyond those in use
    parallel_starts: Positive = 4
    start_timeout: PositiveSeconds = 60.0
    start_tries: Positive = 8  # failures in a row, with none alive, that end the run
    backoff_first: PositiveSeconds = 1.0  # pause after a failed start; doubles with each failure
    backoff_limit: PositiveSeconds = 60.0
    health_seconds: PositiveSeconds = 30.0  # between checks of those that nobody uses
    health_timeout: PositiveSeconds = 5.0
    idle_seconds: PositiveSeconds = 300.0  # those beyond `warm` end when nobody used them for this long
    max_age_seconds: PositiveSeconds = 3600.0  # then replaced, between two episodes
    max_episodes: Annotated[int, Field(ge=0)] = 0  # then replaced; 0: no limit
    memory_mb: Annotated[int, Field(ge=0)] = 2048  # address space of one process (subprocess); 0: no limit
    cpu_seconds: Annotated[int, Field(ge=0)] = 0  # processor time of one call (subprocess, kubernetes); 0: no limit
    kubernetes: KubernetesSection = KubernetesSection()

    @model_validator(mode="after")
    def _fits(self) -> EnvironmentSection:
        found: list[tuple[str, object, str]] = []
        if self.size and self.warm > self.size:
            fix = f"more than environment.size = {self.size}: keep at most that many ready, or raise the size"
            found.append(("warm", self.warm, fix))
        if self.backoff_limit < self.backoff_first:
            fix = f"below environment.backoff_first = {self.backoff_first:g}: the pauses grow from there to the limit"
            found.append(("backoff_limit", self.backoff_limit, fix))
        if self.backend == "kubernetes" and not self.kubernetes.image:
            found.append(("kubernetes", "(no image)", "set environment.kubernetes.image to the image that pods run"))
        if 0 < self.memory_mb < 64:
            found.append(
                ("memory_mb", self.memory_mb, "no Python process fits into that; give 64 or more, or 0 for no limit")
            )
        if found:
            raise ValidationError.from_exception_data("environment", [_violation(*item) for item in found])
        return self


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


class ToolsSection(Section):
    """Tools that environments call as functions, like rewards. The embedded host runs ``functions``."""

    functions: dict[ToolName, Annotated[str, Field(pattern=r"^[\w.]+:\w+$")]] = {}  # name -> module:function
    urls: dict[ToolName, str] = {}  # name -> URL of a function elsewhere; token in RL_COSERVE_TOOLS_TOKEN
    concurrency: Positive = 16  # calls of one tool in flight
    burst: Annotated[int, Field(ge=0)] = 64  # more that may wait; one beyond fails
    timeout: PositiveSeconds = 10.0
    retries: Annotated[int, Field(ge=0, le=20)] = 3
    warm: Annotated[int, Field(ge=0)] = 1  # processes of each tool that are kept ready
    idle_seconds: PositiveSeconds = 30.0  # the embedded host ends the others after this

    @model_validator(mode="after")
    def _one_place(self) -> ToolsSection:
        if self.functions and self.urls:
            fix = "the embedded host and functions elsewhere have different tokens: use one of functions and urls"
            raise ValidationError.from_exception_data("tools", [_violation("urls", sorted(self.urls), fix)])
        return self

    @property
    def any(self) -> bool:
        """Whether there are tools."""
        return bool(self.functions or self.urls)


class RelaySection(Section):
    """The weight relay. ``kind`` "mooncake": ``master`` is host:port; empty: a `mooncake_master` child process is started.
    "fsspec": ``master`` is the URL of a folder or prefix that all processes reach; empty: a folder of the run.
    ``host``: the address of this machine that the child process listens on; every client then announces its own address
    towards it. Mooncake has no authentication: leave it at loopback unless workers on other machines must reach it."""

    kind: Literal["mooncake", "fsspec"] = "mooncake"
    master: str = ""
    host: Annotated[str, Field(pattern=r"^[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?$")] = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 0  # of the embedded master; 0: a free one
    segment_mb: Positive = 256
    bucket_mb: Positive = 64
    keep_versions: Annotated[int, Field(ge=2)] = 2
    metadata_url: str = (
        ""  # redis://[user@]host[:port][/database] or rediss://; empty: a SQLite file in the run's folder
    )
    metadata_password_file: str = ""  # its password, a file on every machine; empty: RL_COSERVE_REDIS_PASSWORD, or none
    metadata_allow_plain: bool = False  # let redis:// leave this machine: what is sent travels unencrypted
    snapshot_every: Annotated[int, Field(ge=0)] = 0  # differences, and a full snapshot after so many; 0: always whole
    codec_threads: Positive = 1  # of each rank that encodes or applies differences

    @model_validator(mode="after")
    def _metadata(self) -> RelaySection:
        url = self.metadata_url
        if url and (fix := urls.redis_mistake(url, self.metadata_allow_plain)):
            found = [_violation("metadata_url", urls.without_password(url), fix)]
            raise ValidationError.from_exception_data("relay", found)
        return self


class FiltersSection(Section):
    """Which scored trajectories may be trained on, what a batch is made of; see :mod:`orchestrator.policies.filters`."""

    completeness: bool = True  # drop what an error cut short, or what holds no token of the policy
    truncated: Literal["keep", "drop"] = "keep"  # episodes that ran into their turn or context limit
    reward_min: float | None = None
    reward_max: float | None = None
    ngram: Annotated[int, Field(ge=2, le=64)] = 4  # tokens; of the next two
    max_repetition: Fraction | None = None  # share of a trajectory's action n-grams that repeat earlier ones of it
    max_similarity: Fraction | None = None  # share that the last `similarity_window` trajectories have already
    similarity_window: Positive = 256  # trajectories of the same task
    balance: Literal["none", "task", "difficulty"] = "none"
    balance_share: Annotated[float, Field(gt=0, le=1)] = 0.5  # of a batch's groups, for one task or difficulty

    @model_validator(mode="after")
    def _range(self) -> FiltersSection:
        if self.reward_min is not None and self.reward_max is not None and self.reward_min > self.reward_max:
            fix = f"must not be above filters.reward_max = {self.reward_max:g}: no reward would pass"
            raise ValidationError.from_exception_data("filters", [_violation("reward_min", self.reward_min, fix)])
        if self.truncated == "drop" and not self.completeness:
            fix = "needs filters.completeness = true"
            raise ValidationError.from_exception_data("filters", [_violation("truncated", self.truncated, fix)])
        return self


class EvaluationSection(Section):
    """Greedy evaluation on held-out prompts: at the start, every ``every`` steps, and at the end."""

    every: Annotated[int, Field(ge=0)] = 0  # 0: start and end only
    prompts: Positive = 300


class CheckpointSection(Section):
    """Atomic checkpoints; the last ``keep`` stay."""

    every: Positive = 1
    keep: Positive = 2


class ResourcesSection(Section):
    """Pools of hardware by class (RollArt 5.2). Without pools nothing is bound, and Ray places processes by CPUs."""

    pools: dict[str, Positive] = {}  # class -> devices; in a Ray cluster, custom resources of these names
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]+$")] = (
        "default"  # of the pools, where jobs share a metadata store
    )
    trainer: str = "H800"  # class that trainer ranks ask for
    devices_per_rank: Positive = 1
    rollout: dict[
        str, Positive
    ] = {}  # class -> rollout workers that ask for it, rollout.workers in all; empty: all H20
    devices_per_worker: Positive = 1
    devices_per_server: Positive = 8
    compatible: dict[str, tuple[str, ...]] = {}  # class -> stand-ins while it has none free; not in it: all of its kind


class RaySection(Section):
    """The local Ray, or the address of a cluster."""

    address: str = ""
    cpus: Positive = 4
    object_store_mb: Annotated[int, Field(ge=80)] = 128
