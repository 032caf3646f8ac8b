"""A task whose trajectories an agent program makes: any program that speaks to an OpenAI-compatible base URL.

    [task]
    name = "agent"
    [task.agent]
    command = ["python3", "agent.py"]
    files = ["agent.py"]
    prompts = "prompts.txt"

A start state is a line of ``prompts``; the SHA-256 of the line decides whether it is trained on or held out. Training goes
through all of its lines in an order that the seed decides, and only then through all of them again. See docs/agents.md.
"""

from __future__ import annotations

import copy
import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import replace
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
        lines = _lines(settings.prompts)
        kept = sorted((key, line) for line in lines if splits.is_heldout(key := splits.key_of(line)))
        if len(kept) < heldout:
            raise ValueError(f"{heldout} held-out prompts (task.heldout_maps): there are {len(kept)}")
        self._heldout = tuple(splits.prompt_of(self.name, key, line) for key, line in kept[:heldout])
        apart = {line for _, line in kept}
        self._training = [line for line in lines if line not in apart]
        if not self._training:
            raise ConfigError("task.agent.prompts", settings.prompts, "has no line to train on: all are held out")
        self.epoch_prompts = len(self._training)
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

    def scored_elsewhere(self) -> None:
        """By a function or a judge: what the program prints is no reward."""
        if self.program.reward == "output":
            self.program = replace(self.program, reward="elsewhere")

    def said(self, action: Sequence[int]) -> str | None:
        """The text of an answer, as a reward function reads it; None: it was not ended."""
        return self.chat.text(action) if action and action[-1] in self.chat.stop_ids else None

    def apart(self) -> AgentTask:
        """The same with an endpoint and a sandbox of its own: those of a task belong to one event loop."""
        twin = copy.copy(self)
        twin._port, twin._gateway, twin._sandbox = 0, None, None
        return twin

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
            lines = splits.in_turn(self.name, self._training, seed)
            return (splits.prompt_of(self.name, splits.key_of(line), line) for line in lines)
        if split == "heldout":
            return iter(self._heldout)
        raise ValueError(f"split = {split!r}: must be 'train' or 'heldout'")

    def environment(self) -> Environment:
        """There is none: the agent asks, nobody asks it."""
        raise ConfigError(
            "task.name", self.name, "its trajectories come from an agent program, not from an environment"
        )


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
    states = tuple(dict.fromkeys(line for line in text.split("\n") if line.strip()))  # reading took the "\r" away
    if not states:
        raise ConfigError(field, name, "is empty: write one start state per line")
    return states
