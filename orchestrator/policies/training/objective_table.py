"""What each objective needs, and its published constants: one table.

``orchestrator.settings.trainer_settings`` reads it, for a run and for a training script, and reports contradictory settings.
The arithmetic is in the trainer: ``megatron_rlplugin.objective.policy_loss`` has the formulas and sources.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

ObjectiveName = Literal["grpo", "dapo", "ppo", "reinforce++", "rloo", "gspo", "cispo", "distillation"]
# How token losses are summed into one number. "token-mean": over the batch's tokens. "sequence-mean": mean over the tokens
# of a trajectory, then over trajectories. "sequence-sum": sum over the tokens of a trajectory, then mean over trajectories.
# "length-normalized": the same sum over a constant, trainer.loss_length (Dr. GRPO, Liu et al. 2025, as verl normalises it).
LossMean = Literal["token-mean", "sequence-mean", "sequence-sum", "length-normalized"]
KlEstimator = Literal["k1", "k2", "k3"]
# What the ratio of the clip is taken to. "trainer": pi_old, recomputed, with importance sampling between it and the rollout
# (decoupled PPO: Hilton et al. 2021). "rollout": the policy that sampled, at once.
RatioTo = Literal["trainer", "rollout"]
TisMode = Literal["truncate", "mask"]
# Of what the importance weight is: of a token; of its trajectory, the product of its tokens' ratios; their geometric mean.
TisLevel = Literal["token", "sequence", "geometric"]
LrDecay = Literal["linear", "cosine"]
TIS_CAP = 2.0  # the default


@dataclass(frozen=True, slots=True)
class Objective:
    """``advantage``: "group", "leave-one-out", "returns", "gae" or "reference". ``clip``: below and above 1, as published."""

    advantage: str
    clip: tuple[float, float]
    loss: LossMean  # the mean that was published with it
    sequence_ratio: bool = False  # one importance ratio a trajectory instead of one a token
    clips_weight: bool = (
        False  # the ratio is a clipped constant before grad log pi, so that no token loses its gradient
    )


OBJECTIVES: dict[ObjectiveName, Objective] = {
    "grpo": Objective("group", (0.2, 0.2), "sequence-mean"),
    "dapo": Objective("group", (0.2, 0.28), "token-mean"),
    "ppo": Objective("gae", (0.2, 0.2), "token-mean"),
    "reinforce++": Objective("returns", (0.2, 0.2), "token-mean"),
    "rloo": Objective("leave-one-out", (0.2, 0.2), "sequence-sum"),
    "gspo": Objective("group", (3e-4, 4e-4), "sequence-mean", sequence_ratio=True),
    "cispo": Objective("group", (1.0, 4.0), "token-mean", clips_weight=True),
    "distillation": Objective("reference", (0.2, 0.2), "token-mean"),
}
# Setting -> (its default, the objectives that read it). Setting it for another would do nothing, so it is refused.
USED_BY: dict[str, tuple[float | None, tuple[str, ...]]] = {
    "gamma": (1.0, ("ppo", "reinforce++")),
    "gae_lambda": (0.95, ("ppo",)),
    "value_clip": (0.2, ("ppo",)),
    "value_learning_rate": (None, ("ppo",)),
    "normalize_advantage": (True, ("grpo", "dapo", "gspo", "cispo", "ppo")),
}


def whitens_advantages(objective: ObjectiveName, *, normalize: bool) -> bool:
    """Whether advantages are normalised over the whole batch, so that none is known before all trajectories are.
    ``normalize``: ``trainer.normalize_advantage``."""
    advantage = OBJECTIVES[objective].advantage
    return advantage == "returns" or (advantage == "gae" and normalize)
