"""The output layer left to the loss: the model's last stage gives hidden states, and logits exist a chunk at a time.

Guarantees: parameters, their names and their gradients are those of the stock model; a tied embedding stays tied. Only the
policy's tokens are multiplied with the vocabulary, not prompts and padding. Nothing of stock Megatron is patched: the layer's
own object gets another ``forward``, in models that :class:`megatron_rlplugin.trainer.learner.Learner` built.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor

from megatron_rlplugin.context_parallel import TokenPart
from megatron_rlplugin.model import unwrap
from megatron_rlplugin.objective.vocab_logprobs import OutputRows


def defer_output_layer(chunks: Sequence[Any]) -> None:
    """From now on the last stage's output is ``[batch, length, hidden]``, all of it on every tensor-parallel rank."""
    for chunk in chunks:
        model = unwrap(chunk)
        if model.post_process:
            model.output_layer.forward = partial(_hidden_states, model.output_layer)


def output_rows(model: Any, hidden_TH: Tensor, part: TokenPart | None = None) -> OutputRows:
    """The logits of these hidden states, for :mod:`megatron_rlplugin.objective.vocab_logprobs`. ``part``: whose they are."""
    from megatron.core import tensor_parallel

    model = unwrap(model)
    if not model.output_layer.sequence_parallel:
        # Here and not in the layer: Megatron-Core 0.16.1 sums a gradient that is not contiguous into a copy, and drops it.
        hidden_TH = tensor_parallel.copy_to_tensor_model_parallel_region(hidden_TH)
    return OutputRows(hidden_TH, _weight(model), part)


def keeps_dtype(chunk: Any) -> dict[str, bool]:
    """What a bfloat16 model is called with, so that it does not give its hidden states in fp32."""
    wrapped = getattr(chunk, "module", chunk)  # Megatron's DDP passes keyword arguments on
    takes = "fp32_output" in inspect.signature(type(wrapped).forward).parameters
    return {"fp32_output": False} if takes else {}


def _weight(model: Any) -> Tensor:
    weight = model.shared_embedding_or_output_weight() if model.share_embeddings_and_output_weights else None
    return model.output_layer.weight if weight is None else weight


def _hidden_states(
    layer: Any, hidden_SBH: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
) -> tuple[Tensor, None]:
    """Instead of ``ColumnParallelLinear.forward``, whose communication over tensor-parallel ranks is kept: each rank's
    gradient of the hidden states is of its own columns, so they are summed, here or in :func:`output_rows`."""
    if layer.sequence_parallel:
        from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

        hidden_SBH = gather_from_sequence_parallel_region(hidden_SBH, tensor_parallel_output_grad=True)
    return hidden_SBH, None
