"""A virtual-time asyncio event loop: hours pass in seconds, and one seed gives one history.

Guarantees:

* ``loop.time()`` is virtual, starts at 0.0 and only jumps: when no callback is ready, to the deadline of the next
  timer. Callbacks take no time unless they say so (``compute_until``). Nothing waits for the wall clock, a socket, a
  thread or a process; asking is an error.
* The order of callbacks is a function of the program and of ``seed`` alone: ready callbacks run first in, first out,
  and timers of one deadline in the order in which they were set. With ``shuffle`` each batch of ready callbacks runs in a
  seeded random order instead, which a correct program must survive. Tasks hash by creation number, so that the sets of
  tasks inside asyncio (``TaskGroup``, ``wait``) do not bring memory addresses into the order either.
* Nothing hangs: no callback and no timer left is a :class:`DeadlockError` that names every pending task and the line it
  waits at; too much virtual time or too many callbacks is a :class:`RunawayError` that does the same.
* Nothing is lost silently: tasks still pending when the main coroutine ends, and exceptions nobody retrieved, are
  reported.

A coroutine that computes for ever without awaiting cannot be interrupted here: give the process a time limit.
"""

from __future__ import annotations

import asyncio
import collections
import contextvars
import gc
import heapq
import random
import threading
from asyncio import format_helpers
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

MAX_SECONDS = 30 * 24 * 3600.0  # virtual; a month of training is beyond every workload that is simulated
MAX_CALLBACKS = 1_000_000_000  # hours of wall time: a last resort, tests set much less
_FINISH_SECONDS, _FINISH_CALLBACKS = 24 * 3600.0, 1_000_000  # what cleanups may take beyond the limits
_PRUNE_AT = 256  # cancelled timers, or finished tasks, that are kept before they are swept out


class SimulationError(Exception):
    """The simulated program did something that a correct program never does."""


class DeadlockError(SimulationError):
    """Nothing can ever happen again, and the main coroutine has not ended."""


class RunawayError(SimulationError):
    """The limit on virtual time or on callbacks was passed."""


@dataclass(frozen=True, slots=True)
class LoopReport:
    """What a run of the loop leaves to say. ``leaked`` and ``unhandled`` are empty for a clean program."""

    seconds: float
    callbacks: int
    leaked: tuple[str, ...]
    unhandled: tuple[str, ...]


class _NumberedTask(asyncio.Task[Any]):
    """A task that hashes by its creation number instead of by its address."""

    def __init__(self, number: int, coro: Coroutine[Any, Any, Any], **keywords: Any) -> None:
        self._number = number  # before super().__init__, which puts the task into a WeakSet
        super().__init__(coro, **keywords)

    def __hash__(self) -> int:
        return self._number


class _Handle(asyncio.Handle):
    """A callback, without what asyncio's asks its debug mode, and its frames: half of what a callback costs here."""

    __slots__ = ()

    def __init__(
        self, callback: Any, args: Any, loop: asyncio.AbstractEventLoop, context: contextvars.Context | None
    ) -> None:
        self._context = contextvars.copy_context() if context is None else context
        self._loop = loop
        self._callback = callback
        self._args = args
        self._cancelled = False
        self._repr = None
        self._source_traceback = None


class _Timer(asyncio.TimerHandle):
    """A callback at a time, likewise: most timers are limits, set and cancelled again."""

    __slots__ = ()
    _loop: VirtualTimeLoop

    def __init__(
        self, when: float, callback: Any, args: Any, loop: VirtualTimeLoop, context: contextvars.Context | None
    ) -> None:
        self._context = contextvars.copy_context() if context is None else context
        self._loop = loop
        self._callback: Any = callback
        self._args: Any = args
        self._cancelled = False
        self._repr = None
        self._source_traceback = None
        self._when = when
        self._scheduled = True

    def cancel(self) -> None:
        """See asyncio's."""
        if not self._cancelled:
            self._cancelled = True
            self._callback = None
            self._args = None
            self._loop._timer_handle_cancelled(self)


