"""Starts servers as children of the orchestrator, with a token that only the orchestrator knows: the embedded function host,
and the run's own judge.

Guarantees: a server is told the token's digest alone, so that nothing that it starts can read the token; after
``start`` returned the host answers; when it raises (or is cancelled), nothing is left behind; ``stop`` is idempotent
and reaps; the host ends when this process does, however it ends, because it holds the other end of a pipe. One that
died can be restarted at its old address, with its old token: who calls it need not be told, only be patient.
"""

from __future__ import annotations

import json
import secrets
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from orchestrator.api import ConfigError, CoserveError, RunError, bearer
from orchestrator.child_process import ChildProcess, public_environment
from orchestrator.rewards.function_protocol import INVOKE_PATH

TOKEN_VARIABLE = "RL_COSERVE_REWARD_HOST_TOKEN"
JUDGE_PROGRAM = "vllm_rlplugin.judge.judge_server"
JUDGE_REFUSED = "the judge cannot start"  # begins the last line that one prints which refuses what it was given
START_LIMIT = 30.0  # seconds; it takes 0.5 on an idle machine
PATIENCE = 60.0  # seconds that a client should go on trying to connect: a host which died is restarted meanwhile


class ServingChild(ChildProcess):
    """A program that prints ``{"port": P}`` as soon as it answers on loopback, and ends when its standard input does.

    ``name``: for errors; ``variable``: the environment variable that it takes its token's digest from; ``start_limit``: seconds.
    """

    name = "server"
    variable = TOKEN_VARIABLE
    start_limit = START_LIMIT

    def __init__(self, log: Path | None) -> None:
        super().__init__(log)
        self.token = secrets.token_urlsafe(32)
        self.told = bearer.sealed(self.token)
        self._port = 0

    def command(self) -> list[str]:
        """The program and its arguments, without ``--port``."""
        raise NotImplementedError

    def environment(self) -> Mapping[str, str]:
        """What its environment has beside ours and the token."""
        return {}

    def refusal_error(self) -> ConfigError:
        """What its exit code 2 means."""
        raise NotImplementedError

    @property
    def base_url(self) -> str:
        """Where it answers."""
        if not self._port:
            raise RunError(f"the {self.name} was not started")
        return f"http://127.0.0.1:{self._port}"

    async def start(self) -> None:
        """Start and wait until it listens. Raises ConfigError when it refuses what it was given, RunError otherwise."""
        await self._launch(0)

    async def restart(self) -> None:
        """After its death, or a restart that failed: at the port that it had. Raises as :meth:`start`."""
        await super().stop()
        await self._launch(self._port)

    async def _launch(self, port: int) -> None:
        """At this port, 0: at a free one."""
        variables = {**public_environment(), **self.environment(), self.variable: self.told}
        await self._start_process([*self.command(), "--port", str(port)], variables, self.start_limit)

    def _heard(self, line: bytes) -> None:
        self._port = int(json.loads(line)["port"])

    def _ended_early(self, code: int) -> CoserveError:
        return self.refusal_error() if code == 2 else super()._ended_early(code)

    async def stop(self) -> None:
        """Stop, kill if need be, reap. Idempotent."""
        self._port = 0
        await super().stop()


class FunctionHost(ServingChild):
    """One embedded host. ``functions``: name -> module:function; ``field`` is the config's name for them, for errors."""

    name = "function host"

    def __init__(
        self,
        functions: Mapping[str, str],
        *,
        field: str = "functions",
        concurrency: int = 4,
        timeout: float = 10.0,
        idle_seconds: float = 30.0,
        log: Path | None = None,
    ) -> None:
        super().__init__(log)
        self._functions = functions
        self._field = field
        self._options = [f"--concurrency={concurrency}", f"--timeout={timeout}", f"--idle-seconds={idle_seconds}"]

    def url_of(self, name: str) -> str:
        """What a function is invoked at."""
        return self.base_url + INVOKE_PATH.format(name=name)

    def command(self) -> list[str]:
        program = [sys.executable, "-m", "orchestrator.rewards.host", "--die-with-stdin"]
        targets = [part for name, target in self._functions.items() for part in ("--function", f"{name}={target}")]
        return [*program, f"--token-env={self.variable}", *self._options, *targets]

    def refusal_error(self) -> ConfigError:
        return ConfigError(self._field, dict(self._functions), f"the function host refused to start{self._hint()}")


class RewardHost(FunctionHost):
    """One embedded host that serves the reward function. ``options``: those of FunctionHost."""

    def __init__(self, function: str, **options: Any) -> None:
        self._function = function.partition(":")[2]
        super().__init__({self._function: function}, field="reward.function", **options)

    @property
    def url(self) -> str:
        """What the function is invoked at."""
        return self.url_of(self._function)


class JudgeHost(ServingChild):
    """The run's own judge: a model whose layers are streamed from host memory (RollPacker 4.3). How many of them stay on the
    device is decided before each answer by :mod:`orchestrator.policies.serving.judge_residency`, in the server.

    ``path``: Hugging Face folder; ``device``: cpu, cuda or auto; ``memory_mb``: of the device, 0: what is free;
    ``beside``: what its environment has besides (of MPS)."""

    name = "judge"
    variable = "RL_COSERVE_JUDGE_TOKEN"

    def __init__(
        self,
        path: str,
        *,
        device: str = "auto",
        dtype: str = "bfloat16",
        memory_mb: int = 0,
        layers_file: str = "",
        profile: str = "",
        threads: int = 1,
        start_seconds: float = 300.0,
        beside: Mapping[str, str] | None = None,
        log: Path | None = None,
    ) -> None:
        super().__init__(log)
        self.start_limit = start_seconds
        self._path = path
        self._options = ["--device", device, "--dtype", dtype, "--memory-mb", str(memory_mb)]
        self._options += ["--layers-file", layers_file] if layers_file else []
        self._options += ["--profile", profile] if profile else []
        self._environment = {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads), **(beside or {})}

    @property
    def url(self) -> str:
        """The base of an OpenAI-compatible endpoint."""
        return f"{self.base_url}/v1"

    def command(self) -> list[str]:
        return [sys.executable, "-m", JUDGE_PROGRAM, self._path, "--die-with-stdin", *self._options]

    def environment(self) -> Mapping[str, str]:
        return self._environment

    def refusal_error(self) -> ConfigError:
        lines = self._log.read_text(errors="replace").splitlines() if self._log is not None else []
        said = lines[-1] if lines and lines[-1].startswith(JUDGE_REFUSED) else "the judge refused to start"
        return ConfigError("reward.judge.path", self._path, f"{said}{self._hint()}")
