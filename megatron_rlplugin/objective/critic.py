"""PPO's critic: a value head on Megatron's ``GPTModel``, its clipped loss, and the explained variance.

The critic is a model of its own, of the policy's shape and with the policy's first weights, whose output layer gives one
number a position. Guarantees: the head starts at 0, so that it is the same on every replica without a draw; values are
fp32; a loss comes as a SUM with its denominator, as the policy's; nothing of stock Megatron is patched.

The value of a policy token is read where its logits would be, see ``megatron_rlplugin.objective.advantages``. Source:
PPO's public implementations (clipped value loss: Schulman et al., baselines ``ppo2``; explained variance: 1 - Var(R -
V) / Var(R)).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from megatron_rlplugin.model import unwrap


class ValueHead(torch.nn.Module):  # type: ignore[misc]  # torch is not type-checked here
    """Stands where ``GPTModel.output_layer`` stood: hidden states [s, b, h] -> ([s, b, 1] fp32, None).

    The same on every tensor-parallel rank. With sequence parallelism the input is this rank's part of the sequence: the
    values are gathered, and Megatron adds up the parameters' gradients over the ranks, as it does for a norm's.
    """

    def __init__(self, hidden_size: int, *, like: Tensor, sequence_parallel: bool) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1, hidden_size, dtype=like.dtype, device=like.device))
        self.bias = torch.nn.Parameter(torch.zeros(1, dtype=like.dtype, device=like.device))
        self.sequence_parallel = sequence_parallel  # GPTModel reads it
        for parameter in (self.weight, self.bias):
            parameter.sequence_parallel = sequence_parallel  # and finalize_model_grads reads this

    def forward(
        self, hidden: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Tensor, None]:
        """The arguments are ``ColumnParallelLinear``'s; a tied embedding (``weight``) is no value head and not used."""
        values = torch.nn.functional.linear(hidden.float(), self.weight.float(), self.bias.float())
        if self.sequence_parallel:
            from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

            # Every rank computes the same loss from all values, so each takes its own part of the gradient.
            values = gather_from_sequence_parallel_region(values, tensor_parallel_output_grad=False)
        return values, None


def install_value_head(chunks: Sequence[Any]) -> None:
    """Turn this rank's model chunks into a critic's: after the weights were loaded, before DDP wraps them.

    A tied embedding is untied on every stage, or the last would add the head's gradient to the embedding's.
    """
    for chunk in chunks:
        model = unwrap(chunk)
        if model.post_process:
            head = ValueHead(
                model.config.hidden_size,
                like=next(model.parameters()),
                sequence_parallel=model.config.sequence_parallel,
            )
            model.output_layer = head
        model.share_embeddings_and_output_weights = False


@dataclass(frozen=True, slots=True)
class ValueTokens:
    """The counted policy tokens of a micro-batch, as the critic sees them."""

    returns_T: Tensor  # what it is fitted to, see advantages.Estimate
    old_T: Tensor  # its values when the step began
    weights_T: Tensor  # the policy's, see megatron_rlplugin.objective.policy_loss
    denominator: int


@dataclass(slots=True)
class ValueTotals:
    """Sums over tokens that add up over micro-batches."""

    loss: float = 0.0
    denominator: float = 0.0
    tokens: float = 0.0
    clipped: float = 0.0
    value: float = 0.0
    returns: float = 0.0
    returns_squared: float = 0.0
    residual: float = 0.0  # returns minus the values when the step began
    residual_squared: float = 0.0

    def add(self, other: ValueTotals) -> None:
        """Take in another micro-batch."""
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))

    def metrics(self) -> dict[str, float]:
        """The scalars that a step reports. ``explained_variance`` is absent when the returns do not vary."""
        tokens = max(self.tokens, 1.0)
        values = {
            "value_loss": self.loss / max(self.denominator, 1.0),
            "value_clip_fraction": self.clipped / tokens,
            "value_mean": self.value / tokens,
            "return_mean": self.returns / tokens,
        }
        variance = self.returns_squared / tokens - (self.returns / tokens) ** 2
        if variance > 1e-12 * max(self.returns_squared / tokens, 1e-300):  # else it is rounding
            unexplained = self.residual_squared / tokens - (self.residual / tokens) ** 2
            values["explained_variance"] = 1.0 - unexplained / variance
        return values


def value_loss(values_T1: Tensor, tokens: ValueTokens, clip: float) -> tuple[Tensor, ValueTotals]:
    """The SUM of 1/2 max((V - R)^2, (V_clipped - R)^2), V_clipped within ``clip`` of the old value, and its diagnostics.

    ``values_T1``: [T, 1] or [T], the critic's output at the tokens' positions. The denominator 0: in no diagnostic.
    """
    values_T = values_T1.reshape(-1)
    values_T = values_T.to(torch.promote_types(values_T.dtype, torch.float32))
    old_T, returns_T = tokens.old_T.detach(), tokens.returns_T.detach()
    near_T = old_T + (values_T - old_T).clamp(-clip, clip)
    plain_T, clipped_T = (values_T - returns_T).square(), (near_T - returns_T).square()
    loss = (0.5 * torch.maximum(plain_T, clipped_T) * tokens.weights_T).sum()
    if not tokens.denominator:
        return loss, ValueTotals()
    residual_T = returns_T.double() - old_T.double()
    sums = torch.stack(
        [
            loss.detach().double(),
            (clipped_T > plain_T).sum(dtype=torch.float64),
            values_T.detach().sum(dtype=torch.float64),
            returns_T.sum(dtype=torch.float64),
            returns_T.double().square().sum(),
            residual_T.sum(),
            residual_T.square().sum(),
        ]
    ).tolist()
    return loss, ValueTotals(sums[0], float(tokens.denominator), float(values_T.numel()), *sums[1:])
