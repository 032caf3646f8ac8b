"""Does a trainer fit its devices, and what would make it fit: the planned step of its first and its last pipeline rank.

Guarantees: nothing is started but programs that end (:mod:`megatron_rlplugin.memory.planned_step`), which see no device; what
is said to fit was run so. Experts' tokens are counted with each of :data:`IMBALANCES`. Device memory that no tensor of ours has
is :data:`RESERVE`, stated and not measured.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from typing import Any

from megatron_rlplugin.memory.rank_memory import (
    ACTIVATIONS,
    OPTIMIZER,
    RankMemory,
    StepRequest,
    flat_settings,
    optimizer_bytes,
)
from megatron_rlplugin.model_families import read_shape
from orchestrator.api import ConfigError, RunError
from orchestrator.settings.trainer_settings import TrainerSection

GB = 1_000_000_000
IMBALANCES = (1.0, 2.0)  # tokens that reach the fullest rank's experts, over the mean
# Bytes of a process on its device beside tensors, and the share of activations and logits that the caching allocator cannot use.
RESERVE = {"CUDA context and kernels": 0.6 * GB, "NCCL, a group of ranks": 0.3 * GB}
FRAGMENTATION = 0.04
_LONGEST = 1800.0  # seconds of one planned step

_RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
_PRECISION_AWARE = {
    "use_precision_aware_optimizer": True,
    "exp_avg_dtype": "bfloat16",
    "exp_avg_sq_dtype": "bfloat16",
}
_OFFLOAD = {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 1.0}


@dataclass(frozen=True, slots=True)
class RankPlan:
    """One rank of the trainer. ``memory``: of its tensors; ``reserve``: of its process; ``imbalance``: of its experts' tokens, 0
    without experts."""

    stage: str
    memory: RankMemory
    reserve: int
    imbalance: float = 0.0

    @property
    def total(self) -> int:
        """Bytes of its device at the peak of a step."""
        return self.memory.total + self.reserve


@dataclass(frozen=True, slots=True)
class TrainerPlan:
    """The ranks that were run, what of ``[trainer]`` would make them fit ("": they fit, or how large a device is is not known),
    the bytes of that plan's fullest rank, and the same keys of ``[trainer]`` with their values."""

    ranks: tuple[RankPlan, ...]
    cure: str = ""
    cured: int = 0
    changes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def fullest(self) -> RankPlan:
        """The rank that needs most."""
        return max(self.ranks, key=lambda rank: rank.total)


def plan_trainer(
    folder: str,
    settings: Mapping[str, Any],
    dtype: str,
    longest: int,
    capacity: int | None = None,
    differences: bool = False,
    resting: bool = False,
    overlap: bool = False,
) -> TrainerPlan:
    """``longest``: tokens of the longest row; micro-batches hold as many as ``trainer.micro_batch_tokens`` says.
    ``capacity``: bytes of a device, where they are known. ``differences``: weights are published as what steps change;
    ``overlap``: while the next step runs. ``resting``: only what is there between steps, which takes a sixth of the time with
    experts; nothing is tried that would make it fit. Raises ConfigError as the trainer's start would."""
    settings = flat_settings(settings)
    more = {"differences": differences, "resting": resting, "overlap": overlap}
    ranks = _run(folder, settings, dtype, longest, **more)
    plan = TrainerPlan(ranks)
    if resting or capacity is None or plan.fullest.total <= capacity:
        return plan
    tried, changes = dict(settings), dict[str, Any]()
    for words, change in _cures(tried):
        tried, changes = {**tried, **change}, {**changes, **change}
        ranks = (
            _with_optimizer(ranks, tried, dtype)
            if _only_optimizer(change)
            else _run(folder, tried, dtype, longest, **more)
        )
        if (total := TrainerPlan(ranks).fullest.total) <= capacity:
            return replace(plan, cure=words, cured=total, changes=changes)
    return replace(plan, cure="more devices a replica: raise trainer.tensor_parallel or trainer.pipeline_parallel")


