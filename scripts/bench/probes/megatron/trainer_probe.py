"""What the tests of the trainer train on, and one rank of a trainer as a program: it plays scenarios and writes what it saw.

Guarantees: the same seed gives the same trajectories on every rank; the answers hold digests of weights and optimizer state,
so that equality of bits is judged by whoever compares them.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import random
import sys
from collections.abc import Coroutine, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_rlplugin import parallel_layout
from megatron_rlplugin.model import unwrap
from megatron_rlplugin.tiny_model import create_qwen3, create_qwen3_moe
from megatron_rlplugin.trainer import sharded_state
from megatron_rlplugin.trainer.colocated_trainer import ColocatedTrainer
from megatron_rlplugin.trainer.learner import Learner
from megatron_rlplugin.trainer.megatron_trainer import MegatronTrainer
from megatron_rlplugin.weights import hf_bridge
from orchestrator.api import CoserveError, TrainBatch, TrainMetrics, TrainSample

VOCABULARY = 24  # divisible over two tensor-parallel ranks
_CLOCK = ("seconds", "stream_seconds", "stream_fed", "stream_restarts")


def tiny_folder(path: str | Path, **changes: Any) -> str:
    """A Qwen3 that trains in milliseconds."""
    shape = {"hidden_size": 32, "intermediate_size": 48, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 8}
    words = [f"w{index}" for index in range(VOCABULARY)]
    rest: dict[str, Any] = {"vocabulary": words, "max_positions": 64, "dtype": "float32", "seed": 5}
    return create_qwen3(str(path), **{**shape, **rest, **changes})


def tiny_mixture(path: str | Path) -> str:
    """A Qwen3-MoE of the same size."""
    words = [f"w{index}" for index in range(VOCABULARY)]
    return create_qwen3_moe(
        str(path),
        hidden_size=32,
        expert_intermediate_size=24,
        experts=4,
        experts_per_token=2,
        layers=2,
        heads=4,
        kv_heads=2,
        head_dim=8,
        vocabulary=words,
        max_positions=64,
        dtype="float32",
        seed=5,
    )


def make_batch(step: int, groups: int = 5, members: int = 3, seed: int = 0) -> TrainBatch:
    """Complete groups, one after the other: trajectories of several turns, rollout log-probs near uniform, mixed versions."""
    rng = random.Random(1000 * seed + step)
    samples = []
    for index in range(groups * members):
        mask = [0, 0, 0]
        for _ in range(rng.randint(1, 4)):
            mask += [1] * rng.randint(1, 5) + [0] * rng.randint(0, 3)
        generated = sum(mask)
        old = rng.randint(0, generated)
        samples.append(
            TrainSample(
                trajectory_id=f"s{step}-{index}",
                group_id=f"s{step}-g{index // members}",
                token_ids=tuple(rng.randrange(VOCABULARY) for _ in mask),
                loss_mask=tuple(mask),
                logprobs=tuple(-3.1 + rng.gauss(0, 0.3) if own else 0.0 for own in mask),
                versions=tuple(span for span in ((step - 1, old), (step, generated - old)) if span[1]),
                reward=float(rng.random() < 0.5),
            )
        )
    return TrainBatch(step=step, version=step, samples=tuple(samples))


def chunked(samples: Sequence[TrainSample], sizes: Iterable[int]) -> list[list[TrainSample]]:
    """The first of these samples in feeds of so many GROUPS each."""
    groups: list[list[TrainSample]] = []
    for sample in samples:
        if not groups or groups[-1][0].group_id != sample.group_id:
            groups.append([])
        groups[-1].append(sample)
    answer, start = [], 0
    for size in sizes:
        answer.append([sample for group in groups[start : start + size] for sample in group])
        start += size
    return answer


def train(
    trainer: MegatronTrainer, batch: TrainBatch, feeds: Iterable[int] = (), units: Sequence[int] | None = None
) -> TrainMetrics:
    """One step, with the first groups fed before in parts of these sizes. ``units``: of replicas that compute what is fed; a
    trainer that can leave its devices has only those there meanwhile."""
    if isinstance(trainer, ColocatedTrainer):
        for level, which in (("away", None), ("stream", units)):
            _run(trainer.residency(level, which))
    elif units is not None:
        trainer._replicas.compute_on(units)
    for part in chunked(batch.samples, feeds):
        _run(trainer.feed(part, batch.version))
    if isinstance(trainer, ColocatedTrainer):
        _run(trainer.residency("step"))
    else:
        trainer._replicas.compute_on(None)
    metrics: TrainMetrics = _run(trainer.train_step(batch))
    return metrics


def comparable(metrics: TrainMetrics) -> dict[str, float]:
    """All scalars but those of the clock and of the feeding itself."""
    return {name: value for name, value in metrics.values.items() if name not in _CLOCK}


def weights_digest(learner: Learner) -> str:
    """Of the whole model, in Hugging Face coordinates: the same for every layout that holds the same bits."""
    tensors = dict(hf_bridge.export_hf(learner.chunks))
    return _digest(tensors[name] for name in sorted(tensors))


def state_digest(learner: Learner) -> str:
    """Of this rank's weights and optimizer state: masters, moments, steps."""
    found = [parameter.detach() for parameter in learner.parameters()]
    found += [
        kept.tensors[name] for kept in sharded_state.kept_state(learner.optimizer) for name in sorted(kept.tensors)
    ]
    return _digest([*found, torch.tensor(sharded_state.steps_of(learner.optimizer))])


