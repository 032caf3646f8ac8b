"""The agent's process: started for each trajectory in the sandbox, told a base URL and a key, waited for until it ends.

The sandbox has no network. Its own loopback has one port, which leads to the endpoint of the rollout side
(:mod:`orchestrator.agents.sandbox_bridge`); that is all an agent reaches. Guarantees: those of
:mod:`orchestrator.sandbox.run`: when :meth:`Program.run` returns, raises or is cancelled, nothing of the agent is left.

How an ending becomes a reward: see :func:`reward_of`. What is no ending that the agent chose (a limit, an exit code that says
neither) ends the trajectory as ``failed``, and is never a reward.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files as package_files
from pathlib import Path

from orchestrator.api import ConfigError, Prompt, TrajectoryError
from orchestrator.sandbox import Sandbox, SandboxLimits, SandboxOutcome
from orchestrator.sandbox.command import PATH, WORK, SharedPaths

PORT = 8000  # inside the sandbox
_SOCKET, _BRIDGE = "/gateway.sock", ".bridge.py"
_MOST_BYTES = 16 << 20  # of all files of an agent
_VARIABLE = (128 << 10) - len("AGENT_PROMPT=") - 1  # bytes that Linux takes as its value (MAX_ARG_STRLEN)


@dataclass(frozen=True, slots=True)
class AgentProgram:
    """``command`` runs in a working folder with ``files`` (name -> content), which it can read. The start state is on its
    standard input, and in the environment variable AGENT_PROMPT where it fits. ``reward``: "output", "exit" or "elsewhere"."""

    command: tuple[str, ...]
    files: Mapping[str, bytes]
    readable: tuple[str, ...]
    limits: SandboxLimits
    variables: Mapping[str, str]
    reward: str = "output"
    zero_exit: int = 1

    async def run(self, sandbox: Sandbox, prompt: Prompt, key: str, socket: str, seconds: float) -> SandboxOutcome:
        """To its end, ``seconds`` at most. Raises RetryableError when the sandbox did not start."""
        state = prompt.payload.encode()
        environment = {
            "MALLOC_ARENA_MAX": "1",  # else each thread takes 64 MB of the address space that memory_mb limits
            **self.variables,
            "PATH": f"{Path(sandbox.interpreter).parent}:{PATH}",
            "OPENAI_BASE_URL": f"http://127.0.0.1:{PORT}/v1",
            "OPENAI_API_KEY": key,
            **({"AGENT_PROMPT": prompt.payload} if len(state) <= _VARIABLE else {}),
        }
        bridge = (package_files("orchestrator.agents") / "sandbox_bridge.py").read_bytes()
        return await sandbox.run(
            [sandbox.interpreter, "-I", "-S", "-B", f"{WORK}/{_BRIDGE}", _SOCKET, str(PORT), *self.command],
            read_only={**self.files, _BRIDGE: bridge},
            stdin=state,
            limits=replace(self.limits, wall_seconds=seconds),
            environment=environment,
            shared=SharedPaths(((_SOCKET, socket),), self.readable),
        )


def reward_of(program: AgentProgram, outcome: SandboxOutcome) -> float:
    """``output``: the last line of what it printed is the reward, a number, and it ended with exit code 0. ``exit``: 1 for exit
    code 0, 0 for ``zero_exit``. ``elsewhere``: 0 for exit code 0; who scores it says the reward. Raises TrajectoryError for
    anything else."""
    told = outcome.stderr.decode(errors="replace").strip()[-400:]
    if outcome.limit == "wall":
        raise TrajectoryError("trajectory_timeout", f"the agent ran for over {outcome.seconds:.0f} s")
    if outcome.limit:
        raise TrajectoryError("agent_limit", f"the agent reached its limit of {outcome.limit}: {told}")
    if program.reward == "exit" and outcome.exit_code in (0, program.zero_exit):
        return float(outcome.exit_code == 0)
    if outcome.exit_code != 0:
        raise TrajectoryError("agent_error", f"the agent ended with exit code {outcome.exit_code}: {told}")
    if program.reward == "elsewhere":
        return 0.0
    lines = outcome.stdout.decode(errors="replace").strip().splitlines()
    try:
        reward = float(lines[-1]) if lines else math.nan
    except ValueError:
        reward = math.nan
    if not math.isfinite(reward):
        last = lines[-1][:200] if lines else ""
        raise TrajectoryError("agent_output", f"the agent's last line is its reward, a number; it is {last!r}")
    return reward


def read_files(names: Sequence[str], field: str = "task.agent.files") -> dict[str, bytes]:
    """Files by their name in the working folder: a file by its own name, the files of a folder by their path in it. Raises
    ConfigError."""
    found: dict[str, bytes] = {}
    for name in names:
        path = Path(name)
        if path.is_file():
            members = [(path.name, path)]
        elif path.is_dir():
            inside = [
                member for member in sorted(path.rglob("*")) if member.is_file() and "__pycache__" not in member.parts
            ]
            members = [(str(member.relative_to(path)), member) for member in inside]
        else:
            raise ConfigError(
                field, name, "no such file or folder; paths are relative to the folder in which the run is started"
            )
        for inside_name, member in members:
            found[inside_name] = member.read_bytes()
        if (size := sum(map(len, found.values()))) > _MOST_BYTES:
            fix = f"{size >> 20} MB are copied for every trajectory: at most {_MOST_BYTES >> 20}; name folders that it may read "
            raise ConfigError(field, name, f"{fix}in task.agent.readable")
    return found
