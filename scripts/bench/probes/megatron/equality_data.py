"""Synthetic GRPO-like training for the equality probe: tiny models in every layout, trajectories, who trains which.

Guarantees: the same case and step give the same weights, trajectories and shares on every rank and in every process; the
objective, its denominators and the model are the plugin's own.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megatron_rlplugin.model import build_model, causal_mask, unwrap
from megatron_rlplugin.model_families import ModelShape, Rope
from megatron_rlplugin.objective.advantages import group_advantages, says_nothing
from megatron_rlplugin.objective.policy_loss import Coefficients, Tokens, policy_loss, token_weights
from megatron_rlplugin.parallel_layout import ParallelLayout, device
from orchestrator.policies.training.objective_table import LossMean, ObjectiveName
from orchestrator.settings.trainer_settings import TrainerSettings

GROUPS, GROUP_SIZE = 2, 4
SAMPLES = GROUPS * GROUP_SIZE
VOCABULARY, LENGTH, PROMPT = 96, 16, 3
# What is trained in the cases: objective, its mean, and whether a trajectory has a weight that is no integer.
LOSSES: dict[str, tuple[ObjectiveName, LossMean, bool]] = {
    "token-mean": ("grpo", "token-mean", False),
    "sequence-mean": ("grpo", "sequence-mean", False),
    "dapo": ("dapo", "token-mean", False),
    "weighted": ("grpo", "token-mean", True),
}
Forward = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Case:
    """One layout with its options. ``ddp_mean``: DDP built without per-token losses (it would average over replicas)."""

    name: str
    world: int
    layout: ParallelLayout = field(default_factory=ParallelLayout)
    loss: str = "token-mean"
    clip: float = 1.0
    dtype: str = "float32"
    experts: bool = False
    overlap_reduce: bool = False
    overlap_gather: bool = False
    ddp_mean: bool = False
    tied: bool = False

    @property
    def replicas(self) -> int:
        return self.layout.data_parallel_size(self.world)

    @property
    def units(self) -> int:
        """Replicas that may train at different times: expert-parallel peers are one."""
        return self.replicas // self.layout.expert


@dataclass(frozen=True, slots=True)
class Sample:
    """One trajectory, or (``loss_weight`` 0) what a rank computes while its expert-parallel peer has one more."""

    tokens: Tensor  # int64 [LENGTH + 1]
    made: int  # policy tokens, right after the prompt
    advantage: float
    rollout_T: Tensor  # float32 [made]
    old_T: Tensor
    loss_weight: float = 1.0


def shape_of(case: Case) -> ModelShape:
    """A model that computes in milliseconds, deep enough for two chunks on each of two stages."""
    return ModelShape(
        architecture="Qwen3MoeForCausalLM" if case.experts else "Qwen3ForCausalLM",
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4 if case.layout.virtual else 2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=LENGTH,
        rms_norm_eps=1e-6,
        rope=Rope(1e4),
        tie_word_embeddings=case.tied,
        qkv_bias=False,
        qk_norm=True,
        num_experts=4 if case.experts else 0,
        num_experts_per_tok=2 if case.experts else 0,
        moe_intermediate_size=32 if case.experts else 0,
        norm_topk_prob=True,
    )


def build(case: Case, *, stock: bool = False) -> tuple[list[Any], Any]:
    """(DDP chunks, optimizer) with seeded weights: the same each time, each shard its own.

    ``stock``: for whole batches, whose stock loop needs a DDP that sums.
    """
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    modules = build_model(shape_of(case), case.dtype, case.layout)
    _seed_weights(modules)
    config = modules[0].config
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=case.layout.distributed_optimizer,
        overlap_grad_reduce=case.overlap_reduce,
        overlap_param_gather=case.overlap_gather,
        bucket_size=4000 if case.overlap_reduce else None,  # several buckets
    )
    config.calculate_per_token_loss = stock or not case.ddp_mean
    chunks = [DistributedDataParallel(config, ddp, m, disable_bucketing=i > 0) for i, m in enumerate(modules)]
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=1e-3,
            min_lr=1e-3,
            weight_decay=0.01,
            adam_beta2=0.95,
            clip_grad=case.clip,
            bf16=config.bf16,
            params_dtype=config.params_dtype,
            use_distributed_optimizer=case.layout.distributed_optimizer,
            overlap_param_gather=case.overlap_gather,
        ),
        chunks,
        use_gloo_process_groups=False,
    )
    return chunks, optimizer


def _seed_weights(modules: Sequence[Any]) -> None:
    from megatron.core import parallel_state

    tensor = parallel_state.get_tensor_model_parallel_rank()
    expert = parallel_state.get_expert_model_parallel_rank()
    stage = parallel_state.get_pipeline_model_parallel_rank()
    for number, module in enumerate(modules):
        for name, parameter in unwrap(module).named_parameters():
            if parameter.dim() == 1:  # norms
                parameter.data.fill_(1.0)
                continue
            word = "word_embeddings" in name or "output_layer" in name  # a tied pair is the same on both stages
            split = 0 if "router" in name else tensor  # every other matrix is cut over the tensor-parallel ranks
            owner = 0 if getattr(parameter, "allreduce", True) else expert
            key = f"{name} {0 if word else (stage, number)} {split} {owner}"
            if word and unwrap(module).share_embeddings_and_output_weights:
                key = f"words {split}"
            generator = torch.Generator().manual_seed(zlib.crc32(key.encode()))
            parameter.data.copy_(0.1 * torch.randn(parameter.shape, generator=generator))


def batch_of(case: Case, step: int) -> list[Sample]:
    """The trajectories of a step, the same on every rank. DAPO's leave out groups whose rewards are all equal."""
    generator = torch.Generator().manual_seed(1000 + step)
    rewards = [float(r) for r in torch.randint(0, 2, (SAMPLES,), generator=generator)]
    rewards[0], rewards[1] = 1.0, 0.0  # at least one group says something
    groups = [f"g{i // GROUP_SIZE}" for i in range(SAMPLES)]
    advantages = group_advantages(rewards, groups, normalize=True)
    objective, _, weighted = LOSSES[case.loss]
    samples = []
    for i in range(SAMPLES):
        made = int(torch.randint(2, LENGTH - PROMPT + 1, (), generator=generator))
        tokens = torch.randint(0, VOCABULARY, (LENGTH + 1,), generator=generator)
        noise = 0.3 * torch.randn(2, made, generator=generator)
        old_T = -math.log(VOCABULARY) + noise[0]
        first = i // GROUP_SIZE * GROUP_SIZE
        if objective == "dapo" and says_nothing(rewards[first : first + GROUP_SIZE]):
            continue
        samples.append(
            Sample(tokens, made, advantages[i], old_T + 0.5 * noise[1], old_T, 0.3 + 0.1 * i if weighted else 1.0)
        )
    return samples


