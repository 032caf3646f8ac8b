"""The run's own judge as a child of the orchestrator: a model whose layers are streamed from host memory (RollPacker 4.3).

Guarantees: those of :class:`orchestrator.rewards.host_launch.ServingChild`: it listens on loopback, at a port that it
keeps when it is restarted, to a token that only the run knows, and ends when the run does. How many of its layers stay
on the device is decided before each answer by :mod:`orchestrator.policies.serving.judge_residency`, in the server.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from orchestrator.api import ConfigError
from orchestrator.rewards.host_launch import ServingChild

PROGRAM = "vllm_rlplugin.judge.judge_server"


class JudgeHost(ServingChild):
    """``path``: Hugging Face folder; ``device``: cpu, cuda or auto; ``memory_mb``: of the device, 0: what is free;
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
        self._environment = {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads), **(beside or {})}

    @property
    def url(self) -> str:
        """The base of an OpenAI-compatible endpoint."""
        return f"{self.base_url}/v1"

    def command(self) -> list[str]:
        return [sys.executable, "-m", PROGRAM, self._path, "--die-with-stdin", *self._options]

    def environment(self) -> Mapping[str, str]:
        return self._environment

    def refusal_error(self) -> ConfigError:
        return ConfigError("reward.judge.path", self._path, f"the judge refused to start{self._hint()}")
