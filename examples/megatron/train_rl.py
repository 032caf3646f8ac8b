"""Trains a Hugging Face model on the recorded trajectories of a run, in the style of Megatron's pretrain_gpt.py.

No orchestrator, no Ray, no engine: a training script of one's own, with the two lines that rl-coserve needs (marked).

    python examples/megatron/train_rl.py --model MODEL --rl-trajectories runs/latest --save OUT --rl-stream-training
    torchrun --nproc-per-node 2 examples/megatron/train_rl.py ... --tensor-model-parallel-size 2

The batches are those of the run, in its order. With and without --rl-stream-training the weights end up the same, bit for
bit, when both use --rl-micro-batch-order arrival (streaming implies it).
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from megatron_rlplugin.flags import add_rl_args, settings_from, temperature_from
from megatron_rlplugin.hookpoints import require_megatron
from megatron_rlplugin.install import RLTraining, wrap
from megatron_rlplugin.model import DTYPES, build_model, causal_mask, read_shape
from megatron_rlplugin.objective.advantages import TrajectoryOutcome, advantages_of, says_nothing
from megatron_rlplugin.objective.policy_loss import Coefficients, Totals, policy_loss
from megatron_rlplugin.objective.user_loss import token_loss_of
from megatron_rlplugin.parallel_layout import initialize_parallel, shutdown_parallel
from megatron_rlplugin.trainer.learner import layout_of
from megatron_rlplugin.trainer.micro_batches import (
    MicroBatch,
    MicroBatchLimits,
    TrainRow,
    micro_batch,
    plan_micro_batches,
    row_of,
    usable_samples,
)
from megatron_rlplugin.trainer.recorded_rows import read_batches
from megatron_rlplugin.trainer.replicas import Replicas
from megatron_rlplugin.trainer.training_work import TrainingWork
from megatron_rlplugin.weights import hf_bridge
from orchestrator.api import ConfigError, CoserveError, TrainBatch
from orchestrator.settings.trainer_settings import TrainerSettings


def parse_args() -> argparse.Namespace:
    """Megatron's own names for what Megatron has a flag for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    group = parser.add_argument_group("training")
    group.add_argument("--model", required=True, help="Hugging Face folder to begin with")
    group.add_argument("--save", required=True, help="folder for the trained model")
    group.add_argument("--train-iters", type=int, help="training steps (default: all that the run recorded)")
    group.add_argument(
        "--first-version", type=int, default=0, help="weight version of the run's first step (default: 0)"
    )
    group.add_argument("--lr", type=float, default=1e-5, help="learning rate of Adam, constant (default: 1e-5)")
    group.add_argument("--weight-decay", type=float, default=0.0)
    group.add_argument("--clip-grad", type=float, default=1.0, help="gradient norm to clip at, 0: off (default: 1.0)")
    group.add_argument(
        "--micro-batch-size", type=int, default=8, help="trajectories a forward and backward (default: 8)"
    )
    group.add_argument("--bf16", action="store_true", help="weights in bfloat16 (default: float32)")
    group.add_argument("--tensor-model-parallel-size", type=int, default=1)
    group.add_argument("--pipeline-model-parallel-size", type=int, default=1)
    group.add_argument("--expert-model-parallel-size", type=int, default=1)
    group.add_argument("--use-distributed-optimizer", action="store_true")
    add_rl_args(parser)  # <<< rl-coserve, line 1 of 2
    return parser.parse_args()


def model_provider(args: argparse.Namespace, settings: TrainerSettings) -> list[Any]:
    """This rank's model chunks, with the folder's weights, in Megatron's DDP."""
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )

    shape = read_shape(args.model)
    chunks = build_model(shape, "bfloat16" if args.bf16 else "float32", layout_of(settings, shape))
    hf_bridge.load_hf(chunks, args.model)
    config = chunks[0].config
    config.finalize_model_grads_func = finalize_model_grads
    config.variable_seq_lengths = args.pipeline_model_parallel_size > 1  # micro-batches differ in length
    options = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, use_distributed_optimizer=args.use_distributed_optimizer
    )
    return [DistributedDataParallel(config, options, chunk.train()) for chunk in chunks]


def optimizer_provider(args: argparse.Namespace, model: list[Any]) -> Any:
    """Adam, as Megatron builds it."""
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    options = OptimizerConfig(
        optimizer="adam",
        lr=args.lr,
        weight_decay=args.weight_decay,
        clip_grad=args.clip_grad,
        bf16=args.bf16,
        params_dtype=DTYPES["bfloat16" if args.bf16 else "float32"],
        use_distributed_optimizer=args.use_distributed_optimizer,
    )
    return get_megatron_optimizer(options, model, use_gloo_process_groups=False)