def denominator_of(case: Case, sample: Sample) -> float:
    """What this trajectory adds to N."""
    return token_weights(sample.made, LOSSES[case.loss][1])[1] * sample.loss_weight


def forward_step(case: Case, *, uncounted: bool = False) -> Forward:
    """Megatron's forward-step function over micro-batches of one :class:`Sample`.

    ``uncounted``: without denominators, for a caller that divides; Megatron's own counter takes no float.
    """
    from megatron.core import parallel_state

    objective, mean, weighted = LOSSES[case.loss]
    coefficients = Coefficients.from_settings(TrainerSettings(objective=objective, loss=mean))
    group = parallel_state.get_tensor_model_parallel_group() if case.layout.tensor > 1 else None

    def step(samples: Iterator[Sample], model: Any) -> tuple[Tensor, Forward]:
        sample = next(samples)
        where = device()
        inputs_BS = sample.tokens[:-1].unsqueeze(0).to(where)
        positions_BS = torch.arange(LENGTH, device=where).unsqueeze(0)
        output = model(inputs_BS, positions_BS, causal_mask(LENGTH))

        def loss(logits_BSV: Tensor) -> tuple[Tensor, Any, Any]:
            at = slice(PROMPT - 1, PROMPT - 1 + sample.made)
            weights_T, denominator = token_weights(sample.made, mean)
            tokens = Tokens(
                targets_T=sample.tokens[at.start + 1 : at.stop + 1].to(where),
                rollout_T=sample.rollout_T.to(where),
                advantages_T=torch.full((sample.made,), sample.advantage, device=where),
                weights_T=torch.from_numpy(weights_T).to(where) * sample.loss_weight,
                fresh_T=torch.ones(sample.made, dtype=torch.bool, device=where),
                old_T=sample.old_T.to(where),
                denominator=denominator,
            )
            total, _ = policy_loss(logits_BSV[0, at], tokens, coefficients, group=group)
            if uncounted:
                return total, torch.zeros((), dtype=torch.int, device=where), total.detach()
            if weighted or not sample.loss_weight:
                return total, denominator * sample.loss_weight, total.detach()
            return total, torch.tensor(denominator, dtype=torch.int, device=where), total.detach()

        return output, loss

    return step


def iterators(chunks: Sequence[Any], samples: Sequence[Sample]) -> Any:
    """The data iterator that a schedule wants: one for each chunk where there are several."""
    return [iter(samples) for _ in chunks] if len(chunks) > 1 else iter(samples)


def portions(case: Case, count: int) -> list[int]:
    """How many micro-batches each call of ``feed`` gets; the interleaved schedule wants multiples of the stages."""
    unit = case.layout.pipeline if case.layout.virtual else 1
    sizes: list[int] = []
    while count:
        sizes.append(min((len(sizes) % 3 + 1) * unit, count))
        count -= sizes[-1]
    return sizes


def even(case: Case, samples: Sequence[Sample], replica: int) -> list[Sample]:
    """This replica's share in the order of the batch; a share may be shorter where the batch does not divide."""
    share = math.ceil(len(samples) / case.replicas)
    return _level(case, [list(samples[r * share : (r + 1) * share]) for r in range(case.replicas)])[replica]


def uneven(case: Case, samples: Sequence[Sample], step: int, replica: int) -> list[Sample]:
    """Shuffled, and every other step one replica has it all (n_i = 0 for the others)."""
    order = torch.randperm(len(samples), generator=torch.Generator().manual_seed(step)).tolist()
    # The first replica has most, of four the last has nothing; every other step all is the first one's.
    fewer = [1] if case.replicas == 2 else list(range(case.replicas - 2, -1, -1))
    sizes = [0] * (case.replicas - 1) if step % 2 or case.replicas == 1 else fewer
    parts, at = [], len(order) - sum(sizes)
    parts.append([samples[index] for index in order[:at]])
    for size in sizes:
        parts.append([samples[index] for index in order[at : at + size]])
        at += size
    return _level(case, parts)[replica]


def _level(case: Case, parts: list[list[Sample]]) -> list[list[Sample]]:
    """Expert-parallel peers move in lock-step: who has fewer micro-batches computes some that count for nothing."""
    size = case.layout.expert
    for first in range(0, len(parts), size) if size > 1 else []:
        peers = parts[first : first + size]
        most = max(len(part) for part in peers)
        spare = next((part[0] for part in peers if part), None)
        for part in peers:
            if spare is not None:
                nothing = Sample(spare.tokens, spare.made, spare.advantage, spare.rollout_T, spare.old_T, 0.0)
                part += [nothing] * (most - len(part))
    return parts
