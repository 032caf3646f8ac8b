"""The small interface behind the pool: a *session* is one environment instance that outlives episodes, a *backend* starts
sessions. In this process, in a process of its own, in a pod: the pool cannot tell.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from orchestrator.api import Environment, EnvironmentTemplate, Observation, Prompt, StepResult, TrajectoryError
from orchestrator.environments.environment_wire import version_of

Waiting = Callable[[str], None]  # told what an acquire waits for
ANY = EnvironmentTemplate()  # where all prompts begin from the same


def refuse_image(template: EnvironmentTemplate, backend: str) -> None:
    """Raises TrajectoryError for a template that needs an image, in a backend that runs none."""
    if template.image:
        why = f"environment.backend = {backend!r} runs no images: take 'kubernetes'"
        raise TrajectoryError("environment_template", f"it begins from image {template.image!r:.200}, and {why}")


class EnvironmentSource(Protocol):
    """Where :class:`orchestrator.envs.EnvManager` gets an environment for one episode: a fresh object of the task, or one of
    a pool. Whatever happened to the episode, ``release`` takes it back and never raises for what the environment did."""

    async def acquire(self, prompt: Prompt, waiting: Waiting) -> Environment:
        """An environment for one episode of this prompt, to one caller only. Raises TrajectoryError when this episode gets none,
        RunError when none ever will."""

    async def release(self, environment: Environment, trusted: bool) -> None:
        """Give it back. ``trusted``: no call into it is open, and its last answer was in order."""

    def resize(self, size: int) -> None:
        """So many environments at most from now on; those beyond end when they are given back."""

    def stats(self) -> dict[str, Any]:
        """For the event log; empty when there is nothing to say."""


class EnvironmentSession(Protocol):
    """One environment instance. One call at a time; a call that was cancelled, or raised what is not a TrajectoryError of the
    environment itself, leaves it in no defined state: its owner kills it."""

    @property
    def version(self) -> str:
        """The environment's."""

    async def reset(self, prompt: Prompt) -> Observation:
        """As :class:`orchestrator.api.Environment`."""

    async def step(self, action_ids: tuple[int, ...]) -> StepResult:
        """As :class:`orchestrator.api.Environment`."""

    async def recycle(self) -> None:
        """Back to how a new one is, between two episodes. Raises whatever went wrong; then it must be killed."""

    async def ping(self) -> None:
        """Returns when it would take a call now; raises whatever is wrong."""

    async def kill(self) -> None:
        """End it, a call in progress included, and free all it holds. Idempotent; never refuses."""


class EnvironmentBackend(Protocol):
    """Starts sessions."""

    name: str

    async def open(self) -> None:
        """Before the first session: remove what an earlier life of this run left. Raises ConfigError."""

    async def start(self, name: str, template: EnvironmentTemplate) -> EnvironmentSession:
        """A session that is ready for ``reset``. ``name`` is unique in the run. When it raises, or is cancelled, nothing of
        it is left. Raises ConfigError for what the other side is not (of the run, if the first two say it; else of this one),
        TrajectoryError ``environment_template`` for what no retry cures in this template."""

    async def close(self) -> None:
        """After the last session was killed: nothing of this run is left. Idempotent."""


class RenewableEnvironment:
    """One environment of a task, and how it is prepared, renewed, asked and ended. ``prepare``, ``recycle`` and ``ping`` are
    optional methods of the environment: ``prepare(setup)`` brings it, once, to where each of its episodes begins (a repository
    fetched and built), and ``recycle`` back there; one that has no ``recycle`` is closed, made and prepared anew, one that has
    no ``ping`` counts as well. ``setup``: of its template."""

    def __init__(self, task: EnvironmentMaker, setup: str = "") -> None:
        self._task, self._setup = task, setup
        self.environment = task.environment()

    @property
    def version(self) -> str:
        """The environment's; raises whatever asking for it raises, and TrajectoryError."""
        return version_of(str(self.environment.version))

    async def prepare(self) -> None:
        """Before its first episode. Raises TrajectoryError ``environment_template`` for an environment that does not know how."""
        if not self._setup:
            return
        build = getattr(self.environment, "prepare", None)
        if build is None:
            raise TrajectoryError("environment_template", "the environment has no method prepare")
        await build(self._setup)

    async def recycle(self) -> None:
        """Back to how a new one is."""
        renew = getattr(self.environment, "recycle", None)
        if renew is not None:
            await renew()
            return
        await self.environment.close()
        self.environment = self._task.environment()
        await self.prepare()

    async def ping(self) -> None:
        """The environment's own health check."""
        check = getattr(self.environment, "ping", None)
        if check is not None:
            await check()


class EnvironmentMaker(Protocol):
    """The one thing that is asked of a task here."""

    def environment(self) -> Environment:
        """A fresh environment instance."""
