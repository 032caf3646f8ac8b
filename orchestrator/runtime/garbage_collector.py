"""Python's cyclic garbage collector, set so that it does not stop the event loop.

A collection of the oldest generation looks at every container in the process: 100 to 200 ms with some thousand trajectories
in flight, and Python starts one whenever its own counts say so. What there is at the start (modules, configuration) is taken
out of its sight for good, and the oldest generation is collected rarely; nearly all that a run makes is freed without it.
"""

from __future__ import annotations

import gc

YOUNG, MIDDLE, OLD = 200, 2, 6000  # new containers, young collections, middle collections before the next


def calm() -> None:
    """For the process of a long run, once its parts are made. What cycles can hold back until the next collection of the
    oldest generation is some two million containers."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG, MIDDLE, OLD)
