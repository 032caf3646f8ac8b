"""Python's cyclic garbage collector, set so that it does not stop the event loop.

A collection of the oldest generation looks at every container in the process: 0.4 s with 4,000 trajectories in flight, over 1 s
with 10,000, and it finds nothing there, as nearly all that a run makes is freed without it. So what has survived tens of
thousands of new containers is taken out of its sight (``gc.freeze``), again and again. Frozen containers are still freed when
the last reference to them goes; only cycles that live that long stay. These cannot add up: once the process has twice the memory
that it had at the last look at everything, and at least 2 GiB more, everything is looked at. That stops the loop as long as it
ever did, but a handful of times in the life of a run, and never while its memory is flat.
"""

from __future__ import annotations

import gc
import resource
import sys
from typing import Any

YOUNG, MIDDLE, OLD = 200, 2, 50  # new containers, young collections, middle collections before the next
GROWTH = 2 << 30  # bytes
_UNIT = 1 if sys.platform == "darwin" else 1024  # bytes, of ru_maxrss


def most_memory() -> int:
    """Bytes that this process has had at most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _UNIT


class Survivors:
    """Called by Python around each collection. It acts after one of the oldest generation, where nothing may be collected: what
    it puts back into sight is looked at by Python's next one."""

    def __init__(self) -> None:
        self._looked = most_memory()  # bytes at the last look at everything
        self._looks = False

    def __call__(self, phase: str, info: dict[str, Any]) -> None:
        """See ``gc.callbacks``."""
        if phase != "stop" or info["generation"] != 2:
            return
        now = most_memory()
        if not self._looks and now >= max(2 * self._looked, self._looked + GROWTH):
            self._looks = True
            gc.unfreeze()
            return
        if self._looks:
            self._looks, self._looked = False, now
        gc.freeze()


_survivors: Survivors | None = None


def calm() -> None:
    """For the process of a long run, once its parts are made. Idempotent."""
    global _survivors
    if _survivors in gc.callbacks:
        gc.callbacks.remove(_survivors)
    gc.collect()
    gc.freeze()
    gc.collect()  # of nothing: Python puts the oldest generation off until it has a quarter more than the last one left
    gc.set_threshold(YOUNG, MIDDLE, OLD)
    _survivors = Survivors()
    gc.callbacks.append(_survivors)
