"""An agent program is tried before a run: one trajectory in the sandbox, whose requests are answered with a word.

Guarantees: one that ends by its own doing before it has asked the policy for anything (a module that it cannot import, a start
state that it cannot read) is a ConfigError with its last words; one that a word instead of an answer makes fail is a note; what
the machine did, or takes too long, is neither. The run's own endpoint and sandbox are not used; no process is left.
"""

from __future__ import annotations

import asyncio

from orchestrator.agents.agent_manager import AgentManager
from orchestrator.api import Completion, ConfigError, GenerationRequest, Sampling, TrajectoryError, stop_ids_of
from orchestrator.config import Config
from orchestrator.envs import Episode
from orchestrator.tasks.agent_task import AgentTask

_SECONDS = 20.0
_ITS_OWN = ("agent_error", "agent_output", "agent_silent", "agent_limit")


class _Word:
    """Says a word to whatever is asked."""

    def __init__(self, task: AgentTask) -> None:
        special = {task.pad_id, *stop_ids_of(task)}
        word = next((number for number in range(len(task.vocabulary)) if number not in special), task.end_id)
        self._said = (word, task.end_id)

    async def generate(self, request: GenerationRequest) -> Completion:
        """See the port."""
        said = self._said[: request.sampling.max_tokens]
        return Completion(request.request_id, said, (0.0,) * len(said), ((0, len(said)),), "stop")

    def note_fault(self, what: str, detail: str) -> None:
        """There is no run to note it in."""


def try_agent(config: Config, task: object) -> list[str]:
    """Notes, for people. Raises ConfigError."""
    if not isinstance(task, AgentTask):
        return []
    prompt = next(task.prompts("train", config.run.seed))
    episode = Episode("trial", "trial", prompt, 0.0)

    async def play() -> None:
        limits = {"step_timeout": _SECONDS, "trajectory_timeout": _SECONDS}
        manager = AgentManager(task.apart(), _Word(task), **limits, is_stale=lambda version: False)
        await manager.play(episode, Sampling(task.max_response_tokens, stop_token_ids=stop_ids_of(task)))

    try:
        asyncio.run(play())
    except TrajectoryError as error:
        if error.cause not in _ITS_OWN:
            return [f"the agent was not tried before the run: {error.cause}: {error.detail}"[:400]]
        why = f"{error.cause}: {error.detail}"
        if not episode.turns:
            fix = f"a trial before the run ended without a question to the policy: {why}"
            raise ConfigError("task.agent.command", list(config.task.agent.command), fix) from error
        return [f"in a trial, answered with a word, the agent ended as {why}; in a run such a trajectory fails"]
    return []
