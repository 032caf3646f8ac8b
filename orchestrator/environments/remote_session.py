"""A session whose environment is in another process: the same object for pipes and for TCP.

Guarantees: one call at a time; after a call that was cancelled or failed in transport every further one is refused, so an
answer that comes late is never taken for that of another call; what the other side answers passes the checks again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, Protocol

import orchestrator
from orchestrator.api import ConfigError, Observation, Prompt, StepResult, TrajectoryError, bearer
from orchestrator.environments import environment_wire
from orchestrator.environments.tool_functions import ToolTally


class Channel(Protocol):
    """The way to one environment process."""

    async def exchange(self, line: bytes) -> bytes:
        """Send a line, wait for the next. Raises TrajectoryError ``environment_died`` when there is nobody any more."""

    async def kill(self) -> None:
        """End the process and all it started. Idempotent."""


class RemoteSession:
    """Implements :class:`~orchestrator.environments.environment_session.EnvironmentSession`; of use after
    :meth:`build_environment`.
    """

    def __init__(self, channel: Channel, name: str, tally: ToolTally | None = None) -> None:
        """``tally`` adds up what the other side says of its calls of tools."""
        self.name = name
        self._note = None if tally is None else tally.of_process()
        self.version = ""
        self._channel = channel
        self._number = 0
        self._lost = ""  # why no call may follow

    async def build_environment(
        self,
        target: str,
        arguments: Mapping[str, Any],
        limits: Mapping[str, Any],
        tools: Mapping[str, Any] | None = None,
        setup: str = "",
    ) -> None:
        """Build the environment, and prepare it where its template says so. Raises ConfigError when the other side is another
        distribution, TrajectoryError otherwise."""
        if tools is not None:  # there it may have no such file
            tools = {**tools, "token": bearer.Token(tools["token"]).current()}
        result = await self._ask("start", target=target, arguments=arguments, limits=limits, tools=tools, setup=setup)
        theirs = (result.get("protocol"), result.get("distribution"))
        if theirs != (environment_wire.PROTOCOL, orchestrator.__version__):
            said = f"it has rl-coserve {theirs[1]!s:.40} (protocol {theirs[0]!s:.40})"
            raise ConfigError(
                "environment", self.name, f"{said}, this is {orchestrator.__version__}: use the same there"
            )
        self._take_version(result)

    async def reset(self, prompt: Prompt) -> Observation:
        return environment_wire.read_observation(await self._ask("reset", prompt=asdict(prompt)), "reset")

    async def step(self, action_ids: tuple[int, ...]) -> StepResult:
        return environment_wire.read_step(await self._ask("step", action=action_ids))

    async def recycle(self) -> None:
        self._take_version(await self._ask("recycle"))

    async def ping(self) -> None:
        await self._ask("ping")

    async def kill(self) -> None:
        self._lost = self._lost or "it was killed"
        await self._channel.kill()

    async def _ask(self, call: str, **fields: Any) -> dict[str, Any]:
        if self._lost:
            raise TrajectoryError("environment_protocol", f"{call} of {self.name}: {self._lost}")
        self._number += 1
        self._lost = f"its {call} was not answered"
        answer = await self._channel.exchange(
            environment_wire.encode_line({"id": self._number, "call": call, **fields})
        )
        try:
            result = environment_wire.reply_of(answer, self._number, self._note)
        except TrajectoryError as error:
            if error.cause != "environment_protocol":
                self._lost = ""
            raise
        self._lost = ""
        return result

    def _take_version(self, result: Mapping[str, Any]) -> None:
        self.version = environment_wire.version_of(result.get("version"))
