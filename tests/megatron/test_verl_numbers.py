"""The same numbers as a published library: verl's ``trainer/ppo/core_algos.py``, version 0.9.1 (Apache 2.0).

verl cannot be a dependency here (it pins other versions of transformers and tensordict than the engines need), so its
answers to the fixed cases below are kept in ``published_verl.json``. Where verl can be imported they are also computed anew
and must be the kept ones. To write the file again (Python 3.11, torch, transformers and ray being there):

    pip install --no-deps --target FOLDER verl==0.9.1 tensordict==0.10.0 pyvers orjson omegaconf==2.3.0 \
        antlr4-python3-runtime==4.9.3 hydra-core codetiming
    PYTHONPATH=FOLDER python tests/megatron/test_verl_numbers.py

Where the two differ on purpose: a group of one has no advantage here (there: its reward); no dual clip (there it can be
made to never bind); k3 is not clamped (there: the estimate at 10, which the cases do not reach).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from megatron_rlplugin.objective.advantages import TrajectoryOutcome, advantages_of  # noqa: E402
from megatron_rlplugin.objective.critic import ValueTokens, value_loss  # noqa: E402
from megatron_rlplugin.objective.policy_loss import (  # noqa: E402
    Coefficients,
    Tokens,
    kl_estimate,
    policy_loss,
    token_weights,
)
from orchestrator.settings.trainer_settings import TrainerSettings  # noqa: E402

KEPT = Path(__file__).parents[1] / "support" / "published_verl.json"
GROUPS = ["a", "a", "a", "b", "b", "b", "b"]
WIDTH, V = 9, 5
MEANS = {"token-mean": "token-mean", "sequence-mean": "seq-mean-token-mean", "sequence-sum": "seq-mean-token-sum"}
GAMMA, LAMBDA, BETA, CLIP, CAP = 0.93, 0.9, 0.2, (0.2, 0.28), 1.5
GSPO_CLIP = (0.05, 0.08)


def case() -> dict[str, np.ndarray]:
    """Seven rows: the policy's tokens in two turns with an environment's between them, then padding."""
    rng = np.random.default_rng(11)
    rows = len(GROUPS)
    mask = np.zeros((rows, WIDTH))
    for row in range(rows):
        first, gap, second = 1 + row % 3, row % 2 + 1, 1 + row % 4
        mask[row, :first] = 1
        mask[row, first + gap : first + gap + second] = 1
    logits, targets = rng.normal(size=(rows, WIDTH, V)), rng.integers(0, V, (rows, WIDTH))
    logp = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    old = np.take_along_axis(logp, targets[..., None], -1)[..., 0] + rng.normal(scale=0.3, size=(rows, WIDTH))
    rewards = np.zeros((rows, WIDTH))
    for row in range(rows):
        rewards[row, int(np.flatnonzero(mask[row])[-1])] = rng.normal()
    return {
        "mask": mask,
        "logits": logits,
        "targets": targets,
        "old": old,
        "rollout": old + rng.normal(scale=0.5, size=(rows, WIDTH)),
        "reference": old + rng.normal(scale=0.3, size=(rows, WIDTH)),
        "values": rng.normal(size=(rows, WIDTH)),
        "old_values": rng.normal(size=(rows, WIDTH)),
        "rewards": rewards,
        "advantages": rng.normal(size=(rows, 1)) * mask,
        "returns": rng.normal(size=(rows, WIDTH)),
    }


def verl_answers() -> dict[str, Any]:
    """verl's numbers for the case; lists over the policy's tokens, row after row."""
    from types import SimpleNamespace

    core = pytest.importorskip("verl.trainer.ppo.core_algos", reason="verl is not installed; its kept answers are used")
    from verl.workers.config import ActorConfig

    data = {name: torch.from_numpy(array) for name, array in case().items()}
    mask, index = data["mask"], np.array(GROUPS, dtype=object)

    def flat(matrix: Any) -> list[float]:
        return [float(value) for value in matrix[mask.bool()]]

    penalised = core.compute_rewards(data["rewards"], data["old"], data["reference"], BETA)
    plain = core.compute_grpo_outcome_advantage
    answers = {
        "grpo": flat(plain(data["rewards"].clone(), mask, index)[0]),
        "grpo without std": flat(plain(data["rewards"].clone(), mask, index, norm_adv_by_std_in_grpo=False)[0]),
        "rloo": flat(core.compute_rloo_outcome_advantage(data["rewards"].clone(), mask, index)[0]),
        "reinforce++": flat(
            core.compute_reinforce_plus_plus_outcome_advantage(penalised, mask, config=SimpleNamespace(gamma=GAMMA))[0]
        ),
    }
    advantages, returns = core.compute_gae_advantage_return(penalised, data["values"], mask, GAMMA, LAMBDA)
    answers |= {"gae": flat(advantages), "gae returns": flat(returns)}
    for name in ("k1", "k2", "k3"):
        answers[name] = flat(core.kl_penalty(data["old"], data["reference"], name))
    config = ActorConfig(
        strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, ppo_mini_batch_size=1,
        clip_ratio_low=CLIP[0], clip_ratio_high=CLIP[1], clip_ratio_c=1e9,
    )  # fmt: skip
    gspo = ActorConfig(
        strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, ppo_mini_batch_size=1,
        clip_ratio_low=GSPO_CLIP[0], clip_ratio_high=GSPO_CLIP[1],
    )  # fmt: skip
    weights = (data["old"] - data["rollout"]).exp().clamp(max=CAP)
    runs = [(f"clip {mean}", core.compute_policy_loss_vanilla, theirs, config) for mean, theirs in MEANS.items()]
    runs.append(("gspo", core.compute_policy_loss_gspo, MEANS["sequence-mean"], gspo))
    for name, function, mean, options in runs:
        logits = data["logits"].clone().requires_grad_()
        logp = torch.log_softmax(logits, -1).gather(-1, data["targets"][..., None])[..., 0]
        logp.retain_grad()
        loss, _ = function(data["old"], logp, data["advantages"], mask, mean, options, weights)
        loss.backward()
        answers[name] = float(loss.detach())
        answers[f"{name} gradient"] = flat(logp.grad)
    predicted = data["values"].clone().requires_grad_()
    loss, clipped = core.compute_value_loss(predicted, data["returns"], data["old_values"], mask, 0.5)
    loss.backward()
    return answers | {
        "value": float(loss.detach()),
        "value gradient": flat(predicted.grad),
        "value clipped": float(clipped),
    }


KNOWN: dict[str, Any] = json.loads(KEPT.read_text(encoding="utf-8")) if KEPT.exists() else {}


def rows_of(name: str) -> list[np.ndarray]:
    data = case()
    return [data[name][row][data["mask"][row] > 0] for row in range(len(GROUPS))]


def joined(name: str) -> Any:
    return torch.from_numpy(np.concatenate(rows_of(name)))


def outcomes() -> list[TrajectoryOutcome]:
    parts = zip(GROUPS, rows_of("rewards"), rows_of("old"), rows_of("reference"), rows_of("values"), strict=True)
    return [
        TrajectoryOutcome(group, float(rewards.sum()), np.ones(len(old), dtype=bool), old - reference, values)
        for group, rewards, old, reference, values in parts
    ]


def test_the_kept_answers_are_those_of_the_library() -> None:
    answers = verl_answers()
    assert answers.keys() == KNOWN.keys()
    for name, answer in answers.items():
        np.testing.assert_allclose(answer, KNOWN[name], rtol=1e-9, atol=1e-12, err_msg=name)


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("grpo", {"objective": "grpo"}),
        ("grpo without std", {"objective": "grpo", "normalize_advantage": False}),
        ("rloo", {"objective": "rloo"}),
        ("reinforce++", {"objective": "reinforce++", "gamma": GAMMA}),
        ("gae", {"objective": "ppo", "gamma": GAMMA, "gae_lambda": LAMBDA}),
    ],
)
def test_advantages_are_those_of_the_library(name: str, given: dict[str, Any]) -> None:
    if given["objective"] in ("ppo", "reinforce++"):
        given = {**given, "kl_coefficient": BETA, "kl_in_reward": True, "kl_estimator": "k1"}
    estimate = advantages_of(outcomes(), TrainerSettings(**given))
    np.testing.assert_allclose(np.concatenate(estimate.advantages), KNOWN[name], rtol=1e-5, atol=1e-6)
    if estimate.returns is not None:
        np.testing.assert_allclose(np.concatenate(estimate.returns), KNOWN["gae returns"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_estimates_are_those_of_the_library(estimator: str) -> None:
    found = kl_estimate(estimator, joined("old"), joined("reference"))
    np.testing.assert_allclose(found.numpy(), KNOWN[estimator], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", [*(f"clip {mean}" for mean in MEANS), "gspo"])
def test_losses_and_gradients_are_those_of_the_library(name: str) -> None:
    mean = "sequence-mean" if name == "gspo" else name.removeprefix("clip ")
    low, high = GSPO_CLIP if name == "gspo" else CLIP
    lengths = [len(row) for row in rows_of("old")]
    weighed = [token_weights(length, mean) for length in lengths]
    tokens = Tokens(
        targets_T=joined("targets"),
        rollout_T=joined("rollout"),
        advantages_T=joined("advantages"),
        weights_T=torch.from_numpy(np.concatenate([weights for weights, _ in weighed])).double(),
        fresh_T=torch.ones(sum(lengths), dtype=torch.bool),
        old_T=joined("old"),
        denominator=sum(added for _, added in weighed),
        segments_T=torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)),
    )
    leaf = joined("logits").requires_grad_()
    loss, totals = policy_loss(leaf, tokens, Coefficients(low, high, CAP, 0.0, sequence_ratio=name == "gspo"))
    loss.backward()
    assert 0 < totals.clipped < totals.tokens
    assert totals.metrics()["loss"] == pytest.approx(KNOWN[name], rel=1e-6)
    by_logp = torch.tensor(KNOWN[f"{name} gradient"], dtype=torch.float64)[:, None]
    p = torch.softmax(leaf.detach(), -1)
    expected = by_logp * (torch.nn.functional.one_hot(tokens.targets_T, V) - p)
    torch.testing.assert_close(leaf.grad / tokens.denominator, expected, rtol=1e-6, atol=1e-9)


def test_the_value_loss_and_its_gradient_are_those_of_the_library() -> None:
    count = len(joined("values"))
    leaf = joined("values").requires_grad_()
    tokens = ValueTokens(joined("returns"), joined("old_values"), torch.ones(count, dtype=torch.float64), count)
    loss, totals = value_loss(leaf, tokens, 0.5)
    loss.backward()
    metrics = totals.metrics()
    assert metrics["value_loss"] == pytest.approx(KNOWN["value"])
    assert metrics["value_clip_fraction"] == pytest.approx(KNOWN["value clipped"])
    np.testing.assert_allclose(leaf.grad.numpy() / count, KNOWN["value gradient"], rtol=1e-6, atol=1e-9)


if __name__ == "__main__":
    lines = [f" {json.dumps(name)}: {json.dumps(answer)}" for name, answer in verl_answers().items()]
    KEPT.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
