"""Shows that streamed training is batch training, layout by layout: ``python -m scripts.bench.probes.megatron.equality_probe``.

Starts as many ranks as a layout needs (gloo without CUDA; with it NCCL, one GPU a rank, and layouts that need more GPUs
than there are stand under ``skipped``). Layouts of one world size share its ranks. Prints one JSON object: ``cases``
(what ``scripts.bench.probes.megatron.equality`` measures of each), ``skipped``, ``megatron`` (its version), ``device``.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from megatron_rlplugin.parallel_layout import ParallelLayout, initialize_parallel, leave_parallel, shutdown_parallel
from orchestrator.api import ConfigError, RunError
from scripts.bench.probes.megatron.equality_data import LOSSES, Case

WORLDS = (1, 2, 4)
LIMIT = 3600.0  # seconds the cases of one set of ranks may take on a machine that does other things
_LOSSES = ("token-mean", "sequence-mean", "dapo")
TOGETHER = 10  # cases of one set of ranks: gloo keeps the threads of groups that were left, and slows down
GPU_ONLY = ("context parallelism", "packed THD sequences", "Transformer Engine's grouped experts")


def matrix() -> list[Case]:
    """Every layout with each denominator, with the distributed optimizer, and without clipping; then single options."""
    layouts: list[tuple[str, int, dict[str, Any], bool]] = [
        ("DP1", 1, {}, False),
        ("DP2", 2, {}, False),
        ("DP4", 4, {}, False),
        ("TP2", 2, {"tensor": 2}, False),
        ("PP2", 2, {"pipeline": 2}, False),
        ("MoE EP2", 2, {"expert": 2}, True),
        ("TP2 x DP2", 4, {"tensor": 2}, False),
        ("PP2 x DP2", 4, {"pipeline": 2}, False),
        ("MoE EP2 x EDP2", 4, {"expert": 2}, True),
    ]
    cases = []
    for name, world, sizes, experts in layouts:
        whole, sharded = ParallelLayout(**sizes), ParallelLayout(**sizes, distributed_optimizer=True)
        cases += [Case(f"{name}, {loss}", world, whole, loss=loss, experts=experts) for loss in _LOSSES]
        cases += [Case(f"{name}, dist-opt, {loss}", world, sharded, loss=loss, experts=experts) for loss in _LOSSES[:2]]
        cases.append(Case(f"{name}, no clipping", world, whole, clip=0.0, experts=experts))
    split = ParallelLayout(distributed_optimizer=True)
    return [
        *cases,
        Case("DP2, float weights", 2, loss="weighted"),
        Case("DP2, bf16 weights", 2, dtype="bfloat16"),
        Case("DP2, dist-opt, bf16 weights", 2, split, dtype="bfloat16"),
        Case("DP2, overlapped reduce", 2, overlap_reduce=True),
        Case("DP2, dist-opt, overlapped reduce and gather", 2, split, overlap_reduce=True, overlap_gather=True),
        Case("DP2, DDP that averages", 2, ddp_mean=True),
        Case("DP2, overlapped, DDP that averages", 2, overlap_reduce=True, ddp_mean=True),
        Case("MoE DP2", 2, experts=True),
        Case("TP2 + SP", 2, ParallelLayout(tensor=2, sequence=True)),
        Case("MoE TP2 + SP", 2, ParallelLayout(tensor=2, sequence=True), experts=True),
        Case("PP2 x VPP2", 2, ParallelLayout(pipeline=2, virtual=2)),
        Case("PP2, tied embeddings", 2, ParallelLayout(pipeline=2), tied=True),
        Case("TP2 x PP2, tied embeddings, dist-opt", 4, ParallelLayout(2, 2, distributed_optimizer=True), tied=True),
        Case("MoE EP2 x PP2", 4, ParallelLayout(pipeline=2, expert=2), experts=True),
    ]


QUICK = (
    "DP1, token-mean",
    "DP2, token-mean",
    "DP2, dist-opt, sequence-mean",
    "DP2, dapo",
    "DP2, float weights",
    "DP2, dist-opt, overlapped reduce and gather",
    "DP2, DDP that averages",
    "TP2, token-mean",
    "PP2, sequence-mean",
    "PP2 x VPP2",
    "MoE EP2, token-mean",
    "TP2 x DP2, dist-opt, token-mean",
    "PP2 x DP2, dapo",
    "MoE EP2 x EDP2, token-mean",
)


def chosen(*, quick: bool, names: Sequence[str] = (), worlds: Sequence[int] = WORLDS) -> list[Case]:
    """The cases of these names (all, or the quick ones, when none is given) and world sizes. ConfigError: no such one."""
    cases = {case.name: case for case in matrix()}
    wanted = names or (QUICK if quick else list(cases))
    for name in wanted:
        if name not in cases:
            raise ConfigError("case", name, f"no such case; known: {'; '.join(cases)}")
    return [cases[name] for name in wanted if cases[name].world in worlds]


def run_rank(cases: Sequence[Case], steps: int, rank: int, world: int, init_method: str) -> list[dict[str, Any]]:
    """All cases of one world size on this rank, one layout after the other in the same process group."""
    from scripts.bench.probes.megatron.equality import measure

    torch.set_num_threads(1)
    if torch.cuda.is_available():  # sums in a fixed order and in full fp32, as the comparison needs
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    figures = []
    for case in cases:
        initialize_parallel(case.layout, rank, world, init_method)
        begun = time.monotonic()
        figures.append({**measure(case, steps), "seconds": round(time.monotonic() - begun, 1)})
        leave_parallel()
        if rank == 0:
            print(json.dumps(figures[-1]), file=sys.stderr, flush=True)
    shutdown_parallel()
    return figures


def spawn(
    world: int, arguments: Sequence[str], *, program: Sequence[str] = ("-m", __spec__.name), limit: float = LIMIT
) -> Any:
    """Start ``world`` ranks of a Python program that takes ``--rank``, ``--world``, ``--rendezvous`` and ``arguments``.

    Returns what rank 0 printed last, parsed. RunError when a rank fails or they take longer than ``limit`` seconds.
    """
    with tempfile.TemporaryDirectory(prefix="equality-") as folder:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
        if not torch.cuda.is_available():
            environment["GLOO_SOCKET_IFNAME"] = "lo"
        shared = ["--world", str(world), "--rendezvous", f"file://{folder}/rendezvous", *arguments]
        ranks, logs = [], [Path(folder) / f"{rank}.log" for rank in range(world)]
        for rank in range(world):
            with (Path(folder) / f"{rank}.json").open("w") as out, logs[rank].open("w") as log:
                command = [sys.executable, *program, "--rank", str(rank), *shared]
                ranks.append(subprocess.Popen(command, stdout=out, stderr=log, env=environment))
        try:
            _wait(ranks, logs, time.monotonic() + limit)
        finally:
            for process in ranks:
                process.kill()
                process.wait()
        return json.loads((Path(folder) / "0.json").read_text().strip().splitlines()[-1])


def _wait(ranks: Sequence[subprocess.Popen[bytes]], logs: Sequence[Path], deadline: float) -> None:
    """Until all ranks ended well. The first that fails ends the wait: the others would wait for it in a collective."""
    while any(process.poll() is None for process in ranks):
        for rank, process in enumerate(ranks):
            if process.poll():
                raise RunError(
                    f"rank {rank} ended with exit code {process.returncode}: {logs[rank].read_text()[-2000:]}"
                )
        if time.monotonic() > deadline:
            raise RunError(f"the ranks did not end in time; rank 0 said: {logs[0].read_text()[-2000:]}")
        time.sleep(0.1)
    for rank, process in enumerate(ranks):
        if process.returncode:
            raise RunError(f"rank {rank} ended with exit code {process.returncode}: {logs[rank].read_text()[-2000:]}")


def run(*, quick: bool, steps: int, names: Sequence[str] = (), worlds: Sequence[int] = WORLDS) -> dict[str, Any]:
    """Measure the chosen cases, world size by world size."""
    from megatron.core import __version__

    devices = torch.cuda.device_count() if torch.cuda.is_available() else None
    cases = chosen(quick=quick, names=names, worlds=worlds)
    skipped = [
        f"{case.name}: needs {case.world} GPUs" for case in cases if devices is not None and case.world > devices
    ]
    if devices is None:
        skipped += [f"{what}: needs a GPU" for what in GPU_ONLY]
    figures: list[dict[str, Any]] = []
    for world in sorted({case.world for case in cases}):
        mine = [case.name for case in cases if case.world == world]
        for at in range(0, len(mine), TOGETHER) if devices is None or world <= devices else ():
            some = (word for name in mine[at : at + TOGETHER] for word in ("--case", name))
            figures += spawn(world, ["--steps", str(steps), *some])
    return {
        "cases": figures,
        "skipped": skipped,
        "steps": steps,
        "losses": sorted(LOSSES),
        "megatron": __version__,
        "torch": torch.__version__,
        "device": "cpu, gloo" if devices is None else f"{torch.cuda.get_device_name()}, nccl",
        "pid": os.getpid(),
    }


def main() -> None:
    """The command line; a rank of it where ``--rank`` is given."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20, help="training steps of each case")
    parser.add_argument("--quick", action="store_true", help="one case of each kind")
    parser.add_argument("--case", action="append", default=[], help="only this case (may be given several times)")
    parser.add_argument("--worlds", default="1,2,4", help="only these numbers of ranks")
    parser.add_argument("--list", action="store_true", help="print the cases and end")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--world", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--rendezvous", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank is not None:
        cases = chosen(quick=False, names=args.case)
        print(json.dumps(run_rank(cases, args.steps, args.rank, args.world, args.rendezvous)))
        return
    worlds = [int(word) for word in args.worlds.split(",")]
    if args.list:
        for case in chosen(quick=args.quick, names=args.case, worlds=worlds):
            print(json.dumps(dataclasses.asdict(case)))
        return
    print(json.dumps(run(quick=args.quick, steps=args.steps, names=args.case, worlds=worlds)))


if __name__ == "__main__":
    main()
