"""The trainer's settings: table ``[trainer]`` of a config, what the Megatron plugin reads, the flags of a training script.

A key is written once, here. The comment behind a field is its meaning in docs/config.md; its :class:`Flag` says what it is
on a command line, and is the meaning too where there is no comment. Which settings contradict each other is said by
:func:`setting_conflicts`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args

from pydantic import Field, model_validator

from orchestrator.api import ConfigError
from orchestrator.policies.training.objective_table import (
    OBJECTIVES,
    TIS_CAP,
    USED_BY,
    KlEstimator,
    LossMean,
    LrDecay,
    ObjectiveName,
    RatioTo,
    TisLevel,
    TisMode,
    whitens_advantages,
)
from orchestrator.settings.megatron_arguments import FIELD, ArgumentMistake, read_arguments
from orchestrator.settings.section import Conflict, Positive, PositiveSeconds, Section

Rate = Annotated[float, Field(gt=0, lt=1)]
NotNegative = Annotated[float, Field(ge=0)]
LossName = Annotated[str, Field(pattern=rf"^({'|'.join(get_args(LossMean))}|[\w.]+:\w+)$")]
OWN = "the objective's own"
WHOLE_ONLY = (
    "vLLM's own engine sends from one rank that holds every tensor whole: take trainer.tensor_parallel, pipeline_parallel and "
    "expert_parallel = 1, or rollout.weights = 'collective'"
)


@dataclass(frozen=True, slots=True)
class Flag:
    """A key on the command line of a Megatron training script: ``--rl-`` and its name, else ``name``.

    ``unset``: what a default of None means. ``megatron``: its value is read from this argument of Megatron's own, and
    there is no flag of ours.
    """

    help: str = ""
    name: str = ""
    unset: str = "none"
    megatron: str = ""

    def argument(self, key: str) -> str:
        """The attribute of the parsed command line."""
        return self.megatron or (self.name or f"rl-{key}").replace("-", "_")

    def spelled(self, key: str) -> str:
        """As it is typed."""
        return f"--{self.argument(key).replace('_', '-')}"


class TrainerSettings(Section):
    """What is learned and how: the settings that a run and a training script of one's own share."""

    table = ("trainer",)
    learning_rate: Annotated[Rate, Flag(megatron="lr")] = 1e-3
    # the rate decays to this over run.steps
    final_learning_rate: Annotated[Rate | None, Flag(megatron="min_lr")] = None
    lr_decay: Annotated[LrDecay, Flag(megatron="lr_decay_style")] = "linear"  # the way to final_learning_rate
    lr_warmup_steps: Annotated[int, Field(ge=0), Flag(megatron="lr_warmup_iters")] = 0
    weight_decay: Annotated[NotNegative, Flag(megatron="weight_decay")] = 0.0
    adam_beta1: Annotated[float, Field(ge=0, lt=1), Flag(megatron="adam_beta1")] = 0.9
    adam_beta2: Annotated[Rate, Flag(megatron="adam_beta2")] = 0.95
    clip_grad: Annotated[NotNegative, Flag(megatron="clip_grad")] = 1.0  # 0 switches gradient clipping off
    objective: Annotated[ObjectiveName, Flag("what is optimised, see docs/megatron.md")] = "grpo"
    clip_low: Annotated[Rate | None, Flag("importance ratio clipped at 1 - this", unset=OWN)] = None
    clip_high: Annotated[
        Annotated[float, Field(gt=0)] | None, Flag("importance ratio clipped at 1 + this", unset=OWN)
    ] = None
    dual_clip: Annotated[
        Annotated[float, Field(gt=1)] | None,
        Flag("bound of the ratio where the advantage is negative; 3 is usual"),
    ] = None
    # what the clip compares with: pi_old recomputed, or the policy that sampled
    ratio_to: Annotated[RatioTo, Flag("what the clip compares with: pi_old, or the rollout that sampled")] = "trainer"
    # of the KL to the reference, the weights RL began with
    kl_coefficient: Annotated[NotNegative, Flag("weight of the KL to the weights that training began with")] = 0.0
    kl_estimator: Annotated[KlEstimator, Flag("estimator of that KL")] = "k3"
    # subtract the KL from each token's reward instead of adding it to the loss (k1)
    kl_in_reward: Annotated[bool, Flag("subtract the KL from rewards per token, not add it to the loss")] = False
    # discount of a token (ppo, reinforce++)
    gamma: Annotated[float, Field(gt=0, le=1), Flag("discount per token (ppo, reinforce++)")] = 1.0
    gae_lambda: Annotated[float, Field(ge=0, le=1), Flag("lambda of the advantage estimate (ppo)")] = 0.95  # ppo
    # of the critic; None: learning_rate
    value_learning_rate: Annotated[
        Rate | None, Flag("learning rate of the critic (ppo)", name="rl-value-lr", unset="that of --lr")
    ] = None
    value_clip: Annotated[float, Field(gt=0), Flag("clip range of the value loss (ppo)")] = 0.2  # ppo
    # mask tokens of weights older by more versions
    max_token_lag: Annotated[
        Annotated[int, Field(ge=0)] | None,
        Flag("weight versions; older tokens are not trained on", unset="all are"),
    ] = None
    # cap of pi_old / pi_rollout
    tis_cap: Annotated[float, Field(gt=0), Flag("cap of the importance weight pi_trainer / pi_rollout of a token")] = (
        2.0
    )
    # the lower bound, with tis_mode = "mask"
    tis_floor: Annotated[NotNegative, Flag("lower bound of that weight, with --rl-tis-mode mask")] = 0.0
    # tokens outside the bounds: held at the cap, or left out
    tis_mode: Annotated[TisMode, Flag("tokens outside the bounds: held at the cap, or left out")] = "truncate"
    # whose ratio the bounds hold: a token's, its trajectory's (a product), or their geometric mean
    tis_level: Annotated[TisLevel, Flag("whose ratio that is: a token's, or its trajectory's")] = "token"
    # leave out trajectories with a negative advantage that pi left by more than this, in the mean over their tokens of log
    # pi_rollout - log pi (OPSM)
    opsm_delta: Annotated[
        NotNegative | None, Flag("trajectories with a negative advantage that pi left by more are left out")
    ] = None
    entropy_coefficient: Annotated[NotNegative, Flag("weight of the entropy bonus")] = 0.0
    # divide by the group's standard deviation (grpo, dapo, gspo, cispo); ppo: whiten over the batch
    normalize_advantage: Annotated[bool, Flag("divide advantages by their standard deviation")] = True
    # module:function of yours instead of the objective's (rewards of a group, tokens of each) -> advantages
    advantage: Annotated[
        Annotated[str, Field(pattern=r"^[\w.]+:\w+$")] | None,
        Flag("module:function(rewards of a group, tokens) -> advantages", unset=OWN),
    ] = None
    # how token losses become one number; None: the objective's own; or a function of yours that makes them
    # (module:function)
    loss: Annotated[
        LossName | None,
        Flag(f"how token losses become one number: {', '.join(get_args(LossMean))}, or module:function", unset=OWN),
    ] = None
    loss_length: Annotated[Positive | None, Flag("tokens, of --rl-loss length-normalized")] = None
    minibatches: Annotated[Positive, Flag("optimizer steps per batch")] = 1
    micro_batch_size: Annotated[Positive, Flag(megatron="micro_batch_size")] = (
        64  # trajectories per forward and backward
    )
    # and at most this many tokens, padding included (a longer trajectory is alone): what bounds the memory of a step
    micro_batch_tokens: Annotated[
        Positive, Flag("tokens of a micro-batch, padding included; a longer trajectory is alone")
    ] = 16384
    # what goes into one micro-batch; `stream` means arrival
    micro_batch_order: Annotated[Literal["length", "arrival"], Flag("what goes into a micro-batch")] = "length"
    # several trajectories in one row of at most this many tokens; None: padded rows
    pack_tokens: Annotated[Positive | None, Flag("tokens of a packed row, which needs a GPU", unset="padded rows")] = (
        None
    )
    # compute gradients of finished groups while the rollout still runs (RollPacker 4.4)
    stream: Annotated[
        bool,
        Flag(
            "take gradients trajectory by trajectory as they finish, then one synchronised step",
            name="rl-stream-training",
        ),
    ] = False
    grad_offload: Annotated[bool, Flag("keep gradients in host memory between the parts of a stream")] = False
    tensor_parallel: Annotated[Positive, Flag(megatron="tensor_model_parallel_size")] = 1
    pipeline_parallel: Annotated[Positive, Flag(megatron="pipeline_model_parallel_size")] = 1
    context_parallel: Annotated[Positive, Flag(megatron="context_parallel_size")] = 1  # ranks that share each row
    expert_parallel: Annotated[Positive, Flag(megatron="expert_model_parallel_size")] = 1
    data_parallel: Annotated[Positive, Flag(megatron="data_parallel_size")] = 1
    # optimizer state split over the data-parallel replicas
    distributed_optimizer: Annotated[bool, Flag(megatron="use_distributed_optimizer")] = False

    def conflicts(self) -> Iterator[Conflict]:
        yield from ((name, getattr(self, name), fix) for name, fix in setting_conflicts(self))
        final = self.final_learning_rate
        if final is not None and final > self.learning_rate:
            yield "final_learning_rate", final, f"must lie between 0 and trainer.learning_rate = {self.learning_rate!r}"

    @classmethod
    def flags(cls) -> dict[str, Flag]:
        """Of each key, in order; one that says nothing of it is ``--rl-`` and its name."""
        found = {}
        for key, field in cls.model_fields.items():
            found[key] = next((item for item in field.metadata if isinstance(item, Flag)), Flag())
        return found

    @property
    def clip_range(self) -> tuple[float, float]:
        """(below, above) 1: as set, else the objective's own."""
        low, high = OBJECTIVES[self.objective].clip
        return low if self.clip_low is None else self.clip_low, high if self.clip_high is None else self.clip_high

    @property
    def loss_mean(self) -> LossMean:
        """How token losses become one number: as set, else the objective's own."""
        named = next((mean for mean in get_args(LossMean) if mean == self.loss), None)
        return OBJECTIVES[self.objective].loss if named is None else named

    @property
    def loss_function(self) -> str:
        """The function that makes token losses, ``module:function``; "": the objective."""
        return self.loss if self.loss is not None and ":" in self.loss else ""

    @property
    def order(self) -> str:
        """What goes into one micro-batch: "length" or "arrival", which a stream implies."""
        return "arrival" if self.stream else self.micro_batch_order

    @property
    def needs_reference(self) -> bool:
        """Whether log-probs under the reference weights are needed."""
        return self.kl_coefficient > 0 or OBJECTIVES[self.objective].advantage == "reference"

    @property
    def ranks(self) -> int:
        """Experts are split over data-parallel ranks: they need none of their own."""
        return self.tensor_parallel * self.pipeline_parallel * self.context_parallel * self.data_parallel

    @property
    def whole_on_each_rank(self) -> bool:
        """Whether each rank holds all weights, whole."""
        return self.tensor_parallel == self.pipeline_parallel == self.expert_parallel == 1

    def check_whole(self) -> None:
        """For ``rollout.weights = "nccl"``. Raises ConfigError."""
        if not self.whole_on_each_rank:
            raise ConfigError("rollout.weights", "nccl", WHOLE_ONLY)

    @property
    def needs_critic(self) -> bool:
        """Whether a value model is trained beside the policy."""
        return OBJECTIVES[self.objective].advantage == "gae"

    @property
    def value_rate(self) -> float:
        """The critic's learning rate."""
        return self.learning_rate if self.value_learning_rate is None else self.value_learning_rate

    def check_schedule(self, total_steps: int) -> None:
        """The learning-rate schedule must fit into the run. Raises ConfigError."""
        if total_steps < 1:
            raise ConfigError("run.steps", total_steps, "must be at least 1")
        if self.lr_warmup_steps >= total_steps:
            fix = f"must be below run.steps = {total_steps}"
            raise ConfigError("trainer.lr_warmup_steps", self.lr_warmup_steps, fix)


