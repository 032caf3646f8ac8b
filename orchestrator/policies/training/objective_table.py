"""What an objective needs, its published constants, and which settings contradict each other: one table, one list of rules.

``orchestrator.settings.trainer_settings`` reads them, for a run and for a training script alike. The arithmetic is the
trainer's: ``megatron_rlplugin.objective.policy_loss`` has the table of formulas and sources.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

ObjectiveName = Literal["grpo", "dapo", "ppo", "reinforce++", "rloo", "gspo"]
# How token losses are summed into one number. "token-mean": over the batch's tokens. "sequence-mean": mean over the tokens
# of a trajectory, then over trajectories. "sequence-sum": sum over the tokens of a trajectory, then mean over trajectories.
LossMean = Literal["token-mean", "sequence-mean", "sequence-sum"]
KlEstimator = Literal["k1", "k2", "k3"]
# What the ratio of the clip is taken to. "trainer": pi_old, recomputed, with importance sampling between it and the rollout
# (decoupled PPO: Hilton et al. 2021). "rollout": the policy that sampled, at once.
RatioTo = Literal["trainer", "rollout"]
TisMode = Literal["truncate", "mask"]
LrDecay = Literal["linear", "cosine"]
TIS_CAP = 2.0  # the default


@dataclass(frozen=True, slots=True)
class Objective:
    """``advantage``: "group", "leave-one-out", "returns" or "gae". ``clip``: below and above 1, as published."""

    advantage: str
    clip: tuple[float, float]
    loss: LossMean  # the mean that was published with it
    sequence_ratio: bool = False  # one importance ratio a trajectory instead of one a token


OBJECTIVES: dict[ObjectiveName, Objective] = {
    "grpo": Objective("group", (0.2, 0.2), "sequence-mean"),
    "dapo": Objective("group", (0.2, 0.28), "token-mean"),
    "ppo": Objective("gae", (0.2, 0.2), "token-mean"),
    "reinforce++": Objective("returns", (0.2, 0.2), "token-mean"),
    "rloo": Objective("leave-one-out", (0.2, 0.2), "sequence-sum"),
    "gspo": Objective("group", (3e-4, 4e-4), "sequence-mean", sequence_ratio=True),
}
# Setting -> (its default, the objectives that read it). Setting it for another would do nothing, so it is refused.
USED_BY: dict[str, tuple[float | None, tuple[str, ...]]] = {
    "gamma": (1.0, ("ppo", "reinforce++")),
    "gae_lambda": (0.95, ("ppo",)),
    "value_clip": (0.2, ("ppo",)),
    "value_learning_rate": (None, ("ppo",)),
}


class ObjectiveSettings(Protocol):
    """The settings that the rules look at; see ``orchestrator.settings.trainer_settings``."""

    @property
    def objective(self) -> ObjectiveName: ...
    @property
    def loss(self) -> str | None: ...
    @property
    def kl_coefficient(self) -> float: ...
    @property
    def kl_estimator(self) -> str: ...
    @property
    def kl_in_reward(self) -> bool: ...
    @property
    def normalize_advantage(self) -> bool: ...
    @property
    def minibatches(self) -> int: ...
    @property
    def ratio_to(self) -> str: ...
    @property
    def dual_clip(self) -> float | None: ...
    @property
    def tis_mode(self) -> str: ...
    @property
    def tis_cap(self) -> float: ...
    @property
    def tis_floor(self) -> float: ...
    @property
    def lr_decay(self) -> str: ...
    @property
    def final_learning_rate(self) -> float | None: ...
    @property
    def stream(self) -> bool: ...
    @property
    def grad_offload(self) -> bool: ...


def setting_conflicts(trainer: ObjectiveSettings) -> list[tuple[str, str]]:
    """(setting, how to mend it) for each setting that contradicts another; the single values are known to be valid."""
    found = [*_kl_conflicts(trainer), *_loss_conflicts(trainer), *_stream_conflicts(trainer)]
    return found + _ratio_conflicts(trainer)


def whitens_advantages(trainer: ObjectiveSettings) -> bool:
    """Whether advantages are normalised over the whole batch, so that none is known before all trajectories are."""
    advantage = OBJECTIVES[trainer.objective].advantage
    return advantage == "returns" or (advantage == "gae" and trainer.normalize_advantage)


def _kl_conflicts(trainer: ObjectiveSettings) -> list[tuple[str, str]]:
    found = []
    if trainer.kl_in_reward:
        if OBJECTIVES[trainer.objective].advantage not in ("returns", "gae"):
            fix = f"needs rewards per token (ppo, reinforce++); with {trainer.objective} the KL belongs in the loss: false"
            found.append(("kl_in_reward", fix))
        if trainer.kl_coefficient == 0:
            found.append(("kl_in_reward", "needs trainer.kl_coefficient above 0"))
        if trainer.kl_estimator != "k1":
            found.append(("kl_estimator", "must be 'k1' with trainer.kl_in_reward"))
    elif trainer.kl_coefficient > 0 and trainer.kl_estimator == "k1":
        fix = "the gradient of k1 as a loss has the mean 0, so it pulls nowhere; use 'k2' or 'k3', or trainer.kl_in_reward"
        found.append(("kl_estimator", fix))
    return found


def _loss_conflicts(trainer: ObjectiveSettings) -> list[tuple[str, str]]:
    found = []
    if OBJECTIVES[trainer.objective].sequence_ratio and trainer.loss not in (None, "sequence-mean"):
        fix = f"{trainer.objective} is defined over whole sequences: leave it out, or 'sequence-mean'"
        found.append(("loss", fix))
    for name, (default, readers) in USED_BY.items():
        if trainer.objective not in readers and getattr(trainer, name) != default:
            found.append((name, f"is read by {' and '.join(readers)} only; leave it out with {trainer.objective}"))
    return found


def _ratio_conflicts(trainer: ObjectiveSettings) -> list[tuple[str, str]]:
    found = []
    if trainer.dual_clip is not None and trainer.minibatches == 1 and trainer.ratio_to == "trainer":
        fix = "bounds a ratio that is exactly 1 with one mini-batch: set trainer.ratio_to = 'rollout', or more mini-batches"
        found.append(("dual_clip", fix))
    if trainer.tis_mode != "mask":
        if trainer.tis_floor > 0:
            found.append(("tis_floor", "is read with trainer.tis_mode = 'mask' only; leave it out"))
        if trainer.ratio_to == "rollout" and trainer.tis_cap != TIS_CAP:
            fix = "weighs nothing where the ratio is to the rollout itself: leave it out, or set trainer.tis_mode = 'mask'"
            found.append(("tis_cap", fix))
    elif trainer.tis_floor >= trainer.tis_cap:
        found.append(("tis_floor", f"must be below trainer.tis_cap = {trainer.tis_cap:g}: no token would be left"))
    if trainer.lr_decay != "linear" and trainer.final_learning_rate is None:
        found.append(("lr_decay", "is the way to trainer.final_learning_rate: set that too, or leave this out"))
    return found


def _stream_conflicts(trainer: ObjectiveSettings) -> list[tuple[str, str]]:
    found = []
    if trainer.stream:
        if OBJECTIVES[trainer.objective].advantage == "returns":
            fix = (
                f"{trainer.objective} normalises over the whole batch, so nothing can be trained on before it is: false"
            )
            found.append(("stream", fix))
        elif whitens_advantages(trainer):
            fix = "must be false with trainer.stream: ppo would whiten advantages over a batch that is not there yet"
            found.append(("normalize_advantage", fix))
        if trainer.minibatches > 1:
            fix = "must be 1 with trainer.stream: mini-batches are drawn from the whole batch"
            found.append(("minibatches", fix))
    elif trainer.grad_offload:
        found.append(("grad_offload", "is for the pauses of a stream: set trainer.stream, or leave it out"))
    return found
