"""Where the worker of an engine in a pool runs: in the process of its scheduler, as blocks and pages change between two steps.

vLLM's default is that process on GPUs, and another one on CPU, where it binds OpenMP threads to cores for it; ``uni`` by name is
turned into that as well. Imports neither vLLM nor torch.
"""

from __future__ import annotations

from typing import Any

from orchestrator.api import ConfigError

UNIPROC = "vllm.v1.executor.uniproc_executor.UniProcExecutor"  # named in full, vLLM's CPU platform leaves it alone
_FLAG = "--distributed-executor-backend"


def single_process_executor(given: Any, *, on_cpu: bool) -> Any:
    """What ``--distributed-executor-backend`` is to be, where ``given`` was. Raises ConfigError for one with other processes.

    An executor of the user's own is believed: an engine whose KV cache is not in the pool ends its start in any case.
    """
    if given in ("mp", "ray", "external_launcher"):
        fix = "an engine in a pool (--rl-kv-pool) has its worker in the scheduler's process: leave this out"
        raise ConfigError(_FLAG, given, fix)
    return UNIPROC if on_cpu and given in (None, "uni") else given


def check_workers(sizes: dict[str, Any]) -> None:
    """``sizes``: flag -> number. Raises ConfigError for the first that asks for several workers."""
    for flag, size in sizes.items():
        if (size or 1) > 1:
            raise ConfigError(flag, size, "an engine in a pool (--rl-kv-pool) has one worker so far: leave this out")
