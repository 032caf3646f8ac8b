"""Short and long rounds of a run: the planner's numbers, and the prompts, groups and events that stand for them.

Guarantees: the n-th prompt of the task's training stream is number n, before and after a resume, and what a checkpoint says
about them is refused when it is of another run; a group is started for the number that the planner says, and what becomes of
the group reaches the planner. Which number goes where is :mod:`orchestrator.policies.batching.round_planner`.

What is known of the lengths of prompts beforehand (`rollout.rounds.predict`): off (the default) nothing is asked, kept or
written; each prompt is asked for once; a predictor of the user that raises or says no number ends the run with its name, as
silence would look like prompts that are all short.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any, cast

from orchestrator.api import ConfigError, Prompt, RunError, Task, Trajectory, WorkerStats
from orchestrator.envs import Episode, next_prompt
from orchestrator.events import EventLog
from orchestrator.policies.batching.round_planner import (
    LANES,
    SHORT,
    Round,
    RoundPlanner,
    RoundRules,
    epoch_mistake,
    same_run,
)
from orchestrator.policies.prediction.prompt_lengths import (
    ForecastLengths,
    LengthHistory,
    LongPrompts,
    PromptLengthPredictor,
)
from orchestrator.settings.user_functions import named_function

HISTORY = "history"
PROGRESSIVE = "progressive"  # the run's own forecasts: `rollout.prediction`
FIELD = "rollout.rounds.predict"
_DISCARDED = ("zero_variance",)  # causes for which a complete group is filtered by design


class Rounds:
    """``seed``: of the prompts' stream. ``cap``: trajectories in flight at most, None: no limit but the round's. ``state``: of a
    checkpoint, None to begin with the stream's first prompt. Raises ConfigError for what no run could follow, and for the
    queue of another run."""

    def __init__(
        self,
        rules: RoundRules,
        task: Task,
        seed: int,
        events: EventLog,
        lengths: PromptLengths,
        *,
        cap: int | None = None,
        state: Mapping[str, Any] | None = None,
    ) -> None:
        self._events = events
        self._task = task
        if fix := epoch_mistake(rules):
            raise ConfigError("rollout.rounds.epoch_prompts", rules.epoch, fix)
        self.planner = RoundPlanner(rules)
        self._lengths = lengths
        self._run = {
            "task": task.name,
            "seed": seed,
            "prompts": rules.prompts,
            "responses": rules.responses,
            "epoch": rules.epoch,
        }
        self._stream: Iterator[Prompt] = task.prompts("train", seed)
        self._drawn = 0
        self._prompts: dict[int, Prompt] = {}  # those that may still be launched
        self._numbers: dict[str, int] = {}  # group -> number, of groups that are not trained yet
        self._played: dict[str, dict[str, None]] = {}  # group -> members that are played, where rewards wait for all
        self._cap = cap
        self._begun = 0.0
        self._waste = TokenWaste()
        self._bias = SpeedBias()
        self._ended: Round | None = None  # the latest round that has its batch
        if state is not None:
            try:
                self._restore(state)
            except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
                fix = f"cannot be read: {error!r:.300}; remove that checkpoint to continue from the one before it"
                raise RunError(f"the checkpoint's queue of rounds {fix}") from error

    # -- groups ------------------------------------------------------------------------------------------------------

    def begin_round(self) -> None:
        """Begin a round, unless one is under way."""
        if self.planner.round is None:
            self.planner.begin_round()
            self._begun = self._events.time()

    @property
    def kind(self) -> str:
        """Of the round under way, short or long; "" between two."""
        return "" if self.planner.round is None else self.planner.round.kind

    @property
    def launches(self) -> int:
        """Trajectories that the round under way starts, replacements not counted; 0 between two."""
        now = self.planner.round
        return 0 if now is None else now.target * now.members

    def wanted(self, under_way: int) -> int:
        """Members of the group that may start now; 0: none may. ``under_way``: trajectories in flight."""
        while self._lengths and (number := self.planner.divertible()) is not None:
            now = self.planner.round
            share = 0.0 if now is None else 1 - 1 / now.eta_prompts
            if not self._lengths.is_long(number, self._prompt(number), share):
                break
            self.planner.divert()
        size = self.planner.members_wanted()
        return size if not self._cap or under_way + size <= self._cap else 0

    def start_group(self, group_id: str) -> tuple[Prompt, int]:
        """The prompt of a new group, and how many members it starts with."""
        size = self.planner.members_wanted()
        number = self.planner.launch_next()
        self._numbers[group_id] = number
        return self._prompt(number), size

    def number(self, group_id: str) -> int:
        """The number of a group's prompt, -1 when it has left the round."""
        return self._numbers.get(group_id, -1)

    def settled(self, group_id: str, outcome: str, taken: Sequence[str] = ()) -> list[str]:
        """What the buffer says of a group: "complete", or why it was filtered. Where it was complete before, another complete
        one, of a later epoch, might be trained in its place. Returns those, which must not be: their prompts are launched again.
        ``taken``: groups of the batch that is being collected."""
        number = self._numbers.get(group_id)
        if number is None:
            return []
        if outcome == "complete":
            self.planner.mark_ready(number)
            return []
        was_complete = number in self.planner.ready
        self._forget(group_id)
        if outcome in _DISCARDED:
            self.planner.discard(number)
        else:
            self.planner.mark_lost(number)
            if number in self.planner.given_up:
                detail = f"prompt {number} is given up: {self.planner.rules.tries} groups of it failed"
                self._events.emit("alarm", what="rounds", detail=detail)
        early = self._put_back_early(taken) if was_complete else []
        self._prune()
        return early

    def played(self, group_id: str, trajectory_id: str) -> tuple[list[str], bool]:
        """A member is played and waits for its reward with all others. Returns (its group's members that are played, if these
        are as many as are wanted, else none; whether so many groups are played or ready that the round has enough)."""
        members = self._played.setdefault(group_id, {})
        members[trajectory_id] = None
        if len(members) != self.planner.rules.responses or group_id not in self._numbers:
            return [], False
        done = [group for group in self._running() if self._is_played(group)]
        enough = len(done) + len(self.planner.ready) >= self.planner.rules.prompts
        if enough:
            self.planner.narrow()
        return list(members), enough

    def losers(self, *, played_too: bool = True) -> list[str]:
        """Groups of the round that are not complete; ``played_too``: those that wait for nothing but rewards as well."""
        return [group for group in self._running() if played_too or not self._is_played(group)]

    def defer(self, group_id: str, episodes: Sequence[Episode]) -> None:
        """A group is too late for its round; ``episodes``: its members that are under way."""
        number = self._numbers[group_id]
        self._forget(group_id)
        self.planner.defer(number, lane_of(episodes, self._events.time()))

    def put_back(self, group_id: str) -> None:
        """A complete group that no batch took, where nothing outlives its batch."""
        number = self._numbers[group_id]
        self._forget(group_id)
        self.planner.put_back(number)

    def trained(self, group_ids: Mapping[str, int], reward: float) -> None:
        """A batch of these groups goes into training; with each, the tokens of its longest response. ``reward``: the mean."""
        known = [group for group in group_ids if group in self._numbers]
        self.planner.handed_over([self._numbers[group] for group in known])
        for group in known:
            self._lengths.seen(self._prompts[self._numbers[group]], group_ids[group])
            self._forget(group)
        self._prune()
        ended = self._ended
        if ended is None or (ended.kind == SHORT and ended.eta_responses <= 1):
            return  # it chose nobody for being fast
        if said := self._bias.batch(ended.kind, reward):
            self._events.emit("alarm", what="rounds", detail=said)

    def end_round(
        self, step: int, taken: Iterable[str], stats: Sequence[tuple[str, WorkerStats]], delivered: int
    ) -> None:
        """The round has its batch, the groups ``taken``. ``stats`` of the run's own engines, and the tokens that these
        ``delivered`` so far, say what was thrown away."""
        now, planner = self.planner.round, self.planner
        if now is None:
            raise RunError("a round ended that never began")
        seconds = round(self._events.time() - self._begun, 6)
        self._ended = now
        planner.end_round(seconds, [self._numbers[group] for group in taken if group in self._numbers])
        queue = {lane: planner.queue_length(lane) for lane in LANES if planner.rules.isolate or lane == LANES[0]}
        searched = {str(eta): round(cost, 6) for eta, cost in planner.search.costs.items()} if planner.search else {}
        self._events.emit(
            "round",
            step=step,
            number=now.index,
            round=now.kind,
            lane=now.lane,
            closing=now.closing,
            eta_prompts=now.eta_prompts,
            eta_responses=now.eta_responses,
            launched=now.launched,
            diverted=now.diverted,
            kept=planner.rules.prompts,
            deferred=now.deferred,
            put_back=now.put_back,
            lost=now.lost,
            discarded=now.discarded,
            discarded_ever=planner.discarded,
            given_up=len(planner.given_up),
            queue=planner.queue_length(),
            lanes=queue,
            thrown_away=self._waste.tokens_since_last(stats, delivered),
            seconds=seconds,
            search=searched,
        )

    def wasted(self, tokens: int) -> None:
        """A trajectory of the round ended untrained, with so many tokens in its finished turns."""
        self._waste.ended += tokens

    def waits(self) -> str:
        """Why no group starts, in words."""
        now = self.planner.round
        if now is None or now.over:
            return "between two rounds"
        alive = f"{len(self._running())} of the {now.kind} round's {now.target} prompts under way"
        return f"{alive}, {self._cap} trajectories at most (rollout.rounds.max_active)" if self._cap else alive

    # -- durable -----------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """For a checkpoint; JSON."""
        keys = [[number, self._prompts[number].key] for number in self.planner.outstanding]
        groups = [list(item) for item in self._numbers.items()]
        lengths = {"lengths": self._lengths.state()} if self._lengths else {}
        return {"run": self._run, "planner": self.planner.state(), "groups": groups, "keys": keys, **lengths}

    def _restore(self, state: Mapping[str, Any]) -> None:
        if different := same_run(self._run, state["run"]):
            raise ConfigError(
                "checkpoint",
                "its long-prompt queue",
                f"is from another run: {', '.join(different)}; resume that run",
            )
        self.planner.restore(state["planner"])
        if self._lengths and "lengths" in state:
            self._lengths.restore(state["lengths"])
        self._numbers = {str(group): int(number) for group, number in state["groups"]}
        keys = {int(number): str(key) for number, key in state["keys"]}
        for number in range(int(state["planner"]["next"])):
            prompt = self._draw()
            if number in keys:
                self._prompts[number] = prompt
                if prompt.key != keys[number]:
                    fix = f"is from another data set: prompt {number} is {prompt.key}; resume with the run's own task"
                    raise ConfigError("checkpoint", f"its long-prompt queue, prompt {number}: {keys[number]}", fix)

    def resumed(self) -> list[str]:
        """The checkpoint's buffer is back: what it does not hold is launched again. Returns the groups that must not be trained
        before that, as they are of a later epoch: their prompts are launched again too."""
        for number in self.planner.running:
            for group in [group for group, other in self._numbers.items() if other == number]:
                self._forget(group)
        self.planner.settle()
        return self._put_back_early()

    def _put_back_early(self, taken: Sequence[str] = ()) -> list[str]:
        early = dict.fromkeys(self.planner.overtaking())
        groups = [group for group, number in self._numbers.items() if number in early and group not in taken]
        for group in groups:
            self.put_back(group)
        return groups

    # -- prompts -----------------------------------------------------------------------------------------------------

    def _prompt(self, number: int) -> Prompt:
        while self._drawn <= number:
            at = self._drawn
            self._prompts[at] = self._draw()
        return self._prompts[number]

    def _draw(self) -> Prompt:
        prompt = next_prompt(self._stream, self._task.name)
        self._drawn += 1
        return prompt

    def _prune(self) -> None:
        """Forget prompts that are done with; one that was looked at before it is launched is not."""
        outstanding, drawn = dict.fromkeys(self.planner.outstanding), self.planner.drawn
        self._prompts = {n: prompt for n, prompt in self._prompts.items() if n in outstanding or n >= drawn}

    def _forget(self, group_id: str) -> None:
        del self._numbers[group_id]
        self._played.pop(group_id, None)

    def _running(self) -> list[str]:
        running = dict.fromkeys(self.planner.running)
        return [group for group, number in self._numbers.items() if number in running]

    def _is_played(self, group_id: str) -> bool:
        return len(self._played.get(group_id, ())) >= self.planner.rules.responses


