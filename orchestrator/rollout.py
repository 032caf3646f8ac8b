"""The rollout side of a run: starts groups, lets each trajectory run on its own, and accounts for every one of them.

Guarantees: groups start whole and only while the gate allows; a trajectory's task ends in the ledger whatever ends it
(success, its own failure, staleness, cancellation by us or by anybody else); a failed member is replaced while its group's
refills last; no member holds its group for longer than ``rollout.group_timeout``. The pipeline opens and closes starts;
nothing here knows about training.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, InitVar, dataclass, replace
from statistics import fmean

from orchestrator.api import (
    Prompt,
    RewardFunction,
    RunError,
    Sampling,
    Task,
    Trajectory,
    TrajectoryError,
    parts_of,
    stop_ids_of,
)
from orchestrator.buffer import REFERENCE_LOST, SampleBuffer
from orchestrator.components import Shards
from orchestrator.config.rollout_keys import RolloutSection
from orchestrator.environments.lockstep import Lockstep
from orchestrator.envs import SHARD_LOST, Episode, EpisodePlayer, StaleTrajectory, next_prompt, reward_of_episode
from orchestrator.events import EventLog
from orchestrator.ledger import Ledger
from orchestrator.placement.length_tracker import LengthTracker
from orchestrator.policies.batching.coordination_modes import CoordinationMode
from orchestrator.policies.batching.trajectory_filters import FilterChain
from orchestrator.policies.training.learning_alarms import PromptRepeats
from orchestrator.proxy.gateway import LLMProxy
from orchestrator.tail_batching import Rounds, longest

FAILURES_TOLD = 16  # trajectories in a row: then the display says why they fail
FAILED_IN_ROW = 100  # trajectories, and
MANY = 100  # versions of a task's environments, and causes: of more nothing is said, they are not told apart
OTHER_CAUSE = "other_cause"
SLICE = 0.01  # seconds that prompts are drawn for before others have a turn
FAILED_BATCHES = 8  # batches: so many failures without one score between them end a run


@dataclass(frozen=True, slots=True)
class BatchSize:
    """``trajectories`` of a batch; ``members`` that a group begins with; ``redundancy``: what is started over what a batch
    takes."""

    trajectories: int
    members: int
    redundancy: float


@dataclass(eq=False)
class Rollout:
    """``keep(trajectory, state, cause)`` stores what ends untrained; ``fail(error)`` ends the run; ``rounds``: short and long
    ones, None: there are none. Put together by :func:`orchestrator.build.build_rollout`."""

    settings: RolloutSection
    size: BatchSize
    task: Task
    reward: RewardFunction
    events: EventLog
    ledger: Ledger
    _: KW_ONLY
    mode: CoordinationMode
    buffer: SampleBuffer
    filters: FilterChain
    proxy: LLMProxy
    environments: EpisodePlayer
    lockstep: Lockstep
    forecasts: LengthTracker | None
    rounds: Rounds | None
    prompts: PromptRepeats
    shards: Shards
    keep: Callable[[Trajectory, str, str], None]
    fail: Callable[[BaseException], None]
    life: InitVar[int]
    redundancy: InitVar[float | None]  # launched over needed to begin with, of a run that is resumed
    groups: int  # ever started: new numbers go on after a resume
    again: InitVar[tuple[int, ...]]  # of them, those that a resume starts once more
    trajectories: int

    def __post_init__(self, life: int, redundancy: float | None, again: tuple[int, ...]) -> None:
        self._life = f"-{life}" if life else ""  # ends each id: what a power cut took from the journal may be elsewhere
        self.gate = self.mode.start_gate(
            self.size.trajectories, self.size.redundancy, self.settings.environments, self.settings.buffer_limit
        )
        if redundancy is not None and self.settings.dynamic_concurrency:
            self.gate = replace(self.gate, redundancy=redundancy)
        self.buffer.owner = self
        self._lost = dict.fromkeys(again)
        self._again: deque[tuple[int, Prompt]] = deque()  # their prompts
        self._sampling = {
            part.name: Sampling(
                part.max_response_tokens, self.settings.temperature, stop_token_ids=stop_ids_of(self.task)
            )
            for part in (self.task, *parts_of(self.task).values())
        }
        self._members: dict[str, asyncio.Task[None]] = {}
        self.episodes: dict[str, Episode] = {}
        self._environment_versions: dict[str, list[str]] = {}  # by task
        self._causes: dict[str, None] = {}  # of failures
        self._end_reason: dict[str, tuple[str, str]] = {}  # why we cancel a member: (state, cause)
        self._replaced: dict[str, None] = {}  # those of them that another member replaces
        self._deadlines: dict[str, asyncio.TimerHandle] = {}  # of groups
        self._failed_in_row = 0
        self._last_failure = ""
        self.open = False  # for new groups
        self.behind = ""  # what new groups wait for beside the gate, in words; the pipeline sets it
        self._room = asyncio.Event()
        self.on_played: Callable[[Trajectory], None] | None = None  # an episode has come to its end, not scored yet
        self.next_version = 0  # the trainer's when the next batch goes into training; the pipeline sets it

    # -- what the pipeline calls -------------------------------------------------------------------------------------

    def open_starts(self) -> None:
        """New groups may start."""
        if self.rounds is not None:
            self.rounds.begin_round()
        self.open = True
        self._room.set()

    def close_starts(self) -> None:
        """No new trajectory starts, replacements included."""
        self.open = False  # for new groups

    def resize(self, environments: int) -> None:
        """So many trajectories in flight at most, and environments in the pool; those beyond play to their end."""
        self.gate = replace(self.gate, environments=environments)
        self.environments.source.resize(environments)
        self._room.set()

    def set_version(self, version: int) -> None:
        """The trainer's version moved: what is too stale ends, in the buffer and in the midst of an answer. A call into an
        environment is not broken off, which would cost the environment: its trajectory ends when it returns."""
        self.buffer.set_version(version)
        unknown: dict[str, None] = {}  # whose first token is not known yet
        for episode in list(self.episodes.values()):
            if episode.waiting_for != "generation":
                continue
            if not episode.turns:
                unknown[episode.id] = None
            elif self.buffer.too_stale(episode.turns[0].versions[0][0]):
                self._cancel(episode.id, "evicted_stale", "", replace=True)
        self.proxy.call_back(unknown, self.buffer.too_stale)
        self._room.set()

    def poke(self) -> None:
        """Something changed that the gate depends on."""
        self._room.set()

    async def start_groups(self) -> None:
        """Start whole groups while the gate allows. Runs until cancelled."""
        settings = self.settings
        await self._skip_prompts()
        while True:
            await self._room.wait()
            self._room.clear()
            while self._may_start():
                if self.rounds is not None:
                    group_id = self._next_group()
                    prompt, size = self.rounds.start_group(group_id)
                elif self._again:  # under its own number, in this life
                    number, prompt = self._again.popleft()
                    group_id, size = f"g{number:07d}{self._life}", self.size.members
                else:
                    group_id, prompt, size = self._next_group(), self._next_prompt(), self.size.members
                members = [self._new_id() for _ in range(size)]
                self.buffer.open(group_id, prompt, members, settings.member_refills, settings.group_size)
                for trajectory_id in members:
                    self._start_member(trajectory_id, group_id, prompt)
                self._set_deadline(group_id)

    async def _skip_prompts(self) -> None:
        """Draw again what was drawn before a resume: after a week that may take half a minute, and others have turns. What it
        lost is kept, to come first: each prompt of an epoch has its group."""
        loop = asyncio.get_running_loop()
        begun = loop.time()
        for number in range(self.groups if self.rounds is None else 0):
            prompt = self._next_prompt()
            if number in self._lost:
                self._again.append((number, prompt))
            if loop.time() - begun > SLICE:
                await asyncio.sleep(0)
                begun = loop.time()
        self.prompts.repeated_share()  # of those only what comes now is told

    def _may_start(self) -> bool:
        """Whether a group may start now."""
        return not self.behind and self._gate_allows()

    def _gate_allows(self) -> bool:
        under_way = len(self._members)
        size = self.size.members if self.rounds is None else self.rounds.wanted(under_way)
        return self.open and size > 0 and self.gate.may_start(size, under_way, self.buffer.scored, self._lead)

    def may_have_more(self) -> bool:
        """Whether another group is under way or may start: whoever waits for one waits for something."""
        return bool(self._members) or self._gate_allows()

    async def end_members(self, state: str, cause: str) -> None:
        """Cancel everything in flight and wait until it is accounted for."""
        for deadline in self._deadlines.values():
            deadline.cancel()
        self._deadlines.clear()
        while self._members:
            members = list(self._members.items())
            for trajectory_id, task in members:
                self._end_reason.setdefault(trajectory_id, (state, cause))
                task.cancel()
            await asyncio.gather(*(task for _, task in members), return_exceptions=True)
            await asyncio.sleep(0)  # done callbacks run on the next tick

    async def end_batch(self, step: int) -> None:
        """``get_batch`` has its groups: the round ends, and where nothing outlives a batch, all else that was started."""
        if self.rounds is not None:
            await self._end_round(self.rounds, step)
        if not self.mode.carries_over:
            await self.end_redundant()

    async def end_redundant(self) -> None:
        """End what is in flight and what waits in the buffer."""
        self.close_starts()
        await self.end_members("aborted_redundant", "")
        self.buffer.drop_untaken("aborted_redundant", "")

    async def _end_round(self, rounds: Rounds, step: int) -> None:
        """Defer what is too late for it; where trajectories cross an update, the next one begins at once."""
        rounds.planner.close_round()
        late = [self._members[name] for group_id in rounds.losers() for name in self._defer(rounds, group_id)]
        await asyncio.gather(*late, return_exceptions=True)
        await asyncio.sleep(0)  # done callbacks run on the next tick
        if not self.mode.carries_over:
            for group_id in self.buffer.untaken:
                rounds.put_back(group_id)
                self.buffer.withdraw(group_id, "deferred", "complete")
        borrowed = {state.worker.name for state in self.proxy.states if state.borrowed}
        own = [row for row in await self.proxy.stats() if row[0] not in borrowed]
        rounds.end_round(step, self.buffer.taken, own, self.proxy.tokens - self.proxy.borrowed_tokens)
        if self.mode.carries_over:
            rounds.begin_round()
            self._room.set()

    def _defer(self, rounds: Rounds, group_id: str) -> list[str]:
        """A prompt goes to the long-prompt queue. Returns those of its members that are ended for it."""
        under_way = [episode for episode in self.episodes.values() if episode.group_id == group_id]
        rounds.defer(group_id, under_way)
        self.buffer.withdraw(group_id, "deferred", "")
        for episode in under_way:
            self._cancel(episode.id, "deferred", "")
        return [episode.id for episode in under_way]

    @property
    def launches(self) -> int:
        """Trajectories that the present batch is collected from: what speculation adds is of short rounds only."""
        if self.rounds is not None:
            return self.rounds.launches
        return math.ceil(self.size.trajectories * self.gate.redundancy)

    @property
    def round_kind(self) -> str:
        """Of the round under way, "" where there are none."""
        return "" if self.rounds is None else self.rounds.kind

    def hand_over(self) -> None:
        """The batch is the trainer's; ``get_batch`` may collect the next one."""
        self.buffer.hand_over()

    def begin_training(self, trajectories: Sequence[Trajectory]) -> None:
        """On what was handed over. Until now a checkpoint has it, and a resume may lose some of it: its prompts are kept."""
        if self.rounds is not None and trajectories:
            self.rounds.trained(longest(trajectories), fmean(item.reward or 0.0 for item in trajectories))

    def restore(self, trajectories: list[Trajectory], version: int, environments: Mapping[str, Sequence[str]]) -> None:
        """A checkpoint's buffer is put back. ``environments``: the versions that were trained with, by task."""
        self._environment_versions = {task: list(versions) for task, versions in environments.items()}
        self.buffer.restore([self.shards.finish(trajectory) for trajectory in trajectories], version)
        self.next_version = version
        for group_id in self.rounds.resumed() if self.rounds is not None else ():
            self.buffer.withdraw(group_id, "deferred", "next_epoch")

    def on_take(self, group: list[Trajectory]) -> None:
        """``get_batch`` took a group."""
        for trajectory in group:
            self.ledger.move(trajectory.id, "taken")
        self._room.set()

    @property
    def in_flight(self) -> int:
        """Trajectories not scored yet."""
        return len(self._members)

    @property
    def _lead(self) -> int:
        """Versions that the next batch's training is ahead of what the rollout workers hold."""
        return self.next_version - self.proxy.version

    def waits(self) -> str:
        """What the trajectories in flight wait for, counted, in words; and why none ends well, where many failed in a row."""
        if self._failed_in_row < FAILURES_TOLD:
            return self._in_flight_waits()
        return f"{self._in_flight_waits()}; {self._failed_in_row} in a row failed, the last: {self._last_failure[:100]}"

    def _in_flight_waits(self) -> str:
        counts: dict[str, int] = {}
        for episode in self.episodes.values():
            counts[episode.waiting_for] = counts.get(episode.waiting_for, 0) + 1
        if counts:
            return ", ".join(f"{count} in {name}" for name, count in sorted(counts.items()))
        if not self.open:
            return "starts are closed"
        if self.rounds is not None and not self.rounds.wanted(self.in_flight):
            return self.rounds.waits()
        return self.gate.refusal_reason(self.size.members, self.in_flight, self.buffer.scored, self._lead)

    def note_uniform(self, step: int) -> None:
        """What dynamic sampling did for this batch, and an alarm when its limit let groups of equal rewards through."""
        settings, buffer = self.settings, self.buffer
        if not settings.dynamic_sampling:
            return
        filtered, kept, then = buffer.filtered_groups, buffer.uniform_taken, {}
        if settings.dynamic_concurrency:
            self.gate = self.gate.following(self.size.redundancy, settings.groups_per_step, filtered)
            then["redundancy"] = round(self.gate.redundancy, 6)
        self.events.emit("dynamic_sampling", step=step, filtered=filtered, kept=kept, **then)
        if buffer.uniform_taken:
            limit = f"rollout.max_filtered_groups = {settings.max_filtered_groups} was reached"
            detail = f"{buffer.uniform_taken} of {settings.groups_per_step} groups of step {step + 1} have equal rewards: {limit}"
            self.events.emit("alarm", what="dynamic_sampling", detail=detail)

    # -- one trajectory ----------------------------------------------------------------------------------------------

    def _next_prompt(self) -> Prompt:
        return next_prompt(self.prompts, self.task.name)

    def _next_group(self) -> str:
        self.groups += 1
        return f"g{self.groups - 1:07d}{self._life}"

    def _new_id(self) -> str:
        self.trajectories += 1
        return f"t{self.trajectories - 1:08d}{self._life}"

    def _start_member(self, trajectory_id: str, group_id: str, prompt: Prompt) -> None:
        self.ledger.start(trajectory_id, group_id, -1 if self.rounds is None else self.rounds.number(group_id))
        episode = Episode(trajectory_id, group_id, prompt, self.events.time())
        self.episodes[trajectory_id] = episode
        member = asyncio.create_task(self._member(episode), name=f"trajectory {trajectory_id}")
        self._members[trajectory_id] = member
        self.lockstep.enter(trajectory_id)

        def done(task: asyncio.Task[None]) -> None:
            try:
                self._member_done(trajectory_id, task)
            except Exception as error:  # noqa: BLE001  the loop would only write it down, and the run wait for ever
                at = f"the end of trajectory {trajectory_id}"
                self.fail(error if isinstance(error, RunError) else RunError(f"{at}: {error!r}"))

        member.add_done_callback(done)

    async def _member(self, episode: Episode) -> None:
        """Play, score, buffer."""
        sampling = self._sampling.get(episode.prompt.task, self._sampling[self.task.name])
        await self.environments.play(episode, sampling)
        episode.context_tokens = None
        if self.on_played is not None:
            self.on_played(episode.trajectory(self.events.time()))
        if self.mode.batch_rewards:
            self._note_played(episode)
            episode.waiting_for = "the end of the others"
            await self.lockstep.arrive(episode.id, "reward")
        self.ledger.move(episode.id, "scoring")
        self._note_version(episode)
        finished = self.events.time()
        episode.waiting_for = "reward"
        reward = await reward_of_episode(self.reward, episode, finished, self.settings.trajectory_timeout)
        scored = episode.trajectory(finished, reward=reward, scored_at=self.events.time())
        trajectory = await self.shards.finish_in_slices(scored)
        self.ledger.move(episode.id, "buffered")
        self._failed_in_row = 0
        if self.buffer.put(trajectory):
            self.buffer.lose(episode.group_id, episode.id, self._replacement(episode.group_id))

    def _note_version(self, episode: Episode) -> None:
        """An environment that changes in mid-run changes what is learned: say so, once for each new version."""
        known = self._environment_versions.setdefault(episode.prompt.task, [episode.env_version])
        if episode.env_version not in known and len(known) < MANY:
            detail = f"task {episode.prompt.task}: {episode.env_version!r} beside {', '.join(map(repr, known))}"
            self.events.emit("alarm", what="environment_version", detail=detail[:300])
            known.append(episode.env_version)

    def _member_done(self, trajectory_id: str, task: asyncio.Task[None]) -> None:
        """The member's task ended, one way or another: close its entry if it got no score."""
        del self._members[trajectory_id]
        self.lockstep.leave(trajectory_id)
        episode = self.episodes.pop(trajectory_id)
        self.proxy.forget(trajectory_id)
        state, cause = self._end_reason.pop(trajectory_id, ("", ""))
        error = _error_of(task)
        replace = self._replaced.pop(trajectory_id, "") is None
        if isinstance(error, StaleTrajectory | TrajectoryError):
            _forget_frames(error)
        if isinstance(error, StaleTrajectory):
            state, cause, replace = "evicted_stale", "", True
        elif isinstance(error, TrajectoryError):
            state, cause, replace = "failed", self._told_apart(error.cause), True
            self._note_failure(error)
        elif error is not None:
            self.fail(error if isinstance(error, RunError) else RunError(f"trajectory {trajectory_id}: {error!r}"))
            state, cause = "failed", "internal_error"
        elif task.cancelled() and not state:  # cancelled by nobody we know
            state, cause, replace = "failed", "cancelled", True
        if self.ledger.state(trajectory_id) in ("running", "scoring"):
            self.ledger.end(trajectory_id, state, cause)
            detail = (f"{cause}: {getattr(error, 'detail', '')}".strip(": "),) if state == "failed" else ()
            self._untrained(episode.trajectory(self.events.time(), detail), state, cause)
            replacement = self._replacement(episode.group_id) if replace else None
            self.buffer.lose(episode.group_id, trajectory_id, replacement)
        if not self._members:
            self.buffer.reconsider()
        self._room.set()

    def _told_apart(self, cause: str) -> str:
        """Others may name it, and each name is counted for as long as the run lasts."""
        if cause not in self._causes and len(self._causes) >= MANY:
            return OTHER_CAUSE
        self._causes[cause] = None
        return cause

    def _note_failure(self, error: TrajectoryError) -> None:
        """When nothing ends well any more (the reward's URL is down for good, every environment raises), say why and end,
        rather than begin trajectories for ever. A shard takes thousands with it, and has a limit of its own."""
        self._failed_in_row += error.cause != SHARD_LOST
        self._last_failure = f"{error.cause}: {error.detail}"
        if self._failed_in_row >= max(FAILED_IN_ROW, FAILED_BATCHES * self.size.trajectories):
            last = self._last_failure[:500]
            self.fail(
                RunError(f"{self._failed_in_row} trajectories in a row failed, none was scored; the last: {last}")
            )

    def on_surplus(self, members: list[str]) -> None:
        """Their group is complete without them (redundancy, RollArt 6.3)."""
        for trajectory_id in members:
            self._abort(trajectory_id, "surplus")

    def _abort(self, trajectory_id: str, cause: str, *, replace: bool = False) -> None:
        self._cancel(trajectory_id, "aborted_redundant", cause, replace=replace)

    def _cancel(self, trajectory_id: str, state: str, cause: str, *, replace: bool = False) -> None:
        task = self._members.get(trajectory_id)
        if task is not None and not task.done():
            self._end_reason.setdefault(trajectory_id, (state, cause))
            if replace:
                self._replaced[trajectory_id] = None
            task.cancel()

    def on_group(self, group_id: str, outcome: str) -> None:
        """The buffer says what became of a group: its prompt is done, or is launched again."""
        if self.rounds is not None:
            for early in self.rounds.settled(group_id, outcome, self.buffer.taken):
                self.buffer.withdraw(early, "deferred", "next_epoch")
            self._room.set()

    def _note_played(self, episode: Episode) -> None:
        """Where rewards are asked for when all have ended, a race for the first ones is decided by playing."""
        if self.rounds is None:
            return
        played, enough = self.rounds.played(episode.group_id, episode.id)
        if played:
            others = [
                other.id
                for other in self.episodes.values()
                if other.group_id == episode.group_id and other.id not in played
            ]
            self.buffer.excuse(episode.group_id, others)
            self.on_surplus(others)
        for group_id in self.rounds.losers(played_too=False) if enough else ():
            self._defer(self.rounds, group_id)

    def _set_deadline(self, group_id: str) -> None:
        """Let no member hold its group for longer than ``rollout.group_timeout``."""
        limit = self.settings.group_timeout
        if limit is not None:
            self._deadlines[group_id] = asyncio.get_running_loop().call_later(limit, self._group_is_late, group_id)

    def _group_is_late(self, group_id: str) -> None:
        """End the stragglers: the group is trained without them, or, where too few would be left, others replace them."""
        del self._deadlines[group_id]
        late, trainable = self.buffer.late(group_id)
        for trajectory_id in late:
            self._abort(trajectory_id, "group_timeout", replace=not trainable)
        if late and not trainable:
            self._set_deadline(group_id)

    def _replacement(self, group_id: str) -> Callable[[Prompt], str] | None:
        """How to start another member of a group; None while starts are closed."""
        if not self.open:
            return None

        def start(prompt: Prompt) -> str:
            trajectory_id = self._new_id()
            self._start_member(trajectory_id, group_id, prompt)
            return trajectory_id

        return start

    def on_evict(self, trajectory: Trajectory, state: str, cause: str) -> None:
        self.ledger.end(trajectory.id, state, cause)
        if cause == REFERENCE_LOST:  # what is kept of it is that it was
            trajectory = replace(trajectory, turns=(), errors=(*trajectory.errors, cause))
        self._untrained(trajectory, state, cause)
        self._room.set()

    def lost(self, trajectories: Sequence[Trajectory]) -> list[str]:
        return self.shards.lost(trajectories)

    def _untrained(self, trajectory: Trajectory, state: str, cause: str) -> None:
        if self.rounds is not None:
            self.rounds.wasted(trajectory.generated_tokens)
        self.keep(trajectory, state, cause)


def _error_of(task: asyncio.Task[None]) -> BaseException | None:
    """What it ended with, None: nothing, or it was cancelled. The task does not hold its frames any more: those of an episode
    hold its time limits, which hold the task. Such a cycle lives on for hours where survivors are not looked at
    (:mod:`orchestrator.runtime.garbage_collector`)."""
    try:
        task.result()
    except asyncio.CancelledError:
        return None
    except BaseException as error:  # noqa: BLE001  it is told apart by who asks
        return error
    return None


def _forget_frames(error: BaseException | None) -> None:
    """Nobody asks where it was raised: see :func:`_error_of`."""
    while error is not None and error.__traceback__ is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__
