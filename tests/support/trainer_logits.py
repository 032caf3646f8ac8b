"""The logits of a trainer's model by one plain product: what its loss, which works on hidden states, is compared with."""

from __future__ import annotations

from typing import Any

import torch

from megatron_rlplugin.objective.deferred_output import output_rows


def plain_logits(trainer: Any, tokens_BS: Any, positions_BS: Any, mask: Any) -> Any:
    """``[batch, length, vocabulary]``, of a trainer of one rank."""
    model = trainer._learner.model
    rows = output_rows(model, model(tokens_BS, positions_BS, mask))
    return torch.nn.functional.linear(rows.hidden_TH, rows.weight_VH)