def _cures(settings: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """(in words, the settings) of what is tried, one on top of the other, cheapest first."""
    section = TrainerSection.from_dict(dict(settings))
    megatron, words = dict(section.megatron), []
    if section.data_parallel > 1 and not section.distributed_optimizer:
        words.append("trainer.distributed_optimizer = true")
        yield ", ".join(words), {"distributed_optimizer": True}
    for option, change in (
        ("recompute_granularity", _RECOMPUTE),
        ("use_precision_aware_optimizer", _PRECISION_AWARE),
        ("optimizer_cpu_offload", _OFFLOAD),
    ):
        distributed = section.distributed_optimizer or section.data_parallel > 1
        if not megatron.get(option) and (option != "use_precision_aware_optimizer" or distributed):
            megatron |= change
            words += [f"trainer.megatron.{key} = {json.dumps(value)}" for key, value in change.items()]
            yield ", ".join(words), {"megatron": dict(megatron)}


def _only_optimizer(change: Mapping[str, Any]) -> bool:
    """Whether the step's tensors stay what they are but for masters and moments."""
    options = change.get("megatron", {})
    return bool(options.get("use_precision_aware_optimizer") or options.get("optimizer_cpu_offload"))


def _with_optimizer(ranks: Sequence[RankPlan], settings: Mapping[str, Any], dtype: str) -> tuple[RankPlan, ...]:
    """The same ranks with another variant of the optimizer, counted by its bytes a parameter."""
    found = []
    for rank in ranks:
        device, host = optimizer_bytes(settings.get("megatron", {}), rank.memory.sharded, dtype)
        memory = replace(
            rank.memory,
            device={**rank.memory.device, OPTIMIZER: device},
            host={**rank.memory.host, OPTIMIZER: host},
        )
        found.append(replace(rank, memory=memory))
    return tuple(found)


def _run(folder: str, settings: Mapping[str, Any], dtype: str, longest: int, **published: bool) -> tuple[RankPlan, ...]:
    section = TrainerSection.from_dict(dict(settings))
    shape = read_shape(folder)
    world = section.ranks
    tokens = min(section.pack_tokens or longest, shape.max_position_embeddings)
    rows = 1 if section.pack_tokens else max(1, min(section.micro_batch_tokens // tokens, section.micro_batch_size))
    stages = {"first stage": 0, "last stage": world - 1} if section.pipeline_parallel > 1 else {"all": 0}
    request = StepRequest(folder, dict(settings), dtype, 0, world, tokens, rows, **published)
    asked = [
        (stage, imbalance, replace(request, rank=rank, imbalance=imbalance or 1.0))
        for stage, rank in stages.items()
        for imbalance in (IMBALANCES if shape.num_experts and not request.resting else (0.0,))
    ]
    with ThreadPoolExecutor(max_workers=min(len(asked), os.cpu_count() or 1)) as pool:
        answers = list(pool.map(run_request, [request for _, _, request in asked]))
    return tuple(
        RankPlan(stage, memory, _reserve(section, memory), imbalance)
        for (stage, imbalance, _), memory in zip(asked, answers, strict=True)
    )


def _reserve(section: TrainerSection, memory: RankMemory) -> int:
    kinds = ("tensor", "pipeline", "context", "data", "expert")
    groups = sum(1 for kind in kinds if getattr(section, f"{kind}_parallel") > 1)
    moving = memory.device[ACTIVATIONS] + memory.device["logits"]
    return round(
        RESERVE["CUDA context and kernels"] + groups * RESERVE["NCCL, a group of ranks"] + FRAGMENTATION * moving
    )


def run_request(request: StepRequest) -> RankMemory:
    """One planned step in a process of its own; asked again, the answer it gave. Raises ConfigError; RunError: it failed."""
    return answer_of(_printed(json.dumps(asdict(request)), request.rank))


@cache
def _printed(request: str, rank: int) -> str:
    program = [sys.executable, "-W", "ignore", "-m", "megatron_rlplugin.memory.planned_step", request]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    try:
        ended = subprocess.run(program, capture_output=True, text=True, timeout=_LONGEST, env=environment)
    except subprocess.TimeoutExpired as error:
        raise RunError(f"the plan of rank {rank} did not end within {_LONGEST:g} s") from error
    if ended.returncode:
        last = (ended.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise RunError(f"the plan of rank {rank} failed: {last}")
    return ended.stdout


def answer_of(printed: str) -> RankMemory:
    """What the program said. Raises ConfigError where it said so."""
    answer = json.loads(printed.splitlines()[-1])
    if "error" in answer:
        raise ConfigError(*answer["error"])
    return RankMemory(**answer)
