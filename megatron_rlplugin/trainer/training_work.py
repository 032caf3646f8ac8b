"""Floating-point operations of a micro-batch, by which replicas get equal shares.

Counted as 2 for each multiplied weight and token (of experts those that a token chooses), forward; backward is twice that, and
alike for all. Attention's products grow with the square of a row: half of it under a causal mask. Padding is computed, too. Of
the vocabulary only the rows of the policy's tokens (:mod:`megatron_rlplugin.objective.deferred_output`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_rlplugin.model_families import ModelShape
from megatron_rlplugin.trainer.micro_batches import MicroBatchLimits, TrainRow


@dataclass(frozen=True, slots=True)
class TrainingWork:
    """``token``: operations for each token of a row, ``pair``: for each token times the tokens of its row, ``output``: for each
    of the policy's tokens."""

    token: float
    pair: float
    output: float

    @classmethod
    def of_model(cls, shape: ModelShape) -> TrainingWork:
        """Of one model of this shape."""
        heads = shape.num_attention_heads * shape.head_dim
        attention = 2 * shape.hidden_size * (heads + shape.num_key_value_heads * shape.head_dim)
        wide = shape.num_experts_per_tok * shape.moe_intermediate_size if shape.num_experts else shape.intermediate_size
        layer = attention + 3 * shape.hidden_size * wide + shape.hidden_size * shape.num_experts
        layers = shape.num_hidden_layers
        return cls(2.0 * layers * layer, 2.0 * layers * heads, 2.0 * shape.hidden_size * shape.vocab_size)

    def of_plan(self, rows: Sequence[TrainRow], members: Sequence[int], limits: MicroBatchLimits) -> float:
        """Of a micro-batch with these rows."""
        lengths = [len(rows[index]) for index in members]
        if limits.pack_tokens is None:
            lengths = [max(lengths)] * len(lengths)
        said = sum(len(rows[index].positions) for index in members)
        return sum(length * (self.token + self.pair * length) for length in lengths) + said * self.output
