"""Trains a GPT with stock Megatron-LM's ``pretrain()``, in the shape of its pretrain_gpt.py; gradients are streamed.

Two lines are rl-coserve's (marked). Needs a Megatron-Core wheel that has megatron.training (0.19.2 was run):

    torchrun --nproc-per-node 8 examples/megatron/pretrain_gpt.py --num-layers ... --rl-stream-training

Without --rl-stream-training the second line does nothing. Losses and gradient norms are the same either way. The data are
made-up sentences: put your dataset provider in their place.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.training import get_args, pretrain
from megatron.training.argument_utils import core_transformer_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args

from megatron_rlplugin.flags import add_rl_args
from megatron_rlplugin.install import install


def model_provider(
    pre_process: bool = True,
    post_process: bool = True,
    vp_stage: Any = None,
    config: Any = None,
    pg_collection: Any = None,
) -> GPTModel:
    """A chunk of the model, as the arguments describe it."""
    args = get_args()
    if args.transformer_impl == "local":
        spec = get_gpt_layer_local_spec(qk_layernorm=args.qk_layernorm, normalization=args.normalization)
    else:
        spec = get_gpt_layer_with_transformer_engine_spec(qk_layernorm=args.qk_layernorm)
    return GPTModel(
        config or core_transformer_config_from_args(args),
        spec,
        args.padded_vocab_size,
        args.max_position_embeddings,
        pre_process,
        post_process,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_base=args.rotary_base,
        vp_stage=vp_stage,
        pg_collection=pg_collection,
    )


def loss_func(
    loss_mask: torch.Tensor, losses: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """(SUM, tokens, report), as Megatron's own."""
    loss = (losses.float().view(-1) * loss_mask.view(-1)).sum()
    tokens = loss_mask.sum().to(torch.int)
    return loss, tokens, {"lm loss": torch.stack([loss.detach(), tokens.float()])}


def forward_step(data_iterator: Iterator[dict[str, torch.Tensor]], model: Any) -> tuple[torch.Tensor, Any]:
    """One micro-batch through the model."""
    tokens = next(data_iterator)["text"].to(torch.cuda.current_device())
    length = tokens.shape[1] - 1
    mask = torch.triu(torch.ones(1, 1, length, length, dtype=torch.bool, device=tokens.device), 1)
    positions = torch.arange(length, device=tokens.device)[None].expand(len(tokens), -1)
    losses = model(tokens[:, :-1], positions, mask, labels=tokens[:, 1:])
    return losses, partial(loss_func, torch.ones_like(tokens[:, 1:], dtype=torch.float))


class Sentences(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Random ones, the same under the same number."""

    def __init__(self, length: int, vocabulary: int) -> None:
        self._length, self._vocabulary = length, vocabulary

    def __len__(self) -> int:
        return 1 << 16

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        draw = torch.Generator().manual_seed(number)
        return {"text": torch.randint(self._vocabulary, (self._length + 1,), generator=draw)}


def train_valid_test_datasets_provider(counts: Any) -> tuple[Any, None, None]:
    """Of training, validation and test."""
    args = get_args()
    return Sentences(args.seq_length, args.vocab_size), None, None


if __name__ == "__main__":
    train_valid_test_datasets_provider.is_distributed = True  # type: ignore[attr-defined]
    args = parse_and_validate_args(extra_args_provider=add_rl_args)  # <<< rl-coserve, line 1 of 2
    install(args)  # <<< rl-coserve, line 2 of 2
    pretrain(
        pretrain_cfg_container_from_args(args),
        train_valid_test_datasets_provider,
        ModelType.encoder_or_decoder,
        forward_step,
        model_provider,
    )