class TrainerSection(TrainerSettings):
    """The objective and its optimizer; truncated importance sampling stands between trainer and rollout."""

    # What only a run has: processes of its own, and what it measures and watches.
    threads: Positive = 1
    # options of Megatron-Core's own, passed on by name: fields of its TransformerConfig, of its DDP's and its optimizer's
    # config; see docs/megatron.md
    megatron: dict[str, Any] = Field(default_factory=dict)
    # a Megatron argument list, as Megatron-LM spells it ("--recompute-granularity full ..."): each argument counts as the key
    # here that means it, else as an option of `megatron`; see docs/megatron.md
    arguments: str = ""
    # a rank that waits for another longer than this in one collective gives up: with a stream, the tail of a rollout
    collective_timeout: PositiveSeconds = 7200.0
    interface: str = (
        ""  # network interface of the ranks' collectives, on every node; empty: the one that reaches rank 0
    )
    # of a mixture of experts: train with the experts that the rollout chose, which its engines then return (R3)
    routing_replay: bool = False
    # a Hugging Face folder of the model's own shape whose weights are the reference; empty: those that RL began with
    reference_path: str = ""
    # steps after which the present weights become the reference; 0: it stays
    reference_update_every: Annotated[int, Field(ge=0)] = 0
    reference_samples: Annotated[int, Field(ge=0)] = (
        0  # trajectories per step whose KL to the reference is only measured
    )
    # trajectories that the gap is measured on, per version; 0: off
    logprob_gap_samples: Annotated[int, Field(ge=0)] = 32
    logprob_gap_alarm: Annotated[float, Field(gt=0)] = 0.02  # mean |log pi_trainer - log pi_rollout|, same version
    entropy_alarm: Annotated[float, Field(ge=0, lt=1)] = 0.2  # of the first steps' entropy; lower is collapse; 0: off
    tis_alarm: Annotated[float, Field(ge=0, le=1)] = 0.1  # share of tokens at the cap or left out; 0: off

    @model_validator(mode="before")
    @classmethod
    def _with_arguments(cls, given: Any) -> Any:
        """Keys of ours that the argument list says. Raises ConfigError for one that a key contradicts, or without a place."""
        if not isinstance(given, Mapping) or not isinstance(text := given.get("arguments", ""), str):
            return given
        said, found = _read(text), dict(given)
        for key, flag in cls.flags().items():
            if flag.megatron not in said:
                continue
            value, decays = (
                said[flag.megatron],
                said.get("min_lr") and said.get("lr_decay_style", "linear") != "constant",
            )
            if key in ("final_learning_rate", "lr_decay") and not decays:  # a constant rate has no final one
                continue
            if found.setdefault(key, value) != value:
                word = f"--{flag.megatron.replace('_', '-')}"
                raise ConfigError(
                    FIELD, word, f"is {value!r}, but trainer.{key} is {found[key]!r}: leave one of the two out"
                )
        return found

    @property
    def megatron_arguments(self) -> dict[str, Any]:
        """What the argument list says of Megatron-Core's options."""
        ours = {flag.megatron for flag in self.flags().values()}
        return {name: value for name, value in _read(self.arguments).items() if name not in ours}

    def conflicts(self) -> Iterator[Conflict]:
        yield from super().conflicts()
        for name in ("reference_path", "reference_update_every"):
            if getattr(self, name) and not self.keeps_reference:
                fix = "nothing here needs a reference: set trainer.kl_coefficient or trainer.reference_samples, or leave it out"
                yield name, getattr(self, name), fix
        if self.reference_path and self.reference_update_every:
            fix = "the reference is trainer.reference_path: leave one of the two out"
            yield "reference_update_every", self.reference_update_every, fix
        if OBJECTIVES[self.objective].advantage == "reference" and not (
            self.reference_path or self.reference_update_every
        ):
            yield "reference_path", "", f"{self.objective} needs a teacher: a model folder of the same shape"

    @property
    def keeps_reference(self) -> bool:
        """Whether the reference weights are kept: for the loss, or only to measure the KL to them."""
        return self.needs_reference or self.reference_samples > 0


