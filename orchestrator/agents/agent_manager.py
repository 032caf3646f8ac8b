"""AgentManager: one trajectory is one agent program, from its start to its end.

Where :class:`orchestrator.envs.EnvManager` asks an environment for observations, here the agent asks for answers. The rest is the
same: requests go through the same proxy with the same priorities, staleness is checked before every one of them, the trajectory
has one time limit, and whatever the agent does (crash, hang, say nothing) ends only this trajectory, with a cause.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

from orchestrator.agents.agent_program import AgentProgram, reward_of
from orchestrator.agents.agent_session import AgentBounds, AgentSession
from orchestrator.agents.chat_template import ChatFormat
from orchestrator.agents.conversation import Conversation
from orchestrator.agents.openai_endpoint import AgentGateway
from orchestrator.api import (
    Completion,
    GenerationRequest,
    RetryableError,
    RunError,
    Sampling,
    Trajectory,
    TrajectoryError,
    Turn,
)
from orchestrator.environments.environment_wire import error_text
from orchestrator.envs import EnvManager, Episode, StaleTrajectory
from orchestrator.sandbox import Sandbox, SandboxOutcome


@runtime_checkable
class AgentProgramTask(Protocol):
    """A task whose trajectories an agent program makes (:class:`orchestrator.tasks.agent_task.AgentTask`)."""

    version: str
    chat: ChatFormat
    program: AgentProgram
    bounds: AgentBounds

    def gateway(self) -> AgentGateway:
        """The run's endpoint."""

    def sandbox(self) -> Sandbox:
        """Where agents run."""


class AgentManager(EnvManager):
    """Plays episodes of a task that is an :class:`AgentProgramTask`."""

    def __init__(self, task: Any, proxy: Any, **options: Any) -> None:
        super().__init__(task, proxy, **options)
        self._agents: AgentProgramTask = task

    async def _play(self, episode: Episode, sampling: Sampling, waiting: Callable[[str], None]) -> None:
        task = self._agents
        episode.env_version = task.version
        session = AgentSession(
            task.chat,
            GenerationRequest("", episode.id, 0, (), sampling, episode.prompt.task, group_id=episode.group_id),
            task.bounds,
            lambda request, turns: self._generated(episode, request, turns),
            self._is_stale,
            StaleTrajectory,
        )
        reward, done = 0.0, False
        try:
            async with asyncio.timeout(self._trajectory_timeout), task.gateway().open_session(session) as door:
                waiting("the agent")
                outcome = await self._until_end(session, episode, door.key, door.socket)
            if session.unanswered and not outcome.limit:  # however it takes that: it says nothing of the policy
                raise TrajectoryError("generation_timeout", session.unanswered)
            reward, done = reward_of(task.program, outcome), True
            if not session.conversation.answers:
                raise TrajectoryError("agent_silent", "it ended without asking the policy anything")
        except TimeoutError as error:
            text = f"after {self._trajectory_timeout} s in {episode.waiting_for}"
            raise TrajectoryError("trajectory_timeout", text) from error
        except (RunError, TrajectoryError, StaleTrajectory, asyncio.CancelledError, GeneratorExit):
            raise
        except (RetryableError, OSError) as error:  # of this machine, in the midst of this trajectory
            raise TrajectoryError("environment_start", error_text(error)) from error
        except BaseException as error:  # whatever it is: one agent ends no run
            raise TrajectoryError("agent_error", error_text(error)) from error
        finally:
            session.broken.cancel()
            episode.turns = session.conversation.turns(reward, done)
            episode.truncated = session.truncated
            self._tell_turns(episode, session.conversation)

    async def _until_end(self, session: AgentSession, episode: Episode, key: str, socket: str) -> SandboxOutcome:
        """Of the program, or of the trajectory: then its error is raised, and the program is killed."""
        task = self._agents
        run = task.program.run(task.sandbox(), episode.prompt, key, socket, self._trajectory_timeout)
        program = asyncio.ensure_future(run)
        try:
            ends: list[asyncio.Future[Any]] = [program, session.broken]
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if session.broken.done():
                session.broken.result()
            return await program
        finally:
            program.cancel()
            await asyncio.gather(program, return_exceptions=True)  # nothing of it is left

    async def _generated(self, episode: Episode, request: GenerationRequest, turns: Sequence[Turn]) -> Completion:
        """Ask the workers; forecasts are asked and told as for any other task."""
        episode.turns = list(turns)
        episode.waiting_for = "generation"
        shown = sum(len(turn.observation_ids) + len(turn.action_ids) for turn in turns)
        new = request.token_ids[shown:] or request.token_ids[-1:]
        if self.forecasts is not None:
            self.forecasts.observed(episode.id, episode.prompt, turns, new)
            request = await self.forecasts.rank(request)
        episode.context_tokens = len(request.token_ids)
        try:
            completion = await self._proxy.generate(request)
        finally:
            episode.waiting_for = "the agent"
        self._check_fresh(completion)
        episode.context_tokens += len(completion.token_ids)
        episode.requests += 1
        if self.forecasts is not None and completion.token_ids:
            self.forecasts.turn_over(episode.id, episode.prompt, turns, new, completion.token_ids)
        return completion

    def _tell_turns(self, episode: Episode, conversation: Conversation) -> None:
        """When the agent asked, was answered, and asked on."""
        answers = conversation.answers
        if self.on_turn is None or not answers:
            return
        asked = [answer.asked for answer in answers[1:]]
        for answer, following in zip(answers, [*asked, asyncio.get_running_loop().time()], strict=True):
            self.on_turn(episode, answer.asked, answer.answered, answer.answered, max(answer.answered, following))


class OutcomeReward:
    """The reward that the agent's end has given, implements :class:`orchestrator.api.RewardFunction`."""

    async def score(self, trajectory: Trajectory) -> float:
        """That of its turns."""
        return sum(turn.reward for turn in trajectory.turns)

    async def close(self) -> None:
        """Nothing is open."""

    def stats(self) -> dict[str, Any]:
        """Nothing is called."""
        return {}