class SpeedBias:
    """Whether those that finish first earn less. A short round keeps the fastest responses of a prompt (RollPacker, section 3);
    where a failure ends early they are the failures, and hardly a group has a signal. Long rounds, which keep all, tell."""

    LONG_ROUNDS = 16  # in a row, before it is said: of runs of 1,000 long rounds, in one of 100 if it were chance

    def __init__(self) -> None:
        self._short: list[float] = []  # mean rewards since the last long round
        self._both: list[tuple[float, float]] = []  # of periods in a row in which the short rounds earned less
        self._said = False

    def batch(self, kind: str, reward: float) -> str:
        """The mean reward of the batch of a short or long round. What is to be said of it, once; else ""."""
        if self._said:
            return ""
        if kind == SHORT:
            self._short.append(reward)
            return ""
        short, self._short = self._short, []
        if not short:
            return ""
        self._both = [*self._both, (fmean(short), reward)] if fmean(short) < reward else []
        if len(self._both) < self.LONG_ROUNDS:
            return ""
        self._said = True
        first, all_of_them = (fmean(column) for column in zip(*self._both, strict=True))
        return (
            f"responses that finish first earn less: {first:.3g} in short rounds, {all_of_them:.3g} in long ones, for "
            f"{len(self._both)} long rounds in a row; if failures end early here, set rollout.rounds.eta_responses = 1"
        )


