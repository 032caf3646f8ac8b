"""A coroutine in virtual time (:mod:`orchestrator.sim.virtual_loop`), for benches and tests."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, TypeVar

from orchestrator.sim.virtual_loop import MAX_CALLBACKS, MAX_SECONDS, LoopReport, SimulationError, VirtualTimeLoop

T = TypeVar("T")


class LeakError(SimulationError):
    """The main coroutine ended and left pending tasks, or exceptions that nobody retrieved."""


def run(
    main: Coroutine[Any, Any, T],
    *,
    seed: int | str = 0,
    shuffle: bool = False,
    max_seconds: float = MAX_SECONDS,
    max_callbacks: int = MAX_CALLBACKS,
) -> T:
    """Run ``main`` to its end in virtual time. A task or an exception that it leaves behind is a LeakError."""
    result, report = run_with_report(
        main, seed=seed, shuffle=shuffle, max_seconds=max_seconds, max_callbacks=max_callbacks
    )
    if report.leaked or report.unhandled:
        raise LeakError("left behind: " + "; ".join((*report.leaked, *report.unhandled)))
    return result


def run_with_report(
    main: Coroutine[Any, Any, T],
    *,
    seed: int | str = 0,
    shuffle: bool = False,
    max_seconds: float = MAX_SECONDS,
    max_callbacks: int = MAX_CALLBACKS,
) -> tuple[T, LoopReport]:
    """As :func:`run`, but what was left behind is only reported."""
    loop = VirtualTimeLoop(seed=seed, shuffle=shuffle, max_seconds=max_seconds, max_callbacks=max_callbacks)
    try:
        result = loop.run_until_complete(main)
    except BaseException as error:
        try:
            loop.finish()
        except SimulationError as second:
            error.add_note(f"and cancelling what was left did not end: {second}")
        raise
    return result, loop.finish()
