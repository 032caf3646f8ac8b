"""Runs a script of Megatron-LM's kind on a machine without CUDA: ``python -m tests.support.megatron_training SCRIPT ARGUMENTS``.

What stock ``megatron.training`` 0.19.2 needs to start is stubbed here: it is no part of the plugin. At the end it says how many
micro-batches were fed to gradient streams.
"""

from __future__ import annotations

import contextlib
import os
import runpy
import subprocess
import sys
import typing
import warnings
from pathlib import Path
from typing import Any

from tests.support.waiting import free_port

ROOT = Path(__file__).parents[2]
NEWEST = ROOT / ".venv/alternates/megatron-core-0.19.2"


def run_script(script: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """On one rank, with Megatron-Core 0.19.2."""
    environment = os.environ | {
        "PYTHONPATH": f"{NEWEST}{os.pathsep}{ROOT}",
        "TORCHDYNAMO_DISABLE": "1",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": "1",
        "RANK": "0",
        "LOCAL_RANK": "0",
    }
    command = [sys.executable, "-m", "tests.support.megatron_training", str(script), *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)


def _without_cuda() -> None:
    import torch
    import typing_extensions

    typing.override = typing_extensions.override  # type: ignore[attr-defined]  # the wheel is for Python 3.12
    from megatron_rlplugin import cpu

    torch.set_num_threads(1)
    cpu.activate()

    class CudaIsCpu(torch.overrides.TorchFunctionMode):  # type: ignore[misc]
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = dict(kwargs or {})
            if "cuda" in str(kwargs.get("device")):
                kwargs["device"] = "cpu"
            if kwargs.get("pin_memory"):
                del kwargs["pin_memory"]
            if func in (torch.Tensor.cuda, torch.Tensor.pin_memory):
                return args[0]
            return func(*args, **kwargs)

    class Stream:
        def wait_stream(self, *a: Any) -> None: ...

        def synchronize(self) -> None: ...

        wait_event = record_event = wait_stream

    CudaIsCpu().__enter__()
    c: Any = torch.cuda
    # Megatron alone is told that there is a GPU.
    c.is_available = lambda: sys._getframe(1).f_globals["__name__"].startswith("megatron.")
    c.device_count, c.set_device = lambda: 1, lambda *a: None
    c.get_device_capability = lambda *a: (9, 0)
    kind = {"major": 9, "minor": 0, "total_memory": 1 << 34, "multi_processor_count": 1}
    c.get_device_properties = lambda *a: type("P", (), kind)()
    for name in ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved"):
        setattr(c, name, lambda *a, **k: 0)
    c.reset_peak_memory_stats = c.manual_seed = c.synchronize = c.empty_cache = lambda *a, **k: None
    c.memory_stats, c.mem_get_info = lambda *a: {}, lambda *a: (1 << 33, 1 << 34)
    c.get_rng_state, c.set_rng_state = lambda *a: torch.get_rng_state(), lambda *a: None
    c.Stream, c.stream, c.current_stream = Stream, (lambda *a: contextlib.nullcontext()), lambda *a: Stream()

    import megatron.core.tensor_parallel as tp
    import megatron.training.initialize as initialize

    tp.model_parallel_cuda_manual_seed = lambda *a, **k: None
    initialize._compile_dependencies = lambda *a, **k: None
    initialize._set_random_seed = lambda *a, **k: torch.manual_seed(1)


def main() -> None:
    """The script, and what it fed."""
    warnings.filterwarnings("ignore")
    _without_cuda()
    from megatron_rlplugin.stream.gradient_stream import GradientStream

    fed, feed = 0, GradientStream.feed

    def counting(*args: Any, num_microbatches: int, **kwargs: Any) -> Any:
        nonlocal fed
        fed += num_microbatches
        return feed(*args, num_microbatches=num_microbatches, **kwargs)

    GradientStream.feed = counting  # type: ignore[assignment, method-assign]
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
    print("FED", fed, flush=True)


if __name__ == "__main__":
    main()