def _read(text: str) -> dict[str, Any]:
    try:
        return read_arguments(text)
    except ArgumentMistake as error:
        raise ConfigError(FIELD, error.word, str(error)) from error


def setting_conflicts(trainer: TrainerSettings) -> Iterator[tuple[str, str]]:
    """(setting, how to mend it) for each setting that contradicts another; the single values are known to be valid."""
    for group in (_kl_conflicts, _loss_conflicts, _stream_conflicts, _ratio_conflicts):
        yield from group(trainer)


def _kl_conflicts(trainer: TrainerSettings) -> Iterator[tuple[str, str]]:
    if trainer.kl_in_reward:
        if OBJECTIVES[trainer.objective].advantage not in ("returns", "gae"):
            fix = f"needs rewards per token (ppo, reinforce++); with {trainer.objective} the KL belongs in the loss: false"
            yield "kl_in_reward", fix
        if trainer.kl_coefficient == 0:
            yield "kl_in_reward", "needs trainer.kl_coefficient above 0"
        if trainer.kl_estimator != "k1":
            yield "kl_estimator", "must be 'k1' with trainer.kl_in_reward"
    elif trainer.kl_coefficient > 0 and trainer.kl_estimator == "k1":
        fix = "as a loss, k1's gradient has mean 0 and does nothing; use 'k2' or 'k3', or trainer.kl_in_reward"
        yield "kl_estimator", fix


