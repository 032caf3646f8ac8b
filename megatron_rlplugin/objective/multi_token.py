"""Heads that predict several tokens (multi-token prediction, DeepSeek-V3, section 2.2), trained beside any objective.

Guarantees: the layers are Megatron-Core's (``mtp_num_layers``), their weights the folder's; head k of token i sees the model's
hidden state of i and the tokens up to i + k, and is asked for token i + 1 + k where that is one of the policy's that is trained
on: the response mask, shifted as Megatron shifts it. What is added to an objective's loss is ``mtp_loss_scaling_factor`` times
the mean over heads of their cross-entropy, each the mean that Megatron takes: over tokens where the objective divides by tokens,
else over a trajectory's tokens, then over trajectories. So it weighs the same whatever an objective divides by, and a streamed
step has the same gradient as one batch. Its gradient reaches the layers before the heads, embedding and output layer, as in
pretraining.

Without a gradient (log-probs) the heads are not computed. Nothing of stock Megatron is patched: the model's own object gets
another ``_postprocess``, since the stock one makes its loss from labels, with all logits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_rlplugin.model import ModelShape, unwrap
from megatron_rlplugin.objective.deferred_output import output_rows
from megatron_rlplugin.objective.policy_loss import Tokens, Totals, over_trajectories
from megatron_rlplugin.objective.vocab_logprobs import OutputRows, logprobs
from megatron_rlplugin.parallel_layout import ParallelLayout
from orchestrator.api import ConfigError

_OPTION = "mtp_num_layers"
_OF_PADDING = ("moe_router_bias_update_rate", "moe_aux_loss_coeff", "moe_z_loss_coeff")
_BY_TOKEN = ("sequence-sum", "length-normalized")  # means that weigh a trajectory by its length


def check_multi_token(options: Mapping[str, Any], shape: ModelShape, layout: ParallelLayout) -> None:
    """Refuse heads that the folder does not have, or that are not built here. Raises ConfigError."""
    heads = options.get(_OPTION)
    field = f"trainer.megatron.{_OPTION}"
    if heads is None:
        if "mtp_loss_scaling_factor" in options:
            weight = options["mtp_loss_scaling_factor"]
            raise ConfigError("trainer.megatron.mtp_loss_scaling_factor", weight, f"goes with {_OPTION}: set both")
        return
    if not 1 <= heads <= shape.extra_layers:
        has = f"the model's folder has {shape.extra_layers} such layers"
        raise ConfigError(field, heads, f"must be from 1 to {shape.extra_layers}: {has}" if shape.extra_layers else has)
    if layout.context > 1 or (layout.virtual or 1) > 1:
        split = {"context_parallel": layout.context, "megatron.virtual_pipeline_model_parallel_size": layout.virtual}
        name = next(name for name, size in split.items() if (size or 1) > 1)
        raise ConfigError(
            f"trainer.{name}", split[name], f"must be unset with {field}: its heads are not split so here"
        )
    if layout.pipeline > 1 and shape.tie_word_embeddings:
        fix = f"must be 1 with {field} and a tied embedding: the last stage would have two copies of it"
        raise ConfigError("trainer.pipeline_parallel", layout.pipeline, fix)
    for name in _OF_PADDING:
        if options.get(name):
            fix = f"must be unset with {_OPTION}: Megatron-Core does not mark padding for the heads' routers"
            raise ConfigError(f"trainer.megatron.{name}", options[name], fix)


def keep_heads_apart(chunks: Sequence[Any]) -> None:
    """From now on the last stage's output is ``[batch, (1 + heads) * length, hidden]``: after the model's own hidden states those
    of each head, where there is a gradient. Needs a deferred output layer."""
    for chunk in chunks:
        model = unwrap(chunk)
        if model.mtp_process:
            model._postprocess = partial(_hidden_states, model)


def rows_with_heads(model: Any, output_BXH: Tensor, at_T: Tensor, positions_BS: Tensor) -> OutputRows:
    """The model's rows for the policy's tokens, with those of its heads. ``at_T``: where in ``[batch * length]`` the token before
    each is; ``positions_BS``: of each input in its trajectory, which has nothing before 0."""
    rows_XH, length = output_BXH.reshape(-1, output_BXH.shape[-1]), positions_BS.shape[1]
    row_T, place_T, position_T = at_T // length, at_T % length, positions_BS.reshape(-1)[at_T]
    depths, found = output_BXH.shape[1] // length, []
    for depth in range(depths):
        # One that would lie before its trajectory is looked up somewhere else, and weighs nothing: no shape depends on values.
        from_T = row_T * (depths * length) + depth * length + (place_T - depth).clamp(min=0)
        found.append((position_T >= depth, output_rows(model, rows_XH.index_select(0, from_T))))
    (_, own), *ahead = found
    return replace(own, ahead=tuple(ahead))


def multi_token_loss(
    rows: OutputRows, tokens: Tokens, mean: str, factor: float, group: Any = None
) -> tuple[Tensor, Totals]:
    """What the heads of a micro-batch add to its loss, a SUM as the objective's, and what is reported of it. ``mean``: of the
    objective (:func:`megatron_rlplugin.objective.policy_loss.token_weights`), whose weights are in ``tokens``."""
    weights_T = tokens.weights_T
    if mean in _BY_TOKEN:
        weights_T = weights_T / over_trajectories(torch.ones_like(weights_T), tokens.segments_T, mean=False)
    total, said = weights_T.new_zeros(()), Totals()
    for there_T, each in rows.ahead:
        loss_T = -logprobs(each, tokens.targets_T, group=group) * there_T
        total = total + (loss_T * weights_T).sum()
        if tokens.denominator:
            said.add(Totals(ahead_loss=float(loss_T.detach().sum()), ahead_tokens=float(there_T.sum())))
    return total * (factor / len(rows.ahead)), said


def _hidden_states(
    model: Any,
    hidden_states: Tensor,
    input_ids: Tensor,
    position_ids: Tensor,
    **more: Any,
) -> Tensor:
    """Instead of ``GPTModel._postprocess``: hidden states instead of logits, the heads' behind the model's."""
    states = [hidden_states]
    if torch.is_grad_enabled():
        names = ("attention_mask", "rotary_pos_emb", "rotary_pos_cos", "rotary_pos_sin", "packed_seq_params")
        joined = model.mtp(
            input_ids=input_ids,
            position_ids=position_ids,
            hidden_states=hidden_states,
            embedding=model.embedding,
            sequence_len_offset=more.get("sequence_len_offset"),
            **{name: more[name] for name in names},
            **(more.get("extra_block_kwargs") or {}),
        )
        states = list(joined.chunk(1 + model.config.mtp_num_layers))
    whole = [model.output_layer(each)[0] for each in states]  # deferred: gathers what sequence parallelism cut
    return torch.cat(whole).transpose(0, 1).contiguous()