def _digest(tensors: Iterable[Tensor]) -> str:
    answer = hashlib.sha256()
    for tensor in tensors:
        answer.update(tensor.detach().to("cpu", copy=True).contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return answer.hexdigest()


def _run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(coroutine)


def _spoilt(trainer: MegatronTrainer, batch: TrainBatch, index: int) -> TrainBatch:
    """A batch in which one trajectory alone has the last token, whose embedding's gradient is infinite from now on."""
    last = VOCABULARY - 1
    samples = [replace(s, token_ids=tuple(min(token, last - 1) for token in s.token_ids)) for s in batch.samples]
    group = [place for place, sample in enumerate(samples) if sample.group_id == samples[index].group_id]
    for place in group:  # an advantage that is not 0
        samples[place] = replace(samples[place], reward=float(place == index))
    samples[index] = replace(samples[index], token_ids=(last, *samples[index].token_ids[1:]))
    embedding = unwrap(trainer._learner.model).embedding.word_embeddings.weight

    def spoil(gradient: Tensor) -> Tensor:
        answer = gradient.clone()
        answer[last] += torch.where(gradient[last] != 0, math.inf, 0.0)
        return answer

    embedding.register_hook(spoil)
    return replace(batch, samples=tuple(samples))


def play(scenario: dict[str, Any], rank: int, world_size: int, init_method: str) -> dict[str, Any]:
    """One scenario: train, optionally save, load and go on; returns metrics and digests, or the error."""
    arguments: dict[str, Any] = {
        "rank": rank,
        "world_size": world_size,
        "init_method": init_method,
        "total_steps": 10,
        "seed": 3,
        "batch_size": scenario.get("batch_size", 0),
    }
    answer: dict[str, Any] = {"metrics": []}
    try:
        kind = ColocatedTrainer if scenario.get("lends") else MegatronTrainer
        trainer = kind(model=scenario["model"], settings=scenario["settings"], **arguments)
        for step in range(scenario.get("steps", 2)):
            batch = make_batch(step, seed=scenario.get("seed", 0))
            if "spoil" in scenario and step == 1:
                batch = _spoilt(trainer, batch, scenario["spoil"])
            metrics = train(trainer, batch, scenario.get("feeds", ()), scenario.get("units"))
            answer["metrics"].append({**comparable(metrics), "fed": metrics.values.get("stream_fed", 0.0)})
            if step == scenario.get("save_after"):
                _run(trainer.save(scenario["folder"]))
                _run(trainer.train_step(make_batch(step + 1, seed=7)))  # beside the writing; must leave no trace
                _run(trainer.load(scenario["folder"]))
        answer["faulty"] = _run(trainer.status())["faulty"]
        answer["weights"] = weights_digest(trainer._learner)
        answer["state"] = state_digest(trainer._learner)
        answer["gap"] = _run(trainer.logprob_gap(make_batch(trainer._version).samples))
        _run(trainer.close())
    except CoserveError as error:
        answer["error"] = f"{type(error).__name__}: {error}"
    parallel_layout.leave_parallel()
    return answer


def main(arguments: Sequence[str]) -> None:
    """``SCENARIOS.json RANK WORLD_SIZE INIT_METHOD``: plays them all, writes ``RANK.json`` beside the file."""
    file, rank, world_size, init_method = Path(arguments[0]), int(arguments[1]), int(arguments[2]), arguments[3]
    torch.set_num_threads(1)
    scenarios = json.loads(file.read_text(encoding="utf-8"))
    answers = {name: play(scenario, rank, world_size, init_method) for name, scenario in scenarios.items()}
    parallel_layout.shutdown_parallel()
    (file.parent / f"{rank}.json").write_text(json.dumps(answers), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
