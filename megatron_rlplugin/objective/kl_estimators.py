"""Estimators of KL(pi || pi_ref) from one token that pi sampled (J. Schulman, "Approximating KL divergence", 2020).

With d = log pi - log pi_ref of the sampled token:
    k1 = d                 unbiased, may be negative; as a loss its gradient has the mean 0 (it is the score function), so
                           it is used as a penalty inside the reward
    k2 = d^2 / 2           biased value; its gradient, d * grad log pi, is the gradient of the KL
    k3 = exp(-d) - 1 + d   unbiased and never negative (GRPO eq. 4); its gradient, (1 - exp(-d)) * grad log pi, agrees with
                           k2's to first order in d
The mean of each is a KL only over tokens that pi itself sampled; on tokens of older weights it is an approximation.
"""

from __future__ import annotations

from torch import Tensor


def kl_estimate(estimator: str, logp_T: Tensor, reference_T: Tensor) -> Tensor:
    """The estimate of each token; the gradient runs through ``logp_T`` only. Raises ValueError for an unknown name."""
    difference_T = logp_T - reference_T.detach()
    if estimator == "k1":
        return difference_T
    if estimator == "k2":
        return 0.5 * difference_T.square()
    if estimator == "k3":
        return (-difference_T).exp() - 1 + difference_T
    raise ValueError(f"unknown KL estimator {estimator!r}")
