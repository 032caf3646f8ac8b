"""Trains a GPT by RL with stock Megatron-LM, which parses the arguments and builds model and optimizer; the loop is here.

Two lines are rl-coserve's (marked). Needs a Megatron-Core wheel that has megatron.training (0.19.2 was run):

    torchrun --nproc-per-node 8 examples/megatron/train_rl_gpt.py --num-layers ... --lr 1e-6 --micro-batch-size 4 \
        --rl-trajectories runs/latest --rl-stream-training --rl-weight-relay relay.json --rl-vocab-size 151936

Trajectories are those that a run recorded; put whatever brings yours in the place of :func:`trajectories`: it may wait for the
next one, and gradients of those before it are taken meanwhile. The objective is --rl-objective's.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.training import get_args, print_rank_0
from megatron.training.argument_utils import core_transformer_config_from_args
from megatron.training.arguments import parse_and_validate_args
from megatron.training.initialize import initialize_megatron
from megatron.training.training import setup_model_and_optimizer

from megatron_rlplugin.flags import add_rl_args, temperature_from
from megatron_rlplugin.install import wrap
from megatron_rlplugin.model import causal_mask
from megatron_rlplugin.objective.advantages import TrajectoryOutcome, advantages_of
from megatron_rlplugin.objective.policy_loss import Coefficients, Totals, policy_loss
from megatron_rlplugin.objective.user_loss import token_loss_of
from megatron_rlplugin.trainer.micro_batches import (
    MicroBatch,
    MicroBatchLimits,
    micro_batch,
    plan_micro_batches,
    row_of,
    usable_samples,
)
from megatron_rlplugin.trainer.recorded_rows import read_batches
from orchestrator.api import ConfigError, TrainBatch
from orchestrator.settings.trainer_settings import TrainerSettings


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
    config = config or core_transformer_config_from_args(args)
    config.variable_seq_lengths = args.pipeline_model_parallel_size > 1  # micro-batches differ in length
    return GPTModel(
        config,
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


def trajectories(args: argparse.Namespace) -> Iterator[TrainBatch]:
    """Complete groups, a batch for each weight version."""
    yield from read_batches(args.rl_trajectories, steps=args.train_iters)


def micro_batches(batch: TrainBatch, args: argparse.Namespace, settings: TrainerSettings) -> Iterator[MicroBatch]:
    """What this data-parallel replica computes of a batch: some have one micro-batch more than others."""
    samples, _ = usable_samples(batch.samples, args.vocab_size, args.max_position_embeddings)
    rows = [row_of(sample, batch.version, settings.max_token_lag) for sample in samples]
    found = advantages_of([TrajectoryOutcome(row.group, row.reward, row.kept) for row in rows], settings).advantages
    rows = [replace(row, advantages=value) for row, value in zip(rows, found, strict=True) if row.kept.any()]
    multiple = args.tensor_model_parallel_size if args.sequence_parallel else 1
    limits = MicroBatchLimits(
        settings.micro_batch_size, settings.order, multiple=multiple, tokens=settings.micro_batch_tokens
    )
    replica, replicas = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    for members in plan_micro_batches(rows, range(len(rows)), limits)[replica::replicas]:
        yield micro_batch(rows, members, limits, settings.loss_mean)


def forward_step_of(settings: TrainerSettings, temperature: float) -> Callable[..., Any]:
    """Megatron's forward step. Its loss function returns (SUM, denominator, report)."""
    coefficients, token_loss = Coefficients.from_settings(settings), token_loss_of(settings)
    group = parallel_state.get_tensor_model_parallel_group() if settings.tensor_parallel > 1 else None

    def forward_step(data_iterator: Iterator[MicroBatch], model: Any) -> tuple[Any, Callable[..., Any]]:
        batch = next(data_iterator)
        logits = model(batch.inputs_BS, batch.positions_BS, causal_mask(batch.inputs_BS.shape[1]))

        def loss_func(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Totals]:
            chosen = batch.select(logits)
            loss, totals = policy_loss(chosen, batch.tokens, coefficients, temperature, group, token_loss)
            return loss, torch.tensor(batch.tokens.denominator, dtype=torch.int, device=loss.device), totals

        return logits, loss_func

    return forward_step


NEEDED = {
    "hidden_dropout": (0, "with dropout (Megatron's default is 0.1) the trained policy is not the one that sampled"),
    "attention_dropout": (0, "with dropout (Megatron's default is 0.1) the trained policy is not the one that sampled"),
    "context_parallel_size": (1, "a micro-batch here is whole rows, and each rank would take all of them for its part"),
    "num_experts": (None, "model_provider here makes dense layers"),
}


def check(args: argparse.Namespace) -> None:
    """Refuse what this script would train wrongly without a word."""
    for name, (value, why) in NEEDED.items():
        if getattr(args, name) != value:
            raise ConfigError(f"--{name.replace('_', '-')}", getattr(args, name), f"must be {value}: {why}")


if __name__ == "__main__":
    args = parse_and_validate_args(extra_args_provider=add_rl_args)  # <<< rl-coserve, line 1 of 2
    check(args)
    initialize_megatron()
    model, optimizer, scheduler = setup_model_and_optimizer(ModelType.encoder_or_decoder, model_provider)
    rl = wrap(model, optimizer, args)  # <<< rl-coserve, line 2 of 2
    forward_step = forward_step_of(rl.settings, temperature_from(args))
    for batch in trajectories(args):
        source = micro_batches(batch, args, rl.settings)
        result, reports = rl.step(
            forward_step, source, seq_length=args.seq_length, micro_batch_size=args.micro_batch_size
        )
        scheduler.step(increment=args.global_batch_size)
        totals = Totals()
        for report in reports:
            totals.add(report)
        skipped = "" if result.taken else f" | skipped: {result.reason}"
        print_rank_0(
            f" iteration {batch.step + 1:8d} | loss: {totals.metrics()['loss']:.6E} | grad norm: {result.grad_norm:.3f}{skipped}"
        )
        if args.rl_weight_relay:
            rl.publish(batch.version + 1)
    rl.close()
