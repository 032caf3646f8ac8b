"""What holds a policy back, against formulas written apart from the code in plain torch: dual clip, masked importance weights,
the ratio to the rollout, cosine decay, percentiles of the drift; and that what would do nothing is refused."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core")

from megatron_rlplugin.objective import policy_loss as drifts  # noqa: E402
from megatron_rlplugin.objective.policy_loss import Coefficients, Tokens, Totals, policy_loss  # noqa: E402
from orchestrator.api import ConfigError  # noqa: E402
from orchestrator.config import parse_config  # noqa: E402
from orchestrator.settings.trainer_settings import TrainerSection, TrainerSettings  # noqa: E402

T, V = 400, 7
LOW, HIGH = 0.2, 0.28


@dataclasses.dataclass(frozen=True)
class Batch:
    """Random tokens whose ratios lie on both sides of every bound."""

    logits_TV: Any
    targets_T: Any
    old_T: Any
    rollout_T: Any
    advantages_T: Any

    @classmethod
    def drawn(cls, seed: int = 0) -> Batch:
        torch.manual_seed(seed)
        logits_TV, targets_T = torch.randn(T, V, dtype=torch.float64), torch.randint(V, (T,))
        now_T = logits_TV.log_softmax(-1)[torch.arange(T), targets_T]
        old_T = now_T + 0.7 * torch.randn(T, dtype=torch.float64)
        rollout_T = old_T + 0.7 * torch.randn(T, dtype=torch.float64)
        return cls(logits_TV.requires_grad_(), targets_T, old_T, rollout_T, torch.randn(T, dtype=torch.float64))

    def tokens(self, *, known: bool = True) -> Tokens:
        return Tokens(
            self.targets_T,
            self.rollout_T,
            self.advantages_T,
            torch.ones(T, dtype=torch.float64),
            torch.ones(T, dtype=torch.bool),
            self.old_T if known else None,
            T,
        )


def surrogate(batch: Batch, anchor_T: Any, weights_T: Any, dual: float | None = None) -> Any:
    """The mean over tokens, as it is printed: Schulman et al. 2017, eq. 7; Ye et al. 2020, eq. 5."""
    dist = torch.distributions.Categorical(logits=batch.logits_TV)
    ratio_T = torch.exp(dist.log_prob(batch.targets_T) - anchor_T)
    advantage_T = batch.advantages_T
    clip_T = torch.clip(ratio_T, 1 - LOW, 1 + HIGH)
    objective_T = torch.min(ratio_T * advantage_T, clip_T * advantage_T)
    if dual is not None:
        objective_T = torch.where(advantage_T < 0, torch.max(objective_T, dual * advantage_T), objective_T)
    return -(weights_T * objective_T).mean()


def settings(**given: object) -> TrainerSettings:
    return TrainerSettings.from_dict({"loss": "token-mean", "clip_low": LOW, "clip_high": HIGH, **given})


def check(batch: Batch, given: TrainerSettings, expected: Any, *, known: bool = True) -> Totals:
    (wanted,) = torch.autograd.grad(expected, batch.logits_TV)
    loss, totals = policy_loss(batch.logits_TV, batch.tokens(known=known), Coefficients.from_settings(given))
    (found,) = torch.autograd.grad(loss / T, batch.logits_TV)
    assert float(loss.detach()) / T == pytest.approx(float(expected.detach()), rel=1e-9)
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)
    return totals


def test_a_dual_clip_bounds_what_a_negative_advantage_may_pull() -> None:
    batch = Batch.drawn()
    weights_T = (batch.old_T - batch.rollout_T).exp().clamp(max=2.0)
    bounded = check(
        batch, settings(dual_clip=1.5, minibatches=2), surrogate(batch, batch.old_T, weights_T, 1.5)
    ).metrics()
    free = check(batch, settings(minibatches=2), surrogate(batch, batch.old_T, weights_T)).metrics()
    dist = torch.distributions.Categorical(logits=batch.logits_TV)
    ratio_T = torch.exp(dist.log_prob(batch.targets_T) - batch.old_T)
    beyond = float(((ratio_T > 1.5) & (batch.advantages_T < 0)).sum()) / T
    assert beyond > 0.05, "the bound acts"
    assert bounded["clip_fraction"] == pytest.approx(free["clip_fraction"] + beyond)


def test_masked_weights_leave_out_what_lies_outside_of_the_bounds() -> None:
    batch = Batch.drawn(1)
    ratio_T = (batch.old_T - batch.rollout_T).exp()
    inside_T = (ratio_T >= 0.5) & (ratio_T <= 1.6)
    assert 0.2 < float(inside_T.double().mean()) < 0.8
    given = settings(tis_mode="mask", tis_floor=0.5, tis_cap=1.6, minibatches=2)
    expected = surrogate(batch, batch.old_T, torch.where(inside_T, ratio_T, torch.zeros_like(ratio_T)))
    metrics = check(batch, given, expected).metrics()
    assert metrics["tis_capped"] == pytest.approx(1 - float(inside_T.double().mean()))
    assert metrics["tis_max"] <= 1.6


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_how_many_tokens_are_held_at_the_cap_is_told_of_the_ratio_that_is_held(level: str) -> None:
    """Of trajectories of 40 tokens whose log-ratios are small: their products lie beyond the cap where no token does."""
    batch = Batch.drawn(3)
    drift = 0.03 * np.random.default_rng(3).standard_normal((T // 40, 40)) + np.linspace(-0.1, 0.1, T // 40)[:, None]
    log_ratios = {"token": drift, "sequence": drift.sum(1), "geometric": drift.mean(1)}[level]
    ratios = np.broadcast_to(np.exp(log_ratios.reshape(T // 40, -1)), drift.shape)
    segments_T = torch.arange(T // 40).repeat_interleave(40)
    rollout_T = batch.old_T - torch.from_numpy(drift.reshape(-1))
    tokens = dataclasses.replace(batch.tokens(), rollout_T=rollout_T, segments_T=segments_T)
    given = settings(minibatches=2, tis_level=level, tis_cap=1.05 if level == "geometric" else 1.5)
    metrics = policy_loss(batch.logits_TV, tokens, Coefficients.from_settings(given))[1].metrics()
    assert metrics["tis_mean"] == pytest.approx(np.minimum(ratios, given.tis_cap).mean())
    assert metrics["tis_capped"] == pytest.approx((ratios >= given.tis_cap).mean())
    assert (metrics["tis_capped"] > 0.2) == (level != "token")


def test_the_ratio_to_the_rollout_is_clipped_also_with_one_mini_batch() -> None:
    batch = Batch.drawn(2)
    ones_T = torch.ones(T, dtype=torch.float64)
    expected = surrogate(batch, batch.rollout_T, ones_T, 3.0)
    metrics = check(batch, settings(ratio_to="rollout", dual_clip=3.0), expected, known=False).metrics()
    assert metrics["clip_fraction"] > 0.1
    assert (metrics["tis_mean"], metrics["ess"]) == (1.0, 1.0)
    now_T = torch.distributions.Categorical(logits=batch.logits_TV).log_prob(batch.targets_T)
    beyond = float(((now_T - batch.rollout_T).exp() >= 2.0).double().mean())
    assert metrics["tis_capped"] == pytest.approx(beyond), "no weight is used, and the distance is still told"
    assert beyond > 0.1
    assert metrics["approx_kl"] == 0.0, "pi is pi_old"
    assert metrics["tis_p99"] > 1.5, "and still differs from what sampled"
    to_itself = policy_loss(batch.logits_TV, batch.tokens(known=False), Coefficients.from_settings(settings()))[
        1
    ].metrics()
    assert to_itself["clip_fraction"] == 0.0, "why a ratio to pi_old cannot be clipped there"


def test_masking_and_the_ratio_to_the_rollout_go_together() -> None:
    batch = Batch.drawn(3)
    drift_T = batch.old_T - batch.rollout_T
    inside_T = ((drift_T >= math.log(0.5)) & (drift_T <= math.log(2.0))).double()
    given = settings(ratio_to="rollout", tis_mode="mask", tis_floor=0.5)
    check(batch, given, surrogate(batch, batch.rollout_T, inside_T))


@pytest.mark.parametrize(
    ("field", "given", "says"),
    [
        ("dual_clip", {"dual_clip": 1.0}, "more than 1"),
        ("ratio_to", {"ratio_to": "engine"}, "'trainer' or 'rollout'"),
        ("tis_mode", {"tis_mode": "drop"}, "'truncate' or 'mask'"),
        ("lr_decay", {"lr_decay": "step"}, "'linear' or 'cosine'"),
        ("tis_floor", {"tis_floor": -0.1}, "at least 0"),
        ("reference_samples", {"reference_samples": -1}, "at least 0"),
    ],
)
def test_a_value_that_cannot_be_is_refused_by_name(field: str, given: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=f"^trainer.{field} = .*{says}"):
        TrainerSection.from_dict(given)
    with pytest.raises(ConfigError, match=f"^trainer.{field} = .*{says}"):
        parse_config({"trainer": given})


@pytest.mark.parametrize(
    ("field", "given", "says"),
    [
        ("dual_clip", {"dual_clip": 3.0}, "exactly 1 with one mini-batch"),
        ("tis_floor", {"tis_floor": 0.5}, "tis_mode = 'mask' only"),
        ("tis_floor", {"tis_floor": 3.0, "tis_mode": "mask"}, "below trainer.tis_cap"),
        ("tis_cap", {"tis_cap": 4.0, "ratio_to": "rollout"}, "has no effect"),
        ("lr_decay", {"lr_decay": "cosine"}, "final_learning_rate"),
    ],
)
def test_what_would_do_nothing_is_refused_in_the_same_words_by_plugin_and_config(
    field: str, given: dict[str, object], says: str
) -> None:
    with pytest.raises(ConfigError, match=f"^trainer.{field} = .*{says}"):
        TrainerSection.from_dict(given)
    with pytest.raises(ConfigError, match=says):
        parse_config({"trainer": given})


def test_a_cosine_reaches_the_final_rate_at_the_runs_end() -> None:
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    given = settings(learning_rate=1e-3, final_learning_rate=1e-4, lr_decay="cosine")
    weight = torch.nn.Parameter(torch.zeros(1))
    schedule = OptimizerParamScheduler(
        torch.optim.SGD([weight], lr=given.learning_rate),
        init_lr=0.0,
        max_lr=given.learning_rate,
        min_lr=given.final_learning_rate,
        lr_warmup_steps=0,
        lr_decay_steps=100,
        lr_decay_style=given.lr_decay,
        start_wd=0.0,
        end_wd=0.0,
        wd_incr_steps=0,
        wd_incr_style="constant",
    )
    found = []
    for _ in range(100):
        schedule.step(1)
        found.append(schedule.optimizer.param_groups[0]["lr"])
    expected = [1e-4 + 0.5 * 9e-4 * (1 + math.cos(math.pi * step / 100)) for step in range(1, 101)]
    assert found == pytest.approx(expected)


@pytest.mark.parametrize("spread", [1e-3, 0.05, 1.5])
def test_percentiles_of_any_split_are_those_of_the_whole(spread: float) -> None:
    drift = np.random.default_rng(5).normal(scale=spread, size=20_000)
    parts = [drifts.drift_counts(torch.from_numpy(part)) for part in np.array_split(drift, 7)]
    added = tuple(float(sum(column)) for column in zip(*(part.tolist() for part in parts), strict=True))
    assert added == tuple(drifts.drift_counts(torch.from_numpy(drift)).tolist())
    found = drifts.drift_percentiles(added)
    for name, share in (("p01", 1), ("p50", 50), ("p99", 99)):
        exact = float(np.percentile(drift, share))
        assert math.log(found[name]) == pytest.approx(exact, rel=0.06, abs=6e-4)
    assert drifts.drift_percentiles(drifts.no_drifts()) == {}, "of no token there is none"


def test_a_drift_beyond_every_bin_is_counted_in_the_outermost() -> None:
    counted = drifts.drift_counts(torch.tensor([-1e9, 1e9, 0.0]))
    assert (counted[0], counted[-1], float(counted.sum())) == (1.0, 1.0, 3.0)
