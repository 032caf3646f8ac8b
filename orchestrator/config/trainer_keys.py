"""Sections of a config: training and the warm-up before it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, ValidationError, model_validator

from orchestrator.config.section_base import Fraction, Positive, Section, violation
from orchestrator.policies.training.objective_table import conflicts


class TrainerSection(Section):
    """The objective and its optimizer; truncated importance sampling stands between trainer and rollout."""

    learning_rate: Annotated[float, Field(gt=0, lt=1)] = 1e-3
    final_learning_rate: Annotated[float, Field(gt=0, lt=1)] | None = None  # decays to this over run.steps
    lr_decay: Literal["linear", "cosine"] = "linear"  # the way to final_learning_rate
    lr_warmup_steps: Annotated[int, Field(ge=0)] = 0
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    adam_beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    adam_beta2: Annotated[float, Field(gt=0, lt=1)] = 0.95
    clip_grad: Annotated[float, Field(ge=0)] = 1.0  # 0 switches gradient clipping off
    objective: Literal["grpo", "dapo", "ppo", "reinforce++", "rloo", "gspo"] = "grpo"
    clip_low: Annotated[float, Field(gt=0, lt=1)] | None = None  # None: the objective's own, see docs/megatron.md
    clip_high: Annotated[float, Field(gt=0)] | None = None
    dual_clip: Annotated[float, Field(gt=1)] | None = (
        None  # bound of the ratio where the advantage is negative; 3 is usual
    )
    ratio_to: Literal["trainer", "rollout"] = (
        "trainer"  # what the clip compares with: pi_old recomputed, or what sampled
    )
    kl_coefficient: Annotated[float, Field(ge=0)] = 0.0  # of the KL to the reference, the weights RL began with
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    kl_in_reward: bool = False  # subtract the KL from each token's reward instead of adding it to the loss (k1)
    gamma: Annotated[float, Field(gt=0, le=1)] = 1.0  # discount of a token (ppo, reinforce++)
    gae_lambda: Annotated[float, Field(ge=0, le=1)] = 0.95  # ppo
    value_learning_rate: Annotated[float, Field(gt=0, lt=1)] | None = None  # of the critic; None: learning_rate
    value_clip: Annotated[float, Field(gt=0)] = 0.2  # ppo
    max_token_lag: Annotated[int, Field(ge=0)] | None = None  # mask tokens of weights older by more versions
    tis_cap: Annotated[float, Field(gt=0)] = 2.0  # cap of pi_old / pi_rollout
    tis_floor: Annotated[float, Field(ge=0)] = 0.0  # the lower bound, with tis_mode = "mask"
    tis_mode: Literal["truncate", "mask"] = "truncate"  # tokens outside of the bounds: held at the cap, or left out
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
    reference_samples: Annotated[int, Field(ge=0)] = 0  # trajectories a step whose KL to the reference is only measured
    logprob_gap_samples: Annotated[int, Field(ge=0)] = 32  # trajectories the gap is measured on, a version; 0: off
    logprob_gap_alarm: Annotated[float, Field(gt=0)] = 0.02  # mean |log pi_trainer - log pi_rollout|, same version
    entropy_alarm: Annotated[float, Field(ge=0, lt=1)] = 0.2  # of the first steps' entropy; lower is collapse; 0: off
    tis_alarm: Annotated[float, Field(ge=0, le=1)] = 0.1  # share of tokens at the cap or left out; 0: off

    @model_validator(mode="after")
    def _fits(self) -> TrainerSection:
        found = [violation(name, getattr(self, name), fix) for name, fix in conflicts(self)]
        if found:
            raise ValidationError.from_exception_data("trainer", found)
        return self


class WarmupSection(Section):
    """Supervised warm-up before RL. None of its data is used in RL. ``steps = 0``: none."""

    steps: Annotated[int, Field(ge=0)] = 0
    batch_size: Positive = 64
    learning_rate: Annotated[float, Field(gt=0, lt=1)] = 1e-3
    skill: Fraction = 0.0  # chance that a demonstrated move is the expert's; 0: uniformly random moves, format only
