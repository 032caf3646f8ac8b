"""A task whose trajectories an agent program makes: any program that speaks to an OpenAI-compatible base URL.

    [task]
    name = "agent"
    [task.agent]
    command = ["python3", "agent.py"]
    files = ["agent.py"]
    prompts = "prompts.txt"

A start state is a line of ``prompts``; the SHA-256 of the line decides whether it is trained on or held out. See docs/agents.md.
"""

from __future__ import annotations

import os
import random
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

from orchestrator.agents.agent_program import AgentProgram, read_files
from orchestrator.agents.agent_session import AgentBounds
from orchestrator.agents.chat_template import ChatFormat, ModelChat, VocabularyChat
from orchestrator.agents.openai_endpoint import AgentGateway, most_connections
from orchestrator.api import ConfigError, Environment, Prompt
from orchestrator.config.agent_keys import AgentSection
from orchestrator.sandbox import Sandbox, SandboxLimits
from orchestrator.tasks import splits

_SLOTS = 4096  # agents at once: rollout.environments says how many there are


class AgentTask:
    """Implements ``Task`` and :class:`orchestrator.agents.agent_manager.AgentProgramTask`. Raises ConfigError, and
    ValueError when there are not enough held-out prompts."""

    name = "agent"
    version = "agent 1"
    needs_sandbox = True

    def __init__(self, heldout: int = 1, settings: AgentSection | None = None) -> None:
        settings = settings or AgentSection()
        if not settings.command:
            raise ConfigError("task.agent.command", [], 'name the program: ["python3", "agent.py"]')
        self._states = _lines(settings.prompts)
        self._heldout = splits.heldout(self.name, self._draw, str, heldout)
        self.chat: ChatFormat = ModelChat(settings.tokenizer) if settings.tokenizer else VocabularyChat()
        self.vocabulary: Sequence[str] = self.chat.vocabulary
        self.pad_id, self.end_id, self.stop_ids = self.chat.pad_id, self.chat.end_id, self.chat.stop_ids
        self.max_turns = settings.max_turns
        self.max_response_tokens = settings.response_tokens
        self.max_context_tokens = settings.context_tokens
        if settings.response_tokens >= settings.context_tokens:
            fix = f"leaves no room for a prompt in task.agent.context_tokens = {settings.context_tokens}"
            raise ConfigError("task.agent.response_tokens", settings.response_tokens, fix)
        for folder in settings.readable:
            closed = _closed(Path(folder))
            if closed is not None:
                fix = f"sandboxes run as another user, who cannot enter {closed}: chmod o+x, or put it elsewhere"
                raise ConfigError("task.agent.readable", folder, fix)
            if not Path(folder).is_absolute() or not Path(folder).exists():
                raise ConfigError(
                    "task.agent.readable", folder, "give the absolute path of a file or folder that exists"
                )
        self.bounds = AgentBounds(
            settings.max_turns,
            settings.response_tokens,
            settings.context_tokens,
            settings.request_seconds,
            settings.concurrent,
            settings.own_sampling,
            settings.tool_calls,
        )
        limits = SandboxLimits(
            cpu_seconds=settings.cpu_seconds,
            memory_bytes=settings.memory_mb << 20,
            processes=settings.processes,
            open_files=64 + 2 * most_connections(settings.concurrent),  # two of a connection in what passes it on
        )
        self.program = AgentProgram(
            settings.command,
            read_files(settings.files),
            settings.readable,
            limits,
            settings.variables,
            settings.reward,
            settings.zero_exit,
        )
        self._port, self._body_bytes = settings.port, settings.body_mb << 20
        self._gateway: AgentGateway | None = None
        self._sandbox: Sandbox | None = None

    def gateway(self) -> AgentGateway:
        """One endpoint for all trajectories of a run."""
        self._gateway = self._gateway or AgentGateway(self._port, self._body_bytes)
        return self._gateway

    def sandbox(self) -> Sandbox:
        """Raises ConfigError on a machine without one."""
        self._sandbox = self._sandbox or Sandbox(self.program.limits, slots=_SLOTS)
        return self._sandbox

    def prompts(self, split: str, seed: int) -> Iterator[Prompt]:
        """See the protocol. Raises ValueError for another split than ``"train"`` and ``"heldout"``."""
        if split == "train":
            return splits.training(self.name, self._draw, str, f"train/{seed}")
        if split == "heldout":
            return iter(self._heldout)
        raise ValueError(f"split = {split!r}: must be 'train' or 'heldout'")

    def environment(self) -> Environment:
        """There is none: the agent asks, nobody asks it."""
        raise ConfigError(
            "task.name", self.name, "its trajectories come from an agent program, not from an environment"
        )

    def _draw(self, chance: random.Random) -> str:
        return chance.choice(self._states)


def _closed(path: Path) -> Path | None:
    """The folder above it that a sandbox started by root cannot enter."""
    above = [folder for folder in path.parents if folder.exists()] if os.geteuid() == 0 else []
    return next((folder for folder in above if not folder.stat().st_mode & stat.S_IXOTH), None)


def _lines(name: str) -> tuple[str, ...]:
    field = "task.agent.prompts"
    if not name:
        raise ConfigError(field, name, "name a file with one start state per line")
    try:
        text = Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        fix = f"cannot be read: {error}; paths are relative to the folder in which the run is started"
        raise ConfigError(field, name, fix) from error
    states = tuple(dict.fromkeys(line for line in text.splitlines() if line.strip()))
    if not states:
        raise ConfigError(field, name, "is empty: write one start state per line")
    return states
