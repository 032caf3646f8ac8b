"""The Triton kernels of weight deltas on a GPU: exact, and how fast: ``python -m scripts.bench.probes.megatron.delta_gpu_probe``.

Made-up bf16 weights, of which a share changes by one step. ``gather`` must find just the positions and steps that the NumPy
reference finds, ``scatter`` must give the new weights bit for bit, and take them back; else it fails. Speeds are GB/s of dense
weights that are looked at, best of the rounds, by CUDA's events; ``copy`` is a copy of as many bytes on the device. Prints one
JSON object on the last line. Under ``TRITON_INTERPRET=1`` it runs without a GPU, and its speeds say nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import triton

from megatron_rlplugin.weights import gpu_delta
from orchestrator.transfer.delta.reference_codec import steps_between

DENSITIES = (0.001, 0.01, 0.05)  # RL steps of large models change about 1 % of bf16 weights (ROSE, figure 11a)


def changed(weights: int, density: float, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Old and new weights: bf16, every bit pattern among them."""
    generator = torch.Generator(device=device).manual_seed(8)
    old = torch.randint(-(1 << 15), 1 << 15, (weights,), generator=generator, device=device, dtype=torch.int16)
    moves = torch.rand(weights, generator=generator, device=device) < density
    new = torch.where(moves, old ^ 1, old)
    return old.view(torch.bfloat16), new.view(torch.bfloat16)


def seconds(work: Callable[[], object], rounds: int, device: torch.device) -> float:
    """The best of so many, after one that does not count."""
    work()
    found: list[float] = []
    for _ in range(rounds):
        if device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            work()
            end.record()
            torch.cuda.synchronize(device)
            found.append(begin.elapsed_time(end) / 1000)
        else:
            started = time.perf_counter()
            work()
            found.append(time.perf_counter() - started)
    return min(found)


def require_exact(old: torch.Tensor, new: torch.Tensor, positions: torch.Tensor, steps: torch.Tensor) -> None:
    """Raises RuntimeError where the kernels and the NumPy reference differ."""
    before, after = (tensor.view(torch.int16).cpu().numpy().view(np.uint16) for tensor in (old, new))
    where = np.flatnonzero(before != after)
    if not np.array_equal(positions.cpu().numpy(), where):
        raise RuntimeError(f"gather found {positions.numel()} positions, the reference {where.size}, or others")
    if not np.array_equal(steps.cpu().numpy(), steps_between(before[where], after[where])):
        raise RuntimeError("gather found other steps than the reference")
    base = old.clone()
    gpu_delta.scatter_steps(base, positions, steps)
    if not torch.equal(base.view(torch.int16), new.view(torch.int16)):
        raise RuntimeError("scatter did not give the new weights")
    gpu_delta.scatter_steps(base, positions, steps, back=True)
    if not torch.equal(base.view(torch.int16), old.view(torch.int16)):
        raise RuntimeError("scatter did not take them back")


def measure(weights: int, rounds: int, device: torch.device) -> dict[str, Any]:
    """See the module. Raises RuntimeError."""
    gigabytes, rows = 2 * weights / 1e9, []
    for density in DENSITIES:
        old, new = changed(weights, density, device)
        positions, steps = gpu_delta.gather_steps(old, new)
        require_exact(old, new, positions, steps)
        base, copy = old.clone(), torch.empty_like(old)
        found = {
            "gather": seconds(lambda: gpu_delta.gather_steps(old, new), rounds, device),  # noqa: B023
            "scatter": seconds(lambda: gpu_delta.scatter_steps(base, positions, steps), rounds, device),  # noqa: B023
            "copy": seconds(lambda: copy.copy_(old), rounds, device),  # noqa: B023
        }
        row = {"density": density, "changes": positions.numel(), "seconds": found}
        rows.append({**row, "gb_per_s": {name: gigabytes / value for name, value in found.items()}})
    return {
        "weights": weights,
        "rounds": rounds,
        "exact": True,
        "rows": rows,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "interpreter",
        "versions": {"torch": torch.__version__, "triton": triton.__version__, "cuda": torch.version.cuda},
        "pid": os.getpid(),
    }


def main() -> int:
    """Exit code 0: exact."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--weights", type=int, default=1 << 29, help="how many; 1 GiB by default")
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if not interpreted and not torch.cuda.is_available():
        print("no CUDA device, and TRITON_INTERPRET is not 1: nothing was measured", file=sys.stderr)
        return 2
    device = torch.device("cpu" if interpreted else "cuda")
    print(json.dumps(measure(options.weights, options.rounds, device)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
