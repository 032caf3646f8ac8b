"""The trainer's settings as the plugin reads them: a closed, checked record made from a plain dictionary.

The orchestrator's ``TrainerSection`` has the same fields and defaults (a test compares them); this twin exists because
the plugin imports no configuration library and runs in a process of its own. Which settings contradict each other is
decided for both in ``orchestrator.policies.training.objective_table``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from orchestrator.api import ConfigError
from orchestrator.policies.training.objective_table import (
    DECAYS,
    KL_ESTIMATORS,
    LOSSES,
    OBJECTIVES,
    RATIOS,
    TIS_MODES,
    conflicts,
)

ORDERS = ("length", "arrival")
PARALLEL = ("tensor_parallel", "pipeline_parallel", "expert_parallel", "data_parallel")


@dataclass(frozen=True, slots=True)
class TrainerSettings:
    """See ``orchestrator.config.TrainerSection`` for what each field means."""

    learning_rate: float = 1e-3
    final_learning_rate: float | None = None
    lr_decay: str = "linear"
    lr_warmup_steps: int = 0
    weight_decay: float = 0.0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.95
    clip_grad: float = 1.0
    objective: str = "grpo"
    clip_low: float | None = None
    clip_high: float | None = None
    dual_clip: float | None = None
    ratio_to: str = "trainer"
    kl_coefficient: float = 0.0
    kl_estimator: str = "k3"
    kl_in_reward: bool = False
    gamma: float = 1.0
    gae_lambda: float = 0.95
    value_learning_rate: float | None = None
    value_clip: float = 0.2
    max_token_lag: int | None = None
    tis_cap: float = 2.0
    tis_floor: float = 0.0
    tis_mode: str = "truncate"
    entropy_coefficient: float = 0.0
    normalize_advantage: bool = True
    loss: str | None = None
    minibatches: int = 1
    micro_batch_size: int = 64
    micro_batch_order: str = "length"
    pack_tokens: int | None = None
    stream: bool = False
    grad_offload: bool = False
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    expert_parallel: int = 1
    data_parallel: int = 1
    distributed_optimizer: bool = False
    threads: int = 1
    reference_samples: int = 0
    logprob_gap_samples: int = 32
    logprob_gap_alarm: float = 0.02
    entropy_alarm: float = 0.2
    tis_alarm: float = 0.1

    def __post_init__(self) -> None:
        self._require("objective", self.objective in OBJECTIVES, f"must be one of {', '.join(OBJECTIVES)}")
        for name in ("learning_rate", "tis_cap", "value_clip"):
            self._require(name, getattr(self, name) > 0, "must be above 0")
        for name in ("minibatches", "micro_batch_size", "threads", "pack_tokens", *PARALLEL):
            self._require(name, getattr(self, name) is None or getattr(self, name) >= 1, "must be at least 1")
        for name in (
            "weight_decay",
            "clip_grad",
            "entropy_coefficient",
            "kl_coefficient",
            "lr_warmup_steps",
            "logprob_gap_samples",
            "reference_samples",
            "tis_floor",
            "max_token_lag",
        ):
            self._require(name, getattr(self, name) is None or getattr(self, name) >= 0, "must be at least 0")
        self._require("clip_low", self.clip_low is None or 0 < self.clip_low < 1, "must lie between 0 and 1")
        self._require("clip_high", self.clip_high is None or self.clip_high > 0, "must be above 0")
        self._require("dual_clip", self.dual_clip is None or self.dual_clip > 1, "must be above 1")
        named = {"ratio_to": RATIOS, "tis_mode": TIS_MODES, "lr_decay": DECAYS}
        for name, known in named.items():
            self._require(name, getattr(self, name) in known, f"must be one of {', '.join(known)}")
        self._require("entropy_alarm", 0 <= self.entropy_alarm < 1, "must be at least 0 and below 1")
        self._require("tis_alarm", 0 <= self.tis_alarm <= 1, "must lie between 0 and 1")
        self._require("gamma", 0 < self.gamma <= 1, "must lie between 0 and 1")
        self._require("gae_lambda", 0 <= self.gae_lambda <= 1, "must lie between 0 and 1")
        self._require("value_learning_rate", self.value_rate > 0, "must be above 0")
        self._require("loss", self.loss is None or self.loss in LOSSES, f"must be one of {', '.join(LOSSES)}")
        self._require("kl_estimator", self.kl_estimator in KL_ESTIMATORS, f"must be one of {', '.join(KL_ESTIMATORS)}")
        self._require("micro_batch_order", self.micro_batch_order in ORDERS, f"must be one of {', '.join(ORDERS)}")
        final = self.final_learning_rate
        self._require(
            "final_learning_rate",
            final is None or 0 < final <= self.learning_rate,
            f"must lie between 0 and trainer.learning_rate = {self.learning_rate!r}",
        )
        for name, fix in conflicts(self):
            self._require(name, False, fix)

    @property
    def clip_range(self) -> tuple[float, float]:
        """(below, above) 1: as set, else the objective's own."""
        low, high = OBJECTIVES[self.objective].clip
        return low if self.clip_low is None else self.clip_low, high if self.clip_high is None else self.clip_high

    @property
    def loss_mean(self) -> str:
        """One of ``LOSSES``: as set, else the objective's own."""
        return OBJECTIVES[self.objective].loss if self.loss is None else self.loss

    @property
    def order(self) -> str:
        """What goes into one micro-batch: "length" or "arrival", which a stream implies."""
        return "arrival" if self.stream else self.micro_batch_order

    @property
    def needs_reference(self) -> bool:
        """Whether log-probs under the reference weights are needed."""
        return self.kl_coefficient > 0

    @property
    def keeps_reference(self) -> bool:
        """Whether the reference weights are kept: for the loss, or only to measure the KL to them."""
        return self.needs_reference or self.reference_samples > 0

    @property
    def needs_critic(self) -> bool:
        """Whether a value model is trained beside the policy."""
        return OBJECTIVES[self.objective].advantage == "gae"

    @property
    def value_rate(self) -> float:
        """The critic's learning rate."""
        return self.learning_rate if self.value_learning_rate is None else self.value_learning_rate

    def _require(self, name: str, holds: bool, fix: str) -> None:
        if not holds:
            raise ConfigError(f"trainer.{name}", getattr(self, name), fix)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> TrainerSettings:
        """Strict: an unknown key is a ConfigError."""
        known = [field.name for field in fields(cls)]
        for key in data:
            if key not in known:
                raise ConfigError(f"trainer.{key}", data[key], f"no such key; known keys: {', '.join(known)}")
        return cls(**data)

    def check_schedule(self, total_steps: int) -> None:
        """The learning-rate schedule must fit into the run."""
        if total_steps < 1:
            raise ConfigError("run.steps", total_steps, "must be at least 1")
        self._require("lr_warmup_steps", self.lr_warmup_steps < total_steps, f"must be below run.steps = {total_steps}")