class TokenWaste:
    """Tokens thrown away: those that the run's own engines made for requests that were aborted, and the finished turns of
    trajectories that were not trained. A server of others counts its users' tokens too, and those from before it was borrowed:
    what it made for aborted requests is not known. An engine that was restarted counts anew: what it had made is missing."""

    def __init__(self) -> None:
        self.ended = 0  # in finished turns
        self._generated: dict[str, int] = {}
        self._delivered = 0

    def tokens_since_last(self, stats: Sequence[tuple[str, WorkerStats]], delivered: int) -> int:
        """Since the last call."""
        made = 0
        for name, worker in stats:
            before = self._generated.get(name, 0)
            made += worker.generated - before if worker.generated >= before else worker.generated
            self._generated[name] = worker.generated
        aborted = max(0, made - (delivered - self._delivered))
        self._delivered = delivered
        ended, self.ended = self.ended, 0
        return aborted + ended


def longest(batch: Iterable[Trajectory]) -> dict[str, int]:
    """Of each group, the tokens of its longest trajectory, in the order of the batch."""
    found: dict[str, int] = {}
    for trajectory in batch:
        found[trajectory.group_id] = max(found.get(trajectory.group_id, 0), trajectory.generated_tokens)
    return found


def lane_of(episodes: Sequence[Episode], now: float) -> str:
    """What made a group late: whatever its unfinished members spent more of their time on."""
    environment = generation = 0.0
    for episode in episodes:
        acted = sum(turn.environment_seconds for turn in episode.turns)
        said = sum(turn.generate_seconds for turn in episode.turns)
        rest = max(0.0, now - episode.started_at - acted - said)
        environment += acted
        generation += said
        if episode.waiting_for in ("generation", "summary"):
            generation += rest
        elif episode.waiting_for.startswith(("environment", "start")):
            environment += rest
    return LANES[1] if environment > generation else LANES[0]


