"""A trajectory's weight multiplies its terms in the loss, is in no denominator, and at 1 changes no bit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from megatron_rlplugin.objective.policy_loss import Coefficients, policy_loss, token_weights
from megatron_rlplugin.trainer.micro_batches import MicroBatchLimits, micro_batch, row_of, usable_samples
from orchestrator.api import RunError, TrainSample

VOCABULARY = 16
COEFFICIENTS = Coefficients(0.2, 0.2, 2.0, 0.0)


def sample(number: int, weight: float = 1.0) -> TrainSample:
    generated = 3 + number
    mask = (0, 0, *(1,) * generated)
    tokens = tuple((7 * index + number) % VOCABULARY for index in range(len(mask)))
    logprobs = tuple(-2.5 - 0.1 * index if own else 0.0 for index, own in enumerate(mask))
    return TrainSample(f"t{number}", "g", tokens, mask, logprobs, ((0, generated),), float(number % 2), weight=weight)


def batch_of(weights: Sequence[float], loss: str, *, idle: bool = False, pack: int | None = None) -> Any:
    samples = [sample(number, weight) for number, weight in enumerate(weights)]
    rows = [row_of(one, 0) for one in samples]
    rows = [replace(row, advantages=np.full_like(row.advantages, 1.0 - 2.0 * row.reward)) for row in rows]
    return micro_batch(rows, range(len(rows)), MicroBatchLimits(8, pack_tokens=pack), loss, idle=idle)


def loss_of(weights: Sequence[float], loss: str, pack: int | None = None) -> tuple[torch.Tensor, torch.Tensor, float]:
    batch = batch_of(weights, loss, pack=pack)
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(len(batch.tokens.targets_T), VOCABULARY, generator=generator).requires_grad_()
    total, _ = policy_loss(logits, batch.tokens, COEFFICIENTS)
    total.backward()
    assert logits.grad is not None
    return total.detach(), logits.grad, batch.tokens.denominator


@pytest.mark.parametrize("loss", ["token-mean", "sequence-mean", "sequence-sum"])
@pytest.mark.parametrize("pack", [None, 64])
def test_weights_of_one_are_bit_for_bit_the_loss_without_weights(loss: str, pack: int | None) -> None:
    plain = np.concatenate([token_weights(3 + number, loss)[0] for number in range(3)])
    batch = batch_of([1.0] * 3, loss, pack=pack)
    assert batch.tokens.weights_T.dtype == torch.float32
    assert batch.tokens.weights_T.numpy().tobytes() == plain.tobytes()
    idle = batch_of([1.0] * 3, loss, idle=True, pack=pack)
    assert not idle.tokens.weights_T.any()
    assert idle.tokens.denominator == 0


@pytest.mark.parametrize("loss", ["token-mean", "sequence-mean", "sequence-sum"])
def test_a_weight_scales_its_own_trajectory_and_no_other(loss: str) -> None:
    _, whole, denominator = loss_of([1.0, 1.0, 1.0], loss)
    _, weighed, same = loss_of([1.0, 0.25, 0.0], loss)
    parts = zip(whole.split([3, 4, 5]), weighed.split([3, 4, 5]), (1.0, 0.25, 0.0), strict=True)
    for before, after, weight in parts:
        torch.testing.assert_close(after, weight * before)
        assert before.abs().sum() > 0
    assert same == denominator


@pytest.mark.parametrize("weight", [float("nan"), float("inf"), -0.5])
def test_a_weight_that_is_no_weight_stops_the_run(weight: float) -> None:
    with pytest.raises(RunError, match="its weight in the loss"):
        usable_samples([sample(0, weight)], VOCABULARY, 64)