def _loss_conflicts(trainer: TrainerSettings) -> Iterator[tuple[str, str]]:
    if OBJECTIVES[trainer.objective].sequence_ratio and trainer.loss not in (None, "sequence-mean"):
        fix = f"{trainer.objective} is defined over whole sequences: leave it out, or 'sequence-mean'"
        yield "loss", fix
    if (trainer.loss == "length-normalized") != (trainer.loss_length is not None):
        yield "loss_length", "belongs to trainer.loss = 'length-normalized': set both, or neither"
    if trainer.advantage:
        if OBJECTIVES[trainer.objective].advantage not in ("group", "leave-one-out"):
            fix = f"is of whole groups: leave it out with {trainer.objective}, whose advantages are of tokens"
            yield "advantage", fix
        if not trainer.normalize_advantage:
            yield "normalize_advantage", "is the objective's; with trainer.advantage your function divides, or does not"
    for name, (default, readers) in USED_BY.items():
        if trainer.objective not in readers and getattr(trainer, name) != default:
            yield name, f"is read by {' and '.join(readers)} only; leave it out with {trainer.objective}"


def _ratio_conflicts(trainer: TrainerSettings) -> Iterator[tuple[str, str]]:
    if trainer.dual_clip is not None and trainer.minibatches == 1 and trainer.ratio_to == "trainer":
        fix = "clips a ratio that is exactly 1 with one mini-batch: set trainer.ratio_to = 'rollout', or more mini-batches"
        yield "dual_clip", fix
    if trainer.dual_clip is not None and OBJECTIVES[trainer.objective].clips_weight:
        yield "dual_clip", f"bounds a surrogate that {trainer.objective} does not have: clip_high bounds its weight"
    if trainer.tis_mode != "mask":
        if trainer.tis_floor > 0:
            yield "tis_floor", "is read with trainer.tis_mode = 'mask' only; leave it out"
        if trainer.ratio_to == "rollout" and trainer.tis_cap != TIS_CAP:
            fix = "has no effect if the ratio is to the rollout itself: leave it out, or set trainer.tis_mode = 'mask'"
            yield "tis_cap", fix
    elif trainer.tis_floor >= trainer.tis_cap:
        yield "tis_floor", f"must be below trainer.tis_cap = {trainer.tis_cap:g}: no token would be left"
    if trainer.tis_level != "token" and trainer.tis_mode != "mask" and trainer.ratio_to == "rollout":
        fix = "has no effect if the ratio is to the rollout itself: use 'token', or set trainer.tis_mode = 'mask'"
        yield "tis_level", fix
    if trainer.lr_decay != "linear" and trainer.final_learning_rate is None:
        yield "lr_decay", "is the way to trainer.final_learning_rate: set that too, or leave this out"


def _stream_conflicts(trainer: TrainerSettings) -> Iterator[tuple[str, str]]:
    if trainer.stream:
        if OBJECTIVES[trainer.objective].advantage == "returns":
            fix = f"{trainer.objective} normalises over the whole batch, which streaming does not wait for: set it to false"
            yield "stream", fix
        elif whitens_advantages(trainer.objective, normalize=trainer.normalize_advantage):
            fix = "must be false with trainer.stream: ppo would whiten advantages over an incomplete batch"
            yield "normalize_advantage", fix
        if trainer.minibatches > 1:
            fix = "must be 1 with trainer.stream: mini-batches are drawn from the whole batch"
            yield "minibatches", fix
    elif trainer.grad_offload:
        yield "grad_offload", "is for the pauses of a stream: set trainer.stream, or leave it out"
