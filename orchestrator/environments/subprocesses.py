"""Sessions in processes of their own on this machine, over pipes.

Guarantees: a session has its own process group, memory and processor limits; ``kill`` ends it with everything it started,
busy loops included, and reaps it; when the orchestrator ends, by ``kill -9`` too, so do all of them
(:mod:`orchestrator.process_watcher`); a process does not see the run's secrets (environment variables RL_COSERVE_*).
What is run here is trusted as the orchestrator is: model-written code belongs into a sandbox.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any

from orchestrator.api import EnvironmentTemplate, TrajectoryError
from orchestrator.child_process import KILL_LIMIT, kill_watched, public_environment, to_its_end
from orchestrator.environments.environment_session import ANY, refuse_image
from orchestrator.environments.environment_wire import MAX_LINE
from orchestrator.environments.remote_session import RemoteSession
from orchestrator.environments.tool_functions import ToolTally

ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")  # thread pools are address space, and many


@dataclass(eq=False)
class SubprocessBackend:
    """Implements :class:`~orchestrator.environments.environment_session.EnvironmentBackend`. ``target`` and
    ``arguments``: what makes the environment there, see :func:`orchestrator.environments.environment_process.maker_of`.
    ``limits`` are those of its process; ``log`` gets what environments print; ``tools`` are the fields of the ToolSettings;
    ``longest``: bytes of an answer."""

    name = "subprocess"

    target: str
    arguments: Mapping[str, Any]
    _: KW_ONLY
    owner: str = "run"
    limits: Mapping[str, Any] = field(default_factory=dict)
    log: Path | None = None
    tools: Mapping[str, Any] | None = None
    tally: ToolTally | None = None
    longest: int = MAX_LINE

    async def open(self) -> None:
        """Nothing of an earlier life can be left."""

    async def start(self, name: str, template: EnvironmentTemplate = ANY) -> RemoteSession:
        refuse_image(template, self.name)
        with contextlib.ExitStack() as stack:
            log = None if self.log is None else stack.enter_context(self.log.open("ab"))
            process = await asyncio.create_subprocess_exec(
                *(
                    sys.executable,
                    "-m",
                    "orchestrator.environments.environment_process",
                    "--owner",
                    f"{self.owner}/{name}",
                ),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                limit=self.longest,
                env={**dict.fromkeys(ONE_THREAD, "1"), **public_environment()},
                start_new_session=True,
            )
        session = RemoteSession(PipeChannel(process, self.longest), name, self.tally)
        try:
            await session.build_environment(self.target, self.arguments, self.limits, self.tools, template.setup)
        except BaseException:
            await to_its_end(session.kill())
            raise
        return session

    async def close(self) -> None:
        """Every session was killed; nothing else is held."""


class PipeChannel:
    """Implements :class:`~orchestrator.environments.remote_session.Channel`. ``longest``: the limit of the process's pipe."""

    def __init__(self, process: asyncio.subprocess.Process, longest: int) -> None:
        self.process = process
        self._longest = longest

    async def exchange(self, line: bytes) -> bytes:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.write(line)
            await self.process.stdin.drain()
            answer = await self.process.stdout.readline()
        except ConnectionError:
            answer = b""
        except ValueError as error:  # longer than the limit
            raise TrajectoryError("environment_output", f"an answer of more than {self._longest} B") from error
        if not answer.endswith(b"\n"):
            raise TrajectoryError("environment_died", await self._end())
        return answer

    async def kill(self) -> None:
        await kill_watched(self.process)

    async def _end(self) -> str:
        try:
            async with asyncio.timeout(KILL_LIMIT):
                code = await self.process.wait()
        except TimeoutError:
            return "it closed its pipe"
        if code == 128 + signal.SIGXCPU:
            return "its process was killed: a call took more than environment.cpu_seconds of processor time"
        if code > 128:
            return f"its process was killed by signal {code - 128}"
        return f"its process ended with code {code}"
