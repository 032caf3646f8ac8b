"""Sessions in this process: objects of the task, behind the same interface as those that can be killed.

Guarantees: a call that is cancelled is not waited for, so an environment that swallows its cancellation holds up nobody;
what such a call answers later is dropped. ``kill`` waits for it, within the pool's limit: code in this process cannot be
killed, only abandoned, which the pool counts. An environment that blocks the event loop blocks the run: give it a process.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from orchestrator.api import Environment, EnvironmentTemplate, Observation, Prompt, StepResult, TrajectoryError
from orchestrator.environments.environment_session import (
    ANY,
    EnvironmentMaker,
    RenewableEnvironment,
    Waiting,
    refuse_image,
)
from orchestrator.environments.environment_wire import THIRD_PARTY, error_text

T = TypeVar("T")
KILL_LIMIT = 10.0  # seconds for one that could not be prepared


class InProcessBackend:
    """Implements :class:`~orchestrator.environments.environment_session.EnvironmentBackend`."""

    name = "in-process-pool"

    def __init__(self, task: EnvironmentMaker) -> None:
        self._task = task

    async def open(self) -> None:
        """Nothing outlives this process."""

    async def start(self, name: str, template: EnvironmentTemplate = ANY) -> InProcessSession:
        return await prepared_session(self._task, template, self.name)

    async def close(self) -> None:
        """Nothing is left."""


class InProcessSession:
    """Implements :class:`~orchestrator.environments.environment_session.EnvironmentSession`."""

    def __init__(self, inner: RenewableEnvironment) -> None:
        self.version = ""
        self._inner = inner
        self._wrong = self._take_version()
        self._open: asyncio.Task[object] | None = None  # the call in progress; never two
        self._closing: asyncio.Task[None] | None = None

    async def prepare(self) -> None:
        """To where its episodes begin."""
        await self._call(self._inner.prepare)

    async def reset(self, prompt: Prompt) -> Observation:
        if self._wrong:
            raise TrajectoryError("environment_error", self._wrong)
        return await self._call(lambda: self._inner.environment.reset(prompt))

    async def step(self, action_ids: tuple[int, ...]) -> StepResult:
        return await self._call(lambda: self._inner.environment.step(action_ids))

    async def recycle(self) -> None:
        await self._call(self._inner.recycle)
        self._wrong = self._take_version()

    async def ping(self) -> None:
        await self._call(self._inner.ping)

    async def kill(self) -> None:
        before = self._closing
        if before is not None and before.cancelling():  # who asked then gave up: it is still to be closed
            await asyncio.wait([before])
            self._closing = None
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())
        try:
            await asyncio.shield(self._closing)
        except asyncio.CancelledError:
            self._closing.cancel()  # it took too long: abandoned
            raise

    async def close(self) -> None:
        """As :class:`orchestrator.api.Environment`."""
        await self.kill()

    def _take_version(self) -> str:
        """What is wrong with it; the object must be closed all the same."""
        try:
            self.version = self._inner.version
        except THIRD_PARTY as error:
            return f"version: {error_text(error)}"
        return ""

    async def _close(self) -> None:
        if self._open is not None:
            self._open.cancel()
            await asyncio.wait([self._open])
            self._open = None  # what it ended with holds this session: a cycle
        await _no_exit(self._inner.environment.close)

    async def _call(self, call: Callable[[], Awaitable[T]]) -> T:
        if self._open is not None or self._closing is not None:
            raise TrajectoryError("environment_protocol", "a call into an environment that is at work or was killed")
        task = asyncio.create_task(_no_exit(call))
        self._open = task
        ended = asyncio.get_running_loop().create_future()

        def end(_: asyncio.Task[T]) -> None:
            if not ended.done():
                ended.set_result(None)

        task.add_done_callback(end)
        try:
            await ended  # not the task itself, which would be cancelled with us, and waited for
        except asyncio.CancelledError:
            task.remove_done_callback(end)
            task.cancel()
            task.add_done_callback(_retrieve)
            raise  # it stays open: only kill may follow
        self._open = None
        return task.result()


async def prepared_session(task: EnvironmentMaker, template: EnvironmentTemplate, backend: str) -> InProcessSession:
    """One that is ready for its first episode. Raises what making or preparing it raises, and leaves nothing of it then."""
    refuse_image(template, backend)
    session = InProcessSession(RenewableEnvironment(task, template.setup))
    if template.setup:
        try:
            await session.prepare()
        except BaseException:
            await _in_spite_of_cancellation(_end(session))
            raise
    return session


async def _end(session: InProcessSession) -> None:
    with contextlib.suppress(Exception, SystemExit):  # of one that nobody will use
        async with asyncio.timeout(KILL_LIMIT):
            await session.kill()


async def _in_spite_of_cancellation(work: Coroutine[Any, Any, None]) -> bool:
    """To its end, also when who waits for it is cancelled meanwhile: whether it was. Nothing else would free what it frees."""
    task = asyncio.create_task(work)
    cancelled = False
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            cancelled = True
    return cancelled


class FreshEnvironments:
    """Implements :class:`~orchestrator.environments.environment_session.EnvironmentSource`: a new object of the task for every
    episode, in this process; closed at its end and never reused. Calls into it can be given up (:class:`InProcessSession`)."""

    def __init__(
        self,
        task: EnvironmentMaker,
        limit: float,
        note_fault: Callable[[str, str], None],
        template_of: Callable[[Prompt], EnvironmentTemplate] | None = None,
        start_limit: float = 60.0,
    ) -> None:
        """``limit``: seconds that closing may take; an environment that takes longer is abandoned, and that is noted.
        ``template_of``: what a prompt's environment begins from; None: all from the same. ``start_limit``: seconds that one may
        take to be prepared for it."""
        self._task, self._template_of, self._start_limit = task, template_of, start_limit
        self._limit = limit
        self._note_fault = note_fault

    async def acquire(self, prompt: Prompt, waiting: Waiting) -> Environment:
        try:
            if self._template_of is None:
                return InProcessSession(RenewableEnvironment(self._task))
            waiting("an environment to start")
            async with asyncio.timeout(self._start_limit) as limit:
                return await prepared_session(self._task, self._template_of(prompt), "in-process")
        except TrajectoryError:
            raise
        except TimeoutError as error:
            why = f"took over {self._start_limit:g} s" if limit.expired() else error_text(error)
            raise TrajectoryError("environment_start", why) from error
        except (Exception, SystemExit) as error:
            raise TrajectoryError("environment_start", error_text(error)) from error

    async def release(self, environment: Environment, trusted: bool) -> None:
        """Close, even when the trajectory is cancelled meanwhile: nothing else would ever free the environment."""
        assert isinstance(environment, InProcessSession)
        if await _in_spite_of_cancellation(self._close_in_time(environment)):
            raise asyncio.CancelledError

    def resize(self, size: int) -> None:
        """Nothing: there are as many as episodes."""

    def stats(self) -> dict[str, Any]:
        return {}

    async def _close_in_time(self, session: InProcessSession) -> None:
        """Close within the limit; the trajectory's outcome does not depend on it."""
        try:
            async with asyncio.timeout(self._limit):
                await session.kill()
        except TimeoutError:
            self._note_fault("environment_close", "hung; abandoned")
        except (Exception, SystemExit) as error:  # noqa: BLE001  third-party code: see acquire
            self._note_fault("environment_close", error_text(error))


async def _no_exit(call: Callable[[], Awaitable[T]]) -> T:
    """What ``call`` answers. These two in a task would end the event loop."""
    try:
        return await call()
    except (SystemExit, KeyboardInterrupt) as error:
        raise TrajectoryError("environment_error", f"it called exit: {error_text(error)}") from error


def _retrieve(task: asyncio.Task[T]) -> None:
    """Nobody waits for this answer any more."""
    if not task.cancelled():
        task.exception()