def micro_batches(batch: TrainBatch, shape: Any, settings: TrainerSettings, replicas: Replicas) -> list[MicroBatch]:
    """What this data-parallel replica computes of a batch."""
    samples, _ = usable_samples(batch.samples, shape.vocab_size, shape.max_position_embeddings)
    rows = [row_of(sample, batch.version, settings.max_token_lag) for sample in samples]
    rows = [row for row in _with_advantages(rows, settings) if row.kept.any()]
    layout = layout_of(settings, shape)
    multiple = layout.tensor if layout.sequence else 1
    limits = MicroBatchLimits(
        settings.micro_batch_size, settings.order, multiple=multiple, tokens=settings.micro_batch_tokens
    )
    plans, flops = plan_micro_batches(rows, range(len(rows)), limits), TrainingWork.of_model(shape)
    work = [flops.of_plan(rows, members, limits) for members in plans]
    _, own = replicas.dealer().deal_micro_batches(plans, work, last=True)
    return [micro_batch(rows, share.members, limits, settings.loss_mean, idle=share.idle) for share in own]


def _with_advantages(rows: list[TrainRow], settings: TrainerSettings) -> list[TrainRow]:
    if settings.objective == "dapo":  # dynamic sampling: a group with equal rewards teaches nothing
        rewards: dict[str, list[float]] = {}
        for row in rows:
            rewards.setdefault(row.group, []).append(row.reward)
        rows = [row for row in rows if not says_nothing(rewards[row.group])]
    found = advantages_of([TrajectoryOutcome(row.group, row.reward, row.kept) for row in rows], settings).advantages
    return [replace(row, advantages=value) for row, value in zip(rows, found, strict=True)]


def forward_step_provider(settings: TrainerSettings, temperature: float) -> Callable[..., Any]:
    """Megatron's forward step. Its loss function returns (SUM, denominator, report)."""
    from megatron.core import parallel_state

    coefficients = Coefficients.from_settings(settings)
    token_loss = token_loss_of(settings)
    group = parallel_state.get_tensor_model_parallel_group() if settings.tensor_parallel > 1 else None

    def forward_step(data: Iterator[MicroBatch], model: Any) -> tuple[Any, Callable[..., Any]]:
        batch = next(data)
        logits_BSV = model(batch.inputs_BS, batch.positions_BS, causal_mask(batch.inputs_BS.shape[1]))

        def loss_function(logits_BSV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Totals]:
            loss, totals = policy_loss(
                batch.select(logits_BSV), batch.tokens, coefficients, temperature, group, token_loss
            )
            return loss, torch.tensor(batch.tokens.denominator, dtype=torch.int, device=loss.device), totals

        return logits_BSV, loss_function

    return forward_step


def train(args: argparse.Namespace, settings: TrainerSettings, rl: RLTraining) -> None:
    """One optimizer step a recorded batch."""
    replicas, shape = Replicas(), read_shape(args.model)
    forward_step = forward_step_provider(settings, temperature_from(args))
    batches = read_batches(args.rl_trajectories, first_version=args.first_version, steps=args.train_iters)
    for iteration, batch in enumerate(batches, 1):
        data = micro_batches(batch, shape, settings, replicas)
        length = max((one.inputs_BS.shape[1] for one in data), default=1)
        result, reports = rl.step(forward_step, data, seq_length=length, micro_batch_size=settings.micro_batch_size)
        totals = Totals()
        for report in reports:
            totals.add(report)
        values = replicas.sum_report(totals).metrics()
        reward = sum(sample.reward for sample in batch.samples) / len(batch.samples)
        if replicas.rank == 0:
            print(
                f" iteration {iteration:8d} | version: {batch.version} | trajectories: {len(batch.samples)} | "
                f"reward: {reward:.4f} | loss: {values['loss']:.6E} | grad norm: {result.grad_norm:.3f}"
                + ("" if result.taken else f" | skipped: {result.reason}"),
                flush=True,
            )
        if args.rl_weight_relay:
            rl.publish(batch.version + 1)


def save_hf(model: list[Any], source: str, target: str) -> None:
    """A Hugging Face folder: the trained weights, everything else as it was. Every rank calls it."""
    from safetensors.torch import save_file

    tensors = {name: tensor.cpu() for name, tensor in hf_bridge.export_hf(model)}
    if torch.distributed.get_rank() == 0:
        shutil.copytree(source, target, ignore=shutil.ignore_patterns("*.safetensors*"), dirs_exist_ok=True)
        save_file(tensors, Path(target) / "model.safetensors", metadata={"format": "pt"})


def main() -> None:
    """Provide model, optimizer and data, then train."""
    args = parse_args()
    settings = settings_from(args)
    if settings.needs_critic or settings.needs_reference or settings.minibatches > 1 or settings.pack_tokens:
        fix = "critic, reference, mini-batches and packing are the orchestrator's trainer's; this example has none of them"
        raise ConfigError("--rl-*", settings.objective, fix)
    if not args.rl_trajectories:
        raise ConfigError("--rl-trajectories", None, "is needed: the folder of a run")
    require_megatron()
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    torch.manual_seed(0)
    initialize_parallel(layout_of(settings, read_shape(args.model)), rank, world, "env://")
    model = model_provider(args, settings)
    optimizer = optimizer_provider(args, model)
    rl = wrap(model, optimizer, args)  # <<< rl-coserve, line 2 of 2
    train(args, settings, rl)
    save_hf(model, args.model, args.save)
    rl.close()
    shutdown_parallel()


if __name__ == "__main__":
    try:
        main()
    except CoserveError as error:
        sys.exit(f"train_rl.py: {error}")
