"""What the export guarantees, checked on real ranks, and what it costs: ``python -m scripts.bench.probes.megatron.export_probe``.

Starts the ranks of each case (gloo without CUDA), each of which checks its part and tells the first, which checks the
whole: every element of every Hugging Face tensor exactly once, values equal to the gathered export, the changes of the
optimizer steps put on the old weights equal to the new ones. Prints one JSON object a case. ``--hidden`` and ``--layers`` make
the model large enough for the costs to mean something.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rlplugin import tiny_model
from megatron_rlplugin.model import DTYPES, build_model, read_shape
from megatron_rlplugin.parallel_layout import (
    ParallelLayout,
    device,
    initialize_parallel,
    leave_parallel,
    shutdown_parallel,
)
from megatron_rlplugin.weights import hf_bridge
from megatron_rlplugin.weights.step_changes import StepChanges, place_of
from megatron_rlplugin.weights.tensor_places import tensor_pieces
from megatron_rlplugin.weights.weight_export import as_bytes, serving_shards
from orchestrator.api import ConfigError, RunError, ShardKey
from scripts.bench.probes.megatron.equality_probe import spawn


@dataclass(frozen=True, slots=True)
class Case:
    """A layout on so many ranks."""

    name: str
    world: int
    layout: ParallelLayout
    experts: int = 0
    tied: bool = False
    dtype: str = "bfloat16"


CASES = (
    Case("DP1", 1, ParallelLayout(distributed_optimizer=True)),
    Case("DP2", 2, ParallelLayout(distributed_optimizer=True)),
    Case("DP2, no distributed optimizer, fp32", 2, ParallelLayout(), dtype="float32"),
    Case("TP2", 2, ParallelLayout(tensor=2, distributed_optimizer=True)),
    Case("PP2, tied embeddings", 2, ParallelLayout(pipeline=2, distributed_optimizer=True), tied=True),
    Case("MoE EP2", 2, ParallelLayout(expert=2, distributed_optimizer=True), experts=4),
    Case("MoE DP2", 2, ParallelLayout(distributed_optimizer=True), experts=4),
    Case("TP2 x DP2", 4, ParallelLayout(tensor=2, distributed_optimizer=True)),
    Case("MoE EP2 x EDP2", 4, ParallelLayout(expert=2, distributed_optimizer=True), experts=4),
)


@dataclass(slots=True)
class Told:
    """What one rank tells of a case."""

    covered: dict[str, list[tuple[int, int, int]]]  # tensor -> (dim, start, stop) of its exports
    bytes: int
    wrong_values: int  # elements that differ from the gathered export
    peak_bytes: int  # most bytes alive beside the model while all of it was exported in bfloat16
    peak_bytes_kept: int  # the same with every tensor kept: what the meter must notice
    bound_bytes: int  # one bucket and the largest piece
    wrong_before: int  # bytes that the steps changed
    wrong_after: int  # bytes that differ after the changes were put on
    seconds: float  # of processor time, to find the changes


def measure(case: Case, folder: str, bucket_bytes: int, rate: float, steps: int) -> dict[str, Any]:
    """All checks of one case on this rank; on the first the verdict over all ranks, elsewhere nothing of use."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    chunks = build_model(read_shape(folder), case.dtype, case.layout)
    hf_bridge.load_hf(chunks, folder)
    sharded = case.layout.distributed_optimizer
    options = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=sharded)
    model = [DistributedDataParallel(chunk.config, options, chunk) for chunk in chunks]
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=rate,
            bf16=case.dtype == "bfloat16",
            params_dtype=DTYPES[case.dtype],
            use_distributed_optimizer=sharded,
            clip_grad=0.0,
        ),
        model,
        use_gloo_process_groups=False,
    )
    changes = StepChanges(lambda: serving_shards(model, case.dtype, bucket_bytes=bucket_bytes))
    changes.restart()
    full = dict(_gathered(model))
    told = Told({}, 0, 0, 0, 0, 0, 0, 0, 0.0)
    for key, value in serving_shards(model, case.dtype, bucket_bytes=bucket_bytes):
        told.covered.setdefault(key.tensor, []).append((key.dim, key.start, key.stop))
        told.bytes += value.nbytes
        told.wrong_values += int((_at(key, full[key.tensor]) != value).sum())
    told.peak_bytes = peak_bytes(model, bucket_bytes)
    told.peak_bytes_kept = peak_bytes(model, bucket_bytes, keep=True)
    told.bound_bytes = bucket_bytes + max(piece.read().nbytes for piece in tensor_pieces(model))
    before = {place_of(key): as_bytes(value)[2].copy() for key, value in changes.shards()}
    for step in range(1, steps + 1):
        began = time.process_time()
        with changes.watch_step():
            told.seconds += time.process_time() - began
            _step(model, optimizer, step)
            began = time.process_time()
        told.seconds += time.process_time() - began
    edits = changes.take()
    for key, value in changes.shards():
        place, new = place_of(key), as_bytes(value)[2]
        told.wrong_before += int((before[place] != new).sum())
        told.wrong_after += int((edits.applied(place, before[place]) != new).sum())
    everyones: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, asdict(told))
    return _verdict(case, full, everyones)


def peak_bytes(model: Sequence[Any], bucket_bytes: int, *, keep: bool = False) -> int:
    """Most bytes alive at a time beside the model while everything is exported, by torch's own account of allocations."""
    from torch.profiler import ProfilerActivity, profile

    kinds = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device().type == "cuda" else [])
    kept: list[Tensor] = []
    with profile(activities=kinds, profile_memory=True) as profiler:
        for _, value in serving_shards(model, bucket_bytes=bucket_bytes):
            if keep:
                kept.append(value)
        del value
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    alive = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        alive += event.nbytes()
        peak = max(peak, alive)
    return peak


