"""An engine of a pool as a client of NVIDIA's MPS: the spatial alternative to admission in time (ROSE 4.1).

``rl-coserve mps --pool NAME`` (``orchestrator/ops/mps.py``) starts the daemon and watches it; an engine with
``--rl-kv-pool-mps PERCENT`` computes on at most so much of the GPU's threads, beside the others. Guarantees: the share is in the
environment before CUDA starts, or the engine does not start; without a driver, or without a watched daemon of this pool, that is
one ConfigError. MPS isolates no faults: what ends one client's context ends those of all.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
from collections.abc import MutableMapping
from pathlib import Path

from orchestrator.api import ConfigError
from vllm_rlplugin.kvpool.pages.cuda_driver import LIBRARY

FOLDER = Path("/dev/shm")
_SHARE = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"


def folder_of(pool: str) -> Path:
    """Of the pool's daemon: the same in ``orchestrator/ops/mps.py``."""
    return FOLDER / f"rlc-mps-{os.getuid()}-{pool}"


def join_mps(pool: str, percentage: int, environment: MutableMapping[str, str], *, library: str = LIBRARY) -> None:
    """Make this process, and all that it starts, clients from their first use of CUDA on. Raises ConfigError."""
    if not percentage:
        return
    try:
        ctypes.CDLL(library)  # only loaded: CUDA starts later, in the engine's process
    except OSError as error:
        fix = f"MPS divides an NVIDIA GPU, but there is no driver here ({error}); drop it"
        raise ConfigError("kv_pool_mps", percentage, fix) from error
    folder = folder_of(pool)
    if not _watched(folder):
        fix = f"the pool has no MPS daemon: start `rl-coserve mps --pool {pool}` first, and leave it running"
        raise ConfigError("kv_pool_mps", percentage, fix)
    environment["CUDA_MPS_PIPE_DIRECTORY"] = str(folder / "pipes")
    environment["CUDA_MPS_LOG_DIRECTORY"] = str(folder / "logs")
    environment[_SHARE] = str(percentage)


def check_mps(percentage: int, device: str, environment: MutableMapping[str, str]) -> None:
    """In the engine's process, which has begun. Raises ConfigError where it is no such client."""
    if not percentage:
        return
    if device != "cuda":
        raise ConfigError(
            "kv_pool_mps", percentage, f"MPS divides an NVIDIA GPU, but this engine runs on {device}; drop it"
        )
    if environment.get(_SHARE) != str(percentage):
        fix = f"CUDA started without it: start the engine with `vllm serve`, or call {__name__}.join_mps first"
        raise ConfigError("kv_pool_mps", percentage, fix)


def _watched(folder: Path) -> bool:
    """Whether who watches the daemon lives: it holds a lock, which the kernel drops with it."""
    try:
        file = os.open(folder / "watched", os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return False
    try:
        if os.fstat(file).st_uid != os.geteuid():
            return False
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(file)
    return False