class PromptLengths:
    """``setting``: "" for nothing, "history" for the prompts' own lengths in earlier epochs,
    "progressive" for the run's own forecasts (``given``), or ``module:function`` of a
    predictor; ``given`` instead of it. False as a condition where nothing is predicted. Raises ConfigError."""

    def __init__(self, setting: str, given: PromptLengthPredictor | None = None) -> None:
        self._name = setting or "predictor"
        self._history = LengthHistory() if setting == HISTORY and given is None else None
        self._kept = given if isinstance(given, ForecastLengths) else self._history  # what a checkpoint has of it
        predict = given or self._history or (_predictor(setting) if setting else None)
        self._long = None if predict is None else LongPrompts(predict)
        self._asked = -1  # the last number that was asked for, and what was said
        self._answer = False

    def __bool__(self) -> bool:
        return self._long is not None

    def is_long(self, number: int, prompt: Prompt, share: float) -> bool:
        """Whether prompt ``number`` is among the longest ``share``. Raises RunError for a predictor that fails."""
        if self._long is None:
            return False
        if number != self._asked:
            try:
                self._answer = self._long.is_long(prompt, share)
            except Exception as error:  # whatever a function of others raises
                raise RunError(f"{FIELD} = {self._name!r} failed for prompt {prompt.key}: {error!r}") from error
            self._asked = number
        return self._answer

    def seen(self, prompt: Prompt, tokens: int) -> None:
        """It was trained; its longest response had so many tokens."""
        if self._history is not None:
            self._history.record_length(prompt, tokens)

    def state(self) -> dict[str, Any]:
        """For a checkpoint; JSON. With lengths of its own (history, forecasts) it grows with the data set, a number a prompt, up
        to :data:`orchestrator.policies.prediction.prompt_lengths.PROMPTS`."""
        history = {} if self._kept is None else self._kept.state()
        return {"history": history, "window": [] if self._long is None else self._long.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from :meth:`state`."""
        if self._kept is not None:
            self._kept.restore(state["history"])
        if self._long is not None:
            self._long.restore(state["window"])
        self._asked = -1


def _predictor(setting: str) -> PromptLengthPredictor:
    return cast(PromptLengthPredictor, named_function(FIELD, setting, ", or history"))
