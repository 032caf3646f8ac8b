"""Gives the engine's device memory to somebody else for a while: KV, and on CUDA the weights (RollPacker 4.4).

Guarantees: no KV that was computed before a release is ever read again: the prefix cache is reset and requests in flight
are preempted (tokens kept) before any memory goes. Nothing reads the weights while they are away. A release says by which
means it gave back how many bytes, measured.

On CUDA it is stock vLLM's sleep mode: ``kv`` discards the KV cache, ``weights`` is sleep level 1, ``dropped`` level 2. A CPU
build of vLLM has no sleep mode (its worker ignores the call, with a warning): there the pages of the KV cache are given
back to the operating system, whatever the level, and the weights stay where they are, in host memory. After ``dropped`` an
update is required all the same: the protocol does not depend on the device.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Callable, Sequence
from typing import Any

from orchestrator.api import RELEASE_LEVELS, CommandError, ReleaseResult

SLEEP_LEVEL = {"weights": 1, "dropped": 2}  # vLLM's
_MADV_DONTNEED = 4  # of Linux
_RESIDENT = 1  # the bit that mincore(2) sets for a page in memory


class MemoryRelease:
    """Of one paused in-process engine. ``level`` is "" while nothing is released. ``rpc`` calls a method of every worker."""

    def __init__(self, core: Any, rpc: Callable[..., list[Any]], *, on_cpu: bool, sleep_mode: bool) -> None:
        self._core = core
        self._rpc = rpc
        self._on_cpu = on_cpu
        self._sleep_mode = sleep_mode
        self._result = ReleaseResult("", 0, 0, 0.0, "")

    @property
    def level(self) -> str:
        """What is released now."""
        return self._result.level

    def release(self, level: str) -> ReleaseResult:
        """While paused, and nothing in flight. The level that is released already, or a lesser one, changes nothing.

        ``seconds`` is 0 here: the caller knows when it began. Any other error than CommandError leaves the engine in no
        defined state.
        """
        if level not in RELEASE_LEVELS:
            raise CommandError("invalid_request", f"release {level!r}: the levels are {', '.join(RELEASE_LEVELS)}")
        if not self._sleep_mode:
            raise CommandError("no_sleep_mode", "start the engine with sleep_mode to release its memory")
        if self.level and RELEASE_LEVELS.index(level) <= RELEASE_LEVELS.index(self.level):
            return self._result
        if self.level == "weights":  # vLLM keeps the first policy of an allocation that sleeps
            raise CommandError("released", "its weights sleep on the host; reclaim before they are dropped")
        preempted = len(self._core.scheduler.running)
        self._core._reset_caches()
        if level in SLEEP_LEVEL:  # a fetch may be reading them; and to what was dropped no difference can be applied
            self._rpc("rl_leave_weights", args=(level == "dropped",))
        freed, how = self._pages() if self._on_cpu else self._sleep(level)
        before = self._result
        self._result = ReleaseResult(level, before.bytes + freed, before.preempted + preempted, 0.0, how)
        return self._result

    def reclaim(self) -> str:
        """Take the memory again; still paused. Returns the level that was released, "" for none."""
        level = self.level
        if level and not self._on_cpu:
            self._core.wake_up()
            self._core.pause_scheduler("keep", clear_cache=False)  # waking up resumed it; no step has been made since
        self._result = ReleaseResult("", 0, 0, 0.0, "")
        return level

    def _sleep(self, level: str) -> tuple[int, str]:
        """Stock vLLM's, on CUDA. The figure is the growth of the devices' free memory; others allocate there too."""
        free = sum(self._rpc("rl_free_memory"))
        if level == "kv":
            # What EngineCore.release_kv_cache_memory does, which in-process refuses while an id that finished in the last
            # step waits for the next one.
            self._core.model_executor.discard(("kv_cache",))
            how = "vLLM discarded the KV cache; the weights stay on the device"
        else:
            self._core.sleep(SLEEP_LEVEL[level], mode="keep")
            kept = "the weights are on the host" if level == "weights" else "the weights are discarded"
            how = f"vLLM sleep level {SLEEP_LEVEL[level]}: KV cache discarded, {kept}"
        return max(0, sum(self._rpc("rl_free_memory")) - free), how

    def _pages(self) -> tuple[int, str]:
        how = "vLLM has no sleep mode on CPU: pages of the KV cache returned to the system, the weights stay in memory"
        return sum(self._rpc("rl_give_back_kv")), how


def return_pages(tensors: Sequence[Any]) -> int:
    """Return the memory of these CPU tensors to the system; they read as zeros afterwards, and take it again when they
    are written. Returns the bytes that were in memory and are not now; 0 where the system has no such call."""
    if not sys.platform.startswith("linux"):
        return 0
    storages = {storage.data_ptr(): storage.nbytes() for storage in (tensor.untyped_storage() for tensor in tensors)}
    return sum(_return_range(address, size) for address, size in storages.items())


def _return_range(address: int, size: int) -> int:
    """Whole pages inside [address, address + size)."""
    start = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    length = (address + size) // mmap.PAGESIZE * mmap.PAGESIZE - start
    if length <= 0:
        return 0
    libc = ctypes.CDLL(None, use_errno=True)
    before = _resident(libc, start, length)
    if libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), _MADV_DONTNEED):
        raise OSError(ctypes.get_errno(), "madvise of the KV cache")
    return before - _resident(libc, start, length)


def _resident(libc: ctypes.CDLL, start: int, length: int) -> int:
    """Bytes of this range that are in memory."""
    pages = (ctypes.c_ubyte * (length // mmap.PAGESIZE))()
    if libc.mincore(ctypes.c_void_p(start), ctypes.c_size_t(length), pages):
        raise OSError(ctypes.get_errno(), "mincore of the KV cache")
    return sum(page & _RESIDENT for page in pages) * mmap.PAGESIZE
