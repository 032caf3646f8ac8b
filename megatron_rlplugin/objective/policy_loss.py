"""The objectives as pure functions of a token's log-probs, its weight in the loss, and the denominators: no state, no engine,
no randomness.

Guarantees: a loss is a SUM with its denominator, so that any split into micro-batches adds up to the same gradient (of
whole trajectories for gspo, of any tokens for the others); nothing but the current policy's log-probs (and the entropy
bonus) carries a gradient. Log-probs are those of the sampling distribution, that is after the temperature, as the rollout
reports them. A token that does not count (:func:`kept_tokens`) has no weight and is in no denominator; weights
and denominator of a trajectory depend on nothing but itself (:func:`token_weights`), so a micro-batch concatenates weights
and adds denominators, and any split of a batch over micro-batches and replicas gives the same sum over the same divisor.

With r_t = pi(t) / pi_old(t), A_t the advantage and w_t = min(pi_old(t) / pi_rollout(t), ``tis_cap``), a constant:

    L = SUM_t weight_t * ( w_t * -min(r_t A_t, clip(r_t, 1 - low, 1 + high) A_t) + kl_coefficient * KL_t - entropy bonus )
        / SUM of denominators

    objective    advantage A_t                              ratio r_t      clip           mean            critic  reference
    grpo         (R - mean of group) / std of group         token          0.2 / 0.2      sequence-mean   no      loss
    dapo         as grpo; groups with equal rewards left    token          0.2 / 0.28     token-mean      no      loss
                 out (dynamic sampling)
    ppo          GAE(gamma, lambda), whitened               token          0.2 / 0.2      token-mean      yes     loss or reward
    reinforce++  discounted return, whitened                token          0.2 / 0.2      token-mean      no      loss or reward
    rloo         R - mean of the others in the group        token          0.2 / 0.2      sequence-sum    no      loss
    gspo         as grpo                                    sequence       3e-4 / 4e-4    sequence-mean   no      loss
    cispo        as grpo                                    token, below   - / 4          token-mean      no      loss
    distillation log pi_ref(t) - log pi_old(t), no reward   token          0.2 / 0.2      token-mean      no      always

cispo's token loss is -w_t sg(clip(r_t, 1 - low, 1 + high)) A_t log pi(t): the ratio is a constant, so a clipped token keeps its
gradient. distillation is the policy gradient of the reverse KL to the reference, token by token: no token is paid for later ones.

``reference``: where the KL to the reference goes when ``kl_coefficient`` is above 0 (no reference is needed at 0). In the
loss it is the estimator k2 or k3 (:func:`kl_estimate`); in the reward it is k1, subtracted
from each token's reward. ``clip``, ``mean`` and (grpo, dapo, gspo, ppo) the normalisation can be set; gspo's mean
cannot. gspo's ratio is exp(mean over the trajectory's tokens of log r_t), with the gradient of GSPO 4.1 eq. 5 in the
token form of 4.3, so that w_t stays per token.

Settings change how far a token may pull. ``tis_level``: the bounds hold the product of the ratios of a token's trajectory
("sequence"), or their geometric mean. ``opsm_delta``: a trajectory weighs 0 where A_t < 0 and the mean over its tokens of log
pi_rollout - log pi is above it. ``dual_clip`` c: where A_t < 0 a token's surrogate is at least c A_t (Ye et
al. 2020, eq. 5). ``tis_mode`` "mask": w_t is pi_old / pi_rollout itself where that lies within [``tis_floor``, ``tis_cap``], and
0 elsewhere (IcePop, Ling Team 2025; a token that is left out keeps its place in the denominator, so a batch that is masked
more is not trained harder). ``ratio_to`` "rollout": r_t = pi(t) / pi_rollout(t) and w_t = 1 (0 where it is masked), so that the
clip bounds what staleness and the engine's arithmetic did, too; with one mini-batch a step it is the only way for the clip to
act at all, since pi is pi_old there.

Sources: GRPO: DeepSeekMath (2024) eq. 3 and 4, without std Dr. GRPO (2025). DAPO (2025) eq. 8, 3.1 (clip-higher), 3.2
(dynamic sampling), 3.3 (token-level mean). PPO: Schulman et al. (2017) eq. 7; GAE (2016). REINFORCE++: Hu et al. (2025).
RLOO: Ahmadian et al. (2024) 3.2, here with PPO's clip for more than one optimizer step a batch. GSPO: Zheng et al. (2025).
CISPO: MiniMax-M1 (2025) eq. 4 and 5, no lower bound; the upper one as ScaleRL (Khatri et al. 2025) found any of 4 to 8 to do.
OPSM: DeepSeek-V3.2 (2025) 3.1. Distillation on the student's own tokens: Gu et al. (2024), Agarwal et al. (2024).
Truncated importance sampling between the rollout's and the trainer's policy of the same weights: RollArt 6.2.

Shapes: ``_T`` counted policy tokens of a micro-batch one after the other, ``_TV`` tokens by vocabulary (this rank's part).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import accumulate
from typing import Any, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_rlplugin.objective.vocab_logprobs import OutputRows, logprobs_and_entropy
from orchestrator.api import VersionSpans
from orchestrator.policies.training.objective_table import OBJECTIVES, LossMean
from orchestrator.settings.trainer_settings import TrainerSettings

DriftCounts = tuple[float, ...]

_SCALE = 0.01  # a bin is 0.1 wide in asinh(d / this): linear below it, logarithmic above
_WIDTH = 0.1
_HALF = math.ceil(math.asinh(20.0 / _SCALE) / _WIDTH)  # bins on each side of the one around 0
BINS = 2 * _HALF + 1
PERCENTILES = {"p01": 0.01, "p50": 0.5, "p99": 0.99}


def kept_tokens(spans: VersionSpans, version: int, max_token_lag: int | None) -> NDArray[np.bool_]:
    """bool[T]: made by weights at most ``max_token_lag`` versions older than ``version`` (None: all are kept)."""
    kept = [max_token_lag is None or version - made <= max_token_lag for made, _ in spans]
    return np.repeat(np.asarray(kept, dtype=np.bool_), [count for _, count in spans])


def token_weights(kept: int, loss: str) -> tuple[NDArray[np.float32], int]:
    """(weights[kept], denominator) of a trajectory with ``kept`` tokens that count.

    "token-mean": weight 1, one a token. "sequence-mean": weight 1 / kept, one a trajectory. "sequence-sum": weight 1, one
    a trajectory; "length-normalized" is that with ``Coefficients.loss_scale``. A trajectory without a counted token adds
    nothing to either.
    """
    if loss not in get_args(LossMean):
        raise ValueError(f"unknown loss mean {loss!r}")
    weight = 1.0 / max(kept, 1) if loss == "sequence-mean" else 1.0
    return np.full(kept, weight, dtype=np.float32), kept if loss == "token-mean" else min(kept, 1)


def kl_estimate(estimator: str, logp_T: Tensor, reference_T: Tensor) -> Tensor:
    """The estimate of each token of KL(pi || pi_ref), from one token that pi sampled (J. Schulman, "Approximating KL
    divergence", 2020); the gradient runs through ``logp_T`` only. Raises ValueError for an unknown name.

    With d = log pi - log pi_ref of the sampled token:
        k1 = d                 unbiased, may be negative; as a loss its gradient has the mean 0 (it is the score function), so
                               it is used as a penalty inside the reward
        k2 = d^2 / 2           biased value; its gradient, d * grad log pi, is the gradient of the KL
        k3 = exp(-d) - 1 + d   unbiased and never negative (GRPO eq. 4); its gradient, (1 - exp(-d)) * grad log pi, agrees with
                               k2's to first order in d
    The mean of each is a KL only over tokens that pi itself sampled; on tokens of older weights it is an approximation.
    """
    difference_T = logp_T - reference_T.detach()
    if estimator == "k1":
        return difference_T
    if estimator == "k2":
        return 0.5 * difference_T.square()
    if estimator == "k3":
        return (-difference_T).exp() - 1 + difference_T
    raise ValueError(f"unknown KL estimator {estimator!r}")


def no_drifts() -> DriftCounts:
    """Of no token."""
    return (0.0,) * BINS


def drift_counts(drift_T: Tensor) -> Tensor:
    """float64[BINS] on the device of ``drift_T``: how far trainer and rollout differ, d = log pi_old - log pi_rollout.

    Counts of any split into micro-batches and replicas add up to those of the whole.
    """
    place_T = torch.asinh(drift_T.double() / _SCALE).div_(_WIDTH).round_().clamp_(-_HALF, _HALF)
    return torch.bincount(place_T.long() + _HALF, minlength=BINS).double()


def drift_percentiles(counted: Sequence[float]) -> dict[str, float]:
    """The percentiles of pi_old / pi_rollout of a whole step, before any cap; none of no token.

    Each is that of the definition (the smallest value that at least so many of a hundred do not exceed), to within the
    bin: a log-ratio d is known to 0.0005 near 0 and to a twentieth of itself far from it. Drifts beyond 20 are in the
    outermost bins.
    """
    total = math.fsum(counted)
    found: dict[str, float] = {}
    for name, share in PERCENTILES.items() if total else ():
        place = next(
            (index for index, seen in enumerate(accumulate(counted)) if seen >= share * total), len(counted) - 1
        )
        found[name] = math.exp(_SCALE * math.sinh((place - _HALF) * _WIDTH))
    return found


@dataclass(frozen=True, slots=True)
class Tokens:
    """What is known of the counted policy tokens of a micro-batch before the forward pass."""

    targets_T: Tensor
    rollout_T: Tensor  # log-probs reported by the rollout
    advantages_T: Tensor
    weights_T: Tensor  # of each token in the loss, see token_weights
    fresh_T: Tensor  # bool: made by the version that is being trained
    old_T: Tensor | None  # log-probs when the step began; None: they are the current ones (first optimizer step)
    denominator: int  # what this micro-batch adds to the loss's divisor: tokens, or trajectories
    segments_T: Tensor | None = None  # int64: which trajectory of the micro-batch it belongs to; for sequence ratios
    reference_T: Tensor | None = None  # log-probs under the reference weights
    masked: int = 0  # policy tokens of these trajectories that do not count and are not here


@dataclass(frozen=True, slots=True)
class Coefficients:
    """The constants of the loss; see ``orchestrator.settings.trainer_settings``."""

    clip_low: float
    clip_high: float
    tis_cap: float
    entropy_coefficient: float
    kl_coefficient: float = 0.0  # of the KL in the loss
    kl_estimator: str = "k3"
    sequence_ratio: bool = False
    dual_clip: float | None = None
    tis_floor: float | None = None  # None: truncate at the cap; a number: leave out what is below it or above the cap
    to_rollout: bool = False  # the ratio is to what sampled
    tis_level: str = "token"
    opsm_delta: float | None = None
    clips_weight: bool = False
    distils: bool = False  # advantages are those of the reference
    loss_scale: float = 1.0  # of the whole loss

    @classmethod
    def from_settings(cls, settings: TrainerSettings) -> Coefficients:
        """Those of ``settings.objective``. A KL inside the reward is not one of the loss."""
        low, high = settings.clip_range
        objective = OBJECTIVES[settings.objective]
        return cls(
            clip_low=low,
            clip_high=high,
            tis_cap=settings.tis_cap,
            entropy_coefficient=settings.entropy_coefficient,
            kl_coefficient=0.0 if settings.kl_in_reward else settings.kl_coefficient,
            kl_estimator=settings.kl_estimator,
            sequence_ratio=objective.sequence_ratio,
            dual_clip=settings.dual_clip,
            tis_floor=settings.tis_floor if settings.tis_mode == "mask" else None,
            to_rollout=settings.ratio_to == "rollout",
            tis_level=settings.tis_level,
            opsm_delta=settings.opsm_delta,
            clips_weight=objective.clips_weight,
            distils=objective.advantage == "reference",
            loss_scale=1.0 / (settings.loss_length or 1),
        )


# The seam of objectives: (log-probs of the policy's tokens, what is known of them, the settings) -> (the loss of each token
# before weights, means and denominators; what is reported of each token, by name). "clipped" and "tis" are the names of ours.
TokenLossFunction = Callable[[Tensor, Tokens, Coefficients], tuple[Tensor, Mapping[str, Tensor]]]


@dataclass(slots=True)
class Totals:
    """Sums over tokens (maxima where the name says so) that add up over micro-batches."""

    loss: float = 0.0
    denominator: float = 0.0
    tokens: float = 0.0
    masked: float = 0.0
    entropy: float = 0.0
    clipped: float = 0.0
    kl: float = 0.0  # estimator k3 of KL(pi_old || pi)
    rollout_kl: float = 0.0  # the same of KL(pi_rollout || pi_old)
    reference_kl: float = 0.0  # the same of KL(pi || pi_ref)
    reference_tokens: float = 0.0
    tis: float = 0.0
    tis_squared: float = 0.0
    tis_max: float = 0.0
    tis_capped: float = (
        0.0  # tokens whose ratio, or its trajectory's, reaches the cap (used or not), or that are left out
    )
    drifts: DriftCounts = field(default_factory=no_drifts)  # log pi_old - log pi_rollout of each token, by bin
    gap: float = 0.0
    fresh_tokens: float = 0.0
    gap_max: float = 0.0
    gap_all: float = 0.0
    inputs: float = 0.0  # tokens that were computed, prompts too, where routing is replayed
    replayed: float = 0.0  # of them, those by the experts that the rollout chose
    ahead_loss: float = 0.0  # cross-entropy of heads that predict several tokens
    ahead_tokens: float = 0.0
    own: tuple[float, ...] = ()  # what a user's loss reports, in the order of its names

    def add(self, other: Totals) -> None:
        """Take in another micro-batch."""
        for each in fields(self):
            mine, theirs = getattr(self, each.name), getattr(other, each.name)
            if isinstance(mine, tuple) and not (mine and theirs):
                value = mine or theirs
            elif isinstance(mine, tuple):
                value = tuple(a + b for a, b in zip(mine, theirs, strict=True))
            else:
                value = max(mine, theirs) if each.name.endswith("_max") else mine + theirs
            setattr(self, each.name, value)

    def metrics(self) -> dict[str, float]:
        """The scalars that a step reports. ``ess`` is (sum w)^2 / (n sum w^2) of the weights used: 1 is all equal."""
        tokens = max(self.tokens, 1.0)
        values = {
            "loss": self.loss / max(self.denominator, 1.0),
            "entropy": self.entropy / tokens,
            "clip_fraction": self.clipped / tokens,
            "approx_kl": self.kl / tokens,
            "rollout_kl": self.rollout_kl / tokens,
            "tis_mean": self.tis / tokens,
            "tis_max": self.tis_max,
            "tis_capped": self.tis_capped / tokens,
            "ess": self.tis**2 / (tokens * self.tis_squared) if self.tis_squared else 0.0,
            **{f"tis_{name}": value for name, value in drift_percentiles(self.drifts).items()},
            "logprob_gap_mean": self.gap / max(self.fresh_tokens, 1.0),
            "logprob_gap_max": self.gap_max,
            "logprob_gap_tokens": self.fresh_tokens,
            "logprob_gap_all": self.gap_all / tokens,
            "tokens": self.tokens,
            "masked_tokens": self.masked,
        }
        if self.reference_tokens:
            values["reference_kl"] = self.reference_kl / self.reference_tokens
        if self.inputs:
            values["routing_replayed"] = self.replayed / self.inputs
        if self.ahead_tokens:
            values["mtp_loss"] = self.ahead_loss / self.ahead_tokens
        return values


def truncated_weights(old_T: Tensor, rollout_T: Tensor, cap: float) -> Tensor:
    """min(pi_old / pi_rollout, cap), a constant to the gradient."""
    return (old_T - rollout_T).detach().exp().clamp(max=cap)


def masked_weights(old_T: Tensor, rollout_T: Tensor, floor: float, cap: float) -> Tensor:
    """pi_old / pi_rollout where it lies within [floor, cap], else 0; a constant to the gradient."""
    weights_T = (old_T - rollout_T).detach().exp()
    return torch.where((weights_T >= floor) & (weights_T <= cap), weights_T, 0.0)


def over_trajectories(values_T: Tensor, segments_T: Tensor | None, *, mean: bool) -> Tensor:
    """The sum, or the mean, over each token's trajectory. Raises ValueError without ``segments_T``."""
    if segments_T is None:
        raise ValueError("what is of a whole trajectory needs segments_T")
    count = int(segments_T.max()) + 1 if len(segments_T) else 0
    total_N = values_T.new_zeros(count).index_add_(0, segments_T, values_T)
    if mean:
        total_N = total_N / values_T.new_zeros(count).index_add_(0, segments_T, torch.ones_like(values_T))
    return total_N[segments_T]


def sequence_log_ratios(logp_T: Tensor, old_T: Tensor, segments_T: Tensor) -> Tensor:
    """GSPO: the mean over a trajectory of log pi - log pi_old, the same for each of its tokens.

    Its gradient is that of the token's own log-prob (GSPO 4.3): with the weight 1 / length on each token, and the same
    advantage, the sum over a trajectory has value and gradient of the sequence-level objective (GSPO 4.1).
    """
    return over_trajectories((logp_T - old_T).detach(), segments_T, mean=True) + (logp_T - logp_T.detach())


def clipped_surrogate(
    log_ratio_T: Tensor, advantages_T: Tensor, *, clip_low: float, clip_high: float, dual_clip: float | None = None
) -> tuple[Tensor, Tensor]:
    """(the loss of each token, whether the clip removed its gradient)."""
    ratio_T = log_ratio_T.exp()
    plain_T = ratio_T * advantages_T
    clipped_T = ratio_T.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages_T
    least_T, removed_T = torch.minimum(plain_T, clipped_T), clipped_T < plain_T
    if dual_clip is not None:
        bound_T = dual_clip * advantages_T
        beyond_T = (advantages_T < 0) & (least_T < bound_T)
        least_T, removed_T = torch.where(beyond_T, bound_T, least_T), removed_T | beyond_T
    return -least_T, removed_T.detach()


def objective_loss(logp_T: Tensor, tokens: Tokens, coefficients: Coefficients) -> tuple[Tensor, Mapping[str, Tensor]]:
    """The objectives of this module, as a :data:`TokenLossFunction`. Raises ValueError when the coefficients need what
    ``tokens`` does not have."""
    old_T = logp_T.detach() if tokens.old_T is None else tokens.old_T.detach()
    tis_T = _importance(old_T, tokens, coefficients)
    anchor_T = tokens.rollout_T if coefficients.to_rollout else old_T
    log_ratio_T = logp_T - anchor_T
    if coefficients.sequence_ratio:
        if tokens.segments_T is None:
            raise ValueError("a sequence ratio needs segments_T")
        log_ratio_T = sequence_log_ratios(logp_T, anchor_T, tokens.segments_T)
    advantages_T = tokens.advantages_T
    if coefficients.distils:
        if tokens.reference_T is None:
            raise ValueError("distillation needs reference_T")
        advantages_T = tokens.reference_T.detach() - old_T
    low, high = coefficients.clip_low, coefficients.clip_high
    if coefficients.clips_weight:
        ratio_T = log_ratio_T.detach().exp()
        clipped_T = (ratio_T < 1.0 - low) | (ratio_T > 1.0 + high)
        surrogate_T = -ratio_T.clamp(1.0 - low, 1.0 + high) * advantages_T * logp_T
    else:
        surrogate_T, clipped_T = clipped_surrogate(
            log_ratio_T, advantages_T, clip_low=low, clip_high=high, dual_clip=coefficients.dual_clip
        )
    if coefficients.opsm_delta is not None:
        left_T = over_trajectories((tokens.rollout_T - logp_T).detach(), tokens.segments_T, mean=True)
        tis_T = torch.where((advantages_T < 0) & (left_T > coefficients.opsm_delta), 0.0, tis_T)
    return surrogate_T * tis_T, {"clipped": clipped_T, "tis": tis_T}


def policy_loss(
    logits_TV: Tensor | OutputRows,
    tokens: Tokens,
    coefficients: Coefficients,
    temperature: float = 1.0,
    group: Any = None,
    function: TokenLossFunction = objective_loss,
) -> tuple[Tensor, Totals]:
    """The SUM of the loss over a micro-batch, to be divided by the sum of the denominators, and its diagnostics.

    ``function`` makes the token losses; the KL to the reference and the entropy bonus are added here.
    ``group``: the tensor-parallel group when ``logits_TV`` is this rank's part of the vocabulary; loss and diagnostics are
    then the same on all its ranks. Tokens with the denominator 0 weigh nothing (a micro-batch computed only to stay in step
    with other ranks) and are in no diagnostic. Raises ValueError when the coefficients need what ``tokens`` does not have.
    """
    bonus = coefficients.entropy_coefficient
    logp_T, entropy_T = logprobs_and_entropy(
        logits_TV, tokens.targets_T, temperature, entropy_gradient=bonus > 0, group=group
    )
    loss_T, said = function(logp_T, tokens, coefficients)
    if coefficients.kl_coefficient > 0:
        if tokens.reference_T is None:
            raise ValueError("a KL in the loss needs reference_T")
        kl_T = kl_estimate(coefficients.kl_estimator, logp_T, tokens.reference_T)
        loss_T = loss_T + coefficients.kl_coefficient * kl_T
    if bonus > 0:
        loss_T = loss_T - bonus * entropy_T
    loss = (loss_T * tokens.weights_T).sum()
    if coefficients.loss_scale != 1.0:
        loss = loss * coefficients.loss_scale
    if len(logp_T) and not tokens.denominator:
        return loss, Totals()
    old_T = logp_T.detach() if tokens.old_T is None else tokens.old_T.detach()
    totals = _totals(logp_T.detach(), entropy_T.detach(), old_T, said, tokens, coefficients)
    totals.loss, totals.denominator, totals.masked = (
        float(loss.detach()),
        float(tokens.denominator),
        float(tokens.masked),
    )
    return loss, totals


def _importance(old_T: Tensor, tokens: Tokens, coefficients: Coefficients) -> Tensor:
    """The weight w_t of each token."""
    cap, floor, rollout_T = coefficients.tis_cap, coefficients.tis_floor, tokens.rollout_T
    if coefficients.tis_level != "token":
        old_T, rollout_T = _bounded(old_T - rollout_T, tokens, coefficients), torch.zeros_like(rollout_T)
    if floor is None:
        return torch.ones_like(old_T) if coefficients.to_rollout else truncated_weights(old_T, rollout_T, cap)
    weights_T = masked_weights(old_T, rollout_T, floor, cap)
    return (weights_T > 0).to(weights_T.dtype) if coefficients.to_rollout else weights_T


def _bounded(drift_T: Tensor, tokens: Tokens, coefficients: Coefficients) -> Tensor:
    """The log-ratio that the bounds hold, of each token's own or of its trajectory's."""
    if coefficients.tis_level == "token":
        return drift_T
    return over_trajectories(drift_T, tokens.segments_T, mean=coefficients.tis_level == "geometric")


def _totals(
    logp_T: Tensor,
    entropy_T: Tensor,
    old_T: Tensor,
    said: Mapping[str, Tensor],
    tokens: Tokens,
    coefficients: Coefficients,
) -> Totals:
    """The diagnostics of a micro-batch: fp64 sums, read from the device once."""
    tis_T, clipped_T = said.get("tis", torch.ones_like(old_T)), said.get("clipped", torch.zeros_like(old_T))
    own = [said[name] for name in sorted(said.keys() - {"tis", "clipped"})]
    count = logp_T.numel()
    if not count:
        return Totals()
    drift_T = old_T - tokens.rollout_T
    gap_T, outside_T = drift_T.abs(), tis_T == 0
    if coefficients.tis_floor is None:
        outside_T = outside_T | (_bounded(drift_T, tokens, coefficients).exp() >= coefficients.tis_cap)
    fresh_T = gap_T * tokens.fresh_T
    added = {
        "entropy": entropy_T,
        "clipped": clipped_T,
        "kl": kl_estimate("k3", old_T, logp_T),
        "rollout_kl": kl_estimate("k3", tokens.rollout_T, old_T),
        "tis": tis_T,
        "tis_squared": tis_T.square(),
        "tis_capped": outside_T,
        "gap": fresh_T,
        "fresh_tokens": tokens.fresh_T,
        "gap_all": gap_T,
    }
    if tokens.reference_T is not None:
        added["reference_kl"] = kl_estimate("k3", logp_T, tokens.reference_T)
        added["reference_tokens"] = torch.ones_like(logp_T)
    largest = {"tis_max": tis_T, "gap_max": fresh_T}
    scalars = [value_T.detach().sum(dtype=torch.float64) for value_T in (*own, *added.values())]
    scalars += [value_T.max().double() for value_T in largest.values()]
    read = torch.cat([torch.stack(scalars), drift_counts(drift_T)]).tolist()
    values = dict(zip([*added, *largest], read[len(own) : len(scalars)], strict=True))
    drifts = tuple(read[len(scalars) :])
    return Totals(tokens=float(count), drifts=drifts, own=tuple(read[: len(own)]), **values)
