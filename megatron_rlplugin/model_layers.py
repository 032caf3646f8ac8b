"""Layers that stock Megatron-Core does not have, or not without Transformer Engine: what some families compute otherwise.

Guarantees: each stands where Megatron's specification of a layer has the stock one, takes the same constructor and call, and
computes what transformers computes. Names of parameters are Megatron's, except ``post_layernorm``.
"""

from __future__ import annotations

import copy
import math
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.tensor_parallel import RowParallelLinear
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor

from megatron_rlplugin.context_parallel import gather_sequence, zigzag_places
from megatron_rlplugin.model_families import Rope

__all__ = [
    "BiasedExpertLinear",
    "LocalAttention",
    "NormedRowParallelLinear",
    "RMSNorm",
    "WindowRopeAttention",
    "count_load",
    "scale_embeddings",
    "scale_rope",
]


class RMSNorm(torch.nn.RMSNorm):  # type: ignore[misc]
    """torch's RMSNorm with the constructor that Megatron calls; with ``layernorm_zero_centered_gamma`` times 1 + weight.

    Megatron's own wrapper refuses sequence parallelism, under which a norm sees only this rank's part of a sequence: its
    weight is marked, so that ``finalize_model_grads`` sums its gradient over the tensor-parallel ranks.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps)
        self.weight.sequence_parallel = config.sequence_parallel
        self._zero_centered = config.layernorm_zero_centered_gamma

    def forward(self, input: Tensor) -> Tensor:
        if not self._zero_centered:
            return super().forward(input)
        normed = torch.nn.functional.rms_norm(input.float(), self.normalized_shape, 1.0 + self.weight.float(), self.eps)
        return normed.type_as(input)


class LocalAttention(DotProductAttention):  # type: ignore[misc]
    """Megatron's attention that also takes what latent attention says of its channels, whose window is cut out of the mask
    that it is given, and which gathers keys and values of a row that is split over context-parallel ranks.

    The stock one puts a causal window in the mask's place, so that the trajectories of a packed row would see each other, and
    refuses context parallelism. Gathering costs each rank the keys and values of whole rows: what Transformer Engine does on
    a GPU costs less, and is not this. The mask is that of whole rows, ``[1, 1, S, S]``.
    """

    def __init__(self, config: Any, layer_number: int, *args: Any, **kwargs: Any) -> None:
        for name in ("k_channels", "v_channels"):  # the tensors say them
            kwargs.pop(name, None)
        own = copy.copy(config)
        own.context_parallel_size = 1
        super().__init__(own, layer_number, *args, **kwargs)
        group = parallel_state.get_context_parallel_group() if config.context_parallel_size > 1 else None
        self._context: Any = group
        windowed = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
        self._window = config.window_size[0] + 1 if windowed else None
        self.scale_mask_softmax.window_size = None

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        if self._context is not None:
            key, value = (gather_sequence(part, self._context) for part in (key, value))
        if self._window is not None and key.shape[0] > self._window:
            place = torch.arange(key.shape[0], device=key.device)
            attention_mask = attention_mask | (place[:, None] - place[None, :] >= self._window)
        if self._context is not None:
            rows = zigzag_places(key.shape[0], self._context.rank(), self._context.size())
            attention_mask = attention_mask.index_select(2, rows.to(attention_mask.device))
        return super().forward(query, key, value, attention_mask, *args, **kwargs)


class WindowRopeAttention(SelfAttention):  # type: ignore[misc]
    """Self-attention whose layers with a window turn heads by a base of their own (Gemma 3, section 2)."""

    def __init__(self, config: Any, submodules: Any, layer_number: int, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, submodules, layer_number, *args, **kwargs)
        self._own_rope: Any = None
        if is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number):
            self._own_rope = RotaryEmbedding(
                config.kv_channels,
                rotary_percent=1.0,
                rotary_base=config.window_rotary_base,
                use_cpu_initialization=config.use_cpu_initialization,
                cp_group=self.pg_collection.cp,
            )

    def forward(self, *args: Any, rotary_pos_emb: Any = None, **kwargs: Any) -> Any:
        if self._own_rope is not None and rotary_pos_emb is not None:
            packed = kwargs.get("packed_seq_params")
            length = len(rotary_pos_emb) * (1 if packed is not None else self.pg_collection.cp.size())
            rotary_pos_emb = self._own_rope(length, packed_seq=packed is not None)
        return super().forward(*args, rotary_pos_emb=rotary_pos_emb, **kwargs)


class NormedRowParallelLinear(RowParallelLinear):  # type: ignore[misc]
    """A row-parallel linear layer with a norm behind it, before the residual is added (Gemma 3)."""

    def __init__(self, *args: Any, config: Any, **kwargs: Any) -> None:
        super().__init__(*args, config=config, **kwargs)
        self.post_layernorm = RMSNorm(config, self.output_size, config.layernorm_epsilon)

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        output, bias = super().forward(input_)
        return self.post_layernorm(output), bias


class BiasedExpertLinear(RowParallelLinear):  # type: ignore[misc]
    """The second linear layer of an expert with a bias, which Megatron adds in place: not to a view of its input."""

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        output, bias = super().forward(input_)
        return output.clone(), bias


def count_load(router: Any) -> None:
    """Let this ``TopKRouter`` count, of its experts' load, what is no padding: 0.16.1's own counting cannot take a mask.

    In a bfloat16 model its counts and bias are fp32, from now on: Megatron makes them so in the first forward pass only.
    """
    router.expert_bias.data = router.expert_bias.data.float()
    router.local_tokens_per_expert.data = router.local_tokens_per_expert.data.float()
    router._apply_expert_bias = partial(_add_load, router)


def _add_load(router: Any, routing_map: Tensor, padding_mask: Tensor | None = None) -> None:
    if torch.is_grad_enabled():  # not in passes without a gradient, nor when activations are computed again
        with torch.no_grad():
            counted = routing_map if padding_mask is None else routing_map & ~padding_mask.reshape(-1, 1)
            router.local_tokens_per_expert += counted.sum(dim=0)


def scale_embeddings(model: Any, factor: float) -> None:
    """Multiply what the embedding gives by ``factor``, rounded to its dtype as transformers and vLLM round it."""
    if model.pre_process:
        model.embedding.register_forward_hook(partial(_scaled_embeddings, factor))


def _scaled_embeddings(factor: float, module: Any, inputs: Any, output: Tensor) -> Tensor:
    weight = module.word_embeddings.weight
    return output * torch.tensor(factor, dtype=weight.dtype, device=output.device).to(output.dtype)


def scale_rope(frequencies: Tensor, rope: Rope) -> Tensor:
    """Frequencies (radians a position) as "linear" or "llama3" scaling makes them, in the arithmetic of transformers; others
    as they are."""
    if rope.type == "linear":
        return frequencies / rope.factor
    if rope.type != "llama3":
        return frequencies
    wavelength = 2 * math.pi / frequencies
    turns = rope.original_max_position_embeddings / wavelength
    smooth = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    between = (1 - smooth) * frequencies / rope.factor + smooth * frequencies
    scaled = torch.where(turns < rope.low_freq_factor, frequencies / rope.factor, frequencies)
    medium = (turns >= rope.low_freq_factor) & (turns <= rope.high_freq_factor)
    return torch.where(medium, between, scaled)