def _step(model: Sequence[Any], optimizer: Any, step: int) -> None:
    """An optimizer step on gradients made up from the weights: they are equal wherever the weights are."""
    for chunk in model:
        for parameter in chunk.parameters():
            parameter.main_grad.copy_(torch.sin(parameter.detach().float() * 1000 * step))
        chunk.start_grad_sync()
        chunk.finish_grad_sync()
    taken, _, _ = optimizer.step()
    if not taken:
        raise RunError("the optimizer refused the step")


def _gathered(model: Sequence[Any]) -> Iterator[tuple[str, Tensor]]:
    """The whole model on every rank, experts and stages included: replicas are equal, so each gathers its own."""
    for name, value in hf_bridge.export_hf(model):
        yield name, value.clone()


def _at(key: ShardKey, tensor: Tensor) -> Tensor:
    return tensor if key.dim < 0 else tensor.narrow(key.dim, key.start, key.stop - key.start)


def _verdict(case: Case, full: dict[str, Tensor], everyone: Sequence[dict[str, Any]]) -> dict[str, Any]:
    counts = {name: torch.zeros(value.shape, dtype=torch.int32) for name, value in full.items()}
    for told in everyone:
        for name, ranges in told["covered"].items():
            for dim, start, stop in ranges:
                part = counts[name] if dim < 0 else counts[name].narrow(dim, start, stop - start)
                part += 1
    elements = sum(value.numel() for value in full.values())
    return {
        "case": case.name,
        "elements": elements,
        "not_once": sum(int((count != 1).sum()) for count in counts.values()),
        "bytes_by_rank": [told["bytes"] for told in everyone],
        "wrong_values": sum(told["wrong_values"] for told in everyone),
        "peak_bytes": max(told["peak_bytes"] for told in everyone),
        "peak_bytes_kept": max(told["peak_bytes_kept"] for told in everyone),
        "bound_bytes": min(told["bound_bytes"] for told in everyone),
        "wrong_before": sum(told["wrong_before"] for told in everyone),
        "wrong_after": sum(told["wrong_after"] for told in everyone),
        "seconds": max(told["seconds"] for told in everyone),
    }


def create_model(folder: str, case: Case, hidden: int, layers: int) -> None:
    """A model folder of this width; the same on every rank."""
    shape: dict[str, Any] = {
        "hidden_size": hidden,
        "layers": layers,
        "heads": hidden // 16,
        "kv_heads": max(hidden // 32, 2),
        "head_dim": 16,
        "vocabulary": [f"w{index}" for index in range(4 * hidden)],
        "max_positions": 64,
        "dtype": case.dtype,
        "seed": 5,
        "tied": case.tied,
    }
    if case.experts:
        shape |= {"expert_intermediate_size": 2 * hidden, "experts": case.experts, "experts_per_token": 2}
        tiny_model.create_qwen3_moe(folder, **shape)
    else:
        tiny_model.create_qwen3(folder, **shape, intermediate_size=4 * hidden)


def run_rank(cases: Sequence[Case], sizes: argparse.Namespace, rank: int, init_method: str) -> list[dict[str, Any]]:
    """The cases of one world on this rank, one layout after the other."""
    torch.set_num_threads(1)
    answers = []
    for case in cases:
        initialize_parallel(case.layout, rank, case.world, init_method)
        with tempfile.TemporaryDirectory(prefix="export-") as folder:
            create_model(folder, case, sizes.hidden, sizes.layers)
            answers.append(measure(case, folder, sizes.bucket_bytes, sizes.rate, sizes.steps))
        leave_parallel()
    shutdown_parallel()
    return answers


def chosen(names: Sequence[str], worlds: Sequence[int]) -> list[Case]:
    """The cases of these names (all when none is given) and world sizes. Raises ConfigError for a name that is none."""
    cases = {case.name: case for case in CASES}
    for name in names:
        if name not in cases:
            raise ConfigError("case", name, f"no such case; known: {'; '.join(cases)}")
    return [case for case in CASES if case.world in worlds and (not names or case.name in names)]


def run(names: Sequence[str], worlds: Sequence[int], options: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Measure the chosen cases, world size by world size; ``options`` are those of the command line."""
    found: list[dict[str, Any]] = []
    for world in sorted({case.world for case in chosen(names, worlds)}):
        mine = [case.name for case in chosen(names, worlds) if case.world == world]
        chosen_here = [word for name in mine for word in ("--case", name)]
        found += spawn(world, [*chosen_here, *options], program=("-W", "ignore", "-m", __spec__.name))
    return found


def main() -> None:
    """The command line; a rank of it where ``--rank`` is given."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", action="append", default=[], help="only this case (may be given several times)")
    parser.add_argument("--worlds", default="1,2,4", help="only these numbers of ranks")
    parser.add_argument("--hidden", type=int, default=64, help="width of the model; its vocabulary is four times that")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--bucket-bytes", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=2, help="optimizer steps between the two versions")
    parser.add_argument("--rate", type=float, default=1e-3, help="learning rate: how far a step moves the weights")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--world", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--rendezvous", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank is not None:
        print(json.dumps(run_rank(chosen(args.case, [args.world]), args, args.rank, args.rendezvous)))
        return
    given = {
        "--hidden": args.hidden,
        "--layers": args.layers,
        "--bucket-bytes": args.bucket_bytes,
        "--rate": args.rate,
        "--steps": args.steps,
    }
    options = [word for name, value in given.items() for word in (name, str(value))]
    for answer in run(args.case, [int(word) for word in args.worlds.split(",")], options):
        print(json.dumps(answer))


if __name__ == "__main__":
    main()