class VirtualTimeLoop(asyncio.BaseEventLoop):
    """See the module. One loop serves one run."""

    # Of BaseEventLoop, stable since Python 3.4 and not in typeshed.
    _ready: collections.deque[asyncio.Handle]
    _stopping: bool
    _closed: bool

    def __init__(
        self,
        *,
        seed: int | str = 0,
        shuffle: bool = False,
        max_seconds: float = MAX_SECONDS,
        max_callbacks: int = MAX_CALLBACKS,
    ) -> None:
        super().__init__()
        self.callbacks = 0
        self.unhandled: list[str] = []
        self._now = 0.0
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._timer_count = 0
        self._cancelled_timers = 0
        self._tasks: list[_NumberedTask] = []  # strong references: a garbage collector has no seed
        self._task_count = 0
        self._prune_tasks_at = _PRUNE_AT
        self._order = random.Random(f"{seed}/ready-order") if shuffle else None
        self._max_seconds = max_seconds
        self._max_callbacks = max_callbacks
        self._home = threading.get_ident()
        self.set_debug(False)  # debug mode times callbacks by the wall clock
        self.set_exception_handler(_record_unhandled)

    get_debug = staticmethod(bool)  # False, and no frame: every future and task asks

    # Time and scheduling.

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self._now

    def compute_until(self, when: float) -> None:
        """The callback that runs computes until then: nobody else's turn comes before. The past changes nothing."""
        self._now = max(self._now, when)

    def call_at(  # type: ignore[override]  # typeshed ties the arguments' types to the callback's
        self, when: float, callback: Callable[..., Any], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        """Schedule at a virtual time; timers of one deadline keep their order."""
        if self._closed:
            self._check_open()
        if when != when:
            raise ValueError("a timer was set to NaN")
        timer = _Timer(when, callback, args, self, context)
        self._timer_count += 1
        heapq.heappush(self._timers, (when, self._timer_count, timer))
        return timer

    def call_soon(  # type: ignore[override]  # as call_at
        self, callback: Callable[..., Any], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        """As asyncio's, without the checks of its debug mode."""
        if self._closed:
            self._check_open()
        handle = _Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        self._cancelled_timers += 1
        if self._cancelled_timers > _PRUNE_AT and self._cancelled_timers * 2 > len(self._timers):
            self._timers = [entry for entry in self._timers if not entry[2]._cancelled]
            heapq.heapify(self._timers)
            self._cancelled_timers = 0

    def create_task(self, coro: Any, *, name: object = None, context: contextvars.Context | None = None) -> Any:
        """As asyncio's, with a name that depends on nothing but the order of creation in this loop."""
        if self._closed:
            self._check_open()
        self._task_count += 1
        if name is None:
            name = f"task-{self._task_count}"
        task = _NumberedTask(self._task_count, coro, loop=self, name=name, context=context)
        self._tasks.append(task)
        if len(self._tasks) >= self._prune_tasks_at:
            self._tasks = [task for task in self._tasks if not task.done() or _never_retrieved(task)]
            self._prune_tasks_at = max(_PRUNE_AT, 2 * len(self._tasks))
        return task

    def call_soon_threadsafe(  # type: ignore[override]  # as call_at
        self, callback: Callable[..., Any], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        """From this thread only (asyncio itself calls it to close generators); another thread has no seed."""
        if threading.get_ident() != self._home:
            raise SimulationError("a second thread reached the simulated event loop; its timing has no seed")
        return self.call_soon(callback, *args, context=context)

    def run_in_executor(  # type: ignore[override]  # as call_at
        self, executor: Any, func: Callable[..., Any], *args: Any
    ) -> NoReturn:
        """Refused: threads have no seed."""
        raise SimulationError(f"run_in_executor({func!r}) in a simulation: threads have no virtual time")

    def _check_open(self) -> None:
        if self.is_closed():
            raise RuntimeError("Event loop is closed")

    # The heart: one batch of ready callbacks.

    def _run_once(self) -> None:
        ready = self._ready
        timers = self._timers
        if not ready and not self._stopping:
            while timers and timers[0][2].cancelled():
                heapq.heappop(timers)
                self._cancelled_timers -= 1
            if not timers:
                raise DeadlockError(f"deadlock at virtual time {self._now:.6f} s: {self.describe_tasks()}")
            if timers[0][0] > self._max_seconds:
                raise RunawayError(
                    f"the next timer is at {timers[0][0]:.3f} s, past the limit of {self._max_seconds} virtual "
                    f"seconds: {self.describe_tasks()}"
                )
            self._now = max(self._now, timers[0][0])
        now = self._now
        while timers and timers[0][0] <= now:
            handle = heapq.heappop(timers)[2]
            if handle._cancelled:
                self._cancelled_timers -= 1
            else:
                ready.append(handle)
        count = len(ready)
        if self._order is not None and count > 1:
            batch = list(ready)
            self._order.shuffle(batch)
            ready.clear()
            ready.extend(batch)
        self.callbacks += count
        if self.callbacks > self._max_callbacks:
            raise RunawayError(
                f"more than {self._max_callbacks} callbacks, at virtual time {self._now:.6f} s: {self.describe_tasks()}"
            )
        following: Callable[[], Any] = ready.popleft
        for _ in range(count):
            entry = following()
            if not entry._cancelled:
                try:  # what asyncio's own handles do when they are run
                    entry._context.run(entry._callback, *entry._args)
                except (SystemExit, KeyboardInterrupt):
                    raise
                except BaseException as error:  # noqa: BLE001  reported, as every event loop does
                    self._unhandled(entry, error)

    def _unhandled(self, entry: Any, error: BaseException) -> None:
        where = format_helpers._format_callback_source(entry._callback, entry._args)
        message = f"Exception in callback {where}"
        self.call_exception_handler({"message": message, "exception": error, "handle": entry})

    # What is left to say.

    def pending_tasks(self) -> list[asyncio.Task[Any]]:
        """Tasks that have not ended, oldest first."""
        return [task for task in self._tasks if not task.done()]

    def describe_tasks(self) -> str:
        """Every pending task, and the chain of awaits it stands in; free of addresses."""
        pending = self.pending_tasks()
        lines = [f"{len(pending)} pending task(s)"]
        lines += [f"  {task.get_name()}: {_wait_chain(task)}" for task in pending]
        return "\n".join(lines)

    def finish(self) -> LoopReport:
        """Cancel what is still pending, oldest first, run it to its end, close, and report. Call once, at the end."""
        leaked = tuple(f"{task.get_name()}: {_wait_chain(task)}" for task in self.pending_tasks())
        self._max_seconds = max(self._max_seconds, self._now) + _FINISH_SECONDS
        self._max_callbacks = max(self._max_callbacks, self.callbacks) + _FINISH_CALLBACKS
        try:
            while pending := self.pending_tasks():
                for task in pending:
                    task.cancel()
                self.run_until_complete(asyncio.wait(pending))
            self.run_until_complete(self.shutdown_asyncgens())
            self.unhandled += [_unhandled_line(task) for task in self._tasks if _never_retrieved(task)]
            report = LoopReport(self._now, self.callbacks, leaked, tuple(self.unhandled))
        finally:
            self._tasks.clear()
            self._timers.clear()
            self.close()
        return report


def _record_unhandled(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    assert isinstance(loop, VirtualTimeLoop)
    error = context.get("exception")
    what = f": {type(error).__name__}: {error}" if error is not None else ""
    loop.unhandled.append(f"{context.get('message', 'unhandled')}{what}")


def _never_retrieved(task: asyncio.Task[Any]) -> bool:
    return bool(task.done() and not task.cancelled() and getattr(task, "_log_traceback", False))


def _unhandled_line(task: asyncio.Task[Any]) -> str:
    error = task.exception()  # also marks it as retrieved, so that it is not reported twice
    return f"{task.get_name()} ended with {type(error).__name__}: {error}"


def _wait_chain(task: asyncio.Task[Any]) -> str:
    """The awaits of a task from the outside in, as ``function (file:line)``, and the task at the end, if it is one."""
    parts: list[str] = []
    inner: Any = task.get_coro()
    while inner is not None:
        frame = getattr(inner, "cr_frame", None) or getattr(inner, "gi_frame", None) or getattr(inner, "ag_frame", None)
        if frame is None:
            break
        file = frame.f_code.co_filename.rpartition("/")[2]
        parts.append(f"{frame.f_code.co_qualname} ({file}:{frame.f_lineno})")
        inner = (
            getattr(inner, "cr_await", None) or getattr(inner, "gi_yieldfrom", None) or getattr(inner, "ag_await", None)
        )
    waiter = getattr(task, "_fut_waiter", None)
    if isinstance(waiter, asyncio.Task):
        parts.append(f"task {waiter.get_name()}")
    elif waiter is not None:
        parts.append("a future")
    return " > ".join(parts) or "not started"


@contextmanager
def rare_collections() -> Iterator[None]:
    """Nearly all that a simulation makes lives to its end or dies by its reference count: looking for cycles among it is a
    quarter of the time of a large one."""
    before = gc.get_threshold()
    gc.set_threshold(1_000_000, 20, 100)  # a hundred MB of garbage at most
    try:
        yield
    finally:
        gc.set_threshold(*before)
