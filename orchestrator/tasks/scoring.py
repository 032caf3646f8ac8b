"""Scoring that others wrote, of what a model wrote: in a process that waits for it, with a limit of time.

A scorer may take for ever over an answer of eleven characters (``Fraction("1e999999999")``), and nothing stops it in
the thread of the event loop. Guarantees of :func:`score_apart`: the loop goes on; after ``seconds`` the process is
killed with all that it started, and the trajectory fails; processes are kept, so that a call costs well under a
millisecond; they end with the loop. A scorer whose time is bounded by its rules (a game's, a number of at most so
many digits) has no need of it, and is called inline: all built-in tasks but ``reasoning_gym``.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator
from typing import Any
from weakref import WeakKeyDictionary

from orchestrator.api import RetryableError, TrajectoryError
from orchestrator.rewards.function_protocol import TIMED_OUT
from orchestrator.rewards.process_pool import FunctionError, FunctionPool, Throttled

SECONDS = 5.0  # of one score; less than a call into an environment may take
PROCESSES = 2
_IDLE_SECONDS = 300.0
_OWN_PROCESS = "orchestrator.environments.environment_process"  # is killed as a whole when a call takes too long

_Kept = tuple[AsyncGenerator[FunctionPool, None], FunctionPool]
_starting: set[asyncio.Task[None]] = set()  # so that they are not forgotten
_pools: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, _Kept]] = WeakKeyDictionary()


async def score_apart(target: str, event: Any, seconds: float = SECONDS) -> Any:
    """What ``module:function`` answers to ``event``; both are JSON. Raises ValueError with what it raised, TrajectoryError
    when it took too long or has no answer."""
    pool = await _pool_of(target, seconds)
    try:
        return await pool.invoke(event)
    except FunctionError as error:
        if error.kind == TIMED_OUT:
            raise TrajectoryError("scoring_timeout", f"{target}: over {seconds:g} s") from error
        if error.kind == ValueError.__name__:
            raise ValueError(error.message) from error
        raise TrajectoryError("scoring_error", f"{target}: {error}"[:500]) from error
    except (Throttled, OSError, RetryableError) as error:
        raise TrajectoryError("scoring_unavailable", f"{target}: {error!r}"[:500]) from error


def make_ready(target: str) -> None:
    """Start a process for it, if there is a loop and none was started: whoever asks first need not wait for as long."""
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        return
    if target not in _pools.get(loop, {}):
        task = loop.create_task(_provision(target))
        _starting.add(task)
        task.add_done_callback(_starting.discard)


def in_own_process() -> bool:
    """Whether this process is one environment's, which its limits end as a whole."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    return spec is not None and spec.name == _OWN_PROCESS


async def _provision(target: str) -> None:
    (await _pool_of(target, SECONDS)).provision(1)


async def _pool_of(target: str, seconds: float) -> FunctionPool:
    loop = asyncio.get_running_loop()
    kept = _pools.setdefault(loop, {})
    if target not in kept:
        life = _life_of(target, seconds)
        kept[target] = (life, await anext(life))
    return kept[target][1]


async def _life_of(target: str, seconds: float) -> AsyncGenerator[FunctionPool, None]:
    """The end of the loop (``shutdown_asyncgens``) is the end of the processes."""
    pool = FunctionPool(target, concurrency=PROCESSES, timeout=seconds, idle_seconds=_IDLE_SECONDS)
    try:
        yield pool
    finally:
        await pool.close()
