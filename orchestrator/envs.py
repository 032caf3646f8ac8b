"""EnvManager: drives one environment through one episode (RollArt 6.1).

Guarantees: every call into an environment has a time limit; whatever the environment does (raise, hang, wrong types,
not-a-number, too much text, exit) ends only this trajectory, with a cause, and an environment that misbehaved is never
reused; where one does not begin the episode, another is asked; tokens go in and out as ids, nothing is re-tokenised; staleness
is checked at every turn boundary, and an answer that was called back as stale ends the trajectory. What a time limit that was
reached means, the task says: the trajectory failed, is truncated, or keeps what it has earned
(:data:`orchestrator.api.TimeoutMeaning`); one that has no turn has failed. Where an environment comes from and goes back to is
an :class:`~orchestrator.environments.environment_session.EnvironmentSource`.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from orchestrator.api import (
    Completion,
    Environment,
    GenerationRequest,
    LimitedReward,
    Observation,
    Prompt,
    RetryableError,
    RewardFunction,
    RunError,
    Sampling,
    Score,
    Task,
    TaskLimits,
    TimeoutMeaning,
    Trajectory,
    TrajectoryError,
    Turn,
    parts_of,
)
from orchestrator.api.errors import shown
from orchestrator.environments.environment_session import EnvironmentSource
from orchestrator.environments.environment_wire import error_text, observation_of, step_of
from orchestrator.environments.episode_context import EpisodeContext, Setup, no_room
from orchestrator.environments.inprocess import FreshEnvironments
from orchestrator.environments.lockstep import Lockstep
from orchestrator.placement.length_tracker import LengthTracker
from orchestrator.policies.episodes.context_rule import ContextRules

MAX_REWARD = 1e9  # its square, and a step's sums of it in float32, are finite
SHARD_LOST = "shard_lost"  # cause of a trajectory that ended with the process that played it

# Causes of a failed reset after which another environment may do
ANOTHER_MAY = (
    "environment_error",
    "environment_timeout",
    "environment_output",
    "environment_died",
    "environment_protocol",
)
TIME_LIMITS = ("environment_timeout", "trajectory_timeout")  # causes whose meaning the task says


class StaleTrajectory(Exception):
    """The staleness bound was passed: the trajectory is evicted."""


def next_prompt(prompts: Iterator[Prompt], task: str) -> Prompt:
    """The next training prompt. Raises RunError where none is left, and where the task's own code fails: no other prompt may
    take its place, as the stream is the same in every life."""
    try:
        prompt = next(prompts, None)
    except (Exception, SystemExit) as error:  # third-party code
        raise RunError(f"task {task}: its next training prompt cannot be drawn: {error_text(error)}") from error
    if prompt is None:
        raise RunError(f"task {task}: the training split has no prompts left")
    return prompt


class TurnServer(Protocol):
    """Who answers the turns of managers: the proxy, or in a shard the way to it."""

    async def generate(self, request: GenerationRequest) -> Completion:
        """See :class:`orchestrator.proxy.gateway.LLMProxy`."""

    def note_fault(self, what: str, detail: str) -> None:
        """Record something that went wrong and was handled."""


class EpisodePlayer(Protocol):
    """What plays the episodes of a run: one manager, or the managers of all shards."""

    # (episode, asked, answered, step began, step ended) of every turn, in the loop's time; set where turns are recorded
    on_turn: Callable[[Episode, float, float, float, float], None] | None

    @property
    def source(self) -> EnvironmentRoom:
        """Where environments come from."""

    async def play(self, episode: Episode, sampling: Sampling) -> None:
        """Run the episode to its end, filling ``episode``. Raises TrajectoryError or StaleTrajectory."""


class EnvironmentRoom(Protocol):
    """How many environments there are."""

    def resize(self, size: int) -> None:
        """See :class:`~orchestrator.environments.environment_session.EnvironmentSource`."""

    def stats(self) -> dict[str, Any]:
        """For the event log; empty when there is nothing to say."""


@dataclass(slots=True)
class Episode:
    """A trajectory while it is being made; what there is of it survives every failure."""

    id: str
    group_id: str
    prompt: Prompt
    started_at: float
    turns: list[Turn] = field(default_factory=list)
    env_version: str = ""
    truncated: bool = False
    waiting_for: str = "start"
    requests: int = 0
    context_tokens: int | None = 0  # that its next turn goes on from, in a tool or not begun too; None: it is played
    heldout: bool = False  # of an evaluation: what it took says nothing of the prompts that are trained
    environment_in_order: bool = True  # no call into it is open, and its last answer passed the checks
    begun: bool = False  # an environment was reset to its prompt
    unanswered: Turn | None = None  # what the environment was told, and has not answered yet
    earned: float | None = None  # the reward of one that a time limit ended; None: the reward function says it

    def trajectory(
        self, finished_at: float, errors: tuple[str, ...] = (), reward: float | None = None, scored_at: float = 0.0
    ) -> Trajectory:
        """The record of it."""
        return Trajectory(
            id=self.id,
            group_id=self.group_id,
            task=self.prompt.task,
            prompt=self.prompt,
            turns=tuple(self.turns),
            reward=None if reward is None else float(reward),
            env_version=self.env_version,
            env_seed=self.prompt.seed,
            truncated=self.truncated,
            errors=errors,
            started_at=self.started_at,
            finished_at=finished_at,
            scored_at=scored_at,
            metrics=reward.metrics if isinstance(reward, Score) else (),
        )


async def reward_of_episode(reward: RewardFunction, episode: Episode, finished_at: float, seconds: float) -> float:
    """What a played episode has earned; as :func:`score_of`."""
    if episode.earned is not None:
        return _within_range(episode.earned)
    return await score_of(reward, episode.trajectory(finished_at), seconds)


async def score_of(reward: RewardFunction, trajectory: Trajectory, seconds: float) -> float:
    """The reward, a float of at most :data:`MAX_REWARD` either way, with the metrics that its function gave (:class:`Score`),
    within ``seconds``; one with limits of its own is not cut off while a call waits for its turn.
    Raises TrajectoryError for anything else that the function may give or raise, and RunError for what it says that every
    trajectory would meet."""
    try:
        async with asyncio.timeout(None if isinstance(reward, LimitedReward) and reward.limited else seconds):
            found: object = await reward.score(trajectory)
    except (RunError, TrajectoryError, GeneratorExit):
        raise
    except asyncio.CancelledError as error:
        this = asyncio.current_task()
        if this is not None and this.cancelling():
            raise
        raise TrajectoryError("reward_error", "it was cancelled by nobody here") from error
    except RetryableError as error:
        raise TrajectoryError("reward_unavailable", str(error)) from error
    except TimeoutError as error:
        raise TrajectoryError("reward_timeout", str(error)) from error
    except BaseException as error:  # whatever it is: one reward ends no run
        raise TrajectoryError("reward_error", error_text(error)) from error
    try:
        value = float(found) if isinstance(found, int | float) and not isinstance(found, bool) else math.nan
    except OverflowError:
        value = math.inf
    if math.isnan(value):
        raise TrajectoryError("reward_not_finite", f"{shown(found)}")
    return Score(_within_range(value), found.metrics if isinstance(found, Score) else ())


def _within_range(reward: float) -> float:
    if abs(reward) > MAX_REWARD:
        cause = "reward_too_large" if math.isfinite(reward) else "reward_not_finite"
        raise TrajectoryError(cause, f"{reward:g}, and at most {MAX_REWARD:g} either way can be trained on")
    return reward


class EnvManager:
    """Plays episodes, one a call of :meth:`play`. ``is_stale(first_version)`` is the bound; ``source`` is where environments
    come from (default: a fresh object of the task for each episode). Limits of a mixture are those of the prompt's part."""

    def __init__(
        self,
        task: Task,
        proxy: TurnServer,
        *,
        step_timeout: float,
        reset_timeout: float | None = None,
        reset_tries: int = 1,
        start_timeout: float = 60.0,
        trajectory_timeout: float,
        is_stale: Callable[[int], bool],
        source: EnvironmentSource | None = None,
        lockstep: Lockstep | None = None,
        context: Setup | None = None,
        contexts: Mapping[str, Setup] | None = None,
        on_timeout: TimeoutMeaning | None = None,
    ) -> None:
        """``reset_tries``: environments that are asked until one begins the episode; ``on_timeout``: what a time limit means;
        None: what the task says."""
        self.source: EnvironmentSource = source or FreshEnvironments(
            task, step_timeout, proxy.note_fault, getattr(task, "environment_template", None), start_timeout
        )
        self.forecasts: LengthTracker | None = None  # set where lengths are predicted
        self.on_turn: Callable[[Episode, float, float, float, float], None] | None = None
        self._task = task
        self._proxy = proxy
        self._reset_tries = reset_tries
        self._limits = {"reset": reset_timeout or step_timeout, "step": step_timeout}
        self._trajectory_timeout = trajectory_timeout
        self._is_stale = is_stale
        self._lockstep = lockstep
        keep = ContextRules("keep", task.max_context_tokens, task.max_response_tokens, 0)
        self._context: Setup = context or (keep, (), None)
        self._contexts = contexts or {}  # of the parts of a mixture
        self._parts = parts_of(task)
        self._on_timeout = on_timeout

    async def play(self, episode: Episode, sampling: Sampling) -> None:
        """Run the episode to its end, filling ``episode``. Raises TrajectoryError or StaleTrajectory."""
        try:
            await self._play_through(episode, sampling)
        except TrajectoryError as error:
            if error.cause not in TIME_LIMITS or not self._ended_in_time(episode, error):
                raise

    def _ended_in_time(self, episode: Episode, error: TrajectoryError) -> bool:
        """Whether an episode that a time limit ended counts, as the task says; then it is truncated where it is."""
        meaning = self._on_timeout or getattr(self._part(episode), "on_timeout", "failed")
        if episode.unanswered is not None and meaning != "failed":
            episode.turns.append(episode.unanswered)
        if not episode.turns or meaning == "failed":
            return False
        episode.truncated = True
        if meaning == "partial":
            episode.earned = sum(turn.reward for turn in episode.turns)
        self._proxy.note_fault(error.cause, f"{episode.id}: {error.detail}; {meaning}")
        return True

    async def _play_through(self, episode: Episode, sampling: Sampling) -> None:

        def waiting(reason: str) -> None:
            episode.waiting_for = reason

        complete = False
        if self.forecasts is not None:
            self.forecasts.begin(episode.id, episode.prompt)
        try:
            await self._play(episode, sampling, waiting)
            complete = True
        finally:
            if self.forecasts is not None:
                self.forecasts.ended(episode.trajectory(0.0), complete, episode.heldout)

    async def _play(self, episode: Episode, sampling: Sampling, waiting: Callable[[str], None]) -> None:
        for tries in reversed(range(self._reset_tries)):
            environment = await self.source.acquire(
                episode.prompt, waiting
            )  # its time is the pool's, not the trajectory's
            try:
                async with asyncio.timeout(self._trajectory_timeout) as limit:
                    await self._turns(episode, sampling, environment, limit)
                return
            except TimeoutError as error:
                raise TrajectoryError(
                    "trajectory_timeout", f"after {self._trajectory_timeout} s in {episode.waiting_for}"
                ) from error
            except TrajectoryError as error:
                if episode.begun or not tries or error.cause not in ANOTHER_MAY:
                    raise
                self._proxy.note_fault("environment_reset", f"{episode.id}: {error}; another environment is asked")
            finally:
                await self.source.release(environment, episode.environment_in_order)

    async def _turns(
        self, episode: Episode, sampling: Sampling, environment: Environment, limit: asyncio.Timeout
    ) -> None:
        loop = asyncio.get_running_loop()
        episode.env_version = environment.version
        episode.waiting_for = "environment reset"
        first = await self._ask(episode, environment, "reset", episode.prompt)
        observation = observation_of(first, "reset")
        episode.begun = True
        part, (rules, _, _) = self._part(episode), self._rules(episode)
        context = EpisodeContext(rules)
        for _ in range(part.max_turns):
            self._check_tokens(episode, observation)
            if context.must_begin_anew(observation.token_ids):
                await self._begin_anew(episode, context, observation.token_ids, sampling)
            context.observe(observation.token_ids)
            room = part.max_context_tokens - len(context.tokens)
            if room < 1:
                if not episode.turns:
                    raise TrajectoryError("environment_output", "the first observation fills the context")
                episode.truncated = True
                return
            if self.forecasts is not None:
                self.forecasts.observed(episode.id, episode.prompt, episode.turns, observation.token_ids)
            await self._in_step(episode, "generation", limit)
            asked = loop.time()
            completion = await self._generate(episode, context, sampling, room)
            if cause := no_room(completion.error) if completion.finish_reason == "error" else "":
                completion = await self._once_more_shorter(episode, context, sampling, cause)
            answered = loop.time()
            if completion.finish_reason in ("error", "abort") or not completion.token_ids:
                raise TrajectoryError(f"generation_{completion.finish_reason}", completion.error)
            if self.forecasts is not None:
                turns, said = episode.turns, completion.token_ids
                self.forecasts.turn_over(episode.id, episode.prompt, turns, observation.token_ids, said)
            begins = context.acted(completion.token_ids)
            episode.unanswered = Turn(
                observation_ids=observation.token_ids,
                action_ids=completion.token_ids,
                logprobs=completion.logprobs,
                versions=completion.versions,
                generate_seconds=round(answered - asked, 6),
                context=begins,
                experts=completion.experts,
            )
            await self._in_step(episode, "environment step", limit)
            begun = loop.time()
            result = step_of(await self._ask(episode, environment, "step", completion.token_ids))
            episode.environment_in_order = True
            took = round(loop.time() - begun, 6)
            turn = replace(episode.unanswered, reward=result.reward, done=result.done, environment_seconds=took)
            episode.turns.append(turn)
            episode.unanswered = None
            if self.on_turn is not None:
                self.on_turn(episode, asked, answered, begun, loop.time())
            if result.done or result.truncated:
                episode.truncated = result.truncated
                return
            if self._is_stale(episode.turns[0].versions[0][0]):
                raise StaleTrajectory
            observation = result.observation
        episode.truncated = True

    async def _generate(
        self, episode: Episode, context: EpisodeContext, sampling: Sampling, room: int, attempt: str = ""
    ) -> Completion:
        """Ask for the next turn, or for a summary, in at most ``room`` tokens."""
        turn = len(episode.turns)
        request = GenerationRequest(
            request_id=f"{episode.id}/{turn}{attempt}",
            trajectory_id=episode.id,
            turn=turn,
            token_ids=context.tokens,
            sampling=sampling if room >= sampling.max_tokens else _shortened(sampling, room),
            task=episode.prompt.task,
            group_id=episode.group_id,
            experts_from=context.routed,
        )
        if self.forecasts is not None:
            request = await self.forecasts.rank(request)
        episode.context_tokens = len(request.token_ids)
        completion = await self._proxy.generate(request)
        self._check_fresh(completion)
        episode.context_tokens += len(completion.token_ids)
        if completion.experts is not None:
            context.routed = completion.experts.end
        episode.requests += 1
        return completion

    def _check_fresh(self, completion: Completion) -> None:
        """Raises StaleTrajectory for an answer that was called back (:meth:`LLMProxy.call_back`)."""
        if completion.finish_reason == "abort" and completion.versions and self._is_stale(completion.versions[0][0]):
            raise StaleTrajectory

    async def _once_more_shorter(
        self, episode: Episode, context: EpisodeContext, sampling: Sampling, cause: str
    ) -> Completion:
        """The engine had no room: leave turns out and ask once more; then the trajectory fails by ``cause``."""
        before, observation = len(context.tokens), context.withdraw()
        context.begin_anew("shortened", observation, shorter=True)
        context.observe(observation)
        room = self._part(episode).max_context_tokens - len(context.tokens)
        if len(context.tokens) >= before:
            raise TrajectoryError(cause, f"{before} tokens, of which none can be left out")
        completion = await self._generate(episode, context, sampling, room, "s")
        if completion.finish_reason == "error" and no_room(completion.error):
            raise TrajectoryError(cause, f"{before} tokens, then {len(context.tokens)}: {completion.error}")
        return completion

    async def _begin_anew(
        self, episode: Episode, context: EpisodeContext, observation: tuple[int, ...], sampling: Sampling
    ) -> None:
        """The context is full: leave the oldest turns out, and put a summary in their place where the rules say so. The
        policy's own summary is a turn like the others, and trained like them: it ends the old context."""
        rules, ask, summarise = self._rules(episode)
        least = context.least(observation) + rules.summary  # where not even a summary fits, none is made
        if rules.strategy == "restart" or least >= self._part(episode).max_context_tokens:
            context.begin_anew("restart", observation)
            return
        if summarise is not None:
            try:
                summary = tuple(summarise(context.tokens.to_list())[: rules.summary])
            except (Exception, SystemExit) as error:  # third-party code, as above
                raise TrajectoryError("summary_error", error_text(error)) from error
            context.begin_anew("function", observation, summary)
            return
        context.observe(ask)
        episode.waiting_for = "summary"
        asked = asyncio.get_running_loop().time()
        completion = await self._generate(episode, context, sampling, rules.summary)
        if completion.finish_reason in ("error", "abort") or not completion.token_ids:
            raise TrajectoryError(f"summary_{completion.finish_reason}", completion.error)
        seconds = round(asyncio.get_running_loop().time() - asked, 6)
        episode.turns.append(
            Turn(
                ask,
                completion.token_ids,
                completion.logprobs,
                completion.versions,
                generate_seconds=seconds,
                context=context.summarised(completion.token_ids),
                experts=completion.experts,
            )
        )
        context.begin_anew("summary", observation, completion.token_ids)

    def _part(self, episode: Episode) -> TaskLimits:
        return self._parts.get(episode.prompt.task, self._task)

    def _rules(self, episode: Episode) -> Setup:
        return self._contexts.get(episode.prompt.task, self._context)

    async def _in_step(self, episode: Episode, phase: str, limit: asyncio.Timeout) -> None:
        """The next phase of a turn begins; where all take their turns in step, when the others are there too."""
        if self._lockstep is not None:
            episode.waiting_for = f"the others before {phase}"
            await self._lockstep.arrive(episode.id, phase, limit)
        episode.waiting_for = phase

    async def _ask(self, episode: Episode, environment: Environment, what: str, argument: object) -> object:
        """An environment's answer within the limit of this call; whatever goes wrong becomes a TrajectoryError."""
        episode.environment_in_order = False
        try:
            async with asyncio.timeout(self._limits[what]) as limit:
                method: Callable[[object], Awaitable[object]] = getattr(environment, what)
                return await method(argument)
        except TimeoutError as error:
            if not limit.expired():  # the environment raised it itself
                raise TrajectoryError("environment_error", f"{what}: {error_text(error)}") from error
            raise TrajectoryError("environment_timeout", f"{what} took over {self._limits[what]} s") from error
        except (TrajectoryError, asyncio.CancelledError, GeneratorExit):
            raise
        except BaseException as error:  # third-party code: anything it raises is this trajectory's failure
            raise TrajectoryError("environment_error", f"{what}: {error_text(error)}") from error

    def _check_tokens(self, episode: Episode, observation: Observation) -> None:
        episode.environment_in_order = False
        size = len(self._task.vocabulary)
        tokens = observation.token_ids
        if len(tokens) > self._part(episode).max_context_tokens:  # first: it is soon seen
            raise TrajectoryError("environment_output", f"observation of {len(tokens)} tokens is over the context")
        if not tokens or min(tokens) < 0 or max(tokens) >= size:
            raise TrajectoryError("environment_output", f"observation must be token ids in [0, {size})")
        episode.environment_in_order = True


def _shortened(sampling: Sampling, room: int) -> Sampling:
    return Sampling(
        max_tokens=room,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        stop_token_ids=sampling.stop_token_ids,
        seed=sampling.seed,
    )
