"""Where the manager gets an environment for one episode: a fresh object of the task (here), or one of a pool.

Guarantees of every source: ``acquire`` gives an environment to one caller only; whatever happened to the episode,
``release`` takes it back and never raises for what the environment did.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Protocol

from orchestrator.api import Environment, Task, TrajectoryError
from orchestrator.environments.environment_session import RenewableEnvironment
from orchestrator.environments.inprocess import InProcessSession
from orchestrator.environments.reply_checks import error_text

Waiting = Callable[[str], None]  # told what an acquire waits for


class EnvironmentSource(Protocol):
    """What :class:`orchestrator.envs.EnvManager` asks."""

    async def acquire(self, waiting: Waiting) -> Environment:
        """An environment for one episode. Raises TrajectoryError when this episode gets none, RunError when none ever will."""

    async def release(self, environment: Environment, trusted: bool) -> None:
        """Give it back. ``trusted``: no call into it is open, and its last answer was in order."""

    def stats(self) -> dict[str, Any]:
        """For the event log; empty when there is nothing to say."""


class FreshEnvironments:
    """A new object of the task for every episode, in this process; closed at its end and never reused. Calls into it can be
    given up (:class:`~orchestrator.environments.inprocess.InProcessSession`)."""

    def __init__(self, task: Task, limit: float, note_fault: Callable[[str, str], None]) -> None:
        """``limit``: seconds that closing may take; an environment that takes longer is abandoned, and that is noted."""
        self._task = task
        self._limit = limit
        self._note_fault = note_fault

    async def acquire(self, waiting: Waiting) -> Environment:
        try:
            return InProcessSession(RenewableEnvironment(self._task))
        except (Exception, SystemExit) as error:
            raise TrajectoryError("environment_start", error_text(error)) from error

    async def release(self, environment: Environment, trusted: bool) -> None:
        """Close, even when the trajectory is cancelled meanwhile: nothing else would ever free the environment."""
        assert isinstance(environment, InProcessSession)
        closing = asyncio.create_task(self._close_in_time(environment))
        cancelled: asyncio.CancelledError | None = None
        while not closing.done():
            try:
                await asyncio.shield(closing)
            except asyncio.CancelledError as error:
                cancelled = error
        if cancelled is not None:
            raise cancelled

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
